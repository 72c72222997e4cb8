// Effect: memory is moved in sectors of 32 bytes, however few of those bytes a warp needs.
// Every thread copies one element of WIDTH floats; the elements of neighboring threads are STRIDE apart. All of x is
// copied at every stride: only the assignment to threads changes. STRIDE divides the number of elements.
// Measured on an H200: from stride 8 on a warp touches 32 sectors instead of 4, and the time grows nearly as much; at
// stride 32, where the sectors are on more lines, it grows further.
template <int WIDTH> struct alignas(4 * WIDTH) Element { float of[WIDTH]; };

template <int WIDTH, int STRIDE>
__global__ void copy_coalesced(const float* x, float* y, int n) {
  unsigned elements = n / WIDTH, rows = elements / STRIDE;
  unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= elements) return;
  unsigned e = thread % rows * STRIDE + thread / rows;
  reinterpret_cast<Element<WIDTH>*>(y)[e] = reinterpret_cast<const Element<WIDTH>*>(x)[e];
}
