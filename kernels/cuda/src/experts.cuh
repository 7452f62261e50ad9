// Mixtures of experts: what their kernels share. A pair is a token and one of the experts that it is sent to; its
// number is token * per_token + rank, the best expert having rank 0. Rows of what lies between the two products stand
// in the order of pairs, so a token finds its own wherever they were computed.
#pragma once
#include "functions.cuh"
#include "weights.cuh"

// Some pairs of one expert: the numbers ordered[first] to ordered[first + count - 1]. Where count is 0 there is none.
struct PairGroup {
  int expert;
  int first;
  int count;
  int unused;
};

// Products of pairs with the matrices of their experts, which lie one after the other: outputs rows each.
// x and scales: see activations.cu; `sharing` pairs after another read the same row of it. bias: [experts][outputs] or
// 0. out: a row per pair. p: of the activation. The groups of rows from first_row on begin at first_row * per_token.
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

// What becomes of two neighbouring outputs, the first one even; `out` is the pair's row.
template <class F>
struct plain {
  __device__ __forceinline__ static void store(const ExpertArguments& given, float* out, int output, float a, float b) {
    out[output] = F::of(a, given.p);
    if (output + 1 < given.outputs) out[output + 1] = F::of(b, given.p);
  }
};

// Outputs are in turn those of a gate and of what it gates. p: alpha, beta, limit.
struct swiglu {
  __device__ __forceinline__ static void store(const ExpertArguments& given, float* out, int output, float a, float b) {
    const float gate = smaller(a, given.p[2]), up = smaller(larger(b, -given.p[2]), given.p[2]);
    out[output / 2] = unary::quick_gelu::of(gate, given.p) * (up + given.p[1]);
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
