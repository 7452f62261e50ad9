// The maximum rates of a GPU: memory reads, and multiplication in registers only. Results are written only so that the
// compiler keeps the code that computes them.
#include "portable.cuh"

struct SpeedArguments {
  const unsigned char* data;
  float* out;
  long long count;
};

constexpr int SPEED_THREADS = 256, AT_ONCE = 4;

// count: pieces of 16 bytes, which all threads read in turn.
__device__ __forceinline__ void read_memory(const SpeedArguments& given) {
  const long long threads = (long long)gridDim.x * SPEED_THREADS, first = blockIdx.x * (long long)SPEED_THREADS + threadIdx.x;
  unsigned seen = 0;
  for (long long i = first; i < given.count; i += AT_ONCE * threads) {
    unsigned words[AT_ONCE][4] = {};
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j)
      if (i + j * threads < given.count) load_once<4>(given.data + 16 * (i + j * threads), words[j]);
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) seen |= words[j][0] ^ words[j][1] ^ words[j][2] ^ words[j][3];
  }
  if (seen == 0x12345678u) given.out[0] = 1.0f;
}

// count: rounds. A warp computes PRODUCTS tiles of 16 by 8 by 16 in each round. Tiles do not depend on each other.
constexpr int PRODUCTS = 8;

__device__ __forceinline__ void multiply_bfloats(const SpeedArguments& given) {
  float sums[PRODUCTS][4] = {};
  const unsigned one = 0x3f803f80u + (threadIdx.x & 1), left[4] = {one, one, one, one}, right[2] = {one, one};
  for (long long i = 0; i < given.count; ++i)
#pragma unroll
    for (int j = 0; j < PRODUCTS; ++j) multiply_tiles(sums[j], left, right);
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < PRODUCTS; ++j) sum += sums[j][0] + sums[j][1] + sums[j][2] + sums[j][3];
  if (sum == -1.0f) given.out[0] = sum;
}

// The same for bytes, with tiles of 16 by 8 by 32.
__device__ __forceinline__ void multiply_many_bytes(const SpeedArguments& given) {
  int sums[PRODUCTS][4] = {};
  const int one = 0x01010101 + (int)(threadIdx.x & 1), left[4] = {one, one, one, one}, right[2] = {one, one};
  for (long long i = 0; i < given.count; ++i)
#pragma unroll
    for (int j = 0; j < PRODUCTS; ++j) multiply_bytes(sums[j], left, right, sums[j][0] & 1);
  int sum = 0;
#pragma unroll
  for (int j = 0; j < PRODUCTS; ++j) sum += sums[j][0] + sums[j][1] + sums[j][2] + sums[j][3];
  if (sum == -1) given.out[0] = 1.0f;
}

// The same for float32: a thread performs four times as many multiply-adds in each round.
__device__ __forceinline__ void multiply_floats(const SpeedArguments& given) {
  float sums[4 * PRODUCTS] = {}, factor = 1.0f + threadIdx.x;
  for (long long i = 0; i < given.count; ++i)
#pragma unroll
    for (int j = 0; j < 4 * PRODUCTS; ++j) sums[j] = fmaf(sums[j], factor, 1.0f);
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 4 * PRODUCTS; ++j) sum += sums[j];
  if (sum == -1.0f) given.out[0] = sum;
}
