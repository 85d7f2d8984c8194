from __future__ import annotations

import copy
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise import (
    DeviceMesh,
    LayoutError,
    LayoutMap,
    LayoutRule,
    TensorLayout,
    Variable,
    initialize_variables,
    layout_map_scope,
    open_checkpoint,
    plan_model,
    save_checkpoint,
)
from shardwise.rules.search import REMEMBERED_PATHS
from tests.checks import refused

MESH = DeviceMesh((2, 4), ("data", "model"))


def keras_example() -> LayoutMap:
    layout_map = LayoutMap(device_mesh=None)
    layout_map["dense.*kernel"] = (None, "model")
    layout_map["dense.*bias"] = ("model",)
    layout_map["conv2d.*kernel"] = TensorLayout((None, None, None, "model"))
    layout_map["conv2d.*bias"] = TensorLayout(("model",))
    return layout_map


class TestLookUp:
    @pytest.mark.parametrize(
        ("path", "axes"),
        [
            ("dense_1.kernel", (None, "model")),
            ("dense_1.bias", ("model",)),
            ("dense_2.kernel", (None, "model")),
            ("dense_2.bias", ("model",)),
            ("my_model/conv2d_123/kernel", (None, None, None, "model")),
            ("my_model/conv2d_123/bias", ("model",)),
            ("my_model/conv3d_1/kernel", None),
            ("my_model/conv3d_1/bias", None),
        ],
    )
    def test_the_example_of_the_keras_page(self, path: str, axes: tuple[str | None, ...] | None) -> None:
        layout_map = keras_example()
        for _ in range(2):  # The second answer is a remembered one.
            assert layout_map[path] == (None if axes is None else TensorLayout(axes))

    def test_a_path_that_cannot_be_hashed(self) -> None:
        class Unhashable(str):
            __hash__ = None  # type: ignore[assignment]

        with pytest.raises(TypeError, match="unhashable"):
            LayoutMap()[Unhashable("kernel")]

    def test_an_inserted_layout_comes_back_itself(self) -> None:
        layout_map, layout = LayoutMap(), TensorLayout((None, "model"))
        layout_map["dense.*kernel"] = layout
        assert layout_map["dense_1/kernel"] is layout
        assert layout_map["dense.*kernel"] is layout

    def test_an_exact_key_comes_before_the_rules_that_match(self) -> None:
        layout_map = LayoutMap()
        layout_map["kernel"] = ("x", None)
        layout_map["dense/kernel"] = (None, "y")
        assert layout_map["dense/kernel"] == TensorLayout((None, "y"))
        assert layout_map.matching_rules("dense/kernel") == ("dense/kernel",)
        with pytest.raises(LayoutError):
            layout_map["my/dense/kernel"]

    def test_an_exact_key_counts_even_where_it_does_not_match_itself(self) -> None:
        layout_map = LayoutMap()
        layout_map["h[0]"] = ("x",)
        assert layout_map["h[0]"] == TensorLayout(("x",))
        assert layout_map["h0"] == TensorLayout(("x",))
        assert layout_map["my/h[0]"] is None

    def test_several_matching_rules_are_all_named(self) -> None:
        layout_map = LayoutMap(backtracking=True)
        for key in ["kernel", "bias", "dense", r"(?=dense_\d)"]:
            layout_map[key] = ("x",)
        for _ in range(2):
            with pytest.raises(LayoutError, match=r"'dense_1/kernel'.*3 rules") as error:
                layout_map["dense_1/kernel"]
            for key in ["kernel", "dense", r"(?=dense_\d)"]:
                assert repr(key) in str(error.value)
            assert "bias" not in str(error.value)
        assert layout_map.matching_rules("dense_1/kernel") == ("kernel", "dense", r"(?=dense_\d)")

    @pytest.mark.parametrize(
        ("mode", "found"),
        [("search", {"kernel", "a/kernel", "kernel/a"}), ("match", {"kernel", "kernel/a"}), ("fullmatch", {"kernel"})],
    )
    def test_the_three_ways_of_matching(self, mode: str, found: set[str]) -> None:
        layout_map = LayoutMap(match=mode)  # type: ignore[arg-type]
        layout_map["k.rnel"] = ("x",)
        paths = ["kernel", "a/kernel", "kernel/a", "kern"]
        assert {path for path in paths if layout_map[path] is not None} == found

    @pytest.mark.parametrize("path", [3, None, b"dense", 2.0, ["dense"], ("dense",)])
    def test_a_path_is_a_string(self, path: object) -> None:
        layout_map = keras_example()
        for look_up in (layout_map.__getitem__, layout_map.get, layout_map.matching_rules):
            with pytest.raises(TypeError, match="path must be a string"):
                look_up(path)  # type: ignore[index, arg-type]

    def test_any_path_can_be_asked_for(self) -> None:
        layout_map = LayoutMap()
        layout_map["^$"], layout_map["\\w"], layout_map["é"] = ("x",), ("y",), ("z",)
        assert layout_map[""] == TensorLayout(("x",))
        assert layout_map["\n"] == TensorLayout(("x",))
        assert layout_map["ü"] == TensorLayout(("y",))
        assert layout_map["\ud800"] is None
        assert layout_map["\ud800a"] == TensorLayout(("y",))
        assert layout_map["\0" * 100_000] is None

    @pytest.mark.heavy
    def test_what_is_remembered_is_bounded(self) -> None:
        layout_map = keras_example()
        layout_map["dense/0"] = ("exact",)
        for i in range(REMEMBERED_PATHS + 10):
            layout_map[f"conv3d/{i}"]
        assert len(layout_map._answers) <= REMEMBERED_PATHS
        assert layout_map["dense/0"] == TensorLayout(("exact",))
        assert layout_map["dense/kernel"] == TensorLayout((None, "model"))

    @pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "([a-z]+)*$", r"(\w+\s?)*$", "(?i)(A+)+$", r"(a+)+\Z"])
    def test_nested_repetitions_do_not_hang(self, pattern: str) -> None:
        # On an engine that backtracks, this would take years.
        layout_map = LayoutMap(match="match")
        layout_map[pattern] = ("x",)
        assert layout_map["a" * 40 + "!"] is None
        assert layout_map["a" * 40] == TensorLayout(("x",))

    @pytest.mark.parametrize("path", ["a" * 40 + "é", "a" * 40 + "!\n", "a" * 40 + "\0"])
    def test_nor_in_other_paths_where_the_rule_has_no_class(self, path: str) -> None:
        layout_map = LayoutMap()
        layout_map["(a+)+$"] = ("x",)
        assert layout_map[path] is None

    @pytest.mark.heavy
    def test_hundreds_of_rules(self) -> None:
        layout_map = LayoutMap()
        for i in range(600):
            layout_map[rf"layers\.{i}\.(attn|mlp)\.\w+\.weight$"] = (f"axis{i}",)
        for i in range(600):
            assert layout_map[f"model.layers.{i}.attn.q_proj.weight"] == TensorLayout((f"axis{i}",))
        assert layout_map["model.layers.600.attn.q_proj.weight"] is None


