// cuBLAS for the host part of a program whose device is the emulator: column-major calls, which Python hands to
// products of the library. All of them return when they are done.
#ifndef GEMMERY_CUBLAS
#define GEMMERY_CUBLAS
#include "cuda_runtime.h"
#include "cuda_fp16.h"
#define CUBLAS_API_H_
struct cublasContext { cudaStream_t stream; };
typedef cublasContext* cublasHandle_t;
enum cublasStatus_t { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_NOT_INITIALIZED = 1, CUBLAS_STATUS_ALLOC_FAILED = 3,
                      CUBLAS_STATUS_INVALID_VALUE = 7, CUBLAS_STATUS_ARCH_MISMATCH = 8, CUBLAS_STATUS_MAPPING_ERROR = 11,
                      CUBLAS_STATUS_EXECUTION_FAILED = 13, CUBLAS_STATUS_INTERNAL_ERROR = 14,
                      CUBLAS_STATUS_NOT_SUPPORTED = 15, CUBLAS_STATUS_LICENSE_ERROR = 16 };
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_OP_C };
enum cublasPointerMode_t { CUBLAS_POINTER_MODE_HOST, CUBLAS_POINTER_MODE_DEVICE };
enum cublasMath_t { CUBLAS_DEFAULT_MATH, CUBLAS_TENSOR_OP_MATH, CUBLAS_PEDANTIC_MATH, CUBLAS_TF32_TENSOR_OP_MATH };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1, CUBLAS_GEMM_DFALT = -1, CUBLAS_GEMM_ALGO0 = 0,
                        CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99, CUBLAS_GEMM_DFALT_TENSOR_OP = 99 };
enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_64F = 1, CUDA_R_16F = 2, CUDA_R_8I = 3, CUDA_R_32I = 10, CUDA_R_16BF = 14 };
typedef cudaDataType_t cudaDataType;
enum cublasComputeType_t { CUBLAS_COMPUTE_16F = 64, CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_FAST_16F = 74,
                           CUBLAS_COMPUTE_32F_FAST_16BF = 75, CUBLAS_COMPUTE_32F_FAST_TF32 = 77,
                           CUBLAS_COMPUTE_64F = 70, CUBLAS_COMPUTE_32I = 72 };
inline cublasStatus_t cublasCreate(cublasHandle_t* handle) { *handle = new cublasContext{}; return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasDestroy(cublasHandle_t handle) { delete handle; return CUBLAS_STATUS_SUCCESS; }
#define cublasCreate_v2 cublasCreate
#define cublasDestroy_v2 cublasDestroy
inline cublasStatus_t cublasSetStream(cublasHandle_t, cudaStream_t) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetPointerMode(cublasHandle_t, cublasPointerMode_t) { return CUBLAS_STATUS_SUCCESS; }
inline const char* cublasGetStatusString(cublasStatus_t status) { return status ? "an error of cuBLAS" : "success"; }
namespace gemmery {
inline cublasStatus_t product(int from, int to, int scale, int ta, int tb, int m, int n, int k, const void* alpha,
                              const void* a, int lda, long long next_a, const void* b, int ldb, long long next_b,
                              const void* beta, void* c, int ldc, long long next_c, int count) {
  return (cublasStatus_t)call("product", from, to, scale, ta != 0, tb != 0, m, n, k, alpha, a, lda, next_a, b, ldb, next_b,
                              beta, c, ldc, next_c, count);
}
}  // namespace gemmery
#define GEMMERY_GEMM(L, T, kind)                                                                                   \
  inline cublasStatus_t cublas##L##gemm(cublasHandle_t, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, \
      const T* alpha, const T* a, int lda, const T* b, int ldb, const T* beta, T* c, int ldc) {                     \
    return gemmery::product(kind, kind, kind, ta, tb, m, n, k, alpha, a, lda, 0, b, ldb, 0, beta, c, ldc, 0, 1);    \
  }                                                                                                                 \
  inline cublasStatus_t cublas##L##gemmStridedBatched(cublasHandle_t, cublasOperation_t ta, cublasOperation_t tb, int m, \
      int n, int k, const T* alpha, const T* a, int lda, long long next_a, const T* b, int ldb, long long next_b,   \
      const T* beta, T* c, int ldc, long long next_c, int count) {                                                  \
    return gemmery::product(kind, kind, kind, ta, tb, m, n, k, alpha, a, lda, next_a, b, ldb, next_b, beta, c, ldc, \
                            next_c, count);                                                                         \
  }
