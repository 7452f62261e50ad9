// Matmuls of one or two rows of activations with a matrix of few bits, both as int8, by the lanes of warps: with so
// few rows, most of a tensor core's work would be wasted.
//
// A warp has streams of chunks: one or two rows of the matrix, or one row of each of two matrices. Lane p processes
// chunks p, p + 32, p + 64 and so on of all streams, in order, and reads the activations for them once. Then lanes p, p
// + 8, p + 16 and p + 24 are added in order, and the eight sums in pairs. This is the order of decode_tiles.cuh, so the
// bits are the same.
//
// Memory bandwidth limits these matmuls, so memory must never be idle. A lane requests its chunks several steps ahead,
// and the first chunks even before the preceding kernels have ended. Chunks in flight occupy shared memory instead of
// registers, so that blocks of the next kernel fit on a multiprocessor alongside these blocks. The scales and zero
// points of a block's rows, which are adjacent in memory, are copied as a whole. Loops are not unrolled, because
// fetching instructions that are executed only once takes longer than executing them.
#pragma once
#include "norm.cuh"

constexpr int LANE_WARPS = 16, LANE_THREADS = LANE_WARPS * WARP, COPIED = 16, ALIGNED = 128;
static_assert(LANE_THREADS == NORM_THREADS, "the threads of a block norm rows, too");

// Rows that a matmul normalises itself, four columns at a time; zeros if the matmul reads int8 rows from another
// kernel.
struct NormedRows {
  const float* x;
  const float* weight;
  long long x_stride;
  int width;
  float epsilon;
};

// Rows of activations in shared memory: [tokens][2 halves][CHUNKS] of 16 bytes, so that lanes with adjacent chunks
// read from different banks, and scales [tokens][CHUNKS] with the sums of the bytes. The sums are the sums of the
// halves, as other kernels write them, or the sum of the chunk as a float, so that this sum is not computed for every
// row of the matrix.
template <class Reader, int tokens, int CHUNKS>
struct RowSlab {
  static constexpr int BYTES = tokens * CHUNKS * (CHUNK + (int)sizeof(float2)), STRIDES = CHUNKS * CHUNK / NORM_STRIDE;
  uint4* bytes;
  float2* scales;

  __device__ __forceinline__ explicit RowSlab(unsigned char* memory)
      : bytes(reinterpret_cast<uint4*>(memory)), scales(reinterpret_cast<float2*>(memory + tokens * CHUNKS * CHUNK)) {}

  // Copy rows, starting at first_row, that another kernel has quantised.
  __device__ __forceinline__ void bring(const GroupedRows& x, int first_row) const {
    constexpr int PARTS = (2 * CHUNKS + LANE_THREADS - 1) / LANE_THREADS, AT_ONCE = PARTS < 4 ? PARTS : 4;
    const int odd = threadIdx.x % 2;
#pragma unroll 1
    for (int token = 0; token < tokens; ++token) {
      const long long first = chunk_index(x, first_row + token, 0);
      const uint4* from = static_cast<const uint4*>(x.bytes) + 2 * first + odd;
      const float2* numbers = reinterpret_cast<const float2*>(x.scales) + first;
#pragma unroll 1
      for (int start = threadIdx.x / 2; start < x.chunks; start += AT_ONCE * LANE_THREADS / 2) {
        uint4 held[AT_ONCE];
        float2 number[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          const int chunk = min(start + i * (LANE_THREADS / 2), x.chunks - 1);
          held[i] = from[2 * GROUP * chunk], number[i] = numbers[GROUP * chunk];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          const int chunk = start + i * (LANE_THREADS / 2);
          if (chunk >= x.chunks) break;
          bytes[(2 * token + odd) * CHUNKS + chunk] = held[i];
          if (!odd) scales[token * CHUNKS + chunk] = with_sum(number[i]);
        }
      }
    }
  }

  // The same for rows that are normalised here, with the arithmetic of norm.cu.
  __device__ __forceinline__ void bring_normed(
      const NormedRows& given, const NormWeights<STRIDES>& weights, int first_row, int rows) const {
#pragma unroll 1
    for (int token = 0; token < min(tokens, rows - first_row); ++token) {
      const NormRow<true> row{given.x + (first_row + token) * given.x_stride, nullptr, nullptr, given.width, true};
      norm_row<false>(
          row, given.weight, weights, nullptr, given.epsilon, [](int, const float(&)[NORM_FOUR]) {},
          [&](int column, const float(&found)[NORM_FOUR]) {
            const RoundedFour four({found[0], found[1], found[2], found[3]});
            const int chunk = column / CHUNK, word = threadIdx.x % RoundedFour::LANES, index = word % 4 * 2 + word / 4;
            reinterpret_cast<unsigned*>(bytes + (2 * token + index / 4) * CHUNKS + chunk)[index % 4] = four.bytes;
            if (word == 0) scales[token * CHUNKS + chunk] = with_sum(four.scale);
          });
    }
  }
  __device__ __forceinline__ static float2 with_sum(const float2& scale) {
    if constexpr (Reader::HALVES == 1) return {scale.x, Reader::ones_of((int)__float_as_uint(scale.y), 0)};
    else return scale;
  }
  __device__ __forceinline__ static float ones_of(const float2& scale, int half) {
    if constexpr (Reader::HALVES == 1) return scale.y;
    else return Reader::ones_of((int)__float_as_uint(scale.y), half);
  }

