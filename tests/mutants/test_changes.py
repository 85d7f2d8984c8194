"""Each change is made once, alone, and where nothing is to be changed there is none."""

from __future__ import annotations

import ast

import pytest

from .changes import changes_of


def made(source: str) -> list[str]:
    """The module after each of its changes."""
    modules = []
    for index in range(len(changes_of(ast.parse(source)))):
        tree = ast.parse(source)
        changes_of(tree)[index].make()
        compile(ast.fix_missing_locations(tree), "module", "exec")
        modules.append(ast.unparse(tree))
    return modules


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", ["a <= b"]),
        ("a <= b != c", ["a < b != c", "a <= b == c"]),
        ("a is not b", ["a is b"]),
        ("a not in b", ["a in b"]),
        ("a + b", ["a - b"]),
        ("a // b", ["a * b"]),
        ("a % b", ["a // b"]),
        ("a += b", ["a -= b"]),
        ("a and b", ["a or b"]),
        ("not a", ["not not a"]),
        ("-a", ["+a"]),
        ("a[3]", ["a[4]", "a[2]"]),
        ("a = True", ["a = False"]),
        ("f(a, b=c)", ["f(a)"]),
        ("f(b=c, d=e)", ["f(d=e)", "f(b=c)"]),
        ("if a:\n    raise ValueError(1)", ["if a:\n    pass"]),
        ("def f():\n    return a", ["def f():\n    return None"]),
        ("def f(a=True):\n    pass", ["def f(a=False):\n    pass"]),
        ("try:\n    a\nexcept E:\n    b < c", ["try:\n    a\nexcept E:\n    b <= c"]),
        ("with f(a=b):\n    a == b", ["with f():\n    a == b", "with f(a=b):\n    a != b"]),
    ],
)
def test_what_is_changed(source: str, expected: list[str]) -> None:
    assert made(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "a: 'int | None'",
        "def f(a: Literal[1]) -> Literal[2]:\n    pass",
        "if TYPE_CHECKING:\n    a = 1",
        "@overload\ndef f(a=1): ...",
        "zip(a, b, strict=c)",
        "f(**a)",
        "f'{a + 1}'",
        "assert a == 1",
        "def f():\n    return None",
        "'text'",
    ],
)
def test_what_is_left_alone(source: str) -> None:
    assert made(source) == []


def test_which_lines_a_test_that_notices_reaches() -> None:
    source = "a = 1\ndef f(b):\n    if (b and\n        c):\n        return f(\n            d=b)\n"
    found = [(change.line, list(change.reached_by), change.text) for change in changes_of(ast.parse(source))]
    assert found == [
        (1, [], "1  ->  2"),
        (1, [], "1  ->  0"),
        (3, [3, 4], "b and c  ->  b or c"),
        (5, [5, 6], "return f(d=b)  ->  return None"),
        (5, [5, 6], "f(d=b)  ->  f()"),
    ]
