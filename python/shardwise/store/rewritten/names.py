"""The tensors and values of a checkpoint that go into a new one, with their new names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from ..._arguments import instance, optional
from ..._dtypes import Dtype
from ..._text import shown
from ...conversion.apply import kept_objects, rewritten
from ...conversion.assembled import Assembled
from ...conversion.leaves import Stored
from ...conversion.tables import Wanted
from ...errors import LayoutError
from ...partition import Partition
from ...quantized.forms import Components
from ...quantized.unstated import check_known
from ...rules.left_out import LeftOut, listed
from ...rules.pattern import NamePattern, Replacement
from ...rules.rewrites import Rewrites
from ...rules.state_splits import StateName
from ...rules.states import training_names
from ...shared_tiling import SharedTiling
from ..data.location import Location
from ..data.text import MAX_NAME
from ..tensors.checkpoint import KeyPath, StoredCheckpoint
from ..tensors.stored import UnsupportedError
from .components import quantized_tensors, reader_by_new_name, weights_after
from .convert import is_converted

__all__ = [
    "Naming",
    "Which",
    "check_name",
    "checked_which",
    "chosen",
    "chosen_part",
    "idle_renames",
    "kept_values",
    "key_paths",
    "names_of",
    "new_names",
    "refuse_unreadable",
    "renamed_tensors",
    "replacements",
]

#: A placeholder for the parameter in a state's name, while the rest of the name is renamed.
_MARK = "\0"
#: The tensors and values of a checkpoint that a call is about.
Which = Literal["all", "weights", "state"]
#: The arguments `only` and `drop` of a call.
_SAID = {"weights": "which='weights'", "state": "which='state'"}


@dataclass(frozen=True)
class Naming:
    """The choice of a checkpoint's tensors and values that go into another, and their names there.

    Attributes:
        rename: Patterns and their replacements, applied one after the other.
        rewrites: Rewrites of tensors, applied after `rename`.
        only: The pattern that must be found in new names; `None` for all.
        unwanted: The pattern whose matches, in old names, are left out.
        which: Weights, training state, or all.
    """

    rename: tuple[Replacement, ...] = ()
    rewrites: Rewrites | None = None
    only: NamePattern | None = None
    unwanted: NamePattern | None = None
    which: Which = "all"

    def __post_init__(self) -> None:
        optional("rewrites", self.rewrites, Rewrites)

    def renamed(self, name: str) -> str:
        """Return the new name that `rename` gives to a name of the source."""
        return _renamed(self.rename, name)

    def is_dropped(self, name: str) -> bool:
        """Return whether the tensor or value of this old name is left out by `drop`."""
        return self.unwanted is not None and self.unwanted.is_found(name)

    def is_chosen(self, name: str) -> bool:
        """Return whether the tensor or value of this new name is chosen by `only`."""
        return self.only is None or self.only.is_found(name)


class Renamed(NamedTuple):
    """The tensors of a checkpoint by their new names.

    Attributes:
        tensors: The tensors that are not dropped.
        weights: The quantized weights among them.
        dropped: The tensors that a rules file drops, by the names that match there.
    """

    tensors: dict[str, Assembled]
    weights: Components
    dropped: dict[str, Assembled]


def replacements(rename: Any) -> list[Replacement]:
    """Return the compiled patterns of `rename`, a mapping or a sequence of pairs, with their replacements."""
    if not isinstance(rename, (Mapping, Sequence)) or isinstance(rename, (str, bytes)):
        raise TypeError(f"rename must be a mapping or a sequence of pairs, got {shown(rename)}")
    pairs = list(rename.items()) if isinstance(rename, Mapping) else list(rename)
    for position, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise TypeError(f"rename[{position}] must be a pair of strings, got {shown(pair)}")
    return [Replacement("rename", pattern, replacement) for pattern, replacement in pairs]


def checked_which(which: Any) -> Which:
    """Return `which` if it is a known choice of tensors; else refuse it."""
    if which not in get_args(Which):
        raise LayoutError(f"which is {shown(which)}; it must be one of {', '.join(map(repr, get_args(Which)))}")
    chosen: Which = which
    return chosen


def chosen_part(checkpoint: StoredCheckpoint, which: Which) -> tuple[StoredCheckpoint, list[LeftOut]]:
    """Return a checkpoint without its training state or without its weights, and the notes on the tensors left out.

    Raises:
        LayoutError: if nothing is left.
    """
    if which == "all":
        return checkpoint, []
    training = checkpoint.training
    is_state = which == "state"
    part = checkpoint.part(lambda name: training.is_state(name) == is_state)
    if not (part or part.objects or part.unreadable):
        what = "training state that is recognised by its names" if is_state else "weights"
        raise LayoutError(f"{_SAID[which]}, but {checkpoint.path} has no {what}")
    tensors = [name for name in checkpoint if name not in part]
    values = [name for name in (*checkpoint.objects, *checkpoint.unreadable) if training.is_state(name) != is_state]
    names = (*tensors, *values)
    if not names:
        return part, []
    nbytes = checkpoint.nbytes - part.nbytes
    count, shown_names = listed(names, "value" if not tensors else "tensor")
    if tensors and values:
        count = f"{listed(tensors)[0].rpartition(' ')[0]} and {listed(values, 'value')[0].rpartition(' ')[0]} are"
    return part, [LeftOut("asked", names, f"{count} left out, as {_SAID[which]} says: {shown_names}", nbytes)]


def renamed_tensors(
    checkpoint: StoredCheckpoint,
    naming: Naming,
    converted: Dtype | None,
    stored: Callable[[str, str, Partition | SharedTiling | None], Wanted],
    config: Mapping[str, Any],
) -> Renamed:
    """Return the tensors by their new names (renamed, then rewritten), and the quantized weights among them.

    Tensors that `drop` leaves out are removed first. States of an optimizer keep their dtype, and are named like their
    weights.
    """
    made: dict[str, Assembled] = {}
    dropped: dict[str, Assembled] = {}
    names = new_names(checkpoint, naming)
    for old, tensor in checkpoint.items():
        if naming.is_dropped(old):
            continue
        new = names[old]
        if new in made:
            raise LayoutError(f"rename gives {shown(made[new].origin)} and {shown(old)} the same name, {shown(new)}")
        is_other = converted is not None and is_converted(tensor, converted) and not checkpoint.training.is_state(old)
        dtype = converted if converted is not None and is_other else tensor.known_dtype
        made[new] = Stored(old, tensor.shape, dtype, make=partial(stored, old, old, None))
    weights = quantized_tensors(checkpoint, made, config)
    if naming.rewrites is not None:
        if naming.rewrites:
            check_known(weights)
        made, carried = rewritten(made, naming.rewrites, weights.tensors, reader_by_new_name(checkpoint, made), dropped)
        weights = weights_after(checkpoint, made, config, carried, naming.rewrites)
    for new in made:
        check_name(new)
    return Renamed(made, weights, dropped)


def new_names(checkpoint: StoredCheckpoint, naming: Naming) -> dict[str, str]:
    """Return each tensor's name after `rename`; the name of an optimizer's state changes as its weight's name does.

    If its weight keeps its name, a pattern may change the state's own name.
    """
    if not naming.rename:
        return {name: name for name in checkpoint}
    names = {name: naming.renamed(name) for name in checkpoint}
    states = checkpoint.training.names.states
    prefixes: dict[str, bool] = {}
    for state in states.values():
        prefix = _prefix(state)
        prefixes[prefix] = prefixes.get(prefix, True) and naming.renamed(_weight(state)).startswith(prefix)
    for name, state in states.items():
        weight, prefix = _weight(state), _prefix(state)
        new = naming.renamed(weight)
        if name in names and new != weight:
            parameter = new.removeprefix(prefix) if prefixes[prefix] else new
            marked = naming.renamed(f"{state.before}{_MARK}{state.after}")
            names[name] = (
                marked.replace(_MARK, parameter) if _MARK in marked else f"{state.before}{parameter}{state.after}"
            )
    return names


def _weight(state: StateName) -> str:
    return state.parameter if state.weight is None else state.weight


def _prefix(state: StateName) -> str:
    """Return the beginning of the weight's name that the state's name leaves out."""
    weight = _weight(state)
    return weight.removesuffix(state.parameter) if weight.endswith(state.parameter) else ""


def refuse_unreadable(checkpoint: StoredCheckpoint, naming: Naming) -> None:
    """Refuse, with the reason, a chosen tensor that cannot be read."""
    for old, reason in checkpoint.unreadable.items():
        if naming.is_dropped(old):
            continue
        new = naming.renamed(old)
        is_kept = naming.rewrites is None or kept_objects([new], naming.rewrites)
        if is_kept and naming.is_chosen(new):
            raise UnsupportedError(f"{reason}; drop= can leave {shown(old)} out")


def chosen(made: dict[str, Assembled], naming: Naming, path: Location) -> dict[str, Assembled]:
    """Return the tensors that `only` chooses; refuse a pattern that is found in no name."""
    found = {name: tensor for name, tensor in made.items() if naming.is_chosen(name)}
    if naming.only is not None and not found:
        raise LayoutError(f"only is {shown(naming.only.pattern)}, which does not match any name of {path}")
    return found


def kept_values(
    checkpoint: StoredCheckpoint, naming: Naming, tensors: Mapping[str, Assembled]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the chosen values with their new names, and those that a rules file drops.

    Values here include tensors that cannot be read. No tensor may have the new name of a value.
    """
    rewrites = naming.rewrites
    names = {old: naming.renamed(old) for old in checkpoint.objects if not naming.is_dropped(old)}
    states = {new for old, new in names.items() if checkpoint.training.is_state(old)}
    kept = set(names.values()) if rewrites is None else kept_objects(names.values(), rewrites, states.__contains__)
    origins = {new: tensor.origin for new, tensor in tensors.items()}
    found: dict[str, str] = {}
    dropped = []
    for old, new in names.items():
        if new not in kept:
            dropped.append(old)
            continue
        if checkpoint.objects[old].extent is not None:
            check_name(new)
            if new in origins:
                raise LayoutError(f"rename gives {shown(origins[new])} and {shown(old)} the same name, {shown(new)}")
            origins[new] = old
        if naming.is_chosen(new):
            found[old] = new
    if rewrites is not None:
        for old in checkpoint.unreadable:
            if not naming.is_dropped(old) and not kept_objects([naming.renamed(old)], rewrites):
                dropped.append(old)
    return found, tuple(dropped)


