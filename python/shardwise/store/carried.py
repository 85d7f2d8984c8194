"""What goes along with the tensors of a Hugging Face folder: `config.json`, the tokenizer's files and the like."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .._text import bytes_text, shown
from .location import Location, entries_of, read_unlinked
from .parts import MANIFEST, RANKS

__all__ = ["carried_files", "carried_names", "is_carried"]

_CARRIED = re.compile(
    r"[A-Za-z0-9][\w.+-]{0,200}\.(?:json|jsonl|txt|model|jinja|py|md|tiktoken|spm|bpe|yaml|yml)|LICENSE|NOTICE|USE_POLICY"
)
#: Bytes of a file, bytes of all, and how many: a tokenizer of a quarter of a million tokens takes 33 MB.
_MOST_BYTES = 64 * 2**20
_MOST_IN_ALL = 256 * 2**20
_MOST_FILES = 256


def is_carried(name: str) -> bool:
    """Whether a file of this name may go along: text of a model's folder, but no index of tensors and no manifest.

    >>> [is_carried(name) for name in ("config.json", "model.safetensors.index.json", "shardwise.json", ".env")]
    [True, False, False, False]
    """
    return (
        _CARRIED.fullmatch(name) is not None
        and not name.endswith((".index.json", ".weights.json"))
        and name not in (MANIFEST, RANKS)
    )


def carried_names(texts: Iterable[str]) -> tuple[str, ...]:
    """Those of the further files of a new checkpoint that were copied along."""
    return tuple(sorted(filter(is_carried, texts)))


def carried_files(folder: Location) -> tuple[dict[str, bytes], list[str]]:
    """Read what goes along, and say what does not although it might.

    Args:
        folder: The folder of the source; its own files only, and nothing below it. Links are not followed, but those
            that Hugging Face's cache is made of: from a snapshot to the same model's blobs.

    Returns:
        The files by name, and a sentence for each that is left out.
    """
    found: dict[str, bytes] = {}
    left: list[str] = []
    room = _MOST_IN_ALL
    for name, is_folder in sorted(entries_of(folder)):
        if is_folder or not is_carried(name):
            continue
        most = min(_MOST_BYTES, room)
        data = None if len(found) >= _MOST_FILES else read_unlinked(folder / name, most)
        if data is None:
            left.append(
                f"{shown(name)} is not copied along: it is a link, no regular file, or of more than "
                f"{bytes_text(most)}; copy it yourself"
            )
            continue
        found[name] = data
        room -= len(data)
    return found, left
