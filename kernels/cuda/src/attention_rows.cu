// softmax(q k * scale) v of single rows over the pages of their sequences, in float32 (Flash-Decoding: Dao et al.
// 2023).
//
// A sequence is split by position only: 128 tokens per block, with one page for each of its four warps. The results of
// warps, and then the results of splits, are joined in order. So a row's bits depend only on the row's own sequence.
// All query heads of a KV head are computed together, so that the KV head's pages are read only once.
#include "attention.cuh"
#include "reduce.cuh"

// A part starts with its maximum, its sum, and two unused numbers, so that the rest can be read four numbers at a
// time.
constexpr int PART = 4;

// The keys of a page. A lane requests as many units as registers can hold before it needs the first unit.
template <class Kind, int head_size>
struct PageKeys {
  using Keys = KeyUnit<Kind, head_size>;
  static constexpr int LINES = WARP / QUADS, STEPS = (Keys::COUNT + LINES - 1) / LINES;
  static constexpr int MOST = sizeof(Keys) > 48 ? 4 : 8, AT_ONCE = STEPS < MOST ? STEPS : MOST;
  Keys units[AT_ONCE];

  __device__ __forceinline__ static int unit_of(int step) { return step * LINES + threadIdx.x % WARP / QUADS; }
  __device__ __forceinline__ void read(const unsigned char* page, int step) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) units[i].read(page, min(unit_of(step + i), Keys::COUNT - 1), threadIdx.x % QUADS);
  }
};

// Compute the scores of a page after its first units were read. Eight lanes have four tokens each of a unit, and four
// such groups of lanes have different units. The sums of the groups are added so that every lane keeps one token, 4
// (lane % 8) + lane / 8.
template <class Kind, int head_size, int together>
__device__ __forceinline__ void score_page(
    const unsigned char* page, PageKeys<Kind, head_size>& keys, const float* queries, float (&scores)[together]) {
  using Own = PageKeys<Kind, head_size>;
  using Keys = typename Own::Keys;
  const int lane = threadIdx.x % WARP;
  float sums[together][UNIT] = {};
#pragma unroll 1
  for (int step = 0; step < Own::STEPS; step += Own::AT_ONCE) {
    if (step) keys.read(page, step);
#pragma unroll
    for (int i = 0; i < Own::AT_ONCE; ++i) {
      const int unit = Own::unit_of(step + i);
      if (Keys::COUNT % (Own::LINES * Own::AT_ONCE) && unit >= Keys::COUNT) continue;
#pragma unroll
      for (int part = 0; part < Keys::COLUMNS; part += UNIT) {
        float numbers[UNIT][UNIT];
#pragma unroll
        for (int column = 0; column < UNIT; ++column)
#pragma unroll
          for (int token = 0; token < UNIT; ++token) numbers[column][token] = keys.units[i].number(part + column, token);
#pragma unroll
        for (int head = 0; head < together; ++head) {
          const float4 q = *reinterpret_cast<const float4*>(queries + head * head_size + column_of<Kind>(unit, part));
#pragma unroll
          for (int token = 0; token < UNIT; ++token) {
            float sum = fmaf(q.x, numbers[0][token], sums[head][token]);
            sum = fmaf(q.y, numbers[1][token], sum);
            sum = fmaf(q.z, numbers[2][token], sum);
            sums[head][token] = fmaf(q.w, numbers[3][token], sum);
          }
        }
      }
    }
  }
  const bool upper = lane & 16, odd = lane & 8;
#pragma unroll
  for (int head = 0; head < together; ++head) {
    const float(&four)[UNIT] = sums[head];
    const float low = __shfl_xor_sync(ALL_LANES, upper ? four[0] : four[2], 16) + (upper ? four[2] : four[0]);
    const float high = __shfl_xor_sync(ALL_LANES, upper ? four[1] : four[3], 16) + (upper ? four[3] : four[1]);
    scores[head] = __shfl_xor_sync(ALL_LANES, odd ? low : high, 8) + (odd ? high : low);
  }
}

