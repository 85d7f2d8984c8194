"""Initial values on the JAX backend that are computed sharded: no device ever holds one whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import keras
import numpy as np

__all__ = ["sharded_value"]


def sharded_value(initializer: Callable[..., Any], shape: tuple[int, ...], dtype: str, sharding: Any) -> Any:
    """Return the `jax.Array` that an initializer makes, each device computing its shard of it.

    What Keras's own initializers make is compiled once for all variables of one shape, dtype and sharding, with the
    seed as an argument; any other initializer is compiled for each variable, since its dependencies are unknown.
    """
    import jax

    seed = getattr(initializer, "seed", None)
    if _is_kerass_own(initializer) and seed is not None:
        state = seed.next() if isinstance(seed, keras.random.SeedGenerator) else np.array([seed, 0], "uint32")
        return _compiled(_Unseeded(initializer), shape, dtype, sharding)(state)

    def traced() -> Any:
        # The state of a seed generator must not take what is only traced.
        with keras.StatelessScope(initialize_variables=False):
            return initializer(shape, dtype=dtype)

    value = jax.jit(traced, out_shardings=sharding)()
    if isinstance(seed, keras.random.SeedGenerator):
        seed.next()
    return value


def _is_kerass_own(initializer: Any) -> bool:
    return getattr(keras.initializers, type(initializer).__name__, None) is type(initializer)


class _Unseeded:
    """An initializer without its seed: equal to all that differ from it in the seed only."""

    def __init__(self, initializer: Any) -> None:
        self._initializer = initializer
        options = ((name, repr(value)) for name, value in vars(initializer).items() if "seed" not in name)
        self._key = (type(initializer), *sorted(options))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unseeded) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def seeded(self, state: Any) -> Any:
        """Return the initializer, with what its seed draws."""
        twin = copy.copy(self._initializer)
        twin.seed = _SpentGenerator(state)
        return twin


class _SpentGenerator(keras.random.SeedGenerator):  # type: ignore[misc]
    """A seed generator that has drawn already."""

    def __init__(self, state: Any) -> None:
        # A generator of its own would make a variable.
        self._drawn = state

    def next(self, ordered: bool = True) -> Any:
        """Return what was drawn."""
        return self._drawn


@lru_cache(maxsize=256)
def _compiled(unseeded: _Unseeded, shape: tuple[int, ...], dtype: str, sharding: Any) -> Callable[[Any], Any]:
    import jax

    def seeded_value(state: Any) -> Any:
        return unseeded.seeded(state)(shape, dtype=dtype)

    compiled: Callable[[Any], Any] = jax.jit(seeded_value, out_shardings=sharding)
    return compiled
