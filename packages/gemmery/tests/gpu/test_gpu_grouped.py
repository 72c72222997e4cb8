"""grouped_matmul on CUDA tensors of PyTorch: uneven groups, offsets on the device, graphs, lists, types, refusals."""

from __future__ import annotations

import pytest

import gemmery as gm
from gemmery.api import on_device as device_products
from gemmery.cuda import driver

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(driver.missing()), reason=driver.missing()),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch sees no CUDA device"),
]

UNTOUCHED = 999.0
ENDS = {
    "one row each": [1, 2, 3, 4],
    "empty ones": [0, 0, 700, 700],
    "uneven": [1, 130, 1500, 2000],
    "rows of no group": [64, 64, 129, 1003],
}


def on_hopper():
    return driver.device(0).capability == 90


def numbers(*shape, dtype=torch.bfloat16, seed=0):
    """Small whole numbers, whose sums float32 holds exactly in any order."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator, device="cuda").to(dtype)


def on_device(ends):
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def expected(a, b, ends, bias=None):
    """The products of the groups in float64; rows of no group keep the mark."""
    result, start = torch.full((len(a), b.shape[2]), UNTOUCHED, dtype=torch.float64, device="cuda"), 0
    for group, end in enumerate(ends):
        result[start:end] = a[start:end].double() @ b[group].double()
        if bias is not None:
            result[start:end] += bias.double() if bias.ndim == 1 else bias[group].double()
        start = end
    return result


def check(a, b, ends, **options):
    """The result in an `out` that held marks, with offsets on the device and as a list."""
    dtype = options.get("dtype", a.dtype)
    want = expected(a, b, ends, options.get("bias")).to(dtype)
    for offsets in (on_device(ends), ends):
        out = torch.full((len(a), b.shape[2]), UNTOUCHED, dtype=dtype, device="cuda")
        result = gm.grouped_matmul(a, b, offsets=offsets, out=out, **options)
        assert result is out
        assert torch.equal(out, want), (ends, type(offsets), (out != want).nonzero()[:4].tolist())


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(256, 128), (1000, 520), (4096, 64)])
def test_uneven_groups(ends, dtype, n, k):
    a = numbers(ends[-1] + 37, k, dtype=dtype)
    check(a, numbers(4, n, k, dtype=dtype, seed=1).mT, ends)


@pytest.mark.parametrize("a_by_columns", [False, True])
@pytest.mark.parametrize("b_by_columns", [False, True])
def test_layouts(a_by_columns, b_by_columns):
    a = numbers(200, 2000).mT if a_by_columns else numbers(2000, 200)
    b = numbers(4, 264, 200).mT if b_by_columns else numbers(4, 200, 264)
    check(a, b, ENDS["uneven"])


def test_many_groups_and_rows():
    rows = torch.randint(0, 300, (64,), generator=torch.Generator().manual_seed(3)).cumsum(0).tolist()
    check(numbers(rows[-1], 256), numbers(64, 512, 256, seed=1).mT, rows)


def test_many_rows_of_large_matrices():
    """Matrices of 50 MB: the kernel takes long tiles first. A row's bits are those that it has in a group alone."""
    a, b, ends = numbers(2700, 6144), numbers(3, 4096, 6144, seed=1).mT, [1033, 1040, 2650]
    check(a, b, ends)
    x = torch.randn(2700, 6144, device="cuda").bfloat16()
    b = b.to(torch.bfloat16) + torch.randn(4096, device="cuda").bfloat16()
    whole = gm.grouped_matmul(x, b, offsets=on_device(ends))
    assert torch.equal(whole[: ends[-1]], gm.grouped_matmul(x, b, offsets=on_device(ends))[: ends[-1]])
    alone = gm.grouped_matmul(x[1040:2650], b[2:], offsets=on_device([1610]))
    assert torch.equal(whole[1040:2650], alone)


