"""One notion of dtype names, wherever a dtype is taken."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import shardwise as sw
from shardwise._dtypes import CODES, DTYPES, bits_of, bytes_for, dtype_of, find_dtype, itemsize_of

from .store.conftest import encode

PARTITION = sw.TensorLayout(("x",), sw.DeviceMesh((2,), ("x",))).partition((6,))


@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if dtype.origin is not None])
def test_all_names_of_a_dtype_mean_the_same(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    names: list[Any] = [name, f"torch.{name}", dtype, dtype.type, *([DTYPES[name].code] if DTYPES[name].code else [])]
    for other in names:
        assert dtype_of(other) == dtype
        assert bits_of(other) == 8 * itemsize_of(other) == 8 * dtype.itemsize
        assert PARTITION.nbytes(other).tolist() == [3 * dtype.itemsize] * 2
        found = find_dtype(other)
        assert found is not None
        assert found.name == name


def test_frameworks_dtypes_are_known_by_their_text() -> None:
    # As PyTorch's are: `str(torch.float32)`; the module and the name of the class are what tells them.
    kind = type("dtype", (), {"__module__": "torch", "__str__": lambda self: "torch.float8_e5m2"})
    assert bits_of(kind()) == 8
    assert dtype_of(kind()) == np.dtype(ml_dtypes.float8_e5m2)


def test_numpy_s_own_texts_keep_numpy_s_meaning() -> None:
    for text in ("i8", "u8", "f4", "f8", "c8", ">f4", "<i2", "?", "S3", "V7", "i4,f8", "object", "float", "int"):
        assert dtype_of(text) == np.dtype(text)
    for array in (np.dtype("U8"), np.dtype("f4,f4"), np.dtype(">i2")):
        assert dtype_of(array) is array
        assert bits_of(array) == 8 * array.itemsize


def test_packed_elements_have_bits_but_no_bytes() -> None:
    assert [bits_of(code) for code in ("F4", "F6_E2M3", "F6_E3M2", "complex32")] == [4, 6, 6, 32]
    with pytest.raises(TypeError, match=r"F4.*4 bits"):
        itemsize_of("F4")
    with pytest.raises(TypeError, match="packed"):
        dtype_of("F4")
    assert PARTITION.nbytes("F4").tolist() == [2, 2]
    assert [bytes_for(count, 6) for count in range(6)] == [0, 1, 2, 3, 3, 4]
    assert bytes_for(2**63 - 1, 8) == 2**63 - 1


@pytest.mark.parametrize("wrong", ["floaty", "float32 ", "torch.", "F5", "x" * 10**6, 5, object(), SimpleNamespace()])
def test_what_is_no_dtype_is_named_and_shortened(wrong: object) -> None:
    with pytest.raises(TypeError, match="dtype must be a dtype") as caught:
        bits_of(wrong)
    assert len(str(caught.value)) < 600


def test_a_checkpoint_s_own_entries_are_taken(tmp_path: Path) -> None:
    header = {
        "w": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [0, 16]},
        "q": {"dtype": "F4", "shape": [6], "data_offsets": [16, 19]},
        "u": {"dtype": "U8", "shape": [2], "data_offsets": [19, 21]},
    }
    path = tmp_path / "model.safetensors"
    path.write_bytes(encode(header, bytes(21)))
    rules = sw.LayoutMap(sw.DeviceMesh((2,), ("x",)))
    rules["w|q"] = ("x",)
    rules["w"] = ("x", None)
    rules["q"] = ("x",)
    del rules["w|q"]
    with sw.open_checkpoint(path) as checkpoint:
        report = rules.report(checkpoint)
        assert [(t.name, t.dtype, t.nbytes, t.bytes_per_device) for t in report.tensors] == [
            ("w", "bfloat16", 16, 8), ("q", "F4", 3, 2), ("u", "uint8", 2, 2),
        ]  # fmt: skip
        assert report.device_bytes is not None
        assert report.device_bytes.tolist() == [12, 12]
        layouts = rules.apply(checkpoint)
        assert {name: layout.axes for name, layout in layouts.items()} == {
            "w": ("x", None), "q": ("x",), "u": (None,),
        }  # fmt: skip
        assert PARTITION.nbytes(checkpoint["w"].dtype).tolist() == [6, 6]


@pytest.mark.heavy
def test_sizes_need_no_ml_dtypes_and_no_import_of_it() -> None:
    code = """
import sys; sys.modules["ml_dtypes"] = None
import shardwise as sw
mesh = sw.DeviceMesh((2,), ("x",))
p, q = (sw.TensorLayout(axes, mesh).partition((6, 4)) for axes in (("x", None), (None, "x")))
plan = sw.plan_reshard(p, q)
assert p.nbytes("bfloat16").tolist() == [24, 24]
assert plan.total_bytes("BF16") == plan.total_bytes("float16") > 0
rules = sw.LayoutMap(mesh)
assert rules.report({"a": ((6,), "torch.bfloat16")}).tensors[0].nbytes == 12
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    ready = 'import shardwise as sw; print(sw.Variable((2,), "bfloat16", lambda s, d: __import__("numpy").ones(s, d)))'
    subprocess.run([sys.executable, "-c", ready], check=True)


@pytest.mark.heavy
def test_a_name_means_the_same_before_and_after_ml_dtypes_is_imported() -> None:
    code = """
import shardwise as sw
from shardwise._dtypes import bits_of
import sys
def known(name):
    try:
        return bits_of(name)
    except TypeError:
        return None
names = sys.argv[1].split()
before = [known(name) for name in names]
assert "ml_dtypes" not in sys.modules
import ml_dtypes, numpy as np
assert before == [known(name) for name in names] == [8 * np.dtype(name).itemsize for name in names], before
"""
    names = [name for name in dir(ml_dtypes) if _is_dtype(getattr(ml_dtypes, name))]
    assert {"bfloat16", "int4", "float6_e3m2fn"} <= set(names)
    subprocess.run([sys.executable, "-c", code, " ".join(names)], check=True)
    for name in set(names) - {"complex32"}:  # Of PyTorch, which numpy lacked for long.
        assert dtype_of(name) == np.dtype(getattr(ml_dtypes, name))


def _is_dtype(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, np.generic)


def test_the_codes_are_those_of_the_package() -> None:
    assert {code for code, dtype in CODES.items() if dtype.bits % 8} == {"F4", "F6_E2M3", "F6_E3M2"}
