"""The kind of a file that is not a checkpoint, recognised by its first bytes."""

from __future__ import annotations

import re

__all__ = ["kind_of"]

_MAGICS = (
    (b"PK\x03\x04", "a zip archive, as written by torch.save and Keras"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as written by Keras"),
    (b"GGUF", "a GGUF file, as used by llama.cpp"),
    (b"\x93NUMPY", "an array saved by numpy.save"),
    (b"\x1f\x8b", "compressed by gzip"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (b"BZh", "compressed by bzip2"),
    (b"\xfd7zXZ\x00", "compressed by xz"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"\x89PNG\r\n\x1a\n", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"%PDF-", "a PDF document"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"SQLite format 3\x00", "an SQLite database"),
    (b"\x7fELF", "an ELF program"),
    (b"version https://git-lfs.github.com/", "a Git LFS pointer: the file itself was not downloaded (git lfs pull)"),
    (b"<!DOCTYPE html", "a web page"),
    (b"<!doctype html", "a web page"),
    (b"<html", "a web page"),
    (b"<?xml", "XML"),
)


#: Patterns of the text after JSON's first bracket, and of a line with a header or an entry of TOML.
_JSON = re.compile(r"\s*(?:\{\s*[\"}]|\[\s*(?:[\[{\"\]\-\d]|true|false|null))")
_TOML = re.compile(r"^(?:\[\[?[\w\"'. -]+\]\]?|[\w.-]+ *= *(?:[\"'\[{\d]|true|false).*)\s*(?:#.*)?$", re.MULTILINE)


def kind_of(head: bytes) -> str:
    r"""Say what a file with these first bytes is; quote them if they say nothing.

    >>> kind_of(b"GGUF\x03\x00\x00\x00"), kind_of(b"layers: 12"), kind_of(b""), kind_of(bytes(64))
    ('a GGUF file, as used by llama.cpp', "text: 'layers: 12'", 'empty', 'zeros: it may not have been written')
    >>> kind_of(b"[mesh]\nmodel = 4"), kind_of(b'[1, 2'), kind_of(b'{"a": 1}')
    ("TOML: '[mesh]\\nmodel = 4'", "JSON: '[1, 2'", 'JSON: \'{"a": 1}\'')
    """
    if not head:
        return "empty"
    for magic, kind in _MAGICS:
        if head.startswith(magic):
            return kind
    if head[257:262] == b"ustar":
        return "a tar archive"
    if re.match(rb"\x80[\x02-\x05]", head):
        return "a Python pickle"
    if not head.strip(b"\0"):
        return "zeros: it may not have been written"
    text = _text(head)
    if text is None:
        return f"of an unknown kind, beginning with {head[:8]!r}"
    word = "JSON" if _JSON.match(text) else "TOML" if _TOML.search(text) else "text"
    return f"{word}: {text.strip()[:40]!r}"


def _text(head: bytes) -> str | None:
    """Return the first bytes as text, or `None`; a character that is cut off at the end is ignored."""
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if error.start < max(1, len(head) - 3):
            return None
        text = head[: error.start].decode()
    return text if all(character.isprintable() or character in "\t\n\r\f" for character in text) else None
