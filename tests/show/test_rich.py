"""Values printed with rich say or draw what they are; each plan explains itself, and its `repr` is a line."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.deploy import Deployment
from shardwise.propagate import propagate

MESH = sw.DeviceMesh((4,), ("x",))
ROWS, COLUMNS = (sw.TensorLayout(axes, MESH).partition((8, 8)) for axes in (("x", None), (None, "x")))


def packed(order: Any) -> sw.Partition:
    return sw.TensorLayout((sw.packed.qkv(8, 4, 4, "x", order=order), None), MESH).partition((64, 8))


def rules() -> sw.LayoutMap:
    made = sw.LayoutMap(MESH)
    made["w$"] = ("x", None)
    return made


def checkpoint_plan() -> Any:
    sw.save_checkpoint("a.safetensors", {"w": np.zeros((8, 8), "f4")})
    return sw.plan_checkpoint("a.safetensors", "b", to="hf")


def op() -> Any:
    shapes = [(32, 64), (64, 16)]
    return sw.einsum("bf,fd->bd", x=(None, "x"), w=("x", None), shapes=shapes, mesh=MESH, dtype="float32")


def computation() -> Any:
    tanh = {"op": "tanh", "in": [0], "out": [[(8, 4), "float32"]]}
    return propagate(sw.computation.Computation([[(8, 4), "float32"]], [tanh], [1]), [("x", None)], mesh=MESH)


PLANS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: sw.plan_reshard(ROWS, COLUMNS),
    "refit": lambda: sw.plan_refit(packed("interleaved"), packed("blocked")),
    "model": lambda: sw.plan_model({"w": ROWS}, {"w": COLUMNS}, {"w": ((8, 8), "float32")}),
    "checkpoint": checkpoint_plan,
    "op": op,
    "computation": computation,
}
#: Other values, and a line of what is printed of each.
OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "mesh": (lambda: MESH, "mesh x=4"),
    "layout": (lambda: ROWS.layout, "('x', None)"),
    "layout without a mesh": (lambda: sw.TensorLayout(("x",)), "TensorLayout(('x',))"),
    "partition": (lambda: ROWS, "↓ dim 0: 8, cut in 4 by x"),
    "array": (lambda: sw.distribute_tensor(np.zeros((8, 8)), ROWS.layout), "→ dim 1: 8, not cut"),
    "rules": (rules, "LayoutMap of 1 rule on x=4; a rule matches by search"),
    "report": (lambda: rules().report({"w": ((8, 8), "float32")}), "each device holds 64 B of 256 B, 25%"),
    "deployment": (lambda: Deployment(4, MESH, {"w": ("x", None)}), "w: ('x', None)"),
    "checkpoint": (lambda: checkpoint_plan() and sw.open_checkpoint("a.safetensors"), "w       8 × 8  float32  256 B"),
}


def printed(value: Any) -> list[str]:
    console = pytest.importorskip("rich.console")
    out = io.StringIO()
    console.Console(file=out, width=200, color_system=None).print(value)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("kind", PLANS)
def test_each_plan_explains_itself(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = PLANS[kind]()
    assert len(repr(plan).splitlines()) == 1
    said = plan.explain()
    assert len(said.splitlines()) >= 1
    assert printed(plan) == said.splitlines()


@pytest.mark.parametrize("kind", OTHERS)
def test_other_values(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made, line = OTHERS[kind]
    lines = printed(made())
    assert line in [text.strip() for text in lines], lines


def test_markup_in_a_name_is_text() -> None:
    """A label such as `[red]` is none of rich's marks."""
    assert any("[red]" in line for line in printed(sw.DeviceMesh((2,), ("x",), ["[red]", "[/]"])))


def test_rich_is_not_imported_before_it_asks() -> None:
    code = "import sys, shardwise as sw; repr(sw.DeviceMesh((2,), ('x',))); assert 'rich' not in sys.modules"
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_refit_says_what_moves() -> None:
    """By hand: 4 groups on 4 ranks in either order are at home; on the next rank each part has to move."""
    here, there = (
        packed("interleaved"),
        sw.TensorLayout(
            packed("blocked").layout.axes, sw.DeviceMesh((4,), ("x",), ["b:0", "b:1", "b:2", "b:3"])
        ).partition((64, 8)),
    )
    assert sw.plan_refit(here, packed("blocked")).explain("float16").splitlines() == [
        "3 tensors, 1.0 KiB of float16, go from 4 devices to 4.",
        "q: nothing moves; 512 B stays in place.",
        "k: nothing moves; 256 B stays in place.",
        "v: nothing moves; 256 B stays in place.",
    ]
    assert sw.plan_refit(here, there).explain("float16").splitlines()[1:] == [
        "q: 4 boxes move, 512 B; 0 B stays in place.",
        "k: 4 boxes move, 256 B; 0 B stays in place.",
        "v: 4 boxes move, 256 B; 0 B stays in place.",
    ]