GEMMERY_GEMM(S, float, CUDA_R_32F)
GEMMERY_GEMM(D, double, CUDA_R_64F)
GEMMERY_GEMM(H, __half, CUDA_R_16F)
template <class C> cublasStatus_t cublasGemmEx(cublasHandle_t, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
    int k, const void* alpha, const void* a, cudaDataType at, int lda, const void* b, cudaDataType bt, int ldb,
    const void* beta, void* c, cudaDataType ct, int ldc, C compute, cublasGemmAlgo_t) {
  const int of = (int)compute, scale = of == 64 ? CUDA_R_16F : of == 70 || of == 1 ? CUDA_R_64F : of == 72 || of == 10 ?
      CUDA_R_32I : of == 2 ? CUDA_R_16F : CUDA_R_32F;
  if (at != bt) return CUBLAS_STATUS_NOT_SUPPORTED;
  return gemmery::product(at, ct, scale, ta, tb, m, n, k, alpha, a, lda, 0, b, ldb, 0, beta, c, ldc, 0, 1);
}
// Vectors: what, the element type, sizes, scalars and pointers, in the order of Python's functions.
#define GEMMERY_VECTORS_OF(L, T, kind, index)                                                                      \
  inline cublasStatus_t cublas##L##axpy(cublasHandle_t, int n, const T* alpha, const T* x, int dx, T* y, int dy) {  \
    return (cublasStatus_t)gemmery::call("axpy", kind, n, alpha, x, dx, y, dy);                                     \
  }                                                                                                                 \
  inline cublasStatus_t cublas##L##scal(cublasHandle_t, int n, const T* alpha, T* x, int dx) {                      \
    return (cublasStatus_t)gemmery::call("scal", kind, n, alpha, x, dx);                                            \
  }                                                                                                                 \
  inline cublasStatus_t cublas##L##copy(cublasHandle_t, int n, const T* x, int dx, T* y, int dy) {                  \
    return (cublasStatus_t)gemmery::call("copy_vector", kind, n, x, dx, y, dy);                                     \
  }                                                                                                                 \
  inline cublasStatus_t cublas##L##dot(cublasHandle_t, int n, const T* x, int dx, const T* y, int dy, T* to) {      \
    return (cublasStatus_t)gemmery::call("dot", kind, n, x, dx, y, dy, to);                                         \
  }                                                                                                                 \
  inline cublasStatus_t cublas##L##nrm2(cublasHandle_t, int n, const T* x, int dx, T* to) {                         \
    return (cublasStatus_t)gemmery::call("norm", kind, n, x, dx, to, 2);                                            \
  }                                                                                                                 \
  inline cublasStatus_t cublas##L##asum(cublasHandle_t, int n, const T* x, int dx, T* to) {                         \
    return (cublasStatus_t)gemmery::call("norm", kind, n, x, dx, to, 1);                                            \
  }                                                                                                                 \
  inline cublasStatus_t cublasI##index##amax(cublasHandle_t, int n, const T* x, int dx, int* to) {                  \
    return (cublasStatus_t)gemmery::call("amax", kind, n, x, dx, to);                                               \
  }                                                                                                                 \
  inline cublasStatus_t cublas##L##gemv(cublasHandle_t, cublasOperation_t t, int m, int n, const T* alpha, const T* a, \
                                        int lda, const T* x, int dx, const T* beta, T* y, int dy) {                 \
    return (cublasStatus_t)gemmery::call("gemv", kind, t != 0, m, n, alpha, a, lda, x, dx, beta, y, dy);            \
  }
GEMMERY_VECTORS_OF(S, float, CUDA_R_32F, s)
GEMMERY_VECTORS_OF(D, double, CUDA_R_64F, d)
#define cublasSetVector(n, size, x, dx, y, dy) cublasSetMatrix(1, n, size, x, dx, y, dy)
#define cublasGetVector(n, size, x, dx, y, dy) cublasSetMatrix(1, n, size, x, dx, y, dy)
#define cublasGetMatrix cublasSetMatrix
inline cublasStatus_t cublasSetMatrix(int rows, int columns, int size, const void* a, int lda, void* b, int ldb) {
  return (cublasStatus_t)gemmery::copied_rows(0, b, size_t(ldb) * size, a, size_t(lda) * size, size_t(rows) * size,
                                              columns, cudaMemcpyDefault);
}
#endif
