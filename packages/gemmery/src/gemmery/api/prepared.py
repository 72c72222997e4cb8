"""Launches of products on a device, prepared once for each combination of shapes and strides.

A kernel with one image for every shape runs at first; one made for the shape replaces it if the product comes back.
Kernels that copy by tensor maps are made for a type, a layout and a tile, not for a shape: where the one that a product
wants is loaded, new shapes use it too. The images of general kernels are those of an element type.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gemmery import arrays, dispatch, dtypes, tiers
from gemmery.api.device_call import DeviceCall, described, table
from gemmery.arrange import Arrangement, Ints, result_shape
from gemmery.arrays import View
from gemmery.cuda import driver, tensormaps
from gemmery.cuda.choose import may_share, may_split
from gemmery.cuda.choose.cost import quickest
from gemmery.cuda.choose.data import MMA_GENERAL, SIMT_GENERAL, Tiling
from gemmery.cuda.geometry import Geometry, GeometryOf, tiles, whole_pieces
from gemmery.cuda.halved import Halved, halved
from gemmery.cuda.launch import (
    CudaLaunch,
    FirstArguments,
    Ready,
    loaded,
    mapped_argument,
    packed_scalars,
    product_argument,
    scalars_of,
)
from gemmery.dispatch.cuda import TENSOR_COPIED, copies_tensors, general, grouped, parts_in_graphs
from gemmery.errors import LayoutError, RefusedError
from gemmery.keywords import FIELDS
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

OFTEN = 16  # products after which a kernel is made for a shape, which takes 0.2 s of another core
LARGE = 1 << 33  # operations from which the kernel for the shape runs at once: a general one loses up to 1 ms in each

# Of products whose kernels serve every shape: after so many launches are made for one, which takes 0.2 ms, and from so
# many operations at once if the kernel is loaded: 10 us for the general one, where the other takes 4.
SOON = 2
MEDIUM = 1 << 31

# Whether wgmma adds the products of an element as mma.sync does, which tests/gpu/test_gpu_tiers.py decides. If it did
# not, general kernels, which multiply by mma.sync, would serve no product that a kernel with wgmma takes: its bits
# would depend on when the other kernel is there.
ADDS_ALIKE = True


class PreparedLaunch(NamedTuple):
    """A product without its memory."""

    plan: dispatch.Plan
    problem: Problem
    form: Arrangement
    run: Ready | Halved


class TieredLaunch:
    """What runs a product: `run` is replaced by better launches, which are made in the background."""

    __slots__ = ("_better", "_is_queued", "_swapping", "_terms", "countdown", "form", "run")

    def __init__(
        self, form: Arrangement, run: Ready | Halved, better: Callable[..., Ready | Halved] | None = None,
        terms: tuple[Any, ...] = (), often: int = OFTEN,
    ) -> None:  # fmt: skip
        self.form = form
        self.run = run
        self.countdown = often if better is not None else 0  # products until better launches are made; 0: they run
        self._better, self._terms = better, terms
        self._is_queued = False
        self._swapping = threading.RLock()  # the garbage collector may run code that comes here again

    def next(self, stream: int = 0) -> Ready | Halved:
        """Return the launches of the next product on this stream."""
        if self.countdown:
            if stream and driver.captures(stream):
                self._swap()  # a graph keeps its launches, however often it runs; waits for those in the making
            elif self.countdown > 1:
                self.countdown -= 1
            elif not self._is_queued:
                self._is_queued = True
                tiers.aside(("cuda", *self._terms), self._swap)
        return self.run

    def _swap(self) -> None:
        with self._swapping:
            better, self._better = self._better, None
            try:
                if better is not None:
                    self.run = better(*self._terms)
            finally:
                self.countdown = 0


class OutsideGraphs(TieredLaunch):
    """Launches that others replace in a CUDA graph, where the host's time for more of them does not count."""

    __slots__ = ("_in_graphs",)

    def __init__(self, form: Arrangement, run: Ready | Halved, in_graphs: Callable[[], Ready | Halved]) -> None:
        super().__init__(form, run)
        self.countdown = 1  # `next` is asked for each product
        self._in_graphs = in_graphs

    def next(self, stream: int = 0) -> Ready | Halved:
        """Return the launches of the next product on this stream."""
        return self._in_graphs() if stream and driver.captures(stream) else self.run


