"""Files as PyTorch writes them, made without PyTorch: pickles that name its classes, in zip containers."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.interop import torch as placements

F4 = np.dtype(np.float32)
META = "torch.distributed.checkpoint.metadata"
PLACEMENTS = "torch.distributed.tensor.placement_types"
STORAGES = {
    "float32": "FloatStorage", "float64": "DoubleStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage", "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}  # fmt: skip


class Global:
    """What a pickle names without calling it."""

    def __init__(self, module: str, name: str) -> None:
        self.__module__ = module
        self.name = name

    def __reduce__(self) -> str:
        return self.name


class Call:
    """What a pickle calls: a global, its arguments, and the state of the result."""

    def __init__(self, module: str, name: str, *args: Any, state: Any = None, items: Any = None) -> None:
        self.called, self.args, self.state, self.items = Global(module, name), args, state, items

    def __reduce__(self) -> tuple[Any, ...]:
        items = None if self.items is None else iter(self.items)
        return Callee(self.called), self.args, self.state, None, items


class Callee:
    """A global that Python's pickler believes to be callable."""

    def __init__(self, called: Global) -> None:
        self.__module__ = called.__module__
        self.name = called.name

    def __call__(self) -> None:
        raise AssertionError("called")

    def __reduce__(self) -> str:
        return self.name


def ones(*shape: int) -> np.ndarray:
    """An array of single floats that are all different."""
    return np.arange(np.prod(shape, dtype=int), dtype=F4).reshape(shape)


def size(*sizes: int) -> Call:
    return Call("torch", "Size", tuple(sizes))


def new(module: str, name: str, **state: Any) -> Call:
    return Call(module, name, state=state)


@dataclass(frozen=True)
class Storage:
    """A range of bytes that a container holds beside its pickle."""

    key: str
    kind: str
    data: bytes = field(repr=False)
    count: int = 0


_PicklerOfPython: Any = pickle._Pickler


class Pickler(_PicklerOfPython):  # type: ignore[misc]
    """Writes globals by name without looking them up, and storages as persistent ids."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Storage):
            module, _, name = value.kind.rpartition(".")
            return ("storage", Global(module, name), value.key, "cpu", value.count)
        return None

    def save(self, value: Any, save_persistent_id: bool = True) -> Any:
        if isinstance(value, (Global, Callee)):
            if id(value) in self.memo:
                return self.write(self.get(self.memo[id(value)][0]))
            if self.proto >= 4:
                super().save(value.__module__)
                super().save(value.name)
                self.write(pickle.STACK_GLOBAL)
            else:
                self.write(pickle.GLOBAL + f"{value.__module__}\n{value.name}\n".encode())
            return self.memoize(value)
        return super().save(value, save_persistent_id)


def dumps(value: Any, protocol: int = 2) -> bytes:
    file = io.BytesIO()
    Pickler(file, protocol).dump(value)
    return file.getvalue()


def tensor(
    array: np.ndarray,
    key: str,
    *,
    shape: Any = None,
    strides: Any = None,
    offset: int = 0,
    storage: Storage | None = None,
    metadata: Any = None,
) -> Call:
    """A tensor as `torch.save` writes it; the array's memory is its storage."""
    more = () if metadata is None else (metadata,)
    name = array.dtype.name
    shape = array.shape if shape is None else shape
    if strides is None:
        strides = tuple(stride // array.itemsize for stride in np.empty(shape, array.dtype).strides)
    if name in STORAGES:
        storage = storage or Storage(key, f"torch.{STORAGES[name]}", array.tobytes(), array.size)
        args: tuple[Any, ...] = (storage, offset, tuple(shape), strides, False, OrderedDict())
        return Call("torch._utils", "_rebuild_tensor_v2", *args, *more)
    storage = storage or Storage(key, "torch.storage.UntypedStorage", array.tobytes(), array.nbytes)
    args = (storage, offset, tuple(shape), strides, False, OrderedDict(), Global("torch", name))
    return Call("torch._utils", "_rebuild_tensor_v3", *args, *more)


def placed(placement: Any) -> Call:
    """A placement as PyTorch pickles it."""
    if isinstance(placement, placements.Shard):
        return new(PLACEMENTS, "Shard", dim=placement.dim)
    if isinstance(placement, placements.StridedShard):
        return new(PLACEMENTS, "_StridedShard", dim=placement.dim, split_factor=placement.split_factor)
    if isinstance(placement, placements.Partial):
        return new(PLACEMENTS, "Partial", reduce_op=placement.reduce_op)
    return new(PLACEMENTS, "Replicate")


def dtensor(
    local: np.ndarray, key: str, shape: tuple[int, ...], mesh: tuple[int, ...], at: Any, how: list[Any], **spec: Any
) -> Call:
    """A DTensor as PyTorch pickles it: what a rank of FSDP2 or of tensor parallelism saves."""
    axes = tuple(new("torch.distributed._mesh_layout", "_FlatLayout", shape=(n,), stride=(1,)) for n in mesh)
    layout = new("torch.distributed._mesh_layout", "_MeshLayout", axes=axes)
    where = {"_layout": layout, "_coordinate_on_dim": at, "_mesh_dim_names": ("a", "b", "c")[: len(mesh)]}
    where |= spec.pop("mesh_state", {})
    meta = Call(
        "torch.distributed.tensor._dtensor_spec", "TensorMeta", size(*shape), (), Global("torch", local.dtype.name)
    )
    state = {
        "mesh": Call("torch.distributed.device_mesh", "DeviceMesh", state=where),
        "placements": tuple(map(placed, how)),
    }
    state |= {"tensor_meta": meta, **spec}
    held = Call("torch.distributed.tensor._dtensor_spec", "DTensorSpec", state=state)
    function = Global("torch._utils", "_rebuild_wrapper_subclass")
    kind = Global("torch.distributed.tensor", "DTensor")
    return Call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        function,
        kind,
        (),
        (None, {"_local_tensor": tensor(local, key), "_spec": held}),
    )


