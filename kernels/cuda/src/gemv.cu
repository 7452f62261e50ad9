// Matmuls of a few rows of activations with a matrix: every weight is read once for up to eight rows.
//
// A warp computes `count` adjacent outputs of every row. The lanes are added in a fixed order, so that a row's bits do
// not depend on the other rows or their number.
#include "gemv.cuh"
#include "results.cuh"

// out = x . weight (+ bias) (+ addend). x and scales: see activations.cu.
struct ProductArguments {
  BlockMatrix matrix;
  const void* x;
  const float* scales;
  const float* bias;
  const float* addend;
  float* out;
  long long addend_stride;
  long long out_stride;
  int rows;
  int strides;
  int outputs;
};

constexpr int PRODUCT_WARPS = 4;

template <int count, int tokens>
__device__ __forceinline__ void finish_all(
    const ProductArguments& given, int first_output, int first_row, float (&sums)[count][tokens]) {
#pragma unroll
  for (int output = 0; output < count; ++output)
#pragma unroll
    for (int token = 0; token < tokens; ++token) {
      const float sum = warp_sum(sums[output][token]);
      if (threadIdx.x % WARP == 0 && first_output + output < given.outputs && first_row + token < given.rows)
        store_result(given, first_row + token, first_output + output, sum);
    }
}

// Grid (outputs / (4 warps * count), rows / tokens).
template <class Sums, int tokens, int count>
__device__ __forceinline__ void product(const ProductArguments& given) {
  const int first_output = ((int)blockIdx.x * PRODUCT_WARPS + (int)threadIdx.x / WARP) * count;
  const int first_row = blockIdx.y * tokens;
  float sums[count][tokens] = {};
  Sums::add(
      given.matrix, {given.x, given.scales, given.strides},
      [&](int output) { return (long long)min(first_output + output, given.outputs - 1); },
      [&](int token) { return (long long)min(first_row + token, given.rows - 1); }, sums);
  finish_all(given, first_output, first_row, sums);
}

template <class Reader, int tokens, int count>
__device__ __forceinline__ void product_exact(const ProductArguments& given) {
  product<exact_sums<Reader>, tokens, count>(given);
}

template <class T, int tokens, int count>
__device__ __forceinline__ void product_dense(const ProductArguments& given) {
  product<dense_sums<T>, tokens, count>(given);
}
