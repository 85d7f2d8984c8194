from __future__ import annotations

import io
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise import (
    DeviceMesh,
    LayoutError,
    LayoutMap,
    LayoutRule,
    MeshError,
    ParseError,
    Rewrites,
    ShardwiseError,
    SizeOverflowError,
    TensorLayout,
    UnevenRule,
    example_rules,
    read_rules,
)

MESH = DeviceMesh((2, 4), ("data", "model"))

EXAMPLE = r"""
match = "fullmatch"

[mesh]
shape = [2, 4]
axis_names = ["data", "model"]

[rules]
'.*attn\.c_attn\.weight' = [[], "model"]
'.*wte\.weight' = [["data", "model"], ""]
".*\\.bias" = [["model"]]
'.*partial' = { axes = [[]], unreduced = ["data"] }
scalar = []
"""


def read(text: str, mesh: DeviceMesh | None = None) -> LayoutMap:
    return LayoutMap.from_toml(io.StringIO(text), mesh)


def written(layout_map: LayoutMap) -> str:
    file = io.StringIO()
    layout_map.to_toml(file)
    return file.getvalue()


def test_a_file_with_everything() -> None:
    layout_map = read(EXAMPLE)
    assert layout_map.match == "fullmatch"
    assert layout_map.device_mesh == MESH
    assert list(layout_map.items()) == [
        (r".*attn\.c_attn\.weight", TensorLayout((None, "model"), MESH)),
        (r".*wte\.weight", TensorLayout((("data", "model"), None), MESH)),
        (r".*\.bias", TensorLayout(("model",), MESH)),
        (".*partial", TensorLayout((None,), MESH, unreduced=("data",))),
        ("scalar", TensorLayout((), MESH)),
    ]


def test_a_file_with_the_least() -> None:
    layout_map = read("[rules]")
    assert (layout_map.match, layout_map.device_mesh, len(layout_map)) == ("search", None, 0)


def test_the_mesh_of_the_caller_comes_before_that_of_the_file() -> None:
    mesh = DeviceMesh((8, 1), ("model", "data"))
    layout_map = read(EXAMPLE, mesh)
    assert layout_map.device_mesh == mesh
    assert {layout.device_mesh for layout in layout_map.values()} == {mesh}


def test_what_is_written() -> None:
    assert written(read(EXAMPLE)) == (
        'match = "fullmatch"\n\n[mesh]\nshape = [2, 4]\naxis_names = ["data", "model"]\n\n[rules]\n'
        "'.*attn\\.c_attn\\.weight' = [[], \"model\"]\n"
        '\'.*wte\\.weight\' = [["data", "model"], []]\n'
        "'.*\\.bias' = [\"model\"]\n"
        "'.*partial' = { axes = [[]], unreduced = [\"data\"] }\n"
        "'scalar' = []\n"
    )


RULED = """
default = { axes = ["data"], uneven = "ceil" }
[mesh]
shape = [2, 4]
axis_names = ["data", "model"]
[rules]
embed = { axes = [{ packed = "(50257@model/pad128)" }, []] }
head = { axes = [[], "model"], uneven = "chunk" }
sum = { axes = [[]], unreduced = ["data"], uneven = "even" }
"""


def test_rules_have_uneven_rules_and_padding_of_their_own() -> None:
    layout_map = read(RULED)
    assert layout_map.default == LayoutRule(TensorLayout(("data",), MESH), "ceil")
    assert {key: rule.uneven for key, rule in layout_map.rules().items()} == {
        "embed": None,
        "head": "chunk",
        "sum": "even",
    }
    # 50257 is padded to 50304, a quarter of which is 12576.
    assert layout_map.partition("embed", (50257, 2)).shard_shape("cpu:3") == (12576, 2)
    assert layout_map.partition("embed", (50257, 2)).box("cpu:3")[0] == slice(37728, 50257)
    assert layout_map.partition("head", (2, 9)).shard_shape("cpu:3") == (2, 0)
    assert layout_map.partition("other", (5, 2, 2)).shard_shape("cpu:7") == (2, 2, 2)
    back = read(written(layout_map))
    assert back == layout_map
    assert 'default = { axes = ["data"], uneven = "ceil" }' in written(back)
    assert 'uneven = "chunk"' in written(back)


def test_a_rule_that_may_cut_blocks_is_written_with_it() -> None:
    text = '[rules]\n\'w\' = { axes = ["x"], uneven = "ceil", shared = true }\n\'v\' = ["x"]\n'
    layout_map = read(text)
    assert {key: rule.shared for key, rule in layout_map.rules().items()} == {"w": True, "v": False}
    assert written(layout_map) == f'match = "search"\n\n{text}'
    # Over a mesh that is the map's it stays one.
    assert read(text, DeviceMesh((2,), ("x",))).rule("w") == LayoutRule(
        TensorLayout(("x",), DeviceMesh((2,), ("x",))), "ceil", shared=True
    )


