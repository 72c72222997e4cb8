"""The pages of the documentation site, as Markdown: every rung has a chapter, and all of it comes from the registry.

tests/test_site_built.py looks at the site itself, which `make site` builds.
"""

import importlib
import itertools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from test_docs import unknown_commands

pytest.importorskip("jinja2", reason="the pages are made by the extra lab's Jinja2")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gemmery.cuda import driver  # noqa: E402
from gemmery.ladder.cpu import CPU  # noqa: E402
from gemmery.ladder.cuda import CUDA  # noqa: E402
from gemmery.ladder.diff import contents  # noqa: E402
from gemmery_lab.inspection import gather  # noqa: E402
from site_pages import chapters, course, links, phrases, reference, repository, translations, write  # noqa: E402
from site_pages.measured import FLOAT8  # noqa: E402
from site_pages.stored import Stored, query  # noqa: E402

pytestmark = pytest.mark.sampled(3)

RUNGS = (*CPU, *CUDA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The pages of all languages, without the emulator's pictures."""
    return write.write(ROOT, tmp_path_factory.mktemp("site"), pictures=False).parent


@pytest.fixture(scope="module")
def pages(folder):
    """Place in the site -> Markdown, and the configuration."""
    return written(folder, "en"), json.loads((folder / "mkdocs.yml").read_text())


def written(folder, language):
    """Place in the site -> Markdown, of one language."""
    pages = folder / "pages" / language
    return {path.relative_to(pages).as_posix(): path.read_text() for path in pages.rglob("*.md")}


def leaves(navigation):
    """The pages of a navigation, in order."""
    for entry in navigation:
        if isinstance(entry, str):
            yield entry
        else:
            yield from leaves(*entry.values()) if isinstance(*entry.values(), list) else entry.values()


def test_every_rung_is_a_chapter_in_the_order_of_the_ladders(pages):
    texts, config = pages
    listed = [Path(page).stem for page in leaves(config["nav"]) if re.fullmatch(r"tutorial/.+/(?!index).+\.md", page)]
    assert listed == [rung.name for rung in RUNGS]
    assert set(leaves(config["nav"])) <= texts.keys()


def test_a_chapter_says_what_the_registry_says(pages):
    texts, _ = pages
    chapters = {page.rpartition("/")[2]: text for page, text in texts.items() if page.startswith("tutorial")}
    for rung in RUNGS:
        check_chapter(rung, chapters[f"{rung.name}.md"])


def check_chapter(rung, text):
    assert f"\n# {rung.name}\n" in text
    assert rung.lesson in text
    assert rung.parent is None or re.search(rf"\| Parent \| \[`{rung.parent}`\]", text)
    assert rung.parent is None or f"gemmery ladder diff {rung.parent} {rung.name}" in text
    for counter in rung.expect:
        assert re.search(rf"^\| `{counter}` \| [\d.]+ \| \w", text, re.MULTILINE)
    if rung.geometry:
        assert contents(rung.source).rstrip() in text
        assert '<div class="opening">\n<p>Idea: ' in text
        assert f"gemmery inspect {rung.name}" in text


def test_a_chinese_chapter_has_the_code_and_the_figures_of_the_english_one(folder):
    english, chinese = (written(folder, language) for language in ("en", "zh"))
    parts = (
        r"^````.*?^````",
        r"<i style=[^>]*></i><b>[\d.,]+<",
        r"^\| `\w+` \| [\d., ]+ \|",
        r"`[^`\n]+`",
    )
    for rung in RUNGS:
        (place,) = [page for page in english if page.startswith("tutorial") and page.endswith(f"/{rung.name}.md")]
        for part in parts:
            own, other = (re.findall(part, text, re.MULTILINE | re.DOTALL) for text in (chinese[place], english[place]))
            assert own == other, (rung.name, part)


def test_a_chapter_shows_bars_and_published_figures(pages):
    texts, _ = pages
    text = texts["tutorial/memory-order/simd_row.md"]
    assert '<li class="own"><span>simd_row</span><i style="--length:' in text
    assert '<li class="parent"><span>scalar_reordered</span>' in text
    assert "| Published, the same 4-core laptop chip of 2019, vectors of 8 floats | n = 512 |" in text
    assert "There are no records" not in text
    blocks = pages[0]["tutorial/hopper/wgmma_blockscaled.md"]  # of a suite, for the ladder has no float8
    assert re.search(r'<li class="own"><span>wgmma_blockscaled<', blocks)
    machines = Stored(ROOT).newest(query(f"{FLOAT8} machine=gpu"))
    assert len(machines) > 0
    assert blocks.count('<figure class="bars">') == len(machines)


def test_templates_name_commands_that_exist(pages):
    texts, _ = pages
    own = [text for page, text in texts.items() if page.startswith("tutorial/") or page in ("index.md", "measuring.md")]
    assert len(own) > len(RUNGS)
    assert [wrong for text in own for wrong in unknown_commands(text)] == []


def test_what_a_chapter_inspects_is_not_refused(pages):
    texts, _ = pages
    commands = re.findall(
        r"^gemmery inspect (\w+)(?: ([a-z]\w+))?(?: --n (\d+))?$", "\n".join(texts.values()), re.MULTILINE
    )
    assert {name for name, *_ in commands} == {rung.name for rung in CUDA}
    for *names, side in commands:
        for row in (rung for rung in CUDA if rung.name in names):
            problem = gather._problem(row, 0, int(side or 0), 0, row.dtypes[0], driver.find("h200"))
            assert row.refuses(problem) == "", (row.name, side)


def test_every_part_begins_with_a_rung_and_an_introduction():
    parts = course.course()
    assert [rung for part in parts for rung in part.rungs] == list(RUNGS)
    texts = {path.stem for path in (ROOT / "site_pages" / "text" / "en" / "parts").glob("*.md")}
    assert texts == {part.name for part in parts}
    assert all(len({bool(rung.geometry) for rung in part.rungs}) == 1 for part in parts)


def test_every_public_name_has_a_place_in_the_reference():
    import gemmery

    listed = reference.pages(gemmery._HOMES, ROOT)
    names = [name for page in listed.values() for name in page]
    assert set(gemmery.__all__) <= {name.rpartition(".")[2] for name in names}
    assert len(set(names)) == len(names)
    assert "gemmery.torch.linear" in listed["torch"]
    assert listed["products"][0] == "gemmery.api.matmul"


@pytest.mark.parametrize("language", write.LANGUAGES)
def test_every_page_of_the_reference_has_a_title_and_every_title_a_page(language, tmp_path):
    import gemmery

    titles = write.Writer(ROOT, tmp_path, language, pictures=False).titles
    sections = {"home", "tutorial", "guides", "reference", "explanation", "project", "findings", "decisions"}
    assert titles.keys() - sections == reference.pages(gemmery._HOMES, ROOT).keys()


def test_lines_of_chinese_are_joined_without_spaces():
    assert phrases.joined("一行，\n  另一行。\n`code` 和\n\n- 一项\n- b") == "一行，另一行。`code` 和\n\n- 一项\n- b"
    assert phrases.joined("做法：\n```\na\n```\n一\n# 二") == "做法：\n```\na\n```\n一\n# 二"
    assert phrases.joined("one.\ntwo") == "one.\ntwo"


def test_public_names_are_read_from_source(tmp_path):
    (tmp_path / "one.py").write_text('import nothing_of_this_name\n__all__ = ["a", "b"]\n')
    assert reference.public(tmp_path / "one") == ["a", "b"]
    assert reference.public(tmp_path / "two") == []


def test_what_functions_return_is_where_the_reference_looks():
    for name in itertools.chain(*reference.ALSO.values()):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_the_site_needs_no_other_versions_than_the_library():
    versions = [
        dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / name).read_text(), re.MULTILINE))
        for name in ("requirements.lock", "requirements-docs.lock")
    ]
    shared = versions[0].keys() & versions[1].keys()
    assert "jinja2" in shared
    assert [name for name in shared if versions[0][name] != versions[1][name]] == [], "run `make lock`"


