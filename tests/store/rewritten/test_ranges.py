"""Ranges of files for a device: every byte that it holds, at its place, and no more than the stated share besides."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.deploy import Deployment, DeploymentRule
from shardwise.store import DeviceReads, device_reads
from shardwise.store.tensors.stored import UnsupportedError

from ...cli.conftest import write_checkpoint
from .. import orbax_files

MESH = sw.DeviceMesh((2, 4), ("data", "model"))


def fetch(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def filled(plan: DeviceReads) -> dict[str, np.ndarray[Any, Any]]:
    values = zip(plan.arrays, plan.fill(fetch), strict=True)
    return {array.name: data.view(array.dtype).reshape(array.shape) for array, data in values}


@pytest.mark.heavy
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_it_fills_what_the_device_holds(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = tmp_path_factory.mktemp("plan")
    axes: Any = st.sampled_from(
        [None, "data", "model", ("data", "model"), "a:(4@model) + b:(n@model)", "(n@data/pad8)"]
    )
    tensors, layouts = {}, {}
    for name in "abc":
        shape = tuple(data.draw(st.sampled_from([4, 8, 12])) for _ in range(data.draw(st.integers(1, 3))))
        entries = [data.draw(axes) for _ in shape]
        cuts = [sw.packed.parse(one) if isinstance(one, str) and "(" in one else one for one in entries]
        tensors[name] = np.arange(np.prod(shape), dtype="i4").reshape(shape)
        try:
            layouts[name] = sw.TensorLayout(tuple(cuts), MESH)
            sw.distribute_tensor(tensors[name], layouts[name], "ceil")
        except (sw.LayoutError, sw.MeshError):
            layouts.pop(name, None)
    source = {} if data.draw(st.booleans()) else layouts
    to: Any = "sharded" if source else "hf"
    sw.save_checkpoint(folder / "c", tensors, source, to=to, uneven="ceil", max_file_bytes=200, sync=False)
    over_read = data.draw(st.sampled_from([0, 0.05, 0.5, 10.0]))
    device = data.draw(st.integers(0, 7))
    with sw.open_checkpoint(folder / "c") as checkpoint:
        plan = device_reads(checkpoint, layouts, f"cpu:{device}", uneven="ceil", over_read=over_read)
        host = device_reads(checkpoint, layouts, [f"cpu:{i}" for i in range(8)], uneven="ceil", over_read=over_read)
    found = filled(plan)
    for name, value in tensors.items():
        whole = name not in layouts
        expected = value if whole else sw.distribute_tensor(value, layouts[name], "ceil").shard(f"cpu:{device}")
        assert np.array_equal(found[name], expected)
    for each in (plan, host):
        assert each.bytes_read <= each.nbytes * (1 + over_read)
        ranges = each.reads.tolist()
        assert all(one[0] < other[0] or one[1] + one[2] < other[1] for one, other in pairwise(ranges))
    # All devices together need all bytes, each once.
    assert host.nbytes == sum(value.nbytes for value in tensors.values())
    assert len(host.arrays) == 8 * len(tensors)


def test_the_shortest_gaps_are_read_over_first(tmp_path: Path) -> None:
    # Two rows of 100 bytes with a gap of 4, and two more behind a gap of 20.
    sizes = {"a": 100, "gap4": 4, "b": 100, "gap20": 20, "c": 100}
    mesh = sw.DeviceMesh((2,), ("x",))
    elsewhere = Deployment(
        mesh, mesh, {"gap": DeploymentRule((None,), at={"x": 1}), "^.$": DeploymentRule((None,), at={"x": 0})}
    )
    path = write_checkpoint(tmp_path / "a.safetensors", {name: ("U8", (size,)) for name, size in sizes.items()})
    with sw.open_checkpoint(path) as c:
        counts = {
            share: len(device_reads(c, elsewhere, "cpu:0", over_read=share).reads) for share in (0, 0.01, 0.02, 0.08)
        }
        assert counts == {0: 3, 0.01: 3, 0.02: 2, 0.08: 1}  # 4 of 300 bytes, then 24
        assert [array.name for array in device_reads(c, elsewhere, "cpu:1").arrays] == ["gap4", "gap20"]


@pytest.mark.heavy
def test_the_shapes_of_mistral_7b(tmp_path: Path) -> None:
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for layer in range(32):
        name = f"model.layers.{layer}"
        shapes: dict[str, tuple[int, ...]] = {"q_proj": (4096, 4096), "k_proj": (1024, 4096), "v_proj": (1024, 4096)}
        shapes |= {"o_proj": (4096, 4096), "gate_proj": (14336, 4096), "up_proj": (14336, 4096)}
        shapes |= {"down_proj": (4096, 14336), "input_layernorm": (4096,), "post_attention_layernorm": (4096,)}
        tensors |= {f"{name}.{one}.weight": ("BF16", shape) for one, shape in shapes.items()}
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = ("BF16", (32000, 4096))
    path = write_checkpoint(tmp_path / "model.safetensors", tensors)
    mesh = sw.DeviceMesh((8,), ("fsdp",))
    layouts = {
        name: sw.TensorLayout(("fsdp", *[None] * (len(shape) - 1)), mesh) for name, (_, shape) in tensors.items()
    }
    with sw.open_checkpoint(path) as checkpoint:
        for device in ("cpu:3", list(mesh.labels())):
            plan = device_reads(checkpoint, layouts, device)
            assert plan.bytes_read <= 1.05 * plan.nbytes
            assert len(plan.reads) <= 2000


@pytest.mark.heavy
def test_what_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "a.safetensors", {"w": ("F32", (8, 2)), "wide": ("U8", (2**20, 2**10))})
    rules = sw.LayoutMap(MESH)
    rules["w"], rules["wide"] = ("model", None), (None, "model")
    with sw.open_checkpoint(path) as checkpoint:
        with pytest.raises(sw.MeshError, match="device 'cpu:8' is not in the mesh"):
            device_reads(checkpoint, rules, "cpu:8")
        for share in (-1, float("nan"), float("inf"), "0.1", True):
            with pytest.raises(sw.LayoutError, match=r"over_read is .*; it must be 0 or more"):
                device_reads(checkpoint, rules, "cpu:0", over_read=share)  # type: ignore[arg-type]
        del rules["wide"]
        rules["wide"] = (None, sw.packed.parse("(256 4@model)"))  # 2**20 rows in 256 runs each
        with pytest.raises(sw.LayoutError, match=r"tensor 'wide': the device's part of it is in .* runs"):
            device_reads(checkpoint, rules, "cpu:0")
        rows = sw.TensorLayout(("model", None), MESH)
        with pytest.raises(sw.MeshError, match="device 'cpu:8' is not in the mesh"):
            device_reads(checkpoint, {"w": rows}, ["cpu:0", "cpu:8"])
        with pytest.raises(TypeError, match="checkpoint must be a StoredCheckpoint, got "):
            device_reads(path, {}, "cpu:0")  # type: ignore[arg-type]
        plan = device_reads(checkpoint, {}, "cpu:0")
        with pytest.raises(sw.ParseError, match=r"a\.safetensors: 3 bytes were read from byte \d+ on, not "):
            plan.fill(lambda *_: b"abc")


def test_a_device_of_one_of_several_meshes_has_what_that_one_cuts(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "a.safetensors", {"a": ("U8", (2,)), "b": ("U8", (2,)), "c": ("U8", (1,))})
    first, second = (sw.DeviceMesh((2,), ("x",), devices=[f"{stage}:0", f"{stage}:1"]) for stage in "pq")
    cut = {name: sw.TensorLayout(("x",), mesh) for name, mesh in (("a", first), ("b", second))}
    with sw.open_checkpoint(path) as checkpoint:
        assert {array.name for array in device_reads(checkpoint, cut, "q:1").arrays} == {"b", "c"}
        with pytest.raises(sw.MeshError, match="device 'r:1' is not in the mesh"):
            device_reads(checkpoint, cut, "r:1")


@pytest.mark.parametrize("share", [1e308, 10**400, np.float32(0.5), np.int64(2)])
def test_any_number_from_0_on_is_a_share_of_bytes(tmp_path: Path, share: Any) -> None:
    path = write_checkpoint(tmp_path / "a.safetensors", {"w": ("U8", (2, 2))})
    columns = {"w": sw.TensorLayout((None, "x"), sw.DeviceMesh((2,), ("x",)))}
    with sw.open_checkpoint(path) as checkpoint:
        # Two bytes are needed, and one lies between them.
        assert len(device_reads(checkpoint, columns, "cpu:0", over_read=share).reads) == 1
        assert len(device_reads(checkpoint, columns, "cpu:0", over_read=0.4).reads) == 2


def test_packed_elements_are_cut_as_a_new_checkpoint_cuts_them(tmp_path: Path) -> None:
    """Eight elements of four bits in thirds, rounded up: 3, 3 and 2 are no whole bytes."""
    path = write_checkpoint(tmp_path / "a.safetensors", {"w": ("F4", (2, 8))})
    columns = {"w": sw.TensorLayout((None, "x"), sw.DeviceMesh((3,), ("x",)))}
    with sw.open_checkpoint(path) as checkpoint:
        for uneven, said in (("ceil", "is cut at 3"), ("even", "8, which 3 shards do not divide")):
            with pytest.raises(sw.LayoutError, match=said):
                device_reads(checkpoint, columns, "cpu:1", uneven=uneven)  # type: ignore[arg-type]
            with pytest.raises(sw.LayoutError, match=said):
                sw.reshard_checkpoint(path, tmp_path / "new", columns, uneven=uneven)  # type: ignore[arg-type]
        halves = {"w": sw.TensorLayout((None, "x"), sw.DeviceMesh((2,), ("x",)))}
        (array,) = device_reads(checkpoint, halves, "cpu:1").arrays
        assert (array.shape, array.nbytes) == ((2, 4), 4)


def test_compressed_tensors_have_no_ranges(tmp_path: Path) -> None:
    folder = orbax_files.item(tmp_path)
    orbax_files.zarr2(folder, "w", np.arange(12.0).reshape(4, 3), (2, 3), compressor={"id": "zlib"})
    with sw.open_checkpoint(folder) as checkpoint, pytest.raises(UnsupportedError, match="tensor 'w' is compressed"):
        device_reads(checkpoint, {}, "cpu:0")
