"""Findings are pages with a command each and an index, and shares are numbers: "3 %" and not "a thirtieth"."""

import ast
import io
import re
import tokenize
from pathlib import Path

from test_docs import DOCUMENTS, PLANS, ROOT, code, in_each

PAGES = [name for name in DOCUMENTS if name.startswith("docs/findings/")]
SINGLE = [name for name in PAGES if not name.endswith("/README.md")]
SOURCES = sorted(path for end in ("py", "cu", "cuh") for path in (ROOT / "packages").glob(f"*/src/**/*.{end}"))

TENS = "twent|thirt|fort|fift|sixt|sevent|eight|ninet"
PART = (
    r"(?:(?:[a-z]+-)*(?:third|fourth|quarter|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth"
    r"|(?:thir|four|fif|six|seven|eigh|nine)teenth|(?:TENS)ieth|hundredth|thousandth|millionth)|\d+(?:st|nd|rd|th))"
).replace("TENS", TENS)
# What follows "a third" if it is a share; a noun follows it if it is the one after the second.
AFTER = (
    r"(?=\s+(?:of|off|more|less|longer|shorter|slower|faster|quicker|sooner|later|larger|smaller|higher|lower|above|below"
    r"|as|to|than|too|for|with|without|in|at|on|and|or|from|by|while|where|when|if|took|went|goes|was|is)\b"
    r"|\s*[.,;:()*]|\s*$)"
)
HALVES = rf"\bhalf\s+(?:as|of\s+an?)\s+(?:long|fast|{PART})\b"
SHARES = rf"\b(?:an?|one|another)[\s-]+(?:quarter\b|{PART}{AFTER})|\b{PART}s\b|{HALVES}"


def shares_in_words(text: str) -> list[str]:
    """Return shares such as "a third of", "two fifths" and "a 340th"; a third operand is none."""
    return [" ".join(share.split()) for share in re.findall(SHARES, text, re.IGNORECASE)]


def remarks(path: Path) -> str:
    """Return the comments of a source file, and its docstrings; adjacent lines of comments are one text."""
    source = path.read_text()
    if path.suffix != ".py":
        return "\n\n".join(re.sub(r"\s*//", " ", lines) for lines in re.findall(r"//[^\n]*(?:\n\s*//[^\n]*)*", source))
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    rows = {token.start[0]: token.string.lstrip("# ") for token in comments}
    lines = [("" if row - 1 in rows else "\n\n") + rows[row] for row in sorted(rows)]
    return "\n\n".join([*texts, " ".join(lines)])


def without_generated(text: str) -> str:
    """Return a document without the text between markers, which comes from records and from the rungs' rows."""
    from site_pages.documents import MARKER

    return MARKER.sub("", text)


def test_documents_write_shares_as_numbers():
    rules = PLANS | {"docs/results.md"}  # these say rules: a spread of a fifth or more
    names = {name for name in DOCUMENTS if name.startswith(("docs/", "README"))} - rules
    assert in_each(names, lambda text: shares_in_words(without_generated(text))) == {}


def test_comments_and_docstrings_write_shares_as_numbers():
    assert len(SOURCES) > 300
    # To read the remarks of all files takes 5 s: those without any such word have no share.
    named = [path for path in SOURCES if re.search(f"{PART}|half", path.read_text(), re.IGNORECASE)]
    shares = {str(path.relative_to(ROOT)): shares_in_words(remarks(path)) for path in named}
    assert {name: words for name, words in shares.items() if words} == {}


def lacks(text: str) -> list[str]:
    """Return what a finding lacks of a title, a lesson and a command that repeats it."""
    typed = without_generated(text).strip()
    title, lesson, *_ = typed.split("\n\n")
    last = typed.rpartition("\n\n")[2]
    has = {
        "a title": re.fullmatch(r"# .+", title),
        "a lesson": re.fullmatch(r"\*\*[^*]+\.\*\*", lesson),
        "a command": last.startswith("Repeat: ")
        and any(re.match(r"gemmery [a-z]|python benchmarks/|make [a-z]", span) for span in code(last)),
    }
    return [part for part, there in has.items() if not there]


def test_a_finding_has_a_title_a_lesson_and_a_command():
    assert in_each(SINGLE, lacks) == {}
    assert lacks("# A\n\n**B.**\n\nRepeat: `gemmery bench`.") == []
    assert lacks("A\n\nB.\n\nRepeat: `bench`.") == ["a title", "a lesson", "a command"]


def test_the_index_lists_every_finding_once():
    text = (ROOT / "docs" / "findings" / "README.md").read_text()
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", text, re.MULTILINE)
    assert sorted(listed) == sorted(Path(name).name for name in SINGLE)


def test_a_share_in_words_is_caught():
    text = (
        "a third of the time, a thirtieth less, took two fifths longer, a 340th of n = 4096, a twenty-fifth, "
        "one tenth of a round, within a hundredth. a hundred-and-fiftieth more, a\nquarter, half of a hundredth, "
        "seven eighths, half as long again, three-hundredths"
    )
    assert shares_in_words(text) == [
        "a third", "a thirtieth", "fifths", "a 340th", "a twenty-fifth", "one tenth", "a hundredth",
        "a hundred-and-fiftieth", "a quarter", "half of a hundredth", "eighths", "half as long", "three-hundredths",
    ]  # fmt: skip
    plain = "a third operand, a second thread, the fifth stage, every eighth row, a first product, 1/3 of the tiles"
    assert shares_in_words(f"{plain}, half the work, half precision, 3 %, 16th, a half, a tenth stage") == []


def test_remarks_are_comments_and_docstrings(tmp_path):
    (tmp_path / "a.py").write_text('"""One."""\n# two\n# three\nx = "four"  # five\n')
    (tmp_path / "a.cu").write_text("// one\n// two\nint x;  // three\n")
    assert remarks(tmp_path / "a.py").split() == ["One.", "two", "three", "five"]
    assert remarks(tmp_path / "a.cu").split() == ["one", "two", "three"]
