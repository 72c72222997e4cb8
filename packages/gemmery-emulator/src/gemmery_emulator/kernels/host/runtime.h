// CUDA's runtime for the host part of a program whose device is the emulator. A kernel is a function that launches
// itself: its body hands its name and the addresses of its arguments to Python, as all calls do, by one function.
#ifndef GEMMERY_RUNTIME
#define GEMMERY_RUNTIME
#include <csetjmp>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <cmath>
#include <algorithm>
#include <iostream>
#include <memory>
#include <type_traits>
#include <utility>
#include "crt/host_defines.h"
#include "vector_types.h"

// What other headers ask for, to know that the runtime is there.
#define __DRIVER_TYPES_H__
#define __CUDA_RUNTIME_H__
#define CUDART_VERSION 13000
#define CUDA_VERSION 13000

namespace gemmery {
using Call = long long (*)(const char* what, long long* values, int count);
inline Call python = nullptr;
inline sigjmp_buf out;
inline int status = 0;
inline long long fault = 0;
inline thread_local bool inside = false;  // of a call of Python's
constexpr long long STOP = -(1ll << 62);  // what Python answers after an error of its own

[[noreturn]] inline void leave(int code) {
  status = code;
  siglongjmp(out, 1);
}
inline long long word(double x) {
  long long bits;
  memcpy(&bits, &x, 8);
  return bits;
}
template <class T> long long word(T* x) { return reinterpret_cast<long long>(x); }
template <class T> long long word(T x) { return static_cast<long long>(x); }
template <class... T> long long call(const char* what, T... values) {
  long long words[] = {word(values)..., 0};
  fflush(stdout);
  std::cout.flush();
  inside = true;
  const long long answer = python(what, words, sizeof...(T));
  inside = false;
  if (answer == STOP) leave(0);
  return answer;
}
}  // namespace gemmery

// Errors, with the numbers of CUDA's runtime.
#define GEMMERY_ERRORS(E)                                                                                          \
  E(Success, 0, "no error") E(ErrorInvalidValue, 1, "invalid argument")                                             \
  E(ErrorMemoryAllocation, 2, "out of memory") E(ErrorCudartUnloading, 4, "driver shutting down")                   \
  E(ErrorInvalidPitchValue, 12, "invalid pitch argument") E(ErrorMissingConfiguration, 52, "missing configuration") \
  E(ErrorLaunchOutOfResources, 701, "too many resources requested for launch")                                      \
  E(ErrorLaunchTimeout, 702, "the launch timed out and was terminated")                                             \
  E(ErrorAssert, 710, "device-side assert triggered") E(ErrorMisalignedAddress, 716, "misaligned address")          \
  E(ErrorHostMemoryAlreadyRegistered, 712, "part or all of the requested memory range is already mapped")          \
  E(ErrorNotPermitted, 800, "operation not permitted") E(ErrorInitializationError, 3, "initialization error")               \
  E(ErrorInvalidConfiguration, 9, "invalid configuration argument") E(ErrorInvalidSymbol, 13, "invalid symbol")     \
  E(ErrorInvalidDevicePointer, 17, "invalid device pointer")                                                        \
  E(ErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy")                                           \
  E(ErrorNoDevice, 100, "no CUDA-capable device is detected") E(ErrorInvalidDevice, 101, "invalid device ordinal")  \
  E(ErrorInvalidResourceHandle, 400, "invalid resource handle") E(ErrorNotReady, 600, "device not ready")           \
  E(ErrorIllegalAddress, 700, "an illegal memory access was encountered")                                           \
  E(ErrorPeerAccessAlreadyEnabled, 704, "peer access is already enabled")                                           \
  E(ErrorLaunchFailure, 719, "unspecified launch failure") E(ErrorNotSupported, 801, "operation not supported")     \
  E(ErrorUnknown, 999, "unknown error")
enum cudaError {
#define E(name, number, text) cuda##name = number,
  GEMMERY_ERRORS(E)
#undef E
};
typedef cudaError cudaError_t;
inline const char* cudaGetErrorString(cudaError_t error) {
#define E(name, number, text) if (error == number) return text;
  GEMMERY_ERRORS(E)
#undef E
  return "unrecognized error code";
}
inline const char* cudaGetErrorName(cudaError_t error) {
#define E(name, number, text) if (error == number) return "cuda" #name;
  GEMMERY_ERRORS(E)
#undef E
  return "unrecognized error code";
}
namespace gemmery {
inline thread_local cudaError_t last = cudaSuccess;
inline cudaError_t noted(long long error) {
  if (error) last = static_cast<cudaError_t>(error);
  return static_cast<cudaError_t>(error);
}
}  // namespace gemmery
inline cudaError_t cudaPeekAtLastError() { return gemmery::last; }
inline cudaError_t cudaGetLastError() {
  const cudaError_t error = gemmery::last;
  gemmery::last = cudaSuccess;
  return error;
}

// Streams and events: all runs at once and in order, so a stream is a number and an event a time.
struct CUstream_st;
typedef CUstream_st* cudaStream_t;
struct CUevent_st { double milliseconds; };
typedef CUevent_st* cudaEvent_t;
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventBlockingSync = 1,
       cudaEventDisableTiming = 2, cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2,
       cudaHostAllocWriteCombined = 4, cudaHostRegisterDefault = 0, cudaMemAttachGlobal = 1, cudaMemAttachHost = 2, cudaMemAttachSingle = 4,
       cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2, cudaHostRegisterReadOnly = 8,
       cudaDeviceScheduleAuto = 0, cudaDeviceScheduleBlockingSync = 4, cudaDeviceBlockingSync = 4, cudaDeviceScheduleSpin = 1,
       cudaDeviceScheduleYield = 2, cudaDeviceMapHost = 8,
       cudaCpuDeviceId = -1, cudaInvalidDeviceId = -2 };
