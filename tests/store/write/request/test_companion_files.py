"""What lies beside the tensors of a Hugging Face folder goes along; what is not a tensor is not dropped silently."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import shardwise as sw
from shardwise.store.data.location import read_unlinked
from tests.store.stores import Store

from ...torch_files import Dcp, ones, save, tensor

#: These tests are about what is said so, in the reports and in other ways.
pytestmark = pytest.mark.filterwarnings("ignore::shardwise.ShardwiseWarning")

BESIDE = {
    "config.json": b'{"a": 1}',
    "tokenizer.json": b"{}",
    "merges.txt": b"a b\n",
    "LICENSE": b"free",
    "model.py": b"",
}


def source(folder: Path) -> Path:
    sw.save_checkpoint(folder, {"a": np.arange(8.0), "b": np.arange(9.0)}, to="hf", max_file_bytes=70, sync=False)
    for name, data in BESIDE.items():
        (folder / name).write_bytes(data)
    return folder


def others(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name in BESIDE}


def test_they_go_along(tmp_path: Path) -> None:
    src = source(tmp_path / "src")
    (src / "runs").mkdir()
    (src / "runs" / "config.json").write_text("no")
    (src / ".env").write_text("secret")
    (src / "big.bin").write_bytes(b"x")
    report = sw.reshard_checkpoint(src, tmp_path / "new", to="hf")
    assert isinstance(report, sw.store.WriteReport)
    assert report.companions == tuple(sorted(BESIDE))
    assert others(tmp_path / "new") == BESIDE
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(
        [*BESIDE, "model.safetensors", "shardwise.json"]
    )
    assert sw.verify_checkpoint(tmp_path / "new").digests == 2
    (tmp_path / "new" / "config.json").write_text("{}")
    with pytest.raises(sw.ParseError, match=r"config\.json"):
        sw.verify_checkpoint(tmp_path / "new")
    # By its index, from a saved plan, and in parts.
    plan = sw.plan_checkpoint(src / "model.safetensors.index.json", tmp_path / "parts", to="hf")
    plan.save(tmp_path / "p.swplan")
    plan = sw.CheckpointPlan.load(tmp_path / "p.swplan")
    plan.run()
    assert plan.commit().companions == tuple(sorted(BESIDE))
    assert others(tmp_path / "parts") == BESIDE
    # Of one file nothing is known to belong to it, and other formats have no such files.
    sw.reshard_checkpoint(src, tmp_path / "one.safetensors")
    (tmp_path / "config.json").write_text('{"of": "something else"}')
    for given, to in ((tmp_path / "one.safetensors", "hf"), (src, "dcp"), (src, "sharded")):
        report = sw.reshard_checkpoint(given, tmp_path / to, to=to)  # type: ignore[arg-type]
        assert report.companions == ()
        assert others(tmp_path / to) == {}


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="nothing lists the open descriptors")
def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """It has become one since the names were listed, say."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert read_unlinked(tmp_path, 100) is None
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_links_and_large_files_stay_and_are_named(tmp_path: Path) -> None:
    src = source(tmp_path / "src")
    (tmp_path / "secret.json").write_text("secret")
    (src / "linked.json").symlink_to(tmp_path / "secret.json")
    with (src / "large.json").open("wb") as file:
        file.truncate(2**26 + 1)
    (src / "second.json").hardlink_to(tmp_path / "secret.json")
    if hasattr(os, "mkfifo"):
        os.mkfifo(src / "fifo.json")
    report = sw.reshard_checkpoint(src, tmp_path / "new", to="hf")
    assert others(tmp_path / "new") == BESIDE
    assert not {path.name for path in (tmp_path / "new").iterdir()} & {
        "linked.json", "large.json", "fifo.json", "second.json",
    }  # fmt: skip
    said = " ".join(report.warnings)
    assert "'linked.json' is not copied along: it is a link" in said
    assert "'large.json' is not copied along" in said
    assert "'second.json' is not copied along: it is a link, has a second name" in said
    assert said.count("; copy it yourself") == 3 + hasattr(os, "mkfifo")
    for name in ("linked.json", "large.json", "second.json"):
        shutil.copyfile(src / name, tmp_path / "new" / name)
    assert {path.name for path in (tmp_path / "new").iterdir()} >= {"linked.json", "large.json", "second.json"}
    assert (tmp_path / "new" / "linked.json").read_text() == "secret"
    assert sw.verify_checkpoint(tmp_path / "new").damaged == ()
    assert sw.diff_checkpoints(src, tmp_path / "new") == []


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\xfe", b"key = value"])
def test_a_configuration_of_something_else_stops_no_single_file(tmp_path: Path, text: bytes) -> None:
    """Of a model's folder it must be read, since scales of quantized weights are cut by what it says."""
    sw.save_checkpoint(tmp_path / "one.safetensors", {"a": np.arange(8.0)}, sync=False)
    Dcp().write(tmp_path / "dcp")
    (tmp_path / "hf").mkdir()
    sw.save_checkpoint(tmp_path / "hf" / "model.safetensors", {"a": np.arange(8.0)}, sync=False)
    for folder in ("", "dcp", "hf"):
        (tmp_path / folder / "config.json").write_bytes(text)
    for source in ("one.safetensors", "dcp"):
        report = sw.reshard_checkpoint(tmp_path / source, tmp_path / f"new {source}", to="hf", sync=False)
        assert isinstance(report, sw.store.WriteReport)
        (warning,) = report.warnings
        assert "config.json" in warning
        assert "it is left out" in warning
        assert sw.diff_checkpoints(tmp_path / source, tmp_path / f"new {source}") == []
    with pytest.raises(sw.LayoutError, match="left out"):
        sw.reshard_checkpoint(tmp_path / "one.safetensors", tmp_path / "strict", to="hf", strict=True)
    with pytest.raises(sw.ParseError, match=r"config\.json"):
        sw.reshard_checkpoint(tmp_path / "hf", tmp_path / "new", to="hf")
    assert not (tmp_path / "new").exists()


