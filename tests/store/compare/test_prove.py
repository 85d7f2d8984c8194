"""Proofs about checkpoints: what differs is what numpy finds, and what was changed by hand is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import shardwise as sw
from shardwise.store.data.engine import digest_array
from shardwise.store.formats.sharded import sealed
from tests.checks import refused

from ..conftest import encode

ROOT = Path(__file__).resolve().parents[3]
#: The least memory that the engine works with: rows of the tensors below are compared some at a time.
MEMORY = 16 * 2**10


@pytest.mark.parametrize("shape", [(), (7,), (50_000,), (101, 300), (37, 5, 61), (3, 40_000)])
@pytest.mark.parametrize("places", [[0], [-1], [0, -1], [0.3, 0.31, 0.9]])
def test_what_differs_is_what_numpy_finds(tmp_path: Path, shape: tuple[int, ...], places: list[float]) -> None:
    one = np.random.default_rng(0).standard_normal(shape)
    other = one.copy()
    for place in places:
        other.reshape(-1)[int(place * one.size) if place > 0 else int(place)] += 1
    sw.save_checkpoint(tmp_path / "a.safetensors", {"w": one, "same": one})
    sw.save_checkpoint(tmp_path / "b.safetensors", {"w": other, "same": one})
    (found,) = sw.diff_checkpoints(tmp_path / "a.safetensors", tmp_path / "b.safetensors", memory=MEMORY)
    differs = np.argwhere(one != other)
    index = tuple(differs[0].tolist())
    assert (found.name, found.what, found.index, found.count) == ("w", "values", index, len(differs))
    assert (found.first, found.second) == (one[index], other[index])
    count = "1 element differs" if len(differs) == 1 else f"{len(differs)} elements differ"
    said = f"'w': {count}, the first at {index}: {one[index]} and {other[index]}"
    assert str(found).partition(", in the rows ")[0] == said
    rows = sorted({row for row, *_ in differs.tolist()}) if one.ndim > 1 else []
    assert [row for start, stop in found.rows for row in range(start, stop)] == rows


def test_bits_that_numbers_do_not_tell_apart_differ(tmp_path: Path) -> None:
    nans = np.array([0x7FC00001, 0x7FC00002, 0], np.uint32).view(np.float32)
    sw.save_checkpoint(tmp_path / "a.safetensors", {"zero": np.array([1.0, 0.0]), "nan": nans})
    sw.save_checkpoint(tmp_path / "b.safetensors", {"zero": np.array([1.0, -0.0]), "nan": nans[[1, 1, 2]]})
    found = sw.diff_checkpoints(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert [(each.name, each.index, each.count) for each in found] == [("nan", (0,), 1), ("zero", (1,), 1)]


@pytest.mark.parametrize(("dtype", "bits"), [("F4", 4), ("F6_E2M3", 6)])
@pytest.mark.parametrize("places", [[], [0], [11_999], [3, 7777, 9001]])
def test_packed_elements_are_verified_and_compared(tmp_path: Path, dtype: str, bits: int, places: list[int]) -> None:
    """The first element in the lowest bits; several blocks."""
    shape = (120, 100)
    one = np.random.default_rng(0).integers(0, 1 << bits, 12_000).tolist()
    other = [value ^ 1 << bits - 1 if place in places else value for place, value in enumerate(one)]
    for name, values in (("a", one), ("b", other)):
        number = sum(value << bits * place for place, value in enumerate(values))
        data = number.to_bytes(12_000 * bits // 8, "little")
        said = {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}
        (tmp_path / f"{name}.safetensors").write_bytes(encode({"w": said}, data))
    assert sw.verify_checkpoint(tmp_path / "a.safetensors").bytes == 12_000 * bits // 8
    found = sw.diff_checkpoints(tmp_path / "a.safetensors", tmp_path / "b.safetensors", memory=MEMORY)
    expected = [(divmod(place, 100), one[place], other[place], len(places)) for place in places[:1]]
    assert [(each.index, each.first, each.second, each.count) for each in found] == expected


def test_differences_in_words(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "a.safetensors", {"d": np.zeros(2), "s": np.zeros((2, 1)), "a": np.zeros(1)})
    sw.save_checkpoint(tmp_path / "b.safetensors", {"d": np.zeros(2, "f4"), "s": np.zeros(2), "b": np.zeros(1)})
    assert [*map(str, sw.diff_checkpoints(tmp_path / "a.safetensors", tmp_path / "b.safetensors"))] == [
        "'a' is only in the first checkpoint",
        "'b' is only in the second checkpoint",
        "'d': dtype float64 and float32",
        "'s': shape (2, 1) and (2,)",
    ]


def test_what_is_verified_is_counted(tmp_path: Path) -> None:
    value = np.arange(5000.0)
    sw.save_checkpoint(tmp_path / "a.safetensors", {"w": value, "e": np.zeros((0, 2))})
    report = sw.verify_checkpoint(tmp_path / "a.safetensors", memory=MEMORY)
    totals = (sw.store.Total("weights", 2, value.nbytes),)
    path = tmp_path / "a.safetensors"
    assert report == sw.store.VerifyReport(path, "safetensors", 2, value.nbytes, 2, 0, totals=totals)
    safetensors.numpy.save_file({"w": value}, tmp_path / "theirs.safetensors")
    assert sw.verify_checkpoint(tmp_path / "theirs.safetensors").digests == 0


RIGHT = f"{digest_array(np.arange(3.0)):032x}"


@pytest.mark.parametrize(
    ("digests", "message"),
    [
        (
            json.dumps({"w": f"{1:032x}"}),
            f"'w' is not what was written: its digest is {RIGHT}, but {1:032x} was recorded",
        ),
        (json.dumps({"w": RIGHT, "v": RIGHT}), "tensor 'v' was written, but is missing"),
        (json.dumps({"w": RIGHT[1:]}), "is not a digest"),
        (json.dumps({"w": "x" * 32}), "is not a digest"),
        (json.dumps({"w": 5}), "5 is not a digest"),
        (json.dumps([RIGHT]), "are not a JSON object"),
        ("{", "are not JSON"),
        ("[" * 100_000, "are not JSON"),
    ],
)
def test_digests_in_a_header_that_are_not_those_of_the_tensors(tmp_path: Path, digests: str, message: str) -> None:
    file = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"w": np.arange(3.0)}, file, {"shardwise.digests": json.dumps({"w": RIGHT})})
    assert sw.verify_checkpoint(file).digests == 1
    safetensors.numpy.save_file({"w": np.arange(3.0)}, file, {"shardwise.digests": digests})
    with pytest.raises(sw.ParseError, match=message) as caught:
        sw.verify_checkpoint(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert len(str(caught.value)) < 400


def test_a_header_that_was_changed_is_found(tmp_path: Path) -> None:
    """The tensors' bytes are as they were, and the file as long."""
    folder, halves = tmp_path / "a", sw.TensorLayout(("x",), sw.DeviceMesh((2,), ("x",)))
    sw.save_checkpoint(folder, {"w": np.arange(6.0)}, {"w": halves}, metadata={"note": "right"})
    assert sw.verify_checkpoint(folder).digests == 1
    file = sorted(folder.glob("*.safetensors"))[-1]
    data = file.read_bytes()
    assert b"right" in data
    file.write_bytes(data.replace(b"right", b"wrong"))
    with pytest.raises(sw.ParseError, match=f"{file.name}: its header is not what was written"):
        sw.verify_checkpoint(folder)


