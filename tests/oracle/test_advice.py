"""What refusals advise about files of frameworks, followed with the framework: each way leads to the tensors."""

from __future__ import annotations

import importlib
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.store.tensors.stored import UnsupportedError
from tests.checks import refused

pytestmark = pytest.mark.filterwarnings("ignore")

ARRAYS: Mapping[str, Any] = {"w": np.arange(6, dtype="f4").reshape(2, 3), "b": np.ones(3, "f4")}


def opened(path: Path) -> dict[str, Any]:
    with sw.open_checkpoint(path) as checkpoint:
        assert not checkpoint.unreadable
        return {name: checkpoint.read(name) for name in checkpoint}


def same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert {name: each.tolist() for name, each in found.items()} == {n: each.tolist() for n, each in expected.items()}


def evaluated(path: Path, begin: str, names: Mapping[str, Any]) -> None:
    """Run the call of `save_checkpoint` that the refusal of a path advises, as it is written there."""
    with pytest.raises(sw.ParseError) as caught:
        sw.open_checkpoint(path)
    said = str(caught.value)
    call = said[said.index(f"save_checkpoint({begin}") :].partition(" makes a checkpoint of it")[0]
    call = call.partition(" makes a checkpoint")[0]
    eval(call, {"save_checkpoint": sw.save_checkpoint, **names})


# TensorFlow, Flax, EasyLM, PaddlePaddle.


@pytest.mark.parametrize("kind", ["checkpoint", "saved model"])
def test_checkpoints_of_tensorflow(tmp_path: Path, kind: str) -> None:
    tf = pytest.importorskip("tensorflow")
    module = tf.Module()
    module.w, module.b = (tf.Variable(array) for array in ARRAYS.values())
    if kind == "checkpoint":
        prefix = Path(tf.train.Checkpoint(w=module.w, b=module.b).write(str(tmp_path / "m")))
        paths = [tmp_path, prefix, tmp_path / "m.index", tmp_path / "m.data-00000-of-00001"]
    else:
        tf.saved_model.save(module, str(tmp_path / "model"))
        prefix = tmp_path / "model" / "variables" / "variables"
        paths = [tmp_path / "model", tmp_path / "model" / "saved_model.pb", prefix.parent, prefix]
    for number, path in enumerate(paths):
        with refused(UnsupportedError, f"{path}: is a checkpoint of TensorFlow; after reader ="):
            sw.open_checkpoint(path)
        made = tmp_path / f"{number}.safetensors"
        evaluated(path, "PATH", {"PATH": made, "reader": tf.train.load_checkpoint(str(prefix))})
        found = opened(made)
        same({name: found[f"{name}/.ATTRIBUTES/VARIABLE_VALUE"] for name in ARRAYS}, ARRAYS)


def test_files_of_flax_and_easylm(tmp_path: Path) -> None:
    flax = pytest.importorskip("flax")
    msgpack = pytest.importorskip("msgpack")
    nested = {"params": {"w": ARRAYS["w"], "layers": {"0": {"b": ARRAYS["b"]}}}}
    names = {"params.w": ARRAYS["w"], "params.layers.0.b": ARRAYS["b"]}
    (tmp_path / "a.msgpack").write_bytes(flax.serialization.msgpack_serialize(nested))
    # As `StreamingCheckpointer.save_train_state_to_file` of EasyLM writes.
    packer = msgpack.Packer()
    stream = [packer.pack((tuple(n.split(".")), flax.serialization.to_bytes(a))) for n, a in names.items()]
    (tmp_path / "streaming_params").write_bytes(b"".join(stream))
    for file in ("a.msgpack", "streaming_params"):
        made = tmp_path / f"{file}.safetensors"
        known = {"PATH": made, "FILE": tmp_path / file, "Path": Path, "flax": flax, "msgpack": msgpack, "open": open}
        evaluated(tmp_path / file, "PATH", known)
        same(opened(made), names)


def test_files_of_paddle(tmp_path: Path) -> None:
    paddle = pytest.importorskip("paddle")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    file = tmp_path / "model_state.pdparams"
    paddle.save({name: paddle.to_tensor(array) for name, array in ARRAYS.items()}, str(file))
    evaluated(file, "PATH", {"PATH": tmp_path / "a.safetensors", "FILE": str(file), "paddle": paddle})
    same(opened(tmp_path / "a.safetensors"), ARRAYS)
    paddle.save({"h": paddle.ones([2], dtype="bfloat16")}, str(file))
    array = paddle.load(str(file), return_numpy=True)["h"]
    assert array.dtype == np.uint16
    assert array.view(ml_dtypes.bfloat16).tolist() == [1.0, 1.0]


# GGUF.


