"""The buffers of distributed checkpoints: the states of each model-parallel rank, stored as the rank's buckets.

No file says which parameter is where in a bucket. The places are worked out from the weights' own pieces, each of which
was stored by one rank, and checked against the pieces of the buckets and the master copies in them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from ...._text import counted, shown
from ....errors import ParseError
from ...tensors.checkpoint import StoredObject
from ...tensors.stored import StoredTensor, UnsupportedError
from ...tensors.stored_pieces import StoredPiece
from ..torch.dcp import Contents, Index, Row
from ..torch.pickles import named_dtype, torch_sizes
from ..torch.tensors import Container, items_within
from .coalesced import SAVE_AGAIN, coalesced_states
from .parameters import FLOAT32, Parameter, Run, check_masters, later, state_pieces, tensor_of_ranks
from .positions import by_buffer, in_buckets
from .said import Arguments, Group, as_dict, groups_of

__all__ = ["LAYERS", "Buffers", "SavedBuffers"]

_BUCKET = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(?P<rank>\d{1,7})\.gbuf_idx_(?P<buffer>\d{1,5})\.dtype_\((?P<dtype>[\w.]+), "
    r"[\w.]+\)\.bucket_idx_(?P<bucket>\d{1,6})\.(?P<kind>\w+)"
)
_OBJECT = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(?P<rank>\d{1,7})\.(?P<what>optimizer|per_bucket_numel|"
    r"per_bucket_numel_unpadded|param_state)/shard_0_1"
)
#: The same with any prefix, as chained optimizers have them.
_ANY_BUCKET = re.compile(r".*\.dp_group_idx_\d+\.gbuf_idx_\d+\..*")
_ANY_STATE = re.compile(r".*\.dp_group_idx_\d+\.param_state/.*")
#: The keys of weights of layers, either of all layers together or with a layer's number.
LAYERS = re.compile(r"(?P<before>.*\blayers)\.(?:(?P<layer>\d{1,6})\.)?(?P<after>.+)")
_WRITER = re.compile(r"__(\d{1,7})_\d+\.distcp")
#: Megatron's names of kinds of states, and ours.
_KINDS = {"param": "master"}


class SavedBuffers(NamedTuple):
    """The parts of model-parallel ranks' buffers that a checkpoint has.

    Attributes:
        rows: The rows of each rank's buckets in the index.
        states: For each rank, the name of the value that holds all its buckets.
        others: For each rank, the names of further values by their meaning.
        names: The names of all tensors and values that are buckets.
    """

    rows: dict[int, list[Row]]
    states: dict[int, str]
    others: dict[int, dict[str, str]]
    names: set[str]

    @classmethod
    def of(cls, index: Index, objects: Mapping[str, StoredObject]) -> SavedBuffers:
        """Find the buffers among the tensors and values of an index."""
        found = cls({}, {}, {}, set())
        for row in index.tensors:
            match = _BUCKET.fullmatch(row.name)
            if match is not None:
                found.rows.setdefault(int(match["rank"]), []).append(row)
            if _ANY_BUCKET.fullmatch(row.name):
                found.names.add(row.name)
        for name in objects:
            match = _OBJECT.fullmatch(name)
            if _ANY_STATE.fullmatch(name):
                found.names.add(name)
            if match is not None and match["what"] == "param_state":
                found.states[int(match["rank"])] = name
            elif match is not None:
                found.others.setdefault(int(match["rank"]), {})[match["what"]] = name
        return found


class Buffers:
    """The buffers of all model-parallel ranks, with their parameters and the parameters' places."""

    def __init__(self, index: Index, arguments: Arguments, held: SavedBuffers) -> None:
        self.index, self.saved, self.arguments = index, held, arguments
        #: For each parameter and kind of state, its pieces, and the pieces of copies on other ranks.
        self.kinds: dict[str, dict[str, tuple[list[StoredPiece], list[StoredPiece]]]] = {}
        self.weights = {row.name: row for row in index.tensors if not row.name.startswith("optimizer.")}
        expert = next((name for name in self.weights if ".experts." in name), None)
        if expert is not None or arguments.experts > 1:
            raise self._unknown(f"{shown(expert)} belongs to experts, which have buckets of their own")
        other = next((name for name in held.names if not _BUCKET.fullmatch(name) and not _OBJECT.fullmatch(name)), None)
        if other is not None:
            raise self._unknown(f"{shown(other)} does not belong to the only optimizer")
        ranks = sorted(held.rows or held.states)
        if ranks != list(range(arguments.tp * arguments.pp)):
            raise index.error(
                f"has states of {len(ranks)} model-parallel ranks, {shown(ranks)}, but args in common.pt says that "
                f"there are {arguments.tp} x {arguments.pp}"
            )

    def groups(self, objects: Mapping[str, StoredObject]) -> list[Group]:
        """Return the groups of the optimizer, which each model-parallel rank has."""
        found: list[Group] = []
        for rank in range(self.arguments.tp * self.arguments.pp):
            name = self.saved.others.get(rank, {}).get("optimizer")
            if name is None:
                raise self.index.error(f"has no groups of the optimizer of model-parallel rank {rank}")
            value = objects[name].value()
            inner = as_dict(value[0] if isinstance(value, list) and len(value) == 1 else value)
            groups = groups_of(inner.get("param_groups"), f"{self.index.path}: {name}")
            found = found or groups
            if [group.step for group in groups] != [group.step for group in found]:
                raise self.index.error(
                    f"{shown(name)} has the steps {[group.step for group in groups]}, but those of rank 0 "
                    f"are {[group.step for group in found]}: files of two checkpoints are mixed"
                )
        return found

    def added_to(self, found: Contents) -> Contents:
        """Return the contents with the buffers replaced by the states that they hold."""
        for rank, rows in self.saved.rows.items():
            for piece in self.index.tensor(None, rows[0]).pieces:
                if self._writer(piece, rows[0].name) != (rank % self.arguments.tp, rank // self.arguments.tp):
                    raise ParseError(
                        f"{piece.path}: has a part of a bucket of model-parallel rank {rank}, but according to the "
                        f"args in common.pt ({self.arguments.tp} x {self.arguments.pp} in a world of "
                        f"{self.arguments.world}) it should not: the files belong to different checkpoints"
                    )
        chunks = self._chunks(self._parts(found.tensors))
        for rank in range(self.arguments.tp * self.arguments.pp):
            self._read(rank, chunks[rank], found.objects)
        tensors = {name: tensor for name, tensor in found.tensors.items() if _BUCKET.fullmatch(name) is None}
        for key, kinds in self.kinds.items():
            for kind, (own, copies) in kinds.items():
                name = f"optimizer.state.{key}.{_KINDS.get(kind, kind)}"
                if name in tensors:
                    raise self.index.error(f"has the tensor {shown(name)}, which its buckets have too")
                tensors[name] = tensor_of_ranks(name, FLOAT32, self.weights[key].shape, own, copies, self.index.path)
        objects = {name: held for name, held in found.objects.items() if _OBJECT.fullmatch(name) is None}
        return Contents(tensors, objects, found.unreadable)

    def _chunks(self, held: list[dict[tuple[int | None, str], Parameter]]) -> list[list[list[Parameter]]]:
        """Return, for each model-parallel rank, the chunks of the model, each with its parameters in order."""
        arguments = self.arguments
        before: list[str] = []
        after: list[str] = []
        layered: list[str] = []
        starts = set()
        for name in self.weights:
            match = LAYERS.fullmatch(name)
            if match is not None:
                starts.add(match["before"])
                layered.append(name)
            else:
                (after if layered else before).append(name)
        if len(starts) > 1:
            raise self._unknown(f"it has layers under several names, {', '.join(sorted(starts))}")
        found = []
        for rank, own in enumerate(held):
            stage = rank // arguments.tp
            layers = sorted({layer for layer, _ in own if layer is not None})
            if len(layers) % arguments.chunks:
                raise self._unknown(
                    f"stage {stage} has {counted(len(layers), 'layer')} in {counted(arguments.chunks, 'chunk')}"
                )
            each = len(layers) // arguments.chunks
            chunks = [
                [
                    own[layer, name]
                    for layer in layers[at * each : (at + 1) * each]
                    for name in layered
                    if (layer, name) in own
                ]
                for at in range(arguments.chunks)
            ]
            chunks[0][:0] = [own[None, name] for name in before if (None, name) in own]
            chunks[-1] += [own[None, name] for name in after if (None, name) in own]
            if arguments.tied and arguments.pp > 1 and stage == arguments.pp - 1:
                original = next((held[rank % arguments.tp].get((None, name)) for name in before), None)
                if original is None:
                    raise self._unknown("the output layer is tied to an embedding that the first stage does not have")
                chunks[-1].append(original._replace(first=None, is_copy=True))
            found.append(chunks)
        return found

    def _parts(self, tensors: Mapping[str, StoredTensor]) -> list[dict[tuple[int | None, str], Parameter]]:
        """Return, for each model-parallel rank, its parameters by layer and key."""
        arguments = self.arguments
        blocks: list[dict[tuple[int | None, str], list[StoredPiece]]] = [{} for _ in range(arguments.tp * arguments.pp)]
        for name in self.weights:
            match = LAYERS.fullmatch(name)
            stacked = match is not None and match["layer"] is None
            for piece in tensors[name].pieces:
                tp, stage = self._writer(piece, name)
                layer = None if match is None else int(match["layer"] or piece.bounds[0][0])
                if stacked and piece.bounds[0][1] - piece.bounds[0][0] != 1:
                    raise self._unknown(f"{shown(name)} is not stored layer by layer")
                blocks[stage * arguments.tp + tp].setdefault((layer, name), []).append(piece)
        shared = arguments.tied is True and arguments.pp > 1
        found: list[dict[tuple[int | None, str], Parameter]] = []
        for rank in range(arguments.tp * arguments.pp):
            low = rank // arguments.tp * arguments.tp
            peers = range(low, low + arguments.tp)
            own: dict[tuple[int | None, str], Parameter] = {}
            for key in {key: None for peer in peers for key in blocks[peer]}:
                holders = [peer for peer in peers if key in blocks[peer]]
                match = LAYERS.fullmatch(key[1])
                numbered = match is not None and match["layer"] is None
                if len(holders) not in (1, arguments.tp):
                    raise self._unknown(f"{len(holders)} of {arguments.tp} tensor-parallel ranks have {shown(key[1])}")
                if len(holders) == 1 and not _is_whole(blocks[holders[0]][key], self.weights[key[1]].shape, numbered):
                    raise self._unknown(f"only 1 of {arguments.tp} tensor-parallel ranks has a part of {shown(key[1])}")
                holder = rank if len(holders) > 1 else holders[0]
                own[key] = self._parameter(key, blocks[holder][key], numbered, shared, holder != rank)
            found.append(own)
        return found

    def _parameter(
        self, key: tuple[int | None, str], pieces: list[StoredPiece], numbered: bool, shared: bool, is_copy: bool
    ) -> Parameter:
        name = key[1]
        dtype = named_dtype(self.weights[name].dtype)
        assert dtype is not None
        pieces = sorted(pieces, key=lambda piece: piece.bounds)
        for one, other in pairwise(piece.bounds[numbered:] for piece in pieces):
            if [side for at, side in enumerate(one) if at] != [side for at, side in enumerate(other) if at]:
                raise self._unknown(f"{shown(name)} is in several parts that are not next to each other")
        first = pieces[0]
        return Parameter(
            name,
            dtype,
            tuple(piece.bounds for piece in pieces),
            partial(later, first, 0),
            shared and name.endswith("embedding.word_embeddings.weight"),
            is_copy,
            numbered,
        )

    def _writer(self, piece: StoredPiece, name: str) -> tuple[int, int]:
        """Return the tensor-parallel rank and the stage of the rank that stored a piece."""
        match = _WRITER.fullmatch(piece.path.name)
        found = None if match is None else self.arguments.stage_of(int(match[1]))
        if found is None:
            raise self._unknown(
                f"{piece.path.name} with a part of {shown(name)} belongs to no rank in a world of "
                f"{self.arguments.world}"
            )
        return found

    def _unknown(self, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.index.folder}: nothing says which parameters are where in the buckets of its optimizer, and it "
            f"cannot be worked out: {why}; {SAVE_AGAIN}"
        )

    def _read(self, rank: int, chunks: list[list[Parameter]], objects: Mapping[str, StoredObject]) -> None:
        """Find the states of one model-parallel rank."""
        buffers = by_buffer(chunks)
        found = self._in_buckets(rank, buffers) if self.saved.rows else self._coalesced(rank, buffers, objects)
        for parameter, kind, runs in found:
            own, copies = self.kinds.setdefault(parameter.name, {}).setdefault(kind, ([], []))
            (copies if parameter.is_copy else own).extend(state_pieces(parameter.blocks, runs))

    def _in_buckets(self, rank: int, buffers: list[list[Parameter]]) -> Iterator[tuple[Parameter, str, list[Run]]]:
        """Yield the states in a rank's buckets, each of which is a tensor: parameter, kind, runs of elements."""
        rows: dict[tuple[int, int], dict[str, Row]] = {}
        for row in self.saved.rows[rank]:
            match = _BUCKET.fullmatch(row.name)
            assert match is not None
            if named_dtype(row.dtype) is None or len(row.shape) != 1 or row.dtype != "torch.float32":
                raise self._unknown(
                    f"{shown(row.name)} is of {row.dtype} and shape {row.shape}; a bucket must be float32 with one dim"
                )
            rows.setdefault((int(match["buffer"]), int(match["bucket"])), {})[match["kind"]] = row
        padded = self._padded(rank)
        for number, parameters in enumerate(buffers):
            ours = {bucket: kinds for (buffer, bucket), kinds in rows.items() if buffer == number}
            lengths = []
            for bucket in range(len(ours)):
                kinds = ours.get(bucket, {})
                if "param" not in kinds:
                    raise self.index.error(
                        f"has no bucket {bucket} with master copies of buffer {number} of rank {rank}"
                    )
                match = _BUCKET.fullmatch(kinds["param"].name)
                if match is not None and match["dtype"] != f"torch.{parameters[0].dtype.name}":
                    raise self._unknown(
                        f"buffer {number} of rank {rank} is of {match['dtype']}, which is not the dtype of its "
                        "parameters"
                    )
                lengths.append(kinds["param"].shape[0])
            places = in_buckets(parameters, lengths)
            if places is None:
                raise self._unknown(
                    f"the {len(parameters)} parameters of model-parallel rank {rank} do not fill buckets of "
                    f"{shown(lengths)} elements"
                )
            compared = []
            for bucket, starts in enumerate(places):
                for kind, row in ours[bucket].items():
                    stored = self._checked(row, starts, parameters, padded.get((number, bucket)))
                    for at, start in starts:
                        parameter = parameters[at]
                        runs = [
                            Run(low - start, high - start, piece.path, partial(later, piece, 0))
                            for low, high, piece in stored
                            if low < start + parameter.size and high > start
                        ]
                        if kind == "param":
                            compared.append((parameter, runs))
                        yield parameter, kind, runs
            check_masters(compared, self.index.path)
        if len({buffer for buffer, _ in rows}) != len(buffers):
            raise self._unknown(f"rank {rank} has {len({buffer for buffer, _ in rows})} buffers, not {len(buffers)}")

    def _checked(
        self, row: Row, starts: list[tuple[int, int]], parameters: list[Parameter], padded: int | None
    ) -> list[tuple[int, int, StoredPiece]]:
        """Return the pieces of a bucket; refuse one whose pieces do not begin and end as its parameters require."""
        tensor = self.index.tensor(None, row)
        stored = sorted(((*piece.bounds[0], piece) for piece in tensor.pieces), key=lambda each: each[0])
        edges = {edge for low, high, _ in stored for edge in (low, high)}
        size, ways = row.shape[0], self.arguments.ways
        wanted = {0, size}
        for at, start in starts:
            wanted |= {start, start + parameters[at].size}
        if padded is None or padded < size or (ways and padded % ways):
            raise self.index.error(
                f"{shown(row.name)} has {shown(padded)} elements with padding according to its metadata, which "
                f"{ways} data-parallel ranks do not divide evenly"
            )
        if ways:
            wanted |= set(range(0, size, padded // ways))
        else:
            edges &= wanted
        if edges != wanted:
            where = min(edges ^ wanted)
            piece = next((piece for low, high, piece in stored if where in (low, high)), stored[0][2])
            raise ParseError(
                f"{piece.path}: {shown(row.name)} has {'a' if where in edges else 'no'} piece that begins or ends at "
                f"element {where}, unlike the parameters of {ways} data-parallel ranks: the file belongs to "
                "another checkpoint, or Megatron laid its buckets out in another way"
            )
        return stored

    def _padded(self, rank: int) -> dict[tuple[int, int], int]:
        """Return the number of elements of each bucket, with the padding at its end, by buffer and bucket."""
        name = self.saved.others.get(rank, {}).get("per_bucket_numel")
        held = dict(self.index.objects).get(name) if name is not None else None
        if name is None or held is None:
            raise self.index.error(f"has no per_bucket_numel of model-parallel rank {rank}")
        value = self.index.object(name, held).value()
        found: dict[tuple[int, int], int] = {}
        for number, buffer in enumerate(value[0] if isinstance(value, list) and len(value) == 1 else ()):
            for _, sizes in items_within(buffer) or ():
                for bucket, size in enumerate(torch_sizes(sizes) or ()):
                    found[number, bucket] = size
        return found

    def _coalesced(
        self, rank: int, buffers: list[list[Parameter]], objects: Mapping[str, StoredObject]
    ) -> Iterator[tuple[Parameter, str, list[Run]]]:
        """Yield the states in a rank's one value, which holds all its buckets: parameter, kind, runs of elements."""
        extent = objects[self.saved.states[rank]].extent
        assert extent is not None
        container = Container(*extent)
        value = container.read_objects()
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        yield from coalesced_states(container, value, buffers, f"model-parallel rank {rank}")


def _is_whole(pieces: list[StoredPiece], shape: tuple[int, ...], numbered: bool) -> bool:
    """Return whether pieces are a whole tensor; with `numbered`, a whole layer, as the first dim counts layers."""
    held = sum(math.prod(stop - start for start, stop in piece.bounds[numbered:]) for piece in pieces)
    return held == math.prod(shape[numbered:])
