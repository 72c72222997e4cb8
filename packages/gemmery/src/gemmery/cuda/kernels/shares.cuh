// Which steps of which tiles of a product by packed weights each block has: Tiles are QuantizedTiles, a tile some
// chunks of 64 rows of W by TOKENS rows of x, and a step 128 of k.
#pragma once
#include "tma.cuh"

// Where a tile is: its expert, its first chunk of W, its first token, and behind the last one that it may have.
struct SharedSpot { int group, part, token, end; };

// A block's steps of tiles [first, last): the first one's from `from` on, those of tile `cut` as far as `to`.
struct Steps {
  int steps, first, last, from, cut, to;

  // A run of the steps of tiles in their order.
  __device__ __forceinline__ void set(int begin, int end) {
    first = begin / steps;
    from = begin < end ? begin % steps : 0;
    last = begin < end ? (end - 1) / steps + 1 : first;
    cut = last - 1;
    to = end - cut * steps;
  }
  __device__ __forceinline__ int begin(int tile) const { return tile == first ? from : 0; }
  __device__ __forceinline__ int stop(int tile) const { return tile == cut ? to : steps; }
  __device__ __forceinline__ int count() const {
    return (last - first) * steps - from - (cut >= first ? steps - to : 0);
  }
};

// Tiles, tokens before rows, and who has them: `splits` blocks a tile, 1 or 2 or 4 or 8; or, if that is 0, each block
// has an equal run of the steps of the first `shared` tiles, which may begin and end within one, and then whole ones of
// the others in turn. A division is about 30 instructions of one warp, before the first of which nothing is asked for:
// few tokens, with a few blocks a tile, need none.
template <class Tiles> struct Share : Steps {
  int across, splits, shift, shared, run, more, tokens;

  template <class P> __device__ __forceinline__ explicit Share(const P& p) : tokens(p.product.m) {
    const int blocks = gridDim.x, block = blockIdx.x;
    steps = (p.product.k + Tiles::STEP - 1) / Tiles::STEP;
    across = (p.product.m + Tiles::TOKENS - 1) / Tiles::TOKENS;
    splits = max(p.band, 0);
    shared = max(-p.band, 0);
    shift = splits ? 31 - __clz(splits) : 0;
    run = more = 0;
    if (splits) {
      const int part = block & (splits - 1);
      first = cut = block >> shift;
      last = first + 1;
      from = part * steps >> shift;
      to = (part + 1) * steps >> shift;
    } else {
      run = shared * steps / blocks;
      more = shared * steps % blocks;
      set(begin_of(block), begin_of(block + 1));
      const int whole = (p.product.n + Tiles::ROWS - 1) / Tiles::ROWS * across - shared;
      last += (whole - block + blocks - 1) / blocks;
    }
  }
  __device__ __forceinline__ SharedSpot at(int tile) const {
    if (tile > cut) tile = shared + int(blockIdx.x) + (tile - cut - 1) * int(gridDim.x);
    if (across == 1) return {0, tile * Tiles::PARTS, 0, tokens};
    return {0, tile / across * Tiles::PARTS, tile % across * Tiles::TOKENS, tokens};
  }
  __device__ __forceinline__ int begin_of(int block) const { return block * run + min(block, more); }
  __device__ __forceinline__ int block_of(int step) const {
    int of_longer = more * (run + 1);
    return step < of_longer ? step / (run + 1) : more + (step - of_longer) / run;
  }
  __device__ __forceinline__ int first_block(int tile) const {
    return splits ? tile << shift : block_of(tile * steps);
  }
  __device__ __forceinline__ int last_block(int tile) const {
    return splits ? (tile + 1 << shift) - 1 : block_of((tile + 1) * steps - 1);
  }
  // Whether this tile is the second one of which a block has a part.
  __device__ __forceinline__ bool second_of(int block, int tile) const {
    return !splits && begin_of(block) < tile * steps;
  }
};

