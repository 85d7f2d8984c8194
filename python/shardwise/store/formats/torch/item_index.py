"""The index of a folder of `torch_checkpointing`: the items, their files, and how ranks' tensors are cut."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ...._json import strict_json
from ...._text import shown
from ....errors import ParseError
from ...data.location import Location, first_bytes
from ...data.parts import ITEM_INDEX
from ...data.text import are_sizes
from ...tensors.stored import UnsupportedError
from .pickles import named_dtype, read_strict
from .placed_states import Sharding, axes_order

__all__ = ["ItemKeys", "SaidItem", "SaidTensor", "read_item_index"]

_MOST_INDEX = 1 << 30
_MOST_RANKS = 1_000_000
_VERSION = "2.0"
_FORMATS = {"TorchSerialization": "pt", "JsonSerialization": "json", "SafetensorsSerialization": "safetensors"}


#: The keys that lead to a value of an item.
ItemKeys = tuple[str, ...]


class SaidTensor(NamedTuple):
    """The statement of an index about one tensor.

    Attributes:
        sharding: The way in which it is cut.
        mesh: The ranks of its mesh, in order.
        ranks: The ranks that have it.
        unknown: Why the statement cannot be read; empty for others.
    """

    sharding: Sharding | None
    mesh: tuple[int, ...]
    ranks: frozenset[int]
    unknown: str = ""


class SaidItem(NamedTuple):
    """An item of a checkpoint.

    Attributes:
        files: The name of its file by rank.
        kind: The format of its files: `"pt"`, `"json"` or `"safetensors"`.
        said: The statements of the index about its tensors, by the keys that lead to them.
    """

    files: dict[int, str]
    kind: str
    said: dict[ItemKeys, SaidTensor]


def read_item_index(path: Location) -> tuple[dict[str, SaidItem], int]:
    """Read the index: its items, and the number of ranks.

    Raises:
        ParseError: if it is of another version or form.
    """
    where = path / ITEM_INDEX
    data = first_bytes(where, _MOST_INDEX + 1)
    if len(data) > _MOST_INDEX:
        raise ParseError(f"{where}: more than {_MOST_INDEX} bytes, the limit")
    root = _dict(read_strict(data, where), where, "the index")
    if root.get("version") != _VERSION:
        raise ParseError(f"{where}: is of version {shown(root.get('version'))}; only {_VERSION} is known")
    world = root.get("world_size")
    if type(world) is not int or not 0 < world <= _MOST_RANKS:
        raise ParseError(f"{where}: world_size is {shown(world)}")
    items = {}
    for key, said in _dict(root.get("metadata"), where, "metadata").items():
        item = _dict(said, where, f"metadata[{shown(key)}]")
        layouts = _dict(item.get("rank_to_layout_info"), where, "rank_to_layout_info")
        if not isinstance(key, str) or set(layouts) != set(range(world)):
            raise ParseError(f"{where}: {shown(key)}: rank_to_layout_info does not have the ranks 0 to {world - 1}")
        groups = _dict(item.get("nested_path_to_metadata"), where, "nested_path_to_metadata")
        tensors = {_keys(text, where): _said(each, world, f"{where}: {shown(text)}") for text, each in groups.items()}
        holders = frozenset().union(*(each.ranks for each in tensors.values()))
        files = {rank: _layout(layouts[rank], key, rank, where) for rank in sorted(holders)}
        kinds = {kind for _, kind in files.values()}
        if len(kinds) > 1:
            raise ParseError(f"{where}: {shown(key)} is in files of several formats, {', '.join(sorted(kinds))}")
        items[key] = SaidItem({rank: name for rank, (name, _) in files.items()}, min(kinds, default="pt"), tensors)
    return items, world


def _dict(value: Any, where: object, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ParseError(f"{where}: {what} is {shown(value)}, not a dict")
    return value


def _keys(text: Any, where: object) -> ItemKeys:
    """Return the keys that lead to a tensor of an item, from their JSON."""
    found = strict_json(text.encode(), f"{where}: {shown(text)}") if isinstance(text, str) else None
    if not isinstance(found, list) or not all(isinstance(key, str) or type(key) is int for key in found):
        raise ParseError(f"{where}: {shown(text)} is not a list of keys")
    return tuple(map(str, found))


def _layout(value: Any, item: str, rank: int, where: object) -> tuple[str, str]:
    """Return the file of a rank and its format; a rank without a statement has the usual ones."""
    if value is None:
        return f"{item}_{rank}.pt", "pt"
    said = _dict(value, where, "a layout")
    name, form = said.get("file_path"), said.get("serialization_format")
    kind = _FORMATS.get(form.get("type", "") if isinstance(form, dict) else "")
    if not isinstance(name, str) or not {"", ".", ".."}.isdisjoint(name.split("/")) or "\\" in name or "\0" in name:
        raise ParseError(f"{where}: names the file {shown(name)}, which is not in its own folder")
    if kind is None:
        raise UnsupportedError(f"{where}: {shown(item)} is in a format that is not read, {shown(form)}")
    return name, kind


def _said(groups: Any, world: int, where: str) -> SaidTensor:
    """Return the statement of the index about one tensor; the ranks that say the same are one group."""
    found: list[SaidTensor] = []
    for group in groups if isinstance(groups, list) else ():
        held = _dict(group, where, "a group")
        metadata = _dict(held.get("sharding_metadata"), where, "sharding_metadata")
        ranks = _ranks(held.get("ranks"), world)
        if ranks is None:
            raise ParseError(
                f"{where}: its ranks are {shown(held.get('ranks'))}, which is not valid in a world of {world}"
            )
        kind = metadata.get("type")
        if kind == "DTensorShardingMetadata":
            sharding, mesh = _sharding(_dict(metadata.get("data"), where, "data"), world, where)
            found.append(SaidTensor(sharding, mesh, frozenset(ranks)))
        else:
            why = f"its sharding_metadata is of the type {shown(kind)}, which is not known"
            found.append(SaidTensor(None, (), frozenset(ranks), why))
    if not found:
        raise ParseError(f"{where}: no rank has it")
    if any(other[:2] != found[0][:2] or other.unknown != found[0].unknown for other in found):
        kinds = "ranks say that it is cut in different ways"
        return SaidTensor(None, (), frozenset().union(*(each.ranks for each in found)), kinds)
    return found[0]._replace(ranks=frozenset().union(*(each.ranks for each in found)))


def _ranks(value: Any, world: int) -> tuple[int, ...] | None:
    """Return a list of ranks; `None` for any other value."""
    is_list = isinstance(value, (list, tuple)) and all(type(rank) is int and 0 <= rank < world for rank in value)
    return tuple(value) if is_list else None


def _sharding(data: dict[Any, Any], world: int, where: str) -> tuple[Sharding, tuple[int, ...]]:
    """Return the way in which a tensor is cut, and the ranks of its mesh."""
    mesh = _dict(data.get("mesh_spec"), where, "mesh_spec")
    sizes: Any = mesh.get("mesh_shape")
    ranks = _ranks(mesh.get("mesh_data"), world)
    shape: Any = data.get("global_shape")
    placements: Any = data.get("placements")
    dtype = named_dtype(f"{data.get('dtype')}")
    if not are_sizes(shape) or dtype is None:
        raise ParseError(
            f"{where}: has the dtype {shown(data.get('dtype'))} and the shape {shown(shape)}, which are not both valid"
        )
    if (
        not isinstance(sizes, tuple)
        or not are_sizes(list(sizes))
        or ranks is None
        or len(ranks) != math.prod(sizes)
        or len(set(ranks)) != len(ranks)
        or not isinstance(placements, list)
        or len(placements) != len(sizes)
    ):
        raise ParseError(
            f"{where}: the placements {shown(placements)} do not fit a mesh of {shown(sizes)} with the ranks "
            f"{shown(ranks)}"
        )
    known = []
    for placement in placements:
        one = _dict(placement, where, "a placement")
        kind, dim, factor = one.get("type"), one.get("dim", 0), one.get("split_factor", 1)
        if kind not in ("Shard", "StridedShard", "Replicate") or type(dim) is not int or type(factor) is not int:
            raise ParseError(f"{where}: the placement {shown(placement)} is not known")
        if kind != "Replicate" and not (-len(shape) <= dim < len(shape) and 1 <= factor <= world):
            raise ParseError(f"{where}: the placement {shown(placement)} does not fit a tensor of shape {shown(shape)}")
        name = "_StridedShard" if kind == "StridedShard" else kind
        known.append((name, dim % len(shape) if kind != "Replicate" else 0, factor if kind == "StridedShard" else 1))
    order = axes_order(None, tuple(known), len(shape))
    assert order is not None
    return Sharding(tuple(shape), dtype, sizes, tuple(known), order), tuple(ranks)
