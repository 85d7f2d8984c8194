"""The tensors of a type of models worked out by experiment: from what changes in them when its configuration does.

A model is made again and again without its weights, with one value of the configuration changed at a time. So it is
known which values a size depends on, and which tensors exist when. What is found is carried out for further
configurations, of which nothing was learned, and given only if it is right for all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..._expressions import parse_expression
from ...errors import LayoutError, ShardwiseError
from ...rules.toml_text import key_text, value_text
from ...rules.type_tensors import TypeTensors
from .experiments import Experiment, FlatConfig, Sample, TensorShapes, defaults_of_unlisted, flat_config, nested_config
from .facts import Facts, learned_defaults

__all__ = ["learn_type_tensors", "tensors_text"]

#: The numbers of models that are learned from, and of those that what is learned is then carried out for.
_LEARNED, _CHECKED = 56, 20
#: Rounds, in each of which what did not hold before is learned from, too, and compared with further models.
_ROUNDS = 3


def learn_type_tensors(
    config: Mapping[str, Any],
    tensors_of: Callable[[Mapping[str, Any]], TensorShapes],
    resolved: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    *,
    architecture: str | None = None,
    other_names: Mapping[str, str] | None = None,
    unlisted: Sequence[str] = (),
    seed: int = 0,
) -> dict[str, Any]:
    """Return what `TypeTensors` takes for the type of a configuration.

    Args:
        config: a configuration with all of its values, with few layers and experts.
        tensors_of: makes the names and shapes of a model's tensors; raises any error if it has no such model.
        resolved: adds what a configuration leaves out.
        architecture: the class of the models.
        other_names: further names of keys.
        unlisted: keys that models ask for and that a whole configuration may lack.
        seed: of the configurations that are tried.

    Raises:
        LayoutError: if the tensors follow from the configuration in no way that is known here; the message names some.
    """
    flat = flat_config(config)
    asked = defaults_of_unlisted(flat, tensors_of, unlisted)
    for key, value in asked.items():
        is_text = isinstance(value, str)
        flat |= {} if value is None else {key: parse_expression(value[2:]).value(flat) if is_text else value}
    experiment = Experiment(nested_config(flat), tensors_of, resolved, random.Random(seed))
    samples, more = experiment.walk(_LEARNED, turns=2), experiment.walk(_CHECKED)
    failed: LayoutError | None = None
    for _ in range(_ROUNDS):
        half = len(more) // 2
        whole = [one for one in samples if not _nulls(one, experiment)]
        others = [one for one in more if not _nulls(one, experiment)]
        # Of what was not seen, half is learned from, too; then models in which a number is null are left out.
        for parts in ((samples, more), ([*samples, *more[:half]], more[half:]), (whole, others)):
            try:
                table = _learned(config, experiment, parts, resolved, architecture, other_names or {})
                return _with_unlisted(table, asked)
            except LayoutError as error:
                failed = failed or error
        samples, more = [*samples, *more], experiment.walk(_CHECKED)
    assert failed is not None
    raise failed


def _with_unlisted(table: dict[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table that also says what keys are which a whole configuration may lack; null where it is not known."""
    fixed, defaults = table.get("fixed", {}), table.get("defaults", {})
    unknown = {key: "null" for key, value in asked.items() if value is None or key in fixed}
    known = {key: value for key, value in asked.items() if key not in unknown}
    return {
        **table,
        **({"fixed": {**fixed, **unknown}} if unknown else {}),
        **({"defaults": {**{k: v for k, v in defaults.items() if k not in unknown}, **known}} if known else {}),
    }


def _nulls(sample: Sample, experiment: Experiment) -> set[str]:
    """Return the keys whose number is null in a sample, where null means something."""
    return {key for key in experiment.nullable if sample.flat.get(key) is None}


