"""The limits of engines beside those of the formats: the limits of their loaders and kernels.

Each has its source: a check in the engine, or the public thread that reports it. They are of the versions named, and go
away with later ones; what a format allows does not change.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..quantized import LogicalTensor
from .answer import Limit
from .roles import Role

__all__ = ["limits_of"]

_VLLM, _EARLIER = "vLLM 0.33", "vLLM whose Marlin kernels do not pad"
_SGLANG, _TRT = "SGLang 0.5.23", "TensorRT-LLM 1.0"


def limits_of(tensor: LogicalTensor, role: Role, per_rank: int, ways: int, merged: str = "") -> tuple[Limit, ...]:
    """Give what engines refuse of a cut into `ways` shards of `per_rank` elements (of each part of a fused weight).

    `merged` is `"first"` for a matrix that engines put before another one, gate before up, and `"last"` for the other.
    """
    assert role.dim is not None
    rows, form = role.dim == -2, tensor.form
    if form.startswith("FP8 in blocks"):
        block = max(size for _, size in tensor.blocks[len(tensor.shape) + role.dim])
        return tuple(_fp8_blocks(role, per_rank, ways, block, merged))
    if form.startswith("FP8"):
        return tuple(_fp8_marlin(per_rank)) if rows else ()
    if form.startswith("NVFP4"):
        return tuple(_nvfp4(role, per_rank)) if rows and not role.heads else ()
    if form.startswith(("AWQ", "GPTQ")) or (form.startswith("INT") and "packed" in form):
        return (*_marlin(form, per_rank, rows=rows), *_w4a8(tensor, role))
    return ()


def _fp8_blocks(role: Role, size: int, ways: int, block: int, merged: str) -> Iterator[Limit]:
    """`validate_fp8_block_shape` in vLLM's `quantization/utils/fp8_utils.py`, and SGLang's `quantization/fp8.py`.

    Of merged matrices whole blocks are asked for on one rank too; vLLM lets the last one end within a block.
    """
    if size % block == 0:
        return
    rows = role.dim == -2
    weight = f"is not divisible by weight quantization block_{'n' if rows else 'k'} = {block}"
    if not role.expert:
        side = "output_partition_size" if rows else "input_size_per_partition"
        engines = (_VLLM, _SGLANG) if ways > 1 or merged == "first" else (_SGLANG,) if merged else ()
        kernel = "FP8 in blocks"
        why = f"Weight {side} = {size} {weight}"
    else:
        side = "The output_size of gate's and up's weight" if rows else "The input_size of down's weight"
        engines, kernel = (_VLLM, _SGLANG) if rows or ways > 1 else (), "FP8 in blocks, MoE"
        why = f"{side} = {size} {weight}"
        # NVIDIA/TensorRT-LLM 12101.
        yield Limit(_TRT, kernel, f"an intermediate size of {size} is not aligned with blocks of {block}")
    for engine in engines:
        yield Limit(engine, kernel, why)


def _marlin(form: str, size: int, *, rows: bool) -> Iterator[Limit]:
    """`verify_marlin_supports_shape` in `quantization/utils/marlin_utils.py`: vllm-project/vllm 13640 and 9913."""
    side, name, least = ("output", "n", 64) if rows else ("input", "k", 128)
    if size % least:
        engines = (_EARLIER, _SGLANG) if form.startswith("AWQ") else (_EARLIER,)
        for engine in engines:
            why = f"Weight {side}_size_per_partition = {size} is not divisible by min_thread_{name} = {least}"
            yield Limit(engine, "Marlin", why)


def _w4a8(tensor: LogicalTensor, role: Role) -> Iterator[Limit]:
    """sgl-project/sglang 38573: `cutlass_w4a8_moe` passes a chunk size of 128, whatever the groups are."""
    groups = [size for name, size in tensor.blocks.get(len(tensor.shape) - 1, ()) if name.endswith("weight_scale")]
    if role.expert and tensor.form.startswith("INT4") and groups and groups[0] != 128:
        why = f"where activations are FP8, groups of {groups[0]} are taken for groups of 128: silently wrong"
        yield Limit(_SGLANG, "CUTLASS W4A8 MoE", why)


def _fp8_marlin(size: int) -> Iterator[Limit]:
    """zai-org/GLM-V 178: on GPUs without FP8, weights of FP8 go through Marlin."""
    if size % 64:
        why = f"size_n = {size} is not divisible by tile_n_size = 64"
        yield Limit(_EARLIER, "Marlin FP8, on GPUs without FP8", why)


def _nvfp4(role: Role, size: int) -> Iterator[Limit]:
    """1CatAI/1Cat-vLLM 642 of gate and up of a rank together, and sgl-project/sglang 30887 of each."""
    if 2 * size % 64:
        why = f"size_n = {2 * size} is not divisible by tile_n_size = 64"
        yield Limit(_EARLIER, "Marlin NVFP4", why)
    if role.expert and size % 64:
        why = f"gate and up of {size} rows: scales are swizzled in tiles, which need {-(-size // 64) * 64} of each"
        yield Limit(_SGLANG, "NVFP4 MoE", why)
