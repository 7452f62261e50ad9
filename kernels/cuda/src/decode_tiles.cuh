// Matmuls of several rows of activations with a matrix of few bits, both as int8, by tensor cores: every weight is
// read once for up to 64 rows.
//
// A block computes 16 adjacent outputs per tile. Its eight warps share the columns: in pass j, warp w processes chunk w
// + 8 j of every stride, in order. The sums of a chunk are integers, and therefore exact. Then the passes are added in
// order, and the warps in pairs. So a row's bits do not depend on the other rows or their number.
//
// Weights are loaded into shared memory several stages of 16 chunks ahead, and the first weights are requested before
// the preceding kernels have ended: memory bandwidth limits these matmuls, so memory must never be idle.
#pragma once
#include "groups.cuh"

constexpr int DECODE_WARPS = 8, DECODE_THREADS = DECODE_WARPS * WARP, TILE = 16, STAGE_CHUNKS = 16;
// Words of a block's shared memory: in total, and for codes.
constexpr int SHARED_WORDS = 11 << 10, CODE_WORDS = 8 << 10;
// The bits of WHOLE. Adding an integer of up to 2 ** 22 to these bits yields the bits of WHOLE plus this integer.
constexpr unsigned WHOLE_BITS = 0x4b400000u;
constexpr float WHOLE = 12582912.0f;
static_assert(DECODE_WARPS == PHASES, "a warp has a phase in every pass");

// The chunks that a warp processes in turn: pass by pass, one chunk of every stride.
struct WarpChunks {
  int chunks, chunk;

  // Start from chunk `part`, which is 0 or 1.
  __device__ __forceinline__ WarpChunks(int strides, int warp, int part) : chunks(strides * STRIDE_CHUNKS), chunk(warp) {
    if (part) next();
  }
  __device__ __forceinline__ void next() {
    chunk += STRIDE_CHUNKS;
    if (chunk >= chunks) chunk += PHASES - chunks;  // the next pass
  }
};

// The data that a warp needs of a chunk of eight rows of activations: a lane's bytes of row lane / 4, and the scales
// and sums of the two rows that it adds up.
struct GroupChunk {
  uint2 bytes;
  float4 scales;

  __device__ __forceinline__ void read(const GroupedRows& x, int group, int chunk, int rows) {
    const int lane = threadIdx.x % WARP, member = lane % 4;
    const long long first = ((long long)group * x.chunks + chunk) * GROUP;
    // Missing rows repeat the last row, so that no memory is read for them.
    const int row = min(lane / 4, rows - group * GROUP - 1);
    bytes = static_cast<const uint2*>(x.bytes)[(first + max(row, 0)) * 4 + member];
    scales = reinterpret_cast<const float4*>(x.scales)[first / 2 + member];
  }
};

// The stages of the tiles of a block. RowOf: (tile, row) -> its row of the matrix `matrix_of(tile)`.
template <class Reader, int tiles>
struct Stages {
  static constexpr int TILES = tiles, WORDS_1 = Reader::WORDS_1, WORDS_2 = Reader::WORDS_2, HALVES = Reader::HALVES;
  static constexpr int NUMBERS = HALVES * (1 + Reader::HAS_POINTS + Reader::HAS_MINIMUM);
  static constexpr int LINE = STAGE_CHUNKS + 1;  // stride of numbers: eight rows lie in different banks
  static constexpr int NUMBER_COUNT = tiles * NUMBERS * TILE * LINE;
  static constexpr int STAGE_WORDS = tiles * TILE * STAGE_CHUNKS * Reader::WORDS;
  static constexpr int ROOM = (SHARED_WORDS - 2 * NUMBER_COUNT) / STAGE_WORDS, MOST = CODE_WORDS / STAGE_WORDS;
  static constexpr int COUNT = ROOM < MOST ? ROOM : MOST < 8 ? MOST : 8;
  static constexpr int AHEAD = tiles * sizeof(typename Reader::Chunk) >= 80 ? 2 : 4;  // stages with numbers in flight
  static_assert(COUNT >= 2, "a stage is computed while another one comes");

  // Words of shared memory for codes. The sums of warps use this memory afterwards.
  template <int groups>
  static constexpr int MEMORY = COUNT * STAGE_WORDS > DECODE_WARPS * GROUP * groups * TILE ? COUNT * STAGE_WORDS
                                                                                          : DECODE_WARPS * GROUP * groups * TILE;

