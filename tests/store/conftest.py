import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors

from shardwise.store.data.objects import ObjectPath
from tests.store.stores import Store, started_server
from tests.store.toxic import Toxic
from tests.store.trips import TRIPS, Trip

Write = Callable[..., Path]


def encode(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file made by hand: `header` is JSON, or bytes to stand in its place."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def peer(data: bytes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape per name as the safetensors package reads them; SafetensorError if it refuses."""
    found = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    return {name: (info["dtype"], tuple(info["shape"])) for name, info in found}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(header: Any, data: bytes = b"", name: str = "model.safetensors") -> Path:
        path = tmp_path / name
        path.write_bytes(encode(header, data))
        return path

    return write_file


@pytest.fixture(scope="session")
def server() -> Iterator[Toxic]:
    with started_server() as toxic:
        yield toxic


@pytest.fixture
def s3(server: Toxic, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    server.calm()
    top = ObjectPath("s3://bucket/x", endpoint_url=server.url, pause=0.001)
    if not top.filesystem.exists("bucket"):
        top.filesystem.mkdir("bucket")
    server.calm()
    yield Store(
        lambda name: ObjectPath(f"s3://bucket/{name}", filesystem=top.filesystem, attempts=5, pause=0.001), server
    )
    server.calm()


@pytest.fixture
def memory() -> Iterator[Store]:
    """What a test puts there is removed: this filesystem looks through all names that it has for most questions."""
    pytest.importorskip("fsspec")
    kept = ObjectPath("memory://x").filesystem.store
    before = set(kept)
    yield Store(lambda name: ObjectPath(f"memory://{name}", attempts=5, pause=0.001))
    for name in set(kept) - before:
        del kept[name]


def a_trip(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trip:
    names = request.param.split(" to ")
    stores = [None if name == "disk" else request.getfixturevalue(name) for name in names]
    for store in stores:
        if store is not None and store.toxic is not None:
            monkeypatch.setenv("AWS_ENDPOINT_URL", store.toxic.url)
    return Trip(tmp_path, *stores)


@pytest.fixture(params=TRIPS)
def trip(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trip:
    """From everywhere to everywhere."""
    return a_trip(request, tmp_path, monkeypatch)


@pytest.fixture(params=[name for name in TRIPS if "memory" not in name])
def shared(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trip:
    """Where other processes can help."""
    return a_trip(request, tmp_path, monkeypatch)


@pytest.fixture(params=["memory", "s3"])
def store(request: pytest.FixtureRequest) -> Store:
    found: Store = request.getfixturevalue(request.param)
    return found
