"""A translation has the names and numbers of its English text, which stands in its place if it is missing or stale.

The Chinese texts are README.zh.md, and site_pages/text/zh for the chapters of the ladder.
"""

import re
import shutil
import sys

import pytest

from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA
from test_docs import ROOT

sys.path.insert(0, str(ROOT))

from site_pages import translations
from site_pages.translations import Translations, fingerprint, sections, stale_sections

RUNGS = {rung.name: rung for rung in (*CPU, *CUDA)}
EN, ZH = (Translations(ROOT, language) for language in ("en", "zh"))
TEXTS = sorted(
    path.relative_to(translations.TEXTS / "en").as_posix() for path in (translations.TEXTS / "en").rglob("*.*")
)
READMES = ROOT / "README.md", ROOT / "README.zh.md"
TO_EACH_OTHER = r"^\[\S+\]\(README(?:\.zh)?\.md\)$"
LATIN = r"[A-Za-z][\w.]*\w|[A-Za-z]"


def latin(text: str) -> set[str]:
    """Words in Latin letters, without the endings of lanes, XORed and swizzled."""
    return {re.sub(r"s$|(?<=[A-Z])ed$|(?<=e)d$", "", word).lower() for word in re.findall(LATIN, text, re.ASCII)}


def own_numbers(text: str) -> list[str]:
    """Numbers in digits that are no part of a name, with the unit % and the count of each."""
    return sorted(re.findall(r"(?<![A-Za-z\d_.])\d(?:[\d.,]*\d)?", text))


def differs(english: str, chinese: str) -> list[str]:
    """Numbers, identifiers and other Latin words that a translation lacks, or that only it has."""
    said = latin(english)
    wrong = [f"{word}: not in the English text" for word in sorted(latin(chinese) - said)]
    wanted = {word for word in re.findall(LATIN, english, re.ASCII) if re.search(r"\w[\d_.A-Z]", word)}
    wrong += [f"{word}: missing" for word in sorted(wanted) if not latin(word) <= latin(chinese)]
    counts = own_numbers(english), own_numbers(chinese)
    return wrong + ([f"numbers: {counts[0]} in English, {counts[1]} in Chinese"] if counts[0] != counts[1] else [])


def test_a_section_of_the_readme_has_the_names_and_numbers_of_its_english_text():
    texts = [re.sub(TO_EACH_OTHER, "", file.read_text(encoding="utf-8"), flags=re.MULTILINE) for file in READMES]
    for english, chinese in zip(*map(sections, texts), strict=False):
        title = english.partition("\n")[0].strip("# ")
        assert title in stale_sections(*READMES) or differs(english, chinese) == []


def test_the_readmes_lead_to_each_other():
    english, chinese = (re.findall(TO_EACH_OTHER, file.read_text(encoding="utf-8"), re.MULTILINE) for file in READMES)
    assert english == ["[中文](README.zh.md)"]
    assert chinese == ["[English](README.md)"]


@pytest.mark.parametrize("name", RUNGS)
def test_a_rung_has_the_names_and_numbers_of_its_english_text(name):
    english, chinese = EN.rung(RUNGS[name]), ZH.rung(RUNGS[name])
    assert [wrong for field in english for wrong in differs(english[field], chinese[field])] == []
    assert chinese["opening"].count("\n\n") == english["opening"].count("\n\n")


@pytest.mark.parametrize("table", ["phrases", "refusals", "drawings"])
def test_a_phrase_keeps_its_numbers_and_holes(table):
    for english, chinese in getattr(ZH, table).items():
        holes = re.findall(r"\{\d\}", chinese)
        assert sorted(holes) == [f"{{{number}}}" for number in range(english.count("{}"))], english
        assert differs(english, re.sub(r"\{\d\}", "", chinese)) == []


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_of_the_site_has_the_names_and_numbers_of_its_english_text(name):
    chinese = ZH.text(name)
    assert chinese == EN.text(name) or differs(EN.english(name), chinese) == []


PART, MEASURING, RUNG = "parts/hopper.md", "measuring.md.jinja", RUNGS["packed"]


