"""States of PyTorch's optimizers in a file: numbers and groups, and the names of the parameters that they stand for.

An optimizer counts its parameters through all its groups, from 0. A file has their names only if the optimizer was made
from pairs with names. Otherwise a group lists parameters in the order of `named_parameters()`, which is that of the
model's state dict without buffers and second names of tied parameters; frozen parameters are in no group. A number gets
a name only if exactly one assignment keeps this order and agrees with the shapes of the states.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...._text import counted, shown
from ...._types import Shape
from ....errors import ParseError
from .pickles import Record
from .tensors import items_within

__all__ = [
    "NAMED",
    "NamedShape",
    "OptimizerDict",
    "as_optimizer",
    "dict_entries",
    "is_by_name",
    "is_norm_buffer",
    "numbered_names",
]


#: Names of states with the shape of their parameter, in PyTorch's optimizers, bitsandbytes and others.
_ALIKE = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "variance", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "prev", "step_size", "exp_inf", "ax", "state1", "state2"),
    }
)
#: Names of states of Adafactor that lack a dim: of PyTorch's, in which its size is 1, and of transformers'.
_ROWS, _COLUMNS = ("row_var", "exp_avg_sq_row"), ("col_var", "exp_avg_sq_col")
#: Names of states that some optimizers keep once, with the first parameter, for all parameters.
_OF_ALL = frozenset({"func_evals", "old_dirs", "prev_flat_grad"})
#: The most states of the search for an assignment; a layer-wise decay has a group for each layer.
_MOST_STEPS = 1 << 18
#: Advice if numbers cannot be named.
NAMED = "open_checkpoint(..., parameter_names=[...]) with the names in the order of the numbers settles it"


class NamedShape(NamedTuple):
    """A tensor of a model that may be a parameter of an optimizer."""

    name: str
    shape: Shape


class OptimizerDict(NamedTuple):
    """The state dict of an optimizer.

    Attributes:
        prefix: The text before the names of its values, such as `"optimizer."`.
        state: The states of each parameter by kind, by the parameter's number or name.
        groups: Its groups as they are saved.
        params: The numbers, or names, of the parameters of each group.
        shape_of: Returns the shape of a value that is a tensor, and `None` for any other.
    """

    prefix: str
    state: dict[Any, dict[Any, Any]]
    groups: list[dict[Any, Any]]
    params: list[list[Any]]
    shape_of: Callable[[Any], Shape | None]

    @property
    def is_numbered(self) -> bool:
        """True if its parameters have numbers, which count through its groups."""
        keys = [*self.state, *(key for group in self.params for key in group)]
        return all(type(key) is int for key in keys)

    def said_names(self) -> dict[int, str] | None:
        """Return the parameters' names in the order of their numbers, if all groups state them; else `None`."""
        found: dict[int, str] = {}
        for group, params in zip(self.groups, self.params, strict=True):
            names = group.get("param_names")
            if not isinstance(names, (list, tuple)) or len(names) != len(params):
                return None
            found |= dict(zip(params, names, strict=True))
        names = list(found.values())
        are_names = all(isinstance(name, str) and name for name in names)
        return found if are_names and len(set(names)) == len(names) else None


def dict_entries(value: Any) -> dict[Any, Any] | None:
    """Return the entries of a file's dict, `OrderedDict` or `defaultdict`; `None` for any other value."""
    if isinstance(value, dict):
        return value
    pairs = items_within(value) if isinstance(value, Record) else None
    return None if pairs is None else dict(pairs)


def as_optimizer(prefix: str, value: Any, shape_of: Callable[[Any], Shape | None]) -> OptimizerDict | None:
    """Return the optimizer that a state dict describes; `None` for any other value."""
    if not isinstance(value, (dict, Record)):
        return None
    held = dict_entries(value)
    if held is None or "state" not in held or "param_groups" not in held:
        return None
    state, groups = dict_entries(held["state"]), held["param_groups"]
    if state is None or not isinstance(groups, (list, tuple)):
        return None
    made, found, params = dict[Any, dict[Any, Any]](), list[dict[Any, Any]](), list[list[Any]]()
    for key, own in state.items():
        states = dict_entries(own)
        if states is None or type(key) not in (int, str):
            return None
        made[key] = states
    for each in groups:
        group = dict_entries(each)
        if group is not None and "params" not in group and "param_names" in group:
            # torch_checkpointing has names in place of numbers.
            group = {"params": group["param_names"], **{key: group[key] for key in group if key != "param_names"}}
        listed = None if group is None else group.get("params")
        if group is None or not isinstance(listed, (list, tuple)) or any(type(key) not in (int, str) for key in listed):
            return None
        found.append(group)
        params.append(list(listed))
    return OptimizerDict(prefix, made, found, params, shape_of) if found else None


def is_by_name(names: Iterable[str]) -> bool:
    """Return whether names are sorted alphabetically, so that their order does not show that of a model's modules."""
    names = list(names)
    return names == sorted(names)


