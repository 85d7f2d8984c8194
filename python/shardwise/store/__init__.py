"""Checkpoints on disk and in stores: opened, whatever their format, written, verified and compared."""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .checkpoint import StoredCheckpoint, StoredObject
    from .diff import Difference, Differences, diff_checkpoints
    from .digests import tensor_digests
    from .held import manifest_of
    from .learn.learn import Learned, learn_rewrites
    from .objects import ObjectPath
    from .open import open_checkpoint
    from .prove import Damage, DamageError, VerifyReport, verify_checkpoint
    from .ranges import ReadArray, ReadPlan, read_plan
    from .stored import StoredPiece, StoredTensor
    from .write.checkpoint_plan import CheckpointPlan
    from .write.reshape import plan_checkpoint, reshard_checkpoint
    from .write.save import save_checkpoint
    from .write.task import Task, TaskReceipt
    from .write.work import WriteOutline, WriteReport

__all__ = [
    "CheckpointPlan",
    "Damage",
    "DamageError",
    "Difference",
    "Differences",
    "Learned",
    "ObjectPath",
    "ReadArray",
    "ReadPlan",
    "StoredCheckpoint",
    "StoredObject",
    "StoredPiece",
    "StoredTensor",
    "Task",
    "TaskReceipt",
    "VerifyReport",
    "WriteOutline",
    "WriteReport",
    "diff_checkpoints",
    "learn_rewrites",
    "manifest_of",
    "open_checkpoint",
    "plan_checkpoint",
    "read_plan",
    "reshard_checkpoint",
    "save_checkpoint",
    "tensor_digests",
    "verify_checkpoint",
]

__getattr__, __dir__ = lazy(
    globals(),
    {
        "digests": ("tensor_digests",),
        "held": ("manifest_of",),
        "learn.learn": ("Learned", "learn_rewrites"),
        "objects": ("ObjectPath",),
        "open": ("open_checkpoint",),
        "checkpoint": ("StoredCheckpoint", "StoredObject"),
        "stored": ("StoredPiece", "StoredTensor"),
        "diff": ("Difference", "Differences", "diff_checkpoints"),
        "prove": ("Damage", "DamageError", "VerifyReport", "verify_checkpoint"),
        "ranges": ("ReadArray", "ReadPlan", "read_plan"),
        "write.checkpoint_plan": ("CheckpointPlan",),
        "write.work": ("WriteOutline", "WriteReport"),
        "write.reshape": ("plan_checkpoint", "reshard_checkpoint"),
        "write.save": ("save_checkpoint",),
        "write.task": ("Task", "TaskReceipt"),
    },
)