  // A chunk's bytes in the order of its columns, and its scale.
  __device__ __forceinline__ float2 read(int token, int chunk, int (&found)[BYTE_WORDS]) const {
    const uint4 low = bytes[2 * token * CHUNKS + chunk], high = bytes[(2 * token + 1) * CHUNKS + chunk];
    found[0] = low.x, found[4] = low.y, found[1] = low.z, found[5] = low.w;
    found[2] = high.x, found[6] = high.y, found[3] = high.z, found[7] = high.w;
    return scales[token * CHUNKS + chunk];
  }
};

// The scales and zero points of some rows of a matrix, copied to shared memory by all threads of a block. `bring`
// returns the matrix with those rows as its first rows.
template <class Reader>
struct RowNumbers {
  using Factor = typename Reader::OwnFactor;
  using Offset = typename Reader::OwnOffset;

  __device__ __forceinline__ static BlockMatrix bring(const BlockMatrix& matrix, int first, int rows, unsigned char*& memory) {
    BlockMatrix found = matrix;
    constexpr int HALVES = Reader::HALVES;
    bring_array<Factor::NUMBER_BYTES>(found.scales, matrix.scale_count, first, rows, memory);
    bring_array<Factor::INTEGER_BYTES * HALVES>(found.multipliers, matrix.multiplier_count, first, rows, memory);
    bring_array<Offset::NUMBER_BYTES>(found.offset_scales, matrix.offset_scale_count, first, rows, memory);
    bring_array<Offset::INTEGER_BYTES * HALVES>(found.offsets, matrix.offset_count, first, rows, memory);
    return found;
  }

 private:
  template <int bytes>
  __device__ __forceinline__ static void bring_array(const void*& array, int count, int first, int rows, unsigned char*& memory) {
    if constexpr (bytes > 0) {
      const int row = count * bytes;
      const unsigned char* from = static_cast<const unsigned char*>(array) + (long long)first * row;
      // The copy in shared memory starts at the same offset from a multiple of 16 as the data in global memory.
      const int before = (int)((unsigned long long)from % COPIED), end = before + row * rows, whole = end / COPIED * COPIED;
      from -= before;
#pragma unroll 1
      for (int i = threadIdx.x * COPIED; i < whole; i += LANE_THREADS * COPIED) copy_later(memory + i, from + i);
      if (threadIdx.x < end - whole) memory[whole + threadIdx.x] = from[whole + threadIdx.x];
      array = memory + before;
      memory += (end + COPIED - 1) / COPIED * COPIED;
    }
  }
};

// Chunks in flight, with a slot for each thread, stream and step. A thread reads only chunks that it requested itself.
template <class Reader, int STREAMS>
struct LaneRing {
  static constexpr int WORDS_1 = Reader::WORDS_1, WORDS_2 = Reader::WORDS_2, AHEAD = (Reader::WORDS <= 4 ? 8 : 4) / STREAMS;
  static constexpr int BYTES = AHEAD * STREAMS * LANE_THREADS * Reader::WORDS * (int)sizeof(unsigned);
  unsigned* words;