def is_norm_buffer(name: str, names: Container[str]) -> bool:
    """Return whether a tensor is a buffer of a norm of batches, which counts the batches next to it.

    >>> held = ["bn.weight", "bn.running_mean", "bn.num_batches_tracked"]
    >>> [is_norm_buffer(name, held) for name in held]
    [False, True, False]
    """
    module, _, last = name.rpartition("running_")
    return last in ("mean", "var") and f"{module}num_batches_tracked" in names


def _shape_of(states: Mapping[Any, Any], shape_of: Callable[[Any], Shape | None]) -> Shape | None:
    """Return the shape of a parameter that its states imply; `None` if they do not."""
    found = {kind: shape_of(value) for kind, value in states.items()}
    alike = [shape for kind, shape in found.items() if kind in _ALIKE and shape is not None]
    if alike:
        return alike[0] if all(shape == alike[0] for shape in alike) else (-1,)
    rows, columns = (next((found[kind] for kind in kinds if found.get(kind)), None) for kinds in (_ROWS, _COLUMNS))
    if rows is None or columns is None:
        return None
    # PyTorch keeps the dim, of size 1.
    kept = rows[:-1] if found.get("row_var") else rows
    return (*kept, columns[-1])


def numbered_names(
    optimizers: Sequence[OptimizerDict],
    candidates: Sequence[NamedShape],
    *,
    is_ordered: bool,
    names: Sequence[str] | None = None,
) -> tuple[list[dict[int, str]], str]:
    """Return the name of each number of optimizers of one model, or the reason why names are not certain.

    Args:
        optimizers: The optimizers, which have numbers and share no parameter.
        candidates: The tensors of the model that may be parameters.
        is_ordered: Whether `candidates` are in the order of `named_parameters()`.
        names: The names in the order of the numbers, of one optimizer after the other, if the caller knows them.

    Returns:
        The names by number of each optimizer, and an empty text; or no names, and the reason. Where the model has
        numbers for names itself, there are names that say that they are numbers of the optimizer.

    Raises:
        ParseError: if `names` do not fit the numbers, or the shapes.
    """
    found, why = _found_names(optimizers, candidates, is_ordered, names)
    if why and any(name.isdecimal() for name, _ in candidates):
        found = [{number: f"number_{number}" for group in one.params for number in group} for one in optimizers]
    return found, why


def _found_names(
    optimizers: Sequence[OptimizerDict],
    candidates: Sequence[NamedShape],
    is_ordered: bool,
    names: Sequence[str] | None,
) -> tuple[list[dict[int, str]], str]:
    items: list[tuple[int, int]] = []  # The optimizer and the number.
    groups: list[list[int]] = []  # The positions in `items` of each group.
    for which, optimizer in enumerate(optimizers):
        for params in optimizer.params:
            groups.append(list(range(len(items), len(items) + len(params))))
            items += [(which, number) for number in params]
        known = {number for params in optimizer.params for number in params}
        lost = next((number for number in optimizer.state if number not in known), None)
        if lost is not None:
            return [], f"number {lost} of {shown(optimizer.prefix)} is in no group"
    if len(set(items)) != len(items):
        return [], "a number is in two groups"
    states = [optimizers[which].state.get(number, {}) for which, number in items]
    if any(not _OF_ALL.isdisjoint(each) for each in states):
        return [], "the optimizer keeps the states of all parameters with the first one"
    shapes = [_shape_of(each, optimizers[which].shape_of) for (which, _), each in zip(items, states, strict=True)]
    if names is not None:
        chosen = _given(names, items, shapes, candidates)
    else:
        several = len(optimizers) > 1
        labels = [f"number {number}" + f" of {optimizers[which].prefix[:-1]}" * several for which, number in items]
        answer = _ordered(labels, groups, shapes, candidates) if is_ordered else _unordered(labels, shapes, candidates)
        if isinstance(answer, str):
            return [], answer
        chosen = answer
    found: list[dict[int, str]] = [{} for _ in optimizers]
    for (which, number), name in zip(items, chosen, strict=True):
        found[which][number] = name
    return found, ""


def _given(
    names: Sequence[str], items: Sequence[Any], shapes: Sequence[Shape | None], candidates: Sequence[NamedShape]
) -> list[str]:
    """Return the names by number that a caller knows, after checking them."""
    if len(names) != len(items) or len(set(names)) != len(names):
        twice = "" if len(names) != len(items) else ", some of them twice"
        count = counted(len(names), "name")
        raise ParseError(f"parameter_names has {count}{twice}; the optimizer has {counted(len(items), 'parameter')}")
    held = dict(candidates)
    for name, (_, number), shape in zip(names, items, shapes, strict=True):
        if candidates and name not in held:
            raise ParseError(f"parameter_names has {shown(name)}, which is not a parameter of the model")
        if shape is not None and held.get(name, shape) != shape:
            raise ParseError(
                f"parameter_names has {shown(name)} of shape {held[name]} for number {number}, whose states are of "
                f"shape {shape}"
            )
    return list(names)


