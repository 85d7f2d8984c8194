"""`draw`: the picture of anything that says who holds what, as SVG, HTML or text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from .._arguments import sizes_of
from .._text import shown
from ..errors import LayoutError
from ..layout import TensorLayout, UnevenRule
from ..mesh import DeviceMesh
from ..tiling import Tiling
from .html import html_of
from .picture import Picture
from .svg import svg_of
from .text import text_of
from .views import layout_picture, mesh_picture, tilings_picture

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["draw", "notebook_html", "notebook_svg", "terminal_text"]

_FORMS: dict[str, Callable[[Picture], str]] = {"svg": svg_of, "html": html_of, "text": text_of}


def draw(
    what: Any,
    shape: Sequence[int] | None = None,
    *,
    after: Tiling | TensorLayout | None = None,
    uneven: UnevenRule = "even",
    dtype: npt.DTypeLike | None = None,
    form: Literal["svg", "html", "text"] = "svg",
) -> str:
    """Draw who holds which part of a tensor, before and after a change if there is one.

    Args:
        what: what to draw: a mesh, a layout, a partition or another tiling, a plan, a sharded array, a report, a
            deployment.
        shape: the shape of the tensor of a layout; without it its mesh is drawn, with the shard of each device.
        after: a second partition, tiling or layout of the same shape, drawn next to or below the first.
        uneven: how layouts cut dims that do not divide.
        dtype: the dtype of the tensor of a plan, whose picture has bytes; by default `"float32"`.
        form: `"svg"`, a picture that stands alone; `"html"`, the same with a table of what it shows, for a web page;
            `"text"`, for a terminal of 80 columns.

    Returns:
        The picture as text, the same each time. A rectangle stands for a shard and is as large as its part of the
        tensor; it names the devices that hold it. The ranges of the elements are along each side. A colour, or a colour
        with a pattern, stands for one shard: replicas share it, and no two shards look alike, even to a colour-blind
        reader. More than 32 shards have no colours; more than 256 are grouped into blocks of neighbours, with their
        number. A tensor of more than two dims is drawn as slices over two of those that are cut; in a packed partition
        each shard has a row, with its pieces at their places; if there are more than 32 shards, neighbours share a
        row. Shades of grey show how many bytes a plan sends from each holder to each.

    Raises:
        LayoutError: if a shape is given twice, or has another rank; if the two have different shapes; if the layout
            has no mesh; if `dtype` is given for anything but a plan.
        TypeError: if `what` is anything else.

    In a notebook these objects show these pictures by themselves.

    >>> mesh = DeviceMesh((2, 2), ("x", "y"))
    >>> picture = draw(TensorLayout(("x", None), mesh), (4, 4), after=TensorLayout((None, "x"), mesh))
    >>> picture.startswith("<svg ") and "cpu:0,1" in picture
    True
    >>> print(draw(TensorLayout(("x", None), mesh), (4, 6), form="text"))
    ('x', None)
    4 × 6 on x=2, y=2: 2 shards, each on 2 devices
    ↓ dim 0: 4, cut in 2 by x
    → dim 1: 6, not cut
                   0:6
         ┌──────────────────────┐
     0:2 │ cpu:0,1 · 2 replicas │
         ├──────────────────────┤
     2:4 │ cpu:2,3 · 2 replicas │
         └──────────────────────┘
    """
    if not isinstance(form, str) or form not in _FORMS:
        raise LayoutError(f"form is {shown(form)}; it must be one of {', '.join(map(repr, _FORMS))}")
    return _FORMS[form](_picture(what, shape, after, uneven, dtype))


def _picture(what: Any, shape: Sequence[int] | None, after: Any, uneven: UnevenRule, dtype: Any) -> Picture:
    of_dtype = None if dtype is None else getattr(type(what), "_picture_of", None)
    if of_dtype is not None:
        in_bytes: Picture = of_dtype(what, dtype)
        return in_bytes
    if dtype is not None:
        raise LayoutError(f"dtype is {shown(dtype)}, but the picture of a {type(what).__name__} takes no dtype")
    if after is None and not isinstance(what, (Tiling, TensorLayout)):
        if shape is not None:
            raise LayoutError(f"shape is {shown(shape)}, but a {type(what).__name__} takes no shape")
        if isinstance(what, DeviceMesh):
            return mesh_picture(what)
        # Plans, arrays and reports make their own pictures: their modules are above this one.
        own = getattr(type(what), "_picture", None)
        if own is not None:
            picture: Picture = own(what)
            return picture
    if after is None and shape is None and isinstance(what, TensorLayout):
        return layout_picture(what, what.require_mesh("draw"))
    first = _tiling("what", what, shape, uneven)
    if after is None:
        return tilings_picture([first], [""])
    second = _tiling("after", after, None if isinstance(after, Tiling) else first.shape, uneven)
    if second.shape != first.shape:
        raise LayoutError(
            f"after is of shape {shown(second.shape)}, but the layout given as what is of shape {shown(first.shape)}; "
            "they must be equal"
        )
    return tilings_picture([first, second], ["before", "after"])


def _tiling(argument: str, what: Any, shape: Sequence[int] | None, uneven: UnevenRule) -> Tiling:
    if isinstance(what, Tiling):
        if shape is not None and sizes_of("shape", shape) != what.shape:
            raise LayoutError(f"shape is {shown(shape)}, but {argument} is of shape {shown(what.shape)}")
        return what
    if not isinstance(what, TensorLayout):
        raise TypeError(
            f"{argument} must be a layout, a partition or another tiling"
            + (", a mesh, a plan, a sharded array or a report" if argument == "what" else "")
            + f", got {type(what).__name__}"
        )
    if shape is None:
        raise LayoutError(f"shape is needed to draw {argument} next to another; without it a layout is drawn by itself")
    return what.partition(shape, uneven)


def notebook_svg(what: Any) -> str | None:
    """Return the picture of what a notebook shows, or `None` if it has none: a layout without a mesh."""
    return None if _is_unbound(what) else draw(what)


def notebook_html(what: Any) -> str | None:
    """Return the picture of what a notebook shows as HTML, or `None` if it has none."""
    return None if _is_unbound(what) else draw(what, form="html")


def terminal_text(what: Any) -> str | None:
    """Return the picture of what a terminal shows, or `None` if it has none."""
    return None if _is_unbound(what) else draw(what, form="text").rstrip()


def _is_unbound(what: Any) -> bool:
    return isinstance(what, TensorLayout) and what.device_mesh is None
