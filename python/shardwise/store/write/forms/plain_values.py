"""Values of the types that every reader of PyTorch accepts, with places for tensors, and their pickle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...._dtypes import Dtype
from ...formats.torch.pickles import Record, torch_sizes
from ...formats.torch.tensors import items_within
from .dcp import rebuilt
from .pickles import Call, Global, pickled

__all__ = ["Reference", "TensorNumber", "nested_pickle", "places_in", "plain_value", "with_tensors"]

_MOST_DEPTH = 64


class Reference(NamedTuple):
    """The place of a tensor in a tree, by the tensor's name."""

    name: str


def plain_value(value: Any, depth: int = 0) -> Any:
    """Return a value made only of types that every reader of PyTorch accepts.

    These are numbers, texts, lists, tuples, dicts, sizes and dtypes.

    Raises:
        TypeError: if there is anything else in it.
    """
    if depth > _MOST_DEPTH:
        raise TypeError("nested too deeply")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [plain_value(each, depth + 1) for each in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict) or (isinstance(value, Record) and (value.name == "dict" or value.items)):
        pairs = items_within(value)
        if pairs is not None:
            return {plain_value(key, depth + 1): plain_value(held, depth + 1) for key, held in pairs}
    if isinstance(value, Record):
        sizes = torch_sizes(value)
        if sizes is not None:
            return Call(Global("torch", "Size"), (sizes,))
        if value.args is None and value.name.startswith("torch.") and value.name.count(".") == 1:
            return Global("torch", value.name.partition(".")[2])
        if value.name in ("collections.OrderedDict", "collections.defaultdict"):
            return {}
    raise TypeError(f"a value of {type(value).__name__}")


def nested_pickle(tree: Any, tensors: Mapping[str, tuple[Dtype, Sequence[int], str]]) -> bytes:
    """Return the pickle of a tree.

    Args:
        tree: The tree, with references in place of tensors.
        tensors: The dtype, the shape and the key of the storage of each tensor, by name.
    """

    def made(value: Any) -> Any:
        if isinstance(value, Reference):
            dtype, shape, storage = tensors[value.name]
            return rebuilt(dtype, tuple(shape), storage)
        if isinstance(value, (Call, Global)):
            return value
        if isinstance(value, dict):
            return {key: made(held) for key, held in value.items()}
        if isinstance(value, tuple):
            return tuple(made(held) for held in value)
        return [made(held) for held in value] if isinstance(value, list) else value

    return pickled(made(tree))


class TensorNumber(NamedTuple):
    """The place of a tensor in a tree, by the tensor's position, if it has no folder of its own."""

    at: int


def places_in(value: Any) -> Iterator[TensorNumber]:
    """Yield the places of tensors in a tree."""
    if isinstance(value, TensorNumber):
        yield value
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from places_in(each)


def with_tensors(value: Any, tensors: Sequence[tuple[int, str]], made: Sequence[Call]) -> Any:
    """Return a tree with each tensor's call in its place."""
    calls = {at: call for (at, _), call in zip(tensors, made, strict=True)}

    def filled(value: Any) -> Any:
        if isinstance(value, TensorNumber):
            return calls[value.at]
        if isinstance(value, dict):
            return {key: filled(each) for key, each in value.items()}
        return [filled(each) for each in value] if isinstance(value, list) else value

    return filled(value)
