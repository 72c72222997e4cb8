// Effect: tensor cores cut a sum toward zero; CUDA cores round it.
// Each sum begins with 2^24, where float32 counts in twos, and takes STEPS whole numbers from 1 to 16, one from each
// product of a warp. `kept` stays in tensor cores from the first to the last: half of the numbers are odd, and each of
// those loses 1. `promoted` is added by CUDA cores, which round half of the odd ones up.
#include "ptx.cuh"

template <int STEPS> __global__ void truncation(const float* x, float* y, int n) {
  const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const int lane = threadIdx.x % 32;
  const unsigned first = lane % 4 * 2 == lane / 4, second = lane % 4 * 2 + 1 == lane / 4;
  const unsigned identity = (first | second << 16) * 0x3c00;  // B: its column j has a 1 in row j
  float kept[4], promoted[4];
  for (int i = 0; i < 4; ++i) kept[i] = promoted[i] = 0x1p24f;
#pragma unroll 1
  for (int step = 0; step < STEPS; ++step) {
    float numbers[4], part[4] = {};
    for (int i = 0; i < 4; ++i) numbers[i] = x[(4 * thread + i + 127 * step) % n] + 9;
    const unsigned a[4] = {ptx::cvt_rn_f16x2_f32(numbers[0], numbers[1]),
                           ptx::cvt_rn_f16x2_f32(numbers[2], numbers[3])};
    ptx::mma_m16n8k16_f16(kept, a, identity, 0);
    ptx::mma_m16n8k16_f16(part, a, identity, 0);
    for (int i = 0; i < 4; ++i) promoted[i] += part[i];
  }
  for (int i = 0; i < 4; ++i) {
    y[8 * thread + i] = kept[i] - 0x1p24f;
    y[8 * thread + 4 + i] = promoted[i] - 0x1p24f;
  }
}
