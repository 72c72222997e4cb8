// Well-known ladders, written anew: products in f32, transposes, reductions, histograms, stencils.
// Matrices are row-major, their sides multiples of every tile.

// C = alpha A B + beta C, an element a thread. A warp takes a column of C, or a row.
template <bool COALESCED>
__global__ void product_plain(const float* a, const float* b, float* c, int n, int k, float alpha, float beta) {
  const int fast = blockIdx.x * 32 + threadIdx.x % 32, slow = blockIdx.y * 32 + threadIdx.x / 32;
  const int row = COALESCED ? slow : fast, col = COALESCED ? fast : slow;
  float sum = 0;
  for (int i = 0; i < k; ++i) sum += a[row * k + i] * b[i * n + col];
  c[row * n + col] = alpha * sum + beta * c[row * n + col];
}

// A tile of A and one of B in shared memory; a thread has TM x TN elements of C. QUADS loads float4; where a
// tile has FEWer than the block has threads, all threads load, within A and B. TURNED keeps A's tile by columns. BANKS
// is how B's tile lies: 0 by rows, 1 with the elements of a thread apart, 2 with padded rows. How often a thread loads is
// a constant, as published: a loop from its own index to the end would not be unrolled, and load one after the other.
template <int BM, int BN, int BK, int TM, int TN, bool QUADS, bool TURNED, int BANKS>
__global__ void __launch_bounds__(BM * BN / TM / TN)
product_tiled(const float* a, const float* b, float* c, int n, int k, float alpha, float beta) {
  constexpr int THREADS = BM * BN / TM / TN, PITCH = BN + (BANKS == 2 ? 5 : 0), ACROSS = BN / TN;
  constexpr bool FEW = BM * BK / 4 < THREADS;
  __shared__ __align__(16) float sa[BM * BK], sb[BK * PITCH];
  const int t = threadIdx.x, row = t / ACROSS, col = t % ACROSS;
  a += blockIdx.y * BM * k;
  b += blockIdx.x * BN;
  float sums[TM][TN] = {};
  for (int at = 0; at < k; at += BK, a += BK, b += BK * n) {
    if constexpr (QUADS) {
#pragma unroll
      for (int e = 0; e < BM * BK / 4; e += THREADS) {
        const int i = e + t, r = i / (BK / 4), q = i % (BK / 4) * 4;
        if (!FEW && r >= BM) break;
        float4 v = {};
        if (!FEW || (blockIdx.y * BM + r < n && at + q < k)) v = *(const float4*)(a + r * k + q);
        if (r >= BM) break;
        if constexpr (TURNED) {
          sa[q * BM + r] = v.x, sa[(q + 1) * BM + r] = v.y, sa[(q + 2) * BM + r] = v.z, sa[(q + 3) * BM + r] = v.w;
        } else {
          *(float4*)(sa + r * BK + q) = v;
        }
      }
#pragma unroll
      for (int e = 0; e < BK * BN / 4; e += THREADS) {
        const int i = e + t, r = i / (BN / 4), q = i % (BN / 4) * 4;
        if (!FEW && r >= BK) break;
        float4 v = {};
        if (!FEW || at + r < k) v = *(const float4*)(b + r * n + q);
        if (r >= BK) break;
        if constexpr (BANKS == 0) {
          *(float4*)(sb + r * PITCH + q) = v;
        } else if constexpr (BANKS == 1) {
          float* to = sb + (r * TN + q % TN) * ACROSS + q / TN;
          to[0] = v.x, to[ACROSS] = v.y, to[2 * ACROSS] = v.z, to[3 * ACROSS] = v.w;
        } else {
          float* to = sb + r * PITCH + q;
          to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        }
      }
    } else {
#pragma unroll
      for (int e = 0; e < BM * BK; e += THREADS) {
        const int i = e + t, r = i / BK, q = i % BK;
        sa[TURNED ? q * BM + r : i] = a[r * k + q];
      }
#pragma unroll
      for (int e = 0; e < BK * BN; e += THREADS) sb[e + t] = b[(e + t) / BN * n + (e + t) % BN];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BK; ++i) {
      float va[TM], vb[TN];
      for (int r = 0; r < TM; ++r) va[r] = sa[TURNED ? i * BM + row * TM + r : (row * TM + r) * BK + i];
      for (int q = 0; q < TN; ++q) {
        vb[q] = BANKS == 1 ? sb[(i * TN + q) * ACROSS + col] : sb[i * PITCH + col * TN + q];
      }
      for (int r = 0; r < TM; ++r)
        for (int q = 0; q < TN; ++q) sums[r][q] += va[r] * vb[q];
    }
    __syncthreads();
  }
  for (int r = 0; r < TM; ++r) {
    float* to = c + (blockIdx.y * BM + row * TM + r) * n + blockIdx.x * BN + col * TN;
    if constexpr (QUADS && TN % 4 == 0) {
      for (int q = 0; q < TN; q += 4) {
        float4 v = *(float4*)(to + q);
        v.x = alpha * sums[r][q] + beta * v.x, v.y = alpha * sums[r][q + 1] + beta * v.y;
        v.z = alpha * sums[r][q + 2] + beta * v.z, v.w = alpha * sums[r][q + 3] + beta * v.w;
        *(float4*)(to + q) = v;
      }
    } else {
      for (int q = 0; q < TN; ++q) to[q] = alpha * sums[r][q] + beta * to[q];
    }
  }
}

