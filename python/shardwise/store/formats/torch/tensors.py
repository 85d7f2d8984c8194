"""The tensors of a `torch.save` container: the member that holds a tensor's elements, and their place in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from ...._dtypes import Dtype
from ...._text import shown
from ....errors import ParseError
from ....pieces import Bounds
from ...data.boxes import Located
from ...data.files import Holder
from ...data.text import checked_name, checked_shape
from ...tensors.checkpoint import KeyPath, StoredObject, StoredSum
from ...tensors.stored import UnsupportedError
from ...tensors.stored_pieces import StoredPiece
from .archive import Archive
from .pickles import (
    Persistent,
    Record,
    dtype_of_global,
    holds_tensors,
    other_tensor,
    read_objects,
    read_strict,
    torch_sizes,
)

__all__ = [
    "SAVE_AGAIN",
    "Container",
    "SavedTensor",
    "dict_of",
    "items_within",
    "located_values",
    "named_values",
    "sums_of",
]

# The pickle of a state dict takes about 200 bytes per tensor.
_MAX_PICKLE = 1 << 30
_MAX_DEPTH = 100
#: Advice for checkpoints of FSDP1 that cannot be read: how to save them otherwise.
SAVE_AGAIN = (
    "load it in its trainer, and save it once with FULL_STATE_DICT, with SHARDED_STATE_DICT and a device mesh, or with "
    "SHARDED_STATE_DICT by torch.distributed.checkpoint"
)
#: The most parts of a key that are written in a name.
_MOST_KEYS = 16
#: The bytes of a view may exceed those of its storage: up to the first number, or by the second factor.
_MOST_EXPANDED = 1 << 30
_MOST_TIMES = 1024
_REBUILD = {
    "torch._utils._rebuild_tensor": 4,
    "torch._utils._rebuild_tensor_v2": 4,
    "torch._utils._rebuild_tensor_v3": 7,
}
#: Functions that rebuild tensors, with the position of the argument, if any, that asks for a change of the elements.
_CHANGED = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}


class SavedTensor(NamedTuple):
    """A tensor as its pickle describes it.

    Attributes:
        storage: The key of its storage.
        strides: Elements of the storage from one element to the next, per dim.
        offset: The number of its first element in the storage.
        storage_bytes: The size of the storage in bytes, according to the pickle.
    """

    storage: str
    dtype: Dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage_bytes: int

    @property
    def span(self) -> tuple[int, int]:
        """Return the first byte of its elements in the storage, and the byte after the last; it must have elements."""
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset * self.dtype.bits // 8, (last + 1) * self.dtype.bits // 8


class Container:
    """A file of `torch.save`, or a range of a file that is one.

    Raises:
        ParseError: if it is not one, or is one that cannot be read; the message names the file.
    """

    def __init__(self, file: Holder, offset: int = 0, length: int | None = None) -> None:
        self.file = file
        self.archive = Archive(file, offset, length)
        found = [name for name in self.archive.members if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(found) != 1:
            if any(name.endswith("/constants.pkl") for name in self.archive.members):
                raise ParseError(f"{file.path}: is a TorchScript program; save its state_dict with torch.save")
            if self.archive.members and all(name.endswith(".npy") for name in self.archive.members):
                raise ParseError(
                    f"{file.path}: is an archive of numpy.savez; save_checkpoint(PATH, dict(numpy.load(FILE))) makes a "
                    "checkpoint of it"
                )
            if any(name.endswith("/archive_format") for name in self.archive.members):
                raise ParseError(
                    f"{file.path}: is an exported program (torch.export); save its state_dict with torch.save"
                )
            raise ParseError(f"{file.path}: a zip container without data.pkl, which torch.save writes first")
        self._root = found[0].removesuffix("data.pkl")
        order = self.archive.members.get(f"{self._root}byteorder")
        if order is not None and self.archive.read(order, 16) != b"little":
            raise ParseError(f"{file.path}: was written on a big-endian machine, which is not supported")

    @property
    def saved_as(self) -> str:
        """The name that the file had when it was saved, without suffix; `archive` if PyTorch was not told one."""
        return self._root.rstrip("/")

    def read(self) -> Any:
        """Return the saved value; every global in its pickle must have a meaning here."""
        return read_strict(self._pickle(), self.file.path, persistent=True)

    def read_objects(self) -> Any:
        """Return the saved value, with objects of any class as inert records."""
        return read_objects(self._pickle(), self.file.path)

    @property
    def pickle_bytes(self) -> int:
        """The size of its pickle in bytes, which is more than the number of its values."""
        return self.archive.members[f"{self._root}data.pkl"].size

    def values(self) -> Iterator[tuple[str, Any]]:
        """Return the saved values by name, with objects of any class as inert records."""
        return named_values(self.root(), self.file.path, self.pickle_bytes)

    def root(self) -> Any:
        """Return the saved value, as `read_objects` does.

        Raises:
            UnsupportedError: if it cannot be read without running code.
        """
        try:
            return self.read_objects()
        except ParseError as error:
            if "calls something that is not a global" not in str(error):
                raise
            raise UnsupportedError(
                f"{self.file.path}: holds what cannot be read without running it "
                f"({str(error).rpartition(': ')[2]}); {SAVE_AGAIN}"
            ) from None

    def _pickle(self) -> bytes:
        return self.archive.read(self.archive.members[f"{self._root}data.pkl"], _MAX_PICKLE)

    def tensor(self, value: Any, name: str) -> SavedTensor | None:
        """Return the tensor that a value is; `None` if it is something else.

        Raises:
            UnsupportedError: if it is, or contains, a tensor of a kind that cannot be read; the message names it.
            ParseError: if it is an inconsistent tensor; the message names it.
        """
        found = self._tensor(value, name)
        if found is None and (why := holds_tensors(value)):
            where = f"{self.file.path}: {shown(name)}" if name else f"{self.file.path}"
            raise UnsupportedError(f"{where} is not read: it is {why}")
        return found

    def _tensor(self, value: Any, name: str) -> SavedTensor | None:
        while isinstance(value, Record) and (args := value.args) is not None:
            if value.name in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
                value = args[0] if args else None
            elif value.name == "torch._tensor._rebuild_from_type_v2" and len(args) == 4:
                function, _, arguments, _ = args
                if (
                    not isinstance(function, Record)
                    or function.name not in _REBUILD
                    or not isinstance(arguments, tuple)
                ):
                    return None
                return self._rebuilt(function.name, arguments, name)
            elif value.name in _REBUILD:
                return self._rebuilt(value.name, args, name)
            else:
                return None
        return None

    def _rebuilt(self, function: str, args: tuple[Any, ...], name: str) -> SavedTensor:
        where = self.file.path
        wrong = ParseError(f"{where}: tensor {shown(name)}: wrong arguments of {function}")
        if len(args) < _REBUILD[function]:
            raise wrong
        key, storage_dtype, numel = self._storage(args[0], name)
        is_typed = storage_dtype is not None
        dtype = storage_dtype if is_typed else dtype_of_global(args[6]) if len(args) > 6 else None
        strides = torch_sizes(args[3])
        if dtype is None and len(args) > 6 and (what := other_tensor(args[6])):
            raise UnsupportedError(f"{where}: tensor {shown(name)} is not read: it is of {what}")
        if dtype is None or strides is None or type(args[1]) is not int or args[1] < 0:
            raise wrong
        if dtype.bits % 8:
            raise UnsupportedError(f"{where}: tensor {shown(name)}: elements of {dtype.bits} bits are not supported")
        at = _CHANGED.get(function, len(args))
        changed = args[at] if len(args) > at else None
        if changed is not None and not isinstance(changed, dict):
            raise wrong
        for change in ("conj", "neg"):
            if changed and changed.get(change):
                raise UnsupportedError(
                    f"{where}: tensor {shown(name)}: is a view whose elements PyTorch changes when it reads them "
                    f"({change}); save its tensor.resolve_{change}()"
                )
        shape = checked_shape(torch_sizes(args[2]), dtype.bits, name, where)
        if len(strides) != len(shape):
            raise wrong
        storage_bytes = numel * dtype.bits // 8 if is_typed else numel
        if 0 not in shape:
            last = args[1] + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            if (last + 1) * dtype.bits // 8 > storage_bytes:
                raise ParseError(
                    f"{where}: tensor {shown(name)}: its elements end at byte {(last + 1) * dtype.bits // 8} of a "
                    f"storage of {storage_bytes}"
                )
        nbytes = math.prod(shape) * dtype.bits // 8
        if nbytes > max(_MOST_EXPANDED, _MOST_TIMES * storage_bytes):
            raise UnsupportedError(
                f"{where}: tensor {shown(name)}: a view of {nbytes} bytes of a storage of {storage_bytes}, over the "
                f"limit of {_MOST_TIMES} times as many"
            )
        return SavedTensor(key, dtype, shape, strides, args[1], storage_bytes)

    def _storage(self, value: Any, name: str) -> tuple[str, Dtype | None, int]:
        """Return key, dtype and number of elements of a storage; for an untyped one `None` and the size in bytes."""
        where = f"{self.file.path}: tensor {shown(name)}"
        parts = value.id if isinstance(value, Persistent) else None
        if not isinstance(parts, tuple) or len(parts) < 5 or parts[0] != "storage":
            raise ParseError(f"{where}: its storage is not one of this container")
        _, kind, key, _, numel = parts[:5]
        dtype = dtype_of_global(kind)
        untyped = isinstance(kind, Record) and kind.name == "torch.storage.UntypedStorage"
        if not isinstance(key, str) or type(numel) is not int or numel < 0:
            raise ParseError(f"{where}: its storage is of an unsupported kind")
        if dtype is None and not untyped:
            raise UnsupportedError(f"{where}: its storage is of an unsupported kind")
        if f"{self._root}data/{key}" not in self.archive.members:
            raise ParseError(f"{where}: its storage {shown(key)} is not in the container")
        return key, dtype, numel

    def extent(self, tensor: SavedTensor, name: str) -> Located:
        """Return the place of a tensor's elements in the file."""
        member = self.archive.members[f"{self._root}data/{tensor.storage}"]
        if member.size != tensor.storage_bytes:
            raise ParseError(
                f"{self.file.path}: tensor {shown(name)}: its storage has {member.size} bytes, but its pickle says "
                f"{tensor.storage_bytes}"
            )
        itemsize = tensor.dtype.bits // 8
        start = self.archive.start(member) + tensor.offset * itemsize
        return (self.file, start, tuple(stride * itemsize for stride in tensor.strides))

    def piece(self, tensor: SavedTensor, name: str, box: Bounds, local: tuple[int, ...] | None = None) -> StoredPiece:
        """Return a tensor of this container as a piece; with `local`, only the box that begins there."""
        member = self.archive.members[f"{self._root}data/{tensor.storage}"]
        return StoredPiece(box, self.file.path, key=member.name, locate=partial(self._locate, tensor, name, local))

    def _locate(self, tensor: SavedTensor, name: str, local: tuple[int, ...] | None) -> Located:
        file, start, strides = self.extent(tensor, name)
        if local is None:
            return file, start, strides
        return file, start + sum(at * stride for at, stride in zip(local, strides, strict=True)), strides


