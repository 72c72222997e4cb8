// Effect: lanes whose addresses fall on the same bank wait for each other.
// Lane l reads element l * STRIDE, of WIDTH floats, from shared memory, STEPS times (a multiple of 16). Each read is 2
// elements after the last, so that no two reads are merged; all lanes shift alike, which changes no conflict.
// Measured on an H200: time is proportional to wavefronts: 1 per read at any odd stride, 8 at 8, 32 at 32.
template <int WIDTH> struct alignas(4 * WIDTH) Element { float of[WIDTH]; };

template <int BLOCK, int WIDTH, int STRIDE, int STEPS>
__global__ void bank_stride(const float* x, float* y, int n) {
  constexpr int ELEMENTS = 31 * STRIDE + 32;
  __shared__ Element<WIDTH> tile[ELEMENTS];
  for (int e = threadIdx.x; e < ELEMENTS; e += BLOCK) tile[e] = reinterpret_cast<const Element<WIDTH>*>(x)[e];
  __syncthreads();
  float sum = 0;
#pragma unroll 1
  for (int first = 0; first < STEPS; first += 16) {
    const Element<WIDTH>* from = tile + threadIdx.x % 32 * STRIDE + first / 16 % 2;  // or loads leave the loop
#pragma unroll
    for (int step = 0; step < 16; ++step) {
#pragma unroll
      for (int v = 0; v < WIDTH; ++v) sum += from[2 * step].of[v];
    }
  }
  long long i = (long long)blockIdx.x * BLOCK + threadIdx.x;
  if (i < n) y[i] = sum;
}
