"""The commands, rules files and fragments of README.md and docs/, run; and every block of code is run by some test.

Blocks of `python`, `pycon` and `console` are the matter of `test_documents.py`, those of `python keras` of
`tests/interop/test_keras_page.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import queue
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.execute.transports import MemoryManifest, address_rows

from ..checks import extracted, same_tensors
from ..execute.test_mpi import mpirun
from ..oracle import engines
from ..store.torch_files import save, tensor
from .test_documents import PAGES, ROOT

FENCE = re.compile(r"^ *(```+|~~~+)(.*)$")
ELSEWHERE = {"python", "pycon", "console", "python keras"}

#: Commands of others than us that the tests do not type, and where the same is done.
NOT_TYPED = {
    "pip install .": "release/wheel.py builds the wheel of the checkout and installs it",
    "pip install shardwise[mpi] mpich": "installs; its extra is in the group `clusters`",
    "pip install shardwise[s3]": "installs; its extra is in the group `clusters`",
    "vllm serve SHARDED --load-format sharded_state --tensor-parallel-size 8": (
        "tests/rules/test_families.py compares with what vLLM's loaders hold; its server needs a device"
    ),
    "shardwise rules --record transformers config.json": (
        "tests/interop/test_transformers_record.py::test_rules_of_small_models_are_the_plan_of_the_large_one"
    ),
    "vllm serve HF --load-format shardwise --tensor-parallel-size 8": (
        "tests/interop/test_engine_loaders.py compares with what vLLM's loaders hold; its server needs a device"
    ),
    """vllm serve HF --load-format shardwise --model-loader-extra-config '{"checkpoint": "s3://bucket/step-900"}'""": (
        "tests/interop/test_engine_loaders.py::test_the_load_format_of_vllm"
    ),
    "mpirun -n 4 python examples/mpi_ranks.py": "tests/execute/test_mpi.py::test_the_example",
    "python -m tests.fuzz api --seconds 600 --seed 7": (
        "tests/fuzz/test_fuzz.py::test_every_fuzzer_runs_and_finds_nothing"
    ),
}
#: What has to be done before a command, besides the commands above it.
BEFORE = {
    "shardwise commit new.swplan": [f"shardwise run new.swplan --part {part}/16" for part in range(1, 17) if part != 3],
}
RULES = """
[mesh]
shape = [2, 4]
axis_names = ["data", "model"]
[rules]
embed = ["model", []]
norm = [[]]
"""


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """The line, the language and the text of each block of a page, whatever its fence."""
    found, open_at = [], None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        fence = FENCE.match(line)
        if open_at is None:
            if fence:
                open_at, mark, language, text = number, fence[1], fence[2].strip(), ""
        elif fence and fence[1].startswith(mark) and not fence[2].strip():
            found.append((open_at, language, text))
            open_at = None
        else:
            text += line
    assert open_at is None, f"{page.name}:{open_at}: the block has no end"
    return found


def of(*languages: str) -> list[Any]:
    return [
        pytest.param(page, text, id=f"{page.relative_to(ROOT).as_posix()}:{line}")
        for page in PAGES
        for line, language, text in blocks(page)
        if language in languages
    ]


def commands(text: str) -> list[list[str]]:
    """The commands of a block in words, without comments."""
    lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    found: list[list[str]] = []
    for line in filter(None, lines):
        found.append([])
        for word in line:
            if word == "&&":
                found.append([])
            else:
                found[-1].append(word)
    return found


def test_every_block_is_run_by_some_test() -> None:
    """A block of a language that no test runs is new: it needs one."""
    known = {*ELSEWHERE, "sh", "toml", *FRAGMENTS}
    strange = [
        f"{page.relative_to(ROOT)}:{line}: {language!r}"
        for page in PAGES
        for line, language, text in blocks(page)
        if (f"{page.stem}: {text.splitlines()[0]}" if language == "py" else language) not in known
    ]
    assert strange == []
    first_lines = {
        f"{page.stem}: {text.splitlines()[0]}" for page in PAGES for _, kind, text in blocks(page) if kind == "py"
    }
    assert first_lines == set(FRAGMENTS)


def test_what_is_not_typed_stands_on_a_page_and_names_what_is() -> None:
    typed = {shlex.join(command) for block in of("sh") for command in commands(block.values[1])}
    assert {shlex.join(shlex.split(command)) for command in NOT_TYPED} <= typed
    assert set(BEFORE) <= typed
    for reason in NOT_TYPED.values():
        file, _, name = reason.partition(" ")[0].partition("::")
        if file.endswith(".py"):
            assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8"), reason


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints by the names that the pages give them."""
    folder = tmp_path_factory.mktemp("pages")
    weights = {"embed": np.arange(4096, dtype="f4").reshape(64, 64), "norm": np.ones(8, "f4")}
    for name in ("SRC", "CHECKPOINT"):
        sw.save_checkpoint(folder / name, weights, to="hf", sync=False)
    gpt2 = {"h.0.attn.c_attn.weight": np.ones((8, 24), "f4"), "wte.weight": np.ones((64, 8), "f4")}
    sw.save_checkpoint(folder / "model.safetensors", gpt2, sync=False)
    sw.save_checkpoint(folder / "HF", engines.hugging_face("llama", 0), sync=False)
    llama = {"model_type": "llama", "hidden_size": 2, "intermediate_size": 24, **engines.config("llama")}
    (folder / "HF" / "config.json").write_text(json.dumps(llama), encoding="utf-8")
    (folder / "ADAPTER").mkdir()
    adapted = {f"base_model.model.model.layers.0.self_attn.v_proj.lora_{x}.weight": x for x in "AB"}
    rows, columns = sw.open_checkpoint(folder / "HF")["model.layers.0.self_attn.v_proj.weight"].shape
    factors = {name: np.zeros((2, columns) if x == "A" else (rows, 2), np.float32) for name, x in adapted.items()}
    sw.save_checkpoint(folder / "ADAPTER" / "adapter_model.safetensors", factors, sync=False)
    (folder / "config.json").write_text(json.dumps({**llama, **CONFIG}), encoding="utf-8")
    (folder / "shapes.json").write_text(json.dumps({"wte.weight": [64, 8], "ln_f.bias": [8]}), encoding="utf-8")
    (folder / "mine.toml").write_text('[rules]\n"wte" = [[], "model"]\n"ln_f" = [[]]\n', encoding="utf-8")
    # What others write.
    data = ROOT / "tests" / "data" / "checkpoints"
    for name, found in (("FSDP", "torch/fsdp2"), ("ORBAX", "orbax_keras/orbax_ocdbt_zarr3")):
        (folder / name).symlink_to(data / found)
    sw.save_checkpoint(folder / "DCP", weights, to="dcp", sync=False)
    states = ROOT / "tests" / "data" / "states"
    for name, archive, within in (
        ("ZERO", data / "zero" / "zero2_tp.tar.xz", ""),
        ("global_step_900", data / "zero" / "zero2_tp.tar.xz", ""),
        ("step-900", states / "torchtitan" / "fsdp2" / "checkpoint.tar.xz", "checkpoint/step-2"),
        ("iter_0000900", states / "megatron" / "dp_reshardable_tp" / "checkpoint.tar.xz", ""),
        ("checkpoint-900", states / "hf" / "trainer_adafactor" / "checkpoint.tar.xz", "checkpoint-2"),
    ):
        whole = extracted(archive, folder / f"{name}.files")
        (folder / name).symlink_to(whole / "checkpoint" / within)
    (folder / "rules.toml").write_text(RULES, encoding="utf-8")
    return folder


