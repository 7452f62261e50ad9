// Store keys and values in their pages, and queries for attention, with one warp per row and head; and undo the
// Hadamard transform of heads.
#include "attention_store.cuh"

// rotated: [rows][heads * head_size].
struct StoreArguments {
  FreshRows fresh;
  float* rotated;
  StepRows step;
  Pages pages;
  int rows;
  int heads;
  int kv_heads;
  int head_size;
  int v_head_size;
};

constexpr int STORE_WARPS = 4;

// Grid ((heads + 2 kv_heads) / 4, rows).
template <class Kind>
__device__ __forceinline__ void store_heads(const StoreArguments& given) {
  const int head = blockIdx.x * STORE_WARPS + threadIdx.x / WARP, first_value = given.heads + given.kv_heads;
  const long long row = blockIdx.y;
  const Rotation rotation(given.fresh, given.step, row, head < first_value ? given.head_size : 0);
  wait_for_earlier();
  if (head >= first_value + given.kv_heads) return;
  float* rotated = given.rotated + (row * given.heads + head) * given.head_size;
  store_head<Kind>(given, rotation, row, head, rotated, 1.0f);
}

// out: rows of heads, which are Hadamard transforms if they are sums of 4-bit values.
struct HadamardArguments {
  float* out;
  long long out_stride;
  int rows;
  int heads;
  int v_head_size;
};

// Grid (heads / 4, rows).
__device__ __forceinline__ void hadamard_back(const HadamardArguments& given) {
  const int head = blockIdx.x * STORE_WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP, size = given.v_head_size;
  if (head >= given.heads) return;
  float* out = given.out + blockIdx.y * given.out_stride + head * size;
  float numbers[MOST_NUMBERS] = {};
#pragma unroll
  for (int j = 0; j < MOST_NUMBERS; ++j)
    if (j * WARP < size) numbers[j] = out[j * WARP + lane];
  hadamard(numbers, size);
  Writer<float>::write(numbers, size, 0, reinterpret_cast<unsigned char*>(out), 0, false);
}