@pytest.mark.parametrize("shape", [(136,), (4, 136)])
def test_bias(shape):
    bias = numbers(*shape, seed=2)
    check(numbers(2000, 64), numbers(4, 136, 64, seed=1).mT, ENDS["uneven"], bias=bias)


def test_activation_and_a_wider_result():
    a, b, ends = numbers(2000, 64), numbers(4, 136, 64, seed=1).mT, ENDS["uneven"]
    result = gm.grouped_matmul(a, b, offsets=on_device(ends), activation="silu", dtype=torch.float32)
    want = torch.nn.functional.silu(expected(a, b, ends))
    assert result.dtype == torch.float32
    assert ((result.double() - want).abs() <= 1e-5 * want.abs() + 1e-30).all()
    check(a, b, ends, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("k_is_adjacent", [True, False])
def test_types_of_8_bits(dtype, k_is_adjacent):
    if not on_hopper():
        pytest.skip("only devices of compute capability 9.0 multiply them")
    ends = ENDS["uneven"]
    a = numbers(2000, 160, dtype=torch.float32).to(dtype)
    b = numbers(4, 136, 160, dtype=torch.float32, seed=1).to(dtype).mT
    b = b if k_is_adjacent else b.contiguous()
    check(a, b, ends, dtype=torch.float32)
    rows, columns = (torch.exp2(numbers(*shape, dtype=torch.float32, seed=2)) for shape in ((2000,), (4, 136)))
    want = expected(a, b, ends)
    for group, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        want[start:end] *= rows[start:end, None].double() * columns[group].double()
    for offsets in (on_device(ends), ends):
        result = gm.grouped_matmul(a, b, offsets=offsets, dtype=torch.float32, scale_a=rows, scale_b=columns)
        assert torch.equal(result, want.float())
    halves = gm.grouped_matmul(a, b, offsets=on_device(ends), dtype=torch.bfloat16, scale_a=0.5, scale_b=columns[:, 0])
    want = expected(a, b, ends)
    for group, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        want[start:end] *= 0.5 * columns[group, 0].double()
    assert torch.equal(halves, want.bfloat16())


def test_int8_into_int32():
    if not on_hopper():
        pytest.skip("only devices of compute capability 9.0 multiply int8")
    generator = torch.Generator("cuda").manual_seed(3)
    a, b = (
        torch.randint(-128, 128, shape, generator=generator, device="cuda", dtype=torch.int8)
        for shape in ((2000, 160), (4, 136, 160))
    )
    check(a, b.mT, ENDS["uneven"], dtype=torch.int32)


@pytest.mark.parametrize(
    ("dtype", "k", "n"),
    [
        (torch.float32, 96, 72),
        (torch.float64, 96, 72),
        (torch.bfloat16, 97, 64),
        (torch.bfloat16, 64, 71),
        (torch.float16, 1, 8),
    ],
)
def test_what_is_packed_first_and_what_is_a_product_for_each_group(dtype, k, n):
    check(numbers(2000, k, dtype=dtype), numbers(4, n, k, dtype=dtype, seed=1).mT, ENDS["uneven"])


def test_a_graph_is_replayed_with_other_offsets():
    if not on_hopper():
        pytest.skip("only kernels of compute capability 9.0 read offsets on the device")
    a, b, ends = numbers(2000, 256), numbers(4, 512, 256, seed=1).mT, on_device(ENDS["uneven"])
    out = torch.empty(2000, 512, dtype=torch.bfloat16, device="cuda")
    gm.grouped_matmul(a, b, offsets=ends, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        gm.grouped_matmul(a, b, offsets=ends, out=out)
    for each in ENDS.values():
        ends.copy_(on_device(each))
        out.fill_(UNTOUCHED)
        graph.replay()
        assert torch.equal(out, expected(a, b, each).bfloat16())


def test_a_graph_keeps_offsets_of_the_host():
    a, b, ends = numbers(2000, 256), numbers(4, 512, 256, seed=1).mT, ENDS["uneven"]
    out = gm.grouped_matmul(a, b, offsets=ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        gm.grouped_matmul(a, b, offsets=ends, out=out)
    out.fill_(UNTOUCHED)
    graph.replay()
    assert torch.equal(out, expected(a, b, ends).bfloat16())


def test_a_graph_keeps_offsets_of_the_host_beside_one_factor():
    if not on_hopper():
        pytest.skip("only devices of compute capability 9.0 multiply them")
    a, b, ends = numbers(2000, 256), numbers(4, 512, 256, seed=1).mT, ENDS["uneven"]
    factors = {"scale_a": torch.full((1,), 2.0, device="cuda"), "scale_b": torch.full((1,), 0.5, device="cuda")}
    out = gm.grouped_matmul(a, b, offsets=ends, **factors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        gm.grouped_matmul(a, b, offsets=ends, out=out, **factors)
    out.fill_(UNTOUCHED)
    graph.replay()
    assert torch.equal(out, expected(a, b, ends).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_groups(dtype):
    a, b = numbers(300, 64, dtype=dtype), numbers(0, 64, 128, dtype=dtype)
    for offsets in ([], on_device([])):
        out = torch.full((300, 128), UNTOUCHED, dtype=dtype, device="cuda")
        assert gm.grouped_matmul(a, b, offsets=offsets, out=out) is out
        assert (out == UNTOUCHED).all()


def test_wrong_offsets_touch_nothing_outside():
    a, b = numbers(300, 64), numbers(4, 128, 64, seed=1).mT
    around = torch.full((600, 128), UNTOUCHED, dtype=torch.bfloat16, device="cuda")
    gm.grouped_matmul(a, b, offsets=on_device([40, -7, 10_000, 20]), out=around[150:450])
    assert torch.equal(around[150:450], expected(a, b, device_products.clamped([40, -7, 10_000, 20], 300)).bfloat16())
    assert (around[:150] == UNTOUCHED).all()
    assert (around[450:] == UNTOUCHED).all()


def test_repeated_rows_and_matrices():
    ends = ENDS["uneven"]
    a, b = numbers(1, 64).expand(2000, 64), numbers(4, 128, 64, seed=1).mT
    check(a, b, ends)
    check(numbers(2000, 64), numbers(1, 64, 128).expand(4, 64, 128), ends)
    check(numbers(2000, 64), numbers(4, 64, 1).expand(4, 64, 128), ends)


def test_out_with_strides_and_over_an_operand():
    a, b, ends = numbers(2000, 128), numbers(4, 128, 128, seed=1).mT, ENDS["uneven"]
    want = expected(a, b, ends).bfloat16()
    wide = torch.full((2000, 300), UNTOUCHED, dtype=torch.bfloat16, device="cuda")
    gm.grouped_matmul(a, b, offsets=on_device(ends), out=wide[:, 3:131])
    assert torch.equal(wide[:, 3:131], want)
    assert (wide[:, 131:] == UNTOUCHED).all()
    turned = torch.zeros(128, 2000, dtype=torch.bfloat16, device="cuda").mT
    gm.grouped_matmul(a, b, offsets=on_device(ends), out=turned)
    assert torch.equal(turned, want)
    gm.grouped_matmul(a, b, offsets=on_device(ends), out=a)
    assert torch.equal(a, want)
    memory = numbers(
        2001, 128, dtype=torch.float32
    )  # a launch for each group: a later group reads what one before writes
    want = expected(memory[:2000].clone(), b.float(), ends).float()
    gm.grouped_matmul(memory[:2000], b.float(), offsets=on_device(ends), out=memory[1:])
    assert torch.equal(memory[1:], want)


def test_another_stream_and_bits():
    a, b = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((2000, 1024), (4, 512, 1024)))
    ends = ENDS["uneven"]
    first = gm.grouped_matmul(a, b.mT, offsets=on_device(ends))
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        again = [gm.grouped_matmul(a, b.mT, offsets=on_device(ends)) for _ in range(5)]
    torch.cuda.synchronize()
    assert all(torch.equal(first, each) for each in again)
    alone = gm.grouped_matmul(a[1:130], b[1:2].mT, offsets=on_device([129]), batch_invariant=True)
    assert torch.equal(first[1:130], alone)


def test_lists():
    shapes = [(3, 64, 72), (0, 8, 8), (700, 128, 256), (5, 7, 9)]
    a = [numbers(m, k) for m, k, _ in shapes]
    b = [numbers(k, n, seed=1) for _, k, n in shapes]
    for result, x, y in zip(gm.grouped_matmul(a, b), a, b, strict=True):
        assert torch.equal(result, (x.double() @ y.double()).bfloat16())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"offsets": "int64"}, gm.DTypeError, "int64 on cuda:0"),
        ({"offsets": [5, 4, 3, 2]}, gm.ArgumentError, "offsets"),
        ({"dtype": torch.float32}, gm.DTypeError, "out is bfloat16 and the result float32"),
        ({"activation": "tanh"}, gm.ArgumentError, "relu, gelu, silu"),
    ],
)
def test_refusals(change, error, words):
    a, b = numbers(4, 64), numbers(4, 72, 64).mT
    out = torch.full((4, 72), UNTOUCHED, dtype=torch.bfloat16, device="cuda")
    if change.get("offsets") == "int64":
        change = {"offsets": on_device([1, 2, 3, 4]).long()}
    with pytest.raises(error, match=words):
        gm.grouped_matmul(a, b, **{"offsets": on_device([1, 2, 3, 4]), "out": out, **change})
    assert (out == UNTOUCHED).all()


