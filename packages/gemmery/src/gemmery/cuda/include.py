"""Find the CUDA toolkit's headers, for sources that include <cuda_fp16.h>, <mma.h>, <cuda/barrier> and others."""

from __future__ import annotations

import contextlib
import os
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gemmery import cache, config
from gemmery.cuda import nvrtc

# Headers of the C++ library in device code: NVRTC has the functions of these built in, ...
_BUILT_IN = ("cassert", "cmath", "cstdio", "cstdlib", "cuda_runtime.h", "device_launch_parameters.h")
_BUILT_IN_C = ("assert.h", "math.h", "stdio.h", "stdlib.h")
_OF_CCCL = (
    *("algorithm", "array", "cstddef", "cstdint", "cstring", "functional", "limits", "numeric", "tuple", "type_traits"),
    "utility",
)  # ... and CCCL has these.
STANDARD = {
    **dict.fromkeys((*_BUILT_IN, *_BUILT_IN_C), ""),
    **{name: f"#include <cuda/std/{name}>\nnamespace std {{ using namespace cuda::std; }}\n" for name in _OF_CCCL},
    "stdint.h": "#include <cuda/std/cstdint>\n",
    "stddef.h": "#include <cuda/std/cstddef>\n",
    **{name: f"#include <cuda/std/{name}>\n" for name in ("cfloat", "climits")},
    "float.h": "#include <cuda/std/cfloat>\n",
    "limits.h": "#include <cuda/std/climits>\n",
    "string.h": "#include <cuda/std/cstring>\n",
}
TOOLKIT = Path("/usr/local/cuda/include")  # the link of the toolkit's installers for Linux


@lru_cache
def folders() -> tuple[str, ...]:
    """Return the folders to search: NVRTC's own headers (13.3 and newer), else a toolkit's or its wheels'.

    >>> [name for name in ("cuda_fp16.h", "mma.h") if not any(Path(one, name).exists() for one in folders())]
    []
    """
    return _bundled() or _installed()


@lru_cache
def wheel(header: str) -> str:
    """Return the folder of a header of CUTLASS or cuRAND, of a wheel or a toolkit; "" if neither is installed."""
    folders = []
    if header.startswith(("cutlass/", "cute/")) and (spec := find_spec("cutlass_library")):
        folders = [Path(place, "source", "include") for place in spec.submodule_search_locations or ()]
    elif header.startswith("curand") and (spec := find_spec("nvidia")):
        folders = [path for place in spec.submodule_search_locations or () for path in Path(place).glob("*/include")]
        folders.append(TOOLKIT)
    return next((str(folder) for folder in folders if (folder / header).is_file()), "")


def _bundled() -> tuple[str, ...]:
    """Write NVRTC's own headers to the cache folder, once; returns their folders."""
    bindings: Any = nvrtc.bindings()
    install = getattr(bindings, "nvrtcInstallBundledHeaders", None)
    if install is None:
        return ()
    compiled = config.cache_dir()
    if compiled is None:
        return ()
    folder = os.path.join(compiled, f"headers-{nvrtc.version()}")
    with contextlib.suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    if not cache.private(folder):  # others could change what kernels include
        return ()
    try:
        status, *_ = install(folder.encode(), bindings.NVRTC_INSTALL_HEADERS_SKIP_IF_EXISTS)
    except RuntimeError:  # the bindings have the function, but an older NVRTC does not
        return ()
    return (folder, os.path.join(folder, "cccl")) if status == bindings.nvrtcResult.NVRTC_SUCCESS else ()


def _installed() -> tuple[str, ...]:
    """Find the headers of a toolkit, or of the wheels nvidia-cuda-runtime and nvidia-cuda-cccl."""
    candidates = [TOOLKIT, TOOLKIT / "cccl"]
    try:
        from cuda.pathfinder import find_nvidia_header_directory as find
    except ImportError:
        pass
    else:
        candidates = [Path(folder) for name in ("cudart", "cccl") if (folder := find(name))] + candidates
    return tuple(dict.fromkeys(str(folder) for folder in candidates if folder.is_dir()))
