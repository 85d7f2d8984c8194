"""The globals that a pickle may name, and the records that stand for the objects that it would build.

Nothing in a pickle is imported or called (`shardwise._core.read_pickle`). The globals listed here have a meaning.
Others are refused, except in places where a file may hold its writer's own objects that no tensor needs. Globals that
can run programs are refused everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import chain
from typing import Any

from ...._core import Persistent, Record, read_dcp_index, read_pickle
from ...._dtypes import DTYPES, Dtype
from ...._text import shown
from ....errors import ParseError

__all__ = [
    "STORAGE_CLASSES",
    "Persistent",
    "Record",
    "dtype_of_global",
    "holds_tensors",
    "named_dtype",
    "other_tensor",
    "read_columns",
    "read_objects",
    "read_strict",
    "state_of",
    "torch_sizes",
]

# Globals that serve to run programs or to reach into other objects: modules as a whole, and functions of Python itself.
_FORBIDDEN = re.compile(
    r"""(?:os|posix|nt|posixpath|ntpath|subprocess|commands|pty|shutil|socket|sys|importlib|imp|runpy|pkgutil|zipimport|pip
    |code|codeop|inspect|gc|_?operator|ctypes|marshal|_?c?[Pp]ickle|multiprocessing|asyncio|webbrowser|pdb|bdb|timeit
    |signal(?!\.(?:Signals|Handlers)$)|types(?!\.SimpleNamespace$))\..*
    |(?:builtins|__builtin__)\.(?:eval|exec|execfile|compile|open|file|input|raw_input|breakpoint|exit|quit|apply|reload
    |__import__|__build_class__|__loader__|getattr|setattr|delattr|globals|locals|vars|dir|memoryview|classmethod
    |staticmethod|super|map|filter|iter|next|callable)(?:\..*)?
    |.*\.(?:os|posix|nt|sys|subprocess|importlib|shutil|builtins|__builtins__|__globals__|__dict__|__class__)\..*""",
    re.VERBOSE | re.DOTALL,
)
_PLAIN = ("set", "frozenset", "bytearray", "complex", "slice", "range")

_METADATA = "torch.distributed.checkpoint.metadata."
_ALLOWED = frozenset(
    [
        "collections.OrderedDict",
        "collections.defaultdict",
        "collections.Counter",
        "torch.Size",
        "torch.Tensor",
        "torch.device",
        "torch.serialization._get_layout",
        "torch.nn.parameter.Parameter",
        "torch.nn.parameter.Buffer",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        "torch._utils._rebuild_wrapper_subclass",
        "torch._tensor._rebuild_from_type_v2",
        "torch.storage.UntypedStorage",
        "torch.storage.TypedStorage",
        "_codecs.encode",
        # A distributed checkpoint's index.
        *(
            f"{module}{name}"
            for module in (_METADATA, "torch.distributed._shard.sharded_tensor.metadata.")
            for name in ("TensorProperties", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING", "ShardedTensorMetadata")
        ),
        *(
            f"{_METADATA}{name}"
            for name in [
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "MetadataIndex",
                "StorageMeta",
            ]
        ),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed._shard.metadata.ShardMetadata",
        "torch.serialization._get_dtype",
        *(
            f"pathlib{module}.{name}Path"
            for module in ("", "._local")
            for name in ("Posix", "Windows", "PurePosix", "")
        ),
    ]
)
# PyTorch moved these from one module to another, and may again.
_MOVED = {
    "torch.distributed": frozenset(
        [
            "DTensor",
            "DTensorSpec",
            "TensorMeta",
            "ShardOrderEntry",
            "DeviceMesh",
            "_MeshLayout",
            "_FlatLayout",
            "Shard",
            "Replicate",
            "Partial",
            "_Partial",
            "_StridedShard",
            "InterleavedShard",
            "_MaskPartial",
            "MaskPartial",
            "_NormPartial",
        ]
    ),
}

_STORAGES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
_STORAGE_DTYPES = {f"torch.{name}Storage": DTYPES[dtype] for name, dtype in _STORAGES.items()}
#: PyTorch dtypes without a storage class; their elements are in storages of bytes.
_UNTYPED = (
    "uint16",
    "uint32",
    "uint64",
    "complex32",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
#: For each dtype that `torch.save` writes: its storage class in the module `torch`, or `None` if it has none.
STORAGE_CLASSES: dict[str, str | None] = {dtype: f"{name}Storage" for name, dtype in _STORAGES.items()}
STORAGE_CLASSES |= dict.fromkeys(_UNTYPED)
_DTYPES = {f"torch.{name}": dtype for name, dtype in DTYPES.items() if not name.startswith("F")}
_DTYPES |= {"torch.float": DTYPES["float32"], "torch.double": DTYPES["float64"], "torch.half": DTYPES["float16"]}
_DTYPES |= {"torch.long": DTYPES["int64"], "torch.int": DTYPES["int32"], "torch.short": DTYPES["int16"]}


#: Globals of kinds of tensors that cannot be read: the kind, and what to save instead.
_OTHER_TENSORS = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor; save tensor.to_dense()",
    "torch._utils._rebuild_nested_tensor": "a nested tensor; save tensor.unbind()",
    "torch._utils._rebuild_qtensor": "a quantised tensor; save tensor.dequantize(), or its int_repr() and scales",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor of the device meta, which has no elements",
    "torch.float4_e2m1fn_x2": "a dtype with two elements to a byte; save tensor.view(torch.uint8)",
}


def other_tensor(value: Any) -> str:
    """Return the kind of tensor that a global stands for and what to save instead, if it cannot be read; else `""`."""
    return _OTHER_TENSORS.get(value.name, "") if isinstance(value, Record) else ""


def holds_tensors(value: Any) -> str:
    """Return the description of a value that is, or contains, a tensor of a kind that cannot be read; else `""`.

    Each record in it is looked at once, however many others contain it.
    """
    if not isinstance(value, (Record, tuple, list, dict)):
        return ""
    is_tensor = isinstance(value, Record) and value.name.startswith(("torch._utils._rebuild", "torch._tensor._rebuild"))
    waiting: list[Any] = [value]
    seen: set[int] = set()
    names: list[str] = []
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Persistent):
            is_tensor = True
        elif isinstance(one, Record):
            names.append(one.name)
            parts = (one.args, one.kwargs, one.state, one.elements, *chain.from_iterable(one.items))
            waiting += [part for part in parts if isinstance(part, _NESTED)]
        elif isinstance(one, dict):
            waiting += [part for part in chain.from_iterable(one.items()) if isinstance(part, _NESTED)]
        else:
            waiting += [part for part in one if isinstance(part, _NESTED)]
    if not is_tensor:
        return ""
    known = next((f": {what}" for name in names if (what := _OTHER_TENSORS.get(name))), "")
    other = next((name for name in names if not _is_known(name)), names[0] if names else "")
    if any(name.startswith("torch.nn.modules.") for name in names):
        known = ": a module as a whole; save its state_dict()"
    return f"an object of {shown(other)} that holds tensors, and has no meaning here{known}"


#: The types of values that may contain a record.
_NESTED = (Record, Persistent, tuple, list, dict)


def _is_known(name: str) -> bool:
    try:
        return _is_allowed(name)
    except ParseError:
        return False


def _says_what(error: ParseError) -> str:
    """Return a further sentence about the global that an error names; empty if it is not known."""
    text = str(error)
    return next((f"; this is {what}" for name, what in _OTHER_TENSORS.items() if f'"{name}"' in text), "")


def _is_allowed(name: str) -> bool:
    """Return whether a global has a meaning here; ParseError if it must not be named anywhere."""
    if name in _ALLOWED or name in _DTYPES or name in _STORAGE_DTYPES:
        return True
    module, _, attribute = name.rpartition(".")
    if _FORBIDDEN.fullmatch(name):
        raise ParseError(f"names {shown(name)}, which serves to run programs; nothing was run, the file is refused")
    if module in ("builtins", "__builtin__"):
        return attribute in _PLAIN
    return any(module.startswith(start) and attribute in names for start, names in _MOVED.items())


def read_strict(data: bytes, where: object, *, persistent: bool = False) -> Any:
    """Read a pickle in which every global must have a meaning here; messages begin with `where`.

    With `persistent` the pickle may refer to storages outside of it.

    Raises:
        ParseError: if it does not follow the format, or names a global that is not read here.
    """
    try:
        return read_pickle(data, _is_allowed, persistent=persistent)
    except ParseError as error:
        raise ParseError(f"{where}: {error}{_says_what(error)}") from None


def read_columns(data: bytes, where: object, attributes: Collection[str]) -> Any:
    """Read the index of a distributed checkpoint in columns, as `_core.read_dcp_index` gives them.

    Args:
        data: The pickle.
        where: The beginning of messages.
        attributes: The attributes of the index in which every global must have a meaning here.

    Raises:
        ParseError: if it is not such an index, or names a global that is not read here.
    """
    try:
        return read_dcp_index(data, _is_allowed, list(attributes))
    except ParseError as error:
        raise ParseError(f"{where}: {error}{_says_what(error)}") from None


def read_objects(data: bytes, where: object, *, persistent: bool = True) -> Any:
    """Read a pickle that may contain objects of any class, as inert records.

    Raises:
        ParseError: if it does not follow the format, or names a global that can run programs.
    """

    def judge(name: str) -> bool:
        _is_allowed(name)
        return True

    try:
        return read_pickle(data, judge, persistent=persistent)
    except ParseError as error:
        raise ParseError(f"{where}: {error}") from None


def state_of(record: Any, *kinds: str) -> dict[str, Any] | None:
    """Return the attributes of an object whose class has one of these last names; `None` for any other value.

    An object with slots has a pair of dicts as its state.
    """
    if not isinstance(record, Record) or (kinds and record.name.rpartition(".")[2] not in kinds):
        return None
    state = {} if record.state is None else record.state
    if isinstance(state, tuple):
        merged: dict[str, Any] = {}
        for part in state:
            if isinstance(part, dict):
                merged |= part
            elif part is not None:
                return None
        return merged
    return state if isinstance(state, dict) else None


def torch_sizes(value: Any) -> tuple[int, ...] | None:
    """Return a `torch.Size`, a tuple or a list as a tuple of non-negative integers; `None` for any other value."""
    if isinstance(value, Record):
        if value.name != "torch.Size" or not value.args or len(value.args) != 1:
            return None
        value = value.args[0]
    if not isinstance(value, (tuple, list)):
        return None
    for size in value:
        if type(size) is not int or not 0 <= size < 1 << 63:
            return None
    return tuple(value)


def dtype_of_global(value: Any) -> Dtype | None:
    """Return the dtype that a global such as `torch.float32` or `torch.FloatStorage` stands for; else `None`."""
    if not isinstance(value, Record):
        return None
    if value.args is not None and value.name == "torch.serialization._get_dtype" and len(value.args) == 1:
        return _DTYPES.get(str(value.args[0]))
    return None if value.args is not None else named_dtype(value.name)


def named_dtype(name: str) -> Dtype | None:
    """Return the dtype of a global such as `torch.float32`, given its name; `None` for any other."""
    return _DTYPES.get(name) or _STORAGE_DTYPES.get(name)
