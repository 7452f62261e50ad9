// softmax(q k * scale) v of many rows of a sequence by tensor cores (FlashAttention-2: Dao 2023).
//
// Operands are float16, and sums are float32. Pages of float16 are multiplied directly, numbers of fewer bits are
// converted to float16, and a query is scaled close to 1 by a power of two before it is rounded. Over pages of
// bfloat16, which float16 may not be able to represent, all operands are bfloat16. A row processes steps of tokens that
// start at multiples of STEP, in order, and a step that the row does not see changes none of its bits. So the row's
// bits do not depend on the other rows of its tile.
#include "pages.cuh"
#include "reduce.cuh"

// rotated: [rows][heads * head_size]. tiles: [tiles][3], a sequence, its first row, and the number of consecutive
// rows; 0 = nothing to do. together: number of a KV head's query heads that a block computes together. window, chunk: see
// `first_seen`.
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
  int chunk;
  float scale;
  float softcap;
  int smooth;
};

// A warp has 16 query rows (over all heads together) and all columns of a block. While a step is computed, the tokens
// of the next step are loaded.
constexpr int TILE_WARPS = 4, TILE_THREADS = TILE_WARPS * WARP, WARP_ROWS = 16, TILE_ROWS = TILE_WARPS * WARP_ROWS;
constexpr int OCTET = 8;  // 16-bit numbers in 16 bytes
constexpr int SHARED_CHUNKS = (48 << 10) / 16 - 16;  // less the space for some numbers
constexpr float LOWEST = -3.0e38f;  // below every score, and finite
constexpr float LOG2_E = 1.44269504088896f;

// The layout of tiles of keys [columns][tokens] and values [tokens][columns] in shared memory, in chunks of 16 bytes.
// Rows are an odd number of chunks apart, so that the chunks of eight rows lie in different banks.
template <int head_size, int columns, int step>
struct TileShape {
  static constexpr int KEY_ROWS = (head_size + 15) / 16 * 16, KEY_CHUNKS = step / OCTET | 1;
  static constexpr int VALUE_CHUNKS = columns / OCTET | 1;
  static constexpr int KEYS = KEY_ROWS * KEY_CHUNKS, TOTAL = KEYS + step * VALUE_CHUNKS;
};

// The numbers that tensor cores multiply. An exponent of all ones marks infinity and NaN.
template <class Kind>
struct TileNumber {
  static constexpr unsigned EXPONENT = 0x7c00u;
  __device__ __forceinline__ static unsigned pair(float low, float high) { return half_pair(low, high); }
  __device__ __forceinline__ static void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    multiply_half_tiles(c, a, b0, b1);
  }
};
template <>
struct TileNumber<bfloat_bits> {
  static constexpr unsigned EXPONENT = 0x7f80u;
  __device__ __forceinline__ static unsigned pair(float low, float high) { return bfloat_pair(low, high); }
  __device__ __forceinline__ static void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    multiply_tiles(c, a, {b0, b1});
  }
};

// The tokens of a step, in the pages of a head, starting at `token` of the first page.
struct StepPage {
  const unsigned char* keys;
  const unsigned char* values;
  int token;
};

// Pages of 16 bits are copied unchanged.
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

// Small integers are converted to float16. A thread copies units to its own part of shared memory and unpacks them
// from there, because in registers the units would displace the sums.
template <class Kind, int head_size, int v_head_size, int columns, int step>
struct UnpackingSource {
  using Shape = TileShape<head_size, columns, step>;
  using Keys = KeyUnit<Kind, head_size>;
  using Values = ValueUnit<Kind, v_head_size>;
  static constexpr int ACROSS = step / UNIT, WIDE = columns / Values::COLUMNS;
  static constexpr int KEYS = (Keys::COUNT * ACROSS + TILE_THREADS - 1) / TILE_THREADS;
  static constexpr int VALUES = (WIDE * ACROSS + TILE_THREADS - 1) / TILE_THREADS;
  static constexpr int STAGED = (KEYS + VALUES) * TILE_THREADS;
  // If a token has one scale, it is the same for all units of its key.
  static constexpr int KEY_SCALES = PageFormat<Kind>::COLUMNS == UNIT && TILE_THREADS % ACROSS == 0 ? 1 : KEYS;
  Scales key_scales[KEY_SCALES], value_scales[VALUES];