def test_a_gguf_file_is_saved_by_transformers(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "GgufConfig"):
        pytest.skip("this transformers has no GgufConfig")
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    for add, value in {
        **{"context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 64},
        **{"head_count": 2, "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_dimension_count": 16},
        **{"vocab_size": 32, "file_type": 0},
    }.items():
        getattr(writer, f"add_{add}")(value)
    random = np.random.default_rng(0)
    rows = {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    rows |= dict.fromkeys(["attn_q", "attn_k", "attn_v", "attn_output"], (32, 32))
    rows = {f"blk.0.{name}.weight": shape for name, shape in rows.items()}
    for name, shape in (rows | {"token_embd.weight": (32, 32), "output.weight": (32, 32)}).items():
        blocks = gguf.quants.quantize(random.random(shape, "f4"), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        writer.add_tensor(name, random.random(32, "f4"))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    way = "from_pretrained(FOLDER, gguf_file=NAME, quantization_config=GgufConfig(dequantize=True))"
    with pytest.raises(sw.ParseError) as caught:
        sw.open_checkpoint(tmp_path / "m.gguf")
    assert way in str(caught.value)
    known = {"FOLDER": str(tmp_path), "NAME": "m.gguf", "GgufConfig": transformers.GgufConfig}
    model = eval(way, {"from_pretrained": transformers.AutoModelForCausalLM.from_pretrained, **known})
    model.save_pretrained(tmp_path / "made")
    stored = {
        one.name: gguf.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(tmp_path / "m.gguf").tensors
    }
    found = opened(tmp_path / "made")
    assert found["model.layers.0.mlp.up_proj.weight"].tolist() == stored["blk.0.ffn_up.weight"].tolist()


# Formats that are read, not written.


def advised_of(form: str, tmp_path: Path) -> str:
    sw.save_checkpoint(tmp_path / "a.safetensors", ARRAYS)
    with pytest.raises(sw.LayoutError) as caught:
        sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / "no", to=form)  # type: ignore[arg-type]
    return str(caught.value)


def test_orbax_is_written_by_jax(tmp_path: Path) -> None:
    orbax = pytest.importorskip("orbax.checkpoint")
    numpy = pytest.importorskip("jax.numpy")
    pytest.importorskip("zstandard")
    load_file = pytest.importorskip("safetensors.flax").load_file
    said = advised_of("orbax", tmp_path)
    assert said.endswith("write safetensors or hf, load that into JAX, and save it with Orbax")
    sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors", to="safetensors")
    loaded = {name: numpy.asarray(value) for name, value in load_file(tmp_path / "b.safetensors").items()}
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "made", loaded)
    same(opened(tmp_path / "made"), ARRAYS)


def test_keras_is_written_by_keras(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    pytest.importorskip("h5py")
    said = advised_of("keras", tmp_path)
    assert said.endswith("write safetensors or hf, set a model's weights from it, and save them with Keras")
    sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors", to="safetensors")
    read = opened(tmp_path / "b.safetensors")
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(3)])
    model.set_weights([read["w"], read["b"]])
    model.save_weights(tmp_path / "made.weights.h5")
    found = {name.rpartition("/")[2]: value for name, value in opened(tmp_path / "made.weights.h5").items()}
    same(found, {"0": ARRAYS["w"], "1": ARRAYS["b"]})


# PyTorch.


def test_what_is_to_be_saved_in_the_place_of_what_is_not_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    linear = torch.nn.Linear(2, 3)
    kinds: dict[str, tuple[Any, Any, Any]] = {
        "save tensor.to_dense()": (torch.eye(3).to_sparse(), lambda one: one.to_dense(), np.eye(3)),
        "save its tensor.resolve_conj()": (
            torch.tensor([1 + 2j]).conj(), lambda one: one.resolve_conj(), np.array([1 - 2j])
        ),
        "save its tensor.resolve_neg()": (torch._neg_view(torch.ones(2)), lambda one: one.resolve_neg(), -np.ones(2)),
        "save tensor.dequantize(), or its int_repr() and scales": (
            torch.quantize_per_tensor(torch.ones(3), 1, 0, torch.qint8), lambda one: one.dequantize(), np.ones(3)
        ),
        "save its state_dict()": (linear, lambda one: one.state_dict()["bias"], linear.bias.detach().numpy()),
    }  # fmt: skip
    for advice, (value, way, expected) in kinds.items():
        torch.save({"v": value}, tmp_path / "a.pt")
        with sw.open_checkpoint(tmp_path / "a.pt") as checkpoint:
            assert checkpoint.unreadable["v"].endswith(advice)
        torch.save({"v": way(value)}, tmp_path / "b.pt")
        assert opened(tmp_path / "b.pt")["v"].tolist() == expected.tolist()
    torch.save({"v": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, tmp_path / "a.pt")
    with sw.open_checkpoint(tmp_path / "a.pt") as checkpoint:
        assert checkpoint.unreadable["v"].endswith("save tensor.unbind()")
    torch.save({"v": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).unbind()}, tmp_path / "b.pt")
    assert {name: len(one) for name, one in opened(tmp_path / "b.pt").items()} == {"v.0": 2, "v.1": 3}