#define cudaStreamLegacy ((cudaStream_t)1)
#define cudaStreamPerThread ((cudaStream_t)2)
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  static long long number = 2;
  *stream = reinterpret_cast<cudaStream_t>(++number);
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = *greatest = 0; return cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return gemmery::last; }
inline cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned = 0) { return cudaSuccess; }
typedef void (*cudaHostFn_t)(void*);
typedef void (*cudaStreamCallback_t)(cudaStream_t, cudaError_t, void*);
inline cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* data) { call(data); return cudaSuccess; }
inline cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
  call(stream, cudaSuccess, data);
  return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event) { *event = new CUevent_st{}; return cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { delete event; return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t = nullptr) {
  event->milliseconds = gemmery::call("now") / 1e6;
  return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = static_cast<float>(end->milliseconds - begin->milliseconds);
  return cudaSuccess;
}

// Memory. The name in the program and the line make an allocation's name in findings.
enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice,
                      cudaMemcpyDefault };
namespace gemmery {
template <class T> cudaError_t allocated(const char* what, int line, const char* name, T** to, size_t bytes, ...) {
  const long long at = call(what, name, line, bytes);
  if (at < 0) return noted(-at);
  *to = reinterpret_cast<T*>(at);
  return cudaSuccess;
}
template <class T>
cudaError_t allocated_rows(int line, const char* name, T** to, size_t* pitch, size_t width, size_t height) {
  *pitch = (width + 511) / 512 * 512;
  return allocated("allocate", line, name, to, *pitch * height);
}
inline cudaError_t copied_rows(int line, void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                               size_t height, int kind, cudaStream_t = nullptr) {
  char* at[2];  // where the bytes are in this process
  const auto error = noted(call("copy", to, from, to_pitch, from_pitch, width, height, kind, line, at));
  for (size_t row = 0; !error && row < height; row++) memmove(at[0] + row * to_pitch, at[1] + row * from_pitch, width);
  return error;
}
inline cudaError_t copied(int line, void* to, const void* from, size_t bytes, int kind, cudaStream_t = nullptr) {
  return copied_rows(line, to, bytes, from, bytes, bytes, 1, kind);
}
inline cudaError_t filled_rows(int line, void* at, size_t pitch, int value, size_t width, size_t height,
                               cudaStream_t = nullptr) {
  return noted(call("fill", at, value, pitch, width, height, line));
}
inline cudaError_t filled(int line, void* at, int value, size_t bytes, cudaStream_t = nullptr) {
  return filled_rows(line, at, bytes, value, bytes, 1);
}
template <class S> cudaError_t symbol(const char* way, const char* name, const S& host, const void* data, size_t bytes,
                                      size_t offset = 0, int = 0, cudaStream_t = nullptr) {
  return noted(call(way, name, &host, sizeof(S), data, bytes, offset));
}
}  // namespace gemmery
#define cudaMalloc(...) gemmery::allocated("allocate", __LINE__, #__VA_ARGS__, __VA_ARGS__)
#define cudaMallocAsync(...) gemmery::allocated("allocate", __LINE__, #__VA_ARGS__, __VA_ARGS__)
#define cudaMallocManaged(...) gemmery::allocated("managed", __LINE__, #__VA_ARGS__, __VA_ARGS__)
#define cudaMallocHost(...) gemmery::allocated("managed", __LINE__, #__VA_ARGS__, __VA_ARGS__)
#define cudaHostAlloc(...) gemmery::allocated("managed", __LINE__, #__VA_ARGS__, __VA_ARGS__)
#define cudaMallocPitch(...) gemmery::allocated_rows(__LINE__, #__VA_ARGS__, __VA_ARGS__)
#define cudaMemcpy(...) gemmery::copied(__LINE__, __VA_ARGS__)
#define cudaMemcpyAsync(...) gemmery::copied(__LINE__, __VA_ARGS__)
#define cudaMemcpy2D(...) gemmery::copied_rows(__LINE__, __VA_ARGS__)
#define cudaMemcpy2DAsync(...) gemmery::copied_rows(__LINE__, __VA_ARGS__)
#define cudaMemset(...) gemmery::filled(__LINE__, __VA_ARGS__)
#define cudaMemsetAsync(...) gemmery::filled(__LINE__, __VA_ARGS__)
#define cudaMemset2D(...) gemmery::filled_rows(__LINE__, __VA_ARGS__)
#define cudaMemcpyToSymbol(s, ...) gemmery::symbol("to_symbol", #s, s, __VA_ARGS__)
#define cudaMemcpyToSymbolAsync(s, ...) gemmery::symbol("to_symbol", #s, s, __VA_ARGS__)
#define cudaMemcpyFromSymbol(p, s, ...) gemmery::symbol("from_symbol", #s, s, p, __VA_ARGS__)
#define cudaMemcpyFromSymbolAsync(p, s, ...) gemmery::symbol("from_symbol", #s, s, p, __VA_ARGS__)
#define cudaGetSymbolAddress(p, s) gemmery::symbol("symbol_address", #s, s, p, 0)
#define cudaGetSymbolSize(p, s) (*(p) = sizeof(s), cudaSuccess)
inline cudaError_t cudaFree(const void* p) { return gemmery::noted(gemmery::call("release", p)); }
inline cudaError_t cudaFreeAsync(const void* p, cudaStream_t) { return cudaFree(p); }
inline cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
template <class T> cudaError_t cudaHostGetDevicePointer(T** to, void* host, unsigned) { *to = (T*)host; return cudaSuccess; }
inline cudaError_t cudaHostRegister(void* at, size_t bytes, unsigned) {
  return gemmery::noted(gemmery::call("register", at, bytes));
}
inline cudaError_t cudaHostUnregister(void* at) { return cudaFree(at); }
inline cudaError_t cudaStreamAttachMemAsync(cudaStream_t, void*, size_t = 0, unsigned = 0) { return cudaSuccess; }
inline cudaError_t cudaMemPrefetchAsync(const void*, size_t, int, cudaStream_t = nullptr) { return cudaSuccess; }
inline cudaError_t cudaMemAdvise(const void*, size_t, int, int) { return cudaSuccess; }
enum { cudaMemAdviseSetReadMostly = 1, cudaMemAdviseSetPreferredLocation = 3, cudaMemAdviseSetAccessedBy = 5 };
inline cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = gemmery::call("property", "free");
  *total = gemmery::call("property", "totalGlobalMem");
  return cudaSuccess;
}

