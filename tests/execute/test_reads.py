"""Reads of checkpoints as `preadv` and HTTP take them, made by the system's own call and by a server of ranges."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise import LayoutError, ParseError
from shardwise.execute.reads import ReadCalls, http_ranges, read_calls
from shardwise.store import DeviceReads, ObjectPath, device_reads

MESH = sw.DeviceMesh((4,), ("tp",))
WEIGHTS = {
    "rows": np.arange(64, dtype="f4").reshape(16, 4),
    "columns": np.arange(160, dtype="i2").reshape(10, 16),
    "packed": np.arange(48, dtype="i4").reshape(12, 4),
    "whole": np.arange(5, dtype="f8"),
    "empty": np.zeros((0, 4), "f4"),
}
LAYOUTS = {
    "rows": sw.TensorLayout(("tp", None), MESH),
    "columns": sw.TensorLayout((None, "tp"), MESH),
    "packed": sw.TensorLayout((sw.packed.parse("a:(8@tp) + b:(n@tp)"), None), MESH),
    "empty": sw.TensorLayout((None, "tp"), MESH),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sw.save_checkpoint(tmp_path / "c", WEIGHTS, to="hf", max_file_bytes=400, sync=False)
    return tmp_path / "c"


def planned(folder: Path, device: Any = "cpu:2", **more: Any) -> DeviceReads:
    with sw.open_checkpoint(folder) as checkpoint:
        return device_reads(checkpoint, LAYOUTS, device, **more)


def shards(label: str) -> dict[str, bytes]:
    return {
        name: (sw.distribute_tensor(one, LAYOUTS[name]).shard(label) if name in LAYOUTS else one).tobytes()
        for name, one in WEIGHTS.items()
    }


def buffer(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)


def carried_out(calls: ReadCalls) -> None:
    for file, offset, length, first, stop in calls.calls.tolist():
        vectors = calls.vectors[first:stop]
        number = os.open(calls.files[file], os.O_RDONLY)
        try:
            buffers = [buffer(*vector.tolist()[:2]) for vector in vectors]
            assert os.preadv(number, buffers, offset) == length == vectors["length"].sum()
        finally:
            os.close(number)


class TestCalls:
    @pytest.mark.parametrize("over_read", [0, 0.05, 0.5, 100.0])
    @pytest.mark.parametrize("max_vectors", [1, 2, 3, 1024])
    def test_into_the_arrays(self, folder: Path, over_read: float, max_vectors: int) -> None:
        reads = planned(folder, over_read=over_read)
        arrays = [np.zeros(array.nbytes, np.uint8) for array in reads.arrays]
        scratch = np.zeros(10**4, np.uint8)
        calls = read_calls(reads, arrays, scratch=scratch, max_vectors=max_vectors)
        carried_out(calls)
        found = {one.name: array.tobytes() for one, array in zip(reads.arrays, arrays, strict=True)}
        assert found == shards("cpu:2")
        assert (calls.calls["stop"] - calls.calls["first"]).max() <= max_vectors
        own = calls.vectors[calls.vectors["array"] >= 0]
        for address, length, array, destination in own.tolist():
            assert address == arrays[array].ctypes.data + destination
            assert destination + length <= arrays[array].nbytes
        assert calls.calls["length"].sum() == reads.bytes_read
        if max_vectors == 1024:
            assert calls.calls[["file", "offset", "length"]].tolist() == reads.reads.tolist()

    def test_nothing(self, folder: Path) -> None:
        reads = planned(folder)
        empty = DeviceReads(reads.files, (), reads.reads[:0], reads.copies[:0], 0, reads.versions)
        assert len(read_calls(empty, []).calls) == 0
        assert http_ranges(empty) == []

    def test_what_is_refused(self, folder: Path) -> None:
        reads = planned(folder, over_read=0.5)
        arrays = [np.zeros(array.nbytes, np.uint8) for array in reads.arrays]
        with pytest.raises(LayoutError, match=r"scratch is not given; the longest gap that is read has (\d+)"):
            read_calls(reads, arrays)
        with pytest.raises(
            LayoutError, match=r"scratch has 2 bytes; the longest gap .* Give more, or plan with over_read=0"
        ):
            read_calls(reads, arrays, scratch=np.zeros(2, np.uint8))
        exact = planned(folder, over_read=0)  # As the message says.
        carried_out(read_calls(exact, arrays))
        with pytest.raises(LayoutError, match=r"arrays\[0\] has 1 bytes, but '\w+' has"):
            read_calls(exact, [np.zeros(1, np.uint8), *arrays[1:]])
        with pytest.raises(LayoutError, match=r"arrays has 1 array; the device has 5"):
            read_calls(exact, arrays[:1])
        with pytest.raises(LayoutError, match=r"arrays\[\d\] shares memory with arrays\[\d\]"):
            read_calls(exact, [joined := np.zeros(10**4, np.uint8)] * len(arrays))
        assert not joined.any()
        with pytest.raises(LayoutError, match="max_vectors is 0"):
            read_calls(exact, arrays, max_vectors=0)
        stored: Any = (ObjectPath("memory://bucket/c.safetensors"),)
        remote = DeviceReads(stored, exact.arrays, exact.reads[:1], exact.copies[:1], 0, ("",))
        with pytest.raises(LayoutError, match=r"is an object of a store, .*; http_ranges gives the requests"):
            read_calls(remote, arrays)
        assert len(http_ranges(remote)) == 1
        both = planned(folder, ["cpu:0", "cpu:1"], over_read=0)
        many = [np.zeros(array.nbytes, np.uint8) for array in both.arrays]
        with pytest.raises(LayoutError, match="several arrays need the same bytes"):
            read_calls(both, many)

    def test_a_file_that_has_changed(self, folder: Path) -> None:
        reads = planned(folder, over_read=0)
        arrays = [np.zeros(array.nbytes, np.uint8) for array in reads.arrays]
        path = reads.files[0]
        before = path.stat()
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        now = f"{before.st_size} bytes of {before.st_mtime_ns + 1} ns"
        then = f"{before.st_size} bytes of {before.st_mtime_ns} ns"
        with pytest.raises(ParseError, match=f"is of version {now}, but the reads are of {then}; plan them again"):
            read_calls(reads, arrays)
        assert not any(array.any() for array in arrays)
        carried_out(read_calls(planned(folder, over_read=0), arrays))


class TestMaxReads:
    def test_the_fewest_bytes(self, folder: Path) -> None:
        exact = planned(folder, over_read=0)
        files = len(np.unique(exact.reads["file"]))
        assert len(exact.reads) > files + 2
        sizes = []
        for most in range(files, len(exact.reads) + 1):
            reads = planned(folder, max_reads=most)
            assert len(reads.reads) == most
            # As many bytes over are enough for as few reads, and one less is not.
            over = reads.bytes_read - exact.bytes_read
            assert len(planned(folder, over_read=over / exact.nbytes + 1e-9).reads) <= most
            if over:
                assert len(planned(folder, over_read=(over - 1) / exact.nbytes + 1e-9).reads) > most
            sizes.append(reads.bytes_read)
            assert [data.tobytes() for data in reads.fill(fetch)] == list(ordered(reads, shards("cpu:2")))
        assert sizes == sorted(sizes, reverse=True)
        with pytest.raises(LayoutError, match=rf"max_reads is {files - 1}, .* give {files} or more"):
            planned(folder, max_reads=files - 1)
        with pytest.raises(LayoutError, match="over_read and max_reads are both given"):
            planned(folder, max_reads=9, over_read=0.1)
        with pytest.raises(TypeError, match="max_reads must be an integer"):
            planned(folder, max_reads=9.0)


def ordered(reads: DeviceReads, expected: dict[str, bytes]) -> Iterator[bytes]:
    return (expected[array.name] for array in reads.arrays)


def fetch(path: Path, offset: int, length: int) -> bytes:
    return path.read_bytes()[offset : offset + length]


ETAG = '"5eb63bbbe01eeed093cb22bb8f5acdc3"'


@contextmanager
def served(folder: Path) -> Iterator[HTTPConnection]:
    """A server of ranges, which refuses a condition on another ETag."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = (folder / self.path.lstrip("/")).read_bytes()
            if self.headers.get("If-Match", ETAG) != ETAG:
                self.send_error(412)
                return
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            body = data[first : last + 1]
            self.send_response(206)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield HTTPConnection("127.0.0.1", server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def of_version(reads: DeviceReads, etag: str) -> DeviceReads:
    return DeviceReads(reads.files, reads.arrays, reads.reads, reads.copies, reads.nbytes, (etag,) * len(reads.files))


@pytest.mark.parametrize("etag", ["", ETAG, ETAG.strip('"'), f"W/{ETAG}", "2026-11-27 01:00:00+00:00"])
def test_ranges_of_http(folder: Path, etag: str) -> None:
    reads = of_version(planned(folder, ["cpu:2", "cpu:3"]), etag)
    found = [np.zeros(array.nbytes, np.uint8) for array in reads.arrays]
    with served(folder) as connection:
        for one in http_ranges(reads):
            # A weak ETag and a time are no condition that a server could judge.
            assert one.headers.get("If-Match") == (ETAG if etag.strip('"') == ETAG.strip('"') else None)
            connection.request("GET", f"/{one.file.name}", headers=one.headers)
            answer = connection.getresponse()
            body = answer.read()
            assert (answer.status, len(body)) == (206, one.length)
            for array, destination, offset, length in one.copies.tolist():
                found[array][destination : destination + length] = np.frombuffer(body, np.uint8)[offset:][:length]
    for array, data in zip(reads.arrays, found, strict=True):
        assert data.tobytes() == shards(str(array.device))[array.name]


def test_an_object_that_has_changed(folder: Path) -> None:
    reads = of_version(planned(folder), '"of another object"')
    assert http_ranges(reads)[0].headers.keys() == {"Range"}  # No ETag has spaces.
    with served(folder) as connection:
        for one in http_ranges(of_version(reads, '"0"')):
            connection.request("GET", f"/{one.file.name}", headers=one.headers)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 412
