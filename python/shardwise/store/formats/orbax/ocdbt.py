"""TensorStore's OCDBT: a database of keys and values in a folder, as a B+tree in files that are never changed.

https://google.github.io/tensorstore/kvstore/ocdbt/index.html describes it. A manifest states the place of the root of
the latest tree; nodes carry a CRC-32C, values do not. All keys are read when the database is opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ...._core import crc32c
from ...._text import shown
from ....errors import ParseError
from ...data.codecs import decompress_node
from ...data.location import Location
from ...data.text import stays_inside
from .keyvalue import OpenFiles, Value

__all__ = ["MANIFEST", "OcdbtStore", "read_node"]

MANIFEST = "manifest.ocdbt"
_MANIFEST_MAGIC = 0x0CDB3A2A
_BTREE_MAGIC = 0x0CDB20DE
_MAX_NODE = 1 << 28
_MAX_HEIGHT = 32


class _Node:
    """The decoded body of a node, read from front to back."""

    def __init__(self, data: bytes, where: str, path: Location) -> None:
        self._data = data
        self._at = 0
        self.where = where
        self.path = path

    def error(self, problem: str) -> ParseError:
        return ParseError(f"{self.where}: byte {self._at} of the node: {problem}")

    def take(self, count: int) -> bytes:
        end = self._at + count
        if count < 0 or end > len(self._data):
            raise self.error(f"{count} bytes are needed, but {len(self._data) - self._at} are left")
        data = self._data[self._at : end]
        self._at = end
        return data

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self) -> int:
        """Read a variable-length integer of at most 64 bits."""
        data, at = self._data, self._at
        value = shift = 0
        while at < len(data) and shift < 70:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >> 64:
                    break
                self._at = at
                return value
            shift += 7
        raise self.error("not an integer of 64 bits")

    def numbers(self, count: int) -> list[int]:
        if count > len(self._data) - self._at:
            raise self.error(f"{count} integers in {len(self._data) - self._at} bytes")
        return [self.number() for _ in range(count)]

    def end(self) -> None:
        if self._at != len(self._data):
            raise self.error(f"{len(self._data) - self._at} bytes after its end")


class _NodePlace(NamedTuple):
    """The place of a node in a data file."""

    path: bytes
    transitive: bytes
    offset: int
    length: int


def read_node(data: bytes, magic: int, where: str) -> bytes:
    """Check the envelope of a node, and return its body.

    Raises:
        ParseError: if it is not a node, or its checksum is wrong.
    """
    if len(data) < 18 or int.from_bytes(data[:4], "big") != magic:
        raise ParseError(f"{where}: is not a node of an OCDBT database")
    if int.from_bytes(data[4:12], "little") != len(data):
        said = int.from_bytes(data[4:12], "little")
        raise ParseError(f"{where}: a node of {said} bytes, but {len(data)} are there")
    if crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise ParseError(f"{where}: the checksum of the node is wrong")
    version, compression = data[12], data[13]
    if version != 0 or compression > 1:
        raise ParseError(
            f"{where}: a node of version {version} with compression {compression}; only version 0 with compression "
            "0 or 1 can be read"
        )
    body = data[14:-4]
    if not compression:
        return body
    return decompress_node(body, _MAX_NODE, where)


class OcdbtStore:
    """The latest version of a database.

    Args:
        folder: The folder of the database.
        most_key_bytes: The most bytes that keys and paths may take in memory.

    Raises:
        ParseError: if it is not an OCDBT database, is damaged, or names files outside its folder.
    """

    def __init__(self, folder: Location, most_key_bytes: int = 1 << 30) -> None:
        self.folder = folder
        self._most_key_bytes = most_key_bytes
        self.files = OpenFiles()
        self._values: dict[str, Value] = {}
        self._key_bytes = 0
        self._seen: set[tuple[bytes, int]] = set()
        try:
            root = self._root()
            if root is not None:
                place, height = root
                self._walk(place, height, b"")
            self._check_values()
        except BaseException:
            self.files.close()
            raise

    def get(self, key: str) -> Value | None:
        """Return the value of a key; None if there is none."""
        return self._values.get(key)

    def listing(self) -> Iterator[str]:
        """Return all keys, in their order."""
        return iter(self._values)

    def _root(self) -> tuple[_NodePlace, int] | None:
        node = self._manifest(self.folder / MANIFEST)
        numbered = node is None
        if numbered:
            names = [entry.name for entry in self.folder.iterdir()]
            latest = max((name for name in names if re.fullmatch(r"manifest\.[0-9a-f]{16}", name)), default=None)
            node = None if latest is None else self._manifest(self.folder / latest, config_only=False)
        if node is None:
            raise ParseError(f"{self.folder / MANIFEST}: there is no numbered manifest next to it")
        files = self._file_table(node, b"")
        count = node.number()
        if count == 0:
            return None
        node.numbers(count)  # generations
        heights = node.take(count)
        file_ids, offsets, lengths, keys = (node.numbers(count) for _ in range(4))
        if keys[-1] == 0 and lengths[-1] == 0:
            return None
        path, transitive = self._file(node, files, file_ids[-1])
        return _NodePlace(path, transitive, offsets[-1], lengths[-1]), heights[-1]

    def _check_values(self) -> None:
        """Check that every value lies in its file."""
        for key, value in self._values.items():
            if value.inline is None:
                try:
                    self.files.range_of(value)
                except FileNotFoundError:
                    text = shown(str(value.path))
                    raise ParseError(f"{self.folder}: {shown(key)} is in {text}, which does not exist") from None

    def _manifest(self, path: Location, *, config_only: bool = True) -> _Node | None:
        """Return a manifest, read up to its file table; `None` for one that only refers to numbered manifests."""
        data = self.files.read(Value(path, 0, None), _MAX_NODE)
        node = _Node(read_node(data, _MANIFEST_MAGIC, str(path)), str(path), path)
        node.take(16)
        kind = node.number()
        node.number()  # max_inline_value_bytes
        node.number()  # max_decoded_node_bytes
        node.byte()  # version_tree_arity_log2
        if node.number() == 1:
            node.take(4)  # the level of compression
        if kind > 1:
            raise node.error(f"a manifest of kind {kind}; 0 and 1 can be read")
        return None if kind == 1 and config_only else node

    def _file_table(self, node: _Node, transitive: bytes) -> list[tuple[bytes, bytes]]:
        """Return the paths of the data files, each with the prefix that the file tables of its nodes continue."""
        count = node.number()
        if count == 0:
            return []
        prefixes = [0, *node.numbers(count - 1)]
        suffixes, bases = node.numbers(count), node.numbers(count)
        files: list[tuple[bytes, bytes]] = []
        path = b""
        for prefix, suffix, base in zip(prefixes, suffixes, bases, strict=True):
            if prefix > len(path):
                raise node.error("a path shares more characters with the previous path than that has")
            path = path[:prefix] + node.take(suffix)
            if base > len(path) or len(path) > 4096:
                raise node.error("an invalid path of a data file")
            files.append((transitive + path, transitive + path[:base]))
            self._count(len(path), node)
        return files

    def _file(self, node: _Node, files: list[tuple[bytes, bytes]], number: int) -> tuple[bytes, bytes]:
        if number >= len(files):
            raise node.error(f"file {number} of {len(files)}")
        return files[number]

    def _path(self, path: bytes, where: str) -> Location:
        try:
            text = path.decode("utf-8")
        except UnicodeDecodeError:
            raise ParseError(f"{where}: the path of a data file is not UTF-8") from None
        if not stays_inside(text):
            raise ParseError(f"{where}: names the file {shown(text)}, outside its own folder")
        return self.folder / text

    def _count(self, size: int, node: _Node) -> None:
        self._key_bytes += size + 64
        if self._key_bytes > self._most_key_bytes:
            raise node.error(f"keys and paths of more than {self._most_key_bytes} bytes")

    def _walk(self, place: _NodePlace, height: int, prefix: bytes) -> None:
        if height > _MAX_HEIGHT:
            raise ParseError(f"{self.folder}: a tree of height {height}, over the limit of {_MAX_HEIGHT}")
        path = self._path(place.path, str(self.folder / MANIFEST))
        where = f"{path}: byte {place.offset}"
        if (place.path, place.offset) in self._seen:
            raise ParseError(f"{where}: the node is twice in the tree")
        self._seen.add((place.path, place.offset))
        try:
            data = self.files.read(Value(path, place.offset, place.length), _MAX_NODE)
        except FileNotFoundError:
            raise ParseError(f"{self.folder}: the data file {shown(str(path))} does not exist") from None
        node = _Node(read_node(data, _BTREE_MAGIC, where), where, path)
        if node.byte() != height:
            raise node.error(f"the height is not the one in the tree, {height}")
        files = self._file_table(node, place.transitive)
        count = node.number()
        if height:
            self._interior(node, files, count, height, prefix)
        else:
            self._leaf(node, files, count, prefix)

    def _keys(self, node: _Node, count: int, prefix: bytes, *, interior: bool) -> tuple[list[bytes], list[int]]:
        """Return the keys of a node, and for each the number of bytes that all keys of its subtree begin with."""
        shared = [0, *node.numbers(count - 1)] if count else []
        lengths = node.numbers(count)
        common = node.numbers(count) if interior else []
        keys = []
        key = b""
        for start, length in zip(shared, lengths, strict=True):
            if start > len(key):
                raise node.error("a key shares more characters with the previous key than that has")
            key = key[:start] + node.take(length)
            self._count(len(prefix) + len(key), node)
            keys.append(key)
        return keys, common

    def _interior(self, node: _Node, files: list[tuple[bytes, bytes]], count: int, height: int, prefix: bytes) -> None:
        keys, common = self._keys(node, count, prefix, interior=True)
        numbers, offsets, lengths = (node.numbers(count) for _ in range(3))
        for _ in range(3):
            node.numbers(count)  # statistics
        node.end()
        for key, shared, number, offset, length in zip(keys, common, numbers, offsets, lengths, strict=True):
            if shared > len(key):
                raise node.error("a subtree with a common prefix longer than its first key")
            path, transitive = self._file(node, files, number)
            self._walk(_NodePlace(path, transitive, offset, length), height - 1, prefix + key[:shared])

    def _leaf(self, node: _Node, files: list[tuple[bytes, bytes]], count: int, prefix: bytes) -> None:
        keys, _ = self._keys(node, count, prefix, interior=False)
        lengths = node.numbers(count)
        kinds = node.take(count)
        outside = [position for position, kind in enumerate(kinds) if kind]
        if any(kind > 1 for kind in kinds):
            raise node.error("a value that is neither in the node nor in a file")
        numbers, offsets = node.numbers(len(outside)), node.numbers(len(outside))
        places = dict(zip(outside, zip(numbers, offsets, strict=True), strict=True))
        paths: dict[int, Location] = {}
        for position, (key, length) in enumerate(zip(keys, lengths, strict=True)):
            try:
                text = (prefix + key).decode("utf-8")
            except UnicodeDecodeError:
                raise node.error("a key that is not UTF-8") from None
            if position in places:
                number, offset = places[position]
                if number not in paths:
                    paths[number] = self._path(self._file(node, files, number)[0], node.where)
                value = Value(paths[number], offset, length)
            else:
                value = Value(node.path, 0, length, node.take(length))
            if text in self._values:
                raise node.error(f"the key {shown(text)} is twice in the tree")
            self._values[text] = value
        node.end()