// Devices.
#define GEMMERY_PROPERTIES(P)                                                                                      \
  P(size_t, totalGlobalMem) P(size_t, sharedMemPerBlock) P(int, regsPerBlock) P(int, warpSize)                      \
  P(int, maxThreadsPerBlock) P(int, clockRate) P(size_t, totalConstMem) P(int, major) P(int, minor)                 \
  P(int, multiProcessorCount) P(int, concurrentKernels) P(int, memoryClockRate) P(int, memoryBusWidth)              \
  P(int, l2CacheSize) P(int, maxThreadsPerMultiProcessor) P(size_t, sharedMemPerMultiprocessor)                     \
  P(int, regsPerMultiprocessor) P(int, managedMemory) P(int, concurrentManagedAccess) P(int, cooperativeLaunch)     \
  P(size_t, sharedMemPerBlockOptin) P(int, maxBlocksPerMultiProcessor) P(int, unifiedAddressing)                    \
  P(int, asyncEngineCount) P(int, canMapHostMemory) P(int, deviceOverlap) P(int, integrated) P(int, ECCEnabled)     \
  P(size_t, memPitch) P(size_t, textureAlignment) P(int, kernelExecTimeoutEnabled) P(int, computeMode)              \
  P(int, pciBusID) P(int, pciDeviceID) P(int, pciDomainID) P(int, pageableMemoryAccess)                             \
  P(size_t, reservedSharedMemPerBlock) P(int, singleToDoublePrecisionPerfRatio)
