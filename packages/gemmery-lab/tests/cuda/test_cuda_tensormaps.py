"""Tensor maps of operands: what they describe, what no map can, and kernels that copy by them on the emulator."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from gemmery.arrays import View
from gemmery.cuda import driver, tensormaps
from gemmery.cuda.geometry import Geometry, MapBox, describable
from gemmery.cuda.launch import placed_maps
from gemmery.errors import LayoutError, RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.gpu import gpu_rung
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from gemmery_lab.emulated_product import EmulationOptions, Gemm, problem_of, run_rung

pytestmark = pytest.mark.sampled(3)

F16 = Problem(100, 40, 72, "f16", "f16", device="h200")

# A product of at most 32 x 32 x 32 by one warp, whose operands come and whose result goes by tensor maps.
COPIES = """
#include "ptx_hopper.cuh"
struct alignas(64) Map { unsigned char bytes[128]; };
struct Argument {
  const float *a, *b; float* c; const float* bias; float* workspace;
  long long a_batch, a_row, a_col, b_batch, b_row, b_col, c_batch, c_row, c_col, bias_row, bias_col;
  int m, n, k, batch; float alpha, beta;
  const float *a_scale, *b_scale; const int* offsets;
  long long a_scale_row, a_scale_k, b_scale_k, b_scale_col;
  int activation, mapped, blocks, spare;
  Map a_map, b_map, c_map;
};
static_assert(sizeof(Argument) == 640, "");

__device__ unsigned place(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }
__device__ void load(void* to, const Map* map, int inner, int outer, int batch, void* barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
               "[%5];"
               :: "r"(place(to)), "l"(map), "r"(inner), "r"(outer), "r"(batch), "r"(place(barrier)) : "memory");
}

template <int A_COL, int B_COL> __global__ void copies(const __grid_constant__ Argument p) {
  __shared__ __align__(128) float a[32][32], b[32][32], c[32][32];
  __shared__ unsigned long long full;
  const int batch = blockIdx.x, i = threadIdx.x;
  if (i == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(place(&full)) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 8192;" :: "r"(place(&full)) : "memory");
    load(a, &p.a_map, 0, 0, p.a_batch ? batch : 0, &full);
    load(b, &p.b_map, 0, 0, p.b_batch ? batch : 0, &full);
  }
  __syncthreads();
  unsigned done = 0;
  while (!done)
    asm volatile("{ .reg .pred q; mbarrier.try_wait.parity.shared::cta.b64 q, [%1], 0; selp.u32 %0, 1, 0, q; }"
                 : "=r"(done) : "r"(place(&full)) : "memory");
  for (int j = 0; j < 32; ++j) {
    float sum = 0;
    for (int kk = 0; kk < p.k; ++kk) sum += (A_COL ? a[kk][i] : a[i][kk]) * (B_COL ? b[j][kk] : b[kk][j]);
    const bool inside = i < p.m && j < p.n;
    if (inside && p.a_scale) sum *= p.a_scale[i * p.a_scale_row] * p.b_scale[j * p.b_scale_col];
    c[i][j] = p.activation && sum < 0 ? 0 : sum;
    if (inside && !p.mapped) p.c[batch * p.c_batch + i * p.c_row + j * p.c_col] = c[i][j];
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (p.mapped && i == 0) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {0, 0, %1}], [%2];"
                 :: "l"(&p.c_map), "r"(batch), "r"(place(c)) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}

