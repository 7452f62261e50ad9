// Matmuls of many rows of activations with a matrix, by Hopper's tensor cores: y^T = W x^T.
//
// The left operand of a warpgroup's product may lie in registers, and the right operand lies in shared memory. So
// weights are on the left: every lane reads codes, converts them to bfloat16 and passes them to the tensor cores, and
// no weight is ever written to memory. Activations are on the right. activations.cu has stored them in the layout that
// tensor cores need in shared memory, so that one instruction of one thread copies a part of all tokens of a block.
//
// The choice of columns for a product is free, as long as both operands agree: a product of 16 columns uses four
// columns of each of four adjacent chunks, and lane t of four has the columns of chunk t. So a lane reads whole chunks
// and needs no data from its neighbours. A row's sum is computed over the columns in this order, whatever the other
// rows are.
#include "weights.cuh"

// x: see arrange_tiles. x_stride: distance from one part of 64 columns to the next, in numbers. The other fields are
// the same as in ProductArguments. Rows from first_row to rows are computed.
struct WarpgroupGemmArguments {
  BlockMatrix matrix;
  const void* x;
  const float* bias;
  const float* addend;
  float* out;
  long long x_stride;
  long long addend_stride;
  long long out_stride;
  int first_row;
  int rows;
  int outputs;
};

// Four chunks of a row form a group, and a part is half of each of them: 64 columns in four tiles of 16. Parts are
// computed four at a time, so that the stage and the registers of each part are known at compile time.
constexpr int GROUP = 4, TILE = 16, PART = 64, TILES = PART / TILE, ROUND = 4, STAGES = ROUND, WARPGROUP = 4 * WARP;

// A block: the number of its tokens, and 64 outputs per warpgroup.
template <int tokens, int warpgroups>
struct WarpgroupShape {
  static constexpr int TOKENS = tokens, OUTPUTS = 64 * warpgroups, WARPS = 4 * warpgroups;
  static constexpr int STAGE_BYTES = tokens * PART * 2;
};

// The activations of a block, a few parts ahead. Warpgroups do not wait for each other: while one converts codes to
// weights, the tensor cores compute the products of another. The last warp to leave a stage requests the stage's next
// content.
template <class Shape>
struct Stages {
  unsigned char* memory;
  Arrival* arrivals;
  unsigned* left;
  const bfloat_bits* x;
  long long x_stride;
  unsigned bytes;  // missing rows hold arbitrary numbers, because their results are discarded
  int parts;

  // Called by one thread, before a barrier.
  __device__ __forceinline__ void prepare() const {
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) prepare_arrival(arrivals + stage), left[stage] = 0;
  }
  // Called by one thread, after all warps have used the content of the stage.
  __device__ __forceinline__ void ask(int part, int stage) const {
    if (part < parts) copy_block_later(memory + stage * Shape::STAGE_BYTES, x + part * x_stride, bytes, arrivals + stage);
  }
  // Return true if this thread must request the next content of a stage.
  __device__ __forceinline__ bool leave(int stage) const {
    return threadIdx.x % WARP == 0 && is_last_to_leave(left + stage, Shape::WARPS);
  }
  // Wait for a part, and return the descriptor by which products read the part.
  __device__ __forceinline__ unsigned long long wait(int part, int stage) const {
    wait_arrival(arrivals + stage, part / STAGES % 2);
    return swizzled_rows(shared_address(memory + stage * Shape::STAGE_BYTES));
  }
};

// The weights of a lane: rows g and g + 8 of its warp's 16, in chunk t of every group. They are read some parts before
// they are needed, into registers that are used in rotation.
template <class Source>
struct LaneWeights {
  static constexpr int PARTS = Source::HALVES, READS = sizeof(Source) < 64 ? 2 : 1;
  const typename Source::Reads& reader;
  const long long rows[2];
  const int member, chunks;
  Source sources[READS][2];

  // Read the codes of part `part`, and of the next part if PARTS is two. Past the last chunk, the codes are zero.
  __device__ __forceinline__ void read(int part, int into) {
    const int chunk = part / 2 * GROUP + member;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (chunk < chunks) sources[into][i].read_halves(reader, rows[i], chunk, part % 2);
      else sources[into][i] = Source{};
  }
  // Unpack the tiles of a part into the operands of products, then request the next codes. `number`: index of the part
  // in its round.
  __device__ __forceinline__ void unpack(int part, int number, unsigned (&tiles)[TILES][4]) {
    const int from = number % ROUND / PARTS % READS;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned pairs[2 * TILES];
      sources[from][i].pairs_of_half(reader, number % 2, pairs);
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) tiles[tile][i] = pairs[2 * tile], tiles[tile][2 + i] = pairs[2 * tile + 1];
    }
    if (number % PARTS == PARTS - 1) read(part + 1 + (READS - 1) * PARTS, from);
  }
};

