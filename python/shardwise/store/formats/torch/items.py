"""The folders of `torch_checkpointing`: a file of each item and rank, and an index of how ranks' tensors are cut.

| file | holds |
|---|---|
| `ITEM_R.pt` | what rank R has of an item, such as `model`; another name, JSON or safetensors, if the index says so |
| `metadata.pkl` | for each tensor of an item its shape, mesh and placements; missing if no item was to be resharded |

A tensor's name begins with its item: `model.layers.0.wq.weight`, `optimizer.state.layers.0.wq.weight.exp_avg`. Values
that differ from rank to rank are `ITEM.rank_R.NAME`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ...._dtypes import CODES
from ...._text import shown
from ....errors import ParseError
from ....pieces import Bounds
from ...data.boxes import Located, contiguous_strides
from ...data.files import Holder
from ...data.location import Location, entries_of, json_in, opening
from ...data.parts import ITEM_INDEX, RANK_ITEM
from ...tensors.checkpoint import Besides, KeyPath, StoredCheckpoint, StoredObject
from ...tensors.stored import StoredTensor, UnsupportedError
from ...tensors.stored_pieces import StoredPiece
from ..safetensors.header import read_header
from .fsdp_states import States
from .item_index import ItemKeys, SaidItem, SaidTensor, read_item_index
from .optimizers import as_optimizer
from .rank_parts import Gathered, tied_tensors
from .run_values import is_same_value
from .state_dicts import is_plain, sharded_kind
from .tensors import Container, SavedTensor, items_within, located_values, sums_of, value_object

__all__ = ["open_form"]

#: The key that marks an optimizer whose states have names.
_MARK = "_optimizer_state_format_version"


class _ArraysFile(Container):
    """A safetensors file of one rank's arrays."""

    def __init__(self, file: Holder) -> None:
        self.file = file
        self.entries, _ = read_header(file)

    def arrays(self) -> Iterator[tuple[str, SavedTensor]]:
        """Yield the arrays by name."""
        for name, entry in self.entries.items():
            dtype = CODES[entry.dtype]
            if dtype.bits % 8:
                raise UnsupportedError(
                    f"{self.file.path}: {shown(name)} has elements of {dtype.bits} bits; only whole bytes are read"
                )
            yield name, SavedTensor(name, dtype, entry.shape, contiguous_strides(entry.shape, 1), 0, entry.nbytes)

    def extent(self, tensor: SavedTensor, name: str) -> Located:
        """Return the place of a tensor's elements in the file."""
        itemsize = tensor.dtype.bits // 8
        return self.file, self.entries[tensor.storage].start, tuple(step * itemsize for step in tensor.strides)

    def piece(self, tensor: SavedTensor, name: str, box: Bounds, local: tuple[int, ...] | None = None) -> StoredPiece:
        """Return a tensor as a piece; with `local`, only the box that begins there."""
        return StoredPiece(box, self.file.path, key=tensor.storage, locate=partial(self._locate, tensor, name, local))


def open_form(path: Location, *, parameter_names: Sequence[str] | None = None) -> StoredCheckpoint:
    """Open the folder.

    Args:
        path: The folder.
        parameter_names: The names of the optimizer's parameters in the order of their numbers, if they are known.
    """
    names = [name for name, _ in entries_of(path)]
    index, world = read_item_index(path) if ITEM_INDEX in names else (None, 0)
    items, unread = _items(path, names, index or {}, world)
    world = world or 1 + max(rank for item in items.values() for rank in item.files)
    contents = _ItemContents(path, world)
    listed = [path / name for item in items.values() for name in item.files.values()]
    with opening(listed) as (open_next, files):
        if index is not None:
            open_next(path / ITEM_INDEX)  # It is a file of the checkpoint.
        for key, item in items.items():
            ranks = {rank: open_next(path / name) for rank, name in sorted(item.files.items())}
            contents.read(key, item, ranks)
        contents.name_states(parameter_names)
    zips = [file for file in files if file.path.name.endswith(".pt")]
    return StoredCheckpoint(
        path,
        "torch_checkpointing",
        contents.tensors,
        files,
        Besides(
            metadata={"world_size": world, "planner_data": contents.paths},
            objects=contents.objects,
            unreadable=contents.unreadable,
            sums=partial(sums_of, zips),
            unread=unread,
            doubts=contents.doubts,
        ),
    )


def _items(
    path: Location, names: Sequence[str], index: Mapping[str, SaidItem], world: int
) -> tuple[dict[str, SaidItem], list[str]]:
    """Return the items of a folder, those of the index and others, and the names that are of none.

    Raises:
        ParseError: if a rank's file is missing.
    """
    there, taken, found = set(names), {ITEM_INDEX}, dict(index)
    for key, item in index.items():
        for rank, name in item.files.items():
            if not (name in there if "/" not in name else (path / name).is_file()):
                raise ParseError(
                    f"{path}: the file {shown(name)} is missing: it has the part of {shown(key)} on rank {rank}"
                )
            taken |= {name, name.partition("/")[0]}
    others: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        match = RANK_ITEM.fullmatch(name)
        if match is not None and name not in taken:
            others.setdefault((match["item"], match["kind"]), {})[int(match["rank"])] = name
    size = world or 1 + max((rank for ranks in others.values() for rank in ranks), default=0)
    for (key, kind), ranks in sorted(others.items()):
        if key in found or (max(ranks) >= size and world):
            continue
        # One rank may write what all have in common.
        lacking = next((rank for rank in range(size) if rank not in ranks), None)
        if lacking is not None and list(ranks) != [0]:
            raise ParseError(f"{path}: there is no file {key}_{lacking}.{kind}, though rank {max(ranks)} has one")
        found[key] = SaidItem(ranks, kind, {})
        taken |= set(ranks.values())
    if not found:
        raise ParseError(f"{path}: has no file of an item and a rank, such as model_0.pt")
    return found, sorted(there - taken)


class _ItemContents:
    """The contents of the items.

    Attributes:
        objects: The values that are not tensors.
        unreadable: The reasons why other tensors cannot be read.
        paths: The keys that lead to values of more than one key.
        doubts: Warnings about states that keep their numbers.
    """

    def __init__(self, path: Location, world: int) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, StoredObject] = {}
        self.unreadable: dict[str, str] = {}
        self.paths: dict[str, KeyPath] = {}
        self.doubts: list[str] = []
        self._path, self._world = path, world
        self._models: dict[str, dict[str, Gathered]] = {}
        self._states: list[tuple[str, States]] = []

    def read(self, key: str, item: SaidItem, files: Mapping[int, Holder]) -> None:
        """Add the contents of an item."""
        values: dict[ItemKeys, dict[int, tuple[Container | None, Any]]] = {}
        containers: dict[int, Container] = {}
        optimizers = 0
        for rank, file in files.items():
            for keys, container, value in _values(item, file, containers, rank):
                values.setdefault(keys, {})[rank] = container, value
            root = containers[rank].root() if item.kind == "pt" else None
            optimizers += as_optimizer("", root, lambda _: None) is not None
        for keys, said in item.said.items():
            if (ranks := frozenset(values.get(keys, {}))) != said.ranks:
                lacking = sorted(said.ranks ^ ranks)[0]
                raise ParseError(
                    f"{files[min(files)].path.parent}: the file of rank {lacking} of {shown(key)} "
                    f"{'has' if lacking in ranks else 'does not have'} {shown('.'.join(keys))}, but {ITEM_INDEX} says "
                    "otherwise: they are not of one checkpoint"
                )
        is_optimizer = optimizers == len(files) == self._world
        if is_optimizer:
            opened = [containers[rank] for rank in sorted(containers)]
            self._states.append((key, States(self._path, opened, self._world, f"{key}.")))
            values = {keys: held for keys, held in values.items() if keys[:1] not in (("state",), ("param_groups",))}
            values.pop((_MARK,), None)
        gathered: dict[str, Gathered] = {}
        is_cut = any(sharded_kind(value) for held in values.values() for _, value in held.values())
        for keys, held in values.items():
            self._add(key, keys, held, item, gathered, is_cut or key == "model")
        for name, tensor in tied_tensors(self._path, gathered).items():
            self._new(name)
            self.tensors[name] = tensor
        if gathered and not is_optimizer:
            self._models[key] = {name.removeprefix(f"{key}."): held for name, held in gathered.items()}

    def name_states(self, names: Sequence[str] | None) -> None:
        """Add the states of optimizers, under the names of their parameters if these are certain."""
        if names is not None and len(self._states) != 1:
            several = "several optimizers" if self._states else "no optimizer whose parameters have numbers"
            raise ParseError(f"{self._path}: parameter_names is given, but it has {several}")
        model = self._models.get("model") or (next(iter(self._models.values())) if len(self._models) == 1 else {})
        for _, states in self._states:
            states.name(model, (), names)
            for name in (*states.tensors, *states.objects):
                self._new(name)
            self.tensors |= states.tensors
            self.objects |= states.objects
            self.unreadable |= states.unreadable
            self.doubts += states.doubts

    def _new(self, name: str) -> None:
        if name in self.tensors or name in self.objects:
            raise ParseError(f"{self._path}: two of its files hold {shown(name)}")

    def _add(
        self,
        item: str,
        keys: ItemKeys,
        held: Mapping[int, tuple[Container | None, Any]],
        of: SaidItem,
        gathered: dict[str, Gathered],
        is_model: bool,
    ) -> None:
        """Add one value, as all ranks have it, or the value of each."""
        name, said = ".".join((item, *keys)), of.said.get(keys)
        if said is not None and said.unknown:
            self.unreadable[name] = f"{self._path}: {shown(name)} is not read: {said.unknown}"
            return
        whole = Gathered(name)
        try:
            kinds = {_shape(container, value, name) for container, value in held.values()}
            if said is not None or any(kind == ("cut",) for kind in kinds):
                self._gather(whole, said, held, of.kind)
            elif None in kinds:
                self._add_values(item, keys, held)
                return
            elif len(kinds) == 1 and len(held) == len(of.files):
                self._gather(whole, None, held, of.kind)
        except UnsupportedError as error:
            self.unreadable[name] = str(error)
            return
        # Without an index nothing says that what ranks have under one name is one tensor.
        if whole.parts and (said is not None or whole.is_sharded or whole.is_replicated()):
            gathered[name] = whole
            self.paths[name] = (item, *keys)
            return
        if is_model:
            raise ParseError(
                f"{self._path}: {shown(name)} is not the same on all ranks, and nothing says how it is cut among them: "
                f"it has no {ITEM_INDEX}, which torch_checkpointing writes for items with a resharder"
            )
        for rank, (container, value) in held.items():
            own = Gathered(".".join((item, f"rank_{rank}", *keys)))
            assert container is not None
            _add_part(own, container, value, self._world)
            gathered[own.name] = own

    def _gather(
        self, whole: Gathered, said: SaidTensor | None, held: Mapping[int, tuple[Container | None, Any]], kind: str
    ) -> None:
        for rank, (container, value) in held.items():
            where = self._path if container is None else container.file.path
            if container is None:
                raise ParseError(f"{where}: {shown(whole.name)} is not a tensor")
            if kind == "safetensors" and said is not None and said.sharding is not None:
                at = said.mesh.index(rank) if rank in said.mesh else None
                whole.add_array(container, value, said.sharding, at)
            elif not _add_part(whole, container, value, self._world):
                raise ParseError(f"{where}: {shown(whole.name)} is not a tensor, but is one on other ranks")
        sharding = None if said is None else said.sharding
        if sharding is not None and (
            (whole.shape, whole.dtype) != (sharding.shape, sharding.dtype)
            or (whole.is_sharded and whole.sharding != sharding)
        ):
            raise ParseError(
                f"{self._path}: {shown(whole.name)} is {whole.dtype.name} of shape {whole.shape} in its files, but "
                f"{sharding.dtype.name} of shape {sharding.shape}, or cut differently, in {ITEM_INDEX}: they are not "
                "of one checkpoint"
            )

    def _add_values(self, item: str, keys: ItemKeys, held: Mapping[int, tuple[Container | None, Any]]) -> None:
        values = [value for _, value in held.values()]
        is_one = all(is_same_value(values[0], value) for value in values[1:])
        for rank, (_, value) in held.items():
            path = (item, *keys) if is_one else (item, f"rank_{rank}", *keys)
            name = ".".join(path)
            self._new(name)
            self.objects[name] = value_object(name, value)
            self.paths[name] = path
            if is_one:
                return


def _add_part(gathered: Gathered, container: Container, value: Any, world: int) -> bool:
    if isinstance(value, SavedTensor):
        gathered.add_plain(container, value)
        return True
    return gathered.add(container, value, world)


def _shape(container: Container | None, value: Any, name: str) -> Any:
    """Return the shape and dtype of a tensor; `("cut",)` for a part of one, `None` for any other value."""
    if sharded_kind(value):
        return ("cut",)
    found = value if isinstance(value, SavedTensor) else None if container is None else container.tensor(value, name)
    return None if found is None else (found.shape, found.dtype)


def _values(
    item: SaidItem, file: Holder, containers: dict[int, Container], rank: int
) -> Iterator[tuple[ItemKeys, Container | None, Any]]:
    """Yield the values of a rank's file, with the keys that lead to them."""
    if item.kind == "safetensors":
        array = containers[rank] = _ArraysFile(file)
        names = {".".join(keys): keys for keys in item.said}
        for name, saved in array.arrays():
            yield names.get(name, (name,)), array, saved
        return
    container = None
    if item.kind == "json":
        root, most = json_in(file), file.size
    else:
        container = containers[rank] = Container(file)
        root, most = container.root(), container.pickle_bytes
    for _, path, value in located_values(root, file.path, most, is_plain):
        if path or items_within(root) is None:
            yield tuple(map(str, path)), container, value
