from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import DeviceMesh, LayoutError, LayoutMap, LayoutRule, SizeOverflowError, TensorLayout, packed
from shardwise._text import bytes_text
from shardwise.layout import UnevenRule
from shardwise.rules.problems import Clash, IndivisibleDim, RankMismatch

MESH = DeviceMesh((2, 4), ("data", "model"))


def rules(mesh: DeviceMesh | None = MESH) -> LayoutMap:
    layout_map = LayoutMap(mesh)
    layout_map["kernel$"] = (None, "model")
    layout_map["bias$"] = ("model",)
    layout_map["embedding$"] = (("data", "model"), None)
    return layout_map


class TestTensors:
    def test_each_name_has_its_rule_layout_and_bytes(self) -> None:
        report = rules().report(
            {
                "dense/kernel": ((6, 8), "float32"),
                "dense/bias": ((8,), np.float16),
                "embedding": ((16, 6), "int8"),
                "scale": ((6,), "float32"),
            }
        )
        # Bytes by hand: (6, 8/4) · 4; (8/4,) · 2; (16/8, 6) · 1; all 6 · 4. In all: on 8 devices each.
        expected = [
            ("dense/kernel", "kernel$", (None, "model"), (1, 4), (6, 2), 192, 48, 384),
            ("dense/bias", "bias$", ("model",), (4,), (2,), 16, 4, 32),
            ("embedding", "embedding$", (("data", "model"), None), (8, 1), (2, 6), 96, 12, 96),
            ("scale", None, (None,), (1,), (6,), 24, 24, 192),
        ]
        for tensor, values in zip(report.tensors, expected, strict=True):
            assert tensor.layout is not None
            assert tensor.layout.device_mesh == MESH
            assert values == (
                tensor.name,
                tensor.rule,
                tensor.layout.axes,
                tensor.num_shards,
                tensor.shard_shape,
                tensor.nbytes,
                tensor.bytes_per_device,
                tensor.bytes_total,
            )
        assert [tensor.dtype for tensor in report.tensors] == ["float32", "float16", "int8", "float32"]
        assert [tensor.is_replicated for tensor in report.tensors] == [False, False, False, True]
        assert report.nbytes == 192 + 16 + 96 + 24
        assert report.replicated_share == 24 / 328
        assert report.device_bytes is not None
        assert report.device_bytes.tolist() == [48 + 4 + 12 + 24] * 8
        with pytest.raises(ValueError, match="read-only"):
            report.device_bytes[0] = 1

    def test_names_can_be_given_in_many_ways(self) -> None:
        array = np.ones((6, 8), np.float32)

        class Dtype:
            itemsize = 4

            def __str__(self) -> str:
                return "float32"

        ways: list[Any] = [
            {"kernel": array},
            {"kernel": ([6, 8], "f4")},
            {"kernel": ((np.int64(6), 8), np.dtype("float32"))},
            {"kernel": (np.array([6, 8]), Dtype())},
            [("kernel", array)],
            [["kernel", (6, 8), np.float32]],
            (("kernel", ((6, 8), "float32")) for _ in range(1)),
        ]
        reports = [rules().report(way) for way in ways]
        assert [report.tensors for report in reports] == [reports[0].tensors] * len(ways)
        assert reports[0].tensors[0].bytes_per_device == 48

    def test_without_a_dtype_there_are_no_bytes(self) -> None:
        report = rules().report({"kernel": (6, 8), "bias": ((8,), "int8"), "scalar": ()})
        kernel, bias, scalar = report.tensors
        assert (kernel.dtype, kernel.nbytes, kernel.bytes_per_device, kernel.bytes_total) == (None,) * 4
        assert kernel.shard_shape == (6, 2)
        assert bias.bytes_per_device == 2
        assert scalar.shard_shape == ()
        assert (report.nbytes, report.device_bytes, report.replicated_share) == (None, None, None)
        assert "matches no rule, so every device holds it whole: 'scalar'" in str(report)

    def test_without_a_mesh_nothing_has_a_place(self) -> None:
        report = rules(None).report({"kernel": ((6, 8), "int8"), "x": ((2,), "int8")})
        assert [tensor.num_shards for tensor in report.tensors] == [None, None]
        assert [tensor.shard_shape for tensor in report.tensors] == [None, None]
        assert [tensor.bytes_per_device for tensor in report.tensors] == [None, None]
        assert report.tensors[1].layout == TensorLayout((None,))
        assert (report.device_mesh, report.device_bytes, report.replicated_share) == (None, None, None)
        assert report.nbytes == 50

    def test_the_mesh_that_the_layouts_share(self) -> None:
        layout_map = LayoutMap()
        layout_map["kernel"] = TensorLayout((None, "model"), MESH)
        report = layout_map.report({"kernel": ((6, 8), "int8"), "x": ((2,), "int8")})
        assert report.device_mesh == MESH
        assert report.device_bytes is not None
        assert report.device_bytes.tolist() == [14] * 8

    def test_layouts_on_several_meshes_have_no_common_total(self) -> None:
        layout_map = rules()
        layout_map["other"] = TensorLayout(("x",), DeviceMesh((3,), ("x",)))
        report = layout_map.report({"kernel": ((6, 8), "int8"), "other": ((6,), "int8")})
        assert report.device_bytes is None
        assert [tensor.bytes_total for tensor in report.tensors] == [96, 6]

    def test_parts_of_packed_dims_are_counted_one_by_one(self) -> None:
        """Rows of gate and up: 3 and 2 of 5 each. Heads of 128 rows: 4 of 64, and of 8 one each, twice."""
        layout_map = LayoutMap(DeviceMesh((2,), ("tp",)))
        layout_map["gate_up"] = (packed.parse("gate:(n@tp/ceil) + up:(n@tp/ceil)"),)
        report = layout_map.report({"gate_up": ((10,), "int16")})
        assert report.device_bytes is not None
        assert report.device_bytes.tolist() == [12, 8]
        assert (report.tensors[0].is_uneven, report.tensors[0].bytes_total) == (True, 20)
        layout_map = LayoutMap(DeviceMesh((16,), ("tp",)))
        layout_map["qkv"] = (packed.qkv(64, 8, 128, "tp"),)
        report = layout_map.report({"qkv": ((10240,), "int16")})
        assert report.device_bytes is not None
        assert report.device_bytes.tolist() == [2 * 6 * 128] * 16
        assert (report.tensors[0].is_uneven, report.tensors[0].bytes_total) == (False, 16 * 2 * 6 * 128)

    def test_packed_dims_on_meshes_too_large_to_list(self) -> None:
        layout_map = LayoutMap(DeviceMesh((2**40,), ("tp",)))
        layout_map["qkv"] = (packed.qkv(64, 8, 128, "tp:(1)8"),)
        (tensor,) = layout_map.report({"qkv": ((10240,), "int16")}).tensors
        assert (tensor.bytes_per_device, tensor.bytes_total, tensor.is_uneven) == (2 * 10 * 128, None, True)

    def test_an_unreduced_tensor_is_not_replicated(self) -> None:
        layout_map = LayoutMap(MESH)
        layout_map["partial"] = TensorLayout((None,), unreduced=("data",))
        assert not layout_map.report({"partial": (8,)}).tensors[0].is_replicated

    def test_no_names(self) -> None:
        report = LayoutMap(MESH).report({})
        assert report.ok
        assert (report.tensors, report.nbytes, report.replicated_share) == ((), 0, None)
        assert report.device_bytes is not None
        assert report.device_bytes.tolist() == [0] * 8
        assert "0 tensors" in str(report)


