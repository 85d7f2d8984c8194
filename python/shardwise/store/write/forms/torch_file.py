"""Files of `torch.save`: one zip container with a pickle of a nested dict, and a member for each tensor.

The pickle is one of the slots; its bytes are in the plan. The bytes around the members follow from the members' sizes
and CRC-32: a header before each, and the directory after the last.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ...._fork import cached_property
from ....errors import LayoutError
from .archives import (
    ALIGNMENT,
    ROOT,
    Member,
    ZippedFile,
    directory_entry,
    directory_sizes,
    end_of,
    local,
    local_size,
    local_sizes,
)
from .files import NO_DIGESTS, CutTensor, FileDigests, Headers, whole_slots

__all__ = ["RANK_LIST", "TorchFile", "TorchPart", "torch_file"]

#: The end of the name of a value that is the list of ranks of a DTensor's mesh, stored next to the pickle.
RANK_LIST = "rank_map"

#: The members after those of the tensors: name and contents.
_LAST = ((f"{ROOT}/byteorder", b"little"), (f"{ROOT}/version", b"3\n"))


class _SlotPlaces(NamedTuple):
    """The first byte of each slot's header and of its data, and the byte after the last slot."""

    headers: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    end: int


@dataclass(frozen=True, eq=False)
class TorchFile(ZippedFile):
    """A `.pt` file. Each slot is a member: a whole tensor, or the pickle."""

    @cached_property
    def places(self) -> _SlotPlaces:
        """The places of the slots.

        Raises:
            LayoutError: if the file would be too large.
        """
        sizes = self.boxes.nbytes
        if float(sizes.sum(dtype=float)) >= 2.0**62:
            raise LayoutError(f"{self.name}: would have more than 2**62 bytes")
        # Data begins at multiples of the alignment, from one to the next: in one sum.
        steps = local_sizes(self._name_sizes, sizes)
        steps[1:] += sizes[:-1]
        begins = np.cumsum(-(-steps // ALIGNMENT) * ALIGNMENT)
        ends = np.concatenate([[0], begins + sizes])
        return _SlotPlaces(ends[:-1], begins, int(ends[-1]))

    @cached_property
    def _name_sizes(self) -> npt.NDArray[np.int64]:
        """Return the length in bytes of each slot's member name."""
        return np.array(list(map(len, self._names())), np.int64)

    def _names(self) -> list[bytes]:
        """Return the name of each slot's member; they are not kept, which for all files would take too much memory."""
        return list(map(self._name, self.boxes.tensors.tolist()))

    def _begins(self) -> npt.NDArray[np.int64]:
        return self.places.begins

    @cached_property
    def end(self) -> int:
        """The byte after the last slot's data."""
        tail, entries = self._last
        directory = self.places.end + len(tail)
        sizes = directory_sizes(self._name_sizes, self.places.headers, self.boxes.nbytes)
        end = directory + len(entries) + int(sizes.sum())
        return end + len(end_of(len(self.boxes) + len(_LAST), directory, end))

    def before(self, number: int, digests: FileDigests = NO_DIGESTS) -> tuple[int, bytes]:
        """Return the header of a member; after the last slot, the further members and the directory."""
        if number == len(self.boxes):
            return self.places.end, self._tail(self._members(digests))
        name, at = self._name(int(self.boxes.tensors[number])), int(self.places.headers[number])
        return at, _header(Member(name, at, int(self.boxes.nbytes[number]), digests.crcs.get(number, 0)))

    def headers(self, digests: FileDigests = NO_DIGESTS) -> Headers:
        """Yield the headers, and the directory."""
        digest, members = hashlib.sha256(), self._members(digests)
        for member in members:
            text = _header(member)
            digest.update(text)
            digest.update(self._beside(member))
            yield member.at, text
        text = self._tail(members)
        digest.update(text)
        yield self.places.end, text
        return digest.hexdigest()

    def _members(self, digests: FileDigests) -> list[Member]:
        """Return the member of each slot."""
        crcs = (digests.crcs.get(number, 0) for number in range(len(self.boxes)))
        return list(map(Member, self._names(), self.places.headers.tolist(), self.boxes.nbytes.tolist(), crcs))

    def _beside(self, member: Member) -> bytes:
        """Return the bytes that the digest of the bytes around the tensors covers after a member's header."""
        return b""

    def _name(self, tensor: int) -> bytes:
        return (f"{ROOT}/data.pkl" if self.wanted[tensor].is_object else f"{ROOT}/data/{tensor}").encode()

    @cached_property
    def _last(self) -> tuple[bytes, bytes]:
        """Return the members after the tensors' ones, and their entries in the directory."""
        tail, entries = bytearray(), bytearray()
        for name, data in _LAST:
            member = Member(name.encode(), self.places.end + len(tail), len(data), zlib.crc32(data))
            tail += local(member) + data
            entries += directory_entry(member)
        return bytes(tail), bytes(entries)

    def _tail(self, members: Sequence[Member]) -> bytes:
        tail, last = self._last
        entries = b"".join(map(directory_entry, members)) + last
        directory = self.places.end + len(tail)
        return tail + entries + end_of(len(self.boxes) + len(_LAST), directory, directory + len(entries))


@dataclass(frozen=True, eq=False)
class TorchPart(TorchFile):
    """A file of a folder with a manifest; the digest of the bytes around its tensors also covers the pickle."""

    headers_key: ClassVar[str] = "members_sha256"

    def _beside(self, member: Member) -> bytes:
        """Return the CRC-32 of the pickle."""
        return member.crc.to_bytes(4, "little") if member.name.endswith(b"/data.pkl") else b""

    def _name(self, tensor: int) -> bytes:
        if self.wanted[tensor].name.endswith(RANK_LIST):
            return f"{ROOT}/data/{tensor}".encode()
        return super()._name(tensor)


def _header(member: Member) -> bytes:
    """Return the header of a member, up to the first byte of its data."""
    return local(member, -(member.at + local_size(member)) % ALIGNMENT)


def torch_file(name: str, wanted: Sequence[CutTensor]) -> TorchFile:
    """Return the only file, with all tensors whole; the slot that is a value is the pickle."""
    (slots,) = whole_slots(wanted, [range(len(wanted))])
    return TorchFile(name, slots, wanted)
