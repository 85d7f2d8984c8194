"""A writer of pickles, opcode by opcode, which can name classes that are not installed.

It writes protocol 2, whose opcodes all of PyTorch's readers accept, even the strictest (`weights_only`). As in Python's
own pickler, texts and globals are written once, and later uses refer to the memo.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

__all__ = ["Again", "Call", "Global", "Items", "New", "Once", "Persistent", "Varying", "VaryingPickle", "pickled"]

_PROTO = b"\x80\x02"
_BINFLOAT = b"G"
_STOP, _MARK, _NONE, _TRUE, _FALSE = b".", b"(", b"N", b"\x88", b"\x89"
_GLOBAL, _REDUCE, _NEWOBJ, _BUILD, _BINPERSID = b"c", b"R", b"\x81", b"b", b"Q"
_BININT, _BININT1, _BININT2, _LONG1, _BINUNICODE = b"J", b"K", b"M", b"\x8a", b"X"
_BINFLOAT = b"G"
_TUPLES, _TUPLE = (b")", b"\x85", b"\x86", b"\x87"), b"t"
_LIST, _APPENDS, _DICT, _SETITEMS = b"]", b"e", b"}", b"u"
_BINPUT, _LONG_BINPUT, _BINGET, _LONG_BINGET = b"q", b"r", b"h", b"j"

#: The most items of a list or dict that one opcode appends, as in Python's pickler.
_BATCH = 1000

#: The most calls whose opcodes are remembered.
_MOST_SAID = 1 << 16


class Global(NamedTuple):
    """A reference to an object of a module, such as a class or a function, by its name."""

    module: str
    name: str


class Call(NamedTuple):
    """The result of calling a global with these arguments when the pickle is read."""

    callee: Global
    args: tuple[Any, ...]


class New(NamedTuple):
    """An object of a class, made without calling `__init__`, and its state."""

    kind: Global
    state: Any


class Persistent(NamedTuple):
    """A value outside of the pickle, given by its persistent id."""

    id: Any


class Once:
    """A value that is written the first time; later occurrences are the same object."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Again:
    """A value that occurs often: each occurrence is another object, whose opcodes are made once."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Varying(NamedTuple):
    """An integer or a text that differs between otherwise equal pickles."""

    name: str
    value: int | str


class Items(NamedTuple):
    """A dict, given as (key, value) pairs, which may come from a generator."""

    pairs: Iterable[tuple[Any, Any]]


def pickled(value: Any) -> bytes:
    """Return the pickle of a value: `None`, a bool, number, text, tuple, list, iterator or dict, or one of the above.

    >>> import collections, pickle
    >>> pickle.loads(pickled([1, "a", {(-1, 2**40): None}, Call(Global("collections", "OrderedDict"), ())]))
    [1, 'a', {(-1, 1099511627776): None}, OrderedDict()]
    """
    writer = _Writer()
    writer.write(value)
    return bytes(writer.out + _STOP)


class VaryingPickle:
    """A pickle that is written once and then copied with other values in place of its `Varying` ones."""

    def __init__(self, value: Any) -> None:
        writer = _Writer()
        writer.write(value)
        self._data, self._holes = bytes(writer.out + _STOP), writer.holes

    def pickled(self, values: Mapping[str, int | str]) -> bytes:
        """Return the pickle with these values for its `Varying` ones, by name.

        >>> import pickle
        >>> template = VaryingPickle({"rank": Varying("rank", 0), "of": 300})
        >>> pickle.loads(template.pickled({"rank": 299}))
        {'rank': 299, 'of': 300}
        """
        parts, at = [], 0
        for begin, end, name in self._holes:
            value = values[name]
            parts += [self._data[at:begin], _text(value) if isinstance(value, str) else _integer(value)]
            at = end
        return b"".join([*parts, self._data[at:]])


class _Writer:
    def __init__(self) -> None:
        self.out = bytearray(_PROTO)
        #: The first byte of each varying value, the byte after it, and its name.
        self.holes: list[tuple[int, int, str]] = []
        self.memo: dict[str | Global | Once, int] = {}
        #: The opcodes of calls with one tuple of integers (most calls of an index), once the memo has the global.
        self.pickled: dict[tuple[Global, tuple[int, ...]], bytes] = {}
        #: The opcodes of values that occur often, once the memo has all that they name.
        self.again: dict[Again, bytes] = {}

    def write(self, value: Any) -> None:
        # By the type itself, the frequent ones first: an index has some fifty values for each box.
        out, kind = self.out, type(value)
        if kind is int:
            out += _integer(value)
        elif kind is str:
            self._once(value, _text)
        elif kind is Global:
            self._once(value, _global)
        elif kind is tuple:
            self._tuple(value)
        elif kind is Call:
            self._call(value)
        elif kind is New:
            self.write(value.kind)
            out += _TUPLES[0] + _NEWOBJ
            self.write(value.state)
            out += _BUILD
        elif kind is dict:
            self._dict(value)
        elif kind is Again:
            self._again(value)
        elif kind is bool:
            out += _TRUE if value else _FALSE
        elif value is None:
            out += _NONE
        elif kind is float:
            out += _BINFLOAT + struct.pack(">d", value)
        elif kind is Items:
            self.out += _DICT
            for batch in _batches(value.pairs):
                self._items(batch)
        elif kind is Once:
            known = self.memo.get(value)
            if known is None:
                self.write(value.value)
                known = self.memo[value] = len(self.memo)
                out += _numbered(_BINPUT, _LONG_BINPUT, known)
            else:
                out += _numbered(_BINGET, _LONG_BINGET, known)
        elif kind is Varying:
            out += _text(value.value) if isinstance(value.value, str) else _integer(value.value)
            self.holes.append((len(out) - _length(value.value), len(out), value.name))
            if isinstance(value.value, str):  # As of every text, the object is kept.
                number = self.memo[Once(value)] = len(self.memo)
                out += _numbered(_BINPUT, _LONG_BINPUT, number)
        elif kind is Persistent:
            self.write(value.id)
            out += _BINPERSID
        elif isinstance(value, (list, Iterator)):
            self._list(value)
        elif isinstance(value, str):
            self._once(str(value), _text)
        else:
            raise TypeError(f"cannot pickle a {kind.__name__}")

    def _call(self, value: Call) -> None:
        callee, args = value
        sizes = args[0] if len(args) == 1 else None
        # A bool is equal to an integer, but is written differently.
        if type(sizes) is not tuple or not all(type(size) is int for size in sizes):
            self.write(callee)
            self._tuple(args)
            self.out += _REDUCE
            return
        said = self.pickled.get((callee, sizes))
        if said is None:
            self.write(callee)
            begin = len(self.out)
            self._tuple(args)
            self.out += _REDUCE
            if len(self.pickled) < _MOST_SAID:
                self.pickled[callee, sizes] = _numbered(_BINGET, _LONG_BINGET, self.memo[callee]) + self.out[begin:]
        else:
            self.out += said

    def _again(self, value: Again) -> None:
        said = self.again.get(value)
        if said is None:
            begin, before = len(self.out), (len(self.memo), len(self.holes))
            self.write(value.value)
            if (len(self.memo), len(self.holes)) == before:
                self.again[value] = bytes(self.out[begin:])
        else:
            self.out += said

    def _once(self, value: Any, write: Callable[[Any], bytes]) -> None:
        known = self.memo.get(value)
        if known is None:
            number = self.memo[value] = len(self.memo)
            self.out += write(value) + _numbered(_BINPUT, _LONG_BINPUT, number)
        else:
            self.out += _numbered(_BINGET, _LONG_BINGET, known)

    def _tuple(self, values: tuple[Any, ...]) -> None:
        if len(values) >= len(_TUPLES):
            self.out += _MARK
        for value in values:
            self.write(value)
        self.out += _TUPLES[len(values)] if len(values) < len(_TUPLES) else _TUPLE

    def _list(self, values: Iterable[Any]) -> None:
        self.out += _LIST
        for batch in _batches(values):
            self.out += _MARK
            for value in batch:
                self.write(value)
            self.out += _APPENDS

    def _dict(self, value: dict[Any, Any]) -> None:
        self.out += _DICT
        if 0 < len(value) <= _BATCH:
            self._items(value.items())
            return
        for batch in _batches(value.items()):
            self._items(batch)

    def _items(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        self.out += _MARK
        for key, value in pairs:
            self.write(key)
            self.write(value)
        self.out += _SETITEMS


def _batches(values: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(values)
    while batch := list(islice(iterator, _BATCH)):
        yield batch


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return _BININT1 + value.to_bytes(1, "little")
    if 0 <= value < 1 << 16:
        return _BININT2 + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return _BININT + value.to_bytes(4, "little", signed=True)
    size = value.bit_length() // 8 + 1
    return _LONG1 + size.to_bytes(1, "little") + value.to_bytes(size, "little", signed=True)


def _length(value: int | str) -> int:
    return len(_text(value) if isinstance(value, str) else _integer(value))


def _global(value: Global) -> bytes:
    return _GLOBAL + f"{value.module}\n{value.name}\n".encode()


def _text(value: str) -> bytes:
    # As Python's pickler: a lone surrogate is written as it is.
    data = value.encode("utf-8", "surrogatepass")
    return _BINUNICODE + len(data).to_bytes(4, "little") + data


def _numbered(short: bytes, long: bytes, number: int) -> bytes:
    return short + number.to_bytes(1, "little") if number < 1 << 8 else long + number.to_bytes(4, "little")
