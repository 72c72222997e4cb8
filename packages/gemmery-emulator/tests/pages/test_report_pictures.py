"""The pictures of a warp agree with the counters of an H200, and their labels are legible."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from gemmery_emulator.pages import svg
from gemmery_emulator.pages.pictures import READINGS, pictures, swizzled_picture, tile_picture
from gemmery_emulator.pages.pictures.timeline import divergence_picture, timeline_picture
from gemmery_emulator.pages.pictures.wavefronts import boxes, groups, sectors_picture, wavefronts_picture
from gemmery_emulator.ptx import Line
from gemmery_emulator.trace import Divergence, Stretch, TileLayout, WarpAccess
from gemmery_emulator.trace.pipeline import NOBODY, BarrierStep, CopiedTile, Timeline
from gemmery_emulator.trace.selection import Selection

FILE = Path(__file__).parents[4] / "packages/gemmery/tests" / "data" / "memory_patterns_h200.jsonl"
PATTERNS = [json.loads(line) for line in FILE.read_text().splitlines()]
SVG = "{http://www.w3.org/2000/svg}"
LANES = range(32)


def access(opcode, width, addresses, space="shared", kind="", line=18):
    place = Line("kernel.cu", line)
    return WarpAccess(place, place, opcode, space, kind or opcode.split(".")[0], width, tuple(addresses))


def measured(pattern):
    """One pattern of the file as an access; idle lanes have no address."""
    active = int(pattern["active"], 16)
    addresses = [at if active >> lane & 1 else None for lane, at in enumerate(pattern["offsets"])]
    space = "global" if "sectors" in pattern else "shared"
    width = pattern["bytes"]
    if pattern["op"].startswith("ldmatrix"):
        width = 4 * int(re.search(r"x(\d)", pattern["op"])[1])
        addresses = (addresses + [None] * 32)[:32]
    return access(pattern["op"], width, addresses, space)


def swizzled(row, chunk):
    """Where a chunk of 16 bytes lies in a tile with rows of 128, each row's chunks in a different order."""
    return (row * 8 + (chunk ^ row % 8)) * 16


def plain(row, chunk):
    return (row * 8 + chunk) * 16


