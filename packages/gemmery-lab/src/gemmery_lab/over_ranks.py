"""Times of products over ranks: the workload `distributed` of `gemmery bench`, on every rank of torchrun or mpiexec.

Ranks start each call together, and the slowest one's time counts. On GPUs calls are CUDA graphs, because signals and
copies that Python starts take longer than most products; they are queued first, and devices start them together.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import gemmery as gm
import gemmery.distributed as gd
from gemmery.distributed.plan import RankEvent, gather_events, length, scatter_events
from gemmery.errors import ArgumentError
from gemmery_lab import asked, measurements
from gemmery_lab.experiments import DISTRIBUTED
from gemmery_lab.measure import timing
from gemmery_lab.measure.record import Measurement, OnEvent, Run, ignore
from gemmery_lab.measure.timing import Timing
from gemmery_lab.measure.work import Work, numpy_dtype
from gemmery_lab.on_cpu import Cpu
from gemmery_lab.session import PRODUCT, Session

ALONE = f"{PRODUCT}, alone"
MOST_ROUNDS, LEAST_ROUNDS = 15, 3
QUEUING = 400_000  # cycles, 0.2 ms on an H200: hosts wake up to 70 us apart, and queue a call meanwhile


class CpuOfRanks(Cpu):
    """The CPU of all ranks of a launch, which have one parent: the work of one is no load for another."""

    def children(self) -> tuple[int, ...]:
        """Return the processes of the other ranks, where the system tells them."""
        siblings = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
        every = siblings.read_text().split() if siblings.exists() else []
        return tuple(process for process in map(int, every) if process != os.getpid())


class RankClock:
    """The ranks of one launch, which start together and know the slowest one's time."""

    def __init__(self, kind: str, rank: int, ranks: int, links: str) -> None:
        """Take what names the ranks: "gloo", "nccl" or "mpi", and what links them."""
        self.kind, self.rank, self.ranks, self.links = kind, rank, ranks, links

    def slowest(self, seconds: float) -> float:
        """Wait for all ranks and return the largest of their numbers."""
        raise NotImplementedError

    def calls(self, function: Callable[[], Any]) -> Callable[[], float]:
        """Return the function that calls once and returns the seconds that this rank took."""

        def once() -> float:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start

        return once

    def timing(self, functions: dict[str, Callable[[], Any]], seconds: float) -> dict[str, Timing]:
        """Time functions in turn, for about so many seconds in all."""
        samplers = {name: self.calls(function) for name, function in functions.items()}
        times: dict[str, dict[int, float]] = {name: {} for name in functions}
        spent = 0.0
        for turn in range(MOST_ROUNDS + 1):
            for name, once in samplers.items():
                self.slowest(0.0)
                slowest = self.slowest(once())
                spent += slowest
                if turn:  # the first one compiles
                    times[name][turn] = slowest
            if turn >= LEAST_ROUNDS and spent > seconds:
                break
        return timing.tally(times).timings


class TorchClock(RankClock):
    """The ranks that torchrun started: on GPUs with NCCL, else with Gloo."""

    def __init__(self, device: str) -> None:
        import torch
        import torch.distributed as dist

        self.torch: Any = torch
        self.dist: Any = dist
        on_gpu = device.startswith("cuda")
        if not dist.is_initialized():
            self.dist.init_process_group("nccl" if on_gpu else "gloo")
            atexit.register(self.dist.destroy_process_group)
        local = self.dist.get_node_local_rank(0)
        if on_gpu:
            torch.cuda.set_device(local)
        self.device: Any = torch.device("cuda", local) if on_gpu else torch.device("cpu")
        links = torch.cuda.get_device_name() if on_gpu else "shared memory and TCP of one host"
        super().__init__("nccl" if on_gpu else "gloo", self.dist.get_rank(), self.dist.get_world_size(), links)

    def slowest(self, seconds: float) -> float:
        number = self.torch.tensor(seconds, dtype=self.torch.float64, device=self.device)
        self.dist.all_reduce(number, self.dist.ReduceOp.MAX)
        return float(number.item())

    def calls(self, function: Callable[[], Any]) -> Callable[[], float]:
        """Return the function that calls once; on a GPU it replays a graph of the call."""
        if self.device.type == "cpu":
            return super().calls(function)
        cuda: Any = self.torch.cuda
        function()
        cuda.synchronize()
        self.slowest(0.0)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            function()
        cuda.synchronize()
        start, end = cuda.Event(True), cuda.Event(True)
        together = self.torch.zeros(1, device=self.device)

        def once() -> float:
            cuda._sleep(QUEUING)
            self.dist.all_reduce(together)  # the devices go on at the same time
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        return once

    def products(self, n: int, dtype: str) -> dict[str, Callable[[], Any]]:
        """Return the products of squares of side n, and the transfers and the product of one rank alone."""
        ranks, part = self.ranks, n // self.ranks
        kind = getattr(self.torch, np.dtype(numpy_dtype(dtype)).name)

        def make(*shape: int) -> Any:
            return self.torch.randn(*shape, device=self.device).to(kind)

        x, w, tall, wide = make(part, n), make(n, part), make(n, part), make(part, n)
        full, rows, gathered = make(n, n), [part] * ranks, make(n, n)
        product: Any = gm.matmul
        by_torch = getattr(self.dist, "all_gather_single", None) or self.dist.all_gather_into_tensor  # before 2.13
        gather = partial(by_torch, gathered, x)
        return {
            ALONE: partial(product, full, w),
            "gather alone": gather,
            "gather, then gm.matmul": lambda: (gather(), product(gathered, w)),
            "gd.all_gather_matmul": partial(gd.all_gather_matmul, x, w, rows=rows),
            "gd.matmul_reduce_scatter": partial(gd.matmul_reduce_scatter, tall, wide, rows=rows),
        }


