"""Megatron-Core's arrangements: ranks, pipeline stages, and the deployment of a GPT model. Needs no Megatron."""

from .gpt import gpt
from .pipeline import pipeline
from .ranks import Groups, Ranks

__all__ = ["Groups", "Ranks", "gpt", "pipeline"]
