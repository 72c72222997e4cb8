"""Run a whole CUDA C++ program, main() too: its host part natively, its kernels on the emulator.

The host part calls one function of Python with a name and whole numbers, here the methods of `Runtime`; a method
returns a number of a CUDA error, an address or a value. All work is done when a call returns, in the order of calls.
"""

from __future__ import annotations

import ctypes
import re
import signal
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partialmethod
from pathlib import Path
from threading import RLock
from time import perf_counter_ns
from typing import Any

import numpy as np

from gemmery.cuda import device as cards
from gemmery.cuda import include
from gemmery.errors import CompileError, EmulationError
from gemmery_emulator.arguments import BoundArguments
from gemmery_emulator.heap import takes_memory
from gemmery_emulator.kernels import host_part
from gemmery_emulator.kernels.blas_calls import MAPPING, BlasCalls, UnmappedError
from gemmery_emulator.kernels.device_heap import DeviceHeap
from gemmery_emulator.kernels.host_part import SECONDS, HostClock, allocation_name, instance, plain
from gemmery_emulator.kernels.kernel import CompiledKernel, compiled_kernel, read_source, run_launch
from gemmery_emulator.kernels.kernel_run import KernelRun
from gemmery_emulator.kernels.launch_checks import architecture
from gemmery_emulator.kernels.programs import refusal
from gemmery_emulator.kernels.source_program import program_of
from gemmery_emulator.machine import Dims, LaunchConfig
from gemmery_emulator.ptx import Variable
from gemmery_emulator.run import EmulatedRun
from gemmery_emulator.symbols import demangled

STOP = -(1 << 62)
FAULT = 1 << 62  # marks the address of a fault of the host's
OVERFLOW = "for its stack was full: an array that is too large for it belongs on the heap, and a recursion has to end"
# How a program ends by a signal; an access outside of its memory is told by its address.
ENDS: dict[int, str] = {
    signal.SIGABRT: "by abort(): an assertion that does not hold, or an exception that nobody catches",
    signal.SIGFPE: "by a division of a whole number by zero: compare the divisor first",
    signal.SIGILL: "by a trap of the host's compiler: a function that should return a value may end without one",
    **dict.fromkeys((signal.SIGSEGV, signal.SIGBUS), OVERFLOW),
}
INVALID, NO_MEMORY, CONFIGURATION, SYMBOL, DIRECTION, UNKNOWN = 1, 2, 9, 13, 21, 999  # CUDA's errors
MEMORY = 8 << 30  # bytes of device memory, whatever the card has
MOST_LAUNCHES = 100_000
KINDS = ("host to host", "host to device", "device to host", "device to device", "default")


@dataclass(frozen=True)
class ProgramRun:
    """What a program did: its exit status, each kernel's launches added up, and what is wrong in its host part."""

    status: int
    runs: tuple[EmulatedRun, ...]  # one for each kernel
    launches: dict[str, int]  # by kernel
    notes: tuple[str, ...] = ()  # faults of the host part
    seconds: float | None = None  # predicted for all launches on the card that was asked for


