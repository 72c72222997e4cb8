"""Compile LLVM IR to machine code; only this module imports llvmlite, and only what compiles imports it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, cast

from llvmlite import binding
from llvmlite.binding import ffi

from gemmery import config
from gemmery.cpu import workspace
from gemmery.cpu.target import ARM_FEATURES, X86, Target
from gemmery.errors import CompileError

binding.initialize_native_target()
binding.initialize_native_asmprinter()


@functools.cache
def _for_arm() -> Any:
    """Return LLVM's 64-bit ARM, on any machine: tests and `gemmery predict` compile for ARM CPUs everywhere."""
    if config.ON_ARM:
        return binding.Target.from_default_triple()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    return binding.Target.from_triple("aarch64-unknown-linux-gnu")


def host_cpu() -> str:
    """Return LLVM's name of this CPU's microarchitecture: znver4, sapphirerapids, neoverse-v2, ..."""
    return str(binding.get_host_cpu_name())


def host_features() -> dict[str, bool]:
    """Return LLVM's features of this architecture, and whether this CPU has each."""
    return dict(binding.get_host_cpu_features())


def _machine(target: Target, level: int = 3) -> Any:
    cpu, features, architecture = target.llvm, "", _for_arm if target.is_arm else binding.Target.from_default_triple
    if target.is_arm:
        cpu = cpu or (host_cpu() if config.ON_ARM else "generic")
        features = ",".join(f"{'+' if name in target.features else '-'}{llvms}" for name, *_, llvms in ARM_FEATURES)
    elif not cpu:
        features = ",".join(f"{'+' if on else '-'}{name}" for name, on in _features(target).items())
        plain = target.isa == "generic" and target.machine in X86
        cpu = "x86-64" if plain else host_cpu()
    return architecture().create_target_machine(cpu=cpu, features=features, opt=level, reloc="pic", codemodel="default")


def _features(target: Target) -> dict[str, bool]:
    """Return LLVM's features of the host, with those beyond the target's instruction set switched off."""
    hidden = {
        "avx512": (),
        "avx2": ("avx512", "avx10", "amx"),
        "generic": ("avx", "amx", "fma", "f16c", "vaes", "vpcl", "xop"),
    }
    off = hidden[target.isa] if target.machine in X86 else ()
    return {name: on and not name.startswith(off or "\0") for name, on in host_features().items()}


# With codegen level 0, the first product takes 50 ms less, and no product more: this code runs once a product or part.
# Basic blocks of emulated kernels take level 1: level 0 takes 28 ms for 25 (simt_smem of benchmarks/emulator_speed.py).
_LEVELS = {"pool": 0, "emulated blocks": 1}


def _optimized(target: Target, name: str, text: str) -> tuple[Any, Any]:
    try:
        module = binding.parse_assembly(text, binding.create_context())
        module.verify()
    except RuntimeError as error:
        raise CompileError(f"kernel {name!r}: {error}") from error
    machine = _machine(target, next((level for start, level in _LEVELS.items() if name.startswith(start)), 3))
    module.triple = machine.triple
    # The generators vectorize, unroll and tile. LLVM only has to put stack slots into registers, move loop tests to
    # the end and fold arithmetic. Its -O2 takes 7 times as long and gives the same speed.
    passes = binding.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_simplify_cfg_pass()
    passes.add_loop_rotate_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    options = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options())
    _unlocked("LLVMPY_RunNewModulePassManager")(passes, module, options)
    return machine, module


def _unlocked(name: str) -> Callable[..., Any]:
    """Return a function of llvmlite's library without the lock that llvmlite takes for every call.

    LLVM lets threads compile at the same time in contexts of their own. With the lock, the two images of a first
    product would be compiled one after the other.
    """
    function = getattr(ffi.lib, name)
    return cast("Callable[..., Any]", getattr(function, "_cfn", function))


def emitted(target: Target, name: str, text: str) -> bytes:
    """Return a module as an object file."""
    machine, module = _optimized(target, name, text)
    with ffi.OutputString() as error:
        buffer = _unlocked("LLVMPY_TargetMachineEmitToMemory")(machine, module, 1, error)
        if not buffer:
            raise CompileError(f"kernel {name!r}: {error}")
    try:
        return ctypes.string_at(ffi.lib.LLVMPY_GetBufferStart(buffer), ffi.lib.LLVMPY_GetBufferSize(buffer))
    finally:
        ffi.lib.LLVMPY_DisposeMemoryBuffer(buffer)


def assembly(target: Target, name: str, generate: Callable[[], object]) -> str:
    """Return the machine code of a module as text."""
    machine, module = _optimized(target, name, str(generate()))
    return str(machine.emit_assembly(module))


def linked(target: Target, name: str, text: str) -> dict[str, int]:
    """Load with LLVM's own linker where flat images are not supported (other CPUs, Windows); nothing is cached."""
    machine, module = _optimized(target, name, text)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    workspace.forever(engine)
    return {f.name: engine.get_function_address(f.name) for f in module.functions if not f.is_declaration}
