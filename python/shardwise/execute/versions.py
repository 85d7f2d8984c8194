"""The agreement of two sides before a byte moves: on the plan, the version of the weights, and the memory of each."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from .._arguments import instance, integer
from .._dtypes import bits_of
from .._text import counted, shown
from ..errors import LayoutError, ParseError
from ..reshard import Descriptors
from ..reshard.model.memory import Block, check_apart
from ..reshard.model.transport import name_of_dtype

__all__ = ["MemoryManifest", "MemoryRange", "check_manifests", "difference_error", "range_of"]

_FORMAT = "shardwise memory 1"
#: Addresses are of 64 bits.
_END = 2**64
_INTEGER = re.compile(r"u?int\d+|\|V\d+")


class MemoryRange(NamedTuple):
    """Bytes in the memory of a process.

    Attributes:
        address: The address of the first byte.
        nbytes: Their number.
        device: The device of this memory, as PyTorch calls it: `"cpu"`, `"cuda:3"`.
    """

    address: int
    nbytes: int
    device: str = "cpu"


@dataclass(frozen=True, eq=False, repr=False)
class MemoryManifest:
    """All that a peer has to know of a holder to read its memory, or to write into it; `MemoryManifest.of` makes one.

    Attributes:
        holder: The label of the holder.
        version: The version of the weights that are sent, a text of your choice, such as `"step 1200"`.
        plans: For each peer the digest of what the two send to each other.
        src: The memory that is read, by tensor.
        out: The memory that is written, by tensor.
        blocks: The memory as it is registered; each range is within one of these.

    Raises:
        LayoutError: if a range is not a range of addresses, or is written to and shares memory with another.
    """

    holder: Any
    version: str
    plans: Mapping[Any, str]
    src: Mapping[str, MemoryRange]
    out: Mapping[str, MemoryRange]
    blocks: tuple[MemoryRange, ...]
    _made: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.holder, (str, int)) or isinstance(self.holder, bool):
            raise LayoutError(f"the label {shown(self.holder)} cannot be sent to others: it must be a str or an int")
        instance("version", self.version, str)
        sides = [
            [Block(f"{what}[{name!r}]", at, at + size, device) for name, (at, size, device) in ranges.items()]
            for what, ranges in (("src", self.src), ("out", self.out))
        ]
        listed = [Block(f"blocks[{number}]", at, at + size, on) for number, (at, size, on) in enumerate(self.blocks)]
        for name, start, stop, _ in (*sides[0], *sides[1], *listed):
            if not 0 <= start <= stop <= _END or stop - start >= _END // 2:
                raise LayoutError(f"{name} is {stop - start} bytes at {start}, which is beyond addresses of 64 bits")
        check_apart(sides[1], sides[0])

    @classmethod
    def of(
        cls,
        part: Descriptors,
        src: Mapping[str, Any],
        out: Mapping[str, Any],
        *,
        version: str,
        blocks: Iterable[Any] | None = None,
    ) -> MemoryManifest:
        """Return the manifest of a holder's arrays.

        Args:
            part: what the holder sends, receives and copies: `ModelPlan.descriptors`.
            src: the arrays that the holder has, by tensor: arrays of numpy or tensors of PyTorch, in C order, or a
                `MemoryRange`.
            out: the arrays to write into, by tensor, which share no memory with those of `src`, nor with one another.
            version: the version of the weights that are sent, the same on both sides.
            blocks: the arrays as they are registered with the transport, such as the parameters, if the arrays of `out`
                are views of them; by default each array on its own. Rows that follow each other in one block are
                joined.

        Raises:
            LayoutError: if an array is missing, too small, not in C order, of another dtype than the plan has, or is in
                no block; if an array to write into shares memory with another.
            TypeError: if one of `src` or `out` is not an array.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_model
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> rows, whole = TensorLayout(("x",), mesh), TensorLayout((None,), mesh)
        >>> part = plan_model({"w": rows}, {"w": whole}, {"w": ((4,), "float32")}).descriptors("cpu:1")
        >>> memory = MemoryManifest.of(part, {"w": np.ones(2, "f4")}, {"w": np.zeros(4, "f4")}, version="step 7")
        >>> memory.version, memory.src["w"].nbytes, memory.out["w"].nbytes, list(memory.plans)
        ('step 7', 8, 16, ['cpu:0'])
        """
        instance("part", part, Descriptors)
        ranges = []
        for what, arrays, side, used in (
            ("src", src, "src", (part.sends, part.copies)),
            ("out", out, "dst", (part.receives, part.copies, part.zeros)),
        ):
            numbers = np.unique(np.concatenate([rows[f"{side}_tensor"] for rows in used])).tolist()
            found = {}
            for number in numbers:
                name = part.tensors[number]
                if name not in arrays:
                    raise LayoutError(f"{what} has no array for {shown(name)}")
                found[name] = range_of(f"{what}[{name!r}]", arrays[name], part.dtypes[number], what == "out")
            ranges.append(found)
        used_peers = np.unique(np.concatenate([part.sends["peer"], part.receives["peer"]])).tolist()
        plans = {part.peers[peer]: part.digest(part.peers[peer]).hex() for peer in used_peers}
        if blocks is None:
            listed = tuple(dict.fromkeys([*ranges[0].values(), *ranges[1].values()]))
        else:
            listed = tuple(range_of(f"blocks[{number}]", block) for number, block in enumerate(blocks))
            check_apart([Block(f"blocks[{n}]", at, at + size, on) for n, (at, size, on) in enumerate(listed)], [])
        return cls(part.holder, version, plans, ranges[0], ranges[1], listed)

    def of_version(self, version: str) -> MemoryManifest:
        """Return the manifest of another version in the same memory."""
        return replace(self, version=version)

    def sorted_blocks(self) -> list[tuple[str, int, int, int]]:
        """Return device, address, bytes and position of each block, in order."""
        if "blocks" not in self._made:
            listed = ((one.device, one.address, one.nbytes, number) for number, one in enumerate(self.blocks))
            self._made["blocks"] = sorted(listed)
        found: list[tuple[str, int, int, int]] = self._made["blocks"]
        return found

    @property
    def digest(self) -> str:
        """The digest of everything: version, plans and memory."""
        if "digest" not in self._made:
            text = json.dumps(self._described(), sort_keys=True)
            self._made["digest"] = hashlib.sha256(text.encode()).hexdigest()
        return str(self._made["digest"])

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest and its digest, ready for JSON."""
        return {**self._described(), "digest": self.digest}

    def _described(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "holder": self.holder,
            "version": self.version,
            "plans": [[label, digest] for label, digest in self.plans.items()],
            "src": {name: list(one) for name, one in self.src.items()},
            "out": {name: list(one) for name, one in self.out.items()},
            "blocks": [list(one) for one in self.blocks],
        }

    @classmethod
    def from_dict(cls, value: Any) -> MemoryManifest:
        """Read what `to_dict` gives.

        Raises:
            ParseError: if `value` is not a manifest, or its digest does not fit.
        """
        if not isinstance(value, Mapping) or value.get("format") != _FORMAT:
            raise ParseError("this is not a manifest of memory")
        try:
            plans = {label: str(digest) for label, digest in value["plans"]}
            sides = [{str(name): _read_range(one) for name, one in value[what].items()} for what in ("src", "out")]
            blocks = tuple(_read_range(one) for one in value["blocks"])
            made = cls(value["holder"], value["version"], plans, sides[0], sides[1], blocks)
        except (AttributeError, KeyError, TypeError, ValueError, LayoutError) as error:
            raise ParseError(f"the manifest of memory cannot be read: {type(error).__name__}: {error}") from None
        if value.get("digest") != made.digest:
            raise ParseError(
                f"the manifest of {shown(made.holder)} has digest {made.digest}, but says {shown(value.get('digest'))}"
            )
        return made

    def __eq__(self, other: object) -> bool:
        return self._described() == other._described() if isinstance(other, MemoryManifest) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        blocks = counted(len(self.blocks), "block")
        return f"<MemoryManifest of {shown(self.holder)}, version {shown(self.version)}: {blocks}>"


