"""The rows of docs/findings.md: what the installed frameworks do, and what is done here.

Each finding is of the version that is named; what another version does is reported as a skip, or as a failure if it is
the version and does something else. TensorFlow's are in `test_dtensor_tensorflow.py`.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise import LayoutError, MeshError, ParseError, SizeOverflowError
from shardwise.computation import Computation
from shardwise.interop.hlo import parse_hlo
from shardwise.propagate import propagate
from tests.oracle.worker import Worker, raised

JAX = (
    "import jax",
    "from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P",
    "d = jax.devices()",
)
XLA = ("import jax", "from jax._src.lib import xla_client")
SHARDY = (
    *("import jax, re", "import jax._src.interpreters.mlir as mlir", "from jaxlib.mlir import ir, passmanager"),
    "from jaxlib.mlir.dialects import sdy",
    "passes = 'builtin.module(sdy-propagation-pipeline,sdy-close-shardings,func.func("
    "sdy-insert-explicit-reshards{enable-full-version=true},sdy-reshard-to-collectives))'",
    "context = mlir.make_ir_context()",
    "manager = passmanager.PassManager.parse(passes, context=context)",
    "run = lambda module: (manager.run(module.operation), str(module))[1]",
    "read = lambda text: ir.Module.parse(text, context=context)",
    "listed = lambda text: re.findall('sdy.(all_[a-z]+|collective_permute)', run(read(text)))",
)
EXPLICIT = (
    "import jax",
    "from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P",
    "mesh = AbstractMesh((2,), ('x',), axis_types=(AxisType.Explicit,))",
    "x = jax.ShapeDtypeStruct((8,), 'float32', sharding=NamedSharding(mesh, P('x')))",
    "jax.sharding.use_abstract_mesh(mesh).__enter__()",
    "within = lambda function: str(jax.eval_shape(function, x).sharding.spec).replace('PartitionSpec', 'P')",
)
KERAS = ("from keras.distribution import DeviceMesh, LayoutMap, TensorLayout",)
DASK = (
    "import dask.array",
    "import importlib",
    "core = importlib.import_module('dask.array.core')",
    "rechunk = importlib.import_module('dask.array.rechunk')",
)
SAFETENSORS = ("from safetensors.numpy import load, save",)
VERSIONS = {"jax": "0.10.2", "keras": "3.15.1", "dask": "2026.8.0", "safetensors": "0.8.0"}
MESH = sw.DeviceMesh((2,), ("x",))
CUT = sw.TensorLayout(("x",), MESH)


@dataclass(frozen=True)
class Finding:
    """An expression with what goes before it, what the framework gives for it, and the same here."""

    name: str
    package: str
    setup: tuple[str, ...]
    expression: str
    theirs: Any
    ours: Callable[[], Any]
    #: An exception that `ours` raises, or what it gives.
    right: Any


def xla(name: str, text: str, theirs: Any) -> Finding:
    expression = f"str(xla_client.HloSharding.from_string({text!r}))"
    return Finding(name, "jax", XLA, expression, theirs, lambda: parse_hlo(text), ParseError)


def saved(name: str, array: str, theirs: list[Any], right: list[Any]) -> Finding:
    """What is read again after `save`; a copy in C order is what it takes right."""
    expression = f"load(save({{'a': {array}}}))['a'].tolist()"

    def copied() -> Any:
        safetensors = pytest.importorskip("safetensors.numpy")
        view = eval(array, {"np": np})
        return safetensors.load(safetensors.save({"a": np.array(view, order="C")}))["a"].tolist()

    return Finding(name, "safetensors", SAFETENSORS, expression, theirs, copied, right)


def shardy(name: str, op: str, operands: dict[str, str], result: str, ours: Callable[[], Any], right: Any) -> Finding:
    """Give what Shardy's passes list for an op, `%0`, whose operands `%a` and `%b` have these types and axes.

    Its result is of the type `result`, and is the result of the function too.
    """
    given = zip("ab", operands.items(), strict=False)
    taken = ", ".join(
        f"%{letter}: tensor<{kind}> {{sdy.sharding = #sdy.sharding<@mesh, [{axes}]>}}" for letter, (kind, axes) in given
    )
    mesh, first = 'sdy.mesh @mesh = <["x"=2]>', "%0#0" if "%0:2" in op else "%0"
    function = f"func.func @main({taken}) -> tensor<{result}>"
    text = f"{mesh}\n{function} {{\n{op}\nreturn {first} : tensor<{result}>\n}}"
    return Finding(name, "jax", SHARDY, f"listed({text!r})", [], ours, right)


def moved(
    op: str, inputs: list[Any], result: list[int], axes: list[Any], more: Any = (), **attributes: Any
) -> list[str]:
    """Give what must move for an op on two devices, which may have more results."""
    said = {"op": op, "in": [*range(len(inputs))], "out": [[result, "float32"], *more], "attrs": attributes}
    computation = Computation([[shape, "float32"] for shape in inputs], [said], [len(inputs)])
    return [move.kinds for move in propagate(computation, axes, mesh=MESH).moves]


def explicit(name: str, primitive: str, result: list[int], op: str, **attributes: Any) -> Finding:
    """Give the layout of a primitive's result in explicit mode, of 8 elements that are cut in two."""
    expression = f"within(lambda x: jax.lax.{primitive})"
    inputs = [[8], []] if op == "pad" else [[8]]
    axes = [("x",), ()][: len(inputs)]
    ours = partial(moved, op, inputs, result, axes, **attributes)
    return Finding(name, "jax", EXPLICIT, expression, "P('x',)", ours, ["collective-permute over x"])