def test_the_documents_are_pages_and_keep_their_links(pages):
    texts, _ = pages
    documents = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    english = {name.replace("README", "documents") for name in documents if not name.endswith(".zh.md")}
    assert english <= texts.keys()
    assert "source/packages/gemmery/src/gemmery/cuda/kernels/simt_naive.cu.md" in texts
    assert "[source](" not in texts["design.md"]
    assert [place for place, text in texts.items() if "![" in text and "/source/" not in f"/{place}"] == []  # not drawn
    assert "```pycon\n>>> import numpy" in texts["emulator.md"]


def test_the_records_have_a_page_which_links_to_their_folder_lead_to(pages):
    texts, config = pages
    assert "results.md" in leaves(config["nav"])
    assert "\n<!-- table: square_f32 -->\n*" in texts["results.md"]
    assert "](results.md#the-emulator)" in texts["emulator.md"]
    assert "](../results.md)" in texts["guides/quantized_matrices.md"]


def test_lists_examples_and_drawings_become_what_the_site_understands():
    assert repository.spaced("one:\n- a\n- b\n  c\n- d") == "one:\n\n- a\n- b\n  c\n- d"
    svg = '<svg id="a"><style>x</style>\n\n<use href="#a"/><g fill="url(#a)"/></svg>'
    assert repository.inline(svg, "n") == '<svg id="n-a"><use href="#n-a"/><g fill="url(#n-a)"/></svg>'
    assert chapters.code_html("`a<b` & c") == "<code>a&lt;b</code> &amp; c"


