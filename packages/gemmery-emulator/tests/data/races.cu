// Kernels with a race each, in global and in shared memory, and their repair.
#include "faults.cuh"

#define B int(blockIdx.x)
#define N int(blockDim.x)
#define I (B * N + T)

// 3 x 64: every thread adds to one sum.
KERNEL(sum_not_atomic) { EITHER(y[0] += x[I], atomicAdd(y, x[I])); }

// 3 x 64: a smoothing step in place.
KERNEL(smoothed_in_place) { y[I + 1] = ((EITHER(y, x))[I] + EITHER(y, x)[I + 2]) / 2; }

// 3 x 64: the parts of two blocks share their last and first element.
KERNEL(parts_overlap) {
  for (int i = T; i EITHER(<=, <) N; i += N) y[B * N + i] = x[i] + B;
}

// 3 x 64: the blocks are half as far apart as they are long.
KERNEL(parts_too_close) { y[B * EITHER(32, 64) + T] = x[I]; }

// 64 x 64: a matrix is transposed in place.
KERNEL(transposed_in_place) { y[T * 64 + B] = (EITHER(y, x))[B * 64 + T]; }

// 4 x 32: the first block adds up what the others wrote.
KERNEL(sums_of_blocks) {
  if (T == 0) y[B] = x[B];
  if (EITHER(B, 1) == 0) y[100] = y[0] + y[1] + y[2] + y[3];
}

// 2 x 64: places in a list are counted without an atomic.
KERNEL(list_of_matches) {
  if (T % 3 == 0) {
    int place = EITHER(n[0]++, atomicAdd(n, 1));
    y[place] = x[I];
  }
}

// 2 x 64: the largest number is compared and replaced in two steps.
KERNEL(largest_in_two_steps) {
  int mine = int(x[I]);
  EITHER(if (mine > n[0]) n[0] = mine, atomicMax(n, mine));
}

// 2 x 64: the threads that find it store different places.
KERNEL(place_of_a_match) {
  if (T % 5 == 1) EITHER(n[0] = I, atomicMax(n, I));
}

// 1 x 64: a scan in global memory reads what a neighbor just replaced.
KERNEL(scan_in_global_memory) {
  y[T] = x[T];
  __syncthreads();
  for (int d = 1; d < 64; d *= 2) {
    float sum = y[T] + (T >= d ? y[T - d] : 0);
    ADD(__syncthreads());
    y[T] = sum;
    __syncthreads();
  }
}

// 3 x 32: only the last turn of a loop writes to the part of the next block.
KERNEL(last_turn_too_far) {
  for (int k = 0; k EITHER(<=, <) 8; ++k) y[B * 256 + k * 32 + T] = x[T] + B;
}

// 2 x 64: bits of a word are set by reading and writing it.
KERNEL(bits_of_a_word) { EITHER(n[I / 32] |= 1 << I % 32, atomicOr(n + I / 32, 1 << I % 32)); }

// 2 x 64: a byte is stored by replacing its word.
KERNEL(byte_in_a_word) {
  EITHER(n[I / 4] = (n[I / 4] & ~(255 << I % 4 * 8)) | T << I % 4 * 8, reinterpret_cast<char*>(n)[I] = char(T));
}

// 2 x 64: pairs are written by both of their threads.
KERNEL(pairs_written_twice) {
  if (EITHER(true, T % 2 == 0)) reinterpret_cast<float2*>(y)[I / 2] = float2{x[I], x[I + 1]};
}

// 2 x 64: the stride of the loop is that of a block, not of the grid.
KERNEL(stride_of_a_block) {
  for (int i = I; i < 512; i += EITHER(N, N * int(gridDim.x))) y[i] = x[i] + B;
}

// 3 x 64: the counts of each block are added to the sum without atomics.
KERNEL(counts_added) {
  __shared__ int counts[64];
  counts[T] = 0;
  __syncthreads();
  atomicAdd(counts + T * 7 % 16, 1);
  __syncthreads();
  EITHER(n[T] += counts[T], atomicAdd(n + T, counts[T]));
}

// (2, 4) x 64: blocks of one row share their sums.
KERNEL(product_by_blocks) { EITHER(y[I] += x[I] * blockIdx.y, atomicAdd(y + I, x[I] * blockIdx.y)); }

// 2 x 32: one block clears a count that the other one still raises.
KERNEL(count_cleared) {
  atomicAdd(n, 1);
  if (I == 33) n[EITHER(0, 1)] = 0;
}

// 4 x 1: a lock ends with a plain store.
KERNEL(lock_ends_plainly) {
  while (atomicCAS(n, 0, 1) != 0) {}
  __threadfence();
  y[0] += x[I];
  __threadfence();
  EITHER(n[0] = 0, atomicExch(n, 0));
}

// 4 x 1: blocks hold different locks for the same sum.
KERNEL(another_lock) {
  int* lock = n + EITHER(B % 2, 0);
  while (atomicCAS(lock, 0, 1) != 0) {}
  __threadfence();
  y[0] += x[I];
  __threadfence();
  atomicExch(lock, 0);
}

