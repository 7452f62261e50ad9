// Elementwise functions of rows. A block processes 1,024 numbers of a row.
#include "functions.cuh"

// out = function(x), and for a gate out = function(x) * up, for the rows from first_row to rows. Strides are in
// numbers.
struct UnaryArguments {
  const float* x;
  const float* up;
  float* out;
  long long x_stride;
  long long up_stride;
  long long out_stride;
  int first_row;
  int rows;
  int width;
  float p[3];
};

// out = function(a, b). A constant has stride 0 and `period` numbers.
struct BinaryArguments {
  const float* a;
  const float* b;
  float* out;
  long long a_stride;
  long long b_stride;
  long long out_stride;
  int rows;
  int width;
  int a_period;
  int b_period;
};

constexpr int ELEMENT_THREADS = 256, ELEMENTS = 1024;

template <class F>
__device__ __forceinline__ void apply(const UnaryArguments& given) {
  const long long row = given.first_row + blockIdx.y;
  const int end = min(given.width, (int)(blockIdx.x + 1) * ELEMENTS);
  for (int i = blockIdx.x * ELEMENTS + threadIdx.x; i < end; i += ELEMENT_THREADS) {
    const float y = F::of(given.x[row * given.x_stride + i], given.p);
    given.out[row * given.out_stride + i] = given.up ? y * given.up[row * given.up_stride + i] : y;
  }
}

template <class F>
__device__ __forceinline__ void combine(const BinaryArguments& given) {
  const long long row = blockIdx.y;
  const int end = min(given.width, (int)(blockIdx.x + 1) * ELEMENTS);
  for (int i = blockIdx.x * ELEMENTS + threadIdx.x; i < end; i += ELEMENT_THREADS) {
    const float a = given.a[row * given.a_stride + i % given.a_period];
    const float b = given.b[row * given.b_stride + i % given.b_period];
    given.out[row * given.out_stride + i] = F::of(a, b);
  }
}
