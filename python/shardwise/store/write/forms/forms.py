"""The forms of checkpoints: for each form its files and their names, and the index and manifest next to the files.

The manifest lists the tensors and how each is cut, and the size and digests of each file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from ...._text import shown
from ....errors import ParseError
from ...data.parts import ENGINE_FILE, MANIFEST, RANK_FILE, RANKS
from ...formats.sharded import sealed
from ...tensors.checkpoint import KeyPath
from .dcp import INDEX, DcpFile, dcp_index
from .files import CutTensor, Extent, NamedTensor, TargetFile, WrittenFile
from .fsdp import CONFIG
from .megatron import COMMON, METADATA
from .rank_files import RankFile
from .safetensors import HeaderText, SafetensorsFile, index_of
from .slots import Slots
from .torch_file import TorchFile, TorchPart
from .universal import BESIDE, FILES, LATEST, UniversalFile

__all__ = [
    "HF_INDEX",
    "WRITTEN",
    "Target",
    "Texts",
    "WrittenForm",
    "check_names",
    "differing_replica",
    "header_text",
    "manifest_text",
    "target_file",
]

#: The forms of a new checkpoint: a safetensors file; a folder in Hugging Face's format; a folder with a safetensors
#: file for each owner of shards; one with a file for each rank, of all that it holds; the same as vLLM and SGLang name
#: them; PyTorch's distributed checkpoint; the same with what Megatron-Core looks for; a file of
#: `torch.save`; FSDP2's files of ranks; DeepSpeed's universal checkpoint.
Target = Literal["safetensors", "hf", "sharded", "ranks", "vllm", "dcp", "megatron", "torch", "fsdp2", "universal"]

HF_INDEX = "model.safetensors.index.json"

#: The tables of a manifest that are written with one entry per line.
_LISTS = ("tensors", "files")


class WrittenForm(NamedTuple):
    """A form in which checkpoints are written.

    Attributes:
        names: Pattern of the names of its files of tensors; `None` for a form of one file, which has the checkpoint's
            name.
        is_cut: Whether tensors are written in pieces, as the layouts cut them.
        has_arrays: Whether each device's boxes are put into arrays of its own, so that replicas are written once for
            each device that holds them.
        has_crcs: Whether the files state a CRC-32 of each box.
        has_values: Whether values that are not tensors are in its files.
        takes_files: Whether the other files of a Hugging Face folder are copied along.
        beside: Pattern of the names of further files, whose contents are in the plan.
        last: Name of the file that makes a folder a checkpoint (manifest or index); it is written last.
    """

    names: re.Pattern[str] | None = None
    is_cut: bool = False
    has_arrays: bool = False
    has_crcs: bool = False
    has_values: bool = False
    takes_files: bool = False
    beside: re.Pattern[str] | None = None
    last: str = MANIFEST


_RANKS = re.compile(re.escape(RANKS))
#: Each form; `"rank"` is the only file of one rank. PyTorch looks for its own index, and not for the manifest.
WRITTEN = {
    "safetensors": WrittenForm(),
    "rank": WrittenForm(),
    "hf": WrittenForm(re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors"), takes_files=True),
    "sharded": WrittenForm(re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors"), is_cut=True),
    "ranks": WrittenForm(re.compile(RANK_FILE), is_cut=True, has_arrays=True, takes_files=True, beside=_RANKS),
    "vllm": WrittenForm(re.compile(ENGINE_FILE), is_cut=True, has_arrays=True, takes_files=True, beside=_RANKS),
    "dcp": WrittenForm(
        re.compile(r"__\d+_0\.distcp"),
        is_cut=True,
        has_crcs=True,
        has_values=True,
        beside=re.compile(f"{re.escape(METADATA)}|{re.escape(COMMON)}"),
        last=INDEX,
    ),
    "torch": WrittenForm(has_crcs=True, has_values=True),
    "fsdp2": WrittenForm(
        re.compile(r"(?:model|optim|extra_state)_world_size_\d+_rank_\d+\.pt"),
        is_cut=True,
        has_arrays=True,
        has_crcs=True,
        has_values=True,
        takes_files=True,
        beside=re.compile(re.escape(CONFIG)),
    ),
    "universal": WrittenForm(FILES, has_crcs=True, has_values=True, beside=BESIDE, last=LATEST),
}
# Once its tensors are named, it is planned as a folder of PyTorch's with two more files.
WRITTEN["megatron"] = WRITTEN["dcp"]


_TORCH_FILES = {"torch": TorchFile, "fsdp2": TorchPart, "universal": UniversalFile}


def target_file(
    form: str,
    name: str,
    slots: Slots,
    wanted: Sequence[CutTensor],
    text: HeaderText,
    known: Extent,
) -> TargetFile:
    """Return a file of a checkpoint of this form; the form decides at which bytes its slots begin."""
    if form == "dcp":
        return DcpFile(name, slots, wanted, known)
    if form in _TORCH_FILES:
        return _TORCH_FILES[form](name, slots, wanted, known)
    return (RankFile if WRITTEN[form].has_arrays else SafetensorsFile)(name, slots, wanted, text, known)


def header_text(form: str, metadata: Mapping[str, str], files: int) -> HeaderText:
    """Return the text that headers have besides tensors, for a checkpoint of this form with so many files."""
    return HeaderText(metadata, has_digests=form == "safetensors", has_offsets=form == "sharded", files=files)


def check_names(form: str, path: str, names: Sequence[str]) -> None:
    """Refuse, with ParseError, names that no checkpoint of this form has, or two of one name.

    >>> check_names("hf", "/a", ["model.safetensors.index.json"])
    Traceback (most recent call last):
    shardwise.errors.ParseError: it has the file 'model.safetensors.index.json', which no checkpoint of the form hf has
    """
    own, pattern = path.rpartition("/")[2], WRITTEN[form].names
    for name in names:
        if name != own if pattern is None else pattern.fullmatch(name) is None:
            raise ParseError(f"it has the file {name[:80]!r}, which no checkpoint of the form {form} has")
    if len(set(names)) < len(names) or (pattern is None and len(names) != 1):
        raise ParseError("two of its files have the same name, or it has no files")


class Texts(Mapping[str, bytes]):
    """The files next to those of tensors, by name, each made when it is asked for.

    Args:
        form: The form of the checkpoint.
        wanted: Its tensors and objects.
        aliases: Further names of tensors that share the elements of others.
        paths: The places of tensors in a nested state dict.
        beside: The files that go along with them; nothing in it replaces another file.
    """

    def __init__(
        self,
        form: str,
        files: Sequence[TargetFile],
        wanted: Sequence[CutTensor],
        aliases: Mapping[str, str],
        paths: Mapping[str, KeyPath],
        beside: Mapping[str, bytes],
    ) -> None:
        self._files, self._wanted, self._aliases, self._paths, self._beside = files, wanted, aliases, paths, beside
        has_index = form == "hf" and len(files) > 1
        self._names = [INDEX] if form == "dcp" else [HF_INDEX] if has_index else []
        own = {*self._names, *(file.name for file in files), MANIFEST}
        self._names += [name for name in beside if name not in own]

    def __getitem__(self, name: str) -> bytes:
        if name not in self._names:
            raise KeyError(name)
        if name == INDEX:
            return dcp_index(
                [f for f in self._files if isinstance(f, DcpFile)], self._wanted, self._aliases, self._paths
            )
        if name != HF_INDEX:
            return self._beside[name]
        files = [file for file in self._files if isinstance(file, SafetensorsFile)]
        return json.dumps(index_of(files, self._wanted), indent=2).encode()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _ShapedTensor(NamedTensor, Protocol):
    """A tensor of a plan, or of a request."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape, in elements."""