class MpiClock(RankClock):
    """The ranks that mpiexec started."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi: Any = MPI
        self.comm: Any = MPI.COMM_WORLD
        library = MPI.Get_library_version().split("\n")[0].split(",")[0]
        super().__init__("mpi", self.comm.Get_rank(), self.comm.Get_size(), " ".join(library.split()))

    def slowest(self, seconds: float) -> float:
        return float(self.comm.allreduce(seconds, self.mpi.MAX))

    def products(self, n: int, dtype: str) -> dict[str, Callable[[], Any]]:
        """Return the products of squares of side n, and the product of one rank alone."""
        part = n // self.ranks
        random = np.random.default_rng(self.rank)
        a, b, full = (random.standard_normal(s).astype(numpy_dtype(dtype)) for s in ((part, n), (part, n), (n, n)))
        by_rows = (gd.Shard(0), gd.Shard(0))
        return {
            ALONE: partial(gm.matmul, a, full),
            "gd.matmul, B everywhere": partial(
                gd.matmul, a, full, group=self.comm, placements=(gd.Shard(0), gd.Replicate())
            ),
            "gd.matmul, B by rows": partial(gd.matmul, a, b, group=self.comm, placements=by_rows),
        }


def launched(device: str) -> TorchClock | MpiClock:
    """Return the ranks of this launch. Raises ArgumentError if there is one alone."""
    ranks: TorchClock | MpiClock | None = None
    with suppress(ModuleNotFoundError):
        import torch.distributed as dist

        ranks = TorchClock(device) if dist.is_torchelastic_launched() else None
    with suppress(ModuleNotFoundError):
        ranks = ranks or MpiClock()
    if ranks is None or ranks.ranks < 2:
        raise ArgumentError(
            "the workload distributed needs two ranks or more: start the command by torchrun or mpiexec, as "
            "docs/distributed.md shows"
        )
    return ranks


def distributed(
    sizes: Sequence[int] = (1024, 2048),
    dtype: str = "f32",
    device: str = "cpu",
    seconds: float = 3.0,
    store: Path | None = None,
    on_event: OnEvent = ignore,
    ranks: TorchClock | MpiClock | None = None,
) -> Run:
    """Time products of squares of each size over the ranks of torchrun or mpiexec; every rank calls it.

    A record's note holds the ranks, what links them, how much of the transfers was hidden, and the predicted time.

    Raises ArgumentError for a size that the ranks do not divide, or if there is one rank alone.
    """
    ranks = launched(device) if ranks is None else ranks
    dtype = asked.spelled(dtype)
    if wrong := [n for n in sizes if n < 1 or n % ranks.ranks]:
        raise ArgumentError(f"workload distributed: size {wrong[0]} over {ranks.ranks} ranks: it must be a multiple")
    with Session(CpuOfRanks(), len(sizes), on_event, store if ranks.rank == 0 else None) as session:
        for n in sizes:
            work = Work(n, n, n, dtype, dtype, name=f"{ranks.ranks} ranks of {ranks.kind}")
            session.begin(f"{DISTRIBUTED.name}: {work}")
            times = ranks.timing(ranks.products(n, dtype), seconds / len(sizes))
            session.end(*(_record(ranks, work, name, times) for name in times))
        return session.run


def _record(ranks: RankClock, work: Work, name: str, times: dict[str, Timing]) -> Measurement:
    """Return the record of one product; its operations are those of one rank."""
    plain = measurements.blank(DISTRIBUTED.suite, name, work, gm.get_num_threads(), config={"ranks": ranks.ranks})
    plain = replace(plain, flops=plain.flops // ranks.ranks)
    words = [f"{ranks.ranks} ranks, {ranks.kind}, {ranks.links}"]
    alone, took = times[ALONE].seconds, times[name].seconds
    ratio = {} if name == ALONE else {ALONE: alone / took}
    transfer = times.get("gather alone")
    if transfer is not None and name.startswith("gd."):
        hidden = 1 - (took - alone) / transfer.seconds
        words.append(f"hidden {min(1.0, max(0.0, hidden)):.0%} of {transfer.seconds * 1e6:.0f} us")
    if events := _predicted(ranks, work, name, alone):
        words.append(f"predicted {length(events) * 1e6:.0f} us")
    return replace(measurements.timed(plain, times[name]), versus=ratio, note="; ".join(words))


def _predicted(ranks: RankClock, work: Work, name: str, alone: float) -> tuple[RankEvent, ...]:
    """Return what the cost model expects of the products of layers, from this run's local product."""
    of_kind = gd.H200 if ranks.kind == "nccl" else gd.CORE
    speeds = replace(of_kind, flops=2 * work.m * work.n * work.k / ranks.ranks / alone)
    events = {"gd.all_gather_matmul": gather_events, "gd.matmul_reduce_scatter": scatter_events}.get(name)
    if events is None:
        return ()
    return events(work.m, work.n, work.k, ranks.ranks, speeds, np.dtype(numpy_dtype(work.dtype)).itemsize)
