"""Variables of plain objects: paths, layouts, shards, and what is refused."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import shardwise as sw
from shardwise._tree import children, named_leaves
from tests.checks import peak_of

MESH = sw.DeviceMesh((2, 4), ("data", "model"))


def numbered(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


def layout_map(**rules: Any) -> sw.LayoutMap:
    made = sw.LayoutMap(MESH)
    for rule, axes in rules.items():
        made[rule] = axes
    return made


def zeros(*shape: int) -> sw.Variable:
    return sw.Variable(shape, "float32", np.zeros)


class Dense:
    def __init__(self, rows: int, columns: int) -> None:
        self.kernel = sw.Variable((rows, columns), "float32", numbered)
        self.bias = sw.Variable((columns,), "float32", numbered)


class Mlp:
    def __init__(self) -> None:
        self.d1 = Dense(6, 8)
        self.d2 = Dense(8, 4)


def document_map() -> sw.LayoutMap:
    made = sw.LayoutMap(MESH)
    made["d1.kernel"] = (None, "model")
    made["d1.bias"] = ("model",)
    made["d2.kernel"] = ("data", "model")
    made["d2.bias"] = ("data",)
    return made


@pytest.mark.parametrize("inside", [True, False])
def test_the_document_in_plain_python(inside: bool) -> None:
    with sw.layout_map_scope(document_map()):
        model = Mlp()
        if inside:
            sw.initialize_variables(model)
    if not inside:
        sw.initialize_variables(model)
    for path, variable in {
        "d1.kernel": model.d1.kernel,
        "d1.bias": model.d1.bias,
        "d2.kernel": model.d2.kernel,
        "d2.bias": model.d2.bias,
    }.items():
        assert variable.path == path
        assert variable.layout == document_map()[path]
        np.testing.assert_array_equal(variable.numpy(), numbered(variable.shape, "float32"))
        value = variable.value
        assert isinstance(value, sw.ShardedArray)
        np.testing.assert_array_equal(value.numpy(), variable.numpy())
        np.testing.assert_array_equal(np.asarray(variable, "float64"), variable.numpy())


def test_shards_are_those_of_the_partition_and_replicas_share_memory() -> None:
    with sw.layout_map_scope(document_map()):
        model = sw.initialize_variables(Mlp())
    whole = numbered((6, 8), "float32")
    shards = model.d1.kernel.shards
    assert [shard.device for shard in shards] == [f"cpu:{i}" for i in range(8)]
    assert [shard.replica_id for shard in shards] == [0, 0, 0, 0, 1, 1, 1, 1]
    for i, shard in enumerate(shards):
        columns = slice(2 * (i % 4), 2 * (i % 4) + 2)
        assert shard.index == (slice(0, 6), columns)
        np.testing.assert_array_equal(shard.data, whole[:, columns])
    assert all(np.shares_memory(shards[i].data, shards[i + 4].data) for i in range(4))


class Slots:
    __slots__ = ("__private", "plain", "unset")

    def __init__(self) -> None:
        self.plain = zeros(4)
        self.__private = zeros(4)

    def private(self) -> sw.Variable:
        return self.__private


class SlotsBelow(Slots):
    __slots__ = ("below",)

    def __init__(self) -> None:
        super().__init__()
        self.below = zeros(4)


@dataclasses.dataclass
class Data:
    first: Any
    second: Any = dataclasses.field(default_factory=lambda: zeros(4))


Named = collections.namedtuple("Named", ["left", "right"])


@pytest.mark.parametrize(
    ("make", "paths"),
    [
        (lambda: {"a": [zeros(4), (zeros(4),)], 3: zeros(4)}, ["a.0", "a.1.0", "3"]),
        (lambda: Data({"x": zeros(4)}), ["first.x", "second"]),
        (lambda: [Named(zeros(4), zeros(4))], ["0.left", "0.right"]),
        (SlotsBelow, ["__private", "plain", "below"]),
        (lambda: collections.deque([zeros(4)]), ["0"]),
        (lambda: [Mlp()], ["0.d1.kernel", "0.d1.bias", "0.d2.kernel", "0.d2.bias"]),
    ],
)
def test_paths_are_attributes_and_indices(make: Callable[[], Any], paths: list[str]) -> None:
    with sw.layout_map_scope(layout_map()):
        tree = sw.initialize_variables(make())
    assert [variable.path for _, variable in named_leaves(tree, sw.Variable)] == paths


def test_a_variable_reached_twice_is_made_once_and_goes_by_the_first_path() -> None:
    calls = []

    def counted(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        calls.append(shape)
        return np.zeros(shape, dtype)

    with sw.layout_map_scope(layout_map(first=("model",))):
        shared = sw.Variable((4,), "float32", counted)
        holder: dict[str, Any] = {"first": {"w": shared}, "second": [shared]}
        holder["self"] = holder
        sw.initialize_variables(holder)
    sw.initialize_variables([shared])
    assert calls == [(4,)]
    assert shared.path == "first.w"
    assert shared.layout == sw.TensorLayout(("model",), MESH)


def test_an_atom_holds_nothing() -> None:
    assert list(named_leaves("text", int)) == []
    assert list(children(3)) == []


def test_deep_trees_and_cycles_end() -> None:
    with sw.layout_map_scope(layout_map()):
        tree: list[Any] = [zeros(4)]
        variable = tree[0]
        for _ in range(5_000):
            tree = [tree]
        tree.append(tree)
        sw.initialize_variables(tree)
    assert variable.is_initialized


def test_an_initializer_with_an_index_is_called_for_each_box_of_the_local_devices() -> None:
    calls: list[tuple[Any, ...]] = []

    def boxed(shape: tuple[int, ...], dtype: np.dtype[Any], index: tuple[slice, ...]) -> npt.NDArray[Any]:
        calls.append((shape, index))
        return numbered((6, 8), dtype)[index]

    with sw.layout_map_scope(layout_map(w=(None, "model")), local_devices=["cpu:5", "cpu:1", "cpu:2"]):
        variable = sw.initialize_variables(sw.Variable((6, 8), "int16", boxed, name="w"))
    assert calls == [((6, 2), (slice(0, 6), slice(2, 4))), ((6, 2), (slice(0, 6), slice(4, 6)))]
    assert [(shard.device, shard.replica_id) for shard in variable.shards] == [("cpu:1", 0), ("cpu:2", 0), ("cpu:5", 1)]
    assert np.shares_memory(variable.shards[0].data, variable.shards[2].data)
    np.testing.assert_array_equal(variable.shards[2].data, numbered((6, 8), "int16")[:, 2:4])
    with pytest.raises(sw.LayoutError, match="'w': 2 of its 4 shards are on local devices"):
        variable.numpy()


def test_outside_of_a_scope_an_initializer_with_an_index_makes_the_whole() -> None:
    calls: list[tuple[Any, ...]] = []

    def boxed(shape: tuple[int, ...], dtype: np.dtype[Any], index: tuple[slice, ...]) -> npt.NDArray[Any]:
        calls.append((shape, index))
        return numbered((6, 8), dtype)[index]

    variable = sw.Variable((6, 8), "int16", boxed, name="w")
    np.testing.assert_array_equal(variable.numpy(), numbered((6, 8), "int16"))
    assert calls == [((6, 8), (slice(0, 6), slice(0, 8)))]


def test_an_initializer_without_an_index_is_called_once_and_only_local_shards_are_kept() -> None:
    calls = []

    def whole(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        calls.append(shape)
        return numbered(shape, dtype)

    with sw.layout_map_scope(layout_map(w=("model",)), local_devices=["cpu:3"]):
        variable = sw.initialize_variables(sw.Variable((8,), "int16", whole, name="w"))
    assert calls == [(8,)]
    (shard,) = variable.shards
    np.testing.assert_array_equal(shard.data, [6, 7])
    assert shard.data.base is None  # a view would keep the whole alive


def test_local_memory_is_a_shard_not_the_whole() -> None:
    def boxed(shape: tuple[int, ...], dtype: np.dtype[Any], index: tuple[slice, ...]) -> npt.NDArray[Any]:
        return np.ones(shape, dtype)

    with sw.layout_map_scope(layout_map(w=(("data", "model"), None)), local_devices=["cpu:0"]):
        sw.initialize_variables(sw.Variable((8, 1), "float32", boxed, name="w"))  # Imports are not what is measured.
        variable = sw.Variable((2**11, 2**10), "float32", boxed, name="w")
    peak = peak_of(lambda: sw.initialize_variables(variable))
    assert 2**20 <= peak <= 2**20 + 2**16  # 8 MiB cut 8 ways


def test_a_mesh_of_many_devices_costs_only_the_local_ones() -> None:
    mesh = sw.DeviceMesh((2**20,), ("x",))
    rules = sw.LayoutMap(mesh)
    rules["w"] = ("x",)
    with sw.layout_map_scope(rules, local_devices=["cpu:1048575"]):
        variable = sw.initialize_variables(sw.Variable((2**21,), "int8", np.zeros, name="w"))
    (shard,) = variable.shards
    assert shard.index == (slice(2**21 - 2, 2**21),)


def test_a_variable_that_no_rule_matches_is_replicated_in_one_buffer() -> None:
    with sw.layout_map_scope(layout_map(kernel=(None, "model"))):
        model = sw.initialize_variables(Dense(3, 8))
    assert model.bias.layout == sw.TensorLayout((None,), MESH)
    assert [shard.replica_id for shard in model.bias.shards] == list(range(8))
    first = model.bias.shards[0].data
    assert all(np.shares_memory(first, shard.data) for shard in model.bias.shards)


@pytest.mark.parametrize("dtype", ["int8", "bool", "complex64", ">f4", "datetime64[s]", [("a", "i4"), ("b", "f8")]])
def test_dtypes(dtype: Any) -> None:
    with sw.layout_map_scope(layout_map(w=("model",))):
        variable = sw.initialize_variables(sw.Variable((8,), dtype, np.zeros, name="w"))
    np.testing.assert_array_equal(variable.numpy(), np.zeros((8,), dtype))


def test_0_d_and_empty() -> None:
    with sw.layout_map_scope(layout_map()):
        tree = sw.initialize_variables({"scalar": sw.Variable((), "int32", np.ones), "empty": zeros(0, 3)})
    assert tree["scalar"].numpy() == 1
    assert tree["scalar"].shards[7].data.shape == ()
    assert tree["empty"].numpy().shape == (0, 3)


def test_an_initializer_whose_parameters_nobody_knows() -> None:
    """As those of some functions of C."""
    with sw.layout_map_scope(layout_map()):
        variable = sw.initialize_variables([sw.Variable((2,), "int64", Opaque())])[0]
    assert variable.numpy().tolist() == [5, 5]


class Opaque:
    __signature__ = "none"

    def __call__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.full(shape, 5, dtype)


def test_outside_of_any_scope_a_variable_is_whole() -> None:
    variable = sw.Variable((3,), "int32", np.ones)
    assert variable.dtype == np.int32
    got = variable.numpy()
    got[:] = 7  # The caller's own.
    assert np.array(variable, copy=True).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="copy=False"):
        variable.__array__(copy=False)
    assert variable.layout is None
    np.testing.assert_array_equal(variable.value, [1, 1, 1])
    assert sw.initialize_variables([variable])[0].path is None
    with pytest.raises(sw.LayoutError, match="outside of any layout_map_scope"):
        variable.shards  # noqa: B018


def test_before_its_path_is_known_a_variable_holds_nothing_and_says_what_to_do() -> None:
    def never(shape: Any, dtype: Any) -> Any:
        raise AssertionError

    with sw.layout_map_scope(layout_map()):
        variable = sw.Variable((3,), "int32", never, name="w")
    assert not variable.is_initialized
    assert repr(variable) == "<Variable 'w' (3,) int32, not initialized>"
    for attribute in ("layout", "shards", "value"):
        with pytest.raises(sw.LayoutError, match=r"'w' of shape \(3,\) has no path yet: call initialize_variables"):
            getattr(variable, attribute)


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (("model",), (4, 4), r"'b\.w' of shape \(4, 4\): rule 'w' .* of rank 1, but the variable has rank 2"),
        ((None, "model"), (4, 6), r"'b\.w' of shape \(4, 6\): rule 'w' .* dim 1 has 6 elements, .* 'model' of size 4"),
        ((("data", "model"),), (12,), r"'b\.w' .* dim 0 has 12 elements, .*\('data', 'model'\) of together size 8"),
    ],
)
def test_a_layout_that_does_not_fit_is_found_before_any_data_is_made(
    axes: Any, shape: tuple[int, ...], message: str
) -> None:
    calls = []

    def counted(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        calls.append(shape)
        return np.zeros(shape, dtype)

    with sw.layout_map_scope(layout_map(w=axes)):
        tree = {"a": sw.Variable((4,), "int8", counted), "b": {"w": sw.Variable(shape, "int8", counted)}}
    with pytest.raises(sw.LayoutError, match=message):
        sw.initialize_variables(tree)
    assert calls == []


def test_a_path_that_two_rules_match_is_refused() -> None:
    with sw.layout_map_scope(layout_map(kernel=(None, "model"), d1=("model", None))):
        model = Mlp()
    with pytest.raises(sw.LayoutError, match=r"d1\.kernel"):
        sw.initialize_variables(model)


@pytest.mark.parametrize(
    ("initializer", "message"),
    [
        (lambda shape, dtype: 1 / 0, "'b': its initializer raised ZeroDivisionError"),
        (lambda shape, dtype: np.zeros(3, dtype), r"'b': its initializer gave shape \(3,\) and dtype int32"),
        (
            lambda shape, dtype: np.zeros(shape),
            "'b': its initializer gave .* dtype float64; it must give .* dtype int32",
        ),
        (
            lambda shape, dtype, index: np.zeros(4, dtype),
            r"'b': its initializer for the box \[0:1\] gave shape \(4,\) .* must give shape \(1,\)",
        ),
    ],
)
def test_an_initializer_that_fails_is_reported_with_the_path_and_nothing_changes(
    initializer: Callable[..., Any], message: str
) -> None:
    with sw.layout_map_scope(layout_map(b=("model",))):
        tree = {"a": sw.Variable((4,), "int32", np.zeros), "b": sw.Variable((4,), "int32", initializer)}
    with pytest.raises(sw.LayoutError, match=message):
        sw.initialize_variables(tree)
    assert not tree["a"].is_initialized
    assert tree["b"].path is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((4.0,), "int8", np.zeros), TypeError, "shape must be a sequence of integers"),
        (((True,), "int8", np.zeros), TypeError, "shape must be a sequence of integers"),
        (("44", "int8", np.zeros), TypeError, "shape must be a sequence of integers"),
        ((4, "int8", np.zeros), TypeError, "shape must be a sequence of integers"),
        (((2, -1), "int8", np.zeros), sw.LayoutError, r"shape\[1\] is -1"),
        (((4,), "object", np.zeros), TypeError, "dtype must be made of bytes"),
        (((4,), "int8", 0), TypeError, "initializer must be callable"),
        (((4,), "int8", np.zeros, 3), TypeError, "name must be a string"),
    ],
)
def test_bad_arguments(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sw.Variable(*arguments)


def test_numpy_integers_are_sizes() -> None:
    assert sw.Variable((np.int64(2), 3), "int8", np.zeros).shape == (2, 3)


def fused_map() -> sw.LayoutMap:
    """A fused weight: eight query heads, two key and value heads, of two rows, over four devices."""
    made = sw.LayoutMap(sw.DeviceMesh((2, 4), ("data", "model")))
    made["qkv"] = (sw.packed.qkv(8, 2, 2, "model"), None)
    made["words"] = (sw.packed.padded_vocab(10, "model", 8), None)
    return made


@pytest.mark.parametrize("by_index", [False, True])
def test_packed_rules(by_index: bool) -> None:
    whole = numbered((24, 3), "int32")
    calls = []

    def rows(shape: tuple[int, ...], dtype: npt.DTypeLike, index: tuple[slice, ...]) -> npt.NDArray[Any]:
        calls.append(index[0])
        assert whole[index].shape == shape
        return np.array(whole[index])

    with sw.layout_map_scope(fused_map()):
        model = {"qkv": sw.Variable((24, 3), "int32", rows if by_index else numbered)}
    qkv = sw.initialize_variables(model)["qkv"]
    assert qkv.layout == fused_map()["qkv"]
    held = [shard.data[:, 0] // 3 for shard in qkv.shards]
    # Queries 2 and 3, the key head 0, which device 0 holds as well, and the value head 0.
    assert held[1].tolist() == [4, 5, 6, 7, 16, 17, 20, 21]
    assert held[5].tolist() == held[1].tolist()
    assert [piece[0] for piece in qkv.shards[1].index] == [slice(4, 8), slice(16, 18), slice(20, 22)]
    np.testing.assert_array_equal(qkv.numpy(), whole)
    assert isinstance(qkv.value, sw.ShardedArray)
    np.testing.assert_array_equal(qkv.value.numpy(), whole)
    qkv.shards[0].data[0] = -1
    assert qkv.numpy()[0, 0] == -1
    # Each piece once: four of the queries, two of the keys and of the values.
    assert len(calls) == (8 if by_index else 0)
    assert len(set(map(str, calls))) == len(calls)


def test_what_several_shards_hold_is_drawn_once() -> None:
    source = np.random.default_rng(0)
    with sw.layout_map_scope(fused_map()):
        qkv = sw.Variable((24, 3), "float64", lambda shape, dtype, index: source.random(shape), "qkv")
    value = sw.initialize_variables(qkv).value
    assert isinstance(value, sw.ShardedArray)
    value.numpy()  # which refuses replicas that differ


def test_padding_of_a_variable_is_zeros() -> None:
    with sw.layout_map_scope(fused_map(), local_devices=["cpu:2", "cpu:3"]):
        words = sw.Variable((10, 1), "int8", np.ones, "words")
    shards = sw.initialize_variables(words).shards
    assert [shard.data.ravel().tolist() for shard in shards] == [[1, 1, 0, 0], [0, 0, 0, 0]]


def test_packed_rules_that_do_not_fit_say_so() -> None:
    with sw.layout_map_scope(fused_map()):
        qkv = sw.Variable((25, 3), "int8", np.zeros, "qkv")
    with pytest.raises(sw.LayoutError, match=r"variable 'qkv' of shape \(25, 3\).*25 elements.*add up to 24"):
        sw.initialize_variables(qkv)
    assert not qkv.is_initialized


def test_the_value_can_be_written_to_whatever_the_initializer_gives() -> None:
    constant = np.arange(8, dtype="f4")
    constant.flags.writeable = False

    def alone(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return constant

    def by_box(shape: tuple[int, ...], dtype: npt.DTypeLike, index: tuple[slice, ...]) -> npt.NDArray[Any]:
        return constant[index]

    whole = sw.Variable((8,), "f4", alone)
    assert isinstance(whole.value, np.ndarray)
    whole.value[0] = 9
    with sw.layout_map_scope(layout_map(v=("model",))):
        made = sw.initialize_variables({"v": sw.Variable((8,), "f4", alone), "v2": sw.Variable((8,), "f4", by_box)})
    for variable in made.values():
        variable.shards[0].data[0] = 9
        assert variable.numpy()[0] == 9
    assert constant.tolist() == list(range(8))
