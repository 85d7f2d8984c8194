"""Training state: the weights, gradients, masters, moments and caches that each device holds and allocates.

| module | answers |
|---|---|
| `optimizers` | which arrays an optimizer keeps for a parameter |
| `recipe`, `shardings` | the arrays kept for parameters; what ranks that share them hold and allocate, as PyTorch does
|
| `flat`, `deepspeed`, `megatron` | flat arrays in equal parts; the same for ranks of DeepSpeed and Megatron |
| `buckets` | where Megatron's buffers have parameters |
| `adapters`, `caches` | adapters of LoRA; caches of keys and values |
| `asked`, `described` | the arguments: ways to shard and settings; the tensors of a model |
| `placed`, `sharding_groups` | the layouts of tensors, and the axes of data parallelism; devices that share state |
| `training`, `maker`, `result` | all of a model on all devices; how it is made; the figures |
| `drawn`, `page` | bars; a page of HTML |
"""

from .adapters import Lora
from .caches import Cache, key_value_caches
from .optimizers import OPTIMIZERS, Optimizer, optimizer_of
from .recipe import KINDS, SHARDINGS
from .result import NOT_COUNTED, Kept, TrainingState
from .training import training_state

__all__ = [
    "KINDS",
    "NOT_COUNTED",
    "OPTIMIZERS",
    "SHARDINGS",
    "Cache",
    "Kept",
    "Lora",
    "Optimizer",
    "TrainingState",
    "key_value_caches",
    "optimizer_of",
    "training_state",
]
