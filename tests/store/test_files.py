"""A descriptor is open as long as someone uses it, and no longer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.store.files import _Descriptor


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def made(folder: Path) -> tuple[int, _Descriptor]:
    (folder / "file").write_bytes(b"data")
    number = os.open(folder / "file", os.O_RDONLY)
    return number, _Descriptor(number)


def test_it_is_closed_at_once_without_users(tmp_path: Path) -> None:
    number, descriptor = made(tmp_path)
    descriptor.end()
    assert not is_open(number)
    assert descriptor.take() is None


@pytest.mark.parametrize("users", [1, 2])
def test_it_is_closed_by_the_last_of_its_users(tmp_path: Path, users: int) -> None:
    number, descriptor = made(tmp_path)
    for _ in range(users):
        assert descriptor.take() == number
    descriptor.end(idle_only=True)
    assert descriptor.take() == number
    descriptor.put()
    descriptor.end()
    for _ in range(users):
        assert is_open(number)
        assert descriptor.take() is None
        descriptor.put()
    assert not is_open(number)


def test_it_stays_open_between_users(tmp_path: Path) -> None:
    number, descriptor = made(tmp_path)
    descriptor.take()
    descriptor.put()
    assert is_open(number)
    descriptor.end(idle_only=True)
    assert not is_open(number)
