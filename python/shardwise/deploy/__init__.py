"""Deployments: a model on the devices of a trainer or of an engine, over several meshes, stages and experts.

| module | answers |
|---|---|
| `world` | devices, and meshes that are views of them |
| `rule`, `numbers` | one rule: mesh, coordinates, layout; whole numbers in it |
| `deployment` | rules over a world; who holds what of a tensor, by its name |
| `lookup` | which rule a name has, at which coordinates, and the layout over the devices there |
| `stages`, `experts`, `fsdp` | pipelines, expert maps, flat units |
| `engines`, `engine_rules`, `megatron` | presets of vLLM, SGLang and Megatron; what engines' presets are made of |
| `parameters` | arrays of a process that hold several tensors |
| `manifest` | who holds what, as JSON |
| `record`, `recording`, `carried` | a process's layout, found through its own loader; pieces from element numbers |
| `positions` | places of single elements in the memory of devices, both ways |
| `presets`, `notation` | presets by one short text: `vllm(tp=2, pp=2)` |
| `toml`, `read`, `drawn` | files of deployments; all that a rules file says; notebooks |
"""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from . import megatron as megatron
    from .deployment import Deployment
    from .engines import sglang, vllm
    from .experts import ExpertMap, balanced_experts, least_moves
    from .fsdp import fsdp2
    from .manifest import Manifest, ManifestTensor
    from .parameters import FusedParameter, LocalParameter, ParameterPiece, Repeat
    from .positions import Found, FoundShards, Positions, positions_of
    from .presets import Preset, preset
    from .recording import RecordedParameter, RecordedPiece, Recording, join_manifests
    from .rule import DeploymentRule
    from .stages import Chunk, Stages

__all__ = [
    "Chunk",
    "Deployment",
    "DeploymentRule",
    "ExpertMap",
    "Found",
    "FoundShards",
    "FusedParameter",
    "LocalParameter",
    "Manifest",
    "ManifestTensor",
    "ParameterPiece",
    "Positions",
    "Preset",
    "RecordedParameter",
    "RecordedPiece",
    "Recording",
    "Repeat",
    "Stages",
    "balanced_experts",
    "fsdp2",
    "join_manifests",
    "least_moves",
    "megatron",
    "positions_of",
    "preset",
    "sglang",
    "vllm",
]

__getattr__, __dir__ = lazy(
    globals(),
    {
        "deployment": ("Deployment",),
        "engines": ("sglang", "vllm"),
        "experts": ("ExpertMap", "balanced_experts", "least_moves"),
        "fsdp": ("fsdp2",),
        "manifest": ("Manifest", "ManifestTensor"),
        "parameters": ("FusedParameter", "LocalParameter", "ParameterPiece", "Repeat"),
        "positions": ("Found", "FoundShards", "Positions", "positions_of"),
        "presets": ("Preset", "preset"),
        "recording": ("RecordedParameter", "RecordedPiece", "Recording", "join_manifests"),
        "rule": ("DeploymentRule",),
        "stages": ("Chunk", "Stages"),
    },
    modules=("megatron",),
)
