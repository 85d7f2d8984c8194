"""Keras 3 under `layout_map_scope`, and its distribution API: each case of the programs below on each backend."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = (
    "keras_models",
    "keras_training",
    "keras_bad_input",
    "keras_layout_map_test",
    "keras_zoo",
    "keras_private_names",
)
BACKENDS = ("jax", "tensorflow", "numpy", "torch")

#: Keras's own distribution, and values on devices, are for JAX; numpy has no training.
ONLY = {
    "model_parallel": {"jax"},
    "large_values_start_sharded": {"jax"},
    "checkpoint_of_tensorflow": {"tensorflow"},
    "training": {"jax", "tensorflow", "torch"},
    "a_model_that_fit_builds": {"jax", "tensorflow", "torch"},
}


def names_of(program: str, backend: str) -> list[str]:
    text = Path(__file__).with_name(f"{program}.py").read_text(encoding="utf-8")
    names = re.findall(r"^@case\ndef (\w+)", text, re.MULTILINE)
    return [name for name in names if backend in ONLY.get(name, BACKENDS)]


@cache
def outcomes(program: str, backend: str) -> dict[str, str]:
    """What went wrong in each case; the cases of a program share a process, since to import Keras takes seconds."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", f"tests.interop.{program}", *names_of(program, backend)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    found: dict[str, str] = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    # What a process that dies takes with it.
    return {name: found.get(name, f"{done.stdout}\n{done.stderr}") for name in names_of(program, backend)}


@pytest.mark.parametrize(
    ("program", "backend", "name"),
    [(program, backend, name) for program in PROGRAMS for backend in BACKENDS for name in names_of(program, backend)],
)
def test_keras(program: str, backend: str, name: str) -> None:
    for module in ("keras", backend):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    wrong = outcomes(program, backend)[name]
    assert not wrong, f"{name} on {backend}:\n{wrong}"
