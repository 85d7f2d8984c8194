"""Checkpoints on disk: `open_checkpoint` opens any format, `open_safetensors` gives the tensors of one as arrays."""

from .digests import tensor_digests
from .objects import ObjectPath
from .open import open_checkpoint
from .protocol import StoredCheckpoint, StoredObject, StoredPiece, StoredTensor
from .prove import Damage, DamageError, Difference, VerifyReport, diff_checkpoints, verify_checkpoint
from .safetensors.checkpoint import Checkpoint, open_safetensors
from .safetensors.header import Entry
from .write.checkpoint_plan import CheckpointPlan
from .write.receipts import TaskReceipt
from .write.reports import WriteOutline, WriteReport
from .write.reshape import plan_checkpoint, reshard_checkpoint, save_checkpoint
from .write.task import CheckpointTask

__all__ = [
    "Checkpoint",
    "CheckpointPlan",
    "CheckpointTask",
    "Damage",
    "DamageError",
    "Difference",
    "Entry",
    "ObjectPath",
    "StoredCheckpoint",
    "StoredObject",
    "StoredPiece",
    "StoredTensor",
    "TaskReceipt",
    "VerifyReport",
    "WriteOutline",
    "WriteReport",
    "diff_checkpoints",
    "open_checkpoint",
    "open_safetensors",
    "plan_checkpoint",
    "reshard_checkpoint",
    "save_checkpoint",
    "tensor_digests",
    "verify_checkpoint",
]
