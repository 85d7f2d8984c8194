"""Checkpoints written: what goes where, moved by the I/O engine, and published as a whole or not at all."""
