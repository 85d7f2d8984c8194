"""Programs of models: run by a simulator in which every send waits for its receive, message by message."""

from __future__ import annotations

import itertools
import pickle
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import DeviceMesh, LayoutError, TensorLayout, plan_model
from shardwise.deploy import ExpertMap, Repeat, fsdp2, megatron, vllm
from shardwise.reshard import ModelPlan, ModelProgram
from shardwise.reshard.model.memory import Block, check_apart, check_disjoint

from ...execute.shards import arrays


def out_arrays(plan: ModelPlan) -> dict[Any, dict[str, Any]]:
    found: dict[Any, dict[str, Any]] = {}
    for name in plan:
        dtype = np.dtype(plan._model.tensors[name][1])
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


class TestMemory:
    """What is written shares no byte with what is read, nor with itself; the bytes are compared one by one."""

    @given(st.data())
    def test_blocks_against_all_pairs(self, data: st.DataObject) -> None:
        block = st.builds(
            lambda start, size, space: (start, start + size, space),
            st.integers(0, 30), st.integers(0, 6), st.sampled_from(["", "gpu"]),
        )  # fmt: skip
        written, read = data.draw(st.lists(block, max_size=5)), data.draw(st.lists(block, max_size=5))
        cells = [{(space, at) for at in range(start, stop)} for start, stop, space in (*written, *read)]
        apart = all(not cells[i] & cells[j] for i in range(len(written)) for j in range(len(cells)) if i != j)
        blocks = [Block(f"{i}", *one) for i, one in enumerate((*written, *read))]
        try:
            check_apart(blocks[: len(written)], blocks[len(written) :])
            said = True
        except LayoutError as error:
            said = False
            one, other = (int(word) for word in str(error).split(",")[0].split(" shares memory with "))
            assert cells[one] & cells[other]
        assert said == apart

    @given(st.data())
    def test_strided_arrays_against_their_bytes(self, data: st.DataObject) -> None:
        memory = np.zeros(96, np.uint8)

        def view() -> Any:
            rows, columns = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4))
            strides = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 12))
            start = data.draw(st.integers(0, 40))
            return np.lib.stride_tricks.as_strided(memory[start:], (rows, columns), strides)

        def cells(array: Any) -> list[int]:
            begin = array.__array_interface__["data"][0]
            return [begin + int(np.dot(at, array.strides)) for at in np.ndindex(array.shape)]

        out, src = view(), view()
        try:
            check_disjoint(out, src)
        except LayoutError as error:
            if "itself" in str(error):
                # Arrays whose rows interlace without a common byte are refused too.
                assert len(set(cells(out))) < out.size or min(out.strides) * (max(out.shape) - 1) >= max(out.strides)
            else:
                assert set(cells(out)) & set(cells(src))
        else:
            assert len(set(cells(out))) == out.size
            assert not set(cells(out)) & set(cells(src))

    @pytest.mark.parametrize("begin", [0, 1, 59, 60, 61])
    def test_arrays_of_a_program(self, begin: int) -> None:
        """`a` has 60 bytes on each source and 40 on this destination: it shares some where it begins before byte 60."""
        old, new = DeviceMesh((2,), ("x",)), DeviceMesh((3,), ("x",), ["cpu:0", "b", "c"])
        src, dst = TensorLayout(("x", None), old), TensorLayout((None, "x"), new)
        plan = plan_model(
            dict.fromkeys("ab", src), dict.fromkeys("ab", dst), dict.fromkeys("ab", ((6, 20), "u1")), uneven="balanced"
        )
        memory = np.arange(256, dtype=np.uint8)
        before = {"a": memory[:60].reshape(3, 20), "b": np.zeros((3, 20), np.uint8)}
        out = {"a": memory[begin : begin + 42].reshape(6, 7), "b": np.zeros((6, 7), np.uint8)}
        sent: list[Any] = []
        if begin < 60:
            with pytest.raises(LayoutError, match=r"out\['a'\] shares memory with src\['a'\]"):
                plan.program("cpu:0").run(before, out, lambda *given: sent.append(given), lambda *_: None)
            assert not sent
            assert memory.tolist() == list(range(256))
        else:
            plan.program("cpu:0").run(before, out, lambda *given: sent.append(given), lambda *_: None)
            assert sent
        joined = np.zeros(90, np.uint8)
        twice = {"a": joined[:42].reshape(6, 7), "b": joined[41 - begin % 2 :][:42].reshape(6, 7)}
        with pytest.raises(LayoutError, match=r"out\['[ab]'\] shares memory with out\['[ab]'\]"):
            plan.program("cpu:0").run({"a": before["a"], "b": before["b"]}, twice, lambda *_: None, lambda *_: None)
        # What is read twice does no harm.
        tied = {"a": before["a"], "b": before["a"]}
        plan.program("cpu:0").run(tied, {n: np.zeros((6, 7), np.uint8) for n in "ab"}, lambda *_: None, lambda *_: None)


