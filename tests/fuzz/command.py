"""The command, in this process, on files that were right before they were spoilt: whatever is in them, it says so.

Manifests, plans, receipts, indexes, headers and configurations of small checkpoints are changed where they have numbers
and texts. What guards them (seals, digests, lengths) is made right again, so that the change is read, not only found.
The law is one: the command ends with a status and a sentence. A plan that was changed may be carried out; then what it
made is a checkpoint that is what was written.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from hypothesis import strategies as st

import shardwise as sw
from shardwise import cli
from shardwise.store.formats.sharded import sealed
from shardwise.store.write.places.receipts import receipt_from_line, receipt_line
from tests.fuzz.arguments import FOLDER
from tests.fuzz.limits import limited
from tests.store.orbax_files import item, zarr2, zarr3
from tests.store.tasks import forge, unpacked
from tests.store.torch_files import Dcp, save

#: Where files are spoilt; nothing beside it is written, whatever a path becomes.
HERE = FOLDER / "command" / "in" / "it"
MESH = "a=2,b=2"
RULES = 'match = "search"\n[rules]\n"w" = ["a", "b"]\n"q" = [[], "b"]\n'
ODD: list[Any] = [
    None, True, False, "", "x", "w", "a\0b", "../a", "/", "F32", "float32", "float64", "int8", "int4", "hf", "dcp",
    "\ud800", "é" * 300, 0, 1, -1, 2, 3, 255, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1,
    10**400, 0.5, 1e308, -0.0, [], {}, [0], [[]], [1, [2, [3]]], {"a": 1}, {"w": {}}, "0" * 64, "f" * 32, "g" * 32,
    [2**63, 2**63], [0, 0], [-1], ["x", None],
]  # fmt: skip


class Case(NamedTuple):
    """A file to spoil, and what is done with it.

    Attributes:
        path: The file, below `HERE`.
        commands: Any of these is run; `OUT` is a name that nothing has.
        spoil: Gives the bytes that the file then has.
    """

    path: Path
    commands: list[list[str]]
    spoil: Callable[[bytes, random.Random], bytes]


def _nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in pairs:
        yield from _nodes(one, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def edited(value: Any, rng: random.Random) -> Any:
    """Change a value of JSON in a few places."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        nodes = list(_nodes(value))
        path = rng.choice(nodes)
        there = _at(value, path)
        new = rng.choice([rng.choice(ODD), _near(there, rng), _at(value, rng.choice(nodes))])
        new = json.loads(json.dumps(new))
        if not path:
            value = new if rng.random() < 0.05 else value
            continue
        parent, key = _at(value, path[:-1]), path[-1]
        what = rng.randrange(6)
        if what == 0:
            del parent[key]
        elif what == 1 and isinstance(parent, list):
            parent.insert(key, new)
        elif what == 1:
            name = rng.choice([text for text in ODD if isinstance(text, str)] + [key + "x"])
            parent[name] = parent.pop(key) if rng.random() < 0.5 else new
        else:
            parent[key] = new
    return value


def _near(value: Any, rng: random.Random) -> Any:
    """A value of the same kind."""
    if isinstance(value, bool) or value is None:
        return rng.choice(ODD)
    if isinstance(value, (int, float)):
        return value + rng.choice([-1, 1, 8, -8, 4096]) if rng.random() < 0.8 else -value
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return value[:at] + rng.choice(["", "x", "0", "\0", "/", ".", "\n"]) + value[at + rng.randrange(2) :]
    if isinstance(value, list):
        return rng.choice([value[1:], value * 2, value[::-1], [value]])
    return dict(list(value.items())[1:])


def _bytes(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(data) + 1)
        put = rng.choice([b"", b"\0", b"\xff", b"0", b"-1", rng.randbytes(3), data[at : at + 9] * 2])
        data = data[:at] + put + data[at + rng.randrange(5) :]
    return data


