"""Digests of arrays: a number for each tensor, which the digests of its parts add up to, however it is cut."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._arguments import array_of, check_fields, int64_array, integer, refuse_mask, sizes_of
from ..._dtypes import find_dtype
from ..._text import counted, elements_text, shown
from ...errors import LayoutError, ParseError
from ...piece import Piece, Slices, check_slices
from ...pieces import LocatedPiece
from .digest_torch import KEYS, RADIX, digest_boxes, integers, words_of
from .engine import DIGEST_MODULUS, CopyJob, check_threads

__all__ = ["Digest", "digest", "digests_of_pieces", "elements_with_bits"]

_TEXT = re.compile(r"([^\x00-\x1f]+)\[((?:\d+(?:,\d+)*)?)\]:([0-9a-f]{32})", re.ASCII)


@dataclass(frozen=True)
class Digest:
    """The digest of a tensor, or of a part of it: a number modulo 2**127 - 1, with the tensor's dtype and shape.

    Digests of parts add up to the tensor's, and `-` takes a part away; `==` compares dtype and shape too. It is not
    cryptographic. `docs/digests.md` specifies it.

    >>> import numpy as np
    >>> table = np.arange(12, dtype=np.int32).reshape(3, 4)
    >>> left = digest(table[:, :3], shape=(3, 4), box=(slice(0, 3), slice(0, 3)))
    >>> right = digest(table[:, 3:], shape=(3, 4), box=(slice(0, 3), slice(3, 4)))
    >>> left + right == digest(table)
    True
    >>> print(digest(np.array([1, 0], np.uint8)))
    uint8[2]:00000000000000001c4415072f63b9b5
    """

    number: int
    #: The dtype's name; numpy's own name for a dtype that only numpy has.
    dtype: str
    #: The shape of the whole tensor.
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_fields(self, dtype=str)
        object.__setattr__(self, "number", integer("number", self.number))
        object.__setattr__(self, "shape", sizes_of("shape", self.shape))
        if not 0 <= self.number < DIGEST_MODULUS:
            raise LayoutError(f"number is {shown(self.number)}; a digest is at least 0 and below 2**127 - 1")

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Return the digest that a text of `str(digest)` stands for.

        Raises:
            ParseError: if the text is not that of a digest.

        >>> Digest.parse("uint8[2]:00000000000000001c4415072f63b9b5").shape
        (2,)
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a string, got {type(text).__name__}")
        found = _TEXT.fullmatch(text)
        if found is None or int(found[3], 16) >= DIGEST_MODULUS:
            raise ParseError(
                f"{shown(text)} is not a digest: a dtype, [sizes], a colon and 32 hexadecimal digits below 2**127 - 1"
            )
        shape = tuple(int(size) for size in found[2].split(",") if size)
        return cls(int(found[3], 16), found[1], shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]:{self.number:032x}"

    def __add__(self, other: Digest) -> Digest:
        if not isinstance(other, Digest):
            return NotImplemented
        return self._with(self.number + self._same("+", other))

    def __radd__(self, other: object) -> Digest:
        # So that `sum` adds digests, which begins with 0.
        return self if type(other) is int and other == 0 else NotImplemented

    def __sub__(self, other: Digest) -> Digest:
        if not isinstance(other, Digest):
            return NotImplemented
        return self._with(self.number - self._same("-", other))

    def _with(self, number: int) -> Digest:
        return Digest(number % DIGEST_MODULUS, self.dtype, self.shape)

    def _same(self, sign: str, other: Digest) -> int:
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            tensors = " and ".join(f"{each.dtype}{list(each.shape)}" for each in (self, other))
            raise LayoutError(f"{sign} of digests of two tensors, {tensors}: they add up within one tensor only")
        return other.number


def digest(
    array: Any,
    *,
    shape: Sequence[int] | None = None,
    box: Slices | None = None,
    pieces: Iterable[Piece] | None = None,
    offsets: Any = None,
    threads: int | None = None,
) -> Digest:
    """Return the digest of a tensor, or of a part of it, from an array, which is not copied.

    Without `shape` the array is the whole tensor. With `shape`, one of `box`, `pieces` and `offsets` says which part
    of a tensor of that shape the array is; the digests of parts that hold each element once add up to the tensor's.
    Padding is not counted, and a replica that is added counts twice.

    Args:
        array: Anything with a buffer, of any dtype and strides; bytes are uint8. A `torch.Tensor` on another device
            than the CPU is read there, by PyTorch's operations: its values are not copied to the host.
        shape: The tensor's shape.
        box: The part, of the array's shape: a slice per dim.
        pieces: The parts of the array and their places, as `Partition.pieces` and `Tiling.pieces` give them.
        offsets: The flat position in the tensor of each element of the array, without repetitions: for a change of few
            elements, `new = old + digest(after, …) - digest(before, …)`.
        threads: The number of threads, on the CPU; one per core if left out.

    Raises:
        TypeError: if the array has no buffer, or holds objects.
        LayoutError: if the part does not fit the array or the shape, or parts overlap.

    >>> import numpy as np
    >>> old, new = np.zeros(1000, np.float32), np.zeros(1000, np.float32)
    >>> new[[3, 500]] = 1.5, 2.5
    >>> places = {"shape": (1000,), "offsets": [3, 500]}
    >>> digest(old) + digest(new[[3, 500]], **places) - digest(old[[3, 500]], **places) == digest(new)
    True
    """
    if sum(each is not None for each in (box, pieces, offsets)) != (shape is not None):
        raise TypeError(
            "a part of a tensor needs shape and one of box, pieces and offsets; for a whole tensor leave these out"
        )
    check_threads(threads)
    memory, dtype = _memory(array)
    whole = tuple(memory.shape) if shape is None else sizes_of("shape", shape)
    if offsets is not None:
        places = int64_array("offsets", offsets.cpu().numpy() if _is_torch(offsets) else offsets).reshape(-1)
        return Digest(_of_offsets(memory, whole, places), dtype, whole)
    if pieces is not None:
        parts = [_placed(piece, memory, whole) for piece in pieces]
    else:
        parts = [(_bounds(tuple(slice(0, size) for size in whole) if box is None else box, memory, whole), memory)]
    if isinstance(memory, np.ndarray):
        return Digest(_of_boxes(parts, memory.itemsize, whole, threads), dtype, whole)
    return Digest(digest_boxes(parts, whole), dtype, whole)


def digests_of_pieces(parts: Iterable[tuple[Any, tuple[int, ...], Piece]]) -> list[Digest]:
    """Return the digest of a piece of each array, given the shape of its tensor; all on the CPU are read as one job."""
    job = CopyJob()
    nowhere = job.discard()
    found: list[tuple[int | None, str, tuple[int, ...]]] = []
    for array, shape, piece in parts:
        memory, dtype = _memory(array)
        part = _placed(piece, memory, shape)
        if isinstance(memory, np.ndarray):
            _add_parts(job, nowhere, [part], memory.itemsize, shape)
            found.append((None, dtype, shape))
        else:
            found.append((digest_boxes([part], shape), dtype, shape))
    numbers = iter(job.run().digests)
    return [Digest(next(numbers) if number is None else number, dtype, shape) for number, dtype, shape in found]


def elements_with_bits(array: Any) -> int:
    """Return the number of elements of an array, of numpy or PyTorch, that have a bit that is not zero, as -0.0 has."""
    memory, _ = _memory(array)
    if not isinstance(memory, np.ndarray):
        is_set = (words_of(memory) != 0).any(-1) if memory.is_complex() else memory != 0
        return int(is_set.sum())
    if memory.itemsize in (1, 2, 4, 8):
        return int(np.count_nonzero(memory.view(f"u{memory.itemsize}")))
    return int(np.count_nonzero(np.ascontiguousarray(memory).reshape(-1, 1).view(np.uint8).any(-1)))


_DigestPart = tuple[tuple[tuple[int, int], ...], Any]


def _add_parts(job: CopyJob, nowhere: int, parts: list[_DigestPart], itemsize: int, shape: tuple[int, ...]) -> None:
    sources = [LocatedPiece(box, job.read_array(view), 0, view.strides) for box, view in parts]
    targets = [LocatedPiece.dense(box, nowhere, 0, itemsize) for box, _ in parts]
    job.add_tensor(shape, itemsize, sources, targets, digest=True)


def _of_boxes(parts: list[_DigestPart], itemsize: int, shape: tuple[int, ...], threads: int | None) -> int:
    job = CopyJob()
    _add_parts(job, job.discard(), parts, itemsize, shape)
    return sum(job.run(threads=threads).digests) % DIGEST_MODULUS


def _of_offsets(memory: Any, shape: tuple[int, ...], offsets: npt.NDArray[np.int64]) -> int:
    count, size = len(offsets), math.prod(shape)
    if memory.size != count if isinstance(memory, np.ndarray) else memory.numel() != count:
        raise LayoutError(f"offsets has {counted(count, 'position')} for an array of shape {tuple(memory.shape)}")
    if count and not 0 <= int(offsets.min()) <= int(offsets.max()) < size:
        wrong = offsets[(offsets < 0) | (offsets >= size)][0]
        raise LayoutError(f"offsets has {wrong}; positions in a tensor of shape {shape} are from 0 to {size - 1}")
    ordered = np.sort(offsets)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise LayoutError(f"offsets has {twice[0]} more than once")
    values = np.ascontiguousarray(memory if isinstance(memory, np.ndarray) else memory.cpu().numpy()).reshape(-1)
    order = np.argsort(offsets, kind="stable")
    total = 0
    for first in range(0, count, _AT_ONCE):
        some = order[first : first + _AT_ONCE]
        total += _of_elements(values[some], offsets[some])
    return total % DIGEST_MODULUS


def _of_elements(values: npt.NDArray[Any], offsets: npt.NDArray[np.int64]) -> int:
    """Return the digest of elements, given their flat positions in ascending order."""
    unit = math.gcd(values.itemsize, 8)
    each = values.itemsize // unit
    parts = values.view(np.uint8).view(f"<u{unit}").astype(np.uint64)
    # Positions in units; and the place within its word, in bits.
    places = (offsets[:, None] * each + np.arange(each)).reshape(-1)
    words = parts << (places % (8 // unit) * (8 * unit)).astype(np.uint64)
    places //= 8 // unit
    mask, products = np.uint64(0xFFFF), np.zeros((len(words), 7), np.int64)
    for low in range(4):
        limb = (words >> np.uint64(16 * low) & mask).astype(np.int64)
        for high in range(4):
            keys = _KEY_LIMBS[high][places % 512]
            products[:, low + high] += limb * keys
    blocks = places // 512
    starts = np.flatnonzero(np.diff(blocks, prepend=-1))
    total, power, before, steps = 0, 1, 0, dict[int, int]()
    for block, sums in zip(blocks[starts].tolist(), np.add.reduceat(products, starts).tolist(), strict=True):
        step = block - before
        if step not in steps:
            steps[step] = pow(RADIX, step, DIGEST_MODULUS)
        power, before = power * steps[step] % DIGEST_MODULUS, block
        total += power * sum(part << 16 * at for at, part in enumerate(sums))
    return total % DIGEST_MODULUS


_KEY_LIMBS = [np.array([key >> 16 * limb & 0xFFFF for key in KEYS], np.int64) for limb in range(4)]
#: The number of offsets that are digested at a time.
_AT_ONCE = 1 << 18


def _is_torch(array: Any) -> bool:
    return any(f"{kind.__module__}.{kind.__qualname__}" == "torch.Tensor" for kind in type(array).__mro__)


def _memory(array: Any) -> tuple[Any, str]:
    """Return an array's memory, as an array of numpy or a tensor on a device, and the name of its dtype."""
    if _is_torch(array):
        return _tensor(array), _dtype_name(array.dtype)
    memory = _array(array)
    return memory, _dtype_name(memory.dtype)


