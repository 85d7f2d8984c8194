"""The names of a new checkpoint's tensors, and which of them are tied."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..._arguments import instance, optional
from ..._text import shown
from ...errors import LayoutError
from ..protocol import StoredCheckpoint
from .wanted import Wanted

__all__ = ["check_name", "new_names", "without_ties"]


def new_names(
    checkpoint: StoredCheckpoint, rename: Mapping[str, str] | Sequence[tuple[str, str]], only: str | None
) -> dict[str, str]:
    """New names by old ones, of the tensors that are chosen.

    Raises:
        LayoutError: if two get one name, an expression is not one, or none is chosen.
    """
    optional("only", only, str)
    pairs = list(rename.items()) if isinstance(rename, Mapping) else list(rename)
    names: dict[str, str] = {}
    origin: dict[str, str] = {}
    for old in checkpoint:
        new = old
        for pattern, replacement in pairs:
            new = _substituted("rename", pattern, replacement, new)
        check_name(new)
        if new in origin:
            raise LayoutError(f"rename calls both {shown(origin[new])} and {shown(old)} {shown(new)}")
        origin[new] = old
        if only is None or _compiled("only", only).search(new):
            names[old] = new
    if only is not None and not names:
        raise LayoutError(f"only is {shown(only)}, which is found in no name of {checkpoint.path}")
    return names


def _substituted(argument: str, pattern: str, replacement: str, name: str) -> str:
    try:
        return _compiled(argument, pattern).sub(replacement, name)
    except (re.error, IndexError) as error:
        raise LayoutError(
            f"{argument}: {shown(replacement)} is not a replacement for {shown(pattern)}: {error}"
        ) from None


def _compiled(argument: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise LayoutError(f"{argument}: {shown(pattern)} is not a regular expression: {error}") from None


def check_name(name: Any) -> None:
    """Refuse what a safetensors file cannot call a tensor."""
    instance("the name of a tensor", name, str)
    if not name or name == "__metadata__":
        raise LayoutError(f"a tensor cannot be called {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise LayoutError(f"the name {shown(name)} holds a lone surrogate, which no file can hold") from None


def without_ties(wanted: Iterable[Wanted], aliases: dict[str, str]) -> list[Wanted]:
    """The tensors, each once; notes down which names are tied to which."""
    first: dict[Any, Wanted] = {}
    kept, names = [], set()
    for tensor in wanted:
        if tensor.name in names:
            raise LayoutError(f"two tensors are to be called {shown(tensor.name)}")
        names.add(tensor.name)
        key = tensor.identity
        other = first.setdefault(key, tensor) if key is not None and tensor.pieces else tensor
        if other is tensor:
            kept.append(tensor)
        else:
            aliases[tensor.name] = other.name
    return kept
