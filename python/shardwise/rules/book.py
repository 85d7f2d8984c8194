"""The face that layout maps and deployments have in common: rules by regular expressions, looked up by a name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .._fork import importing
from ..errors import ShardwiseWarning
from ..placing import NOT_PLACED, Placed
from .search import MatchMode

if TYPE_CHECKING:
    from ..layout import TensorLayout, UnevenRule
    from .layout_rule import LayoutRule
    from .numbers import Config
    from .report import LayoutReport
    from .report_maker import Followers, ReportedRules, ReportNames

__all__ = ["RuleBook", "note_origin", "take_origin", "warned_of_models"]


class RuleBook:
    """Rules by regular expressions, and a default for tensors of any rank that no rule matches.

    `LayoutMap` and `Deployment` say what a rule is and how it is found; here is what follows from the rule of a name.
    """

    __slots__ = ()

    _match: MatchMode
    _default: Any
    _replicated: tuple[str, ...]
    #: The text with which all rules of a file begin; reports leave it out.
    _prefix: str = ""
    #: Sentences on what looks wrong about that file.
    _notes: tuple[str, ...] = ()
    #: The types of the models that it is for.
    _models: tuple[str, ...] = ()

    def _applied(self, path: str) -> LayoutRule | None:
        """Return the rule that applies to a name, or the default; an error if several match."""
        raise NotImplementedError

    def _reported(self) -> ReportedRules:
        """Return the rules as a report needs them."""
        raise NotImplementedError

    def layout_of(self, path: str, rank: int) -> TensorLayout | None:
        """Look up the layout of a tensor of this rank: that of its rule, or else of the default."""
        raise NotImplementedError

    @property
    def match(self) -> MatchMode:
        """The place in a name where a rule has to match: `"search"`, `"match"` or `"fullmatch"`."""
        return self._match

    @property
    def replicated(self) -> tuple[str, ...]:
        """The axes along which everything is replicated on purpose."""
        return self._replicated

    @property
    def prefix(self) -> str:
        """The text with which a rules file begins each of its rules; reports leave it out."""
        return self._prefix

    @property
    def models(self) -> tuple[str, ...]:
        """The types of the models that the rules are for, as the rules file or the preset says."""
        return self._models

    @property
    def names(self) -> None:
        """Always `None`: rules apply to every name that they match; a plain mapping has the names of its tensors."""

    def uneven_of(self, path: str) -> UnevenRule | None:
        """Look up the uneven rule that the rule for a name has of its own, or the default's; `None` if there is none.

        Raises:
            LayoutError: if several rules match the name.

        >>> from shardwise import LayoutMap, LayoutRule
        >>> layout_map = LayoutMap(default=LayoutRule(("fsdp",), uneven="balanced"))
        >>> layout_map["kernel"] = LayoutRule(("model", None), uneven="ceil")
        >>> layout_map.uneven_of("dense/kernel"), layout_map.uneven_of("dense/bias")
        ('ceil', 'balanced')
        """
        rule = self._applied(path)
        return None if rule is None else rule.uneven

    def shared_of(self, path: str) -> bool:
        """Look up whether the rule for a name, or the default, shares the blocks of a quantized weight.

        Raises:
            LayoutError: if several rules match the name.

        >>> from shardwise import LayoutMap, LayoutRule
        >>> layout_map = LayoutMap()
        >>> layout_map["down_proj"] = LayoutRule((None, "tp"), shared=True)
        >>> layout_map.shared_of("mlp.down_proj.weight"), layout_map.shared_of("norm")
        (True, False)
        """
        rule = self._applied(path)
        return rule is not None and rule.shared

    def placed(self, path: str, rank: int) -> Placed:
        """Look up the place of a tensor of this rank: layout, uneven rule, and whether blocks are shared.

        Raises:
            LayoutError: as `layout_of`.

        >>> from shardwise import LayoutMap, LayoutRule
        >>> layout_map = LayoutMap()
        >>> layout_map["kernel"] = LayoutRule((None, "model"), uneven="ceil")
        >>> layout_map.placed("dense/kernel", 2)
        Placed(layout=TensorLayout((None, 'model')), uneven='ceil', shared=False)
        """
        rule = self._applied(path)
        return NOT_PLACED if rule is None else Placed(self.layout_of(path, rank), rule.uneven, rule.shared)

    def placed_alike(self, paths: Sequence[str], rank: int) -> Iterator[tuple[Placed, Sequence[int]]]:
        """Yield the places of names that differ in digits only, each with the positions of its names.

        A deployment may have millions of such names but few places, and finds the names of a place together.

        Raises:
            LayoutError: as `placed`.

        >>> from shardwise import DeviceMesh
        >>> from shardwise.deploy import Deployment, DeploymentRule
        >>> stages = Deployment(2, DeviceMesh((2,), ("pp",)), {"h.{i}": DeploymentRule((None,), at={"pp": "i // 2"})})
        >>> [positions for _, positions in stages.placed_alike(["h.0", "h.1", "h.2", "h.3"], 1)]
        [[0, 1], [2, 3]]
        """
        return ((self.placed(path, rank), (at,)) for at, path in enumerate(paths))

    def report(
        self, names: ReportNames, *, uneven: UnevenRule = "even", followers: Followers | None = None
    ) -> LayoutReport:
        """Report what the rules do to tensors of these names: layouts, bytes per device, and all that looks wrong.

        Args:
            names: a mapping from each name to a shape, to a pair of shape and dtype, or to anything with a `.shape`
                (and a `.dtype`); or tuples of `(name, shape)`, `(name, shape, dtype)` or `(name, array)`. A dtype is
                what numpy accepts as one, or anything with an integer `.itemsize`.
            uneven: how a dim that does not divide is cut, unless its rule says so; see `TensorLayout.partition`.
            followers: for each tensor without a rule of its own, the name of the tensor whose rule it follows, and the
                layout; `shardwise.quantized.followers` gives those of quantized weights.

        Raises:
            LayoutError: if a name is repeated, a size is negative, or the uneven rule is unknown.
            SizeOverflowError: if a tensor has more than 2**63 - 1 elements or bytes.
            TypeError: if a name is not a string, or a shape or dtype is invalid.

        >>> from shardwise import DeviceMesh, LayoutMap
        >>> layout_map = LayoutMap(DeviceMesh((2,), ("model",)))
        >>> layout_map["kernel"] = (None, "model")
        >>> report = layout_map.report({"dense/kernel": ((4, 6), "float32"), "dense/bias": ((6,), "float32")})
        >>> [(tensor.name, tensor.rule, tensor.bytes_per_device) for tensor in report.tensors]
        [('dense/kernel', 'kernel', 48), ('dense/bias', None, 24)]
        >>> report.warnings
        ("1 name matches no rule, so every device holds it whole (24 B): 'dense/bias'",)

        The report of a deployment has the bytes of all devices of its world, and `bytes_along` gives those of each
        stage.

        >>> from shardwise.deploy import Deployment, DeploymentRule
        >>> stages = Deployment(2, DeviceMesh((2,), ("pp",)), {"h.{i}": DeploymentRule((None,), at={"pp": "i // 2"})})
        >>> report = stages.report({f"h.{i}": ((4,), "float32") for i in range(3)})
        >>> report.device_bytes.tolist(), report.fullest
        ([32, 16], ('cpu:0', 32))
        """
        with importing:
            from .report_maker import make_report

        return make_report(self._reported(), names, uneven, followers)


def note_origin(book: RuleBook, models: tuple[str, ...], prefix: str = "", notes: tuple[str, ...] = ()) -> None:
    """Note the origin of rules: the types of models that they are for, their prefix, and what to warn of."""
    made: Any = book  # Both kinds of books have these.
    made._models, made._prefix, made._notes = models, prefix, notes


def take_origin(book: RuleBook, origin: RuleBook) -> None:
    """Note the origin of rules that were made of others."""
    note_origin(book, origin._models, origin._prefix, origin._notes)


def warned_of_models(models: Sequence[str], config: Config | None, source: str) -> tuple[str, ...]:
    """Warn the caller's caller if rules for models of these types are read for one of another; give the notes."""
    with importing:
        from .toml import other_model

    note = other_model(models, config, source)
    if note is None:
        return ()
    warnings.warn(note, ShardwiseWarning, stacklevel=3)
    return (note,)
