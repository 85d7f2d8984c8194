"""Quantized models between deployments: components follow the rules and rewrites of their weights."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import numpy.typing as npt

import shardwise as sw
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


def test_cuts_within_blocks_and_wrong_scales_are_refused() -> None:
    whole = rules(["a"])
    with refused(sw.LayoutError, "'gate.weight'", "within a block of 2 of weight_scale_inv"):
        plan_model(whole, rules(list("abcdefgh"), gate=("tp", None)), TENSORS, config=CONFIG)
    with refused(sw.ParseError, "up.weight_scale_inv"):
        plan_model(whole, whole, {**TENSORS, "up.weight_scale_inv": ((8, 4), "float32")}, config=CONFIG)