def squared() -> list[str]:
    """Give what a sum of squares moves."""
    square = {"op": "square", "in": [0], "out": [[[4], "float32"]]}
    zero = {"op": "constant", "in": [], "out": [[[], "float32"]], "attrs": {"value": 0.0}}
    total = {
        "op": "reduce",
        "in": [1, 2],
        "out": [[[], "float32"]],
        "attrs": {"dimensions": [0], "body": "add", "n": 1},
    }
    found = propagate(Computation([[(4,), "float32"]], [square, zero, total], [3]), [("x",)], mesh=MESH)
    return [move.kinds for move in found.moves]


def nans_moved() -> list[str]:
    import ml_dtypes

    values = np.array([0x7F81, 0x7FC1], np.uint16).view(ml_dtypes.bfloat16)
    parts = sw.ShardedArray(CUT.partition((2,)), [values[:1], values[1:]])
    turned = sw.TensorLayout(("x",), sw.DeviceMesh((2,), ("x",), list(MESH.devices[::-1])))
    return [hex(bits) for bits in parts.reshard(turned).numpy().view(np.uint16)]


def boxes_of(*bounds: tuple[int, int]) -> Callable[[], Any]:
    return lambda: sw.Tiling.from_boxes((5,), [[list(pair)] for pair in bounds]).check()


