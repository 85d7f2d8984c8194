"""Digests of PyTorch's tensors on their own device, by PyTorch's operations, exact and in bounded memory.

The digest is a bilinear form of the bytes: with those of block j as row j of a matrix, it is the sum over rows j and
columns c of `R^j · bytes[j, c] · F_c` modulo 2**127 - 1, with `F_c = 2^(8·(c mod 8)) · K_(c div 8)`. The factors are
split into digits of 8 bits, which leaves two products of small integers:

- `bytes @ F`: int8 times int8 in int32, on tensor cores where there are some. Bytes are taken as signed, less 128, and
  128 times the sum of the factors is added afterwards. No sum of 4096 products is over 2**27.
- the digits of `R^j` times these: 2**27 · 2**8 · 2**16 rows stay below 2**53, so that float64 is exact, in any order.

The result for 256 MiB is 256 numbers, which Python adds up as integers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..._fork import importing
from ...pieces import Bounds
from .engine import DIGEST_MODULUS

__all__ = ["KEYS", "RADIX", "digest_boxes", "integers", "words_of"]

#: The bytes of a block of the digest, the 8-byte words of a block, and the 8-bit digits of a factor.
_BLOCK, _WORDS, _DIGITS = 4096, 512, 16
#: The most bytes that are digested at a time.
_CHUNK = 1 << 28
#: The least rows of a product, for which rows of zeros are added; and the groups into which its rows are divided.
_LEAST, _GROUPS = 32, 64
#: Rows of a box are packed if they begin at this many positions of a block at most; else zeros fill their gaps.
_PERIOD = 32
#: The sign bit of each byte of a word.
_SIGNS = 0x8080808080808080 - 2**64

#: Per device: the digits of the factors of a block, 128 times their sums, and the function that multiplies. Per device
#: and step: the digits of R to the power of 0, step, 2 · step, ….
_factors: dict[Any, tuple[Any, Any, Any]] = {}
_powers: dict[tuple[Any, int], Any] = {}


def _torch() -> Any:
    with importing:
        import torch
    return torch


def integers(tensor: Any) -> Any:
    """Return a view of a tensor as integers of the same size; complex numbers of 16 bytes stay complex.

    Raises:
        TypeError: if the tensor has no strided memory, or is a DTensor.
    """
    torch = _torch()
    if hasattr(tensor, "to_local"):
        raise TypeError("array is a DTensor: give its to_local(), the tensor's shape, and the pieces that it holds")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
        raise TypeError(f"array is a {kind} tensor of PyTorch, which has no strided memory to digest")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = tensor.element_size()
    return tensor.view(kinds[size]) if size in kinds else tensor


def words_of(tensor: Any) -> Any:
    """Return a view of complex numbers of 16 bytes as two integers each, in a last dim."""
    torch = _torch()
    return torch.view_as_real(tensor).view(torch.int64)


def digest_boxes(parts: list[tuple[Bounds, Any]], shape: tuple[int, ...]) -> int:
    """Return the digest of boxes of a tensor of this shape, each with a view of its elements on a device."""
    total = _Sum()
    for box, view in parts:
        box, sizes = (box, shape) if shape else (((0, 1),), (1,))
        view = view if shape else view.reshape(1)
        if view.is_complex():
            view, box, sizes = words_of(view), (*box, (0, 2)), (*sizes, 2)
        if view.numel():
            _add_box(total, box, view, sizes)
    return total.value()


def _add_box(total: _Sum, box: Bounds, view: Any, shape: tuple[int, ...]) -> None:
    """Add a box, as one or more sets of equally long rows at equal distances in the tensor."""
    extents = [stop - start for start, stop in box]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = next((dim for dim in reversed(range(len(shape))) if extents[dim] < shape[dim]), 0)
    outer = max(cut - 1, 0)
    while outer and extents[outer] == shape[outer]:
        outer -= 1
    width, pitch = extents[cut] * strides[cut], strides[cut - 1] if cut else math.prod(extents)
    first = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    size = view.element_size()
    for index in itertools.product(*(range(extent) for extent in extents[:outer])):
        start = first + sum(at * stride for at, stride in zip(index, strides, strict=False))
        for at, part in _portions(view[index]):
            row, column = divmod(at, width)
            count = max(part.numel() // width, 1)
            rows = part.reshape(count, -1)
            _add_rows(total, size * (start + row * pitch + column), rows, size * pitch)


def _portions(view: Any) -> Iterator[tuple[int, Any]]:
    """Yield parts of a view, each small enough to be copied if it is not contiguous, after its position in C order."""
    each = view.numel() // view.shape[0] if view.dim() else 1
    at_once = _CHUNK // (each * view.element_size())
    if view.is_contiguous() or at_once >= view.shape[0]:
        yield 0, view
    elif at_once:
        for first in range(0, view.shape[0], at_once):
            yield first * each, view[first : first + at_once]
    else:
        for at in range(view.shape[0]):
            for inner, part in _portions(view[at]):
                yield at * each + inner, part


def _add_rows(total: _Sum, start: int, rows: Any, pitch: int) -> None:
    """Add rows; the first begins at byte `start` of the tensor, and each further one `pitch` bytes later."""
    count, size = rows.shape[0], rows.element_size()
    width = rows.shape[1] * size
    if count == 1 or width == pitch:
        _add_run(total, start, rows.reshape(-1))
        return
    period = _BLOCK // math.gcd(pitch, _BLOCK)
    blocks = -(-(width + _BLOCK - 1) // _BLOCK)
    if period <= _PERIOD and blocks * _BLOCK < min(pitch, _CHUNK):
        # Every row of a class begins at one place within a block.
        for number in range(min(period, count)):
            begin, step = start + number * pitch, pitch * period // _BLOCK
            block, within = divmod(begin, _BLOCK)
            blocks = -(-(within + width) // _BLOCK)
            own = rows[number::period]
            at_once = _CHUNK // (blocks * _BLOCK)
            for first in range(0, own.shape[0], at_once):
                some = own[first : first + at_once]
                room = rows.new_zeros((some.shape[0], blocks * _BLOCK // size))
                room[:, within // size : (within + width) // size] = some
                total.add(_words(room).view(some.shape[0], blocks, _WORDS), block + first * step, step)
        return
    at_once = max(_CHUNK // pitch, 1)
    for first in range(0, count, at_once):
        some, begin = rows[first : first + at_once], start + first * pitch
        if at_once == 1:
            _add_run(total, begin, some.reshape(-1))
            continue
        block, within = divmod(begin, _BLOCK)
        blocks = -(-(within + some.shape[0] * pitch) // _BLOCK)
        room = rows.new_zeros(blocks * _BLOCK // size)
        spread = room[within // size : within // size + some.shape[0] * pitch // size]
        spread.view(some.shape[0], pitch // size)[:, : rows.shape[1]] = some
        total.add(_words(room).view(blocks, 1, _WORDS), block, 1)


def _add_run(total: _Sum, start: int, run: Any) -> None:
    """Add consecutive elements, which begin at byte `start` of the tensor."""
    size = run.element_size()
    in_place = run.is_contiguous() and run.data_ptr() % 8 == 0 and run.storage_offset() * size % 8 == 0
    at, length = 0, run.shape[0] * size
    while at < length:
        block, within = divmod(start + at, _BLOCK)
        count = min(_CHUNK - within, length - at)
        if in_place and not within and count >= _BLOCK and at % 8 == 0:
            count -= count % _BLOCK
            words = _words(run[at // size : (at + count) // size])
        else:
            if in_place and within and (_BLOCK - within) % 8 == 0:
                count = min(_BLOCK - within, count)
            room = run.new_zeros(-(-(within + count) // _BLOCK) * _BLOCK // size)
            room[within // size : (within + count) // size] = run[at // size : (at + count) // size]
            words = _words(room)
        total.add(words.view(-1, 1, _WORDS), block, 1)
        at += count


def _words(run: Any) -> Any:
    return run.view(_torch().int64)


class _Sum:
    """A digest in the making: partial sums on the device, with the factors by which they will be multiplied."""

    def __init__(self) -> None:
        self._found: list[Any] = []
        self._blocks: list[int] = []

    def add(self, words: Any, block: int, step: int) -> None:
        """Add rows of blocks, int64 of shape (rows, blocks, words); rows are `step` blocks apart in the tensor."""
        torch, (rows, blocks, _) = _torch(), words.shape
        factors, offset, multiply = _factors_on(words.device)
        count = rows * blocks
        signed = words.new_empty((max(count, _LEAST), _WORDS))
        torch.bitwise_xor(words.view(count, _WORDS), _SIGNS, out=signed[:count])
        sums = (multiply(signed.view(torch.int8), factors)[:count] + offset).view(rows, blocks * _DIGITS)
        self._found.append(_weighted(sums, _powers_on(words.device, step, rows)).view(blocks, _DIGITS, _DIGITS))
        self._blocks += range(block, block + blocks)

    def value(self) -> int:
        """Wait for the device, and return the digest."""
        if not self._found:
            return 0
        products = _torch().cat(self._found).cpu().numpy().astype(np.int64)
        digits = np.zeros((len(products), 2 * _DIGITS - 1), np.int64)
        for place in range(_DIGITS):
            digits[:, place : place + _DIGITS] += products[:, place]
        total = 0
        for block, row in zip(self._blocks, digits.tolist(), strict=True):
            total += pow(RADIX, block, DIGEST_MODULUS) * sum(digit << 8 * at for at, digit in enumerate(row))
        return total % DIGEST_MODULUS


def _weighted(sums: Any, powers: Any) -> Any:
    """Return the exact integer products, summed over rows, of the digits of blocks' sums and of rows' powers."""
    torch = _torch()
    if sums.device.type not in ("cpu", "cuda"):  # Without float64, perhaps.
        return (sums.to(torch.int64)[:, :, None] * powers.to(torch.int64)[:, None]).sum(0)
    whole = sums.shape[0] // _GROUPS
    found = torch.zeros((sums.shape[1], _DIGITS), dtype=torch.float64, device=sums.device)
    for groups, first in ((_GROUPS, 0), (1, whole * _GROUPS)):
        stop = whole * groups if groups > 1 else sums.shape[0]
        if first < stop:
            left = sums[first:stop].to(torch.float64).view(groups, -1, sums.shape[1])
            right = powers[first:stop].to(torch.float64).view(groups, -1, _DIGITS)
            found += torch.bmm(left.transpose(1, 2), right).sum(0)
    return found


def _constants() -> tuple[list[int], int]:
    """Return the keys and the radix: outputs of SplitMix64 from seed 0."""
    outputs, mask = [], 2**64 - 1
    for state in range(1, _WORDS + 3):
        z = state * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        outputs.append(z ^ z >> 31)
    *keys, upper, lower = outputs
    return [key >> 3 for key in keys], (upper << 64 | lower) & DIGEST_MODULUS


KEYS, RADIX = _constants()


def _factors_on(device: Any) -> tuple[Any, Any, Any]:
    """Return the factors' digits, int8 of shape (bytes, digits), 128 times their sums, and the multiplication."""
    found = _factors.get(device)
    if found is None:
        torch = _torch()
        # Digits from -128 to 127: with 128 added at every place, they are the bytes of the number.
        shift = sum(128 << 8 * place for place in range(_DIGITS))
        numbers = [(key << 8 * byte) + shift for key in KEYS for byte in range(8)]
        raw = b"".join(number.to_bytes(_DIGITS, "little") for number in numbers)
        digits = (np.frombuffer(raw, np.uint8).reshape(_BLOCK, _DIGITS).astype(np.int16) - 128).astype(np.int8)
        # With a column in one piece, as the products of cuBLAS want it.
        factors = torch.from_numpy(np.ascontiguousarray(digits.T)).to(device).t()
        offset = torch.from_numpy(128 * digits.sum(0, dtype=np.int32)).to(device)
        found = _factors[device] = factors, offset, _multiply_on(device, factors)
    return found


