"""Look-ups in layout maps: by Python's `re`, path by path and rule by rule, and by Keras's own LayoutMap."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import shardwise as sw

from .frameworks import Framework
from .layouts import NAMES, random_devices, random_mesh
from .subject import Subject, answered, one_by_one, same, sampled

KERAS = Framework("keras", "tests.oracle.worker_keras")

WORDS = ("dense", "dense_1", "conv2d", "kernel", "bias", "h.0", "h.10", "é", "K", "ſ", "a b", "x\n", "\r", "")
PIECES: tuple[str, ...] = (
    *WORDS,
    ".*",
    "/",
    r"\d+",
    "[a-z]+",
    "(kernel|bias)",
    "h.\\d",
    "^",
    "$",
    "(?:dense)?",
    r"\.",
    "(?i:KERNEL)",
)
PIECES += ("k{1,2}", r"\b", r"\B", r"(?<!\d)", "(e)", "x$", r"\w*", r"\s", "[^/]*", "(?m:^)", "(?m:$)", "(?-m:$)", "\n")


@dataclass(frozen=True)
class MapCase:
    """A mesh, rules in order, how they match, and paths to look up."""

    mesh_shape: tuple[int, ...]
    devices: tuple[Any, ...]
    rules: tuple[tuple[str, tuple[str | None, ...]], ...]
    match: Literal["search", "match", "fullmatch"]
    paths: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES[: len(self.mesh_shape)]

    def layout_map(self) -> sw.LayoutMap:
        mesh = sw.DeviceMesh(self.mesh_shape, self.names, self.devices)
        layout_map = sw.LayoutMap(mesh, match=self.match, backtracking=True)
        for key, axes in self.rules:
            layout_map[key] = axes
        return layout_map

    def snippet(self) -> str:
        lines = [f"rules[{key!r}] = {axes}" for key, axes in self.rules]
        mesh = f"sw.DeviceMesh({self.mesh_shape}, {self.names}, {list(self.devices)})"
        head = f"import shardwise as sw\n\nrules = sw.LayoutMap({mesh}, match={self.match!r}, backtracking=True)"
        return "\n".join([head, *lines, f"paths = {self.paths}"])

    def simpler(self) -> Iterator[MapCase]:
        for i in range(len(self.rules)):
            yield replace(self, rules=self.rules[:i] + self.rules[i + 1 :])
        for i in range(len(self.paths)):
            if len(self.paths) > 1:
                yield replace(self, paths=(self.paths[i],))


def random_key(rng: random.Random) -> str:
    """A regular expression that Python takes."""
    while True:
        key = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 4)))
        try:
            re.compile(key)
        except re.error:
            continue
        if key:
            return key


def random_path(rng: random.Random) -> str:
    return "/".join(rng.choice(WORDS) for _ in range(rng.randint(1, 3)))


def random_map(rng: random.Random) -> MapCase:
    mesh_shape = random_mesh(rng, 8)
    size = math.prod(mesh_shape)
    rules = {}
    for _ in range(rng.randint(0, 6)):
        names = rng.sample(NAMES[: len(mesh_shape)], rng.randint(0, len(mesh_shape)))
        axes = [*names, *[None] * rng.randint(0, 2)]
        rng.shuffle(axes)
        rules[random_path(rng) or "x" if rng.random() < 0.3 else random_key(rng)] = tuple(axes)
    return MapCase(
        mesh_shape,
        random_devices(rng, size) or tuple(f"cpu:{i}" for i in range(size)),
        tuple(rules.items()),
        rng.choice(("search", "match", "fullmatch")),
        tuple(random_path(rng) for _ in range(rng.randint(1, 4))),
    )


def found(layout_map: sw.LayoutMap, path: str) -> Any:
    try:
        layout = layout_map[path]
    except sw.LayoutError:
        return "several"
    return None if layout is None else layout.axes


def by_re(case: MapCase, path: str) -> Any:
    """An exact key first, then every key as a regular expression (the rule of `LayoutMap`)."""
    rules = dict(case.rules)
    if path in rules:
        return rules[path]
    matching = [key for key in rules if getattr(re, case.match)(key, path)]
    return "several" if len(matching) > 1 else rules[matching[0]] if matching else None


def check_by_re(case: MapCase) -> None:
    layout_map = case.layout_map()
    for path in case.paths:
        same(f"layout_map[{path!r}]", found(layout_map, path), by_re(case, path))


def keras_map(rng: random.Random) -> MapCase:
    """Keras joins the names of its paths itself, and matches whole ones."""
    case = random_map(rng)
    # To its whole paths a rule that searches is spelt with `.*` around it, which flags and exact keys do not survive.
    return replace(case, match="fullmatch")


def answers(cases: list[MapCase]) -> list[Any]:
    return KERAS.ask(
        [
            {
                "mesh": (case.mesh_shape, case.names, case.devices),
                "rules": case.rules,
                "paths": case.paths,
                "match": case.match,
            }
            for case in cases
        ]
    )


def compare(case: MapCase, answer: dict[str, Any]) -> None:
    layout_map = case.layout_map()
    mesh = sw.DeviceMesh(case.mesh_shape, case.names, case.devices)
    same("to_keras of the mesh", answer["mesh"], (case.mesh_shape, case.names, list(case.devices), case.mesh_shape))
    same("from_keras of the mesh", answer["mesh_back"], (repr(mesh), repr(mesh)))
    same("to_keras of the layouts", answer["axes"], [axes for _, axes in case.rules])
    layouts = [repr(sw.TensorLayout(axes, mesh)) for _, axes in case.rules]
    same("from_keras of the layouts", answer["back"], layouts)
    same("look-ups", [found(layout_map, path) for path in case.paths], answer["found"])
    same("look-ups in the map converted", answer["found_converted"], answer["found"])
    same("the map converted and back", answer["map_back"], True)


SUBJECTS = [
    Subject("Python's re", "layout map look-ups", 200_000, 2_000, sampled(random_map, one_by_one(check_by_re))),
    Subject(
        "Keras",
        "maps, look-ups",
        50_000,
        1_000,
        sampled(keras_map, answered(answers, compare)),
        KERAS.missing,
        KERAS.stop,
    ),
]