FINDINGS = [
    Finding(
        "jax-empty-shards",
        "jax",
        JAX,
        "[s.replica_id for s in jax.device_put(np.zeros(0), NamedSharding(Mesh(np.array(d[:2]), 'x'), P('x')))"
        ".addressable_shards]",
        [0, 1],
        lambda: CUT.partition((0,)).replica_ids().tolist(),
        [0, 0],
    ),
    Finding(
        "jax-empty-reordered",
        "jax",
        JAX,
        "(lambda s: [s.shard_shape((0, 4))] + [x.data.shape for x in jax.device_put(jax.device_put(np.zeros((0, 4)), "
        "NamedSharding(Mesh(np.array(d[:2]), 'x'), P())), s).addressable_shards])"
        "(NamedSharding(Mesh(np.array([d[1], d[0]]), 'x'), P(None, 'x')))",
        [(0, 2), (0, 4), (0, 4)],
        lambda: [
            sw.TensorLayout((None, "x"), MESH).partition((0, 4)).shard_shape(label) for label in MESH.devices.flat
        ],
        [(0, 2), (0, 2)],
    ),
    Finding(
        "jax-nan-payload",
        "jax",
        (*JAX, "import ml_dtypes", "nan = np.array([0x7F81, 0x7FC1], np.uint16)"),
        "[hex(bits) for bits in np.asarray(jax.device_put(jax.device_put(nan.view(ml_dtypes.bfloat16), "
        "NamedSharding(Mesh(np.array(d[:2]), 'x'), P('x'))), NamedSharding(Mesh(np.array([d[1], d[0]]), 'x'), P('x'))))"
        ".view(np.uint16)]",
        ["0x7fc0", "0x7fc0"],
        nans_moved,
        ["0x7f81", "0x7fc1"],
    ),
    Finding(
        "jax-device-twice",
        "jax",
        JAX,
        "[(s[0].start, s[0].stop) for s in NamedSharding(Mesh(np.array([d[0], d[0]]), 'x'), P('x'))"
        ".devices_indices_map((4,)).values()]",
        [(2, 4)],
        lambda: sw.DeviceMesh((2,), ("x",), ["cpu:0", "cpu:0"]),
        MeshError,
    ),
    Finding(
        "jax-axis-twice",
        "jax",
        JAX,
        "Mesh(np.array(d[:4]).reshape(2, 2), ('x', 'x')).axis_names",
        ("x", "x"),
        lambda: sw.DeviceMesh((2, 2), ("x", "x")),
        MeshError,
    ),
    Finding(
        "jax-negative-dim",
        "jax",
        JAX,
        "[(s[0].start, s[0].stop) for s in NamedSharding(Mesh(np.array(d[:2]), 'x'), P('x'))"
        ".devices_indices_map((-4,)).values()]",
        [(0, -2), (-2, -4)],
        lambda: CUT.partition((-4,)),
        LayoutError,
    ),
    Finding(
        "jax-negative-axis",
        "jax",
        JAX,
        "NamedSharding(AbstractMesh((-2,), ('x',)), P('x')).shard_shape((4,))",
        (-2,),
        lambda: sw.DeviceMesh((-2,), ("x",)),
        MeshError,
    ),
    Finding(
        "jax-fractional-axis",
        "jax",
        JAX,
        "AbstractMesh((2.5,), ('x',)).size",
        2.5,
        lambda: sw.DeviceMesh((2.5,), ("x",)),  # type: ignore[arg-type]
        TypeError,
    ),
    Finding(
        "jax-zero-axis",
        "jax",
        JAX,
        "NamedSharding(AbstractMesh((0,), ('x',)), P('x')).shard_shape((4,))",
        raised("ZeroDivisionError"),
        lambda: sw.DeviceMesh((0,), ("x",)),
        MeshError,
    ),
    Finding(
        "jax-too-many-devices",
        "jax",
        JAX,
        "NamedSharding(AbstractMesh((2**40, 2**40), ('x', 'y')), P(('x', 'y'))).shard_shape((2**60,))",
        raised("RuntimeError"),
        lambda: sw.DeviceMesh((2**40, 2**40), ("x", "y")),
        SizeOverflowError,
    ),
    Finding(
        "jax-constraint-dropped",
        "jax",
        JAX,
        "[s.data.size for s in jax.jit(lambda a: jax.lax.with_sharding_constraint(a + 1, NamedSharding("
        "Mesh(np.array(d[:4]), 'x'), P('x'))))(np.arange(9)).addressable_shards]",
        [9, 9, 9, 9],
        lambda: sw.TensorLayout(("x",), sw.DeviceMesh((4,), ("x",))).partition((9,)),
        LayoutError,
    ),
    xla("xla-device-twice", "{devices=[2]0,0}", "{devices=[2]0,0}"),
    xla("xla-unknown-device", "{devices=[2]0,7}", "{devices=[2]0,7}"),
    xla("xla-transposed-twice", "{devices=[4]<=[2,2]T(0,0)}", "{devices=[4]<=[2,2]T(0,0)}"),
    xla("xla-no-tiles", "{devices=[0]<=[0]}", "{devices=[0]<=[0]}"),
    xla("xla-negative-tiles", "{devices=[-2]0,1}", raised("MemoryError")),
    Finding(
        "keras-axis-twice-in-a-layout",
        "keras",
        KERAS,
        "TensorLayout(('x', 'x'), DeviceMesh((2,), ['x'], ['cpu:0', 'cpu:1'])).axes",
        ("x", "x"),
        lambda: sw.TensorLayout(("x", "x"), MESH),
        LayoutError,
    ),
    Finding(
        "keras-axis-twice-in-a-mesh",
        "keras",
        KERAS,
        "DeviceMesh((2, 1), ['x', 'x'], ['cpu:0', 'cpu:1']).axis_names",
        ["x", "x"],
        lambda: sw.DeviceMesh((2, 1), ("x", "x")),
        MeshError,
    ),
    Finding(
        "keras-device-twice",
        "keras",
        KERAS,
        "DeviceMesh((2,), ['x'], ['cpu:0', 'cpu:0']).devices.tolist()",
        ["cpu:0", "cpu:0"],
        lambda: sw.DeviceMesh((2,), ("x",), ["cpu:0", "cpu:0"]),
        MeshError,
    ),
    Finding(
        "keras-no-devices",
        "keras",
        KERAS,
        "DeviceMesh((0,), ['x'], []).shape",
        (0,),
        lambda: sw.DeviceMesh((0,), ("x",)),
        MeshError,
    ),
    Finding(
        "keras-bad-rule",
        "keras",
        (*KERAS, "rules = LayoutMap(None)", "rules['('] = (None,)"),
        "rules['dense/kernel']",
        raised("error"),
        lambda: sw.LayoutMap().__setitem__("(", (None,)),
        LayoutError,
    ),
    Finding(
        "keras-earlier-rule",
        "keras",
        (*KERAS, "rules = LayoutMap(None)", "rules['conv2d.*kernel'] = (None,)"),
        "rules['my_model/conv2d_123/kernel']",
        None,
        lambda: earlier_rule()["my_model/conv2d_123/kernel"],
        sw.TensorLayout((None,)),
    ),
    Finding(
        "keras-list",
        "keras",
        (*KERAS, "rules = LayoutMap(None)"),
        "rules.__setitem__('kernel', [None, 'x'])",
        raised("ValueError"),
        lambda: list_as_value()["kernel"],
        sw.TensorLayout((None, "x")),
    ),
    Finding(
        "keras-in",
        "keras",
        KERAS,
        "'nothing' in LayoutMap(None)",
        True,
        lambda: "nothing" in sw.LayoutMap(),
        False,
    ),
    Finding(
        "keras-get",
        "keras",
        KERAS,
        "LayoutMap(None).get('nothing', 7)",
        None,
        lambda: sw.LayoutMap().get("nothing", 7),
        7,
    ),
    Finding(
        "dask-negative-chunk",
        "dask",
        DASK,
        "dask.array.from_array(np.arange(5), chunks=((2, -1, 4),)).compute(scheduler='sync').tolist()",
        [0, 1, 1, 2, 3, 4],
        boxes_of((0, 2), (1, 5)),
        LayoutError,
    ),
    Finding(
        "dask-negative-size",
        "dask",
        DASK,
        "core.normalize_chunks(-2, shape=(5,))",
        ((-1,),),
        boxes_of((0, -1)),
        LayoutError,
    ),
    Finding(
        "dask-negative-dim",
        "dask",
        DASK,
        "core.normalize_chunks(3, shape=(-5,))",
        ((1,),),
        lambda: CUT.partition((-5,)),
        LayoutError,
    ),
    saved("safetensors-stepped", "np.arange(6)[::2]", [0, 1, 2], [0, 2, 4]),
    saved("safetensors-columns", "np.arange(6).reshape(2, 3)[:, 1:]", [[1, 2], [3, 4]], [[1, 2], [4, 5]]),
    saved("safetensors-transposed", "np.arange(6).reshape(2, 3).T", [[0, 1], [2, 3], [4, 5]], [[0, 3], [1, 4], [2, 5]]),
    shardy(
        "shardy-top-k-of-all",
        "%0:2 = stablehlo.custom_call @mhlo.topk(%a) : (tensor<4xf32>) -> (tensor<4xf32>, tensor<4xi32>)",
        {"4xf32": '{"x"}'},
        "4xf32",
        partial(moved, "top_k", [[4]], [4], [("x",)], [[[4], "int32"]]),
        ["collective-permute over x"],
    ),
    shardy(
        "shardy-eigh",
        "%0:2 = stablehlo.custom_call @Eigh(%a) : (tensor<4x4xf32>) -> (tensor<4x4xf32>, tensor<4xf32>)",
        {"4x4xf32": '{"x"}, {}'},
        "4x4xf32",
        partial(moved, "eigh", [[4, 4]], [4, 4], [("x", None)], [[[4], "float32"]]),
        ["collective-permute over x"],
    ),
    shardy(
        "shardy-window",
        "%0 = stablehlo.convolution(%a, %b) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f], "
        "window = {stride = [1], pad = [[1, 2]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : "
        "(tensor<2x8x3xf32>, tensor<4x3x5xf32>) -> tensor<2x8x5xf32>",
        {"2x8x3xf32": "{}, {}, {}", "4x3x5xf32": '{"x"}, {}, {}'},
        "2x8x5xf32",
        partial(
            moved,
            "convolution",
            [[2, 8, 3], [4, 3, 5]],
            [2, 8, 5],
            [(None, None, None), ("x", None, None)],
            **{"lhs_spec": ["b", 0, "f"], "rhs_spec": [0, "i", "o"], "out_spec": ["b", 0, "f"]},
            **{"window_strides": [1], "padding": [[1, 2]], "lhs_dilation": [1], "rhs_dilation": [1]},
            **{"feature_group_count": 1, "batch_group_count": 1},
        ),
        ["collective-permute over x"],
    ),
    shardy(
        "shardy-square",
        "%1 = chlo.square %a : tensor<4xf32> -> tensor<4xf32>\n%2 = stablehlo.constant dense<0.0> : tensor<f32>\n"
        "%0 = stablehlo.reduce(%1 init: %2) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, "
        "tensor<f32>) -> tensor<f32>",
        {"4xf32": '{"x"}'},
        "f32",
        squared,
        ["all-reduce over x"],
    ),
    explicit("explicit-reverse", "rev(x, (0,))", [8], "reverse", dimensions=[0]),
    explicit("explicit-slice", "slice(x, (2,), (8,))", [6], "slice", start_indices=[2], limit_indices=[8], strides=[1]),
    explicit(
        "explicit-pad",
        "pad(x, 0.0, [(2, 0, 0)])",
        [10],
        "pad",
        **{"edge_padding_low": [2], "edge_padding_high": [0], "interior_padding": [0]},
    ),
]


