"""Sub-axes (2.8): every answer is that of the definition, the coordinate `i // r % k` along `axis:(m)k`."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.interop.hlo import from_hlo, to_hlo
from shardwise.interop.shardy import from_shardy, to_shardy
from shardwise.interop.torch import to_placements

from .checks import refused

TP = sw.DeviceMesh((8,), ("tp",))


def factorings(n: int) -> list[tuple[int, ...]]:
    """All ordered factorings of `n` into factors above 1."""
    if n == 1:
        return [()]
    return [(k, *rest) for k in range(2, n + 1) if n % k == 0 for rest in factorings(n // k)]


@st.composite
def sub_axis_layouts(draw: st.DrawFn) -> sw.TensorLayout:
    """Layouts whose axes are factored anyhow, each factor cutting a dim, replicating or holding partial sums."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=3))
    mesh = sw.DeviceMesh(sizes, [f"a{i}" for i in range(len(sizes))])
    names = []
    for name, size in zip(mesh.axis_names, sizes, strict=True):
        before = 1
        for k in draw(st.sampled_from(factorings(size))):
            names.append(name if k == size and draw(st.booleans()) else f"{name}:({before}){k}")
            before *= k
    specs: list[list[str]] = [[] for _ in range(draw(st.integers(1, 3)))]
    unreduced = []
    for name in draw(st.permutations(names)):
        place = draw(st.integers(-2, len(specs) - 1))
        if place >= 0:
            specs[place].append(name)
        elif place == -2:
            unreduced.append(name)
    return sw.TensorLayout(specs, mesh, unreduced=unreduced)


def along(layout: sw.TensorLayout, name: str, device: int) -> tuple[int, int]:
    """The coordinate of a device along an axis or a sub-axis, and its size, by the definition."""
    mesh = layout.device_mesh
    assert mesh is not None
    axis, _, part = name.partition(":(")
    place = mesh.axis_names.index(axis)
    n, i = mesh.shape[place], mesh.coordinate(device)[place]
    m, k = map(int, part.split(")")) if part else (1, n)
    return i // (n // (m * k)) % k, k


def names_of(spec: Any) -> tuple[str, ...]:
    return () if spec is None else (spec,) if isinstance(spec, str) else spec


def index_of(layout: sw.TensorLayout, device: int) -> list[int]:
    index = []
    for spec in layout.axes:
        number = 0
        for name in names_of(spec):
            i, k = along(layout, name, device)
            number = number * k + i
        index.append(number)
    return index


@given(sub_axis_layouts(), st.sampled_from(["ceil", "balanced", "floor"]))
def test_every_device_holds_what_the_definition_says(layout: sw.TensorLayout, rule: sw.UnevenRule) -> None:
    mesh = layout.device_mesh
    assert mesh is not None
    shape = [2 * k + 1 for k in layout.num_shards]
    partition = layout.partition(shape, rule)
    line = [
        sw.TensorLayout(("x",), sw.DeviceMesh((k,), ("x",))).partition((n,), rule).boxes()[:, 0].tolist()
        for n, k in zip(shape, layout.num_shards, strict=True)
    ]
    seen: dict[tuple[int, ...], int] = {}
    boxes = partition.boxes().tolist()
    for device in range(mesh.size):
        index = index_of(layout, device)
        assert boxes[device] == [line[dim][i] for dim, i in enumerate(index)]
        assert partition.shard_ids()[device] == np.ravel_multi_index(index, layout.num_shards)
        assert partition.replica_ids()[device] == seen.setdefault(tuple(index), 0)
        seen[tuple(index)] += 1


@given(sub_axis_layouts())
def test_the_refined_layout_is_the_same(layout: sw.TensorLayout) -> None:
    refined = layout.refined()
    shape = [3 * k for k in layout.num_shards]
    assert np.array_equal(refined.partition(shape).boxes(), layout.partition(shape).boxes())
    assert refined.device_mesh is not None
    assert refined.refined() is refined
    assert refined.replicated_axes == layout.replicated_axes
    assert all(name in refined.device_mesh.axis_names for spec in refined.axes for name in names_of(spec))


@given(sub_axis_layouts())
def test_text_reads_back(layout: sw.TensorLayout) -> None:
    namespace = {"TensorLayout": sw.TensorLayout, "DeviceMesh": sw.DeviceMesh}
    assert eval(repr(layout), namespace) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout


