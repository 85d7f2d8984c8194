"""The folders of Megatron's model-parallel ranks, and the file of each."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ....errors import ParseError
from ...data.files import Holder
from ...data.location import Location, entries_of
from ...data.parts import LEGACY
from ...tensors.stored import UnsupportedError
from ..torch.tensors import Container, SavedTensor, named_values
from .said import Arguments, as_dict, read_arguments

__all__ = ["MegatronRank", "folders_of", "is_chunk", "not_read", "rank_of"]


_CHUNK = re.compile(r"model\d{0,3}")
_FOLDER = re.compile(r"mp_rank_(?P<tp>\d\d)(?:_(?P<pp>\d{3}))?(?:_\d{3})?", re.ASCII)


class MegatronRank(NamedTuple):
    """The file of one model-parallel rank.

    Attributes:
        values: The values at the top of its dict.
        arguments: The arguments of Megatron's script.
        chunks: The tensors of each chunk of the model, by their names in the chunk.
        optimizer: The file with the states of the distributed optimizer, if there is one.
    """

    container: Container
    values: dict[Any, Any]
    arguments: Arguments
    chunks: list[dict[str, SavedTensor]]
    optimizer: Container | None

    @property
    def path(self) -> Location:
        """The path of the file."""
        path: Location = self.container.file.path
        return path


def folders_of(path: Location) -> dict[tuple[int, int], str]:
    """Return the folders of ranks, by tensor-parallel rank and stage."""
    found: dict[tuple[int, int], str] = {}
    for name, _ in entries_of(path):
        match = _FOLDER.fullmatch(name)
        if match is None:
            continue
        at = int(match["tp"]), int(match["pp"] or 0)
        if at in found:
            raise not_read(
                path,
                f"{found[at]} and {name} are of the same tensor-parallel rank and stage, as if experts were "
                "spread over ranks",
            )
        found[at] = name
    return dict(sorted(found.items()))


def not_read(where: object, why: str) -> UnsupportedError:
    """Return the error about a checkpoint that is not read."""
    return UnsupportedError(f"{where}: is not read, because {why}; it {LEGACY}")


def is_chunk(key: Any) -> bool:
    """Return whether a key of a rank's values is that of a chunk of the model."""
    return isinstance(key, str) and _CHUNK.fullmatch(key) is not None


def rank_of(file: Holder, states: Holder | None) -> MegatronRank:
    """Return a rank's file, and the file with its optimizer's states."""
    container = Container(file)
    values = as_dict(container.read_objects())
    if "args" not in values:
        raise not_read(file.path, "it lacks the args of Megatron's training script, so its parallelism is not known")
    arguments = read_arguments(values["args"], file.path)
    chunks = []
    for key in sorted((key for key in values if is_chunk(key)), key=_in_order):
        tensors: dict[str, SavedTensor] = {}
        for name, value in named_values(values[key], file.path, file.size):
            saved = container.tensor(value, name)
            if saved is not None and not name.endswith("_extra_state"):
                tensors[name] = saved
        chunks.append(tensors)
    if not chunks:
        raise ParseError(f"{file.path}: has no model")
    return MegatronRank(container, values, arguments, chunks, None if states is None else Container(states))


def _in_order(key: str) -> tuple[int, str]:
    return len(key), key
