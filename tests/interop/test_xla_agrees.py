"""The text of XLA and Shardy beside what JAX and XLA themselves make of the same layouts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise import TensorLayout
from shardwise.interop.hlo import from_hlo, parse_hlo, to_hlo
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


def test_meshes_and_arrays_on_eight_devices() -> None:
    assert run("jax_eight_devices.py").strip().endswith("all hold")
