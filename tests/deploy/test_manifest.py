from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from shardwise import DeviceMesh, LayoutError, ParseError, packed, plan_model
from shardwise.deploy import Deployment, DeploymentRule, Manifest, fsdp2

TENSORS = {
    "h.0.w": ((8, 6), "float32"),
    "h.1.w": ((8, 6), "float32"),
    "h.1.up": ((12, 2), "bfloat16"),
    "norm": ((5,), "float16"),
    "scale": ((), "uint8"),
}


def deployment() -> Deployment:
    return Deployment(
        ["a", "b", 3, 4],
        DeviceMesh((2, 2), ("pp", "tp")),
        {
            r"h\.{i}\.w": DeploymentRule(("tp", None), at={"pp": "i"}),
            r"h\.{i}\.up": DeploymentRule((packed.gate_up("tp"), None), at={"pp": "i"}),
            "norm": DeploymentRule(("tp",), at={"pp": 1}, uneven="ceil"),
        },
        default="replicated",
    )


def test_written_and_read(tmp_path: Path) -> None:
    made = deployment().manifest(TENSORS)
    made.save(tmp_path / "trainer.json")
    read = Manifest.load(tmp_path / "trainer.json")
    assert read == made
    assert hash(read) == hash(made)
    assert pickle.loads(pickle.dumps(read)) == made
    assert list(read) == list(TENSORS)
    for name, (shape, dtype) in TENSORS.items():
        assert read[name] == deployment().partition(name, shape)
        assert read.tensors[name].dtype == dtype
    assert read["h.1.w"].holders == (3, 4)
    shared = deployment().manifest({f"h.0.w{i}": ((8, 6), "float32") for i in range(3)})
    assert shared["h.0.w0"] is shared["h.0.w2"]


def test_it_goes_into_plans(tmp_path: Path) -> None:
    deployment().manifest(TENSORS).save(tmp_path / "trainer.json")
    tensors = {name: given for name, given in TENSORS.items() if given[0]}
    read = Manifest.load(tmp_path / "trainer.json")
    plan, expected = (plan_model(side, fsdp2(2), tensors) for side in (read, deployment()))
    assert plan.bytes_sent() == expected.bytes_sent()
    assert plan_model(read, read, read.tensors).total_bytes() == 0


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("format",), "other"),
        (("version",), 2),
        (("meshes",), {}),
        (("meshes", 0, "shape"), [0, 1]),
        (("meshes", 0), 3),
        (("layouts", 0, "mesh"), 9),
        (("layouts", 0, "mesh"), True),
        (("layouts", 0, "axes"), [["dp"], []]),
        (("layouts", 0, "axes"), ["tp", []]),
        (("layouts", 0, "uneven"), "odd"),
        (("layouts", 1, "axes"), [{"packed": "(("}, []]),
        (("tensors", "h.0.w", 0), -1),
        (("tensors", "h.0.w", 1), [8]),
        (("tensors", "h.0.w", 1), [7, 6]),
        (("tensors", "h.0.w", 1), [8, 2**70]),
        (("tensors", "h.0.w", 2), "float99"),
        (("tensors", "h.0.w"), []),
        (("tensors",), []),
        (("layouts",), None),
    ],
)
def test_what_is_no_manifest(keys: tuple[Any, ...], value: Any) -> None:
    wrong: Any = copy.deepcopy(deployment().manifest(TENSORS).to_dict())
    inner = wrong
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    with pytest.raises(ParseError, match=r"^the manifest"):
        Manifest.from_dict(json.loads(json.dumps(wrong)))
    for key in ("meshes", "layouts", "tensors"):
        with pytest.raises(ParseError):
            Manifest.from_dict(
                {name: one for name, one in deployment().manifest(TENSORS).to_dict().items() if name != key}
            )


def test_files_that_are_no_json(tmp_path: Path) -> None:
    for data in (b"", b"{", b"[" * 100_000, b"\xff", b"3"):
        (tmp_path / "x.json").write_bytes(data)
        with pytest.raises(ParseError):
            Manifest.load(tmp_path / "x.json")


def test_what_cannot_be_written(tmp_path: Path) -> None:
    tuples = Deployment([("a", 1), ("a", 2)], DeviceMesh((2,), ("x",)), {"w": ("x",)}).manifest({"w": ((2,), "int8")})
    with pytest.raises(LayoutError, match="cannot be written"):
        tuples.save(tmp_path / "x.json")
    with pytest.raises(LayoutError, match="has no known dtype"):
        deployment().manifest({"norm": (5,)})
    assert not list(tmp_path.iterdir())
