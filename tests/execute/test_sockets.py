"""The example of a transport: among twelve ranks, and everything that may go wrong with one of them."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise import DeviceMesh, Rewrites, plan_model
from shardwise.deploy import Deployment, DeploymentRule
from shardwise.reshard import ModelPlan

EXAMPLE = Path(__file__).parents[2] / "examples" / "sockets.py"
SECONDS = 60.0


def load() -> Any:
    spec = importlib.util.spec_from_file_location("sockets_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sockets = load()
TENSORS = {f"h.{i}.{x}": ((16, 8), "float32") for i in range(4) for x in ("up", "gate", "down")}
FUSED = Rewrites([{"from": "h.{i}.{gate,up}", "to": {"name": "h.{i}.gate_up", "packed": "gate:(n) + up:(n)"}}])
WHOLE = {name: np.arange(128, dtype="float32").reshape(16, 8) + 1000 * i for i, name in enumerate(TENSORS)}


def plan_of(stages: str = "i // 2") -> ModelPlan:
    """Eight ranks of a trainer in two stages, four of an engine with fused tensors."""
    mesh = DeviceMesh((2, 2, 2), ("pp", "dp", "tp"))
    rules = {r"h\.{i}\.(up|gate)": ("tp", None), r"h\.{i}\.down": (None, "tp")}
    trainer = Deployment(
        [f"trainer:{i}" for i in range(8)], mesh,
        {key: DeploymentRule(axes, at={"pp": stages}) for key, axes in rules.items()},
    )  # fmt: skip
    world = [f"engine:{i}" for i in range(4)]
    engine = Deployment(world, DeviceMesh((4,), ("tp",)), {"gate_up": (None, "tp"), "down": ("tp", None)})
    return plan_model(trainer, engine, TENSORS, rewrites=FUSED)


def arrays_of(plan: ModelPlan, label: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a rank has before, and what it should have then."""
    whole_then = {name: WHOLE[name] for name in WHOLE if name.endswith("down")}
    whole_then |= {f"h.{i}.gate_up": np.concatenate([WHOLE[f"h.{i}.gate"], WHOLE[f"h.{i}.up"]]) for i in range(4)}

    def cut(tilings: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
        return {
            name: np.ascontiguousarray(whole[name][one.pieces(label)[0].box])
            for name, one in tilings.items()
            if label in one.holders
        }

    return cut(plan._model.before, WHOLE), cut({name: one.dst for name, one in plan.items()}, whole_then)


class Outcome:
    """How it ended for a rank."""

    def __init__(self, error: BaseException | None, weights: dict[str, Any], expected: dict[str, Any]) -> None:
        self.error = error
        self.whole = all(np.array_equal(weights[name], expected[name]) for name in expected)
        self.untouched = all((array == 7).all() for array in weights.values())


def everyone(
    disturbed: Callable[[Any, Any], None] | None = None, *, other_plan: bool = False, memory: int | None = 300,
    seconds: float = SECONDS,
) -> list[Outcome]:  # fmt: skip
    """All twelve ranks as threads; rank 3 is disturbed, or has another plan."""
    plan = plan_of()
    labels = list(plan.devices)
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in labels]
    addresses = [one.getsockname() for one in listening]

    def rank(own: int) -> Outcome:
        mine = plan_of("1 - i // 2") if other_plan and own == 3 else plan
        before, expected = arrays_of(mine, labels[own])
        weights = {name: np.full_like(array, 7) for name, array in expected.items()}
        error = None
        try:
            connections = sockets.Connections(own, labels, addresses, listening[own], seconds)
            program = mine.program(labels[own], memory)
            if disturbed is not None and own == 3:
                disturbed(connections, program)
            sockets.move(program, connections, before, weights)
            connections.close()
        except OSError as found:
            error = found
        return Outcome(error, weights, expected)

    try:
        with ThreadPoolExecutor(len(labels)) as pool:
            return list(pool.map(rank, range(len(labels))))
    finally:
        for one in listening:
            one.close()


@pytest.mark.parametrize("memory", [None, 64, 1000])
def test_twelve_ranks(memory: int | None) -> None:
    for outcome in everyone(memory=memory):
        assert outcome.error is None
        assert outcome.whole


