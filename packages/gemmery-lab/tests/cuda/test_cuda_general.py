"""The kernels with one image for every shape: their launches, their results on the emulator, their bits; no GPU."""

from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest

from gemmery.api import prepared
from gemmery.arrays import View
from gemmery.cuda import device, driver, launch
from gemmery.dispatch import cuda
from gemmery.errors import RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from gemmery_lab.emulated_product import Gemm, problem_of, run_rung

pytest.importorskip("cuda.bindings")


def rung_of(name):
    return find(CUDA, "mma_general" if name in ("f16", "bf16") else "simt_general")


def images_of(name):
    return prepared.images(name, 0, rung_of(name).geometry)


@pytest.mark.parametrize("name", ["f16", "bf16", "f32", "f64"])
def test_one_image_serves_every_product(name):
    """Shapes, layouts, alignments, batches, alpha, beta and biases share it; an activation has its own."""
    rung, kernels = rung_of(name), set()
    smallest = {"tile": min(rung.space["tile"][1:])}
    for sizes, a, b, c, more in itertools.product(
        [(1, 1, 1), (5, 7, 3), (4096, 4096, 4096), (1, 512, 64)],
        ("row", "col", "any"),
        ("row", "col", "any"),
        ("row", "any"),
        [{}, {"batch": 3, "scaled": True}, {"epilogue": "bias", "alignments": (2, 4, 8)}],
    ):
        kernels.add(
            rung.geometry(Problem(*sizes, name, name, a_layout=a, b_layout=b, c_layout=c, **more), smallest).kernel
        )
    assert len(kernels) == 1
    relu = rung.geometry(Problem(8, 8, 8, name, name, epilogue="bias+relu"), smallest)
    assert relu.kernel not in kernels


def test_larger_tiles_copy_whole_pieces_alone():
    rung = rung_of("bf16")
    with pytest.raises(RefusedError, match="tile=128 of alignments"):
        rung.geometry(Problem(512, 512, 512, "bf16", "bf16", alignments=(8, 16, 16)), {"tile": 128})
    assert rung.geometry(Problem(4096, 4096, 4096, "bf16", "bf16"), {"tile": 0}).tile == (128, 128)
    assert rung.geometry(Problem(4096, 4096, 4100, "bf16", "bf16"), {"tile": 0}).tile == (64, 64)
    assert rung.geometry(Problem(64, 64, 64, "bf16", "bf16"), {"tile": 0}).tile == (64, 64)
    with pytest.raises(RefusedError, match=r"tile=48: .* tiles of 64, 128; use one of them, or 0"):
        rung.geometry(Problem(512, 512, 512, "bf16", "bf16"), {"tile": 48})
    with pytest.raises(RefusedError, match="of f64: its sums"):
        rung_of("f64").geometry(Problem(512, 512, 512, "f64", "f64"), {"tile": 128})


def test_dispatch_names_the_general_kernel_where_there_is_one():
    assert cuda.general(Problem(8, 8, 8, "bf16", "bf16", device="h200")).rung.name == "mma_general"
    assert cuda.general(Problem(8, 8, 8, "f16", "f32", device="h200")).rung.name == "mma_general"
    assert cuda.general(Problem(8, 8, 8, "f32", "f32", device="a100")).rung.name == "simt_general"
    assert cuda.general(Problem(8, 8, 8, "f32", "f32", device="t4")) is None  # it has no cp.async
    assert cuda.general(Problem(8, 8, 8, "f32", "f32", device="h200", precision="tf32")) is None
    assert cuda.general(Problem(8, 8, 8, "f32", "f64", device="h200")) is None


def operands(name, m, n, k, batch, stored, seed=1):
    """A, B and C with zeros around: by rows ("row"), by columns, padded by 6 elements, or every third element."""
    random = np.random.default_rng(seed)
    kind = {"f16": np.float16, "f32": np.float32, "f64": np.float64}[name]
    made = []
    for (rows, columns), lies in zip(((m, k), (k, n), (m, n)), stored, strict=True):
        if lies == "col":
            whole = np.zeros((batch, columns, rows), kind).transpose(0, 2, 1)
        elif lies == "padded":
            whole = np.zeros((batch, rows, columns + 6), kind)[:, :, :columns]
        elif lies == "strided":
            whole = np.zeros((batch, rows, 3 * columns), kind)[:, :, ::3]
        else:
            whole = np.zeros((batch, rows, columns), kind)
        whole[...] = random.standard_normal(whole.shape)
        made.append(whole)
    return made


CASES = [
    ("row", "row", "row"),
    ("row", "col", "row"),
    ("col", "row", "col"),
    ("padded", "padded", "padded"),
    ("strided", "col", "strided"),
    ("col", "strided", "row"),
]


@pytest.mark.many
@pytest.mark.parametrize(("name", "tile"), [("f16", 64), ("f32", 32), ("f32", 64), ("f64", 32)])
@pytest.mark.parametrize("stored", CASES, ids="-".join)
@pytest.mark.parametrize("sizes", [(33, 41, 71), (40, 72, 24)])
def test_ragged_products_are_right_and_have_no_findings(name, tile, stored, sizes):
    (m, n, k), batch = sizes, 2
    a, b, c = operands(name, m, n, k, batch, stored)
    old, bias = c.astype(np.float64), np.arange(n, dtype=np.float64 if name == "f64" else np.float32)
    given = Gemm(a, b, c, bias, alpha=1.5, beta=-0.5)
    problem = problem_of(given, name, name, "h200", epilogue="bias+relu", scaled=True)
    runs = run_rung(rung_of(name), problem, {"tile": tile}, given)
    assert [run.findings for run in runs] == [()]
    wide = a.astype(np.float64), b.astype(np.float64)
    exact = 1.5 * (wide[0] @ wide[1]) - 0.5 * old + bias
    sums = 1.5 * (np.abs(wide[0]) @ np.abs(wide[1])) + 0.5 * np.abs(old) + bias
    u = 2.0**-53 if name == "f64" else 2.0**-24
    bound = (2.5 * k + 8) * u * sums + (2.0**-11 * np.abs(exact) if name == "f16" else 0)
    assert (np.abs(c - np.maximum(exact, 0)) <= bound).all()


