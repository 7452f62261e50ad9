// The tokens of a block: loaded from the logits with edits and mask, from the data that the last operation stored, or
// from the list; the effects of a history on them; and the removal of tokens.
#pragma once
#include "sampling_row.cuh"

namespace sampling {

__device__ __forceinline__ long long own_offset(const Row& at, int part) {
  return ((long long)at.number * at.given.parts + part) * PART + threadIdx.x * OWN;
}

__device__ __forceinline__ void split(Tokens& tokens, int first, float4 a, float4 b) {
  tokens.value[0] = a.x, tokens.value[1] = a.y, tokens.value[2] = a.z, tokens.value[3] = a.w;
  tokens.value[4] = b.x, tokens.value[5] = b.y, tokens.value[6] = b.z, tokens.value[7] = b.w;
#pragma unroll
  for (int i = 0; i < OWN; ++i) tokens.id[i] = first + i;
}

// Load the data that an earlier launch stored: 32 bytes per thread, in two loads of 16.
__device__ __forceinline__ void load_own(const Row& at, Tokens& tokens) {
  const float4* own = reinterpret_cast<const float4*>(at.given.own + own_offset(at, at.part));
  split(tokens, at.part * PART + threadIdx.x * OWN, own[0], own[1]);
}

// Load the data that another block stored in this launch.
__device__ __forceinline__ void load_other(const Row& at, int part, Tokens& tokens) {
  const float* own = at.given.own + own_offset(at, part);
#pragma unroll
  for (int i = 0; i < OWN; ++i) tokens.value[i] = fresh(own + i), tokens.id[i] = part * PART + threadIdx.x * OWN + i;
}

__device__ __forceinline__ void store_own(const Row& at, const Tokens& tokens) {
  float4* own = reinterpret_cast<float4*>(at.given.own + own_offset(at, at.part));
  own[0] = float4{tokens.value[0], tokens.value[1], tokens.value[2], tokens.value[3]};
  own[1] = float4{tokens.value[4], tokens.value[5], tokens.value[6], tokens.value[7]};
}

__device__ __forceinline__ void load_list(const Row& at, int count, Tokens& tokens) {
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int index = threadIdx.x * OWN + i;
    const bool is_there = index < count;
    tokens.value[i] = is_there ? fresh(at.given.list_values + (long long)at.number * PART + index) : masked();
    tokens.id[i] = is_there ? fresh(at.given.list_ids + (long long)at.number * PART + index) : BEHIND_ALL;
  }
}

// Apply edits in order. Each thread applies the edits of its own tokens.
__device__ __forceinline__ void edit(const Row& at, Tokens& tokens) {
  const int* ids = at_offset<int>(at.given.table, at.given.table->edit_ids);
  const float* values = at_offset<float>(at.given.table, at.given.table->edit_values);
#pragma unroll 1
  for (long long edit = at.asked.span[span::FIRST_EDIT]; edit < at.asked.span[span::END_EDIT]; ++edit) {
    const int index = ids[edit] - tokens.id[0];
    const float value = values[edit];
    if (index < 0 || index >= OWN) continue;
#pragma unroll
    for (int i = 0; i < OWN; ++i)
      if (i == index) tokens.value[i] = value == masked() ? value : tokens.value[i] + value;
  }
}

__device__ __forceinline__ void load_given(const Row& at, Tokens& tokens) {
  const int first = at.part * PART + threadIdx.x * OWN, size = at.given.vocab_size;
  const unsigned long long source = at_offset<unsigned long long>(at.given.table, at.given.table->sources)[at.number];
  const float* logits = reinterpret_cast<const float*>(source) + first;
  if (source % 16 == 0 && first + OWN <= size) {
    const float4* quads = reinterpret_cast<const float4*>(logits);
    split(tokens, first, quads[0], quads[1]);
  } else {
#pragma unroll
    for (int i = 0; i < OWN; ++i) tokens.value[i] = first + i < size ? logits[i] : masked(), tokens.id[i] = first + i;
  }
  edit(at, tokens);
  const long long mask = at.asked.span[span::MASK];
  if (mask <= 0 || first >= size) return;
  const long long words = (size + 31) / 32;
  const unsigned* bits = at_offset<unsigned>(at.given.table, at.given.table->masks) + (mask - 1) * words;
  const unsigned allowed = bits[first / 32] >> first % 32;  // a thread's eight tokens are a byte of a word
#pragma unroll
  for (int i = 0; i < OWN; ++i)
    if (!(allowed >> i & 1)) tokens.value[i] = masked();
}

// --- histories -------------------------------------------------------------------------------------------------------

// The tokens that count: the last `most` of a history. The threads of all blocks of a row share them.
struct Window {
  const int* tokens;
  int count;
  int skipped;
};

__device__ __forceinline__ Window window_of(const Row& at, double most) {
  const long long first = at.asked.span[span::FIRST_TOKEN];
  const int count = (int)(at.asked.span[span::END_TOKEN] - first);
  const int skipped = (int)fmax(0.0, (double)count - most);
  return {at_offset<int>(at.given.table, at.given.table->tokens) + first + skipped, count - skipped, skipped};
}

