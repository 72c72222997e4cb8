"""matmul, gemm, gemv and explain on CUDA tensors of PyTorch: values, kinds, streams, graphs, threads, refusals."""

from __future__ import annotations

import threading

import pytest

import gemmery as gm
from gemmery.cuda import driver

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(driver.missing()), reason=driver.missing()),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch sees no CUDA device"),
]

NAMES = ("float64", "float32", "float16", "bfloat16")
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def tensor(shape, name="float32", seed=0):
    made = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda", dtype=torch.float64)
    return made.to(getattr(torch, name))


def check(result, a, b, alpha=1.0, beta=0.0, c=None, bias=None, activation=None, terms_roundoff=None):
    """`result` is within the bound of alpha a b + beta c + bias, of the dtype it has."""
    name = str(result.dtype).removeprefix("torch.")
    x, y = a.double(), b.double()
    expected, size = alpha * torch.matmul(x, y), abs(alpha) * torch.matmul(x.abs(), y.abs())
    if c is not None:
        expected, size = expected + beta * c.double(), size + abs(beta) * c.double().abs()
    if bias is not None:
        added = torch.as_tensor(bias, dtype=torch.float64, device="cuda")
        expected, size = expected + added, size + added.abs()
    if activation is not None:
        expected = getattr(torch.nn.functional, activation)(expected)
    sums = terms_roundoff or min(ROUNDOFF[name], ROUNDOFF["float32"])
    tolerance = (
        2 * (a.shape[-1] + 4) * sums * (size + expected.abs())
        + ROUNDOFF[name] * expected.abs()
        + 2.0**-24 * (name == "float16")
    )
    assert result.shape == expected.shape
    wrong = ~((result.double() - expected).abs() <= tolerance)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((1, 1), (1, 1)),
        ((7, 5), (5, 3)),
        ((64, 64), (64, 64)),
        ((129, 65), (65, 131)),
        ((512, 512), (512, 512)),
        ((1, 300), (300, 200)),
        ((200, 300), (300, 1)),
        ((300,), (300,)),
        ((300,), (300, 20)),
        ((20, 300), (300,)),
        ((5, 0), (0, 7)),
        ((0, 4), (4, 7)),
        ((10, 3, 4), (10, 4, 5)),
        ((1000, 4, 4), (1000, 4, 4)),
        ((4, 1, 3, 8), (5, 8, 2)),
        ((6, 5, 4), (4, 7)),
        ((5, 4), (6, 4, 7)),
        ((3, 1, 2, 40, 30), (4, 1, 30, 20)),
    ],
)
def test_products(name, left, right):
    a, b = tensor(left, name, 1), tensor(right, name, 2)
    result = gm.matmul(a, b)
    assert type(result) is torch.Tensor
    assert result.dtype == a.dtype
    assert result.device == a.device
    check(result, a, b)
    out = torch.full_like(result, float("nan"))
    assert gm.matmul(a, b, out=out) is out
    assert torch.equal(out, result)
    assert torch.equal(gm.matmul(a, b), result)


def test_strides_of_every_kind():
    a, b = tensor((8, 60, 100), seed=1), tensor((100, 120), seed=2)
    wide = tensor((200, 240), seed=3)
    pairs = [
        (a[::2, 1:], b[:, ::3]),
        (a.transpose(0, 1), b),
        (a[0], wide[::2, ::2]),
        (a[0], wide.T[:100].T[:100]),
        (a[0].expand(5, 60, 100), b),
        (a[0][:, 1:], b[1:, 1:]),
        (a[0][:, 3:7], b[3:7]),
        (b.T, a[0].T),
        (b.T[:, :1].expand(120, 100), b),
    ]
    for x, y in pairs:
        check(gm.matmul(x, y), x, y)
        shape = torch.matmul(x, y).shape
        for out in (
            torch.zeros(*shape[:-2], shape[-1], shape[-2], device="cuda").transpose(-1, -2),
            torch.zeros(*shape[:-1], 2 * shape[-1] + 1, device="cuda")[..., 1::2],
        ):
            gm.matmul(x, y, out=out)
            check(out, x, y)
    gaps = torch.zeros(20, 9, device="cuda")
    gm.matmul(a[0][:10], b[:, :4], out=gaps[::2, 1::2])
    assert not gaps[1::2].any()
    assert not gaps[:, ::2].any()