def sums_of(files: Iterable[Holder]) -> Iterator[StoredSum]:
    """Yield the CRC-32 of every member of files of `torch.save`."""
    for file in files:
        yield from Archive(file).sums()


def named_values(value: Any, where: object, most: int) -> Iterator[tuple[str, Any]]:
    """Return the values of nested dicts, lists and tuples with their names: keys and positions, joined with a dot.

    Args:
        value: The outermost container.
        where: The beginning of messages.
        most: The most values there may be: the bytes of their pickle, since each takes at least one. A container
            that lies in many others would be visited as often, and 2**100 times if those are nested like this too.

    Raises:
        ParseError: if two values have the same name, there are too many, or they are nested too deeply.
    """
    return ((name, leaf) for name, _, leaf in located_values(value, where, most))


def located_values(
    value: Any, where: object, most: int, keep: Callable[[Any], bool] | None = None
) -> Iterator[tuple[str, KeyPath, Any]]:
    """Yield values with their names as `named_values` does, and the keys and positions that lead to them.

    Args:
        value: The outermost container.
        where: The beginning of messages.
        most: The most values there may be.
        keep: Returns whether a container counts as one value.
    """
    seen: set[str] = set()
    for name, path, leaf in _leaves(value, "", (), where, keep):
        if name in seen:
            raise ParseError(f"{where}: two values have the name {shown(name)}")
        if len(seen) >= most:
            raise ParseError(f"{where}: more than {most} values in a pickle of {most} bytes")
        seen.add(name)
        yield name, path, leaf


