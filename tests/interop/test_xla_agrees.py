"""The text of XLA and Shardy beside what JAX and XLA themselves make of the same layouts."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise import TensorLayout
from shardwise.interop.hlo import HloSharding, from_hlo, parse_hlo, to_hlo
from shardwise.interop.shardy import from_shardy, to_shardy

from .layouts import random_layout

pytest.importorskip("jax")

CASES = 800


def run(script: str, stdin: str = "") -> str:
    """Run one of our scripts in a process of its own, where JAX has eight devices."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    path = Path(__file__).with_name(script)
    done = subprocess.run(
        [sys.executable, str(path)], input=stdin, env=env, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def answers() -> list[tuple[TensorLayout, dict[str, Any]]]:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    layouts = [random_layout(source) for _ in range(CASES)]
    cases = []
    for layout in layouts:
        mesh = layout.device_mesh
        assert mesh is not None
        cases.append(
            {
                "shape": mesh.shape,
                "names": mesh.axis_names,
                "axes": [[spec] if isinstance(spec, str) else spec for spec in layout.axes],
                "unreduced": layout.unreduced,
                "hlo": to_hlo(layout),
                "hlo_list": to_hlo(layout, iota=False),
                "shardy": to_shardy(layout, mesh_name=None),
            }
        )
    return list(zip(layouts, json.loads(run("jax_oracle.py", json.dumps(cases))), strict=True))


def test_hlo_text_is_what_jax_hands_to_xla(answers: list[tuple[TensorLayout, dict[str, Any]]]) -> None:
    for layout, answer in answers:
        assert to_hlo(layout) == answer["hlo"], layout
        assert answer["same"], layout


def test_xla_reads_our_device_lists_as_the_same_tiles(answers: list[tuple[TensorLayout, dict[str, Any]]]) -> None:
    assert sum(answer["devices"] is not None for _, answer in answers) > CASES / 4
    for layout, answer in answers:
        assert answer["listed"] == answer["devices"], layout
        if answer["devices"] is not None:
            order = parse_hlo(answer["hlo"]).order
            devices = order if isinstance(order, tuple) else tuple(order.devices.tolist())
            assert list(devices) == answer["devices"], layout


def test_the_tiles_that_xla_writes_are_our_boxes(answers: list[tuple[TensorLayout, dict[str, Any]]]) -> None:
    for layout, answer in answers:
        mesh = layout.device_mesh
        assert mesh is not None
        back = from_hlo(answer["hlo"], mesh, layout.rank)
        shape = tuple(range(5, 5 + layout.rank))
        boxes = layout.partition(shape, uneven="ceil").boxes()
        assert np.array_equal(back.partition(shape, uneven="ceil").boxes(), boxes), layout
        sharding = parse_hlo(answer["hlo"])
        if sharding.kind == "tiled":
            # XLA gives an empty tile the start min(i·s, n), which is n as well.
            assert np.array_equal(sharding.boxes(shape), boxes), layout


def test_shardy_text_is_what_mlir_prints_and_reads(answers: list[tuple[TensorLayout, dict[str, Any]]]) -> None:
    for layout, answer in answers:
        assert to_shardy(layout, mesh_name=None) == answer["shardy"] == answer["shardy_read"], layout
        assert from_shardy(answer["shardy"]) == layout


def test_named_shardings_have_the_tiles_that_xla_converts_them_to() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    texts = [random_named(source) for _ in range(CASES)]
    answers = json.loads(run("jax_oracle.py", json.dumps({"named": texts})))
    assert sum(answer["devices"] is not None for answer in answers) > CASES / 2
    for text, answer in zip(texts, answers, strict=True):
        if answer["hlo"] == "{devices=[]<=[1]}":  # A number on one device, which XLA does not read either.
            continue
        # Of two kinds over one device XLA says neither; we say one.
        if re.fullmatch(r"\{devices=\[1(,1)*\]<=\[1\]\}", answer["hlo"]):
            assert parse_hlo(text).kind in ("tiled", "manual", "unreduced", "replicated")
            continue
        ours, theirs = parse_hlo(text), parse_hlo(answer["hlo"])
        if math.prod(theirs.num_tiles) == 1 and len(theirs.subgroups) == 1:  # One kind over all devices.
            theirs = HloSharding(theirs.subgroups[0])  # type: ignore[arg-type]
        assert (ours.kind, ours.tile, ours.subgroups) == (theirs.kind, theirs.tile, theirs.subgroups), text
        if ours.kind == "tiled":
            rank = len(ours.num_tiles)
            shape = tuple(range(5, 5 + rank))
            assert np.array_equal(ours.boxes(shape), theirs.boxes(shape)), text
            # The order within replicas is of no meaning, and XLA sorts it.
            kept = [entry for entry, kind in enumerate(ours.subgroups, rank) if kind != "replicated"]
            assert np.array_equal(ours.tile_indices()[:, kept], theirs.tile_indices()[:, kept]), text


def random_named(source: random.Random) -> str:
    """A named sharding as XLA prints it: sub-axes, subgroups, devices as a list or reshaped, metadata."""
    sizes = [source.choice((1, 2, 2, 3, 4, 6, 8)) for _ in range(source.randint(1, 4))]
    names = [f"{source.choice(('x', 'a b', 'mesh', 'metadata={'))}{axis}" for axis in range(len(sizes))]
    parts: list[tuple[int, int, str]] = []
    for axis, (name, size) in enumerate(zip(names, sizes, strict=True)):
        middle = source.choice([low for low in (2, 3, 4) if size % low == 0 and low < size] or [0])
        if middle and source.random() < 0.5:
            parts += [(axis, 1, f"'{name}':(1){middle}"), (axis, middle, f"'{name}':({middle}){size // middle}")]
        else:
            parts.append((axis, 1, f"'{name}'"))
    source.shuffle(parts)
    held: dict[str | int, list[tuple[int, int, str]]] = {}
    rank = source.randint(0, 3)
    for part in parts:
        where = source.choice([*range(rank), *range(rank), "replicated", "unreduced", "manual", None])
        # XLA dies of two parts of an axis side by side, which are one.
        if where is not None and not any(other[0] == part[0] for other in held.get(where, [])):
            held.setdefault(where, []).append(part)
    dims = [[text for _, _, text in held.get(dim, [])] + ["?"] * (source.random() < 0.1) for dim in range(rank)]
    text = ",".join(f"'{name}'={size}" for name, size in zip(names, sizes, strict=True))
    count = math.prod(sizes)
    ids = source.choice(["", "", "list", "iota"])
    listed = source.sample(range(count), count)
    if ids == "list" and listed != sorted(listed):  # XLA dies of a list of 0, 1, …
        text += f"], device_ids=({','.join(map(str, listed))}), ["
    elif ids == "iota" and len(sizes) > 1:
        order = source.sample(range(len(sizes)), len(sizes))
        text += f"], device_ids=([{','.join(map(str, sizes))}]T({','.join(map(str, order))})), ["
    else:
        text += "], ["
    text = f"mesh[{text}{', '.join('{' + ', '.join(dim) + '}' for dim in dims)}]"
    for kind in ("replicated", "unreduced", "manual"):
        if kind in held:
            text += f", {kind}={{{', '.join(part for _, _, part in sorted(held[kind]))}}}"
    return f"{{{text}{source.choice(['', ', metadata={op_name=' + chr(34) + 'jit(f)/}{' + chr(34) + '}'])}}}"


def test_meshes_and_arrays_on_eight_devices() -> None:
    assert run("jax_eight_devices.py").strip().endswith("all hold")
