"""Quantized models between deployments: components follow the rules and rewrites of their weights."""

from __future__ import annotations

import pickle
import re
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import shardwise as sw
from shardwise.deploy import fsdp2, vllm
from shardwise.reshard.model.plan import plan_model

from ...checks import refused

Array = npt.NDArray[Any]
CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 4]}}
TENSORS = {
    f"{part}.{tail}": (shape, dtype)
    for part in ("gate", "up")
    for tail, shape, dtype in (("weight", (8, 16), "float8_e4m3fn"), ("weight_scale_inv", (4, 4), "float32"))
} | {"norm.weight": ((16,), "bfloat16")}
FUSED = sw.Rewrites([{"from": "{gate,up}.weight", "to": {"name": "gate_up.weight", "packed": "gate:(n) + up:(n)"}}])


def rules(devices: list[str], **layouts: Any) -> sw.LayoutMap:
    made = sw.LayoutMap(sw.DeviceMesh((len(devices),), ("tp",), devices), default="replicated")
    for name, layout in layouts.items():
        made[rf"^{name}\.weight$"] = layout
    return made


def values(name: str) -> Array:
    shape, dtype = TENSORS[name]
    width = {"float8_e4m3fn": 1, "float32": 4, "bfloat16": 2}[dtype]
    generator = np.random.default_rng(sum(map(ord, name)))
    return np.frombuffer(generator.bytes(int(np.prod(shape)) * width), f"V{width}").reshape(shape)


def test_scales_go_where_their_weights_do() -> None:
    src = rules(["a", "b"], gate=("tp", None), up=("tp", None))
    dst = rules(["c", "d", "e", "f"], gate=(None, "tp"), up=(None, "tp"))
    plan = plan_model(src, dst, TENSORS, config=CONFIG)
    assert pickle.loads(pickle.dumps(plan)) == plan
    for name in ("gate.weight", "gate.weight_scale_inv"):
        rows, columns = values(name).shape
        (before,) = plan[name].src.pieces("b")
        (after,) = plan[name].dst.pieces("d")
        assert before.box[0] == slice(rows // 2, rows)
        assert after.box[1] == slice(columns // 4, columns // 2)
    # Alone each scale would be on every device.
    (alone,) = plan_model(src, dst, TENSORS)["gate.weight_scale_inv"].dst.pieces("d")
    assert alone.box == (slice(0, 4), slice(0, 4))


def test_fused_in_memory_with_their_scales() -> None:
    src = rules(["a", "b"], gate=("tp", None), up=("tp", None))
    dst = rules(["c", "d"], gate_up=(sw.packed.parse("gate:(n@tp) + up:(n@tp)"), None))
    plan = plan_model(src, dst, TENSORS, rewrites=FUSED, config=CONFIG)
    assert set(plan) == {"gate_up.weight", "gate_up.weight_scale_inv", "norm.weight"}
    given = {}
    for name in TENSORS:
        if name == "norm.weight":
            given[name] = [values(name)] * 2
        else:
            rows = TENSORS[name][0][0]
            given[name] = [values(name)[: rows // 2].copy(), values(name)[rows // 2 :].copy()]
    made = plan.run(given)
    for tail, rows in (("weight", 8), ("weight_scale_inv", 4)):
        for rank in range(2):
            half = slice(rank * rows // 2, (rank + 1) * rows // 2)
            expected = np.concatenate([values(f"gate.{tail}")[half], values(f"up.{tail}")[half]])
            assert made[f"gate_up.{tail}"][rank].tobytes() == expected.tobytes()


LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 99, "num_hidden_layers": 1},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8},
}
LAYER = "model.layers.0."
DOWN = f"{LAYER}mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "odd"),
    [
        ({DOWN: ((64, 128), "int8")}, DOWN),
        ({DOWN: ((64, 32), "uint8"), "norm.weight": ((64,), "bfloat16")}, DOWN),
        ({f"{LAYER}self_attn.q_proj.qweight": ((8, 64), "int32")}, f"{LAYER}self_attn.q_proj.qweight"),
        ({DOWN: ((64, 128), "float8_e4m3fn"), f"{DOWN}_scale": ((64, 1), "float32")}, f"{DOWN}_scale"),
        ({f"{LAYER}mlp.gate_proj.W_q": ((64, 64), "uint8")}, f"{LAYER}mlp.gate_proj.W_q"),
    ],
)
def test_rules_of_a_model_plan_no_quantized_weights_that_nothing_states(tensors: dict[str, Any], odd: str) -> None:
    """The same question as in `report` and `reshard`, on either side, and after rewrites."""
    trainer, engine = fsdp2(2, world=["a", "b"]), vllm(LLAMA, tp=2)
    same = sw.Rewrites([{"from": odd, "to": odd}])
    for src, dst in ((trainer, engine), (engine, trainer)):
        for rewrites in (None, same):
            with refused(sw.ParseError, repr(odd), "nothing says how it is quantized"):
                plan_model(src, dst, tensors, rewrites=rewrites)
    # As it says: rules that do not say models name what is stored.
    own = sw.LayoutMap(sw.DeviceMesh((2,), ("tp",)), default="replicated")
    own[re.escape(odd)] = ("tp", None)
    assert list(plan_model(trainer, own, tensors)) == list(tensors)


def test_a_configuration_states_how_weights_are_quantized_in_a_plan() -> None:
    """A scale for each row of int8, as of compressed-tensors: columns are cut, scales are whole."""
    form = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}, "targets": ["Linear"]}
    known = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": form}}
    tensors = {DOWN: ((64, 128), "int8"), f"{DOWN}_scale": ((64, 1), "float32")}
    plan = plan_model(
        fsdp2(2, world=["a", "b"]), vllm(LLAMA, tp=2), tensors, config={**LLAMA, "quantization_config": known}
    )
    assert [plan[name].dst.pieces("cpu:1")[0].box[1] for name in tensors] == [slice(64, 128), slice(0, 1)]


