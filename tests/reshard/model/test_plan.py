"""Plans of whole models: one balance over all tensors, and each tensor's plan as exact as ever."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise import plan_model
from shardwise.deploy import Deployment, DeploymentRule, fsdp2
from tests.checks import refused
from tests.tilings import SHAPES, held, numbered, tilings

OLD = sw.DeviceMesh((2, 4), ("data", "model"))
NEW = sw.DeviceMesh((8,), ("x",), [f"gpu:{i}" for i in range(8)])


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, sw.Tiling], dict[str, sw.Tiling], dict[str, Any]]:
    src, dst, tensors = {}, {}, {}
    for i in range(draw(st.integers(0, 4))):
        shape = draw(SHAPES)
        ends = draw(tilings(shape)), draw(tilings(shape))
        for j in range(draw(st.integers(1, 3))):
            name = f"{i}.{j}"
            src[name], dst[name] = ends
            tensors[name] = shape, draw(st.sampled_from(["int8", "float32", "bfloat16"]))
    return src, dst, tensors


@settings(deadline=None)
@given(models())
def test_totals_and_results_are_those_of_the_tensors(model: Any) -> None:
    src, dst, tensors = model
    plan = sw.plan_model(src, dst, tensors)
    assert list(plan) == list(tensors)
    sums: dict[str, dict[Any, int]] = {"sent": {}, "received": {}, "kept": {}}
    for name, (_, dtype) in tensors.items():
        one, alone = plan[name], sw.plan_reshard(src[name], dst[name])
        assert (one.src, one.dst) == (src[name], dst[name])
        assert [(t.dst_device, t.box) for t in one] == [(t.dst_device, t.box) for t in alone]
        for kind, tiling, side, counts in (
            ("sent", src[name], "src", one.bytes_sent(dtype)),
            ("received", dst[name], "dst", one.bytes_received(dtype)),
            ("kept", dst[name], "dst", one.bytes_kept(dtype)),
        ):
            for label, count in zip(tiling.holders, counts.tolist(), strict=True):
                key = label if tiling.has_labels else (name, side, label)
                sums[kind][key] = sums[kind].get(key, 0) + count
    for kind, totals in (
        ("sent", plan.bytes_sent()),
        ("received", plan.bytes_received()),
        ("kept", plan.bytes_kept()),
    ):
        # Holders of tilings that several tensors share are known by the first of them, where they have no names.
        named = {label: count for label, count in totals.items() if isinstance(label, str)}
        assert named == {**dict.fromkeys(named, 0), **{k: v for k, v in sums[kind].items() if isinstance(k, str)}}
        assert sum(totals.values()) == sum(sums[kind].values())
    shards = {name: held(src[name], numbered(shape)) for name, (shape, _) in tensors.items()}
    for name, results in plan.run(shards).items():
        expected = held(dst[name], numbered(tensors[name][0]), 0)
        assert all(map(np.array_equal, results, expected))


def test_replicas_take_turns_over_all_tensors() -> None:
    """80 norms on 8 devices each, wanted by 8 others: 80 · 8 transfers of 64 bytes, 80 for each sender."""
    norms = {f"norm.{i}": ((16,), "float32") for i in range(80)}
    here, there = sw.LayoutMap(OLD), sw.LayoutMap(NEW)
    here["norm"], there["norm"] = (None,), (None,)
    plan = sw.plan_model(here, there, norms)
    assert set(plan.bytes_sent().values()) == {80 * 64, 0}
    assert [plan.bytes_sent()[f"cpu:{i}"] for i in range(8)] == [80 * 64] * 8
    assert plan.total_bytes() == 80 * 8 * 64
    # Few large ones beside: their senders send fewer of the small ones.
    tensors = {"big": ((16, 80), "float32"), **norms}
    here["big"], there["big"] = ("data", None), ("x", None)
    sent = sw.plan_model(here, there, tensors).bytes_sent()
    total = 16 * 80 * 4 + 80 * 8 * 64
    assert max(sent.values()) - total / 8 <= 64


def test_packed_elements_are_counted_in_bytes() -> None:
    layouts = {"w": sw.TensorLayout(("x",), NEW)}
    whole = {"w": sw.TensorLayout((None,), NEW)}
    plan = sw.plan_model(layouts, whole, {"w": ((64,), "F4")})
    assert plan.bytes_received()["gpu:0"] == 56 // 2


def test_refused() -> None:
    layouts = {"w": sw.TensorLayout(("x",), NEW)}
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: sw.plan_model(layouts, {}, {"w": ((8,), "f4")}), sw.LayoutError, "dst has no layout for 'w'"),
        (
            lambda: sw.plan_model(3, layouts, {"w": ((8,), "f4")}),
            TypeError,
            "src must be a LayoutMap, a Deployment, a manifest or a mapping",
        ),
        (lambda: sw.plan_model(layouts, layouts, [("w", (8,))]), TypeError, "tensors must map names"),  # type: ignore[arg-type]
        (lambda: sw.plan_model(layouts, layouts, {"w": (8,)}), TypeError, r"tensors\['w'\] must be \(shape, dtype\)"),
        (lambda: sw.plan_model(layouts, layouts, {"w": ((8,), "nope")}), TypeError, "the dtype of 'w'"),
        (lambda: sw.plan_model(layouts, layouts, {"w": ((8,), ["nope"])}), TypeError, "the dtype of 'w'"),
        (lambda: sw.plan_model(layouts, layouts, {"w": (([8],), "f4")}), TypeError, r"tensors\['w'\] must be \(shape"),
        (lambda: sw.plan_model(layouts, layouts, {"w": ((9,), "f4")}), sw.LayoutError, r"src\['w'\]: dim 0 has 9"),
        (
            lambda: sw.plan_model({"w": 3}, layouts, {"w": ((8,), "f4")}),
            TypeError,
            r"src\['w'\] must be a TensorLayout",
        ),
        (
            lambda: sw.plan_model({"w": sw.Tiling.grid((4,), (2,))}, layouts, {"w": ((8,), "f4")}),
            sw.LayoutError,
            r"src\['w'\] has shape \(4,\), but the tensor has \(8,\)",
        ),
        (lambda: sw.plan_model(layouts, layouts, {"w": ((8,), "f4")}).run({}), sw.LayoutError, "no shards of 'w'"),
    ]
    for make, error, message in cases:
        with pytest.raises(error, match=message):
            make()


def test_arguments_of_other_kinds_are_named() -> None:
    mesh = sw.DeviceMesh((2,), ("x",))
    rows, columns = {"w": sw.TensorLayout(("x", None), mesh)}, {"w": sw.TensorLayout((None, "x"), mesh)}
    tensors = {"w": ((4, 4), "int8")}
    with refused(TypeError, "config must be a Mapping or None, got list"):
        plan_model(rows, columns, tensors, config=[])  # type: ignore[arg-type]
    plan = plan_model(rows, columns, tensors)
    with refused(TypeError, "src_shards must be a Mapping, got int"):
        plan.run(5)  # type: ignore[arg-type]
    program = plan.program("cpu:0", 10**30)
    assert program.messages.tolist() == plan.program("cpu:0").messages.tolist()
    with refused(TypeError, "src must be a Mapping, got int"):
        program.run(5, {}, print, print)  # type: ignore[arg-type]


def test_the_fields_of_a_dtype_may_be_listed() -> None:
    """Eight elements of six bytes, which every new device receives."""
    here, there = sw.TensorLayout(("model",), OLD), sw.TensorLayout((None,), NEW)
    plan = sw.plan_model({"w": here}, {"w": there}, {"w": ((8,), [("a", "i4"), ("b", "i2")])})
    assert plan.total_bytes() == 8 * 6 * NEW.size


def test_missing_shards_are_counted() -> None:
    layout = sw.TensorLayout((None,), sw.DeviceMesh((1,), ("x",)))
    layouts = dict.fromkeys("abc", layout)
    plan = sw.plan_model(layouts, layouts, dict.fromkeys("abc", ((2,), "int8")))
    whole = [np.zeros(2, np.int8)]
    for shards, said in (({"a": whole, "c": whole}, "'b'$"), ({"c": whole}, "'a', nor of 1 other tensor$")):
        with pytest.raises(sw.LayoutError, match=f"^src_shards has no shards of {said}"):
            plan.run(shards)


def test_senders_that_do_not_hold_what_they_send() -> None:
    halves = sw.TensorLayout(("x",), sw.DeviceMesh((2,), ("x",))).partition((4,))
    reader = sw.Tiling.from_boxes((4,), [[(0, 4)]])
    assert [t.src_device for t in sw.reshard.ReshardPlan(halves, reader, [0, 1])] == ["cpu:0", "cpu:1"]
    for senders, message in (
        ([1, 0], r"senders\[0\] is 1, which does not hold \[0:2\]"),
        ([0, -1], r"senders\[1\] is -1, which does not hold \[2:4\]"),
        ([0], "senders has 1 element but transfers has 2"),
        ([0, 1, 1], "senders has 3 elements but transfers has 2"),
    ):
        with pytest.raises(sw.LayoutError, match=message):
            sw.reshard.ReshardPlan(halves, reader, senders)


def test_tensors_may_be_what_a_checkpoint_has(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    sw.save_checkpoint(path, {"a": np.zeros((4, 8), "float16"), "b": np.zeros(6)})
    mesh = sw.DeviceMesh((2,), ("x",))
    src, dst = sw.LayoutMap(mesh), sw.LayoutMap(mesh)
    src["a"], src["b"], dst["a"], dst["b"] = ("x", None), ("x",), (None, "x"), (None,)
    expected = sw.plan_model(src, dst, {"a": ((4, 8), "float16"), "b": ((6,), "float64")})
    # Half of each half of a, and half of b.
    assert expected.bytes_received() == {"cpu:0": 2 * 4 * 2 + 3 * 8, "cpu:1": 2 * 4 * 2 + 3 * 8}
    with sw.open_checkpoint(path) as stored:
        for tensors in ({name: tensor.array() for name, tensor in stored.items()}, stored):
            plan = sw.plan_model(src, dst, tensors)
            assert plan.bytes_received() == expected.bytes_received()
            assert plan["a"] == expected["a"]


class TestLinksBetweenNodes:
    """HSDP of 8 x 4 devices, nodes of 4, to two engines under tensor parallelism 8."""

    TRAINER = fsdp2(8, 4)
    ENGINE = Deployment(
        [f"gpu:{i}" for i in range(16)],
        sw.DeviceMesh((2, 8), ("dp", "tp")),
        {"rows": ("tp", None), "columns": (None, "tp"), "norm": (None,)},
    )
    TENSORS: dict[str, Any] = {  # noqa: RUF012
        **{f"rows.{i}": ((64, 8 * (i % 3 + 1)), "float32") for i in range(24)},
        **{f"columns.{i}": ((16, 64), "bfloat16") for i in range(12)},
        **{f"norm.{i}": ((64,), "float32") for i in range(24)},
    }
    NODES: dict[Any, Any] = {  # noqa: RUF012
        label: (side, i // 4)
        for side, one in (("trainer", TRAINER), ("engine", ENGINE))
        for i, label in enumerate(one.devices)
    }

    def links(self, plan: sw.ModelPlan) -> dict[tuple[Any, Any], int]:
        found: dict[tuple[Any, Any], int] = {}
        for name, one in plan.items():
            itemsize = 2 if name.startswith("columns") else 4
            for transfer in one:
                ends = self.NODES[transfer.src_device], self.NODES[transfer.dst_device]
                volume = int(np.prod([side.stop - side.start for side in transfer.box]))
                found[ends] = found.get(ends, 0) + volume * itemsize
        return found

    @pytest.mark.heavy
    def test_the_busiest_is_as_busy_as_it_has_to_be(self) -> None:
        plan = sw.plan_model(self.TRAINER, self.ENGINE, self.TENSORS, nodes=self.NODES)
        links = self.links(plan)
        # Each shard has four replicas, on nodes n, n + 2, n + 4 and n + 6, which nobody else can relieve: what they
        # send to a node together is given, and the busiest of the four sends a quarter of it at least.
        together: dict[tuple[int, Any], int] = {}
        for ((_, node), there), count in links.items():
            together[node % 2, there] = together.get((node % 2, there), 0) + count
        assert plan.total_bytes() == sum(together.values())
        for kind in (0, 1):
            for to in range(4):
                four = [links[("trainer", kind + 2 * i), ("engine", to)] for i in range(4)]
                assert max(four) <= 1.02 * together[kind, ("engine", to)] / 4
        sent = [plan.bytes_sent()[label] for label in self.TRAINER.devices]
        assert max(sent) <= 1.05 * sum(sent) / len(sent)
        without = sw.plan_model(self.TRAINER, self.ENGINE, self.TENSORS)
        assert without.total_bytes() == plan.total_bytes()
        assert max(self.links(without).values()) > 1.5 * max(links.values())

    def test_a_replica_on_the_own_node_sends(self) -> None:
        old, new = sw.DeviceMesh((4,), ("x",)), sw.DeviceMesh((2,), ("y",), ["a", "b"])
        whole = (sw.TensorLayout((None,), mesh) for mesh in (old, new))
        src, dst = ({"w": layout} for layout in whole)
        nodes = {"cpu:0": 0, "cpu:1": 1, "cpu:2": 2, "cpu:3": 3, "a": 3, "b": 2}
        plan = sw.plan_model(src, dst, {"w": ((4,), "int8")}, nodes=nodes)
        assert plan.bytes_sent() == {"cpu:0": 0, "cpu:1": 0, "cpu:2": 4, "cpu:3": 4, "a": 0, "b": 0}
        assert plan != sw.plan_model(src, dst, {"w": ((4,), "int8")})
        assert pickle.loads(pickle.dumps(plan)) == plan
        assert pickle.loads(pickle.dumps(plan)).bytes_sent() == plan.bytes_sent()

    def test_nodes_that_are_missing(self) -> None:
        with pytest.raises(sw.LayoutError, match="nodes has no node for 'gpu:0'"):
            sw.plan_model(self.TRAINER, self.ENGINE, self.TENSORS, nodes=dict.fromkeys(self.TRAINER.devices, 0))
        with pytest.raises(TypeError, match="nodes"):
            sw.plan_model(self.TRAINER, self.ENGINE, self.TENSORS, nodes=8)  # type: ignore[arg-type]


class TestDevices:
    """The devices of a plan are those of the worlds, in their order, idle ones included."""

    STAGES = Deployment(
        [f"t:{i}" for i in (3, 1, 0, 2)],
        sw.DeviceMesh((4,), ("pp",)),
        {"h.{i}": DeploymentRule((None,), at={"pp": "stage[i]"})},
        numbers={"stage": [3, 0, 2]},  # Stage 1 holds nothing, and the last comes first.
    )
    TENSORS = MappingProxyType({f"h.{i}": ((8,), "int8") for i in range(3)})

    def test_the_order_of_the_world(self) -> None:
        engine = sw.LayoutMap(sw.DeviceMesh((2,), ("x",), ["e:1", "e:0"]), default="replicated")
        plan = sw.plan_model(self.STAGES, engine, self.TENSORS)
        assert plan.devices == ("t:3", "t:1", "t:0", "t:2", "e:1", "e:0")
        for amounts in (plan.bytes_sent(), plan.bytes_received(), plan.bytes_kept()):
            assert tuple(amounts) == plan.devices
        assert list(plan.bytes_sent().values()) == [16, 0, 16, 16, 0, 0]
        assert list(plan.bytes_received().values()) == [0, 0, 0, 0, 24, 24]
        assert plan.program("t:1").messages.tolist() == []
        assert plan.program("t:3").descriptors.peers == plan.devices
        picture = str(sw.draw(plan))
        rows = [picture.index(f">{row}: ") for row in ("t:3", "t:1", "t:0,2 (2)", "e:1,0 (2)")]
        assert rows == sorted(rows)
        again = pickle.loads(pickle.dumps(plan))
        assert (again.devices, again.bytes_sent()) == (plan.devices, plan.bytes_sent())

    def test_devices_of_both_sides_are_there_once(self) -> None:
        engine = Deployment(["t:0", "new", "t:3"], sw.DeviceMesh((3,), ("x",)), {}, default="replicated")
        assert sw.plan_model(self.STAGES, engine, self.TENSORS).devices == ("t:3", "t:1", "t:0", "t:2", "new")

    def test_mappings_have_the_holders_of_their_tensors(self) -> None:
        one, two = (sw.TensorLayout((None,), sw.DeviceMesh((1,), ("x",), [label])) for label in "ba")
        tensors = dict.fromkeys("vw", ((8,), "int8"))
        assert sw.plan_model({"v": one, "w": two}, {"v": two, "w": two}, tensors).devices == ("b", "a")
        assert sw.plan_model({}, {}, {}).devices == ()

    def test_the_repr_is_a_line(self) -> None:
        plan = sw.plan_model(self.STAGES, self.STAGES, self.TENSORS)
        assert repr(plan) == "<ModelPlan of 3 tensors, 4 devices: 0 B move>"
        assert repr(sw.plan_model({}, {}, {})) == "<ModelPlan of 0 tensors, 0 devices: 0 B move>"

    def test_explained(self) -> None:
        """By hand: three tensors of 8 bytes, each to two devices; one of them is a device of the trainer."""
        engine = Deployment(["t:0", "new"], sw.DeviceMesh((2,), ("x",)), {}, default="replicated")
        assert sw.plan_model(self.STAGES, engine, self.TENSORS).explain().splitlines() == [
            "3 tensors, 24 B, go from 3 devices to 2.",
            "5 boxes move, 40 B in all; 8 B stays in place.",
            "The busiest device sends 16 B ('t:3'); the busiest receives 24 B ('new').",
        ]
        one = {"h.0": ((8,), "int8")}
        assert sw.plan_model(self.STAGES, self.STAGES, one).explain().splitlines() == [
            "1 tensor, 8 B, goes from 1 device to 1.",
            "Nothing moves: 8 B stays in place.",
        ]
        assert sw.plan_model({}, {}, {}).explain().startswith("0 tensors, 0 B, go from 0 devices to 0.")

    def test_explained_where_tensors_are_rewritten(self) -> None:
        fused = sw.Rewrites([{"from": "{q,k}", "to": {"name": "qk", "packed": "(2 [q:2 k:1])"}}])
        old, new = sw.DeviceMesh((2,), ("x",)), sw.DeviceMesh((1,), ("x",), ["gpu"])
        plan = sw.plan_model(
            {"qk": sw.TensorLayout(("x",), old)},
            dict.fromkeys("qk", sw.TensorLayout((None,), new)),
            {"q": ((4,), "int8"), "k": ((2,), "int8")},
            source_rewrites=fused,
        )
        assert "4 boxes of rewritten tensors move, 6 B in all." in plan.explain()


def test_plans_of_models_are_equal_if_all_of_them_is() -> None:
    mesh = sw.DeviceMesh((2,), ("tp",))
    cut, whole = (sw.TensorLayout((axis,), mesh) for axis in ("tp", None))
    src, dst, tensors = {"a": cut, "b": whole}, {"a": whole, "b": cut}, {"a": ((4,), "f4"), "b": ((4,), "f4")}
    plan, again = sw.plan_model(src, dst, tensors), sw.plan_model(src, dst, tensors)
    assert plan == again
    assert hash(plan) == hash(again)
    others = [
        sw.plan_model(src, dst, {"a": ((4,), "f4"), "b": ((4,), "i4")}),
        sw.plan_model(src, {"a": whole, "b": whole}, tensors),
        sw.plan_model(src, dst, {"a": ((4,), "f4")}),
        # The order of the tensors decides who sends what.
        sw.plan_model(src, dst, dict(reversed(tensors.items()))),
    ]
    assert all(plan != other for other in others)
