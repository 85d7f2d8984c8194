"""XLA's `HloSharding` text, as in `{devices=[2,4]<=[8]}`; needs no XLA.

A sharding says into how many tiles each dim is cut, and which device holds which tile; it has no axis names. Reading
one therefore needs a mesh, and finds the axes that give every device the tile that the text gives it. Device numbers
are device indices, positions in the mesh.

A named sharding, `{mesh['x'=2,'y'=4], [{'y'}, {}]}`, as XLA prints some since 2026, is read as its tiles, in the way of
XLA's own conversion: a dim that the compiler may cut further (`?`) is cut as it is now, and names are not kept.
`metadata={…}`, which says where in a program a sharding comes from, has no effect.

The text of tiles cannot express axis names, or whether an axis of size 1 cuts a dim. A layout cannot express a tensor
on one device of several (`maximal`), `manual` and `unknown` shardings, or devices in an order that no axes express.

The form is that of `xla/hlo/ir/hlo_sharding.cc` and `tile_assignment.cc`; `to_hlo` writes what JAX hands to XLA.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from .._arguments import INTEGER, check_fields, check_items, int64_array, integers_of
from .._text import counted, shown
from ..errors import LayoutError, ParseError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ._axes import axes_along, checked_layout, checked_mesh, checked_rank, layout_of_indices, spec_names
from ._hlo_named import NamedTiles, named_text, read_named, without_metadata

__all__ = ["HloSharding", "Iota", "from_hlo", "hlo_sharding", "parse_hlo", "to_hlo"]

ShardingKind = Literal["tiled", "replicated", "unreduced", "maximal", "manual", "unknown"]

_SUBGROUPS = ("replicated", "unreduced", "manual")
_INTS = r"\d{1,18}(?:\s*,\s*\d{1,18})*"
_TILED = re.compile(
    rf"devices\s*=\s*\[\s*(?P<tile>{_INTS})\s*\]\s*"
    rf"(?:<=\s*\[\s*(?P<reshape>{_INTS})\s*\]\s*(?:T\s*\(\s*(?P<perm>{_INTS})\s*\)\s*)?|(?P<devices>{_INTS})\s*)"
    r"(?:(?P<last>last_tile_dim_replicate)|last_tile_dims\s*=\s*\{\s*(?P<types>[a-z]+(?:\s*,\s*[a-z]+)*)?\s*\})?",
    re.ASCII,
)
_MAXIMAL = re.compile(r"maximal\s+device\s*=\s*(\d{1,18})", re.ASCII)


@dataclass(frozen=True)
class Iota:
    """Device numbers 0, 1, … reshaped and transposed: `<=[2,4]T(1,0)`."""

    reshape: tuple[int, ...]
    perm: tuple[int, ...]

    def __post_init__(self) -> None:
        # A list could be changed, and has no hash.
        object.__setattr__(self, "reshape", integers_of("reshape", self.reshape))
        object.__setattr__(self, "perm", integers_of("perm", self.perm))

    @property
    def devices(self) -> npt.NDArray[np.int64]:
        """The numbers of the devices as a flat array.

        >>> Iota((2, 3), (1, 0)).devices.tolist()
        [0, 3, 1, 4, 2, 5]
        """
        count = math.prod(self.reshape)
        try:
            numbers = np.arange(count, dtype=np.int64)
        except ValueError:  # what numpy raises for a size that no address space holds
            raise MemoryError(f"no room for the numbers of {count} devices") from None
        # Without sizes of 1, of which there may be more than numpy has dims.
        short = self.canonical()
        devices: npt.NDArray[np.int64] = numbers.reshape(short.reshape).transpose(short.perm).ravel()
        return devices

    def canonical(self) -> Iota:
        """Return the shortest form: without sizes of 1, and with dims that stay side by side merged, as XLA writes it.

        >>> Iota((2, 1, 2, 2), (2, 3, 1, 0)).canonical()
        Iota(reshape=(2, 4), perm=(1, 0))
        """
        kept = [dim for dim, size in enumerate(self.reshape) if size > 1]
        position = {dim: i for i, dim in enumerate(kept)}
        runs: list[list[int]] = []
        for dim in (position[dim] for dim in self.perm if dim in position):
            if runs and runs[-1][-1] == dim - 1:
                runs[-1].append(dim)
            else:
                runs.append([dim])
        order = sorted(range(len(runs)), key=lambda i: runs[i][0])
        reshape = tuple(math.prod(self.reshape[kept[dim]] for dim in runs[i]) for i in order)
        perm = tuple(order.index(i) for i in range(len(runs)))
        return Iota(reshape, perm) if runs else Iota((1,), (0,))

    def __str__(self) -> str:
        transposed = f"T({_joined(self.perm)})" if len(self.perm) > 1 else ""
        return f"<=[{_joined(self.reshape)}]{transposed}"


@dataclass(frozen=True)
class HloSharding:
    """An XLA sharding: `str()` writes it, `parse_hlo` reads it.

    >>> parse_hlo("{devices=[2,1,4]<=[8] last_tile_dim_replicate}").boxes((4, 6))[[0, 7]].tolist()
    [[[0, 2], [0, 6]], [[2, 4], [0, 6]]]
    """

    #: The kind of sharding; all but `"tiled"` are for tensors of any rank.
    kind: ShardingKind
    #: Tiles per dim, followed by those of the subgroups.
    tile: tuple[int, ...] = ()
    #: The device that holds each tile: the device numbers in the C order of the tiles.
    order: Iota | tuple[int, ...] = ()
    #: The meaning of each of the last entries of `tile`: `"replicated"`, `"unreduced"` or `"manual"`.
    subgroups: tuple[str, ...] = ()
    #: The device of a `"maximal"` sharding.
    device: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tile", integers_of("tile", self.tile))
        object.__setattr__(self, "subgroups", tuple(self.subgroups))
        if not isinstance(self.order, Iota):
            object.__setattr__(self, "order", integers_of("order", self.order))
        check_fields(self, kind=str, device=INTEGER)
        check_items("subgroups", self.subgroups, str)

    @property
    def num_tiles(self) -> tuple[int, ...]:
        """Tiles per tensor dim."""
        return self.tile[: len(self.tile) - len(self.subgroups)]

    @property
    def num_devices(self) -> int:
        """The number of devices of a tiled sharding."""
        return math.prod(self.tile)

    def tile_indices(self) -> npt.NDArray[np.int64]:
        """Return every device's index along each entry of `tile`: int64 (devices, entries)."""
        devices = self.order.devices if isinstance(self.order, Iota) else np.array(self.order, np.int64)
        indices = np.zeros((self.num_devices, len(self.tile)), np.int64)
        # For the others every index is 0; there may be more of them than numpy has dims.
        cut = [entry for entry, size in enumerate(self.tile) if size != 1]
        sizes = [self.tile[entry] for entry in cut]
        for entry, along in zip(cut, np.indices(sizes, np.int64), strict=True):
            indices[devices, entry] = along.ravel()
        return indices

    def boxes(self, shape: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return start and stop of every device's tile of a tensor: int64 (devices, dims, 2).

        A dim that does not divide is cut by XLA's rule: tile `i` is `[min(i·s, n), min((i + 1)·s, n))` with
        `s = ceil(n / k)`.

        Raises:
            LayoutError: if the sharding is not tiled, or its rank is not the shape's.
        """
        rank = len(self.num_tiles)
        sizes = int64_array("shape", shape)
        if self.kind != "tiled" or len(sizes) != rank:
            raise LayoutError(
                f"shape {shown(tuple(shape))}: the sharding {self} does not tile {counted(len(sizes), 'dim')}"
            )
        # A mesh of the tiles, each dim cut by an axis of its own: device `i` of it holds tile `i`.
        mesh = DeviceMesh(self.num_tiles or (1,), [f"dim {dim}" for dim in range(max(rank, 1))])
        partition = TensorLayout(mesh.axis_names[:rank], mesh).partition(sizes.tolist(), "ceil")
        tiles = self.tile_indices()[:, :rank] @ np.array(mesh.strides[:rank], np.int64)
        return partition.boxes()[tiles]

    def __str__(self) -> str:
        if self.kind != "tiled":
            return f"{{maximal device={self.device}}}" if self.kind == "maximal" else f"{{{self.kind}}}"
        order = str(self.order) if isinstance(self.order, Iota) else _joined(self.order)
        last = {(): "", ("replicated",): " last_tile_dim_replicate"}.get(
            self.subgroups, f" last_tile_dims={{{', '.join(self.subgroups)}}}"
        )
        return f"{{devices=[{_joined(self.tile)}]{order}{last}}}"


def hlo_sharding(layout: TensorLayout) -> HloSharding:
    """Return the XLA sharding of a layout, with the devices as an iota.

    Raises:
        LayoutError: if the layout has no mesh.

    >>> mesh = DeviceMesh((2, 4), ("data", "model"))
    >>> hlo_sharding(TensorLayout((None, "model"), mesh)).num_tiles
    (1, 4)
    """
    layout, mesh = checked_layout(checked_layout(layout)[0].refined())
    large = [name for name, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1]
    cutting = [name for spec in layout.axes for name in spec_names(spec) if name in large]
    groups = {
        "unreduced": [name for name in large if name in layout.unreduced],
        "replicated": [name for name in large if name in layout.replicated_axes],
    }
    subgroups = tuple(kind for kind, names in groups.items() if names)
    if not cutting and len(subgroups) < 2:
        return HloSharding("unreduced" if "unreduced" in subgroups else "replicated")
    tails = [math.prod(map(mesh.axis_size, groups[kind])) for kind in subgroups]
    perm = [mesh.axis_names.index(name) for name in [*cutting, *groups["unreduced"], *groups["replicated"]]]
    rest = [axis for axis, size in enumerate(mesh.shape) if size == 1]
    iota = Iota(mesh.shape, (*perm, *rest)).canonical()
    return HloSharding("tiled", (*layout.num_shards, *tails), iota, subgroups)


def to_hlo(layout: TensorLayout, *, iota: bool = True, named: bool = False) -> str:
    """Write a layout as an XLA sharding.

    Args:
        layout: a layout with a mesh.
        iota: whether to write the devices as JAX and XLA do now, `<=[2,4]T(1,0)`, or to list them, as older versions
            did.
        named: whether to write a named sharding, which has the axes of the mesh and no tiles.

    Raises:
        LayoutError: if the layout has no mesh.

    >>> mesh = DeviceMesh((2, 4), ("data", "model"))
    >>> to_hlo(TensorLayout(("model", "data"), mesh))
    '{devices=[4,2]<=[2,4]T(1,0)}'
    >>> to_hlo(TensorLayout(("model", "data"), mesh), iota=False)
    '{devices=[4,2]0,4,1,5,2,6,3,7}'
    >>> to_hlo(TensorLayout((None, "data"), mesh))
    '{devices=[1,2,4]<=[8] last_tile_dim_replicate}'
    >>> to_hlo(TensorLayout((("model", "data"), None), mesh), named=True)
    "{mesh['data'=2,'model'=4], [{'model', 'data'}, {}]}"
    """
    if named:
        plain, mesh = checked_layout(layout)
        dims = [spec_names(spec) for spec in plain.axes]
        return named_text(list(zip(mesh.axis_names, mesh.shape, strict=True)), dims, plain.unreduced)
    sharding = hlo_sharding(layout)
    if not iota and isinstance(sharding.order, Iota):
        listed = tuple(sharding.order.devices.tolist())
        sharding = HloSharding(sharding.kind, sharding.tile, listed, sharding.subgroups)
    return str(sharding)


def from_hlo(text: str, mesh: DeviceMesh, rank: int | None = None) -> TensorLayout:
    """Read an XLA sharding as a layout over `mesh`: the one whose shards are the tiles, for every device.

    Args:
        text: the sharding, in braces.
        mesh: the mesh; the device numbers in the text are its device indices.
        rank: the number of dims; needed for `{replicated}` and `{unreduced}`, which do not say it.

    Raises:
        ParseError: if the text is not a sharding.
        LayoutError: if no layout over the mesh has these tiles.

    There is at most one such layout, except for axes of size 1, which it leaves unused.

    >>> mesh = DeviceMesh((2, 4), ("data", "model"))
    >>> from_hlo("{devices=[8,1]<=[2,4]T(1,0)}", mesh).axes
    (('model', 'data'), None)
    >>> from_hlo("{devices=[2,4]0,1,2,3,4,5,7,6}", mesh)
    Traceback (most recent call last):
    shardwise.errors.LayoutError: '{devices=[2,4]0,1,2,3,4,5,7,6}': no axes of DeviceMesh((2, 4), ('data', 'model')), in
    any order, cut dim 1 into 4 so that every device gets the shard it is given here
    """
    sharding, said = _parsed(text)
    checked_mesh(mesh)
    if said is not None and rank is not None and said != checked_rank(rank):
        raise LayoutError(f"rank is {rank}, but {shown(text)} is of rank {said}")
    rank = said if rank is None else rank
    if sharding.kind == "maximal" and mesh.size == 1 and sharding.device == 0:
        sharding = HloSharding("replicated")
    if sharding.kind in ("replicated", "unreduced"):
        if rank is None:
            raise LayoutError(f"rank is needed: {shown(text)} is a sharding of tensors with any number of dims")
        large = [name for name in mesh.axis_names if mesh.axis_size(name) > 1]
        unreduced = large if sharding.kind == "unreduced" else ()
        return TensorLayout((None,) * checked_rank(rank), mesh, unreduced=unreduced)
    if sharding.kind != "tiled" or "manual" in sharding.subgroups:
        raise LayoutError(f"{shown(text)}: a layout cannot express a {sharding.kind} sharding{_why(sharding)}")
    if rank is not None and len(sharding.num_tiles) != checked_rank(rank):
        raise LayoutError(f"rank is {rank}, but {shown(text)} tiles {counted(len(sharding.num_tiles), 'dim')}")
    if sharding.num_devices != mesh.size:
        raise LayoutError(
            f"{shown(text)} is over {counted(sharding.num_devices, 'device')}, but the mesh has {mesh.size}"
        )
    indices = sharding.tile_indices()
    summed: list[str] = []
    for entry, kind in enumerate(sharding.subgroups, len(sharding.num_tiles)):
        # The order of replicas does not matter, but which devices hold the summands of one sum does.
        if kind == "unreduced":
            names = axes_along(mesh, indices[:, entry], sharding.tile[entry])
            if names is None:
                raise LayoutError(f"{shown(text)}: no axes of {shown(mesh)} have these partial sums")
            summed += names
    return layout_of_indices(repr(text), mesh, indices, sharding.num_tiles, summed)


def parse_hlo(text: str) -> HloSharding:
    """Read an XLA sharding as it stands, without a mesh.

    Raises:
        ParseError: if the text is not a sharding of one tensor, or its devices are not 0 to n - 1, each once.

    >>> parse_hlo("{maximal device=3}").device
    3
    >>> str(parse_hlo("{devices=[4,2]<=[2,2,2]T(1,2,0)}"))
    '{devices=[4,2]<=[2,4]T(1,0)}'
    """
    return _parsed(text)[0]


def _parsed(text: str) -> tuple[HloSharding, int | None]:
    """Return the sharding that a text stands for; and the number of dims, if it is a named one."""
    if not isinstance(text, str):
        raise TypeError(f"text must be a str, got {type(text).__name__}")
    body = text.strip()
    if not (body.startswith("{") and body.endswith("}")):
        raise ParseError(f"{_shown(text)} is not a sharding in braces, for example {{devices=[2,4]<=[8]}}")
    try:
        body = without_metadata(body[1:-1]).strip()
        named = read_named(body)
    except ParseError as error:
        raise ParseError(f"{_shown(text)}: {error}") from None
    return (_unnamed(text, body), None) if named is None else (_of_named(named), named.rank)


def _of_named(named: NamedTiles) -> HloSharding:
    order = Iota(named.reshape, named.perm).canonical() if named.reshape else named.perm
    kind: ShardingKind = named.kind  # type: ignore[assignment]
    return HloSharding(kind, named.tile, order, named.subgroups, named.device)


def _unnamed(text: str, body: str) -> HloSharding:
    for kind in ("replicated", "unreduced", "manual", "unknown"):
        if body == kind:
            return HloSharding(kind)
    if maximal := _MAXIMAL.fullmatch(body):
        return HloSharding("maximal", device=int(maximal[1]))
    tiled = _TILED.fullmatch(body)
    if tiled is None:
        raise ParseError(
            f"{_shown(text)} is not a supported sharding of one tensor; examples: {{devices=[2,4]<=[8]}}, "
            "{devices=[2,2]0,2,1,3}, {mesh['x'=2,'y'=4], [{'y'}, {}]}, {replicated}, {maximal device=0}"
        )
    return _tiled(text, tiled)


def _tiled(text: str, match: re.Match[str]) -> HloSharding:
    tile = _ints(match["tile"])
    types = tuple(re.findall("[a-z]+", match["types"] or ""))
    subgroups = ("replicated",) if match["last"] else types
    for kind in subgroups:
        if kind not in _SUBGROUPS:
            raise ParseError(
                f"{_shown(text)}: last_tile_dims holds {shown(kind)}; the types are {', '.join(_SUBGROUPS)}"
            )
    if len(subgroups) > len(tile):
        raise ParseError(
            f"{_shown(text)}: {counted(len(subgroups), 'type')} of last tile dims, but {counted(len(tile), 'tile dim')}"
        )
    order: Iota | tuple[int, ...]
    if match["devices"] is None:
        reshape = _ints(match["reshape"])
        if match["perm"] is None and len(reshape) > 1:
            raise ParseError(f"{_shown(text)}: <={shown(list(reshape))} needs a T(…) that says the order of its dims")
        perm = _ints(match["perm"] or "0")
        if sorted(perm) != list(range(len(reshape))):
            raise ParseError(f"{_shown(text)}: T({shown(perm)}) is not an order of {counted(len(reshape), 'dim')}")
        order, count = Iota(reshape, perm).canonical(), _product(text, reshape)
    else:
        order = _ints(match["devices"])
        count = len(order)
        if sorted(order) != list(range(count)):
            raise ParseError(f"{_shown(text)}: the devices are not 0 to {count - 1}, each once")
    tiles = _product(text, tile)
    if tiles != count or count < 1:
        raise ParseError(f"{_shown(text)}: {counted(tiles, 'tile')}, but {counted(count, 'device')}")
    return HloSharding("tiled", tile, order, subgroups)


def _why(sharding: HloSharding) -> str:
    if sharding.kind == "maximal":
        return f": device {sharding.device} alone holds the tensor, but in a layout every device holds a shard"
    return ", which leaves the cut to the program"


def _product(text: str, sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
        if product > 2**63 - 1:
            raise ParseError(f"{_shown(text)}: the product of the sizes {shown(list(sizes))} is over 2**63 - 1")
    return product


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 200 else f"{text[:200]!r}…"


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
