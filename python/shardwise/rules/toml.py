"""Rules files: a layout map as TOML. The format is on the page `docs/rules-file.md`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from .._text import shown
from ..errors import ParseError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..packed import PackedDim
from .layout_rule import REPLICATED, LayoutRule
from .numbers import Config, NamedNumbers, numbered, read_config
from .search import MATCH_MODES, MatchMode, Rule, RuleSearch, compiled_rule
from .shipped import called, example_rules, rules_file
from .toml_tables import check_table, checked_list, errors_at, nearest_key, parse_toml, read_text
from .type_tensors import TypeTensors
from .wrapped import model_types

__all__ = [
    "NOT_CUT",
    "PLACING",
    "Document",
    "Rules",
    "RulesOrDocument",
    "axes_said",
    "other_model",
    "read_compared",
    "read_document",
    "read_layout",
    "read_map_rules",
    "read_models",
    "read_numbers",
    "read_replicated",
    "read_rewrites",
    "read_type_tensors",
    "search_of",
]

#: The keys of a rules file that say how tensors are cut, and those that say what is rewritten.
_CUTTING = {"backtracking", "default", "match", "mesh", "ordered", "prefix", "replicated", "rules"}
_REWRITING = {"after", "drop", "rewrite", "unmatched"}
_BOTH = {"compared", "models", "numbers", "tensors"}
#: The tables that only files of deployments have; `shardwise.deploy` reads them.
PLACING = {"at", "lists", "meshes", "parameters", "world"}


class Document(NamedTuple):
    """A rules file that has been read.

    Attributes:
        tables: Its tables, as read.
        source: Its name in messages.
        file: Its path, or the open file.
    """

    tables: dict[str, Any]
    source: str
    file: Any


#: A rules file: its path, the name of one of the package's, an open text file, or one that has been read.
RulesOrDocument = str | os.PathLike[str] | TextIO | Document


@dataclass(frozen=True)
class Rules:
    """The contents of a rules file, and its name for messages."""

    match: MatchMode
    backtracking: bool
    device_mesh: DeviceMesh | None
    layouts: Mapping[str, LayoutRule]
    default: LayoutRule | None = None
    replicated: tuple[str, ...] = ()
    source: str = "the rules file"
    prefix: str = ""
    models: tuple[str, ...] = ()
    ordered: bool = False


def read_map_rules(file: RulesOrDocument, config: Config | None = None) -> Rules:
    """Read a rules file; see `LayoutMap.from_toml` for what it raises."""
    document, source, _ = read_document(file)
    if placing := sorted(PLACING & document.keys()):
        raise ParseError(
            f"{source}: {placing[0]} is for deployments; shardwise.deploy.Deployment.from_toml reads the file"
        )
    numbers = read_numbers(document, config, source)
    match = document.get("match", "search")
    if match not in MATCH_MODES:
        raise ParseError(f"{source}: match must be one of {', '.join(map(repr, MATCH_MODES))}, got {shown(match)}")
    backtracking = document.get("backtracking", False)
    if not isinstance(backtracking, bool):
        raise ParseError(f"{source}: backtracking must be true or false, got {shown(backtracking)}")
    ordered = document.get("ordered", False)
    if not isinstance(ordered, bool):
        raise ParseError(f"{source}: ordered must be true or false, got {shown(ordered)}")
    mesh = _mesh(document["mesh"], f"{source}: mesh") if "mesh" in document else None
    default = _default(document["default"], f"{source}: default", numbers) if "default" in document else None
    rules = document.get("rules", {})
    if isinstance(rules, list):
        raise ParseError(f"{source}: rules must be a table, got a list of them: write [rules], not [[rules]]")
    check_table(rules, f"{source}: rules")
    prefix = document.get("prefix", "")
    if not isinstance(prefix, str):
        raise ParseError(f"{source}: prefix must be a regular expression, got {shown(prefix)}")
    layouts = {
        prefixed(prefix, key): read_layout(value, f"{source}: rule {shown(key)}", numbers)
        for key, value in rules.items()
    }
    return Rules(
        match,
        backtracking,
        mesh,
        layouts,
        default,
        read_replicated(document, source),
        source,
        prefix,
        tuple(document.get("models", ())),
        ordered,
    )


def prefixed(prefix: str, key: str) -> str:
    r"""Return the key of a rule after the prefix of its file, unless it begins with `^`; `|` goes in brackets.

    >>> prefixed(r"^(model\.)?", r"(k|v)_norm$"), prefixed("^h", "a|b"), prefixed("", "a|b")
    ('^(model\\.)?(k|v)_norm$', '^h(?:a|b)', 'a|b')
    """
    if not prefix or key.startswith("^"):
        return key
    if len(key) > _LONGEST_UNBRACKETED:
        return f"{prefix}(?:{key})"
    outer, inner = re.sub(r"\\.|\[[^\]]*\]", "", key), ""
    while outer != inner:  # Without what is in brackets already.
        outer, inner = re.sub(r"\([^()]*\)", "", outer), outer
    return f"{prefix}(?:{key})" if "|" in outer else prefix + key


def read_replicated(document: Mapping[str, Any], source: str) -> tuple[str, ...]:
    """Return the axes of a rules file along which all is meant to be replicated."""
    found = checked_list(document.get("replicated", []), f"{source}: replicated")
    if not all(isinstance(axis, str) for axis in found):
        raise ParseError(f"{source}: replicated must be a list of names of axes, got {shown(found)}")
    return tuple(found)


def read_rewrites(file: RulesOrDocument, config: Config | None = None) -> tuple[dict[str, Any], NamedNumbers, str]:
    """Read what a rules file says about rewrites, its numbers, and its name; see `Rewrites.from_toml` for errors."""
    document, source, _ = read_document(file)
    for key in ("drop", "rewrite"):
        checked_list(document.get(key, []), f"{source}: {key}")
    return {key: document[key] for key in _REWRITING & document.keys()}, read_numbers(document, config, source), source


def search_of(file: RulesOrDocument) -> RuleSearch:
    """Return a search for the keys of a rules file; their layouts are not read, as these may need a model's numbers.

    >>> import io
    >>> search_of(io.StringIO("rules = { w = ['n * tp'] }")).matching("h.0.w")
    ('w',)
    """
    document = read_document(file).tables
    match, backtracking = document.get("match", "search"), document.get("backtracking", False)
    keys = [prefixed(document.get("prefix", ""), key) for key in document.get("rules", {})]
    rules = {key: Rule(LayoutRule(()), compiled_rule(key, match, backtracking)) for key in keys}
    return RuleSearch(rules, match, backtracking)


def read_compared(file: RulesOrDocument) -> list[str]:
    """Read what the values that a rules file gives were compared with."""
    compared: list[str] = read_document(file).tables.get("compared", [])
    return compared


def read_models(file: str | os.PathLike[str] | TextIO) -> tuple[str, ...]:
    """Return the types of models that a rules file is for; none if it does not state them."""
    return tuple(read_document(file).tables.get("models", ()))


def read_numbers(document: Mapping[str, Any], config: Config | None, source: str) -> NamedNumbers:
    """Return the numbers of a rules file."""
    table = document.get("numbers", {})
    check_table(table, f"{source}: numbers")
    return NamedNumbers(table, config, source)


def read_type_tensors(file: RulesOrDocument) -> TypeTensors | None:
    """Return the tensors of a type of models that a rules file states, if it does."""
    document, source, _ = read_document(file)
    return TypeTensors(document["tensors"], source) if "tensors" in document else None


def read_document(file: RulesOrDocument) -> Document:
    """Read a rules file as tables."""
    if isinstance(file, Document):
        return file
    given: Any = rules_file(file)
    source = repr(called(given)) if isinstance(given, (str, os.PathLike)) else "the rules file"
    document = parse_toml(read_text(given, source), source)
    # A file of rewrites may have no rules.
    required = set() if _REWRITING & document.keys() else {"rules"}
    check_table(document, source, required=required, optional={*_CUTTING, *_REWRITING, *_BOTH, *PLACING})
    for key in ("compared", "models"):
        listed = checked_list(document.get(key, []), f"{source}: {key}")
        if not all(isinstance(one, str) for one in listed):
            raise ParseError(f"{source}: {key} must be a list of strings, got {shown(listed)}")
    return Document(document, source, given)


def other_model(models: Sequence[str], config: Config | None, source: str) -> str | None:
    """Return a warning if the model is of another type than the rules are for; else `None`.

    >>> other_model(["qwen3"], {"model_type": "llama"}, "'vllm/qwen3.toml'").partition("; ")[0]
    "'vllm/qwen3.toml' is for models of the type qwen3, and this one is of the type llama"
    """
    if not models or config is None:
        return None
    types = model_types(read_config(config))
    if not types or not {*types}.isdisjoint(models):
        return None
    engine = Path(source.strip("'")).parent.name
    known = (name for name in example_rules() if name.rpartition("/")[0] == engine and not name.endswith("-mtp"))
    meant = [name for name in known if not {*types}.isdisjoint(read_models(example_rules()[name]))]
    advice = f"{' or '.join(meant)} is for it" if meant else "see that each rule is right for it"
    own, other = " or ".join(models), " with ".join(types)
    return f"{source} is for models of the type {own}, and this one is of the type {other}; {advice}"


def axes_said(rules: Iterable[LayoutRule], mesh: DeviceMesh | None = None) -> str:
    """Say what the axes are called that rules are written with, unless a mesh has them all: the end of a message.

    >>> axes_said([LayoutRule((None, "tp:(1)8")), LayoutRule((("fsdp", "tp"),))])
    "; the file's axes are called tp, fsdp, as in --mesh tp=4,fsdp=4"
    """
    named = dict.fromkeys(name.partition(":(")[0] for rule in rules for name in rule.layout.named_axes())
    if not named or len(named) > _MOST_AXES or (mesh is not None and named.keys() <= set(mesh.axis_names)):
        return ""
    axes = f"axis is called {next(iter(named))}" if len(named) == 1 else f"axes are called {', '.join(named)}"
    return f"; the file's {axes}, as in --mesh {','.join(f'{name}=4' for name in named)}"


def _mesh(table: Any, place: str) -> DeviceMesh:
    check_table(table, place, required={"shape", "axis_names"}, optional={"devices"})
    lists = {key: checked_list(value, f"{place}.{key}") for key, value in table.items()}
    with errors_at(place):
        return DeviceMesh(lists["shape"], lists["axis_names"], lists.get("devices"))


def _default(value: Any, place: str, numbers: NamedNumbers) -> LayoutRule:
    if isinstance(value, str):
        if value != REPLICATED:
            raise ParseError(f"{place} must be {REPLICATED!r}, a list of axes or a table, got {shown(value)}")
        value = []
    return read_layout(value, place, numbers)


def read_layout(value: Any, place: str, numbers: NamedNumbers) -> LayoutRule:
    """Return the contents of a rule: a list of axes, or a table with one."""
    unreduced: list[Any] = []
    uneven, flags = None, {"shared": False, "optional": False}
    if isinstance(value, dict):
        if "axes" not in value and all(nearest_key(key, _KEYS) is None for key in value):
            raise ParseError(f"{place}: expected a list of axes, got a table; a rule that contains a dot needs quotes")
        check_table(value, place, required={"axes"}, optional={*_KEYS} - {"axes"})
        unreduced, uneven = checked_list(value.get("unreduced", []), f"{place}: unreduced"), value.get("uneven")
        flags = {key: value.get(key, False) for key in flags}
        value = value["axes"]
    entries = enumerate(checked_list(value, f"{place}: axes"))
    axes = [_spec(entry, f"{place}: dim {dim}", numbers) for dim, entry in entries]
    with errors_at(place):
        return LayoutRule(TensorLayout(tuple(axes), unreduced=tuple(unreduced)), uneven, **flags)


#: The words elsewhere for a dim that is not cut: in Python, in JSON, on the command line.
NOT_CUT = ("None", "none", "null", "-", "*")
#: The most axes that a message names.
_MOST_AXES = 8

#: The most characters of a key that may follow a prefix without brackets.
_LONGEST_UNBRACKETED = 1000

#: The keys of a rule that is a table.
_KEYS = ("axes", "unreduced", "uneven", "shared", "optional")


def _spec(entry: Any, place: str, numbers: NamedNumbers) -> str | tuple[str, ...] | PackedDim | None:
    if isinstance(entry, dict):
        if "packed" not in entry:
            wrong = next((key for key in entry if nearest_key(key, ["packed"]) is not None), None)
            hint = "" if wrong is None else f"; did you mean 'packed' instead of {shown(wrong)}?"
            raise ParseError(f"{place}: 'packed' is missing in the table {shown(entry)}{hint}")
        sizes = dict(entry)
        text = sizes.pop("packed")
        if isinstance(text, str) and (unused := sizes.keys() - set(re.findall(r"\w+", text))):
            raise ParseError(f"{place}: unknown key {shown(min(unused))}: packed = {shown(text)} does not name it")
        with errors_at(place):
            return numbered(text, sizes, numbers)
    if entry in ("", []):
        return None
    if isinstance(entry, str):
        if entry in NOT_CUT:
            raise ParseError(
                f"{place} is {entry!r}; write [] for a dim that is not cut, and [{entry!r}] for an axis of that name"
            )
        return entry
    if isinstance(entry, list):
        return tuple(entry)
    raise ParseError(
        f"{place} must be the name of a mesh axis, a list of names or a table with packed, got {shown(entry)}"
    )