// 3 x 32: who comes first is asked and noted in two steps.
KERNEL(first_by_a_test) {
  if (T == 0) {
    EITHER(if (n[0] == 0) n[0] = B + 1, atomicCAS(n, 0, B + 1));
  }
}

// 2 x 32: a fence is missing before the last block reads, volatile or not.
KERNEL(volatile_is_no_fence) {
  if (T == 0) {
    reinterpret_cast<volatile float*>(y)[B] = x[B];
    ADD(__threadfence());
    if (atomicAdd(n, 1) == 1) {
      ADD(__threadfence());
      y[100] = y[0] + y[1];
    }
  }
}

// 1 x 64: a fence is no barrier.
KERNEL(fence_is_no_barrier) {
  y[T] = x[T];
  EITHER(__threadfence(), __syncthreads());
  y[64 + T] = y[T ^ 32];
}

// 1 x 64: phases of a sort of neighbors without a barrier between.
KERNEL(sort_of_neighbors) {
  for (int phase = 0; phase < 4; ++phase) {
    int i = 2 * T + phase % 2;
    float a = y[i], b = y[i + 1];
    y[i] = fminf(a, b);
    y[i + 1] = fmaxf(a, b);
    ADD(__syncthreads());
  }
}

// 2 x 64: a wave reads the array that it marks.
KERNEL(wave) {
  if ((n + EITHER(0, 1000))[I] == 0) n[I + 1] = I + 1;
}

// 2 x 64: pointers are followed in the array that is replaced.
KERNEL(pointers_followed) { n[I] = (n + EITHER(0, 1000))[(I * 5 + 1) % 128]; }

// 2 x 64: each thread adds to its own and to the next element.
KERNEL(scattered_to_neighbors) {
  EITHER(y[I] += x[I], y[2 * I] += x[I]);
  EITHER(y[I + 1] += x[I], y[2 * I + 1] += x[I]);
}

// 2 x 64: threads beyond the end all write the last element.
KERNEL(clamped_to_the_end) {
  int i = min(I, 99);
  if (EITHER(true, I < 100)) y[i] = x[I];
}

// 2 x 64: a ring is shorter than the grid.
KERNEL(ring_too_short) { y[I % EITHER(96, 128)] = x[I]; }

// 3 x 64: every thread of a block writes the block's result.
KERNEL(result_of_every_thread) {
  float mine = x[I];
  if (EITHER(true, T == 0)) y[B] = mine;
}

// 1 x 128: a sum in shared memory without a barrier between its steps.
KERNEL(sum_without_barrier) {
  __shared__ float s[128];
  s[T] = x[T];
  __syncthreads();
  for (int d = 64; d > 0; d /= 2) {
    if (T < d) s[T] += s[T + d];
    ADD(__syncthreads());
  }
  if (T == 0) y[0] = s[0];
}

// 1 x 64: the last steps of a sum rely on lock step.
KERNEL(sum_by_lock_step) {
  __shared__ volatile float s[64];
  s[T] = x[T];
  __syncthreads();
  if (T < 32) {
    for (int d = 32; d > 0; d /= 2) {
      float sum = s[T] + s[T + d];
      ADD(__syncwarp());
      s[T] = sum;
      ADD(__syncwarp());
    }
  }
  if (T == 0) y[0] = s[0];
}

// 1 x 64: a tile is loaded again before all have read it.
KERNEL(tile_loaded_again) {
  __shared__ float s[64];
  float sum = 0;
  for (int k = 0; k < 3; ++k) {
    s[T] = x[64 * k + T];
    __syncthreads();
    sum += s[63 - T];
    ADD(__syncthreads());
  }
  y[T] = sum;
}

// 1 x 64: two buffers, and the next tile goes to the one that is read.
KERNEL(wrong_buffer) {
  __shared__ float s[2][64];
  float sum = 0;
  s[0][T] = x[T];
  for (int k = 0; k < 3; ++k) {
    __syncthreads();
    s[(EITHER(k, k + 1)) % 2][T] = x[64 * k + 64 + T];
    sum += s[k % 2][63 - T];
  }
  y[T] = sum;
}

// 1 x 64: two buffers, and no barrier in the loop.
KERNEL(two_buffers_no_barrier) {
  __shared__ float s[2][64];
  float sum = 0;
  for (int k = 0; k < 4; ++k) {
    s[k % 2][T] = x[64 * k + T];
    EITHER(__syncwarp(), __syncthreads());
    sum += s[k % 2][63 - T];
  }
  y[T] = sum;
}

// 1 x 64: a scan with one buffer.
KERNEL(scan_with_one_buffer) {
  __shared__ float s[128];
  s[T] = x[T];
  __syncthreads();
  for (int d = 1, at = 0; d < 64; d *= 2, at ^= EITHER(0, 64)) {
    s[(at ^ EITHER(0, 64)) + T] = s[at + T] + (T >= d ? s[at + T - d] : 0);
    __syncthreads();
  }
  y[T] = s[T];
}

