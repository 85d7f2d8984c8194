"""`layout_map_scope`: nesting, threads, tasks, exceptions, and the warning when nothing matches."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import warnings
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

import shardwise as sw
from shardwise.model.scope import LayoutScope, current_scope


def layout_map(axis: str = "x", rules: tuple[str, ...] = ("w",)) -> sw.LayoutMap:
    made = sw.LayoutMap(sw.DeviceMesh((4,), (axis,)))
    for rule in rules:
        made[rule] = (axis,)
    return made


def variable(size: int = 8) -> sw.Variable:
    return sw.Variable((size,), "int8", np.zeros, name="w")


def axes_of(made: sw.Variable) -> object:
    layout = sw.initialize_variables(made).layout
    assert layout is not None
    return layout.axes


def test_scopes_nest_and_the_innermost_counts() -> None:
    outer, inner = layout_map("x"), layout_map("y")
    with sw.layout_map_scope(outer) as scope:
        before = variable()
        assert current_scope() is scope
        with sw.layout_map_scope(inner):
            within = variable()
        after = variable()
        assert current_scope() is scope
    assert current_scope() is None
    assert [axes_of(made) for made in (before, within, after)] == [("x",), ("y",), ("x",)]


def test_an_exception_restores_the_scope_before() -> None:
    with sw.layout_map_scope(layout_map("x")) as outer:
        with pytest.raises(ZeroDivisionError), sw.layout_map_scope(layout_map("y")):
            raise ZeroDivisionError
        assert current_scope() is outer
    with pytest.raises(KeyboardInterrupt), sw.layout_map_scope(layout_map("y")):
        raise KeyboardInterrupt
    assert current_scope() is None


def test_threads_have_scopes_of_their_own() -> None:
    barrier = threading.Barrier(8)
    found: dict[int, object] = {}

    def work(i: int) -> None:
        assert current_scope() is None
        with sw.layout_map_scope(layout_map(f"x{i}")):
            barrier.wait()
            made = variable()
            barrier.wait()
        found[i] = axes_of(made)

    with sw.layout_map_scope(layout_map("main")):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {i: (f"x{i}",) for i in range(8)}


def test_asyncio_tasks_have_scopes_of_their_own() -> None:
    async def work(axis: str) -> object:
        with sw.layout_map_scope(layout_map(axis)):
            await asyncio.sleep(0)
            made = variable()
            await asyncio.sleep(0)
        return axes_of(made)

    async def all_of_them() -> list[object]:
        return list(await asyncio.gather(work("a"), work("b"), work("c")))

    assert asyncio.run(all_of_them()) == [("a",), ("b",), ("c",)]


def test_variables_of_several_scopes_in_one_tree_keep_to_theirs() -> None:
    with sw.layout_map_scope(layout_map("x")):
        first = variable()
    with sw.layout_map_scope(layout_map("y")):
        second = variable()
    tree = sw.initialize_variables({"w1": first, "w2": second})
    assert [made.layout.axes for made in tree.values() if made.layout] == [("x",), ("y",)]


def test_nothing_matches_warns_once_with_the_nearest_paths() -> None:
    rules = layout_map(rules=("dense_1/kernel", "w7"))
    with sw.layout_map_scope(rules):
        tree = {"dense_1": {"kernel": variable()}, "w": variable()}
        later = {"other": variable()}
    message = (
        r"no rule of the layout map matches, so all 2 variables are replicated: "
        r"'dense_1\.kernel' \(nearest to rule 'dense_1/kernel'\), 'w' \(nearest to rule 'w7'\)$"
    )
    with pytest.warns(UserWarning, match=message) as warned:
        sw.initialize_variables(tree)
    assert [warning.filename for warning in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sw.initialize_variables(later)


def test_many_rules_that_match_nothing_are_not_all_listed() -> None:
    with sw.layout_map_scope(layout_map(rules=tuple(f"rule_{i}" for i in range(9)))):
        made = variable()
    with sw.layout_map_scope(layout_map(rules=tuple(f"rule_{i}" for i in range(5)))):
        five = variable()
    with pytest.warns(UserWarning, match=r"\(nearest to rule 'rule_4'\)$"):
        sw.initialize_variables({"w": five})
    with pytest.warns(UserWarning, match="and 4 more rules$"):
        sw.initialize_variables(made)


def test_one_match_or_an_empty_map_is_no_reason_to_warn() -> None:
    with sw.layout_map_scope(layout_map()):
        tree = {"w": variable(), "b": variable()}
    with sw.layout_map_scope(sw.LayoutMap(sw.DeviceMesh((4,), ("x",)))):
        replicated = variable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sw.initialize_variables([tree, replicated])


def test_what_the_scope_refuses() -> None:
    with pytest.raises(TypeError, match="layout_map must be a LayoutMap, got dict"), sw.layout_map_scope({}):  # type: ignore[arg-type]
        pass
    with pytest.raises(sw.LayoutError, match="layout_map has no device_mesh"), sw.layout_map_scope(sw.LayoutMap()):
        pass
    with (
        pytest.raises(sw.MeshError, match="'cpu:4' is not in the mesh"),
        sw.layout_map_scope(layout_map(), local_devices=["cpu:4"]),
    ):
        pass
    with (
        pytest.raises(TypeError, match="local_devices must be a sequence"),
        sw.layout_map_scope(layout_map(), local_devices="cpu:1"),
    ):
        pass
    assert current_scope() is None


def test_a_scope_has_its_layout_map() -> None:
    rules = layout_map()
    with sw.layout_map_scope(rules) as scope:
        assert scope.layout_map is rules


def test_a_size_over_the_limit_names_the_variable() -> None:
    made = sw.LayoutMap(sw.DeviceMesh((4,), ("x",)))
    made["w"] = ("x", None)
    with sw.layout_map_scope(made):
        huge = sw.Variable((2**62, 8), "int8", np.zeros, name="w")
        with pytest.raises(sw.SizeOverflowError, match="variable 'w' of shape"):
            sw.initialize_variables(huge)


def test_an_unreduced_layout_is_refused() -> None:
    rules = sw.LayoutMap(sw.DeviceMesh((4,), ("x",)))
    rules["w"] = sw.TensorLayout((None,), unreduced=("x",))
    with sw.layout_map_scope(rules):
        made = variable()
    with pytest.raises(sw.LayoutError, match=r"'w'.*a variable cannot be a partial sum"):
        sw.initialize_variables(made)


def test_plain_objects_import_no_framework() -> None:
    program = (
        "import sys, numpy as np, shardwise as sw\n"
        "rules = sw.LayoutMap(sw.DeviceMesh((2,), ('x',)))\n"
        "with sw.layout_map_scope(rules):\n"
        "    sw.initialize_variables(sw.Variable((4,), 'int8', np.zeros, name='w'))\n"
        "assert not {'keras', 'jax', 'tensorflow', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_where_a_variable_is_does_not_change() -> None:
    scope = LayoutScope(layout_map("x", rules=("w",)))
    placed = scope.place("w", (8,))
    assert scope.dialect("w", placed.layout) is placed.layout
    assert (placed.path, placed.rule, placed.partition.shape) == ("w", "w", (8,))
    with pytest.raises(FrozenInstanceError):
        placed.path = "v"  # type: ignore[misc]


@pytest.mark.heavy
def test_the_warning_looks_at_so_many_names_only() -> None:
    # Comparing all of them with all rules took 40 seconds.
    layout_map = sw.LayoutMap(sw.DeviceMesh((2,), ("x",)))
    for i in range(300):
        layout_map[f"blocks.{i}.attention.query.kernel.of.a.long.name$"] = (None, None)
    scope = LayoutScope(layout_map)
    paths = [f"block{i}/attention/query/kernel/" + "x" * 500 for i in range(2000)]
    with pytest.warns(UserWarning, match=r"all 2000 variables.*, and 295 more rules$") as record:
        scope.warn_if_nothing_matches(paths)
    assert len(str(record[0].message)) < 2000
