// Matmuls of few rows with matrices of few bits, and the gated pair of such matmuls. Lanes compute one or two rows, and
// tensor cores compute up to 64 rows. Both produce the same bits for a row.
#include "decode_lanes.cuh"
#include "decode_tiles.cuh"
#include "functions.cuh"
#include "results.cuh"

// out = x . weight (+ bias) (+ addend), all in float32 rows. rows: number of rows of x. blocks: blocks of the lane
// kernels along the first axis.
struct DecodeArguments {
  BlockMatrix matrix;
  GroupedRows x;
  NormedRows normed;
  const float* bias;
  const float* addend;
  float* out;
  long long addend_stride;
  long long out_stride;
  int rows;
  int outputs;
  int blocks;
};

// Fill a slab with rows, starting at first_row, after the preceding kernels have ended. The weights of a norm, which no
// kernel writes, are loaded earlier.
template <bool normed, class Slab>
__device__ __forceinline__ void bring_rows(
    const Slab& slab, const GroupedRows& x, const NormedRows& given, int first_row, int rows) {
  if constexpr (normed) {
    const NormWeights<Slab::STRIDES> weights(NormRow<true>{given.x, nullptr, nullptr, given.width, true}, given.weight);
    wait_for_earlier();
    slab.bring_normed(given, weights, first_row, rows);
  } else {
    wait_for_earlier();
    slab.bring(x, first_row);
  }
}

// Grid (blocks, rows / tokens). All blocks have the same number of outputs, plus or minus one or two, and a warp has
// every sixteenth pair of outputs (or every sixteenth single output). chunks: capacity of a row. memory_bytes: dynamic
// shared memory of a launch, so that kernels with different amounts have different names.
template <class Reader, int streams, int tokens, int chunks, bool normed, int memory_bytes>
__device__ __forceinline__ void decode_few(const DecodeArguments& given) {
  using Ring = LaneRing<Reader, streams>;
  using Slab = RowSlab<Reader, tokens, chunks>;
  DYNAMIC_SHARED(whole);
  unsigned char* memory = aligned_shared<ALIGNED>(whole);
  const Slab slab(memory + Ring::BYTES);
  const int first_row = blockIdx.y * tokens, warp = threadIdx.x / WARP, units = (given.outputs + streams - 1) / streams;
  auto begin_of = [&](int block) { return (int)((unsigned long long)units * block / given.blocks); };
  const int first_unit = begin_of(blockIdx.x), own_units = begin_of(blockIdx.x + 1) - first_unit, first = first_unit * streams;
  const int outputs = min(own_units * streams, given.outputs - first);
  unsigned char* free = memory + Ring::BYTES + Slab::BYTES;
  const BlockMatrix own = RowNumbers<Reader>::bring(given.matrix, first, outputs, free);
  end_group();
  auto output_of = [&](int stream, int round) { return (round * LANE_WARPS + warp) * streams + stream; };
  auto inside = [&](int stream, int round) { return min(output_of(stream, round), outputs - 1); };
  decode_lanes<tokens>(
      Ring{reinterpret_cast<unsigned*>(memory)}, slab, (own_units - warp + LANE_WARPS - 1) / LANE_WARPS, first,
      [&](int) -> const BlockMatrix& { return given.matrix; }, inside,
      [&](int, int row, int chunk, typename Reader::Chunk& into) { Reader{own}.read_numbers(row, chunk, into); },
      [&] { bring_rows<normed>(slab, given.x, given.normed, first_row, given.rows); },
      [&](int round, const float(&sums)[streams][tokens]) {
#pragma unroll
        for (int stream = 0; stream < streams; ++stream)
#pragma unroll
          for (int token = 0; token < tokens; ++token) {
            const int output = output_of(stream, round), row = first_row + token;
            if (threadIdx.x % WARP == stream * tokens + token && row < given.rows && output < outputs)
              store_result(given, row, first + output, sums[stream][token]);
          }
      });
}

// The dynamic shared memory of a launch, for rows of this many groups.
template <int groups>
__device__ __forceinline__ unsigned char* rows_memory() {
  if constexpr (IS_RINGED<groups>) {
    DYNAMIC_SHARED(memory);
    return memory;
  } else {
    return nullptr;
  }
}

