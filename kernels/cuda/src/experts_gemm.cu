// Products of many pairs with the matrices of their experts, by tensor cores: as gemm.cu, but that rows of activations
// are gathered, up to 64 of one expert a block. A pair's sum goes through the columns in order, whoever else is there.
#include "experts.cuh"

constexpr int PAIR_WARPS = 4, PAIR_THREADS = PAIR_WARPS * WARP, PAIR_TILE = 64, PAIR_TILE_WORDS = 36;
constexpr int PAIR_CHUNKS = PAIR_TILE / CHUNK, PAIR_COPIES = PAIR_TILE * PAIR_TILE / 8 / PAIR_THREADS;

// A chunk of a row, read but not yet unpacked: of integers ...
template <int bits, class Scale>
struct chunk_of_codes {
  using Reader = BlockReader<bits, Scale>;
  unsigned codes[Reader::WORDS];
  float scale = 0.0f;
  int zero = 0;

  __device__ __forceinline__ static int chunks(const ExpertArguments& given) {
    return given.matrix.blocks * (given.matrix.block_size / CHUNK);
  }
  __device__ __forceinline__ void read(const ExpertArguments& given, long long row, int chunk) {
    const Reader reader{given.matrix};
    reader.read(row, chunk, codes);
    scale = reader.scale(row, chunk), zero = reader.zero(row, chunk);
  }
  __device__ __forceinline__ float number(int i) const { return (float)((int)Reader::code(codes, i) - zero) * scale; }
};

// ... and of floats.
template <class T>
struct chunk_of_floats {
  T numbers[CHUNK];

  __device__ __forceinline__ static int chunks(const ExpertArguments& given) {
    return (given.columns + CHUNK - 1) / CHUNK;
  }
  __device__ __forceinline__ void read(const ExpertArguments& given, long long row, int chunk) {
    const T* source = reinterpret_cast<const T*>(given.matrix.data) + row * given.columns;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) numbers[i] = chunk * CHUNK + i < given.columns ? source[chunk * CHUNK + i] : T{};
  }
  __device__ __forceinline__ float number(int i) const { return to_float(numbers[i]); }
};

// x: bfloat16, its rows x_stride numbers apart. Grid (outputs / 64, groups).
template <class Chunk, class Activation>
__device__ __forceinline__ void expert_gemm(const ExpertArguments& given) {
  SHARED(unsigned, activations, 2 * PAIR_TILE * PAIR_TILE_WORDS);
  SHARED(unsigned, weights, 2 * PAIR_TILE * PAIR_TILE_WORDS);
  const PairGroup group = group_of_block(given);
  if (group.count == 0) return;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = lane / 4, place = lane % 4;
  const int first_output = blockIdx.x * PAIR_TILE, row_of_warp = warp / 2 * 32, output_of_warp = warp % 2 * 32;
  const int chunks = Chunk::chunks(given), steps = (chunks + PAIR_CHUNKS - 1) / PAIR_CHUNKS;
  const int *ordered = given.ordered + group.first;
  // This thread copies eight columns of these rows in every step. Rows behind the last one hold anything: what comes of
  // them is not kept.
  const bfloat_bits* sources[PAIR_COPIES];
#pragma unroll
  for (int i = 0; i < PAIR_COPIES; ++i) {
    const int row = (i * PAIR_THREADS + (int)threadIdx.x) / 8, pair = ordered[min(row, group.count - 1)];
    sources[i] = static_cast<const bfloat_bits*>(given.x) + pair / given.sharing * given.x_stride + threadIdx.x % 8 * 8;
  }
  auto copy_rows = [&](int step) {
    unsigned* tile = activations + step % 2 * PAIR_TILE * PAIR_TILE_WORDS + threadIdx.x % 8 * 4;
#pragma unroll
    for (int i = 0; i < PAIR_COPIES; ++i) {
      const int row = (i * PAIR_THREADS + (int)threadIdx.x) / 8;
      if (row < group.count) copy_later(tile + row * PAIR_TILE_WORDS, sources[i] + step * PAIR_TILE);
    }
    end_group();
  };
  // It unpacks one chunk of every step.
  const int own_output = threadIdx.x / PAIR_CHUNKS, own_chunk = threadIdx.x % PAIR_CHUNKS;
  const long long own_row = (long long)group.expert * given.outputs + min(first_output + own_output, given.outputs - 1);
  Chunk source;
  float sums[2][4][4] = {};
  copy_rows(0);
  if (own_chunk < chunks) source.read(given, own_row, own_chunk);
  for (int step = 0; step < steps; ++step) {
    unsigned* target = weights + (step % 2 * PAIR_TILE + own_output) * PAIR_TILE_WORDS + own_chunk * (CHUNK / 2);
    const bool there = step * PAIR_CHUNKS + own_chunk < chunks;
#pragma unroll
    for (int i = 0; i < CHUNK / 2; ++i) target[i] = there ? bfloat_pair(source.number(2 * i), source.number(2 * i + 1)) : 0u;
    wait_groups<0>();
    __syncthreads();  // the tiles of this step are there, those of the step before have been read
    if (step + 1 < steps) {
      copy_rows(step + 1);
      const int next = (step + 1) * PAIR_CHUNKS + own_chunk;
      if (next < chunks) source.read(given, own_row, next);
    }
    if (row_of_warp >= group.count) continue;
    const unsigned* a = activations + (step % 2 * PAIR_TILE + row_of_warp + part) * PAIR_TILE_WORDS + place;
    const unsigned* b = weights + (step % 2 * PAIR_TILE + output_of_warp + part) * PAIR_TILE_WORDS + place;
#pragma unroll
    for (int k = 0; k < PAIR_TILE / 2; k += 8) {
      unsigned left[2][4], right[4][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned* rows = a + i * 16 * PAIR_TILE_WORDS + k;
        left[i][0] = rows[0], left[i][1] = rows[8 * PAIR_TILE_WORDS];
        left[i][2] = rows[4], left[i][3] = rows[8 * PAIR_TILE_WORDS + 4];
      }
#pragma unroll
      for (int j = 0; j < 4; ++j)
        right[j][0] = b[j * 8 * PAIR_TILE_WORDS + k], right[j][1] = b[j * 8 * PAIR_TILE_WORDS + k + 4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply_tiles(sums[i][j], left[i], right[j]);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of_warp + i * 16 + half * 8 + part;
      if (row >= group.count) continue;
      const int pair = ordered[row];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        finish_pair<Activation>(given, pair, group.expert, first_output + output_of_warp + j * 8 + 2 * place,
                                sums[i][j][2 * half], sums[i][j][2 * half + 1]);
    }
}
