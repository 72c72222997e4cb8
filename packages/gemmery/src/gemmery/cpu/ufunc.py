"""Loops for NumPy's ufuncs of products, in NumPy's signature, that run gemmery's kernels without Python.

A loop gets pointers, lengths and strides. It describes the product, finds the first kernel of its element type that
takes it, cuts it for threads, and runs it. What no kernel takes goes to the loop that NumPy had before. Kernels of a
type and a layout of B are asked for when the first product wants them: the loop queues a call of Python
(`Py_AddPendingCall`, which needs no GIL) and leaves its product to NumPy's loop, as those that follow until the kernels
are there.

NumPy calls loops without the GIL, from many threads. So what they read is written once, before its address is published
by a release store, and stays for the life of the process.

Source: NumPy's `PyUFuncGenericFunction` (numpy/ufuncobject.h), and the signatures of its gufuncs.
"""

from __future__ import annotations

from gemmery.cpu import atomics, jit
from gemmery.cpu import entry_layout as layout
from gemmery.cpu.abi import Args, pointers, words
from gemmery.cpu.entry_family import SHAPE, layout_of_b, takes
from gemmery.cpu.entry_layout import MEMBER, at, size
from gemmery.cpu.entry_run import copy_words, run_here
from gemmery.cpu.ir import Function, Module, Value, Var
from gemmery.cpu.layout import JOB, JOB_AT
from gemmery.cpu.panels import CHAIN
from gemmery.cpu.split import FINEST, PART, SPARE
from gemmery.cpu.target import FAN, Target

# The lengths after the outer one, and the strides after those of the outer loop, of each ufunc in NumPy's order.
UFUNCS = {
    "matmul": (("m", "k", "n"), ("a_row", "a_col", "b_row", "b_col", "c_row", "c_col")),
    "vecdot": (("k",), ("a_col", "b_row")),
    "matvec": (("m", "k"), ("a_row", "a_col", "b_row", "c_row")),
    "vecmat": (("k", "n"), ("a_col", "b_row", "b_col", "c_col")),
}
TYPES = "?bBhHiIlLqQefdFD"  # NumPy's letters

ROOT = (
    *words("threads"),
    ("per_worth", "double"),
    ("wakes", "double"),  # 1 / ns of work that are worth a thread; ns that wake sleepers
    *words("counting"),  # 1: loops count and time what they run
    *pointers("pool", "run"),
    *pointers("pending", "ask"),  # Python's Py_AddPendingCall, and what it calls to have kernels made
)
LAYOUTS = layout.LAYOUTS  # of B
SAMPLES = 4  # the last products of a class
BOUNDS = (32**3, 256**3)  # multiply-adds up to which a product of matrices is small, and medium
CLASSES = ("matrix and vector", "small", "medium", "large")
_SAMPLE = words("batch", "m", "n", "k")
CLASS = (
    *words("products", "work", "ns"),  # `work` in multiply-adds
    *words("left_products", "left_work", "left_ns"),  # the same of what was left to NumPy's loops
    *words(*(f"{name}_{i}" for i in range(SAMPLES) for name, _ in _SAMPLE)),
)
TYPE = (
    *pointers(*(f"old_{name}" for name in UFUNCS)),  # NumPy's loops
    *words("size", "least"),  # bytes of an element; multiply-adds of one product below which NumPy's loop is as fast
    *pointers(*(f"kernels_{name}" for name in LAYOUTS)),  # a block of kernels, NULL before it is made
    *words(*(f"asked_{name}" for name in LAYOUTS)),
    *words(*(f"{name}_{i}" for i in range(len(CLASSES)) for name, _ in CLASS)),
)
# A block: the number of its kernels, then these. The unit of `split` says how a product may be cut for threads.
KERNEL = (
    *MEMBER,
    *words("rows", "columns", "wide"),
    *((name, "double") for name in ("step", "pack", "each", "read")),
    *words("sums"),  # bytes of an element of the sums that a row of C needs beyond kc of k, 0: none
)
ROOT_BYTES = size(ROOT) + len(TYPES) * size(TYPE)
_WIDEST = 256  # columns by which a block of C may exceed those of the product
_STEPS = tuple(name for name, _ in SHAPE if name.startswith(("a_", "b_", "c_")))


def place(letter: str, name: str) -> int:
    """Return the offset of a field of a type's record, by NumPy's letter of the type."""
    return size(ROOT) + TYPES.index(letter) * size(TYPE) + at(TYPE, name)