def test_of_hugging_faces_cache_the_blobs_go_along(tmp_path: Path) -> None:
    """A snapshot holds links to blobs, as `huggingface_hub` makes them; any other link stays."""
    plain = source(tmp_path / "plain")
    (plain / "shardwise.json").unlink()
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir()
    for path in plain.iterdir():
        blob = hashlib.sha256(path.read_bytes()).hexdigest()[: 64 if path.suffix == ".safetensors" else 40]
        path.rename(blobs / blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
    secret = tmp_path / "secret.json"
    secret.write_text("secret")
    (blobs / ("d" * 40)).symlink_to(secret)
    (snapshot / "a.json").symlink_to("../../blobs/" + "d" * 40)
    (snapshot / "b.json").symlink_to("../../../../secret.json")
    (snapshot / "c.json").symlink_to("../../blobs/../../../secret.json")
    (snapshot / "d.json").symlink_to("../../blobs/" + "e" * 40)
    for number, given in enumerate((snapshot, snapshot / "model.safetensors.index.json")):
        report = sw.reshard_checkpoint(given, tmp_path / f"new{number}", to="hf")
        assert isinstance(report, sw.store.WriteReport)
        assert report.companions == tuple(sorted(BESIDE))
        assert others(tmp_path / f"new{number}") == BESIDE
        assert not any(path.is_symlink() for path in (tmp_path / f"new{number}").iterdir())
        assert [warning.partition(" is ")[0] for warning in report.warnings] == [
            "'a.json'",
            "'b.json'",
            "'c.json'",
            "'d.json'",
        ]
    # Blobs that are elsewhere are not this model's.
    blobs.rename(tmp_path / "others")
    blobs.symlink_to(tmp_path / "others")
    report = sw.reshard_checkpoint(snapshot, tmp_path / "of others", to="hf")
    assert isinstance(report, sw.store.WriteReport)
    assert report.companions == ()
    blobs.unlink()
    (tmp_path / "others").rename(blobs)
    # The same links elsewhere are any links.
    elsewhere = tmp_path / "hub" / "models--org--name" / "copies" / "x"
    snapshot.parent.rename(elsewhere.parent)
    (elsewhere.parent / ("c" * 40)).rename(elsewhere)
    report = sw.reshard_checkpoint(elsewhere, tmp_path / "new", to="hf")
    assert isinstance(report, sw.store.WriteReport)
    assert report.companions == ()


def test_they_replace_nothing_of_the_plan(tmp_path: Path) -> None:
    src = source(tmp_path / "src")
    (src / "shardwise.json").unlink()
    (src / "other.index.json").write_text("{}")
    sw.reshard_checkpoint(src, tmp_path / "new", to="hf", max_file_bytes=70)
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert "other.index.json" not in names
    assert json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())["weight_map"].keys() == {
        "a",
        "b",
    }
    assert sw.diff_checkpoints(src, tmp_path / "new") == []


