"""Layouts through a training step: Llama of four layers with gradients and Adam, beside XLA's compiler.

It is traced once, and keeps what its first propagation has made of it whatever the layouts. What is timed is each later
`propagate`, with all of its moves as objects, sorted by bytes, on meshes of 8 and of 131,072 devices.

Besides: one op of many by explicit mode, beside JAX, and a factor rule. Each op is of a shape of its own, so that none
is answered by what is known of another.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from figures import Row, at_most
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from part import QUICK, main
from timing import alternate, compare

import shardwise as sw
from shardwise.computation import Computation, computation_from_jax, factor_rule
from shardwise.propagate import Propagation, propagate

LAYERS = 1 if QUICK else 4
WIDTH, HEADS, GROUPS, HIDDEN, WORDS, BATCH, LENGTH = 128, 8, 4, 256, 512, 16, 64
HEAD = WIDTH // HEADS

#: The shape of each weight, and the dims that "tp" cuts.
LAYER: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] = {
    "first": ((WIDTH,), (None,)),
    "query": ((WIDTH, HEADS, HEAD), (None, "tp", None)),
    "key": ((WIDTH, GROUPS, HEAD), (None, "tp", None)),
    "value": ((WIDTH, GROUPS, HEAD), (None, "tp", None)),
    "output": ((HEADS, HEAD, WIDTH), ("tp", None, None)),
    "second": ((WIDTH,), (None,)),
    "gate": ((WIDTH, HIDDEN), (None, "tp")),
    "up": ((WIDTH, HIDDEN), (None, "tp")),
    "down": ((HIDDEN, WIDTH), ("tp", None)),
}
MODEL = {
    "embedding": ((WORDS, WIDTH), ("tp", None)),
    "head": ((WIDTH, WORDS), (None, "tp")),
    "norm": ((WIDTH,), (None,)),
    **{f"layers.{layer}.{name}": said for layer in range(LAYERS) for name, said in LAYER.items()},
}


def norm(x: Any, weight: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight


def turned(x: Any) -> Any:
    """Rotary embeddings."""
    angles = jnp.arange(LENGTH)[:, None] * (10_000.0 ** -(jnp.arange(0, HEAD, 2) / HEAD))[None]
    cosine, sine = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    left, right = jnp.split(x, 2, -1)
    return jnp.concatenate([left * cosine - right * sine, right * cosine + left * sine], -1)


def layer(x: Any, weights: dict[str, Any]) -> Any:
    h = norm(x, weights["first"])
    query, key, value = (jnp.einsum("bsd,dhk->bshk", h, weights[name]) for name in ("query", "key", "value"))
    query = turned(query).reshape(BATCH, LENGTH, GROUPS, HEADS // GROUPS, HEAD)
    scores = jnp.einsum("bsghk,btgk->bghst", query, turned(key)) / HEAD**0.5
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e30)
    mixed = jnp.einsum("bghst,btgk->bsghk", jax.nn.softmax(scores, -1), value)
    x = x + jnp.einsum("bshk,hkd->bsd", mixed.reshape(BATCH, LENGTH, HEADS, HEAD), weights["output"])
    h = norm(x, weights["second"])
    return x + (jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"])) @ weights["down"]


def loss(weights: dict[str, Any], words: Any, labels: Any) -> Any:
    x = weights["embedding"][words]
    for number in range(LAYERS):
        x = layer(x, {name: weights[f"layers.{number}.{name}"] for name in LAYER})
    logs = jax.nn.log_softmax(norm(x, weights["norm"]) @ weights["head"], -1)
    return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], -1))


def step(weights: Any, state: Any, words: Any, labels: Any) -> Any:
    """Adam."""
    value, gradients = jax.value_and_grad(loss)(weights, words, labels)
    mean, square, count = state
    count = count + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradients)
    square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, square, gradients)
    rates = 1 - 0.9 ** count.astype("float32"), 1 - 0.99 ** count.astype("float32")
    change = lambda w, m, v: w - 1e-3 * (m / rates[0]) / (jnp.sqrt(v / rates[1]) + 1e-8)  # noqa: E731
    return value, jax.tree.map(change, weights, mean, square), (mean, square, count)


def arguments() -> tuple[Any, ...]:
    weights = {name: jax.ShapeDtypeStruct(shape, "float32") for name, (shape, _) in MODEL.items()}
    words = jax.ShapeDtypeStruct((BATCH, LENGTH), "int32")
    return weights, (weights, weights, jax.ShapeDtypeStruct((), "int32")), words, words


def layouts() -> list[tuple[str | None, ...]]:
    """Those of all arguments, in their order: trees of JAX sort the names."""
    weights = [MODEL[name][1] for name in sorted(MODEL)]
    return [*weights, *weights, *weights, (), ("dp", None), ("dp", None)]


def compiled(computation: Computation) -> float:
    """The seconds that XLA's compiler takes for the same on 8 host devices."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))
    leaves, tree = jax.tree.flatten(arguments())
    shardings = [NamedSharding(mesh, PartitionSpec(*axes)) for axes in layouts()]
    assert len(leaves) == computation.inputs
    lowered = jax.jit(step, in_shardings=jax.tree.unflatten(tree, shardings)).lower(*arguments())
    start = time.perf_counter()
    lowered.compile()
    return time.perf_counter() - start


