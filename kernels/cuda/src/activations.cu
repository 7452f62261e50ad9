// Rows as products with block-quantised weights read them: the 32 lanes of a warp take 32 chunks of 32 columns at once
// (a stride), and what they read together lies together. Columns that only fill a stride up are zero.
#include "weights.cuh"

// `out`: per row `strides` times
//   float32: [8][32 lanes][4 columns of the lane's chunk]
//   bfloats: [1,024 columns], as they are, of bfloat16
//   bytes:   [2][32 lanes][16 bytes], the chunk's columns in the order in which words of codes come apart.
// `scales`: of bytes per row and chunk {scale, sum of the bytes}. Strides of rows are in numbers.
struct ActivationArguments {
  const float* x;
  void* out;
  float* scales;
  long long x_stride;
  int first_row;
  int rows;
  int width;
  int strides;
};

constexpr int STRIDE = WARP * CHUNK;
constexpr int FLOATS_AT_ONCE = 4, BYTES_AT_ONCE = 16;

// A warp per stride: grid (strides, rows from first_row on).
__device__ __forceinline__ void arrange_floats(const ActivationArguments& given) {
  const long long row = given.first_row + blockIdx.y;
  const int lane = threadIdx.x, first = blockIdx.x * STRIDE;
  const float* x = given.x + row * given.x_stride;
  float* out = static_cast<float*>(given.out) + (row * given.strides + blockIdx.x) * STRIDE;
  for (int chunk = 0; chunk < WARP; ++chunk) {  // a lane per column: neighbours are read together
    const int column = first + chunk * CHUNK + lane;
    const int place = (lane / FLOATS_AT_ONCE * WARP + chunk) * FLOATS_AT_ONCE + lane % FLOATS_AT_ONCE;
    out[place] = column < given.width ? x[column] : 0.0f;
  }
}

__device__ __forceinline__ void arrange_bfloats(const ActivationArguments& given) {
  const long long row = given.first_row + blockIdx.y;
  const int first = blockIdx.x * STRIDE;
  const float* x = given.x + row * given.x_stride;
  unsigned* out = static_cast<unsigned*>(given.out) + (row * given.strides * STRIDE + first) / 2;
  for (int pair = threadIdx.x; pair < STRIDE / 2; pair += WARP) {
    const int column = first + 2 * pair;
    const float low = column < given.width ? x[column] : 0.0f, high = column + 1 < given.width ? x[column + 1] : 0.0f;
    out[pair] = bfloat_pair(low, high);
  }
}

// Where column `i` of a chunk lies among its 32 bytes: of 4-bit codes a word holds the even columns in the low
// nibbles of its bytes and the odd ones in the high nibbles.
template <int bits>
__device__ __forceinline__ int byte_of_column(int i) {
  return bits == 8 ? i : i / 8 * 8 + i % 2 * 4 + i % 8 / 2;
}

template <int bits>
__device__ __forceinline__ void arrange_bytes(const ActivationArguments& given) {
  const long long row = given.first_row + blockIdx.y;
  const int lane = threadIdx.x, first = blockIdx.x * STRIDE;
  const float* x = given.x + row * given.x_stride;
  signed char* out = static_cast<signed char*>(given.out) + (row * given.strides + blockIdx.x) * STRIDE;
  float* scales = given.scales + (row * given.strides + blockIdx.x) * WARP * 2;
  for (int chunk = 0; chunk < WARP; ++chunk) {
    const int column = first + chunk * CHUNK + lane;
    const float number = column < given.width ? x[column] : 0.0f;
    float largest = fabsf(number);
#pragma unroll
    for (int distance = WARP / 2; distance; distance /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
    const float scale = largest / 127.0f;
    const int byte = scale > 0.0f ? (int)rintf(number / scale) : 0;
    int sum = byte;
#pragma unroll
    for (int distance = WARP / 2; distance; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    const int place = byte_of_column<bits>(lane);
    out[(place / BYTES_AT_ONCE * WARP + chunk) * BYTES_AT_ONCE + place % BYTES_AT_ONCE] = (signed char)byte;
    if (lane == 0) scales[2 * chunk] = scale, scales[2 * chunk + 1] = (float)sum;
  }
}
