"""Arrays that hold all buckets of a rank one after the other without padding, as in `distrib_optim.pt`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ...._text import counted, shown
from ....errors import ParseError
from ...data.boxes import Located
from ...tensors.stored import UnsupportedError
from ..torch.pickles import Record
from ..torch.tensors import Container, SavedTensor, items_within
from .parameters import Parameter, Run, differing
from .positions import in_sequence

__all__ = ["SAVE_AGAIN", "coalesced_states"]

_MOST_STATES = 100
#: Advice if the places of parameters cannot be worked out.
SAVE_AGAIN = "start Megatron's training script once with --dist-ckpt-optim-fully-reshardable, and save"


def coalesced_states(
    container: Container, value: Any, buffers: Sequence[Sequence[Parameter]], rank: str
) -> Iterator[tuple[Parameter, str, list[Run]]]:
    """Yield each state of each parameter of a rank, with the place of its elements.

    Args:
        container: The file that has the arrays.
        value: The value saved in it.
        buffers: The parameters of each buffer, in the order of the model.
        rank: The rank, for messages.

    Raises:
        UnsupportedError: if the place of a parameter is not certain.
        ParseError: if the arrays do not fit the parameters.
    """
    where = container.file.path
    said = dict(items_within(value) or ()) if isinstance(value, (dict, Record)) else {}
    if said.get("buckets_coalesced") is not True:
        raise UnsupportedError(
            f"{where}: has the states of {rank} bucket by bucket, with padding, as old versions wrote them; "
            f"{SAVE_AGAIN}"
        )
    numbers = sorted(key for key in said if type(key) is int)
    if numbers != list(range(len(buffers))):
        raise UnsupportedError(
            f"{where}: has {counted(len(numbers), 'buffer')} of {rank}, but its parameters need {len(buffers)}"
        )
    for number, parameters in enumerate(buffers):
        dtypes = items_within(said[number]) or ()
        if len(dtypes) != 1:
            raise UnsupportedError(f"{where}: buffer {number} of {rank} is of {len(dtypes)} pairs of dtypes, not one")
        kinds, total = _arrays(container, dtypes[0][1], f"buffer {number} of {rank}")
        starts = _starts(container, kinds["param"], total, parameters, f"buffer {number} of {rank}")
        for kind, saved in kinds.items():
            for parameter, start in zip(parameters, starts, strict=True):
                yield parameter, kind, [_run(container, saved, kind, start, parameter)]


def _arrays(container: Container, value: Any, what: str) -> tuple[dict[str, SavedTensor], int]:
    """Return a buffer's arrays by kind of state, and their length."""
    where = container.file.path
    kinds: dict[str, SavedTensor] = {}
    total: Any = None
    for kind, held in (items_within(value) or ())[:_MOST_STATES]:
        if kind == "numel_unpadded":
            total = held
        elif isinstance(kind, str) and isinstance(held, Record):
            saved = container.tensor(held, kind)
            if saved is None or saved.dtype.name != "float32" or len(saved.shape) != 1 or saved.strides != (1,):
                raise UnsupportedError(f"{where}: {kind} of {what} is not one array of float32")
            kinds[kind] = saved
    lengths = {saved.shape[0] for saved in kinds.values()}
    if "param" not in kinds or len(lengths) != 1 or total not in (None, *lengths):
        raise ParseError(
            f"{where}: {what} has arrays of {shown(sorted(lengths))} elements, and {shown(total)} without padding"
        )
    return kinds, lengths.pop()


def _starts(
    container: Container, masters: SavedTensor, total: int, parameters: Sequence[Parameter], what: str
) -> list[int]:
    """Return the first element of each parameter in the arrays of a buffer."""
    where = container.file.path
    found = in_sequence(parameters, total)
    if not found:
        raise UnsupportedError(
            f"{where}: {what} has {total} elements, but no buckets of its {len(parameters)} parameters have as many: "
            f"the file belongs to another checkpoint, or some parameters are not trained; {SAVE_AGAIN}"
        )
    right, wrong = [], ""
    for starts in found:
        why = ""
        for parameter, start in zip(parameters, starts, strict=True):
            why = differing(parameter, [_run(container, masters, "param", start, parameter)])
            if why:
                break
        wrong = wrong or why
        right += [] if why else [starts]
    if not right:
        raise ParseError(
            f"{where}: {what}: {wrong}: the file belongs to another checkpoint, or Megatron laid its buckets out in "
            "another way"
        )
    if len(right) > 1:
        raise UnsupportedError(f"{where}: {what} may be cut into buckets in {len(right)} ways; {SAVE_AGAIN}")
    return right[0]


def _run(container: Container, saved: SavedTensor, kind: str, start: int, parameter: Parameter) -> Run:
    return Run(0, parameter.size, container.file.path, partial(_located, container, saved, kind, start))


def _located(container: Container, saved: SavedTensor, kind: str, start: int) -> Located:
    file, begin, _ = container.extent(saved, kind)
    return file, begin + 4 * start, (4,)
