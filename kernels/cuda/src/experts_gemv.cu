// Matmuls of a few pairs with the matrices of their experts: every weight is read once for up to eight pairs of its
// expert. A warp computes `count` adjacent outputs of every pair of a group. A pair's bits do not depend on the other
// pairs.
#include "experts.cuh"
#include "gemv.cuh"

constexpr int EXPERT_WARPS = 4;

template <class Sums, class Activation, int tokens, int count>
__device__ __forceinline__ void multiply_group(const ExpertArguments& given, const PairGroup& group) {
  const int lane = threadIdx.x % WARP;
  const int first_output = ((int)blockIdx.x * EXPERT_WARPS + (int)threadIdx.x / WARP) * count;
  // One lane per pair. Lanes without a pair repeat the last pair.
  const int pair = given.ordered[group.first + min(lane, group.count - 1)], source = pair / given.sharing;
  int sources[tokens];
#pragma unroll
  for (int token = 0; token < tokens; ++token) sources[token] = __shfl_sync(ALL_LANES, source, token);
  float sums[count][tokens] = {}, own[count];
  const long long first_row = (long long)group.expert * given.outputs;
  Sums::add(
      given.matrix, {given.x, given.scales, given.strides},
      [&](int output) { return first_row + min(first_output + output, given.outputs - 1); },
      [&](int token) { return (long long)sources[token]; }, sums);
#pragma unroll
  for (int output = 0; output < count; ++output)
#pragma unroll
    for (int token = 0; token < tokens; ++token) {
      const float sum = warp_sum(sums[output][token]);
      if (token == 0 || lane == token) own[output] = sum;
    }
  if (lane >= group.count) return;
#pragma unroll
  for (int output = 0; output < count; output += 2)
    finish_pair<Activation>(given, pair, group.expert, first_output + output, own[output], own[output + 1]);
}

// Groups of at most `most` pairs. Grid (outputs / (4 warps * count), groups).
template <class Sums, class Activation, int most, int count>
__device__ __forceinline__ void expert_product(const ExpertArguments& given) {
  const PairGroup group = group_of_block(given);
  if (group.count == 0) return;
  if (most == 1 || group.count == 1) return multiply_group<Sums, Activation, 1, count>(given, group);
  if constexpr (most >= 2)
    if (most == 2 || group.count == 2) return multiply_group<Sums, Activation, 2, count>(given, group);
  if constexpr (most >= 4)
    if (most == 4 || group.count <= 4) return multiply_group<Sums, Activation, 4, count>(given, group);
  if constexpr (most >= 8) multiply_group<Sums, Activation, 8, count>(given, group);
}
