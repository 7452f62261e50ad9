// softmax(q k * scale) v of many rows of a sequence by tensor cores (FlashAttention-2: Dao 2023).
//
// Numbers are float16, sums float32: what pages of 16 bits hold is multiplied as it is, small integers become float16
// on the way, and a query is brought near 1 by a power of two before it is rounded. A row meets steps of tokens that
// begin at multiples of STEP, in order, and one that it does not see changes no bit of it; so its bits do not depend on
// the other rows of its tile.
#include "pages.cuh"
#include "reduce.cuh"

// rotated: [rows][heads * head_size]. tiles: [tiles][3], a sequence, its first row, and how many rows, which follow each
// other; 0 = nothing to do. together: query heads of a KV head whose rows a block takes.
struct TileArguments {
  const float* rotated;
  const float* sinks;
  const int* tiles;
  float* out;
  StepRows step;
  Pages pages;
  long long out_stride;
  int heads;
  int kv_heads;
  int together;
  int window;
  float scale;
  float softcap;
  int smooth;
};

// A warp has 16 query rows (of all heads together) and all columns of a block. Each step's tokens are there while the
// next ones are on their way.
constexpr int TILE_WARPS = 4, TILE_THREADS = TILE_WARPS * WARP, WARP_ROWS = 16, TILE_ROWS = TILE_WARPS * WARP_ROWS;
constexpr int OCTET = 8;  // numbers of 16 bytes
constexpr int SHARED_CHUNKS = (48 << 10) / 16 - 16;  // but for some numbers
constexpr float LOWEST = -3.0e38f;  // below every score, and finite
constexpr float LOG2_E = 1.44269504088896f;

// How tiles of keys [columns][tokens] and values [tokens][columns] lie in shared memory, in chunks of 16 bytes. Rows
// are an odd number of chunks apart, so that eight rows' chunks lie in different banks.
template <int head_size, int columns, int step>
struct TileShape {
  static constexpr int KEY_ROWS = (head_size + 15) / 16 * 16, KEY_CHUNKS = step / OCTET | 1;
  static constexpr int VALUE_CHUNKS = columns / OCTET | 1;
  static constexpr int KEYS = KEY_ROWS * KEY_CHUNKS, TOTAL = KEYS + step * VALUE_CHUNKS;
};

// Where a step's tokens are: in the pages of a head, from `token` of its page on.
struct StepPage {
  const unsigned char* keys;
  const unsigned char* values;
  int token;
};

// Pages of float16 are copied as they are ...
template <class Kind, int head_size, int v_head_size, int columns, int step>
struct TileSource {
  using Shape = TileShape<head_size, columns, step>;
  static constexpr int STAGED = 0;

  __device__ __forceinline__ void begin(const StepPage& from, uint4* tile, uint4*, int first_column) {
    constexpr int ACROSS = step / OCTET, KEYS = head_size * ACROSS, WIDE = columns / OCTET, VALUES = step * WIDE;
#pragma unroll 1
    for (int i = threadIdx.x; i < KEYS; i += TILE_THREADS) {
      const int row = i / ACROSS, chunk = i % ACROSS;
      copy_later(tile + row * Shape::KEY_CHUNKS + chunk, from.keys + (row * PAGE + from.token + chunk * OCTET) * 2);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < VALUES; i += TILE_THREADS) {
      const int row = i / WIDE, chunk = i % WIDE, column = first_column + chunk * OCTET;
      if (v_head_size % columns && column >= v_head_size) continue;
      copy_later(tile + Shape::KEYS + row * Shape::VALUE_CHUNKS + chunk,
                 from.values + ((from.token + row) * v_head_size + column) * 2);
    }
    end_group();
  }
  __device__ __forceinline__ void finish(uint4*, const uint4*) { wait_groups<0>(); }
};

