"""Checkpoints written, cut anew, verified and compared; killed, torn, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.store.write.request import spool

from ...checks import same_tensors

DATA = Path(__file__).parents[2] / "data" / "checkpoints"
MESH = sw.DeviceMesh((2, 4), ("data", "model"))


def tensors() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(7)
    return {
        "wte": rng.standard_normal((48, 16)).astype("f4"),
        "h.0.w": rng.standard_normal((16, 48)).astype("f4"),
        "h.0.b": np.arange(48, dtype="i8"),
        "scalar": np.array(3.5),
        "none": np.zeros((0, 4), "f2"),
        "flags": np.array([True, False, True]),
        "deep": rng.integers(0, 99, (1, 2, 1, 3, 2, 1, 2, 2)).astype("u1"),
        "complex": np.array([1 + 2j, 3], "c8"),
    }


def rules() -> sw.LayoutMap:
    layout_map = sw.LayoutMap(MESH)
    layout_map["wte"] = (("model", "data"), None)
    layout_map[r"\.w$"] = ("data", "model")
    layout_map[r"\.b$"] = ("model",)
    return layout_map


def test_there_and_back_in_every_form(tmp_path: Path) -> None:
    whole = tensors()
    sw.save_checkpoint(tmp_path / "a.safetensors", whole)
    sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / "b", rules())
    sw.reshard_checkpoint(tmp_path / "b", tmp_path / "c", to="hf", max_file_bytes=3000)
    sw.reshard_checkpoint(tmp_path / "c", tmp_path / "d.safetensors")
    sw.reshard_checkpoint(tmp_path / "d.safetensors", tmp_path / "e", rules(), to="dcp")
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


def test_the_safetensors_package_reads_what_is_written(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    whole = {name: value for name, value in tensors().items() if name != "complex"}
    sw.save_checkpoint(tmp_path / "a.safetensors", whole)
    loaded = safetensors.load_file(tmp_path / "a.safetensors")
    assert {name: value.tobytes() for name, value in loaded.items()} == {n: v.tobytes() for n, v in whole.items()}
    sharded = sw.distribute_tensor(whole["wte"], sw.TensorLayout((None, "model"), MESH))
    sw.save_checkpoint(tmp_path / "s", {"wte": sharded})
    files = sorted((tmp_path / "s").glob("*.safetensors"))
    columns = [safetensors.load_file(file)["wte"] for file in files]
    assert np.array_equal(np.concatenate(columns, axis=1), whole["wte"])


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


def test_strided_views_are_written_right(tmp_path: Path) -> None:
    base = np.arange(60).reshape(6, 10)
    views = {
        "columns": base[:, 3:5],
        "stepped": base[::2],
        "transposed": base.T,
        "reversed": base[::-1, ::-1],
        "repeated": np.broadcast_to(np.float32(2), (3, 4)),
        "big": base.astype(">i8"),
    }
    sw.save_checkpoint(tmp_path / "a.safetensors", views)
    expected = {name: np.ascontiguousarray(view).astype(view.dtype.newbyteorder("<")) for name, view in views.items()}
    same_tensors(tmp_path / "a.safetensors", expected)


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
    sw.save_checkpoint(tmp_path / "a.safetensors", tensors())
    renamed: list[tuple[str, str]] = [(r"^h\.(\d+)", r"layers.\1")]
    sw.reshard_checkpoint(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", rename=renamed, only="layers|flags", dtype="float16"
    )
    whole = tensors()
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
    sw.save_checkpoint(source, tensors())
    with pytest.raises(FileExistsError):
        sw.save_checkpoint(source, tensors())
    with pytest.raises(FileExistsError, match="dst is the source"):
        sw.reshard_checkpoint(source, source)
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


def test_a_flipped_bit_a_missing_and_a_swapped_file_are_found(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "s", tensors(), rules())
    files = sorted((tmp_path / "s").glob("*.safetensors"))
    data = files[1].read_bytes()
    files[1].write_bytes(data[:-3] + bytes([data[-3] ^ 4]) + data[-2:])
    with pytest.raises(sw.ParseError, match="is not what was written"):
        sw.verify_checkpoint(tmp_path / "s")
    files[1].write_bytes(data[:-1])
    with pytest.raises(sw.ParseError, match=r"bytes"):
        sw.open_checkpoint(tmp_path / "s")
    files[-1].rename(tmp_path / "elsewhere")
    with pytest.raises(sw.ParseError):
        sw.open_checkpoint(tmp_path / "s")


def test_a_checkpoint_that_differs_is_told_apart(tmp_path: Path) -> None:
    whole = tensors()
    sw.save_checkpoint(tmp_path / "a.safetensors", whole)
    changed = {**whole, "h.0.w": whole["h.0.w"].copy(), "flags": whole["flags"].astype("u1"), "new": np.zeros(1)}
    changed["h.0.w"][3, 5] += 1
    changed["h.0.w"][9, 0] += 1
    del changed["scalar"]
    sw.save_checkpoint(tmp_path / "b", changed, rules())
    found = {one.name: one for one in sw.diff_checkpoints(tmp_path / "a.safetensors", tmp_path / "b")}
    assert {name: one.what for name, one in found.items()} == {
        "h.0.w": "values",
        "flags": "dtype",
        "new": "missing",
        "scalar": "added",
    }
    assert (found["h.0.w"].index, found["h.0.w"].count) == ((3, 5), 2)


def test_replicas_that_disagree_are_named(tmp_path: Path) -> None:
    layout = sw.TensorLayout(("data", None), sw.DeviceMesh((2, 2), ("data", "rest")))
    value = np.arange(12.0).reshape(4, 3)
    shards = [np.array(shard.data) for shard in sw.distribute_tensor(value, layout).shards]
    shards[1][0, 2] = -1
    drifted = sw.ShardedArray(layout.partition((4, 3)), shards)
    with pytest.raises(sw.LayoutError, match="cpu:1"):
        sw.save_checkpoint(tmp_path / "a", {"w": drifted})
    assert list(tmp_path.iterdir()) == []
    sw.save_checkpoint(tmp_path / "a", {"w": drifted}, check=False)
    same_tensors(tmp_path / "a", {"w": value})


@pytest.mark.parametrize("to", ["safetensors", "hf", "sharded", "dcp"])
def test_a_checkpoint_of_no_tensors_is_opened_again(tmp_path: Path, to: Any) -> None:
    made = tmp_path / ("none.safetensors" if to == "safetensors" else "none")
    sw.save_checkpoint(made, {}, to=to)
    sw.reshard_checkpoint(made, tmp_path / "again", to="sharded")
    for path in (made, tmp_path / "again"):
        with sw.open_checkpoint(path) as checkpoint:
            assert list(checkpoint) == []
    sw.verify_checkpoint(tmp_path / "again")
    assert not sw.diff_checkpoints(made, tmp_path / "again")


def test_a_manifest_alone_names_the_file_that_is_missing(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "cut", {"w": np.zeros(2)}, to="sharded")
    for file in (tmp_path / "cut").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(sw.ParseError, match=r"names the file 'shard-.*, which is missing"):
        sw.open_checkpoint(tmp_path / "cut")


@pytest.mark.parametrize("wrong", [3, "rules", [("w", None)], np.zeros(2)])
def test_layouts_of_the_wrong_type(tmp_path: Path, wrong: Any) -> None:
    sw.save_checkpoint(tmp_path / "w.safetensors", {"w": np.zeros(2)})
    for layouts, said in (
        (wrong, "layouts must be a LayoutMap, a Deployment or a mapping"),
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


@pytest.mark.parametrize(
    ("most", "expected"),
    [(10**6, [["a", "b", "c"]]), (48, [["a", "b", "c"]]), (47, [["a", "b"], ["c"]]), (32, [["a", "b"], ["c"]]),
     (31, [["a"], ["b"], ["c"]]), (16, [["a"], ["b"], ["c"]]), (np.int64(1), [["a"], ["b"], ["c"]])],
)  # fmt: skip
def test_files_of_at_most_so_many_bytes(tmp_path: Path, most: int, expected: list[list[str]]) -> None:
    """Three tensors of 16 bytes; one that is larger than a file may be has its own."""
    sw.save_checkpoint(tmp_path / "made", {name: np.ones(2) for name in "abc"}, to="hf", max_file_bytes=most)
    files = sorted((tmp_path / "made").glob("*.safetensors"))
    assert [sorted(safetensors.numpy.load_file(file)) for file in files] == expected


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [(n, sw.LayoutError, f"max_file_bytes is {n}; it must be a positive integer") for n in (0, -1, np.int8(0))]
    + [(what, TypeError, f"max_file_bytes must be an integer, got {what!r}") for what in (True, 1.5, "9", None)],
)
def test_files_of_no_bytes(tmp_path: Path, wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sw.save_checkpoint(tmp_path / "made", {"a": np.ones(2)}, to="hf", max_file_bytes=wrong)
    assert not list(tmp_path.iterdir())


def test_the_header_of_a_shard_is_that_of_pytorch(tmp_path: Path) -> None:
    """As `HuggingFaceStorageWriter` has it, and of what it is a part; the rest is in the manifest alone."""
    sw.save_checkpoint(tmp_path / "made", {"h.0.b": np.arange(8.0)}, rules(), metadata={"note": "x"})
    for rank, file in enumerate(sorted((tmp_path / "made").glob("*.safetensors"))):
        with safetensors.safe_open(file, "np") as opened:
            info = json.dumps({"h.0.b": {"saved_offsets": [2 * rank]}})
            said = {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0", "format": "pt", "note": "x"}
            said["shardwise.part"] = json.dumps({"files": 4, "shapes": {"h.0.b": [8]}}, separators=(",", ":"))
            assert opened.metadata() == said


def test_flat_parameters_are_saved(tmp_path: Path) -> None:
    """Ranges of the flattened tensor, as FSDP1 and ZeRO hold them, also with something between the elements."""
    value = np.arange(35.0).reshape(5, 7)
    ranges = {"a": (0, 11), "b": (11, 12), "c": (12, 12), "d": (12, 30), "e": (30, 35)}
    tiling = sw.Tiling.from_flat_ranges((5, 7), ranges)
    for step in (1, 3):
        shards = [np.repeat(value.reshape(-1)[start:stop], step)[::step] for start, stop in ranges.values()]
        path = tmp_path / f"{step}.safetensors"
        sw.save_checkpoint(path, {"w": sw.ShardedArray(tiling, shards), "b": np.ones(1)})
        same_tensors(path, {"w": value, "b": np.ones(1)})


def test_ties_in_a_header_that_are_none_are_left_out(tmp_path: Path) -> None:
    file, value = tmp_path / "m.safetensors", {"w": np.ones(2), "b": np.zeros(3)}
    for said, tied in (
        ('{"t": "w"}', {"t": "w"}), ('{"t": "gone"}', {}), ('{"w": "b"}', {}), ('{"t": 5, "u": "b"}', {"u": "b"}),
        ("{", {}), ("[1]", {}), ("[" * 10**5, {}),
    ):  # fmt: skip
        safetensors.numpy.save_file(value, file, {"shardwise.aliases": said})
        same_tensors(file, {**value, **{alias: value[name] for alias, name in tied.items()}})
        with sw.open_checkpoint(file) as checkpoint:
            assert {name: checkpoint[name].alias_of for name in checkpoint if checkpoint[name].alias_of} == tied


def test_a_comparison_reads_what_can_be_equal(tmp_path: Path) -> None:
    both, big = np.arange(6.0), np.ones(1000)
    sw.save_checkpoint(tmp_path / "a.safetensors", {"both": both, "only": big, "dtype": big, "shape": big})
    other = {"both": both + 1, "dtype": big.astype("f4"), "shape": big.reshape(10, 100), "new": big}
    sw.save_checkpoint(tmp_path / "b.safetensors", other)
    read: list[tuple[int, int]] = []
    found = sw.diff_checkpoints(
        tmp_path / "a.safetensors",
        tmp_path / "b.safetensors",
        progress=lambda done, total: read.append((done, total)),
    )
    assert [(each.name, each.what) for each in found] == [
        ("both", "values"),
        ("dtype", "dtype"),
        ("new", "missing"),
        ("only", "added"),
        ("shape", "shape"),
    ]
    assert {total for _, total in read} == {both.nbytes}


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are converted wait in files beside the new checkpoint, which a run that is killed leaves there."""
    sw.save_checkpoint(tmp_path / "a.safetensors", {"w": np.arange(6, dtype="f4")})

    def made(name: str) -> set[str]:
        sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / name, dtype="float64")
        same_tensors(tmp_path / name, {"w": np.arange(6.0)})
        return {path.name for path in tmp_path.iterdir() if path.name.startswith(".")}

    with monkeypatch.context() as patch:
        patch.setattr(spool.Spool, "close", lambda self: None)
        (left,) = made("b.safetensors")
    (tmp_path / "b.safetensors").unlink()
    assert made("c.safetensors") == {left}  # It is another checkpoint's.
    assert made("b.safetensors") == set()


