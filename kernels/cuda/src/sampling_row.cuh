// The state of a row of logits from which a token is sampled, as the kernels of sampling.cu process it.
//
// A row is split into parts of 2,048 tokens, with one block each: 128 blocks for the largest vocabularies, so that
// even one row fills a GPU. A launch executes one operation for every row: each block loads its part, drops the tokens
// that the last operation removed, and measures; the last block to finish adds up the parts in order and decides on the
// next operation. Once at most 2,048 tokens are in play, they become a list, and the last block completes the row
// alone: a list is a row of one part, in registers, and so is a row of a small vocabulary. No row depends on other
// rows.
#pragma once
#include "portable.cuh"

// The layout of kernels.sampling.ROW.
struct SamplingRow {
  long long steps[10];
  double settings[18];
  unsigned long long counter[3];
  long long span[8];
};

// The data that a call uploads: this struct, and, at these offsets in bytes from its beginning, SamplingRow [count];
// addresses of their logits [count]; edits; histories; masks. outcomes: the address of SamplingOutcome [count].
struct SamplingTable {
  long long rows;
  long long sources;
  long long edit_ids;
  long long edit_values;
  long long tokens;
  long long masks;
  long long outcomes;
  int count;
  int list_width;
};

// The state of a row between two launches. Two kinds of tokens were removed but not dropped yet: the tokens after
// (`floor`, `last`) in an order, if `ordered` names one, and the tokens that a `bounded` rule excludes. `listed`:
// number of tokens of the list; 0 = there is no list. A search covers sort keys from `low` to below `high`, which
// `pivots` split, the largest first.
struct SamplingState {
  double temperature;
  double highest;
  double total;
  double uniform;
  double coin;
  double fraction;
  double target;
  double before;
  double centre;
  double bound;
  double bound_highest;
  double bound_temperature;
  double weight;
  double probability;
  int operation;
  int after;
  int step;
  int status;
  int chosen;
  int best;
  int count;
  int listed;
  int marking;
  int applying;
  int ordered;
  int by_distance;
  int by_number;
  int is_new;
  int last;
  int bounded;
  int survivor;
  int bucket;
  int locating;
  int part;
  int finished;
  unsigned floor;
  unsigned low;
  unsigned high;
  unsigned pivots[17];
};

// The measurements of a block, or their totals for a row.
struct SamplingPart {
  double sums[17];
  unsigned long long best;
  int counts[17];
  int flags;
};

struct SamplingOutcome {
  double probability;
  int token;
  int status;
};

// own: [rows][parts][2048] changed logits; marks: [rows][vocab_size], zero between uses; list_values, list_ids:
// [rows][2048]; offsets: [rows][parts], offsets of the parts' tokens in the list; tickets: [rows], zero between uses;
// lists: [rows][2048], the most likely tokens in order. distributions may be null.
struct SamplingArguments {
  const SamplingTable* table;
  SamplingState* states;
  SamplingPart* results;
  float* own;
  int* marks;
  float* list_values;
  int* list_ids;
  int* offsets;
  int* tickets;
  int* lists;
  double* distributions;
  int vocab_size;
  int parts;
  int is_first;
};

namespace sampling {

// As in kernels/sampling.py, and two steps that are not options: log(sum(exp)), and the ids of the remaining tokens in
// order.
enum Step {
  END, PENALTIES, DRY, TOP_N_SIGMA, TOP_K, TYPICAL_P, TOP_P, MIN_P, XTC, TEMPERATURE, MIROSTAT, NORMALIZE, LIST
};
namespace setting {
enum Setting {
  TEMPERATURE, TOP_K, TOP_P, MIN_P, TYPICAL_P, TOP_N_SIGMA, XTC_PROBABILITY, XTC_THRESHOLD, REPETITION_PENALTY,
  PRESENCE_PENALTY, FREQUENCY_PENALTY, PENALTY_LAST_N, DRY_MULTIPLIER, DRY_BASE, DRY_ALLOWED_LENGTH, DRY_LAST_N,
  MIROSTAT_LIMIT, NO_REPEAT_NGRAM_SIZE
};
}
namespace span {
enum Span { SOURCE, FIRST_EDIT, END_EDIT, FIRST_TOKEN, END_TOKEN, MASK, FIRST_OUTPUT, DRY_LIMIT };
}
enum Status { UNFINISHED = -1, FINE, HAS_NAN, HAS_INFINITY, ALL_MASKED };
enum Operation { DONE, SCAN, MARK, WEIGH, SPREAD, SEARCH, LIKELY, SQUEEZE, DRAW, DISTRIBUTE, WRITE_LIST };
// Orders: the largest logit first, or the nearest to the centre first.
enum Order { UNORDERED, BY_SIZE, BY_DISTANCE };
// Rules other than orders: a logit, or a weight, of at least `bound`; or no such weight, except that of the survivor.
enum Bound { UNBOUNDED, BY_LOGIT, BY_WEIGHT, BUT_LIKELY };
// The effects of a history on tokens.
enum Marking { NO_MARKS, NGRAMS, OCCURRENCES, REPETITIONS };

constexpr int THREADS = 256, WARPS = THREADS / WARP, OWN = 8, PART = THREADS * OWN, BUCKETS = 17;
constexpr int BEHIND_ALL = 0x7fffffff;
constexpr unsigned LOWEST_KEY = 0x00800000u;  // key of the lowest finite logit
constexpr float LARGEST_FLOAT = 3.4028234663852886e38f;
// This temperature already separates all float32 logits that a smaller temperature would separate.
constexpr double LOWEST_TEMPERATURE = 1e-30;
// The largest penalty, so that penalties are finite.
constexpr double LARGEST_PENALTY = 1e38;

// The tokens of a thread, in order of their ids from thread to thread. -inf: not in play.
struct Tokens {
  float value[OWN];
  int id[OWN];
};

struct Row {
  const SamplingArguments& given;
  const SamplingRow& asked;
  int number;
  int part;
};

// Shared memory of a block. columns, tallies: [BUCKETS][THREADS].
struct Room {
  SamplingState* state;
  SamplingPart* result;
  double* columns;
  unsigned char* tallies;
  double* warp_sums;
  unsigned long long* warp_bests;
  int* warp_counts;
};

template <class T>
__device__ __forceinline__ const T* at_offset(const SamplingTable* table, long long offset) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(table) + offset);
}

