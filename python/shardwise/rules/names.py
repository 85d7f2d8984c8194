"""The table of what names of sizes and of weights mean in models' configurations and checkpoints: `names.toml`.

Whoever asks what a key of a configuration or a name of a weight stands for asks here; a new name is a line of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .toml_tables import parse_toml

__all__ = [
    "Expert",
    "Merged",
    "WeightRole",
    "architecture_of",
    "expert_names",
    "keys_of",
    "merged_names",
    "module_of",
    "module_words",
    "shipped_table",
    "starred_words",
    "stated",
    "types_with",
    "weight_named",
    "weights",
]


class WeightRole(NamedTuple):
    """A role of weights, and the names of the modules that have it; `names.toml` says what each field means."""

    role: str
    names: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    cut: str = ""
    heads: str = ""
    parts: int = 1
    in_out: bool = False
    latent: bool = False
    vocabulary: bool = False
    plain: bool = False
    stacked: bool = False


class Merged(NamedTuple):
    """Matrices that engines put one after the other in one parameter."""

    parts: tuple[str, ...]
    into: str
    always: bool = False


class Expert(NamedTuple):
    """A block of experts, and its names for gate, up and down."""

    block: str
    projections: tuple[str, str, str]


@cache
def shipped_table(name: str) -> dict[str, Any]:
    """Read a table that is next to this module.

    >>> shipped_table("names.toml")["modules"]["whole"]
    ['indexer']
    """
    return parse_toml((Path(__file__).parent / name).read_text(encoding="utf-8"), name)


def keys_of(size: str) -> list[str]:
    """List the keys under which configurations have a size, the likeliest first.

    >>> keys_of("heads")
    ['num_attention_heads', 'n_head', 'n_heads']
    """
    return list(shipped_table("names.toml")["sizes"][size])


def stated(config: Mapping[str, Any], size: str) -> tuple[str, Any] | None:
    """Return the key by which a configuration states a size, and its value as it is there; `None` if it states none.

    >>> stated({"num_attention_heads": None, "n_head": 12}, "heads"), stated({}, "heads")
    (('n_head', 12), None)
    """
    return next(((key, config[key]) for key in keys_of(size) if config.get(key) is not None), None)


@cache
def weights() -> tuple[WeightRole, ...]:
    """List the roles of weights, the most specific first."""
    return tuple(WeightRole(**_frozen(entry)) for entry in shipped_table("names.toml")["weights"])


@cache
def merged_names() -> tuple[Merged, ...]:
    """List the matrices that engines put one after the other."""
    return tuple(Merged(**_frozen(entry)) for entry in shipped_table("names.toml")["merged"])


@cache
def expert_names() -> tuple[Expert, ...]:
    """List the blocks of experts with their names for gate, up and down."""
    return tuple(Expert(**_frozen(entry)) for entry in shipped_table("names.toml")["experts"])


def module_words(kind: str) -> list[str]:
    """List the names of a kind of modules.

    >>> module_words("attention")
    ['attention', 'attn', 'self_attention', 'self_attn']
    """
    return list(shipped_table("names.toml")["modules"][kind])


@cache
def types_with(trait: str) -> frozenset[str]:
    """Return the types of models that have a trait, or, for `"known"`, those whose names mean what they say.

    >>> "gpt_oss" in types_with("experts_in_out"), "llama" in types_with("known")
    (True, True)
    """
    given = shipped_table("names.toml")["types"][trait]
    return frozenset(name for one in given for name in (one["names"] if isinstance(one, dict) else [one]))


def architecture_of(model_type: str) -> str | None:
    """Return the architecture of a type of models that has one."""
    found: str | None = shipped_table("names.toml")["architectures"].get(model_type)
    return found


def module_of(name: str) -> str:
    """Return the path of the module that a tensor belongs to, without the name of the parameter.

    >>> module_of("h.0.mlp.fc.weight"), module_of("experts.w13_bias"), module_of("in_proj.weight.key")
    ('h.0.mlp.fc', 'experts.w13', 'in_proj')
    """
    return _leaf().sub("", name)


@cache
def _leaf() -> re.Pattern[str]:
    leaves = "|".join(shipped_table("names.toml")["leaves"])
    return re.compile(rf"\.(?:{leaves})[0-9]*$|(?:_(?:{leaves}))+$|\.(?:{leaves})\.(?!(?:{leaves})$)\w+$")


def weight_named(path: str, models: Sequence[str] | None = None, *, elsewhere: bool = False) -> WeightRole | None:
    """Return the role of the weight of a module; `None` if its name has none.

    Args:
        path: the path of the module.
        models: the types of the model, for names that mean something in some only; `None` takes them too.
        elsewhere: whether names are recognised that only projects other than Hugging Face use.

    >>> weight_named("h.0.mlp.up_proj").role, weight_named("decoder.mlp.linear_fc1"), weight_named("attn.wk").role
    ('up', None, 'key')
    >>> weight_named("decoder.mlp.linear_fc1", elsewhere=True).role
    'gate and up'
    """
    outer, _, last = path.rpartition(".")
    exact, patterns = _index(elsewhere)
    found = [*exact.get(last, ()), *(at for at, pattern in patterns if pattern.fullmatch(last))]
    for at in sorted(found):
        weight: WeightRole = weights()[at]
        if weight.models and models is not None and not {*weight.models}.intersection(models):
            continue
        if not weight.within or any(f".{outer}".endswith(f".{place}") for place in weight.within):
            return weight
    return None


@cache
def _index(elsewhere: bool) -> tuple[dict[str, list[int]], list[tuple[int, re.Pattern[str]]]]:
    """Return the positions of entries by their names, and the positions of patterns."""
    exact: dict[str, list[int]] = {}
    patterns = []
    for at, weight in enumerate(weights()):
        for name in (*weight.names, *(weight.elsewhere if elsewhere else ())):
            if "*" in name:
                patterns.append((at, re.compile(starred_words([name]))))
            else:
                exact.setdefault(name, []).append(at)
    return exact, patterns


def starred_words(words: Iterable[str]) -> str:
    r"""Write names in which `*` stands for letters, digits and _ as a regular expression.

    >>> starred_words(["vision*", "vit"])
    'vision\\w*|vit'
    """
    return "|".join(re.escape(word).replace(r"\*", r"\w*") for word in words)


def _frozen(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
