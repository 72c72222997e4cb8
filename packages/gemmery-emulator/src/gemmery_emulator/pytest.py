"""The fixture `emulate` of pytest: it runs a CUDA kernel without a GPU, and fails the test for faults of the kernel.

    def test_add(emulate):
        run = emulate(KERNEL, "add", 4, 256, [x, y, z], bank_conflicts=0, bytes_a_sector=32)

pytest loads it by itself once gemmery is installed.
"""

# No `from __future__ import annotations` here: help() would show annotations as strings.

from collections.abc import Callable, Iterator
from inspect import signature
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest

from gemmery.errors import ArgumentError, GemmeryError

if TYPE_CHECKING:
    from gemmery_emulator.counters.counts import Counts
    from gemmery_emulator.findings import Finding
    from gemmery_emulator.kernels.kernel_run import KernelRun

WORST = 3  # lines that a message shows


class Emulate:
    """Runs kernels for one test, and fails it for what its limits do not allow."""

    def __call__(
        self,
        *args: Any,
        findings: int = 0,
        warnings: int = -1,
        bank_conflicts: int | None = None,
        bytes_a_sector: float | None = None,
        divergent_branches: int | None = None,
        **options: Any,
    ) -> "KernelRun":
        """Run a kernel as `gemmery.emulate` does, and return its run.

        The test fails with more `findings`, `warnings`, `bank_conflicts` or `divergent_branches` than these, and where
        loads and stores of global memory use fewer than `bytes_a_sector` of the 32 bytes of a sector on average; the
        message shows the lines. -1 findings or warnings are any number. A warning is what need not be a fault: the
        compiler's, equal stores in no order, a barrier that threads skip, elements that nobody wrote.
        """
        __tracebackhide__ = True
        from gemmery_emulator.kernels.kernel import emulate

        for name, limit, least in (("findings", findings, -1), ("warnings", warnings, -1)):
            _check_count(name, limit, least)
        for name, most in (("bank_conflicts", bank_conflicts), ("divergent_branches", divergent_branches)):
            _check_count(name, 0 if most is None else most, 0)
        used: Any = bytes_a_sector
        if used is not None and not (isinstance(used, int | float) and 0 <= used <= 32):
            raise ArgumentError(f"bytes_a_sector={bytes_a_sector!r}: pass a number from 0 to 32, or None for no limit")
        try:
            signature(emulate).bind(*args, **options)
            run = emulate(*args, **options)
        except TypeError as error:
            raise TypeError(f"emulate(): {error}") from None
        except GemmeryError as error:
            raise error.with_traceback(None) from None
        complaints = [
            *_faults(run, "findings", run.findings, findings),
            *_faults(run, "warnings", run.warnings, warnings),
            *_beyond(run, ("bank conflict", "bank conflicts"), bank_conflicts, attrgetter("shared.bank_conflicts")),
            *_bytes(run, bytes_a_sector),
            *_beyond(
                run, ("divergent branch", "divergent branches"), divergent_branches, attrgetter("divergent_branches")
            ),
        ]
        if complaints:
            pytest.fail("\n".join([f"kernel {run.kernel}:", *complaints]), pytrace=False)
        return run


@pytest.fixture
def emulate() -> Emulate:
    """Run a CUDA kernel as gemmery.emulate does; the test fails for findings, and for counters beyond its limits."""
    return Emulate()


def _check_count(name: str, limit: Any, least: int) -> None:
    if not isinstance(limit, int) or limit < least:
        ways = "0, or -1 for any number" if least < 0 else "0, or None for no limit"
        raise ArgumentError(f"{name}={limit!r}: pass a whole number >= {ways}")


def _counted(count: int, singular: str, plural: str, most: int) -> str:
    """How many there are, and how many may be."""
    return (
        f"{count:,} {singular if count == 1 else plural}, and at most {most:,} {'is' if most == 1 else 'are'} allowed:"
    )


def _faults(run: "KernelRun", called: str, faults: "tuple[Finding, ...]", most: int) -> Iterator[str]:
    if 0 <= most < len(faults):
        yield _counted(len(faults), called.removesuffix("s"), called, most)
        yield from (f"  {_code(run, str(fault.line))}  {fault}" for fault in faults)


def _beyond(
    run: "KernelRun", called: tuple[str, str], most: int | None, count: Callable[["Counts"], int]
) -> Iterator[str]:
    """What to say of a count that is larger than its limit."""
    if most is not None and count(run.counts) > most:
        yield _counted(count(run.counts), *called, most)
        yield from _worst(run, count)


def _bytes(run: "KernelRun", least: float | None) -> Iterator[str]:
    sectors = run.global_.sectors
    if least is not None and sectors and run.global_.used < least * sectors:
        used = run.global_.used / sectors
        yield f"{used:.3g} of the 32 bytes of a sector of global memory are used, and {least:g} are asked for:"
        yield from _worst(run, lambda counts: 32 * counts.global_.sectors - counts.global_.used, "unused bytes")


def _worst(run: "KernelRun", cost: Callable[["Counts"], int], unit: str = "") -> Iterator[str]:
    """The costliest lines with their code."""
    costs: list[tuple[int, str]] = [(cost(counts), str(line)) for line, counts in run.lines.items()]
    for value, line in sorted(costs, reverse=True)[:WORST]:
        if value:
            yield f"  {line}: {value:,}{f' {unit}' if unit else ''}  {_code(run, line)}"


def _code(run: "KernelRun", line: str) -> str:
    file, _, number = line.rpartition(":")
    texts = run.drawable.texts if run.drawable else {}
    lines = texts.get(file, "").splitlines()
    return lines[int(number) - 1].strip() if 0 < int(number) <= len(lines) else ""
