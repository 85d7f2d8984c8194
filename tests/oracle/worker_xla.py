"""The collectives that XLA makes of a change of layout, in the protocol of `worker`; on up to 16 devices.

SHARDWISE_JAX_DEVICES is the host's size. A case is a mesh, two layouts and a shape; the answer lists the collectives of
the compiled program, each as its name and the bytes that a device receives, counted from the shapes in its text:

- all-gather: of the result all but the part that the device has, `(g - 1) / g` in groups of `g`;
- all-to-all and reduce-scatter: of the operand all but the part that it keeps, `(g - 1) / g`;
- all-reduce: twice that, as in a ring;
- collective-permute: the operand, if any device sends to another one.
"""

from __future__ import annotations

import math
import re
from typing import Any

from tests.oracle.worker import serve
from tests.oracle.worker_jax import version

KINDS = "all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute"
COLLECTIVE = re.compile(rf"= (?P<result>.*?) (?P<kind>{KINDS})(?P<start>-start)?\((?P<operands>.*?)\)")
ARRAY = re.compile(r"\bf32\[([0-9,]*)\]")


def answer(case: dict[str, Any]) -> list[tuple[str, int]]:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = np.array(jax.devices()[: math.prod(case["mesh_shape"])])
    mesh = Mesh(devices.reshape(case["mesh_shape"]), tuple(case["axis_names"]))
    sides = [
        NamedSharding(mesh, PartitionSpec(*(tuple(spec) if spec else None for spec in case[side])))
        for side in ("src", "dst")
    ]
    moved = jax.jit(lambda array: array, in_shardings=sides[0], out_shardings=sides[1])
    program = moved.lower(jax.ShapeDtypeStruct(tuple(case["shape"]), np.float32)).compile().as_text()
    return collectives(program)


def collectives(program: str) -> list[tuple[str, int]]:
    found = []
    for line in program.splitlines():
        match = COLLECTIVE.search(line)
        if match is None:
            continue
        assert match["start"] is None, line
        kind = match["kind"]
        result = sum(4 * math.prod(map(int, filter(None, dims.split(",")))) for dims in ARRAY.findall(match["result"]))
        assert result, line
        if kind == "collective-permute":
            pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
            assert pairs is not None, line
            moves = [pair.split(",") for pair in re.findall(r"(\d+,\d+)", pairs[1])]
            found.append((kind, result if any(int(source) != int(target) for source, target in moves) else 0))
            continue
        group = group_size(line)
        # A tuple of results is one array cut in pieces.
        whole = result * group if kind == "reduce-scatter" else result
        found.append((kind, whole * (group - 1) // group * (2 if kind == "all-reduce" else 1)))
    return found


def group_size(line: str) -> int:
    """The devices of a group, from `[groups,size]<=...`, from `{{0,1},...}`, or from `mesh['a'=2,'b'=4] {'b'}`."""
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line)
    if iota is not None:
        return int(iota[2])
    along = re.search(r"replica_groups=@?mesh\w*\[([^\]]*)\][^{]* \{([^}]*)\}", line)
    if along is not None:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", along[1])}
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", along[2])
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    listed = re.search(r"replica_groups=\{\{([0-9,]*)\}", line)
    assert listed is not None, line
    return len(listed[1].split(","))


if __name__ == "__main__":
    serve(version, answer)
