"""An inspection in words: sections of facts and tables, which a terminal and a page lay out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple

from gemmery import dtypes
from gemmery.cpu.assembly import kinds
from gemmery.cuda.roofline import Occupancy, Roofline
from gemmery.cuda.sass import bytes_each, is_notable, on_tensor_cores
from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.exhibits import EXHIBITS
from gemmery_emulator.kernels import counters
from gemmery_emulator.kernels.counters import SOURCE, EmulatorCounts, Section
from gemmery_emulator.pages import numerals
from gemmery_lab.inspection.records import AnyInspection, CompiledLaunch, CpuInspection, Inspection, roof_seconds, size
from gemmery_lab.report import words

MOST_PTX = 12  # opcodes of PTX that are shown where there is no SASS
ROOFLINE_NOTE = (
    "As it loads counts every load of A and B as one from memory; each element once is what perfect caches would "
    "leave. Caches keep a kernel between the two. The clock is the boost clock; power limits may lower it."
)
PARTS_NOTE = (
    "The kernel multiplies parts of the elements on tensor cores: one operation of the product takes several of theirs."
)
WAIT = "WARPGROUP.DEPBAR"
BARRIERS_NOTE = (
    "Of a product of a tile or two for the block, on the emulator, whose order of steps decides how many waits find a "
    "phase under way; --html and --svg draw them over time."
)
ROOFS_NOTE = (
    "Memory: sectors at its bandwidth, without caches. Compute: operations at the peak. Shared: 1 wavefront per clock "
    "and multiprocessor, issue: 4 warp instructions."
)
COSTS_NOTE = (
    "Loads, stores and multiply-adds are those of the inner loop as compiled; lines and pages are those of the whole "
    "product in the model of the caches. The roof is the longest of these times: no core with the assumed rates is "
    "faster, unless its prefetchers bring lines before they are needed."
)
CACHES_NOTE = (
    "Simulated: in a copy of the kernel, each access looks up its lines in L1 and L2, of which a set loses the line "
    "that was used longest ago, and its page in a table of 64 translations of 4 KiB; to L1, to L2 and pages count what "
    "was not there. All are empty at first. Hardware prefetchers, which a real core has, bring the same lines earlier; "
    "lines written back are not counted."
)


def sections(inspection: AnyInspection) -> tuple[Section, ...]:
    """The sections: each launch, the roofline, the instructions, the counters by line; or those of a CPU rung."""
    if isinstance(inspection, CpuInspection):
        return _of_cpu(inspection)
    kernels = inspection.kernels
    several = len(kernels) > 1
    launches = [
        Section(f"Launch {place} of {len(kernels)}" if several else "Launch", launch_facts(kernel, inspection))
        for place, kernel in enumerate(kernels, 1)
    ]
    roof = [] if inspection.exhibit else [_roofline(inspection)]
    instructions = [_instructions(kernel, several) for kernel in kernels]
    return (*launches, *roof, *instructions, *_barriers(inspection), *_counters(inspection))


def codes(inspection: AnyInspection, ptx: bool = True, sass: bool = True) -> list[tuple[str, str]]:
    """Titles and texts of the code of every launch, or of a CPU rung's module."""
    texts = []
    if isinstance(inspection, CpuInspection):
        both = (("LLVM IR", inspection.ir, ptx), ("Assembly", inspection.assembly, sass))
        return [(f"{title} of {inspection.rung}", text) for title, text, is_shown in both if is_shown]
    for kernel in inspection.kernels:
        texts += [(f"PTX of {kernel.name}", kernel.ptx)] if ptx else []
        texts += [(f"SASS of {kernel.name}", kernel.sass or kernel.missing)] if sass else []
    return texts


def lesson(name: str) -> str:
    """What a reader learns from a rung or an exhibit."""
    lessons = {rung.name: rung.lesson for rung in (*CPU, *CUDA)} | {
        exhibit.name: exhibit.lesson for exhibit in EXHIBITS
    }
    return lessons.get(name, "")


