"""The figures of a training state: the bytes that devices hold and allocate, as one value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._drawn import Drawn
from .._fork import importing
from .._frozen import frozen, handed_out
from .._text import bytes_text, counted
from ..mesh import DeviceMesh
from ..mesh_views import extremes_along
from .recipe import Recipe, StateShare

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..show.picture import Picture

__all__ = ["NOT_COUNTED", "Figures", "Kept", "StateRow", "TrainingState"]

#: The sentence at the end of every report.
NOT_COUNTED = (
    "not counted: activations, workspaces and buffers of communication, what a framework keeps of its own, and "
    "fragmentation"
)
#: The most tensors that a message names as the reason why a device has more bytes than another.
_NAMED = 3
_NUMBER = re.compile(r"(?<![A-Za-z0-9])[0-9]+(?![A-Za-z0-9])")


class StateRow(NamedTuple):
    """Devices that share a state, with the arrays of each.

    Attributes:
        devices: Their numbers, in the order of their ranks.
        numbers: For each part, the number of its tensor.
        entries: The arrays that they have; the tensor of an array is the number of a part.
        sums: The bytes of each kind, held and allocated.
    """

    devices: npt.NDArray[np.int64]
    numbers: tuple[int, ...]
    entries: tuple[StateShare, ...]
    sums: tuple[tuple[str, Any, Any], ...]


class Kept(NamedTuple):
    """A device's part of one tensor, of one kind.

    Attributes:
        tensor: The tensor's name; empty for arrays that several share, such as padding.
        kind: `"weights"`, `"gradients"`, `"masters"`, `"optimizer"`, `"whole"` or `"caches"`.
        name: The array: `"weight"`, `"exp_avg"`, `"padding"`, …
        held: The bytes of the tensor's elements.
        allocated: The bytes that are allocated.
    """

    tensor: str
    kind: str
    name: str
    held: int
    allocated: int


class Figures(NamedTuple):
    """The bytes of a training state.

    Attributes:
        by_kind: The bytes of each kind on each device, held and allocated.
        rows: The devices that share a state, with their parts of tensors.
        caches: For each cache its name, the devices that have it, and their bytes, held and allocated.
        names: The names of the tensors.
        unmatched: The names of tensors that no rule matches.
    """

    by_kind: dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]
    rows: list[StateRow]
    caches: list[tuple[str, Any, Any, Any]]
    names: tuple[str, ...]
    unmatched: tuple[str, ...]


class TrainingState(Drawn):
    """The bytes that each device holds and allocates of a training state, as `training_state` works them out.

    *Held* bytes are those of elements of a tensor; *allocated* bytes are all that the framework asks for, padding too.
    Arrays are read-only, int64, in the order of the devices.
    """

    __slots__ = ("__weakref__", "_caches", "_figures", "_meshes", "_names", "_over", "_recipe", "_rows", "_unmatched",
                 "_world")  # fmt: skip

    _world: DeviceMesh
    _meshes: dict[str, DeviceMesh]
    _recipe: Recipe
    _figures: dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]
    _rows: list[StateRow]
    _caches: list[tuple[str, Any, Any, Any]]
    _names: tuple[str, ...]
    _over: tuple[str, ...]
    _unmatched: tuple[str, ...]

    def __init__(self) -> None:
        raise TypeError("a TrainingState is made by training_state")

    @classmethod
    def of_figures(
        cls, world: DeviceMesh, meshes: dict[str, DeviceMesh], recipe: Recipe, over: tuple[str, ...], found: Figures
    ) -> TrainingState:
        """Return a state with these figures: a world, its meshes, and the axes over which the state is sharded."""
        made = TrainingState.__new__(TrainingState)
        made._world, made._meshes, made._recipe, made._over = world, meshes, recipe, over
        made._figures = {
            kind: (frozen(held), frozen(room)) for kind, (held, room) in found.by_kind.items() if room.any()
        }
        made._rows, made._caches, made._names, made._unmatched = found.rows, found.caches, found.names, found.unmatched
        return made

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of all devices."""
        return self._world

    @property
    def sharding(self) -> str:
        """The way in which the state is sharded."""
        return self._recipe.sharding

    @property
    def optimizer(self) -> str | None:
        """The name of the optimizer; `None` if nothing is trained."""
        return None if self._recipe.optimizer is None else self._recipe.optimizer.name

    @property
    def over(self) -> tuple[str, ...]:
        """The axes of size 2 or more over which the state is sharded."""
        sizes = {
            name: size
            for mesh in (self._world, *self._meshes.values())
            for name, size in zip(mesh.axis_names, mesh.shape, strict=True)
        }
        return tuple(axis for axis in self._over if sizes[axis] > 1)

    @property
    def unmatched(self) -> tuple[str, ...]:
        """The names of the tensors that no rule matches, which every device has whole."""
        return self._unmatched

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of arrays that the state has, in the order of `KINDS`."""
        return tuple(self._figures)

    @property
    def held(self) -> dict[str, npt.NDArray[np.int64]]:
        """The bytes of elements of each kind on each device."""
        return {kind: handed_out(held) for kind, (held, _) in self._figures.items()}

    @property
    def allocated(self) -> dict[str, npt.NDArray[np.int64]]:
        """The bytes of each kind that each device allocates."""
        return {kind: handed_out(room) for kind, (_, room) in self._figures.items()}

    @property
    def device_bytes(self) -> npt.NDArray[np.int64]:
        """The bytes of all kinds together that each device allocates."""
        return self._sum(1)

    def _sum(self, which: int) -> npt.NDArray[np.int64]:
        total = np.zeros(self._world.size, np.int64)
        for each in self._figures.values():
            total += each[which]
        return total

    @property
    def fullest(self) -> tuple[Any, int]:
        """Return the label of the first device that allocates the most, and its bytes."""
        each = self.device_bytes
        at = int(each.argmax())
        return self._world.device(at), int(each[at])

    @property
    def why(self) -> str:
        """Return a sentence with the reason why the fullest device has more bytes than the emptiest."""
        each = self.device_bytes
        most, least = int(each.argmax()), int(each.argmin())
        if each[most] == each[least]:
            return "all devices allocate the same" if len(each) > 1 else "it is the only device"
        more: dict[str, int] = {}
        for sign, at in ((1, most), (-1, least)):
            for kept in self._kept(at):
                called = _NUMBER.sub("*", kept.tensor) or f"{kept.name} of {kept.kind}"
                more[called] = more.get(called, 0) + sign * kept.allocated
        gap = int(each[most] - each[least])
        said = []
        for sign, word in ((1, "more"), (-1, "less")):
            found = sorted(((sign * size, name) for name, size in more.items() if sign * size > 0), reverse=True)
            said += [f"{bytes_text(size)} {word} of {name}" for size, name in found[:_NAMED]]
            said += [f"{word} of {counted(len(found) - _NAMED, 'other')}"] * (len(found) > _NAMED)
        label = self._world.device(least)
        return f"it has {bytes_text(gap)} more than {label}, the emptiest: {', '.join(said)}"

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return the bytes of each kind on all devices together, held and allocated."""
        return {kind: (int(held.sum()), int(room.sum())) for kind, (held, room) in self._figures.items()}

    def of(self, device: Any) -> list[Kept]:
        """List the arrays that a device has, tensor by tensor.

        Args:
            device: its label.

        Raises:
            MeshError: if there is no such device.

        >>> from shardwise import DeviceMesh, LayoutMap
        >>> from shardwise.state import training_state
        >>> rules = LayoutMap(DeviceMesh((2,), ("data",)), default=())
        >>> for kept in training_state({"w": ((3, 2), "float32")}, rules, "lion", "fsdp2", over=["data"]).of("cpu:1"):
        ...     print(kept)
        Kept(tensor='w', kind='weights', name='weight', held=8, allocated=16)
        Kept(tensor='w', kind='gradients', name='gradient', held=8, allocated=16)
        Kept(tensor='w', kind='optimizer', name='exp_avg', held=8, allocated=8)
        """
        return list(self._kept(self._world.index_of_label(device)))

    def _kept(self, at: int) -> Iterator[Kept]:
        for row in self._rows:
            places = np.flatnonzero(row.devices == at)
            if not len(places):
                continue
            place = int(places[0])
            for entry in row.entries:
                held, room = _at(entry.held, place), _at(entry.allocated, place)
                if room or held:
                    name = "" if entry.tensor is None else self._names[row.numbers[entry.tensor]]
                    yield Kept(name, entry.kind, entry.name, held, room)
        for name, devices, held, allocated in self._caches:
            places = np.flatnonzero(devices == at)
            if len(places) and allocated[places[0]]:
                yield Kept(name, "caches", "cache", int(held[places[0]]), int(allocated[places[0]]))

    def along(self, axis: str, mesh: str | None = None) -> npt.NDArray[np.int64]:
        """Give the fewest and the most bytes that a device allocates at each coordinate of an axis, such as each stage.

        Args:
            axis: the name of the axis.
            mesh: the name of the axis's mesh in a deployment; the first one that has the axis, if not given.

        Returns:
            int64 of shape (coordinates, 2).

        Raises:
            MeshError: if there is no such axis or mesh.
        """
        return frozen(extremes_along(self.device_bytes, self._world, self._meshes, axis, mesh))

    @property
    def stages(self) -> list[tuple[int, int]] | None:
        """The fewest and the most bytes that a device of each stage allocates; `None` without an axis `pp`."""
        if not any("pp" in one.axis_names for one in self._meshes.values() or [self._world]):
            return None
        return [(least, most) for least, most in self.along("pp").tolist()]

    def alike(self) -> list[tuple[tuple[int, ...], dict[str, tuple[int, int]]]]:
        """Return groups of devices with equal bytes: the devices' numbers, and by kind the bytes held and allocated."""
        columns = [array for pair in self._figures.values() for array in pair]
        if not columns:
            return [(tuple(range(self._world.size)), {})]
        _, first, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_index=True, return_inverse=True)
        inverse = inverse.ravel()
        found = []
        for number in np.argsort(first).tolist():
            devices = np.flatnonzero(inverse == number)
            at = int(devices[0])
            sizes = {kind: (int(held[at]), int(room[at])) for kind, (held, room) in self._figures.items()}
            found.append((tuple(devices.tolist()), sizes))
        return found

    def fits(self, memory: int) -> bool:
        """Return whether every device allocates at most `memory` bytes."""
        return self.fullest[1] <= memory

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as objects, lists and numbers."""
        device, most = self.fullest
        meshes, stages = self._meshes or {"mesh": self._world}, self.stages
        return {
            "devices": self._world.size,
            "meshes": {name: dict(zip(one.axis_names, one.shape, strict=True)) for name, one in meshes.items()},
            "sharding": self.sharding,
            "over": list(self.over),
            "optimizer": self.optimizer,
            "tensors": len(self._names),
            "unmatched": list(self._unmatched),
            "fullest": {
                "device": str(device),
                "allocated": most,
                "held": int(self._sum(0)[int(self.device_bytes.argmax())]),
                "kinds": {
                    kind: _pair(held, room, int(self.device_bytes.argmax()))
                    for kind, (held, room) in self._figures.items()
                },
                "why": self.why,
            },
            "totals": {kind: {"held": held, "allocated": room} for kind, (held, room) in self.totals().items()},
            "ranks": [
                {"devices": list(devices), "kinds": {k: {"held": h, "allocated": a} for k, (h, a) in sizes.items()}}
                for devices, sizes in self.alike()
            ],
            "stages": None if stages is None else [{"least": least, "most": top} for least, top in stages],
            "not_counted": NOT_COUNTED.removeprefix("not counted: "),
        }

    def _picture(self) -> Picture:
        with importing:
            from .drawn import state_picture

        return state_picture(self)

    def __str__(self) -> str:
        device, most = self.fullest
        lines = [f"{kind}: {bytes_text(int(room.max()))}" for kind, (_, room) in self._figures.items()]
        return f"{bytes_text(most)} on {device}, the fullest of {self._world.size} devices: {', '.join(lines)}"

    def __repr__(self) -> str:
        device, most = self.fullest
        size = f"{counted(len(self._names), 'tensor')} on {counted(self._world.size, 'device')}"
        return f"<TrainingState of {size}: {most} bytes on {device}>"


def _at(value: Any, place: int) -> int:
    return value if type(value) is int else int(value) if np.ndim(value) == 0 else int(value[place])


def _pair(held: npt.NDArray[np.int64], room: npt.NDArray[np.int64], at: int) -> dict[str, int]:
    return {"held": int(held[at]), "allocated": int(room[at])}
