"""Answers of samples of a type's models: sizes in terms of the configuration, and the conditions of each tensor."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._expressions import parse_expression
from ...errors import ShardwiseError
from ...rules.names import keys_of
from ...rules.type_tensors import ConfigValues, condition_holds
from .experiments import FlatConfig, Sample, differing_keys, flat_config, nested_config

__all__ = ["Facts", "learned_defaults"]

#: A size that is the same in fewer models than this may be so by chance.
_FEW = 8
#: The most terms of a sum, and factors of a term.
_MOST_TERMS, _DEEPEST = 5, 3


class Point(NamedTuple):
    """A sample, and a value of the first field of names; `None` if they have no field."""

    sample: int
    number: int | None


class Facts:
    """Answers of samples: sizes in terms of the keys that change them, and when tensors are there."""

    def __init__(self, samples: Sequence[Sample], varied: set[str]) -> None:
        self._samples, self._varied = samples, sorted(varied)
        self._values = [ConfigValues(nested_config(one.flat), {}) for one in samples]
        self.used: set[str] = set()
        self._known: dict[Any, tuple[str | None, set[str]]] = {}
        self._truths: dict[tuple[str, Point], bool] = {}
        self._rows: dict[tuple[str, tuple[int | None, ...]], str] = {}
        self._chosen: dict[Any, list[str] | None] = {}
        #: Pairs of samples that differ in few keys.
        self._steps = [
            (before, before + 1, keys)
            for before in range(len(samples) - 1)
            if 0 < len(keys := differing_keys(samples[before].flat, samples[before + 1].flat)) < 4
        ]

    def groups(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Return the groups of a table, and the kinds of tensors that are in none, with the reason."""
        found: dict[str, dict[str, Any]] = {}
        failed: dict[str, str] = {}
        templates = dict.fromkeys(name for one in self._samples for name in one.tensors)
        literal = {name: self._literals(name) for name in templates}
        ends = self._ends(literal)
        for name, kept in sorted(literal.items(), key=lambda one: one[0].endswith(".bias")):
            for numbers in kept:
                try:
                    for range_, where, text, dims in self._entries(name, numbers, ends):
                        key = json.dumps([range_, where])
                        group = found.setdefault(key, {"range": range_, "where": where, "shapes": {}})
                        group["shapes"][text] = dims
                except UnstatedError as error:
                    failed[name] = str(error)
        groups = [{key: value for key, value in one.items() if value not in ({}, [])} for one in found.values()]
        return groups, failed

    def _literals(self, name: str) -> list[tuple[int | None, ...]]:
        """Return the numbers that are part of names by what they are: `None` where one is a field."""
        places = name.count("{}")
        sets = [
            [{numbers[place] for numbers in one.tensors[name]} for one in self._samples if name in one.tensors]
            for place in range(places)
        ]
        is_field = [len(set(map(frozenset, each))) > 1 or len(each[0]) > 8 for each in sets]
        seen = {numbers for one in self._samples for numbers in one.tensors.get(name, ())}
        return sorted(
            {tuple(None if is_field[at] else number for at, number in enumerate(numbers)) for numbers in seen},
            key=str,
        )

    def _ends(self, literal: Mapping[str, Sequence[tuple[int | None, ...]]]) -> dict[str, str | None]:
        """Return the number of layers as an expression, by what comes before it in names."""
        most: dict[str, dict[int, int]] = defaultdict(dict)
        for name, kept in literal.items():
            for fixed in kept:
                if None in fixed:
                    prefix = _prefix(name, fixed)
                    for at, one in enumerate(self._samples):
                        own = [n[fixed.index(None)] + 1 for n in one.tensors.get(name, ()) if _matches(n, fixed)]
                        most[prefix][at] = max([most[prefix].get(at, 0), *own])
        found: dict[str, str | None] = {}
        for prefix, counts in most.items():
            points = {Point(at, None): count for at, count in counts.items()}
            try:
                found[prefix] = self._size(points)
            except UnstatedError:
                found[prefix] = None
                for key in self._varied:  # The last layers may lack all of it.
                    values = [self._samples[at].flat.get(key) for at in counts]
                    is_end = key.rpartition(".")[2] in (*keys_of("layers"), "num_layers", "depth")
                    if is_end and all(type(v) is int and v >= c for v, c in zip(values, counts.values(), strict=True)):
                        found[prefix] = key
        return found

    def _entries(
        self, name: str, fixed: tuple[int | None, ...], ends: Mapping[str, str | None]
    ) -> Iterator[tuple[dict[str, str], list[str], str, list[str]]]:
        """Yield the range, conditions, name and dims of one kind of tensors: once, or once by condition."""
        fields = [at for at, number in enumerate(fixed) if number is None]
        letters = dict(zip(fields, "iejk", strict=False))
        if len(fields) > len(letters):
            raise UnstatedError(f"its name has more than {len(letters)} numbers that vary")
        parts = name.split("{}")
        text = parts[0].replace("{", "{{")
        for at, part in enumerate(parts[1:]):
            text += (f"{{{letters[at]}}}" if at in letters else str(fixed[at])) + part
        range_: dict[str, str] = {}
        held: dict[Point, tuple[int, ...]] = {}
        inner: list[dict[Point, set[int]]] = [defaultdict(set) for _ in fields[1:]]
        for sample, one in enumerate(self._samples):
            for numbers, shape in one.tensors.get(name, {}).items():
                if _matches(numbers, fixed):
                    point = Point(sample, numbers[fields[0]] if fields else None)
                    if held.setdefault(point, shape) != shape:
                        raise UnstatedError("its shapes differ within a layer")
                    for found, at in zip(inner, fields[1:], strict=True):
                        found[point].add(numbers[at])
        universe = [Point(at, None) for at in range(len(self._samples))]
        if fields:
            end = ends[_prefix(name, fixed)]
            if end is None:
                raise UnstatedError("the number of layers is not known")
            range_["i"] = end
            universe = [
                Point(at, number) for at in range(len(self._samples)) for number in range(self._evaluated(end, at))
            ]
        for letter, sets in zip("ejk", inner, strict=False):
            if any(one != set(range(len(one))) for one in sets.values()):
                raise UnstatedError("its numbers have gaps")
            range_[letter] = self._size({point: len(one) for point, one in sets.items()})
        cases = self._cases(universe, held.keys())
        # Few samples have a bias; it is as long as its weight has rows.
        rows = self._rows.get((name.replace(".bias", ".weight"), fixed))
        if name.endswith(".bias") and rows and all(s == (self._evaluated(rows, p.sample),) for p, s in held.items()):
            self.used.update(re.findall(r"[A-Za-z_][\w.]*", rows))
            yield from ((range_, where, text, [rows]) for where in cases)
            return
        try:
            dims = self._dims(held)
            self._rows[name, fixed] = dims[0] if dims else ""
            yield from ((range_, where, text, dims) for where in cases)
            return
        except UnstatedError:
            pass
        for atom in self._atoms(universe):
            both = [{p: s for p, s in held.items() if self._holds(atom, p) == is_so} for is_so in (True, False)]
            if not all(both):
                continue
            try:
                both_dims = [self._dims(one) for one in both]
                wheres = [self._where(universe, one.keys()) for one in both]
            except UnstatedError:
                continue
            self._rows[name, fixed] = both_dims[0][0] if len({dims[0] for dims in both_dims if dims}) == 1 else ""
            yield from ((range_, w, text, d) for w, d in zip(wheres, both_dims, strict=True))
            return
        self._dims(held)  # Raises why not.

    def _evaluated(self, text: str, sample: int) -> int:
        return parse_expression(text).value(self._values[sample])

    def _dims(self, held: Mapping[Point, tuple[int, ...]]) -> list[str]:
        if len({len(shape) for shape in held.values()}) != 1:
            raise UnstatedError("it has another number of dims")
        rank = len(next(iter(held.values())))
        return [self._size({point: shape[dim] for point, shape in held.items()}) for dim in range(rank)]

    def _size(self, sizes: Mapping[Point, int]) -> str:
        """Return an expression for a size."""
        own: dict[int, int] = {}
        for point, size in sizes.items():
            if own.setdefault(point.sample, size) != size:
                raise UnstatedError("its size differs from layer to layer")
        if len(set(own.values())) == 1:
            if len(own) < _FEW and own[min(own)] > 1:
                raise UnstatedError("too few models have it to find the formula of its size")
            return str(next(iter(own.values())))
        known = tuple(own.items())
        if known not in self._known:
            self._known[known] = self._worked_out(own)
        text, keys = self._known[known]
        if text is None:
            raise UnstatedError(f"no known formula gives its size from {', '.join(sorted(keys))}")
        self.used.update(re.findall(r"[A-Za-z_][\w.]*", text))
        return text

    def _worked_out(self, own: Mapping[int, int]) -> tuple[str | None, set[str]]:
        """Return an expression for sizes by sample, and the keys on which they depend."""
        keys: set[str] = set()
        for before, after, changed in self._steps:
            if before in own and after in own and own[before] != own[after]:
                keys.update(key for key in changed if not isinstance(self._samples[0].flat[key], list))
        points = [(self._samples[at].flat, size) for at, size in own.items()]
        if (text := fitted_size(sorted(keys), points)) is not None:
            return text, keys
        # Where few samples have it, none may be next to another.
        equal = [key for key in self._varied if all(flat.get(key) is not None and flat[key] == n for flat, n in points)]
        return (equal[0] if len(equal) == 1 else None), keys

    def _cases(self, universe: Sequence[Point], held: Any) -> list[list[str]]:
        """Return conditions of which one holds for exactly these points: one list of them, or two."""
        try:
            return [self._where(universe, held)]
        except UnstatedError:
            for atom in self._atoms(universe):
                both = [{p for p in held if self._holds(atom, p) == is_so} for is_so in (True, False)]
                try:
                    if all(both):
                        return [self._where(universe, one) for one in both]
                except UnstatedError:
                    continue
            raise

    def _where(self, universe: Sequence[Point], held: Any) -> list[str]:
        """Return the fewest conditions that hold for exactly these points."""
        present = {*held}
        if not present <= {*universe}:
            raise UnstatedError("it is in layers that do not exist")
        absent = [point for point in universe if point not in present]
        known = frozenset(present), len(absent)
        if known not in self._chosen:
            self._chosen[known] = self._conditions(universe, present, absent) if absent else []
        chosen = self._chosen[known]
        if chosen is None:
            raise UnstatedError("no known condition says when it is there")
        for atom in chosen:
            words = re.findall(r"[A-Za-z_][\w.]*", re.sub(r"'[^']*'", "", atom))
            self.used.update(word for word in words if word not in ("i", "not", "in"))
        return chosen

    def _conditions(self, universe: Sequence[Point], present: set[Point], absent: Sequence[Point]) -> list[str] | None:
        atoms = []
        for atom in self._atoms(universe):
            if all(self._holds(atom, point) for point in present):
                atoms.append((atom, frozenset(at for at, p in enumerate(absent) if not self._holds(atom, p))))
        if len(frozenset().union(*(one[1] for one in atoms))) < len(absent):
            return None
        for count in range(1, 5):
            for chosen in itertools.combinations(atoms[:60] if count < 3 else atoms[:24], count):
                if len(frozenset().union(*(one[1] for one in chosen))) == len(absent):
                    return [atom for atom, _ in chosen]
        return None

    def _holds(self, atom: str, point: Point) -> bool:
        if (atom, point) not in self._truths:
            try:
                number = {} if point.number is None else {"i": point.number}
                self._truths[atom, point] = condition_holds(atom, self._values[point.sample], number)
            except (ShardwiseError, TypeError):
                self._truths[atom, point] = False
        return self._truths[atom, point]

    def _atoms(self, universe: Sequence[Point]) -> list[str]:
        """Return conditions that may hold, the likeliest first."""
        first = self._samples[0].flat
        values = {key: [one.flat.get(key) for one in self._samples] for key in self._varied}
        flags, lists, bounds, cycles, places = [], [], [], [], []
        has_field = universe[0].number is not None
        for key in self._varied:
            kinds = {type(one) for one in values[key]}
            if list in kinds or isinstance(first[key], list):
                entries = {entry for one in values[key] if isinstance(one, list) for entry in one}
                if all(isinstance(entry, str) for entry in entries) and has_field:
                    lists += [f"{key}[i] == '{one}'" for one in sorted(entries)]
                    lists += [f"{key}[i] != '{one}'" for one in sorted(entries)]
                elif has_field and all(type(entry) is int for entry in entries):
                    lists += [f"i not in {key}", f"i in {key}"]
                    if entries <= {0, 1}:
                        lists += [f"{key}[i] == 1", f"{key}[i] == 0"]
            elif kinds <= {bool, int, type(None)}:
                flags += [key, f"not {key}"] if kinds != {int} or 0 in values[key] else []
                if int in kinds and has_field:
                    bounds += [f"i >= {key}", f"i < {key}"]
                    cycles += [f"(i + 1) % {key} == 0", f"(i + 1) % {key} != 0", f"i % {key} == 0", f"i % {key} != 0"]
        if has_field:
            places = ["i >= 1", "i < 1"]
        return [*flags, *lists, *bounds, *cycles, *places]


