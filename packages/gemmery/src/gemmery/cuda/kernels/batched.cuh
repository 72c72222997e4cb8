// Small matrices of a batch in shared memory: a block's part of A, B and C, as lines of adjacent elements.
#pragma once
#include "epilogue.cuh"
#include "load.cuh"

// The sides of all products of a batch, as constants.
template <int ROWS, int COLUMNS, int DEPTH> struct BatchSides {
  static constexpr int M = ROWS, N = COLUMNS, K = DEPTH;
};

// Matrices of LINES lines of LENGTH elements. An odd number of 16-byte pieces from one matrix to the next, and from one
// line to the next where lines are long, puts those that lanes read at once on different banks. Pieces cross borders
// only where nothing is between them. Lines of PADDED bytes or more have PAD bytes between them.
template <class T, int LINES, int LENGTH, int PADDED, int PAD> struct BatchLines {
  using Element = T;
  static constexpr int SIZE = LINES * LENGTH, LINE = LENGTH * int(sizeof(T)), PIECE = 16 / int(sizeof(T));
  static constexpr int PITCH = LINE >= PADDED && LINE % 32 == 0 ? LINE + PAD : LINE, BYTES = LINES * PITCH;
  static constexpr int STEP = BYTES % 32 ? BYTES : BYTES + 16;  // bytes from one matrix to the next

  static __device__ __forceinline__ int place(int element) {
    if constexpr (BYTES % 16) return element * int(sizeof(T));
    int within = element % SIZE;
    return element / SIZE * STEP + within / LENGTH * PITCH + within % LENGTH * int(sizeof(T));
  }

  // Adjacent elements that one access moves: those of COUNT, from a multiple of them on.
  template <int COUNT> static constexpr __device__ int width() {
    int width = 16 / int(sizeof(T));
    while (COUNT % width || PITCH % (width * sizeof(T)) || STEP % (width * sizeof(T))) width /= 2;
    return width;
  }

  // Rows and columns from (i, j) on, of a matrix whose lines are its rows or its columns; lines that are APART.
  template <bool BY_ROWS, int APART, int DOWN, int ACROSS, class S>
  static __device__ __forceinline__ void read(S (&x)[DOWN][ACROSS], const char* matrix, int i, int j) {
    constexpr int COUNT = BY_ROWS ? ACROSS : DOWN, WIDTH = width<COUNT>();
    const char* from = matrix + (BY_ROWS ? i : j) * PITCH + (BY_ROWS ? j : i) * int(sizeof(T));
#pragma unroll
    for (int line = 0; line < (BY_ROWS ? DOWN : ACROSS); ++line) {
#pragma unroll
      for (int e = 0; e < COUNT; e += WIDTH) {
        auto chunk = *reinterpret_cast<const Chunk<T, WIDTH>*>(from + line * APART * PITCH + e * int(sizeof(T)));
#pragma unroll
        for (int v = 0; v < WIDTH; ++v) (BY_ROWS ? x[line][e + v] : x[e + v][line]) = widen<S>(chunk.of[v]);
      }
    }
  }

  template <int COUNT>
  static __device__ __forceinline__ void write(char* matrix, int line, int e, const T (&x)[COUNT]) {
    constexpr int WIDTH = width<COUNT>();
#pragma unroll
    for (int v = 0; v < COUNT; v += WIDTH) {
      *reinterpret_cast<Chunk<T, WIDTH>*>(matrix + line * PITCH + (e + v) * int(sizeof(T))) =
          *reinterpret_cast<const Chunk<T, WIDTH>*>(x + v);
    }
  }
};