@pytest.fixture
def chinese(tmp_path, monkeypatch):
    """A folder of texts that translates a part, the page on measuring, and a rung with its opening."""
    own = tmp_path / "text" / "zh"
    shutil.copytree(translations.TEXTS / "en", tmp_path / "text" / "en")
    monkeypatch.setattr(translations, "TEXTS", tmp_path / "text")
    (own / "parts").mkdir(parents=True)
    for name in (PART, MEASURING):
        (own / name).write_text("一")
    marks = {name: fingerprint(EN.english(name)) for name in (PART, MEASURING)}
    (own / "english.toml").write_text("".join(f'"{name}" = "{mark}"\n' for name, mark in marks.items()))
    words, source = fingerprint(f"{RUNG.idea} {RUNG.lesson}"), fingerprint(EN.rung(RUNG)["opening"])
    (own / "rungs.toml").write_text(
        f'[packed]\nenglish = "{words}"\nsource = "{source}"\nidea = "二"\nlesson = "三"\nopening = "四"\n'
    )
    return own


def listed():
    """What is listed of those texts, without fingerprints."""
    lines = [line.partition(";")[0].rpartition("/zh/")[2] for line in Translations(ROOT, "zh").stale()]
    return [line for line in lines if line in (PART, MEASURING) or line.endswith(" of packed")]


def test_a_fresh_translation_is_used(chinese):
    own = Translations(ROOT, "zh")
    assert own.text(PART) == own.text(MEASURING) == "一"
    assert own.rung(RUNG) == {"idea": "二", "lesson": "三", "opening": "四"}
    assert own.drawings[RUNG.idea] == "二"
    assert listed() == []


def test_a_stale_or_missing_text_of_the_site_is_english_and_listed(chinese):
    (chinese.parent / "en" / PART).write_text("# New words\n")
    assert Translations(ROOT, "zh").text(PART) == "# New words\n"
    assert listed() == [PART]
    (chinese / MEASURING).unlink()
    assert Translations(ROOT, "zh").text(MEASURING) == EN.text(MEASURING)
    assert listed() == [MEASURING, PART]


def test_the_section_of_a_document_that_a_template_shows_is_part_of_its_text(chinese, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "design.md").write_text("## How speed is measured\nNew words\n")
    assert Translations(tmp_path, "zh").text(MEASURING) == EN.text(MEASURING)


def test_stale_words_of_a_rung_are_english_and_listed(chinese):
    toml = chinese / "rungs.toml"
    for mark, own in (("english", {"opening": "四"}), ("source", {})):
        toml.write_text(toml.read_text().replace(f'{mark} = "', f'{mark} = "0'))
        assert Translations(ROOT, "zh").rung(RUNG) == EN.rung(RUNG) | own
    assert listed() == ["rungs.toml: idea and lesson of packed", "rungs.toml: opening of packed"]
    assert Translations(ROOT, "zh").drawings[RUNG.idea] == RUNG.idea


def test_missing_phrases_are_listed(chinese):
    lines = "\n".join(Translations(ROOT, "zh").stale())
    for words in ("[refusals] it has no epilogue", "[phrases] A row of the picture", "[drawings] shared memory"):
        assert words in lines
    (chinese / "phrases.toml").write_text('[drawings]\n"shared memory" = "五"\n')
    assert "[drawings] shared memory" not in "\n".join(Translations(ROOT, "zh").stale())


def test_a_stale_section_of_a_document_is_listed_and_its_page_is_english(tmp_path):
    english, chinese = tmp_path / "README.md", tmp_path / "README.zh.md"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "design.md").touch()
    english.write_text("# One\nwords\n<!-- rungs -->\nall\n<!-- end -->\n## Two\nwords\n")
    marks = [fingerprint(text) for text in ("# One words rungs: None", "## Two words")]
    chinese.write_text("<!-- english: {} -->\n# 一\n<!-- english: {} -->\n## 二\n".format(*marks))
    assert stale_sections(english, chinese) == {}
    assert Translations(tmp_path, "zh").document("README.md") == chinese.read_text()
    english.write_text(english.read_text().replace("all", "none").replace("Two\nwords", "Two\nnew"))
    mark = fingerprint("## Two new")
    assert stale_sections(english, chinese) == {"Two": mark}
    assert f"README.zh.md: Two; <!-- english: {mark} -->" in [*Translations(tmp_path, "zh").stale()]
    assert Translations(tmp_path, "zh").document("README.md") is None


def test_a_wrong_translation_is_caught():
    assert differs("`ldmatrix` gives 8 x 8, one row", "ldmatrix 交出 8 x 8") == []
    assert differs("mma.sync has 16 lanes of f32", "mma 有 8 个 lane") == [
        "mma: not in the English text",
        "f32: missing",
        "mma.sync: missing",
        "numbers: ['16'] in English, ['8'] in Chinese",
    ]