  __device__ __forceinline__ unsigned* first(int slot, int stream) const {
    return words + (slot * STREAMS + stream) * LANE_THREADS * Reader::WORDS + threadIdx.x * WORDS_1;
  }
  __device__ __forceinline__ unsigned* second(int slot, int stream) const {
    return words + ((slot * STREAMS + stream) * Reader::WORDS + WORDS_1) * LANE_THREADS + threadIdx.x * WORDS_2;
  }
  // index: index of a chunk in its matrix.
  __device__ __forceinline__ void ask(int slot, int stream, const BlockMatrix& matrix, long long index) const {
    copy_few_later<4 * WORDS_1>(first(slot, stream), matrix.data + index * (4 * WORDS_1));
    if constexpr (WORDS_2 > 0) copy_few_later<4 * WORDS_2>(second(slot, stream), matrix.second + index * (4 * WORDS_2));
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

// The sum of a row over all lanes, valid in the first eight lanes.
__device__ __forceinline__ float join_lanes(float own) {
  const int lane = threadIdx.x % WARP;
  float sum = own;
#pragma unroll
  for (int part = 1; part < PASSES; ++part) sum += __shfl_sync(ALL_LANES, own, (lane + part * PHASES) % WARP);
#pragma unroll
  for (int distance = PHASES / 2; distance; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
  return sum;
}

// Compute the sums of a warp's streams in `rounds` rounds. matrix_of(stream): a matrix; row_of(stream, round): its
// row, relative to the first row of the block, `first`. bring() fills the slab after the preceding kernels have ended;
// numbers_of(stream, row, chunk, into) reads scales and zero points; finish(round, sums) receives sums that are valid
// in the first eight lanes.
template <
    int tokens, class Reader, int STREAMS, class Slab, class MatrixOf, class RowOf, class NumbersOf, class Bring, class Finish>
__device__ __forceinline__ void decode_lanes(
    const LaneRing<Reader, STREAMS>& ring, const Slab& slab, int rounds, int first, const MatrixOf& matrix_of,
    const RowOf& row_of, const NumbersOf& numbers_of, const Bring& bring, const Finish& finish) {
  using Chunk = typename Reader::Chunk;
  constexpr int AHEAD = LaneRing<Reader, STREAMS>::AHEAD;
  const int lane = threadIdx.x % WARP, chunks = matrix_of(0).chunks, steps = (chunks + WARP - 1) / WARP, total = rounds * steps;
  int asked_round = 0, asked_step = 0;
  auto ask = [&](int slot) {
    const int chunk = min(asked_step * WARP + lane, chunks - 1);
#pragma unroll
    for (int stream = 0; stream < STREAMS; ++stream)
      ring.ask(slot, stream, matrix_of(stream), (long long)(first + row_of(stream, asked_round)) * chunks + chunk);
    if (++asked_step == steps) asked_step = 0, ++asked_round;
  };
#pragma unroll 1
  for (int i = 0; i < AHEAD; ++i) {
    if (i < total) ask(i);
    end_group();
  }
  bring();
  wait_groups<AHEAD>();  // the scales of a block's rows were requested earlier
  __syncthreads();
  int round = 0, step = 0, slot = 0, rows[STREAMS];
  float sums[STREAMS][tokens];
  auto begin = [&] {
#pragma unroll
    for (int stream = 0; stream < STREAMS; ++stream) {
      rows[stream] = row_of(stream, round);
#pragma unroll
      for (int token = 0; token < tokens; ++token) sums[stream][token] = 0.0f;
    }
  };
  // Chunks past the last chunk are multiplied by zeros.
  auto compute = [&] {
    wait_groups<AHEAD - 1>();
    const int index = step * WARP + lane, chunk = min(index, chunks - 1);
    int words[STREAMS][BYTE_WORDS];
    Factors<Reader::HALVES> factors[STREAMS];
#pragma unroll
    for (int stream = 0; stream < STREAMS; ++stream) {
      const Reader reader{matrix_of(stream)};
      Chunk own;
      ring.take(slot, stream, own), numbers_of(stream, rows[stream], chunk, own);
      reader.bytes(own, words[stream]), factors[stream] = reader.factors(own);
    }
#pragma unroll
    for (int token = 0; token < tokens; ++token) {
      int own[BYTE_WORDS];
      const float2 scale = slab.read(token, index, own);
#pragma unroll
      for (int stream = 0; stream < STREAMS; ++stream) {
        const float sum = Reader{matrix_of(stream)}.dot(
            words[stream], factors[stream], own, [&](int half) { return Slab::ones_of(scale, half); });
        sums[stream][token] = fmaf(sum, scale.x, sums[stream][token]);
      }
    }
  };
  auto pass = [&] { end_group(), slot = slot + 1 == AHEAD ? 0 : slot + 1, ++step; };
#pragma unroll 1
  for (; round < rounds; ++round) {
    begin();
    const bool is_last = round + 1 == rounds && steps >= AHEAD;
    const int asking = is_last ? steps - AHEAD : steps;
#pragma unroll 2
    while (step < asking) {
      compute();
      if (asked_round < rounds) ask(slot);
      pass();
    }
    if (is_last) {  // every chunk has been requested
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) compute(), pass();
    }
#pragma unroll
    for (int stream = 0; stream < STREAMS; ++stream)
#pragma unroll
      for (int token = 0; token < tokens; ++token) sums[stream][token] = join_lanes(sums[stream][token]);
    finish(round, sums);
    step = 0;
  }
  wait_groups<0>();
}
