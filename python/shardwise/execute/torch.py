"""A plan of a model among the processes of `torch.distributed`, each with its own tensors.

Every process carries out its own program (`ModelPlan.program`): one message to each peer and round, of the bytes that
go there of all tensors. Messages that are one run are sent from and received into the tensors themselves; others are
put together in a buffer on the tensors' device. Tested with gloo on CPUs; any backend that has `isend` and `irecv` for
`uint8` will do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._arguments import instance
from .._text import shown
from ..errors import LayoutError
from ._ranks import ranks_of
from .model_program import ModelProgram

__all__ = ["run"]


def run(
    program: ModelProgram,
    src: Mapping[str, Any],
    out: Mapping[str, Any],
    *,
    spare: Mapping[str, Any] | None = None,
    ranks: Mapping[Any, int] | Sequence[int] | None = None,
    group: Any = None,
) -> None:
    """Carry out one holder's program of a model; all processes of the group call this together.

    Args:
        program: the process's own, by `ModelPlan.program(holder, memory)`; all with the same `memory`. In each round a
            process keeps one message to and one from each of its peers.
        src: the tensors before, by name, contiguous.
        out: the tensors to write into, by name, contiguous, which share no memory with those of `src`. After an error
            they may hold anything, unless there are spare ones; those of `src` are untouched.
        spare: other tensors of the shapes of `out`, which receive first: when all processes have everything, those of
            `out` are overwritten with them. So these are whole or untouched, whichever process fails, and when.
        ranks: the global rank of each holder, by label or in the order of `descriptors.peers`; that order if not given.
        group: the process group; the default one if not given.

    Raises:
        ImportError: if PyTorch is not installed.
        LayoutError: if a tensor is missing, too small or not contiguous, or ranks are missing; if a peer has another
            plan: on every process of the group, and before anything is sent.
        RuntimeError: what PyTorch raises, on every process of the group, for one that is gone, or does not send what
            it should within the time-out of the group: they all wait for each other at the end.

    >>> run(program, before, after)  # doctest: +SKIP
    """
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        raise ImportError("running a plan among processes of PyTorch needs torch", name="torch") from None
    failure: Exception | None = None
    at: list[int] = []
    before: dict[int, Any] = {}
    after: dict[int, Any] = {}
    kept: dict[int, Any] = {}
    rows = instance("program", program, ModelProgram).descriptors
    try:
        at = ranks_of(rows.peers, ranks, dist.get_world_size())
        own = rows.peers.index(rows.holder)
        if at[own] != dist.get_rank():
            raise LayoutError(f"holder {shown(rows.holder)} is rank {at[own]}, but this process is {dist.get_rank()}")
        before = _memory(torch, program, "src", src)
        after = kept = _memory(torch, program, "out", out)
        if spare is not None:
            after = _memory(torch, program, "spare", spare)
            for number, memory in kept.items():
                if after[number].shape != memory.shape:
                    raise LayoutError(f"spare[{shown(rows.tensors[number])}] is not as large as that of out")
    except Exception as error:
        failure = error
    device = next((one.device for one in (*before.values(), *after.values())), torch.device("cpu"))
    _agree(torch, dist, program, at, failure, device, group)
    for row in rows.zeros:
        _view(after[int(row["dst_tensor"])], row, "dst").zero_()
    for row in rows.copies:
        _view(after[int(row["dst_tensor"])], row, "dst").copy_(_view(before[int(row["src_tensor"])], row, "src"))
    #: The bytes sent to a rank, and received from it.
    moved: dict[tuple[bool, int], int] = {}
    for tag in np.unique(program.messages["tag"]).tolist():
        waiting = []
        filled: list[tuple[Any, list[Any]]] = []
        for sends, peer, _, size, first, stop in program.messages[program.messages["tag"] == tag].tolist():
            memory, side, listed = (before, "src", rows.sends) if sends else (after, "dst", rows.receives)
            views = [_view(memory[int(row[f"{side}_tensor"])], row, side) for row in listed[first:stop]]
            direct = len(views) == 1 and views[0].is_contiguous()
            data = views[0].reshape(-1) if direct else torch.empty(size, dtype=torch.uint8, device=device)
            moved[sends, at[peer]] = moved.get((sends, at[peer]), 0) + data.numel()
            if sends:
                if not direct:
                    torch.cat([view.reshape(-1) for view in views], out=data)
                waiting.append(dist.isend(data, at[peer], group=group, tag=tag))
                # Kept until it is sent.
                filled.append((data, []))
            else:
                waiting.append(dist.irecv(data, at[peer], group=group, tag=tag))
                filled.append((data, [] if direct else views))
        for work in waiting:
            work.wait()
        for data, views in filled:
            used = 0
            for view in views:
                view.copy_(data[used : used + view.numel()].reshape(view.shape))
                used += view.numel()
    _confirm(torch, dist, moved, device, group)
    if spare is not None:
        _take_over(program, after, kept)


def _confirm(torch: Any, dist: Any, moved: Mapping[tuple[bool, int], int], device: Any, group: Any) -> None:
    """Compare what all have sent with what the others should have; whoever fails before leaves all others waiting.

    A backend may take a message that is shorter than the memory for it, and say nothing.
    """
    counts = torch.zeros(2, dist.get_world_size(group), dtype=torch.int64, device=device)
    for (sends, rank), count in moved.items():
        there = dist.get_group_rank(group, rank) if group is not None else rank
        counts[0 if sends else 1, there] += count
    found = [torch.empty_like(counts) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, counts, group=group)
    for one, (sent, _) in enumerate(found):
        for other, (_, expected) in enumerate(found):
            if int(sent[other]) != int(expected[one]):
                raise LayoutError(
                    f"rank {one} of the group has sent {int(sent[other])} bytes to rank {other}, which should have "
                    f"{int(expected[one])}"
                )


def _take_over(program: ModelProgram, spare: Mapping[int, Any], out: Mapping[int, Any]) -> None:
    """Copy what was received, and nothing else: what is padding in the tensors stays as it is."""
    rows = program.descriptors
    for each in (rows.receives, rows.copies, rows.zeros):
        for row in each:
            number = int(row["dst_tensor"])
            _view(out[number], row, "dst").copy_(_view(spare[number], row, "dst"))


def _agree(torch: Any, dist: Any, program: ModelProgram, at: list[int], failure: Any, device: Any, group: Any) -> None:
    """Raise on all processes if one of them cannot begin, or two of them have other plans for each other."""
    size, own = dist.get_world_size(group), dist.get_rank(group)
    state = torch.zeros(size, 32, dtype=torch.uint8, device=device)
    if failure is None:
        for label, rank in zip(program.descriptors.peers, at, strict=True):
            if label != program.descriptors.holder:
                there = dist.get_group_rank(group, rank) if group is not None else rank
                state[there] = torch.frombuffer(bytearray(program.digest(label)), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(state) for _ in range(size)]
    dist.all_gather(gathered, state, group=group)
    flags = torch.tensor([0 if failure is None else 1], dtype=torch.uint8, device=device)
    failed = [torch.empty_like(flags) for _ in range(size)]
    dist.all_gather(failed, flags, group=group)
    if failure is not None:
        raise failure
    for rank, flag in enumerate(failed):
        if int(flag[0]):
            raise LayoutError(f"rank {rank} of the group cannot begin; its own error says why")
    for one in range(size):
        for other in range(one):
            if not torch.equal(gathered[one][other], gathered[other][one]):
                raise LayoutError(
                    f"ranks {other} and {one} of the group have other plans for each other; this is rank {own}"
                )


def _memory(torch: Any, program: ModelProgram, what: str, tensors: Mapping[str, Any]) -> dict[int, Any]:
    """The bytes of the tensors that rows name, each large enough for them."""
    found = {}
    for number, least in program.needed("src" if what == "src" else "dst"):
        name = program.descriptors.tensors[number]
        if name not in tensors:
            raise LayoutError(f"{what} has no tensor {shown(name)}")
        tensor = tensors[name]
        if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous():
            raise LayoutError(f"{what}[{shown(name)}] must be a contiguous tensor")
        if tensor.numel() * tensor.element_size() < least:
            held = tensor.numel() * tensor.element_size()
            raise LayoutError(f"{what}[{shown(name)}] has {held} bytes; the plan needs {least}")
        found[number] = tensor.detach().reshape(-1).view(torch.uint8)
    return found


def _view(memory: Any, row: Any, side: str) -> Any:
    """The runs of a row as a tensor (count, bytes) over memory that is known to be large enough."""
    count, size = int(row["count"]), int(row["bytes"])
    start, stride = int(row[f"{side}_offset"]), int(row[f"{side}_stride"])
    return memory.as_strided((count, size), (stride if count > 1 else size, 1), memory.storage_offset() + start)
