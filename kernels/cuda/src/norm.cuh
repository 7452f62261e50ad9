// The norm of a row, by a block of 512 threads: thread i has columns 4 i to 4 i + 3 of every 2,048, and sums are
// combined in a fixed order. So kernels that normalise a row themselves, instead of reading the result of norm.cu,
// produce the same bits.
#pragma once
#include "groups.cuh"
#include "reduce.cuh"

constexpr int NORM_WARPS = 16, NORM_THREADS = NORM_WARPS * WARP, NORM_FOUR = 4, NORM_STRIDE = NORM_THREADS * NORM_FOUR;

// plain: the row is only x, can be read four columns at a time, and all of its columns stay in registers.
template <bool plain>
struct NormRow {
  const float* x;
  const float* skip;
  const float* input_bias;
  int width;
  bool aligned;

  // Columns of a row or of a constant; columns past the last one are 0. The numbers are not used here, so that many
  // reads are in flight at the same time.
  __device__ __forceinline__ void read(const float* from, int column, float (&found)[NORM_FOUR]) const {
    if (plain || aligned) {
      const float4 four = column < width ? *reinterpret_cast<const float4*>(from + column) : float4{0.0f, 0.0f, 0.0f, 0.0f};
      found[0] = four.x, found[1] = four.y, found[2] = four.z, found[3] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < NORM_FOUR; ++i) found[i] = column + i < width ? from[column + i] : 0.0f;
    }
  }
  __device__ __forceinline__ void add(const float* from, int column, float (&sums)[NORM_FOUR]) const {
    float others[NORM_FOUR];
    read(from, column, others);
#pragma unroll
    for (int i = 0; i < NORM_FOUR; ++i) sums[i] += others[i];
  }
};

// The columns of a thread stay in registers for this number of strides of 2,048; other columns are read again.
template <int strides>
struct NormWeights {
  float of[strides][NORM_FOUR];

  // No kernel writes the weights, so they can be requested before any wait.
  template <bool plain>
  __device__ __forceinline__ NormWeights(const NormRow<plain>& row, const float* weight) {
#pragma unroll
    for (int i = 0; i < strides; ++i)
      if (i * NORM_STRIDE < row.width) row.read(weight, i * NORM_STRIDE + threadIdx.x * NORM_FOUR, of[i]);
  }
};

// Call visit_sum(column, sums) and then visit(column, normed) for all columns of a thread, with all threads of a warp
// together, up to whole strides of 2,048; columns past the last one are 0. bias: null = none.
template <bool centred, bool plain, int strides, class VisitSum, class Visit>
__device__ __forceinline__ void norm_row(
    const NormRow<plain>& row, const float* weight, const NormWeights<strides>& weights, const float* bias, float epsilon,
    const VisitSum& visit_sum, const Visit& visit) {
  const int width = row.width, own = threadIdx.x * NORM_FOUR;
  float kept[strides][NORM_FOUR];
#pragma unroll
  for (int i = 0; i < strides; ++i)
    if (i * NORM_STRIDE < width) row.read(row.x, i * NORM_STRIDE + own, kept[i]);
  if (!plain && row.skip) {
    float others[strides][NORM_FOUR];
#pragma unroll
    for (int i = 0; i < strides; ++i)
      if (i * NORM_STRIDE < width) row.read(row.skip, i * NORM_STRIDE + own, others[i]);
#pragma unroll
    for (int i = 0; i < strides; ++i)
#pragma unroll
      for (int j = 0; j < NORM_FOUR; ++j) kept[i][j] += others[i][j];
  }
  if (!plain && row.input_bias) {
#pragma unroll
    for (int i = 0; i < strides; ++i)
      if (i * NORM_STRIDE < width) row.add(row.input_bias, i * NORM_STRIDE + own, kept[i]);
  }
  auto each = [&](auto look) {
#pragma unroll
    for (int i = 0; i < strides; ++i)
      if (i * NORM_STRIDE < width) look(i * NORM_STRIDE + own, kept[i], weights.of[i]);
    if constexpr (!plain) {
      for (int start = strides * NORM_STRIDE; start < width; start += NORM_STRIDE) {
        float sums[NORM_FOUR], others[NORM_FOUR];
        row.read(row.x, start + own, sums), row.read(weight, start + own, others);
        if (row.skip) row.add(row.skip, start + own, sums);
        if (row.input_bias) row.add(row.input_bias, start + own, sums);
        look(start + own, sums, others);
      }
    }
  };
  float mean = 0.0f, squares = 0.0f;
  if (centred) {
    each([&](int, const float(&sums)[NORM_FOUR], const float(&)[NORM_FOUR]) { mean += (sums[0] + sums[1]) + (sums[2] + sums[3]); });
    mean = block_sum<NORM_WARPS>(mean) / width;
  }
  each([&](int column, const float(&sums)[NORM_FOUR], const float(&)[NORM_FOUR]) {
    visit_sum(column, sums);
#pragma unroll
    for (int i = 0; i < NORM_FOUR; ++i) {
      const float apart = !centred ? sums[i] : column + i < width ? sums[i] - mean : 0.0f;
      squares = fmaf(apart, apart, squares);
    }
  });
  const float factor = 1.0f / sqrtf(block_sum<NORM_WARPS>(squares) / width + epsilon);
  each([&](int column, const float(&sums)[NORM_FOUR], const float(&own_weights)[NORM_FOUR]) {
    float found[NORM_FOUR];
    [[maybe_unused]] float biases[NORM_FOUR] = {};
    if (centred && bias) row.read(bias, column, biases);
#pragma unroll
    for (int i = 0; i < NORM_FOUR; ++i) {
      if constexpr (centred) found[i] = (sums[i] - mean) * factor * own_weights[i] + biases[i];
      else found[i] = sums[i] * factor * own_weights[i];
    }
    visit(column, found);
  });
}