@table.once
def specialized(call: DeviceCall) -> PreparedLaunch:
    """Return the kernel made for this call, the form and the launches."""
    form, problem = described(call)
    try:
        return _ready(dispatch.plan(problem), form, problem, call)
    except LayoutError:  # no tensor map has such strides, although they are aligned: take what needs none, or packs
        sizes = [dtypes.get(name or problem.dtype).size for name in (problem.dtype, problem.b_dtype, problem.out)]
        problem = problem._replace(alignments=(sizes[0], sizes[1], sizes[2]))
        return _ready(dispatch.plan(problem), form, problem, call)


@table.once
def prepare(call: DeviceCall) -> TieredLaunch:
    """Return what runs a product."""
    form, problem = described(call)
    work = problem.flops * form.runs
    at_once = not tiers.enabled() or work >= LARGE or _at_once(form, problem)
    run = None if at_once else _general(form, problem, call)
    if run is None and parts_in_graphs(problem):
        # With batch_invariant parts are chosen whatever their time.
        options = (True if field == "invariant" else value for field, value in zip(FIELDS, call.options, strict=True))
        in_parts = call._replace(options=tuple(options))
        return OutsideGraphs(form, specialized(call).run, lambda: specialized(in_parts).run)
    if run is None:
        return TieredLaunch(form, specialized(call).run)
    soon = often(problem.dtype, problem.device, work)
    return TieredLaunch(form, run, lambda call: specialized(call).run, (call,), soon)


@table.once
def prepare_groups(call: DeviceCall) -> TieredLaunch | str:
    """Return the launch of a grouped product, or why no kernel reads its offsets."""
    form, problem = described(call)
    try:
        rung, config, _ = grouped(problem)
    except RefusedError as refused:
        return str(refused)
    kernel = rung.build(problem, config)
    assert isinstance(kernel, CudaLaunch)
    return TieredLaunch(_ALONE, kernel.ready(*operand_views(form, problem, call.bias), call.scaling))


def _at_once(form: Arrangement, problem: Problem) -> bool:
    """Return True if a product runs by a kernel for many shapes from the first time on.

    That is if the kernel is loaded, or gives other bits than a general one: they must not depend on when it is there.
    """
    alike = problem.activation not in ("gelu", "silu") and not (problem.scaled and problem.has_bias)
    shape = problem.m, problem.n, problem.k, problem.batch * form.runs
    if alike and leaves_to_general(problem.dtype, problem.device, *shape):
        return False
    candidate = dispatch.choice(problem)
    assert candidate.rung.geometry is not None
    launches = candidate.rung.geometry(problem.by_rows(), candidate.config).launches
    if not launches[-1].maps:  # CUDA cores add products of halves, and parts of k in a cluster, in another order
        return (problem.dtype in TENSOR_COPIED or launches[-1].cluster > 1) and "tm" in candidate.config
    if not (alike and ADDS_ALIKE) or candidate.config.get("splits", 1) > 1:
        return True
    return all(driver.is_loaded(each.source, each.kernel, problem.device) for each in launches)


def leaves_to_general(dtype: str, device: str, m: int, n: int, k: int, batch: int = 1) -> bool:
    """Return True for plain products that a general kernel runs at first, whatever other kernels are loaded."""
    work = 2 * m * n * k * batch
    if dtype not in TENSOR_COPIED or not copies_tensors(device):
        return work < LARGE and not (
            dtype == "f32" and copies_tensors(device) and may_share(m, n, k, batch, driver.find(device))
        )
    return ADDS_ALIKE and work < MEDIUM and not may_split(m, n, k, batch, driver.find(device))


def often(dtype: str, device: str, work: int) -> int:
    """Return the number of products of a shape, each of so many operations, after which better launches are made.

    A kernel that many shapes want is made at the first product that it would have run at once.
    """
    if dtype not in TENSOR_COPIED or not copies_tensors(device):
        return OFTEN
    return 1 if work >= MEDIUM else SOON


def _general(form: Arrangement, problem: Problem, call: DeviceCall) -> Ready | Halved | None:
    """Return the launch of a general kernel, if there is one for this product."""
    candidate = general(problem)
    if candidate is None:
        return None
    rung, _, reason = candidate
    if problem.dtype == problem.out and problem.epilogue in ("", "bias"):
        ordinal = int(problem.device.partition(":")[2])
        assert rung.geometry is not None
        return images(problem.dtype, ordinal, rung.geometry).launch(problem, *operand_views(form, problem, call.bias))
    config = {"tile": min(side for side in rung.space["tile"] if side)}  # the others may not be compiled
    plan = dispatch.Plan(rung, config, rung.build(problem, config), reason)
    return _ready(plan, form, problem, call).run