def _leaves(
    value: Any, name: str, path: KeyPath, where: object, keep: Callable[[Any], bool] | None
) -> Iterator[tuple[str, KeyPath, Any]]:
    if len(path) > _MAX_DEPTH:
        raise ParseError(f"{where}: values are nested more than {_MAX_DEPTH} deep")
    pairs = items_within(value)
    if not pairs or (keep is not None and keep(value)):
        yield name, path, value
        return
    is_list = isinstance(value, (list, tuple))
    for key, child in pairs:
        said = _key_text(key)
        text = checked_name(f"{name}.{said}" if name else said, where)
        yield from _leaves(child, text, (*path, key if is_list else said), where, keep)


def _key_text(key: Any) -> str:
    """Return a key as a part of a name; an inert record as the object that it stands for: `torch.bfloat16`."""
    if isinstance(key, tuple) and len(key) <= _MOST_KEYS:
        return f"({', '.join(map(_part_text, key))}{',' * (len(key) == 1)})"
    return f"{key}" if isinstance(key, str) else _part_text(key)


def _part_text(key: Any) -> str:
    if isinstance(key, Record):
        return key.name if key.args is None else f"{key.name}({', '.join(map(shown, key.args[:_MOST_KEYS]))})"
    return repr(key) if isinstance(key, (str, int, float, bool)) else shown(key)


def items_within(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the items of a container, by key or position; `None` if the value is not a container.

    Nor is a dict whose keys Python cannot hash, or are so nested that a hash would not end.
    """
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, Record) and value.name in ("dict", "collections.OrderedDict", "collections.defaultdict"):
        return list(value.items) if all(_nodes(key, _MOST_KEYS) <= _MOST_KEYS for key, _ in value.items) else None
    return None


def _nodes(key: Any, most: int) -> int:
    """Return the number of values in a key of a dict; more than `most` if they are more, or one cannot be hashed."""
    if isinstance(key, (list, dict)):
        return most + 1
    count = 1
    for one in key if isinstance(key, tuple) else ():
        if count > most:
            break
        count += _nodes(one, most - count)
    return count


def dict_of(value: Any) -> dict[str, Any]:
    """Return a dict or an ordered dict with texts as keys; an empty one for any other value."""
    if isinstance(value, (list, tuple)):
        return {}
    return {key if isinstance(key, str) else shown(key): item for key, item in items_within(value) or ()}


def value_object(name: str, value: Any) -> StoredObject:
    """Return a value that is not a tensor."""
    return StoredObject(name, lambda: value)