// 1 x 64: counts in shared memory without atomics.
KERNEL(counts_not_atomic) {
  __shared__ int counts[8];
  if (T < 8) counts[T] = 0;
  __syncthreads();
  EITHER(counts[T % 8]++, atomicAdd(counts + T % 8, 1));
  __syncthreads();
  if (T < 8) n[T] = counts[T];
}

// 1 x 64: counts are raised while they are being cleared.
KERNEL(counts_cleared_late) {
  __shared__ int counts[8];
  if (T < 8) counts[T] = 0;
  ADD(__syncthreads());
  atomicAdd(counts + T % 8, 1);
  __syncthreads();
  if (T < 8) n[T] = counts[T];
}

// 1 x 64: counts are read while they are being raised.
KERNEL(counts_read_early) {
  __shared__ int counts[8];
  if (T < 8) counts[T] = 0;
  __syncthreads();
  atomicAdd(counts + T % 8, 1);
  ADD(__syncthreads());
  if (T < 8) n[T] = counts[T];
}

// 2 x 64: a number for all, written by one thread.
KERNEL(number_for_all) {
  __shared__ float s;
  if (T == 0) s = x[B];
  ADD(__syncthreads());
  y[I] = s;
}

// 1 x 64: the next number for all, before all have the last.
KERNEL(next_number_for_all) {
  __shared__ float s;
  float sum = 0;
  for (int k = 0; k < 3; ++k) {
    if (T == 0) s = x[k];
    __syncthreads();
    sum += s;
    ADD(__syncthreads());
  }
  y[T] = sum;
}

// 1 x 64: two groups of warps meet at different barriers.
KERNEL(two_named_barriers) {
  __shared__ float s[64];
  s[T] = x[T];
  asm volatile("bar.sync %0, %1;" ::"r"(EITHER(1 + T / 32, 1)), "r"(EITHER(32, 64)) : "memory");
  y[T] = s[T ^ 32];
}

// 1 x 64: the borders of a tile are written after the barrier.
KERNEL(borders_after_the_barrier) {
  __shared__ float s[66];
  s[T + 1] = x[T + 1];
  EITHER(__syncthreads(), );
  if (T < 2) s[65 * T] = x[65 * T];
  EITHER(, __syncthreads());
  y[T] = s[T] + s[T + 1] + s[T + 2];
}

// 1 x 64: short strides of a sort have no barrier.
KERNEL(sort_by_strides) {
  __shared__ float s[64];
  s[T] = x[63 - T];
  __syncthreads();
  for (int k = 2; k <= 64; k *= 2) {
    for (int j = k / 2; j > 0; j /= 2) {
      int other = T ^ j;
      if (other > T && (s[T] > s[other]) == ((T & k) == 0)) {
        float low = s[T];
        s[T] = s[other];
        s[other] = low;
      }
      if (j EITHER(> 8, > 0)) __syncthreads();
    }
  }
  y[T] = s[T];
}

// 1 x 64: a flag for another turn is cleared before all have read it.
KERNEL(flag_for_another_turn) {
  __shared__ int again;
  for (int k = 0; k < 4; ++k) {
    if (T == 0) again = 0;
    __syncthreads();
    if (T == 40 - 20 * k) again = 1;
    __syncthreads();
    bool go = again;
    ADD(__syncthreads());
    if (!go) break;
  }
  n[T] = again;
}

// 1 x 64: two sums in one array.
KERNEL(two_sums_in_one_array) {
  __shared__ float s[64];
  float sums[2];
  for (int k = 0; k < 2; ++k) {
    s[T] = x[64 * k + T];
    __syncthreads();
    for (int d = 32; d > 0; d /= 2) {
      if (T < d) s[T] += s[T + d];
      __syncthreads();
    }
    sums[k] = s[0];
    ADD(__syncthreads());
  }
  y[T] = sums[0] + sums[1];
}

// 1 x 96: only two of three warps meet at the barrier.
KERNEL(third_warp_absent) {
  __shared__ float s[96];
  s[T] = x[T];
  if (T < 64) asm volatile("bar.sync 1, %0;" ::"r"(EITHER(64, 96)) : "memory");
  ADD(else asm volatile("bar.arrive 1, 96;" ::: "memory");)
  if (T < 64) y[T] = s[T + 32];
}

// equal stores, 3 x 64: every thread that finds it raises the flag.
KERNEL(flag_of_all_blocks) {
  if (T % 7 == 0) EITHER(n[0] = 1, atomicExch(n, 1));
}

// equal stores, 1 x 64: two warps set the same element.
KERNEL(flag_of_a_block) {
  __shared__ int found;
  if (T % 32 == 3 && (T < EITHER(64, 32))) found = int(x[5]);
  __syncthreads();
  n[T] = found;
}
