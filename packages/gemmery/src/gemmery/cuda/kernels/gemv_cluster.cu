// Idea: the blocks that share k are a cluster: each sends its sums to the first one's shared memory, which adds them up
// in the order of k. No second launch adds what lies in memory.
// Parent: gemv_columns, whose parts gemv_finish adds up.
// Measured on an H200, f16, 1024 x 1024: 3.05 us by clusters of 4, its parent's two launches 4.65. For a large W,
// clusters of 4 take longer than two launches: 48.8 us at 8192 x 8192, where those take 33.8.
#include "gemv_columns.cu"
#include "ptx_hopper.cuh"

template <class T, class Out, int EPILOGUE, class Launch, int VEC, int LANES, int STEPS, int WARPS, int SPLITS,
          bool LAST_FIRST>
__global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(32 * WARPS)
    gemv_cluster(const Traced<Product<T, Out>> p) {
  constexpr bool COLUMN = Launch::COLUMN, BATCHED = Launch::BATCHED;
  using S = Sum<T, Out>;
  constexpr int EACH = LANES * VEC;
  __shared__ S of_warp[WARPS][EACH], of_block[SPLITS][EACH];
  int rank = ptx::cluster_ctarank(), block = blockIdx.x / SPLITS * EACH, parts = 32 / LANES * WARPS;
  int part = rank * parts + threadIdx.x / LANES;
  parts *= SPLITS;
  begin_columns<Launch, VEC, LANES, STEPS>(p, block, part, parts);
  for (int batch = BATCHED ? blockIdx.y : 0; batch < (BATCHED ? p.batch : 1); batch += BATCHED ? gridDim.y : 1) {
    ptx::barrier_cluster_arrive();  // this block has begun, and has read what others sent for the batch before
    Gemv<T> g = gemv_of<COLUMN>(p, batch);
    sum_columns<VEC, LANES, STEPS, LAST_FIRST>(of_warp, g, block, part, parts);
    ptx::barrier_cluster_wait();
    for (int e = threadIdx.x; e < EACH; e += 32 * WARPS) {
      ptx::st_shared_cluster(ptx::mapa(ptx::shared_address(&of_block[rank][e]), 0), sum_of_warps(of_warp, e));
    }
    __syncwarp();
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
    for (int e = threadIdx.x; rank == 0 && e < EACH && block + e < g.results; e += 32 * WARPS) {
      store_result<EPILOGUE, COLUMN>(p, batch, block + e, sum_of_warps(of_block, e));
    }
    __syncwarp();
  }
}
