"""One reader of a large object, by HTTP and from S3, beside fsspec's own reading of many ranges at once.

The server is a process of its own on this machine, which sends files with `sendfile`: what is measured is the reader.
Both ask for ranges of 8 MiB. shardwise fills an array of the caller's as the ranges come; `cat_ranges` gives a list of
bytes, in memory that Python keeps from turn to turn, and its reader would have to copy them once more.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from figures import Row, faster
from part import QUICK, main
from timing import compare

import shardwise as sw
from shardwise.store import ObjectPath

SIZE = 1 << (26 if QUICK else 30)
RANGE = 8 << 20
TURNS = 3 if QUICK else 5
TEXT = "64 MiB" if QUICK else "1 GiB"
KEYS: dict[str, Any] = {"key": "reader", "secret": "unused"}


class _Ranges(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *said: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(0)

    def do_GET(self) -> None:
        self._answer(1)

    def _answer(self, times: int) -> None:
        path = Path(self.path.partition("?")[0].lstrip("/"))
        if not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        size = path.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        start, stop = (int(asked[1]), int(asked[2]) + 1) if asked else (0, size)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Sun, 01 Mar 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.flush()
        with path.open("rb") as file:
            while times and start < stop:
                start += os.sendfile(self.connection.fileno(), file.fileno(), start, stop - start)


class _Server(ThreadingHTTPServer):
    # So many connections may wait; with the usual five, a reader that opens 128 at once waits for seconds.
    request_queue_size = 1024
    daemon_threads = True


def serve(folder: str, port: Queue[int]) -> None:
    """Serve the files of a folder, and say at which port."""
    os.chdir(folder)
    server = _Server(("127.0.0.1", 0), _Ranges)
    port.put(server.server_port)
    server.serve_forever()


def read(path: ObjectPath, out: np.ndarray[Any, Any]) -> object:
    """Open a checkpoint, and read its tensor."""
    return sw.open_checkpoint(path)["weight"].read(out=out)


def rows() -> Iterator[Row]:
    starts = list(range(0, SIZE, RANGE))
    out = np.ones(SIZE, np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        bucket = Path(folder, "bucket")
        bucket.mkdir()
        weight = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
        sw.save_checkpoint(bucket / "weight.safetensors", {"weight": weight})
        del weight
        context = get_context("spawn")
        port: Queue[int] = context.Queue()
        server = context.Process(target=serve, args=(folder, port), daemon=True)
        server.start()
        try:
            url = f"http://127.0.0.1:{port.get(timeout=60)}"
            web = f"{url}/bucket/weight.safetensors"
            stores = {
                "HTTP": (fsspec.filesystem("http"), web, ObjectPath(web)),
                "S3": (
                    fsspec.filesystem("s3", endpoint_url=url, **KEYS),
                    "bucket/weight.safetensors",
                    ObjectPath("s3://bucket/weight.safetensors", endpoint_url=url, **KEYS),
                ),
            }
            for name, (peer, there, path) in stores.items():
                yield compare(
                    f"a tensor of {TEXT}, read by {name}",
                    partial(read, path, out),
                    "fsspec `cat_ranges`",
                    partial(peer.cat_ranges, [there] * len(starts), starts, [start + RANGE for start in starts]),
                    goal=faster(1),
                    turns=TURNS,
                )
        finally:
            server.terminate()


if __name__ == "__main__":
    main(rows)
