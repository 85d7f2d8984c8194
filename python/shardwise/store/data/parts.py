"""Files that are parts of a checkpoint, recognised by their names and headers; such a file alone is no checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from ..._text import shown
from ...errors import ParseError
from .location import Location
from .text import are_sizes

__all__ = [
    "BARE",
    "BY_RULES",
    "ENGINE_FILE",
    "FSDP_FOLDER",
    "ITEM_INDEX",
    "LEGACY",
    "MANIFEST",
    "MARK",
    "MODEL_FILES",
    "OPTIMIZER_FILE",
    "PIECES",
    "RANKS",
    "RANK_FILE",
    "RANK_ITEM",
    "REKEYED_FILE",
    "SHARDING_INFO",
    "WHOLE_FILE",
    "bare_ranks",
    "check_whole",
    "complete_set",
    "part_mark",
    "said_files",
]

#: The file that lists the contents of a folder of our own format.
MANIFEST = "shardwise.json"
#: The key of a header's metadata under which PyTorch's files state the offsets of their parts in whole tensors.
SHARDING_INFO = "DCP_SHARDING_INFO"
#: The key under which a rank's file of our format states which boxes of tensors its arrays consist of.
PIECES = "shardwise.pieces"
#: The file that lists the file of each rank.
RANKS = "ranks.json"
#: Patterns of the names of files for ranks: ours, and those of the engines' loaders.
RANK_FILE = r"rank-\d{5,}(?:-[A-Za-z0-9_.]+-\d+)*\.safetensors"
ENGINE_FILE = r"model-(?:rank-\d+|pp-\d+-tp-\d+)-part-\d+\.safetensors"
#: The index of torch_checkpointing's folders, and the name of a rank's file of an item.
ITEM_INDEX, RANK_ITEM = "metadata.pkl", re.compile(r"(?P<item>.+)_(?P<rank>\d{1,6})\.(?P<kind>pt|json)", re.ASCII)
#: Patterns of the names of optimizers' files next to a model, and names of models' files.
OPTIMIZER_FILE = r"optim(?:izer)?(?:_(?P<number>\d{1,4}))?\.(?:pt|pth|bin)"
MODEL_FILES = ("pytorch_model_fsdp.bin", "model.pt", "model.pth", "model.bin")
#: A file with a model and its optimizer; the same optimizer, renumbered for FSDP; folders that accelerate writes.
WHOLE_FILE, REKEYED_FILE = "checkpoint.pt", r"optim(?:izer)?_by_\w+\.pt"
FSDP_FOLDER = r"(?:pytorch_model_fsdp|optimizer)_\d{1,4}"
#: The key under which a file of our format states that it is a part, and of how many files.
MARK = "shardwise.part"
_NUMBERED = re.compile(r"(.*?)(\d{5,18})-of-(\d{5,18})(\.[a-z.]+)")
#: Names of files that hold one process's part of a checkpoint, or some groups of a Keras file.
_ONE_OF_MANY = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors|.*_\d{5}\.weights\.h5")
#: Names of files of trainers' ranks; their tensors may be DTensors, which are read only from all files together.
_OF_A_RANK = re.compile(r".*_world_size_(?!1_)\d+_rank_\d+\.pt")
#: Names of ranks' files that do not state how tensors are cut, such as Meta's; and of Megatron's folders of ranks.
_BARE_RANK = re.compile(
    r"(?P<start>(?:.*[._-])?(?:consolidated\.|(?:rank|part|shard|tp|mp)[._-]?))(?P<rank>\d{1,6})"
    r"(?P<end>(?:[._-][A-Za-z][\w.-]*)?\.(?:pth?|bin|ckpt|safetensors))",
    re.ASCII,
)
_RANK_FOLDER = re.compile(r"(?P<start>mp_rank_)(?P<rank>\d\d)(?P<end>(?:_\d{3})?)", re.ASCII)
#: Advice for files of ranks that do not say how they are cut, and with those of Megatron.
BY_RULES = (
    "nothing in them says how tensors are cut, but rules can: save the tensors of open_checkpoint(FILE, part=True) of "
    "each rank as rank.0.NAME, rank.1.NAME, …, and reshard that by rewrites such as from = 'rank.{r}.NAME', to = { "
    "name = 'NAME', dims = '(r rows) n -> rows n' } (docs/coming-from.md)"
)
#: Advice for a folder that has such a file for every rank of a mesh.
BARE = (
    "nothing in them says how tensors are cut, but rules can: reshard takes them as the ranks of a mesh with "
    "source_layouts, on the command line --source-rules FILE --source-mesh tp=2 (docs/coming-from.md)"
)
LEGACY = (
    "is a legacy checkpoint of Megatron, which its training script writes as torch_dist if started with "
    f"--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER; {BY_RULES}"
)
_MOST_NAMED = 4
_ALONE = "open the folder that has all parts, or its index; open_checkpoint(..., part=True) opens this file alone"


def part_mark(files: int, shapes: Mapping[str, Iterable[int]] | None = None) -> dict[str, str]:
    """Return the entry of a header that marks its file as a part of a checkpoint.

    Args:
        files: The number of files of the checkpoint.
        shapes: The whole shapes of the tensors that are cut.
    """
    said: dict[str, Any] = {"files": files}
    if shapes is not None:
        said["shapes"] = {name: list(shape) for name, shape in shapes.items()}
    return {MARK: json.dumps(said, separators=(",", ":"), ensure_ascii=False)}


def said_files(texts: Mapping[str, str]) -> int | None:
    """Return the number of files that a header's metadata states for the checkpoint; `None` if it states none."""
    try:
        said = json.loads(texts.get(MARK, "null"))
    except (ValueError, RecursionError):
        return None
    files = said.get("files") if isinstance(said, dict) else None
    return files if are_sizes([files]) else None