class TestProblems:
    def test_names_that_no_rule_matches(self) -> None:
        report = rules().report({f"scale_{i}": ((1024,), "int8") for i in range(5)} | {"kernel": ((2, 4), "int8")})
        assert [tensor.name for tensor in report.unmatched] == [f"scale_{i}" for i in range(5)]
        assert report.warnings[0] == (
            "5 names match no rule, so every device holds them whole (5.0 KiB): "
            "'scale_0', 'scale_1', 'scale_2' and 2 more"
        )

    def test_rules_that_apply_to_no_name(self) -> None:
        report = rules().report({"a/kernel": ((2, 4), "int8"), "embedding$": ((8, 1), "int8")})
        assert report.unused_rules == ("bias$",)
        assert report.warnings == ("rule 'bias$' applies to no name",)
        assert not report.ok

    def test_an_optional_rule_may_apply_to_no_name(self) -> None:
        layout_map = LayoutMap(MESH, replicated=["data"])
        layout_map["eh_proj$"] = LayoutRule(("model", None), optional=True)
        layout_map["kernel$"] = (None, "model")
        report = layout_map.report({"a/kernel": ((2, 4), "int8")})
        assert (report.unused_rules, report.warnings, report.ok) == ((), (), True)
        # What else is wrong with it is still said.
        report = layout_map.report({"a/kernel": ((2, 4), "int8"), "eh_proj": ((3, 4), "int8")})
        assert [problem.rule for problem in report.indivisible] == ["eh_proj$"]

    def test_many_rules_that_apply_to_no_name_share_a_line(self) -> None:
        layout_map = LayoutMap(MESH)
        for key in ("a", "b", "c", "d"):
            layout_map[key] = (None,)
            if key == "c":
                three = layout_map.report({}).warnings
        assert three == tuple(f"rule {key!r} applies to no name" for key in "abc")
        assert layout_map.report({}).warnings == ("4 rules apply to no name: 'a', 'b', 'c' and 1 more",)

    def test_rules_that_clash(self) -> None:
        layout_map = rules()
        layout_map["dense"] = (None, None)
        report = layout_map.report({"dense/kernel": ((2, 4), "int8"), "bias": (4,), "embedding": (8, 2)})
        assert report.clashes == (Clash("dense/kernel", ("kernel$", "dense")),)
        tensor = report.tensors[0]
        assert (tensor.rule, tensor.layout, tensor.num_shards, tensor.nbytes) == (None, None, None, 8)
        assert tensor not in report.unmatched
        assert report.unused_rules == ()
        assert report.warnings == ("'dense/kernel' matches 2 rules, but only one may match: 'kernel$', 'dense'",)

    def test_dims_that_do_not_divide(self) -> None:
        names = {"embedding": ((12, 3), "int8"), "kernel": ((3, 9), "int8"), "bias": ((8,), "int8")}
        report = rules().report(names)
        assert report.indivisible == (
            IndivisibleDim("embedding", "embedding$", 0, 12, 8),
            IndivisibleDim("kernel", "kernel$", 1, 9, 4),
        )
        assert report.warnings == (
            "'embedding': dim 0 has 12 elements, which the 8 shards of its rule 'embedding$' do not divide evenly",
            "'kernel': dim 1 has 9 elements, which the 4 shards of its rule 'kernel$' do not divide evenly",
        )
        assert [tensor.name for tensor in report.placed] == ["bias"]
        assert report.device_bytes is not None
        assert report.device_bytes.tolist() == [2] * 8

    # Shards of 12 rows over (2, 4) and of 9 columns over 4, by hand from the uneven rules.
    @pytest.mark.parametrize(
        ("uneven", "rows", "columns"),
        [
            ("ceil", [2, 2, 2, 2, 2, 2, 0, 0], [3, 3, 3, 0]),
            ("chunk", [2, 2, 2, 0, 2, 2, 2, 0], [3, 3, 3, 0]),
            ("balanced", [2, 2, 2, 2, 1, 1, 1, 1], [3, 2, 2, 2]),
        ],
    )
    def test_other_uneven_rules_cut_them(self, uneven: UnevenRule, rows: list[int], columns: list[int]) -> None:
        names = {"embedding": ((12, 3), "int8"), "kernel": ((5, 9), "int16"), "bias": ((8,), "int8")}
        report = rules().report(names, uneven=uneven)
        assert report.ok
        assert len(report.indivisible) == 2
        assert [tensor.shard_shape for tensor in report.tensors] == [(2, 3), (5, 3), (2,)]
        assert [tensor.is_uneven for tensor in report.tensors] == [True, True, False]
        assert report.device_bytes is not None
        assert report.device_bytes.tolist() == [rows[i] * 3 + columns[i % 4] * 10 + 2 for i in range(8)]

    def test_ranks_that_differ(self) -> None:
        report = rules().report({"kernel": (4,), "a/kernel": (2, 4), "bias": (4,), "embedding": (8, 1)})
        assert report.rank_mismatches == (RankMismatch("kernel", "kernel$", 1, 2),)
        assert report.warnings == ("'kernel' has rank 1, but the layout of its rule 'kernel$' has rank 2",)
        assert report.tensors[0].num_shards is None

    def test_a_warning_is_one_line(self) -> None:
        report = rules().report({"a\nb": (3,), "c\nkernel": (1,)})
        assert all("\n" not in warning for warning in report.warnings)

    def test_a_tensor_of_no_elements_divides(self) -> None:
        report = rules().report({"kernel": ((0, 4), "int8"), "bias": ((0,), "int8"), "embedding": ((0, 2**62), "int8")})
        assert report.ok
        assert report.nbytes == 0


