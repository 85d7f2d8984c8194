"""`shardwise state`: what each rank holds and allocates of a training state, and whether it fits."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .._dtypes import CODES, DTYPES, find_dtype
from .._text import shown
from ..deploy import Deployment
from ..errors import ParseError
from ..fit.by_names import ParallelSizes, deployed_by_names
from ..fit.model import opened_model
from ..fit.nearest import Way, nearest
from ..quantized import Components, find_components
from ..quantized.component import StoredLook
from ..quantized.forms import NO_COMPONENTS, find_kinds
from ..rules.numbers import read_config, reading_for
from ..rules.wrapped import language_config
from ..state import OPTIMIZERS, Lora, TrainingState, training_state
from .state_text import Findings, print_findings, print_unknown
from .terminal import Screen

if TYPE_CHECKING:
    from ..rules.layout_map import LayoutMap
    from ..state import Cache

__all__ = ["run_state"]

_OUTPUT = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.weight$")
_WORDS = re.compile(r"(?:^|\.)(?:embed_tokens|wte|embed_in|word_embeddings)\.weight$")
_CACHE = ("batch", "context", "dtype", "block")


class _ModelOutline(NamedTuple):
    """A model as it is known: the dtype and shape of each tensor, its configuration, and how values are read."""

    tensors: Mapping[str, StoredLook]
    config: Mapping[str, Any]
    read: Callable[[str], bytes | None]


def run_state(screen: Screen, options: argparse.Namespace) -> int:
    """Print what each rank needs, and give the exit status: 1 if it does not fit `--memory`, 4 if it is not known."""
    asked, memory = _asked(options), None
    if options.memory is not None:
        from .notation import parse_memory

        memory = parse_memory(options.memory)
    model = _model(options)
    if options.rules is None:
        return _by_names(screen, options, model, asked, memory)
    return _by_rules(screen, options, model, asked, memory)


def _by_names(
    screen: Screen, options: argparse.Namespace, model: _ModelOutline, asked: dict[str, Any], memory: int | None
) -> int:
    if options.mesh is not None:
        raise ParseError("--mesh is for --rules; without rules the sizes are --tp, --pp, --dp, --ep and --etp")
    sizes = ParallelSizes(options.tp, options.pp, options.dp, options.ep, options.etp)
    layers = None if options.layers is None else [_number("--layers", one) for one in options.layers.split(",")]
    method, kinds = find_kinds(model.tensors, model.config, model.read)
    named = deployed_by_names(kinds, model.config, sizes, layers)
    if named.unknown:
        return print_unknown(screen, options, [f"{one.name}: {one.why}" for one in named.unknown])

    weights = NO_COMPONENTS if method is None else find_components(model.tensors, model.config, model.read)

    def made(sizes: ParallelSizes, sharding: str) -> TrainingState:
        own = deployed_by_names(kinds, model.config, sizes)
        return _state(own.deployment, model, options, _sharded(asked, sharding), weights)

    state = _state(named.deployment, model, options, asked, weights)
    ways = []
    if memory is not None and not state.fits(memory):
        trains = asked["optimizer"] is not None
        ways = nearest(
            memory, sizes, state.sharding, lambda s, how: made(s, how).fullest[1], state.fullest[1], trains=trains
        )
    return _answer(screen, options, Findings(state, memory, ways, tuple(named.rests_on), _notes(model)))


def _by_rules(
    screen: Screen, options: argparse.Namespace, model: _ModelOutline, asked: dict[str, Any], memory: int | None
) -> int:
    if (options.tp, options.pp, options.dp, options.ep, options.etp) != (1,) * 5 or options.layers is not None:
        raise ParseError(
            "--tp, --pp, --dp, --ep, --etp and --layers are for models without --rules; with --rules give --mesh"
        )
    from ..conversion.apply import rewritten_outline
    from ..deploy.read import no_mesh
    from ..quantized.outline import components_in
    from ..rules.layout_map import LayoutMap
    from ..rules.rewrites import Rewrites
    from .layouts import config_for, read_layouts
    from .notation import parse_mesh

    mesh = None if options.mesh is None else parse_mesh(options.mesh)
    given = config_for(options, options.model) or dict(model.config) or None
    with reading_for(options.model):
        layouts = read_layouts(options.rules, mesh, given)
    if layouts.world is None:
        raise no_mesh(options.rules, layouts)
    stored = {name: (shape, CODES.get(code) or DTYPES[code]) for name, (code, shape) in model.tensors.items()}
    rewrites = Rewrites.from_toml(options.rules, config=given)
    outline, weights = rewritten_outline(stored, rewrites, components_in(stored, model.config, model.read), model.read)
    tensors = {name: StoredLook(dtype.code or dtype.name, shape) for name, (shape, dtype) in outline.items()}

    def made(sharding: str) -> TrainingState:
        own = _ModelOutline(tensors, model.config, model.read)
        return _state(layouts, own, options, _sharded(asked, sharding), weights)

    state = made(asked["sharding"])
    if state.unmatched and isinstance(layouts, LayoutMap) and len(state.unmatched) == len(outline):
        return print_unknown(screen, options, [f"{name}: no rule matches it" for name in state.unmatched])
    ways = []
    if memory is not None and not state.fits(memory):
        ways = _other_shardings(memory, state, made, asked["optimizer"] is not None)
    rests = (f"rules of {options.rules.name}",)
    return _answer(screen, options, Findings(state, memory, ways, rests, _notes(model)))


def _sharded(asked: dict[str, Any], sharding: str) -> dict[str, Any]:
    """Return the same with another way to shard, which has settings and units of its own."""
    if sharding == asked["sharding"]:
        return asked
    return {**asked, "sharding": sharding, "settings": {}, "units": None}


def _other_shardings(
    memory: int, state: TrainingState, made: Callable[[str], TrainingState], trains: bool
) -> list[Way]:
    """Return the nearest other way to shard that fits in `memory`, if there is one; the mesh stays as it is."""
    sizes = ParallelSizes(dp=state.device_mesh.size)
    found = nearest(memory, sizes, state.sharding, lambda _, how: made(how).fullest[1], state.fullest[1], trains=trains)
    return [way for way in found if way.change == "sharding"]


def _state(
    layouts: LayoutMap | Deployment,
    model: _ModelOutline,
    options: argparse.Namespace,
    asked: dict[str, Any],
    weights: Components,
) -> TrainingState:
    tensors = model.tensors
    tied = {}
    if language_config(model.config).get("tie_word_embeddings") is True:
        names = [[name for name in tensors if pattern.search(name)] for pattern in (_OUTPUT, _WORDS)]
        # Where a checkpoint has both, the output layer is the embedding.
        tied = {names[0][0]: names[1][0]} if all(names) else {}
    caches: Sequence[Cache] = ()
    if options.cache is not None:
        from ..state import key_value_caches

        caches = key_value_caches(model.config, tensors, **_cache(options.cache))
    return training_state(tensors, layouts, caches=caches, quantized=weights, tied=tied, **asked)


def _model(options: argparse.Namespace) -> _ModelOutline:
    path = Path(options.model)
    if path.name != "config.json":
        from ..store.rewritten.model_tensors import described_tensors, is_described

        if is_described(path):
            listed = described_tensors(path, options.rules)
            config = {} if options.config is None else read_config(options.config)
            tensors = {name: StoredLook(dtype.code or dtype.name, shape) for name, (shape, dtype) in listed.items()}
            return _ModelOutline(tensors, config or _described_config(path), lambda name: None)
    with opened_model(options.model, options.config, options.rules) as (outline, given, read):
        kept = {name: read(name) for name in outline if name.endswith(("g_idx", "weight_shape"))}
        return _ModelOutline(outline, given, kept.get)


def _described_config(path: Path) -> Mapping[str, Any]:
    """Return the configuration that a file of JSON is, if it is one and not a list."""
    if path.suffix != ".json":
        return {}
    said = json.loads(path.read_bytes())
    return read_config(path) if "model_type" in said or "architectures" in said else {}


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that `training_state` gets, from the options."""
    sharding = options.sharding or ("none" if options.optimizer is None else "ddp")
    lora = None
    if options.lora is not None:
        rank, equals, targets = options.lora.partition("=")
        if not equals:
            raise ParseError(f"--lora {shown(options.lora)}: give the rank and a regular expression: 16='[qv]_proj'")
        lora = Lora(_number("--lora", rank), targets, _dtype("--lora-dtype", options.lora_dtype))
    return {
        "optimizer": _optimizer(options.optimizer),
        "sharding": sharding,
        "over": None if options.over is None else options.over.split(","),
        "group": options.group,
        "weights": _dtype("--weights", options.weights),
        "gradients": _dtype("--gradients", options.gradients),
        "masters": options.masters if options.masters == "none" else _dtype("--masters", options.masters),
        "frozen": options.frozen,
        "lora": lora,
        "units": options.units,
        "settings": dict(_setting(one) for one in options.set or ()),
    }


