from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from shardwise import DeviceMesh, LayoutError, LayoutMap, TensorLayout, distribute_tensor
from shardwise._tree import attributes_of, map_arrays, named_leaves
from tests.checks import peak_of

MESH = DeviceMesh((2, 4), ("data", "model"))


class Layer(NamedTuple):
    kernel: Any
    bias: Any


@dataclass(frozen=True, slots=True)
class Block:
    attn: Any
    norm: Any = None


@dataclass
class Checked:
    kernel: Any
    copies: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        assert isinstance(self.kernel, np.ndarray)


def rules(mesh: DeviceMesh | None = MESH) -> LayoutMap:
    layout_map = LayoutMap(mesh)
    layout_map["kernel$"] = (None, "model")
    return layout_map


def paths(tree: Any, separator: str = "/") -> list[str]:
    found: list[str] = []
    map_arrays(lambda path, rank: found.append(path), tree, separator)
    return found


def test_every_structure_keeps_its_kind() -> None:
    kernel, bias = np.ones((3, 4)), np.ones(4)
    tree: dict[str, Any] = {
        "h": [Block(Layer(kernel, bias), (bias,)), {0: kernel}],
        "none": None,
        "empty": {},
        "none at all": (),
    }
    cut, whole = TensorLayout((None, "model"), MESH), TensorLayout((None,), MESH)
    uncut = TensorLayout((None, None), MESH)
    layouts = rules().apply(tree)
    assert layouts == {
        "h": [Block(Layer(cut, whole), (whole,)), {0: uncut}],
        "none": None,
        "empty": {},
        "none at all": (),
    }
    assert type(layouts["h"][0].attn) is Layer


def test_paths_lead_to_the_arrays() -> None:
    array = np.ones(1)
    tree: dict[str, Any] = {"h": [Block(Layer(array, array)), (array, {3: array})], "a/b": array}
    assert paths(tree) == ["h/0/attn/kernel", "h/0/attn/bias", "h/1/0", "h/1/1/3", "a/b"]
    assert paths(tree, separator=".") == ["h.0.attn.kernel", "h.0.attn.bias", "h.1.0", "h.1.1.3", "a/b"]
    assert paths(array) == [""]


def test_the_constructor_of_a_dataclass_does_not_run() -> None:
    result = rules().apply(Checked(np.ones((2, 4))))
    assert type(result) is Checked
    assert result.kernel == TensorLayout((None, "model"), MESH)


def test_the_tree_is_as_it_was() -> None:
    block = Block({"kernel": np.ones((2, 4))})
    rules().apply([block])
    assert isinstance(block.attn["kernel"], np.ndarray)


@pytest.mark.parametrize("mapping", [OrderedDict, MappingProxyType])
def test_any_mapping_becomes_a_dict(mapping: Any) -> None:
    assert rules().apply(mapping({"kernel": np.ones((2, 4))})) == {"kernel": TensorLayout((None, "model"), MESH)}


def test_an_array_is_whatever_has_a_shape() -> None:
    class Abstract:
        shape = (2, 4)

    sharded = distribute_tensor(np.ones((2, 4)), TensorLayout((None, "data"), MESH))
    for leaf in (Abstract(), sharded):
        assert rules().apply({"kernel": leaf}) == {"kernel": TensorLayout((None, "model"), MESH)}
    assert rules().apply(np.float32(1)) == TensorLayout((), MESH)


def test_without_a_mesh_layouts_have_none() -> None:
    layouts = rules(None).apply([np.ones(3), {"kernel": np.ones((3, 4))}])
    assert layouts == [TensorLayout((None,)), {"kernel": TensorLayout((None, "model"))}]


def test_the_same_array_twice_is_no_cycle() -> None:
    shared = {"kernel": np.ones((2, 4))}
    assert len(rules().apply([shared, shared])) == 2


def test_what_cannot_be_walked() -> None:
    cycle: dict[str, Any] = {"h": []}
    cycle["h"].append(cycle)
    with pytest.raises(LayoutError, match="tree at 'h/0' contains itself"):
        rules().apply(cycle)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(LayoutError, match="nested too deeply"):
        rules().apply(deep)
    while deep:  # Taken apart here, as its destruction would recurse as well.
        deep = deep[0]


@pytest.mark.parametrize("key", [True, None, 1.5, ("a",), b"a"])
def test_a_key_is_a_string_or_an_integer(key: object) -> None:
    with pytest.raises(TypeError, match=r"a key of tree at 'h' must be a string or an integer"):
        rules().apply({"h": {key: np.ones(1)}})


@pytest.mark.parametrize("leaf", [3, "kernel", 1.5, object(), {1, 2}, Block])
def test_a_leaf_has_a_shape(leaf: object) -> None:
    with pytest.raises(TypeError, match="tree at 'h/0' must be an array"):
        rules().apply({"h": [leaf]})


def test_a_leaf_has_a_rank() -> None:
    class Unknown:
        shape = None

    with pytest.raises(TypeError, match="tree at 'h' must have a shape of known rank, got None"):
        rules().apply({"h": Unknown()})


def test_a_rank_that_the_layout_does_not_have() -> None:
    with pytest.raises(LayoutError, match=r"'h/kernel' has rank 3, but the layout of its rule 'kernel\$' has 2"):
        rules().apply({"h": {"kernel": np.ones((1, 2, 4))}})


def test_rules_that_clash() -> None:
    layout_map = rules()
    layout_map["^h"] = (None, None)
    with pytest.raises(LayoutError, match="'h/kernel' matches 2 rules"):
        layout_map.apply({"h": {"kernel": np.ones((2, 4))}})


def test_the_separator_is_a_string() -> None:
    with pytest.raises(TypeError, match="separator"):
        rules().apply({}, separator=None)  # type: ignore[arg-type]


@pytest.mark.heavy
def test_paths_of_a_deep_tree_take_memory_in_its_depth() -> None:
    depth = 20_000
    tree: list[object] = [1.5]
    for _ in range(depth):
        tree = [tree]

    def work() -> None:
        ((path, leaf),) = named_leaves(tree, float)
        assert (len(path), leaf) == (depth + 1, 1.5)

    # A tuple of all names for each object would take 20,000² / 2 pointers, 1.6 GB.
    assert peak_of(work) < 32 << 20


class LikeTorch:
    """Keeps objects of its own kind apart, as `torch.nn.Module` does."""

    def __init__(self) -> None:
        self.__dict__["_modules"] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        (self.__dict__["_modules"] if isinstance(value, LikeTorch) else self.__dict__)[name] = value


def test_modules_are_among_the_attributes_in_the_order_in_which_they_were_set() -> None:
    module, first, second = LikeTorch(), LikeTorch(), LikeTorch()
    module.kernel, module.first, module.scale, module.second = 1, first, 2, second
    names = ["first", "kernel", "gone", "second"]
    assert attributes_of(module, names) == [
        ("first", first),
        ("kernel", 1),
        ("second", second),
        ("_modules", {"first": first, "second": second}),
        ("scale", 2),
    ]
    assert {name for name, _ in attributes_of(module)} == {"_modules", "kernel", "scale", "first", "second"}
    module.__dict__["_modules"] = None  # Not PyTorch's: an attribute like any other.
    assert attributes_of(module) == [("_modules", None), ("kernel", 1), ("scale", 2)]
