// Products of one or two rows of activations with a matrix of few bits, both as bytes, by the lanes of warps: so few rows
// would leave most of a tensor core's work undone.
//
// A warp has two streams of chunks at a time, two rows of the matrix or one of each of two matrices; lane p takes chunks
// p, p + 32, p + 64 and so on of both in order, and reads what it needs of the activations once for both. Then lanes p,
// p + 8, p + 16 and p + 24 are added in order, and the eight sums in pairs. That is the order of decode_tiles.cuh, so
// bits are the same.
//
// What bounds these products is memory, which must not rest: a lane asks for its chunks several turns ahead, for the
// first ones before the kernels before have ended, and they take shared memory, not registers, so that the blocks of the
// next kernel find room beside these.
#pragma once
#include "norm.cuh"

constexpr int LANE_WARPS = 8, LANE_THREADS = LANE_WARPS * WARP, STREAMS = 2;
static_assert(LANE_THREADS == NORM_THREADS, "the threads of a block norm rows, too");

// Rows that a product norms itself; x = 0: it reads bytes that others have made.
struct NormedRows {
  const float* x;
  const float* weight;
  long long x_stride;
  int width;
  float epsilon;
};

// Rows of activations in shared memory: [tokens][2 halves][CHUNKS] of 16 bytes, so that lanes with neighbouring chunks read
// from different banks, and scales [tokens][CHUNKS].
template <int tokens, int CHUNKS>
struct RowSlab {
  static constexpr int BYTES = tokens * CHUNKS * (CHUNK + (int)sizeof(float2));
  uint4* bytes;
  float2* scales;

  __device__ __forceinline__ explicit RowSlab(unsigned char* memory)
      : bytes(reinterpret_cast<uint4*>(memory)), scales(reinterpret_cast<float2*>(memory + tokens * CHUNKS * CHUNK)) {}

  // Rows from first_row on, which others have made bytes.
  __device__ __forceinline__ void bring(const GroupedRows& x, int first_row) const {
#pragma unroll
    for (int token = 0; token < tokens; ++token) {
      const long long first = place_of_row(x, first_row + token, 0);
      for (int i = threadIdx.x; i < 2 * x.chunks; i += LANE_THREADS)
        bytes[(2 * token + i % 2) * CHUNKS + i / 2] = static_cast<const uint4*>(x.bytes)[2 * (first + i / 2 * GROUP) + i % 2];
      for (int i = threadIdx.x; i < x.chunks; i += LANE_THREADS)
        scales[token * CHUNKS + i] = reinterpret_cast<const float2*>(x.scales)[first + i * GROUP];
    }
  }