def subject(inspection: AnyInspection, config: bool = True) -> str:
    """The product, the config and the device in a line."""
    problem = inspection.problem
    columns = ", B by columns" if problem.b_layout == "col" else ""
    shape = f"{size(inspection, inspection.exhibit)}, {problem.precision or problem.dtype}{columns}"
    settings = f", {configured(inspection)}" if config and inspection.config else ""
    if isinstance(inspection, CpuInspection):
        return f"{shape}{settings}; one core of {inspection.cpu}"
    device = inspection.device
    limits = f"{device.sms} multiprocessors at {device.clock:.4g} GHz, {numerals.digits(device.bandwidth)} GB/s"
    return f"{shape}{settings}; {device.name}: {device.arch}, {limits}"


def configured(inspection: AnyInspection) -> str:
    """Its config: "bm 128, bn 64"."""
    return ", ".join(f"{key} {value}" for key, value in inspection.config.items())


def launch_facts(kernel: CompiledLaunch, inspection: Inspection) -> tuple[tuple[str, str], ...]:
    """The facts of one launch of an inspection."""
    limits, filled = inspection.device.limits, kernel.occupancy
    blocks = math.prod(kernel.grid)
    spills = f"{kernel.spilled} bytes a thread spilled to memory" if kernel.spilled else "no spills"
    stack = f", {kernel.stack} bytes of local memory" if kernel.stack else ""
    total = kernel.static_shared + kernel.dynamic_shared
    shared = (
        f"{numerals.size(total)} a block: {kernel.static_shared:,} bytes static, {kernel.dynamic_shared:,} dynamic; "
        f"a block may have {numerals.size(limits.shared)}"
    )
    scratch = inspection.workspace if kernel is inspection.kernels[-1] else 0
    allowed = ", ".join(f"{name} {number}" for name, number in filled.limits.items())
    warps = f"{filled.warps} of {filled.most_warps} warps a multiprocessor, {numerals.percent(filled.share)}"
    return (
        ("kernel", kernel.name),
        ("grid", f"{numerals.plural(blocks, 'block')} of {_threads(kernel.block)}"),
        ("registers", f"{kernel.registers} a thread, {spills}{stack}"),
        *([("registers by role", _roles(kernel.roles))] if kernel.roles else []),
        *([("cluster", f"{kernel.cluster} blocks")] if kernel.cluster > 1 else []),
        *([("products", _products(kernel))] if _of_warpgroups(kernel.counts) else []),
        ("shared memory", shared if total else "none"),
        *([("scratch memory", numerals.size(scratch))] if scratch else []),
        ("occupancy", f"{warps}: {numerals.plural(filled.blocks, 'block')}, limited by {' and '.join(filled.by)}"),
        ("blocks allowed", f"by {allowed}"),
        ("waves", _waves(blocks, filled)),
    )


def _roles(registers: tuple[int, ...]) -> str:
    """The registers that warpgroups give away and take.

    >>> _roles((40, 232))
    '40 and 232 a thread, which warpgroups set themselves (setmaxnreg)'
    """
    return f"{' and '.join(map(str, dict.fromkeys(registers)))} a thread, which warpgroups set themselves (setmaxnreg)"


def _products(kernel: CompiledLaunch) -> str:
    """The products of warpgroups in the code, and whether they are under way together."""
    columns = [("kernel", kernel.counts)] + ([("main loop", kernel.loop)] if kernel.loop else [])
    texts = [
        f"{_of_warpgroups(x):,} in the {where} with {numerals.plural(x.get(WAIT, 0), 'wait')}" for where, x in columns
    ]
    loop = kernel.loop or kernel.counts
    serial = 1 < _of_warpgroups(loop) <= loop.get(WAIT, 0)
    return f"wgmma, {', '.join(texts)}" + (": each ends before the next begins" if serial else "")


def _of_warpgroups(counts: Mapping[str, int]) -> int:
    """The products of warpgroups among counted instructions: HGMMA, QGMMA, IGMMA."""
    return sum(number for name, number in counts.items() if name.partition(".")[0].endswith("GMMA"))


def _threads(block: tuple[int, int, int]) -> str:
    sides = [str(side) for side in block if side > 1]
    threads = numerals.plural(math.prod(block), "thread")
    return f"{' × '.join(sides)} = {threads}" if len(sides) > 1 else threads


