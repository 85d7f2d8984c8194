"""Plans of a tensor and of a model in plain words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from .._text import bytes_text, counted, seconds_text, shown
from ..partition import Partition

if TYPE_CHECKING:
    from ..tiling import Tiling
    from .collectives import CollectiveObstacle
    from .cost import LinkModel
    from .kinds import CollectiveStep

__all__ = ["explain", "explain_model"]


class Explainable(Protocol):
    """The members of a plan that explaining it needs; `ReshardPlan` documents each member."""

    @property
    def src(self) -> Tiling: ...
    @property
    def dst(self) -> Tiling: ...
    @property
    def addends(self) -> int: ...
    def __len__(self) -> int: ...
    def bytes_kept(self, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]: ...
    def bytes_sent(self, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]: ...
    def bytes_received(self, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]: ...
    def total_bytes(self, dtype: npt.DTypeLike) -> int: ...
    def peak_extra_memory(self, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]: ...
    @property
    def obstacle(self) -> CollectiveObstacle | None: ...
    def collectives(self, dtype: npt.DTypeLike, links: LinkModel | None) -> tuple[CollectiveStep, ...] | None: ...


class ExplainableModel(Protocol):
    """The members of a plan of a model that explaining it needs; `ModelPlan` documents each member."""

    def __len__(self) -> int: ...
    def bytes_kept(self) -> dict[Any, int]: ...
    def bytes_sent(self) -> dict[Any, int]: ...
    def bytes_received(self) -> dict[Any, int]: ...
    def total_bytes(self) -> int: ...


def explain(plan: Explainable, dtype: np.dtype[Any], links: LinkModel | None) -> str:
    """Return a description of a plan as text; see `ReshardPlan.explain`."""
    dst, src = plan.dst, plan.src
    size = bytes_text(dst.size * dtype.itemsize)
    article = "An" if str(dtype).startswith(("i", "o")) else "A"
    lines = [
        f"{article} {dtype} tensor of shape {dst.shape}, {size}, goes from {_tiling_text(src)} to {_tiling_text(dst)}."
    ]
    kept = sum(plan.bytes_kept(dtype).tolist())
    amount = f"{bytes_text(kept)}{' of addends' if plan.addends > 1 else ''}"
    stays = f"; {amount} stays in place"
    if len(plan):
        noun, verb = ("box", "moves") if len(plan) == 1 else ("boxes", "move")
        moves = f"{len(plan)} {noun} {verb}, {bytes_text(plan.total_bytes(dtype))} in all"
        lines.append(f"{moves}{stays if kept else ''}.")
        sent, received = max(plan.bytes_sent(dtype).tolist()), max(plan.bytes_received(dtype).tolist())
        memory = max(plan.peak_extra_memory(dtype).tolist())
        lines.append(
            f"The busiest device sends {bytes_text(sent)} and receives {bytes_text(received)}; "
            f"each needs up to {bytes_text(memory)} of new memory."
        )
    else:
        lines.append("Nothing moves: every device holds its new shard already.")
    if plan.addends > 1:
        lines.append(f"Each value is the sum of {plan.addends} addends, added where they arrive.")
    steps = plan.collectives(dtype, links)
    if steps:
        lines.append(f"As collectives, about {seconds_text(sum(step.seconds for step in steps))}:")
        lines.extend(f"{number}. {step}." for number, step in enumerate(steps, 1))
    elif steps is None and isinstance(src, Partition) and isinstance(dst, Partition):
        lines.append(f"It cannot be expressed as collectives: {plan.obstacle}. It is sent point to point.")
    return "\n".join(lines)


def explain_model(
    plan: ExplainableModel, bits: int, senders: int, receivers: int, boxes: int, is_rewritten: bool
) -> str:
    """Return a description of a plan of a model as text; see `ModelPlan.explain`."""
    sent, received = plan.bytes_sent(), plan.bytes_received()
    verb = "goes" if len(plan) == 1 else "go"
    lines = [
        f"{counted(len(plan), 'tensor')}, {bytes_text(-(-bits // 8))}, {verb} from "
        f"{counted(senders, 'device')} to {receivers}."
    ]
    kept = sum(plan.bytes_kept().values())
    stays = f"{bytes_text(kept)} stays in place"
    if not boxes:
        return f"{lines[0]}\nNothing moves: {stays}."
    made = " of rewritten tensors" if is_rewritten else ""
    more = f"; {stays}" if kept else ""
    verb = "moves" if boxes == 1 else "move"
    lines.append(f"{counted(boxes, 'box', 'boxes')}{made} {verb}, {bytes_text(plan.total_bytes())} in all{more}.")
    (sender, most_sent), (receiver, most_received) = (
        max(each.items(), key=lambda device: device[1]) for each in (sent, received)
    )
    lines.append(
        f"The busiest device sends {bytes_text(most_sent)} ({shown(sender)}); the busiest receives "
        f"{bytes_text(most_received)} ({shown(receiver)})."
    )
    return "\n".join(lines)


def _tiling_text(tiling: Tiling) -> str:
    count = tiling.holder_count
    if not isinstance(tiling, Partition):
        return f"{tiling.kind_text()} held by {counted(count, 'holder')}"
    layout = tiling.layout
    unreduced = f" unreduced over {', '.join(layout.unreduced)}" if layout.unreduced else ""
    rule = "" if tiling.uneven == "even" else f" cut by the rule {tiling.uneven!r}"
    return f"{layout.axes}{unreduced}{rule} on {counted(count, 'device')}"
