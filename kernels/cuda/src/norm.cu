// RMS norm and layer norm of x + skip + input_bias over groups of a row, and that sum itself. A block per group.
#include "groups.cuh"
#include "reduce.cuh"

// Absent: skip, input_bias, bias, out, total may be 0. Strides are in numbers. The first `grouped_rows` rows also go where
// the next product reads them; groups is 1 then.
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

// Sums of four neighbouring columns that a thread keeps, of as many strides of 1,024 columns: others are read again.
constexpr int NORM_WARPS = 8, NORM_THREADS = NORM_WARPS * WARP, FOUR = 4, NORM_STRIDE = NORM_THREADS * FOUR, KEPT = 8;

struct NormRow {
  const float* x;
  const float* skip;
  const float* input_bias;
  int width;
  bool aligned;

  __device__ __forceinline__ void add(const float* from, int column, float (&sums)[FOUR]) const {
    if (aligned) {
      const float4 four = *reinterpret_cast<const float4*>(from + column);
      sums[0] += four.x, sums[1] += four.y, sums[2] += four.z, sums[3] += four.w;
    } else {
#pragma unroll
      for (int i = 0; i < FOUR; ++i)
        if (column + i < width) sums[i] += from[column + i];
    }
  }
  // A constant of as many columns.
  __device__ __forceinline__ void read_weights(const float* from, int column, float (&found)[FOUR]) const {
#pragma unroll
    for (int i = 0; i < FOUR; ++i) found[i] = 0.0f;
    if (column < width) add(from, column, found);
  }
  // Those behind the last column are 0.
  __device__ __forceinline__ void read(int column, float (&sums)[FOUR]) const {
#pragma unroll
    for (int i = 0; i < FOUR; ++i) sums[i] = 0.0f;
    if (column >= width) return;
    add(x, column, sums);
    if (skip) add(skip, column, sums);
    if (input_bias) add(input_bias, column, sums);
  }
};

__device__ __forceinline__ void store_row(float* row, int column, int width, bool aligned, const float (&four)[FOUR]) {
  if (aligned && column < width) {
    *reinterpret_cast<float4*>(row + column) = {four[0], four[1], four[2], four[3]};
    return;
  }
#pragma unroll
  for (int i = 0; i < FOUR; ++i)
    if (column + i < width) row[column + i] = four[i];
}

template <bool centred>
__device__ __forceinline__ void norm(const NormArguments& given) {
  const long long row = blockIdx.x / given.groups;
  const int first = (int)(blockIdx.x % given.groups) * given.width, width = given.width;
  auto bytes_of = [](const void* place) { return (unsigned long long)place; };
  const bool aligned =
      (width | given.x_stride | given.skip_stride | given.out_stride | given.total_stride) % FOUR == 0 &&
      (bytes_of(given.x) | bytes_of(given.skip) | bytes_of(given.out) | bytes_of(given.total)) % sizeof(float4) == 0;
  const NormRow own{given.x + row * given.x_stride + first, given.skip ? given.skip + row * given.skip_stride + first : nullptr,
                    given.input_bias ? given.input_bias + first : nullptr, width, aligned};
  float kept[KEPT][FOUR], weights[KEPT][FOUR];
#pragma unroll
  for (int i = 0; i < KEPT; ++i)  // weights come while the kernels before end
    if (i * NORM_STRIDE < width) own.read_weights(given.weight, i * NORM_STRIDE + threadIdx.x * FOUR, weights[i]);
  wait_for_earlier();
#pragma unroll
  for (int i = 0; i < KEPT; ++i)
    if (i * NORM_STRIDE < width) own.read(i * NORM_STRIDE + threadIdx.x * FOUR, kept[i]);
  // visit(column, sums, weights) for all columns of a thread.
  auto each = [&](auto visit) {
#pragma unroll
    for (int i = 0; i < KEPT; ++i)
      if (i * NORM_STRIDE < width) visit(i * NORM_STRIDE + (int)threadIdx.x * FOUR, kept[i], weights[i]);
    for (int start = KEPT * NORM_STRIDE; start < width; start += NORM_STRIDE) {
      float sums[FOUR], others[FOUR];
      own.read(start + threadIdx.x * FOUR, sums), own.read_weights(given.weight, start + threadIdx.x * FOUR, others);
      visit(start + (int)threadIdx.x * FOUR, sums, others);
    }
  };
  float mean = 0.0f, squares = 0.0f;
  if (centred) {
    each([&](int, const float(&sums)[FOUR], const float(&)[FOUR]) { mean += (sums[0] + sums[1]) + (sums[2] + sums[3]); });
    mean = block_sum<NORM_WARPS>(mean) / width;
  }
  each([&](int column, const float(&sums)[FOUR], const float(&)[FOUR]) {
    if (given.total) store_row(given.total + row * given.total_stride + first, column, width, aligned, sums);
#pragma unroll
    for (int i = 0; i < FOUR; ++i) {
      const float apart = column + i < width ? sums[i] - mean : 0.0f;
      squares = fmaf(apart, apart, squares);
    }
  });
  const float factor = 1.0f / sqrtf(block_sum<NORM_WARPS>(squares) / width + given.epsilon);
  const bool grouped = given.grouped.bytes && row < given.grouped_rows;
  each([&](int column, const float(&sums)[FOUR], const float(&own_weights)[FOUR]) {
    float found[FOUR], biases[FOUR] = {};
    if (centred && given.bias) own.read_weights(given.bias, column, biases);
#pragma unroll
    for (int i = 0; i < FOUR; ++i) found[i] = (sums[i] - mean) * factor * own_weights[i] + biases[i];
    if (given.out) store_row(given.out + row * given.out_stride + first, column, width, aligned, found);
    if (grouped)  // all threads of a warp are here: columns that fill a stride up are zero
      store_four(given.grouped, row, column / CHUNK, threadIdx.x % (CHUNK / FOUR), {found[0], found[1], found[2], found[3]});
  });
}
