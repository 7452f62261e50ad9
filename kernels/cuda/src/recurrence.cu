// Recurrent layers: the rows of a sequence change its state one after another. A thread has one column of a sequence.
#include "portable.cuh"

// states: [slots], `slot_stride` numbers apart. reads: per sequence, the slot of its initial state; writes: per row,
// the slot in which the state after the row is stored; -1 = none. The rows of a sequence are starts[sequence] to
// starts[sequence + 1].
struct RecurrenceArguments {
  const float* x;
  const float* decay;
  float* out;
  float* states;
  const int* starts;
  const int* reads;
  const int* writes;
  long long x_stride;
  long long decay_stride;
  long long out_stride;
  long long slot_stride;
  int width;
};

constexpr int RECURRENCE_THREADS = 128;

// The multiply-add is explicitly fused, so that the rounding does not depend on the compiler.
__device__ __forceinline__ void linear_recurrence(const RecurrenceArguments& given) {
  const int column = blockIdx.x * RECURRENCE_THREADS + threadIdx.x, sequence = blockIdx.y;
  if (column >= given.width) return;
  const int slot = given.reads[sequence], end = given.starts[sequence + 1];
  float state = slot < 0 ? 0.0f : given.states[slot * given.slot_stride + column];
  for (long long row = given.starts[sequence]; row < end; row++) {
    state = fmaf(given.decay[row * given.decay_stride + column], state, given.x[row * given.x_stride + column]);
    given.out[row * given.out_stride + column] = state;
    const int target = given.writes[row];
    if (target >= 0) given.states[target * given.slot_stride + column] = state;
  }
}
