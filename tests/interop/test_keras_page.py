"""The Keras program of docs/guides/from-keras.md, in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "from-keras.md"


def test_the_keras_program_of_the_page_runs() -> None:
    for module in ("keras", "jax"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    blocks = re.findall(r"^```python keras\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    environment = {
        **os.environ,
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    program = "\n".join(blocks)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    slots = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert slots["adam.iteration"] == "()"
    assert sorted(slots.values()) == sorted(
        ["()", "()"] + 2 * ["(None, 'model')", "('model',)", "('model', 'data')", "('data',)"]
    )
