// Matmuls of many pairs with the matrices of their experts, by tensor cores: like gemm.cu, but rows of activations are
// gathered.
#include "experts.cuh"
#include "gemm.cuh"

// x: bfloat16. Grid (outputs / Shape::OUTPUTS, groups of up to Shape::ROWS pairs).
template <class Source, class Shape, class Activation>
__device__ __forceinline__ void expert_gemm(const ExpertArguments& given) {
  SHARED(int, sources, Shape::ROWS);
  const PairGroup group = group_of_block(given);
  if (group.count == 0) return;
  const int* ordered = given.ordered + group.first;
  for (int i = threadIdx.x; i < group.count; i += Shape::THREADS) sources[i] = ordered[i] / given.sharing;
  __syncthreads();  // the numbers of all rows are written
  multiply_block<Source, Shape>(
      given.matrix, (long long)group.expert * given.outputs, given.outputs, blockIdx.x * Shape::OUTPUTS,
      static_cast<const bfloat_bits*>(given.x), (long long)given.strides * (WARP * CHUNK), group.count,
      [&](int i) { return (long long)sources[i]; },
      [&](int i, int output, float a, float b) {
        finish_pair<Activation>(given, ordered[i], group.expert, output, a, b);
      });
}