@given(sub_axis_layouts())
def test_shardy_and_hlo_say_the_same(layout: sw.TensorLayout) -> None:
    shape = [2 * k for k in layout.num_shards]
    boxes = layout.partition(shape).boxes()
    mesh = layout.device_mesh
    assert mesh is not None
    back = from_shardy(to_shardy(layout), mesh)
    assert np.array_equal(back.partition(shape).boxes(), boxes)
    assert from_shardy(to_shardy(back), mesh) == back
    back = from_hlo(to_hlo(layout), mesh, len(shape))
    assert np.array_equal(back.partition(shape).boxes(), boxes)


@given(st.data())
def test_a_plan_between_sub_axes_moves_what_it_should(data: st.DataObject) -> None:
    a = data.draw(sub_axis_layouts())
    b = data.draw(sub_axis_layouts().filter(lambda b: b.rank == a.rank))
    shape = [5] * a.rank
    array = np.arange(math.prod(shape)).reshape(shape)
    a, b = (sw.TensorLayout(side.axes, side.device_mesh) for side in (a, b))
    sharded = sw.distribute_tensor(array, a, "ceil")
    plan = sw.plan_reshard(sharded.partition, b.partition(shape, "balanced"))
    moved = plan.run(sharded)
    for device, view in enumerate(b.partition(shape, "balanced").views(array)):
        assert np.array_equal(moved[device], view)


def test_partial_sums_over_a_sub_axis_are_added() -> None:
    sums = sw.TensorLayout(("tp:(1)2",), TP, unreduced=["tp:(2)4"]).partition((4,))
    shards = [np.array([1, 10]) * 2**device for device in range(8)]
    sharded = sw.ShardedArray(sums, shards)
    assert sw.array.gather(sharded).tolist() == [15, 150, 240, 2400]
    cut = sw.plan_reshard(sums, sw.TensorLayout(("tp:(1)2",), TP).partition((4,)))
    steps = cut.collectives("int64")
    assert steps is not None
    assert [(step.kind, step.axes) for step in steps] == [("all-reduce", ("tp:(2)4",))]
    assert [shard.tolist() for shard in cut.run_collectives(sharded)] == [[15, 150]] * 4 + [[240, 2400]] * 4


def test_collectives_along_sub_axes() -> None:
    src, dst = sw.TensorLayout(("tp:(1)4",), TP), sw.TensorLayout(("tp:(1)2",), TP)
    steps = sw.plan_reshard(src.partition((8,)), dst.partition((8,))).collectives("float32")
    assert steps is not None
    assert [(step.kind, step.axes) for step in steps] == [("all-gather", ("tp:(2)2",))]
    sharded = sw.ShardedArray(src.partition((8,)), [np.arange(2) + i // 2 * 2 for i in range(8)])
    plan = sw.plan_reshard(src.partition((8,)), dst.partition((8,)))
    assert [shard.tolist() for shard in plan.run_collectives(sharded)] == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4


def test_half_a_byte_does_not_count() -> None:
    # By hand: of 25 bytes an all-reduce of 4 takes twice 18.75, counted as 37; a permute then takes 25 bytes as a
    # gather and a slice do, in one step instead of two.
    src, dst = sw.TensorLayout((None, "tp:(4)2"), TP, unreduced=["tp:(1)4"]), sw.TensorLayout((None, "tp:(1)2"), TP)
    steps = sw.plan_reshard(src.partition((5, 10)), dst.partition((5, 10))).collectives("int8")
    assert steps is not None
    assert [(step.kind, step.bytes) for step in steps] == [("all-reduce", 37), ("collective-permute", 25)]


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        (("tp:(1)3",), 'does not divide axis "tp" of size 8'),
        (("tp:(4)4",), "does not divide"),
        (("tp:(9223372036854775807)2",), "does not divide"),
        (("tp:(99999999999999999999)2",), "does not have"),
        (("tp:(0)2",), "does not have"),
        (("tp:(01)2",), "does not have"),
        (("tp:(1)2 ",), "does not have"),
        (("pp:(1)2",), "does not have"),
        (("tp", "tp:(1)2"), 'overlaps "tp" in axes[0]'),
        (("tp:(1)4", "tp:(2)2"), "overlaps"),
        ((("tp:(1)2", "tp:(1)2"),), "uses already"),
    ],
)
def test_bad_sub_axes_are_refused(axes: Any, said: str) -> None:
    with refused(sw.LayoutError, said):
        sw.TensorLayout(axes, TP)
    layout = sw.TensorLayout(axes) if "uses already" not in said else None
    if layout is not None:
        with refused(sw.LayoutError, said):
            layout.device_mesh = TP
        assert layout.device_mesh is None


