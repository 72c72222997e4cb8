// Idea: parts have no place for Inf and NaN. Where an operand has any, this product on CUDA cores takes the place of
// that on tensor cores: the pre-pass has seen it, and nobody waits for its answer on the host. Its blocks say first
// whether two parts will do; if not, later launches make three.
// Parent: simt_general, which always runs.
#include "simt_general.cu"
#include "split.cuh"

template <class T, class Out, int EPILOGUE, class Tiles, int WM, int WN, int STAGES>
__global__ void __launch_bounds__(Tiles::THREADS) split_simt(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const SplitWork work(p.product);
  guard(work, p.product);
  const unsigned status = *static_cast<volatile unsigned*>(work.status);  // while guards of other blocks raise it
  if (status & NOT_FINITE) general_product<EPILOGUE, Tiles, WM, WN, STAGES>(p.product, memory);
}
