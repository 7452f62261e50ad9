// hidden = weight * (x @ A.T) for the rows of tiles, at up to four targets that read the same x.
//
// The order of the sums of a row depends only on the number of columns, so that a row's hidden values do not depend on
// the other rows of its tile.
#include "lora.cuh"

// hidden, targets: one per part, blockIdx.z. aligned: true if rows of x start at multiples of 16 bytes.
struct ShrinkArguments {
  const float* x;
  const int* step;
  float* hidden[4];
  long long x_stride;
  int targets[4];
  int columns;
  int aligned;
  int last_tile;
};

// The work of a block: ranks [rank, rank + ranks of a block) of an adapter at a target.
struct ShrinkSpan {
  AdapterTile tile;
  const void* adapter;
  int entry;
  int first_hidden;
  int a;
  int item_bytes;
  int ranks;
  int rank;

  // Find the block-th part of `at_once` ranks, over all adapters of the tile one after another; return false if there
  // is none.
  __device__ __forceinline__ bool find(const int* step, int number, int block, int at_once) {
    for (entry = 0; entry < tile.entries; ++entry) {
      const AdapterEntry own = entry_of(step, tile, entry);
      const AdapterTarget& target = target_of(own.adapter, number);
      adapter = own.adapter, first_hidden = own.first;
      a = target.a, item_bytes = target.item_bytes, ranks = target.ranks, rank = block * at_once;
      if (rank < ranks) return true;
      block -= (ranks + at_once - 1) / at_once;
    }
    return false;
  }
};

// Columns [column, column + 8) of a row of x; columns past the last one are zero.
__device__ __forceinline__ void load_columns(const ShrinkArguments& given, const float* row, int column, float (&x)[8]) {
  if (given.aligned && column + 8 <= given.columns) {
    load_eight(row + column, x);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = column + i < given.columns ? row[column + i] : 0.0f;
}

__device__ __forceinline__ void write_hidden(
    const ShrinkArguments& given, const ShrinkSpan& at, int row, int rank, float sum) {
  const float weight = at_position<float>(given.step, row_of_tile(given.step, at.tile, row).weights + at.entry);
  float* hidden = given.hidden[blockIdx.z] + at.tile.first_hidden + (long long)row * at.tile.hidden_stride;
  hidden[at.first_hidden + rank] = weight * sum;
}

__device__ __forceinline__ const float* row_of(const ShrinkArguments& given, const AdapterTile& tile, int row) {
  return given.x + row_of_tile(given.step, tile, row).row * given.x_stride;
}

// --- few rows: speed requires many bytes of A in flight ---------------------------------------------------

// A block computes four ranks of a tile, so that x is read once for four rows of A. A thread has eight columns of every
// 2,048: the data of a row of A that a warp reads with one instruction is contiguous. All rows of a tile have at most
// 16 sums.
constexpr int SHRINK_WARPS = 8, SHRINK_THREADS = SHRINK_WARPS * WARP, SHRINK_RANKS = 4;

// The sums of each of `count` numbers over a warp: lane l gets that of number l / (32 / count). Lanes are added in the
// same order for every `count`.
template <int count>
__device__ __forceinline__ float warp_sums(float (&x)[count]) {
#pragma unroll
  for (int distance = WARP / 2; distance; distance /= 2) {
    const int kept = count * distance / WARP;
    if (kept == 0) x[0] += __shfl_xor_sync(ALL_LANES, x[0], distance);
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < count / 2; ++i)
      if (i < kept) {
        const float mine = upper ? x[i + kept] : x[i], other = upper ? x[i] : x[i + kept];
        x[i] = mine + __shfl_xor_sync(ALL_LANES, other, distance);
      }
  }
  return x[0];
}

template <class T, int rows>
__device__ __forceinline__ void shrink_rows(const ShrinkArguments& given, const ShrinkSpan& at) {
  constexpr int COUNT = SHRINK_RANKS * rows, UNROLLED = rows == 1 ? 2 : 1;
  SHARED(float, parts, SHRINK_WARPS * COUNT);
  const int padded = (given.columns + 31) / 32 * 32;
  const T* a = factor_of<T>(at.adapter, at.a) + (long long)at.rank * padded;
  const float* x[rows];
#pragma unroll
  for (int row = 0; row < rows; ++row) x[row] = row_of(given, at.tile, row);
  float sums[COUNT] = {};
#pragma unroll UNROLLED
  for (int column = 8 * threadIdx.x; column < given.columns; column += 8 * SHRINK_THREADS) {
    float factors[SHRINK_RANKS][8];
#pragma unroll
    for (int rank = 0; rank < SHRINK_RANKS; ++rank) load_eight(a + (long long)rank * padded + column, factors[rank]);
#pragma unroll
    for (int row = 0; row < rows; ++row) {
      float own[8];
      load_columns(given, x[row], column, own);
#pragma unroll
      for (int rank = 0; rank < SHRINK_RANKS; ++rank)
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[row * SHRINK_RANKS + rank] = fmaf(own[i], factors[rank][i], sums[row * SHRINK_RANKS + rank]);
    }
  }
  const float sum = warp_sums<COUNT>(sums);
  constexpr int LANES_EACH = WARP / COUNT;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  if (lane % LANES_EACH == 0) parts[warp * COUNT + lane / LANES_EACH] = sum;
  __syncthreads();
  const int row = threadIdx.x / SHRINK_RANKS, rank = threadIdx.x % SHRINK_RANKS;
  if (row >= min(rows, at.tile.rows)) return;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < SHRINK_WARPS; ++i) total += parts[i * COUNT + threadIdx.x];
  write_hidden(given, at, row, at.rank + rank, total);
}

