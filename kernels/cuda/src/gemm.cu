// Matmuls of many rows of activations with a matrix, by tensor cores.
#include "gemm.cuh"
#include "results.cuh"

// x: bfloat16 [rows][x_stride], with zeros in padding columns. The other fields are the same as in ProductArguments.
// Rows from first_row to rows are computed.
struct GemmArguments {
  BlockMatrix matrix;
  const void* x;
  const float* bias;
  const float* addend;
  float* out;
  long long x_stride;
  long long addend_stride;
  long long out_stride;
  int first_row;
  int rows;
  int outputs;
};

// Grid (outputs / Shape::OUTPUTS, rows / Shape::ROWS).
template <class Source, class Shape>
__device__ __forceinline__ void gemm(const GemmArguments& given) {
  const int first_row = given.first_row + blockIdx.y * Shape::ROWS;
  auto finish = [&](int i, int output, float sum) {
    if (output < given.outputs) store_result(given, first_row + i, output, sum);
  };
  multiply_block<Source, Shape>(
      given.matrix, 0, given.outputs, blockIdx.x * Shape::OUTPUTS, static_cast<const bfloat_bits*>(given.x),
      given.x_stride, given.rows - first_row, [&](int i) { return (long long)(first_row + i); },
      [&](int i, int output, float a, float b) { finish(i, output, a), finish(i, output + 1, b); });
}
