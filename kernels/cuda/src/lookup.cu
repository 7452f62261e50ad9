// Rows of a table by ids, as float32; and rows of a value by their numbers. A block per row.
#include "weights.cuh"

struct DenseLookupArguments {
  const void* table;
  const int* ids;
  float* out;
  long long table_stride;
  long long out_stride;
  int rows;
  int width;
};

struct BlockLookupArguments {
  BlockMatrix table;
  const int* ids;
  float* out;
  long long out_stride;
  int rows;
  int width;
};

constexpr int LOOKUP_THREADS = 128;

template <class T>
__device__ __forceinline__ void lookup_dense(const DenseLookupArguments& given) {
  const T* source = static_cast<const T*>(given.table) + given.ids[blockIdx.x] * given.table_stride;
  float* out = given.out + blockIdx.x * given.out_stride;
  for (int i = threadIdx.x; i < given.width; i += LOOKUP_THREADS) out[i] = to_float(source[i]);
}

template <int bits, class Scale>
__device__ __forceinline__ void lookup_blocks(const BlockLookupArguments& given) {
  using Reader = BlockReader<bits, Scale>;
  const Reader reader{given.table};
  const int row = given.ids[blockIdx.x];
  float* out = given.out + blockIdx.x * given.out_stride;
  for (int chunk = threadIdx.x; chunk * CHUNK < given.width; chunk += LOOKUP_THREADS) {
    unsigned codes[Reader::WORDS];
    reader.read(row, chunk, codes);
    const float scale = reader.scale(row, chunk);
    const int zero = reader.zero(row, chunk), left = min(CHUNK, given.width - chunk * CHUNK);
#pragma unroll
    for (int i = 0; i < CHUNK; ++i)
      if (i < left) out[chunk * CHUNK + i] = (float)((int)Reader::code(codes, i) - zero) * scale;
  }
}
