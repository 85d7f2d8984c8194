"""Ordered rules: the first that matches wins, specs are for leading dims, and rules that never win are named.

The law is the loop that the projects have: `re.search`, rule after rule. The rules for names of dims are compared with
Flax, where it is installed, and with the worked example of its documentation.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.errors import LayoutError, ParseError
from shardwise.rules.ordered import logical_layouts

MESH = sw.DeviceMesh((2, 2, 2), ("dp", "fsdp", "mp"))
#: The list of EasyLM for Llama, in its own words.
LLAMA = """
(
    ("transformer/wte/embedding", PS("mp", "fsdp")),
    ("attention/(wq|wk|wv)/kernel", PS("fsdp", "mp")),
    ("attention/wo/kernel", PS("mp", "fsdp")),
    ("feed_forward/w1/kernel", PS("fsdp", "mp")),
    ("feed_forward/w2/kernel", PS("mp", "fsdp")),
    ("feed_forward/w3/kernel", PS("fsdp", "mp")),
    ("attention_norm/kernel", PS(None)),
    ("ffn_norm/kernel", PS(None)),
    ("transformer/ln_f/kernel", PS(None)),
    ("lm_head/kernel", PS("fsdp", "mp")),
    ('.*', PS(None)),
)
"""
PATHS = {
    "transformer/wte/embedding": (64, 32),
    "transformer/h/0/attention/wq/kernel": (32, 32),
    "transformer/h/0/feed_forward/w2/kernel": (96, 32),
    "transformer/h/0/attention_norm/kernel": (32,),
    "transformer/h/0/stacked": (4, 32, 32),
    "step": (),
}


def test_the_first_rule_that_matches_wins() -> None:
    layout_map = sw.LayoutMap.from_partition_rules(LLAMA, MESH)
    assert {path: layout_map.partition(path, shape).layout.axes for path, shape in PATHS.items()} == {
        "transformer/wte/embedding": ("mp", "fsdp"),
        "transformer/h/0/attention/wq/kernel": ("fsdp", "mp"),
        "transformer/h/0/feed_forward/w2/kernel": ("mp", "fsdp"),
        "transformer/h/0/attention_norm/kernel": (None,),
        "transformer/h/0/stacked": (None, None, None),
        "step": (),
    }
    report = layout_map.report(PATHS)
    assert not report.problems
    assert [tensor.layout.axes for tensor in report.tensors if tensor.layout is not None] == [
        layout_map.partition(path, shape).layout.axes for path, shape in PATHS.items()
    ]


WORDS = st.sampled_from(["a", "b", "a/b", "a.*b", ".*", "^b", "b$", "(a|b)c", "c"])
LISTS = st.lists(st.tuples(WORDS, st.sampled_from([(), ("x",), (None, "x"), ("x", "y")])), unique_by=lambda p: p[0])


@given(LISTS, st.text("abc/", min_size=1, max_size=6), st.integers(2, 3))
def test_as_the_loop_of_the_projects(rules: list[Any], path: str, rank: int) -> None:
    """Read, written as a file, as a list again, and pickled: the answers are those of the loop."""
    made = sw.LayoutMap.from_partition_rules(rules)
    file = io.StringIO()
    made.to_toml(file)
    wanted = next((spec for key, spec in rules if re.search(key, path)), None)
    others = (
        sw.LayoutMap.from_toml(io.StringIO(file.getvalue())),
        sw.LayoutMap.from_partition_rules(made.partition_rules()),
        pickle.loads(pickle.dumps(made)),
    )
    for one in (made, *others):
        layout = one.layout_of(path, rank)
        assert (None if layout is None else layout.axes) == (
            None if wanted is None else (*wanted, *(None,) * (rank - len(wanted)))
        )
        assert one == made


@given(LISTS, st.text("abc/", min_size=1, max_size=6), st.sampled_from(["search", "match", "fullmatch"]))
def test_a_map_as_a_list_has_its_answers(rules: list[Any], path: str, match: Any) -> None:
    """Where a map has one: a path that several of its rules match is an error there."""
    layout_map = sw.LayoutMap(match=match, default=("y",))
    layout_map.update(rules)
    if len(layout_map.matching_rules(path)) > 1:
        return
    layout, rule = layout_map[path], ("y",)
    wanted = rule if layout is None else layout.axes
    assert next(spec for key, spec in layout_map.partition_rules() if re.search(key, path)) == wanted


def test_rules_that_never_win_are_named() -> None:
    rules = [("kernel", ("x",)), ("attention/kernel", ("y",)), ("bias", ()), ("head", ())]
    report = sw.LayoutMap.from_partition_rules(rules).report(
        {"a/attention/kernel": (4,), "b/kernel": (4,), "bias": (4,)}
    )
    assert report.warnings == (
        "rule 'attention/kernel' never wins: rule 'kernel' before it takes the name that it matches",
        "rule 'head' applies to no name",
    )
    both = sw.LayoutMap.from_partition_rules([("a", ()), ("b", ()), ("[ab]", ())]).report({"a": (4,), "b": (4,)})
    assert both.warnings == ("rule '[ab]' never wins: rules 'a', 'b' before it take all 2 names that it matches",)
    with pytest.raises(LayoutError, match=r"rules\[1\] never wins: rules\[0\] has the same expression, 'a'"):
        sw.LayoutMap.from_partition_rules([("a", ()), ("a", ("x",))])


@pytest.mark.parametrize(
    ("rules", "error", "said"),
    [
        (
            "__import__('os').system('true')",
            ParseError,
            "is neither a text, None, a tuple nor PS or P or PartitionSpec",
        ),
        ("((", ParseError, "expected the text of a list such as"),
        ([("a",)], TypeError, r"rules\[0\] must be a pair"),
        ([("a", "x")], TypeError, r"rules\[0\] must have a spec of axes for each dim"),
        ([("a", (1,))], LayoutError, r"rules\[0\] leaves dim 0 to the compiler"),
    ],
)
def test_what_is_no_list_of_rules(rules: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        sw.LayoutMap.from_partition_rules(rules)


def test_a_spec_for_more_dims_than_a_tensor_has_is_reported() -> None:
    report = sw.LayoutMap.from_partition_rules([("a", ("x", "y"))], sw.DeviceMesh((2, 2), ("x", "y"))).report(
        {"a": (4,)}
    )
    assert [str(one) for one in report.problems] == ["'a' has rank 1, but the layout of its rule 'a' has rank 2"]


DIMS = ("batch", "length", "heads", "features")
RULES = (("batch", "X"), ("features", "X"), ("heads", "Y"), ("batch", "Z"))


def test_names_of_dims_as_flax_documents_them() -> None:
    mesh = sw.DeviceMesh((2, 2, 2), ("X", "Y", "Z"))
    assert logical_layouts(RULES, {"w": DIMS}, mesh)["w"].axes == ("X", None, "Y", None)
    smaller = sw.DeviceMesh((2, 2), ("Y", "Z"))
    assert logical_layouts(RULES, {"w": DIMS}, smaller)["w"].axes == (None, None, "Y", None)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.one_of(st.none(), st.sampled_from("xyz"), st.just(("x", "y")), st.just(("z",)))
        )
    ),
    st.permutations([*"abc", None]),
)
def test_names_of_dims_as_flax_has_them(rules: list[Any], dims: list[Any]) -> None:
    flax = pytest.importorskip("flax.linen")
    wanted = flax.logical_to_mesh_axes(dims, rules)
    mesh = sw.DeviceMesh((2, 2, 2), ("x", "y", "z"))
    found = logical_layouts(rules, {"w": dims}, mesh)["w"].axes
    normal = [one[0] if isinstance(one, tuple) and len(one) == 1 else one for one in wanted]
    assert list(found) == normal
