"""Adapters of stacked experts: cut as the experts are, by the tensor- and the expert-parallel ranks of an engine.

vLLM's slices are written out from `lora/model_manager.py` (`_stack_moe_lora_weights`, `_slice_moe_lora_ep`) and
`lora/layers/fused_moe.py` (`_slice_w13_b`, `_slice_w2_a`). PEFT's delta is that of `ParamWrapper.get_delta_weight`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.deploy import vllm
from shardwise.quantized import Components
from shardwise.quantized.follow import followers, with_states

from .test_adapters import Arrays, described, mesh

E, R, HIDDEN, INNER = 4, 3, 10, 8
CONFIG: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "num_experts": E, "hidden_size": HIDDEN, "moe_intermediate_size": INNER},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 64, "num_hidden_layers": 1},
    "intermediate_size": 12,
}
PREFIX = "base_model.model.model.layers.0.mlp.experts."


def adapter(*, swapped: bool = False) -> Arrays:
    """The tensors of PEFT for both weights of the experts; which of the two is the outer one, is not fixed."""
    rng = np.random.default_rng(0)
    found: Arrays = {}
    for at, (rows, columns) in {"base_layer.": (2 * INNER, HIDDEN), "": (HIDDEN, INNER)}.items():
        name = PREFIX + ("" if bool(at) == swapped else "base_layer.")
        found[f"{name}lora_A.weight"] = rng.normal(size=(E * R, columns)).astype("f4")
        found[f"{name}lora_B.weight"] = rng.normal(size=(rows, R * E)).astype("f4")
    return found


def stacked(a: Any, b: Any) -> tuple[Any, Any]:
    """The factors as (experts, rank, in) and (experts, out, rank), as PEFT and vLLM read them."""
    experts = E if a.shape[0] == E * R else a.shape[0] // R
    return a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts).transpose(2, 0, 1)


def of_vllm(tensors: Arrays, rank: int, ways: int, *, ep: bool) -> list[Any]:
    """A and B of `gate_up_proj`, and of `down_proj`, of a rank."""
    (w13_a, w13_b), (w2_a, w2_b) = (
        stacked(tensors[f"{PREFIX}{at}lora_A.weight"], tensors[f"{PREFIX}{at}lora_B.weight"])
        for at in ("base_layer.", "")
    )
    if ep:
        own = slice(rank * E // ways, (rank + 1) * E // ways)
        return [one[own] for one in (w13_a, w13_b, w2_a, w2_b)]
    size = INNER // ways
    own = slice(rank * size, (rank + 1) * size)
    halves = np.concatenate([half[:, own] for half in np.split(w13_b, 2, 1)], 1)
    return [w13_a, halves, w2_a[:, :, own], w2_b]


def held(tensors: Arrays, found: Components, layouts: Any, rank: int) -> Arrays:
    """What a rank has of each tensor."""
    made: Arrays = {}
    for name, (_, cut) in followers(found, layouts).items():
        assert not isinstance(cut, str), cut
        part: Any = cut.partition(tensors[name].shape) if isinstance(cut, sw.TensorLayout) else cut
        label = f"cpu:{rank}"
        made[name] = np.zeros(part.holder_shape(label), "f4")
        for piece in part.pieces(label):
            own = tensors[name][piece.box]
            sides = zip(piece.start, own.shape, strict=True)
            made[name][tuple(slice(at, at + size) for at, size in sides)] = own
    assert {*made} == {*tensors}
    return made


@pytest.mark.parametrize(("ways", "ep"), [(2, False), (4, False), (2, True), (4, True)])
@pytest.mark.parametrize("named", ["deployment", "rules"])
def test_ranks_have_what_vllm_gives_them(ways: int, ep: bool, named: str) -> None:
    tensors, layouts, rewrites = adapter(), sw.LayoutMap(mesh(ways)), None
    placed: Any = layouts
    if named == "deployment":
        placed = vllm(CONFIG, tp=ways, expert_parallel=ep)
    else:
        placed, rewrites = sw.read_rules("vllm/qwen3-moe", mesh(ways), config=CONFIG)
        if ep:
            placed = layouts
            layouts[r"w(13|2)_weight$"] = ("tp", None, None)
    found = with_states(Components(None, {}, (), config=CONFIG), described(tensors), rewrites)
    for rank in range(ways):
        own = held(tensors, found, placed, rank)
        made = [
            one
            for at in ("base_layer.", "")
            for one in stacked(own[f"{PREFIX}{at}lora_A.weight"], own[f"{PREFIX}{at}lora_B.weight"])
        ]
        for one, expected in zip(made, of_vllm(tensors, rank, ways, ep=ep), strict=True):
            np.testing.assert_array_equal(one, expected)


def test_which_weight_a_pair_is_of_follows_from_its_sizes() -> None:
    for swapped, outer, inner in ((False, "gate_up_proj", "down_proj"), (True, "down_proj", "gate_up_proj")):
        found = with_states(Components(None, {}, (), config=CONFIG), described(adapter(swapped=swapped)))
        names = {one.components[0].name: one.name.rpartition(".")[2] for one in found.states}
        assert names[f"{PREFIX}base_layer.lora_A.weight"] == names[f"{PREFIX}base_layer.lora_B.weight"] == outer
        assert names[f"{PREFIX}lora_A.weight"] == inner


@pytest.mark.parametrize("ep", [False, True])
def test_factors_of_three_dims_follow_without_a_configuration(ep: bool) -> None:
    """As vLLM has them in memory: (experts, rank, in) and (experts, out, rank)."""
    flat = adapter()
    tensors: Arrays = {}
    for at, last in (("base_layer.", "gate_up_proj"), ("", "down_proj")):
        pair = stacked(flat[f"{PREFIX}{at}lora_A.weight"], flat[f"{PREFIX}{at}lora_B.weight"])
        tensors |= {f"{PREFIX}{last}.lora_{x}.weight": one for x, one in zip("AB", pair, strict=True)}
    found = with_states(Components(None, {}, ()), described(tensors))
    for rank in range(2):
        own = held(tensors, found, vllm(CONFIG, tp=2, expert_parallel=ep), rank)
        for one, expected in zip(own.values(), of_vllm(flat, rank, 2, ep=ep), strict=True):
            np.testing.assert_array_equal(one, expected)


def test_gpt_oss_has_its_experts_turned() -> None:
    """Its weights are (experts, in, out), so that the rows of B are the last dim of the weight."""
    config = CONFIG | {"model_type": "gpt_oss", "num_local_experts": E, "intermediate_size": INNER}
    del config["num_experts"], config["moe_intermediate_size"]
    tensors = adapter()
    layouts = sw.LayoutMap(mesh(2))
    layouts[r"experts\.gate_up_proj$"] = (None, None, "tp")
    layouts[r"experts\.down_proj$"] = (None, "tp", None)
    own = held(tensors, with_states(Components(None, {}, (), config=config), described(tensors)), layouts, 1)
    a, b, down_a, down_b = own.values()
    whole = list(tensors.values())
    for one, expected in zip(
        (a, b, down_a, down_b), (whole[0], whole[1][INNER:], whole[2][:, INNER // 2 :], whole[3]), strict=True
    ):
        np.testing.assert_array_equal(one, expected)


def test_reports_files_and_plans_follow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = adapter()
    (tmp_path / "adapter").mkdir()
    sw.save_checkpoint(tmp_path / "adapter" / "adapter_model.safetensors", tensors, sync=False)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    asked = [str(tmp_path / "adapter"), "--config", str(tmp_path / "config.json")]
    for how in (["--rules", "vllm/qwen3-moe", "--mesh", "tp=2"], ["--for", "vllm(tp=2, expert_parallel=true)"]):
        assert main(["report", *asked, *how, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert not [one for one in said["warnings"] if "experts" in str(one)]
    made = tmp_path / "ranks"
    rules = ["--rules", "vllm/qwen3-moe", "--mesh", "tp=2"]
    assert main(["reshard", asked[0], str(made), *asked[1:], *rules, "--to", "ranks", "--no-sync", "--quiet"]) == 0
    for rank in range(2):
        with sw.open_checkpoint(next(made.glob(f"rank-0000{rank}*")), part=True) as own:
            pairs = [
                stacked(own.read(f"{PREFIX}{at}lora_A.weight"), own.read(f"{PREFIX}{at}lora_B.weight"))
                for at in ("base_layer.", "")
            ]
        for one, expected in zip(
            [one for pair in pairs for one in pair], of_vllm(tensors, rank, 2, ep=False), strict=True
        ):
            np.testing.assert_array_equal(one, expected)
    one = sw.DeviceMesh((1,), ("tp",), ["trainer"])
    source = {name: sw.TensorLayout((None, None), one) for name in tensors}
    plan = sw.plan_model(source, vllm(CONFIG, tp=2, expert_parallel=True), described(tensors), config=CONFIG)
    moved = plan.run({name: [array] for name, array in tensors.items()})
    for rank in range(2):
        pairs = [
            stacked(moved[f"{PREFIX}{at}lora_A.weight"][rank], moved[f"{PREFIX}{at}lora_B.weight"][rank])
            for at in ("base_layer.", "")
        ]
        for got, expected in zip(
            [one for pair in pairs for one in pair], of_vllm(tensors, rank, 2, ep=True), strict=True
        ):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts": 5}, "add up to 12, which 5 experts do not divide"),
        ({"hidden_size": 12}, "it is of 16 x 10, and experts of 12 and 8 have 16 x 12 and 12 x 8"),
        ({"num_experts": None}, "Their number and sizes are not known"),
    ],
)
def test_what_the_configuration_does_not_say_is_refused(change: dict[str, Any], said: str) -> None:
    tensors = adapter()
    layouts = sw.LayoutMap(sw.DeviceMesh((2,), ("ep",)))
    layouts[r"mlp\.experts\."] = ("ep", None, None)
    found = with_states(Components(None, {}, (), config=CONFIG | change), described(tensors))
    _, why = followers(found, layouts)[f"{PREFIX}base_layer.lora_B.weight"]
    assert isinstance(why, str)
    assert said in why
    assert "a rule for its own name places it" in why


def test_experts_and_other_parts_that_do_not_fit_are_refused() -> None:
    tensors = adapter()
    layouts = sw.LayoutMap(sw.DeviceMesh((3,), ("ep",)))
    layouts[r"mlp\.experts\."] = ("ep", None, None)
    found = with_states(Components(None, {}, (), config=CONFIG), described(tensors))
    for _, why in followers(found, layouts).values():
        assert "4" in str(why)
        assert "3" in str(why)
        assert isinstance(why, str)
    more = {**tensors, f"{PREFIX}lora_magnitude_vector": np.zeros(HIDDEN, "f4")}
    found = with_states(Components(None, {}, (), config=CONFIG), described(more))
    _, why = followers(found, layouts)[f"{PREFIX}lora_A.weight"]
    assert "its adapter has A, B, magnitude: for experts only A and B are known" in str(why)


@pytest.mark.filterwarnings("ignore")
def test_the_product_is_that_of_peft() -> None:
    """A model of PEFT with the experts among its `target_parameters`: what ranks have makes their part of the delta."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**CONFIG, num_experts_per_tok=2))
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = peft.LoraConfig(r=R, lora_alpha=R, target_parameters=targets, target_modules=[])
    wrapped = peft.get_peft_model(model, lora)
    with torch.no_grad():
        for name, value in wrapped.named_parameters():
            if "lora_" in name:
                value.copy_(torch.randn(value.shape))
    tensors = {name: value.numpy() for name, value in peft.get_peft_model_state_dict(wrapped).items()}
    found = with_states(Components(None, {}, (), config=CONFIG), described(tensors))
    outer = wrapped.base_model.model.model.layers[0].mlp.experts
    deltas = {one.parameter_name: one.get_delta_weight("default").detach().numpy() for one in (outer, outer.base_layer)}
    weights = {one.components[0].name: one.name.rpartition(".")[2] for one in found.states}
    for rank in range(2):
        own = held(tensors, found, vllm(CONFIG, tp=2, expert_parallel=True), rank)
        for at in ("base_layer.", ""):
            a, b = stacked(own[f"{PREFIX}{at}lora_A.weight"], own[f"{PREFIX}{at}lora_B.weight"])
            whole = deltas[weights[f"{PREFIX}{at}lora_A.weight"]]
            np.testing.assert_allclose(b @ a, whole[2 * rank : 2 * rank + 2], rtol=1e-4, atol=1e-5)


