// Sums and maxima over the threads of a warp or of a block, in a fixed order.
#pragma once
#include "portable.cuh"

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = WARP / 2; distance; distance /= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
  return x;
}

__device__ __forceinline__ float warp_maximum(float x) {
#pragma unroll
  for (int distance = WARP / 2; distance; distance /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, distance));
  return x;
}

// The sum over all threads of a block of `warps` warps, returned to all of them.
template <int warps>
__device__ __forceinline__ float block_sum(float x) {
  SHARED(float, sums, warps);
  x = warp_sum(x);
  __syncthreads();  // all threads have read an earlier sum
  if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = x;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < warps; ++warp) total += sums[warp];
  return total;
}
