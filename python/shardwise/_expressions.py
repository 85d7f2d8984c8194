"""Expressions of whole numbers in texts: `heads // groups * head_dim`, `stage[i]`.

Whole numbers, names, `+ - * // %` with Python's meaning, parentheses, and `name[…]`, an entry of a named list. They are
data: nothing is called, and no text is given to Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ._text import counted, shown
from .errors import LayoutError, ParseError, SizeOverflowError

__all__ = ["NAME", "Expression", "parse_expression", "read_expression"]

#: A name, which may have dots: `text_config.num_attention_heads`.
NAME = r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*"

_TOKEN = re.compile(rf"(?P<number>[0-9]+)|(?P<name>{NAME})|(?P<mark>//|[-+*%()\[\]])")
_SPACE = re.compile(r"[ \t]*")
_LARGEST = 2**63 - 1
_LONGEST, _DEEPEST = 1000, 32

#: One step of a calculation with a stack: a number or a name is put on it, an operation takes its operands from it.
_Operation = tuple[Literal["number"], int] | tuple[Literal["name", "entry", "operation"], str]

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "//": lambda left, right: left // right,
    "%": lambda left, right: left % right,
}


@dataclass(frozen=True)
class Expression:
    """An expression of whole numbers; `parse_expression` makes one.

    Attributes:
        text: As it was written.
        steps: The calculation.
    """

    text: str
    steps: tuple[_Operation, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the expression, each once, in the order in which they are needed."""
        return tuple(dict.fromkeys(str(value) for kind, value in self.steps if kind in ("name", "entry")))

    def value(self, names: Mapping[str, int | Sequence[int]]) -> int:
        """Calculate the expression.

        Args:
            names: The value of each name: a whole number, or a list of them.

        Raises:
            LayoutError: if a name is not there, a divisor is 0, a list has no such entry, or is used like a number.
            SizeOverflowError: if a result does not fit in a signed 64-bit integer.

        >>> parse_expression("heads // groups * head_dim").value({"heads": 32, "groups": 8, "head_dim": 128})
        512
        >>> parse_expression("stage[i + 1]").value({"stage": [0, 0, 1, 1], "i": 1})
        1
        """
        stack: list[int] = []
        for kind, value in self.steps:
            if isinstance(value, int):
                stack.append(value)
            elif kind == "name":
                stack.append(self._number(value, names))
            elif kind == "entry":
                stack.append(self._entry(value, stack.pop(), names))
            else:
                right, left = stack.pop(), stack.pop()
                if right == 0 and value in ("//", "%"):
                    raise LayoutError(f"{shown(self.text)} divides {left} by 0{self._said(names)}")
                stack.append(_OPERATIONS[value](left, right))
            if not -_LARGEST <= stack[-1] <= _LARGEST:
                raise SizeOverflowError(
                    f"{shown(self.text)} becomes {shown(stack[-1])}, over the limit of {_LARGEST}{self._said(names)}"
                )
        return stack[0]

    def _found(self, name: str, names: Mapping[str, int | Sequence[int]]) -> int | Sequence[int]:
        if name not in names:
            known = f"known are {', '.join(list(names)[:20])}" if names else "no name is known"
            raise LayoutError(f"{shown(self.text)}: the number {name} is not given; {known}")
        return names[name]

    def _number(self, name: str, names: Mapping[str, int | Sequence[int]]) -> int:
        found = self._found(name, names)
        if isinstance(found, Sequence):
            raise LayoutError(f"{shown(self.text)}: {name} is the list {shown(list(found))}; write {name}[…]")
        return found

    def _entry(self, name: str, place: int, names: Mapping[str, int | Sequence[int]]) -> int:
        found = self._found(name, names)
        if not isinstance(found, Sequence):
            raise LayoutError(f"{shown(self.text)}: {name} is the number {found}, not a list")
        if not 0 <= place < len(found):
            raise LayoutError(
                f"{shown(self.text)}: the list {name} has {counted(len(found), 'entry', 'entries')}, and none at "
                f"{place}"
            )
        return found[place]

    def _said(self, names: Mapping[str, int | Sequence[int]]) -> str:
        said = [f"{name} = {shown(names[name])}" for name in self.names]
        return f", where {', '.join(said)}" if said else ""


