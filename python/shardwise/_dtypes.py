"""Dtypes by all the names they have: numpy's, ml_dtypes', PyTorch's and those of the safetensors format.

A dtype is known by its name in numpy, which is its name in ml_dtypes and in PyTorch too wherever those have it. Sizes
are known without ml_dtypes, so that a checkpoint can be planned from its header alone; only an array of a dtype that
numpy lacks needs it. The codes are those of safetensors 0.8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ._fork import importing
from ._text import shown

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "CODES",
    "DTYPES",
    "Dtype",
    "bits_of",
    "bytes_for",
    "dtype_named",
    "dtype_of",
    "find_dtype",
    "in_bytes",
    "itemsize_of",
]


_Count = TypeVar("_Count", int, "npt.NDArray[np.int64]")


class Dtype(NamedTuple):
    """A dtype that a checkpoint may have.

    Attributes:
        name: Its name in numpy, ml_dtypes and PyTorch; the code where none of them has it.
        bits: The size of one element; less than 8 where several are packed into a byte.
        code: Its name in the safetensors format, or `None`.
        origin: `"numpy"`, `"ml_dtypes"`, or `None` where no numpy array can have it.
    """

    name: str
    bits: int
    code: str | None = None
    origin: str | None = None
    #: For elements of fewer than eight bits whose bytes are counted instead: the bits of one, and the sizes of the dims
    #: whose elements share bytes with those of the dim before.
    packed: tuple[int, tuple[int, ...]] | None = None

    @property
    def stated(self) -> str:
        """The name of the dtype of the elements."""
        return self.name if self.packed is None else self.name.partition("/")[0]

    def element_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the elements per dim of a box, of which `shape` is that of its bytes if these are counted."""
        if self.packed is None:
            return list(shape)
        bits, inner = self.packed
        at = len(shape) - 1 - len(inner)
        return [*shape[:at], shape[at] * 8 // bits // math.prod(inner), *inner]

    def element_start(self, start: Sequence[int]) -> list[int]:
        """Return the position at which a box begins, in elements, from its position in stored bytes."""
        if self.packed is None:
            return list(start)
        found = self.element_shape(start)
        return [*found[: len(start) - len(self.packed[1])], *start[len(start) - len(self.packed[1]) :]]

    def numpy(self, what: str = "the dtype", called: str | None = None) -> np.dtype[Any]:
        """Return the numpy dtype, little-endian; messages begin with `what`, and call the dtype as the caller does.

        Raises:
            ImportError: if it belongs to ml_dtypes, which is not installed (or too old to have it).
            TypeError: if numpy has no such dtype.

        >>> DTYPES["float32"].numpy()
        dtype('float32')
        """
        if self.packed is not None:
            return np.dtype("u1")
        if self.origin == "numpy":
            return np.dtype(f"<{np.dtype(self.name).str[1:]}")
        called = called or self.name
        if self.origin is None:
            packed = f", {self.bits} bits an element: numpy has no array of packed elements"
            raise TypeError(f"{what} is {called}{packed if self.bits < 8 else ', which numpy does not have'}")
        try:
            with importing:
                import ml_dtypes

            scalar: type[Any] = getattr(ml_dtypes, self.name)
        except (ImportError, AttributeError):
            message = f"{what} is {called}, which needs ml_dtypes: pip install 'shardwise[dtypes]'"
            raise ImportError(message, name="ml_dtypes") from None
        return np.dtype(scalar)


def in_bytes(dtype: Dtype, shape: Sequence[int]) -> tuple[Dtype, tuple[int, ...]]:
    """Return a dtype and a shape that count bytes, for elements of fewer than eight bits.

    Dims whose elements share bytes become one, and are 1 after it.

    >>> dtype, shape = in_bytes(DTYPES["F4"], (2, 3))
    >>> dtype.name, shape, dtype.element_shape(shape)
    ('F4/3', (3, 1), [2, 3])
    >>> in_bytes(DTYPES["F6_E2M3"], (5, 8))[1]
    (5, 6)
    """
    together = 8 // math.gcd(8, dtype.bits)
    at = next((at for at in reversed(range(len(shape))) if math.prod(shape[at:]) % together == 0), 0)
    inner = tuple(shape[at + 1 :])
    made = dtype_named(f"{dtype.name}/{'x'.join(map(str, inner))}")
    assert made is not None
    return made, (*shape[:at], math.prod(shape[at:]) * dtype.bits // 8, *(1,) * len(inner))


def dtype_named(name: str) -> Dtype | None:
    """Return a dtype by its name, which `in_bytes` may have made; `None` if there is none.

    >>> dtype_named("F4/3").packed, dtype_named("float31")
    ((4, (3,)), None)
    """
    stated, slash, dims = name.partition("/")
    found = DTYPES.get(stated)
    if not slash or found is None:
        return found if not slash else None
    sizes = dims.split("x") if dims else []
    if (
        found.bits >= 8
        or len(sizes) > 64
        or not all(size.isascii() and size.isdecimal() and len(size) < 20 for size in sizes)
    ):
        return None
    return Dtype(name, 8, found.code, None, (found.bits, tuple(map(int, sizes))))


def _table() -> list[Dtype]:
    numpy = {"bool": "BOOL", "float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64"}
    numpy |= {f"{sign}int{bits}": f"{code}{bits}" for sign, code in (("", "I"), ("u", "U")) for bits in (8, 16, 32, 64)}
    ml_dtypes = {
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2": "F8_E5M2",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "float8_e8m0fnu": "F8_E8M0",
    }
    return [
        *(Dtype(name, 8 * np.dtype(name).itemsize, code, "numpy") for name, code in numpy.items()),
        Dtype("complex128", 128, None, "numpy"),
        *(Dtype(name, 16 if code == "BF16" else 8, code, "ml_dtypes") for name, code in ml_dtypes.items()),
        *(Dtype(name, 8, None, "ml_dtypes") for name in ("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz")),
        Dtype("complex32", 32),
        Dtype("F6_E2M3", 6, "F6_E2M3"),
        Dtype("F6_E3M2", 6, "F6_E3M2"),
        Dtype("F4", 4, "F4"),
    ]


#: The dtypes by their names.
DTYPES = {dtype.name: dtype for dtype in _table()}

#: The dtypes that the safetensors format has, by their codes there.
CODES = {dtype.code: dtype for dtype in DTYPES.values() if dtype.code is not None}

#: Dtypes that ml_dtypes has beyond them, and no file has; small elements have a byte each.
_ARRAYS_ONLY = {
    name: Dtype(name, 32 if name == "bcomplex32" else 8, None, "ml_dtypes")
    for name in (
        *("int1", "int2", "int4", "uint1", "uint2", "uint4"),
        *("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "bcomplex32"),
    )
}

# Codes in lower case are understood where numpy does not read them as something else: its `i8` is int64.
_BY_TEXT = {**DTYPES, **{f"torch.{name}": dtype for name, dtype in DTYPES.items()}, **CODES, **_ARRAYS_ONLY}


def find_dtype(value: Any) -> Dtype | None:
    """Return the dtype that a text or a framework's own dtype names, or `None` for one that only numpy has.

    >>> find_dtype("torch.bfloat16") == find_dtype("BF16") == find_dtype("bfloat16") == DTYPES["bfloat16"]
    True
    >>> find_dtype("F4").bits, find_dtype("f4").name, find_dtype(">f4")
    (4, 'float32', None)
    """
    if not isinstance(value, str):
        # PyTorch's dtypes give their name only as text; numpy's, and what numpy turns into dtypes, come below.
        if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
            value = str(value)
        else:
            return _by_numpy(value)
    found = _BY_TEXT.get(value)
    if found is None:
        found = _by_numpy(value)
        if found is None and value.upper() in CODES and _as_numpy(value) is None:
            found = CODES[value.upper()]
    return found


def _as_numpy(value: Any) -> np.dtype[Any] | None:
    if isinstance(value, str) and value.lstrip("<>=|")[:1] == "a":
        return None  # numpy's former name of "S", which it warns about
    try:
        dtype: np.dtype[Any] = np.dtype(value)
    except (TypeError, ValueError, SyntaxError, OverflowError, RecursionError):
        return None
    return dtype


def _by_numpy(value: Any) -> Dtype | None:
    dtype = _as_numpy(value)
    if dtype is None or not dtype.isnative or dtype.names is not None or dtype.subdtype is not None:
        return None
    return DTYPES.get(dtype.name)


def dtype_of(value: Any, name: str = "dtype") -> np.dtype[Any]:
    """Return the numpy dtype that a value names; anything else is a `TypeError`, whatever numpy raises.

    Raises:
        TypeError: if `value` names no dtype, or one that numpy does not have.
        ImportError: if it belongs to ml_dtypes, which is not installed.

    >>> dtype_of("F32"), dtype_of("torch.int8"), dtype_of(">f8")
    (dtype('float32'), dtype('int8'), dtype('>f8'))
    """
    if isinstance(value, np.dtype):
        return value
    found = find_dtype(value)
    if found is not None:
        return found.numpy(name)
    dtype = _as_numpy(value)
    if dtype is None:
        raise TypeError(f"{name} must be a dtype, got {shown(value)}")
    return dtype


def bits_of(value: Any, name: str = "dtype") -> int:
    """Return the bits of an element; needs no ml_dtypes.

    Raises:
        TypeError: if `value` names no dtype.

    >>> bits_of("bfloat16"), bits_of("F4"), bits_of(np.float64)
    (16, 4, 64)
    """
    found = None if isinstance(value, np.dtype) else find_dtype(value)
    return 8 * dtype_of(value, name).itemsize if found is None else found.bits


def bytes_for(elements: _Count, bits: int) -> _Count:
    """Return the bytes that elements take, rounded up; takes one count or an array of them.

    >>> bytes_for(3, 4), bytes_for(3, 16)
    (2, 6)
    """
    if bits % 8 == 0:
        return elements * (bits // 8)
    return elements // 8 * bits - -(elements % 8 * bits) // 8


def itemsize_of(value: Any, name: str = "dtype") -> int:
    """Return the bytes of an element; needs no ml_dtypes.

    Raises:
        TypeError: if `value` names no dtype, or one whose elements are packed, several to a byte.

    >>> itemsize_of("bfloat16")
    2
    """
    bits = bits_of(value, name)
    if bits % 8:
        raise TypeError(f"{name} is {shown(value)}, {bits} bits an element: a whole number of bytes is needed")
    return bits // 8
