"""Checkpoints cut anew: there and back, in every form, under other names, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from tests.store.stores import Store
from tests.store.tasks import MESH, mixed, mixed_rules

from ....checks import same_tensors
from ....oracle import engines

#: Expected of many of these tests, which are about something else.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*match(es)? no rule:shardwise.ShardwiseWarning"),
    pytest.mark.filterwarnings("ignore:.*not written,:shardwise.ShardwiseWarning"),
    pytest.mark.filterwarnings("ignore:.*not compared:shardwise.ShardwiseWarning"),
]

DATA = Path(__file__).parents[3] / "data" / "checkpoints"


def test_there_and_back_in_every_form(tmp_path: Path) -> None:
    whole = mixed()
    sw.save_checkpoint(tmp_path / "a.safetensors", whole)
    sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / "b", mixed_rules())
    sw.reshard_checkpoint(tmp_path / "b", tmp_path / "c", to="hf", max_file_bytes=3000)
    sw.reshard_checkpoint(tmp_path / "c", tmp_path / "d.safetensors")
    sw.reshard_checkpoint(tmp_path / "d.safetensors", tmp_path / "e", mixed_rules(), to="dcp")
    sw.reshard_checkpoint(tmp_path / "e", tmp_path / "f", to="hf")
    names = ["a.safetensors", "b", "c", "d.safetensors", "e", "f"]
    for name in names:
        same_tensors(tmp_path / name, whole)
        assert sw.verify_checkpoint(tmp_path / name).digests == len(whole)
        assert sw.diff_checkpoints(tmp_path / name, tmp_path / "a.safetensors") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    assert len(set(index["weight_map"].values())) > 1


@pytest.mark.heavy
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_layout_to_any_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("any")
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from(["u1", "i2", "f4", "c8"]))
    value = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    rule: Any = data.draw(st.sampled_from(["ceil", "chunk", "balanced"]))

    def layout() -> sw.TensorLayout:
        names = data.draw(st.permutations(["data", "model"]))
        axes: list[list[str]] = [[] for _ in shape]
        for name in names[: data.draw(st.integers(0, 2))]:
            axes[data.draw(st.integers(0, len(shape) - 1))].append(name)
        return sw.TensorLayout(tuple(map(tuple, axes)), MESH)

    order: Any = data.draw(st.sampled_from(["C", "F"]))
    first, second = data.draw(st.tuples(*[st.sampled_from(["sharded", "dcp"])] * 2))
    sw.save_checkpoint(folder / "a", {"x": np.asarray(value, order=order)}, {"x": layout()}, to=first, uneven=rule)
    sw.reshard_checkpoint(
        folder / "a", folder / "b", {"x": layout()}, to=second, uneven=rule, memory=1 << 16, sync=False
    )
    same_tensors(folder / "b", {"x": value})
    sw.verify_checkpoint(folder / "b")
    report = sw.reshard_checkpoint(folder / "b", folder / "c.safetensors", sync=False)
    same_tensors(folder / "c.safetensors", {"x": value})
    assert isinstance(report, sw.store.WriteReport)
    assert report.bytes_read <= max(1.05 * value.nbytes, value.nbytes + 64)


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    shared, other = np.arange(64.0).reshape(8, 8), np.arange(64.0).reshape(8, 8)
    sw.save_checkpoint(tmp_path / "a.safetensors", {"wte": shared, "head": shared, "other": other})
    sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / "b", {"wte": sw.TensorLayout((None, "model"), MESH)})
    sw.reshard_checkpoint(tmp_path / "b", tmp_path / "c", to="hf")
    sw.reshard_checkpoint(tmp_path / "b", tmp_path / "d", {"wte": sw.TensorLayout(("model", None), MESH)}, to="dcp")
    sw.reshard_checkpoint(tmp_path / "d", tmp_path / "e.safetensors")
    for name in ("a.safetensors", "b", "c", "d", "e.safetensors"):
        same_tensors(tmp_path / name, {"wte": shared, "head": shared, "other": other})
        with sw.open_checkpoint(tmp_path / name) as checkpoint:
            assert (checkpoint["head"].alias_of, checkpoint["other"].alias_of) == ("wte", None)
    assert (tmp_path / "a.safetensors").stat().st_size < 3 * shared.nbytes


@pytest.mark.parametrize("name", ["torch/dcp", "torch/dcp_safetensors", "torch/fsdp2", "torch/plain.pt", "megatron"])
@pytest.mark.parametrize("to", ["safetensors", "hf", "sharded", "dcp"])
def test_checkpoints_of_frameworks(tmp_path: Path, name: str, to: Any) -> None:
    source = DATA / name
    if not source.exists():
        pytest.skip(f"{name} is not among the test data")
    before = {path: path.read_bytes() for path in sorted(source.rglob("*")) if path.is_file()}
    sw.reshard_checkpoint(source, tmp_path / "made", to=to)
    assert sw.diff_checkpoints(source, tmp_path / "made") == []
    sw.verify_checkpoint(tmp_path / "made")
    assert before == {path: path.read_bytes() for path in sorted(source.rglob("*")) if path.is_file()}


def test_names_dtypes_and_choice(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "a.safetensors", mixed())
    renamed: list[tuple[str, str]] = [(r"^h\.(\d+)", r"layers.\1")]
    sw.reshard_checkpoint(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", rename=renamed, only="layers|flags", dtype="float16"
    )
    whole = mixed()
    same_tensors(
        tmp_path / "b.safetensors",
        {"layers.0.w": whole["h.0.w"].astype("f2"), "layers.0.b": whole["h.0.b"], "flags": whole["flags"]},
    )
    with pytest.raises(sw.LayoutError, match=r"rename gives 'h\.0\.w' and 'wte' the same name, 'x'"):
        sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / "c", rename=[("wte|h.0.w", "x")])
    with pytest.raises(sw.LayoutError, match="does not match any name"):
        sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / "c", only="nothing")
    for name in ("", "__metadata__"):
        with pytest.raises(sw.LayoutError, match=f"a tensor cannot be called '{name}'"):
            sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / "c", rename=[("^wte$", name)])
        with pytest.raises(sw.LayoutError, match=f"a tensor cannot be called '{name}'"):
            sw.save_checkpoint(tmp_path / "c", {name: np.ones(2)})
    with pytest.raises(TypeError, match="floating-point"):
        sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / "c", dtype="int8")
    assert not (tmp_path / "c").exists()


def test_what_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "a.safetensors"
    sw.save_checkpoint(source, mixed())
    with pytest.raises(FileNotFoundError, match="folder for the checkpoint does not exist"):
        sw.reshard_checkpoint(source, tmp_path / "no" / "where")
    with pytest.raises(sw.LayoutError, match="at least 16384"):
        sw.reshard_checkpoint(source, tmp_path / "b", memory=1000)
    with pytest.raises(sw.LayoutError, match="tensor 'flags': dim 0 has 3 elements"):
        sw.reshard_checkpoint(source, tmp_path / "b", {"flags": sw.TensorLayout(("model",), MESH)})
    with pytest.raises(TypeError, match="object"):
        sw.save_checkpoint(tmp_path / "b", {"x": np.array([None])})
    with pytest.raises(sw.LayoutError, match="to is 'zarr'"):
        sw.save_checkpoint(tmp_path / "b", {}, to="zarr")  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("wrong", [3, "rules", [("w", None)], np.zeros(2)])
def test_layouts_of_the_wrong_type(tmp_path: Path, wrong: Any) -> None:
    sw.save_checkpoint(tmp_path / "w.safetensors", {"w": np.zeros(2)})
    for layouts, said in (
        (wrong, "layouts must be a LayoutMap, a Deployment, a manifest or a mapping"),
        ({"w": wrong}, r"layouts\['w'\] must be a"),
    ):
        with pytest.raises(TypeError, match=said):
            sw.save_checkpoint(tmp_path / "cut", {"w": np.zeros(2)}, layouts, to="sharded")
        with pytest.raises(TypeError, match=said):
            sw.reshard_checkpoint(tmp_path / "w.safetensors", tmp_path / "cut", layouts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.safetensors"]


@pytest.mark.parametrize("wrong", [3, "a", b"a", ["a"], [None], [("a",)], [("a", 3)], {"a": 3}, [("a", "b", "c")]])
def test_renames_that_are_not_pairs(tmp_path: Path, wrong: Any) -> None:
    sw.save_checkpoint(tmp_path / "w.safetensors", {"w": np.zeros(2)})
    with pytest.raises(TypeError, match="rename"):
        sw.reshard_checkpoint(tmp_path / "w.safetensors", tmp_path / "new", rename=wrong)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A Llama in Hugging Face's names, with its configuration."""
    folder = tmp_path / "HF"
    sw.save_checkpoint(folder, engines.hugging_face("llama", 0), to="hf", sync=False)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **engines.config("llama")}))
    return folder


