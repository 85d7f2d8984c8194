"""Manifests: where each tensor of a model is in a deployment, as JSON that any program can read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._arguments import path_of, sizes_of
from .._atomic import naming, replace_file
from .._dtypes import find_dtype
from .._text import shown
from ..errors import LayoutError, ParseError, ShardwiseError
from ..layout import TensorLayout, UnevenRule
from ..mesh import DeviceMesh
from ..packed import PackedDim, parse
from ..partition import Partition
from ..rules.layout_rule import checked_uneven

__all__ = ["Manifest", "ManifestTensor"]

_FORMAT = "shardwise deployment"
_VERSION = 1


@dataclass(frozen=True)
class ManifestTensor:
    """One tensor of a manifest.

    Attributes:
        shape: Its shape.
        dtype: The name of its dtype.
        layout: How it is cut, over the devices that hold it.
        uneven: How dims that do not divide are cut.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: TensorLayout
    uneven: UnevenRule = "even"


@dataclass(frozen=True, eq=False, repr=False)
class Manifest(Mapping[str, Partition]):
    """Where each tensor of a model is: a mapping from names to partitions; `Deployment.manifest` makes one.

    A manifest goes wherever a mapping of partitions goes: `plan_model(manifest, engine, manifest.tensors)`. Tensors
    that are cut alike share a partition.

    Attributes:
        tensors: The tensors by name.
    """

    tensors: Mapping[str, ManifestTensor]
    _made: dict[Any, Partition] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Partition:
        tensor = self.tensors[name]
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
        """Give the manifest, ready for JSON.

        `meshes` has shapes, axis names and devices; `layouts` names for each a mesh by its number, and has the axes of
        each dim, or its parts as text; `tensors` has for each the number of its layout, its shape and its dtype.

        Raises:
            LayoutError: if a device label is neither string nor integer.
        """
        meshes: dict[DeviceMesh, int] = {}
        layouts: dict[tuple[TensorLayout, UnevenRule], int] = {}
        tensors = {}
        for name, tensor in self.tensors.items():
            key = tensor.layout, tensor.uneven
            if key not in layouts:
                mesh = tensor.layout.device_mesh
                assert mesh is not None
                meshes.setdefault(mesh, len(meshes))
                layouts[key] = len(layouts)
            tensors[name] = [layouts[key], list(tensor.shape), tensor.dtype]
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
        replace_file(path, (json.dumps(self.to_dict(), ensure_ascii=False) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Manifest:
        """Read the JSON that `save` has written.

        Raises:
            ParseError: if it is not a manifest.
            OSError: if it cannot be read.
        """
        with naming(path_of(path)):
            data = path_of(path).read_bytes()
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ParseError(f"{os.fspath(path)!r} is not JSON: {error}") from None
        return cls.from_dict(found, repr(os.fspath(path)))

    @classmethod
    def from_dict(cls, value: Any, source: str = "the manifest") -> Manifest:
        """Read what `to_dict` gives.

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
            layouts = []
            for number, entry in enumerate(_listed("layouts", value["layouts"])):
                place = f"layouts[{number}]"
                axes = [_read_axes(axis) for axis in entry["axes"]]
                layout = TensorLayout(axes, meshes[_number(entry["mesh"], len(meshes))], unreduced=entry["unreduced"])
                layouts.append((layout, checked_uneven(entry["uneven"])))
            tensors = {}
            for name, (number, shape, dtype) in value["tensors"].items():
                place = f"tensor {shown(name)}"
                layout, uneven = layouts[_number(number, len(layouts))]
                tensors[name] = ManifestTensor(sizes_of("the shape", shape), _dtype_name(dtype), layout, uneven)
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
        labels = mesh._all_labels()
        for label in labels:
            if not isinstance(label, (str, int)) or isinstance(label, bool):
                raise LayoutError(f"device {shown(label)} cannot be written: a manifest has labels that are str or int")
        found["devices"] = list(labels)
    return found


def _layout_dict(layout: TensorLayout, uneven: UnevenRule, meshes: Mapping[DeviceMesh, int]) -> dict[str, Any]:
    assert layout.device_mesh is not None
    axes: list[Any] = [
        {"packed": str(spec)} if isinstance(spec, PackedDim) else [spec] if isinstance(spec, str) else list(spec or ())
        for spec in layout.axes
    ]
    number = meshes[layout.device_mesh]
    return {"mesh": number, "axes": axes, "unreduced": list(layout.unreduced), "uneven": uneven}


def _read_axes(axes: Any) -> Any:
    if isinstance(axes, Mapping):
        return parse(axes["packed"])
    if not isinstance(axes, list):
        raise LayoutError(f"the axes of a dim must be a list or packed, got {shown(axes)}")
    return tuple(axes)


def _dtype_name(dtype: Any) -> str:
    found = find_dtype(dtype)
    if found is None:
        raise LayoutError(f"the dtype {shown(dtype)} is not known")
    return found.name
