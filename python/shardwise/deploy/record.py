"""Layouts of loaders for which there are no rules: load numbered elements, and see where they arrive.

Each element of each tensor has a number. A dtype of few bits holds a few digits of it, so the loader runs several
times, with one digit of all numbers each time. Three further runs are checks: in one the first digit counts down, in
one it is a hash of the number, in one all elements are zero. What was multiplied with something does not pass the
first, what was computed otherwise the second, what was added to the third. What is the same in all runs, with zeros
too, is of no tensor: it is padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .._dtypes import dtype_of, find_dtype
from .._text import elements_text, shown
from .._types import Numbers
from ..errors import LayoutError
from .element_rows import rows_of
from .joined import manifest_of_held
from .numbered_tensors import (
    NumberedTensor,
    NumberedTensors,
    base_of,
    element_total,
    hashed_digits,
    with_first_elements,
)
from .recording import RecordedParameter, RecordedPiece, Recording

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["record"]

#: The most values of padding that a message names.
_MOST_VALUES = 8
#: The most parameters that a message names.
_MOST_NAMED = 3


class _Seen:
    """The values of a parameter that were seen so far, element by element.

    Attributes:
        shape, dtype: Its shape, and the name of its dtype.
        numbers: The numbers that its digits make.
        is_number: Whether each of them was a digit.
        first: The values of the first run.
        is_constant: Whether they were the same in each run.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, values: npt.NDArray[np.float64]) -> None:
        self.shape, self.dtype, self.first = shape, dtype, values
        self.numbers = np.zeros(values.size, np.int64)
        self.is_number = np.ones(values.size, np.bool_)
        self.is_constant = np.ones(values.size, np.bool_)

    def compared(self, values: npt.NDArray[np.float64]) -> None:
        self.is_constant &= (values == self.first) | (np.isnan(values) & np.isnan(self.first))

    def digit(self, values: npt.NDArray[np.float64], base: int, place: int) -> None:
        with np.errstate(invalid="ignore"):
            is_digit = (values >= 0) & (values < base) & (values == np.floor(values))
        self.is_number &= is_digit
        self.numbers += np.where(is_digit, values, 0).astype(np.int64) * place

    def checked(self, values: npt.NDArray[np.float64], expected: Numbers, total: int) -> None:
        self.is_number &= (values == expected) & (self.numbers < total)


def record(
    tensors: Mapping[str, Any],
    load: Callable[[Mapping[str, Any]], Any],
    holder: Any = 0,
    *,
    computed: Literal["refuse", "leave"] = "refuse",
    make: Callable[[npt.NDArray[np.int64], str], Any] | None = None,
) -> Recording:
    """Find the layout of a process's parameters by loading element numbers through its own loader.

    Args:
        tensors: shape and dtype of each tensor by name, as `plan_model` takes them: of an open checkpoint too.
        load: gets a mapping of these names to arrays, and gives back the process's parameters: a mapping of names to
            arrays, or pairs of both, such as `model.named_parameters()`; numpy arrays, or anything that becomes one, as
            tensors of PyTorch on a CPU do. An engine's `load_weights` takes `tensors.items()`, whose arrays are made
            one by one. It is called a few times and must do the same each time.
        holder: the label of the process in the manifest.
        computed: what to do with a parameter that has computed values (elements scaled, added or quantized), which have
            no position: `"refuse"` it, by its name, or `"leave"` it to the loader.
        make: a function of whole numbers and the name of a dtype, which returns an array for the loader; by default an
            array of numpy. `shardwise.interop.torch.record` makes tensors of PyTorch.

    Raises:
        LayoutError: if the loader computes values, unless these are left to it; if two runs of it differ. The message
            names the parameters.
        TypeError: if the model gives something other than parameters, or a dtype has no whole numbers from 0 on.

    Elements of tensors are recognised by their numbers, one by one, so the pieces are exact and complete. The loader
    runs once for each digit of the number of elements, in a base that the dtypes hold (256 for bfloat16, 2**24 for
    float32), and three more times. Besides the loader's own memory, recording takes some 30 bytes for each element of
    the parameters, and one tensor at a time; a model too large for that is recorded with small sizes.

    >>> import shardwise as sw
    >>> def load(tensors):  # some engine's rank 1 of 2
    ...     q, k = (np.split(tensors[name], 2)[1] for name in ("q", "k"))
    ...     return {"qk": np.concatenate([q, k]), "head": np.pad(tensors["head"].T, ((0, 0), (0, 1)))}
    >>> shapes = {"q": ((4, 2), "float32"), "k": ((2, 2), "float32"), "head": ((3, 2), "float32")}
    >>> found = sw.record(shapes, load)
    >>> for parameter in found.parameters.values():
    ...     for piece in parameter.pieces:
    ...         print(parameter.name, piece.tensor, piece.box, piece.start, piece.strides)
    qk q (slice(2, 4, 1), slice(0, 2, 1)) 0 (2, 1)
    qk k (slice(1, 2, 1), slice(0, 2, 1)) 4 (0, 1)
    head head (slice(0, 3, 1), slice(0, 2, 1)) 0 (1, 4)
    >>> found.parameters["head"].padding, found.parameters["head"].values
    (2, (0.0,))
    """
    if computed not in ("refuse", "leave"):
        raise LayoutError(f'computed is {shown(computed)}; it must be "refuse" or "leave"')
    if not callable(load):
        raise TypeError(f"load must be a function that takes tensors and gives parameters, got {shown(load)}")
    given = with_first_elements(tensors)
    base = min((base_of(one.dtype, name) for name, one in given.items()), default=2)
    while True:
        seen, last = _run(given, load, make, base)
        wrong = {name: one for name, one in seen.items() if not (one.is_number | one.is_constant).all()}
        # A parameter of fewer bits than the tensors cannot hold their digits.
        narrower = min((base_of(one.dtype, None) for one in wrong.values()), default=base)
        if narrower >= base:
            break
        base = narrower
    if wrong:
        differing = _differing(given, load, make, base, seen)
        if differing:
            raise LayoutError(
                "the loader is not deterministic: with the same tensors it gives different values to "
                f"{_listed(differing)}; let it fill all of these, or start from the same values each time"
            )
        if computed == "refuse":
            raise LayoutError(_refusal(wrong))
    return _recording(given, seen, set(wrong), holder, last)


