"""The file of a plan: a line with version and digest, a head in JSON, and sections in blocks, each with its digest.

The digest of the head, which contains the digests of all blocks, is the plan's. So a plan is opened by its head alone,
and a worker reads only the blocks that its tasks need. Contents are checked before they are used: a small plan as a
whole when it is opened, a large one part by part as it is read, and as a whole before the checkpoint gets its name. The
check compares names, boxes, positions of bytes and tasks with one another.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from ...._atomic import naming_file, replacing
from ...._dtypes import dtype_named
from ...._text import shown
from ...._types import Numbers
from ....errors import LayoutError, ParseError
from ....layout import UnevenRule
from ....pieces import Pieces, repeats
from ...data.block_lists import BLOCK, InFile, blocks_of, compress_block
from ...data.files import DataFile
from ...data.sources import check_path
from ...rewritten.names import check_name as check_tensor_name
from ...tensors.companion_files import is_companion
from ..forms.forms import WRITTEN
from ..forms.safetensors import HeaderLengths
from .data import LEAST_ASKED, TargetTensor, said_by
from .grids import shared_runs, task_runs
from .plan import CheckpointTasks
from .shares import file_shares
from .tables import blank, repeated_slots, table_of

__all__ = ["check_cut", "check_plan", "load_plan", "save_plan"]

_LoadedTasks = TypeVar("_LoadedTasks", bound=CheckpointTasks)

_LARGEST = 2**63 - 1

#: The beginning of a plan file: the version, the digest of the head, its bytes, and the number of blocks.
_HEAD = re.compile(rb"shardwise plan (\d{1,9})(?: ([0-9a-f]{64}) (\d{1,15}) (\d{1,15}))?[ \n]")
_VERSION = 3
_MOST_LINE = 128
#: Plans of up to this many bytes are checked as a whole when they are opened.
_SMALL = 2**22

_SECTIONS = (
    "names", "shapes", "tensors", "pieces", "replicas", "targets", "boxes", "file_names", "files", "slots", "sources",
    "source_ends", "runs", "again", "order", "shares", "share_ends", "aliases", "beside", "paths",
)  # fmt: skip
_KEYS = {"path", "form", "task_bytes", "metadata", "dtypes", "cuts", "beside", "sections"}


def save_plan(plan: CheckpointTasks, path: Path) -> None:
    """Write a plan to a file, completely or not at all."""
    head = plan.body()
    count = sum(-(-held.nbytes // BLOCK) for held in plan.sections.values())
    lengths = []
    with replacing(path) as file:
        line = f"shardwise plan {_VERSION} {plan.digest} {len(head)} {count}\n".encode()
        file.write(line + head + bytes(8 * count))
        for held in plan.sections.values():
            for block in blocks_of(held):
                short = compress_block(block)
                lengths.append(len(short))
                file.write(short)
        file.seek(len(line) + len(head))
        file.write(np.array(lengths, "<i8").tobytes())


def load_plan(path: Path, kind: type[_LoadedTasks]) -> _LoadedTasks:
    """Open a plan as a `kind` of plan.

    Raises:
        ParseError: if the file is not a plan, has another version, or was damaged or edited.
        OSError: if the file cannot be read.
    """
    with naming_file(path):
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
            sections[name] = InFile(file, nbytes, begins[first : end + 1], digests)
            first = end
        if first != blocks:
            raise ValueError("some of its blocks belong to no section")
        plan = kind.of_sections(head, sections, file=path, digest=found[2].decode())
        if sum(held.nbytes for held in sections.values()) <= _SMALL:
            check_plan(plan)
    return plan


def _check_head(head: Any) -> None:
    if not isinstance(head, dict) or set(head) != _KEYS:
        raise ValueError("its head does not have the entries of a plan")
    if not isinstance(head["path"], str) or not isinstance(head["form"], str) or head["form"] not in WRITTEN:
        raise ValueError(f"its form {shown(head['form'])} is not one that can be written")
    if PurePath(head["path"]).name in ("", ".."):
        raise ValueError(f"its path {shown(head['path'])} does not end in a name")
    check_path(head["path"])
    if type(head["task_bytes"]) is not int or not LEAST_ASKED <= head["task_bytes"] < 1 << 63:
        raise ValueError(f"its task_bytes is {shown(head['task_bytes'])}; it must be at least {LEAST_ASKED}")
    metadata, dtypes, cuts = head["metadata"], head["dtypes"], head["cuts"]
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata does not map names to texts")
    for name in dtypes:
        found = dtype_named(name) if isinstance(name, str) else None
        if found is None or found.bits % 8:
            raise ValueError(f"its dtype {shown(name)} is unknown")
    for cut in cuts:
        check_cut(cut)
    form = WRITTEN[head["form"]]
    if cuts and not form.is_cut:
        raise ValueError(f"it cuts tensors, which the form {head['form']} does not hold")
    for name, length in head["beside"].items():
        is_own = form.beside is not None and form.beside.fullmatch(name) is not None
        goes_along = is_own or (form.takes_files and is_companion(name))
        if not goes_along or type(length) is not int or length < 0:
            raise ValueError(f"it has the file {shown(name)}, which does not go along with a checkpoint")
    if tuple(head["sections"]) != _SECTIONS:
        raise ValueError("it does not have the sections of a plan")
    for nbytes, digests in head["sections"].values():
        if type(nbytes) is not int or nbytes < 0 or not all(isinstance(each, str) for each in digests):
            raise ValueError("it has a section without a length")
    if sum(head["beside"].values()) != head["sections"]["beside"][0]:
        raise ValueError("a companion file has a different length than the plan says")


def check_cut(cut: Any) -> None:
    """Refuse, with ValueError, a cut that is not of the form in which manifests state cuts."""
    is_cut = isinstance(cut, dict) and set(cut) == {"layout", "uneven", "mesh"} and isinstance(cut["mesh"], dict)
    if not is_cut or set(cut["mesh"]) != {"shape", "axis_names"} or cut["uneven"] not in get_args(UnevenRule):
        raise ValueError("it has a cut without a layout, a rule or a mesh")
    layout, shape, names = cut["layout"], cut["mesh"]["shape"], cut["mesh"]["axis_names"]
    specs = [spec if isinstance(spec, list) else [] if spec is None else [spec] for spec in layout]
    is_text = all(isinstance(each, str) for each in [*names, *(axis for spec in specs for axis in spec)])
    if not is_text or len(names) != len(shape) or any(type(size) is not int or size < 1 for size in shape):
        raise ValueError("it has a cut with an invalid layout or mesh")


def check_plan(plan: CheckpointTasks) -> None:
    """Refuse, with ValueError or ParseError, a plan that contradicts itself."""
    rows = _table(plan, "tensors")
    lengths = {
        "name": plan.sections["names"].nbytes,
        "shape": len(_numbers(plan, "shapes")),
        "sources": len(_numbers(plan, "pieces")),
        "replicas": len(_numbers(plan, "replicas")),
        "targets": len(_table(plan, "targets")),
    }
    for column, length in lengths.items():
        _check_ends(rows[column], length)
    _check_ends(plan.numbers("source_ends", 0, len(plan.sources)), plan.sections["sources"].nbytes)
    dtypes, cuts = rows["dtype"], rows["cut"]
    is_known = (dtypes >= 0) & (dtypes < len(plan.dtypes)) & (cuts >= -1) & (cuts < len(plan.head["cuts"]))
    if not (is_known & ((rows["is_object"] | 1) == 1)).all():
        raise ValueError("it has a tensor of a dtype or a cut that it does not list")
    if not WRITTEN[plan.form].has_values and rows["is_object"].any():
        raise ValueError(f"it has values that are not tensors, which the form {plan.form} does not hold")
    for _ in plan.sources:
        pass
    names = _check_tensors(plan)
    _check_texts(plan, names)
    _check_files(plan, rows)
    if plan.place.takes_whole_files:
        return
    counts = zip(plan.tensors, np.diff(rows["targets"], prepend=0).tolist(), strict=True)
    shapes = [(t.shape, t.itemsize, len(t.sources) + len(t.replicas) + count) for t, count in counts]
    if plan.is_shared:
        order = _numbers(plan, "order")
        if not np.array_equal(np.sort(order), np.arange(len(shapes))):
            raise ValueError("its order does not have each tensor once")
        shapes = [shapes[number] for number in order.tolist()]
    runs = (shared_runs if plan.is_shared else task_runs)(shapes, plan.task_bytes)
    if not np.array_equal(table_of("runs", runs), _table(plan, "runs")):
        raise ValueError("its tasks are not those of its tensors")
    if plan.is_shared:
        shares = file_shares(plan, plan.place.least_part)
        if shares is None or not np.array_equal(shares.rows, _table(plan, "shares")):
            raise ValueError("the shares of its files are not those of its tasks")
        if not np.array_equal(shares.ends, _numbers(plan, "share_ends")):
            raise ValueError("the shares of its files are not those of its tasks")


def _numbers(plan: CheckpointTasks, section: str) -> Numbers:
    nbytes = plan.sections[section].nbytes
    if nbytes % 8:
        raise ValueError(f"its {section} are not whole rows")
    return plan.numbers(section, 0, nbytes // 8)


def _table(plan: CheckpointTasks, section: str) -> npt.NDArray[np.void]:
    return table_of(section, _numbers(plan, section))


def _check_ends(ends: Numbers, length: int) -> None:
    if (np.diff(ends, prepend=0) < 0).any() or (ends[-1] if len(ends) else 0) != length:
        raise ValueError("it ends too early, or has more than it lists")


def _check_tensors(plan: CheckpointTasks) -> set[str]:
    names: set[str] = set()
    for tensor in plan.tensors:
        if tensor.name in names:
            raise ValueError(f"it has two tensors called {shown(tensor.name)}")
        _check_name(tensor.name)
        names.add(tensor.name)
        if any(size < 0 for size in tensor.shape) or tensor.nbytes > _LARGEST:
            raise ValueError(f"it has a tensor of shape {shown(tensor.shape)}")
        for rows in (tensor.sources, tensor.replicas):
            check_pieces(rows, tensor.shape, len(plan.sources))
        targets = tensor.targets
        for rows in (tensor.sources, targets.chosen(~repeats(targets)) if plan.has_arrays else targets):
            _check_volume(tensor, rows)
    return names


def _check_name(name: str) -> None:
    """Refuse, with ValueError, the name of a tensor that readers would not accept."""
    try:
        check_tensor_name(name)
    except LayoutError as error:
        raise ValueError(str(error)) from None


def check_pieces(pieces: Pieces, shape: Sequence[int], sources: int) -> None:
    """Refuse, with ValueError, pieces outside of a tensor of this shape, or in a source that does not exist."""
    starts, stops = pieces.starts, pieces.stops
    inside = (starts >= 0).all() and (starts < stops).all() and (stops <= np.array(shape, np.int64)).all()
    numbers, is_negative = pieces.numbers, (pieces.numbers < 0).any() or (pieces.offsets < 0).any()
    if not inside or is_negative or (numbers >= sources).any() or (pieces.strides < 0).any():
        raise ValueError("a piece is outside its tensor, or is in no source")


def _check_volume(tensor: TargetTensor, pieces: Pieces) -> None:
    """Check that pieces together have as many elements as their tensor; the engine finds overlaps."""
    if sum(pieces.volumes.tolist()) * tensor.itemsize != tensor.nbytes:
        raise ValueError(f"the parts of tensor {shown(tensor.name)} do not make the whole tensor")


def _check_texts(plan: CheckpointTasks, names: set[str]) -> None:
    aliases: Any = plan.json("aliases")
    paths: Any = plan.json("paths")
    if not isinstance(aliases, Mapping) or not isinstance(paths, Mapping):
        raise ValueError("its aliases or its paths are invalid")
    for alias, name in aliases.items():
        if alias in names or not isinstance(name, str) or name not in names:
            raise ValueError(f"it ties {shown(alias)} to {shown(name)}, which it does not write")
        _check_name(alias)
    for name, path in paths.items():
        is_path = isinstance(path, list) and all(isinstance(key, str) or type(key) is int for key in path)
        if plan.form != "dcp" or not is_path or not (name in names or name in aliases):
            raise ValueError(f"it has a path for {shown(name)}, which it does not write")


def _check_files(plan: CheckpointTasks, tensors: npt.NDArray[np.void]) -> None:
    rows, slots = _table(plan, "files"), _table(plan, "slots")
    _check_ends(rows["name"], plan.sections["file_names"].nbytes)
    _check_ends(rows["slots"], len(slots))
    if any((rows[column] < 0).any() for column in ("start", "size", "data")) or (rows["size"] < rows["start"]).any():
        raise ValueError("it has a file of no size")
    _numbers(plan, "boxes")
    numbers, places, table = slots["tensor"], slots["place"], plan.slot_table
    if (numbers < 0).any() or (places < 0).any() or (numbers >= len(tensors)).any():
        raise ValueError("a part of one of its files belongs to no tensor")
    if (places + table.width * table.ranks[numbers] > len(table.pool)).any():
        raise ValueError("it has a file with a box that it does not list")
    _check_boxes(plan, numbers, places)
    lengths = HeaderLengths(plan.tensors, len(rows)) if plan.form == "sharded" else None
    expected: list[npt.NDArray[np.void]] = [blank("targets", 0)]
    owners: list[Numbers] = [np.zeros(0, np.int64)]
    for number, (file, row) in enumerate(zip(plan.files, rows, strict=True)):
        sizes = file.slots.nbytes
        if (sizes < 0).any() or int(sizes.sum()) != row["data"] or file.size != file.end or row["start"] != file.start:
            raise ValueError(f"the file {shown(file.name)} has another length than it says")
        if lengths is not None:  # Without making them: they may have millions of entries.
            header = lengths.header(file.name, file.slots, plan.head["metadata"])
        else:
            header = 0 if WRITTEN[plan.form].has_crcs else len(file.before(0)[1])
        if row["start"] != header:
            raise ValueError(f"the file {shown(file.name)} does not have the header that it lists")
        kept = np.flatnonzero(sizes)
        part = blank("targets", len(kept))
        part["file"], part["offset"], part["place"] = (
            number,
            file.start + file.slots.begins[kept],
            file.slots.places[kept],
        )
        expected.append(part)
        owners.append(file.slots.tensors[kept])
    again = repeated_slots(plan.files) if plan.has_arrays else b""
    if plan.sections["again"].nbytes != len(again) or plan.sections["again"].read(0, len(again)) != again:
        raise ValueError("it does not repeat the boxes that it says it repeats")
    owner = np.concatenate(owners)
    counts = np.bincount(owner, minlength=len(tensors)) if len(owner) else np.zeros(len(tensors), np.int64)
    by_tensor = np.concatenate(expected)[np.argsort(owner, kind="stable")]
    is_same = np.array_equal(by_tensor, _table(plan, "targets"))
    if not is_same or not np.array_equal(np.cumsum(counts), tensors["targets"]):
        raise ValueError("the parts of its files are not those of its tensors")


def _check_boxes(plan: CheckpointTasks, numbers: Numbers, places: Numbers) -> None:
    """Check that each slot has a box inside of its tensor, and that every tensor is written.

    A tensor without elements must have exactly one slot.

    Args:
        plan: A plan that was read, with tables that contradict neither each other nor the file.
        numbers: The tensor of each slot.
        places: The place of each slot's box in the pool.
    """
    table, shapes = plan.slot_table, plan.numbers("shapes", 0, plan.sections["shapes"].nbytes // 8)
    ends = np.cumsum(table.ranks)
    is_empty = np.zeros(len(table.ranks), np.bool_)
    for rank, chosen in table.by_rank(numbers):
        tensors = numbers[chosen]
        starts, stops = table.sides(places[chosen], rank)
        whole = shapes[(ends[tensors] - rank)[:, None] + np.arange(rank)]
        is_inside = (starts >= 0) & (starts <= stops) & (stops <= whole)
        empty = (whole == 0).any(axis=1)
        is_whole = ((starts == 0) & (stops == whole)).all(axis=1)
        if not is_inside.all() or not (table.has_arrays or is_whole[empty].all()):
            raise ValueError("a file has a box that is outside its tensor")
        if table.has_arrays:
            begins, shapes_of = table.in_arrays(places[chosen], rank)
            if (begins < 0).any() or (begins + stops - starts > shapes_of).any():
                raise ValueError("a file has a box that is outside its array in the file")
        is_empty[tensors[empty]] = True
    counts = np.bincount(numbers, minlength=len(table.ranks)) if len(numbers) else np.zeros(len(table.ranks), int)
    if (counts == 0).any() or (not table.has_arrays and (counts[is_empty] != 1).any()):
        raise ValueError("it does not write all of its tensors, or writes some of them twice")
