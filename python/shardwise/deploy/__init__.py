"""Deployments: a model on the devices of a trainer or of an engine, over several meshes, stages and experts."""

from . import megatron
from .deployment import Deployment
from .engines import sglang, vllm
from .experts import ExpertMap, balanced_experts
from .fsdp import fsdp2
from .manifest import Manifest, ManifestTensor
from .parameters import FusedParameter, LocalParameter, ParameterPiece, Repeat
from .rule import DeploymentRule
from .stages import Chunk, Stages

__all__ = [
    "Chunk",
    "Deployment",
    "DeploymentRule",
    "ExpertMap",
    "FusedParameter",
    "LocalParameter",
    "Manifest",
    "ManifestTensor",
    "ParameterPiece",
    "Repeat",
    "Stages",
    "balanced_experts",
    "fsdp2",
    "megatron",
    "sglang",
    "vllm",
]
