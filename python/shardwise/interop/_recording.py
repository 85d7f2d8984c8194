"""Parts of all adapters for recording: small models of a family, groups of processes of which there is one, errors."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from .._arguments import integer
from .._text import shown
from ..deploy.recording import Recording
from ..errors import LayoutError
from ..rules.names import keys_of
from ..store import RecordedModel

__all__ = [
    "LoneGroup",
    "check_sizes",
    "check_total",
    "folder_of",
    "recorded_models",
    "recorded_rank",
    "refused_by",
    "with_few_layers",
]

#: The most elements of a model that is recorded: its ranks are loaded several times.
_MOST = 1 << 28
#: The sizes of three small models, by what they are; a model with as many key-value heads as heads keeps that.
_SMALL = {
    "layers": (3, 4, 5),
    "hidden": (96, 160, 224),
    "inner": (144, 208, 272),
    "heads": (8, 8, 16),
    "kv_heads": (2, 8, 4),
    "head_dim": (16, 24, 20),
    "v_head_dim": (12, 20, 28),
    "nope_head_dim": (24, 12, 8),
    "rope_head_dim": (8, 16, 4),
    "q_rank": (36, 52, 44),
    "kv_rank": (28, 44, 60),
    "vocabulary": (260, 340, 420),
    "positions": (64, 64, 64),
    "experts": (4, 8, 12),
    "expert_inner": (48, 80, 112),
    "shared_inner": (40, 88, 120),
    "linear_k_heads": (4, 4, 8),
    "linear_v_heads": (8, 4, 8),
    "linear_k_head_dim": (12, 20, 16),
    "linear_v_head_dim": (8, 28, 24),
}
#: Further keys, which may be no larger in small models.
_AT_MOST = {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "pad_token_id": 0}
#: Lists with an entry for each layer.
_LAYERS = (*keys_of("layers"), "num_layers", "depth", "encoder_layers", "decoder_layers")
_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type")


class LoneGroup:
    """A group of processes of which this one is the only one there: what layers ask about it, and no communication."""

    def __init__(self, rank: int, size: int) -> None:
        self.world_size, self.rank_in_group, self.rank, self.local_rank = size, rank, rank, rank
        self.ranks, self.first_rank, self.last_rank = list(range(size)), 0, size - 1
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device_group = self.cpu_group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
        self.device, self.unique_name, self.backend = "cpu", f"shardwise:{rank}/{size}", "none"

    def all_reduce(self, value: Any, *_: Any, **__: Any) -> Any:
        """Return the same array: a group of one has no other arrays to add."""
        return value

    def barrier(self) -> None:
        """Wait for nobody."""


def recorded_rank(
    tensors: Mapping[str, Any], make: Callable[[], Any], rank: int, computed: Literal["refuse", "leave"]
) -> Recording:
    """Record what the `load_weights` of an engine's model does on a rank.

    Args:
        tensors: the shape and dtype of each tensor of the checkpoint.
        make: makes the rank's model, anew for each pass over the tensors.
        rank: the label of the recording.
        computed: what to do with parameters that are computed; see `shardwise.record`.
    """
    import torch

    from .torch import record

    def load(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        with torch.no_grad():
            model = make()
            for value in model.parameters():
                # What no tensor fills is zero each time, and whole numbers are exact.
                value.data = torch.zeros(value.shape, dtype=torch.float32 if value.is_floating_point() else value.dtype)
            model.load_weights((name, value.clone()) for name, value in given.items())  # Some write to what they get.
        yield from model.named_parameters()

    return record(tensors, load, rank, computed=computed)


def recorded_models(
    config: Mapping[str, Any],
    ranks: Callable[..., Sequence[Recording]],
    counts: Sequence[int],
    stages: Sequence[int],
    layers: Sequence[int] | None = None,
) -> list[RecordedModel]:
    """Record three small models of a family, whose sizes replace those of a configuration.

    Args:
        config: the contents of a `config.json`.
        ranks: records the ranks of a model, given its configuration, `tp` and `pp`.
        counts: the numbers of ranks of tensor parallelism.
        stages: the numbers of stages, if there are to be any.
        layers: the number of layers of each model, if the engine does not take any number of them.
    """
    found = []
    for number in range(3):
        small = _scaled(config, _SMALL if layers is None else {**_SMALL, "layers": tuple(layers)}, number)
        made: dict[Any, Sequence[Recording]] = {}
        # Of stages two ranks each are enough: what is cut is cut on one stage, too.
        pairs = [*((1, tp) for tp in counts), *((pp, min(2, max(counts))) for pp in stages if pp > 1)]
        for pp, tp in pairs:
            made[(pp, tp) if stages else tp] = ranks(small, tp=tp, pp=pp)
        found.append(RecordedModel(small, made))
    return found


def _scaled(config: Mapping[str, Any], sizes: Mapping[str, tuple[int, ...]], number: int) -> dict[str, Any]:
    """Return the configuration with the sizes of one of the small models, also within its parts."""
    found = dict(config)
    for size, values in sizes.items():
        for key in keys_of(size):
            if type(found.get(key)) is int:
                found[key] = values[number]
    heads, groups = (next((key for key in keys_of(size) if key in config), "") for size in ("heads", "kv_heads"))
    if heads and groups and config[groups] in (1, config[heads]):
        found[groups] = 1 if config[groups] == 1 else found[heads]
    for key, most in _AT_MOST.items():
        if type(found.get(key)) is int:
            found[key] = min(found[key], most)
    layers = next((found[key] for key in keys_of("layers") if key in found), None)
    for key in _BY_LAYER:
        if isinstance(found.get(key), list):
            found[key] = found[key][:layers]
    for key, value in found.items():
        if isinstance(value, Mapping) and key.endswith("config"):
            found[key] = _scaled(value, sizes, number)
    return found


def with_few_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with all of its values, small, with the fewest layers that are of each kind."""
    small = _scaled(config, _SMALL, 0)
    key = next((key for key in _LAYERS if type(config.get(key)) is int), None)
    if key is not None:
        lists = {name: each for name, each in config.items() if isinstance(each, list) and len(each) == config[key] > 0}
        kinds = {name: list(dict.fromkeys(each)) for name, each in lists.items() if isinstance(each[0], str)}
        count = max([4, *map(len, kinds.values())])
        small |= {name: count for name in _LAYERS if type(config.get(name)) is int}
        for name, each in lists.items():
            entries = kinds.get(name, each)
            small[name] = [entries[at % len(entries)] for at in range(count)]
    for name, value in config.items():
        if isinstance(value, Mapping) and name.endswith("config"):
            small[name] = with_few_layers(value)
    return small