@pytest.mark.parametrize("name", NAMES)
def test_epilogues(name):
    a, b, bias = tensor((70, 50), name, 1), tensor((50, 90), name, 2), tensor((90,), name, 3)
    for activation in (None, "relu", "gelu", "silu"):
        check(gm.matmul(a, b, bias=bias, activation=activation), a, b, bias=bias, activation=activation)
    number = gm.matmul(a, b, bias=1.25)
    check(number, a, b, bias=1.25)
    check(gm.matmul(a, b, bias=bias[:1]), a, b, bias=bias[:1])
    check(gm.matmul(a, b, bias=tensor((180,), name)[::2]), a, b, bias=tensor((180,), name)[::2])
    column = torch.empty(90, 70, dtype=a.dtype, device="cuda").T
    check(gm.matmul(a, b, bias=bias, out=column), a, b, bias=bias)
    batch = tensor((3, 70, 50), name)
    check(gm.matmul(batch, b, bias=bias, activation="relu"), batch, b, bias=bias, activation="relu")


@pytest.mark.parametrize("name", NAMES)
def test_gemm_and_gemv(name):
    a, b, c = tensor((40, 30), name, 1), tensor((30, 50), name, 2), tensor((40, 50), name, 3)
    kept = c.clone()
    check(gm.gemm(0.5, a, b, -2.0, c), a, b, 0.5, -2.0, c)
    assert torch.equal(c, kept)
    assert gm.gemm(2.0, a, b, 1.0, c, out=c) is c
    check(c, a, b, 2.0, 1.0, kept)
    poisoned = torch.full_like(c, float("nan"))
    check(gm.gemm(1.5, a, b, 0.0, poisoned, out=poisoned), a, b, 1.5)
    nothing = gm.gemm(0.0, torch.full_like(a, float("nan")), b, 2.0, kept)
    assert torch.equal(nothing, 2 * kept)
    turned = torch.empty(50, 40, dtype=c.dtype, device="cuda").T
    check(gm.gemm(0.5, a, b, 3.0, kept, out=turned), a, b, 0.5, 3.0, kept)
    x, y = tensor((30,), name, 4), tensor((40,), name, 5)
    check(gm.gemv(a, x, y, alpha=3.0, beta=0.5), a, x, 3.0, 0.5, y)
    check(gm.gemv(b.T, x, alpha=-1.0), b.T, x, -1.0)


def test_scalars_change_from_call_to_call():
    a, b, c = tensor((40, 30), seed=1), tensor((30, 50), seed=2), tensor((40, 50), seed=3)
    for alpha, beta in [(0.0, 2.0), (2.0, 0.5), (1.0, 0.0), (-1.0, 0.0), (1.0, 1.0), (2, 3), (0.0, 0.0), (1e-3, -1e3)]:
        for _ in range(2):
            out = c.clone()
            assert gm.gemm(alpha, a, b, beta, out, out=out) is out
            check(out, a, b, alpha, beta, c)
            check(gm.gemm(alpha, a[:], b[:], beta, c[:]), a, b, alpha, beta, c)
            assert gm.gemm(alpha, a[:], b[:], beta, c[:], out=out) is out
            check(out, a, b, alpha, beta, c)
            out.copy_(c)
            gm.gemm(alpha, a[:], b[:], beta, out[:], out=out)
            check(out, a, b, alpha, beta, c)
            memory = torch.cat((c, c))
            gm.gemm(alpha, a, b, beta, memory[:40], out=memory[20:60])
            check(memory[20:60], a, b, alpha, beta, c)
    check(gm.gemm(2.5, a, b), a, b, 2.5)
    check(gm.gemm(-2.5, a, b), a, b, -2.5)
    assert torch.isinf(gm.gemm(1e300, a, b)).any()
    y = tensor((40,), seed=4)
    for alpha in (2.0, 3.0):
        out = y.clone()
        check(gm.gemv(a, b[:, 0], out, alpha=alpha, beta=0.5, out=out), a, b[:, 0], alpha, 0.5, y)
        with pytest.raises(gm.ShapeError, match="gemm multiplies matrices"):
            gm.gemm(alpha, a, b[:, 0], 0.5, out, out=out)


