"""Factor rules: those of Shardy, the same by computing with views, and one's own."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from typing import Any

import pytest

import shardwise as sw
from shardwise.computation import Einsum, FactorRule, factor_rule
from tests.oracle import computations
from tests.oracle.corpora import Comparison, compared
from tests.prove.factor_rules import OpCase, check_rule, random_case
from tests.prove.subject import Mismatch


def test_rules_are_those_of_shardy() -> None:
    found = Comparison()
    for name, ask in computations.compare_rules(computations.cases_of("rules")):
        found.add(name, compared(False, ask))
    assert found.different == []
    assert found.cases > 350


def test_a_rule_that_differs_is_found() -> None:
    cases = computations.cases_of("rules")
    wrong = next(case for case in cases if case["op"] == "dot_general" and "reduction" in case["rule"]["kinds"])
    wrong["rule"]["kinds"] = ["passthrough"] * len(wrong["rule"]["kinds"])
    (_, ask), *_ = computations.compare_rules([wrong])
    assert "expected" in str(ask())


def test_devices_compute_what_the_rule_says() -> None:
    rng = random.Random(20261126)
    for _ in range(300):
        check_rule(random_case(rng))


#: A rule with one kind changed, and an axis on that factor.
WRONG: list[tuple[OpCase, str, str]] = [
    (
        OpCase(
            "dot_general",
            ((2, 4), (4, 2)),
            ((2, 2),),
            {
                "lhs_batching_dimensions": [],
                "rhs_batching_dimensions": [],
                "lhs_contracting_dimensions": [1],
                "rhs_contracting_dimensions": [0],
            },
        ),
        "([i,k],[k,j])->([i,j])",
        "k",
    ),
    (OpCase("sort", ((4, 2),), ((4, 2),), {"dimension": 0}), "([i,j])->([i,j])", "i"),
    (OpCase("reverse", ((4,),), ((4,),), {"dimensions": [0]}), "([i])->([i])", "i"),
    (OpCase("reduce", ((4, 2), ()), ((2,),), {"dimensions": [0], "body": "maximum"}), "([i,j],[])->([j])", "i"),
    (OpCase("cholesky", ((2, 4, 4),), ((2, 4, 4),), {}), "([b,i,j])->([b,i,j])", "i"),
]


@pytest.mark.parametrize(("case", "text", "factor"), WRONG, ids=lambda value: getattr(value, "op", None))
def test_a_changed_kind_is_noticed(case: OpCase, text: str, factor: str) -> None:
    as_if_passed = FactorRule(text).of(case.operands, case.results)
    for seed in range(5):
        cut = OpCase(case.op, case.operands, case.results, case.attributes, (2,), {factor: ("a0",)}, seed)
        try:
            check_rule(cut, as_if_passed)
        except (Mismatch, ValueError, RuntimeError):
            return
    raise AssertionError("nobody noticed")


def changed(case: OpCase, rng: random.Random) -> tuple[OpCase, FactorRule] | None:
    """Cut a factor in two that the rule has summed, whole or shifted, as if it passed; none if there is no such one."""
    rule = case.rule()
    tensors = (*rule.operands, *rule.results)
    if case.op in ("convolution", "reduce_window"):
        # Windows beside one another, each read from rows of its own, are no shift.
        steps = case.attributes["window_strides"]
        sizes = case.attributes.get("window_dimensions") or [
            size
            for size, name in zip(case.operands[1], case.attributes["rhs_spec"], strict=True)
            if isinstance(name, int)
        ]
        if any(size <= step for size, step in zip(sorted(sizes), sorted(steps), strict=True)):
            return None
    if case.op == "reduce" and case.attributes["body"] in ("and", "or", "maximum", "minimum"):
        return None  # Half of the elements often give what all of them do.
    if case.op == "concatenate" and len(case.operands) == 1:
        return None
    names = [
        name
        for name, kind in rule.kinds.items()
        if kind != "pass"
        and rule.sizes[name] >= 2
        and rule.sizes[name] % 2 == 0
        and any(name in dim for dims in rule.operands for dim in dims)
        and all(dim[0] == name for dims in tensors for dim in dims if name in dim)
        # Each column of the right-hand side is solved by itself.
        and (case.op != "triangular_solve" or any(name in dim for dim in rule.operands[0]))
    ]
    if not names:
        return None
    name, said = rng.choice(names), rule.to_json()
    for key in ("sum", "whole", "shift", "blocked"):
        said[key] = [other for other in said.get(key, ()) if other != name]
    return replace(case, mesh=(2,), cuts={name: ("a0",)}), FactorRule(**said)


def is_noticed(case: OpCase, rule: FactorRule) -> bool:
    try:
        check_rule(case, rule)
    except (Mismatch, ValueError, IndexError, RuntimeError):
        return True
    return False


def test_each_of_a_hundred_changed_rules_is_noticed() -> None:
    rng, noticed = random.Random(20261127), 0
    missed: list[Any] = []
    while noticed + len(missed) < 100:
        made = changed(random_case(rng), rng)
        if made is None:
            continue
        case, rule = made
        if any(is_noticed(replace(case, seed=seed), rule) for seed in range(8)):
            noticed += 1
        else:
            missed.append((case, rule))
    assert missed == []
    assert noticed == 100


def test_a_rule_says_what_it_is() -> None:
    rule = factor_rule("reshape", [(8, 24)], [(2, 4, 24)])
    assert rule.operands == ((("i", "j"), ("k",)),)
    assert rule.results == ((("i",), ("j",), ("k",)),)
    assert rule.sizes == {"i": 2, "j": 4, "k": 24}
    assert repr(rule) == "FactorRule('([ij,k])->([i,j,k])', sizes={'i': 2, 'j': 4, 'k': 24})"
    top = factor_rule("top_k", [(4, 8)], [(4, 2), (4, 2)])
    assert (top.kinds["j"], top.blocked) == ("whole", ("j",))
    assert factor_rule("lu", [(2, 4, 3)], [(2, 4, 3), (2, 3), (2, 4)]) == FactorRule(
        "([b,m,n])->([b,m,n],[b,k],[b,l])", whole="mnkl"
    ).of([(2, 4, 3)], [(2, 4, 3), (2, 3), (2, 4)])
    assert factor_rule("scatter", [(8,), (4, 1), (4,)], [(8,)], body="maximum", **one_each()).reduction == "maximum"


def one_each() -> dict[str, Any]:
    names = ("offset_dims", "operand_batching_dims", "start_indices_batching_dims")
    empty: dict[str, Any] = dict.fromkeys(names, ())
    return empty | {"collapsed_slice_dims": [0], "start_index_map": [0], "index_vector_dim": 1}


@pytest.mark.parametrize(
    "rule",
    [
        FactorRule("([i,k],[k,j])->([i,j])", sum="k"),
        FactorRule("([b,s,d],[d,f])->([b,s,f])", sum=["d"]),
        FactorRule("([ij])->([i,j])", sizes={"i": 2}, blocked="j", whole="i"),
        FactorRule("([i])->([])", sum="i", reduction="maximum"),
        factor_rule("tanh", [(3, 4)], [(3, 4)]),
    ],
    ids=str,
)
def test_a_rule_is_data(rule: FactorRule) -> None:
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert FactorRule(**rule.to_json()) == rule
    assert hash(FactorRule(**rule.to_json())) == hash(rule)
    assert eval(repr(rule), {"FactorRule": FactorRule}) == rule
    assert rule != FactorRule("([i])->([i])")


def test_sizes_come_from_shapes() -> None:
    rule = FactorRule("([b,s,d],[d,f])->([b,s,f])", sum="d")
    assert rule.sizes == {}
    assert rule.of([(2, 3, 5), (5, 7)], [(2, 3, 7)]).sizes == {"b": 2, "s": 3, "d": 5, "f": 7}
    split = FactorRule("([ij])->([i,j])")
    assert split.of([(6,)], [(2, 3)]).sizes == {"i": 2, "j": 3}
    with pytest.raises(sw.LayoutError, match="give `sizes`"):
        FactorRule("([ij])->([ij])").of([(6,)], [(6,)])
    assert FactorRule("([ij])->([ij])", sizes={"i": 2}).of([(6,)], [(6,)]).sizes == {"i": 2, "j": 3}


@pytest.mark.parametrize(
    ("op", "operands", "results", "attributes", "says"),
    [
        ("tanhh", [(2,)], [(2,)], {}, r'no rule is known for it; did you mean "tanh"\?; give one as a `FactorRule`'),
        ("add", [(2,), (3,)], [(2,)], {}, r"operands\[1\] has the shape \[3\]; with these other operands"),
        ("concatenate", [], [(2,)], {}, "it needs at least one operand"),
        ("add", [(2,)], [(2,)], {}, "it has 2 operands and 1 result, but 1 and 1 were given"),
        ("reshape", [(6,)], [(4,)], {}, r"\[6\] has 6 elements, but the result \[4\] has 4 elements"),
        ("slice", [(6,)], [(4,)], {}, "attribute `start_indices` is missing; it must be a list of integers"),
        (
            "slice",
            [(6,)],
            [(4,)],
            {"start_indices": [1], "limit_indices": [9]},
            "it takes 1 to 9 with stride 1 of dim 0, which has size 6",
        ),
        ("transpose", [(6, 2)], [(2, 6)], {"permutation": [0, 0]}, "`permutation` is .0, 0."),
        ("sort", [(6,)], [(6,)], {"dimension": 1}, "`dimension` is 1; it must be at least 0 and less than 1"),
        ("reduce", [(2,), ()], [()], {"dimensions": [1], "body": "add"}, "`dimensions` is .1.; it must list dims"),
        (
            "svd",
            [(4, 6)],
            [(6,)],
            {},
            r'have the shapes \[\[6\]\]; for an operand of \[4, 6\], m x n, they must be one of \["k", "k mk kn"',
        ),
        (
            "gather",
            [(8,), (4, 2)],
            [(4,)],
            {"slice_sizes": [1], **one_each()},
            "`start_index_map` has 1 dim, but each index has 2 numbers",
        ),
        (
            "scatter",
            [(8,), (4, 1), (4,)],
            [(8,)],
            {"body": "mean", **one_each()},
            '`body` is "mean"; it must be one of \\["assign"',
        ),
        (
            "reduce",
            [(4, 6), ()],
            [(4,)],
            {"body": "mean", "dimensions": [1]},
            '`body` is "mean"; it must be one of \\["add"',
        ),
    ],
)
def test_what_is_no_such_op_is_refused(
    op: str, operands: Any, results: Any, attributes: dict[str, Any], says: str
) -> None:
    with pytest.raises(sw.LayoutError, match=says):
        factor_rule(op, operands, results, **attributes)


@pytest.mark.parametrize(
    "text", ["", "i->i", "([i])", "([i_])->([i])", "([i,])->([i])", "([1])->([i])", "([ii])->([i])"]
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(sw.LayoutError, match="factor rule"):
        FactorRule(text)


def test_wrong_types_are_named() -> None:
    with pytest.raises(TypeError, match="attribute dimensions must be"):
        factor_rule("reduce", [(2,), ()], [()], dimensions=None, body="add")
    with pytest.raises(TypeError, match="operands must be a sequence of shapes"):
        factor_rule("tanh", 3, [()])  # type: ignore[arg-type]
    with pytest.raises(sw.LayoutError, match='it has no factor "z"'):
        FactorRule("([i])->([i])", sum="z")
    with pytest.raises(sw.LayoutError, match="reduction is"):
        FactorRule("([i])->([])", sum="i", reduction="mean")
    with pytest.raises(sw.LayoutError, match="summed"):
        FactorRule("([i])->([i])", sum="i")


def test_einsums_are_rules() -> None:
    rule = Einsum.parse("bsd, df -> bsf").rule
    assert rule == FactorRule("([b,s,d],[d,f])->([b,s,f])", sum="d")
    shapes = [(2, 3, 4), (4, 5)]
    dot = factor_rule(
        "dot_general",
        shapes,
        [(2, 3, 5)],
        lhs_batching_dimensions=[],
        rhs_batching_dimensions=[],
        lhs_contracting_dimensions=[2],
        rhs_contracting_dimensions=[0],
    )
    assert rule.of(shapes, [(2, 3, 5)]).results[0] == (("b",), ("s",), ("f",))
    assert sorted(dot.kinds.values()) == sorted(rule.kinds.values())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bsd,df", "not of the form"),
        ("b1,b->b", "not of the form"),
        ("ii->i", "twice in 'ii'"),
        ("i->ij", "'j' of the result is in no operand"),
        ("a,b,c->abc", "write it as several of two each"),
    ],
)
def test_what_is_no_einsum_is_refused(text: str, says: str) -> None:
    with pytest.raises(sw.LayoutError, match=says):
        Einsum.parse(text)
