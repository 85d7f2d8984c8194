"""What looks wrong although a checkpoint can be written: layouts that cut nothing, rules that match nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..._text import shown
from ...deploy.deployment import Deployment
from ...errors import LayoutError
from ...layout import UnevenRule
from ...placing import Layouts
from ...quantized.forms import Components
from ...rules.layout_map import LayoutMap
from ..formats.forms import WRITTEN
from .assembled import Assembled, Wanted

__all__ = ["DoubtsError", "doubts_about", "left_out_text"]

_SHOWN = 3


class DoubtsError(LayoutError):
    """What looks wrong, where the caller wants nothing that does.

    Attributes:
        warnings: The doubts, a sentence each.
    """

    def __init__(self, warnings: Sequence[str]) -> None:
        super().__init__("; ".join(warnings))
        self.warnings = tuple(warnings)

    def __reduce__(self) -> tuple[type[DoubtsError], tuple[tuple[str, ...]]]:
        return type(self), (self.warnings,)


def left_out_text(names: Sequence[str], form: str) -> str:
    """Say that values that are not tensors are not written."""
    listed = ", ".join(map(shown, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    why = "in a form that cannot be copied" if form == "dcp" else f"without a place in {form!r}"
    count = "1 value is" if len(names) == 1 else f"{len(names)} values are"
    return f"{count} not written, {why}: {listed}"


def doubts_about(
    layouts: Layouts | None,
    tensors: Mapping[str, Assembled],
    kept: Mapping[str, Assembled],
    wanted: Sequence[Wanted],
    uneven: UnevenRule,
    form: str,
    weights: Components,
) -> list[str]:
    """Say what looks wrong, a sentence each.

    Args:
        layouts: The layouts by name.
        tensors: All tensors, by their new names.
        kept: Those that are written.
        wanted: The same, with their partitions.
        uneven: How a dim that does not divide is cut.
        form: The format that they are written in.
        weights: The quantized weights among them, whose components have no rules of their own.
    """
    found: list[str] = []
    cut = [each.name for each in wanted if each.partition is not None and each.partition.total_shards > 1]
    if cut and form != "rank" and not WRITTEN[form].is_cut:
        found.append(
            f"the layouts cut {len(cut)} tensor{'s' * (len(cut) != 1)}, but {form!r} holds tensors whole, so nothing "
            "is cut; 'sharded', 'ranks' and 'dcp' hold them in pieces"
        )
    if isinstance(layouts, (LayoutMap, Deployment)):
        report = layouts.report(_named(kept, weights), uneven=uneven)
        # A rule for tensors that are not wanted is a rule like any other.
        rest = {rule for name in tensors if name not in kept for rule in layouts.matching_rules(name)}
        unused = tuple(rule for rule in report.unused_rules if rule not in rest)
        found += replace(report, unused_rules=unused).doubts
    elif isinstance(layouts, Mapping):
        missing = [name for name in layouts if name not in tensors]
        if missing:
            names = ", ".join(map(shown, missing[:_SHOWN]))
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            count = "a name" if len(missing) == 1 else f"{len(missing)} names"
            found.append(f"layouts has {count} that no tensor has: {names}{more}")
    return found


def _named(kept: Mapping[str, Assembled], weights: Components) -> list[tuple[str, tuple[int, ...], str]]:
    """The tensors to which rules apply, with shape and dtype: in place of components, the weight that they make."""
    components = {one.name for each in weights.tensors.values() for one in each.components}
    named = [(name, each.shape, each.dtype.name) for name, each in kept.items() if name not in components]
    return [*named, *((name, each.shape, "uint8") for name, each in weights.tensors.items())]
