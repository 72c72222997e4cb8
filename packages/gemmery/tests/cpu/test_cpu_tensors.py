"""PyTorch's tensors as compiled code reads and allocates them: every property, every refusal, no leak."""

import ctypes
import gc
import resource
import sys
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from gemmery import dtypes
from gemmery.arrays import pytorch_abi
from gemmery.cpu import entry_tensors, jit, objects, tensors
from gemmery.cpu.atomics import call
from gemmery.cpu.entry_layout import OPERAND
from gemmery.cpu.ir import Module
from gemmery.cpu.target import host

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
]
ONES = torch.ones(3, 3)


def module():
    """The functions of tensors.py, which are visible in their module alone, under other names."""
    made = Module(host())
    entry_tensors.define(made)
    with made.function("try_read", ("ptr", "facts"), ("ptr", "x"), ("ptr", "record"), returns="i64") as f:
        f.ret(f.emit("i64", f"call i64 @read_tensor({f['facts']}, {f['x']}, {f['record']})"))
    with made.function("try_recorded", ("ptr", "facts"), returns="i64") as f:
        f.ret(f.emit("i64", f"call i64 @recorded({f['facts']})"))
    params = (*entry_tensors.NEW[:3], entry_tensors.NEW[-1])
    with made.function("try_new", ("ptr", "facts"), *params, returns="ptr") as f:
        code, ndim, shape, data = (f[each if isinstance(each, str) else each[1]] for each in params)
        f.ret(call(f, "ptr", "new_tensor", f["facts"], code, ndim, shape, f.index(0), data))
    with made.function("try_copy", ("ptr", "facts"), ("ptr", "record"), returns="ptr") as f:
        made_copy = f.emit("ptr", f"call ptr @copy_tensor({f['facts']}, {f['record']})")
        missing = f.emit("i1", f"icmp eq {made_copy}, null")
        f.ret(f.select(missing, f["facts"], made_copy))
    with made.function("try_written", ("ptr", "facts"), ("ptr", "x")) as f:
        f.call("written", f["facts"], f["x"])
    return made


@pytest.fixture(scope="module")
def native():
    """read(x) -> the record or None; recorded() -> bool; new(dtype, shape) -> a tensor; written(x)."""
    abi = pytorch_abi.abi(torch)
    if abi is None:
        pytest.skip("this PyTorch lacks a function or a field that compiled code needs")
    facts = tensors.facts(torch, abi)
    code = jit.load(host(), f"tensors of the test {OPERAND}", module)
    word, pointer = ctypes.c_int64, ctypes.c_void_p
    try_read = ctypes.PYFUNCTYPE(word, pointer, ctypes.py_object, pointer)(code["try_read"])
    try_new = ctypes.PYFUNCTYPE(ctypes.py_object, pointer, word, word, pointer, pointer)(code["try_new"])
    codes = {row.name: number for number, row in abi.codes.items()}

    def read(x):
        record = (word * len(OPERAND))()
        if not try_read(facts, x, ctypes.addressof(record)):
            return None
        return dict(zip((name for name, _ in OPERAND), record, strict=True))

    def new(name, shape):
        sizes, data = (word * max(len(shape), 1))(*shape), word()
        made = try_new(facts, codes[name], len(shape), ctypes.addressof(sizes), ctypes.addressof(data))
        assert data.value == made.data_ptr()
        return made

    def copy(x):
        record = (word * len(OPERAND))()
        assert try_read(facts, x, ctypes.addressof(record))
        made = ctypes.PYFUNCTYPE(pointer, pointer, pointer)(code["try_copy"])(facts, ctypes.addressof(record))
        if made == facts:
            return None
        result = ctypes.cast(made, ctypes.py_object).value
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(result))
        return result

    return SimpleNamespace(
        read=read,
        copy=copy,
        new=new,
        recorded=lambda: bool(ctypes.PYFUNCTYPE(word, pointer)(code["try_recorded"])(facts)),
        written=lambda x: ctypes.PYFUNCTYPE(None, pointer, ctypes.py_object)(code["try_written"])(facts, x),
    )


def test_the_functions_and_fields_of_this_version_of_pytorch_are_known():
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 5):
        pytest.skip("an older PyTorch may lack some of them")
    assert pytorch_abi.abi(torch) is not None


