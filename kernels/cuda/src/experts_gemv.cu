// Products of a few pairs with the matrices of their experts: every weight is read once for up to eight pairs of its
// expert. A warp makes `count` neighbouring numbers of every pair of a group, with the sums of gemv.cu: lane l adds up
// the chunks l, l + 32, ... in order, then the lanes are added. So a pair's bits do not depend on the others.
#include "experts.cuh"
#include "reduce.cuh"

constexpr int EXPERT_WARPS = 4;

// The bytes that one word of codes is multiplied by, and what remains to be subtracted from every code.
template <int bits>
__device__ __forceinline__ int dot_codes(unsigned word, const int* x, int sum) {
  if (bits == 8) return dot4((int)(word ^ 0x80808080u), x[0], sum);  // code - 128
  sum = dot4((int)(word & 0x0f0f0f0fu), x[0], sum);
  return dot4((int)(word >> 4 & 0x0f0f0f0fu), x[1], sum);
}

// Sums of rows of codes with rows of float32.
template <int bits, class Scale>
struct exact_codes {
  template <int tokens, int count>
  __device__ __forceinline__ static void add(
      const ExpertArguments& given, const long long (&rows)[count], const long long (&sources)[tokens],
      float (&sums)[count][tokens]) {
    using Reader = BlockReader<bits, Scale>;
    const Reader reader{given.matrix};
    const int lane = threadIdx.x % WARP, chunks = given.matrix.blocks * (given.matrix.block_size / CHUNK);
    for (int chunk = lane; chunk < chunks; chunk += WARP) {
      const float4* x = static_cast<const float4*>(given.x) + (long long)(chunk / WARP) * (8 * WARP) + lane;
      unsigned codes[count][Reader::WORDS];
      float scales[count], parts[count][tokens] = {};
      int zeros[count];
#pragma unroll
      for (int output = 0; output < count; ++output) {
        reader.read(rows[output], chunk, codes[output]);
        scales[output] = reader.scale(rows[output], chunk), zeros[output] = reader.zero(rows[output], chunk);
      }
#pragma unroll
      for (int i = 0; i < CHUNK; i += 4) {
        float4 four[tokens];
#pragma unroll
        for (int token = 0; token < tokens; ++token)
          four[token] = x[sources[token] * given.strides * (8 * WARP) + i / 4 * WARP];
#pragma unroll
        for (int output = 0; output < count; ++output) {
          float weights[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) weights[j] = (float)((int)Reader::code(codes[output], i + j) - zeros[output]);
#pragma unroll
          for (int token = 0; token < tokens; ++token) {
            float part = parts[output][token];
            part = fmaf(four[token].x, weights[0], part);
            part = fmaf(four[token].y, weights[1], part);
            part = fmaf(four[token].z, weights[2], part);
            parts[output][token] = fmaf(four[token].w, weights[3], part);
          }
        }
      }
#pragma unroll
      for (int output = 0; output < count; ++output)
#pragma unroll
        for (int token = 0; token < tokens; ++token)
          sums[output][token] = fmaf(parts[output][token], scales[output], sums[output][token]);
    }
  }
};

