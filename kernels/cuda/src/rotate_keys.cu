// Rotate keys in their pages to other positions, in place, for contexts from which tokens in the middle were dropped.
//
// Floats are rotated in the page: a lane has four tokens of both columns of a pair, and eight lanes have a whole line
// of a page. With small integers, the columns of a token share scales, and with 4 bits the columns are also mixed, so a
// warp processes one token. Memory is accessed in units of 32 bytes, which are four columns of eight tokens: these are
// the tokens that the eight warps of a block process at a time.
#include "attention_store.cuh"

// blocks: one for each x index of the grid. cos, sin: [pairs], of the distance. keys: [block][kv_head] pages of a
// layer. key_block: bytes from one block to the next.
struct RotateKeysArguments {
  const int* blocks;
  const float* cos;
  const float* sin;
  unsigned char* keys;
  long long key_block;
  int pairs;
  int interleaved;
  int head_size;
};

constexpr int ROTATE_WARPS = 8;

// Four tokens of a column, read and written by one instruction.
template <class T>
struct alignas(UNIT * sizeof(T)) FourTokens {
  T numbers[UNIT];
};

template <class T>
__device__ __forceinline__ void rotate_floats(const RotateKeysArguments& given, unsigned char* page) {
  FourTokens<T>* const fours = reinterpret_cast<FourTokens<T>*>(page);
  for (int i = threadIdx.x; i < given.pairs * QUADS; i += ROTATE_WARPS * WARP) {
    const int pair = i / QUADS, quad = i % QUADS;
    const int column = given.interleaved ? 2 * pair : pair, other = column + (given.interleaved ? 1 : given.pairs);
    FourTokens<T> first = fours[column * QUADS + quad], second = fours[other * QUADS + quad];
    const float cos = given.cos[pair], sin = given.sin[pair];
#pragma unroll
    for (int token = 0; token < UNIT; ++token) {
      const float a = to_float(first.numbers[token]), b = to_float(second.numbers[token]);
      store(&first.numbers[token], a * cos - b * sin);
      store(&second.numbers[token], b * cos + a * sin);
    }
    fours[column * QUADS + quad] = first, fours[other * QUADS + quad] = second;
  }
}

// A token's key as numbers i = lane + 32 j, as a `Writer` has stored it.
template <class Kind>
struct Reader;

template <>
struct Reader<Int8> {
  __device__ __forceinline__ static void read(
      float (&numbers)[MOST_NUMBERS], int size, int columns, const unsigned char* page, int offset) {
    const float scale = to_float(reinterpret_cast<const half_bits*>(page + PAGE * columns)[offset]);
#pragma unroll
    for (int j = 0; j < MOST_NUMBERS; ++j) {
      const int i = j * WARP + threadIdx.x % WARP;
      numbers[j] = i < size ? (float)(signed char)page[byte_offset(i, columns, offset, true)] * scale : 0.0f;
    }
  }
};

template <>
struct Reader<Int4> {
  __device__ __forceinline__ static void read(
      float (&numbers)[MOST_NUMBERS], int size, int columns, const unsigned char* page, int offset) {
    const int lane = threadIdx.x % WARP;
    const half_bits* scales = reinterpret_cast<const half_bits*>(page + PAGE * columns);
#pragma unroll
    for (int j = 0; j < MOST_NUMBERS; ++j) {
      numbers[j] = 0.0f;
      if (j * WARP >= size) continue;
      const int two = page[byte_offset(16 * j + lane % 16, columns, offset, true)];
      numbers[j] = ((float)(two >> lane / 16 * 4 & 15) - 7.5f) * to_float(scales[j * PAGE + offset]);
    }
    hadamard(numbers, size);
  }
};

template <class Kind>
__device__ __forceinline__ void rotate_integers(const RotateKeysArguments& given, unsigned char* page) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, size = given.head_size;
  const int columns = PageFormat<Kind>::key_columns(size);
  const Rotation rotation(given.cos, given.sin, given.pairs, given.interleaved, size);
  SHARED(float, heads, ROTATE_WARPS * MOST_NUMBERS * WARP);
  float* const head = heads + warp * MOST_NUMBERS * WARP;  // memory through which lanes read each other's numbers
  for (int offset = warp; offset < PAGE; offset += ROTATE_WARPS) {
    float numbers[MOST_NUMBERS];
    Reader<Kind>::read(numbers, size, columns, page, offset);
#pragma unroll
    for (int j = 0; j < MOST_NUMBERS; ++j) head[j * WARP + lane] = numbers[j];
    __syncwarp();  // the page has also been read
    const Head from{head, nullptr, 1.0f};
#pragma unroll
    for (int j = 0; j < MOST_NUMBERS; ++j)
      if (j * WARP + lane < size) numbers[j] = from.rotated(rotation, j, j * WARP + lane);
    if (PageFormat<Kind>::COLUMNS > UNIT) hadamard(numbers, size);
    Writer<Kind>::write(numbers, size, columns, page, offset, true);
    __syncwarp();
  }
}

// Grid (blocks, kv_heads).
template <class Kind>
__device__ __forceinline__ void rotate_keys(const RotateKeysArguments& given) {
  unsigned char* const pages = given.keys + given.blocks[blockIdx.x] * given.key_block;
  unsigned char* const page = pages + (long long)blockIdx.y * key_bytes<Kind>(given.head_size);
  if constexpr (PageFormat<Kind>::PACKED) rotate_integers<Kind>(given, page);
  else rotate_floats<Kind>(given, page);
}
