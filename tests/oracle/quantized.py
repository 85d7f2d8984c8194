"""Quantized checkpoints from elsewhere: recognised, cut, merged again, and dequantized on both sides of the cut.

A checkpoint is a folder with `config.json`, `model.safetensors` and `expected.json`, which says for each logical
weight its shape, its components with dtype, shape and blocks, and some of its elements. `check_checkpoint` goes
through one.
"""

from __future__ import annotations

import json
import math
import re
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import shardwise as sw
from shardwise.quantized import Component, Components, LogicalTensor, component_layouts, find_components

from .dequantize import dequantized

__all__ = [
    "Found",
    "Raw",
    "check_checkpoint",
    "checkpoint_differs",
    "cut_and_compare",
    "folders",
    "read_raw",
    "values_of",
]

Array = npt.NDArray[Any]
_WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}


class Raw(NamedTuple):
    """The tensors of a safetensors file as the file states them: dtype, shape, bytes."""

    tensors: dict[str, tuple[str, tuple[int, ...], bytes]]

    def outline(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {name: (dtype, shape) for name, (dtype, shape, _) in self.tensors.items()}

    def array(self, name: str) -> Array:
        """The elements as unsigned integers of their width."""
        dtype, shape, data = self.tensors[name]
        return np.frombuffer(data, f"<u{_WIDTHS.get(dtype, 1)}").reshape(shape)


class Found(NamedTuple):
    """What a check went through."""

    weights: int
    cuts: int
    refused: int


def read_raw(file: Path) -> Raw:
    """Read a safetensors file, without the package."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    begin = 8 + length
    return Raw(
        {
            name: (
                one["dtype"],
                tuple(one["shape"]),
                data[begin + one["data_offsets"][0] : begin + one["data_offsets"][1]],
            )
            for name, one in header.items()
        }
    )


def check_checkpoint(folder: Path, sizes: Sequence[int] = (1, 2, 4, 8)) -> Found:
    """Compare all that is said of a checkpoint, and cut each of its weights along each dim.

    Raises:
        AssertionError: where it differs.
    """
    expected = json.loads((folder / "expected.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    raw = read_raw(folder / "model.safetensors")
    found = find_components(raw.outline(), config, lambda name: raw.tensors[name][2])
    _check_on_disk(folder, raw, found, sizes)
    if found.method is None:
        assert expected["quant_method"] is None
        return Found(0, 0, 0)
    _compare(found, expected)
    quantization = config["quantization_config"]
    cuts = refused = 0
    for name, logical in found.tensors.items():
        whole = values_of(logical, quantization, found, {one.name: raw.array(one.name) for one in logical.components})
        for index, value in expected["tensors"][name]["elements"]:
            assert np.float32(whole[tuple(index)]) == np.float32(float.fromhex(value)), (name, index)
        for dim in range(len(logical.shape)):
            for size in sizes:
                for shared in (False, True):
                    done = cut_and_compare(logical, raw, found, quantization, dim, size, shared=shared, whole=whole)
                    cuts, refused = cuts + done, refused + (not done)
    return Found(len(found.tensors), cuts, refused)


def _check_on_disk(folder: Path, raw: Raw, found: Components, sizes: Sequence[int]) -> None:
    """Reshard the file: cut where that fits, and merged again it is bit for bit what it was."""
    for size in sizes:
        layouts: dict[str, sw.TensorLayout] = {}
        for name, logical in found.tensors.items():
            specs: list[Any] = [None] * len(logical.shape)
            specs[-1 if re.search(r"\b(?:o|down)_proj\b", name) else -2] = "tp"
            layout = sw.TensorLayout(specs, sw.DeviceMesh((size,), ("tp",)))
            with suppress(sw.LayoutError):
                layout.partition(logical.shape)
                layouts.update(component_layouts(logical, layout))
        with TemporaryDirectory() as place:
            cut, merged = Path(place, "cut"), Path(place, "merged.safetensors")
            sw.reshard_checkpoint(folder, cut, layouts, to="sharded", sync=False)
            sw.reshard_checkpoint(cut, merged, sync=False)
            assert read_raw(merged).tensors == raw.tensors, size


def checkpoint_differs(folder: Path) -> str | None:
    """What of a checkpoint differs; `None` if nothing does."""
    try:
        with np.errstate(all="ignore"):  # Random bits are NaN and infinite too.
            check_checkpoint(folder)
    except AssertionError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{error} ({frame.name}: {frame.line})"
    return None


def _compare(found: Components, expected: Mapping[str, Any]) -> None:
    assert found.tensors.keys() == expected["tensors"].keys()
    assert set(found.plain) == expected["plain"].keys()
    for name, said in expected["tensors"].items():
        logical = found.tensors[name]
        assert list(logical.shape) == said["shape"], name
        components = {one.name: one for one in logical.components}
        assert components.keys() == said["components"].keys(), name
        for component, own in said["components"].items():
            ours = components[component]
            assert (ours.dtype, list(ours.shape)) == (own["dtype"], own["shape"]), component
            assert len(ours.along) == len(own["dims"]), component
            for along, dim, extent in zip(ours.along, own["dims"], own["shape"], strict=True):
                if dim.get("whole") or "within" in dim:
                    assert along.of is None, component
                elif dim["of"] == "flat":
                    assert (along.of, along.block) == (-1, dim["block"]), component
                elif dim["of"] == "bits":
                    assert (along.of, along.block, along.words) == (dim["along"], 32, dim["block"]), component
                elif along.of is None:  # One for the whole dim.
                    assert (extent, dim["block"]) == (1, said["shape"][dim["of"]]), component
                else:
                    assert (along.of, along.block, along.words) == (dim["of"], dim["block"], 1), component


def cut_and_compare(
    logical: LogicalTensor,
    raw: Raw,
    found: Components,
    config: Mapping[str, Any],
    dim: int,
    size: int,
    *,
    shared: bool,
    whole: Array,
    spec: Any = "tp",
    uneven: sw.UnevenRule = "even",
) -> bool:
    """Cut a weight, merge its components again, and dequantize each shard; whether it can be cut so.

    That it cannot must follow from its blocks: a cut is refused exactly where it falls within one of them.
    """
    specs: list[Any] = [None] * len(logical.shape)
    specs[dim] = spec
    n = logical.shape[dim]
    try:
        layout = sw.TensorLayout(specs, sw.DeviceMesh((size,), ("tp",)))
        partition = layout.partition(logical.shape, uneven)
    except sw.LayoutError:
        return False  # Not of the weight's sizes.
    pieces = [[piece.box for piece in partition.pieces(device)] for device in partition.holders]
    cuts = {at for boxes in pieces for box in boxes for at in (box[dim].start, box[dim].stop)} - {0, n}
    if all(sum(box[dim].stop - box[dim].start for box in boxes) == n for boxes in pieces):
        cuts = set()  # Everybody has all of it, in however many pieces.
        pieces = [[tuple(slice(0, extent) for extent in logical.shape)] for _ in pieces]
    unit, least = logical.unit(dim), logical.unit(dim, shared=True)
    try:
        layouts = component_layouts(logical, layout, uneven, shared=shared)
    except sw.LayoutError as error:
        why = str(error)
    else:
        why = ""
    if why:
        if not logical.why_uncut(dim):
            padded = isinstance(spec, sw.packed.PackedDim) and any(one.pad_to for one in spec.parts)
            room = partition.largest_shard_shape[dim] if padded else 0
            # Segments within a block of which one device has all are refused too.
            segments = isinstance(spec, sw.packed.PackedDim) and "segments" in why and not cuts
            assert any(cut % unit for cut in cuts) or room % unit or segments, why
            if shared and "segments" not in why and "begins at" not in why and not padded:
                assert any(cut % least for cut in cuts), why
        return False
    assert not (cuts and logical.why_uncut(dim))
    assert not any(cut % (least if shared else unit) for cut in cuts)
    held = {}
    for component in logical.components:
        array = raw.array(component.name)
        own_layout = layouts[component.name]
        if isinstance(own_layout, sw.TensorLayout):
            sharded = sw.distribute_tensor(array, own_layout)
        else:
            whole_layout = sw.TensorLayout((None,) * array.ndim, own_layout.device_mesh)
            sharded = sw.distribute_tensor(array, whole_layout).reshard(own_layout)
        merged = sharded.numpy()
        assert merged.tobytes() == array.tobytes(), component.name
        held[component.name] = sharded
    for device, boxes in zip(partition.holders, pieces, strict=True):
        own = {name: _as_placed(sharded, device) for name, sharded in held.items()}
        for box in boxes:
            start, shape = tuple(side.start for side in box), tuple(side.stop - side.start for side in box)
            if 0 in shape:
                continue
            arrays = {}
            for component in logical.components:
                array, there = own[component.name]
                tiles = _tiles(logical, component, box)
                assert there[tiles].all(), (component.name, device, box)
                arrays[component.name] = np.ascontiguousarray(array[tiles])
            values = values_of(logical, config, found, arrays, shape, start)
            assert np.array_equal(values, whole[box], equal_nan=True), (logical.name, dim, size, device)
    return True


def _as_placed(sharded: sw.ShardedArray, device: Any) -> tuple[Array, Array]:
    """What a device holds, at its places in an array of the whole, and which places these are."""
    own = sharded.shard(device)
    array, there = np.zeros(sharded.shape, own.dtype), np.zeros(sharded.shape, bool)
    for piece in sharded.tiling.pieces(device):
        array[piece.box] = piece.view(own)
        there[piece.box] = True
    return array, there


def _tiles(logical: LogicalTensor, component: Component, box: tuple[slice, ...]) -> tuple[slice, ...]:
    """The elements of a component that stand for elements of a box."""
    tiles = []
    for along, extent in zip(component.along, component.shape, strict=True):
        if along.of is None:
            tiles.append(slice(0, extent))
            continue
        side, row = box[max(along.of, 0)], math.prod(logical.shape[1:]) if along.of < 0 else 1
        start, stop = (at * row * along.words for at in (side.start, side.stop))
        tiles.append(slice(start // along.block, min(-(-stop // along.block), extent)))
    return tuple(tiles)


def values_of(
    logical: LogicalTensor,
    config: Mapping[str, Any],
    found: Components,
    arrays: Mapping[str, Array],
    shape: tuple[int, ...] | None = None,
    start: tuple[int, ...] | None = None,
) -> Array:
    stored = {}
    for component in logical.components:
        tail = component.name.rpartition(".")[2]
        if ".quant_state." in component.name:
            tail = "quant_state"
        elif found.method == "mxfp4":
            tail = tail.rpartition("_")[2]
        stored[tail] = (component.dtype, arrays[component.name])
    return dequantized(found.method or "", config, stored, shape or logical.shape, start or (0,) * len(logical.shape))


def folders(root: Path) -> list[Path]:
    """The checkpoints in a folder of them, in order."""
    return [path.parent for path in sorted(root.glob("*/expected.json"))]