// ... with rows that were rounded to bytes per chunk.
template <int bits, class Scale>
struct byte_codes {
  template <int tokens, int count>
  __device__ __forceinline__ static void add(
      const ExpertArguments& given, const long long (&rows)[count], const long long (&sources)[tokens],
      float (&sums)[count][tokens]) {
    using Reader = BlockReader<bits, Scale>;
    constexpr int SUBTRACTED = bits == 8 ? 128 : 0, PER_WORD = bits == 8 ? 1 : 2;
    const Reader reader{given.matrix};
    const int lane = threadIdx.x % WARP, chunks = given.matrix.blocks * (given.matrix.block_size / CHUNK);
    for (int chunk = lane; chunk < chunks; chunk += WARP) {
      unsigned codes[count][Reader::WORDS];
      float scales[count], zeros[count];
#pragma unroll
      for (int output = 0; output < count; ++output) {
        reader.read(rows[output], chunk, codes[output]);
        scales[output] = reader.scale(rows[output], chunk);
        zeros[output] = (float)(reader.zero(rows[output], chunk) - SUBTRACTED);
      }
#pragma unroll
      for (int token = 0; token < tokens; ++token) {
        const long long at = sources[token] * given.strides + chunk / WARP;
        const uint4* own = static_cast<const uint4*>(given.x) + at * (2 * WARP) + lane;
        const uint4 low = own[0], high = own[WARP];
        const int x[8] = {(int)low.x,  (int)low.y,  (int)low.z,  (int)low.w,
                          (int)high.x, (int)high.y, (int)high.z, (int)high.w};
        const float2 factors = reinterpret_cast<const float2*>(given.scales)[at * WARP + lane];
#pragma unroll
        for (int output = 0; output < count; ++output) {
          int sum = 0;
#pragma unroll
          for (int word = 0; word < Reader::WORDS; ++word) sum = dot_codes<bits>(codes[output][word], x + word * PER_WORD, sum);
          const float whole = fmaf(-zeros[output], factors.y, (float)sum);
          sums[output][token] = fmaf(whole, scales[output] * factors.x, sums[output][token]);
        }
      }
    }
  }
};

// Sums of rows of floats with rows of float32, as they lie: lane l adds up the columns l, l + 32, ...
template <class T>
struct floats {
  template <int tokens, int count>
  __device__ __forceinline__ static void add(
      const ExpertArguments& given, const long long (&rows)[count], const long long (&sources)[tokens],
      float (&sums)[count][tokens]) {
    const T* matrix = reinterpret_cast<const T*>(given.matrix.data);
    const float* rows_of_x = static_cast<const float*>(given.x);
#pragma unroll 4
    for (int column = threadIdx.x % WARP; column < given.columns; column += WARP) {
      float x[tokens];
#pragma unroll
      for (int token = 0; token < tokens; ++token) x[token] = rows_of_x[sources[token] * given.x_stride + column];
#pragma unroll
      for (int output = 0; output < count; ++output) {
        const float weight = to_float(matrix[rows[output] * given.columns + column]);
#pragma unroll
        for (int token = 0; token < tokens; ++token) sums[output][token] = fmaf(weight, x[token], sums[output][token]);
      }
    }
  }
};

template <class Form, class Activation, int tokens, int count>
__device__ __forceinline__ void multiply_group(const ExpertArguments& given, const PairGroup& group) {
  const int lane = threadIdx.x % WARP;
  const int first_output = ((int)blockIdx.x * EXPERT_WARPS + (int)threadIdx.x / WARP) * count;
  if (first_output >= given.outputs) return;
  long long rows[count], sources[tokens];
#pragma unroll
  for (int output = 0; output < count; ++output)
    rows[output] = (long long)group.expert * given.outputs + min(first_output + output, given.outputs - 1);
  // A lane per pair; lanes without one have the last one, too.
  const int pair = given.ordered[group.first + min(lane, group.count - 1)], source = pair / given.sharing;
#pragma unroll
  for (int token = 0; token < tokens; ++token) sources[token] = __shfl_sync(ALL_LANES, source, token);
  float sums[count][tokens] = {}, own[count];
  Form::template add<tokens, count>(given, rows, sources, sums);
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
template <class Form, class Activation, int most, int count>
__device__ __forceinline__ void expert_product(const ExpertArguments& given) {
  const PairGroup group = group_of_block(given);
  if (group.count == 0) return;
  if (most == 1 || group.count == 1) return multiply_group<Form, Activation, 1, count>(given, group);
  if constexpr (most >= 2)
    if (most == 2 || group.count == 2) return multiply_group<Form, Activation, 2, count>(given, group);
  if constexpr (most >= 4)
    if (most == 4 || group.count <= 4) return multiply_group<Form, Activation, 4, count>(given, group);
  if constexpr (most >= 8) multiply_group<Form, Activation, 8, count>(given, group);
}
