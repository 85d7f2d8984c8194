import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors

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
