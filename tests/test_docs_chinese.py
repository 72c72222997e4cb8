"""A translation has the names, links, code and numbers of its English text; English stands for those missing or stale.

The Chinese texts are README.zh.md, and site_pages/text/zh for the chapters of the ladder.
"""

import re
import shutil
import sys

import pytest

from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA
from site_pages.documents import MARKER
from test_docs import ROOT, code

sys.path.insert(0, str(ROOT))

from site_pages import translations
from site_pages.translations import OF_SECTION, Translations, fingerprint, stale_sections

RUNGS = {rung.name: rung for rung in (*CPU, *CUDA)}
EN, ZH = (Translations(ROOT, language) for language in ("en", "zh"))
TEXTS = sorted(
    path.relative_to(translations.TEXTS / "en").as_posix() for path in (translations.TEXTS / "en").rglob("*.*")
)
READMES = ROOT / "README.md", ROOT / "README.zh.md"
NUMBER = re.compile(r"\d[\d.,]*\d|\d")
LATIN = r"[A-Za-z][\w.]*\w|[A-Za-z]"


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


def markers(text: str) -> list[tuple[str, str]]:
    return [(block[1], block[2]) for block in MARKER.finditer(text)]


def titled() -> dict[str, tuple[str, str]]:
    """The sections of README.md and their translations, those apart that are stale."""
    english, chinese = (sections(file.read_text(encoding="utf-8")) for file in READMES)
    titles = [part.partition("\n")[0].strip("# ") for part in english]
    stale = stale_sections(*READMES)
    return {title: pair for title, *pair in zip(titles, english, chinese, strict=False) if title not in stale}


@pytest.mark.parametrize("title", titled())
def test_a_section_names_and_counts_the_same(title):
    english, chinese = titled()[title]
    for what in (markers, blocks, links, spans, numbers, names):
        assert what(chinese) == what(english), what.__name__


def test_the_readmes_lead_to_each_other():
    english, chinese = (file.read_text(encoding="utf-8") for file in READMES)
    assert "](README.zh.md)" in english
    assert "](README.md)" in chinese


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
def test_a_text_of_the_site_has_the_code_of_its_english_text(name):
    english, chinese = EN.text(name), ZH.text(name)
    if name.startswith("parts/"):
        assert differs(english, chinese) == []
    if name == "measuring.md.jinja":  # its translation holds the section that the English text names
        english += translations.section(
            (ROOT / "docs" / "design.md").read_text(encoding="utf-8"), "How speed is measured"
        )
    assert sorted(re.findall(r"`([^`\n]+)`", chinese)) == sorted(re.findall(r"`([^`\n]+)`", english))
    assert blocks(english) == blocks(chinese)


def test_titles_have_the_same_keys():
    assert list(EN.titles) == list(ZH.titles)


def test_a_phrase_is_translated_with_what_is_in_its_holes():
    assert translations.translated("peak, 2 threads; 12.5% reached", ZH.phrases) == "峰值，2 线程; 达到 12.5%"


PART, RUNG = "parts/hopper.md", RUNGS["packed"]


@pytest.fixture
def chinese(tmp_path, monkeypatch):
    """A folder of texts that translates a part, the page on measuring, and a rung with its opening."""
    own = tmp_path / "text" / "zh"
    shutil.copytree(translations.TEXTS / "en", tmp_path / "text" / "en")
    monkeypatch.setattr(translations, "TEXTS", tmp_path / "text")
    (own / "parts").mkdir(parents=True)
    listed = dict(line.rsplit(" = ", 1) for line in Translations(ROOT, "zh").stale() if " = " in line)
    marks = {name: listed[f"site_pages/text/zh/{name}; in english.toml"] for name in (PART, "measuring.md.jinja")}
    for name in marks:
        (own / name).write_text("一")
    (own / "english.toml").write_text("".join(f'"{name}" = {mark}\n' for name, mark in marks.items()))
    of_rung = [f"site_pages/text/zh/rungs.toml: {what} of packed; {mark}" for mark, what in OF_RUNG.items()]
    words = 'english = {}\nsource = {}\nidea = "二"\nlesson = "三"\nopening = "四"'
    (own / "rungs.toml").write_text("[packed]\n" + words.format(*(listed[line] for line in of_rung)))
    return own


OF_RUNG = {"english": "idea and lesson", "source": "opening"}


def lines():
    """What is listed of those texts."""
    told = "\n".join(Translations(ROOT, "zh").stale())
    return [
        text
        for text in (PART, "measuring.md.jinja", *(f"{words} of packed;" for words in OF_RUNG.values()))
        if text in told
    ]


def test_a_fresh_translation_is_used(chinese):
    own = Translations(ROOT, "zh")
    assert own.text(PART) == own.text("measuring.md.jinja") == "一"
    assert own.rung(RUNG) == {"idea": "二", "lesson": "三", "opening": "四"}
    assert own.drawings[RUNG.idea] == "二"
    assert lines() == []


def test_a_stale_or_missing_text_of_the_site_is_english_and_listed(chinese):
    (chinese.parent / "en" / PART).write_text("# New words\n")
    assert Translations(ROOT, "zh").text(PART) == "# New words\n"
    assert lines() == [PART]
    (chinese / "measuring.md.jinja").unlink()
    assert Translations(ROOT, "zh").text("measuring.md.jinja") == EN.text("measuring.md.jinja")
    assert lines() == [PART, "measuring.md.jinja"]


def test_the_section_of_a_document_that_a_template_shows_is_part_of_its_text(chinese, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "design.md").write_text("## How speed is measured\nNew words\n")
    assert Translations(tmp_path, "zh").text("measuring.md.jinja") == EN.text("measuring.md.jinja")


def test_stale_words_of_a_rung_are_english_and_listed(chinese):
    toml = chinese / "rungs.toml"
    for mark, own in (("english", {"opening": "四"}), ("source", {})):
        toml.write_text(re.sub(f'{mark} = "', f'{mark} = "0', toml.read_text()))
        assert Translations(ROOT, "zh").rung(RUNG) == EN.rung(RUNG) | own
    assert lines() == ["idea and lesson of packed;", "opening of packed;"]
    assert Translations(ROOT, "zh").drawings[RUNG.idea] == RUNG.idea
    toml.write_text("[of_old]\n")
    assert "site_pages/text/zh/rungs.toml: of_old is no rung" in [*Translations(ROOT, "zh").stale()]


def test_missing_phrases_are_listed(chinese):
    told = "\n".join(Translations(ROOT, "zh").stale())
    for words in ("[refusals] it has no epilogue", "[phrases] A row of the picture", "[drawings] shared memory"):
        assert words in told
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
