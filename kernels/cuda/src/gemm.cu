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
  int columns;
  int outputs;
};

// A block makes 64 rows by 64 outputs; each of its four warps a quarter, as two by four tiles of a tensor core. It goes
// through the columns in steps of 64: while a step is multiplied, the next one's activations are copied and its codes
// read. Rows of a tile are 144 bytes apart, so that what a warp reads at once lies in different banks.
constexpr int MANY_WARPS = 4, MANY_THREADS = MANY_WARPS * WARP, TILE = 64, TILE_WORDS = 36, CHUNKS = TILE / CHUNK;

// A chunk of a row, read but not yet unpacked: of integers ...
template <int bits, class Scale>
struct BlockSource {
  using Reader = BlockReader<bits, Scale>;
  unsigned codes[Reader::WORDS];
  float scale = 0.0f;
  int zero = 0;

  __device__ __forceinline__ static int chunks(const GemmArguments& given) {
    return given.matrix.blocks * (given.matrix.block_size / CHUNK);
  }
  __device__ __forceinline__ void read(const GemmArguments& given, long long row, int chunk) {
    const Reader reader{given.matrix};
    reader.read(row, chunk, codes);
    scale = reader.scale(row, chunk), zero = reader.zero(row, chunk);
  }
  __device__ __forceinline__ float number(int i) const { return (float)((int)Reader::code(codes, i) - zero) * scale; }
};

// ... and of floats.
template <class T>
struct DenseSource {
  T numbers[CHUNK];

  __device__ __forceinline__ static int chunks(const GemmArguments& given) { return (given.columns + CHUNK - 1) / CHUNK; }
  __device__ __forceinline__ void read(const GemmArguments& given, long long row, int chunk) {
    const T* source = reinterpret_cast<const T*>(given.matrix.data) + row * given.columns;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) numbers[i] = chunk * CHUNK + i < given.columns ? source[chunk * CHUNK + i] : T{};
  }
  __device__ __forceinline__ float number(int i) const { return to_float(numbers[i]); }
};

// 64 rows of activations, 64 columns each, into shared memory, eight columns a copy.
__device__ __forceinline__ void copy_rows(const GemmArguments& given, unsigned* tile, int first_row, int step) {
  const bfloat_bits* x = static_cast<const bfloat_bits*>(given.x);
#pragma unroll
  for (int i = 0; i < TILE * TILE / 8 / MANY_THREADS; ++i) {
    const int place = i * MANY_THREADS + threadIdx.x, row = place / 8, part = place % 8;
    const long long source = min(first_row + row, given.rows - 1);
    copy_later(tile + row * TILE_WORDS + part * 4, x + source * given.x_stride + step * TILE + part * 8);
  }
  end_group();
}

// Grid (outputs / 64, rows / 64).
template <class Source>
__device__ __forceinline__ void gemm(const GemmArguments& given) {
  SHARED(unsigned, activations, 2 * TILE * TILE_WORDS);
  SHARED(unsigned, weights, 2 * TILE * TILE_WORDS);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4, place = lane % 4;
  const int first_row = given.first_row + blockIdx.y * TILE, first_output = blockIdx.x * TILE;
  const int row_of_warp = warp / 2 * 32, output_of_warp = warp % 2 * 32;
  const int chunks = Source::chunks(given), steps = (chunks + CHUNKS - 1) / CHUNKS;
  // This thread unpacks one chunk of every step.
  const int own_output = threadIdx.x / CHUNKS, own_chunk = threadIdx.x % CHUNKS;
  const long long own_row = min(first_output + own_output, given.outputs - 1);
  Source source;
  float sums[2][4][4] = {};
  copy_rows(given, activations, first_row, 0);
  if (own_chunk < chunks) source.read(given, own_row, own_chunk);
  for (int step = 0; step < steps; ++step) {
    unsigned* target = weights + (step % 2 * TILE + own_output) * TILE_WORDS + own_chunk * (CHUNK / 2);
    const bool there = step * CHUNKS + own_chunk < chunks;
#pragma unroll
    for (int i = 0; i < CHUNK / 2; ++i) target[i] = there ? bfloat_pair(source.number(2 * i), source.number(2 * i + 1)) : 0u;
    wait_groups<0>();
    __syncthreads();  // the tiles of this step are there, those of the step before have been read
    if (step + 1 < steps) {
      copy_rows(given, activations + (step + 1) % 2 * TILE * TILE_WORDS, first_row, step + 1);
      const int next = (step + 1) * CHUNKS + own_chunk;
      if (next < chunks) source.read(given, own_row, next);
    }
    const unsigned* a = activations + (step % 2 * TILE + row_of_warp + group) * TILE_WORDS + place;
    const unsigned* b = weights + (step % 2 * TILE + output_of_warp + group) * TILE_WORDS + place;
#pragma unroll
    for (int k = 0; k < TILE / 2; k += 8) {
      unsigned left[2][4], right[4][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned* rows = a + i * 16 * TILE_WORDS + k;
        left[i][0] = rows[0], left[i][1] = rows[8 * TILE_WORDS];
        left[i][2] = rows[4], left[i][3] = rows[8 * TILE_WORDS + 4];
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) right[j][0] = b[j * 8 * TILE_WORDS + k], right[j][1] = b[j * 8 * TILE_WORDS + k + 4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply_tiles(sums[i][j], left[i], right[j]);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const long long row = first_row + row_of_warp + i * 16 + group + part / 2 * 8;
        const int output = first_output + output_of_warp + j * 8 + 2 * place + part % 2;
        if (row >= given.rows || output >= given.outputs) continue;
        float sum = sums[i][j][part];
        if (given.bias) sum += given.bias[output];
        if (given.addend) sum += given.addend[row * given.addend_stride + output];
        given.out[row * given.out_stride + output] = sum;
      }
}
