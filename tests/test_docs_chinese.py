"""The Chinese texts have the names, commands, links, code and figures of the English ones, and none is stale.

They are README.zh.md, and site_pages/text/zh for the chapters of the ladder.
"""

import hashlib
import json
import re
import sys
import tomllib

import pytest

from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA
from site_pages.documents import MARKER, refusals
from test_docs import ROOT, code

sys.path.insert(0, str(ROOT))

from site_pages.chapters import opening
from site_pages.phrases import translated
from site_pages.write import Writer

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


RUNGS = {rung.name: rung for rung in (*CPU, *CUDA)}
EN, ZH = (ROOT / "site_pages" / "text" / language for language in ("en", "zh"))
TRANSLATED = tomllib.loads((ZH / "rungs.toml").read_text(encoding="utf-8"))
PHRASES = tomllib.loads((ZH / "phrases.toml").read_text(encoding="utf-8"))["phrases"]
OF_DRAWINGS = tomllib.loads((ZH / "phrases.toml").read_text(encoding="utf-8"))["drawings"]
DRAWINGS = sorted(
    [*(ROOT / "docs" / "pictures").glob("*.svg"), *(ROOT / "docs" / "figures").glob("*[!e]-ladder-*.svg")]
)  # no roofline
FINGERPRINTS = tomllib.loads((ZH / "english.toml").read_text(encoding="utf-8"))  # file -> of its English text
TEXTS = sorted(path.relative_to(EN).as_posix() for path in EN.rglob("*.*"))
MEASURING = "How speed is measured"  # a section of docs/design.md, which the page measuring.md shows
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


@pytest.mark.parametrize("name", RUNGS)
def test_a_rung_is_translated_with_its_names_and_numbers(name):
    rung, own = RUNGS[name], TRANSLATED.get(name, {})
    new = fingerprint(f"{rung.idea} {rung.lesson}")
    advice = f'translate the idea and the lesson of {name} in {ZH / "rungs.toml"}, then write english = "{new}" there'
    assert own.get("english") == new, advice
    assert differs(rung.idea, own["idea"]) == []
    assert differs(rung.lesson, own["lesson"]) == []


@pytest.mark.parametrize("name", RUNGS)
def test_the_comment_of_a_kernel_is_translated(name):
    english, own = opening(RUNGS[name]), TRANSLATED.get(name, {})
    new = fingerprint(" ".join(english))
    advice = f'translate the opening of {RUNGS[name].source} in {ZH / "rungs.toml"}, then write source = "{new}" there'
    assert own.get("source") == new, advice
    chinese = own["opening"].split("\n\n")
    assert len(chinese) == len(english)
    assert [wrong for texts in zip(english, chinese, strict=True) for wrong in differs(*texts)] == []


def test_translations_are_of_rungs_that_exist():
    assert list(TRANSLATED) == list(RUNGS)


def test_every_refusal_is_translated():
    english = {reason for rung in RUNGS.values() for reason in refusals(rung)}
    assert sorted(english - PHRASES.keys()) == [], "translate these in site_pages/text/zh/phrases.toml"
    assert [translated(reason, PHRASES) for reason in english] == [PHRASES[reason] for reason in english]


@pytest.mark.parametrize("english", PHRASES)
def test_a_phrase_keeps_its_numbers_and_holes(english):
    holes = re.findall(r"\{\d\}", PHRASES[english])
    assert sorted(holes) == [f"{{{number}}}" for number in range(english.count("{}"))]
    assert differs(english, re.sub(r"\{\d\}", "", PHRASES[english])) == []


def test_captions_of_pictures_are_translated():
    """Those of a rung with tiles, banks and sectors, and what says how to read each kind."""
    pytest.importorskip("cuda.bindings")
    from gemmery.pages.pictures import READINGS
    from site_pages.chapters import drawn

    texts = [*READINGS.values(), *(text for plot in drawn(RUNGS["simt_smem"]) for text in (plot.title, plot.caption))]
    chinese = [re.sub("“.*?”", "", translated(text, PHRASES)) for text in texts]
    assert len(texts) > 12
    assert [left for text in chinese for left in re.findall(r"[a-z]+ [a-z]+ [a-z]+", text)] == [], "see phrases.toml"
    assert translated("peak, 2 threads; 12.5% reached", PHRASES) == "峰值，2 线程; 达到 12.5%"


@pytest.mark.parametrize("file", DRAWINGS, ids=lambda file: file.stem)
def test_the_texts_of_drawings_are_translated(file, tmp_path):
    writer = Writer(ROOT, tmp_path, "zh", pictures=False)
    texts = re.findall(r">([^<>]*[A-Za-z][^<>]*)</(?:text|title)>", writer._drawing(file.read_text(), file.stem))
    assert texts
    left = [
        text for text in texts if re.search(r"[a-z]{2,} [a-z]{2,}", text) and not re.search(r"[(\u4e00-\u9fff]", text)
    ]
    assert left == [], "translate these in [drawings] of site_pages/text/zh/phrases.toml"


@pytest.mark.parametrize("english", OF_DRAWINGS)
def test_a_text_of_a_drawing_keeps_its_numbers_and_holes(english):
    holes = re.findall(r"\{\d\}", OF_DRAWINGS[english])
    assert sorted(holes) == [f"{{{number}}}" for number in range(english.count("{}"))]
    assert differs(english, re.sub(r"\{\d\}", "", OF_DRAWINGS[english])) == []


def test_every_text_of_the_site_is_translated():
    chinese = {path.relative_to(ZH).as_posix() for path in ZH.rglob("*.*")}
    assert chinese == {*TEXTS, "rungs.toml", "phrases.toml", "english.toml"}
    assert list(FINGERPRINTS) == [*TEXTS, MEASURING]


@pytest.mark.parametrize("name", TEXTS)
def test_no_text_of_the_site_is_stale(name):
    english, chinese = ((folder / name).read_text(encoding="utf-8") for folder in (EN, ZH))
    new = fingerprint(english)
    assert FINGERPRINTS[name] == new, f'translate what changed in {name}, then write {name!r} = "{new}" in english.toml'
    if name == "measuring.md.jinja":
        english = measuring() + english
    code_of = [re.findall(r"`([^`\n]+)`", text) for text in (english, chinese)]
    assert sorted(code_of[0]) == sorted(code_of[1])
    assert blocks(english) == blocks(chinese)
    if name.startswith("parts/"):
        assert differs(english, chinese) == []


def measuring() -> str:
    """That section in English."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    return text.partition(f"## {MEASURING}\n")[2].partition("\n## ")[0]


def test_how_speed_is_measured_is_translated():
    new = fingerprint(measuring())
    advice = f'translate it in {ZH / "measuring.md.jinja"}, then write {MEASURING!r} = "{new}" in english.toml'
    assert FINGERPRINTS[MEASURING] == new, advice
    chinese = re.sub(r"\]\([^)]+\)", "", (ZH / "measuring.md.jinja").read_text(encoding="utf-8"))
    assert differs(f"{measuring()} gemmery verify", chinese) == []


def test_titles_have_the_same_keys():
    english, chinese = (json.loads((folder / "titles.json").read_text(encoding="utf-8")) for folder in (EN, ZH))
    assert list(english) == list(chinese)


def test_a_wrong_translation_is_caught():
    assert differs("`ldmatrix` gives 8 x 8, one row", "ldmatrix 交出 8 x 8") == []
    assert differs("mma.sync has 16 lanes of f32", "mma 有 8 个 lane") == [
        "mma: not in the English text",
        "f32: missing",
        "mma.sync: missing",
        "numbers: ['16'] in English, ['8'] in Chinese",
    ]
