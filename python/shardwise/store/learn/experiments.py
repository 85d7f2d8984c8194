"""Models of one type made with other values of their configuration, one at a time, without weights."""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..._expressions import parse_expression
from ...errors import LayoutError, ShardwiseError

__all__ = [
    "Experiment",
    "FlatConfig",
    "Sample",
    "TensorShapes",
    "defaults_of_unlisted",
    "differing_keys",
    "flat_config",
    "nested_config",
]

TensorShapes = Mapping[str, tuple[int, ...]]
#: Values by key, nested ones with dots.
FlatConfig = dict[str, Any]
_NUMBER = re.compile(r"(?<![A-Za-z0-9_])[0-9]+(?![A-Za-z0-9_])")
#: Keys that say nothing about tensors.
_IGNORED = re.compile(
    r"(?:.*\.)?(?:_.*|transformers_version|architectures|d?type|torch_dtype|model_type|output_\w+|return_dict\w*|use_cache"
    r"|problem_type|\w*token_id\w*|\w*token_index|initializer_\w+|\w*(?:id2label|label2id)\b.*|rope_(?:parameters|scaling|theta)\b.*"
    r"|chunk_size_feed_forward|is_encoder_decoder|attn_implementation|\w*_dropout\w*|\w*eps\w*)"
)
#: The values of texts that some types have besides the usual one.
_TEXTS = ("gelu", "silu", "relu", "relu2")
#: Kinds of layers in lists of them.
_KINDS = (
    "full_attention", "sliding_attention", "linear_attention", "chunked_attention", "dense", "sparse", "mamba",
    "attention", "moe", "mlp", "conv", "hybrid", "compressed_sparse_attention", "heavily_compressed_attention",
)  # fmt: skip
_MOST_TENSORS = 4000
_TRIES = 5


class Sample(NamedTuple):
    """A configuration, and the tensors of its model: by template the shape for each list of numbers."""

    flat: FlatConfig
    tensors: Mapping[str, Mapping[tuple[int, ...], tuple[int, ...]]]
    shapes: TensorShapes