@pytest.mark.parametrize("missing", ["_checked", "_reads", "_tells_gradients", "_tells_recording", "_allocates"])
def test_a_pytorch_that_fails_a_check_is_left_to_python(missing, monkeypatch):
    monkeypatch.setattr(pytorch_abi, missing, lambda *_: None)
    assert pytorch_abi.abi.__wrapped__(torch) is None


def test_a_pytorch_without_a_function_is_left_to_python(monkeypatch):
    monkeypatch.setitem(pytorch_abi._SYMBOLS, "modes", ("_ZN3c106goneEv",))
    assert pytorch_abi.abi.__wrapped__(torch) is None


def test_a_key_set_that_is_elsewhere_is_left_to_python(monkeypatch):
    monkeypatch.setattr(pytorch_abi, "_keys", lambda *_: 0x123456789ABCDEF)
    assert pytorch_abi.abi.__wrapped__(torch) is None


def parameter(**options):
    return torch.nn.Parameter(torch.ones(3, 3), **options)


def shrunk():
    x = torch.ones(8)
    x.untyped_storage().resize_(8)
    return x[:2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ONES,
        lambda: torch.ones(5, 8)[1:, ::2],
        lambda: torch.ones(5, 8).T,
        lambda: torch.ones(4, 1).expand(4, 6),
        lambda: torch.ones(()),
        lambda: torch.ones(2, 3, 4, 5, 6, 7)[..., 1],
        lambda: torch.ones(7).to(torch.bfloat16),
        lambda: torch.ones(2, 2, dtype=torch.float16),
        lambda: torch.ones(2, 2, dtype=torch.int8),
        lambda: torch.ones(2, 2, dtype=torch.bool),
        lambda: torch.ones(2, 2, dtype=torch.complex64).T,
        lambda: torch.from_numpy(np.ones((4, 4))),
        lambda: parameter(requires_grad=False),
        lambda: parameter().detach(),
        lambda: torch.nn.Buffer(ONES),
        shrunk,
    ],
)
def test_a_tensor_is_read_as_it_is(native, make):
    x = make()
    before = sys.getrefcount(x)
    record = native.read(x)
    shape, strides = ((ctypes.c_int64 * x.ndim).from_address(record[name]) for name in ("shape", "strides"))
    assert (record["object"], record["data"], record["ndim"]) == (id(x), x.data_ptr(), x.ndim)
    assert (tuple(shape), tuple(strides), record["unit"]) == (tuple(x.shape), x.stride(), x.element_size())
    codes = pytorch_abi.abi(torch).codes
    assert codes[-1 - record["element"]] == dtypes.get(str(x.dtype).removeprefix("torch."))
    assert record["flags"] == entry_tensors.IS_TENSOR | objects.WRITEABLE
    assert sys.getrefcount(x) == before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_matter_only_while_they_are_recorded(native, mode):
    weights = parameter()
    assert native.read(weights) is None
    assert native.read(weights * 2) is None
    with mode():
        assert native.read(weights) is not None
        assert native.read(torch.ones(3)) is not None
    assert native.read(weights) is None


def of_inference():
    with torch.inference_mode():
        return torch.ones(3)


def test_a_tensor_of_inference_mode_is_read_and_written(native):
    x = of_inference()
    assert native.read(x)["data"] == x.data_ptr()
    native.written(x)  # it has no version to raise


class Named(torch.Tensor):
    """A subclass without arithmetic of its own."""


def masked():
    from torch.masked import masked_tensor

    return masked_tensor(ONES, ONES > 0)


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3, 3)


def freed():
    x = torch.ones(3, 3)
    x.untyped_storage().resize_(0)
    return x


def cut():
    x = torch.ones(8)
    view = x[4:]
    x.untyped_storage().resize_(24)
    return view


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.ones((3, 3)),
        lambda: None,
        lambda: 1.5,
        lambda: ONES.as_subclass(Named),
        parameter,
        lambda: torch.ones(3, requires_grad=True) * 2,
        lambda: torch.ones(2, 2, dtype=torch.complex64).conj(),
        lambda: torch.ones(2, 2, dtype=torch.complex64).conj().imag,
        lambda: torch._efficientzerotensor((3, 3)),
        ONES.to_sparse,
        ONES.to_sparse_csr,
        ONES.to_mkldnn,
        lambda: ONES.to("meta"),
        lambda: torch.quantize_per_tensor(ONES, 0.1, 0, torch.quint8),
        lambda: torch.nested.nested_tensor([torch.ones(2, 3), ONES]),
        lambda: torch.ones(2, 2, dtype=torch.float8_e4m3fn),
        lambda: torch.nn.UninitializedParameter(requires_grad=False),
        lambda: torch.empty(0, 3),
        masked,
        fake,
        freed,
        cut,
    ],
)
def test_what_is_not_a_dense_tensor_is_left_to_python(native, make):
    assert native.read(make()) is None