class TestInsertion:
    @pytest.mark.parametrize("axes", [(None, "model"), [None, "model"], [None, ["model"]]])
    def test_axes_become_a_layout_over_the_mesh_of_the_map(self, axes: list[str | None]) -> None:
        layout_map = LayoutMap(MESH)
        layout_map["kernel"] = axes
        assert layout_map["kernel"] == TensorLayout((None, "model"), MESH)

    def test_a_layout_without_a_mesh_is_kept_over_that_of_the_map(self) -> None:
        layout_map, layout = LayoutMap(MESH), TensorLayout(("model",), unreduced=("data",))
        layout_map["bias"] = layout
        assert layout_map["bias"] == TensorLayout(("model",), MESH, unreduced=("data",))

    def test_no_map_changes_the_layout_that_it_is_given(self) -> None:
        layout, other = TensorLayout(("model",)), DeviceMesh((2,), ("model",))
        found, hashed, text = {layout: "here"}, hash(layout), repr(layout)
        first, second, updated = LayoutMap(MESH), LayoutMap(other), LayoutMap(MESH)
        first["bias"] = layout
        second["bias"] = layout
        updated.update({"bias": layout})
        updated.setdefault("kernel", layout)
        assert (layout.device_mesh, hash(layout), repr(layout)) == (None, hashed, text)
        assert found[layout] == found[TensorLayout(("model",))] == "here"
        meshes = [
            found.device_mesh for found in (first["bias"], second["bias"], updated["kernel"]) if found is not None
        ]
        assert meshes == [MESH, other, MESH]

    def test_a_layout_keeps_its_own_mesh(self) -> None:
        mesh = DeviceMesh((8,), ("x",))
        layout_map = LayoutMap(MESH)
        layout_map["bias"] = TensorLayout(("x",), mesh)
        layout = layout_map["bias"]
        assert layout is not None
        assert layout.device_mesh == mesh

    @pytest.mark.parametrize("key", ["", None, 3, b"kernel", re.compile("kernel")])
    def test_a_key_is_a_non_empty_string(self, key: object) -> None:
        layout_map = LayoutMap()
        with pytest.raises(TypeError, match="non-empty string"):
            layout_map[key] = ("x",)  # type: ignore[index]
        assert len(layout_map) == 0

    @pytest.mark.parametrize("value", [None, "model", 3, {"model"}, {"axes": ()}, MESH])
    def test_a_value_is_a_layout_or_its_axes(self, value: object) -> None:
        with pytest.raises(TypeError, match=r"rule 'kernel'.*TensorLayout"):
            LayoutMap()["kernel"] = value  # type: ignore[assignment]

    @pytest.mark.parametrize(
        ("pattern", "said"),
        [
            ("a(b", "position 1"),
            ("ab[", "position 2"),
            ("*a", "position 0"),
            ("(?P<n>a)(?P<n>b)", "position 12"),
            ("a{99999999999999999999}", "repetition"),
            ("a\ud800", "position 1"),
            ("(" * 100_000 + ")" * 100_000, "regular expression"),
        ],
    )
    def test_what_is_no_regular_expression_is_refused_at_once(self, pattern: str, said: str) -> None:
        layout_map = LayoutMap()
        with pytest.raises(LayoutError, match=said):
            layout_map[pattern] = ("x",)
        assert list(layout_map) == []

    def test_a_key_is_inserted_once(self) -> None:
        layout_map = LayoutMap(MESH)
        layout_map["kernel"] = (None, "model")
        second = TensorLayout(("data",))
        with pytest.raises(LayoutError, match=r"'kernel' is in the map already.*\(None, 'model'\)"):
            layout_map["kernel"] = second
        assert second.device_mesh is None
        assert layout_map["kernel"] == TensorLayout((None, "model"), MESH)
        del layout_map["kernel"]
        layout_map["kernel"] = second
        assert layout_map["kernel"] == TensorLayout(("data",), MESH)

    def test_axes_that_the_mesh_lacks_are_refused_with_the_rule(self) -> None:
        layout_map, layout = LayoutMap(MESH), TensorLayout(("seq",))
        for value in (layout, ("seq",)):
            with pytest.raises(LayoutError, match=r"rule 'kernel'.*seq"):
                layout_map["kernel"] = value
        assert layout.device_mesh is None
        assert "kernel" not in layout_map

    def test_axes_that_are_no_layout_are_refused_with_the_rule(self) -> None:
        with pytest.raises(LayoutError, match=r"rule 'kernel'.*'x'"):
            LayoutMap()["kernel"] = ("x", "x")
        with pytest.raises(TypeError, match=r"rule 'kernel'.*axes"):
            LayoutMap()["kernel"] = (1,)  # type: ignore[assignment]

    def test_the_arguments_of_the_map(self) -> None:
        with pytest.raises(TypeError, match="device_mesh"):
            LayoutMap((2, 4))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="match"):
            LayoutMap(match=None)  # type: ignore[arg-type]
        with pytest.raises(LayoutError, match=r"'find'.*'search', 'match', 'fullmatch'"):
            LayoutMap(match="find")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="device_mesh and mesh are two names of one argument"):
            LayoutMap(MESH, mesh=MESH)
        assert LayoutMap(MESH).device_mesh is LayoutMap(mesh=MESH).device_mesh is MESH
        assert LayoutMap().match == "search"
        assert not LayoutMap().backtracking
        assert LayoutMap(backtracking=True).backtracking