def test_rules_by_the_name_of_the_package_have_cuts_and_rewrites(llama: Path, tmp_path: Path) -> None:
    mesh = sw.DeviceMesh((2,), ("tp",))
    sw.reshard_checkpoint(llama, tmp_path / "vllm", rules="vllm/llama", mesh=mesh, to="ranks", sync=False)
    layouts, rewrites = sw.read_rules("vllm/llama", mesh, config=llama)
    sw.reshard_checkpoint(llama, tmp_path / "twice", layouts, rewrites=rewrites, to="ranks", sync=False)
    for rank in ("rank-00000-tp-0.safetensors", "rank-00001-tp-1.safetensors"):
        assert (tmp_path / "vllm" / rank).read_bytes() == (tmp_path / "twice" / rank).read_bytes()
    # And back: the rules that it was made by are undone, without any that cut.
    config = llama / "config.json"
    sw.reshard_checkpoint(
        tmp_path / "vllm", tmp_path / "back", source_rules="vllm/llama", config=config, to="hf", sync=False
    )
    assert sw.diff_checkpoints(llama, tmp_path / "back") == []


def test_rules_make_a_plan_too(llama: Path, tmp_path: Path) -> None:
    plan = sw.plan_checkpoint(
        llama, tmp_path / "out", rules="hf/llama", mesh=sw.DeviceMesh((2,), ("tp",)), to="sharded"
    )
    plan.run(sync=False)
    plan.commit(sync=False)
    assert sw.diff_checkpoints(llama, tmp_path / "out") == []