// ... and small integers become float16. A thread unpacks the units that it has copied into places of its own: they
// would take the registers that sums need.
template <class Kind, int head_size, int v_head_size, int columns, int step>
struct UnpackingSource {
  using Shape = TileShape<head_size, columns, step>;
  using Keys = KeyUnit<Kind, head_size>;
  using Values = ValueUnit<Kind, v_head_size>;
  static constexpr int ACROSS = step / UNIT, WIDE = columns / Values::COLUMNS;
  static constexpr int KEYS = (Keys::COUNT * ACROSS + TILE_THREADS - 1) / TILE_THREADS;
  static constexpr int VALUES = (WIDE * ACROSS + TILE_THREADS - 1) / TILE_THREADS;
  static constexpr int STAGED = (KEYS + VALUES) * TILE_THREADS;
  // A token's scale is the same for all units of its key where it has one.
  static constexpr int KEY_SCALES = Form<Kind>::COLUMNS == UNIT && TILE_THREADS % ACROSS == 0 ? 1 : KEYS;
  Scales key_scales[KEY_SCALES], value_scales[VALUES];

  __device__ __forceinline__ void begin(const StepPage& from, uint4*, uint4* staged, int first_column) {
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
      const int place = i * TILE_THREADS + threadIdx.x;
      if (Keys::COUNT * ACROSS % TILE_THREADS && place >= Keys::COUNT * ACROSS) continue;
      const int unit = place / ACROSS, quad = from.token / UNIT + place % ACROSS;
      copy_later(staged + place, Keys::place(from.keys, unit, quad));
      if (i < KEY_SCALES) key_scales[i] = Keys::scales_of(from.keys, unit, quad);
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      const int place = i * TILE_THREADS + threadIdx.x, quad = from.token / UNIT + place / WIDE;
      if (WIDE * ACROSS % TILE_THREADS && place >= WIDE * ACROSS) continue;
      const int unit = min(first_column / Values::COLUMNS + place % WIDE, Values::COUNT - 1);
      copy_later(staged + KEYS * TILE_THREADS + place, Values::place(from.values, unit, quad));
      value_scales[i] = Values::scales_of(from.values, unit, quad, 0, PAGE);
    }
    end_group();
  }
  __device__ __forceinline__ void finish(uint4* tile, const uint4* staged) {
    wait_groups<0>();
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
      const int place = i * TILE_THREADS + threadIdx.x;
      if (Keys::COUNT * ACROSS % TILE_THREADS && place >= Keys::COUNT * ACROSS) continue;
      const Keys keys{Unit<Kind>{{staged[place]}}, key_scales[i % KEY_SCALES]};
#pragma unroll
      for (int column = 0; column < Keys::COLUMNS; ++column) {
        uint4* line = tile + column_of<Kind>(place / ACROSS, column) * Shape::KEY_CHUNKS;
        reinterpret_cast<uint2*>(line)[place % ACROSS] =
            uint2{half_pair(keys.number(column, 0), keys.number(column, 1)),
                  half_pair(keys.number(column, 2), keys.number(column, 3))};
      }
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      const int place = i * TILE_THREADS + threadIdx.x;
      if (WIDE * ACROSS % TILE_THREADS && place >= WIDE * ACROSS) continue;
      const Values values{Unit<Kind>{{staged[KEYS * TILE_THREADS + place]}}, value_scales[i]};
#pragma unroll
      for (int token = 0; token < UNIT; ++token) {
        uint4* line = tile + Shape::KEYS + (place / WIDE * UNIT + token) * Shape::VALUE_CHUNKS;
#pragma unroll
        for (int part = 0; part < Values::COLUMNS; part += UNIT)
          reinterpret_cast<uint2*>(line)[column_of<Kind>(place % WIDE, part) / UNIT] =
              uint2{half_pair(values.number(part, token), values.number(part + 1, token)),
                    half_pair(values.number(part + 2, token), values.number(part + 3, token))};
      }
    }
  }
};
template <int head_size, int v_head_size, int columns, int step>
struct TileSource<Int8, head_size, v_head_size, columns, step>
    : UnpackingSource<Int8, head_size, v_head_size, columns, step> {};
