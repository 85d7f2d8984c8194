"""The names under an optimizer, each taken apart: what is before its parameter, the parameter, what is after it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import NamedTuple

__all__ = [
    "MASTER",
    "StateName",
    "StateRoot",
    "add_states",
    "best_prefix",
    "by_parameter",
    "found_prefixes",
    "is_next_to",
]

#: Our name for the kind of a master copy.
MASTER = "master"
#: The other names of a master copy.
MASTERS = frozenset({"fp32", "fp32_param", "master_param", "fp32_from_fp16_params", "fp32_master", "main_param"})
#: States that PyTorch's optimizers, bitsandbytes, Megatron and transformers keep of each parameter.
KINDS = MASTERS | {
    *(MASTER, "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "row_var", "col_var", "variance"),
    *("exp_avg_sq_row", "exp_avg_sq_col", "RMS", "square_avg", "grad_avg", "acc_delta", "exp_inf", "mu_product"),
    *("step_size", "state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2", "error_feedback"),
}
#: Megatron has the kind before the parameter, and calls the master copy `param`.
FIRST = KINDS | {"param"}
#: Fields of optax's states that have the tree of the parameters.
_FIELDS = frozenset({
    *("mu", "nu", "nu_max", "trace", "v_row", "v_col", "v", "m", "ema", "acc_grads", "e_g", "e_x"),
    *("sum_of_squares", "momentum", "prev_grads", "prev_updates"),
})  # fmt: skip
#: Fields of optax's states that hold other states, or numbers with names of their own.
_NO_FIELDS = frozenset({"hyperparams", "hyperparams_states", "inner_state", "inner_states", "inner_opt_state"})
#: Other parts of a training run, next to an optimizer.
BESIDE = re.compile(
    r"(?:^|\.)(?:lr_schedulers?|schedulers?|opt_param_scheduler|rng|rng_states?|train_state|dataloader|grad_scaler|loss_scaler|"
    r"global_step|step|iteration|epoch)(?:[./]|$)"
)
#: A tree of optax.
_OPTAX = re.compile(r"(?:^|[._])opt(?:im(?:izer)?)?_states?\.$")
#: The parts of names under which are values of groups, and Megatron's buffers, whose names say no parameter.
_NO_STATES = ("param_groups.", "distributed.")
#: Values that every optimizer has in its groups, one or the other of which may be stored as a tensor.
_OF_GROUPS = frozenset(["lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "step"])
_MOST_HEADS = 8
#: The prefix of the model that is trained, of several under which weights lie.
_MODEL = ("model", "params", "module", "target")
#: The number of prefixes that are found for an optimizer, and of names that they are found and tried with.
_MOST_FOUND = 8
_SAMPLES = 8
_TRIED = 128
#: The name of each kind, and the end of the names of its states.
_ENDS = {kind: (MASTER if kind in MASTERS else kind, f".{kind}") for kind in KINDS}
_FIRST_CALLED = {kind: MASTER if kind in MASTERS or kind == "param" else kind for kind in FIRST}


class StateName(NamedTuple):
    """The name of a state in parts: `before + parameter + after` is the name.

    Attributes:
        parameter: The name of the parameter, as it is in the state's name.
        kind: The state's kind: `"exp_avg"`, `"step"`, `"mu"`, …; of every master copy `"master"`.
        before: The text before the parameter.
        after: The text after it.
        weight: The name of the tensor that is its weight; `None` if there is none.
    """

    parameter: str
    kind: str
    before: str
    after: str
    weight: str | None = None


class StateRoot:
    """The names that begin with one part that may be an optimizer."""

    __slots__ = ("has_states", "heads", "is_optax", "is_sure", "is_torch", "kinds", "names", "parent", "text")

    def __init__(self, text: str, parent: str, end: str | None) -> None:
        self.text = text
        self.parent = parent
        self.is_optax = _OPTAX.search(text) is not None
        self.is_torch = end == "state." and text != f"{parent}state."
        self.is_sure = self.is_optax or self.is_torch or (end in _NO_STATES and text != f"{parent}param_groups.")
        self.has_states = end not in _NO_STATES
        self.kinds = KINDS if end == "state." else KINDS | _FIELDS
        self.heads: dict[str, tuple[str, str]] = {}
        self.names: list[str] = []

    def samples(self, count: int) -> list[str]:
        """Return at most `count` of the names, spread over all of them, without their common beginning."""
        names = self.names
        if len(names) > count:
            names = [names[number * len(names) // count] for number in range(count)]
        return [name[len(self.text) :] for name in names]

    def notice(self, name: str, *, is_value: bool = False) -> None:
        """Be certain if a name is that of a group's value: a module of a model may be called `param_groups`."""
        self.is_sure |= not self.has_states and (is_value or name.rpartition(".")[2] in _OF_GROUPS)

    def has_numbers(self) -> bool:
        """Return whether each name is a number and a kind, as an optimizer of PyTorch has them without names."""
        begin = len(self.text)
        return self.text.endswith("state.") and all(
            first.isdecimal() and last and "." not in last
            for first, _, last in (name[begin:].partition(".") for name in self.names)
        )