def test_programs_and_old_files_of_pytorch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    linear = torch.nn.Linear(2, 3)
    expected = {name: value.detach().numpy() for name, value in linear.state_dict().items()}
    torch.jit.script(linear).save(tmp_path / "script.pt")
    torch.export.save(torch.export.export(linear, (torch.ones(1, 2),)), tmp_path / "export.pt2")
    torch.save(linear.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save(linear, tmp_path / "module.pt")
    ways: dict[str, tuple[str, Callable[[Path], Any]]] = {
        "script.pt": ("save its state_dict with torch.save", lambda file: torch.jit.load(file).state_dict()),
        "export.pt2": ("save its state_dict with torch.save", lambda file: torch.export.load(file).state_dict),
        "old.pt": ("load and save it once with torch.save", torch.load),
        "module.pt": ("save its state_dict()", lambda file: torch.load(file, weights_only=False).state_dict()),
    }
    for name, (advice, load) in ways.items():
        with pytest.raises(sw.ParseError) as caught:
            sw.open_checkpoint(tmp_path / name)
        assert str(caught.value).endswith(advice)
        torch.save(load(tmp_path / name), tmp_path / f"made {name}.pt")
        same(opened(tmp_path / f"made {name}.pt"), expected)


def _rank(rank: int, port: int, top: str) -> None:
    """One of two ranks that save what is refused, and what the refusals advise."""
    torch = importlib.import_module("torch")
    dcp = importlib.import_module("torch.distributed.checkpoint")
    fsdp = importlib.import_module("torch.distributed.fsdp")
    make_mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for mesh in (None, make_mesh("cpu", (2,))):
        linear = torch.nn.Linear(3, 2)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(ARRAYS["w"]))
            linear.bias.fill_(1)
        model = fsdp.FullyShardedDataParallel(linear, device_id=torch.device("cpu"), device_mesh=mesh)
        for kind in ("LOCAL", "SHARDED", "FULL") if mesh is None else ("SHARDED",):
            with model.state_dict_type(model, fsdp.StateDictType[f"{kind}_STATE_DICT"]):
                state = model.state_dict()
            folder = Path(top, kind if mesh is None else f"{kind} on a mesh")
            folder.mkdir(exist_ok=True)
            torch.save(state, folder / f"model_world_size_2_rank_{rank}.pt")
            if kind == "SHARDED" and mesh is None:
                dcp.save(state, checkpoint_id=f"{top}/dcp")
    tensors = importlib.import_module("torch.distributed.tensor")
    summed = tensors.DTensor.from_local(torch.ones(2), make_mesh("cpu", (2,)), [tensors.Partial()])
    for name, value in ("sums", summed), ("redistributed", summed.redistribute(placements=[tensors.Replicate()])):
        Path(top, name).mkdir(exist_ok=True)
        torch.save({"v": value}, f"{top}/{name}/model_world_size_2_rank_{rank}.pt")
    state = {"weight": torch.from_numpy(ARRAYS["w"]), "bias": torch.ones(2)}
    dcp.save(state, checkpoint_id=f"{top}/apart", use_collectives=False)
    state = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(state, checkpoint_id=f"{top}/apart")
    dcp.save(state, checkpoint_id=f"{top}/together")
    torch.distributed.destroy_process_group()


def test_what_ranks_save_otherwise(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch.distributed.fsdp")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, args=(port, str(tmp_path)), nprocs=2)
    advice = (
        "save it once with FULL_STATE_DICT, with SHARDED_STATE_DICT and a device mesh, or with SHARDED_STATE_DICT by "
        "torch.distributed.checkpoint"
    )
    for name in ("LOCAL", "SHARDED"):
        with refused(UnsupportedError, advice):
            sw.open_checkpoint(tmp_path / name)
        with refused(
            sw.ParseError, "its name says that it is the part of one rank; open the folder that has all parts"
        ):
            sw.open_checkpoint(tmp_path / name / "model_world_size_2_rank_1.pt")
        alone = (tmp_path / name / "model_world_size_2_rank_1.pt").rename(tmp_path / f"{name}.pt")
        with refused(UnsupportedError, advice):
            sw.open_checkpoint(alone)
    with refused(UnsupportedError, "load it with torch.distributed.checkpoint on the same number of ranks"):
        sw.open_checkpoint(tmp_path / "apart")
    with refused(sw.ParseError, "have no boxes; redistribute it before it is saved"):
        sw.open_checkpoint(tmp_path / "sums")
    assert opened(tmp_path / "redistributed")["v"].tolist() == [2, 2]
    shutil.copy(tmp_path / "SHARDED on a mesh" / "model_world_size_2_rank_1.pt", tmp_path / "alone.pt")
    with refused(sw.ParseError, "open the folder that has the files of all ranks, named model_world_size_W_rank_R.pt"):
        sw.open_checkpoint(tmp_path / "alone.pt")
    expected = {"weight": ARRAYS["w"], "bias": np.ones(2)}
    for name in ("FULL", "SHARDED on a mesh", "dcp", "together"):
        same(opened(tmp_path / name), expected)