def _run(
    given: Mapping[str, NumberedTensor], load: Callable[..., Any], make: Callable[..., Any] | None, base: int
) -> tuple[dict[str, _Seen], NumberedTensors]:
    """Return the values of each parameter seen in all runs; and the loader's requests in the last one."""
    total, seen, place = max(element_total(given), 1), {}, 1
    while True:
        values, asked = _loaded(given, load, make, lambda n, place=place: n // place % base)  # type: ignore[misc]
        for name, (shape, dtype, value) in values.items():
            if place == 1:
                seen[name] = _Seen(shape, dtype, value)
            _same(seen, name, shape)
            seen[name].compared(value)
            seen[name].digit(value, base, place)
        _complete(seen, values)
        place *= base
        if place >= total:
            break
    for check in (lambda n: base - 1 - n % base, lambda n: hashed_digits(n, base), np.zeros_like):
        values, asked = _loaded(given, load, make, check)
        for name, (shape, _, value) in values.items():
            _same(seen, name, shape)
            seen[name].compared(value)
            seen[name].checked(value, check(seen[name].numbers), total)
        _complete(seen, values)
    return seen, asked


def _same(seen: Mapping[str, _Seen], name: str, shape: tuple[int, ...]) -> None:
    if name not in seen or seen[name].shape != shape:
        was = f"of shape {seen[name].shape}" if name in seen else "not there"
        raise LayoutError(
            f"the loader is not deterministic: the parameter {shown(name)} is {was} in one run, and of shape {shape} "
            "in another"
        )


def _complete(seen: Mapping[str, _Seen], values: Mapping[str, Any]) -> None:
    if gone := [name for name in seen if name not in values]:
        raise LayoutError(f"the loader is not deterministic: one run lacks the parameter {shown(gone[0])}")


def _loaded(
    given: Mapping[str, NumberedTensor],
    load: Callable[..., Any],
    make: Callable[..., Any] | None,
    digits: Callable[[Numbers], Numbers],
) -> tuple[dict[str, tuple[tuple[int, ...], str, npt.NDArray[np.float64]]], NumberedTensors]:
    """Return shape, dtype and flat values of each parameter after a run with these digits of the numbers."""

    def made(one: NumberedTensor) -> Any:
        numbers = digits(np.arange(one.first, one.first + math.prod(one.shape))).reshape(one.shape)
        return numbers.astype(dtype_of(one.dtype)) if make is None else make(numbers, one.dtype)

    asked = NumberedTensors(given, made)
    with np.errstate(all="ignore"):  # A loader that casts may have no room for all digits.
        answer = load(asked)
    pairs = answer.items() if isinstance(answer, Mapping) else answer
    if not isinstance(pairs, Iterable):
        raise TypeError(f"the loader must give parameters by name, got {shown(answer)}")
    found = {}
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"the loader must give pairs of a name and an array, got {shown(pair)}")
        found[pair[0]] = _values(*pair)
    return found, asked


