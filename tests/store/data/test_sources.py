"""Sources of a plan: their digests against hashlib, and the sizes that are refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from shardwise.store.data.sources import SourceFile, head_digest
from shardwise.store.data.stated_sources import Locations, source_of

MIB = 2**20


@pytest.mark.parametrize(("before", "after"), [(0, 0), (10, 0), (0, 10), (MIB + 9, 7), (5, 2**16 + 9), (MIB, 2**16)])
def test_headers_are_digested_up_to_their_limits(tmp_path: Path, before: int, after: int) -> None:
    data = np.random.default_rng(1).bytes(before + 100 + after)
    (tmp_path / "x").write_bytes(data)
    expected = data[: min(before, MIB)] + data[len(data) - min(after, 2**16) :]
    found = head_digest(tmp_path / "x", len(data), before, before + 100)
    assert found == hashlib.sha256(expected if after else data[: min(before, MIB)]).hexdigest()


def test_sources_of_a_plan_are_within_their_size() -> None:
    for begin, end, size in ((0, 0, 0), (0, 7, 7), (7, 7, 7), (2, 3, 2**63 - 1)):
        assert source_of(["/a", size, 5, 6, begin, end, "d"], Locations()) == SourceFile(
            "/a", size, 5, 6, begin, end, "d"
        )
    for begin, end, size in ((-1, 3, 7), (4, 3, 7), (0, 8, 7), (0, 1, 2**63)):
        with pytest.raises(ValueError, match=f"it has a source of {size} bytes, with tensors from {begin} to {end}"):
            source_of(["/a", size, 5, 6, begin, end, "d"], Locations())
    for said in (
        ["/a", 7, 5, 6, 0, 3, 4],
        [3, 7, 5, 6, 0, 3, "d"],
        ["/a", 7, 5.0, 6, 0, 3, "d"],
        ["/a", True, 5, 6, 0, 3, "d"],
    ):
        with pytest.raises(ValueError, match="neither a file nor an object"):
            source_of(said, Locations())
