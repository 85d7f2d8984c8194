"""Integers packed into words: compressed-tensors, AWQ, GPTQ, MLX."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from .._text import counted, shown
from ..errors import ParseError
from .component import Along, LogicalTensor
from .modules import Modules
from .parts import WHOLE, Given, StatedError, WeightGroup
from .scaled import block_size, four_bits, scaled_in_groups, singles, values

__all__ = ["Schemes", "auto_round", "awq", "check_extra", "compressed", "gptq", "mlx"]

_WORD = 32
#: The names of the integers and floats that are stored one to an element.
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8")


def compressed(group: WeightGroup) -> LogicalTensor | None:
    """Return a weight of compressed-tensors."""
    packed = group.dtype("weight_packed")
    if packed == "" and group.dtype("weight") not in _EIGHT_BITS:
        if "weight_scale" in group.members and "weight" not in group.members:
            raise ParseError(f"{shown(group.name)}: has a weight_scale, but neither weight nor weight_packed")
        return None
    group.shape("weight_scale")
    if packed == "U8" and group.dtype("weight_scale") == "U8":
        return four_bits(group, "weight_packed", _scheme(group, "mxfp4").integer("group_size") or 32, "MXFP4")
    if packed == "U8":
        if group.dtype("weight_scale") != "F8_E4M3":
            raise ParseError(
                f"{shown(group.name)}: its weight_scale is {group.dtype('weight_scale')}; expected F8_E4M3"
            )
        return four_bits(group, "weight_packed", _scheme(group, "nvfp4").integer("group_size") or 16, "NVFP4")
    if packed:
        return _packed(group)
    scheme = _scheme(group, "quantized")
    shape = group.matrix("weight")
    blocks = _blocks(scheme, group)
    if group.dtype("weight_scale") == "U8" and blocks == (1, 32):
        return scaled_in_groups(group, shape, "weight_scale")
    kind = "FP8" if group.dtype("weight").startswith("F8") else "INT8"
    along = {
        "weight": values(shape, Along(len(shape) - 1)),
        "weight_scale": group.scale("weight_scale", shape, blocks),
        **singles(group, shape),
    }
    if "weight_zero_point" in group.members:
        along["weight_zero_point"] = group.scale("weight_zero_point", shape, blocks)
    return group.tensor(f"{kind} {_words(blocks)}", shape, along)


def _packed(group: WeightGroup) -> LogicalTensor:
    if group.dtype("weight_packed") != "I32":
        raise ParseError(
            f"{shown(group.name)}: its weight_packed is {group.dtype('weight_packed')}; expected I32 or U8"
        )
    scheme = _scheme(group, "pack-quantized")
    bits = scheme.integer("num_bits") or 4
    if bits > 8:
        raise StatedError(f"quantization_config: num_bits is {bits}; packed integers have 1 to 8")
    stored = group.matrix("weight_packed")
    shape = (*stored[:-1], stored[-1] * _WORD // bits)
    said = group.read("weight_shape") if "weight_shape" in group.members else None
    if said is not None:
        shape = _stated_shape(group, said, shape)
    last = len(shape) - 1
    # Bits that do not divide a word straddle words: 32 values in `bits` words.
    word = Along(last, _WORD // bits, packing=_WORD // bits)
    if _WORD % bits:
        word = Along(last, _WORD, words=bits, packing=_WORD)
    blocks = _blocks(scheme, group)
    along = {"weight_packed": values(shape, word), "weight_scale": group.scale("weight_scale", shape, blocks)}
    if "weight_zero_point" in group.members:
        # Packed along the rows.
        groups = group.matrix("weight_zero_point")[-1] != 1 or (blocks is not None and blocks[1] > 0)
        rows = Along(last - 1, word.block, word.words, word.packing)
        columns = Along(last, blocks[1]) if groups and blocks is not None and blocks[1] else WHOLE
        along["weight_zero_point"] = (*(Along(dim) for dim in range(last - 1)), rows, columns)
    if "weight_shape" in group.members:
        along["weight_shape"] = (WHOLE,) * len(group.shape("weight_shape"))
    uncut: tuple[tuple[int, str], ...] = ()
    if "weight_g_idx" in group.members:
        along["weight_g_idx"] = (*(Along(dim) for dim in range(last - 1)), Along(last))
        uncut = _order(
            group, "weight_g_idx", last, blocks[1] if blocks else 0, scheme.config.get("actorder") == "group"
        )
    stated = {"weight_shape": "the shape of the whole weight", "weight_g_idx": "the groups of the whole weight"}
    return group.tensor(f"INT{bits} packed, {_words(blocks)}", shape, {**along, **singles(group, shape)}, uncut, stated)


def _stated_shape(group: WeightGroup, said: bytes, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that `weight_shape` states, in which the last word of a row may be partly filled."""
    width = 8 if group.dtype("weight_shape") == "I64" else 4
    lead = shape[:-2] if len(said) == width * 2 * math.prod(shape[:-2]) else ()
    if len(said) != width * (2 * math.prod(lead) if lead else len(shape)):
        raise ParseError(
            f"{shown(group.name)}: its weight_shape has {len(said)} bytes; expected {counted(len(shape), 'size')}"
        )
    sizes = np.frombuffer(said, f"<i{width}")
    if lead:  # Of each of the experts.
        each = sizes.reshape(-1, 2)
        if (each != each[0]).any():
            raise ParseError(f"{shown(group.name)}: its weight_shape says different sizes for two experts")
        sizes = each[0]
    found = (*lead, *sizes.tolist())
    if found[:-1] != shape[:-1] or not 0 <= found[-1] <= shape[-1]:
        raise ParseError(f"{shown(group.name)}: its weight_shape says {found}, and its weight_packed holds {shape}")
    return found


