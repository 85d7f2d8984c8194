"""The states of optax's Adam by the names that PyTorch has for them: `mu`, `nu` and one count for all parameters."""

from __future__ import annotations

from collections.abc import Iterable

from .states import TrainingNames, training_names

__all__ = ["adam_counts", "kinds_in_pytorch", "kinds_of_optax"]

_IN_PYTORCH = {"mu": "exp_avg", "nu": "exp_avg_sq", "nu_max": "max_exp_avg_sq"}


def kinds_in_pytorch(known: TrainingNames) -> dict[str, str]:
    """Return PyTorch's kind of each state of optax's Adam, by the state's name.

    >>> names = ["params.w", "opt_state.0.mu.w", "opt_state.0.nu.w", "opt_state.0.count", "opt_state.1.trace.w"]
    >>> kinds_in_pytorch(training_names(names))
    {'opt_state.0.mu.w': 'exp_avg', 'opt_state.0.nu.w': 'exp_avg_sq'}
    """
    adams = _adams(known)
    return {
        name: _IN_PYTORCH.get(state.kind, state.kind)
        for name, state in known.states.items()
        if not state.after and state.before.removesuffix(f"{state.kind}.") in adams
    }


def adam_counts(names: Iterable[str]) -> dict[str, str]:
    """Return a step's name for each parameter that optax's Adam trains, and the name of the one count it comes from.

    >>> adam_counts(["params.w", "opt_state.0.mu.w", "opt_state.0.nu.w", "opt_state.0.count", "opt_state.1.trace.w"])
    {'opt_state.0.step.w': 'opt_state.0.count'}
    """
    known = training_names(names)
    adams = _adams(known)
    return {
        f"{base}step.{state.parameter}": f"{base}count"
        for state in known.states.values()
        if state.kind == "mu" and (base := state.before.removesuffix("mu.")) in adams
    }


def kinds_of_optax(known: TrainingNames) -> list[str]:
    """List the kinds of states that have a path of optax, sorted.

    >>> names = ["params.w", "opt_state.0.mu.w", "opt_state.0.nu.w", "opt_state.0.count", "opt_state.1.trace.w"]
    >>> kinds_of_optax(training_names(names))
    ['mu', 'nu', 'trace']
    """
    states = known.states.values()
    return sorted(
        {state.kind for state in states if state.before.endswith(f".{state.kind}.") and "opt" in state.before}
    )


def _adams(known: TrainingNames) -> frozenset[str]:
    """Return the prefixes of names under which optax's Adam has both moments, and a count or steps made of it."""
    kinds: dict[str, set[str]] = {}
    for state in known.states.values():
        if not state.after and state.before.endswith(f"{state.kind}."):
            kinds.setdefault(state.before.removesuffix(f"{state.kind}."), set()).add(state.kind)
    others = set(known.others)
    return frozenset(
        base for base, held in kinds.items() if {"mu", "nu"} <= held and (f"{base}count" in others or "step" in held)
    )
