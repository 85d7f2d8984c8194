"""Modules that are imported at their first use, to keep the import of the package fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from ._fork import importing

__all__ = ["import_with_frameworks", "lazy", "load_with"]

#: The module that is imported once a framework is, by the framework.
_WITH: dict[str, str] = {}


def load_with(framework: str, module: str) -> None:
    """Have `module` imported when a scope is entered and `framework` has been imported."""
    _WITH[framework] = module


def import_with_frameworks() -> None:
    """Import the modules of all frameworks that have been imported."""
    for framework, module in _WITH.items():
        if framework in sys.modules:
            with importing:
                import_module(module)


def lazy(
    scope: dict[str, Any],
    names: Mapping[str, Sequence[str]],
    modules: Sequence[str] = (),
    elsewhere: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a module whose names are made in others.

    Args:
        scope: The `globals()` of the module, whose `__all__` lists its public names.
        names: For each other module, relative to this one, the names that it has.
        modules: Submodules that are names too.
        elsewhere: For names that other libraries have, the names of what they are here, for the message.
    """
    package: str = scope["__name__"]
    module_of = {name: module for module, listed in names.items() for name in listed}

    def getattr_(name: str) -> Any:
        if name not in modules and name not in module_of:
            hint = f"; here it is {elsewhere[name]}" if elsewhere and name in elsewhere else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        with importing:
            if name in modules:
                return import_module(f".{name}", package)
            value = scope[name] = getattr(import_module(f".{module_of[name]}", package), name)
        return value

    def dir_() -> list[str]:
        return sorted((*scope["__all__"], *modules))

    return getattr_, dir_
