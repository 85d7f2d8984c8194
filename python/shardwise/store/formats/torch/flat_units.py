"""Units of FSDP1: the modules that were wrapped, and the parameters that their flat parameters hold.

A unit has its module's parameters that no inner unit has, flattened one after another in the order of the module; tied
ones once. Each of k ranks has `ceil(n / k)` of the n elements, the last ranks with padding, which is never read. With
`use_orig_params=True` there is padding between parameters too, but the states then belong to single parameters: each
rank has a range of the flattened state, in order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from ...._text import shown
from ....errors import ParseError
from ...data.location import Location
from .pickles import Record
from .rank_parts import FlatRange, Gathered, of_ranges
from .tensors import SAVE_AGAIN, items_within

__all__ = ["FLAT", "Unit", "fitting_units", "local_weights", "parameter_ranges", "wrapped_modules"]

#: The last part of a flat parameter's name.
FLAT = ("_flat_param", "flat_param")
_WRAPPED = "_fsdp_wrapped_module"
#: Names of other wrapping modules, which are left out of the names of weights.
_LEFT_OUT = (_WRAPPED, "_orig_mod", "_checkpoint_wrapped_module", "module")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
#: The most tied parameters that may be left out of a unit; and the most kinds of modules that may be wrapped.
_MOST_TIED = 2
_MOST_KINDS = 2
_MOST_WAYS = 20_000


class Unit(NamedTuple):
    """A unit of FSDP1.

    Attributes:
        module: The name of the wrapped module.
        names: The names of its parameters, in order.
    """

    module: str
    names: tuple[str, ...]


def wrapped_modules(root: Any) -> tuple[str, ...]:
    """Return the modules that FSDP1 had wrapped, by the version entries of a model's modules; or none."""
    state = root.state if isinstance(root, Record) else None
    versions = state.get("_metadata") if isinstance(state, dict) else None
    found: dict[str, None] = {}
    for key, _ in items_within(versions) or ():
        parts = str(key).split(".")
        for at, part in enumerate(parts):
            if part == _WRAPPED:
                found.setdefault(".".join(each for each in parts[:at] if each not in _LEFT_OUT))
    return tuple(found)


def _units(modules: Sequence[str], names: Sequence[str]) -> list[Unit]:
    """Return the units of these wrapped modules, in the order of their flat parameters: an outer one first."""
    own: dict[str, list[str]] = {module: [] for module in modules}
    first: dict[str, int] = {}
    for number, name in enumerate(names):
        parts = name.split(".")
        inside = [module for at in range(len(parts)) if (module := ".".join(parts[:at])) in own]
        for module in inside:
            first.setdefault(module, number)
        if inside:
            own[inside[-1]].append(name)
    ordered = sorted(first, key=lambda module: (first[module], module.count("."), len(module)))
    return [Unit(module, tuple(own[module])) for module in ordered if own[module]]


def fitting_units(
    shards: Sequence[int], count: int, weights: Mapping[str, Gathered], wrapped: Sequence[str]
) -> tuple[list[Unit], str]:
    """Find the units that flat parameters stand for by the sizes of their shards.

    Args:
        shards: The elements of each rank's shard, by number.
        count: The number of shards.
        weights: The parameters in the order of the model, tied ones under both names.
        wrapped: The modules that were wrapped, if they are known.

    Returns:
        The unit of each number, and an empty text; or no units, and the reason.
    """
    found: dict[tuple[Unit, ...], None] = {}
    for units in [_units(wrapped, list(weights))] if wrapped else _ways(list(weights), len(shards)):
        for fit in _fits(units, shards, count, weights):
            found.setdefault(tuple(Unit("", unit.names) for unit in fit))
            if len(found) > 1:
                return [], "there is more than one way to put the parameters of the model into units of these sizes"
    if not found:
        sizes = ", ".join(map(str, shards[:4]))
        return [], f"no way to wrap the modules of the model gives shards of {sizes} elements to each of {count} ranks"
    return list(next(iter(found))), ""


