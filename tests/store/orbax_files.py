"""Files as Orbax writes them, made without it: zarr arrays in folders, and OCDBT databases."""

from __future__ import annotations

import bz2
import gzip
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from shardwise._core import crc32c

PACK: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstandard.ZstdCompressor().compress, "gzip": gzip.compress, "zlib": zlib.compress, "bz2": bz2.compress,
}  # fmt: skip


def item(folder: Path, **said: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "_METADATA").write_text(json.dumps({"use_ocdbt": False, **said}))
    (folder / "commit_success.txt").write_text("done")
    return folder


def zarr2(folder: Path, name: str, array: np.ndarray, chunks: tuple[int, ...], **changes: Any) -> Path:
    """A zarr 2 array; chunks at the edge are as large as the others, and filled up."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    said: dict[str, Any] = {
        "zarr_format": 2, "shape": array.shape, "chunks": chunks, "compressor": None, "dtype": array.dtype.str,
        "fill_value": None, "filters": None, "order": "C", "dimension_separator": ".", **changes,
    }  # fmt: skip
    if array.dtype.kind == "V":
        said["dtype"] = array.dtype.name
    (path / ".zarray").write_text(json.dumps(said))
    pack = PACK[said["compressor"]["id"]] if said["compressor"] else bytes
    for cell in np.ndindex(*(-(-size // chunk) for size, chunk in zip(array.shape, chunks, strict=True))):
        part = array[tuple(slice(at * n, (at + 1) * n) for at, n in zip(cell, chunks, strict=True))]
        padded = np.zeros(chunks, array.dtype)
        padded[tuple(slice(0, n) for n in part.shape)] = part
        key = said["dimension_separator"].join(map(str, cell)) or "0"
        (path / key).parent.mkdir(exist_ok=True)
        (path / key).write_bytes(pack(padded.tobytes(said["order"])))
    return path


def zarr3(
    folder: Path, name: str, array: np.ndarray, shard: tuple[int, ...], inner: tuple[int, ...] | None = None,
    *, codecs: tuple[str, ...] = ("zstd",), leave_out: tuple[int, ...] = (), first: bool = False, **changes: Any,
) -> Path:  # fmt: skip
    path = folder / name
    path.mkdir(parents=True)
    chain: list[Any] = [
        {"name": "bytes", "configuration": {"endian": "little"}},
        *({"name": codec} for codec in codecs),
    ]
    if inner is not None:
        index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        configuration = {"chunk_shape": inner, "codecs": chain, "index_codecs": index}
        configuration |= {"index_location": "start"} if first else {}
        chain = [{"name": "sharding_indexed", "configuration": configuration}]
    said = {
        "zarr_format": 3, "node_type": "array", "shape": array.shape, "data_type": array.dtype.name, "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard}},
        "chunk_key_encoding": {"name": "default"}, "codecs": chain, **changes,
    }  # fmt: skip
    (path / "zarr.json").write_text(json.dumps(said))
    padded = np.zeros([-(-n // s) * s for n, s in zip(array.shape, shard, strict=True)], array.dtype)
    padded[tuple(slice(0, n) for n in array.shape)] = array
    for cell in np.ndindex(*(n // s for n, s in zip(padded.shape, shard, strict=True))):
        part = padded[tuple(slice(at * n, (at + 1) * n) for at, n in zip(cell, shard, strict=True))]
        file = path.joinpath("c", *map(str, cell))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(packed(part, codecs) if inner is None else sharded(part, inner, codecs, leave_out, first))
    return path


def packed(array: np.ndarray, codecs: tuple[str, ...]) -> bytes:
    data = array.tobytes()
    for codec in codecs:
        data = data + struct.pack("<I", crc32c(data)) if codec == "crc32c" else PACK[codec](data)
    return data


def sharded(
    array: np.ndarray, inner: tuple[int, ...], codecs: tuple[str, ...], leave_out: tuple[int, ...], first: bool
) -> bytes:
    counts = [n // i for n, i in zip(array.shape, inner, strict=True)]
    begin = (16 * int(np.prod(counts, dtype=int)) + 4) if first else 0
    data, index = b"", b""
    for number, cell in enumerate(np.ndindex(*counts)):
        part = packed(array[tuple(slice(at * n, (at + 1) * n) for at, n in zip(cell, inner, strict=True))], codecs)
        if number in leave_out:
            index += b"\xff" * 16
            continue
        index += struct.pack("<QQ", begin + len(data), len(part))
        data += part
    index += struct.pack("<I", crc32c(index))
    return index + data if first else data + index


def uleb(*values: int) -> bytes:
    out = bytearray()
    for value in values:
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        out.append(value)
    return bytes(out)


def node(magic: int, body: bytes, *, compress: bool = False) -> bytes:
    body = zstandard.ZstdCompressor().compress(body) if compress else body
    head = struct.pack(">I", magic) + struct.pack("<Q", len(body) + 18) + bytes([0, int(compress)]) + body
    return head + struct.pack("<I", crc32c(head))


def file_table(paths: list[str], base: int = 0) -> bytes:
    if not paths:
        return uleb(0)
    data = [path.encode() for path in paths]
    return uleb(len(data), *[0] * (len(data) - 1), *map(len, data), *[base] * len(data)) + b"".join(data)


def shared(keys: list[bytes]) -> tuple[list[int], list[bytes]]:
    prefixes, suffixes = [], []
    for before, key in zip([b"", *keys], keys, strict=False):
        same = 0
        while same < min(len(before), len(key)) and before[same] == key[same]:
            same += 1
        prefixes.append(same)
        suffixes.append(key[same:])
    return prefixes, suffixes


class Database:
    """A database in a folder: values above 20 bytes go into a file of their own, nodes of two keys into another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "d").mkdir(parents=True, exist_ok=True)
        self.values, self.nodes = b"", b""

    def leaf(self, entries: list[tuple[bytes, bytes]], prefix: int = 0) -> tuple[int, int]:
        prefixes, suffixes = shared([key[prefix:] for key, _ in entries])
        body = bytes([0]) + file_table(["d/values"]) + uleb(len(entries), *prefixes[1:], *map(len, suffixes))
        body += b"".join(suffixes) + uleb(*(len(value) for _, value in entries))
        outside = [value for _, value in entries if len(value) > 20]
        body += bytes(int(len(value) > 20) for _, value in entries) + uleb(*[0] * len(outside))
        for value in outside:
            body += uleb(len(self.values))
            self.values += value
        body += b"".join(value for _, value in entries if len(value) <= 20)
        return self.add(body)

    def add(self, body: bytes) -> tuple[int, int]:
        start = len(self.nodes)
        self.nodes += node(0x0CDB20DE, body, compress=start % 2 == 0)
        return start, len(self.nodes) - start

    def interior(self, height: int, children: list[tuple[bytes, int, tuple[int, int]]]) -> tuple[int, int]:
        prefixes, suffixes = shared([key for key, _, _ in children])
        body = bytes([height]) + file_table(["d/nodes"]) + uleb(len(children), *prefixes[1:], *map(len, suffixes))
        body += uleb(*(common for _, common, _ in children)) + b"".join(suffixes) + uleb(*[0] * len(children))
        body += uleb(*(place[0] for _, _, place in children), *(place[1] for _, _, place in children))
        return self.add(body + uleb(*[0] * 3 * len(children)))

    def manifest(
        self,
        height: int,
        place: tuple[int, int],
        *,
        files: list[str] | None = None,
        base: int = 0,
        kind: int = 0,
        older: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """The versions of the tree, the last of which counts; those before are leaves."""
        config = bytes(16) + uleb(kind, 1024, 10**8) + bytes([4]) + uleb(0)
        places = [*older, place]
        count = len(places)
        body = config + file_table(["d/nodes"] if files is None else files, base) + uleb(count, *range(1, count + 1))
        body += bytes([*[0] * len(older), height]) + uleb(*[0] * count, *(at for at, _ in places))
        body += uleb(*(length for _, length in places), *(int(length > 0) for _, length in places), *[1] * 2 * count)
        body += struct.pack("<Q", 1) * count
        (self.folder / "d" / "values").write_bytes(self.values)
        (self.folder / "d" / "nodes").write_bytes(self.nodes)
        name = "manifest.ocdbt"
        if kind:
            (self.folder / name).write_bytes(node(0x0CDB3A2A, config))
            name = "manifest.0000000000000007"
        (self.folder / name).write_bytes(node(0x0CDB3A2A, body))


def entries_of(folder: Path) -> list[tuple[bytes, bytes]]:
    """The files below a folder as the entries of a database."""
    found = [
        (path.relative_to(folder).as_posix().encode(), path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    ]
    return sorted(entry for entry in found if b"/" in entry[0])
