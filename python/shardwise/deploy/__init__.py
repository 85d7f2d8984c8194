"""Deployments: a model on the devices of a trainer or of an engine, over several meshes, stages and experts.

| module | answers |
|---|---|
| `world` | devices, and meshes that are views of them |
| `rule`, `numbers` | one rule: mesh, coordinates, layout; whole numbers in it |
| `deployment` | rules over a world; who holds what of a tensor, by its name |
| `lookup`, `ready_rule` | which rule a name has, at which coordinates, and the layout over the devices there |
| `stages`, `experts`, `fsdp` | pipelines, expert maps, flat units |
| `engines`, `engine_rules`, `megatron` | presets of vLLM, SGLang and Megatron; what engines' presets are made of |
| `parameters` | arrays of a process that hold several tensors |
| `manifest`, `manifest_json`, `joined` | who holds what; its parts as JSON; those of several processes |
| `record`, `recording`, `element_rows` | a process's layout, found through its loader; pieces from element numbers |
| `numbered_tensors` | the tensors that its loader gets |
| `positions` | places of single elements in the memory of devices, both ways |
| `offsets`, `sparse_values` | offsets given, and what is found there; values of numpy or PyTorch, and memory for them |
| `presets`, `notation` | presets by one short text: `vllm(tp=2, pp=2)` |
| `preset_model`, `preset_layouts` | the model that a preset is made for; deployments on its stages |
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
    from .joined import join_manifests
    from .manifest import Manifest, ManifestTensor
    from .offsets import Found, FoundShards
    from .parameters import FusedParameter, LocalParameter, ParameterPiece, Repeat
    from .positions import Positions, positions_of
    from .presets import Preset, preset
    from .recording import RecordedParameter, RecordedPiece, Recording
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
        "offsets": ("Found", "FoundShards"),
        "positions": ("Positions", "positions_of"),
        "presets": ("Preset", "preset"),
        "joined": ("join_manifests",),
        "recording": ("RecordedParameter", "RecordedPiece", "Recording"),
        "rule": ("DeploymentRule",),
        "stages": ("Chunk", "Stages"),
    },
    modules=("megatron",),
)
