"""printf in kernels: what C would print, thread by thread."""

import ctypes
import sys

import numpy as np
import pytest

import gemmery as gm
from gemmery_emulator.printing import formatted

SIGNED = ["%d", "%i", "%5d", "%-5d|", "%05d", "%+d", "% d", "%.3d", "%hd"]
UNSIGNED = ["%u", "%x", "%X", "%#x", "%#X", "%-#8x|", "%o", "%#o", "%hu"]
LONGS = ["%ld", "%lld", "%llu", "%lx", "%20lld"]
FLOATS = ["%f", "%.2f", "%10.3e", "%-12g|", "%G", "%E", "%+f", "%08.2f", "%a", "%A", "%.0f", "%#.0f"]
CASES = [
    *[(text, (ctypes.c_int(value),)) for text in SIGNED + UNSIGNED for value in (0, 5, -3, 70000, 2**31 - 1)],
    *[(text, (ctypes.c_longlong(value),)) for text in LONGS for value in (7, -9, 2**40)],
    *[(text, (ctypes.c_double(value),)) for text in FLOATS for value in (1.0, -2.75, 12345.678, 1e-7)],
    ("%c%c", (ctypes.c_int(65), ctypes.c_int(122))),
    ("%*d|%-*d|%*.2f", (*map(ctypes.c_int, (6, 42, 4, 7, 9)), ctypes.c_double(3.14159))),
    ("100%% of %d", (ctypes.c_int(3),)),
    ("%f %F %5.1f", (ctypes.c_double(np.inf), ctypes.c_double(-np.inf), ctypes.c_double(np.inf))),
]


@pytest.mark.skipif(sys.platform == "win32", reason="C's library is not loaded by its process's name")
@pytest.mark.parametrize(("text", "values"), CASES)
def test_a_format_means_what_it_means_in_c(text, values):
    buffer = ctypes.create_string_buffer(256)
    ctypes.CDLL(None).snprintf(buffer, 256, text.encode(), *values)
    left = list(values)

    def following(kind):
        value = left.pop(0)
        assert np.dtype(kind).itemsize == ctypes.sizeof(value)
        return np.frombuffer(bytes(value), kind)[0]

    assert formatted(text, following, str) == buffer.value.decode()
    assert left == []


WORDS = """
__global__ void words(const float* x, int* counts) {
  __shared__ char word[3];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (threadIdx.x == 0) { word[0] = 'h'; word[1] = 'i'; word[2] = 0; }
  __syncthreads();
  if (i % 33 == 0) printf("thread %d: %.2f, %s %s%c %lld\\n", i, x[i], word, "yo", 'u', 1ll << 40);
  counts[i] = printf("");
  if (i == 40) counts[i] = printf("%s\\n", (const char*)0);
}"""


@pytest.mark.parametrize("seed", [None, 1])
def test_threads_print_one_after_the_other(capsys, seed):
    x, counts = np.arange(128, dtype=np.float32) / 4, np.full(128, -1, np.int32)
    run = gm.emulate(WORDS, "words", 2, 64, [x, counts], seed=seed)
    printed = capsys.readouterr().out.splitlines()
    spoken = [f"thread {i}: {i / 4:.2f}, hi you 1099511627776" for i in (0, 33, 66, 99)]
    assert sorted(printed) == sorted([*spoken, "(null)"])
    if seed is None:
        assert printed == [*spoken, "(null)"]
    assert counts.tolist() == [int(i == 40) for i in range(128)]
    assert run.findings == ()


def test_what_a_device_does_not_know_stays_as_it_stands():
    """No argument is taken for it."""
    left = [1, 2]
    assert formatted("%d %.*f %hhu %zu %d", lambda kind: np.array([left.pop(0)], kind)[0], str) == "1 %.*f %hhu %zu 2"


@pytest.mark.parametrize("address", ["123456789", "-5", "1ll << 62"])
def test_a_string_that_is_nowhere_is_a_finding(capsys, address):
    code = f'__global__ void f(int* y) {{\n  y[0] = printf("a %s %d", (const char*)({address}), 7); }}'
    y = np.zeros(1, np.int32)
    (found,) = gm.emulate(code, "f", 1, 1, [y]).findings
    assert capsys.readouterr().out == "a  7"
    assert (found.kind, found.line.number, y[0]) == ("misuse", 2, 2)
    assert "where there is no memory" in found.message
