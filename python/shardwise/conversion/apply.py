"""Rewrites applied to the tensors of a checkpoint, or to names and shapes: which tensor is made from which."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NoReturn

from .._text import shown
from ..errors import LayoutError, ShardwiseError
from ..quantized.component import LogicalTensor
from ..quantized.follow import with_states
from ..quantized.forms import Components
from ..quantized.outline import Outline
from ..quantized.states import State, states_in
from ..rules.adapters import adapter_names
from ..rules.rewrite import Rewrite
from ..rules.rewrites import Rewrites, RewriteSet
from ..rules.states import training_names
from ..rules.templates import NameIndex, Template
from .assembled import Assembled
from .leaves import Stored
from .sides import Fields, products, taken_apart
from .trained import Tensor, Trained, components_of, repeated
from .weights import Reader, Weight

__all__ = ["kept_objects", "rewritten", "rewritten_outline"]


class _NothingError(LayoutError):
    """Raised for a rewrite that matches no name."""


#: Tensors by name.
_Tensors = dict[str, Tensor]


def rewritten(
    tensors: Mapping[str, Assembled],
    rewrites: Rewrites,
    weights: Mapping[str, LogicalTensor] | None = None,
    read: Reader = lambda name: None,
    dropped: dict[str, Assembled] | None = None,
) -> tuple[dict[str, Assembled], dict[str, LogicalTensor]]:
    """Return the tensors of a checkpoint as the rewrites name and store them, and the quantized weights among them.

    A rewrite that names a weight is carried out for all its components, and for the states of an optimizer that belong
    to it; these get names like that of the weight. One that names a component is for this tensor alone, and the
    weight's other ones are tensors like any others. One that names a state is for it alone. `unmatched` is not about
    what else there is of a training state, which stays, nor about adapters, which stay as they are. What the rewrites
    drop is put into `dropped`, by the names that it has then.

    Raises:
        LayoutError: if a rewrite matches nothing; a tensor is missing that should be packed or stacked with others; the
            sizes of parts do not add up; two tensors get the same name; a tensor is left that `unmatched` refuses; a
            rewrite would take a block of a quantized weight apart.
    """
    adapters = adapter_names(tensors)
    made: dict[str, Assembled] = {}
    logical: dict[str, LogicalTensor] = {}
    if adapters:  # They keep the names by which they are loaded, whatever the weights are fused into.
        rest = {name: tensor for name, tensor in tensors.items() if name not in adapters}
        made, logical = rewritten(rest, rewrites, weights, read, dropped) if rest else (made, logical)
        _put({name: tensors[name] for name in adapters}, made)
        return made, logical
    found, others = _trained(_grouped(tensors, weights or {}, read), tensors, read)
    for one in rewrites.sets:
        found = _apply_set(_apart(found, one), one, others, {} if dropped is None else dropped)
    found = _with_one_prefix(found)
    states: dict[str, Assembled] = {}
    for name, tensor in found.items():
        weight = tensor.weight if isinstance(tensor, Trained) else tensor
        parts = {name: weight} if isinstance(weight, Assembled) else {}
        if isinstance(weight, Weight):
            logical[name], parts = weight.named(name)
        _put(parts, made)
        if isinstance(tensor, Trained):
            _put(tensor.named(name), states)
    _put(states, made)
    return made, logical


def rewritten_outline(
    outline: Outline,
    rewrites: Rewrites,
    weights: Components,
    read: Reader = lambda name: None,
    dropped: dict[str, Assembled] | None = None,
) -> tuple[Outline, Components]:
    """Return the names and shapes after rewrites, and the quantized weights.

    They are unchanged if the rewrites lead to the given names instead of from them. Names of dropped tensors are added
    to `dropped`.

    Raises:
        LayoutError: if a rewrite does not fit the tensors.
    """
    if not rewrites:
        return outline, weights
    stored = {name: Stored(name, shape, dtype, make=_unread) for name, (shape, dtype) in outline.items()}
    lost: dict[str, Assembled] = {}
    try:
        made, carried = rewritten(stored, rewrites, weights.tensors, read, lost)
    except LayoutError:
        with suppress(LayoutError):
            rewritten(stored, rewrites.inverse(), weights.tensors, read)
            return outline, weights
        raise
    if dropped is not None:
        dropped.update(lost)
    after = {name: (tensor.shape, tensor.dtype) for name, tensor in made.items()}
    described = {name: (shape, dtype.name) for name, (shape, dtype) in after.items()}
    return after, with_states(weights._replace(tensors=carried), described, rewrites)


def _put(parts: Mapping[str, Assembled], made: dict[str, Assembled]) -> None:
    for own, part in parts.items():
        if own in made:
            raise LayoutError(
                f"the rewrites give {shown(made[own].origin)} and {shown(part.origin)} the same name, {shown(own)}"
            )
        made[own] = part


def _with_one_prefix(tensors: _Tensors) -> _Tensors:
    """Return the tensors with states' names shortened by a beginning that all weights share, and it."""
    names = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Trained)}
    prefixes = {tensor.prefix for tensor in names.values()}
    lost = {prefix for prefix in prefixes if not all(name.startswith(prefix) for name in names)}
    changed = {name: replace(one, prefix="") for name, one in names.items() if one.prefix in lost}
    return {name: changed.get(name, tensor) for name, tensor in tensors.items()}


