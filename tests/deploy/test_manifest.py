from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise import (
    DeviceMesh,
    LayoutError,
    ParseError,
    Piece,
    TensorLayout,
    Tiling,
    open_checkpoint,
    packed,
    plan_model,
    save_checkpoint,
)
from shardwise.deploy import Deployment, DeploymentRule, Manifest, ManifestTensor, fsdp2
from shardwise.store import manifest_of, tensor_digests

from ..checks import refused

#: Expected of many of these tests, which are about something else.
pytestmark = pytest.mark.filterwarnings("ignore:the layouts cut:shardwise.ShardwiseWarning")

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
        (("version",), 1),
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


def test_holders_by_boxes() -> None:
    """Of a tensor without a layout; the digest, where there is one, is the last."""
    given: dict[str, Any] = {"a": [((0, 2), (0, 3))], "b": [((2, 4), (0, 3))], "c": [((4, 4), (0, 3))]}
    made = Manifest({"w": ManifestTensor((4, 3), "float32", Tiling.from_boxes((4, 3), given))}).to_dict()
    assert Manifest.from_dict(made).to_dict() == made
    twice = json.loads(json.dumps(made).replace('"b"', '"a"'))
    with pytest.raises(ParseError, match="a holder is listed twice"):
        Manifest.from_dict(twice)


def test_files_that_are_no_json(tmp_path: Path) -> None:
    for data in (b"", b"{", b"[" * 100_000, b"\xff", b"3"):
        (tmp_path / "x.json").write_bytes(data)
        with pytest.raises(ParseError):
            Manifest.load(tmp_path / "x.json")


def test_what_cannot_be_written(tmp_path: Path) -> None:
    tuples = Deployment([("a", 1), ("a", 2)], DeviceMesh((2,), ("x",)), {"w": ("x",)}).manifest({"w": ((2,), "int8")})
    with pytest.raises(LayoutError, match="cannot be in a manifest"):
        tuples.save(tmp_path / "x.json")
    with pytest.raises(LayoutError, match="has no known dtype"):
        deployment().manifest({"norm": (5,)})
    assert not list(tmp_path.iterdir())


class TestBoxes:
    """Tensors that no layout says: who holds which boxes."""

    def manifest(self) -> Manifest:
        boxes = Tiling.from_boxes((4, 6), {"a": [[(0, 4), (0, 2)], [(0, 2), (2, 6)]], 7: [(2, 4), (2, 6)]})
        flat = Tiling.from_flat_ranges((3, 5), {"a": (0, 7), "b": (7, 15), "c": (7, 15)}, replicas=True)
        rows = [Piece((slice(0, 1), slice(0, 6)), (0, 0)), Piece((slice(2, 3), slice(0, 6)), (1, 0))]
        other = [Piece((slice(1, 2), slice(0, 6)), (0, 0)), Piece((slice(3, 4), slice(0, 6)), (1, 0))]
        strided = Tiling.from_boxes((4, 6), {"a": rows, "b": other}, arrays={"a": (2, 6), "b": (2, 6)})
        return Manifest(
            {
                "boxes": ManifestTensor((4, 6), "float32", boxes),
                "flat": ManifestTensor((3, 5), "bfloat16", flat, digest="12ab"),
                "strided": ManifestTensor((4, 6), "int8", strided),
                "more": ManifestTensor((4, 6), "float32", boxes),
                "norm": deployment().manifest({"norm": ((5,), "float16")}, digests={"norm": "77"}).tensors["norm"],
            }
        )

    def test_written_and_read(self, tmp_path: Path) -> None:
        made = self.manifest()
        made.save(tmp_path / "x.json")
        read = Manifest.load(tmp_path / "x.json")
        assert read["more"] is read["boxes"]
        assert [tensor.digest for tensor in read.tensors.values()] == [None, "12ab", None, None, "77"]
        whole = {name: (one.shape, one.dtype) for name, one in made.tensors.items()}
        engine = Deployment(["gpu"], DeviceMesh((1,), ("x",)), {}, default="replicated")
        plans = [plan_model(side, engine, whole) for side in (made, read)]
        for label in plans[0].bytes_sent():
            one, other = (plan.descriptors(label) for plan in plans)
            assert one.sends.tolist() == other.sends.tolist()
        assert read.to_dict() == made.to_dict()

    def test_names_that_utf8_has_not(self, tmp_path: Path) -> None:
        made = Manifest({"\ud800": ManifestTensor((2,), "int8", Tiling.from_boxes((2,), {"\udfff": [(0, 2)]}))})
        made.save(tmp_path / "x.json")
        assert Manifest.load(tmp_path / "x.json").to_dict() == made.to_dict()

    @pytest.mark.skipif(os.name == "nt", reason="no such file there")
    def test_what_is_no_file_is_not_read(self) -> None:
        with refused(ParseError, "'/dev/zero' is not a regular file"):
            Manifest.load("/dev/zero")

    def test_what_cannot_be_written(self) -> None:
        def written(tiling: Tiling) -> None:
            Manifest({"w": ManifestTensor(tiling.shape, "int8", tiling)}).to_dict()

        with pytest.raises(LayoutError, match="holders have no labels"):
            written(Tiling.grid((4,), (2,)))
        columns = [Piece((slice(0, 2), slice(0, 1)), (0, 0)), Piece((slice(0, 2), slice(1, 2)), (0, 1))]
        with pytest.raises(LayoutError, match="boxes of 'a' are not one after the other"):
            written(Tiling.from_boxes((2, 2), {"a": columns}, arrays={"a": (2, 2)}))
        with pytest.raises(LayoutError, match="array of 'a' is larger than its boxes"):
            written(Tiling.from_boxes((2,), {"a": [Piece((slice(0, 2),), (0,))]}, arrays={"a": (3,)}))
        with pytest.raises(LayoutError, match="has a layout without a mesh"):
            Manifest({"w": ManifestTensor((2,), "int8", TensorLayout(("x",)))}).to_dict()

    @pytest.mark.parametrize(
        ("keys", "value"),
        [
            (("layouts", 0, "holders"), ["a"]),
            (("layouts", 0, "holders"), ["a", "a"]),
            (("layouts", 0, "holders"), ["a", [1]]),
            (("layouts", 0, "holders"), ["a", True]),
            (("layouts", 0, "boxes"), 3),
            (("layouts", 0, "boxes", 0), {"x": 1}),
            (("layouts", 0, "boxes", 0, 0), [[0, 4]]),
            (("layouts", 0, "boxes", 0, 0, 0), [0, 5]),
            (("layouts", 0, "boxes", 0, 0, 0), [0, 2]),  # A gap.
            (("layouts", 0, "boxes", 0, 0, 1), [0, 3]),  # An overlap.
            (("layouts", 0, "boxes", 0, 0, 0), [0, 4, 8]),
            (("layouts", 0, "boxes", 0, 0, 0), [-1, 4]),
            (("layouts", 0, "boxes", 0, 0, 0), ["0", "4"]),
            (("tensors", "flat", 3), 12),
            (("tensors", "flat", 2), None),  # numpy's default dtype, which nobody wrote.
            (("layouts", 3, "unreduced"), {}),
            (("tensors", "flat", 1), [5, 3]),
        ],
    )
    def test_what_is_none(self, keys: tuple[Any, ...], value: Any) -> None:
        wrong: Any = copy.deepcopy(self.manifest().to_dict())
        inner = wrong
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        with pytest.raises(ParseError, match=r"^the manifest"):
            Manifest.from_dict(wrong)