def test_sub_axes_without_a_common_refinement_are_refused() -> None:
    with refused(sw.LayoutError, "cannot be combined", "2", "3"):
        sw.TensorLayout(("x:(1)2", "x:(3)2"), sw.DeviceMesh((6,), ("x",)))


def test_an_axis_that_is_called_like_a_sub_axis_goes_first() -> None:
    mesh = sw.DeviceMesh((2, 3), ("x:(1)2", "x"))
    assert sw.TensorLayout(("x:(1)2", "x"), mesh).num_shards == (2, 3)


def test_dialects_of_whole_axes_refuse() -> None:
    layout = sw.TensorLayout(("tp:(1)4",), TP)
    with refused(sw.LayoutError, "'tp:(1)4'", "axis 'tp' of size 8 is not whole", "PyTorch", "refined()"):
        to_placements(layout)
    assert [str(placement) for placement in to_placements(layout.refined())] == ["Shard(dim=0)", "Replicate()"]


class TestViews:
    MESH = sw.DeviceMesh((2, 3, 4), ("pp", "dp", "tp"))

    def test_slices_are_numpys(self) -> None:
        devices = self.MESH.devices
        assert self.MESH["tp"].devices.tolist() == devices[0, 0].tolist()
        assert self.MESH["pp", "tp"].devices.tolist() == devices[:, 0].tolist()
        assert self.MESH["tp", "pp"].devices.tolist() == devices[:, 0].T.tolist()
        assert self.MESH.submesh(("dp", "tp"), through="cpu:17").devices.tolist() == devices[1].tolist()
        assert self.MESH["pp", "dp", "tp"] == self.MESH
        assert self.MESH["tp:(2)2"].devices.tolist() == ["cpu:0", "cpu:1"]
        assert self.MESH["tp:(1)2"].devices.tolist() == ["cpu:0", "cpu:2"]

    @pytest.mark.parametrize("size", range(1, 13))
    def test_slices_along_every_sub_axis(self, size: int) -> None:
        """An axis of size m·k·r has them for every m and k: the whole axis and those of size 1 as well."""
        mesh = sw.DeviceMesh((2, size), ("dp", "tp"))
        for before, count in itertools.product(range(1, size + 1), repeat=2):
            name, (after, rest) = f"tp:({before}){count}", divmod(size, before * count)
            if rest:
                with pytest.raises(sw.MeshError):
                    mesh.submesh(name)
                continue
            expected = mesh.devices[:, : after * count : after]
            assert mesh.submesh(name).devices.tolist() == expected[0].tolist()
            assert mesh.submesh((name, "dp")).axis_names == (name, "dp")
            assert mesh.submesh((name, "dp")).devices.tolist() == expected.T.tolist()
            assert mesh.submesh(name).shape == (mesh.axis_size(name),)

    @given(st.permutations(("pp", "dp", "tp")), st.integers(1, 3))
    def test_flatten_is_a_transpose_and_a_reshape(self, order: list[str], count: int) -> None:
        chosen = order[:count]
        flat = self.MESH.flatten(chosen, "new")
        rest = [name for name in self.MESH.axis_names if name not in chosen]
        places = [self.MESH.axis_names.index(name) for name in chosen]
        assert set(flat.axis_names) == {*rest, "new"}
        turned = np.moveaxis(self.MESH.devices, places, range(count)).reshape(
            -1, *(self.MESH.axis_size(n) for n in rest)
        )
        assert np.array_equal(np.moveaxis(flat.devices, flat.axis_names.index("new"), 0), turned)
        sizes = [self.MESH.axis_size(name) for name in chosen]
        assert flat.unflatten("new", sizes, chosen).transpose("pp", "dp", "tp") == self.MESH

    def test_the_meshes_of_torchtitan_from_one_world(self) -> None:
        world = sw.DeviceMesh((2, 2, 2, 4), ("pp", "dp_replicate", "dp_shard", "tp"))
        loss = world.flatten(("dp_replicate", "dp_shard"), "dp")
        assert loss.shape == (2, 4, 4)
        assert loss.has_default_devices
        expert = world.flatten(("dp_shard", "tp"), "world").unflatten("world", (2, 4), ("efsdp", "ep"))
        assert expert["ep"].devices.tolist() == [f"cpu:{i}" for i in range(4)]
        assert world.flatten() == sw.DeviceMesh((32,), ("pp_dp_replicate_dp_shard_tp",))

    def test_views_share_labels(self) -> None:
        mesh = sw.DeviceMesh((2, 2), ("a", "b"), ["w", "x", "y", "z"])
        assert mesh.flatten().given_labels is mesh.given_labels
        assert mesh.transpose().devices.tolist() == [["w", "y"], ["x", "z"]]
        assert mesh.transpose().transpose() == mesh

    def test_a_view_of_a_large_mesh_costs_nothing(self) -> None:
        large = sw.DeviceMesh((2**31, 2**31), ("a", "b"))
        assert large.flatten().size == 2**62
        assert large.unflatten("a", (2**30, 2), ("c", "d")).shape == (2**30, 2, 2**31)
        with pytest.raises(MemoryError):
            large.transpose()

    @pytest.mark.parametrize(
        ("call", "error", "said"),
        [
            (lambda m: m["x"], sw.MeshError, "'x'"),
            (lambda m: m["tp", "tp"], sw.MeshError, "repeats the axis 'tp'"),
            (lambda m: m["tp", "tp:(1)2"], sw.MeshError, "overlap"),
            (lambda m: m["tp:(1)3"], sw.MeshError, "does not divide"),
            (lambda m: m[0], TypeError, "names"),
            (lambda m: m[()], sw.MeshError, "at least one axis"),
            (lambda m: m.submesh("tp", through="gpu"), sw.MeshError, "gpu"),
            (lambda m: m.flatten(("tp",), "dp"), sw.MeshError, "dp"),
            (lambda m: m.flatten(()), sw.MeshError, "empty"),
            (lambda m: m.flatten(("tp",), 3), TypeError, "name"),
            (lambda m: m.unflatten("tp", (2, 3), ("a", "b")), sw.MeshError, "multiply to 6"),
            (lambda m: m.unflatten("tp", (2, 2), ("a", "dp")), sw.MeshError, "dp"),
            (lambda m: m.unflatten(7, (2, 2), ("a", "b")), sw.MeshError, "7"),
            (lambda m: m.unflatten(True, (2, 2), ("a", "b")), TypeError, "axis"),
            (lambda m: m.unflatten(np.arange(2), (2, 2), ("a", "b")), TypeError, "axis, if it is not a name, must be"),
            (lambda m: m.transpose("tp"), sw.MeshError, "each once"),
        ],
    )
    def test_bad_views(self, call: Any, error: Any, said: str) -> None:
        with refused(error, said):
            call(self.MESH)


def test_grouped_query_attention_of_the_design() -> None:
    """Axis tp of 8 with 4 key-value heads: device i holds head i // 2."""
    partition = sw.TensorLayout(("tp:(1)4",), TP).partition((4,))
    assert partition.shard_ids().tolist() == [i // 2 for i in range(8)]
    assert partition.devices_holding(2) == ["cpu:4", "cpu:5"]


def test_floor_of_the_design_and_of_llama_cpp() -> None:
    mesh = sw.DeviceMesh((4,), ("x",))
    partition = sw.TensorLayout(("x",), mesh).partition((10,), "floor")
    assert [partition.shard_shape(d)[0] for d in mesh.devices.flat] == [2, 3, 2, 3]
    for n, k in itertools.product(range(12), range(1, 7)):
        boxes = sw.TensorLayout(("x",), sw.DeviceMesh((k,), ("x",))).partition((n,), "floor").boxes()[:, 0].tolist()
        for i, (start, stop) in enumerate(boxes):
            low, high = n * i // k, n * (i + 1) // k
            assert (start, stop) == ((low, high) if low < high else (n, n))