// The same with A that this launch copies to rows of 32 elements in the workspace, from byte 256 on.
extern "C" __global__ void pack(const __grid_constant__ Argument p) {
  const int i = threadIdx.x;
  for (int kk = 0; i < p.m && kk < p.k; ++kk)
    p.workspace[64 + (blockIdx.x * p.m + i) * 32 + kk] = p.a[blockIdx.x * p.a_batch + i * p.a_row + kk * p.a_col];
}
"""


def launch(name, problem, config):
    box = (32, 32)
    packed = bool(describable(problem, "a")) and bool(config["packs"])
    layouts = (0 if packed else problem.a_layout == "col", problem.b_layout == "col")
    kernel = f"{name}<{int(layouts[0])}, {int(layouts[1])}>"
    grid = (problem.batch, 1, 1)
    first = MapBox("a", box, 0, 256, 128) if packed else MapBox("a", box, 0)
    return Geometry(
        f"{name}.cu",
        kernel,
        grid,
        (32, 1, 1),
        workspace=256 + 4 * 32 * problem.m * problem.batch if packed else 0,
        before=(Geometry(f"{name}.cu", "pack", grid, (32, 1, 1), needs=90),) if packed else (),
        needs=90,
        maps=(first, MapBox("b", box, 0), MapBox("c", box, 0)),
    )


RUNG = gpu_rung("copies", idea="", parent=None, lesson="", geometry=launch, expect={}, default={"packs": 1})


def aligned(shape, order="C", seed=0):
    """Whole numbers at a multiple of 256 bytes, in rows or in columns."""
    batch, rows, columns = shape
    size = batch * rows * columns
    memory = np.zeros(size + 64, np.float32)
    at = -memory.ctypes.data % 256 // 4
    flat = memory[at : at + size]
    flat[:] = np.random.default_rng(seed).integers(-4, 5, size)
    return flat.reshape(batch, rows, columns) if order == "C" else flat.reshape(batch, columns, rows).transpose(0, 2, 1)


def multiplied(a, b, c, config=None, epilogue="", **others):
    problem = problem_of(Gemm(a, b, c), "f32", "f32", "h200", epilogue=epilogue)
    runs = run_rung(RUNG, problem, config or {}, Gemm(a, b, c, **others), EmulationOptions(texts={"copies.cu": COPIES}))
    assert [finding for run in runs for finding in run.findings] == []
    return runs


@pytest.mark.many(3)
@pytest.mark.parametrize("orders", ["CCC", "FCC", "CFC", "FFC", "CCF", "FCF", "CFF"])
def test_a_kernel_multiplies_by_the_maps_of_every_layout(orders):
    a, b, c = (
        aligned(shape, order, i)
        for i, (shape, order) in enumerate(zip([(2, 20, 12), (2, 12, 28), (2, 20, 28)], orders, strict=True))
    )
    expected = a @ b
    multiplied(a, b, c)
    assert np.array_equal(c, expected)


def test_a_matrix_that_a_batch_shares_has_one_place():
    a, b, c = aligned((1, 20, 12), seed=1), aligned((3, 12, 28), seed=2), aligned((3, 20, 28), seed=3)
    multiplied(np.broadcast_to(a, (3, 20, 12)), b, c)
    assert np.array_equal(c, a @ b)


def test_an_operand_that_a_launch_before_packs_is_read_from_the_workspace():
    a, b, c = aligned((2, 20, 13))[:, :, :11], aligned((2, 11, 28), seed=2), aligned((2, 20, 28), seed=3)
    assert len(multiplied(a, b, c)) == 2
    assert np.array_equal(c, a @ b)
    with pytest.raises(RefusedError, match="A's address and strides are multiples of 4 bytes only"):
        multiplied(a, b, c, {"packs": 0})


def test_a_result_without_a_map_is_written_by_ordinary_stores():
    a, b, c = aligned((1, 20, 12)), aligned((1, 12, 28), seed=2), aligned((1, 20, 31), seed=3)
    left = c[:, :, 28:].copy()
    multiplied(a, b, c[:, :, :28])
    assert np.array_equal(c[:, :, :28], a @ b)
    assert np.array_equal(c[:, :, 28:], left)


@pytest.mark.parametrize("order", ["C", "F"])
def test_factors_and_the_activation_are_in_the_argument(order):
    """Those of rows and columns change places with the operands where C is column-major."""
    a, b, c = aligned((1, 20, 12)), aligned((1, 12, 28), seed=2), aligned((1, 20, 28), order, seed=3)
    rows, columns = np.arange(1, 21, dtype=np.float32)[:, None], np.arange(2, 30, dtype=np.float32)[None]
    expected = np.maximum(a @ b * rows * columns, 0)
    multiplied(a, b, c, epilogue="relu", a_scale=rows, b_scale=columns)
    assert np.array_equal(c, expected)


def test_what_no_map_describes_is_named():
    assert describable(F16, "a") == describable(F16, "b") == describable(F16, "c") == ""
    assert "multiples of 8 bytes only" in describable(F16._replace(alignments=(16, 8, 16)), "b")
    assert "neither the rows nor the columns of A" in describable(F16._replace(a_layout="any"), "a")
    assert "C has one element" in describable(F16._replace(n=1), "c")
    assert "rows of C have 134 bytes" in describable(F16._replace(n=67), "c")
    assert describable(F16._replace(n=72), "c") == ""
    assert describable(F16._replace(n=1, b_layout="col"), "b") == ""
    assert describable(F16._replace(k=0), "a") == ""


def view(shape, strides, dtype="f16"):
    return View(0, shape, strides, dtype)


def test_the_inner_side_is_the_one_whose_elements_are_adjacent():
    rows = tensormaps.shape(MapBox("a", (64, 128)), F16, view((1, 100, 72), (0, 160, 2)))
    assert (rows.extents, rows.strides) == ((72, 100, 1), (160, 16000))
    columns = tensormaps.shape(MapBox("a", (64, 64)), F16._replace(a_layout="col"), view((1, 100, 72), (0, 2, 208)))
    assert (columns.extents, columns.strides) == ((100, 72, 1), (208, 208 * 72))
    batch = tensormaps.shape(MapBox("b", (64, 64)), F16, view((5, 72, 40), (96, 480, 2)))
    assert (batch.extents, batch.strides) == ((40, 72, 5), (480, 96))
    packed = tensormaps.shape(MapBox("b", (64, 64), packed=512, pitch=144), F16, view((5, 72, 40), (7, 2, 3)))
    assert (packed.extents, packed.strides) == ((72, 40, 5), (144, 144 * 40))
    empty = tensormaps.shape(MapBox("a", (64, 128)), F16._replace(k=0), view((1, 100, 0), (0, 16, 2)))
    assert empty.extents == (0, 100, 1)
    row = tensormaps.shape(MapBox("a", (64, 128)), F16._replace(m=1), view((1, 1, 72), (0, 7, 2)))
    assert (row.extents, row.strides) == ((72, 1, 1), (144, 144))


@pytest.mark.parametrize("strides", [(0, 0, 2), (0, -160, 2), (8, 160, 2), (0, 1 << 40, 2)])
def test_strides_that_no_map_takes_are_refused(strides):
    wrong = view((2, 100, 72), strides)
    box = MapBox("a", (64, 128))
    with pytest.raises(LayoutError, match="copy the operand to a contiguous array"):
        tensormaps.shape(box, F16, wrong)
    geometry = Geometry("", "", (1, 1, 1), (1, 1, 1), maps=(box._replace(operand="c"),))
    assert tensormaps.placed(geometry, F16, wrong, wrong, wrong) == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"box": (64, 257)}, "sides are 1 to 256"),
        ({"box": (60, 64)}, "multiples of 16 bytes"),
        ({"box": (32, 64)}, "swizzle=128"),
        ({"swizzle": 48}, "swizzle=48"),
        ({"promotion": 512}, "promotion=512"),
    ],
)
def test_boxes_that_the_hardware_does_not_copy_are_refused(change, words):
    with pytest.raises(RefusedError, match=words):
        tensormaps.shape(MapBox("a", (64, 64))._replace(**change), F16, view((1, 100, 72), (0, 160, 2)))
    with pytest.raises(RefusedError, match="A is f64"):
        tensormaps.shape(MapBox("a", (8, 8), 0), F16, view((1, 100, 72), (0, 640, 8), "f64"))


class Enumeration:
    """Stands in for the driver's enumerations: each member is its name."""

    def __getattr__(self, name):
        return name


