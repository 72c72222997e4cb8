"""The documents refer only to things that exist: links, commands and options, make targets, names of the library."""

import ast
import contextlib
import re
import subprocess
from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import gemmery as gm

ROOT = Path(__file__).parents[1]
PLANS = {"docs/design.md"}  # also names planned files


def tracked(*patterns: str) -> list[str]:
    """Return the matching files under version control, or all matching files if this is not the top of a repository."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        if (ROOT / ".git").exists():  # a source distribution may be unpacked inside a repository, which ignores it
            listed = subprocess.run(
                ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.split("\0")
            return sorted(name for name in listed if name and (ROOT / name).exists())
    places = [ROOT, *(ROOT / name for name in ("packages", "tests", "docs", "examples", "benchmarks"))]
    found = {path for pattern in patterns for top in places[1:] for path in top.rglob(pattern)}
    found |= {path for pattern in patterns for path in ROOT.glob(pattern)}
    return sorted(str(path.relative_to(ROOT)) for path in found)


DOCUMENTS = tracked("*.md")
TOLD = [name for name in DOCUMENTS if name not in PLANS and not name.startswith("docs/decisions/")]


def code(text: str) -> list[str]:
    """Return the lines of fenced blocks, and spans between backticks."""
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line for block in fenced for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", rest)


def in_each(names: Iterable[str], wrong: Callable[[str], Collection[str]]) -> dict[str, Collection[str]]:
    """Return what is wrong in the text of each file, of those files where something is."""
    lists = {name: wrong((ROOT / name).read_text()) for name in names}
    return {name: faults for name, faults in lists.items() if faults}


def anchors(text: str) -> set[str]:
    """Return the link fragments of a document's headings."""
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(name: str, text: str) -> list[str]:
    """Return the broken relative links of the document `name`."""
    links = re.findall(r"\]\(([^)\s]+)[^)]*\)", text) + re.findall(r"(?:src|href|srcset)=\"([^\"]+)\"", text)
    wrong = []
    for link in links:
        path, _, fragment = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (ROOT / name).parent / path if path else ROOT / name
        inside = target.resolve().is_relative_to(ROOT)
        known = target.suffix != ".md" or not fragment or (target.exists() and fragment in anchors(target.read_text()))
        if not (inside and target.exists() and known):
            wrong.append(link)
    return wrong


@cache
def commands_of_gemmery() -> dict[str, Any]:
    import typer

    from gemmery_lab.cli import app

    return typer.main.get_command(app).commands


def unknown_commands(text: str) -> list[str]:
    """Return the commands and options in a document that gemmery does not have."""
    commands = commands_of_gemmery()
    wrong = []
    for line in code(text):
        for name, rest in re.findall(r"(?:^|(?<!import)[\s$])gemmery +([a-z]+)([^|#\n]*)", line):
            options = (
                {option for parameter in commands[name].params for option in parameter.opts} | {"--help"}
                if name in commands
                else set()
            )
            wrong += [f"gemmery {name}"] if name not in commands else []
            wrong += [f"gemmery {name} {option}" for option in re.findall(r"--[a-z-]+", rest) if option not in options]
    return wrong


def test_relative_links_resolve():
    links = {name: broken_links(name, (ROOT / name).read_text()) for name in DOCUMENTS}
    assert {name: wrong for name, wrong in links.items() if wrong} == {}


def test_commands_and_options_exist():
    assert in_each(TOLD, unknown_commands) == {}


def words_of_code(pattern: str, text: str) -> set[str]:
    """Return what the pattern matches in code of a document."""
    return {word for line in code(text) for word in re.findall(pattern, line)}


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert in_each(TOLD, lambda text: words_of_code(r"(?:^|[\s$])make ([a-z-]+)\b", text) - targets) == {}


def test_names_of_the_library_exist():
    names = r"\bgm\.([A-Za-z_]\w*)"
    assert in_each(TOLD, lambda text: [name for name in words_of_code(names, text) if not hasattr(gm, name)]) == {}


@pytest.mark.process
def test_nothing_points_outside_or_is_left_undone():
    outside = r"(?<![\w.])/(?:" + "|".join(["work", "root", "tmp", "home", "mnt"]) + r")/|\.\./shared"
    undone = r"\b(?:" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX"]) + r")\b"
    files = tracked("*.md", "*.py", "*.toml", "Makefile", ".ci/*")
    assert in_each(files, re.compile(f"{outside}|{undone}").findall) == {}