def parse_expression(text: object) -> Expression:
    """Read an expression, which is the whole text.

    Raises:
        ParseError: if it is not an expression; the message says where.
        TypeError: if `text` is not a string.

    >>> parse_expression("2 * (heads + 2 * groups)").names
    ('heads', 'groups')
    """
    if not isinstance(text, str):
        raise TypeError(f"an expression must be a string, got {shown(text)}")
    if len(text) > _LONGEST:
        raise ParseError(f"an expression has up to {_LONGEST} characters, got {shown(text)}")
    reader = _ExpressionReader(text, 0, spaces=True)
    reader.sum(0)
    reader.skip()
    if reader.at < len(text):
        raise reader.error("an operator")
    return Expression(text, tuple(reader.steps))


def read_expression(text: str, at: int) -> tuple[Expression, int]:
    """Read the expression without spaces that begins at a character, and give it with the place after it.

    Raises:
        ParseError: if none begins there.

    >>> read_expression("(heads//2 d)", 1)[1]
    9
    """
    reader = _ExpressionReader(text, at, spaces=False)
    reader.sum(0)
    return Expression(text[at : reader.at], tuple(reader.steps)), reader.at


class _ExpressionReader:
    def __init__(self, text: str, at: int, *, spaces: bool) -> None:
        self.steps: list[_Operation] = []
        self.at = at
        self._text = text
        self._end = at + _LONGEST
        self._spaces = spaces

    def skip(self) -> None:
        if self._spaces:
            space = _SPACE.match(self._text, self.at)
            assert space is not None
            self.at = space.end()

    def sum(self, depth: int) -> None:
        """Read terms with + and - between them."""
        if depth > _DEEPEST:
            raise ParseError(f"an expression has up to {_DEEPEST} brackets in each other, got {shown(self._text)}")
        self._chain(("+", "-"), lambda: self._chain(("*", "//", "%"), lambda: self._operand(depth)))

    def error(self, wanted: str) -> ParseError:
        found = self._text[self.at : self.at + 20]
        return ParseError(f"expected {wanted} at character {self.at}, found {found!r} in {shown(self._text)}")

    def _chain(self, marks: tuple[str, ...], read: Callable[[], None]) -> None:
        read()
        while (mark := self._mark()) in marks:
            self._take(mark)
            read()
            self.steps.append(("operation", mark))

    def _operand(self, depth: int) -> None:
        self.skip()
        found = _TOKEN.match(self._text, self.at)
        if found is None or found["mark"] not in (None, "(", "-"):
            raise self.error("a number, a name or a bracket")
        self._take(found[0])
        if found["number"] is not None:
            # The length first: Python takes long over very many digits.
            if len(found[0]) > 19 or int(found[0]) > _LARGEST:
                raise ParseError(f"the number {shown(found[0])} is over the limit of {_LARGEST}")
            self.steps.append(("number", int(found[0])))
        elif found["name"] is not None:
            if self._mark() != "[":
                self.steps.append(("name", found[0]))
                return
            self._take("[")
            self.sum(depth + 1)
            self._close("]")
            self.steps.append(("entry", found[0]))
        elif found["mark"] == "(":
            self.sum(depth + 1)
            self._close(")")
        else:
            self.steps.append(("number", 0))
            self._operand(depth + 1) if depth < _DEEPEST else self.sum(depth + 1)
            self.steps.append(("operation", "-"))

    def _mark(self) -> str | None:
        self.skip()
        found = _TOKEN.match(self._text, self.at)
        return None if found is None else found["mark"]

    def _close(self, mark: str) -> None:
        if self._mark() != mark:
            raise self.error(repr(mark))
        self._take(mark)

    def _take(self, text: str) -> None:
        self.at += len(text)
        if self.at > self._end:
            raise ParseError(f"an expression has up to {_LONGEST} characters, got {shown(self._text)}")