def operand_views(form: Arrangement, problem: Problem, bias: Ints | None) -> tuple[View, View, View, View | None]:
    """Return A, B, C and the bias as a kernel takes them, without addresses; `bias` are its strides."""
    shape = (form.batch, form.n) if problem.groups else (form.n,)
    z = None if bias is None else View(0, shape, bias, dtypes.get(problem.out).accumulator)
    return *arrays.operands(form, problem), z


def alone(launches: Sequence[Geometry], problem: Problem, a: View, b: View, c: View) -> Ready:
    """Return launches of a product's pre-pass, which read A and B by address and multiply nothing."""
    ordinal = int(problem.device.partition(":")[2])
    argument = mapped_argument(product_argument(problem, a, b, c), problem, (), tensormaps.encoded)
    overlaps = tuple(each.overlaps for each in launches)
    kernels = [loaded(each, ordinal) for each in launches]
    return Ready(kernels, argument, ordinal, 0, problem.c_layout == "col", overlaps)


def _ready(plan: dispatch.Plan, form: Arrangement, problem: Problem, call: DeviceCall) -> PreparedLaunch:
    assert isinstance(plan.kernel, CudaLaunch)
    run = plan.kernel.ready(*operand_views(form, problem, call.bias), call.scaling)
    rung, config = plan.rung, plan.config
    run_or_half = halved(run, lambda part: rung.build(part, config), rung.one_sided, form, problem)
    return PreparedLaunch(plan, problem, form, run_or_half)


# The short path for products of new shapes: two matrices or vectors on a device, into a new array. Once the general
# kernel of an element type is there, nothing else is needed: a launch is its argument.
_DIMENSIONS = {
    "matmul": {(1, 1), (1, 2), (2, 1), (2, 2)},
    "gemm": {(2, 2)},
    "plain gemm": {(2, 2)},
    "gemv": {(2, 1)},
    "plain gemv": {(2, 1)},
}  # of the operands of each function that are prepared here
_LARGEST = 1_000_000_000  # longest side prepared here
_ALONE = Arrangement(0, 0, 0, 1, (0, 0, 0), (0, 0, 0), (0, 0, 0))  # no loop around the product


def prepare_new(
    present: Images, name: str, a: Ints, a_step: Ints, b: Ints, b_step: Ints, p: int, q: int, scaled: bool
) -> tuple[TieredLaunch, Ints, Ints] | None:
    """Return the launch of the function `name` for operands of these shapes and strides in elements, and the shape
    and strides of the result; None for other products. `p` and `q` are the addresses of the operands.
    """
    if (len(a), len(b)) not in _DIMENSIONS[name]:
        return None
    m, k, a_row, a_col = (*a, *a_step) if len(a) == 2 else (1, *a, 0, *a_step)
    depth, n, b_row, b_col = (*b, *b_step) if len(b) == 2 else (*b, 1, *b_step, 0)
    if k != depth or not m or not n or not k or max(m, n, k) > _LARGEST:
        return None
    device = f"cuda:{present.ordinal}"
    if not leaves_to_general(present.dtype, device, m, n, k):
        return None
    run = present.ready(m, n, k, (a_row, a_col), (b_row, b_col), (n, 1), p | q)
    terms = present.dtype, present.ordinal, a, a_step, b, b_step, p & 15, q & 15, scaled
    shape = (*a[:-1], *b[1:])
    soon = often(present.dtype, device, 2 * m * n * k)
    return TieredLaunch(_ALONE, run, _better, terms, soon), shape, (n, 1) if len(shape) == 2 else (1,) * len(shape)


def _better(
    dtype: str, ordinal: int, a: Ints, a_step: Ints, b: Ints, b_step: Ints, p: int, q: int, scaled: bool
) -> Ready | Halved:
    """Return the launches made for such a product."""
    size, device = dtypes.get(dtype).size, f"cuda:{ordinal}"
    shape = result_shape(tuple(a), tuple(b))
    c = View(0, shape, arrays.contiguous(shape, size), dtype, device)
    x, y = (
        c._replace(pointer=pointer, shape=tuple(shape), strides=tuple(size * stride for stride in strides))
        for shape, strides, pointer in ((a, a_step, p), (b, b_step, q))
    )
    return specialized(DeviceCall(x, y, c, scaled=scaled)).run


