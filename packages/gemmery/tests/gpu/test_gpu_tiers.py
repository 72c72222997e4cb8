"""Products on a device before, while and after kernels are made for their shapes; needs a GPU."""

from __future__ import annotations

import threading

import pytest

import gemmery as gm
from gemmery import tiers
from gemmery.api import prepared
from gemmery.api.device_call import table
from gemmery.arrays import view
from gemmery.cuda import driver
from gemmery.errors import RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.general import GENERAL
from gemmery.ladder.rung import find
from gemmery.problem import Problem

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(driver.missing()) or not torch.cuda.is_available(), reason="needs a GPU and PyTorch on it"),
]

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}


@pytest.fixture(autouse=True)
def anew():
    """No product is known at the beginning of a test."""
    tiers.wait()
    table.forget()
    table.launches.clear()
    yield
    tiers.wait()


def operands(name, m, n, k):
    """Integers so small that every sum is exact, in any order."""
    return (torch.randint(-3, 4, shape, device="cuda").to(TYPES[name]) for shape in ((m, k), (k, n)))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("sizes", [(64, 48, 96), (37, 1, 300), (1, 65, 129), (33, 35, 901), (300, 200, 77)])
def test_results_before_during_and_after_the_swap(name, sizes):
    a, b = operands(name, *sizes)
    exact = (a.double() @ b.double()).to(TYPES[name])
    first = gm.matmul(a, b)
    for _ in range(prepared.OFTEN + 4):  # some of these while the kernel is compiled
        assert torch.equal(gm.matmul(a, b), exact)
    tiers.wait()
    assert torch.equal(gm.matmul(a, b), exact)
    assert torch.equal(first, exact)
    assert not tiers.state().failures


@pytest.mark.parametrize("name", ["bf16", "f16", "f32", "f64"])
def test_the_bits_of_matrix_products_do_not_change(name):
    a, b = torch.randn(200, 150, device="cuda").to(TYPES[name]), torch.randn(150, 120, device="cuda").to(TYPES[name])
    first = gm.matmul(a, b)
    for _ in range(prepared.OFTEN + 1):
        gm.matmul(a, b)
    tiers.wait()
    (served,) = (product.served for product in table.calls.values() if product.shape == (200, 120))
    assert served.countdown == 0
    assert torch.equal(gm.matmul(a, b), first)


