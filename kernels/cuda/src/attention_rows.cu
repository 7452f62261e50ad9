// softmax(q k * scale) v of single rows over the pages of their sequences (Flash-Decoding: Dao et al. 2023).
//
// A sequence is split by position only: 256 tokens a block, whose four warps take its eight pages in turn, each with a
// running softmax (Milakov & Gimelshein 2018); then warps, then splits are put together in order. So a row's bits
// depend on nothing but its own sequence. All query heads of a KV head are computed together: its pages are read once.
#include "pages.cuh"
#include "reduce.cuh"

// rotated: [rows][heads * head_size]. parts: [rows - first_row][heads][splits][v_head_size + 2], a maximum, a sum and
// the unfinished result. sinks: [heads] or 0. window: -1 = all. softcap: 0 = none.
struct AttentionArguments {
  const float* rotated;
  const float* sinks;
  float* parts;
  float* out;
  StepRows step;
  Pages pages;
  long long out_stride;
  int first_row;
  int rows;
  int heads;
  int kv_heads;
  int splits;
  int window;
  float scale;
  float softcap;
  int smooth;
};

constexpr int SPLIT_WARPS = 4, SPLIT_PAGES = 8, SPLIT_THREADS = SPLIT_WARPS * WARP;
constexpr float NEVER = -3.0e38f;  // below every score, and finite: exp(NEVER - NEVER) is no NaN

// Grid (splits, heads / together, rows).
template <class T, int head_size, int v_head_size, int together>
__device__ __forceinline__ void attend_split(const AttentionArguments& given) {
  constexpr int COLUMNS = (v_head_size + WARP - 1) / WARP;
  SHARED(float, queries, together * head_size);
  SHARED(float, shares, SPLIT_WARPS * together * PAGE);
  SHARED(float, maxima, SPLIT_WARPS * together);
  SHARED(float, totals, SPLIT_WARPS * together);
  SHARED(float, results, SPLIT_WARPS * together * v_head_size);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const long long row = given.first_row + blockIdx.z;
  const int first_head = blockIdx.y * together, kv_head = first_head / (given.heads / given.kv_heads);
  const int position = given.step.positions[row], end = position + 1;
  const int begin = given.window < 0 ? 0 : max(0, end - given.window);
  const int* table = given.step.tables + (long long)given.step.sequence_of[row] * given.step.table_stride;
  for (int i = threadIdx.x; i < together * head_size; i += SPLIT_THREADS)
    queries[i] = given.rotated[(row * given.heads + first_head) * head_size + i] * given.scale;
  __syncthreads();

  float maximum[together], total[together], result[together][COLUMNS];
#pragma unroll
  for (int head = 0; head < together; ++head) {
    maximum[head] = NEVER, total[head] = 0.0f;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) result[head][i] = 0.0f;
  }
  float* own_shares = shares + warp * together * PAGE;
  for (int i = warp; i < SPLIT_PAGES; i += SPLIT_WARPS) {
    const int page = blockIdx.x * SPLIT_PAGES + i, first = max(begin - page * PAGE, 0), last = min(end - page * PAGE, PAGE);
    if (first >= last) continue;
    const long long block = table[page];
    const T* keys = static_cast<const T*>(given.pages.keys) + block * given.pages.key_block;
    const T* values = static_cast<const T*>(given.pages.values) + block * given.pages.value_block;
    keys += kv_head * head_size * PAGE + lane;
    values += kv_head * PAGE * v_head_size;
    float scores[together];
#pragma unroll
    for (int head = 0; head < together; ++head) scores[head] = 0.0f;
#pragma unroll 8
    for (int d = 0; d < head_size; ++d) {
      const float key = to_float(keys[d * PAGE]);
#pragma unroll
      for (int head = 0; head < together; ++head)
        scores[head] = fmaf(queries[head * head_size + d], key, scores[head]);
    }
    const bool visible = lane >= first && lane < last;
    __syncwarp();  // the shares of the page before have been read by all
#pragma unroll
    for (int head = 0; head < together; ++head) {
      float score = scores[head];
      if (given.softcap > 0.0f) score = given.softcap * tanhf(score / given.softcap);
      if (!visible) score = NEVER;
      const float highest = fmaxf(maximum[head], warp_maximum(score));
      const float kept = expf(maximum[head] - highest), share = visible ? expf(score - highest) : 0.0f;
      maximum[head] = highest;
      total[head] = fmaf(total[head], kept, warp_sum(share));
      own_shares[head * PAGE + lane] = share;
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column) result[head][column] *= kept;
    }
    __syncwarp();
    for (int token = first; token < last; ++token) {  // what is not visible may hold anything, NaN too
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column) {
        const int at = column * WARP + lane;
        if (v_head_size % WARP && at >= v_head_size) continue;
        const float value = to_float(values[token * v_head_size + at]);
#pragma unroll
        for (int head = 0; head < together; ++head)
          result[head][column] = fmaf(own_shares[head * PAGE + token], value, result[head][column]);
      }
    }
  }

#pragma unroll
  for (int head = 0; head < together; ++head) {
    if (lane == 0) maxima[warp * together + head] = maximum[head], totals[warp * together + head] = total[head];
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
      const int at = column * WARP + lane;
      if (v_head_size % WARP && at >= v_head_size) continue;
      results[(warp * together + head) * v_head_size + at] = result[head][column];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < together * v_head_size; i += SPLIT_THREADS) {
    const int head = i / v_head_size, column = i % v_head_size;
    float highest = NEVER, sum = 0.0f, number = 0.0f;
    for (int other = 0; other < SPLIT_WARPS; ++other) highest = fmaxf(highest, maxima[other * together + head]);
    for (int other = 0; other < SPLIT_WARPS; ++other) {
      const float kept = expf(maxima[other * together + head] - highest);
      sum = fmaf(totals[other * together + head], kept, sum);
      number = fmaf(results[(other * together + head) * v_head_size + column], kept, number);
    }
    const long long place = ((long long)blockIdx.z * given.heads + first_head + head) * given.splits + blockIdx.x;
    float* part = given.parts + place * (v_head_size + 2);
    if (column == 0) part[0] = highest, part[1] = sum;
    part[2 + column] = number;
  }
}

constexpr int JOIN_THREADS = 64;

// The splits of a row and head, in order; a sink is a score without a value. Grid (heads, rows).
template <int v_head_size>
__device__ __forceinline__ void join_splits(const AttentionArguments& given) {
  const int head = blockIdx.x;
  const long long row = given.first_row + blockIdx.y;
  const int splits = given.step.positions[row] / (SPLIT_PAGES * PAGE) + 1;  // not those of longer rows
  const float* parts = given.parts + ((long long)blockIdx.y * given.heads + head) * given.splits * (v_head_size + 2);
  const bool has_sink = given.sinks || given.smooth;
  const float sink = given.sinks ? given.sinks[head] : 0.0f;
  float highest = has_sink ? sink : NEVER;
  for (int i = 0; i < splits; ++i) highest = fmaxf(highest, parts[i * (v_head_size + 2)]);
  for (int column = threadIdx.x; column < v_head_size; column += JOIN_THREADS) {
    float sum = has_sink ? expf(sink - highest) : 0.0f, number = 0.0f;
    for (int i = 0; i < splits; ++i) {
      const float* part = parts + i * (v_head_size + 2);
      const float kept = expf(part[0] - highest);
      sum = fmaf(part[1], kept, sum);
      number = fmaf(part[2 + column], kept, number);
    }
    given.out[row * given.out_stride + head * v_head_size + column] = number / sum;
  }
}
