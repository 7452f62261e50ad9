// Products of a few rows of activations with a matrix: every weight is read once for up to eight rows.
//
// A warp makes `outputs` neighbouring numbers of every row. Lane l adds up the chunks l, l + 32, l + 64, ... in order, then the
// lanes are added in one order: so a row's bits depend neither on the other rows nor on how many there are.
#include "reduce.cuh"
#include "weights.cuh"

// out = x . weight (+ bias) (+ addend). x and scales: see activations.cu (dense matrices read rows as they are).
struct ProductArguments {
  BlockMatrix matrix;
  const void* x;
  const float* scales;
  const float* bias;
  const float* addend;
  float* out;
  long long x_stride;
  long long addend_stride;
  long long out_stride;
  int rows;
  int strides;
  int columns;
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

// Activations in float32. Grid (outputs / (4 warps * count), rows / tokens).
template <int bits, class Scale, int tokens, int count>
__device__ __forceinline__ void product_exact(const ProductArguments& given) {
  using Reader = BlockReader<bits, Scale>;
  const Reader reader{given.matrix};
  const int lane = threadIdx.x % WARP;
  const int first_output = ((int)blockIdx.x * PRODUCT_WARPS + (int)threadIdx.x / WARP) * count;
  const int first_row = blockIdx.y * tokens, chunks = given.matrix.blocks * (given.matrix.block_size / CHUNK);
  float sums[count][tokens] = {};
  for (int chunk = lane; chunk < chunks; chunk += WARP) {
    const float4* x = static_cast<const float4*>(given.x) + (long long)(chunk / WARP) * (8 * WARP) + lane;
#pragma unroll
    for (int output = 0; output < count; ++output) {
      const int row = min(first_output + output, given.outputs - 1);
      unsigned codes[Reader::WORDS];
      reader.read(row, chunk, codes);
      const float scale = reader.scale(row, chunk);
      const int zero = reader.zero(row, chunk);
#pragma unroll
      for (int token = 0; token < tokens; ++token) {
        const long long at = min(first_row + token, given.rows - 1);
        const float4* own = x + at * given.strides * (8 * WARP);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNK / 4; ++i) {
          const float4 four = own[i * WARP];
          sum = fmaf(four.x, (float)((int)Reader::code(codes, 4 * i) - zero), sum);
          sum = fmaf(four.y, (float)((int)Reader::code(codes, 4 * i + 1) - zero), sum);
          sum = fmaf(four.z, (float)((int)Reader::code(codes, 4 * i + 2) - zero), sum);
          sum = fmaf(four.w, (float)((int)Reader::code(codes, 4 * i + 3) - zero), sum);
        }
        sums[output][token] = fmaf(sum, scale, sums[output][token]);
      }
    }
  }
  finish_all(given, first_output, first_row, sums);
}

// The bytes that one word of codes is multiplied by, and what remains to be subtracted from every code.
template <int bits>
__device__ __forceinline__ int dot_word(unsigned word, const int* x, int sum);

template <>
__device__ __forceinline__ int dot_word<4>(unsigned word, const int* x, int sum) {
  sum = dot4((int)(word & 0x0f0f0f0fu), x[0], sum);
  return dot4((int)(word >> 4 & 0x0f0f0f0fu), x[1], sum);
}

template <>
__device__ __forceinline__ int dot_word<8>(unsigned word, const int* x, int sum) {
  return dot4((int)(word ^ 0x80808080u), x[0], sum);  // code - 128
}

// Activations rounded to bytes per chunk: the sums of a chunk are whole numbers, and exact.
template <int bits, class Scale, int tokens, int count>
__device__ __forceinline__ void product_bytes(const ProductArguments& given) {
  using Reader = BlockReader<bits, Scale>;
  constexpr int SUBTRACTED = bits == 8 ? 128 : 0, PER_WORD = bits == 8 ? 1 : 2;
  const Reader reader{given.matrix};
  const int lane = threadIdx.x % WARP;
  const int first_output = ((int)blockIdx.x * PRODUCT_WARPS + (int)threadIdx.x / WARP) * count;
  const int first_row = blockIdx.y * tokens, chunks = given.matrix.blocks * (given.matrix.block_size / CHUNK);
  float sums[count][tokens] = {};
  for (int chunk = lane; chunk < chunks; chunk += WARP) {
    int x[tokens][8];
    float scales[tokens], bytes[tokens];
#pragma unroll
    for (int token = 0; token < tokens; ++token) {
      const long long at = (long long)min(first_row + token, given.rows - 1) * given.strides + chunk / WARP;
      const uint4* own = static_cast<const uint4*>(given.x) + at * (2 * WARP) + lane;
      const uint4 low = own[0], high = own[WARP];
      x[token][0] = low.x, x[token][1] = low.y, x[token][2] = low.z, x[token][3] = low.w;
      x[token][4] = high.x, x[token][5] = high.y, x[token][6] = high.z, x[token][7] = high.w;
      const float2 factors = reinterpret_cast<const float2*>(given.scales)[at * WARP + lane];
      scales[token] = factors.x, bytes[token] = factors.y;
    }
#pragma unroll
    for (int output = 0; output < count; ++output) {
      const int row = min(first_output + output, given.outputs - 1);
      unsigned codes[Reader::WORDS];
      reader.read(row, chunk, codes);
      const float scale = reader.scale(row, chunk), zero = (float)(reader.zero(row, chunk) - SUBTRACTED);
#pragma unroll
      for (int token = 0; token < tokens; ++token) {
        int sum = 0;
#pragma unroll
        for (int word = 0; word < Reader::WORDS; ++word) sum = dot_word<bits>(codes[word], x[token] + word * PER_WORD, sum);
        const float whole = fmaf(-zero, bytes[token], (float)sum);
        sums[output][token] = fmaf(whole, scale * scales[token], sums[output][token]);
      }
    }
  }
  finish_all(given, first_output, first_row, sums);
}

// Weights that are floats [outputs, columns]; x: rows of float32. Lane l adds up the columns l, l + 32, ... in order.
template <class T, int tokens, int count>
__device__ __forceinline__ void product_dense(const ProductArguments& given) {
  const int lane = threadIdx.x % WARP;
  const int first_output = ((int)blockIdx.x * PRODUCT_WARPS + (int)threadIdx.x / WARP) * count;
  const int first_row = blockIdx.y * tokens;
  float sums[count][tokens] = {};
#pragma unroll 4
  for (int column = lane; column < given.columns; column += WARP) {
    float x[tokens];
#pragma unroll
    for (int token = 0; token < tokens; ++token)
      x[token] = static_cast<const float*>(given.x)[min(first_row + token, given.rows - 1) * given.x_stride + column];
#pragma unroll
    for (int output = 0; output < count; ++output) {
      const long long row = min(first_output + output, given.outputs - 1);
      const float weight = to_float(reinterpret_cast<const T*>(given.matrix.data)[row * given.columns + column]);
#pragma unroll
      for (int token = 0; token < tokens; ++token) sums[output][token] = fmaf(weight, x[token], sums[output][token]);
    }
  }
  finish_all(given, first_output, first_row, sums);
}
