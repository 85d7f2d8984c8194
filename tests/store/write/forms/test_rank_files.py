"""Files for ranks: each has what one device holds, in its own shapes, also what other devices hold as well."""

from __future__ import annotations

import glob
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import shardwise as sw
from shardwise.cli import main
from shardwise.deploy import Deployment, DeploymentRule, vllm
from shardwise.store.data.parts import MARK, PIECES
from shardwise.store.formats.ranks import open_names
from shardwise.store.write.forms.rank_files import FileRanks, rank_name

from ....oracle.families.models import digest, numbered, read
from ...stores import Store
from ...tasks import forge, unpacked

#: Expected of many of these tests, which are about something else.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*match(es)? no rule:shardwise.ShardwiseWarning"),
    pytest.mark.filterwarnings("ignore:no rule that applies uses the axis:shardwise.ShardwiseWarning"),
    pytest.mark.filterwarnings("ignore:.*appl(y|ies) to no name:shardwise.ShardwiseWarning"),
]

MESH = sw.DeviceMesh((2, 4), ("data", "model"))
RNG = np.random.default_rng(5)
TENSORS: dict[str, Any] = {
    "qkv": RNG.normal(size=(20, 6)).astype("f4"),
    "c_attn": RNG.normal(size=(5, 24)).astype("f2"),
    "experts": RNG.normal(size=(3, 8, 2)).astype("f4"),
    "rows": RNG.normal(size=(9, 3)).astype("f4"),
    "words": RNG.integers(0, 99, (10, 3)).astype("i4"),
    "norm": np.arange(7.0),
    "scalar": np.array(3.0, "f4"),
    "none": np.zeros((0, 4), "f4"),
}


def layouts(mesh: sw.DeviceMesh = MESH) -> sw.LayoutMap:
    found = sw.LayoutMap(mesh)
    found["qkv"] = (sw.packed.qkv(8, 1, 2, "model"), None)
    found["c_attn"] = (None, sw.packed.gate_up("model"))
    found["experts"] = (None, sw.packed.gate_up("model"), "data" if "data" in mesh.axis_names else None)
    found["rows"] = ("model", None)
    found["words"] = (sw.packed.parse("(n@model/pad4)"), None)
    return found


def held(rank: int) -> dict[str, Any]:
    """What a rank of `MESH` holds, by hand."""
    data, model = divmod(rank, 4)
    qkv, both, experts = TENSORS["qkv"], TENSORS["c_attn"], TENSORS["experts"]
    own = slice(3 * model, 3 * model + 3)
    return {
        # 8 heads of 2 rows; one head of keys and one of values, which all have.
        "qkv": np.concatenate([qkv[4 * model : 4 * model + 4], qkv[16:18], qkv[18:20]]),
        "c_attn": np.concatenate([both[:, own], both[:, 12:][:, own]], axis=1),
        "experts": np.stack([experts[:, model], experts[:, 4 + model]], axis=1)[:, :, data : data + 1],
        "rows": TENSORS["rows"][own],  # 3, 3, 3 and none
        "words": np.concatenate([TENSORS["words"], np.zeros((2, 3), "i4")])[own],  # padded to 12
        "norm": TENSORS["norm"],
        "scalar": TENSORS["scalar"],
        "none": TENSORS["none"],
    }


def source(folder: Path) -> Path:
    sw.save_checkpoint(folder / "model.safetensors", TENSORS, sync=False)
    return folder / "model.safetensors"


def made(folder: Path, name: str = "ranks", **more: Any) -> Path:
    path = source(folder) if not (folder / "model.safetensors").exists() else folder / "model.safetensors"
    sw.reshard_checkpoint(path, folder / name, layouts(), to="ranks", uneven="ceil", sync=False, **more)
    return folder / name


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_each_file_has_what_its_device_holds(tmp_path: Path) -> None:
    done = sw.reshard_checkpoint(source(tmp_path), tmp_path / "ranks", layouts(), to="ranks", uneven="ceil")
    said = json.loads((tmp_path / "ranks" / "ranks.json").read_text())
    assert said["mesh"] == {"data": 2, "model": 4}
    assert said["ranks"][5] == {
        "rank": 5,
        "device": "cpu:5",
        "coordinates": {"data": 1, "model": 1},
        "file": "rank-00005-data-1-model-1.safetensors",
        "bytes": (tmp_path / "ranks" / "rank-00005-data-1-model-1.safetensors").stat().st_size,
    }
    report = layouts().report({name: (value.shape, value.dtype) for name, value in TENSORS.items()}, uneven="ceil")
    for rank, row in enumerate(said["ranks"]):
        found, expected = load_file(tmp_path / "ranks" / row["file"]), held(rank)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].shape == value.shape
            assert found[name].tobytes() == value.tobytes(), (rank, name)
        assert sum(value.nbytes for value in found.values()) == report.to_dict()["device_bytes"][rank]
    # Every byte is read once, however many devices hold it.
    assert done.bytes_read == sum(value.nbytes for value in TENSORS.values())
    assert done.bytes_written > 2 * done.bytes_read