// The same with a tile for each warp, of parts of which each thread has TM x TN elements. HALVES: one half of the
// threads loads while the other multiplies, from two pairs of tiles.
template <int BM, int BN, int BK, int WM, int WN, int PARTS_N, int TM, int TN, bool QUADS, bool HALVES>
__global__ void __launch_bounds__(BM / WM * (BN / WN) * 32)
product_warps(const float* a, const float* b, float* c, int n, int k, float alpha, float beta) {
  constexpr int THREADS = BM / WM * (BN / WN) * 32, PARTS_M = WM * WN / (32 * TM * TN * PARTS_N);
  constexpr int PM = WM / PARTS_M, PN = WN / PARTS_N, LOADERS = HALVES ? THREADS / 2 : THREADS;
  __shared__ __align__(16) float sa[(HALVES ? 2 : 1) * BM * BK], sb[(HALVES ? 2 : 1) * BK * BN];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = threadIdx.x % LOADERS;
  const int top = warp / (BN / WN) * WM + lane / (PN / TN) * TM, left = warp % (BN / WN) * WN + lane % (PN / TN) * TN;
  a += blockIdx.y * BM * k;
  b += blockIdx.x * BN;
  float sums[PARTS_M * TM][PARTS_N * TN] = {};
  auto load = [&](int at, float* ta, float* tb) {
    if constexpr (QUADS) {
#pragma unroll
      for (int i = t; i < BM * BK / 4; i += LOADERS) {
        const int r = i / (BK / 4), q = i % (BK / 4) * 4;
        const float4 v = *(const float4*)(a + r * k + at + q);
        ta[q * BM + r] = v.x, ta[(q + 1) * BM + r] = v.y, ta[(q + 2) * BM + r] = v.z, ta[(q + 3) * BM + r] = v.w;
      }
#pragma unroll
      for (int i = t; i < BK * BN / 4; i += LOADERS) {
        *(float4*)(tb + i * 4) = *(const float4*)(b + (at + i / (BN / 4)) * n + i % (BN / 4) * 4);
      }
    } else {
#pragma unroll
      for (int i = t; i < BM * BK; i += LOADERS) ta[i % BK * BM + i / BK] = a[i / BK * k + at + i % BK];
#pragma unroll
      for (int i = t; i < BK * BN; i += LOADERS) tb[i] = b[(at + i / BN) * n + i % BN];
    }
  };
  auto multiply = [&](const float* ta, const float* tb) {
#pragma unroll
    for (int i = 0; i < BK; ++i) {
      float va[PARTS_M * TM], vb[PARTS_N * TN];
      for (int r = 0; r < PARTS_M * TM; ++r) va[r] = ta[i * BM + top + r / TM * PM + r % TM];
      for (int q = 0; q < PARTS_N * TN; ++q) vb[q] = tb[i * BN + left + q / TN * PN + q % TN];
      for (int r = 0; r < PARTS_M * TM; ++r)
        for (int q = 0; q < PARTS_N * TN; ++q) sums[r][q] += va[r] * vb[q];
    }
  };
  if constexpr (HALVES) {
    const bool first = threadIdx.x < LOADERS;
    float *next_a = sa + BM * BK, *next_b = sb + BK * BN;
    if (first) load(0, sa, sb);
    __syncthreads();
    for (int at = 0; at < k; at += 2 * BK) {
      if (first) {
        multiply(sa, sb);
        __syncthreads();
        multiply(next_a, next_b);
        __syncthreads();
        if (at + 2 * BK < k) load(at + 2 * BK, sa, sb);
      } else {
        load(at + BK, next_a, next_b);
        __syncthreads();
        multiply(sa, sb);
        __syncthreads();
        multiply(next_a, next_b);
      }
      __syncthreads();
    }
  } else {
    for (int at = 0; at < k; at += BK) {
      load(at, sa, sb);
      __syncthreads();
      multiply(sa, sb);
      __syncthreads();
    }
  }
  for (int r = 0; r < PARTS_M * TM; ++r) {
    float* to = c + (blockIdx.y * BM + top + r / TM * PM + r % TM) * n + blockIdx.x * BN + left;
    for (int q = 0; q < PARTS_N * TN; q += 4) {
      float4* quad = (float4*)(to + q / TN * PN + q % TN);
      float4 v = *quad;
      v.x = alpha * sums[r][q] + beta * v.x, v.y = alpha * sums[r][q + 1] + beta * v.y;
      v.z = alpha * sums[r][q + 2] + beta * v.z, v.w = alpha * sums[r][q + 3] + beta * v.w;
      *quad = v;
    }
  }
}