def _unordered(
    labels: Sequence[str], shapes: Sequence[Shape | None], candidates: Sequence[NamedShape]
) -> list[str] | str:
    """Match parameters to candidates by shape alone, if all shapes differ; otherwise return the reason."""
    by_shape: dict[Shape, list[str]] = {}
    for candidate in candidates:
        by_shape.setdefault(candidate.shape, []).append(candidate.name)
    counts = Counter(shapes)
    found: list[str] = []
    for label, shape in zip(labels, shapes, strict=True):
        fitting = [] if shape is None else by_shape.get(shape, [])
        if shape is not None and not fitting:
            return f"{label} has states of shape {shape}, which no weight has; {NAMED}"
        if shape is None or len(fitting) > 1 or counts[shape] > 1:
            which = "has no states that say its shape"
            which = f"of shape {shape} may be any of {_listed(fitting)}" if fitting else which
            return f"nothing says in which order the model has its parameters, and {label} {which}; {NAMED}"
        found.append(fitting[0])
    return found


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(map(shown, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _ordered(
    labels: Sequence[str],
    groups: Sequence[Sequence[int]],
    shapes: Sequence[Shape | None],
    candidates: Sequence[NamedShape],
) -> list[str] | str:
    """Match parameters to candidates by order and shape: each group is a subsequence of the candidates."""
    layers = _reachable(groups, shapes, candidates)
    if layers is None:
        return f"there are too many ways to give its {len(shapes)} numbers names; {NAMED}"
    end = tuple(len(group) for group in groups)
    if end not in layers[-1]:
        return f"the shapes of its states do not fit the model's parameters in their order; {NAMED}"
    possible: dict[int, list[str]] = {}
    alive = {end}
    for at in range(len(candidates) - 1, -1, -1):
        before = set()
        for progress in layers[at]:
            for following, item in _following(progress, groups, shapes, candidates[at]):
                if following in alive:
                    before.add(progress)
                    if item is not None and candidates[at].name not in possible.setdefault(item, []):
                        possible[item].append(candidates[at].name)
        alive = before
    unclear = next((item for item in range(len(shapes)) if len(possible[item]) > 1), None)
    if unclear is not None:
        which = _listed(reversed(possible[unclear]))
        return f"{labels[unclear]} may be any of {which}, by order and shapes; {NAMED}"
    return [possible[item][0] for item in range(len(shapes))]


_Counts = tuple[int, ...]


def _following(
    progress: _Counts, groups: Sequence[Sequence[int]], shapes: Sequence[Shape | None], candidate: NamedShape
) -> Iterator[tuple[_Counts, int | None]]:
    """Yield the next states of the search at a candidate: it is not a parameter, or the next one of some group."""
    yield progress, None
    for group, done in enumerate(progress):
        if done < len(groups[group]):
            item = groups[group][done]
            if shapes[item] is None or shapes[item] == candidate.shape:
                yield (*progress[:group], done + 1, *progress[group + 1 :]), item


def _reachable(
    groups: Sequence[Sequence[int]], shapes: Sequence[Shape | None], candidates: Sequence[NamedShape]
) -> list[set[_Counts]] | None:
    """Return the possible progress of each group before each candidate; `None` if there are too many states."""
    wanted = Counter(shapes)
    there: Counter[Shape | None] = Counter(candidate.shape for candidate in candidates)
    in_all = len(candidates) - len(shapes)
    has_unknown = wanted[None] > 0
    if in_all < 0 or (not has_unknown and any(wanted[shape] > there[shape] for shape in wanted)):
        return [set()]
    # The places of each shape in each group: of each shape so many candidates may be left out, and so many of all.
    places: list[dict[Shape | None, list[int]]] = [{} for _ in groups]
    for own, group in zip(places, groups, strict=True):
        for place, item in enumerate(group):
            own.setdefault(shapes[item], []).append(place)
    layers: list[set[_Counts]] = [{(0,) * len(groups)}]
    seen: Counter[Shape] = Counter()
    looked = 0
    for at, candidate in enumerate(candidates):
        shape = candidate.shape
        seen[shape] += 1
        spare = len(candidates) if has_unknown else there[shape] - wanted[shape]
        reached: set[_Counts] = set()
        for progress in layers[-1]:
            for following, taken in _following(progress, groups, shapes, candidate):
                looked += 1
                if at + 1 - sum(following) > in_all:
                    continue
                if taken is None:
                    ends = zip(places, following, strict=True)
                    if seen[shape] - sum(bisect_left(own.get(shape, ()), end) for own, end in ends) > spare:
                        continue
                reached.add(following)
            if looked > _MOST_STEPS:
                return None
        layers.append(reached)
    return layers
