"""Checkpoints on disk and in stores: opened, whatever their format, written, verified and compared.

| module | answers |
|---|---|
| `data/` | bytes in files and objects, and boxes of them read |
| `tensors/` | tensors and checkpoints as every format gives them |
| `formats/` | formats that are read |
| `rewritten/` | checkpoints seen in another way |
| `write/` | the write path |
| `compare/` | digests, differences, proofs, manifests |
| `learn/` | rewrites worked out from two checkpoints |
"""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .compare.damage import Damage, DamageError, VerifyReport
    from .compare.diff import Difference, Differences, diff_checkpoints
    from .compare.manifest import manifest_of
    from .compare.memory import MemoryDigests, MemoryFault, check_memory, check_sums, memory_digests
    from .compare.prove import verify_checkpoint
    from .data.digest import Digest, digest
    from .data.objects import ObjectPath
    from .formats.open import open_checkpoint
    from .learn.learn import Learned, learn_rewrites
    from .learn.recorded import LearnedRules, RecordedModel, learn_rules
    from .rewritten.ranges import DeviceReads, ReadArray, device_reads
    from .tensors.checkpoint import StoredCheckpoint, StoredObject
    from .tensors.digests import tensor_digests
    from .tensors.stored import StoredTensor
    from .tensors.stored_pieces import StoredPiece
    from .tensors.training import Total, TrainedParameter, Training
    from .write.places.report import WriteOutline, WriteReport
    from .write.places.task import Task, TaskReceipt
    from .write.request.reshape import plan_checkpoint, reshard_checkpoint
    from .write.request.save import save_checkpoint
    from .write.run.checkpoint_plan import CheckpointPlan

__all__ = [
    "CheckpointPlan",
    "Damage",
    "DamageError",
    "DeviceReads",
    "Difference",
    "Differences",
    "Digest",
    "Learned",
    "LearnedRules",
    "MemoryDigests",
    "MemoryFault",
    "ObjectPath",
    "ReadArray",
    "RecordedModel",
    "StoredCheckpoint",
    "StoredObject",
    "StoredPiece",
    "StoredTensor",
    "Task",
    "TaskReceipt",
    "Total",
    "TrainedParameter",
    "Training",
    "VerifyReport",
    "WriteOutline",
    "WriteReport",
    "check_memory",
    "check_sums",
    "device_reads",
    "diff_checkpoints",
    "digest",
    "learn_rewrites",
    "learn_rules",
    "manifest_of",
    "memory_digests",
    "open_checkpoint",
    "plan_checkpoint",
    "reshard_checkpoint",
    "save_checkpoint",
    "tensor_digests",
    "verify_checkpoint",
]

__getattr__, __dir__ = lazy(
    globals(),
    {
        "compare.diff": ("Difference", "Differences", "diff_checkpoints"),
        "compare.manifest": ("manifest_of",),
        "compare.memory": ("MemoryDigests", "MemoryFault", "check_memory", "check_sums", "memory_digests"),
        "compare.damage": ("Damage", "DamageError", "VerifyReport"),
        "compare.prove": ("verify_checkpoint",),
        "data.digest": ("Digest", "digest"),
        "data.objects": ("ObjectPath",),
        "formats.open": ("open_checkpoint",),
        "learn.learn": ("Learned", "learn_rewrites"),
        "learn.recorded": ("LearnedRules", "RecordedModel", "learn_rules"),
        "rewritten.ranges": ("ReadArray", "DeviceReads", "device_reads"),
        "tensors.checkpoint": ("StoredCheckpoint", "StoredObject"),
        "tensors.digests": ("tensor_digests",),
        "tensors.stored": ("StoredPiece", "StoredTensor"),
        "tensors.training": ("Total", "TrainedParameter", "Training"),
        "write.places.task": ("Task", "TaskReceipt"),
        "write.places.report": ("WriteOutline", "WriteReport"),
        "write.request.reshape": ("plan_checkpoint", "reshard_checkpoint"),
        "write.request.save": ("save_checkpoint",),
        "write.run.checkpoint_plan": ("CheckpointPlan",),
    },
)
