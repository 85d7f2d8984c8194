"""The files that a checkpoint's path stands for: a file, a folder, or the index of a checkpoint in several files."""

import json
from collections.abc import Sequence

from ...._text import shown
from ....errors import ParseError
from ...data.files import Holder
from ...data.location import Location, entries_of, open_file, opening, read_json
from ...data.parts import BARE, MANIFEST, MARK, SHARDING_INFO, check_whole, complete_set, said_files
from ...data.text import stays_inside
from .header import Entry, read_header

__all__ = ["locate_checkpoint", "numbered_files", "open_entries", "read_index"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def locate_checkpoint(path: Location) -> Location:
    """Return the file or index that a path stands for; a folder is searched as by Hugging Face's `from_pretrained`.

    In a folder it is `model.safetensors`, else `model.safetensors.index.json`, else the only index, else the only
    `.safetensors` file; else the folder itself, if it has all files of a checkpoint without an index.

    Raises:
        ParseError: if the folder has files of which some are missing, or that do not belong together.
    """
    if not path.is_dir():
        return path
    for name in (_SINGLE, _INDEX):
        if (path / name).exists():
            return path / name
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(path.glob(pattern))
        if found and numbered_files(path):
            return path
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(file.name for file in found[:3])
            raise ParseError(
                f"{path}: {len(found)} {pattern} files ({names}, ...), none of them {_SINGLE}: nothing says "
                "what belongs together; open one of them; if they are what the ranks of a model hold, "
                f"{BARE}"
            )
    raise ParseError(f"{path}: no {_SINGLE}, no {_INDEX}, no other .safetensors file")


def numbered_files(folder: Location) -> list[str]:
    """Return the numbered files of a folder without an index; no files if it has one, or they are not numbered.

    Raises:
        ParseError: if some are missing.
    """
    names = [name for name, _ in entries_of(folder)]
    if any(name.endswith(".safetensors.index.json") for name in names):
        return []
    return complete_set(folder, names, ".safetensors", _INDEX)


def read_index(path: Location) -> dict[str, str]:
    """Read the map from tensor name to file name of an index in Hugging Face's format.

    Raises:
        ParseError: if it is not such an index, or names a file outside its own folder.
    """
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ParseError(f"{path}: not a checkpoint index: no weight_map from tensor names to file names")
    for name in set(weight_map.values()):
        if not stays_inside(name):
            raise ParseError(f"{path}: weight_map names the file {shown(name)}, outside the index's own folder")
    return weight_map


def open_entries(path: Location, *, part: bool = False) -> tuple[dict[str, Entry], dict[str, str], list[Holder]]:
    """Open a file, or the files of an index or a folder; return their headers' entries, metadata, and the open files.

    Args:
        path: As `locate_checkpoint` returns it.
        part: Whether a file may be a part of a checkpoint.

    Raises:
        ParseError: if a file is a part of a checkpoint that is not there, missing or wrong; or the index and the files
            contradict each other.
    """
    if path.suffix == ".json":
        return _merge(path, read_index(path))
    if path.is_dir():
        return _merge(path, {}, numbered_files(path))
    if not part:
        check_whole(path)
    file = open_file(path)
    try:
        entries, metadata = read_header(file)
        if not part:
            check_whole(path, metadata)
            _check_offsets(file, metadata)
    except BaseException:
        file.close()
        raise
    return entries, {key: text for key, text in metadata.items() if key != MARK}, [file]


def _check_offsets(file: Holder, metadata: dict[str, str]) -> None:
    """Refuse a PyTorch file that holds parts of tensors, as its metadata says, that do not begin at 0."""
    try:
        info = json.loads(metadata.get(SHARDING_INFO, "{}"))
    except (ValueError, RecursionError):
        return
    for name, said in info.items() if isinstance(info, dict) else ():
        offsets = said.get("saved_offsets") if isinstance(said, dict) else None
        if isinstance(offsets, list) and any(offsets):
            raise ParseError(
                f"{file.path}: holds a part of {shown(name)}, from {shown(offsets)} on; open the folder that has "
                "all parts; open_checkpoint(..., part=True) opens this file alone"
            )


def _merge(
    index: Location, weight_map: dict[str, str], names: Sequence[str] = ()
) -> tuple[dict[str, Entry], dict[str, str], list[Holder]]:
    """Open the files that an index names and combine their headers: tensors, metadata, open files.

    All tensors of the files count, as for Hugging Face's loader. The index lists the files, and decides if two hold the
    same name; each tensor that it lists must be in the file that it states. Without an index, a folder and names are
    given.
    """
    entries: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    folder = index if names else index.parent
    names = names or sorted(set(weight_map.values()))
    with opening([folder / name for name in names]) as (open_next, files):
        for name in names:
            try:
                file = open_next(folder / name)
            except FileNotFoundError:
                raise ParseError(f"{index}: weight_map names the file {shown(name)}, which does not exist") from None
            tensors, texts = read_header(file)
            if folder == index and said_files(texts) is not None and not (folder / MANIFEST).exists():
                raise ParseError(
                    f"{folder}: has neither {_INDEX} nor {MANIFEST}, which are written last: the run that made it was "
                    "interrupted, or files are missing"
                )
            metadata |= {key: text for key, text in texts.items() if key != MARK}
            kept = {tensor: entry for tensor, entry in tensors.items() if weight_map.get(tensor, name) == name}
            if not entries.keys().isdisjoint(kept.keys()):
                twice = next(tensor for tensor in kept if tensor in entries)
                held = entries[twice].file.name
                raise ParseError(f"{index}: {held} and {name} both hold {shown(twice)}, which is not listed")
            entries |= kept
        if not weight_map.keys() <= entries.keys():
            tensor, name = next(pair for pair in weight_map.items() if pair[0] not in entries)
            raise ParseError(f"{index}: lists {shown(tensor)} in {shown(name)}, which does not hold it")
    return entries, metadata, files
