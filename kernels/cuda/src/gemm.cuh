// Matmuls of many rows of activations with rows of a matrix, by tensor cores. The kernel converts weights to bfloat16,
// activations were rounded to bfloat16 earlier, and sums are float32. A row's sum is computed over the columns in
// order, whatever the other rows are.
#pragma once
#include "weights.cuh"

// A block of warps, each of which computes 16 row_tiles rows by 8 output_tiles outputs. The block processes the columns
// in steps of 64: in each step, every thread unpacks one chunk of weights, from codes that the thread read during the
// previous step. Activations are copied in parts of 32 columns, two parts ahead.
//
// In shared memory, pieces of sixteen bytes (eight columns) are contiguous: piece p of a row of a part is at position
// p ^ row / 2 % 4, and piece p of a row of weights is at position p ^ row % 8. So the eight rows from which a tile is
// read, and the chunks that eight threads write, lie in different banks.
constexpr int STEP = 64, PART = 32, STAGES = 3, PART_WORDS = PART / 2, STEP_WORDS = STEP / 2, CHUNKS = STEP / CHUNK;

// `often_few`: warps without rows skip the products, which needs registers and pays off if many blocks are not full.
template <int row_tiles, int output_tiles, int row_warps, int output_warps, bool often_few = false>
struct GemmShape {
  static constexpr bool OFTEN_FEW = often_few;
  static constexpr int ROW_TILES = row_tiles, OUTPUT_TILES = output_tiles, OUTPUT_WARPS = output_warps;
  static constexpr int ROWS = 16 * row_tiles * row_warps, OUTPUTS = 8 * output_tiles * output_warps;
  static constexpr int THREADS = WARP * row_warps * output_warps;
  static_assert(THREADS == OUTPUTS * CHUNKS, "a chunk per thread");
  static_assert(output_tiles % 2 == 0, "tiles of weights are read in pairs");
};

__device__ __forceinline__ int offset_in_part(int row, int piece) { return row * PART_WORDS + (piece ^ row / 2 % 4) * 4; }
__device__ __forceinline__ int offset_in_step(int row, int piece) { return row * STEP_WORDS + (piece ^ row % 8) * 4; }

// Copy a part of the activations of a block's rows to shared memory, if there is one. Missing rows hold anything,
// because their results are discarded.
template <class Shape, class RowOf>
__device__ __forceinline__ void copy_part(
    const bfloat_bits* x, long long x_stride, int rows, const RowOf& row_of, unsigned* stages, int part, int parts) {
  if (part < parts) {
    unsigned* stage = stages + part % STAGES * (Shape::ROWS * PART_WORDS);
#pragma unroll
    for (int i = threadIdx.x; i < Shape::ROWS * 4; i += Shape::THREADS)
      if (i / 4 < rows)
        copy_later(stage + offset_in_part(i / 4, i % 4), x + row_of(i / 4) * x_stride + part * PART + i % 4 * 8);
  }
  end_group();
}

// Add sixteen more columns: tile `k` of their step's weights, and tile k % 2 of their part of the activations.
template <class Shape>
__device__ __forceinline__ void multiply_part(
    const unsigned* stage, const unsigned* weights, int first_row, int first_output, int k,
    float (&sums)[Shape::ROW_TILES][Shape::OUTPUT_TILES][4]) {
  const int lane = threadIdx.x % WARP;
  unsigned left[Shape::ROW_TILES][4];
#pragma unroll
  for (int i = 0; i < Shape::ROW_TILES; ++i)
    load_tiles(left[i], stage + offset_in_part(first_row + 16 * i + lane % 16, k % 2 * 2 + lane / 16));
#pragma unroll
  for (int j = 0; j < Shape::OUTPUT_TILES; j += 2) {
    unsigned right[4];  // of two tiles of eight outputs, the first and the second eight columns of each
    const int output = first_output + 8 * j + lane / 16 * 8 + lane % 8;
    load_tiles(right, weights + offset_in_step(output, 2 * k + lane / 8 % 2));
#pragma unroll
    for (int i = 0; i < Shape::ROW_TILES; ++i) {
      multiply_tiles(sums[i][j], left[i], {right[0], right[1]});
      multiply_tiles(sums[i][j + 1], left[i], {right[2], right[3]});
    }
  }
}

