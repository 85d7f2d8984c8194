"""Strict reading of JSON: the contents of a file are not trusted."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np

from ._text import shown
from .errors import ParseError

__all__ = ["MAX_JSON", "strict_json"]

#: The longest JSON that is read, and the longest header of a safetensors file: its format's own limit.
MAX_JSON = 100_000_000

#: The most brackets and colons of JSON that is not looked at closely.
_MANY = 1_000_000

#: The bytes of JSON that are looked at in one step.
_PIECE = 1 << 20


def strict_json(data: bytes, path: object, offset: int = 0, *, constants: bool = False) -> Any:
    """Parse JSON in UTF-8 at byte `offset` of a file: no duplicate keys, no NaN, no lone surrogates.

    With `constants`, NaN and infinities are numbers, as Python writes them.

    Raises:
        ParseError: if it is anything else; the message names the file and, if known, the byte.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            keys = sorted(key for key, _ in pairs)
            duplicate = next(key for key, following in pairwise(keys) if key == following)
            raise ParseError(f"{path}: duplicate key {shown(duplicate)}")
        return mapping

    def constant(name: str) -> float:
        if not constants:
            raise ParseError(f"{path}: {name} is not JSON")
        return float(name)

    if len(data) > MAX_JSON:
        raise ParseError(f"{path}: {len(data)} bytes of JSON, over the limit of {MAX_JSON}")
    _check_density(data, path, offset)
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=constant)
        # As many colons as pairs: no key is there twice. Else there may be one, or a colon in a text.
        if text.count(":") != _pairs(value):
            value = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
        if "\\u" in text:  # The only way for half a surrogate pair to get in, since UTF-8 has none.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except ParseError:
        raise
    except UnicodeDecodeError as error:
        raise ParseError(f"{path}: byte {offset + error.start}: not UTF-8") from None
    except UnicodeEncodeError:
        raise ParseError(f"{path}: half a surrogate pair in a name or text") from None
    except json.JSONDecodeError as error:
        position = offset + len(text[: error.pos].encode("utf-8"))
        raise ParseError(f"{path}: byte {position}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ParseError(f"{path}: JSON nested too deeply") from None
    except ValueError as error:  # An integer with more digits than Python accepts.
        raise ParseError(f"{path}: not JSON that can be read: {error}") from None
    return value


def _pairs(value: Any) -> int:
    """Return the pairs of an object and of the objects in it; not of those within these."""
    if not isinstance(value, dict):
        return 0
    return len(value) + sum([len(one) for one in value.values() if type(one) is dict])


def _check_density(data: bytes, path: object, offset: int) -> None:
    """Refuse JSON that would take far more memory than its text: many containers and keys without content.

    A list takes 56 bytes and an object or a key more, for two to five of the text. Descriptions of tensors have
    text between them, so they make up less than one byte in eight.
    """
    marks = data.count(b"[") + data.count(b"{") + data.count(b":")
    if marks > _MANY and marks > len(data) // 8:
        marks = _marks_outside_texts(data)  # In a text they take what any character takes.
    if marks > _MANY and marks > len(data) // 8:
        raise ParseError(
            f"{path}: byte {offset}: {marks} brackets and colons in {len(data)} bytes of JSON; "
            "at most one byte in 8 may be one of these"
        )


def _marks_outside_texts(data: bytes) -> int:
    """Count brackets and colons that are not within quotes, in pieces: there is no copy of eight times the text."""
    data = data.replace(rb"\\", b"").replace(rb"\"", b"")
    count, is_inside = 0, 0
    for start in range(0, len(data), _PIECE):
        piece = np.frombuffer(data, np.uint8, min(_PIECE, len(data) - start), start)
        inside = np.bitwise_xor.accumulate((piece == ord('"')).view(np.uint8)) ^ is_inside
        marks = (piece == ord("[")) | (piece == ord("{")) | (piece == ord(":"))
        count += int(np.count_nonzero(marks & (inside == 0)))
        is_inside = int(inside[-1])
    return count
