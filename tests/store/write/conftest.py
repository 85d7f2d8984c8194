from pathlib import Path

import pytest

from tests.store.tasks import saved


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A sharded checkpoint of 2 MB; a file that needs another one has a fixture of this name."""
    return saved(tmp_path)
