// Kernels with a fault of a warp or of a barrier each: masks, absent lanes, divergence; and their repair.
#include "faults.cuh"

#define LANE (T % 32)
#define ALL 0xffffffffu

static __device__ unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

// warp mask, 1 x 64: half of the warp shuffles for all.
KERNEL(half_shuffles) {
  unsigned mask = EITHER(ALL, __ballot_sync(ALL, LANE < 16));
  if (LANE < 16) y[T] = __shfl_xor_sync(mask, x[T], 1);
}

// warp mask, 1 x 64: a mask without the upper lanes, which call too.
KERNEL(caller_not_in_mask) { y[T] = __shfl_xor_sync(EITHER(0xffffu, ALL), x[T], 2); }

// warp mask, 1 x 64: lanes have returned.
KERNEL(lanes_returned) {
  EITHER(if (LANE > 20) return, );
  float sum = __shfl_xor_sync(ALL, x[T], 16);
  if (LANE <= 20) y[T] = sum;
}

// warp mask, 1 x 32: turns of a loop differ from lane to lane.
KERNEL(turns_differ) {
  float sum = 0;
  for (int k = 0; k < EITHER(LANE % 3 + 1, 3); ++k) sum += __shfl_xor_sync(ALL, x[T + k], 8);
  y[T] = sum;
}

// warp mask, 1 x 64: a vote of lanes that have ended.
KERNEL(vote_of_ended_lanes) {
  EITHER(if (LANE == 7) return, );
  n[T] = __ballot_sync(ALL, x[T] > 3);
}

// warp mask, 1 x 32: both sides of a branch shuffle, each for all lanes.
KERNEL(both_sides_shuffle) {
  unsigned low = EITHER(ALL, 0xffff), high = EITHER(ALL, 0xffff0000u);
  if (LANE < 16) {
    y[T] = __shfl_xor_sync(low, x[T], 1);
  } else {
    y[T] = __shfl_xor_sync(high, x[T + 1], 2) + 1;
  }
}

// warp mask, 1 x 32: a mask without the last lane, which waits too.
KERNEL(wait_without_last_lane) {
  __shared__ float s[32];
  s[T] = x[T];
  __syncwarp(EITHER(0x7fffffffu, ALL));
  y[T] = s[T ^ 1];
}

// warp mask, 1 x 32: half of the lanes wait for all.
KERNEL(wait_for_absent_lanes) {
  __shared__ float s[32];
  if (LANE < 16) {
    s[T] = x[T];
    __syncwarp(EITHER(ALL, 0xffff));
    y[T] = s[15 - T];
  }
  __syncthreads();
  y[T] += 1;
}

// divergent barrier, 1 x 64: one more barrier for some threads.
KERNEL(one_more_barrier) {
  if (EITHER(T < 40, true)) __syncthreads();
  y[T] = x[T];
  __syncthreads();
}

// divergent barrier, 1 x 64: a barrier in a loop whose turns differ.
KERNEL(barrier_in_a_loop) {
  for (int k = 0; k < EITHER(1 + T / 32, 2); ++k) {
    y[64 * k + T] = x[T];
    __syncthreads();
  }
  y[T] = x[T];
  asm volatile("bar.sync 1;");
}

// divergent barrier, 1 x 64: a barrier on each side of a branch.
KERNEL(barrier_on_each_side) {
  if (EITHER(T % 2, 1)) {
    y[T] = x[T];
    __syncthreads();
  } else {
    y[T] = -x[T];
    __syncthreads();
  }
}

// divergent barrier, 1 x 64: one warp does not come to a barrier of two.
KERNEL(warp_does_not_come) {
  if (EITHER(T < 32, true)) asm volatile("bar.sync 1, 64;");
  y[T] = x[T];
}

// divergent barrier, 1 x 96: fewer threads announce themselves than the barrier counts.
KERNEL(too_few_arrive) {
  if (T < 32) asm volatile("bar.sync 1, 96;");
  else if (EITHER(T < 64, true)) asm volatile("bar.arrive 1, 96;");
  y[T] = x[T];
}