MANNERED = (
    "what can be said",
    "a rival fewer",
    "hold what it costs",
    "waits? for what no",
    "asks of a device",
    "of your own too",
    "yours too",
    "is held to",
    "what is said of",
    "is told of",
    "for want of",
    "where there is such",
    "a ladder of their own",
    "comes? to nothing",
    "the way it came",
    "none but",
    "by lot",
    "from a keyboard",
)


def texts_of_source() -> dict[str, str]:
    """What users read of the package: every string that is no docstring, and every template, by file."""
    texts = {}
    for path in sorted((ROOT / "packages").glob("*/src/**/*.py")):
        tree = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docs]
        texts[str(path.relative_to(ROOT))] = "\n".join(value for value in strings if isinstance(value, str))
    templates = (ROOT / "packages").glob("*/src/**/*.html")
    return texts | {str(path.relative_to(ROOT)): path.read_text() for path in sorted(templates)}


def mannered(text: str) -> list[str]:
    """Phrases that plain technical English does without; a line break counts as a space."""
    return re.findall("|".join(rf"\b{phrase}\b" for phrase in MANNERED), " ".join(text.split()), re.IGNORECASE)


def test_documents_and_messages_are_in_plain_english():
    texts = {name: (ROOT / name).read_text() for name in DOCUMENTS} | texts_of_source()
    assert {name: found for name, text in texts.items() if (found := mannered(text))} == {}
    assert mannered("`--help` shows what can\nbe said") == ["what can be said"]


def test_no_value_begins_a_line():
    """Markdown takes a line that begins with a comment for HTML, and drops the line break before it."""
    assert in_each(DOCUMENTS, re.compile(r"^ *<!-- value.*", re.MULTILINE).findall) == {}


def test_every_document_is_in_the_index():
    text = (ROOT / "docs" / "README.md").read_text()
    listed = {name.removeprefix("docs/") for name in DOCUMENTS if name.startswith("docs/")}
    pages = {name for name in listed if name.startswith(("decisions/", "findings/"))}  # findings/README.md has its own
    single = listed - pages - {"README.md"} | {"findings/README.md"}
    assert [name for name in sorted(single) if f"]({name})" not in text] == []


def test_no_number_with_a_period_begins_a_line():
    """Within a sentence Markdown takes such a line for an item of a list, and drops the number."""
    assert in_each(DOCUMENTS, re.compile(r"[\w,]\n *\d+\. .*").findall) == {}


def test_the_readme_is_short():
    assert (ROOT / "README.md").stat().st_size <= 6144


def test_what_is_generated_is_up_to_date(sample):
    """`make test` compares every text and draws one figure in four, `make check` all: they take 7 of 9 s."""
    from gemmery.ladder.cpu import CPU
    from gemmery.ladder.cuda import CUDA
    from site_pages.documents import FIGURES, MARKER, Documents, documents

    filler, sources = Documents(ROOT, CPU, CUDA), documents(ROOT)
    texts = {path: source.read_text() for path, source in sources.items()}
    shown = {marked[0] for text in texts.values() for marked in MARKER.finditer(text) if marked[1] in FIGURE}
    drawn = set(sample(sorted(shown), 4))
    for path, text in texts.items():
        texts[path] = MARKER.sub(lambda marked: "" if marked[0] in shown - drawn else marked[0], text)
    filled = {path: filler.fill(path, text) for path, text in texts.items()}
    stale = [str(path) for path, text in filled.items() if path == sources[path] and text != texts[path]]
    stale += [str(path) for path, svg in filler.written.items() if not path.exists() or path.read_text() != svg]
    if drawn == shown:
        stale += [str(path) for path in (ROOT / FIGURES).glob("*") if path not in filler.written]
    assert stale == [], "run `make docs`"


FIGURE = ("figure", "picture")


UNITS = r"[GT]FLOP/s|[GT]op/s|[GT]B/s|ns|[uµm]s|%|×|x\b(?!\d| \d)| times as (?:fast|long|slow)| of cuBLAS"
MEASURED = rf"[\d.,]*\d\s?(?:{UNITS})"
RECORDED = r"benchmarks/(?:results|tuning|nsight)/[\w.-]+\w|(?:benchmarks|examples)/\w+\.py"  # records, or a script
NAMED = rf"<!-- record -->|`gemmery\s[a-z]+|`[^`]*(?:{RECORDED})"