// Copies and transposes of an n x n matrix, tiles of 32 x 32 by 32 x 8 threads. PITCH is that of the tile in shared
// memory, 0 without one.
template <bool TRANSPOSED, int PITCH>
__global__ void moved(float* to, const float* from, int n) {
  __shared__ float tile[32 * (PITCH ? PITCH : 1)];
  int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
  if constexpr (PITCH == 0) {
    for (int j = 0; j < 32; j += 8) to[TRANSPOSED ? x * n + y + j : (y + j) * n + x] = from[(y + j) * n + x];
  } else {
    for (int j = 0; j < 32; j += 8) tile[(threadIdx.y + j) * PITCH + threadIdx.x] = from[(y + j) * n + x];
    __syncthreads();
    if (TRANSPOSED) x = blockIdx.y * 32 + threadIdx.x, y = blockIdx.x * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8) {
      const int up = threadIdx.y + j, across = threadIdx.x;
      to[(y + j) * n + x] = tile[TRANSPOSED ? across * PITCH + up : up * PITCH + across];
    }
  }
}

// Sums of blocks. STEP 1: neighbors, by a remainder; 2: strided indices; 3: halves; 4: the first addition while
// loading; 5: the last warp alone; 6: unrolled; 7: many elements a thread.
__device__ __forceinline__ void last_warp(volatile float* part, int t, int threads) {
  if (threads >= 64) part[t] += part[t + 32];
  __syncwarp();
  for (int far = 16; far > 0; far /= 2) {
    const float other = part[t + far];
    __syncwarp();
    part[t] += other;
    __syncwarp();
  }
}
template <int STEP, int THREADS>
__global__ void summed(const float* from, float* to, int n) {
  __shared__ float part[THREADS + 16];
  const unsigned t = threadIdx.x, i = blockIdx.x * (STEP >= 4 ? 2 * THREADS : THREADS) + t;
  float sum = STEP == 7 ? 0 : from[i];
  if constexpr (STEP == 7) {
    for (unsigned at = i; at < n; at += gridDim.x * 2 * THREADS) sum += from[at] + from[at + THREADS];
  } else if constexpr (STEP >= 4) {
    sum += from[i + THREADS];
  }
  part[t] = sum;
  __syncthreads();
  if constexpr (STEP == 1) {
    for (unsigned far = 1; far < blockDim.x; far *= 2) {
      if (t % (2 * far) == 0) part[t] += part[t + far];
      __syncthreads();
    }
  } else if constexpr (STEP == 2) {
    for (unsigned far = 1; far < blockDim.x; far *= 2) {
      const unsigned at = 2 * far * t;
      if (at < blockDim.x) part[at] += part[at + far];
      __syncthreads();
    }
  } else if constexpr (STEP <= 5) {
    for (unsigned far = blockDim.x / 2; far > (STEP == 5 ? 32 : 0); far /= 2) {
      if (t < far) part[t] += part[t + far];
      __syncthreads();
    }
  } else {
#pragma unroll
    for (unsigned far = THREADS / 2; far > 32; far /= 2) {
      if (t < far) part[t] += part[t + far];
      __syncthreads();
    }
  }
  if (STEP >= 5 && t < 32) last_warp(part, t, THREADS);
  if (t == 0) to[blockIdx.x] = part[0];
}

