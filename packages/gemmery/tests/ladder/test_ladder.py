"""Every rung on every shape, element type and layout it takes: error within bound, no access outside its operands."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import shapes
from gemmery import dtypes, verify
from gemmery.cpu import target
from gemmery.errors import ArgumentError
from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from operands import LAYOUTS, STORED, numpy_dtype, place, problem, random

WIDER = {
    "f16": ("f32",),
    "bf16": ("f32",),
    "f32": ("f64",),
    "int8": ("int32", "int64"),
    "uint8": ("uint32",),
    "int16": ("int32",),
    "int32": ("int64",),
}
PAIRS = [
    pytest.param(rung, name, out, id=f"{rung.name}-{name}-{out}")
    for rung in CPU
    for name in rung.dtypes
    for out in (name, *WIDER.get(name, ()))
]
SUMS = {"bf16": "f32", "int8": "int32", "uint8": "uint32"}  # of the tile unit
FOR_ONE_SHAPE = {"batched"}  # rungs that compile a kernel for every shape
SLOW = {"scalar_naive": 3e6, "scalar_reordered": 3e6}  # rung -> most operations of a case


def run(rung, a, b, c, *, alpha=1.0, beta=0.0, bias=None, epilogue="", threads=1):
    """Multiply and check, unless the rung refuses with a reason."""
    scaled = alpha != 1 or beta != 0
    case = problem(a, b, c, epilogue, scaled)
    refusal = rung.refuses(case)
    if refusal:
        assert len(refusal.split()) > 3, refusal
        return
    kernel = rung.build(case, rung.default)
    old = c.array.copy()
    row = None
    if bias is not None:
        row = bias.view._replace(shape=(bias.array.shape[2],), strides=bias.array.strides[2:])
    kernel(a.view, b.view, c.view, alpha=alpha, beta=beta, bias=row, threads=threads)
    assert a.untouched(), f"A was written: {case}"
    assert b.untouched(), f"B was written: {case}"
    assert c.untouched_around(), f"memory around C was written: {case}"
    found = verify.check(
        c.array,
        a.array,
        b.array,
        rung.bound,
        alpha=alpha,
        beta=beta,
        c=old if beta != 0 else None,
        bias=None if bias is None else bias.array[0, 0],
        activation=epilogue.split("+")[-1] if epilogue and epilogue != "bias" else "",
        normwise=rung.normwise,
    )
    assert found.error_over_bound <= 1, f"{case}: {found}"


def matrices(shape, name, out, layouts=("C", "C", "C"), batch=1, shared=(False, False)):
    """Return A, B and a poisoned C."""
    m, n, k = shape
    a = place(random((batch, m, k), name, 1), name, layouts[0], shared[0])
    b = place(random((batch, k, n), name, 2), name, layouts[1], shared[1])
    poison = np.full((batch, m, n), -1 if dtypes.get(out).kind in "iu" else np.nan).astype(numpy_dtype(out))
    return a, b, place(poison, out, layouts[2])


def takes(rung, name, out):
    """Return True if the rung takes this pair of element types."""
    return any(
        not rung.refuses(problem(*matrices(shape, name, out)))
        for shape in [(64, 64, 64), (64, 1, 64), (4, 4, 4), (4, 2, 4)]
    )


@pytest.mark.parametrize("rung", CPU, ids=lambda rung: rung.name)
def test_a_rung_takes_the_types_it_names(rung):
    for name in rung.dtypes:
        if rung.name.startswith("amx_") and not target.host().has_tiles:
            refusal = rung.refuses(problem(*matrices((64, 64, 64), name, SUMS.get(name, name))))
            assert refusal == target.without_tiles()
            assert "tile unit" in refusal
        else:
            assert any(takes(rung, name, out) for out in (name, SUMS.get(name, name))), name
    assert find(CPU, rung.name) is rung
    assert rung.parent is None or find(CPU, rung.parent)


def test_an_unknown_rung_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ArgumentError, match="scalar_naive"):
        find(CPU, "scalar_navie")


@pytest.mark.many
@pytest.mark.parametrize(("rung", "name", "out"), PAIRS)
def test_small_shapes(rung, name, out):
    if not takes(rung, name, out):
        pytest.skip("not a pair of this rung")
    for shape in shapes.A_DOZEN if rung.name in FOR_ONE_SHAPE else [*shapes.SMALL, *shapes.SKINNY]:
        run(rung, *matrices(shape, name, out))


@pytest.mark.many
@pytest.mark.parametrize(("rung", "name", "out"), PAIRS)
def test_large_shapes_and_threads(rung, name, out):
    if not takes(rung, name, out):
        pytest.skip("not a pair of this rung")
    for shape in shapes.LARGE:
        if 2 * np.prod(shape, dtype=float) <= SLOW.get(rung.name, np.inf):
            run(rung, *matrices(shape, name, out), threads=2)


@pytest.mark.many
@pytest.mark.parametrize(("rung", "name", "out"), PAIRS)
def test_layouts(rung, name, out):
    if not takes(rung, name, out):
        pytest.skip("not a pair of this rung")
    for shape in shapes.FEW:
        for one, two in itertools.product(LAYOUTS, LAYOUTS):
            run(rung, *matrices(shape, name, out, (one, two, "C")))
        for one, two, stored in itertools.product(("C", "F"), ("C", "F"), STORED[1:]):
            run(rung, *matrices(shape, name, out, (one, two, stored)))


@pytest.mark.many
@pytest.mark.parametrize(("rung", "name", "out"), PAIRS)
def test_batches(rung, name, out):
    if not takes(rung, name, out):
        pytest.skip("not a pair of this rung")
    for shape in [(1, 1, 1), (3, 3, 3), (4, 4, 4), (8, 8, 8), (5, 7, 3), (16, 16, 16), (13, 35, 19)]:
        for shared in [(False, False), (True, False), (False, True)]:
            run(rung, *matrices(shape, name, out, batch=5, shared=shared))
        run(rung, *matrices(shape, name, out, ("F", "F", "C"), batch=5), threads=2)
        run(rung, *matrices(shape, name, out, ("padded", "reversed", "padded"), batch=5))


@pytest.mark.many(5)
@pytest.mark.parametrize(("rung", "name", "out"), PAIRS)
def test_alpha_and_beta(rung, name, out):
    if not takes(rung, name, out):
        pytest.skip("not a pair of this rung")
    kind = dtypes.get(out).kind
    scalars = {"c": [1j, -1.5 + 0.5j], "f": [-1.0, 0.375], "i": [-1, 3], "u": [5, 2]}[kind]
    for shape in [*shapes.FEW, (7, 9, 1200)]:
        for alpha, beta in itertools.product([1, *scalars], [0, 1, *scalars]):
            a, b, c = matrices(shape, name, out)
            if beta != 0:
                c = place(random(c.array.shape, out, 3), out, "padded")
            run(rung, a, b, c, alpha=alpha, beta=beta)


@pytest.mark.many
@pytest.mark.parametrize(("rung", "name", "out"), PAIRS)
def test_epilogues(rung, name, out):
    if not takes(rung, name, out):
        pytest.skip("not a pair of this rung")
    held = dtypes.get(out).accumulator
    names = ["bias", "relu", "gelu", "silu", "bias+relu", "bias+gelu", "bias+silu"]
    for shape, epilogue in itertools.product([*shapes.FEW, (7, 9, 1200)], names):
        n = shape[1]
        for one_for_all in (False, True):
            row = place(random((1, 1, n), held, 4), held)
            if one_for_all:
                row.array = np.broadcast_to(row.array[:, :, :1], (1, 1, n))
            bias = row if "bias" in epilogue else None
            run(rung, *matrices(shape, name, out), epilogue=epilogue, bias=bias)
            run(rung, *matrices(shape, name, out, ("F", "C", "padded")), epilogue=epilogue, bias=bias, alpha=2, beta=0)


@pytest.mark.parametrize(("rung", "name", "out"), PAIRS)
def test_values_that_are_not_finite(rung, name, out):
    if not takes(rung, name, out) or dtypes.get(out).kind not in "fc":
        pytest.skip("not a pair of floating types of this rung")
    if rung.normwise:
        pytest.skip("it adds blocks of A, so what is not finite in one reaches every block of C")
    for planted, shape in itertools.product([np.nan, np.inf, -np.inf], shapes.FEW):
        a, b, c = matrices(shape, name, out)
        a.array[0, shape[0] // 2, shape[2] // 2] = planted
        a.before = a.memory.copy()
        run(rung, a, b, c)


@pytest.mark.parametrize("rung", CPU, ids=lambda rung: rung.name)
def test_every_config_of_its_space_gives_the_product(rung):
    for name, values in rung.space.items():
        for value in values:
            a, b, c = matrices((67, 131, 70), "f32", "f32")
            case = problem(a, b, c)
            if rung.refuses(case):
                continue
            rung.build(case, {**rung.default, name: value})(a.view, b.view, c.view)
            assert verify.check(c.array, a.array, b.array, rung.bound, normwise=rung.normwise).error_over_bound <= 1
            assert c.untouched_around()


@pytest.mark.parametrize("name", ["f32", "f64", "int32"])
@pytest.mark.parametrize("rung", CPU, ids=lambda rung: rung.name)
def test_the_same_inputs_give_the_same_bits(rung, name):
    for shape in [*shapes.FEW, *shapes.SKINNY, (97, 89, 101)]:
        results = []
        for _ in range(2):
            a, b, c = matrices(shape, name, name)
            if name not in rung.dtypes or rung.refuses(problem(a, b, c)):
                break
            rung.build(problem(a, b, c), rung.default)(a.view, b.view, c.view)
            results.append(c.array.tobytes())
        assert len(set(results)) <= 1


BEFORE_THE_ABYSS = """
import ctypes, mmap, sys
import numpy as np
from gemmery.arrays import View
from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from gemmery import dtypes
import operands, shapes

