"""What `layout_map_scope` saves in memory, and what it costs when a Keras model is built; a process for each."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from figures import Row, at_most_bytes, at_most_times
from part import QUICK, main

from shardwise import DeviceMesh, LayoutMap, Variable, initialize_variables, layout_map_scope

MIB = 2**20
LAYERS = 20 if QUICK else 200
TURNS = 3 if QUICK else 7


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_of(work: Callable[[], object]) -> int:
    """How far the resident memory rises while `work` runs, seen every millisecond."""
    start = peak = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = work()
    done.set()
    watcher.join()
    peak = max(peak, resident())
    del kept
    return peak - start


def ones(shape: tuple[int, ...], dtype: np.dtype[Any], index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
    """An initializer that is called for a box."""
    return np.ones(shape, dtype)


def memory() -> None:
    """A variable of 1 GiB: cut 8 ways for one local device, and whole."""
    layout_map = LayoutMap(DeviceMesh((8,), ("model",)))
    layout_map["kernel"] = (None, "model")
    shape = (2**14, 2**14)

    def one_shard() -> Variable:
        with layout_map_scope(layout_map, local_devices=["cpu:3"]):
            variable = Variable(shape, "float32", ones, name="kernel")
        return initialize_variables(variable)

    cut, whole = peak_of(one_shard), peak_of(lambda: Variable(shape, "float32", ones))
    name = "a variable of 1 GiB cut eight ways, one device's shard made: its peak above the start"
    print(Row(name, "outside of any scope", cut, whole, goal=at_most_bytes(160 * 2**20), unit="B").to_json())


def build(scope: AbstractContextManager[Any]) -> float:
    """The processor seconds of building a functional model of 200 layers, until its values are there."""
    import keras

    keras.utils.clear_session()
    gc.collect()
    start = time.process_time()
    with scope:
        x = inputs = keras.Input((64,))
        for _ in range(LAYERS):
            x = keras.layers.Dense(64, activation="relu")(x)
        model = keras.Model(inputs, x)
    values = [variable.value for variable in model.variables]
    if keras.backend.backend() == "jax":
        import jax

        jax.block_until_ready(values)
    return time.process_time() - start


def overhead() -> None:
    """Building a Keras model with and without the scope, in turn."""
    import keras

    mesh = DeviceMesh((2, 4), ("data", "model"))
    layout_map = LayoutMap(mesh)
    layout_map["kernel"], layout_map["bias"] = (None, "model"), ("model",)
    names = {"without": "building them without", "model parallel": "Keras's `ModelParallel`"}
    contestants: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "without": nullcontext,
        "with": lambda: layout_map_scope(layout_map),
    }
    if keras.backend.backend() == "jax" and keras.distribution.get_device_count() == mesh.size:
        from shardwise.interop.keras import to_keras

        whole_paths = LayoutMap(mesh)
        whole_paths[".*kernel"], whole_paths[".*bias"] = (None, "model"), ("model",)
        distribution = keras.distribution.ModelParallel(layout_map=to_keras(whole_paths), batch_dim_name="data")
        contestants["model parallel"] = distribution.scope
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(TURNS + 1):
        for name, scope in contestants.items():
            times[name].append(build(scope()))
    placed = ", values placed on 8 devices" if len(contestants) > 2 else ""
    work = f"building {LAYERS} Keras layers under the scope, {keras.backend.backend()}{placed}"
    scoped = times["with"][1:]
    for name in [name for name in contestants if name != "with"]:
        other = times[name][1:]
        ratios = [theirs / ours for ours, theirs in zip(scoped, other, strict=True)]
        goal = at_most_times(1.1) if name == "without" else None
        medians = statistics.median(scoped), statistics.median(other)
        print(Row(work, names[name], *medians, min(ratios), max(ratios), goal=goal).to_json())


def measured(what: str, **environment: str) -> Iterator[Row]:
    """What a process of its own prints: JSON, a row a line, among whatever else a framework has to say."""
    command = [sys.executable, __file__, what, *(["--quick"] if QUICK else [])]
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment}
    output = subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout
    yield from (Row.from_json(line) for line in output.splitlines() if line.startswith("{"))


def rows() -> Iterator[Row]:
    yield from measured("memory")
    for backend in ("numpy", "tensorflow", "jax"):
        yield from measured("overhead", KERAS_BACKEND=backend)
    yield from measured("overhead", KERAS_BACKEND="jax", XLA_FLAGS="--xla_force_host_platform_device_count=8")


if __name__ == "__main__":
    alone = {"memory": memory, "overhead": overhead}.get(sys.argv[1] if len(sys.argv) > 1 else "")
    if alone:
        alone()
    else:
        main(rows)
