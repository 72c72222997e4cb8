"""The built documentation site: its links, and its pages in headless Chromium; `make site` builds it and runs this."""

import re
import sys
from pathlib import Path

import pytest

import chromium

ROOT = Path(__file__).parents[1]
SITE = ROOT / "site"
sys.path.insert(0, str(ROOT))

from site_pages import links  # noqa: E402

pytestmark = pytest.mark.skipif(not (SITE / "index.html").exists(), reason="there is no site: run make site")
SEEN = (
    "index.html",
    "tutorial/index.html",
    "tutorial/memory-order/index.html",
    "tutorial/memory-order/scalar_reordered.html",
    "tutorial/bank-conflicts/simt_padded.html",
    "tutorial/hopper/wgmma_specialized.html",
    "reference/products.html",
    "reference/torch.html",
    "guides/quantized_matrices.html",
    "ladder_gpu.html",
    "results.html",
    "zh/index.html",
    "zh/tutorial/index.html",
    "zh/tutorial/hopper/wgmma_specialized.html",
    "zh/tutorial/bank-conflicts/simt_padded.html",
)
SCHEMES = ("light", "dark")
WIDTHS = (400, 1280)

# Elements that reach beyond the window's right edge and lie in nothing that scrolls or clips.
BEYOND = """[...document.querySelectorAll("main *")].filter(element => {
  if (element.getBoundingClientRect().right <= innerWidth + 1) return false;
  for (let at = element; at; at = at.parentElement)
    if (at.tagName === "svg" || getComputedStyle(at).overflowX !== "visible") return false;
  return true;
}).map(element => element.tagName + "." + element.className).slice(0, 5)"""
# The luminance of a color that CSS may write in any form, from 0 to 1.
LUMINANCE = """(color => {
  const context = document.createElement("canvas").getContext("2d");
  context.fillStyle = color;
  context.fillRect(0, 0, 1, 1);
  const [red, green, blue] = context.getImageData(0, 0, 1, 1).data;
  return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255;
})(getComputedStyle(%s).%s)"""


@pytest.fixture(scope="module")
def page():
    if chromium.PROGRAM is None:
        pytest.skip("chromium is not installed")
    with chromium.browser() as browser:
        yield browser


def test_no_link_is_broken_and_nothing_comes_from_elsewhere():
    assert links.broken(SITE) == []


def test_names_in_docstrings_are_code_and_not_bold():
    pages = sorted((SITE / "reference").glob("*.html"))
    assert len(pages) >= 8
    bold = [(page.name, *re.findall(r"<strong>.*?</strong>", page.read_text(encoding="utf-8"))) for page in pages]
    assert [names for names in bold if names[1:]] == []


def test_there_is_no_page_for_wrong_addresses_in_one_language():
    assert not (SITE / "404.html").exists()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SEEN)
def test_a_page_fits_its_window_and_has_its_colors(name, width, scheme, page):
    page.open(SITE / name, width, scheme)
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value(BEYOND) == []
    assert page.value("document.querySelector('h1').innerText.trim().length") > 0
    assert page.value("[...document.images].filter(i => !i.complete || i.naturalWidth === 0).map(i => i.src)") == []
    paper = page.value(LUMINANCE % ("document.body", "backgroundColor"))
    ink = page.value(LUMINANCE % ("document.querySelector('article p')", "color"))
    assert (paper < 0.15 and ink > 0.5) if scheme == "dark" else (paper > 0.9 and ink < 0.5)


@pytest.mark.parametrize("folder", ["", "zh/tutorial"])
def test_every_page_fits_a_telephone(folder, page):
    pages = [path for path in (SITE / folder).rglob("*.html") if folder or path.relative_to(SITE).parts[0] != "zh"]
    assert len(pages) > 60
    wide = []
    for path in pages:
        page.open(path, 400, "light")
        if page.value("document.documentElement.scrollWidth") > 400 or page.value(BEYOND):
            wide.append(path.relative_to(SITE).as_posix())
    assert wide == []


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_of_a_wide_table_is_not_a_screen_high(width, page):
    page.open(SITE / "results.html", width, "light")
    heights = "[...document.querySelectorAll('tr')].map(row => row.getBoundingClientRect().height)"
    assert 0 < page.value(f"Math.max(...{heights})") <= 300


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_drawing_is_in_the_colors_of_its_page(scheme, page):
    page.open(SITE / "tutorial/bank-conflicts/simt_padded.html", 1280, scheme)
    assert page.value("document.querySelectorAll('.picture svg').length") >= 4
    ink = page.value(LUMINANCE % ("document.querySelector('.picture svg text')", "fill"))
    assert ink > 0.4 if scheme == "dark" else ink < 0.5
    assert page.value("document.querySelectorAll('.bars .own').length") >= 1


def test_a_picture_of_a_page_is_not_blank(page):
    page.open(SITE / "index.html", 1280, "light")
    light = page.picture()
    page.open(SITE / "index.html", 1280, "dark")
    assert light.startswith(b"\x89PNG")
    assert len(light) > 20_000
    assert page.picture() != light