  __device__ __forceinline__ void begin(const StepPage& from, uint4*, uint4* staged, int first_column) {
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
      const int index = i * TILE_THREADS + threadIdx.x;
      if (Keys::COUNT * ACROSS % TILE_THREADS && index >= Keys::COUNT * ACROSS) continue;
      const int unit = index / ACROSS, quad = from.token / UNIT + index % ACROSS;
      copy_later(staged + index, Keys::address(from.keys, unit, quad));
      if (i < KEY_SCALES) key_scales[i] = Keys::scales_of(from.keys, unit, quad);
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      const int index = i * TILE_THREADS + threadIdx.x, quad = from.token / UNIT + index / WIDE;
      if (WIDE * ACROSS % TILE_THREADS && index >= WIDE * ACROSS) continue;
      const int unit = min(first_column / Values::COLUMNS + index % WIDE, Values::COUNT - 1);
      copy_later(staged + KEYS * TILE_THREADS + index, Values::address(from.values, unit, quad));
      value_scales[i] = Values::scales_of(from.values, unit, quad, 0, PAGE);
    }
    end_group();
  }
  __device__ __forceinline__ void finish(uint4* tile, const uint4* staged) {
    wait_groups<0>();
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
      const int index = i * TILE_THREADS + threadIdx.x;
      if (Keys::COUNT * ACROSS % TILE_THREADS && index >= Keys::COUNT * ACROSS) continue;
      const Keys keys{Unit<Kind>{{staged[index]}}, key_scales[i % KEY_SCALES]};
#pragma unroll
      for (int column = 0; column < Keys::COLUMNS; ++column) {
        uint4* line = tile + column_of<Kind>(index / ACROSS, column) * Shape::KEY_CHUNKS;
        reinterpret_cast<uint2*>(line)[index % ACROSS] =
            uint2{half_pair(keys.number(column, 0), keys.number(column, 1)),
                  half_pair(keys.number(column, 2), keys.number(column, 3))};
      }
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      const int index = i * TILE_THREADS + threadIdx.x;
      if (WIDE * ACROSS % TILE_THREADS && index >= WIDE * ACROSS) continue;
      const Values values{Unit<Kind>{{staged[KEYS * TILE_THREADS + index]}}, value_scales[i]};
#pragma unroll
      for (int token = 0; token < UNIT; ++token) {
        uint4* line = tile + Shape::KEYS + (index / WIDE * UNIT + token) * Shape::VALUE_CHUNKS;
#pragma unroll
        for (int part = 0; part < Values::COLUMNS; part += UNIT)
          reinterpret_cast<uint2*>(line)[column_of<Kind>(index % WIDE, part) / UNIT] =
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

// Floats of 8 bits are converted to float16, which is lossless. A thread has 16 tokens of a column of keys at a time,
// and eight columns of a value.
template <int head_size, int v_head_size, int columns, int step>
struct TileSource<float8_bits, head_size, v_head_size, columns, step> {
  using Shape = TileShape<head_size, columns, step>;
  static constexpr int ACROSS = step / 16, KEYS = head_size * ACROSS, WIDE = columns / OCTET, VALUES = step * WIDE;
  static constexpr int STAGED = KEYS + (VALUES + 1) / 2;

  __device__ __forceinline__ static bool is_behind(int value, int first_column) {
    return v_head_size % columns && first_column + value % WIDE * OCTET >= v_head_size;
  }
  __device__ __forceinline__ static uint4 eight(unsigned low, unsigned high) {
    return uint4{half_pair(float8_pair{(unsigned short)low}), half_pair(float8_pair{(unsigned short)(low >> 16)}),
                 half_pair(float8_pair{(unsigned short)high}), half_pair(float8_pair{(unsigned short)(high >> 16)})};
  }

  __device__ __forceinline__ void begin(const StepPage& from, uint4*, uint4* staged, int first_column) {
    first = first_column;
#pragma unroll 1
    for (int i = threadIdx.x; i < KEYS; i += TILE_THREADS)
      copy_later(staged + i, from.keys + i / ACROSS * PAGE + from.token + i % ACROSS * 16);
    uint2* octets = reinterpret_cast<uint2*>(staged + KEYS);
#pragma unroll 1
    for (int i = threadIdx.x; i < VALUES; i += TILE_THREADS)
      if (!is_behind(i, first))
        copy_few_later<8>(octets + i, from.values + (from.token + i / WIDE) * v_head_size + first + i % WIDE * OCTET);
    end_group();
  }
  __device__ __forceinline__ void finish(uint4* tile, const uint4* staged) const {
    wait_groups<0>();  // wait for the data that this thread has requested
    const uint2* octets = reinterpret_cast<const uint2*>(staged + KEYS);
#pragma unroll 2
    for (int i = threadIdx.x; i < KEYS; i += TILE_THREADS) {
      uint4* line = tile + i / ACROSS * Shape::KEY_CHUNKS + i % ACROSS * 2;
      const uint4 raw = staged[i];
      line[0] = eight(raw.x, raw.y), line[1] = eight(raw.z, raw.w);
    }
#pragma unroll 2
    for (int i = threadIdx.x; i < VALUES; i += TILE_THREADS)
      if (!is_behind(i, first))
        tile[Shape::KEYS + i / WIDE * Shape::VALUE_CHUNKS + i % WIDE] = eight(octets[i].x, octets[i].y);
  }

 private:
  int first;  // first column of the block
};

// A value of a page.
template <class Kind, int v_head_size>
__device__ __forceinline__ float value_at(const unsigned char* page, int token, int column) {
  if constexpr (!PageFormat<Kind>::PACKED)
    return to_float(reinterpret_cast<const Kind*>(page)[token * v_head_size + column]);
  ValueUnit<Kind, v_head_size> values;
  const int unit = PageFormat<Kind>::COLUMNS > UNIT ? column / 32 * 4 + column % 16 / UNIT : column / UNIT;
  values.read(page, unit, token / UNIT, 0, PAGE);
  float found = 0.0f;
#pragma unroll
  for (int i = 0; i < PageFormat<Kind>::COLUMNS; ++i)
#pragma unroll
    for (int j = 0; j < UNIT; ++j)
      if (column_of<Kind>(unit, i) == column && j == token % UNIT) found = values.number(i, j);
  return found;
}

// One of the two rows of a lane: a row of the step, and a head. Rows past the last row repeat the last row, and are not
// stored.
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

// The sequence of a block: its location, and the tokens that its rows see.
template <class Kind, int head_size, int v_head_size>
struct TileSequence {
  __device__ __forceinline__ TileSequence(const TileArguments& given) {
    const int *tile = given.tiles + 3 * blockIdx.x, *positions = given.step.positions + tile[1];
    kv_head = blockIdx.y * given.together / (given.heads / given.kv_heads);
    table = given.step.tables + (long long)tile[0] * given.step.table_stride;
    first_end = positions[0] + 1, last_end = positions[tile[2] - 1] + 1;
    first_begin = first_seen(first_end, given.window, given.chunk);
    last_begin = first_seen(last_end, given.window, given.chunk);
  }
  __device__ __forceinline__ StepPage page_of(const TileArguments& given, int token) const {
    const long long block = table[token / PAGE];
    return StepPage{given.pages.keys + block * given.pages.key_block + kv_head * key_bytes<Kind>(head_size),
                    given.pages.values + block * given.pages.value_block + kv_head * value_bytes<Kind>(v_head_size),
                    token % PAGE};
  }
  const int* table;
  int kv_head;
  int first_begin, first_end;  // the tokens that the first row sees
  int last_begin, last_end;
};

// Set infinite and NaN values to 0, because they must not reach rows that do not see them, not even multiplied by 0.
// `broken`: 1 for tokens that had such a value. low: the exponent of such a value.
template <int step, int columns, int apart, unsigned low>
__device__ __forceinline__ void leave_out(uint4* values, int* broken) {
  constexpr int WIDE = columns / OCTET;
  if (threadIdx.x < step) broken[threadIdx.x] = 0;
  __syncthreads();  // all flags are cleared
  for (int i = threadIdx.x; i < step * WIDE; i += TILE_THREADS) {
    unsigned* words = reinterpret_cast<unsigned*>(values + i / WIDE * apart + i % WIDE);
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const unsigned two = words[word], high = low << 16;
      if ((two & low) != low && (two & high) != high) continue;
      words[word] = ((two & low) == low ? 0u : two & 0xffffu) | ((two & high) == high ? 0u : two & 0xffff0000u);
      broken[i / WIDE] = 1;
    }
  }
  __syncthreads();  // all values are finite
}

// The state of a lane's two rows: the `end` of the tokens that they see, a factor for their scores, their queries, and
// a running softmax in powers of two (Milakov & Gimelshein 2018).
template <class Kind, int head_size, int v_head_size, int columns, int step>
struct TileRows {
  using Shape = TileShape<head_size, columns, step>;
  using Number = TileNumber<Kind>;
  static constexpr int PARTS = Shape::KEY_ROWS / 16, SCORES = step / OCTET, WIDE = columns / OCTET;
  int end[2];
  float factor[2], highest[2], total[2], result[WIDE][4];
  unsigned queries[PARTS][4];

  __device__ __forceinline__ void begin(const TileArguments& given) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const TileRow mine(given, i);
      end[i] = given.step.positions[mine.row] + 1, highest[i] = LOWEST, total[i] = 0.0f;
      const float* q = given.rotated + (mine.row * given.heads + mine.head) * head_size;
      read_query(reinterpret_cast<const float2*>(q), i);
      factor[i] *= given.softcap > 0.0f ? given.scale / given.softcap : given.scale * LOG2_E;
    }
#pragma unroll
    for (int j = 0; j < WIDE; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) result[j][k] = 0.0f;
  }

  // Read a query, divided by the power of two of its largest number, which is moved into `factor`, so that no number
  // exceeds float16's range.
  __device__ __forceinline__ void read_query(const float2* q, int i) {
    const int member = threadIdx.x % 4;
    float largest = 0.0f;
#pragma unroll 4
    for (int pair = member; pair < head_size / 2; pair += 4)
      largest = fmaxf(largest, fmaxf(fabsf(q[pair].x), fabsf(q[pair].y)));
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
    const unsigned exponent = __float_as_uint(largest) & 0x7f800000u;
    const bool usual = exponent > 0u && exponent < 0x7f000000u;  // other numbers are not scaled
    const float inverse = usual ? __uint_as_float(0x7f000000u - exponent) : 1.0f;
    factor[i] = usual ? __uint_as_float(exponent) : 1.0f;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int pair = part * 8 + side * 4 + member;
        const float2 two = pair < head_size / 2 ? q[pair] : float2{0.0f, 0.0f};
        queries[part][i + 2 * side] = Number::pair(two.x * inverse, two.y * inverse);
      }
  }

  // scores: of tokens 8 j + 2 member and the next one, of the first row and then of the second.
  __device__ __forceinline__ void score(const uint4* keys, float (&scores)[SCORES][4]) const {
    const int lane = threadIdx.x % WARP;
    keys += lane % 16 * Shape::KEY_CHUNKS + lane / 16;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int two = 0; two < SCORES; two += 2) {
        unsigned pairs[4];
        load_transposed(pairs, keys + part * 16 * Shape::KEY_CHUNKS + two);
        Number::multiply(scores[two], queries[part], pairs[0], pairs[1]);
        Number::multiply(scores[two + 1], queries[part], pairs[2], pairs[3]);
      }
  }

  // Turn the scores of row `i` into shares. Unless the rows see the whole step, shares of tokens that the row does not
  // see are 0.
  __device__ __forceinline__ void weigh(
      const TileArguments& given, int i, int token, bool whole, float (&scores)[SCORES][4]) {
    const int begin = whole ? 0 : first_seen(end[i], given.window, given.chunk);
    float above = LOWEST;
#pragma unroll
    for (int j = 0; j < SCORES; ++j)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float& score = scores[j][2 * i + k];
        score *= factor[i];
        if (given.softcap > 0.0f) score = given.softcap * LOG2_E * tanhf(score);
        const int at = token + j * OCTET + 2 * (threadIdx.x % 4) + k;
        if (!whole && (at >= end[i] || at < begin)) score = LOWEST;
        above = fmaxf(above, score);
      }
    above = fmaxf(above, __shfl_xor_sync(ALL_LANES, above, 1));
    above = fmaxf(highest[i], fmaxf(above, __shfl_xor_sync(ALL_LANES, above, 2)));
    const float kept = exp2f(highest[i] - above), base = above == LOWEST ? 0.0f : above;  // no token seen: shares are 0
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
    if (!__any_sync(ALL_LANES, kept != 1.0f)) return;  // in most steps, no row has a new maximum