def test_in_a_store(store: Store, tmp_path: Path) -> None:
    src = source(tmp_path / "src")
    place = store.place("new")
    report = sw.reshard_checkpoint(src, place, to="hf")
    assert report.companions == tuple(sorted(BESIDE))
    assert {name: store.objects(place)[name] for name in BESIDE} == BESIDE
    sw.reshard_checkpoint(place, tmp_path / "back", to="hf")
    assert others(tmp_path / "back") == BESIDE


def test_values_that_a_format_has_no_place_for_are_named(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(save({"w": tensor(ones(4), "0"), "step": 7, "lr": 0.5, "args": {"a": "b"}}))
    report = sw.reshard_checkpoint(tmp_path / "m.pt", tmp_path / "new", to="hf")
    assert [(each.kind, each.names) for each in report.left_out] == [("values", ("step", "lr", "args.a"))]
    (text,) = report.warnings
    begins, advice = text.split("; ")
    assert begins == "3 values are not written, because 'hf' has no place for them: 'step', 'lr', 'args.a'"
    asked = advice.removeprefix("drop='").removesuffix("' says that this is wanted")
    assert sw.reshard_checkpoint(tmp_path / "m.pt", tmp_path / "asked", to="hf", drop=asked, strict=True).tensors == 1
    made = Dcp()
    made.add("w", (4,), [((0,), ones(4))])
    made.add_object("step", 7)
    folder = made.write(tmp_path / "dcp")
    report = sw.reshard_checkpoint(folder, tmp_path / "one.safetensors")
    assert [(each.kind, each.names) for each in report.left_out] == [("values", ("step",))]
    plan = sw.plan_checkpoint(folder, tmp_path / "two", to="hf")
    assert plan.warnings == (
        "1 value is not written, because 'hf' has no place for it: 'step'; drop='^(step)$' says that this is wanted",
    )
    report = sw.reshard_checkpoint(folder, tmp_path / "kept", to="dcp")
    assert report.left_out == () == report.warnings
    # What was not asked for is named, and nobody is warned of it.
    report = sw.reshard_checkpoint(folder, tmp_path / "w.safetensors", only="^w$", strict=True)
    assert [(each.kind, each.names) for each in report.left_out] == [("asked", ("step",))]
    report = sw.reshard_checkpoint(folder, tmp_path / "v.safetensors", drop="^step$", strict=True)
    assert [(each.kind, each.names) for each in report.left_out] == [("asked", ("step",))]


FP8 = {"model_type": "x", "quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}


@pytest.mark.parametrize("form", ["hf", "ranks", "vllm"])
def test_a_given_configuration_goes_along(tmp_path: Path, form: Any) -> None:
    """From a source that has none, and in place of the one that it has; byte for byte."""
    text = b'{"model_type":  "my_own",\n "rope": 1e400, "a": 1}'
    (tmp_path / "given.json").write_bytes(text)
    layouts = {"a": sw.TensorLayout(("x",), sw.DeviceMesh((2,), ("x",)))}
    sw.reshard_checkpoint(source(tmp_path / "hf"), tmp_path / "dcp", layouts, to="dcp")
    for name in ("hf", "dcp"):
        new = tmp_path / f"{name} new"
        report = sw.reshard_checkpoint(
            tmp_path / name,
            new,
            layouts,
            to=form,
            config=tmp_path / "given.json",
        )
        assert (new / "config.json").read_bytes() == text
        assert "config.json" in report.companions
        assert len(report.companions) == (len(BESIDE) if name == "hf" else 1)
    sw.reshard_checkpoint(tmp_path / "dcp", tmp_path / "from a mapping", to="hf", config={"model_type": "gpt2"})
    assert json.loads((tmp_path / "from a mapping" / "config.json").read_text()) == {"model_type": "gpt2"}
    sw.reshard_checkpoint(tmp_path / "dcp", tmp_path / "again", layouts, to="dcp", config=tmp_path / "given.json")
    assert not (tmp_path / "again" / "config.json").exists()


def test_a_given_configuration_that_is_none(tmp_path: Path) -> None:
    src = source(tmp_path / "hf")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(sw.ParseError, match=r"list\.json' is not a model's configuration"):
        sw.reshard_checkpoint(src, tmp_path / "new", config=tmp_path / "list.json")
    with pytest.raises(FileNotFoundError, match=r"no\.json"):
        sw.reshard_checkpoint(src, tmp_path / "new", config=tmp_path / "no.json")
    assert not (tmp_path / "new").exists()


def test_a_given_configuration_says_how_weights_are_quantized(tmp_path: Path) -> None:
    """A distributed checkpoint has no configuration: without one, a scale is a tensor that no rule names."""
    tensors = {
        "down.weight": np.arange(64, dtype=np.uint8).reshape(8, 8).view("u1").astype(ml_dtypes.float8_e4m3fn),
        "down.weight_scale_inv": np.arange(4, dtype="f4").reshape(2, 2),
    }
    sw.save_checkpoint(tmp_path / "dcp", tensors, to="dcp")
    rules = sw.LayoutMap(sw.DeviceMesh((2,), ("tp",)))
    rules[r"down\.weight$"] = (None, "tp")
    sw.reshard_checkpoint(tmp_path / "dcp", tmp_path / "ranks", rules, to="ranks", strict=True, config=FP8)
    with sw.open_checkpoint(tmp_path / "ranks") as checkpoint:
        assert [piece.box for piece in checkpoint["down.weight_scale_inv"].pieces] == [
            (slice(0, 2), slice(0, 1)), (slice(0, 2), slice(1, 2)),
        ]  # fmt: skip
    plain = sw.reshard_checkpoint(tmp_path / "dcp", tmp_path / "plain", rules, to="ranks")
    assert "down.weight_scale_inv" in plain.warnings[0]


def test_a_given_configuration_of_a_quantized_model_for_one_that_is_not(tmp_path: Path) -> None:
    """As a trainer in BF16 leaves it, whose rules take their numbers from the quantized model's configuration."""
    sw.save_checkpoint(tmp_path / "dcp", {"down.weight": np.ones((8, 8), "f4")}, to="dcp")
    report = sw.reshard_checkpoint(tmp_path / "dcp", tmp_path / "new", to="hf", config=FP8)
    assert report.warnings == (
        "config says that weights are quantized by 'fp8', but none is; loaders will look for their scales: remove its "
        "quantization_config",
    )
    with pytest.raises(sw.LayoutError, match="quantization_config"):
        sw.reshard_checkpoint(tmp_path / "dcp", tmp_path / "other", to="hf", config=FP8, strict=True)
