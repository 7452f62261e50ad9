// What becomes of a product's sum: bias and addend, which may be 0, then where it is stored. Arguments has them and their strides.
#pragma once
#include "portable.cuh"

template <class Arguments>
__device__ __forceinline__ void store_result(const Arguments& given, long long row, int output, float sum) {
  if (given.bias) sum += given.bias[output];
  if (given.addend) sum += given.addend[row * given.addend_stride + output];
  given.out[row * given.out_stride + output] = sum;
}