class TestBadInput:
    @pytest.mark.parametrize(
        ("names", "error", "said"),
        [
            ({3: (2,)}, TypeError, "names"),
            (["kernel"], TypeError, "'kernel'"),
            ([("kernel",)], TypeError, r"\('kernel',\)"),
            ([("kernel", (2,), "int8", 3)], TypeError, "names"),
            (3, TypeError, "names"),
            ({"kernel": 3}, TypeError, "shape of 'kernel'.*3"),
            ({"kernel": "ab"}, TypeError, "shape of 'kernel'.*'ab'"),
            ({"kernel": (2.0,)}, TypeError, "shape of 'kernel'"),
            ({"kernel": (True, 2)}, TypeError, "shape of 'kernel'"),
            ({"kernel": (3, "float32")}, TypeError, "shape of 'kernel'"),
            ({"kernel": ((3,), "float33")}, TypeError, "dtype of 'kernel'.*'float33'"),
            ({"kernel": ((3,), 3.5)}, TypeError, "dtype of 'kernel'.*3.5"),
            ({"kernel": (2, -1)}, LayoutError, r"the shape of 'kernel'\[1\] is -1"),
            ([("kernel", (2,)), ("kernel", (2,))], LayoutError, "'kernel' twice"),
            ({"kernel": (0, 2**63)}, SizeOverflowError, "dim 1 of 'kernel'"),
            ({"kernel": (2**32, 2**31)}, SizeOverflowError, "elements of 'kernel'"),
            ({"kernel": ((2**31, 2**31), "int16")}, SizeOverflowError, "bytes of 'kernel'"),
        ],
    )
    def test_names(self, names: Any, error: type[Exception], said: str) -> None:
        with pytest.raises(error, match=said):
            rules().report(names)

    def test_uneven(self) -> None:
        with pytest.raises(LayoutError, match=r"uneven is 'odd'.*'even', 'ceil', 'chunk', 'balanced', 'floor'"):
            rules().report({}, uneven="odd")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="uneven must be a string, got 3"):
            rules().report({}, uneven=3)  # type: ignore[arg-type]

    def test_more_on_a_device_than_a_number_holds(self) -> None:
        names = {f"x{i}": ((2**62,), "int8") for i in range(2)}
        with pytest.raises(SizeOverflowError, match="bytes on a device"):
            _ = LayoutMap(MESH).report(names).device_bytes


