"""The public names, as the sources give them: what each public module lists, without importing a framework."""

from __future__ import annotations

import ast
from pathlib import Path

__all__ = ["public_names"]

PACKAGE = Path(__file__).parents[2] / "python" / "shardwise"

#: What is not in the reference: the version, and modules whose names are there.
LEFT_OUT = {"shardwise.__version__", "shardwise.packed", "shardwise.deploy.megatron"}


def public_names() -> list[str]:
    """Give all public names: of the package, of its public modules, and of the modules that convert dialects."""
    modules = ["", "packed", "quantized", "dtensor", "deploy.megatron"]
    modules += ["execute.mpi", "execute.reads", "execute.torch", "execute.transports"]
    for path in sorted((PACKAGE / "interop").iterdir()):
        name = path.stem
        # `tf_variable` registers a class with TensorFlow and has no names for anyone.
        if not name.startswith("_") and name != "tf_variable" and (path.is_dir() or path.suffix == ".py"):
            modules.append(f"interop.{name}")
    found = [f"shardwise.{module}.{name}".replace("..", ".") for module in modules for name in _listed(module)]
    # Names of these that are at the top too are there.
    top = set(_listed(""))
    below = ("array", "computation", "deploy", "execute", "fit", "propagate", "reshard", "rules", "state", "store")
    found += [f"shardwise.{module}.{name}" for module in below for name in _listed(module) if name not in top]
    # `translation` is where the names of `interop` itself are made.
    found = [name.replace(".interop.translation.", ".interop.") for name in found]
    return sorted(set(found) - LEFT_OUT)


def _listed(module: str) -> list[str]:
    path = PACKAGE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == "__all__" for to in node.targets):
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []
