"""A reader for `torch.distributed.checkpoint.load`: any checkpoint that can be opened, under the names of a state dict.

PyTorch's planner asks for boxes of tensors, one for each local tensor, and each is read into that tensor's own memory.
It takes every local tensor for a box, which strided shards need not be: these are read here, piece by piece.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._arguments import is_true, optional
from .._boxes import consecutive
from .._fork import importing
from .._text import shown
from ..errors import LayoutError, ParseError
from ..mesh import DeviceMesh
from ..rules.rewrites import Rewrites
from ..store import StoredCheckpoint, StoredObject, StoredTensor, open_checkpoint
from ..store.data.location import Location
from ..store.rewritten.names import Naming, replacements
from ..store.rewritten.view import rewritten_view
from ._local_shards import merged_ranges, pieces_along
from ._placements import Placement, StridedShard, read_placements
from ._tensors import array_of_tensor, tensor_of_array

__all__ = ["CheckpointReader", "read_into"]

#: The bytes that are read at a time where they cannot be read into their place.
_BLOCK = 64 * 2**20
#: The name of a value of an optimizer's group: of the group with a number, or of a parameter.
_GROUP = re.compile(r"(?:.*\.)?param_groups\.((?P<number>[0-9]{1,9})\.)?(?P<rest>.+)")


#: A tensor or a value of the checkpoint, or a count of steps that it has in another form.
_Readable = StoredTensor | StoredObject | float


class _Names(dict[str, Any]):
    """The entries of the metadata by name; asking for one that cannot be read is an error that says why."""

    def __init__(self, entries: Mapping[str, Any], unreadable: Mapping[str, str]) -> None:
        super().__init__(entries)
        self._unreadable = unreadable

    def __contains__(self, name: object) -> bool:
        if name in self._unreadable:
            raise ParseError(f"{shown(name)} cannot be read: {self._unreadable[name]}")  # type: ignore[index]
        return super().__contains__(name)


class CheckpointReader:
    """Reads a checkpoint for `torch.distributed.checkpoint.load`; `storage_reader` makes it and lists what it takes."""

    def __init__(
        self,
        checkpoint: str | os.PathLike[str] | Location | StoredCheckpoint,
        *,
        rename: Mapping[str, str] | Sequence[tuple[str, str]] = (),
        rewrites: Rewrites | None = None,
        model: str | None = None,
        optimizer: str | None = None,
        cast: bool = False,
    ) -> None:
        self._given = checkpoint
        self._naming = Naming(tuple(replacements(rename)), optional("rewrites", rewrites, Rewrites))
        self._model, self._optimizer = optional("model", model, str), optional("optimizer", optimizer, str)
        self._cast = is_true("cast", cast)
        self._opened: StoredCheckpoint | None = None
        self._entries: dict[str, _Readable] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this may be the path of a checkpoint."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    @property
    def checkpoint_id(self) -> str:
        """The path, for PyTorch's log."""
        return str(self._given.path if isinstance(self._given, StoredCheckpoint) else self._given)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget what was read, and take another checkpoint, if one is given to `load`."""
        self._close()
        if checkpoint_id is not None:
            self._given = checkpoint_id

    def read_metadata(self) -> Any:
        """Open the checkpoint, and say what is in it."""
        import torch
        from torch.distributed.checkpoint.metadata import (
            BytesStorageMetadata,
            ChunkStorageMetadata,
            Metadata,
            TensorProperties,
            TensorStorageMetadata,
        )

        self._close()
        if isinstance(self._given, StoredCheckpoint):
            checkpoint = self._given
        else:
            checkpoint = self._opened = open_checkpoint(self._given)
        if self._naming.rename or self._naming.rewrites is not None:
            checkpoint = rewritten_view(checkpoint, self._naming, with_values=True)
        self._entries, unreadable = self._named(checkpoint), dict(checkpoint.unreadable)
        said: dict[str, Any] = {}
        for name, source in self._entries.items():
            if isinstance(source, StoredObject):
                said[name] = BytesStorageMetadata()
                continue
            shape, dtype = ((), "float32") if isinstance(source, float) else (source.shape, source.dtype)
            theirs = getattr(torch, dtype, None)
            if not isinstance(theirs, torch.dtype):
                unreadable[name] = f"its dtype is {dtype}, which PyTorch does not have"
                continue
            size = torch.Size(shape)
            # One chunk, whatever the pieces are: each read is of a box of the whole tensor.
            chunks = [ChunkStorageMetadata(torch.Size([0] * len(shape)), size)]
            said[name] = TensorStorageMetadata(TensorProperties(dtype=theirs), size, chunks)
        return Metadata(_Names(said, unreadable), planner_data={name: (name,) for name in said})

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool) -> None:
        """Do nothing: every rank has opened the checkpoint."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read what this rank needs, into its memory."""
        from torch.distributed.checkpoint.planner import LoadItemType
        from torch.futures import Future

        strided: set[str] = set()
        for name, tensor in (getattr(planner, "state_dict", None) or {}).items():
            if hasattr(tensor, "placements") and name in self._entries:
                placements = read_placements(tensor.placements, _mesh(tensor), tensor.ndim)
                if any(isinstance(each, StridedShard) for each in placements):
                    strided.add(name)
                    self._read_strided(name, tensor, placements)
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._bytes(name))
            elif item.dest_index.fqn not in strided:
                target = planner.resolve_tensor(item).detach()
                starts = zip(item.storage_offsets, item.lengths, strict=True)
                self._read(name, tuple(slice(start, start + length) for start, length in starts), target)
                planner.commit_tensor(item, target)
        self._close()
        done: Any = Future()
        done.set_result(None)
        return done

    def _read_strided(self, name: str, tensor: Any, placements: list[Placement]) -> None:
        """Read what a rank holds of a tensor in strided shards: boxes of it, which follow one another in its memory."""
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            return
        mesh, target = _mesh(tensor), tensor.to_local().detach()
        rank = int(np.ravel_multi_index(tuple(coordinate), mesh.shape))
        along = []
        for dim, size in enumerate(tensor.shape):
            ids, pieces = pieces_along(dim, size, placements, mesh)
            along.append(merged_ranges(pieces[ids[rank]]))
        held = tuple(sum(stop - start for start, stop in own) for own in along)
        if held != tuple(target.shape):
            raise LayoutError(
                f"{shown(name)}: the local tensor has the shape {tuple(target.shape)}; with {tuple(tensor.placements)} "
                f"it must be {held}"
            )
        for ranges in itertools.product(*along):
            index, box = [], []
            for own, (start, stop) in zip(along, ranges, strict=True):
                at = sum(high - low for low, high in own if high <= start)
                index.append(slice(at, at + stop - start))
                box.append(slice(start, stop))
            self._read(name, tuple(box), target[tuple(index)])

    def _read(self, name: str, box: tuple[slice, ...], target: Any) -> None:
        """Read a box of a tensor into a tensor of PyTorch."""
        source = self._entries[name]
        if isinstance(source, float):
            target.fill_(source)
            return
        assert isinstance(source, StoredTensor)
        theirs = str(target.dtype).removeprefix("torch.")
        if theirs != source.dtype and not self._cast:
            raise LayoutError(
                f"{shown(name)} is {source.dtype} in {self.checkpoint_id}, and {theirs} in the state dict; "
                "storage_reader(..., cast=True) rounds it as PyTorch does"
            )
        read_into(source, box, target)

    def _bytes(self, name: str) -> io.BytesIO:
        """Return the file of `torch.save` of a value that is no tensor."""
        import torch

        source = self._entries[name]
        assert isinstance(source, StoredObject)
        value = source.value()
        if (other := _not_plain(value)) is not None:
            raise LayoutError(
                f"{shown(name)} holds {other}; reading it would run code that the file names: leave it out "
                "of the state dict"
            )
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return file

    def _named(self, checkpoint: StoredCheckpoint) -> dict[str, _Readable]:
        """Return all tensors and values by the names that a state dict has for them."""
        found: dict[str, _Readable] = {}

        def add(name: str, source: _Readable, of: str) -> None:
            if name in found:
                raise LayoutError(f"{checkpoint.path}: {shown(of)} and another would both be called {shown(name)}")
            found[name] = source

        training = checkpoint.training
        names = training.names
        weights = {weight: parameter for parameter, weight in names.weights.items()}
        steps = {state.parameter for state in names.states.values() if state.kind == "step"}
        for name, tensor in checkpoint.items():
            if self._model is not None and name in weights:
                add(f"{self._model}{weights[name]}", tensor, name)
            elif self._optimizer is not None and name in names.states:
                state = names.states[name]
                add(f"{self._optimizer}state.{state.parameter}.{state.kind}", tensor, name)
            else:
                add(name, tensor, name)
        if self._optimizer is None:
            return found | dict(checkpoint.objects)
        for parameter, one in training.parameters.items():
            if one.states and parameter not in steps and (step := training.step(parameter)) is not None:
                add(f"{self._optimizer}state.{parameter}.step", step, f"the step of {parameter}")
        members: dict[int, list[str]] = {}
        for parameter in training.parameters:
            if (group := training.group(parameter)) is not None:
                members.setdefault(group, []).append(parameter)
        for name, value in checkpoint.objects.items():
            match = _GROUP.fullmatch(name) if training.is_state(name) else None
            if match is None:
                add(name, value, name)
                continue
            rest = match["rest"]
            if match["number"] is None:
                add(f"{self._optimizer}param_groups.{rest}", value, name)
                continue
            # Both of the forms that PyTorch has: by the group's number, and by each of its parameters.
            add(f"{self._optimizer}param_groups.{match['number']}.{rest}", value, name)
            if rest != "params":
                for parameter in members.get(int(match["number"]), ()):
                    if f"{name[: match.start('number')]}{parameter}.{rest}" not in checkpoint.objects:
                        add(f"{self._optimizer}param_groups.{parameter}.{rest}", value, name)
        return found

    def _close(self) -> None:
        self._entries = {}
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def read_into(tensor: StoredTensor, box: tuple[slice, ...], target: Any) -> None:
    """Read a box of a stored tensor into a tensor of PyTorch, rounding if the dtypes differ.

    On a CPU it is read into the tensor's own memory, if that is contiguous; else 64 MiB at a time.
    """
    is_same = str(target.dtype).removeprefix("torch.") == tensor.dtype
    if target.device.type == "cpu" and target.is_contiguous() and is_same:
        tensor.read(box, out=array_of_tensor(target))
        return
    shape = tuple(side.stop - side.start for side in box)
    for part in consecutive(shape, max(_BLOCK // max(tensor.bits // 8, 1), 1)) if math.prod(shape) else ():
        there = (slice(at.start + own.start, at.start + own.stop) for at, own in zip(box, part, strict=True))
        target[part].copy_(tensor_of_array(tensor.read(tuple(there))))


def _mesh(tensor: Any) -> DeviceMesh:
    """Return the mesh of a DTensor, whose dims need no names here."""
    shape = tuple(tensor.device_mesh.shape)
    return DeviceMesh(shape, tuple(f"dim{at}" for at in range(len(shape))))


def _not_plain(value: Any) -> str | None:
    """Return the first part of a value that is no number, text, bytes, list, tuple or dict; `None` if there is none."""
    if isinstance(value, Mapping):
        return next((found for pair in value.items() for part in pair if (found := _not_plain(part))), None)
    if isinstance(value, (list, tuple)):
        return next((found for part in value if (found := _not_plain(part))), None)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return None
    with importing:
        from .._core import Record
    return f"an object of {shown(value.name)}" if isinstance(value, Record) else f"a value of {type(value).__name__}"