def _tensor(tensor: Any) -> Any:
    """Return a tensor viewed as integers; as a numpy array if it is on the CPU."""
    found = integers(tensor)
    return found.numpy() if found.device.type == "cpu" else found


def _array(array: Any) -> npt.NDArray[Any]:
    if isinstance(array, np.ndarray):
        refuse_mask("array", array)
    elif isinstance(array, (bytes, bytearray)):
        array = np.frombuffer(array, np.uint8)
    else:
        try:
            array = memoryview(array)
        except TypeError:
            message = f"array must be a numpy array, a torch.Tensor or a buffer, got {type(array).__name__}"
            raise TypeError(f"{message}; np.asarray(array) converts what numpy can read") from None
        array = array_of("array", np.asarray(array))
    if array.dtype.hasobject:
        raise TypeError(f"array has dtype {array.dtype}: objects have no bytes of their own to digest")
    found: npt.NDArray[Any] = array
    return found


def _dtype_name(dtype: Any) -> str:
    found = find_dtype(dtype)
    if found is not None:
        return found.name
    if isinstance(dtype, np.dtype):
        # Its name for one of ml_dtypes, the text that makes it for one of numpy: `>f4`, and structured ones in full.
        return dtype.name if dtype.kind == "V" and dtype.names is None and dtype.type is not np.void else str(dtype)
    return str(dtype).removeprefix("torch.")


