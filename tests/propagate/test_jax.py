"""Computations of functions of JAX: what they compute, what must move, and at which line."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.computation import Computation, FactorRule, computation_from_jax
from shardwise.propagate import propagate

jax = pytest.importorskip("jax")
jnp: Any = jax.numpy

MESH = sw.DeviceMesh((2, 4), ("dp", "tp"))


def shape(*sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, "float32")


def step(params: Any, x: Any, y: Any) -> Any:
    def loss(params: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda param, gradient: param - 0.1 * gradient, params, gradients)


STEP = (step, {"up": shape(16, 32), "down": shape(32, 16)}, shape(8, 16), shape(8, 16))


def test_a_training_step_moves_its_gradients() -> None:
    computation = computation_from_jax(*STEP)
    assert computation.names == ("params['down']", "params['up']", "x", "y")
    layouts: dict[str, Any] = {"params['up']": (None, "tp"), "params['down']": ("tp", None)}
    found = propagate(computation, layouts | dict.fromkeys("xy", ("dp", None)), mesh=MESH)
    moved = [(move.kinds, move.shape, move.bytes) for move in found.moves]
    # A quarter of each weight, twice half of it; the activations, twice three quarters of a half; the loss.
    assert moved == [
        ("all-reduce over dp", (16, 32), 512),
        ("all-reduce over dp", (32, 16), 512),
        ("all-reduce over tp", (8, 16), 384),
        ("all-reduce over dp", (), 4),
    ]
    line = step.__code__.co_firstlineno + 2
    assert found.moves[2].source == f"{__file__}:{line}"


def test_inputs_have_the_names_of_parameters() -> None:
    found = computation_from_jax(lambda x, *more: x + more[0]["w"], shape(2), {"w": shape(2)})
    assert found.names == ("x", "more[0]['w']")
    assert computation_from_jax(dict, {"w": shape(2)}).names == ("[0]['w']",)  # it has no signature


def test_numpy_computes_what_jax_does() -> None:
    numpy = np.random.default_rng(0)
    computation = computation_from_jax(*STEP)
    arrays = [numpy.standard_normal(computation.shapes[at]).astype("float32") for at in range(4)]
    found = computation.run(arrays)
    expected = jax.tree.leaves(step({"down": arrays[0], "up": arrays[1]}, *arrays[2:]))
    for array, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, theirs, rtol=1e-4, atol=1e-5)
    assert Computation.from_json(computation.to_json()).run(arrays)[0] == found[0]


def many(x: Any, w: Any) -> Any:
    y, _ = jax.lax.scan(lambda carry, part: (jnp.sin(carry @ part), carry.sum()), x, w)
    y = jnp.where(y > 0, y, jnp.exp(y))
    z = jax.nn.softmax(jnp.cumsum(y, 0))
    turned = jnp.concatenate([z[1:], z[:1]], 0)
    kept = jnp.take_along_axis(z, jnp.argsort(y, -1), -1)
    return z[:, ::2], turned, jax.lax.top_k(z, 2), kept, jnp.pad(y, ((1, 1), (0, 0))), jax.nn.silu(y) ** 3, z[::-1]


def test_numpy_computes_scans_sorts_and_shifts() -> None:
    numpy = np.random.default_rng(1)
    arrays = [numpy.standard_normal(sizes).astype("float32") for sizes in ((8, 8), (3, 8, 8))]
    computation = computation_from_jax(many, shape(8, 8), shape(3, 8, 8))
    expected = jax.tree.leaves(many(*map(jnp.asarray, arrays)))
    for array, theirs in zip(computation.run(arrays), expected, strict=True):
        assert array.dtype == theirs.dtype
        np.testing.assert_allclose(array, theirs, rtol=1e-4, atol=1e-5)


def test_numpy_computes_windows_and_what_few_use() -> None:
    def few(x: Any) -> Any:
        most = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 1), (2, 1), "VALID")
        total = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2), (1, 1), "SAME")
        return most, total, jax.scipy.special.erfc(x), jax.nn.gelu(x, approximate=False), jnp.var(x, 0)

    x = np.random.default_rng(2).standard_normal((8, 6)).astype("float32")
    for array, theirs in zip(computation_from_jax(few, shape(8, 6)).run([x]), few(x), strict=True):
        np.testing.assert_allclose(array, theirs, rtol=1e-4, atol=1e-5)


def long_convolution(x: Any, h: Any) -> Any:
    """Convolve along a dim as Hyena does, and as a plain transform."""
    both = jnp.fft.rfft(x, n=16, axis=1) * jnp.fft.rfft(h, n=16, axis=0)
    return jnp.fft.irfft(both, n=16, axis=1)[:, :8], jnp.fft.ifft(jnp.fft.fft(x)).real


def test_numpy_computes_transforms_of_which_other_dims_are_cut() -> None:
    numpy = np.random.default_rng(4)
    arrays = [numpy.standard_normal(sizes).astype("float32") for sizes in ((4, 8, 8), (8, 8))]
    computation = computation_from_jax(long_convolution, shape(4, 8, 8), shape(8, 8))
    found = propagate(computation, [("dp", None, None), (None, None)], mesh=MESH)
    assert found.bytes_received == 0
    for of in (computation.run, found.run):
        for array, theirs in zip(of(arrays), long_convolution(*map(jnp.asarray, arrays)), strict=True):
            np.testing.assert_allclose(array, theirs, rtol=1e-4, atol=1e-5)


def test_what_nothing_uses_is_left_out_as_jax_does() -> None:
    def partly(x: Any) -> Any:
        jnp.sort(x)
        return jax.jit(lambda x: (jnp.cos(x), jnp.sort(x)))(x)[0]

    computation = computation_from_jax(partly, shape(8))
    assert [op.name for op in computation.ops] == ["call"]
    assert propagate(computation, [("dp",)], mesh=MESH).moves == ()


def test_keys_of_random_numbers_and_places_of_the_largest() -> None:
    def drawn(x: Any, key: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.where(kept, x, 0), jnp.argmax(x, -1)

    computation = computation_from_jax(drawn, shape(8, 16), jax.eval_shape(lambda: jax.random.key(0)))
    found = propagate(computation, [("dp", "tp"), None], mesh=MESH)
    assert [layout and layout.axes for layout in found.results] == [("dp", "tp"), ("dp",)]
    # The addends of the largest and of its place: 4 numbers of 4 bytes, twice three quarters.
    assert [(move.kinds, move.bytes) for move in found.moves] == [("all-reduce over tp", 24)] * 2
    with pytest.raises(sw.LayoutError, match="so it cannot be run"):
        computation.run([np.zeros((8, 16)), np.zeros(2)])


def repeated(x: Any, w: Any, n: Any) -> Any:
    def some(carry: Any) -> Any:
        return carry[0] + 1, jax.lax.fori_loop(0, carry[0], lambda _, y: jnp.tanh(y @ w), carry[1])

    y = jax.lax.while_loop(lambda carry: carry[0] < n, some, (0, x))[1]
    z = jax.lax.switch(n, [lambda y: y @ w, lambda y: y + 1, lambda y: -y], y)
    each = jax.vmap(
        lambda row: jax.lax.while_loop(lambda row: row.sum() < 9, lambda row: row + jnp.tanh(w @ row) + 1, row)
    )
    return z, jax.lax.cond(n > 1, lambda: (z, w), lambda: (z + 1, w.T)), each(x)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_loops_and_branches_of_which_only_the_run_tells(count: int) -> None:
    numpy = np.random.default_rng(3)
    arrays = [numpy.standard_normal(sizes).astype("float32") / 2 for sizes in ((8, 8), (8, 8))]
    computation = computation_from_jax(repeated, shape(8, 8), shape(8, 8), jax.ShapeDtypeStruct((), "int32"))
    found = propagate(computation, [("dp", None), ("tp", None), None], mesh=MESH)
    expected = jax.tree.leaves(repeated(jnp.asarray(arrays[0]), jnp.asarray(arrays[1]), count))
    for of in (computation.run, found.run):
        for array, theirs in zip(of([*arrays, count]), expected, strict=True):
            np.testing.assert_allclose(array, theirs, rtol=1e-4, atol=1e-5)


def places(x: Any) -> Any:
    return (
        jnp.argmax(x, 0),
        jnp.argmin(x, 1),
        jnp.searchsorted(jnp.sort(x[0]), x[1]),
        jnp.select([x > 0, x < -1], [x, -x]),
    )


def parts(x: Any) -> Any:
    first, *_, last = jnp.unstack(x, axis=1)
    put = x.at[0].subtract(1), jax.device_put(x), jnp.conj(x + 1j * x)
    return jnp.stack([first, last], 1), jnp.tile(x, (2, 1, 3)), jax.lax.cumlogsumexp(x), jnp.diag(x), put


def narrow(x: Any) -> Any:
    narrow = x.astype(jnp.bfloat16)
    return narrow @ narrow.T, narrow.sum(0), jnp.cumsum(narrow, 1), jnp.arcsin(x / 9), (x * 8).astype(int) << 1


def pooled(x: Any) -> Any:
    def pool(x: Any) -> Any:
        most = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (3, 2), (2, 2), "SAME")
        return (most * jax.lax.reduce_window(x, jnp.inf, jax.lax.min, (3, 2), (2, 2), "SAME")).sum()

    return jax.grad(pool)(x), jax.grad(lambda x: jax.scipy.linalg.solve_triangular(x + 4 * jnp.eye(8), x).sum())(x)


def whole_numbers(x: Any) -> Any:
    n, few = (x * 63).astype(jnp.int8), (x * 2).astype(jnp.int32)
    both = jax.lax.sort((few, n), num_keys=2)
    bits = (
        jax.lax.reduce(n, n.dtype.type(start), of, (0,))
        for start, of in ((-1, jax.lax.bitwise_and), (0, jax.lax.bitwise_or), (5, jax.lax.bitwise_xor))
    )
    ends = jnp.argmin(jnp.abs(few) + 3, 1), jnp.argmax(few - 9, 0), (few - 9).max(0), jax.lax.cummin(few + 9, 1)
    product = jax.lax.dot(n, n, preferred_element_type=jnp.int32)
    most = jax.lax.top_k(n.astype(jnp.uint8), 3), jax.lax.top_k(jnp.where(x > 1, jnp.nan, x), 8)[1]
    return both, *bits, *ends, product, most, jax.lax.rem(n, n % 3), jax.lax.round(x * 2), (x * 2e9).astype(jnp.int32)


def grouped(x: Any) -> Any:
    def convolved(x: Any, w: Any) -> Any:
        found = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=2)
        return (found**2).sum()

    numbers = jax.lax.ScatterDimensionNumbers((0,), (1,), (0, 1))
    put = jax.lax.scatter(x, jnp.array([[1, 2], [6, 5]]), x[:2, :4].T.reshape(2, 4)[:, :3].T, numbers)
    return jax.grad(convolved, (0, 1))(x.reshape(2, 4, 2, 4), x[:4, :6].reshape(6, 2, 2, 1)), put


def reduced(x: Any) -> Any:
    """Reduce by functions that are one op, from where another value is."""
    least = jax.lax.reduce(x, x[0, 0], lambda a, b: jnp.minimum(b, a), (0,))
    both = jax.lax.reduce((x, -x), (x[0, 0], x[1, 1]), lambda a, b: (a[0] + b[0], a[1] + b[1]), (1,))
    return least, both, jax.lax.reduce(x > 0, x[0, 0] > 0, jnp.logical_and, (0, 1))


def decomposed(x: Any) -> Any:
    matrices = (x + 9 * jnp.eye(8)).reshape(8, 4, 2)
    (u, values, v), (q, r) = jnp.linalg.svd(matrices, full_matrices=False), jnp.linalg.qr(matrices)
    return (u * values[:, None]) @ v, q @ r, jax.lax.linalg.lu(matrices), jnp.linalg.svd(matrices.mT, compute_uv=False)


def solved(x: Any) -> Any:
    """Solve equations, also of complex numbers and of one triangle of a matrix."""
    a = x + 9 * jnp.eye(8)
    transposed = {"left_side": True, "lower": True, "transpose_a": True, "conjugate_a": True}
    adjoint = jax.lax.linalg.triangular_solve(a + 1j * x.T, x + 0j, **transposed)
    vectors, values = jax.lax.linalg.eigh(x, lower=False, symmetrize_input=False)
    return jnp.linalg.solve(a, x), adjoint, values, vectors * values @ vectors.T, (1j * x).real


def rounded(x: Any) -> Any:
    """Keep what a gradient needs, as `jax.checkpoint` does, and round to few bits."""
    saved = jax.checkpoint_policies.dots_saveable
    gradient = jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x) @ x), policy=saved)(x).sum())(x)
    few = jnp.stack([x * 3e38, x * 1e-39, x / 3, jnp.log(x), x * 1e4])
    return gradient, jax.lax.reduce_precision(few, 5, 3), jax.lax.reduce_precision(x / 7, 8, 7)


def ends(x: Any) -> Any:
    """Take what is largest along another dim, and scan and add up nothing."""
    none = jax.lax.scan(lambda carry, row: (carry + row, carry), x[0], x[:0])
    branched = jax.grad(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: (x * 2).sum(), lambda: jnp.cos(x).sum()))(x)
    return jax.lax.top_k(x, 3, axis=0), none, jnp.cumsum(x[:0], 0), branched


@pytest.mark.parametrize(
    "function",
    [places, parts, narrow, pooled, whole_numbers, grouped, reduced, decomposed, solved, rounded, ends],
)
@pytest.mark.parametrize("layout", [("dp", "tp"), (None, ("tp", "dp")), ("tp", None)])
def test_devices_compute_what_jax_does(function: Any, layout: Any) -> None:
    x = np.random.default_rng(5).permutation(64).reshape(8, 8).astype("float32") / 16 - 2
    computation = computation_from_jax(function, shape(8, 8))
    found = propagate(computation, [layout], mesh=MESH)
    for of in (computation.run, found.run):
        for array, theirs in zip(of([x]), jax.tree.leaves(function(jnp.asarray(x))), strict=True):
            assert array.dtype == theirs.dtype
            np.testing.assert_allclose(array.astype(theirs.dtype), theirs, rtol=1e-2, atol=1e-2)


def test_devices_without_a_channel_add_nothing() -> None:
    def scanned(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda y, row: (y + jax.lax.conv(row, w, (1, 1), "SAME").sum(), row), 0.0, x)[0]

    numpy = np.random.default_rng(6)
    arrays = [numpy.standard_normal(sizes).astype("float32") for sizes in ((2, 3, 3, 4, 4), (6, 3, 3, 3))]
    computation = computation_from_jax(scanned, *(shape(*array.shape) for array in arrays))
    found = propagate(computation, [(None, None, "tp", None, None), None], mesh=MESH)
    np.testing.assert_allclose(found.run(arrays)[0], scanned(*map(jnp.asarray, arrays)), rtol=1e-4)


def test_a_matrix_of_which_sides_are_cut_is_read_whole() -> None:
    def vectors(x: Any) -> Any:
        return jnp.abs(jnp.linalg.eigh(x)[1])

    x = np.random.default_rng(7).standard_normal((6, 6)).astype("float32")
    found = propagate(computation_from_jax(vectors, shape(6, 6)), [("x", None)], mesh=sw.DeviceMesh((3,), ("x",)))
    np.testing.assert_allclose(found.run([x])[0], vectors(jnp.asarray(x)), rtol=1e-3, atol=1e-4)


def test_a_constraint_leaves_unconstrained_dims_open() -> None:
    spec = jax.sharding.PartitionSpec(jax.sharding.PartitionSpec.UNCONSTRAINED, "tp")
    sharding = jax.sharding.NamedSharding(jax.sharding.AbstractMesh((2, 4), ("dp", "tp")), spec)
    computation = computation_from_jax(lambda x: jax.lax.with_sharding_constraint(x @ x.T, sharding), shape(8, 8))
    assert propagate(computation, [("dp", None)], mesh=MESH).results == (sw.TensorLayout(("dp", "tp"), MESH),)


def test_keys_of_random_numbers_are_taken_apart() -> None:
    def drawn(x: Any, key: Any) -> Any:
        one, other = jax.random.split(key)
        keys = jax.random.split(other, 8)
        at = jax.lax.dynamic_slice(keys, (x[0, 0].astype(int),), (1,))[0]
        return x + jax.random.normal(one, x.shape) + jax.random.uniform(at), keys.T[0], jnp.broadcast_to(key, (2, 3))

    computation = computation_from_jax(drawn, shape(8, 16), jax.eval_shape(lambda: jax.random.key(0)))
    found = propagate(computation, [("dp", "tp"), None], mesh=MESH)
    assert [computation.shapes[output] for output in computation.outputs] == [(8, 16), (2,), (2, 3, 2)]
    assert found.results[0] == sw.TensorLayout(("dp", "tp"), MESH)


def test_the_line_is_of_code_that_is_not_installed() -> None:
    flax = pytest.importorskip("flax.linen")

    def applied(x: Any, w: Any) -> Any:
        return flax.Dense(8, use_bias=False).apply({"params": {"kernel": w}}, x)

    computation = computation_from_jax(applied, shape(8, 16), shape(16, 8))
    (line,) = {op.source for op in computation.ops if op.name == "dot_general"}
    assert line == f"{__file__}:{applied.__code__.co_firstlineno + 1}"


def test_a_primitive_that_is_not_known_says_how_to_go_on() -> None:
    def drawn(x: Any) -> Any:
        return jax.random.gamma(jax.random.key(0), x)

    name = "random_gamma"
    with pytest.raises(
        sw.LayoutError, match=rf"JAX's primitive '{name}' .*; give rules={{'{name}': FactorRule\(\.\.\.\)}}"
    ):
        computation_from_jax(drawn, shape(8))
    given = computation_from_jax(drawn, shape(8), rules={name: FactorRule("([k],[i])->([i])")})
    assert propagate(given, [("dp",)], mesh=MESH).results == (sw.TensorLayout(("dp",), MESH),)
    with pytest.warns(UserWarning, match=f"no rule is known for '{name}'"):
        whole = computation_from_jax(drawn, shape(8), unknown="whole")
    assert {move.bytes for move in propagate(whole, [("dp",)], mesh=MESH).moves} == {16}


def test_what_is_written_for_one_device_is_to_be_written_for_all() -> None:
    mesh, spec = jax.sharding.AbstractMesh((2, 4), ("dp", "tp")), jax.sharding.PartitionSpec

    def of_shards(x: Any) -> Any:
        return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec("dp"), out_specs=spec("dp"))(x)

    with pytest.raises(sw.LayoutError, match=r"'shard_map' .*, a function of one device's shards; trace that of whole"):
        computation_from_jax(of_shards, shape(8, 8))
    given = computation_from_jax(of_shards, shape(8, 8), rules={"shard_map": FactorRule("([i,j])->([i,j])")})
    plain = computation_from_jax(jnp.sin, shape(8, 8))
    for computation in (given, plain):
        found = propagate(computation, [("dp", None)], mesh=MESH)
        assert (found.results, found.moves) == ((sw.TensorLayout(("dp", None), MESH),), ())


def test_a_reduction_by_several_ops_is_not_known() -> None:
    def reduced(x: Any) -> Any:
        return jax.lax.reduce(x, 1.0, lambda a, b: a * b + 1, (0,))

    with pytest.raises(sw.LayoutError, match=r"'reduce' .*, a reduction by a function that is not one op such as"):
        computation_from_jax(reduced, shape(8, 8))
    with pytest.warns(UserWarning, match="no rule is known for 'reduce'"):
        whole = computation_from_jax(reduced, shape(8, 8), unknown="whole")
    assert Computation.from_json(whole.to_json()) == whole
    assert [move.kinds for move in propagate(whole, [("dp", None)], mesh=MESH).moves] == ["all-gather over dp"]


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (lambda x: x.at[jnp.array([1])].apply(jnp.sin), "'scatter' .*, which sets elements to a function of them"),
        (lambda x: jax.lax.linalg.eigh(x, subset_by_index=(0, 2)), "'eigh' .*, of some of the eigenvalues only"),
        (
            lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 1), (1, 1), "SAME", window_dilation=(2, 1)),
            "'reduce_window_sum' .*, with windows that are dilated",
        ),
    ],
)
def test_a_primitive_with_params_that_are_not_known(function: Any, advice: str) -> None:
    with pytest.raises(sw.LayoutError, match=rf"{advice}.*; give rules=.*, or unknown='whole'"):
        computation_from_jax(function, shape(8, 8))
    with pytest.warns(UserWarning, match="no rule is known for"):
        whole = computation_from_jax(function, shape(8, 8), unknown="whole")
    assert "all-gather over dp" in {move.kinds for move in propagate(whole, [("dp", None)], mesh=MESH).moves}


def test_constants_of_any_value_are_kept_in_json() -> None:
    masked = np.array([[0, -np.inf], [np.nan, 1]], "float32")
    computation = computation_from_jax(lambda x: (x + masked, x * np.array([1j, 2]), x * (1 + 2j)), shape(2, 2))
    x = np.arange(4.0).reshape(2, 2)
    again = Computation.from_json(json.loads(json.dumps(computation.to_json(), allow_nan=False)))
    for array, expected in zip(again.run([x]), (x + masked, x * np.array([1j, 2]), x * (1 + 2j)), strict=True):
        np.testing.assert_array_equal(array, expected)


def special(x: Any) -> Any:
    of = jax.scipy.special
    return of.gammainc(x, x), of.gammaincc(x, x), of.zeta(x, x), of.i0e(x), of.i1e(x), of.polygamma(2, x)


@pytest.mark.parametrize("function", [special, lambda x: (jnp.nextafter(x, x), jax.scipy.special.betainc(x, x, x))])
def test_special_functions_keep_the_layout(function: Any) -> None:
    found = propagate(computation_from_jax(function, shape(8, 8)), [("dp", "tp")], mesh=MESH)
    assert set(found.results) == {sw.TensorLayout(("dp", "tp"), MESH)}
    assert not found.moves
