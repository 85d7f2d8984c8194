"""Warnings about a checkpoint that can be written: lost data, layouts that cut no tensor, rules without effect."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from ...._text import shown
from ....conversion.tables import Wanted
from ....errors import LayoutError
from ....layout import UnevenRule
from ....placing import Placing
from ....rules.adapters import are_adapters
from ....rules.left_out import LeftOut, names_text
from ....rules.optax import kinds_of_optax
from ....rules.states import training_names
from ...rewritten.partitions import RuledTensor
from .forms import WRITTEN

__all__ = [
    "DoubtsError",
    "doubts_about",
    "doubts_about_optax",
]

_SHOWN = 3


class DoubtsError(LayoutError):
    """Warnings raised as an error, because the caller asked for `strict`.

    Attributes:
        warnings: The warnings, a sentence each.
    """

    def __init__(self, warnings: Sequence[str]) -> None:
        super().__init__("; ".join(warnings))
        self.warnings = tuple(warnings)

    def __reduce__(self) -> tuple[type[DoubtsError], tuple[tuple[str, ...]]]:
        return type(self), (self.warnings,)


def doubts_about(
    layouts: Placing,
    uneven: UnevenRule,
    form: str,
    wanted: Sequence[Wanted],
    tensors: Collection[str],
    ruled: Sequence[RuledTensor],
) -> tuple[list[LeftOut], list[str]]:
    """Say what looks wrong: what is not written as it seems, and all of this and the rest, a sentence each.

    Args:
        layouts: The layouts by name.
        uneven: The rule by which a dim that does not divide is cut.
        form: The format that they are written in.
        wanted: The tensors that are written.
        tensors: The names of all tensors, the new ones.
        ruled: The tensors to which rules apply, of those that are written; see `DescribedTensors.ruled`.
    """
    lost: list[LeftOut] = []
    found: list[str] = []
    cut = [each.name for each in wanted if each.partition is not None and each.partition.total_shards > 1]
    # A universal checkpoint says how tensor-parallel ranks cut what it holds whole.
    if cut and form not in ("rank", "universal") and not WRITTEN[form].is_cut:
        found.append(
            f"the layouts cut {len(cut)} tensor{'s' * (len(cut) != 1)}, but {form!r} holds tensors whole, so nothing "
            "is cut; 'sharded', 'ranks' and 'dcp' hold them in pieces"
        )
    report = layouts.report(ruled, uneven=uneven)
    if report is not None:
        # A rule for tensors that are not wanted is a rule like any other.
        kept = {each.name for each in wanted}
        rest = {
            rule.removeprefix(layouts.prefix)
            for name in tensors
            if name not in kept
            for rule in layouts.matching_rules(name)
        }
        mesh = report.device_mesh
        if form == "megatron" and mesh is not None and len(report.unused_axes) < sum(size > 1 for size in mesh.shape):
            # Ranks of data parallelism have no part in the files, and a mesh with them is as good.
            report = replace(report, unused_axes=())
        unused = () if are_adapters(tensors) else report.unused_rules
        report = replace(report, unused_rules=tuple(rule for rule in unused if rule not in rest))
        lost += report.left_out
        found += report.doubts
    else:
        missing = [name for name in layouts.names or () if name not in tensors]
        if missing:
            names = ", ".join(map(shown, missing[:_SHOWN]))
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            count = "a name" if len(missing) == 1 else f"{len(missing)} names"
            found.append(f"layouts has {count} that no tensor has: {names}{more}")
    return lost, found


def doubts_about_optax(names: Iterable[str]) -> list[str]:
    """Say that PyTorch's optimizers do not look for the names of optax's states, if some of the tensors are these."""
    kinds = kinds_of_optax(training_names(names))
    if not kinds:
        return []
    return [
        f"states keep the names that optax has for them, which PyTorch's optimizers and torchtitan do not look for: "
        f"{names_text(kinds)}; write a file with --to torch first, which has PyTorch's names, and make the DCP of it"
    ]
