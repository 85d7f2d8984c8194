"""The notation of the command line for meshes, shapes, layouts and dtypes, read and written."""

import re

from .._dtypes import bits_of
from .._text import shown
from ..errors import ParseError
from ..layout import Spec, TensorLayout
from ..mesh import DeviceMesh
from ..packed import parse

__all__ = [
    "format_layout",
    "format_mesh",
    "format_shape",
    "parse_dtype",
    "parse_layout",
    "parse_mesh",
    "parse_shape",
]

#: The beginning of a packed dim: a bracket that is not a sub-axis's.
_PACKED = re.compile(r"(?:[A-Za-z_][\w.]*:)?\((?!\d+\)\d)", re.ASCII)
_NOT_CUT = {"", "-", "*", "None"}


def parse_mesh(text: str) -> DeviceMesh:
    """Read a mesh such as `data=2,model=4`: its axes, major first.

    >>> parse_mesh("data=2,model=4").shape
    (2, 4)
    """
    names, sizes = [], []
    for item in text.split(","):
        name, _, size = item.partition("=")
        if not text.isprintable() or not re.fullmatch(r"[0-9]{1,19}", size.strip(), re.ASCII):
            raise ParseError(
                f"mesh {shown(text)}: {shown(item)} is not an axis and its size; expected e.g. data=2,model=4"
            )
        names.append(name.strip())
        sizes.append(int(size))
    return DeviceMesh(tuple(sizes), tuple(names))


def parse_shape(text: str) -> tuple[int, ...]:
    """Read a shape such as `8,6`, `8x6` or `(8, 6)`; nothing, or `()`, is the shape of a scalar.

    >>> parse_shape("8x6"), parse_shape("(8,)"), parse_shape("")
    ((8, 6), (8,), ())
    """
    inner = text.strip().removeprefix("(").removesuffix(")").strip()
    sizes = re.split(r"[,x]", inner.removesuffix(",")) if inner else []
    if not text.isprintable() or not all(re.fullmatch(r"[0-9]{1,19}", size.strip(), re.ASCII) for size in sizes):
        raise ParseError(f"shape {shown(text)}: not integers with commas between them; expected e.g. 8,6 or 8x6")
    return tuple(map(int, sizes))


def parse_layout(text: str, rank: int) -> TensorLayout:
    """Read a layout such as `data,-` or `data+model,-`: for each dim the mesh axes that cut it, major first.

    A dim of several parts is written as `shardwise.packed.parse` reads it: `(3 h=12@model d=64),-`. A sub-axis is
    written `model:(1)4`. A dim that is not cut is `-`, `None`, `*` or nothing at all. The layout of a scalar is empty,
    or `()`; the rank tells it from that of one dim that is not cut.

    >>> parse_layout("data+model,-", 2).axes
    (('data', 'model'), None)
    """
    if not text.isprintable():  # Nor would an axis be; bytes that are not UTF-8 arrive as half a surrogate pair.
        raise ParseError(f"layout {shown(text)}: holds a character that cannot be printed")
    entries = [entry.strip() for entry in text.split(",")] if rank or text.strip() not in {"", "()"} else []
    try:
        return TensorLayout([_spec(entry) for entry in entries])
    except ParseError as error:
        as_python = "'" in text or '"' in text or re.search(r"\([^)]*,", text)
        hint = "; write data,- for ('data', None), and data+model,- for (('data', 'model'), None)" if as_python else ""
        raise ParseError(f"{error}{hint}") from None


def _spec(entry: str) -> Spec:
    if entry in _NOT_CUT:
        return None
    return parse(entry) if _PACKED.match(entry) else tuple(entry.split("+"))


def parse_dtype(text: str) -> int:
    """Read a dtype as numpy, ml_dtypes, PyTorch or safetensors write it: the bits of an element; needs no ml_dtypes.

    >>> parse_dtype("float32"), parse_dtype("bfloat16"), parse_dtype("F4")
    (32, 16, 4)
    """
    try:
        bits = bits_of(text)
    except TypeError:
        bits = 0
    if not bits:
        raise ParseError(f"unknown dtype {shown(text)}; expected e.g. float32, bfloat16 or F8_E4M3")
    return bits


def format_layout(layout: TensorLayout) -> str:
    """Write a layout as `parse_layout` reads it.

    >>> format_layout(TensorLayout((("data", "model"), None)))
    'data+model,-'
    """
    return ",".join(map(_spec_text, layout.axes))


def _spec_text(spec: Spec) -> str:
    if spec is None:
        return "-"
    return "+".join(spec) if isinstance(spec, tuple) else str(spec)


def format_mesh(mesh: DeviceMesh) -> str:
    """Write a mesh's axes as `parse_mesh` reads them.

    >>> format_mesh(parse_mesh("data=2,model=4"))
    'data=2,model=4'
    """
    return ",".join(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True))


def format_shape(shape: tuple[int, ...]) -> str:
    """Write a shape.

    >>> format_shape((50257, 768)), format_shape(())
    ('50257 x 768', 'scalar')
    """
    return " x ".join(map(str, shape)) or "scalar"


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_memory(text: str) -> int:
    """Read a number of bytes with its unit.

    >>> parse_memory("512MiB"), parse_memory("1.5 GB"), parse_memory("4096")
    (536870912, 1500000000, 4096)
    """
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(number) :].strip().upper()
    try:
        size = float(number) * _UNITS[unit]
        if not 0 <= size < 2**63:
            raise ValueError
    except (KeyError, ValueError):
        raise ParseError(f"{shown(text)} is not a number of bytes, such as 512MiB or 2GB") from None
    return int(size)
