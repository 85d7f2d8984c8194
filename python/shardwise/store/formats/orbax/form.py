"""Orbax's checkpoints: the folder of one item, of a step with items, or of steps.

The names of the arrays are the keys of the saved tree, joined with dots. A step with several items that hold arrays
has the item before each name.
"""

from __future__ import annotations

import re
from typing import Any

from ...._text import counted, shown
from ....errors import ParseError
from ...data.location import Location, read_json
from ...data.text import checked_name
from ...tensors.checkpoint import Besides, StoredCheckpoint, StoredObject
from ...tensors.stored import StoredTensor, UnsupportedError
from .keyvalue import FolderStore, KeyValueStore
from .ocdbt import MANIFEST, OcdbtStore
from .zarr import arrays_of, read_array

__all__ = ["open_form"]

_COMMITTED = "commit_success.txt"
_STEP_METADATA = "_CHECKPOINT_METADATA"
_ITEM_METADATA = "_METADATA"
_STEP = re.compile(r"(?:[A-Za-z][A-Za-z0-9]*_)?(\d{1,18})")
_TEMPORARY = ".orbax-checkpoint-tmp"


def open_form(path: Location) -> StoredCheckpoint:
    """Open an item, a step, or the last complete step in a folder of steps."""
    metadata: dict[str, Any] = {}
    if not (_is_item(path) or _is_marked(path)):
        path, metadata["step"] = _last_step(path)
    _check_committed(path)
    items = [path] if _is_item(path) else sorted(filter(_is_item, path.iterdir()))
    if not items:
        raise ParseError(f"{path}: an Orbax step without an item that holds arrays")
    if not _is_item(path):
        metadata["items"] = [item.name for item in items]
    stores: list[KeyValueStore] = []
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    unreadable: dict[str, str] = {}
    try:
        for item in items:
            _open_item(item, f"{item.name}." if len(items) > 1 else "", stores, tensors, objects, unreadable)
    except BaseException:
        for store in stores:
            store.files.close()
        raise
    return StoredCheckpoint(
        path, "orbax", tensors, [store.files for store in stores], Besides(metadata=metadata, objects=objects,
        unreadable=unreadable))  # fmt: skip


def _is_item(path: Location) -> bool:
    return any((path / name).exists() for name in (_ITEM_METADATA, MANIFEST))


def _is_marked(path: Location) -> bool:
    return any((path / name).exists() for name in (_STEP_METADATA, "orbax.checkpoint", _COMMITTED))


def _last_step(path: Location) -> tuple[Location, int]:
    """Return the complete step with the highest number."""
    steps = []
    for entry in path.iterdir():
        match = _STEP.fullmatch(entry.name)
        if match is not None and entry.is_dir():
            steps.append((int(match[1]), entry))
    for number, step in sorted(steps, reverse=True):
        if (step / _COMMITTED).exists():
            return step, number
    raise ParseError(f"{path}: none of its {counted(len(steps), 'step')} has a {_COMMITTED}, which is written last")


def _check_committed(path: Location) -> None:
    if _TEMPORARY in path.name:
        raise ParseError(f"{path}: is what an interrupted save of Orbax left behind; open the last complete step")
    if not any((folder / _COMMITTED).exists() for folder in (path, path.parent)):
        raise ParseError(
            f"{path}: has no {_COMMITTED}, which Orbax writes last: the save was interrupted, or files are missing. "
            "Open another step; or, if an older Orbax wrote it to a local disk, put an empty file of that name there"
        )


def _open_item(
    item: Location,
    prefix: str,
    stores: list[KeyValueStore],
    tensors: dict[str, StoredTensor],
    objects: dict[str, StoredObject],
    unreadable: dict[str, str],
) -> None:
    said = _json(item / _ITEM_METADATA)
    if not isinstance(said, dict):
        raise ParseError(f"{item / _ITEM_METADATA}: is not a JSON object")
    if not (item / MANIFEST).exists() and (said.get("use_ocdbt") or any(item.glob("ocdbt.process_*"))):
        raise ParseError(
            f"{item}: has no {MANIFEST}: the databases of the processes were not merged, so the save was interrupted"
        )
    store: KeyValueStore = OcdbtStore(item) if (item / MANIFEST).exists() else FolderStore(item)
    stores.append(store)
    # If chunks that equal the fill value are stored like all others, a missing one was lost.
    complete = said.get("store_array_data_equal_to_fill_value") is True
    keys = sorted(store.listing())
    for name, version in sorted(arrays_of(keys).items()):
        known = checked_name(f"{prefix}{name}", item)
        try:
            tensor = read_array(store, keys, name, version, str(item), complete=complete)
        except UnsupportedError as error:
            unreadable[known] = str(error)
            continue
        if tensor is not None:
            tensor.name = known
            tensors[known] = tensor
    for name in _names_given_twice(item, said.get("tree_metadata"), prefix, {*tensors, *unreadable}):
        tensors.pop(name, None)
        unreadable[name] = (
            f"{item}: two arrays of its tree have the name {shown(name)}, because a key has a dot; Orbax keeps them in "
            "one place, so that only one was saved"
        )
    strings = _json(item / "_strings.json")
    if isinstance(strings, dict):
        for name, text in strings.items():
            objects[f"{prefix}{name}"] = StoredObject(f"{prefix}{name}", lambda text=text: text)  # type: ignore[misc]


def _names_given_twice(item: Location, tree: Any, prefix: str, names: set[str]) -> set[str]:
    """Check that every array that the tree of an item names exists, and return the names of two of them."""
    seen, twice = set[str](), set[str]()
    for entry in tree.values() if isinstance(tree, dict) else ():
        keys = entry.get("key_metadata") if isinstance(entry, dict) else None
        value = entry.get("value_metadata") if isinstance(entry, dict) else None
        if not isinstance(keys, list) or not isinstance(value, dict):
            raise ParseError(f"{item / _ITEM_METADATA}: tree_metadata does not describe a tree")
        if value.get("skip_deserialize") or value.get("value_type") not in ("jax.Array", "np.ndarray", "scalar"):
            continue
        name = ".".join(str(key.get("key")) if isinstance(key, dict) else "" for key in keys)
        if f"{prefix}{name}" not in names:
            raise ParseError(f"{item}: its tree names the array {shown(name)}, which does not exist")
        (twice if name in seen else seen).add(name)
    return {f"{prefix}{name}" for name in twice}


def _json(path: Location) -> Any:
    """Return the JSON in a file; an empty object if the file does not exist."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
