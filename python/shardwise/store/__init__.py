"""Checkpoints on disk: `open_checkpoint` opens any form, `open_safetensors` gives one form's tensors as arrays."""

from .open import FORMS, Form, open_checkpoint
from .protocol import Piece, StoredCheckpoint, StoredObject, StoredTensor
from .safetensors.checkpoint import Checkpoint, open_safetensors
from .safetensors.header import Entry

__all__ = [
    "FORMS",
    "Checkpoint",
    "Entry",
    "Form",
    "Piece",
    "StoredCheckpoint",
    "StoredObject",
    "StoredTensor",
    "open_checkpoint",
    "open_safetensors",
]
