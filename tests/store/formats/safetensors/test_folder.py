"""Checkpoints in several files, put together by an index in Hugging Face's form."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import shardwise as sw
from shardwise import ParseError, open_checkpoint
from tests.checks import same_tensors

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    safetensors.numpy.save_file({"a": np.arange(3), "b": np.arange(4.0)}, tmp_path / FIRST, {"format": "pt"})
    safetensors.numpy.save_file({"c": np.arange(5)}, tmp_path / SECOND)
    write_index(tmp_path, {"a": FIRST, "b": FIRST, "c": SECOND})
    return tmp_path


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 96}, "weight_map": weight_map}))


@pytest.mark.parametrize("name", [".", INDEX])
def test_a_folder_or_its_index(folder: Path, name: str) -> None:
    with open_checkpoint(folder / name) as checkpoint:
        assert {name: tensor.array().tolist() for name, tensor in checkpoint.items()} == {
            "a": [0, 1, 2],
            "b": [0, 1, 2, 3],
            "c": [0, 1, 2, 3, 4],
        }
        assert checkpoint["c"].pieces[0].path == folder / SECOND
        assert dict(checkpoint.metadata) == {"format": "pt"}
        assert checkpoint.path == folder / INDEX


def test_one_file_goes_before_an_index_and_another_name_will_do(folder: Path) -> None:
    safetensors.numpy.save_file({"x": np.arange(2)}, folder / "model.safetensors")
    assert list(open_checkpoint(folder)) == ["x"]
    for name in (INDEX, FIRST, SECOND):
        (folder / name).unlink()
    (folder / "model.safetensors").rename(folder / "diffusion.safetensors")
    assert list(open_checkpoint(folder)) == ["x"]
    (folder / "other.safetensors").touch()
    with pytest.raises(ParseError, match=r"2 \*\.safetensors files \(diffusion\.safetensors, other"):
        open_checkpoint(folder)


def test_links_may_lead_elsewhere(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    blob = tmp_path_factory.mktemp("blobs") / "0123abcd"
    (folder / SECOND).rename(blob)
    (folder / SECOND).symlink_to(blob)
    assert open_checkpoint(folder)["c"].array().tolist() == [0, 1, 2, 3, 4]


def test_what_the_index_leaves_out_is_read_all_the_same(folder: Path) -> None:
    write_index(folder, {"a": FIRST, "c": SECOND})
    assert set(open_checkpoint(folder)) == {"a", "b", "c"}


def test_the_index_decides_where_two_files_hold_one_name(folder: Path) -> None:
    safetensors.numpy.save_file({"a": np.zeros(9), "c": np.arange(5)}, folder / SECOND)
    assert open_checkpoint(folder)["a"].pieces[0].path.name == FIRST
    write_index(folder, {"b": FIRST, "c": SECOND})
    with pytest.raises(ParseError, match=f"{FIRST} and {SECOND} both hold 'a', which is not listed"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "gone.safetensors"}, r"names the file 'gone\.safetensors', which does not exist"),
        ({"a": "../model.safetensors"}, "outside the index's own folder"),
        ({"a": "x/../../m.safetensors"}, "outside"),
        ({"a": "..\\m.safetensors"}, "outside"),
        ({"a": "/etc/passwd"}, "outside"),
        ({"a": "C:\\m.safetensors"}, "outside"),
        ({"a": "a\0b"}, "outside"),
        ({"a": ""}, "outside"),
        ({"a": "."}, "outside"),
        ({"a": 1}, "no weight_map"),
        ([], "no weight_map"),
        (None, "no weight_map"),
        ({"a": SECOND}, f"lists 'a' in '{SECOND}', which does not hold it"),
        ({"z": FIRST}, "lists 'z'"),
    ],
)
def test_wrong_indexes(folder: Path, weight_map: Any, message: str) -> None:
    write_index(folder, weight_map)
    with pytest.raises(ParseError, match=message) as caught:
        open_checkpoint(folder)
    assert str(caught.value).startswith(str(folder / INDEX))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map":{"a":"x","a":"y"}}', "\ud800"])
def test_indexes_that_are_no_json_object(folder: Path, text: str) -> None:
    (folder / INDEX).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ParseError, match=INDEX):
        open_checkpoint(folder)


def test_a_directory_in_the_place_of_a_file(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).mkdir()
    with pytest.raises(ParseError, match="is a directory"):
        open_checkpoint(folder)


def test_an_index_of_any_size_is_not_read(folder: Path) -> None:
    with (folder / INDEX).open("wb") as file:
        file.truncate(100_000_001)
    with pytest.raises(ParseError, match="100000001 bytes of JSON, over the limit of 100000000"):
        open_checkpoint(folder)


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
