"""`shardwise explore`: a page on which a mesh, a layout and an operation are changed, and the answers follow.

A small server of this machine alone makes the page. It computes with the library, so there is one arithmetic.
"""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from .._text import counted
from ..errors import ParseError, ShardwiseError
from ..interop import translate
from ..layout import TensorLayout
from ..propagate.einsum import einsum
from ..reshard.plan import plan_reshard
from ..rules.page import page_around
from ..show.canvas import escaped
from ..show.draw import draw
from .notation import parse_dtype, parse_layout, parse_mesh, parse_shape
from .show import summary_of
from .terminal import Screen, as_options

__all__ = ["make_server", "page_for", "run_explore"]

HOST = "127.0.0.1"
#: Longer questions are refused: no field of the page needs so much.
LONGEST_QUERY = 8192
#: The most devices of which a page has text about each.
MOST_DEVICES = 4096

#: Each field with its label, its first value, and what stands below it.
FIELDS: dict[str, tuple[str, str, str]] = {
    "mesh": ("Mesh", "data=2,model=4", "axes and sizes, major first"),
    "shape": ("Shape", "8,16", "the sizes of the dims"),
    "layout": (
        "Layout",
        "data,model",
        "for each dim: the axis that cuts it, several as in data+model, - for none; parts as in (3 h=2@model d=4)",
    ),
    "uneven": ("Uneven rule", "even", "how a dim that does not divide is cut"),
    "dtype": ("Dtype", "float32", "for the bytes"),
    "after": ("New layout", "-,model+data", "to see what must move to get it; may be empty"),
    "einsum": ("Operation", "bd,df->bf", "x @ w is bd,df->bf, with a letter for each dim; may be empty"),
    "x": ("Layout of x", "data,model", "of the first operand"),
    "w": ("Layout of w", "model,-", "of the second operand"),
    "shapes": ("Shapes of x and w", "32,64 64,128", "with a space between them"),
}
UNEVEN = ("even", "ceil", "chunk", "balanced", "floor")


def page_for(asked: Mapping[str, str]) -> str:
    """Return the page with the answers to what its fields ask.

    Args:
        asked: the values of the fields, by their names in `FIELDS`; those left out have their first values.

    >>> page = page_for({"mesh": "x=2", "shape": "4,6", "layout": "x,-"})
    >>> "2 shards of 2 x 6, each on one device" in page, page.count("<svg")
    (True, 1)
    >>> 'class="bad"' in page_for({"mesh": "x=2", "shape": "4", "layout": "y"})
    True
    """
    values = {name: asked.get(name, first) for name, (_, first, _) in FIELDS.items()}
    parts = (
        ("Shards", ("mesh", "shape", "layout", "uneven", "dtype"), _shards),
        ("In other dialects", (), _dialects),
        ("To change to a new layout", ("after",), _change),
        ("What an operation moves", ("einsum", "shapes", "x", "w"), _operation),
    )
    said: set[str] = set()
    sections = "\n".join(
        f'<section>\n<h2>{heading}</h2>\n<div class="tools">{"".join(_field(name, values[name]) for name in names)}'
        f'</div>\n<div class="scroll answer" tabindex="0" role="region" aria-label="{heading}" aria-live="polite">'
        f"{_answered(answer, values, said)}</div>\n</section>"
        for heading, names, answer in parts
    )
    return page_around(
        "shardwise explore",
        "Change a field, and the answers follow. Each field takes what the command shardwise takes.",
        f'<form action="/" method="get">\n{sections}\n<p class="tools no-js"><button>Answer</button></p>\n</form>\n'
        '<p id="trouble" role="status"></p>',
        script=(files(__package__) / "explore.js").read_text(encoding="utf-8"),
    )


def _field(name: str, value: str) -> str:
    label, _, about = FIELDS[name]
    if name == "uneven":
        rules = UNEVEN if value in UNEVEN else (value, *UNEVEN)
        options = "".join(f"<option{' selected' if rule == value else ''}>{escaped(rule)}</option>" for rule in rules)
        control = f'<select name="{name}" aria-describedby="about-{name}">{options}</select>'
    else:
        control = (
            f'<input name="{name}" value="{escaped(value)}" aria-describedby="about-{name}" '
            'autocomplete="off" autocapitalize="off" spellcheck="false">'
        )
    return f'<label>{label}<br>{control}<br><span class="quiet" id="about-{name}">{escaped(about)}</span></label>'


def _answered(answer: Callable[[Mapping[str, str]], str], values: Mapping[str, str], said: set[str]) -> str:
    """Return an answer as HTML, or the message of its error, unless that is said already."""
    try:
        return answer(values)
    except (ShardwiseError, TypeError, ValueError) as error:
        message = as_options(str(error))
    except MemoryError:
        message = "There is not enough memory for that."
    if message in said:
        return '<p class="quiet">There is no answer: the error is above.</p>'
    said.add(message)
    return f'<p class="bad">{escaped(message)}</p>'