def check_manifests(own: MemoryManifest, other: MemoryManifest, announced: str | None = None) -> None:
    """Refuse two sides that have different plans or versions, or whose memory has changed since they described it.

    Args:
        own: the manifest of this side.
        other: the manifest of the other side, as this side knows it.
        announced: the digest of the other side's manifest, as the other side gives it now; without it, only what
            `other` itself says is compared.

    Raises:
        LayoutError: if the two sides do not agree; the message has the digests of both.

    `address_rows` calls it, so no row is made for two sides that disagree. Before each further version both sides send
    their digest, and call this function with `own.of_version(version)`, `other.of_version(version)` and the digest that
    they received.
    """
    instance("own", own, MemoryManifest)
    instance("other", other, MemoryManifest)
    whose = shown(own.holder), shown(other.holder)
    if own is not other and own.holder != other.holder:
        plans = own.plans.get(other.holder, "none"), other.plans.get(own.holder, "none")
        if plans[0] != plans[1]:
            raise difference_error("plans for each other", whose, plans)
    if own.version != other.version:
        said = f"{shown(own.version)} (manifest {own.digest})", f"{shown(other.version)} (manifest {other.digest})"
        raise difference_error("versions", whose, said)
    if announced is not None and announced != other.digest:
        raise LayoutError(
            f"{whose[1]} now has the manifest {announced}, but {whose[0]} knows {other.digest}: another version, plan "
            "or memory. Nothing has been sent; exchange manifests again"
        )


