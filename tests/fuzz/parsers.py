"""Every parser, on any bytes and on inputs that were right before they were spoilt.

What is read must be a value: it can be written, and what was written is read as the same value again. `tests/corpus`
keeps for each parser right inputs, from which the spoilt ones are made, and everything that was ever read wrongly: a
line is a literal of Python's bytes.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

import shardwise as sw
from shardwise import dtensor as dt
from shardwise.cli import main as command_line
from shardwise.cli import notation
from shardwise.interop import hlo, shardy
from shardwise.interop import torch as placements
from shardwise.store.formats.torch.pickles import read_objects, read_strict
from tests.fuzz.arguments import FOLDER, MESH
from tests.fuzz.limits import limited
from tests.store.orbax_files import Database, file_table, item, node, uleb
from tests.store.torch_files import Dcp, dtensor, save

CORPUS = Path(__file__).parent.parent / "corpus"
KERAS = Path(__file__).parent.parent / "data" / "checkpoints" / "orbax_keras" / "keras"
ZARR = {
    "two": b'{"zarr_format":2,"shape":[4],"chunks":[4],"dtype":"<f4","compressor":null,"fill_value":0,"order":"C",'
    b'"filters":null}',
    "three": b'{"zarr_format":3,"node_type":"array","shape":[4],"data_type":"int32","fill_value":0,'
    b'"chunk_grid":{"name":"regular","configuration":{"chunk_shape":[4]}},'
    b'"chunk_key_encoding":{"name":"default"},"codecs":[{"name":"bytes","configuration":{"endian":"little"}}]}',
}
#: One array of 16 bytes, which lie in a file, and its metadata, which lie in the node.
LEAF = (
    b"\0" + file_table(["d/values"]) + uleb(2, 2, 9, 1) + b"w/.zarray0" + uleb(len(ZARR["two"]), 16) + bytes([0, 1])
    + uleb(0, 5) + ZARR["two"]
)  # fmt: skip


@dataclass(frozen=True)
class Parser:
    """What is done with an input, and bits that are worth putting into one."""

    check: Callable[[bytes], None]
    scraps: str


def corpus(name: str) -> list[bytes]:
    """The kept inputs of a parser."""
    lines = (CORPUS / f"{name}.txt").read_text("ascii").splitlines()
    return [ast.literal_eval(line) for line in lines if line and not line.startswith("#")]


def text(data: bytes) -> str:
    """The bytes as text, whatever they are: what is not UTF-8 becomes half of a surrogate pair."""
    return data.decode(errors="surrogateescape")


def mesh_text(data: bytes) -> None:
    mesh = dt.Mesh.from_string(text(data))
    assert mesh.to_string() == text(data) or "*" in text(data)
    assert dt.Mesh.from_string(mesh.to_string()) == mesh
    assert dt.Mesh.from_proto(mesh.as_proto()) == mesh


def layout_text(data: bytes) -> None:
    layout = dt.Layout.from_string(text(data))
    assert layout.to_string() == text(data)
    assert dt.Layout.from_str(layout.serialized_string()) == layout


def mesh_message(data: bytes) -> None:
    message = dt.MeshProto.FromString(data)
    assert dt.MeshProto.FromString(message.SerializeToString()) == message
    mesh = dt.Mesh.from_proto(message)
    assert dt.Mesh.from_string(mesh.to_string()) == mesh


def layout_message(data: bytes) -> None:
    message = dt.LayoutProto.FromString(data)
    assert dt.LayoutProto.FromString(message.SerializeToString()) == message
    layout = dt.Layout.from_str(data)
    assert dt.Layout.from_str(layout.serialized_string()) == layout


def device(data: bytes) -> None:
    spec = dt.DeviceSpec.from_string(text(data))
    assert dt.DeviceSpec.from_string(spec.to_string()) == spec


def hlo_sharding(data: bytes) -> None:
    sharding = hlo.parse_hlo(text(data))
    assert hlo.parse_hlo(str(sharding)) == sharding
    layout = hlo.from_hlo(text(data), MESH, 2)
    assert hlo.from_hlo(hlo.to_hlo(layout), MESH, 2).num_shards == layout.num_shards


def shardy_sharding(data: bytes) -> None:
    layout = shardy.from_shardy(text(data), MESH)
    assert shardy.from_shardy(shardy.to_shardy(layout), layout.device_mesh) == layout


def shardy_mesh(data: bytes) -> None:
    mesh = shardy.mesh_from_shardy(text(data))
    assert shardy.mesh_from_shardy(shardy.mesh_to_shardy(mesh)).shape == mesh.shape


def rules(data: bytes) -> None:
    layout_map = sw.LayoutMap.from_toml(io.StringIO(text(data)))
    file = io.StringIO()
    layout_map.to_toml(file)
    again = sw.LayoutMap.from_toml(io.StringIO(file.getvalue()))
    assert again == layout_map
    assert list(again) == list(layout_map)
    rewrites = sw.Rewrites.from_toml(io.StringIO(text(data)))
    assert eval(repr(rewrites), {"Rewrites": sw.Rewrites, "packed": sw.packed}) == rewrites
    with contextlib.suppress(sw.LayoutError):  # Of a size that is missing.
        assert rewrites.inverse().inverse() == rewrites


def rule(data: bytes) -> None:
    """A pattern, a line feed, and the path in which it is searched: as Python's `re` does it."""
    pattern, _, path = text(data).partition("\n")
    path = path[:16]  # Python's engine, which is asked here, backtracks for ever on a long one.
    layout_map = sw.LayoutMap()
    if pattern:
        layout_map[pattern] = ()
    found = bool(layout_map.matching_rules(path))
    assert found == bool(pattern and (path == pattern or re.search(pattern, path)))