// Where the matrices of a batch lie: whole, one after the other and at a multiple of 16 bytes, or anywhere.
template <class Lines, class Memory> struct BatchOperand {
  using T = typename Lines::Element;
  Memory* first;
  long long next, line, along;

  __device__ __forceinline__ bool is_array(int elements) const {
    return (next == Lines::SIZE || elements == Lines::SIZE) &&
           (line == Lines::LINE / int(sizeof(T)) || Lines::SIZE * sizeof(T) == Lines::LINE) &&
           (along == 1 || Lines::LINE == sizeof(T)) && reinterpret_cast<unsigned long long>(first) % 16 == 0;
  }
  __device__ __forceinline__ Memory* at(int element) const {
    constexpr int LENGTH = Lines::LINE / int(sizeof(T));
    int within = element % Lines::SIZE;
    return first + element / Lines::SIZE * next + within / LENGTH * line + within % LENGTH * along;
  }

  // A matrix that all products share is loaded once.
  template <int THREADS, int MOST> __device__ __forceinline__ void load(char* to, int products) const {
    int elements = next == 0 ? Lines::SIZE : products * Lines::SIZE, from = threadIdx.x;
    if (is_array(elements)) {
#pragma unroll
      for (int e = 0; e < (MOST * Lines::SIZE + Lines::PIECE - 1) / Lines::PIECE; e += THREADS) {
        int element = (e + threadIdx.x) * Lines::PIECE;
        if (element + Lines::PIECE <= elements) ptx::cp_async<16>(to + Lines::place(element), first + element, true);
      }
      from += elements / Lines::PIECE * Lines::PIECE;
    }
    for (int e = from; e < elements; e += THREADS) {
      if constexpr (sizeof(T) >= 4) {
        ptx::cp_async<sizeof(T)>(to + Lines::place(e), at(e), true);
      } else {
        *reinterpret_cast<T*>(to + Lines::place(e)) = *at(e);
      }
    }
  }

  template <int THREADS, int MOST> __device__ __forceinline__ void store(const char* from, int products) const {
    int elements = products * Lines::SIZE, rest = threadIdx.x;
    if (is_array(elements)) {
#pragma unroll
      for (int e = 0; e < (MOST * Lines::SIZE + Lines::PIECE - 1) / Lines::PIECE; e += THREADS) {
        int element = (e + threadIdx.x) * Lines::PIECE;
        using Piece = Chunk<T, Lines::PIECE>;
        if (element + Lines::PIECE > elements) break;
        *reinterpret_cast<Piece*>(first + element) = *reinterpret_cast<const Piece*>(from + Lines::place(element));
      }
      rest += elements / Lines::PIECE * Lines::PIECE;
    }
    for (int e = rest; e < elements; e += THREADS) *at(e) = *reinterpret_cast<const T*>(from + Lines::place(e));
  }
};

// A block's products: PRODUCTS of the batch, fewer at its end.
template <class T, class Out, Layout A_LAYOUT, Layout B_LAYOUT, class Sides, int PRODUCTS, int THREADS,
          int PADDED = 64, int PAD = 16>
struct BatchBlock {
  static constexpr int M = Sides::M, N = Sides::N, K = Sides::K;
  using A = BatchLines<T, A_LAYOUT == COL ? K : M, A_LAYOUT == COL ? M : K, PADDED, PAD>;
  using B = BatchLines<T, B_LAYOUT == COL ? N : K, B_LAYOUT == COL ? K : N, PADDED, PAD>;
  using C = BatchLines<Out, M, N, PADDED, PAD>;

  char* shared;
  long long first;
  int products, a_step, b_step;

  __device__ __forceinline__ BatchBlock(const Product<T, Out>& p, char* memory) : shared(memory) {
    first = (long long)blockIdx.x * PRODUCTS;
    products = int(min((long long)PRODUCTS, p.batch - first));
    a_step = p.a_batch ? A::STEP : 0;
    b_step = p.b_batch ? B::STEP : 0;
  }
  __device__ __forceinline__ char* a(int product) const { return shared + product * a_step; }
  __device__ __forceinline__ char* b(int product) const { return shared + ROOM<A> + product * b_step; }
  __device__ __forceinline__ char* c(int product) const { return shared + ROOM<A> + ROOM<B> + product * C::STEP; }

  __device__ __forceinline__ void load(const Product<T, Out>& p) const {
    constexpr bool A_COL = A_LAYOUT == COL, B_COL = B_LAYOUT == COL;
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    const T *from_a = p.a + first * p.a_batch, *from_b = p.b + first * p.b_batch;
    BatchOperand<A, const T> a{from_a, p.a_batch, A_COL ? p.a_col : p.a_row, A_COL ? p.a_row : p.a_col};
    BatchOperand<B, const T> b{from_b, p.b_batch, B_COL ? p.b_col : p.b_row, B_COL ? p.b_row : p.b_col};
    a.template load<THREADS, PRODUCTS>(shared, products);
    b.template load<THREADS, PRODUCTS>(shared + ROOM<A>, products);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
  }

  template <int EPILOGUE>
  __device__ __forceinline__ Out finish(const Product<T, Out>& p, int product, int i, int j, Sum<T, Out> sum) const {
    const Out* c = EPILOGUE & SCALED ? p.c + (first + product) * p.c_batch + i * p.c_row + j * p.c_col : nullptr;
    return finished<EPILOGUE>(p, c, i, j, sum);
  }

  __device__ __forceinline__ void store(const Product<T, Out>& p) const {
    __syncthreads();
    BatchOperand<C, Out> c{p.c + first * p.c_batch, p.c_batch, p.c_row, p.c_col};
    c.template store<THREADS, PRODUCTS>(shared + ROOM<A> + ROOM<B>, products);
  }

 private:
  template <class Lines> static constexpr int ROOM = (PRODUCTS * Lines::STEP + 15) / 16 * 16;
};
