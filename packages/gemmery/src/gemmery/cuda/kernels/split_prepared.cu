// Idea: what the pre-pass of an operand gives is the same for every product, so it is kept with the operand. The
// product begins with a copy of its marks: what scales its rows, the smallest elements of each k, and whether all are
// finite. The other operand is split as always, and the guard asks about both.
#include "split.cuh"

// What follows the parts of an operand that was split before.
struct Kept {
  const unsigned *largest, *smallest, *status;
  __device__ __forceinline__ Kept(const Split& x, const float* parts) {
    const char* at = reinterpret_cast<const char*>(parts);
    auto take = [&](long long bytes) {
      const char* start = at;
      at += (bytes + 255) / 256 * 256;
      return reinterpret_cast<const unsigned*>(start);
    };
    take(2 * KEPT_PARTS * x.count() * x.pitch());
    largest = take(4 * x.count());
    smallest = take(4LL * x.depth);
    status = take(4);
  }
};

// In place of split_begin. KEPT are the operands that were split before: bit 0 is A, bit 1 is B.
template <class T, class Out, int KEPT> __global__ void split_join(const TmaProduct<T, Out> p) {
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // as split_begin
  const SplitWork work(p.product);
  const long long index = blockIdx.x * 1LL * SPLIT_THREADS + threadIdx.x;
  unsigned status = 0;
#pragma unroll
  for (int operand = 0; operand < 2; ++operand) {
    const Split& x = work.of[operand];
    if (KEPT >> operand & 1) {
      const Kept kept(x, operand == 0 ? p.a_scale : p.b_scale);
      if (index < x.depth) x.smallest[index] = kept.smallest[index];
      if (index < x.count()) x.largest[index] = kept.largest[index];
      status |= *kept.status & NOT_FINITE;
    } else {
      if (index < x.depth) x.smallest[index] = WEAK;
      if (index < x.count()) x.largest[index] = 0;
    }
  }
  if (index == 0) *work.status = status;
  if (index < work.strips_of(p.product)) work.measured[index] = 0;
}
