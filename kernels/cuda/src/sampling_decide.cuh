// The decision on a row's next operation, based on the measurements. One thread decides.
#pragma once
#include "sampling_measure.cuh"

namespace sampling {

__device__ __forceinline__ void begin(const Row& at, SamplingState& state) {
  uniforms(at.asked.counter, state.uniform, state.coin);
  state.temperature = 1.0;
  state.status = UNFINISHED, state.chosen = -1, state.probability = 1.0;
  state.step = state.count = state.listed = 0;
  state.ordered = state.by_distance = state.by_number = 0;
  state.bounded = state.applying = state.marking = 0;
  state.operation = SCAN;
  if (at.asked.settings[setting::NO_REPEAT_NGRAM_SIZE] > 0) state.operation = MARK, state.marking = NGRAMS;
}

__device__ __forceinline__ bool is_greedy(const Row& at) { return at.asked.settings[setting::TEMPERATURE] == 0.0; }

// Return true if only the most likely token of the unchanged logits is needed. In this case, the logits need not be
// stored.
__device__ __forceinline__ bool is_simple(const Row& at) {
  return is_greedy(at) && at.asked.steps[0] == END && !at.given.distributions &&
         at.asked.settings[setting::NO_REPEAT_NGRAM_SIZE] == 0.0;
}

__device__ __forceinline__ void finish(SamplingState& state) {
  state.status = FINE, state.operation = DONE;
}

// --- searches --------------------------------------------------------------------------------------------------------

// A search finds the fewest tokens of an order that reach a number, or a share of the total weight. The first buckets
// are at distances from the top that are typical of distributions. Then the bucket that holds the answer is split into
// sixteen, and the tokens below it are dropped. This is repeated at most nine times.
__device__ __forceinline__ void begin_search(SamplingState& state, bool by_number, bool by_distance, double amount) {
  state.operation = SEARCH, state.by_number = by_number, state.by_distance = by_distance;
  state.is_new = 1, state.fraction = state.target = amount;
  const double top = by_distance ? 0.0 : state.highest;
  state.low = LOWEST_KEY, state.high = key_of((float)top) + 1;
  state.pivots[0] = state.high, state.pivots[BUCKETS - 1] = state.low;
  double distance = 0.5 * state.temperature;
#pragma unroll 1
  for (int i = 1; i < BUCKETS - 1; ++i, distance *= 1.4) state.pivots[i] = key_of(bounded(top - distance));
}

__device__ __forceinline__ void split_again(SamplingState& state) {
  const unsigned long long width = state.high - state.low, step = (width + BUCKETS - 2) / (BUCKETS - 1);
#pragma unroll 1
  for (int i = 0; i < BUCKETS; ++i) {
    const unsigned long long down = i * step;
    state.pivots[i] = down < width ? state.high - (unsigned)down : state.low;
  }
}

// Find the bucket of the answer. Returns true if the search is over: `floor` and `last` then determine the tokens that
// stay, unless the last token at the floor must still be found (`locating`).
__device__ __forceinline__ bool narrow(SamplingState& state, const SamplingPart& found) {
  if (state.is_new) {
    double total = 0.0;
#pragma unroll 1
    for (int i = 0; i < BUCKETS; ++i) total += found.sums[i];
    if (!state.by_number) state.target = state.fraction * total;
    state.is_new = 0;
  }
  double reached = found.counts[0] ? found.sums[0] : 0.0;
  int bucket = 0, kept = found.counts[0];
  bool is_there = false;
#pragma unroll 1
  for (int i = 1; i < BUCKETS && !is_there; ++i) {
    if (!found.counts[i]) continue;
    if (bucket) reached += found.sums[bucket];
    bucket = i, kept += found.counts[i];
    is_there = reached + found.sums[i] >= state.target;
  }
  state.bucket = bucket, state.before = reached, state.count = kept;
  state.low = state.pivots[bucket], state.high = state.pivots[bucket - 1];
  state.ordered = state.by_distance ? BY_DISTANCE : BY_SIZE, state.floor = state.low, state.last = BEHIND_ALL;
  const bool whole = !is_there || found.counts[bucket] == 1 || (state.by_number && (double)kept == state.target);
  if (whole) return true;
  if (state.high - state.low > 1) {
    split_again(state);
    return false;
  }
  state.locating = 1;
  return true;
}

// --- steps -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void bound(SamplingState& state, int kind, double least) {
  state.bounded = kind, state.bound = least;
  state.bound_highest = state.highest, state.bound_temperature = state.temperature;
}

