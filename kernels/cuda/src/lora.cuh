// Low-rank adapters (Hu et al., arXiv:2106.09685) in device memory, and the rows of a step that use each adapter.
//
// Rows that use the same adapters are processed together, in tiles: an adapter's factors are read once per tile
// (Punica's SGMV, arXiv:2310.18547). Kernels read all of this information from these structs, so that a launch does not
// depend on the adapters.
#pragma once
#include "portable.cuh"

// A step: `few` tiles of at most DECODE_TILE_ROWS rows with decode numerics, then `many` tiles of at most
// PREFILL_TILE_ROWS rows with prefill numerics. The data that tiles refer to is stored after the tiles. Positions count
// units of four bytes from the beginning.
struct AdapterStep {
  int few;
  int many;
  int unused[2];
};

// Rows that use the same adapters. The first row and the first adapter are stored directly in this struct: one row with
// one adapter is the usual case in decoding, and every address that must be read first costs as much as a launch. rows:
// number of `AdapterRow`s, starting at first_row. entries: number of `AdapterEntry`s, starting at first_entry. The
// hidden values of row i start at first_hidden + i * hidden_stride.
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

// weights: position of the first of its weights, one float per entry.
struct AdapterRow {
  int row;
  int weights;
};

// An adapter of all rows of a tile. `first`: index of its first value in the hidden values of a row.
struct AdapterEntry {
  const void* adapter;
  int first;
  int unused;
};

// The addend of columns [first, end) of a matmul, where first is even. b: [ranks / 4][pairs of columns][2][4 ranks],
// given as an offset from the adapter's beginning in units of 16 bytes. Ranks are a multiple of four; padding is zero.
struct AdapterSegment {
  int first;
  int end;
  int b;
  int first_rank;
  int ranks;
  int unused[3];
};

// An adapter starts with its targets. a: [ranks of all segments][columns, a multiple of 32]; item_bytes: bytes of a
// number of a factor, 2 or 4. segments: the first segment is stored here, and others at `more`, which is an offset like
// `a` and `b`.
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

// Read the tile of few rows with an index; return false if the step has fewer tiles. The tile is read before the number
// of tiles is known (there is memory up to last_tile), so that both reads are in flight at the same time.
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

// A row of a tile. Past the last row, the last row is repeated.
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

// Eight numbers of a factor: 16 bytes of halves, or 32 bytes of floats.
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