def test_new_shapes_in_many_threads_while_kernels_are_compiled():
    wrong = []

    def work(seed):
        shapes = [(seed + 3 * i, 5 + 7 * i, 11 + 5 * i) for i in range(1, 12)]
        for _ in range(prepared.OFTEN // 2):
            for sizes in shapes:
                a, b = operands("bf16", *sizes)
                if not torch.equal(gm.matmul(a, b), (a.double() @ b.double()).to(a.dtype)):
                    wrong.append(sizes)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_every_entry_serves_new_shapes(monkeypatch):
    a, b = operands("f32", 40, 30, 50)
    gm.matmul(a, b)
    a, b = operands("f32", 41, 31, 51)
    exact = (a.double() @ b.double()).float()
    assert torch.equal(gm.gemm(1.0, a, b), exact)
    assert torch.equal(gm.gemm(2.0, a, b), 2 * exact)
    assert torch.equal(gm.gemv(a, b[:, 0]), exact[:, 0])
    assert torch.equal(gm.matmul(a[0], b), exact[0])
    assert torch.equal(gm.matmul(a[0], b[:, 0]), exact[0, 0])
    assert torch.equal(gm.matmul(b.T, a.T), exact.T)
    with pytest.raises(gm.ShapeError):
        gm.gemm(1.0, a[0], b)
    with pytest.raises(gm.ShapeError):
        gm.matmul(a, b[:-1])


def test_without_tiers_the_specialized_kernel_runs_at_once(monkeypatch):
    monkeypatch.setenv("GEMMERY_TIERS", "off")
    monkeypatch.setattr(prepared, "_images", {})
    a, b = operands("bf16", 72, 56, 40)
    assert torch.equal(gm.matmul(a, b), (a.double() @ b.double()).bfloat16())
    (product,) = table.calls.values()
    assert product.served.countdown == 0
    assert [name for name, *_ in table.launches] == ["specialized", "prepare"]


def test_a_graph_captured_before_the_swap_replays_after_it():
    a, b = operands("bf16", 72, 56, 40)
    exact = (a.double() @ b.double()).bfloat16()
    gm.matmul(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = gm.matmul(a, b)
    for _ in range(prepared.OFTEN + 1):
        gm.matmul(a, b)
    tiers.wait()
    graph.replay()
    assert torch.equal(out, exact)


def by_rung(name, a, b):
    """The product of two tensors by a rung, None where it refuses."""
    rung, (m, k), n = find((*CUDA, *GENERAL), name), a.shape, b.shape[1]
    kind = next(key for key, dtype in TYPES.items() if dtype is a.dtype)
    layouts = ("row" if x.stride(1) == 1 else "col" for x in (a, b))
    case = Problem(m, n, k, kind, kind, 1, *layouts, device="cuda:0")
    config = {**rung.default, **({"splits": 1} if "splits" in rung.default else {})}
    c = torch.full((m, n), float("nan"), device="cuda", dtype=a.dtype)
    if kind not in rung.dtypes:
        return None
    try:
        kernel = rung.build(case, config)
    except RefusedError:
        return None
    kernel(*(view(x.unsqueeze(0)) for x in (a, b, c)))
    return c


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="has no wgmma"
)
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_whether_wgmma_adds_as_mma_sync_does(name):
    """`ADDS_ALIKE` states it: with True a product may change from one kernel to the other, with False it never does."""
    torch.manual_seed(0)
    wgmma = [rung.name for rung in CUDA if rung.name.startswith("wgmma")]
    differing = {}
    for m, n, k in ((256, 256, 16), (256, 256, 64), (512, 384, 1024), (256, 512, 8192), (128, 64, 4104)):
        for spread in (0, 4):  # numbers of one size, and of sizes that differ by up to 2^4 each way
            a, b = (
                (
                    torch.randn(shape, device="cuda") * 2.0 ** torch.randint(-spread, spread + 1, shape, device="cuda")
                ).to(TYPES[name])
                for shape in ((m, k), (n, k))
            )
            general = by_rung("mma_general", a, b.T)
            assert torch.equal(by_rung("mma_pipelined", a, b.T), general)
            results = [c for c in (by_rung(rung, a, b.T) for rung in wgmma) if c is not None]
            assert all(torch.equal(c, results[0]) for c in results)
            differing[m, n, k, spread] = int((results[0] != general).sum()) if results else 0
    assert (not any(differing.values())) is prepared.ADDS_ALIKE, f"elements by m, n, k and spread: {differing}"


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="has no wgmma"
)
@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize(
    "shape", [(200, 120, 150), (96, 512, 4096), (64, 64, 2048), (1000, 1000, 1000), (1100, 1024, 1024)]
)
def test_no_bit_changes_from_the_first_product_on(name, shape):
    """Whatever kernels become ready meanwhile, with every end of a product."""
    m, n, k = shape
    torch.manual_seed(1)
    a, b = (torch.randn(sides, device="cuda").to(TYPES[name]) for sides in ((m, k), (k, n)))
    bias, old = torch.randn(n, device="cuda"), torch.randn(m, n, device="cuda").to(TYPES[name])
    calls = [
        lambda: gm.matmul(a, b),
        lambda: gm.matmul(a, b, bias=bias),
        lambda: gm.matmul(a, b, bias=bias, activation="relu"),
        lambda: gm.matmul(a, b, bias=bias, activation="gelu"),
        lambda: gm.matmul(a, b, activation="silu"),
        lambda: gm.gemm(0.7, a, b),
        lambda: gm.gemm(0.7, a, b, beta=0.3, c=old),
        lambda: gm.matmul(a, b, batch_invariant=True),
    ]
    for call in calls:
        first = call()
        for _ in range(prepared.OFTEN + 2):
            assert torch.equal(call(), first)
        tiers.wait()
        assert torch.equal(call(), first)
    assert not tiers.state().failures