  unsigned* codes;  // [COUNT] of plane 1 [tiles][TILE][STAGE_CHUNKS][WORDS_1], then of plane 2
  float* numbers;   // [2][tiles][NUMBERS][TILE][LINE]
  int strides;

  // The chunk of a stage, and the row of a tile, that a thread loads.
  __device__ __forceinline__ static int own_chunk() { return threadIdx.x % STAGE_CHUNKS; }
  __device__ __forceinline__ static int own_row() { return threadIdx.x / STAGE_CHUNKS; }
  // The chunks of a row that a thread loads, stage by stage. Each warp has two chunks of a stage.
  __device__ __forceinline__ WarpChunks brought() const {
    return WarpChunks(strides, own_chunk() % DECODE_WARPS, own_chunk() / DECODE_WARPS);
  }

  // Chunks of eight adjacent rows in the same column lie in different banks.
  __device__ __forceinline__ static int index(int tile, int row, int chunk) {
    return (tile * TILE + row) * STAGE_CHUNKS + (chunk ^ row % 8);
  }
  __device__ __forceinline__ unsigned* first(int slot) const { return codes + slot * STAGE_WORDS; }
  __device__ __forceinline__ unsigned* second(int slot) const {
    return first(slot) + tiles * TILE * STAGE_CHUNKS * WORDS_1;
  }

  // Request one chunk of each tile into a slot. Past the last chunk of a row, the last chunk is read again, which is
  // harmless because the activations there are zero.
  template <class MatrixOf, class RowOf>
  __device__ __forceinline__ void ask(int slot, int chunk, const MatrixOf& matrix_of, const RowOf& row_of) const {
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const BlockMatrix& matrix = matrix_of(tile);
      const long long from = (long long)row_of(tile, own_row()) * matrix.chunks + min(chunk, matrix.chunks - 1);
      const int to = index(tile, own_row(), own_chunk());
      copy_few_later<4 * WORDS_1>(first(slot) + to * WORDS_1, matrix.data + from * (4 * WORDS_1));
      if constexpr (WORDS_2 > 0)
        copy_few_later<4 * WORDS_2>(second(slot) + to * WORDS_2, matrix.second + from * (4 * WORDS_2));
    }
  }

  // Read the scales and zero points of that chunk, as they are stored.
  using Read = typename Reader::Chunk;
  template <class MatrixOf, class RowOf>
  __device__ __forceinline__ void read_numbers(
      int chunk, const MatrixOf& matrix_of, const RowOf& row_of, Read (&read)[tiles]) const {
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const Reader reader{matrix_of(tile)};
      reader.read_numbers(row_of(tile, own_row()), min(chunk, reader.matrix.chunks - 1), read[tile]);
    }
  }

  // Store these numbers as floats. Stages alternate between two buffers.
  template <class MatrixOf>
  __device__ __forceinline__ void keep_numbers(int parity, const MatrixOf& matrix_of, const Read (&read)[tiles]) const {
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const auto factors = Reader{matrix_of(tile)}.factors(read[tile]);
      float* own = numbers + parity * NUMBER_COUNT + tile * NUMBERS * TILE * LINE + own_row() * LINE + own_chunk();
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        own[half * TILE * LINE] = factors.scale[half];
        if (Reader::HAS_POINTS) own[(HALVES + half) * TILE * LINE] = factors.zero[half];
        if (Reader::HAS_MINIMUM) own[(HALVES + half) * TILE * LINE] = factors.minimum[half];
      }
    }
  }

  // Add the sums of a chunk of a tile with each group of rows. A lane has two rows of the matrix and two rows of
  // activations: sums[2 row + activation].
  template <int groups>
  __device__ __forceinline__ void add(
      const BlockMatrix& matrix, int slot, int parity, int tile, int chunk, const GroupChunk (&x)[groups],
      float (&sums)[groups][4]) const {
    const int lane = threadIdx.x % WARP, own = lane / 4, t = lane % 4;
    int a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = index(tile, own + i % 2 * 8, chunk);
      const unsigned* low = first(slot) + at * WORDS_1;
      const unsigned* high = second(slot) + at * WORDS_2;
      auto code = [&](int word) { return word < WORDS_1 ? low[word] : high[word - WORDS_1]; };
      a[i] = Reader{matrix}.signed_bytes(Reader{matrix}.byte_word(code, t + i / 2 * 4));
    }
    const float* line = numbers + parity * NUMBER_COUNT + tile * NUMBERS * TILE * LINE + own * LINE + chunk;
    float scale[HALVES][2], other[HALVES][2] = {};
