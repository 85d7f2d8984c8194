"""The client of a cluster that this process is, from TensorFlow's environment variables.

| variable | meaning | default |
|---|---|---|
| `DTENSOR_JOBS` | the addresses of all clients, joined by commas | none: one client |
| `DTENSOR_NUM_CLIENTS` | their number, where the addresses are not given | the number of addresses |
| `DTENSOR_CLIENT_ID` | which of them this is, from 0 | 0 |
| `DTENSOR_JOB_NAME` | the job of all of them | `localhost` for one client, else `worker` |

The variables are read at every call, so that a program may set them late.
"""

from __future__ import annotations

import os

from .._arguments import integer
from .._text import counted, shown
from ..errors import MeshError, ParseError

__all__ = ["client_id", "full_job_name", "job_name", "jobs", "num_clients"]

_CLIENT_ID = "DTENSOR_CLIENT_ID"
_NUM_CLIENTS = "DTENSOR_NUM_CLIENTS"
_JOB_NAME = "DTENSOR_JOB_NAME"
_JOBS = "DTENSOR_JOBS"


def jobs() -> list[str]:
    """Return the addresses of all clients; none when `DTENSOR_JOBS` is not set.

    Raises:
        MeshError: if addresses of the form `/bns/…/N:port` are not in the order of their task numbers, on which
            the numbering of the clients depends.

    >>> import os
    >>> os.environ["DTENSOR_JOBS"] = "localhost:8001,localhost:8002"
    >>> jobs()
    ['localhost:8001', 'localhost:8002']
    >>> del os.environ["DTENSOR_JOBS"]
    >>> jobs()
    []
    """
    text = os.environ.get(_JOBS)
    if text is None:
        return []
    listed = text.split(",")
    if any(job.startswith("/bns/") for job in listed):
        tasks = [_task_of(job) for job in listed]
        if tasks != sorted(tasks):
            raise MeshError(f"{_JOBS} is {shown(text)}, whose entries are not in the order of their tasks {tasks}")
    return listed


def num_clients() -> int:
    """Return the number of clients: the number of entries of `DTENSOR_JOBS`, else `DTENSOR_NUM_CLIENTS`, else 1.

    Raises:
        MeshError: if two variables disagree, or the number is below 1.
        ParseError: if the variable is not a number.

    >>> num_clients()
    1
    """
    listed = len(jobs())
    given = _number(_NUM_CLIENTS)
    if given is not None and given < 1:
        raise MeshError(f"{_NUM_CLIENTS} is {given}; there is at least one client")
    if listed and given not in (None, listed):
        raise MeshError(f"{_NUM_CLIENTS} is {given} but {_JOBS} has {counted(listed, 'entry', 'entries')}")
    return listed or given or 1


def client_id() -> int:
    """Return the number of this client, from 0.

    Raises:
        MeshError: if the number is not below the number of clients.
        ParseError: if the variable is not a number.

    >>> client_id()
    0
    """
    number = _number(_CLIENT_ID) or 0
    if number >= num_clients():
        raise MeshError(f"{_CLIENT_ID} is {number}; it must be below the number of clients, {num_clients()}")
    return number


def job_name() -> str:
    """Return the job of all clients.

    >>> job_name()
    'localhost'
    """
    return os.environ.get(_JOB_NAME, "localhost" if num_clients() == 1 else "worker")


def full_job_name(task_id: int | None = None) -> str:
    """Return the job with replica and task: those of this client, or of the client `task_id`.

    >>> full_job_name()
    'localhost/replica:0/task:0'
    """
    task = client_id() if task_id is None else integer("task_id", task_id)
    if not 0 <= task < num_clients():
        raise MeshError(f"task_id is {task}; it must be 0 to {num_clients() - 1}")
    return f"{job_name()}/replica:0/task:{task}"


def _task_of(job: str) -> int:
    number = job.rsplit("/", 1)[-1].split(":", 1)[0]
    if not (number.isascii() and number.isdigit()):
        raise MeshError(f"{_JOBS} has {shown(job)}, which does not end in a task number")
    return int(number)


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ParseError(f"{variable} is {shown(text)}, which is not a number of at most 18 digits")
    return int(text)