def _fits(
    units: Sequence[Unit], shards: Sequence[int], count: int, weights: Mapping[str, Gathered]
) -> Iterator[list[Unit]]:
    """Yield the ways to choose units with shards of these sizes, in order; frozen units may have none."""
    kinds = [_variants(unit, set(shards), count, weights) for unit in units]
    if any(len(variants) > 1 for variants in kinds):
        for number, variants in enumerate(kinds):
            for variant in variants[1:]:  # Each other variant is another way.
                yield from _fits_in([*kinds[:number], [variant], *kinds[number + 1 :]], shards, count, weights)
    yield from _fits_in(kinds, shards, count, weights)


def _fits_in(
    kinds: Sequence[Sequence[Unit]], shards: Sequence[int], count: int, weights: Mapping[str, Gathered]
) -> Iterator[list[Unit]]:
    units = [variants[0] for variants in kinds if variants]
    sizes = [_shard(unit, count, weights) for unit in units]
    if len(units) == len(shards):
        if sizes == list(shards):
            yield units
        return
    for seen, chosen in enumerate(combinations(range(len(units)), len(shards)) if len(units) > len(shards) else ()):
        if [sizes[at] for at in chosen] == list(shards):
            yield [units[at] for at in chosen]
        if seen > _MOST_WAYS:
            return