def _learned(
    config: Mapping[str, Any],
    experiment: Experiment,
    samples: tuple[Sequence[Sample], Sequence[Sample]],
    resolved: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    architecture: str | None,
    other_names: Mapping[str, str],
) -> dict[str, Any]:
    """Return what is learned from samples, and right for them and for others."""
    learned, checked = samples
    fixed: FlatConfig = dict(experiment.fixed)
    while True:
        facts = Facts([one for one in learned if _has(one, fixed)], experiment.varied - fixed.keys())
        groups, failed = facts.groups()
        if not failed:
            break
        key = _worst(learned, fixed, experiment.varied, failed)
        if key is None:
            some = ", ".join(sorted(failed)[:4])
            raise LayoutError(
                f"{len(failed)} kinds of tensors follow from the configuration by no known formula: {some}"
            )
        fixed[key] = experiment.base[key]
    fixed |= experiment.stated
    if unused := sorted(experiment.nullable - facts.used):
        raise LayoutError(f"the meaning of null for {', '.join(unused)} is not known")
    table: dict[str, Any] = {"type": config["model_type"]}
    table |= {"class": architecture} if architecture else {}
    table["fixed"] = {key: "null" if value is None else value for key, value in sorted(fixed.items())}
    table["choices"] = {key: sorted(map(str, kinds)) for key, kinds in sorted(experiment.kinds.items()) if kinds}
    keys = {*facts.used, *fixed, *table["choices"]}
    lists = {key for key in keys if isinstance(experiment.base[key], list) and key not in fixed}
    kept = [one for one in learned if _has(one, fixed)]
    table["defaults"], table["nulls"] = learned_defaults(keys - lists, kept, resolved)
    table["other_names"] = {name: key for name, key in other_names.items() if key in keys}
    table["groups"] = groups
    table = {key: value for key, value in table.items() if value not in ({}, [])}
    found = TypeTensors(table, "what was learned")
    for one in [*learned, *checked]:
        if _has(one, fixed):
            try:
                made: TensorShapes = found.shapes(nested_config(one.flat))
            except ShardwiseError as error:
                raise LayoutError(f"the learned rules refuse a configuration that was tried: {error}") from error
            if made != one.shapes:
                names = [name for name in {**made, **one.shapes} if made.get(name) != one.shapes.get(name)]
                raise LayoutError(f"the learned rules do not hold for a further configuration: {', '.join(names[:4])}")
    return table


def _has(sample: Sample, fixed: FlatConfig) -> bool:
    return all(sample.flat.get(key) == value for key, value in fixed.items())


def _worst(samples: Sequence[Sample], fixed: FlatConfig, varied: set[str], failed: Mapping[str, str]) -> str | None:
    """Return the key that, held as it was, leaves the fewest kinds of tensors unexplained."""
    best: tuple[int, str] | None = None
    base = samples[0].flat
    for key in sorted(varied - fixed.keys()):
        if type(base[key]) is int:
            continue
        kept = [one for one in samples if _has(one, {**fixed, key: base[key]})]
        if len(kept) < len(samples) // 5:
            continue
        count = len(Facts(kept, varied - fixed.keys() - {key}).groups()[1])
        if count < len(failed) and (best is None or count < best[0]):
            best = count, key
    return best and best[1]


def tensors_text(table: Mapping[str, Any]) -> str:
    """Return the part of a rules file that states the tensors of a type.

    >>> print(tensors_text({"type": "mine", "groups": [{"shapes": {"h.w": ["hidden", "2"]}}]}))
    [tensors]
    type = "mine"
    <BLANKLINE>
    [[tensors.groups]]
    [tensors.groups.shapes]
    'h.w' = ["hidden", "2"]
    """
    lines = ["[tensors]", *(f"{name} = {value_text(value)}" for name, value in table.items() if name != "groups")]
    for group in table["groups"]:
        lines += ["", "[[tensors.groups]]"]
        lines += [f"{name} = {value_text(value)}" for name, value in group.items() if name != "shapes"]
        lines += ["[tensors.groups.shapes]"]
        lines += [f"{key_text(name)} = {value_text(dims)}" for name, dims in group["shapes"].items()]
    return "\n".join(lines)
