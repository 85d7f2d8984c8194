"""The prover itself: it finds what is planted, goes on where it was, and counts what it did."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise import LayoutError
from tests.oracle import fused
from tests.oracle.worker import ROOT
from tests.prove import (
    against_dask,
    against_engines,
    against_engines_code,
    against_engines_loaders,
    against_jax,
    against_numpy,
    against_tensorflow,
    against_torch,
    computations,
    laws,
    layout_maps,
    reshards,
)
from tests.prove.ledger import Ledger, code_version
from tests.prove.pool import seeded
from tests.prove.report import HEAD, Row, table
from tests.prove.run import prove, works_of
from tests.prove.subject import Case, Mismatch, Outcome, Subject

PLANTED = "tests.prove.planted"


@pytest.mark.heavy
def test_planted_faults_are_found_saved_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = prove("tests.prove.planted_faults", Ledger(1, 0.1, "v", tmp_path), jobs=2, resume=False)
    text = capsys.readouterr().out
    assert status == 1
    # The smallest number that is wrong, not the one that was drawn.
    assert "value = 17\n# whether it is below 17: ours False, expected True" in text
    assert "the process died" in text
    assert re.search(r"^nobody +right +100 +0 ", text, re.MULTILINE)
    assert re.search(r"^nobody +wrong +4 +[1-4] ", text, re.MULTILINE)
    assert re.search(r"^nobody +absent +not installed$", text, re.MULTILINE)
    saved = [path.read_text() for path in tmp_path.glob("nobody__wrong-1-*.py")]
    assert any("value = 17" in snippet for snippet in saved)


def test_a_run_without_mismatches_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(1, 0.1, "v", tmp_path)
    assert Ledger.unfinished(0.1, "v", tmp_path) is None
    assert prove(PLANTED, ledger, jobs=1, resume=True) == 0
    assert "100 cases, 0 mismatches, seed 1" in capsys.readouterr().out
    assert Ledger.unfinished(0.1, "v", tmp_path) is None
    # Again, and there is nothing left to do.
    assert prove(PLANTED, ledger, jobs=1, resume=True) == 0
    assert "100 cases were done before" in capsys.readouterr().out


def test_what_was_found_before_an_interruption_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(1, 0.1, "v", tmp_path)
    ledger.start(resume=False)
    ledger.add("nobody: right", 0, Outcome(50, 1.0, ["wrong"]))
    with ledger.path.open("a") as file:
        file.write('{"subject": "nobody: ri')  # as a kill leaves it
    found = Ledger.unfinished(0.1, "v", tmp_path)
    assert found is not None
    assert found.seed == 1
    assert prove(PLANTED, found, jobs=1, resume=True) == 1
    assert "100 cases, 1 mismatches" in capsys.readouterr().out


def test_a_limit_of_time_is_shared_out_and_reaches_every_subject(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each batch takes a second of a made-up clock: what the first subject leaves unused is the others'."""
    clock = [0.0]

    def subject(operation: str, batches: int) -> Subject:
        return Subject("nobody", operation, 10 * batches, 10, lambda *_: Outcome())

    rows = [Row(subject(f"of {n}", n), 10 * n) for n in (2, 100, 100, 1)]
    given = []
    for work in works_of(rows, {}, limit=20, clock=lambda: clock[0]):
        given.append(work.subject)
        clock[0] += 1.0
    # 20 / 4 = 5 seconds for the first, which needs 2; 18 / 3 = 6 for the second; 12 / 2 = 6 for the third.
    assert [given.count(number) for number in range(4)] == [2, 6, 6, 1]
    assert [row.is_cut_short for row in rows] == [False, True, True, False]
    # With no time at all, one batch of each.
    assert [work.subject for work in works_of(rows, {}, limit=0, clock=lambda: clock[0])] == [0, 1, 2, 3]

    ledger = Ledger(1, 0.1, "v", tmp_path)
    assert prove(PLANTED, ledger, jobs=1, resume=True, limit=0) == 0
    assert "the same command goes on from here" in capsys.readouterr().out
    assert Ledger.unfinished(0.1, "v", tmp_path) is not None
    assert prove(PLANTED, ledger, jobs=1, resume=True) == 0
    assert "100 cases, 0 mismatches" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_is_taken_up(signal_number: int) -> None:
    """The run of another process, in the project's own folder, with a scale that nobody else has."""
    scale = f"0.{random.SystemRandom().randrange(10**8, 10**9)}"
    command = [sys.executable, "-m", "tests.prove", "--registry", PLANTED, "--scale", scale, "--jobs", "1", "--resume"]
    # A shell's background jobs, and all that they start, ignore SIGINT unless told otherwise. The new process tells
    # itself, since a function that runs between fork and exec is unsafe beside threads: JAX warns of it.
    hearing = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", hearing, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    ledger = None
    try:
        deadline = time.monotonic() + 3600
        while time.monotonic() < deadline and (ledger is None or "subject" not in ledger.path.read_text()):
            time.sleep(0.01)
            ledger = Ledger.unfinished(float(scale), code_version())
        assert ledger is not None
        os.kill(first.pid, signal_number)
        first.communicate(timeout=3600)
        done = ledger.path.read_text().count("subject")
        assert done > 0
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
        assert second.returncode == 0, second.stdout + second.stderr
        assert f"seed {ledger.seed}" in second.stdout
        before = re.search(r"([\d,]+) cases were done before", second.stdout)
        assert before is not None
        assert int(before.group(1).replace(",", "")) >= 50
    finally:
        first.kill()
        if ledger is not None:
            ledger.path.unlink(missing_ok=True)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "subject",
    [*against_dask.SUBJECTS, *against_jax.SUBJECTS, *against_tensorflow.SUBJECTS, *against_torch.SUBJECTS],
    ids=lambda subject: subject.name,
)
def test_some_cases_of_each_framework_that_is_installed(subject: Subject) -> None:
    """Another seed each time, which a failure prints."""
    if missing := subject.missing():
        pytest.skip(f"{subject.oracle} is {missing}")
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    try:
        outcome = subject.run(seeded(seed, subject.name, 0), 300, 0)
    finally:
        subject.stop()
    assert outcome.cases == 300
    assert outcome.mismatches == []