class Schemes:
    """The configuration of weights, and which of it a module gets."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        groups = config.get("config_groups") or {}
        if not isinstance(groups, Mapping):
            raise StatedError(f"quantization_config: config_groups is {shown(groups)}; it must be an object")
        self._all: list[tuple[str, Given]] = []
        targets: list[tuple[int, str]] = []
        for one in groups.values():
            weights = one.get("weights") if isinstance(one, Mapping) else None
            if isinstance(weights, Mapping):
                targets += [(len(self._all), text) for text in Given(one, None).texts("targets")]
                form = one.get("format") or config.get("format")
                self._all.append((form if isinstance(form, str) else "", Given(weights, None)))
        # A target is a class of modules, the end of a name, or a regular expression.
        self._owners = [owner for owner, _ in targets]
        self._linear = {owner for owner, text in targets if text == "Linear"}
        texts = [text for _, text in targets]
        self._targets = Modules("targets", texts, lambda text: rf"(?:.*\.)?{re.escape(text)}$")

    def named(self, module: str) -> tuple[str, Given] | None:
        """Give the form of the weights of a module that is a linear layer, and what is said of it; `None` for none."""
        named = self._named(module) | self._linear
        return self._all[min(named)] if named else None

    def _named(self, module: str) -> set[int]:
        return {self._owners[at] for at in self._targets.named(module)}

    def of(self, module: str, form: str) -> Given:
        """Return what it says of a module in a form: of several, what targets it by its name."""
        fitting = [at for at, (own, _) in enumerate(self._all) if form in own or not own]
        if len(fitting) > 1:
            named = self._named(module)
            fitting = [at for at in fitting if at in named] or fitting
        return self._all[fitting[0]][1] if fitting else Given({}, None)


def _scheme(group: WeightGroup, form: str) -> Given:
    schemes = group.given.kept.get("schemes")
    if schemes is None:
        schemes = group.given.kept["schemes"] = Schemes(group.given.config)
    scheme: Given = schemes.of(group.name.removesuffix(".weight"), form)
    return scheme


def _blocks(scheme: Given, group: WeightGroup) -> tuple[int, int] | None:
    """Return the shape of the blocks that have a scale each; `None` if the tensor has one scale."""
    strategy, own = scheme.config.get("strategy"), group.shape("weight_scale")
    if strategy is None:  # As compressed-tensors does: by the group size, if there is one.
        strategy = "group" if scheme.config.get("group_size") else "channel" if len(own) > 1 else "tensor"
    if strategy == "tensor":
        return None
    if strategy == "channel":
        return 1, 0
    if strategy == "block":
        return block_size(scheme.config.get("block_structure"), "block_structure")
    if strategy in ("group", "tensor_group"):
        size = scheme.integer("group_size", least=-1)
        if size is None or size == 0:
            raise StatedError(f"quantization_config: group_size is missing, and the strategy is {shown(strategy)}")
        return (1, size) if size > 0 else (1, 0)
    raise StatedError(f"quantization_config: strategy is {shown(strategy)}; known are tensor, channel, group and block")


def _words(blocks: tuple[int, int] | None) -> str:
    if blocks is None:
        return "per tensor"
    if blocks[1] == 0:
        return "per channel"
    return f"in groups of {blocks[1]}" if blocks[0] == 1 else f"in blocks of {blocks[0]} x {blocks[1]}"


def _order(group: WeightGroup, tail: str, dim: int, size: int, unordered: bool) -> tuple[tuple[int, str], ...]:
    """Return the dim of the columns with the reason why it cannot be cut: `g_idx` is not in order, or was not read.

    The tuple is empty if it can be cut.
    """
    said = group.read(tail)
    if said is None:
        if not unordered:
            return ()
        return ((dim, f"the groups may not be in order (desc_act), and the values of {tail} were not read"),)
    width, count = 8 if group.dtype(tail) == "I64" else 4, math.prod(group.shape(tail))
    if not group.shape(tail):
        raise ParseError(f"{shown(group.name)}: its {tail} has no dims; it must have a number for each column")
    if len(said) != width * count:
        raise ParseError(f"{shown(group.name)}: its {tail} has {len(said)} bytes; expected {count} integers")
    if count == 0:
        return ()
    groups = np.frombuffer(said, f"<i{width}").reshape(-1, group.shape(tail)[-1])
    in_order = np.arange(groups.shape[1]) // size if size else np.zeros(groups.shape[1])
    if (groups == in_order).all():
        return ()
    return ((dim, f"its {tail} is not in order (desc_act): a part of the columns needs the scales of all groups"),)


def _sides(group: WeightGroup) -> tuple[int, int]:
    """Return the bits of an element and the columns of a group; 0 columns are all of them."""
    bits = group.given.integer("bits", "w_bit") or 4
    size = group.given.integer("group_size", "q_group_size", least=-1)
    if bits > 8 or (_WORD % bits and bits != 3):
        raise StatedError(f"quantization_config: bits is {bits}; known are 2, 3, 4 and 8")
    if size is None or size == 0:
        raise StatedError("quantization_config: group_size is missing, or 0")
    return bits, max(size, 0)


def _has_words(group: WeightGroup) -> bool:
    if "qweight" in group.members:
        group.shape("scales")
        return True
    rest = [tail for tail in ("qzeros", "scales", "g_idx") if tail in group.members]
    if rest:
        raise ParseError(f"{shown(group.members[rest[0]][0])} has no qweight next to it")
    return False


def awq(group: WeightGroup) -> LogicalTensor | None:
    """Return a weight of AWQ, stored in x out: eight values of one row to a word."""
    if not _has_words(group):
        return None
    bits, size = _sides(group)
    stored = group.matrix("qweight")
    per_word = _WORD // bits
    shape = (*stored[:-2], stored[-1] * per_word, stored[-2])
    out, columns = len(shape) - 2, len(shape) - 1
    lead = tuple(Along(dim) for dim in range(out))
    word = Along(out, per_word, packing=per_word)
    groups = Along(columns, size) if size else WHOLE
    along = {"qweight": (*lead, Along(columns), word), "scales": (*lead, groups, Along(out))}
    if "qzeros" in group.members:
        along["qzeros"] = (*lead, groups, word)
    return group.tensor(f"AWQ of {bits} bits {_words((1, size))}", shape, along)


def gptq(group: WeightGroup) -> LogicalTensor | None:
    """Return a weight of GPTQ, stored in x out: eight values of one column to a word."""
    if not _has_words(group):
        return None
    bits, size = _sides(group)
    stored = group.matrix("qweight")
    block, words = (_WORD // bits, 1) if _WORD % bits == 0 else (_WORD, bits)
    if stored[-2] % words:
        raise ParseError(
            f"{shown(group.name)}: its qweight has {stored[-2]} rows of words; {bits} bits need a multiple of {words}"
        )
    shape = (*stored[:-2], stored[-1], stored[-2] // words * block)
    out, columns = len(shape) - 2, len(shape) - 1
    lead = tuple(Along(dim) for dim in range(out))
    groups = Along(columns, size) if size else WHOLE
    along = {
        "qweight": (*lead, Along(columns, block, words, packing=block), Along(out)),
        "scales": (*lead, groups, Along(out)),
    }
    if "qzeros" in group.members:
        along["qzeros"] = (*lead, groups, Along(out, block, words, packing=block))
    uncut: tuple[tuple[int, str], ...] = ()
    if "g_idx" in group.members:
        along["g_idx"] = (*lead, Along(columns))
        uncut = _order(group, "g_idx", columns, size, bool(group.given.config.get("desc_act", True)))
    return group.tensor(
        f"GPTQ of {bits} bits {_words((1, size))}", shape, along, uncut, {"g_idx": "the groups of the whole weight"}
    )


def auto_round(group: WeightGroup) -> LogicalTensor | None:
    """Give a weight of AutoRound, which packs as GPTQ or as AWQ does; layers may have bits and groups of their own."""
    check_extra(group.given.config)
    is_awq = "awq" in str(group.given.config.get("packing_format"))
    return awq(group) if is_awq else gptq(group)


def check_extra(config: Mapping[str, Any]) -> None:
    """Refuse a configuration of AutoRound that says other sizes for some layers, but that these are not quantized.

    Raises:
        ParseError: names the layer.
    """
    extra = config.get("extra_config") or {}
    if not isinstance(extra, Mapping):
        raise StatedError(f"quantization_config: extra_config is {shown(extra)}; it must be an object")
    for layer, own in extra.items():
        said = own if isinstance(own, Mapping) else {"": own}
        is_whole = isinstance(said.get("bits"), int) and said["bits"] >= 16
        sizes = ((key, config.get(key)) for key in ("bits", "group_size", "data_type"))
        other = next((key for key, value in sizes if said.get(key, value) != value), "")
        if not isinstance(own, Mapping) or (other and not is_whole):
            raise StatedError(
                f"quantization_config: extra_config gives {shown(layer)} its own {other or 'form'}; known are "
                "one size for all layers, and layers that are not quantized"
            )


#: The bits of a value, and the group, of MLX's modes other than affine.
_MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


def mlx(group: WeightGroup) -> LogicalTensor | None:
    """Return a weight of MLX: values in uint32 along its columns, and a scale for each group, affine also a bias."""
    said = group.given.config.get(group.name.removesuffix(".weight"))
    if "scales" not in group.members:
        if group.dtype("weight") == "U32":
            raise ParseError(f"{shown(group.name)} is U32, and its scales are missing")
        return None
    if said is False:
        raise ParseError(f"{shown(group.name)} has scales, and quantization says that it is not quantized")
    if group.dtype("weight") != "U32":
        raise ParseError(f"{shown(group.name)}: its weight is {group.dtype('weight') or 'missing'}; MLX needs U32")
    given = Given({**group.given.config, **(said if isinstance(said, Mapping) else {})}, None)
    mode, bits, size = given.config.get("mode") or "affine", given.integer("bits"), given.integer("group_size")
    if bits is None or size is None or bits not in (2, 3, 4, 5, 6, 8) or _MODES.get(mode, (bits, size)) != (bits, size):
        raise StatedError(f"quantization: mode {shown(mode)} of {bits} bits in groups of {size} is not known")
    stored = group.matrix("weight")
    if stored[-1] * _WORD % bits:
        raise ParseError(f"{shown(group.name)} has {stored[-1]} words a row, not whole values of {bits} bits")
    shape = (*stored[:-1], stored[-1] * _WORD // bits)
    last = len(shape) - 1
    # Bits that do not divide a word straddle words.
    word = Along(last, _WORD // bits, packing=_WORD // bits)
    if _WORD % bits:
        word = Along(last, _WORD, words=bits, packing=_WORD)
    along = {"weight": values(shape, word)}
    for tail in ("scales", "biases") if mode == "affine" else ("scales",):
        along[tail] = group.scale(tail, shape, (1, size))
    if mode != "affine" and "biases" in group.members:
        raise ParseError(f"{shown(group.name)} has biases, which the mode {shown(mode)} of MLX does not have")
    form = f"MLX of {bits} bits" if mode == "affine" else f"{mode.upper()} of MLX"
    return group.tensor(f"{form} {_words((1, size))}", shape, along)
