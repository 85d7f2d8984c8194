"""A plan of a model among the processes of `torch.distributed`, each with its own tensors.

Every process carries out its own program (`ModelPlan.program`), message by message, in parts that both sides know: what
is contiguous and large goes straight from tensor to tensor; the rest is put together in a few buffers on the tensors'
device, which are used again and again. Nobody waits for a round. Tested with gloo on CPUs; any backend that has `isend`
and `irecv` for `uint8` will do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .._arguments import instance
from .._text import shown
from ..errors import LayoutError
from ..reshard.model.memory import Block, check_apart, named, repeats_in
from ..reshard.model.program import ModelProgram
from ._ranks import ranks_of

__all__ = ["run"]

#: Bytes of a buffer, and how many of them a process has. Larger ones do not stay in the processor's caches between
#: the copy and the kernel's. After them is room for the mark at the end of a part.
_BUFFER, _BUFFERS, _ROOM = 2**20, 8, 64
#: The byte after the last one of a part.
_MARK = 1
#: From how many bytes on a run is sent on its own: a message costs gloo about as much as copying these twice.
_ALONE = 2**18

#: A row of descriptors, as a tuple.
Row = tuple[int, ...]
_BYTES, _COUNT, _SRC_STRIDE, _DST_STRIDE = 5, 6, 7, 8


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
        program: the process's own, by `ModelPlan.program(holder)`; if with `memory`, all with the same. Whatever that
            is, a process takes 8 MiB besides the tensors.
        src: the tensors before, by name, contiguous.
        out: the tensors to write into, by name, contiguous, which share no memory with those of `src`, nor with one
            another. What `LocalParameter.views` gives for further places of a tensor (`Repeat`) is filled too. After an
            error they may hold anything, unless there are spare ones; those of `src` are untouched.
        spare: other tensors of the shapes of `out`, which receive first: when all processes have everything, those of
            `out` are overwritten with them. So these are whole or untouched, whichever process fails, and when.
        ranks: the global rank of each holder, by label or in the order of `descriptors.peers`; that order if not given.
        group: the process group; the default one if not given.

    Raises:
        ImportError: if PyTorch is not installed.
        LayoutError: if a tensor is missing, too small or not contiguous, or one to write into shares memory with
            another; if ranks are missing; if a peer has another plan: on every process of the group, and before
            anything is sent. If a message was shorter than it should be: on every process of the group, at the end.
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
    again: list[tuple[str, Any, Any]] = []
    rows = instance("program", program, ModelProgram).descriptors
    try:
        at = ranks_of(rows.peers, ranks, dist.get_world_size())
        own = rows.peers.index(rows.holder)
        if at[own] != dist.get_rank():
            raise LayoutError(f"holder {shown(rows.holder)} is rank {at[own]}, but this process is {dist.get_rank()}")
        before = _memory(torch, program, "src", src)
        after = kept = _memory(torch, program, "out", out)
        again = _repeats(torch, program, out, kept)
        written = [*_blocks(program, "out", kept), *(_block(what, there) for what, there, _ in again)]
        if spare is not None:
            after = _memory(torch, program, "spare", spare)
            for number, memory in kept.items():
                if after[number].shape != memory.shape:
                    raise LayoutError(f"spare[{shown(rows.tensors[number])}] is not as large as that of out")
            written += _blocks(program, "spare", after)
        check_apart(written, _blocks(program, "src", before))
    except Exception as error:
        failure = error
    _agree(torch, dist, program, at, failure, _device(torch, before, after), group)
    for row in rows.zeros.tolist():
        _view(after, row, "dst").zero_()
    for row in rows.copies.tolist():
        _view(after, row, "dst").copy_(_view(before, row, "src"))
    _confirm(torch, dist, _move(torch, dist, program, at, before, after, group), group)
    if spare is not None:
        _take_over(program, after, kept)
    for _, there, first in again:
        there.copy_(first)


def _move(torch: Any, dist: Any, program: ModelProgram, at: list[int], before: Any, after: Any, group: Any) -> Any:
    """Carry out the messages; give the bytes sent to the processes of the group, and received from them."""
    rows = program.descriptors
    moved = torch.zeros(2, dist.get_world_size(group), dtype=torch.int64)
    device = _device(torch, before, after)
    buffers = torch.empty((_BUFFERS, _BUFFER + _ROOM), dtype=torch.uint8, device=device)
    free = deque(buffers)
    #: Messages under way, the oldest first: the work, its bytes, the rows to put them in, the buffer if it is in one,
    #: and of a receive its last byte.
    under_way: deque[tuple[Any, Any, list[Row], Any, int | None]] = deque()
    #: The parts sent to a peer so far, and received from it: the number of the next one.
    numbers: dict[tuple[bool, int], int] = {}
    #: The peer and the bytes of each part that is received; for those that are there, whether the last byte is.
    expected: list[tuple[int, int]] = []
    came: list[Any] = []
    lasts = _last_bytes(torch, dist, program, at, before, device, group)

    def finish() -> None:
        work, data, places, buffer, last = under_way.popleft()
        work.wait()
        if last is not None:
            came.append(data[-1] == last)
            _copy(after, places, "dst", data, packs=False)
        if buffer is not None:
            free.append(buffer)

    # All processes follow one order, and finish the oldest first: so whoever waits for a buffer is not waited for.
    for sends, peer, _, size, first, stop in program.messages.tolist():
        memory, side, listed = (before, "src", rows.sends) if sends else (after, "dst", rows.receives)
        transfer = dist.isend if sends else dist.irecv
        moved[0 if sends else 1, _in_group(dist, at[peer], group)] += size
        for length, part, is_alone in _parts(listed[first:stop].tolist()):
            number = numbers[sends, peer] = numbers.get((sends, peer), 0) + 1
            buffer: Any = None
            places: list[Row] = []
            if is_alone and _is_run(part[0], side):
                data = _view(memory, part[0], side).view(-1)
            else:
                while not free:
                    finish()
                buffer = free.popleft()
                data = buffer[: length if is_alone else length + 1]
                if sends:
                    _copy(memory, part, side, data, packs=True)
                    data[length:] = _MARK
                else:
                    places = part
            last: int | None = None
            if not sends:
                # A backend may take a message that is shorter than the memory for it, and say nothing: the last byte is
                # another one until it comes.
                last = next(lasts[peer]) if is_alone else _MARK
                data[-1] = last ^ 1
                expected.append((peer, length))
            under_way.append((transfer(data, at[peer], group=group, tag=number), data, places, buffer, last))
    while under_way:
        finish()
    # Asked for once: a device answers slowly. Receives are finished in their order.
    for (peer, length), whole in zip(expected, torch.stack(came).tolist() if came else (), strict=True):
        moved[1, _in_group(dist, at[peer], group)] -= 0 if whole else length
    return moved.to(device)


def _last_bytes(
    torch: Any, dist: Any, program: ModelProgram, at: list[int], before: Any, device: Any, group: Any
) -> dict[int, Iterator[int]]:
    """Tell all peers the last bytes of the parts that go to them alone; give those of the parts from each of them.

    Such a part has no room for a mark after it.
    """
    rows, waiting, told, heard = program.descriptors, [], [], {}
    for sends, listed in ((True, rows.sends), (False, rows.receives)):
        large = listed[listed["bytes"] * listed["count"] >= _ALONE]
        for peer in sorted(set(large["peer"].tolist())):
            parts = [part[0] for _, part, is_alone in _parts(large[large["peer"] == peer].tolist()) if is_alone]
            if parts and sends:
                data = torch.stack([_view(before, row, "src")[..., -1].reshape(-1)[-1] for row in parts])
                told.append(data)
                waiting.append(dist.isend(data, at[peer], group=group, tag=0))
            elif parts:
                heard[peer] = torch.zeros(len(parts), dtype=torch.uint8, device=device)
                waiting.append(dist.irecv(heard[peer], at[peer], group=group, tag=0))
    for work in waiting:
        work.wait()
    return {peer: iter(data.tolist()) for peer, data in heard.items()}


def _parts(rows: Sequence[Row]) -> Iterator[tuple[int, list[Row], bool]]:
    """The rows of a message as parts that both sides know, with their bytes, and whether it is a large run of a side.

    These are alone, the others together.
    """
    together: list[Row] = []
    held = 0
    for row in rows:
        for piece in [row] if row[_BYTES] * row[_COUNT] <= _BUFFER else _pieces(row):
            length = piece[_BYTES] * piece[_COUNT]
            if length >= _ALONE and (_is_run(piece, "src") or _is_run(piece, "dst")):
                yield length, [piece], True
                continue
            if held + length > _BUFFER:
                yield held, together, False
                together, held = [], 0
            together.append(piece)
            held += length
    if together:
        yield held, together, False


def _pieces(row: Row) -> Iterator[Row]:
    """The runs of a row as rows of as many as a buffer has room for."""
    *who, src, dst, size, count, src_stride, dst_stride = row
    most = max(1, _BUFFER // size)
    for done in range(0, count, most):
        offsets = src + done * src_stride, dst + done * dst_stride
        yield (*who, *offsets, size, min(most, count - done), src_stride, dst_stride)


def _copy(memory: Mapping[int, Any], rows: Sequence[Row], side: str, data: Any, *, packs: bool) -> None:
    """Put the bytes of rows one after the other into `data`, or from there into their places."""
    used = data.storage_offset()
    for row in rows:
        view = _view(memory, row, side)
        there = data.as_strided(view.shape, (row[_BYTES], 1)[-view.dim() :], used)
        used += row[_BYTES] * row[_COUNT]
        if packs:
            there.copy_(view)
        else:
            view.copy_(there)


def _is_run(row: Row, side: str) -> bool:
    """Say if the bytes of a row are one run in the tensors of a side."""
    return row[_COUNT] == 1 or row[_BYTES] == row[_SRC_STRIDE if side == "src" else _DST_STRIDE]


def _in_group(dist: Any, rank: int, group: Any) -> int:
    return int(dist.get_group_rank(group, rank)) if group is not None else rank


def _device(torch: Any, *memories: Mapping[int, Any]) -> Any:
    return next((one.device for memory in memories for one in memory.values()), torch.device("cpu"))


def _confirm(torch: Any, dist: Any, moved: Any, group: Any) -> None:
    """Compare what all have sent with what has arrived; whoever fails before leaves all others waiting."""
    sent, arrived = _all(torch, dist, moved, group).unbind(1)
    for one, other in (sent != arrived.T).nonzero()[:1].tolist():
        raise LayoutError(
            f"rank {one} of the group has sent {int(sent[one, other])} bytes to rank {other}, where messages of "
            f"{int(arrived[other, one])} bytes arrived whole"
        )


def _all(torch: Any, dist: Any, tensor: Any, group: Any) -> Any:
    """The tensors of all processes of the group, stacked, on the CPU."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor, group=group)
    return torch.stack(found).cpu()