// Store the sums of a warp's 16 outputs. A lane has the sums of outputs g and g + 8 for two adjacent tokens of every
// eight. So eight lanes write 32 adjacent bytes, the size of a memory transaction. Addends are read for many tokens
// before the first result is written.
template <class Shape, bool has_addend>
__device__ __forceinline__ void finish_sums(
    const WarpgroupGemmArguments& given, int first_token, int output, const float (&sums)[Shape::TOKENS / 2]) {
  constexpr int TOGETHER = 8, OWN = Shape::TOKENS / 4;  // tokens of a lane
  const long long first = given.first_row + first_token + 2 * (threadIdx.x % 4);
  float* out = given.out + first * given.out_stride + output;
  const float* addend = has_addend ? given.addend + first * given.addend_stride + output : nullptr;
  int left[2];  // remaining tokens, starting at the first token, for both outputs
  float bias[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool there = output + 8 * half < given.outputs;
    left[half] = there ? given.rows - (int)first : 0;
    bias[half] = there && given.bias ? given.bias[output + 8 * half] : 0.0f;
  }
#pragma unroll
  for (int begin = 0; begin < OWN; begin += TOGETHER) {
    float added[TOGETHER][2] = {};
    if constexpr (has_addend) {
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const int own = begin + i, token = own / 2 * 8 + own % 2;
        if (token < left[0]) added[i][0] = addend[0];
        if (token < left[1]) added[i][1] = addend[8];
        addend += own % 2 ? 7 * given.addend_stride : given.addend_stride;
      }
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      const int own = begin + i, token = own / 2 * 8 + own % 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = sums[own / 2 * 4 + half * 2 + own % 2] + bias[half];
        if constexpr (has_addend) sum += added[i][half];
        if (token < left[half]) out[8 * half] = sum;
      }
      out += own % 2 ? 7 * given.out_stride : given.out_stride;
    }
  }
}

// Grid (tokens / Shape::TOKENS, outputs / Shape::OUTPUTS), so that blocks that run together read the same weights.
template <class Source, class Shape>
__device__ __forceinline__ void warpgroup_gemm(const WarpgroupGemmArguments& given) {
  DYNAMIC_SHARED(memory);
  unsigned char* const stages = aligned_shared<1024>(memory);
  const int first_token = blockIdx.x * Shape::TOKENS, lane = threadIdx.x % WARP;
  const int tokens = min(Shape::TOKENS, given.rows - given.first_row - first_token);
  const int output = blockIdx.y * Shape::OUTPUTS + threadIdx.x / WARP * 16 + lane / 4;
  const int chunks = given.matrix.chunks, parts = (chunks + 2 * GROUP - 1) / (2 * GROUP) * ROUND;
  Arrival* const arrivals = reinterpret_cast<Arrival*>(stages + STAGES * Shape::STAGE_BYTES);
  const Stages<Shape> activations{
      stages, arrivals, reinterpret_cast<unsigned*>(arrivals + STAGES),
      static_cast<const bfloat_bits*>(given.x) + (long long)first_token * PART, given.x_stride, tokens * PART * 2u, parts};
  if (threadIdx.x == 0) activations.prepare();
  const typename Source::Reads reader = Source::Reads::of_numbers(given.matrix);
  __syncthreads();  // the stages are prepared
  if (threadIdx.x == 0)
#pragma unroll
    for (int part = 0; part < STAGES - 1; ++part) activations.ask(part, part);
  LaneWeights<Source> weights{
      reader, {min(output, given.outputs - 1), min(output + 8, given.outputs - 1)}, lane % 4, chunks};
#pragma unroll
  for (int i = 0; i < LaneWeights<Source>::READS; ++i) weights.read(i * LaneWeights<Source>::PARTS, i);
  unsigned tiles[2][TILES][4];
  float sums[Shape::TOKENS / 2] = {};
  weights.unpack(0, 0, tiles[0]);
  for (int round = 0; round < parts; round += ROUND) {
#pragma unroll
    for (int number = 0; number < ROUND; ++number) {
      const int part = round + number;
      const unsigned long long right = activations.wait(part, number);
      begin_products();
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
        multiply_warpgroup<Shape::TOKENS>(sums, tiles[number % 2][tile], right + 2 * tile);
      end_products();
      wait_products<1>();  // those of the part before
      constexpr int BEFORE = STAGES - 1;
      const bool asks = activations.leave((number + BEFORE) % STAGES);
      weights.unpack(part + 1, number + 1, tiles[(number + 1) % 2]);
      if (asks) activations.ask(part + BEFORE, (number + BEFORE) % STAGES);
    }
  }
  wait_products<0>();
  read_behind(sums);
  if (given.addend) finish_sums<Shape, true>(given, first_token, output, sums);
  else finish_sums<Shape, false>(given, first_token, output, sums);
}
