"""Reports as text: the table of tensors, the totals of the devices, the warnings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._text import bytes_text
from ..show.table import table_lines
from .problems import NO_RULE
from .tensor_report import TensorReport, sum_known

__all__ = ["report_text", "totals_lines", "unmatched_text"]

_NAMES_SHOWN = 3
_STAGES_SHOWN = 16
_TITLES = ("tensor", "shape", "dtype", "layout", "shard", ">bytes per device", "rule")


def report_text(report: Any) -> str:
    """Return a report as text."""
    rows = [[(text, "") for text in _row(tensor)] for tensor in report.tensors]
    table = ["".join(text for text, _ in line).rstrip() for line in table_lines(_TITLES, rows)]
    problems = [f"error: {problem}" for problem in report.problems]
    return "\n".join([*table, "", *report.totals, *problems, *(f"warning: {text}" for text in report.doubts)])


def totals_lines(report: Any) -> list[str]:
    """Return the totals of the devices, in lines."""
    count, unplaced = len(report.tensors), len(report.unplaced)
    size = "" if report.nbytes is None else f", {bytes_text(report.nbytes)}"
    lines = [f"{count} tensor{'s' * (count != 1)}{size}"]
    if unplaced:  # What devices hold of the rest says nothing of the model.
        return [*lines, f"{unplaced} tensor{'s' * (unplaced > 1)} cannot be placed: {_reasons(report)}"]
    if report.nbytes is not None:
        lines += _held(report, report.nbytes)
    if report.replicated_share is not None:
        lines.append(f"{100 * report.replicated_share:.3g}% of the bytes are on every device")
    return lines


def _reasons(report: Any) -> str:
    """Return the reasons why tensors cannot be placed, with counts; each tensor is counted for one reason."""
    counts = {
        "clashing": len(report.clashes),
        "of another rank": len(report.rank_mismatches),
        "without a rule": sum(misfit.reason == NO_RULE for misfit in report.misfits),
        "of sizes that do not fit": sum(misfit.reason != NO_RULE for misfit in report.misfits),
        "indivisible": len({problem.name for problem in report.hindering}),
    }
    counts["without a mesh"] = len(report.unplaced) - sum(counts.values())
    return ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)


def _held(report: Any, whole: int) -> Iterator[str]:
    each = report.listed_device_bytes()
    if each is not None:
        least, most, total = bytes_text(min(each)), bytes_text(max(each)), sum(each)
        share = f", {100 * max(each) / whole:.3g}%" if whole else ""
        yield f"each device holds {least if least == most else f'{least} to {most}'} of {bytes_text(whole)}{share}"
        times = f", {total / whole:,.2f} times the tensors' size" if whole else ""
        yield f"all {len(each):,} devices hold {bytes_text(total)}{times}"
        yield from _stages(report)
    elif report.placed:
        largest = sum(tensor.bytes_per_device or 0 for tensor in report.placed)
        yield f"a device holds at most {bytes_text(largest)} of {bytes_text(whole)}"


def _stages(report: Any) -> Iterator[str]:
    """Yield the bytes of each stage, and of the fullest device, as text."""
    named = next((name for name, mesh in report.meshes if "pp" in mesh.axis_names), None)
    if named is not None:
        rows = report.bytes_along("pp", named).tolist()
        texts = [
            bytes_text(most) if least == most else f"{bytes_text(least)} to {bytes_text(most)}" for least, most in rows
        ]
        listed = ", ".join(
            f"of stage {stage} {'holds ' * (not stage)}{text}" for stage, text in enumerate(texts[:_STAGES_SHOWN])
        )
        more = f" and {len(texts) - _STAGES_SHOWN} more" if len(texts) > _STAGES_SHOWN else ""
        if len(texts) > 1:
            yield f"a device {listed}{more}"
    if report.meshes and report.fullest is not None:
        yield f"the fullest is {report.fullest[0]}, with {bytes_text(report.fullest[1])}"


def _row(tensor: TensorReport) -> tuple[str, ...]:
    nbytes = tensor.bytes_per_device
    return (
        tensor.name,
        str(tensor.shape),
        tensor.dtype or "?",
        "?" if tensor.layout is None else str(tensor.layout.axes),
        "?" if tensor.shard_shape is None else str(tensor.shard_shape),
        "?" if nbytes is None else bytes_text(nbytes),
        "" if tensor.rule is None else repr(tensor.rule),
    )


def unmatched_text(tensors: tuple[TensorReport, ...]) -> str:
    """Return a sentence on the tensors that no rule matches, with their size."""
    names = ", ".join(repr(tensor.name) for tensor in tensors[:_NAMES_SHOWN])
    more = f" and {len(tensors) - _NAMES_SHOWN} more" if len(tensors) > _NAMES_SHOWN else ""
    nbytes = sum_known(tensor.nbytes for tensor in tensors)
    size = "" if nbytes is None else f" ({bytes_text(nbytes)})"
    if len(tensors) == 1:
        return f"1 name matches no rule, so every device holds it whole{size}: {names}"
    return f"{len(tensors)} names match no rule, so every device holds them whole{size}: {names}{more}"
