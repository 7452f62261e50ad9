// Products of a few rows of activations with a matrix: every weight is read once for up to eight rows.
//
// A warp makes `outputs` neighbouring numbers of every row. Lane l adds up the chunks l, l + 32, l + 64, ... in order, then the
// lanes are added in one order: so a row's bits depend neither on the other rows nor on how many there are.
#include "reduce.cuh"
#include "weights.cuh"

// out = x . weight (+ bias) (+ addend). x and scales: see activations.cu.
struct ProductArguments {
  BlockMatrix matrix;
  const void* x;
  const float* scales;
  const float* bias;
  const float* addend;
  float* out;
  long long addend_stride;
  long long out_stride;
  int rows;
  int strides;
  int outputs;
};

constexpr int PRODUCT_WARPS = 4;

__device__ __forceinline__ void finish(const ProductArguments& given, long long row, int output, float sum) {
  if (given.bias) sum += given.bias[output];
  if (given.addend) sum += given.addend[row * given.addend_stride + output];
  given.out[row * given.out_stride + output] = sum;
}

template <int count, int tokens>
__device__ __forceinline__ void finish_all(
    const ProductArguments& given, int first_output, int first_row, float (&sums)[count][tokens]) {
#pragma unroll
  for (int output = 0; output < count; ++output)
#pragma unroll
    for (int token = 0; token < tokens; ++token) {
      const float sum = warp_sum(sums[output][token]);
      if (threadIdx.x % WARP == 0 && first_output + output < given.outputs && first_row + token < given.rows)
        finish(given, first_row + token, first_output + output, sum);
    }
}

// Activations in float32, in chunks of 32 columns. Grid (outputs / (4 warps * count), rows / tokens).
template <class Reader, int tokens, int count>
__device__ __forceinline__ void product_exact(const ProductArguments& given) {
  const Reader reader = Reader::of_numbers(given.matrix);
  const int lane = threadIdx.x % WARP;
  const int first_output = ((int)blockIdx.x * PRODUCT_WARPS + (int)threadIdx.x / WARP) * count;
  const int first_row = blockIdx.y * tokens, chunks = given.matrix.chunks;
  float sums[count][tokens] = {};
  for (int chunk = lane; chunk < chunks; chunk += WARP) {
    const float4* x = static_cast<const float4*>(given.x) + (long long)(chunk / WARP) * (8 * WARP) + lane;
    typename Reader::Chunk chunks_of[count];
    Factors<Reader::HALVES> factors[count];
#pragma unroll
    for (int output = 0; output < count; ++output)
      reader.read(min(first_output + output, given.outputs - 1), chunk, chunks_of[output]);
#pragma unroll
    for (int output = 0; output < count; ++output) factors[output] = reader.factors(chunks_of[output]);
#pragma unroll
    for (int half = 0; half < Reader::HALVES; ++half) {
      float parts[count][tokens] = {};
#pragma unroll
      for (int g = half * Reader::COLUMNS / 4; g < (half + 1) * Reader::COLUMNS / 4; ++g) {
        float4 four[tokens];
#pragma unroll
        for (int token = 0; token < tokens; ++token) {
          const long long row = min(first_row + token, given.rows - 1);
          four[token] = x[row * given.strides * (8 * WARP) + g * WARP];
        }
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
      }
#pragma unroll
      for (int output = 0; output < count; ++output)
#pragma unroll
        for (int token = 0; token < tokens; ++token)
          sums[output][token] = fmaf(parts[output][token], Reader::factor_left(factors[output], half), sums[output][token]);
    }
  }
  finish_all(given, first_output, first_row, sums);
}

// Activations rounded to bytes per chunk: the sums of a chunk (or of its halves) are whole numbers, and exact. A chunk
// is read while the one before it is computed, and its codes are taken apart once for all tokens.
template <class Reader, int tokens, int count>
__device__ __forceinline__ void product_bytes(const ProductArguments& given) {
  const Reader reader{given.matrix};
  const int lane = threadIdx.x % WARP;
  const int first_output = ((int)blockIdx.x * PRODUCT_WARPS + (int)threadIdx.x / WARP) * count;
  const int first_row = blockIdx.y * tokens, chunks = given.matrix.chunks;
  float sums[count][tokens] = {};
  typename Reader::Chunk next[count];
  auto read = [&](int chunk) {
#pragma unroll
    for (int output = 0; output < count; ++output)
      reader.read(min(first_output + output, given.outputs - 1), min(chunk, chunks - 1), next[output]);
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
    if (tokens >= 8) read(chunk + WARP);  // with so many tokens registers are scarce, and there is much to compute
#pragma unroll
    for (int token = 0; token < tokens; ++token) {
      const long long at = (long long)min(first_row + token, given.rows - 1) * given.strides + chunk / WARP;
      const uint4* bytes = static_cast<const uint4*>(given.x) + at * (2 * WARP) + lane;
      const uint4 low = bytes[0], high = bytes[WARP];
      const int x[BYTE_WORDS] = {(int)low.x,  (int)low.y,  (int)low.z,  (int)low.w,
                                 (int)high.x, (int)high.y, (int)high.z, (int)high.w};
      const float2 scale = reinterpret_cast<const float2*>(given.scales)[at * WARP + lane];
#pragma unroll
      for (int output = 0; output < count; ++output) {
        const float total = reader.dot(words[output], factors[output], x, (int)__float_as_uint(scale.y));
        sums[output][token] = fmaf(total, scale.x, sums[output][token]);
      }
    }
  }
  finish_all(given, first_output, first_row, sums);
}

// Weights that are floats; activations in float32, in chunks of as many columns as 16 bytes of weights have. What a
// lane multiplies next is read while it multiplies.
template <class T, int tokens, int count>
__device__ __forceinline__ void product_dense(const ProductArguments& given) {
  using Reader = DenseReader<T>;
  constexpr int WIDTH = Reader::WIDTH;
  const Reader reader{given.matrix};
  const int lane = threadIdx.x % WARP;
  const int first_output = ((int)blockIdx.x * PRODUCT_WARPS + (int)threadIdx.x / WARP) * count;
  const int first_row = blockIdx.y * tokens, parts = given.matrix.chunks * (CHUNK / WIDTH);
  float sums[count][tokens] = {};
  unsigned next[count][4];
  auto read = [&](int part) {
#pragma unroll
    for (int output = 0; output < count; ++output)
      reader.read(min(first_output + output, given.outputs - 1), min(part, parts - 1), next[output]);
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
      const long long row = min(first_row + token, given.rows - 1);
      const float4* x = static_cast<const float4*>(given.x) + row * given.strides * (8 * WARP) + lane;
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
  finish_all(given, first_output, first_row, sums);
}
