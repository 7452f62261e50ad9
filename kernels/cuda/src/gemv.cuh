// Sums of products of a few rows of activations with a few rows of a matrix, by one warp: every weight is read once.
// Lane l adds up the chunks l, l + 32, l + 64, ... in order, so that the sums of a row do not depend on the other rows
// or their number. The sums of the lanes must still be added.
#pragma once
#include "reduce.cuh"
#include "weights.cuh"

// x and scales: see activations.cu. For the sum of output o and token t, row_of(o) is the row of the matrix and
// source_of(t) is the row of x, both of 64 bits.
struct Activations {
  const void* x;
  const float* scales;
  int strides;
};

// Activations in float32, in chunks of 32 columns.
template <class Reader>
struct exact_sums {
  template <int tokens, int count, class RowOf, class SourceOf>
  __device__ __forceinline__ static void add(
      const BlockMatrix& matrix, const Activations& given, const RowOf& row_of, const SourceOf& source_of,
      float (&sums)[count][tokens]) {
    const Reader reader = Reader::of_numbers(matrix);
    const int lane = threadIdx.x % WARP, chunks = matrix.chunks;
    for (int chunk = lane; chunk < chunks; chunk += WARP) {
      const float4* x = static_cast<const float4*>(given.x) + (long long)(chunk / WARP) * (8 * WARP) + lane;
      typename Reader::Chunk chunks_of[count];
      Factors<Reader::HALVES> factors[count];
#pragma unroll
      for (int output = 0; output < count; ++output) reader.read(row_of(output), chunk, chunks_of[output]);
#pragma unroll
      for (int output = 0; output < count; ++output) factors[output] = reader.factors(chunks_of[output]);
      float parts[count][tokens] = {};
#pragma unroll
      for (int g = 0; g < CHUNK / 4; ++g) {
        float4 four[tokens];
#pragma unroll
        for (int token = 0; token < tokens; ++token)
          four[token] = x[source_of(token) * given.strides * (8 * WARP) + g * WARP];
#pragma unroll
        for (int output = 0; output < count; ++output) {
          float weights[4];
          reader.unscaled(chunks_of[output], factors[output], g, weights);
#pragma unroll
          for (int token = 0; token < tokens; ++token) {
            float part = parts[output][token];
            part = fmaf(four[token].x, weights[0], part);
            part = fmaf(four[token].y, weights[1], part);
            part = fmaf(four[token].z, weights[2], part);
            parts[output][token] = fmaf(four[token].w, weights[3], part);
          }
        }
        if ((g + 1) * 4 % Reader::COLUMNS) continue;  // a half, or the chunk, is complete
#pragma unroll
        for (int output = 0; output < count; ++output)
#pragma unroll
          for (int token = 0; token < tokens; ++token) {
            const float factor = Reader::factor_left(factors[output], g * 4 / Reader::COLUMNS);
            sums[output][token] = fmaf(parts[output][token], factor, sums[output][token]);
            parts[output][token] = 0.0f;
          }
      }
    }
  }
};

// Activations quantised to int8 per chunk. The sums of a chunk (or of its halves) are integers, and therefore exact. A
// chunk is read while the previous chunk is computed, and its codes are unpacked once for all tokens.
template <class Reader>
struct byte_sums {
  template <int tokens, int count, class RowOf, class SourceOf>
  __device__ __forceinline__ static void add(
      const BlockMatrix& matrix, const Activations& given, const RowOf& row_of, const SourceOf& source_of,
      float (&sums)[count][tokens]) {
    const Reader reader{matrix};
    const int lane = threadIdx.x % WARP, chunks = matrix.chunks;
    typename Reader::Chunk next[count];
    auto read = [&](int chunk) {
#pragma unroll
      for (int output = 0; output < count; ++output)
        reader.read(row_of(output), min(chunk, chunks - 1), next[output]);
    };
    read(lane);
    for (int chunk = lane; chunk < chunks; chunk += WARP) {
      typename Reader::Chunk own[count];
#pragma unroll
      for (int output = 0; output < count; ++output) own[output] = next[output];
      if (tokens < 8) read(chunk + WARP);
      int words[count][BYTE_WORDS];
      Factors<Reader::HALVES> factors[count];
#pragma unroll
      for (int output = 0; output < count; ++output) {
        reader.bytes(own[output], words[output]);
        factors[output] = reader.factors(own[output]);
      }
      if (tokens >= 8) read(chunk + WARP);  // with so many tokens, registers are scarce and there is much to compute
#pragma unroll
      for (int token = 0; token < tokens; ++token) {
        const long long at = source_of(token) * given.strides + chunk / WARP;
        const uint4* bytes = static_cast<const uint4*>(given.x) + at * (2 * WARP) + lane;
        const uint4 low = bytes[0], high = bytes[WARP];
        const int x[BYTE_WORDS] = {(int)low.x,  (int)low.y,  (int)low.z,  (int)low.w,
                                   (int)high.x, (int)high.y, (int)high.z, (int)high.w};
        const float2 scale = reinterpret_cast<const float2*>(given.scales)[at * WARP + lane];
#pragma unroll
        for (int output = 0; output < count; ++output) {
          const float total = reader.dot(
              words[output], factors[output], x, [&](int half) { return Reader::ones_of((int)__float_as_uint(scale.y), half); });
          sums[output][token] = fmaf(total, scale.x, sums[output][token]);
        }
      }
    }
  }
};

// Float weights, with activations in float32. A chunk has the number of columns that 16 bytes of weights hold. The
// operands of a lane's next product are read while the lane multiplies.
template <class T>
struct dense_sums {
  template <int tokens, int count, class RowOf, class SourceOf>
  __device__ __forceinline__ static void add(
      const BlockMatrix& matrix, const Activations& given, const RowOf& row_of, const SourceOf& source_of,
      float (&sums)[count][tokens]) {
    using Reader = DenseReader<T>;
    constexpr int WIDTH = Reader::WIDTH;
    const Reader reader{matrix};
    const int lane = threadIdx.x % WARP, parts = matrix.chunks * (CHUNK / WIDTH);
    unsigned next[count][4];
    auto read = [&](int part) {
#pragma unroll
      for (int output = 0; output < count; ++output)
        reader.read(row_of(output), min(part, parts - 1), next[output]);
    };
    read(lane);
#pragma unroll 2
    for (int part = lane; part < parts; part += WARP) {
      float weights[count][WIDTH];
#pragma unroll
      for (int output = 0; output < count; ++output) Reader::numbers(next[output], weights[output]);
      read(part + WARP);
#pragma unroll
      for (int token = 0; token < tokens; ++token) {
        const float4* x = static_cast<const float4*>(given.x) + source_of(token) * given.strides * (8 * WARP) + lane;
        x += part / WARP * (WIDTH / 4 * WARP);
#pragma unroll
        for (int i = 0; i < WIDTH / 4; ++i) {
          const float4 four = x[i * WARP];
#pragma unroll
          for (int output = 0; output < count; ++output) {
            float sum = sums[output][token];
            sum = fmaf(weights[output][4 * i], four.x, sum);
            sum = fmaf(weights[output][4 * i + 1], four.y, sum);
            sum = fmaf(weights[output][4 * i + 2], four.z, sum);
            sums[output][token] = fmaf(weights[output][4 * i + 3], four.w, sum);
          }
        }
      }
    }
  }
};
