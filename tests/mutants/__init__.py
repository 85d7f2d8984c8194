"""Mutants of the Python package: `python -m tests.mutants FILE …` changes it place by place and runs its tests."""
