"""Safetensors checkpoints as zero-copy arrays: `open_safetensors`, and what it gives."""

from .checkpoint import Checkpoint, open_safetensors
from .header import Entry

__all__ = ["Checkpoint", "Entry", "open_safetensors"]
