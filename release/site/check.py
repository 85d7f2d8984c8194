"""Look through the built site: links that lead nowhere, names without an entry, pictures without a text.

python -m release.site.check target/site
"""

from __future__ import annotations

import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .names import public_names

__all__ = ["faults"]


class _Page(HTMLParser):
    """What a page has: the places that can be linked to, where it leads, and what is wrong with it by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[str] = []
        self.faults: list[str] = []
        self.titles = 0
        self.feed(text)
        if self.titles != 1:
            self.faults.append(f"{self.titles} headings of the first level")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note one element."""
        values = dict(attrs)
        self.places |= {value for key in ("id", "name") if (value := values.get(key))}
        self.titles += tag == "h1"
        if tag == "img" and not (values.get("alt") or "").strip():
            self.faults.append(f"the picture {values.get('src')} has no text in its place")
        if tag == "html" and not values.get("lang"):
            self.faults.append("no language is given")
        self.links += [value for key in ("href", "src") if (value := values.get(key)) and tag != "base"]
        loaded = values.get("src") or values.get("href") or ""
        is_loaded = tag in ("script", "link", "img") and values.get("rel") != "canonical"
        if is_loaded and urlsplit(loaded).scheme not in ("", "data"):
            self.faults.append(f"it loads {loaded[:200]}, from a network")


def faults(site: Path) -> list[str]:
    """Give a line for each thing that is wrong with a site."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        # What the server of a site shows instead of a page that is not there; its links are absolute.
        if path.name == "404.html":
            continue
        found += [f"{path.relative_to(site)}: {fault}" for fault in page.faults]
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or not (parts.path or parts.fragment):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                found.append(f"{path.relative_to(site)}: {link} is not there")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].places:
                found.append(f"{path.relative_to(site)}: {link} has no such place")
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    entries = {line.split(" ")[0] for line in inventory.splitlines()}
    found += [f"{name} has no entry" for name in public_names() if name not in entries]
    return found


if __name__ == "__main__":
    site = Path(sys.argv[1])
    complaints = faults(site.resolve())
    pages = sum(1 for _ in site.rglob("*.html"))
    sys.exit("\n".join(complaints) or print(f"{pages} pages, {len(public_names())} names: no fault"))
