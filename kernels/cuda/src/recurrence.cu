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

// weight: [channels][taps]. bias: [channels], or null. A state is the last (taps - 1) * dilation rows of x.
struct ConvolutionArguments {
  const float* x;
  const float* weight;
  const float* bias;
  float* out;
  float* states;
  const int* starts;
  const int* reads;
  const int* writes;
  long long x_stride;
  long long out_stride;
  long long slot_stride;
  int width;
  int taps;
  int dilation;
};

// The number of a channel in the row `index` of x, counted from the first row of the sequence; rows before that row
// come from the initial state, or are zero.
__device__ __forceinline__ float earlier(const ConvolutionArguments& given, long long begin, int slot, int index,
                                         int column) {
  if (index >= 0) return given.x[(begin + index) * given.x_stride + column];
  if (slot < 0) return 0.0f;
  const int entry = (given.taps - 1) * given.dilation + index;
  return given.states[slot * given.slot_stride + (long long)entry * given.width + column];
}

__device__ __forceinline__ void causal_convolution(const ConvolutionArguments& given) {
  const int column = blockIdx.x * RECURRENCE_THREADS + threadIdx.x, sequence = blockIdx.y;
  if (column >= given.width) return;
  const int slot = given.reads[sequence], history = (given.taps - 1) * given.dilation;
  const long long begin = given.starts[sequence], end = given.starts[sequence + 1];
  for (long long row = begin; row < end; row++) {
    const int index = (int)(row - begin);
    float total = 0.0f;
    for (int tap = 0; tap < given.taps; tap++) {
      const int back = (given.taps - 1 - tap) * given.dilation;
      total = fmaf(earlier(given, begin, slot, index - back, column), given.weight[column * given.taps + tap], total);
    }
    if (given.bias) total += given.bias[column];
    given.out[row * given.out_stride + column] = total;
    const int target = given.writes[row];
    if (target < 0) continue;
    float* state = given.states + target * given.slot_stride + column;
    for (int entry = 0; entry < history; entry++)
      state[(long long)entry * given.width] = earlier(given, begin, slot, index + 1 + entry - history, column);
  }
}

// decay and beta: null if absent. decays: decays of a head and row, 1 or `size`. betas: 1 if every head has its own beta,
// else 0. A state is [value_heads][size][v_size].
struct LinearAttentionArguments {
  const float* query;
  const float* key;
  const float* value;
  const float* decay;
  const float* beta;
  float* out;
  float* states;
  const int* starts;
  const int* reads;
  const int* writes;
  long long query_stride;
  long long key_stride;
  long long value_stride;
  long long decay_stride;
  long long beta_stride;
  long long out_stride;
  long long slot_stride;
  float scale;
  int heads;
  int key_heads;
  int value_heads;
  int size;
  int v_size;
  int decays;
  int betas;
  int blocks;
};

constexpr int LARGEST_STATE = 256, ATTENTION_THREADS = 32;

// A thread has one column of a head's state in shared memory, and sums along the column in order.
__device__ __forceinline__ void linear_attention(const LinearAttentionArguments& given) {
  const int head = blockIdx.x / given.blocks, sequence = blockIdx.y, size = given.size;
  const int column = blockIdx.x % given.blocks * ATTENTION_THREADS + threadIdx.x;
  SHARED(float, columns, LARGEST_STATE * ATTENTION_THREADS);
  if (column >= given.v_size) return;
  const int slot = given.reads[sequence], end = given.starts[sequence + 1];
  const long long inside = (long long)head * size * given.v_size + column;
  const int key_head = head * given.key_heads / given.value_heads;
  const int shared = given.heads > given.value_heads ? given.heads / given.value_heads : 1;
  float* state = columns + threadIdx.x;
  for (int i = 0; i < size; i++)
    state[i * ATTENTION_THREADS] = slot < 0 ? 0.0f : given.states[slot * given.slot_stride + inside + (long long)i * given.v_size];
  for (long long row = given.starts[sequence]; row < end; row++) {
    const float* key = given.key + row * given.key_stride + key_head * size;
    const float* decay = given.decay ? given.decay + row * given.decay_stride + head * given.decays : nullptr;
    float change = given.value[row * given.value_stride + head * given.v_size + column], known = 0.0f;
    for (int i = 0; i < size; i++) {
      float& number = state[i * ATTENTION_THREADS];
      if (decay) number *= expf(decay[given.decays > 1 ? i : 0]);
      known = fmaf(number, key[i], known);
    }
    if (given.beta) change = (change - known) * given.beta[row * given.beta_stride + head * given.betas];
    for (int i = 0; i < size; i++) state[i * ATTENTION_THREADS] = fmaf(key[i], change, state[i * ATTENTION_THREADS]);
    for (int number = 0; number < shared; number++) {
      const int reader = given.heads < given.value_heads ? head * given.heads / given.value_heads
                                                         : head * shared + number;
      const float* query = given.query + row * given.query_stride + reader * size;
      float total = 0.0f;
      for (int i = 0; i < size; i++) total = fmaf(state[i * ATTENTION_THREADS], query[i], total);
      given.out[row * given.out_stride + (head * shared + number) * given.v_size + column] = total * given.scale;
    }
    const int target = given.writes[row];
    if (target < 0) continue;
    for (int i = 0; i < size; i++)
      given.states[target * given.slot_stride + inside + (long long)i * given.v_size] = state[i * ATTENTION_THREADS];
  }
}