def check_whole(path: Location, texts: Mapping[str, str] | None = None) -> None:
    """Refuse a file that is only a part of a checkpoint, judged by its name or its header's metadata.

    Raises:
        ParseError: if it is; the message states the number of files, if it is known.
    """
    match = _NUMBERED.fullmatch(path.name)
    if _OF_A_RANK.fullmatch(path.name):
        raise ParseError(f"{path}: its name says that it is the part of one rank; open the folder that has all parts")
    if _ONE_OF_MANY.fullmatch(path.name):
        raise ParseError(f"{path}: its name says that it is one of several files of a checkpoint; {_ALONE}")
    for one, pattern in ((path, _BARE_RANK), (path.parent, _RANK_FOLDER)):
        bare = pattern.fullmatch(one.name)
        if bare is not None and any(other.exists() for other in _neighbours(one, bare)):
            raise ParseError(f"{path}: its name says that it is the part of one rank; {_ALONE}")
    if match is not None and int(match[3]) > 1:
        raise ParseError(
            f"{path}: its name says that it is file {int(match[2])} of {int(match[3])} of a checkpoint; {_ALONE}"
        )
    files = said_files(texts or {})
    if files is not None and files > 1:
        raise ParseError(f"{path}: its metadata says that it is one of {files} files of a checkpoint; {_ALONE}")


def _neighbours(path: Location, match: re.Match[str]) -> list[Location]:
    """Return the paths that the files or folders of the ranks before and after this one would have."""
    number, width = int(match["rank"]), len(match["rank"])
    near = (at for at in (number - 1, number + 1) if at >= 0)
    return [path.with_name(f"{match['start']}{at:0{width}}{match['end']}") for at in near]


def bare_ranks(names: Iterable[str]) -> dict[int, str]:
    """Return, by rank, the largest set of equally named ranks' files that do not state how tensors are cut."""
    sets: dict[tuple[str, str], dict[int, str]] = {}
    for name in sorted(names):
        match = _BARE_RANK.fullmatch(name)
        if match is not None:
            sets.setdefault((match["start"], match["end"]), {})[int(match["rank"])] = name
    return max(sets.values(), key=len, default={})


def complete_set(folder: Location, names: Iterable[str], suffix: str, index: str) -> list[str]:
    """Return the numbered files of a folder without an index, `model-00001-of-00002` and so on, if all are there.

    Args:
        folder: The folder, for messages.
        names: The names in the folder.
        suffix: The ending of the files' names.
        index: The name of the index that is missing, for messages.

    Raises:
        ParseError: if some files are missing (the message names them), or they belong to different checkpoints.
    """
    sets: dict[tuple[str, int], dict[int, str]] = {}
    for name in sorted(names):
        match = _NUMBERED.fullmatch(name)
        if match is not None and match[4] == suffix and int(match[3]) > 1:
            sets.setdefault((match[1], int(match[3])), {})[int(match[2])] = name
    if len(sets) > 1:
        held = ", ".join(shown(next(iter(one.values()))) for one in list(sets.values())[:_MOST_NAMED])
        raise ParseError(
            f"{folder}: has no {index}, and files of {len(sets)} checkpoints ({held}); put each in a folder"
        )
    for (start, count), there in sets.items():
        if len(there) != count or not 1 <= min(there) <= max(there) <= count:
            absent = islice((number for number in range(1, count + 1) if number not in there), _MOST_NAMED)
            more = count - len(there) - _MOST_NAMED
            named = ", ".join(f"{start}{number:05}-of-{count:05}{suffix}" for number in absent)
            raise ParseError(
                f"{folder}: has {len(there)} of the {count} files of a checkpoint, and no {index}; {named}"
                f"{f' and {more} more' if more > 0 else ''} {'are' if more > 0 or ',' in named else 'is'} missing: the "
                "copy was interrupted, or files were left out"
            )
        return [there[number] for number in sorted(there)]
    return []