def _grouped(
    tensors: Mapping[str, Assembled], weights: Mapping[str, LogicalTensor], read: Reader
) -> dict[str, Assembled | Weight]:
    """Return the tensors with quantized weights in place of their components, at the first one's position."""
    owners: dict[str, LogicalTensor] = {}
    for name, weight in weights.items():
        names = [component.name for component in weight.components]
        # A tensor that is called like the weight, and is none of its components, is another one.
        if name in names or name not in tensors:
            owners.update(dict.fromkeys(names, weight))
    found: dict[str, Assembled | Weight] = {}
    for name, tensor in tensors.items():
        weight_of = owners.get(name)
        if weight_of is None:
            found[name] = tensor
        elif weight_of.name not in found:
            found[weight_of.name] = Weight.of_stored(weight_of, tensors, read)
    return found


def _trained(
    weights: Mapping[str, Assembled | Weight], tensors: Mapping[str, Assembled], read: Reader
) -> tuple[_Tensors, Collection[str]]:
    """Return the tensors with each weight joined to its optimizer's states, and the rest of the training state."""
    training = training_names(weights)
    described = {
        name: (one.shape, one.dtype.name if isinstance(one, Assembled) else one.form) for name, one in weights.items()
    }
    states: dict[str, list[State]] = {}
    for state in states_in(described, training):
        states.setdefault(state.weight, []).append(state)
    made = {name: Trained.of_stored(weights.get(name), own, tensors, read) for name, own in states.items()}
    owners = {state.name: name for name, own in states.items() for state in own}
    found: _Tensors = {}
    for name, tensor in weights.items():
        weight = owners.get(name, name)
        found.setdefault(weight, made.get(weight, tensor))
    return found, frozenset(training.others)


def _apart(tensors: _Tensors, one: RewriteSet) -> _Tensors:
    """Return the tensors, with separate entries for components and states that rewrites name individually."""
    owners = _components(tensors)
    components = NameIndex(owners)
    alone: dict[str, set[str]] = {}
    for rewrite in one.rewrites if owners else ():
        for _, template in rewrite.source.names:
            for part in components.matched(template):
                if template.matched(owners[part]) is None:
                    alone.setdefault(owners[part], set()).add(part)
    found: _Tensors = {}
    for name, tensor in tensors.items():
        if name not in alone:
            found[name] = tensor
            continue
        named = alone[name]
        if isinstance(tensor, Trained) and named <= tensor.named(name).keys():
            found.update((part, state) for part, state in tensor.named(name).items() if part in named)
            rest = tensor.without(name, lambda part, named=named: part in named or None)  # type: ignore[misc]
            found.update({} if rest is None else {name: rest})
        else:
            found.update(components_of(name, tensor))
    return found


