// Words of CUDA C++ that mean nothing to the host's compiler; the headers of CUDA's types ask for them.
#ifndef GEMMERY_HOST_DEFINES
#define GEMMERY_HOST_DEFINES
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __inline__ inline
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __cudart_builtin__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __maxnreg__(...)
#define __CUDA_ARCH_HAS_FEATURE__(...) 0
#define CUDARTAPI
#define CUDART_CB
#endif