#pragma unroll
    for (int i = 0; i < 2 * HALVES; ++i) {
      const int half = i / 2, row = i % 2;
      scale[half][row] = line[half * TILE * LINE + row * 8 * LINE];
      if (Reader::HAS_POINTS || Reader::HAS_MINIMUM)
        other[half][row] = line[(HALVES + half) * TILE * LINE + row * 8 * LINE];
    }
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      float totals[4] = {};
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        int whole[4];
        const int b[2] = {(int)x[group].bytes.x, (int)x[group].bytes.y};
        if (HALVES == 1) multiply_bytes(whole, a, b, (int)WHOLE_BITS);
        else multiply_half_bytes(whole, a[2 * half], a[2 * half + 1], b[half], (int)WHOLE_BITS);
        add_whole(matrix, half, whole, scale[half], other[half], x[group].scales, totals);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[group][i] = fmaf(totals[i], i % 2 ? x[group].scales.z : x[group].scales.x, sums[group][i]);
    }
  }

  // The same arithmetic as `dot` of weights.cuh.
  __device__ __forceinline__ static void add_whole(
      const BlockMatrix& matrix, int half, const int (&whole)[4], const float (&scale)[2], const float (&other)[2],
      const float4& x, float (&totals)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i / 2, packed = (int)__float_as_uint(i % 2 ? x.w : x.y), low = (short)packed, high = packed >> 16;
      const float ones = (float)(HALVES == 1 ? low + high : half ? high : low), found = __uint_as_float((unsigned)whole[i]);
      if constexpr (Reader::IS_NARROW && !Reader::HAS_POINTS) {
        if (half == 0) {  // the total is 0: WHOLE times the factor is subtracted exactly, in one operation
          totals[i] = fmaf(found, scale[row], -WHOLE * scale[row]);
          if constexpr (Reader::HAS_MINIMUM) totals[i] = fmaf(-other[row], ones, totals[i]);
          continue;
        }
      }
      float sum = found - WHOLE;
      if constexpr (Reader::HAS_POINTS) sum = fmaf((float)Reader::BIAS - other[row], ones, sum);
      totals[i] = fmaf(sum, Reader::IS_GRID ? scale[row] * matrix.unit : scale[row], totals[i]);
      if constexpr (Reader::HAS_MINIMUM) totals[i] = fmaf(-other[row], ones, totals[i]);
    }
  }
};

// The sums of all warps of one tile, for groups of rows. Thread i has output i % 16 of row i / 16, and of rows that
// are DECODE_THREADS / 16 further.
template <int groups>
struct WarpSums {
  static constexpr int ROWS = GROUP * groups, EACH = (ROWS * TILE + DECODE_THREADS - 1) / DECODE_THREADS;

  // Lanes that write at the same time write to different banks.
  __device__ __forceinline__ static int index(int row, int output) {
    const int token = row % GROUP, permuted = token % 2 * 4 + token / 2;
    return (row / GROUP * GROUP + permuted) * TILE + (output ^ permuted / 2 % 2 * 8);
  }

  // Called by all threads of a block. memory: DECODE_WARPS * ROWS * TILE floats that are not in use.
  __device__ __forceinline__ static void add(const float (&sums)[groups][4], float* memory, float (&found)[EACH]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, t = lane % 4;
    __syncthreads();  // all threads have read the memory's content
#pragma unroll
    for (int group = 0; group < groups; ++group)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        memory[warp * (ROWS * TILE) + index(group * GROUP + 2 * t + i % 2, lane / 4 + i / 2 * 8)] = sums[group][i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int own = i * DECODE_THREADS + threadIdx.x;
      if (ROWS * TILE < DECODE_THREADS && own >= ROWS * TILE) return;
      const float* from = memory + index(own / TILE, own % TILE);
      float warps[DECODE_WARPS];
#pragma unroll
      for (int other = 0; other < DECODE_WARPS; ++other) warps[other] = from[other * (ROWS * TILE)];
#pragma unroll
      for (int distance = DECODE_WARPS / 2; distance; distance /= 2)
#pragma unroll
        for (int other = 0; other < distance; ++other) warps[other] += warps[other + distance];
      found[i] = warps[0];
    }
  }
};

