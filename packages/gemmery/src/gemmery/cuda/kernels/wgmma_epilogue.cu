// Idea: C is written while the next tile is multiplied. Finished sums are rounded and packed, half as many registers,
// and leave during the first stages of the next tile, piece by piece: stmatrix to shared memory, and a tensor copy from
// there to C, by each warp for its own 16 rows. alpha, beta C, bias, factors of rows and columns and an activation are
// applied to the sums before that. The usual steps have images of their own, all others share one, for every shape.
// Parent: wgmma_cluster, which stores sums from registers while the tensor cores wait. Of 128 x 256 results of 32 bits,
// half has room beside the sums of the next tile; the other half is stored in front of it.
// Measured on an H200, bf16: 817 TFLOP/s at n = 4096 and 837 at 8192, 1.03 and 1.05 of cuBLAS in the same run.
#include "staged.cuh"
#include "wgmma_cluster.cu"

template <int EPILOGUE, class Tiles, class T, class Out, class Order, class Pipe>
__device__ __forceinline__ void consume(const TmaProduct<T, Out>& p, const Pipe& pipe, Order& order, int steps,
                                        char* shared) {
  using P = Pieces<Tiles, Out, Order::GROUPED>;
  Consumer<Tiles> consumer(pipe);
  const int warp = threadIdx.x / 32 - 4;
  Staging<P> staging(pipe.ring + Tiles::RING, warp);
  auto is_narrow = [&] {
    if constexpr (Tiles::NARROWER > 0) return order.narrow; else return false;
  };
  auto place = [&] {
    const int mark = is_narrow() && warp / 4 == 1;
    int row = order.tile.row + Tiles::row_of(warp / 4) + warp % 4 * 16;
    if constexpr (Order::OVERLAPS) {
      if (row < order.own) row = p.product.m;  // another tile's: beyond the edge, nothing is stored
    }
    const int column = order.tile.col + Tiles::column_of(warp / 4) + mark;
    if constexpr (Tiles::SWAPPED) return Where{order.tile.batch, row, column, order.own_column};
    return Where{order.tile.batch, row, column};
  };
  // The bias in shared memory, of which a thread has every fourth four, or pair.
  constexpr bool NEAR_BIAS = (EPILOGUE & BIAS) && !(EPILOGUE & ASKED) && !Tiles::SWAPPED;  // SWAPPED: a bias of rows
  // Or the factors of the columns. Those of the rows are loaded while the last products run.
  constexpr bool HAS_ROOM = Tiles::WARPGROUPS * Tiles::WN * 4 <= BIAS_BYTES;
  constexpr bool FACTORED = (EPILOGUE & FACTORS) && Tiles::NARROWER == 0 && HAS_ROOM;
  constexpr bool NEAR = NEAR_BIAS || FACTORED;
  const int bias_at = Tiles::RING + P::STAGING + warp / 4 * Tiles::WN * 4;
  static_assert(Tiles::WN % 16 == 0 || !NEAR_BIAS, "fours of 16 columns");
  // For gelu, 1/8 of it is loaded while the last products run, so that work is at hand when they end: with that
  // and fours, ptxas has a warp issue its part in 1282 cycles in place of 1342. Loading more slows the last products.
  constexpr bool LOADED = NEAR_BIAS && HALVED<EPILOGUE> && P::SUMS + Tiles::WN / 4 <= 192;
  // The largest sums leave no registers for it, nor for fours: with these NVRTC 13.0 spills some.
  constexpr int LOAD = FACTORED || (HALVED<EPILOGUE> && !LOADED) ? 2 : 4;
  auto bias = reinterpret_cast<const Chunk<float, LOAD>*>(shared + bias_at) + threadIdx.x % 4;
  Chunk<float, 4> loaded[LOADED ? Tiles::WN / 16 : 1];
  auto load_bias = [&](bool early) {
#pragma unroll
    for (int i = 0; i < (LOADED ? Tiles::WN / 16 : 0); ++i) {
      if constexpr (LOADED) {
        if ((i % 8 == 7) == early) loaded[i] = bias[i * 4];
      }
    }
  };
  float of_rows[FACTORED ? Tiles::BLOCKS : 1][2];
  // Operands of a function that the ring has brought, and their stages.
  constexpr int HELD = CARRIED<EPILOGUE, Tiles>, OPERAND_STAGES = stages_of_operands<Tiles>(HELD);
  int stage_of[HELD > 0 ? OPERAND_STAGES : 1];
  auto wait_for_operands = [&] {
#pragma unroll
    for (int i = 0; i < OPERAND_STAGES; ++i) {
      stage_of[i] = consumer.now.stage;
      ptx::mbarrier_try_wait_parity(consumer.full + 8 * consumer.now.stage, consumer.now.parity);
      consumer.now.next();
    }
  };
  constexpr bool STAGED = (EPILOGUE & TRACED) && Function::STAGED;
  auto store = [&](const typename P::Part(&part)[P::EACH], int piece, Where at) {
    staging.template store<Tiles>(part, piece, p, at, shared, pipe.ring);
  };
  auto pack_piece = [&](typename P::Part(&part)[P::EACH], int piece, Where at) {
    typename P::Part more[STAGED ? P::EACH : 1];
    Where of_piece = {at.batch, at.row + P::row(piece), at.column + P::column(piece)};
    if (P::SWAPPED && of_piece.column < at.own) of_piece.column = p.product.n;  // another tile's: C is not read
    if constexpr (LOADED) {
      pack<EPILOGUE, P, 1>(part, consumer, piece, p, of_piece, loaded + P::column(piece) / 16);
    } else if constexpr (HELD > 0) {
      unsigned held[HELD][P::COLUMNS / 4];
      __syncwarp();  // else ptxas loads a row for several pieces at a time, and spills
      load_carried<P, Tiles>(held, pipe.ring, stage_of, Tiles::row_of(warp / 4) + warp % 4 * 16, piece);
      pack<EPILOGUE, P, 0, LOAD, HELD>(part, consumer, piece, p, of_piece, bias, of_rows[0], held, more);
#pragma unroll
      for (int i = 0; i < OPERAND_STAGES; ++i) {
        if (last_piece<P, Tiles>(i, HELD) != piece) continue;
        ptx::bar_sync(2 + warp / 4, 128);  // one thread hands a stage back: all have read it
        consumer.release(stage_of[i]);
      }
    } else {
      const float* factors = of_rows[FACTORED ? piece / P::ACROSS : 0];
      pack<EPILOGUE, P, NEAR ? 4 : 0>(part, consumer, piece, p, of_piece, bias + P::column(piece) / LOAD, factors,
                                      nullptr, more);
    }
    if constexpr (STAGED) staging.template store<Tiles, true>(more, piece, p, at, shared, pipe.ring);
  };
  typename P::Part staying[P::KEPT][P::EACH];
  Where before = {};
  bool pending = false;
  // Whether the last step has 32 bytes of k at most, one product.
  auto is_brief = [&](int k) { return unsigned(k * int(sizeof(T)) % 128 - 1) < 32 && steps > P::STEPS; };
  bool brief = is_brief(p.product.k);
  // The next tile is found while this one is multiplied, unless the place of this one has no registers until then.
  constexpr bool AHEAD = Tiles::BM != 192 && (!P::PACKED || P::STAYING % P::COUNT == 0);
  constexpr bool FORKS = Tiles::NARROWER > 0 || Tiles::APART;  // some tiles are multiplied by loops of their own
  while (order.more()) {
    bool late = false;
    if constexpr (Tiles::APART) {
      const int depth = depth_of<Tiles>(p, order.tile);
      steps = steps_of<Tiles>(depth, P::STEPS).steps;
      brief = is_brief(depth);
      late = Tiles::is_late(p, order.tile);
    }
    if constexpr (Tiles::RAGGED) {
      steps = max(order.steps, P::STEPS);
      brief = false;
      consumer.low = order.low;
      consumer.high = order.high;
    }
    Where at = {};
    if (AHEAD) at = place();
    bool passes = order.passes(warp / 4);
    if (AHEAD) order.next();
    if (passes) {
      consumer.pass_tile(steps);
      continue;
    }
    auto bring = [&] {
      ptx::bar_sync(2 + warp / 4, 128);  // all have read that of the tile before
      if (!AHEAD) order.find();
      const Where here = AHEAD ? at : place();
      if constexpr (FACTORED) {
        bring_factors<P, Tiles::WN>(pipe.ring + bias_at, p, here);
      } else {
        bring_bias<P, Tiles::WN, LOAD>(pipe.ring + bias_at, p, here);
      }
    };
    auto multiply = [&](auto is_late) {
      constexpr bool LATE = decltype(is_late)::value;
#pragma unroll
      for (int i = 0; i < P::STEPS; ++i) {
        consumer.template multiply_stage<Tiles::PRODUCTS, Tiles::WN, LATE>(i == 0);
        constexpr int MORE = LATE && P::STAYING > P::BESIDE_A ? P::STAYING - P::BESIDE_A : 0;
#pragma unroll
        for (int piece = i == 0 ? 0 : i * P::IN_STEP + MORE; piece < (i + 1) * P::IN_STEP + MORE; ++piece) {
          if (piece < P::STAYING && pending) store(staying[piece], P::LEAVING + piece, before);
        }
        consumer.next_stage();
      }
      // After the steps that store pieces: in the last of them, n = 8192 took longer.
      if (NEAR && steps - brief == P::STEPS) bring();
      auto multiply_rest = [&](auto columns) {
        constexpr int COLUMNS = decltype(columns)::value;
#pragma unroll 1
        for (int step = P::STEPS; step < steps - brief; ++step) {
          consumer.template multiply_stage<Tiles::PRODUCTS, COLUMNS, LATE>(false);
          if (NEAR && step == P::STEPS) bring();
          consumer.next_stage();
        }
        if (brief) {
          consumer.template multiply_stage<1, COLUMNS, LATE>(false);
          consumer.next_stage();
        }
      };
      if (is_narrow() && pipe.warpgroup == 2) {  // sums beyond, of the steps before, are not used
        multiply_rest(Constant<Tiles::WN - Tiles::NARROWER>{});
        consumer.finish();
      } else {
        multiply_rest(Constant<Tiles::WN>{});
        if (FORKS) consumer.finish();  // where the paths meet, no product is under way
      }
    };
    if constexpr (Tiles::APART) {
      if (late) multiply(Constant<true>{}); else multiply(Constant<false>{});
    } else {
      multiply(Constant<false>{});
    }
    auto wait_for_bias = [&] {
      ptx::cp_async_wait_group<0>();
      float* near = reinterpret_cast<float*>(shared + bias_at);
      if constexpr (FACTORED) complete_factors(near, Tiles::WN, p);
      if constexpr (NEAR_BIAS && HALVED<EPILOGUE>) halve_bias<LOAD>(near, Tiles::WN);
      ptx::bar_sync(2 + warp / 4, 128);
    };
    constexpr bool EARLY = FACTORED || HALVED<EPILOGUE>;
    if constexpr (NEAR && EARLY) wait_for_bias();  // while the last products run
    if constexpr (FACTORED && AHEAD) load_row_factors<P::GROUPED>(of_rows, p, at);
    load_bias(true);
    if (!FORKS) consumer.finish();
    wait_for_operands();
    if (!AHEAD) {
      order.find();
      at = place();
    }
    if constexpr (FACTORED && !AHEAD) load_row_factors<P::GROUPED>(of_rows, p, at);
    if constexpr (NEAR_BIAS) {
      if constexpr (!EARLY) wait_for_bias();  // earlier, n = 8192 would take longer
      if (!biases_columns<P::GROUPED>(p)) {
#pragma unroll
        for (int block = 0; block < Tiles::BLOCKS; ++block) {
          add_row_bias(consumer.sums[block], p, {at.batch, at.row + block * 64, at.column});
        }
      }
    }
    load_bias(false);
#pragma unroll
    for (int piece = 0; piece < P::LEAVING; ++piece) {
      typename P::Part part[P::EACH];
      pack_piece(part, piece, at);
      store(part, piece, at);
    }
#pragma unroll
    for (int i = 0; i < P::STAYING; ++i) pack_piece(staying[i], P::LEAVING + i, at);
    before = at;
    pending = true;
    if (!AHEAD) order.next();
  }
  // A large tile takes so long to store that the next launch would begin too early in front of it.
  constexpr bool LARGE = Tiles::BM * Tiles::BN >= 128 * 128;
  const bool lets = Order::LAST && !Pipe::lets_next_begin(p);
  if (!LARGE && lets) ptx::griddepcontrol_launch_dependents();
  if (pending) {
#pragma unroll
    for (int i = 0; i < P::STAYING; ++i) store(staying[i], P::LEAVING + i, before);
  }
  if (LARGE && lets) ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<0>();
}

