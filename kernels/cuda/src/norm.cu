// RMS norm and layer norm of x + skip + input_bias over groups of a row; that sum is also stored. One block per group.
#include "norm.cuh"

// skip, input_bias, bias, out and total may be null. Strides are in numbers. The first `grouped_rows` rows are also
// written in the layout that the next matmul reads; groups is 1 then.
struct NormArguments {
  const float* x;
  const float* skip;
  const float* input_bias;
  const float* weight;
  const float* bias;
  float* out;
  float* total;
  GroupedRows grouped;
  long long x_stride;
  long long skip_stride;
  long long out_stride;
  long long total_stride;
  int rows;
  int groups;
  int width;
  int grouped_rows;
  float epsilon;
};

constexpr int KEPT = 4;

__device__ __forceinline__ void store_row(float* row, int column, int width, bool aligned, const float (&four)[NORM_FOUR]) {
  if (aligned && column < width) {
    *reinterpret_cast<float4*>(row + column) = {four[0], four[1], four[2], four[3]};
    return;
  }
#pragma unroll
  for (int i = 0; i < NORM_FOUR; ++i)
    if (column + i < width) row[column + i] = four[i];
}

template <bool centred>
__device__ __forceinline__ void norm(const NormArguments& given) {
  const long long row = blockIdx.x / given.groups;
  const int first = (int)(blockIdx.x % given.groups) * given.width, width = given.width;
  auto bytes_of = [](const void* address) { return (unsigned long long)address; };
  const bool aligned =
      (width | given.x_stride | given.skip_stride | given.out_stride | given.total_stride) % NORM_FOUR == 0 &&
      (bytes_of(given.x) | bytes_of(given.skip) | bytes_of(given.out) | bytes_of(given.total)) % sizeof(float4) == 0;
  const NormRow<false> own{
      given.x + row * given.x_stride + first, given.skip ? given.skip + row * given.skip_stride + first : nullptr,
      given.input_bias ? given.input_bias + first : nullptr, width, aligned};
  const NormWeights<KEPT> weights(own, given.weight);  // loaded while the preceding kernels end
  wait_for_earlier();
  const bool grouped = given.grouped.bytes && row < given.grouped_rows;
  norm_row<centred>(
      own, given.weight, weights, given.bias, given.epsilon,
      [&](int column, const float(&sums)[NORM_FOUR]) {
        if (given.total) store_row(given.total + row * given.total_stride + first, column, width, aligned, sums);
      },
      [&](int column, const float(&found)[NORM_FOUR]) {
        if (given.out) store_row(given.out + row * given.out_stride + first, column, width, aligned, found);
        if (grouped && column / CHUNK < given.grouped.chunks)  // the same for all lanes of a warp
          store_four(given.grouped, row, column / CHUNK, threadIdx.x % (CHUNK / NORM_FOUR), {found[0], found[1], found[2], found[3]});
      });
}
