"""XLA's named shardings, as in `{mesh['a'=2,'b'=4], [{'b'}, {}]}`: which axes of which mesh cut which dims.

The form is that of `xla/hlo/ir/named_sharding.cc` and `mesh_and_axis.cc`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .._text import shown
from ..errors import ParseError

__all__ = ["NamedTiles", "named_text", "read_named", "without_metadata"]

_TOKEN = re.compile(
    r"\s*(?:(?P<string>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<number>\d{1,18}(?!\d))|(?P<word>[A-Za-z_]+)"
    r"|(?P<mark>[\[\]{}(),=:?]))",
    re.ASCII | re.DOTALL,
)
#: Texts, in which anything may stand, the beginning of metadata, brackets, and any other character.
_METADATA = re.compile(
    r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|(?P<begin>,?\s*\bmetadata\s*=\s*\{)|(?P<mark>[{}])|.", re.DOTALL
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_KINDS = ("manual", "unreduced", "replicated")
#: The most devices that are listed, for an order that no reshaped and transposed numbers give.
_MOST_LISTED = 1 << 20
_MOST_AXES = 1024


class NamedTiles(NamedTuple):
    """A named sharding, as the tiles of an unnamed one.

    Attributes:
        kind: `"tiled"`, `"replicated"`, `"unreduced"`, `"manual"` or `"maximal"`.
        rank: The number of dims, if it says it.
        tile: Tiles per dim, followed by those of the subgroups.
        reshape: The sizes into which the device numbers, 0, 1, …, are reshaped.
        perm: The order into which these are transposed; the devices themselves if no order gives them.
        subgroups: The meaning of each of the last entries of `tile`.
        device: The device of a maximal sharding.
    """

    kind: str
    rank: int | None = None
    tile: tuple[int, ...] = ()
    reshape: tuple[int, ...] = ()
    perm: tuple[int, ...] = ()
    subgroups: tuple[str, ...] = ()
    device: int = 0


class _Ref(NamedTuple):
    """An axis by its number, or the part of it that comes after so many positions and has a size."""

    axis: int
    before: int
    size: int


class _NamedReader:
    """The tokens of a text, one of them looked at in advance."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self._look()

    def _look(self) -> None:
        found = _TOKEN.match(self.text, self.position)
        self.kind, self.token, self._end = (
            (str(found.lastgroup), found[str(found.lastgroup)], found.end()) if found else ("", "", self.position)
        )

    def error(self, wanted: str) -> ParseError:
        found = self.text[self.position : self.position + 40].strip()[:20]
        return ParseError(f"expected {wanted}, found {shown(found)}, at character {self.position} within the braces")

    def skip(self, token: str) -> bool:
        found = self.kind in ("mark", "word") and self.token == token
        if found:
            self.take(self.kind, token)
        return found

    def expect(self, *tokens: str) -> None:
        for token in tokens:
            if not self.skip(token):
                raise self.error(shown(token))

    def take(self, kind: str, wanted: str) -> str:
        if self.kind != kind:
            raise self.error(wanted)
        token, self.position = self.token, self._end
        self._look()
        return token

    def number(self) -> int:
        return int(self.take("number", "a number below 10**18"))

    def string(self) -> str:
        inner = self.take("string", "an axis name in quotation marks")[1:-1]
        return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), inner, flags=re.DOTALL)

    def listed(self, end: str) -> Iterator[None]:
        """Go through a list with commas, up to its end."""
        if not self.skip(end):
            yield
            while not self.skip(end):
                self.expect(",")
                yield

    def numbers(self, end: str) -> tuple[int, ...]:
        return tuple(self.number() for _ in self.listed(end))

    def end(self) -> None:
        if self.text[self.position :].strip():
            raise self.error("the end")


def without_metadata(body: str) -> str:
    """Remove `metadata={…}`, which says where in a program a sharding comes from.

    >>> without_metadata('devices=[2]<=[2] metadata={op_name="a}b"}')
    'devices=[2]<=[2]'
    """
    kept, depth = [], 0
    for token in _METADATA.finditer(body):
        if depth:
            depth += {"{": 1, "}": -1}.get(token[0], 0)
        elif token["begin"]:
            depth = 1
        else:
            kept.append(token[0])
    if depth:
        raise ParseError("its metadata does not end")
    return "".join(kept)