// divergent barrier, 1 x 64: a count of a condition by some threads.
KERNEL(count_by_some) {
  int count = 0;
  if (EITHER(T < 48, true)) count = __syncthreads_count(x[T] > 5);
  n[T] = count;
  __syncthreads();
}

// divergent barrier, 1 x 64: each thread leaves the loop when it is done, not when all are.
KERNEL(loop_left_alone) {
  int left = T % 3;
  bool more = true;
  while (EITHER(left > 0, more)) {
    left -= left > 0;
    more = __syncthreads_or(left > 0);
  }
  n[T] = left;
  __syncthreads();
}

// warp mask, 1 x 32: half of a warp loads matrices.
KERNEL(half_loads_matrices) {
  __shared__ __align__(16) int s[128];
  for (int k = 0; k < 4; ++k) s[32 * k + T] = T;
  __syncwarp();
  if (EITHER(LANE < 16, true)) {
    unsigned r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(shared_address(s + 4 * (T % 8))));
    n[T] = r;
  }
}

// warp mask, 1 x 32: half of a warp stores matrices.
KERNEL(half_stores_matrices) {
  __shared__ __align__(16) int s[32];
  if (EITHER(LANE < 16, true)) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(shared_address(s + 4 * (T % 8))), "r"(T)
                 : "memory");
  }
  __syncwarp();
  if (LANE < 8) n[T] = EITHER(0, s[T]);
}

// warp mask, 1 x 32: lanes take different ways to a product of matrices.
KERNEL(product_in_a_branch) {
  float c[4] = {0, 0, 0, 0};
  if (EITHER(x[T] > 3, true)) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(T));
  }
  y[T] = c[0];
}

// warp mask, 1 x 32: a matrix is transposed by some lanes.
KERNEL(transposed_by_some) {
  int r = T;
  if (EITHER(LANE != 3, true)) asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(r));
  n[T] = r;
}

// not landed, 1 x 32: copies are read without a wait.
KERNEL(copy_without_wait) {
  __shared__ float s[32];
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(s + T)), "l"(x + T) : "memory");
  ADD(asm volatile("cp.async.wait_all;" ::: "memory"));
  y[T] = s[T];
}

// not landed, 1 x 32: the wait leaves one group too many.
KERNEL(wait_leaves_a_group) {
  __shared__ float s[64];
  for (int k = 0; k < 2; ++k) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\ncp.async.commit_group;" ::"r"(shared_address(s + 32 * k + T)),
                 "l"(x + T)
                 : "memory");
  }
  asm volatile("cp.async.wait_group %0;" ::"n"(EITHER(1, 0)) : "memory");
  y[T] = s[32 + T];
}

// not landed, 1 x 32: a copy belongs to no group when the wait comes.
KERNEL(copy_of_no_group) {
  __shared__ float s[32];
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(s + T)), "l"(x + T) : "memory");
  ADD(asm volatile("cp.async.commit_group;" ::: "memory"));
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  y[T] = s[T];
}

// warp mask, 1 x 40: the last warp has 8 lanes, which read others.
KERNEL(short_last_warp) { y[T] = __shfl_xor_sync(ALL, x[T], EITHER(16, 4)); }

// warp mask, 1 x 32: a sum over a warp in a branch.
KERNEL(sum_in_a_branch) {
  if (LANE % 2) n[T] = __reduce_add_sync(EITHER(ALL, 0xaaaaaaaau), T);
}

// warp mask, 1 x 32: equal keys are sought among lanes that are elsewhere.
KERNEL(keys_of_absent_lanes) {
  if (LANE < 24) n[T] = __match_any_sync(EITHER(ALL, 0xffffffu), T / 4);
}

// warp mask, 1 x 32: one lane does not say whether all agree.
KERNEL(one_lane_does_not_agree) {
  int all = 0;
  if (LANE != EITHER(5, 32)) __match_all_sync(ALL, T / 64, &all);
  n[T] = all;
}

// warp mask, 1 x 32: a lane outside the mask is read.
KERNEL(lane_outside_the_mask) {
  if (LANE < 8) y[T] = __shfl_sync(0xff, x[T], EITHER(20, 4));
}

