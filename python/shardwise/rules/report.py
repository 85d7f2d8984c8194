"""Reports on layout maps: how much each device holds of a model, and what looks wrong."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._arguments import instance
from .._atomic import replace_file
from .._drawn import Drawn
from .._dtypes import bytes_for
from .._fork import cached_property, importing
from .._frozen import frozen, handed_out
from .._text import shown
from ..errors import LayoutError, SizeOverflowError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..mesh_views import extremes_along
from ..shared_tiling import SharedTiling
from .layout_rule import LayoutRule
from .left_out import LeftOut
from .problems import Clash, IndivisibleDim, Misfit, RankMismatch, unused_texts
from .report_text import report_text, totals_lines, unmatched_text
from .tensor_report import MAX_DEVICES, TensorReport, as_lists, checked_size, sum_known

if TYPE_CHECKING:
    from ..layout import UnevenRule
    from ..show.picture import Picture

__all__ = ["LayoutReport"]


@dataclass(frozen=True)
class LayoutReport(Drawn):
    """A layout map applied to a set of tensors, as `LayoutMap.report` gives it.

    `str(report)` is a table of the tensors, the totals and the warnings.

    Attributes:
        tensors: Every tensor, in the order given.
        uneven: The uneven rule of tensors whose key has none of its own.
        device_mesh: The mesh of the map, or else the one that its layouts share, or `None`.
        unused_rules: The keys that do not apply to any name, without those of optional rules.
        clashes: The names that several rules match; they cannot be placed.
        rank_mismatches: The tensors whose rank is not their layout's; they cannot be placed.
        indivisible: The dims that do not divide; under `"even"` their tensors cannot be placed.
        misfits: The tensors whose sizes do not fit a packed dim, and those for which a deployment has no coordinates;
            they cannot be placed.
        default: The layout that the map gives to names to which no key applies.
        meshes: The meshes of a deployment by name, all of devices of `device_mesh`.
        notes: What looks wrong about the rules themselves, such as that they are for another model.
        unused_axes: By mesh, the axes of size 2 or more that no applied rule uses, with their sizes: everything on the
            mesh is replicated along them. The name of the mesh of a map is empty.
    """

    tensors: tuple[TensorReport, ...]
    uneven: UnevenRule
    device_mesh: DeviceMesh | None
    unused_rules: tuple[str, ...]
    clashes: tuple[Clash, ...]
    rank_mismatches: tuple[RankMismatch, ...]
    indivisible: tuple[IndivisibleDim, ...]
    misfits: tuple[Misfit, ...] = ()
    default: LayoutRule | None = None
    meshes: tuple[tuple[str, DeviceMesh], ...] = ()
    unused_axes: tuple[tuple[str, str, int], ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def unmatched(self) -> tuple[TensorReport, ...]:
        """The tensors to whose name no key applies; they are replicated, or cut by the default."""
        return tuple(tensor for tensor in self.tensors if tensor.rule is None and tensor.layout is not None)

    @cached_property
    def placed(self) -> tuple[TensorReport, ...]:
        """The tensors that can be placed."""
        return tuple(tensor for tensor in self.tensors if tensor.num_shards is not None)

    @cached_property
    def unplaced(self) -> tuple[TensorReport, ...]:
        """The tensors that cannot be placed: several rules, a wrong rank, a dim that does not divide, or no mesh."""
        return tuple(tensor for tensor in self.tensors if tensor.num_shards is None)

    @cached_property
    def hindering(self) -> tuple[IndivisibleDim, ...]:
        """The entries of `indivisible` that prevent their tensors from being placed."""
        even = {tensor.name for tensor in self.unplaced if tensor.uneven == "even"}
        return tuple(problem for problem in self.indivisible if problem.name in even)

    @cached_property
    def problems(self) -> tuple[Clash | RankMismatch | Misfit | IndivisibleDim, ...]:
        """The reasons for which a tensor cannot be placed."""
        return (*self.clashes, *self.rank_mismatches, *self.misfits, *self.hindering)

    @cached_property
    def nbytes(self) -> int | None:
        """Bytes of all tensors, each counted once; `None` where a dtype is not known."""
        return sum_known(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def replicated_share(self) -> float | None:
        """The share of the bytes of all placed tensors, each counted once, that every device holds.

        `None` where a dtype is not known, or no tensor can be placed.
        """
        whole = sum_known(tensor.nbytes for tensor in self.placed)
        replicated = sum_known(
            tensor.nbytes for tensor in self.placed if tensor.is_replicated and self.is_everywhere(tensor)
        )
        return replicated / whole if whole and replicated is not None else None

    def is_everywhere(self, tensor: TensorReport) -> bool:
        """Return whether every device of the report's mesh is in the tensor's mesh."""
        mesh = None if tensor.layout is None else tensor.layout.device_mesh
        return self.device_mesh is None or mesh is None or mesh.size >= self.device_mesh.size

    @property
    def device_bytes(self) -> npt.NDArray[np.int64] | None:
        """Bytes of all placed tensors on each device: a read-only int64 array, in the order of device indices.

        `None` if there is no mesh, a dtype is not known, or a layout has a mesh of its own that is not a deployment's.

        Raises:
            SizeOverflowError: if a device would hold more than 2**63 - 1 bytes.
        """
        return None if self._device_bytes is None else handed_out(self._device_bytes)

    @cached_property
    def _device_bytes(self) -> npt.NDArray[np.int64] | None:
        mesh = self.device_mesh
        largest = sum_known(tensor.bytes_per_device for tensor in self.placed)
        if mesh is None or largest is None:
            return None
        positions = self._positions(mesh)
        if positions is None:
            return None
        checked_size(largest, "the bytes on a device")
        # Tensors that are cut evenly are the same on all devices of their mesh. For the rest, whole bytes are added up,
        # so that a shape is cut once for all its dtypes.
        alike: Counter[DeviceMesh] = Counter()
        counts: Counter[tuple[TensorLayout | SharedTiling, tuple[int, ...], UnevenRule, int]] = Counter()
        for tensor in self.placed:
            if tensor.layout is None or tensor.layout.device_mesh is None or tensor.bits is None:
                continue
            if not tensor.is_uneven:
                alike[tensor.layout.device_mesh] += tensor.bytes_per_device or 0
                continue
            packed = tensor.bits % 8 != 0
            key = tensor.tiling or tensor.layout, tensor.shape, tensor.uneven, tensor.bits if packed else 8
            counts[key] += 1 if packed else tensor.bits // 8
        try:
            result = np.zeros(mesh.size, np.int64)
        except ValueError:  # what numpy raises for a size that no address space holds
            raise SizeOverflowError(f"the bytes of {mesh.size} devices do not fit in the address space") from None
        for own, size in alike.items():
            result[positions[own]] += size
        for (layout, shape, uneven, bits), count in counts.items():
            assert layout.device_mesh is not None
            tiling = layout if isinstance(layout, SharedTiling) else layout.partition(shape, uneven)
            sizes = bytes_for(tiling.nbytes("uint8"), bits) * count
            result[positions[layout.device_mesh]] += sizes
        return frozen(result)

    def _positions(self, mesh: DeviceMesh) -> dict[DeviceMesh, Any] | None:
        """Return the positions of the devices of each layout's mesh in the report's; `None` if some are not in it."""
        found: dict[DeviceMesh, Any] = {mesh: slice(None)}
        for tensor in self.placed:
            own = None if tensor.layout is None else tensor.layout.device_mesh
            if own is None or own in found:
                continue
            if not self.meshes:
                return None
            found[own] = np.array([mesh.index_of_label(label) for label in own.labels()], np.int64)
        return found

    @property
    def fullest(self) -> tuple[Any, int] | None:
        """The label of the device that holds most, the first of them, and its bytes; `None` where that is not known."""
        each = self._device_bytes
        if each is None or self.device_mesh is None:
            return None
        position = int(each.argmax())
        return self.device_mesh.device(position), int(each[position])

    def bytes_along(self, axis: str, mesh: str | None = None) -> npt.NDArray[np.int64]:
        """Return the fewest and the most bytes of a device at each coordinate of an axis: of each stage, for instance.

        Args:
            axis: the name of the axis.
            mesh: the name of the axis's mesh in a deployment; the first one that has the axis, if not given.

        Returns:
            int64 of shape (coordinates, 2).

        Raises:
            MeshError: if there is no such axis or mesh.
            LayoutError: if what devices hold is not known.

        >>> from shardwise import DeviceMesh
        >>> from shardwise.deploy import Deployment, DeploymentRule
        >>> stages = Deployment(
        ...     4, DeviceMesh((2, 2), ("pp", "tp")), {"h.{i}": DeploymentRule(("tp",), at={"pp": "i // 3"})}
        ... )
        >>> stages.report({f"h.{i}": ((8,), "int8") for i in range(4)}).bytes_along("pp").tolist()
        [[12, 12], [4, 4]]
        """
        each = self._device_bytes
        if each is None or self.device_mesh is None:
            raise LayoutError("the bytes of the devices are not known: there is no mesh, or a dtype is missing")
        return extremes_along(each, self.device_mesh, dict(self.meshes), axis, mesh)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """All that looks wrong, a line each; the names that match nothing share one."""
        return (*map(str, self.problems), *self.doubts)

    @cached_property
    def doubts(self) -> tuple[str, ...]:
        """The warnings that are not among the `problems`: notes, what is left out, and rules that match nothing."""
        return (*self.notes, *map(str, self.left_out), *unused_texts(self.unused_rules))

    @cached_property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The tensors that no rule matches, unless there is a default for them, and the axes that no rule uses."""
        found = []
        if self.unmatched and self.default is None:
            names = tuple(tensor.name for tensor in self.unmatched)
            nbytes = sum_known(tensor.nbytes for tensor in self.unmatched)
            found.append(LeftOut("unmatched", names, unmatched_text(self.unmatched), nbytes))
        for mesh, axis, size in self.unused_axes:
            where = f" of the mesh {shown(mesh)}" if mesh else ""
            text = (
                f"no rule that applies uses the axis {shown(axis)}{where}, so everything is held {size} times along "
                f"it; if that is wanted, leave it out of the mesh, or say replicated = [{shown(axis)}]"
            )
            found.append(LeftOut("axes", (axis,), text))
        return tuple(found)

    @property
    def ok(self) -> bool:
        """True if there are no warnings."""
        return not self.warnings

    def to_dict(self) -> dict[str, Any]:
        """Return the report, ready for JSON; without the bytes of each device for meshes of more than 2**20 devices."""
        mesh, device_bytes = self.device_mesh, self.listed_device_bytes()
        return {
            "tensors": [tensor.to_dict() for tensor in self.tensors],
            "uneven": self.uneven,
            "default": self.default and {"layout": as_lists(self.default.layout.axes), "uneven": self.default.uneven},
            **(
                {"meshes": {name: dict(zip(one.axis_names, one.shape, strict=True)) for name, one in self.meshes}}
                if self.meshes
                else {}
            ),
            "mesh": None if mesh is None else {"shape": as_lists(mesh.shape), "axis_names": as_lists(mesh.axis_names)},
            "unmatched": [tensor.name for tensor in self.unmatched],
            "unused_rules": list(self.unused_rules),
            "unused_axes": [list(each) for each in self.unused_axes],
            "left_out": [each.to_dict() for each in self.left_out],
            "clashes": [vars(clash) | {"rules": list(clash.rules)} for clash in self.clashes],
            "rank_mismatches": [dict(vars(mismatch)) for mismatch in self.rank_mismatches],
            "indivisible": [dict(vars(dim)) for dim in self.indivisible],
            "misfits": [dict(vars(misfit)) for misfit in self.misfits],
            "nbytes": self.nbytes,
            "replicated_share": self.replicated_share,
            "device_bytes": device_bytes,
            "warnings": list(self.warnings),
            "ok": self.ok,
        }

    @cached_property
    def totals(self) -> tuple[str, ...]:
        """The totals of the devices, in lines; without bytes if a dtype is not known, or a tensor cannot be placed."""
        return tuple(totals_lines(self))

    def listed_device_bytes(self) -> list[int] | None:
        """Return the bytes of each device as a list; `None` without a mesh, or if devices are too many to list."""
        mesh = self.device_mesh
        each = None if mesh is None or mesh.size > MAX_DEVICES else self.device_bytes
        return None if each is None else each.tolist()

    def to_html(self, title: str = "Layout report") -> str:
        """Return the report as one self-contained page of HTML, to search and sort in a browser.

        It has the totals and a bar for what each device holds; what is replicated, what no rule matches, what does not
        divide, what cannot be placed and why; the tensors, with those that differ only in numbers folded into one row;
        and, for the selected one, who holds which part of it. It works by keyboard, and can be read without JavaScript.

        Args:
            title: the heading of the page.

        Raises:
            TypeError: if the title is not a string.

        >>> from shardwise import DeviceMesh, LayoutMap
        >>> rules = LayoutMap(DeviceMesh((2,), ("x",)))
        >>> rules["kernel"] = ("x", None)
        >>> rules.report({"kernel": ((4, 4), "float32")}).to_html("A model")[:15]
        '<!DOCTYPE html>'
        """
        with importing:
            from .page import page_of

        return page_of(self, instance("title", title, str))

    def save_html(self, path: str | os.PathLike[str], title: str = "Layout report") -> None:
        """Write the page of `to_html` to a file; an existing file is replaced as a whole.

        Args:
            path: the file.
            title: the heading of the page.

        Raises:
            OSError: if the file cannot be written; the old one is then unchanged.
            TypeError: if the title is not a string.
        """
        replace_file(path, self.to_html(title).encode())

    def _repr_html_(self) -> str:
        with importing:
            from .page import notebook_of

        return notebook_of(self)

    def _picture(self) -> Picture:
        with importing:
            from .drawn import report_picture

        return report_picture(self)

    def __str__(self) -> str:
        return report_text(self)
