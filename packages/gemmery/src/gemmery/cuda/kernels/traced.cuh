// The function of the sums that follows a product, and the struct of its operands: here, none. cuda/traced_function.py
// writes the text that takes this file's place, from a graph of operations.
#pragma once
#include "operands.cuh"

struct Operands {};

struct Function {
  enum { SUMS = 1, STATISTICS = 0, CARRIED = 0, STAGED = 0, SHORT = 0 };
  static __device__ __forceinline__ const void* map(const Operands&, int) { return nullptr; }
  static constexpr __device__ bool is_row(int) { return false; }
  template <class Math, int HOLDS = 0, int WIDTH, class S>
  static __device__ __forceinline__ void apply(S (&)[WIDTH], const S (&)[WIDTH], const Operands&, Spot,
                                               const unsigned* = nullptr, S* = nullptr, const S* = nullptr) {}
};