def _components(tensors: _Tensors) -> dict[str, str]:
    """Return the components and states that are not named like their weights, each with the name of its weight."""
    return {
        part: name
        for name, tensor in tensors.items()
        if not isinstance(tensor, Assembled)
        for part in components_of(name, tensor)
        if part != name
    }


def kept_objects(
    names: Iterable[str], rewrites: Rewrites, is_state: Callable[[str], bool] = lambda name: False
) -> set[str]:
    """Return the names of values that are not tensors, without those that the rewrites drop.

    Of values of a training state, rewrites drop only those that they name, never those that they merely do not match.
    """
    kept = NameIndex(names)
    for one in rewrites.sets:
        for template in one.drop:
            for name in kept.matched(template):
                kept.discard(name)
        if one.unmatched == "drop":
            kept = NameIndex(filter(is_state, kept.order))
    return set(kept.order)


def _singly(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Assembled]]:
    """Yield the tensors, with the components of weights as separate entries."""
    for name, tensor in tensors.items():
        yield from components_of(name, tensor).items()


def _apply_set(tensors: _Tensors, one: RewriteSet, others: Collection[str], dropped: dict[str, Assembled]) -> _Tensors:
    given, tensors = tensors, dict(tensors)
    names = NameIndex(tensors)
    if one.drop:
        owners = _components(tensors)
        components = NameIndex(owners)
        for template in one.drop:
            for name in names.matched(template):
                names.discard(name)
                del tensors[name]
            for name in dict.fromkeys(owners[part] for part in components.matched(template)):
                weight = tensors.get(name)
                if weight is None or isinstance(weight, Assembled):
                    continue
                rest = weight.without(name, template.matched)
                if rest is not None:
                    tensors[name] = rest
                else:
                    names.discard(name)
                    del tensors[name]
        kept = {name for name, _ in _singly(tensors)}
        dropped.update((name, tensor) for name, tensor in _singly(given) if name not in kept)
    made: set[str] = set()
    for number, rewrite in enumerate(one.rewrites, 1):
        with _numbered(rewrite):
            later = one.rewrites[number:] if one.unmatched == "drop" else None
            _apply(tensors, names, rewrite, made, later)
    left = [name for name in tensors if name not in made and name not in others]
    if left and one.unmatched == "refuse":
        raise LayoutError(
            f"no rewrite matches {shown(left[0])}{_others(len(left) - 1)}; drop leaves tensors out, and unmatched = "
            "'keep' keeps them as they are"
        )
    if one.unmatched == "keep":
        return tensors
    dropped.update(_singly({name: tensors[name] for name in left}))
    return {name: tensor for name, tensor in tensors.items() if name in made or name in others}


def _others(count: int) -> str:
    return "" if not count else f" and {count} other{'s' * (count > 1)}"


