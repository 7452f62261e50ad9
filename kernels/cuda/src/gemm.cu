// Products of many rows of activations with a matrix, by tensor cores: weights become bfloat16 on the way, activations
// were rounded to it before, sums are float32. A row's sum goes through the columns in order, whoever else is there.
#include "weights.cuh"

// x: bfloat16 [rows][x_stride], columns that only fill a row up are zero. The rest as ProductArguments; rows from
// first_row to rows are computed.
struct GemmArguments {
  BlockMatrix matrix;
  const void* x;
  const float* bias;
  const float* addend;
  float* out;
  long long x_stride;
  long long addend_stride;
  long long out_stride;
  int first_row;
  int rows;
  int outputs;
};

// A block of warps, each of which makes 16 row_tiles rows by 8 output_tiles outputs. It goes through the columns in steps
// of 64: every thread unpacks one chunk of weights a step, whose codes it has read during the step before. Activations
// come in parts of 32 columns, two parts ahead.
//
// In shared memory, sixteen bytes (eight columns) lie together, of a row of a part in place p ^ row / 2 % 4, of a row of
// weights in place p ^ row % 8: so the eight rows that a tile is read from, and the chunks that eight threads write, lie
// in different banks.
constexpr int STEP = 64, PART = 32, STAGES = 3, PART_WORDS = PART / 2, STEP_WORDS = STEP / 2, CHUNKS = STEP / CHUNK;

template <int row_tiles, int output_tiles, int row_warps, int output_warps>
struct GemmShape {
  static constexpr int ROW_TILES = row_tiles, OUTPUT_TILES = output_tiles, OUTPUT_WARPS = output_warps;
  static constexpr int ROWS = 16 * row_tiles * row_warps, OUTPUTS = 8 * output_tiles * output_warps;
  static constexpr int THREADS = WARP * row_warps * output_warps;
  static_assert(THREADS == OUTPUTS * CHUNKS, "a chunk per thread");
  static_assert(output_tiles % 2 == 0, "tiles of weights are read in pairs");
};

__device__ __forceinline__ int place_of_part(int row, int place) { return row * PART_WORDS + (place ^ row / 2 % 4) * 4; }
__device__ __forceinline__ int place_of_step(int row, int place) { return row * STEP_WORDS + (place ^ row % 8) * 4; }

// A part of the activations of a block's rows into shared memory; there may be none left.
template <class Shape>
__device__ __forceinline__ void copy_part(const GemmArguments& given, unsigned* stages, int first_row, int part, int parts) {
  if (part < parts) {
    const bfloat_bits* x = static_cast<const bfloat_bits*>(given.x) + part * PART;
    unsigned* stage = stages + part % STAGES * (Shape::ROWS * PART_WORDS);
#pragma unroll
    for (int i = threadIdx.x; i < Shape::ROWS * 4; i += Shape::THREADS) {
      const long long source = min(first_row + i / 4, given.rows - 1);
      copy_later(stage + place_of_part(i / 4, i % 4), x + source * given.x_stride + i % 4 * 8);
    }
  }
  end_group();
}

// Sixteen columns more: weights in tile `k` of their step, activations in tile k % 2 of their part.
template <class Shape>
__device__ __forceinline__ void multiply_part(
    const unsigned* stage, const unsigned* weights, int first_row, int first_output, int k,
    float (&sums)[Shape::ROW_TILES][Shape::OUTPUT_TILES][4]) {
  const int lane = threadIdx.x % WARP;
  unsigned left[Shape::ROW_TILES][4];
#pragma unroll
  for (int i = 0; i < Shape::ROW_TILES; ++i)
    load_tiles(left[i], stage + place_of_part(first_row + 16 * i + lane % 16, k % 2 * 2 + lane / 16));
#pragma unroll
  for (int j = 0; j < Shape::OUTPUT_TILES; j += 2) {
    unsigned right[4];  // of two tiles of eight outputs, the first and the second eight columns of each
    const int output = first_output + 8 * j + lane / 16 * 8 + lane % 8;
    load_tiles(right, weights + place_of_step(output, 2 * k + lane / 8 % 2));
#pragma unroll
    for (int i = 0; i < Shape::ROW_TILES; ++i) {
      multiply_tiles(sums[i][j], left[i], {right[0], right[1]});
      multiply_tiles(sums[i][j + 1], left[i], {right[2], right[3]});
    }
  }
}

