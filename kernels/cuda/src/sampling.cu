// Sample tokens from rows of logits: see sampling_row.cuh. Grid (parts, rows).
#include "sampling_decide.cuh"

namespace sampling {

__device__ __forceinline__ void copy_state(SamplingState* to, const SamplingState* from) {
  static_assert(sizeof(SamplingState) % 4 == 0, "copied in words");
  const int* source = reinterpret_cast<const int*>(from);
  for (int i = threadIdx.x; i < (int)(sizeof(SamplingState) / 4); i += THREADS) reinterpret_cast<int*>(to)[i] = source[i];
}

__device__ __forceinline__ void write_outcome(const Row& at, const SamplingState& state) {
  SamplingOutcome& out = reinterpret_cast<SamplingOutcome*>(at.given.table->outcomes)[at.number];
  out.token = state.status == FINE ? state.chosen : -1;
  out.status = state.status, out.probability = state.probability;
}

// Measure the quantities of this block's tokens that the current operation needs.
template <bool greedy>
__device__ __forceinline__ void measure(const Row& at, const Tokens& tokens, const Room& room, bool alone) {
  if constexpr (greedy) {
    scan(tokens, room);
    return;
  }
  switch (room.state->operation) {
    case SCAN: return scan(tokens, room);
    case MARK: return mark(at, room.state->marking, alone ? 1 : at.given.parts);
    case LIKELY: return find_likely(tokens, room);
    case SQUEEZE: return squeeze(at, tokens, room);
    case WRITE_LIST: return write_list(at, tokens, room);
    case DISTRIBUTE:
      for (int i = 0; i < OWN; ++i)
        if (in_play(tokens.value[i]))
          at.given.distributions[(long long)at.number * at.given.vocab_size + tokens.id[i]] =
              weight_of(*room.state, tokens.value[i]) / room.state->total;
      return;
    default: return add_up(tokens, room);
  }
}

// Determine the next operation. Called by the only block of a row, or by the last block to finish.
template <bool greedy>
__device__ __forceinline__ void settle(const Row& at, Tokens& tokens, const Room& room, bool alone) {
  SamplingState& state = *room.state;
  const bool decides = threadIdx.x == 0;
  __syncthreads();
  if constexpr (greedy) {
    if (decides) take_best(state, *room.result);
    return;
  }
  bool next = decides && decide(at, state, *room.result, alone);
  __syncthreads();
  if (state.locating) {
    if (!alone) {
      find_part(at, room);
      load_other(at, state.part, tokens);
    }
    find_token(tokens, room);
    __syncthreads();
    if (decides) next = located(at, state, alone);
  }
  if (next) go_on(at, state);
  __syncthreads();
  if (!alone && state.operation == SQUEEZE) find_offsets(at, room);
}

template <bool greedy>
__device__ __forceinline__ void first_look(const Row& at, Tokens& tokens, const Room& room) {
  if (threadIdx.x == 0) begin(at, *room.state);
  load_given(at, tokens);
  if (greedy || !at.given.distributions) return;
  double* out = at.given.distributions + (long long)at.number * at.given.vocab_size;
  for (int i = 0; i < OWN; ++i)
    if (tokens.id[i] < at.given.vocab_size) out[tokens.id[i]] = 0.0;
}

// Drop the tokens that were removed since, and store the rest for the next launch, if there is one.
__device__ __forceinline__ void bring_up_to_date(const Row& at, Tokens& tokens, const SamplingState& state, bool open) {
  if (state.applying) apply_marks(at, state, tokens);
  if (state.ordered || state.bounded) drop(state, tokens);
  const bool changed = state.applying || state.ordered || state.bounded || (at.given.is_first && !is_simple(at));
  if (open && changed) store_own(at, tokens);
}

// `greedy`: every row only needs its most likely token.
template <bool greedy>
__device__ __forceinline__ void sample_rows(const SamplingArguments& given) {
  SHARED(SamplingState, state, 1);
  SHARED(SamplingPart, result, 1);
  SHARED(double, columns, greedy ? 1 : BUCKETS * THREADS);
  SHARED(unsigned char, tallies, greedy ? 1 : BUCKETS * THREADS);
  SHARED(double, warp_sums, WARPS);
  SHARED(unsigned long long, warp_bests, WARPS);
  SHARED(int, warp_counts, WARPS);
  const int number = blockIdx.y;
  if (number >= given.table->count) return;
  const Row at{given, at_offset<SamplingRow>(given.table, given.table->rows)[number], number, (int)blockIdx.x};
  const Room room{state, result, columns, tallies, warp_sums, warp_bests, warp_counts};
  Tokens tokens;
  if (given.is_first) {
    first_look<greedy>(at, tokens, room);
  } else {
    if (given.states[number].operation == DONE) return;
    copy_state(state, given.states + number);
    load_own(at, tokens);
  }
  __syncthreads();
  bool alone = given.parts == 1;
  for (;;) {
    if constexpr (!greedy) bring_up_to_date(at, tokens, *state, !alone);
    measure<greedy>(at, tokens, room, alone);
    const bool squeezed = !alone && state->operation == SQUEEZE;
    if (!alone) {
      if (!is_last(at, room)) return;
      join(at, room);
    }
    settle<greedy>(at, tokens, room, alone);
    __syncthreads();
    if (state->operation == DONE) break;
    if (!alone && !squeezed) break;  // the next launch continues
    if (squeezed) load_list(at, state->listed, tokens);
    alone = true;
  }
  copy_state(given.states + number, state);
  if (threadIdx.x == 0) write_outcome(at, *state);
}

}  // namespace sampling
