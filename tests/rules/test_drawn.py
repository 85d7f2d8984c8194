"""The picture of a report: the kinds of its tensors, and the bytes of each kind and of each device."""

from __future__ import annotations

import pytest

import shardwise as sw
from shardwise.rules.drawn import kind_number, report_picture

CUT, BY_A_RULE, NO_RULE, NO_PLACE = range(4)

#: Shapes, dtypes, and what becomes of each.
TENSORS = {
    "cut.0": ((4, 8), "float32", CUT),
    "cut.1": ((2, 8), "int8", CUT),
    "kept": ((3,), "int16", BY_A_RULE),
    "free": ((5,), "int8", NO_RULE),
    "free.empty": ((0,), "int8", NO_RULE),
    "odd.cut": ((2, 7), "int8", NO_PLACE),
    "both": ((11,), "int8", NO_PLACE),
    "kept.flat": ((2, 2), "int8", NO_PLACE),
}


def report(mesh: sw.DeviceMesh | None, **more: object) -> sw.rules.LayoutReport:
    rules = sw.LayoutMap(mesh)
    rules["cut"], rules["kept"], rules["bo"], rules["th"] = (None, "tp"), (None,), (None,), (None,)
    return rules.report({**{name: (shape, dtype) for name, (shape, dtype, _) in TENSORS.items()}, **more})


MESH = sw.DeviceMesh((2, 4), ("dp", "tp"))


def test_what_happens_to_each_tensor() -> None:
    assert [kind_number(tensor) for tensor in report(MESH).tensors] == [kind for _, _, kind in TENSORS.values()]
    # Without a mesh none has a place, except what no rule matches: that is replicated on any.
    kinds = [kind_number(tensor) for tensor in report(None).tensors]
    assert kinds == [NO_RULE if kind == NO_RULE else NO_PLACE for _, _, kind in TENSORS.values()]
    partial = sw.LayoutMap(MESH)
    partial["sum"] = sw.TensorLayout((None,), unreduced=("dp",))
    assert [kind_number(tensor) for tensor in partial.report({"sum": (8,)}).tensors] == [CUT]


def test_bars_of_the_kinds_and_of_the_devices() -> None:
    made = report(MESH)
    picture = report_picture(made)
    (view,) = picture.views
    kinds, devices = view.panels
    assert kinds.down is not None
    # 128 and 16 bytes are cut, 6 kept by a rule, 5 and 0 free; 14, 11 and 4 cannot be placed.
    assert [span.text for span in kinds.down.spans] == [
        "cut (2): 144 B",
        "replicated by a rule (1): 6 B",
        "replicated, no rule matches (2): 5 B",
        "cannot be placed (3): 29 B",
    ]
    assert [(tile.across, tile.down) for tile in kinds.tiles] == [
        ((0, 144), (0, 1)),
        ((0, 6), (1, 2)),
        ((0, 5), (2, 3)),
        ((0, 29), (3, 4)),
    ]
    # Each device: a quarter of 144, and 11.
    assert [(tile.across, tile.caption) for tile in devices.tiles] == [((0, 47), "47 B each")]
    count = len(made.warnings)
    assert view.captions == (*made.totals, f"{count} warnings")
    assert picture.about.endswith(f"; {count} warnings.")


@pytest.mark.heavy
@pytest.mark.parametrize(("size", "panels"), [(2**20, 2), (2**21, 1)])
def test_devices_are_drawn_up_to_a_million(size: int, panels: int) -> None:
    rules = sw.LayoutMap(sw.DeviceMesh((size,), ("x",)))
    rules["w"] = ("x",)
    picture = report_picture(rules.report({"w": ((size,), "int8"), "v": ((2,), "int8")}))
    assert len(picture.views[0].panels) == panels
    assert picture.views[0].captions[-1] == "1 warning"


def test_without_bytes_there_are_no_bars() -> None:
    picture = report_picture(report(MESH, more=(4,)))
    assert (picture.views[0].panels, picture.legend) == ((), ())
    only_kinds = report_picture(report(None))
    assert [len(view.panels) for view in only_kinds.views] == [1]


def test_a_layout_map_shows_its_rules() -> None:
    rules = sw.LayoutMap(MESH, default=sw.TensorLayout((None,)))
    rules["a|<b>"] = ("dp", "tp")
    rules["c"] = sw.LayoutRule((None, "tp"), uneven="ceil")
    html = rules._repr_html_()
    assert "LayoutMap of 2 rules on dp=2, tp=4; a rule matches by search" in html
    right = '<td style="text-align:right">'
    assert f"<tr><td>a|&lt;b&gt;</td><td>('dp', 'tp')</td>{right}2 × 4</td><td></td></tr>" in html
    assert f"<tr><td>c</td><td>(None, 'tp')</td>{right}1 × 4</td><td>ceil</td></tr>" in html
    assert "what no rule matches: (None,)" in html
    unbound = sw.LayoutMap()
    unbound["x"] = ("tp",)
    assert f"<td>('tp',)</td>{right}?</td>" in unbound._repr_html_()