template <class T>
__device__ __forceinline__ void shrink_tile(const ShrinkArguments& given, const ShrinkSpan& at) {
  if (at.tile.rows == 1) shrink_rows<T, 1>(given, at);
  else shrink_rows<T, DECODE_TILE_ROWS>(given, at);
}

// Grid (blocks of ranks, tiles, parts), with at least as many as there are.
__device__ __forceinline__ void shrink_few(const ShrinkArguments& given) {
  ShrinkSpan at;
  if (!few_tile(given.step, blockIdx.y, given.last_tile, at.tile)) return;
  if (!at.find(given.step, given.targets[blockIdx.z], blockIdx.x, SHRINK_RANKS)) return;
  if (at.item_bytes == 2) shrink_tile<half_bits>(given, at);
  else shrink_tile<float>(given, at);
}

// --- many rows, by tensor cores -------------------------------------------------------------------------------------

// A block computes 16 rows by 32 ranks. Each number is split into two bfloat16 parts, which together hold 16 bits of
// the number, and all four products of the parts are added: the loss is as small as the loss of float32 in long sums. A
// warp has 32 columns of every 256, and a lane has eight adjacent columns of a row. The position of a column in a
// tensor core tile does not matter as long as both operands agree, so x and A are loaded 16 bytes at a time, without
// rearrangement.
constexpr int PREFILL_TILE_RANKS = 32, SLICE = 32, PART_STRIDE = 40;

// Pairs of eight numbers as bfloat16, and pairs of the remainders.
__device__ __forceinline__ void split(const float (&numbers)[8], unsigned (&rounded)[4], unsigned (&rest)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = numbers[2 * i], high = numbers[2 * i + 1];
    rounded[i] = bfloat_pair(low, high);
    rest[i] = bfloat_pair(low - __uint_as_float(rounded[i] << 16), high - __uint_as_float(rounded[i] & 0xffff0000u));
  }
}

template <class T>
__device__ __forceinline__ void shrink_slices(
    const ShrinkArguments& given, const ShrinkSpan& at, float (&sums)[PREFILL_TILE_RANKS / 8][4]) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4, lane_in_group = lane % 4;
  const int padded = (given.columns + 31) / 32 * 32, left = at.ranks - at.rank;
  const T* a = factor_of<T>(at.adapter, at.a) + (long long)at.rank * padded;
  const float *upper = row_of(given, at.tile, group), *lower = row_of(given, at.tile, group + 8);
  for (int first = warp * SLICE; first < padded; first += SHRINK_WARPS * SLICE) {
    const int column = first + 8 * lane_in_group;
    float x[8];
    unsigned rounded[2][4], rest[2][4];
    load_columns(given, upper, column, x);
    split(x, rounded[0], rest[0]);
    load_columns(given, lower, column, x);
    split(x, rounded[1], rest[1]);
#pragma unroll
    for (int tile = 0; tile < PREFILL_TILE_RANKS / 8; ++tile) {
      if (tile * 8 >= left) break;
      float factors[8];
      unsigned main[4], more[4];
      load_eight(a + (long long)min(tile * 8 + group, left - 1) * padded + column, factors);
      split(factors, main, more);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned x_main[4] = {rounded[0][2 * half], rounded[1][2 * half], rounded[0][2 * half + 1], rounded[1][2 * half + 1]};
        const unsigned x_more[4] = {rest[0][2 * half], rest[1][2 * half], rest[0][2 * half + 1], rest[1][2 * half + 1]};
        const unsigned a_main[2] = {main[2 * half], main[2 * half + 1]}, a_more[2] = {more[2 * half], more[2 * half + 1]};
        multiply_tiles(sums[tile], x_more, a_more);
        multiply_tiles(sums[tile], x_more, a_main);
        multiply_tiles(sums[tile], x_main, a_more);
        multiply_tiles(sums[tile], x_main, a_main);
      }
    }
  }
}

// Grid (blocks of ranks, tiles, parts), with at least as many as there are.
__device__ __forceinline__ void shrink_many(const ShrinkArguments& given) {
  SHARED(float, parts, SHRINK_WARPS * PREFILL_TILE_ROWS * PART_STRIDE);
  ShrinkSpan at;
  if (!many_tile(given.step, blockIdx.y, at.tile)) return;
  if (!at.find(given.step, given.targets[blockIdx.z], blockIdx.x, PREFILL_TILE_RANKS)) return;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4, lane_in_group = lane % 4;
  float sums[PREFILL_TILE_RANKS / 8][4] = {};
  if (at.item_bytes == 2) shrink_slices<half_bits>(given, at, sums);
  else shrink_slices<float>(given, at, sums);
  // Rows of sums are 160 bytes apart, so that the pairs that half a warp writes lie in different banks.
#pragma unroll
  for (int tile = 0; tile < PREFILL_TILE_RANKS / 8; ++tile)
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float* own = parts + (warp * PREFILL_TILE_ROWS + group + 8 * row) * PART_STRIDE + 8 * tile + 2 * lane_in_group;
      *reinterpret_cast<float2*>(own) = float2{sums[tile][2 * row], sums[tile][2 * row + 1]};
    }
  __syncthreads();
  many_tile(given.step, blockIdx.y, at.tile);  // read again instead of kept in registers
  for (int i = threadIdx.x; i < PREFILL_TILE_ROWS * PREFILL_TILE_RANKS; i += SHRINK_THREADS) {
    const int row = i / PREFILL_TILE_RANKS, rank = i % PREFILL_TILE_RANKS;
    float total = 0.0f;
#pragma unroll
    for (int one = 0; one < SHRINK_WARPS; ++one) total += parts[(one * PREFILL_TILE_ROWS + row) * PART_STRIDE + rank];
    if (row < at.tile.rows && at.rank + rank < at.ranks) write_hidden(given, at, row, at.rank + rank, total);
  }
}
