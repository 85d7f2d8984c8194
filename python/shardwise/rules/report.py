"""Reports on layout maps: how much each device holds of a model, and what looks wrong."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._arguments import instance
from .._atomic import replace_file
from .._drawn import Drawn
from .._dtypes import bytes_for
from .._fork import cached_property, importing
from .._frozen import frozen, handed_out
from .._text import bytes_text, shown
from ..errors import LayoutError, MeshError, SizeOverflowError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..packed import PackedDim
from ..shared_tiling import SharedTiling
from ..show.table import table_lines
from .layout_rule import LayoutRule
from .left_out import LeftOut
from .problems import Clash, IndivisibleDim, Misfit, RankMismatch, unused_texts

if TYPE_CHECKING:
    from ..layout import UnevenRule
    from ..show.picture import Picture

__all__ = ["LayoutReport", "TensorReport", "checked_size"]

_NAMES_SHOWN = 3
_STAGES_SHOWN = 16
_TITLES = ("tensor", "shape", "dtype", "layout", "shard", ">bytes per device", "rule")
#: For larger meshes the bytes of each device are only listed if asked for.
_MAX_DEVICES = 2**20


@dataclass(frozen=True)
class TensorReport:
    """One tensor under the rules of a layout map.

    It can be placed if its layout is known, has a mesh, and fits the shape under the uneven rule.

    Attributes:
        name: The path that was looked up.
        shape: The shape of the tensor.
        dtype: The name of its dtype, or `None` if none was given.
        bits: Bits per element, or `None`.
        rule: The key whose layout applies; `None` where no key does, or several.
        layout: The layout of the key; if no key applies, that of the default, or one that cuts nothing; `None` if
            several do.
        num_shards: Shards per dim, or `None` if it cannot be placed.
        shard_shape: The shape of the largest shard, or `None` if it cannot be placed.
        uneven: The uneven rule: the key's own, or else the report's.
        tiling: Who holds what of a tensor whose blocks neighbours share, as no layout says that; `layout` and
            `num_shards` are those of the quantized weight that it belongs to. `None` for all others.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    bits: int | None
    rule: str | None
    layout: TensorLayout | None
    num_shards: tuple[int, ...] | None
    shard_shape: tuple[int, ...] | None
    uneven: UnevenRule = "even"
    tiling: SharedTiling | None = None

    @property
    def nbytes(self) -> int | None:
        """Bytes of the tensor, counted once; `None` where the dtype is not known."""
        return None if self.bits is None else bytes_for(math.prod(self.shape), self.bits)

    @property
    def bytes_per_device(self) -> int | None:
        """Bytes of the largest shard; `None` if it cannot be placed, or has no dtype."""
        if self.bits is None or self.shard_shape is None:
            return None
        return bytes_for(math.prod(self.shard_shape), self.bits)

    @property
    def bytes_total(self) -> int | None:
        """Bytes that all devices of its mesh hold, with replicas; `None` if it cannot be placed or has no dtype.

        `None` too where a dim is packed and the mesh has more than 2**20 devices.
        """
        mesh = None if self.layout is None else self.layout.device_mesh
        if self.bits is None or self.nbytes is None or self.num_shards is None or self.layout is None or mesh is None:
            return None
        if self.tiling is not None:
            elements: int = sum(self.tiling.nbytes("uint8").tolist())
            return bytes_for(elements, self.bits)
        if self.layout.is_packed:
            # Parts may be cut into different numbers of shards, and padded.
            held = _held(self.layout, self.shape, self.uneven)
            return None if held is None else bytes_for(held[1], self.bits)
        return self.nbytes * (mesh.size // math.prod(self.num_shards))

    @property
    def is_uneven(self) -> bool:
        """True if the tensor can be placed and its shards are of different sizes.

        Where a dim is packed and the mesh has more than 2**20 devices, also if they may be.
        """
        counts = self.num_shards
        if self.tiling is not None:
            return len(set(self.tiling.nbytes("uint8").tolist())) > 1
        if counts is not None and self.layout is not None and self.layout.is_packed:
            held = _held(self.layout, self.shape, self.uneven)
            return held is None or not held[0]
        return counts is not None and any(size % count for size, count in zip(self.shape, counts, strict=True))

    @property
    def is_replicated(self) -> bool:
        """True if the tensor can be placed and every device of its mesh holds all of it."""
        is_placed = self.num_shards is not None and self.layout is not None and self.tiling is None
        return is_placed and self.layout is not None and self.layout.is_fully_replicated

    def to_dict(self) -> dict[str, Any]:
        """The tensor's entry, ready for JSON; the layout as its axes."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "rule": self.rule,
            "layout": None if self.layout is None else _listed(self.layout.axes),
            "num_shards": _listed(self.num_shards),
            "shard_shape": _listed(self.shard_shape),
            "uneven": self.uneven,
            "nbytes": self.nbytes,
            "bytes_per_device": self.bytes_per_device,
            "bytes_total": self.bytes_total,
        }


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
        unused_axes: The axes of more than one coordinate that no rule uses which applies to a tensor, by mesh, and
            their sizes: all that is on the mesh is held as often. The name of the mesh of a map is empty.
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
        """Those of `indivisible` whose tensors therefore cannot be placed."""
        even = {tensor.name for tensor in self.unplaced if tensor.uneven == "even"}
        return tuple(problem for problem in self.indivisible if problem.name in even)

    @cached_property
    def problems(self) -> tuple[Clash | RankMismatch | Misfit | IndivisibleDim, ...]:
        """Everything for which a tensor cannot be placed."""
        return (*self.clashes, *self.rank_mismatches, *self.misfits, *self.hindering)

    @cached_property
    def nbytes(self) -> int | None:
        """Bytes of all tensors, each counted once; `None` where a dtype is not known."""
        return _sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def replicated_share(self) -> float | None:
        """The share of the bytes of all placed tensors, each counted once, that every device holds.

        `None` where a dtype is not known, or no tensor can be placed.
        """
        whole = _sum(tensor.nbytes for tensor in self.placed)
        replicated = _sum(
            tensor.nbytes for tensor in self.placed if tensor.is_replicated and self.is_everywhere(tensor)
        )
        return replicated / whole if whole and replicated is not None else None

    def is_everywhere(self, tensor: TensorReport) -> bool:
        """Say whether every device of the report's mesh is in the tensor's mesh."""
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
        largest = _sum(tensor.bytes_per_device for tensor in self.placed)
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
        """Give the fewest and the most bytes of a device at each coordinate of an axis: of each stage, for instance.

        Args:
            axis: the name of the axis.
            mesh: the name of its mesh in a deployment; the first one that has the axis, if not given.

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
        known = dict(self.meshes) or {"mesh": self.device_mesh}
        named = known if mesh is None else {name: known[name] for name in known if name == mesh}
        for found in named.values():
            if axis in found.axis_names:
                break
        else:
            said = ", ".join(f"{name} {one.axis_names}" for name, one in known.items())
            raise MeshError(f"axis is {shown(axis)}, of mesh {shown(mesh)}; the meshes are {said}")
        at = np.array([self.device_mesh.index_of_label(label) for label in found.labels()], np.int64)
        position = found.axis_names.index(axis)
        sizes = np.moveaxis(each[at].reshape(found.shape), position, 0).reshape(found.shape[position], -1)
        return np.stack([sizes.min(1), sizes.max(1)], 1)

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
            nbytes = _sum(tensor.nbytes for tensor in self.unmatched)
            found.append(LeftOut("unmatched", names, _unmatched_text(self.unmatched), nbytes))
        for mesh, axis, size in self.unused_axes:
            where = f" of the mesh {shown(mesh)}" if mesh else ""
            text = (
                f"no rule that applies uses the axis {shown(axis)}{where}, so all is held {size} times along it; if "
                f"that is wanted, leave it out of the mesh, or say replicated = [{shown(axis)}]"
            )
            found.append(LeftOut("axes", (axis,), text))
        return tuple(found)

    @property
    def ok(self) -> bool:
        """True if there are no warnings."""
        return not self.warnings

    def to_dict(self) -> dict[str, Any]:
        """The report, ready for JSON; without the bytes of each device for meshes of more than 2**20 devices."""
        mesh, device_bytes = self.device_mesh, self._listed_device_bytes()
        return {
            "tensors": [tensor.to_dict() for tensor in self.tensors],
            "uneven": self.uneven,
            "default": self.default and {"layout": _listed(self.default.layout.axes), "uneven": self.default.uneven},
            **(
                {"meshes": {name: dict(zip(one.axis_names, one.shape, strict=True)) for name, one in self.meshes}}
                if self.meshes
                else {}
            ),
            "mesh": None if mesh is None else {"shape": _listed(mesh.shape), "axis_names": _listed(mesh.axis_names)},
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
        count, unplaced = len(self.tensors), len(self.unplaced)
        size = "" if self.nbytes is None else f", {bytes_text(self.nbytes)}"
        lines = [f"{count} tensor{'s' * (count != 1)}{size}"]
        if unplaced:  # What devices hold of the rest says nothing of the model.
            return *lines, f"{unplaced} tensor{'s' * (unplaced > 1)} cannot be placed: {self._reasons()}"
        if self.nbytes is not None:
            lines += self._held(self.nbytes)
        if self.replicated_share is not None:
            lines.append(f"{100 * self.replicated_share:.3g}% of the bytes are on every device")
        return tuple(lines)

    def _reasons(self) -> str:
        """The reasons why tensors cannot be placed, each counted for one reason."""
        counts = {
            "clashing": len(self.clashes),
            "of another rank": len(self.rank_mismatches),
            "of sizes that do not fit": len(self.misfits),
            "indivisible": len({problem.name for problem in self.hindering}),
        }
        counts["without a mesh"] = len(self.unplaced) - sum(counts.values())
        return ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)

    def _held(self, whole: int) -> Iterator[str]:
        each = self._listed_device_bytes()
        if each is not None:
            least, most, total = bytes_text(min(each)), bytes_text(max(each)), sum(each)
            share = f", {100 * max(each) / whole:.3g}%" if whole else ""
            yield f"each device holds {least if least == most else f'{least} to {most}'} of {bytes_text(whole)}{share}"
            times = f", {total / whole:,.2f} times the tensors' size" if whole else ""
            yield f"all {len(each):,} devices hold {bytes_text(total)}{times}"
            yield from self._stages()
        elif self.placed:
            largest = sum(tensor.bytes_per_device or 0 for tensor in self.placed)
            yield f"a device holds at most {bytes_text(largest)} of {bytes_text(whole)}"

    def _stages(self) -> Iterator[str]:
        """The bytes of each stage, and of the fullest device."""
        named = next((name for name, mesh in self.meshes if "pp" in mesh.axis_names), None)
        if named is not None:
            rows = self.bytes_along("pp", named).tolist()
            texts = [
                bytes_text(most) if least == most else f"{bytes_text(least)} to {bytes_text(most)}"
                for least, most in rows
            ]
            listed = ", ".join(f"{stage}: {text}" for stage, text in enumerate(texts[:_STAGES_SHOWN]))
            more = f" and {len(texts) - _STAGES_SHOWN} more" if len(texts) > _STAGES_SHOWN else ""
            yield f"a device of each stage holds {listed}{more}"
        if self.meshes and self.fullest is not None:
            yield f"the fullest is {self.fullest[0]}, with {bytes_text(self.fullest[1])}"

    def _listed_device_bytes(self) -> list[int] | None:
        mesh = self.device_mesh
        each = None if mesh is None or mesh.size > _MAX_DEVICES else self.device_bytes
        return None if each is None else each.tolist()

    def to_html(self, title: str = "Layout report") -> str:
        """Give the report as one self-contained page of HTML, to search and sort in a browser.

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
        rows = [[(text, "") for text in _row(tensor)] for tensor in self.tensors]
        table = ["".join(text for text, _ in line).rstrip() for line in table_lines(_TITLES, rows)]
        problems = [f"error: {problem}" for problem in self.problems]
        return "\n".join([*table, "", *self.totals, *problems, *(f"warning: {text}" for text in self.doubts)])


@lru_cache(maxsize=256)  # the layers of a model have shapes in common
def _held(layout: TensorLayout, shape: tuple[int, ...], uneven: UnevenRule) -> tuple[bool, int] | None:
    """Return whether all devices hold equally many elements, and their sum; `None` for too large a mesh."""
    if layout.device_mesh is None or layout.device_mesh.size > _MAX_DEVICES:
        return None
    sizes = layout.partition(shape, uneven).nbytes("uint8")
    return bool((sizes == sizes[0]).all()), sum(sizes.tolist())


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


def checked_size(size: int, what: str) -> int:
    """Return the given size.

    Raises:
        SizeOverflowError: if it is over 2**63 - 1; says what it is the size of.
    """
    if size > 2**63 - 1:
        raise SizeOverflowError(f"{what} are {shown(size)}, over the limit of {2**63 - 1}")
    return size


def _unmatched_text(tensors: tuple[TensorReport, ...]) -> str:
    names = ", ".join(repr(tensor.name) for tensor in tensors[:_NAMES_SHOWN])
    more = f" and {len(tensors) - _NAMES_SHOWN} more" if len(tensors) > _NAMES_SHOWN else ""
    nbytes = _sum(tensor.nbytes for tensor in tensors)
    size = "" if nbytes is None else f" ({bytes_text(nbytes)})"
    if len(tensors) == 1:
        return f"1 name matches no rule, so every device holds it whole{size}: {names}"
    return f"{len(tensors)} names match no rule, so every device holds them whole{size}: {names}{more}"


def _sum(numbers: Iterable[int | None]) -> int | None:
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def _listed(value: Any) -> Any:
    if isinstance(value, PackedDim):
        return {"packed": str(value)}
    return [_listed(entry) for entry in value] if isinstance(value, tuple) else value
