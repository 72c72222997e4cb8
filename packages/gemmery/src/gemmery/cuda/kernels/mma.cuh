// A warp's products by mma.sync, and its sums into C.
// Which lane holds which element: NVIDIA, PTX ISA, "Matrix Fragments for mma.m16n8k16" and "mma.m16n8k8".
#pragma once
#include "epilogue.cuh"
#include "load.cuh"
#include "tiling.cuh"

__device__ __forceinline__ void mma(f16, float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  ptx::mma_m16n8k16_f16(d, a, b0, b1);
}
__device__ __forceinline__ void mma(bf16, float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  ptx::mma_m16n8k16_bf16(d, a, b0, b1);
}
__device__ __forceinline__ void mma(tf32, float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  ptx::mma_m16n8k8_tf32(d, a, b0, b1);
}

// The sums of a warp: 16 x 8 elements of C in four registers. Lane l holds columns 2 (l % 4) and the next, in rows
// l / 4 and l / 4 + 8.
template <class T, int WM, int WN> struct WarpSums {
  float of[WM / 16][WN / 8][4] = {};

  template <class A, class B> __device__ __forceinline__ void multiply(const A& a, const B& b) {
#pragma unroll
    for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
      for (int j = 0; j < WN / 8; ++j) {
        mma(T(), of[i][j], a.of[i], b.of[j / 2][j % 2 * 2], b.of[j / 2][j % 2 * 2 + 1]);
      }
    }
  }

  // VEC divides p.n. Four lanes hold adjacent parts of a row, 8 bytes in f32 and 4 in half precision, and exchange them
  // so that each has 16.
  template <int EPILOGUE, int VEC, class Out>
  __device__ __forceinline__ void store(const Product<T, Out>& p, int batch, int row, int column) const {
    constexpr int PAIRS = VEC == 8 && WN % 32 == 0 ? 4 : 1;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < WM / 8; ++i) {
      int y = row + i * 8 + lane / 4;
#pragma unroll
      for (int j = 0; j < WN / 8; j += PAIRS) {
        Chunk<Out, 2> pairs[PAIRS];
#pragma unroll
        for (int k = 0; k < PAIRS; ++k) {
          const float* sums = of[i / 2][j + k] + i % 2 * 2;
          pairs[k] = finished_pair<EPILOGUE>(p, batch, y, column + (j + k) * 8 + lane % 4 * 2, sums);
        }
        if constexpr (PAIRS == 4) {
          exchange(reinterpret_cast<unsigned(&)[4]>(pairs));
          put<8>(p, batch, y, column + (j + lane % 4) * 8, reinterpret_cast<Chunk<Out, 8>&>(pairs));
        } else {
          put<(VEC > 2 ? 2 : VEC)>(p, batch, y, column + j * 8 + lane % 4 * 2, pairs[0]);
        }
      }
    }
  }

 private:
  template <int EPILOGUE, class Out>
  static __device__ __forceinline__ Chunk<Out, 2> finished_pair(const Product<T, Out>& p, int batch, int y, int x,
                                                                const float* sums) {
    Chunk<Out, 2> pair = {};
    if (EPILOGUE == PLAIN || (y < p.m && x < p.n)) {
      Out* c = p.c_at(batch, y, x);
      pair.of[0] = finished<EPILOGUE>(p, c, y, x, sums[0]);
      if (EPILOGUE == PLAIN || x + 1 < p.n) pair.of[1] = finished<EPILOGUE>(p, c + p.c_col, y, x + 1, sums[1]);
    }
    return pair;
  }

  // Word w of lane l of four becomes word l of lane w.
  static __device__ __forceinline__ void exchange(unsigned (&word)[4]) {
    int lane = threadIdx.x;
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      bool high = lane & offset;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if (w & offset) continue;
        unsigned sent = high ? word[w] : word[w + offset];
        (high ? word[w] : word[w + offset]) = __shfl_xor_sync(0xffffffff, sent, offset);
      }
    }
  }

  template <int WIDTH, int COUNT, class Out>
  static __device__ __forceinline__ void put(const Product<T, Out>& p, int batch, int y, int x,
                                             const Chunk<Out, COUNT>& values) {
    if (y >= p.m) return;
    Out* c = p.c_at(batch, y, x);
    if constexpr (WIDTH == COUNT) {
      if (x < p.n) *reinterpret_cast<Chunk<Out, COUNT>*>(c) = values;
    } else {
#pragma unroll
      for (int v = 0; v < COUNT; ++v) {
        if (x + v < p.n) c[v * p.c_col] = values.of[v];
      }
    }
  }
};