__device__ __forceinline__ Window window_of(const Row& at, int marking) {
  const double* settings = at.asked.settings;
  if (marking == OCCURRENCES) return window_of(at, settings[setting::PENALTY_LAST_N]);
  return window_of(at, marking == REPETITIONS ? settings[setting::DRY_LAST_N] : (double)BEHIND_ALL);
}

// Count the tokens before `position` that equal those at the end of a window, up to `limit`.
__device__ __forceinline__ int agreeing(const Window& window, int position, int limit) {
  int length = 0;
  const int most = min(position, limit), last = window.count - 1;
#pragma unroll 1
  while (length < most && window.tokens[position - 1 - length] == window.tokens[last - length]) ++length;
  return length;
}

// Write the mark of each token in a history: 1 = the token completes an n-gram that has occurred (NGRAMS); 1 + 2 * the
// number of times that it was generated (OCCURRENCES); 1 + the length of the repetition that it continues
// (REPETITIONS). Marks are sums and maxima of integers, so the order of threads does not matter.
__device__ __forceinline__ void mark(const Row& at, int marking, int parts) {
  const Window window = window_of(at, marking);
  int* marks = at.given.marks + (long long)at.number * at.given.vocab_size;
  const int size = (int)at.asked.settings[setting::NO_REPEAT_NGRAM_SIZE];
  const int allowed = (int)at.asked.settings[setting::DRY_ALLOWED_LENGTH];
  const int limit = (int)at.asked.span[span::DRY_LIMIT];
  const int first_output = (int)at.asked.span[span::FIRST_OUTPUT] - window.skipped;
  const int part = parts == 1 ? 0 : at.part;
#pragma unroll 1
  for (int position = part * THREADS + threadIdx.x; position < window.count; position += parts * THREADS) {
    int* own = marks + window.tokens[position];
    if (marking == OCCURRENCES) {
      atomicOr(own, 1);
      if (position >= first_output) atomicAdd(own, 2);
    } else if (marking == REPETITIONS) {
      const int length = position ? agreeing(window, position, limit) : -1;
      if (length >= allowed) atomicMax(own, length + 1);
    } else if (position >= size - 1 && agreeing(window, position, size - 1) == size - 1) {
      atomicMax(own, 1);
    }
  }
}

// Apply a mark to a logit. Penalties are multiplied by the temperature, because logits are not actually divided by it.
__device__ __forceinline__ float penalised(const Row& at, const SamplingState& state, float logit, int mark) {
  const double* settings = at.asked.settings;
  if (state.applying == NGRAMS || !in_play(logit)) return masked();
  if (state.applying == REPETITIONS) {
    const double length = mark - 1 - settings[setting::DRY_ALLOWED_LENGTH];
    const double penalty = settings[setting::DRY_MULTIPLIER] * pow(settings[setting::DRY_BASE], length);
    return bounded((double)logit - fmin(penalty, LARGEST_PENALTY) * state.temperature);
  }
  const double repetition = settings[setting::REPETITION_PENALTY];
  double value = logit > 0.0f ? logit / repetition : logit * repetition;
  const double often = mark >> 1;
  if (mark >> 1)
    value -= (settings[setting::PRESENCE_PENALTY] + settings[setting::FREQUENCY_PENALTY] * often) * state.temperature;
  return bounded(value);
}

__device__ __forceinline__ void apply_marks(const Row& at, const SamplingState& state, Tokens& tokens) {
  volatile int* marks = at.given.marks + (long long)at.number * at.given.vocab_size;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    if (tokens.id[i] >= at.given.vocab_size) continue;
    const int mark = marks[tokens.id[i]];
    if (mark) tokens.value[i] = penalised(at, state, tokens.value[i], mark);
    if (mark && !state.listed) marks[tokens.id[i]] = 0;
  }
  if (!state.listed) return;
  __syncthreads();  // a list may lack tokens that have a mark, so all marks are cleared where they were written
  const Window window = window_of(at, state.applying);
#pragma unroll 1
  for (int position = threadIdx.x; position < window.count; position += THREADS) marks[window.tokens[position]] = 0;
}

// --- removed tokens ------------------------------------------------------------------------------------------------

__device__ __forceinline__ void drop(const SamplingState& state, Tokens& tokens) {
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const float x = tokens.value[i];
    if (!in_play(x)) continue;
    bool stays = true;
    if (state.ordered) {
      const unsigned sort_key = sort_key_of(state, state.ordered == BY_DISTANCE, x);
      stays = sort_key > state.floor || (sort_key == state.floor && tokens.id[i] <= state.last);
    }
    if (state.bounded == BY_LOGIT) stays = stays && (double)x >= state.bound;
    if (state.bounded == BY_WEIGHT || state.bounded == BUT_LIKELY) {
      const double weight = weight_at(((double)x - state.bound_highest) * (1.0 / state.bound_temperature));
      const bool has = weight >= state.bound;
      stays = stays && (state.bounded == BY_WEIGHT ? has : !has || tokens.id[i] == state.survivor);
    }
    if (!stays) tokens.value[i] = masked();
  }
}

}  // namespace sampling
