"""Values that notebooks show as pictures, and rich as text.

Meshes and tilings stand far below what draws them, so they do not import it: the package says which module to load
when the first of them is shown.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ._fork import importing

__all__ = ["Drawn", "Worded", "draw_with"]

_MODULE: list[str] = []


def draw_with(module: str) -> None:
    """Have `module.notebook_svg` and `module.notebook_html` draw the values, loaded when they are first needed."""
    _MODULE[:] = [module]


class Worded:
    """A value that says in words what it is, in a program that prints with rich: `rich.print(plan)`."""

    __slots__ = ()

    def _words(self) -> str:
        """Return what `str` says, or else what the value explains of itself, or its `repr`."""
        explain = getattr(self, "explain", None)
        if explain is None or type(self).__str__ is not object.__str__:
            return str(self)
        words: str = explain()
        return words

    def __rich__(self) -> Any:
        with importing:
            from rich.text import Text  # It is there: rich itself asks.
        return Text(self._words(), no_wrap=True, overflow="ignore")


class Drawn(Worded):
    """A value with a picture in notebooks, as IPython and Jupyter ask for it.

    >>> from shardwise import DeviceMesh
    >>> DeviceMesh((2,), ("x",))._repr_svg_()[:5]
    '<svg '
    """

    __slots__ = ()

    def _words(self) -> str:
        if type(self).__str__ is not object.__str__ or hasattr(self, "explain"):
            return super()._words()
        return _drawn("terminal_text", self) or repr(self)

    def _repr_svg_(self) -> str | None:
        return _drawn("notebook_svg", self)

    def _repr_html_(self) -> str | None:
        return _drawn("notebook_html", self)


def _drawn(name: str, value: Any) -> str | None:
    if not _MODULE:
        return None
    with importing:
        module = import_module(_MODULE[0])
    picture: str | None = getattr(module, name)(value)
    return picture