// Compute a block's part of a matmul: `outputs` rows of the matrix starting at `first_weight`, of which the block has
// the outputs starting at first_output, times `rows` rows of x, where row_of(i) is the number of row i. finish(i,
// output, a, b) receives the sums of two adjacent outputs, the first of which is even; it may be called for outputs
// past the last output.
template <class Source, class Shape, class RowOf, class Finish>
__device__ __forceinline__ void multiply_block(
    const BlockMatrix& matrix, long long first_weight, int outputs, int first_output, const bfloat_bits* x,
    long long x_stride, int rows, const RowOf& row_of, const Finish& finish) {
  SHARED(unsigned, activations, STAGES * Shape::ROWS * PART_WORDS);
  SHARED(unsigned, weights, Shape::OUTPUTS * STEP_WORDS);
  const int warp = threadIdx.x / WARP;
  const int row_of_warp = warp / Shape::OUTPUT_WARPS * (16 * Shape::ROW_TILES);
  const int output_of_warp = warp % Shape::OUTPUT_WARPS * (8 * Shape::OUTPUT_TILES);
  const int chunks = matrix.chunks, steps = (chunks + CHUNKS - 1) / CHUNKS, parts = steps * CHUNKS;
  const int own_output = threadIdx.x / CHUNKS, own_chunk = threadIdx.x % CHUNKS;
  const long long own_row = first_weight + min(first_output + own_output, outputs - 1);
  const typename Source::Reads reader = Source::Reads::of_numbers(matrix);
  Source source;
  float sums[Shape::ROW_TILES][Shape::OUTPUT_TILES][4] = {};
  copy_part<Shape>(x, x_stride, rows, row_of, activations, 0, parts);
  copy_part<Shape>(x, x_stride, rows, row_of, activations, 1, parts);
  source.read(reader, own_row, min(own_chunk, chunks - 1));
  for (int step = 0; step < steps; ++step) {
    unsigned pairs[CHUNK / 2];
    source.pairs(reader, pairs);
    const int next = (step + 1) * CHUNKS + own_chunk;
    source.read(reader, own_row, min(next, chunks - 1));
    __syncthreads();  // all threads have read the weights of the previous step
    const bool there = step * CHUNKS + own_chunk < chunks;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 eight = {pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]};
      *reinterpret_cast<uint4*>(weights + offset_in_step(own_output, own_chunk * 4 + i)) = there ? eight : uint4{};
    }
#pragma unroll
    for (int half = 0; half < CHUNKS; ++half) {
      const int part = step * CHUNKS + half;
      wait_groups<1>();
      __syncthreads();  // the part and the weights are complete, and the previous part has been read
      copy_part<Shape>(x, x_stride, rows, row_of, activations, part + 2, parts);
      if (Shape::OFTEN_FEW && row_of_warp >= rows) continue;
      const unsigned* stage = activations + part % STAGES * (Shape::ROWS * PART_WORDS);
#pragma unroll
      for (int k = 2 * half; k < 2 * half + 2; ++k)
        multiply_part<Shape>(stage, weights, row_of_warp, output_of_warp, k, sums);
    }
  }
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int i = 0; i < Shape::ROW_TILES; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of_warp + 16 * i + lane / 4 + half * 8;
      if (row >= rows) continue;
#pragma unroll
      for (int j = 0; j < Shape::OUTPUT_TILES; ++j)
        finish(row, first_output + output_of_warp + 8 * j + 2 * (lane % 4), sums[i][j][2 * half], sums[i][j][2 * half + 1]);
    }
}