def safetensors(data: bytes) -> None:
    path = FOLDER / "fuzzed.safetensors"
    path.write_bytes(data)
    with sw.open_checkpoint(path) as checkpoint:
        for tensor in checkpoint.values():
            with contextlib.suppress(TypeError):  # Packed elements.
                array = tensor.array()
                assert array.shape == tensor.shape
                assert array.tobytes() == tensor.read().tobytes()


def safetensors_index(data: bytes) -> None:
    folder = FOLDER / "sharded"
    folder.mkdir(exist_ok=True)
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (folder / "one.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\1")
    (folder / "model.safetensors.index.json").write_bytes(data)
    with sw.open_checkpoint(folder) as checkpoint:
        assert {name: checkpoint[name].array().tolist() for name in checkpoint} in ({"a": [1]}, {})


def dcp() -> Dcp:
    """A distributed checkpoint of a tensor in two chunks and a scalar."""
    made = Dcp()
    made.add("w", (4,), [((0,), np.ones(2, np.float32)), ((2,), np.ones(2, np.float32))])
    made.add("s", (), [((), np.array(1, np.int64))], "__1_0.distcp")
    return made


def read_all(path: Path) -> None:
    """Open a checkpoint and read all there is in it, whole and in part."""
    with sw.open_checkpoint(path) as checkpoint:
        for held in checkpoint.objects.values():
            held.value()
        for tensor in checkpoint.values():
            assert tensor.tiling.shape == tensor.shape
            with contextlib.suppress(
                TypeError
            ):  # Packed elements, and sizes that only a dim of 0 keeps from being large.
                if tensor.nbytes <= 1 << 20:
                    array = tensor.read()
                    half = tuple(slice(size // 2, size) for size in tensor.shape)
                    assert tensor.read(half).tobytes() == array[half].tobytes()


def pickled(data: bytes) -> None:
    """A pickle by itself, where anything inert may lie in it and where not."""
    with contextlib.suppress(sw.ParseError):
        read_strict(data, "fuzzed", persistent=True)
    read_objects(data, "fuzzed")


def torch_file(data: bytes) -> None:
    (FOLDER / "fuzzed.pt").write_bytes(data)
    read_all(FOLDER / "fuzzed.pt")


def rank_state(rank: int) -> dict[str, Any]:
    """What a rank of FSDP2 saves: three rows of two on two ranks, beside a tensor that both have whole."""
    rows, shape, mesh = [2, 1], (3, 2), (2,)
    whole = np.arange(4, dtype=np.float32)
    return {
        "w": dtensor(np.ones((rows[rank], 2), np.float32), "0", shape, mesh, (rank,), [placements.Shard(0)]),
        "b": dtensor(whole, "1", (4,), mesh, (rank,), [placements.Replicate()]),
        "step": 7,
    }


def rank_file(data: bytes) -> None:
    """The pickle of the first of two ranks of FSDP2."""
    folder = FOLDER / "ranks"
    folder.mkdir(exist_ok=True)
    for rank in range(2):
        file = save(rank_state(rank), data=data if rank == 0 else None)
        (folder / f"model_world_size_2_rank_{rank}.pt").write_bytes(file)
    read_all(folder)


def dcp_index(data: bytes) -> None:
    """The index of a distributed checkpoint beside the files of one."""
    folder = dcp().write(FOLDER / "dcp")
    (folder / ".metadata").write_bytes(data)
    read_all(folder)


def sharding_info(data: bytes) -> None:
    """What a file of a distributed checkpoint as safetensors says of its place."""
    folder = FOLDER / "dcp_safetensors"
    folder.mkdir(exist_ok=True)
    header = {
        "w": {"dtype": "U8", "shape": [2, 2], "data_offsets": [0, 4]},
        "__metadata__": {"DCP_SHARDING_INFO": data.decode(errors="replace")},
    }
    raw = json.dumps(header).encode()
    (folder / "shard-00001-model-00001-of-00001.safetensors").write_bytes(
        len(raw).to_bytes(8, "little") + raw + b"abcd"
    )
    read_all(folder)


def zarr_array(data: bytes) -> None:
    """The metadata of an array, of zarr 3 if they say so, beside chunks of both."""
    folder = item(FOLDER / "zarr")
    for name, file, chunk in (("two", ".zarray", "0"), ("three", "zarr.json", "c/0")):
        path = folder / name / chunk
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(range(16)))
        (folder / name / file).write_bytes(data if (b'"node_type"' in data) == (name == "three") else ZARR[name])
    read_all(folder)


def ocdbt_node(data: bytes) -> None:
    """The body of a leaf, in an envelope with the right checksum."""
    base = Database(item(FOLDER / "ocdbt"))
    base.values = bytes(range(64))
    base.manifest(0, base.add(data))
    read_all(base.folder)


def ocdbt_manifest(data: bytes) -> None:
    """The body of a manifest, beside a database of one leaf."""
    base = Database(item(FOLDER / "manifest"))
    base.values = bytes(range(64))
    base.manifest(0, base.add(LEAF))
    (base.folder / "manifest.ocdbt").write_bytes(node(0x0CDB3A2A, data))
    read_all(base.folder)


def keras_index(data: bytes) -> None:
    folder = FOLDER / "keras"
    folder.mkdir(exist_ok=True)
    for name in ("m_00000.weights.h5", "m_00001.weights.h5"):
        (folder / name).write_bytes((KERAS / name).read_bytes())
    (folder / "m.weights.json").write_bytes(data)
    read_all(folder)


def mesh_notation(data: bytes) -> None:
    mesh = notation.parse_mesh(text(data))
    assert notation.parse_mesh(notation.format_mesh(mesh)) == mesh


def layout_notation(data: bytes) -> None:
    layout = notation.parse_layout(text(data), 2)
    assert notation.parse_layout(notation.format_layout(layout), 2) == layout


def shape_notation(data: bytes) -> None:
    shape = notation.parse_shape(text(data))
    assert notation.parse_shape(str(shape)) == shape


def dtype_notation(data: bytes) -> None:
    assert notation.parse_dtype(text(data)) > 0


def arguments(data: bytes) -> None:
    """The whole command: arguments with NUL between them."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            status: Any = command_line(text(data).split("\0"))
        except SystemExit as exit_:
            status = exit_.code
    assert status in (0, 1, 2, None), status


PARSERS = {
    "mesh_text": Parser(mesh_text, "| , = : / 0 1 9223372036854775807 CPU GPU:0 use_xla_spmd *TPU \0"),
    "layout_text": Parser(
        layout_text, "sharding_specs: parted: maximal:true, unsharded, match, any, x, mesh: scalar | ,"
    ),
    "mesh_message": Parser(mesh_message, "\x0a \x12 \x1a \x22 \x2a \x32 \x38\x01 \xff \x80 \x7b \x7c \x00 \x01"),
    "layout_message": Parser(layout_message, "\x0a \x12 \x18\x01 \x0a\x03\x12\x01x \xff \x80 \x7b \x7c \x00"),
    "device": Parser(device, "/ job: replica: task: device: CPU: GPU:0 : * 0 9999999999"),
    "hlo_sharding": Parser(
        hlo_sharding,
        "{ } [ ] <= T ( ) , 1 2 devices= last_tile_dim_replicate last_tile_dims= manual replicated maximal",
    ),
    "shardy_sharding": Parser(
        shardy_sharding, '# sdy.sharding < > @ [ ] { } "x" "y" :(1)2 ? p1 , replicated= unreduced= mesh<'
    ),
    "shardy_mesh": Parser(shardy_mesh, '# sdy.mesh < > @ [ ] "x"=2 "y"=3 , device_ids= 0 1 = \\'),
    "rules": Parser(
        rules,
        "match = 'search' [mesh] [rules] [ ] { } shape axis_names devices axes "
        "unreduced ' \" = , \n 1 -1 1.5 true . # \\",
    ),
    "rule": Parser(rule, "a b . * + ? ( ) [ ] { } | ^ $ \\d \\w \\b (?: (?i) (?P<n> (?= \\1 {2,3} \\Z \n é"),
    "safetensors": Parser(
        safetensors,
        '{ } [ ] , : " "a" "dtype" "F32" "F4" "shape" "data_offsets" __metadata__ 0 1 24 -1 1e5 null \x00 \xff',
    ),
    "safetensors_index": Parser(
        safetensors_index, '{ } [ ] , : " "a" "weight_map" "metadata" "one.safetensors" ../ / null 1 \x00 \xff'
    ),
    "pickled": Parser(
        pickled,
        "( ) . 0 2 N K\x01 } ] a e s u t \x85 \x86 \x81 R b q\x00 h\x00 \x94 ca\nb\n cos\nsystem\n \x8c\x01x X \xff",
    ),
    "torch_file": Parser(
        torch_file, "PK\x01\x02 PK\x03\x04 PK\x05\x06 \x00 \xff \xff\xff\xff\xff data/0 K\x02 Q R t \x86"
    ),
    "rank_file": Parser(
        rank_file,
        "K\x00 K\x01 K\x02 K\x03 M\x05 J\xff\xff\xff\x7f \x8a\x08 \xff N ) } \x85 \x86 R b u e ( . X\x01\x00\x00\x00w",
    ),
    "dcp_index": Parser(
        dcp_index, "K\x01 K\x00 M\x05 N ) } ] \x94 \x85 \x86 R b u e \x8c\x01x .. / \x8a\x08 \xff \x7f"
    ),
    "sharding_info": Parser(sharding_info, '{ } [ ] , : "w" "saved_offsets" 0 1 -1 9223372036854775807 1e5 null'),
    "zarr_array": Parser(
        zarr_array,
        '{ } [ ] , : "shape" "chunks" "dtype" "<f4" ">i2" "bfloat16" "compressor" "zlib" "F" 0 1 4 16 -1 null '
        '"codecs" "bytes" "sharding_indexed" "crc32c" "gzip" "fill_value" "NaN" 4611686018427387904',
    ),
    "ocdbt_node": Parser(ocdbt_node, "\x00 \x01 \x02 \x7f \x80 \xff w/.zarray w/0 d/values .. / {"),
    "ocdbt_manifest": Parser(ocdbt_manifest, "\x00 \x01 \x02 \x7f \x80 \xff d/nodes .. /"),
    "keras_index": Parser(
        keras_index, '{ } [ ] , : "weight_map" "metadata" "total_size" "m_00000.weights.h5" /layers ../ 1 1e5 null'
    ),
    "mesh_notation": Parser(mesh_notation, "= , 0 1 2 99999999999999999999 x y - + \0 é"),
    "layout_notation": Parser(layout_notation, ", + - * None x y ( ) é"),
    "shape_notation": Parser(shape_notation, ", x ( ) 0 1 99999999999999999999 - ٣"),
    "dtype_notation": Parser(
        dtype_notation, "float int uint bfloat16 F8_ E4M3 8 16 32 f4 V0 , ( ) [ ] { } : O S > < ="
    ),
    "arguments": Parser(arguments, "\0 show plan translate --mesh --layout --dtype --help - x=2,y=3 8,6 x,y -- "),
}


def perform(name: str, data: bytes) -> None:
    """Read an input; let out whatever is no refusal."""
    with limited(), contextlib.suppress(sw.ShardwiseError):
        try:
            PARSERS[name].check(data)
        except sw.InternalError as error:
            raise AssertionError("a panic") from error


@st.composite
def inputs(draw: st.DrawFn, name: str) -> bytes:
    """Any bytes, or a kept input in which up to four places were cut out, put in, doubled, or taken from another."""
    kept = corpus(name)
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=60))
    data = draw(st.sampled_from(kept))
    scraps = st.sampled_from([scrap.encode("latin-1" if scrap.isascii() or max(scrap) < "\u0100" else "utf-8")
                              for scrap in PARSERS[name].scraps.split(" ")])  # fmt: skip
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.integers(0, 6)))
        other = draw(st.sampled_from(kept))
        at = draw(st.integers(0, len(other)))
        put = draw(
            st.one_of(
                scraps, scraps, st.binary(max_size=3), st.just(data[start:stop] * 2), st.just(other[at : at + 12])
            )
        )
        data = data[:start] + put + data[stop:]
    return data