def all_fail(outcomes: list[Outcome]) -> None:
    assert len(outcomes) == 12
    for outcome in outcomes:
        assert isinstance(outcome.error, OSError)
        assert outcome.untouched


def test_a_rank_with_another_plan_is_an_error_on_all() -> None:
    all_fail(everyone(other_plan=True))


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_a_rank_that_ends_is_an_error_on_all(after: int) -> None:
    def disturbed(connections: Any, program: Any) -> None:
        send, count = connections.send, iter(range(after))

        def ends(peer: str, tag: int, data: Any) -> None:
            if next(count, None) is None:
                connections.close()
                raise ConnectionAbortedError("killed")
            send(peer, tag, data)

        assert int(program.messages["sends"].sum()) > after
        connections.send = ends

    all_fail(everyone(disturbed, memory=64))


@pytest.mark.parametrize("kind", ["a short message", "a message that is cut off", "no message", "another tag"])
def test_a_rank_that_sends_too_little_is_an_error_on_all(kind: str) -> None:
    def disturbed(connections: Any, program: Any) -> None:
        send = connections.send

        def short(peer: str, tag: int, data: Any) -> None:
            if kind == "a short message":
                send(peer, tag, data[:-1])
            elif kind == "another tag":
                send(peer, tag + 1, data)
            elif kind == "a message that is cut off":
                connections.to[peer].sendall(sockets.HEADER.pack(tag, data.nbytes, 0) + bytes(data)[:-1])

        connections.send = short

    all_fail(everyone(disturbed, seconds=2.0))


def test_a_rank_that_is_silent_is_an_error_on_all_within_the_time() -> None:
    def disturbed(connections: Any, program: Any) -> None:
        def silent(*_: Any) -> None:
            time.sleep(4)
            raise ConnectionAbortedError("late")

        connections.send = silent

    all_fail(everyone(disturbed, seconds=1.0))


def test_whoever_fails_last_leaves_each_rank_whole_or_untouched() -> None:
    """A rank that ends between its last message and its vote, or after it."""

    def disturbed(connections: Any, program: Any) -> None:
        vote, votes = connections.vote, iter((True,))

        def ends(what: bytes, expected: Any) -> None:
            if next(votes, False):
                vote(what, expected)
                return
            for other in list(connections.to.values())[:6]:
                other.sendall(what)
            connections.close()
            raise ConnectionAbortedError("killed")

        connections.vote = ends

    outcomes = everyone(disturbed)
    assert isinstance(outcomes[3].error, OSError)
    for outcome in outcomes:
        assert outcome.untouched if outcome.error else outcome.whole


@pytest.mark.heavy
def test_the_example_runs() -> None:
    ran = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=300)
    assert ran.stdout == "6 processes: the engine has its weights\n", ran.stderr


def process(own: int, addresses: Any, listening: Any, killed: int, seed: int) -> None:
    plan = plan_of()
    labels = list(plan.devices)
    before, expected = arrays_of(plan, labels[own])
    weights = {name: np.full_like(array, 7) for name, array in expected.items()}
    try:
        connections = sockets.Connections(own, labels, addresses, listening)
        if own == killed:
            draw = random.Random(seed)
            receive, send = connections.receive, connections.send

            def dies(step: Any) -> Any:
                def run(*arguments: Any) -> None:
                    if draw.random() < 0.2:
                        os._exit(9)
                    step(*arguments)

                return run

            connections.receive, connections.send = dies(receive), dies(send)
        sockets.move(plan.program(labels[own], 100), connections, before, weights)
        if own == killed:
            os._exit(9)
    except OSError:
        sys.exit(3 if Outcome(None, weights, expected).untouched else 4)
    sys.exit(0 if Outcome(None, weights, expected).whole else 4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_processes_of_which_one_is_killed(seed: int) -> None:
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(12)]
    addresses = [one.getsockname() for one in listening]
    killed = random.Random(seed).randrange(12)
    context = multiprocessing.get_context("spawn")
    started = [
        context.Process(target=process, args=(own, addresses, one, killed, seed)) for own, one in enumerate(listening)
    ]
    for one in started:
        one.start()
    for each in listening:
        each.close()
    for one in started:
        one.join(120)
    codes = [one.exitcode for one in started]
    assert codes[killed] == 9
    assert {code for rank, code in enumerate(codes) if rank != killed} in ({3}, {0}), codes