def pairs(sizes: dict[str, tuple[int, int]]) -> dict[str, tuple[tuple[int, ...], str]]:
    """The joined factors of modules in the experts, by the rows and columns that each has."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for module, (rows, columns) in sizes.items():
        found[f"{PREFIX}{module}lora_A.weight"] = (E * R, columns), "float32"
        found[f"{PREFIX}{module}lora_B.weight"] = (rows, R * E), "float32"
    return found


def whys(config: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], str]]) -> list[str]:
    """The name of the last module, or the reason, for each A."""
    found = with_states(Components(None, {}, (), config=config), tensors).states[::2]
    return [one.why_uncut(1) or one.name.rpartition(".")[2] for one in found]


def test_equal_sizes_are_told_by_the_other_pairs_of_a_file() -> None:
    """Older files of PEFT have A of (experts · rank, out) and B of (in, rank · experts)."""
    half, outer = CONFIG | {"hidden_size": 2 * INNER}, "base_layer."
    square, down, turned = (2 * INNER, 2 * INNER), (2 * INNER, INNER), (INNER, 2 * INNER)
    assert whys(half, pairs({"": square, outer: down})) == ["gate_up_proj", "down_proj"]
    for tensors in (pairs({"": square}), pairs({"": square, outer: turned})):
        assert "nothing says whether PEFT has exchanged in and out" in whys(half, tensors)[0]
    assert "it is of 8 x 16" in whys(half, pairs({"": square, outer: turned}))[1]
    whole = CONFIG | {"hidden_size": INNER}
    assert whys(whole, pairs({"": (INNER, INNER), outer: (2 * INNER, INNER)})) == ["down_proj", "gate_up_proj"]
    assert "nothing says whether" in whys(whole, pairs({"": (INNER, INNER)}))[0]
    assert whys(whole | {"model_type": "gpt_oss"}, pairs({"": (INNER, INNER)})) == ["down_proj"]


@pytest.mark.parametrize("ep", [False, True])
def test_pairs_of_equal_sizes_follow_their_experts_alone(ep: bool) -> None:
    """Which dim is in, and which out, makes no difference where ranks hold whole experts."""
    config, tensors = CONFIG | {"hidden_size": 2 * INNER}, pairs({"": (2 * INNER, 2 * INNER)})
    found = with_states(Components(None, {}, (), config=config), tensors)
    for _, cut in followers(found, vllm(config, tp=2, expert_parallel=ep)).values():
        if ep:
            assert isinstance(cut, sw.Partition)
            assert sorted(cut.holder_shape(1)) == sorted((E * R // 2, 2 * INNER))
        else:
            assert "nothing says whether PEFT has exchanged in and out" in str(cut)


def test_an_expert_with_a_number_is_a_weight_of_its_own() -> None:
    name = f"{PREFIX}0"
    tensors = {f"{name}.lora_A.weight": ((E, 10), "float32"), f"{name}.lora_B.weight": ((6, E), "float32")}
    layouts = sw.LayoutMap(mesh(2))
    layouts[r"experts\.\d+\.weight$"] = ("tp", None)
    cut = followers(with_states(Components(None, {}, (), config=CONFIG), tensors), layouts)
    assert [layout.axes for _, layout in cut.values()] == [(None, None), ("tp", None)]  # type: ignore[union-attr]


def test_a_named_weight_of_other_sizes_is_refused() -> None:
    assert whys(CONFIG, pairs({"gate_up_proj.": (2 * INNER, HIDDEN)})) == ["gate_up_proj"]
    for sizes, said in (((9, 7), "it is of 9 x 7"), ((HIDDEN, INNER), "but gate_up_proj of an expert has other dims")):
        assert said in whys(CONFIG, pairs({"gate_up_proj.": sizes}))[0]


def test_stacks_of_another_number_of_experts_are_refused() -> None:
    for count, said in (
        (E, "gate_up_proj"),
        (E + 1, f"of {E + 1} experts, and the model has {E}"),
    ):
        sizes: dict[str, tuple[int, ...]] = {"A": (count, 2, HIDDEN), "B": (count, 2 * INNER, 2)}
        tensors = {f"{PREFIX}gate_up_proj.lora_{x}.weight": (shape, "float32") for x, shape in sizes.items()}
        assert said in whys(CONFIG, tensors)[0]


@pytest.mark.parametrize(("kind", "is_turned"), [("qwen3_vl_moe_text", True), ("qwen3_moe", False)])
def test_deployments_cut_stacks_in_the_order_of_their_dims(kind: str, is_turned: bool) -> None:
    """Qwen3-VL-MoE stores (experts, in, out); a stack of the other order is refused by its sizes."""
    stacks = {"gate_up_proj": (E, 2 * INNER, HIDDEN), "down_proj": (E, HIDDEN, INNER)}
    placed = vllm(CONFIG | {"model_type": kind}, tp=2)
    for last, (_, rows, columns) in stacks.items():
        name, shape, other = f"model.layers.0.mlp.experts.{last}", (E, rows, columns), (E, columns, rows)
        stored, not_stored = (other, shape) if is_turned else (shape, other)
        cut = {"gate_up_proj": 2 if is_turned else 1, "down_proj": 1 if is_turned else 2}[last]
        pieces = placed.partition(name, stored).pieces(1)
        half = INNER // 2
        starts = [half, INNER + half] if last == "gate_up_proj" else [half]
        expected = [
            tuple(slice(at, at + half) if dim == cut else slice(0, n) for dim, n in enumerate(stored)) for at in starts
        ]
        assert sorted((one.box for one in pieces), key=str) == sorted(expected, key=str)
        with pytest.raises(sw.LayoutError, match="parts add up to"):
            placed.partition(name, not_stored)
    with pytest.raises(sw.LayoutError, match="no rule matches"):
        vllm(CONFIG | {"model_type": "gpt_oss"}, tp=2).partition(
            "model.layers.0.mlp.experts.down_proj", (E, INNER, HIDDEN)
        )
