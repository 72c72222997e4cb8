"""The compiled entry: the calls that it runs, the calls that it passes to Python, and that results are the same."""

import ctypes
import inspect
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gemmery as gm
from fences import survives
from gemmery import tiers
from gemmery.api import products
from gemmery.cpu import entry, entry_layout, entry_table
from gemmery.cpu.entry_layout import ArrayKey, Class, Kind

FUNCTIONS = {"matmul": products._matmul, "gemm": products._gemm, "gemv": products._gemv}
DOCS = [f"{name}(a, b)\n--\n\n" for name in ("matmul", "gemm", "gemv")]


@pytest.fixture
def met():
    """Operands (5, 7) and (7, 3) whose product the compiled entry knows, and the exact product."""
    a, b = np.random.default_rng(0).standard_normal((2, 7, 7)).astype(np.float32)
    a, b = np.ascontiguousarray(a[:5]), np.ascontiguousarray(b[:, :3])
    gm.matmul(a, b)
    if not inspect.isbuiltin(gm.matmul):
        pytest.skip("no compiled entry on this interpreter")
    gm.matmul(a, b, out=np.empty((5, 3), np.float32))
    return a, b, a.astype(np.float64) @ b


class Handed:
    """Count the calls that reach Python."""

    def __init__(self, monkeypatch):
        self.calls = 0
        self.builtin, *_ = entry.builtins(FUNCTIONS | {"matmul": self}, DOCS)
        monkeypatch.setattr(products, "multiply", self.builtin)

    def __call__(self, *args, **options):
        self.calls += 1
        return FUNCTIONS["matmul"](*args, **options)


@pytest.fixture
def handed(met, monkeypatch):
    yield Handed(monkeypatch)
    entry.builtins(FUNCTIONS, DOCS)  # the table has one Python function for each builtin


def near(result, exact):
    return np.max(np.abs(result - exact)) <= 1e-5


def kinds_of_one_place(count):
    """Kinds of products, with results of which the table has one set of places, and their keys."""
    element, sets = np.dtype(np.float32), {}
    for n in range(1, 10**5):
        array = ArrayKey(element, (n, 7), (28, 4))
        kind = Kind(array, array, array)
        key = kind.key()
        same = sets.setdefault(entry_layout.place(key.hash), [])
        same.append((kind, key, array))
        if len(same) == count:
            return same
    return []


def test_two_threads_that_begin_at_once_share_one_table(met, monkeypatch):
    """Compiled code has the address of a table: were there two, it would never see what Python stores in the other."""
    monkeypatch.setattr(entry_table, "_tables", [])
    fresh, both = entry.workspace.pages, threading.Barrier(2)

    def pages(size):
        both.wait(10)
        return fresh(size)

    monkeypatch.setattr(entry_table.workspace, "pages", pages)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: entry_table.address(), range(2))
    assert first == second == entry_table.address()


def test_two_threads_that_store_entries_in_one_place_at_once_lose_neither_for_good(met, monkeypatch):
    first, second = kinds_of_one_place(2)
    write, others = entry_table.write_bytes, [second]

    def interrupted(at, data):
        write(at, data)
        while others:
            entry.remember(*others.pop(), None)

    monkeypatch.setattr(entry_table, "write_bytes", interrupted)
    entry.remember(*first, None)
    monkeypatch.undo()
    for _ in range(2):
        for product in (first, second):
            if entry.status(product[1]) == entry.NEW:
                entry.remember(*product, None)
    size = entry_layout.ENTRY_BYTES
    for _, key, _ in (first, second):
        at = entry_table.address() + entry_layout.ENTRIES_AT + entry_layout.place(key.hash) * size
        entries = ctypes.string_at(at, entry_layout.WAYS * size)
        assert np.array([len(key.words), *key.words]).tobytes() in entries
    entry.forget()


def test_a_class_that_is_learned_while_all_are_forgotten_is_forgotten_next(met, monkeypatch):
    kinds = [Class(np.dtype(kind), "row") for kind in (np.int8, np.uint8)]
    write, others = entry_table.write_bytes, [kinds[1]]
    classes, size = entry_table.address() + entry_layout.CLASSES_AT, entry_layout.COUNTERS_AT - entry_layout.CLASSES_AT

    def interrupted(at, data):
        while others and classes <= at < classes + size:
            entry.learn(others.pop(), "int32", 2, [])
        write(at, data)

    entry.learn(kinds[0], "int32", 2, [])
    monkeypatch.setattr(entry_table, "write_bytes", interrupted)
    entry.forget()
    monkeypatch.undo()
    assert others == []
    assert [np.array(kind.words()).tobytes() in ctypes.string_at(classes, size) for kind in kinds] == [False] * 2
    entry.forget()