def test_they_are_read_back_and_merged(tmp_path: Path) -> None:
    folder = made(tmp_path)
    with sw.open_checkpoint(folder) as checkpoint:
        assert checkpoint.format == "ranks"
        assert len(checkpoint["norm"].replicas) == 7
        for name, value in TENSORS.items():
            assert checkpoint.read(name).tobytes() == value.tobytes()
            assert checkpoint[name].shape == value.shape
    assert sw.diff_checkpoints(tmp_path / "model.safetensors", folder) == []
    assert sw.verify_checkpoint(folder).digests == len(TENSORS)
    sw.reshard_checkpoint(folder, tmp_path / "merged.safetensors")
    assert (tmp_path / "merged.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    four = sw.DeviceMesh((4,), ("model",))
    sw.reshard_checkpoint(folder, tmp_path / "four", layouts(four), to="sharded", uneven="ceil")
    assert sw.diff_checkpoints(folder, tmp_path / "four") == []


def test_damage_is_found_in_any_replica(tmp_path: Path) -> None:
    folder = made(tmp_path)
    file = folder / "rank-00006-data-1-model-2.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    with pytest.raises(sw.ParseError, match=r"replicas disagree.*rank-00006"):
        sw.reshard_checkpoint(folder, tmp_path / "merged.safetensors")
    file.write_bytes(data[:-8])
    with pytest.raises(sw.ParseError, match="truncated"):
        sw.open_checkpoint(folder)
    file.unlink()
    with pytest.raises(sw.ParseError, match=r"rank-00006-data-1-model-2\.safetensors', which is missing"):
        sw.open_checkpoint(folder)
    (folder / "shardwise.json").unlink()
    with pytest.raises(sw.ParseError, match=r"no shardwise\.json, which is written last"):
        sw.open_checkpoint(folder)


@pytest.mark.parametrize("rank", range(8))
def test_one_file_alone_has_the_same_bytes(tmp_path: Path, rank: int) -> None:
    folder = made(tmp_path)
    alone = tmp_path / "alone.safetensors"
    sw.reshard_checkpoint(
        tmp_path / "model.safetensors", alone, layouts(), to="ranks", uneven="ceil", rank=rank, sync=False
    )
    name = json.loads((folder / "ranks.json").read_text())["ranks"][rank]["file"]
    assert alone.read_bytes() == (folder / name).read_bytes()
    with pytest.raises(sw.ParseError, match="one of 8 files"):
        sw.open_checkpoint(alone)
    with sw.open_checkpoint(alone, part=True) as checkpoint:
        assert checkpoint.read("qkv").tobytes() == held(rank)["qkv"].tobytes()


@pytest.mark.heavy
def test_stores_and_parts_of_plans_give_the_same_bytes(tmp_path: Path, memory: Store) -> None:
    folder = made(tmp_path)
    there: Any = memory.place("ranks")
    sw.reshard_checkpoint(tmp_path / "model.safetensors", there, layouts(), to="ranks", uneven="ceil")
    assert memory.objects(there) == contents(folder)
    with sw.open_checkpoint(there) as checkpoint:
        assert checkpoint.read("c_attn").tobytes() == TENSORS["c_attn"].tobytes()
    plan = sw.plan_checkpoint(
        tmp_path / "model.safetensors", tmp_path / "planned", layouts(), to="ranks", uneven="ceil"
    )
    plan.save(tmp_path / "ranks.swplan")
    for part in (2, 1):
        sw.CheckpointPlan.load(tmp_path / "ranks.swplan").run((part, 2))
    sw.CheckpointPlan.load(tmp_path / "ranks.swplan").commit(check=True)
    assert contents(tmp_path / "planned") == contents(folder)
    shown: list[tuple[int, int]] = []
    made(tmp_path, "shown", progress=lambda *done: shown.append(done))
    assert shown[-1][0] == shown[-1][1] > sum(value.nbytes for value in TENSORS.values())


def test_large_arrays_take_several_tasks_and_parts(tmp_path: Path, memory: Store) -> None:
    wide = np.arange(48 * 8 * 512, dtype="i4").reshape(48, 8 * 512)
    path = sw.save_checkpoint(tmp_path / "wide.safetensors", {"w": wide}, sync=False).path
    rules = sw.LayoutMap(sw.DeviceMesh((2, 2), ("d", "m")))
    rules["w"] = (None, sw.packed.parse("a:(1024@m) + b:(2048@m) + c:(1024@m/max1)"))
    for target in (tmp_path / "new", memory.place("new")):
        sw.reshard_checkpoint(path, target, rules, to="ranks", task_bytes=2**17, memory=2**23)
        for rank in range(4):
            m = rank % 2
            with sw.open_checkpoint(target / f"rank-{rank:05}-d-{rank // 2}-m-{m}.safetensors", part=True) as one:
                a, b, c = wide[:, :1024], wide[:, 1024:3072], wide[:, 3072:]
                parts = a[:, 512 * m :][:, :512], b[:, 1024 * m :][:, :1024], c
                assert np.array_equal(one.read("w"), np.concatenate(parts, axis=1))
        assert sw.diff_checkpoints(path, target) == []


@pytest.mark.heavy
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_layout(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """A file is what `distribute_tensor` gives its device, and together they are the tensor."""
    folder = tmp_path_factory.mktemp("any")
    mesh = sw.DeviceMesh((2, 3), ("x", "y"))
    packs = ["(n@x)", "a:(4@y) + b:(n@y)", "a:(n@x/ceil) + b:(3@y/max1)", "(2 n@y/chunk)", "(n@y/pad8)"]
    entry = st.one_of(st.sampled_from([None, "x", "y", ("x", "y"), ("y", "x")]), st.sampled_from(packs))
    size = st.integers(0, 9).map(lambda n: 4 + 2 * n)
    shape = tuple(data.draw(size) for _ in range(data.draw(st.integers(1, 3))))
    entries = [data.draw(entry) for _ in shape]
    axes = [sw.packed.parse(each) if isinstance(each, str) and len(each) > 1 else each for each in entries]
    value = np.arange(np.prod(shape), dtype="i4").reshape(shape)
    try:
        layout = sw.TensorLayout(tuple(axes), mesh)
        sharded = sw.distribute_tensor(value, layout, "ceil")
    except (sw.LayoutError, sw.MeshError):
        return
    sw.save_checkpoint(folder / "a.safetensors", {"w": value}, sync=False)
    sw.reshard_checkpoint(folder / "a.safetensors", folder / "r", {"w": layout}, to="ranks", uneven="ceil", sync=False)
    for rank, row in enumerate(json.loads((folder / "r" / "ranks.json").read_text())["ranks"]):
        found = load_file(folder / "r" / row["file"])["w"]
        assert np.array_equal(found, sharded.shard(f"cpu:{rank}"))
    with sw.open_checkpoint(folder / "r") as checkpoint:
        assert np.array_equal(checkpoint.read("w"), value)


def test_a_file_of_a_deployment_has_its_stage_only(tmp_path: Path) -> None:
    meshes = {"dense": sw.DeviceMesh((2, 2, 2), ("pp", "dp", "tp")), "expert": sw.DeviceMesh((2, 4), ("pp", "ep"))}
    deployment = Deployment(
        8,
        meshes,
        {
            r"h\.{i}\.w": DeploymentRule(("tp", None), "dense", {"pp": "i // 2"}),
            r"h\.{i}\.e\.{e}": DeploymentRule((None, None), "expert", {"pp": "i // 2", "ep": "e"}),
        },
    )
    tensors = {f"h.{i}.w": RNG.normal(size=(4, 3)) for i in range(4)}
    tensors |= {f"h.{i}.e.{e}": RNG.normal(size=(2, 3)) for i in range(4) for e in range(4)}
    sw.save_checkpoint(tmp_path / "m.safetensors", tensors)
    sw.reshard_checkpoint(tmp_path / "m.safetensors", tmp_path / "ranks", deployment, to="ranks")
    said = json.loads((tmp_path / "ranks" / "ranks.json").read_text())
    assert said["ranks"][6]["coordinates"] == {"dense": {"pp": 1, "dp": 1, "tp": 0}, "expert": {"pp": 1, "ep": 2}}
    found = load_file(tmp_path / "ranks" / "rank-00006-pp-1-dp-1-tp-0.safetensors")
    assert found.keys() == {"h.2.w", "h.3.w", "h.2.e.2", "h.3.e.2"}
    assert np.array_equal(found["h.3.w"], tensors["h.3.w"][:2])
    assert sw.diff_checkpoints(tmp_path / "m.safetensors", tmp_path / "ranks") == []


MODELS = ["llama-1", "llama-tied-0", "gpt-oss-0", "mixtral-0", "falcon-7b-1", "gpt2-0"]


@pytest.mark.heavy
@pytest.mark.parametrize("model", MODELS)
def test_what_the_engines_sharded_loaders_read(tmp_path: Path, model: str) -> None:
    """The files of a rank, found by the loaders' pattern, are the state dict that vLLM gives the rank.

    Of tied tensors that share memory the loaders look for the first by name (`_filter_subtensors`).
    """
    said = read(model)
    rules = sw.example_rules()[f"vllm/{model.rpartition('-')[0].removesuffix('-tied')}"]
    config = tmp_path / "hf" / "config.json"
    # As floating-point values: integers are no weights of a model that is not quantized.
    tensors = {name: value.view(np.float32) for name, value in numbered(said["tensors"]).items()}
    sw.save_checkpoint(tmp_path / "hf", tensors, sync=False)
    config.write_text(json.dumps(said["config"]))
    for count, ranks in said["engines"]["vllm"]["ranks"].items():
        if "refused" in ranks:
            continue
        target = tmp_path / f"vllm-{count}"
        command = ["reshard", str(tmp_path / "hf"), str(target), "--to", "vllm", "--rules", str(rules), "--no-sync"]
        assert main([*command, "--mesh", f"tp={count}", "--quiet"]) == 0
        assert (target / "config.json").exists()
        for rank, expected in enumerate(ranks):
            state = dict(expected)
            if said["config"].get("tie_word_embeddings") or model.startswith(("falcon", "gpt2")):
                embedding = next(name for name in state if "embed" in name or "wte" in name)
                state["lm_head.weight"] = state.pop(embedding)
            for path in glob.glob(str(target / f"model-rank-{rank}-part-*.safetensors")):  # noqa: PTH207
                for name, value in load_file(path).items():
                    assert [list(value.shape), digest(value.view(np.int32))] == state.pop(name), (name, rank, count)
            assert state == {}
        back = tmp_path / f"back-{count}"
        rewrites = sw.Rewrites.from_toml(rules, config=said["config"])
        sw.reshard_checkpoint(target, back, rewrites=rewrites.inverse(), sync=False)
        assert all(one.name == "lm_head.weight" for one in sw.diff_checkpoints(tmp_path / "hf", back))


@pytest.mark.parametrize(("name", "tied"), [("w", False), ("wte.weight", True), ("word_embeddings.weight", True)])
def test_only_an_embedding_is_tied_with_an_output_layer(tmp_path: Path, name: str, tied: bool) -> None:
    source, target = tmp_path / "hf.safetensors", tmp_path / "vllm"
    sw.save_checkpoint(source, {name: np.ones((4, 2), np.float32)}, sync=False)
    rules = sw.LayoutMap(sw.DeviceMesh((2,), ("tp",)))
    rules["w"] = ("tp", None)  # for lm_head.weight too
    sw.reshard_checkpoint(source, target, rules, to="vllm", sync=False)
    names = {name for path in target.glob("*.safetensors") for name in load_file(path)}
    assert names == ({"lm_head.weight"} if tied else {name})


def test_names_of_the_pipelines_ranks(tmp_path: Path) -> None:
    path = source(tmp_path)
    mesh = sw.DeviceMesh((2, 4), ("pp", "model"))
    rules: Any = layouts(mesh)
    # Each stage would have all of it.
    with pytest.raises(
        sw.LayoutError, match=r"the mesh has 2 stages \(pp\), but no layout says which layers each stage has"
    ):
        sw.reshard_checkpoint(path, tmp_path / "no", rules, to="vllm", uneven="ceil")
    # What the refusal advises: one tensor is on the first stage, as are none of the others.
    placed = {key: DeploymentRule(rule.axes, at={"pp": 1}) for key, rule in rules.items()}
    placed["rows"] = DeploymentRule(("model", None), at={"pp": 0})
    placed |= {"norm": DeploymentRule((None,), at={"pp": 1}), "scalar": DeploymentRule((), at={"pp": 1})}
    placed["none"] = DeploymentRule((None, None), at={"pp": 1})
    stages = Deployment(8, mesh, placed)
    sw.reshard_checkpoint(path, tmp_path / "vllm", stages, to="vllm", uneven="ceil", max_file_bytes=300)
    names = sorted(name for name in contents(tmp_path / "vllm") if name.startswith("model-pp-1-tp-2"))
    assert names == [f"model-pp-1-tp-2-part-{part}.safetensors" for part in range(2)]  # of 296 and 100 bytes
    first = sorted(name for name in contents(tmp_path / "vllm") if name.startswith("model-pp-0-tp-2"))
    assert [list(load_file(tmp_path / "vllm" / name)) for name in first] == [["rows"]]
    assert sw.diff_checkpoints(path, tmp_path / "vllm") == []
    with pytest.raises(sw.LayoutError, match=r"the mesh has the axes data, model; the loaders of vLLM and SGLang"):
        sw.reshard_checkpoint(path, tmp_path / "no", layouts(), to="vllm", uneven="ceil")


@pytest.mark.parametrize(
    "names",
    [
        ["h.0.self_attn.q_proj.weight", "h.0.self_attn.k_proj.weight", "h.0.self_attn.v_proj.weight"],
        ["h.0.mlp.up_proj.weight", "h.0.mlp.gate_proj.weight"],
        ["h.0.attention.self.query.bias", "h.0.attention.self.key.bias", "h.0.attention.self.value.bias"],
        ["h.0.mlp.experts.3.w2.weight"],
    ],
)
def test_names_that_the_engines_do_not_have(tmp_path: Path, names: list[str]) -> None:
    rules = sw.LayoutMap(sw.DeviceMesh((2,), ("tp",)), default="replicated")
    tensors = dict.fromkeys(names, np.ones(4))
    with pytest.raises(
        sw.LayoutError, match=f"do not take the tensor '{re.escape(sorted(names)[0][:8])}.*`shardwise rules`"
    ):
        sw.save_checkpoint(tmp_path / "a", tensors, rules, to="vllm")
    sw.save_checkpoint(tmp_path / "a", tensors, rules, to="ranks", sync=False)  # As the refusal says.
    # Half of it is none of the engine's own either.
    for alone in names:
        with pytest.raises(sw.LayoutError, match=f"do not take the tensor '{re.escape(alone)}'"):
            sw.save_checkpoint(tmp_path / "b", {alone: np.ones(4), "h.0.norm.weight": np.ones(4)}, rules, to="vllm")


@pytest.mark.parametrize(
    "names",
    [
        ["h.0.self_attn.q_proj.weight", "h.0.self_attn.kv_a_proj_with_mqa.weight"],  # DeepSeek-V2-Lite.
        ["h.0.mlp.up_proj.weight", "h.0.mlp.down_proj.weight"],  # Nemotron, which has no gate.
        ["h.0.mlp.experts.w2_weight"],
    ],
)
def test_names_that_the_engines_have_alone(tmp_path: Path, names: list[str]) -> None:
    rules = sw.LayoutMap(sw.DeviceMesh((2,), ("tp",)), default="replicated")
    sw.save_checkpoint(tmp_path / "a", dict.fromkeys(names, np.ones(4)), rules, to="vllm", sync=False)
    for name in names[:-1]:  # In another layer it is beside none of these.
        tensors = {name.replace("h.0", "h.1"): np.ones(4), names[1]: np.ones(4)}
        with pytest.raises(sw.LayoutError, match=r"do not take the tensor 'h\.1"):
            sw.save_checkpoint(tmp_path / "b", tensors, rules, to="vllm")


def test_linear_layers_of_gpt2_are_turned_round_for_the_engines(tmp_path: Path) -> None:
    """transformers has them as (inputs, outputs); vLLM, under the same names, as (outputs, inputs)."""
    config = {"model_type": "gpt2", "n_head": 2, "n_embd": 4}
    shapes = {"attn.c_attn": (4, 12), "attn.c_proj": (4, 4), "mlp.c_fc": (4, 16), "mlp.c_proj": (16, 4)}
    for name, shape in shapes.items():
        path = tmp_path / name
        sw.save_checkpoint(path, {f"h.0.{name}.weight": np.ones(shape, "f4")}, to="hf", sync=False)
        rules = sw.LayoutMap.from_toml("hf/gpt2", sw.DeviceMesh((2,), ("tp",)), config=config)
        with pytest.raises(sw.LayoutError, match=rf"take 'h\.0\.{name}\.weight' as \(outputs, inputs\).*vllm/llama"):
            sw.reshard_checkpoint(path, tmp_path / "no", rules, to="vllm")
        sw.reshard_checkpoint(path, tmp_path / f"{name}-ranks", rules, to="ranks", sync=False)
        own = sw.LayoutMap(sw.DeviceMesh((2,), ("tp",)))
        own["c_"] = (None, "tp") if "c_proj" in name else ("tp", None)
        sw.reshard_checkpoint(path, tmp_path / f"{name}-out", own, to="vllm", sync=False)


def test_deployments_and_rules_of_other_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`deploy.vllm` is for Hugging Face's names; `hf/llama` too; the rules that the refusals name are carried out."""
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 8,
              "num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 12, "head_dim": 2}  # fmt: skip
    tensors = {"model.embed_tokens.weight": (64, 8), "lm_head.weight": (64, 8), "model.norm.weight": (8,)}
    for i in range(2):
        layer = f"model.layers.{i}."
        tensors |= {f"{layer}self_attn.{x}_proj.weight": (8 if x in "qo" else 4, 8) for x in "qkvo"}
        tensors |= {f"{layer}mlp.{x}_proj.weight": (8, 12) if x == "down" else (12, 8) for x in ("gate", "up", "down")}
        tensors |= {f"{layer}{x}_layernorm.weight": (8,) for x in ("input", "post_attention")}
    model = {name: np.ones(shape, "f4") for name, shape in tensors.items()}
    sw.save_checkpoint(tmp_path / "hf", model, to="hf", sync=False)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    for stages in (1, 2):
        with pytest.raises(sw.LayoutError, match=r"do not take the tensor 'model\.layers\.0\.mlp\.gate_proj\.weight'"):
            sw.reshard_checkpoint(tmp_path / "hf", tmp_path / "no", vllm(config, tp=2, pp=stages), to="vllm")
    command = ["reshard", str(tmp_path / "hf"), str(tmp_path / "out"), "--to", "vllm", "--no-sync", "--mesh"]
    assert main([*command, "tp=2", "--rules", "hf/llama"]) == 2
    said = capsys.readouterr().err
    assert "--rules hf/llama has other names for the tensors" in said
    assert "--rules vllm/llama, or" in said
    assert main([*command, "pp=2,tp=2", "--rules", "vllm/llama"]) == 2
    assert "leave pp out of the mesh" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*command, "tp=2", "--rules", "vllm/llama", "--strict"]) == 0
    assert "model.layers.0.self_attn.qkv_proj.weight" in load_file(tmp_path / "out" / "model-rank-1-part-0.safetensors")


