"""Checks of arguments, whose messages name the argument; the compiled module calls `int64_array` too."""

from __future__ import annotations

import errno
import functools
import operator
import os
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ._fork import importing
from ._text import shown
from .errors import LayoutError, SizeOverflowError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

__all__ = [
    "INTEGER",
    "array_like",
    "array_of",
    "check_fields",
    "check_items",
    "checked_axes",
    "instance",
    "int64_array",
    "integer",
    "integers_of",
    "is_masked",
    "is_true",
    "label_positions",
    "optional",
    "path_of",
    "refuse_mask",
    "sizes_of",
]

_INT64_MAX = 2**63 - 1
#: The longest path: no system accepts one of more characters, and its message would repeat them all.
_LONGEST_PATH = 1 << 15 if os.name == "nt" else 1 << 12

Instance = TypeVar("Instance")

#: The words for types whose own names messages do not use.
_CALLED: dict[type, str] = {
    str: "a string",
    bool: "True or False",
    int: "an integer",
    np.integer: "an integer",
    type(None): "None",
    Hashable: "hashable",
    np.ndarray: "a numpy array",
}

#: An integer of a value's field, which is kept as it is.
INTEGER: tuple[type, ...] = (int, np.integer)
_OF_SEQUENCES = "; np.asarray turns a sequence into an array"


def instance(name: str, value: object, kind: type[Instance], alternative: str = "") -> Instance:
    """Return a value if it is of the given type.

    >>> instance("rank", "two", bool)
    Traceback (most recent call last):
    TypeError: rank must be True or False, got 'two'
    """
    if isinstance(value, kind):
        return value
    given = shown(value) if kind in (str, bool) else type(value).__name__
    way = _OF_SEQUENCES if kind is np.ndarray and isinstance(value, (list, tuple)) else ""
    raise TypeError(f"{name} must be {_called(kind)}{alternative}, got {given}{way}")


def _called(kind: type | tuple[type, ...]) -> str:
    if isinstance(kind, tuple):
        return " or ".join(dict.fromkeys(map(_called, kind)))
    return _CALLED.get(kind) or f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"


def optional(name: str, value: object, kind: type[Instance]) -> Instance | None:
    """Return a value if it is of the given type or `None`.

    >>> optional("name", 3, str)
    Traceback (most recent call last):
    TypeError: name must be a string or None, got 3
    """
    return None if value is None else instance(name, value, kind, " or None")


def check_fields(value: object, **kinds: type | tuple[type, ...]) -> None:
    """Refuse a value with a field that is not of its types, and so has no repr, no hash or no answer to `==`.

    >>> from shardwise.reshard import CollectiveObstacle
    >>> CollectiveObstacle("devices", None)
    Traceback (most recent call last):
    TypeError: message of a CollectiveObstacle must be a string, got NoneType
    """
    for name, kind in kinds.items():
        given = getattr(value, name)
        if not isinstance(given, kind):
            raise TypeError(f"{name} of a {type(value).__name__} must be {_called(kind)}, got {type(given).__name__}")


def check_items(name: str, values: Collection[object], kind: type | tuple[type, ...]) -> None:
    """Refuse a collection with an item that is not of the given types.

    >>> check_items("ids", (1, "2"), INTEGER)
    Traceback (most recent call last):
    TypeError: ids: every item must be an integer, got str
    """
    for found in set(map(type, values)):
        if not issubclass(found, kind):
            raise TypeError(f"{name}: every item must be {_called(kind)}, got {found.__name__}")


def integer(name: str, value: object) -> int:
    """Return an integer as Python's own: anything with `__index__`, such as numpy's, but no bool.

    >>> integer("rank", np.int8(3))
    3
    """
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {shown(value)}")
    try:
        return operator.index(value)
    except TypeError as error:  # An array of several integers, or a type whose `__index__` gives none.
        raise TypeError(f"{name} must be an integer, got {shown(value)}: {error}") from None


def is_true(name: str, value: object) -> bool:
    """Return whether a flag is set; anything may be one that has a truth, which an array does not.

    >>> is_true("sync", np.arange(2))
    Traceback (most recent call last):
    TypeError: sync must be True or False, got array([0, 1])
    """
    try:
        return bool(value)
    except ValueError:
        raise TypeError(f"{name} must be True or False, got {shown(value)}") from None


def integers_of(name: str, value: Any) -> tuple[int, ...]:
    """Return a sequence of integers as a tuple of Python's own.

    >>> integers_of("shape", {2, 3})
    Traceback (most recent call last):
    TypeError: shape must be a sequence of integers, got {2, 3}
    """
    try:
        # Without a length it may never end, without positions it has no order.
        is_sequence = hasattr(value, "__len__") and hasattr(value, "__getitem__")
        if not is_sequence or isinstance(value, (str, bytes, bytearray, Mapping)):
            raise TypeError
        # All at once: a sequence longer than memory gives a MemoryError.
        return tuple([number if type(number) is int else integer(name, number) for number in tuple(value)])
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers, got {shown(value)}") from None


def sizes_of(name: str, value: object) -> tuple[int, ...]:
    """Return a shape as a tuple of integers, none of them negative.

    Raises:
        LayoutError: if a size is negative.

    >>> sizes_of("shape", [2, np.int64(3)])
    (2, 3)
    """
    sizes = integers_of(name, value)
    for dim, size in enumerate(sizes):
        if size < 0:
            raise LayoutError(f"{name}[{dim}] is {shown(size)}, but a dim has at least 0 elements")
    return sizes


