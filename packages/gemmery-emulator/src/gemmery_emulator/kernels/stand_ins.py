"""What stands in for headers that are not here, and for those of the C++ library in device code."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from importlib.resources import files

from gemmery.cuda import include
from gemmery_emulator.kernels.project import is_in

LIBRARY = ("algorithm", "array", "functional", "limits", "numeric", "tuple", "type_traits", "utility")
_TRAITS = re.compile(r"\bstd\s*::\s*(\w+)|\b(numeric_limits|is_same|enable_if|conditional)")
_OF_HOST_LIBRARY = ("string", "vector", "map", "mutex", "ostream", "unique_ptr", "shared_ptr", "function", "thread")
# Headers of the host's libraries, which have no macros for kernels: C++'s have no dot in their names.
OF_HOST = re.compile(
    r"[a-z_]+|sys/\w+\.h|(unistd|time|getopt|errno|signal|pthread|dirent|fcntl|memory|malloc|ctype|locale|wchar|inttypes"
    r"|stdbool|stdarg|strings|omp)\.h"
)
CUB = "cub/cub.cuh"  # it includes host code; the headers of its parts do not, but for those of whole arrays
HOST_LIBRARIES = ("thrust/", "cub/device/", CUB)
_OF_CUB = re.compile(r"\b(Block|Warp)([A-Z]\w+)")
# Thrust is for host code; what device code has of it is that of the library for devices.
_THRUST = "#pragma once\n#define THRUST_VERSION 300000\n#define CUB_VERSION 300000\n"
_OF_THRUST = _THRUST + "".join(
    f"#include <cuda/std/{name}>\n" for name in ("complex", "functional", "tuple", "utility")
)
_OF_THRUST += "namespace thrust { using namespace cuda::std; }\n"
# What `using namespace std` is for where the library for devices is included, whose sqrt() is another one than CUDA's.
USING = re.compile(r"\busing\s+namespace\s+std\s*;")
_OF_LIBRARY = re.compile(r"\b(?:(?:array|pair|tuple|complex|numeric_limits)(?=\s*<)|make_pair|make_tuple)\b")
_UNQUALIFIED = tuple(
    re.findall(
        r"\w+",
        "array pair make_pair tuple make_tuple get tie swap move forward numeric_limits is_same enable_if enable_if_t "
        "conditional conditional_t is_integral is_floating_point plus minus multiplies less greater equal_to "
        "lower_bound upper_bound min_element max_element accumulate complex real imag conj norm arg polar",
    )
)
PRELUDE = "gemmery_prelude.h"
_HANDLES = {
    "cublasContext": "cublasHandle_t", "cublasLtContext": "cublasLtHandle_t", "cudnnContext": "cudnnHandle_t",
    "cusparseContext": "cusparseHandle_t", "cusolverDnContext": "cusolverDnHandle_t", "ncclComm": "ncclComm_t",
    "curandGenerator_st": "curandGenerator_t",
}  # fmt: skip
_LIBRARIES = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n" + "".join(
    f"typedef struct {name}* {handle};\n" for name, handle in _HANDLES.items()
)
_MAP = "typedef struct CUtensorMap_st { alignas(64) unsigned long long opaque[16]; } CUtensorMap;\n"
_TYPES = {
    ("cublas", "cudnn", "torch/", "ATen/", "c10/", "nccl", "cusparse", "cusolver", "curand"): _LIBRARIES,
    ("cufft",): "typedef float2 cufftComplex; typedef double2 cufftDoubleComplex; typedef float cufftReal;\n"
    "typedef int cufftHandle;\n",
    ("cuda.h", "cudaTypedefs.h"): _MAP,
    ("GL/", "GLFW/", "glad/", "OpenGL/"): "typedef float GLfloat; typedef double GLdouble; typedef int GLint;\n"
    "typedef unsigned GLuint; typedef unsigned GLenum; typedef int GLsizei; typedef unsigned char GLubyte;\n",
}  # of the headers of libraries, by the beginnings of their names
ABSENT = "gemmery_absent_"  # a variable that stays in the PTX


@lru_cache
def prelude(library: tuple[str, ...], first: str, unqualified: tuple[str, ...] = ()) -> str:
    """What is included first; headers of the library take a second to compile."""
    lines = "".join(f"#include <cuda/std/{name}>\n" for name in library)
    also = " ".join(f"using cuda::std::{name};" for name in unqualified)
    lines += f"namespace std {{ using namespace cuda::std; }}\nnamespace _gm {{ {also} }}\n" if library else ""
    return files(__package__).joinpath("prelude.h").read_text(encoding="utf-8") + first + lines


def types_of(header: str) -> str:
    """The types of a library that kernels use, for a header that is not here."""
    return next((text for starts, text in _TYPES.items() if header.startswith(starts)), "")


def stand_ins(headers: Sequence[str], text: str, toolkit: tuple[str, ...]) -> dict[str, str]:
    """The texts in place of headers that are not here, each with a mark that it was included."""
    texts = {}
    uses_thrust = "thrust::" in text
    for number, header in enumerate(headers):
        if header.startswith("thrust/"):
            texts[header] = _OF_THRUST if uses_thrust else _THRUST
            continue
        is_silent = OF_HOST.fullmatch(header) or header.startswith(HOST_LIBRARIES)
        mark = "" if is_silent else f"__device__ __attribute__((used)) char {ABSENT}{number};\n"
        texts[header] = f"#pragma once\n{types_of(header)}{mark}"
    parts = {(kind.lower(), re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()) for kind, name in _OF_CUB.findall(text)}
    names = sorted(f"cub/{kind}/{kind}_{name}.cuh" for kind, name in parts)
    return texts | {CUB: "".join(f"#include <{name}>\n" for name in names if is_in(name, toolkit))}


def library_of(
    every: str, headers: Collection[str], declared: Collection[str], toolkit: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The headers of the C++ library for devices that a text needs, () where the prelude has all that it uses, and the
    names that it has from `using namespace std`, but for those that it declares itself.
    """
    needed = {word for pair in _TRAITS.findall(every) for word in pair if word and word not in _OF_HOST_LIBRARY}
    if USING.search(every):
        needed |= set(_OF_LIBRARY.findall(every))
    if not needed - set(re.findall(r"\w+", prelude((), ""))):
        return (), ()
    further = (it for it in headers if include.STANDARD.get(it, "?") and is_in(f"cuda/std/{it}", toolkit))
    library = tuple(sorted({*LIBRARY, *further}))
    names = _UNQUALIFIED[: None if "complex" in library else _UNQUALIFIED.index("complex")]
    return library, tuple(it for it in names if re.search(rf"\b{it}\b", every) and it not in declared)
