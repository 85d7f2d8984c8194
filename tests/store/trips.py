"""Trips: a source in one place, and a new checkpoint in another, of which the same is asked whatever these are."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.store.stores import Store
from tests.store.tasks import TASK, files, rules

__all__ = ["FORMS", "TRIPS", "WAYS", "AtOnce", "Flaky", "Stopped", "Trip", "name_of", "settings"]

FORMS = ("safetensors", "hf", "sharded", "dcp", "torch", "fsdp2", "universal")
#: From where to where; the tests of those with S3 need its server.
TRIPS = (
    "disk to disk", "disk to memory", "memory to disk", "memory to memory", "disk to s3", "s3 to disk", "s3 to s3",
)  # fmt: skip

#: Each with all forms; with S3, whose server takes seconds, each form once or twice.
WAYS = [(trip, to) for trip in TRIPS for to in FORMS if "s3" not in trip] + [
    ("disk to s3", "safetensors"), ("disk to s3", "dcp"), ("s3 to disk", "hf"), ("s3 to s3", "safetensors"),
    ("s3 to s3", "sharded"),
]  # fmt: skip


def name_of(to: str) -> str:
    return {"safetensors": "new.safetensors", "torch": "new.pt"}.get(to, "new")


def settings(to: str, **more: Any) -> dict[str, Any]:
    """What makes a plan of several tasks and files of it."""
    layouts = rules() if to in ("sharded", "dcp", "fsdp2") else None
    more = more if to in ("dcp", "torch", "fsdp2", "universal") else {"metadata": {"made": "here"}, **more}
    return {"layouts": layouts, "to": to, "max_file_bytes": 80_000, "task_bytes": TASK, **more}


class Trip:
    """From where to where; a store that is `None` is the disk.

    Attributes:
        in_memory: Whether a part of it is in the memory of this process, so that no other process can help.
        to_store: Whether the new checkpoint is in a store, where a task makes an object.
    """

    def __init__(self, folder: Path, source: Store | None, target: Store | None) -> None:
        self._folder, self._source, self._target = folder, source, target
        self.in_memory = any(store is not None and store.toxic is None for store in (source, target))
        self.to_store = target is not None

    def put(self, path: Path) -> Any:
        """A checkpoint of the disk, or a copy of it where sources are."""
        if self._source is None:
            return path
        place = self._source.place(path.name)
        self._source.put(path, place)
        return place

    def change(self, source: Any, name: str, data: bytes) -> None:
        """Replace a file of a source."""
        if isinstance(source, Path):
            (source / name).write_bytes(data)
        else:
            source.filesystem.pipe_file((source / name).key, data)

    def file(self, name: str) -> Path:
        """A name on the disk, apart from both."""
        (self._folder / "apart").mkdir(exist_ok=True)
        return self._folder / "apart" / name

    def new(self, name: str = "new") -> Any:
        """A name that is free, in a folder of its own."""
        if self._target is not None:
            return self._target.place(name)
        (self._folder / "out").mkdir(exist_ok=True)
        return self._folder / "out" / name

    def made(self, path: Any) -> dict[str, bytes]:
        """What is there, and that nothing lies beside it any more."""
        beside = path.parent.iterdir() if self._target is None else self._target.objects(path.parent)
        hidden = [str(getattr(each, "name", each)) for each in beside]
        assert not [name for name in hidden if name.startswith(".")]
        return files(path) if self._target is None else self._target.objects(path)


class Stopped(Exception):
    """Raised by a caller's own function, to end a run."""


class AtOnce(ThreadPoolExecutor):
    """Runs each task when it is given, with `call`."""

    def __init__(self) -> None:
        super().__init__(2)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(self.call(fn, *args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def call(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)


class Flaky(AtOnce):
    """Each task fails so many times before it is done: before it runs, or after."""

    def __init__(self, failures: int, error: Exception, after: bool = False) -> None:
        super().__init__()
        self.failures, self.error, self.after = failures, error, after
        self.tries: dict[int, int] = {}

    def call(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        number = args[0].number
        self.tries[number] = self.tries.get(number, 0) + 1
        if self.after:
            fn(*args, **kwargs)
        if self.tries[number] <= self.failures:
            raise self.error
        return fn(*args, **kwargs)