// Only the most likely token stays.
__device__ __forceinline__ void keep_best(SamplingState& state) {
  state.ordered = BY_SIZE;
  state.floor = key_of((float)state.highest), state.last = state.best;
}

__device__ __forceinline__ void end_of_steps(const Row& at, SamplingState& state) {
  if (!is_greedy(at)) {
    state.operation = DRAW, state.before = 0.0;
    return;
  }
  state.chosen = state.best;
  if (!at.given.distributions) return finish(state);
  keep_best(state);
  state.total = 1.0, state.operation = DISTRIBUTE;
}

__device__ __forceinline__ int next_step(const Row& at, const SamplingState& state) {
  return state.step < 10 ? (int)at.asked.steps[state.step] : END;
}

// Continue with the next step that requires a measurement.
__device__ __forceinline__ void go_on(const Row& at, SamplingState& state) {
  const double* settings = at.asked.settings;
  for (;;) {
    const int step = next_step(at, state);
    if (state.bounded && step == MIN_P) {  // one rule at a time
      state.operation = SCAN;
      return;
    }
    ++state.step;
    switch (step) {
      case END: return end_of_steps(at, state);
      case PENALTIES: state.operation = MARK, state.marking = OCCURRENCES; return;
      case DRY: state.operation = MARK, state.marking = REPETITIONS; return;
      case TOP_N_SIGMA: state.operation = SPREAD; return;
      case TYPICAL_P:
      case MIROSTAT:
      case NORMALIZE: state.operation = WEIGH; return;
      case TOP_P: return begin_search(state, false, false, settings[setting::TOP_P]);
      case LIST: state.operation = WRITE_LIST; return;
      case TOP_K:
        if (settings[setting::TOP_K] >= state.count) break;
        return begin_search(state, true, false, settings[setting::TOP_K]);
      case MIN_P: bound(state, BY_WEIGHT, settings[setting::MIN_P]); break;
      case TEMPERATURE: state.temperature *= fmax(settings[setting::TEMPERATURE], LOWEST_TEMPERATURE); break;
      case XTC:
        if (!(state.coin < settings[setting::XTC_PROBABILITY])) break;
        state.operation = WEIGH;
        return;
    }
  }
}

// The functions below process the measurements, and return true if the next step is due (`go_on`).

// Pass the weights to the step that requested them.
__device__ __forceinline__ bool weighed(const Row& at, SamplingState& state, const SamplingPart& found) {
  const double* settings = at.asked.settings;
  state.total = found.sums[0];
  switch (at.asked.steps[state.step - 1]) {
    case TYPICAL_P:
      // Surprise and entropy differ by the distance of a logit from the mean of all logits, weighted by their
      // probabilities.
      state.centre = state.highest + found.sums[1] / state.total * state.temperature;
      begin_search(state, false, true, settings[setting::TYPICAL_P]);
      return false;
    case XTC:
      state.target = settings[setting::XTC_THRESHOLD] * state.total;
      state.operation = LIKELY;
      return false;
    case MIROSTAT: {
      const double least = state.total * exp2(-settings[setting::MIROSTAT_LIMIT]);
      if (least > 1.0) keep_best(state);
      else bound(state, BY_WEIGHT, least);
      return true;
    }
    default:  // NORMALIZE
      state.probability = state.highest + log(state.total);
      if (at.given.table->list_width) return true;
      finish(state);
      return false;
  }
}

