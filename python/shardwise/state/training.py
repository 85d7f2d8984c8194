"""The training state of a model on the devices of a mesh or a deployment: what each device holds and allocates."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from .._arguments import integer, optional
from .._garbage import uncollected
from ..layout import UnevenRule
from ..placing import Layouts, placing_of
from ..quantized import Components
from ..quantized.forms import NO_COMPONENTS
from ..rules.layout_rule import checked_uneven
from .adapters import Lora
from .asked import TrainingSetup, pattern_of, recipe_of, units_of
from .caches import Cache
from .described import described
from .maker import StateMaker
from .optimizers import Optimizer, optimizer_of
from .result import TrainingState

__all__ = ["training_state"]


def training_state(
    tensors: Mapping[str, Any],
    layouts: Layouts,
    optimizer: str | Mapping[str, Any] | Optimizer | None = None,
    sharding: str = "none",
    *,
    over: Sequence[str] | None = None,
    group: int | None = None,
    weights: Any = None,
    gradients: Any = None,
    masters: Any = None,
    frozen: str | None = None,
    lora: Lora | None = None,
    tied: Mapping[str, str] | None = None,
    units: str | Callable[[str], Hashable] | None = None,
    settings: Mapping[str, Any] | None = None,
    caches: Iterable[Cache] = (),
    quantized: Components | None = None,
    uneven: UnevenRule = "even",
) -> TrainingState:
    """Work out what each device holds and allocates of weights, gradients, masters, states of the optimizer and caches.

    Args:
        tensors: the shape and dtype of each tensor, by name, in the order of the model.
        layouts: a layout map with a mesh, a deployment, or layouts by name.
        optimizer: one of `OPTIMIZERS`, or the dtypes of its arrays by name, as in `{"exp_avg": "float32"}`; `None` if
            nothing is trained.
        sharding: one of `SHARDINGS`.
        over: the axes over which data parallelism shards the state. If not given: for a deployment, those by which its
            default cuts everything, else those that it declares replicated; for a layout map, those that no rule uses.
        group: the number of ranks that share a state, if not all along `over`: those of a group of HSDP or FSDP's
            `HYBRID_SHARD`, or of an instance of Megatron's distributed optimizer.
        weights: the dtype of floating-point weights, instead of their own.
        gradients: the dtype of gradients; that of the weights if not given.
        masters: the dtype of master copies, or `"none"`; if not given, the framework's own.
        frozen: a regular expression; parameters are not trained if it is found in their names.
        lora: adapters to be trained; all else is then frozen.
        tied: maps the name of each tied tensor to that of the tensor whose elements it shares.
        units: the tensors that are flattened together, as a regular expression for the part that their names have in
            common, or a function of names: for FSDP1 the wrapped modules, by default the part of a name up to its first
            number; for Megatron the chunks of a stage.
        settings: settings of the framework by its own names: `use_orig_params`, `round_robin_gradients`, `bucket_size`.
        caches: caches of keys and values; see `shardwise.state.key_value_caches`.
        quantized: the quantized weights among the tensors, as `shardwise.quantized.find_components` finds them: their
            components are cut as the rules say of the weights.
        uneven: how dims that do not divide are cut, unless the rules say so.

    Raises:
        LayoutError: if a name, a setting or a way to shard is not known; if a tensor has no layout, or its layout
            does not fit; if the framework cannot shard the state in this way.
        TypeError: if an argument is of the wrong type.

    >>> from shardwise import DeviceMesh, LayoutMap
    >>> rules = LayoutMap(DeviceMesh((4, 2), ("data", "model")))
    >>> rules["up"] = ("model", None)
    >>> found = training_state({"up": ((6, 3), "float32"), "norm": ((3,), "float32")}, rules, "adamw", "fsdp2")
    >>> found.allocated["weights"].tolist(), found.held["weights"].tolist()
    ([16, 16, 16, 16, 16, 16, 16, 16], [16, 16, 16, 16, 16, 16, 0, 0])
    >>> found.fullest
    ('cpu:0', 72)
    """
    with uncollected():
        known = None if optimizer is None else optimizer_of(optimizer)
        training = TrainingSetup(
            *recipe_of(sharding, known, gradients, masters, settings or {}),
            pattern_of("frozen", frozen), units_of(sharding, units), lora,
            None if group is None else integer("group", group), over,
        )  # fmt: skip
        components = optional("quantized", quantized, Components) or NO_COMPONENTS
        listed = described(tensors, weights)
        maker = StateMaker(placing_of(layouts), listed, training, dict(tied or {}), components, checked_uneven(uneven))
        return maker.state(caches)
