// The measurements of a block's tokens, and the sums over the parts of a row. Parts are added in the order of their
// numbers, whatever the order in which their blocks ran.
#pragma once
#include "sampling_load.cuh"

namespace sampling {

// Count the tokens in play, find the largest logit and the first token that has it, and flag NaN (1) and infinity (2).
__device__ __forceinline__ void scan(const Tokens& tokens, const Room& room) {
  unsigned long long best = 0;
  int count = 0, flags = 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const float x = tokens.value[i];
    if (x != x) flags |= 1;
    if (x > LARGEST_FLOAT) flags |= 2;
    if (!in_play(x)) continue;
    ++count;
    const unsigned long long own = (unsigned long long)key_of(x) << 32 | (0xffffffffu - (unsigned)tokens.id[i]);
    best = own > best ? own : best;
  }
  best = block_largest(best, room);
#pragma unroll
  for (int distance = WARP / 2; distance; distance /= 2) {
    count += __shfl_xor_sync(ALL_LANES, count, distance);
    flags |= __shfl_xor_sync(ALL_LANES, flags, distance);
  }
  if (threadIdx.x % WARP == 0) room.warp_counts[threadIdx.x / WARP] = count << 2 | flags;
  __syncthreads();
  if (threadIdx.x) return;
  room.result->best = best, room.result->counts[0] = 0, room.result->flags = 0;
  for (int warp = 0; warp < WARPS; ++warp) {
    room.result->counts[0] += room.warp_counts[warp] >> 2;
    room.result->flags |= room.warp_counts[warp] & 3;
  }
}

// Count the tokens with at least `target` weight, and find the token with the least weight, or the last of several.
__device__ __forceinline__ void find_likely(const Tokens& tokens, const Room& room) {
  const SamplingState& state = *room.state;
  unsigned long long lightest = 0;
  double count = 0.0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const float x = tokens.value[i];
    if (!in_play(x) || weight_of(state, x) < state.target) continue;
    count += 1.0;
    const unsigned long long own = (unsigned long long)~key_of(x) << 32 | (unsigned)tokens.id[i];
    lightest = own > lightest ? own : lightest;
  }
  lightest = block_largest(lightest, room);
  const double before = sum_before(count, room);
  if (threadIdx.x == THREADS - 1) room.result->counts[0] = (int)(before + count), room.result->best = lightest;
}

__device__ __forceinline__ int bucket_of(const SamplingState& state, unsigned sort_key) {
  int bucket = 0;
#pragma unroll
  for (int step = BUCKETS - 1; step; step /= 2)
    if (bucket + step < BUCKETS && sort_key < state.pivots[bucket + step - 1]) bucket += step;
  return bucket;
}

// The number of buckets that an operation adds up.
__device__ __forceinline__ int buckets_of(int operation) {
  return operation == SEARCH ? BUCKETS : operation == SCAN || operation == LIKELY ? 1 : 2;
}

// Add up weights and numbers of tokens by bucket. Each thread adds to its own column, so there are no atomics and the
// order is fixed. Columns of adjacent threads lie in adjacent banks. WEIGH: bucket 0 has the weights, and bucket 1 has
// the weights times the distances from the highest logit (in temperatures). SPREAD: distances, and their squares.
__device__ __forceinline__ void add_up(const Tokens& tokens, const Room& room) {
  const SamplingState& state = *room.state;
  const int operation = state.operation, used = buckets_of(operation), thread = threadIdx.x;
  for (int bucket = 0; bucket < used; ++bucket)
    room.columns[bucket * THREADS + thread] = 0.0, room.tallies[bucket * THREADS + thread] = 0;
  const double scale = 1.0 / state.temperature;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const float x = tokens.value[i];
    if (!in_play(x)) continue;
    const double distance = (double)x - state.highest;
    double first = distance, second = distance * distance;
    int bucket = 0;
    if (operation != SPREAD) first = state.by_number && operation == SEARCH ? 1.0 : weight_at(distance * scale);
    if (operation == SEARCH) bucket = bucket_of(state, sort_key_of(state, state.by_distance, x));
    else if (operation != SPREAD) second = first * distance * scale;
    room.columns[bucket * THREADS + thread] += first;
    ++room.tallies[bucket * THREADS + thread];
    if (operation != SEARCH) room.columns[THREADS + thread] += second;
  }
  __syncthreads();
  for (int bucket = thread / WARP; bucket < used; bucket += WARPS) {
    double sum = 0.0;
    int count = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
      sum += room.columns[bucket * THREADS + i * WARP + thread % WARP];
      count += room.tallies[bucket * THREADS + i * WARP + thread % WARP];
    }
