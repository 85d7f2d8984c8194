"""Conversions of dtypes: every value and every tie of the narrow ones, by exact arithmetic; what is lost is said."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import shardwise as sw
from shardwise._dtypes import DTYPES
from shardwise.cli import main
from shardwise.store.rewritten import convert
from shardwise.store.rewritten.convert import converted_values

ml_dtypes = pytest.importorskip("ml_dtypes")

NARROW = [
    *("float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"),
]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def codes_of(dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.arange(256**dtype.itemsize, dtype=f"u{dtype.itemsize}")


def finite_values(dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """All finite values in order, each once, and their codes."""
    codes = codes_of(dtype)
    with np.errstate(all="ignore"):
        values = codes.view(dtype).astype(np.float64)
    codes, values = codes[np.isfinite(values)], values[np.isfinite(values)]
    values, first = np.unique(values, return_index=True)
    return values, codes[first]


def nearest(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The nearest finite value, of two as near that with the even code, by sums that float64 holds exactly."""
    known, codes = finite_values(dtype)
    at = np.clip(np.searchsorted(known, values), 1, len(known) - 1)
    below, above = values - known[at - 1], known[at] - values
    is_above = (above < below) | ((above == below) & (codes[at] % 2 == 0))
    return np.where(is_above, known[at], known[at - 1])


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("wide", ["float64", "float32"])
def test_every_value_and_every_tie_is_rounded_once(name: str, wide: str) -> None:
    dtype = dtype_of(name)
    known, _ = finite_values(dtype)
    ties = ((known[1:] + known[:-1]) / 2).astype(wide)
    infinity = np.array(np.inf, wide)
    near = [known.astype(wide), ties, np.nextafter(ties, infinity), np.nextafter(ties, -infinity)]
    for values in near:
        made, lost = converted_values(values, dtype, "refuse")
        assert lost == 0
        assert (made.astype(np.float64) == nearest(values.astype(np.float64), dtype)).all()


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("source", NARROW)
def test_every_value_of_one_narrow_dtype_in_another(name: str, source: str) -> None:
    dtype, values = dtype_of(name), codes_of(dtype_of(source)).view(dtype_of(source))
    with np.errstate(all="ignore"):
        exact = values.astype(np.float64)
    known, _ = finite_values(dtype)
    # Half a step beyond the largest is where IEEE 754 rounds to infinity; the tie goes there if the largest is odd.
    step = known[-1] - known[-2]
    holds = np.isfinite(exact) & (np.abs(exact) < known[-1] + step / 2)
    saturated, lost = converted_values(values, dtype, "saturate")
    with np.errstate(all="ignore"):
        found = saturated.astype(np.float64)
    assert (found[holds] == nearest(exact[holds], dtype)).all()
    assert np.isnan(found[np.isnan(exact)]).all()
    with np.errstate(all="ignore"):
        has_infinity = np.isinf(np.array([np.inf]).astype(dtype).astype(np.float64))[0]
    infinite = found[np.isinf(exact)]
    assert (np.abs(infinite) == (np.inf if has_infinity else known[-1])).all()
    beyond = np.isfinite(exact) & (np.abs(exact) > known[-1] + step / 2)
    assert (found[beyond] == np.copysign(known[-1], exact[beyond])).all()
    assert lost >= int(beyond.sum()) + (0 if has_infinity else len(infinite))
    rounded, also_lost = converted_values(values, dtype, "round")
    with np.errstate(all="ignore"):
        assert also_lost == lost == int((~np.isfinite(rounded.astype(np.float64)) & np.isfinite(found)).sum())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    values = np.array([1, 448, 464, 465, -1e6, np.inf, np.nan], "f4")
    sw.save_checkpoint(tmp_path / "a.safetensors", {"w": values, "small": np.ones(3, "f4")}, sync=False)
    return tmp_path / "a.safetensors"


def test_what_would_become_nan_is_refused_and_counted(source: Path, tmp_path: Path) -> None:
    with pytest.raises(sw.LayoutError, match=r"tensor 'w': 3 values are beyond the range of float8_e4m3fn .up to 448"):
        sw.reshard_checkpoint(source, tmp_path / "b", dtype="float8_e4m3fn")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors"]
    # An infinity stays one in a dtype that has them, and NaN is NaN everywhere.
    assert sw.reshard_checkpoint(source, tmp_path / "c", dtype="bfloat16").warnings == ()


@pytest.mark.parametrize(
    ("overflow", "expected"),
    [("saturate", [1, 448, 448, 448, -448, 448, np.nan]), ("round", [1, 448, 448, *[np.nan] * 4])],
)
def test_saturation_is_offered_and_reported(source: Path, tmp_path: Path, overflow: Any, expected: list[float]) -> None:
    with pytest.warns(sw.ShardwiseWarning, match="tensor 'w': 3 values"):
        report = sw.reshard_checkpoint(source, tmp_path / "b", dtype="float8_e4m3fn", overflow=overflow)
    assert len(report.warnings) == 1
    assert "tensor 'w': 3 values" in report.warnings[0]
    with sw.open_checkpoint(tmp_path / "b") as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("w").astype("f8"), expected)


def test_the_command_says_it_and_nothing_else(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["reshard", str(source), str(tmp_path / "b"), "--dtype", "float8_e4m3fn", "--no-sync", "--quiet"]
    assert main(arguments) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "--overflow saturate takes the largest value instead" in said[0]
    assert main([*arguments, "--overflow", "saturate"]) == 0
    assert [line.split(":")[1:3] for line in capsys.readouterr().err.splitlines()] == [[" warning", " tensor 'w'"]]


def test_an_answer_that_is_none(source: Path, tmp_path: Path) -> None:
    with pytest.raises(sw.LayoutError, match="overflow is 'clip'; it must be one of 'refuse', 'saturate', 'round'"):
        sw.reshard_checkpoint(source, tmp_path / "b", overflow="clip")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["f4", "f8", "bfloat16"])
def test_negative_values_have_no_place_in_a_dtype_without_a_sign(given: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(ml_dtypes.float8_e8m0fnu)
    values = np.array([1.0, 4.0, -2.0], given if given != "bfloat16" else ml_dtypes.bfloat16)
    with pytest.raises(sw.LayoutError, match=r"has no negative values, .* overflow='round' makes them NaN"):
        converted_values(values, dtype, "saturate")
    made, lost = converted_values(values, dtype, "round")  # What is advised.
    assert (made.astype("f4")[:2].tolist(), bool(np.isnan(made.astype("f4")[2])), lost) == ([1, 4], True, 1)
    made, lost = converted_values(values[:2], dtype, "saturate")
    assert (made.astype("f4").tolist(), lost) == ([1, 4], 0)


def test_what_is_converted_is_of_another_floating_point_dtype() -> None:
    def is_converted(stored: str, to: str | None) -> bool:
        tensor: Any = SimpleNamespace(known_dtype=DTYPES[stored], dtype=stored)
        return convert.is_converted(tensor, None if to is None else DTYPES[to])

    assert is_converted("float32", "float16")
    assert is_converted("bfloat16", "float32")
    assert not is_converted("float32", "float32")
    assert not is_converted("float32", None)
    assert not is_converted("int32", "float16")
    assert not is_converted("bool", "float16")
