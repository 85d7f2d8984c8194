"""Make the pictures of the documentation that `shardwise.draw` draws: docs/pictures/*.svg.

python docs/pictures/make.py
"""

import functools
import runpy
from collections.abc import Iterator
from pathlib import Path

import shardwise as sw
from shardwise.propagate import LocalEinsum


def pictures() -> Iterator[tuple[str, str]]:
    """Give the name and the text of each picture, the same each time."""
    small, eight = sw.DeviceMesh((2, 2), ("x", "y")), sw.DeviceMesh((2, 4), ("data", "model"))
    one, other = (sw.TensorLayout((axes, None), small) for axes in (("x", "y"), ("y", "x")))
    yield "axis-order.svg", sw.draw(one, (8, 8), after=other)
    yield "wide.svg", sw.draw(sw.TensorLayout((None, "tp"), sw.DeviceMesh((8,), ("tp",))), (4096, 14336))
    yield "replicas.svg", sw.draw(sw.TensorLayout(("model",), eight), (4096,))
    yield "layout.svg", sw.draw(sw.TensorLayout((None, "model"), eight))
    yield "mesh.svg", sw.draw(sw.DeviceMesh((16, 16), ("data", "model")))
    before, after = sw.TensorLayout(("data", "model"), eight), sw.TensorLayout((None, "model"), eight)
    yield "plan.svg", sw.draw(sw.plan_reshard(before.partition((6, 8)), after.partition((6, 8))))
    yield "tutorial-mesh.svg", sw.draw(sw.DeviceMesh((2, 4), ("dp", "tp")))
    four = sw.DeviceMesh((4,), ("tp",))
    rows, columns = (sw.TensorLayout(axes, four) for axes in (("tp", None), (None, "tp")))
    yield "tutorial-plan.svg", sw.draw(sw.plan_reshard(rows.partition((8, 8)), columns.partition((8, 8))))
    for name, found in einsums():
        yield f"einsum-{name}.svg", sw.draw(found)
    for name, ranks in (("qkv-4.svg", 4), ("qkv.svg", 16)):
        dim = sw.packed.qkv(64, 8, 128, "tp")
        mesh = sw.DeviceMesh((ranks,), ("tp",), [f"rank {i}" for i in range(ranks)])
        yield name, sw.draw(sw.TensorLayout((dim, None), mesh), (10240, 8192))
    yield "palette.svg", runpy.run_path(str(Path(__file__).with_name("palette.py")))["picture"]()


def einsums() -> Iterator[tuple[str, LocalEinsum]]:
    """Give the einsums of the page about them."""
    mesh = sw.DeviceMesh((2, 4), ("dp", "tp"))
    up, down = [(32, 2048, 4096), (4096, 14336)], [(32, 2048, 14336), (14336, 4096)]
    whole, rows, columns = ("dp", None, None), ("tp", None), (None, "tp")
    ask = functools.partial(sw.einsum, mesh=mesh, dtype="bfloat16")
    yield "column", ask("bsd,df->bsf", x=whole, w=columns, shapes=up)
    yield "row", ask("bsf,fd->bsd", x=("dp", None, "tp"), w=rows, shapes=down)
    yield "fsdp", ask("bsd,df->bsf", x=whole, w=("dp", "tp"), shapes=up)
    yield "sequence", ask("bsf,fd->bsd", x=("dp", None, "tp"), w=rows, shapes=down, out=("dp", "tp", None))
    tokens = [(4096, 8, 640), (4096, 1024)]
    yield "experts", sw.einsum("tec,td->ecd", mask=whole, x=("dp", None), shapes=tokens, mesh=mesh, out=whole)
    heads = ("dp", None, "tp", None)
    yield "attention", ask("bshk,bthk->bhst", q=heads, k=heads, shapes=[(32, 2048, 32, 128)] * 2)


if __name__ == "__main__":
    for name, text in pictures():
        Path(__file__).with_name(name).write_text(text, encoding="utf-8")