// Asks L2 for a tile's operands, by one thread, while the launches before still run: L2 sees what they write. Only of a
// short k, which the ring holds whole: of a longer one, the copies would wait behind these requests. And only where the
// launch before leaves room: else blocks begin when its own end, and there is no time for it.
template <class Tiles, class P, class Place>
__device__ __forceinline__ void prefetch_short(const P& p, const Place& place, Tile tile, Steps k) {
  if (k.steps > Tiles::STAGES || gridDim.x > HALF_OF_ALL) return;
#pragma unroll 1
  for (int step = k.first; step < k.first + k.steps; ++step) {
    prefetch<Tiles::A_K_MAJOR, Tiles::BM, Tiles::CN>(p.a, step * Tiles::BK, tile.row,
                                                     p.product.a_batch ? tile.batch : 0, place.n);
    prefetch<Tiles::B_K_MAJOR, Tiles::WIDE, Tiles::CM>(p.b, step * Tiles::BK, tile.col,
                                                       p.product.b_batch ? tile.batch : 0, place.m);
    if constexpr (Tiles::MATRICES == 2) {
      prefetch<Tiles::B_K_MAJOR, Tiles::WIDE, 1>(operands_of(p).second, step * Tiles::BK, tile.col, 0, 0);
    }
  }
}