// Counts of bytes: in global memory, or in shared memory first.
template <bool SHARED>
__global__ void counted(const unsigned char* from, unsigned* bins, int n) {
  __shared__ unsigned own[256];
  if (SHARED) own[threadIdx.x] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    atomicAdd(SHARED ? own + from[i] : bins + from[i], 1u);
  }
  __syncthreads();
  if (SHARED) atomicAdd(bins + threadIdx.x, own[threadIdx.x]);
}

// A star of radius 4 along x, y and z of an n x n x n cube: neighbors from global memory; along z from registers; and
// the plane from shared memory too.
template <int WAY>
__global__ void star(const float* from, float* to, int n) {
  constexpr int R = 4;
  __shared__ float plane[WAY == 2 ? 16 + 2 * R : 1][WAY == 2 ? 32 + 2 * R : 1];
  const int x = blockIdx.x * 32 + threadIdx.x + R, y = blockIdx.y * 16 + threadIdx.y + R, across = n * n;
  if (WAY == 0) {
    const int z = blockIdx.z + R, at = (z * n + y) * n + x;
    float sum = from[at];
    for (int r = 1; r <= R; ++r) {
      sum += from[at - r] + from[at + r] + from[at - r * n] + from[at + r * n] + from[at - r * across];
      sum += from[at + r * across];
    }
    to[at] = sum;
    return;
  }
  float column[2 * R + 1];
  int at = y * n + x;
  for (int r = 0; r < 2 * R; ++r) column[r] = from[at + r * across];
  at += R * across;
  for (int z = R; z < n - R; ++z, at += across) {
    column[2 * R] = from[at + R * across];
    float sum = column[R];
    if (WAY == 2) {
      __syncthreads();
      plane[threadIdx.y + R][threadIdx.x + R] = sum;
      if (threadIdx.y < R) {
        plane[threadIdx.y][threadIdx.x + R] = from[at - R * n];
        plane[threadIdx.y + 16 + R][threadIdx.x + R] = from[at + 16 * n];
      }
      if (threadIdx.x < R) {
        plane[threadIdx.y + R][threadIdx.x] = from[at - R];
        plane[threadIdx.y + R][threadIdx.x + 32 + R] = from[at + 32];
      }
      __syncthreads();
    }
    for (int r = 1; r <= R; ++r) {
      if (WAY == 2) {
        sum += plane[threadIdx.y + R][threadIdx.x + R - r] + plane[threadIdx.y + R][threadIdx.x + R + r];
        sum += plane[threadIdx.y + R - r][threadIdx.x + R] + plane[threadIdx.y + R + r][threadIdx.x + R];
      } else {
        sum += from[at - r] + from[at + r] + from[at - r * n] + from[at + r * n];
      }
      sum += column[R - r] + column[R + r];
    }
    to[at] = sum;
    for (int r = 0; r < 2 * R; ++r) column[r] = column[r + 1];
  }
}