#pragma unroll
    for (int distance = WARP / 2; distance; distance /= 2) {
      sum += __shfl_xor_sync(ALL_LANES, sum, distance);
      count += __shfl_xor_sync(ALL_LANES, count, distance);
    }
    if (thread % WARP == 0) room.result->sums[bucket] = sum, room.result->counts[bucket] = count;
  }
}

// --- parts -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ SamplingPart* result_of(const Row& at, int part) {
  return at.given.results + (long long)at.number * at.given.parts + part;
}

// Store this block's measurements for the last block; return true if this is the last block.
__device__ __forceinline__ bool is_last(const Row& at, const Room& room) {
  __syncthreads();
  SamplingPart* own = result_of(at, at.part);
  const int used = buckets_of(room.state->operation), thread = threadIdx.x;
  if (thread < used) own->sums[thread] = room.result->sums[thread], own->counts[thread] = room.result->counts[thread];
  if (thread == 0) own->best = room.result->best, own->flags = room.result->flags;
  __threadfence();
  __syncthreads();
  if (thread == 0) {
    const int arrived = atomicAdd(at.given.tickets + at.number, 1);
    room.state->finished = arrived == at.given.parts - 1;
    if (room.state->finished) at.given.tickets[at.number] = 0;
  }
  __syncthreads();
  __threadfence();
  return room.state->finished != 0;
}

// Add up the measurements that the blocks of a row stored. Sixteen lanes share the parts of a bucket, so that their
// loads are in flight together.
__device__ __forceinline__ void join(const Row& at, const Room& room) {
  const int used = buckets_of(room.state->operation), parts = at.given.parts, lanes = 16;
  unsigned long long best = 0;
  int flags = 0;
  for (int part = threadIdx.x; part < parts; part += THREADS) {
    const unsigned long long own = fresh(&result_of(at, part)->best);
    best = own > best ? own : best;
    flags |= fresh(&result_of(at, part)->flags);
  }
  best = block_largest(best, room);
  for (int distance = WARP / 2; distance; distance /= 2) flags |= __shfl_xor_sync(ALL_LANES, flags, distance);
  if (threadIdx.x % WARP == 0) room.warp_counts[threadIdx.x / WARP] = flags;
  __syncthreads();
  if (threadIdx.x == 0) {
    room.result->best = best, room.result->flags = 0;
    for (int warp = 0; warp < WARPS; ++warp) room.result->flags |= room.warp_counts[warp];
  }
  for (int first = 0; first < used; first += THREADS / lanes) {
    const int bucket = first + threadIdx.x / lanes;
    double sum = 0.0;
    int count = 0;
    for (int part = threadIdx.x % lanes; bucket < used && part < parts; part += lanes) {
      sum += fresh(&result_of(at, part)->sums[bucket]);
      count += fresh(&result_of(at, part)->counts[bucket]);
    }
#pragma unroll
    for (int distance = lanes / 2; distance; distance /= 2) {
      sum += __shfl_xor_sync(ALL_LANES, sum, distance);
      count += __shfl_xor_sync(ALL_LANES, count, distance);
    }
    if (bucket < used && threadIdx.x % lanes == 0) room.result->sums[bucket] = sum, room.result->counts[bucket] = count;
  }
}

// --- lists -----------------------------------------------------------------------------------------------------------

// Compute the offset of each part's tokens in the list, after those of the parts before it. If the last token at the
// floor was searched for, later tokens at the floor are removed: all such tokens of later parts, and some of the part
// that holds the last token, of which only the required number stays.
__device__ __forceinline__ void find_offsets(const Row& at, const Room& room) {
  const SamplingState& state = *room.state;
  const int whole = state.bucket + !state.locating;
  int* kept = reinterpret_cast<int*>(room.columns);
  for (int part = threadIdx.x; part < at.given.parts; part += THREADS) {
    kept[part] = 0;
#pragma unroll 1
    for (int bucket = 0; bucket < whole; ++bucket) kept[part] += fresh(&result_of(at, part)->counts[bucket]);
    if (!state.locating) continue;
    if (part < state.part) kept[part] += fresh(&result_of(at, part)->counts[whole]);
    if (part == state.part) kept[part] += (int)(state.target - state.before);
  }
  __syncthreads();
  if (threadIdx.x) return;
  int before = 0;
#pragma unroll 1
  for (int part = 0; part < at.given.parts; ++part) {
    at.given.offsets[(long long)at.number * at.given.parts + part] = before;
    before += kept[part];
  }
}