def read_named(body: str) -> NamedTiles | None:
    """Read what stands within the braces of a named sharding; None if it is not one.

    Raises:
        ParseError: if it begins as one and is not.
    """
    reader = _NamedReader(body)
    if reader.skip("maximal_mesh"):
        reader.expect("[", "device_id", "=")
        device = reader.number()
        reader.expect("]")
        reader.end()
        return NamedTiles("maximal", device=device)
    if not reader.skip("mesh"):
        return None
    names, sizes = _mesh(reader)
    ids = _device_ids(reader, math.prod(sizes))
    kind = next((kind for kind in _KINDS if reader.skip(kind)), None)
    if kind is not None:
        reader.end()
        return NamedTiles(kind)
    dims: list[list[_Ref]] = []
    reader.expect("[")
    for _ in reader.listed("]"):
        dims.append(_axes(reader, names, sizes, is_dim=True))
    groups: dict[str, list[_Ref]] = {}
    while reader.skip(","):
        group = reader.take("word", "manual, unreduced or replicated")
        if group not in _KINDS or group in groups:
            raise ParseError(f"{shown(group)} is not one of {', '.join(_KINDS)}, or is repeated")
        reader.expect("=")
        groups[group] = _axes(reader, names, sizes)
    reader.end()
    return _tiled(sizes, ids, dims, groups)


def named_text(mesh: Sequence[tuple[str, int]], dims: Sequence[Sequence[str]], unreduced: Sequence[str]) -> str:
    """Write a named sharding of a mesh of these axes, whose dims are cut by these axes and sub-axes, major first.

    >>> named_text([("a", 2), ("b", 4)], [["b:(1)2"], []], ["a"])
    "{mesh['a'=2,'b'=4], [{'b':(1)2}, {}], unreduced={'a'}}"
    """
    known = [name for name, _ in mesh]
    axes = ",".join(f"{_quoted(name)}={size}" for name, size in mesh)

    def text(names: Sequence[str]) -> str:
        found = []
        for name in names:
            axis, _, part = (name, "", "") if name in known else name.rpartition(":")
            found.append(f"{_quoted(axis)}:{part}" if part else _quoted(axis))
        return f"{{{', '.join(found)}}}"

    order = sorted(
        unreduced, key=lambda name: known.index(name) if name in known else known.index(name.rpartition(":")[0])
    )
    summed = f", unreduced={text(order)}" if order else ""
    return f"{{mesh[{axes}], [{', '.join(map(text, dims))}]{summed}}}"


def _quoted(name: str) -> str:
    turned = {letter: escape for escape, letter in _ESCAPES.items()}
    return "'" + "".join("\\" + turned.get(one, one) if one in turned or one in "'\\" else one for one in name) + "'"


def _mesh(reader: _NamedReader) -> tuple[list[str], list[int]]:
    names: list[str] = []
    sizes: list[int] = []
    reader.expect("[")
    for _ in reader.listed("]"):
        names.append(reader.string())
        reader.expect("=")
        sizes.append(reader.number())
        if names[-1] in names[:-1]:
            raise ParseError(f"the mesh has two axes called {shown(names[-1])}")
        if sizes[-1] < 1 or math.prod(sizes) >= 1 << 63 or len(sizes) > _MOST_AXES:
            raise ParseError(f"the mesh has a size below 1, 2**63 or more devices, or more than {_MOST_AXES} axes")
    return names, sizes


