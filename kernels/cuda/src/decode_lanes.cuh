// Products of one or two rows of activations with a matrix of few bits, both as bytes, by the lanes of warps: so few rows
// would leave most of a tensor core's work undone.
//
// Eight lanes share a row of the matrix: lane p takes chunks p, p + 8, p + 16 and so on in order; then the lanes are added
// in order. That is the order of decode_tiles.cuh, so bits are the same. A lane has several chunks under way all the time,
// and asks for the first ones before the kernels before have ended: what bounds these products is memory.
#pragma once
#include "groups.cuh"

constexpr int PHASES = 8, LANE_WARPS = 8, LANE_THREADS = LANE_WARPS * WARP, WARP_ROWS = WARP / PHASES;
constexpr int BLOCK_ROWS = LANE_WARPS * WARP_ROWS;

// Rows of activations in shared memory, as many chunks as fit: [tokens][2 halves][CHUNKS] of 16 bytes, so that lanes with
// neighbouring chunks read from different banks, and scales [tokens][CHUNKS].
template <int tokens>
struct RowSlab {
  static constexpr int CHUNKS = 512 / tokens;
  uint4* bytes;
  float2* scales;

  __device__ __forceinline__ void bring(const GroupedRows& x, int first_chunk) const {
    const int count = min(CHUNKS, x.chunks - first_chunk);
#pragma unroll
    for (int token = 0; token < tokens; ++token) {
      const long long first = (long long)first_chunk * GROUP + token;
      for (int i = threadIdx.x; i < 2 * count; i += LANE_THREADS)
        bytes[(2 * token + i % 2) * CHUNKS + i / 2] = static_cast<const uint4*>(x.bytes)[2 * (first + i / 2 * GROUP) + i % 2];
      for (int i = threadIdx.x; i < count; i += LANE_THREADS)
        scales[token * CHUNKS + i] = reinterpret_cast<const float2*>(x.scales)[first + i * GROUP];
    }
  }

  // A chunk's bytes in the order of its columns, and its scale.
  __device__ __forceinline__ float2 read(int token, int chunk, int (&found)[BYTE_WORDS]) const {
    const uint4 low = bytes[2 * token * CHUNKS + chunk], high = bytes[(2 * token + 1) * CHUNKS + chunk];
    found[0] = low.x, found[4] = low.y, found[1] = low.z, found[5] = low.w;
    found[2] = high.x, found[6] = high.y, found[3] = high.z, found[7] = high.w;
    return scales[token * CHUNKS + chunk];
  }
};

// The sums of a lane's rows: row_of(i) of matrix_of(i). All lanes that share a row get its sum.
template <class Reader, int count, int tokens, class MatrixOf, class RowOf>
__device__ __forceinline__ void decode_lanes(
    const GroupedRows& x, const RowSlab<tokens>& slab, const MatrixOf& matrix_of, const RowOf& row_of,
    float (&sums)[count][tokens]) {
  using Chunk = typename Reader::Chunk;
  constexpr int AHEAD = (sizeof(Chunk) <= 20 ? 8 : 4) / count, TURNS = RowSlab<tokens>::CHUNKS / PHASES;
  const int phase = threadIdx.x % PHASES, chunks = matrix_of(0).chunks, turns = (chunks + PHASES - 1) / PHASES;
  Chunk next[AHEAD][count];
  auto read = [&](int turn, Chunk(&into)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i)
      Reader{matrix_of(i)}.read(row_of(i), min(turn * PHASES + phase, chunks - 1), into[i]);
  };
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) read(i, next[i]);
  wait_for_earlier();
  for (int first = 0; first < turns; first += TURNS) {
    if (first) __syncthreads();  // the slab before has been read
    slab.bring(x, first * PHASES);
    __syncthreads();
    const int end = min(first + TURNS, turns);
    for (int base = first; base < end; base += AHEAD)
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int turn = base + i, chunk = turn * PHASES + phase;
        int words[count][BYTE_WORDS];
        Factors<Reader::HALVES> factors[count];
#pragma unroll
        for (int j = 0; j < count; ++j) {
          const Reader reader{matrix_of(j)};
          reader.bytes(next[i][j], words[j]), factors[j] = reader.factors(next[i][j]);
        }
        read(turn + AHEAD, next[i]);
        if (turn >= end || chunk >= chunks) continue;
#pragma unroll
        for (int token = 0; token < tokens; ++token) {
          int own[BYTE_WORDS];
          const float2 scale = slab.read(token, chunk - first * PHASES, own);
#pragma unroll
          for (int j = 0; j < count; ++j) {
            const float total = Reader{matrix_of(j)}.dot(words[j], factors[j], own, (int)__float_as_uint(scale.y));
            sums[j][token] = fmaf(total, scale.x, sums[j][token]);
          }
        }
      }
  }
  const int own = threadIdx.x % WARP / PHASES * PHASES;
#pragma unroll
  for (int j = 0; j < count; ++j)
#pragma unroll
    for (int token = 0; token < tokens; ++token) {
      float sum = __shfl_sync(ALL_LANES, sums[j][token], own);
#pragma unroll
      for (int other = 1; other < PHASES; ++other) sum += __shfl_sync(ALL_LANES, sums[j][token], own + other);
      sums[j][token] = sum;
    }
}
