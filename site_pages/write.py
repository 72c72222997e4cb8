"""Writes the Markdown of every page, the style and the configuration for mkdocs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

import gemmery
from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA
from gemmery_emulator.pages.svg import PALETTE
from gemmery_lab.report.tables import tree, walk
from site_pages import reference
from site_pages.chapters import Chapter, chapter, code_html
from site_pages.course import RUNGS, Part, course
from site_pages.documents import Documents, documents, sentence
from site_pages.measured import Records
from site_pages.phrases import in_drawing, joined, translated
from site_pages.repository import Repository, fenced, inline, source_page, source_text
from site_pages.translations import LANGUAGES, TEXTS, Translations, section

HERE = Path(__file__).parent
Navigation = list[dict[str, Any]]


def write(root: Path, folder: Path, pictures: bool = True) -> Path:
    """Write the pages of every language into `folder`; return the file that configures mkdocs."""
    languages = [language for language in LANGUAGES if (TEXTS / language).is_dir()]
    writers = {name: Writer(root, folder / "pages" / name, name, pictures) for name in languages}
    navigation = {name: writer.write() for name, writer in writers.items()}["en"]
    style = folder / "pages" / "en" / "site.css"
    style.write_text(f"{palette()}\n{(HERE / 'site.css').read_text(encoding='utf-8')}", encoding="utf-8")
    config = folder / "mkdocs.yml"
    settings = {
        "INHERIT": str(HERE / "mkdocs.yml"),
        "docs_dir": str(folder / "pages"),
        "site_dir": str(root / "site"),
        "nav": navigation,
        "plugins": {
            "i18n": {"docs_structure": "folder", "languages": [_language(writers, name) for name in languages]},
            "mkdocstrings": {
                "handlers": {"python": {"paths": [str(path) for path in sorted(root.glob("packages/*/src"))]}}
            },
        },
    }
    config.write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")  # JSON is YAML
    return config


def _language(writers: Mapping[str, Writer], name: str) -> dict[str, Any]:
    """A language for the plugin that builds them, with its words for titles in the navigation."""
    english, own = writers["en"].labels, writers[name].labels
    return {
        "locale": name,
        "name": LANGUAGES[name],
        "build": True,
        "default": name == "en",
        "nav_translations": {english[label]: own[label] for label in english} if name != "en" else {},
    }


class Writer:
    """Writes the pages of one language; documents without a translation are those of the first language."""

    def __init__(self, root: Path, folder: Path, language: str, pictures: bool) -> None:
        self.root, self.folder, self.language, self.pictures = root, folder, language, pictures
        self.texts = Translations(root, language)
        self.titles = self.texts.titles
        self.templates = Environment(
            loader=FunctionLoader(self.texts.text),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        self.templates.filters |= {
            "fenced": fenced,
            "code_html": code_html,
            "inline": self._drawing,
            "sentence": sentence,
            "told": lambda rung, field: self.texts.rung(rung)[field],
            "phrase": lambda english: translated(english, self.texts.phrases),
            "refusal": lambda english: self.texts.refusals.get(english, english),
        }

    @property
    def labels(self) -> dict[str, str]:
        """Every title of the navigation by its key."""
        return {**self.titles, **{part.name: self._title(part) for part in course()}}

    def _drawing(self, svg: str, name: str) -> str:
        return in_drawing(inline(svg, name), self.texts.drawings)

    def write(self) -> Navigation:
        """Write every page and return the navigation."""
        tutorial = self._tutorial()
        api = self._reference()
        documents = self._documents()
        self._page("index.md", self._render("index", parts=course(), figure=self._figure))
        self._page("measuring.md", self._render("measuring", section=self._section))
        sections = {
            "tutorial": tutorial,
            "guides": [page for page in documents if page.startswith("guides/")],
            "reference": api,
            "explanation": [*EXPLANATION, *(page for page in documents if page not in LISTED and "/" not in page)],
            "project": [*PROJECT, *({self.titles[name]: _folder(name, documents)} for name in FOLDERS)],
        }
        return [
            {self.titles["home"]: "index.md"},
            *({self.titles[name]: pages} for name, pages in sections.items() if pages),
        ]

    def _tutorial(self) -> list[Any]:
        parts = course()
        lines = [(depth, rung) for depth, rung in walk(tree(RUNGS))]
        places = {rung.name: f"{part.name}/{rung.name}.md" for part in parts for rung in part.rungs}
        titles = {part.name: self._title(part) for part in parts}
        order = [(part, rung) for part in parts for rung in part.rungs]
        self._page("tutorial/index.md", self._render("tutorial", parts=parts, titles=titles, tree=lines, places=places))
        for number, part in enumerate(parts, 1):
            text = self._render("part", part=part, number=number, introduction=self._introduction(part))
            self._page(f"tutorial/{part.name}/index.md", text)
        for part, rung in order:
            text = self._render(
                "chapter",
                part=part,
                chapter=_chapter(self.root, rung.name, self.pictures),
                parent=places.get(rung.parent or ""),
                children=[(child.name, places[child.name]) for child in RUNGS if child.parent == rung.name],
                places=places,
            )
            self._page(f"tutorial/{places[rung.name]}", text)
        return [
            "tutorial/index.md",
            *(
                {
                    self._title(part): [
                        f"tutorial/{part.name}/index.md",
                        *(f"tutorial/{places[r.name]}" for r in part.rungs),
                    ]
                }
                for part in parts
            ),
        ]

    def _introduction(self, part: Part) -> str:
        return self.texts.text(f"parts/{part.name}.md").strip()

    def _title(self, part: Part) -> str:
        return self._introduction(part).partition("\n")[0].removeprefix("# ")

    def _reference(self) -> list[str]:
        pages = reference.pages(gemmery._HOMES, self.root)
        for page, names in pages.items():
            title = self.titles.get(page, page.replace("-", " ").capitalize())
            self._page(f"reference/{page}.md", self._render("reference", title=title, names=names))
        return [f"reference/{page}.md" for page in pages]

    def _documents(self) -> list[str]:
        repository = Repository(self.root)
        built = _built(self.root) if self.language == "en" else {}
        for document, place in repository.places.items():
            text = built.get(document) or self.texts.document(document)
            if place != "index.md" and text is not None:
                self._page(place, repository.page(document, text))
        for file in sorted(repository.sources if self.language == "en" else ()):
            self._page(source_page(file), source_text(self.root, file))
        return list(repository.places.values())

    def _section(self, document: str, title: str) -> str:
        """The text below a heading of a document, to the next heading of its level."""
        text = (self.root / document).read_text(encoding="utf-8")
        return Repository(self.root).page(document, section(text, title))

    def _figure(self, name: str) -> str:
        svg = (self.root / "docs" / "figures" / f"{name}.svg").read_text(encoding="utf-8")
        return f'<div class="drawing" data-search-exclude>{self._drawing(svg, name)}</div>'

    def _render(self, template: str, **values: Any) -> str:
        return joined(self.templates.get_template(f"{template}.md.jinja").render(values))

    def _page(self, place: str, text: str) -> None:
        path = self.folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _folder(name: str, documents: Sequence[str]) -> list[str]:
    """The pages of a folder of documents, its index first."""
    return sorted(
        (page for page in documents if page.startswith(f"{name}/")), key=lambda page: "/documents." not in page
    )


@cache
def _chapter(root: Path, name: str, pictures: bool) -> Chapter:
    """The chapter of a rung, which every language shows."""
    ((part, rung),) = [(part, rung) for part in course() for rung in part.rungs if rung.name == name]
    return chapter(rung, part, _records(root), RUNGS, pictures)


@cache
def _built(root: Path) -> dict[str, str]:
    """The documents that are not under version control."""
    filler = Documents(root, CPU, CUDA)
    sources = {path: source for path, source in documents(root).items() if path != source}
    return {
        path.relative_to(root).as_posix(): filler.fill(path, source.read_text(encoding="utf-8"))
        for path, source in sources.items()
    }


@cache
def _records(root: Path) -> Records:
    return Records(root)


EXPLANATION = ("measuring.md", "promises.md", "gpu.md", "hopper.md", "emulator.md", "first_call.md")  # then the others
PROJECT: Sequence[str] = (
    "documents.md",
    "design.md",
    "results.md",
    "ladder.md",
    "ladder_gpu.md",
    "repository/contributing.md",
    "repository/benchmarks.md",
    "repository/changelog.md",
)
FOLDERS = "findings", "decisions"
LISTED = {"index.md", *EXPLANATION, *PROJECT}


def palette() -> str:
    """The colors of drawings as CSS, for the light and the dark scheme of the site."""
    return "\n".join(
        f'[data-md-color-scheme="{scheme}"] {{ '
        + " ".join(f"--{name}: {pair[side]};" for name, pair in PALETTE.items())
        + " }"
        for side, scheme in enumerate(("default", "slate"))
    )