// True if rows of this many groups pass through shared memory.
template <int groups>
constexpr bool IS_RINGED = groups >= 4;

// Rows of activations in flight into shared memory, one stage ahead. A warp reads only the data that it requested
// itself.
template <int groups>
struct RowRing {
  static constexpr int PARTS = STAGE_CHUNKS / DECODE_WARPS, ROW_BYTES = GROUP * CHUNK, SCALE_BYTES = GROUP * (int)sizeof(float2);
  static constexpr int PART_BYTES = groups * (ROW_BYTES + SCALE_BYTES);
  // A lane copies the same 16 bytes of every ROW_STEP-th group.
  static constexpr int ROW_COPIES = ROW_BYTES / 16, SCALE_COPIES = SCALE_BYTES / 16, ROW_STEP = WARP / ROW_COPIES;
  static_assert(WARP % ROW_COPIES == 0 && groups <= WARP / SCALE_COPIES, "all scales are copied at once");
  unsigned char *own, *into;
  const unsigned char *bytes, *scales;
  int step, there;

  // Nothing is read for missing groups.
  __device__ __forceinline__ RowRing(unsigned char* memory, const GroupedRows& x, int first_group, int rows) {
    const int lane = threadIdx.x % WARP;
    there = min(groups, (rows + GROUP - 1) / GROUP - first_group);
    own = memory + threadIdx.x / WARP * PART_BYTES, into = own + lane * 16;
    bytes = static_cast<const unsigned char*>(x.bytes) + lane % ROW_COPIES * 16 +
            (long long)(first_group + lane / ROW_COPIES) * x.chunks * ROW_BYTES;
    scales = reinterpret_cast<const unsigned char*>(x.scales) + lane % SCALE_COPIES * 16 +
             (long long)(first_group + lane / SCALE_COPIES) * x.chunks * SCALE_BYTES;
    step = x.chunks * (ROW_STEP * ROW_BYTES);
  }
  __device__ __forceinline__ static constexpr int offset(int parity, int part) {
    return (parity * PARTS + part) * DECODE_WARPS * PART_BYTES;
  }
  __device__ __forceinline__ void ask(int chunk, int parity, int part) const {
    const int lane = threadIdx.x % WARP;
    const unsigned char* from = bytes + (long long)chunk * ROW_BYTES;
#pragma unroll
    for (int start = 0; start < groups; start += ROW_STEP, from += step)
      if (start + lane / ROW_COPIES < there) copy_later(into + (offset(parity, part) + start * ROW_BYTES), from);
    if (lane / SCALE_COPIES < there)
      copy_later(into + (offset(parity, part) + groups * ROW_BYTES), scales + (long long)chunk * SCALE_BYTES);
  }
  __device__ __forceinline__ GroupChunk read(int parity, int part, int group) const {
    const int lane = threadIdx.x % WARP;
    const unsigned char* from = own + offset(parity, part);
    GroupChunk found;
    found.bytes = reinterpret_cast<const uint2*>(from + group * ROW_BYTES)[lane];
    found.scales = reinterpret_cast<const float4*>(from + groups * ROW_BYTES + group * SCALE_BYTES)[lane % 4];
    return found;
  }
};