def earlier_rule() -> sw.LayoutMap:
    layout_map = sw.LayoutMap()
    layout_map["conv2d.*kernel"] = (None,)
    return layout_map


def list_as_value() -> sw.LayoutMap:
    layout_map = sw.LayoutMap()
    layout_map["kernel"] = [None, "x"]
    return layout_map


@pytest.fixture(scope="module")
def frameworks() -> Iterator[Worker]:
    worker = Worker("tests.oracle.worker_code")
    yield worker
    worker.stop()


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.name)
def test_findings(frameworks: Worker, finding: Finding) -> None:
    if isinstance(finding.right, type):
        with pytest.raises(finding.right):
            finding.ours()
    else:
        assert finding.ours() == finding.right
    check_theirs(
        frameworks, finding.package, finding.setup, finding.expression, lambda answer: answer == finding.theirs
    )


def check_theirs(
    frameworks: Worker, package: str, setup: tuple[str, ...], expression: str, holds: Callable[[Any], bool]
) -> None:
    """Ask the framework, if it is there, and is the version that the page is about."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    answer = frameworks.ask([[*setup, expression]])[0]
    if not holds(answer) and version != VERSIONS[package]:
        pytest.skip(f"{package} {version} gives {answer!r}, the page is about {VERSIONS[package]}")
    assert holds(answer), answer


@pytest.mark.heavy
def test_safetensors_reads_what_lies_beyond_an_array(frameworks: Worker) -> None:
    """Of a reversed view the last element is at its data pointer; what follows it is other memory."""
    array = "np.arange(1000)[::-1]"
    expression = f"load(save({{'a': {array}}}))['a'].tolist()"
    backwards = list(range(999, -1, -1))
    right = [999, *backwards[1:]]
    assert np.arange(1000)[::-1].tolist() == right
    check_theirs(
        frameworks,
        "safetensors",
        SAFETENSORS,
        expression,
        lambda answer: answer != right and answer[0] == 999 and sorted(answer) != sorted(right),
    )
