// Rows of activations as int8 for tensor cores. Eight rows form a group. The data that a warp reads for one chunk of 32
// columns of a group is contiguous in memory.
//
//   bytes:  [groups of 8 rows][chunks][8 rows][32 bytes], of which lane 4 g + t in `multiply_bytes` has eight adjacent
//           ones: columns 4 t to 4 t + 3, and those 16 columns further
//   scales: [groups][chunks][8 rows] {scale, sums of the bytes}: two 16-bit numbers, of the chunk's halves
//
// A row has whole strides of 1,024 columns, with zeros in padding columns. Missing rows of a group hold arbitrary
// numbers.
#pragma once
#include "weights.cuh"

constexpr int GROUP = 8, STRIDE_CHUNKS = 32;
// Chunks of a stride are added in 32 phases: chunk c to the sum of phase c % 32, in order. Phases p, p + 8, p + 16 and
// p + 24 are then added in order, and the resulting eight sums in pairs. Each of the warps that share a row makes four
// passes over it.
constexpr int PHASES = 8, PASSES = STRIDE_CHUNKS / PHASES;

// The location of grouped rows; null = no kernel reads them.
struct GroupedRows {
  void* bytes;
  float* scales;
  int chunks;
  int unused;
};

__device__ __forceinline__ long long chunk_index(const GroupedRows& given, long long row, int chunk) {
  return (row / GROUP * given.chunks + chunk) * GROUP + row % GROUP;
}

// NaN counts as infinite: no byte represents NaN, but an infinite scale makes the results of the row NaN.
__device__ __forceinline__ float magnitude(float x) { return x == x ? fabsf(x) : __uint_as_float(0x7f800000u); }

// Rounds the numbers of a chunk, given their largest magnitude.
struct Rounding {
  float scale;
  float per_scale;  // 0 if numbers cannot be rounded
  __device__ __forceinline__ explicit Rounding(float largest) : scale(largest * (1.0f / 127.0f)) {
    per_scale = scale > 0.0f && scale < 3.0e38f ? reciprocal(scale) : 0.0f;
  }
  __device__ __forceinline__ int of(float x) const { return per_scale > 0.0f ? (int)rintf(x * per_scale) : 0; }
};

// A scale and the sums of a chunk's halves, as they are stored.
__device__ __forceinline__ float2 scale_and_sums(float scale, int first, int second) {
  return {scale, __uint_as_float(((unsigned)first & 0xffffu) | (unsigned)second << 16)};
}

// Four adjacent columns of a lane as int8. Eight adjacent lanes have a chunk, the first four of them its first half.
struct RoundedFour {
  static constexpr int LANES = CHUNK / 4;
  unsigned bytes;
  float2 scale;  // valid in the first lane of a chunk

  __device__ __forceinline__ explicit RoundedFour(const float4& x) {
    float largest = fmaxf(fmaxf(magnitude(x.x), magnitude(x.y)), fmaxf(magnitude(x.z), magnitude(x.w)));
#pragma unroll
    for (int distance = LANES / 2; distance; distance /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
    const Rounding rounding(largest);
    const int a = rounding.of(x.x), b = rounding.of(x.y), c = rounding.of(x.z), d = rounding.of(x.w);
    int sum = a + b + c + d;  // of the half
#pragma unroll
    for (int distance = LANES / 4; distance; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    const int other = __shfl_xor_sync(ALL_LANES, sum, LANES / 2);
    bytes = (a & 255u) | (b & 255u) << 8 | (c & 255u) << 16 | (unsigned)d << 24;
    scale = scale_and_sums(rounding.scale, sum, other);
  }
};

// Store four columns as int8; `word` is their index in the chunk.
__device__ __forceinline__ void store_four(const GroupedRows& given, long long row, int chunk, int word, const float4& x) {
  const RoundedFour four(x);
  const long long index = chunk_index(given, row, chunk);
  static_cast<unsigned*>(given.bytes)[index * RoundedFour::LANES + word % 4 * 2 + word / 4] = four.bytes;
  if (word == 0) reinterpret_cast<float2*>(given.scales)[index] = four.scale;
}

// Store one column of a lane; a warp has the chunk.
__device__ __forceinline__ void store_one(const GroupedRows& given, long long row, int chunk, float x) {
  const int lane = threadIdx.x % WARP;
  float largest = magnitude(x);
#pragma unroll
  for (int distance = WARP / 2; distance; distance /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
  const Rounding rounding(largest);
  const int own = rounding.of(x);
  int sum = own;
#pragma unroll
  for (int distance = WARP / 4; distance; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
  const int other = __shfl_xor_sync(ALL_LANES, sum, WARP / 2);
  const long long index = chunk_index(given, row, chunk);
  static_cast<signed char*>(given.bytes)[index * CHUNK + lane % 16 / 4 * 8 + lane / 16 * 4 + lane % 4] = (signed char)own;
  if (lane == 0) reinterpret_cast<float2*>(given.scales)[index] = scale_and_sums(rounding.scale, sum, other);
}
