// out += hidden @ B.T for the rows of tiles, at up to four targets, after their matmuls.
//
// Rows without adapters are in no tile and stay unchanged. A row's adapters are added up in order, rank by rank, then
// added to the result of the matmul. So the bits of a row do not depend on the other rows of its tile.
#include "lora.cuh"

// One entry per part. first_block: the first of its blocks of columns in the grid; INT_MAX after the last part.
struct ExpandArguments {
  const int* step;
  const float* hidden[4];
  float* out[4];
  long long out_stride[4];
  int targets[4];
  int outputs[4];
  int first_block[4];
  int last_tile;
};

// A thread computes two adjacent columns of all rows of a tile: for four ranks, these columns are 16 bytes of B (in
// float16), and the bytes of adjacent threads are contiguous. Hidden values are the same for all lanes of a warp.
constexpr int EXPAND_THREADS = 128, EXPAND_COLUMNS = 2 * EXPAND_THREADS;

// Add the contribution of an adapter to the columns [column, column + 2); return false if there is none.
template <class T, int rows>
__device__ __forceinline__ bool expand_entry(
    const void* adapter, const AdapterTarget& target, const AdapterTile& tile, const float* hidden, int column,
    float (&sums)[rows][2]) {
  constexpr int UNROLLED = rows == 1 ? 4 : 1;  // 16-byte loads in flight at the same time
  const AdapterSegment* more = factor_of<AdapterSegment>(adapter, target.more);
  for (int number = 0; number < target.segments; ++number) {
    const AdapterSegment& segment = number == 0 ? target.segment : more[number - 1];
    if (column < segment.first || column >= segment.end) continue;
    const int pairs = (segment.end - segment.first + 1) / 2;
    const T* b = factor_of<T>(adapter, segment.b) + (column - segment.first) * 4;
    const float4* own = reinterpret_cast<const float4*>(hidden + segment.first_rank);
#pragma unroll UNROLLED
    for (int chunk = 0; chunk < segment.ranks / 4; ++chunk) {
      float factors[8];
      load_eight(b + (long long)chunk * pairs * 8, factors);
#pragma unroll
      for (int row = 0; row < rows; ++row) {
        const float4 four = own[min(row, tile.rows - 1) * (tile.hidden_stride / 4) + chunk];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          sums[row][i] = fmaf(four.x, factors[4 * i], sums[row][i]);
          sums[row][i] = fmaf(four.y, factors[4 * i + 1], sums[row][i]);
          sums[row][i] = fmaf(four.z, factors[4 * i + 2], sums[row][i]);
          sums[row][i] = fmaf(four.w, factors[4 * i + 3], sums[row][i]);
        }
      }
    }
    return true;
  }
  return false;
}

__device__ __forceinline__ int part_of(const ExpandArguments& given, int block) {
  int part = 0;
#pragma unroll
  for (int i = 1; i < MOST_PARTS; ++i) part += block >= given.first_block[i];
  return part;
}

template <int rows>
__device__ __forceinline__ void expand_rows(const ExpandArguments& given, const AdapterTile& tile) {
  const int part = part_of(given, blockIdx.x), outputs = given.outputs[part];
  const int column = (blockIdx.x - given.first_block[part]) * EXPAND_COLUMNS + 2 * threadIdx.x;
  if (column >= outputs) return;
  const float* hidden = given.hidden[part] + tile.first_hidden;
  float sums[rows][2] = {};
  int any = 0;
  for (int entry = 0; entry < tile.entries; ++entry) {
    const AdapterEntry own = entry_of(given.step, tile, entry);
    const AdapterTarget& target = target_of(own.adapter, given.targets[part]);
    if (target.item_bytes == 2)
      any += expand_entry<half_bits, rows>(own.adapter, target, tile, hidden + own.first, column, sums);
    else
      any += expand_entry<float, rows>(own.adapter, target, tile, hidden + own.first, column, sums);
  }
  if (!any) return;
  const long long stride = given.out_stride[part];
  const bool together = stride % 2 == 0 && column + 1 < outputs;
#pragma unroll
  for (int row = 0; row < rows; ++row) {
    if (row >= tile.rows) return;
    float* out = given.out[part] + row_of_tile(given.step, tile, row).row * stride + column;
    if (together) {
      float2* both = reinterpret_cast<float2*>(out);
      const float2 before = *both;
      *both = float2{before.x + sums[row][0], before.y + sums[row][1]};
    } else {
      out[0] += sums[row][0];
      if (column + 1 < outputs) out[1] += sums[row][1];
    }
  }
}

// Grid (blocks of 256 columns of all parts, tiles), with at least as many tiles as the step has.
__device__ __forceinline__ void expand_few(const ExpandArguments& given) {
  AdapterTile tile;
  if (!few_tile(given.step, blockIdx.y, given.last_tile, tile)) return;
  if (tile.rows == 1) expand_rows<1>(given, tile);
  else expand_rows<DECODE_TILE_ROWS>(given, tile);
}

__device__ __forceinline__ void expand_many(const ExpandArguments& given) {
  AdapterTile tile;
  if (many_tile(given.step, blockIdx.y, tile)) expand_rows<PREFILL_TILE_ROWS>(given, tile);
}
