import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import _core
from shardwise.errors import LayoutError, ParseError, SizeOverflowError
from shardwise.pieces import LocatedPiece
from shardwise.store.data.engine import CopyJob, add_digests, digest_array
from tests.checks import view_index

P = 2**127 - 1


def split_mix(count: int) -> list[int]:
    """Outputs of SplitMix64 from seed 0, by Vigna's splitmix64.c."""
    outputs, state, mask = [], 0, 2**64 - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        outputs.append(z ^ (z >> 31))
    return outputs


def digest_by_definition(data: bytes) -> int:
    *keys, upper, lower = split_mix(514)
    radix = (upper << 64 | lower) % 2**127
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    return sum(word * (keys[k % 512] >> 3) * pow(radix, k // 512, P) for k, word in enumerate(words)) % P


def held(
    holder: int,
    offset: int,
    start: Sequence[int],
    stop: Sequence[int],
    strides: Sequence[int] | None = None,
    itemsize: int = 4,
) -> LocatedPiece:
    box = tuple(zip(start, stop, strict=True))
    return (
        LocatedPiece.dense(box, holder, offset, itemsize)
        if strides is None
        else LocatedPiece(box, holder, offset, tuple(strides))
    )


def whole(holder: int, value: npt.NDArray[Any]) -> LocatedPiece:
    return held(holder, 0, (0,) * value.ndim, value.shape, value.strides)


def test_pieces_that_interleave_hide_no_third_one_that_clashes(tmp_path: Path) -> None:
    """By hand, in 10 x 10 bytes: a column is bytes 0, 10, …, 90; four bytes of row 1 lie between; then byte 50."""
    values, other = np.arange(100, dtype="u1").reshape(10, 10), np.array([255], "u1")
    for at in (50, 95):
        job = CopyJob()
        matrix, single = job.read_array(values), job.read_array(other)
        file = job.write_file(tmp_path / f"{at}", 100)
        column, row = held(file, 0, (0, 0), (10, 1), (10, 1)), held(file, 15, (1, 5), (2, 9), (10, 1))
        job.add_tensor((10, 10), 1, [whole(matrix, values)], [column, row])
        job.add_tensor((1,), 1, [whole(single, other)], [held(file, at, (0,), (1,), (1,))])
        if at == 50:
            with pytest.raises(LayoutError, match="would be written to the same bytes"):
                job.run()
        else:
            job.run()
            expected = np.zeros(100, "u1")
            expected[::10], expected[15:19], expected[95] = values[:, 0], values[1, 5:9], 255
            assert (tmp_path / "95").read_bytes() == expected.tobytes()


def files_of(folder: Path, parts: list[npt.NDArray[Any]], name: str = "part") -> list[Path]:
    paths = [folder / f"{name}{i}" for i in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        path.write_bytes(part.tobytes())
    return paths


def merge(folder: Path, table: npt.NDArray[Any], ways: int, made: Path, **wanted: bool) -> CopyJob:
    """Column shards of a table, each in a file, to one file of all."""
    cuts = [table.shape[1] * i // ways for i in range(ways + 1)]
    parts = [table[:, start:stop] for start, stop in itertools.pairwise(cuts)]
    job = CopyJob()
    sources = []
    for path, part, start in zip(files_of(folder, parts), parts, cuts, strict=False):
        holder = job.read_file(path, path.stat().st_size, (path.stat().st_mtime_ns, path.stat().st_ctime_ns))
        sources.append(held(holder, 0, (0, start), (len(table), start + part.shape[1])))
    target = job.write_file(made, table.nbytes)
    job.add_tensor(table.shape, table.itemsize, sources, [held(target, 0, (0, 0), table.shape)], **wanted)
    return job


TABLE = np.random.default_rng(0).integers(0, 2**32, (300, 1000), np.uint32)


@given(st.binary(max_size=10_000))
def test_digests_are_those_of_the_definition(data: bytes) -> None:
    assert digest_array(np.frombuffer(data, np.uint8)) == digest_by_definition(data)


@given(st.lists(st.integers(0, 6), max_size=4), st.sampled_from(["u1", "<u2", ">i4", "f8", "c16", "V3"]), st.data())
def test_strided_views_are_written_right(shape: list[int], dtype: str, data: st.DataObject) -> None:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    base = np.random.default_rng(1).integers(0, 256, size, np.uint8).view(dtype).reshape(shape)
    order = data.draw(st.permutations(range(len(shape))))
    steps = [data.draw(st.sampled_from([1, 2, -1])) for _ in shape]
    view = base.transpose(order)[view_index(slice(None, None, step) for step in steps)]
    with_room = np.zeros([2 * n for n in view.shape], dtype)
    out = with_room[view_index(slice(None, 2 * n, 2) for n in view.shape)]
    job = CopyJob()
    source, target = job.read_array(view), job.write_array(out)
    job.add_tensor(view.shape, view.itemsize, [whole(source, view)], [whole(target, out)], digest=True)
    report = job.run()
    assert out.tobytes() == view.tobytes()
    assert np.count_nonzero(np.frombuffer(with_room.tobytes(), np.uint8)) <= view.nbytes
    assert report.digests == [digest_by_definition(view.tobytes())]


def test_column_shards_become_one_file(tmp_path: Path) -> None:
    job = merge(tmp_path, TABLE, 7, tmp_path / "made", digest=True, crc=True)
    seen: list[tuple[int, int]] = []
    report = job.run(progress=lambda done, total: seen.append((done, total)))
    data = (tmp_path / "made").read_bytes()
    assert data == TABLE.tobytes()
    assert report.bytes_read == report.bytes_written == len(data)
    assert (report.digests, report.crcs) == ([digest_array(TABLE)], [zlib.crc32(data)])
    assert seen[0] == (0, len(data))
    assert seen[-1] == (len(data), len(data))
    assert sorted(seen) == seen


@pytest.mark.parametrize("budget", [2**14, 2**16, 2**20])
@pytest.mark.parametrize("threads", [1, 3])
def test_any_budget_gives_the_same_bytes(tmp_path: Path, budget: int, threads: int) -> None:
    table = np.random.default_rng(2).integers(0, 2**32, (1500, 1000), np.uint32)
    job = merge(tmp_path, table, 3, tmp_path / "made")
    job.run(budget=budget, threads=threads)
    assert (tmp_path / "made").read_bytes() == table.tobytes()


def test_digests_of_pieces_add_up_however_they_are_cut(tmp_path: Path) -> None:
    expected = digest_array(TABLE)
    for ways in (1, 2, 7):
        paths = files_of(tmp_path, [part.copy() for part in np.array_split(TABLE, ways, axis=1)])
        job = CopyJob()
        start, pieces = 0, []
        for path in paths:
            stop = start + path.stat().st_size // (4 * len(TABLE))
            pieces.append(((0, start), (len(TABLE), stop), job.read_file(path, path.stat().st_size)))
            start = stop
        nowhere = job.discard()
        sources = [held(holder, 0, begin, end) for begin, end, holder in pieces]
        wanted = [held(nowhere, 0, begin, end) for begin, end, _ in pieces]
        job.add_tensor(TABLE.shape, 4, sources, wanted, digest=True)
        assert add_digests(job.run(budget=2**15).digests) == expected


def test_a_comparison_names_the_first_element(tmp_path: Path) -> None:
    other = TABLE.copy()
    other[17, 900] += 1
    other[17, 901] += 1
    (path,) = files_of(tmp_path, [other], "other")
    job = CopyJob()
    target = job.compare_file(path, other.nbytes)
    job.add_tensor(TABLE.shape, 4, [whole(job.read_array(TABLE), TABLE)], [held(target, 0, (0, 0), TABLE.shape)])
    assert job.run().differences == [(0, 17 * 1000 + 900)]
    path.write_bytes(TABLE.tobytes())
    assert job.run().differences == []


def test_many_tiny_tensors_share_their_reads(tmp_path: Path) -> None:
    value = np.arange(5000, dtype=np.int64)
    (path,) = files_of(tmp_path, [value])
    job = CopyJob()
    source, target = job.read_file(path, value.nbytes), job.write_file(tmp_path / "made", value.nbytes)
    for i in range(5000):
        job.add_tensor((), 8, [held(source, 8 * i, (), ())], [held(target, 8 * (4999 - i), (), ())])
    report = job.run()
    assert (tmp_path / "made").read_bytes() == value[::-1].tobytes()
    assert report.calls < 50


def test_a_job_of_nothing() -> None:
    assert CopyJob().run().digests == []
    job = CopyJob()
    job.add_tensor((0, 2**62, 5), 8, [], [held(job.discard(), 0, (0, 0, 0), (0, 2**62, 5), (0, 0, 0))], digest=True)
    assert job.run().digests == [0]


# What is refused, before anything is written.


def byte(
    holder: int, offset: int, start: Sequence[int], stop: Sequence[int], strides: Sequence[int] | None = None
) -> LocatedPiece:
    return held(holder, offset, start, stop, strides, 1)


def one(sources: list[Any], destinations: list[Any], shape: tuple[int, ...] = (10,)) -> Callable[[Path], CopyJob]:
    def make(folder: Path) -> CopyJob:
        (folder / "source").write_bytes(bytes(10))
        job = CopyJob()
        job.read_file(folder / "source", 10)
        job.write_file(folder / "made", 10)
        job.add_tensor(shape, 1, [byte(*row) for row in sources], [byte(*row) for row in destinations])
        return job

    return make


FULL = (0, 0, (0,), (10,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            one([FULL], [(0, 1, (0,), (10,))]),
            "destination piece 0: needs bytes 1 to 11 of its holder, which has 0 to 10",
        ),
        (one([(0, -1, (0,), (10,))], [FULL]), "source piece 0: needs bytes -1 to 9"),
        (one([(0, 0, (0,), (10,), (2**62,))], [FULL]), "beyond 2\\*\\*63 - 1"),
        (one([(0, 2**63 - 1, (0,), (10,))], [FULL]), "beyond 2\\*\\*63 - 1"),
        (one([(1, 0, (0,), (10,))], [FULL]), "its holder is 1, which is not in the job"),
        (one([(-1, 0, (0,), (10,))], [FULL]), "its holder is -1"),
        (one([FULL], [(0, 0, (0,), (11,))]), "is \\[0, 11\\) along dim 0, which is not within \\[0, 10\\)"),
        (one([FULL], [(0, 9, (0,), (10,), (-1,))]), "negative stride"),
        (one([FULL], [(0, 0, (0,), (10,), (0,))]), "its strides make elements overlap"),
        (one([FULL, FULL], [FULL]), "source pieces 0 and 1 overlap"),
        (one([(0, 0, (0,), (9,))], [FULL]), "destination piece 0 has 10 elements, of which the source pieces hold 9"),
        (one([], [FULL]), "of which the source pieces hold 0"),
        (one([FULL], [(0, 0, (0,), (6,)), (0, 5, (5,), (10,)), (0, 0, (0,), (2,))]), "the same bytes"),
        (one([FULL], [(0, 0, (0,), (6,)), (0, 4, (5,), (10,))]), "written to the same bytes"),
        (one([FULL], [FULL], (2**40, 2**40)), "a piece has"),
    ],
)
def test_refused(tmp_path: Path, make: Callable[[Path], CopyJob], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path).run()
    assert not (tmp_path / "made").exists()


def test_sizes_beyond_64_bits(tmp_path: Path) -> None:
    job = CopyJob()
    with pytest.raises(SizeOverflowError):
        job.add_tensor((2**63,), 1, [], [])
    job.add_tensor((2**32, 2**32), 8, [], [])
    with pytest.raises(LayoutError, match="over 2\\*\\*63 - 1 bytes"):
        job.run()


def test_column_pieces_of_one_array_are_apart(tmp_path: Path) -> None:
    job = CopyJob()
    source = whole(job.read_array(TABLE), TABLE)
    target = job.write_file(tmp_path / "made", TABLE.nbytes)
    halves = [held(target, 4 * a, (0, a), (300, b), (4000, 4)) for a, b in ((0, 600), (600, 1000))]
    job.add_tensor(TABLE.shape, 4, [source], halves)
    job.run()
    assert (tmp_path / "made").read_bytes() == TABLE.tobytes()


def test_arrays_that_share_memory_are_refused() -> None:
    value = np.zeros(10, np.uint8)
    for read, written, message in [
        (value, [value], "shares memory with source array 0"),
        (value.copy(), [value[:6], value[5:]], "shares memory with destination array 0"),
        (value.copy(), [np.lib.stride_tricks.as_strided(value, (10,), (0,))], "overlaps itself"),
    ]:
        job = CopyJob()
        job.read_array(read)
        for out in written:
            job.write_array(out)
        with pytest.raises(LayoutError, match=message):
            job.run()
    job = CopyJob()
    job.write_array(np.frombuffer(bytes(4), np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        job.run()
    for value_of_no_use in ([1], np.ma.masked_array([1]), np.int64(1)):
        with pytest.raises(TypeError, match="array"):
            CopyJob().read_array(value_of_no_use)  # type: ignore[arg-type]
    job = CopyJob()
    job.read_array(np.array([None]))
    with pytest.raises(TypeError, match="references"):
        job.run()


def test_the_budget_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="budget is 1000 bytes; at least 16384 are needed"):
        merge(tmp_path, TABLE, 2, tmp_path / "made").run(budget=1000)
    assert not (tmp_path / "made").exists()


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    job = merge(tmp_path, TABLE, 2, tmp_path / "made")
    (tmp_path / "made").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        job.run()
    assert (tmp_path / "made").read_bytes() == b"mine"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        merge(tmp_path, TABLE, 2, link).run()
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_is_found_before_the_start(tmp_path: Path) -> None:
    job = CopyJob()
    job.write_file(tmp_path / "made", 2**60)
    with pytest.raises(OSError, match="bytes are needed") as caught:
        job.run()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


# Sources that are not what they were.


def test_sources_that_changed(tmp_path: Path) -> None:
    made = tmp_path / "made"
    path = tmp_path / "part1"

    def shorter() -> None:
        os.truncate(path, path.stat().st_size - 1)

    def later() -> None:
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))

    def gone() -> None:
        path.unlink()

    def pipe() -> None:
        path.unlink()
        os.mkfifo(path)

    def folder() -> None:
        path.unlink()
        path.mkdir()

    for change, error, message in [
        (shorter, ParseError, "part1 had 600000 bytes and has 599999 now"),
        (later, ParseError, "part1 was written to"),
        (gone, FileNotFoundError, "part1"),
        (pipe, ParseError, "part1 is a FIFO"),
        (folder, ParseError, "part1 is a directory"),
    ]:
        job = merge(tmp_path, TABLE, 2, made)
        change()
        with pytest.raises(error, match=message):
            job.run()
        assert not made.exists()
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


def test_a_source_that_changes_meanwhile(tmp_path: Path) -> None:
    job = merge(tmp_path, TABLE, 2, tmp_path / "made")

    def change(done: int, total: int) -> None:
        if done == total:
            os.utime(tmp_path / "part0", ns=(0, 1))

    with pytest.raises(ParseError, match="part0 was written to"):
        job.run(progress=change)
    assert not (tmp_path / "made").exists()

    def cut(done: int, total: int) -> None:
        os.truncate(tmp_path / "part1", 1000)

    job = merge(tmp_path, TABLE, 2, tmp_path / "made")
    with pytest.raises(ParseError, match=r"part1 ends at byte 1000; bytes .* were needed|part1 had 600000"):
        job.run(progress=cut)


def test_an_open_file_is_read_whatever_its_path_has_become(tmp_path: Path) -> None:
    (path,) = files_of(tmp_path, [TABLE])
    out = np.zeros_like(TABLE)
    with path.open("rb") as file:
        path.unlink()
        path.write_bytes(b"other")
        job = CopyJob()
        source = job.read_file(path, TABLE.nbytes, descriptor=file.fileno())
        target = job.write_array(out)
        job.add_tensor(TABLE.shape, 4, [held(source, 0, (0, 0), TABLE.shape)], [whole(target, out)])
        job.run()
    assert out.tobytes() == TABLE.tobytes()
    with pytest.raises(OSError, match="Bad file descriptor"):
        CopyJob.run(_with_descriptor(path, 10**6))


def _with_descriptor(path: Path, descriptor: int) -> CopyJob:
    job = CopyJob()
    job.read_file(path, 1, descriptor=descriptor)
    return job


# Interruptions and faults.


def test_an_exception_of_the_callback_comes_out(tmp_path: Path) -> None:
    job = merge(tmp_path, TABLE, 2, tmp_path / "made")

    def refuse(done: int, total: int) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        job.run(progress=refuse)
    assert not (tmp_path / "made").exists()


@pytest.mark.heavy
def test_interrupted_by_a_signal(tmp_path: Path) -> None:
    code = f"""
import _thread, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.store.data.test_engine import TABLE, merge
folder = Path({str(tmp_path)!r})
job = merge(folder, TABLE, 2, folder / "made")
try:
    job.run(progress=lambda done, total: _thread.interrupt_main())
except KeyboardInterrupt:
    print("interrupted", (folder / "made").exists())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "interrupted False\n"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_short_runs_of_long_columns_are_read_in_blocks(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows, columns = data.draw(st.integers(1, 4000)), data.draw(st.integers(1, 300))
    start = data.draw(st.integers(0, columns - 1))
    stop = data.draw(st.integers(start + 1, columns))
    table = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    (path,) = files_of(tmp_path_factory.mktemp("columns"), [table])
    out = np.zeros((rows, stop - start), np.int32)
    job = CopyJob()
    source, target = job.read_file(path, table.nbytes), job.write_array(out)
    piece = held(source, 0, (0, 0), table.shape, table.strides)
    job.add_tensor(table.shape, 4, [piece], [held(target, 0, (0, start), (rows, stop))])
    budget = data.draw(st.sampled_from([16 * 1024, 128 * 1024, 2**20]))
    report = job.run(budget=budget, threads=1)
    np.testing.assert_array_equal(out, table[:, start:stop])
    # Half a buffer at a time at least: a box that does not fit in one is halved.
    assert report.calls <= 2 + 4 * (rows * columns * 4) // (budget // 2)


# What makes files appear at once.


def test_a_lock_keeps_others_out_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = _core.FileLock(path)
    with pytest.raises(BlockingIOError, match=f"by process {os.getpid()}"):
        _core.FileLock(path)
    lock.release()
    lock.release()
    assert not path.exists()
    path.write_text("shardwise process 999999\n")  # A lock file without a lock, as a crash leaves it.
    _core.FileLock(path).release()
    killed = (
        "import os, pathlib, signal, sys; from shardwise import _core; "
        "lock = _core.FileLock(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.run([sys.executable, "-c", killed, str(path)], check=False)
    assert process.returncode == -signal.SIGKILL
    assert path.exists()
    _core.FileLock(path).release()


def test_one_of_many_gets_the_lock(tmp_path: Path) -> None:
    inside, most, done = [0], [0], [0]

    def work() -> None:
        for _ in range(200):
            try:
                lock = _core.FileLock(tmp_path / "lock")
            except BlockingIOError:
                continue
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            done[0] += 1
            inside[0] -= 1
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert done[0] > 0


def test_published_files(tmp_path: Path) -> None:
    (tmp_path / "new").write_bytes(b"manifest")
    _core.sync_files([tmp_path / "new"])
    (tmp_path / "there").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        _core.publish(tmp_path / "new", None, tmp_path / "there", sync=True)
    assert (tmp_path / "there").read_bytes() == b"old"
    _core.publish(tmp_path / "new", None, tmp_path / "other", sync=True)
    assert (tmp_path / "other").read_bytes() == b"manifest"
    assert not (tmp_path / "new").exists()
    with pytest.raises(FileNotFoundError):
        _core.publish(tmp_path / "new", None, tmp_path / "third", sync=True)
    assert 0 < _core.free_space(tmp_path) < 2**60


@pytest.mark.parametrize("missing", [[3], [40, 41, 99], [0, 50]])
def test_of_many_files_the_first_that_cannot_be_synced_is_named(tmp_path: Path, missing: list[int]) -> None:
    """Several threads sync them, in any order."""
    files = [tmp_path / f"{number:03}" for number in range(100)]
    for number, file in enumerate(files):
        if number not in missing:
            file.write_bytes(b"data")
    for _ in range(20):
        with pytest.raises(FileNotFoundError) as caught:
            _core.sync_files(files)
        assert caught.value.filename == str(files[missing[0]])
    _core.sync_files([file for number, file in enumerate(files) if number not in missing])


def test_jobs_fill_parts_of_a_file_that_is_there(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.int32).reshape(4, 6)
    path = tmp_path / "whole"
    made = CopyJob()
    made.write_file(path, 8 + values.nbytes)
    made.run()
    for rows in (slice(2, 4), slice(0, 2), slice(1, 3)):
        job = CopyJob()
        source, target = job.read_array(values), job.fill_file(path, 8 + values.nbytes)
        piece = held(target, 8 + 24 * rows.start, (rows.start, 0), (rows.stop, 6))
        job.add_tensor((4, 6), 4, [held(source, 0, (0, 0), (4, 6), values.strides)], [piece], digest=True)
        job.run()
    assert path.read_bytes() == bytes(8) + values.tobytes()
    for other, size, error in ((path, 9, ParseError), (tmp_path / "none", 9, FileNotFoundError)):
        job = CopyJob()
        job.fill_file(other, size)
        with pytest.raises(error):
            job.run()
    assert path.stat().st_size == 8 + values.nbytes
    assert not (tmp_path / "none").exists()


def test_a_destination_says_what_becomes_of_its_file(tmp_path: Path) -> None:
    """A word that is none of the three is refused, and makes no file."""
    wrong: Any = ("make", tmp_path / "new", 8, None)
    with pytest.raises(ValueError, match='a destination is "write", "fill" or "compare", not "make"'):
        _core.CopyJob([], [wrong], np.zeros(0, np.int64))
    assert not (tmp_path / "new").exists()
