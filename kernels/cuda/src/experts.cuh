// Common parts of the kernels for mixtures of experts. A pair is a token and one of the experts that it is sent to. Its
// number is token * per_token + rank, where the best expert has rank 0. Rows between the two matmuls are in the order
// of pairs, so that the location of a token's rows does not depend on where they were computed.
#pragma once
#include "functions.cuh"
#include "weights.cuh"

// Some pairs of one expert, with the numbers ordered[first] to ordered[first + count - 1]. If count is 0, the group is
// empty.
struct PairGroup {
  int expert;
  int first;
  int count;
  int unused;
};

// Matmuls of pairs with the matrices of their experts, which are stored one after another with `outputs` rows each. x
// and scales: see activations.cu; `sharing` consecutive pairs read the same row of x. bias: [experts][outputs] or
// null. out: one row per pair. p: parameters of the activation. The groups of the rows that start at first_row are
// numbered from first_row * per_token.
struct ExpertArguments {
  BlockMatrix matrix;
  const void* x;
  const float* scales;
  const float* bias;
  float* out;
  const int* ordered;
  const PairGroup* groups;
  long long out_stride;
  int first_row;
  int per_token;
  int sharing;
  int strides;
  int outputs;
  float p[3];
};

// One load, the same for all threads of a block.
__device__ __forceinline__ PairGroup group_of_block(const ExpertArguments& given) {
  const long long first = (long long)given.first_row * given.per_token;
  const uint4 four = reinterpret_cast<const uint4*>(given.groups)[first + blockIdx.y];
  return {(int)four.x, (int)four.y, (int)four.z, 0};
}

// The operation on two adjacent outputs, the first of which is even. `out` is the pair's row.
template <class F>
struct plain {
  __device__ __forceinline__ static void store(const ExpertArguments& given, float* out, int output, float a, float b) {
    out[output] = F::of(a, given.p);
    if (output + 1 < given.outputs) out[output + 1] = F::of(b, given.p);
  }
};

// Outputs alternate between outputs of a gate and the outputs that the gate multiplies. p: alpha, beta, limit.
struct swiglu {
  __device__ __forceinline__ static void store(const ExpertArguments& given, float* out, int output, float a, float b) {
    const float gate = smaller(a, given.p[2]), up = smaller(larger(b, -given.p[2]), given.p[2]);
    out[output / 2] = unary::quick_gelu::of(gate, given.p) * (up + given.p[1]);
  }
};

template <class F>
struct gated {
  __device__ __forceinline__ static void store(const ExpertArguments& given, float* out, int output, float a, float b) {
    out[output / 2] = F::of(a, given.p) * b;
  }
};

template <class Activation>
__device__ __forceinline__ void finish_pair(
    const ExpertArguments& given, int pair, int expert, int output, float a, float b) {
  if (output >= given.outputs) return;
  if (given.bias) {
    const float* bias = given.bias + (long long)expert * given.outputs + output;
    a += bias[0];
    if (output + 1 < given.outputs) b += bias[1];
  }
  Activation::store(given, given.out + pair * given.out_stride, output, a, b);
}