def _by_weight(root: StateRoot, rest: str, prefix: str, weights: Mapping[str, None]) -> StateName | None:
    """Return the longest weight's name of which a name under an optimizer may be a state."""
    if not root.has_states or rest.endswith("."):
        return None
    if root.is_optax or (rest.partition(".")[0] in FIRST and rest.rpartition(".")[2] not in KINDS):
        return _ends_in_weight(root, rest, prefix, weights) or _begins_with_weight(root, rest, prefix, weights)
    return _begins_with_weight(root, rest, prefix, weights) or _ends_in_weight(root, rest, prefix, weights)


def _begins_with_weight(root: StateRoot, rest: str, prefix: str, weights: Mapping[str, None]) -> StateName | None:
    at = rest.rfind(".")
    while at > 0:
        parameter = rest[:at]
        # A number there is the place in a chain of optax, not a name in a list of parameters.
        if prefix + parameter in weights and not (root.is_optax and parameter.isdecimal()):
            return StateName(parameter, kind_called(rest[at + 1 :]), root.text, rest[at:], prefix + parameter)
        at = rest.rfind(".", 0, at)
    return None


def _ends_in_weight(root: StateRoot, rest: str, prefix: str, weights: Mapping[str, None]) -> StateName | None:
    for head, (begin, kind) in root.heads.items():  # As for names before.
        if rest.startswith(head) and prefix + rest[len(head) :] in weights:
            return StateName(rest[len(head) :], kind, begin, "", prefix + rest[len(head) :])
    at = rest.find(".")
    while at > 0:
        parameter = rest[at + 1 :]
        if prefix + parameter in weights:
            before = rest[:at].split(".")
            if (
                not before[-1]
                or before[-1].isdecimal()
                or not _NO_FIELDS.isdisjoint(before[-1:])
                or "hyperparams" in before
            ):
                return None
            kind = MASTER if rest[:at] == "param" else kind_called(before[-1])
            begin = root.text + rest[: at + 1]
            if len(root.heads) < _MOST_HEADS:
                root.heads[rest[: at + 1]] = begin, kind
            return StateName(parameter, kind, begin, "", prefix + parameter)
        at = rest.find(".", at + 1)
    return None


def _by_kind(root: StateRoot, rest: str) -> StateName | None:
    """Return a name under an optimizer split by the known kinds of states, if its weight is not there."""
    first, dot, end = rest.partition(".")
    start, last_dot, last = rest.rpartition(".")
    if not dot or not end or not root.has_states or rest.endswith("."):
        return None
    if not root.is_optax and last in KINDS and start:
        return StateName(start, kind_called(last), root.text, last_dot + last)
    if not root.is_optax and first in FIRST:
        return StateName(end, MASTER if first == "param" else kind_called(first), f"{root.text}{first}.", "")
    if root.text.endswith("state.") and not root.is_optax:
        return None
    parts = rest.split(".")
    for at, part in enumerate(parts[:-1]):
        if part.startswith("hyperparams"):
            return None
        if part in _FIELDS and parts[at - 1 : at] != ["inner_states"]:  # There it is a label of the user's.
            return StateName(
                ".".join(parts[at + 1 :]), part, ".".join([root.text + parts[0], *parts[1 : at + 1]]) + ".", ""
            )
    return None


def kind_called(kind: str) -> str:
    return MASTER if kind in MASTERS else kind


def found_prefixes(root: StateRoot, weights: Mapping[str, None]) -> list[str]:
    """Return the texts before parameters in weights' names, found for a few of the states."""
    parameters: set[str] = set()
    for rest in root.samples(_SAMPLES):
        state = _by_kind(root, rest)
        parts = rest.split(".")
        if state is not None:
            parameters.add(state.parameter)
        elif root.is_sure and len(parts) > 1:
            parameters.add(".".join(parts[:-1]))
            parameters.update(".".join(parts[at:]) for at in range(1, min(len(parts), 6)))
    ends = tuple(f".{parameter}" for parameter in parameters)
    if not ends:
        return []
    counts: Counter[str] = Counter()
    for name in weights:
        if name.endswith(ends):
            counts.update(name[: 1 - len(end)] for end in ends if name.endswith(end))
    return [prefix for prefix, _ in counts.most_common(_MOST_FOUND)]