def test_files_that_were_exchanged_are_named(tmp_path: Path) -> None:
    folder, halves = tmp_path / "a", sw.TensorLayout(("x",), sw.DeviceMesh((2,), ("x",)))
    sw.save_checkpoint(folder, {"w": np.arange(6.0)}, {"w": halves})
    one, other = sorted(folder.glob("*.safetensors"))
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    with pytest.raises(
        sw.ParseError, match=f"{one.name}: its header is not what was written, but that of {other.name}"
    ):
        sw.verify_checkpoint(folder)


@pytest.mark.filterwarnings("ignore:.*so nothing is cut:shardwise.ShardwiseWarning")
@pytest.mark.filterwarnings("ignore:.*not written,:shardwise.ShardwiseWarning")
@pytest.mark.filterwarnings("ignore:.*not compared,:shardwise.ShardwiseWarning")
@pytest.mark.heavy
@pytest.mark.parametrize("to", ["hf", "sharded", "dcp"])
def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, to: Any) -> None:
    """In elements, values, headers, padding, index and manifest: up to 150 bytes of each file."""
    source = ROOT / "tests" / "data" / "checkpoints" / "torch" / "dcp"
    with sw.open_checkpoint(source) as checkpoint:
        assert checkpoint.objects
        names = list(checkpoint)[:3]
        cut = {name: checkpoint[name].ndim * ((),) for name in names}
    mesh = sw.DeviceMesh((2,), ("x",))
    layouts = {name: sw.TensorLayout((("x",), *axes[1:]), mesh) for name, axes in cut.items() if axes}
    only = "^(" + "|".join([*names, *checkpoint.objects]).replace(".", r"\.") + ")$"
    made = tmp_path / "made"
    sw.reshard_checkpoint(source, made, layouts, to=to, uneven="chunk", only=only)
    assert sw.verify_checkpoint(made).tensors == 3
    for path in sorted(made.iterdir()):
        data = path.read_bytes()
        for at in range(3, len(data), max(11, len(data) // 150)):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            with pytest.raises((sw.ShardwiseError, OSError)):
                sw.verify_checkpoint(made)
        path.write_bytes(data)
    assert sw.diff_checkpoints(made, made) == []


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"threads": 0}, sw.LayoutError, "threads is 0; it must be at least 1"),
        ({"threads": -1}, sw.LayoutError, "threads is -1; it must be at least 1"),
        ({"threads": 2.5}, TypeError, "threads must be an integer, got 2.5"),
        ({"threads": True}, TypeError, "threads must be an integer, got True"),
        ({"memory": MEMORY - 1}, sw.LayoutError, "memory is 16383 bytes; at least 16384 bytes are needed"),
        ({"memory": 1e9}, TypeError, "memory must be an integer"),
    ],
)
def test_threads_and_memory_that_cannot_be(tmp_path: Path, given: Any, error: Any, message: str) -> None:
    """Of proofs, of writing to a disk and to a store, and of tasks; nothing is left."""
    pytest.importorskip("fsspec")
    path, place = tmp_path / "a", sw.ObjectPath("memory://impossible")
    sw.save_checkpoint(path, {"w": np.arange(6)}, to="hf")
    plan = sw.plan_checkpoint(path, tmp_path / "c")
    calls: list[Callable[[], object]] = [
        lambda: sw.verify_checkpoint(path, **given),
        lambda: sw.diff_checkpoints(path, path, **given),
        lambda: sw.save_checkpoint(tmp_path / "b", {"w": np.arange(6)}, to="hf", **given),
        lambda: plan.outline(**given),
    ]
    if "threads" in given:
        calls += [
            lambda: sw.save_checkpoint(place, {"w": np.arange(6)}, to="hf", **given),
            lambda: sw.plan_checkpoint(path, place).outline(**given),
            lambda: sw.plan_checkpoint(path, place).run(**given),
        ]
    else:
        calls.append(lambda: plan.tasks[0].run(**given))
    for call in calls:
        with refused(error, message):
            call()
    assert not place.exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(("retries", "error"), [(-1, sw.LayoutError), (1.5, TypeError)])
