"""How a product of float32 in parts is computed, for the numbers in its operands: the words of `explain`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gemmery.api import device_memory
from gemmery.api.prepared import PreparedLaunch, alone, operand_views
from gemmery.arrays import View
from gemmery.cuda import driver, ordered
from gemmery.ladder import float32_bounds, float32_pre_pass


@dataclass(frozen=True)
class Float32Scheme:
    """The method that multiplies these operands, the guard's verdict about them, and the error bound of an element."""

    name: str  # "fp16x3", "bf16x6", "paired" (bf16x6 with sums in two numbers) or "float32"
    verdict: str  # "" where no numbers decide
    formula: str  # f(k) of the bound f(k) u |A| |B|, u = 2^-24
    bound: float  # f of this k

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What `explain` prints."""
        guard = [("guard", self.verdict)] if self.verdict else []
        error = f"at most f(k) u |A| |B| in each element, u = 2^-24, f(k) = {self.formula}: {self.bound:.4g} for this k"
        return [("scheme", f"{self.name}: {_METHODS[self.name]}"), *guard, ("error", error)]


_METHODS = {
    "fp16x3": "two halves for each float32, three products on tensor cores",
    "bf16x6": "three bfloat16 for each float32, six products on tensor cores",
    "paired": "three bfloat16 for each float32, six products on tensor cores, sums in two numbers",
    "float32": "CUDA cores",
}
_FORMULAS: dict[str, tuple[Callable[[int], float], str]] = {
    "fp16x3": (float32_bounds.two_parts, "8 + 1.01 (42 + ceil(k / 64) + 0.0013 k) + 3/8 k"),
    "bf16x6": (float32_bounds.three_parts, "2.1 + 0.68 c + 1.01 ceil(k / c), c = 64, or 16 below k = 128"),
    "paired": (float32_bounds.pairs, "25 + (k / 32)^2 2^-25"),
    "float32": (float, "k"),
}
_ENOUGH = "two halves will do: no element is too small for them"
_INEXACT = "an element is too small for two halves beside the largest of its row or column: it takes three bfloat16"
_NOT_FINITE = "an operand has Inf or NaN: CUDA cores multiply"


def scheme(x: View, y: View, prepared: PreparedLaunch) -> Float32Scheme | None:
    """Return how float32 operands on a device are multiplied in parts; None where the precision asks for no parts.

    The pre-pass of the product runs on the operands, and its verdict comes back: this waits for the device.
    """
    plan, problem, form, _ = prepared
    if not problem.precision.startswith("f32_"):
        return None
    name, verdict = plan.rung.name.partition("split_")[2] or "float32", ""
    if name == "fp16x3":
        statuses = [
            judged(x.pointer + first, y.pointer + second, x.stream, prepared) for first, second, _ in form.offsets()
        ]
        if all(status == 0 for status in statuses):
            verdict = _ENOUGH
        elif any(status & float32_pre_pass.NOT_FINITE for status in statuses):
            name, verdict = "float32", _NOT_FINITE
        else:
            name, verdict = "bf16x6", _INEXACT
    bound, formula = _FORMULAS[name]
    return Float32Scheme(name, verdict, formula, bound(problem.k))


def judged(a: int, b: int, stream: int, prepared: PreparedLaunch) -> int:
    """Return what the pre-pass says of these operands: float32_pre_pass.INEXACT and NOT_FINITE, or 0."""
    _, problem, form, run = prepared
    ordinal = device_memory.ordinal(View(0, (), (), "f32", problem.device))
    launches = float32_pre_pass.judging(problem.by_rows())
    scratch = ordered.Scratch(run.workspace, stream, ordinal)
    judge = alone(launches, problem, *operand_views(form, problem, None)[:3])
    judge(a, b, 0, stream, 0, scratch.pointer)
    driver.synchronize(ordinal)
    return int.from_bytes(ordered.fetch(scratch.pointer, 4, ordinal), "little")
