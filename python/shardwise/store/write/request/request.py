"""A request to write a checkpoint: one value that checks itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO, TypeAlias

from ...._arguments import instance, integer, is_true, optional
from ...._dtypes import Dtype, find_dtype
from ...._text import shown
from ....deploy.fsdp import fully_sharded
from ....deploy.read import no_mesh, read_rules
from ....errors import LayoutError
from ....layout import UnevenRule
from ....mesh import DeviceMesh
from ....placing import NO_LAYOUTS, Layouts, Placing, placing_of
from ....rules.numbers import Config
from ....rules.pattern import NamePattern
from ....rules.rewrites import Rewrites
from ...data.location import Location
from ...rewritten.convert import Overflow, checked_overflow, is_float
from ...rewritten.names import Naming, checked_which, replacements
from ..forms.forms import Target
from ..places.work import MEMORY
from ..plan.data import LEAST_ASKED

__all__ = ["FILE_BYTES", "Request", "RulesFile", "placing_over"]

#: A rules file: its path, the name of one of the package's, or an open text file.
RulesFile: TypeAlias = str | os.PathLike[str] | TextIO
#: The most bytes that Hugging Face's own `save_pretrained` puts in a file.
FILE_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Request:
    """A new checkpoint, as a user asks for it. `reshard_checkpoint` explains each field.

    Attributes:
        target: its path or URL.
        layouts: how its tensors are cut; if there are rules, they say so once they are read.
        mesh: the mesh of the rules.
        rules, source_rules: files of rules that are still to be read; see `read`.
        to: its format; `None` for the one that the path and the cuts suggest.
        memory: bytes for all `workers`.
        naming: which tensors and values of a source are written, and under which names.
        compares: whether pieces that are stored more than once are compared.
        is_written: whether it is written now, by this process, rather than only planned.
    """

    target: Location
    layouts: Placing = NO_LAYOUTS
    to: Target | None = None
    uneven: UnevenRule = "even"
    dtype: Dtype | None = None
    overflow: Overflow = "refuse"
    naming: Naming = field(default_factory=Naming)
    metadata: Mapping[str, str] | None = None
    max_file_bytes: int = FILE_BYTES
    memory: int = MEMORY
    workers: int = 1
    compares: bool = False
    task_bytes: int | None = None
    strict: bool = False
    rank: int | None = None
    padded: bool = False
    parameter_names: Sequence[str] | None = None
    source_layouts: Layouts | None = None
    config: Config | None = None
    is_written: bool = True
    resume: bool = False
    mesh: DeviceMesh | None = None
    rules: RulesFile | None = None
    source_rules: RulesFile | None = None

    @classmethod
    def of(
        cls, target: Location, *, layouts: Layouts | None, dtype: Any, names: Mapping[str, Any], replicas: str,
        overflow: Any, **asked: Any,
    ) -> Request:  # fmt: skip
        """Return the request for arguments of `reshard_checkpoint`; `names` are rename, rewrites, only, drop and which.

        Raises:
            LayoutError: if an argument has an unknown value; the message names the argument. If two arguments
                contradict each other.
            TypeError: if a value is of the wrong type.
        """
        if instance("replicas", replicas, str) not in ("check", "first"):
            raise LayoutError(f"replicas is {shown(replicas)}; it must be 'check' or 'first'")
        return cls(
            target,
            placing_over(layouts, asked["mesh"], asked["to"]) if asked["rules"] is None else placing_of(layouts),
            naming=_naming(**names),
            overflow=checked_overflow(overflow),
            dtype=None if dtype is None else _float_dtype(dtype),
            compares=replicas == "check",
            **asked,
        )

    def __post_init__(self) -> None:
        optional("mesh", self.mesh, DeviceMesh)
        if self.rules is not None and self.layouts is not NO_LAYOUTS:
            raise LayoutError("layouts and rules are both given; the file has layouts of its own")
        if self.naming.rewrites is not None and (self.rules is not None or self.source_rules is not None):
            file = "rules" if self.rules is not None else "source_rules"
            raise LayoutError(f"rewrites and {file} are both given; the file has rewrites of its own")
        is_true("strict", self.strict)
        optional("metadata", self.metadata, Mapping)  # type: ignore[type-abstract]
        most = integer("max_file_bytes", self.max_file_bytes)
        if most < 1:
            raise LayoutError(f"max_file_bytes is {shown(most)}; it must be a positive integer")
        # Integers of numpy become Python's, which do not overflow.
        object.__setattr__(self, "max_file_bytes", most)
        if self.rank is not None:
            object.__setattr__(self, "rank", integer("rank", self.rank))
        if self.task_bytes is not None:
            asked = integer("task_bytes", self.task_bytes)
            if asked < LEAST_ASKED:
                raise LayoutError(f"task_bytes is {asked}; it must be at least {LEAST_ASKED}")
            object.__setattr__(self, "task_bytes", asked)

    def read(self, config: Config | None) -> Request:
        """Return the request with the layouts and rewrites of its rules files, which are read here, once.

        Args:
            config: The configuration of the source, for the numbers that rules name.

        Raises:
            ParseError, LayoutError, MeshError, OSError: as for `read_rules`; a LayoutError if there is no mesh.
        """
        if self.rules is None and self.source_rules is None:
            return self
        layouts, found = self.layouts, Rewrites()
        if self.source_rules is not None:
            found += Rewrites.from_toml(self.source_rules, config=config).inverse()
        if self.rules is not None:
            read, rewrites = read_rules(self.rules, self.mesh, config=config)
            found += rewrites
            if not read.rules() and read.default is None:  # A file with rewrites only.
                layouts = placing_over(None, self.mesh, self.to)
            elif read.world is None:
                raise no_mesh(self.rules, read)
            else:
                layouts = placing_of(read)
        naming = replace(self.naming, rewrites=found or None)
        return replace(self, layouts=layouts, naming=naming, mesh=None, rules=None, source_rules=None)


def placing_over(layouts: Layouts | None, mesh: DeviceMesh | None, to: Target | None) -> Placing:
    """Return the layouts of a new checkpoint: those given, or for FSDP2 those of `fully_shard` over a mesh."""
    if optional("mesh", mesh, DeviceMesh) is None:
        return placing_of(layouts)
    assert mesh is not None
    if layouts is not None:
        raise LayoutError("mesh and layouts are both given; layouts have a mesh of their own")
    if to != "fsdp2":
        raise LayoutError(
            "mesh is given, but layouts must say how the tensors are cut; only to='fsdp2' cuts all of them alike"
        )
    return fully_sharded(mesh)


def _naming(rename: Any, rewrites: Any, only: Any, drop: Any, which: Any) -> Naming:
    found, unwanted = (
        None if text is None else NamePattern(name, instance(name, text, str))
        for name, text in (("only", only), ("drop", drop))
    )
    return Naming(tuple(replacements(rename)), rewrites, found, unwanted, checked_which(which))


def _float_dtype(value: Any) -> Dtype:
    found = find_dtype(value)
    if found is None or found.origin is None or not is_float(found) or found.code is None:
        raise TypeError(
            "dtype must be a floating-point dtype that a safetensors file can hold, such as bfloat16 or "
            f"float8_e4m3fn, got {shown(value)}"
        )
    return found