def blocks(text: str) -> list[str]:
    """Return the paragraphs, list items and tables of a document; a table has the paragraph or item in front of it.

    A measured value between markers is `<!-- record -->`; other generated text is left out.
    """
    from site_pages.documents import MARKER

    own = MARKER.sub(lambda marked: "<!-- record -->" if marked[1] == "value" else "", text)
    parts = re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", own)
    before = ["", *parts]
    return [f"{before[i]}\n{part}" if part.startswith("|") else part for i, part in enumerate(parts)]


def typed_figures(text: str) -> list[str]:
    """Return figures of speed: numbers with such a unit, and table cells that are numbers."""
    cells = [cell.strip() for line in text.splitlines() if line.startswith("|") for cell in line.strip("|").split("|")]
    return re.findall(MEASURED, text) + [cell for cell in cells if re.fullmatch(r"[*~]*[\d.,]+\D{0,12}", cell)]


def figures_without_source(text: str) -> list[str]:
    """Return figures of speed whose paragraph, list item or table names no record and no command that repeats them."""
    return [figure for block in blocks(text) if not re.search(NAMED, block) for figure in typed_figures(block)]


def unknown_sources(text: str) -> list[str]:
    """Return the records, scripts and suites in a document that do not exist."""
    from gemmery_lab.measure import suite

    spans, known = code(text), suite.names()
    files = [file for span in spans for file in re.findall(RECORDED, span)]
    lists = [names for span in spans for names in re.findall(r"gemmery bench((?: [a-z]\w*(?![\w.]))+)", span)]
    missing = [name for names in lists for name in names.split() if name not in known]
    return [file for file in files if not (ROOT / file).is_file()] + missing


def test_typed_figures_of_speed_name_their_source():
    names = {name for name in DOCUMENTS if name.startswith(("docs/", "README"))} - PLANS
    assert in_each(names, figures_without_source) == {}


def test_records_and_suites_exist():
    assert in_each(TOLD, unknown_sources) == {}


def test_the_docstring_of_a_module_begins_with_a_line_that_is_a_sentence():
    folders = re.findall("<!-- files: (.*?) -->", (ROOT / "docs" / "design.md").read_text())
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    firsts = {file: (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0] for file in files}
    assert [str(file) for file, first in firsts.items() if not first.endswith(".")] == []


def test_a_broken_document_is_caught():
    assert broken_links("README.md", "[a](docs/none.md) [b](LICENSE) [c](https://x.org) [d](/etc) [e](#none)") == [
        "docs/none.md",
        "/etc",
        "#none",
    ]
    text = "`gemmery frobnicate`, `gemmery ladder --sizes 64`\n```\n$ gemmery ladder --color\n```\nthe gemmery word"
    assert unknown_commands(text) == ["gemmery ladder --color", "gemmery frobnicate"]


def test_a_typed_figure_without_source_is_caught():
    text = "it runs at 12.5 GFLOP/s, 3x faster, 97 % of the peak\n\n| n | a |\n| --- | --- |\n| 64 | **1.5×** |\n"
    assert typed_figures(text) == ["12.5 GFLOP/s", "3x", "97 %", "1.5×", "64", "**1.5×**"]
    assert figures_without_source(text) == ["12.5 GFLOP/s", "3x", "97 %", *typed_figures(text)]
    inside = "<!-- table: skinny -->\n| 64 | 1.5× |\n<!-- end -->\ngains <!-- value: skinny rate -->2.5×<!-- end -->"
    assert figures_without_source(f"{inside}\na 4x4 product of 4 x 4, float32, 16 rows, 4 KiB, Python 3.11") == []


def test_a_typed_figure_is_welcome_with_its_source():
    record = "`benchmarks/results/nvidia-h200.jsonl`"
    assert figures_without_source(f"- it takes 3 µs (`gemmery bench skinny`)\n- and 4 % ({record})") == []
    assert figures_without_source(f"so fast ({record}):\n\n| n | a |\n| --- | --- |\n| 64 | 3 ms |\n") == []
    assert figures_without_source(f"- it takes 3 µs\n- and 4 % ({record})\n\n2 ms, 0.98 of cuBLAS") == [
        "3 µs",
        "2 ms",
        "0.98 of cuBLAS",
    ]
    assert unknown_sources(f"{record} `gemmery bench skinny mine.toml gemv`, `benchmarks/tune_wgmma.py`") == []
    wrong = "`gemmery bench skinny nosuch --seconds 1`, `benchmarks/tuning/none.jsonl`, `python benchmarks/none.py`"
    assert unknown_sources(wrong) == ["benchmarks/tuning/none.jsonl", "benchmarks/none.py", "nosuch"]