def _optimizer(text: str | None) -> Any:
    if text is None or text in OPTIMIZERS or "=" not in text:
        return text
    pairs = [_pair("--optimizer", one, "exp_avg=float32") for one in text.split(",")]
    return {name: _dtype("--optimizer", dtype) for name, dtype in pairs}


def _dtype(option: str, text: str | None) -> str | None:
    if text is not None and find_dtype(text) is None:
        raise ParseError(f"{option}: unknown dtype {shown(text)} (expected e.g. float32, bfloat16, F8_E4M3)")
    return text


def _setting(text: str) -> tuple[str, Any]:
    name, value = _pair("--set", text, "round_robin_gradients=true")
    if value in ("true", "false"):
        return name, value == "true"
    return name, int(value) if value.isascii() and value.isdecimal() and len(value) < 19 else value


def _cache(text: str) -> dict[str, Any]:
    given = dict(_pair("--cache", one, "batch=8,context=8192") for one in text.split(","))
    if unknown := [name for name in given if name not in _CACHE]:
        raise ParseError(f"--cache has {shown(unknown[0])}; it may have {', '.join(_CACHE)}")
    if missing := [name for name in _CACHE[:2] if name not in given]:
        raise ParseError(f"--cache {shown(text)}: {missing[0]} is missing, as in batch=8,context=8192")
    return {
        name: _dtype("--cache", value) if name == "dtype" else _number("--cache", value)
        for name, value in given.items()
    }