#pragma unroll
    for (int j = 0; j < WIDE; ++j) result[j][2 * i] *= kept, result[j][2 * i + 1] *= kept;
  }

  __device__ __forceinline__ void add(const uint4* values, const float (&scores)[SCORES][4]) {
    const int lane = threadIdx.x % WARP;
    values += lane % 16 * Shape::VALUE_CHUNKS + lane / 16;
#pragma unroll
    for (int part = 0; part < step / 16; ++part) {
      const float(&left)[4] = scores[2 * part];
      const float(&right)[4] = scores[2 * part + 1];
      const unsigned shares[4] = {Number::pair(left[0], left[1]), Number::pair(left[2], left[3]),
                                  Number::pair(right[0], right[1]), Number::pair(right[2], right[3])};
#pragma unroll
      for (int j = 0; j < WIDE; j += 2) {
        unsigned pairs[4];
        const bool alone = j + 1 == WIDE;  // there is no column beside it
        load_transposed(pairs, values + part * 16 * Shape::VALUE_CHUNKS + j - (alone ? lane / 16 : 0));
        Number::multiply(result[j], shares, pairs[0], pairs[1]);
        if (!alone) Number::multiply(result[alone ? j : j + 1], shares, pairs[2], pairs[3]);
      }
    }
  }

  // Add values that were set to 0, for the rows that see token `at`, which is token `from.token` of a page.
  __device__ __forceinline__ void add_left_out(
      const TileArguments& given, const StepPage& from, int at, int first_column) {
    const bool sees[2] = {at < end[0] && at >= first_seen(end[0], given.window, given.chunk),
                          at < end[1] && at >= first_seen(end[1], given.window, given.chunk)};
#pragma unroll 1
    for (int column = 0; column < columns; ++column) {
      if (column / 2 % 4 != threadIdx.x % 4 || first_column + column >= v_head_size) continue;
      const float number = value_at<Kind, v_head_size>(from.values, from.token, first_column + column);
      const float added = number - number == 0.0f ? 0.0f : number;
      // Each column is compared, because a computed index would move `result` from registers to memory.
#pragma unroll
      for (int j = 0; j < WIDE; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int own = OCTET * j + 2 * (threadIdx.x % 4) + k % 2;
          if (own == column && sees[k / 2]) result[j][k] += added;
        }
    }
  }

  // A sink is a score without a value.
  __device__ __forceinline__ void finish(const TileArguments& given, int first_column) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const TileRow mine(given, i);  // computed again, to save registers until here
      float sum = total[i] + __shfl_xor_sync(ALL_LANES, total[i], 1), kept = 1.0f;
      sum += __shfl_xor_sync(ALL_LANES, sum, 2);
      if (given.sinks || given.smooth) {
        const float sink = given.sinks ? given.sinks[mine.head] * LOG2_E : 0.0f, above = fmaxf(highest[i], sink);
        kept = exp2f(highest[i] - above);
        sum = fmaf(sum, kept, exp2f(sink - above));
      }
      if (!mine.is_there) continue;
      float* out = given.out + mine.row * given.out_stride + mine.head * v_head_size + first_column;
      const float share = kept / sum;
