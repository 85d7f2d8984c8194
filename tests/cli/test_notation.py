"""What the command line reads and writes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import LayoutError, MeshError, ParseError, SizeOverflowError, TensorLayout, packed
from shardwise._dtypes import CODES
from shardwise.cli.notation import (
    format_layout,
    format_mesh,
    parse_dtype,
    parse_layout,
    parse_memory,
    parse_mesh,
    parse_shape,
)


def test_meshes() -> None:
    mesh = parse_mesh("data=2, model=4")
    assert (mesh.axis_names, mesh.shape) == (("data", "model"), (2, 4))
    assert format_mesh(mesh) == "data=2,model=4"


@pytest.mark.parametrize("text", ["", "data", "data=", "data=x", "data=-1", "data=2.5", "data=2,", "=", "a=²", "a=1=2"])
def test_texts_that_are_no_mesh(text: str) -> None:
    with pytest.raises(ParseError, match=r"expected e\.g\. data=2,model=4"):
        parse_mesh(text)


def test_meshes_that_cannot_be() -> None:
    for text in ("data=0", "a=2,a=2", "=2"):
        with pytest.raises(MeshError):
            parse_mesh(text)
    with pytest.raises(SizeOverflowError):
        parse_mesh(f"a={2**62},b=2")


@pytest.mark.parametrize(
    ("text", "shape"),
    {
        "8,6": (8, 6),
        "8x6": (8, 6),
        "8 x 6": (8, 6),
        "(8, 6)": (8, 6),
        "(8,)": (8,),
        "0": (0,),
        "": (),
        "()": (),
    }.items(),
)
def test_shapes(text: str, shape: tuple[int, ...]) -> None:
    assert parse_shape(text) == shape


@pytest.mark.parametrize("text", ["8,,6", "x", "-8", "8.0", "8;6", ",", "1e3", "٣", "9" * 20, "8x"])
def test_texts_that_are_no_shape(text: str) -> None:
    with pytest.raises(ParseError, match=r"expected e\.g\. 8,6 or 8x6"):
        parse_shape(text)


@given(st.lists(st.lists(st.sampled_from("abcdef"), max_size=2), max_size=3))
def test_layouts_come_back(axes: list[list[str]]) -> None:
    used = [axis for spec in axes for axis in spec]
    if len(set(used)) < len(used):
        with pytest.raises(LayoutError):
            parse_layout(",".join("+".join(spec) for spec in axes), len(axes))
        return
    layout = TensorLayout(tuple(tuple(spec) for spec in axes))
    assert parse_layout(format_layout(layout), len(axes)) == layout


def test_sub_axes_and_packed_dims_are_told_apart() -> None:
    for text, spec in (
        ("tp:(1)2", "tp:(1)2"),
        ("tp:(1)2+dp+tp:(2)4", ("tp:(1)2", "dp", "tp:(2)4")),
        ("dp+tp:(1)2", ("dp", "tp:(1)2")),
        ("q:(8)+k:(8@tp:(1)2)", packed.parse("q:(8) + k:(8@tp:(1)2)")),
        ("(8@tp:(1)2+dp)", packed.parse("(8@tp:(1)2+dp)")),
    ):
        assert parse_layout(f"{text},-", 2).axes == (spec, None)


def test_ways_to_write_that_a_dim_is_not_cut() -> None:
    for text in ("-,x", ",x", "None,x", "*,x", " - , x "):
        assert parse_layout(text, 2).axes == (None, "x")
    assert parse_layout("", 1).axes == (None,)
    assert parse_layout("", 0).axes == parse_layout("()", 0).axes == ()


def test_a_layout_written_as_in_python_is_refused_with_the_right_form() -> None:
    with pytest.raises(ParseError, match=r"data,- for \('data', None\), and data\+model,- for"):
        parse_layout("(a,b),-", 2)


def test_dtypes() -> None:
    for code, dtype in CODES.items():
        assert parse_dtype(code) == parse_dtype(dtype.name) == dtype.bits
    # In lower case numpy's meaning goes before the code of safetensors.
    assert [parse_dtype(name) for name in ("bf16", "f32", "i8", "u8", "f4", "f8_e4m3")] == [16, 32, 64, 64, 32, 8]
    for name in ("float16", "int64", "bool", "complex128", ">f4", "f2"):
        assert parse_dtype(name) == 8 * np.dtype(name).itemsize
    for name in ("floaty", "", "O0", "S"):
        with pytest.raises(ParseError, match="dtype"):
            parse_dtype(name)


@pytest.mark.parametrize(
    ("units", "one"),
    [
        (("", "B", " b"), 1),
        (("KB", "kb"), 1000),
        (("MB",), 1000**2),
        (("GB",), 1000**3),
        (("TB",), 1000**4),
        (("KiB", "K", " k"), 1024),
        (("MiB", "M"), 1024**2),
        (("GiB", "G"), 1024**3),
        (("TiB", "T"), 1024**4),
    ],
)
def test_units_of_memory(units: tuple[str, ...], one: int) -> None:
    for unit in units:
        assert parse_memory(f"3{unit}") == 3 * one
        assert parse_memory(f" 2.5{unit} ") == 5 * one // 2
        assert parse_memory(f"0{unit}") == 0


@pytest.mark.parametrize("text", ["", "-1", "9223372036854775808", "8388608TiB", "inf", "nan", "GB", "3PB"])
def test_texts_that_are_no_number_of_bytes(text: str) -> None:
    with pytest.raises(ParseError, match="is not a number of bytes, such as 512MiB or 2GB"):
        parse_memory(text)
