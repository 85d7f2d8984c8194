"""Megatron-Core's arrangements: ranks, pipeline stages, and the deployment of a GPT model. Needs no Megatron.

| module | answers |
|---|---|
| `ranks` | groups of ranks, in the order of Megatron |
| `pipeline` | which stage has which layer |
| `gpt` | the deployment of a GPT model |
"""

from .gpt import gpt
from .pipeline import pipeline
from .ranks import RankGroups, Ranks

__all__ = ["RankGroups", "Ranks", "gpt", "pipeline"]
