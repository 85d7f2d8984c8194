"""Descriptors of models, carried out by a simulator that knows nothing but their rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise import DeviceMesh, LayoutError, ParseError, Rewrites, TensorLayout, Tiling, packed, plan_model
from shardwise.deploy import Deployment, DeploymentRule, fsdp2, megatron, vllm
from shardwise.reshard import Descriptors, ModelPlan
from shardwise.reshard.model.descriptors import DESCRIPTOR

from ...checks import refused
from ...execute.shards import arrays


def carried_out(plan: ModelPlan, source: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """What destination holders have at the end, by the rows of every holder on its own; each byte written once."""
    names = tuple(plan)
    labels = plan.bytes_sent()
    parts = {label: plan.descriptors(label) for label in labels}
    memory = {
        (label, name): shard.tobytes()
        for name, shards in source.items()
        for label, shard in zip(plan[name].src.holders, shards, strict=True)
    }
    result: dict[str, list[Any]] = {}
    written: dict[tuple[Any, str], Any] = {}
    for name in names:
        dst = plan[name].dst
        dtype = np.dtype(plan._model.tensors[name][1])
        result[name] = [np.zeros(dst.holder_shape(holder), dtype) for holder in dst.holders]
        for holder, array in zip(dst.holders, result[name], strict=True):
            written[holder, name] = array.reshape(-1).view(np.uint8), np.zeros(array.nbytes, np.int64)
    for label, part in parts.items():
        assert part.peers == tuple(labels)
        assert part.bytes_sent == plan.bytes_sent()[label]
        assert part.bytes_received == plan.bytes_received()[label]
        assert part.bytes_copied == plan.bytes_kept()[label]
        for rows, is_own in ((part.receives, False), (part.copies, True)):
            for peer, made_of, tensor, src, dst_at, size, count, src_stride, dst_stride in rows.tolist():
                assert made_of == tensor
                data = memory[label if is_own else part.peers[peer], names[tensor]]
                target, times = written[label, names[tensor]]
                for turn in range(count):
                    a, b = src + turn * src_stride, dst_at + turn * dst_stride
                    target[b : b + size] = np.frombuffer(data[a : a + size], np.uint8)
                    times[b : b + size] += 1
        # What it sends to others is what they receive from it, row by row.
        for number, peer in enumerate(part.peers):
            mine = part.sends[part.sends["peer"] == number].tolist()
            theirs = parts[peer].receives[parts[peer].receives["peer"] == part.peers.index(label)].tolist()
            assert [row[1:] for row in mine] == [row[1:] for row in theirs]
    for name in names:
        dst = plan[name].dst
        for holder in dst.holders:
            elements = sum(np.prod([s.stop - s.start for s in p.box]) for p in dst.pieces(holder))
            times = written[holder, name][1]
            assert times.max(initial=0) <= 1
            assert times.sum() == elements * np.dtype(plan._model.tensors[name][1]).itemsize
    return result


def check(plan: ModelPlan) -> None:
    source = arrays(plan)
    expected, found = plan.run(source), carried_out(plan, source)
    for name in plan:
        for one, other in zip(expected[name], found[name], strict=True):
            assert one.shape == other.shape
            assert one.tobytes() == other.tobytes()


MESH = DeviceMesh((2, 2), ("x", "y"))
OTHER = DeviceMesh((3,), ("z",), ["cpu:1", "gpu:0", "gpu:1"])


class TestRows:
    def test_by_hand(self) -> None:
        rows, columns = (
            TensorLayout(("x", None), DeviceMesh((2,), ("x",))),
            TensorLayout((None, "x"), DeviceMesh((2,), ("x",))),
        )
        plan = plan_model(
            {"a": rows, "b": rows}, {"a": columns, "b": columns}, {"a": ((4, 6), "i2"), "b": ((2, 2), "i8")}
        )
        part = plan.descriptors("cpu:0")
        # a: rows 0 and 1 are there, 3 of their 6 columns go: two runs of 6 bytes. b: one row, its second column.
        assert part.sends.tolist() == [(1, 0, 0, 6, 0, 6, 2, 12, 6), (1, 1, 1, 8, 0, 8, 1, 0, 0)]
        assert part.receives.tolist() == [(1, 0, 0, 0, 12, 6, 2, 12, 6), (1, 1, 1, 0, 8, 8, 1, 0, 0)]
        assert part.copies.tolist() == [(0, 0, 0, 0, 0, 6, 2, 12, 6), (0, 1, 1, 0, 0, 8, 1, 0, 0)]

    def test_dims_that_are_whole_on_both_sides_are_one_run(self) -> None:
        src = TensorLayout(("x", None, None), DeviceMesh((2,), ("x",)))
        dst = TensorLayout((None, None, None), DeviceMesh((1,), ("x",), ["gpu"]))
        (row,) = plan_model({"w": src}, {"w": dst}, {"w": ((4, 3, 5), "u1")}).descriptors("cpu:1").sends.tolist()
        assert row[3:7] == (0, 30, 30, 1)

    def test_further_loops_are_rows_of_their_own(self) -> None:
        src = TensorLayout((None, None, "x"), DeviceMesh((2,), ("x",)))
        dst = TensorLayout((None, "x", None), DeviceMesh((2,), ("x",), ["gpu:0", "gpu:1"]))
        plan = plan_model({"w": src}, {"w": dst}, {"w": ((3, 4, 6), "u1")})
        rows = plan.descriptors("cpu:0").sends
        # To each of two peers, three planes, each of two runs of three bytes.
        assert len(rows) == 6
        assert rows["count"].tolist() == [2] * 6
        check(plan)

    @pytest.mark.parametrize("seed", range(12))
    def test_layouts_at_random(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        tensors: dict[str, Any] = {}
        src: dict[str, Any] = {}
        dst: dict[str, Any] = {}
        for number in range(6):
            rank = int(draw.integers(0, 4))
            shape = tuple(int(draw.integers(1, 9)) for _ in range(rank))
            tensors[f"t{number}"] = shape, str(draw.choice(["u1", "f4", "c16"]))
            for mesh, into in ((MESH, src), (OTHER if draw.random() < 0.5 else MESH, dst)):
                axes: list[Any] = [None] * rank
                for axis in mesh.axis_names:
                    if rank and draw.random() < 0.7:
                        dim = int(draw.integers(0, rank))
                        axes[dim] = axis if axes[dim] is None else (axes[dim], axis)
                uneven: Any = draw.choice(["ceil", "balanced"])
                into[f"t{number}"] = TensorLayout(axes, mesh).partition(shape, str(uneven))  # type: ignore[arg-type]
        check(plan_model(src, dst, tensors))

    def test_packed_dims_and_padding(self) -> None:
        trainer = TensorLayout((packed.gate_up("x"), None), MESH)
        engine = TensorLayout((packed.parse("(n@z/pad6)"), None), OTHER)
        heads = TensorLayout((packed.qkv(6, 2, 2, "z"), None), DeviceMesh((2,), ("z",), ["a", "b"]))
        whole = TensorLayout((None, None), MESH)
        check(
            plan_model(
                {"w": trainer, "v": whole, "q": whole},
                {"w": engine, "v": trainer, "q": heads},
                {"w": ((20, 3), "f4"), "v": ((8, 2), "f2"), "q": ((20, 3), "u2")},
            )
        )

    def test_flat_ranges_and_explicit_boxes(self) -> None:
        flat = Tiling.from_flat_ranges((5, 7), {"cpu:0": (0, 13), "cpu:1": (13, 35)})
        boxes = Tiling.from_boxes((5, 7), {"cpu:1": [[(0, 2), (0, 7)], [(2, 5), (4, 7)]], "b": [[(2, 5), (0, 4)]]})
        check(plan_model({"w": flat, "v": boxes}, {"w": boxes, "v": flat}, {"w": ((5, 7), "i4"), "v": ((5, 7), "u1")}))


class TestDeployments:
    def test_a_trainer_with_stages_and_experts_to_an_engine(self) -> None:
        config = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
        config |= {"num_experts": 4, "vocab_size": 70, "tie_word_embeddings": True}
        engine = vllm(config, tp=2, dp=2, expert_parallel=True, redundant=4, world=[f"gpu:{i}" for i in range(4)])
        at = {"pp": "stage[i]"}
        trainer = Deployment(
            8,
            {"dense": DeviceMesh((2, 2, 2), ("pp", "dp", "tp")), "expert": DeviceMesh((2, 4), ("pp", "ep"))},
            {
                r"{i}\.self_attn\.[qkv]_proj": DeploymentRule(("tp", None), "dense", at),
                r"{i}\.self_attn\.o_proj": DeploymentRule((None, "tp"), "dense", at),
                r"{i}\.mlp\.experts\.{e}\.": DeploymentRule((None, None), "expert", {**at, "ep": "e"}),
                r"embed": DeploymentRule(("tp", None), "dense", {"pp": [0, 1]}),
                r"layernorm": DeploymentRule((None,), "world"),
            },
            numbers={"stage": [0, 0, 0, 1]},
        )
        tensors: dict[str, Any] = {"model.embed_tokens.weight": ((70, 8), "float16")}
        for i in range(4):
            layer = f"model.layers.{i}."
            tensors |= {f"{layer}self_attn.{x}_proj.weight": ((8, 8), "float32") for x in "qo"}
            tensors |= {f"{layer}self_attn.{x}_proj.weight": ((4, 8), "float32") for x in "kv"}
            tensors[f"{layer}input_layernorm.weight"] = (8,), "float32"
            for e in range(4):
                tensors |= {f"{layer}mlp.experts.{e}.{x}_proj.weight": ((6, 8), "uint8") for x in ("gate", "up")}
                tensors[f"{layer}mlp.experts.{e}.down_proj.weight"] = (8, 6), "uint8"
        plan = plan_model(trainer, engine, tensors)
        check(plan)
        check(plan_model(engine, trainer, tensors))
        # The ranks of a stage share the sending of what they all have.
        sent = [plan.bytes_sent()[f"cpu:{i}"] for i in range(8)]
        assert len(set(sent[:4])) == len(set(sent[4:])) == 1

    def test_megatron_to_fsdp_on_the_same_devices(self) -> None:
        old = megatron.gpt(megatron.Ranks(4, tp=2, pp=2), megatron.pipeline(3, pp=2, first=1, last=2))
        tensors = {f"decoder.layers.{i}.mlp.linear_fc1.weight": ((12, 4), "float32") for i in range(3)}
        tensors |= {f"decoder.layers.{i}.mlp.linear_fc2.weight": ((4, 6), "float32") for i in range(3)}
        check(plan_model(old, fsdp2(4), tensors))
        check(plan_model(fsdp2(2, 2), old, tensors))


def llama(layers: int = 32) -> tuple[dict[str, Any], dict[str, Any]]:
    """Llama-3-8B: its shapes, and how tensor parallelism cuts them."""
    hidden, inner, words, kv = 4096, 14336, 128256, 1024
    tensors: dict[str, Any] = {"model.embed_tokens.weight": (words, hidden), "lm_head.weight": (words, hidden)}
    rules: dict[str, Any] = {r"embed_tokens|lm_head|[qkv]_proj|gate_proj|up_proj": ("tp", None)}
    rules |= {"o_proj|down_proj": (None, "tp"), "norm": (None,)}
    tensors["model.norm.weight"] = (hidden,)
    for i in range(layers):
        layer = f"model.layers.{i}."
        tensors |= {
            f"{layer}self_attn.{x}_proj.weight": (size, hidden)
            for x, size in zip("qkvo", (hidden, kv, kv, hidden), strict=True)
        }
        tensors |= {f"{layer}mlp.{x}_proj.weight": (inner, hidden) for x in ("gate", "up")}
        tensors[f"{layer}mlp.down_proj.weight"] = hidden, inner
        tensors |= {f"{layer}{x}_layernorm.weight": (hidden,) for x in ("input", "post_attention")}
    return {name: (shape, "bfloat16") for name, shape in tensors.items()}, rules


def test_as_many_operations_and_bytes_as_mooncake() -> None:
    """Llama-3-8B from FSDP on 8 devices to TP on 4 others, planned by mooncake-transfer-engine 0.3.13.post1.

    Its `plan_placement_transfer` gave 5,424 operations of 1,051,952 runs and 16,062,119,936 bytes: it sends whatever a
    receiver needs from the one device that has it. Descriptors are merged where they follow each other: those of norms
    are not, since their pieces come from different devices.
    """
    tensors, rules = llama()
    engine = Deployment([f"gpu:{i}" for i in range(4)], DeviceMesh((4,), ("tp",)), rules)
    plan = plan_model(fsdp2(8), engine, tensors)
    parts = [plan.descriptors(label) for label in engine.devices]
    assert len(tensors) == 291
    assert sum(len(plan[name]) for name in plan) == 5424
    assert sum(part.bytes_received for part in parts) == plan.total_bytes() == 16_062_119_936
    assert sum(len(part.receives) for part in parts) == 5424
    assert sum(int(part.receives["count"].sum()) for part in parts) == 1_051_952


class TestFiles:
    def plan(self) -> ModelPlan:
        rows = TensorLayout(("x", None), DeviceMesh((2,), ("x",)))
        there = TensorLayout((None, "x"), DeviceMesh((2,), ("x",), ["ä", 7]))
        return plan_model({"w": rows}, {"w": there}, {"w": ((4, 6), "float32")})

    def test_saved_and_read(self, tmp_path: Path) -> None:
        for label in self.plan().bytes_sent():
            part = self.plan().descriptors(label)
            part.save(tmp_path / "part")
            read = Descriptors.load(tmp_path / "part")
            assert read == part
            assert hash(read) == hash(part)
            assert (read.holder, read.peers, read.tensors) == (label, ("cpu:0", "cpu:1", "ä", 7), ("w",))
        assert part != self.plan().descriptors("cpu:0")

    def test_padding_is_saved_too(self, tmp_path: Path) -> None:
        """5 rows padded to 8, over two: the second has one row, and 3 of zeros, 16 bytes each."""
        rows = TensorLayout(("x", None), DeviceMesh((1,), ("x",)))
        there = TensorLayout(("x", None), DeviceMesh((2,), ("x",), ["a", "b"]))
        rewrites = Rewrites([{"from": "w", "to": {"name": "v", "pad_to": 8}, "size": 5}])
        plan = plan_model({"w": rows}, {"v": there}, {"w": ((5, 4), "float32")}, rewrites=rewrites)
        part = plan.descriptors("b")
        assert sum((part.zeros["bytes"] * part.zeros["count"]).tolist()) == 3 * 16
        part.save(tmp_path / "part")
        assert Descriptors.load(tmp_path / "part") == part

    def test_what_is_not_such_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "part"
        self.plan().descriptors("cpu:0").save(path)
        data = path.read_bytes()
        wrong = data[:-72] + (9).to_bytes(8, "little") + data[-64:]
        negative = data[:-8] + b"\xff" * 8
        for bad in (
            b"",
            data[:20],
            data[:-1],
            data + b"0",
            data.replace(b'"rows"', b'"rowz"'),
            wrong,
            negative,
            b"x" * 999,
        ):
            path.write_bytes(bad)
            with pytest.raises(ParseError):
                Descriptors.load(path)
        huge = data[:24] + b"9" * 20 + data[44:]
        path.write_bytes(huge)
        with pytest.raises(ParseError):
            Descriptors.load(path)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("holder", None),
            ("holder", []),
            ("holder", True),
            ("holder", "nobody"),
            ("peers", "cpu:0"),
            ("peers", ["cpu:0", "cpu:0"]),
            ("peers", ["cpu:0", [1]]),
            ("tensors", "w"),
            ("tensors", [3]),
            ("tensors", {"w": 1}),
            ("rows", [float("inf"), 1, 1, 0]),
            ("rows", [float("nan"), 1, 1, 0]),
            ("rows", ["1", 1, 1, 0]),
            ("rows", [10**400, 1, 1, 0]),
        ],
    )
    def test_headers_that_none_has(self, tmp_path: Path, key: str, value: object) -> None:
        with pytest.raises(ParseError):
            self.forged(tmp_path / "part", {key: value}, lambda rows: rows)

    def forged(self, path: Path, head: dict[str, object], change: Callable[[Any], Any]) -> Descriptors:
        self.plan().descriptors("cpu:0").save(path)
        data = path.read_bytes()
        start = data.index(b"{")
        stop = data.index(b"\n", start) + 1
        text = json.dumps(json.loads(data[start:stop]) | head).encode() + b"\n"
        rows = change(np.frombuffer(data[stop:], DESCRIPTOR).copy())
        path.write_bytes(data[: start - 21] + f"{len(text):020}\n".encode() + text + rows.tobytes())
        return Descriptors.load(path)

    @pytest.mark.parametrize(
        "fields",
        [
            # The last run begins at 2**64, which is 0 in 64 bits: it would seem to lie within the array.
            {"count": 2**60 + 1, "src_stride": 16, "dst_stride": 16},
            {"src_offset": 2**63 - 12},
            {"dst_offset": 2**63 - 12},
            {"bytes": 2**62, "count": 4},
        ],
    )
    def test_rows_that_reach_beyond_all_memory(self, tmp_path: Path, fields: dict[str, int]) -> None:
        def change(rows: Any) -> Any:
            for name, value in fields.items():
                rows[name] = value
            return rows

        assert self.forged(tmp_path / "part", {}, lambda rows: rows) == self.plan().descriptors("cpu:0")
        with refused(ParseError, "has a row that reaches beyond the addresses of memory"):
            self.forged(tmp_path / "part", {}, change)

    @pytest.mark.parametrize(
        "field", ["peer", "src_tensor", "dst_tensor", "src_offset", "dst_offset", "bytes", "count", "dst_stride"]
    )
    def test_rows_of_what_is_not_listed(self, tmp_path: Path, field: str) -> None:
        part = self.plan().descriptors("cpu:0")
        counts = {"peer": len(part.peers), "src_tensor": len(part.tensors), "dst_tensor": len(part.tensors)}
        for value in (-1, counts.get(field, -(2**63))):

            def change(rows: Any, value: int = value) -> Any:
                rows[field][0] = value
                return rows

            with refused(ParseError, "has a row of a peer or a tensor that does not exist"):
                self.forged(tmp_path / "part", {}, change)

    def test_names_that_utf8_has_not(self, tmp_path: Path) -> None:
        cut = TensorLayout(("x",), DeviceMesh((2,), ("x",)))
        part = plan_model({"\ud800": cut}, {"\ud800": cut}, {"\ud800": ((4,), "int8")}).descriptors("cpu:0")
        part.save(tmp_path / "part")
        assert Descriptors.load(tmp_path / "part") == part

    @pytest.mark.skipif(os.name == "nt", reason="no such file there")
    def test_what_is_no_file_is_not_read(self) -> None:
        with refused(ParseError, "'/dev/zero' is not a regular file"):
            Descriptors.load("/dev/zero")

    def test_labels_that_cannot_be_written(self, tmp_path: Path) -> None:
        mesh = DeviceMesh((2,), ("x",), [("a", 1), ("a", 2)])
        plan = plan_model({"w": TensorLayout(("x",), mesh)}, {"w": TensorLayout((None,), mesh)}, {"w": ((4,), "f4")})
        with pytest.raises(LayoutError, match=r"the label \('a', 1\) cannot be written"):
            plan.descriptors(("a", 1)).save(tmp_path / "part")
        assert not list(tmp_path.iterdir())


class TestRefusals:
    def test_holders_that_are_not_there(self) -> None:
        cut = TensorLayout(("x",), DeviceMesh((2,), ("x",)))
        plan = plan_model({"w": cut}, {"w": cut}, {"w": ((4,), "f4")})
        with pytest.raises(LayoutError, match="holder 'gpu:0' is not in src or dst"):
            plan.descriptors("gpu:0")

    def test_holders_without_labels(self) -> None:
        cut = TensorLayout(("x",), DeviceMesh((2,), ("x",)))
        plan = plan_model({"w": cut}, {"w": Tiling.grid((4,), (2,))}, {"w": ((4,), "f4")})
        with pytest.raises(LayoutError, match="'w': its holders have no labels"):
            plan.descriptors("cpu:0")

    def test_partial_sums(self) -> None:
        mesh = DeviceMesh((2,), ("x",))
        sums = TensorLayout((None,), mesh, unreduced=["x"])
        plan = plan_model({"w": sums}, {"w": TensorLayout(("x",), mesh)}, {"w": ((4,), "f4")})
        with pytest.raises(LayoutError, match=r"'w' has partial sums .*; program\(holder\) can"):
            plan.descriptors("cpu:0")

    def test_elements_that_share_a_byte(self) -> None:
        mesh = DeviceMesh((2,), ("x",))
        for size, is_whole in ((8, True), (6, False)):
            plan = plan_model(
                {"w": TensorLayout(("x",), mesh)}, {"w": TensorLayout((None,), mesh)}, {"w": ((size,), "F4")}
            )
            if is_whole:
                assert plan.descriptors("cpu:0").receives["bytes"].tolist() == [2]
                continue
            with pytest.raises(LayoutError, match="cut within bytes"):
                plan.descriptors("cpu:0")


def test_a_model_plan_is_what_it_was() -> None:
    plan = TestFiles().plan()
    assert sw.reshard.ModelPlan is ModelPlan
    assert plan == TestFiles().plan()
