// Norm and rotate queries and keys (Su et al. 2021), and store keys and values in their pages, with one warp per head.
// For 4 bits, heads are also multiplied by a Hadamard matrix, which does not change the dot products of queries and
// keys.
#pragma once
#include "pages.cuh"
#include "reduce.cuh"

// Rows of queries, keys and values in the layout that matmuls write, with strides in numbers, and the operations on
// them. cos, sin: [positions][pairs]; pairs = 0: no rotation. long_rows: per row, true if it uses the second tables.
// q_norm, k_norm: null = none.
struct FreshRows {
  const float* query;
  const float* key;
  const float* value;
  const float* q_norm;
  const float* k_norm;
  const float* cos;
  const float* sin;
  const float* long_cos;
  const float* long_sin;
  const int* long_rows;
  long long query_stride;
  long long key_stride;
  long long value_stride;
  int pairs;
  int interleaved;
  float epsilon;
  int unused;
};

// Maximum number of a head's numbers per lane: i = lane + 32 j.
constexpr int MOST_NUMBERS = 8;

// The rotation of a lane's numbers, each of which is combined with another number of its head. No kernel writes the
// data that this struct reads.
struct Rotation {
  float cos[MOST_NUMBERS];
  float sin[MOST_NUMBERS];  // for the second number of a pair; negated for the first
  int pairs;
  bool interleaved;

  // From rows of the tables.
  __device__ __forceinline__ Rotation(const float* cosines, const float* sines, int pairs, bool interleaved, int size)
      : pairs(pairs), interleaved(interleaved) {
    fill(cosines, sines, size);
  }
  __device__ __forceinline__ Rotation(const FreshRows& given, const StepRows& step, long long row, int size)
      : pairs(given.pairs), interleaved(given.interleaved) {
    if (!pairs) return;
    const bool is_long = given.long_cos && given.long_rows[row];
    const long long offset = (long long)step.positions[row] * pairs;
    fill((is_long ? given.long_cos : given.cos) + offset, (is_long ? given.long_sin : given.sin) + offset, size);
  }
  __device__ __forceinline__ void fill(const float* cosines, const float* sines, int size) {
#pragma unroll
    for (int j = 0; j < MOST_NUMBERS; ++j) {
      const int i = j * WARP + threadIdx.x % WARP;
      if (i >= size || i >= 2 * pairs) continue;
      const int pair = interleaved ? i / 2 : i % pairs;
      cos[j] = cosines[pair], sin[j] = is_second(i) ? sines[pair] : -sines[pair];
    }
  }
  __device__ __forceinline__ bool is_second(int i) const { return interleaved ? i % 2 : i >= pairs; }
  __device__ __forceinline__ int other(int i) const { return interleaved ? i ^ 1 : is_second(i) ? i - pairs : i + pairs; }
};

// The numbers of a head, normalised. `factor` is the factor of the norm.
struct Head {
  const float* x;
  const float* weight;
  float factor;

  __device__ __forceinline__ float normed(int i) const { return weight ? x[i] * factor * weight[i] : x[i]; }

  // Number i = lane + 32 j, rotated.
  __device__ __forceinline__ float rotated(const Rotation& rotation, int j, int i) const {
    if (i >= 2 * rotation.pairs) return normed(i);
    const float a = normed(i), b = normed(rotation.other(i));
    return a * rotation.cos[j] + b * rotation.sin[j];
  }
};

// Multiply a head by the normalised Hadamard matrix of its size, a power of two of at least 32. The matrix is its own
// inverse.
__device__ __forceinline__ void hadamard(float (&numbers)[MOST_NUMBERS], int size) {
  const int lane = threadIdx.x % WARP;
  const float factor = 1.0f / sqrtf((float)size);
#pragma unroll
  for (int j = 0; j < MOST_NUMBERS; ++j) {
    numbers[j] *= factor;
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
      const float other = __shfl_xor_sync(ALL_LANES, numbers[j], distance);
      numbers[j] = lane & distance ? other - numbers[j] : numbers[j] + other;
    }
  }
#pragma unroll
  for (int distance = 1; distance < MOST_NUMBERS; distance *= 2) {
    if (distance * WARP >= size) break;
#pragma unroll
    for (int j = 0; j < MOST_NUMBERS; ++j) {
      if (j & distance) continue;
      const float a = numbers[j], b = numbers[j + distance];
      numbers[j] = a + b, numbers[j + distance] = a - b;
    }
  }
}

// Return the float16 scale at which the largest of the numbers in a warp's lanes is `steps` steps. The scale is NaN or
// infinite if one of the numbers is NaN or infinite.
__device__ __forceinline__ half_bits scale_of(float largest, float poison, float steps) {
  half_bits scale;
  store(&scale, warp_maximum(largest) / steps + warp_sum(poison));
  return scale;
}

__device__ __forceinline__ float steps_of(float x, half_bits scale) {
  const float factor = to_float(scale);
  return factor > 0.0f && factor - factor == 0.0f ? x / factor : 0.0f;
}