def asking(offset: int) -> tuple[str, str]:
    """Return the letter and the layout of B of the word `asked` at an offset."""
    index, rest = divmod(offset - size(ROOT), size(TYPE))
    return TYPES[index], LAYOUTS[(rest - at(TYPE, f"asked_{LAYOUTS[0]}")) // 8]


def module(target: Target) -> Module:
    """Return the module of `NAME_I(args, lengths, strides, data)` for each ufunc and each type, and of `publish`."""
    module = Module(target)
    for define in (_publish, _ask, _cost, _cut, _multiply, _count):
        define(module)
    params = ("args", "lengths", "strides", "data")
    for name in UFUNCS:
        _define_loop(module, name, params)
        for index in range(len(TYPES)):
            with module.function(f"{name}_{index}", *params) as f:
                root = f.emit("ptr", f"inttoptr i64 {jit.HOLE} to ptr")
                f.call(f"loop_{name}", root, f.index(index), *f.parameters)
    return module


def _publish(module: Module) -> None:
    """Define `publish(at, word)`: a store after everything that this thread wrote before."""
    with module.function("publish", "at", ("i64", "word")) as f:
        atomics.store(f, f["word"], f["at"])


def _define_loop(module: Module, name: str, params: tuple[str, ...]) -> None:
    """Define the loop of a ufunc for any type, by the number of the type."""
    lengths, strides = UFUNCS[name]
    with module.function(f"loop_{name}", "root", ("i64", "index"), *params, local=True) as f:
        type_at = f["root"] + size(ROOT) + f["index"] * size(TYPE)
        record, shape_at = Args(f, type_at, TYPE), f.buffer(size(SHAPE))
        shape = Args(f, shape_at, SHAPE)
        for i, length in enumerate(("batch", *lengths)):
            setattr(shape, length, f.load("i64", f["lengths"] + 8 * i, align=8))
        for length in sorted({"m", "n"} - set(lengths)):
            setattr(shape, length, 1)
        for i, stride in enumerate(("a_batch", "b_batch", "c_batch", *strides)):
            setattr(shape, stride, f.load("i64", f["strides"] + 8 * i, align=8))
        for stride in sorted(set(_STEPS) - {"a_batch", "b_batch", "c_batch", *strides}):
            setattr(shape, stride, record.size)
        a, b, c = (f.load("ptr", f["args"] + 8 * i, align=8) for i in range(3))
        root, start = Args(f, f["root"], ROOT), f.var(f.index(0))
        counting = root.counting.differs(0)
        with f.if_(counting):
            start.value = atomics.now(f, root.pool)
        done = atomics.call(f, "i64", "multiply", f["root"], type_at, shape_at, a, b, c)
        with f.if_(done.equals(0)):
            f.call_address(getattr(record, f"old_{name}"), *f.parameters[2:])
        with f.if_(counting):
            f.call("count", type_at, shape_at, done, atomics.now(f, root.pool) - start.value)


def _multiply(module: Module) -> None:
    """Define `multiply(root, type, shape, a, b, c)`: runs a product, or returns 0. It may change the shape."""
    with module.function("multiply", "root", "type", "shape", "a", "b", "c", local=True, returns="i64") as f:
        shape, record, done = Args(f, f["shape"], SHAPE), Args(f, f["type"], TYPE), f.var(f.index(0))
        positive = (shape.batch > 0) & (shape.m > 0) & (shape.n > 0) & (shape.k > 0)
        # As floats, which do not overflow: an operand of stride zero may have any length.
        each = f.convert("sitofp", shape.m, "double")
        for length in (shape.n, shape.k):
            each = each * f.convert("sitofp", length, "double")
        with f.if_(positive & (each >= f.convert("sitofp", record.least, "double"))):
            _fold(f, shape)
            a, b = f.var(f["a"]), f.var(f["b"])
            with f.if_(_stands(f, shape, record.size, a, b)):
                block = _block(f, shape, record)
                with f.if_(f.is_null(block) ^ True):
                    kernel = _kernel(f, block, shape)
                    with f.if_(f.is_null(kernel) ^ True):
                        _run(f, kernel, shape, (a.value, b.value, f["c"]), done)
        f.ret(done.value)


def _fold(f: Function, shape: Args) -> None:
    """Take a batch that shares B as more rows, and one that shares A as more columns."""
    for shared, length, step, c_step in (("b", "m", "a_row", "c_row"), ("a", "n", "b_col", "c_col")):
        count, single = getattr(shape, length), getattr(shape, length).equals(1)
        batch_step = shape.a_batch if shared == "b" else shape.b_batch
        walks = batch_step.equals(getattr(shape, step) * count) & shape.c_batch.equals(getattr(shape, c_step) * count)
        folds = (shape.batch > 1) & getattr(shape, f"{shared}_batch").equals(0) & (single | walks)
        with f.if_(folds):
            for name, new in ((step, batch_step), (c_step, shape.c_batch)):
                setattr(shape, name, f.select(single, new, getattr(shape, name)))
            setattr(shape, length, count * shape.batch)
            shape.batch = 1


_EXCHANGED = (("m", "n"), ("a_batch", "b_batch"), ("a_row", "b_col"), ("a_col", "b_row"), ("c_row", "c_col"))


def _stands(f: Function, shape: Args, element: Value, a: Var, b: Var) -> Value:
    """Make C row-major, as C' = B' A' if it is column-major; return whether it is, and its elements lie apart."""
    by_rows = shape.n.equals(1) | shape.c_col.equals(element)
    by_columns = shape.m.equals(1) | shape.c_row.equals(element)
    with f.if_((by_rows ^ True) & by_columns):
        for name, other in _EXCHANGED:
            x, y = getattr(shape, name), getattr(shape, other)
            setattr(shape, name, y)
            setattr(shape, other, x)
        x, y = a.value, b.value
        a.value, b.value = y, x
    row = shape.n * element
    with f.if_(shape.m.equals(1)):
        shape.c_row = row
    with f.if_(shape.n.equals(1)):
        shape.c_col = element
    c_row, c_batch = (f.max(stride, f.index(0) - stride) for stride in (shape.c_row, shape.c_batch))
    apart = shape.batch.equals(1) | (c_batch >= (shape.m - 1) * c_row + row)
    return (by_rows | by_columns) & (c_row >= row) & apart


def _block(f: Function, shape: Args, record: Args) -> Value:
    """Return the kernels for the layout of B; where there are none, ask for them."""
    which = layout_of_b(f, shape, record, "size") * 8
    block = f.emit("ptr", f"load atomic ptr, {f['type'] + at(TYPE, f'kernels_{LAYOUTS[0]}') + which} acquire, align 8")
    with f.if_(f.is_null(block)):
        f.call("ask", f["root"], f["type"] + at(TYPE, f"asked_{LAYOUTS[0]}") + which)
    return block


def _ask(module: Module) -> None:
    """Define `ask(root, asked)`: queues a call of Python with the address of the word that remembers it, once."""
    with module.function("ask", "root", "asked", local=True) as f:
        root, word = Args(f, f["root"], ROOT), f["asked"]
        with f.if_(atomics.load(f, word).equals(0)), f.if_(atomics.exchange(f, word, f.index(1)).equals(0)):
            full = f.result_of(root.pending, "i32", root.ask, word)
            with f.if_(full.differs(0)):  # the next product asks again
                atomics.store(f, f.index(0), word)


def _kernel(f: Function, block: Value, shape: Args) -> Value:
    """Return the first kernel of a block that takes a product, or NULL."""
    answer = f.var(f.null)
    with f.loop(0, f.load("i64", block, align=8)) as i, f.if_(f.is_null(answer.value)):
        place = block + 8 + i * size(KERNEL)
        with f.if_(takes(f, Args(f, place, MEMBER), shape)):
            answer.value = place
    return answer.value


def _run(f: Function, kernel: Value, shape: Args, operands: tuple[Value, Value, Value], done: Var) -> None:
    """Make the job of a product and run it; `done` stays 0 where there is no memory for it.

    What the arithmetic leaves in the flags of floating-point exceptions is no exception of the product: panels are
    padded, and other threads have flags of their own.
    """
    job_at = f.buffer(-(-size(JOB) // 64) * 64)
    copy_words(f, kernel + at(MEMBER, f"job_{JOB[0][0]}"), job_at, len(JOB))
    job = Args(f, job_at, JOB)
    for name, _ in SHAPE:
        setattr(job, name, getattr(shape, name))
    job.a, job.b, job.c = operands
    f.call("cut", f["root"], kernel, job_at)
    error, flags = f.var(f.index(0)), atomics.exceptions(f)
    with f.if_(job.parts.equals(1) & job.workspace_bytes.equals(0)):
        job.alpha, job.beta = job_at + JOB_AT["alpha_value"], job_at + JOB_AT["beta_value"]
        run_here(f, job, job_at)
    with f.else_():
        error.value = f.result_of(Args(f, f["root"], ROOT).run, "i64", job_at)
    atomics.set_exceptions(f, flags)
    done.value = f.convert("zext", error.value.equals(0), "i64")


def _ceiling(x: Value, y: Value | int) -> Value:
    return (x + y - 1) // y


def _cost(module: Module) -> None:
    """Define `cost(kernel, m, n, k)`: the ns of a product on one thread, as `split.Unit.cost` has them."""
    with module.function("cost", "kernel", ("i64", "m"), ("i64", "n"), ("i64", "k"), local=True, returns="double") as f:
        unit, m, n, k = Args(f, f["kernel"], KERNEL), f["m"], f["n"], f["k"]
        tiles = f.var(f.index(1))
        for length, name in ((m, "rows"), (n, "columns")):
            with f.if_(getattr(unit, name) > 0):
                tiles.value = tiles.value * _ceiling(length, getattr(unit, name))
        wide, *sides = (
            f.convert("sitofp", x, "double") for x in (m * _ceiling(n, unit.wide) + n, tiles.value, m, n, k)
        )
        steps, rows, columns, deep = sides
        whole = deep * (steps * unit.step + unit.pack * wide)
        f.ret(f.select(unit.each > 0, rows * columns * deep * unit.each, whole))


def _cut(module: Module) -> None:
    """Define `cut(root, kernel, job)`: cuts a job for threads, nearly as `split.grid` does, and sets its workspace."""
    with module.function("cut", "root", "kernel", "job", local=True) as f:
        root, unit, job = Args(f, f["root"], ROOT), Args(f, f["kernel"], KERNEL), Args(f, f["job"], JOB)
        m, n, k, batch, threads = job.m, job.n, job.k, job.batch, root.threads
        job.rows, job.columns, job.products = m, n, batch
        with f.if_((threads > 1) & (unit.wide > 0)):
            read = f.convert("sitofp", k * (m + n), "double") * unit.read
            cost = atomics.call(f, "double", "cost", f["kernel"], m, n, k)
            total = f.select(cost > read, cost, read) * f.convert("sitofp", batch, "double")
            most = total * root.per_worth
            limit = f.convert("sitofp", threads, "double")
            useful = f.convert("fptosi", f.select(most < limit, most, limit), "i64")
            with f.if_((useful > 1) & (batch >= useful * FINEST)):
                job.products = _ceiling(batch, useful * FINEST)
                job.parts = _ceiling(batch, job.products)
            with f.else_(), f.if_(useful > 1):
                _cut_sides(f, unit, job, useful)
            with f.if_(useful > 1):
                job.threads = f.min(useful, job.parts)
                job.wakes = f.convert("zext", total > root.wakes, "i64")
                job.half_rows, job.half_columns = n, _ceiling(_ceiling(n, 48), useful * 4) * 48
        with f.if_((unit.sums > 0) & (k > f.min(job.kc, CHAIN))):  # sums of blocks of k, and of runs of many blocks
            lines = job.rows + job.mc + f.select(k > job.kc * (FAN // 4), job.rows, f.index(0))
            job.workspace_bytes = job.workspace_bytes + lines * f.min(job.nc, job.columns + _WIDEST) * unit.sums


def _cut_sides(f: Function, unit: Args, job: Args, useful: Value) -> None:
    """Cut m and n so that the last thread is done as early as possible; more parts if that is nearly as early."""
    best, batch = f.var(f.const("double", 1e300)), job.batch
    with f.loop(0, FINEST) as coarser:
        count = _ceiling(useful * (FINEST - coarser), batch)
        with f.loop(1, count + 1) as row_parts:
            sides = []
            for length, step, parts in ((job.m, unit.rows, row_parts), (job.n, unit.columns, count // row_parts)):
                least = f.max(step, 1)
                side = _ceiling(_ceiling(length, least), parts) * least
                sides.append(f.select(step > 0, f.min(side, length), length))
            rows, columns = sides
            parts = _ceiling(job.m, rows) * _ceiling(job.n, columns) * batch
            each = atomics.call(f, "double", "cost", f["kernel"], rows, columns, job.k) + PART
            ends = each * f.convert("sitofp", _ceiling(parts, useful), "double")
            with f.if_(ends * SPARE < best.value):
                best.value = ends
                job.rows, job.columns, job.products, job.parts = rows, columns, 1, parts
                job.row_parts, job.column_parts = _ceiling(job.m, rows), _ceiling(job.n, columns)


def _count(module: Module) -> None:
    """Define `count(type, shape, done, ns)`: counts products of a shape that gemmery ran, or left to NumPy's loop."""
    with module.function("count", "type", "shape", ("i64", "done"), ("i64", "ns"), local=True) as f:
        shape, ours = Args(f, f["shape"], SHAPE), f["done"].differs(0)
        each = shape.m * shape.n * shape.k
        vector = shape.m.equals(1) | shape.n.equals(1)
        which = f.select(each > BOUNDS[1], f.index(3), f.select(each > BOUNDS[0], f.index(2), f.index(1)))
        place = f["type"] + at(TYPE, "products_0") + f.select(vector, f.index(0), which) * size(CLASS)
        first = place + f.select(ours, f.index(0), f.index(at(CLASS, "left_products")))
        before = atomics.fetch(f, "add", first, shape.batch)
        for offset, number in ((8, each * shape.batch), (16, f["ns"])):
            atomics.fetch(f, "add", first + offset, number)
        with f.if_(ours):
            sample = place + at(CLASS, "batch_0") + (before & SAMPLES - 1) * size(_SAMPLE)
            for i, (name, _) in enumerate(_SAMPLE):
                f.store(getattr(shape, name), sample + 8 * i, align=8)
