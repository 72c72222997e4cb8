// Idea: an operand that tensor copies cannot describe, or wgmma cannot read, is copied before the product: rows of k,
// each from a multiple of 128 bytes on. T is an unsigned integer of the elements' size: bits are copied, so that a
// product has the same bits with and without the copy. PACKED: bit 0 stands for A, bit 1 for B, bit 2 for a B of rows
// of n in place of k; a matrix repeated in a batch is copied once. It reads and writes every byte once; at the 4.2 TB/s
// of an H200 that takes 32 us for both operands of 4099 x 4099 x 4099 in bf16, against about 170 us for the product.
// Rows keep the zeros that end their last 16 bytes. The rest of a pitch is never written: a tensor map ends at the true
// k, beyond which a tensor copy writes zeros by itself.
// Measured on an H200, bf16: 4095 x 4097 x 4099 takes 242 us with it, 4096 x 4096 x 4096, which needs none, 168.
#include "load.cuh"

constexpr int PACK_BATCH = 2;  // rows that a thread reads before it writes the first

// A matrix as rows of k, and where its copy begins; strides count elements.
template <class T> struct Rows {
  static constexpr int VEC = 16 / int(sizeof(T)), WORD = 4 / int(sizeof(T));  // elements in a piece and in a word
  static constexpr int SIDES = 128 / int(sizeof(T)), WORDS = 128 / WORD;      // of a tile that is transposed
  const T* from;
  long long side_step, k_step, batch_step;
  int sides, depth, batches;
  T* to;
  __device__ __forceinline__ long long pitch() const { return (depth + 8LL * VEC - 1) / (8 * VEC) * (8 * VEC); }
};

// A piece at `first` of a row at any address: from the two aligned pieces that it overlaps, if all of both is in the
// row, else by elements, with zeros beyond the row's end. A warp reads each line once, and again from L1.
template <class T> struct Unaligned {
  const T* row;
  int first, depth;
  unsigned shift;  // bytes from an aligned address
  bool whole;      // the aligned pieces are inside the row
  unsigned words[8];

  __device__ __forceinline__ void request() {
    shift = unsigned(reinterpret_cast<unsigned long long>(row + first)) % 16;
    int before = shift / int(sizeof(T)), after = shift ? 2 * Rows<T>::VEC - before : Rows<T>::VEC;
    whole = first >= before && first + after <= depth;
    const T* aligned = row + first - before;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Chunk<unsigned, 4> four = {};
      if (whole && (half == 0 || shift)) four = reinterpret_cast<const Chunk<unsigned, 4>*>(aligned)[half];
#pragma unroll
      for (int w = 0; w < 4; ++w) words[4 * half + w] = four.of[w];
    }
  }
  __device__ __forceinline__ void store(T* to) {
    if (first >= depth) return;
    if (whole) {
#pragma unroll
      for (int w = 0; w < 6; ++w) words[w] = shift & 8 ? words[w + 2] : words[w];
#pragma unroll
      for (int w = 0; w < 5; ++w) words[w] = shift & 4 ? words[w + 1] : words[w];
      Chunk<unsigned, 4> four;
#pragma unroll
      for (int w = 0; w < 4; ++w) four.of[w] = __funnelshift_r(words[w], words[w + 1], shift % 4 * 8);
      *reinterpret_cast<Chunk<unsigned, 4>*>(to) = four;
    } else {
#pragma unroll 1
      for (int v = 0; v < Rows<T>::VEC; v += 4) {
        Chunk<T, 4> few = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (first + v + i < depth) few.of[i] = row[first + v + i];
        }
        *reinterpret_cast<Chunk<T, 4>*>(to + v) = few;
      }
    }
  }
};

// Lanes that share a row whose elements are adjacent, one piece each: a power of two.
template <class T> __device__ __forceinline__ int lanes_of_row(int depth) {
  int pieces = (depth + Rows<T>::VEC - 1) / Rows<T>::VEC;
  return pieces >= 32 ? 32 : 1 << (32 - __clz(pieces - 1));
}

// The rows and the elements of k that a block copies at a time.
template <class T> struct Extent {
  int sides, depth;
  __device__ __forceinline__ explicit Extent(const Rows<T>& x) {
    int lanes = lanes_of_row<T>(x.depth);
    bool adjacent = x.k_step == 1;
    sides = adjacent ? PACK_BATCH * PACK_THREADS / lanes : Rows<T>::SIDES;
    depth = adjacent ? lanes * Rows<T>::VEC : 128;
  }
  __device__ __forceinline__ unsigned across(const Rows<T>& x) const { return (x.depth + depth - 1) / depth; }
  __device__ __forceinline__ unsigned down(const Rows<T>& x) const { return (x.sides + sides - 1) / sides; }
};

