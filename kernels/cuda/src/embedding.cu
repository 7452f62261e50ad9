// Rows of a table by ids, as float32, and rows of a value by row numbers. One block per row.
#include "weights.cuh"

struct DenseEmbeddingArguments {
  const void* table;
  const int* ids;
  float* out;
  long long table_stride;
  long long out_stride;
  int rows;
  int width;
};

struct BlockEmbeddingArguments {
  BlockMatrix table;
  const int* ids;
  float* out;
  long long out_stride;
  int rows;
  int width;
};

constexpr int EMBEDDING_THREADS = 128;

template <class T>
__device__ __forceinline__ void embed_dense(const DenseEmbeddingArguments& given) {
  const T* source = static_cast<const T*>(given.table) + given.ids[blockIdx.x] * given.table_stride;
  float* out = given.out + blockIdx.x * given.out_stride;
  for (int i = threadIdx.x; i < given.width; i += EMBEDDING_THREADS) out[i] = to_float(source[i]);
}

template <class Reader>
__device__ __forceinline__ void embed_blocks(const BlockEmbeddingArguments& given) {
  const Reader reader = Reader::of_numbers(given.table);
  const int row = given.ids[blockIdx.x];
  float* out = given.out + blockIdx.x * given.out_stride;
  for (int which = threadIdx.x; which * CHUNK < given.width; which += EMBEDDING_THREADS) {
    typename Reader::Chunk chunk;
    reader.read(row, which, chunk);
    const auto factors = reader.factors(chunk);
    const int left = given.width - which * CHUNK;
#pragma unroll
    for (int g = 0; g < CHUNK / 4; ++g) {
      float four[4];
      reader.four(chunk, factors, g, four);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (4 * g + i < left) out[which * CHUNK + 4 * g + i] = four[i];
    }
  }
}

// Columns of rows in a constant order, 1,024 per block.
struct ReorderArguments {
  const float* x;
  const int* order;
  float* out;
  long long x_stride;
  long long out_stride;
  int rows;
  int width;
};

constexpr int REORDER_THREADS = 256, REORDERED = 1024;

// Grid (width / 1,024, rows).
__device__ __forceinline__ void reorder(const ReorderArguments& given) {
  const float* x = given.x + blockIdx.y * given.x_stride;
  float* out = given.out + blockIdx.y * given.out_stride;
  const int end = min(given.width, (int)(blockIdx.x + 1) * REORDERED);
  for (int i = blockIdx.x * REORDERED + threadIdx.x; i < end; i += REORDER_THREADS) out[i] = x[given.order[i]];
}