class TestForms:
    def test_json(self) -> None:
        layout_map = rules()
        layout_map["dense"] = (None, None)
        report = layout_map.report(
            {"dense/kernel": (2, 4), "kernel": ((6, 9), "int8"), "bias": ((2, 2), "int8"), "x": ((1,), "int8")}
        )
        data = json.loads(json.dumps(report.to_dict()))
        assert data["mesh"] == {"shape": [2, 4], "axis_names": ["data", "model"]}
        assert data["clashes"] == [{"name": "dense/kernel", "rules": ["kernel$", "dense"]}]
        assert data["indivisible"] == [{"name": "kernel", "rule": "kernel$", "dim": 1, "size": 9, "num_shards": 4}]
        assert data["rank_mismatches"] == [{"name": "bias", "rule": "bias$", "rank": 2, "layout_rank": 1}]
        assert data["unmatched"] == ["x"]
        assert data["unused_rules"] == ["embedding$"]
        assert data["uneven"] == "even"
        assert data["default"] is None
        assert data["warnings"] == list(report.warnings)
        assert not data["ok"]
        assert data["tensors"][3] == {
            "name": "x",
            "shape": [1],
            "dtype": "int8",
            "rule": None,
            "layout": [None],
            "num_shards": [1],
            "shard_shape": [1],
            "uneven": "even",
            "nbytes": 1,
            "bytes_per_device": 1,
            "bytes_total": 8,
        }
        embedding = rules().report({"embedding": ((8, 2), "int8")}).to_dict()
        assert embedding["tensors"][0]["layout"] == [["data", "model"], None]
        assert embedding["device_bytes"] == [2] * 8

    def test_text(self) -> None:
        report = rules().report({"dense/kernel": ((6, 8), "float32"), "x\n": ((1024,), "int8")})
        assert str(report).splitlines() == [
            "tensor        shape    dtype    layout           shard    bytes per device  rule",
            "dense/kernel  (6, 8)   float32  (None, 'model')  (6, 2)               48 B  'kernel$'",
            r"x\n           (1024,)  int8     (None,)          (1024,)           1.0 KiB",
            "",
            "2 tensors, 1.2 KiB",
            "each device holds 1.0 KiB of 1.2 KiB, 88.2%",
            "all 8 devices hold 8.4 KiB, 7.05 times the tensors' size",
            "84.2% of the bytes are on every device",
            r"warning: 1 name matches no rule, so every device holds it whole (1.0 KiB): 'x\n'",
            "warning: no rule that applies uses the axis 'data', so everything is held 2 times along it; if that is "
            "wanted, leave it out of the mesh, or say replicated = ['data']",
            "warning: rule 'bias$' applies to no name",
            "warning: rule 'embedding$' applies to no name",
        ]

    @pytest.mark.parametrize(
        ("uneven", "lengths"), [("ceil", [3, 3, 3, 0]), ("chunk", [3, 2, 2, 2]), ("balanced", [3, 2, 2, 2])]
    )
    def test_totals_of_what_is_cut_unevenly(self, uneven: UnevenRule, lengths: list[int]) -> None:
        """9 elements over 2 x 2 devices, by hand."""
        layout_map = LayoutMap(DeviceMesh((2, 2), ("data", "model")))
        layout_map["a"] = (("data", "model"),)
        report = layout_map.report({"a1": ((9,), "int16"), "a2": ((9,), "int8")}, uneven=uneven)
        device_bytes = report.device_bytes
        assert device_bytes is not None
        assert device_bytes.tolist() == [3 * length for length in lengths]
        least, most = 3 * min(lengths), 3 * max(lengths)
        assert report.totals == (
            "2 tensors, 27 B",
            f"each device holds {least} B to {most} B of 27 B, {100 * most / 27:.3g}%",
            "all 4 devices hold 27 B, 1.00 times the tensors' size",
            "0% of the bytes are on every device",
        )

    def test_totals_count_replicas_of_what_is_cut_unevenly(self) -> None:
        layout_map = LayoutMap(DeviceMesh((2, 3), ("data", "model")))
        layout_map["a"] = ("data",)
        report = layout_map.report({"a": ((5,), "int8"), "b": ((7,), "int8")}, uneven="ceil")
        assert report.totals[1:3] == (
            "each device holds 9 B to 10 B of 12 B, 83.3%",
            "all 6 devices hold 57 B, 4.75 times the tensors' size",
        )

    def test_bits_of_uneven_shards_are_whole_bytes_on_each_device(self) -> None:
        """9 elements of half a byte in shards of 3, 3, 3 and 0, and of 2 bytes each: 2 bytes and 6, in each tensor."""
        layout_map = LayoutMap(DeviceMesh((4,), ("x",)))
        layout_map["a"] = ("x",)
        names = {f"a{i}": ((9,), dtype) for i, dtype in enumerate(("F4", "F4", "int16", "int16"))}
        report = layout_map.report(names, uneven="ceil")
        assert report.device_bytes is not None
        assert report.device_bytes.tolist() == [2 + 2 + 6 + 6] * 3 + [0]
        assert [tensor.bytes_per_device for tensor in report.tensors] == [2, 2, 6, 6]

    def test_a_mesh_that_no_array_can_list(self) -> None:
        layout_map = LayoutMap(DeviceMesh((2**61, 2), ("data", "model")))
        layout_map["kernel"] = (None, "model")
        report = layout_map.report({"kernel": ((4, 6), "float32"), "bias": ((5,), "int8")})
        # A half of 96 bytes, and the whole of 5.
        assert report.totals[1] == "a device holds at most 53 B of 101 B"
        assert report.to_dict()["device_bytes"] is None
        assert layout_map.report({"bias": ((0,), "int8")}).totals[1] == "a device holds at most 0 B of 0 B"
        with pytest.raises((SizeOverflowError, MemoryError)):
            _ = report.device_bytes

    @given(st.integers(0, 2**70))
    def test_bytes_are_written_to_one_decimal(self, count: int) -> None:
        number, unit = bytes_text(count).split()
        scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"].index(unit)
        assert float(number) == pytest.approx(count / scale, abs=0.051)
        assert 1 <= float(number) <= 1024 or unit in ("B", "EiB")
