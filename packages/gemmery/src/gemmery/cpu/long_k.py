"""How every kernel cuts a long k: sums of blocks of k are added apart, so that no chain of additions is long.

A chain of k additions may lose k roundings of the whole sum. Here one chain adds the products of a block of k, a second
one the sums of `FAN` blocks, a third one those sums, each in the order of k. The kernels that add element by element
(packed, direct, streamed, gemv down the columns of A) cut k at the same places, so all give an element the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

from gemmery.cpu.ir import Function, Module, Value
from gemmery.cpu.ir_types import SIZES, vector
from gemmery.cpu.target import FAN


def even(f: Function, total: Value, most: Value | int, unit: Value | int = 1) -> Value:
    """Return the size of blocks, at least 1: `total` if that is at most `most`, else as `build.even` divides it."""
    size, most = f.var(f.max(total, 1)), f.index(most)
    with f.if_(most < total):
        count = (total + (most - 1)) // most
        each = (total + (count - 1)) // count
        size.value = (each + (f.index(unit) - 1)) // f.index(unit) * unit
    return size.value


def in_order(
    f: Function, first: Value, x: tuple[Value, int], y: tuple[Value, int]
) -> tuple[tuple[Value, Value], tuple[Value, Value]]:
    """Return the (stop, step) of two nested loops: x outside when `first`, else y."""
    (x_stop, x_step), (y_stop, y_step) = ((stop, f.index(step)) for stop, step in (x, y))
    outer = f.select(first, x_stop, y_stop), f.select(first, x_step, y_step)
    return outer, (f.select(first, y_stop, x_stop), f.select(first, y_step, x_step))


def define_fold(module: Module, element: str) -> None:
    """Define `fold(lines, source, to, first)`: add `lines` vectors of sums to others, or store the first, and clear."""
    lanes = module.target.lanes(SIZES[element])
    wide, apart = vector(lanes, element), lanes * SIZES[element]
    params = (("i64", "lines"), "source", "to", ("i1", "first"))
    with module.function("fold", *params, local=True) as f, f.loop(0, f["lines"]) as i:
        total = f.var(f.load(wide, f["source"] + i * apart))
        with f.if_(f["first"] ^ True):
            total.value = f.load(wide, f["to"] + i * apart) + total.value
        f.store(total.value, f["to"] + i * apart)
        f.store(f.zero(wide), f["source"] + i * apart)


def in_levels(
    f: Function, k: Value, block: Value, sums: Value, apart: Value, lines: Value, add: Callable[[Value, Value], None]
) -> Value:
    """Run `add(p, stop)` for each block of k, which adds its products to `sums`; returns where all sums are.

    The sums of the second and the third chain, `lines` vectors each, are `apart` and 2 * `apart` bytes after `sums`.
    """
    run = block * FAN
    second, third = sums + apart, sums + apart * 2
    with f.loop(0, k, run) as q:
        end = f.min(k, q + run)
        with f.loop(q, end, block) as p:
            add(p, f.min(end, p + block))
            with f.if_(k > block):
                f.call("fold", lines, sums, second, p.equals(q))
        with f.if_(k > run):
            f.call("fold", lines, second, third, q.equals(0))
    return f.select(k > run, third, f.select(k > block, second, sums))
