"""What a checkpoint of each form is made of: its files, their names, and what follows from them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from ....errors import ParseError
from ...parts import MANIFEST
from .dcp import INDEX, DcpFile, KeyPath, dcp_index
from .files import Placed, SafetensorsFile, TargetFile, index_of
from .rank_files import RankFile
from .slots import Slots

__all__ = ["ARRAY_FORMS", "HF_INDEX", "ONE_FILE", "WITH_FILES", "Target", "Texts", "check_names", "target_file"]

#: What a new checkpoint may be: a safetensors file; a folder in Hugging Face's format; a folder with a safetensors file
#: for each owner of shards; one with a file for each rank, of all that it holds; the same as vLLM and SGLang name them;
#: PyTorch's distributed checkpoint.
Target = Literal["safetensors", "hf", "sharded", "ranks", "vllm", "dcp"]

#: The forms in whose files boxes are parts of arrays, and are as often as there are devices that hold them.
ARRAY_FORMS = ("ranks", "vllm")
#: The forms in whose folders the other files of a Hugging Face folder go along.
WITH_FILES = ("hf", "ranks", "vllm")
#: The forms that are one file: of all tensors, or of what one rank holds.
ONE_FILE = ("safetensors", "rank")

HF_INDEX = "model.safetensors.index.json"

_NAMES = {
    "hf": re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors"),
    "sharded": re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors"),
    "ranks": re.compile(r"rank-\d{5,}(-[A-Za-z0-9_.]+-\d+)*\.safetensors"),
    "vllm": re.compile(r"model-(rank-\d+|pp-\d+-tp-\d+)-part-\d+\.safetensors"),
    "dcp": re.compile(r"__\d+_0\.distcp"),
}


def target_file(
    form: str,
    name: str,
    slots: Slots,
    wanted: Sequence[Placed],
    metadata: Mapping[str, str],
    count: int,
    known: tuple[int, int],
) -> TargetFile:
    """Make one of `count` files of a checkpoint of this form; `known` are the first byte of its data, and its size."""
    if form == "dcp":
        return DcpFile(name, slots, wanted, known)
    if form in ARRAY_FORMS:
        return RankFile(name, slots, wanted, metadata, count=count, known=known)
    return SafetensorsFile(
        name,
        slots,
        wanted,
        metadata,
        has_digests=form == "safetensors",
        has_offsets=form == "sharded",
        count=count,
        known=known,
    )


def check_names(form: str, path: str, names: Sequence[str]) -> None:
    """Refuse, with ParseError, names that no checkpoint of this form has, or two of one name.

    >>> check_names("hf", "/a", ["model.safetensors.index.json"])
    Traceback (most recent call last):
    shardwise.errors.ParseError: it has the file 'model.safetensors.index.json', which no checkpoint of the form hf has
    """
    own = path.rpartition("/")[2]
    for name in names:
        if name != own if form in ONE_FILE else _NAMES[form].fullmatch(name) is None:
            raise ParseError(f"it has the file {name[:80]!r}, which no checkpoint of the form {form} has")
    if len(set(names)) < len(names) or (form in ONE_FILE and len(names) != 1):
        raise ParseError("two of its files have one name, or it has none")


class Texts(Mapping[str, bytes]):
    """The files beside those of tensors, by name, each made when it is asked for.

    Args:
        form: The form of the checkpoint.
        files: Its files.
        wanted: Its tensors and objects.
        aliases: Further names of tensors that share the elements of others.
        paths: The places of tensors in a nested state dict.
        beside: What goes along with them; nothing in it replaces another file.
    """

    def __init__(
        self,
        form: str,
        files: Sequence[TargetFile],
        wanted: Sequence[Placed],
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
