// An atomic that is one within a block only, at a place that all blocks update.
__global__ void block_scope(int* count) {
#ifdef FIXED
  atomicAdd(count, 1);
#else
  atomicAdd_block(count, 1);  // FAULT OTHER
#endif
}
