"""Rewrites: other names and other orders for the tensors of a checkpoint, as data.

Each rewrite has two sides. A side says how some tensors are named and stored; both sides are of the same elements. So a
rewrite turned round is also a rewrite.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

from .._fork import importing
from .._text import shown
from ..errors import LayoutError, ParseError, ShardwiseError, ShardwiseWarning
from .numbers import NamedNumbers
from .rewrite import Rewrite, read_rewrite
from .templates import Template, parse_template

if TYPE_CHECKING:
    from .numbers import Config

__all__ = ["RewriteSet", "Rewrites", "read_quietly"]

#: The fate of a tensor that no rewrite takes.
Unmatched = Literal["keep", "drop", "refuse"]

#: The most rewrites of a file, each choice written out.
_MOST_REWRITES = 100_000
#: The most rules files that come after each other.
_MOST_AFTER = 8


@dataclass(frozen=True)
class RewriteSet:
    """The rewrites of one file: what is dropped first, the rewrites in order, and what happens to the rest."""

    rewrites: tuple[Rewrite, ...]
    drop: tuple[Template, ...]
    unmatched: Unmatched


@dataclass(frozen=True, init=False, repr=False)
class Rewrites:
    """Rewrites of a checkpoint's tensors: names, fused weights, stacked layers, transposed and padded dims.

    Args:
        rewrites: Mappings with `from`, `to`, and perhaps `size` and `optional`; the page `docs/rules-file.md` explains
            them. They are applied one after the other, each to the result of the one before.
        drop: templates of names that are left out first, in whichever direction the rewrites go.
        unmatched: what happens to tensors that no rewrite takes: `"keep"`, `"drop"`, or `"refuse"`.
        numbers: whole numbers by name, for use in packed dims and sizes.

    Raises:
        LayoutError: if a rewrite has an unknown key, its sides do not have the same tensors, or an order is not stated.
        TypeError: if a value is of the wrong type.

    `one + other` applies first one, then the other. Immutable, hashable, picklable and comparable.

    >>> fused = Rewrites(
    ...     [
    ...         {
    ...             "from": "h.{i}.{q,k,v}.weight",
    ...             "to": {"name": "layers.{i}.qkv.weight", "packed": "q:(4 2) + k:(2 2) + v:(2 2)"},
    ...         }
    ...     ]
    ... )
    >>> fused.inverse().inverse() == fused
    True
    """

    sets: tuple[RewriteSet, ...]
    #: Warnings about the files of the rewrites, such as that a file is for models of another type.
    _notes: tuple[str, ...] = field(default=(), compare=False)

    def __init__(
        self,
        rewrites: Iterable[Mapping[str, Any]] = (),
        *,
        drop: Iterable[str] = (),
        unmatched: Unmatched = "keep",
        numbers: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(rewrites, (str, bytes, Mapping)) or not isinstance(rewrites, Iterable):
            raise TypeError(f"rewrites must be a sequence of mappings, got {type(rewrites).__name__}")
        if isinstance(drop, (str, bytes)) or not isinstance(drop, Iterable):
            raise TypeError(f"drop must be a sequence of templates, got {shown(drop)}")
        if not isinstance(unmatched, str) or unmatched not in get_args(Unmatched):
            allowed = ", ".join(map(repr, get_args(Unmatched)))
            raise LayoutError(f"unmatched is {shown(unmatched)}; it must be one of {allowed}")
        read: list[Rewrite] = []
        known = numbers if isinstance(numbers, NamedNumbers) else NamedNumbers(numbers, None, "numbers")
        for number, one in enumerate(rewrites, 1):
            try:
                read += read_rewrite(one, known)
            except (ShardwiseError, TypeError) as error:
                raise type(error)(f"rewrite {number}: {error}") from None
            _check_count("rewrites", len(read))
        dropped: list[Template] = []
        for text in drop:
            dropped += parse_template(text, known).expanded()
            _check_count("drop", len(dropped))
        object.__setattr__(self, "sets", (RewriteSet(tuple(read), tuple(dropped), unmatched),))

    @classmethod
    def from_toml(cls, file: str | os.PathLike[str] | TextIO, *, config: Config | None = None) -> Rewrites:
        r"""Read the rewrites of a rules file; the page `docs/rules-file.md` has the format.

        Args:
            file: The path of the file, the name of one of the package's (`example_rules`), or an open text file.
            config: The model's configuration, for the file's `[numbers]`; see `LayoutMap.from_toml`.

        Raises:
            ParseError: if the file is not TOML, or has an unknown key or a value of the wrong type; if the
                configuration is not JSON.
            LayoutError: as for `Rewrites`, and if a number that a rewrite needs is missing.
            OSError: if the file cannot be read.
            ShardwiseWarning: if the file states the types of its models, and the configuration has another type.

        >>> import io
        >>> Rewrites.from_toml(io.StringIO("[[rewrite]]\nfrom = 'h.{i}.w'\nto = 'layers.{i}.w'"))
        Rewrites([{'from': 'h.{i}.w', 'to': 'layers.{i}.w'}])
        """
        with importing:
            made = read_quietly(file, config)
        for note in made._notes:
            warnings.warn(note, ShardwiseWarning, stacklevel=2)
        return made

    def inverse(self) -> Rewrites:
        """Return the rewrites that lead back: the last one first, each from its `to` to its `from`.

        Raises:
            LayoutError: if a rewrite pads a dim and has no `size`.

        >>> Rewrites([{"from": "a.{i}", "to": "b.{i}"}]).inverse()
        Rewrites([{'from': 'b.{i}', 'to': 'a.{i}'}])
        """
        sets = [
            replace(one, rewrites=tuple(rewrite.turned() for rewrite in reversed(one.rewrites)))
            for one in reversed(self.sets)
        ]
        return self._of(sets, self._notes)

    def __add__(self, other: Rewrites) -> Rewrites:
        if not isinstance(other, Rewrites):
            return NotImplemented
        return self._of((*self.sets, *other.sets), (*self._notes, *other._notes))

    def __bool__(self) -> bool:
        """Return whether there is any rewrite or dropped name."""
        return any(one.rewrites or one.drop or one.unmatched != "keep" for one in self.sets)

    @classmethod
    def _of(cls, sets: Iterable[RewriteSet], notes: Iterable[str]) -> Rewrites:
        made = cls()
        object.__setattr__(made, "sets", tuple(sets))
        object.__setattr__(made, "_notes", tuple(dict.fromkeys(notes)))
        return made

    def __repr__(self) -> str:
        return " + ".join(map(_set_text, self.sets))


def _check_count(what: str, count: int) -> None:
    if count > _MOST_REWRITES:
        raise LayoutError(
            f"{what}: {count:,} or more rewrites once their choices are written out; the limit is {_MOST_REWRITES:,}"
        )


def _set_text(one: RewriteSet) -> str:
    arguments = [repr([rewrite.described() for rewrite in one.rewrites])]
    if one.drop:
        arguments.append(f"drop={[template.text for template in one.drop]!r}")
    if one.unmatched != "keep":
        arguments.append(f"unmatched={one.unmatched!r}")
    return f"Rewrites({', '.join(arguments)})"


def read_quietly(file: Any, config: Config | None, depth: int = 0) -> Rewrites:
    """Read the rewrites of a rules file as `Rewrites.from_toml` does, but without its warnings.

    `depth` counts the files that come after this one.
    """
    with importing:
        from .shipped import rules_named
        from .toml import other_model, read_document, read_models, read_rewrites
        from .toml_tables import errors_at

    document: Any = read_document(file)
    found, numbers, source = read_rewrites(document, config)
    before = Rewrites()
    if "after" in found:
        if not isinstance(found["after"], str):
            raise ParseError(f"{source}: after must be the name of a rules file, got {shown(found['after'])}")
        if depth == _MOST_AFTER:
            raise ParseError(f"{source}: more than {_MOST_AFTER} files come after each other")
        before = read_quietly(rules_named(found["after"], document.file), config, depth + 1)
    with errors_at(source):
        own = Rewrites(
            found.get("rewrite", ()),
            drop=found.get("drop", ()),
            unmatched=found.get("unmatched", "keep"),
            numbers=numbers,
        )
    note = other_model(read_models(document), config, source)
    notes = (*before._notes, *([] if note is None else [note]))
    return Rewrites._of([*(before.sets if before else ()), *own.sets], notes)
