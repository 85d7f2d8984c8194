"""The role of each kind of tensors in a model: by its name, if its shape and the configuration agree with it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .._text import counted, elements_text, shown
from ..quantized import LogicalTensor
from ..quantized.forms import AlikeTensors, starred
from ..quantized.method import cast_dtype
from ..rules.names import keys_of, merged_names, types_with, weight_named, weights
from ..rules.wrapped import language_config, model_types
from .answer import Unknown
from .roles import TYPES, Heads, Role, heads_of, role_of

__all__ = ["Judged", "is_of_elements", "judged", "number_of_experts", "odd_elements"]

#: The elements of weights that are not quantized.
_FLOATS = frozenset(["F64", "F32", "F16", "BF16", "C64", "C128", "complex64", "complex128"])
_OTHER = "the meaning of its name is not known for the model_type {}"
#: Positions and masks, which are no weights.
_INTEGERS = re.compile(r"(?:^|\.)(?:position_ids|num_batches_tracked|(?:masked_|causal_)?(?:bias|mask))$")
_UNSTATED = ", and no quantization of it is stated (quantization_config of config.json)"


class Judged(NamedTuple):
    """A kind of tensors, what is known of it, and from where."""

    kind: AlikeTensors
    role: Role
    heads: Heads
    #: The evidence of the role, in words.
    rests_on: str
    #: `"first"` if engines put other matrices after it, `"last"` if it is the last of several; else empty.
    merged: str = ""

    @property
    def name(self) -> str:
        """The name, with `*` for numbers."""
        return starred(self.kind.tensor.name)


class _KnownModel(NamedTuple):
    """A model's configuration, and the shapes of its tensors by their names with `*` for numbers."""

    config: Mapping[str, Any]
    types: Sequence[str]
    heads: Heads
    hidden: int
    experts: int
    shapes: Mapping[str, tuple[int, ...]]


#: The types of which some names mean what they do in no other.
_OWN_NAMES = types_with("attention_whole").union(*(weight.models for weight in weights()))


def judged(kinds: Iterable[AlikeTensors], config: Mapping[str, Any]) -> list[Judged]:
    """Return the role of each kind of tensors; of those that are not recognised, the reason.

    Raises:
        ParseError: if a number of heads in the configuration is not an integer of at least 1.
    """
    kinds = tuple(kinds)
    said, types = language_config(config), model_types(config)
    shapes = {starred(kind.tensor.name): kind.tensor.shape for kind in kinds}
    experts = _first(said, "experts") or number_of_experts(
        (kind, role_of(kind.tensor.name, len(kind.tensor.shape))) for kind in kinds
    )
    model = _KnownModel(said, types, heads_of(config), _first(said, "hidden"), experts, shapes)
    return [_judged(kind, model) for kind in kinds]


def number_of_experts(roles: Iterable[tuple[AlikeTensors, Role]]) -> int:
    """Return the number of experts; 0 if there are none."""
    count = 0
    for kind, role in roles:
        if role.expert == "stacked":
            count = max(count, kind.tensor.shape[0])
        elif role.expert == "one":
            numbers = {name.rpartition("experts.")[2].partition(".")[0] for name in kind.names}
            count = max(count, *(int(number) + 1 for number in numbers if number.isdecimal() and len(number) < 10), 0)
    return count


def odd_elements(tensor: LogicalTensor, config: Mapping[str, Any]) -> str:
    """Return the reason why a tensor that is stored as it is may be quantized all the same.

    It is empty for floats of more than 8 bits, and of the dtype that the configuration says weights were cast to.
    """
    dtype, cast = tensor.components[0].dtype, cast_dtype(config)
    is_cast = cast is not None and dtype in (cast.code, cast.name)
    if tensor.form != "plain" or dtype in _FLOATS or is_cast or math.prod(tensor.shape) < 2:
        return ""
    return f"its elements are {dtype}{_UNSTATED}"


def is_of_elements(unknown: Unknown) -> bool:
    """Return whether a tensor is not recognised because it may be quantized, which no rule tells."""
    return unknown.why.endswith(_UNSTATED)


def _first(said: Mapping[str, Any], size: str) -> int:
    """Return the number that a configuration states for a size; 0 if it states none that could be one."""
    return next((said[key] for key in keys_of(size) if type(said.get(key)) is int and said[key] > 0), 0)