class TestMapping:
    def test_the_keys_are_those_inserted_in_their_order(self) -> None:
        layout_map = keras_example()
        keys = ["dense.*kernel", "dense.*bias", "conv2d.*kernel", "conv2d.*bias"]
        assert list(layout_map) == list(layout_map.keys()) == keys
        assert len(layout_map) == 4
        assert [layout.rank for layout in layout_map.values()] == [2, 1, 4, 1]
        assert [(key, layout.rank) for key, layout in layout_map.items()] == list(zip(keys, [2, 1, 4, 1], strict=True))

    def test_only_keys_are_in_the_map(self) -> None:
        layout_map = keras_example()
        layout = layout_map["dense_1/kernel"]
        assert "dense.*kernel" in layout_map
        assert "dense_1/kernel" not in layout_map
        assert 3 not in layout_map  # type: ignore[comparison-overlap]
        assert ("dense.*kernel", layout) in layout_map.items()
        assert ("dense_1/kernel", layout) not in layout_map.items()
        assert "dense_1/kernel" not in layout_map.keys()  # noqa: SIM118
        assert layout in layout_map.values()

    def test_views_follow_the_map(self) -> None:
        layout_map = LayoutMap()
        keys, values, items = layout_map.keys(), layout_map.values(), layout_map.items()
        layout_map["kernel"] = ("x",)
        assert (list(keys), len(values), len(items)) == (["kernel"], 1, 1)

    def test_get_gives_the_default_where_nothing_matches(self) -> None:
        layout_map = keras_example()
        assert layout_map.get("conv3d") is None
        assert layout_map.get("conv3d", 3) == 3
        assert layout_map.get("dense_1/bias", 3) == TensorLayout(("model",))

    def test_insertion_and_deletion_change_the_next_look_up(self) -> None:
        layout_map = LayoutMap()
        assert layout_map["dense/kernel"] is None
        layout_map["kernel"] = ("x",)
        assert layout_map["dense/kernel"] == TensorLayout(("x",))
        layout_map["dense"] = ("y",)
        with pytest.raises(LayoutError):
            layout_map["dense/kernel"]
        del layout_map["kernel"]
        assert layout_map["dense/kernel"] == TensorLayout(("y",))
        layout_map.clear()
        assert layout_map["dense/kernel"] is None

    def test_deletion_is_by_key(self) -> None:
        layout_map = keras_example()
        with pytest.raises(KeyError, match="dense_1/kernel"):
            del layout_map["dense_1/kernel"]
        with pytest.raises(KeyError, match="dense_1/kernel"):
            layout_map.pop("dense_1/kernel")
        assert layout_map.pop("dense_1/kernel", 3) == 3
        assert layout_map.pop("dense.*kernel") == TensorLayout((None, "model"))
        assert layout_map["dense_1/kernel"] is None
        assert len(layout_map) == 3

    def test_setdefault_is_by_key(self) -> None:
        layout_map = keras_example()
        assert layout_map.setdefault("dense_1/kernel", ("x",)) == TensorLayout(("x",))
        assert layout_map.setdefault("dense_1/kernel", ("y",)) == TensorLayout(("x",))
        assert len(layout_map) == 5
        with pytest.raises(TypeError, match="TensorLayout"):
            layout_map.setdefault("new")

    def test_update_and_popitem(self) -> None:
        layout_map = LayoutMap(MESH)
        layout_map.update({"kernel": TensorLayout((None, "model"))})
        assert layout_map.popitem() == ("kernel", TensorLayout((None, "model"), MESH))
        assert not layout_map

    def test_equal_maps_have_equal_rules_mesh_and_way_of_matching(self) -> None:
        assert keras_example() == keras_example()
        assert keras_example() == dict(keras_example().items())
        changed = keras_example()
        del changed["dense.*bias"]
        assert keras_example() != changed
        assert LayoutMap(MESH) != LayoutMap()
        assert LayoutMap(match="match") != LayoutMap()
        assert LayoutMap() != 3
        with pytest.raises(TypeError, match="unhashable"):
            hash(LayoutMap())

    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
    def test_copies_are_equal_and_apart(self, duplicate: object) -> None:
        layout_map = LayoutMap(MESH, match="fullmatch", backtracking=True, default=LayoutRule(("data",), "ceil"))
        layout_map["ker.*"] = (None, ("data", "model"))
        assert layout_map["kernel"] is not None
        other = duplicate(layout_map)  # type: ignore[operator]
        assert type(other) is LayoutMap
        assert other == layout_map
        assert other.backtracking
        assert other.partition("bias", (3,)).shard_shape("cpu:7") == (1,)
        assert other["kernel"] == layout_map["kernel"]
        del other["ker.*"]
        assert layout_map["kernel"] is not None

    def test_repr_shows_the_rules(self) -> None:
        layout_map = LayoutMap(DeviceMesh((4,), ("model",)))
        layout_map["kernel"] = (None, "model")
        assert repr(layout_map) == (
            "<LayoutMap {'kernel': (None, 'model')}, device_mesh=DeviceMesh((4,), ('model',)), match='search'>"
        )


