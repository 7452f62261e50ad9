// Products of some rows of activations with a matrix of few bits, both as bytes, by tensor cores: every weight is read
// once for up to 64 rows.
//
// A block makes 16 neighbouring outputs per tile. Its eight warps share the columns: in pass j warp w takes chunks w + 8 j
// of every stride in order, whose sums are whole numbers and exact; then passes are added in order, and the warps in pairs.
// So a row's bits depend neither on the other rows nor on how many there are.
//
// Weights come through shared memory, several stages of 16 chunks ahead, and the first ones are asked for before the
// kernels before have ended: what bounds these products is memory, which must not rest.
#pragma once
#include "groups.cuh"

constexpr int DECODE_WARPS = 8, DECODE_THREADS = DECODE_WARPS * WARP, TILE = 16, STAGE_CHUNKS = 16;
// Words of a block's shared memory: of all, and of codes.
constexpr int SHARED_WORDS = 11 << 10, CODE_WORDS = 8 << 10;
// A whole number up to 2 ** 22 added to these bits gives those of the float that is so much larger than this one.
constexpr unsigned WHOLE_BITS = 0x4b400000u;
constexpr float WHOLE = 12582912.0f;
static_assert(DECODE_WARPS == PHASES, "a warp has a phase in every pass");

// Of a matrix with so many strides the chunk that a warp takes in its turn `part`: pass by pass.
__device__ __forceinline__ int chunk_of(int part, int warp, int strides) {
  const int pass = (part >= strides) + (part >= 2 * strides) + (part >= 3 * strides);
  return (part - pass * strides) * STRIDE_CHUNKS + pass * PHASES + warp;
}

// What a warp needs of a chunk of eight rows of activations: a lane's bytes of row lane / 4, and what belongs to the two
// rows whose sums it has.
struct GroupChunk {
  uint2 bytes;
  float4 scales;

  __device__ __forceinline__ void read(const GroupedRows& x, int group, int chunk, int rows) {
    const int lane = threadIdx.x % WARP, place = lane % 4;
    const long long first = ((long long)group * x.chunks + chunk) * GROUP;
    // Rows that are not there are as the last one, so that nothing is read for them.
    const int row = min(lane / 4, rows - group * GROUP - 1);
    bytes = static_cast<const uint2*>(x.bytes)[(first + max(row, 0)) * 4 + place];
    scales = reinterpret_cast<const float4*>(x.scales)[first / 2 + place];
  }
};

// The stages of the tiles of a block. RowOf: (tile, row) -> its row of the matrix `matrix_of(tile)`.
template <class Reader, int tiles>
struct Stages {
  static constexpr int TILES = tiles, WORDS_1 = Reader::WORDS_1, WORDS_2 = Reader::WORDS_2, HALVES = Reader::HALVES;
  static constexpr int NUMBERS = HALVES * (1 + Reader::HAS_POINTS + Reader::HAS_MINIMUM);
  static constexpr int LINE = STAGE_CHUNKS + 1;  // of numbers: eight rows lie in different banks
  static constexpr int NUMBER_COUNT = tiles * NUMBERS * TILE * LINE;
  static constexpr int STAGE_WORDS = tiles * TILE * STAGE_CHUNKS * Reader::WORDS;
  static constexpr int ROOM = (SHARED_WORDS - 2 * NUMBER_COUNT) / STAGE_WORDS, MOST = CODE_WORDS / STAGE_WORDS;
  static constexpr int COUNT = ROOM < MOST ? ROOM : MOST < 8 ? MOST : 8;
  static constexpr int AHEAD = tiles * sizeof(typename Reader::Chunk) >= 80 ? 2 : 4;  // stages whose numbers are under way
  static_assert(COUNT >= 2, "a stage is computed while another one comes");

  // Words of shared memory for codes, which the sums of warps take afterwards.
  template <int groups>
  static constexpr int MEMORY = COUNT * STAGE_WORDS > DECODE_WARPS * GROUP * groups * TILE ? COUNT * STAGE_WORDS
                                                                                          : DECODE_WARPS * GROUP * groups * TILE;

  unsigned* codes;  // [COUNT] of plane 1 [tiles][TILE][STAGE_CHUNKS][WORDS_1], then of plane 2
  float* numbers;   // [2][tiles][NUMBERS][TILE][LINE]
  int strides;

  // The chunk that a thread brings for a stage.
  __device__ __forceinline__ int chunk_brought(int stage) const {
    const int own = stage * STAGE_CHUNKS + threadIdx.x % STAGE_CHUNKS;
    return chunk_of(own / DECODE_WARPS, own % DECODE_WARPS, strides);
  }