// The same for experts, groups of tokens with a W each, whose ends are read on the device: expert after expert, of
// those that have tokens. Each block has whole tiles, or, where that would leave many idle, an equal run of steps.
template <class Tiles> struct Experts : Steps {
  static constexpr int CUT = 10;  // steps that take as long as to add up the parts of a tile that two blocks have
  const int2* table;  // of each group: the tiles up to its last one, and where it ends; null while it is not known
  int groups, of_group, tiles, blocks, run, more;
  bool cuts;

  static __device__ __forceinline__ int rows(int n) { return (n + Tiles::ROWS - 1) / Tiles::ROWS; }

  // By one warp. Each end is used as if it were at least the one before it, and at most the tokens. Behind the last
  // group, whether not each has tokens for one tile across, as is assumed before the table is known.
  template <class P> static __device__ __forceinline__ void tell(const P& p, int2* table) {
    const int* ends = reinterpret_cast<const int*>(p.a_scale);  // `offsets` are the counters of parts
    const int lane = threadIdx.x % 32, of_group = rows(p.product.n);
    int row = 0, tile = 0;
    bool assumed = true;
#pragma unroll 1
    for (int first = 0; first < p.product.batch; first += 32) {
      const int group = first + lane;
      int end = group < p.product.batch ? max(min(ends[group], p.product.m), row) : 0;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) end = max(end, __shfl_sync(~0u, end, max(lane - d, 0)));
      const int above = __shfl_sync(~0u, end, max(lane - 1, 0));
      int count = (end - (lane ? above : row) + Tiles::TOKENS - 1) / Tiles::TOKENS * of_group;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int left = __shfl_sync(~0u, count, max(lane - d, 0));
        if (lane >= d) count += left;
      }
      count += tile;
      if (group < p.product.batch) {
        table[group] = make_int2(count, end);
        assumed &= count == (group + 1) * of_group;
      }
      row = __shfl_sync(~0u, end, 31);
      tile = __shfl_sync(~0u, count, 31);
    }
    assumed = __all_sync(~0u, assumed);
    if (lane == 0) table[p.product.batch].x = !assumed;
  }

  template <class P>
  __device__ __forceinline__ Experts(const P& p, const int2* table)
      : table(table), groups(p.product.batch), of_group(rows(p.product.n)), blocks(gridDim.x) {
    steps = (p.product.k + Tiles::STEP - 1) / Tiles::STEP;
    tiles = table ? table[groups - 1].x : groups * of_group;
    const int idle = ((tiles + blocks - 1) / blocks * blocks - tiles) * steps;
    cuts = !p.band && idle > tiles * steps / 10 + blocks * CUT;
    // Runs that end with a tile, where few blocks have none then: 64 tiles have 128 of 132.
    if (cuts && tiles && blocks % tiles * 16 < blocks) blocks -= blocks % tiles;
    const int units = cuts ? tiles * steps : tiles;
    run = units / blocks;
    more = units % blocks;
    set(begin_of(blockIdx.x), begin_of(blockIdx.x + 1));
  }
  __device__ __forceinline__ SharedSpot at(int tile) const {
    if (tile >= tiles) return {0, 0, 0, 0};
    if (!table) return {tile / of_group, tile % of_group * Tiles::PARTS, 0, 0};
    int low = 0, high = groups - 1;  // the first group whose tiles go beyond this one
    while (low < high) {
      const int middle = (low + high) / 2;
      if (table[middle].x > tile) high = middle; else low = middle + 1;
    }
    const int2 before = low ? table[low - 1] : make_int2(0, 0);
    const int within = tile - before.x, last = table[low].y;
    const int across = (last - before.y + Tiles::TOKENS - 1) / Tiles::TOKENS;
    return {low, within / across * Tiles::PARTS, before.y + within % across * Tiles::TOKENS, last};
  }
  __device__ __forceinline__ int begin_of(int block) const {
    return (min(block, blocks) * run + min(block, more)) * (cuts ? 1 : steps);
  }
  __device__ __forceinline__ int block_of(int step) const {
    int of_longer = more * (run + 1);
    return step < of_longer ? step / (run + 1) : more + (step - of_longer) / run;
  }
  __device__ __forceinline__ int first_block(int tile) const { return block_of(tile * steps); }
  __device__ __forceinline__ int last_block(int tile) const { return block_of((tile + 1) * steps - 1); }
  __device__ __forceinline__ bool second_of(int block, int tile) const { return begin_of(block) < tile * steps; }
};