// The part of a matrix that a block copies.
template <class T> struct Corner {
  const T* from;  // of the matrix
  T* to;          // of its copy
  int side, k;    // the first
};

template <class T>
__device__ __forceinline__ Corner<T> corner(const Rows<T>& x, const Extent<T>& extent, unsigned index) {
  unsigned across = extent.across(x), row = index / across, batch = row / extent.down(x);
  return {x.from + batch * x.batch_step, x.to + batch * x.sides * x.pitch(), int(row % extent.down(x)) * extent.sides,
          int(index % across) * extent.depth};
}

// Elements of a row are adjacent.
template <class T> __device__ __forceinline__ void copy_rows(const Rows<T>& x, const Corner<T>& at) {
  int lanes = lanes_of_row<T>(x.depth), side = at.side + threadIdx.x / lanes;
  int k = at.k + threadIdx.x % lanes * Rows<T>::VEC;
  Unaligned<T> pieces[PACK_BATCH];
#pragma unroll
  for (int i = 0; i < PACK_BATCH; ++i) {
    int row = side + i * (PACK_THREADS / lanes);
    pieces[i] = {at.from + row * x.side_step, k, row < x.sides ? x.depth : 0};
    pieces[i].request();
  }
#pragma unroll
  for (int i = 0; i < PACK_BATCH; ++i) pieces[i].store(at.to + (side + i * (PACK_THREADS / lanes)) * x.pitch() + k);
}

// A tile in shared memory, 16 KB in words of k. With a word more in each row, lanes that write one word of 32 sides or
// 32 words of a side, and lanes that read the pieces of 4 sides, use 32 banks.
template <class T> using PackTile = unsigned[Rows<T>::SIDES][Rows<T>::WORDS + 1];

// Fills the tile by single elements, whose lanes follow the smaller stride, so that they share lines of memory. Memory
// answers after about a microsecond: at 4 TB/s a multiprocessor has to have asked for 16 KB by then, all the time.
template <bool BY_K, class T>
__device__ __forceinline__ void gather(const Rows<T>& x, const Corner<T>& at, PackTile<T>& tile) {
  constexpr int WORD = Rows<T>::WORD, SIDES = Rows<T>::SIDES, WORDS = Rows<T>::WORDS;
  constexpr int BATCH = sizeof(T) == 1 ? 2 : 4 * sizeof(T);
  constexpr int DOWN = BY_K ? PACK_THREADS / WORDS : 0, ALONG = BY_K ? 0 : PACK_THREADS / SIDES;  // to the next word
  int side = threadIdx.x / (BY_K ? WORDS : 1) % SIDES, word = threadIdx.x / (BY_K ? 1 : SIDES) % WORDS;
  unsigned* to = &tile[side][word];
  side += at.side;
  int k = at.k + word * WORD;
  const T* from = at.from + side * x.side_step + k * x.k_step;
  const long long step = DOWN * x.side_step + ALONG * WORD * x.k_step;
#pragma unroll 1
  for (int first = 0; first < SIDES * WORDS / PACK_THREADS; first += BATCH) {
    unsigned bits[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      bits[i] = 0;
#pragma unroll
      for (int v = 0; v < WORD; ++v) {
        if (side < x.sides && k + v < x.depth) bits[i] |= unsigned(from[v * x.k_step]) << (v * 8 * sizeof(T) % 32);
      }
      from += step;
      side += DOWN;
      k += ALONG * WORD;
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      *to = bits[i];
      to += DOWN * (WORDS + 1) + ALONG;
    }
  }
}

template <class T>
__device__ __forceinline__ void gather(const Rows<T>& x, const Corner<T>& at, PackTile<T>& tile) {
  if (llabs(x.k_step) < llabs(x.side_step)) {
    gather<true>(x, at, tile);
  } else {
    gather<false>(x, at, tile);
  }
}