// Weighted values of a page. A lane has the columns of a unit, and lanes that are COUNT apart have other tokens. If a
// lane has several units, there is one pass per unit. The final sums are in result[head][pass][column] of the first
// COUNT lanes.
template <class Kind, int v_head_size, int together>
struct ValueSums {
  using Values = ValueUnit<Kind, v_head_size>;
  static constexpr int COLUMNS = Values::COLUMNS, COUNT = Values::COUNT, PASSES = (COUNT + WARP - 1) / WARP;
  static constexpr int ACROSS = COUNT < WARP ? COUNT : WARP, APART = WARP / ACROSS < QUADS ? WARP / ACROSS : QUADS;
  static constexpr int STEPS = (QUADS + APART - 1) / APART, AT_ONCE = STEPS < 4 ? 1 : PASSES > 1 ? 1 : 2;
  float result[together][PASSES][COLUMNS];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int head = 0; head < together; ++head)
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) result[head][pass][column] = 0.0f;
  }

  // shares: [together][PAGE].
  __device__ __forceinline__ void add(const unsigned char* page, const float* shares, int first, int last) {
    const int lane = threadIdx.x % WARP, own = lane % ACROSS, begin = lane / ACROSS;
#pragma unroll 1
    for (int step = 0; step < STEPS; step += AT_ONCE) {
      Values units[AT_ONCE][PASSES];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int quad = (step + i) * APART + begin;
        if (begin >= APART || quad >= QUADS) continue;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass)
          units[i][pass].read(page, min(pass * WARP + own, COUNT - 1), quad, first, last);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int quad = (step + i) * APART + begin;
        if (begin >= APART || quad >= QUADS) continue;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
          for (int column = 0; column < COLUMNS; ++column) {
            float numbers[UNIT];
#pragma unroll
            for (int token = 0; token < UNIT; ++token) numbers[token] = units[i][pass].number(column, token);
#pragma unroll
            for (int head = 0; head < together; ++head) {
              const float4 share = *reinterpret_cast<const float4*>(shares + head * PAGE + UNIT * quad);
              float sum = fmaf(share.x, numbers[0], result[head][pass][column]);
              sum = fmaf(share.y, numbers[1], sum);
              sum = fmaf(share.z, numbers[2], sum);
              result[head][pass][column] = fmaf(share.w, numbers[3], sum);
            }
          }
      }
    }
  }

  // Add up the sums of lanes that have the same columns, in order, and write them to [together][v_head_size].
  __device__ __forceinline__ void write(float* out) const {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int head = 0; head < together; ++head)
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
          float sum = result[head][pass][column];
#pragma unroll
          for (int other = 1; other < APART; ++other)
            sum += __shfl_sync(ALL_LANES, result[head][pass][column], lane + other * ACROSS);
          const int unit = pass * WARP + lane;
          if (lane < ACROSS && unit < COUNT) out[head * v_head_size + column_of<Kind>(unit, column)] = sum;
        }
  }
};

// Splits of a row and head that are added up side by side.
constexpr int SIDE_BY_SIDE = 4;

// Join the splits of a row and head with one warp: every fourth split in order, scaled to the largest maximum so far;
// then these four sums in order. A sink is a score without a value. `own`: index of the row among those that have
// parts.
template <int v_head_size>
__device__ __forceinline__ void join_head(const AttentionArguments& given, const SeenSplits& seen, int own, int head) {
  constexpr int STRIDE = v_head_size + PART, PASSES = (v_head_size / 4 + WARP - 1) / WARP;
  const int lane = threadIdx.x % WARP;
  const long long row = given.first_row + own;
  const float* parts = given.parts + ((long long)own * given.heads + head) * given.splits * STRIDE;
  float highest[SIDE_BY_SIDE], sums[SIDE_BY_SIDE] = {}, numbers[SIDE_BY_SIDE][PASSES][4] = {};
#pragma unroll
  for (int side = 0; side < SIDE_BY_SIDE; ++side) highest[side] = NEVER;
#pragma unroll 1
  for (int base = seen.first; base < seen.last; base += SIDE_BY_SIDE) {
    float4 beside[SIDE_BY_SIDE], four[SIDE_BY_SIDE][PASSES];
#pragma unroll
    for (int side = 0; side < SIDE_BY_SIDE; ++side) {  // all loads are issued before the first result is needed
      const float* part = parts + (long long)min(base + side, seen.last - 1) * STRIDE;
      beside[side] = load_published(reinterpret_cast<const float4*>(part));
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        const int column = 4 * (pass * WARP + lane);
        const float* numbers_of_lane = part + PART + (column < v_head_size ? column : 0);
        four[side][pass] = load_published(reinterpret_cast<const float4*>(numbers_of_lane));
      }
    }
#pragma unroll
    for (int side = 0; side < SIDE_BY_SIDE; ++side) {
      if (base + side >= seen.last) break;
      const float before = highest[side];
      highest[side] = fmaxf(before, beside[side].x);
      const float left = expf(before - highest[side]), kept = expf(beside[side].x - highest[side]);
      sums[side] = fmaf(beside[side].y, kept, sums[side] * left);
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        float(&into)[4] = numbers[side][pass];
        const float4& more = four[side][pass];
        into[0] = fmaf(more.x, kept, into[0] * left), into[1] = fmaf(more.y, kept, into[1] * left);
        into[2] = fmaf(more.z, kept, into[2] * left), into[3] = fmaf(more.w, kept, into[3] * left);
      }
    }
  }
  const bool has_sink = given.sinks || given.smooth;
  const float sink = given.sinks ? given.sinks[head] : 0.0f;
  float most = has_sink ? sink : NEVER;