def _apply(
    tensors: _Tensors, index: NameIndex, rewrite: Rewrite, made: set[str], later: Sequence[Rewrite] | None
) -> None:
    """Apply one rewrite to the tensors, of which the index has the names.

    Record in `made` what has been made, and forget what has been taken. Where tensors that no rewrite matches are
    dropped, `later` has the rewrites that may still match one.
    """
    taken: dict[str, tuple[str, Fields]] = {}
    where = rewrite.source.where
    for part, template in rewrite.source.names:
        for name, matched in index.matched(template).items():
            if where is None or where.filled(matched) in tensors:
                if name in taken:
                    raise LayoutError(f"tensor {shown(name)} is both the part {taken[name][0]} and the part {part}")
                taken[name] = (part, tuple(sorted(matched.items())))
    if not taken:
        if rewrite.optional:
            return
        such = f", such as {shown(next(iter(tensors)))}" if tensors else ""
        _, wanted = rewrite.source.names[0]
        raise _NothingError(
            f"no tensor is called {shown(wanted.text)}, which a rewrite needs: there are {len(tensors)}{such}. "
            f"{_within(wanted, tensors)}If the names are those of another engine, undo its rules first "
            "(--source-rules, or Rewrites.inverse); optional = true allows a rewrite to match nothing"
        )
    if rewrite.refused is not None:
        raise LayoutError(f"tensor {shown(next(iter(taken)))} cannot be rewritten: {rewrite.refused}")
    groups: dict[Fields, dict[str, str]] = {}
    for name in sorted(taken, key=index.order.__getitem__):  # In the checkpoint's order.
        part, values = taken[name]
        groups.setdefault(values, {})[part] = name
    again = _repeated(groups, tensors, rewrite)
    sources = {name: tensors[name] for name in taken} | again
    index.discard_all(sources)
    for name in sources:
        del tensors[name]
    made.difference_update(sources)
    for name, tensor in products(taken_apart(groups, sources, rewrite), rewrite):
        if name in tensors and (name in made or later is None or _matches(later, name, index)):
            how = "which it gives to another tensor too" if name in made else "which exists already"
            raise LayoutError(
                f"the rewrite of {shown(rewrite.source.names[0][1].text)} gives {shown(tensor.origin)} the name "
                f"{shown(name)}, {how}"
            )
        tensors[name] = tensor
        index.add(name)
        made.add(name)


def _matches(rewrites: Sequence[Rewrite], name: str, index: NameIndex) -> bool:
    """Return whether one of these rewrites takes a tensor of this name."""
    index.count(len(rewrites))
    sources = [rewrite.source for rewrite in rewrites]
    templates = [template for one in sources for template in (*(named for _, named in one.names), *one.also)]
    return any(template.matched(name) is not None for template in templates)


#: The most names that are checked for a common prefix, as of a model within another.
_MOST_ASKED = 4096


def _within(template: Template, tensors: Iterable[str]) -> str:
    """Return advice for a message where names would match without a prefix, as those of a model inside another."""
    for name in itertools.islice(tensors, _MOST_ASKED):
        for dot in (at for at, letter in enumerate(name) if letter == "."):
            for begin in ("", "model."):
                if template.matched(begin + name[dot + 1 :]) is not None:
                    prefix = name[: dot + 1].replace(".", r"\.")
                    return (
                        f"If the model is within another, its names are renamed first (--rename '^{prefix}={begin}', "
                        f"or rename={{r'^{prefix}': {begin!r}}}). "
                    )
    return ""


def _repeated(groups: Mapping[Fields, Mapping[str, str]], tensors: _Tensors, rewrite: Rewrite) -> _Tensors:
    """Return the tensors that have further names, combined with the tensors under those names, if they exist."""
    found: _Tensors = {}
    for values, names in groups.items():
        further = [template.filled(dict(values)) for template in rewrite.source.also]
        for name in names.values():
            others = [tensors[other] for other in further if other in tensors and other != name]
            if others:
                found[name] = repeated(tensors[name], others)
        found.update((other, tensors[other]) for other in further if other in tensors and other not in found)
    return found


@contextmanager
def _numbered(rewrite: Rewrite) -> Iterator[None]:
    """Add the numbers of the model that a rewrite was made with to the message of an error in the block."""
    try:
        yield
    except _NothingError:
        raise  # Whatever the numbers are.
    except ShardwiseError as error:
        lacking = [f"{name} = {value}" for name, value in rewrite.numbers if f"{name} = {value}" not in str(error)]
        if not lacking:
            raise
        raise type(error)(f"{error}; the rewrite has {', '.join(lacking)}") from None


def _unread() -> NoReturn:
    raise AssertionError("the bytes of a tensor are not needed for its size")
