"""The fingerprint of this machine, which every record is stored with."""

from __future__ import annotations

import functools
import platform
import re
from dataclasses import replace

from gemmery.cpu import jit, target
from gemmery_lab.measure import libraries
from gemmery_lab.measure.libraries import RivalProcess
from gemmery_lab.measure.record import Gpu, MachineRecord, version


@functools.cache
def cpu() -> MachineRecord:
    """Return the fingerprint of this machine.

    >>> cpu().name  # doctest: +SKIP
    'amd-zen4-avx512-2c'
    """
    host, cores, blas = target.host(), target.cores(), libraries.blas()
    if libraries.steering():  # that of the rival NumPy, which ignores variables that choose other kernels
        with RivalProcess(libraries.find("numpy"), threads=1) as numpy:
            blas = numpy.runs.partition(", ")[2]
    model = jit.host_cpu().replace("znver", "amd-zen")
    return MachineRecord(
        name=_file_safe(f"{model}-{host.isa}-{cores}c"),
        cpu=host.cpu,
        isa=host.isa,
        cores=cores,
        l1d=host.l1d,
        l2=host.l2,
        l3=host.l3,
        os=f"{platform.system()} {platform.release().partition('-')[0]}",
        python=platform.python_version(),
        numpy=version("numpy"),
        llvmlite=version("llvmlite"),
        blas=blas,
        gemmery=version("gemmery"),
    )


def gpu(ordinal: int = 0) -> MachineRecord:
    """Return the fingerprint of this machine for runs on its GPU, named after the GPU: "nvidia-h200".

    Raises DeviceError if there is no such device.
    """
    from gemmery.cuda import driver, nvml, nvrtc  # loads the CUDA bindings

    device, monitor = driver.device(ordinal), nvml.Monitor(ordinal)
    described = Gpu(
        name=device.name,
        capability=device.capability,
        sms=device.sms,
        l2=device.l2,
        clock_mhz=monitor.most_clock or round(device.clock * 1e3),
        power_w=monitor.power_limit,
        driver=nvml.driver_version(),
        cuda=driver.version(),
        nvrtc=nvrtc.version(),
    )
    return replace(cpu(), name=_file_safe(described.name), gpu=described)


def _file_safe(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