def test_a_product_met_before_does_not_reach_python(met, handed):
    a, b, exact = met
    out = np.full((5, 3), np.nan, np.float32)
    assert near(handed.builtin(a, b), exact)
    assert handed.builtin(a, b, out) is out
    assert near(out, exact)
    out[:] = np.nan
    assert handed.builtin(a, b, out=out) is out
    assert near(out, exact)
    assert near(handed.builtin(a, b, None), exact)
    assert near(handed.builtin(a, b, out=None), exact)
    assert handed.calls == 0


def test_a_number_of_threads_met_before_does_not_reach_python(met, handed):
    a, b, exact = met
    for threads in (1, 2):
        assert near(handed.builtin(a, b, threads=threads), exact)
    assert handed.calls == 2
    for threads in (1, 2, 1):
        assert near(handed.builtin(a, b, threads=threads), exact)
    assert handed.calls == 2
    assert near(handed.builtin(a, b, threads=np.int64(2)), exact)
    with pytest.raises(gm.ArgumentError, match="threads=0 must be an integer from 1"):
        handed.builtin(a, b, threads=0)
    with pytest.raises(gm.ArgumentError, match="threads=True"):
        handed.builtin(a, b, threads=True)
    assert handed.calls == 5


def test_a_semiring_met_before_does_not_reach_python(met, handed):
    a, b, exact = met
    pairs = a.astype(np.float64)[:, :, None] + b
    for _ in range(2):
        assert near(handed.builtin(a, b, semiring="min_plus"), pairs.min(1))
        assert near(handed.builtin(a, b, semiring="max_plus"), pairs.max(1))
        assert near(handed.builtin(a, b), exact)
    assert handed.calls == 2
    square = np.ascontiguousarray(a[:, :5])
    for _ in range(3):  # computed aside, and copied to the operand
        out = square.copy()
        assert handed.builtin(out, out, semiring="min_plus", out=out) is out
        assert near(out, (square[:, :, None] + square).min(1))


def test_what_is_not_prepared_reaches_python(met, handed):
    a, b, _exact = met
    out = np.zeros((5, 3), np.float32)
    frozen = out.copy()
    frozen.flags.writeable = False

    class Sub(np.ndarray):
        pass

    calls = [
        lambda: handed.builtin(a, b, dtype="f8"),
        lambda: handed.builtin(a, b, threads=np.int64(1)),
        lambda: handed.builtin(a.view(Sub), b),
        lambda: handed.builtin(a.tolist(), b),
        lambda: handed.builtin(a, b, np.zeros((3, 5), np.float32).T),
    ]
    for number, call in enumerate(calls, 1):
        call()
        assert handed.calls == number
    for bad in (
        lambda: handed.builtin(a),
        lambda: handed.builtin(a, b, out, out),
        lambda: handed.builtin(a, b, out=frozen),
        lambda: handed.builtin(a, b, frozen),
        lambda: handed.builtin(a, a),
        lambda: handed.builtin(a, b, where=False),
    ):
        with pytest.raises((TypeError, ValueError)):
            bad()
    assert handed.calls == len(calls) + 6
    assert not frozen.any()


def test_out_that_overlaps_an_operand_is_right():
    x = np.arange(36.0).reshape(6, 6)
    exact = x @ x
    for _ in range(3):
        y = x.copy()
        assert gm.matmul(y, y, out=y) is y
        assert np.array_equal(y, exact)


def test_an_out_that_overlapped_once_is_not_copied_for_ever(met):
    entry.forget()
    x, y = np.ones((6, 6), "c16"), np.ones((6, 6), "c16")
    products._matmul(x, x, out=x)
    products._matmul(y, y, out=np.empty_like(y))
    table, at = entry_table.address(), entry_layout.at(entry_layout.ENTRY, "kind")
    kinds = set()
    for i in range(entry.counts()[1]):
        if ctypes.c_uint64.from_address(table + entry_layout.HASHES_AT + 8 * i).value:
            place = table + entry_layout.ENTRIES_AT + i * entry_layout.ENTRY_BYTES
            kinds.add(ctypes.c_int64.from_address(place + at).value)
    assert kinds == {entry_layout.RUN}


