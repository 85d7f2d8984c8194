"""Ordered rules of projects on JAX: the first that matches wins, and its spec is for the leading dims.

EasyLM, EasyDeL and others have a list of pairs, a regular expression and a `PartitionSpec`, of which the first counts
that is found in the path of a parameter. MaxText and others name the dims of each parameter, and have a list of pairs
of such a name and mesh axes; see `logical_layouts`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._text import shown
from ..errors import LayoutError, ParseError
from ..layout import TensorLayout
from .layout_rule import LayoutRule
from .search import MatchMode, RuleSearch

if TYPE_CHECKING:
    from ..mesh import DeviceMesh

__all__ = ["logical_layouts", "pairs_of", "partition_rules_of"]

#: The calls that make a spec in the text of a list.
_SPECS = ("PS", "P", "PartitionSpec")
#: A regular expression that is found in every path.
_ALL = ".*"
_LONGEST = 1 << 20


def pairs_of(rules: Any) -> Iterator[tuple[str, Any]]:
    """Yield the pairs of a list of rules, or of its text in Python, which is not run.

    Raises:
        ParseError: if the text is something else.
        LayoutError: if an expression is there twice: the second would never win.
        TypeError: if it is not made of pairs of a text and a spec.

    >>> list(pairs_of("(('wte/embedding', PS('tp', ('fsdp', 'sp'))), ('.*', PS()))"))
    [('wte/embedding', ('tp', ('fsdp', 'sp'))), ('.*', ())]
    """
    if isinstance(rules, str):
        rules = _parsed(rules)
    if isinstance(rules, Mapping) or not isinstance(rules, Iterable):
        raise TypeError(f"rules must be pairs of a regular expression and a spec, got {type(rules).__name__}")
    seen: dict[str, int] = {}
    for number, pair in enumerate(rules):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"rules[{number}] must be a pair of a regular expression and a spec, got {shown(pair)}")
        key, spec = pair
        if key in seen:
            raise LayoutError(f"rules[{number}] never wins: rules[{seen[key]}] has the same expression, {shown(key)}")
        seen[key] = number
        yield key, _axes_of(number, spec)


def _axes_of(number: int, spec: Any) -> Any:
    """Return the entries of a spec: of a `PartitionSpec`, a tuple or a list; `None` cuts nothing."""
    if spec is None:
        return ()
    if isinstance(spec, (TensorLayout, LayoutRule)):
        return spec
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise LayoutError(f"rules[{number}] has unreduced or reduced axes, but parameters have none")
    entries = getattr(spec, "partitions", spec)
    if isinstance(entries, str) or not isinstance(entries, Iterable):
        raise TypeError(f"rules[{number}] must have a spec of axes for each dim, got {shown(spec)}")
    found = tuple(tuple(each) if isinstance(each, list) else each for each in entries)
    for dim, each in enumerate(found):
        if each is not None and not isinstance(each, (str, tuple)):
            raise LayoutError(
                f"rules[{number}] leaves dim {dim} to the compiler ({shown(each)}); a layout cannot express that"
            )
    return found


def _parsed(text: str) -> Any:
    """Return the list that a text of Python writes out: tuples, lists, texts, `None`, and calls that make specs."""
    if len(text) > _LONGEST:
        raise ParseError(f"rules: a text of {len(text)} characters, over the limit of {_LONGEST}")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ParseError(
            f"rules: {error}; expected the text of a list such as (('wte/embedding', PS('tp', 'fsdp')), ('.*', PS()))"
        ) from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(map(_value, node.elts))
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str)):
        return node.value
    if isinstance(node, ast.Call) and not node.keywords:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if name in _SPECS:
            return tuple(map(_value, node.args))
    raise ValueError(f"{ast.unparse(node)[:80]} is neither a text, None, a tuple nor {' or '.join(_SPECS)}(…)")


def partition_rules_of(
    search: RuleSearch, match: MatchMode, default: LayoutRule | None
) -> list[tuple[str, tuple[Any, ...]]]:
    """Return a map's rules as such a list: for each path the first expression that is found in it has the map's layout.

    Raises:
        LayoutError: if a layout has unreduced axes, or a rule has an uneven rule of its own: such a list has neither.
    """
    found: dict[str, tuple[Any, ...]] = {}
    if not search.is_ordered:  # A key that equals a path comes before all rules that match it.
        for key, rule in search.rules.items():
            if any(other != key for other in search.every_match(key)):
                found[rf"^{re.escape(key)}\Z"] = _spec(key, rule)
    around = {"search": "{}", "match": "^(?:{})", "fullmatch": r"^(?:{})\Z"}[match]
    for key, rule in search.rules.items():
        found[around.replace("{}", key)] = _spec(key, rule)
    if default is not None:
        found.setdefault(_ALL, _spec("default", default))
    return list(found.items())


def _spec(key: str, rule: LayoutRule) -> tuple[Any, ...]:
    if rule.layout.unreduced or rule.uneven not in (None, "even"):
        raise LayoutError(
            f"rule {shown(key)} has unreduced axes or an uneven rule; a list of specs cannot express them"
        )
    return rule.layout.axes


def logical_layouts(
    rules: Iterable[Sequence[Any]], names: Mapping[str, Sequence[str | None]], mesh: DeviceMesh
) -> dict[str, TensorLayout]:
    """Return the layouts of tensors whose dims have names, by rules for these names, as Flax and MaxText do.

    Each rule is a pair of a name of dims and the mesh axes for it, one, several or `None`. Rules apply in order: each
    gives its axes to the dim of its name, unless an earlier rule did, or another dim of the tensor already has one of
    these axes. A dim that gets no axes is not cut.

    Args:
        rules: The pairs.
        names: The names of the dims of each tensor.
        mesh: The mesh. Axes that it lacks cut nothing, as in MaxText.

    Raises:
        LayoutError: if two dims of a tensor have one name.
        TypeError: if a rule is not a pair.

    >>> from shardwise import DeviceMesh
    >>> rules = [("embed", "fsdp"), ("mlp", ("fsdp", "tp")), ("mlp", "tp")]
    >>> mesh = DeviceMesh((2, 4), ("fsdp", "tp"))
    >>> logical_layouts(rules, {"up": ("embed", "mlp"), "bias": ("mlp",)}, mesh)["up"].axes
    ('fsdp', 'tp')
    """
    pairs = [_logical_pair(number, rule) for number, rule in enumerate(rules)]
    known = set(mesh.axis_names)
    found = {}
    for tensor, dims in names.items():
        axes: dict[int, tuple[str, ...]] = {}
        used: set[str] = set()
        places = {name: dim for dim, name in enumerate(dims) if name is not None}
        if len(places) < sum(name is not None for name in dims):
            raise LayoutError(f"tensor {shown(tensor)}: two of its dims {shown(tuple(dims))} have one name")
        for name, given in pairs:
            dim = places.get(name)
            own = tuple(axis for axis in given if axis in known)
            if dim is not None and dim not in axes and not used.intersection(own):
                axes[dim] = own
                used.update(own)
        found[tensor] = TensorLayout([_entry(axes.get(dim, ())) for dim in range(len(dims))], mesh)
    return found


def _logical_pair(number: int, rule: Any) -> tuple[str, tuple[str, ...]]:
    if isinstance(rule, str) or not isinstance(rule, (tuple, list)) or len(rule) != 2 or not isinstance(rule[0], str):
        raise TypeError(f"rules[{number}] must be a pair of a name of dims and mesh axes, got {shown(rule)}")
    name, axes = rule
    given = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    if not all(isinstance(axis, str) for axis in given):
        raise TypeError(f"rules[{number}] must have mesh axes by their names, got {shown(axes)}")
    return name, given


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return axes[0] if len(axes) == 1 else axes or None
