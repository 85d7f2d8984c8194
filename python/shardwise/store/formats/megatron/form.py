"""Folders of Megatron's iterations: finds the last one, and its format."""

from __future__ import annotations

from typing import Any

from ...._text import shown
from ....errors import ParseError
from ...data.location import Location, entries_of, first_bytes, read_json
from ...tensors.checkpoint import StoredCheckpoint
from .legacy import open_ranks
from .torch_dist import open_iteration

__all__ = ["open_form"]

_LATEST = "latest_checkpointed_iteration.txt"


def open_form(path: Location) -> StoredCheckpoint:
    """Open the folder of an iteration; of a folder of iterations, the last one."""
    if (path / _LATEST).exists():
        path = path / _latest(path / _LATEST)
    names = {name for name, _ in entries_of(path)} if path.is_dir() else set()
    if "metadata.json" not in names and any(name.startswith("mp_rank_") for name in names):
        return open_ranks(path)
    said = _json(path / "metadata.json")
    backend = said.get("sharded_backend") if isinstance(said, dict) else None
    if backend != "torch_dist":
        raise ParseError(
            f"{path}: a Megatron checkpoint of the format {shown(backend)}, which cannot be read; start Megatron's "
            "training script once with --ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
        )
    if not (path / ".metadata").exists():
        raise ParseError(f"{path}: has no .metadata: files are missing, or the save was interrupted")
    return open_iteration(path, said)


def _latest(path: Location) -> str:
    text = first_bytes(path, 64).decode("ascii", "replace").strip()
    if text == "release":
        return text
    if not text.isdecimal() or len(text) > 18:
        raise ParseError(f"{path}: {shown(text)} is neither an iteration nor the word release")
    folder = f"iter_{int(text):07d}"
    if not (path.parent / folder).is_dir():
        raise ParseError(f"{path}: names the iteration {text}, but there is no folder {folder}; open another iteration")
    return folder


def _json(path: Location) -> Any:
    try:
        return read_json(path)
    except FileNotFoundError:
        raise ParseError(
            f"{path.parent}: has no metadata.json, which torch_dist writes last: the save was interrupted; take an "
            "earlier iteration"
        ) from None