def _bounds(box: Slices, memory: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    check_slices("box", box)
    if len(box) != len(shape):
        raise LayoutError(f"box has {counted(len(box), 'dim')} but shape has {len(shape)}")
    bounds = []
    for dim, (side, size) in enumerate(zip(box, shape, strict=True)):
        if side.step not in (None, 1):
            raise LayoutError(f"box has {side}; a box has no steps")
        start = 0 if side.start is None else integer("box", side.start)
        stop = size if side.stop is None else integer("box", side.stop)
        if not 0 <= start <= stop <= size:
            raise LayoutError(f"box[{dim}] is {start}:{stop}, but dim {dim} of the tensor has {elements_text(size)}")
        bounds.append((start, stop))
    extents = tuple(stop - start for start, stop in bounds)
    if extents != tuple(memory.shape):
        raise LayoutError(f"the array is of shape {tuple(memory.shape)}, but its box holds {extents}")
    return tuple(bounds)


def _placed(piece: Piece, memory: Any, shape: tuple[int, ...]) -> _DigestPart:
    if not isinstance(piece, Piece):
        raise TypeError(f"pieces must hold Pieces (see Partition.pieces), got {type(piece).__name__}")
    try:
        view = piece.view(memory)
    except (IndexError, ValueError, RuntimeError):
        raise LayoutError(f"{piece} is not within an array of shape {tuple(memory.shape)}") from None
    return _bounds(piece.box, view, shape), view
