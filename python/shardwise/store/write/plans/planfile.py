"""The file of a plan: a line that says what it is, a head in JSON, and sections in blocks, each with its digest.

The digest of the head, which has those of all blocks, is the plan's. So a plan is opened by its head alone, and a
worker reads the blocks that its tasks need. What the file says is checked before anything is done with it: of a small
plan all when it is opened, of a large one each part when it is read, and all of it before the checkpoint gets its name.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path, PurePath
from typing import Any, TypeVar, get_args

import numpy as np

from ...._atomic import naming, replacing
from ...._dtypes import dtype_named
from ...._text import shown
from ....errors import ParseError
from ...files import DataFile
from ...parts import RANKS
from ..formats.carried import is_carried
from ..formats.form_files import ARRAY_FORMS, WITH_FILES, Target
from .check_plan import check_cut, check_plan
from .plan import LEAST_ASKED, WritePlan, said_by
from .sections import BLOCK, Stored, blocks_of, packed

__all__ = ["load_plan", "save_plan"]

Plan = TypeVar("Plan", bound=WritePlan)

#: The beginning of a plan file: the version, the digest of the head, its bytes, and the number of blocks.
_HEAD = re.compile(rb"shardwise plan (\d{1,9})(?: ([0-9a-f]{64}) (\d{1,15}) (\d{1,15}))?[ \n]")
_VERSION = 2
_MOST_LINE = 128
#: Plans of up to so many bytes are checked as a whole when they are opened.
_SMALL = 2**22

_SECTIONS = (
    "names", "shapes", "tensors", "pieces", "replicas", "targets", "boxes", "file_names", "files", "slots", "sources",
    "source_ends", "runs", "aliases", "beside", "paths",
)  # fmt: skip
_KEYS = {"path", "form", "task_bytes", "metadata", "dtypes", "cuts", "beside", "sections"}


def save_plan(plan: WritePlan, path: Path) -> None:
    """Write a plan to a file, as a whole or not at all."""
    head = plan.body()
    count = sum(-(-held.nbytes // BLOCK) for held in plan.sections.values())
    lengths = []
    with replacing(path) as file:
        line = f"shardwise plan {_VERSION} {plan.digest} {len(head)} {count}\n".encode()
        file.write(line + head + bytes(8 * count))
        for held in plan.sections.values():
            for block in blocks_of(held):
                short = packed(block)
                lengths.append(len(short))
                file.write(short)
        file.seek(len(line) + len(head))
        file.write(np.array(lengths, "<i8").tobytes())


def load_plan(path: Path, kind: type[Plan]) -> Plan:
    """Open a plan.

    Raises:
        ParseError: if it is not a plan, has another version, or was damaged or edited.
        OSError: if it cannot be read.
    """
    with naming(path):
        file = DataFile(path)
    line = file.read(0, min(_MOST_LINE, file.size)).partition(b"\n")[0] + b"\n"
    found = _HEAD.match(line)
    if found is None:
        raise ParseError(f"{path}: is not a shardwise plan")
    if int(found[1]) != _VERSION:
        raise ParseError(
            f"{path}: is a plan of version {int(found[1])}; only version {_VERSION} is known: plan it again"
        )
    at, blocks = len(line) + int(found[3] or 0), int(found[4] or 0)
    if found[2] is None or at + 9 * blocks > file.size:
        raise ParseError(f"{path}: the plan was edited or is damaged: its digest differs")
    text = file.read(len(line), at - len(line))
    if hashlib.sha256(text).hexdigest() != found[2].decode():
        raise ParseError(f"{path}: the plan was edited or is damaged: its digest differs")
    with said_by(path):
        head = json.loads(text)
        _check_head(head)
        lengths = np.frombuffer(file.read(at, 8 * blocks), "<i8")
        begins = [at + 8 * blocks, *(at + 8 * blocks + np.cumsum(lengths)).tolist()]
        if begins[-1] != file.size or (lengths <= 0).any() or (lengths > file.size).any():
            raise ParseError(f"{path}: the plan was edited or is damaged: its digest differs")
        sections, first = {}, 0
        for name, (nbytes, digests) in head.pop("sections").items():
            end = first + len(digests)
            sections[name] = Stored(file, nbytes, begins[first : end + 1], digests)
            first = end
        if first != blocks:
            raise ValueError("it has blocks of no section")
        plan = kind._made(head, sections, file=path, digest=found[2].decode())
        if sum(held.nbytes for held in sections.values()) <= _SMALL:
            check_plan(plan)
    return plan


def _check_head(head: Any) -> None:
    if not isinstance(head, dict) or set(head) != _KEYS:
        raise ValueError("its head has not the entries of a plan")
    if (
        not isinstance(head["path"], str)
        or not isinstance(head["form"], str)
        or head["form"] not in (*get_args(Target), "rank")
    ):
        raise ValueError(f"its form {shown(head['form'])} is none that is written")
    if PurePath(head["path"]).name in ("", ".."):
        raise ValueError(f"its path {shown(head['path'])} ends in no name")
    if type(head["task_bytes"]) is not int or not LEAST_ASKED <= head["task_bytes"] < 1 << 63:
        raise ValueError(f"its task_bytes is {shown(head['task_bytes'])}; it must be at least {LEAST_ASKED}")
    metadata, dtypes, cuts = head["metadata"], head["dtypes"], head["cuts"]
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata is not one of texts")
    for name in dtypes:
        found = dtype_named(name) if isinstance(name, str) else None
        if found is None or found.bits % 8:
            raise ValueError(f"its dtype {shown(name)} is unknown")
    for cut in cuts:
        check_cut(cut)
    if cuts and head["form"] not in ("sharded", "dcp", *ARRAY_FORMS):
        raise ValueError(f"it cuts tensors, which the form {head['form']} does not hold")
    for name, length in head["beside"].items():
        goes_along = is_carried(name) if head["form"] in WITH_FILES else False
        if not (goes_along or (name == RANKS and head["form"] in ARRAY_FORMS)) or type(length) is not int or length < 0:
            raise ValueError(f"it has the file {shown(name)}, which does not go along with a checkpoint")
    if tuple(head["sections"]) != _SECTIONS:
        raise ValueError("it has not the sections of a plan")
    for nbytes, digests in head["sections"].values():
        if type(nbytes) is not int or nbytes < 0 or not all(isinstance(each, str) for each in digests):
            raise ValueError("it has a section without a length")
    if sum(head["beside"].values()) != head["sections"]["beside"][0]:
        raise ValueError("what goes along is not as long as it says")