struct cudaFuncAttributes {
  size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
  int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes;
};
struct cudaDeviceProp {
  char name[256];
  int maxThreadsDim[3], maxGridSize[3];
#define P(type, name) type name;
  GEMMERY_PROPERTIES(P)
#undef P
};
#define GEMMERY_ATTRIBUTES(A)                                                                                      \
  A(MaxThreadsPerBlock, 1, maxThreadsPerBlock) A(MaxSharedMemoryPerBlock, 8, sharedMemPerBlock)                     \
  A(TotalConstantMemory, 9, totalConstMem) A(TextureAlignment, 14, textureAlignment) A(GpuOverlap, 15, deviceOverlap) \
  A(KernelExecTimeout, 17, kernelExecTimeoutEnabled) A(Integrated, 18, integrated)                                  \
  A(CanMapHostMemory, 19, canMapHostMemory) A(ConcurrentKernels, 31, concurrentKernels)                             \
  A(EccEnabled, 32, ECCEnabled) A(AsyncEngineCount, 40, asyncEngineCount)                                           \
  A(UnifiedAddressing, 41, unifiedAddressing) A(PageableMemoryAccess, 88, pageableMemoryAccess)                     \
  A(MaxRegistersPerMultiprocessor, 82, regsPerMultiprocessor)                                                       \
  A(WarpSize, 10, warpSize) A(MaxRegistersPerBlock, 12, regsPerBlock) A(ClockRate, 13, clockRate) A(ComputeMode, 20, computeMode)                   \
  A(MultiProcessorCount, 16, multiProcessorCount) A(MemoryClockRate, 36, memoryClockRate)                           \
  A(GlobalMemoryBusWidth, 37, memoryBusWidth) A(L2CacheSize, 38, l2CacheSize)                                       \
  A(MaxThreadsPerMultiProcessor, 39, maxThreadsPerMultiProcessor) A(ComputeCapabilityMajor, 75, major)              \
  A(ComputeCapabilityMinor, 76, minor) A(MaxSharedMemoryPerMultiprocessor, 81, sharedMemPerMultiprocessor)          \
  A(ManagedMemory, 83, managedMemory) A(ConcurrentManagedAccess, 89, concurrentManagedAccess)                       \
  A(CooperativeLaunch, 95, cooperativeLaunch) A(MaxSharedMemoryPerBlockOptin, 97, sharedMemPerBlockOptin)           \
  A(MaxBlocksPerMultiprocessor, 106, maxBlocksPerMultiProcessor)
