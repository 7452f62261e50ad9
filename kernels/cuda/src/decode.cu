// Products of few rows with matrices of few bits, and the gated pair of such products: of one or two rows by lanes, of up
// to 64 by tensor cores. A row's bits are the same.
#include "decode_lanes.cuh"
#include "decode_tiles.cuh"
#include "functions.cuh"
#include "results.cuh"

// out = x . weight (+ bias) (+ addend), all float32 in rows; `rows` of x.
struct DecodeArguments {
  BlockMatrix matrix;
  GroupedRows x;
  const float* bias;
  const float* addend;
  float* out;
  long long addend_stride;
  long long out_stride;
  int rows;
  int outputs;
};

// Grid (outputs / 32): up to `tokens` rows.
template <class Reader, int tokens>
__device__ __forceinline__ void decode_few(const DecodeArguments& given) {
  SHARED(uint4, bytes, 2 * tokens * RowSlab<tokens>::CHUNKS);
  SHARED(float2, scales, tokens * RowSlab<tokens>::CHUNKS);
  const int output = blockIdx.x * BLOCK_ROWS + threadIdx.x / PHASES;
  float sums[1][tokens] = {};
  decode_lanes<Reader, 1, tokens>(
      given.x, RowSlab<tokens>{bytes, scales}, [&](int) -> const BlockMatrix& { return given.matrix; },
      [&](int) { return min(output, given.outputs - 1); }, sums);
#pragma unroll
  for (int token = 0; token < tokens; ++token)
    if (threadIdx.x % PHASES == token && token < given.rows && output < given.outputs) store_result(given, token, output, sums[0][token]);
}

// Grid (outputs / (16 tiles), rows / (8 groups)).
template <class Reader, int tiles, int groups>
__device__ __forceinline__ void decode(const DecodeArguments& given) {
  using Own = Stages<Reader, tiles>;
  SHARED(unsigned, codes, Own::template MEMORY<groups>);
  SHARED(float, numbers, 2 * Own::NUMBER_COUNT);
  const int first_output = blockIdx.x * (TILE * tiles), first_group = blockIdx.y * groups;
  decode_tiles<groups>(
      Own{codes, numbers}, given.x, first_group, given.rows, [&](int) -> const BlockMatrix& { return given.matrix; },
      [&](int tile, int row) { return min(first_output + tile * TILE + row, given.outputs - 1); },
      [&](int tile, const float(&found)[WarpSums<groups>::EACH]) {
#pragma unroll
        for (int i = 0; i < WarpSums<groups>::EACH; ++i) {
          const int own = i * DECODE_THREADS + threadIdx.x, output = first_output + tile * TILE + own % TILE;
          const long long row = first_group * GROUP + own / TILE;
          if (own >= groups * GROUP * TILE || output >= given.outputs || row >= given.rows) continue;
          store_result(given, row, output, found[i]);
        }
      });
}

// out = activation(gate) * up, of two matrices; as rows of float32, or as the next product reads it.
struct GatedArguments {
  BlockMatrix gate;
  BlockMatrix up;
  GroupedRows x;
  GroupedRows grouped;
  const float* gate_bias;
  const float* up_bias;
  float* out;
  long long out_stride;
  int rows;
  int outputs;
};

// Results [rows][outputs] of a block in shared memory, as the next product reads them.
template <int outputs>
__device__ __forceinline__ void store_results(const GatedArguments& given, const float* results, int first_row, int first_output, int rows) {
  __syncthreads();
  for (int row = threadIdx.x / WARP; row < rows; row += DECODE_WARPS)
#pragma unroll
    for (int chunk = 0; chunk < outputs / CHUNK; ++chunk)
      store_one(given.grouped, first_row + row, first_output / CHUNK + chunk, results[row * (outputs + 1) + chunk * CHUNK + threadIdx.x % WARP]);
}

// Grid (outputs / 32): up to `tokens` rows.
template <class Reader, class Activation, int tokens>
__device__ __forceinline__ void decode_gated_few(const GatedArguments& given) {
  SHARED(uint4, bytes, 2 * tokens * RowSlab<tokens>::CHUNKS);
  SHARED(float2, scales, tokens * RowSlab<tokens>::CHUNKS);
  SHARED(float, results, tokens * (BLOCK_ROWS + 1));
  const int place = threadIdx.x / PHASES, first_output = blockIdx.x * BLOCK_ROWS, output = first_output + place;
  const float none[3] = {};
  float sums[2][tokens] = {};
  decode_lanes<Reader, 2, tokens>(
      given.x, RowSlab<tokens>{bytes, scales}, [&](int i) -> const BlockMatrix& { return i ? given.up : given.gate; },
      [&](int) { return min(output, given.outputs - 1); }, sums);
#pragma unroll
  for (int token = 0; token < tokens; ++token) {
    if (threadIdx.x % PHASES != token || output >= given.outputs || token >= given.rows) continue;
    const float gate = sums[0][token] + (given.gate_bias ? given.gate_bias[output] : 0.0f);
    const float up = sums[1][token] + (given.up_bias ? given.up_bias[output] : 0.0f);
    const float result = Activation::of(gate, none) * up;
    results[token * (BLOCK_ROWS + 1) + place] = result;
    if (given.out) given.out[token * given.out_stride + output] = result;
  }
  if (given.grouped.bytes) store_results<BLOCK_ROWS>(given, results, 0, first_output, min(tokens, given.rows));
}

// Grid (outputs / (16 tiles), rows / (8 groups)): half of the tiles of a block are the gate's.
template <class Reader, class Activation, int tiles, int groups>
__device__ __forceinline__ void decode_gated(const GatedArguments& given) {
  constexpr int EACH = WarpSums<groups>::EACH, OUTPUTS = TILE * tiles, ROWS = GROUP * groups;
  using Own = Stages<Reader, 2 * tiles>;
  SHARED(unsigned, codes, Own::template MEMORY<groups>);
  SHARED(float, numbers, 2 * Own::NUMBER_COUNT);
  float* results = numbers;
  static_assert(ROWS * (OUTPUTS + 1) <= 2 * Own::NUMBER_COUNT, "results take the memory of numbers");
  const int first_output = blockIdx.x * OUTPUTS, first_row = blockIdx.y * ROWS;
  const float none[3] = {};
  float gates[tiles][EACH];
  decode_tiles<groups>(
      Own{codes, numbers}, given.x, blockIdx.y * groups, given.rows,
      [&](int tile) -> const BlockMatrix& { return tile < tiles ? given.gate : given.up; },
      [&](int tile, int row) { return min(first_output + tile % tiles * TILE + row, given.outputs - 1); },
      [&](int tile, const float(&found)[EACH]) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
          const int own = i * DECODE_THREADS + threadIdx.x, place = tile % tiles * TILE + own % TILE;
          const int output = first_output + place, row = own / TILE;
          if (own >= ROWS * TILE) continue;
          const float* bias = tile < tiles ? given.gate_bias : given.up_bias;
          const float sum = found[i] + (bias && output < given.outputs ? bias[output] : 0.0f);
          if (tile < tiles) {
            gates[tile % tiles][i] = sum;
            continue;
          }
          const float result = Activation::of(gates[tile % tiles][i], none) * sum;
          results[row * (OUTPUTS + 1) + place] = result;
          if (given.out && output < given.outputs && first_row + row < given.rows)
            given.out[(first_row + row) * given.out_stride + output] = result;
        }
      });
  if (given.grouped.bytes) store_results<OUTPUTS>(given, results, first_row, first_output, min(ROWS, given.rows - first_row));
}