def difference_error(what: str, whose: tuple[str, str], digests: tuple[str, str]) -> LayoutError:
    """Return the error of two sides that should have the same of something."""
    return LayoutError(
        f"{whose[0]} and {whose[1]} have different {what}: {digests[0]} and {digests[1]}. Nothing has been sent"
    )


def range_of(what: str, array: Any, dtype: str | None = None, is_written: bool = False) -> MemoryRange:
    """Return the memory of an array in C order.

    Args:
        what: what messages call it.
        array: a numpy array, a tensor of PyTorch, or a `MemoryRange`.
        dtype: the dtype that it should have; bytes may be of any.
        is_written: whether it must be writable.
    """
    if isinstance(array, MemoryRange):
        return MemoryRange(integer(f"{what}.address", array.address), integer(f"{what}.nbytes", array.nbytes), array[2])
    if hasattr(array, "data_ptr") and hasattr(array, "is_contiguous"):
        size, is_run, device = array.element_size(), array.is_contiguous(), str(array.device)
        address, nbytes = int(array.data_ptr()), array.numel() * size
    elif isinstance(array, np.ndarray):
        size, is_run, device = array.itemsize, array.flags.c_contiguous, "cpu"
        address, nbytes = int(array.__array_interface__["data"][0]), array.nbytes
        if is_written and not array.flags.writeable:
            raise LayoutError(f"{what} is read-only")
    else:
        raise TypeError(f"{what} must be an array of numpy, a tensor of PyTorch or a MemoryRange, got {shown(array)}")
    if not is_run:
        raise LayoutError(f"{what} is not in C order")
    if dtype is not None:
        _check_dtype(what, array.dtype, size, dtype)
    return MemoryRange(address, nbytes, device)


def _check_dtype(what: str, given: Any, size: int, wanted: str) -> None:
    """Refuse an array of another dtype than the plan has; bytes and integers of the same size hold anything."""
    name, bits = name_of_dtype(given), bits_of(wanted)
    # Elements that share bytes are in arrays of bytes: in one of their own dtype each has a byte.
    if name == wanted and bits % 8 == 0:
        return
    is_plain = name in ("uint8", "int8") or (bits % 8 == 0 and 8 * size == bits and _INTEGER.fullmatch(name))
    if not is_plain:
        raise LayoutError(f"{what} is of dtype {given}, but the plan has {wanted}")


def _read_range(value: Any) -> MemoryRange:
    address, nbytes, device = value
    return MemoryRange(integer("address", address), integer("nbytes", nbytes), instance("device", device, str))
