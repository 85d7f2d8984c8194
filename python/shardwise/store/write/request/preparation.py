"""The way from a request to a plan: the tensors that are written, those that must be converted first, and warnings."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...._dtypes import DTYPES, Dtype
from ...._garbage import uncollected
from ...._text import shown
from ....conversion.assembled import Assembled
from ....conversion.tables import Wanted
from ....errors import LayoutError
from ....partition import Partition
from ....quantized.forms import Components
from ....quantized.method import quantization_of
from ....quantized.unstated import cast_weights
from ....rules.left_out import LeftOut
from ....rules.numbers import config_text
from ....rules.optax import adam_counts
from ....rules.pattern import NamePattern
from ....rules.rewrites import Rewrites
from ....shared_tiling import SharedTiling
from ...rewritten.components import outline_of
from ...rewritten.convert import is_converted
from ...rewritten.groups import Grouped, grouped_values
from ...rewritten.left_out import (
    asked_for,
    dropped_by_rules,
    nbytes_of,
    of_single_ranks,
    rounded,
    states_alone,
    without_a_place,
)
from ...rewritten.names import (
    Renamed,
    chosen,
    chosen_part,
    idle_renames,
    kept_values,
    key_paths,
    names_of,
    refuse_unreadable,
    renamed_tensors,
)
from ...rewritten.partitions import DescribedTensors
from ...rewritten.wanted import number_of, wanted_bytes, wanted_number, wanted_stored
from ...tensors.checkpoint import KeyPath, StoredCheckpoint
from ...tensors.companion_files import beside, companions_of, model_folder
from ...tensors.model_config import config_beside, config_or_doubt
from ..forms.dcp import value_bytes
from ..forms.doubts import DoubtsError, doubts_about, doubts_about_optax
from ..forms.engines import check_family
from ..forms.forms import WRITTEN
from ..forms.megatron import NONE, extra_states, is_of_group, is_said, megatron_form
from ..forms.nested import with_masters
from ..forms.universal import universal_doubts
from ..run.checkpoint_plan import CheckpointPlan
from .planner import OF_NESTED, FormTensors, chosen_form, form_tensors, plan_form
from .request import Request
from .scratch import ScratchFile
from .values import WrittenValues, written_values

__all__ = ["Preparation"]

#: The names of random states, which are useful only to the ranks that wrote them.
_OF_RANK = re.compile(r"rng\.")


class _Taken(NamedTuple):
    """The tensors and values that are taken from a source.

    Attributes:
        tensors: All tensors by their new names, also those that the request does not choose.
        kept: The tensors that the request chooses.
        weights: The quantized weights among all tensors.
        values: The old name of each value that the request chooses, with its new name.
        dropped_values: The values that a rules file drops.
        dropped: The tensors that a rules file drops.
        described: The chosen tensors as rules know them.
    """

    tensors: dict[str, Assembled]
    kept: dict[str, Assembled]
    weights: Components
    values: dict[str, str]
    dropped_values: tuple[str, ...]
    dropped: dict[str, Assembled]
    described: DescribedTensors


class _FormContents(NamedTuple):
    """The tensors and values of the new checkpoint, as its form has them.

    Attributes:
        tensors: The form, and the tensors as it has them.
        values: The values, under the form's names.
        paths: The paths of tensors and values in a nested state dict.
        doubts: Warnings about the form, a sentence each.
        losses: Parts of an optimizer's groups that the form cannot express.
        old_values: The old names of values that the form's own files hold.
        homeless: The old names of values that the form cannot hold.
    """

    tensors: FormTensors
    values: WrittenValues
    paths: Mapping[str, KeyPath]
    doubts: Sequence[str]
    losses: Sequence[LeftOut]
    old_values: Collection[str]
    homeless: Sequence[str]


class Preparation:
    """The steps from a request to a plan, with the warnings that they find.

    Attributes:
        doubts: Warnings, a sentence each.
        left_out: Things that the new checkpoint will not contain.
        obstacles: Reasons why no task can be run alone.
    """

    def __init__(self, request: Request, checkpoint: StoredCheckpoint) -> None:
        self.doubts: list[str] = []
        self.obstacles: list[str] = []
        self._along: dict[str, bytes] = {}
        self._folder = model_folder(checkpoint)
        config = config_beside(checkpoint.given) if request.config is None else request.config
        self._request = request = request.read(config)
        self._config, self.doubts = config_or_doubt(
            config, is_needed=request.config is not None or self._folder is not None
        )
        self._checkpoint, self.left_out = chosen_part(checkpoint, request.naming.which)
        refuse_unreadable(self._checkpoint, request.naming)

    def plan(self, scratch: ScratchFile) -> CheckpointPlan:
        """Return the plan of the new checkpoint. With a dry scratch file nothing is written; warnings are found.

        Raises:
            DoubtsError: if there are warnings, and the request is strict.
            LayoutError, TypeError, ParseError, OSError: as `reshard_checkpoint`.
        """
        taken = self._taken(scratch)
        contents = self._contents(scratch, taken)
        if scratch.is_dry:
            self._judge(taken, contents)
        scratch.finish()
        tensors = contents.tensors
        if tensors.nested is None:
            tensors = tensors._replace(wanted=[*tensors.wanted, *contents.values.wanted])
        with uncollected():
            return plan_form(self._request, tensors, contents.paths, self._along)

    def _taken(self, scratch: ScratchFile) -> _Taken:
        """Return the chosen tensors and values of the source, under their new names."""
        request, checkpoint, naming = self._request, self._checkpoint, self._request.naming
        tensors, weights, dropped = self._renamed(scratch, request.dtype)
        kept = chosen(tensors, naming, checkpoint.path)
        described = DescribedTensors(outline_of(kept), weights)
        return _Taken(tensors, kept, weights, *kept_values(checkpoint, naming, tensors), dropped, described)

    def _contents(self, scratch: ScratchFile, taken: _Taken) -> _FormContents:
        """Return the tensors and values as the form has them."""
        checkpoint, kept, values, dtype = self._checkpoint, taken.kept, taken.values, self._request.dtype
        if self._request.to == "megatron":
            said = self._said(grouped_values(checkpoint, values, taken.tensors))
            source = self._renamed(scratch, None) if dtype is not None else Renamed(taken.tensors, taken.weights, {})
            is_state = self._request.naming.which == "state"
            megatron = megatron_form(kept, said, self._number, source.tensors, is_state=is_state)
            renamed = {name: kept[name] for name in megatron.names.values()}
            _, wanted = self._wanted(scratch, renamed, taken.weights, dtype)
            by_name = {tensor.name: tensor for tensor in wanted}
            wanted = [replace(by_name[name], name=new) for new, name in megatron.names.items()]
            wanted += self._unrounded(scratch, source, megatron.unrounded)
            self._along.update(megatron.beside)
            rest = {old: new for old, new in values.items() if new not in megatron.values and not is_of_group(new)}
            placed = {old: new for old, new in rest.items() if checkpoint.objects[old].extent}
            held, losses = self._values("dcp", placed, taken, wanted)
            states = extra_states({tensor.name: tensor.shape for tensor in wanted}, values.values())
            none = wanted_bytes("", value_bytes(NONE))
            held.wanted.extend(replace(none, name=name) for name in states)
            homeless = [*(old for old in rest if old not in placed), *held.homeless]
            tensors = form_tensors(self._request, "dcp", wanted)
            return _FormContents(tensors, held, {}, megatron.doubts, losses, rest, homeless)
        names, wanted = self._wanted(scratch, kept, taken.weights, dtype)
        form = chosen_form(self._request, is_cut=any(tensor.partition is not None for tensor in wanted))
        own = [tensor.name for tensor in wanted if form == "fsdp2" and _OF_RANK.match(tensor.name)]
        wanted = self._as_trained(form, [tensor for tensor in wanted if tensor.name not in own], taken, scratch.is_dry)
        placed = {
            old: new
            for old, new in values.items()
            if WRITTEN[form].has_values and not (form == "fsdp2" and _OF_RANK.match(new))
        }
        held, losses = self._values(form, placed, taken, wanted)
        homeless = [*own, *(old for old in values if old not in placed), *held.homeless]
        new_names = [tensor.name for tensor in wanted]
        paths = key_paths(checkpoint, {**names, **held.names}, new_names)
        tensors = form_tensors(self._request, form, wanted, paths, held.common)
        if form == "vllm":
            check_family([name for name, _, _ in taken.described.ruled], self._config)
        doubts = doubts_about_optax(new_names) if form == "dcp" != checkpoint.format else []
        return _FormContents(tensors, held, paths, doubts, losses, values, homeless)

    def _values(
        self, form: str, placed: Mapping[str, str], taken: _Taken, wanted: Iterable[Wanted]
    ) -> tuple[WrittenValues, list[LeftOut]]:
        """Return the values as the form has them, and the parts of groups that it cannot express."""
        grouped = grouped_values(self._checkpoint, placed, taken.tensors)
        return written_values(self._checkpoint, grouped, form, [tensor.name for tensor in wanted]), grouped.lost

    def _as_trained(self, form: str, wanted: list[Wanted], taken: _Taken, is_dry: bool) -> list[Wanted]:
        """Give weights and states as PyTorch's optimizers have them, for forms of PyTorch: master copies, and steps."""
        if form in OF_NESTED:
            wanted = self._with_steps(wanted, taken.kept)
        if form not in ("dcp", *OF_NESTED) or self._request.dtype is not None:
            return wanted
        before = {tensor.name: tensor for tensor in wanted}
        wanted = with_masters(wanted, taken.values.values(), own=form == "dcp")
        if is_dry:
            replaced = {each.name: old.nbytes for each in wanted if (old := before[each.name]).dtype != each.dtype}
            self.left_out += rounded(replaced, "written as their master copies")
        return wanted

    def _judge(self, taken: _Taken, contents: _FormContents) -> None:
        """Note the warnings, and the things that the new checkpoint will not contain.

        Raises:
            DoubtsError: if there are warnings, and the request is strict.
        """
        request, checkpoint, naming = self._request, self._checkpoint, self._request.naming
        names = names_of(checkpoint)
        form, wanted, nested = contents.tensors
        self.doubts += [*checkpoint.doubts, *contents.doubts, *idle_renames(checkpoint, naming.rename)]
        to = "megatron" if request.to == "megatron" else form
        lost, said = doubts_about(request.layouts, request.uneven, to, wanted, taken.tensors, taken.described.ruled)
        self.doubts += said
        self.doubts += [note for note in (naming.rewrites or Rewrites())._notes if note not in said]
        losses = dropped_by_rules(taken.dropped, taken.dropped_values, names)
        losses += contents.losses
        self.doubts += () if nested is None else nested.doubts
        if form == "universal" and nested is not None:
            self.doubts += universal_doubts(nested, wanted, number_of)
        self._take_along(form, taken.weights)
        # What a file that goes along says has its place there.
        if homeless := [name for name in contents.homeless if f"{name.partition('.')[0]}.json" not in self._along]:
            losses.append(without_a_place(homeless, form, names))
        losses += states_alone(taken.kept, checkpoint)
        if request.layouts.meshes:
            stored = (made.stored or name for name, made in taken.kept.items())
            self.doubts += of_single_ranks([*stored, *contents.old_values], checkpoint)
        losses += cast_weights(outline_of(taken.kept), taken.weights, request.layouts, self._config)
        self._note(lost, losses, names)
        self.left_out += _asked(checkpoint, taken, naming.unwanted)
        if request.strict and self.doubts:
            raise DoubtsError(self.doubts)

    def _renamed(self, scratch: ScratchFile, dtype: Dtype | None) -> Renamed:
        """Return the source's tensors by their new names, with weights in this dtype."""
        stored = partial(self._stored, scratch, dtype)
        return renamed_tensors(self._checkpoint, self._request.naming, dtype, stored, self._config)

    def _unrounded(self, scratch: ScratchFile, source: Renamed, names: Mapping[str, str]) -> list[Wanted]:
        """Return tensors as they are without `dtype`; `names` has their new names, each with that of the original."""
        if not names:
            return []
        kept = {name: source.tensors[name] for name in names.values()}
        found = {tensor.name: tensor for tensor in self._wanted(scratch, kept, source.weights, None)[1]}
        return [replace(found[name], name=new) for new, name in names.items()]

    def _said(self, values: Grouped) -> dict[str, Any]:
        """Return the values that Megatron keeps in `common.pt`, by their new names."""
        objects = self._checkpoint.objects
        said = {name: objects[old].value() for name, old in values.copied.items() if is_said(name)}
        return {**said, **{name: value for name, (_, value) in values.changed.items() if is_said(name)}}

    def _number(self, name: str, made: Assembled) -> float:
        """Return the only element of a tensor of shape () or (1,); others are refused."""
        if made.source is None or made.shape not in ((), (1,)):
            raise LayoutError(f"{shown(name)} of shape {made.shape} is not one number of steps")
        return float(self._checkpoint.read(made.source).reshape(()))

    def _with_steps(self, wanted: list[Wanted], kept: Mapping[str, Assembled]) -> list[Wanted]:
        """Replace the one step count of optax's Adam by a step for each parameter, as PyTorch has it."""
        counts = adam_counts(kept)
        found = {count: self._number(count, kept[count]) for count in counts.values()}
        steps = [wanted_number(name, np.array(found[count]), DTYPES["float32"]) for name, count in counts.items()]
        return [*(tensor for tensor in wanted if tensor.name not in found), *steps]

    def _stored(
        self, scratch: ScratchFile, dtype: Dtype | None, old: str, new: str, partition: Partition | SharedTiling | None
    ) -> Wanted:
        """Return a stored tensor to be copied from its place; if it must be converted, from the scratch file."""
        request, tensor = self._request, self._checkpoint[old]
        # States of an optimizer keep their dtype.
        dtype = None if self._checkpoint.training.is_state(old) else dtype
        is_other = is_converted(tensor, dtype)
        if tensor.is_addressable and not is_other:
            return wanted_stored(new, tensor, partition)
        if not is_other and tensor.shape == () and tensor.pieces and tensor.pieces[0].fill is not None:
            return wanted_number(new, self._checkpoint.read(old), tensor.known_dtype)
        self.obstacles.append(
            f"tensor {shown(old)} is converted; tasks copy bytes: reshard_checkpoint converts it first"
            if is_other
            else f"tensor {shown(old)} is compressed in the source, so no task can copy a part of it; "
            "reshard_checkpoint puts it together first"
        )
        return scratch.tensor(new, tensor, dtype, partition, request.memory, compare=request.compares)

    def _wanted(
        self, scratch: ScratchFile, kept: Mapping[str, Assembled], weights: Components, dtype: Dtype | None
    ) -> tuple[dict[str, str], list[Wanted]]:
        """Return new names by old ones, for stored tensors that no rewrite changes; and all tensors to be written.

        Stored tensors are converted to `dtype`, if it is given.
        """
        request = self._request
        names: dict[str, str] = {}
        wanted, fine = [], 0
        partitions = DescribedTensors(outline_of(kept), weights).partitions(request.layouts, request.uneven)
        for name, made in kept.items():
            partition = partitions[name]
            if made.stored is not None:
                names[made.stored] = name
                wanted.append(self._stored(scratch, dtype, made.stored, name, partition))
            elif not made.is_scattered:
                wanted.append(made.wanted(name, partition))
            elif request.is_written or (fine := fine + made.expected) > _MOST_FINE:
                self.obstacles.append(
                    f"tensor {shown(name)} and others have {fine} short runs together, and a plan has at "
                    f"most {_MOST_FINE}; reshard_checkpoint puts it together first"
                )
                wanted.append(scratch.assembled(name, made, partition, request.memory))
            else:
                wanted.append(made.wanted(name, partition))
        return names, wanted

    def _note(self, lost: Iterable[LeftOut], losses: list[LeftOut], names: Sequence[str]) -> None:
        """Note the tensors that rules or losses leave out, and a `drop` pattern that is found in no name."""
        checkpoint, unwanted = self._checkpoint, self._request.naming.unwanted
        unread = beside(checkpoint, unwanted)
        losses += unread
        self.doubts += [str(each) for each in losses if each.kind != "asked"]
        self.left_out += [*lost, *losses]
        there = [*names, *(name for each in unread for name in each.names)]
        if unwanted is not None and not any(map(unwanted.is_found, there)):
            self.doubts.append(f"drop is {shown(unwanted.pattern)}, which is found in no name of {checkpoint.path}")

    def _take_along(self, form: str, weights: Components) -> None:
        """Add the files that are copied along with a model, and the `config` of the request."""
        request = self._request
        if not WRITTEN[form].takes_files or request.rank is not None:
            return
        if self._folder is not None:
            found, left = companions_of(self._folder)
            self._along.update(found)
            self.doubts += left
        if request.config is not None:
            self._along["config.json"] = config_text(request.config)
            method = quantization_of(self._config).get("quant_method")
            if method is not None and not weights.tensors:
                self.doubts.append(
                    f"config says that weights are quantized by {shown(method)}, but none is; loaders will "
                    "look for their scales: remove its quantization_config"
                )


def _asked(checkpoint: StoredCheckpoint, taken: _Taken, unwanted: NamePattern | None) -> list[LeftOut]:
    """List the tensors and values that are left out because of `only` and `drop`."""
    sizes = {} if unwanted is None else {
        name: tensor.nbytes for name, tensor in checkpoint.items() if unwanted.is_found(name)
    }  # fmt: skip
    sizes |= {name: nbytes_of(made) for name, made in taken.tensors.items() if name not in taken.kept}
    known = {*taken.values, *taken.dropped_values}
    return asked_for(sizes, [name for name in (*checkpoint.objects, *checkpoint.unreadable) if name not in known])


#: The most pieces that tensors in very short runs may have in a plan; each takes about a hundred bytes.
_MOST_FINE = 1 << 20