class TestThreads:
    def test_one_map_serves_many_threads(self) -> None:
        layout_map = LayoutMap()
        for i in range(20):
            layout_map[rf"layer_{i}/"] = (f"axis{i}",)
        start = threading.Barrier(32)

        def look_up(thread: int) -> bool:
            start.wait()
            for k in range(500):
                i = (thread + k) % 20
                if layout_map[f"layer_{i}/{thread % 4}/{k}"] != TensorLayout((f"axis{i}",)):
                    return False
            return True

        with ThreadPoolExecutor(32) as pool:
            assert all(pool.map(look_up, range(32)))

    @pytest.mark.heavy
    def test_look_ups_see_a_map_that_changes_before_or_after_the_change(self) -> None:
        layout_map = LayoutMap()
        layout_map["kernel"] = ("x",)
        done = threading.Event()
        seen: set[object] = set()

        def look_up() -> None:
            k = 0
            while not done.is_set():
                k += 1
                seen.add(layout_map[f"bias/{k % 50}"])
                assert layout_map["a/kernel"] == TensorLayout(("x",))
                assert [layout.rank for _, layout in layout_map.items()] in ([1], [1, 1])

        with ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(look_up) for _ in range(8)]
            try:
                for _ in range(200):
                    layout_map["bias"] = ("y",)
                    assert layout_map["bias/1"] == TensorLayout(("y",))
                    del layout_map["bias"]
                    assert layout_map["bias/1"] is None
            finally:
                done.set()
            for future in futures:
                future.result()
        assert seen <= {None, TensorLayout(("y",))}


