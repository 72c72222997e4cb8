"""What a kernel's pointers point to, read from the symbols that NVRTC makes, and arrays of other types refused."""

import numpy as np
import pytest

import gemmery as gm
from gemmery_emulator.symbols import mismatch, pointees

# Symbols as NVRTC 13.5 wrote them, and what the parameters point to in the source.
SYMBOLS = {
    "_Z2vad": [""],
    "_Z1fv": [],
    "_Z1tPfPKffmP7__half2PaPFiiS_EPKS_": ["float", "float", "", "", "__half2", "signed char", "", ""],
    "_Z1gIfLi4EEvPKT_PS0_i": ["float", "float", ""],
    "_Z1gI6__halfLi2EEvPKT_PS1_i": ["__half", "__half", ""],
    "_Z3varIJfiEEvDpPT_": ["float", "int"],
    "_Z2enP1ES_Pt": ["E", "", "unsigned short"],
    "_ZL1sPd": ["double"],
    "_ZN1q1hENS_1SEPS0_PNS_1PEP6float4PKS4_P6__halfS9_P13__nv_bfloat16PvPhPaPcPyPlPbPKPKdPA4_fPVfPVKiRfPjSU_Psd": [
        *["", "", "", "float4", "float4", "__half", "__half", "__nv_bfloat16", "void", "unsigned char", "signed char"],
        *["char", "unsigned long long", "long", "bool", "", "float", "float", "int", "float", "unsigned int"],
        *["unsigned int", "short", ""],
    ],
}


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_pointers_are_read_from_a_symbol(symbol):
    assert list(pointees(symbol)) == SYMBOLS[symbol]


def test_a_symbol_that_is_not_understood_says_nothing():
    """Plain names, other manglings, and every symbol of the table cut short or with a letter changed."""
    assert pointees("add") == pointees("_Z") == pointees("_RNvC3foo3add") == ()
    assert pointees("_Z3addU3fooPf") == ("",)
    for symbol in SYMBOLS:
        for end in range(len(symbol)):
            assert isinstance(pointees(symbol[:end]), tuple)
            assert isinstance(pointees(f"{symbol[:end]}S{symbol[end + 1 :]}"), tuple)


DECLARED = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
namespace inner { struct float4 { float x; }; template<class T> struct Box { T* p; }; }
template<class T> struct Pair { T a, b; };
template<class T, int N, class... More> __global__ void
every(T* x, const T* __restrict__ y, int n, Pair<T>* pairs, T (*rows)[N], const More*... more,
      unsigned long long* z) {}
__global__ void plain(inner::float4* a, inner::Box<float>* b, inner::Box<float> c, const inner::float4& d, half2* e,
                      __nv_bfloat162* f, const float* const* g, char* h, float i, size_t j, const size_t* k,
                      uint3* l) {}
static __global__ void alone(float* x) {}
"""


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("every<float, 4>", ["float", "float", "", "", "float", "unsigned long long"]),
        (
            "every<__half, 8, int, double>",
            ["__half", "__half", "", "", "__half", "int", "double", "unsigned long long"],
        ),
        (
            "plain",
            ["", "", "", "", "__half2", "__nv_bfloat162", "", "char", "", "", "unsigned long", "uint3"],
        ),
        ("alone", ["float"]),
    ],
)
def test_pointers_of_what_the_compiler_lowers(kernel, expected):
    nvrtc = pytest.importorskip("gemmery.cuda.nvrtc")
    from gemmery.cuda import include

    options = tuple(f"-I{folder}" for folder in include.folders())
    made = nvrtc.ptx_alone(DECLARED, "k.cu", kernel, "sm_90", options)
    assert list(pointees(made.entry)) == expected


@pytest.mark.parametrize(
    ("pointee", "taken", "refused"),
    [
        ("float", "f4 c8", "f8 f2 i4 u4 u1 i8 c16 ?"),
        ("double", "f8 c16", "f4 i8 c8"),
        ("float4", "f4 c8", "f8 i4"),
        ("__half", "f2 u2 i2", "f4 i4 u1"),
        ("__nv_bfloat162", "u2 i2", "f2 f4"),
        ("int", "i4 u4", "f4 i8 i2 ?"),
        ("unsigned short", "u2 i2 f2", "f4 u4 ?"),
        ("ulonglong2", "u8 i8", "f8 u4"),
        ("unsigned char", "u1 i1 f4 f8 ?", ""),
        ("char", "u1 f8", ""),
        ("void", "u1 f8 i4", ""),
        ("bool", "? u1 f4", ""),
        ("", "f4 f8", ""),
        ("Mine", "f4 f8", ""),
    ],
)
def test_which_arrays_a_pointer_takes(pointee, taken, refused):
    for name in taken.split():
        assert mismatch(pointee, np.dtype(name)) == "", name
    for name in refused.split():
        assert mismatch(pointee, np.dtype(name)), name
    assert mismatch(pointee, np.dtype([("a", "f8")])) == mismatch(pointee, np.dtype("V16")) == ""


def test_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    assert mismatch("__nv_bfloat16", bfloat16) == ""
    assert mismatch("unsigned short", bfloat16) == mismatch("short", bfloat16) == ""
    assert (mismatch("float", bfloat16), mismatch("__half", bfloat16)) == ("float32", "float16")


@pytest.mark.parametrize(
    ("code", "kernel"),
    [
        ("__global__ void f(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }", "f"),
        ("template<class T> __global__ void f(const T* x, T* y) { y[threadIdx.x] = x[threadIdx.x]; }", "f<float>"),
    ],
)
def test_an_array_of_another_type_is_refused_in_words(code, kernel):
    x, y = np.ones(4), np.zeros(4, np.float32)
    words = "argument 0 is an array of float64, but the kernel's parameter points to float: pass an array of float32"
    with pytest.raises(gm.ArgumentError, match=words):
        gm.emulate(code, kernel, 1, 4, [x, y])
    gm.emulate(code, kernel, 1, 4, [x.view(np.float32)[:4].copy(), y])
    gm.emulate(code.replace("__global__", 'extern "C" __global__') if kernel == "f" else code, kernel, 1, 4, [None, y])