def test_a_rule_that_may_match_nothing_is_written_with_it() -> None:
    text = "[rules]\n'w' = { axes = [\"x\"], optional = true }\n'v' = [\"x\"]\n"
    layout_map = read(text)
    assert {key: rule.optional for key, rule in layout_map.rules().items()} == {"w": True, "v": False}
    assert written(layout_map) == f'match = "search"\n\n{text}'
    assert read(text, DeviceMesh((2,), ("x",))).rule("w").optional
    for wrong in ("1", '"yes"', "[]"):
        with pytest.raises(ParseError, match=r"rule 'w': optional must be True or False"):
            read(f"[rules]\n'w' = {{ axes = ['x'], optional = {wrong} }}")


def test_a_character_that_toml_forbids_is_escaped() -> None:
    """TOML 1.0: in a basic string any but the quotation mark, the backslash, U+0000 to U+001F but tab, and U+007F."""
    layout_map = LayoutMap(DeviceMesh((1,), ('a\x7f\x1f"\\',)))
    assert 'axis_names = ["a\\u007f\\u001f\\"\\\\"]' in written(layout_map)
    assert read(written(layout_map)) == layout_map


def test_a_default_that_cuts_nothing() -> None:
    for text in ('default = "replicated"\n[rules]', "default = []\n[rules]", "default = { axes = [] }\n[rules]"):
        layout_map = read(text, MESH)
        assert layout_map.default == LayoutRule(TensorLayout((), MESH))
        assert layout_map.layout_of("anything", 3) == TensorLayout((None,) * 3, MESH)
    with pytest.raises(LayoutError, match="the default has a mesh of its own"):
        written(LayoutMap(default=TensorLayout((), MESH)))


def test_a_path_is_read_and_written(tmp_path: Path) -> None:
    layout_map = read(EXAMPLE)
    layout_map.to_toml(tmp_path / "rules.toml")
    assert LayoutMap.from_toml(tmp_path / "rules.toml") == layout_map
    assert LayoutMap.from_toml(str(tmp_path / "rules.toml")) == layout_map
    assert [path.name for path in tmp_path.iterdir()] == ["rules.toml"]


def test_a_file_that_cannot_be_replaced_is_as_it_was(tmp_path: Path) -> None:
    layout_map = read(EXAMPLE)
    layout_map.to_toml(tmp_path / "rules.toml")
    before = (tmp_path / "rules.toml").read_bytes()
    layout_map["other mesh"] = TensorLayout((), DeviceMesh((3,), ("x",)))
    with pytest.raises(LayoutError, match="'other mesh' has a mesh of its own"):
        layout_map.to_toml(tmp_path / "rules.toml")
    assert (tmp_path / "rules.toml").read_bytes() == before


names = st.text(min_size=1, max_size=6).filter(lambda name: "\0" not in name)