class TestMooncake:
    DATA = json.loads((Path(__file__).parents[1] / "data" / "deploy" / "mooncake.json").read_text())

    def test_as_many_bytes_and_operations(self, tmp_path: Path) -> None:
        (tmp_path / "engine.json").write_text(json.dumps(self.DATA["engine"]))
        src, dst = Manifest.from_mooncake(self.DATA["trainer"]), Manifest.from_mooncake(tmp_path / "engine.json")
        assert src["o"].holders == tuple(f"trainer:{i}" for i in range(8))
        assert dst["o"].pieces("engine:1")[0].box == (slice(0, 8), slice(8, 16))
        assert src["embed"] is not src["up"]
        plan = plan_model(src, dst, src.tensors)
        assert plan.total_bytes() == self.DATA["bytes"]
        assert sum(len(plan[name]) for name in plan) == self.DATA["operations"]
        assert plan_model(Manifest.from_dict(src.to_dict()), dst, src.tensors).bytes_sent() == plan.bytes_sent()

    @pytest.mark.parametrize(
        ("keys", "value"),
        [
            (("resource_kind",), "cache"),
            (("tensors",), {}),
            (("tensors", 0, "dtype"), "float99"),
            (("tensors", 0, "dtype"), None),
            (("tensors", 0, "tensor_id"), 5),
            (("parts", 0, "participant_id"), None),
            (("parts", 0, "participant_id"), True),
            (("parts", 0, "participant_id"), float("nan")),
            (("tensors", 0, "global_shape"), [13, 8]),
            (("tensors", 0, "global_shape"), None),
            (("tensors", 0, "tensor_id"), "other"),
            (("tensors", 0, "tensor_id"), "norm"),
            (("tensors", 0, "tensor_id"), []),
            (("parts", 0, "participant_id"), []),
            (("parts", 0, "fragments", 0, "global_offset"), [1, 0]),
            (("parts", 0, "fragments", 0, "local_shape"), [-3, 8]),
            (("parts", 0, "fragments", 0, "local_shape"), [3]),
            (("parts", 0, "fragments"), 3),
        ],
    )
    def test_what_is_none(self, keys: tuple[Any, ...], value: Any) -> None:
        wrong: Any = copy.deepcopy(self.DATA["engine"])
        inner = wrong
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        with pytest.raises(ParseError, match=r"^the placement"):
            Manifest.from_mooncake(wrong)


def test_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    weights = {"w": np.arange(48, dtype="float32").reshape(8, 6), "n": np.arange(3), "empty": np.zeros((0, 2))}
    cut = TensorLayout(("x", None), DeviceMesh((4,), ("x",)))
    for to in ("sharded", "dcp", "hf"):
        save_checkpoint(tmp_path / to, weights, {"w": cut}, to=to)
        with open_checkpoint(tmp_path / to) as checkpoint:
            made = manifest_of(checkpoint, digests=True)
            assert set(made) == set(weights)
            assert Manifest.from_dict(made.to_dict()).to_dict() == made.to_dict()
            assert len(made["w"].holders) == (1 if to == "hf" else 4)
            assert {name: tensor.dtype for name, tensor in made.tensors.items()} == {
                name: str(value.dtype) for name, value in weights.items()
            }
            # The digest does not depend on how a tensor is cut.
            digests = {name: tensor.digest for name, tensor in made.tensors.items()}
            assert digests == {name: f"{value:032x}" for name, value in tensor_digests(checkpoint).items()}
            engine = Deployment(["gpu"], DeviceMesh((1,), ("x",)), {}, default="replicated")
            plan = plan_model(made, engine, made.tensors)
            assert plan.total_bytes() == 48 * 4 + 3 * 8
            assert all((tmp_path / to / str(file)).exists() for file in made["w"].holders)
    with pytest.raises(TypeError, match="must be an open checkpoint"):
        manifest_of(tmp_path)  # type: ignore[arg-type]