// The tiles that a block computes. Blocks with the same outputs and other rows are adjacent. They read the same weights
// at about the same time, so that memory delivers the weights only once.
template <int outputs, int groups>
struct OwnTiles {
  int output, group;
  __device__ __forceinline__ explicit OwnTiles(int rows) {
    const int parts = (rows + GROUP * groups - 1) / (GROUP * groups);
    output = blockIdx.x / parts * outputs, group = blockIdx.x % parts * groups;
  }
};

// Grid outputs / (16 tiles) * rows / (8 groups).
template <class Reader, int tiles, int groups>
__device__ __forceinline__ void decode(const DecodeArguments& given) {
  using Own = Stages<Reader, tiles>;
  SHARED(unsigned, codes, Own::template MEMORY<groups>);
  SHARED(float, numbers, 2 * Own::NUMBER_COUNT);
  const OwnTiles<TILE * tiles, groups> first(given.rows);
  decode_tiles<groups>(
      Own{codes, numbers, given.x.chunks / STRIDE_CHUNKS}, rows_memory<groups>(), given.x, first.group, given.rows,
      [&](int) -> const BlockMatrix& { return given.matrix; },
      [&](int tile, int row) { return min(first.output + tile * TILE + row, given.outputs - 1); },
      [&](int tile, const float(&found)[WarpSums<groups>::EACH]) {
#pragma unroll
        for (int i = 0; i < WarpSums<groups>::EACH; ++i) {
          const int own = i * DECODE_THREADS + threadIdx.x, output = first.output + tile * TILE + own % TILE;
          const long long row = first.group * GROUP + own / TILE;
          if (own >= groups * GROUP * TILE || output >= given.outputs || row >= given.rows) continue;
          store_result(given, row, output, found[i]);
        }
      });
}

// out = activation(gate) * up, from two matrices, as float32 rows or in the layout that the next matmul reads.
struct GatedArguments {
  BlockMatrix gate;
  BlockMatrix up;
  GroupedRows x;
  NormedRows normed;
  GroupedRows grouped;
  const float* gate_bias;
  const float* up_bias;
  float* out;
  long long out_stride;
  int rows;
  int outputs;
};

// Store results [rows][outputs] of a block of `warps` warps, from shared memory, in the layout that the next matmul
// reads.
template <int outputs, int warps>
__device__ __forceinline__ void store_results(const GatedArguments& given, const float* results, int first_row, int first_output, int rows) {
  __syncthreads();
  constexpr int CHUNKS = outputs / CHUNK;
  for (int i = threadIdx.x / WARP; i < rows * CHUNKS; i += warps) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const float result = results[row * (outputs + 1) + chunk * CHUNK + threadIdx.x % WARP];
    store_one(given.grouped, first_row + row, first_output / CHUNK + chunk, result);
  }
}