__device__ __forceinline__ void squeeze(const Row& at, const Tokens& tokens, const Room& room) {
  double count = 0.0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) count += in_play(tokens.value[i]);
  int index = at.given.offsets[(long long)at.number * at.given.parts + at.part] + (int)sum_before(count, room);
#pragma unroll
  for (int i = 0; i < OWN; ++i)
    if (in_play(tokens.value[i])) {
      at.given.list_values[(long long)at.number * PART + index] = tokens.value[i];
      at.given.list_ids[(long long)at.number * PART + index] = tokens.id[i];
      ++index;
    }
}

// Write the ids of the tokens in play in order: the rank of a token is the number of tokens before it.
__device__ __forceinline__ void write_list(const Row& at, const Tokens& tokens, const Room& room) {
  unsigned long long* all = reinterpret_cast<unsigned long long*>(room.columns);
  int* out = at.given.lists + (long long)at.number * PART;
  const int width = at.given.table->list_width, first = threadIdx.x * OWN;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const unsigned long long key = key_of(tokens.value[i]);
    all[first + i] = in_play(tokens.value[i]) ? key << 32 | (0xffffffffu - (unsigned)tokens.id[i]) : 0;
    if (first + i < width) out[first + i] = -1;
  }
  __syncthreads();
  const int size = room.state->listed ? room.state->listed : min(at.given.vocab_size, PART);
#pragma unroll 1
  for (int i = 0; i < OWN; ++i) {
    const unsigned long long own = all[first + i];
    if (!own) continue;
    int rank = 0;
#pragma unroll 4
    for (int other = 0; other < size; ++other) rank += all[other] > own;
    if (rank < width) out[rank] = (int)(0xffffffffu - (unsigned)own);
  }
}

// For an operation that searches for the token at which sums in order of ids reach a target: find the part of the row
// that contains it. `before` becomes the sum before that part.
__device__ __forceinline__ void find_part(const Row& at, const Room& room) {
  SamplingState& state = *room.state;
  const bool by_count = state.operation == SEARCH && state.by_number;
  const int bucket = state.operation == SEARCH ? state.bucket : 0;
  for (int part = threadIdx.x; part < at.given.parts; part += THREADS) {
    const SamplingPart* one = result_of(at, part);
    room.columns[part] = by_count ? (double)fresh(&one->counts[bucket]) : fresh(&one->sums[bucket]);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    double reached = state.before;
#pragma unroll 1
    for (int part = 0; part < at.given.parts; ++part) {
      if (!(room.columns[part] > 0.0)) continue;
      state.part = part, state.before = reached;
      reached += room.columns[part];
      if (state.operation == DRAW ? reached > state.target : reached >= state.target) break;
    }
  }
  __syncthreads();
}

// Find the first token at which sums in order of ids pass the target (DRAW: over all tokens in play) or reach it
// (SEARCH: over those at the floor), or else the last token that has any weight: `chosen`, and its `weight`.
__device__ __forceinline__ void find_token(const Tokens& tokens, const Room& room) {
  SamplingState& state = *room.state;
  const bool draws = state.operation == DRAW;
  double weights[OWN], own = 0.0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const float x = tokens.value[i];
    weights[i] = 0.0;
    if (in_play(x) && (draws || sort_key_of(state, state.by_distance, x) == state.low))
      weights[i] = !draws && state.by_number ? 1.0 : weight_of(state, x);
    own += weights[i];
  }
  double reached = state.before + sum_before(own, room);
  unsigned long long found = 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    if (!(weights[i] > 0.0)) continue;
    reached += weights[i];
    const bool is_it = draws ? reached > state.target : reached >= state.target;
    const unsigned id = (unsigned)tokens.id[i] + 1;
    const unsigned long long one = is_it ? 1ull << 63 | (0xffffffffu - id) : id;
    found = one > found ? one : found;
  }
  found = block_largest(found, room);
  const int chosen = (int)((found >> 63 ? 0xffffffffu - (unsigned)found : (unsigned)found) - 1);
#pragma unroll
  for (int i = 0; i < OWN; ++i)
    if (tokens.id[i] == chosen && weights[i] > 0.0) state.chosen = chosen, state.weight = weights[i];
}

}  // namespace sampling
