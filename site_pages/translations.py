"""The texts of a language: a translation is used while its English text is the one that it translates.

English stands in the place of the others. `python -m site_pages.translations` in a checkout lists them.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemmery.ladder.rung import Rung
from gemmery_emulator.pages.pictures import READINGS
from site_pages import pictures
from site_pages.chapters import drawn, opening
from site_pages.course import RUNGS
from site_pages.documents import FIGURES, MARKER, documents, refusals
from site_pages.phrases import LETTERS, WIDE, in_drawing, translated

TEXTS = Path(__file__).parent / "text"
LANGUAGES = {"en": "English", "zh": "中文"}  # a language is written if it has a folder in text/
FIELDS = {"english": ("idea", "lesson"), "source": ("opening",)}  # a fingerprint in rungs.toml -> what it is of
SHOWN = re.compile(r'{{ section\("([^"]+)", "([^"]+)"\) }}')  # a section of a document, in a template
OF_SECTION = re.compile(r"<!-- english: (\w+) -->\n")  # the fingerprint above each section of a document
PHRASE = re.compile(r"[a-z]+(?: [a-z]+){2,}")  # words of a sentence, and no names
CAPTIONED = "simt_smem"  # a rung whose pictures have captions of most kinds


def fingerprint(english: str) -> str:
    """Eight digits that change with an English text, but not with its line breaks."""
    return hashlib.sha256(" ".join(english.split()).encode()).hexdigest()[:8]


def sections(text: str) -> list[str]:
    """The parts of a document that begin with a heading, without what is generated in them."""
    own = MARKER.sub(lambda block: f"{block[1]}: {block[2]}", OF_SECTION.sub("", text))
    return re.split(r"^(?=## )", own, flags=re.MULTILINE)


def section(text: str, title: str) -> str:
    """The text below a heading of a document, to the next heading of its level."""
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0].strip()


def stale_sections(english: Path, own: Path) -> dict[str, str]:
    """The headings of a document whose translation is of another text, with the fingerprints of the new texts."""
    marks = OF_SECTION.findall(_read(own))
    new = {part.partition("\n")[0].strip("# "): fingerprint(part) for part in sections(_read(english))}
    return {title: mark for place, (title, mark) in enumerate(new.items()) if marks[place : place + 1] != [mark]}


class Translations:
    """The texts of one language, in English where the translation is missing or stale."""

    def __init__(self, root: Path, language: str) -> None:
        self.root, self.language = root, language
        self._marks = self._toml("english")  # file -> the fingerprint of the text that it translates
        self._rungs = self._toml("rungs")
        words = self._toml("phrases")
        self.phrases: dict[str, str] = words.get("phrases", {})
        self.refusals: dict[str, str] = words.get("refusals", {})
        self.drawings = {**{rung.idea: self.rung(rung)["idea"] for rung in RUNGS}, **words.get("drawings", {})}

    def _toml(self, name: str) -> dict[str, Any]:
        file = TEXTS / self.language / f"{name}.toml"
        return tomllib.loads(_read(file)) if file.exists() else {}

    def text(self, name: str) -> str:
        """A template, an introduction or the titles."""
        return _read(TEXTS / ("en" if self._stale_text(name) else self.language) / name)

    def english(self, name: str) -> str:
        """The English text of the same, with the sections of documents that it shows."""
        return SHOWN.sub(lambda at: section(_read(self.root / at[1]), at[2]), _read(TEXTS / "en" / name))

    def _stale_text(self, name: str) -> str:
        """The fingerprint of an English text whose translation is missing or stale, else ""."""
        mark = fingerprint(self.english(name))
        return "" if self._marks.get(name) == mark and (TEXTS / self.language / name).exists() else mark

    @property
    def titles(self) -> dict[str, str]:
        """The titles of pages and sections, by their keys."""
        return dict(json.loads(self.text("titles.json")))

    def rung(self, rung: Rung) -> dict[str, str]:
        """The idea and the lesson of a rung, and the opening of its source."""
        own, stale = self._rungs.get(rung.name, {}), self._stale_rung(rung)
        return _english(rung) | {name: own[name] for mark in FIELDS.keys() - stale for name in FIELDS[mark]}

    def _stale_rung(self, rung: Rung) -> dict[str, str]:
        """The fingerprints of a rung that its translation lacks."""
        own, english = self._rungs.get(rung.name, {}), _english(rung)
        new = {mark: fingerprint(" ".join(english[name] for name in names)) for mark, names in FIELDS.items()}
        return {mark: new[mark] for mark in FIELDS if own.get(mark) != new[mark]}

    def document(self, document: str) -> str | None:
        """The text of a document, None where it has no translation or a section of that is stale."""
        english = self.root / document
        if self.language == "en":
            return _read(english)
        own = english.with_suffix(f".{self.language}.md")
        return _read(own) if own.exists() and not stale_sections(english, own) else None

    def stale(self) -> Iterator[str]:
        """What stands in English: where its translation belongs, and the fingerprint to write there."""
        folder = f"site_pages/text/{self.language}"
        for name in sorted(path.relative_to(TEXTS / "en").as_posix() for path in (TEXTS / "en").rglob("*.*")):
            if mark := self._stale_text(name):
                yield f'{folder}/{name}; in english.toml = "{mark}"'
        for rung in RUNGS:
            for field, mark in self._stale_rung(rung).items():
                yield f'{folder}/rungs.toml: {" and ".join(FIELDS[field])} of {rung.name}; {field} = "{mark}"'
        for words in self._stale_phrases():
            yield f"{folder}/phrases.toml: {words}"
        for own in (file for file in documents(self.root) if file.name.endswith(f".{self.language}.md")):
            for title, mark in stale_sections(own.with_suffix("").with_suffix(".md"), own).items():
                yield f"{own.relative_to(self.root)}: {title}; <!-- english: {mark} -->"
            for block in MARKER.finditer(_read(own)):
                for words in PHRASE.findall(re.sub(r"\b(?:src|alt|width)=|\w+\.svg", "", block[3])):
                    yield f"docs/{self.language}.toml: {words}"

    def _stale_phrases(self) -> Iterator[str]:
        """What the library says and phrases.toml lacks."""
        for reason in dict.fromkeys(reason for rung in RUNGS for reason in refusals(rung)):
            if reason not in self.refusals:
                yield f"[refusals] {reason}"
        (captioned,) = (rung for rung in RUNGS if rung.name == CAPTIONED)
        captions = [text for plot in drawn(captioned) for text in (plot.title, plot.caption)]
        for text in (*READINGS.values(), *captions):
            if PHRASE.search(re.sub("“.*?”", "", translated(text, self.phrases))):
                yield f"[phrases] {text}"
        ladders = (self.root / FIGURES).glob("*[!e]-ladder-*.svg")  # no roofline
        for file in sorted([*ladders, *(self.root / pictures.FOLDER).glob("*.svg")]):
            for text in set(LETTERS.findall(in_drawing(_read(file), self.drawings))) - self.drawings.keys():
                if re.search(r"[a-z]{2,} [a-z]{2,}", text) and not re.search(rf"\(|{WIDE}", text):  # no code
                    yield f"[drawings] {text}"


def _english(rung: Rung) -> dict[str, str]:
    return {"idea": rung.idea, "lesson": rung.lesson, "opening": "\n\n".join(opening(rung))}


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


if __name__ == "__main__":
    for language in LANGUAGES:
        if language != "en" and (TEXTS / language).is_dir():
            for line in dict.fromkeys(Translations(Path.cwd(), language).stale()):
                sys.stdout.write(f"in English until translated: {line}\n")
