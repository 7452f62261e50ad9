// Low-rank adapters (Hu et al., arXiv:2106.09685) in device memory, and which rows of a step go through which of them.
//
// Rows that go through the same adapters are taken together, in tiles: an adapter's factors are read once per tile
// (Punica's SGMV, arXiv:2310.18547). Kernels find all that here, so a launch is the same whatever adapters there are.
#pragma once
#include "portable.cuh"

// A step: `few` tiles of at most FEW_ROWS rows with decode numerics, behind them `many` of at most MANY_ROWS rows with
// prefill numerics. What tiles name lies somewhere behind them; positions count four bytes from the beginning.
struct AdapterStep {
  int few;
  int many;
  int unused[2];
};

// rows: so many row numbers from first_row on, and from first_weight on so many times a weight per entry. entries: from
// first_entry on. Hidden numbers of row i begin at first_hidden + i * hidden_stride.
struct AdapterTile {
  int rows;
  int first_row;
  int entries;
  int first_entry;
  int first_weight;
  int first_hidden;
  int hidden_stride;
  int unused;
};

// An adapter of all rows of a tile; `first`: which of a row's hidden numbers are its own.
struct AdapterEntry {
  const void* adapter;
  int first;
  int unused;
};

// The beginning of an adapter; then its places, then its segments. item_bytes: of a number of a factor, 2 or 4.
struct AdapterHeader {
  int item_bytes;
  int places;
  int unused[2];
};

// a: [ranks][columns, a multiple of 32], 16 * a bytes behind the header. Ranks of a segment are a multiple of four.
// What only fills up is zero.
struct AdapterPlace {
  int a;
  int ranks;
  int first_segment;
  int segments;
};

// What is added to columns [first, end) of a product, first being even. b: [ranks / 4][pairs of columns][2][4 ranks].
struct AdapterSegment {
  int first;
  int end;
  int b;
  int first_rank;
  int ranks;
  int unused[3];
};

constexpr int FEW_ROWS = 4, MANY_ROWS = 16, MOST_PARTS = 4;

template <class T>
__device__ __forceinline__ const T& at_position(const int* step, int position) {
  return *reinterpret_cast<const T*>(step + position);
}

__device__ __forceinline__ const AdapterTile& tile_of(const int* step, int number) {
  return reinterpret_cast<const AdapterTile*>(step + sizeof(AdapterStep) / sizeof(int))[number];
}

struct AdapterReader {
  const char* memory;

  __device__ __forceinline__ explicit AdapterReader(const AdapterEntry& entry)
      : memory(static_cast<const char*>(entry.adapter)) {}
  __device__ __forceinline__ const AdapterHeader& header() const {
    return *reinterpret_cast<const AdapterHeader*>(memory);
  }
  __device__ __forceinline__ const AdapterPlace& place(int number) const {
    return reinterpret_cast<const AdapterPlace*>(memory + sizeof(AdapterHeader))[number];
  }
  __device__ __forceinline__ const AdapterSegment& segment(int number) const {
    const char* places = memory + sizeof(AdapterHeader) + sizeof(AdapterPlace) * header().places;
    return reinterpret_cast<const AdapterSegment*>(places)[number];
  }
  template <class T>
  __device__ __forceinline__ const T* factor(int position) const {
    return reinterpret_cast<const T*>(memory + 16ll * position);
  }
};

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
