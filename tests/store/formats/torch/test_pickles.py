"""Pickles that are meant to do harm: whatever they ask for, nothing is imported, called or changed."""

import os
import pickle
import pickletools
import struct
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise import _core
from shardwise.store.formats.torch.pickles import (
    Record,
    dtype_of_global,
    named_dtype,
    read_columns,
    read_objects,
    read_strict,
    torch_sizes,
)

from ...torch_files import META, Call, Dcp, Global, dumps, save, tensor

CANARY = "shardwise_canary"


@pytest.fixture(autouse=True)
def canary(tmp_path: Path) -> Iterator[list[str]]:
    """A module that notes when anything of it is called, imported, or changed."""
    touched: list[str] = []

    class Watched(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if not name.startswith("__"):  # Which those ask for who go through all modules.
                touched.append(name)
            raise AttributeError(name)

    before = set(sys.modules)
    sys.modules[CANARY] = Watched(CANARY)
    yield touched
    del sys.modules[CANARY]
    assert touched == []
    assert not (tmp_path / "pwned").exists()
    assert {name for name in set(sys.modules) - before if name.startswith(("torch", "antigravity", "this"))} == set()


def command(tmp_path: Path) -> str:
    return f"touch {tmp_path / 'pwned'}"


def attacks(text: str) -> dict[str, bytes]:
    """`os.system(text)` and its kin, by every opcode that calls or builds."""
    t = text.encode()
    short, unicode = b"\x8c" + bytes([len(t)]) + t, b"X" + struct.pack("<I", len(t)) + t
    return {
        "REDUCE": b"\x80\x02cos\nsystem\n" + unicode + b"\x85R.",
        "REDUCE of posix": b"\x80\x02cposix\nsystem\n" + unicode + b"\x85R.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + short + b"\x85R.",
        "a dotted name": b"\x80\x04\x8c\x02os\x8c\x0bpath.os.sys\x93)R.",
        "NEWOBJ": b"\x80\x02cos\nsystem\n" + unicode + b"\x85\x81.",
        "NEWOBJ_EX": b"\x80\x04cos\nsystem\n" + short + b"\x85}\x92.",
        "INST": b"(S'" + t + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + t + b"'\no.",
        "protocol 0": b"cos\nsystem\n(S'" + t + b"'\ntR.",
        "eval": b"\x80\x02cbuiltins\neval\n" + unicode + b"\x85R.",
        "exec": b"\x80\x02cbuiltins\nexec\n" + unicode + b"\x85R.",
        "__builtin__": b"\x80\x02c__builtin__\neval\n" + unicode + b"\x85R.",
        "getattr": b"\x80\x02cbuiltins\ngetattr\ncos\nsystem\n" + unicode + b"\x86R.",
        "getattr of a module": b"\x80\x02c__builtin__\ngetattr\nctorch\nos\nX\x06\0\0\0system\x86R"
        + unicode
        + b"\x85R.",
        "getattr of what getattr gives": b"cbuiltins\ngetattr\nq\0h\0(ctorch\na\nX\x02\0\0\0ostRX\x01\0\0\0x\x86R.",
        "getattr by way of a method": b"\x80\x02cbuiltins\ngetattr\n(ca\nB\nX\x0b\0\0\0__globals__X\x01\0\0\0xtR.",
        "getattr of globals": b"\x80\x02cbuiltins\ngetattr\n(ca\nB\nX\x0d\0\0\0__globals__.xtR.",
        "getattr itself": b"\x80\x02cbuiltins\ngetattr\n.",
        "getattr, kept": b"\x80\x02}X\x01\0\0\0xcbuiltins\ngetattr\ns.",
        "__import__": b"\x80\x02cbuiltins\n__import__\n" + unicode + b"\x85R.",
        "subprocess": b"\x80\x02csubprocess\nPopen\n" + unicode + b"\x85\x81.",
        "BUILD of a class": b"\x80\x02cbuiltins\nobject\n)\x81N}X\x07\0\0\0__class__cos\nsystem\ns\x86b.",
        "BUILD with a setstate": b"\x80\x02cshardwise_canary\nThing\n)\x81cos\nsystem\nb.",
        "EXT1": b"\x80\x02\x82\x01.",
        "EXT2": b"\x80\x02\x83\x01\0.",
        "EXT4": b"\x80\x02\x84\x01\0\0\0.",
        "a call of a call's result": b"\x80\x02cshardwise_canary\nf\n)R)R.",
        "a call of text": b"\x80\x02" + unicode + b")R.",
        "a persistent id": b"\x80\x02cos\nsystem\nQ.",
        "popped": b"\x80\x02cos\nsystem\n" + unicode + b"\x85R0N.",
        "in the memo only": b"\x80\x02cos\nsystem\nq\x000}.",
        "a module by way of another": b"\x80\x02ctorch.serialization\nos.system\n" + unicode + b"\x85R.",
        "numpy's runstring": b"\x80\x02cnumpy.testing._private.utils\nrunstring\n" + unicode + b"}\x86R.",
        "a module of the file's own": b"\x80\x02cshardwise_canary\nboom\n)R.",
        "an import with a side effect": b"\x80\x02cantigravity\nfly\n)R.",
    }


@pytest.mark.parametrize("route", attacks("x"))
def test_nothing_is_run_by_any_opcode(route: str, tmp_path: Path) -> None:
    data = attacks(command(tmp_path))[route]
    with pytest.raises(sw.ParseError):
        read_strict(data, "here")
    (tmp_path / "model.pt").write_bytes(save(None, data=data))
    with pytest.raises(sw.ParseError):
        sw.open_checkpoint(tmp_path / "model.pt")
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(sw.ParseError):
        sw.open_checkpoint(tmp_path / ".metadata")


def test_the_same_pickles_do_harm_in_python(tmp_path: Path) -> None:
    """So that the test above can fail."""
    for route in ("REDUCE", "STACK_GLOBAL", "INST", "OBJ", "protocol 0", "popped"):
        pickle.loads(attacks(command(tmp_path))[route])
        assert (tmp_path / "pwned").exists()
        (tmp_path / "pwned").unlink()


@pytest.mark.parametrize(
    ("route", "named"),
    [
        ("REDUCE", "os.system"),
        ("eval", "builtins.eval"),
        ("popped", "os.system"),
        ("a module by way of another", "torch.serialization.os.system"),
    ],
)
def test_a_forbidden_global_is_named_wherever_it_stands(route: str, named: str, tmp_path: Path) -> None:
    data = attacks(command(tmp_path))[route]
    for read in (read_strict, read_objects):
        with pytest.raises(
            sw.ParseError, match=rf"here: names '{named}', which serves to run programs; nothing was run"
        ):
            read(data, "here")
    folder = Dcp()
    folder.add("w", (2,), [((0,), np.ones(2, np.float32))])
    # Also where a planner may put objects of its own.
    folder.extra["planner_data"] = {"w": Call("os", "system", "true")}
    with pytest.raises(sw.ParseError, match=r"\.metadata: names 'os\.system'"):
        sw.open_checkpoint(folder.write(tmp_path / "dcp"))


def test_a_nested_class_has_the_name_that_getattr_would_find() -> None:
    name = b"c__builtin__\ngetattr\nctorch.api\nShardedTensor\nX\x11\0\0\0ProcessGroupState\x86R"
    read = read_objects(b"\x80\x02" + name + b")\x81}X\x04\0\0\0rankK\x01sb.", "here")
    assert (read.name, read.args, read.state) == ("torch.api.ShardedTensor.ProcessGroupState", (), {"rank": 1})
    # Python's own pickles name nested classes so before protocol 4.
    read = read_objects(pickle.dumps(Outer.Inner(), 2), "here")
    assert read.name == f"{Outer.__module__}.Outer.Inner"


class Outer:
    """A class with one in it."""

    class Inner:
        """The class that a pickle names."""


def test_unknown_globals_are_inert_where_planners_put_them_and_refused_elsewhere(tmp_path: Path) -> None:
    def folder() -> Dcp:
        made = Dcp()
        made.add("w", (2,), [((0,), np.ones(2, np.float32))])
        return made

    for attribute in ("planner_data", "all_local_plans", "mcore_data"):
        good = folder()
        good.extra[attribute] = {"w": Call("my.planner", "Plan", 1, state={"x": [Global("my.planner", "KIND")]})}
        with sw.open_checkpoint(good.write(tmp_path / attribute)) as checkpoint:
            assert checkpoint.read("w").tolist() == [1, 1]
    bad = folder()
    bad.extra["storage_meta"] = Call("my.planner", "Plan")
    with pytest.raises(sw.ParseError, match=r"names \"my.planner.Plan\", which is not supported here"):
        sw.open_checkpoint(bad.write(tmp_path / "storage_meta"))
    # The same object below a free attribute and elsewhere.
    both, shared = folder(), Call("my.planner", "Plan")
    both.extra |= {"planner_data": [shared], "storage_meta": [shared]}
    with pytest.raises(sw.ParseError, match=r"my\.planner\.Plan"):
        sw.open_checkpoint(both.write(tmp_path / "both"))
    # One that nothing leads to.
    data = folder().metadata()
    hidden = b"\x80\x04cmy.planner\nPlan\n0" + data[2:]
    with pytest.raises(sw.ParseError, match=r"my\.planner\.Plan"):
        read_columns(hidden, "here", ("version",))


def test_a_free_attribute_that_cannot_be_read_does_not_matter(tmp_path: Path) -> None:
    folder = Dcp()
    folder.add("w", (2,), [((0,), np.ones(2, np.float32))])
    folder.extra["planner_data"] = "~"
    path = folder.write(tmp_path / "dcp")
    data = (path / ".metadata").read_bytes()
    here = b"\x8c\x01~"
    assert data.count(here) == 1
    deep = b"]" * 300 + b"a" * 299
    for other, read in ((deep, None), (b"\x8c\x01\xff", None), (b"]]a", [[]])):
        (path / ".metadata").write_bytes(data.replace(here, other))
        with sw.open_checkpoint(path) as checkpoint:
            assert checkpoint.read("w").tolist() == [1, 1]
            assert checkpoint.metadata.get("planner_data") == read


def test_a_state_does_not_reach_any_class() -> None:
    """`BUILD` sets attributes on whatever lies on the stack; here only on records, and those are made anew."""
    before = dict(vars(Record))
    for state in ({"__class__": 1, "__setstate__": 2, "name": 3}, (None, {"__dict__": {}, "args": 1})):
        made = read_objects(dumps(Call("a.b", "C", state=state)), "here")
        assert (made.name, made.args, made.state) == ("a.b.C", (), state)
    assert dict(vars(Record)) == before
    for attribute in ("name", "args", "state", "other"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(made, attribute, 1)
    with pytest.raises(TypeError):
        type("Sub", (Record,), {})


def limited(data: bytes, megabytes: int = 200) -> None:
    """Read in a process that may have so much more memory, and must not need it."""
    import subprocess

    code = (
        "import sys, resource, shardwise as sw\n"
        "from shardwise.store.formats.torch.pickles import read_objects\n"
        "data = sys.stdin.buffer.read()\n"
        f"used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + ({megabytes} << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used, used))\n"
        "try: read_objects(data, 'here')\n"
        "except sw.ParseError: pass\n"
    )
    subprocess.run([sys.executable, "-c", code], input=data, check=True, timeout=3600)


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02N" + b"r\xff\xff\xff\x7f" + b".",  # A memo of 2**31 entries.
        b"\x80\x02]" + b"r\xff\xff\xff\xff" + b"e" + b".",
        b"\x96\xff\xff\xff\xff\xff\0\0\0.",  # A bytearray of 2**40 bytes.
        b"\x8d\xff\xff\xff\xff\xff\0\0\0.",
        b"\x8b\xff\xff\xff\x7f.",  # An integer of 2**31 bytes.
        b"\x95\xff\xff\xff\xff\xff\0\0\0.",
        b"\x80\x02" + b"]" * 10**6 + b"a" * (10**6 - 1) + b".",  # A million lists in one another.
        b"\x80\x02]q\0" + b"(" + b"h\0" * 10**5 + b"e.",  # A list of itself, 10**5 times.
        b"\x80\x02)" + b"2\x86" * 10**5 + b".",  # A tuple of itself twice, and so on: 2**100000 in all.
        b"\x80\x02" + b"(" * 10**6,
    ],
    ids=["memo", "memo of a list", "bytearray", "text", "integer", "frame", "depth", "cycle", "doubling", "marks"],
)  # fmt: skip
def test_short_inputs_take_little_memory_and_time(data: bytes) -> None:
    limited(data)