def test_weights_of_8_bits_that_may_be_cast_are_said_in_a_plan() -> None:
    trainer, engine = fsdp2(2, world=["a", "b"]), vllm(LLAMA, tp=2)
    tensors = {DOWN: ((64, 128), "float8_e4m3fn")}
    with pytest.warns(sw.ShardwiseWarning, match="nothing says that they were only cast") as said:
        plan = plan_model(trainer, engine, tensors)
    assert len(said) == 1
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pickle.loads(pickle.dumps(plan)) == plan
        assert plan_model(trainer, engine, tensors, config={"dtype": "float8_e4m3fn"}) == plan


def test_blocks_that_neighbours_share_go_to_both() -> None:
    """By hand: 12 rows in blocks of 2 are 6 scales; in 4 they are 3 rows each, which touch two blocks.

    Of three trainers each has 4 rows and 2 scales; the four engines have the scales 0 and 1, 1 and 2, 3 and 4, 4 and 5.
    """
    tensors = {"gate.weight": ((12, 4), "float8_e4m3fn"), "gate.weight_scale_inv": ((6, 1), "float32")}
    scales = np.arange(6, dtype="f4").reshape(6, 1)
    weight = np.arange(48, dtype="u1").view("V1").reshape(12, 4)
    shared = sw.LayoutRule(("tp", None), shared=True)
    three, four = rules(["a", "b", "c"], gate=("tp", None)), rules(["e", "f", "g", "h"], gate=shared)
    plan = plan_model(three, four, tensors, config=CONFIG)
    assert pickle.loads(pickle.dumps(plan)) == plan
    cut = {"gate.weight": np.split(weight, 3), "gate.weight_scale_inv": np.split(scales, 3)}
    made = plan.run({name: [each.copy() for each in arrays] for name, arrays in cut.items()})
    held = [each.ravel().tolist() for each in made["gate.weight_scale_inv"]]
    assert held == [[0, 1], [1, 2], [3, 4], [4, 5]]
    assert [each.tobytes() for each in made["gate.weight"]] == [each.tobytes() for each in np.split(weight, 4)]
    # And back, from two that have the same scale each of which may send it.
    back = plan_model(four, three, tensors, config=CONFIG).run(made)
    assert [each.ravel().tolist() for each in back["gate.weight_scale_inv"]] == [[0, 1], [2, 3], [4, 5]]
    # To others that share other blocks: units of 5 rows are the rows 0 to 4, 5 to 9, 10 and 11.
    unit = sw.LayoutRule((sw.packed.parse("(n@tp/ceil/unit5)"), None), shared=True)
    other = plan_model(four, rules(["x", "y", "z"], gate=unit), tensors, config=CONFIG).run(made)
    assert [each.ravel().tolist() for each in other["gate.weight_scale_inv"]] == [[0, 1, 2], [2, 3, 4], [5]]


def test_cuts_within_blocks_and_wrong_scales_are_refused() -> None:
    whole = rules(["a"])
    with refused(sw.LayoutError, "'gate.weight'", "within a block of 2 of weight_scale_inv"):
        plan_model(whole, rules(list("abcdefgh"), gate=("tp", None)), TENSORS, config=CONFIG)
    with refused(sw.ParseError, "up.weight_scale_inv"):
        plan_model(whole, whole, {**TENSORS, "up.weight_scale_inv": ((8, 4), "float32")}, config=CONFIG)
