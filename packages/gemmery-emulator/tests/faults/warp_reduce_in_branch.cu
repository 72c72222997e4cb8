// A sum over the warp in the branch of one lane.
__global__ void warp_reduce_in_branch(int* out, const int* in) {
  int v = in[threadIdx.x];
#ifdef FIXED
  int sum = __reduce_add_sync(0xffffffff, v);
  if (threadIdx.x % 32 == 0) atomicAdd(out, sum);
#else
  if (threadIdx.x % 32 == 0) atomicAdd(out, __reduce_add_sync(0xffffffff, v));  // FAULT
#endif
}