def test_retries_that_cannot_be(tmp_path: Path, retries: Any, error: Any) -> None:
    pytest.importorskip("fsspec")
    sw.save_checkpoint(tmp_path / "a", {"w": np.arange(6)}, to="hf")
    for place in (tmp_path / "b", sw.ObjectPath("memory://never")):
        with refused(error, f"retries {'is' if error is sw.LayoutError else 'must be an integer, got'} {retries}"):
            sw.reshard_checkpoint(tmp_path / "a", place, retries=retries)
        assert not place.exists()


@pytest.mark.parametrize("to", ["sharded", "hf", "dcp"])
def test_all_that_is_damaged_is_named_with_its_file(to: Any, tmp_path: Path) -> None:
    """A flipped bit in each of two tensors, in two files; then a missing file and a cut one besides."""
    mesh = sw.DeviceMesh((4,), ("x",))
    values = {name: np.arange(64.0).reshape(16, 4) + i for i, name in enumerate("abcdef")}
    rows = {} if to == "hf" else {name: sw.TensorLayout(("x", None), mesh) for name in values}
    folder = tmp_path / "m"
    sw.save_checkpoint(folder, values, rows, to=to, max_file_bytes=1024, sync=False)
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".distcp"))

    def flip(path: Path, name: str, rows: slice) -> None:
        data, part = bytearray(path.read_bytes()), values[name][rows].tobytes()
        at = data.index(part) + 3
        data[at] ^= 16
        path.write_bytes(data)

    def damaged() -> set[tuple[str | None, str]]:
        with pytest.raises(sw.ParseError) as caught:
            sw.verify_checkpoint(folder)
        assert isinstance(caught.value, sw.store.DamageError)
        assert str(caught.value).startswith(str(caught.value.report.damaged[0]).partition("; it holds ")[0])
        return {(one.tensor, Path(one.file).name) for one in caught.value.report.damaged}

    first, second = (files[0], files[2]) if to == "hf" else (files[1], files[2])
    whole = slice(None)
    flip(first, "a", whole if to == "hf" else slice(4, 8))
    flip(second, "e", whole if to == "hf" else slice(8, 12))
    assert damaged() == {("a", first.name), ("e", second.name)}
    held = {"c", "d"} if to == "hf" else set(values)
    gone = files[1] if to == "hf" else files[0]
    gone.unlink()
    assert damaged() == {("a", first.name), ("e", second.name), *((name, gone.name) for name in held)}
    if to != "hf":
        files[3].write_bytes(files[3].read_bytes()[:100])
        more = {(name, path.name) for name in values for path in (gone, files[3])}
        assert damaged() == {("a", first.name), ("e", second.name), *more}


