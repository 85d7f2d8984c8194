"""Checkpoints on disk and in stores: opened, whatever their format, written, verified and compared.

| module | answers |
|---|---|
| `location`, `objects`, `parts`, `opened` | paths and URLs; objects; parts; folders opened without links |
| `files`, `object_files`, `mapped`, `engine`, `boxes`, `codecs` | bytes read by boxes, and decompressed |
| `pieces`, `coverage`, `chunks` | boxes with the place of their bytes; gaps and overlaps; grids of chunks |
| `stored`, `checkpoint`, `kinds`, `text`, `drawn` | stored tensors; checkpoints; kinds; names and shapes; notebooks |
| `open` | which format a path has |
| `safetensors/`, `torch/`, `orbax/`, `keras`, `megatron`, `sharded`, `ranks` | formats that are read |
| `model_config`, `quantized`, `carried` | `config.json`; quantized weights; files that go along |
| `formats/` | formats that are written |
| `tensors/`, `described`, `ranges`, `rewritten` | tensors to be written; of a configuration; of one device; rewritten |
| `digests`, `frames`, `prove`, `diff` | digests; bytes around tensors; verified; compared |
| `held` | manifests of who holds what |
| `learn/` | rewrites worked out |
| `sources`, `same_files`, `sections` | sources of plans; files that must stay the same; long lists |
| `write/` | the write path |
"""

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
