// Rows in the layouts that matmuls read. The 32 lanes of a warp process 32 chunks of 32 columns together (a stride),
// and numbers that they read together are adjacent in memory. Columns that pad the last stride are zero.
#include "groups.cuh"

// Layouts of `out`, `strides` times per row:
//   floats:  the chunks of `columns` columns of the lanes, [1,024 / (32 columns)][columns / 4][32 lanes][4 columns]
//   bfloats: [1,024 columns], bfloat16 in order
//   tiles:   see arrange_tiles
//   bytes:   [2][32 lanes][16 bytes]
// `scales`, for bytes: per row and chunk {scale, sums of the bytes}. The sums are two 16-bit numbers, one for each half
// of the chunk. Strides of rows are counted in numbers.
struct ActivationArguments {
  const float* x;
  void* out;
  float* scales;
  long long x_stride;
  int first_row;
  int rows;
  int width;
  int strides;
  int capacity;
};

// Each thread of a block converts only four adjacent columns of one stride, which minimises the time for so little
// work.
constexpr int STRIDE = WARP * CHUNK, FOUR = 4, ARRANGE_THREADS = STRIDE / FOUR, BYTES_AT_ONCE = 16;

__device__ __forceinline__ float4 own_columns(const ActivationArguments& given, long long row) {
  const int column = blockIdx.x * STRIDE + threadIdx.x * FOUR, left = given.width - column;
  const float* x = given.x + row * given.x_stride + column;
  return {left > 0 ? x[0] : 0.0f, left > 1 ? x[1] : 0.0f, left > 2 ? x[2] : 0.0f, left > 3 ? x[3] : 0.0f};
}

// Grid of all arrange kernels: (strides, rows from first_row on).
template <int columns>
__device__ __forceinline__ void arrange_floats(const ActivationArguments& given) {
  const long long row = given.first_row + blockIdx.y;
  const int i = threadIdx.x * FOUR, lane = i / columns % WARP, four = i % columns / FOUR;
  float4* out = static_cast<float4*>(given.out) + (row * given.strides + blockIdx.x) * ARRANGE_THREADS;
  out[i / (columns * WARP) * (columns * WARP / FOUR) + four * WARP + lane] = own_columns(given, row);
}

__device__ __forceinline__ void arrange_bfloats(const ActivationArguments& given) {
  const long long row = given.first_row + blockIdx.y;
  const float4 x = own_columns(given, row);
  unsigned* out = static_cast<unsigned*>(given.out) + (row * given.strides + blockIdx.x) * (STRIDE / 2);
  out[2 * threadIdx.x] = bfloat_pair(x.x, x.y), out[2 * threadIdx.x + 1] = bfloat_pair(x.z, x.w);
}

// The layout that gemm_warpgroups.cu reads: bfloat16 [parts][rows][64 columns] starting at the first row, with space
// for `capacity` rows. Every 128 columns form two parts. Part 0 has the first 16 columns of each of the four chunks,
// and part 1 has the other 16 columns, in four tiles that each hold four columns of each chunk. A tile's first 16 bytes
// hold the first two of each four columns, and its other 16 bytes hold the other two, starting with chunk 0. Piece p of
// 16 bytes of a row is stored at position p ^ row % 8, as tensor cores read rows of 128 bytes in shared memory.
__device__ __forceinline__ void arrange_tiles(const ActivationArguments& given) {
  constexpr int ROW_WORDS = 32, PIECE_WORDS = 4, FOURS = CHUNK / FOUR, TILES = FOURS / 2;
  const long long row = blockIdx.y;
  const float4 x = own_columns(given, given.first_row + row);
  const int four = blockIdx.x * ARRANGE_THREADS + threadIdx.x, chunk = four / FOURS, own = four % FOURS;
  const long long part = chunk / 4 * 2 + own / TILES;
  unsigned* out = static_cast<unsigned*>(given.out) + (part * given.capacity + row) * ROW_WORDS + chunk % 4;
  const int piece = own % TILES * 2, swizzle = row % 8;
  out[(piece ^ swizzle) * PIECE_WORDS] = bfloat_pair(x.x, x.y);
  out[(piece + 1 ^ swizzle) * PIECE_WORDS] = bfloat_pair(x.z, x.w);
}

// The layout of groups.cuh, written to `grouped`.
struct GroupArguments {
  const float* x;
  GroupedRows grouped;
  long long x_stride;
  int rows;
  int width;
};

__device__ __forceinline__ void arrange_groups(const GroupArguments& given) {
  const long long row = blockIdx.y;
  const ActivationArguments own{given.x, nullptr, nullptr, given.x_stride, 0, given.rows, given.width, 0, 0};
  const int chunk = blockIdx.x * STRIDE_CHUNKS + threadIdx.x / 8;
  store_four(given.grouped, row, chunk, threadIdx.x % 8, own_columns(own, row));
}

__device__ __forceinline__ void arrange_bytes(const ActivationArguments& given) {
  constexpr int LANES = RoundedFour::LANES;
  const long long row = given.first_row + blockIdx.y;
  const RoundedFour four(own_columns(given, row));
  const int chunk = threadIdx.x / LANES, word = threadIdx.x % LANES;
  const long long stride = row * given.strides + blockIdx.x;
  unsigned* out = static_cast<unsigned*>(given.out) + stride * (STRIDE / 4);
  out[(word / 4 * WARP + chunk) * (BYTES_AT_ONCE / 4) + word % 4] = four.bytes;
  if (word == 0) reinterpret_cast<float2*>(given.scales)[stride * WARP + chunk] = four.scale;
}
