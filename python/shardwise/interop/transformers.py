"""The models of Hugging Face transformers: their tensor-parallel plans, and what each rank holds of one that is loaded.

It needs transformers and PyTorch; no device, no weights and no other process.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from .._fork import importing
from .._text import shown
from ..deploy.recording import Recording
from ..errors import LayoutError
from ..rules.layout_rule import LayoutRule
from ..rules.tp_plan import LoadedTensor, rules_of_loaded
from ..rules.type_tensors import TypeTensors
from ..store import RecordedModel
from ..store.learn.type_tensors import learn_type_tensors
from ._recording import check_sizes, check_total, recorded_models, refused_by, with_few_layers
from .torch import record

with importing:
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = [
    "record_models",
    "record_ranks",
    "tp_plan_of",
    "tp_rules_of",
    "type_tensors_of",
    "version",
    "written_tensors",
]

#: The version of transformers.
version: str = transformers.__version__

#: The operations of transformers' `core_model_loading` that move elements only, by what they do to a layout.
_STEPS = {
    "MergeModulelist": "stack",
    "Concatenate": "join",
    "Chunk": "split",
    "Split": "split",
    "Transpose": "swap",
    "Interleave": "interleave",
    "PermuteForRope": "permute",
}
#: The classes that make a model of a configuration which names none.
_AUTO = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModel")


def tp_plan_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Give the tensor-parallel plan of the model that a `config.json` describes, which `LayoutMap.from_tp_plan` takes.

    Args:
        config: What the file holds: `model_type` says the configuration's class, `architectures` the model's class; if
            left out, it is the class for texts.

    Raises:
        LayoutError: if transformers does not have the model, or a plan for it.

    The plan is `model.tp_plan` of the model, which is made without memory for its weights.
    """
    return _plan(_model(config), config)


def tp_rules_of(
    config: Mapping[str, Any], axis: str, tensors: Mapping[str, Sequence[int]] | None = None
) -> tuple[dict[str, LayoutRule], list[str], list[str]]:
    """Return rules that cut a checkpoint as transformers does with `tp_plan="auto"`.

    Args:
        config: The contents of the model's `config.json`.
        axis: The axis of the mesh that cuts.
        tensors: The shapes of the checkpoint's tensors; if left out, the rules are for the names that transformers
            writes and for those that it has in memory.

    Returns:
        The rules; the tensors that transformers does not load; the plan's entries that name nothing in this model.

    Raises:
        LayoutError: if transformers does not have the model or a plan for it, if a parameter that it cuts is made from
            none of the tensors, or if a rank's share of the tensor that makes it is not a box.
    """
    model = _model(config)
    plan = _plan(model, config)
    with _quiet():
        found, unread = _loaded(model, tensors)
    held: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        held.setdefault(id(value), []).append(name)
    parameters = {name: tuple(value.shape) for name, value in model.named_parameters(remove_duplicate=False)}
    same = [frozenset(names) for names in held.values() if len(names) > 1]
    rules = rules_of_loaded(plan, parameters, found, axis, [*same, *_tied(model)])
    known = {_starred(name) for name, _ in [*model.named_modules(), *model.named_parameters(remove_duplicate=False)]}
    return rules, unread, sorted(plan.keys() - known)