  // Chunks of eight neighbouring rows in the same column lie in different banks.
  __device__ __forceinline__ static int place(int tile, int row, int chunk) {
    return (tile * TILE + row) * STAGE_CHUNKS + (chunk ^ row % 8);
  }
  __device__ __forceinline__ unsigned* second(int stage) const {
    return codes + stage % COUNT * STAGE_WORDS + tiles * TILE * STAGE_CHUNKS * WORDS_1;
  }

  // A thread brings one chunk of each tile.
  template <class MatrixOf, class RowOf>
  __device__ __forceinline__ void ask(int stage, int stages, const MatrixOf& matrix_of, const RowOf& row_of) const {
    if (stage < stages) {
      const int row = threadIdx.x / STAGE_CHUNKS, chunk = threadIdx.x % STAGE_CHUNKS;
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        const BlockMatrix& matrix = matrix_of(tile);
        const long long from =
            (long long)row_of(tile, row) * matrix.chunks + min(chunk_brought(stage), matrix.chunks - 1);
        const int to = place(tile, row, chunk);
        copy_few_later<4 * WORDS_1>(codes + stage % COUNT * STAGE_WORDS + to * WORDS_1, matrix.data + from * (4 * WORDS_1));
        if constexpr (WORDS_2 > 0)
          copy_few_later<4 * WORDS_2>(second(stage) + to * WORDS_2, matrix.second + from * (4 * WORDS_2));
      }
    }
    end_group();
  }

  // The numbers of that chunk, as they lie in memory ...
  using Read = typename Reader::Chunk;
  template <class MatrixOf, class RowOf>
  __device__ __forceinline__ void read_numbers(
      int stage, const MatrixOf& matrix_of, const RowOf& row_of, Read (&read)[tiles]) const {
    const int row = threadIdx.x / STAGE_CHUNKS, chunk = chunk_brought(stage);
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const Reader reader{matrix_of(tile)};
      reader.read_numbers(row_of(tile, row), min(chunk, reader.matrix.chunks - 1), read[tile]);
    }
  }

  // ... and as floats. Chunks behind the last one are worth nothing.
  template <class MatrixOf>
  __device__ __forceinline__ void keep_numbers(int stage, const MatrixOf& matrix_of, const Read (&read)[tiles]) const {
    const int row = threadIdx.x / STAGE_CHUNKS, chunk = threadIdx.x % STAGE_CHUNKS;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const Reader reader{matrix_of(tile)};
      const auto factors = reader.factors(read[tile]);
      const bool there = chunk_brought(stage) < reader.matrix.chunks;
      float* own = numbers + stage % 2 * NUMBER_COUNT + tile * NUMBERS * TILE * LINE + row * LINE + chunk;
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        own[half * TILE * LINE] = there ? factors.scale[half] : 0.0f;
        if (Reader::HAS_POINTS) own[(HALVES + half) * TILE * LINE] = there ? factors.zero[half] : 0.0f;
        if (Reader::HAS_MINIMUM) own[(HALVES + half) * TILE * LINE] = there ? factors.minimum[half] : 0.0f;
      }
    }
  }

  // Sums of a chunk of a tile with so many groups of rows, for the two rows of the matrix and two of activations that a lane
  // has: sums[2 row + activation].
  template <int groups>
  __device__ __forceinline__ void add(
      const BlockMatrix& matrix, int stage, int tile, int chunk, const GroupChunk (&x)[groups], float (&sums)[groups][4]) const {
    const int lane = threadIdx.x % WARP, own = lane / 4, t = lane % 4;
    int a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = place(tile, own + i % 2 * 8, chunk);
      const unsigned* first = codes + stage % COUNT * STAGE_WORDS + at * WORDS_1;
      const unsigned* other = second(stage) + at * WORDS_2;
      auto code = [&](int word) { return word < WORDS_1 ? first[word] : other[word - WORDS_1]; };
      a[i] = Reader{matrix}.byte_word(code, t + i / 2 * 4);
    }
    const float* line = numbers + stage % 2 * NUMBER_COUNT + tile * NUMBERS * TILE * LINE + own * LINE + chunk;
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

  // As `dot` of weights.cuh has it.
  __device__ __forceinline__ static void add_whole(
      const BlockMatrix& matrix, int half, const int (&whole)[4], const float (&scale)[2], const float (&other)[2],
      const float4& x, float (&totals)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i / 2, packed = (int)__float_as_uint(i % 2 ? x.w : x.y), low = (short)packed, high = packed >> 16;
      const float ones = (float)(HALVES == 1 ? low + high : half ? high : low);
      float sum = __uint_as_float((unsigned)whole[i]) - WHOLE;
      if constexpr (Reader::HAS_ZERO)
        sum = fmaf((float)Reader::BIAS - (Reader::HAS_POINTS ? other[row] : matrix.zero), ones, sum);
      totals[i] = fmaf(sum, Reader::IS_GRID ? scale[row] * matrix.unit : scale[row], totals[i]);
      if constexpr (Reader::HAS_MINIMUM) totals[i] = fmaf(-other[row], ones, totals[i]);
    }
  }
};

