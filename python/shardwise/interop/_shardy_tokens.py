"""The tokens of Shardy's text."""

from __future__ import annotations

import re

from .._text import shown
from ..errors import ParseError

__all__ = ["ShardyReader"]

_TOKEN = re.compile(
    r'\s*(?:(?P<string>"(?:[^"\\\n]|\\[0-9A-Fa-f]{2}|\\[nt"\\])*")|(?P<symbol>@[A-Za-z_][\w$.]*|@(?="))'
    r"|(?P<word>#?[A-Za-z_][\w.]*)|(?P<number>-?\d+)|(?P<mark>[<>\[\]{}(),:=?]))",
    re.ASCII,
)


def _unescaped(token: str) -> bytes:
    simple = {b"n": b"\n", b"t": b"\t", b'"': b'"', b"\\": b"\\"}
    return re.sub(
        rb'\\([0-9A-Fa-f]{2}|[nt"\\])',
        lambda match: simple.get(match[1]) or bytes.fromhex(match[1].decode()),
        token[1:-1].encode(),
    )


class ShardyReader:
    """The tokens of a text, with one of them looked at in advance."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {type(text).__name__}")
        self.text = text
        self._position = 0
        self._next = _TOKEN.match(text)

    def _take(self, kind: str, wanted: str) -> str:
        found = self._next
        if found is None or found[kind] is None:
            raise self.error(wanted)
        self._position = found.end()
        self._next = _TOKEN.match(self.text, self._position)
        return found[kind]

    def error(self, wanted: str) -> ParseError:
        found = self.text[self._position : self._position + 40].lstrip()[:20]
        return ParseError(
            f"expected {wanted} at character {self._position}, found {shown(found)} in {shown(self.text[:200])}"
        )

    def refusal(self, what: str) -> ParseError:
        return ParseError(f"{what}, repeated before character {self._position} of {self.text[:200]!r}")

    def at(self, mark: str) -> bool:
        return self._next is not None and self._next["mark"] == mark

    def at_word(self) -> bool:
        return self._next is not None and self._next["word"] is not None

    def skip(self, mark: str) -> bool:
        found = self.at(mark)
        if found:
            self._take("mark", mark)
        return found

    def expect(self, mark: str) -> None:
        if not self.skip(mark):
            raise self.error(f"a {shown(mark)}")

    def skip_word(self, *words: str) -> bool:
        found = self._next is not None and self._next["word"] in words
        if found:
            self._take("word", "a word")
        return found

    def word(self, *words: str) -> str:
        if words and (self._next is None or self._next["word"] not in words):
            raise self.error(" or ".join(words))
        return self._take("word", "a word")

    def number(self) -> int:
        digits = self._take("number", "a number")
        if len(digits) > 20:
            raise self.error("a number below 2**63")
        return int(digits)

    def string(self) -> str:
        token = self._take("string", "an axis name in quotation marks")
        try:
            return _unescaped(token).decode()
        except UnicodeError:
            raise ParseError(f"the axis name {token[:60]} is not UTF-8") from None

    def symbol(self) -> None:
        """Skip the name of a mesh, `@mesh` or `@"a mesh"`."""
        if self._take("symbol", "a mesh, as @mesh or mesh<…>") == "@":
            self.string()

    def end(self) -> None:
        if self.text[self._position :].strip():
            raise self.error("the end")