def _pair(option: str, text: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ParseError(f"{option} {shown(text)}: expected a name and a value, as in {example}")
    return name.strip(), value.strip()


def _number(option: str, text: str) -> int:
    text = text.strip()
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise ParseError(f"{option}: {shown(text)} is not a whole number")
    return int(text)


def _notes(model: _ModelOutline) -> list[str]:
    """Return sentences on parts of the model that are not counted, as the configuration states no tensors of them."""
    said = language_config(model.config)
    count = said.get("num_nextn_predict_layers")
    beyond = re.compile(rf"(?:^|\.)(?:mtp\.|layers\.{said.get('num_hidden_layers')}\.)")
    if type(count) is int and count > 0 and not any(beyond.search(name) for name in model.tensors):
        return [
            f"not counted: layers that predict further tokens (num_nextn_predict_layers = {count}), because the "
            "configuration does not describe their tensors"
        ]
    return []


def _answer(screen: Screen, options: argparse.Namespace, findings: Findings) -> int:
    state, memory, ways, rests_on, notes = findings
    does_fit = memory is None or state.fits(memory)
    if options.html is not None:
        from ..state.page import page_of

        options.html.write_text(page_of(state, f"{Path(options.model).name}: training state"), encoding="utf-8")
    if options.json:
        found: dict[str, Any] = {"model": options.model, "known": True, **state.to_dict()}
        if memory is not None:
            found |= {"memory": memory, "fits": does_fit}
            found["ways"] = [
                {"change": way.change, "sharding": way.sharding, **way.sizes._asdict(), "allocated": way.allocated,
                 "fits": way.fits} for way in ways
            ]  # fmt: skip
        if options.all:
            found["fullest"]["tensors"] = [kept._asdict() for kept in state.of(state.fullest[0])]
        found |= {"rests_on": list(rests_on), "notes": notes}
        print(json.dumps(found | ({} if options.html is None else {"html": str(options.html)}), indent=2))
    else:
        print_findings(screen, options, findings)
    return 0 if does_fit else 1