// Grid (outputs / OUTPUTS, rows / tokens). A warp processes both matrices of an output at a time, for every sixteenth
// output.
template <class Reader, class Activation, int OUTPUTS, int tokens, int chunks, bool normed, int memory_bytes>
__device__ __forceinline__ void decode_gated_few(const GatedArguments& given) {
  using Ring = LaneRing<Reader, 2>;
  using Slab = RowSlab<Reader, tokens, chunks>;
  constexpr int LINE = OUTPUTS + 1;
  DYNAMIC_SHARED(whole);
  unsigned char* memory = aligned_shared<ALIGNED>(whole);
  const Slab slab(memory + Ring::BYTES);
  float* results = reinterpret_cast<float*>(memory + Ring::BYTES + Slab::BYTES);
  unsigned char* free = reinterpret_cast<unsigned char*>(results) + tokens * LINE * sizeof(float) / COPIED * COPIED + COPIED;
  const int first_output = blockIdx.x * OUTPUTS, first_row = blockIdx.y * tokens, outputs = min(OUTPUTS, given.outputs - first_output);
  const BlockMatrix own_gate = RowNumbers<Reader>::bring(given.gate, first_output, outputs, free);
  const BlockMatrix own_up = RowNumbers<Reader>::bring(given.up, first_output, outputs, free);
  end_group();
  auto index_of = [&](int round) { return round * LANE_WARPS + (int)threadIdx.x / WARP; };
  decode_lanes<tokens>(
      Ring{reinterpret_cast<unsigned*>(memory)}, slab, OUTPUTS / LANE_WARPS, first_output,
      [&](int stream) -> const BlockMatrix& { return stream ? given.up : given.gate; },
      [&](int, int round) { return min(index_of(round), outputs - 1); },
      [&](int stream, int row, int chunk, typename Reader::Chunk& into) {
        Reader{stream ? own_up : own_gate}.read_numbers(row, chunk, into);
      },
      [&] { bring_rows<normed>(slab, given.x, given.normed, first_row, given.rows); },
      [&](int round, const float(&sums)[2][tokens]) {
        const int index = index_of(round), output = first_output + index;
        const float none[3] = {};
#pragma unroll
        for (int token = 0; token < tokens; ++token) {
          if (threadIdx.x % WARP != token || output >= given.outputs || first_row + token >= given.rows) continue;
          const float gate = sums[0][token] + (given.gate_bias ? given.gate_bias[output] : 0.0f);
          const float up = sums[1][token] + (given.up_bias ? given.up_bias[output] : 0.0f);
          const float result = Activation::of(gate, none) * up;
          results[token * LINE + index] = result;
          if (given.out) given.out[(first_row + token) * given.out_stride + output] = result;
        }
      });
  if (given.grouped.bytes)
    store_results<OUTPUTS, LANE_WARPS>(given, results, first_row, first_output, min(tokens, given.rows - first_row));
}

// Grid outputs / (16 tiles) * rows / (8 groups). Half of the tiles of a block are the gate's.
template <class Reader, class Activation, int tiles, int groups>
__device__ __forceinline__ void decode_gated(const GatedArguments& given) {
  constexpr int EACH = WarpSums<groups>::EACH, OUTPUTS = TILE * tiles, ROWS = GROUP * groups;
  using Own = Stages<Reader, 2 * tiles>;
  SHARED(unsigned, codes, Own::template MEMORY<groups>);
  SHARED(float, numbers, 2 * Own::NUMBER_COUNT);
  float* results = numbers;
  static_assert(ROWS * (OUTPUTS + 1) <= 2 * Own::NUMBER_COUNT, "results take the memory of numbers");
  const OwnTiles<OUTPUTS, groups> first(given.rows);
  const int first_output = first.output, first_row = first.group * GROUP;
  const float none[3] = {};
  float gates[tiles][EACH];
  decode_tiles<groups>(
      Own{codes, numbers, given.x.chunks / STRIDE_CHUNKS}, rows_memory<groups>(), given.x, first.group, given.rows,
      [&](int tile) -> const BlockMatrix& { return tile < tiles ? given.gate : given.up; },
      [&](int tile, int row) { return min(first_output + tile % tiles * TILE + row, given.outputs - 1); },
      [&](int tile, const float(&found)[EACH]) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
          const int own = i * DECODE_THREADS + threadIdx.x, index = tile % tiles * TILE + own % TILE;
          const int output = first_output + index, row = own / TILE;
          if (own >= ROWS * TILE) continue;
          const float* bias = tile < tiles ? given.gate_bias : given.up_bias;
          const float sum = found[i] + (bias && output < given.outputs ? bias[output] : 0.0f);
          if (tile < tiles) {
            gates[tile % tiles][i] = sum;
            continue;
          }
          const float result = Activation::of(gates[tile % tiles][i], none) * sum;
          results[row * (OUTPUTS + 1) + index] = result;
          if (given.out && output < given.outputs && first_row + row < given.rows)
            given.out[(first_row + row) * given.out_stride + output] = result;
        }
      });
  if (given.grouped.bytes)
    store_results<OUTPUTS, DECODE_WARPS>(given, results, first_row, first_output, min(ROWS, given.rows - first_row));
}
