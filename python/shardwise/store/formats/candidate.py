"""A path that may be a checkpoint: the names in it and its first bytes, and what these say."""

from __future__ import annotations

import re

from ..._fork import cached_property
from ...errors import ParseError
from ..data.location import Location, entries_of, first_bytes, unlisted
from ..data.parts import ITEM_INDEX, RANK_ITEM

__all__ = ["Candidate", "has_items", "is_prefix", "is_step", "is_universal"]

# A folder of more entries is not listed further: the files that tell formats apart are at most as many as processes.
_MOST_NAMES = 1_000_000
#: The indexes that reveal a folder's format and list its files.
_MARKERS = ("shardwise.json", ".metadata", "model.safetensors.index.json")
#: The first bytes of the index of torch_checkpointing: a pickled dict whose first key is `metadata`.
_ITEM_INDEX = re.compile(rb"\x80[\x04\x05](?:\x95.{8})?\}\x94?\(\x8c\x08metadata\x94?\}", re.DOTALL)


class Candidate:
    """A path that may be a checkpoint; names and first bytes are read once for all formats."""

    def __init__(self, path: Location) -> None:
        self.path = path
        self.is_folder = path.is_dir()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names in the folder, sorted; none for a file."""
        if not self.is_folder:
            return ()
        names = set()
        for name, _ in entries_of(self.path):
            names.add(name)
            if len(names) > _MOST_NAMES:
                raise ParseError(f"{self.path}: more than {_MOST_NAMES} entries, the limit")
        # Without its index, a folder would be taken for another format.
        names |= unlisted(self.path, (name for name in _MARKERS if name not in names))
        return tuple(sorted(names))

    def matching(self, pattern: str) -> list[str]:
        """Return the names in the folder that match a regular expression as a whole."""
        compiled = re.compile(pattern)
        return [name for name in self.names if compiled.fullmatch(name)]

    @cached_property
    def head(self) -> bytes:
        """The first 512 bytes of the file; none for a folder."""
        if self.is_folder or not self.path.is_file():
            return b""
        return first_bytes(self.path, 512)


def is_prefix(path: Location) -> bool:
    """Return whether a path is the common beginning of the file names of a TensorFlow checkpoint."""
    data = re.compile(re.escape(path.name) + r"\.data-\d+-of-\d+")
    return any(data.fullmatch(name) for name, _ in entries_of(path.parent))


def has_items(candidate: Candidate) -> bool:
    """Return whether a folder is of torch_checkpointing: it has its index, or a rank's model among files of ranks."""
    if ITEM_INDEX in candidate.names and _ITEM_INDEX.match(first_bytes(candidate.path / ITEM_INDEX, 64)):
        return True
    ranks = [match for name in candidate.names if (match := RANK_ITEM.fullmatch(name)) is not None]
    return (
        len(ranks) == len(candidate.names)
        and any(match["item"] == "model" and match["kind"] == "pt" for match in ranks)
        and any(match["rank"] == "0" for match in ranks)
    )


def is_universal(candidate: Candidate) -> bool:
    """Return whether a folder has a folder `zero` with a folder for each parameter, as DeepSpeed writes it."""
    if "zero" not in candidate.names or not (candidate.path / "zero").is_dir():
        return False
    inside = Candidate(candidate.path / "zero").names
    return "optimizer_state.pt" in inside or any(
        (candidate.path / "zero" / name / "fp32.pt").exists() for name in inside[:8]
    )


def is_step(path: Location) -> bool:
    """Return whether a path is a step of an Orbax checkpoint."""
    return any((path / name).exists() for name in ("_CHECKPOINT_METADATA", "commit_success.txt", "_METADATA"))
