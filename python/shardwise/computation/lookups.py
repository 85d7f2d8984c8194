"""JAX's gathers and scatters as the ops of StableHLO that JAX lowers them to."""

from __future__ import annotations

import math

from .lowering import Eqn, Lowering

__all__ = ["lowered_gather", "lowered_scatter"]


def lowered_gather(body: Lowering, eqn: Eqn) -> int:
    """Add a gather, with a mask where places that are not there give a value."""
    operand, indices = eqn.operands
    (shape, dtype), out, sizes = body.values[indices], eqn.out, eqn.params["slice_sizes"]
    said = dict(eqn.params["dimension_numbers"], index_vector_dim=len(shape) - 1, slice_sizes=sizes)
    if "FILL" not in str(eqn.params.get("mode")):
        return body.emit("gather", eqn.operands, out, **said)
    truth = [shape, "bool"]
    last = [body.shape(operand)[dim] - sizes[dim] for dim in said["start_index_map"]]
    bound = body.constant([shape[-1:], dtype], last)
    above = body.emit("compare", [indices, body.full(shape, dtype, 0)], truth, direction="GE")
    bound = body.broadcast(bound, [1] * (len(shape) - 1) + shape[-1:], [len(shape) - 1])
    bound = body.broadcast(bound, shape, range(len(shape)))
    inside = body.emit("and", [above, body.emit("compare", [indices, bound], truth, direction="LE")], truth)
    start = body.constant([[], "bool"], True)
    mask = body.reduce("and", inside, start, [len(shape) - 1], [shape[:-1], "bool"])
    found = body.emit("gather", eqn.operands, out, **said)
    batches = [dim for dim in range(len(out[0])) if dim not in said["offset_dims"]]
    fill = body.full(out[0], out[1], eqn.params.get("fill_value", math.nan))
    return body.emit("select", [body.broadcast(mask, out[0], batches), found, fill], out)


def lowered_scatter(body: Lowering, eqn: Eqn, by: str) -> int | None:
    """Add a scatter whose updates are put in `by` an op, at places that are clamped if the mode says so."""
    said, function = eqn.params["dimension_numbers"], eqn.params.get("update_jaxpr")
    if by == "assign" and function and function["jaxpr"]["outputs"] != [1]:
        # It is by another function of an element and its update.
        return None
    operand, indices, updates = eqn.operands
    if eqn.name == "scatter-sub":
        updates = body.emit("negate", [updates], body.values[updates])
    shape, dtype = body.values[indices]
    if "CLIP" in str(eqn.params.get("mode")):
        windows = iter(said["update_window_dims"])
        alone = [*said["inserted_window_dims"], *said["operand_batching_dims"]]
        parts = [1 if d in alone else body.shape(updates)[next(windows)] for d in range(len(body.shape(operand)))]
        last = [body.shape(operand)[dim] - parts[dim] for dim in said["scatter_dims_to_operand_dims"]]
        bound = body.broadcast(body.constant([shape[-1:], dtype], last), shape, [len(shape) - 1])
        indices = body.emit("clamp", [body.constant([[], dtype], 0), indices, bound], [shape, dtype])
    return body.emit(
        "scatter",
        [operand, indices, updates],
        eqn.out,
        offset_dims=said["update_window_dims"],
        collapsed_slice_dims=said["inserted_window_dims"],
        operand_batching_dims=said["operand_batching_dims"],
        start_indices_batching_dims=said["scatter_indices_batching_dims"],
        start_index_map=said["scatter_dims_to_operand_dims"],
        index_vector_dim=len(shape) - 1,
        body=by,
    )
