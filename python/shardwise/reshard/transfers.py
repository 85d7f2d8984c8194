"""All boxes that move from one tiling of a tensor to another, as arrays and one by one, and their bytes."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments import int64_array
from .._core import ReshardPlan as CorePlan
from .._drawn import Drawn
from .._dtypes import itemsize_of
from .._frozen import handed_out
from .._text import counted, shown
from ..errors import SizeOverflowError
from ..layout import TensorLayout
from ..tiling import Tiling
from .orders import check_packed
from .run import slices_of
from .same import same_holders
from .transfer import Transfer

__all__ = ["Transfers"]


class Transfers(Drawn):
    """The moves from one tiling of a tensor to another: a sequence of `Transfer` objects, made when asked for.

    Args:
        src: the tiling to start from.
        dst: the tiling to end with.
        senders: the sender of each transfer, as its position in `src.holders`; chosen if not given.
    """

    __slots__ = ("_core", "_dst", "_kept", "_pieces", "_senders", "_src", "_transfers")

    _core: CorePlan
    _src: Tiling
    _dst: Tiling
    _transfers: npt.NDArray[np.void] | None
    _kept: npt.NDArray[np.void] | None
    _pieces: npt.NDArray[np.int64] | None
    _senders: bytes | None

    def __init__(self, src: Tiling, dst: Tiling, senders: Any = None) -> None:
        if not (isinstance(src, Tiling) and isinstance(dst, Tiling)):
            name, value = ("dst", dst) if isinstance(src, Tiling) else ("src", src)
            hint = "; layout.partition(shape) makes one of it" if isinstance(value, TensorLayout) else ""
            raise TypeError(f"{name} must be a Partition or another Tiling, got {type(value).__name__}{hint}")
        check_packed(src, dst)
        self._senders = None if senders is None else int64_array("senders", senders).tobytes()
        self._core = CorePlan(src.core, dst.core, same_holders(src, dst), senders)
        self._src, self._dst = src, dst
        self._transfers = self._kept = self._pieces = None

    @property
    def core(self) -> CorePlan:
        """The compiled object; for the modules of the package only."""
        return self._core

    @property
    def src(self) -> Tiling:
        """The tiling to start from."""
        return self._src

    @property
    def dst(self) -> Tiling:
        """The tiling to end with."""
        return self._dst

    @property
    def addends(self) -> int:
        """The number of partial sums that make one value: 1 unless the source is unreduced."""
        return self._core.addends

    @property
    def transfers(self) -> npt.NDArray[np.void]:
        """All transfers, in the order of the destination devices: a read-only structured array.

        The fields are `src_device` and `dst_device`, the positions of the holders in `src.holders` and `dst.holders`
        (for partitions the device indices in the two meshes), and `start` and `stop`, one int64 per dim: the global
        box.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> whole, cut = TensorLayout((None,), mesh), TensorLayout(("x",), mesh)
        >>> transfers = plan_reshard(cut.partition((8,)), whole.partition((8,))).transfers
        >>> transfers["src_device"].tolist(), transfers["start"].tolist()
        ([1, 0], [[4], [0]])
        """
        if self._transfers is None:
            self._transfers = self._structured(self._core.transfers())
        return handed_out(self._transfers)

    @property
    def kept(self) -> npt.NDArray[np.void]:
        """The boxes that stay with their holder, with the fields of `transfers`; between partitions at most one each.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> whole, cut = TensorLayout((None,), mesh), TensorLayout(("x",), mesh)
        >>> plan_reshard(whole.partition((8,)), cut.partition((8,))).kept["stop"].tolist()
        [[4], [8]]
        """
        if self._kept is None:
            self._kept = self._structured(self._core.kept())
        return handed_out(self._kept)

    def _structured(self, rows: bytes) -> npt.NDArray[np.void]:
        rank = len(self._dst.shape)
        side = (np.int64, (rank,))
        dtype = np.dtype([("src_device", np.int64), ("dst_device", np.int64), ("start", *side), ("stop", *side)])
        array: npt.NDArray[np.void] = np.ndarray(len(rows) // dtype.itemsize, dtype, rows)
        return array

    def pieces(self) -> npt.NDArray[np.int64]:
        """Return the numbers of the pieces that each transfer is from and to: int64 (transfers, 2).

        The numbers count the pieces of the sender and of the receiver; between partitions, which have one each, all are
        0.

        >>> from shardwise import Tiling, plan_reshard
        >>> src = Tiling.from_boxes((6,), {"file": [[(0, 2)], [(2, 6)]]})
        >>> plan_reshard(src, Tiling.from_boxes((6,), [[(1, 3)]])).pieces().tolist()
        [[0, 0], [1, 0]]
        """
        if self._pieces is None:
            self._pieces = self._core.pieces()
        copy: npt.NDArray[np.int64] = self._pieces.copy()
        return copy

    def source_boxes(self) -> npt.NDArray[np.int64]:
        """Return each transfer's box in the sender's array: int64 (transfers, dims, 2), start and stop.

        If that array is flat, the box is in the part of it that `Transfer.src_window` gives.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> whole, cut = TensorLayout((None,), mesh), TensorLayout(("x",), mesh)
        >>> plan_reshard(cut.partition((8,)), whole.partition((8,))).source_boxes().tolist()
        [[[0, 4]], [[0, 4]]]
        """
        return self._core.local_boxes(0, False)

    def destination_boxes(self) -> npt.NDArray[np.int64]:
        """Return each transfer's box in the receiver's array: int64 (transfers, dims, 2), start and stop.

        If that array is flat, the box is in the part of it that `Transfer.dst_window` gives.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> whole, cut = TensorLayout((None,), mesh), TensorLayout(("x",), mesh)
        >>> plan_reshard(cut.partition((8,)), whole.partition((8,))).destination_boxes().tolist()
        [[[4, 8]], [[0, 4]]]
        """
        return self._core.local_boxes(1, False)

    def __len__(self) -> int:
        return self._core.count

    def __getitem__(self, number: int) -> Transfer:
        number = operator.index(number)
        if not -len(self) <= number < len(self):  # numpy has another exception for what does not fit in 64 bits.
            raise IndexError(
                f"transfer {shown(number)} is outside the plan, which has {counted(len(self), 'transfer')}"
            )
        row = self.transfers[number]
        if self._pieces is None:
            self._pieces = self._core.pieces()
        source, device = int(row["src_device"]), int(row["dst_device"])
        start, stop = row["start"], row["stop"]
        src_piece, dst_piece = self._pieces[number].tolist()
        src_origin, src_window = self._core.place(0, source, src_piece)
        dst_origin, dst_window = self._core.place(1, device, dst_piece)
        return Transfer(
            self._src.holder_label(source),
            self._dst.holder_label(device),
            slices_of(start, stop),
            slices_of(start - src_origin, stop - src_origin),
            slices_of(start - dst_origin, stop - dst_origin),
            math.prod((stop - start).tolist()),
            src_window,
            dst_window,
        )

    def __iter__(self) -> Iterator[Transfer]:
        return (self[number] for number in range(len(self)))

    def bytes_sent(self, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]:
        """Return the bytes that each source holder sends of a tensor of `dtype`: int64 (source holders,).

        Raises:
            SizeOverflowError: if all that is sent is over 2**63 - 1 bytes.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((4,), ("x",))
        >>> whole, cut = TensorLayout((None,), mesh), TensorLayout(("x",), mesh)
        >>> plan_reshard(cut.partition((8,)), whole.partition((8,))).bytes_sent("int16").tolist()
        [12, 12, 12, 12]
        """
        return _bytes_by(self.transfers, "src_device", self._src.holder_count, dtype)

    def bytes_received(self, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]:
        """Return the bytes that each destination holder receives: int64 (destination holders,); see `bytes_sent`."""
        return _bytes_by(self.transfers, "dst_device", self._dst.holder_count, dtype)

    def bytes_kept(self, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]:
        """Return the bytes that each destination holder already has: int64 (destination holders,); see `bytes_sent`."""
        return _bytes_by(self.kept, "dst_device", self._dst.holder_count, dtype)

    def total_bytes(self, dtype: npt.DTypeLike) -> int:
        """Return the bytes that move in all.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((4,), ("x",))
        >>> whole, cut = TensorLayout((None,), mesh), TensorLayout(("x",), mesh)
        >>> plan_reshard(cut.partition((8,)), whole.partition((8,))).total_bytes("int16")
        48
        """
        return _sum(_volumes(self.transfers)) * itemsize_of(dtype)


def _volumes(transfers: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    volumes: npt.NDArray[np.int64] = (transfers["stop"] - transfers["start"]).prod(axis=-1, dtype=np.int64)
    return volumes


def _sum(numbers: npt.NDArray[np.int64]) -> int:
    """Return the exact sum, which may need more than 64 bits."""
    return (int((numbers >> 32).sum()) << 32) + int((numbers & 0xFFFFFFFF).sum())


def _bytes_by(transfers: npt.NDArray[np.void], field: str, devices: int, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]:
    volumes, itemsize = _volumes(transfers), itemsize_of(dtype)
    if _sum(volumes) * itemsize > 2**63 - 1:
        raise SizeOverflowError(f"{_sum(volumes)} elements of {itemsize} bytes are over the limit of {2**63 - 1} bytes")
    totals = np.zeros(devices, np.int64)
    np.add.at(totals, transfers[field], volumes)
    return totals * itemsize