class TestRepeats:
    """Each slot of an engine is filled, whatever a balancer puts where; expected values by the slots themselves."""

    @given(st.data())
    def test_every_slot_of_any_map(self, data: st.DataObject) -> None:
        experts, ep = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
        rows = [data.draw(st.lists(st.integers(0, experts - 1), max_size=5)) for _ in range(ep)]
        absent = sorted(set(range(experts)) - {expert for row in rows for expert in row})
        rows[data.draw(st.integers(0, ep - 1))] += absent
        slots = tuple(map(tuple, rows))
        config = {"num_hidden_layers": 1, "hidden_size": 2, "num_attention_heads": 6, "num_experts": experts}
        engine = vllm(
            config, tp=ep, expert_parallel=True, experts=ExpertMap(slots), world=[f"e:{i}" for i in range(ep)]
        )
        shapes = {
            f"model.layers.0.mlp.experts.{e}.{x}_proj.weight": (2, 3) if x == "down" else (3, 2)
            for e in range(experts)
            for x in ("gate", "up", "down")
        }
        full = {name: np.random.default_rng(i).random(shape, "f4") for i, (name, shape) in enumerate(shapes.items())}
        tensors = {name: (shape, "float32") for name, shape in shapes.items()}
        plan = plan_model(fsdp2(2, world=["t:0", "t:1"]), engine, tensors)
        mail: dict[Any, Any] = {}
        trainer = fsdp2(2, world=["t:0", "t:1"])

        def put(own: str) -> Any:
            return lambda peer, tag, data: mail.update({(own, peer, tag): data.copy()})

        def got(own: str) -> Any:
            return lambda peer, tag, data: np.copyto(data, mail[peer, own, tag])

        for label in trainer.devices:
            held = {n: np.ascontiguousarray(full[n][trainer.partition(n, s).box(label)]) for n, s in shapes.items()}
            plan.program(label).run(held, {}, put(label), lambda *_: None)
        for rank, label in enumerate(engine.devices):
            parameters = engine.parameters_of(label, tensors)
            memory = {one.name: np.full(one.shape, -1, "f4") for one in parameters}
            into: dict[str, Any] = {}
            for one in parameters:
                into |= one.views(memory[one.name])
            plan.program(label).run({}, into, lambda *_: None, got(label))
            for one in parameters:
                assert len(memory[one.name]) == len(slots[rank])
                for place, expert in enumerate(slots[rank]):
                    start = f"model.layers.0.mlp.experts.{expert}."
                    kinds = ("down",) if "w2" in one.name else ("gate", "up")
                    want = np.concatenate([full[f"{start}{kind}_proj.weight"] for kind in kinds])
                    assert np.array_equal(memory[one.name][place], want)

    def test_a_place_of_another_size_is_refused(self) -> None:
        mesh = DeviceMesh((1,), ("x",))
        whole = {"w": TensorLayout((None,), mesh)}
        plan = plan_model(whole, whole, {"w": ((4,), "u1")})
        place = Repeat("w", 3)
        assert pickle.loads(pickle.dumps(place)).tensor == "w"
        out = {"w": np.zeros(4, "u1"), place: np.zeros(3, "u1")}
        with pytest.raises(LayoutError, match=r"out\['w in place 3'\] has 3 bytes, but the tensor has 4"):
            plan.program("cpu:0").run({"w": np.ones(4, "u1")}, out, lambda *_: None, lambda *_: None)
        # That of a tensor which is not in the plan stays as it is.
        other = np.zeros(4, "u1")
        out = {"w": np.zeros(4, "u1"), Repeat("v", 0): other, Repeat("w", 1): np.zeros(4, "u1")}
        plan.program("cpu:0").run({"w": np.ones(4, "u1")}, out, lambda *_: None, lambda *_: None)
        assert out["w in place 1"].tolist() == [1] * 4
        assert not other.any()