def test_one_launch_serves_the_shapes_that_experts_have(monkeypatch):
    """A product that falls back to a launch for each group would be right, and slow."""
    if not on_hopper():
        pytest.skip("only devices of compute capability 9.0 have the kernel")
    monkeypatch.setattr("gemmery.api.grouped.multiply_groups", None)
    check(numbers(2000, 128), numbers(4, 256, 128, seed=1).mT, ENDS["uneven"])
    check(numbers(2000, 97), numbers(4, 256, 97, seed=1).mT, ENDS["uneven"])  # packed by a launch before
    with pytest.raises(TypeError):
        check(*(numbers(*shape, dtype=torch.float64) for shape in ((2000, 64), (4, 64, 64))), ENDS["uneven"])


@pytest.mark.parametrize("options", [{}, {"activation": "relu"}, {"dtype": torch.float32}])
def test_calls_that_come_again_read_their_own_offsets(options):
    a, b = numbers(2000, 64), numbers(4, 64, 96, seed=1)
    for ends in [*ENDS.values()] * 3:
        result = gm.grouped_matmul(a[:], b[:], offsets=on_device(ends), **options)
        want = expected(a, b, ends).to(result.dtype)[: ends[-1]]
        assert torch.equal(result[: ends[-1]], want.relu() if "activation" in options else want)
        bias = numbers(4, 96, seed=2)
        check(a, b, ends, bias=bias)
        check(a, b, ends)


@pytest.mark.parametrize("n", [512, 4096])  # by a kernel that follows the index, and by a copy of the rows
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_that_an_index_gathers(n, dtype):
    """Of any order, in a graph as well, whose index changes; negative ones count from the end."""
    if not on_hopper():
        pytest.skip("only kernels of compute capability 9.0 read offsets on the device")
    a, b, ends = numbers(700, 512, dtype=dtype), numbers(4, n, 512, dtype=dtype, seed=1).mT, [64, 64, 129, 1003]
    index, on_card = torch.randint(-700, 700, (1003,), device="cuda"), on_device(ends)
    result = gm.grouped_matmul(a, b, offsets=on_card, gather=index)
    assert torch.equal(result, expected(a[index], b, ends).to(dtype))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = gm.grouped_matmul(a, b, offsets=on_card, gather=index)
    index.copy_(torch.randint(0, 700, (1003,), device="cuda"))
    graph.replay()
    assert torch.equal(result, expected(a[index], b, ends).to(dtype))
