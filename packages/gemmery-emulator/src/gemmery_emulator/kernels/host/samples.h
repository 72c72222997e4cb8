// What NVIDIA's samples have in helper_cuda.h and its kin, for programs that come without them.
#ifndef GEMMERY_SAMPLES
#define GEMMERY_SAMPLES
#include "cuda_runtime.h"
#include <chrono>
#include <string>
template <class T> void check(T error, const char* what, const char* file, int line) {
  if (!error) return;
  fprintf(stderr, "%s:%d: error %d in %s\n", file, line, static_cast<int>(error), what);
  exit(EXIT_FAILURE);
}
#define checkCudaErrors(value) check((value), #value, __FILE__, __LINE__)
#define getLastCudaError(text) check(cudaGetLastError(), text, __FILE__, __LINE__)
inline int findCudaDevice(int, const char**) {
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, 0);
  printf("GPU Device 0: \"%s\" with compute capability %d.%d\n\n", properties.name, properties.major, properties.minor);
  return 0;
}
inline int gpuDeviceInit(int) { return 0; }
inline int gpuGetMaxGflopsDeviceId() { return 0; }
inline bool checkCudaCapabilities(int, int) { return true; }
inline int _ConvertSMVer2Cores(int major, int) { return major < 8 ? 64 : 128; }
inline const char* gemmery_flag(int count, const char** words, const char* flag) {
  for (int each = 1; each < count; each++) {
    const char* word = words[each] + strspn(words[each], "-");
    const size_t size = strlen(flag);
    if (!strncmp(word, flag, size) && (!word[size] || word[size] == '=')) return word[size] ? word + size + 1 : word + size;
  }
  return nullptr;
}
inline bool checkCmdLineFlag(int count, const char** words, const char* flag) { return gemmery_flag(count, words, flag); }
inline int getCmdLineArgumentInt(int count, const char** words, const char* flag) {
  const char* value = gemmery_flag(count, words, flag);
  return value ? atoi(value) : 0;
}
inline float getCmdLineArgumentFloat(int count, const char** words, const char* flag) {
  const char* value = gemmery_flag(count, words, flag);
  return value ? static_cast<float>(atof(value)) : 0;
}
inline bool getCmdLineArgumentString(int count, const char** words, const char* flag, char** to) {
  *to = const_cast<char*>(gemmery_flag(count, words, flag));
  return *to;
}
inline double gemmery_now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
struct StopWatchInterface {
  double total = 0, begin = 0;
  int sessions = 0;
  void start() { begin = gemmery_now(); }
  void stop() { total += gemmery_now() - begin, sessions++; }
  void reset() { *this = {0, gemmery_now(), 0}; }
  float getTime() { return static_cast<float>(total); }
  float getAverageTime() { return sessions ? getTime() / sessions : 0; }
};
typedef StopWatchInterface StopWatchLinux;
inline bool sdkCreateTimer(StopWatchInterface** timer) { *timer = new StopWatchInterface; return true; }
inline bool sdkDeleteTimer(StopWatchInterface** timer) { delete *timer; return true; }
inline bool sdkStartTimer(StopWatchInterface** timer) { (*timer)->start(); return true; }
inline bool sdkStopTimer(StopWatchInterface** timer) { (*timer)->stop(); return true; }
inline bool sdkResetTimer(StopWatchInterface** timer) { (*timer)->reset(); return true; }
inline float sdkGetTimerValue(StopWatchInterface** timer) { return (*timer)->getTime(); }
inline float sdkGetAverageTimerValue(StopWatchInterface** timer) { return (*timer)->getAverageTime(); }
template <class T> bool compareData(const T* x, const T* y, unsigned count, T least, float) {
  for (unsigned each = 0; each < count; each++)
    if (!(std::abs(double(x[each]) - double(y[each])) <= least)) return false;
  return true;
}
inline bool sdkCompareL2fe(const float* x, const float* y, unsigned count, float least) {
  double error = 0, size = 0;
  for (unsigned each = 0; each < count; each++) error += (x[each] - y[each]) * (x[each] - y[each]), size += x[each] * x[each];
  return std::sqrt(error) <= least * std::sqrt(size);
}
#endif