#pragma unroll
  for (int side = 0; side < SIDE_BY_SIDE; ++side) most = fmaxf(most, highest[side]);
  float total = has_sink ? expf(sink - most) : 0.0f, found[PASSES][4] = {};
#pragma unroll
  for (int side = 0; side < SIDE_BY_SIDE; ++side) {
    const float kept = expf(highest[side] - most);
    total = fmaf(sums[side], kept, total);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
      for (int i = 0; i < 4; ++i) found[pass][i] = fmaf(numbers[side][pass][i], kept, found[pass][i]);
  }
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int column = 4 * (pass * WARP + lane), out_column = head * v_head_size + column;
    const float4 result = {found[pass][0] / total, found[pass][1] / total, found[pass][2] / total, found[pass][3] / total};
    float* out = given.out + row * given.out_stride + out_column;
    if (column < v_head_size) out[0] = result.x, out[1] = result.y, out[2] = result.z, out[3] = result.w;
    if constexpr (v_head_size % CHUNK == 0)
      if (given.grouped.bytes && row < given.grouped_rows && column / CHUNK * CHUNK < v_head_size)
        store_four(given.grouped, row, out_column / CHUNK, lane % RoundedFour::LANES, result);
  }
}

// Call visit(i) for every `step`-th of `bytes` bytes, with the lanes of a warp.
template <int bytes, int step, class Visit>
__device__ __forceinline__ void each_of_warp(const Visit& visit) {
#pragma unroll
  for (int start = 0; start < bytes; start += WARP * step) {
    const int i = start + (int)threadIdx.x % WARP * step;
    if (bytes % (WARP * step) == 0 || i < bytes) visit(i);
  }
}

// Maximum size of a page of values that is copied to shared memory. Larger pages are read when they are needed.
constexpr int MOST_STAGED = 8 << 10;

