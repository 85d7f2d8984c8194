"""What JAX and XLA say of layouts: reads them as JSON from the standard input, writes the answers as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec


def tiles(text: str) -> dict[str, Any]:
    """XLA's own conversion of a named sharding, and the devices of its tiles."""
    hlo = xla_client.HloSharding.v3_to_v2_sharding(xla_client.HloSharding.from_string(text))
    return {"hlo": str(hlo), "devices": list(hlo.tile_assignment_devices()) if hlo.is_tiled() else None}


def main() -> None:
    answers = []
    given = json.load(sys.stdin)
    if isinstance(given, dict):
        json.dump([tiles(text) for text in given["named"]], sys.stdout)
        return
    with mlir.make_ir_context():
        for case in given:
            mesh = AbstractMesh(
                tuple(case["shape"]), tuple(case["names"]), axis_types=(AxisType.Explicit,) * len(case["shape"])
            )
            entries = [tuple(names) if names else None for names in case["axes"]]
            sharding = NamedSharding(mesh, PartitionSpec(*entries, unreduced=frozenset(case["unreduced"])))
            hlo = sharding._to_xla_hlo_sharding(len(entries))
            ours = xla_client.HloSharding.from_string(case["hlo"])
            listed = xla_client.HloSharding.from_string(case["hlo_list"])
            read = ir.Attribute.parse(case["shardy"])
            answers.append(
                {
                    "hlo": str(hlo),
                    "same": ours == hlo,
                    "devices": list(hlo.tile_assignment_devices()) if hlo.is_tiled() else None,
                    "listed": list(listed.tile_assignment_devices()) if listed.is_tiled() else None,
                    "shardy": str(sharding._to_sdy_sharding(len(entries)).build({})),
                    "shardy_read": str(read),
                }
            )
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
