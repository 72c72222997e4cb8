"""What the compiled entry does with a call whose product is prepared."""

from __future__ import annotations

from gemmery.cpu import entry_layout as layout
from gemmery.cpu import objects
from gemmery.cpu.abi import Args
from gemmery.cpu.atomics import call
from gemmery.cpu.entry_layout import CALL, ENTRY, HEAD, at, size
from gemmery.cpu.entry_tensors import IS_TENSOR
from gemmery.cpu.ir import Function, Module, Value, Var
from gemmery.cpu.layout import JOB, JOB_AT

UNKNOWN, RAISED = 0, 1  # results that are no object: a call for Python; an error is set
_COPIED = 8  # words copied at once


def special(f: Function, number: int) -> Value:
    """Return UNKNOWN or RAISED as an address."""
    return f.emit("ptr", f"inttoptr i64 {number} to ptr")


def is_object(f: Function, x: Value) -> Value:
    """Return whether an address is that of an object."""
    return f.emit("i64", f"ptrtoint {x} to i64") > RAISED


def define_product(module: Module) -> None:
    """Define `product(table, call)`: the result of a call, UNKNOWN or RAISED."""
    with module.function("product", "table", "call", local=True, returns="ptr") as f:
        table, record = f["table"], f["call"]
        entry = call(f, "ptr", "find", table, record)
        answer = f.var(special(f, UNKNOWN))
        with f.if_(f.is_null(entry) ^ True):
            countdown = Args(f, entry, ENTRY).countdown
            with f.if_(countdown > 1):
                Args(f, entry, ENTRY).countdown = countdown - 1
            with f.if_(countdown.differs(2)):
                # A copy: another thread may replace the entry once this one allocates a tensor (Python 3.11 may
                # collect garbage there, and run any code) or releases the GIL.
                place, start = f.buffer(layout.ENTRY_BYTES), at(ENTRY, "kind")
                copy_words(f, entry + start, place + start, (size(ENTRY) - start) // 8)
                answer.value = call(f, "ptr", "prepared", table, record, place)
        fields = Args(f, record, CALL)
        with f.else_(), f.if_(fields.options < min(layout.CONTRACTION.values())):
            pair = call(f, "ptr", "pair", table, fields.a_element, fields.b_element, f.index(layout.CONVERTED))
            with f.if_(f.is_null(pair) ^ True):
                answer.value = call(f, "ptr", "converted", table, record, pair)
            with f.else_():
                answer.value = call(f, "ptr", "with_bias", table, record)
                with f.if_(f.is_null(answer.value)):
                    answer.value = call(f, "ptr", "member", table, record)
                with f.if_(f.is_null(answer.value)):
                    answer.value = call(f, "ptr", "cast", table, record)
        f.ret(answer.value)


def define_prepared(module: Module) -> None:
    """Define `prepared(table, call, place)`: checks or allocates the result, and runs the job.

    `place` is an entry that no other call uses; its job is changed.
    """
    with module.function("prepared", "table", "call", "place", local=True, returns="ptr") as f:
        head, fields, entry = Args(f, f["table"], HEAD), Args(f, f["call"], CALL), Args(f, f["place"], ENTRY)
        answer = f.var(special(f, UNKNOWN))
        good, data = f.var(f.const("i1", 1)), f.var(fields.out_data)
        scaled = (fields.options & layout.SCALED).differs(0)
        with f.if_(scaled & entry.scalar.equals(layout.INTEGER)):
            good.value = fields.integral.differs(0)
        with f.if_(scaled & (fields.alpha_imag.differs(0) | fields.beta_imag.differs(0))):
            good.value = entry.scalar >= layout.COMPLEX
        has_out = f.is_null(fields.out_object) ^ True
        with f.if_(good.value & has_out):
            _into_out(f, fields, entry, answer, good)
            with f.if_(good.value & (f.is_null(fields.old_object) ^ True)):
                _store_old(f, head, answer, good)
        with f.if_(good.value & (has_out ^ True)):
            with f.if_(entry.c_tensor.equals(0)):
                _allocate(f, head, entry, answer, data, good)
            with f.else_():
                _allocate_tensor(f, head, entry, answer, data, good)
        with f.if_(good.value):
            error = call(f, "i64", "execute", f["table"], f["call"], f["place"], data.value)
            with f.if_(error.differs(0)):  # no memory: Python tries again, and says so
                f.call_address(head.decref, answer.value)
                answer.value = special(f, UNKNOWN)
            with f.else_():
                scalar = entry.c_ndim.equals(0) & entry.c_tensor.equals(0) & fields.raw.equals(0)
                with f.if_(scalar & (has_out ^ True)):
                    answer.value = f.result_of(head.to_scalar, "ptr", answer.value)
                with f.if_(has_out & (fields.out_flags & IS_TENSOR).differs(0) & fields.raw.equals(0)):
                    f.call("written", head.tensors, fields.out_object)
        f.ret(answer.value)


def _allocate(f: Function, head: Args, entry: Args, answer: Var, data: Var, good: Var) -> None:
    """Make an array for the result. Where NumPy cannot, the call is Python's: it tries again and says why."""
    f.call_address(head.incref, entry.c_descr)  # new_array takes over a reference
    null, flags = f.null, f.convert("trunc", entry.c_fortran, "i32")
    ndim = f.convert("trunc", entry.c_ndim, "i32")
    shape = f["place"] + at(ENTRY, "c_shape_0")
    array = f.result_of(head.new_array, "ptr", head.array_type, entry.c_descr, ndim, shape, null, null, flags, null)
    with f.if_(f.is_null(array)):
        f.call_address(head.clear_error)
        answer.value, good.value = special(f, UNKNOWN), f.const("i1", 0)
    with f.else_():
        answer.value, data.value = array, f.load("ptr", array + objects.DATA)


def _allocate_tensor(f: Function, head: Args, entry: Args, answer: Var, data: Var, good: Var) -> None:
    """Make a tensor for the result; Python raises the error where there is no memory."""
    shape, memory = f["place"] + at(ENTRY, "c_shape_0"), f.buffer(8, 8)
    code, fortran = entry.c_tensor - 1, entry.c_fortran
    tensor = call(f, "ptr", "new_tensor", head.tensors, code, entry.c_ndim, shape, fortran, memory)
    answer.value, good.value = tensor, f.is_null(tensor) ^ True
    with f.if_(good.value):
        data.value = f.load("ptr", memory)


def _store_old(f: Function, head: Args, answer: Var, good: Var) -> None:
    """Copy the C that beta multiplies to `out`, where they are tensors."""
    old, out = (f["call"] + at(CALL, f"{name}_object") for name in ("old", "out"))
    good.value = call(f, "i64", "store_tensor", old, out).differs(0)
    with f.if_(good.value ^ True):
        f.call_address(head.decref, answer.value)
        answer.value = special(f, UNKNOWN)


def _into_out(f: Function, fields: Args, entry: Args, answer: Var, good: Var) -> None:
    """Use `out` where it can be written and shares no byte with an operand; else compute aside."""
    good.value = (fields.out_flags & objects.WRITEABLE).differs(0)
    with f.if_(good.value):
        out = f.emit("i64", f"ptrtoint {fields.out_data} to i64")
        low, high = out + entry.c_low, out + entry.c_high
        apart = entry.kind.differs(layout.ASIDE)
        for name in ("a", "b", "bias"):
            start = f.emit("i64", f"ptrtoint {getattr(fields, f'{name}_data')} to i64")
            clear = (high <= start + getattr(entry, f"{name}_low")) | (start + getattr(entry, f"{name}_high") <= low)
            apart = apart & (clear | f.is_null(getattr(fields, f"{name}_object")))
        with f.if_(apart):
            f.call_address(Args(f, f["table"], HEAD).incref, fields.out_object)
            answer.value = fields.out_object
        with f.else_():
            answer.value = call(f, "ptr", "aside", f["table"], f["call"])
            good.value = f.const("i1", 0)


def define_aside(module: Module) -> None:
    """Define `aside(table, call)`: computes in memory of its own, and copies the result to `out`.

    With beta, that memory starts as a copy of the old C: `old` if there is one, else `out`.
    """
    with module.function("aside", "table", "call", local=True, returns="ptr") as f:
        table, record = f["table"], f["call"]
        head, fields = Args(f, table, HEAD), Args(f, record, CALL)
        out, null = fields.out_object, f.null
        out_ndim, out_shape = fields.out_ndim, fields.out_shape
        answer, copy = f.var(special(f, UNKNOWN)), f.var(null)
        is_tensor = fields.tensors.differs(0)
        raw, good = fields.raw, f.var(fields.raw.equals(0) & (f.is_null(out) | (is_tensor ^ True)))
        both = (f.is_null(out) | f.is_null(fields.old_object)) ^ True
        with f.if_(good.value & both):  # no entry has checked this `out`
            contiguous = fields.out_flags & (objects.C_CONTIGUOUS | objects.F_CONTIGUOUS)
            good.value = (fields.out_flags & objects.WRITEABLE).differs(0) & contiguous.differs(0)
            good.value = good.value & fields.out_element.equals(fields.old_element)
        with f.if_(good.value & (fields.options & layout.BETA).differs(0)):
            source = f.select(f.is_null(fields.old_object), out, fields.old_object)
            with f.if_(is_tensor):
                # Python decides of which kind the result is where the old C alone, or not it, is a tensor.
                with f.if_((fields.old_flags & (fields.a_flags | fields.b_flags) & IS_TENSOR).differs(0)):
                    copy.value = call(f, "ptr", "copy_tensor", head.tensors, record + at(CALL, "old_object"))
                good.value = f.is_null(copy.value) ^ True
            with f.else_():
                copy.value = f.result_of(head.new_copy, "ptr", source, f.const("i32", 0))
                with f.if_(f.is_null(copy.value)):
                    answer.value, good.value = special(f, RAISED), f.const("i1", 0)
            with f.if_(good.value):
                good.value = call(f, "i64", "read", table, copy.value, record + at(CALL, "out_object")).differs(0)
        with f.else_():
            fields.out_object, fields.out_ndim = null, 0
        with f.if_(good.value):
            fields.raw, fields.old_object = 1, null
            result = call(f, "ptr", "product", table, record)
            fields.raw = raw
            answer.value = result
            with f.if_(is_object(f, result) & (f.is_null(out) ^ True)):
                answer.value = special(f, UNKNOWN)
                with f.if_(_same_shape(f, result, out_ndim, out_shape)):
                    answer.value = call(f, "ptr", "copied", table, out, result)
                f.call_address(head.decref, result)
        with f.if_(f.is_null(copy.value) ^ True):
            f.call_address(head.decref, copy.value)
        f.ret(answer.value)


def _same_shape(f: Function, array: Value, ndim: Value, shape: Value) -> Value:
    """Compare the shape of an array with ndim numbers."""
    different = f.var(f.convert("zext", f.load("i32", array + objects.NDIM), "i64") ^ ndim)
    with f.if_(different.value.equals(0)):
        own = f.load("ptr", array + objects.SHAPE)
        with f.loop(0, ndim) as i:
            different.value = different.value | (f.load("i64", own + i * 8) ^ f.load("i64", shape + i * 8))
    return different.value.equals(0)


def define_copied(module: Module) -> None:
    """Define `copied(table, out, result)`: copies the result to `out`, converted; returns a reference to out."""
    with module.function("copied", "table", "out", "result", local=True, returns="ptr") as f:
        head, answer = Args(f, f["table"], HEAD), f.var(special(f, RAISED))
        elements = [f.load("i64", f.load("ptr", f[x] + objects.DESCR) + objects.ELEMENT) for x in ("out", "result")]
        token, ready = f.var(f.null), f.var(f.const("i1", 1))
        casts = elements[0].differs(elements[1])
        with f.if_(casts):  # as in np.errstate(all="ignore"): no warnings of overflow
            token.value = f.result_of(head.set_context, "ptr", head.error_state, head.ignoring)
            ready.value = f.is_null(token.value) ^ True
        with f.if_(ready.value):
            error = f.result_of(head.copy_into, "i32", f["out"], f["result"])
            with f.if_(error.equals(0)):
                f.call_address(head.incref, f["out"])
                answer.value = f["out"]
            with f.if_(casts):
                f.result_of(head.reset_context, "i32", head.error_state, token.value)
                f.call_address(head.decref, token.value)
        f.ret(answer.value)


def define_execute(module: Module) -> None:
    """Define `execute(table, call, place, data)`: runs an entry's job on the arrays of a call; returns an errno."""
    with module.function("execute", "table", "call", "place", "data", local=True, returns="i64") as f:
        head, fields, entry = Args(f, f["table"], HEAD), Args(f, f["call"], CALL), Args(f, f["place"], ENTRY)
        job_at = f["place"] + at(ENTRY, f"job_{JOB[0][0]}")
        job = Args(f, job_at, JOB)
        a, b, transposed = fields.a_data, fields.b_data, entry.transposed.differs(0)
        job.a, job.b, job.c = f.select(transposed, b, a), f.select(transposed, a, b), f["data"]
        with f.if_((fields.options & layout.SCALED).differs(0)):
            _scalars(f, fields, entry.scalar, job_at)
        number = f.buffer(16)
        with f.if_(fields.bias_kind.differs(0)):
            with f.if_(fields.bias_kind.equals(layout.NUMBER_BIAS)):
                _number(f, entry.scalar, fields.bias_number, f.const("double", 0), number)
                job.bias = number
            with f.else_():
                job.bias = fields.bias_data
        state = f.var(f.null)
        is_long, plain = entry.long.differs(0), entry.plain.differs(0)
        with f.if_(is_long):
            state.value = f.result_of(head.save_thread, "ptr")
        error = f.var(f.index(0))
        with f.if_(entry.runs.equals(1)):
            error.value = call(f, "i64", "launch", f["table"], job_at, f.convert("zext", plain, "i64"))
        with f.else_():
            _loops(f, f["place"] + at(ENTRY, "loop0_length"), job_at, job, f.convert("zext", plain, "i64"), error)
        with f.if_(is_long):
            f.call_address(head.restore_thread, state.value)
        f.ret(error.value)


def copy_words(f: Function, source: Value, target: Value, words: int) -> None:
    """Copy words by vectors."""
    for first in range(0, words, _COPIED):
        count = min(_COPIED, words - first)
        type_ = f"<{count} x i64>"
        f.store(f.load(type_, source + 8 * first, align=8), target + 8 * first, align=8)


def _scalars(f: Function, fields: Args, scalar: Value, job_at: Value) -> None:
    """Set alpha and beta in a job, as its kernel reads them."""
    with f.if_(scalar.equals(layout.INTEGER)):
        for name in ("alpha", "beta"):
            f.store(getattr(fields, f"{name}_integer"), job_at + JOB_AT[f"{name}_value"])
    with f.else_():
        for name in ("alpha", "beta"):
            number, imag = getattr(fields, name), getattr(fields, f"{name}_imag")
            _number(f, scalar, number, imag, job_at + JOB_AT[f"{name}_value"])


def _number(f: Function, scalar: Value, number: Value, imag: Value, target: Value) -> None:
    """Store a number of a kernel's type, after which a real kernel does not read the imaginary part."""
    f.store(f.index(0), target)
    f.store(f.index(0), target + 8)
    part = scalar & ~layout.COMPLEX
    with f.if_(part.equals(layout.SINGLE)):
        f.store(f.convert("fptrunc", number, "float"), target)
        f.store(f.convert("fptrunc", imag, "float"), target + 4)
    with f.if_(part.equals(layout.DOUBLE)):
        f.store(number, target)
        f.store(imag, target + 8)


def _loops(f: Function, loops: Value, job_at: Value, job: Args, plain: Value, error: Var) -> None:
    """Run the job once for each product of a batch that the kernel cannot walk, until it fails."""
    lengths = [f.load("i64", loops + 32 * i) for i in range(layout.LOOPS)]
    starts = [getattr(job, name) for name in "abc"]
    with f.loop(0, lengths[2]) as z, f.loop(0, lengths[1]) as y, f.loop(0, lengths[0]) as x:
        for operand, name in enumerate("abc"):
            step = [f.load("i64", loops + (32 * i + 8 * (operand + 1))) for i in range(layout.LOOPS)]
            setattr(job, name, starts[operand] + (x * step[0] + y * step[1] + z * step[2]))
        with f.if_(error.value.equals(0)):
            error.value = call(f, "i64", "launch", f["table"], job_at, plain)


def define_launch(module: Module) -> None:
    """Define `launch(table, job, plain)`: runs a job here, or with the pool; returns an errno."""
    with module.function("launch", "table", "job", ("i64", "plain"), local=True, returns="i64") as f:
        error = f.var(f.index(0))
        with f.if_(f["plain"].equals(0)):
            error.value = f.result_of(Args(f, f["table"], HEAD).run, "i64", f["job"])
        with f.else_():
            job = Args(f, f["job"], JOB)
            job.alpha, job.beta = f["job"] + JOB_AT["alpha_value"], f["job"] + JOB_AT["beta_value"]
            run_here(f, job, f["job"])
        f.ret(error.value)


def run_here(f: Function, job: Args, job_at: Value) -> None:
    """Call the kernel of a job without workspace for each of its products; the job's pointers move."""
    kernel, count = job.kernel, f.select(job.at_once.differs(0), f.index(1), job.batch)
    f.call_address(kernel, job_at)
    with f.loop(1, count):
        job.a, job.b, job.c = job.a + job.a_batch, job.b + job.b_batch, job.c + job.c_batch
        f.call_address(kernel, job_at)
