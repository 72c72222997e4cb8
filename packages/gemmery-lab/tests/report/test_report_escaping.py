"""Pages show what kernels, results and names say as text, whatever it contains."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from jinja2 import UndefinedError

import gemmery_emulator
import gemmery_lab
import gemmery_lab as lab
import records
from gemmery.ladder.diff import Difference, Fact
from gemmery.ladder.exhibits import find
from gemmery_emulator.pages import writing
from gemmery_emulator.pages.writing import framed
from gemmery_lab.inspection.gather import inspect_rung
from gemmery_lab.inspection.notebook import inspection_page, side_by_side_page
from gemmery_lab.inspection.records import SideBySide
from gemmery_lab.report.exhibit_results import emulated_exhibit_page
from gemmery_lab.report.page import emulated_page, page
from gemmery_lab.report.terminal import difference_page
from gemmery_lab.rung_counts import EmulatedLadder

pytest.importorskip("cuda.bindings")

BAD = "//</pre></td><script>alert('1')</script><img src=x onerror=\"alert(2)\">&amp;"


class Tags(HTMLParser):
    """The tags of a page, and attributes that would run code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.handlers += [name for name, _ in attributes if name.startswith("on")]


def hostile(found):
    """An inspection whose kernel, code and names all hold markup."""
    run = found.emulated
    return replace(
        found,
        rung=found.rung + BAD,
        idea=BAD,
        not_emulated=BAD,
        config={BAD: 1},
        kernels=tuple(replace(one, name=BAD, ptx=BAD, sass=BAD, missing=BAD) for one in found.kernels),
        emulated=replace(
            run,
            lines=tuple(replace(one, code=BAD, line=f"{BAD}:3") for one in run.lines),
            kinds={BAD: 1},
            source=dict.fromkeys(run.source, BAD),
        ),
    )


@pytest.fixture(scope="module")
def inspected():
    return [hostile(inspect_rung(name, n=64, device="sm_80")) for name in ("divergence_split", "simt_smem")]


def test_markup_in_records_is_shown_as_text(monkeypatch):
    monkeypatch.setattr("gemmery_lab.report.exhibit_results._source", lambda _: BAD)
    run = records.ladder()
    bad = tuple(replace(m, note=BAD, refused=m.refused and BAD) for m in run.measurements)
    rungs = tuple(rung._replace(idea=rung.idea + BAD, lesson=BAD, source=BAD) for rung in records.RUNGS)
    machine = replace(run.machine, cpu=BAD, blas=BAD, os=BAD)
    shown = replace(find("bank_stride"), idea=BAD, lesson=BAD)
    one = lab.emulated_exhibit("divergence_split", 64)[0]
    pages = {
        "ladder": page(replace(run, machine=machine, measurements=bad), rungs),
        "exhibit": emulated_exhibit_page(shown, [replace(one, arch=BAD, findings=(BAD,))]),
    }
    for name, text in pages.items():
        tags = Tags(text)
        assert not tags.found & {"script", "img"}, name
        assert tags.handlers == [], name
        assert "alert(" in text, name


def test_markup_in_a_kernel_is_shown_as_text(inspected):
    split, smem = inspected
    rung = replace(lab.emulated_ladder(["simt_smem"], [16]).rungs[0], rung="simt_smem", findings=(BAD,), dtype=BAD)
    refused = replace(rung, refused=BAD, findings=())
    ladder = EmulatedLadder(lab.emulated_ladder(["simt_smem"], [16]).device, BAD, (rung, refused))
    pages = {
        "rung": inspection_page(smem),
        "exhibit": inspection_page(split),
        "pair": side_by_side_page(SideBySide(smem, smem)),
        "diff": difference_page(Difference(BAD, BAD, (Fact(BAD, BAD, BAD),), (f"+{BAD}", f"@@ {BAD}", f"---{BAD}"))),
        "ladder": emulated_page(ladder),
        "frame": framed(inspection_page(smem), BAD),
    }
    for name, text in pages.items():
        tags = Tags(text)
        assert not tags.found & {"script", "img"}, name
        assert tags.handlers == (["onload"] if name == "frame" else []), name
        assert "alert(" in text, name


def test_only_drawings_and_the_style_are_not_escaped():
    sources = {
        path.name: path.read_text()
        for home in (gemmery_emulator, gemmery_lab)
        for path in Path(home.__file__).parent.rglob("templates/*.html")
    }
    unescaped = {name: re.findall(r"[\w.()]+ \| safe", text) for name, text in sources.items() if "safe" in text}
    assert unescaped == {"parts.html": ["plot.svg | safe"], "shell.html": ["style() | safe"]}
    assert not re.search(r"autoescape|Markup", "".join(sources.values()))


def test_a_name_that_a_template_does_not_get_is_an_error():
    with pytest.raises(UndefinedError, match="'title' is undefined"):
        writing.render("shell.html", "gemmery_emulator.pages")
