"""Manifests: where each tensor of a model is in a deployment, as JSON that any program can read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._arguments import optional, sizes_of
from .._atomic import replace_file
from .._dtypes import find_dtype
from .._text import counted, shown
from ..errors import LayoutError, ParseError, ShardwiseError
from ..layout import TensorLayout, UnevenRule
from ..mesh import DeviceMesh
from ..rules.layout_rule import checked_uneven
from ..tiling import Tiling
from .manifest_json import (
    axes_in,
    boxes_in,
    check_label,
    digest_in,
    dtype_name,
    layout_dict,
    list_in,
    mesh_dict,
    number_below,
    read_json_file,
    tiling_of,
)
from .parameters import shapes_of

__all__ = ["Manifest", "ManifestTensor", "manifest_of"]

_FORMAT = "shardwise deployment"
_VERSION = 2


@dataclass(frozen=True)
class ManifestTensor:
    """One tensor of a manifest.

    Attributes:
        dtype: The name of the tensor's dtype.
        layout: How the tensor is cut, over the devices that hold it; or who holds which boxes, if no layout says that.
        uneven: The rule by which dims that do not divide are cut by a layout.
        digest: A digest of the tensor's elements, in whatever way the two sides agree on, or `None`.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: TensorLayout | Tiling
    uneven: UnevenRule = "even"
    digest: str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Manifest(Mapping[str, Tiling]):
    """The places of all tensors of a model: a mapping from names to tilings; `Deployment.manifest` makes one.

    Others are made by `shardwise.interop.torch.manifest_of` (a running model), `shardwise.store.manifest_of` (a
    checkpoint) and `from_mooncake`. A manifest can be given wherever a mapping of tilings can:
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
        return f"<Manifest of {counted(len(self), 'tensor')}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Manifest, (dict(self.tensors),)

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest, ready for JSON.

        `meshes` has shapes, axis names and devices. An entry of `layouts` has the number of its mesh, and the axes of
        each dim or its parts as text; or it has holders and the boxes of each, which are one after the other in the
        holder's array. An entry of `tensors` has the number of its layout, its shape, its dtype, and its digest if
        there is one.

        Raises:
            LayoutError: if a device label is neither string nor integer; if the boxes of a holder are not one after
                the other in its array, or do not fill it.
        """
        meshes: dict[DeviceMesh, int] = {}
        layouts: dict[tuple[TensorLayout | Tiling, UnevenRule], int] = {}
        #: The number of each layout with its rule, by identity: most tensors have the very object that others have.
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
            "meshes": [mesh_dict(mesh) for mesh in meshes],
            "layouts": [layout_dict(layout, uneven, meshes) for layout, uneven in layouts],
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
            ParseError: if the contents are not a manifest.
            OSError: if the file cannot be read.
        """
        return cls.from_dict(read_json_file(path), repr(os.fspath(path)))

    @classmethod
    def from_dict(cls, value: Any, source: str = "the manifest") -> Manifest:
        """Return the manifest that a dict of `to_dict` describes.

        Args:
            value: the manifest.
            source: the manifest's name in messages.

        Raises:
            ParseError: if the contents are not a manifest.

        >>> from shardwise import DeviceMesh
        >>> from shardwise.deploy import Deployment
        >>> one = Deployment(2, DeviceMesh((2,), ("tp",)), {"w": ("tp",)}).manifest({"w": ((4,), "float32")})
        >>> Manifest.from_dict(one.to_dict()) == one
        True
        """
        if not isinstance(value, Mapping) or value.get("format") != _FORMAT:
            raise ParseError(f"{source} is not a manifest of a deployment")
        if value.get("version") != _VERSION:
            raise ParseError(f"{source} is of version {shown(value.get('version'))}; only version {_VERSION} is known")
        place = ""
        try:
            meshes = []
            for number, mesh in enumerate(list_in("meshes", value["meshes"])):
                place = f"meshes[{number}]"
                meshes.append(DeviceMesh(mesh["shape"], mesh["axis_names"], mesh.get("devices")))
            layouts: list[tuple[Any, UnevenRule]] = []
            for number, entry in enumerate(list_in("layouts", value["layouts"])):
                place = f"layouts[{number}]"
                if "boxes" in entry:
                    layouts.append((boxes_in(entry), "even"))
                    continue
                axes = [axes_in(axis) for axis in entry["axes"]]
                unreduced = list_in("unreduced", entry["unreduced"])
                layout = TensorLayout(axes, meshes[number_below(entry["mesh"], len(meshes))], unreduced=unreduced)
                layouts.append((layout, checked_uneven(entry["uneven"])))
            tensors = {}
            tilings: dict[Any, Tiling] = {}
            for name, (number, given, dtype, *digest) in value["tensors"].items():
                place = f"tensor {shown(name)}"
                held, uneven = layouts[number_below(number, len(layouts))]
                shape = sizes_of("the shape", given)
                if isinstance(held, dict):
                    if (number, shape) not in tilings:
                        tilings[number, shape] = tiling_of(shape, held)
                    held = tilings[number, shape]
                tensors[name] = ManifestTensor(shape, dtype_name(dtype), held, uneven, digest_in(digest))
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
            source: the path of the file, or its parsed contents.

        Raises:
            ParseError: if the source is not such a placement, or the fragments do not make up the tensors.
            OSError: if the file cannot be read.

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
            source = read_json_file(source)
        if not isinstance(source, Mapping) or source.get("resource_kind") != "model_weight":
            raise ParseError(f"{name} is not a Mooncake weight placement")
        place = "its keys"
        try:
            boxes: dict[str, dict[str, list[list[tuple[int, int]]]]] = {}
            for part in list_in("parts", source["parts"]):
                holder = part["participant_id"]
                place = f"the part of {shown(holder)}"
                check_label(holder)
                for fragment in list_in("fragments", part["fragments"]):
                    starts = sizes_of("global_offset", fragment["global_offset"])
                    sizes = sizes_of("local_shape", fragment["local_shape"])
                    box = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
                    held = boxes.setdefault(fragment["tensor_id"], {})
                    held.setdefault(holder, []).append(box)
            tensors, made = {}, {}
            for tensor in list_in("tensors", source["tensors"]):
                tensor_id = tensor["tensor_id"]
                place = f"tensor {shown(tensor_id)}"
                if not isinstance(tensor_id, str):
                    raise LayoutError("its name must be text")
                shape, dtype = sizes_of("global_shape", tensor["global_shape"]), dtype_name(tensor["dtype"])
                held = boxes.pop(tensor_id, {})
                key = repr((shape, held))
                if key not in made:
                    made[key] = tiling_of(shape, held)
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
