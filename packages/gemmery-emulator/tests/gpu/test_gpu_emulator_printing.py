"""What kernels print: on a device to the character what the emulator makes of it."""

import numpy as np
import pytest

import gemmery as gm
from gemmery.cuda import driver, nvrtc
from gpu_operands import functions, launch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(driver.missing()), reason=driver.missing())]

TALK = r"""
extern "C" __global__ void talk(int* counts) {
  __shared__ char word[3];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float half = i + 0.5f;
  if (threadIdx.x == 0) { word[0] = 'h'; word[1] = 'i'; word[2] = 0; }
  __syncthreads();
  if (i % 33 == 0) counts[0] = printf("thread %d: %.2f, %s %s%c %lld\n", i, half, "well", "yo", 'u', 1ll << 40);
  if (i == 1) counts[1] = printf("%5d|%-5d|%05d|%+d|% d|%.3d|%u|%x|%#X|%#o|%#x\n", i, i, i, i, i, i, -i, -i, 255, 8, 0);
  if (i == 2) counts[2] = printf("%ld %llu %hd %p\n", -5l, ~0ull, 70000, (void*)0);
  if (i == 3) counts[3] = printf("%f %10.3e %-12g| %G %.0f %a\n", half, half * 1e6f, half, 1e-7, 2.5, 0.75);
  if (i == 4) counts[4] = printf("%*d|%-*d|%.*f|100%%\n", 6, 42, 4, 7, 2, 3.14159);
  if (i == 5) counts[5] = printf("nothing to add\n");
  if (i == 6) counts[6] = printf("%f %f\n", 1.0 / 0.0 * (i - 5), -1.0 / 0.0 * (i - 5));
}"""


def test_the_same_is_printed(capfd):
    made = nvrtc.ptx_alone(TALK, "talk.cu", "talk", driver.device().arch)
    counts = np.zeros(8, np.int32)
    memory = driver.Memory(counts.nbytes)
    memory.write(counts)
    launch(*functions(made.text, ["talk"]), 2, 64, memory)
    memory.read(counts)
    theirs = capfd.readouterr().out
    ours = np.zeros(8, np.int32)
    gm.emulate(TALK, "talk", 2, 64, [ours])
    printed = capfd.readouterr().out
    assert (sorted(printed.splitlines()), ours.tolist()) == (sorted(theirs.splitlines()), counts.tolist())
    assert len(printed.splitlines()) == 10
