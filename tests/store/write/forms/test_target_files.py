"""Which boxes go into which files: by hand, without writing any."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise._dtypes import CODES
from shardwise.conversion.tables import Wanted
from shardwise.pieces import NO_PIECES
from shardwise.store.write.forms.dcp import dcp_files
from shardwise.store.write.forms.files import FileDigests, slots_of
from shardwise.store.write.forms.safetensors import hugging_face_files, index_of, sharded_files, single_file

MESH = sw.DeviceMesh((2, 2), ("x", "y"))


def wanted(
    name: str, shape: tuple[int, ...], axes: Sequence[Any] | None = None, uneven: sw.UnevenRule = "even"
) -> Wanted:
    partition = None if axes is None else sw.TensorLayout(axes, MESH).partition(shape, uneven)
    return Wanted(name, CODES["I16"], shape, NO_PIECES, partition=partition)


def owned_boxes(tensors: list[Wanted]) -> dict[tuple[int, int], list[Any]]:
    found = slots_of(tensors, range(len(tensors)))
    return {key: [(slot.tensor, slot.box) for slot in slots] for key, slots in found.items()}


def test_each_box_has_one_owner() -> None:
    gate_up = sw.packed.gate_up("x")
    assert owned_boxes([wanted("whole", (4,)), wanted("scalar", ())]) == {(0, 0): [(0, ((0, 4),)), (1, ())]}
    # Devices 0 and 1 hold the first half, 2 and 3 the other; the first of them owns it.
    assert owned_boxes([wanted("half", (4, 3), ("x", None))]) == {
        (0, 0): [(0, ((0, 2), (0, 3)))],
        (2, 0): [(0, ((2, 4), (0, 3)))],
    }
    assert owned_boxes([wanted("kept", (4,), (None,))]) == {(0, 0): [(0, ((0, 4),))]}
    # 5 rows over 4 devices by ceil(5 / 4) = 2: 2, 2, 1 and none.
    assert owned_boxes([wanted("odd", (5,), (("x", "y"),), "ceil")]) == {
        (0, 0): [(0, ((0, 2),))],
        (1, 0): [(0, ((2, 4),))],
        (2, 0): [(0, ((4, 5),))],
    }
    # Without elements there is still a tensor.
    assert owned_boxes([wanted("empty", (0, 4), (None, "x"))]) == {(0, 0): [(0, ((0, 0), (0, 4)))]}
    # Gate and up: two boxes a device, which have numbers of their own.
    assert owned_boxes([wanted("half", (4,), ("x",)), wanted("fused", (8,), (gate_up,))]) == {
        (0, 0): [(0, ((0, 2),)), (1, ((0, 2),))],
        (0, 1): [(1, ((4, 6),))],
        (2, 0): [(0, ((2, 4),)), (1, ((2, 4),))],
        (2, 1): [(1, ((6, 8),))],
    }


def test_a_file_for_each_owner_and_number() -> None:
    files = sharded_files([wanted("a", (4,), ("x",)), wanted("b", (8,), (sw.packed.gate_up("x"),))], {})
    assert [file.name for file in files] == [
        f"shard-0000{rank}-model-0000{part}-of-00002.safetensors" for rank in (1, 2) for part in (1, 2)
    ]
    assert [[(slot.tensor, slot.box) for slot in file.slots] for file in files] == [
        [(0, ((0, 2),)), (1, ((0, 2),))],
        [(1, ((4, 6),))],
        [(0, ((2, 4),)), (1, ((2, 4),))],
        [(1, ((6, 8),))],
    ]
    assert [file.data_bytes for file in files] == [8, 4, 8, 4]
    # Three boxes for one device, one for the other: each counts its own.
    qkv = wanted("qkv", (12,), (sw.packed.qkv(2, 2, 2, "x"),))
    assert [file.name[6:-12] for file in sharded_files([qkv], {})] == [
        f"0000{rank}-model-0000{part}-of-00003" for rank in (1, 2) for part in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("most", "groups"),
    [
        (1, [[0], [1], [2], [3]]),
        (7, [[0], [1], [2], [3]]),
        (8, [[0, 1], [2], [3]]),
        (16, [[0, 1], [2, 3]]),
        (19, [[0, 1], [2, 3]]),
        (20, [[0, 1, 2], [3]]),
        (24, [[0, 1, 2, 3]]),
        (10**9, [[0, 1, 2, 3]]),
    ],
)
def test_files_are_filled_in_order(most: int, groups: list[list[int]]) -> None:
    """4, 4, 12 and 4 bytes: a tensor goes into the next file if it does not fit, and has one to itself if too large."""
    tensors = [wanted(name, (size,)) for name, size in (("a", 2), ("b", 2), ("c", 6), ("d", 2))]
    files = hugging_face_files(tensors, most, {})
    assert [[slot.tensor for slot in file.slots] for file in files] == groups
    names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    assert [file.name for file in files] == (names if len(groups) > 1 else ["model.safetensors"])
    assert index_of(files, tensors) == {
        "metadata": {"total_size": 24},
        "weight_map": {"abcd"[i]: file.name for file, group in zip(files, groups, strict=True) for i in group},
    }


NAMES = st.text(st.sampled_from('ab"\\/\né☃😀\x7f\x01'), max_size=6)


def test_an_index_is_as_long_as_is_read_to_the_byte() -> None:
    """An index of 100,000,000 bytes is read; of one byte more it is refused before anything is made."""
    names = [*(f"{number:04}{'𝄞' * 1000}" for number in range(8000)), "ä", 'a"\\b']
    files = hugging_face_files([wanted(name, (4,)) for name in names], 8000, {})
    rest = 100_000_000 - len(json.dumps(index_of(files, [wanted(name, (4,)) for name in names]), indent=2))
    names[-1] += "w" * rest
    tensors = [wanted(name, (4,)) for name in names]
    files = hugging_face_files(tensors, 8000, {})
    assert len(json.dumps(index_of(files, tensors), indent=2).encode()) == 100_000_000
    tensors[-1] = wanted(names[-1] + "w", (4,))
    with pytest.raises(sw.LayoutError, match="for 8002 tensors is over"):
        hugging_face_files(tensors, 8000, {})


@given(st.dictionaries(NAMES, st.tuples(st.lists(st.integers(0, 12), max_size=3), st.booleans()), max_size=6))
def test_the_length_of_a_header_is_known_before_it_is_made(tensors: dict[str, tuple[list[int], bool]]) -> None:
    held = []
    for name, (shape, is_cut) in tensors.items():
        axes = ["x", "y", None][: len(shape)]
        held.append(wanted(name, tuple(shape), axes if is_cut else None, "ceil"))
    for file in sharded_files(held, {"é": '"'}):
        # What has another length is refused.
        begin, header = file.before(0)
        assert begin == 0
        assert len(header) == file.start == 8 + int.from_bytes(header[:8], "little")
        assert set(json.loads(header[8:])) == {"__metadata__", *(held[slot.tensor].name for slot in file.slots)}


def test_headers_follow_from_digests_and_the_files_stay_as_they_are() -> None:
    """Each header has the digests that it is asked for with, in any order; nobody can write into a file."""
    tensors = [wanted("a", (2,)), wanted("b", (3,))]
    (single,) = single_file("a.safetensors", tensors, {})
    (container,) = dcp_files(tensors)
    for file in (single, container):
        known = [FileDigests({0: n, 1: n}, {0: n, 1: n}) for n in range(3)]
        first = [list(file.headers(digests)) for digests in known]
        assert [list(file.headers(digests)) for digests in reversed(known)] == first[::-1]
        assert first[0] != first[1] != first[2]
        assert [[at for at, _ in headers] for headers in first[1:]] == [[at for at, _ in first[0]]] * 2
        assert list(file.alone().headers(known[2])) == first[2]
        with pytest.raises(AttributeError):
            setattr(file, "name", "b")  # noqa: B010
    header = json.loads(next(iter(single.headers(FileDigests({0: 1, 1: 255}, {}))))[1][8:])
    assert json.loads(header["__metadata__"]["shardwise.digests"]) == {"a": f"{1:032x}", "b": f"{255:032x}"}
