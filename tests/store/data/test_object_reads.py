"""What is asked of an object store: the right bytes, in requests of a bounded size, as often as a failure may pass."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.store.data.location import opening
from shardwise.store.data.object_files import ObjectFile, Requests
from shardwise.store.data.objects import ObjectPath
from shardwise.store.data.retries import ATTEMPTS
from shardwise.store.data.text import MAX_NAME, are_sizes, checked_name, checked_shape

fsspec = pytest.importorskip("fsspec")

BYTES = np.random.default_rng(1).integers(0, 256, 5000, np.uint8)


class Asked:
    """A filesystem of one object, which notes what is asked."""

    def __init__(self, data: bytes = BYTES.tobytes()) -> None:
        self.data = data
        self.ranges: list[tuple[int, int]] = []

    def info(self, path: str) -> dict[str, Any]:
        return {"type": "file", "size": len(self.data), "etag": "one"}

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        self.ranges.append((start, end))
        return self.data[start:end]


def place(filesystem: Any) -> ObjectPath:
    return ObjectPath("memory://bucket/a", filesystem=filesystem, pause=0)


def opened(filesystem: Any) -> ObjectFile:
    """Read in small requests."""
    return ObjectFile(place(filesystem), requests=Requests(part=200, gap=30, small=100, block=64, blocks=3))


@st.composite
def boxes(draw: st.DrawFn) -> tuple[int, int, list[int], list[int]]:
    """Where a box begins, the bytes of an element, and its shape and strides, those of a larger array in C order."""
    itemsize = draw(st.sampled_from([1, 2, 8]))
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    strides, step = [], itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= size + draw(st.sampled_from([0, 0, 1, 5])) or 1
    return draw(st.integers(0, 60)), itemsize, shape, strides[::-1]


@given(boxes(), st.booleans())
@example((60, 8, [6, 6, 6], [968, 88, 8]), False)
def test_boxes_are_read_in_requests_of_a_bounded_size(box: tuple[int, int, list[int], list[int]], spaced: bool) -> None:
    start, itemsize, shape, strides = box
    kind = np.dtype(f"u{itemsize}")
    length = itemsize + sum(max(size - 1, 0) * stride for size, stride in zip(shape, strides, strict=True))
    data = np.random.default_rng(1).bytes(start + length)
    expected = np.ndarray(shape, kind, data, start, strides)
    room = np.zeros([*shape[:-1], 2 * shape[-1]] if shape else [], kind)
    out = room[..., ::2] if spaced and shape else np.empty(shape, kind)
    asked = Asked(data)
    opened(asked).read_box(start, strides, out)
    np.testing.assert_array_equal(out, expected)
    assert not room[..., 1::2].any() if shape else True
    assert all(start <= first < last <= start + length for first, last in asked.ranges)
    assert all(last - first <= max(200, itemsize) for first, last in asked.ranges)
    read = sum(last - first for first, last in asked.ranges)
    # What lies between two runs is read only where it is short.
    assert read <= expected.nbytes + 30 * max(expected.size - 1, 0)
    assert (read == 0) == (expected.size == 0)


def test_short_gaps_are_read_and_long_ones_are_not() -> None:
    """Rows of 10 bytes; 30 unneeded ones between two are read to save a request, 31 are not."""
    for stride, requests in ((40, [(5, 5 + 3 * 40 + 10)]), (41, [(5 + 41 * row, 15 + 41 * row) for row in range(4)])):
        asked = Asked()
        opened(asked).read_box(5, [stride, 1], out := np.empty((4, 10), np.uint8))
        assert sorted(asked.ranges) == requests
        assert out.tolist() == [BYTES[5 + stride * row :][:10].tolist() for row in range(4)]
    # 9 rows of 10 with 30 between them are 330 bytes; at most 200 in one request: five rows, then four.
    asked = Asked()
    opened(asked).read_box(0, [40, 1], np.empty((9, 10), np.uint8))
    assert sorted(asked.ranges) == [(0, 170), (200, 330)]


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 400)), max_size=8))
def test_bytes_are_those_of_the_object(wanted: list[tuple[int, int]]) -> None:
    asked = Asked()
    file = opened(asked)
    for offset, length in wanted:
        buffer = bytearray(length)
        if offset + length > 5000:
            with pytest.raises(sw.ParseError, match=f"ends at byte 5000; bytes {offset} to {offset + length} were"):
                file.read_into(memoryview(buffer), offset)
            continue
        file.read_into(memoryview(buffer), offset)
        assert bytes(buffer) == BYTES[offset : offset + length].tobytes()
    assert all(last - first <= 200 and last <= 5000 for first, last in asked.ranges)


def test_small_reads_are_served_from_blocks_of_which_three_are_kept() -> None:
    asked = Asked()
    file = opened(asked)
    for offset in (0, 10, 60, 128, 192, 130, 64, 256, 0):
        file.read(offset, 4)
    # Blocks 0 and 1 (for 60 to 64 block 0 only), 2, 3, 2 again, 1, 4; then 0 was dropped long ago.
    assert [first // 64 for first, _ in asked.ranges] == [0, 2, 3, 1, 4, 0]
    assert all(last - first == 64 for first, last in asked.ranges)
    file.read(4990, 10)
    assert asked.ranges[-2:] == [(4928, 4992), (4992, 5000)]
    file.close()
    with pytest.raises(ValueError, match="this checkpoint is closed"):
        file.read(0, 1)


def test_a_request_is_made_so_many_times() -> None:
    class Failing(Asked):
        def __init__(self, failures: int) -> None:
            super().__init__()
            self.failures = failures
            self.calls = 0

        def info(self, path: str) -> dict[str, Any]:
            self.calls += 1
            if self.calls <= self.failures:
                raise ConnectionError("reset")
            return super().info(path)

    for failures in range(ATTEMPTS):
        assert place(once := Failing(failures)).status().size == 5000
        assert once.calls == failures + 1
    always = Failing(10**6)
    with pytest.raises(OSError, match=f"failed {ATTEMPTS} times, the last time with: reset") as caught:
        place(always).status()
    assert (caught.value.errno, always.calls) == (errno.EIO, ATTEMPTS)


def test_attempts_are_the_callers_choice_and_go_with_the_path() -> None:
    class Slow(Asked):
        calls = 0

        def info(self, path: str) -> dict[str, Any]:
            self.calls += 1
            raise OSError(16, "SlowDown")

    for attempts, said in ((1, "failed once with"), (3, "failed 3 times, the last time with")):
        slow = Slow()
        path = ObjectPath("memory://bucket/a", filesystem=slow, attempts=attempts, pause=0)
        sent = path.__reduce__()
        for each in (path, path / "b", path.parent, sent[0](*sent[1])):
            slow.calls = 0
            with pytest.raises(OSError, match=said):
                each.status()
            assert slow.calls == attempts
    for wrong, error in (
        ({"attempts": 0}, sw.LayoutError),
        ({"pause": -1}, sw.LayoutError),
        ({"pause": "1"}, TypeError),
    ):
        with pytest.raises(error, match=next(iter(wrong))):
            ObjectPath("memory://bucket/a", filesystem=slow, **wrong)


def test_a_store_that_was_never_reached_is_not_waited_for_as_long() -> None:
    class EndpointConnectionError(ConnectionError):
        pass

    class Away(Asked):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.is_away = 0, True

        def info(self, path: str) -> dict[str, Any]:
            self.calls += 1
            if self.is_away:
                raise EndpointConnectionError("nobody is there")
            return super().info(path)

    path = place(away := Away())
    with pytest.raises(OSError, match="failed 5 times"):
        path.status()
    away.calls, away.is_away = 0, False
    path.status()
    away.calls, away.is_away = 0, True
    with pytest.raises(OSError, match=f"failed {ATTEMPTS} times"):
        (path / "b").status()


def test_pauses_grow_and_differ_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    for _ in range(20):
        path = ObjectPath("memory://bucket/a", filesystem=type("Fs", (Asked,), {"info": refuse})())
        with pytest.raises(OSError, match=f"failed {ATTEMPTS} times"):
            path.status()
    longest = [min(0.1 * 2**i, 10) for i in range(ATTEMPTS - 1)]
    runs = [waited[i : i + len(longest)] for i in range(0, len(waited), len(longest))]
    assert len(runs) == 20
    assert all(most / 2 <= pause <= most for run in runs for pause, most in zip(run, longest, strict=True))
    assert sum(longest) > 40
    assert len({run[0] for run in runs}) > 10


def refuse(*_: Any) -> Any:
    raise OSError(16, "SlowDown")


def test_what_a_store_says_of_an_object() -> None:
    assert place(Asked(b"")).status().size == 0
    for size in (-1, None, "7"):
        odd = Asked()
        odd.info = lambda path, size=size: {"type": "file", "size": size}  # type: ignore[method-assign, misc]
        with pytest.raises(sw.ParseError, match="does not say how many bytes"):
            place(odd).status()
    gone = ObjectPath("memory://nothing-of-this-name/a")
    assert (gone.exists(), gone.is_file(), gone.is_dir()) == (False, False, False)
    there = place(Asked())
    assert (there.exists(), there.is_file(), there.is_dir()) == (True, True, False)


def test_a_folder_is_not_in_itself() -> None:
    class Listed(Asked):
        def ls(self, path: str, detail: bool) -> list[dict[str, Any]]:
            kinds = {"bucket/a/": "file", "bucket/a": "file", "bucket/a/b": "file", "/bucket/a/c/": "directory"}
            return [{"name": name, "type": kind} for name, kind in kinds.items()]

    assert list(place(Listed()).names()) == [("b", False), ("c", True)]


def test_only_s3_itself_takes_conditions() -> None:
    class WithCalls(Asked):
        def call_s3(self) -> None: ...

    for url, filesystem, expected in (
        ("s3://b/a", WithCalls(), True),
        ("s3://b/a", Asked(), False),
        ("memory://b/a", WithCalls(), False),
    ):
        assert ObjectPath(url, filesystem=filesystem).is_s3 is expected


def test_options_that_a_url_does_not_say_are_refused_by_their_names() -> None:
    usual = ObjectPath("memory://a/b")
    usual.refuse_options("a plan")

    class Other(type(usual.filesystem)):  # type: ignore[misc]
        pass

    for filesystem, said in (
        (fsspec.filesystem("memory", token="secret"), "has token.*, but a plan keeps only the URL"),
        (Other(**usual.filesystem.storage_options), "has a filesystem of its own, but a plan keeps only the URL"),
    ):
        with pytest.raises(TypeError, match=said) as caught:
            ObjectPath("memory://a/b", filesystem=filesystem).refuse_options("a plan")
        assert "secret" not in str(caught.value)


def test_several_objects_are_opened_together() -> None:
    one, two = (ObjectPath(f"memory://bucket/{name}", filesystem=Asked(bytes(300_000))) for name in "ab")
    with opening([one, two]) as (open_next, files):
        assert [open_next(path).size for path in (one, two)] == [300_000] * 2
    assert [path.filesystem.ranges for path in (one, two)] == [[(0, 2**18)]] * 2
    assert [file.path for file in files] == [one, two]


def test_files_that_were_opened_together_are_closed_if_something_fails(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths[:2]:
        path.write_bytes(b"0123")
    opened = []

    def open_all() -> None:
        with opening(paths) as (open_next, files):
            opened.append(files)
            for path in paths:
                open_next(path)

    with pytest.raises(FileNotFoundError):
        open_all()
    files = opened[0]
    assert [file.path for file in files] == paths[:2]
    for file in files:
        with pytest.raises(ValueError, match="closed"):
            file.read(0, 1)


def test_names_and_shapes_have_limits() -> None:
    for name in ("", "x" * MAX_NAME, "é" * (MAX_NAME // 2)):
        assert checked_name(name, "here") == name
    for wrong in ["x" * (MAX_NAME + 1), "é" * (MAX_NAME // 2) + "x", 7, b"x", None]:
        with pytest.raises(sw.ParseError, match=r"here: the name .* is not text of at most 4096 bytes"):
            checked_name(wrong, "here")
    assert are_sizes([])
    assert are_sizes([0, 2**63 - 1])
    assert not any(map(are_sizes, ([-1], [2**63], [True], [1.0], (1,), None)))
    for shape in ([], [0, 2**62, 2**62], [2**60], [1] * 64):
        assert checked_shape(shape, 32, "w", "here") == tuple(shape)
    wrong_shapes: list[Any] = [[2**61], [2**31, 2**31], [1] * 65, [-1], [2**63], "ab"]
    for wrong in wrong_shapes:
        with pytest.raises(sw.ParseError, match="here: tensor 'w'"):
            checked_shape(wrong, 32, "w", "here")


def test_a_store_that_sends_more_than_was_asked_for_is_not_read_to_its_end() -> None:
    asyn = pytest.importorskip("fsspec.asyn")
    reads: list[int] = []

    class Body:
        """An object of a terabyte, sent whole whatever range was asked for."""

        async def read(self, count: int) -> bytes:
            reads.append(count)
            assert len(reads) < 100, "it is read to its end"
            return b"x" * count

        def close(self) -> None: ...

    class Whole(Asked):
        loop = asyn.get_loop()

        def call_s3(self) -> None: ...

        async def _call_s3(self, method: str, **_: Any) -> dict[str, Any]:
            assert method == "get_object"
            return {"Body": Body()}

    path = ObjectPath("s3://bucket/a", filesystem=Whole(), pause=0, attempts=1)
    with pytest.raises(OSError, match="bytes 5 to 15 were needed, but 11 came"):
        path.read(5, 15, "")
    assert sum(reads) == 11
