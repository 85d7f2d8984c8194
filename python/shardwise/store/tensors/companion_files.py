"""Files next to the tensors of a checkpoint: those that are copied along, such as `config.json`, and unread ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice

from ..._text import bytes_text, shown
from ...rules.left_out import LeftOut, listed
from ...rules.pattern import NamePattern
from ..data.location import Location, entries_of, read_unlinked
from ..data.parts import MANIFEST, RANKS
from .checkpoint import StoredCheckpoint

__all__ = ["beside", "companion_names", "companions_of", "is_companion", "model_folder"]

_CARRIED = re.compile(
    r"[A-Za-z0-9][\w.+-]{0,200}\.(?:json|jsonl|txt|model|jinja|py|md|tiktoken|spm|bpe|yaml|yml)|LICENSE|NOTICE|USE_POLICY"
)
#: The most bytes of a file, of all files, and the most files: a tokenizer of 250,000 tokens takes 33 MB.
_MOST_BYTES = 64 * 2**20
_MOST_IN_ALL = 256 * 2**20
_MOST_FILES = 256


#: Files that hold no tensors: texts, pictures, logs, code.
_WITHOUT_TENSORS = re.compile(
    r"\..*|.*\.(?:json|jsonl|txt|model|jinja|py|pyc|md|rst|tiktoken|spm|bpe|yaml|yml|toml|ini|cfg|sh|xml|csv|tsv|log|lock|tmp"
    r"|png|jpe?g|gif|svg|webp|ico|mp[34]|wav|pdf|html|css|js|ipynb|so|dll|dylib|c|cc|cpp|h|cu|rs)"
    r"|[A-Z_]{1,30}|latest\w{0,30}|Dockerfile|Makefile|events\.out\.tfevents\..*",
    re.DOTALL,
)
#: The most entries of a folder, and the most levels of folders, that are looked at.
_MOST_NAMES = 1_000_000
_DEEPEST = 4
#: Formats whose files are not all opened, or are in subfolders.
_UNLISTED = ("orbax",)
#: The formats of folders whose other files, such as `config.json`, describe the model.
_FOLDERS = ("safetensors", "torch", "sharded", "ranks", "vllm")


def beside(checkpoint: StoredCheckpoint, unwanted: NamePattern | None = None) -> list[LeftOut]:
    """Say which files with tensors lie in the folder of an open checkpoint, or in a folder there, and are not read.

    Args:
        checkpoint: The open checkpoint, whose own files are not listed. Around a file that is opened alone anything may
            lie.
        unwanted: What is found in the names of those that nobody is to be warned of.
    """
    if checkpoint.format in _UNLISTED or _given_folder(checkpoint) is None:
        return []
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    read = {str(file.path) for file in checkpoint._files if hasattr(file, "path")}
    found = [name for name in _with_tensors(folder, "", _DEEPEST) if str(folder / name) not in read]
    found = list(dict.fromkeys([*found, *checkpoint.unread]))
    asked = [] if unwanted is None else [name for name in found if unwanted.is_found(name)]
    found = [name for name in found if name not in asked]
    if asked:
        count, which = listed(asked, "file")
        text = f"{count} not read, as drop says: {which}"
        return [*_beside(found, checkpoint), LeftOut("asked", tuple(asked), text)]
    return _beside(found, checkpoint)


def _with_tensors(folder: Location, within: str, deep: int) -> Iterator[str]:
    """Yield the files of a folder, and of its subfolders, that may hold tensors; and folders that cannot be listed."""
    try:
        entries = sorted(islice(entries_of(folder / within if within else folder), _MOST_NAMES))
    except OSError:  # Nobody knows what is in it.
        if not within:
            raise
        yield f"{within}/"
        return
    folders = []
    for name, is_folder in entries:
        path = f"{within}/{name}" if within else name
        if is_folder:
            folders += [path] if not name.startswith(".") else []
        elif _WITHOUT_TENSORS.fullmatch(name) is None:
            yield path
    for path in folders:
        if deep > 1:
            yield from _with_tensors(folder, path, deep - 1)
        else:
            yield f"{path}/"


def _beside(found: list[str], checkpoint: StoredCheckpoint) -> list[LeftOut]:
    """Return the note that these files are not read; an empty list without files."""
    if not found:
        return []
    count, which = listed(found, "file")
    return [LeftOut("beside", tuple(found), f"{count} not read, next to {checkpoint.path}: {which}")]


def is_companion(name: str) -> bool:
    """Return whether a file of this name is copied along: text of a model's folder, except indexes and manifests.

    >>> [is_companion(name) for name in ("config.json", "model.safetensors.index.json", "shardwise.json", ".env")]
    [True, False, False, False]
    """
    return (
        _CARRIED.fullmatch(name) is not None
        and not name.endswith((".index.json", ".weights.json"))
        and name not in (MANIFEST, RANKS)
    )


def companion_names(texts: Iterable[str], own: re.Pattern[str] | None = None) -> tuple[str, ...]:
    """Return those of the further files of a new checkpoint that were copied along, sorted; its form makes `own`.

    >>> companion_names(["config.json", "metadata.json"], re.compile("metadata.json"))
    ('config.json',)
    """
    return tuple(sorted(name for name in texts if is_companion(name) and not (own and own.fullmatch(name))))


def model_folder(checkpoint: StoredCheckpoint) -> Location | None:
    """Return the folder whose other files describe the model of a checkpoint; `None` if nothing says that they do."""
    return _given_folder(checkpoint) if checkpoint.format in _FOLDERS else None


def _given_folder(checkpoint: StoredCheckpoint) -> Location | None:
    """Return the folder that a checkpoint was opened by, itself or by its index; `None` for one file."""
    given = checkpoint.given
    if given.is_dir():
        return given
    is_index = given.name.endswith((".index.json", ".weights.json")) or given.name == ".metadata"
    return given.parent if is_index else None


def companions_of(folder: Location) -> tuple[dict[str, bytes], list[str]]:
    """Return the files that are copied along with a model, and a sentence for each that is left out.

    Args:
        folder: The folder of the source; files in its subfolders are ignored. Links are not followed, except those in
            snapshots of Hugging Face's cache to the same model's blobs.

    Returns:
        The contents of the files by name, and a sentence for each that is left out.
    """
    found: dict[str, bytes] = {}
    left: list[str] = []
    room = _MOST_IN_ALL
    for name, is_folder in sorted(entries_of(folder)):
        if is_folder or not is_companion(name):
            continue
        most = min(_MOST_BYTES, room)
        data = None if len(found) >= _MOST_FILES else read_unlinked(folder / name, most)
        if data is None:
            left.append(
                f"{shown(name)} is not copied along: it is a link, has a second name, is not a regular file, "
                f"or has more than {bytes_text(most)}; copy it yourself"
            )
            continue
        found[name] = data
        room -= len(data)
    return found, left