enum cudaDeviceAttr {
#define A(name, number, field) cudaDevAttr##name = number,
  GEMMERY_ATTRIBUTES(A)
#undef A
};
enum { cudaComputeModeDefault = 0, cudaComputeModeExclusive = 1, cudaComputeModeProhibited = 2 };
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* to, int device) {
  if (device) return gemmery::noted(cudaErrorInvalidDevice);
  gemmery::call("device_name", to->name);
  for (int side = 0; side < 3; side++) {
    to->maxThreadsDim[side] = side < 2 ? 1024 : 64;
    to->maxGridSize[side] = side ? 65535 : 2147483647;
  }
#define P(type, name) to->name = static_cast<type>(gemmery::call("property", #name));
  GEMMERY_PROPERTIES(P)
#undef P
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* to, cudaDeviceAttr what, int) {
#define A(name, number, field) if (what == number) return *to = (int)gemmery::call("property", #field), cudaSuccess;
  GEMMERY_ATTRIBUTES(A)
#undef A
  return gemmery::noted(cudaErrorInvalidValue);
}
inline cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return device ? gemmery::noted(cudaErrorInvalidDevice) : cudaSuccess; }
inline cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return gemmery::last; }
inline cudaError_t cudaThreadSynchronize() { return gemmery::last; }
inline cudaError_t cudaDeviceReset() { return cudaSuccess; }
inline cudaError_t cudaThreadExit() { return cudaSuccess; }
inline cudaError_t cudaProfilerStart() { return cudaSuccess; }
inline cudaError_t cudaProfilerStop() { return cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
enum cudaFuncCache { cudaFuncCachePreferNone, cudaFuncCachePreferShared, cudaFuncCachePreferL1, cudaFuncCachePreferEqual };
enum cudaSharedMemConfig { cudaSharedMemBankSizeDefault, cudaSharedMemBankSizeFourByte, cudaSharedMemBankSizeEightByte };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
                         cudaFuncAttributePreferredSharedMemoryCarveout = 9,
                         cudaFuncAttributeNonPortableClusterSizeAllowed = 14 };
enum cudaLimit { cudaLimitStackSize, cudaLimitPrintfFifoSize, cudaLimitMallocHeapSize };
inline cudaError_t cudaDeviceSetCacheConfig(cudaFuncCache) { return cudaSuccess; }
inline cudaError_t cudaDeviceSetSharedMemConfig(cudaSharedMemConfig) { return cudaSuccess; }
inline cudaError_t cudaDeviceSetLimit(cudaLimit limit, size_t bytes) {
  return limit == cudaLimitMallocHeapSize ? gemmery::noted(gemmery::call("limit", bytes)) : cudaSuccess;
}
typedef int cudaMemPool_t;
inline cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return gemmery::noted(cudaErrorInvalidDevice); }
inline cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return cudaSuccess; }
template <class F> cudaError_t cudaFuncSetAttribute(F*, int, int) { return cudaSuccess; }
template <class F> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* to, F*) {
  *to = {0, 0, 0, 1024, 32, 90, 90, 0, 49152};
  return cudaSuccess;
}
template <class F> cudaError_t cudaFuncSetCacheConfig(F*, cudaFuncCache) { return cudaSuccess; }
template <class F> cudaError_t cudaFuncSetSharedMemConfig(F*, cudaSharedMemConfig) { return cudaSuccess; }
template <class F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, F, int threads, size_t shared, unsigned = 0) {
  *blocks = (int)gemmery::call("blocks_at_once", threads, shared);
  return cudaSuccess;
}
template <class F>
cudaError_t cudaOccupancyMaxPotentialBlockSize(int* grid, int* block, F, size_t = 0, int most = 0) {
  *block = most ? std::min(most, 1024) : 1024;
  *grid = (int)(gemmery::call("blocks_at_once", *block, 0) * gemmery::call("property", "multiProcessorCount"));
  return cudaSuccess;
}