def _multiply_on(device: Any, factors: Any) -> Any:
    """Return the function that multiplies on a device: int8 on tensor cores, if a test gives the exact result there."""
    torch = _torch()
    if device.type == "cuda" and hasattr(torch, "_int_mm"):
        extreme = torch.tensor([-128, 127], dtype=torch.int8, device=device).repeat_interleave(_LEAST // 2)
        sample = torch.cat([extreme[:, None].expand(-1, _BLOCK), factors.t().roll(1, 1)]).contiguous()
        try:
            if torch.equal(torch._int_mm(sample, factors), _multiply(sample, factors)):
                return torch._int_mm
        except (RuntimeError, NotImplementedError):
            pass  # Not on this device, or not in this version.
    return _multiply


def _multiply(signed: Any, factors: Any) -> Any:
    torch = _torch()
    columns = [(signed * column.to(torch.int32)).sum(1, dtype=torch.int32) for column in factors.t()]
    return torch.stack(columns, 1)


def _powers_on(device: Any, step: int, rows: int) -> Any:
    """Return the digits, 0 to 255, of R to the powers 0, step, 2 · step, …: uint8 of shape (rows, digits)."""
    found = _powers.get((device, step))
    if found is None or len(found) < rows:
        factor, power, raw = pow(RADIX, step, DIGEST_MODULUS), 1, bytearray()
        for _ in range(1 << (rows - 1).bit_length()):
            raw += power.to_bytes(_DIGITS, "little")
            power = power * factor % DIGEST_MODULUS
        if len(_powers) >= 64:
            _powers.clear()
        found = _torch().from_numpy(np.frombuffer(raw, np.uint8).reshape(-1, _DIGITS)).to(device)
        _powers[device, step] = found
    return found[:rows]
