"""Prepared products: entries that are replaced while they run, and memory that may not be read."""

import contextlib
import ctypes
import gc

import numpy as np
import pytest

import gemmery as gm
from fences import survives
from gemmery.cpu import entry, entry_layout, entry_table, objects

MET = 3


def clear_entries():
    """Overwrite every entry, as other products do in time."""
    size = entry_layout.TABLE_BYTES - entry_layout.ENTRIES_AT
    ctypes.memset(entry_table.address() + entry_layout.ENTRIES_AT, 0, size)


@contextlib.contextmanager
def without_interpreter(other):
    """Call `other` where a product releases the interpreter, as another thread may run there."""
    names, head = ("save_thread", "restore_thread"), entry_table.address()
    words = [ctypes.c_void_p.from_address(head + entry_layout.at(entry_layout.HEAD, name)) for name in names]
    kept = [word.value for word in words]
    stands_in = (ctypes.PYFUNCTYPE(ctypes.c_void_p)(other), ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(lambda _: None))
    for word, function in zip(words, stands_in, strict=True):
        word.value = ctypes.cast(function, ctypes.c_void_p).value
    try:
        yield
    finally:
        for word, address in zip(words, kept, strict=True):
            word.value = address


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_an_entry_may_be_replaced_while_its_product_runs(batch):
    gm.matmul(np.eye(2), np.eye(2))
    if not entry.active():
        pytest.skip("no compiled entry on this interpreter")
    a, b = np.ones((*batch, 110, 110)), np.ones((*batch[1:], 110, 110))
    out = np.empty((*batch, 110, 110))
    for _ in range(MET):
        gm.matmul(a, b, out)
    calls = []

    def replace():
        calls.append(1)
        clear_entries()
        return 0

    with without_interpreter(replace):
        out[:] = np.nan
        gm.matmul(a, b, out)
    entry.forget()
    assert calls == [1]
    assert (out == 110).all()


@pytest.mark.process
def test_an_entry_may_be_replaced_while_the_result_is_allocated():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x = torch.ones(8, 8)
    for _ in range(MET):
        gm.matmul(x, x)

    def collected():
        gc.callbacks.append(lambda *_: clear_entries())
        gc.set_threshold(1)  # Python 3.11 collects where an object is allocated
        kept = []
        for _ in range(20):
            kept.append(gm.matmul(x, x))
            assert (kept[-1] == 8).all()

    assert survives(collected)


@pytest.mark.process
def test_memory_that_pytorch_forbids_to_read_is_refused():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not hasattr(torch._C, "_set_throw_on_mutable_data_ptr"):
        pytest.skip("this PyTorch cannot forbid it")
    x, forbidden = torch.ones(8, 8), torch.ones(8, 8)
    for _ in range(MET):
        gm.matmul(x, forbidden)
    torch._C._set_throw_on_mutable_data_ptr(forbidden)

    def refused():
        for a, b in ((x, forbidden), (forbidden, x)):
            with pytest.raises(gm.LayoutError, match="Cannot access data pointer"):
                gm.matmul(a, b)

    assert survives(refused)


def test_a_tensor_for_c_alone_does_not_make_the_result_a_tensor():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    a, c = np.ones((8, 8), np.float32), torch.ones(8, 8)
    for _ in range(MET):
        assert gm.gemm(2.0, a, a, 1.0, c.clone(), out=torch.zeros(8, 8)).sum() == 17 * 64
        written = c.clone()
        assert gm.gemm(2.0, a, a, 1.0, written, out=written) is written
        result = gm.gemm(2.0, a, a, 1.0, c)
        assert type(result) is np.ndarray
        assert (result == 17).all()
        result = gm.gemm(2.0, torch.ones(8, 8), a, 1.0, a)
        assert type(result) is torch.Tensor
        assert (result == 17).all()


@pytest.mark.parametrize(("narrow", "wide"), [(">i4", "i8"), (">f4", "f8"), (">i2", "i4")])
def test_a_foreign_byte_order_with_a_wider_c_teaches_nothing_of_the_wider_type(narrow, wide):
    entry.forget()
    a, c = np.full((3, 4), 3, narrow), np.ones((3, 3), wide)
    for _ in range(MET):
        result = gm.gemm(2.0, a, a.T, 1.0, c, out=c.copy())
        assert result.dtype == wide
        assert (result == 73).all()
        assert gm.matmul(a, a.T).dtype == np.dtype(narrow).newbyteorder("=")
        assert gm.gemm(2.0, a, a.T).dtype == np.dtype(narrow).newbyteorder("=")
    for n in range(1, 12):  # shapes served by what is known of the wider type
        x, old = np.full((n, n + 1), 40000, wide), np.ones((n, n), wide)
        assert np.array_equal(gm.gemm(1.0, x, x.T, 2.0, old), x @ x.T + 2 * old)


def test_columns_of_a_foreign_byte_order_give_the_same_bits_each_time():
    draw = np.random.default_rng(0)
    for m, n, k in ((20, 1, 18), (11, 1, 35), (2, 6, 73), (7, 9, 40)):
        a = np.asfortranarray(draw.standard_normal((m, k)).astype(">f8"))
        b = draw.standard_normal((k, n)).astype(">f8")
        entry.forget()
        results = [gm.matmul(a, b).tobytes() for _ in range(MET)]
        gm.matmul(np.ones((1, 2), ">f8"), np.ones((2, 1), ">f8"))
        results += [gm.matmul(a, b).tobytes() for _ in range(MET)]
        assert len(set(results)) == 1


def test_the_bias_of_arrays_may_be_a_tensor():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    entry.forget()
    a = np.ones((8, 8), np.float32)
    for bias in (torch.ones(8), torch.tensor(1.0)):
        for _ in range(MET):
            result = gm.matmul(a, a, bias=bias)
            assert type(result) is np.ndarray
            assert (result == 9).all()


OFFSETS = (
    "TYPE", "DATA", "NDIM", "SHAPE", "STRIDES", "DESCR", "FLAGS", "ELEMENT", "SIZE", "METADATA", "FLOAT_VALUE",
    "TUPLE_SIZE", "TUPLE_ITEMS",
)  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("name", OFFSETS)
def test_a_field_that_is_elsewhere_is_noticed(name, monkeypatch):
    if not objects.known():
        pytest.skip("no compiled entry on this interpreter")
    expected = getattr(objects, name)

    def noticed():
        for shift in (-16, -8, 8, 16):
            monkeypatch.setattr(objects, name, expected + shift)
            assert not objects.known()

    assert survives(noticed)