def test_wider_results_and_mixed_types():
    for narrow in ("float16", "bfloat16"):
        a, b = tensor((60, 2000), narrow, 1), tensor((2000, 70), narrow, 2)
        result = gm.matmul(a, b, dtype="float32")
        assert result.dtype == torch.float32
        check(result, a, b)
        mixed = gm.matmul(a, b.float())
        assert mixed.dtype == torch.float32
        check(mixed, a, b)
        out = torch.empty(60, 70, device="cuda")
        assert gm.matmul(a, b, out=out) is out
        check(out.to(a.dtype), a, b)
    a, b = tensor((30, 40), seed=1), tensor((40, 50), seed=2)
    check(gm.matmul(a, b, dtype=torch.float64), a, b)
    half = torch.empty(30, 50, device="cuda", dtype=torch.float16)
    gm.matmul(a, b, out=half)
    check(half, a, b)
    check(gm.gemm(1.0, a.half(), b.half(), 1.0, torch.ones(30, 50, device="cuda")), a.half(), b.half(), 1.0, 1.0,
          torch.ones(30, 50, device="cuda"))  # fmt: skip


def test_tf32_is_only_where_it_is_asked_for():
    a, b = tensor((256, 512), seed=1), tensor((512, 256), seed=2)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        check(gm.matmul(a, b), a, b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    check(gm.matmul(a, b, precision="tf32"), a, b, terms_roundoff=2.0**-11)
    for wrong in (
        lambda: gm.matmul(a, b, precision="fast"),
        lambda: gm.matmul(a.double(), b.double(), precision="tf32"),
    ):
        with pytest.raises(gm.ArgumentError, match="tf32"):
            wrong()
    with pytest.raises(gm.ArgumentError, match="precision"):
        gm.matmul(a.cpu(), b.cpu(), precision="tf32")


def test_out_may_overlap_the_operands():
    a, b = tensor((64, 64), seed=1), tensor((64, 64), seed=2)
    for _ in range(2):
        x = a.clone()
        gm.matmul(x, b, out=x)
        check(x, a, b)
        x = b.clone()
        gm.matmul(a, x, out=x.T)
        check(x.T, a, b)
        x = a.clone()
        gm.matmul(x, x, out=x)
        check(x, a, a)
    memory = tensor((100, 64), seed=3)
    kept = memory.clone()
    gm.matmul(memory[:64], b, out=memory[30:94])
    check(memory[30:94], kept[:64], b)
    x = b.clone()
    gm.matmul(a, b, bias=x[0], out=x)
    check(x, a, b, bias=b[0])
    x = tensor((80, 64), seed=4)
    kept = x.clone()
    gm.gemm(1.0, a, b, 2.0, x[:64], out=x[16:])
    check(x[16:], a, b, 1.0, 2.0, kept[:64])


def test_the_current_stream_is_used_and_nothing_waits():
    a, b = tensor((512, 512), seed=1), tensor((512, 512), seed=2)
    expected = gm.matmul(a, b)
    side = torch.cuda.Stream()
    x = torch.zeros_like(a)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.copy_(a)
        result = gm.matmul(x, b)
        assert not side.query()
    side.synchronize()
    assert torch.equal(result, expected)


def test_no_memory_is_copied_to_the_host_and_nothing_synchronizes():
    a, b, bias, c = tensor((64, 48)), tensor((48, 32)), tensor((32,)), tensor((64, 32))
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gm.matmul(a, b, bias=bias, activation="gelu")
        gm.matmul(a, b, bias=2.0)
        gm.gemm(2.0, a, b, 1.0, c, out=c)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def test_a_graph_takes_parts_of_float32_that_a_stream_does_not():
    a, b = tensor((640, 640)), tensor((640, 640)).T
    alone = gm.matmul(a, b, precision="f32_tensor")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = gm.matmul(a, b, precision="f32_tensor")
    graph.replay()
    torch.cuda.synchronize()
    check(captured, a, b)
    if torch.cuda.get_device_capability() == (9, 0):
        assert torch.equal(alone, gm.matmul(a, b))
        assert torch.equal(captured, gm.matmul(a, b, precision="f32_tensor", batch_invariant=True))


@pytest.mark.parametrize("warm", [True, False])
def test_a_graph_captures_products(warm):
    side = 96 if warm else 97  # a shape of its own: the first product is within the capture
    a, b, bias = tensor((side, 80)), tensor((80, side)), tensor((side,))
    c, d, e = (torch.zeros(side, side, device="cuda") for _ in range(3))

    def work():
        gm.matmul(a, b, out=c)
        gm.matmul(a, b, bias=bias, activation="relu", out=d)
        gm.gemm(2.0, a, b, 0.5, d, out=e)
        gm.matmul(a, b, bias=3.0, out=a[:, :side]) if side <= 80 else None
        return gm.matmul(c, gm.matmul(a, b[:, :1])), gm.matmul(a, b, bias=-1.0)

    if warm:
        work()
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        vector, number = work()
    for seed in (5, 6):
        a.copy_(tensor(a.shape, seed=seed))
        b.copy_(tensor(b.shape, seed=seed + 10))
        graph.replay()
        torch.cuda.synchronize()
        check(c, a, b)
        check(d, a, b, bias=bias, activation="relu")
        check(e, a, b, 2.0, 0.5, d)
        check(number, a, b, bias=-1.0)
        check(vector, c, gm.matmul(a, b[:, :1]))


def test_threads_and_streams_at_once():
    count, rounds = 10, 30
    operands = [(tensor((96 + i, 64), seed=i), tensor((64, 80), seed=50 + i)) for i in range(count)]
    expected = [gm.matmul(a, b) for a, b in operands]
    torch.cuda.synchronize()
    wrong = []

    def work(i):
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for turn in range(rounds):
                    j = (i + turn) % count
                    result = gm.matmul(*operands[j])
                    if not torch.equal(result, expected[j]):
                        wrong.append((i, j))
            stream.synchronize()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_thread_that_never_used_the_device_may_multiply():
    a, b = tensor((32, 32)), tensor((32, 32))
    expected, found = gm.matmul(a, b), []
    out = torch.empty_like(expected)
    thread = threading.Thread(target=lambda: found.append(gm.matmul(a, b, out=out)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


def test_the_same_bits_every_time():
    a, b = tensor((300, 700)), tensor((700, 200))
    first = gm.matmul(a, b)
    assert all(torch.equal(gm.matmul(a, b), first) for _ in range(20))


def test_not_a_number_and_infinity_pass_through():
    a, b = tensor((40, 40)), tensor((40, 40))
    a[3, 5], b[7, 9] = float("nan"), float("inf")
    result = gm.matmul(a, b)
    assert torch.isnan(result[3]).all()
    assert not torch.isfinite(result[:, 9]).any()
    rest = result[[i for i in range(40) if i != 3]][:, [j for j in range(40) if j != 9]]
    assert torch.isfinite(rest).all()


def test_unaligned_operands():
    memory = tensor((5000,), "float16", 1)
    for shift in range(1, 9):
        a = memory[shift : shift + 40 * 30].view(40, 30)
        b = memory[2000 + shift // 2 : 2000 + shift // 2 + 30 * 50].view(30, 50)
        for _ in range(2):
            check(gm.matmul(a, b), a, b)
            out = torch.zeros(2100, dtype=torch.float16, device="cuda")[shift : shift + 2000].view(40, 50)
            check(gm.matmul(a, b, out=out), a, b)


def test_mixed_devices_and_options_are_refused():
    a, b = tensor((4, 4)), tensor((4, 4))
    cpu = a.cpu()
    for wrong in (
        lambda: gm.matmul(a, cpu),
        lambda: gm.matmul(cpu, a),
        lambda: gm.matmul(a, cpu.numpy()),
        lambda: gm.matmul(a, [[1.0] * 4] * 4),
        lambda: gm.matmul(a, b, out=cpu),
        lambda: gm.matmul(cpu, cpu, out=a),
        lambda: gm.matmul(a, b, bias=cpu[0]),
        lambda: gm.matmul(cpu, cpu, bias=a[0]),
        lambda: gm.gemm(1.0, a, b, 1.0, cpu),
        lambda: gm.gemm(1.0, cpu, cpu, 1.0, a),
    ):
        with pytest.raises(gm.DeviceError, match=r"cpu.*one device.*x\.to\(device\)"):
            wrong()
    gm.matmul(a, b)  # a product like it came before
    for wrong in (lambda: gm.matmul(a.to_sparse(), b), lambda: gm.matmul(a, b, out=a.to_sparse())):
        with pytest.raises(gm.LayoutError, match=r"to_dense"):
            wrong()
    with pytest.raises(gm.ArgumentError, match="threads=2"):
        gm.matmul(a, b, threads=2)
    with pytest.raises(gm.DTypeError, match=r"'min_plus' takes float64.*not int32"):
        gm.matmul(a.int(), b.int(), semiring="min_plus")
    with pytest.raises(gm.DTypeError, match="cannot represent"):
        gm.matmul(a, b, dtype="float16")
    with pytest.raises(gm.ShapeError, match="must be equal"):
        gm.matmul(a, b[:3])
    with pytest.raises(gm.ShapeError, match="out has shape"):
        gm.matmul(a, b, out=torch.empty(4, 5, device="cuda"))
    with pytest.raises(gm.LayoutError, match="share memory"):
        gm.matmul(a, b, out=torch.empty(1, 4, device="cuda").expand(4, 4))
    with pytest.raises(gm.ShapeError, match="bias"):
        gm.matmul(a, b, bias=torch.ones(3, device="cuda"))
    with pytest.raises(gm.ArgumentError, match="activation"):
        gm.matmul(a, b, activation="tanh")
    with pytest.raises(gm.ArgumentError, match="needs c"):
        gm.gemm(1.0, a, b, 1.0)
    assert torch.isfinite(gm.matmul(a, b)).all()


def test_one_name_for_both_devices():
    a, b = tensor((40, 30), seed=1), tensor((30, 20), seed=2)
    assert torch.allclose(gm.matmul(a.cpu(), b.cpu()), a.cpu() @ b.cpu(), rtol=1e-4, atol=1e-5)
    for _ in range(2):
        check(gm.matmul(a, b), a, b)
        assert gm.matmul(a.cpu(), b.cpu()).device.type == "cpu"


def test_gradients_are_not_dropped_silently():
    x, y = torch.nn.Parameter(tensor((8, 8))), tensor((8, 8))
    for _ in range(2):
        with pytest.raises(gm.LayoutError, match=r"x\.detach\(\)"):
            gm.matmul(x, y)
        with torch.no_grad():
            check(gm.matmul(x, y), x, y)
            check(gm.matmul(x, x), x, x)


def test_lazily_negated_tensors():
    x = torch.randn(16, 16, dtype=torch.complex64, device="cuda").conj().imag
    assert x.is_neg()
    plain = x.resolve_neg().contiguous()
    for _ in range(2):
        check(gm.matmul(plain, plain), plain, plain)
        check(gm.matmul(x, plain), plain, plain)


def test_an_error_leaves_the_context_working():
    a = tensor((64, 64))
    with pytest.raises(gm.DeviceError, match=r"out of memory|OUT_OF_MEMORY"):
        driver.Memory(1 << 50)
    with pytest.raises(torch.OutOfMemoryError):
        gm.matmul(
            torch.empty(1, 1, device="cuda").expand(1 << 20, 1), torch.empty(1, 1, device="cuda").expand(1, 1 << 24)
        )
    bad = driver.api().cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
    with pytest.raises(gm.DeviceError):
        driver.check(bad)
    check(gm.matmul(a, a), a, a)


def test_more_columns_than_a_grid_counts_in_y():
    a, b = tensor((70_000, 2), seed=1), tensor((2, 3), seed=2)
    check(gm.matmul(a, b), a, b)
    check(gm.matmul(b.T, a.T), b.T, a.T)
    many = tensor((70_000, 2, 2), "float64", 3)
    check(gm.matmul(many, many), many, many)


def test_explain():
    a, b = tensor((512, 512)), tensor((512, 512))
    found = gm.explain(a, b)
    assert found.problem.device == "cuda:0"
    assert found.problem.flops == 2 * 512**3
    assert found.rung.startswith("simt_")
    assert found.reason
    assert 0 < found.attainable_gflops <= found.peak_gflops
    assert "cuda:0" in str(found)
    half = gm.explain(a.half(), b.half(), bias=b[0].half(), activation="relu")
    assert half.problem.epilogue == "bias+relu"
    assert half.peak_gflops > found.peak_gflops
