"""Weights in the memory of devices, compared with a checkpoint by digests: faults that are planted are found."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise import DeviceMesh, LayoutError, TensorLayout
from shardwise.deploy import Deployment, join_manifests
from shardwise.store import MemoryDigests, check_memory, check_sums, memory_digests, tensor_digests
from tests.checks import refused
from tests.deploy.models import ENGINES, PADDING, dense, numbered

Memory = dict[Any, dict[str, np.ndarray[Any, Any]]]


def loaded(name: str, model: np.ndarray[Any, Any]) -> Memory:
    """The memory of all devices after a model was loaded, padding of zeros."""
    engine, shapes = ENGINES[name]
    memory: Memory = {device: {} for device in engine.devices}
    for device, parameters in memory.items():
        for one in engine.parameters_of(device, shapes):
            at = dense(one, shapes)
            parameters[one.name] = np.where(at == PADDING, 0, model[np.maximum(at, 0)]).reshape(one.shape)
    return memory


def reports(name: str, memory: Memory) -> list[MemoryDigests]:
    engine, shapes = ENGINES[name]
    return [memory_digests(engine, device, shapes, parameters) for device, parameters in memory.items()]


def model_of(name: str, path: Path, seed: int) -> tuple[np.ndarray[Any, Any], sw.store.StoredCheckpoint]:
    """A model of random values, as one array of all elements and as a checkpoint."""
    shapes = ENGINES[name][1]
    model = np.random.default_rng(seed).integers(1, 2**31, sum(map(math.prod, shapes.values()))).astype(np.int32)
    first = numbered(shapes)
    tensors = {n: model[first[n] : first[n] + math.prod(shape)].reshape(shape) for n, shape in shapes.items()}
    sw.save_checkpoint(path, tensors)
    return model, sw.open_checkpoint(path)


@pytest.mark.parametrize("name", ENGINES)
def test_what_is_loaded_is_right(name: str, tmp_path: Path) -> None:
    model, checkpoint = model_of(name, tmp_path / "model.safetensors", 0)
    engine, shapes = ENGINES[name]
    with checkpoint:
        digests = tensor_digests(checkpoint)
    found = reports(name, loaded(name, model))
    assert check_memory(found, digests) == []
    assert check_sums(engine, shapes, sum(report.sums for report in found), digests) == []  # type: ignore[arg-type]
    # Without one of the devices that is no replica of others, something is missing.
    others = [report for report in found if report.device != engine.devices[0]]
    alone = {tensor for tensor, boxes in found[0].boxes.items()
             for bounds in boxes if not any(bounds in one.boxes.get(tensor, {}) for one in others)}  # fmt: skip
    assert {fault.tensor for fault in check_memory(others, digests)} == alone


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ENGINES)
def test_planted_faults_are_found_where_they_are(name: str, seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    model, checkpoint = model_of(name, tmp_path / "model.safetensors", seed)
    engine, shapes = ENGINES[name]
    memory = loaded(name, model)
    device = engine.devices[random.integers(len(engine.devices))]
    parameter = random.choice([one for one in memory[device] if memory[device][one].size])
    array = memory[device][parameter]
    before = array.copy()
    flat = array.reshape(-1)
    kind = ("bit", "rows", "stale", "zero")[random.integers(4)]
    if kind == "bit":
        flat[random.integers(len(flat))] ^= np.int32(1 << random.integers(31))
    elif kind == "rows" and len(array) > 1:
        one, other = random.choice(len(array), 2, replace=False)
        array[[one, other]] = array[[other, one]]
    elif kind == "stale":
        start = random.integers(len(flat))
        flat[start:] = random.integers(1, 2**31, len(flat) - start)
    else:
        flat[: len(flat) // 2] = 0
    with checkpoint:
        digests = tensor_digests(checkpoint)
        found = reports(name, memory)
        faults = check_memory(found, digests, checkpoint)
    changed = (before != array).any()
    assert bool(faults) == changed
    assert {(fault.device, fault.parameter) for fault in faults} == ({(device, parameter)} if changed else set())
    wrong = check_sums(engine, shapes, sum(report.sums for report in found), digests)  # type: ignore[arg-type]
    assert set(wrong) == {fault.tensor for fault in faults if fault.tensor and "first place" not in fault.why}


def test_replicas_that_differ_without_the_checkpoint() -> None:
    mesh = DeviceMesh((2, 2), ("data", "model"))
    layouts, shapes = {"w": TensorLayout(("model",), mesh)}, {"w": (4,)}
    whole = np.arange(4, dtype=np.float32)
    held = {
        label: whole[part].copy() for label, part in zip(mesh.devices.flat, [slice(2), slice(2, 4)] * 2, strict=True)
    }
    held["cpu:2"][1] = 9
    found = [memory_digests(layouts, label, shapes, {"w": array}) for label, array in held.items()]
    # One of each box adds up to the whole: the other is wrong.
    assert [fault.device for fault in check_memory(found, {"w": sw.digest(whole)})] == ["cpu:2"]
    # Of another model, none does: both are named.
    assert [fault.device for fault in check_memory(found, {"w": sw.digest(whole + 1)})] == ["cpu:0", "cpu:2"]
    assert [f.why for f in check_memory(found, {"w": sw.digest(whole.astype(np.float64))})] == [
        "devices have it as float32[4], the checkpoint as float64[4]"
    ]


def test_padding_and_names() -> None:
    engine, shapes = ENGINES["fused, keys repeated"]
    memory = loaded("fused, keys repeated", np.ones(10**5, np.int32))
    memory["cpu:3"]["lm_head.weight"][-1, 0] = 5
    (fault,) = [fault for report in reports("fused, keys repeated", memory) for fault in report.faults]
    assert fault == ("", "cpu:3", "lm_head.weight", "1 element of padding is not zero")
    memory["cpu:3"]["lm_head.weight"][-1, 0] = 0
    floats = {name: array.astype(np.float32) for name, array in memory["cpu:3"].items()}
    assert memory_digests(engine, "cpu:3", shapes, floats).faults == ()
    floats["lm_head.weight"][-1, 0] = -0.0  # Only the bit of the sign.
    assert [fault[1:] for fault in memory_digests(engine, "cpu:3", shapes, floats).faults] == [fault[1:]]
    with refused(LayoutError, "lacks the parameter"):
        memory_digests(engine, "cpu:0", shapes, {})
    with refused(LayoutError, "sums has shape (1, 4)"):
        check_sums(engine, shapes, np.zeros((1, 4), np.int64), {})
    assert [fault.why for fault in check_memory([], {"w": sw.digest(np.ones(2))})] == ["no device holds it"]


def test_torch_memory() -> None:
    torch = pytest.importorskip("torch")
    engine, shapes = ENGINES["experts repeated"]
    model = np.random.default_rng(0).integers(1, 2**31, 10**6).astype(np.int32)
    memory = loaded("experts repeated", model)
    for device, parameters in memory.items():
        tensors = {name: torch.from_numpy(array) for name, array in parameters.items()}
        assert memory_digests(engine, device, shapes, tensors) == memory_digests(engine, device, shapes, parameters)


def test_padding_of_any_dtype_of_torch() -> None:
    torch = pytest.importorskip("torch")
    rules = {"w": TensorLayout((sw.packed.padded_vocab(3, "x", 4),), DeviceMesh((1,), ("x",)))}
    for dtype in (
        torch.float8_e8m0fnu,
        torch.float8_e4m3fn,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.bool,
    ):
        size = torch.empty(0, dtype=dtype).element_size()
        raw = torch.ones(4 * size, dtype=torch.uint8)
        raw[3 * size :] = 0
        memory = {"w": raw.view(dtype)}
        assert memory_digests(rules, "cpu:0", {"w": (3,)}, memory).faults == (), dtype
        raw[-1] = 1 if dtype == torch.bool else 128
        (fault,) = memory_digests(rules, "cpu:0", {"w": (3,)}, memory).faults
        assert fault.why == "1 element of padding is not zero"


def test_manifests_prove_memory_and_cut_files(tmp_path: Path) -> None:
    """By layouts and by listed boxes, on two ranks that hold a tensor in common; a planted fault is found."""
    shapes = {"q": (8, 3), "k": (4, 3), "norm": (3,)}
    rules = {"q|k": ("tp", None), "norm": (None,)}
    described = {name: (shape, "int32") for name, shape in shapes.items()}

    def loaded_by(tensors: Any, rank: int) -> dict[str, Any]:
        parts = [np.split(tensors[name], 2)[rank] for name in ("q", "k")]
        return {"qk": np.concatenate(parts), "norm": tensors["norm"]}

    ranks = [sw.record(described, partial(loaded_by, rank=at), f"cpu:{at}") for at in range(2)]
    deployment = Deployment(2, DeviceMesh((2,), ("tp",)), rules)
    whole = {name: np.random.default_rng(4).integers(1, 99, shape).astype(np.int32) for name, shape in shapes.items()}
    sw.save_checkpoint(tmp_path / "whole", whole, sync=False)
    with sw.open_checkpoint(tmp_path / "whole") as checkpoint:
        digests = tensor_digests(checkpoint)
    by_layouts, by_boxes = deployment.manifest(described), join_manifests(one.manifest for one in ranks)
    for manifest in (by_layouts, by_boxes):
        memory: Memory = {}
        for at in range(2):
            held = {name: np.split(array, 2)[at] if name != "norm" else array for name, array in whole.items()}
            label = f"cpu:{at}"
            memory[label] = {
                name: array.copy().reshape(manifest[name].holder_shape(label)) for name, array in held.items()
            }
        found = [memory_digests(manifest, device, shapes, held) for device, held in memory.items()]
        assert check_memory(found, digests) == []
        assert check_sums(manifest, shapes, sum(one.sums for one in found), digests) == []  # type: ignore[arg-type]
        memory["cpu:1"]["k"].reshape(-1)[2] += 1
        found[1] = memory_digests(manifest, "cpu:1", shapes, memory["cpu:1"])
        assert [fault.tensor for fault in check_memory(found, digests)] == ["k"]
    sw.reshard_checkpoint(tmp_path / "whole", tmp_path / "ranks", by_layouts, to="ranks", sync=False)
    sw.reshard_checkpoint(tmp_path / "ranks", tmp_path / "again", source_layouts=by_layouts, sync=False)
    with sw.open_checkpoint(tmp_path / "again") as checkpoint:
        assert {name: checkpoint.read(name).tolist() for name in checkpoint} == {
            n: a.tolist() for n, a in whole.items()
        }
    with pytest.raises(LayoutError, match="tensor 'k': its layout is only a list of boxes"):
        sw.reshard_checkpoint(tmp_path / "whole", tmp_path / "no", by_boxes, sync=False)
