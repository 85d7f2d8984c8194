"""Which files a checkpoint's path means: a file, a folder, or the index of a checkpoint in several files."""

from pathlib import Path

from ...errors import ParseError
from ..files import DataFile
from ..object_files import open_file, opening
from ..text import MAX_JSON, shorten, stays_inside, strict_json
from .header import Entry, read_header

__all__ = ["locate_checkpoint", "open_entries", "read_index"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def locate_checkpoint(path: Path) -> Path:
    """Find the file or index that a path means; a folder is searched as by Hugging Face's `from_pretrained`.

    In a folder that is `model.safetensors`, else `model.safetensors.index.json`, else the only index, else the only
    `.safetensors` file there is.

    Raises:
        FileNotFoundError: if the folder holds no such file, or more than one.
    """
    if not path.is_dir():
        return path
    for name in (_SINGLE, _INDEX):
        if (path / name).exists():
            return path / name
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(path.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(file.name for file in found[:3])
            raise FileNotFoundError(f"{path}: {len(found)} {pattern} files ({names}, ...), none of them {_SINGLE}")
    raise FileNotFoundError(f"{path}: no {_SINGLE}, no {_INDEX}, no other .safetensors file")


def read_index(path: Path) -> dict[str, str]:
    """Read the map from tensor name to file name of an index in Hugging Face's format.

    Raises:
        ParseError: if it is not such an index, or names a file outside its own folder.
    """
    file = open_file(path)
    try:
        if file.size > MAX_JSON:
            raise ParseError(f"{path}: index of {file.size} bytes; at most {MAX_JSON} are allowed")
        index = strict_json(file.read(0, file.size), path)
    finally:
        file.close()
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ParseError(f"{path}: not a checkpoint index: no weight_map from tensor names to file names")
    for name in set(weight_map.values()):
        if not stays_inside(name):
            raise ParseError(f"{path}: weight_map names the file {shorten(name)}, outside the index's own folder")
    return weight_map


def open_entries(path: Path) -> tuple[dict[str, Entry], dict[str, str], list[DataFile]]:
    """Open a file, or the files of an index, and read their headers: tensors, metadata, open files."""
    if path.suffix == ".json":
        return _merge(path, read_index(path))
    file = open_file(path)
    try:
        entries, metadata = read_header(file)
    except BaseException:
        file.close()
        raise
    return entries, metadata, [file]


def _merge(index: Path, weight_map: dict[str, str]) -> tuple[dict[str, Entry], dict[str, str], list[DataFile]]:
    """Open the files that an index names and put their headers together: tensors, metadata, open files.

    A loader would load what the files hold. The index says which files there are, and decides if two hold the same
    name; each tensor that it lists must be where it says.

    Raises:
        ParseError: if a file is missing or wrong, or the index and the files contradict each other.
    """
    entries: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    files: list[DataFile] = []
    try:
        names = sorted(set(weight_map.values()))
        open_next = opening([index.parent / name for name in names])
        for name in names:
            try:
                file = open_next(index.parent / name)
            except FileNotFoundError:
                raise ParseError(f"{index}: weight_map names the file {shorten(name)}, which does not exist") from None
            files.append(file)
            tensors, texts = read_header(file)
            metadata |= texts
            for tensor, entry in tensors.items():
                if weight_map.get(tensor, name) != name:
                    continue
                if tensor in entries:
                    held = entries[tensor].file.name
                    raise ParseError(f"{index}: {held} and {name} both hold {shorten(tensor)}, which is not listed")
                entries[tensor] = entry
        for tensor, name in weight_map.items():
            if tensor not in entries:
                raise ParseError(f"{index}: lists {shorten(tensor)} in {shorten(name)}, which does not hold it")
    except BaseException:
        for file in files:
            file.close()
        raise
    return entries, metadata, files