class Images:
    """The images that serve one element type on one device, for results of that type and no activation.

    The one with the smallest tile serves every product; the others are made in the background. `geometry` is that of
    the general rung of the type.
    """

    def __init__(self, dtype: str, ordinal: int, geometry: GeometryOf) -> None:
        size = dtypes.get(dtype).size
        self.dtype = dtype
        self.ordinal = ordinal
        self._halves = size == 2
        self._geometry = geometry
        self._sms = driver.device(ordinal).sms
        self._probe = Problem(8, 8, 8, dtype, dtype, device=f"cuda:{ordinal}")
        self._fixed = struct.Struct(f"=5Q11q4i{scalars_of(dtype).format[1:]}")
        self._one = packed_scalars(1, 0, dtype)
        first, *others = MMA_GENERAL if self._halves else SIMT_GENERAL
        self._smallest = first.bm
        self._others = () if size > 4 else tuple(others)
        self._present = {first.bm: self._image(first)}
        self._tiles: tuple[Tiling, ...] = (first,)  # of present images

    def _image(self, tile: Tiling) -> FirstArguments:
        return loaded(self._geometry(self._probe, {"tile": tile.bm}), self.ordinal)

    def make_others(self) -> None:
        """Make the images with larger tiles in the background."""
        for tile in self._others:
            tiers.aside(("image", self.dtype, self.ordinal, tile.bm), partial(self._add, tile))

    def _add(self, tile: Tiling) -> None:
        self._present[tile.bm] = self._image(tile)
        self._tiles = (*self._tiles, tile)

    def ready(
        self, m: int, n: int, k: int, a: tuple[int, int], b: tuple[int, int], c: tuple[int, int], addresses: int
    ) -> Ready:
        """Return the launch of C = A B, by the strides of rows and columns in elements.

        `addresses` are those of A and B, combined by OR, as far as they decide on alignment.
        """
        side = self._smallest
        if m > side and n > side and len(self._tiles) > 1 and (not self._halves or _whole(m, n, k, a, b, addresses)):
            side = quickest(self._tiles, m, n, 1, self._sms).bm
        image = self._present[side]
        argument = self._fixed.pack(0, 0, 0, 0, 0, 0, *a, 0, *b, 0, *c, 0, 0, m, n, k, 1, *self._one)
        launch = image[0], -(-m // side) * -(-n // side), 1, 1, *image[4:]
        return Ready([launch], argument, self.ordinal, 0, False, out=self.dtype)

    def launch(self, problem: Problem, a: View, b: View, c: View, bias: View | None) -> Ready:
        """Return the launch of any product of this element type."""
        p = problem.by_rows()
        side = self._smallest
        if p.m > side and p.n > side and len(self._tiles) > 1 and (not self._halves or whole_pieces(p)):
            side = quickest(self._tiles, p.m, p.n, p.batch, self._sms).bm
        image = self._present[side]
        argument = product_argument(problem, a, b, c, bias)
        launch = image[0], *tiles(p, side, side), *image[4:]
        return Ready([launch], argument, self.ordinal, 0, problem.c_layout == "col", out=self.dtype)


def _whole(m: int, n: int, k: int, a: tuple[int, int], b: tuple[int, int], addresses: int) -> bool:
    """As `whole_pieces`, for two-byte elements by their strides."""
    a_row, a_col = a
    b_row, b_col = b
    elements = a_row | k if a_col == 1 else a_col | m if a_row == 1 else 1
    elements |= b_row | n if b_col == 1 else b_col | k if b_row == 1 else 1
    return k > 1 and (addresses | elements * 2) % 16 == 0


_images: dict[tuple[str, int], Images] = {}


def images(dtype: str, ordinal: int, geometry: GeometryOf) -> Images:
    """Return the images of an element type, made at the first call. Raises the errors of `driver.function`."""
    key = dtype, ordinal
    present = _images.get(key)
    if present is None:
        present = _images.setdefault(key, Images(dtype, ordinal, geometry))
        present.make_others()
    return present


def present(dtype: str, ordinal: int) -> Images | None:
    """Return the images of an element type if they are made."""
    return _images.get((dtype, ordinal))