// Read data that other blocks of this launch wrote, bypassing the L1 cache.
template <class T>
__device__ __forceinline__ T fresh(const T* address) {
  return *static_cast<const volatile T*>(address);
}

__device__ __forceinline__ float masked() { return __uint_as_float(0xff800000u); }
__device__ __forceinline__ bool in_play(float x) { return x > masked(); }

// Map floats to unsigned integers in the same order. Both zeros map to the same integer.
__device__ __forceinline__ unsigned key_of(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(unsigned key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
__device__ __forceinline__ float bounded(double x) {
  return (float)fmin(fmax(x, -(double)LARGEST_FLOAT), (double)LARGEST_FLOAT);
}

// A token's sort key in a search: by its logit, or by the distance of its logit from the centre, nearest first.
__device__ __forceinline__ unsigned sort_key_of(const SamplingState& state, bool by_distance, float x) {
  return key_of(by_distance ? bounded(-fabs((double)x - state.centre)) : x);
}

// Not inlined, because its copies would be most of the code.
__device__ __noinline__ double weight_at(double distance) { return exp(distance); }

__device__ __forceinline__ double weight_of(const SamplingState& state, float x) {
  return weight_at(((double)x - state.highest) * (1.0 / state.temperature));
}

// The two numbers in [0, 1) that NumPy's Philox returns for this key and counter (Salmon et al. 2011).
__device__ __forceinline__ void uniforms(const unsigned long long (&counter)[3], double& first, double& second) {
  unsigned long long a = counter[2] + 1, b = 0, c = 0, d = 0, key_0 = counter[0], key_1 = counter[1];
  const unsigned long long multiplier_0 = 0xD2E7470EE14C6C93ull, multiplier_1 = 0xCA5A826395121157ull;
  for (int round = 0; round < 10; ++round) {
    if (round) key_0 += 0x9E3779B97F4A7C15ull, key_1 += 0xBB67AE8584CAA73Bull;
    const unsigned long long high_0 = __umul64hi(multiplier_0, a), low_0 = multiplier_0 * a;
    const unsigned long long high_1 = __umul64hi(multiplier_1, c), low_1 = multiplier_1 * c;
    a = high_1 ^ b ^ key_0, b = low_1, c = high_0 ^ d ^ key_1, d = low_0;
  }
  first = (double)(a >> 11) * 0x1p-53, second = (double)(b >> 11) * 0x1p-53;
}

// --- over a block ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned long long block_largest(unsigned long long x, const Room& room) {
#pragma unroll
  for (int distance = WARP / 2; distance; distance /= 2) {
    const unsigned long long other = __shfl_xor_sync(ALL_LANES, x, distance);
    x = other > x ? other : x;
  }
  __syncthreads();  // all threads have read an earlier result
  if (threadIdx.x % WARP == 0) room.warp_bests[threadIdx.x / WARP] = x;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) x = room.warp_bests[warp] > x ? room.warp_bests[warp] : x;
  return x;
}

// The sum over the threads that precede this thread.
__device__ __forceinline__ double sum_before(double x, const Room& room) {
  const int lane = threadIdx.x % WARP;
  double reached = x;
#pragma unroll
  for (int distance = 1; distance < WARP; distance *= 2) {
    const double other = __shfl_up_sync(ALL_LANES, reached, distance);
    if (lane >= distance) reached += other;
  }
  const double before = __shfl_up_sync(ALL_LANES, reached, 1);
  __syncthreads();  // all threads have read an earlier result
  if (lane == WARP - 1) room.warp_sums[threadIdx.x / WARP] = reached;
  __syncthreads();
  double sum = 0.0;
  for (int warp = 0; warp < (int)threadIdx.x / WARP; ++warp) sum += room.warp_sums[warp];
  return lane ? sum + before : sum;
}

}  // namespace sampling
