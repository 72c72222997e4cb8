"""Two rungs side by side in words: counters, roofs, launches and instructions, with the differences marked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from gemmery.cuda.sass import arithmetic, is_notable, multiply_adds, ordered
from gemmery_emulator.kernels.counters import COSTS, COUNTS, Row, Section, counts_section, marked, number_rows
from gemmery_emulator.pages import numerals
from gemmery_lab.inspection.records import AnyPair, CompiledLaunch, CpuSideBySide, SideBySide, roof_seconds, size
from gemmery_lab.inspection.sections import BARRIERS_NOTE, CACHES_NOTE, COSTS_NOTE, ROOFS_NOTE, configured, launch_facts

AT_BARRIERS = {
    "copies": "tensor copies",
    "bytes": "bytes of these",
    "waits": "waits of warpgroups",
    "slept": "of these while a phase is under way",
    "arrivals": "arrivals of threads",
    "phases": "phases",
    "products": "products of warpgroups",
}
ROOFS = ("compute", "memory", "shared", "issue", "roof")  # costs, too


def title(pair: AnyPair) -> str:
    """The names of both."""
    return f"{pair.old.rung} and {pair.new.rung}"


def glance(pair: AnyPair) -> str:
    """The costs that differ, in a sentence: "Bank conflicts 12,288 → 0; sectors 8,192 → 6,144, 0.750×."."""
    before, after = pair.old.emulated, pair.new.emulated
    if warning := _different_products(pair):
        return warning
    if isinstance(pair, CpuSideBySide):
        numbers, times = _costs(pair)
        rows = [row for row in (*numbers.rows, times.rows[-1]) if row[3:] not in ((), ("",))]
        each = "; ".join(f"{name} {old} → {new}, {ratio}" for name, old, new, ratio in rows)
        return f"For 1,000 multiply-adds: {each} cycles." if rows else ""
    if not before or not after:
        return ""
    changes = []
    for name in COSTS:
        old, new = getattr(before.total, name), getattr(after.total, name)
        if old != new:
            ratio = f", {numerals.times(new / old)}" if old and new else ""
            changes.append(f"{COUNTS[name]} {old:,} → {new:,}{ratio}")
    text = "; ".join(changes) or "the counters are the same"
    old_roofs, new_roofs = roof_seconds(pair.old), roof_seconds(pair.new)
    if old_roofs and new_roofs:
        old, new = max(old_roofs.values()), max(new_roofs.values())
        first, second = (numerals.digits(1e6 * seconds) for seconds in (old, new))
        text += f"; roof {first} → {second} µs, {numerals.times(new / old)}" if first != second else ""
    return f"{text[0].upper()}{text[1:]}."


def _different_products(pair: AnyPair) -> str:
    """A warning where the two were inspected for different products."""
    old, new = (
        f"{size(inspection, inspection.exhibit)}, {inspection.problem.precision or inspection.problem.dtype}"
        for inspection in (pair.old, pair.new)
    )
    return "" if old == new else f"Different products, so the counts do not compare: {old}, and {new}."


def sections(pair: AnyPair) -> tuple[Section, ...]:
    """Counters and roofs where both rungs were emulated, launches, instructions; or costs and loops of CPU rungs."""
    if isinstance(pair, CpuSideBySide):
        return _costs(pair)
    before, after = pair.old.emulated, pair.new.emulated
    old, new = (dict(launch_facts(rung.kernels[-1], rung)) for rung in (pair.old, pair.new))
    if pair.old.config or pair.new.config:
        old, new = {"config": configured(pair.old), **old}, {"config": configured(pair.new), **new}
    facts = [(name, old.get(name, ""), new.get(name, "")) for name in dict.fromkeys([*old, *new])]
    result = [_counters(pair), _roofs(pair), _section(pair, "Launch", facts), _machine(pair), _barriers(pair)]
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
    return (
        _section(pair, number, number_rows(old, new), f"{COSTS_NOTE} {CACHES_NOTE}", costs=old),
        _section(pair, time, number_rows(slow, fast), costs=slow),
    )


def _section(pair: AnyPair, title: str, rows: Iterable[Row], note: str = "", costs: Collection[str] = ()) -> Section:
    return marked((pair.old.rung, pair.new.rung), title, rows, note, costs)


def _counters(pair: SideBySide) -> Section | None:
    """The counters of both, or the reason why one of them has none."""
    before, after = pair.old.emulated, pair.new.emulated
    if not before or not after:
        reasons = [(rung.rung, rung.not_emulated, "") for rung in (pair.old, pair.new) if rung.not_emulated]
        return _section(pair, "Not counted", reasons) if reasons else None
    place = f"at {size(before, pair.old.exhibit)}, on the emulator"
    return counts_section((pair.old.rung, pair.new.rung), f"Counters, {place}", before, after)


def _roofs(pair: SideBySide) -> Section | None:
    """The roofs of both in microseconds, and the longest of each."""
    old, new = ({name: 1e6 * time for name, time in roof_seconds(rung).items()} for rung in (pair.old, pair.new))
    if not old or not new:
        return None
    first, second = (max(times, key=lambda name: times[name]) for times in (old, new))
    rows = number_rows({**old, "roof": old[first]}, {**new, "roof": new[second]})
    title = "Roofs of these counts on a full device, µs"
    return _section(pair, title, (*rows, ("limit", first, second, "")), ROOFS_NOTE, costs=ROOFS)


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
    note += _uncounted(kernels)
    rows = number_rows(*_grouped(scaled[0], scaled[1]))
    return _section(pair, f"Machine instructions of the main loop per {same}", rows, note)


def _barriers(pair: SideBySide) -> Section | None:
    """What the first blocks do at their mbarriers, where both kernels have some."""
    timelines = [run.emulated.chosen.timeline if run.emulated else None for run in (pair.old, pair.new)]
    counts = [{text: timeline.counts[name] for name, text in AT_BARRIERS.items()} for timeline in timelines if timeline]
    if len(counts) < 2:
        return None
    old, new = counts
    return _section(pair, "Barriers of the first block", number_rows(old, new), BARRIERS_NOTE)


def _uncounted(kernels: Iterable[CompiledLaunch]) -> str:
    """A sentence on kernels of which only the main loop is counted."""
    names = [kernel.name.partition("<")[0] for kernel in kernels if not kernel.step]
    return f" The loop around that of {' and '.join(names)} is left out." if names else ""


def _grouped(old: Mapping[str, float], new: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """The kinds that matter in one order for both, and the others together."""
    kinds = [name for name in ordered({**old, **new}) if is_notable(name)]
    first, second = ({name: loop.get(name, 0) for name in kinds} for loop in (old, new))
    return (
        {**first, "others": sum(old.values()) - sum(first.values())},
        {**second, "others": sum(new.values()) - sum(second.values())},
    )