def written_tensors(config: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the tensors of the file that transformers writes for the model of a `config.json`, in float32.

    Raises:
        LayoutError: if transformers does not have the model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    with _quiet():
        model = _model(config)
        held: dict[int, str] = {}
        # A file has one of several names of the same tensor.
        named = model.named_parameters(remove_duplicate=False)
        again = {name for name, value in named if held.setdefault(id(value), name) != name}
        again |= {*model.all_tied_weights_keys} if _tied(model) else set()
        state = {name: value for name, value in model.state_dict().items() if name not in again}
        written = revert_weight_conversion(model, state) if get_model_conversion_mapping(model) else state
        return {name: (tuple(value.shape), "float32") for name, value in written.items()}


def type_tensors_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names and shapes of the tensors of a model's type, in terms of its configuration.

    Some eighty small models are made, without weights. The result is compared with the configuration's own model.

    Args:
        config: The contents of a `config.json`.

    Returns:
        What a rules file states under `tensors`.

    Raises:
        LayoutError: If transformers does not have the model, or its tensors cannot be stated in terms of the
            configuration.
    """
    kind = CONFIG_MAPPING[config["model_type"]] if config.get("model_type") in CONFIG_MAPPING else None
    own = type(_model(config))

    def resolved(given: Mapping[str, Any]) -> dict[str, Any]:
        assert kind is not None  # Or there would be no model.
        made: dict[str, Any] = json.loads(json.dumps(kind.from_dict(dict(given)).to_dict(), default=str))
        return made

    def shapes_of(given: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        named = {**given, "architectures": [own.__name__]}
        return {name: shape for name, (shape, _) in written_tensors(named).items()}

    with _quiet():
        whole = {
            key: value for key, value in resolved(config).items() if key not in ("quantization_config", "architectures")
        }
        small = with_few_layers(whole) | {"model_type": config["model_type"]}
        table = learn_type_tensors(
            small,
            shapes_of,
            resolved,
            architecture=own.__name__,
            other_names=dict(getattr(kind, "attribute_map", {})),
            unlisted=_asked_for(kind, lambda: shapes_of(small)),
        )
        made, real = TypeTensors(table, "what was learned").shapes({**config, "architectures": None}), shapes_of(config)
    if made != real:
        names = [name for name in {**made, **real} if made.get(name) != real.get(name)]
        raise LayoutError(f"the learned rules do not hold for the configuration itself: {', '.join(names[:4])}")
    return table


def record_ranks(
    config: Mapping[str, Any],
    tp: int = 1,
    *,
    ep: int = 1,
    pp: int = 1,
    tensors: Mapping[str, Any] | None = None,
    computed: Literal["refuse", "leave"] = "refuse",
) -> list[Recording]:
    """Find what each rank holds of a model that transformers loads, by loading element numbers through its loader.

    Args:
        config: The contents of the model's `config.json`; for a large model, with smaller sizes.
        tp: The number of ranks of tensor parallelism, by `model.tp_plan`.
        ep: The number of ranks of expert parallelism: 1 or `tp`.
        pp: The number of stages.
        tensors: The shape and dtype of each tensor of the checkpoint; by default those that transformers writes, in
            float32.
        computed: What to do with parameters that are computed; see `shardwise.record`.

    Returns:
        The recording of each rank, `pp * tp` of them, labelled from 0 on.

    Raises:
        LayoutError: If transformers does not have the model, cannot load it on these ranks, or the model is too large
            to be loaded several times; if this process is in a process group.

    Renamings between files and memory, fused and stacked experts, buffers that files have, and tied weights are those
    of `from_pretrained`, because it runs itself, with a process group of PyTorch that does not communicate.

    >>> llama = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1,
    ...          "intermediate_size": 48, "vocab_size": 64}
    >>> ranks = record_ranks(llama, tp=2)  # doctest: +SKIP
    """
    check_sizes(tp=tp, ep=ep, pp=pp)
    model = _model(config)
    if tp > 1 and ep == 1:
        _plan(model, config)
    tensors = written_tensors(config) if tensors is None else tensors
    check_total(tensors)
    try:
        return [_recorded(model, tensors, rank, (tp, ep, pp), computed) for rank in range(tp * pp)]
    except LayoutError as error:
        if tp == 1 or pp == 1:
            raise
        raise LayoutError(f"{error}; try tp 1 or pp 1, because transformers 5.24 needs one of them") from error


def record_models(
    config: Mapping[str, Any], counts: Sequence[int] = (1, 2, 4), stages: Sequence[int] = ()
) -> list[RecordedModel]:
    """Record three small models of a family, from which `shardwise.store.learn_rules` makes rules for all sizes.

    Args:
        config: The contents of a `config.json`, whose sizes are replaced by small ones that differ from each other.
        counts: The numbers of ranks of tensor parallelism.
        stages: The numbers of stages, if there are to be any; the keys are then `(stages, ranks)`, with two ranks each.

    Raises:
        LayoutError: as `record_ranks`; if transformers does not take the small sizes: then call `record_ranks` with
            sizes of your own.
    """
    return recorded_models(config, record_ranks, counts, stages)


def _recorded(
    model: Any, tensors: Mapping[str, Any], rank: int, sizes: tuple[int, int, int], computed: Literal["refuse", "leave"]
) -> Recording:
    """Return the recording of a rank; a process group says that it is this one."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise LayoutError("this process is in a process group; record in a process of its own")
    tp, ep, pp = sizes

    def load(given: Mapping[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if tp * pp > 1:
            from transformers.distributed.configuration_utils import DistributedConfig

            options["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=tp, ep_size=ep, pp_size=pp)
        torch.manual_seed(0)  # What no tensor fills is the same each time.
        made = type(model).from_pretrained(
            None, config=model.config, state_dict=dict(given.items()), dtype=torch.float32, **options
        )
        return {name: getattr(value, "to_local", lambda v=value: v)() for name, value in made.state_dict().items()}

    with _quiet():
        # PyTorch keeps the meshes of the rank before, which are equal to those of this one.
        _clear_sharding_prop_cache()
        dist.init_process_group("fake", rank=rank, world_size=tp * pp, store=FakeStore())
        try:
            with refused_by(f"transformers {version}", f"tp {tp}, ep {ep}, pp {pp}"):
                return record(tensors, load, rank, computed=computed)
        finally:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()


def _asked_for(kind: Any, make: Callable[[], object]) -> list[str]:
    """Return the keys, of parts with dots, that models ask a configuration for though it has none of that name."""
    asked: list[tuple[type, str]] = []

    def missing(said: Any, name: str) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("transformers.models."):
            asked.append((type(said), name))
        raise AttributeError(f"{type(said).__name__!r} object has no attribute {name!r}")

    base: Any = transformers.PreTrainedConfig
    base.__getattr__ = missing
    try:
        make()
    except Exception:  # Whatever a model's own code raises; that of the small model is named by whoever makes it.
        return []
    finally:
        del base.__getattr__
    parts = {kind: ""} | {part: f"{name}." for name, part in (getattr(kind, "sub_configs", None) or {}).items()}
    return list(dict.fromkeys(parts[part] + name for part, name in asked if part in parts and name[0] != "_"))


def _starred(name: str) -> str:
    return ".".join("*" if word.isdigit() and place else word for place, word in enumerate(name.split(".")))


def _tied(model: Any) -> list[frozenset[str]]:
    """Return the parameters that become one when weights are tied."""
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return []
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return [frozenset(pair) for pair in tied.items()] if isinstance(tied, Mapping) else []


@contextmanager
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    has_bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)
        if has_bars:
            transformers.logging.enable_progress_bar()


def _model(config: Mapping[str, Any]) -> Any:
    """Return the model without its weights: all of its tensors are on PyTorch's device "meta"."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise LayoutError(
            f"transformers {version} has no model of the type {shown(kind)}; for one that brings its own code, save "
            "its `model.tp_plan` as JSON"
        )
    named = config.get("architectures") or ()
    name = next(iter(named if isinstance(named, (list, tuple)) else [named]), None)
    described = CONFIG_MAPPING[kind]
    own = getattr(transformers, name, None) if isinstance(name, str) else None
    if name is not None and not (isinstance(own, type) and hasattr(own, "tp_plan")):
        raise LayoutError(
            f"transformers {version} has no class {shown(name)} next to {described.__name__}; save the model's "
            "`model.tp_plan` as JSON"
        )
    with _quiet(), torch.device("meta"):
        try:
            plain = {key: value for key, value in config.items() if key != "quantization_config"}
            # A file has infinity as {"__float__": "Infinity"}.
            said = described.from_dict(getattr(described, "_decode_special_floats", dict)(plain))
            if own is not None:
                return own(said)
            found = [auto for auto in map(partial(getattr, transformers), _AUTO) if type(said) in auto._model_mapping]
            # A model of texts that is made of a part of the configuration is not that of the configuration.
            whole = [auto for auto in found if _is_made_of(auto._model_mapping[type(said)], type(said))][:1]
            for auto in [*whole, *found[:1]]:
                try:
                    return auto.from_config(said)
                except Exception:  # Whatever a model's own code raises.
                    if auto is found[0]:
                        raise
        except LayoutError:
            raise
        except Exception as error:  # Whatever a model's own code raises.
            raise LayoutError(
                f"transformers {version} cannot make the model of the configuration: {type(error).__name__}: {error}"
                + _nulls_of(config)
            ) from error
    raise LayoutError(f"transformers {version} has no model for {described.__name__}; name its class in architectures")


def _is_made_of(models: Any, kind: type) -> bool:
    own = getattr(models, "config_class", kind)
    return own is None or issubclass(kind, own)


def _nulls_of(config: Mapping[str, Any]) -> str:
    """Return the sentence for a message about sizes that a configuration leaves open, as defaults of some types do."""
    names = [key for key, value in config.items() if value is None and re.match(r"(n|num)_|.*_(size|dim|rank)$", key)]
    verb = "is" if len(names) == 1 else "are"
    return f"; {', '.join(names)} {verb} null: give the config.json of a released model" if names else ""


def _plan(model: Any, config: Mapping[str, Any]) -> dict[str, str]:
    plan = dict(getattr(model, "tp_plan", None) or {})
    if not plan:
        raise LayoutError(
            f"transformers {version} has no tensor-parallel plan for {shown(config.get('model_type'))}, so it cuts no "
            "parameter; try vllm or sglang, or give a plan of your own as JSON"
        )
    return plan


def _loaded(model: Any, tensors: Mapping[str, Sequence[int]] | None) -> tuple[dict[str, LoadedTensor], list[str]]:
    """Return the parameters that each tensor of a file becomes, and the names of tensors that become none."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import rename_source_key, revert_weight_conversion
    except ImportError as error:
        raise LayoutError(
            f"transformers {version} does not say how it renames what it loads ({error}); install 5.23 or later"
        ) from None
    state = model.state_dict()
    conversions = get_model_conversion_mapping(model)
    converters = [one for one in conversions if hasattr(one, "operations")]
    renamings = [one for one in conversions if not hasattr(one, "operations")]
    shapes: Mapping[str, Sequence[int]]
    if tensors is None:
        written = revert_weight_conversion(model, dict(state)) if converters or renamings else state
        shapes = {name: tuple(value.shape) for name, value in written.items()}
    else:
        shapes = tensors
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found: dict[str, LoadedTensor] = {}
    unread = []
    for name, shape in shapes.items():
        rank = len(shape)
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        own = next((one for one in converters if pattern is not None and pattern in one.source_patterns), None)
        if own is None:
            loaded = LoadedTensor(rank, (target,))
        else:
            first = own.target_patterns[0]
            targets = tuple(target.replace(first, one, 1) for one in own.target_patterns)
            # Some tensors are transposed only if they do not have the parameter's shape.
            is_kept = target in state and tuple(state[target].shape) == tuple(shape)
            steps = tuple(_step(one) for one in own.operations if not (is_kept and getattr(one, "check_dims", False)))
            place = own.source_patterns.index(pattern), len(own.source_patterns)
            loaded = LoadedTensor(rank, targets, place, steps)
        if all(one in parameters for one in loaded.parameters):
            found[name] = loaded
        elif not any(one in state for one in loaded.parameters):
            unread.append(name)
    if tensors is None:
        found |= {name: LoadedTensor(value.dim(), (name,)) for name, value in state.items() if name in parameters}
    return found, unread


def _step(operation: Any) -> tuple[str, tuple[int, ...]]:
    name = type(operation).__name__
    dims = (operation.dim0, operation.dim1) if name == "Transpose" else (getattr(operation, "dim", 0),)
    return _STEPS.get(name, name), dims if name in _STEPS else ()