@pytest.fixture
def driver_of_maps(monkeypatch):
    """A driver whose maps hold their address first, or elsewhere, and that refuses address 13."""
    fake = SimpleNamespace(at=(0,), calls=[], cuuint64_t=int, cuuint32_t=int)
    for name in ("DataType", "Interleave", "Swizzle", "L2promotion", "FloatOOBfill"):
        setattr(fake, f"CUtensorMap{name}", Enumeration())

    def encode(kind, rank, address, *others):
        fake.calls.append((kind, rank, address, *others))
        data = np.zeros(128, np.uint8)
        for place in fake.at:
            data[place : place + 8] = np.frombuffer(int(address).to_bytes(8, "little"), np.uint8)
        return (1 if address == 13 else 0), SimpleNamespace(getPtr=lambda: data.ctypes.data, keep=data)

    fake.cuTensorMapEncodeTiled = encode
    monkeypatch.setattr(driver, "api", lambda: fake)
    tensormaps.begins_with_address.cache_clear()
    yield fake
    tensormaps.begins_with_address.cache_clear()


def test_the_driver_gets_three_dimensions(driver_of_maps):
    shape = tensormaps.shape(MapBox("b", (32, 64), 64, promotion=0), F16, view((5, 72, 40), (96, 480, 2), "bf16"))
    data = tensormaps.encoded(shape, 4096)
    assert (len(data), int.from_bytes(data[:8], "little")) == (128, 4096)
    kind, rank, address, extents, strides, box, steps, *names = driver_of_maps.calls[0]
    assert (kind, rank, address) == ("CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", 3, 4096)
    assert (extents, strides, box, steps) == ([40, 72, 5], [480, 96], [32, 64, 1], [1, 1, 1])
    assert names == [
        "CU_TENSOR_MAP_INTERLEAVE_NONE",
        "CU_TENSOR_MAP_SWIZZLE_64B",
        "CU_TENSOR_MAP_L2_PROMOTION_NONE",
        "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    ]
    with pytest.raises(LayoutError, match="copy the operand"):
        tensormaps.encoded(shape, 13)


@pytest.mark.parametrize("at", [(0,), (16,), (0, 64)])
def test_where_a_map_holds_its_address_is_observed(driver_of_maps, at):
    driver_of_maps.at = at
    assert tensormaps.begins_with_address() is (at == (0,))
    assert len({call[2] for call in driver_of_maps.calls}) == 2
    shape = tensormaps.shape(MapBox("b", (32, 64), 64), F16, view((3, 56, 24 + 8 * at[0]), (160, 800, 2), "f16"))
    for address in (4096, 8192, 4096):
        assert tensormaps.at_address(shape, address) == tensormaps.encoded(shape, address)


@pytest.mark.parametrize("a_layout", ["row", "col", "any"])
@pytest.mark.parametrize("b_layout", ["row", "col"])
def test_boxes_beyond_an_empty_k_lie_outside_in_every_layout(a_layout, b_layout):
    """The driver has no sides of 0: a kernel's boxes begin beyond 1 along k, which must be the inner side."""
    problem = Problem(384, 560, 0, "f16", "f16", a_layout=a_layout, b_layout=b_layout, device="h200")
    rung = find(CUDA, "wgmma_epilogue")
    views = (View(0, (1, m, n), (0, 2 * n, 2), "f16") for m, n in ((384, 0), (0, 560), (384, 560)))
    a, b, _ = placed_maps(problem, rung.geometry(problem, rung.default), *views)
    assert (a.shape.extents, b.shape.extents) == ((0, 384, 1), (0, 560, 1))