@pytest.mark.parametrize(
    ("name", "other", "tiles"), [("f16", "mma_pipelined", (64,)), ("f32", "simt_pipelined", (32, 64))]
)
def test_the_bits_are_those_of_the_specialized_kernel(name, other, tiles):
    a, b, c = operands(name, 67, 45, 203, 1, ("row", "row", "row"))
    problem = problem_of(Gemm(a, b, c), name, name, "h200")
    run_rung(find(CUDA, other), problem, {"splits": 1}, Gemm(a, b, c))
    for tile in tiles:
        again = np.full_like(c, np.nan)
        run_rung(rung_of(name), problem, {"tile": tile}, Gemm(a, b, again))
        assert again.tobytes() == c.tobytes()


@pytest.fixture
def present(monkeypatch):
    """Images on a device that is not there; the sides of the tiles that are made in the background, and how."""
    aside = {}
    monkeypatch.setattr(driver, "device", lambda ordinal: device.card("h200"))
    monkeypatch.setattr(driver, "find", lambda name: device.card("h200"))
    monkeypatch.setattr(
        driver, "function", lambda source, kernel, ordinal, shared=0: int(kernel.split("<")[2].split(",")[0])
    )
    monkeypatch.setattr(driver, "context", lambda ordinal: 77)
    monkeypatch.setattr(driver, "api", lambda: type("Api", (), {"cuLaunchKernelEx": None, "cuCtxGetCurrent": None}))
    monkeypatch.setattr(prepared.tiers, "aside", lambda key, make: aside.update({key[-1]: make}))
    monkeypatch.setattr(prepared, "_images", {})
    return aside


def test_larger_tiles_serve_when_they_are_there(present):
    general = images_of("f32")
    assert images_of("f32") is general
    assert prepared.present("f32", 0) is general
    assert prepared.present("f64", 0) is None
    shape = (4096, 4096, 512, (512, 1), (4096, 1), (4096, 1), 0)
    assert general.ready(*shape)._launches[0][:2] == (32, 128 * 128)
    assert sorted(present) == [64, 128]
    present[64]()
    assert general.ready(*shape)._launches[0][:2] == (64, 64 * 64)
    present[128]()
    assert general.ready(*shape)._launches[0][:2] == (128, 32 * 32)
    assert general.ready(5, 4096, 512, (512, 1), (4096, 1), (4096, 1), 0)._launches[0][:2] == (32, 128)


@pytest.mark.parametrize(
    ("m", "n", "k", "a", "b", "address", "side"),
    [
        (4096, 4096, 512, (512, 1), (4096, 1), 0, 128),
        (4096, 4096, 512, (1, 4096), (1, 512), 0, 128),
        (4096, 4096, 512, (512, 1), (4096, 1), 8, 64),  # an address
        (4096, 4096, 516, (516, 1), (4096, 1), 0, 64),  # rows of A
        (4096, 4096, 512, (520, 2), (4096, 1), 0, 64),  # strided
        (4096, 4092, 512, (512, 1), (4096, 1), 0, 64),  # rows of B end within a piece
    ],
)
def test_a_larger_tile_of_halves_takes_whole_pieces(present, m, n, k, a, b, address, side):
    general = images_of("bf16")
    present[128]()
    assert general.ready(m, n, k, a, b, (n, 1), address)._launches[0][0] == side


@pytest.mark.parametrize("name", ["bf16", "f32", "f64"])
def test_the_argument_is_that_of_a_launch(present, name):
    """Its fields are in the order of `launch.product_argument`."""
    size = {"bf16": 2, "f32": 4, "f64": 8}[name]
    run = images_of(name).ready(5, 7, 3, (3, 1), (1, 9), (7, 1), 0)
    views = (
        View(0, (1, 5, 3), (0, 3 * size, size), name),
        View(0, (1, 3, 7), (0, size, 9 * size), name),
        View(0, (1, 5, 7), (0, 7 * size, size), name),
    )
    problem = Problem(5, 7, 3, name, name, b_layout="col")
    expected = launch.product_argument(problem, *views)
    assert run._argument[struct.calcsize("=5Q") :] == expected[struct.calcsize("=5Q") :]


@pytest.mark.parametrize("c_layout", ["row", "col"])
def test_any_product_is_launched_as_by_its_rung(present, c_layout):
    """Batches, a bias and a C in columns: grid, block and argument are those of the rung's geometry."""
    general = images_of("bf16")
    problem = Problem(100, 70, 30, "bf16", "bf16", 3, c_layout=c_layout, epilogue="bias", device="cuda:0")
    views = [
        View(0, shape, (2 * shape[1] * shape[2], 2 * shape[2], 2), "bf16") for shape in ((3, 100, 30), (3, 30, 70))
    ]
    views.append(View(0, (3, 100, 70), (14000, 140, 2) if c_layout == "row" else (14000, 2, 200), "bf16"))
    bias = View(0, (70,), (4,), "f32")
    run = general.launch(problem, *views, bias)
    geometry = rung_of("bf16").geometry(problem.by_rows(), {"tile": 64})
    assert run._launches == [(64, *geometry.grid, *geometry.block, geometry.shared)]
    assert run._argument == launch.product_argument(problem, *views, bias)
    assert run._transposed == (c_layout == "col")
