"""Safetensors files of a new checkpoint: one for all, Hugging Face's, and one for each owner of shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...._fork import cached_property
from ...._json import MAX_JSON
from ...._text import bytes_text
from ....errors import LayoutError, ParseError
from ...data.parts import SHARDING_INFO, part_mark
from .files import (
    NO_DIGESTS,
    CutTensor,
    Extent,
    FileDigests,
    Headers,
    NamedTensor,
    TargetFile,
    begins_of,
    file_order,
    slots_of,
    whole_slots,
)
from .slots import Slots, digits_of

__all__ = [
    "HeaderLengths",
    "HeaderText",
    "SafetensorsFile",
    "hugging_face_files",
    "index_of",
    "sharded_files",
    "single_file",
]

#: Placeholder for a hexadecimal digest, which is known only when the data has been written.
_NO_DIGEST = "0" * 32


class HeaderText(NamedTuple):
    """The contents of headers besides tensors.

    Attributes:
        metadata: Entries of `__metadata__`, besides those that follow from the slots.
        has_digests: Whether the header states the digest of each tensor; otherwise the manifest does.
        has_offsets: Whether the header states, for PyTorch, the start of each box in its tensor, and whole shapes.
        files: The number of files of the checkpoint, which the header states if it may be more than one.
    """

    metadata: Mapping[str, str]
    has_digests: bool = False
    has_offsets: bool = False
    files: int = 1


@dataclass(frozen=True, eq=False)
class SafetensorsFile(TargetFile):
    """A safetensors file. Its boxes follow one another without gaps.

    Attributes:
        text: The contents of the header besides tensors.
        extent: The length of the header and the size of the file in bytes; `None` if they must be worked out.
    """

    text: HeaderText
    extent: Extent | None = None

    @property
    def has_digests(self) -> bool:
        """True if the digests are in the header."""
        return self.text.has_digests

    @cached_property
    def start(self) -> int:
        """The length of the header, which does not depend on the digests."""
        return len(self._header(NO_DIGESTS)) if self.extent is None else self.extent.start

    @property
    def data_bytes(self) -> int:
        """Bytes after the header."""
        return self.size - self.start

    @property
    def end(self) -> int:
        """The byte after the last slot."""
        return self.start + (self.slots[-1].end if len(self.slots) else 0)

    @cached_property
    def size(self) -> int:
        """Bytes of the file."""
        return self.end if self.extent is None else self.extent.size

    def _begins(self) -> npt.NDArray[np.int64]:
        return begins_of(self.boxes.nbytes)

    def before(self, number: int, digests: FileDigests = NO_DIGESTS) -> tuple[int, bytes]:
        """Return the header for slot 0, and no bytes for the others."""
        if number == 0:
            header = self._header(digests)
            if len(header) != self.start:
                raise ParseError(f"{self.name}: has a header of {len(header)} bytes; its plan says {self.start}")
            return 0, header
        return self.start + self.slots[number - 1].end, b""

    def headers(self, digests: FileDigests = NO_DIGESTS) -> Headers:
        """Yield the header, the only bytes besides tensors."""
        at, header = self.before(0, digests)
        yield at, header
        return hashlib.sha256(header).hexdigest()

    def _header(self, digests: FileDigests) -> bytes:
        slots = list(self.slots)
        wanted = {number: self.wanted[number] for number in {slot.tensor for slot in slots}}
        metadata = {"format": "pt", **self.text.metadata}
        if self.text.has_offsets:
            offsets = {
                tensor.name: {"saved_offsets": tensor.dtype.element_start([start for start, _ in slot.box])}
                for slot in slots
                for tensor in [wanted[slot.tensor]]
            }
            whole = {slot.tensor: wanted[slot.tensor].shape for slot in slots}
            parts = (slot for slot in slots if slot.box != tuple((0, size) for size in whole[slot.tensor]))
            cut = [wanted[slot.tensor] for slot in parts]
            shapes = {tensor.name: tuple(tensor.dtype.element_shape(tensor.shape)) for tensor in cut}
            metadata |= _sharding(json.dumps(offsets)) | part_mark(self.text.files, shapes)
        elif self.text.files > 1:
            metadata |= part_mark(self.text.files)
        if self.has_digests:
            known = {wanted[slot.tensor].name: digests.tensors.get(slot.tensor) for slot in slots}
            stated = {name: _NO_DIGEST if digest is None else f"{digest:032x}" for name, digest in known.items()}
            metadata["shardwise.digests"] = json.dumps(stated, separators=(",", ":"))
        entries: dict[str, Any] = {"__metadata__": metadata}
        for number, box, begin, end in slots:
            tensor = wanted[number]
            entries[tensor.name] = {
                "dtype": tensor.dtype.code,
                "shape": tensor.dtype.element_shape([stop - start for start, stop in box]),
                "data_offsets": (begin, end),
            }
        return self._as_header(entries)

    def _as_header(self, entries: Mapping[str, Any]) -> bytes:
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_JSON:
            raise _too_long(self.name, len(text), len(entries) - 1)
        return len(text).to_bytes(8, "little") + text


def _sharding(offsets: str) -> dict[str, str]:
    return {SHARDING_INFO: offsets, "DCP_VERSION": "1.0"}


def _too_long(name: str, length: int, count: int) -> LayoutError:
    return LayoutError(
        f"{name}: a header of {bytes_text(length)} for {count} tensors is over the format's limit of "
        f"{bytes_text(MAX_JSON)}; several files in a folder have shorter ones, and to='dcp' has no such limit"
    )


def single_file(
    name: str, wanted: Sequence[CutTensor], metadata: Mapping[str, str], *, has_digests: bool = True
) -> list[SafetensorsFile]:
    """Return the only file, with all tensors whole."""
    (slots,) = whole_slots(wanted, [range(len(wanted))])
    return [SafetensorsFile(name, slots, wanted, HeaderText(metadata, has_digests))]


def hugging_face_files(wanted: Sequence[CutTensor], most: int, metadata: Mapping[str, str]) -> list[SafetensorsFile]:
    """Return files of at most `most` bytes with all tensors whole, split as by Hugging Face's `save_pretrained`."""
    groups: list[list[int]] = [[]]
    filled = 0
    for i, tensor in enumerate(wanted):
        if groups[-1] and filled + tensor.nbytes > most:
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += tensor.nbytes
    names = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    if len(names) > 1:
        _check_index(wanted, groups, names)
    else:
        names = ["model.safetensors"]
    slots = whole_slots(wanted, groups)
    text = HeaderText(metadata, files=len(names))
    return [SafetensorsFile(name, held, wanted, text) for name, held in zip(names, slots, strict=True)]