def _waves(blocks: int, filled: Occupancy) -> str:
    """How often the grid fills the device, and how full the last wave is."""
    share = numerals.percent(filled.tail)
    if blocks <= filled.slots:
        return f"1: {blocks:,} of the {filled.slots:,} blocks that run at a time, {share} of the device"
    each = f"{numerals.digits(filled.waves)} of {filled.slots:,} blocks"
    return f"{each}; the last fills {share} of the device, all together {numerals.percent(filled.filled)}"


def _roofline(inspection: Inspection) -> Section:
    device, loads, once = inspection.device, inspection.loads, inspection.once
    each = round(loads.peak / device.sms / device.clock)
    units = f"{device.sms} multiprocessors × {each} operations a clock × {device.clock:.4g} GHz"
    rows = (
        ("peak", f"{units} = {numerals.digits(loads.peak)} GFLOP/s ({words.UNITS[inspection.unit]})"),
        ("as it loads", f"{_loading(inspection)}: {_attainable(loads)}"),
        ("each element once", f"{_moved(once)}: {_attainable(once)}"),
    )
    in_parts = inspection.problem.dtype in ("f32", "f64") and inspection.unit in ("tensor", "tensor_8")
    return Section("Roofline", rows, notes=(ROOFLINE_NOTE, *([PARTS_NOTE] if in_parts else [])))


def _loading(inspection: Inspection) -> str:
    size, (bm, bn) = dtypes.get(inspection.problem.dtype).size, inspection.tile
    if (bm, bn) == (1, 1):
        return f"2 loads for every multiply-add, {2 * size} bytes for 2 operations"
    return f"A once for each {bn} columns of C, B once for each {bm} rows, {_moved(inspection.loads)}"


def _attainable(line: Roofline) -> str:
    """The arithmetic of one roof in words.

    >>> from gemmery.cuda.roofline import roofline
    >>> _attainable(roofline(2, 8, peak=346.5, bandwidth=86.4))
    '0.250 operations a byte × 86.4 GB/s = 21.6 GFLOP/s attainable, limited by memory'
    """
    product = f"{numerals.digits(line.intensity)} operations a byte × {numerals.digits(line.bandwidth)} GB/s"
    by_memory = f"{numerals.digits(line.intensity * line.bandwidth)} GFLOP/s"
    if line.by == "memory":
        return f"{product} = {by_memory} attainable, limited by memory"
    return f"{product} = {by_memory}, above the peak: {numerals.digits(line.attainable)} GFLOP/s attainable"


def _moved(line: Roofline) -> str:
    return f"{numerals.amount(line.bytes, 'B')} for {numerals.amount(line.flops, 'FLOP')}"


def _instructions(kernel: CompiledLaunch, several: bool) -> Section:
    title = f"Instructions of {kernel.name.partition('<')[0]}" if several else "Instructions"
    if kernel.missing:
        opcodes = tuple((name, f"{number:,}") for name, number in list(kernel.ptx_counts.items())[:MOST_PTX])
        return Section(f"{title}, PTX", opcodes, ("opcode", "kernel"), (kernel.missing,))
    columns = {"kernel": kernel.counts} | ({"main loop": kernel.loop} if kernel.loop else {})
    if kernel.passes > 1:
        columns[f"step: {kernel.passes} passes of it"] = kernel.step
    rows = [(name, *(f"{x.get(name, 0):,}" for x in columns.values())) for name in kernel.counts if is_notable(name)]
    others = [sum(number for name, number in x.items() if not is_notable(name)) for x in columns.values()]
    rows.append(("others", *(f"{number:,}" for number in others)))
    return Section(title, tuple(rows), ("kind", *columns), _loaded(kernel.step or kernel.loop))


def _loaded(loop: Mapping[str, int]) -> tuple[str, ...]:
    """Bytes that the main loop loads for each multiply-add, where CUDA cores do them."""
    if on_tensor_cores(loop):
        return ()
    each = {space: bytes_each(loop, space) for space in ("global", "shared")}
    amounts = [f"{numerals.digits(size)} bytes of {space} memory" for space, size in each.items() if size]
    return (f"In the main loop a thread loads {' and '.join(amounts)} for each multiply-add.",) if amounts else ()