// Launches.
namespace gemmery {
struct Launch { unsigned grid[3], block[3], cluster[3]; size_t shared; };
inline thread_local Launch pending;
inline void configure(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t = nullptr) {
  pending = {{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, {0, 0, 0}, shared};
}
struct Unnamed {};
template <class T> long long size_of(const T&) { return sizeof(T); }
inline long long size_of(const Unnamed&) { return 0; }
template <class... P>
void launch(const char* name, const char* parameters, const char* pretty, int line, const P&... arguments) {
  const void* at[] = {std::addressof(arguments)..., nullptr};
  long long bytes[] = {size_of(arguments)..., 0};
  noted(call("launch", name, parameters, pretty, line, &pending, at, bytes, sizeof...(P)));
}
template <class... P, size_t... I>
void launch_all(void (*kernel)(P...), void** args, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_reference_t<P>*>(args[I])...);
}
}  // namespace gemmery
template <class... P>
cudaError_t cudaLaunchKernel(void (*kernel)(P...), dim3 grid, dim3 block, void** args, size_t shared = 0,
                             cudaStream_t stream = nullptr) {
  gemmery::configure(grid, block, shared, stream);
  gemmery::launch_all(kernel, args, std::index_sequence_for<P...>());
  return gemmery::last;
}
inline cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** args, size_t shared = 0,
                                    cudaStream_t stream = nullptr) {
  Dl_info info;
  if (!dladdr(kernel, &info) || !info.dli_sname) return gemmery::noted(cudaErrorInvalidValue);
  gemmery::configure(grid, block, shared, stream);
  return gemmery::noted(gemmery::call("launch", info.dli_sname, "", "", 0, &gemmery::pending, args, 0, 0));
}
template <class F>
cudaError_t cudaLaunchCooperativeKernel(F* kernel, dim3 grid, dim3 block, void** args, size_t shared = 0,
                                        cudaStream_t stream = nullptr) {
  return cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}
enum cudaLaunchAttributeID { cudaLaunchAttributeIgnore = 0, cudaLaunchAttributeCooperative = 2,
                             cudaLaunchAttributeClusterDimension = 4,
                             cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
union cudaLaunchAttributeValue {
  char pad[64];
  int cooperative, programmaticStreamSerializationAllowed;
  struct { unsigned x, y, z; } clusterDim;
};
struct cudaLaunchAttribute { cudaLaunchAttributeID id; cudaLaunchAttributeValue val; };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... arguments) {
  gemmery::configure(config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
  for (unsigned each = 0; each < config->numAttrs; each++)
    if (config->attrs[each].id == cudaLaunchAttributeClusterDimension)
      memcpy(gemmery::pending.cluster, &config->attrs[each].val.clusterDim, sizeof gemmery::pending.cluster);
  kernel(static_cast<P>(arguments)...);
  return gemmery::last;
}

// Vectors, and what device code has besides the C library.
#define GEMMERY_VECTOR(T, name)                                                                                    \
  inline name##1 make_##name##1(T x) { return {x}; }                                                                \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                                        \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                                \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
#ifndef GEMMERY_VECTORS
#define GEMMERY_VECTORS
GEMMERY_VECTOR(signed char, char) GEMMERY_VECTOR(unsigned char, uchar) GEMMERY_VECTOR(short, short)
GEMMERY_VECTOR(unsigned short, ushort) GEMMERY_VECTOR(int, int) GEMMERY_VECTOR(unsigned, uint)
GEMMERY_VECTOR(long, long) GEMMERY_VECTOR(unsigned long, ulong) GEMMERY_VECTOR(long long, longlong)
GEMMERY_VECTOR(unsigned long long, ulonglong) GEMMERY_VECTOR(float, float) GEMMERY_VECTOR(double, double)
#endif
typedef unsigned char uchar;
using std::max;
using std::min;
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
namespace cooperative_groups {}
namespace cuda { namespace std {} }
namespace nvcuda { namespace wmma {} }

// exit() returns from main(), and a fault of the host program ends it with the address. The linker sends calls of
// exit() here, as those of headers of C++ are not to be renamed.
extern "C" [[noreturn]] inline __attribute__((used)) void __wrap_exit(int code) { gemmery::leave(code); }
namespace gemmery {
inline char stack[1 << 16];  // of handlers, for there may be no other
inline uintptr_t top;  // of main()'s stack
inline void caught(int number, siginfo_t* info, void* context) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(info->si_addr);
  uintptr_t bottom = top;
#if defined(__linux__) && defined(__x86_64__)
  bottom = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RSP];
#elif defined(__linux__) && defined(__aarch64__)
  bottom = static_cast<ucontext_t*>(context)->uc_mcontext.sp;
#endif
  const bool access = number == SIGSEGV || number == SIGBUS;
  if (inside && !access) signal(number, SIG_DFL), raise(number);  // in Python's frames, which may not be left
  fault = access && (at + 4096 < bottom || at >= top) ? static_cast<long long>(at | 1ull << 62) : number;
  leave(128 + number);
}

