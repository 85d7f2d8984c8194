"""Look at the built site, a report and all sorts of pictures in a browser, with the checks of axe-core (WCAG 2.2 AA).

    python -m release.site.look target/site

Light and dark, on a wide and on a narrow window: contrast, texts in the place of pictures, names of links and controls,
the order of headings, regions, what the keyboard reaches. Needs Chromium, and `axe.min.js`, which
`pip install --no-deps axe-playwright-python` brings; says so and ends where one of them is missing.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import shardwise as sw
from tests.browser import PROGRAM, Page, browser
from tests.rules.pages import large_report
from tests.show.test_svg import MADE

__all__ = ["axe", "faults"]

#: What is looked for. Not among them: whether landmarks have different names, of which Material makes some alike.
_RULES = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    "rules": {"landmark-unique": {"enabled": False}},
    "resultTypes": ["violations"],
    "preload": False,
}
_WIDE, _NARROW = 1400, 390
#: On dark pages only what colours change.
_COLOURS = {"runOnly": ["color-contrast", "link-in-text-block"], "resultTypes": ["violations"], "preload": False}
_SCHEMES = [("light", "default", _RULES), ("dark", "slate", _COLOURS)]
#: Of a headless browser Material believes that nobody points at anything, and leaves out what the keyboard needs.
_HAS_POINTER = (
    "{const ask = matchMedia.bind(window);window.matchMedia = query => ask(query === '(hover)' ? 'all' : query);}"
)
#: A page of the site takes the scheme that was chosen, any other page that of the screen.
_SCHEME = "document.body.hasAttribute('data-md-color-scheme') && document.body.setAttribute('data-md-color-scheme', {})"
#: Colours are at once those that a page comes to.
_STILL = (
    "{const style = document.createElement('style'); style.textContent = '*{transition:none!important}';"
    "document.head.append(style)};"
)
#: Material has the keyboard reach blocks that scroll when they have been in the window.
_SEEN = """(async () => {
  for (let at = 0; at <= document.documentElement.scrollHeight; at += 800) {
    scrollTo({ top: at, behavior: 'instant' });
    await new Promise(done => requestAnimationFrame(() => setTimeout(done, 20)));
  }
  scrollTo({ top: 0, behavior: 'instant' });
})()"""
#: How far a page is wider than its window; tables and code scroll by themselves.
_BEYOND = "document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth"
#: What people look for, and a page that must be among the answers.
_SEARCHED = {
    "plan_reshard": "plans.html",
    "grouped-query attention": "guides/reshard.html",
    "FSDP": "checkpoints.html",
    "all-gather": "einsum.html",
    "digest": "digests.html",
    "data loader": "guides/load-a-rank.html",
    "benchmarks": "benchmarks-in-brief.html",
    "consolidation": "coming-from.html",
    "reshard": "guides/reshard.html",
    "merge shards": "guides/reshard.html",
    "zero_to_fp32": "coming-from.html",
    "vLLM sharded state": "rank-files.html",
}
_FOUND = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href).join()"
_RUN = "axe.run(document, {}).then(found => JSON.stringify(found.violations.map(v => [v.id, v.nodes.map(n => [{}])])))"
_NODE = "n.target.join(' '), (n.any[0] || n.all[0] || n.none[0] || {}).message"


def axe() -> str | None:
    """Give the script of axe-core, or `None` where it is not installed."""
    package = importlib.util.find_spec("axe_playwright_python")
    if package is None or package.origin is None:
        return None
    return (Path(package.origin).parent / "axe.min.js").read_text(encoding="utf-8")


def faults(page: Page, path: Path, script: str) -> list[str]:
    """Give a line for each thing that is wrong with a page, each once however it is looked at."""
    found: dict[str, None] = {}
    for width in (_WIDE, _NARROW):
        page.open(path, width)
        page.run(f"{_STILL}{script};0")
        page.run(_SEEN)
        for scheme, theme, rules in _SCHEMES:
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            page.run(_SCHEME.format(json.dumps(theme)))
            answer: list[Any] = json.loads(page.run(_RUN.format(json.dumps(rules), _NODE)))
            found |= {
                f"{path.name}: {rule}, {scheme}: {where}: {why}": None for rule, nodes in answer for where, why in nodes
            }
        if (beyond := page.run(_BEYOND)) > 0:
            found[f"{path.name}: {beyond} pixels of it lie beyond a window of {width}"] = None
        found |= {f"{path.name}: {complaint[:200]}": None for complaint in page.complaints}
        strange = [url for url in page.requests if not url.startswith(("file:", "data:"))]
        found |= {f"{path.name}: it asks {url} over the network": None for url in strange}
    return list(found)


def searched(page: Page, start: Path) -> list[str]:
    """Say for which words the search fails, typed into a page from the disk."""
    missing = []
    for words, place in _SEARCHED.items():
        page.open(start, _WIDE)
        page.press("/")
        page.type(words)
        end = time.monotonic() + 60
        while place not in page.run(_FOUND):
            if time.monotonic() > end:
                missing.append(f"the search for {words} does not find {place}")
                break
            time.sleep(0.1)
    return missing


def main(site: Path) -> int:
    """Look at everything and say what is wrong with it; give the exit status."""
    script = axe()
    if script is None or PROGRAM is None:
        print(f"no {'axe-core' if script is None else 'Chromium'} here: the site is not looked at in a browser")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        report, pictures = Path(folder, "report.html"), Path(folder, "pictures.html")
        large_report(3).save_html(report, "A model")
        drawn = "".join(f"<h2>{name}</h2>{sw.draw(make(), form='html')}" for name, make in MADE.items())
        head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Pictures</title><main><h1>Pictures</h1>'
        pictures.write_text(head + drawn + "</main>", encoding="utf-8")
        pages = [report, pictures, *sorted(path for path in site.rglob("*.html") if path.name != "404.html")]
        with browser(Path(folder, "profile")) as page:
            page.call("Page.addScriptToEvaluateOnNewDocument", source=_HAS_POINTER)
            wrong = 0
            for path in pages:
                found = faults(page, path.resolve(), script)
                wrong += len(found)
                print(*found, sep="\n", end="\n" * bool(found), flush=True)
            found = searched(page, site.resolve() / "index.html")
    print(
        "\n".join(found)
        or f"{len(pages)} pages in a browser, light and dark, wide and narrow, searched: {wrong or 'no'} fault(s)"
    )
    return 1 if wrong or found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