template <int head_size, int v_head_size, int columns, int step>
struct TileSource<Int4, head_size, v_head_size, columns, step>
    : UnpackingSource<Int4, head_size, v_head_size, columns, step> {};

// A value as its page holds it.
template <class Kind, int v_head_size>
__device__ __forceinline__ float value_at(const unsigned char* page, int token, int column) {
  ValueUnit<Kind, v_head_size> values;
  const int unit = Form<Kind>::COLUMNS > UNIT ? column / 32 * 4 + column % 16 / UNIT : column / UNIT;
  values.read(page, unit, token / UNIT, 0, PAGE);
  float found = 0.0f;
#pragma unroll
  for (int i = 0; i < Form<Kind>::COLUMNS; ++i)
#pragma unroll
    for (int j = 0; j < UNIT; ++j)
      if (column_of<Kind>(unit, i) == column && j == token % UNIT) found = values.number(i, j);
  return found;
}

// One of the two rows of a lane: a step's row and a head. Rows behind the last are as the last, and nobody's.
struct TileRow {
  __device__ __forceinline__ TileRow(const TileArguments& given, int i) {
    const int* tile = given.tiles + 3 * blockIdx.x;
    const int number = threadIdx.x / WARP * WARP_ROWS + threadIdx.x % WARP / 4 + 8 * i, own = number / given.together;
    is_there = own < tile[2];
    row = tile[1] + min(own, tile[2] - 1);
    head = blockIdx.y * given.together + number % given.together;
  }
  bool is_there;
  long long row;
  int head;
};

// Grid (tiles, heads / together, v_head_size / columns).
template <class Kind, int head_size, int v_head_size, int columns>
__device__ __forceinline__ void attend_tile(const TileArguments& given) {
  constexpr int CHUNKS_OF_A_PAGE =
      2 * TileShape<head_size, columns, PAGE>::TOTAL + TileSource<Kind, head_size, v_head_size, columns, PAGE>::STAGED;
  constexpr int STEP = CHUNKS_OF_A_PAGE <= SHARED_CHUNKS ? PAGE : PAGE / 2;
  using Shape = TileShape<head_size, columns, STEP>;
  constexpr int PARTS = Shape::KEY_ROWS / 16, SCORES = STEP / OCTET, WIDE = columns / OCTET;
  using Source = TileSource<Kind, head_size, v_head_size, columns, STEP>;
  SHARED(uint4, tile, 2 * Shape::TOTAL + Source::STAGED);
  SHARED(int, broken, STEP);
  const int lane = threadIdx.x % WARP, place = lane % 4;
  const int sequence = given.tiles[3 * blockIdx.x], rows = given.tiles[3 * blockIdx.x + 2];
  const int first_row = given.tiles[3 * blockIdx.x + 1];
  if (!rows) return;
  const int kv_head = blockIdx.y * given.together / (given.heads / given.kv_heads);
  const int first_column = blockIdx.z * columns;
  const int* table = given.step.tables + (long long)sequence * given.step.table_stride;

  int end[2];  // of the tokens that the lane's two rows see
  float factor[2];  // on their scores
  unsigned queries[PARTS][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const TileRow mine(given, i);
    end[i] = given.step.positions[mine.row] + 1;
    const float2* q = reinterpret_cast<const float2*>(given.rotated + (mine.row * given.heads + mine.head) * head_size);
    float largest = 0.0f;
#pragma unroll 4
    for (int pair = place; pair < head_size / 2; pair += 4) largest = fmaxf(largest, fmaxf(fabsf(q[pair].x), fabsf(q[pair].y)));
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
    // The power of two that is left of the largest number; of what is no usual number 1.
    const unsigned exponent = __float_as_uint(largest) & 0x7f800000u;
    const bool usual = exponent > 0u && exponent < 0x7f000000u;
    const float inverse = usual ? __uint_as_float(0x7f000000u - exponent) : 1.0f;
    factor[i] = (usual ? __uint_as_float(exponent) : 1.0f) * given.scale;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int pair = part * 8 + side * 4 + place;
        const float2 two = pair < head_size / 2 ? q[pair] : float2{0.0f, 0.0f};
        queries[part][i + 2 * side] = half_pair(two.x * inverse, two.y * inverse);
      }
    factor[i] *= given.softcap > 0.0f ? 1.0f / given.softcap : LOG2_E;
  }
  const int first_end = given.step.positions[first_row] + 1, last_end = given.step.positions[first_row + rows - 1] + 1;
  const int seen = given.window < 0 ? last_end : given.window;  // tokens up to a row's own, or more than there are
  const int from = max(0, first_end - seen) / STEP, to = (last_end - 1) / STEP;

  auto page_of = [&](int step) {
    const int token = step * STEP;
    const long long block = table[token / PAGE];
    return StepPage{given.pages.keys + block * given.pages.key_block + kv_head * key_bytes<Kind>(head_size),
                    given.pages.values + block * given.pages.value_block + kv_head * value_bytes<Kind>(v_head_size),
                    token % PAGE};
  };
  // Columns that only fill a product up: keys that are zero.
  for (int i = threadIdx.x; i < (Shape::KEY_ROWS - head_size) * Shape::KEY_CHUNKS; i += TILE_THREADS)
    tile[head_size * Shape::KEY_CHUNKS + i] = tile[Shape::TOTAL + head_size * Shape::KEY_CHUNKS + i] = uint4{};

  float highest[2] = {LOWEST, LOWEST}, total[2] = {}, result[WIDE][4] = {};
  uint4* staged = tile + 2 * Shape::TOTAL;
  Source source;
  source.begin(page_of(from), tile + from % 2 * Shape::TOTAL, staged, first_column);
