"""Atomic operations, and calls of the C library, as lines of IR.

Loads and read-modify-writes are sequentially consistent, stores release: each can hand over the memory that was written
before it. Where a weaker order would do, the comment beside the access says so: on x86-64 a weaker one is the same
instruction, and a product has few of them. The names are LLVM's: `exchange` is xchg, `compare_exchange` cmpxchg. The C
library is called by the addresses in the pool, since code in an image refers to nothing outside.
"""

from __future__ import annotations

from gemmery.cpu.ir import Function, Value
from gemmery.cpu.layout import FUNCTIONS, FUTEX, STATE

WAIT, WAKE = 0, 1
_PRIVATE = 128
_PAUSES_PER_YIELD = 64
_X86, _ARM = ("x86_64", "amd64"), ("aarch64", "arm64")
_PAUSE = dict.fromkeys(_X86, "llvm.x86.sse2.pause()")
_OTHERS = "llvm.aarch64.hint(i32 1)"


def load(f: Function, at: Value) -> Value:
    """Load a 64-bit word."""
    return f.emit("i64", f"load atomic i64, {at} seq_cst, align 8")


def store(f: Function, new: Value, at: Value) -> None:
    """Store a 64-bit word, after everything that this thread wrote before."""
    f.line(f"store atomic {new}, {at} release, align 8")


def exchange(f: Function, at: Value, new: Value) -> Value:
    """Store a word, before anything that this thread reads next; returns the value before."""
    return f.emit("i64", f"atomicrmw xchg {at}, {new} seq_cst")


def compare_exchange(f: Function, at: Value, expected: Value, new: Value) -> Value:
    """Store `new` if the word is `expected`; returns whether it was."""
    both = f.emit("{ i64, i1 }", f"cmpxchg {at}, {expected}, {new} seq_cst seq_cst")
    return f.emit("i1", f"extractvalue {both}, 1")


def fetch(f: Function, operation: str, at: Value, number: Value) -> Value:
    """Add a number to a word, or combine their bits by "and" or "or"; returns the value before."""
    return f.emit("i64", f"atomicrmw {operation} {at}, {number} seq_cst")


def call(f: Function, type_: str, name: str, *values: Value) -> Value:
    """Call a function of this module that returns a value."""
    return f.emit(type_, f"call {type_} @{name}({', '.join(map(str, values))})")


def libc(f: Function, pool: Value, name: str, type_: str, *values: Value) -> Value:
    """Call a function of the C library."""
    address = f.load("ptr", pool + FUNCTIONS[name])
    return f.emit(type_, f"call {type_} {address.text}({', '.join(map(str, values))})")


def futex(f: Function, pool: Value, operation: int, number: Value) -> None:
    """WAIT while the number of the newest job is `number`, or WAKE that many sleepers."""
    call = f.load("ptr", pool + FUNCTIONS["syscall"])
    values = [FUTEX[f.target.machine], pool + (STATE + 4), operation | _PRIVATE, number, 0, 0, 0]
    text = ", ".join(str(v) if isinstance(v, Value) else f"i64 {v}" for v in values)
    f.emit("i64", f"call i64 (i64, ...) {call.text}({text})")


def now(f: Function, pool: Value) -> Value:
    """Return the monotonic time in ns."""
    time = f.buffer(16)
    libc(f, pool, "clock_gettime", "i32", f.const("i32", 1), time)
    return f.load("i64", time) * 1_000_000_000 + f.load("i64", time + 8)


def pause(f: Function, pool: Value, spins: Value) -> None:
    """Spin for a moment; every 64th time yield the core, since a woken worker may wait for it."""
    name = _PAUSE.get(f.target.machine, _OTHERS)
    f.module.declare(f"declare void @{name.replace('i32 1', 'i32')}")
    f.line(f"call void @{name}")
    count = f.load("i64", spins) + 1
    f.store(count, spins)
    with f.if_((count & (_PAUSES_PER_YIELD - 1)).equals(0)):
        libc(f, pool, "sched_yield", "i32")


def floating_mode(f: Function) -> Value:
    """Return this thread's floating-point mode: rounding, flushing of subnormals, traps (MXCSR, FPCR)."""
    if f.target.machine in _X86:
        word = f.buffer(8)
        f.module.declare("declare void @llvm.x86.sse.stmxcsr(ptr)")
        f.line(f"call void @llvm.x86.sse.stmxcsr({word})")
        return f.convert("zext", f.load("i32", word), "i64")
    if f.target.machine in _ARM:
        return f.intrinsic("llvm.aarch64.get.fpcr", "i64")
    return f.index(0)


def set_floating_mode(f: Function, mode: Value) -> None:
    """Set this thread's floating-point mode to a value of `floating_mode`."""
    if f.target.machine in _X86:
        word = f.buffer(8)
        f.store(mode, word)
        f.module.declare("declare void @llvm.x86.sse.ldmxcsr(ptr)")
        f.line(f"call void @llvm.x86.sse.ldmxcsr({word})")
    elif f.target.machine in _ARM:
        f.module.declare("declare void @llvm.aarch64.set.fpcr(i64)")
        f.line(f"call void @llvm.aarch64.set.fpcr({mode})")


def exceptions(f: Function) -> Value:
    """Return the word with this thread's flags of floating-point exceptions (MXCSR, FPSR)."""
    return f.intrinsic("llvm.aarch64.get.fpsr", "i64") if f.target.machine in _ARM else floating_mode(f)


def set_exceptions(f: Function, flags: Value) -> None:
    """Set them back to what `exceptions` returned."""
    if f.target.machine in _ARM:
        f.module.declare("declare void @llvm.aarch64.set.fpsr(i64)")
        f.line(f"call void @llvm.aarch64.set.fpsr({flags})")
    else:
        set_floating_mode(f, flags)