// Asks L2 for the first lines of the columns of B of a block's first tile, by the threads that multiply, while the
// launches before still run: memory would be idle until the first copy. For few rows, whose B comes from memory, and a
// k that the ring does not hold. Blocks that share columns ask for every CM-th each.
template <class Tiles, class P> __device__ __forceinline__ void ask_ahead(const P& p) {
  constexpr int THREADS = Tiles::WARPGROUPS * 128;
  const Cluster<Tiles::CM, Tiles::CN> place;
  const Tile tile = Bands<Tiles, true>(p, place).tile;
  const int columns = min(Tiles::WIDE, p.product.n - tile.col);
#pragma unroll 1
  for (int i = place.m * THREADS + threadIdx.x - 128; i < Tiles::BN * p.ahead; i += Tiles::CM * THREADS) {
    const int column = i % Tiles::WIDE, k = i / Tiles::BN * Tiles::BK;
    if (column >= columns) continue;
    auto from = reinterpret_cast<const char*>(p.product.b_at(tile.batch, k, tile.col + column));
    if constexpr (Tiles::MATRICES == 2) from += i % Tiles::BN / Tiles::WIDE * operands_of(p).second_apart;
    ptx::prefetch_global_L2(from);
  }
}

// Brings a tile's operands of a function behind its k.
template <int COUNT, class Tiles, class P>
__device__ __forceinline__ void bring_operands(Producer<Tiles>& producer, const P& p, Tile tile) {
  constexpr int BOXES = COUNT * BOXES_ACROSS<Tiles>;
  auto is_in = [](int box, int stage) {
    return place_of_box<Tiles>(box / BOXES_ACROSS<Tiles>, box % BOXES_ACROSS<Tiles>) / Tiles::STAGE == stage;
  };
  const int rows = min(Tiles::BM, p.product.m);
#pragma unroll
  for (int stage = 0; stage < stages_of_operands<Tiles>(COUNT); ++stage) {
    const unsigned to = producer.ring + producer.now.stage * Tiles::STAGE;
    const unsigned barrier = producer.full + 8 * producer.now.stage;
    int bytes = 0;
#pragma unroll
    for (int i = 0; i < BOXES; ++i) {
      if (is_in(i, stage)) bytes += 128 * (Function::is_row(i / BOXES_ACROSS<Tiles>) ? 1 : rows);
    }
    ptx::mbarrier_try_wait_parity(producer.empty + 8 * producer.now.stage, producer.now.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(barrier, bytes);
#pragma unroll
    for (int i = 0; i < BOXES; ++i) {
      const int which = i / BOXES_ACROSS<Tiles>, box = i % BOXES_ACROSS<Tiles>;
      if (!is_in(i, stage)) continue;
      ptx::cp_async_bulk_tensor_load(to + place_of_box<Tiles>(which, box) % Tiles::STAGE,
                                     Function::map(operands_of(p), which), tile.col + box * 64,
                                     Function::is_row(which) ? 0 : tile.row, 0, barrier);
    }
    producer.now.next();
  }
}

// A block's part of a product.
template <int EPILOGUE, class Tiles, class T, class Out>
__device__ __forceinline__ void product(const TmaProduct<T, Out>& p, char* shared) {
  using P = Pieces<Tiles, Out>;
  if constexpr (Tiles::B_K_MAJOR && Tiles::BM * Tiles::BN <= MOST_AHEAD) {
    if (p.ahead > 0 && threadIdx.x >= 128) ask_ahead<Tiles>(p);  // the ring is ready half a microsecond later
  }
  Pipeline<Tiles, P::BYTES> pipe(shared, p, Pipeline<Tiles>::lets_next_begin(p));
  Steps k = steps_of<Tiles>(p.product.k, P::STEPS);
  Bands<Tiles, true> order(p, pipe.place);
  if (threadIdx.x == 0) prefetch_short<Tiles>(p, pipe.place, order.tile, k);
  if (pipe.warpgroup == 0) {
    pipe.begin_producer();
    pipe.wait_for_launches_before();
    if (pipe.brings()) {
      Producer<Tiles> producer(pipe);
      for (; order.more(); order.next()) {
        if constexpr (Tiles::APART) k = steps_of<Tiles>(depth_of<Tiles>(p, order.tile), P::STEPS);
        producer.bring_tile(p, order.tile, k.first, k.steps);
        if constexpr (CARRIED<EPILOGUE, Tiles> > 0) bring_operands<CARRIED<EPILOGUE, Tiles>>(producer, p, order.tile);
      }
    }
  } else {
    pipe.begin_consumer(p);
    pipe.wait_for_launches_before();
    consume<EPILOGUE, Tiles>(p, pipe, order, k.steps, shared);
  }
  pipe.end();
}

template <class T, class Out, int EPILOGUE, class Tiles>
__global__ void __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    wgmma_epilogue(const __grid_constant__ Traced<TmaProduct<T, Out>> p) {
  extern __shared__ __align__(1024) char shared[];
  product<EPILOGUE, Tiles, T, Out>(p, shared);
}

template <class T, class Out, int EPILOGUE, class Tiles>
__global__ void __cluster_dims__(Tiles::CM * Tiles::CN, 1, 1) __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    wgmma_epilogue_cluster(const __grid_constant__ Traced<TmaProduct<T, Out>> p) {
  extern __shared__ __align__(1024) char shared[];
  product<EPILOGUE, Tiles, T, Out>(p, shared);
}
