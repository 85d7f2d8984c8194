"""Manifests: where each tensor of a model is in a deployment, as JSON that any program can read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._arguments import optional, sizes_of
from .._atomic import read_file, replace_file
from .._dtypes import find_dtype
from .._text import shown
from ..errors import LayoutError, ParseError, ShardwiseError
from ..layout import TensorLayout, UnevenRule
from ..mesh import DeviceMesh
from ..packed import PackedDim, parse
from ..rules.layout_rule import checked_uneven
from ..tiling import Tiling
from .parameters import shapes_of

__all__ = ["Manifest", "ManifestTensor", "manifest_of"]

_FORMAT = "shardwise deployment"
_VERSION = 2


@dataclass(frozen=True)
class ManifestTensor:
    """One tensor of a manifest.

    Attributes:
        shape: Its shape.
        dtype: The name of its dtype.
        layout: How it is cut, over the devices that hold it; or who holds which boxes, if no layout says that.
        uneven: The rule by which dims that do not divide are cut by a layout.
        digest: A digest of its elements, in whatever way the two sides agree on, or `None`.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: TensorLayout | Tiling
    uneven: UnevenRule = "even"
    digest: str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Manifest(Mapping[str, Tiling]):
    """The places of all tensors of a model: a mapping from names to tilings; `Deployment.manifest` makes one.

    So do `shardwise.interop.torch.manifest_of`, of the tensors of a running model, `shardwise.store.manifest_of`, of a
    checkpoint, and `from_mooncake`. A manifest goes wherever a mapping of tilings goes:
    `plan_model(manifest, engine, manifest.tensors)`. Tensors that are cut alike share a tiling.

    Attributes:
        tensors: The tensors by name.
    """

    tensors: Mapping[str, ManifestTensor]
    _made: dict[Any, Tiling] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tiling:
        tensor = self.tensors[name]
        if isinstance(tensor.layout, Tiling):
            return tensor.layout
        key = id(tensor.layout), tensor.shape, tensor.uneven
        if key not in self._made:
            self._made[key] = tensor.layout.partition(tensor.shape, tensor.uneven)
        return self._made[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __eq__(self, other: object) -> bool:
        return self.tensors == other.tensors if isinstance(other, Manifest) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.tensors.items()))

    def __repr__(self) -> str:
        return f"<Manifest of {len(self)} tensors>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Manifest, (dict(self.tensors),)

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest, ready for JSON.

        `meshes` has shapes, axis names and devices; `layouts` names for each a mesh by its number, and has the axes of
        each dim, or its parts as text; or it has holders, and for each its boxes, which are one after the other in its
        array. `tensors` has for each the number of its layout, its shape and its dtype, and its digest if it has one.

        Raises:
            LayoutError: if a device label is neither string nor integer; if boxes lie otherwise in their array.
        """
        meshes: dict[DeviceMesh, int] = {}
        layouts: dict[tuple[TensorLayout | Tiling, UnevenRule], int] = {}
        #: Most tensors have the very object that others have, which is sooner found than an equal one.
        known: dict[tuple[int, UnevenRule], int] = {}
        tensors = {}
        for name, tensor in self.tensors.items():
            layout = tensor.layout
            number = known.get((id(layout), tensor.uneven))
            if number is None:
                if isinstance(layout, TensorLayout):
                    if layout.device_mesh is None:
                        raise LayoutError(f"tensor {shown(name)} has a layout without a mesh")
                    meshes.setdefault(layout.device_mesh, len(meshes))
                number = known[id(layout), tensor.uneven] = layouts.setdefault((layout, tensor.uneven), len(layouts))
            entry = [number, list(tensor.shape), tensor.dtype]
            tensors[name] = entry if tensor.digest is None else [*entry, tensor.digest]
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "meshes": [_mesh_dict(mesh) for mesh in meshes],
            "layouts": [_layout_dict(layout, uneven, meshes) for layout, uneven in layouts],
            "tensors": tensors,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the manifest as JSON; an existing file is replaced as a whole.

        Raises:
            LayoutError: if a device label is neither string nor integer.
            OSError: if the file cannot be written.
        """
        replace_file(path, (json.dumps(self.to_dict()) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Manifest:
        """Read the JSON that `save` has written.

        Raises:
            ParseError: if it is not a manifest.
            OSError: if it cannot be read.
        """
        return cls.from_dict(_read_json(path), repr(os.fspath(path)))

    @classmethod
    def from_dict(cls, value: Any, source: str = "the manifest") -> Manifest:
        """Return the manifest that a dict of `to_dict` describes.

        Args:
            value: the manifest.
            source: what messages call it.

        Raises:
            ParseError: if it is not a manifest.

        >>> from shardwise import DeviceMesh
        >>> from shardwise.deploy import Deployment
        >>> one = Deployment(2, DeviceMesh((2,), ("tp",)), {"w": ("tp",)}).manifest({"w": ((4,), "float32")})
        >>> Manifest.from_dict(one.to_dict()) == one
        True
        """
        if not isinstance(value, Mapping) or value.get("format") != _FORMAT:
            raise ParseError(f"{source} is not a manifest of a deployment")
        if value.get("version") != _VERSION:
            raise ParseError(f"{source} is of version {shown(value.get('version'))}; this reads version {_VERSION}")
        place = ""
        try:
            meshes = []
            for number, mesh in enumerate(_listed("meshes", value["meshes"])):
                place = f"meshes[{number}]"
                meshes.append(DeviceMesh(mesh["shape"], mesh["axis_names"], mesh.get("devices")))
            layouts: list[tuple[Any, UnevenRule]] = []
            for number, entry in enumerate(_listed("layouts", value["layouts"])):
                place = f"layouts[{number}]"
                if "boxes" in entry:
                    layouts.append((_read_boxes(entry), "even"))
                    continue
                axes = [_read_axes(axis) for axis in entry["axes"]]
                unreduced = _listed("unreduced", entry["unreduced"])
                layout = TensorLayout(axes, meshes[_number(entry["mesh"], len(meshes))], unreduced=unreduced)
                layouts.append((layout, checked_uneven(entry["uneven"])))
            tensors = {}
            tilings: dict[Any, Tiling] = {}
            for name, (number, given, dtype, *digest) in value["tensors"].items():
                place = f"tensor {shown(name)}"
                held, uneven = layouts[_number(number, len(layouts))]
                shape = sizes_of("the shape", given)
                if isinstance(held, dict):
                    if (number, shape) not in tilings:
                        tilings[number, shape] = _tiling_of(shape, held)
                    held = tilings[number, shape]
                tensors[name] = ManifestTensor(shape, _dtype_name(dtype), held, uneven, _digest_of(digest))
            made = cls(tensors)
            for name in made:
                place = f"tensor {shown(name)}"
                made[name]  # Refuses a shape that its layout does not fit.
        except ShardwiseError as error:
            raise ParseError(f"{source}: {place}: {error}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
            raise ParseError(f"{source}: {place or 'its keys'} cannot be read: {said}") from None
        return made

    @classmethod
    def from_mooncake(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> Manifest:
        """Read a placement of weights as `mooncake.reshard` writes it: `weight_placement_to_json`.

        Args:
            source: the path of the file, or what it holds, parsed.

        Raises:
            ParseError: if it is not such a placement, or its fragments do not make up its tensors.
            OSError: if it cannot be read.

        Holders are Mooncake's participants. The names of a tensor's aliases are not read: they are tensors of their own
        in the placement.

        >>> part = {"tensor_id": "w", "global_offset": [2], "local_shape": [2]}
        >>> placement = {
        ...     "resource_kind": "model_weight",
        ...     "tensors": [{"tensor_id": "w", "global_shape": [4], "dtype": "bfloat16", "itemsize": 2}],
        ...     "parts": [
        ...         {"participant_id": "a", "fragments": [part]},
        ...         {"participant_id": "b", "fragments": [part | {"global_offset": [0]}]},
        ...     ],
        ... }
        >>> Manifest.from_mooncake(placement)["w"].pieces("a")
        [Piece(box=(slice(2, 4, None),), start=(0,))]
        """
        name = "the placement"
        if not isinstance(source, Mapping):
            name = repr(os.fspath(source))
            source = _read_json(source)
        if not isinstance(source, Mapping) or source.get("resource_kind") != "model_weight":
            raise ParseError(f"{name} is not a placement of weights of Mooncake")
        place = "its keys"
        try:
            boxes: dict[str, dict[str, list[list[tuple[int, int]]]]] = {}
            for part in _listed("parts", source["parts"]):
                holder = part["participant_id"]
                place = f"the part of {shown(holder)}"
                _check_label(holder)
                for fragment in _listed("fragments", part["fragments"]):
                    starts = sizes_of("global_offset", fragment["global_offset"])
                    sizes = sizes_of("local_shape", fragment["local_shape"])
                    box = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
                    held = boxes.setdefault(fragment["tensor_id"], {})
                    held.setdefault(holder, []).append(box)
            tensors, made = {}, {}
            for tensor in _listed("tensors", source["tensors"]):
                tensor_id = tensor["tensor_id"]
                place = f"tensor {shown(tensor_id)}"
                if not isinstance(tensor_id, str):
                    raise LayoutError("its name must be text")
                shape, dtype = sizes_of("global_shape", tensor["global_shape"]), _dtype_name(tensor["dtype"])
                held = boxes.pop(tensor_id, {})
                key = repr((shape, held))
                if key not in made:
                    made[key] = _tiling_of(shape, held)
                if tensor_id in tensors:
                    raise LayoutError("it is listed twice")
                tensors[tensor_id] = ManifestTensor(shape, dtype, made[key])
        except ShardwiseError as error:
            raise ParseError(f"{name}: {place}: {error}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ParseError(f"{name}: {place} cannot be read: {type(error).__name__}: {error}") from None
        if boxes:
            raise ParseError(f"{name} has fragments of {shown(next(iter(boxes)))}, which is not among its tensors")
        return cls(tensors)


def manifest_of(
    deployment: Any, tensors: Mapping[str, Any], uneven: UnevenRule, digests: Mapping[str, str] | None
) -> Manifest:
    """Return where each tensor of a deployment is; see `Deployment.manifest`."""
    optional("digests", digests, Mapping)  # type: ignore[type-abstract]
    found, fitting = {}, set()
    for name, shape in shapes_of(tensors).items():
        (layout, own, _), given = deployment.placed(name, len(shape)), tensors[name]
        # Tensors of one place have one layout, and of one shape it fits all of them.
        if (id(layout), shape, own) not in fitting:
            deployment.partition(name, shape, uneven)
            fitting.add((id(layout), shape, own))
        dtype = given.dtype if hasattr(given, "dtype") else given[1] if len(given) == 2 else None
        known = None if dtype is None else find_dtype(dtype)
        if known is None:
            raise LayoutError(f"tensor {shown(name)} has no known dtype, got {shown(dtype)}")
        digest = None if digests is None else digests.get(name)
        found[name] = ManifestTensor(shape, known.name, layout, own or uneven, optional("digest", digest, str))
    return Manifest(found)


def _read_json(path: str | os.PathLike[str]) -> Any:
    data = read_file(path)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"{os.fspath(path)!r} is not JSON: {error}") from None


def _read_boxes(entry: Any) -> dict[Any, Any]:
    """Return the boxes of each holder of an entry without a layout."""
    holders, boxes = _listed("holders", entry["holders"]), _listed("boxes", entry["boxes"])
    if len(holders) != len(boxes) or not all(type(label) in (str, int) for label in holders):
        raise LayoutError(f"there are {len(holders)} holders, by labels that are str or int, and boxes of {len(boxes)}")
    if len(set(holders)) != len(holders):
        raise LayoutError("a holder is listed twice")
    return {
        label: [[_side_of(side) for side in _listed("a box", box)] for box in _listed("the boxes", held)]
        for label, held in zip(holders, boxes, strict=True)
    }


def _side_of(side: Any) -> tuple[int, int]:
    start, stop = sizes_of("a side of a box", side)
    return start, stop


def _tiling_of(shape: tuple[int, ...], boxes: Mapping[Any, list[list[tuple[int, int]]]]) -> Tiling:
    """Return the tiling with these boxes for each holder; a holder of one box has an array of its shape."""
    given = {label: tuple(held[0]) if len(held) == 1 else held for label, held in boxes.items()}
    tiling = Tiling.from_boxes(shape, given, replicas=True)
    tiling.check()
    return tiling


def _digest_of(given: list[Any]) -> str | None:
    if not given:
        return None
    if len(given) > 1 or not isinstance(given[0], str):
        raise LayoutError(f"its digest must be text, got {shown(given[0])}")
    return str(given[0])


def _listed(what: str, values: Any) -> list[Any]:
    if not isinstance(values, list):
        raise LayoutError(f"{what} must be a list, got {shown(values)}")
    return values


def _number(value: Any, count: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise LayoutError(f"{shown(value)} is not a number below {count}")
    return value


def _mesh_dict(mesh: DeviceMesh) -> dict[str, Any]:
    found: dict[str, Any] = {"shape": list(mesh.shape), "axis_names": list(mesh.axis_names)}
    if not mesh.has_default_devices:
        labels = mesh.labels()
        for label in labels:
            _check_label(label)
        found["devices"] = list(labels)
    return found


def _check_label(label: Any) -> None:
    if not isinstance(label, (str, int)) or isinstance(label, bool):
        raise LayoutError(f"device {shown(label)} cannot be in a manifest, which has labels that are str or int")


def _layout_dict(layout: TensorLayout | Tiling, uneven: UnevenRule, meshes: Mapping[DeviceMesh, int]) -> dict[str, Any]:
    if isinstance(layout, Tiling):
        return _boxes_dict(layout)
    assert layout.device_mesh is not None
    axes: list[Any] = [
        {"packed": str(spec)} if isinstance(spec, PackedDim) else [spec] if isinstance(spec, str) else list(spec or ())
        for spec in layout.axes
    ]
    number = meshes[layout.device_mesh]
    return {"mesh": number, "axes": axes, "unreduced": list(layout.unreduced), "uneven": uneven}


def _boxes_dict(tiling: Tiling) -> dict[str, Any]:
    if not tiling.has_labels:
        raise LayoutError("a tiling whose holders have no labels cannot be written")
    boxes = []
    for label in tiling.holders:
        _check_label(label)
        at, held, shape = 0, tiling.pieces(label), tiling.holder_shape(label)
        for piece in held:
            sizes = tuple(side.stop - side.start for side in piece.box)
            begin = piece.start
            if isinstance(begin, tuple) and len(begin) == len(sizes):
                # In an array of the tensor's rank a box is a run if it is whole in all dims but the first.
                is_run = sizes[1:] == shape[1:] or not math.prod(sizes)
                begin = sum(a * math.prod(shape[dim + 1 :]) for dim, a in enumerate(begin)) if is_run else -1
            if begin not in (at, (at,)) and math.prod(sizes):
                raise LayoutError(f"the boxes of {shown(label)} are not one after the other, which cannot be written")
            at += math.prod(sizes)
        if at != math.prod(shape):
            raise LayoutError(f"the array of {shown(label)} is larger than its boxes, which cannot be written")
        boxes.append([[[side.start, side.stop] for side in piece.box] for piece in held])
    return {"holders": list(tiling.holders), "boxes": boxes}


def _read_axes(axes: Any) -> Any:
    if isinstance(axes, Mapping):
        return parse(axes["packed"])
    if not isinstance(axes, list):
        raise LayoutError(f"the axes of a dim must be a list or packed, got {shown(axes)}")
    return tuple(axes)


def _dtype_name(dtype: Any) -> str:
    found = find_dtype(dtype) if isinstance(dtype, str) else None
    if found is None:
        raise LayoutError(f"the dtype {shown(dtype)} is not known")
    return found.name
