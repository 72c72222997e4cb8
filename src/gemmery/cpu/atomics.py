"""What threads do to each other's memory, and what they ask of the system, as lines of IR.

Atomic loads and changes are sequentially consistent, stores release: each hands memory from thread to thread. The C
library is called by the addresses in the pool, since code in an image refers to nothing outside.
"""

from __future__ import annotations

from gemmery.cpu.ir import Function, Value
from gemmery.cpu.layout import FUNCTIONS, FUTEX, STATE

WAIT, WAKE = 0, 1
_PRIVATE = 128
_PATIENCE = 64  # pauses between two offers of the core to whoever else wants it
_X86, _ARM = ("x86_64", "amd64"), ("aarch64", "arm64")
_PAUSE = dict.fromkeys(_X86, "llvm.x86.sse2.pause()")
_OTHERS = "llvm.aarch64.hint(i32 1)"


def load(f: Function, at: Value) -> Value:
    """A 64-bit word."""
    return f.emit("i64", f"load atomic i64, {at} seq_cst, align 8")


def store(f: Function, new: Value, at: Value) -> None:
    """Write a 64-bit word."""
    f.line(f"store atomic {new}, {at} release, align 8")


def add(f: Function, at: Value, number: Value) -> Value:
    """Add to a word; the value before."""
    return f.emit("i64", f"atomicrmw add {at}, {number} seq_cst")


def swap(f: Function, at: Value, new: Value) -> None:
    """Write a word, before anything that is read next."""
    f.emit("i64", f"atomicrmw xchg {at}, {new} seq_cst")


def exchange(f: Function, at: Value, old: Value, new: Value) -> Value:
    """Write `new` where `old` is; true when it was."""
    both = f.emit("{ i64, i1 }", f"cmpxchg {at}, {old}, {new} seq_cst seq_cst")
    return f.emit("i1", f"extractvalue {both}, 1")


def call(f: Function, type_: str, name: str, *values: Value) -> Value:
    """Call a function of this module that has a result."""
    return f.emit(type_, f"call {type_} @{name}({', '.join(map(str, values))})")


def libc(f: Function, pool: Value, name: str, type_: str, *values: Value) -> Value:
    """Call a function of the C library."""
    address = f.load("ptr", pool + FUNCTIONS[name])
    return f.emit(type_, f"call {type_} {address.text}({', '.join(map(str, values))})")


def futex(f: Function, pool: Value, operation: int, number: Value) -> None:
    """Wait while the number of the job is `number`, or wake that many."""
    call = f.load("ptr", pool + FUNCTIONS["syscall"])
    values = [FUTEX[f.target.machine], pool + (STATE + 4), operation | _PRIVATE, number, 0, 0, 0]
    text = ", ".join(str(v) if isinstance(v, Value) else f"i64 {v}" for v in values)
    f.emit("i64", f"call i64 (i64, ...) {call.text}({text})")


def now(f: Function, pool: Value) -> Value:
    """Monotonic time in ns."""
    time = f.buffer(16)
    libc(f, pool, "clock_gettime", "i32", f.const("i32", 1), time)
    return f.load("i64", time) * 1_000_000_000 + f.load("i64", time + 8)


def pause(f: Function, pool: Value, spins: Value) -> None:
    """A moment; now and then the core is offered to others, for a woken worker may have been put on it."""
    name = _PAUSE.get(f.target.machine, _OTHERS)
    f.module.declare(f"declare void @{name.replace('i32 1', 'i32')}")
    f.line(f"call void @{name}")
    count = f.load("i64", spins) + 1
    f.store(count, spins)
    with f.if_((count & (_PATIENCE - 1)).equals(0)):
        libc(f, pool, "sched_yield", "i32")


def floating_mode(f: Function) -> Value:
    """The floating-point mode of this thread: rounding, flushing of subnormals, traps (MXCSR, FPCR)."""
    if f.target.machine in _X86:
        word = f.buffer(8)
        f.module.declare("declare void @llvm.x86.sse.stmxcsr(ptr)")
        f.line(f"call void @llvm.x86.sse.stmxcsr({word})")
        return f.convert("zext", f.load("i32", word), "i64")
    if f.target.machine in _ARM:
        return f.intrinsic("llvm.aarch64.get.fpcr", "i64")
    return f.index(0)


def set_floating_mode(f: Function, mode: Value) -> None:
    """Give this thread a mode that `floating_mode` read in another."""
    if f.target.machine in _X86:
        word = f.buffer(8)
        f.store(mode, word)
        f.module.declare("declare void @llvm.x86.sse.ldmxcsr(ptr)")
        f.line(f"call void @llvm.x86.sse.ldmxcsr({word})")
    elif f.target.machine in _ARM:
        f.module.declare("declare void @llvm.aarch64.set.fpcr(i64)")
        f.line(f"call void @llvm.aarch64.set.fpcr({mode})")
