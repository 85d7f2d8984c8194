"""What the pages of docs/ need to become a site: links out of docs/, help, notebooks, schemas, a list for machines."""

from __future__ import annotations

import argparse
import base64
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "command_line",
    "llms_text",
    "notebook_page",
    "on_config",
    "on_files",
    "on_page_markdown",
    "on_post_page",
    "outward",
]

ROOT = Path(__file__).parents[2]
_TEST = re.compile(r"(?<=<code>)[\w./]+::\w+(?=</code>)")
_SVG = re.compile(r"<svg .*?</svg>", re.DOTALL)
_NOTEBOOK = re.compile(r"(?<=\]\()(?P<path>[./]*notebooks/[-\w]+)\.ipynb(?=\))")
_LINK = re.compile(r"(?<=\]\()(?P<up>(?:\.\./)+)(?P<path>[^)#\s]+)")


def on_config(config: Any) -> Any:
    """Have the foot of each page name the version that it is of; MkDocs calls it by its name."""
    from shardwise import __version__

    config["copyright"] = f"shardwise {__version__}"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each notebook, the package's JSON Schemas, and `llms.txt`; MkDocs calls it by its name."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / "python" / "shardwise" / "schemas").glob("*.json")):
        files.append(File.generated(config, f"schemas/{path.name}", content=path.read_text(encoding="utf-8")))
    files.append(File.generated(config, "llms.txt", content=llms_text(config["nav"], Path(config["docs_dir"]))))

    for path in sorted(Path(config["docs_dir"], "notebooks").glob("*.ipynb")):
        place = f"notebooks/{path.stem}.md"
        files.append(File.generated(config, place, content=notebook_page(path)))
    return files


def llms_text(menu: list[Any], docs: Path) -> str:
    """Give the list of pages for programs that read: each with its title, its place and its first sentence."""
    lines = [
        "# shardwise",
        "",
        "> Exact shard arithmetic for any array on any mesh, and checkpoints cut any other way.",
    ]
    for entry in menu:
        ((title, inside),) = entry.items()
        pages = [(title, inside)] if isinstance(inside, str) else list(_pages_of(inside))
        lines += ["", f"## {title}", ""]
        for name, place in pages:
            text = f"- [{name}]({place.removesuffix('.md')}.html)"
            path = docs / place
            said = _first_sentence(path.read_text(encoding="utf-8")) if path.exists() else ""
            lines.append(f"{text}: {said}" if said else text)
    return "\n".join([*lines, ""])


def _pages_of(inside: list[Any]) -> Iterator[tuple[str, str]]:
    """The pages of a part of the menu, with those of its parts; one without a title has its own."""
    for entry in inside:
        if isinstance(entry, str):
            yield entry.partition(".")[0], entry
            continue
        for title, value in entry.items():
            if isinstance(value, str):
                yield title, value
            else:
                yield from _pages_of(value)


def _first_sentence(markdown: str) -> str:
    """The first sentence of a page's text, without its marks."""
    for paragraph in markdown.split("\n\n"):
        text = " ".join(paragraph.split())
        if text and text[0] not in "#|`!<-:":
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("**", "")
            return re.split(r"(?<=[.!?])\s", plain)[0]
    return ""


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrite a page before it becomes HTML; MkDocs calls it by its name."""
    text = outward(_NOTEBOOK.sub(r"\g<path>.md", markdown), page.file.src_uri, config["repo_url"])
    return text.replace("<!-- the help of each command -->", command_line())


def on_post_page(output: str, **_: Any) -> str:
    """Change the HTML of a page; MkDocs calls it by its name."""
    # Else Material asks the host of the repository, over the network, how many have marked it with a star.
    output = output.replace(' data-md-component="source"', "")
    # A long name in a cell would make its table too wide to read: it may break between its words.
    output = _TEST.sub(lambda found: re.sub("/|::|_", r"\g<0><wbr>", found[0]), output)
    # And its search is a dialog without a name.
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


def outward(markdown: str, place: str, repository: str) -> str:
    """Let links to files of the repository outside docs/ lead to where it is kept; what is not there is an error."""

    def link(found: re.Match[str]) -> str:
        target = (ROOT / "docs" / place).parent.joinpath(found[0]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return found[0]
        if not target.exists():
            raise FileNotFoundError(f"docs/{place} links to {found[0]}, which is not there")
        return f"{repository}/blob/main/{target.relative_to(ROOT).as_posix()}"

    return _LINK.sub(link, markdown)


def command_line() -> str:
    """Give the help of each command, as `--help` prints it on 100 columns."""
    from shardwise.cli.arguments import make_parser

    parser = make_parser()
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    parts = []
    for name, command in commands.choices.items():
        command.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)
        parts.append(f"## shardwise {name}\n\n```text\n{command.format_help().rstrip()}\n```\n")
    return "\n".join(parts)


def notebook_page(path: Path) -> str:
    """Give a notebook, with what its cells showed when they were run, as a page."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "text/html" in data:
                parts.append(_SVG.sub(_as_image, "".join(data["text/html"])))
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    parts.append(f"This page is a notebook: [{path.name}]({path.name}) is its file, which a test runs.")
    return "\n\n".join(parts) + "\n"


def _as_image(svg: re.Match[str]) -> str:
    """A picture as an image, which is light or dark as its page is."""
    title = re.search(r"<title[^>]*>(.*?)</title>", svg[0], re.DOTALL)
    alternative = html.unescape(title[1]) if title else "a picture"
    data = base64.b64encode(svg[0].encode()).decode()
    return f'<p><img alt="{html.escape(alternative)}" src="data:image/svg+xml;base64,{data}"></p>'