def _device_ids(reader: _NamedReader, count: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the devices of the mesh's positions, as sizes and an order of them; None if they are counted from 0."""
    reader.expect(",")
    if not reader.skip("device_ids"):
        return None
    reader.expect("=", "(")
    if reader.skip("["):
        reshape = reader.numbers("]")
        perm = tuple(range(len(reshape)))
        if reader.skip("T"):
            reader.expect("(")
            perm = reader.numbers(")")
        reader.expect(")")
        if math.prod(reshape) != count or sorted(perm) != list(range(len(reshape))):
            raise ParseError(
                f"device_ids: {shown(list(reshape))} must multiply to {count}, and {shown(list(perm))} must be an "
                "order of its dims"
            )
    else:
        listed = reader.numbers(")")
        if sorted(listed) != list(range(count)):
            raise ParseError(f"device_ids are not 0 to {count - 1}, each once")
        reshape, perm = (), listed
    reader.expect(",")
    return reshape, perm


def _axes(reader: _NamedReader, names: Sequence[str], sizes: Sequence[int], *, is_dim: bool = False) -> list[_Ref]:
    """Read `{'a', 'b':(2)2}`; a dim may end with `?`: the compiler may cut it further, and has not done so."""
    axes: list[_Ref] = []
    reader.expect("{")
    for _ in reader.listed("}"):
        if is_dim and reader.skip("?"):
            reader.expect("}")
            break
        name = reader.string()
        if name not in names:
            raise ParseError(f"the mesh has no axis {shown(name)}")
        axis = names.index(name)
        before, size = 1, sizes[axis]
        if reader.skip(":"):
            reader.expect("(")
            before = reader.number()
            reader.expect(")")
            size = reader.number()
            if before < 1 or size < 2 or size == sizes[axis] or sizes[axis] % (before * size):
                raise ParseError(f"{name}:({before}){size} is not a part of an axis of size {sizes[axis]}")
        axes.append(_Ref(axis, before, size))
    return axes


def _tiled(
    sizes: Sequence[int],
    ids: tuple[tuple[int, ...], tuple[int, ...]] | None,
    dims: list[list[_Ref]],
    groups: dict[str, list[_Ref]],
) -> NamedTiles:
    used = [*(ref for dim in dims for ref in dim), *(ref for refs in groups.values() for ref in refs)]
    # Each axis is cut where one of its parts begins or ends; the factors are numbered over all axes.
    factors: list[int] = []
    places: dict[tuple[int, int], int] = {}
    for axis, size in enumerate(sizes):
        edges = sorted(
            {1, size, *(at for ref in used if ref.axis == axis for at in (ref.before, ref.before * ref.size))}
        )
        for low, high in zip(edges, edges[1:] or [1], strict=False):
            if high % low:
                raise ParseError(f"the parts of the axis of size {size} overlap")
            places[axis, low] = len(factors)
            factors.append(high // low)

    def of(refs: list[_Ref]) -> list[int]:
        found = []
        for axis, before, size in refs:
            while size > 1:
                place = places[axis, before]
                found.append(place)
                before, size = before * factors[place], size // factors[place]
        return found

    cuts = [of(dim) for dim in dims]
    held = {kind: of(groups.get(kind, [])) for kind in _KINDS}
    taken = [place for each in (*cuts, *held.values()) for place in each]
    if len(set(taken)) != len(taken):
        raise ParseError("an axis, or a part of one, is used twice")
    held["replicated"] += [place for place, size in enumerate(factors) if size > 1 and place not in set(taken)]
    subgroups = tuple(kind for kind in _KINDS if held[kind])
    cut = [place for each in cuts for place in each]
    if not cut and len(subgroups) < 2:
        # Of one device, XLA says what is stated.
        stated = (kind for kind in _KINDS if subgroups == (kind,) or (math.prod(sizes) == 1 and groups.get(kind)))
        return NamedTiles(next(stated, "replicated"), len(dims))
    tile = tuple(math.prod(factors[place] for place in each) for each in (*cuts, *(held[kind] for kind in subgroups)))
    perm = [*cut, *(place for kind in subgroups for place in held[kind])]
    perm += [place for place, size in enumerate(factors) if size == 1]
    return NamedTiles("tiled", len(dims), tile, *_order(factors, perm, ids), subgroups)


def _order(
    factors: list[int], perm: list[int], ids: tuple[tuple[int, ...], tuple[int, ...]] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the device order of the tiles: sizes and a permutation of these, or no sizes and the device numbers."""
    if ids is None:
        return tuple(factors), tuple(perm)
    reshape, order = ids
    count = math.prod(factors)
    if count > _MOST_LISTED:
        raise ParseError(f"device_ids of {count} devices; at most {_MOST_LISTED} are read")
    numbers = np.arange(count).reshape(reshape).transpose(order) if reshape else np.array(order, np.int64)
    kept = [place for place in perm if factors[place] > 1]  # numpy has at most 64 dims.
    large = sorted(kept)
    devices = numbers.reshape([factors[place] for place in large]).transpose([large.index(place) for place in kept])
    listed = devices.ravel().tolist()
    return _strides(listed) or ((), tuple(listed))


def _strides(devices: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the sizes and the order that make these of 0, 1, …; None if there are none."""
    sizes: list[int] = []
    steps: list[int] = []
    rest, done = devices, 1
    while len(rest) > 1:
        step = rest[1] - rest[0]
        bent = next((at for at, device in enumerate(rest) if device != rest[0] + at * step), len(rest))
        if step < 1 or len(rest) % bent:
            return None
        sizes.insert(0, bent)
        steps.insert(0, step)
        rest, done = rest[::bent], done * bent
    order = sorted(range(len(sizes)), key=lambda dim: -steps[dim])
    reshape, perm = tuple(sizes[dim] for dim in order), tuple(order.index(dim) for dim in range(len(sizes)))
    if not reshape or np.array_equal(np.arange(done).reshape(reshape).transpose(perm).ravel(), devices):
        return reshape or (1,), perm or (0,)
    return None