def _values(name: str, array: Any) -> tuple[tuple[int, ...], str, npt.NDArray[np.float64]]:
    """Return shape, dtype and values of a parameter; float64 holds all whole numbers that are used."""
    dtype = getattr(array, "dtype", None)
    if hasattr(array, "detach"):  # PyTorch's, of which numpy does not know all dtypes.
        array = array.detach().cpu()
        array = array.numpy() if not array.is_floating_point() else array.double().numpy()
    array = np.asarray(array)
    known = find_dtype(array.dtype if dtype is None else dtype)
    with np.errstate(invalid="ignore"):
        if array.dtype.kind == "c":
            values = np.where(array.imag == 0, array.real, np.nan).astype(np.float64)
        else:
            try:
                values = array.astype(np.float64)
            except (TypeError, ValueError):
                raise TypeError(f"the parameter {shown(name)} is of {array.dtype}, not of numbers") from None
    return array.shape, str(array.dtype) if known is None else known.name, values.reshape(-1)


def _differing(
    given: Mapping[str, NumberedTensor], load: Any, make: Any, base: int, seen: Mapping[str, _Seen]
) -> dict[str, _Seen]:
    """Return the parameters that get other values when the first run is repeated."""
    values, _ = _loaded(given, load, make, lambda n: n % base)
    found = {}
    for name, one in seen.items():
        again = values[name][2]
        if not ((again == one.first) | (np.isnan(again) & np.isnan(one.first))).all():
            found[name] = one
    return found


def _listed(parameters: Mapping[str, Any]) -> str:
    names = list(parameters)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(shown(name) for name in names[:_MOST_NAMED]) + more


def _refusal(wrong: Mapping[str, _Seen]) -> str:
    name, one = next(iter(wrong.items()))
    places = np.flatnonzero(~(one.is_number | one.is_constant))
    at = [int(each) for each in np.unravel_index(places[0], one.shape)] if one.shape else []
    more = "" if len(wrong) == 1 else f"; as it does in {_listed(dict(list(wrong.items())[1:]))}"
    return (
        f"the loader computes {len(places)} of {elements_text(one.numbers.size)} of {shown(name)}, the first at "
        f"{at}: they "
        f'are not elements of the tensors, but values made from them{more}; computed="leave" records all others and '
        "leaves these parameters to the loader"
    )


def _recording(
    given: Mapping[str, NumberedTensor], seen: Mapping[str, _Seen], left: set[str], holder: Any, asked: NumberedTensors
) -> Recording:
    names, tensors = list(given), {name: (one.shape, one.dtype) for name, one in given.items()}
    firsts = np.array([one.first for one in given.values()], np.int64)
    sizes = np.array([math.prod(one.shape) for one in given.values()], np.int64)
    filled = np.flatnonzero(sizes)  # Tensors without elements begin where others do.
    parameters: dict[str, RecordedParameter] = {}
    held: dict[str, list[Numbers]] = {}
    computed: dict[str, int] = {}
    for name, one in seen.items():
        if name in left:
            computed[name] = int((~(one.is_number | one.is_constant)).sum())
            parameters[name] = RecordedParameter(name, one.shape, one.dtype, ())
            continue
        at = np.flatnonzero(one.is_number)
        numbers = one.numbers[at]
        tensor = filled[np.searchsorted(firsts[filled], numbers, "right") - 1] if len(at) else at
        order = np.argsort(tensor, kind="stable")
        pieces: list[RecordedPiece] = []
        for those in np.split(order, np.flatnonzero(np.diff(tensor[order])) + 1) if len(at) else ():
            which = int(tensor[those[0]])
            offsets = numbers[those] - firsts[which]
            held.setdefault(names[which], []).append(offsets)
            pieces += _pieces(names[which], rows_of(at[those], offsets, given[names[which]].shape), given)
        pieces.sort(key=lambda piece: piece.start)
        rest = np.unique(one.first[~one.is_number]).tolist()[:_MOST_VALUES]
        padding = int((~one.is_number).sum())
        parameters[name] = RecordedParameter(name, one.shape, one.dtype, tuple(pieces), padding, tuple(rest))
    together = {name: np.unique(np.concatenate(held[name])) for name in names if name in held}
    manifest = manifest_of_held(holder, tensors, together)
    unread = tuple(name for name in names if name not in asked.taken)
    unused = tuple(
        name
        for name, size in zip(names, sizes.tolist(), strict=True)
        if size and name in asked.taken and name not in held
    )
    return Recording(holder, tensors, parameters, manifest, computed, tuple(asked.missing), unread, unused)


def _pieces(name: str, rows: Numbers, given: Mapping[str, NumberedTensor]) -> Iterator[RecordedPiece]:
    shape = given[name].shape
    rank = max(len(shape), 1)
    for start, *row in rows.tolist():
        starts, counts, steps, strides = (row[side * rank : (side + 1) * rank] for side in range(4))
        box = tuple(
            slice(first, first + (count - 1) * step + 1, step)
            for first, count, step in zip(starts, counts, steps, strict=True)
        )
        times, apart = row[-2:]
        yield RecordedPiece(name, box[: len(shape)], start, tuple(strides[: len(shape)]), times, apart)
