// A ring of stages in shared memory, handed over by mbarriers: `full` when a stage's bytes have come, `empty` when all
// that read it have done so.
#pragma once
#include "ptx_hopper.cuh"

// The stage at which a thread stands. The parity of its barriers' phase changes with each round: a consumer waits for
// `full` with this parity; a producer for `empty` with the other one, so that its first round does not wait.
template <int STAGES> struct Ring {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Initializes a block's barriers, by one thread: `full` is for the arrival of producers, `empty` for the consumers'.
template <int STAGES>
__device__ __forceinline__ void init_ring(unsigned full, unsigned empty, int consumers, int producers = 1) {
  for (int stage = 0; stage < STAGES; ++stage) {
    ptx::mbarrier_init(full + 8 * stage, producers);
    ptx::mbarrier_init(empty + 8 * stage, consumers);
  }
  ptx::fence_mbarrier_init();
}