// Grid (splits, heads / together, rows). fresh: the keys and values of the rows are not in a page yet, and all rows
// belong to different sequences. Every block that reads these keys and values also stores them; blocks of the same rows
// write the same bytes.
template <class Kind, int head_size, int v_head_size, int together, bool fresh>
__device__ __forceinline__ void attend_split(const AttentionArguments& given) {
  SHARED(float, queries, together * head_size);
  SHARED(float, shares, SPLIT_WARPS * together * PAGE);
  SHARED(float, maxima, SPLIT_WARPS * together);
  SHARED(float, totals, SPLIT_WARPS * together);
  // A warp's page of values, if it is small enough, and afterwards its results.
  constexpr int RESULTS = together * v_head_size * sizeof(float), PAGE_BYTES = value_bytes<Kind>(v_head_size);
  constexpr int KEY_BYTES = key_bytes<Kind>(head_size), LINE_BYTES = 128;
  constexpr bool IS_STAGED = PAGE_BYTES <= MOST_STAGED;
  constexpr int OWN_BYTES = IS_STAGED && PAGE_BYTES > RESULTS ? PAGE_BYTES : RESULTS;
  SHARED(unsigned char, memory, SPLIT_WARPS * OWN_BYTES);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const long long row = given.first_row + blockIdx.z;
  const int first_head = blockIdx.y * together, kv_head = first_head / (given.heads / given.kv_heads);
  const int end = given.step.positions[row] + 1, begin = first_seen(end, given.window, given.chunk);
  const int start = blockIdx.x * SPLIT, page = blockIdx.x * SPLIT_WARPS + warp;
  if (start >= end || start + SPLIT <= begin) return wait_for_earlier();  // only other rows see the split
  const int first = max(begin - page * PAGE, 0), last = min(end - page * PAGE, PAGE);
  const bool sees = first < last;
  const unsigned char *keys = given.pages.keys, *values = given.pages.values;
  if (sees) {
    const int* table = given.step.tables + (long long)given.step.sequence_of[row] * given.step.table_stride;
    const long long block = table[page];
    keys += block * given.pages.key_block + kv_head * key_bytes<Kind>(head_size);
    values += block * given.pages.value_block + kv_head * value_bytes<Kind>(v_head_size);
    // Both pages are prefetched into the L2 cache before any wait, even the wait for preceding kernels, because the
    // data that these kernels still write to pages passes through that cache. No kernel of the step writes the step's
    // tables.
    each_of_warp<KEY_BYTES, LINE_BYTES>([&](int i) { fetch(keys + i); });
    each_of_warp<PAGE_BYTES, LINE_BYTES>([&](int i) { fetch(values + i); });
  }
  unsigned char* own = memory + warp * OWN_BYTES;
  PageKeys<Kind, head_size> first_keys;
  auto bring_values = [&] {
    if constexpr (IS_STAGED) each_of_warp<PAGE_BYTES, 16>([&](int i) { copy_later(own + i, values + i); });
  };
  auto bring_page = [&] {
    first_keys.read(keys, 0);
    bring_values();
  };
  bool has_newest = false;  // the page of the newest token, which is not complete yet
  if constexpr (fresh) {
    const bool is_newest = blockIdx.x == (end - 1) / SPLIT;
    has_newest = is_newest && page == (end - 1) / PAGE;
    const Rotation rotation(given.fresh, given.step, row, head_size);
    wait_for_earlier();
    if (sees && !has_newest) bring_page();
    // Queries, then the key and the value, one per warp. The warp that has the newest page takes the last of the first
    // turns.
    const int count = together + (is_newest ? 2 : 0), own = (warp - (end - 1) / PAGE % SPLIT_WARPS - 1 + 2 * SPLIT_WARPS) % SPLIT_WARPS;
#pragma unroll 1
    for (int i = own; i < count; i += SPLIT_WARPS) {
      const int head = i < together ? first_head + i : given.heads + kv_head + (i > together ? given.kv_heads : 0);
      store_head<Kind>(given, rotation, row, head, queries + i * head_size, given.scale);
    }
  } else {
    wait_for_earlier();
    if (sees) bring_page();  // all data that a warp needs is in flight before the warp computes
  }
  end_group();
  if constexpr (!fresh) {
    const float* rotated = given.rotated + (row * given.heads + first_head) * head_size;
    constexpr int NUMBERS = together * head_size;
#pragma unroll
    for (int start = 0; start < NUMBERS; start += SPLIT_THREADS) {
      const int i = start + threadIdx.x;
      if (NUMBERS % SPLIT_THREADS == 0 || i < NUMBERS) queries[i] = rotated[i] * given.scale;
    }
  }
  __syncthreads();
  if (has_newest) bring_page(), end_group();

  float* own_shares = shares + warp * together * PAGE;
  ValueSums<Kind, v_head_size, together> sums;
  sums.clear();
  if (sees) {
    const int token = UNIT * (lane % QUADS) + lane / QUADS;
    const bool visible = token >= first && token < last;
    float scores[together];
    score_page<Kind, head_size, together>(keys, first_keys, queries, scores);
#pragma unroll
    for (int head = 0; head < together; ++head) {
      float score = scores[head];
      if (given.softcap > 0.0f) score = given.softcap * tanhf(score / given.softcap);
      if (!visible) score = NEVER;
      const float highest = warp_maximum(score), share = visible ? expf(score - highest) : 0.0f;
      const float total = warp_sum(share);
      own_shares[head * PAGE + token] = share;
      if (lane == 0) maxima[warp * together + head] = highest, totals[warp * together + head] = total;
    }
    wait_groups<0>();
    __syncwarp();
    sums.add(IS_STAGED ? own : values, own_shares, first, last);
  } else if (lane < together) {
    maxima[warp * together + lane] = NEVER, totals[warp * together + lane] = 0.0f;
  }
  __syncwarp();
  sums.write(reinterpret_cast<float*>(own));
  __syncthreads();
  auto result = [&](int other) { return reinterpret_cast<const float*>(memory + other * OWN_BYTES); };
  for (int i = threadIdx.x; i < together * v_head_size; i += SPLIT_THREADS) {
    const int head = i / v_head_size, column = i % v_head_size;
    float highest = NEVER, sum = 0.0f, number = 0.0f;
    for (int other = 0; other < SPLIT_WARPS; ++other) highest = fmaxf(highest, maxima[other * together + head]);
    for (int other = 0; other < SPLIT_WARPS; ++other) {
      const float kept = expf(maxima[other * together + head] - highest);
      sum = fmaf(totals[other * together + head], kept, sum);
      number = fmaf(result(other)[head * v_head_size + column], kept, number);
    }
    const long long index = ((long long)blockIdx.z * given.heads + first_head + head) * given.splits + blockIdx.x;
    float* part = given.parts + index * (v_head_size + PART);
    if (column == 0) part[0] = highest, part[1] = sum;
    part[PART + column] = number;
  }
  // The last block of a row joins the splits, with one warp per head. This saves a kernel per step.
  SHARED(int, is_last, 1);
  publish();
  __syncthreads();
  const SeenSplits seen(given, end);
  if (threadIdx.x == 0) {
    int* arrived = given.arrived + (long long)blockIdx.z * given.heads + first_head;
    is_last[0] = count_up(arrived) + 1 == seen.last - seen.first;
    if (is_last[0]) *arrived = 0;
  }
  __syncthreads();
  if (!is_last[0]) return;
  publish();  // from here on, this block sees the data that other blocks have published
  for (int head = warp; head < together; head += SPLIT_WARPS) join_head<v_head_size>(given, seen, blockIdx.z, first_head + head);
}
