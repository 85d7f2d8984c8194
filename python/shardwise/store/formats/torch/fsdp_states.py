"""The optimizer's states in the files of ranks, by parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...._text import shown
from ...._types import Shape
from ....errors import ParseError
from ...data.location import Location
from ...tensors.checkpoint import StoredObject
from ...tensors.stored import StoredTensor, UnsupportedError
from .flat_units import Unit, fitting_units, joined_ranges, parameter_ranges
from .optimizers import NamedShape, OptimizerDict, as_optimizer, is_by_name, is_norm_buffer, numbered_names
from .rank_parts import FlatRange, Gathered, of_ranges
from .run_values import is_same_value
from .state_dicts import number_tensor
from .tensors import Container, value_object

__all__ = ["States"]


class _StateKey(NamedTuple):
    """The key of a state: the number or name of its parameter, and its kind."""

    key: int | str
    kind: str


class States:
    """The optimizer of a folder: its states by parameter, and the values of its groups.

    Attributes:
        tensors: The states.
        objects: The values of the groups.
        unreadable: The reasons why states have no name, by their names in the files.
        doubts: Warnings about states that keep their numbers.
    """

    def __init__(self, path: Location, containers: Sequence[Container], world: int, prefix: str = "optimizer.") -> None:
        """Read the files.

        Args:
            path: The folder.
            containers: The files, by rank.
            world: The number of ranks.
            prefix: The text before the names of the states and groups.

        Raises:
            ParseError: if one is not the state dict of an optimizer, or is of another run than the others.
        """
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, StoredObject] = {}
        self.unreadable: dict[str, str] = {}
        self.doubts: list[str] = []
        self._path = path
        self._world = world
        self._prefix = prefix
        self._containers = containers
        self._ranks = [_optimizer(container, prefix) for container in containers]
        self._gathered: dict[_StateKey, Gathered] = {}
        self._names: Sequence[str] | None = None
        self._numbers: dict[_StateKey, tuple[float, Container]] = {}
        for container, optimizer in zip(containers, self._ranks, strict=True):
            self._check_groups(container, optimizer)
            self._gather(container, optimizer)
        for held in self._gathered.values():
            held.check_ranks(containers)
        self._check_steps()

    def _check_groups(self, container: Container, optimizer: OptimizerDict) -> None:
        first = self._ranks[0]
        if optimizer.params != first.params or optimizer.is_numbered != first.is_numbered:
            raise ParseError(
                f"{container.file.path}: its optimizer and the one in {self._containers[0].file.path.name} have "
                "different parameters; they are not of one run"
            )
        for number, (own, its) in enumerate(zip(optimizer.groups, first.groups, strict=True)):
            other = next((key for key in {**own, **its} if not is_same_value(own.get(key), its.get(key))), None)
            if other is not None:
                raise ParseError(
                    f"{container.file.path}: param_groups[{number}][{shown(other)}] is {shown(own.get(other))}, but "
                    f"{shown(its.get(other))} in {self._containers[0].file.path.name}; they are not of one run"
                )

    def _gather(self, container: Container, optimizer: OptimizerDict) -> None:
        for key, states in optimizer.state.items():
            for kind, value in states.items():
                at = _StateKey(key, f"{kind}")
                name = f"{self._prefix}state.{key}.{kind}"
                if type(value) in (int, float):
                    given = self._numbers.setdefault(at, (value, container))[0]
                    if given != value:
                        raise ParseError(
                            f"{container.file.path}: {shown(name)} is {value}, but {given} on another rank"
                        )
                    continue
                held = self._gathered.setdefault(at, Gathered(name))
                try:
                    if not held.add(container, value, self._world, is_cut=True):
                        if held.first:
                            raise ParseError(
                                f"{container.file.path}: {shown(name)} is not a tensor, but is one in {held.first}"
                            )
                        del self._gathered[at]
                        if value is not None:
                            self.objects.setdefault(name, value_object(name, value))
                except UnsupportedError as error:
                    self.unreadable.setdefault(name, str(error))
                    del self._gathered[at]

    def _check_steps(self) -> None:
        """Refuse ranks with different numbers of steps, judged by the first step of each."""
        seen: set[str] = set()
        said: tuple[bytes, str] | None = None
        for at, held in self._gathered.items():
            if at.kind != "step" or held.is_sharded or held.shape != ():
                continue
            for part in held.parts:
                where = f"{part.container.file.path}"
                if where in seen:
                    continue
                seen.add(where)
                file, start, _ = part.container.extent(part.tensor, held.name)
                data = file.read(start, part.tensor.dtype.bits // 8)
                said = said or (data, part.container.file.path.name)
                if data != said[0]:
                    raise ParseError(
                        f"{where}: its optimizer and the one in {said[1]} have made different numbers of steps; they "
                        "are not of one run"
                    )
            if len(seen) == len(self._containers):
                return

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of parameters in the order of the groups, if the states have names."""
        if not self._ranks or self._ranks[0].is_numbered:
            return {}
        found: dict[str, Shape] = {}
        for group in self._ranks[0].params:
            for name in group:
                kinds = [held.shape for at, held in self._gathered.items() if at.key == name and at.kind != "step"]
                alike = [shape for shape in kinds if shape]
                if alike:
                    found[name] = alike[0]
        return found

    def name(self, weights: Mapping[str, Gathered], wrapped: Sequence[str], names: Sequence[str] | None = None) -> None:
        """Name the states by their parameters.

        Args:
            weights: The tensors of the model, in its order.
            wrapped: The modules that FSDP1 had wrapped, if they are known.
            names: The names in the order of the numbers, if the caller knows them.

        Raises:
            ParseError: if the ranks together do not have a whole state, or `names` do not fit.
        """
        said = self._ranks[0].said_names() if self._ranks and self._ranks[0].is_numbered else None
        if names is None and said is not None and set(said.values()) <= set(weights):
            names = [said[number] for group in self._ranks[0].params for number in group]
        self._names = names
        if names is not None and not (self._ranks and self._ranks[0].is_numbered):
            raise ParseError(
                f"{self._path}: parameter_names is given, but it has no optimizer whose parameters have numbers"
            )
        if not self._ranks:
            return
        first = self._ranks[0]
        if not first.is_numbered:
            self._add_all({key: [str(key)] for group in first.params for key in group})
            return
        states = [held for at, held in self._gathered.items() if held.shape != () or held.is_sharded]
        has_cut = any(held.is_sharded for held in weights.values())
        if (
            has_cut
            and states
            and not any(held.is_sharded for held in states)
            and all(len(part.tensor.shape) == 1 for held in states for part in held.parts)
        ):
            self._name_flat({name: held for name, held in weights.items() if held.is_sharded}, wrapped)
            return
        is_plain = any(not held.is_sharded for held in states)
        owners: dict[Any, str] = {}
        candidates = [
            NamedShape(name, held.shape)
            for name, held in weights.items()
            # Parameters without dims are plain in any case.
            if (
                held.is_sharded
                or ((is_plain or self._names is not None or not held.shape) and "float" in held.dtype.name)
            )
            and (0 in held.shape or owners.setdefault(held.storages(), name) == name)
            and not is_norm_buffer(name, weights)
        ]
        shapes = {at: held.shape for at, held in self._gathered.items()}
        self._add_all(self._matched(shapes, candidates, is_ordered=not is_by_name(weights)))

    def _matched(
        self, shapes: Mapping[_StateKey, Shape], candidates: Sequence[NamedShape], *, is_ordered: bool
    ) -> dict[Any, list[str]]:
        """Return the names by number; if they are not certain, none, and note a warning."""
        first = self._ranks[0]
        state: dict[Any, dict[Any, Any]] = {}
        for at, shape in shapes.items():
            state.setdefault(at.key, {})[at.kind] = shape
        asked = first._replace(state=state, shape_of=lambda shape: shape)
        try:
            found, why = numbered_names([asked], candidates, is_ordered=is_ordered, names=self._names)
        except ParseError as error:
            raise ParseError(f"{self._containers[0].file.path}: {error}") from None
        if why:
            self.doubts.append(
                f"{self._containers[0].file.path}: the parameters of its optimizer keep their numbers: {why}"
            )
        return {number: [name] for each in found for number, name in each.items()}

    def _add_all(self, names: Mapping[Any, Sequence[str]]) -> None:
        """Add the states and groups of parameters that are not flat."""
        for at, held in self._gathered.items():
            for name in names.get(at.key, [str(at.key)]):
                held.name = f"{self._prefix}state.{name}.{at.kind}"
                self.tensors[held.name] = held.tensor(self._path)
        self._add_rest(names)

    def _add_rest(self, names: Mapping[Any, Sequence[str]], places: Mapping[str, int] | None = None) -> None:
        """Add the states that are numbers, and the groups.

        Args:
            names: The names of the parameters of each number.
            places: The positions of parameters in the model: groups of flat parameters list their parameters in this
                order, as an optimizer of parameters that are not flat does.
        """
        for at, (count, counted_by) in self._numbers.items():
            for name in names.get(at.key, [str(at.key)]):
                full = f"{self._prefix}state.{name}.{at.kind}"
                self.tensors[full] = number_tensor(full, count, counted_by)
        first, container = self._ranks[0], self._containers[0]
        for number, (group, params) in enumerate(zip(first.groups, first.params, strict=True)):
            for key, value in group.items():
                name = f"{self._prefix}param_groups.{number}.{key}"
                if key == "params":
                    value = [each for param in params for each in names.get(param, [param])]
                    if places is not None:
                        value.sort(key=lambda each: places.get(each, len(places)))
                elif key == "param_names":
                    continue
                held = Gathered(name)
                if held.add(container, value, self._world):
                    self.tensors[name] = held.tensor(self._path)
                else:
                    self.objects[name] = value_object(name, value)

    def _name_flat(self, weights: Mapping[str, Gathered], wrapped: Sequence[str]) -> None:
        """Name states with one dim: of flat parameters, or ranges of flattened parameters."""
        places = next((held.places for held in weights.values() if len(held.places) == self._world), [])
        shards = [place or (rank, self._world) for rank, place in enumerate(places)]
        shards = shards or [(rank, self._world) for rank in range(self._world)]
        count = shards[0][1]
        numbers = [number for group in self._ranks[0].params for number in group]
        arrays = {at: held for at, held in self._gathered.items() if any(part.tensor.shape for part in held.parts)}
        sizes = {at: {part.tensor.shape[0] for part in held.parts if part.tensor.shape} for at, held in arrays.items()}
        by_number = {
            number: {size for at, own in sizes.items() if at.key == number for size in own} for number in numbers
        }
        is_equal = all(len(own) == 1 for own in by_number.values() if own) and all(
            len(held.parts) == self._world for held in arrays.values()
        )
        why = "its parts have different lengths on the ranks"
        if is_equal and self._names is None:
            numbers = [number for number in sorted(numbers) if by_number[number]]
            listed = [next(iter(by_number[number])) for number in numbers]
            units, why = fitting_units(listed, count, weights, wrapped)
            if not why:
                self._add_flat(dict(zip(numbers, units, strict=True)), shards, weights)
                return
        self._add_ranges(shards, arrays, weights, why if is_equal else "")

    def _add_flat(
        self, units: Mapping[Any, Unit], shards: Sequence[tuple[int, int]], weights: Mapping[str, Gathered]
    ) -> None:
        rank_of = {id(container): rank for rank, container in enumerate(self._containers)}
        for at, held in self._gathered.items():
            unit = units.get(at.key)
            if unit is None:
                self.unreadable[held.name] = f"{self._path}: {shown(held.name)} belongs to no flat parameter"
                continue
            if not any(part.tensor.shape for part in held.parts):
                for name in unit.names:
                    one = Gathered(f"{self._prefix}state.{name}.{at.kind}")
                    one.plain, one.parts = held.plain, held.parts
                    self.tensors[one.name] = one.tensor(self._path)
                continue
            ranges: dict[str, list[FlatRange]] = {name: [] for name in unit.names}
            for part in held.parts:
                index, count = shards[rank_of[id(part.container)]]
                if part.tensor.strides != (1,):
                    raise ParseError(
                        f"{part.container.file.path}: {shown(held.name)} is not an array of a flat parameter"
                    )
                for name, begin, start, stop in parameter_ranges(unit, count, index, weights):
                    ranges[name].append(FlatRange(part.container, part.tensor, begin, start, stop))
            for name, found in ranges.items():
                full = f"{self._prefix}state.{name}.{at.kind}"
                made = of_ranges(full, weights[name].shape, held.parts[0].tensor.dtype, found)
                self.tensors[full] = made.tensor(self._path)
        places = {name: place for place, name in enumerate(weights)}
        self._add_rest({number: unit.names for number, unit in units.items()}, places)

    def _add_ranges(
        self,
        shards: Sequence[tuple[int, int]],
        arrays: Mapping[_StateKey, Gathered],
        weights: Mapping[str, Gathered],
        why: str,
    ) -> None:
        """Add states of which each rank has a range of the flattened parameter, in order."""
        rank_of = {id(container): rank for rank, container in enumerate(self._containers)}
        by_copy: dict[_StateKey, list[Gathered]] = {}
        shapes: dict[_StateKey, Shape] = {}
        for at, held in arrays.items():
            copies: dict[int, Gathered] = {}
            taken: dict[int, int] = {}
            for part in sorted(held.parts, key=lambda part: rank_of[id(part.container)]):
                index = shards[rank_of[id(part.container)]][0]
                number = taken[index] = taken.get(index, -1) + 1
                copies.setdefault(number, Gathered(held.name)).parts.append(part)
            for copy in copies.values():
                copy.parts.sort(key=lambda part: shards[rank_of[id(part.container)]][0])
            by_copy[at] = list(copies.values())
            shapes[at] = (sum(math.prod(part.tensor.shape) for part in by_copy[at][0].parts),)
        candidates = [NamedShape(name, (math.prod(held.shape),)) for name, held in weights.items()]
        names = self._matched(shapes, candidates, is_ordered=not is_by_name(weights))
        if not names:
            reason = self.doubts.pop().rpartition("numbers: ")[2]
            for held in self._gathered.values():
                self.unreadable[held.name] = (
                    f"{self._path}: {shown(held.name)} is of a flat parameter of FSDP1, whose parameters are not known "
                    f"for certain: {f'{why}; ' if why else ''}{reason}"
                )
            self._add_rest({})
            return
        for at, held in self._gathered.items():
            (name,) = names[at.key]
            full = f"{self._prefix}state.{name}.{at.kind}"
            if at not in arrays:
                held.name = full
                self.tensors[full] = held.tensor(self._path)
                continue
            made = [joined_ranges(self._path, full, weights[name].shape, copy) for copy in by_copy[at]]
            for other in made[1:]:
                made[0].parts.extend(other.parts)
            self.tensors[full] = made[0].tensor(self._path)
        self._add_rest(names)


def _optimizer(container: Container, prefix: str) -> OptimizerDict:
    def shape_of(value: Any) -> Shape | None:
        found = container.tensor(value, "")
        return None if found is None else found.shape

    optimizer = as_optimizer(prefix, container.root(), shape_of)
    if optimizer is None:
        raise ParseError(f"{container.file.path}: is not the state dict of an optimizer of PyTorch")
    return optimizer