def test_keys_that_collide_do_not_take_long() -> None:
    """10**5 keys of one hash: a dict of Python's compares each with all others, some 10**10 times."""
    many = 10**5
    pairs = b"".join(b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") + b"N" for i in range(many))
    read = read_objects(b"\x80\x02}(" + pairs + b"u.", "here")
    assert isinstance(read, Record)
    assert (read.name, len(read.items)) == ("dict", many)
    # Tuples within tuples, whose hash would be computed 2**60 times.
    read = read_objects(b"\x80\x02})" + b"2\x86" * 60 + b"Ns.", "here")
    assert (read.name, len(read.items)) == ("dict", 1)


#: What Python's pickler writes of plain values, read as the values they were.
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(-(2**63), 2**63 - 1), inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.mark.heavy
@settings(max_examples=200, deadline=None)
@given(value=values, protocol=st.integers(3, 5))
def test_plain_values_are_read_as_python_reads_them(value: Any, protocol: int) -> None:
    for data in (pickle.dumps(value, protocol), pickletools.optimize(pickle.dumps(value, protocol))):
        assert read_objects(data, "here") == value


def test_of_the_builtins_only_plain_values_are_known() -> None:
    def named(name: str) -> bytes:
        return b"\x80\x02cbuiltins\n" + name.encode() + b"\n."

    for name in ("set", "frozenset", "bytearray", "complex", "slice", "range"):
        assert read_strict(named(name), "here").name == f"builtins.{name}"
    for name in ("print", "list", "int", "object", "type", "sorted", "help"):
        with pytest.raises(sw.ParseError, match=f'here: names "builtins.{name}", which is not supported here'):
            read_strict(named(name), "here")
    with pytest.raises(sw.ParseError, match="which serves to run programs"):
        read_strict(named("eval"), "here")


def test_sizes_and_dtypes_are_what_they_say() -> None:
    ends = [0, 1, 2**63 - 1]
    assert torch_sizes(ends) == torch_sizes(tuple(ends)) == (0, 1, 2**63 - 1)
    assert torch_sizes([]) == ()
    for wrong in ([-1], [2**63], [True], [1.0], "ab", 3, None, {1: 2}):
        assert torch_sizes(wrong) is None
    for name, expected in (("torch.float32", "float32"), ("torch.FloatStorage", "float32"), ("torch.bool", "bool")):
        assert (found := named_dtype(name)) is not None
        assert found.name == expected
    assert named_dtype("torch.float31") is None
    # As pickles since PyTorch 2.4 say it: by a call with the name.
    call = b"\x80\x02ctorch.serialization\n_get_dtype\n(%stR."
    name_of = b"X\x0d\0\0\0torch.float32"
    found = dtype_of_global(read_strict(call % name_of, "here"))
    assert found is not None
    assert found.name == "float32"
    for count in (0, 2):
        assert dtype_of_global(read_strict(call % (name_of * count), "here")) is None
    for value in ("torch.float32", None, 3):
        assert dtype_of_global(value) is None


def test_sharing_and_containers_of_classes() -> None:
    from collections import OrderedDict, defaultdict

    shared = ["x"]
    first, second = read_objects(pickle.dumps((shared, shared), 4), "here")
    assert first is second
    made = read_objects(pickle.dumps(OrderedDict(a=1, b=shared), 4), "here")
    assert (made.name, made.items) == ("collections.OrderedDict", (("a", 1), ("b", ["x"])))
    made = read_objects(pickle.dumps(defaultdict(list, {"a": [1]}), 4), "here")
    assert (made.args[0].name, made.items) == ("builtins.list", (("a", [1]),))
    assert read_objects(pickle.dumps({1, 2}, 4), "here").name == "set"
    assert set(read_objects(pickle.dumps(frozenset({1, 2}), 4), "here").elements) == {1, 2}
    assert read_objects(pickle.dumps({(1, 2): 3}, 4), "here").items == (((1, 2), 3),)
    assert read_objects(pickle.dumps(bytearray(b"ab"), 5), "here") == b"ab"
    made = read_objects(pickle.dumps(np.float32(1.5), 4), "here")
    assert made.name.endswith(".scalar")


def test_messages_stay_short(tmp_path: Path) -> None:
    name = "n" * 10**6
    for data in (dumps(Call("m." + name, name)), b"\x80\x02c" + name.encode() + b"\nx\n."):
        with pytest.raises(sw.ParseError) as caught:
            read_strict(data, "here")
        assert len(str(caught.value)) < 500
    folder = Dcp()
    folder.add(name, (2,), [((0,), np.ones(2, np.float32))])
    with pytest.raises(sw.ParseError) as caught:
        sw.open_checkpoint(folder.write(tmp_path / "dcp"))
    assert len(str(caught.value)) < 500 + len(os.fspath(tmp_path))


def test_a_writer_s_own_objects_are_inert_where_nothing_needs_them() -> None:
    """As in Megatron's common.pt: a namespace of arguments, enums of the standard library's, partial functions."""
    import argparse
    import functools
    import signal

    value = argparse.Namespace(lr=0.1, stop=signal.SIGTERM, act=functools.partial(max, 1))
    value.kind = types.SimpleNamespace(a=1)
    read = read_objects(pickle.dumps({"args": value, "step": 7}, 4), "here")
    assert (read["step"], read["args"].name, read["args"].state["lr"]) == (7, "argparse.Namespace", 0.1)
    assert (read["args"].state["stop"].name, read["args"].state["stop"].args) == ("signal.Signals", (15,))


def test_what_the_judge_raises_comes_out() -> None:
    def judge(name: str) -> bool:
        raise KeyError(name)

    with pytest.raises(KeyError, match=r"a\.b"):
        _core.read_pickle(dumps(Call("a", "b")), judge)
    with pytest.raises(TypeError):
        _core.read_pickle(dumps(Call("a", "b")), lambda name: "yes")  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError):
        _core.read_pickle("text", judge)  # type: ignore[arg-type]


