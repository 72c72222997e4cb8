"""A device whose driver is a stand-in: memory is the emulator's, and so are launches.

All above the driver is as on a GPU: arrays, plans, tensor maps, the bytes of arguments, the order of launches.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from gemmery import dtypes
from gemmery.api import prepared
from gemmery.arrays import View, contiguous, dlpack
from gemmery.cuda import driver, nvrtc, tensormaps
from gemmery_emulator.hopper import tensormap
from gemmery_emulator.kernels import programs
from gemmery_emulator.machine import LaunchConfig
from gemmery_emulator.memory import APART, Allocation, Global
from gemmery_emulator.run import emulated
from gemmery_lab.measure.work import numpy_dtype

ORDINAL = 99  # no machine has it, so that nothing which is kept for it is about a device
NAME = "h200"
SIZE = 1 << 23  # bytes
DONE = (0,)


class CardMemory(Global):
    """Global memory that grows by arrays; an access between them is a fault."""

    def __init__(self):
        super().__init__({"first": 1})
        self.data = np.zeros(SIZE, np.uint8)
        self.next = self.allocations[-1].stop + APART

    def restart(self):
        """Forget all arrays."""
        del self.allocations[1:], self._starts[1:]
        self.next = self.allocations[0].stop + APART

    def take(self, size, beside=0):
        """Return the address of new bytes, all ones: NaN in every floating-point type."""
        start = -(-self.next // APART) * APART + beside
        self.next = start + size + APART
        assert self.next < SIZE
        self.allocations.append(Allocation(f"array {len(self.allocations)}", start, size))
        self._starts.append(start)
        self.data[start : start + size] = 0xFF
        return start


class OnCard:
    """An array in the memory of a card, which DLPack describes."""

    def __init__(self, card, pointer, shape, strides, dtype):
        self.card, self.dtype = card, dtype
        self.memory = View(pointer, tuple(shape), tuple(strides), dtype, f"cuda:{ORDINAL}", owner=self)

    def __dlpack_device__(self):
        return 2, ORDINAL

    def __dlpack__(self, **_):
        return dlpack.capsule(self.memory, 2, ORDINAL, versioned=True)

    @property
    def T(self):
        """The last two sides exchanged, without a copy."""
        *batch, rows, columns = self.memory.shape
        *along, row, column = self.memory.strides
        return OnCard(self.card, self.memory.pointer, (*batch, columns, rows), (*along, column, row), self.dtype)

    def rows(self, start, stop):
        """Some rows of a matrix, without a copy."""
        (_, columns), (row, column) = self.memory.shape, self.memory.strides
        return OnCard(self.card, self.memory.pointer + start * row, (stop - start, columns), (row, column), self.dtype)

    @property
    def numbers(self):
        """The elements as NumPy's array of this memory."""
        z = self.memory
        return np.ndarray(z.shape, numpy_dtype(self.dtype), self.card.memory.data.data, z.pointer, z.strides)