// Fills the tile from bytes that are adjacent along the side, in words: 4 sides of 4 k are transposed in registers. The
// lanes of a warp have 8 words of each of 16 k, so that they write 32 banks.
__device__ __forceinline__ void transpose(const Rows<unsigned char>& x, const Corner<unsigned char>& at,
                                          PackTile<unsigned char>& tile) {
#pragma unroll
  for (int i = 0; i < 1024 / PACK_THREADS; ++i) {
    int index = threadIdx.x + i * PACK_THREADS, word = index / 8 % 4 + index / 128 * 4;
    int side = (index % 8 + index / 32 % 4 * 8) * 4, k = at.k + word * 4;
    const unsigned char* from = at.from + at.side + side + k * x.k_step;
    unsigned rows[4];
#pragma unroll
    for (int r = 0; r < 4; ++r, from += x.k_step) {
      rows[r] = 0;
      if (k + r >= x.depth) continue;
      if (at.side + side + 4 <= x.sides) {
        rows[r] = *reinterpret_cast<const unsigned*>(from);
      } else {
        for (int s = 0; s < x.sides - at.side - side; ++s) rows[r] |= unsigned(from[s]) << (8 * s);
      }
    }
    unsigned low = __byte_perm(rows[0], rows[1], 0x5140), high = __byte_perm(rows[2], rows[3], 0x5140);
    tile[side][word] = __byte_perm(low, high, 0x5410);
    tile[side + 1][word] = __byte_perm(low, high, 0x7632);
    low = __byte_perm(rows[0], rows[1], 0x7362), high = __byte_perm(rows[2], rows[3], 0x7362);
    tile[side + 2][word] = __byte_perm(low, high, 0x5410);
    tile[side + 3][word] = __byte_perm(low, high, 0x7632);
  }
}

// Elements of a row are not adjacent: they are put together in shared memory.
template <class T>
__device__ __forceinline__ void collect_rows(const Rows<T>& x, const Corner<T>& at, PackTile<T>& tile) {
  if constexpr (sizeof(T) == 1) {
    unsigned long long odd = reinterpret_cast<unsigned long long>(at.from) | (unsigned long long)x.k_step;
    if (x.side_step == 1 && odd % 4 == 0) {
      transpose(x, at, tile);
    } else {
      gather(x, at, tile);
    }
  } else {
    gather(x, at, tile);
  }
  __syncthreads();  // all is in the tile
#pragma unroll(sizeof(T) == 2 ? 1 : 4)  // more has no registers
  for (int index = threadIdx.x; index < Rows<T>::SIDES * Rows<T>::WORDS / 4; index += PACK_THREADS) {
    int side = index / 8 % Rows<T>::SIDES, word = index % 8 * 4 + index / (8 * Rows<T>::SIDES) * 32;
    int k = at.k + word * Rows<T>::WORD;
    if (at.side + side >= x.sides || k >= x.depth) continue;
    Chunk<unsigned, 4> four;
#pragma unroll
    for (int w = 0; w < 4; ++w) four.of[w] = tile[side][word + w];
    *reinterpret_cast<Chunk<unsigned, 4>*>(at.to + (at.side + side) * x.pitch() + k) = four;
  }
  __syncthreads();  // before the next tile
}

// The operands that are packed lie one after the other, each from a multiple of 256 bytes on, B first; a matrix that a
// batch or groups share has one place. Blocks go through the parts of both in turn.
template <class T, int PACKED>
__global__ __launch_bounds__(PACK_THREADS, 4) void wgmma_pack(const Product<T, float> p) {
  __shared__ PackTile<T> tile;
  ptx::griddepcontrol_launch_dependents();  // the product prepares itself, and waits before it reads
  ptx::griddepcontrol_wait();
  T* to = static_cast<T*>(p.workspace);
  unsigned next = blockIdx.x;
#pragma unroll 1
  for (int operand = PACKED & 2 ? 1 : 0; operand >= (PACKED & 1 ? 0 : 1); --operand) {
    Rows<T> x = {p.a, p.a_row, p.a_col, p.a_batch, p.m, p.k, 1, to};
    if (operand == 1) x = {p.b, p.b_col, p.b_row, p.b_batch, p.n, p.k, 1, to};
    if (PACKED & 4) x = {p.b, p.b_row, p.b_col, p.b_batch, p.k, p.n, 1, to};  // rows of n
    if (x.batch_step != 0) x.batches = p.batch;
    to += (1LL * x.batches * x.sides * x.pitch() + 16 * x.VEC - 1) / (16 * x.VEC) * (16 * x.VEC);
    Extent<T> extent(x);
    unsigned parts = extent.across(x) * extent.down(x) * x.batches;
#pragma unroll 1
    for (; next < parts; next += gridDim.x) {
      if (x.k_step == 1) {
        copy_rows(x, corner(x, extent, next));
      } else {
        collect_rows(x, corner(x, extent, next), tile);
      }
    }
    next -= parts;
  }
}
