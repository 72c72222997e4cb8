"""exhibit(): one effect of the hardware, measured over its space next to its parent's kernel, or emulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from gemmery.cuda import driver, nvrtc
from gemmery.cuda.driver import Memory
from gemmery.errors import ArgumentError, RefusedError
from gemmery.ladder.exhibits import EMULATED, EmulatedExhibit, Exhibit, Floats, find, numbers, put
from gemmery.problem import Config
from gemmery_emulator.arguments import bound
from gemmery_emulator.counters import Counters
from gemmery_emulator.findings import Findings
from gemmery_emulator.kernels.programs import prepared
from gemmery_emulator.machine import LaunchConfig
from gemmery_emulator.ptx import PtxKernel
from gemmery_emulator.run import run as run_kernel
from gemmery_lab import asked, measurements
from gemmery_lab.experiments import EXHIBIT
from gemmery_lab.measure.record import Measurement, OnEvent, OnStep, Run, RunSteps, ignore
from gemmery_lab.measure.timing import Contestant
from gemmery_lab.measure.work import Work
from gemmery_lab.on_cuda import Cuda
from gemmery_lab.session import Session

SHARE = 0.3  # seconds for one config and its parent


def exhibit(
    name: str, device: str = "cuda", seconds: float = SHARE, on_event: OnEvent = ignore, store: Path | None = None
) -> Run:
    """Run an exhibit at its default and at every value of its space, check it, and time it next to its parent.

    `config` of a measurement has the varied values, `note` the counts that the rules predict for one launch. Results
    are exact: `error` is 0, or above 1 when an element differs. `seconds` is the time for one config.

    >>> run = exhibit("bank_stride")  # doctest: +SKIP

    Raises ArgumentError for an unknown name or device and for `seconds` <= 0, DeviceError without a device.
    """
    exhibit, gpu = find(name), asked.ordinal(device)
    if gpu is None:
        raise ArgumentError(f"device {device!r}: exhibits run on a GPU: use device cuda, or cuda:N")
    asked.budget(seconds)
    cuda = Cuda(gpu)
    session = Session(cuda, len(exhibit.configs()), on_event, store)
    stage = _Stage(session, cuda, exhibit)
    for config in exhibit.configs():
        session.begin(f"{name}, {words(config)}")
        session.end(stage.measure(config, seconds))
    return session.run


def emulated_exhibit(
    name: str, n: int = EMULATED, device: str = "h200", on_config: OnStep[EmulatedExhibit] = ignore
) -> tuple[EmulatedExhibit, ...]:
    """Run an exhibit's kernel on the emulator at each config, check it, and return its counters and the predicted ones.

    `n` is the number of elements, fewer than fill a GPU; `device` is the card of cuda/device.py to compile for.
    `on_config` receives what runs, the numbers of finished and of all configs, and the last result.

    >>> emulated_exhibit("bank_stride")[0].counted["bank_conflicts"]
    0

    Raises ArgumentError for an unknown name or device, DeviceError when NVRTC is not installed.
    """
    exhibit, arch = find(name), asked.emulated_card(device).arch
    steps = RunSteps[EmulatedExhibit](len(exhibit.configs()), on_config)
    for config in exhibit.configs():
        steps.begin(f"{name}, {words(config)}")
        steps.end(_emulated(exhibit, config, n, arch))
    return tuple(steps.records)


def _emulated(exhibit: Exhibit, config: Config, n: int, arch: str) -> EmulatedExhibit:
    show, x = exhibit.show, numbers(n)
    geometry, y = exhibit.launch(n, config), np.full(show.results(n, config), np.nan, np.float32)
    if int(arch.removeprefix("sm_").rstrip("a")) < geometry.needs:
        raise RefusedError(
            f"exhibit {exhibit.name} has {geometry.instructions}, from compute capability {geometry.needs / 10} on: "
            f"{arch} is older; name a newer device"
        )
    ptx = nvrtc.ptx(geometry.source, geometry.kernel, arch)
    program = prepared(ptx.text, ptx.entry)
    arguments = bound(program.kernel, (x, y, np.int32(n)))
    counters, findings = Counters(program.kernel, program.merges), Findings()
    launch = LaunchConfig(geometry.grid, geometry.block, arguments.parameters)
    run_kernel(program, launch, arguments.memory, (counters, findings))
    arguments.write_back()
    predicted, counted = show.counts(n, config), _counted(program.kernel, counters)
    counted |= show.errors(y, n, config) if show.errors else {}
    counted, faults = {name: counted[name] for name in predicted}, tuple(map(str, findings.sorted()))
    error = _error(y, show.expected(x, config))
    return EmulatedExhibit(exhibit.name, dict(config), n, arch, predicted, counted, error, faults)


def _counted(kernel: PtxKernel, counters: Counters) -> dict[str, int]:
    """The counters that the rules may predict, as the emulator counted them.

    A warp works at a level of a tree when it executes the addition. Its lanes disagree where a branch at the line of
    an addition parts them; the branches that leave one lane to write a sum are at lines of their own. ptxas predicates
    such short ways, so that the profiler's divergent branches are no measure of a tree: on an H200 1 a block, or 0.
    """
    counts = counters.counts()
    adding = {added.inner for added in kernel.instructions if str(added.opcode) == "add.f32"}
    levels = [index for index, instruction in enumerate(kernel.instructions) if instruction.inner in adding]
    return {
        "divergent_branches": counts.divergent_branches,
        "working_warps": counts.instructions["fadd"],
        "divergent_warps": counters.counts(only=levels).divergent_branches,
        "shared_loads": counts.shared.loads.requests,
        "wavefronts": counts.shared.loads.wavefronts,
        "bank_conflicts": counts.shared.loads.bank_conflicts,
        "requests": counts.global_.loads.requests,
        "sectors": counts.global_.loads.sectors,
    }


def _error(y: Floats, expected: Floats) -> float:
    """0 when every element is right, else 1 plus the number of wrong elements."""
    wrong = int(np.count_nonzero(~(y == expected)))
    return 1.0 + wrong if wrong else 0.0


def words(config: Config) -> str:
    """A config in words: "stride 4, width 8"."""
    return ", ".join(f"{key} {value}" for key, value in config.items())


class _Stage:
    """An exhibit's arrays on the device."""

    def __init__(self, session: Session, cuda: Cuda, exhibit: Exhibit) -> None:
        self._session, self._cuda, self._exhibit = session, cuda, exhibit
        ordinal = cuda.stream.ordinal
        self._host = numbers(exhibit.show.n)
        self._x, self._y = Memory(self._host.nbytes, ordinal), Memory(self._host.nbytes, ordinal)
        self._x.write(self._host)

    def measure(self, config: Config, seconds: float) -> Measurement:
        """One config, checked and timed, or refused with the reason."""
        show, name = self._exhibit.show, self._exhibit.name
        plain = measurements.blank(EXHIBIT.suite, name, Work(1, show.n, 1, "f32", "f32"), 0, config=dict(config))
        moved = 4 * (show.n + show.results(show.n, config))
        plain = replace(plain, flops=show.operations(show.n, config), bytes=moved)
        try:
            own = self._contestant(self._exhibit, config)
        except RefusedError as refused:
            return replace(plain, refused=str(refused))
        error = self._error(config)
        parent = [self._contestant(find(self._exhibit.parent), config)] if self._exhibit.parent else []
        comparison, clock = self._session.compare([own, *parent], seconds, 0)
        note = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in show.counts(show.n, config).items())
        done = measurements.timed(plain, comparison.timings[own.name], comparison.versus)
        return replace(done, error=error, checked=True, note=note, clock_mhz=clock)

    def _contestant(self, exhibit: Exhibit, config: Config) -> Contestant:
        stream = self._cuda.stream
        launch = put(exhibit, config, self._x.pointer, self._y.pointer, stream.ordinal)
        return Contestant(exhibit.name, self._cuda.sampler(lambda _: launch(stream.handle), 1))

    def _error(self, config: Config) -> float:
        """The error of a launch into poisoned memory, as `_error` has it."""
        show, stream = self._exhibit.show, self._cuda.stream
        self._y.fill(0xFF)
        driver.synchronize(stream.ordinal)
        put(self._exhibit, config, self._x.pointer, self._y.pointer, stream.ordinal)(stream.handle)
        driver.synchronize(stream.ordinal)
        y = np.empty(show.results(show.n, config), np.float32)
        self._y.read(y)
        return _error(y, show.expected(self._host, config))
