"""Sizes in learned rewrites as `[numbers]` of a rules file: the names that a model's configuration has for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import ShardwiseError
from ...rules.names import keys_of, weight_named
from ...rules.numbers import Config, NamedNumbers

__all__ = ["numbers_for", "size_value", "with_sizes_named"]

#: The names of sizes of models, in the form of `[numbers]` of a rules file.
_NUMBERS: Mapping[str, list[str]] = {
    "heads": keys_of("heads"),
    "groups": [*keys_of("kv_heads"), "heads"],
    "d": [*keys_of("head_dim"), *(f"{key} // heads" for key in keys_of("hidden"))],
    "inner": keys_of("inner"),
    "expert_inner": keys_of("expert_inner"),
    "experts": keys_of("experts"),
    "hidden": keys_of("hidden"),
    "words": keys_of("vocabulary"),
    "layers": keys_of("layers"),
}
#: The expressions that are tried for a size, in order. The first that has its value is taken; several may, for example
#: if there are as many groups as heads.
_QUERIES = ("heads*d", "heads//groups*d")
_KEYS = ("groups*d", "d")
_OTHERS = ("inner", "expert_inner", "hidden", "words", "experts")
_COUNTS = ("groups", "heads", *_OTHERS, "d")
#: Factors of dims besides: halves of heads, as rotary positions pair them.
_HALVES = ("d//2",)
_BLOCK, _EACH = re.compile(r"(\w+):\((\d+)\)"), re.compile(r"(\w+):(\d+)")
_PERIOD = re.compile(r"\((\d+) \[([^\]]*)\]\)")
_FACTOR = re.compile(r"(\w+)=(\d+)")


def with_sizes_named(
    entries: Iterable[Mapping[str, Any]], config: Config
) -> tuple[list[dict[str, Any]], dict[str, str | list[str]]]:
    """Return rewrites with names in place of sizes, and the numbers that define these names.

    A name that has the right size by chance does no harm: with another configuration the parts of a tensor would not
    add up to its shape, and the rewrite is refused.

    >>> entry = {"from": "h.{i}.{gate,up}", "to": {"name": "h.{i}.gate_up", "packed": "gate:(24) + up:(24)"}}
    >>> (made,), numbers = with_sizes_named([entry], {"intermediate_size": 24, "hidden_size": 8})
    >>> made["to"]["packed"], numbers
    ('gate:(inner) + up:(inner)', {'inner': 'intermediate_size'})
    """
    names = _SizeNames(config)
    made = [names.entry(entry) for entry in entries]
    return made, names.used()


def numbers_for(texts: Iterable[str], config: Config) -> dict[str, str | list[str]]:
    """Return the numbers that expressions name, as a rules file defines them.

    >>> numbers_for(["groups"], {"num_attention_heads": 8, "num_key_value_heads": 2})
    {'heads': 'num_attention_heads', 'groups': ['num_key_value_heads', 'heads']}
    """
    names = _SizeNames(config)
    names.add(texts)
    return names.used()


def size_value(text: str, config: Config) -> int | None:
    """Return the value of an expression in the names of sizes; `None` if the configuration lacks one.

    >>> size_value("groups*d", {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64})
    16
    """
    return _value(NamedNumbers(_NUMBERS, config), text)


class _SizeNames:
    """The names of sizes, with a record of those that were used."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._numbers = NamedNumbers(_NUMBERS, config)
        self._found: set[str] = set()

    def add(self, texts: Iterable[str]) -> None:
        """Count the names in these texts as used."""
        self._found |= {word for text in texts for word in re.findall(r"[a-z_]+", text) if word in _NUMBERS}

    def used(self) -> dict[str, str | list[str]]:
        """Return the numbers that were used, and those that they depend on, if the configuration has them."""
        found = set(self._found)
        if found & {"groups", "d"}:
            found.add("heads")
        made: dict[str, str | list[str]] = {}
        for name, choices in _NUMBERS.items():
            if name not in found:
                continue
            there = [
                one for one in choices if _value(NamedNumbers({**_NUMBERS, name: one}, self._config), name) is not None
            ]
            made[name] = there[0] if len(there) == 1 else there
        return made

    def entry(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return a rewrite with names in place of sizes."""
        made: dict[str, Any] = {
            key: self._side(value) if isinstance(value, Mapping) else value for key, value in entry.items()
        }
        if "size" in made:
            made["size"] = self._name(made["size"], ("words", *_OTHERS))
        return made

    def _side(self, side: Mapping[str, Any]) -> dict[str, Any]:
        made = dict(side)
        if "packed" in side:
            text = _PERIOD.sub(self._period, side["packed"])
            made["packed"] = _BLOCK.sub(lambda part: f"{part[1]}:({self._part(part)})", text)
        for factor in _FACTOR.finditer(side.get("dims", "")):
            name = self._name(int(factor[2]), (*_COUNTS, *_QUERIES, *_HALVES))
            if isinstance(name, str) and factor[1] not in made:
                made["dims"] = made["dims"].replace(factor[0], factor[1])
                made[factor[1]] = name
        return made

    def _period(self, found: re.Match[str]) -> str:
        count = self._name(int(found[1]), _COUNTS)
        return f"({count} [{_EACH.sub(lambda part: f'{part[1]}:{self._part(part)}', found[2])}])"

    def _part(self, part: re.Match[str]) -> str | int:
        weight = weight_named(part[1], elsewhere=True)
        # Parts of keys and values are of groups, where others are of heads.
        first, then = (_KEYS, _QUERIES) if weight is not None and weight.heads == "kv" else (_QUERIES, _KEYS)
        is_attention = re.fullmatch(r"q\w*|k\w*|v\w*", part[1]) is not None
        order = (*first, *then, *_OTHERS) if is_attention else (*_OTHERS, *first, *then)
        return self._name(int(part[2]), order)

    def _name(self, size: int, order: Iterable[str]) -> str | int:
        """Return the name or expression for a size; the size itself if there is none."""
        for text in order if size > 1 else ():
            if _value(self._numbers, text) == size:
                self._found |= set(re.findall(r"[a-z_]+", text))
                return text
        return size


def _value(numbers: NamedNumbers, text: str) -> int | None:
    """Return the value of an expression; `None` if the configuration lacks a name in it."""
    try:
        value: int = numbers.number("size", text)
    except ShardwiseError:
        return None
    return value