@pytest.mark.heavy
@pytest.mark.parametrize("to", ["hf", "sharded", "dcp"])
def test_a_flipped_bit_anywhere_in_the_manifest_is_found(tmp_path: Path, to: Any) -> None:
    """Also in what speaks of no tensor's bytes: names of axes, how a tensor is cut, the digest itself."""
    rules = sw.LayoutMap(sw.DeviceMesh((2,), ("x",)))
    rules["w"] = ("x", None)
    cut = {} if to == "hf" else {"layouts": rules}
    sw.save_checkpoint(tmp_path / "s", {"w": np.arange(8.0).reshape(4, 2)}, to=to, sync=False, **cut)  # type: ignore[arg-type]
    sw.verify_checkpoint(tmp_path / "s")
    path = tmp_path / "s" / "shardwise.json"
    text = path.read_bytes()
    assert json.loads(text)["format"] == "shardwise"
    for at in range(0, len(text), 3):
        path.write_bytes(text[:at] + bytes([text[at] ^ 1 << at % 7]) + text[at + 1 :])
        with pytest.raises(sw.ParseError):
            sw.verify_checkpoint(tmp_path / "s")
    path.write_bytes(text)
    sw.verify_checkpoint(tmp_path / "s")


@pytest.mark.parametrize("to", ["safetensors", "hf", "sharded", "dcp"])
def test_a_name_that_no_reader_here_takes_is_not_written(to: Any, tmp_path: Path) -> None:
    values = np.arange(4, dtype="float32")
    longest, path = "é" * 2048, tmp_path / ("made.safetensors" if to == "safetensors" else "made")
    with pytest.raises(sw.LayoutError, match="4097 bytes; a name that can be read has at most 4096") as caught:
        sw.save_checkpoint(path, {longest + "a": values}, to=to)
    assert len(str(caught.value)) < 1000
    assert list(tmp_path.iterdir()) == []
    sw.save_checkpoint(path, {longest: values}, to=to)
    with sw.open_checkpoint(path) as checkpoint:
        assert checkpoint[longest].read().tolist() == values.tolist()


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127, "n" * 231, "n" * 230])
def test_names_may_be_as_long_as_the_file_system_allows(name: str, tmp_path: Path) -> None:
    saved, again = tmp_path / name, tmp_path / f"{name[:-1]}m"
    sw.save_checkpoint(saved, {"a": np.arange(4.0)})
    sw.reshard_checkpoint(saved, again)
    with sw.open_checkpoint(again) as stored:
        assert stored.read("a").tolist() == [0, 1, 2, 3]
    assert {path.name for path in tmp_path.iterdir()} == {saved.name, again.name}
