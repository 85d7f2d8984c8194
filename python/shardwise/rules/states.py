"""Names of training states: which tensors of a checkpoint are an optimizer's, and which weight each belongs to.

Names alone say it, for every format: `…state.NAME.KIND` as PyTorch writes it, `…state.KIND.NAME` as Megatron does, and
the paths of optax, `opt_state.….KIND.NAME`. NAME is the weight's own name, or that without the prefix that all weights
have. A name is a state's only if NAME is a weight of the checkpoint, or if it lies under something that is recognised
as an optimizer; a module of a model that is called `state` is neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from .._garbage import uncollected
from .state_splits import StateName, StateRoot, add_states, best_prefix, by_parameter, found_prefixes, is_next_to

__all__ = ["TrainingNames", "training_names"]


_WORD = r"(?:[a-z0-9]+_)*opt(?:im(?:izers?)?)?(?:_?[0-9]+|_states?)?"
#: Part of a name that may be an optimizer: after three other parts at most, one that is called so.
_OPTIMIZER = re.compile(
    rf"((?:[^.]+\.){{0,3}}?){_WORD}\.(?:{_WORD}\.)?(?:(?:[0-9]+\.)*(state\.|param_groups\.|distributed\.))?"
)
#: A part that is called `state`, which may as well be a module of a model.
_STATE = re.compile(r"((?:[^.]+\.){0,3}?)(state\.|param_groups\.)")
#: The number of optimizers for which the prefix of the weights is searched; for others the found prefixes are tried.
_SEARCHED = 8
_MOST_PREFIXES = 16


class TrainingNames:
    """The names of a checkpoint's weights, and of its training state; `training_names` makes it.

    Attributes:
        weights: The name of each weight, by its parameter: the name without the prefix that weights have and states
            leave out; the whole name where optimizers leave out different ones, or two weights would have one name.
        states: The name of each state, taken apart.
        others: The tensors of the training state that belong to no parameter: counts, learning rates, random states.
    """

    __slots__ = ("_kept", "_parents", "_under", "others", "states", "weights")

    def __init__(
        self,
        weights: Mapping[str, str],
        states: Mapping[str, StateName],
        others: Sequence[str],
        under: frozenset[str],
        parents: frozenset[str],
    ) -> None:
        self.weights: Mapping[str, str] = MappingProxyType(dict(weights))
        self.states: Mapping[str, StateName] = MappingProxyType(dict(states))
        self.others = tuple(others)
        self._kept = frozenset(weights.values())
        self._under = under
        self._parents = parents

    def is_state(self, name: str) -> bool:
        """Return whether the tensor or the value of this name belongs to the training state, rather than the model.

        >>> names = training_names(["model.w", "optim.state.w.exp_avg"])
        >>> [name for name in ("model.w", "optim.param_groups.0.lr", "lr_scheduler.last_epoch") if names.is_state(name)]
        ['optim.param_groups.0.lr', 'lr_scheduler.last_epoch']
        """
        if name in self.states or name in self._kept:
            return name in self.states
        match = _matched(name)
        return (match is not None and _whole(match[0]) in self._under) or is_next_to(name, self._parents)


def training_names(names: Iterable[str], values: Iterable[str] = ()) -> TrainingNames:
    """Tell the weights of a checkpoint from its training state, by their names.

    Args:
        names: The names of the tensors.
        values: The names of values that are not tensors; they too may say that something is an optimizer.

    >>> names = training_names(["model.w", "model.b", "optim.state.w.exp_avg", "lr_scheduler.last"])
    >>> dict(names.weights)
    {'w': 'model.w', 'b': 'model.b'}
    >>> names.states["optim.state.w.exp_avg"]
    StateName(parameter='w', kind='exp_avg', before='optim.state.', after='.exp_avg', weight='model.w')
    >>> names.others
    ('lr_scheduler.last',)
    """
    return _training_names(tuple(names), tuple(values))


@lru_cache(maxsize=2)  # A conversion asks several times about the same names.
def _training_names(names: tuple[str, ...], values: tuple[str, ...]) -> TrainingNames:
    with uncollected():
        return _weights_and_states(names, values)


def _weights_and_states(names: Iterable[str], values: Iterable[str]) -> TrainingNames:
    """Sort names into weights, states of these, and others: under each part that may be an optimizer, the best way."""
    roots, weights = _roots(names, values)
    states: dict[str, StateName] = {}
    others: list[str] = []
    prefixes: dict[str, None] = {"": None}
    used: set[str] = set()
    trained: set[str] = set()
    parents: set[str] = set()
    # Weights of what may not be an optimizer are under nothing that may be one.
    plain = weights if all(root.is_sure for root in roots) else {name: None for name in weights if not _matched(name)}
    for root in roots[:_SEARCHED]:
        if len(prefixes) < _MOST_PREFIXES:
            prefixes.update(dict.fromkeys(found_prefixes(root, weights if root.is_sure else plain)))
    for root in roots:
        own = weights if root.is_sure else plain
        prefix = best_prefix(root, prefixes, own)
        count = len(states)
        if add_states(root, prefix, own, states, others, trained) and prefix is not None:
            used.add(prefix)
        if len(states) > count or root.is_sure:
            parents.add(root.parent)
    if parents:
        others += [name for name in weights if name not in trained and name not in states and is_next_to(name, parents)]
    for name in others:
        weights.pop(name, None)
    if not all(root.is_sure for root in roots):  # The names under others are among the weights.
        for name in states:
            weights.pop(name, None)
    under = {_whole(root.text) for root in roots if root.is_sure}
    return TrainingNames(by_parameter(weights, used), states, others, frozenset(under), frozenset(parents))


def _roots(names: Iterable[str], values: Iterable[str]) -> tuple[list[StateRoot], dict[str, None]]:
    """Sort names into those under a part that may be an optimizer, the certain ones first, and possible weights."""
    roots: dict[str, StateRoot] = {}
    weights: dict[str, None] = {}
    last, under = None, list[str]()  # Most names are under the same as the one before.
    for name in names:
        if last is not None and name.startswith(last):
            under.append(name)
            continue
        root = _root_of(name, roots)
        if root is None:
            last, weights[name] = None, None
            continue
        root.names.append(name)
        root.notice(name)
        last, under = root.text if root.is_torch else None, root.names
    for name in values:
        if (root := _root_of(name, roots)) is not None:
            root.notice(name, is_value=True)
    whole = {_whole(root.text) for root in roots.values() if root.is_sure}
    for root in roots.values():
        root.is_sure |= _whole(root.text) in whole
        if not root.is_sure:
            weights.update(dict.fromkeys(root.names))
    return sorted(roots.values(), key=lambda root: (not root.is_sure, -len(root.names), root.text)), weights


def _whole(text: str) -> str:
    """Return the name of the optimizer of which this text is a part."""
    return text.removesuffix("state.").removesuffix("param_groups.").removesuffix("distributed.")


def _matched(name: str) -> re.Match[str] | None:
    """Return the match of a name's part that may be an optimizer."""
    match = _OPTIMIZER.match(name) if "opt" in name else None
    if match is None and ("state." in name or "param_groups." in name):
        match = _STATE.match(name)
    return match


def _root_of(name: str, roots: dict[str, StateRoot]) -> StateRoot | None:
    """Return the root that the name of a state begins with, made if it is new."""
    match = _matched(name)
    if match is None:
        return None
    root = roots.get(match[0])
    if root is None:
        root = roots[match[0]] = StateRoot(match[0], match[1], match[2])
    return root
