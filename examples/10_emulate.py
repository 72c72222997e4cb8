"""Run a CUDA kernel without a GPU: its result, its memory accesses, its faults.

`assert gm.emulate(...).shared.bank_conflicts == 0` in a test keeps a kernel free of conflicts; see docs/emulator.md.
"""

import numpy as np

import gemmery as gm

TRANSPOSE = """
__global__ void transpose(const float* x, float* y) {
  __shared__ float tile[32][32 + PAD];
  tile[threadIdx.y][threadIdx.x] = x[threadIdx.y * 32 + threadIdx.x];
  __syncthreads();
  y[threadIdx.y * 32 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}"""

x = np.arange(1024, dtype=np.float32).reshape(32, 32)
for pad in (0, 1):
    y = np.zeros_like(x)
    run = gm.emulate(TRANSPOSE, "transpose", grid=1, block=(32, 32), args=[x, y], options=(f"-DPAD={pad}",))
    print(f"rows of {32 + pad}: correct {np.array_equal(y, x.T)}, {run.shared.bank_conflicts} bank conflicts")
    for line, counts in run.lines.items():
        if counts.shared.requests:
            print(f"  {line}  {counts.shared.wavefronts} wavefronts, ideal {counts.shared.wavefronts_ideal}")

run = gm.emulate(TRANSPOSE.replace("__syncthreads();", ""), "transpose", 1, (32, 32), [x, y], options=("-DPAD=1",))
print("findings without the barrier:")
for finding in run.findings:
    print(f"  {finding}")