def _json(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.1:
        return _bytes(data, rng)
    try:
        said = json.loads(data)
    except ValueError:  # It was changed before.
        return _bytes(data, rng)
    return json.dumps(edited(said, rng)).encode(errors="replace")


def _manifest(data: bytes, rng: random.Random) -> bytes:
    """A manifest that says of itself that it is what was written."""
    if rng.random() < 0.1:
        return _bytes(data, rng)
    said = json.loads(data)
    del said["sha256"]
    if rng.random() < 0.4:  # A file that is not the one: the others are read by themselves.
        rng.choice(list(said["files"].values()))["size"] += rng.choice([-1, 1])
        said["tensors"] = edited(said["tensors"], rng)
    return sealed(json.dumps(edited(said, rng) if rng.random() < 0.7 else said, indent=0).encode(errors="replace"))


def _header(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file, whose metadata may be JSON themselves."""
    length = int.from_bytes(data[:8], "little")
    said = json.loads(data[8 : 8 + length])
    about = said.get("__metadata__", {})
    inner = [key for key, text in about.items() if text.startswith(("{", "["))]
    if inner and rng.random() < 0.5:
        key = rng.choice(inner)
        about[key] = json.dumps(edited(json.loads(about[key]), rng))
    else:
        said = edited(said, rng)
    text = json.dumps(said).encode(errors="replace")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def forged_plan(data: bytes, change: Callable[[dict[str, Any], dict[str, bytes]], None]) -> bytes:
    """A plan whose head and sections were changed, with all its digests right."""
    path = HERE / "taken apart"
    path.write_bytes(data)
    head, sections = unpacked(path)
    change(head, sections)
    forge(path, head, sections)
    data = path.read_bytes()
    path.unlink()
    return data


_TEXTS = ("sources", "aliases", "paths")
_NAMES = ("names", "file_names", "beside", "again")


def _plan(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.05:
        return _bytes(data, rng)

    def change(head: dict[str, Any], sections: dict[str, bytes]) -> None:
        for _ in range(rng.choice([1, 1, 2])):
            name = rng.choice(["head", *sections])
            if name == "head":
                new = edited(head, rng)
                head.clear()
                head.update(new if isinstance(new, dict) else {"x": new})
            elif name in ("aliases", "paths"):
                sections[name] = _json(sections[name], rng)
            elif name == "sources":
                _sources(sections, rng)
            elif name in _NAMES:
                sections[name] = _bytes(sections[name], rng) if sections[name] else b"x"
            else:
                sections[name] = _numbers(sections[name], rng)

    return forged_plan(data, change)


def _sources(sections: dict[str, bytes], rng: random.Random) -> None:
    ends = np.frombuffer(sections["source_ends"], "<i8").tolist()
    texts = [sections["sources"][a:b] for a, b in zip([0, *ends], ends, strict=False)]
    number = rng.randrange(len(texts))
    with contextlib.suppress(ValueError):  # The ends were changed before.
        texts[number] = _json(texts[number], rng)
    sections["sources"] = b"".join(texts)
    sections["source_ends"] = np.cumsum([len(text) for text in texts]).astype("<i8").tobytes()


def _numbers(data: bytes, rng: random.Random) -> bytes:
    numbers = np.frombuffer(data, "<i8").tolist()
    if not numbers:
        return np.array([rng.choice([0, 1])] * rng.choice([1, 3, 8]), "<i8").tobytes()
    at, other = rng.randrange(len(numbers)), rng.randrange(len(numbers))
    what = rng.randrange(5)
    if what == 0:
        numbers[at] = rng.choice([0, 1, -1, 2, 7, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)])
    elif what == 1:
        numbers[at], numbers[other] = numbers[other], numbers[at]
    elif what == 2:
        numbers[at] = numbers[other]
    elif what == 3:
        numbers[at] += rng.choice([-1, 1, 4, -4, 8])
    else:
        del numbers[at : at + rng.choice([1, 2, 3, 5, 7, 8])]
    numbers = [(number + 2**63) % 2**64 - 2**63 for number in numbers]
    return np.array(numbers, "<i8").tobytes()


def _receipt(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    number = rng.randrange(len(lines))
    if rng.random() < 0.3:
        lines[number] = rng.choice([_bytes(lines[number], rng), lines[number][:-9], lines[number] * 2, b""])
        return b"".join(lines)
    receipt = receipt_from_line(lines[number], HERE)
    said = edited({"made": None, **receipt._asdict(), "shares": list(receipt.shares)}, rng)
    fields = {key: value for key, value in said.items() if key in receipt._fields} if isinstance(said, dict) else {}
    with contextlib.suppress(TypeError, ValueError, AttributeError):  # No receipt of these can be written.
        lines[number] = receipt_line(receipt._replace(**fields))
    return b"".join(lines)


def _run(*arguments: str) -> int:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        status = cli.main(list(arguments))
    assert status == 0, said.getvalue()
    return status


@cache
def cases() -> dict[str, Case]:
    """The files, each beside all that its checkpoint needs, made once."""
    HERE.mkdir(parents=True, exist_ok=True)
    with _inside():
        return _made()


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    """Be in the folder, of which what becomes a relative path is a part."""
    before = Path.cwd()
    os.chdir(HERE)
    try:
        yield
    finally:
        os.chdir(before)


def _made() -> dict[str, Case]:
    rng = np.random.default_rng(0)
    tensors = {
        "w": rng.random((4, 8)).astype("f4"), "q.x": rng.random((2, 8)).astype("f2"), "tied": np.zeros(0, "f4"),
        "s": np.array(3, "i8"), "empty": np.zeros((0, 4), "f4"),
    }  # fmt: skip
    tensors["tied"] = tensors["w"]
    (HERE / "rules.toml").write_text(RULES)
    config = {
        "model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "torch_dtype": "float32",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}, "text_config": {"head_dim": 4},
    }  # fmt: skip
    sw.save_checkpoint(HERE / "hf", tensors, to="hf", sync=False, max_file_bytes=100)
    (HERE / "hf" / "config.json").write_text(json.dumps(config))
    cut = ["--rules", "rules.toml", "--mesh", MESH, "--no-sync", "--quiet"]
    for form in ("sharded", "dcp", "ranks", "safetensors"):
        _run("reshard", "hf", form, "--to", form, *cut)
        _run("plan", "hf", f"of-{form}", "--to", form, "--save", f"{form}.swplan", "--task-bytes", "64KiB", *cut[:5])
    _run("plan", "sharded", "of-hf", "--to", "hf", "--save", "hf.swplan")
    _run("run", "sharded.swplan", "--quiet")
    (receipts,) = (HERE / ".of-sharded.partial").glob("*/receipts/*.jsonl")
    folder = item(HERE / "orbax")
    zarr2(folder, "w", tensors["w"], (2, 8), compressor={"id": "zlib"})
    zarr3(folder, "v", tensors["w"], (4, 8), (2, 8), codecs=("gzip",))
    torch = Dcp()
    torch.add("w", (4,), [((0,), np.ones(2, np.float32)), ((2,), np.ones(2, np.float32))])
    torch.write(HERE / "torch")
    (HERE / "file.pt").write_bytes(save({"w": tensors["w"], "step": 3}))

    def reading(path: str, *more: list[str]) -> list[list[str]]:
        return [
            ["verify", path, "--quiet"], ["inspect", path], ["inspect", path, "--json"], ["learn", path, "hf"],
            ["diff", path, "hf", "--quiet"], ["diff", "hf", path, "--quiet"], ["reshard", path, "OUT", *cut],
            ["reshard", path, "OUT", "--to", "dcp", "--no-sync"], ["plan", path, "OUT"],
            ["report", path, "--rules", "rules.toml", "--mesh", MESH], *more,
        ]  # fmt: skip

    found = {
        f"manifest of {form}": Case(HERE / form / "shardwise.json", reading(form), _manifest)
        for form in ("sharded", "dcp", "ranks")
    }
    found |= {
        f"plan of {form}": Case(HERE / f"{form}.swplan", [["run", f"{form}.swplan", "--quiet", "--no-sync"]], _plan)
        for form in ("sharded", "dcp", "ranks", "safetensors", "hf")
    }
    found["receipts"] = Case(receipts, [["commit", "sharded.swplan", "--no-sync"], ["run", "sharded.swplan"]], _receipt)
    for name in ("sharded", "ranks", "hf"):
        path = next((HERE / name).glob("*.safetensors"))
        found[f"header of {name}"] = Case(path, reading(name, ["inspect", str(path)]), _header)
    found["index of hf"] = Case(HERE / "hf" / "model.safetensors.index.json", reading("hf"), _json)
    found["configuration"] = Case(
        HERE / "hf" / "config.json",
        [["fits", "hf"], ["fits", "hf", "--tp", "2", "--json"], ["reshard", "hf", "OUT", *cut], *reading("hf")],
        _json,
    )
    found["index of torch"] = Case(HERE / "torch" / ".metadata", reading("torch"), _bytes)
    found["file of torch"] = Case(HERE / "file.pt", reading("file.pt"), _bytes)
    for name in ("_METADATA", "w/.zarray", "v/zarr.json"):
        found[f"{name} of Orbax"] = Case(folder / name, reading("orbax"), _json)
    for name in ("w/0.0", "v/c/0/0"):
        found[f"{name} of Orbax"] = Case(folder / name, reading("orbax"), _bytes)
    return found


#: The names of the cases, which are made when the first is used.
NAMES = (
    *(f"manifest of {form}" for form in ("sharded", "dcp", "ranks")),
    *(f"plan of {form}" for form in ("sharded", "dcp", "ranks", "safetensors", "hf")),
    "receipts", *(f"header of {form}" for form in ("sharded", "ranks", "hf")), "index of hf", "configuration",
    "index of torch", "file of torch", "_METADATA of Orbax", "w/.zarray of Orbax", "v/zarr.json of Orbax",
    "w/0.0 of Orbax", "v/c/0/0 of Orbax",
)  # fmt: skip


def inputs() -> st.SearchStrategy[tuple[str, int]]:
    """A file, and the seed of what is done to it."""
    return st.tuples(st.sampled_from(NAMES), st.integers(0, 2**32 - 1))


def _is_said(error: BaseException) -> bool:
    """Whether an error was written for whoever reads it, not by numpy or Python about something within."""
    if isinstance(error, (sw.ShardwiseError, OSError, ImportError)):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    line = "" if trace is None else linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    return trace is not None and "shardwise" in trace.tb_frame.f_code.co_filename and line.strip().startswith("raise ")


def run_command(arguments: list[str]) -> tuple[int, str]:
    """Run the command in this process; give its status and what it says about errors."""
    errors: list[BaseException | None] = []
    say = cli.say  # type: ignore[attr-defined]

    def noted(what: str, messages: Iterable[str]) -> None:
        errors.append(sys.exc_info()[1])
        say(what, messages)

    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as said,
        mock.patch.object(cli, "say", noted),
        limited(),
    ):
        status = cli.main(arguments)
    text = said.getvalue()
    for error in errors:
        if error is not None and not _is_said(error):
            raise error
    # A fault of ours has a status of its own.
    assert status in (0, 1, 2, 3, 4), (arguments, status, text)
    assert status != 2 or re.match("shardwise: (warning|error): .", text), (arguments, text)
    return status, text


def spoil(example: tuple[str, int]) -> tuple[int, str]:
    """Spoil a file, run the command, and put the file right again."""
    name, seed = example
    case, rng = cases()[name], random.Random(seed)
    good = case.path.read_bytes()
    data = case.spoil(good, rng)
    arguments = [word.replace("OUT", "out") for word in rng.choice(case.commands)]
    kept = set(HERE.iterdir())
    # A spoilt plan may be for the same place, and a commit takes that away.
    is_run = arguments[0] in ("run", "commit")
    if is_run:
        shutil.copytree(HERE / ".of-sharded.partial", HERE.parent / "kept")
    case.path.write_bytes(data)
    try:
        with _inside():
            status, text = run_command(arguments)
            return _committed(case.path) if name.startswith("plan of") and status == 0 else (status, text)
    finally:
        for each in set(HERE.iterdir()) - kept:
            _remove(each)
        if is_run:
            _remove(HERE / "of-sharded")
            _remove(HERE / ".of-sharded.partial")
            shutil.move(HERE.parent / "kept", HERE / ".of-sharded.partial")
        case.path.write_bytes(good)


def _committed(plan: Path) -> tuple[int, str]:
    """Commit a plan whose parts were run; what that makes can be opened, and is what was written."""
    status, text = run_command(["commit", str(plan), "--no-sync"])
    if status == 0:
        made = sw.CheckpointPlan.load(plan).path
        status, text = run_command(["verify", str(made), "--quiet"])
        assert status == 0, (made, text)
    return status, text


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