def names_of(checkpoint: StoredCheckpoint) -> tuple[str, ...]:
    """Return all names in a checkpoint: of tensors, values, and tensors that cannot be read."""
    return (*checkpoint, *checkpoint.objects, *checkpoint.unreadable)


def _renamed(rename: Sequence[Replacement], name: str) -> str:
    for replacement in rename:
        name = replacement.applied(name)
    return name


def idle_renames(checkpoint: StoredCheckpoint, rename: Sequence[Replacement]) -> list[str]:
    """Return a sentence for each replacement that changes no name, after the earlier ones."""
    names = names_of(checkpoint)
    return [
        f"rename has {shown(replacement.pattern)}, which changes no name of {checkpoint.path}"
        for at, replacement in enumerate(rename)
        if all(replacement.applied(name) == name for name in (_renamed(rename[:at], old) for old in names))
    ]


def key_paths(checkpoint: StoredCheckpoint, names: Mapping[str, str], made: Collection[str] = ()) -> dict[str, KeyPath]:
    """Return the paths in a nested state dict of the tensors of a new checkpoint, if the source has paths.

    Args:
        checkpoint: The source.
        names: The old names of tensors and values that are copied unchanged, each with its new one.
        made: All new names. Weights and states take the paths of those that they were before.
    """
    said = checkpoint.metadata.get("planner_data")
    if not isinstance(said, Mapping):
        return {}

    def path_of(old: str) -> KeyPath | None:
        path = said.get(old)
        return path if isinstance(path, tuple) and path and all(type(key) in (str, int) for key in path) else None

    found = {new: path for old, new in names.items() for path in [path_of(old)] if old == new and path is not None}
    others = [name for name in made if name not in found]
    if not others:
        return found
    around: dict[tuple[str, str], tuple[KeyPath, str]] = {}
    for old, state in checkpoint.training.names.states.items():
        path = path_of(old)
        if path is not None:
            around.setdefault((state.before, state.after), (path, state.parameter))
    folders = {
        ".".join(map(str, path[:-1])) + ".": path[:-1]
        for weight in checkpoint.training.names.weights.values()
        for path in [path_of(weight)]
        if path is not None and len(path) > 1 and ".".join(map(str, path)) == weight
    }
    training = training_names(made)
    for name in others:
        own = training.states.get(name)
        if own is not None and (own.before, own.after) in around:
            path, parameter = around[own.before, own.after]
            found[name] = tuple(_replaced(key, parameter, own.parameter) for key in path)
        elif own is None:
            folder = max((text for text in folders if name.startswith(text)), key=len, default=None)
            if folder is not None:
                found[name] = (*folders[folder], name.removeprefix(folder))
    return found


def _replaced(key: str | int, parameter: str, new: str) -> str | int:
    """Return a key of a path to a state with another parameter, which is the whole key or a part of it between dots."""
    if key == parameter:
        return new
    head, found, tail = f".{key}.".partition(f".{parameter}.")
    return f"{head}.{new}.{tail}"[1:-1] if found else key


def check_name(name: Any) -> None:
    """Refuse a name that a tensor in a file cannot have."""
    instance("the name of a tensor", name, str)
    if not name or name == "__metadata__":
        raise LayoutError(f"a tensor cannot be called {name!r}")
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise LayoutError(f"the name {shown(name)} holds a lone surrogate, which no file can hold") from None
    if length > MAX_NAME:
        raise LayoutError(f"the name {shown(name)} has {length} bytes; a name that can be read has at most {MAX_NAME}")