def best_prefix(root: StateRoot, prefixes: Iterable[str], weights: Mapping[str, None]) -> str | None:
    """Return the prefix with which most states have weights; of several the nearest; `None` if no prefix is best."""
    tried = root.samples(_TRIED)
    if root.has_numbers():  # Of PyTorch's optimizers, whose numbers are not those in a model's names.
        prefixes = [prefix for prefix in prefixes if _are_numbers(root, prefix, weights)]
        if not prefixes:
            return None
    counts = {prefix: sum(_by_weight(root, rest, prefix, weights) is not None for rest in tried) for prefix in prefixes}
    most = max(counts.values())
    if not most:
        return None
    best = [prefix for prefix, count in counts.items() if count == most]
    for is_near in (
        lambda prefix: prefix.startswith(root.parent),
        lambda prefix: prefix.removeprefix(root.parent).rstrip(".") in _MODEL,
    ):
        best = [prefix for prefix in best if is_near(prefix)] or best
    return best[0] if len(best) == 1 else None


def _are_numbers(root: StateRoot, prefix: str, weights: Mapping[str, None]) -> bool:
    """Return whether all weights have the prefix and then a number, as those of a lone `ParameterList`."""
    begin = len(prefix)
    return all(
        (name.startswith(prefix) and name[begin:].isdecimal()) or is_next_to(name, (root.parent,)) for name in weights
    )


def add_states(
    root: StateRoot,
    prefix: str | None,
    weights: Mapping[str, None],
    states: dict[str, StateName],
    others: list[str],
    trained: set[str],
) -> bool:
    """Add the states under one part; if it is certainly an optimizer, also its names that are not states.

    Returns:
        True if any of them has a weight.
    """
    text, begin, unknown, count, has_weights = root.text, len(root.text), [], len(states), False
    is_plain = root.is_sure and root.has_states and prefix is not None and not root.is_optax
    start = prefix or ""
    make = tuple.__new__
    befores = {kind: (called, f"{text}{kind}.") for kind, called in _FIRST_CALLED.items()}
    for name in root.names:
        # Most names are NAME.KIND, and nothing longer is a weight; or KIND.NAME, and nothing longer is.
        head, _, kind = name.rpartition(".")
        end = _ENDS.get(kind) if is_plain else None
        if end is not None:
            parameter = head[begin:]
            weight = start + parameter
            if weight in weights:
                states[name] = make(StateName, (parameter, end[0], text, end[1], weight))
                trained.add(weight)
                has_weights = True
                continue
        elif is_plain:
            first, _, parameter = name[begin:].partition(".")
            before = befores.get(first)
            weight = start + parameter
            if before is not None and weight in weights:
                states[name] = make(StateName, (parameter, before[0], before[1], "", weight))
                trained.add(weight)
                has_weights = True
                continue
        rest = name[begin:]
        state = None if prefix is None else _by_weight(root, rest, prefix, weights)
        if not root.is_sure:
            if state is None or state.kind not in root.kinds or name in trained:
                continue
        else:
            state = state or _by_kind(root, rest)
        if state is None:
            unknown.append(name)
            continue
        states[name] = state
        if state.weight is not None:
            trained.add(state.weight)
            has_weights = True
    is_state = bool(unknown) and text.endswith("state.")
    parameters = {state.parameter for state in islice(states.values(), count, None)} if is_state else set()
    for name in unknown:
        parameter, dot, kind = name[begin:].rpartition(".")
        if dot and parameter in parameters:
            states[name] = StateName(parameter, kind, text, f".{kind}")
        else:
            others.append(name)
    return has_weights


def by_parameter(weights: Collection[str], prefixes: set[str]) -> dict[str, str]:
    """Return the weights' names by the names that states have for the parameters."""
    if len(prefixes) != 1:
        return {name: name for name in weights}
    (prefix,) = prefixes
    found = {name.removeprefix(prefix): name for name in weights}
    return found if len(found) == len(weights) else {name: name for name in weights}


def is_next_to(name: str, parents: Collection[str]) -> bool:
    """Return whether a name is that of another part of a training run, next to an optimizer."""
    return any(name[: match.start() + (match[0][0] == ".")] in parents for match in BESIDE.finditer(name))