def _repeats(torch: Any, program: ModelProgram, out: Mapping[str, Any], kept: Any) -> list[tuple[str, Any, Any]]:
    """The further places of tensors: what messages call each, its bytes, and those of the tensor."""
    found = []
    for name, number in repeats_in(out, {program.descriptors.tensors[number]: number for number in kept}):
        there, first = _bytes_of(torch, "out", name, out[name], 0), kept[number]
        if there.shape != first.shape:
            raise LayoutError(f"{named('out', name)} has {len(there)} bytes, but the tensor has {len(first)}")
        found.append((named("out", name), there, first))
    return found


def _block(name: str, memory: Any) -> Block:
    return Block(name, memory.data_ptr(), memory.data_ptr() + len(memory), str(memory.device))


def _blocks(program: ModelProgram, what: str, memories: Mapping[int, Any]) -> list[Block]:
    tensors = program.descriptors.tensors
    return [_block(named(what, tensors[number]), memory) for number, memory in memories.items()]


def _take_over(program: ModelProgram, spare: Mapping[int, Any], out: Mapping[int, Any]) -> None:
    """Copy what was received, and nothing else: what is padding in the tensors stays as it is."""
    rows = program.descriptors
    for each in (rows.receives, rows.copies, rows.zeros):
        for row in each.tolist():
            _view(out, row, "dst").copy_(_view(spare, row, "dst"))


