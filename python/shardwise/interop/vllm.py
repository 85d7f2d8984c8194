"""A load format of vLLM: each rank reads its own slices of a checkpoint of any format. vLLM imports this module itself.

`vllm serve MODEL --load-format shardwise` loads what is in the folder of the model; with
`--model-loader-extra-config '{"checkpoint": "s3://bucket/step-900"}'` the weights of another checkpoint, of any format
that `open_checkpoint` opens, under the names of Hugging Face. `"rules"` names the rules, where the type of the model
does not say which. Each parameter is filled by the rules of its family, which were compared with vLLM's own loaders; a
model of which one would not be filled exactly is refused before anything is read. Not loaded are quantized models, and
experts that are placed whole (`--enable-expert-parallel`).
"""

from __future__ import annotations

from typing import Any

from .._text import shown
from ..errors import LayoutError
from ..store import open_checkpoint
from ._engine import RankRules, fill

__all__ = ["register_load_format"]


def register_load_format() -> None:
    """Make the load format `"shardwise"` known to vLLM, which calls this as the entry point of a plugin."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class ShardwiseModelLoader(BaseModelLoader):  # type: ignore[misc]
        """Reads what a rank holds, and no more."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            given = dict(load_config.model_loader_extra_config or {})
            self._checkpoint, self._rules = given.pop("checkpoint", None), given.pop("rules", None)
            if given:
                raise LayoutError(
                    f"model_loader_extra_config has {shown(sorted(given))}; the load format 'shardwise' takes "
                    "'checkpoint' and 'rules'"
                )

        def download_model(self, model_config: Any) -> None:
            """Do nothing: the weights are read where they are."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Fill the parameters of a model."""
            from vllm.distributed import (
                get_pp_group,
                get_tensor_model_parallel_rank,
                get_tensor_model_parallel_world_size,
            )

            path = self._checkpoint or getattr(model_config, "model_weights", "") or model_config.model
            rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
            rules = RankRules.of("vllm", model_config.hf_config.to_dict(), rank, ranks, rules=self._rules)
            parameters = dict(model.named_parameters(remove_duplicate=False))
            with open_checkpoint(path) as checkpoint:
                fill(parameters, checkpoint, rules, has_all_layers=get_pp_group().world_size == 1)

    register_model_loader("shardwise")(ShardwiseModelLoader)
