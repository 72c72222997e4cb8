"""The rungs that multiply float32 on tensor cores, split into numbers of 16 bits."""

from __future__ import annotations

from dataclasses import replace

from gemmery.cuda import hopper
from gemmery.cuda.geometry import C_NAMES, Geometry, MapBox, target, template, tiles
from gemmery.errors import RefusedError
from gemmery.ladder import wgmma
from gemmery.ladder.general import GENERAL
from gemmery.ladder.gpu import gpu_rung
from gemmery.problem import Config, Problem

# Tiles by the stages that fit and their speeds: a thread has three sets of sums of two parts, four of a pair.
_TILES = (
    hopper.Instance(128, 128, 6, 1, 1, 100),
    hopper.Instance(64, 128, 6, 1, 1, 80),
    hopper.Instance(64, 64, 6, 1, 1, 65),
)
_PAIRED_TILES = (
    hopper.Instance(128, 96, 6, 1, 1, 100),
    hopper.Instance(64, 96, 6, 1, 1, 80),
    hopper.Instance(64, 64, 6, 1, 1, 65),
)
_ROW = 128  # bytes of k in a stage
_THREADS, _BLOCKS = 256, 4  # of the pre-pass: threads of a block, blocks on a multiprocessor
_PARTS = 3  # for which the workspace has room
DEEP = 128  # k from which CUDA cores take sums over every 64 of k, below it every 16
SHALLOW = 16  # k below which CUDA cores multiply float32 itself
_HELD = ((1024, 1, 4), (4096, 8, 2), (8192, 8, 4), (16384, 8, 8))  # longest row, warps that hold it, eights a thread
_WHOLE = 256  # bytes of which everything in the workspace begins at a multiple


def _places(problem: Problem) -> tuple[int, int, int, int]:
    """Return where the parts of A, those of B and the workspace end, and the bytes from a row of parts to the next."""
    pitch = _round(2 * problem.k, _ROW)
    marks = sum(_round(4 * problem.batch * side) + _round(4 * problem.k) for side in (problem.m, problem.n))
    a = _WHOLE + marks
    b, end = (_round(_PARTS * problem.batch * side * pitch) for side in (problem.m, problem.n))
    return a, a + b, a + b + end, pitch