def test_a_file_s_own_state_dict_is_not_disturbed_by_what_lies_beside(tmp_path: Path) -> None:
    """Numbers, texts and lists beside tensors, and objects of the writer's classes, which stay inert."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = tmp_path / "model.pt"
    path.write_bytes(save({"model": {"w": tensor(array, "0")}, "step": 7, "names": ["a", None], "empty": {}}))
    with sw.open_checkpoint(path) as checkpoint:
        assert checkpoint.read("model.w").tolist() == array.tolist()
        assert {name: held.value() for name, held in checkpoint.objects.items()} == {
            "step": 7, "names": ["a", None], "empty": {},
        }  # fmt: skip
    path.write_bytes(save({"w": tensor(array, "0"), "config": Call("my.config", "Config", state={})}))
    with sw.open_checkpoint(path) as checkpoint:
        assert list(checkpoint) == ["w"]
        assert checkpoint.objects["config"].value().name == "my.config.Config"
    path.write_bytes(save(Call("my.config", "Config", state={})))
    with pytest.raises(sw.ParseError, match=r"model.pt: holds one object, 'my.config.Config', which has no meaning"):
        sw.open_checkpoint(path)


def test_the_metadata_class_is_needed(tmp_path: Path) -> None:
    calls = (Call(META, "StorageMeta", state={}), Call(META, "Metadata"), Call(META, "Metadata", state=[1]))
    value: Any
    for value in ({}, 5, *calls):
        (tmp_path / ".metadata").write_bytes(dumps(value, 4))
        with pytest.raises(sw.ParseError, match=r"\.metadata: "):
            sw.open_checkpoint(tmp_path)