def _shard(unit: Unit, count: int, weights: Mapping[str, Gathered]) -> int:
    return -(-sum(math.prod(weights[name].shape) for name in unit.names) // count)


def _variants(unit: Unit, sizes: set[int], count: int, weights: Mapping[str, Gathered]) -> list[Unit]:
    """Return a unit with and without names that may be tied to others, if it then has a shard of one of these sizes."""
    before: dict[tuple[int, ...], str] = {}
    tied = []
    for name, held in weights.items():
        if name in unit.names and held.shape in before:
            tied.append(name)
        before.setdefault(held.shape, name)
    found = [unit] if _shard(unit, count, weights) in sizes else []
    for most in range(1, _MOST_TIED + 1):
        for number, without in enumerate(combinations(tied, most)):
            if number > _MOST_WAYS:
                break
            one = Unit(unit.module, tuple(name for name in unit.names if name not in without))
            if one.names and _shard(one, count, weights) in sizes and _are_tied(without, weights):
                found.append(one)
    return found


def _are_tied(names: Sequence[str], weights: Mapping[str, Gathered]) -> bool:
    """Return whether each of these parameters has the same elements as an earlier one of its shape."""
    for name in names:
        alike = []
        for other, held in weights.items():
            if other == name:
                break
            if held.shape == weights[name].shape:
                alike.append(held)
        if not any(held.is_same(weights[name]) for held in alike):
            return False
    return True


def _ways(names: Sequence[str], count: int) -> Iterator[list[Unit]]:
    """Yield the ways to wrap the model and all modules of some kinds that give exactly this many units."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        for at in range(1, len(parts)):
            module = ".".join(parts[:at])
            listed = kinds.setdefault(_NUMBER.sub("*", module), [])
            if module not in listed[-1:] and module not in listed:
                listed.append(module)
    for most in range(_MOST_KINDS + 1):
        for chosen in combinations(kinds, most):
            units = _units(["", *(module for kind in chosen for module in kinds[kind])], names)
            if len(units) == count:
                yield units


def parameter_ranges(
    unit: Unit, count: int, index: int, weights: Mapping[str, Gathered]
) -> Iterator[tuple[str, int, int, int]]:
    """Yield each parameter of which a shard has a range: name, first element in the shard, start, stop."""
    size = _shard(unit, count, weights)
    begin = 0
    for name in unit.names:
        end = begin + math.prod(weights[name].shape)
        low, high = max(begin, index * size), min(end, (index + 1) * size)
        if low < high:
            yield name, low - index * size, low - begin, high - begin
        begin = end


def local_weights(
    path: Location, gathered: Mapping[str, Gathered], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Gathered], dict[str, str]]:
    """Return the weights in files with flat parameters.

    Args:
        path: The folder.
        gathered: The contents of the files.
        shapes: The shapes of the parameters by name, in the order of the model, taken from states by name; empty if
            there are none.

    Returns:
        The weights and buffers, and the reasons why others cannot be read.

    Raises:
        ParseError: if there are no such states, or they do not fit.
    """
    flats = {name: held for name, held in gathered.items() if name.rpartition(".")[2] in FLAT}
    first = next(iter(flats))
    if not shapes:
        raise ParseError(
            f"{path / flats[first].first}: {shown(first)} is a flat parameter of FSDP1, and nothing says which "
            "tensors are in it: put the files optim_state_dict_rank_R.pt of FSDP.optim_state_dict next to it, one "
            f"for each rank; or {SAVE_AGAIN}"
        )
    others = {name: held for name, held in gathered.items() if name not in flats}
    parts = [name for name in others if name in shapes]
    if parts:  # With use_orig_params=True there is each parameter too, in ranges of it flattened.
        return _in_ranges(path, others, {name: shapes[name] for name in parts})
    found: dict[str, Gathered] = {}
    modules = {name.rpartition(".")[0]: name for name in flats}
    for unit in _units(list(modules), list(shapes)):
        flat = flats.pop(modules[unit.module], None)
        wanted = sum(math.prod(shapes[name]) for name in unit.names)
        if flat is None or flat.shape != (wanted,):
            held = 0 if flat is None else math.prod(flat.shape)
            raise ParseError(
                f"{path}: the flat parameter of {shown(unit.module)} has {held} elements, but the optimizer's "
                f"parameters in it have {wanted}"
            )
        ranges: dict[str, list[FlatRange]] = {name: [] for name in unit.names}
        for part in flat.parts:
            at = 0
            (low, high), *_ = part.box
            for name in unit.names:
                end = at + math.prod(shapes[name])
                start, stop = max(at, low), min(end, high)
                if start < stop:
                    one = FlatRange(part.container, part.tensor, start - low, start - at, stop - at)
                    ranges[name].append(one)
                at = end
        found |= {name: of_ranges(name, shapes[name], flat.dtype, ranges[name]) for name in unit.names}
    if flats:
        left = next(iter(flats))
        raise ParseError(
            f"{path}: {shown(left)} is a flat parameter, and the optimizer has no parameter of it; {SAVE_AGAIN}"
        )
    return {name: found[name] for name in shapes if name in found} | others, {}


def _in_ranges(
    path: Location, gathered: Mapping[str, Gathered], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Gathered], dict[str, str]]:
    """Return the weights of files in which each rank has a range of each parameter."""
    found: dict[str, Gathered] = {}
    lost: dict[str, str] = {}
    owners = {gathered[name].storages(): name for name in shapes}
    for name, held in gathered.items():
        owner = owners.get(held.storages())
        if owner is not None:
            found[name] = joined_ranges(path, name, shapes[owner], held)
        elif held.is_sharded or held.is_replicated():
            found[name] = held
        else:
            lost[name] = (
                f"{path}: {shown(name)} is cut into ranges by FSDP1, and its shape is not known, because the optimizer "
                f"has no state of it; {SAVE_AGAIN}"
            )
    return found, lost


def joined_ranges(path: Location, name: str, shape: tuple[int, ...], held: Gathered) -> Gathered:
    """Return a tensor of which each rank has a range of the flattened elements, in order.

    Raises:
        ParseError: if the ranges do not have as many elements together.
    """
    ranges, at = [], 0
    for part in held.parts:
        size = math.prod(part.tensor.shape)
        if len(part.tensor.shape) != 1 or (size and part.tensor.strides != (1,)):
            raise ParseError(f"{part.container.file.path}: {shown(name)} is not a range of a flattened parameter")
        if size:
            ranges.append(FlatRange(part.container, part.tensor, 0, at, at + size))
        at += size
    if at != math.prod(shape):
        raise ParseError(f"{path}: the ranks together have {at} elements of {shown(name)}, whose shape is {shape}")
    return of_ranges(name, shape, held.parts[0].tensor.dtype, ranges)
