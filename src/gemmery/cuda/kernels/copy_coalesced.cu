// The effect: memory is moved in sectors of 32 bytes, however few of them a warp wants.
// Every thread copies one element of WIDTH floats; neighbours among the threads are STRIDE elements apart. All of x is
// copied at every stride: only who copies what changes. STRIDE divides the number of elements.
// Measured on an H200: from stride 8 on a warp touches 32 sectors instead of 4, and takes nearly as many times as
// long; at stride 32, where they lie on more lines, longer still.
template <int WIDTH> struct alignas(4 * WIDTH) Element { float of[WIDTH]; };

template <int WIDTH, int STRIDE>
__global__ void copy_coalesced(const float* x, float* y, int n) {
  unsigned elements = n / WIDTH, apart = elements / STRIDE;
  unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= elements) return;
  unsigned e = thread % apart * STRIDE + thread / apart;
  reinterpret_cast<Element<WIDTH>*>(y)[e] = reinterpret_cast<const Element<WIDTH>*>(x)[e];
}
