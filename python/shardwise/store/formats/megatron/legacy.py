"""Megatron's folders of ranks, `mp_rank_TT_PPP`: for each model-parallel rank a file of its model and its optimizer.

Names are numbered within a stage, and tensors are local. `deploy.megatron.gpt` knows, by name, how each is cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from ...._text import counted, shown
from ....deploy.megatron import Ranks, gpt, pipeline
from ....errors import LayoutError, ParseError
from ....pieces import Bounds
from ....placing import Placing, partition_of
from ...data.boxes import contiguous_strides
from ...data.location import Location, entries_of, opening
from ...tensors.checkpoint import Besides, StoredCheckpoint, StoredObject
from ...tensors.stored import StoredTensor
from ...tensors.stored_pieces import StoredPiece
from ..torch.tensors import SavedTensor, sums_of, value_object
from .coalesced import coalesced_states
from .parameters import FLOAT32, Parameter, Run, differing, state_pieces, tensor_of_ranks
from .positions import by_buffer
from .rank_folders import MegatronRank, folders_of, is_chunk, not_read, rank_of
from .said import (
    Group,
    as_dict,
    groups_of,
    members_of,
    objects_of,
    saved_step,
    step_tensor,
    with_groups,
)

__all__ = ["open_ranks"]

_MODEL, _OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"
_LAYER = re.compile(r"(?P<before>.*\blayers)\.(?P<layer>\d{1,6})\.(?P<after>.+)")
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_KINDS = {"param": "master"}


def open_ranks(path: Location) -> StoredCheckpoint:
    """Open the folder of an iteration, with a folder for each rank."""
    names = folders_of(path)
    inside = {name: {file for file, _ in entries_of(path / name)} for name in names.values()}
    chosen = [path / name / file for name in names.values() for file in (_MODEL, _OPTIMIZER) if file in inside[name]]
    with opening(chosen) as (open_next, files):
        ranks = {}
        for at, name in names.items():
            if _MODEL not in inside[name]:
                raise ParseError(f"{path / name}: has no {_MODEL}: files are missing, or the save was interrupted")
            held = open_next(path / name / _MODEL)
            states = open_next(path / name / _OPTIMIZER) if _OPTIMIZER in inside[name] else None
            ranks[at] = rank_of(held, states)
        model = _RankFiles(path, ranks)
        tensors, objects = model.contents()
    metadata = {"model_parallel_ranks": len(names)}
    return StoredCheckpoint(
        path, "megatron", tensors, files, Besides(metadata=metadata, objects=objects, sums=partial(sums_of, files))
    )


class _RankFiles:
    """The files of all model-parallel ranks, combined into tensors."""

    def __init__(self, path: Location, ranks: dict[tuple[int, int], MegatronRank]) -> None:
        self.path, self.ranks = path, ranks
        self.first = next(iter(ranks.values()))
        self.arguments = arguments = self.first.arguments
        for rank in ranks.values():
            said, ours = rank.arguments, rank.values.get("iteration")
            for what, one, other in (
                ("tensor_model_parallel_size", said.tp, arguments.tp),
                ("pipeline_model_parallel_size", said.pp, arguments.pp),
                ("num_layers", said.layers, arguments.layers),
                ("iteration", ours, self.first.values.get("iteration")),
                ("number of chunks of the model", len(rank.chunks), len(self.first.chunks)),
            ):
                if one != other:
                    raise ParseError(
                        f"{rank.path}: its {what} is {shown(one)}, but in {self.first.path} it is {shown(other)}: "
                        "files of two checkpoints are mixed"
                    )
            if (rank.optimizer is None) != (self.first.optimizer is None):
                without = rank if rank.optimizer is None else self.first
                raise ParseError(f"{without.path.parent}: has no {_OPTIMIZER}, which other ranks have")
        wanted = [(tp, pp) for tp in range(arguments.tp) for pp in range(arguments.pp)]
        if sorted(ranks) != wanted:
            absent = next((at for at in wanted if at not in ranks), None)
            which = f"there is a folder of rank {max(ranks)}" if absent is None else f"no folder is of rank {absent}"
            raise ParseError(
                f"{path}: {which}, but args in {self.first.path} says that tensor_model_parallel_size is "
                f"{arguments.tp} and pipeline_model_parallel_size {arguments.pp}"
            )
        if arguments.experts > 1:
            raise not_read(path, f"its experts are on {counted(arguments.experts, 'rank')}")
        self.layouts = gpt(
            Ranks(arguments.tp, tp=arguments.tp), pipeline(1, pp=1), gated=bool(arguments.gated), tied=False
        )
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.weights: dict[str, tuple[list[StoredPiece], list[StoredPiece]]] = {}
        self.states: dict[str, dict[str, tuple[list[StoredPiece], list[StoredPiece]]]] = {}
        self.steps: dict[str, StoredTensor] = {}
        #: For each chunk of a rank, the parameters with their arrays.
        self.parameters: dict[tuple[int, int], list[list[tuple[Parameter, SavedTensor]]]] = {}

    def contents(self) -> tuple[dict[str, StoredTensor], dict[str, StoredObject]]:
        """Return the tensors and values of the checkpoint."""
        self._place()
        groups: list[Group] = []
        members: dict[int, list[str]] = {}
        for at, rank in self.ranks.items():
            groups, members = self._optimizer(at, rank)
        dtypes = {each.name: each.dtype for chunks in self.parameters.values() for each, _ in chain(*chunks)}
        tensors = {
            name: tensor_of_ranks(name, dtypes[name], self.shapes[name], own, copies, self.path)
            for name, (own, copies) in self.weights.items()
        }
        for name, kinds in self.states.items():
            for kind, (own, copies) in kinds.items():
                text = f"optimizer.state.{name}.{_KINDS.get(kind, kind)}"
                tensors[text] = tensor_of_ranks(text, FLOAT32, self.shapes[name], own, copies, self.path)
        tensors.update(self.steps)
        if self.states:
            self._add_steps(tensors, groups)
        objects = with_groups(groups, members)
        for (tp, pp), rank in self.ranks.items():
            if "rng_state" in rank.values:
                name = f"rng_state.mp_rank_{tp:02d}_{pp:03d}"
                objects[name] = value_object(name, rank.values["rng_state"])
        taken = {"optimizer", "rng_state", *(key for key in self.first.values if is_chunk(key))}
        beside = {key: value for key, value in self.first.values.items() if key not in taken}
        file = self.first.container.file
        return tensors, {**objects_of(beside, file.path, file.size, whole=("args",)), **objects}

    # The weights.

    def _place(self) -> None:
        """Find the boxes of all tensors of all ranks."""
        arguments = self.arguments
        offset = 0
        for chunk in range(len(self.first.chunks)):
            for stage in range(arguments.pp):
                layers = self._layers(chunk, stage)
                for tp in range(arguments.tp):
                    rank = self.ranks[tp, stage]
                    named = list(self._named(tp, stage, chunk, offset))
                    self.parameters.setdefault((tp, stage), []).append(named)
                    for parameter, saved in named:
                        own, copies = self.weights.setdefault(parameter.name, ([], []))
                        starts = 0
                        for block in parameter.blocks:
                            local = (starts, *[0] * (len(block) - 1)) if block else ()
                            piece = rank.container.piece(saved, parameter.name, block, local)
                            (copies if parameter.is_copy else own).append(piece)
                            starts += block[0][1] - block[0][0] if block else 0
                offset += layers
        if arguments.layers and offset != arguments.layers:
            raise ParseError(
                f"{self.path}: has {counted(offset, 'layer')}, but args in {self.first.path} says that num_layers is "
                f"{arguments.layers}"
            )

    def _layers(self, chunk: int, stage: int) -> int:
        """Return the number of layers of a chunk; all tensor-parallel ranks must have the same."""
        found: dict[str, MegatronRank] = {}
        names: set[str] = set()
        for tp in range(self.arguments.tp):
            rank = self.ranks[tp, stage]
            own = set(rank.chunks[chunk])
            if found and own != names:
                name = min(own ^ names)
                raise ParseError(
                    f"{rank.path}: {'has' if name in own else 'has no'} {shown(name)}, unlike the other ranks of its "
                    "stage: files of two checkpoints are mixed"
                )
            names, found[rank.path.name] = own, rank
        numbers = {int(match["layer"]) for match in map(_LAYER.fullmatch, names) if match is not None}
        if numbers != set(range(len(numbers))):
            raise ParseError(f"{rank.path}: has the layers {shown(sorted(numbers))}, which are not one after the other")
        return len(numbers)

    def _named(self, tp: int, stage: int, chunk: int, offset: int) -> Iterator[tuple[Parameter, SavedTensor]]:
        """Yield the parameters of a chunk of a rank, under the names that they have in the whole model."""
        arguments, rank = self.arguments, self.ranks[tp, stage]
        shared = arguments.tied is True and arguments.pp > 1
        for local, saved in rank.chunks[chunk].items():
            match = _LAYER.fullmatch(local)
            name = f"{match['before']}.{int(match['layer']) + offset}.{match['after']}" if match else local
            is_copy = name == _OUTPUT and shared
            if name == _OUTPUT and arguments.pp > 1 and arguments.tied is None:
                raise not_read(rank.path, f"args does not say whether {_OUTPUT} is the embedding")
            if saved.strides != contiguous_strides(saved.shape, 1):
                raise not_read(rank.path, f"{shown(name)} is not in C order")
            name = _EMBEDDING if is_copy else name
            shape, boxes = self._cut(name, saved.shape, tp, rank)
            if self.shapes.setdefault(name, shape) != shape:
                raise ParseError(
                    f"{rank.path}: {shown(name)} has the shape {saved.shape}, so the whole has {shape}, but "
                    f"{self.shapes[name]} on other ranks: files of two checkpoints are mixed"
                )
            first = partial(rank.container.extent, saved, name)
            is_shared = shared and name == _EMBEDDING
            yield Parameter(name, saved.dtype, boxes, first, is_shared, is_copy), saved

    def _cut(
        self, name: str, local: tuple[int, ...], tp: int, rank: MegatronRank
    ) -> tuple[tuple[int, ...], tuple[Bounds, ...]]:
        """Return the shape of the whole tensor of which a rank has an array, and the array's boxes in the tensor."""
        ways, found = self.arguments.tp, {}
        if "linear_fc1" in name and self.arguments.gated is None:
            raise not_read(
                rank.path, f"args does not say swiglu, so it is not known whether {shown(name)} is two projections"
            )
        match = _LAYER.fullmatch(name)
        ruled = f"{match['before']}.0.{match['after']}" if match else name
        for dim in range(-1, len(local) if ways > 1 else 0):
            shape = tuple(size * ways if at == dim else size for at, size in enumerate(local))
            boxes = _boxes(self.layouts, ruled, shape, tp)
            if boxes is None:
                break
            if boxes and _sides(boxes) == local:
                found[shape] = boxes
        if len(found) != 1:
            raise not_read(rank.path, f"nothing says how {shown(name)} of shape {local} is cut over {ways} ranks")
        ((shape, boxes),) = found.items()
        words = self.arguments.vocabulary
        if name == _EMBEDDING and words and shape[0] != words:
            raise ParseError(
                f"{rank.path}: {shown(name)} has {local[0]} rows on one of {ways} ranks, but according to args the "
                f"whole has {words}: files of two checkpoints are mixed"
            )
        return shape, boxes

    # The optimizer.

    def _optimizer(self, at: tuple[int, int], rank: MegatronRank) -> tuple[list[Group], dict[int, list[str]]]:
        """Add the states of a rank; return its optimizer's groups, and the parameters of each group."""
        said = as_dict(rank.values.get("optimizer"))
        if not said:
            return [], {}
        inner = as_dict(said.get("optimizer")) or said
        groups = groups_of(inner.get("param_groups"), rank.path)
        chunks = self.parameters[at]
        decays = {each.name: _decays(each) for each, _ in chain(*self._all_chunks())}
        if rank.optimizer is not None:
            buffers = by_buffer([[parameter for parameter, _ in chunk] for chunk in chunks])
            value = rank.optimizer.read_objects()
            for parameter, kind, runs in coalesced_states(rank.optimizer, value, buffers, rank.path.parent.name):
                self._add(parameter, kind, runs)
            return groups, members_of(groups, decays)
        state = as_dict(inner.get("state"))
        if not state:
            raise ParseError(f"{rank.path.parent}: has no {_OPTIMIZER}, and {_MODEL} has no states: files are missing")
        self._numbered(rank, groups, state, said.get("fp32_from_fp16_params"), list(chain(*chunks)))
        return groups, members_of(groups, decays)

    def _all_chunks(self) -> Iterator[list[tuple[Parameter, SavedTensor]]]:
        for chunks in self.parameters.values():
            yield from chunks

    def _numbered(
        self,
        rank: MegatronRank,
        groups: Sequence[Group],
        state: Mapping[Any, Any],
        masters: Any,
        parameters: Sequence[tuple[Parameter, SavedTensor]],
    ) -> None:
        """Add states by the numbers of their parameters, which count through the groups, in the order of the model."""
        container = rank.container
        if len({parameter.dtype for parameter, _ in parameters}) > 1:
            raise not_read(
                rank.path, "its parameters are of several dtypes, and those of its optimizer only have numbers"
            )
        for number, group in enumerate(groups):
            own = [each for each in parameters if _decays(each[0]) == group.decays]
            numbers = group.numbers or []
            held = masters[number] if isinstance(masters, list) and number < len(masters) else None
            if len(numbers) != len(own) or (held is not None and (not isinstance(held, list) or len(held) != len(own))):
                raise not_read(
                    rank.path,
                    f"group {number} of its optimizer has {counted(len(numbers), 'parameter')}, but {len(own)} "
                    "parameters are of "
                    "its kind",
                )
            for position, (key, (parameter, array)) in enumerate(zip(numbers, own, strict=True)):
                kinds = dict(as_dict(state.get(key)))
                step = kinds.pop("step", None)
                if held is not None:
                    kinds["param"] = held[position]
                for kind, value in kinds.items():
                    saved = container.tensor(value, f"{kind} {key}")
                    if saved is None or saved.shape != array.shape or saved.dtype != FLOAT32:
                        raise not_read(
                            rank.path, f"{shown(kind)} of parameter {key} must be float32 of shape {array.shape}, like "
                                       f"{shown(parameter.name)} on this rank",
                        )  # fmt: skip
                    if saved.strides != contiguous_strides(saved.shape, 1):
                        raise not_read(rank.path, f"{shown(kind)} of parameter {key} is not in C order")
                    run = Run(0, parameter.size, rank.path, partial(container.extent, saved, f"{kind} {key}"))
                    if kind == "param" and (wrong := differing(parameter, [run])):
                        raise ParseError(f"{rank.path}: {wrong}: the optimizer's parameters are in another order")
                    self._add(parameter, kind, [run])
                name = f"optimizer.state.{parameter.name}.step"
                made = saved_step(container, step, name)
                if made is not None:
                    self.steps.setdefault(name, made(name))

    def _add(self, parameter: Parameter, kind: str, runs: list[Run]) -> None:
        own, copies = self.states.setdefault(parameter.name, {}).setdefault(kind, ([], []))
        (copies if parameter.is_copy else own).extend(state_pieces(parameter.blocks, runs))

    def _add_steps(self, tensors: dict[str, StoredTensor], groups: Sequence[Group]) -> None:
        """Add a step for each parameter, where only the groups state steps."""
        steps = {group.step for group in groups}
        decays = {each.name: _decays(each) for each, _ in chain(*self._all_chunks())}
        by_kind = {group.decays: group.step for group in groups}
        for name in self.states:
            text = f"optimizer.state.{name}.step"
            step = steps.copy().pop() if len(steps) == 1 else by_kind.get(decays[name])
            if text not in tensors and step is not None:
                tensors[text] = step_tensor(text, step, self.first.path)


def _decays(parameter: Parameter) -> bool:
    """Return whether a parameter has weight decay by Megatron's rule: it is a matrix, and no bias."""
    return parameter.ndim > 1 and not parameter.name.endswith(".bias")


def _boxes(layouts: Placing, name: str, shape: tuple[int, ...], tp: int) -> tuple[Bounds, ...] | None:
    """Return the boxes of a rank's own array by the rules; `None` without a rule, no boxes for an impossible shape."""
    try:
        partition = partition_of(layouts, name, shape, "even")
    except LayoutError:
        return ()
    if partition is None:
        return None
    held = sorted(partition.pieces(partition.holders[tp]), key=lambda piece: piece.start)
    return tuple(tuple((side.start, side.stop) for side in piece.box) for piece in held)


def _sides(boxes: Sequence[Bounds]) -> tuple[int, ...]:
    """Return the shape of the array made of boxes one after the other along the first dim."""
    first = boxes[0]
    rows = sum(box[0][1] - box[0][0] for box in boxes) if first else 0
    return (rows, *(stop - start for start, stop in first[1:])) if first else ()