def test_of_the_files_with_two_pieces_each_only_the_damaged_one_is_named(tmp_path: Path) -> None:
    """Each half of the rows is cut over both devices: a file has rows 0 and 2, the other 1 and 3."""
    value = np.arange(32.0).reshape(4, 8)
    rows = sw.TensorLayout((sw.packed.parse("(2 2@x)"), None), sw.DeviceMesh((2,), ("x",)))
    folder = tmp_path / "m"
    sw.save_checkpoint(folder, {"w": value}, {"w": rows}, to="dcp", sync=False)
    with sw.open_checkpoint(folder) as checkpoint:
        files = {piece.box[0].start: Path(str(piece.path)) for piece in checkpoint["w"].pieces}
    assert files[0] == files[2] != files[1] == files[3]
    data = bytearray(files[3].read_bytes())
    data[data.index(value[3].tobytes()) + 3] ^= 16
    files[3].write_bytes(data)
    with pytest.raises(sw.store.DamageError) as caught:
        sw.verify_checkpoint(folder)
    assert [(one.tensor, one.file) for one in caught.value.report.damaged] == [("w", str(files[3]))]


#: Cuts rows in two, and holds each half twice.
ROWS = sw.TensorLayout(("x", None), sw.DeviceMesh((2, 2), ("x", "y")))


def test_what_is_right_beside_a_damaged_file_for_a_rank_is_not_named(tmp_path: Path) -> None:
    """Replicas are in two files, and the half that the damaged one has is in another too."""
    values = {"w": np.arange(32.0).reshape(4, 8), "v": np.arange(3.0)}
    path = tmp_path / "new"
    sw.save_checkpoint(path, values, {"w": ROWS}, to="ranks", sync=False)
    first, second, *_ = sorted(path.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-4])
    data = bytearray(second.read_bytes())
    data[data.index(values["w"][:2].tobytes())] ^= 1
    second.write_bytes(data)
    with pytest.raises(sw.store.DamageError) as damaged:
        sw.verify_checkpoint(path)
    found = {(one.tensor, Path(one.file).name) for one in damaged.value.report.damaged}
    assert found == {("w", first.name), ("v", first.name), ("w", second.name)}


@pytest.mark.parametrize("to", ["sharded", "dcp", "ranks"])
@pytest.mark.parametrize("shape", [[4], [4, 8, 1], [3, 8], [0, 0], [], [4, 7]])
def test_a_manifest_that_says_another_shape_beside_another_size(to: Any, shape: list[int], tmp_path: Path) -> None:
    """With a file that is not the one, the others are read by themselves, and must be what the manifest says."""
    path = tmp_path / "new"
    sw.save_checkpoint(path, {"w": np.ones((4, 8), "f4"), "v": np.ones(3, "f4")}, {"w": ROWS}, to=to)
    manifest = json.loads((path / "shardwise.json").read_text())
    del manifest["sha256"]
    manifest["tensors"]["w"]["shape"] = shape
    first = sorted(name for name in manifest["files"] if name.endswith((".safetensors", ".distcp")))[0]
    manifest["files"][first]["size"] += 1
    (path / "shardwise.json").write_bytes(sealed(json.dumps(manifest, indent=0).encode()))
    with pytest.raises(sw.store.DamageError) as damaged:
        sw.verify_checkpoint(path)
    said = [str(one) for one in damaged.value.report.damaged]
    assert any("bytes, shardwise.json says" in each for each in said)
    assert any(f"that it has the shape {shape}" in each for each in said), said
