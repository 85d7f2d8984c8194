"""What the dialects that need no framework do at the ends of their ranges, and with what cuts nothing."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise import DeviceMesh, LayoutError, ParseError, SizeOverflowError, TensorLayout, packed
from shardwise.interop._plain import whole_axes_layout
from shardwise.interop._strides import StridedCut, cut_of, read_factors, split_factors
from shardwise.interop.hlo import from_hlo, parse_hlo, to_hlo
from shardwise.interop.megatron import from_rank_offsets
from shardwise.interop.shardy import from_shardy, to_shardy
from tests.checks import refused

MESH = DeviceMesh((2, 4), ("dp", "tp"))


class TestHlo:
    def test_a_rank_is_a_signed_number_of_64_bits(self) -> None:
        for rank in (2**63, 2**64):
            with refused(SizeOverflowError, "rank is", 2**63 - 1):
                from_hlo("{replicated}", MESH, rank)

    def test_so_is_the_product_of_sizes(self) -> None:
        # 2**63 - 1 is 49 times 188,232,082,384,791,343.
        sizes = "49,188232082384791343"
        assert parse_hlo(f"{{devices=[{sizes}]<=[{sizes}]T(0,1)}}").num_devices == 2**63 - 1
        for sizes in (f"{2**59},16", "3037000500,3037000500"):
            with refused(ParseError, "over 2**63 - 1"):
                parse_hlo(f"{{devices=[{sizes}]<=[8]}}")

    def test_a_text_that_is_not_a_sharding_is_shown(self) -> None:
        for text in ("", "{", "}", "{}", "{nonsense}", "devices=[2]<=[2]"):
            with refused(ParseError, repr(text)):
                parse_hlo(text)

    def test_a_tile_of_a_tensor_without_dims_is_all_of_it(self) -> None:
        assert parse_hlo("{devices=[2]<=[2] last_tile_dim_replicate}").boxes(()).shape == (2, 0, 2)

    def test_partial_sums_are_over_axes_that_have_several_devices(self) -> None:
        mesh = DeviceMesh((2, 1), ("x", "one"))
        assert from_hlo("{unreduced}", mesh, 1) == TensorLayout((None,), mesh, unreduced=("x",))

    def test_devices_in_an_order_that_no_axes_give(self) -> None:
        # Along x the index grows by one up to 3, and 4 does not divide 6.
        with refused(LayoutError, "no axes of", "cut dim 0 into 6"):
            from_hlo("{devices=[6]0,1,2,3,5,4}", DeviceMesh((6,), ("x",)))


class TestShardy:
    def test_a_number_of_any_length_is_refused_as_one(self) -> None:
        for digits in ("9" * 21, "9" * 5000):
            with refused(ParseError, "a number below 2**63"):
                from_shardy(f'<@mesh, [{{"dp":(1){digits}}}]>', MESH)
        with pytest.raises((LayoutError, ParseError)):
            from_shardy(f'<@mesh, [{{"dp":(1){"9" * 20}}}]>', MESH)

    @pytest.mark.parametrize("part", ["(0)2", "(1)0", "(0)0", "(1)3", "(4)2"])
    def test_parts_that_an_axis_does_not_have(self, part: str) -> None:
        with pytest.raises((LayoutError, ParseError)):
            from_shardy(f'<@mesh, [{{"tp":{part}}}]>', MESH)

    def test_a_sub_axis_of_one_device_is_not_written(self) -> None:
        layout = TensorLayout((("tp:(2)1", "dp"),), MESH)
        text = to_shardy(layout)
        assert '{"dp"}' in text
        assert "tp" not in text
        assert np.array_equal(from_shardy(text, MESH).boxes((8,)), layout.boxes((8,)))


class TestMegatron:
    def test_a_mesh_of_one_device(self) -> None:
        mesh = DeviceMesh((1,), ("tp",))
        assert from_rank_offsets([[]], mesh, rank=2) == TensorLayout((None, None), mesh)

    def test_dims_and_shards_are_counted_from_0(self) -> None:
        mesh = DeviceMesh((2,), ("tp",))
        for wrong, said in (((-1, 0, 2), "rank is 1"), ((0, -1, 2), "it must be from 0 to 1")):
            with refused(LayoutError, "rank_offsets[1]", said):
                from_rank_offsets([[(0, 0, 2)], [wrong]], mesh, rank=1)


class TestPackedDims:
    def test_what_is_cut_into_one_is_not_packed(self) -> None:
        one, two = (TensorLayout((packed.gate_up("tp"),), DeviceMesh((size,), ("tp",))) for size in (1, 2))
        assert to_hlo(one) == "{replicated}"
        with refused(LayoutError, "its parts are cut separately"):
            to_hlo(two)

    def test_sums_stay_to_be_made(self) -> None:
        layout = TensorLayout((packed.experts(8, "tp"), None), MESH, unreduced=("dp",))
        assert from_hlo(to_hlo(layout), MESH) == TensorLayout(("tp", None), MESH, unreduced=("dp",))

    def test_sub_axes_that_are_a_whole_together_are_one(self) -> None:
        halves = ("tp:(1)2", "tp:(2)2")
        layout = TensorLayout((halves, None), MESH, unreduced=("dp",))
        assert whole_axes_layout(layout, "x") == TensorLayout(("tp", None), MESH, unreduced=("dp",))
        layout = TensorLayout(("dp", None), MESH, unreduced=halves[::-1])
        assert whole_axes_layout(layout, "x") == TensorLayout(("dp", None), MESH, unreduced=("tp",))

    @pytest.mark.parametrize(
        ("text", "outer", "why"),
        [
            ("(2 n@tp)", 2, ""),
            ("(2 n@tp 1)", 2, ""),
            ("(n@tp) + (n@tp)", 2, ""),
            ("(3 8@tp/max4)", 3, ""),
            ("(n@tp) + (2*n@tp)", 0, "segments of several sizes"),
            ("(n@tp) + (8@tp)", 0, "segments of several sizes"),
            ("(2 n@tp 2)", 0, "units stay whole"),
            ("(3 8@tp/max2)", 0, "at most 2"),
            (f"({2**62} 4@tp)", 0, "segments; there must be 1 to"),
        ],
    )
    def test_equal_segments_are_what_pytorch_has(self, text: str, outer: int, why: str) -> None:
        if why:
            with refused(LayoutError, "axes[0] is a packed dim", why):
                cut_of(0, packed.parse(text), MESH)
        else:
            assert cut_of(0, packed.parse(text), MESH) == StridedCut(outer, ("tp",))


def test_a_split_factor_of_one_is_a_plain_shard() -> None:
    assert split_factors(0, StridedCut(1, ("dp", "tp")), MESH) == {"dp": None, "tp": None}
    for factor in (None, 1):
        assert read_factors([("dp", factor), ("tp", None)], MESH) == StridedCut(1, ("dp", "tp"))
