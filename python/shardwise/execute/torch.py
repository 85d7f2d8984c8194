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
    ranks: Mapping[Any, int] | Sequence[int] | None = None,
    group: Any = None,
) -> None:
    """Carry out one holder's program of a model; all processes of the group call this together.

    Args:
        program: the process's own, by `ModelPlan.program(holder, memory)`; all with the same `memory`. In each round a
            process keeps one message to and one from each of its peers.
        src: the tensors before, by name, contiguous.
        out: the tensors to write into, by name, contiguous, which share no memory with those of `src`. After an error
            they may hold anything, those of `src` are untouched.
        ranks: the global rank of each holder, by label or in the order of `descriptors.peers`; that order if not given.
        group: the process group; the default one if not given.

    Raises:
        ImportError: if PyTorch is not installed.
        LayoutError: if a tensor is missing, too small or not contiguous, or ranks are missing; if a peer has another
            plan: on every process of the group, and before anything is sent.
        RuntimeError: what PyTorch raises, such as for a peer that is gone, or that does not answer within the time-out
            of the group.

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
    rows = instance("program", program, ModelProgram).descriptors
    try:
        at = ranks_of(rows.peers, ranks, dist.get_world_size())
        own = rows.peers.index(rows.holder)
        if at[own] != dist.get_rank():
            raise LayoutError(f"holder {shown(rows.holder)} is rank {at[own]}, but this process is {dist.get_rank()}")
        before = _memory(torch, program, "src", src)
        after = _memory(torch, program, "out", out)
    except Exception as error:
        failure = error
    device = next((one.device for one in (*before.values(), *after.values())), torch.device("cpu"))
    _agree(torch, dist, program, at, failure, device, group)
    for row in rows.zeros:
        _view(after[int(row["dst_tensor"])], row, "dst").zero_()
    for row in rows.copies:
        _view(after[int(row["dst_tensor"])], row, "dst").copy_(_view(before[int(row["src_tensor"])], row, "src"))
    for tag in np.unique(program.messages["tag"]).tolist():
        waiting = []
        filled: list[tuple[Any, list[Any]]] = []
        for sends, peer, _, size, first, stop in program.messages[program.messages["tag"] == tag].tolist():
            memory, side, listed = (before, "src", rows.sends) if sends else (after, "dst", rows.receives)
            views = [_view(memory[int(row[f"{side}_tensor"])], row, side) for row in listed[first:stop]]
            direct = len(views) == 1 and views[0].is_contiguous()
            data = views[0].reshape(-1) if direct else torch.empty(size, dtype=torch.uint8, device=device)
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
