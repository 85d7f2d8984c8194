"""A request to write a checkpoint: one value that checks itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from ....rules.numbers import Config, config_beside, reading_for
from ....rules.pattern import NamePattern
from ....rules.rewrites import Rewrites
from ...data.location import Location
from ...rewritten.convert import Overflow, checked_overflow, is_float
from ...rewritten.names import Naming, checked_which, replacements
from ..forms.forms import Target
from ..places.work import MEMORY
from ..plan.data import LEAST_ASKED

__all__ = ["FILE_BYTES", "CutsAndRewrites", "Request", "RulesFile", "placing_over"]

#: A rules file: its path, the name of one of the package's, or an open text file.
RulesFile: TypeAlias = str | os.PathLike[str] | TextIO
#: The most bytes that Hugging Face's own `save_pretrained` puts in a file.
FILE_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Request:
    """A new checkpoint, as a user asks for it. `reshard_checkpoint` explains each field.

    Attributes:
        target: its path or URL.
        layouts: how its tensors are cut.
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

    @classmethod
    def of(
        cls, target: Location, *, dtype: Any, names: Mapping[str, Any], replicas: str, overflow: Any, **asked: Any
    ) -> Request:
        """Return the request for arguments of `reshard_checkpoint`; `names` are rename, rewrites, only, drop and which.

        Raises:
            LayoutError: if an argument has an unknown value; the message names the argument.
            TypeError: if a value is of the wrong type.
        """
        if instance("replicas", replicas, str) not in ("check", "first"):
            raise LayoutError(f"replicas is {shown(replicas)}; it must be 'check' or 'first'")
        return cls(
            target,
            naming=_naming(**names),
            overflow=checked_overflow(overflow),
            dtype=None if dtype is None else _float_dtype(dtype),
            compares=replicas == "check",
            **asked,
        )

    def __post_init__(self) -> None:
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


@dataclass(frozen=True)
class CutsAndRewrites:
    """The layouts and rewrites that the arguments of `reshard_checkpoint` ask for."""

    layouts: Layouts | None = None
    mesh: DeviceMesh | None = None
    rules: RulesFile | None = None
    source_rules: RulesFile | None = None
    rewrites: Rewrites | None = None

    def read(self, source: Location, to: Target | None, config: Config | None) -> tuple[Placing, Rewrites | None]:
        """Read the rules files, and return the layouts and the rewrites.

        Args:
            source: the source, whose folder may have a `config.json`.
            to: the format; only `"fsdp2"` takes a mesh without layouts.
            config: the model's configuration, instead of the source's.

        Raises:
            ParseError, LayoutError, MeshError, OSError: as for `read_rules`.
            LayoutError: if two arguments contradict each other, or one is missing.
            TypeError: if an argument is of the wrong type.
        """
        optional("mesh", self.mesh, DeviceMesh)
        if self.rules is None and self.source_rules is None:
            return placing_over(self.layouts, self.mesh, to), self.rewrites
        if self.rewrites is not None:
            file = "rules" if self.rules is not None else "source_rules"
            raise LayoutError(f"rewrites and {file} are both given; the file has rewrites of its own")
        if config is None:
            config = config_beside(str(source))
        layouts, mesh, found, read = self.layouts, self.mesh, Rewrites(), None
        if self.rules is not None and layouts is not None:
            raise LayoutError("layouts and rules are both given; the file has layouts of its own")
        with reading_for(str(source)):
            if self.source_rules is not None:
                found += Rewrites.from_toml(self.source_rules, config=config).inverse()
            if self.rules is not None:
                read, rewrites = read_rules(self.rules, mesh, config=config)
                found += rewrites
        if read is not None and (read.rules() or read.default is not None):  # Else it is a file with rewrites only.
            if read.world is None:
                raise no_mesh(self.rules, read)
            layouts, mesh = read, None
        return placing_over(layouts, mesh, to), found or None


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