def check_sizes(**sizes: int) -> None:
    """Check numbers of ranks.

    Raises:
        LayoutError: if one is no whole number from 1 on; the message names it.
    """
    for name, size in sizes.items():
        if integer(name, size) < 1:
            raise LayoutError(f"{name} must be 1 or more, got {size}")


def check_total(tensors: Mapping[str, Any]) -> None:
    """Check that a model is small enough to be loaded several times.

    Raises:
        LayoutError: if it has too many elements.
    """
    total = sum(math.prod(getattr(one, "shape", None) or one[0]) for one in tensors.values())
    if total > _MOST:
        raise LayoutError(
            f"the model has {total} elements, and recording loads them several times: give a configuration with "
            f"smaller sizes, of at most {_MOST} elements"
        )


@contextmanager
def folder_of(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a folder with a `config.json`, from which an engine reads a model's configuration."""
    if not isinstance(config.get("architectures"), list) or not config["architectures"]:
        raise LayoutError(
            "the configuration has no architectures, and the engine needs them to choose its class: add them, as "
            f'"architectures": ["LlamaForCausalLM"]; the model_type is {shown(config.get("model_type"))}'
        )
    with tempfile.TemporaryDirectory() as folder:
        # Weights of any dtype are numbered in float32, which holds 24 bits of a number.
        text = json.dumps({key: value for key, value in config.items() if key not in ("torch_dtype", "dtype")})
        Path(folder, "config.json").write_text(text)
        yield folder


@contextmanager
def refused_by(engine: str, what: str) -> Iterator[None]:
    """Name the engine, and the request, in any error of the engine's own code in the block."""
    try:
        yield
    except LayoutError:
        raise
    except Exception as error:
        raise LayoutError(f"{engine} cannot load the model with {what}: {type(error).__name__}: {error}") from error