def _barriers(inspection: Inspection) -> list[Section]:
    """What the first block does at its mbarriers, of a kernel that has some."""
    counts = inspection.emulated
    if counts is None or counts.chosen.timeline is None:
        return []
    timeline = counts.chosen.timeline
    of = timeline.counts
    rows = (
        ("ring", numerals.plural(len(timeline.full), "stage")),
        ("tensor copies", f"{of['copies']:,}, {of['bytes']:,} bytes"),
        ("waits", f"{of['waits']:,} of warpgroups, {of['slept']:,} of them while a phase is under way"),
        ("arrivals", f"{of['arrivals']:,} of threads, which end {numerals.plural(of['phases'], 'phase')}"),
        ("products", f"{of['products']:,} of warpgroups"),
    )
    return [Section("Barriers of the first block", rows, notes=(BARRIERS_NOTE,))]


def _counters(inspection: Inspection) -> list[Section]:
    """The counters by line, or why there are none; nothing where they were not requested."""
    counts, missing = inspection.emulated, inspection.not_emulated
    if counts is None:
        return [Section("Counters by line", (("not counted", missing),))] if missing else []
    place = f"at {size(counts, inspection.exhibit)}, on the emulator"
    head, rows = counters.table(counts)
    title = f"Counters by line{counters.of_file(counts)}, {place}"
    return [Section(title, rows, head, notes(inspection, counts))]


def _of_cpu(inspection: CpuInspection) -> tuple[Section, ...]:
    """The loops, what 1,000 multiply-adds need, the accesses to each operand, the inner loop."""
    lines = tuple((str(number), line) for number, line in enumerate(inspection.loops.splitlines(), 1))
    sums = {name: cost.cycles for name, cost in inspection.costs.items()}
    limit = max(sums, key=lambda name: sums[name])
    rows = [(name, numerals.digits(x.count), x.rate, numerals.digits(x.cycles)) for name, x in inspection.costs.items()]
    rows.append((f"roof: {limit}", "", "", numerals.digits(sums[limit])))
    head = ("", "loads", "stores", "prefetches", "to L1", "to L2", "pages")
    each = 1000 / (inspection.problem.flops / 2)
    traffic = [(name, *(numerals.digits(each * x) for x in astuple(own))) for name, own in inspection.operands.items()]
    loop = [(str(number), " + ".join(kinds(line)), line) for number, line in enumerate(inspection.loop, 1)]
    passes = f": {inspection.step} multiply-adds a pass" if inspection.step else ""
    return (
        Section("Loops", lines, ("line", SOURCE)),
        Section(
            "For 1,000 multiply-adds, on one core", tuple(rows), ("", "number", "assumed rate", "cycles"), (COSTS_NOTE,)
        ),
        Section("For 1,000 multiply-adds, in a model of the caches", tuple(traffic), head, (CACHES_NOTE,)),
        Section(f"Inner loop of {inspection.function}{passes}", tuple(loop), ("line", "what it is", SOURCE)),
    )


def notes(inspection: Inspection, counts: EmulatorCounts) -> tuple[str, ...]:
    """What the columns are; instructions by kind; the roofs, the longest first."""
    times = sorted(roof_seconds(inspection).items(), key=lambda item: -item[1])
    limits = ", ".join(f"{name} {numerals.digits(seconds * 1e6)} µs" for name, seconds in times)
    roof = (f"Roofs of these counts on a full device: {limits}. {ROOFS_NOTE}",) if limits else ()
    return counters.NOTE, counters.by_kind(counts), *roof


def untraced(counts: EmulatorCounts) -> str:
    """The reason why there is no picture of a tile."""
    return (
        f"There is no picture of the tile of {' or '.join(counts.chosen.untraced)}: the contents of shared memory are "
        "known only where a kernel stores what it loaded from global memory, unchanged or converted. This one stores "
        "other values."
    )
