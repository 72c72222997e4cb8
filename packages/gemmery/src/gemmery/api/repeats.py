"""What the compiled entry gets of a product on the CPU, so that it runs the next one like it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmery import arrays, config, dispatch, dtypes
from gemmery.api.device_call import CheckedCall
from gemmery.api.options import result_types
from gemmery.arrange import Arrangement, Three
from gemmery.arrays import View
from gemmery.cpu import entry
from gemmery.cpu import threads as cpu_threads
from gemmery.cpu.entry_layout import ArrayKey, Class, Element, Key, Kind, Member, PreparedJob
from gemmery.cpu.launch import Launch
from gemmery.cpu.layout import JOB_AT
from gemmery.cpu.packed_once import PackedView
from gemmery.dispatch import cpu
from gemmery.problem import Problem, activation_of
from gemmery.tuples import NamedTuple

if TYPE_CHECKING:
    from gemmery.dispatch.cpu import Family


class Prepared(NamedTuple):
    """A product without its memory."""

    plan: dispatch.Plan
    problem: Problem
    form: Arrangement

    def operands(self, a: View, b: View, c: View, offset: Three = (0, 0, 0)) -> tuple[View, View, View]:
        """Return the operands of one run of the kernel."""
        p, q, r = a.pointer + offset[0], b.pointer + offset[1], c.pointer + offset[2]
        return arrays.operands(self.form, self.problem, p, q, r)


Used = tuple[View, View, View]  # A, B and C


def remember(call: CheckedCall, prepared: Prepared, used: Used, out: Any, threads: int, job: bytes) -> None:
    """Store the job of a product. `used` are the views of its operands, or of converted copies, and of the result.

    The kernel is one for every shape. If there is a faster one for this shape, it is compiled in the background for
    products that come often or are many, and takes its place.
    """
    kind = _kind(call, *used, out) if entry.active() else None
    if kind is None:
        return
    key, dtype, c = kind.key(), _dtype(call), used[2]
    status = entry.status(key)
    if isinstance(dtype, np.dtype) and kind.dtype is None:
        _tell_of_types(call, kind, dtype)  # products of one type may have stored the key of a product of two
    if status == entry.STORED:
        return  # a call that compiled code leaves to Python each time
    array = ArrayKey(dtype, c.shape, c.strides)
    better = _tiers() and cpu.specialized(prepared.problem) is not None
    calls = entry.calls_until_often(prepared.problem.batch * prepared.form.runs)
    often = status == entry.OFTEN or calls == 1
    entry.remember(kind, key, array, _work(prepared, used, job), calls if better and not often else 0)
    if better and often:
        bias = None if call.bias is None else call.bias._replace(owner=None)
        a, b, _ = used
        views = a._replace(owner=None), b._replace(owner=None), c._replace(owner=None)

        def store(plan: dispatch.Plan) -> None:
            better = prepared._replace(plan=plan)
            assert isinstance(plan.kernel, Launch)
            job = plan.kernel.job(*better.operands(*views), 1, 0, bias, threads)
            entry.remember(kind, key, array, _work(better, views, job))

        _improve(prepared.problem, key, store)
    one_type = kind.a.dtype is kind.b.dtype is dtype and kind.dtype is None
    if _tiers() and one_type and kind.threads is None and not kind.semiring:
        _learn(kind, prepared.problem, threads)


_tiers = functools.cache(config.tiers)  # reading the environment takes 1.5 us


def _tell_of_types(call: CheckedCall, kind: Kind, result: np.dtype[Any]) -> None:
    """Let the entry convert operands and a bias like these."""
    (a, b), bias = call.operands, call.options.bias
    converts = kind.a.dtype is not a.dtype or kind.b.dtype is not b.dtype
    if converts and not isinstance(call.b, PackedView):  # NumPy cannot read a stand-in for panels
        entry.promote(a.dtype, b.dtype, result)
    used: Any = None if kind.bias is None or call.common != call.result else kind.bias.dtype
    if isinstance(used, np.dtype) and used is not bias.dtype:  # a tensor's bias is not converted
        entry.convert_bias(result, bias.dtype, used)


def _work(prepared: Prepared, views: Used, job: bytes) -> PreparedJob:
    """Return a job as the entry knows it: it replaces the pointers and the scalars."""
    kernel, form = prepared.plan.kernel, prepared.form
    assert isinstance(kernel, Launch)
    transposed = kernel.transposes((form.batch, form.m, form.n), form.c)
    return PreparedJob(
        job, _scalar(kernel, prepared.problem), prepared.problem.flops * form.runs, form.loops, transposed
    )


def _scalar(kernel: Launch, problem: Problem) -> str:
    """Return the type of alpha and beta as the entry names it."""
    return f"complex {kernel.accumulator}" if dtypes.get(problem.dtype).kind == "c" else kernel.accumulator


def _improve(problem: Problem, key: Key, store: Callable[[dispatch.Plan], None]) -> None:
    """Compile the kernel for the shape of a problem in the background, and store its job."""
    from gemmery import tiers

    generation = cpu_threads.generation

    def make() -> None:
        plan = dispatch.specialized(problem)
        if plan is not None and cpu_threads.generation == generation:
            store(plan)
            if cpu_threads.generation != generation:
                entry.forget()

    tiers.aside((problem, generation, *key.words), make)


def _learn(kind: Kind, problem: Problem, threads: int) -> None:
    """Tell the entry of the kernels that take every shape of products of this kind."""
    if problem.c_layout != "row":
        return
    bias = None if kind.bias is None else kind.bias.dtype
    layout = problem.b_layout
    class_ = Class(kind.a.dtype, layout, bias, kind.bias_is_number, kind.scaled, kind.beta, kind.activation)
    if entry.learned(class_):
        return
    from gemmery.dispatch.cpu import families

    kernels = families(problem.dtype, problem.out, layout, problem.epilogue, problem.scaled, threads)
    operations = 8 if dtypes.get(problem.dtype).kind == "c" else 2
    members = [member(family, problem) for family in kernels]
    entry.learn(class_, _scalar(kernels[0].launch, problem) if kernels else "", operations, members)


def member(family: Family, problem: Problem) -> Member:
    """Return a family as the entry knows it: limits, and a job on one thread."""
    m, n, k = (max(least, 1) for least, _ in (family.m, family.n, family.k))
    size = dtypes.get(problem.dtype).size
    a, b, c = (
        View(0, (1, rows, columns), (0, columns * size, size), problem.dtype)
        for rows, columns in ((m, k), (k, n), (m, n))
    )
    job = bytearray(family.launch.job(a, b, c, 1, 0, None, 1))
    blocks = family.blocks
    for name, word in (("mc", blocks.mc), ("kc", blocks.kc), ("nc", blocks.nc), ("workspace_bytes", blocks.workspace)):
        job[JOB_AT[name] : JOB_AT[name] + 8] = word.to_bytes(8, "little")
    # The families of gemv have limits of work beyond which the order of their sums is another one.
    once = 1 if family.rung.name == "gemv" else _ONCE
    work = float(family.work)
    limits = family.b_elements, family.c_elements, size if family.a_rows else 0
    return Member(family.m, family.n, family.k, *limits, work, once * work, bytes(job))


_ONCE = 4  # 60 us on one thread are not more than a plan and half of them on two


def remember_aside(call: CheckedCall, c: View, out: Any) -> None:
    """Store that products into arrays like `out` are computed in other memory, and copied."""
    skips = out is None or call.result == "bool" or _has_tensors(call, out)  # compiled code copies no tensor to `out`
    kind = None if skips else _kind(call, call.a, call.b, c, out)
    if kind is not None and kind.out is not None:
        dtype = _dtype(call)
        entry.remember(kind, kind.key(), ArrayKey(dtype, c.shape, c.strides), None)
        if isinstance(dtype, np.dtype) and c.dtype not in (call.result, "bf16"):  # arrays.store rounds to bfloat16
            entry.allow_cast(dtype, out.dtype)


def _kind(call: CheckedCall, a: View, b: View, c: View, out: Any) -> Kind | None:
    """Return the key of a product, or None if its arguments are none that compiled code reads."""
    options, old, (left, right) = call.options, call.old, call.operands
    alone = options.batch_invariant or (options.threads or 0) > _ONE_OBJECT or options.alpha == 0
    if alone or not (_plain(left) and _plain(right)):
        return None
    if old is None and call.result != result_types(call.a, call.b, options.dtype)[1]:
        return None  # operands like these give another type
    as_they_are = a.owner is left and b.owner is right
    if not as_they_are and (call.common != call.result or _has_tensors(call, out)):
        return None  # compiled code converts operands to the type of the result alone, and no tensor
    dtype = _dtype(call)
    if out is None:
        written = ArrayKey(dtype, c.shape, c.strides) if old is not None else None
    elif _plain(out) and c.owner is out:
        written = _array_of(out, c)
    else:
        return None
    own: Any = None if old is None else old.owner
    if old is not None and not (_plain(own) and written and _element(own, old) is written.dtype):
        return None
    bias = _bias(options.bias, call.bias)
    # What names a type and never another one is known by its address.
    names = options.dtype is None or isinstance(options.dtype, str | type | np.dtype)
    if bias is None or not (names or type(options.dtype).__module__ == "torch"):
        return None
    read = None if bias is _NUMBER or bias is _NO_BIAS else bias
    return Kind(
        _array(left, a, call.a, dtype), _array(right, b, call.b, dtype), written, read, bias is _NUMBER, call.scaled,
        options.beta != 0, activation_of(call.epilogue), options.dtype, options.threads,
        semiring=options.semiring or "",
    )  # fmt: skip


def kind_of(a: Any, b: Any, out: Any = None, contraction: str = "", described: str | int | None = None) -> Kind | None:
    """Return the key of a product or contraction without options, or None if compiled code does not read an array.

    `described` is the contraction's expression or axes, as the caller passed them.
    """
    operands = [x for x in (a, b, out) if x is not None]
    if not (entry.active() and all(map(_plain, operands))):
        return None
    views = [arrays.view(x) for x in operands]
    if not all(view.owner is x for view, x in zip(views, operands, strict=True)):
        return None
    x, y, *written = map(_array_of, operands, views)
    return Kind(x, y, written[0] if written else None, dtype=described, contraction=contraction)


_ONE_OBJECT = 256  # Python has one object for each integer up to this, so that its address identifies it
_NUMBER, _NO_BIAS = (ArrayKey(np.dtype(np.float64), (), ()) for _ in range(2))


def _plain(x: Any) -> bool:
    """Return True for an array that compiled code reads: an ndarray without metadata or a tensor, no subclass."""
    return (type(x) is np.ndarray and x.dtype.metadata is None) or _elements(x) is not None


def _has_tensors(call: CheckedCall, out: Any) -> bool:
    return any(_elements(z) is not None for z in (*call.operands, out))


def _elements(x: Any) -> dict[str, Element] | None:
    """Return PyTorch's element types by gemmery's names if x is a tensor that compiled code reads."""
    torch = None if type(x) is np.ndarray else arrays.library(x, "torch", "Tensor")
    if torch is None or type(x) not in (torch.Tensor, torch.nn.Parameter):
        return None
    return _known(torch) if torch.autograd.forward_ad._current_level < 0 else None


@functools.cache
def _known(torch: Any) -> dict[str, Element] | None:
    """Let the compiled entry take tensors of this PyTorch."""
    from gemmery.arrays import pytorch_abi
    from gemmery.cpu import pool, tensors

    abi = pytorch_abi.abi(torch) if config.fast_entry() and pool.address() else None
    if abi is None:
        return None
    entry.know_tensors(tensors.facts(torch, abi))
    return {row.name: Element(tensors.element(code), code, row.size) for code, row in abi.codes.items()}


def _element(x: Any, view: View) -> np.dtype[Any] | Element:
    """Return the element type of an array or tensor."""
    elements = _elements(x)
    dtype: np.dtype[Any] | Element = x.dtype if elements is None else elements[view.dtype]
    return dtype


def _array_of(x: Any, view: View) -> ArrayKey:
    """Return an array or tensor as compiled code sees it, by its view."""
    if isinstance(view, PackedView):
        return ArrayKey(x.dtype, x.shape, x.strides)
    return ArrayKey(_element(x, view), view.shape, view.strides)


def _dtype(call: CheckedCall) -> np.dtype[Any] | Element:
    """Return the element type of a new result."""
    a, b = call.operands
    elements = _elements(a) or _elements(b)
    if elements is not None:
        return elements[call.result]
    own: np.dtype[Any] = a.dtype
    return own if call.a.dtype == call.result and own.isnative else arrays.numpy_dtype(call.result)


def _array(operand: Any, used: View, viewed: View, dtype: np.dtype[Any] | Element) -> ArrayKey:
    """Return an operand as compiled code sees it: as it is, or converted to the type of the result."""
    owner: Any = viewed.owner
    if used is viewed and owner is operand:
        return _array_of(operand, viewed)
    return ArrayKey(dtype, used.shape, used.strides)


def _bias(passed: Any, used: View | None) -> ArrayKey | None:
    """Return the bias as compiled code sees it; None for one that Python must convert."""
    if used is None:
        return _NO_BIAS
    if type(passed) is float:
        return _NUMBER
    if _plain(passed):
        view = arrays.view(passed)
        if view.owner is passed and view.dtype == used.dtype and view.pointer == used.pointer:
            return _array_of(passed, view)
        if (
            type(passed) is np.ndarray and dtypes.get(used.dtype).numpy != passed.dtype.name
        ):  # compiled code converts it
            length = dtypes.get(used.dtype).size
            return ArrayKey(arrays.numpy_dtype(used.dtype), passed.shape, (length,) * passed.ndim)
    return None
