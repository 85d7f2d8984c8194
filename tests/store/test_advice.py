"""What errors about checkpoints advise, followed: each is raised, and what it says gets through."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
from safetensors.numpy import save_file

import shardwise as sw
from shardwise import deploy
from shardwise.store import device_reads, manifest_of
from tests.checks import same_tensors

from .orbax_files import item, zarr2
from .torch_files import Call, tensor
from .torch_files import save as saved

MESH = sw.DeviceMesh((2,), ("tp",))
ARRAYS: Any = {"w": np.arange(24, dtype="f4").reshape(4, 6), "b": np.full(6, 1e30, "f4")}
#: In an index each is 12 characters for a letter of four bytes, in headers these.
LONG_NAMES: Any = {f"{number:04}{'𝄞' * 1023}": np.ones(1, "f4") for number in range(8140)}
DATA = Path(__file__).parents[1] / "data" / "checkpoints"


class Advice(NamedTuple):
    """What an error advises, what raises it, and what does as it says; a.safetensors in both folders has `ARRAYS`."""

    words: str
    refused: Callable[[Path], Any]
    followed: Callable[[Path], Any]


def layouts(mesh: sw.DeviceMesh = MESH, axes: tuple[str | None, ...] = ("tp", None)) -> sw.LayoutMap:
    made = sw.LayoutMap(mesh, default="replicated")
    made["w"] = axes
    return made


def reshard(path: Path, made: str = "made.safetensors", *args: Any, **how: Any) -> Any:
    return sw.reshard_checkpoint(path / how.pop("source", "a.safetensors"), path / made, *args, sync=False, **how)


def save(path: Path, tensors: Any, name: str = "saved.safetensors", **how: Any) -> Any:
    return sw.save_checkpoint(path / name, tensors, sync=False, **how)


def long_names_as_dcp(path: Path) -> None:
    save(path, LONG_NAMES, "made", to="dcp")
    same_tensors(path / "made", LONG_NAMES)


def summed(path: Path, reduce: bool) -> None:
    layout = sw.TensorLayout((None, None), MESH, unreduced=["tp"])
    array = sw.ShardedArray(layout.partition((4, 6)), [ARRAYS["w"]] * 2)
    save(path, {"w": sw.array.all_reduce(array) if reduce else array})
    same_tensors(path / "saved.safetensors", {"w": 2 * ARRAYS["w"]})


def in_parts(path: Path, end: Callable[[Any, Path], None] | None = None) -> None:
    """Run a part of a plan; then, after `end`, another run to the same name."""
    plan = sw.plan_checkpoint(path / "a.safetensors", path / "made", layouts(), to="dcp", task_bytes=1 << 16)
    plan.run(part=(1, 2))
    if end is not None:
        end(plan, path)
    sw.reshard_checkpoint(path / "a.safetensors", path / "made", to="hf", sync=False)


def committed(plan: Any, path: Path) -> None:
    plan.run(part=(2, 2))
    plan.commit()
    shutil.rmtree(path / "made")


def removed(plan: Any, path: Path) -> None:
    """Remove the folder that the error names."""
    with pytest.raises(FileExistsError) as caught:
        sw.reshard_checkpoint(path / "a.safetensors", path / "made", to="hf", sync=False)
    shutil.rmtree(caught.value.filename)


def strange(path: Path, name: str, move: bool) -> None:
    """Write where something lies that no run of shardwise has made."""
    (path / ".made.safetensors.partial").mkdir()
    (path / ".made.safetensors.partial" / "mine").write_text("mine")
    if move:
        (path / ".made.safetensors.partial").rename(path / "mine")
    reshard(path, name)


def two_of(path: Path, name: str = "two") -> None:
    (path / "two").mkdir()
    for number in (1, 2):
        save(path / "two", {f"w{number}": ARRAYS["w"]}, f"file{number}.safetensors")
    sw.open_checkpoint(path / name).close()


def two_ranks(path: Path) -> Path:
    """Halves of one tensor, in files whose names end with a number."""
    (path / "ranks").mkdir(exist_ok=True)
    for rank in range(2):
        save_file({"w": ARRAYS["w"][2 * rank : 2 * rank + 2]}, path / "ranks" / f"rank{rank}.safetensors")
    return path / "ranks"


def ranks_together(path: Path) -> None:
    sw.reshard_checkpoint(two_ranks(path), path / "m.safetensors", source_layouts=layouts(), sync=False)
    same_tensors(path / "m.safetensors", {"w": ARRAYS["w"]})


def two_sets(path: Path, apart: bool) -> None:
    """Files of two checkpoints in a folder, or in two, as others write them: not all names are in an index."""
    for begin in ("a", "b"):
        folder = path / (begin if apart else "sets")
        folder.mkdir(exist_ok=True)
        for number, name in enumerate(ARRAYS, 1):
            save_file({name: ARRAYS[name]}, folder / f"{begin}-{number:05}-of-00002.safetensors")
    for begin in ("a", "b"):
        same_tensors(path / (begin if apart else "sets"), ARRAYS)


def sparse(path: Path) -> Path:
    value = Call("torch._utils", "_rebuild_sparse_tensor", tensor(ARRAYS["w"], "0"))
    (path / "a.pt").write_bytes(saved({"w": tensor(ARRAYS["w"], "0"), "sparse": value}))
    return path / "a.pt"


def packed_h5(path: Path) -> Path:
    with h5py.File(path / "c.weights.h5", "w") as file:
        file.create_dataset("w", data=ARRAYS["w"], chunks=(2, 6), compression="gzip")
    return path / "c.weights.h5"


def with_open(path: Path, what: Callable[[Any], Any]) -> None:
    with sw.open_checkpoint(path) as checkpoint:
        found = what(checkpoint)
        assert not isinstance(found, np.ndarray) or found.tolist() == ARRAYS["w"].tolist()


def megatron(path: Path, earlier: bool) -> None:
    root = path / "megatron"
    shutil.copytree(DATA / "megatron", root)
    shutil.copytree(root / "iter_0000100", root / "iter_0000200")
    (root / "iter_0000200" / "metadata.json").unlink()
    (root / "latest_checkpointed_iteration.txt").write_text("100" if earlier else "200")
    sw.open_checkpoint(root).close()
    sw.open_checkpoint(root / "iter_0000100").close()


def orbax(path: Path, marked: bool) -> None:
    folder = item(path / "orbax")
    zarr2(folder, "w", ARRAYS["w"], (4, 6))
    (folder / "commit_success.txt").unlink()
    if marked:
        (folder / "commit_success.txt").write_bytes(b"")
    with_open(folder, lambda checkpoint: checkpoint.read("w"))


def on_processes(path: Path, kind: Any) -> None:
    with kind(1) as executor:
        source = path / "a.safetensors"
        sw.reshard_checkpoint(source, "memory://advice", to="hf", executor=executor, sync=False)


def quantized(path: Path, *without: str) -> None:
    """Give a configuration that speaks of a quantization which no tensor has."""
    config: dict[str, Any] = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    reshard(path, "made", to="hf", strict=True, config={k: v for k, v in config.items() if k not in without})


TWO_MESHES = {
    "w": sw.TensorLayout(("tp", None), MESH),
    "b": sw.TensorLayout(("x",), sw.DeviceMesh((2,), ("x",), ["b", "a"])),
}
DEPLOYED = deploy.Deployment(
    2,
    {"m": MESH, "n": sw.DeviceMesh((2,), ("x",), ["cpu:1", "cpu:0"])},
    {"w": deploy.DeploymentRule(("tp", None), mesh="m"), "b": deploy.DeploymentRule(("x",), mesh="n")},
)


ADVICE = {
    "names": Advice(
        "drop= can leave 'sparse' out",
        lambda path: sw.reshard_checkpoint(sparse(path), path / "made", to="hf", sync=False),
        lambda path: sw.reshard_checkpoint(sparse(path), path / "made", to="hf", drop="^sparse$", sync=False),
    ),
    "overflow": Advice(
        "overflow='saturate' takes the largest value instead, overflow='round' rounds as IEEE 754 says",
        lambda path: reshard(path, dtype="float16"),
        lambda path: [reshard(path, how, dtype="float16", overflow=how) for how in ("saturate", "round")],
    ),
    "partial sums": Advice("add them first", lambda path: summed(path, False), lambda path: summed(path, True)),
    "nested": Advice(
        "tensors['a'] is a dict; it must be an array: join the names of what is nested, as in {'a.b.w': …}",
        lambda path: save(path, {"a": {"b": ARRAYS, "c": ARRAYS}}),
        lambda path: save(path, {"a.b.w": ARRAYS["w"], "a.b.b": ARRAYS["b"]}),
    ),
    "nested and empty": Advice(
        "tensors['a'] is a dict; it must be an array: leave it out",
        lambda path: save(path, {"a": {}, **ARRAYS}),
        lambda path: save(path, ARRAYS),
    ),
    "an index that no reader takes": Advice(
        "for 8140 tensors is over 95.4 MiB, the limit for reading it; to='dcp' has no such limit",
        lambda path: save(path, LONG_NAMES, "made", to="hf", max_file_bytes=4096),
        long_names_as_dcp,
    ),
    "little memory": Advice(
        "at least 16384 bytes are needed",
        lambda path: reshard(path, memory=16383),
        lambda path: reshard(path, memory=16384),
    ),
    "ranks without a mesh": Advice(
        "files for ranks need layouts with a mesh",
        lambda path: reshard(path, "made", to="ranks"),
        lambda path: reshard(path, "made", layouts(), to="ranks"),
    ),
    "ranks of two meshes": Advice(
        "nothing says which rank a device is; a Deployment does",
        lambda path: reshard(path, "made", TWO_MESHES, to="ranks"),
        lambda path: reshard(path, "made", DEPLOYED, to="ranks"),
    ),
    "axes of engines": Advice(
        "give one axis, or pp and another",
        lambda path: reshard(path, "made", layouts(sw.DeviceMesh((2, 2), ("dp", "tp"))), to="vllm"),
        lambda path: reshard(path, "made", layouts(), to="vllm"),
    ),
    "one rank": Advice(
        "has no files for ranks; use 'ranks'",
        lambda path: reshard(path, "made", layouts(), to="hf", rank=1),
        lambda path: reshard(path, "made", layouts(), to="ranks", rank=1),
    ),
    "cut in a whole form": Advice(
        "'sharded', 'ranks' and 'dcp' hold them in pieces",
        lambda path: reshard(path, "made", layouts(), to="hf", strict=True),
        lambda path: [reshard(path, to, layouts(), to=to, strict=True) for to in ("sharded", "ranks", "dcp")],
    ),
    "configuration of quantized weights": Advice(
        "remove its quantization_config", quantized, lambda path: quantized(path, "quantization_config")
    ),
    "name taken": Advice(
        "a checkpoint is written to a new name",
        lambda path: [reshard(path), reshard(path)],
        lambda path: [reshard(path), reshard(path, "new.safetensors")],
    ),
    "what no run has made, moved": Advice(
        "that no run of shardwise has made; nothing is written through it or removed: move it, or use another name",
        lambda path: strange(path, "made.safetensors", move=False),
        lambda path: strange(path, "made.safetensors", move=True),
    ),
    "what no run has made, left": Advice(
        "move it, or use another name",
        lambda path: strange(path, "made.safetensors", move=False),
        lambda path: strange(path, "new.safetensors", move=False),
    ),
    "parts of a plan, committed": Advice(
        "commit the plan, or remove this folder", in_parts, lambda path: in_parts(path, committed)
    ),
    "parts of a plan, removed": Advice(
        "commit the plan, or remove this folder", in_parts, lambda path: in_parts(path, removed)
    ),
    "converted by tasks": Advice(
        "tasks copy bytes: reshard_checkpoint converts it first",
        lambda path: sw.plan_checkpoint(path / "a.safetensors", path / "made", to="hf", dtype="float64").save(
            path / "p"
        ),
        lambda path: reshard(path, "made", to="hf", dtype="float64"),
    ),
    "compressed by tasks": Advice(
        "reshard_checkpoint puts it together first",
        lambda path: sw.plan_checkpoint(packed_h5(path), path / "made", to="hf").save(path / "p"),
        lambda path: sw.reshard_checkpoint(packed_h5(path), path / "made", to="hf", sync=False),
    ),
    "files, and nothing says which belong together": Advice(
        "nothing says what belongs together; open one of them",
        two_of,
        lambda path: two_of(path, "two/file1.safetensors"),
    ),
    "a file for each rank, of which nothing says so": Advice(
        "if they are what the ranks of a model hold, nothing in them says how tensors are cut, but rules can: reshard "
        "takes them as the ranks of a mesh with source_layouts, on the command line --source-rules FILE --source-mesh",
        lambda path: sw.open_checkpoint(two_ranks(path)),
        ranks_together,
    ),
    "files of two checkpoints": Advice(
        "put each in a folder", lambda path: two_sets(path, False), lambda path: two_sets(path, True)
    ),
    "compressed, without a copy": Advice(
        "so there is no array of it without a copy; read it",
        lambda path: with_open(packed_h5(path), lambda checkpoint: checkpoint["w"].array()),
        lambda path: with_open(packed_h5(path), lambda checkpoint: checkpoint["w"].read()),
    ),
    "compressed, where it lies": Advice(
        "is compressed; decode() reads it",
        lambda path: with_open(packed_h5(path), lambda checkpoint: checkpoint["w"].pieces[0].extent()),
        lambda path: with_open(packed_h5(path), lambda checkpoint: checkpoint["w"].pieces[0].decode() is None),
    ),
    "addressable, decoded": Advice(
        "is addressable; extent() says where",
        lambda path: with_open(path / "a.safetensors", lambda checkpoint: checkpoint["w"].pieces[0].decode()),
        lambda path: with_open(path / "a.safetensors", lambda checkpoint: checkpoint["w"].pieces[0].extent()),
    ),
    "compressed, by ranges": Advice(
        "no range of a file has its bytes; read() gives them",
        lambda path: with_open(packed_h5(path), lambda checkpoint: device_reads(checkpoint, layouts(), "cpu:0")),
        lambda path: with_open(packed_h5(path), lambda checkpoint: checkpoint["w"].read()),
    ),
    "path in the place of a checkpoint": Advice(
        "must be an open checkpoint (see open_checkpoint)",
        lambda path: manifest_of(path),  # type: ignore[arg-type]
        lambda path: with_open(path / "a.safetensors", manifest_of),
    ),
    "last iteration": Advice(
        "take an earlier iteration", lambda path: megatron(path, False), lambda path: megatron(path, True)
    ),
    "step of an older Orbax": Advice(
        "put an empty file of that name there", lambda path: orbax(path, False), lambda path: orbax(path, True)
    ),
    "processes": Advice(
        "give a ThreadPoolExecutor",
        lambda path: on_processes(path, ProcessPoolExecutor),
        lambda path: on_processes(path, ThreadPoolExecutor),
    ),
}


@pytest.mark.filterwarnings("ignore:.*beyond the range:shardwise.ShardwiseWarning")
@pytest.mark.parametrize("case", ADVICE)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_is_advised_gets_through(case: str, tmp_path: Path) -> None:
    advice = ADVICE[case]
    for name in ("refused", "followed"):
        (tmp_path / name).mkdir()
        sw.save_checkpoint(tmp_path / name / "a.safetensors", ARRAYS, sync=False)
    with pytest.raises((sw.ShardwiseError, OSError, TypeError, ValueError)) as caught:
        advice.refused(tmp_path / "refused")
    assert advice.words in str(caught.value)
    advice.followed(tmp_path / "followed")