#pragma unroll
      for (int j = 0; j < WIDE; ++j) {
        if (v_head_size % columns && first_column + j * OCTET >= v_head_size) continue;
        reinterpret_cast<float2*>(out)[j * 4 + threadIdx.x % 4] =
            float2{result[j][2 * i] * share, result[j][2 * i + 1] * share};
      }
    }
  }
};

// Grid (tiles, heads / together, v_head_size / columns).
template <class Kind, int head_size, int v_head_size, int columns>
__device__ __forceinline__ void attend_tile(const TileArguments& given) {
  constexpr int CHUNKS_OF_A_PAGE =
      2 * TileShape<head_size, columns, PAGE>::TOTAL + TileSource<Kind, head_size, v_head_size, columns, PAGE>::STAGED;
  constexpr int STEP = CHUNKS_OF_A_PAGE <= SHARED_CHUNKS ? PAGE : PAGE / 2;
  using Shape = TileShape<head_size, columns, STEP>;
  using Source = TileSource<Kind, head_size, v_head_size, columns, STEP>;
  using Rows = TileRows<Kind, head_size, v_head_size, columns, STEP>;
  SHARED(uint4, tile, 2 * Shape::TOTAL + Source::STAGED);
  SHARED(int, broken, STEP);
  if (!given.tiles[3 * blockIdx.x + 2]) return;
  const TileSequence<Kind, head_size, v_head_size> sequence(given);
  const int first_column = blockIdx.z * columns;
  const int from = sequence.first_begin / STEP, to = (sequence.last_end - 1) / STEP;
  // Padding columns: their keys are zero.
  for (int i = threadIdx.x; i < (Shape::KEY_ROWS - head_size) * Shape::KEY_CHUNKS; i += TILE_THREADS)
    tile[head_size * Shape::KEY_CHUNKS + i] = tile[Shape::TOTAL + head_size * Shape::KEY_CHUNKS + i] = uint4{};

  uint4* staged = tile + 2 * Shape::TOTAL;
  Source source;
  source.begin(sequence.page_of(given, from * STEP), tile + from % 2 * Shape::TOTAL, staged, first_column);
  Rows rows;
  rows.begin(given);
#pragma unroll 1
  for (int step = from; step <= to; ++step) {
    const int token = step * STEP;
    uint4 *keys = tile + step % 2 * Shape::TOTAL, *values = keys + Shape::KEYS;
    source.finish(keys, staged);
    __syncthreads();  // the tokens of this step are complete, and all threads have read the tokens of the step before
    if (step < to)
      source.begin(sequence.page_of(given, token + STEP), tile + (step + 1) % 2 * Shape::TOTAL, staged, first_column);
    const bool whole = token >= sequence.last_begin && token + STEP <= sequence.first_end;  // true for all rows
    if (!whole) leave_out<STEP, columns, Shape::VALUE_CHUNKS, TileNumber<Kind>::EXPONENT>(values, broken);
    float scores[Rows::SCORES][4] = {};
    rows.score(keys, scores);
    rows.weigh(given, 0, token, whole, scores);
    rows.weigh(given, 1, token, whole, scores);
    rows.add(values, scores);
    for (int i = 0; i < STEP && !whole; ++i)
      if (broken[i]) rows.add_left_out(given, sequence.page_of(given, token + i), token + i, first_column);
  }
  rows.finish(given, first_column);
}
