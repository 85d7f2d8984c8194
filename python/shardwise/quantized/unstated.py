"""Tensors that may be quantized in a form that nothing states: what the rules of a model may cut."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from .._dtypes import Dtype, bytes_for
from .._text import shown
from ..errors import ParseError
from ..placing import placing_of
from ..rules.left_out import LeftOut, listed
from .forms import Components
from .method import cast_dtype

__all__ = ["cast_weights", "check_elements", "check_known"]


def check_known(found: Components, layouts: Any = None) -> None:
    """Refuse to cut quantized weights by rules for weights, if the configuration does not say how they are quantized.

    Layouts given for each stored tensor by its own name need no such configuration.

    Raises:
        ParseError: names the method.
    """
    is_by_name = layouts is not None and placing_of(layouts).names is not None
    if found.refused and not is_by_name:
        raise ParseError(
            f"{found.refused}; to cut each stored tensor by a rule for its own name, give a configuration without "
            "quantization_config (--config)"
        )


def check_elements(tensors: Mapping[str, tuple[tuple[int, ...], Dtype]], found: Components, layouts: Any) -> None:
    """Refuse to cut by the rules of a model what is quantized in a form that nothing states.

    The rules of a model's type are for its weights as they are without quantization. A tensor of integers under a
    weight's name has other dims, perhaps; one next to it, or next to a weight of 8 bits, which no rule matches, is a
    part of it. Rules that do not say for which models they are name what is stored, and cut it.

    Raises:
        ParseError: names the first of these.
    """
    placing = placing_of(layouts)
    if found.refused or not placing.models:
        return
    taken = found.taken
    modules = Counter(name.rpartition(".")[0] for name in tensors)
    narrow = {name for name, (_, dtype) in tensors.items() if dtype.bits <= 8}
    for name, (shape, dtype) in tensors.items():
        beside = f"{name.rpartition('.')[0]}.weight", name.rpartition("_")[0]
        # Most tensors are floats beside floats: nothing is looked up for these.
        if name in taken or not (_is_integer(dtype) or narrow.intersection(beside)):
            continue
        weight = next((one for one in beside if placing.matching_rules(one)), name)
        is_beside = found.method is None and weight != name and not placing.matching_rules(name)
        if _is_integer(dtype) and math.prod(shape) > 1:
            layout = placing.placed(name, len(shape)).layout
            is_odd = is_beside or (layout is not None and any(getattr(layout, "axes", ())))
            # By the names of engines, parts of a weight of a known method have rules of their own.
            is_odd = is_odd and (found.method is None or modules[name.rpartition(".")[0]] == 1)
        else:
            is_odd = is_beside and weight in tensors and tensors[weight][1].bits <= 8
        if is_odd:
            where = f", a part of {shown(weight)}," if is_beside else ""
            if found.method is not None:
                raise ParseError(
                    f"{shown(name)} is of {dtype.name}, without the scales or states of a weight of {found.method}, "
                    "so it is not known how its rule cuts it: look for the missing tensors next to it, or give rules "
                    "without `models`, for the names of the stored tensors, and a configuration without "
                    "quantization_config (--config)"
                )
            raise ParseError(
                f"{shown(name)}{where} is of {dtype.name}, like a quantized weight, but nothing says how it is "
                f"quantized; rules for models of the type {' or '.join(placing.models)} are for weights without "
                "quantization: give a configuration with its quantization_config (--config), or rules without "
                "`models`, for the names of the stored tensors"
            )


def cast_weights(
    tensors: Mapping[str, tuple[tuple[int, ...], Dtype]], found: Components, layouts: Any, config: Mapping[str, Any]
) -> list[LeftOut]:
    """Say which weights in floats of 8 bits or less the rules of a model cut, where nothing says that they were cast.

    An element of such a weight is one value, so the cut is right where weights were cast, which some checkpoints are.
    Where they are quantized it is not known to be: their scales, and the blocks of these, are elsewhere or lost.

    Args:
        tensors: The shapes and dtypes of the tensors.
        found: The quantized weights among them.
        layouts: The rules by which they are cut.
        config: What `config.json` says; its dtype states that weights were cast to it.
    """
    placing = placing_of(layouts)
    if found.method is not None or not placing.models:
        return []
    taken = found.taken
    names = [
        name
        for name, (shape, dtype) in tensors.items()
        if (dtype.bits <= 8 and dtype.name != "bool" and not _is_integer(dtype) and dtype != cast_dtype(config))
        and name not in taken
        and any(getattr(placing.placed(name, len(shape)).layout, "axes", ()))
    ]
    if not names:
        return []
    nbytes = sum(bytes_for(math.prod(tensors[name][0]), tensors[name][1].bits) for name in names)
    count, which = listed(names, "tensor", nbytes)
    dtypes = " and ".join(sorted({tensors[name][1].name for name in names}))
    text = (
        f"{count} of {dtypes} without scales are cut by the rules, and nothing says that they were only cast: {which}; "
        "give a config.json with that dtype, or with the way in which they are quantized (--config)"
    )
    return [LeftOut("cast", tuple(names), text, nbytes)]


def _is_integer(dtype: Dtype) -> bool:
    return re.match(r"u?int", dtype.name) is not None
