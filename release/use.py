"""Install a wheel into an environment of its own, and use it there with no compiler in reach.

python -m release.use WHEEL-OR-FOLDER...
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from .programs import run

__all__ = ["use"]

USE = """
import sys, numpy as np, shardwise as sw
mesh = sw.DeviceMesh((2, 4), ("data", "model"))
array = np.arange(24.0, dtype="f4").reshape(3, 8)
sharded = sw.distribute_tensor(array, sw.TensorLayout((None, "model"), mesh))
assert sharded.shard("cpu:6").tolist() == array[:, 4:6].tolist()
assert np.shares_memory(sharded.shard("cpu:6"), array)
sw.save_checkpoint("model.safetensors", {"h.0.attn.c_proj.weight": np.zeros((8, 8), "f4")})
extra = {name.split(".")[0] for name in sys.modules} & {"jax", "keras", "ml_dtypes", "rich", "tensorflow", "torch"}
assert not extra, extra
print("shardwise", sw.__version__, "on Python", sys.version.split()[0], "with numpy", np.__version__)
"""


def use(wheel: Path) -> None:
    """Install the wheel into an environment of its own, and use it there with no compiler in reach."""
    # What says where packages come from stays; where programs are does not.
    kept = ("SYSTEMROOT", "TEMP", "TMP", "TMPDIR", "HOME", "PIP_", "SSL_", "HTTPS_", "LANG")
    bare = {name: value for name, value in os.environ.items() if name.startswith(kept)}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run([sys.executable, "-m", "venv", str(place / "venv")])
        programs = place / "venv" / ("Scripts" if os.name == "nt" else "bin")
        bare |= {"PATH": str(programs), "PYTHONIOENCODING": "utf-8"}
        python = str(programs / "python")
        run(
            [python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", str(wheel.resolve())],
            bare,
            place,
        )
        print(run([python, "-I", "-c", USE], bare, place), end="")
        shardwise = [str(programs / "shardwise"), "report", "model.safetensors", "--mesh", "model=4"]
        if "of 256 B" not in run([*shardwise, "--rules", "gpt2"], bare, place):
            sys.exit("shardwise report gives another answer than it should")


if __name__ == "__main__":
    given = [Path(name) for name in sys.argv[1:]]
    wheels = [wheel for path in given for wheel in (sorted(path.glob("*.whl")) if path.is_dir() else [path])]
    if not wheels:
        sys.exit("no wheel to use")
    for wheel in wheels:
        use(wheel)
