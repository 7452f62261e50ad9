// softmax(q k * scale) v of single rows with heads of any size over pages of floats. The computation is the same as in
// attention_rows.cu, which requires heads whose columns lanes can read several at a time. Sequences are split by
// position in the same way.
#include "attention.cuh"
#include "reduce.cuh"

constexpr int LARGEST_HEAD = 256, ANY_COLUMNS = LARGEST_HEAD / WARP, ANY_PART = 2;

// Grid (splits, heads, rows). A lane first has one token of its warp's page, and later every 32nd column.
template <class T>
__device__ __forceinline__ void attend_any(const AttentionArguments& given) {
  SHARED(float, queries, LARGEST_HEAD);
  SHARED(float, maxima, SPLIT_WARPS);
  SHARED(float, totals, SPLIT_WARPS);
  SHARED(float, results, SPLIT_WARPS * LARGEST_HEAD);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, head = blockIdx.y, size = given.v_head_size;
  const int kv_head = head / (given.heads / given.kv_heads);
  const long long row = given.first_row + blockIdx.z;
  const int end = given.step.positions[row] + 1, begin = first_seen(end, given.window, given.chunk);
  const int start = blockIdx.x * SPLIT, page = blockIdx.x * SPLIT_WARPS + warp;
  if (start >= end || start + SPLIT <= begin) return;  // the split is for rows that are longer, or see further back
  for (int i = threadIdx.x; i < given.head_size; i += SPLIT_THREADS)
    queries[i] = given.rotated[(row * given.heads + head) * given.head_size + i] * given.scale;
  __syncthreads();

  const int first = max(begin - page * PAGE, 0), last = min(end - page * PAGE, PAGE);
  float highest = NEVER, total = 0.0f, numbers[ANY_COLUMNS] = {};
  if (first < last) {
    const long long block = given.step.tables[(long long)given.step.sequence_of[row] * given.step.table_stride + page];
    const T* keys = reinterpret_cast<const T*>(given.pages.keys + block * given.pages.key_block);
    const T* values = reinterpret_cast<const T*>(given.pages.values + block * given.pages.value_block);
    keys += kv_head * given.head_size * PAGE + lane, values += kv_head * PAGE * size;
    float score = 0.0f;
    for (int d = 0; d < given.head_size; ++d) score = fmaf(queries[d], to_float(keys[d * PAGE]), score);
    if (given.softcap > 0.0f) score = given.softcap * tanhf(score / given.softcap);
    const bool visible = lane >= first && lane < last;  // other tokens may hold any number, even NaN
    if (!visible) score = NEVER;
    highest = warp_maximum(score);
    const float share = visible ? expf(score - highest) : 0.0f;
    total = warp_sum(share);
    for (int token = first; token < last; ++token) {
      const float own = __shfl_sync(ALL_LANES, share, token);
#pragma unroll
      for (int i = 0; i < ANY_COLUMNS; ++i)
        if (i * WARP + lane < size) numbers[i] = fmaf(own, to_float(values[token * size + i * WARP + lane]), numbers[i]);
    }
  }
  if (lane == 0) maxima[warp] = highest, totals[warp] = total;
#pragma unroll
  for (int i = 0; i < ANY_COLUMNS; ++i)
    if (i * WARP + lane < size) results[warp * LARGEST_HEAD + i * WARP + lane] = numbers[i];
  __syncthreads();
  float* part = given.parts + ((blockIdx.z * given.heads + head) * (long long)given.splits + blockIdx.x) * (size + ANY_PART);
  for (int column = threadIdx.x; column < size; column += SPLIT_THREADS) {
    float most = NEVER, sum = 0.0f, number = 0.0f;
    for (int other = 0; other < SPLIT_WARPS; ++other) most = fmaxf(most, maxima[other]);
    for (int other = 0; other < SPLIT_WARPS; ++other) {
      const float kept = expf(maxima[other] - most);
      sum = fmaf(totals[other], kept, sum);
      number = fmaf(results[other * LARGEST_HEAD + column], kept, number);
    }
    if (column == 0) part[0] = most, part[1] = sum;
    part[ANY_PART + column] = number;
  }
}

// Join the splits of a row and head, in order. A sink is a score without a value. Grid (heads, rows).
__device__ __forceinline__ void join_any(const AttentionArguments& given) {
  const int head = blockIdx.x, stride = given.v_head_size + ANY_PART;
  const long long row = given.first_row + blockIdx.y;
  const SeenSplits seen(given, given.step.positions[row] + 1);
  const float* parts = given.parts + ((long long)blockIdx.y * given.heads + head) * given.splits * stride;
  const bool has_sink = given.sinks || given.smooth;
  const float sink = given.sinks ? given.sinks[head] : 0.0f;
  float highest = has_sink ? sink : NEVER;
  for (int i = seen.first; i < seen.last; ++i) highest = fmaxf(highest, parts[i * stride]);
  float total = has_sink ? expf(sink - highest) : 0.0f;
  for (int i = seen.first; i < seen.last; ++i) total = fmaf(parts[i * stride + 1], expf(parts[i * stride] - highest), total);
  for (int column = threadIdx.x; column < given.v_head_size; column += SPLIT_THREADS) {
    float number = 0.0f;
    for (int i = seen.first; i < seen.last; ++i)
      number = fmaf(parts[i * stride + ANY_PART + column], expf(parts[i * stride] - highest), number);
    given.out[row * given.out_stride + head * given.v_head_size + column] = number / total;
  }
}
