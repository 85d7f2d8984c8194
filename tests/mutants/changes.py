"""The changes that can be made to a module, one at a time, each of which its tests should notice.

Not changed is what decides no answer: types, the words of messages, what is raised (that it is raised is), docstrings,
`assert`, and `strict=True` of a `zip`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Change", "changes_of"]

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


@dataclass(frozen=True)
class Change:
    """One change of a syntax tree."""

    #: The line of the file at which it stands.
    line: int
    #: The lines of which a test that notices it reaches one; none for what is done when the module is imported.
    reached_by: range
    #: What it makes of what.
    text: str
    #: Makes it, in the tree that it was found in.
    make: Callable[[], None]


def changes_of(tree: ast.Module) -> list[Change]:
    """All changes, in the order of the lines."""
    return sorted(_in_body(tree.body, in_function=False), key=lambda change: change.line)


def _in_body(body: list[ast.stmt], in_function: bool) -> Iterator[Change]:
    for index, statement in enumerate(body):
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if not any(ast.unparse(decorator) == "overload" for decorator in statement.decorator_list):
                defaults = [*statement.decorator_list, statement.args]
                yield from _in_expressions(defaults, _lines(statement, in_function))
                yield from _in_body(statement.body, in_function=True)
        elif isinstance(statement, ast.ClassDef):
            yield from _in_expressions(statement.decorator_list, _lines(statement, in_function))
            yield from _in_body(statement.body, in_function)
        elif isinstance(statement, ast.Raise):
            yield _replaced(body, index, statement, ast.Pass(), _lines(statement, in_function))
        elif not _is_left_alone(statement):
            yield from _in_statement(statement, _lines(statement, in_function))
            for name in ("body", "orelse", "finalbody"):
                yield from _in_body(getattr(statement, name, []), in_function)
            for handler in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
                yield from _in_body(handler.body, in_function)


def _is_left_alone(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        return ast.unparse(statement.test) == "TYPE_CHECKING"
    return isinstance(statement, (ast.Assert, ast.Import, ast.ImportFrom))


def _lines(statement: ast.stmt, in_function: bool) -> range:
    """The lines of a statement, of one that has others within it those of its head."""
    if not in_function:
        return range(0)
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if body else statement.end_lineno or statement.lineno
    return range(statement.lineno, max(last, statement.lineno) + 1)


def _in_statement(statement: ast.stmt, lines: range) -> Iterator[Change]:
    if isinstance(statement, ast.Return) and statement.value is not None and ast.unparse(statement.value) != "None":
        yield _set(statement, "value", ast.Constant(None), statement, lines)
    if isinstance(statement, ast.AugAssign) and type(statement.op) in _OPERATORS:
        yield _set(statement, "op", _OPERATORS[type(statement.op)](), statement, lines)
    skipped = ("annotation", "body", "orelse", "finalbody", "handlers", "cases")
    yield from _in_expressions([value for name, value in ast.iter_fields(statement) if name not in skipped], lines)


def _in_expressions(values: Any, lines: range) -> Iterator[Change]:
    for value in values:
        if isinstance(value, list):
            yield from _in_expressions(value, lines)
        elif isinstance(value, ast.AST) and not isinstance(value, (ast.JoinedStr, ast.stmt)):
            if isinstance(value, ast.expr):
                yield from _of_expression(value, lines)
            yield from _in_expressions([part for name, part in ast.iter_fields(value) if name != "annotation"], lines)


def _of_expression(node: ast.expr, lines: range) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            yield _replaced(node.ops, index, node, _COMPARISONS[type(operator)](), lines)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield _set(node, "op", _OPERATORS[type(node.op)](), node, lines)
    elif isinstance(node, ast.BoolOp):
        yield _set(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And(), node, lines)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        # `not not x` is the truth of x, in the place of the same node.
        yield _set(node, "operand", ast.UnaryOp(ast.Not(), node.operand), node, lines)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield _set(node, "op", ast.UAdd(), node, lines)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield _set(node, "value", not node.value, node, lines)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield _set(node, "value", node.value + 1, node, lines)
        yield _set(node, "value", node.value - 1, node, lines)
    elif isinstance(node, ast.Call):
        for index, keyword in enumerate(node.keywords):
            if keyword.arg is not None and keyword.arg != "strict":
                yield _without(node.keywords, index, node, lines)


def _changed(node: ast.AST, lines: range, make: Callable[[], None], undo: Callable[[], None]) -> Change:
    before = ast.unparse(node)
    make()
    after = ast.unparse(ast.fix_missing_locations(node))
    undo()
    line = getattr(node, "lineno", 0)
    return Change(line, lines, f"{_short(before)}  ->  {_short(after)}", make)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:60]} … {text[-35:]}"


def _set(node: ast.AST, field: str, value: Any, shown: ast.AST, lines: range) -> Change:
    old = getattr(node, field)
    return _changed(shown, lines, lambda: setattr(node, field, value), lambda: setattr(node, field, old))


def _replaced(items: list[Any], index: int, shown: ast.AST, value: Any, lines: range) -> Change:
    old = items[index]
    if shown is old:  # A statement: what is shown is no part of what changes.
        text = f"{_short(ast.unparse(old))}  ->  {ast.unparse(value)}"
        return Change(shown.lineno, lines, text, lambda: items.__setitem__(index, ast.copy_location(value, shown)))
    return _changed(shown, lines, lambda: items.__setitem__(index, value), lambda: items.__setitem__(index, old))


def _without(items: list[Any], index: int, shown: ast.AST, lines: range) -> Change:
    old = items[index]
    return _changed(shown, lines, lambda: items.__delitem__(index), lambda: items.insert(index, old))
