"""The arguments of `training_state`, checked: a way to shard, an optimizer, and settings of a framework."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._arguments import instance, integer, optional
from .._dtypes import bits_of
from .._text import shown
from ..errors import LayoutError
from .adapters import Lora
from .optimizers import Optimizer
from .recipe import SHARDINGS, Recipe

__all__ = ["TrainingSetup", "pattern_of", "recipe_of", "units_of"]

#: The module that FSDP wraps: up to the first number in a name.
_NUMBERED = re.compile(r"^(?:[^.]+\.)*?[0-9]+(?=\.)")
#: The settings of frameworks: for each the ways to shard that have it, and the field of `Recipe` that it sets.
_SETTINGS: dict[str, tuple[tuple[str, ...], str]] = {
    "use_orig_params": (("fsdp1",), "aligned"),
    "param_dtype": (("fsdp1",), "compute"),
    "param_groups": (("zero1", "zero2", "zero3"), "groups"),
    "round_robin_gradients": (("zero1", "zero2"), "round_robin"),
    "stage3_param_persistence_threshold": (("zero3",), "persistent"),
    "sub_group_size": (("zero3",), "sub_group"),
    "bucket_size": (("megatron",), "bucket"),
    "pad_buckets_for_high_nccl_busbw": (("megatron",), "high_bandwidth"),
    "shared_embedding": (("megatron",), ""),
}
#: The least and the greatest values of settings that are numbers.
_LIMITS = {"groups": (1, 2), "persistent": (0, 2**63 - 1)}


@dataclass(frozen=True)
class TrainingSetup:
    """The way in which a model is trained. The value checks itself; `training_state` explains each field.

    Attributes:
        recipe: The arrays that are kept for each parameter.
        shared: Whether Megatron shares embeddings, if that is set.
        frozen: The pattern of the names of tensors that are not trained.
        units: The function from a name to the unit that it is flattened with; `None` if all are flattened together.
        lora: Adapters that are trained.
        group: The number of ranks that share a state.
        over: The axes over which the state is sharded, as they are given.
    """

    recipe: Recipe
    shared: re.Pattern[str] | None
    frozen: re.Pattern[str] | None
    units: Callable[[str], Hashable] | None
    lora: Lora | None
    group: int | None
    over: Sequence[str] | None

    def __post_init__(self) -> None:
        optional("lora", self.lora, Lora)
        if self.group is not None and self.group < 1:
            raise LayoutError(f"group is {shown(self.group)}; it must be at least 1")
        if self.recipe.sharding == "hsdp" and self.group is None and self.over is None:
            raise LayoutError("hsdp shards within groups of ranks: give their size as group, or their axes as over")


def pattern_of(argument: str, text: Any) -> re.Pattern[str] | None:
    """Return a regular expression, or `None` for `None`.

    Raises:
        LayoutError: if it is not one.
    """
    if text is None:
        return None
    try:
        return re.compile(instance(argument, text, str))
    except re.error as error:
        raise LayoutError(f"{argument} is {shown(text)}, which is not a regular expression: {error}") from None


def units_of(sharding: str, units: Any) -> Callable[[str], Hashable] | None:
    """Return the function from a name to the unit that it is flattened with; `None` if all are flattened together.

    Raises:
        LayoutError: if the way to shard has no units, or `units` is not a regular expression.
    """
    if units is not None and sharding not in ("fsdp1", "megatron"):
        raise LayoutError(f"units is for fsdp1 and megatron; sharding is {shown(sharding)}")
    if callable(units):
        return units  # type: ignore[no-any-return]
    pattern = pattern_of("units", units)
    if pattern is None:
        if sharding != "fsdp1":
            return None
        pattern = _NUMBERED
    return lambda name: "" if (found := pattern.search(name)) is None else found.group()


def recipe_of(
    sharding: Any, optimizer: Optimizer | None, gradients: Any, masters: Any, settings: Mapping[str, Any]
) -> tuple[Recipe, re.Pattern[str] | None]:
    """Return the arrays that are kept for each parameter; and Megatron's shared embeddings, if that is set.

    Raises:
        LayoutError: if the way to shard or a setting is not known, or the optimizer cannot be used with it.
    """
    if not isinstance(sharding, str) or sharding not in SHARDINGS:
        raise LayoutError(f"sharding is {shown(sharding)}, which is not known; known are {', '.join(SHARDINGS)}")
    _check_together(sharding, optimizer)
    values: dict[str, Any] = {}
    shared = None
    for name, value in instance("settings", settings, Mapping).items():  # type: ignore[type-abstract]
        known, called = _SETTINGS.get(name, ((), ""))
        if sharding not in known:
            there = [one for one, (ways, _) in _SETTINGS.items() if sharding in ways]
            raise LayoutError(
                f"settings has {shown(name)}, which {sharding} does not know; it knows {', '.join(there) or 'none'}"
            )
        if name == "shared_embedding":
            shared = pattern_of(f"settings[{name!r}]", value)
        elif name == "param_dtype":
            values[called] = bits_of(value, f"settings[{name!r}]")
        elif called in ("aligned", "round_robin", "high_bandwidth"):
            values[called] = instance(f"settings[{name!r}]", value, bool)
        else:
            values[called] = integer(f"settings[{name!r}]", value)
            least, most = _LIMITS.get(called, (1, 2**63 - 1))
            if not least <= values[called] <= most:
                raise LayoutError(f"settings[{name!r}] is {shown(value)}; it must be from {least} to {most}")
    if gradients is not None:
        values["gradients"] = bits_of(gradients, "gradients")
    if masters is not None:
        values["masters"] = 0 if masters == "none" else bits_of(masters, "masters")
    return Recipe(sharding, optimizer, **values), shared


def _check_together(sharding: str, optimizer: Optimizer | None) -> None:
    """Refuse combinations of optimizer and sharding that no framework has, or that fail there."""
    name = None if optimizer is None else optimizer.name
    if name == "muon" and sharding in ("fsdp1", "zero1", "zero2", "zero3", "megatron"):
        raise LayoutError(
            f"optimizer is 'muon', which takes matrices, and {sharding} has flat parts of them: what Muon keeps for "
            "them is not known; use one of none, ddp, zero-redundancy, fsdp2, hsdp and megatron-ddp"
        )
    if name == "adafactor" and sharding in ("fsdp2", "hsdp"):
        raise LayoutError(
            f"optimizer is 'adafactor', which PyTorch 2.15 cannot step under {sharding}; it can under ddp and fsdp1"
        )
    if name == "adam8bit" and sharding in ("fsdp2", "hsdp"):
        raise LayoutError(
            f"optimizer is 'adam8bit', whose blocks under {sharding} are not known; use one of ddp, fsdp1, zero1, "
            "zero2 and zero3"
        )
