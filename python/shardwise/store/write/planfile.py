"""The file of a plan: a line that says what it is, and its digest; then JSON and numbers, compressed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..._atomic import naming, replace_file
from ..._dtypes import find_dtype
from ...errors import ParseError
from .dcp import DcpFile
from .files import SafetensorsFile, Slot, TargetFile
from .plan import PlannedTensor, WritePlan, target_rows, uncollected
from .task import SourceFile

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
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
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


def _plan(kind: type[Plan], said: dict[str, Any], stream: npt.NDArray[np.int64]) -> Plan:
    numbers = _Numbers(stream)
    made: list[Any] = []
    for name, dtype, shape, is_object, *counts in said["tensors"]:
        found = find_dtype(dtype)
        if found is None or found.bits % 8:
            raise ValueError(f"its dtype {str(dtype)[:80]!r} is unknown")
        row = 2 + 3 * len(shape)
        rows = [numbers.take(count * row).reshape(count, row) for count in counts]
        made.append((name, found, tuple(shape), *rows, bool(is_object)))
    blank = [
        PlannedTensor(name, dtype, shape, sources, replicas, sources, is_object)
        for name, dtype, shape, sources, replicas, is_object in made
    ]
    files: list[TargetFile] = []
    flat, at = numbers.rest().tolist(), 0
    for name, recipe, count in said["files"]:
        if "/" in name or "\\" in name or "\0" in name or name in ("", ".", ".."):
            raise ValueError(f"it names the file {str(name)[:80]!r}, which is not in its own folder")
        slots = []
        for _ in range(count):
            tensor, begin, end = flat[at : at + 3]
            at += 3 + 2 * len(made[tensor][2])
            sides = flat[at - 2 * len(made[tensor][2]) : at]
            slots.append(Slot(tensor, tuple(zip(sides[::2], sides[1::2], strict=True)), begin, end))
        if at > len(flat):
            raise ValueError("it ends too early")
        files.append(
            SafetensorsFile(name, slots, blank, **recipe)
            if recipe
            else DcpFile(name, [(slot.tensor, slot.box) for slot in slots], blank)
        )
    targets = target_rows(files, [tensor.shape for tensor in blank], [tensor.itemsize for tensor in blank])
    tensors = [replace(tensor, targets=rows) for tensor, rows in zip(blank, targets, strict=True)]
    return kind(
        Path(said["path"]),
        is_folder=said["is_folder"],
        task_bytes=said["task_bytes"],
        tensors=tensors,
        files=files,
        sizes=[file.size for file in files],
        sources=[SourceFile(*source) for source in said["sources"]],
        texts={name: base64.b64decode(text) for name, text in said["texts"].items()},
        manifest=said["manifest"],
    )