def test_broken_links_are_caught(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#there"></a><a id="x" href="#x"></a><a href="https://x.org"></a>')
    (tmp_path / "b.html").write_text('<h1 id="there"></h1><img src="none.svg"><a href="a.html#no"></a>')
    (tmp_path / "c.html").write_text('<script src="https://x.org/a.js"></script><a href="d.html"></a>')
    assert links.broken(tmp_path) == [
        "b.html: none.svg",
        "b.html: a.html#no",
        "c.html: https://x.org/a.js",
        "c.html: d.html",
    ]


def test_a_language_is_a_folder_of_texts(tmp_path, monkeypatch):
    english = json.loads((translations.TEXTS / "en" / "titles.json").read_text())
    mark = translations.fingerprint((translations.TEXTS / "en" / "titles.json").read_text())
    shutil.copytree(translations.TEXTS / "en", tmp_path / "en")
    (tmp_path / "zh").mkdir()
    (tmp_path / "zh" / "titles.json").write_text(json.dumps({**english, "tutorial": "T in zh"}))
    (tmp_path / "zh" / "english.toml").write_text(f'"titles.json" = "{mark}"\n')
    monkeypatch.setattr(translations, "TEXTS", tmp_path)
    writer = write.Writer(ROOT, tmp_path / "pages", "zh", pictures=False)
    assert writer.labels["tutorial"] == "T in zh"
    assert "T in zh" in writer.write()[1]
    assert not (tmp_path / "pages" / "gpu.md").exists()


def test_without_translations_the_pages_are_english(folder, tmp_path, monkeypatch):
    shutil.copytree(translations.TEXTS / "en", tmp_path / "en")
    (tmp_path / "zh").mkdir()
    monkeypatch.setattr(translations, "TEXTS", tmp_path)
    write.Writer(ROOT, tmp_path / "pages", "zh", pictures=False).write()
    empty = {path.relative_to(tmp_path / "pages").as_posix(): path for path in (tmp_path / "pages").rglob("*.md")}
    english = written(folder, "en")
    assert empty.keys() == written(folder, "zh").keys()
    assert [page for page, path in empty.items() if path.read_text() != english[page]] == []
