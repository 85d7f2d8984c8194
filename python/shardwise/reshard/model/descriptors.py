"""Descriptors: what a holder sends, receives and copies of a model, as arrays for transports that take addresses."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._atomic import read_file, replace_file
from ..._text import counted, shown
from ...errors import LayoutError, ParseError

__all__ = ["DESCRIPTOR", "ZEROS", "Descriptors", "RowTable"]

RowTable = npt.NDArray[np.void]

#: The fields of a descriptor, which is `count` runs of `bytes` bytes. Offsets and strides are in bytes, within the
#: tensor's array at the sender and at the receiver.
DESCRIPTOR = np.dtype(
    [
        ("peer", np.int64),
        ("src_tensor", np.int64),
        ("dst_tensor", np.int64),
        ("src_offset", np.int64),
        ("dst_offset", np.int64),
        ("bytes", np.int64),
        ("count", np.int64),
        ("src_stride", np.int64),
        ("dst_stride", np.int64),
    ]
)

#: The number that stands for padding in place of a tensor's number.
ZEROS = -1

_MAGIC = b"shardwise descriptors 3\n"
_LABELS = (str, int)
#: A bound on offsets in memory, so small that sums of a few offsets fit in 64 bits.
_FAR = 2.0**60


@dataclass(frozen=True, eq=False, repr=False)
class Descriptors:
    """All that one holder sends, receives and copies in a plan of a model; `ModelPlan.descriptors` makes them.

    Each row of `sends`, `receives` and `copies` is `count` runs of `bytes` bytes: run k is read at
    `src_offset + k * src_stride` of the sender's array of `src_tensor`, and written at `dst_offset + k * dst_stride` of
    the receiver's array of `dst_tensor`. Offsets are in bytes, into arrays in C order. `peer` is a position in `peers`;
    the tensors are positions in `tensors`, and the same unless tensors are rewritten. Rows are sorted by peer, tensor
    and offset at the receiver; the rows that one holder sends to another are those that the other receives from it, in
    the same order.

    Attributes:
        holder: The label of the holder.
        peers: The labels of all holders of the plan.
        tensors: The names of all tensors of the plan: those of the destination, then others of the source.
        dtypes: The name of each tensor's dtype.
        sends: The runs that the holder sends to others.
        receives: The runs that the holder receives from others.
        copies: The runs that the holder copies from its own source array to its own destination array.
        zeros: The runs that the holder fills with zeros: the padding of rewritten tensors. Their fields `src_tensor`,
            `src_offset` and `src_stride` have no meaning.
    """

    holder: Any
    peers: tuple[Any, ...]
    tensors: tuple[str, ...]
    dtypes: tuple[str, ...]
    sends: RowTable
    receives: RowTable
    copies: RowTable
    zeros: RowTable

    @property
    def bytes_sent(self) -> int:
        """The bytes that the holder sends in all."""
        return _volume(self.sends)

    @property
    def bytes_received(self) -> int:
        """The bytes that the holder receives in all."""
        return _volume(self.receives)

    @property
    def bytes_copied(self) -> int:
        """The bytes that the holder copies in its own memory."""
        return _volume(self.copies)

    def digest(self, peer: Any) -> bytes:
        """Return 32 bytes that are equal on both sides if two holders have the same rows for each other.

        They are a digest of the names, the dtypes and the rows of what the two send to each other.

        Raises:
            LayoutError: if there is no such peer.
        """
        if peer not in self.peers:
            raise LayoutError(f"holder {shown(peer)} is not in the plan")
        own, other = self.peers.index(self.holder), self.peers.index(peer)
        digest = hashlib.sha256()
        # The lower of the two first, so that both hash the same.
        for rows in (self.sends, self.receives) if own < other else (self.receives, self.sends):
            mine = rows[rows["peer"] == other]
            mine["peer"] = 0
            used = np.unique(np.concatenate([mine["src_tensor"], mine["dst_tensor"]])).tolist()
            described = [(tensor, self.tensors[tensor], self.dtypes[tensor]) for tensor in used]
            digest.update(repr((len(mine), described)).encode())
            digest.update(mine.astype(_LITTLE).tobytes())
        return digest.digest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file from which `load` reads equal descriptors; an existing file is replaced as a whole.

        The first line has the length of the second, which is JSON. After it come the rows as in memory, little-endian.

        Raises:
            LayoutError: if a label is neither string nor integer.
            OSError: if the file cannot be written.
        """
        for label in (self.holder, *self.peers):
            if not isinstance(label, _LABELS) or isinstance(label, bool):
                raise LayoutError(f"the label {shown(label)} cannot be written: a file has labels that are str or int")
        rows = [self.sends, self.receives, self.copies, self.zeros]
        head = {"holder": self.holder, "peers": self.peers, "tensors": self.tensors, "dtypes": self.dtypes}
        head["rows"] = [len(r) for r in rows]
        text = json.dumps(head).encode() + b"\n"
        body = b"".join(np.ascontiguousarray(r).astype(_LITTLE).tobytes() for r in rows)
        replace_file(path, _MAGIC + f"{len(text):020}\n".encode() + text + body)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Descriptors:
        """Read the file that `save` has written; the rows are not copied.

        Raises:
            ParseError: if the file has no descriptors, or is not whole.
            OSError: if the file cannot be read.
        """
        data = read_file(path)
        start = len(_MAGIC) + 21
        if not data.startswith(_MAGIC) or not data[len(_MAGIC) : start - 1].isdigit():
            raise ParseError(f"{os.fspath(path)!r} is not a file of descriptors")
        stop = start + int(data[len(_MAGIC) : start - 1])
        try:
            head = json.loads(data[start:stop])
            holder, peers, tensors, dtypes, counts = (
                head[key] for key in ("holder", "peers", "tensors", "dtypes", "rows")
            )
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _not_a_header(path) from None
        for listed, kinds in (
            (peers, _LABELS), ([holder], _LABELS), (tensors, (str,)), (dtypes, (str,)), (counts, (int,)),
        ):  # fmt: skip
            if not isinstance(listed, list) or any(type(one) not in kinds for one in listed):
                raise _not_a_header(path)
        if holder not in peers or any(len(set(names)) != len(names) for names in (peers, tensors)):
            raise _not_a_header(path)
        if len(dtypes) != len(tensors):
            raise _not_a_header(path)
        size = _LITTLE.itemsize
        if len(counts) != 4 or min(counts) < 0 or len(data) - stop != sum(counts) * size:
            raise ParseError(f"{os.fspath(path)!r} has {len(data)} bytes, which is not what its header says")
        found = []
        for count in counts:
            rows = np.frombuffer(data, _LITTLE, count, stop)
            stop += count * size
            if count and (
                min(int(rows[name].min()) for name in rows.dtype.names or ()) < 0
                or rows["peer"].max() >= len(peers)
                or max(rows["src_tensor"].max(), rows["dst_tensor"].max()) >= len(tensors)
            ):
                raise ParseError(f"{os.fspath(path)!r} has a row of a peer or a tensor that does not exist")
            if count and max(_furthest(rows, "src"), _furthest(rows, "dst")) >= _FAR:
                raise ParseError(f"{os.fspath(path)!r} has a row that reaches beyond the addresses of memory")
            found.append(rows)
        return cls(holder, tuple(peers), tuple(tensors), tuple(dtypes), *found)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Descriptors):
            return NotImplemented
        mine, theirs = ((each.sends, each.receives, each.copies, each.zeros) for each in (self, other))
        heads = [(each.holder, each.peers, each.tensors, each.dtypes) for each in (self, other)]
        return heads[0] == heads[1] and all(
            len(a) == len(b) and bool((a == b).all()) for a, b in zip(mine, theirs, strict=True)
        )

    def __hash__(self) -> int:
        return hash((self.holder, self.peers, self.tensors, self.sends.tobytes(), self.receives.tobytes()))

    def __repr__(self) -> str:
        return (
            f"<Descriptors of {shown(self.holder)}: {counted(len(self.sends), 'send')}, "
            f"{counted(len(self.receives), 'receive')}, "
            f"{counted(len(self.copies), 'copy', 'copies')}>"
        )


_LITTLE = DESCRIPTOR.newbyteorder("<")


def _not_a_header(path: str | os.PathLike[str]) -> ParseError:
    return ParseError(f"{os.fspath(path)!r}: its header is not that of a file of descriptors")


def _furthest(rows: RowTable, side: str) -> float:
    """Return the last byte after any of the rows, or the bytes of the largest, as a float, which cannot overflow."""
    offset, size, count, stride = (
        rows[name].astype(np.float64) for name in (f"{side}_offset", "bytes", "count", f"{side}_stride")
    )
    return float(np.maximum(offset + count * stride + size, size * count).max())


def _volume(rows: RowTable) -> int:
    return sum((rows["bytes"] * rows["count"]).tolist())
