"""Object stores under test: memory://, and a real S3 server with a toxic proxy before it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardwise.store.data.objects import ObjectPath
from tests.store.toxic import Toxic

__all__ = ["GoogleLike", "Store", "started_server", "wrapped"]


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


def wrapped(place: ObjectPath, **changed: Any) -> ObjectPath:
    """The place by a filesystem some of whose methods are others; each is called with the one in its place."""

    class Wrapped:
        def __getattr__(self, name: str) -> Any:
            found = getattr(place.filesystem, name)
            return (lambda *args, **kwargs: changed[name](found, *args, **kwargs)) if name in changed else found

    return ObjectPath(str(place), filesystem=Wrapped())


class GoogleLike:
    """As gcsfs does it: a file that uploads in blocks, and makes the object when it is closed."""

    def __init__(self) -> None:
        self.made: dict[str, bytes] = {}
        self.discarded = 0

    def info(self, path: str) -> dict[str, Any]:
        if path in self.made:
            return {"name": path, "size": len(self.made[path]), "type": "file", "generation": 1}
        if any(name.startswith(f"{path}/") for name in self.made):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool) -> list[dict[str, Any]]:
        return [self.info(name) for name in self.made if name.rpartition("/")[0] == path]

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        return self.made[path][start:end]

    def rm_file(self, path: str) -> None:
        del self.made[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        """Nothing is kept."""

    def _parent(self, path: str) -> str:
        return path.rpartition("/")[0]

    def open(self, path: str, mode: str) -> Any:
        from fsspec.spec import AbstractBufferedFile

        store = self

        class Upload(AbstractBufferedFile):  # type: ignore[misc]
            def _initiate_upload(self) -> None:
                self.blocks = b""

            def _upload_chunk(self, final: bool = False) -> bool:
                self.blocks += self.buffer.getvalue()
                if final:
                    if mode == "xb" and path in store.made:
                        raise FileExistsError(path)
                    store.made[path] = self.blocks
                return True

            def discard(self) -> None:
                store.discarded += 1

        return Upload(self, path, mode, autocommit=True)
