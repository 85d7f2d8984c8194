"""Object stores under test: memory://, and a real S3 server with a toxic proxy before it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardwise.store.objects import ObjectPath
from tests.store.toxic import Toxic

__all__ = ["Store", "started_server"]


class Store:
    """A store under test: gives fresh places, and knows what is in them."""

    def __init__(self, make: Callable[[str], ObjectPath], toxic: Toxic | None = None) -> None:
        self._make = make
        self.toxic = toxic

    def place(self, name: str = "model") -> ObjectPath:
        return self._make(f"{uuid.uuid4().hex}/{name}")

    def put(self, folder: Path, place: ObjectPath) -> None:
        """Copy a file or a folder into the store."""
        files = [folder] if folder.is_file() else [path for path in folder.rglob("*") if path.is_file()]
        for path in files:
            target = place if path == folder else place / path.relative_to(folder).as_posix()
            place.filesystem.pipe_file(target.key, path.read_bytes())

    def objects(self, place: ObjectPath) -> dict[str, bytes]:
        """What lies at or below a place, by relative names."""
        place.filesystem.invalidate_cache()
        keys = place.filesystem.find(place.key)
        top = place.key.strip("/")
        return {key.strip("/")[len(top) :].strip("/"): place.filesystem.cat_file(key) for key in keys}


@contextmanager
def started_server() -> Iterator[Toxic]:
    """The proxy before a server, whose credentials are in the environment as long as it runs."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "ACCESS_KEY_ID": "key",
            "SECRET_ACCESS_KEY": "secret",
            "DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(f"AWS_{name}", value)
        threaded = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        threaded.start()
        toxic = Toxic(threaded.get_host_and_port()[1])
        yield toxic
        toxic.close()
        threaded.stop()