@st.composite
def layout_maps(draw: st.DrawFn) -> LayoutMap:
    axes = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    mesh = None
    if draw(st.booleans()):
        shape = draw(st.lists(st.integers(1, 3), min_size=len(axes), max_size=len(axes)))
        size = DeviceMesh(shape, axes).size
        labels = st.text(max_size=4) | st.integers(-(2**63), 2**63 - 1)
        devices = draw(st.none() | st.lists(labels, min_size=size, max_size=size, unique=True))
        mesh = DeviceMesh(shape, axes, devices)
    uneven: st.SearchStrategy[UnevenRule | None] = st.sampled_from([None, "even", "ceil", "chunk", "balanced", "floor"])
    default = draw(st.none() | st.builds(LayoutRule, st.sampled_from([(), tuple(axes[:1])]), uneven))
    layout_map = LayoutMap(mesh, match=draw(st.sampled_from(["search", "match", "fullmatch"])), default=default)
    for key in draw(st.lists(st.text(min_size=1, max_size=8), max_size=4, unique=True)):
        order = draw(st.permutations(axes))
        cuts = sorted(draw(st.lists(st.integers(0, len(axes)), max_size=5)))
        specs = [tuple(order[start:stop]) for start, stop in pairwise(cuts)]
        unreduced = order[cuts[-1] :] if cuts else []
        try:
            layout_map[key] = LayoutRule(TensorLayout(specs, unreduced=unreduced), draw(uneven))
        except LayoutError:
            assume(False)  # The key is not a regular expression.
    return layout_map


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@given(layout_maps())
def test_what_is_written_is_read_back_equal_and_in_order(layout_map: LayoutMap) -> None:
    back = read(written(layout_map))
    assert back == layout_map
    assert list(back) == list(layout_map)
    assert written(back) == written(layout_map)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = 1\n[rules", "is not TOML"),
        ("[rules]\nkernel = [model]", "is not TOML.*line 2"),
        ("[rules]\na = [1]\na = [2]", "is not TOML"),
        (f"[rules]\na = [{'9' * 5000}]", "is not TOML"),
        (f"[rules]\na = {'[' * 20_000}", "nested too deeply"),
        ("match = 'search'", "'rules' is missing"),
        ("rules = 3", "rules must be a table, got 3"),
        (
            "mach = 'search'\n[rules]",
            "unknown key 'mach'.*match, mesh, meshes, models, numbers, ordered, parameters, prefix, replicated, rewrite"
            ", rules.*did you mean 'match'",
        ),
        ("[rule]\nkernel = []", "unknown key 'rule'.*did you mean 'rules'"),
        ("[Rules]\nkernel = []", "unknown key 'Rules'.*did you mean 'rules'"),
        ("[[rules]]\nkernel = []", r"rules must be a table, got a list of them: write \[rules\], not \[\[rules\]\]"),
        ("[rules]\nk = { axes = [], uneve = 'ceil' }", "rule 'k': unknown key 'uneve'.*did you mean 'uneven'"),
        ("[rules]\nk = { axis = ['x'] }", "rule 'k': unknown key 'axis'.*did you mean 'axes'"),
        ("[rules]\nk = { axes = ['x'], uneven = 3 }", "rule 'k': uneven must be a string, got 3"),
        ("default = 'whole'\n[rules]", "default must be 'replicated', a list of axes or a table, got 'whole'"),
        ("default = 3\n[rules]", "default: axes must be a list, got 3"),
        ("default = { uneven = 'ceil' }\n[rules]", "default: 'axes' is missing"),
        (f"{'z' * 100_000} = 1\n[rules]", "unknown key 'z[^,]*, expected one of"),
        ("[rules]\nw = [{ packd = '(3 h@tp d)' }]", r"rule 'w': dim 0: 'packed' is missing.*instead of 'packd'\?"),
        (
            "[rules]\nw = [{ packed = '(3 h@tp d)', hh = 4, d = 2 }]",
            "rule 'w': dim 0: unknown key 'hh': .* does not name it",
        ),
        ("[rules]\nw = [{ packed = '(3 h@tp d)', h = 2.5, d = 2 }]", "rule 'w': dim 0: h must be an integer, got 2.5"),
        (
            "[rules]\nw = [{ packed = '(3 h@tp d)', h = 4, d = true }]",
            "rule 'w': dim 0: d must be an integer, got True",
        ),
        ("match = 'find'\n[rules]", "match must be one of.*'find'"),
        ("match = ['search']\n[rules]", r"match must be one of.*\['search'\]"),
        ("[rules]\nkernel = 'model'", "rule 'kernel': axes must be a list, got 'model'"),
        ("[rules]\nkernel = [1]", "rule 'kernel': dim 0 must be.*got 1"),
        ("[rules]\nkernel = [[], true]", "rule 'kernel': dim 1 must be.*got True"),
        ("[rules]\nkernel = [[1]]", r"rule 'kernel': axes\[0\].*1"),
        ("[rules]\ndense.kernel = ['model']", "rule 'dense'.*a dot.*quotes"),
        ("[rules]\nkernel = { axes = [], reduced = [] }", "rule 'kernel': unknown key 'reduced'"),
        ("[rules]\nkernel = { axes = [], unreduced = 'x' }", "rule 'kernel': unreduced must be a list, got 'x'"),
        ("[rules]\nkernel = { axes = [], unreduced = [2] }", "rule 'kernel'.*unreduced.*2"),
        ("[mesh]\nshape = [2]\n[rules]", "mesh: 'axis_names' is missing"),
        ("[mesh]\nshape = 2\naxis_names = ['x']\n[rules]", "mesh.shape must be a list, got 2"),
        ("[mesh]\nshape = [2.0]\naxis_names = ['x']\n[rules]", r"mesh: shape\[0\].*2.0"),
        ("[mesh]\nshape = [true]\naxis_names = ['x']\n[rules]", r"mesh: shape\[0\].*True"),
        ("[mesh]\nshape = [2]\naxis_names = ['x']\ndevises = []\n[rules]", "mesh: unknown key 'devises'"),
        ("[[mesh]]\n[rules]", "mesh must be a table"),
    ],
)
def test_what_the_format_does_not_know(text: str, said: str) -> None:
    with pytest.raises(ParseError, match=f"^the rules file.*{said}"):
        read(text)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("[rules]\n'a(b' = []", LayoutError, r"rule 'a\(b' is not a regular expression.*position 1"),
        ("[rules]\nkernel = ['x', 'x']", LayoutError, "rule 'kernel'.*'x'"),
        ("[rules]\nkernel = [['x', '']]", LayoutError, "rule 'kernel'.*empty"),
        ("[mesh]\nshape = [2]\naxis_names = ['y']\n[rules]\nkernel = ['x']", LayoutError, "rule 'kernel'.*\"x\""),
        ("[mesh]\nshape = [0]\naxis_names = ['x']\n[rules]", MeshError, "mesh: shape"),
        ("[mesh]\nshape = [2, 2]\naxis_names = ['x', 'x']\n[rules]", MeshError, "mesh: axis_names"),
        ("[mesh]\nshape = [2]\naxis_names = ['x']\ndevices = ['a']\n[rules]", MeshError, "mesh: devices"),
        (
            "[rules]\nk = { axes = ['x'], uneven = 'cheil' }",
            LayoutError,
            "rule 'k': uneven is 'cheil'.*'ceil', 'chunk'",
        ),
        (
            "default = ['z']\n[mesh]\nshape = [2]\naxis_names = ['x']\n[rules]",
            LayoutError,
            "default.*'z'|default.*\"z\"",
        ),
        (f"[mesh]\nshape = [{2**63}]\naxis_names = ['x']\n[rules]", SizeOverflowError, "mesh: shape"),
    ],
)
def test_what_no_map_takes(text: str, error: type[Exception], said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(error, match=said) as caught:
        LayoutMap.from_toml(path)
    assert type(caught.value) is error
    assert "bad.toml" in str(caught.value)


def test_an_empty_key_names_the_file() -> None:
    with pytest.raises(ParseError, match="the rules file: the key of a rule must be a non-empty string"):
        read("[rules]\n'' = []")


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LayoutMap.from_toml(tmp_path / "missing.toml")
    (tmp_path / "bytes.toml").write_bytes(b"[rules]\n\xff")
    with pytest.raises(ParseError, match=r"bytes\.toml.*byte 8 is not UTF-8"):
        LayoutMap.from_toml(tmp_path / "bytes.toml")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(ParseError, match="not a regular file"):
            LayoutMap.from_toml(path)


def test_labels_that_toml_has_no_word_for() -> None:
    for label in [("a", 1), 1.5, True, 2**63, -(2**63) - 1, "\ud800"]:
        with pytest.raises(LayoutError, match="cannot be written"):
            written(LayoutMap(DeviceMesh((1,), ("x",), [label])))


def test_a_large_mesh_is_written_without_its_labels() -> None:
    layout_map = LayoutMap(DeviceMesh((2**40,), ("x",)))
    assert "devices" not in written(layout_map)
    assert read(written(layout_map)) == layout_map


def test_a_file_that_is_not_open_as_text_is_refused() -> None:
    for read in (LayoutMap.from_toml, Rewrites.from_toml):
        with pytest.raises(TypeError, match=r"file must be open as text, but read\(\) gives bytes"):
            read(io.BytesIO(b"[rules]"))  # type: ignore[arg-type]


def test_a_regular_expression_in_double_quotes_is_told_to_be_in_single_ones() -> None:
    text = '[rules]\n"layers\\.\\d+" = ["tp"]\n'
    with pytest.raises(ParseError, match=r"is not TOML: Unescaped .*at line 2.*write a regular expression in single q"):
        LayoutMap.from_toml(io.StringIO(text))
    assert list(LayoutMap.from_toml(io.StringIO(text.replace('"layers\\.\\d+"', "'layers\\.\\d+'")))) == [
        r"layers\.\d+"
    ]


@pytest.mark.parametrize("word", ["None", "none", "null", "-", "*"])
def test_a_dim_that_is_not_cut_is_an_empty_list(word: str) -> None:
    text = f'[rules]\n"w" = ["tp", "{word}"]\n'
    with pytest.raises(ParseError, match=r"rule 'w': dim 1 is '.*'; write \[\] for a dim that is not cut"):
        LayoutMap.from_toml(io.StringIO(text))
    assert LayoutMap.from_toml(io.StringIO(text.replace(f'"{word}"', "[]"))).rule("w").layout.axes == ("tp", None)
    # An axis may be called so all the same.
    layout_map, written = LayoutMap(DeviceMesh((2, 2), ("tp", word))), io.StringIO()
    layout_map["w"] = ("tp", word)
    layout_map.to_toml(written)
    assert LayoutMap.from_toml(io.StringIO(written.getvalue())) == layout_map


def test_none_in_quotes_is_told_to_be_without_them() -> None:
    with pytest.raises(
        LayoutError, match=r'names axis "None", .*; for a dim that is not cut write None, without quotes'
    ):
        TensorLayout(("tp", "None"), DeviceMesh((2,), ("tp",)))


def test_the_rules_of_the_package_have_names() -> None:
    config = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 2, "vocab_size": 32}
    mesh = DeviceMesh((2,), ("tp",))
    for name in ("hf/llama", "vllm/llama"):
        path = example_rules()[name]
        assert LayoutMap.from_toml(name, mesh, config=config) == LayoutMap.from_toml(path, mesh, config=config)
        layouts, rewrites = read_rules(name, mesh, config=config)
        assert layouts == LayoutMap.from_toml(path, mesh, config=config)
        assert rewrites == Rewrites.from_toml(name, config=config) == Rewrites.from_toml(path, config=config)
    with pytest.raises(FileNotFoundError, match=r"the package has no rules 'hf/lama'; did you mean hf/llama"):
        LayoutMap.from_toml("hf/lama")
    with pytest.raises(LayoutError, match=r"^'vllm/llama': rule '[^/]*': dim 0: the number heads is missing"):
        LayoutMap.from_toml(example_rules()["vllm/llama"], mesh)


