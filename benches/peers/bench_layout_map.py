"""Look-ups of a layout map beside Keras's, and beside a loop over compiled rules."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

os.environ.setdefault("KERAS_BACKEND", "numpy")

import keras
from figures import Row, at_most, faster
from part import QUICK, main
from timing import compare

from shardwise import LayoutMap

PATHS = 1_000 if QUICK else 10_000
PARTS = (r"attn/.*kernel", r"attn/.*bias", r"mlp/.*kernel", r"mlp/.*bias", r"norm/scale")


def rules(count: int) -> list[str]:
    """Rules of a model with `count / 5` layers."""
    return [rf"layer_{i // len(PARTS)}/{PARTS[i % len(PARTS)]}" for i in range(count)]


def paths(count: int) -> list[str]:
    """Paths of such a model: of ten, nine match one rule and one matches none."""
    parts = [part.replace(".*", "{}/") for part in (*PARTS, *PARTS[:4])] + ["embed/{}"]
    layers = count // len(PARTS)
    return [f"model/layer_{i * 7 % layers}/{parts[i % 10].format(f'head_{i}')}" for i in range(PATHS)]


def rows() -> Iterator[Row]:
    for count in (10, 50, 200, 600):
        if count <= 200:  # The regular expressions of more do not fit into the cache of `re`: a tenth of a second each.
            yield beside_keras(count)
        yield beside_a_loop(count)
    yield repeated()


def new_paths(layout_map: LayoutMap, asked: list[str]) -> Callable[[], None]:
    """Ask for paths that the map has not seen: it forgets them, and compiles its rules anew, before each round."""

    def look_up() -> None:
        layout_map["forget"] = ()
        del layout_map["forget"]
        for path in asked:
            layout_map[path]

    return look_up


def beside_keras(count: int) -> Row:
    ours, theirs = LayoutMap(match="fullmatch"), keras.distribution.LayoutMap(None)
    for rule in rules(count):
        ours[f".*{rule}"] = theirs[f".*{rule}"] = ("x",)
    asked = paths(count)
    for path in asked[:100]:
        found = [None if layout is None else layout.axes for layout in (ours[path], theirs[path])]
        assert found[0] == found[1]

    def by_keras() -> None:
        for path in asked:
            theirs[path]

    work = f"{count} rules, {PATHS:,} new paths"
    goal = faster(4) if count == 50 else None
    return compare(work, new_paths(ours, asked), "Keras `LayoutMap`", by_keras, goal=goal, turns=3)


def beside_a_loop(count: int) -> Row:
    ours = LayoutMap(match="search")
    for rule in rules(count):
        ours[rule] = ("x",)
    asked = paths(count)
    compiled = [re.compile(rule) for rule in rules(count)]

    def by_loop() -> None:
        for path in asked:
            [rule for rule in compiled if rule.search(path)]

    return compare(f"{count} rules, {PATHS:,} new paths", new_paths(ours, asked), "a loop over `re`", by_loop, turns=3)


def repeated() -> Row:
    layout_map = LayoutMap()
    for rule in rules(50):
        layout_map[rule] = ("x",)
    asked = paths(50)
    remembered = {path: layout_map[path] for path in asked}

    def look_up() -> None:
        for path in asked:
            layout_map[path]

    def by_dict() -> None:
        for path in asked:
            remembered[path]

    work = f"50 rules, {PATHS:,} repeated paths (0.3 µs each are asked)"
    return compare(work, look_up, "a `dict`", by_dict, goal=at_most(0.3e-6 * PATHS))


if __name__ == "__main__":
    main(rows)