  // The same of rows that are normed here, as norm.cu makes them.
  template <int strides>
  __device__ __forceinline__ void bring_normed(
      const NormedRows& given, const NormRow& own, const NormWeights<strides>& weights, int first_row, int rows) const {
#pragma unroll
    for (int token = 0; token < tokens; ++token) {
      if (first_row + token >= rows) continue;
      NormRow row = own;
      row.x += (first_row + token) * given.x_stride;
      norm_row<false>(
          row, given.weight, weights, nullptr, given.epsilon, [](int, const float(&)[NORM_FOUR]) {},
          [&](int column, const float(&found)[NORM_FOUR]) {
            const RoundedFour four({found[0], found[1], found[2], found[3]});
            const int chunk = column / CHUNK, word = threadIdx.x % RoundedFour::LANES, place = word % 4 * 2 + word / 4;
            reinterpret_cast<unsigned*>(bytes + (2 * token + place / 4) * CHUNKS + chunk)[place % 4] = four.bytes;
            if (word == 0) scales[token * CHUNKS + chunk] = four.scale;
          });
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

// Chunks that are under way, a place for each thread, stream and turn. A thread reads only what it asked for itself.
template <class Reader>
struct LaneRing {
  static constexpr int WORDS_1 = Reader::WORDS_1, WORDS_2 = Reader::WORDS_2, AHEAD = Reader::WORDS <= 4 ? 4 : 2;
  static constexpr int BYTES = AHEAD * STREAMS * LANE_THREADS * Reader::WORDS * (int)sizeof(unsigned);
  unsigned* words;

  __device__ __forceinline__ unsigned* first(int slot, int stream) const {
    return words + (slot * STREAMS + stream) * LANE_THREADS * Reader::WORDS + threadIdx.x * WORDS_1;
  }
  __device__ __forceinline__ unsigned* second(int slot, int stream) const {
    return words + ((slot * STREAMS + stream) * Reader::WORDS + WORDS_1) * LANE_THREADS + threadIdx.x * WORDS_2;
  }
  __device__ __forceinline__ void ask(int slot, int stream, const BlockMatrix& matrix, long long row, int chunk) const {
    const long long from = row * matrix.chunks + chunk;
    copy_few_later<4 * WORDS_1>(first(slot, stream), matrix.data + from * (4 * WORDS_1));
    if constexpr (WORDS_2 > 0) copy_few_later<4 * WORDS_2>(second(slot, stream), matrix.second + from * (4 * WORDS_2));
  }
  __device__ __forceinline__ void take(int slot, int stream, typename Reader::Chunk& chunk) const {
    take_words<WORDS_1>(first(slot, stream), chunk.codes);
    if constexpr (WORDS_2 > 0) take_words<WORDS_2>(second(slot, stream), chunk.codes + WORDS_1);
  }

 private:
  template <int count>
  __device__ __forceinline__ static void take_words(const unsigned* from, unsigned* to) {
    const auto read = *reinterpret_cast<const Together<unsigned, count>*>(from);
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = read.of[i];
  }
};

// The sum of all lanes' parts of a row, for the first eight lanes.
__device__ __forceinline__ float join_lanes(float own) {
  const int lane = threadIdx.x % WARP;
  float sum = own;
#pragma unroll
  for (int part = 1; part < PASSES; ++part) sum += __shfl_sync(ALL_LANES, own, (lane + part * PHASES) % WARP);
#pragma unroll
  for (int distance = PHASES / 2; distance; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
  return sum;
}

// Sums of a warp's streams, round after round: row_of(stream, round) of matrix_of(stream). bring() fills the slab, once the
// kernels before have ended; finish(round, sums) gets sums in the first eight lanes.
template <class Reader, int tokens, class Slab, class MatrixOf, class RowOf, class Bring, class Finish>
__device__ __forceinline__ void decode_lanes(
    const LaneRing<Reader>& ring, const Slab& slab, int rounds, const MatrixOf& matrix_of, const RowOf& row_of,
    const Bring& bring, const Finish& finish) {
  using Chunk = typename Reader::Chunk;
  constexpr int AHEAD = LaneRing<Reader>::AHEAD;
  const int lane = threadIdx.x % WARP, chunks = matrix_of(0).chunks, turns = (chunks + WARP - 1) / WARP;
  Chunk next[AHEAD][STREAMS];
  int asked_round = 0, asked_turn = 0;
  auto ask = [&](int slot, Chunk(&into)[STREAMS]) {
    if (asked_round < rounds) {
      const int chunk = min(asked_turn * WARP + lane, chunks - 1);
#pragma unroll
      for (int stream = 0; stream < STREAMS; ++stream) {
        const long long row = row_of(stream, asked_round);
        ring.ask(slot, stream, matrix_of(stream), row, chunk);
        Reader{matrix_of(stream)}.read_numbers(row, chunk, into[stream]);
      }
      if (++asked_turn == turns) asked_turn = 0, ++asked_round;
    }
    end_group();
  };
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) ask(i, next[i]);
  bring();
  __syncthreads();
  float sums[STREAMS][tokens] = {};
  int round = 0, turn = 0;
  while (round < rounds)
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (round == rounds) break;
      wait_groups<AHEAD - 1>();
      const int chunk = turn * WARP + lane;
      int words[STREAMS][BYTE_WORDS];
      Factors<Reader::HALVES> factors[STREAMS];
#pragma unroll
      for (int stream = 0; stream < STREAMS; ++stream) {
        const Reader reader{matrix_of(stream)};
        ring.take(i, stream, next[i][stream]);
        reader.bytes(next[i][stream], words[stream]), factors[stream] = reader.factors(next[i][stream]);
      }
      if (chunk < chunks) {
#pragma unroll
        for (int token = 0; token < tokens; ++token) {
          int own[BYTE_WORDS];
          const float2 scale = slab.read(token, chunk, own);
#pragma unroll
          for (int stream = 0; stream < STREAMS; ++stream) {
            const float total = Reader{matrix_of(stream)}.dot(words[stream], factors[stream], own, (int)__float_as_uint(scale.y));
            sums[stream][token] = fmaf(total, scale.x, sums[stream][token]);
          }
        }
      }
      ask(i, next[i]);
      if (++turn < turns) continue;
#pragma unroll
      for (int stream = 0; stream < STREAMS; ++stream)
#pragma unroll
        for (int token = 0; token < tokens; ++token) sums[stream][token] = join_lanes(sums[stream][token]);
      finish(round, sums);
#pragma unroll
      for (int stream = 0; stream < STREAMS; ++stream)
#pragma unroll
        for (int token = 0; token < tokens; ++token) sums[stream][token] = 0.0f;
      turn = 0, ++round;
    }
  wait_groups<0>();
}
