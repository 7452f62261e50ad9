// RMS norm and layer norm of x + skip + input_bias over groups of a row, and that sum itself. A block per group.
#include "reduce.cuh"

// Absent: skip, input_bias, bias, out, total may be 0. Strides are in numbers.
struct NormArguments {
  const float* x;
  const float* skip;
  const float* input_bias;
  const float* weight;
  const float* bias;
  float* out;
  float* total;
  long long x_stride;
  long long skip_stride;
  long long out_stride;
  long long total_stride;
  int rows;
  int groups;
  int width;
  float epsilon;
};

constexpr int NORM_WARPS = 8;

template <bool centred>
__device__ __forceinline__ void norm(const NormArguments& given) {
  const long long row = blockIdx.x / given.groups;
  const int first = (int)(blockIdx.x % given.groups) * given.width;
  const float* x = given.x + row * given.x_stride + first;
  const float* skip = given.skip ? given.skip + row * given.skip_stride + first : nullptr;
  const float* input_bias = given.input_bias ? given.input_bias + first : nullptr;
  auto number = [&](int i) {
    float sum = x[i];
    if (skip) sum += skip[i];
    if (input_bias) sum += input_bias[i];
    return sum;
  };
  float mean = 0.0f, squares = 0.0f;
  if (centred) {
    for (int i = threadIdx.x; i < given.width; i += NORM_WARPS * WARP) mean += number(i);
    mean = block_sum<NORM_WARPS>(mean) / given.width;
  }
  for (int i = threadIdx.x; i < given.width; i += NORM_WARPS * WARP) {
    const float s = number(i);
    if (given.total) given.total[row * given.total_stride + first + i] = s;
    squares = fmaf(s - mean, s - mean, squares);
  }
  const float factor = 1.0f / sqrtf(block_sum<NORM_WARPS>(squares) / given.width + given.epsilon);
  if (!given.out) return;
  float* out = given.out + row * given.out_stride + first;
  for (int i = threadIdx.x; i < given.width; i += NORM_WARPS * WARP) {
    const float scaled = (number(i) - mean) * factor * given.weight[i];
    out[i] = centred && given.bias ? scaled + given.bias[i] : scaled;
  }
}