#pragma unroll 1
  for (int step = from; step <= to; ++step) {
    uint4* own = tile + step % 2 * Shape::TOTAL;
    uint4* values = own + Shape::KEYS;
    const int token = step * STEP;
    source.finish(own, staged);
    __syncthreads();  // the tokens of this step are there, those of the step before have been read
    if (step < to) source.begin(page_of(step + 1), tile + (step + 1) % 2 * Shape::TOTAL, staged, first_column);
    const bool whole = token >= last_end - seen && token + STEP <= first_end;  // every row sees every token
    if (!whole) {
      // A value that is infinite or NaN must not reach rows that do not see it, not even times 0.
      if (threadIdx.x < STEP) broken[threadIdx.x] = 0;
      __syncthreads();  // none is broken yet
      for (int i = threadIdx.x; i < STEP * WIDE; i += TILE_THREADS) {
        unsigned* words = reinterpret_cast<unsigned*>(values + i / WIDE * Shape::VALUE_CHUNKS + i % WIDE);
#pragma unroll
        for (int word = 0; word < 4; ++word)
#pragma unroll
          for (unsigned half = 0x7c00u; half; half = half == 0x7c00u ? 0x7c000000u : 0u)
            if ((words[word] & half) == half) words[word] &= half == 0x7c00u ? 0xffff0000u : 0xffffu, broken[i / WIDE] = 1;
      }
      __syncthreads();  // values are finite
    }

    float scores[SCORES][4] = {};
    const uint4* key = own + lane % 16 * Shape::KEY_CHUNKS + lane / 16;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int two = 0; two < SCORES; two += 2) {
        unsigned pairs[4];
        load_turned(pairs, key + part * 16 * Shape::KEY_CHUNKS + two);
        multiply_half_tiles(scores[two], queries[part], pairs[0], pairs[1]);
        multiply_half_tiles(scores[two + 1], queries[part], pairs[2], pairs[3]);
      }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float above = LOWEST;
