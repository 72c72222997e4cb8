"""The explanation of a product: its rung, the reason for it, and its limits on this machine."""

# No `from __future__ import annotations` here: help() would show annotations as strings.
import timeit
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmery import arrays, config, display, dtypes
from gemmery.api import array_libraries, opaque, products
from gemmery.api.checked import checked_call
from gemmery.api.compute import KernelTypes, prepared_for, types_of
from gemmery.api.epilogue_terms import saved
from gemmery.api.options import check_operands, record
from gemmery.arrange import result_shape
from gemmery.arrays import View, view
from gemmery.cpu import threads as cpu_threads
from gemmery.cpu.packed_once import Packed
from gemmery.cpu.split import worth_half
from gemmery.cpu.target import cores, host
from gemmery.dispatch import cpu
from gemmery.epilogues.graph import usual
from gemmery.errors import ShapeError
from gemmery.keywords import Options, takes_options
from gemmery.problem import Problem

if TYPE_CHECKING:
    from typing import Unpack

    from gemmery.api.prepared import PreparedLaunch
    from gemmery.dispatch import Plan
    from gemmery.keywords import MatmulOptions
    from gemmery.ladder.float32_parts import Float32Scheme
    from gemmery.limits import Bound


@dataclass(frozen=True)
class Explanation:
    """The rung of a product, the reason for it and the roofline; `print` shows all of it."""

    rung: str
    idea: str  # of the rung, in one line
    config: Mapping[str, int]
    reason: str  # for this rung
    problem: Problem
    runs: int  # of the kernel; more than one where no single stride walks the batch
    copies: tuple[str, ...]  # conversions of operands and of the result
    threads: int  # 0 on a CUDA device
    peak_gflops: float  # measured on this machine, for these threads or this device, and this element type
    bandwidth_gbs: float  # measured read bandwidth
    attainable_gflops: float
    bound: str  # "compute" or "memory"
    # On the CPU: for every shape or for this one, and what takes over when the product comes often. On a GPU: what
    # rows a tile has, unless they follow each other.
    kernel: str = ""
    load: float = 0.0  # cores that other processes used while peak and bandwidth were measured
    scheme: "Float32Scheme | None" = None  # of float32 in parts: the method for these numbers, and its error bound
    halved: bool = False  # b is a's memory, transposed, so half of C is computed
    fused: str = ""  # what is done to the sums, and the bytes that this saves
    call: float = 0.0  # seconds that a call takes for the smallest product; on the CPU alone

    @property
    def flops(self) -> int:
        """Number of multiplications and additions, of all runs."""
        return self.runs * self.problem.flops

    @property
    def bytes(self) -> int:
        """Least number of bytes moved, by all runs."""
        return self.runs * self.problem.bytes

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.problem.intensity

    def __str__(self) -> str:
        (_, product), *others = self._facts()
        return "\n".join([product, *(f"{name:10} {text}" for name, text in others)])

    def _repr_html_(self) -> str:
        """The same as a table, which a notebook displays."""
        return display.table(self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        p = self.problem
        size = f"{p.m} x {p.n} x {p.k}" + (f", {self.runs * p.batch} times" if self.runs * p.batch > 1 else "")
        types = " by ".join(filter(None, (p.dtype, p.b_dtype)))
        settings = ", ".join(f"{name} {value}" for name, value in self.config.items())
        where = f"threads {self.threads}" if p.device == "cpu" else p.device
        limits = f"{self.peak_gflops:.4g} GFLOP/s and {self.bandwidth_gbs:.4g} GB/s measured, {where}"
        least = self.flops / self.attainable_gflops / 1e9
        roof = f"{self.bound}: at most {self.attainable_gflops:.4g} GFLOP/s, at least {_duration(least)}"
        if least < self.call:
            roof = f"the call, which takes {_duration(self.call)}; the operations need {_duration(least)}"
        intensity = f"{self.intensity:.0f}" if self.intensity >= 100 else f"{self.intensity:.3g}"
        return [
            ("product", f"{types} -> {p.out}, m x n x k = {size}; A {p.a_layout}, B {p.b_layout}, C {p.c_layout}"),
            ("rung", f"{self.rung}: {self.idea}" + (f" ({settings})" if settings else "")),
            ("why", self.reason),
            *(self.scheme.facts if self.scheme else []),
            *([("factors", _FACTORS[p.scales])] if p.scales else []),
            *([("invariant", "the bits of a row of C do not depend on m")] if p.invariant else []),
            *([("semiring", f"{p.semiring} takes the place of sums and products")] if p.semiring else []),
            *([("kernel", self.kernel)] if self.kernel else []),
            *([("fused", self.fused)] if self.fused else []),
            *([("symmetric", "half the tiles: b is a's memory, transposed, so C is mirrored")] if self.halved else []),
            *(("converted", copy) for copy in self.copies),
            ("work", f"{self.flops:,} operations, at least {self.bytes:,} bytes: {intensity} operations/byte"),
            ("machine", limits),
            ("bound by", roof),
            *(("unreliable", text) for text in self._doubts()),
        ]

    def _doubts(self) -> tuple[str, ...]:
        """A warning if other processes kept the cores busy while the machine was measured."""
        from gemmery import load

        if self.problem.device != "cpu" or self.load <= load.limit(cores()):
            return ()
        return (f"other processes used {self.load:.2g} of {cores()} cores while the machine was measured",)


def _duration(seconds: float) -> str:
    """Return seconds in a suitable unit.

    >>> _duration(0.0325), _duration(2e-9)
    ('32.5 ms', '0.002 us')
    """
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    return f"{seconds * scale:.3g} {unit}"


_FACTORS = {
    "outer": "of the rows of A and of the columns of B, applied to the finished sums",
    "blocks": "of blocks of A (1 x 128) and of B (128 x 128), applied every 128 of k",
}


@opaque.opaque
@takes_options
def explain(a: Any, b: Any, **keywords: "Unpack[MatmulOptions]") -> Explanation:
    """Return the rung and config that `matmul(a, b, ...)` would run, the reason, and the limits on this machine.

    >>> import numpy as np, gemmery as gm
    >>> x = np.ones((512, 512), np.float32)
    >>> gm.explain(x, x).problem.flops
    268435456

    Nothing is multiplied. With precision "f32_tensor" the device judges the numbers of a and b as it does in a product:
    `scheme` has the method for them and the bound of an element's error. The first call for an element type and number
    of threads measures the machine's peak and bandwidth, which takes one or two seconds. The limit is that of the
    roofline model (Williams, Waterman, Patterson, 2009).

    Raises the errors of `matmul`, and ShapeError for a product without a multiplication.
    """
    if opaque.waiting and opaque.settle():
        return explain(a, b, **keywords)
    options = record("explain", {**keywords})
    if options.epilogue is not None:
        from gemmery.api import finished

        fused = finished.explained(a, b, options)
        plain: Any = {name: value for name, value in keywords.items() if name not in ("epilogue", "operands")}
        return replace(explain(a, b[0] if isinstance(b, tuple) else b, **plain), fused=fused)
    check_operands(options.operands)
    if type(b) in array_libraries.QUANTIZED:
        from gemmery.api.quantized_products import treatment

        v = view(a)
        whole = explain(a, b.dequantize(dtypes.get(v.dtype).numpy), **keywords)
        return replace(whole, copies=(*whole.copies, treatment(v, b)))
    x, y = view(a), b.memory if isinstance(b, Packed) else view(b)
    if x.device != "cpu" or y.device != "cpu":
        return _on_device(x, y, options)
    _shape(x, y)
    call = checked_call("matmul", x, y, None, options)
    types, ring = types_of(call), call.options.semiring
    mixed = types.a != types.b
    if isinstance(b, Packed):
        b.check(types.b if mixed else call.common, call.result, ring or "")
        y = y._replace(dtype=types.b)
    copies = () if mixed else _copies(x, y, types.a)
    if call.result == "bool":
        counts = dtypes.get(types.c).numpy
        copies = (*copies, f"the {counts} counts of true pairs are compared with 0: the result is bool")
    if ring == "log_sum_exp":  # it is the logarithm of a product of float64
        copies = (
            *copies,
            "the exponentials of a and b, as float64: their product is log_sum_exp but for its logarithm",
        )
        types, call = KernelTypes("f64", "f64", "f64"), call._replace(options=call.options._replace(semiring=None))
    x, y = arrays.once_converted(x, types.a), arrays.once_converted(y, types.b)
    c = View(0, call.c.shape, arrays.contiguous(call.c.shape, dtypes.get(types.c).size), types.c)
    prepared = prepared_for(call, types, x, y, c)
    assert prepared is not None  # a contiguous C has adjacent elements
    from gemmery.limits import attainable

    plan, problem, form = prepared
    count = call.options.threads or cpu_threads.get()
    peak, bandwidth, load = _limits(problem.dtype, min(count, cores()))
    limit = attainable(problem, peak, bandwidth, cache=host().l2)
    square = form.m == form.n and form.a == (form.b[0], form.b[2], form.b[1]) and worth_half(form.n, form.k)
    own = x.pointer == y.pointer and x.dtype == view(a).dtype == view(b).dtype and options.bias is None
    halved = square and own and plan.rung.name != "batched"
    return _explanation(
        plan, problem, (peak, bandwidth, limit), runs=form.runs, copies=copies, threads=count, kernel=_which(problem),
        load=load, halved=halved, call=_call_seconds(),
    )  # fmt: skip


def _which(problem: Problem) -> str:
    """Return which kernel runs a product on the CPU: the one for every shape, or one compiled for its shape."""
    special = cpu.specialized(problem)
    if special is None:
        return "for every shape"
    if not config.tiers():
        return "compiled for this shape"
    faster = special.rung.name
    return f"for every shape; if this shape comes often, {faster} is compiled for it ({special.reason})"


_IN_PARTS = {  # the products on tensor cores, by type and number, that a rung makes for one of this precision
    "f32_tensor": ("f16", 3),
    "f32_strict": ("bf16", 6),
    "f32_plus": ("bf16", 6),
    "f64_normwise": ("int8", 15),  # moduli
}


def _on_device(x: View, y: View, options: Options) -> Explanation:
    """Explain a product on a CUDA device."""
    from gemmery.api import on_device
    from gemmery.cuda.driver import find
    from gemmery.ladder import int8_pieces
    from gemmery.limits import attainable

    _shape(x, y)
    prepared = on_device.planned(x, y, options)
    plan, problem, form, run = prepared
    dtype, products = problem.precision or problem.dtype, 1
    if plan.rung.name.startswith(("split_", "ozaki_")):
        dtype, products = _IN_PARTS[problem.precision]
    elif plan.rung in int8_pieces.INTEGERS:
        dtype, products = "int8", int8_pieces.digit_products(problem.dtype, problem.out)
    warpgroups = products > 1 or plan.rung.name.startswith("wgmma_")
    tensor = warpgroups or plan.rung.name.startswith(("mma_", "wmma_"))
    peak, bandwidth = _device_limits(dtype, tensor, warpgroups, problem.device)
    peak /= products
    limit = attainable(problem, peak, bandwidth, cache=find(problem.device).l2)
    copies = () if problem.b_dtype else _copies(x, y, problem.dtype)
    scheme = None if copies else _scheme(x, y, prepared)
    halved = getattr(run, "halves", False) and x.pointer == y.pointer
    return _explanation(
        plan, problem, (peak, bandwidth, limit), runs=form.runs, copies=copies, threads=0, kernel=_tiles(plan, problem),
        scheme=scheme, halved=halved,
    )  # fmt: skip


def _scheme(x: View, y: View, prepared: "PreparedLaunch") -> "Float32Scheme | None":
    """Return how float32 operands on a device are multiplied in parts; None where the precision asks for no parts.

    The pre-pass of the product runs on the operands, and its verdict comes back: this waits for the device.
    """
    from gemmery.cuda.constants import NOT_FINITE as HAS_NOT_FINITE
    from gemmery.ladder.float32_parts import ENOUGH, FORMULAS, INEXACT, NOT_FINITE, Float32Scheme

    plan, problem, form, _ = prepared
    if not problem.precision.startswith("f32_"):
        return None
    name, verdict = plan.rung.name.partition("split_")[2] or "float32", ""
    if name == "fp16x3":
        statuses = [
            _judged(x.pointer + first, y.pointer + second, x.stream, prepared) for first, second, _ in form.offsets()
        ]
        if all(status == 0 for status in statuses):
            verdict = ENOUGH
        elif any(status & HAS_NOT_FINITE for status in statuses):
            name, verdict = "float32", NOT_FINITE
        else:
            name, verdict = "bf16x6", INEXACT
    bound, formula = FORMULAS[name]
    return Float32Scheme(name, verdict, formula, bound(problem.k))


def _judged(a: int, b: int, stream: int, prepared: "PreparedLaunch") -> int:
    """Return what the pre-pass says of these operands: constants.INEXACT and NOT_FINITE, or 0."""
    from gemmery.api.prepared import alone, operand_views
    from gemmery.cuda import driver, ordered
    from gemmery.ladder import float32_pre_pass

    _, problem, form, run = prepared
    ordinal = driver.find(problem.device).ordinal
    scratch = ordered.Scratch(run.workspace, stream, ordinal)
    judge = alone(float32_pre_pass.judging(problem.by_rows()), problem, *operand_views(form, problem, None)[:3])
    judge(a, b, 0, stream, 0, scratch.pointer)
    driver.synchronize(ordinal)
    return int.from_bytes(ordered.fetch(scratch.pointer, 4, ordinal), "little")


def _tiles(plan: "Plan", problem: Problem) -> str:
    """Return what a kernel's tiles have of A where that is not the rows that follow each other.

    >>> from gemmery.dispatch import Plan
    >>> from gemmery.ladder.cuda import CUDA
    >>> from gemmery.ladder.rung import find
    >>> rung, problem = find(CUDA, "wgmma_epilogue"), Problem(3000, 3000, 3000, "f16", "f16", device="h200")
    >>> _tiles(Plan(rung, rung.default, None, ""), problem)
    'a tile has every 8th row of A, as rows begin anywhere in a line of L2'
    """
    geometry = plan.rung.geometry
    if geometry is None:
        return ""
    launch = geometry(problem.by_rows(), plan.config)
    if launch.swapped:
        sides = "columns" if problem.c_layout == "col" else "rows"
        return (
            f"a tile has {launch.tile[0]} {sides}: they are columns of wgmma, which come in multiples of 8, not of 64"
        )
    return (
        f"a tile has every {launch.apart}th row of A, as rows begin anywhere in a line of L2"
        if launch.apart > 1
        else ""
    )


def _explanation(plan: "Plan", problem: Problem, limits: tuple[float, float, "Bound"], **facts: Any) -> Explanation:
    peak, bandwidth, limit = limits
    size = facts["runs"] * problem.batch * dtypes.get(dtypes.get(problem.out).accumulator).size
    name = problem.epilogue
    return Explanation(
        fused=saved(name, usual(name), problem.m, problem.n, size, fused=True) if name else "",
        rung=plan.rung.name, idea=plan.rung.idea, config=dict(plan.config), reason=plan.reason, problem=problem,
        peak_gflops=peak, bandwidth_gbs=bandwidth, attainable_gflops=limit.gflops, bound=limit.by, **facts,
    )  # fmt: skip


def _shape(x: View, y: View) -> None:
    """Raise ShapeError for a product without a multiplication."""
    shape = result_shape(x.shape, y.shape)
    if 0 in shape or x.shape[-1] == 0:
        raise ShapeError(f"shapes {x.shape} and {y.shape}: there is nothing to multiply and to explain")


def _copies(x: View, y: View, source: str) -> tuple[str, ...]:
    return tuple(
        f"{name} is converted from {dtypes.get(z.dtype).numpy} to {dtypes.get(source).numpy}"
        for name, z in (("a", x), ("b", y))
        if z.dtype != source
    )


@cache
def _limits(dtype: str, threads: int) -> tuple[float, float, float]:
    """Return peak GFLOP/s, read bandwidth in GB/s, and the load meanwhile, measured once per process."""
    from gemmery import limits, load

    meter = load.Meter()
    return limits.peak(dtype, threads), limits.bandwidth(threads).read, meter.load()


@cache
def _call_seconds() -> float:
    """Return the least time of a call, in seconds: that of the product of two numbers."""
    a = np.ones((1, 1), np.float32)
    return min(timeit.repeat(lambda: products.multiply(a, a), repeat=20, number=50)) / 50


@cache
def _device_limits(dtype: str, tensor: bool, warpgroups: bool, device: str) -> tuple[float, float]:
    """Return peak GFLOP/s, of tensor cores or of CUDA cores, and read bandwidth in GB/s of a device."""
    from gemmery.cuda.driver import Stream, find
    from gemmery.limits import device_limits

    card = find(device)
    stream = Stream(card.ordinal)
    unit = device_limits.unit(dtype, tensor, card.capability, warpgroups)
    return device_limits.peak(*unit, stream), device_limits.bandwidth(stream).read
