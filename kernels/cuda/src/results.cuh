// Add the bias and the addend, which may be null, to the sum of a product, and store it. Arguments contains the bias,
// the addend and their strides.
#pragma once
#include "portable.cuh"

template <class Arguments>
__device__ __forceinline__ void store_result(const Arguments& given, long long row, int output, float sum) {
  if (given.bias) sum += given.bias[output];
  if (given.addend) sum += given.addend[row * given.addend_stride + output];
  given.out[row * given.out_stride + output] = sum;
}