def test_a_rank_is_not_looked_for_among_all_others() -> None:
    class Label(str):
        __hash__ = str.__hash__
        compared = 0

        def __eq__(self, other: object) -> bool:
            Label.compared += 1
            return str.__eq__(self, other)

    mesh = sw.DeviceMesh((8, 8), ("dp", "tp"), tuple(Label(f"gpu:{number}") for number in range(64)))
    ranks = FileRanks(mesh.labels(), {"mesh": mesh})
    assert rank_name(ranks, 63) == "rank-00063-dp-7-tp-7.safetensors"
    Label.compared = 0
    assert ranks.coordinates(62) == {"mesh": {"dp": 7, "tp": 6}}
    assert Label.compared < 8


def test_what_is_refused(tmp_path: Path) -> None:
    path = source(tmp_path)
    rules = layouts()
    with pytest.raises(sw.LayoutError, match="files for ranks need layouts with a mesh"):
        sw.reshard_checkpoint(path, tmp_path / "no", to="ranks")
    with pytest.raises(sw.LayoutError, match="rank is 8; the layouts have the ranks 0 to 7"):
        sw.reshard_checkpoint(path, tmp_path / "no", rules, to="ranks", uneven="ceil", rank=8)
    with pytest.raises(sw.LayoutError, match="rank is 1, but 'hf' has no files for ranks"):
        sw.reshard_checkpoint(path, tmp_path / "no", rules, to="hf", uneven="ceil", rank=1)
    for wrong in ("1", 1.0, True):
        with pytest.raises(TypeError, match="rank must be an integer, got"):
            sw.reshard_checkpoint(path, tmp_path / "no", rules, to="ranks", uneven="ceil", rank=wrong)  # type: ignore[arg-type]
    two = {"rows": sw.TensorLayout(("x", None), sw.DeviceMesh((3,), ("x",)))}
    two["qkv"] = sw.TensorLayout(("x", None), sw.DeviceMesh((2,), ("x",)))
    with pytest.raises(sw.LayoutError, match="the layouts have 2 meshes"):
        sw.reshard_checkpoint(path, tmp_path / "no", two, to="ranks")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"shape": [20, 6], "pieces": [[0, 0, 40, 6, 0, 0]]}, "not within the tensor"),
        ({"shape": [20, 6], "pieces": [[0, 0, 8, 6, 4, 0]]}, "not within the tensor"),
        ({"shape": [20, 6], "pieces": [[4, 0, 2, 6, 0, 0]]}, "not within the tensor"),
        (
            {"shape": [20, 6], "pieces": [[0, 0, 8, 6, 0, 0], [8, 0, 16, 6, 0, 0]]},
            "more elements than the file's array",
        ),
        ({"shape": [20], "pieces": [[0, 8, 0]]}, "its whole shape is"),
        ({"shape": [20, 6], "pieces": [[0, 0, 8]]}, "each must be 6 sizes"),
        ({"shape": [20, -6], "pieces": []}, "its whole shape is"),
        ({"shape": [2**62, 2**62], "pieces": []}, r"qkv"),
        ([], "its whole shape is"),
    ],
)
def test_what_headers_say_is_a_claim(tmp_path: Path, said: Any, message: str) -> None:
    folder = tmp_path / "forged"
    folder.mkdir()
    pieces = {PIECES: json.dumps({"qkv": said}), MARK: '{"files":1}'}
    save_file({"qkv": np.zeros((8, 6), "f4")}, folder / "rank-00000.safetensors", metadata=pieces)
    size = (folder / "rank-00000.safetensors").stat().st_size
    manifest = {"format": "shardwise", "version": 1, "form": "ranks", "aliases": {}, "tensors": {"qkv": {}}}
    (folder / "shardwise.json").write_text(json.dumps(manifest | {"files": {"rank-00000.safetensors": {"size": size}}}))
    with pytest.raises(sw.ShardwiseError, match=message):
        sw.open_checkpoint(folder)