// warp mask, 1 x 32: the left side of && decides who votes.
KERNEL(vote_after_and) {
  bool here = LANE < 20;
  n[T] = EITHER(here && __any_sync(ALL, x[T] > 3), __any_sync(ALL, x[T] > 3) && here);
}

// warp mask, 1 x 32: a case of a switch shuffles.
KERNEL(shuffle_in_a_case) {
  float mine = x[T], other = EITHER(0, __shfl_down_sync(ALL, mine, 1));
  switch (LANE % 4) {
    case 0: mine += EITHER(__shfl_down_sync(ALL, mine, 1), other); break;
    case 1: mine *= 2; break;
    default: mine -= x[T + 9];
  }
  y[T] = mine;
}

// warp mask, 1 x 32: each half passes the mask of the other.
KERNEL(masks_swapped) {
  unsigned mask = LANE < 16 ? EITHER(0xffff0000u, 0xffffu) : EITHER(0xffffu, 0xffff0000u);
  y[T] = __shfl_xor_sync(mask, x[T], 4);
}

// warp mask, 1 x 32: the mask is that of an earlier condition.
KERNEL(mask_of_an_earlier_condition) {
  unsigned mask = __ballot_sync(ALL, LANE < 16);
  if (LANE < 16) {
    EITHER(, mask = __ballot_sync(mask, x[T] > 4));
    if (x[T] > 4) y[T] = __shfl_sync(mask, x[T], 10);
  }
}

// warp mask, 1 x 32: as many low lanes as odd lanes are named.
KERNEL(mask_from_a_count) {
  unsigned odd = __ballot_sync(ALL, LANE % 2);
  if (LANE % 2) y[T] = __shfl_sync(EITHER((1u << __popc(odd)) - 1, odd), x[T], 1);
}

// race, 1 x 64: lanes exchange numbers through shared memory without a wait.
KERNEL(exchange_without_wait) {
  __shared__ float s[64];
  s[T] = x[T];
  ADD(__syncwarp());
  y[T] = s[T ^ 1];
}

// race, 1 x 32: the ways of a branch meet, which orders nothing.
KERNEL(meeting_orders_nothing) {
  __shared__ float s[32];
  if (LANE < 16) s[T] = x[T];
  else s[T] = x[T] * x[T];
  ADD(__syncwarp());
  y[T] = s[31 - T];
}

// race, 1 x 32: a wait of each half orders only the lanes of that half.
KERNEL(wait_of_halves) {
  __shared__ float s[32];
  s[T] = x[T];
  __syncwarp(LANE < 16 ? 0xffffu : 0xffff0000u);
  y[T] = s[EITHER(31 - T, T ^ 15)];
}

// race, 1 x 32: the same in global memory, by way of a third lane's quarter.
KERNEL(wait_of_quarters) {
  y[T] = x[T];
  __syncwarp(0xffu << LANE / 8 * 8);
  y[32 + T] = y[T ^ 7];
  if (LANE < 16) {
    __syncwarp(0xffff);
    y[64 + T] = y[32 + (T ^ EITHER(31, 15))] + y[T ^ 12];
  }
  __syncwarp();
  y[96 + T] = y[T ^ 16];
}

// warp mask, 1 x 32: a lane is elected from a mask without some that ask.
KERNEL(elected_from_a_mask) {
  int mine;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, %1;\nselp.s32 %0, 1, 0, p;\n}" : "=r"(mine) : "r"(EITHER(0xff, ALL)));
  n[T] = mine;
}

// deadlock, 1 x 64: only some threads arrive at a barrier that counts all.
KERNEL(some_arrive) {
  __shared__ unsigned long long bar;
  if (T == 0) asm volatile("mbarrier.init.shared.b64 [%0], 64;" ::"r"(shared_address(&bar)) : "memory");
  __syncthreads();
  if (EITHER(T < 60, true)) {
    asm volatile("{\n.reg .b64 s;\nmbarrier.arrive.shared.b64 s, [%0];\n}" ::"r"(shared_address(&bar)) : "memory");
  }
  int done = 0;
  while (!done) {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], 0;\nselp.s32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(&bar))
                 : "memory");
  }
  n[T] = done;
}
