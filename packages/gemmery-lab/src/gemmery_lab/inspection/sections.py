"""An inspection in words, or two side by side: sections of facts and tables, which a terminal and a page lay out."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple

from gemmery import dtypes
from gemmery.cpu.assembly import kinds
from gemmery.cuda.roofline import Roofline
from gemmery.cuda.sass import arithmetic, bytes_each, is_notable, multiply_adds, on_tensor_cores, ordered
from gemmery_emulator.kernels import counters
from gemmery_emulator.kernels.counters import SOURCE, EmulatorCounts, Row, Section, marked, number_rows
from gemmery_emulator.pages import numerals
from gemmery_lab.inspection.records import (
    AnyInspection,
    AnyPair,
    CompiledLaunch,
    CpuInspection,
    CpuSideBySide,
    Inspection,
    SideBySide,
    roof_seconds,
    size,
)
from gemmery_lab.report import words

MOST_PTX = 12  # opcodes of PTX that are shown where there is no SASS
WAIT = "WARPGROUP.DEPBAR"


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
    blocks, sides = math.prod(kernel.grid), [str(side) for side in kernel.block if side > 1]
    threads = numerals.plural(math.prod(kernel.block), "thread")
    threads = f"{' × '.join(sides)} = {threads}" if len(sides) > 1 else threads
    spills = f"{kernel.spilled} bytes a thread spilled to memory" if kernel.spilled else "no spills"
    stack = f", {kernel.stack} bytes of local memory" if kernel.stack else ""
    total = kernel.static_shared + kernel.dynamic_shared
    shared = (
        f"{numerals.size(total)} a block: {kernel.static_shared:,} bytes static, {kernel.dynamic_shared:,} dynamic; "
        f"a block may have {numerals.size(limits.shared)}"
    )
    scratch = inspection.workspace if kernel is inspection.kernels[-1] else 0
    allowed = ", ".join(f"{name} {number}" for name, number in filled.limits.items())
    share = numerals.percent(filled.tail)  # of the device that the last wave of blocks fills
    waves = f"1: {blocks:,} of the {filled.slots:,} blocks that run at a time, {share} of the device"
    if blocks > filled.slots:
        each = f"{numerals.digits(filled.waves)} of {filled.slots:,} blocks"
        waves = f"{each}; the last fills {share} of the device, all together {numerals.percent(filled.filled)}"
    warps = f"{filled.warps} of {filled.most_warps} warps a multiprocessor, {numerals.percent(filled.share)}"
    return (
        ("kernel", kernel.name),
        ("grid", f"{numerals.plural(blocks, 'block')} of {threads}"),
        ("registers", f"{kernel.registers} a thread, {spills}{stack}"),
        *([("registers by role", _roles(kernel.roles))] if kernel.roles else []),
        *([("cluster", f"{kernel.cluster} blocks")] if kernel.cluster > 1 else []),
        *([("products", _products(kernel))] if _of_warpgroups(kernel.counts) else []),
        ("shared memory", shared if total else "none"),
        *([("scratch memory", numerals.size(scratch))] if scratch else []),
        ("occupancy", f"{warps}: {numerals.plural(filled.blocks, 'block')}, limited by {' and '.join(filled.by)}"),
        ("blocks allowed", f"by {allowed}"),
        ("waves", waves),
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
    waits = [numerals.plural(x.get(WAIT, 0), "wait") for _, x in columns]
    texts = [f"{_of_warpgroups(x):,} in the {at} with {wait}" for (at, x), wait in zip(columns, waits, strict=True)]
    loop = kernel.loop or kernel.counts
    serial = 1 < _of_warpgroups(loop) <= loop.get(WAIT, 0)
    return f"wgmma, {', '.join(texts)}" + (": each ends before the next begins" if serial else "")


def _of_warpgroups(counts: Mapping[str, int]) -> int:
    """The products of warpgroups among counted instructions: HGMMA, QGMMA, IGMMA."""
    return sum(number for name, number in counts.items() if name.partition(".")[0].endswith("GMMA"))


def _roofline(inspection: Inspection) -> Section:
    device, loads, once = inspection.device, inspection.loads, inspection.once
    each = round(loads.peak / device.sms / device.clock)
    units = f"{device.sms} multiprocessors × {each} operations a clock × {device.clock:.4g} GHz"
    wide, (bm, bn) = dtypes.get(inspection.problem.dtype).size, inspection.tile
    loading = f"A once for each {bn} columns of C, B once for each {bm} rows, {_moved(loads)}"
    if (bm, bn) == (1, 1):
        loading = f"2 loads for every multiply-add, {2 * wide} bytes for 2 operations"
    rows = (
        ("peak", f"{units} = {numerals.digits(loads.peak)} GFLOP/s ({words.UNITS[inspection.unit]})"),
        ("as it loads", f"{loading}: {_attainable(loads)}"),
        ("each element once", f"{_moved(once)}: {_attainable(once)}"),
    )
    in_parts = inspection.problem.dtype in ("f32", "f64") and inspection.unit in ("tensor", "tensor_8")
    return Section("Roofline", rows, notes=(words.NOTES["roofline"], *([words.NOTES["parts"]] if in_parts else [])))


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
    loop, note = kernel.step or kernel.loop, tuple[str, ...]()
    sizes = {} if on_tensor_cores(loop) else {space: bytes_each(loop, space) for space in ("global", "shared")}
    if amounts := [f"{numerals.digits(size)} bytes of {space} memory" for space, size in sizes.items() if size]:
        note = (f"In the main loop a thread loads {' and '.join(amounts)} for each multiply-add.",)
    return Section(title, tuple(rows), ("kind", *columns), note)


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
    return [Section("Barriers of the first block", rows, notes=(words.NOTES["barriers"],))]


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
    costs, each_core = "For 1,000 multiply-adds, on one core", ("", "number", "assumed rate", "cycles")
    return (
        Section("Loops", lines, ("line", SOURCE)),
        Section(costs, tuple(rows), each_core, (words.NOTES["costs"],)),
        Section("For 1,000 multiply-adds, in a model of the caches", tuple(traffic), head, (words.NOTES["caches"],)),
        Section(f"Inner loop of {inspection.function}{passes}", tuple(loop), ("line", "what it is", SOURCE)),
    )


def notes(inspection: Inspection, counts: EmulatorCounts) -> tuple[str, ...]:
    """What the columns are; instructions by kind; the roofs, the longest first."""
    times = sorted(roof_seconds(inspection).items(), key=lambda item: -item[1])
    limits = ", ".join(f"{name} {numerals.digits(seconds * 1e6)} µs" for name, seconds in times)
    roof = (f"Roofs of these counts on a full device: {limits}. {words.NOTES['roofs']}",) if limits else ()
    return counters.NOTE, counters.by_kind(counts), *roof


ROOFS = ("compute", "memory", "shared", "issue", "roof")  # costs, too


def glance(pair: AnyPair) -> str:
    """The costs that differ, in a sentence: "Bank conflicts 12,288 → 0; sectors 8,192 → 6,144, 0.750×."."""
    before, after = pair.old.emulated, pair.new.emulated
    both = [f"{size(x, x.exhibit)}, {x.problem.precision or x.problem.dtype}" for x in (pair.old, pair.new)]
    if both[0] != both[1]:
        return f"Different products, so the counts do not compare: {both[0]}, and {both[1]}."
    if isinstance(pair, CpuSideBySide):
        numbers, times = _costs(pair)
        rows = [row for row in (*numbers.rows, times.rows[-1]) if row[3:] not in ((), ("",))]
        each = "; ".join(f"{name} {old} → {new}, {ratio}" for name, old, new, ratio in rows)
        return f"For 1,000 multiply-adds: {each} cycles." if rows else ""
    if not before or not after:
        return ""
    changes = []
    for name in counters.COSTS:
        old, new = getattr(before.total, name), getattr(after.total, name)
        if old != new:
            ratio = f", {numerals.times(new / old)}" if old and new else ""
            changes.append(f"{counters.COUNTS[name]} {old:,} → {new:,}{ratio}")
    text = "; ".join(changes) or "the counters are the same"
    old_roofs, new_roofs = roof_seconds(pair.old), roof_seconds(pair.new)
    if old_roofs and new_roofs:
        old, new = max(old_roofs.values()), max(new_roofs.values())
        first, second = (numerals.digits(1e6 * seconds) for seconds in (old, new))
        text += f"; roof {first} → {second} µs, {numerals.times(new / old)}" if first != second else ""
    return f"{text[0].upper()}{text[1:]}."


def differences(pair: AnyPair) -> tuple[Section, ...]:
    """Counters and roofs where both rungs were emulated, launches, instructions; or costs and loops of CPU rungs."""
    if isinstance(pair, CpuSideBySide):
        return _costs(pair)
    before, after = pair.old.emulated, pair.new.emulated
    old, new = (dict(launch_facts(rung.kernels[-1], rung)) for rung in (pair.old, pair.new))
    if pair.old.config or pair.new.config:
        old, new = {"config": configured(pair.old), **old}, {"config": configured(pair.new), **new}
    facts = [(name, old.get(name, ""), new.get(name, "")) for name in dict.fromkeys([*old, *new])]
    result = [_both_counters(pair), _roofs(pair), _section(pair, "Launch", facts), _machine(pair), _both_barriers(pair)]
    if before and after:
        result.append(_section(pair, "Instructions executed, by kind", number_rows(before.kinds, after.kinds)))
    return tuple(section for section in result if section)


def _costs(pair: CpuSideBySide) -> tuple[Section, ...]:
    """What 1,000 multiply-adds of two CPU rungs need, in numbers and in cycles."""
    both = pair.old, pair.new
    old, new = ({name: cost.count for name, cost in rung.costs.items()} for rung in both)
    slow, fast = ({name: cost.cycles for name, cost in rung.costs.items()} for rung in both)
    slow["roof"], fast["roof"] = max(slow.values()), max(fast.values())
    number, time = "For 1,000 multiply-adds", "The least cycles for these, at assumed rates"
    numbers = _section(pair, number, number_rows(old, new), f"{words.NOTES['costs']} {words.NOTES['caches']}", old)
    return numbers, _section(pair, time, number_rows(slow, fast), costs=slow)


def _section(pair: AnyPair, title: str, rows: Iterable[Row], note: str = "", costs: Collection[str] = ()) -> Section:
    return marked((pair.old.rung, pair.new.rung), title, rows, note, costs)


def _both_counters(pair: SideBySide) -> Section | None:
    """The counters of both, or the reason why one of them has none."""
    before, after = pair.old.emulated, pair.new.emulated
    if not before or not after:
        reasons = [(rung.rung, rung.not_emulated, "") for rung in (pair.old, pair.new) if rung.not_emulated]
        return _section(pair, "Not counted", reasons) if reasons else None
    place = f"at {size(before, pair.old.exhibit)}, on the emulator"
    return counters.counts_section((pair.old.rung, pair.new.rung), f"Counters, {place}", before, after)


def _roofs(pair: SideBySide) -> Section | None:
    """The roofs of both in microseconds, and the longest of each."""
    old, new = ({name: 1e6 * time for name, time in roof_seconds(rung).items()} for rung in (pair.old, pair.new))
    if not old or not new:
        return None
    first, second = (max(times, key=lambda name: times[name]) for times in (old, new))
    rows = number_rows({**old, "roof": old[first]}, {**new, "roof": new[second]})
    title = "Roofs of these counts on a full device, µs"
    return _section(pair, title, (*rows, ("limit", first, second, "")), words.NOTES["roofs"], costs=ROOFS)


def _machine(pair: SideBySide) -> Section | None:
    """Machine instructions of both main loops for the same number of multiply-adds, or of the whole kernels."""
    kernels = pair.old.kernels[-1], pair.new.kernels[-1]
    loops = [kernel.step or kernel.loop for kernel in kernels]
    adds = [multiply_adds(loop) for loop in loops]
    if not all(adds):
        old, new = (kernel.counts for kernel in kernels)
        whole = "Machine instructions of the whole kernel"
        return _section(pair, whole, number_rows(old, new)) if old and new else None
    span = max(adds)
    scaled = [{name: n * span / own for name, n in loop.items()} for loop, own in zip(loops, adds, strict=True)]
    kinds = [{name: n for name, n in loop.items() if arithmetic({name: 1})} for loop in scaled]
    (name, number), *others = kinds[0].items()
    same = f"{number:,.0f} {name}" if kinds[0] == kinds[1] and not others else f"{span:,} multiply-adds of a warp"
    note = f"Both columns count the main loop over {same}, so that loops of different length compare."
    if names := [kernel.name.partition("<")[0] for kernel in kernels if not kernel.step]:
        note += f" The loop around that of {' and '.join(names)} is left out."
    notable = [name for name in ordered({**scaled[0], **scaled[1]}) if is_notable(name)]
    grouped = [{name: loop.get(name, 0) for name in notable} for loop in scaled]
    for group, loop in zip(grouped, scaled, strict=True):
        group["others"] = sum(loop.values()) - sum(group.values())
    rows = number_rows(grouped[0], grouped[1])
    return _section(pair, f"Machine instructions of the main loop per {same}", rows, note)


def _both_barriers(pair: SideBySide) -> Section | None:
    """What the first blocks do at their mbarriers, where both kernels have some."""
    timelines = [run.emulated.chosen.timeline if run.emulated else None for run in (pair.old, pair.new)]
    texts = words.WORDS["at_barriers"].items()
    counts = [{text: timeline.counts[name] for name, text in texts} for timeline in timelines if timeline]
    if len(counts) < 2:
        return None
    old, new = counts
    return _section(pair, "Barriers of the first block", number_rows(old, new), words.NOTES["barriers"])