def _check_index(wanted: Sequence[CutTensor], groups: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    """Refuse an index that is longer than readers accept.

    Raises:
        LayoutError: if it is; the message names a form without an index.
    """
    text = json.dumps(_index(sum(tensor.nbytes for tensor in wanted), {}), indent=2)
    # Within the braces a line for each tensor, `    "w": "file",`, the last without a comma; and one for the brace.
    length = len(text) + len("\n  ") - 1
    for group, name in zip(groups, names, strict=True):
        length += sum(len(json.dumps(wanted[i].name)) for i in group) + len(group) * (len(name) + len('\n    : "",'))
    if length > MAX_JSON:
        raise LayoutError(
            f"an index of {bytes_text(length)} for {len(wanted)} tensors is over {bytes_text(MAX_JSON)}, the limit "
            "for reading it; to='dcp' has no such limit"
        )


def index_of(files: Sequence[SafetensorsFile], wanted: Sequence[NamedTensor]) -> dict[str, Any]:
    """Return the text of the index of a folder in Hugging Face's format."""
    held = {wanted[slot.tensor].name: file.name for file in files for slot in file.slots}
    return _index(sum(file.data_bytes for file in files), held)


def _index(nbytes: int, held: Mapping[str, str]) -> dict[str, Any]:
    return {"metadata": {"total_size": nbytes}, "weight_map": held}


def sharded_files(wanted: Sequence[CutTensor], metadata: Mapping[str, str]) -> list[SafetensorsFile]:
    """Return a file for each device that owns shards. The owner of a shard is the first device that holds it.

    The header of a file states which parts of tensors it has. The names and the entry `DCP_SHARDING_INFO` are those of
    PyTorch's `HuggingFaceStorageWriter`, which has one box of a tensor per file: further boxes of a device are in
    further files of that device.
    """
    held = slots_of(wanted, file_order(wanted))
    parts: dict[int, int] = {}
    for device, number in held:
        parts[device] = max(parts.get(device, 0), number + 1)
    ranks = {device: rank for rank, device in enumerate(sorted(parts), 1)}
    lengths = HeaderLengths(wanted, len(held))
    text = HeaderText(metadata, has_offsets=True, files=len(held))
    files = []
    for (device, number), slots in held.items():
        sizes = slots.nbytes
        name = f"shard-{ranks[device]:05}-model-{number + 1:05}-of-{parts[device]:05}.safetensors"
        start = lengths.header(name, slots.at(begins_of(sizes)), metadata)
        known = Extent(start, start + int(sizes.sum()))
        files.append(SafetensorsFile(name, slots, wanted, text, known))
    return files


class HeaderLengths:
    """The lengths of headers of sharded files, found without making the headers: they may have millions of entries.

    Args:
        wanted: All tensors that are written.
        count: The number of files.
    """

    def __init__(self, wanted: Sequence[NamedTensor], count: int) -> None:
        self._count = count
        facts = []
        shapes: list[int] = []
        for tensor in wanted:
            shapes += tensor.shape
            facts.append((len(shapes), *_name_lengths(tensor.name), len(tensor.dtype.code or "")))
        self._ends, self._named, self._texts, codes = np.array(facts, np.int64).reshape(-1, 4).T
        self._named = self._named + codes
        self._packed = {number: tensor for number, tensor in enumerate(wanted) if tensor.dtype.packed is not None}
        self._shapes = np.array(shapes, np.int64)

    def header(self, name: str, slots: Slots, metadata: Mapping[str, str]) -> int:
        """Return the length in bytes of the header of a file with these slots."""
        empty = {"format": "pt", **metadata, **_sharding("{}"), **part_mark(self._count, {})}
        length = len(json.dumps({"__metadata__": empty}, separators=(",", ":"), ensure_ascii=False).encode())
        ends = slots.begins + slots.nbytes
        # Of a tensor "w" of one dim: `,"w":{"dtype":"F8","shape":[2],"data_offsets":[0,2]}` and, within a text,
        # `\\"w\\": {\\"saved_offsets\\": [0]}`, with `, ` before each but the first.
        entry = len(',:{"dtype":"","shape":[],"data_offsets":[,]}') + len(': {\\"saved_offsets\\": []}, ')
        length += len(slots) * entry - (2 if len(slots) else 0)
        length += int((self._named[slots.tensors] + digits_of(slots.begins) + digits_of(ends)).sum())
        parts = 0
        for rank, chosen in slots.table.by_rank(slots.tensors):
            tensors = slots.tensors[chosen]
            starts, stops = slots.table.sides(slots.places[chosen], rank)
            length += int(digits_of(starts).sum() + digits_of(stops - starts).sum())
            commas = max(rank - 1, 0)
            length += len(chosen) * 3 * commas
            # And of each that is not whole, in another text, `\\"w\\":[4]`, with `,` before each but the first.
            shapes = self._shapes[(self._ends[tensors] - rank)[:, None] + np.arange(rank)]
            is_part = ((starts != 0) | (stops != shapes)).any(axis=1)
            length += int(digits_of(shapes[is_part]).sum() + self._texts[tensors[is_part]].sum())
            length += int(is_part.sum()) * (len(":[],") + commas)
            parts += int(is_part.sum())
        length -= 1 if parts else 0
        if self._packed:
            length += sum(
                self._more(slots[at]) for at, number in enumerate(slots.tensors.tolist()) if number in self._packed
            )
        length += -length % 8
        if length > MAX_JSON:
            raise _too_long(name, length, len(slots))
        return 8 + length

    def _more(self, slot: Any) -> int:
        """Return how many more characters a box of a packed dtype takes in elements than in bytes."""
        tensor = self._packed[slot.tensor]
        start, extents = [at for at, _ in slot.box], [stop - start for start, stop in slot.box]
        more = _digits(tensor.dtype.element_start(start)) - _digits(start)
        more += _digits(tensor.dtype.element_shape(extents)) - _digits(extents)
        if extents != list(tensor.shape):
            more += _digits(tensor.dtype.element_shape(tensor.shape)) - _digits(tensor.shape)
        return more


def _digits(numbers: Iterable[int]) -> int:
    return sum(len(str(number)) for number in numbers)


def _name_lengths(name: str) -> tuple[int, int]:
    """Return the length of a name as a JSON string plus that in a text of ASCII; and its length in another text."""
    held, within = json.dumps(name, ensure_ascii=False), json.dumps(json.dumps(name))
    text = json.dumps(held, ensure_ascii=False)
    return len(held.encode()) + len(within) - 2, len(text.encode()) - 2