@contextmanager
def _field_of(name: str) -> Iterator[None]:
    """Have errors begin with the label of their field."""
    try:
        yield
    except (ShardwiseError, TypeError, ValueError) as error:
        label, message = FIELDS[name][0], str(error)
        is_named = message.lower().startswith(f"{label.lower()} ")
        raise ParseError(message if is_named else f"{label}: {message}") from None


def _layout(values: Mapping[str, str], name: str, shape: Sequence[int]) -> TensorLayout:
    with _field_of("mesh"):
        mesh = parse_mesh(values["mesh"])
        if mesh.size > MOST_DEVICES:
            raise ParseError(f"{mesh.size:,} devices; the page shows {MOST_DEVICES:,} at most")
    with _field_of(name):
        return TensorLayout(parse_layout(values[name], len(shape)).axes, mesh)


def _partition(values: Mapping[str, str], name: str) -> Any:
    uneven: Any = values["uneven"]
    shape = parse_shape(values["shape"])
    layout = _layout(values, name, shape)
    with _field_of(name):
        return layout.partition(shape, uneven)


def _shards(values: Mapping[str, str]) -> str:
    partition = _partition(values, "layout")
    bits = parse_dtype(values["dtype"]) if values["dtype"].strip() else None
    return f"<p>{escaped(summary_of(partition, bits))}</p>\n{draw(partition)}"


def _dialects(values: Mapping[str, str]) -> str:
    rows = (
        f'<tr><th scope="row">{escaped(dialect)}</th><td class="code">{escaped(text)}</td></tr>'
        for dialect, text in translate(_layout(values, "layout", parse_shape(values["shape"]))).items()
    )
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def _change(values: Mapping[str, str]) -> str:
    if not values["after"].strip():
        return "<p>There is no new layout.</p>"
    plan = plan_reshard(_partition(values, "layout"), _partition(values, "after"))
    return _lines(plan.explain(values["dtype"].strip() or "float32"))


def _operation(values: Mapping[str, str]) -> str:
    if not values["einsum"].strip():
        return "<p>There is no operation.</p>"
    shapes = [parse_shape(text) for text in values["shapes"].split()]
    inputs, arrow, _ = values["einsum"].partition("->")
    operands = inputs.count(",") + 1
    if arrow and len(shapes) != operands:
        raise ParseError(
            f"{FIELDS['shapes'][0]}: there are {len(shapes)}, but the operation has {counted(operands, 'operand')}"
        )
    names = ("x", "w")[: len(shapes)]
    layouts: dict[str, Any] = {name: _layout(values, name, shape) for name, shape in zip(names, shapes, strict=False)}
    found = einsum(values["einsum"].strip(), shapes=shapes, dtype=values["dtype"].strip() or "float32", **layouts)
    return _lines(found.explain()) + draw(found)


def _lines(text: str) -> str:
    return "".join(f"<p>{escaped(line)}</p>" for line in text.splitlines() if line.strip())


class _Handler(BaseHTTPRequestHandler):
    """Serves the page to requests from this machine, and refuses all others."""

    server_version, sys_version = "shardwise", ""

    def do_GET(self) -> None:
        port = self.connection.getsockname()[1]
        # A page of another site may lead the browser here under a name of its own (DNS rebinding).
        if self.headers.get("Host") not in {f"{HOST}:{port}", f"localhost:{port}"}:
            self.send_error(421, "this server answers for 127.0.0.1 and localhost only")
            return
        url = urlsplit(self.path)
        if url.path != "/":
            self.send_error(404, "there is one page, /")
        elif len(url.query) > LONGEST_QUERY:
            self.send_error(414, f"the question is longer than {LONGEST_QUERY} characters")
        else:
            asked = dict(parse_qsl(url.query, keep_blank_values=True))
            page = page_for(asked).encode("utf-8", "replace")
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(page)

    def log_message(self, *_: Any) -> None:
        """Do nothing: requests are not logged to the terminal."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that left before its answer came."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def make_server(port: int = 0) -> ThreadingHTTPServer:
    """Return the page's server, for this machine alone; port 0 stands for any free port."""
    if not 0 <= port < 1 << 16:
        raise ParseError(f"--port {port} is not a port; it must be from 0 to 65535")
    try:
        return _Server((HOST, port), _Handler)
    except OSError as error:
        raise ParseError(f"--port {port}: {error.strerror}; without --port a free one is taken") from None


def run_explore(screen: Screen, options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C, and give the exit status."""
    with make_server(options.port) as server:
        url = f"http://{HOST}:{server.server_address[1]}/"
        screen.write((url, "bold"), "  for this machine only; Ctrl-C ends it")
        if not options.no_browser:
            webbrowser.open(url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
