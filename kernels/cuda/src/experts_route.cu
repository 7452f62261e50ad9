// Choose the experts of each token and their shares, sort the pairs by expert into groups that are multiplied together,
// and add up the results of a token.
#include "experts.cuh"
#include "reduce.cuh"

// Rows from first_row to rows. scores: [rows][experts]. chosen, shares: [rows][per_token], best expert first. ordered:
// numbers of pairs; the pairs of first_row start at first_row * per_token, and so do its `groups`. A group has at most
// `group` pairs.
struct RouteArguments {
  const float* scores;
  int* chosen;
  float* shares;
  int* ordered;
  PairGroup* groups;
  long long scores_stride;
  int first_row;
  int rows;
  int experts;
  int per_token;
  int normalized;
  int group;
};

constexpr int ROUTE_WARPS = 4;

// A number that is larger for better experts. NaN ranks after all numbers, and among equal scores the first is best.
__device__ __forceinline__ unsigned long long merit(float score, int expert) {
  const unsigned bits = score == 0.0f ? 0u : __float_as_uint(score);  // -0 equals 0
  const unsigned order = score != score ? 0u : bits >> 31 ? ~bits : bits | 0x80000000u;
  return (unsigned long long)order << 32 | ~(unsigned)expert;
}

// Called by a warp. Each round finds the best expert after the expert that the previous round found. So no scores are
// stored. They stay in the L1 cache, and the number of experts is not limited.
__device__ __forceinline__ void route_row(const RouteArguments& given, long long row) {
  const int lane = threadIdx.x % WARP;
  const float* scores = given.scores + row * given.scores_stride;
  int* chosen = given.chosen + row * given.per_token;
  float* shares = given.shares + row * given.per_token;
  unsigned long long before = ~0ull;
  float best = 0.0f, total = 0.0f;
  for (int rank = 0; rank < given.per_token; ++rank) {
    unsigned long long found = 0;
    for (int expert = lane; expert < given.experts; expert += WARP) {
      const unsigned long long own = merit(scores[expert], expert);
      if (own < before) found = max(found, own);
    }
#pragma unroll
    for (int distance = WARP / 2; distance; distance /= 2)
      found = max(found, __shfl_xor_sync(ALL_LANES, found, distance));
    before = found;
    const int expert = (int)~(unsigned)found;
    const float score = scores[expert];
    if (rank == 0) best = score;
    if (given.normalized) total += expf(score - best);
    if (lane == 0) chosen[rank] = expert, shares[rank] = score;
  }
  if (!given.normalized) {
    for (int expert = lane; expert < given.experts; expert += WARP) total += expf(scores[expert] - best);
    total = warp_sum(total);
  }
  __syncwarp();  // lane 0 has written the scores of the chosen experts
  for (int rank = lane; rank < given.per_token; rank += WARP) shares[rank] = expf(shares[rank] - best) / total;
}

// One warp per row. Grid (rows / 4).
__device__ __forceinline__ void route(const RouteArguments& given) {
  const long long row = given.first_row + (long long)blockIdx.x * ROUTE_WARPS + threadIdx.x / WARP;
  if (row < given.rows) route_row(given, row);
}

constexpr int ORDER_WARPS = 8, ORDER_THREADS = ORDER_WARPS * WARP, MOST_EXPERTS = 1024;

// The sum over the threads of a block that precede this one. `total` is the sum over all threads.
template <int warps>
__device__ __forceinline__ int block_scan(int x, int& total) {
  SHARED(int, sums, warps);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  int sum = x;
#pragma unroll
  for (int distance = 1; distance < WARP; distance *= 2) {
    const int other = __shfl_up_sync(ALL_LANES, sum, distance);
    if (lane >= distance) sum += other;
  }
  __syncthreads();  // all threads have read an earlier scan
  if (lane == WARP - 1) sums[warp] = sum;
  __syncthreads();  // the sums of all warps are written
  int before = 0;
  total = 0;
#pragma unroll
  for (int other = 0; other < warps; ++other) {
    if (other < warp) before += sums[other];
    total += sums[other];
  }
  return before + sum - x;
}

