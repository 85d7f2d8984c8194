"""Leaves out the doctests of modules whose framework is not installed, or needs a process of its own."""

from importlib.util import find_spec

collect_ignore = ["shardwise/interop/keras"]  # tests/interop runs them
for module, framework in {
    "jax": "jax",
    "tensorflow": "tensorflow",
    "tf_variable": "tensorflow",
    "transformers": "transformers",
}.items():
    if not find_spec(framework):
        collect_ignore.append(f"shardwise/interop/{module}.py")
