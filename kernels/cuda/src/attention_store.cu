// Queries and keys normed and rotated (Su et al. 2021); keys and values into their pages. A warp per row and head.
#include "pages.cuh"
#include "reduce.cuh"

// query, key, value: rows of a step; strides in numbers. rotated: [rows][heads * head_size]. cos, sin: [positions][pairs]; pairs = 0:
// nothing is rotated. long_rows: per row, whether it uses the second tables. q_norm, k_norm: 0 = none.
struct StoreArguments {
  const float* query;
  const float* key;
  const float* value;
  float* rotated;
  const float* q_norm;
  const float* k_norm;
  const float* cos;
  const float* sin;
  const float* long_cos;
  const float* long_sin;
  const int* long_rows;
  StepRows step;
  Pages pages;
  long long query_stride;
  long long key_stride;
  long long value_stride;
  int rows;
  int heads;
  int kv_heads;
  int head_size;
  int v_head_size;
  int pairs;
  int interleaved;
  float epsilon;
};

constexpr int STORE_WARPS = 4;

// Number `i` of a head, normed and rotated; `factor` is that of its norm.
struct Head {
  const StoreArguments& given;
  const float* x;
  const float* weight;
  float factor;
  const float* cos;
  const float* sin;

  __device__ __forceinline__ float normed(int i) const { return weight ? x[i] * factor * weight[i] : x[i]; }

  __device__ __forceinline__ float turned(int i) const {
    const int pairs = given.pairs;
    if (i >= 2 * pairs) return normed(i);
    const int pair = given.interleaved ? i / 2 : i % pairs;
    const bool second = given.interleaved ? i % 2 : i >= pairs;
    const int other = given.interleaved ? i ^ 1 : second ? i - pairs : i + pairs;
    const float a = normed(i), b = normed(other);
    return second ? a * cos[pair] + b * sin[pair] : a * cos[pair] - b * sin[pair];
  }
};

// Grid ((heads + 2 kv_heads) / 4, rows).
template <class T>
__device__ __forceinline__ void store_heads(const StoreArguments& given) {
  const int lane = threadIdx.x % WARP, head = blockIdx.x * STORE_WARPS + threadIdx.x / WARP;
  const long long row = blockIdx.y;
  const int slot = given.step.slots[row], block = slot / PAGE, offset = slot % PAGE;
  const int first_value = given.heads + given.kv_heads;
  if (head >= first_value + given.kv_heads) return;
  if (head >= first_value) {
    const int own = head - first_value;
    const float* x = given.value + row * given.value_stride + own * given.v_head_size;
    T* page = static_cast<T*>(given.pages.values) + block * given.pages.value_block;
    page += (own * PAGE + offset) * given.v_head_size;
    for (int i = lane; i < given.v_head_size; i += WARP) store(page + i, x[i]);
    return;
  }
  const bool is_query = head < given.heads;
  const int own = is_query ? head : head - given.heads;
  const float* x = is_query ? given.query + row * given.query_stride : given.key + row * given.key_stride;
  Head from{given, x + own * given.head_size, is_query ? given.q_norm : given.k_norm, 1.0f, nullptr, nullptr};
  if (from.weight) {
    float squares = 0.0f;
    for (int i = lane; i < given.head_size; i += WARP) squares = fmaf(from.x[i], from.x[i], squares);
    from.factor = 1.0f / sqrtf(warp_sum(squares) / given.head_size + given.epsilon);
  }
  if (given.pairs) {
    const bool is_long = given.long_cos && given.long_rows[row];
    const long long place = (long long)given.step.positions[row] * given.pairs;
    from.cos = (is_long ? given.long_cos : given.cos) + place;
    from.sin = (is_long ? given.long_sin : given.sin) + place;
  }
  if (is_query) {
    float* out = given.rotated + (row * given.heads + own) * given.head_size;
    for (int i = lane; i < given.head_size; i += WARP) out[i] = from.turned(i);
  } else {
    T* page = static_cast<T*>(given.pages.keys) + block * given.pages.key_block;
    page += own * given.head_size * PAGE + offset;
    for (int i = lane; i < given.head_size; i += WARP) store(page + i * PAGE, from.turned(i));
  }
}