class Card:
    """The driver's functions that products call, by the emulator.

    `launched` are the files of the kernels that ran, and copies; `findings` are the faults of all launches.
    """

    def __init__(self):
        from cuda.bindings import driver as bindings

        self.bindings = bindings
        self.memory = CardMemory()
        self.launched, self.findings = [], []
        self.kernels = []
        self._maps = []

    def __getattr__(self, name):
        return getattr(self.bindings, name)  # types and enumerations

    def put(self, numbers, dtype, beside=0):
        """Return an array of these numbers, `beside` bytes from an aligned address."""
        array = self.empty(np.shape(numbers), dtype, beside)
        array.numbers[...] = numbers
        return array

    def empty(self, shape, dtype, beside=0):
        """Return an array whose bytes are all ones."""
        size = dtypes.get(dtype).size
        pointer = self.memory.take(math.prod(shape) * size, beside)
        return OnCard(self, pointer, shape, contiguous(tuple(shape), size), dtype)

    def function(self, source, kernel, ordinal, shared=0):
        """Stand in for `driver.function`."""
        assert ordinal == ORDINAL
        self.kernels.append((source, kernel))
        return len(self.kernels) - 1

    def cuCtxGetCurrent(self):
        return 0, ORDINAL

    def cuCtxPushCurrent(self, context):
        return DONE

    cuCtxPopCurrent = cuCtxSynchronize = lambda self: DONE
    cuMemFreeAsync = cuMemFree = lambda self, *_: DONE

    def cuMemAllocAsync(self, size, stream):
        return 0, self.memory.take(size)

    def cuMemcpyDtoDAsync(self, target, source, size, stream):
        self.memory.data[target : target + size] = self.memory.data[source : source + size].copy()
        self.launched.append("copy")
        return DONE

    def cuMemcpyDtoH(self, target, source, size):
        ctypes.memmove(target, self.memory.data[source : source + size].tobytes(), size)
        return DONE

    def cuMemcpyHtoDAsync(self, target, source, size, stream):
        self.memory.data[target : target + size] = np.frombuffer(ctypes.string_at(source, size), np.uint8)
        return DONE

    def cuMemsetD32Async(self, target, word, count, stream):
        self.memory.data[target : target + 4 * count].view(np.uint32)[:] = word
        return DONE

    def cuTensorMapEncodeTiled(self, kind, rank, address, extents, strides, box, steps, _, swizzle, *others):
        """Return the emulator's bytes of a map."""
        sides = (tuple(map(int, each)) for each in (extents, strides, box, steps))
        width = swizzle.name.rpartition("_")[2].removesuffix("B")
        kind = kind.name.removeprefix("CU_TENSOR_MAP_DATA_TYPE_").lower()
        code = tensormap.encoded(address, kind, 0 if width == "NONE" else int(width), *sides)
        self._maps.append(ctypes.create_string_buffer(code, len(code)))
        place = ctypes.addressof(self._maps[-1])
        return 0, SimpleNamespace(getPtr=lambda: place)

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        grid, block = (tuple(int(getattr(config, f"{what}Dim{axis}")) for axis in "XYZ") for what in ("grid", "block"))
        source, kernel = self.kernels[function]
        code = nvrtc.ptx(source, kernel, driver.find(NAME).arch)
        program = programs.prepared(code.text, code.entry)
        (parameter,) = program.kernel.parameters
        argument = ctypes.string_at(ctypes.c_void_p.from_address(parameters).value, parameter.size)
        cluster = (*program.kernel.limits.get("reqnctapercluster", ()), 1, 1, 1)[:3]
        dims = LaunchConfig(grid, block, argument, config.sharedMemBytes, cluster)
        self.findings += emulated(program, dims, self.memory).findings
        self.launched.append(source.removesuffix(".cu"))
        return DONE


@functools.cache
def only_card():
    """Return the card of this process, and what is known of it: launches that are prepared once refer to both."""
    return Card(), replace(driver.find(NAME), ordinal=ORDINAL)


def installed(patch):
    """Make a card the only device, cuda:99, for the products of a `pytest.MonkeyPatch`."""
    card, device = only_card()
    card.launched.clear()
    card.findings.clear()
    card.memory.restart()
    known = driver.find
    patch.setattr(driver, "api", lambda: card)
    patch.setattr(driver, "check", lambda result: result[1] if len(result) > 1 else None)
    patch.setattr(driver, "device", lambda ordinal=0: device)
    patch.setattr(driver, "context", lambda ordinal: ORDINAL)
    patch.setattr(driver, "function", card.function)
    patch.setattr(driver, "captures", lambda stream: False)
    patch.setattr(prepared.tiers, "enabled", lambda: False)
    patch.setattr(tensormaps, "begins_with_address", lambda: False)  # the emulator's maps do not
    assert known(f"cuda:{ORDINAL}") is device
    return card
