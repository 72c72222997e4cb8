"""Hopper's instructions on a device: to the bit what the emulator makes of them, as data/hopper_h200.json holds it."""

from __future__ import annotations

import ctypes
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import hopper
import tensor_sums
from gemmery_emulator.hopper.tensormap import TensorMap

bindings = pytest.importorskip("cuda.bindings.driver")
nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
from gemmery.cuda import driver  # noqa: E402

DATA = Path(__file__).parents[1] / "data" / "hopper_h200.json"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(driver.missing()), reason=driver.missing())]
KINDS = {"B": "UINT8", "H": "UINT16", "I": "UINT32", "i": "INT32", "e": "FLOAT16", "f": "FLOAT32", "d": "FLOAT64"}
SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


def checked(result):
    """What a call of the driver gives; its error as an exception."""
    error, *values = result
    assert int(error) == 0, error
    return values[0] if values else None


def compiled(source):
    """Machine code for sm_90a."""
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"hopper.cu", 0, [], []))
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    error, *_ = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    assert int(error) == 0, log.decode()
    code = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, code))
    return code


def encoded(given, pointer):
    """The driver's own tensor map of an array on the device."""
    array, kind = given.array, bindings.CUtensorMapDataType
    sizes, words = bindings.cuuint64_t, bindings.cuuint32_t
    return checked(
        bindings.cuTensorMapEncodeTiled(
            getattr(kind, f"CU_TENSOR_MAP_DATA_TYPE_{KINDS[array.dtype.char]}"),
            array.ndim,
            pointer,
            [sizes(one) for one in array.shape[::-1]],
            [sizes(one) for one in array.strides[-2::-1]] if array.ndim > 1 else [sizes(16)],
            [words(one) for one in given.box[::-1]],
            [words(one) for one in given.steps[::-1]],
            bindings.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(bindings.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{SWIZZLES[given.swizzle]}"),
            bindings.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            bindings.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def on_device(case):
    """The bytes of the array that the device writes."""
    checked(bindings.cuInit(0))
    context = checked(bindings.cuDevicePrimaryCtxRetain(0))
    checked(bindings.cuCtxSetCurrent(context))
    module = checked(bindings.cuModuleLoadData(compiled(case.source)))
    kernel = checked(bindings.cuModuleGetFunction(module, case.kernel.encode()))
    attribute = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(bindings.cuFuncSetAttribute(kernel, attribute, case.shared))
    held, pointers = [], []
    for given in case.args:
        value = given
        if isinstance(given, np.ndarray | TensorMap):
            array = given.array if isinstance(given, TensorMap) else given
            pointer = checked(bindings.cuMemAlloc(array.nbytes))
            checked(bindings.cuMemcpyHtoD(pointer, array.ctypes.data, array.nbytes))
            pointers.append(pointer)
            value = np.uint64(int(pointer))
            if isinstance(given, TensorMap):
                value = encoded(given, int(pointer))
        held.append(value)
    at = [int(one.getPtr()) if not isinstance(one, np.generic) else 0 for one in held]
    boxes = [np.array([one]) if isinstance(one, np.generic) else None for one in held]
    at = [box.ctypes.data if box is not None else one for one, box in zip(at, boxes, strict=True)]
    packed = (ctypes.c_void_p * len(at))(*at)
    grid = (*case.grid, 1, 1)[:3]
    checked(bindings.cuLaunchKernel(kernel, *grid, case.block, 1, 1, case.shared, 0, ctypes.addressof(packed), 0))
    checked(bindings.cuCtxSynchronize())
    out = np.empty_like(case.written)
    checked(bindings.cuMemcpyDtoH(out.ctypes.data, pointers[-1], out.nbytes))
    for pointer in pointers:
        checked(bindings.cuMemFree(pointer))
    checked(bindings.cuModuleUnload(module))
    return out


def digest(array):
    """What data/hopper_h200.json holds of an array."""
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("name", json.loads(DATA.read_text()))
def test_a_device_gives_what_is_recorded(name):
    """The same bits as the device that was recorded."""
    assert digest(on_device(hopper.CASES[name])) == json.loads(DATA.read_text())[name]


@pytest.mark.parametrize("opcode", tensor_sums.opcodes())
def test_a_device_adds_what_is_recorded(opcode):
    """The bits of rounded sums, and so what the emulator adds."""
    written = on_device(tensor_sums.case(opcode))
    assert np.array_equal(tensor_sums.rows(written), tensor_sums.recorded()[opcode])
