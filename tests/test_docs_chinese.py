"""README.zh.md says what README.md says: the same names, commands, links, code and figures, and it is not stale."""

import hashlib
import re

import pytest

from gemmery.report.documents import MARKER
from test_docs import ROOT, code

ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
TITLES = [part.partition("\n")[0].strip("# ") for part in re.split(r"^(?=## )", ENGLISH, flags=re.MULTILINE)]
OF_SECTION = re.compile(r"<!-- english: ([0-9a-f]{8}) -->\n")  # above a section, of the English text it translates
NUMBER = re.compile(r"\d[\d.,]*\d|\d")


def fingerprint(english: str) -> str:
    """Eight digits that change with an English text, but not with its line breaks."""
    return hashlib.sha256(" ".join(english.split()).encode()).hexdigest()[:8]


def sections(text: str) -> list[str]:
    """The parts of a document that begin with a heading."""
    return re.split(r"^(?=## )", OF_SECTION.sub("", text), flags=re.MULTILINE)


def words(text: str) -> str:
    """A section without what is generated, without code blocks, and without the link to the other language."""
    prose = re.sub(r"^```.*?^```", "", MARKER.sub("", text), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^\[[^\]]+\]\(README(?:\.zh)?\.md\)$", "", prose, flags=re.MULTILINE)


def blocks(text: str) -> list[str]:
    """The code blocks of a document without comments, which are translated."""
    fenced = re.findall(r"^```\w*\n.*?^```", text, re.MULTILINE | re.DOTALL)
    return [re.sub(r" +# .*", "", block) for block in fenced]


def links(text: str) -> set[str]:
    targets = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text)
    return {target for pair in targets for target in pair if target} - {"README.md", "README.zh.md"}


def spans(text: str) -> set[str]:
    """What is between backticks, in the text and in comments of code."""
    return set(re.findall(r"`([^`\n]+)`", words(text))) | {
        word for line in code(text) for word in re.findall("`.+?`", line)
    }


def names(text: str) -> set[str]:
    """Identifiers and names of products, libraries and types: words with a digit, an underscore or two capitals."""
    latin = re.findall(r"[A-Za-z][\w.]*(?:\.\w+)*\w", words(text), re.ASCII)
    known = {word for word in latin if re.search(r"\d|_|[A-Z].*[A-Z]|\w\.\w", word)}
    return {re.sub(r"(?<=[A-Z])s$", "", word).lower() for word in known}  # GPUs


def numbers(text: str) -> list[str]:
    return sorted(NUMBER.findall(words(text)))


@pytest.mark.parametrize("index", range(len(TITLES)), ids=TITLES)
def test_a_section_names_and_counts_the_same(index):
    assert len(sections(CHINESE)) == len(sections(ENGLISH))
    english, chinese = sections(ENGLISH)[index], sections(CHINESE)[index]
    for what in (blocks, links, spans, numbers, names):
        assert what(chinese) == what(english), what.__name__


@pytest.mark.parametrize("index", range(len(TITLES)), ids=TITLES)
def test_no_section_is_stale(index):
    new = fingerprint(words(sections(ENGLISH)[index]))
    known = OF_SECTION.findall(CHINESE)[index]
    assert known == new, f"translate what changed in README.md, then write <!-- english: {new} --> above the section"


def test_both_readmes_have_the_same_generated_blocks():
    generated = [[(m[1], m[2]) for m in MARKER.finditer(text)] for text in (ENGLISH, CHINESE)]
    assert generated[0] == generated[1]
    english, chinese = (" ".join(m[3] for m in MARKER.finditer(text)) for text in (ENGLISH, CHINESE))
    assert sorted(NUMBER.findall(chinese)) == sorted(NUMBER.findall(english))


def test_generated_blocks_are_in_chinese():
    """What is left of English are names: a new suite, a new caption want a phrase in docs/zh.toml."""
    text = re.sub(r"\b(?:src|alt|width)=|\w+\.svg", "", " ".join(m[3] for m in MARKER.finditer(CHINESE)))
    left = re.findall(r"[a-z]+ [a-z]+ [a-z]+", text)
    assert left == [], "translate this phrase in docs/zh.toml, then `make docs`"


def test_the_readmes_lead_to_each_other():
    assert "](README.zh.md)" in ENGLISH
    assert "](README.md)" in CHINESE
