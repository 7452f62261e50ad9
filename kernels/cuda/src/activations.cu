// Rows as products with block-quantised weights read them: the 32 lanes of a warp take 32 chunks of 32 columns at once
// (a stride), and what they read together lies together. Columns that only fill a stride up are zero.
#include "weights.cuh"

// `out`: per row `strides` times
//   floats:  the chunks of `columns` columns that lanes take, [1,024 / (32 columns)][columns / 4][32 lanes][4 columns]
//   bfloats: [1,024 columns], as they are, of bfloat16
//   bytes:   [2][32 lanes][16 bytes]
// `scales`: of bytes per row and chunk {scale, sums of the bytes}: two numbers of 16 bits, of the chunk's halves.
// Strides of rows are in numbers.
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
template <int columns>
__device__ __forceinline__ void arrange_floats(const ActivationArguments& given) {
  const long long row = given.first_row + blockIdx.y;
  const int first = blockIdx.x * STRIDE;
  const float* x = given.x + row * given.x_stride;
  float* out = static_cast<float*>(given.out) + row * given.strides * STRIDE + first;
  for (int i = threadIdx.x; i < STRIDE; i += WARP) {  // a lane per column: neighbours are read together
    const int lane = i / columns % WARP, four = i % columns / FLOATS_AT_ONCE;
    const int place = i / (columns * WARP) * (columns * WARP) + (four * WARP + lane) * FLOATS_AT_ONCE + i % FLOATS_AT_ONCE;
    out[place] = first + i < given.width ? x[first + i] : 0.0f;
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
    int sum = byte;  // of the lane's half
#pragma unroll
    for (int distance = WARP / 4; distance; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    const int other = __shfl_xor_sync(ALL_LANES, sum, WARP / 2);
    out[(lane / BYTES_AT_ONCE * WARP + chunk) * BYTES_AT_ONCE + lane % BYTES_AT_ONCE] = (signed char)byte;
    const unsigned sums = ((unsigned)sum & 0xffffu) | (unsigned)other << 16;
    if (lane == 0) scales[2 * chunk] = scale, scales[2 * chunk + 1] = __uint_as_float(sums);
  }
}