class UnstatedError(Exception):
    """Raised where what samples say is nothing that a table can state."""


def fitted_size(keys: Sequence[str], points: Sequence[tuple[FlatConfig, int]]) -> str | None:
    """Return an expression of few terms with these values, or `None`."""
    rows = [(flat, size) for flat, size in points if all(type(flat.get(key)) in (int, bool) for key in keys)]
    if not keys or len(keys) > 8 or not rows or len(rows) < len(points) * 0.5:
        return None
    rows = list({(*(flat[key] for key in keys), size): (flat, size) for flat, size in rows}.values())
    is_all = all(type(flat.get(key)) in (int, bool) for flat, _ in points for key in keys)
    sizes = np.array([size for _, size in rows], dtype=np.int64)
    columns = {key: np.array([int(flat[key]) for flat, _ in rows], dtype=np.int64) for key in keys}
    plain = [(key, columns[key]) for key in keys]
    if text := _terms(plain, sizes):
        return text if is_all else None
    for over, under in itertools.permutations(keys, 2):
        if (columns[under] > 0).all():
            quotient = (f"{over} // {under}", columns[over] // columns[under])
            if text := _terms([*plain, quotient], sizes):
                return text if is_all else None
    return None


def _terms(atoms: Sequence[tuple[str, Any]], sizes: Any) -> str | None:
    """Return a sum of products with whole coefficients that has these values: that of the fewest terms."""
    products: list[tuple[str, Any]] = [("", np.ones_like(sizes))]
    for degree in range(1, _DEEPEST + 1):
        for chosen in itertools.combinations(atoms, degree):
            text = " * ".join(f"({name})" if "//" in name and degree > 1 else name for name, _ in chosen)
            products.append((text, np.prod([column for _, column in chosen], axis=0)))
    named = [(f"({text})" if "//" in text else text, column) for text, column in atoms]
    products += [(f"{text} * {text}", column**2) for text, column in named]
    # An area of patches, times a size: of pairs only, or there are too many.
    pairs = itertools.permutations(named, 2) if len(named) < 5 else ()
    products += [(f"{size} * {text} * {text}", row * column**2) for (size, row), (text, column) in pairs]
    products = products[:64]
    for count in range(1, _MOST_TERMS):
        if len(products) > (0, 64, 64, 28, 16)[count]:
            break
        for terms in itertools.combinations(products, count):
            matrix = np.stack([column for _, column in terms], axis=1).astype(float)
            found, _, rank, _ = np.linalg.lstsq(matrix, sizes.astype(float), rcond=None)
            whole = np.rint(found).astype(np.int64)
            if rank < count or (np.abs(found - whole) > 1e-6).any() or (whole == 0).any():
                continue
            # Two more than there are coefficients, or any numbers could be met.
            if len(sizes) < count + 2 and (count > 1 or whole[0] != 1):
                continue
            if (sum(n * column for n, (_, column) in zip(whole, terms, strict=True)) == sizes).all():
                return _sum([(int(n), text) for n, (text, _) in zip(whole, terms, strict=True)])
    return None


def _sum(terms: Sequence[tuple[int, str]]) -> str:
    found = ""
    for n, text in sorted(terms, key=lambda one: (one[0] < 0, not one[1])):
        factor = f"({text})" if "//" in text and not text.startswith("(") else text
        size = str(abs(n)) if not text else text if abs(n) == 1 else f"{abs(n)} * {factor}"
        found += (" - " if n < 0 else " + " if found else "") + size
    return found.strip()


def learned_defaults(
    keys: set[str], samples: Sequence[Sample], resolved: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> tuple[FlatConfig, list[str]]:
    """Return values and expressions for keys that a configuration leaves out, and the keys that may be null.

    They are those that the type's own class adds. Other keys that are null are as if they were left out.
    """
    found: FlatConfig = {}
    kept: list[str] = []
    steps = samples[:: max(1, len(samples) // 24)]
    for key in sorted(keys):
        values: list[tuple[FlatConfig, Any]] = []
        nulls: list[Any] = []
        try:
            for one in steps:
                without = {name: value for name, value in one.flat.items() if name != key}
                values.append((without, flat_config(resolved(nested_config(without))).get(key, "null")))
                try:
                    nulls.append(flat_config(resolved(nested_config({**without, key: None}))).get(key))
                except Exception:  # It takes no null there.
                    nulls.append(values[-1][1])
                if len(values) > 10 and all(value == values[0][1] for _, value in values):
                    break
        except Exception:  # Its own code needs the key.
            continue
        texts = {json.dumps(value) for _, value in values}
        if any(value is not None and value != given for value, (_, given) in zip(nulls, values, strict=True)):
            continue
        if len(texts) == 1:
            value = values[0][1]
            if value and all(one is None for one in nulls):
                kept.append(key)
            found[key] = "null" if value is None else value
            continue
        if not all(type(value) is int for _, value in values):
            continue
        names = [name for name, one in values[0][0].items() if type(one) is int]
        for text in [
            *names,
            *(f"{one} {mark} {other}" for mark in ("//", "*") for one, other in itertools.permutations(names, 2)),
        ]:
            if all(_gives(text, flat, value) for flat, value in values):
                found[key] = f"= {text}"
                break
    return found, kept


def _gives(text: str, flat: FlatConfig, value: int) -> bool:
    try:
        return parse_expression(text).value({key: size for key, size in flat.items() if type(size) is int}) == value
    except ShardwiseError:
        return False


def _prefix(name: str, fixed: tuple[int | None, ...]) -> str:
    parts = name.split("{}")
    at = fixed.index(None)
    return "".join(f"{part}{fixed[place]}" for place, part in enumerate(parts[:at])) + parts[at]


def _matches(numbers: tuple[int, ...], fixed: tuple[int | None, ...]) -> bool:
    return all(own is None or own == number for number, own in zip(numbers, fixed, strict=True))