class TestDefault:
    def test_it_holds_for_any_rank(self) -> None:
        layout_map = LayoutMap(MESH, default="replicated", replicated=["data"])
        layout_map["kernel"] = (None, "model")
        for rank in range(4):
            assert layout_map.layout_of("bias", rank) == TensorLayout((None,) * rank, MESH)
            assert layout_map.layout_of("bias", rank) is layout_map.layout_of("other", rank)
        assert layout_map["bias"] is None
        assert layout_map.get("bias") is None
        assert layout_map.layout_of("kernel", 2) is layout_map["kernel"]
        assert layout_map.report({"bias": (3,), "kernel": (2, 4)}).ok
        assert LayoutMap(MESH).layout_of("bias", 1) is None

    def test_it_cuts_leading_dims(self) -> None:
        layout_map = LayoutMap(MESH, default=LayoutRule((("data", "model"),), "ceil"))
        assert layout_map.layout_of("w", 3) == TensorLayout((("data", "model"), None, None), MESH)
        assert layout_map.apply({"w": np.zeros((8, 2))})["w"] == TensorLayout((("data", "model"), None), MESH)
        assert layout_map.partition("w", (9, 2)).shard_shape("cpu:0") == (2, 2)
        report = layout_map.report({"w": ((9, 2), "int8"), "s": ((), "int8")})
        assert report.ok
        assert report.device_bytes is not None
        assert report.device_bytes.tolist() == [5, 5, 5, 5, 3, 1, 1, 1]

    def test_a_number_has_no_dim_to_cut(self) -> None:
        layout_map = LayoutMap(MESH, default=LayoutRule((None, "model")))
        assert layout_map.layout_of("step", 0) == TensorLayout((), MESH)
        with pytest.raises(LayoutError, match="'w' has rank 1, but the default layout needs rank 2 or more"):
            layout_map.layout_of("w", 1)
        report = layout_map.report({"w": ((2, 8), "int8"), "b": ((2,), "int8")})
        assert [str(problem) for problem in report.rank_mismatches] == [
            "'b' has rank 1, but the default layout needs rank 2 or more"
        ]
        assert [tensor.name for tensor in report.unplaced] == ["b"]

    def test_it_may_leave_axes_to_be_reduced(self) -> None:
        default = TensorLayout(("model",), unreduced=("data",))
        layout = LayoutMap(MESH, default=default).layout_of("w", 2)
        assert layout == TensorLayout(("model", None), MESH, unreduced=("data",))

    @pytest.mark.parametrize(
        ("default", "error", "said"),
        [
            ("replicate", LayoutError, "default is 'replicate'.*'replicated'"),
            (3, TypeError, "default: the value must be.*int"),
            (("z",), LayoutError, 'default: .*"z"'),
            (TensorLayout((), DeviceMesh((3,), ("x",))), None, ""),
        ],
    )
    def test_what_is_a_default(self, default: Any, error: type[Exception] | None, said: str) -> None:
        if error is None:
            layout = LayoutMap(MESH, default=default).layout_of("a", 2)
            assert layout == TensorLayout((None, None), DeviceMesh((3,), ("x",)))
        else:
            with pytest.raises(error, match=said):
                LayoutMap(MESH, default=default)

    def test_the_plan_of_a_model_knows_it(self) -> None:
        whole, cut = LayoutMap(MESH, default="replicated"), LayoutMap(MESH, default=LayoutRule(("model",), "ceil"))
        plan = plan_model(cut, whole, {"w": ((5,), "int8"), "b": ((2, 2), "int8")})
        assert plan["w"].src == TensorLayout(("model",), MESH).partition((5,), "ceil")
        with pytest.raises(LayoutError, match="dst has no layout for 'w'"):
            plan_model(whole, LayoutMap(MESH), {"w": ((5,), "int8")})


