"""The report of a layout map as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .._text import bytes_text

if TYPE_CHECKING:
    from .report import LayoutReport, TensorReport

__all__ = ["report_text"]

_TITLES = ("tensor", "shape", "dtype", "layout", "shard", "bytes per device", "rule")


def report_text(report: LayoutReport) -> str:
    """Write the tensors as a table, then the totals and the warnings."""
    lines = [*_aligned([_TITLES, *map(_row, report.tensors)]), "", *_totals(report)]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in report.warnings)])


def _row(tensor: TensorReport) -> tuple[str, ...]:
    nbytes = tensor.bytes_per_device
    return (
        tensor.name if tensor.name.isprintable() else repr(tensor.name),
        str(tensor.shape),
        tensor.dtype or "?",
        "?" if tensor.layout is None else str(tensor.layout.axes),
        "?" if tensor.shard_shape is None else str(tensor.shard_shape),
        "?" if nbytes is None else bytes_text(nbytes),
        "" if tensor.rule is None else repr(tensor.rule),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _totals(report: LayoutReport) -> Iterator[str]:
    size = "" if report.nbytes is None else f", {bytes_text(report.nbytes)}"
    yield f"{len(report.tensors)} tensors{size}, of which {len(report.placed)} have a place"
    if report.device_bytes is not None:
        least, most = int(report.device_bytes.min()), int(report.device_bytes.max())
        range_text = bytes_text(most) if least == most else f"{bytes_text(least)} to {bytes_text(most)}"
        yield f"each of {report.device_bytes.size} devices holds {range_text}"
    if report.replicated_share is not None:
        yield f"{report.replicated_share:.1%} of the bytes are on every device"
