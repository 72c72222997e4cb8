// Descriptors: how wgmma finds an operand in shared memory. NVIDIA, PTX ISA 9.0, "matrix descriptor".
#pragma once
#include "ptx.cuh"

// Of a tile as bring() of tma.cuh leaves it, in rows of 128 bytes with their 16-byte chunks XORed by row % 8. From bit
// 0 on: the address, the distance between columns of chunks, and between groups of 8 rows, all in 16 bytes; bit 62:
// that swizzle. K-major: a row is 128 bytes of k of one side; 8 rows are 1024 bytes, and there is no second column.
// Else a row is 64 sides of one k, and the next 64 sides are 8192 bytes further.
// The upper 32 bits are always the same: sums of the lower ones need half of the instructions and registers.
template <bool K_MAJOR> __device__ __forceinline__ unsigned descriptor(unsigned shared) {
  constexpr unsigned COLUMN = K_MAJOR ? 1 : 8192 >> 4;
  return (shared & 0x3FFFF) >> 4 | COLUMN << 16;
}

// Unless groups of 8 rows are APART, all of them are the same one.
template <bool APART = true>
__device__ __forceinline__ unsigned long long whole_descriptor(unsigned lower) {
  constexpr unsigned long long ROWS = 1024 >> 4, SWIZZLE_128 = 1;
  return lower | (APART ? ROWS : 0) << 32 | SWIZZLE_128 << 62;
}

// From the k of one product, 32 bytes, to those of the next, in 16 bytes. The swizzle follows from the address, so a
// step within a row of 128 bytes is a plain addition.
template <bool K_MAJOR> constexpr unsigned NEXT_K = (K_MAJOR ? 32 : 2048) >> 4;
