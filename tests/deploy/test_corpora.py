"""Deployments as frameworks' own code makes them; `tests/oracle/corpora.py` compares with whole folders of cases."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path

import pytest

from tests.oracle import corpora

DATA = Path(__file__).parent.parent / "data" / "deploy"


@pytest.mark.heavy
@pytest.mark.parametrize("name", corpora.KNOWN)
def test_equal_or_refused_as_the_framework_refuses(name: str) -> None:
    found = corpora.compare(name, corpora.cases_of(DATA / f"{name}.json.gz"))
    assert found.different == []
    assert found.equal > 0
    assert found.cases == found.equal + found.refused


@pytest.mark.parametrize("name", corpora.KNOWN)
def test_differences_are_found(name: str) -> None:
    cases = corpora.cases_of(DATA / f"{name}.json.gz")
    answered = next(
        case for case in cases if "refused" not in case and not str(case.get("strategy")).startswith("eplb")
    )
    wrong = copy.deepcopy(answered)
    if name == "ranks":
        wrong["coords"]["expert"]["ep"][-1] += 1
    elif name == "layers":
        wrong["stages"][-1][-1]["layers"].append(99)
    elif name == "experts":
        wrong["local"][0] = wrong["local"][0][::-1] or [0]
        wrong["local"][0][:1] = [wrong["num_experts"]]
    elif name == "engine":
        wrong["ranks"][-1]["params"][0][2][0][1][0] += 1
    elif name.startswith("alloc"):
        wrong["ranks"][-1]["sums"]["param"]["allocated"] += 1
    else:
        wrong["ranks"][-1]["tensors"][0]["offset"][0] += 1
    refused = {key: value for key, value in answered.items() if key not in ("ranks", "stages")} | {"refused": "why"}
    if name in ("engine", "deployments"):
        refused["ranks"] = []
    found = corpora.compare(name, [answered, wrong, refused])
    assert (found.equal, found.refused, len(found.different)) == (1, 0, 2)


@pytest.mark.heavy
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert corpora.main([str(DATA)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(corpora.KNOWN)
    assert all(line.endswith(" 0 different") for line in lines)

    case = next(case for case in corpora.cases_of(DATA / "ranks.json.gz") if "refused" not in case)
    case["dense_groups"]["tp"][0][0] += 1
    (tmp_path / "ranks.json.gz").write_bytes(gzip.compress(json.dumps({"cases": [case]}).encode()))
    assert corpora.main([str(tmp_path), "ranks"]) == 1
    assert "1 cases, 0 equal, 0 refused as the framework refuses, 1 different" in capsys.readouterr().out
    assert corpora.main([str(tmp_path / "none")]) == 2
