"""A made-up GPU: its arrays are NumPy's, its rungs and rivals take as long as they are said to."""

import functools
from dataclasses import dataclass

import numpy as np
import pytest

import records
from gemmery.errors import RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import Rung
from gemmery_lab import on_cuda
from gemmery_lab import session as sessions
from gemmery_lab.measure.cublas import Caller, Placed
from gemmery_lab.measure.torch_operands import DeviceOperands, poison
from gemmery_lab.measure.work import Work, operands
from gemmery_lab.measurements import MachineLimits
from gemmery_lab.on_cuda import NO_RIVAL, Cuda
from gemmery_lab.session import Session

RATE = 1e9  # operations a second of the slowest rung


class Resident:
    """DeviceOperands where NumPy finds them."""

    def __init__(self, work):
        self.work, self.problem = work, work.problem._replace(device="cuda:0")
        self.host = tuple(x if x.ndim == 3 else x[None] for x in operands(work))
        self.sets = (DeviceOperands(*self.host), DeviceOperands(*(x.copy() for x in self.host)))
        self.stream, self.scales, self.offsets = self, (), None

    def synchronize(self):
        """Nothing is under way."""

    def poison(self):
        self.host[2].view(np.uint8).fill(poison(self.host[2].dtype))

    def result(self):
        return self.host[2]


class Monitor:
    def clock(self):
        return 1755


class MadeUp(Cuda):
    """A backend whose device is NumPy, and on which a product takes as long as its rung was told to."""

    machine, ladder, rivals = records.MACHINE, CUDA, ()

    def __init__(self, ordinal=0, rivals=(), ladder=CUDA):
        self.device, self.monitor = f"cuda:{ordinal}", Monitor()
        self.rivals, self.ladder, self.samplers = rivals, ladder, 0

    def rival(self, name, threads=0):
        for caller in self.rivals:
            if caller.name == name and caller.missing():
                raise RefusedError(caller.missing())
            if caller.name == name:
                return caller
        raise RefusedError(NO_RIVAL)

    def resident(self, work):
        return Resident(work)

    def sampler(self, put, sets):
        self.samplers += 1
        each = put.nanoseconds
        return lambda inner, warm: round(each * inner)

    def placed(self, placed, resident):
        return self.sampler(placed.put, len(resident.sets))

    def unit(self, kernel, dtype):
        return dtype, "CUDA cores"

    def limits(self, record, begin):
        return MachineLimits(60000.0, 4400.0, 4000.0)


def session(**options):
    return Session(MadeUp(**options), 1, lambda event: None)


@dataclass
class Put:
    """One product by NumPy, and how long it is said to take."""

    kernel: object
    sets: object
    nanoseconds: float

    def __call__(self, index):
        one = self.sets[index]
        self.kernel(one.a, one.b, one.c)


def rung(name, parent=None, speed=1.0, dtypes=("f32",), refuses=lambda problem: "", product=np.matmul):
    made = Rung(name, f"the idea of {name}", parent, dtypes, refuses, build=lambda problem, config: product)
    SPEEDS[name] = speed
    return made


SPEEDS = {}


@pytest.fixture(autouse=True)
def numpy_for_a_device(monkeypatch):
    real = on_cuda.build

    def build(one, config, resident):
        real(one, config, resident)  # refuses what it does not take
        return Put(one.build(resident.problem, config), resident.sets, nanoseconds(one.name, resident.work))

    monkeypatch.setattr(on_cuda, "build", build)


def nanoseconds(name, work):
    return work.problem.flops / (RATE * SPEEDS[name]) * 1e9


def rival(speed=8.0, serves=("f32", "f64")):
    SPEEDS["cublas"] = speed

    def place(resident):
        if resident.work.dtype not in serves:
            raise RefusedError(f"no product of {resident.work.dtype}")
        put = Put(functools.partial(np.matmul), resident.sets, nanoseconds("cublas", resident.work))
        return Placed(put, "torch.mm")

    return Caller("cublas", lambda: "", lambda: "cuBLAS 99", place, lambda resident: None)


WORK = Work(64, 64, 64, "f32", "f32")


def measured(*rungs, work=WORK, rivals=None, seconds=5.0):
    on = session(rivals=(rival(),) if rivals is None else rivals, ladder=rungs)
    found = sessions.Level(on, "ladder", work, 0, seconds)
    own = [found.measure(one, {}, None) for one in rungs]
    return own, found.rivals()