class TestPartialSums:
    """A program adds what descriptors cannot: addend by addend, in the order of the coordinates."""

    @staticmethod
    def carried(plan: ModelPlan, source: dict[str, list[Any]], memory: int | None) -> dict[Any, dict[str, Any]]:
        """All programs at once, over queues by sender, receiver and tag."""
        mail: dict[Any, queue.Queue[Any]] = {}
        out = out_arrays(plan)

        def box(*key: Any) -> queue.Queue[Any]:
            """The one queue of a key: a default dict may make two where two threads ask at once."""
            return mail.setdefault(key, queue.Queue())

        def run(holder: Any) -> None:
            before = {name: source[name][plan[name].src.holders.index(holder)] for name in plan}
            plan.program(holder, memory).run(
                before,
                out[holder],
                lambda peer, tag, data: box(holder, peer, tag).put(data.copy()),
                lambda peer, tag, data: np.copyto(data, box(peer, holder, tag).get(timeout=60)),
            )

        with ThreadPoolExecutor(len(plan.devices)) as pool:
            list(pool.map(run, plan.devices))
        assert all(one.empty() for one in mail.values())
        return out

    @pytest.mark.parametrize("memory", [None, 8, 100])
    def test_they_are_those_of_numpy(self, memory: int | None) -> None:
        mesh = DeviceMesh((2, 3), ("x", "y"))
        tensors = {"a": ((6, 4), "float64"), "b": ((7,), "float16"), "c": ((5,), "int32"), "d": ((3, 3), "complex64")}
        layouts = {
            "a": TensorLayout((None, "x"), mesh, unreduced=["y"]),
            "b": TensorLayout((None,), mesh, unreduced=["x", "y"]),
            "c": TensorLayout((None,), mesh),
            "d": TensorLayout(("x", None), mesh, unreduced=["y"]),
        }
        after = {name: TensorLayout(("y", *[None] * (len(shape) - 1)), mesh) for name, (shape, _) in tensors.items()}
        plan = plan_model(layouts, after, tensors, uneven="balanced")
        draw = np.random.default_rng(3)
        source: dict[str, list[Any]] = {}
        for name, (_, dtype) in tensors.items():
            source[name] = [
                (draw.normal(size=plan[name].src.holder_shape(label)) * 4.0**i).astype(dtype)
                for i, label in enumerate(plan[name].src.holders)
            ]
        source["c"] = [np.arange(5, dtype="int32")] * 6
        out = self.carried(plan, source, memory)
        for name, (shape, dtype) in tensors.items():
            total = np.zeros(shape, dtype)
            # The addends of each box, in the order of the coordinates of the axes that are not reduced.
            order = list(range(6))  # Those of "x" go with other boxes, where they are not reduced.
            seen: dict[Any, Any] = {}
            for i in order if name != "c" else order[:1]:
                box = tuple((side.start, side.stop) for side in plan[name].src.pieces(plan.devices[i])[0].box)
                seen[box] = seen[box] + source[name][i] if box in seen else source[name][i]
            for box, values in seen.items():
                total[tuple(slice(*side) for side in box)] = values
            for label in plan.devices:
                assert out[label][name].tobytes() == total[plan[name].dst.pieces(label)[0].box].tobytes()

    def test_a_message_has_whole_elements(self) -> None:
        mesh = DeviceMesh((2,), ("x",))
        sums, cut = TensorLayout((None,), mesh, unreduced=["x"]), TensorLayout(("x",), mesh)
        plan = plan_model({"w": sums}, {"w": cut}, {"w": ((8,), "float64")})
        (first, second) = (plan.program(label, 20) for label in ("cpu:0", "cpu:1"))
        # 4 elements of 8 bytes: the first addends by 20 bytes, the second by 16; tags go on.
        assert first.sums[0].messages["bytes"].tolist() == [16, 16]
        assert first.sums[0].messages["sends"].tolist() == [False, False]
        assert second.messages["sends"].tolist() == [False, False]
        assert second.messages["bytes"].tolist() == [20, 12]
        assert second.sums[0].messages["sends"].tolist() == [True, True]
        assert first.digest("cpu:1") == second.digest("cpu:0")
        with pytest.raises(LayoutError, match="memory is 7; a message of partial sums has at least 8 bytes"):
            plan.program("cpu:0", 7)

    def test_dtypes_are_those_of_the_plan(self) -> None:
        mesh = DeviceMesh((1,), ("x",))
        sums, whole = TensorLayout((None,), mesh, unreduced=["x"]), TensorLayout((None,), mesh)
        plan = plan_model({"w": sums}, {"w": whole}, {"w": ((2,), "float32")})
        assert not plan.program("cpu:0").sums  # One addend is none to be added.
        mesh = DeviceMesh((2,), ("x",))
        sums, whole = TensorLayout((None,), mesh, unreduced=["x"]), TensorLayout((None,), mesh)

        def refused(dtype: str, src: Any, out: Any) -> None:
            plan = plan_model({"w": sums}, {"w": whole}, {"w": ((2,), dtype)})
            plan.program("cpu:0").run({"w": src}, {"w": out}, *[lambda *_: pytest.fail("nothing is sent")] * 2)

        with pytest.raises(LayoutError, match=r"src\['w'\] is of dtype int32, but the plan adds up float32"):
            refused("float32", np.zeros(2, "i4"), np.zeros(2, "f4"))
        with pytest.raises(LayoutError, match=r"out\['w'\] is of dtype >f4, but the plan adds up float32"):
            refused("float32", np.zeros(2, "f4"), np.zeros(2, ">f4"))
        with pytest.raises(TypeError, match=r"partial sums of dtype datetime64\[s\] do not add up"):
            refused("M8[s]", np.zeros(2, "M8[s]"), np.zeros(2, "M8[s]"))
