"""Places of single elements, compared with whole arrays of element numbers put together piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardwise import DeviceMesh, LayoutError, LayoutMap, MeshError, TensorLayout, Tiling
from shardwise.deploy import Deployment, DeploymentRule, Manifest, fsdp2
from shardwise.deploy.positions import Positions, positions_of
from shardwise.packed import parse
from shardwise.shared_tiling import SharedTiling, Windows

from ..checks import refused
from .models import ENGINES, PADDING, dense, numbered


@pytest.mark.parametrize("name", ENGINES)
def test_every_element_is_where_the_pieces_are(name: str) -> None:
    engine, shapes = ENGINES[name]
    first, places = numbered(shapes), positions_of(engine, shapes)
    for device in engine.devices:
        expected = {one.name: dense(one, shapes) for one in engine.parameters_of(device, shapes)}
        found = {parameter: np.full(len(whole), PADDING) for parameter, whole in expected.items()}
        assert places.parameters(device) == {parameter: len(whole) for parameter, whole in expected.items()}
        for tensor, shape in shapes.items():
            offsets = np.random.default_rng(0).permutation(math.prod(shape))
            for parameter, which, at in places.locate(device, tensor, offsets):
                assert (found[parameter][at] == PADDING).all()
                found[parameter][at] = first[tensor] + offsets[which]
        for parameter, whole in expected.items():
            np.testing.assert_array_equal(found[parameter], whole)


@pytest.mark.parametrize("name", ENGINES)
def test_shards_are_where_each_device_says(name: str) -> None:
    engine, shapes = ENGINES[name]
    places = positions_of(engine, shapes)
    told = 0
    for tensor, shape in shapes.items():
        offsets = np.random.default_rng(3).permutation(math.prod(shape))
        expected = {
            (device, one.parameter, offset, position)
            for device in places.devices
            for one in places.locate(device, tensor, offsets)
            for offset, position in zip(offsets[one.which].tolist(), one.positions.tolist(), strict=True)
        }
        try:
            shards, local, holders = places.shards({tensor: offsets})[tensor]
        except LayoutError:
            # Some element is on two devices that do not hold the same.
            assert len({(device, offset) for device, _, offset, _ in expected}) > len(offsets)
            continue
        told += 1
        found = {
            (device, parameter, offset, start + at)
            for shard, offset, at in zip(shards.tolist(), offsets.tolist(), local.tolist(), strict=True)
            for device, parameter, start in holders[shard]
        }
        assert found == expected
    assert told


def test_shards_of_no_offsets() -> None:
    places = positions_of(dict.fromkeys("vw", TensorLayout(("x",), DeviceMesh((2,), ("x",)))), {"v": (6,), "w": (6,)})
    cases: list[dict[str, list[int]]] = [{"v": [], "w": []}, {"v": [], "w": [4]}, {"w": [4], "v": []}]
    for given in cases:
        found = places.shards(given)
        assert {name: (one.shards.tolist(), one.local.tolist()) for name, one in found.items()} == {
            name: ([1] * len(offsets), [1] * len(offsets)) for name, offsets in given.items()
        }


def test_shards_refuse_what_is_not_in_the_tensor() -> None:
    places = positions_of({"w": TensorLayout(("x",), DeviceMesh((2,), ("x",)))}, {"w": (6,)})
    with refused(IndexError, "offsets has 6, which is not within the tensor 'w' of 6 elements"):
        places.shards({"w": [0, 6]})


def test_what_is_by_name_must_be_a_mapping() -> None:
    places = positions_of({"w": TensorLayout(("x",), DeviceMesh((2,), ("x",)))}, {"w": (6,)})
    calls: dict[str, Callable[[Any], Any]] = {
        "offsets": places.shards,
        "changed": places.route,
        "memory": lambda given: places.apply("cpu:0", given, {}),
    }
    for argument, call in calls.items():
        with refused(TypeError, f"{argument} must be a Mapping, got list"):
            call([1, 2])
    for wrong in (lambda: places.updates("cpu:0", [1]), lambda: places.apply("cpu:0", {}, [1])):  # type: ignore[arg-type]
        with refused(TypeError, "changed must be a Mapping, got list"):
            wrong()


@pytest.mark.parametrize("name", ENGINES)
def test_positions_lead_back(name: str) -> None:
    engine, shapes = ENGINES[name]
    first, places = numbered(shapes), positions_of(engine, shapes)
    device = engine.devices[-1]
    for one in engine.parameters_of(device, shapes):
        at = np.random.default_rng(1).permutation(math.prod(one.shape))
        found = np.full(len(at), PADDING)
        for tensor, which, offsets in places.origins(device, one.name, at):
            found[which] = first[tensor] + offsets
        np.testing.assert_array_equal(found, dense(one, shapes)[at])


@pytest.mark.parametrize("name", ENGINES)
def test_a_change_that_is_routed_is_the_dense_one(name: str) -> None:
    """The memory of each device after a sparse change is what the changed whole tensors would make it."""
    engine, shapes = ENGINES[name]
    first, places = numbered(shapes), positions_of(engine, shapes)
    random = np.random.default_rng(2)
    changed = {}
    model = np.arange(sum(map(math.prod, shapes.values())), dtype=np.float64)
    for tensor, shape in shapes.items():
        offsets = random.permutation(math.prod(shape))[: random.integers(0, math.prod(shape) // 2)]
        changed[tensor] = offsets, random.random(len(offsets))
        model[first[tensor] + offsets] = changed[tensor][1]
    routed = places.route(changed)
    for device in engine.devices:
        memory, count = {}, 0
        for one in engine.parameters_of(device, shapes):
            memory[one.name] = np.where((at := dense(one, shapes)) == PADDING, -1.0, at).reshape(one.shape)
        written = places.apply(device, memory, changed)
        for one in engine.parameters_of(device, shapes):
            whole = dense(one, shapes)
            right = np.where(whole == PADDING, -1.0, model[np.maximum(whole, 0)])
            np.testing.assert_array_equal(memory[one.name].reshape(-1), right)
            at, values = routed.get(device, {}).get(one.name, (np.zeros(0, np.int64), np.zeros(0)))
            np.testing.assert_array_equal(right[at], values)
            count += len(at)
        assert written == count


def test_layouts_without_parameters() -> None:
    mesh = DeviceMesh((2, 2), ("data", "model"))
    rules = LayoutMap(mesh)
    rules["kernel"] = (None, "model")
    places = positions_of(rules, {"kernel": (2, 4), "bias": (3,)})
    assert [(f.which.tolist(), f.positions.tolist()) for f in places.locate("cpu:3", "kernel", [7, 1, 2])] == [
        ([0, 2], [3, 0])
    ]
    # What no rule matches is whole on every device.
    assert places.locate("cpu:0", "bias", [2])[0].positions.tolist() == [2]
    assert set(places.route({"bias": ([1], np.ones(1))})) == {"cpu:0", "cpu:1", "cpu:2", "cpu:3"}
    named = positions_of({"w": TensorLayout(("data", None), mesh)}, {"w": (2, 4)})
    assert named.devices == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    assert [device for device in named.devices if named.updates(device, {"w": ([0], np.ones(1))})] == ["cpu:0", "cpu:1"]


def test_blocks_that_devices_share_arrive_at_each() -> None:
    """Six scales of rows, cut in four: two devices have part of a block each, which has one scale."""
    mesh = DeviceMesh((4,), ("tp",))
    rows = TensorLayout(("tp", None), mesh)
    held = [[0, 1], [1, 2], [3, 4], [4, 5]]  # Which rows each device has: 1 and 4 twice.
    windows = [
        Windows(
            np.arange(5), np.array([[own[0], own[1] + 1, 0] for own in held]), np.array([len(own) for own in held])
        ),
        Windows(np.arange(5), np.array([[0, 3, 0]] * 4), np.array([3] * 4)),
    ]
    tiling = SharedTiling.of((6, 3), rows, windows, begins_within=True)
    places = positions_of({"scale": tiling}, {"scale": (6, 3)})
    whole = np.arange(18, dtype=np.float32).reshape(6, 3)
    changed = {"scale": (np.arange(18, dtype=np.int32), whole.reshape(-1))}
    for device, own in zip(places.devices, held, strict=True):
        memory = {"scale": np.zeros((2, 3), np.float32)}
        assert places.apply(device, memory, changed) == 6
        np.testing.assert_array_equal(memory["scale"], whole[own])
        ((tensor, which, offsets),) = places.origins(device, "scale", np.arange(6))
        assert (tensor, which.tolist(), offsets.tolist()) == (
            "scale",
            [*range(6)],
            [3 * r + c for r in own for c in range(3)],
        )
    assert [device for device in places.devices if places.locate(device, "scale", [4])] == ["cpu:0", "cpu:1"]


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "complex64", "complex128", ">f4"])
@pytest.mark.parametrize("kind", ["int32", "int64", "uint8", "uint64", ">i4", "strided"])
def test_all_kinds_of_offsets_and_of_values(dtype: str, kind: str) -> None:
    engine, shapes = ENGINES["fused, keys repeated"]
    places, random = positions_of(engine, shapes), np.random.default_rng(3)
    changed = {}
    for name, shape in shapes.items():
        offsets = random.permutation(math.prod(shape))[:200]
        given = np.repeat(offsets, 2)[::2] if kind == "strided" else offsets
        if kind == "uint8":
            given = given[given < 256]
        given = given if kind == "strided" else given.astype(kind)
        changed[name] = given, random.integers(1, 100, len(given)).astype(dtype)
    for device in engine.devices:
        memory = {one.name: np.zeros(one.shape, dtype) for one in engine.parameters_of(device, shapes)}
        written = places.apply(device, memory, changed)
        assert written == sum(np.count_nonzero(array) for array in memory.values())
        for parameter, (at, values) in places.updates(device, changed).items():
            np.testing.assert_array_equal(memory[parameter].reshape(-1)[at], values)


def test_of_offsets_that_are_given_twice_the_last_stays() -> None:
    places = positions_of({"w": TensorLayout(("x",), DeviceMesh((2,), ("x",)))}, {"w": (6,)})
    memory = {"w": np.zeros(3, np.float32)}
    assert places.apply("cpu:1", memory, {"w": ([4, 4, 3, 4], np.array([1, 2, 3, 4], np.float32))}) == 4
    assert memory["w"].tolist() == [3, 4, 0]


def test_nothing_is_written_unless_all_fits() -> None:
    rows = TensorLayout(("x",), DeviceMesh((2,), ("x",)))
    places = positions_of({"v": rows, "w": rows}, {"v": (6,), "w": (6,)})
    memory = {"v": np.zeros(3, np.float32), "w": np.zeros(3, np.float32)}
    good = [0, 1], np.ones(2, np.float32)
    for bad in (([0, 6], np.ones(2, np.float32)), ([0], np.ones(1))):
        with pytest.raises((IndexError, LayoutError)):
            places.apply("cpu:0", memory, {"v": good, "w": bad})
        assert not memory["v"].any()
    # What has nothing on the device needs no memory there.
    assert places.apply("cpu:0", {"v": memory["v"]}, {"v": good, "w": ([5], np.ones(1, np.float32))}) == 2


class TestRefusals:
    @pytest.fixture
    def places(self) -> Positions:
        return positions_of({"w": TensorLayout(("x",), DeviceMesh((2,), ("x",)))}, {"w": (6,)})

    def test_offsets(self, places: Positions) -> None:
        with refused(LayoutError, "no tensor 'v'"):
            places.locate("cpu:0", "v", [0])
        for outside in (6, -1, 2**63 - 1):
            with pytest.raises(IndexError, match=str(outside)):
                places.route({"w": ([0, outside], np.ones(2))})
        with pytest.raises(IndexError):
            places.locate("cpu:0", "w", np.array([2**64 - 1], np.uint64))
        with pytest.raises(IndexError, match="3"):
            places.origins("cpu:0", "w", [3])
        for given in ([0.5], [[0]], ["a"]):
            with pytest.raises(TypeError, match="whole numbers"):
                places.locate("cpu:0", "w", given)

    def test_devices(self, places: Positions) -> None:
        for one in (places, positions_of(fsdp2(2), {"w": (6,)})):
            with pytest.raises(MeshError, match="cpu:9"):
                one.locate("cpu:9", "w", [0])

    def test_changes(self, places: Positions) -> None:
        with refused(LayoutError, "2 offsets", "shape (1,)"):
            places.route({"w": ([0, 1], np.ones(1))})
        with pytest.raises(TypeError, match="offsets, values"):
            places.route({"w": [0, 1, 2]})  # type: ignore[dict-item]

    def test_a_tensor_without_a_place(self) -> None:
        with refused(LayoutError, "'h'"):
            positions_of({}, {"h": (4,)}).route({"h": ([1], np.ones(1))})

    def test_memory(self, places: Positions) -> None:
        changed = {"w": ([0, 5], np.ones(2, np.float32))}
        cases: list[tuple[dict[str, Any], str]] = [
            ({}, "lacks"),
            ({"w": np.zeros(4, np.float32)}, "3 elements"),
            ({"w": np.zeros(3)}, "float64"),
            ({"w": np.zeros(6, np.float32)[::2]}, "contiguous"),
        ]
        for memory, said in cases:
            with refused(LayoutError, said):
                places.apply("cpu:0", memory, changed)


def test_torch_memory() -> None:
    torch = pytest.importorskip("torch")
    engine, shapes = ENGINES["fused, keys repeated"]
    places, device = positions_of(engine, shapes), "cpu:2"
    memory = {one.name: torch.zeros(one.shape, dtype=torch.bfloat16) for one in engine.parameters_of(device, shapes)}
    changed = {name: (np.arange(math.prod(shape)), torch.ones(math.prod(shape), dtype=torch.bfloat16))
               for name, shape in shapes.items()}  # fmt: skip
    places.apply(device, memory, changed)
    for one in engine.parameters_of(device, shapes):
        assert (memory[one.name].reshape(-1).float().numpy() == (dense(one, shapes) != PADDING)).all()
    with refused(LayoutError, "Tensor"):
        places.apply(device, memory, {"lm_head.weight": ([64 * 16], np.ones(1))})
    # Parameters that require gradients, and other dtypes, as numpy's memory.
    for dtype in (torch.float8_e4m3fn, torch.float64, torch.int8, torch.complex64, torch.complex128):
        whole = {one.name: torch.zeros(one.shape, dtype=dtype) for one in engine.parameters_of(device, shapes)}
        given = {name: (at.astype(np.int32), values.to(dtype)) for name, (at, values) in changed.items()}
        grad = dtype.is_floating_point and dtype is not torch.float8_e4m3fn
        leaves = {name: torch.nn.Parameter(one) if grad else one for name, one in whole.items()}
        places.apply(device, leaves, given)
        for one in engine.parameters_of(device, shapes):
            found = whole[one.name].reshape(-1).to(torch.complex128).numpy()
            assert (found == (dense(one, shapes) != PADDING)).all()
    # Dtypes of which PyTorch picks and puts no elements, with values that have strides.
    for dtype in (torch.uint16, torch.uint64, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2):
        size = torch.empty(0, dtype=dtype).element_size()
        whole = {n: torch.zeros(one.numel() * size, dtype=torch.uint8) for n, one in memory.items()}
        ones = {n: torch.ones(2 * len(at) * size, dtype=torch.uint8).view(dtype)[::2] for n, (at, _) in changed.items()}
        given = {name: (at.astype(np.int32), ones[name]) for name, (at, _) in changed.items()}
        places.apply(device, {name: one.view(dtype) for name, one in whole.items()}, given)
        updates = places.updates(device, given)
        for one in engine.parameters_of(device, shapes):
            expected = np.repeat(dense(one, shapes) != PADDING, size)
            assert (whole[one.name].numpy() == expected).all()
            at, values = updates[one.name]
            assert values.dtype == dtype
            assert len(at) == expected.sum() // size


def listed(whole: tuple[int, ...]) -> Tiling:
    """Two devices, each with two boxes one after the other; the second has also what the first has last."""
    rows, columns = whole
    first = [[(0, rows // 2), (0, columns)], [(rows // 2, rows), (0, 1)]]
    second = [[(rows // 2, rows), (1, columns)], [(rows // 2, rows), (0, 1)]]
    return Tiling.from_boxes(whole, {"a": first, "b": second}, replicas=True)


def test_a_manifest_says_what_its_deployment_says() -> None:
    """By layouts, packed ones too, on meshes of their own, and as listed boxes of the same pieces."""
    mesh = DeviceMesh((2, 2), ("pp", "tp"))
    rules: dict[str, Any] = {
        "qk": TensorLayout((parse("q:(4@tp 2) + k:(2@tp 2)"), None)),
        r"h\.{i}": ("tp", None),
        "bias": (None,),
    }
    engine = Deployment(4, mesh, {**rules, "bias": DeploymentRule((None,), at={"pp": 1})})
    shapes = {"qk": (12, 3), "h.0": (5, 3), "bias": (3,)}
    manifest = engine.manifest({name: (shape, "float32") for name, shape in shapes.items()}, uneven="balanced")
    expected = positions_of(engine, shapes, "balanced")
    for given in (manifest, Manifest.from_dict(manifest.to_dict())):
        places = positions_of(given, shapes)
        for device in engine.devices:
            assert places.parameters(device) == expected.parameters(device)
            for tensor, shape in shapes.items():
                offsets = np.random.default_rng(1).permutation(math.prod(shape))
                for mine, theirs in zip(
                    places.locate(device, tensor, offsets), expected.locate(device, tensor, offsets), strict=True
                ):
                    assert mine.which.tolist() == theirs.which.tolist()
                    assert mine.positions.tolist() == theirs.positions.tolist()


def test_listed_boxes_are_one_after_the_other() -> None:
    """As in the arrays that the tiling's own pieces are views of; there and back, and written."""
    tiling, values = listed((4, 3)), np.arange(12, dtype=np.int32) + 100
    places = positions_of({"w": tiling}, {"w": (4, 3)})
    assert places.devices == ("a", "b")
    offsets = np.random.default_rng(2).permutation(12)
    for device in "ab":
        own = np.full(tiling.holder_shape(device), -1, np.int32)
        for piece in tiling.pieces(device):
            piece.view(own)[...] = values.reshape(4, 3)[piece.box]
        ((parameter, which, at),) = places.locate(device, "w", offsets)
        assert parameter == "w"
        assert own[at].tolist() == values[offsets[which]].tolist()
        memory = {"w": np.full_like(own, -1)}
        assert places.apply(device, memory, {"w": (offsets, values[offsets])}) == len(own)
        assert memory["w"].tolist() == own.tolist()
        ((tensor, which, back),) = places.origins(device, "w", np.arange(len(own))[::-1])
        assert (tensor, which.tolist()) == ("w", [*range(len(own))])
        assert values[back].tolist() == own[::-1].tolist()
    with pytest.raises(LayoutError, match="no layout says how 'w' is cut, so its boxes have no numbers; locate says"):
        places.shards({"w": offsets})
    with pytest.raises(LayoutError, match=r"tensor 'w' has shape \(4, 4\), but its tiling has \(4, 3\)"):
        positions_of({"w": tiling}, {"w": (4, 4)}).parameters("a")
    with pytest.raises(LayoutError, match="no tensor is on 'c'; the devices are"):
        places.parameters("c")