def _round(count: int, multiple: int = _WHOLE) -> int:
    return -(-count // multiple) * multiple


def _held(problem: Problem) -> int:
    """Return the operands of which a row stays in registers: bit 0 stands for A, bit 1 for B."""
    if problem.k > _HELD[-1][0]:
        return 0
    return (problem.a_layout == "row") + 2 * (problem.b_layout == "col")


def _launch(source: str, name: str, problem: Problem, grid: int, *parameters: object) -> Geometry:
    return Geometry(
        f"{source}.cu",
        template(name, "float", C_NAMES[problem.out], *parameters),
        (grid, 1, 1),
        (_THREADS, 1, 1),
        needs=90,
        instructions="griddepcontrol",
        overlaps=True,
    )


def _largest(problem: Problem) -> tuple[Geometry, ...]:
    """The launches in front of all others: what they lower or raise, and the largest elements of rows not held."""
    longest = max(problem.m * problem.batch, problem.n * problem.batch, problem.k, 1)
    begin = _launch("split_parts", "split_begin", problem, -(-longest // _THREADS))
    rest = 3 - _held(problem)
    blocks = _BLOCKS * target(problem).sms
    return (begin, _launch("split_parts", "split_largest", problem, blocks * 3 // 2, rest)) if rest else (begin,)


def _split(problem: Problem, scheme: str, asked_for: bool) -> tuple[Geometry, ...]:
    """The launches that write the parts of A and B."""
    held, blocks = _held(problem), _BLOCKS * target(problem).sms
    launches = []
    if held:
        warps, eights = next(each[1:] for each in _HELD if problem.k <= each[0])
        parameters = (scheme, _flag(asked_for), held, warps, eights)
        launches.append(_launch("split_parts", "split_rows", problem, blocks, *parameters))
    if held != 3:
        launches.append(_launch("split_parts", "split_tiles", problem, blocks, scheme, _flag(asked_for), 3 - held))
    return tuple(launches)


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _guard(problem: Problem) -> Geometry:
    return _launch("split_parts", "split_guard", problem, -(-problem.k // _THREADS))


def _plain(problem: Problem) -> Geometry:
    """The product on CUDA cores, where an operand has Inf or NaN."""
    simt = next(rung for rung in GENERAL if rung.name == "simt_general")
    geometry = simt.geometry(problem._replace(precision=""), simt.default)
    kernel = geometry.kernel.replace("simt_general", "split_simt", 1)
    return replace(geometry, source="split_simt.cu", kernel=kernel, needs=90, overlaps=True)


def _tile(problem: Problem, config: Config, tiled: tuple[hopper.Instance, ...]) -> hopper.Instance:
    """Return the tile of a config, or that whose rounds take least time."""
    sms = target(problem).sms
    fits = [each for each in tiled if config["bm"] in (0, each.bm) and config["bn"] in (0, each.bn)]
    if not fits:
        shapes = ", ".join(f"{each.bm} x {each.bn}" for each in tiled)
        raise RefusedError(f"bm={config['bm']}, bn={config['bn']}: its tiles are {shapes}; use one of them, or 0")
    return min(fits, key=lambda t: -(-tiles(problem, t.bm, t.bn)[0] // sms) * t.bm * t.bn / t.speed)


def _product(problem: Problem, config: Config, name: str, element: str, *parameters: object) -> Geometry:
    """The launch that multiplies parts."""
    tile = _tile(problem, config, _PAIRED_TILES if name == "split_paired" else _TILES)
    bm, bn, stages = tile[:3]
    a, b, end, pitch = _places(problem)
    sms = target(problem).sms
    band, blocks = hopper.order(tile, -(-problem.m // bm), -(-problem.n // bn), problem.batch, sms)
    tiling = template("WgmmaTiles", element, "ROW", "COL", bm, bn, stages)
    boxes = (
        MapBox(operand, (_ROW // 2, min(rows, side)), packed=place, pitch=pitch, element="f16", parts=_PARTS)
        for operand, side, rows, place in (("a", problem.m, bm, a), ("b", problem.n, bn, b))
    )
    return Geometry(
        f"{name}.cu",
        template(name, "float", C_NAMES[problem.out], wgmma.steps(problem), tiling, *parameters),
        (min(tiles(problem, bm, bn)[0], config["blocks"] or blocks or sms), 1, 1),
        (wgmma.consumers(problem, bm) * 128 + 128, 1, 1),
        shared=stages * (bm + bn) * _ROW + wgmma.staging_bytes(bm) + 16 * stages,
        workspace=end,
        needs=90,
        instructions="wgmma and tensor copies",
        alone=True,
        overlaps=True,
        tile=(bm, bn),
        maps=(*boxes, wgmma.piece_box(problem, bm, bn)),
        band=config["band"] or band,
    )


def _fp16x3(name: str, problem: Problem, config: Config) -> Geometry:
    """Two parts; after the guard three, and float32 itself: the device chooses, by launches that do nothing."""
    before = (
        *_largest(problem),
        *_split(problem, "TwoParts", asked_for=True),
        _guard(problem),
        *_split(problem, "ThreeParts", asked_for=False),
        _product(problem, config, "split_bf16x6", "bf16", _depth(problem.k), "false"),
        _plain(problem),
    )
    return replace(_product(problem, config, name, "f16"), before=before)


def _bf16x6(name: str, problem: Problem, config: Config) -> Geometry:
    """Three parts, whatever the operands hold but Inf and NaN."""
    before = (*_largest(problem), *_split(problem, "ThreeParts", asked_for=True), _plain(problem))
    return replace(_product(problem, config, name, "bf16", _depth(problem.k), "true"), before=before)


def _paired(name: str, problem: Problem, config: Config) -> Geometry:
    """Three parts, and sums in two numbers each."""
    before = (*_largest(problem), *_split(problem, "ThreeParts", asked_for=True), _plain(problem))
    return replace(_product(problem, config, name, "bf16", 32), before=before)


def _depth(k: int) -> int:
    return 64 if k >= DEEP else 16


def bound_fp16x3(k: int) -> float:
    """Return f(k) of the bound f(k) u |A||B|, u = 2^-24, where the guard lets two parts through or takes three."""
    return 52 + k / 60 + 0.375 * k


def bound_bf16x6(k: int) -> float:
    """Return f(k) for three parts."""
    depth = _depth(k)
    return 4 + 0.66 * depth + k / depth


def bound_paired(k: int) -> float:
    """Return f(k) for three parts and sums in pairs."""
    return 24 + 2.0**-24 * k / 32


# Times on an H200, in microseconds and cycles of 1.7 GHz.
_LAUNCHES = 10.0  # of eight launches, most of which do nothing
_PRE_PASS = 3.6e6, 2.2e6  # bytes in a microsecond, of rows that stay in registers and of others
_CYCLES, _END, _BUSY = 1700.0, 4000, 0.85  # of a microsecond; of the end of a tile; of tensor cores
_SIMT, _SIMT_LEAST, _SIMT_END = 48e6, 4.0, 2.0  # operations in a microsecond, of whole rounds


def pays(problem: Problem) -> bool:
    """Return True if split_fp16x3 should take less time for a product than CUDA cores.

    >>> case = Problem(4096, 4096, 4096, "f32", "f32", device="h200", precision="f32_tensor")
    >>> pays(case), pays(case._replace(m=8))
    (True, False)
    """
    p, sms = problem.by_rows(), target(problem).sms
    tile = _tile(p, {"bm": 0, "bn": 0}, _TILES)
    rounds = -(-tiles(p, tile.bm, tile.bn)[0] // sms)
    step = 3 * tile.bm * tile.bn / 32 / _BUSY
    product = rounds * (-(-p.k // 64) * step + _END) / _CYCLES
    held = _held(p)
    sides = ((p.m, held & 1), (p.n, held & 2))
    pre_pass = sum(p.batch * side * p.k * (8 if fast else 12) / _PRE_PASS[not fast] for side, fast in sides)
    rows, columns = -(-p.m // 64), -(-p.n // 64)
    waves = rows * columns * p.batch / sms
    simt = max(_SIMT_LEAST, p.flops / _SIMT * max(1.0, 1 / waves) + _SIMT_END)
    return _LAUNCHES + pre_pass + product < simt


SPLIT32 = tuple(
    gpu_rung(
        name,
        idea=idea,
        parent=parent,
        dtypes=("f32",),
        refuses=lambda problem: "",
        bound=bound,
        geometry=geometry,
        space={"bm": (0, 64, 128), "bn": (0, 64, 96, 128), "band": (0, 8, 16), "blocks": (0, 8)},
        default={"bm": 0, "bn": 0, "band": 0, "blocks": 0},
        expect={},
        lesson="",
    )
    for name, idea, parent, bound, geometry in (
        (
            "split_fp16x3",
            "float32 as two halves: three products on tensor cores, as accurate as float32",
            "wgmma_epilogue",
            bound_fp16x3,
            _fp16x3,
        ),
        ("split_bf16x6", "float32 as three bfloat16, exactly", "split_fp16x3", bound_bf16x6, _bf16x6),
        ("split_paired", "sums in two numbers", "split_bf16x6", bound_paired, _paired),
    )
)