@pytest.mark.parametrize(("page", "text"), of("sh"))
def test_the_commands_of_the_page(
    page: Path, text: str, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other in a folder that has the checkpoints named; `s3://` is a store in memory."""
    for path in checkpoints.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    typed = [words for words in commands(text) if shlex.join(words) not in map(shlex.join, map(shlex.split, NOT_TYPED))]
    if any("s3://" in word for words in typed for word in words):
        pytest.importorskip("fsspec")
        put_in_memory(checkpoints / "SRC", "memory://bucket/model")
        typed = [[word.replace("s3://", "memory://") for word in words] for words in typed]
    for command in typed:
        line = shlex.join(command)
        if command[0] == "make":
            # What its targets do is what is running now; here: that there are such, which take such variables.
            done = subprocess.run(
                ["make", "-n", *command[1:]], cwd=ROOT, capture_output=True, encoding="utf-8", check=False
            )
            assert done.returncode == 0, done.stderr
            names = {word.partition("=")[0] for word in command[1:] if "=" in word}
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert all(f"\n{name} ?=" in makefile for name in names), line
            continue
        if command[:3] == ["python", "-m", "pytest"]:
            # Tests that run by themselves, now or where all slow ones do.
            assert all((ROOT / word).exists() for word in command[3:] if "/" in word), line
            continue
        if command[:2] == ["python", "-c"]:
            subprocess.run([sys.executable, *command[1:]], cwd=tmp_path, check=True)
            continue
        assert command[0] == "shardwise", f"{page.name}: {line}: who runs this?"
        for words in (*map(shlex.split, BEFORE.get(line, [])), command):
            said = io.StringIO()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
                status = main(words[1:])
            assert status == 0, f"{page.name}: {shlex.join(words)}: {said.getvalue()}"


def put_in_memory(folder: Path, url: str) -> None:
    store = sw.ObjectPath(url)
    for path in folder.iterdir():
        place = store / path.name
        place.filesystem.pipe_file(place.key, path.read_bytes())


#: Llama-3-8B's, for the numbers of the files.
CONFIG = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(("page", "text"), of("toml"))
def test_the_rules_files_of_the_page(page: Path, text: str) -> None:
    """They are read as layouts or as rewrites, and each of their tables is one."""
    mesh = None if "[mesh]" in text else sw.DeviceMesh((4,), ("tp",))
    if "[rules]" in text:
        rules = sw.LayoutMap.from_toml(io.StringIO(text), mesh, config=CONFIG)
        assert len(rules) == text.partition("[rules]\n")[2].count("\n'") + 1
        assert rules.device_mesh is not None
    else:
        ours, shipped = (
            sw.Rewrites.from_toml(file, config=CONFIG).sets[0].rewrites
            for file in (io.StringIO(text), sw.example_rules()["megatron/llama"])
        )
        assert len(ours) == text.count("[[rewrite]]")
        assert all(rewrite in shipped for rewrite in ours)


# Fragments: code that says what it takes from where the reader is. Each test sets that up and looks at what came of it.


def fragment(first_line: str) -> str:
    stem, _, start = first_line.partition(": ")
    (found,) = (
        text
        for page in PAGES
        for _, language, text in blocks(page)
        if language == "py" and page.stem == stem and text.startswith(start)
    )
    return found


def checkpoint_in_pytorch(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that we write, as PyTorch's own loader reads it."""
    torch = pytest.importorskip("torch")
    for module in ("checkpoint", "device_mesh", "tensor"):
        importlib.import_module(f"torch.distributed.{module}")
    rules = sw.LayoutMap(sw.DeviceMesh((4,), ("model",)))
    rules["embed"], rules["norm"] = ("model", None), (None,)
    weights = {"embed": np.arange(96, dtype="f4").reshape(12, 8), "norm": np.ones(8, "f4")}
    sw.save_checkpoint(tmp_path / "model.safetensors", weights, sync=False)
    sw.reshard_checkpoint(tmp_path / "model.safetensors", tmp_path / "dcp", rules, to="dcp", sync=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        names: dict[str, Any] = {"torch": torch, "mesh": mesh, "Shard": torch.distributed.tensor.Shard}
        exec(text, names | {"folder": tmp_path}, names)
        assert names["state"]["embed"].full_tensor().numpy().tobytes() == weights["embed"].tobytes()
        assert names["state"]["norm"].numpy().tobytes() == weights["norm"].tobytes()
    finally:
        torch.distributed.destroy_process_group()


def plan_among_ranks(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In four processes of MPI, each with its rows of a numbered array."""
    before = "import numpy as np\nwhole = np.arange(640_000).reshape(1000, 640)\n"
    rank = "MPI.COMM_WORLD.Get_rank()"
    # Each rank has its rows as soon as it knows which they are.
    mine = f"mine = rows.views(whole)[{rank}].copy()\nnew = "
    after = f"assert (new == columns.views(whole)[{rank}]).all()\nprint('as it should be')\n"
    script = tmp_path / "fragment.py"
    script.write_text(before + text.replace("new = ", mine) + after, encoding="utf-8")
    done = mpirun(str(script))
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("as it should be") == 4


def program_of_a_rank(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In four threads, which send through queues."""
    mesh = sw.DeviceMesh((4,), ("rank",), devices=range(4))
    rows = sw.TensorLayout(("rank", None), mesh).partition((10, 6), "balanced")
    columns = sw.TensorLayout((None, "rank"), mesh).partition((10, 6), "balanced")
    whole = np.arange(60).reshape(10, 6)
    plan = sw.plan_reshard(rows, columns)
    boxes: dict[tuple[int, int, int], queue.Queue[Any]] = {
        (a, b, tag): queue.Queue() for a in range(4) for b in range(4) for tag in range(64)
    }
    outs = [np.zeros(columns.shard_shape(rank), whole.dtype) for rank in range(4)]

    def work(rank: int) -> None:
        names = {
            "plan": plan,
            "rank": rank,
            "mine": SimpleNamespace(numpy=lambda: whole[rows.box(rank)].copy()),
            "out": SimpleNamespace(numpy=lambda: outs[rank]),
            "send": lambda peer, tag, values: boxes[rank, peer, tag].put(np.array(values)),
            "receive": lambda peer, tag, shape, dtype: boxes[peer, rank, tag].get(timeout=3600).reshape(shape),
        }
        exec(text, names)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((outs[rank] == whole[columns.box(rank)]).all() for rank in range(4))


def model_among_ranks(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In four processes of MPI, which have the rows of a numbered array and want its columns."""
    before = """
import numpy as np
import shardwise as sw
from mpi4py import MPI
mesh = sw.DeviceMesh((4,), ("rank",), devices=range(4))
rows, columns = (sw.LayoutMap(mesh, default=axes) for axes in (("rank", None), (None, "rank")))
whole = np.arange(96.0).reshape(8, 12)
plan = sw.plan_model(rows, columns, {"w": ((8, 12), "float64")})
label = MPI.COMM_WORLD.Get_rank()
before = {"w": whole[2 * label : 2 * label + 2].copy()}
after = {"w": np.zeros((8, 3))}
"""
    check = "assert (after['w'] == whole[:, 3 * label : 3 * label + 3]).all()\nprint('as it should be')\n"
    script = tmp_path / "fragment.py"
    script.write_text(before + text + check, encoding="utf-8")
    done = mpirun(str(script))
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("as it should be") == 4


def model_among_processes(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group of one process, which keeps what it has; `tests/execute/test_torch.py` has groups of several."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        rules = sw.LayoutMap(sw.DeviceMesh((1,), ("rank",)), default=("rank",))
        names: dict[str, Any] = {
            "plan": sw.plan_model(rules, rules, {"w": ((6,), "float32")}),
            "dist": torch.distributed,
            "before": {"w": torch.arange(6.0)},
            "after": {"w": torch.zeros(6)},
        }
        exec(text, names)
        assert names["after"]["w"].tolist() == [0, 1, 2, 3, 4, 5]
    finally:
        torch.distributed.destroy_process_group()


def hyperparameters_of_optax(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In PyTorch's distributed checkpoint each parameter then has what torchtitan looks up, and AdamW stays AdamW."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    w = np.arange(6, dtype="f4").reshape(2, 3)
    state = {f"opt_state.0.{kind}.{name}": w for kind in ("mu", "nu") for name in ("w", "b")}
    state |= {"params.w": w, "params.b": w, "opt_state.0.count": np.int32(4)}
    sw.save_checkpoint("optax.safetensors", state, sync=False)
    with pytest.warns(sw.ShardwiseWarning, match="does not say the hyperparameters of the optimizer"):
        sw.reshard_checkpoint("optax.safetensors", "run.pt", to="torch", sync=False)
    exec("import torch\n" + text)
    sw.reshard_checkpoint("run.pt", "step-900", to="dcp", rename={r"^model\.": ""}, sync=False)
    with sw.open_checkpoint("step-900") as checkpoint:
        said = {name: value.value() for name, value in checkpoint.objects.items()}
        for name in ("w", "b"):
            asked = {
                key: said[f"optimizer.param_groups.{name}.{key}"] for key in ("lr", "betas", "eps", "weight_decay")
            }
            assert asked == {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
            assert said[f"optimizer.param_groups.{name}.decoupled_weight_decay"] is True
            assert checkpoint.read(f"optimizer.state.{name}.exp_avg").tolist() == w.tolist()
            assert checkpoint.training.step(name) == 4


def object_store(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a store in memory; `tests/store/data/test_objects.py` asks a real server of S3."""
    pytest.importorskip("fsspec")
    weights = {"embed": np.arange(4096 * 1024, dtype="i1").reshape(1024, 4096)}
    sw.save_checkpoint(tmp_path / "SRC", weights, to="hf", sync=False)
    put_in_memory(tmp_path / "SRC", "memory://bucket/model")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    # The options are those of S3, which a store in memory does not take.
    exec(text.replace("s3://", "memory://").replace(', endpoint_url="http://127.0.0.1:9000"', ""), names)
    assert (names["rows"] == weights["embed"][:1000]).all()
    assert sw.diff_checkpoints(tmp_path / "SRC", tmp_path / "model.safetensors") == []


def files_of_ranks(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks of Meta's form, cut here."""
    ranks = 8
    monkeypatch.chdir(tmp_path)
    square, norm = np.arange(64, dtype="f4").reshape(8, 8), np.ones(8, "f4")
    cut = {"layers.0.attention.wq.weight": 0, "layers.0.attention.wo.weight": 1}
    Path("META").mkdir()
    for rank in range(ranks):
        arrays = {name: np.ascontiguousarray(np.split(square, ranks, dim)[rank]) for name, dim in cut.items()}
        arrays["norm.weight"] = norm
        held = {name: tensor(array, str(at)) for at, (name, array) in enumerate(arrays.items())}
        Path(f"META/consolidated.0{rank}.pth").write_bytes(save(held))
    exec(text, {"sw": sw, "Path": Path})
    same_tensors(Path("WHOLE"), {**dict.fromkeys(cut, square), "norm.weight": norm})


def run_in_pytorch(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and its optimizer, saved under other names, go on in PyTorch."""
    torch = pytest.importorskip("torch")
    dcp = importlib.import_module("torch.distributed.checkpoint")
    states = importlib.import_module("torch.distributed.checkpoint.state_dict")
    monkeypatch.chdir(tmp_path)

    def trained(steps: int) -> tuple[Any, Any]:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + steps)
        for _ in range(steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return model, optimizer

    (model, optimizer), (other, again) = trained(2), trained(0)
    model_state, optim_state = states.get_state_dict(model, optimizer)
    dcp.save({"module": model_state, "optimizer": optim_state}, checkpoint_id="global_step_900", no_dist=True)
    names = {name: getattr(states, name) for name in ("get_state_dict", "set_state_dict")}
    names |= {"dcp": dcp, "storage_reader": importlib.import_module("shardwise.interop.torch").storage_reader}
    exec(text, names | {"model": other, "optimizer": again})
    assert torch.equal(other.weight, model.weight)
    assert again.param_groups[0]["lr"] == 2.1
    for one, two in zip(again.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(one[kind], two[kind]) for kind in ("exp_avg", "exp_avg_sq", "step"))


def calls_of_adapters(text: str, _folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls, as the adapters take them; `tests/interop/test_engine_record.py` has the engines."""
    for name in ("vllm", "sglang", "megatron"):
        adapter = importlib.import_module(f"shardwise.interop.{name}")
        monkeypatch.setattr(adapter, "record_ranks", inspect.signature(adapter.record_ranks).bind)
    names: dict[str, Any] = {"config": {}, "shapes": {}}
    exec(text, names)
    assert names["ranks"].arguments["tp"] in (2, 4)


def transfer_by_nixl(text: str, _folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer of the guide, from one agent of this process to another."""
    nixl = pytest.importorskip("nixl._api")
    whole, half = (
        sw.TensorLayout((None, axis), sw.DeviceMesh((size,), ("tp",), labels))
        for axis, size, labels in ((None, 1, ["trainer"]), ("tp", 2, ["engine:0", "engine:1"]))
    )
    plan = sw.plan_model({"o": whole}, {"o": half}, {"o": ((4, 8), "float32")})
    before, after = np.arange(32, dtype="f4").reshape(4, 8), np.zeros((4, 4), "f4")
    told = MemoryManifest.of(plan.descriptors("trainer"), {"o": before}, {}, version="step 7")
    mine = MemoryManifest.of(part := plan.descriptors("engine:1"), {}, {"o": after}, version="step 7")
    config = nixl.nixl_agent_config(backends=["UCX"])
    trainer, agent = (nixl.nixl_agent(label, config) for label in ("trainer", "engine:1"))
    for one, array in ((trainer, before), (agent, after)):
        one.register_memory([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")
    agent.add_remote_agent(trainer.get_agent_metadata())
    names = {"agent": agent, "found": address_rows(part, mine, told).nixl()}
    exec(text, names)
    while agent.check_xfer_state(names["transfer"]) == "PROC":
        pass
    assert np.array_equal(after, before[:, 4:])


FRAGMENTS: dict[str, Callable[[str, Path, pytest.MonkeyPatch], None]] = {
    "checkpoints: state = {": checkpoint_in_pytorch,
    'coming-from: _ = Path("cut.toml").write_text("""': files_of_ranks,
    "load-a-rank: model_state, optim_state = get_state_dict(model, optimizer)": run_in_pytorch,
    "mpi: from mpi4py import MPI": plan_among_ranks,
    "mpi: from shardwise.execute import mpi": model_among_ranks,
    'move-a-run: run = torch.load("run.pt")': hyperparameters_of_optax,
    "mpi: from shardwise.execute import torch as executor": model_among_processes,
    "mpi: program = plan.program(rank)": program_of_a_rank,
    "object-stores: import shardwise as sw": object_store,
    "record-a-loader: from shardwise.interop import megatron": calls_of_adapters,
    "record-a-loader: from shardwise.interop import sglang, vllm": calls_of_adapters,
    'plan-to-nixl: here = agent.prep_xfer_dlist("NIXL_INIT_AGENT", found.local, found.local_memory)': transfer_by_nixl,
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # PyTorch's, of one process alone.
@pytest.mark.parametrize("first_line", FRAGMENTS)
def test_the_fragment(first_line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FRAGMENTS[first_line](fragment(first_line), tmp_path, monkeypatch)
