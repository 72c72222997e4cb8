// Idea: a complex product is a real one. Rows of A, re and im in turn, are rows of 2 k real numbers as they lie, and so
// are rows of C; B becomes 2 k x 2 n, with (re, im) and (-im, re) below each other for each element. A kernel for real
// numbers then does what a complex product needs: 8 m n k operations, and twice B's bytes in memory.
// Van Zee, "Implementing high-performance complex matrix multiplication via the 1m method", SIAM J. Sci. Comput. 2020.
#include "load.cuh"

// B in the workspace: by rows, or by columns where elements of k are adjacent.
template <class R, bool K_ADJACENT>
__global__ void __launch_bounds__(256) complex_expand(const Product<Complex<R>, Complex<R>> p) {
  const unsigned long long inner = K_ADJACENT ? p.k : p.n, outer = K_ADJACENT ? p.n : p.k;
  const unsigned long long count = inner * outer * p.batch, step = 1ULL * gridDim.x * 256;
  auto to = static_cast<Chunk<R, 2>*>(p.workspace);
#pragma unroll 4
  for (unsigned long long index = blockIdx.x * 256ULL + threadIdx.x; index < count; index += step) {
    const unsigned long long line = index / inner, x = index % inner, y = line % outer;
    const int kk = int(K_ADJACENT ? x : y), j = int(K_ADJACENT ? y : x);
    const Complex<R> z = *p.b_at(int(line / outer), kk, j);
    Chunk<R, 2>* at = to + 2 * line * inner + x;
    at[0] = K_ADJACENT ? Chunk<R, 2>{{z.re, negative(z.im)}} : Chunk<R, 2>{{z.re, z.im}};
    at[inner] = K_ADJACENT ? Chunk<R, 2>{{z.im, z.re}} : Chunk<R, 2>{{negative(z.im), z.re}};
  }
}

// A in the workspace, by rows: tiles of 32 x 32 are turned around where rows are adjacent.
template <class R> __global__ void __launch_bounds__(256) complex_rows(const Product<Complex<R>, Complex<R>> p) {
  __shared__ Chunk<R, 2> tile[32][33];
  const unsigned down = (p.m + 31) / 32, across = (p.k + 31) / 32;
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  auto to = static_cast<Chunk<R, 2>*>(p.workspace);
  for (unsigned index = blockIdx.x; index < down * across * p.batch; index += gridDim.x) {
    const int batch = index / (down * across), i = index % down * 32, k = index / down % across * 32;
#pragma unroll
    for (int r = y; r < 32; r += 8) {
      if (i + x < p.m && k + r < p.k) {
        const Complex<R> z = *p.a_at(batch, i + x, k + r);
        tile[x][r] = {{z.re, z.im}};
      }
    }
    __syncthreads();
#pragma unroll
    for (int r = y; r < 32; r += 8) {
      if (i + r < p.m && k + x < p.k) to[(1LL * batch * p.m + i + r) * p.k + k + x] = tile[r][x];
    }
    __syncthreads();
  }
}