def _judged(kind: AlikeTensors, model: _KnownModel) -> Judged:
    tensor = kind.tensor
    role = role_of(tensor.name, len(tensor.shape), next((one for one in model.types if one in _OWN_NAMES), None))
    odd = odd_elements(tensor, model.config) if _INTEGERS.search(tensor.name) is None else ""
    if odd and not role.elsewhere:  # Flat values may have one dim.
        role = Role(None, unknown=odd)
    if role.elsewhere or role.unknown:
        return Judged(kind, role, model.heads, "")
    if isinstance(own := model.config.get("model_type"), str) and own not in TYPES and len(tensor.shape) > 1:
        return Judged(kind, Role(None, unknown=_OTHER.format(shown(own))), model.heads, "")
    last = _last(tensor.name)
    found = Judged(kind, role, model.heads, f"the name {last}")
    try:
        if role.dim is None:
            _check_whole(tensor, last, model)
            return found
        if role.vocabulary:
            if tensor.unit(len(tensor.shape) - 2) > 1:
                raise _UnknownError("it is a vocabulary in blocks of rows, which engines pad in ways of their own")
            return found
        if role.expert == "stacked":
            found = _oriented(found, model)
        found = _with_heads(found, model)
        _check_shape(found, last, model)
        return found._replace(merged=_merged(tensor.name, model))
    except _UnknownError as error:
        return Judged(kind, Role(None, unknown=str(error)), model.heads, "")


class _UnknownError(Exception):
    """The role of a tensor is not known; the message says why."""