def test_a_wider_result_is_not_remembered_as_the_plain_one():
    x = np.full((6, 6), 100, np.int8)
    for _ in range(3):
        assert gm.matmul(x, x, dtype="int32").dtype == np.int32
        assert gm.matmul(x, x).dtype == np.int8


def calls_of_all_kinds():
    """Arrays, and calls with them: prepared, of a family, converted, copied, refused."""
    a, b, c, d = (np.ones((n, n), "f4") for n in (6, 6, 6, 6))
    x, y, wide, out, other = a[0].copy(), a[1].copy(), a.astype("f8"), c.copy(), np.zeros((6, 6))
    batch, big = np.ones((3, 6, 6), "f4"), np.ones((70, 70), "f4")
    frozen = c.copy()
    frozen.flags.writeable = False
    good = [
        lambda: gm.matmul(a, b),
        lambda: gm.matmul(a, b, out),
        lambda: gm.matmul(a, b, out=out.T),
        lambda: gm.matmul(a, b, out=other),
        lambda: gm.matmul(d, d, out=d),
        lambda: gm.matmul(a, x),
        lambda: gm.matmul(x, y),
        lambda: gm.matmul(batch, b),
        lambda: gm.matmul(batch[:, None], batch),
        lambda: gm.matmul(a, wide),
        lambda: gm.matmul(wide.astype(">f8"), wide),
        lambda: gm.matmul(a, b, bias=x, activation="relu"),
        lambda: gm.matmul(a, b, bias=0.5),
        lambda: gm.gemm(2.0, a, b),
        lambda: gm.gemm(2, a, b, 0.5, c),
        lambda: gm.gemm(2.0, a, b, beta=0.5, c=c, out=out),
        lambda: gm.gemm(0.1, a, b, 0.5, c, out=c),
        lambda: gm.gemm(2.0, a, wide, 0.5, other),
        lambda: gm.gemv(a, x),
        lambda: gm.gemv(a, x, y, alpha=0.1, beta=0.5, out=y),
        lambda: gm.matmul(big, big),
    ]
    bad = [
        lambda: gm.matmul(a, b[:5]),
        lambda: gm.matmul(a, b, out=frozen),
        lambda: gm.matmul(a, b, out=big),
        lambda: gm.matmul(a, b, bias=np.ones(7, "f4")),
        lambda: gm.gemm("2", a, b),
        lambda: gm.gemm(1.0, a, b, 1.0),
        lambda: gm.gemm(1.0, a, b, 1.0, big),
        lambda: gm.gemv(a, b),
    ]
    return [a, b, c, d, x, y, wide, out, other, batch, big, frozen], good, bad


def test_references_are_counted(met):
    arrays, good, bad = calls_of_all_kinds()

    def repeat(times):
        for _ in range(times):
            for call in good:
                call()
            for call in bad:
                with pytest.raises(gm.GemmeryError):
                    call()

    with np.errstate(all="raise"):
        repeat(150)  # entries of their own come at number 64
        tiers.wait()
        watched = [*arrays, None, np.ndarray, *(np.dtype(name) for name in ("f4", "f8", ">f8"))]
        before = [sys.getrefcount(x) for x in watched]
        repeat(100)
        after = [sys.getrefcount(x) for x in watched]
    assert not [(x, y - z) for x, y, z in zip(watched, after, before, strict=True) if abs(y - z) >= 90]


def test_it_looks_like_the_function_it_stands_for(met):
    assert inspect.signature(gm.matmul).replace(return_annotation=inspect.Signature.empty) == inspect.Signature(
        [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(products.matmul).parameters.values()]
    )
    assert gm.matmul.__doc__ == products.matmul.__doc__
    assert gm.matmul.__module__ == "gemmery"
    assert pickle.loads(pickle.dumps(gm.matmul)) is gm.matmul


def test_a_new_number_of_threads_drops_what_is_prepared(met, handed):
    a, b, exact = met
    try:
        gm.set_num_threads(gm.get_num_threads() + 1)
        assert near(handed.builtin(a, b), exact)
        assert handed.calls == 1
    finally:
        gm.set_num_threads(None)


