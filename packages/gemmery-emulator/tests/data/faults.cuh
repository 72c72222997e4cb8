// What the files of faulty kernels share. With -DREPAIRED their kernels have no fault: ADD(code) is then there, and
// EITHER(wrong, right) is the second. A comment above a kernel gives what is found if it is no race, and its blocks and
// threads.
#pragma once
#ifdef REPAIRED
#define ADD(...) __VA_ARGS__
#define EITHER(wrong, right) right
#else
#define ADD(...)
#define EITHER(wrong, right) wrong
#endif
#define KERNEL(name) extern "C" __global__ void name(const float* x, float* y, int* n)
#define T int(threadIdx.x)