@pytest.mark.parametrize(
    ("whole", "own", "piece", "is_refused"),
    [
        ([2, 2], [2, 4], [0, 0, 2, 2, 0, 2], False),
        ([2, 2], [2, 4], [0, 0, 2, 2, 0, 1], True),  # It begins in the middle of a byte.
        ([2, 4], [2, 5], [0, 0, 2, 4, 0, 0], True),  # So does the second row.
        ([2, 3], [2, 5], [0, 0, 2, 3, 0, 0], True),  # Rows share bytes in the tensor, and others in the array.
    ],
)
def test_pieces_of_packed_elements_begin_with_a_byte(
    tmp_path: Path, whole: list[int], own: list[int], piece: list[int], is_refused: bool
) -> None:
    pieces = {PIECES: json.dumps({"w": {"shape": whole, "pieces": [piece]}}), MARK: '{"files":1}'}
    size = math.prod(own) // 2
    entry = {"dtype": "F4", "shape": own, "data_offsets": [0, size]}
    text = json.dumps({"__metadata__": pieces, "w": entry}).encode()
    (tmp_path / "one.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(size)))
    if is_refused:
        with pytest.raises(sw.ParseError, match="begins within a byte"):
            open_names(tmp_path, ["one.safetensors"], "ranks")
    else:
        with open_names(tmp_path, ["one.safetensors"], "ranks") as checkpoint:
            # The third and fourth of the four elements of each row: the second byte of two.
            assert checkpoint["w"].packed_bytes().read().tolist() == [[1], [3]]


def test_a_tensor_without_elements_may_have_no_pieces(tmp_path: Path) -> None:
    pieces = {PIECES: '{"w": {"shape": [0, 4], "pieces": []}}', MARK: '{"files":1}'}
    save_file({"w": np.zeros((0, 4), "f4")}, tmp_path / "one.safetensors", metadata=pieces)
    with open_names(tmp_path, ["one.safetensors"], "ranks") as checkpoint:
        assert checkpoint.read("w").shape == (0, 4)


def test_the_command_writes_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sw.save_checkpoint(tmp_path / "model.safetensors", {"w": np.arange(8.0), "b": np.ones(3)})
    (tmp_path / "rules.toml").write_text('[rules]\n"w" = ["x"]\n')
    common = ["--rules", str(tmp_path / "rules.toml"), "--mesh", "x=4", "--quiet"]
    source, alone = str(tmp_path / "model.safetensors"), tmp_path / "alone.safetensors"
    assert main(["extract", source, str(alone), "--rank", "2", *common]) == 0
    assert "2 tensors" in capsys.readouterr().out
    assert main(["reshard", source, str(tmp_path / "ranks"), "--to", "ranks", *common]) == 0
    assert alone.read_bytes() == (tmp_path / "ranks" / "rank-00002-x-2.safetensors").read_bytes()
    assert load_file(alone)["w"].tolist() == [4.0, 5.0]
    assert main(["extract", source, str(tmp_path / "no"), "--rank", "4", *common]) == 2
    assert "rank is 4; the layouts have the ranks 0 to 3" in capsys.readouterr().err


def test_the_file_of_one_rank_brings_nothing_along(tmp_path: Path) -> None:
    """It is one file: what lies beside the tensors of a model's folder has no place in it, and the report says none."""
    sw.save_checkpoint(tmp_path / "model", {"w": np.arange(8.0)}, to="hf")
    (tmp_path / "model" / "config.json").write_text("{}")
    layouts = {"w": sw.TensorLayout(("x",), sw.DeviceMesh((2,), ("x",)))}
    out = tmp_path / "out"
    out.mkdir()
    report = sw.reshard_checkpoint(tmp_path / "model", out / "one.safetensors", layouts, to="ranks", rank=1)
    assert isinstance(report, sw.store.WriteReport)
    assert report.companions == ()
    assert [path.name for path in out.iterdir()] == ["one.safetensors"]
    all_of_them = sw.reshard_checkpoint(tmp_path / "model", tmp_path / "all", layouts, to="ranks")
    assert isinstance(all_of_them, sw.store.WriteReport)
    assert all_of_them.companions == ("config.json",)


class Counting:
    """A section, and how often it was asked."""

    def __init__(self, held: Any) -> None:
        self.held, self.nbytes, self.count = held, held.nbytes, 0

    def read(self, begin: int, end: int) -> bytes:
        self.count += 1
        found: bytes = self.held.read(begin, end)
        return found


@pytest.mark.parametrize("place", ["disk", "store"])
def test_boxes_that_several_ranks_hold_are_told_once_for_all_files(tmp_path: Path, place: str, memory: Store) -> None:
    """Each box counts once: in the first file that has it. What tells that is kept, and asks for no tensor's boxes."""
    sw.save_checkpoint(tmp_path / "a.safetensors", TENSORS)
    target: Any = tmp_path / "b" if place == "disk" else memory.place("new")
    plan = sw.plan_checkpoint(tmp_path / "a.safetensors", target, layouts(), to="ranks", uneven="balanced")
    seen: set[tuple[int, Any]] = set()
    expected = []
    for file in plan.files:
        filled = [(slot.tensor, slot.box) for slot in file.slots if slot.end > slot.begin]
        again = []
        for at, box in enumerate(filled):
            if box in seen:
                again.append(at)
            seen.add(box)
        expected.append(frozenset(again))
    assert sum(map(len, expected)) > 0
    targets = Counting(plan.sections["targets"])
    plan.sections = {**plan.sections, "targets": targets}
    assert [plan.repeated_in(number) for number in range(len(plan.files))] == expected
    assert targets.count == 0


def test_a_plan_file_that_counts_a_box_twice_or_never_is_refused(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "a.safetensors", TENSORS)
    plan = sw.plan_checkpoint(tmp_path / "a.safetensors", tmp_path / "b", layouts(), to="ranks", uneven="balanced")
    plan.save(tmp_path / "b.swplan")
    head, sections = unpacked(tmp_path / "b.swplan")
    again = sections["again"]
    forge(tmp_path / "b.swplan", head, sections)
    sw.CheckpointPlan.load(tmp_path / "b.swplan").check()
    at = again.index(1)
    for wrong in (again[:at] + b"\0" + again[at + 1 :], b"\1" + again[1:], again[:-1], again + b"\0", b""):
        forge(tmp_path / "b.swplan", head, {**sections, "again": wrong})
        with pytest.raises(sw.ParseError, match="does not repeat the boxes that it says it repeats"):
            sw.CheckpointPlan.load(tmp_path / "b.swplan")
