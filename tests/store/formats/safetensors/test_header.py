"""Headers that are wrong are refused, the way the safetensors package refuses them, and fast."""

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import ParseError, open_checkpoint
from shardwise.store import StoredTensor

from ...conftest import Write, encode, peer


def tensor(dtype: str = "U8", shape: Any = (1,), offsets: Any = (0, 1)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


ONE = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'

MALFORMED = {
    "empty file": (b"", "has 0 bytes"),
    "seven bytes": (b"\2\0\0\0\0\0\0", "has 7 bytes"),
    "length 2**63": ((2**63).to_bytes(8, "little") + b"{}", "byte 0: header of 9223372036854775808 bytes; at most"),
    "length over the limit": ((100_000_001).to_bytes(8, "little") + b"{}", "at most 100000000"),
    "length past the end": ((3).to_bytes(8, "little") + b"{}", "header of 3 bytes in a file of 10"),
    "no header": (encode(b""), "byte 8: not JSON"),
    "not UTF-8": (encode(b'{"\xff":1}'), "byte 10: not UTF-8"),
    "not JSON": (encode('{"é":1,}'.encode()), "byte 16: not JSON"),
    "behind the JSON": (encode(b"{}\0"), "byte 10: not JSON: Extra data"),
    "byte order mark": (encode(b"\xef\xbb\xbf{}"), "byte 8: not JSON"),
    "NaN": (encode(b'{"__metadata__":{"a":NaN}}'), "NaN is not JSON"),
    "half a surrogate pair": (encode(f'{{"\\ud800":{ONE}}}'.encode(), b"\0"), "surrogate"),
    "a list": (encode([]), "not a JSON object"),
    "deep nesting": (encode(b'{"a":' * 100_000), "nested too deeply"),
    "endless integer": (encode(b'{"a":' + b"9" * 100_000 + b"}"), "digits"),
    "duplicate tensor": (encode(f'{{"a":{ONE},"a":{ONE}}}'.encode(), b"\0"), "duplicate key 'a'"),
    "duplicate field": (encode(f'{{"a":{ONE[:-1]},"dtype":"U8"}}}}'.encode(), b"\0"), "duplicate key 'dtype'"),
    "metadata not text": (encode({"__metadata__": {"a": 1}}), "__metadata__ does not map text to text"),
    "metadata a list": (encode({"__metadata__": []}), "__metadata__ does not map text to text"),
    "no object": (encode({"a": None}), "tensor 'a': is not described by"),
    "no dtype": (encode({"a": {"shape": [], "data_offsets": [0, 1]}}, b"\0"), "tensor 'a': lacks 'dtype'"),
    "unknown dtype": (encode({"a": tensor("F128")}, b"\0"), "tensor 'a': unknown dtype 'F128'"),
    "dtype a number": (encode({"a": {**tensor(), "dtype": 1}}, b"\0"), "tensor 'a': unknown dtype 1"),
    "negative size": (encode({"a": tensor(shape=[-1])}, b"\0"), "shape [-1]"),
    "two negative sizes": (encode({"a": tensor(shape=[-1, -1])}, b"\0"), "shape [-1, -1]"),
    "float size": (encode({"a": tensor(shape=[1.0])}, b"\0"), "shape [1.0]"),
    "bool size": (encode({"a": tensor(shape=[True])}, b"\0"), "shape [True]"),
    "shape a number": (encode({"a": {**tensor(), "shape": 1}}, b"\0"), "shape 1 is not a list"),
    "size 2**63": (encode({"a": tensor(shape=[0, 2**63], offsets=[0, 0])}), "shape [0, 9223372036854775808]"),
    "product 2**64": (encode({"a": tensor(shape=[2**32, 2**32], offsets=[0, 0])}), "does not fill 0 bytes"),
    "endless product": (encode({"a": tensor(shape=[2**62] * 100_000)}, b"\0"), "does not fill 1 bytes"),
    "too few bytes": (encode({"a": tensor(shape=[2])}, b"\0"), "shape [2] of U8 does not fill 1 bytes"),
    "half a byte": (encode({"a": tensor("F4", [3], [0, 2])}, b"\0\0"), "shape [3] of F4 does not fill 2 bytes"),
    "offsets swapped": (encode({"a": tensor(offsets=[1, 0])}, b"\0"), "data_offsets [1, 0]"),
    "three offsets": (encode({"a": tensor(offsets=[0, 1, 2])}, b"\0"), "data_offsets [0, 1, 2]"),
    "float offset": (encode({"a": tensor(offsets=[0, 1.0])}, b"\0"), "data_offsets [0, 1.0]"),
    "past the end": (
        encode({"a": tensor(offsets=[0, 2], shape=[2])}, b"\0"),
        "the file is truncated: data_offsets [0, 2] end at",
    ),
    "overlap": (
        encode({"a": tensor(), "b": tensor(shape=[2], offsets=[0, 2])}, b"\0\0"),
        "tensor 'b': overlaps the tensor before it",
    ),
    "hole": (encode({"a": tensor(), "b": tensor(offsets=[2, 3])}, b"\0\0\0"), "tensor 'b': leaves a gap"),
    "empty tensor inside another": (
        encode({"a": tensor(shape=[2], offsets=[0, 2]), "b": tensor(shape=[0], offsets=[1, 1])}, b"\0\0"),
        "tensor 'b': overlaps",
    ),
    "tensor at the start of another, which is longer": (
        encode({"a": tensor(shape=[2], offsets=[0, 2]), "b": tensor(shape=[1], offsets=[0, 1])}, b"\0\0"),
        "tensor 'a': overlaps",
    ),
    "trailing": (encode({"a": tensor()}, b"\0\0"), "1 bytes after the last tensor"),
    "trailing, no tensor": (encode({}, b"\0"), "byte 10: 1 bytes after the last tensor"),
}

# What our rules refuse and the package lets pass: a name given twice, a size from 2**63 on.
STRICTER = {"duplicate tensor", "size 2**63"}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused(case: str, tmp_path: Path) -> None:
    data, message = MALFORMED[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(ParseError) as caught:
        open_checkpoint(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 400
    if case not in STRICTER:
        with pytest.raises(safetensors.SafetensorError):
            peer(data)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"import os\nprint(os.getcwd())\n", "text: 'import os"),
        (b'[package]\nname = "x"\n', "TOML: '[package]"),
        (b"# rules\nmesh = { model = 4 }\n", "TOML: '# rules"),
        (b'{"weight_map": {}}', "JSON: "),
        (b"GGUF" + bytes(100), "a GGUF file"),
    ],
)
def test_other_files_are_called_what_they_are(data: bytes, kind: str, tmp_path: Path) -> None:
    """Not a header of 7935470278571546729 bytes."""
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(ParseError, match="is not a safetensors file but") as caught:
        open_checkpoint(path)
    assert kind in str(caught.value)
    assert "header of" not in str(caught.value)


