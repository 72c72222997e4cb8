"""The repository's documents as pages: links between them stay, links to code lead to a page with that code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from site_pages.documents import documents
from site_pages.stored import FOLDER

LANGUAGES = {".py": "python", ".cu": "cuda", ".cuh": "cuda", ".toml": "toml", ".cpp": "cpp", ".h": "cpp"}
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\[]*)\]\((?P<target>[^)\s]+)\)")
IMAGE = re.compile(r'<img src="(?P<file>[^"]+\.svg)"[^>]*>')
FENCE = re.compile(r"^ *```")
RECORDS = {FOLDER: "docs/results.md"}  # a folder -> the document with what it holds
TRANSLATION = re.compile(r"\.[a-z]{2}\.md$")
ITEM = re.compile(r"^(?:[-*]|\d+\.) ")


class Repository:
    """Documents of a checkout, and `sources`: the files of code that they link to, each to become a page."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.places = dict(_places(root))  # document in the repository -> page of the site
        self.sources: set[str] = set()

    def page(self, document: str, text: str) -> str:
        """Return the Markdown of the page of a document with that text."""
        parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
        blocks = (part.replace("```python\n>>>", "```pycon\n>>>", 1) for part in parts)
        return "".join(part if part.startswith("```") else self._prose(document, part) for part in blocks)

    def _prose(self, document: str, text: str) -> str:
        folder = PurePosixPath(document).parent
        own = PurePosixPath(self.places[document]).parent

        def linked(match: re.Match[str]) -> str:
            place = self._place(str(folder), match["target"])
            if place is None:
                return match["text"]
            return match[0] if place == "" else f"[{match['text']}]({os.path.relpath(place, own)})"

        def inlined(match: re.Match[str]) -> str:
            svg = (self.root / folder / match["file"]).read_text(encoding="utf-8")
            return f'<div class="drawing" data-search-exclude>{inline(svg, PurePosixPath(match["file"]).stem)}</div>'

        return spaced(IMAGE.sub(inlined, LINK.sub(linked, text)))

    def _place(self, folder: str, target: str) -> str | None:
        """The page a link leads to, with its fragment; "" for a link that stays, None for one without a page."""
        path, _, fragment = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return ""
        document = TRANSLATION.sub(".md", os.path.normpath(os.path.join(folder, path)))
        document = RECORDS.get(document, document)
        if document in self.places:
            return self.places[document] + (f"#{fragment}" if fragment else "")
        if (self.root / document).is_dir():
            return self.places.get(f"{document}/README.md")
        self.sources.add(document)
        return source_page(document)


def source_page(file: str) -> str:
    """The page of a file of code."""
    return f"source/{file}.md"


def source_text(root: Path, file: str) -> str:
    """The Markdown of such a page."""
    language = LANGUAGES.get(PurePosixPath(file).suffix, "text")
    text = (root / file).read_text(encoding="utf-8").rstrip()
    return f"---\nsearch:\n  exclude: true\n---\n# {PurePosixPath(file).name}\n\n`{file}`\n\n{fenced(text, language)}\n"


def fenced(text: str, language: str) -> str:
    """Text as a block of code, with a fence that it does not contain."""
    return f"````{language}\n{text}\n````"


def inline(svg: str, name: str) -> str:
    """A standalone drawing as part of a page, in the colors of the page."""
    text = re.sub(r"<style>.*?</style>\s*", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    ids = set(re.findall(r'\bid="([^"]+)"', text))  # unique on a page with several drawings once `name` begins them
    text = re.sub(r'(?<=[#"])[^#"()]+(?=[")])', lambda word: f"{name}-{word[0]}" if word[0] in ids else word[0], text)
    return re.sub(r"\n\s*\n", "\n", text).strip()


def spaced(text: str) -> str:
    """The same with an empty line before every list that follows a paragraph, as Python-Markdown wants."""
    lines: list[str] = []
    for line in text.split("\n"):
        if ITEM.match(line) and lines and lines[-1].strip() and not ITEM.match(lines[-1]) and not _in_item(lines):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def _in_item(lines: list[str]) -> bool:
    """True where the last paragraph began as an item of a list."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if ITEM.match(line):
            return True
    return False


def _places(root: Path) -> Iterator[tuple[str, str]]:
    for document in sorted(path.relative_to(root).as_posix() for path in documents(root)):
        if document.startswith("docs/") and not TRANSLATION.search(document):
            yield document, document.removeprefix("docs/").replace("README", "documents")
    for document in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"):
        yield document, f"repository/{document.replace('/README', '').lower()}"
    yield "README.md", "index.md"