def test_more_kinds_of_products_than_places():
    b, places = np.full((3, 5), 0.5), entry.counts()[1]
    for width in (*range(3, places + 800), *range(3, 40)):  # the distance between rows is a part of the key
        a = np.full((4, width), np.nan)[:, :3]
        a[...] = 2
        products._matmul(a, b)  # Python stores it
        assert np.array_equal(gm.matmul(a, b), np.full((4, 5), 3.0))
    assert entry.counts()[0] <= places


def test_neighbors_do_not_replace_each_other(met):
    b = np.full((3, 5), 0.5)
    entry.forget()
    for width in range(3, 1003):
        products._matmul(np.ones((4, width))[:, :3], b)
    assert entry.counts()[0] > 980


def test_long_products_release_the_interpreter():
    a = np.ones((700, 700), np.float32)
    gm.matmul(a, a)
    ticks, stop = [0], threading.Event()

    def tick():
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.001)

    other = threading.Thread(target=tick)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # without a release the other thread gets no turn
    try:
        other.start()
        before = ticks[0]
        for _ in range(20):
            gm.matmul(a, a)
        assert ticks[0] > before
    finally:
        stop.set()
        sys.setswitchinterval(switch)
        other.join()


@pytest.mark.process
def test_it_can_be_switched_off():
    code = "import numpy as np, gemmery as gm; x = np.eye(3); gm.matmul(x, x); print(type(gm.matmul).__name__)"
    for value, kind in (("0", "function"), ("1", "builtin_function_or_method")):
        made = subprocess.run(
            [sys.executable, "-c", code], env={"GEMMERY_FAST_ENTRY": value}, capture_output=True, text=True, check=False
        )
        assert made.stdout.strip() == kind, made.stderr


def unpickled(x):
    """A copy whose dtype is an object of its own, as a pool's workers get their arguments."""
    return pickle.loads(pickle.dumps(x))


def test_unpickled_operands_of_several_types():
    draw = np.random.default_rng(0)
    for name in draw.choice(["f4", "i4", "u4"], 300):
        x = draw.integers(0, 9, (8, 8)).astype(name)
        a, b = unpickled((x, x.copy()))
        assert np.array_equal(gm.matmul(a, b), x @ x)


def test_operands_turned_to_the_native_byte_order():
    gm.matmul(np.ones((6, 6), "f4"), np.ones((6, 6), "f4"))
    gm.matmul(np.ones((6, 6), "i4"), np.ones((6, 6), "i4"))
    for _ in range(40):
        for name in (">f4", ">i4"):
            raw = np.full((6, 6), 2, name)
            x = raw.astype(raw.dtype.newbyteorder("="))
            assert np.array_equal(gm.matmul(x, x), x @ x)
            del x, raw


@pytest.mark.process
def test_the_dtype_of_an_out_may_die():
    a = np.ones((40, 40), "f4")

    def call():
        for make in (
            lambda name: unpickled(np.empty((1, 1), name)).dtype,
            lambda name: np.dtype(name).newbyteorder("="),
        ):
            out = np.empty((40, 40), make("f4"))
            gm.matmul(a, a, out=out)
            del out
            keep = [make(name) for name in ("U77", "U77", "U77", "i1", "i1")]
            result = gm.matmul(a, a)
            assert result.dtype is np.dtype("f4")
            assert (result == 40).all()
            assert keep

    assert survives(call)


def test_an_equal_dtype_takes_the_compiled_way_and_one_with_metadata_does_not(met, handed):
    a, b, exact = met
    assert near(handed.builtin(unpickled(a), b), exact)
    assert near(handed.builtin(a.astype(">f4").astype(np.dtype(">f4").newbyteorder("=")), unpickled(b)), exact)
    assert handed.calls == 0
    marked = a.astype(np.dtype("f4", metadata={"unit": "m"}))
    for number in (1, 2):
        assert handed.builtin(marked, b).dtype.metadata == {"unit": "m"}
        assert handed.calls == number
    assert near(handed.builtin(a.astype(">f4"), b), exact)
    assert handed.calls in (2, 3)  # Python's, if no test of this process has multiplied such arrays before


def test_int64_has_two_names_and_each_gets_its_own_back():
    for name in "lqlqLQ":
        x = np.full((5, 5), 3, name)
        for _ in range(2):
            assert gm.matmul(x, x).dtype.char == name