#pragma unroll
      for (int j = 0; j < SCORES; ++j)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float& score = scores[j][2 * i + k];
          score *= factor[i];
          if (given.softcap > 0.0f) score = given.softcap * LOG2_E * tanhf(score);
          const int at = token + j * OCTET + 2 * place + k;
          if (!whole && (at >= end[i] || at < end[i] - seen)) score = LOWEST;
          above = fmaxf(above, score);
        }
      above = fmaxf(above, __shfl_xor_sync(ALL_LANES, above, 1));
      above = fmaxf(highest[i], fmaxf(above, __shfl_xor_sync(ALL_LANES, above, 2)));
      const float kept = exp2f(highest[i] - above), base = above == LOWEST ? 0.0f : above;  // of nothing seen yet 0 is left
      highest[i] = above;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < SCORES; ++j)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float& score = scores[j][2 * i + k];
          score = exp2f(score - base);
          sum += score;
        }
      total[i] = fmaf(total[i], kept, sum);
      if (__any_sync(ALL_LANES, kept != 1.0f)) {  // most steps bring no row a new maximum
#pragma unroll
        for (int j = 0; j < WIDE; ++j) result[j][2 * i] *= kept, result[j][2 * i + 1] *= kept;
      }
    }
    const uint4* value = values + lane % 16 * Shape::VALUE_CHUNKS + lane / 16;
#pragma unroll
    for (int part = 0; part < STEP / 16; ++part) {
      const unsigned shares[4] = {half_pair(scores[2 * part][0], scores[2 * part][1]), half_pair(scores[2 * part][2], scores[2 * part][3]),
                                  half_pair(scores[2 * part + 1][0], scores[2 * part + 1][1]), half_pair(scores[2 * part + 1][2], scores[2 * part + 1][3])};
#pragma unroll
      for (int j = 0; j < WIDE; j += 2) {
        unsigned pairs[4];
        const bool alone = j + 1 == WIDE;  // there is no column beside it
        load_turned(pairs, value + part * 16 * Shape::VALUE_CHUNKS + j - (alone ? lane / 16 : 0));
        multiply_half_tiles(result[j], shares, pairs[0], pairs[1]);
        if (!alone) multiply_half_tiles(result[alone ? j : j + 1], shares, pairs[2], pairs[3]);
      }
    }
    if (!whole)
      for (int i = 0; i < STEP; ++i) {
        if (!broken[i]) continue;
        const StepPage page = page_of(step);
#pragma unroll 1
        for (int column = 0; column < columns; ++column) {
          if (column / 2 % 4 != place || first_column + column >= v_head_size) continue;
          const float number = value_at<Kind, v_head_size>(page.values, page.token + i, first_column + column);
          const float added = number - number == 0.0f ? 0.0f : number;
#pragma unroll
          for (int j = 0; j < WIDE; ++j)
#pragma unroll
            for (int k = 0; k < 4; ++k)
              if (OCTET * j + 2 * place + k % 2 == column && token + i >= end[k / 2] - seen && token + i < end[k / 2])
                result[j][k] += added;
        }
      }
  }

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const TileRow mine(given, i);  // once more, rather than in registers all the time
    total[i] += __shfl_xor_sync(ALL_LANES, total[i], 1);
    total[i] += __shfl_xor_sync(ALL_LANES, total[i], 2);
    float kept = 1.0f;
    if (given.sinks || given.smooth) {
      const float sink = given.sinks ? given.sinks[mine.head] * LOG2_E : 0.0f, above = fmaxf(highest[i], sink);
      kept = exp2f(highest[i] - above);
      total[i] = fmaf(total[i], kept, exp2f(sink - above));
    }
    if (!mine.is_there) continue;
    float2* out = reinterpret_cast<float2*>(
        given.out + mine.row * given.out_stride + mine.head * v_head_size + first_column);
    const float share = kept / total[i];
#pragma unroll
    for (int j = 0; j < WIDE; ++j) {
      if (v_head_size % columns && first_column + j * OCTET >= v_head_size) continue;
      out[j * 4 + place] = float2{result[j][2 * i] * share, result[j][2 * i + 1] * share};
    }
  }
}
