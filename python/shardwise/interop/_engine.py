"""The parameters of one rank of an inference engine, filled from any checkpoint by the rules of its family."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .._text import counted, shown
from ..errors import LayoutError
from ..mesh import DeviceMesh
from ..partition import Partition
from ..placing import Placing, partition_of, placing_of
from ..rules.layout_map import LayoutMap
from ..rules.rewrites import Rewrites
from ..rules.shipped import example_rules
from ..rules.toml import read_models
from ..rules.wrapped import model_types
from ..store import StoredCheckpoint, StoredTensor
from ..store.rewritten.names import Naming
from ..store.rewritten.view import rewritten_view
from ._torch_reader import read_into

__all__ = ["RankRules", "engine_rules", "fill"]

#: The bias of experts' second projection, which all ranks add: the first has it, the others zeros.
_ADDED_ONCE = re.compile(r"\.experts\..*\bw2(_weight)?_bias$")


def engine_rules(engine: str, config: Mapping[str, Any]) -> str:
    """Return the name of the rules that come with the package for an engine and a model.

    Raises:
        LayoutError: if there are none for its type, or several.

    >>> engine_rules("vllm", {"model_type": "llama"}), engine_rules("sglang", {"model_type": "qwen3"})
    ('vllm/llama', 'vllm/qwen3')
    """
    types = model_types(config)
    # Where SGLang holds a family as vLLM does, it has no file of its own.
    for folder in dict.fromkeys((engine, "vllm")):
        found = [
            name
            for name, path in example_rules().items()
            if name.startswith(f"{folder}/") and "-mtp" not in name and not {*types}.isdisjoint(read_models(path))
        ]
        found = [name for name in found if not name.endswith("-mxfp4")]
        if len(found) == 1:
            return found[0]
        if found:
            raise LayoutError(f"several rules are for models of the type {shown(types)}: {', '.join(found)}; name one")
    raise LayoutError(
        f"there are no rules of {engine} for a model of the type {shown(types)}; `shardwise rules` lists those of the "
        "package; you can give a file of your own"
    )


class RankRules(NamedTuple):
    """The rules of an engine for a model, and one rank of those that share its tensors.

    Attributes:
        source: The name or the path of the rules.
        layouts: The cuts of the engine's parameters.
        rewrites: The way from Hugging Face's tensors to these.
        rank: The rank within its group of tensor parallelism.
        ranks: The number of ranks in the group.
    """

    source: str
    layouts: Placing
    rewrites: Rewrites
    rank: int
    ranks: int

    @classmethod
    def of(
        cls, engine: str, config: Mapping[str, Any], rank: int, ranks: int, *, rules: str | None = None
    ) -> RankRules:
        """Read the rules of an engine for the model with this configuration.

        Args:
            engine: `"vllm"` or `"sglang"`.
            config: the model's configuration.
            rank: the rank whose parameters are filled, from 0.
            ranks: the number of ranks.
            rules: the rules by name or path; by default those for the type of the model.

        Raises:
            LayoutError: if there are no rules for the model, or it is quantized.
        """
        if config.get("quantization_config"):
            raise LayoutError(
                "the model has a quantization_config: quantized weights are not loaded; use the engine's own"
            )
        source = engine_rules(engine, config) if rules is None else rules
        layouts = placing_of(LayoutMap.from_toml(source, DeviceMesh((ranks,), ("tp",)), config=config))
        return cls(source, layouts, Rewrites.from_toml(source, config=config), rank, ranks)

    @property
    def label(self) -> str:
        """The label of the rank's device."""
        return f"cpu:{self.rank}"

    def partition_for(self, name: str, tensor: StoredTensor, parameter: Any) -> Partition | None:
        """Return the partition of a tensor that is read into a parameter; `None` if each rank has it whole.

        Raises:
            LayoutError: if the parameter is of another shape than the rules say, or of another kind of dtype.
        """
        partition = partition_of(self.layouts, name, tensor.shape, "even")
        if not isinstance(partition, Partition | None):
            raise LayoutError(
                f"{shown(name)} is cut within blocks, so that two ranks share a block; this is not supported"
            )
        held = tensor.shape if partition is None else partition.holder_shape(self.label)
        theirs = tuple(parameter.shape)
        if theirs != held:
            raise LayoutError(
                f"{shown(name)} has the shape {theirs} in the model, but {self.source} gives it {held} on rank "
                f"{self.rank} of {self.ranks}: the engine cuts it differently"
            )
        if not (parameter.is_floating_point() or str(parameter.dtype) == f"torch.{tensor.dtype}"):
            raise LayoutError(f"{shown(name)} is {parameter.dtype} in the model, and {tensor.dtype} in the file")
        return partition


def fill(
    parameters: Mapping[str, Any], checkpoint: StoredCheckpoint, rules: RankRules, *, has_all_layers: bool = True
) -> int:
    """Read what a rank of an engine holds of a model into its parameters, and return how many bytes that are.

    Args:
        parameters: the rank's parameters by name, with all names of those that have several: tensors of PyTorch.
        checkpoint: an open checkpoint with the tensors of Hugging Face.
        rules: the engine's rules, and the rank.
        has_all_layers: whether the rank has all layers, or those of a stage.

    Raises:
        LayoutError: if a parameter is in no tensor, a tensor in no parameter, or one is of another shape than the rules
            say. Names it. Nothing is read before.
    """
    training = checkpoint.training
    weights = checkpoint.part(lambda name: not training.is_state(name))
    view = rewritten_view(weights, Naming(rewrites=rules.rewrites))
    parts: dict[str, Partition | None] = {}
    for name, tensor in view.items():
        if name in parameters:
            parts[name] = rules.partition_for(name, tensor, parameters[name])
        elif has_all_layers:
            raise LayoutError(
                f"{rules.source} makes {shown(name)} from {checkpoint.path}, but the model has no such parameter"
            )
    filled = {parameters[name].data_ptr() for name in parts}
    lacking = ((name, one) for name, one in parameters.items() if name not in parts and one.numel())
    missing = [name for name, one in lacking if one.data_ptr() not in filled]
    if missing:
        raise LayoutError(
            f"no tensor of {checkpoint.path} holds {counted(len(missing), 'parameter')} of the model: "
            f"{shown(missing[:3])}"
        )
    count = 0
    for name, partition in parts.items():
        target, tensor = parameters[name].detach(), view[name]
        if rules.rank and _ADDED_ONCE.search(name):
            target.zero_()
            continue
        if partition is None:
            read_into(tensor, tuple(slice(0, size) for size in tensor.shape), target)
            count += tensor.nbytes
            continue
        pieces = partition.pieces(rules.label)
        sizes = [math.prod(side.stop - side.start for side in piece.box) for piece in pieces]
        if sum(sizes) < target.numel():
            target.zero_()  # What no piece covers is padding.
        for piece in pieces:
            assert isinstance(piece.start, tuple)
            sides = zip(piece.box, piece.start, strict=True)
            read_into(tensor, piece.box, target[tuple(slice(at, at + one.stop - one.start) for one, at in sides)])
        count += sum(sizes) * tensor.bits // 8
    return count