class Experiment:
    """Models of one type, made with other values of their configuration.

    Attributes:
        base: The configuration of the first model, flat.
        fixed: Keys with their values: texts that change the tensors, and keys for which no other value could be tried.
        stated: Fractions that change the tensors, with their values; no rule is sought for them.
        varied: The keys whose value changes what tensors there are.
        kinds: The entries that a list of texts may have.
        nullable: The keys of numbers for which null means something.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors_of: Callable[[Mapping[str, Any]], TensorShapes],
        resolved: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        rng: random.Random,
    ) -> None:
        self._tensors_of, self._resolved, self._rng = tensors_of, resolved, rng
        self.base = dict(flat_config(config))
        self.fixed: FlatConfig = {}
        self.stated: FlatConfig = {}
        self.varied: set[str] = set()
        self.kinds: dict[str, set[Any]] = {}
        first = self._sample(self.base)
        if first is None:
            raise LayoutError("the model of the small configuration cannot be made")
        self._first = first
        self._keys = [key for key in self.base if not _IGNORED.fullmatch(key)]
        self._free: list[str] = []
        self.nullable: set[str] = set()
        for key in self._keys:
            self._look_at(key)

    def _look_at(self, key: str) -> None:
        """Find whether a key matters, by some of its other values."""
        value = self.base[key]
        made = []
        for other in self._others(key, value):
            sample = self._sample(self._changed(self.base, key, other))
            if sample is None and type(value) is int:
                sample = self._sample(self._changed(self.base, key, other, lists=True))
            if sample is None:
                continue
            made.append(sample)
            if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
                self.kinds.setdefault(key, set(value)).update(other)
            if sample.shapes != self._first.shapes:
                self.varied.add(key)
                if not isinstance(value, list):
                    break
            elif len(made) > 1 and not isinstance(value, list):
                break
        if isinstance(value, float):
            self.stated |= {key: value} if key in self.varied else {}
            self.varied.discard(key)
        elif isinstance(value, str):
            is_free = bool(made) and key not in self.varied
            self.fixed |= {} if is_free else {key: value}
            self.varied.discard(key)
        elif not made:
            self.fixed |= {key: value} if value not in ([], {}) or isinstance(value, list) else {}
        else:
            self._free.append(key)
            if type(value) is int and key in self.varied and self._keeps_null(key):
                self.nullable.add(key)

    def _keeps_null(self, key: str) -> bool:
        """Return whether null is a value of its own, and not that of a key that is left out."""
        try:
            return flat_config(self._resolved(nested_config({**self.base, key: None}))).get(key) is None
        except Exception:  # Whatever the type's own code raises.
            return False

    def _others(self, key: str, value: Any) -> Iterator[Any]:
        if isinstance(value, bool):
            yield not value
        elif isinstance(value, int):
            values = [2 * value, value + 1, value + 2, 3 * value, value - 1, value // 2, 4 * value, max(1, value - 2)]
            yield from (
                one
                for one in values
                if one != value and 0 <= one <= max(8, 8 * self.base[key] if self.base[key] else 8)
            )
        elif value is None:
            yield from (8, True, [0])
        elif isinstance(value, float):
            yield from (value * 2, value + 1)
        elif isinstance(value, str):
            yield from (one for one in _TEXTS if one != value)
        elif isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            for kind in dict.fromkeys((*value, *_KINDS)):
                for at in (0, len(value) - 1):
                    if value[at] != kind:
                        yield [kind if place == at else one for place, one in enumerate(value)]
        elif isinstance(value, list) and all(type(one) is int for one in value):
            if value:
                yield [*value[:-1], 1 - value[-1] if value[-1] in (0, 1) else value[-1] + 1]
                yield [1 - one if one in (0, 1) else 2 * one for one in value]
            yield from ([*value, 1], [0, 2])

    def _changed(self, flat: FlatConfig, key: str, value: Any, *, lists: bool = False) -> FlatConfig:
        """Return the values with another one for a key; with `lists`, lists of as many entries get its new length."""
        found = {**flat, key: value}
        before, part = flat[key], key.rpartition(".")[0]
        if lists and type(value) is int and type(before) is int:
            for other, entries in flat.items():
                if (
                    other in self._keys
                    and isinstance(entries, list)
                    and len(entries) == before > 0
                    and other.rpartition(".")[0] == part
                ):
                    found[other] = [entries[at % len(entries)] for at in range(value)]
        return found

    def _sample(self, flat: FlatConfig) -> Sample | None:
        try:
            shapes = dict(self._tensors_of(nested_config(flat)))
        except Exception:  # Whatever a model's own code raises.
            return None
        if len(shapes) > _MOST_TENSORS or any(type(n) is not int or n < 1 for shape in shapes.values() for n in shape):
            return None
        return Sample(flat, _by_template(shapes), shapes)

    def _step(self, flat: FlatConfig, key: str) -> FlatConfig | None:
        """Return the values with another one for a key."""
        value, base = flat[key], self.base[key]
        rng = self._rng
        if isinstance(base, list):
            if key in self.kinds:
                kinds = sorted(self.kinds[key])
                return {**flat, key: [rng.choice(kinds) if rng.random() < 0.6 else one for one in value]}
            if base and all(one in (0, 1) for one in base):
                return {**flat, key: [rng.choice((0, 1)) for _ in value]}
            if base:
                return {**flat, key: [max(1, one + rng.choice((-1, 0, 1))) for one in value]}
            return {**flat, key: sorted(rng.sample(range(4), rng.randint(0, 2)))}
        if base is None:
            return {**flat, key: rng.choice((None, 8, 12, 20)) if value is not None else rng.choice((8, 12, 20))}
        if key in self.nullable and value is not None and rng.random() < 0.15:
            return {**flat, key: None}
        # Half of them are near the first value, so that sizes do not grow away from each other.
        near = base if value is None or rng.random() < 0.5 else value
        others = [one for one in (base, *self._others(key, near)) if one != value]
        if not others:
            return None
        return self._changed(flat, key, rng.choice(others), lists=rng.random() < 0.8)

    def walk(self, count: int, turns: int = 0) -> list[Sample]:
        """Return samples of which each differs from one before in one key, each key that matters in as many turns."""
        found = [self._first]
        lively = sorted(self.varied & {*self._free})
        for key in sorted(self.nullable):
            less = {**found[-1].flat, key: None}
            without = self._sample(less)
            found += [] if without is None else [without]
            if without is not None and (again := self._sample({**less, key: self.base[key]})):
                found.append(again)
        each = [key for _ in range(turns) for key in self._rng.sample(lively, len(lively))]
        for at in range(max(count, len(each)) if lively else 0):
            for _ in range(_TRIES):
                keys = lively if self._rng.random() < 0.85 else self._free
                key = each[at] if at < len(each) else self._rng.choice(keys)
                flat = self._step(found[-1].flat, key)
                sample = None if flat is None or flat == found[-1].flat else self._sample(flat)
                if sample is not None:
                    if sample.shapes != found[-1].shapes:
                        self.varied.add(key)
                    found.append(sample)
                    break
        return found


def differing_keys(before: FlatConfig, after: FlatConfig) -> list[str]:
    """Return the keys of which two configurations have different values."""
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def defaults_of_unlisted(
    config: FlatConfig, tensors_of: Callable[[Mapping[str, Any]], TensorShapes], keys: Iterable[str]
) -> dict[str, Any]:
    """Return the keys that a configuration leaves out though they matter, with what each is taken for.

    That is a value, an expression after `=`, or `None` where none of those that were tried gives the same tensors.
    """

    def made(flat: FlatConfig) -> TensorShapes | None:
        try:
            return dict(tensors_of(nested_config(flat)))
        except Exception:  # Whatever a model's own code raises.
            return None

    first = made(config)
    asked = [key for key in dict.fromkeys(keys) if key not in config and not _IGNORED.fullmatch(key)]
    found: dict[str, Any] = {
        key: None for key in asked if any(made({**config, key: one}) not in (None, first) for one in (8, 12, True, [0]))
    }
    if not found or first is None:
        return {}
    changed = [{**config, key: n * more} for key, n in config.items() if type(n) is int and n > 0 for more in (2, 3)]
    others = [(flat, shapes) for flat in changed if (shapes := made(flat)) is not None]
    for key in found:
        part = key.rpartition(".")[0]
        names = [name for name, n in config.items() if type(n) is int and n > 0 and name.rpartition(".")[0] == part]
        quotients = [f"{one} // {other}" for one, other in itertools.permutations(names, 2)]
        is_number = made({**config, key: 8}) not in (None, made({**config, key: True}))
        answers: dict[int, bool] = {}
        for text in ["0", "1", *names, *quotients]:
            value = _evaluated(text, config)
            if value is not None and value not in answers:
                answers[value] = made({**config, key: value}) == first
            if value is None or not answers[value]:
                continue
            if all(made({**flat, key: _evaluated(text, flat)}) == shapes for flat, shapes in others):
                found[key] = f"= {text}" if not text.isdigit() else value if is_number else bool(value)
                break
    return found


def _evaluated(text: str, flat: FlatConfig) -> int | None:
    try:
        return parse_expression(text).value(flat)
    except (ShardwiseError, TypeError):  # A value that it needs may be null.
        return None


def _by_template(shapes: TensorShapes) -> dict[str, dict[tuple[int, ...], tuple[int, ...]]]:
    found: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = defaultdict(dict)
    for name, shape in shapes.items():
        found[_NUMBER.sub("{}", name)][tuple(map(int, _NUMBER.findall(name)))] = tuple(shape)
    return dict(found)


def flat_config(config: Mapping[str, Any], prefix: str = "") -> FlatConfig:
    """Return the values of a configuration by key, those of its parts with dots."""
    found: FlatConfig = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value and not re.search(r"rope|label", key):
            found |= flat_config(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def nested_config(flat: FlatConfig) -> dict[str, Any]:
    """Return the configuration with these values; see `flat_config`."""
    found: dict[str, Any] = {}
    for key, value in flat.items():
        at, (*steps, last) = found, key.split(".")
        for step in steps:
            at = at.setdefault(step, {})
        at[last] = copy.deepcopy(value)
    return found