def test_the_wrapper_of_a_transform_is_left_to_python(native):
    seen = []
    torch.vmap(lambda x: (seen.append((native.read(x), native.recorded())), x)[1])(ONES)
    torch.func.functionalize(lambda x: (seen.append((native.read(x), native.recorded())), x)[1])(ONES)
    torch.func.jvp(lambda x: (seen.append((native.read(x), native.recorded())), x)[1], (ONES,), (ONES,))
    torch.func.grad(lambda x: (seen.append((native.read(x), native.recorded())), x.sum())[1])(ONES)
    assert seen == [(None, True)] * 4
    assert not native.recorded()


def traced(look):
    torch.jit.trace(lambda x: (look(), x * 2)[1], ONES, check_trace=False)


def dispatched(look):
    from torch.utils._python_dispatch import TorchDispatchMode

    with TorchDispatchMode():
        look()


def in_a_dual_level(look):
    with torch.autograd.forward_ad.dual_level():
        look()


def transformed(look):
    torch.func.functionalize(lambda x: (look(), x)[1])(ONES)


@pytest.mark.parametrize("context", [traced, dispatched, in_a_dual_level, transformed])
def test_recording_is_noticed_in_its_own_thread_alone(native, context):
    seen, other = [], []

    def look():
        seen.append(native.recorded())
        thread = threading.Thread(target=lambda: other.append(native.recorded()))
        thread.start()
        thread.join()

    context(look)
    assert all(seen)
    assert seen
    if context is not in_a_dual_level:  # whose level is one for the process
        assert not any(other)
    assert not native.recorded()


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu"), torch.enable_grad]
)
def test_other_modes_are_not_recording(native, mode):
    with mode():
        assert not native.recorded()


@pytest.mark.parametrize("name", [row.name for row in dtypes.BY_NAME.values()])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 4), (0, 5), (1,) * 8])
def test_a_new_tensor_is_like_one_of_pytorchs(native, name, shape):
    x = native.new(name, shape)
    like = torch.empty(shape, dtype=getattr(torch, dtypes.get(name).numpy))
    assert type(x) is torch.Tensor
    assert (x.shape, x.stride(), x.dtype, x.device) == (like.shape, like.stride(), like.dtype, like.device)
    assert not x.requires_grad
    assert sys.getrefcount(x) == sys.getrefcount(like)
    assert x.resize_(2, 2).shape == (2, 2)  # it owns its storage


def peak():
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def test_new_tensors_are_freed(native):
    gone = weakref.ref(native.new("f32", (4, 4)))
    assert gone() is None
    live = sum(type(x) is torch.Tensor for x in gc.get_objects())
    before = peak()
    for _ in range(10_000):
        native.new("f32", (64, 256)).zero_()  # 640 MB in all
    assert peak() - before < 200e6
    assert sum(type(x) is torch.Tensor for x in gc.get_objects()) <= live


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.complex128, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 7)])
def test_a_copy_has_the_values_and_memory_of_its_own(native, shape, dtype):
    x = (torch.arange(43)[: int(np.prod(shape))] + 1).to(dtype).reshape(shape)
    copy = native.copy(x)
    assert torch.equal(copy, x)
    assert copy.data_ptr() != x.data_ptr()
    assert sys.getrefcount(copy) == 2


def test_a_tensor_with_gaps_is_copied_by_python(native):
    assert native.copy(torch.ones(4, 3).T) is None
    assert native.copy(torch.ones(4, 6)[:, ::2]) is None
    assert native.copy(torch.ones(1, 6).expand(4, 6)) is None


def test_a_new_tensor_follows_inference_mode(native):
    with torch.inference_mode():
        assert native.new("f32", (3, 3)).is_inference()
    assert not native.new("f32", (3, 3)).is_inference()


def test_writing_raises_the_version(native):
    for x in (torch.ones(3), parameter(), torch.ones(4, 4)[1:]):
        before = x._version
        native.written(x)
        assert x._version == before + 1
