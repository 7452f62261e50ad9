// Low-rank adapters (Hu et al., arXiv:2106.09685) in device memory, and which rows of a step go through which of them.
//
// Rows that go through the same adapters are taken together, in tiles: an adapter's factors are read once per tile
// (Punica's SGMV, arXiv:2310.18547). Kernels find all that here, so a launch is the same whatever adapters there are.
#pragma once
#include "portable.cuh"

// A step: `few` tiles of at most DECODE_TILE_ROWS rows with decode numerics, behind them `many` of at most PREFILL_TILE_ROWS rows with
// prefill numerics. What tiles name lies somewhere behind them; positions count four bytes from the beginning.
struct AdapterStep {
  int few;
  int many;
  int unused[2];
};

// Rows that go through the same adapters. The first row and the first adapter stand here themselves: one row with one
// adapter is the usual case while decoding, and every address that has to be read first costs what a launch costs.
// rows: so many `AdapterRow`s from first_row on. entries: so many `AdapterEntry`s from first_entry on. Hidden numbers of
// row i begin at first_hidden + i * hidden_stride.
struct AdapterTile {
  const void* adapter;
  int row;
  int rows;
  int first_row;
  int entries;
  int first_entry;
  int weights;
  int first_hidden;
  int hidden_stride;
  int unused[2];
};

// weights: position of the first of its weights, a float per entry.
struct AdapterRow {
  int row;
  int weights;
};

// An adapter of all rows of a tile; `first`: which of a row's hidden numbers are its own.
struct AdapterEntry {
  const void* adapter;
  int first;
  int unused;
};

// What is added to columns [first, end) of a product, first being even. b: [ranks / 4][pairs of columns][2][4 ranks], so
// many times 16 bytes behind the adapter's beginning. Ranks are a multiple of four; what only fills up is zero.
struct AdapterSegment {
  int first;
  int end;
  int b;
  int first_rank;
  int ranks;
  int unused[3];
};

// An adapter begins with its targets. a: [ranks of all segments][columns, a multiple of 32]; item_bytes: of a number of a
// factor, 2 or 4. segments: one stands here, others at `more`, which counts as `a` and `b` do.
struct AdapterTarget {
  int a;
  int ranks;
  int item_bytes;
  int segments;
  int more;
  int unused[3];
  AdapterSegment segment;
};

constexpr int DECODE_TILE_ROWS = 4, PREFILL_TILE_ROWS = 16, MOST_PARTS = 4;

template <class T>
__device__ __forceinline__ const T& at_position(const int* step, int position) {
  return *reinterpret_cast<const T*>(step + position);
}

__device__ __forceinline__ const AdapterTile& tile_of(const int* step, int number) {
  return (&at_position<AdapterTile>(step, sizeof(AdapterStep) / sizeof(int)))[number];
}

// The tile of few rows with a number; false: the step has fewer. It is read before that is known (there is memory for
// last_tile of them), so that both are under way at once.
__device__ __forceinline__ bool few_tile(const int* step, int number, int last_tile, AdapterTile& tile) {
  tile = tile_of(step, min(number, last_tile));
  return (number < at_position<AdapterStep>(step, 0).few) & (tile.rows > 0);
}

__device__ __forceinline__ bool many_tile(const int* step, int number, AdapterTile& tile) {
  const AdapterStep& all = at_position<AdapterStep>(step, 0);
  if (number >= all.many) return false;
  tile = tile_of(step, all.few + number);
  return true;
}

// A row of a tile; behind the last one the last one again.
__device__ __forceinline__ AdapterRow row_of_tile(const int* step, const AdapterTile& tile, int row) {
  row = min(row, tile.rows - 1);
  return row == 0 ? AdapterRow{tile.row, tile.weights} : (&at_position<AdapterRow>(step, tile.first_row))[row];
}

__device__ __forceinline__ AdapterEntry entry_of(const int* step, const AdapterTile& tile, int entry) {
  return entry == 0 ? AdapterEntry{tile.adapter, 0, 0} : (&at_position<AdapterEntry>(step, tile.first_entry))[entry];
}

__device__ __forceinline__ const AdapterTarget& target_of(const void* adapter, int target) {
  return static_cast<const AdapterTarget*>(adapter)[target];
}

template <class T>
__device__ __forceinline__ const T* factor_of(const void* adapter, int position) {
  return reinterpret_cast<const T*>(static_cast<const char*>(adapter) + 16ll * position);
}

// Eight numbers of a factor: 16 bytes, or twice as many.
__device__ __forceinline__ void load_eight(const float* source, float (&numbers)[8]) {
  const float4 low = reinterpret_cast<const float4*>(source)[0], high = reinterpret_cast<const float4*>(source)[1];
  numbers[0] = low.x, numbers[1] = low.y, numbers[2] = low.z, numbers[3] = low.w;
  numbers[4] = high.x, numbers[5] = high.y, numbers[6] = high.z, numbers[7] = high.w;
}

__device__ __forceinline__ void load_eight(const half_bits* source, float (&numbers)[8]) {
  const uint4 all = *reinterpret_cast<const uint4*>(source);
  const unsigned words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    numbers[2 * i] = to_float(half_bits{(unsigned short)(words[i] & 0xffffu)});
    numbers[2 * i + 1] = to_float(half_bits{(unsigned short)(words[i] >> 16)});
  }
}
