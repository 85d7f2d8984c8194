"""Values of 8 and 4 bits with scales: FP8, NVFP4, MXFP4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._text import shown
from ..errors import ParseError
from .component import Along, LogicalTensor
from .parts import LARGEST, WHOLE, Given, StatedError, WeightGroup

__all__ = [
    "block_size",
    "fbgemm",
    "four_bits",
    "fp8",
    "modelopt",
    "mxfp4",
    "mxfp8",
    "scaled_in_groups",
    "singles",
    "values",
]

_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
#: Scales and zero points of activations, and factors: one for the tensor, or for each expert.
_SINGLE = (
    *("input_scale", "activation_scale", "input_global_scale", "input_zero_point", "weight_global_scale"),
    *("weight_scale_2", "input_scale_ub"),
)


def values(shape: tuple[int, ...], last: Along) -> tuple[Along, ...]:
    """Return what the dims of the values stand for: each itself, but the last one."""
    return (*(Along(dim) for dim in range(len(shape) - 1)), last)


def singles(group: WeightGroup, shape: tuple[int, ...]) -> dict[str, tuple[Along, ...]]:
    """Return the members that are one number for the tensor, or for each expert."""
    return {tail: group.scale(tail, shape, None) for tail in _SINGLE if tail in group.members}


def block_size(given: Any, where: str) -> tuple[int, int]:
    """Read a block size.

    Raises:
        ParseError: if it is not two positive integers.
    """
    if (
        not isinstance(given, Sequence)
        or len(given) != 2
        or not all(type(size) is int and 0 < size <= LARGEST for size in given)
    ):
        raise StatedError(
            f"quantization_config: {where} is {shown(given)}; it must be two positive integers of at most {LARGEST}"
        )
    return given[0], given[1]


def fp8(group: WeightGroup) -> LogicalTensor | None:
    """Return a weight of the method `fp8`: blocks with `weight_scale_inv`, or one `weight_scale`."""
    if not _is_scaled(group, ("weight_scale_inv", "weight_scale")):
        return None
    shape = group.matrix("weight")
    own = {"weight": values(shape, Along(len(shape) - 1)), **singles(group, shape)}
    given = group.given.config.get("weight_block_size")
    if "weight_scale_inv" in group.members:
        blocks = block_size([128, 128] if given is None else given, "weight_block_size")
        return group.tensor(
            f"FP8 in blocks of {blocks[0]} x {blocks[1]}",
            shape,
            {**own, "weight_scale_inv": group.scale("weight_scale_inv", shape, blocks)},
        )
    if given is not None:
        blocks = block_size(given, "weight_block_size")
        scale = group.scale("weight_scale", shape, blocks)
        return group.tensor(f"FP8 in blocks of {blocks[0]} x {blocks[1]}", shape, {**own, "weight_scale": scale})
    return group.tensor("FP8 per tensor", shape, {**own, "weight_scale": group.scale("weight_scale", shape, None)})


def fbgemm(group: WeightGroup) -> LogicalTensor | None:
    """Return a weight of the method `fbgemm_fp8`: a scale for each row, and optionally a bound of activations."""
    if not _is_scaled(group, ("weight_scale",)):
        return None
    shape = group.matrix("weight")
    scale = group.scale("weight_scale", shape, (1, 0))
    own = {"weight": values(shape, Along(len(shape) - 1)), "weight_scale": scale, **singles(group, shape)}
    return group.tensor("FP8 per channel", shape, own)


def modelopt(group: WeightGroup) -> LogicalTensor | None:
    """Return a weight of ModelOpt: FP8 with one scale, or NVFP4."""
    if "weight_scale_2" in group.members or (group.dtype("weight") == "U8" and "weight_scale" in group.members):
        if group.dtype("weight_scale") not in ("F8_E4M3", ""):
            raise ParseError(
                f"{shown(group.name)}: its weight_scale is {group.dtype('weight_scale')}; only NVFP4 of ModelOpt's "
                "4-bit forms is known, and it needs F8_E4M3"
            )
        group.shape("weight_scale_2")
        return four_bits(group, "weight", _group_size(group.given), "NVFP4")
    if not _is_scaled(group, ("weight_scale",)):
        return None
    shape = group.matrix("weight")
    scales = group.shape("weight_scale")
    if group.dtype("weight_scale") in _E8M0:
        return scaled_in_groups(group, shape, "weight_scale")
    if 0 in scales:
        raise ParseError(
            f"{shown(group.name)}: its weight_scale has the shape {scales}; expected one scale for {shape}"
        )
    # FP8_PB_WO has blocks; all others one scale.
    blocks = (
        None if len(scales) < 2 or set(scales) == {1} else (-(-shape[-2] // scales[-2]), -(-shape[-1] // scales[-1]))
    )
    if blocks is not None and blocks != (128, 128):
        raise ParseError(
            f"{shown(group.name)}: its weight_scale has the shape {scales}; expected one scale for {shape}"
        )
    return group.tensor(
        "FP8 per tensor" if blocks is None else "FP8 in blocks of 128 x 128",
        shape,
        {
            "weight": values(shape, Along(len(shape) - 1)),
            "weight_scale": group.scale("weight_scale", shape, blocks),
            **singles(group, shape),
        },
    )


#: Scales that are powers of two.
_E8M0 = ("U8", "F8_E8M0")
#: The elements of a block of NVFP4, unless a configuration says so.
_NVFP4_GROUP = 16


def mxfp8(group: WeightGroup) -> LogicalTensor | None:
    """Return a weight of the method `mxfp8`: 32 columns have a scale, which is a power of two."""
    if not _is_scaled(group, ("weight_scale_inv", "weight_scale")):
        return None
    tail = "weight_scale_inv" if "weight_scale_inv" in group.members else "weight_scale"
    if group.dtype(tail) not in _E8M0:
        raise ParseError(f"{shown(group.name)}: its {tail} is {group.dtype(tail)}; MXFP8 needs U8 or F8_E8M0")
    return scaled_in_groups(group, group.matrix("weight"), tail)


def scaled_in_groups(group: WeightGroup, shape: tuple[int, ...], tail: str) -> LogicalTensor:
    """Return an FP8 weight of which 32 columns have a scale."""
    along = {"weight": values(shape, Along(len(shape) - 1)), tail: group.scale(tail, shape, (1, 32))}
    return group.tensor("MXFP8 in groups of 32", shape, {**along, **singles(group, shape)})


def four_bits(group: WeightGroup, tail: str, size: int, form: str) -> LogicalTensor:
    """Return a weight of two values to a byte along its columns, with a scale for each `size` of them."""
    stored = group.matrix(tail)
    shape = (*stored[:-1], 2 * stored[-1])
    last = len(shape) - 1
    return group.tensor(
        f"{form} in groups of {size}",
        shape,
        {
            tail: values(shape, Along(last, 2, packing=2)),
            "weight_scale": group.scale("weight_scale", shape, (1, size)),
            **singles(group, shape),
        },
    )


def mxfp4(group: WeightGroup) -> LogicalTensor | None:
    """Return a weight of gpt-oss: `_blocks` of 32 values in 16 bytes, and `_scales`."""
    if "blocks" not in group.members and "scales" not in group.members:
        return None
    stored = group.shape("blocks")
    if len(stored) < 3 or stored[-1] != 16:
        raise ParseError(f"{shown(group.name)}: its blocks have the shape {stored}; expected (…, rows, blocks, 16)")
    shape = (*stored[:-2], 32 * stored[-2])
    along = values(shape, Along(len(shape) - 1, 32, packing=32))
    scales = (*along[:-1], Along(len(shape) - 1, 32))
    if group.shape("scales") != stored[:-1]:
        raise ParseError(
            f"{shown(group.name)}: its scales have the shape {group.shape('scales')}; for blocks of {stored} it must "
            f"be {stored[:-1]}"
        )
    return group.tensor("MXFP4 in groups of 32", shape, {"blocks": (*along, WHOLE), "scales": scales})


def _group_size(given: Given) -> int:
    groups = given.config.get("config_groups")
    for one in groups.values() if isinstance(groups, dict) else ():
        weights = one.get("weights") if isinstance(one, dict) else None
        size = weights.get("group_size") if isinstance(weights, dict) else None
        if size is not None:
            return Given({"group_size": size}, None).integer("group_size") or _NVFP4_GROUP
    return given.integer("group_size") or _NVFP4_GROUP


def _is_scaled(group: WeightGroup, tails: tuple[str, ...]) -> bool:
    """Return whether the group is a scaled FP8 weight.

    Raises:
        ParseError: if it is one without scale, or a scale without weight.
    """
    scale = next((tail for tail in tails if tail in group.members), None)
    if group.dtype("weight") in _FP8:
        if scale is None:
            raise ParseError(f"{shown(group.name)} is {group.dtype('weight')}, and its {tails[0]} is missing")
        return True
    if scale is not None and "weight" not in group.members:
        raise ParseError(f"{shown(group.members[scale][0])} has no weight next to it")
    if scale is not None:
        raise ParseError(f"{shown(group.name)} is {group.dtype('weight')}, and has a {scale}; expected FP8")
    return False