def test_a_file_in_the_folder_comes_before_a_name_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hf").mkdir()
    Path("hf/llama").write_text("[rules]\nown = ['tp']")
    assert list(LayoutMap.from_toml("hf/llama")) == ["own"]


def test_an_open_file_is_read_once_for_rules_and_rewrites() -> None:
    layouts, rewrites = read_rules(io.StringIO("[rules]\nw = ['tp']\n[[rewrite]]\nfrom = 'a'\nto = 'w'"))
    assert layouts.rules()["w"].layout == TensorLayout(("tp",))
    assert rewrites == Rewrites([{"from": "a", "to": "w"}])


def test_a_mesh_without_the_axis_is_told_what_it_is_called(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text("[rules]\nw = ['tp', []]\n")
    with pytest.raises(
        LayoutError, match=r"rule 'w': .*names axis \"tp\".*; the file's axis is called tp, as in --mesh tp=4"
    ):
        LayoutMap.from_toml(path, DeviceMesh((4,), ("model",)))
    # A mesh of the file's own is not given by --mesh.
    path.write_text("[mesh]\nshape = [4]\naxis_names = ['model']\n[rules]\nw = ['tp', []]\n")
    with pytest.raises(LayoutError, match=r'names axis "tp", which the mesh does not have; its axes are \["model"\]$'):
        LayoutMap.from_toml(path)


@pytest.mark.parametrize(
    "text",
    [
        "[rules]\nw = ['tp', 3]",
        "[rules]\nw = ['tp', 'tp']",
        "[rules]\nw = [{ packed = '(heads@tp 4)' }]\n[numbers]\nheads = 'num_heads'",
        "[rules]\nw = { axes = ['tp'], uneven = 'x' }",
        "[mesh]\nshape = [0]\naxis_names = ['tp']\n[rules]",
        "default = ['tp', 'tp']\n[rules]",
        "[[rewrite]]\nfrom = 'a.{i}'\nto = { name = 'b', packed = '(heads@tp 4)' }\n[numbers]\nheads = 'num_heads'",
        "[world]\nsize = 0\n[meshes]\nm = { shape = [2], axis_names = ['tp'] }\n[rules]",
        "[world]\nsize = 'h'\n[numbers]\nh = 'heads'\n[meshes]\nm = { shape = [2], axis_names = ['tp'] }\n[rules]",
        "[lists]\na = { stages = ['h'] }\n[numbers]\nh = 'x'\n[meshes]\nm = { shape = [2], axis_names = ['t'] }\n",
        "[lists]\na = { stages = [-1] }\n[meshes]\nm = { shape = [2], axis_names = ['tp'] }\n[rules]",
        "[meshes]\nm = { shape = [2], axis_names = ['tp'] }\n[rules]\nw = { axes = [[]], at = { tp = 'x[0]' } }",
    ],
)
def test_an_error_says_once_where_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(ShardwiseError) as refused:
        read_rules(path, config={} if "numbers" in text else None)
    assert str(refused.value).startswith(repr(str(path)))
    assert str(refused.value).count("rules.toml") == 1
