"""PyTorch's distributed checkpoints made by hand, each with something wrong, or with what the real ones do not have."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from tests.tilings import cut_boxes

from ...conftest import encode
from ...torch_files import F4, META, Call, Dcp, Global, new, ones, save, size, tensor

Chunk = tuple[tuple[int, ...], np.ndarray]


def dcp(tmp_path: Path, shape: tuple[int, ...], chunks: list[Chunk]) -> Path:
    folder = Dcp()
    folder.add("w", shape, chunks)
    return folder.write(tmp_path / "dcp")


@pytest.mark.heavy
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_tiling_is_read_and_a_spoilt_one_is_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes = data.draw(cut_boxes(shape))
    filled = [box for box in dict.fromkeys(map(tuple, boxes)) if all(start < stop for start, stop in box)]
    array = ones(*shape)
    chunks: list[Chunk] = [
        (tuple(start for start, _ in box), array[tuple(slice(start, stop) for start, stop in box)]) for box in filled
    ]
    path = dcp(tmp_path_factory.mktemp("dcp"), shape, chunks)
    with sw.open_checkpoint(path) as checkpoint:
        assert checkpoint.read("w").tolist() == array.tolist()
        part = tuple(slice(n // 3, n) for n in shape)
        assert checkpoint.read("w", part).tolist() == array[part].tolist()
    victim = data.draw(st.integers(0, len(chunks) - 1))
    if len(chunks) > 1:
        path = dcp(tmp_path_factory.mktemp("dcp"), shape, chunks[:victim] + chunks[victim + 1 :])
        with pytest.raises(sw.ParseError, match=r"\.metadata: tensor 'w' of shape .*leave a gap: none holds \["):
            sw.open_checkpoint(path)


def test_chunks_that_overlap_or_lie_outside(tmp_path: Path) -> None:
    over = dcp(tmp_path, (5,), [((0,), ones(3)), ((2,), ones(3))])
    with pytest.raises(sw.ParseError, match=r"boxes\[0\] and boxes\[1\] overlap: both hold \[2:3\] \(.*__0_0\.distcp"):
        sw.open_checkpoint(over)
    outside = dcp(tmp_path, (5,), [((0,), ones(5)), ((5,), ones(1))])
    with pytest.raises(sw.ParseError, match=r"__0_0.distcp holds \[5:6\], which is outside it"):
        sw.open_checkpoint(outside)
    with pytest.raises(sw.ParseError, match="leave a gap: none holds"):
        sw.open_checkpoint(dcp(tmp_path, (3, 4), []))


def test_empty_chunks_and_tensors_without_elements(tmp_path: Path) -> None:
    folder = Dcp()
    folder.add("w", (4,), [((0,), ones(4)), ((4,), ones(0))])
    folder.add("none", (0, 4), [])
    folder.add("one", (0, 4), [((0, 0), ones(0, 4))])
    folder.add("scalar", (), [((), np.float32(2.5).reshape(()))])
    with sw.open_checkpoint(folder.write(tmp_path / "dcp")) as checkpoint:
        assert checkpoint.read("w").tolist() == [0, 1, 2, 3]
        assert [checkpoint.read(name).shape for name in ("none", "one", "scalar")] == [(0, 4), (0, 4), ()]
        assert checkpoint.read("scalar") == 2.5


def test_an_index_of_an_older_version(tmp_path: Path) -> None:
    """Five fields in the state of the properties, from another module, and no version."""
    folder = Dcp()
    folder.add("w", (2,), [((0,), ones(2))])
    module = "torch.distributed._shard.sharded_tensor.metadata"
    encoding = Call(module, "MEM_FORMAT_ENCODING", 0)
    state = (
        Global("torch", "float32"),
        Call("torch.serialization", "_get_layout", "torch.strided"),
        False,
        encoding,
        False,
    )
    chunks = [new(META, "ChunkStorageMetadata", offsets=size(0), sizes=size(2))]
    folder.entries["w"] = new(
        META,
        "TensorStorageMetadata",
        properties=Call(module, "TensorProperties", state=state),
        size=size(2),
        chunks=chunks,
    )
    with sw.open_checkpoint(folder.write(tmp_path / "dcp")) as checkpoint:
        assert checkpoint.read("w").tolist() == [0, 1]


def changed(**info: Any) -> Callable[[Dcp], None]:
    def change(folder: Dcp) -> None:
        place = next(iter(folder.places.values()))
        place.state = {**place.state, **info}

    return change


def entry(**attributes: Any) -> Callable[[Dcp], None]:
    return lambda folder: folder.entries["w"].state.update(attributes)


WRONG_INDEXES: dict[str, tuple[Callable[[Dcp], Any], str]] = {
    "a file outside": (changed(relative_path="../x"), "outside its own folder"),
    "an absolute file": (changed(relative_path="/etc/passwd"), "outside its own folder"),
    "no such file": (changed(relative_path="gone"), "'gone', which does not exist"),
    "an offset past the end": (changed(offset=10**6), "in a file of"),
    "an offset past any end": (changed(offset=2**63 - 1, length=2**63 - 1), "in a file of"),
    "a length past the end": (changed(length=10**6), "in a file of"),
    "a negative offset": (changed(offset=-1), "as a range of bytes"),
    "an offset that is no number": (changed(offset="1"), "as a range of bytes"),
    "a transformed chunk": (changed(transform_descriptors=["zstd"]), "save it without extensions"),
    "overlapping segments": (lambda folder: list(folder.places.values())[1].state.update(offset=5), "overlaps"),
    "a chunk without a place": (lambda folder: folder.places.popitem(), "storage_data has no"),
    "two places for a chunk": (
        lambda folder: folder.place("w", (0,), b"", "__0_0.distcp"),
        "one chunk two places",
    ),
    "a shape of text": (entry(size="x"), "has no shape"),
    "a negative size": (entry(size=size(-4)), "has no shape"),
    "65 dims": (entry(size=size(*[1] * 65), chunks=[]), "has 65 dims"),
    "too many bytes": (entry(size=size(2**62, 8), chunks=[]), "more than"),
    "chunks of another rank": (entry(size=size(4, 1)), "has a chunk with 1 offset and 1 size, but"),
    "chunks beyond all": (
        entry(chunks=[new(META, "ChunkStorageMetadata", offsets=size(2**63 - 1), sizes=size(2))]), "a chunk beyond"
    ),
    "no chunks": (entry(chunks=None), "has no list of chunks"),
    "a chunk that is none": (entry(chunks=[5]), "that is not a chunk"),
    "no properties": (entry(properties=None), "has no dtype"),
    "a dtype of its own": (
        lambda folder: folder.entries["w"].state.update(properties=folder.properties("quint8")), "quint8"
    ),
    "an entry that is none": (lambda folder: folder.entries.update(w=5), "neither a tensor nor an object"),
    "an object without a place": (
        lambda folder: folder.entries.update(o=Call(META, "BytesStorageMetadata", state={})),
        "storage_data has no .*\"o\"",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_INDEXES)
def test_wrong_indexes_are_refused(case: str, tmp_path: Path) -> None:
    change, message = WRONG_INDEXES[case]
    folder = Dcp()
    folder.add("w", (4,), [((0,), ones(2)), ((2,), ones(2))])
    change(folder)
    with pytest.raises(sw.ParseError, match=message) as caught:
        sw.open_checkpoint(folder.write(tmp_path / "dcp"))
    assert str(caught.value).startswith(f"{tmp_path / 'dcp' / '.metadata'}: ")
    assert len(str(caught.value)) < 600


def test_an_item_that_is_not_what_the_index_says(tmp_path: Path) -> None:
    for array, message in (
        (ones(3), r"float32 of shape \(3,\), but .*chunk \[2:4\] of 'w', float32 of shape \(2,\)"),
        (np.zeros(2, np.int32), "int32"),
    ):
        folder = Dcp()
        folder.add("w", (4,), [((0,), ones(2)), ((2,), array[:2].astype(F4))])
        last = list(folder.places.values())[-1]
        data = save(tensor(array, "0"))
        start = last.state["offset"]
        folder.files["__0_0.distcp"] = folder.files["__0_0.distcp"][:start] + data
        last.state["length"] = len(data)
        with sw.open_checkpoint(folder.write(tmp_path / "dcp")) as checkpoint:
            assert checkpoint.read("w", (slice(0, 2),)).tolist() == [0, 1]
            with pytest.raises(sw.ParseError, match=message):
                checkpoint.read("w")


def test_one_segment_under_two_names(tmp_path: Path) -> None:
    """Tied tensors lie in one place; an object does not lie where a tensor does, and is named where it does."""
    folder = Dcp()
    folder.add("a", (4,), [((0,), ones(2)), ((2,), ones(2) + 5)])
    folder.add("none", (0, 4), [])
    folder.add("tied", (4,), [((0,), ones(2)), ((2,), ones(2) + 5)])
    folder.add_object("object", {"step": 3})
    places = list(folder.places.values())
    for mine, other in zip(places[2:4], places[:2], strict=True):
        mine.state.update(other.state)
    with sw.open_checkpoint(folder.write(tmp_path / "dcp")) as checkpoint:
        assert checkpoint["tied"].alias_of == "a"
        assert checkpoint.read("tied").tolist() == checkpoint.read("a").tolist() == [0, 1, 5, 6]
        assert checkpoint.read("none").shape == (0, 4)
    places[4].state.update(places[0].state)
    with pytest.raises(sw.ParseError, match=r"'object'.*overlaps"):
        sw.open_checkpoint(folder.write(tmp_path / "dcp"))


def test_a_tensor_does_not_lie_where_an_object_listed_before_it_does(tmp_path: Path) -> None:
    folder = Dcp()
    folder.add_object("object", {"step": 3})
    folder.add("w", (2,), [((0,), ones(2))])
    first, second = (place.state for place in folder.places.values())
    first.update(second)
    with pytest.raises(sw.ParseError, match=r"'object'.*overlaps what comes before it"):
        sw.open_checkpoint(folder.write(tmp_path / "dcp"))


def test_an_index_and_an_object_of_too_many_bytes_are_not_read(tmp_path: Path) -> None:
    """An index has at most 2 GiB and an object 1 GiB; these take no room on the disk."""
    folder = Dcp()
    folder.add_object("object", {"step": 3})
    place = next(iter(folder.places.values()))
    place.state.update(length=2**30 + 1)
    path = folder.write(tmp_path / "dcp")
    os.truncate(path / "__0_0.distcp", 2**30 + 1)
    with (
        sw.open_checkpoint(path) as checkpoint,
        pytest.raises(sw.ParseError, match=r"__0_0\.distcp: byte 0: an object of 1073741825 bytes, over the limit of"),
    ):
        checkpoint.objects["object"].value()
    os.truncate(path / ".metadata", 2**31 + 1)
    with pytest.raises(sw.ParseError, match=r"\.metadata: an index of 2147483649 bytes, over the limit of 2147483648"):
        sw.open_checkpoint(path)


def test_places_under_two_names_that_are_not_the_same_tensor(tmp_path: Path) -> None:
    """The chunks of the second change places; its sizes, its dtype, or the places themselves are others."""
    chunks: list[Chunk] = [((0,), ones(2)), ((2,), ones(2) + 5)]
    others: list[tuple[tuple[int, ...], list[Chunk]]] = [
        ((4,), [(at, array) for (at, _), (_, array) in zip(reversed(chunks), chunks, strict=True)]),
        ((2, 2), [((0, 0), ones(1, 2)), ((1, 0), ones(1, 2))]),
        ((4,), [(at, array.astype("i4")) for at, array in chunks]),
        ((2,), chunks[:1]),
    ]
    for shape, other in others:
        folder = Dcp()
        folder.add("a", (4,), chunks)
        folder.add("b", shape, other)
        places = list(folder.places.values())
        for mine, owner in zip(places[2:], places[:2], strict=False):
            mine.state.update(owner.state)
        with pytest.raises(sw.ParseError, match="overlaps what comes before it"):
            sw.open_checkpoint(folder.write(tmp_path / "dcp"))


@pytest.mark.parametrize("common", [1, 7, 63, 64, 65])
def test_segments_that_share_a_few_bytes(tmp_path: Path, common: int) -> None:
    folder = Dcp()
    folder.add("a", (64,), [((0,), ones(64))])
    folder.add("b", (64,), [((0,), ones(64))])
    first, second = folder.places.values()
    second.state.update(offset=second.state["offset"] - common)
    assert second.state["offset"] + common == first.state["offset"] + first.state["length"]
    with pytest.raises(sw.ParseError, match="overlaps what comes before it"):
        sw.open_checkpoint(folder.write(tmp_path / "dcp"))


def test_unfinished_checkpoints_are_refused(tmp_path: Path) -> None:
    path = dcp(tmp_path, (2,), [((0,), ones(2))])
    (path / ".metadata").rename(path / ".metadata.tmp")
    with pytest.raises(sw.ParseError, match=r"no \.metadata, which is written last.*take the last complete"):
        sw.open_checkpoint(path)
    (path / "__0.metadata").write_bytes(b"")
    with pytest.raises(sw.ParseError, match="use_collectives=False"):
        sw.open_checkpoint(path)


def test_megatron_folders_that_cannot_be_read(tmp_path: Path) -> None:
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    for text, message in (
        ("7", "no folder iter_0000007"),
        ("../../x", "is neither an iteration"),
        ("9" * 60, "is neither an iteration"),
        ("release", "no metadata.json"),
    ):
        latest.write_text(text)
        with pytest.raises(sw.ParseError, match=message):
            sw.open_checkpoint(tmp_path)
    folder = tmp_path / "iter_0000007"
    folder.mkdir()
    latest.write_text("7\n")
    with pytest.raises(sw.ParseError, match=r"no metadata.json.*interrupted"):
        sw.open_checkpoint(tmp_path)
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(sw.ParseError, match="of the format 'zarr'"):
        sw.open_checkpoint(tmp_path)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(sw.ParseError, match=r"has no \.metadata"):
        sw.open_checkpoint(tmp_path)


# The same as safetensors.


def shard(path: Path, rank: int, tensors: dict[str, tuple[tuple[int, ...], np.ndarray]], name: str = "") -> None:
    header: dict[str, Any] = {}
    data = b""
    for key, (_, array) in tensors.items():
        code = {"float32": "F32", "int64": "I64"}[array.dtype.name]
        header[key] = {"dtype": code, "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    info = {key: {"saved_offsets": offsets} for key, (offsets, _) in tensors.items()}
    header["__metadata__"] = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
    (path / (name or f"shard-{rank:05}-model-00001-of-00001.safetensors")).write_bytes(encode(header, data))


def test_shards_as_safetensors(tmp_path: Path) -> None:
    array = ones(5, 4)
    shard(tmp_path, 1, {"w": ((0, 0), array[:3]), "same": ((0,), ones(2))})
    shard(tmp_path, 2, {"w": ((3, 0), array[3:]), "same": ((0,), ones(2)), "own": ((), ones())})
    with sw.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("w").tolist() == array.tolist()
        assert (len(checkpoint["same"].pieces), len(checkpoint["same"].replicas)) == (1, 1)
        assert checkpoint.read("own").shape == ()
        assert (checkpoint.metadata["ranks"], checkpoint.metadata["format"]) == (2, "pt")


def test_shards_that_were_not_consolidated(tmp_path: Path) -> None:
    (tmp_path / "sharded").mkdir()
    shard(tmp_path / "sharded", 1, {"w": ((0,), ones(2))})
    with pytest.raises(
        sw.ParseError, match="was to be consolidated by PyTorch, but was not; the shards in its folder 'sharded'"
    ):
        sw.open_checkpoint(tmp_path)
    with sw.open_checkpoint(tmp_path / "sharded") as checkpoint:
        assert checkpoint.read("w").tolist() == [0, 1]


def test_shards_that_are_missing_or_do_not_fit(tmp_path: Path) -> None:
    def folder(name: str) -> Path:
        path = tmp_path / name
        path.mkdir()
        shard(path, 1, {"w": ((0,), ones(2))})
        return path

    path = folder("a middle one")
    shard(path, 3, {"w": ((4,), ones(2))})
    with pytest.raises(sw.ParseError, match="no file of shard 2"):
        sw.open_checkpoint(path)
    path = folder("a gap")
    shard(path, 2, {"w": ((3,), ones(2))})
    with pytest.raises(sw.ParseError, match=r"leave a gap: none holds \[2:3\]"):
        sw.open_checkpoint(path)
    path = folder("an overlap")
    shard(path, 2, {"w": ((1,), ones(2))})
    with pytest.raises(sw.ParseError, match=r"overlap: both hold \[1:2\] \(.*shard-00001.*shard-00002"):
        sw.open_checkpoint(path)
    path = folder("another dtype")
    shard(path, 2, {"w": ((2,), np.zeros(2, np.int64))})
    with pytest.raises(sw.ParseError, match=r"'w' is F32 of shape .* in shard-00001.* but I64 of shape"):
        sw.open_checkpoint(path)
    path = folder("another rank")
    shard(path, 2, {"w": ((2, 0), ones(2, 2))})
    with pytest.raises(sw.ParseError, match="'w' is F32 of shape"):
        sw.open_checkpoint(path)
    path = folder("parts")
    shard(path, 2, {"w": ((2,), ones(2))}, "shard-00002-model-00001-of-00002.safetensors")
    with pytest.raises(sw.ParseError, match="shard 2 should have 2 files, but has 1"):
        sw.open_checkpoint(path)
    path = folder("parts of other counts")
    shard(path, 1, {"v": ((0,), ones(2))}, "shard-00001-model-00002-of-00002.safetensors")
    with pytest.raises(sw.ParseError, match="shard 1 "):
        sw.open_checkpoint(path)
    path = folder("one part twice")
    shard(path, 1, {"v": ((0,), ones(2))}, "shard-1-model-1-of-1.safetensors")
    with pytest.raises(sw.ParseError, match="two files are part 1 of shard 1"):
        sw.open_checkpoint(path)
    for number, (info, message) in enumerate(
        ((None, "has no DCP_SHARDING_INFO"), ("{}", "does not list the tensor 'w'"), ("[", "not JSON"),
         ("[]", "not a JSON"),
         ('{"w": {"saved_offsets": [-1]}}', "the offsets of 'w'"), ('{"w": 5}', "the offsets of 'w'"))
    ):  # fmt: skip
        path = folder(f"wrong info {number}")
        header: dict[str, Any] = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
        header["__metadata__"] = {} if info is None else {"DCP_SHARDING_INFO": info}
        (path / "shard-00001-model-00001-of-00001.safetensors").write_bytes(encode(header, bytes(4)))
        with pytest.raises(sw.ParseError, match=message):
            sw.open_checkpoint(path)
