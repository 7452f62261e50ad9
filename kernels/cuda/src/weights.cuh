// Matrices as they lie in device memory, and how a chunk of 32 columns of one row becomes numbers.
//
// Block-quantised rows keep the order in which models store them: codes of a row end to end, the lowest bits first, so
// a lane's 16 bytes are 32 columns of 4 bits, and neighbouring lanes read neighbouring bytes.
#pragma once
#include "portable.cuh"

constexpr int CHUNK = 32;

// `points`: zero points, a byte per block, or 0 = 2 ** (bits - 1) for all. blocks: per row.
struct BlockMatrix {
  const unsigned char* data;
  const void* scales;
  const unsigned char* points;
  int blocks;
  int block_size;
};

template <int bits, class Scale>
struct BlockReader {
  // Four columns a word (8 bits) or eight (4 bits).
  static constexpr int WORDS = CHUNK * bits / 32;

  const BlockMatrix& matrix;

  __device__ __forceinline__ const unsigned* words(long long row, int chunk) const {
    const long long chunks = (long long)matrix.blocks * (matrix.block_size / CHUNK);
    return reinterpret_cast<const unsigned*>(matrix.data) + (row * chunks + chunk) * WORDS;
  }

  __device__ __forceinline__ void read(long long row, int chunk, unsigned (&codes)[WORDS]) const {
    const uint4* source = reinterpret_cast<const uint4*>(words(row, chunk));
#pragma unroll
    for (int i = 0; i < WORDS / 4; ++i) {
      const uint4 four = source[i];
      codes[4 * i] = four.x, codes[4 * i + 1] = four.y, codes[4 * i + 2] = four.z, codes[4 * i + 3] = four.w;
    }
  }

  __device__ __forceinline__ long long block(long long row, int chunk) const {
    return row * matrix.blocks + chunk * CHUNK / matrix.block_size;
  }

  __device__ __forceinline__ float scale(long long row, int chunk) const {
    return to_float(static_cast<const Scale*>(matrix.scales)[block(row, chunk)]);
  }

  __device__ __forceinline__ int zero(long long row, int chunk) const {
    return matrix.points ? matrix.points[block(row, chunk)] : 1 << (bits - 1);
  }

  // Column `i` of a chunk, as an unsigned integer.
  __device__ __forceinline__ static unsigned code(const unsigned (&codes)[WORDS], int i) {
    constexpr int PER_WORD = 32 / bits;
    return codes[i / PER_WORD] >> (i % PER_WORD * bits) & ((1u << bits) - 1u);
  }
};
