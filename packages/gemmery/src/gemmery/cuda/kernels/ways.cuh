// Two branches of equal length: STEPS multiply-adds each, which the compiler cannot merge.
#pragma once

// x + STEPS / 2: every step adds one half.
template <int STEPS> __device__ __forceinline__ float rising(float x) {
#pragma unroll 16
  for (int step = 0; step < STEPS; ++step) x = __fmaf_rn(x, 1.0f, 0.5f);
  return x;
}

// x - STEPS / 2
template <int STEPS> __device__ __forceinline__ float falling(float x) {
#pragma unroll 16
  for (int step = 0; step < STEPS; ++step) x = __fmaf_rn(x, 1.0f, -0.5f);
  return x;
}
