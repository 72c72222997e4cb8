// A matrix is loaded by half of a warp, while all of its lanes take part in that.
__global__ void warp_matrix(unsigned* out, const unsigned* in) {
  __shared__ __align__(16) unsigned tile[32];
  int t = threadIdx.x, lane = t % 32;
  if (t < 32) tile[t] = in[t];
  __syncthreads();
  unsigned row = unsigned(__cvta_generic_to_shared(tile + lane % 8 * 4)), part = 0;
#ifndef FIXED
  if (lane < 16)
#endif
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(part) : "r"(row));  // FAULT
  out[t] = part;
}