def label_positions(name: str, labels: Sequence[Any], error: type[ValueError]) -> dict[Hashable, int]:
    """Return the position of each label, which must be hashable and distinct.

    >>> label_positions("devices", ["a", "b", "a"], ValueError)
    Traceback (most recent call last):
    ValueError: devices[2] repeats the label 'a' of devices[0]
    """
    try:
        index = {label: i for i, label in enumerate(labels)}
    except TypeError as unhashable:
        raise TypeError(f"{name}: every label must be hashable ({unhashable})") from None
    if len(index) != len(labels):
        first, label = next((i, label) for i, label in enumerate(labels) if index[label] != i)
        raise error(f"{name}[{index[label]}] repeats the label {shown(label)} of {name}[{first}]")
    return index


def path_of(file: str | os.PathLike[str]) -> Path:
    r"""Return a path; raise `OSError` if no file can have that name, as opening a missing file does.

    >>> path_of("rules\0.toml")
    Traceback (most recent call last):
    OSError: [Errno 22] no file can have this name, which holds a null byte: 'rules\x00.toml'
    >>> path_of(None)
    Traceback (most recent call last):
    TypeError: a path must be a str or an os.PathLike, got None
    """
    return _path_of(file) if type(file) is str else _checked_path(file)


@functools.lru_cache(maxsize=1024)
def _path_of(file: str) -> Path:
    """Return the path of a text; jobs of a plan name the same files, and a path takes as long as to open its file."""
    return _checked_path(file)


def _checked_path(file: str | os.PathLike[str]) -> Path:
    with importing:
        from pathlib import Path  # Late, to keep `import shardwise` fast.

    try:
        path = file if isinstance(file, Path) else Path(file)
    except TypeError:
        raise TypeError(f"a path must be a str or an os.PathLike, got {shown(file)}") from None
    if len(str(path)) > _LONGEST_PATH:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), shown(str(path)))
    try:
        wrong = "which holds a null byte" if b"\0" in os.fsencode(path) else None
    except UnicodeEncodeError:
        wrong = "which holds half a surrogate pair"
    if wrong is not None:
        raise OSError(errno.EINVAL, f"no file can have this name, {wrong}", str(path))
    return path


def is_masked(value: object) -> bool:
    """Return whether a value is a masked array, whose mask `numpy.asarray` loses; numpy imports `numpy.ma` late."""
    return isinstance(value, np.ndarray) and type(value) is not np.ndarray and isinstance(value, np.ma.MaskedArray)


def refuse_mask(name: str, value: object) -> None:
    """Refuse a masked array where only its values would be copied.

    >>> refuse_mask("tensor", np.ma.masked_array([1, 2], [True, False]))
    Traceback (most recent call last):
    TypeError: tensor is a masked array, and its mask would be lost; give its filled() values
    """
    if is_masked(value):
        raise TypeError(f"{name} is a masked array, and its mask would be lost; give its filled() values")


def int64_array(name: str, value: Any) -> npt.NDArray[np.int64]:
    """`value` as a C-contiguous, aligned, native int64 array; copied only if it is not one already."""
    if is_masked(value):
        raise TypeError(f"{name} is a masked array; give its filled() or compressed() values")
    try:
        array = np.asarray(value)
    except ValueError as error:  # nested lists of unequal lengths
        raise TypeError(f"{name} must be an integer or an array of integers: {error}") from None
    if array.size == 0 and not isinstance(value, np.ndarray):
        array = array.astype(np.int64)  # numpy makes an empty list a float array
    if array.dtype.kind == "f" and not isinstance(value, np.ndarray):
        # numpy turns integers into floats when no integer dtype holds all of them.
        # Not `flat`, which is for 32 dims at most.
        exact = np.asarray(value, dtype=object)
        array = exact if all(type(item) is int for item in exact.ravel()) else array
    if array.dtype == object and all(type(item) is int for item in array.ravel()):
        wide = next((i for i, item in enumerate(array.ravel()) if not -_INT64_MAX - 1 <= item <= _INT64_MAX), None)
        if wide is not None:
            raise SizeOverflowError(f"{name}[{wide}] is {shown(array.ravel()[wide])}, outside the 64-bit range")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be an integer or an array of integers, got dtype {array.dtype}")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.size and array.max() > _INT64_MAX:
        position = int(np.argmax(array > _INT64_MAX))
        raise SizeOverflowError(f"{name}[{position}] is {array.ravel()[position]}, over the limit of {_INT64_MAX}")
    return np.require(array, np.int64, ["C_CONTIGUOUS", "ALIGNED"])


def array_like(name: str, value: Any) -> npt.NDArray[Any]:
    """`value` as a numpy array (subclasses kept), where numpy can make one: of nested sequences and numbers too."""
    try:
        array: npt.NDArray[Any] = np.asanyarray(value)
    except ValueError as error:  # Also from an `__array__` that gives no array.
        raise TypeError(f"{name}: numpy cannot make an array from this {type(value).__name__}: {error}") from error
    return array


def array_of(name: str, value: Any) -> npt.NDArray[Any]:
    """`value` as a numpy array (subclasses kept), sharing its memory where numpy can."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        return array_like(name, value)
    if hasattr(value, "__dlpack__"):
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, ValueError) as error:
            raise TypeError(f"{name}: numpy cannot take this {type(value).__name__} by DLPack: {error}") from error
    raise TypeError(
        f"{name} must be a numpy array, or have __array__ or __dlpack__, got {type(value).__name__}{_OF_SEQUENCES}"
    )


def checked_axes(name: str, value: Any) -> tuple[str, ...]:
    """Return the names of axes in a sequence.

    Raises:
        TypeError: if it is not a sequence of strings.
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, (tuple, list)):
        raise TypeError(f"{name} must be a sequence of names of axes, got {shown(value)}")
    found = tuple(value)
    check_items(name, found, str)
    return found