libc = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE

def at_the_end(values):
    # Memory whose last byte is the last before a page that may not be touched; the one before it may not either.
    pages = -(-values.nbytes // PAGE)
    region = mmap.mmap(-1, (pages + 2) * PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for forbidden in (base, base + (pages + 1) * PAGE):
        assert libc.mprotect(ctypes.c_void_p(forbidden), PAGE, 0) == 0
    memory = np.frombuffer(region, np.uint8, pages * PAGE, PAGE)
    array = np.ndarray(values.shape, values.dtype, memory, pages * PAGE - values.nbytes)
    array[...] = values
    return array

rung = find(CPU, sys.argv[1])
sums = {"bf16": "f32", "int8": "int32", "uint8": "uint32"} if rung.name == "amx_tile" else {}
for name in sys.argv[2:]:
    out = sums.get(name, name)
    for shape in (*shapes.NEAR_THE_END, (5, 2, 37)):
        m, n, k = shape
        for swap_a in (False, True):
            for swap_b in (False, True):
                a = at_the_end(operands.random((k, m) if swap_a else (m, k), name, 1))
                b = at_the_end(operands.random((n, k) if swap_b else (k, n), name, 2))
                c = at_the_end(operands.random((m, n), out, 3))
                a, b = (a.T if swap_a else a), (b.T if swap_b else b)
                one, two = (operands.Placed(x[None], None, None, name) for x in (a, b))
                three = operands.Placed(c[None], None, None, out)
                case = operands.problem(one, two, three)
                if rung.refuses(case):
                    continue
                print(name, case, flush=True)
                rung.build(case, rung.default)(one.view, two.view, three.view)
"""


@pytest.mark.process
@pytest.mark.many
@pytest.mark.parametrize("rung", CPU, ids=lambda rung: rung.name)
def test_no_byte_past_an_operand_is_touched(rung):
    """Guard bytes do not detect a stray read whose value is unused; an unreadable page does."""
    command = [sys.executable, "-c", BEFORE_THE_ABYSS, rung.name, *rung.dtypes]
    here = __file__.rpartition("/")[0]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=300, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"the last problem begun: {lines[-1:] or 'none'}\n{done.stderr[-2000:]}"
    refused = rung.name.startswith("amx_") and not target.host().has_tiles
    assert {line.split()[0] for line in lines} == set(() if refused else rung.dtypes)


def test_what_a_config_leaves_to_the_rung_is_not_explicit():
    ring = find(CUDA, "mma_pipelined")
    assert ring.explicit({**ring.default, "stages": 3}) == {"stages": 3}
    warp = find(CUDA, "gemv_warp")
    assert warp.explicit({**warp.default, "smem": 0}) == {**warp.default, "smem": 0}


@pytest.mark.parametrize("rung", CUDA, ids=lambda rung: rung.name)
def test_a_resolved_config_launches_the_same_and_leaves_no_tile_open(rung):
    """So that a smaller product can be counted with the kernel of a larger one."""
    for side in (32, 512, 4096):
        sizes = (side, 1, side) if rung.name.startswith("gemv") else (side, side, side)
        case = Problem(*sizes, rung.dtypes[0], rung.dtypes[0], device="h200")
        if side > 32 and rung.refuses(case):
            continue  # the rungs of small products have no launch for large ones
        config = rung.resolve(case, rung.default)
        assert rung.geometry(case, config) == rung.geometry(case, rung.default)
        if not rung.name.startswith("gemv"):  # its zeros follow each shape
            real = {"blocks", "layout", "swizzle"}  # in these 0 is a value, or follows from the registers
            assert all(value for key, value in config.items() if key not in real)


PACKAGES = Path(__file__).parents[4] / "packages"
SOURCE = PACKAGES / "gemmery/src/gemmery"


@pytest.mark.parametrize("rung", CUDA, ids=lambda rung: rung.name)
def test_what_launches_a_cuda_rung_follows_from_its_name(rung):
    assert rung.source == f"cuda/kernels/{rung.name}.cu"
    assert (SOURCE / rung.source).is_file()
    sizes = (64, 1, 64) if rung.refuses(Problem(2, 2, 2, rung.dtypes[0], rung.dtypes[0])) else (32, 32, 64)
    case = Problem(*sizes, rung.dtypes[0], rung.dtypes[0], device="h200")
    launch = rung.geometry(case, rung.default)
    assert launch.source == f"{rung.name}.cu"
    assert launch.kernel.startswith(f"{rung.name}<")
    text = (SOURCE / rung.source).read_text()
    assert re.search(rf"\b{rung.name}\(", text), "the template has another name than its file"


def named(tree):
    """The strings of a module that are the name of a rung or of its file, except those of parents."""
    names = {spelling for rung in CUDA for spelling in (rung.name, f"{rung.name}.cu", f"cuda/kernels/{rung.name}.cu")}
    parents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "parent"}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in parents]
    return [node.value for node in constants if isinstance(node.value, str) and node.value in names]


def test_a_cuda_rung_is_named_in_its_row_alone():
    """Dispatch chooses among rungs by name, and commands show some; nothing else has to know a new one."""
    counts = Counter()
    emulator, report = PACKAGES / "gemmery-emulator/src", PACKAGES / "gemmery-lab/src/gemmery_lab/report"
    for folder in (*(SOURCE / part for part in ("api", "arrays", "cpu", "cuda", "ladder")), emulator, report):
        for path in folder.rglob("*.py"):
            counts.update(named(ast.parse(path.read_text())))
    assert counts == Counter(rung.name for rung in CUDA)