// Return FINE if a row can be sampled, else the reason why it cannot.
__device__ __forceinline__ int status_of(const SamplingPart& found) {
  return found.flags & 1 ? HAS_NAN : found.flags & 2 ? HAS_INFINITY : found.counts[0] ? FINE : ALL_MASKED;
}

__device__ __forceinline__ bool scanned(SamplingState& state, const SamplingPart& found) {
  state.highest = value_of((unsigned)(found.best >> 32)), state.best = (int)(0xffffffffu - (unsigned)found.best);
  if (status_of(found) == FINE) return true;
  state.status = status_of(found), state.operation = DONE;
  return false;
}

// Select the most likely token, if nothing else is needed.
__device__ __forceinline__ void take_best(SamplingState& state, const SamplingPart& found) {
  state.operation = DONE, state.status = status_of(found);
  state.chosen = (int)(0xffffffffu - (unsigned)found.best);
}

// There are so few tokens in play that they become a list before `operation` follows.
__device__ __forceinline__ void list_first(SamplingState& state, int operation) {
  state.after = operation, state.operation = SQUEEZE;
}

__device__ __forceinline__ bool searched(SamplingState& state, const SamplingPart& found, bool alone) {
  const bool is_over = narrow(state, found);
  if (state.locating) return false;
  if (!alone && state.count <= PART) {
    list_first(state, is_over ? SCAN : SEARCH);
    return false;
  }
  if (is_over && state.by_distance) state.operation = SCAN;  // the most likely token may have been removed
  return is_over && !state.by_distance;
}

// Decide on the step that follows an operation.
__device__ __forceinline__ bool decide(const Row& at, SamplingState& state, const SamplingPart& found, bool alone) {
  const int operation = state.operation;
  state.ordered = state.bounded = state.applying = state.locating = state.bucket = 0;
  if (operation == SCAN || operation == WEIGH || operation == SPREAD) {
    state.count = found.counts[0];
    const bool is_fine = operation != SCAN || status_of(found) == FINE;
    const bool is_known = operation == SCAN && is_greedy(at) && next_step(at, state) == END;
    if (!alone && is_fine && !is_known && state.count <= PART) {
      list_first(state, operation);
      return false;
    }
  }
  switch (operation) {
    case SCAN: return scanned(state, found);
    case MARK: state.applying = state.marking, state.operation = SCAN; return false;
    case WEIGH: return weighed(at, state, found);
    case SPREAD: {
      const double mean = found.sums[0] / found.counts[0];
      const double deviation = sqrt(fmax(found.sums[1] / found.counts[0] - mean * mean, 0.0));
      bound(state, BY_LOGIT, state.highest - at.asked.settings[setting::TOP_N_SIGMA] * deviation);
      return true;
    }
    case SEARCH: return searched(state, found, alone);
    case LIKELY:
      if (found.counts[0] < 2) return true;
      bound(state, BUT_LIKELY, state.target), state.survivor = (int)(unsigned)found.best;
      state.operation = SCAN;
      return false;
    case DRAW:
      state.total = found.sums[0], state.target = state.uniform * state.total;
      state.locating = 1;
      return false;
    case SQUEEZE: state.listed = state.count, state.operation = state.after; return false;
    default: finish(state); return false;  // DISTRIBUTE, WRITE_LIST
  }
}

// Decide on the step that follows after a token was found. An order by distance may have removed the most likely token.
__device__ __forceinline__ bool located(const Row& at, SamplingState& state, bool alone) {
  if (state.operation == DRAW) {
    state.probability = state.weight / state.total;
    if (at.given.distributions) state.operation = DISTRIBUTE;
    else finish(state);
    return false;
  }
  state.last = state.chosen, state.chosen = -1;
  if (!alone && state.by_number && state.target <= PART) {
    state.count = (int)state.target;
    list_first(state, SCAN);
    return false;
  }
  if (state.by_distance) state.operation = SCAN;
  return !state.by_distance;
}

}  // namespace sampling