def storages_of(value: Any) -> dict[str, bytes]:
    """The storages that lie in a value, each looked at once."""
    found: dict[str, bytes] = {}
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Storage):
            found[item.key] = item.data
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item
        elif isinstance(item, Call):
            waiting += [*item.args, item.state, item.items]
    return found


def save(value: Any, *, root: str = "archive", data: bytes | None = None, **members: bytes) -> bytes:
    """A container: the pickle, and the storages that it names."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{root}/data.pkl", dumps(value) if data is None else data)
        archive.writestr(f"{root}/byteorder", members.pop("byteorder", b"little"))
        for key, stored in storages_of(value).items():
            archive.writestr(f"{root}/data/{key}", stored)
        archive.writestr(f"{root}/version", b"3\n")
    return file.getvalue()


Chunks = list[tuple[tuple[int, ...], np.ndarray]]


class Dcp:
    """A distributed checkpoint that is put together piece by piece, so that each can be wrong."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}
        self.places: dict[Any, Any] = {}
        self.files: dict[str, bytes] = {}
        self.extra: dict[str, Any] = {}

    def properties(self, dtype: str, *, length: int = 6) -> Call:
        layout = Call("torch.serialization", "_get_layout", "torch.strided")
        encoding = Call(META, "_MEM_FORMAT_ENCODING", 0)
        state = (Global("torch", dtype), layout, False, encoding, False, None)
        return Call(META, "TensorProperties", state=state[:length])

    def add(self, name: str, shape: tuple[int, ...], chunks: Chunks, file: str = "__0_0.distcp") -> None:
        boxes = []
        for offset, array in chunks:
            boxes.append(new(META, "ChunkStorageMetadata", offsets=size(*offset), sizes=size(*array.shape)))
            self.place(name, offset, save(tensor(array, "0")), file)
        dtype = chunks[0][1].dtype.name if chunks else "float32"
        self.entries[name] = new(
            META, "TensorStorageMetadata", properties=self.properties(dtype), size=size(*shape), chunks=boxes
        )

    def add_object(self, name: str, value: Any, file: str = "__0_0.distcp") -> None:
        self.entries[name] = Call(META, "BytesStorageMetadata", state={})
        self.place(name, None, save(value), file)

    def place(self, name: str, offset: tuple[int, ...] | None, data: bytes, file: str) -> None:
        start = len(self.files.get(file, b""))
        self.files[file] = self.files.get(file, b"") + data
        index = new(META, "MetadataIndex", fqn=name, offset=None if offset is None else size(*offset), index=None)
        info = {"relative_path": file, "offset": start, "length": len(data)}
        # Keyed by the objects themselves, so that one chunk can have two places.
        self.places[index] = Call("torch.distributed.checkpoint.filesystem", "_StorageInfo", state=info)

    def metadata(self) -> bytes:
        state = {"state_dict_metadata": self.entries, "planner_data": None, "storage_data": self.places, **self.extra}
        return dumps(Call(META, "Metadata", state=state), 4)

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        (folder / ".metadata").write_bytes(self.metadata())
        return folder
