"""Programs of models: run by a simulator in which every send waits for its receive, message by message."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from shardwise import DeviceMesh, LayoutError, TensorLayout, plan_model
from shardwise.deploy import fsdp2, megatron
from shardwise.execute import ModelPlan, ModelProgram

from .shards import arrays


def out_arrays(plan: ModelPlan) -> dict[Any, dict[str, Any]]:
    found: dict[Any, dict[str, Any]] = {}
    for name in plan:
        dtype = np.dtype(plan._tensors[name][1])
        for holder in plan[name].dst.holders:
            found.setdefault(holder, {})[name] = np.zeros(plan[name].dst.holder_shape(holder), dtype)
    return found


def simulated(plan: ModelPlan, memory: int | None) -> None:
    """Each holder is a generator that stops at a message; a message goes on when both sides have reached it."""
    source = arrays(plan)
    expected, out = plan.run(source), out_arrays(plan)
    labels = list(plan.devices)
    programs = {label: plan.program(label, memory) for label in labels}
    for label, program in programs.items():
        if memory is not None:
            assert program.messages["bytes"].max(initial=0) <= memory
        keys = [(row["sends"], row["peer"], row["tag"]) for row in program.messages]
        assert len(set(keys)) == len(keys)
        for peer in labels:
            if peer != label:
                assert program.digest(peer) == programs[peer].digest(label)
    # The order alone: of all unfinished messages one is at the head of both of its lists.
    left = {label: list(program.messages) for label, program in programs.items()}
    order = []
    while any(left.values()):
        for label, messages in left.items():
            if messages and messages[0]["sends"]:
                peer, tag = labels[int(messages[0]["peer"])], messages[0]["tag"]
                other = left[peer][0] if left[peer] else None
                if other is not None and (other["sends"], labels[int(other["peer"])], other["tag"]) == (
                    False,
                    label,
                    tag,
                ):
                    order.append((label, peer, int(tag)))
                    messages.pop(0)
                    left[peer].pop(0)
                    break
        else:
            raise AssertionError("a deadlock")
    # The bytes: in that order, what is sent is there when it is received.
    mail: dict[tuple[Any, Any, int], Any] = {}
    for label in labels:
        shards = {
            name: source[name][plan[name].src.holders.index(label)] for name in plan if label in plan[name].src.holders
        }

        def send(peer: Any, tag: int, data: Any, label: Any = label) -> None:
            mail[label, peer, tag] = data.copy()

        def nothing(peer: Any, tag: int, data: Any) -> None:
            pass

        programs[label].run(shards, out.get(label, {}), send, nothing)
    assert sorted(mail, key=repr) == sorted(order, key=repr)
    for label in labels:
        shards = {
            name: source[name][plan[name].src.holders.index(label)] for name in plan if label in plan[name].src.holders
        }

        def receive(peer: Any, tag: int, data: Any, label: Any = label) -> None:
            data[...] = mail[peer, label, tag]

        programs[label].run(shards, out.get(label, {}), lambda *_: None, receive)
    for name in plan:
        for holder, array in zip(plan[name].dst.holders, expected[name], strict=True):
            assert out[holder][name].tobytes() == array.tobytes()


TENSORS = {"a": ((12, 10), "float32"), "b": ((7, 4), "uint8"), "c": ((5,), "complex128"), "d": ((), "int16")}


def sides() -> tuple[dict[str, Any], dict[str, Any]]:
    old, new = DeviceMesh((2, 2), ("x", "y")), DeviceMesh((3,), ("z",), ["cpu:1", "gpu:0", "gpu:1"])
    src = {"a": TensorLayout(("x", "y"), old), "b": TensorLayout(("y", None), old), "c": TensorLayout(("x",), old)}
    dst = {"a": TensorLayout((None, "z"), new), "b": TensorLayout((None, "z"), new), "c": TensorLayout((None,), new)}
    src["d"], dst["d"] = TensorLayout((), old), TensorLayout((), new)
    return tuple(  # type: ignore[return-value]
        {name: layout.partition(TENSORS[name][0], "ceil") for name, layout in side.items()} for side in (src, dst)
    )


@pytest.mark.parametrize("memory", [None, 1, 7, 16, 64, 1000])
def test_programs_of_any_message_size(memory: int | None) -> None:
    src, dst = sides()
    simulated(plan_model(src, dst, TENSORS), memory)
    simulated(plan_model(dst, src, TENSORS), memory)


def test_one_message_for_each_peer_over_all_tensors() -> None:
    src, dst = sides()
    plan = plan_model(src, dst, TENSORS)
    for label in plan.bytes_sent():
        program = plan.program(label)
        pairs = [(bool(row["sends"]), int(row["peer"])) for row in program.messages]
        assert len(set(pairs)) == len(pairs)
        assert program.messages["tag"].tolist() == [0] * len(pairs)
        assert program.messages["bytes"].sum() == plan.bytes_sent()[label] + plan.bytes_received()[label]


def test_stages_to_shards_on_the_same_devices() -> None:
    old = megatron.gpt(megatron.Ranks(4, tp=2, pp=2), megatron.pipeline(4, pp=2))
    tensors = {f"decoder.layers.{i}.mlp.linear_fc1.weight": ((12, 4), "float32") for i in range(4)}
    tensors |= {f"decoder.layers.{i}.mlp.linear_fc2.weight": ((4, 6), "float16") for i in range(4)}
    simulated(plan_model(old, fsdp2(4), tensors), 50)


def test_a_turn_has_one_receiver_for_each_sender() -> None:
    every = DeviceMesh((5,), ("x",))
    rows, columns = TensorLayout(("x", None), every), TensorLayout((None, "x"), every)
    plan = plan_model({"w": rows}, {"w": columns}, {"w": ((10, 10), "u1")})
    sent = [[int(row["peer"]) for row in plan.program(f"cpu:{i}").messages if row["sends"]] for i in range(5)]
    # All are busy in every turn: nobody is sent to twice.
    assert all(len(set(turn)) == 5 for turn in zip(*sent, strict=True))


class TestRefusals:
    def program(self) -> ModelProgram:
        src, dst = sides()
        return plan_model(src, dst, TENSORS).program("cpu:1")

    def test_arrays_that_do_not_fit(self) -> None:
        src, dst = sides()
        plan = plan_model(src, dst, TENSORS)
        good = {name: arrays(plan)[name][1] for name in plan}
        out = out_arrays(plan)["cpu:1"]
        cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
            ({k: v for k, v in good.items() if k != "a"}, out, "src has no array for 'a'"),
            ({**good, "a": good["a"][:2]}, out, r"src\['a'\] has 40 bytes; the plan needs"),
            ({**good, "a": np.asfortranarray(good["a"])}, out, r"src\['a'\] must be a numpy array in C order"),
            (good, {**out, "b": [1]}, r"out\['b'\] must be a numpy array in C order"),
            (good, {**out, "b": np.frombuffer(bytes(out["b"].nbytes), "u1")}, r"out\['b'\] is read-only"),
        ]
        for before, after, message in cases:
            sent: list[Any] = []
            with pytest.raises(ValueError, match=message):
                self.program().run(before, after, lambda *given, sent=sent: sent.append(given), lambda *_: None)
            assert not sent

    def test_memory_and_peers(self) -> None:
        src, dst = sides()
        plan = plan_model(src, dst, TENSORS)
        with pytest.raises(LayoutError, match="memory is 0"):
            plan.program("cpu:1", 0)
        with pytest.raises(LayoutError, match="holder 'gpu:9' is not in the plan"):
            plan.program("cpu:1").digest("gpu:9")

    def test_other_plans_have_other_digests(self) -> None:
        src, dst = sides()
        mine = plan_model(src, dst, TENSORS).program("cpu:1")
        others = [{"e" if name == "a" else name: value for name, value in each.items()} for each in (src, dst, TENSORS)]
        renamed = plan_model(*others).program("cpu:1")
        smaller = plan_model(src, dst, TENSORS).program("cpu:1", 8)
        digests = [program.digest("gpu:0") for program in (mine, renamed, smaller)]
        assert all(one != other for one, other in itertools.combinations(digests, 2))