def manifest_text(
    said: Mapping[str, Any],
    tensors: Sequence[_ShapedTensor],
    digests: Sequence[int],
    files: Iterable[WrittenFile],
    texts: Mapping[str, bytes],
) -> bytes:
    """Return the manifest as bytes of JSON.

    Args:
        said: The format, the aliases, and under `"tensors"` the cut of each tensor.
        tensors: The tensors, and values that are not tensors; the manifest leaves the values out.
        digests: One digest for each of `tensors`.
        files: The files, with the digests of their contents.
        texts: The other files, by name.
    """
    manifest: dict[str, Any] = {"format": "shardwise", "version": 1, **said}
    manifest["tensors"] = {
        tensor.name: {
            "dtype": tensor.dtype.stated,
            "shape": tensor.dtype.element_shape(tensor.shape),
            "digest": f"{digest:032x}",
            **more,
        }
        for tensor, more, digest in zip(tensors, said["tensors"], digests, strict=True)
        if not tensor.is_object
    }
    manifest["files"] = {
        file.name: {
            "size": file.size,
            file.headers_key: headers,
            "digests": {
                tensors[tensor].name: f"{known.tensors.get(tensor, 0):032x}"
                for tensor in file.boxes.tensors.tolist()
                if not tensors[tensor].is_object
            },
        }
        for file, known, headers in files
    } | {name: {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()} for name, text in texts.items()}
    return sealed(_by_line(manifest).encode())


def _by_line(manifest: Mapping[str, Any]) -> str:
    """Return an object as JSON with one entry per line, also within `tensors` and `files`."""
    # One line at a time: indented as a whole, JSON is written by Python and not by its compiled part.
    said = {key: json.dumps(value, ensure_ascii=False) for key, value in manifest.items() if key not in _LISTS}
    for key in _LISTS:
        inner = (
            f"{json.dumps(name, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
            for name, value in manifest[key].items()
        )
        said[key] = "{\n  " + ",\n  ".join(inner) + "\n }"
    lines = (f'"{key}": {said[key]}' for key in manifest)
    return "{\n " + ",\n ".join(lines) + "\n}"


def differing_replica(name: str, shape: tuple[int, ...], path: object, element: int) -> str:
    """Return the message that says which element of a replica differs; `element` is its offset in the tensor."""
    index = tuple(map(int, np.unravel_index(element, shape)))
    return (
        f"tensor {shown(name)}: replicas disagree; the first element of {path} that differs is {index}; "
        'replicas="first" takes the first of them'
    )