@dataclass
class Runtime(BlasCalls):
    """The state of a program while it runs: memory, variables, and what its launches counted."""

    text: str
    name: str
    folder: Path | None
    arch: str
    options: tuple[str, ...]
    card: cards.Device
    predicting: str = ""
    check: bool = True
    heap: DeviceHeap = field(default_factory=lambda: DeviceHeap(MEMORY))
    variables: dict[str, int] = field(default_factory=dict)  # addresses, by symbol
    written: dict[str, bytes] = field(default_factory=dict)  # by the host, before the first launch that has them
    totals: dict[str, EmulatedRun] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    known: dict[tuple[Any, ...], float] = field(default_factory=dict)  # predicted seconds, by launch
    clock: float = 0.0  # predicted seconds so far
    error: BaseException | None = None
    host: HostClock = field(default_factory=HostClock)
    lock: AbstractContextManager[object] = field(default_factory=RLock)

    def call(self, what: bytes, values: Any, count: int) -> int:
        """Answer a call of the host part; an error of Python's ends the program, and is raised again after it."""
        try:
            with self.lock:  # of the host part's threads
                self.host.pause()
                return int(getattr(self, f"on_{what.decode()}")(*values[:count]))
        except UnmappedError:
            return MAPPING
        except BaseException as error:  # also KeyboardInterrupt: none may pass through frames of C
            self.error = error
            return STOP
        finally:
            self.host.proceed()

    def note(self, line: int, words: str) -> None:
        """Keep a fault of the host part."""
        self.notes[f"{self.name}:{line}: {words}" if line else words] = None

    # Memory.

    def on_allocate(self, name: int, line: int, size: int) -> int:
        """An address on the device, or an error below zero."""
        allocation = self.heap.allocate(allocation_name(_text(name), line), size)
        return allocation.start if allocation else -NO_MEMORY

    def on_limit(self, size: int) -> int:
        """Set the bytes that malloc() in kernels may take, before a kernel calls it."""
        self.heap.limit = size
        return INVALID if self.heap.of_kernels else 0

    def on_managed(self, name: int, line: int, size: int) -> int:
        """An address on the host of memory that kernels may use, too."""
        allocation = self.heap.share(allocation_name(_text(name), line), size)
        return allocation.address if allocation else -NO_MEMORY

    def on_register(self, address: int, size: int) -> int:
        """Let kernels use memory of the host's."""
        return 0 if self.heap.share("memory of the host", size, address) else NO_MEMORY

    def on_release(self, address: int) -> int:
        """Free an allocation; a null pointer is none."""
        if not address or self.heap.free(address):
            return 0
        self.note(0, f"{self.name}: cudaFree({address:#x}): no allocation begins there, or it is free already")
        return INVALID

    def on_copy(
        self, to: int, origin: int, to_pitch: int, from_pitch: int, width: int, rows: int, kind: int, line: int, at: int
    ) -> int:
        """Check a copy, and write the addresses of both sides in this process."""
        places = ctypes.cast(at, ctypes.POINTER(ctypes.c_void_p))
        if not width or not rows:
            return 0
        for index, (address, pitch, is_to) in enumerate(((to, to_pitch, True), (origin, from_pitch, False))):
            expected = kind in (1, 3) if is_to else kind in (2, 3)
            size = pitch * (rows - 1) + width
            place = self._place(address, size, line, "copy to" if is_to else "copy from")
            if place is None:
                return INVALID
            shared = any(address in each for each in self.heap.managed.values())
            is_device = self.heap.is_device(address)
            if kind < 4 and is_device != expected and not shared:
                side = "the device's" if is_device else "the host's"
                self.note(line, f"a copy from {KINDS[kind]}, but {'to' if is_to else 'from'} {side} memory")
                return INVALID
            places[index] = place
        return 0

    def _place(self, address: int, size: int, line: int, what: str) -> int | None:
        """The address in this process of bytes of host or device; None, with a note, beyond an allocation."""
        if not self.heap.is_device(address):
            return address
        inside = self.heap.holding(address)
        if inside is None or address + size > inside.stop:
            room = f"{inside.stop - address} bytes of {inside.name} are there" if inside else "nothing is there"
            self.note(line, f"{what} device memory at {address:#x}: {size} bytes, but {room}")
            return None
        return int(self.heap.data.ctypes.data) + address

    def on_fill(self, address: int, value: int, pitch: int, width: int, rows: int, line: int) -> int:
        """Set bytes of host or device memory."""
        if not width or not rows:
            return 0
        place = self._place(address, pitch * (rows - 1) + width, line, "cudaMemset of")
        if place is None:
            return INVALID
        for row in range(rows):
            ctypes.memset(place + row * pitch, value & 255, width)
        return 0

    # Variables of the device.

    def _copied_symbol(
        self, name: int, host: int, whole: int, data: int, size: int, offset: int, *, to_symbol: bool
    ) -> int:
        """Copy to or from a variable: of the text's kernels it may be in any, so it is kept until one has it."""
        inside = int(self.heap.data.ctypes.data) + self._symbol(name, host, whole) + offset
        if offset + size > whole:
            return INVALID
        other = self._place(data, size, 0, f"cudaMemcpy{'ToSymbol from' if to_symbol else 'FromSymbol to'}")
        if other is None:
            return INVALID
        ctypes.memmove(*((inside, other) if to_symbol else (other, inside)), size)
        return 0

    on_to_symbol = partialmethod(_copied_symbol, to_symbol=True)
    on_from_symbol = partialmethod(_copied_symbol, to_symbol=False)

    def on_symbol_address(self, name: int, host: int, whole: int, data: int, _size: int, _offset: int) -> int:
        """Write a variable's address."""
        ctypes.c_uint64.from_address(data).value = self._symbol(name, host, whole)
        return 0

    def _symbol(self, name: int, host: int, size: int) -> int:
        """The address of a variable, which begins with the value that the host's compiler gives it."""
        word = re.findall(r"\w+", _text(name).partition("[")[0])[-1]
        if word not in self.variables:
            allocation = self.heap.allocate(word, size)
            if allocation is None:
                raise MemoryError(f"no device memory is left for the variable {word}")
            self.variables[word] = allocation.start
            self.heap.data[allocation.start : allocation.stop] = np.frombuffer(ctypes.string_at(host, size), np.uint8)
        return self.variables[word]

    def _variables_of(self, compiled: CompiledKernel, called: str) -> dict[int, str]:
        """Place the variables of a kernel's module that are not yet there; their names by address."""
        kernel = compiled.program.kernel
        if takes_memory(kernel) and not self.heap.of_kernels:
            self.heap.open()
        symbols, fresh = dict[int, str](), dict[str, Variable]()
        for name, variable in kernel.variables.items():
            if variable.space not in ("global", "const"):
                continue
            key = plain(name) if re.match(r"[A-Za-z_]\w*$", name) and "unnamed" not in name else f"{called} {name}"
            key = name if self.variables.get(key) in symbols else key  # of two namespaces
            if key not in self.variables:
                allocation = self.heap.allocate(key, variable.size)
                if allocation is None:
                    raise MemoryError(f"no device memory is left for the variable {name}")
                self.variables[key] = allocation.start
                fresh[name] = variable
            symbols[self.variables[key]] = name
        addresses = {name: address for address, name in symbols.items()}
        for name, variable in fresh.items():
            place = self.heap.data[addresses[name] : addresses[name] + variable.size]
            if variable.data:
                place[:] = np.frombuffer(variable.data, np.uint8)
            for at, pointed, offset in variable.pointers:
                if pointed in addresses:
                    place[at : at + 8] = np.array([addresses[pointed] + offset], np.uint64).view(np.uint8)
        return symbols

    # Launches.

    def on_launch(
        self, name: int, parameters: int, pretty: int, line: int, launch: int, at: int, sizes: int, count: int
    ) -> int:
        """Run a kernel."""
        if sum(self.launches.values()) >= MOST_LAUNCHES:
            raise EmulationError(f"{self.name}: {MOST_LAUNCHES:,} launches: a loop of main() may not end; shorten it")
        called = instance(_text(name), _text(parameters).split(" "), _text(pretty))
        *sides, shared = struct.unpack("9IQ", ctypes.string_at(launch, struct.calcsize("9IQ")))
        grid, block, cluster = (_three(sides[place : place + 3]) for place in (0, 3, 6))
        compiled = compiled_kernel(self.text, self.name, self.folder, called, self.arch, self.options)
        kernel = compiled.program.kernel
        capability = int(self.arch.removeprefix("sm_").rstrip("af"))
        needed = _three([*kernel.limits.get("reqnctapercluster", (1,)), 1, 1][:3])
        config = LaunchConfig(grid, block, b"", shared, cluster if any(cluster) else needed)
        reason = "" if min(*grid, *block) else f"grid={grid}, block={block}: no side may be 0"
        if reason := reason or refusal(kernel, config, capability):
            self.note(line, f"{called}: {reason}")
            return CONFIGURATION
        declared = kernel.parameters
        pointers: Any = (ctypes.c_void_p * len(declared)).from_address(at) if declared else ()
        lengths = list((ctypes.c_longlong * count).from_address(sizes)) if count else [each.size for each in declared]
        if len(lengths) != len(declared) or any(
            size not in (0, each.size) for size, each in zip(lengths, declared, strict=True)
        ):
            raise EmulationError(
                f"{called}: its parameters have {', '.join(map(str, lengths))} bytes on the host and "
                f"{', '.join(str(each.size) for each in declared)} on the device; pass their members by themselves"
            )
        packed = bytearray(max((each.offset + each.size for each in declared), default=0) + 7)
        for each, pointer, size in zip(declared, pointers, lengths, strict=True):
            packed[each.offset : each.offset + size] = ctypes.string_at(pointer, size)
        words = np.frombuffer(packed, np.uint64, len(packed) // 8)
        packed[: 8 * len(words)] = self.heap.translated(words).tobytes()
        symbols = self._variables_of(compiled, called)
        bound = _Binding(self, bytes(packed[: len(packed) - 7]), symbols)
        self.heap.send()
        run = run_launch(compiled, config, bound, {self.name: self.text}, called, {}, self.check)
        self.heap.receive()
        bound.is_first = False
        self._add(run, called, (called, grid, block, shared, bytes(packed)))
        return 0

    def _add(self, run: KernelRun, called: str, key: tuple[Any, ...]) -> None:
        if self.predicting:
            if key[:4] not in self.known:
                self.known[key[:4]] = run.predict(self.predicting).seconds
            self.clock += self.known[key[:4]]
        self.launches[called] = self.launches.get(called, 0) + 1
        run = replace(run, left_out=())  # the host part runs, too
        self.totals[called] = self.totals[called] + run if called in self.totals else run

    # The device, and time.

    def on_now(self) -> int:
        """Nanoseconds: predicted ones of the device where a card was asked for, else of this process."""
        return round(self.clock * 1e9) if self.predicting else perf_counter_ns()

    def on_device_name(self, to: int) -> int:
        """Write the card's name."""
        name = f"gemmery's emulator as {self.card.name}".encode()[:255]
        ctypes.memmove(to, name + b"\0", len(name) + 1)
        return 0

    def on_property(self, name: int) -> int:
        """A number of cudaDeviceProp."""
        card, limits = self.card, self.card.limits
        clock = round(card.clock * 1e6)
        numbers = {
            "free": MEMORY - self.heap.used, "totalGlobalMem": MEMORY, "sharedMemPerBlock": cards.STATIC_SHARED,
            "regsPerBlock": cards.REGISTERS, "warpSize": cards.WARP, "maxThreadsPerBlock": limits.threads,
            "clockRate": clock, "totalConstMem": 1 << 16, "major": card.capability // 10,
            "minor": card.capability % 10, "multiProcessorCount": card.sms, "l2CacheSize": card.l2,
            "memoryBusWidth": 256, "memoryClockRate": round(card.bandwidth * 1e6 / 64),
            "maxThreadsPerMultiProcessor": limits.warps_sm * cards.WARP, "maxBlocksPerMultiProcessor": limits.blocks_sm,
            "sharedMemPerMultiprocessor": limits.shared_sm, "regsPerMultiprocessor": limits.registers_sm,
            "sharedMemPerBlockOptin": limits.shared, "memPitch": (1 << 31) - 1, "textureAlignment": 512,
        }  # fmt: skip
        on = ("concurrentKernels", "managedMemory", "cooperativeLaunch", "unifiedAddressing", "canMapHostMemory")
        return numbers.get(_text(name), int(_text(name) in on))

    def on_blocks_at_once(self, threads: int, shared: int) -> int:
        """Blocks of a multiprocessor at once, by threads and shared memory alone."""
        limits = self.card.limits
        warps = -(-threads // cards.WARP)
        by_memory = limits.shared_sm // (shared + 1024) if shared else limits.blocks_sm
        return max(min(limits.warps_sm // max(warps, 1), limits.blocks_sm, by_memory), 0)


class _Binding:
    """Global memory and parameters of a launch; for a prediction afterwards, on a copy of the memory."""

    def __init__(self, runtime: Runtime, parameters: bytes, symbols: dict[int, str]) -> None:
        self.runtime, self.parameters, self.symbols, self.is_first = runtime, parameters, symbols, True

    def __call__(self) -> BoundArguments:
        memory = self.runtime.heap.memory(self.symbols)
        if not self.is_first:
            memory.data, memory.heap = memory.data.copy(), deepcopy(memory.heap)
        return BoundArguments(memory, self.parameters, {})


def run_program(
    source: str | Path,
    arguments: Sequence[str] = (),
    arch: str = "sm_90",
    *,
    options: Sequence[str] = (),
    card: str = "",
    check: bool = True,
    seconds: float = SECONDS,
) -> ProgramRun:
    """Compile and run a whole CUDA C++ program without a GPU, with `arguments` for its main().

    The host part is compiled by the host's own compiler of C++ and runs in this process; `options` are those of both
    compilers (-D, -I), and other files of the host part ("other.cpp"). Times of events are those of
    this process, or with `card` the predicted times of the launches on that card. After `seconds` of its own code,
    without launches and copies, main() is ended, with a note.

    Raises InstallError without a compiler, CompileError with its words, and the errors of gm.emulate.
    """
    arch = architecture(card or arch)
    text, name, folder = read_source(source)
    others = tuple(each for each in options if each.endswith(host_part.OTHERS))
    device_options = tuple(each for each in options if each not in others)
    if not re.search(r"\bmain\s*\(", text):
        raise CompileError(f"{name} has no main(): call its kernels by gm.emulate, or `gemmery emulate` without --run")
    runtime = Runtime(text, name, folder, arch, device_options, cards.card(card or arch.rstrip("af")), card, check)
    with host_part.build_folder() as into:
        runtime.text, built = _linked(text, name, folder, options, Path(into))
        if not hasattr(built, "main"):
            raise CompileError(f"{name} declares main() and has no body of it: pass its file, such as -o main.cpp")
        called = ctypes.CFUNCTYPE(ctypes.c_longlong, ctypes.c_char_p, ctypes.POINTER(ctypes.c_longlong), ctypes.c_int)
        answer = called(runtime.call)  # lives until main() has returned
        words = [name.encode(), *(each.encode() for each in arguments)]
        passed = (ctypes.c_char_p * (len(words) + 1))(*words, None)
        fault = ctypes.c_longlong(0)
        entry = ctypes.cast(built.main, ctypes.c_void_p)
        with runtime.host.watched(seconds):
            status = int(built.gemmery_run(answer, entry, len(words), passed, ctypes.byref(fault)))
    if runtime.error is not None:
        raise runtime.error
    if fault.value == signal.SIGINT:
        raise KeyboardInterrupt
    if fault.value == signal.SIGVTALRM:
        rest = "a loop of the host may not end; give it more by seconds= (--seconds), or shorten it"
        runtime.note(0, f"{name}: main() was ended after {seconds:g} seconds of its own code, without launches: {rest}")
    if fault.value & FAULT:
        runtime.note(0, _fault(runtime, fault.value & ~FAULT))
    elif fault.value in ENDS:
        runtime.note(0, f"{name}: main() ended {ENDS[fault.value]}")
    runs = tuple(runtime.totals.values())
    return ProgramRun(status, runs, runtime.launches, tuple(runtime.notes), runtime.clock if card else None)


def _linked(text: str, name: str, folder: Path | None, options: Sequence[str], into: Path) -> tuple[str, ctypes.CDLL]:
    """A program with the .cu files beside it that define what it lacks, and its host part as a library, with such files
    of host code.
    """
    known, endings = list[str](), (*host_part.OTHERS, ".cu")
    beside = [each for ending in endings for each in sorted(folder.glob(f"*{ending}"))] if folder else []
    own = tuple(each for each in options if not each.endswith(host_part.OTHERS))
    while True:
        program = program_of(text, name, own, folder, include.folders())
        added = [each for each in known if not each.endswith(".cu")]
        try:
            return text, ctypes.CDLL(str(host_part.library(program, folder, [*options, *added], into)))
        except OSError as error:
            what = str(error).rpartition(": ")[2]
            lacked = demangled(what).partition("(")[0] or what
            defines = re.compile(rf"^(?:[\w ].*\b)?{re.escape(lacked)}\s*\([^;{{]*\)\s*\{{", re.MULTILINE)
            texts = {str(each): each.read_text(encoding="utf-8", errors="replace") for each in beside}
            others = [each for each, other in texts.items() if defines.search(other) and "main(" not in other]
            if len(others) == 1 and others[0] not in known and others[0] not in options:
                known += others
                text += f'\n#include "{Path(others[0]).name}"\n' * others[0].endswith(".cu")
                continue
            rest = "other files of the program are given as options, such as --option other.cpp"
            raise CompileError(f"the host part of {program.name} does not link: {what}; {rest}") from None


def _fault(runtime: Runtime, address: int) -> str:
    """What is said of an access of the host part that ended it."""
    inside = runtime.heap.holding(address) if runtime.heap.is_device(address) else None
    where = f"device memory ({inside.name}): copy it to the host first" if inside else "no memory of its own"
    return f"{runtime.name}: main() ended by an access of the host to address {address:#x}, {where}"


def _text(address: int) -> str:
    return ctypes.string_at(address).decode(errors="replace")


def _three(sides: Sequence[int]) -> Dims:
    x, y, z = sides
    return x, y, z