class TestUneven:
    def test_a_rule_goes_before_what_a_call_says(self) -> None:
        layout_map = LayoutMap(MESH, replicated=["data"])
        layout_map["embed"] = LayoutRule(("model", None), uneven="ceil")
        layout_map["strict"] = LayoutRule(("model", None), uneven="even")
        layout_map["head"] = ("model", None)
        shapes = {"embed": ((9, 1), "int8"), "head": ((9, 1), "int8"), "strict": ((9, 1), "int8")}
        report = layout_map.report(shapes, uneven="balanced")
        assert [tensor.shard_shape for tensor in report.tensors] == [(3, 1), (3, 1), None]
        assert report.device_bytes is not None
        # 3, 3, 3, 0 by "ceil" and 3, 2, 2, 2 by "balanced".
        assert report.device_bytes.tolist() == [6, 5, 5, 2] * 2
        assert report.warnings == (
            "'strict': dim 0 has 9 elements, which the 4 shards of its rule 'strict' do not divide evenly",
        )
        assert report.totals == ("3 tensors, 27 B", "1 tensor cannot be placed: 1 indivisible")
        assert layout_map.uneven_of("embed") == "ceil"
        assert layout_map.uneven_of("head") is None
        with pytest.raises(LayoutError, match="dim 0"):
            layout_map.partition("strict", (9, 1), "balanced")

    def test_it_goes_with_the_rule(self) -> None:
        layout_map = LayoutMap(MESH)
        layout_map["embed"] = LayoutRule(("model", None), uneven="ceil")
        plain = LayoutMap(MESH)
        plain["embed"] = ("model", None)
        assert layout_map != plain
        again = LayoutMap(MESH)
        again.update(layout_map)
        for other in (again, copy.copy(layout_map), copy.deepcopy(layout_map), pickle.loads(pickle.dumps(layout_map))):
            assert other == layout_map
            assert other.uneven_of("embed") == "ceil"
            assert repr(other) == repr(layout_map)
        assert "ceil" in repr(layout_map)
        del again["embed"]
        assert again.uneven_of("embed") is None

    def test_a_variable_is_cut_by_it(self) -> None:
        layout_map = LayoutMap(MESH)
        layout_map["embed"] = LayoutRule(("model",), uneven="balanced")
        with layout_map_scope(layout_map):
            model = initialize_variables({"embed": Variable((5,), "int8", np.zeros)})
        assert [shard.data.size for shard in model["embed"].shards][:4] == [2, 1, 1, 1]

    def test_a_sharded_checkpoint_is_cut_by_it(self, tmp_path: Path) -> None:
        layout_map = LayoutMap(MESH, default=LayoutRule(("model",), "ceil"), replicated=["data"])
        layout_map["w"] = LayoutRule(("model",), uneven="balanced")
        arrays = {"w": np.arange(5, dtype=np.int8), "v": np.arange(5, dtype=np.int8)}
        save_checkpoint(tmp_path / "cut", arrays, layout_map, to="sharded")
        with open_checkpoint(tmp_path / "cut") as checkpoint:
            boxes = {name: sorted(checkpoint[name].boxes[:, 0].tolist()) for name in arrays}
            assert [checkpoint.read(name).tolist() for name in arrays] == [[0, 1, 2, 3, 4]] * 2
        assert boxes == {"w": [[0, 2], [2, 3], [3, 4], [4, 5]], "v": [[0, 2], [2, 4], [4, 5]]}

    @pytest.mark.parametrize(
        ("rank", "error"), [(-1, LayoutError), ("2", TypeError), (None, TypeError), (True, TypeError)]
    )
    def test_ranks_that_are_none(self, rank: Any, error: type[Exception]) -> None:
        for layout_map in (LayoutMap(), LayoutMap(default="replicated")):
            with pytest.raises(error, match="rank"):
                layout_map.layout_of("w", rank)

    @pytest.mark.parametrize("uneven", ["cheil", 3, ["ceil"]])
    def test_what_is_not_a_rule(self, uneven: Any) -> None:
        with pytest.raises((LayoutError, TypeError), match="uneven"):
            LayoutRule(("x",), uneven)