def _agree(torch: Any, dist: Any, program: ModelProgram, at: list[int], failure: Any, device: Any, group: Any) -> None:
    """Raise on all processes if one of them cannot begin, or two of them have other plans for each other."""
    size, own = dist.get_world_size(group), dist.get_rank(group)
    # The digests, and then whether it failed.
    state = torch.zeros(size + 1, 32, dtype=torch.uint8)
    if failure is None:
        met = set(program.messages["peer"].tolist())
        for number, label in enumerate(program.descriptors.peers):
            if number in met:
                digest = torch.frombuffer(bytearray(program.digest(label)), dtype=torch.uint8)
                state[_in_group(dist, at[number], group)] = digest
    else:
        state[size] = 1
    heard = _all(torch, dist, state.to(device), group)
    if failure is not None:
        raise failure
    for rank in heard[:, size, 0].nonzero()[:1, 0].tolist():
        raise LayoutError(f"rank {rank} of the group cannot begin; its own error says why")
    digests = heard[:, :size]
    for other, one in (digests != digests.transpose(0, 1)).any(2).nonzero()[:1].tolist():
        raise LayoutError(f"ranks {other} and {one} of the group have other plans for each other; this is rank {own}")


def _memory(torch: Any, program: ModelProgram, what: str, tensors: Mapping[str, Any]) -> dict[int, Any]:
    """The bytes of the tensors that rows name, each large enough for them."""
    found = {}
    for number, least in program.needed("src" if what == "src" else "dst"):
        name = program.descriptors.tensors[number]
        if name not in tensors:
            raise LayoutError(f"{what} has no tensor {shown(name)}")
        found[number] = _bytes_of(torch, what, name, tensors[name], least)
    return found


def _bytes_of(torch: Any, what: str, name: str, tensor: Any, least: int) -> Any:
    """The bytes of a contiguous tensor that is large enough."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous():
        raise LayoutError(f"{named(what, name)} must be a contiguous tensor")
    if tensor.numel() * tensor.element_size() < least:
        held = tensor.numel() * tensor.element_size()
        raise LayoutError(f"{named(what, name)} has {held} bytes; the plan needs {least}")
    return tensor.detach().reshape(-1).view(torch.uint8)


def _view(memory: Mapping[int, Any], row: Row, side: str) -> Any:
    """The runs of a row, as a tensor of bytes (count, bytes) or (bytes,), over memory known to be large enough."""
    _, src, dst, src_offset, dst_offset, size, count, src_stride, dst_stride = row
    number, start, stride = (src, src_offset, src_stride) if side == "src" else (dst, dst_offset, dst_stride)
    whole = memory[number]
    if count == 1:
        return whole[start : start + size]
    return whole.as_strided((count, size), (stride, 1), whole.storage_offset() + start)