// The sums of all warps of one tile, for groups of rows; thread i has output i % 16 of row i / 16, and of those that are
// DECODE_THREADS / 16 rows further.
template <int groups>
struct WarpSums {
  static constexpr int ROWS = GROUP * groups, EACH = (ROWS * TILE + DECODE_THREADS - 1) / DECODE_THREADS;

  // Lanes that write at the same time do so to different banks.
  __device__ __forceinline__ static int place(int row, int output) {
    const int token = row % GROUP, turned = token % 2 * 4 + token / 2;
    return (row / GROUP * GROUP + turned) * TILE + (output ^ turned / 2 % 2 * 8);
  }

  // All threads of a block together. memory: DECODE_WARPS * ROWS * TILE floats that nobody else uses.
  __device__ __forceinline__ static void add(const float (&sums)[groups][4], float* memory, float (&found)[EACH]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, t = lane % 4;
    __syncthreads();  // what was there has been read
#pragma unroll
    for (int group = 0; group < groups; ++group)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        memory[warp * (ROWS * TILE) + place(group * GROUP + 2 * t + i % 2, lane / 4 + i / 2 * 8)] = sums[group][i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int own = i * DECODE_THREADS + threadIdx.x;
      if (ROWS * TILE < DECODE_THREADS && own >= ROWS * TILE) return;
      const float* from = memory + place(own / TILE, own % TILE);
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

// Whether rows of so many groups come through shared memory.
template <int groups>
constexpr bool IS_RINGED = groups >= 4;

// Rows of activations that are under way into shared memory, a stage ahead: a warp reads only what it asked for itself.
template <int groups>
struct RowRing {
  static constexpr int PARTS = STAGE_CHUNKS / DECODE_WARPS, ROW_BYTES = GROUP * CHUNK, SCALE_BYTES = GROUP * (int)sizeof(float2);
  static constexpr int PART_BYTES = groups * (ROW_BYTES + SCALE_BYTES);
  unsigned char* memory;

  __device__ __forceinline__ unsigned char* place(int stage, int part) const {
    return memory + ((stage % 2 * PARTS + part) * DECODE_WARPS + threadIdx.x / WARP) * PART_BYTES;
  }
  // Of groups that are not there nothing is read.
  __device__ __forceinline__ void ask(const GroupedRows& x, int first_group, int chunk, int rows, int stage, int part) const {
    copy<ROW_BYTES>(place(stage, part), x, x.bytes, first_group, chunk, rows);
    copy<SCALE_BYTES>(place(stage, part) + groups * ROW_BYTES, x, x.scales, first_group, chunk, rows);
  }
  __device__ __forceinline__ GroupChunk read(int stage, int part, int group) const {
    const int lane = threadIdx.x % WARP;
    const unsigned char* own = place(stage, part);
    GroupChunk found;
    found.bytes = reinterpret_cast<const uint2*>(own + group * ROW_BYTES)[lane];
    found.scales = reinterpret_cast<const float4*>(own + groups * ROW_BYTES + group * SCALE_BYTES)[lane % 4];
    return found;
  }

 private:
  template <int bytes>
  __device__ __forceinline__ static void copy(
      unsigned char* to, const GroupedRows& x, const void* from, int first_group, int chunk, int rows) {
    constexpr int COPIES = bytes / 16;  // of a group
#pragma unroll
    for (int start = 0; start < groups * COPIES; start += WARP) {
      const int i = start + threadIdx.x % WARP, group = first_group + i / COPIES;
      if (i < groups * COPIES && group * GROUP < rows)
        copy_later(
            to + i * 16,
            static_cast<const unsigned char*>(from) + ((long long)group * x.chunks + chunk) * bytes + i % COPIES * 16);
    }
  }
};

// The sums of a block's tiles with groups of rows from first_group on: finish(tile, found), as `WarpSums` has them. The
// numbers' memory is free by then. rows_memory: of a RowRing, which many groups have: registers do not suffice for them.
template <int groups, class Own, class MatrixOf, class RowOf, class Finish>
__device__ __forceinline__ void decode_tiles(
    const Own& own, unsigned char* rows_memory, const GroupedRows& x, int first_group, int rows, const MatrixOf& matrix_of,
    const RowOf& row_of, const Finish& finish) {
  using Sums = WarpSums<groups>;
  constexpr int tiles = Own::TILES, PARTS = STAGE_CHUNKS / DECODE_WARPS;
  constexpr bool RINGED = IS_RINGED<groups>;
  const int warp = threadIdx.x / WARP, strides = own.strides, parts = PASSES * strides, stages = parts / PARTS;
  for (int stage = 0; stage < Own::COUNT - 1; ++stage) own.ask(stage, stages, matrix_of, row_of);
  typename Own::Read read[Own::AHEAD][tiles];
#pragma unroll
  for (int i = 0; i < Own::AHEAD; ++i) own.read_numbers(min(i, stages - 1), matrix_of, row_of, read[i]);
  wait_for_earlier();
  float sums[tiles][groups][4] = {}, totals[tiles][groups][4] = {};  // of a pass, and of those before
  // Activations come from the second-level cache: some chunks ahead into registers, or many rows a stage ahead.
  constexpr int ROWS_AHEAD = RINGED ? 1 : groups == 1 ? 4 : 2;
  const RowRing<groups> ring{rows_memory};
  GroupChunk next[ROWS_AHEAD][groups] = {};
  auto chunk_at = [&](int part) { return chunk_of(min(part, parts - 1), warp, strides); };  // x has whole strides
  auto read_rows = [&](int part, GroupChunk(&into)[groups]) {
#pragma unroll
    for (int group = 0; group < groups; ++group)
      if (group == 0 || (first_group + group) * GROUP < rows) into[group].read(x, first_group + group, chunk_at(part), rows);
  };
  auto ask_rows = [&](int stage) {
    if (stage < stages) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) ring.ask(x, first_group, chunk_at(stage * PARTS + part), rows, stage, part);
    }
    end_group();
  };
  if constexpr (RINGED) {
    ask_rows(0);
    end_group();  // in a stage the codes' group is the last one
  } else {
#pragma unroll
    for (int i = 0; i < ROWS_AHEAD; ++i) read_rows(i, next[i]);
  }
  int left = strides;  // turns of this pass
  for (int base = 0; base < stages; base += Own::AHEAD)
#pragma unroll
    for (int i = 0; i < Own::AHEAD; ++i) {
      const int stage = base + i;
      if (stage >= stages) break;
      own.keep_numbers(stage, matrix_of, read[i]);
      own.read_numbers(min(stage + Own::AHEAD, stages - 1), matrix_of, row_of, read[i]);
      if constexpr (RINGED) wait_groups<Own::COUNT == 2 ? 0 : 1>();
      else wait_groups<Own::COUNT - 2>();
      __syncthreads();  // the stage and its numbers are there, the stage before has been computed
      if constexpr (RINGED) ask_rows(stage + 1);
      own.ask(stage + Own::COUNT - 1, stages, matrix_of, row_of);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        GroupChunk now[groups];
        if constexpr (RINGED) {
#pragma unroll
          for (int group = 0; group < groups; ++group) now[group] = ring.read(stage, part, group);
        } else {
#pragma unroll
          for (int group = 0; group < groups; ++group) now[group] = next[(i * PARTS + part) % ROWS_AHEAD][group];
          read_rows(stage * PARTS + part + ROWS_AHEAD, next[(i * PARTS + part) % ROWS_AHEAD]);
        }
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile)
          own.add(matrix_of(tile), stage, tile, part * DECODE_WARPS + warp, now, sums[tile]);
        if (--left) continue;
        left = strides;
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
          for (int group = 0; group < groups; ++group)
#pragma unroll
            for (int j = 0; j < 4; ++j) totals[tile][group][j] += sums[tile][group][j], sums[tile][group][j] = 0.0f;
      }
    }
  wait_groups<0>();
#pragma unroll
  for (int tile = 0; tile < tiles; ++tile) {
    float found[Sums::EACH];
    Sums::add(totals[tile], reinterpret_cast<float*>(own.codes), found);
    finish(tile, found);
  }
}
