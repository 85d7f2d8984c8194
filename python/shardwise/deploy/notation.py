"""Presets as text, as the command line takes them: `vllm(tp=2, pp=2)`. Nothing is evaluated."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from .._text import shown
from ..errors import ParseError

__all__ = ["PresetCall", "parse_call"]

_LONGEST, _MOST = 4096, 64
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]{1,9}(?![\w.]))|(?P<word>[A-Za-z_]\w*)|'(?P<one>[^']*)'|\"(?P<two>[^\"]*)\"|"
    r"(?P<mark>[()\[\],=]))"
)


class PresetCall(NamedTuple):
    """A preset with its options.

    Attributes:
        values: The values that are given without a name.
        options: Those that have one: whole numbers, `True` and `False`, texts, and lists of whole numbers.
    """

    name: str
    values: tuple[Any, ...]
    options: dict[str, Any]


def parse_call(text: str) -> PresetCall:
    """Read a preset with its options; the text is bounded, and nothing in it is run.

    Raises:
        ParseError: if it is not one; the message says where.

    >>> parse_call("megatron(tp=2, layers=[3, 4], order='tp-cp-ep-dp-pp')")
    PresetCall(name='megatron', values=(), options={'tp': 2, 'layers': [3, 4], 'order': 'tp-cp-ep-dp-pp'})
    >>> parse_call("fsdp2(64)"), parse_call("vllm")
    (PresetCall(name='fsdp2', values=(64,), options={}), PresetCall(name='vllm', values=(), options={}))
    """
    return TokenReader(text).call()


class TokenReader:
    """A reader of one text, token by token."""

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise ParseError(f"the preset has {len(text)} characters; at most {_LONGEST} are read")
        self._text, self._at = text, 0

    def call(self) -> PresetCall:
        name = self._word()
        values: list[Any] = []
        options: dict[str, Any] = {}
        if self._take("("):
            while not self._take(")"):
                if values or options:
                    self._expect(",")
                    if self._take(")"):
                        break
                if len(values) + len(options) >= _MOST:
                    raise self._error(f"at most {_MOST} options")
                self._option(values, options)
        if self._text[self._at :].strip():
            raise self._error("the end")
        return PresetCall(name, tuple(values), options)

    def _option(self, values: list[Any], options: dict[str, Any]) -> None:
        before = self._at
        found = self._next()
        if found is not None and found["word"] is not None and self._take("="):
            name = found["word"]
            if name in options:
                raise ParseError(f"the preset {shown(self._text)} has {name} twice")
            options[name] = self._value()
            return
        self._at = before
        if options:
            raise self._error("an option with its name, as in tp=2")
        values.append(self._value())

    def _value(self) -> Any:
        if self._take("["):
            numbers: list[int] = []
            while not self._take("]"):
                if numbers:
                    self._expect(",")
                found = self._peek()
                if found is None or found["number"] is None or len(numbers) >= _LONGEST:
                    raise self._error("a whole number")
                self._at = found.end()
                numbers.append(int(found["number"]))
            return numbers
        found = self._peek()
        if found is None or found["mark"] is not None:
            raise self._error("a whole number, true, false, a text or a list of numbers")
        self._at = found.end()
        if found["number"] is not None:
            return int(found["number"])
        word = found["word"]
        if word is None:
            return found["one"] if found["one"] is not None else found["two"]
        return {"true": True, "false": False}.get(word.lower(), word)

    def _word(self) -> str:
        found = self._peek()
        if found is None or found["word"] is None:
            raise self._error("the name of a preset")
        self._at = found.end()
        word: str = found["word"]
        return word

    def _next(self) -> re.Match[str] | None:
        found = self._peek()
        if found is not None:
            self._at = found.end()
        return found

    def _peek(self) -> re.Match[str] | None:
        return _TOKEN.match(self._text, self._at)

    def _take(self, mark: str) -> bool:
        found = self._peek()
        if found is None or found["mark"] != mark:
            return False
        self._at = found.end()
        return True

    def _expect(self, mark: str) -> None:
        if not self._take(mark):
            raise self._error(f"{mark!r}")

    def _error(self, wanted: str) -> ParseError:
        rest = self._text[self._at :].strip()
        where = f"at {shown(rest)}" if rest else "at the end"
        return ParseError(f"the preset {shown(self._text)}: expected {wanted} {where}; write it as vllm(tp=2, pp=2)")