// Compute the sums of a block's tiles with groups of rows from first_group on. finish(tile, found) receives the sums as
// in `WarpSums`, when the memory of `numbers` is free. rows_memory: memory of a RowRing, which many groups need because
// their rows do not fit in registers.
template <int groups, class Own, class MatrixOf, class RowOf, class Finish>
__device__ __forceinline__ void decode_tiles(
    const Own& own, unsigned char* rows_memory, const GroupedRows& x, int first_group, int rows, const MatrixOf& matrix_of,
    const RowOf& row_of, const Finish& finish) {
  using Sums = WarpSums<groups>;
  constexpr int tiles = Own::TILES, PARTS = STAGE_CHUNKS / DECODE_WARPS;
  constexpr bool RINGED = IS_RINGED<groups>;
  constexpr int ROWS_AHEAD = RINGED ? 1 : groups == 1 ? 4 : 2;
  // Stages with numbers in flight. With many rows, a stage takes longer than a memory access.
  constexpr int AHEAD = RINGED ? 2 : Own::AHEAD;
  static_assert(AHEAD % 2 == 0 && AHEAD * PARTS % ROWS_AHEAD == 0, "slots are known when loops are unrolled");
  const int warp = threadIdx.x / WARP, parts = PASSES * own.strides, stages = parts / PARTS;
  // Codes, scales and rows are requested different numbers of stages ahead.
  WarpChunks codes = own.brought(), numbers = own.brought(), asked_rows(own.strides, warp, 0);
  int slot = 0, free_slot = Own::COUNT - 1;
  auto ask_codes = [&](int stage, int into) {
    if (stage < stages) own.ask(into, codes.chunk, matrix_of, row_of), codes.next(), codes.next();
    end_group();
  };
  typename Own::Read read[AHEAD][tiles];
  auto read_numbers = [&](int stage, typename Own::Read(&into)[tiles]) {
    if (stage < stages) own.read_numbers(numbers.chunk, matrix_of, row_of, into), numbers.next(), numbers.next();
  };
#pragma unroll
  for (int stage = 0; stage < Own::COUNT - 1; ++stage) ask_codes(stage, stage);
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) read_numbers(i, read[i]);
  wait_for_earlier();
  float sums[tiles][groups][4] = {}, totals[tiles][groups][4] = {};  // of this pass, and of the passes before
  // Activations are read from the L2 cache: some chunks ahead into registers, or many rows a stage ahead into shared
  // memory.
  const RowRing<groups> ring(rows_memory, x, first_group, rows);
  GroupChunk next[ROWS_AHEAD][groups] = {};
  auto read_rows = [&](int part, GroupChunk(&into)[groups]) {
    if (part >= parts) return;
#pragma unroll
    for (int group = 0; group < groups; ++group)
      if (group == 0 || (first_group + group) * GROUP < rows)
        into[group].read(x, first_group + group, asked_rows.chunk, rows);
    asked_rows.next();
  };
  auto ask_rows = [&](int stage, int parity) {
    if (stage < stages) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        ring.ask(asked_rows.chunk, parity, part), asked_rows.next();
    }
    end_group();
  };
  if constexpr (RINGED) {
    ask_rows(0, 0);
    end_group();  // in a stage, the group of the codes is the last group
  } else {
#pragma unroll
    for (int i = 0; i < ROWS_AHEAD; ++i) read_rows(i, next[i]);
  }
  int left = own.strides;  // remaining chunks of this pass
  for (int base = 0; base < stages; base += AHEAD)
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int stage = base + i, parity = i % 2;
      if (stage >= stages) break;
      own.keep_numbers(parity, matrix_of, read[i]);
      read_numbers(stage + AHEAD, read[i]);
      if constexpr (RINGED) wait_groups<Own::COUNT == 2 ? 0 : 1>();
      else wait_groups<Own::COUNT - 2>();
      __syncthreads();  // the stage and its numbers are complete, and the stage before has been computed
      if constexpr (RINGED) ask_rows(stage + 1, 1 - parity);
      ask_codes(stage + Own::COUNT - 1, free_slot);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        GroupChunk now[groups];
        if constexpr (RINGED) {
#pragma unroll
          for (int group = 0; group < groups; ++group) now[group] = ring.read(parity, part, group);
        } else {
          GroupChunk(&held)[groups] = next[(i * PARTS + part) % ROWS_AHEAD];
#pragma unroll
          for (int group = 0; group < groups; ++group) now[group] = held[group];
          read_rows(stage * PARTS + part + ROWS_AHEAD, held);
        }
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile)
          own.add(matrix_of(tile), slot, parity, tile, part * DECODE_WARPS + warp, now, sums[tile]);
        if (--left) continue;
        left = own.strides;
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
          for (int group = 0; group < groups; ++group)
#pragma unroll
            for (int j = 0; j < 4; ++j) totals[tile][group][j] += sums[tile][group][j], sums[tile][group][j] = 0.0f;
      }
      free_slot = slot, slot = slot + 1 == Own::COUNT ? 0 : slot + 1;
    }
  wait_groups<0>();
#pragma unroll
  for (int tile = 0; tile < tiles; ++tile) {
    float found[Sums::EACH];
    Sums::add(totals[tile], reinterpret_cast<float*>(own.codes), found);
    finish(tile, found);
  }
}
