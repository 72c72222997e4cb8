"""Products between devices of one host on the emulator: each stream of each device is a block of one launch.

`Host` stands in for PyTorch where gemmery.distributed.peers calls it: it notes what all streams are told, in order. One
kernel then does all of it in memory that the blocks share. They are ordered by what the streams wait for and by nothing
else, as on devices, so a flag that is missing is a race.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np

from gemmery_emulator.kernels.kernel import emulate

COPY, PRODUCT, SUM, SWAP, WRITE, AWAIT = range(6)
RUNNER = """
__global__ void run_streams(float* memory, unsigned* words, const int* tasks, const int* first, const int* places) {
  const int t = threadIdx.x;
  for (int i = first[blockIdx.x]; i < first[blockIdx.x + 1]; ++i) {
    const int* task = tasks + 7 * i;
    const int *to = places + task[1], *from = places + task[2], *with = places + task[3];
    const int m = task[4], n = task[5], k = task[6];
    if (task[0] == 0) {
      if (t < m) memory[to[t]] = memory[from[t]];
    } else if (task[0] == 1) {  // m x n from m x k and k x n
      if (t < m * n) {
        float sum = 0;
        for (int j = 0; j < k; ++j) sum += memory[from[t / n * k + j]] * memory[with[j * n + t % n]];
        memory[to[t]] = sum;
      }
    } else if (task[0] == 2) {  // k parts of m elements
      if (t < m) {
        float sum = memory[from[t]];
        for (int part = 1; part < k; ++part) sum += memory[from[part * m + t]];
        memory[to[t]] = sum;
      }
    } else if (t == 0) {
      unsigned* word = words + task[1];
      unsigned value = task[4], wanted = task[5], seen;
      if (task[0] == 3) {  // from `wanted` to `value`, as PyTorch's kernels put a signal (1) and take it (0)
        do {
          if (value) asm volatile("atom.global.RELEASE.SCOPE.cas.b32 %0, [%1], %2, %3;" : "=r"(seen)
                                  : "l"(word), "r"(wanted), "r"(value) : "memory");
          else asm volatile("atom.global.ACQUIRE.SCOPE.cas.b32 %0, [%1], %2, %3;" : "=r"(seen)
                            : "l"(word), "r"(wanted), "r"(value) : "memory");
        } while (seen != wanted);
      } else if (task[0] == 4) {
        asm volatile("st.global.release.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
      } else {
        do asm volatile("ld.global.acquire.sys.u32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory");
        while (seen != wanted);
      }
    }
    __syncthreads();
  }
}"""
THREADS = 64
SIGNALS = {"RELEASE": "release", "ACQUIRE": "acquire", "SCOPE": "sys"}


class Placed:
    """A tensor: the places of its elements in the memory of all devices."""

    is_cuda = True

    def __init__(self, device, places):
        self.device, self.places, self.dtype = device, places, np.float32

    shape = property(lambda self: self.places.shape)

    def __getitem__(self, what):
        return Placed(self.device, self.places[what])

    def contiguous(self):
        """Return itself."""
        return self

    def new_empty(self, shape):
        """Return memory of the device."""
        return self.device.empty(shape)

    def copy_(self, source, non_blocking=False):
        """Let the current stream copy."""
        assert self.shape == source.shape
        if self.places.size:
            self.device.host.tell(COPY, self.places, source.places, (), self.places.size)

    def clone(self):
        """Return a copy, by the current stream."""
        result = self.new_empty(self.shape)
        result.copy_(self)
        return result


class QueueOfDevice:
    """A stream."""

    cuda_stream = 0

    def __init__(self, host):
        self.host, self.tasks = host, []
        host.streams.append(self)

    def wait_stream(self, other):
        """Wait for all that another stream was told so far."""
        name = f"{self.host.names[self]} waits for {self.host.names[other]}"
        event = self.host.word()
        self.host.tell(WRITE, event, 0, (), 1, stream=other, why=name)
        self.host.tell(AWAIT, event, 0, (), 1, 1, stream=self, why=name)


class DeviceOfHost:
    """One of the devices: what it allocates is reused by its next call, as by PyTorch's allocator."""

    def __init__(self, host, rank):
        self.host, self.rank, self.main = host, rank, QueueOfDevice(host)
        host.names[self.main] = "the main stream"
        self._free, self._taken = {}, {}

    def empty(self, shape):
        """Return memory that nothing else of the same call has."""
        shape = tuple(shape)
        turn = self._taken.get(shape, 0)
        self._taken[shape] = turn + 1
        if (shape, turn) not in self._free:
            self._free[shape, turn] = self.host.places(shape)
        return Placed(self, self._free[shape, turn])

    def end_call(self):
        """Let the next call take the memory of this one."""
        self._taken.clear()


class Host:
    """The devices, their memory and signals.

    `left_out` are names of waits to leave out, with what they wait for; `turned` sums go from the last part on.
    """

    def __init__(self, ranks, left_out=(), turned=False):
        self.turned = turned
        self.size, self.words, self.left_out, self.ranks = 0, 0, left_out, ranks
        self.streams, self.names = [], {}
        self.devices = [DeviceOfHost(self, rank) for rank in range(ranks)]
        self.current, self.symmetric, self.allocations = self.devices[0].main, [], [0] * ranks
        self.inputs = []

    def places(self, shape):
        """Return the places of new memory."""
        first = self.size
        self.size += math.prod(shape)
        return np.arange(first, self.size).reshape(shape)

    def put(self, rank, numbers):
        """Return a tensor of these numbers, which nothing writes."""
        result = Placed(self.devices[rank], self.places(numbers.shape))
        self.inputs.append((result.places, numbers))
        return result

    def word(self):
        """Return a new flag of 32 bits, which is 0."""
        self.words += 1
        return self.words - 1

    def tell(self, kind, to, source, with_what, m=0, n=0, k=0, stream=None, why=""):
        """Note a task of a stream, the current one by default."""
        if why not in self.left_out:
            (stream or self.current).tasks.append((kind, to, source, with_what, m, n, k))

    @property
    def rank(self):
        """The device of the current stream."""
        return next(d.rank for d in self.devices if self.current in (d.main, getattr(d, "side", None)))

    @contextmanager
    def stream(self, stream):
        """Make a stream the current one."""
        before, self.current = self.current, stream
        yield
        self.current = before

    def install(self, patch, peers, inside):
        """Take PyTorch's place in gemmery.distributed.peers; `inside`: the gather is one launch."""
        from torch.distributed import _symmetric_memory

        def side(device):
            device.side = QueueOfDevice(self)
            self.names[device.side] = "the side stream"
            return device.side

        def sum_of(parts, dim, dtype):
            out = parts.new_empty(parts.shape[1:])
            if out.places.size:
                places = parts.places[::-1] if self.turned else parts.places
                self.tell(SUM, out.places, places, (), out.places.size, 0, len(parts.places))
            return out

        def add(x, y):
            return sum_of(Placed(x.device, np.stack([x.places, y.places])), 0, None)

        cuda = SimpleNamespace(
            current_stream=lambda: self.current, stream=self.stream, Stream=side, synchronize=lambda device: None
        )
        fake = SimpleNamespace(cuda=cuda, add=add, sum=sum_of)
        for name, value in {"torch": fake, "_torch": fake, "multiply": self.multiply}.items():
            patch.setattr(peers, name, value)
        patch.setattr(peers, "arriving_product", self.launch_inside if inside else lambda *operands: None)
        patch.setattr(peers, "exchange", lambda group: lambda value: [value] * self.ranks)
        patch.setattr(peers, "timeout", lambda group: SimpleNamespace(total_seconds=lambda: 60))
        patch.setattr(_symmetric_memory, "empty", self._symmetric_memory)
        patch.setattr(_symmetric_memory, "rendezvous", self._rendezvous)

    def launch_inside(self, launches, own, full, w, out, rank, rows):
        """Stand in for `arriving_product`: a launch that multiplies its own rows, then the others' as they come."""
        ends = np.cumsum([0, *rows])

        def launch(x, full, w, out, stream, flags, limit):
            for piece in [*range(rank, -1, -1), *range(self.ranks - 1, rank, -1)]:
                here = slice(ends[piece], ends[piece + 1])
                if piece != rank:
                    self.tell(AWAIT, flags // 4 + piece, 0, (), 0, 1, why="the launch waits")
                source = x if piece == rank else full[here]
                self.multiply(source, w, out[here])

        return launch

    def multiply(self, x, w, out):
        """Let the current stream multiply."""
        if out.places.size:
            self.tell(PRODUCT, out.places, x.places, w.places, *out.shape, x.shape[1])

    def _symmetric_memory(self, *shape, dtype, device):
        turn = self.allocations[device.rank]
        self.allocations[device.rank] += 1
        if turn == len(self.symmetric):
            parts = [Placed(each, self.places(shape)) for each in self.devices]
            pads = [[self.word() for _ in range(2 * self.ranks)] for _ in self.devices]
            self.symmetric.append((parts, pads))
        return self.symmetric[turn][0][device.rank]

    def _rendezvous(self, buffer, group):
        parts, pads = next(each for each in self.symmetric if buffer in each[0])
        me, ranks, names = buffer.device.rank, self.ranks, ("free", "arrived")
        return SimpleNamespace(
            signal_pad_ptrs=[4 * pad[0] for pad in pads],
            get_buffer=lambda peer, shape, dtype: Placed(self.devices[me], parts[peer].places),
            put_signal=lambda peer, channel, _: self.tell(
                SWAP, pads[peer][channel * ranks + me], 0, (), 1, 0, why=names[channel]
            ),
            wait_signal=lambda peer, channel, _: self.tell(
                SWAP, pads[me][channel * ranks + peer], 0, (), 0, 1, why=names[channel]
            ),
        )

    def run(self, seed=None, **signals):
        """Run all tasks; return the memory, and what the emulator finds."""
        source = RUNNER
        for word, text in {**SIGNALS, **signals}.items():
            source = source.replace(word, text)
        memory, words = np.full(self.size, np.nan, np.float32), np.zeros(self.words, np.uint32)
        for places, numbers in self.inputs:
            memory[places] = numbers
        table, first, flat = [], [0], [0]
        for stream in self.streams:
            for kind, *operands, m, n, k in stream.tasks:
                row = [kind]
                for operand in operands:
                    is_flag = kind >= SWAP
                    row.append(operand if is_flag and operand != () else len(flat))
                    flat += [] if is_flag else np.ravel(operand).tolist()
                assert max(m, m * n * (kind == PRODUCT)) <= THREADS
                table.append([*row, m, n, k])
            first.append(len(table))
        arrays = [np.ravel(np.array(each, np.int32)) for each in (table, first, flat)]
        run = emulate(source, "run_streams", len(self.streams), THREADS, [memory, words, *arrays], seed=seed)
        return memory, run.findings