// Ends main(), by Ctrl-C or after its time: from the program's own code, as malloc() has locks that would stay closed,
// or from elsewhere if it is there each time, in a call that waits.
inline struct sigaction before[7];
inline uintptr_t begin, end;
inline int elsewhere = 0;
inline void stopped(int number, siginfo_t*, void* context) {
  uintptr_t at = begin;
#if defined(__linux__) && defined(__x86_64__)
  at = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__linux__) && defined(__aarch64__)
  at = static_cast<ucontext_t*>(context)->uc_mcontext.pc;
#endif
  if (inside && number == SIGINT && before[5].sa_handler > SIG_IGN) before[5].sa_handler(number);
  if (inside || ((at < begin || at >= end) && number != SIGINT && ++elsewhere < 100)) return;
  fault = number;
  leave(128 + number);
}
}  // namespace gemmery
#ifdef __linux__
extern "C" __attribute__((visibility("hidden"))) char _end[];  // of this library
#else
static char _end[1];
#endif
extern "C" __attribute__((used, visibility("default"))) inline int gemmery_run(
    gemmery::Call python, int (*entry)(int, char**), int count, char** words, long long* fault) {
  gemmery::python = python;
  const int numbers[7] = {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL, SIGINT, SIGVTALRM};
  const stack_t apart = {gemmery::stack, 0, sizeof gemmery::stack};
  stack_t own;
  sigaltstack(&apart, &own);
  gemmery::top = reinterpret_cast<uintptr_t>(&own);
  Dl_info here;
  gemmery::begin = dladdr(reinterpret_cast<void*>(entry), &here) ? reinterpret_cast<uintptr_t>(here.dli_fbase) : 0;
  gemmery::end = reinterpret_cast<uintptr_t>(_end);
  for (int each = 0; each < 7; each++) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = each < 5 ? gemmery::caught : gemmery::stopped;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | (each < 5 ? SA_ONSTACK : 0);
    sigaction(numbers[each], &action, &gemmery::before[each]);
  }
  if (!sigsetjmp(gemmery::out, 1)) gemmery::status = entry(count, words);
  for (int each = 0; each < 6; each++) sigaction(numbers[each], &gemmery::before[each], nullptr);
  sigaltstack(&own, nullptr);
  signal(SIGVTALRM, SIG_IGN);  // one more may be on its way, which would end the process
  fflush(stdout);
  std::cout.flush();
  *fault = gemmery::fault;
  return gemmery::status;
}
#endif