@pytest.mark.heavy
def test_rules_that_match_one_path_are_listed_in_short() -> None:
    layout_map = LayoutMap(MESH)
    for i in range(200):
        layout_map[f"kernel|{i}" + "x" * 500] = ("data",)
    with pytest.raises(LayoutError, match="200 rules") as raised:
        _ = layout_map["kernel"]
    assert "'kernel|0xxx" in str(raised.value)
    assert len(str(raised.value)) < 1500


@pytest.mark.parametrize("given", ["ab", b"ab", 3, ["ab"], [("a",)], [("a", ("data",), 3)], [1], [None], {"a"}])
def test_rules_that_are_no_pairs_are_refused_and_change_nothing(given: Any) -> None:
    layout_map = LayoutMap(MESH)
    layout_map["k"] = ("data",)
    with refused(TypeError, "update"):
        layout_map.update(given)
    assert list(layout_map) == ["k"]


def test_rules_come_as_mappings_pairs_and_keywords() -> None:
    layout_map = LayoutMap(MESH)
    layout_map["k"] = ("data",)
    layout_map.update({"a": ("data",)}, b=("model",))
    layout_map.update(pair for pair in [("c", (None,)), ["d", ["data"]]])
    layout_map.update()
    assert [layout.axes for layout in layout_map.values()] == [("data",), ("data",), ("model",), (None,), ("data",)]
