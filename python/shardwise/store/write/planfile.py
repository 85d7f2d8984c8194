"""The file of a plan: a line that says what it is, and its digest; then JSON and numbers, compressed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ..._atomic import naming, replace_file
from ..._dtypes import find_dtype
from ..._text import shown
from ...errors import ParseError
from ..objects import ObjectPath
from .dcp import DcpFile
from .files import SafetensorsFile, Slot, TargetFile
from .plan import PlannedTensor, WritePlan, split_rows, target_rows, uncollected
from .task import SourceFile, SourceObject

__all__ = ["load_plan", "save_plan"]

Plan = TypeVar("Plan", bound=WritePlan)

#: The beginning of a plan file: the version, the digest of what follows, and the bytes of the JSON and the numbers.
_HEAD = re.compile(rb"shardwise plan (\d{1,9}) ([0-9a-f]{64}) (\d{1,15}) (\d{1,15})\n")
_VERSION = 1
_MOST_HEAD = 128


def save_plan(plan: WritePlan, path: Path) -> None:
    """Write a plan to a file, as a whole or not at all."""
    said, numbers = plan.body()
    head = f"shardwise plan {_VERSION} {plan.digest} {len(said)} {len(numbers)}\n".encode()
    replace_file(path, head + zlib.compress(said + numbers, 1))


def load_plan(path: Path, kind: type[Plan]) -> Plan:
    """Read a plan.

    Raises:
        ParseError: if it is not a plan, has another version, or was damaged or edited.
        OSError: if it cannot be read.
    """
    with naming(path), path.open("rb") as stream:
        head = _HEAD.match(stream.readline(_MOST_HEAD))
        if head is None:
            raise ParseError(f"{path}: is not a shardwise plan")
        if int(head[1]) != _VERSION:
            raise ParseError(f"{path}: is a plan of version {int(head[1])}; only version {_VERSION} is known")
        sizes = int(head[3]), int(head[4])
        packed = stream.read()
    inflater = zlib.decompressobj()
    try:
        body = inflater.decompress(packed, sum(sizes) + 1)
    except zlib.error:
        body = b""
    whole = len(body) == sum(sizes) and inflater.eof and not inflater.unused_data
    if not whole or hashlib.sha256(body).hexdigest() != head[2].decode():
        raise ParseError(f"{path}: the plan was edited or is damaged: its digest differs")
    try:
        with uncollected():
            plan = _plan(kind, json.loads(body[: sizes[0]]), np.frombuffer(body[sizes[0] :], "<i8").astype(np.int64))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise ParseError(f"{path}: the plan cannot be read: {str(error)[:200]}") from None
    if plan.digest != head[2].decode():
        raise ParseError(f"{path}: the plan has contents that this version does not allow")
    return plan


class _Numbers:
    def __init__(self, numbers: npt.NDArray[np.int64]) -> None:
        self._numbers, self._at = numbers, 0

    def take(self, count: int) -> npt.NDArray[np.int64]:
        self._at += count
        if count < 0 or self._at > len(self._numbers):
            raise ValueError("it ends too early")
        return self._numbers[self._at - count : self._at]

    def rest(self) -> npt.NDArray[np.int64]:
        return self._numbers[self._at :]


class _Places:
    """Places by what a plan file calls them; objects of one protocol have one filesystem."""

    def __init__(self) -> None:
        self._filesystems: dict[str, Any] = {}

    def of(self, said: str) -> Path:
        return cast(Path, self.object(said)) if "://" in said and not said.startswith("/") else Path(said)

    def object(self, url: str) -> ObjectPath:
        protocol = url.partition("://")[0]
        path = ObjectPath(url, filesystem=self._filesystems.get(protocol))
        self._filesystems[protocol] = path.filesystem
        return path


def _check_name(name: str) -> None:
    if "/" in name or "\\" in name or "\0" in name or name in ("", ".", ".."):
        raise ValueError(f"it names the file {str(name)[:80]!r}, which is not in its own folder")


def _source(said: list[Any], places: _Places) -> SourceFile | SourceObject:
    path, size, *rest = said
    sizes = [size, *rest[:-1]]
    if not all(isinstance(text, str) for text in (path, rest[-1])) or not all(type(each) is int for each in sizes):
        raise ValueError("it has a source that is neither a file nor an object")
    if not rest[:-1]:
        return SourceObject(places.object(path), size, rest[-1])
    source = SourceFile(*said)
    if not 0 <= source.begin <= source.end <= source.size < 1 << 63:
        raise ValueError(f"it has a source of {source.size} bytes, with tensors from {source.begin} to {source.end}")
    return source


def _check_rows(rows: npt.NDArray[np.int64], shape: Sequence[int], sources: int) -> None:
    places, starts, stops, strides = split_rows(rows, len(shape))
    inside = (starts >= 0).all() and (starts < stops).all() and (stops <= np.array(shape, np.int64)).all()
    if not inside or (places < 0).any() or (places[:, 0] >= sources).any() or (strides < 0).any():
        raise ValueError("it has a piece that is not in its tensor, or in no source")


def _plan(kind: type[Plan], said: dict[str, Any], stream: npt.NDArray[np.int64]) -> Plan:
    numbers = _Numbers(stream)
    made: list[Any] = []
    for name, dtype, shape, is_object, *counts in said["tensors"]:
        found = find_dtype(dtype)
        if found is None or found.bits % 8:
            raise ValueError(f"its dtype {str(dtype)[:80]!r} is unknown")
        row = 2 + 3 * len(shape)
        rows = [numbers.take(count * row).reshape(count, row) for count in counts]
        for each in rows:
            _check_rows(each, shape, len(said["sources"]))
        made.append((name, found, tuple(shape), *rows, bool(is_object)))
    blank = [
        PlannedTensor(name, dtype, shape, sources, replicas, sources, is_object)
        for name, dtype, shape, sources, replicas, is_object in made
    ]
    files: list[TargetFile] = []
    flat, at = numbers.rest().tolist(), 0
    for name, recipe, count in said["files"]:
        _check_name(name)
        slots = []
        for _ in range(count):
            tensor, begin, end = flat[at : at + 3]
            at += 3 + 2 * len(made[tensor][2])
            sides = flat[at - 2 * len(made[tensor][2]) : at]
            box = tuple(zip(sides[::2], sides[1::2], strict=True))
            size, is_inside = blank[tensor].itemsize, tensor >= 0 <= begin
            for (start, stop), most in zip(box, blank[tensor].shape, strict=True):
                is_inside = is_inside and 0 <= start <= stop <= most
                size *= stop - start
            if not is_inside or end - begin != size:
                raise ValueError(f"the file {shown(name)} has a part that is in no tensor, or not as long as it says")
            slots.append(Slot(tensor, box, begin, end))
        if at > len(flat):
            raise ValueError("it ends too early")
        files.append(
            SafetensorsFile(name, slots, blank, **recipe)
            if recipe
            else DcpFile(name, [(slot.tensor, slot.box) for slot in slots], blank)
        )
    if any(not 0 <= file.size < 1 << 63 for file in files):
        raise ValueError("a file would have more than 2**63 - 1 bytes")
    for name in said["texts"]:
        _check_name(name)
    targets = target_rows(files, [tensor.shape for tensor in blank], [tensor.itemsize for tensor in blank])
    tensors = [replace(tensor, targets=rows) for tensor, rows in zip(blank, targets, strict=True)]
    cuts = said["manifest"]["tensors"]
    if len(cuts) != len(tensors) or not all(isinstance(each, dict) for each in cuts):
        raise ValueError("its manifest is not of its tensors")
    places = _Places()
    return kind._made(
        places.of(said["path"]),
        is_folder=said["is_folder"],
        task_bytes=said["task_bytes"],
        tensors=tensors,
        files=files,
        sizes=[file.size for file in files],
        sources=[_source(source, places) for source in said["sources"]],
        texts={name: base64.b64decode(text) for name, text in said["texts"].items()},
        manifest=said["manifest"],
    )