@pytest.mark.heavy
@pytest.mark.parametrize(
    "subject",
    [
        *against_numpy.SUBJECTS,
        *against_engines.SUBJECTS,
        *laws.SUBJECTS,
        *reshards.SUBJECTS,
        *computations.SUBJECTS,
        layout_maps.SUBJECTS[0],
    ],
    ids=lambda subject: subject.operation,
)
def test_some_cases_of_each_subject_that_needs_no_framework(subject: Subject) -> None:
    outcome = subject.run(seeded(1, subject.name, 0), 150, 0)
    assert outcome.mismatches == []
    assert outcome.cases == 150


@pytest.mark.heavy
def test_what_engines_are_asked_and_that_a_wrong_answer_is_one() -> None:
    """Without the engines: their answers are restated for some, and spoilt."""
    case = against_engines_code.OwnCase("megatron stride", (2, 3, 1), 4)
    held = [fused.megatron_stride(24, 3, 4, rank).tolist() for rank in range(4)]
    against_engines_code.compare(case, held)
    for spoilt in (held[::-1], [held[0][::-1], *held[1:]], [*held[:3], held[3][:-1]], ("raised", "E", "")):
        with pytest.raises((Mismatch, LayoutError)):
            against_engines_code.compare(case, spoilt)
    few = against_engines_code.OwnCase("megatron used", (1, 4, 2), 4)
    question, compare = against_engines_code.QUESTIONS[few.what](few)
    assert question["groups"] < 4
    with pytest.raises(Mismatch):
        compare([[[0], [0], [0]]] * 4)
    for what, ask in against_engines_code.QUESTIONS.items():
        for ranks in (1, 2, 6):
            assert ask(against_engines_code.OwnCase(what, (3, 2, 4), ranks))[0]["ranks"] == ranks
    rng = random.Random(2)
    placed = [against_engines_code.random_placed(rng) for _ in range(50)]
    for one in placed:
        against_engines_code.compare_placed(one, one.rows_held())
    with pytest.raises(Mismatch):
        against_engines_code.compare_placed(placed[0], [rows[1:] for rows in placed[0].rows_held()])


def test_what_loaders_are_asked_and_that_a_wrong_answer_is_one() -> None:
    def case(layer: str, *numbers: int, ranks: int = 4) -> against_engines_loaders.LoadedCase:
        return against_engines_loaders.LoadedCase("vllm", layer, numbers, ranks, "fused", "weight_loader")

    heads = case("qkv", 4, 2, 2, 2)
    held = [fused.vllm_qkv(8, 2, 2, 4, rank).tolist() for rank in range(4)]
    # Six words, padded to eight: the last two of the last rank are none.
    words, padded = case("vocabulary", 6, 8), [[0, 1], [2, 3], [4, 5], [-1, -1]]
    for asked, answer in ((heads, held), (words, padded)):
        against_engines_loaders.compare(asked, answer)
        for spoilt in (answer[::-1], [answer[0][::-1], *answer[1:]], ("raised", "AssertionError", "")):
            with pytest.raises(Mismatch):
                against_engines_loaders.compare(asked, spoilt)
    refused = case("qkv", 4, 3, 2, 2)
    against_engines_loaders.compare(refused, ("raised", "AssertionError", "4 is not divisible by 3"))
    with pytest.raises(Mismatch):
        against_engines_loaders.compare(refused, ("raised", "AttributeError", ""))
    rng = random.Random(3)
    for subject in ("vllm", "sglang"):
        for one in map(against_engines_loaders.drawn(subject), [rng] * 50):
            assert one.question()["engine"] == subject


def test_the_same_seed_gives_the_same_cases() -> None:
    one, again, other = (
        [against_numpy.random_case(rng) for _ in range(20)]
        for rng in (seeded(1, "a", 0), seeded(1, "a", 0), seeded(1, "a", 1))
    )
    assert one == again != other


def test_snippets_are_code() -> None:
    rng = random.Random(1)
    cases: list[Case] = [against_numpy.random_case(rng), reshards.random_pair(rng), layout_maps.random_map(rng)]
    for case in [*cases, against_dask.ChunkCase((3,), (1,), (2,))]:
        compile(case.snippet(), "snippet", "exec")
    names: dict[str, object] = {}
    pair = reshards.random_pair(random.Random(3))
    exec(pair.snippet(), names)
    assert names["src"] == pair.src.partition()


def test_the_table_lines_up() -> None:
    subject = Subject("numpy", "layouts", 10, 10, lambda *_: Outcome())
    row = Row(subject, 10, cases=1234567, mismatches=0, seconds=2.0)
    head, line, first = table([row]).splitlines()
    assert [cell for cell in re.split(r"  +", head) if cell] == list(HEAD)
    assert len(head) == len(line)
    assert first.split() == ["numpy", "layouts", "1,234,567", "0", "2.0", "s", "617,284"]