def test_rules_take_the_numbers_of_the_configuration_beside_a_source_that_is_given_by_url(
    llama: Path, tmp_path: Path, memory: Store
) -> None:
    mesh = sw.DeviceMesh((2,), ("tp",))
    stored = memory.place()
    memory.put(llama, stored)
    for name, source in (("path", llama), ("file", llama.as_uri()), ("store", stored)):
        sw.reshard_checkpoint(source, tmp_path / name, rules="vllm/llama", mesh=mesh, to="ranks", sync=False)
    for name in ("file", "store"):
        assert sw.diff_checkpoints(tmp_path / "path", tmp_path / name) == []
    stored.filesystem.pipe_file((stored / "config.json").key, b"{}")
    with pytest.raises(sw.LayoutError, match=r"'memory://\S+/model/config\.json' has no num_attention_heads"):
        sw.reshard_checkpoint(stored, tmp_path / "none", rules="vllm/llama", mesh=mesh, to="ranks")


def test_two_arguments_that_say_the_same_are_refused(llama: Path, tmp_path: Path) -> None:
    def refused(message: str, **asked: Any) -> None:
        with pytest.raises(sw.LayoutError, match=message):
            sw.reshard_checkpoint(llama, tmp_path / "out", **asked)
        assert not (tmp_path / "out").exists()

    mesh = sw.DeviceMesh((2,), ("tp",))
    layouts, rewrites = sw.read_rules("vllm/llama", mesh, config=llama)
    refused("layouts and rules are both given", rules="hf/llama", layouts=layouts)
    refused("rewrites and rules are both given", rules="hf/llama", rewrites=rewrites)
    refused("rewrites and source_rules are both given", source_rules="hf/llama", rewrites=rewrites)
    refused("mesh is missing, and hf/llama has no mesh of its own; the file's axis is called tp", rules="hf/llama")
    with pytest.raises(TypeError, match=r"^mesh must be a DeviceMesh or None, got dict"):
        sw.reshard_checkpoint(llama, tmp_path / "out", rules="hf/llama", mesh={"tp": 2})  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        sw.reshard_checkpoint(tmp_path / "none", tmp_path / "out", rules="hf/llama", mesh=mesh)