def tile(at, operand="A"):
    held = {at(row, chunk): (row, 8 * chunk) for row in range(64) for chunk in range(8)}
    store = access("cp.async.cg.shared.global", 16, [at(lane // 8, lane % 8) for lane in LANES], kind="cp.async")
    load = access("ldmatrix.sync.aligned.m8n8.x4.shared.b16", 16, [at(lane % 16, lane // 16) for lane in LANES])
    return TileLayout(operand, held, store, load)


def divergence():
    everyone, upper = (True,) * 32, tuple(lane > 15 for lane in LANES)
    lower = tuple(not works for works in upper)
    at = [Line("split.cu", number) for number in (9, 11, 12, 14, 16)]
    stretches = (
        Stretch(at[0], at[1], 14, everyone),
        Stretch(at[3], at[3], 300, lower),
        Stretch(at[2], at[2], 100, upper),
        Stretch(at[4], at[4], 2, everyone),
    )
    return Divergence(at[1], upper, everyone, stretches)


def copied(array="A", start=1024):
    """64 rows of 128 bytes under a swizzle of 128, of which a product reads 32 bytes of each row."""
    places = tuple(start + swizzled(row, chunk) for row in range(64) for chunk in range(8))
    reads = tuple(frozenset(places[at] for at in range(512) if at % 8 // 2 == part) for part in range(3))
    return CopiedTile(array, (64, 64), 2, (0, 128), 128, places, reads, "wgmma.mma_async.m64n64k16")


def ring(steps=6, stages=2):
    """Warpgroup 0 fills two stages whenever they are free; warpgroup 1 multiplies the one and then the other."""
    full, empty = (
        [8192 + 8 * stage for stage in range(stages)],
        [8192 + 8 * (stages + stage) for stage in range(stages)],
    )
    events, now = [], 0
    for step in range(steps):
        stage = step % stages
        if step >= stages:
            events.append(BarrierStep(now, "waits", 0, empty[stage], 1))
        for what, who, barrier, amount in (
            ("passes", 0, empty[stage], 1),
            ("expects", 0, full[stage], 16384),
            ("copies", 0, full[stage], 16384),
            ("ends", NOBODY, full[stage], 1),
            ("passes", 1, full[stage], 128),
            ("multiplies", 1, -1, 4),
            ("retires", 1, -1, 0),
            ("arrives", 1, empty[stage], 1),
            ("ends", NOBODY, empty[stage], 1),
        ):
            now += 1
            events.append(BarrierStep(now, what, who, barrier, amount))
    counts = {"waits": 2 * steps, "slept": steps - stages, "arrivals": 2 * steps, "phases": 2 * steps}
    counts |= {"copies": steps, "bytes": 16384 * steps, "products": 4 * steps}
    return Timeline(tuple(events), tuple(full), tuple(empty), counts)


EVERY = Selection(
    (
        access("ld.shared.f32", 4, [128 * lane for lane in LANES]),
        access("ld.shared.f32", 4, [64 * (lane // 16) for lane in LANES]),
        access("ld.shared.v4.f32", 16, [48 * lane for lane in LANES]),
        access("st.shared.u8", 1, LANES),
        access("st.shared.f32", 4, [None] * 31 + [0]),
    ),
    (tile(swizzled), tile(plain, "B")),
    (
        access("ld.global.f32", 4, [65536 + 4 * lane for lane in LANES], "global"),
        access("ld.global.f32", 4, [65536 + 1024 * lane for lane in LANES], "global"),
        access("ld.global.b16", 2, [65536 + 6 + 2 * lane for lane in LANES], "global"),
        access("ld.global.f64", 8, [65536] * 32, "global"),
    ),
    (divergence(),),
    copied=(copied(), copied("B", 0)),
    timeline=ring(),
)
SOURCE = {
    Line("split.cu", 12): "    y[i] = falling<STEPS>(x[i]) + a_name_that_is_much_longer_than_the_picture_is_wide;"
}
PLOTS = pictures(EVERY, SOURCE)


def cells(plot, fill):
    """The rectangles of one color."""
    found = ElementTree.fromstring(plot.svg).iter(f"{SVG}rect")
    return [rectangle for rectangle in found if rectangle.get("fill") == f"var(--{fill})"]


def said(plot, fill):
    """The titles of the cells of one color."""
    return [cell.find(f"{SVG}title").text for cell in cells(plot, fill) if cell.find(f"{SVG}title") is not None]


def test_stacks_are_as_high_as_the_wavefronts_that_an_h200_counted():
    shared = [pattern for pattern in PATTERNS if "wavefronts" in pattern]
    wrong = []
    for pattern in shared:
        one = measured(pattern)
        drawn = sum(1 + max(box.level for box in boxes(one, group)) for group in groups(one))
        if drawn != pattern["wavefronts"]:
            wrong.append((pattern["op"], pattern["label"], drawn, pattern["wavefronts"]))
    assert len(shared) > 900
    assert wrong == []


def test_sectors_are_those_that_an_h200_counted():
    moved = [pattern for pattern in PATTERNS if "sectors" in pattern]
    wrong = []
    for pattern in moved:
        drawn = len([text for text in said(sectors_picture(measured(pattern)), "soft") if "sector" in text])
        if drawn != pattern["sectors"]:
            wrong.append((pattern["op"], pattern["label"], drawn, pattern["sectors"]))
    assert len(moved) > 200
    assert wrong == []


def test_a_box_stands_for_each_word_of_each_lane():
    one = access("ld.shared.v4.f32", 16, [48 * lane for lane in LANES])
    found = [box for group in groups(one) for box in boxes(one, group)]
    assert sum(box.banks * len(box.lanes) for box in found) == 32 * 4
    assert {lane for box in found for lane in box.lanes} == set(LANES)
    places = [(box.level, bank) for box in boxes(one, groups(one)[0]) for bank in range(box.bank, box.bank + box.banks)]
    assert len(places) == len(set(places))


def test_lanes_that_meet_have_the_color_of_conflicts():
    strided = wavefronts_picture(access("ld.shared.f32", 4, [8 * lane for lane in LANES]))
    assert len(said(strided, "rival")) == 32
    assert said(strided, "accent") == []
    alone = wavefronts_picture(access("ld.shared.f32", 4, [4 * lane for lane in LANES]))
    assert len(said(alone, "accent")) == 32
    assert said(alone, "rival") == []
    assert "2 wavefronts, 1 of them a bank conflict" in strided.caption
    assert "1 wavefront, no bank conflict" in alone.caption


def test_a_tile_shows_who_stores_and_who_loads_where():
    good, bad = tile_picture(tile(swizzled)), tile_picture(tile(plain))
    assert said(good, "rival") == []
    assert [text for text in said(good, "accent") if text.startswith("A[3][0] ")] == [
        "A[3][0] at byte 432: lane 3"
    ]  # ldmatrix reads row 3's first chunk, which lies fourth
    assert len(said(bad, "rival")) == 8  # rows of the first matrix, all in banks 0 to 3
    assert "32 wavefronts, 28 of them bank conflicts" in bad.caption
    assert "4 wavefronts, no bank conflict" in good.caption


def test_a_global_access_says_what_is_moved_in_vain():
    apart = sectors_picture(access("ld.global.f32", 4, [1024 * lane for lane in LANES], "global"))
    assert "32 sectors of 32 bytes, where 4 would hold" in apart.caption
    assert "128 of 1,024 bytes, 12.5%" in apart.caption
    assert len(said(apart, "accent")) == 32


def test_a_copied_tile_shows_each_piece_on_both_sides_in_the_color_of_its_product():
    plot = swizzled_picture(copied())
    assert said(plot, "accent").count("A[3][0] of the box at byte 432") == 2
    shown = 20 * 8
    assert [len(said(plot, fill)) for fill in ("accent", "s2", "s1", "rule")] == [2 * shown // 4] * 4
    across = {}
    for fill in ("accent", "s2", "s1"):
        lefts = {
            cell.get("x")
            for cell in cells(plot, fill)
            if float(cell.get("x")) > svg.WIDTH / 2 and float(cell.get("y")) < 350
        }
        across[fill] = len(lefts)
    assert across == dict.fromkeys(("accent", "s2", "s1"), 8)  # 8 rows of a column lie in all banks
    assert "64 rows of 64 elements, 128 bytes each, with a swizzle of 128 bytes" in plot.caption
    assert "reads 128 of the 512 pieces" in plot.caption


def test_a_timeline_shows_who_waits_and_what_each_stage_holds():
    plot = timeline_picture(ring())
    assert said(plot, "rule") == ["waits for a phase to end"] * 4
    assert [text for text in said(plot, "accent") if "step" in text] == [
        f"step {step} of k: read" for step in (0, 2, 4, 1, 3, 5)
    ]
    assert len([text for text in said(plot, "accent") if "4 products under way" in text]) == 6
    texts = [text.text for text in ElementTree.fromstring(plot.svg).iter(f"{SVG}text")]
    assert texts[:6] == ["warpgroup 0", "copies", "warpgroup 1", "multiplies", "stage 0", "0"]
    assert "brings 98,304 bytes with 6 tensor copies, and its barriers see 12 arrivals and 12 phases" in plot.caption
    assert "Warpgroups wait 12 times, 4 of them while a phase is under way, and start 24 products" in plot.caption


def test_both_ways_of_a_branch_have_their_color_and_idle_lanes_have_none():
    plot = divergence_picture(divergence(), SOURCE)
    assert len(said(plot, "accent")) == 16
    assert len(said(plot, "s2")) == 16
    assert len(said(plot, "s7")) == 64
    assert "16 of 32 lanes branch, 16 do not" in plot.caption
    assert "It issues 400 of 416 instructions for some of its lanes only; 51.9%" in plot.caption


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
def test_a_picture_is_one_image_in_the_colors_of_the_page(plot):
    root = ElementTree.fromstring(plot.svg)
    assert root.get("role") == "img"
    assert len(root.get("aria-label")) > 10
    assert plot.title
    assert plot.caption.endswith(".")
    assert "script" not in plot.svg
    used = set(re.findall(r'(?:fill|stroke)="([^"]+)"', plot.svg)) - {"none"}
    assert used <= {f"var(--{name})" for name in svg.PALETTE}
    ElementTree.fromstring(svg.standalone(plot.svg))


def test_a_cell_shows_row_and_column_of_an_element_and_not_a_decimal_number():
    texts = [text.text for text in ElementTree.fromstring(tile_picture(tile(swizzled)).svg).iter(f"{SVG}text")]
    assert "3, 8" in texts
    assert not [text for text in texts if re.fullmatch(r"\d+\.\d+", text)]


def test_only_the_first_picture_of_a_kind_says_how_to_read_it():
    for kind, reading in READINGS.items():
        assert [reading in plot.caption for plot in PLOTS if plot.name.startswith(kind)][:2] in ([True], [True, False])
    told = pictures(EVERY, SOURCE, explained=frozenset(READINGS))
    assert not [plot.name for plot in told for reading in READINGS.values() if reading in plot.caption]


def test_names_of_pictures_differ():
    assert len({plot.name for plot in PLOTS}) == len(PLOTS)


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
def test_no_text_is_cut_off_or_lies_on_another(plot):
    root = ElementTree.fromstring(plot.svg)
    _, _, width, height = map(float, root.get("viewBox").split())
    spans = []
    for text in root.iter(f"{SVG}text"):
        size, x, y = (float(text.get(name)) for name in ("font-size", "x", "y"))
        wide = 0.55 * size * len(text.text)  # of digits and small letters; a monospaced font takes 0.6
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[text.get("text-anchor")]
        assert left >= 0, text.text
        assert left + wide <= width, text.text
        assert size / 2 <= y <= height - size / 2, text.text
        assert size >= 9  # a page shows a picture at about one unit a pixel
        spans.append((y, size, left, left + wide, text.text))
    spans.sort()
    for place, (y, size, left, right, one) in enumerate(spans):
        for other_y, other_size, other_left, other_right, other in spans[place + 1 :]:
            if other_y - y >= 0.35 * (size + other_size):
                break
            assert other_left >= right or other_right <= left, (one, other)