def propagated(computation: Computation, mesh: sw.DeviceMesh, policy: Any) -> Propagation:
    found = propagate(computation, layouts(), mesh=mesh, policy=policy)
    assert found.moves
    return found


def rows() -> Iterator[Row]:
    computation = computation_from_jax(step, *arguments())
    small = sw.DeviceMesh((2, 4), ("dp", "tp"))
    large = sw.DeviceMesh((2, 4, 16_384), ("dp", "tp", "pp"))
    ops = f"{len(computation.ops):,} ops"
    seconds = compiled(computation)
    for policy in ("shardy", "least"):
        ours = partial(propagated, computation, small, policy)
        row = compare(f"a step of Llama, {ops}: layouts and moves, `{policy}`", ours, goal=at_most(0.01))
        yield Row(row.work, "XLA's compiler, once", row.ours, seconds, goal=row.goal)
    many = partial(propagated, computation, large, "shardy")
    few = partial(propagated, computation, small, "shardy")
    yield compare("the same on 131,072 devices", many, "on 8 devices", few)


def rows_of_ops() -> Iterator[Row]:
    """A product by explicit mode, one of a chain of many, and its factor rule."""
    batch, least = 64, 8
    sizes = range(least, least + 8 * (20 if QUICK else 1_000), 8)
    contracted = {"lhs_contracting_dimensions": [1], "rhs_contracting_dimensions": [0]}
    inputs = [(batch, sizes[0]), *pairwise(sizes)]
    values = [0, *range(len(inputs), len(inputs) + len(sizes) - 2)]
    ops = [
        {"op": "dot_general", "in": [value, number], "out": [[(batch, size), "float32"]], "attrs": contracted}
        for number, (value, size) in enumerate(zip(values, sizes[1:], strict=True), 1)
    ]
    computation = Computation([[shape, "float32"] for shape in inputs], ops, [len(inputs) + len(ops) - 1])
    mesh = sw.DeviceMesh((2, 4), ("dp", "tp"))
    layouts = [("dp", None), *[(None, None)] * len(ops)]
    abstract = AbstractMesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    left, right = (
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(abstract, PartitionSpec(*axes)))
        for shape, axes in zip(inputs[:2], layouts[:2], strict=True)
    )

    def ours() -> None:
        propagate(computation, layouts, mesh=mesh, policy="explicit")

    def theirs() -> None:
        with jax.sharding.use_abstract_mesh(abstract):
            jax.eval_shape(lambda x, w: x @ w, left, right)

    mine, peers = (statistics.median(column) for column in zip(*alternate([ours, theirs], 11, 0.02), strict=True))
    work = f"a product by explicit mode, of {len(ops):,}"
    yield Row(work, "JAX's explicit mode, of one", mine / len(ops), peers, goal=at_most(2e-6))
    operands, results, left_dims, right_dims = inputs[:2], [(batch, sizes[1])], [1], [0]

    def rule() -> None:
        # Written out as a program writes it: `partial` would join two dicts of attributes at each call.
        factor_rule(
            "dot_general",
            operands,
            results,
            lhs_contracting_dimensions=left_dims,
            rhs_contracting_dimensions=right_dims,
        )

    yield compare("the factor rule of a product, from Python", rule, goal=at_most(1e-6))


def all_rows() -> Iterator[Row]:
    yield from rows()
    yield from rows_of_ops()


if __name__ == "__main__":
    main(all_rows)