def _last(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _check_whole(tensor: LogicalTensor, last: str, model: _KnownModel) -> None:
    if last in ("gate", "router") and len(tensor.shape) == 2 and tensor.shape[0] != model.experts:
        known = f"the model has {counted(model.experts, 'expert')}" if model.experts else "no experts are known"
        raise _UnknownError(
            f"a router has a row for each expert, but it has {counted(tensor.shape[0], 'row')}, and {known}"
        )


def _check_shape(found: Judged, last: str, model: _KnownModel) -> None:
    tensor, role = found.kind.tensor, found.role
    assert role.dim is not None
    size = tensor.shape[role.dim]
    if size % role.parts:
        raise _UnknownError(f"its dim of {size} cannot be divided into {role.parts} equal parts")
    if role.dim == -3 or _is_latent(tensor.name) or not model.hidden or dict(tensor.uncut).keys() >= {0, 1}:
        return
    other = tensor.shape[-3 - role.dim]
    if other != model.hidden:
        what = "columns" if role.dim == -2 else "rows"
        raise _UnknownError(
            f"it has {other} {what}, but hidden_size is {model.hidden}: the name {last} means something else here"
        )


def _is_latent(name: str) -> bool:
    """Return whether the dim of a weight that is not cut is a latent one."""
    weight = weight_named(name.removesuffix(".weight"), ())
    return weight is not None and weight.latent


def _oriented(found: Judged, model: _KnownModel) -> Judged:
    """Experts that may be stacked as (expert, in, out): by the shapes of what belongs together, and `hidden_size`."""
    tensor, role = found.kind.tensor, found.role
    out, columns = tensor.shape[-2:]
    last, base = _last(tensor.name), starred(tensor.name).removesuffix(".weight").rpartition(".")[0]
    votes: dict[bool, str] = {}
    if model.hidden and out != columns and model.hidden in (out, columns):
        # The dim that is not cut is the hidden one: columns of gate and up, rows of down.
        is_cut_first = columns == model.hidden
        votes[is_cut_first == (role.dim == -1)] = "hidden_size"
    other = "down_proj" if role.parts == 2 else "gate_up_proj"
    pair = model.shapes.get(f"{base}.{other}", ())
    if len(pair) == 3 and (role.parts == 2 or last == "down_proj"):
        (_, rows, hidden), (_, outer, inner) = (tensor.shape, pair) if role.parts == 2 else (pair, tensor.shape)
        if (rows, hidden) == (2 * inner, outer):
            votes[False] = f"the shape of {other}"
        if (hidden, rows) == (2 * outer, inner):
            votes[True] = f"the shape of {other}"
    if not votes:
        if any(each.packing > 1 for one in tensor.components for each in one.along if each.of == len(tensor.shape) - 1):
            votes[False] = "the form, in which columns are packed"
        elif any(
            one in types_with("experts_in_out") and (one != "gpt_oss" or tensor.form == "plain") for one in model.types
        ):
            votes[True] = "model_type"
        elif out == columns and tensor.unit(len(tensor.shape) - 2) == tensor.unit(len(tensor.shape) - 1):
            votes[False] = "its equal dims"
    if len(votes) != 1:
        raise _UnknownError("nothing says which of its dims is the hidden one; hidden_size in config.json does")
    ((transposed, why),) = votes.items()
    assert role.dim is not None
    role = role._replace(dim=-3 - role.dim) if transposed else role
    return found._replace(role=role, rests_on=f"{found.rests_on}; {why}")


def _with_heads(found: Judged, model: _KnownModel) -> Judged:
    """Return the heads that the dim is made of, whose number must be known."""
    tensor, role, heads = found.kind.tensor, found.role, model.heads
    assert role.dim is not None
    n = tensor.shape[role.dim]
    if not role.heads or dict(tensor.uncut).keys() >= {0, 1}:
        return found
    if role.heads == "linear":
        if not heads.linear or n % heads.linear:
            raise _UnknownError(f"linear_num_key_heads is {heads.linear or 'not stated'}, but its dim has {n} elements")
        found = found._replace(rests_on=f"{found.rests_on}; linear_num_key_heads = {heads.linear}")
        return found if role.parts == 1 else _in_parts(found, n, model)
    if not heads.q:
        raise _UnknownError("the number of heads is not known: num_attention_heads of config.json says it")
    kv = heads.kv or _derived(role, n, model)
    heads = heads._replace(kv=kv)
    rests = f"{found.rests_on}; num_attention_heads = {heads.q}"
    if role.heads != "q":
        rests += f"; num_key_value_heads = {kv}" + ("" if model.heads.kv else ", by the shape")
    if not _makes(role, n, heads, exact=bool(heads.size) and "kv_lora_rank" not in model.config):
        what = counted(heads.q, "head") if role.heads == "q" else f"{heads.q} and {counted(kv, 'head')}"
        each = f" of {heads.size}" if heads.size else ""
        raise _UnknownError(f"its dim has {elements_text(n)}, which does not agree with {what}{each}")
    return found._replace(heads=heads, rests_on=rests)


def _in_parts(found: Judged, n: int, model: _KnownModel) -> Judged:
    """Queries, keys and values of linear attention, as the equal parts that begin where each of the three begins."""
    names = ("linear_k_heads", "linear_k_head_dim", "linear_v_heads", "linear_v_head_dim")
    k, k_size, v, v_size = (_first(model.config, name) for name in names)
    keys, values = k * k_size, v * v_size
    if not values or n != 2 * keys + values:
        raise _UnknownError(
            f"its dim has {n} elements, but two times {keys} for keys and {values} for values do not add up to that"
        )
    return found._replace(role=found.role._replace(parts=n // math.gcd(keys, values)))


def _derived(role: Role, n: int, model: _KnownModel) -> int:
    """Return the number of key-value heads that the shape says, where the configuration does not."""
    heads = model.heads
    d = heads.size or (model.hidden // heads.q if model.hidden % heads.q == 0 else 0)
    if role.heads == "q":
        return heads.q
    if not d:
        return heads.q if role.heads == "qkv" and n % (3 * heads.q) == 0 else 0
    rows = n if role.heads == "kv" else (n - heads.q * d) // 2
    return rows // d if rows > 0 and rows % d == 0 and heads.q % (rows // d) == 0 else 0


def _makes(role: Role, n: int, heads: Heads, *, exact: bool) -> bool:
    """Return whether a dim of `n` elements is so many heads; with `exact` they must be of the stated size."""
    q, kv, size, value = heads.q, heads.kv, heads.size, heads.value_size
    if role.heads != "q" and not kv:
        return False
    if not exact:
        return n % {"q": q, "kv": kv, "qkv": q + 2 * kv}[role.heads] == 0
    if role.heads == "q":  # Gates may be next to the queries.
        return n % (q * size) == 0 or n == q * value
    return n in ((kv * size, kv * value) if role.heads == "kv" else (q * size + kv * (size + value),))


def _merged(name: str, model: _KnownModel) -> str:
    """Return the place of a matrix among those that engines put one after the other, if the model has all of them."""
    last, base = _last(name), starred(name).removesuffix(".weight").rpartition(".")[0]
    for merged in merged_names():
        if last in merged.parts and all(f"{base}.{one}.weight" in model.shapes for one in merged.parts):
            return "last" if last == merged.parts[-1] else "first"
    return ""
