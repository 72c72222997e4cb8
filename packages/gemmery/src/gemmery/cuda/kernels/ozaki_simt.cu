// Idea: integers have no place for Inf and NaN, nor for numbers whose squares float64 does not hold. Where a norm is
// such, this product on CUDA cores takes the place of that of residues: the device has seen it, and the host need not.
// Parent: simt_general, which always runs.
#include "ozaki.cuh"
#include "simt_general.cu"

template <class T, class Out, int EPILOGUE, class Tiles, int WM, int WN, int STAGES>
__global__ void __launch_bounds__(Tiles::THREADS) ozaki_simt(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (*static_cast<const unsigned*>(p.product.workspace)) {
    general_product<EPILOGUE, Tiles, WM, WN, STAGES>(p.product, memory);
  }
}
