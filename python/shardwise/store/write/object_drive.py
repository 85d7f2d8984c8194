"""The tasks of a plan whose checkpoint goes to an object store, given to whatever runs functions; and the commit."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, cast

from ...errors import ParseError
from ..engine import check_threads
from ..objects import ObjectPath
from .carried import carried_names
from .crew import Crew, Flight
from .object_parts import finish, object_crew, parts_for, parts_of_crew, refuse_existing
from .object_place import ObjectPlace
from .plan import WritePlan
from .planned_object import PlannedObject, PlannedReceipt, planned_object
from .receipts import refuse_missing
from .reports import WriteReport
from .task import SourceObject
from .uploads import put_object

__all__ = ["commit_objects", "run_objects"]


def _run(task: PlannedObject, memory: int) -> PlannedReceipt:
    return task.run(memory=memory)


def run_objects(
    plan: WritePlan,
    numbers: Sequence[int],
    *,
    again: bool,
    executor: Executor | None,
    memory: int,
    threads: int | None,
    retries: int,
    progress: Callable[[int, int], object] | None,
) -> int:
    """Run tasks of a plan and keep their receipts; those that have one are run only `again`."""
    check_threads(threads)
    crew = _crew(plan, executor, memory)
    place = ObjectPlace(plan)
    refuse_existing(place.path, plan.texts)
    if not again:
        known = place.receipts(numbers)
        numbers = [number for number in numbers if number not in known]
    done, total = 0, sum(plan.sizes[number] for number in numbers)

    def more(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    if crew is None:
        for number in numbers:
            place.add(planned_object(plan, number).run(memory=memory, threads=threads, progress=more))
        return len(numbers)

    def keep(task: PlannedObject, receipt: PlannedReceipt) -> None:
        place.add(receipt)

    hint = "finished tasks stay, and the next run continues"
    flight: Flight[PlannedObject, PlannedReceipt] = Flight(crew, _run, (crew.memory,), retries, keep, hint)
    return flight.run(
        (planned_object(plan, number) for number in numbers), len(numbers), lambda task: more(task.nbytes)
    )


def _crew(plan: WritePlan, executor: Executor | None, memory: int) -> Crew | None:
    if executor is None:
        parts_for(plan.files, memory)
        return None
    sources = (source.path for source in plan.sources if isinstance(source, SourceObject))
    crew = object_crew(executor, memory, [cast(Any, plan.path), *sources])
    parts_of_crew(plan.files, memory, crew)
    return crew


def commit_objects(plan: WritePlan, *, check: bool, memory: int) -> WriteReport:
    """Finish a checkpoint whose objects were made; see `CheckpointPlan.commit`."""
    place = ObjectPlace(plan)
    try:
        refuse_existing(place.path, plan.texts)
    except FileExistsError:
        place.discard()  # Of a commit that was killed when all was done, or of no use any more.
        raise
    tasks = range(len(plan.files))
    receipts = place.receipts(tasks)
    refuse_missing(plan.path, [number for number in tasks if number not in receipts], len(tasks))
    if check:
        for number in tasks:
            found = planned_object(plan, number).run(memory=memory, threads=None, check=True).made
            if (found.digests, found.crcs) != (receipts[number].digests, receipts[number].crcs):
                raise ParseError(f"{place.path / plan.files[number].name}: is not what its receipt says")
    made = [receipts[number] for number in tasks]
    finish(place.path, plan.files, plan.tensors, plan.texts, plan.manifest, made, _put_same)
    place.discard()
    return WriteReport(
        plan.path,
        sum(not tensor.is_object for tensor in plan.tensors),
        plan.nbytes,
        sum(receipt.bytes_read for receipt in made),
        sum(receipt.bytes_written for receipt in made),
        0,
        carried=carried_names(plan.texts),
    )


def _put_same(path: ObjectPath, text: bytes) -> None:
    """Make a small object, unless it is there already, from a commit that was interrupted."""
    try:
        put_object(path, text, is_new=True)
    except FileExistsError:
        status = path.status()
        if status.size != len(text) or path.read(0, status.size, status.mark) != text:
            raise FileExistsError(errno.EEXIST, "another object is there", str(path)) from None
