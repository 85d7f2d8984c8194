from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise import DeviceMesh, LayoutError, LayoutMap, MeshError, TensorLayout, plan_model
from shardwise.deploy import Deployment, DeploymentRule, ExpertMap, FusedParameter, Repeat, Stages, vllm

DENSE = DeviceMesh((2, 2, 2), ("pp", "dp", "tp"))
EXPERT = DeviceMesh((2, 4), ("pp", "ep"))


def deployment(**more: Any) -> Deployment:
    return Deployment(
        8,
        {"dense": DENSE, "expert": EXPERT},
        {
            r"^layers\.{i}\.wq$": DeploymentRule(("tp", None), "dense", {"pp": "stage[i]"}),
            r"^layers\.{i}\.experts\.{e}$": DeploymentRule(
                (None, None), "expert", {"pp": "stage[i]", "ep": "where[e]"}
            ),
            r"^embed$": DeploymentRule(("tp", None), "dense", {"pp": [0, "pp - 1"]}),
        },
        numbers={"stage": [0, 0, 1], "where": [[0, 2], [1], [3], [2]]},
        **more,
    )


class TestWhere:
    def test_a_stage_has_the_rest_of_the_mesh(self) -> None:
        partition = deployment().partition("layers.2.wq", (8, 4))
        # Stage 1 is ranks 4 to 7: dp major, tp minor.
        assert partition.holders == ("cpu:4", "cpu:5", "cpu:6", "cpu:7")
        assert partition.box("cpu:5") == partition.box("cpu:7") == (slice(4, 8), slice(0, 4))

    def test_several_places_hold_the_same(self) -> None:
        both = deployment()
        assert both.partition("embed", (8, 4)).holders == tuple(f"cpu:{i}" for i in range(8))
        # A redundant expert is on ranks 0 and 2 of stage 0.
        twice = both.partition("layers.1.experts.0", (8, 4))
        assert twice.holders == ("cpu:0", "cpu:2")
        assert [twice.box(label) for label in twice.holders] == [(slice(0, 8), slice(0, 4))] * 2
        assert both.at("layers.1.experts.0") == {"pp": (0,), "ep": (0, 2)}

    def test_fields_are_those_of_each_name(self) -> None:
        # Names that differ in digits only are looked up as one: between the fields of one entry, and beside them.
        rule = DeploymentRule((None,), at={"pp": "i // 2", "ep": "(i + e) % 4"})
        one = Deployment(8, EXPERT, {r"^h\.{i}\.part[0-9]+\.e{e}\.": rule})
        for i, part, e in itertools.product(range(4), (0, 1, 11), (0, 3, 10)):
            assert one.at(f"h.{i}.part{part}.e{e}.w{part}") == {"pp": (i // 2,), "ep": ((i + e) % 4,)}

    def test_a_rule_that_tells_digits_apart_is_looked_up_name_by_name(self) -> None:
        # `{i}` is of one digit in h.12 and of two in h.30, for the same number of digits.
        rule = DeploymentRule((None,), at={"pp": "i // 2 % 2"})
        tells = r"^h\.(?P<i>1|[02-9]+)[0-9]*\.w"
        one = Deployment(
            8, EXPERT, {tells: rule, r"^h\.{i}\.v": rule, r"^h\.7\.u": DeploymentRule((None,), at={"pp": 1})}
        )
        for i in (12, 30, 17, 22, 1, 2):
            first = 1 if str(i)[0] == "1" else i
            for name, value in ((f"h.{i}.w", first), (f"h.{i}.v", i)):
                assert one.at(name) == {"pp": (value // 2 % 2,)}, name
        assert one.layout_of("h.8.u", 1) is None
        assert one.at("h.7.u") == {"pp": (1,)}

    def test_the_layout_is_ordinary(self) -> None:
        layout = deployment().layout_of("layers.0.wq", 2)
        assert layout == TensorLayout(
            ("tp", None), DeviceMesh((1, 2, 2), ("pp", "dp", "tp"), ["cpu:0", "cpu:1", "cpu:2", "cpu:3"])
        )

    def test_tensors_that_are_cut_alike_share_their_layout(self) -> None:
        one = deployment()
        assert one.layout_of("layers.0.wq", 2) is one.layout_of("layers.1.wq", 2)
        first, second = one.layout_of("layers.0.wq", 2), one.layout_of("layers.0.experts.1", 2)
        assert first is not None
        assert second is not None
        assert first.device_mesh is not second.device_mesh

    def test_all_of_it_is_the_mesh_itself(self) -> None:
        assert Deployment(8, DENSE, {"w": ("tp",)}).layout_of("w", 1) == TensorLayout(("tp",), DENSE)

    def test_what_no_rule_matches(self) -> None:
        assert deployment().layout_of("norm", 1) is None
        with pytest.raises(LayoutError, match=r"^no rule matches the tensor 'norm', and there is no default$"):
            deployment().partition("norm", (4,))
        assert deployment(default="replicated").partition("norm", (4,)).holders == tuple(f"cpu:{i}" for i in range(8))
        cut = deployment(default=DeploymentRule(("tp",), "dense", {"pp": 1}))
        assert cut.partition("other", (4, 3)).boxes()[:, 0].tolist() == [[0, 2], [2, 4]] * 2
        assert cut.partition("number", ()).holders == ("cpu:4", "cpu:5", "cpu:6", "cpu:7")
        wide = deployment(default=DeploymentRule((None, "tp"), "dense", {"pp": 1}))
        with pytest.raises(LayoutError, match="rank 1, but the default layout needs rank 2 or more"):
            wide.layout_of("other", 1)

    def test_labels_of_the_world(self) -> None:
        trainer = [f"trainer {i}" for i in range(4)]
        one = Deployment(trainer, DeviceMesh((2, 2), ("pp", "tp")), {"w": DeploymentRule(("tp",), at={"pp": 1})})
        assert one.partition("w", (4,)).holders == ("trainer 2", "trainer 3")
        assert one.devices == tuple(trainer)
        other = Deployment(trainer, DeviceMesh((2,), ("tp",), ["trainer 3", "trainer 0"]), {"w": ("tp",)})
        assert other.partition("w", (4,)).box("trainer 0") == (slice(2, 4),)

    def test_named_groups_are_fields_too(self) -> None:
        one = Deployment(2, DeviceMesh((2,), ("pp",)), {r"h(?P<i>\d)x": DeploymentRule((None,), at={"pp": "i % 2"})})
        assert one.partition("h3x", (1,)).holders == ("cpu:1",)

    def test_held_by(self) -> None:
        shapes = {"embed": (8, 4), "layers.0.wq": ((8, 4), "float32"), "layers.2.wq": np.zeros((8, 4))}
        assert list(deployment().held_by("cpu:1", shapes)) == ["embed", "layers.0.wq"]
        assert list(deployment().held_by("cpu:6", shapes)) == ["embed", "layers.2.wq"]
        with pytest.raises(MeshError, match="'cpu:8' is not in the mesh"):
            deployment().held_by("cpu:8", shapes)


class TestNamesThatDifferInDigits:
    """They are searched for once, where no rule tells digits apart."""

    @pytest.mark.parametrize(
        ("keys", "names"),
        [
            ((r"h\.{i}\.w", r"h\.{i}\.b"), ("h.1.w", "h.22.w", "h.3.b", "h.40.b")),
            ((r"h\.0\.", r"h\.[1-9]"), ("h.0.w", "h.1.w", "h.9.w", "h.0.w")),
            ((r"h\.\d\d\.", r"h\.\d\."), ("h.10.w", "h.1.w", "h.77.w", "h.7.w")),
            ((r"h\.(?P<i1>[0-9]+)\.w$", r"\x35\.b"), ("h.4.w", "h.5.b", "h.6.b", "h.45.b")),
            ((r"h\.[!-5]\.", r"h\.[6-~]\."), ("h.5.w", "h.6.w", "h.1.w", "h.8.w")),
            ((r"h.{i}$", r"w{2}"), ("h.12", "ww1", "hw2", "w2w")),
        ],
    )
    def test_as_if_each_were_searched_for(self, keys: tuple[str, ...], names: tuple[str, ...]) -> None:
        mesh = DeviceMesh((3,), ("x",))
        one = Deployment(3, mesh, {key: DeploymentRule((), at={"x": at}) for at, key in enumerate(keys)})
        for name in names:
            single = Deployment(3, mesh, {key: DeploymentRule((), at={"x": at}) for at, key in enumerate(keys)})
            assert one.at(name) == single.at(name)
            matching = one.matching_rules(name)
            assert one.at(name) == ({"x": (keys.index(matching[0]),)} if matching else {})

    def test_what_is_no_name(self) -> None:
        for wrong in (None, 3, ["a"], b"a"):
            with pytest.raises(TypeError, match="path must be a string"):
                deployment().layout_of(wrong, 1)  # type: ignore[arg-type]


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "shape", "message"),
        [
            ("layers.3.wq", (8, 4), r"'layers.3.wq': at\['pp'\]: the list stage has 3 entries, and none at 3"),
            ("layers.0.experts.7", (8, 4), r"at\['ep'\]: the list where has 4 entries, and none at 7"),
            ("layers.0.wq", (8,), "'layers.0.wq' has rank 1, but the layout of its rule .* has 2"),
            ("layers.0.wq", (7, 4), "'layers.0.wq': .*7"),
        ],
    )
    def test_a_tensor_that_has_no_place(self, name: str, shape: tuple[int, ...], message: str) -> None:
        with pytest.raises(LayoutError, match=message):
            deployment().partition(name, shape)

    def test_a_coordinate_outside_of_the_axis(self) -> None:
        one = Deployment(2, DeviceMesh((2,), ("pp",)), {"h.{i}": DeploymentRule((), at={"pp": "i // 4"})})
        with pytest.raises(LayoutError, match=r"'h.9': at\['pp'\] is \[2\] for i = 9, but the axis is of size 2"):
            one.layout_of("h.9", 0)
        with pytest.raises(LayoutError, match=r"rule 'x': at\['pp'\] is \[2\], but the axis is of size 2"):
            Deployment(2, DeviceMesh((2,), ("pp",)), {"x": DeploymentRule((), at={"pp": 2})})

    def test_two_rules(self) -> None:
        with pytest.raises(LayoutError, match="matches 2 rules"):
            Deployment(2, DeviceMesh((2,), ("x",)), {"a": ("x",), "b": ("x",)}).layout_of("ab", 1)

    @pytest.mark.parametrize(
        ("rule", "message"),
        [
            (DeploymentRule(("tp",)), "names no mesh; the deployment has dense, expert"),
            (
                DeploymentRule(("tp",), "sparse"),
                "names the mesh 'sparse'; the deployment has 'world', 'dense', 'expert'",
            ),
            (DeploymentRule(("ep",), "dense"), 'names axis "ep", which the mesh does not have'),
            (DeploymentRule((), "dense", {"ep": 0}), r"at names the axis 'ep'; the mesh 'dense' has"),
            (
                DeploymentRule((), "dense", {"pp": "stages[0]"}),
                r"at\['pp'\] names 'stages'; known are stage, pp, dp, tp",
            ),
            (DeploymentRule((), "dense", {"pp": "i"}), r"at\['pp'\] names 'i'"),
            (DeploymentRule(("tp:(1)2",), "dense", {"tp": 0}), "sub-axes"),
        ],
    )
    def test_a_rule_that_names_what_is_not_there(self, rule: DeploymentRule, message: str) -> None:
        with pytest.raises(LayoutError, match=message):
            Deployment(8, {"dense": DENSE, "expert": EXPERT}, {"w": rule}, numbers={"stage": [0]})

    def test_an_axis_is_in_at_or_in_the_layout(self) -> None:
        with pytest.raises(LayoutError, match="axis 'pp' is in at, so it cannot be in the layout"):
            DeploymentRule(("pp",), at={"pp": 0})

    def test_a_mesh_of_other_devices(self) -> None:
        with pytest.raises(MeshError, match=r"meshes\['mesh'\] has the device 'gpu:0', which the world does not have"):
            Deployment(2, DeviceMesh((1,), ("x",), ["gpu:0"]), {})
        with pytest.raises(MeshError, match="has 4 devices, but the world has 2"):
            Deployment(2, DeviceMesh((4,), ("x",)), {})

    @pytest.mark.parametrize("at", ["stage[", "1 +", "a.b(c)", "__import__('os')", "2 ** 3"])
    def test_what_is_no_expression(self, at: str) -> None:
        with pytest.raises(LayoutError, match=r"at\['pp'\]"):
            DeploymentRule((), at={"pp": at})

    def test_a_number_and_an_axis_of_one_name(self) -> None:
        with pytest.raises(LayoutError, match="pp is a number, 3, and also an axis of another size"):
            Deployment(8, DENSE, {"w": DeploymentRule((), at={"pp": "pp - 1"})}, numbers={"pp": 3})


class TestValues:
    def test_equal_hash_pickle_repr(self) -> None:
        one, fused = deployment(), FusedParameter("p{i}", ("a{i}", "b{i}"))
        more = deployment(default=DeploymentRule((), "world"), parameters=[fused], match="match")
        names = vars(__import__("shardwise.deploy", fromlist=["deploy"])) | {"DeviceMesh": DeviceMesh}
        for value in (one, more):
            assert value == pickle.loads(pickle.dumps(value)) == eval(repr(value), dict(names))
            assert hash(value) == hash(pickle.loads(pickle.dumps(value)))
        assert one != more
        assert one == deployment()
        labelled = Deployment(["a", "b"], DeviceMesh((2,), ("x",)), {"w": ("x",)})
        assert eval(repr(labelled), dict(names)) == labelled

    def test_arguments_are_not_kept(self) -> None:
        numbers: dict[str, Any] = {"stage": [0, 1]}
        rules: dict[str, Any] = {"h.{i}": DeploymentRule((), at={"pp": "stage[i]"})}
        one = Deployment(2, DeviceMesh((2,), ("pp",)), rules, numbers=numbers)
        numbers["stage"][0] = 1
        rules.clear()
        assert one.at("h.0") == {"pp": (0,)}
        one.rules().clear()
        assert one.at("h.1") == {"pp": (1,)}


class TestModels:
    def test_a_plan_from_stages_to_one_mesh(self) -> None:
        shapes = {f"layers.{i}.wq": ((8, 4), "float32") for i in range(3)} | {"embed": ((8, 4), "float32")}
        engine = LayoutMap(DeviceMesh((2,), ("tp",), ["gpu:0", "gpu:1"]), default=("tp",))
        plan = plan_model(deployment(), engine, shapes)
        received = plan.bytes_received()
        # Each engine device receives half of the four tensors of 128 bytes.
        assert [received[f"gpu:{i}"] for i in range(2)] == [256, 256]
        sent = plan.bytes_sent()
        # Layers 0 and 1 are on the first four, layer 2 on the last; the embedding, on all, evens it out.
        assert sum(sent[f"cpu:{i}"] for i in range(4)) + sum(sent[f"cpu:{i}"] for i in range(4, 8)) == 512
        assert all(sent[f"cpu:{i}"] <= 128 for i in range(8))
        shards = {
            name: [
                np.full(plan[name].src.holder_shape(holder), index, "float32")
                for index, holder in enumerate(plan[name].src.holders)
            ]
            for name in plan
        }
        assert set(np.unique(plan.run(shards)["layers.0.wq"][0])) <= {0.0, 2.0}


class TestParameters:
    def test_slots_say_the_order_of_a_stack(self) -> None:
        experts = ExpertMap(((2, 0, 2), (1, 0, 3)))
        one = Deployment(
            2,
            DeviceMesh((2,), ("ep",)),
            {r"e\.{e}\.(up|gate)": DeploymentRule((None, None), at={"ep": "where[e]"})},
            numbers={"where": experts.where, "slots": experts.slots},
            parameters=[FusedParameter("w13", ("e.{e}.gate", "e.{e}.up"), stack="e", slots="slots[ep]")],
        )
        shapes = {f"e.{e}.{part}": (2, 3) for e in range(4) for part in ("gate", "up")}
        (w13,) = one.parameters_of("cpu:0", shapes)
        assert w13.shape == (3, 4, 3)
        assert [(piece.tensor, piece.start) for piece in w13.pieces] == [
            ("e.2.gate", (0, 0, 0)),
            ("e.2.up", (0, 2, 0)),
            ("e.0.gate", (1, 0, 0)),
            ("e.0.up", (1, 2, 0)),
            ("e.2.gate", (2, 0, 0)),
            ("e.2.up", (2, 2, 0)),
        ]

        memory = np.zeros(w13.shape)
        views = w13.views(memory)
        further = [name for name in views if isinstance(name, Repeat)]
        assert [(name, name.tensor, name.place) for name in further] == [
            ("e.2.gate in place 2", "e.2.gate", 2),
            ("e.2.up in place 2", "e.2.up", 2),
        ]
        own = sorted(name for name in views if name not in further)
        assert own == ["e.0.gate", "e.0.up", "e.2.gate", "e.2.up"]
        for number, name in enumerate(own, 1):
            views[name][...] = number
        # Expert 2 is in the slots 0 and 2: it is received once, and then copied.
        assert memory[:, :, 0].tolist() == [[3, 3, 4, 4], [1, 1, 2, 2], [0, 0, 0, 0]]
        w13.repeat(memory)
        assert memory[:, :, 0].tolist() == [[3, 3, 4, 4], [1, 1, 2, 2], [3, 3, 4, 4]]
        with pytest.raises(LayoutError, match="the array of 'w13' is of shape"):
            w13.views(memory[:2])

    def test_a_stack_with_others_after_it_is_not_made_where_it_would_have_these_only(self) -> None:
        """Device 0 has both experts and then the shared one; device 1 has the shared one, as it is."""
        one = Deployment(
            2,
            {"all": DeviceMesh((1, 2), ("x", "all")), "ep": DeviceMesh((2,), ("ep",))},
            {r"e\.{e}": DeploymentRule((None,), "ep", {"ep": "where[e]"}), "shared": DeploymentRule((None,), "all")},
            numbers={"where": [[0], [0]], "slots": [[0, 1], []]},
            parameters=[FusedParameter("w", ("e.{e}",), "e", "slots[ep]", ("shared",))],
        )
        tensors = {"e.0": (3,), "e.1": (3,), "shared": (3,)}
        found = [{each.name: each.shape for each in one.parameters_of(f"cpu:{rank}", tensors)} for rank in (0, 1)]
        assert found == [{"w": (3, 3)}, {"shared": (3,)}]

    def test_tensors_of_other_sizes_are_refused(self) -> None:
        one = Deployment(
            1, DeviceMesh((1,), ("x",)), {".": (None, None)}, parameters=[FusedParameter("qk", ("q", "k"))]
        )
        with pytest.raises(LayoutError, match="qk: the tensor 'k' is of shape"):
            one.parameters_of("cpu:0", {"q": (2, 3), "k": (2, 4)})

    def test_templates_that_do_not_fit_each_other(self) -> None:
        with pytest.raises(LayoutError, match="does not have the fields of the name"):
            FusedParameter("qk.{i}", ("q.{i}", "k.{j}"))
        with pytest.raises(LayoutError, match="has a choice"):
            FusedParameter("qk.{i}", ("{q,k}.{i}",))

    def test_without_all_parts_it_is_refused(self) -> None:
        one = Deployment(1, DeviceMesh((1,), ("x",)), {".": (None,)}, parameters=[FusedParameter("qk", ("q", "k"))])
        with pytest.raises(
            LayoutError, match="'qk' of 'cpu:0' is made of 'q' and 'k', but 'k' is not among the tensors"
        ):
            one.parameters_of("cpu:0", {"q": (2,), "o": (2,)})
        assert [each.name for each in one.parameters_of("cpu:0", {"o": (2,)})] == ["o"]

    def test_copies_are_for_the_same_models(self) -> None:
        """A copy that had forgotten them would plan quantized weights that nothing states."""
        config = {"model_type": "llama", "num_attention_heads": 4, "hidden_size": 8, "num_hidden_layers": 1}
        one = vllm(config, tp=2)
        for made in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
            assert made == one
            assert made.models == one.models == ("llama",)
        rules = LayoutMap.from_toml("hf/llama", DeviceMesh((2,), ("tp",)), config=config)
        for copied in (pickle.loads(pickle.dumps(rules)), copy.copy(rules), copy.deepcopy(rules)):
            assert copied.models == rules.models == ("llama",)


class TestStages:
    def test_a_stage_may_have_no_layer(self) -> None:
        """Megatron's stages that have the embedding or the output layer only."""
        stages = Stages.of_counts([0, 2, 0])
        assert (stages.text, stages.stage, stages.first, stages.last) == ("E|tt|L", (1, 1), 0, 2)
        with pytest.raises(LayoutError, match="each must be at least 0"):
            Stages.of_counts([1, -1, 2])

    def test_lists_of_layers(self) -> None:
        stages = Stages(((0, 3), (1, 2)))
        assert (stages.stage, stages.pp, stages.num_layers) == ((0, 1, 1, 0), 2, 4)
        assert not stages.is_whole  # Not in the order of the pipeline.
        with pytest.raises(LayoutError, match="layer 1 is on stage 0 and on stage 1"):
            _ = Stages(((0, 1), (1, 2))).stage
        with pytest.raises(LayoutError, match="layer 1 is on no stage, of 2 layers"):
            _ = Stages(((0,), (2,))).stage


class TestPictures:
    def test_each_mesh_with_its_rules(self) -> None:
        text = sw.draw(deployment(default="replicated"), form="text")
        views = [view.splitlines() for view in text.split("\n\n")]
        assert [view[0] for view in views] == [
            "dense: mesh pp=2, dp=2, tp=2", "expert: mesh pp=2, ep=4", "world: mesh world=8",
        ]  # fmt: skip
        assert views[0][-2:] == [
            r"^layers\.{i}\.wq$: ('tp', None) at pp = stage[i]", "^embed$: ('tp', None) at pp = [0, 'pp - 1']",
        ]  # fmt: skip
        assert views[1][-1] == r"^layers\.{i}\.experts\.{e}$: (None, None) at pp = stage[i], ep = where[e]"
        assert views[2][-1] == "everything else: whole"
        # Without a rule for it, the mesh of all devices says nothing.
        assert "world:" not in sw.draw(deployment(), form="text")
        picture = deployment()._repr_svg_()
        assert picture is not None
        assert picture.startswith("<svg ")
        assert all(f"cpu:{i}" in picture for i in range(8))
        assert sw.draw(deployment(), form="html").count("<svg ") == 1

    def test_each_device_has_its_layers_and_experts(self) -> None:
        """Layers 0 and 1 on the first stage, 2 on the second; experts two by two: by hand."""
        rules = {
            r"layers\.{i}\.wq": DeploymentRule(("tp",), "dense"),
            r"layers\.{i}\.experts\.{e}\.": DeploymentRule((None,), "expert", at={"ep": "e // 2"}),
            r"every\.{i}": DeploymentRule((None,), "dense", at={"tp": "i % tp"}),  # as many as one likes
        }
        meshes = {"dense": DeviceMesh((2, 2), ("pp", "tp")), "expert": DeviceMesh((2, 2), ("pp", "ep"))}
        at = {r"layers\.{i}\.": {"pp": "stage[i]"}}
        made = Deployment(4, meshes, rules, numbers={"stage": [0, 0, 1]}, at=at)
        dense, expert = sw.draw(made, form="text").split("\n\n")
        drawn = [line for line in dense.splitlines() if "cpu:0 " in line or "cpu:2 " in line]
        assert [[cell.strip() for cell in line.split("│")[1:3]] for line in drawn] == [
            ["cpu:0 · layers 0,1", "cpu:1 · layers 0,1"],
            ["cpu:2 · layers 2", "cpu:3 · layers 2"],
        ]
        assert "every" not in dense.partition("every\\.")[0]
        assert [expert.count(text) for text in ("layers 0,1", "layers 2", "experts 0,1", "experts 2,3")] == [2, 2, 2, 2]

    def test_a_world_alone_and_many_rules(self) -> None:
        assert sw.draw(Deployment(2, {}, {}), form="text").startswith("world: mesh world=2")
        many = Deployment(2, DeviceMesh((2,), ("x",)), {f"w{i}$": ("x",) for i in range(30)})
        text = sw.draw(many, form="text")
        assert "w10$: ('x',)" in text
        assert "w11$" not in text
        assert text.rstrip().endswith("and 19 more rules")