template <class Shape>
__device__ __forceinline__ void write_sums(
    const GemmArguments& given, int first_row, int first_output, const float (&sums)[Shape::ROW_TILES][Shape::OUTPUT_TILES][4]) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int i = 0; i < Shape::ROW_TILES; ++i)
#pragma unroll
    for (int j = 0; j < Shape::OUTPUT_TILES; ++j)
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const long long row = first_row + 16 * i + lane / 4 + part / 2 * 8;
        const int output = first_output + 8 * j + 2 * (lane % 4) + part % 2;
        if (row >= given.rows || output >= given.outputs) continue;
        float sum = sums[i][j][part];
        if (given.bias) sum += given.bias[output];
        if (given.addend) sum += given.addend[row * given.addend_stride + output];
        given.out[row * given.out_stride + output] = sum;
      }
}

// Grid (outputs / Shape::OUTPUTS, rows / Shape::ROWS).
template <class Source, class Shape>
__device__ __forceinline__ void gemm(const GemmArguments& given) {
  SHARED(unsigned, activations, STAGES * Shape::ROWS * PART_WORDS);
  SHARED(unsigned, weights, Shape::OUTPUTS * STEP_WORDS);
  const int warp = threadIdx.x / WARP;
  const int first_row = given.first_row + blockIdx.y * Shape::ROWS, first_output = blockIdx.x * Shape::OUTPUTS;
  const int row_of_warp = warp / Shape::OUTPUT_WARPS * (16 * Shape::ROW_TILES);
  const int output_of_warp = warp % Shape::OUTPUT_WARPS * (8 * Shape::OUTPUT_TILES);
  const int chunks = given.matrix.chunks, steps = (chunks + CHUNKS - 1) / CHUNKS, parts = steps * CHUNKS;
  const int own_output = threadIdx.x / CHUNKS, own_chunk = threadIdx.x % CHUNKS;
  const long long own_row = min(first_output + own_output, given.outputs - 1);
  const typename Source::Reads reader = Source::Reads::of_numbers(given.matrix);
  Source source;
  float sums[Shape::ROW_TILES][Shape::OUTPUT_TILES][4] = {};
  copy_part<Shape>(given, activations, first_row, 0, parts);
  copy_part<Shape>(given, activations, first_row, 1, parts);
  source.read(reader, own_row, min(own_chunk, chunks - 1));
  for (int step = 0; step < steps; ++step) {
    unsigned pairs[CHUNK / 2];
    source.pairs(reader, pairs);
    const int next = (step + 1) * CHUNKS + own_chunk;
    source.read(reader, own_row, min(next, chunks - 1));
    __syncthreads();  // the weights of the step before have been read
    const bool there = step * CHUNKS + own_chunk < chunks;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 eight = {pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]};
      *reinterpret_cast<uint4*>(weights + place_of_step(own_output, own_chunk * 4 + i)) = there ? eight : uint4{};
    }
#pragma unroll
    for (int half = 0; half < CHUNKS; ++half) {
      const int part = step * CHUNKS + half;
      wait_groups<1>();
      __syncthreads();  // the part and the weights are there, the part before has been read
      copy_part<Shape>(given, activations, first_row, part + 2, parts);
      const unsigned* stage = activations + part % STAGES * (Shape::ROWS * PART_WORDS);
#pragma unroll
      for (int k = 2 * half; k < 2 * half + 2; ++k)
        multiply_part<Shape>(stage, weights, row_of_warp, output_of_warp, k, sums);
    }
  }
  write_sums<Shape>(given, first_row + row_of_warp, first_output + output_of_warp, sums);
}