// A stable counting sort by one block, without atomics. Each warp has a part of the pairs and its own counts, to which
// the first of the lanes with the same expert adds for all of these lanes. Then the counts become the positions of the
// warp's next pairs.
__device__ __forceinline__ void order_pairs(const RouteArguments& given) {
  SHARED(int, positions, ORDER_WARPS * MOST_EXPERTS);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first = given.first_row * given.per_token;
  const int pairs = (given.rows - given.first_row) * given.per_token;
  const int part = (pairs + ORDER_THREADS - 1) / ORDER_THREADS * WARP;
  const int begin = min(warp * part, pairs), end = min(begin + part, pairs);
  const int* chosen = given.chosen + first;
  int* own = positions + warp * MOST_EXPERTS;
  for (int expert = lane; expert < given.experts; expert += WARP) own[expert] = 0;
  __syncwarp();
  for (int i = begin; i < end; i += WARP) {
    const bool there = i + lane < end;
    const int expert = there ? chosen[i + lane] : -1;
    const unsigned same = __match_any_sync(ALL_LANES, expert);
    if (there && !(same & ((1u << lane) - 1u))) own[expert] += __popc(same);
    __syncwarp();
  }
  __syncthreads();  // all warps have counted

  const int each = (given.experts + ORDER_THREADS - 1) / ORDER_THREADS, mine = threadIdx.x * each;
  const int last = min(mine + each, given.experts);
  int count = 0, groups = 0;
  for (int expert = mine; expert < last; ++expert) {
    int of_expert = 0;
    for (int other = 0; other < ORDER_WARPS; ++other) of_expert += positions[other * MOST_EXPERTS + expert];
    count += of_expert, groups += (of_expert + given.group - 1) / given.group;
  }
  int all_pairs, all_groups;
  int position = block_scan<ORDER_WARPS>(count, all_pairs), group = block_scan<ORDER_WARPS>(groups, all_groups);
  PairGroup* target = given.groups + first;
  for (int expert = mine; expert < last; ++expert) {
    const int start = position;
    for (int other = 0; other < ORDER_WARPS; ++other) {
      int& counted = positions[other * MOST_EXPERTS + expert];
      const int taken = counted;
      counted = position;
      position += taken;
    }
    for (int i = start; i < position; i += given.group)
      target[group++] = {expert, first + i, min(given.group, position - i), 0};
  }
  // The next kernels read the maximum possible number of groups.
  const int most = (pairs + (given.group - 1) * min(given.experts, pairs)) / given.group;
  for (int i = all_groups + threadIdx.x; i < most; i += ORDER_THREADS) target[i] = {0, 0, 0, 0};
  __syncthreads();  // all positions are known

  for (int i = begin; i < end; i += WARP) {
    const bool there = i + lane < end;
    const int expert = there ? chosen[i + lane] : -1;
    const unsigned same = __match_any_sync(ALL_LANES, expert), before = same & ((1u << lane) - 1u);
    if (there) given.ordered[first + own[expert] + __popc(before)] = first + i + lane;
    __syncwarp();  // all lanes have read their position
    if (there && !before) own[expert] += __popc(same);
    __syncwarp();
  }
}

// Route and sort a few rows in one block. This saves a launch in steps that have little other work.
__device__ __forceinline__ void route_and_order(const RouteArguments& given) {
  for (int row = given.first_row + threadIdx.x / WARP; row < given.rows; row += ORDER_WARPS) route_row(given, row);
  __syncthreads();  // the experts of all rows have been chosen
  order_pairs(given);
}

// out[t] = the sum of shares[t][rank] * results[t * per_token + rank], the best expert first.
struct MixArguments {
  const float* results;
  const float* shares;
  float* out;
  long long out_stride;
  int rows;
  int per_token;
  int width;
};

constexpr int MIX_THREADS = 256, MIX_COLUMNS = 512;

// Grid (width / 512, rows). The loads of all ranks are in flight together.
__device__ __forceinline__ void mix(const MixArguments& given) {
  const long long row = blockIdx.y;
  const int end = min(given.width, (int)(blockIdx.x + 1) * MIX_COLUMNS);
  const float* shares = given.shares + row * given.per_token;
  const float* results = given.results + row * given.per_token * given.width;
  for (int i = blockIdx.x * MIX_COLUMNS + threadIdx.x; i < end; i += MIX_THREADS) {
    float sum = 0.0f;
#pragma unroll 8
    for (int rank = 0; rank < given.per_token; ++rank)
      sum = fmaf(shares[rank], results[(long long)rank * given.width + i], sum);
    given.out[row * given.out_stride + i] = sum;
  }
}
