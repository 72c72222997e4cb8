"""Products whose kernels copy by tensor maps, again and again: at other addresses, on streams, in graphs, in threads.

Operands are integers so small that every sum is exact. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import threading

import pytest

import gemmery as gm
from gemmery import dispatch, tiers
from gemmery.arrays import view
from gemmery.cuda import driver, ordered, tensormaps
from gemmery.dispatch.cuda import ranking
from gemmery.errors import RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.problem import Problem

torch = pytest.importorskip("torch")

HOPPER = not driver.missing() and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")]

RUNGS = [pytest.param(rung, id=rung.name) for rung in CUDA if rung.name.startswith("wgmma")]
TYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
ORDERS = [(False, False), (False, True), (True, False), (True, True)]  # A and B by columns


def integers(rows, columns, dtype=torch.bfloat16, by_columns=False):
    shape = (columns, rows) if by_columns else (rows, columns)
    numbers = torch.randint(-3, 4, shape, device="cuda").to(dtype)
    return numbers.T if by_columns else numbers


def product(a, b):
    return (a.double() @ b.double()).to(a.dtype)


def laid(tensor):
    return "row" if tensor.stride(-1) == 1 else "col"


def launches(rung, a, b, c):
    """The launches of a rung for operands like these, all aligned; skips the test if it refuses them."""
    (m, k), n = a.shape, b.shape[1]
    names = {dtype: name for name, dtype in TYPES.items()} | {torch.float32: "f32"}
    name, out = names[a.dtype], names[c.dtype]
    case = Problem(m, n, k, name, out, 1, laid(a), laid(b), laid(c), device="cuda:0")
    if name not in rung.dtypes:
        pytest.skip(f"{rung.name} does not take {name}")
    try:
        ready = rung.build(case, rung.default).ready(*(stacked(each) for each in (a, b, c)))
    except RefusedError as error:
        pytest.skip(str(error))
    assert ready.maps
    return ready


def stacked(tensor):
    return view(tensor.unsqueeze(0))


def run(ready, a, b, c, stream=None):
    stream = torch.cuda.current_stream().cuda_stream if stream is None else stream
    scratch = ordered.allocate(ready.workspace, stream, 0) if ready.workspace else 0
    ready(a.data_ptr(), b.data_ptr(), c.data_ptr(), stream, 0, scratch)
    if scratch:
        ordered.free(scratch, stream, 0)


def test_a_map_begins_with_its_address():
    with driver.on(0):
        assert tensormaps.begins_with_address()


def test_large_products_run_by_tensor_maps():
    """Once the rung is in the ranking."""
    names = [name for name, _ in ranking(Problem(4096, 4096, 4096, "bf16", "bf16", device="cuda:0"), driver.device(0))]
    if not names[0].startswith("wgmma"):
        pytest.skip(f"{names[0]} is the first choice")
    plan = dispatch.plan(Problem(4096, 4096, 4096, "bf16", "bf16", b_layout="col", device="cuda:0"))
    assert plan.kernel.geometry.maps


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("orders", ORDERS)
def test_one_launch_serves_any_addresses(rung, orders):
    """Each call writes the addresses of its operands into maps that were made once."""
    m, n, k = 256, 192, 320
    pools = [
        torch.randint(-3, 4, (rows * columns + 4096,), device="cuda").bfloat16() for rows, columns in ((m, k), (k, n))
    ]
    results = torch.zeros(m * n + 4096, device="cuda", dtype=torch.bfloat16)

    def at(pool, offset, rows, columns, by_columns=False):
        part = pool[offset : offset + rows * columns]
        return part.view(columns, rows).T if by_columns else part.view(rows, columns)

    ready = None
    for offset in (0, 8, 136, 2048, 4088, 0):
        a, b = at(pools[0], offset, m, k, orders[0]), at(pools[1], 4088 - offset, k, n, orders[1])
        results.fill_(float("nan"))
        c = at(results, offset, m, n)
        ready = ready or launches(rung, a, b, c)
        run(ready, a, b, c)
        assert torch.equal(c, product(a, b))
        rest = torch.cat((results[:offset], results[offset + m * n :]))
        assert bool(rest.isnan().all())


@pytest.mark.parametrize("rung", RUNGS)
def test_launches_of_two_shapes_take_turns(rung):
    """Arguments of finished calls are used again, by other launches too."""
    cases = []
    for m, n, k in ((128, 256, 64), (384, 136, 200), (64, 64, 64)):
        a, b, c = integers(m, k), integers(k, n, by_columns=True), torch.empty(m, n, device="cuda").bfloat16()
        cases.append((launches(rung, a, b, c), a, b, c))
    for _ in range(20):
        for ready, a, b, c in cases:
            c.zero_()
            run(ready, a, b, c)
    assert all(torch.equal(c, product(a, b)) for _, a, b, c in cases)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_chain_of_products_reads_what_the_one_before_wrote(rung):
    """Each may begin while the one before ends: products with permutations, so that any element read early is wrong."""
    side, steps = 1024, 40
    order = torch.randperm(side, device="cuda")
    permutation = torch.eye(side, device="cuda").bfloat16()[order]
    start = integers(side, side)
    buffers = [torch.empty_like(start) for _ in range(2)]
    ready = launches(rung, start, permutation, buffers[0])
    expected = start
    for _ in range(steps):
        expected = expected[:, torch.argsort(order)]

    def chain(stream=None):
        source = start
        for step in range(steps):
            run(ready, source, permutation, buffers[step % 2], stream)
            source = buffers[step % 2]
        return source

    for _ in range(5):
        assert torch.equal(chain(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = chain()
    for _ in range(5):
        for buffer in buffers:
            buffer.zero_()
        graph.replay()
        assert torch.equal(result, expected)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_graph_replays_with_new_data(rung):
    a, b, c = integers(512, 256), integers(256, 384), torch.empty(512, 384, device="cuda").bfloat16()
    ready = launches(rung, a, b, c)
    run(ready, a, b, c)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run(ready, a, b, c)
    run(ready, integers(512, 256), b, torch.empty_like(c))  # the graph keeps its addresses
    for _ in range(4):
        a.copy_(integers(512, 256))
        graph.replay()
        assert torch.equal(c, product(a, b))


@pytest.mark.parametrize("rung", RUNGS)
def test_threads_with_streams_of_their_own_share_a_launch(rung):
    m, n, k = 256, 256, 512
    operands = [(integers(m, k), integers(k, n)) for _ in range(4)]
    expected = [product(a, b) for a, b in operands]
    results = [torch.empty(m, n, device="cuda").bfloat16() for _ in operands]
    ready, wrong = launches(rung, *operands[0], results[0]), []
    torch.cuda.synchronize()

    def work(place):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(50):
                results[place].zero_()
                run(ready, *operands[place], results[place], stream.cuda_stream)
                if not torch.equal(results[place], expected[place]):
                    wrong.append(place)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(operands))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", [(512, 384, 1024), (257, 391, 1001), (1000, 1000, 1000), (64, 4096, 72)])
def test_matmul_at_new_addresses_into_new_results_and_into_out(name, shape):
    """What no map describes is packed into scratch memory, which the next product uses again."""
    m, n, k = shape
    for by_columns in ORDERS:
        for _ in range(4):
            a, b = integers(m, k, TYPES[name], by_columns[0]), integers(k, n, TYPES[name], by_columns[1])
            exact = product(a, b)
            assert torch.equal(gm.matmul(a, b), exact)
            out = torch.full((m, n), float("nan"), device="cuda", dtype=TYPES[name])
            assert torch.equal(gm.matmul(a, b, out=out), exact)
            turned = torch.full((n, m), float("nan"), device="cuda", dtype=TYPES[name]).T
            assert torch.equal(gm.matmul(a, b, out=turned), exact)
    tiers.wait()
    assert torch.equal(gm.matmul(a, b), exact)
    assert not tiers.state().failures


@pytest.mark.parametrize("offset", [0, 1, 8, 64])
def test_matmul_of_parts_of_tensors(offset):
    """Their first elements are anywhere in a tensor, whose rows are longer."""
    whole_a, whole_b = integers(700, 1040), integers(1040, 600)
    c = torch.full((640, 640), float("nan"), device="cuda").bfloat16()
    for _ in range(20):
        a, b = whole_a[3:515, offset : offset + 960], whole_b[offset : offset + 960, 8:392]
        out = c[:512, offset : offset + 384]
        gm.matmul(a, b, out=out)
        assert torch.equal(out, product(a, b))
    assert int(c.isnan().sum()) == 640 * 640 - 512 * 384


def test_matmul_on_two_streams_at_once():
    a, b = integers(768, 2048), integers(2048, 768)
    exact = product(a, b)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for _ in range(30):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(gm.matmul(a, b))
    torch.cuda.synchronize()
    assert all(torch.equal(result, exact) for result in results)


@pytest.mark.parametrize("k", [1024, 1023])
def test_matmul_in_a_graph(k):
    a, b = integers(512, k), integers(k, 640)
    out = torch.empty(512, 640, device="cuda").bfloat16()
    gm.matmul(a, b, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        gm.matmul(a, b, out=out)
        later = gm.matmul(out[:, :512], out)
    for _ in range(3):
        a.copy_(integers(512, k))
        b.copy_(integers(k, 640))
        graph.replay()
        assert torch.equal(out, product(a, b))
        near = out[:, :512].double() @ out.double()
        assert bool(((later.double() - near).abs() <= 2**-7 * out[:, :512].double().abs() @ out.double().abs()).all())


@pytest.mark.parametrize("k", [0, 1, 8, 63, 64, 65])
def test_matmul_with_a_short_inner_side(k):
    for m, n in ((256, 256), (129, 65)):
        for by_columns in ORDERS:
            a, b = integers(m, k, by_columns=by_columns[0]), integers(k, n, by_columns=by_columns[1])
            for _ in range(4):
                assert torch.equal(gm.matmul(a, b), product(a, b))
    tiers.wait()
    assert not tiers.state().failures


def test_matmul_of_batches_with_shared_operands():
    a, b = integers(5 * 192, 256).view(5, 192, 256), integers(256, 320)
    exact = (a.double() @ b.double()).bfloat16()
    stack = b.expand(5, 256, 320)
    for _ in range(4):
        assert torch.equal(gm.matmul(a, b), exact)
        assert torch.equal(gm.matmul(a, stack), exact)
        assert torch.equal(gm.matmul(a[:1].expand(5, 192, 256), stack.contiguous()), exact[:1].expand(5, 192, 320))
        assert torch.equal(gm.matmul(a.transpose(1, 2).contiguous().transpose(1, 2), stack), exact)
    tiers.wait()
    assert not tiers.state().failures