// Write a head of a token to a page. Pages of small integers have column i at byte_offset(i), and the scales follow
// the integers.
template <class T>
struct Writer {
  __device__ __forceinline__ static void write(
      const float (&numbers)[MOST_NUMBERS], int size, int, unsigned char* page, int offset, bool is_key) {
    T* out = reinterpret_cast<T*>(page) + (is_key ? offset : offset * size);
#pragma unroll
    for (int j = 0; j < MOST_NUMBERS; ++j) {
      const int i = j * WARP + threadIdx.x % WARP;
      if (i < size) store(out + (is_key ? i * PAGE : i), numbers[j]);
    }
  }
};

__device__ __forceinline__ int byte_offset(int i, int columns, int offset, bool is_key) {
  return is_key ? (i / UNIT * PAGE + offset) * UNIT + i % UNIT : (offset / UNIT * columns + i) * UNIT + offset % UNIT;
}

template <>
struct Writer<Int8> {
  __device__ __forceinline__ static void write(
      const float (&numbers)[MOST_NUMBERS], int size, int columns, unsigned char* page, int offset, bool is_key) {
    const int lane = threadIdx.x % WARP;
    float largest = 0.0f, poison = 0.0f;
#pragma unroll
    for (int j = 0; j < MOST_NUMBERS; ++j) largest = fmaxf(largest, fabsf(numbers[j])), poison += numbers[j] * 0.0f;
    const half_bits scale = scale_of(largest, poison, 127.0f);
#pragma unroll
    for (int j = 0; j < MOST_NUMBERS; ++j) {
      const int i = j * WARP + lane;
      const float whole = rintf(fminf(fmaxf(steps_of(numbers[j], scale), -127.0f), 127.0f));
      if (i < columns) page[byte_offset(i, columns, offset, is_key)] = (unsigned char)(int)whole;
    }
    if (lane == 0) reinterpret_cast<half_bits*>(page + PAGE * columns)[offset] = scale;
  }
};

template <>
struct Writer<Int4> {
  __device__ __forceinline__ static void write(
      const float (&numbers)[MOST_NUMBERS], int size, int columns, unsigned char* page, int offset, bool is_key) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int j = 0; j < MOST_NUMBERS; ++j) {
      if (j * WARP >= size) break;
      const half_bits scale = scale_of(fabsf(numbers[j]), numbers[j] * 0.0f, 7.5f);
      const int code = (int)rintf(fminf(fmaxf(steps_of(numbers[j], scale) + 7.5f, 0.0f), 15.0f));
      const int other = __shfl_xor_sync(ALL_LANES, code, 16);  // a byte holds two columns that are 16 apart
      if (lane < 16) page[byte_offset(16 * j + lane, columns, offset, is_key)] = (unsigned char)(code | other << 4);
      if (lane == 0) reinterpret_cast<half_bits*>(page + PAGE * columns)[j * PAGE + offset] = scale;
    }
  }
};

// Store a head of a row, counted over queries, keys and values: a query goes to `rotated`, times a factor, and keys
// and values go to their page. `given` holds the arguments of a kernel. `rotation` is the rotation for the row and the
// head's size (0 for values).
template <class Kind, class Arguments>
__device__ __forceinline__ void store_head(
    const Arguments& given, const Rotation& rotation, long long row, int head, float* rotated, float factor) {
  constexpr bool HADAMARD = PageFormat<Kind>::COLUMNS > UNIT;
  const int lane = threadIdx.x % WARP, first_value = given.heads + given.kv_heads;
  const int slot = given.step.slots[row], block = slot / PAGE, offset = slot % PAGE;
  float numbers[MOST_NUMBERS] = {};
  if (head >= first_value) {
    const int own = head - first_value, size = given.v_head_size;
    const float* x = given.fresh.value + row * given.fresh.value_stride + own * size;
#pragma unroll
    for (int j = 0; j < MOST_NUMBERS; ++j)
      if (j * WARP + lane < size) numbers[j] = x[j * WARP + lane];
    if (HADAMARD) hadamard(numbers, size);
    unsigned char* page = given.pages.values + block * given.pages.value_block + own * value_bytes<Kind>(size);
    Writer<Kind>::write(numbers, size, PageFormat<Kind>::value_columns(size), page, offset, false);
    return;
  }
  const bool is_query = head < given.heads;
  const int own = is_query ? head : head - given.heads, size = given.head_size;
  const FreshRows& fresh = given.fresh;
  const float* x = is_query ? fresh.query + row * fresh.query_stride : fresh.key + row * fresh.key_stride;
  Head from{x + own * size, is_query ? fresh.q_norm : fresh.k_norm, 1.0f};
  if (from.weight) {
    float squares = 0.0f;
    for (int i = lane; i < size; i += WARP) squares = fmaf(from.x[i], from.x[i], squares);
    from.factor = 1.0f / sqrtf(warp_sum(squares) / size + fresh.epsilon);
  }
#pragma unroll
  for (int j = 0; j < MOST_NUMBERS; ++j)
    if (j * WARP + lane < size) numbers[j] = from.rotated(rotation, j, j * WARP + lane);
  if (HADAMARD) hadamard(numbers, size);
  if (is_query) {
#pragma unroll
    for (int j = 0; j < MOST_NUMBERS; ++j)
      if (j * WARP + lane < size) rotated[j * WARP + lane] = numbers[j] * factor;
  } else {
    unsigned char* page = given.pages.keys + block * given.pages.key_block + own * key_bytes<Kind>(size);
    Writer<Kind>::write(numbers, size, PageFormat<Kind>::key_columns(size), page, offset, true);
  }
}