def test_a_file_that_was_cut_short_is_called_truncated(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    data = encode({"a": {"dtype": "U8", "shape": [100], "data_offsets": [0, 100]}}, bytes(100))
    for length in (len(data) - 1, len(data) - 100, 40, 9):
        path.write_bytes(data[:length])
        with pytest.raises(ParseError, match="is truncated"):
            open_checkpoint(path)


def test_a_wrong_length_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write((2**40).to_bytes(8, "little"))
        file.truncate(2**41)  # A sparse file in which the length would even fit.
    with pytest.raises(ParseError, match="at most 100000000"):
        open_checkpoint(path)


def test_names_are_never_paths(write: Write) -> None:
    names = ["../../etc/passwd", "/etc/passwd", "a\0b", "", "..", "C:\\x", "é", "😀"]
    header = {name: tensor(offsets=[i, i + 1]) for i, name in enumerate(names)}
    with open_checkpoint(write(header, bytes(range(len(names))))) as checkpoint:
        assert list(checkpoint) == names
        assert [int(checkpoint.read(name)[0]) for name in names] == list(range(len(names)))


def test_zero_sizes_beside_huge_ones_are_fine_in_every_order(write: Write) -> None:
    huge = 2**63 - 1
    header = {name: tensor("F64", shape, [0, 0]) for name, shape in {"a": [0, huge, 3], "b": [huge, 3, 0]}.items()}
    with open_checkpoint(write(header)) as checkpoint:
        assert [tensor.nbytes for tensor in checkpoint.values()] == [0, 0]


def _start(tensor: StoredTensor) -> int:
    return tensor.pieces[0].extent().offset


@pytest.mark.heavy
def test_a_header_of_many_tensors(write: Write) -> None:
    count = 20_000
    header = {f"h.{i}.w": tensor(offsets=[i, i + 1]) for i in range(count)}
    with open_checkpoint(write(header, bytes(count))) as checkpoint:
        assert len(checkpoint) == count
        assert _start(checkpoint["h.7.w"]) == _start(checkpoint["h.0.w"]) + 7


# --- fuzzing against the package -------------------------------------------------------------------------------------

VALID = encode(
    {"__metadata__": {"format": "pt"}, "a": tensor("F32", [2], [0, 8]), "b.c": tensor("BF16", [0, 3], [8, 8])},
    bytes(8),
)
sizes = st.integers(-2, 5) | st.sampled_from([2**31, 2**62, 2**63 - 1, 2**63, 2**64, 1.0, True, None, "1"])
fields = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "BF16", "F4", "F6_E2M3", "C64", "X", 3]),
        "shape": st.lists(sizes, max_size=3),
        "data_offsets": st.lists(sizes, min_size=1, max_size=3),
    },
    optional={"more": st.integers()},
)
documents = st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), fields | st.none() | st.just({}), max_size=3)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A good file with some bytes changed, taken out or put in."""
    data = bytearray(VALID)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3) | st.sampled_from([b'"', b"9", b"\\u"]))
    return bytes(data)


@st.composite
def composed(draw: st.DrawFn) -> bytes:
    """A header in good JSON with sizes good and bad, and some data."""
    return encode(json.dumps(draw(documents)).encode(), bytes(draw(st.integers(0, 24))))


@pytest.mark.heavy
@settings(max_examples=400, deadline=None)
@given(damaged() | composed() | st.binary(max_size=64).map(encode) | st.binary(max_size=16))
def test_any_bytes_give_a_checkpoint_or_a_parse_error(data: bytes) -> None:
    theirs = None
    with contextlib.suppress(safetensors.SafetensorError):
        theirs = peer(data)
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(data)
        file.flush()
        try:
            with open_checkpoint(file.name) as checkpoint:
                ours = {name: (tensor.known_dtype.code, tensor.shape) for name, tensor in checkpoint.items()}
        except ParseError:
            return
    assert ours == theirs


def test_an_empty_tensor_may_begin_where_another_does(tmp_path: Path) -> None:
    """In either order of the header: what is empty comes first."""
    full, empty = tensor(shape=[2], offsets=[0, 2]), tensor(shape=[0], offsets=[0, 0])
    for header in ({"full": full, "empty": empty}, {"empty": empty, "full": full}):
        path = tmp_path / "model.safetensors"
        path.write_bytes(encode(header, b"\1\2"))
        with open_checkpoint(path) as checkpoint:
            assert {name: checkpoint[name].array().tolist() for name in checkpoint} == {"full": [1, 2], "empty": []}


@pytest.mark.parametrize("text", ["[" * 1_100_000, '\\":{' * 600_000, "\\\\" * 500_000 + ":[" * 600_000])
def test_a_text_may_hold_as_many_brackets_and_quotes_as_it_likes(text: str, write: Write) -> None:
    """The metadata of a real file is often JSON itself."""
    with open_checkpoint(write({"__metadata__": {"said": text}, "a": tensor()}, b"\0")) as checkpoint:
        assert checkpoint.metadata["said"] == text


@pytest.mark.parametrize("before", ["", '"\\\\":1,', '"\\"":[1],', '"a":"\\\\\\"",'])
def test_lists_outside_of_texts_are_counted_exactly(before: str, write: Write) -> None:
    lists = ",".join(["[]"] * 1_100_000)
    count = 1_100_000 + 3 + before.count(":") + before.count("[")
    with pytest.raises(ParseError, match=rf": {count} brackets and colons"):
        open_checkpoint(write(("{" + before + f'"a":[{lists}]' + "}").encode()))


def test_a_tensor_has_at_most_64_dims(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(encode({"w": tensor(shape=(1,) * 64)}, b"x"))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["w"].shape == (1,) * 64
    path.write_bytes(encode({"w": tensor(shape=(1,) * 65)}, b"x"))
    with pytest.raises(ParseError, match="tensor 'w': has 65 dims, over the limit of 64"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        *(([1.0], [1, 2]), ([True], [1, 2]), ({}, [1, 2]), ("", [1, 2]), ([1], [1.0, 2]), ([1], [True, 2])),
        *(([1], "12"), ([1], {"1": 0, "2": 0}), ([1], [2, 1]), ([1], [1, 2, 3]), ([1], [-1, 0])),
        *(([1], [2**63, 2**63 + 1]), ([1], [2, 3])),
    ],
)
def test_a_tensor_after_one_like_it_is_looked_at_as_closely(shape: Any, offsets: Any, tmp_path: Path) -> None:
    scalar = {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}
    header = {"a": {**scalar, "shape": [1]}, "b": {**scalar, "data_offsets": [1, 2]}}
    path = tmp_path / "file.safetensors"
    path.write_bytes(encode(header, b"\0\0"))
    with open_checkpoint(path) as checkpoint:
        assert len(checkpoint) == 2
    for first in (header["a"], {**scalar, "data_offsets": [0, 1]}):
        path.write_bytes(encode({"a": first, "b": {"dtype": "U8", "shape": shape, "data_offsets": offsets}}, b"\0\0"))
        with pytest.raises(ParseError, match="tensor 'b'"):
            open_checkpoint(path)
