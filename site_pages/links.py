"""The links of a built site: each leads to a file that exists, and to an element of it that exists."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ADDRESSES = ("href", "src", "srcset")


class Page(HTMLParser):
    """The links and the names of elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []  # tag, address
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {value for name, value in attrs if name in ("id", "name") and value}
        self.links += [(tag, value) for name, value in attrs if name in ADDRESSES and value is not None]


def broken(site: Path) -> list[str]:
    """Return "page: link" for every link of a site that leads nowhere, and for what it would load from elsewhere.

    Links to other sites are not followed; pages, scripts, styles and pictures from there are an error.
    """
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        for tag, link in dict.fromkeys(page.links):
            if not _leads_somewhere(site, path, tag, link, pages):
                wrong.append(f"{path.relative_to(site)}: {link}")
    return wrong


def _leads_somewhere(site: Path, path: Path, tag: str, link: str, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return tag == "a" or parts.scheme == "data"
    target = site / parts.path.lstrip("/") if parts.path.startswith("/") else path.parent / unquote(parts.path)
    target = path if not parts.path else target.resolve()
    if target.is_dir():
        target /= "index.html"
    if target not in pages:
        return target.is_file()
    fragment = unquote(parts.fragment)
    return not fragment or fragment.startswith("__") or fragment in pages[target].names
