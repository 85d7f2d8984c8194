"""The sharded folder: a safetensors file for each owner of shards, and a manifest that describes the whole.

The files are those of PyTorch's distributed checkpoints as safetensors, so that its `HuggingFaceStorageReader` reads
them; the manifest, `shardwise.json`, adds shapes, layouts, sizes of files and digests. It is written last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from ..._text import shown
from ...errors import ParseError
from ..data.files import Holder
from ..data.location import Location, names_in, open_file, read_json
from ..data.parts import MANIFEST
from ..tensors.checkpoint import Besides, Rest, StoredCheckpoint
from ..tensors.stored import StoredTensor
from ..tensors.stored_pieces import StoredPiece
from . import ranks
from .torch import dcp_safetensors

__all__ = ["MANIFEST", "check_seal", "damaged_files", "open_form", "open_rest", "read_manifest", "sealed"]

#: The texts before and after the digest of a manifest.
_SEAL, _END = b',\n "sha256": "', b'"\n}'


def sealed(text: bytes) -> bytes:
    """Return the text of a manifest, a JSON object with one entry per line, with its SHA-256 added at the end."""
    return text.removesuffix(b"\n}") + _SEAL + hashlib.sha256(text).hexdigest().encode() + _END


def check_seal(folder: Location) -> None:
    """Check that a folder's manifest is unchanged, by its own digest.

    Raises:
        ParseError: if it was changed.
    """
    path = folder / MANIFEST
    file = open_file(path)
    try:
        text = file.read(0, file.size)
    finally:
        file.close()
    if sealed(text.rpartition(_SEAL)[0] + b"\n}") != text:
        raise ParseError(f"{path}: is not what was written: its SHA-256 is not the one that it states")


def open_form(path: Location) -> StoredCheckpoint:
    """Open the folder, and check its files against the manifest."""
    manifest = read_manifest(path)
    for problem in damaged_files(path, manifest).values():
        raise ParseError(problem)
    if not any(manifest[key] for key in ("tensors", "files", "aliases")):
        return StoredCheckpoint(path, "sharded", {}, [], Besides(metadata=manifest))
    form = manifest.get("form")
    if form in ("ranks", "vllm"):
        inner = ranks.open_names(path, [name for name in manifest["files"] if name.endswith(".safetensors")], form)
    else:
        form, inner = "sharded", dcp_safetensors.open_names(path, names_in(path, manifest["files"]))
    try:
        said: dict[str, Any] = manifest["tensors"]
        tensors: dict[str, StoredTensor] = {}
        missing = next((name for name in said if name not in inner), None)
        if missing is not None:
            raise ParseError(f"{path}: {MANIFEST} names the tensor {shown(missing)}, which no file holds")
        for name, tensor in inner.items():
            expected = said.get(name)
            if expected is None:
                raise ParseError(f"{path}: a file holds the tensor {shown(name)}, which {MANIFEST} does not name")
            if list(tensor.shape) != expected.get("shape") or tensor.dtype != expected.get("dtype"):
                raise ParseError(
                    f"{path}: tensor {shown(name)} is {tensor.dtype} of shape {shown(tensor.shape)}, but "
                    f"{MANIFEST} says {shown(expected.get('dtype'))} of shape {shown(expected.get('shape'))}; a "
                    "file is missing, or belongs to another checkpoint"
                )
            tensors[name] = tensor
        for alias, name in manifest["aliases"].items():
            if not isinstance(name, str) or name not in tensors or alias in tensors:
                raise ParseError(f"{path}: {MANIFEST} ties {shown(alias)} to {shown(name)}, which does not exist")
            other = tensors[name]
            tensors[alias] = StoredTensor(
                alias, other.known_dtype, other.shape, other.pieces, replicas=other.replicas, alias_of=name
            )
    except BaseException:
        inner.close()
        raise
    return StoredCheckpoint(path, form, tensors, inner._files, Besides(metadata=manifest))


def open_rest(path: Location, names: Iterable[str], form: str) -> Rest:
    """Open the safetensors files with these names, whatever else is missing in the folder.

    Raises:
        ParseError: if a file does not state its part of the tensors.
    """
    pieces_of = ranks.rank_pieces if form in ("ranks", "vllm") else dcp_safetensors.shard_pieces
    pieces: dict[str, list[StoredPiece]] = {}
    files: list[Holder] = []
    for name in sorted(name for name in names if name.endswith(".safetensors")):
        files.append(open_file(path / name))
        for tensor, piece in pieces_of(files[-1]):
            pieces.setdefault(tensor, []).append(piece)
    return Rest(pieces, (), files)


def read_manifest(folder: Location) -> dict[str, Any]:
    """Read the manifest of a folder.

    Raises:
        ParseError: if the contents are not a manifest.
        OSError: if the file cannot be read.
    """
    path = folder / MANIFEST
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != "shardwise":
        raise ParseError(f"{path}: is not the manifest of a checkpoint")
    if manifest.get("version") != 1:
        raise ParseError(f"{path}: is of version {shown(manifest.get('version'))}; only version 1 is known")
    for key in ("tensors", "files", "aliases"):
        held = manifest.get(key)
        if not isinstance(held, dict):
            raise ParseError(f"{path}: {key} is not a JSON object")
        if key != "aliases" and not all(isinstance(value, dict) for value in held.values()):
            raise ParseError(f"{path}: an entry of {key} is not a JSON object")
    for name in manifest["files"]:
        if not {"", ".", ".."}.isdisjoint(name.split("/")) or "\\" in name or "\0" in name:
            raise ParseError(f"{path}: names the file {shown(name)}, which is not in its own folder")
    return manifest


def damaged_files(folder: Location, manifest: dict[str, Any]) -> dict[str, str]:
    """Return a sentence for each file of a manifest that is missing or has another size."""
    found = {}
    for name, said in manifest["files"].items():
        try:
            size, expected = (folder / name).stat().st_size, said.get("size")
        except FileNotFoundError:
            found[name] = f"{folder / MANIFEST}: names the file {shown(name)}, which is missing"
            continue
        if size != expected:
            how = "is truncated: it has" if isinstance(expected, int) and size < expected else "has"
            found[name] = f"{folder / name}: {how} {size} bytes, {MANIFEST} says {shown(expected)}"
    return found
