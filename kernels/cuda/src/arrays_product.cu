// Matmuls of float matrices with any strides and batches, and convolutions as matmuls by the windows of images: out =
// function(alpha * a b + beta * bias + addend). float32 is multiplied directly, float16 by tensor cores. Sums are
// float32 and are computed over k in order, in one chain, so that a row's result does not depend on the number of rows.
#include "arrays.cuh"

// a is [rows][k] and b is [k][columns]; each has one stride of 1. Batches have three axes. Bias and addend may be null;
// the addend has the layout of out. `a_packs`, `b_packs`, `out_packs`: true if rows start at multiples of 16 bytes. For
// windows, column c is position c % positions of image c / positions, and `taps` holds three numbers for each k: the
// offset from the window's corner, and the row and column relative to the corner.
struct ArrayProductArguments {
  const void* a;
  const void* b;
  const void* bias;
  const void* addend;
  void* out;
  long long a_row;
  long long a_k;
  long long b_k;
  long long b_column;
  long long bias_row;
  long long bias_column;
  long long out_row;
  int rows;
  int columns;
  int k;
  int batches[3];
  long long a_batch[3];
  long long b_batch[3];
  long long bias_batch[3];
  long long out_batch[3];
  float alpha;
  float beta;
  float p[3];
  int a_packs;
  int b_packs;
  int out_packs;
  const int* taps;
  long long image;
  long long out_image;
  int positions;
  int out_width;
  int height;
  int width;
  int step_y;
  int step_x;
  int pad_y;
  int pad_x;
};

// Layouts of an operand: adjacent elements along k, adjacent elements across its lines (rows of a, columns of b), or
// windows of an image.
constexpr int ALONG_K = 0, ALONG_LINES = 1, WINDOWS = 2;

// The offsets of this batch.
struct BatchOffsets {
  long long a = 0, b = 0, bias = 0, out = 0;

  __device__ __forceinline__ explicit BatchOffsets(const ArrayProductArguments& given) {
    int rest = blockIdx.z;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      const int i = rest % given.batches[axis];
      rest /= given.batches[axis];
      a += i * given.a_batch[axis], b += i * given.b_batch[axis];
      bias += i * given.bias_batch[axis], out += i * given.out_batch[axis];
    }
  }
};

// The window of one column. Its corner may lie outside the image.
struct Corner {
  long long offset;
  int y, x;
  bool there;

  __device__ __forceinline__ Corner(const ArrayProductArguments& given, int column) {
    const int image = column / given.positions, position = column % given.positions;
    y = position / given.out_width * given.step_y - given.pad_y;
    x = position % given.out_width * given.step_x - given.pad_x;
    offset = image * given.image + (long long)y * given.width + x;
    there = column < given.columns;
  }
  template <class T>
  __device__ __forceinline__ T read(const ArrayProductArguments& given, const T* image, int k) const {
    if (k >= given.k || !there) return T{};
    const int* tap = given.taps + 3 * k;
    const bool inside = (unsigned)(y + tap[1]) < (unsigned)given.height && (unsigned)(x + tap[2]) < (unsigned)given.width;
    return inside ? image[offset + tap[0]] : T{};
  }
};

// `count` adjacent elements of a line, starting at `first`, with zeros from `end` onwards.
template <class T, int count>
__device__ __forceinline__ Pack<T, count> neighbours(const T* memory, int first, int end, bool packs, bool there) {
  if (packs && there && first + count <= end) return *reinterpret_cast<const Pack<T, count>*>(memory + first);
  Pack<T, count> found;
#pragma unroll
  for (int i = 0; i < count; ++i) found.of[i] = there && first + i < end ? memory[first + i] : T{};
  return found;
}

template <class F, class T>
__device__ __forceinline__ float finished(const ArrayProductArguments& given, const BatchOffsets& at, int row, int column,
                                          long long offset, float sum) {
  float y = given.alpha * sum;
  if (given.bias) {
    const T* bias = static_cast<const T*>(given.bias) + at.bias;
    y += given.beta * wide(bias[row * given.bias_row + column * given.bias_column]);
  }
  if (given.addend) y += wide(static_cast<const T*>(given.addend)[offset]);
  return F::of(y, given.p);
}

template <int b_layout>
__device__ __forceinline__ long long out_offset(const ArrayProductArguments& given, const BatchOffsets& at, int row,
                                                int column) {
  const long long offset = at.out + row * given.out_row;
  if (b_layout != WINDOWS) return offset + column;
  return offset + column / given.positions * given.out_image + column % given.positions;
}

// --- float32 --------------------------------------------------------------------------------------------------------

// Each group of 256 threads computes a tile of out, 16 k at a time. Each thread computes a part of 4 rows by 4 columns,
// or four such parts. In shared memory, lines of the same k are adjacent, so that a warp reads them without bank
// conflicts, 16 bytes per lane.
constexpr int FLOAT_THREADS = 256, FLOAT_K = 16;

// The elements of an operand that a thread reads for one step: `tile` lines by 16 k, divided among 256 threads.
template <int tile, int layout>
struct FloatPart {
  static constexpr int PACKS = tile / 64, PITCH = tile + 4;
  float kept[tile / 16];

  __device__ __forceinline__ void fetch(const float* memory, long long line_stride, long long k_stride, int first_line,
                                        int lines, int first_k, int end_k, bool packs) {
#pragma unroll
    for (int pack = 0; pack < PACKS; ++pack) {
      const int i = pack * FLOAT_THREADS + threadIdx.x;
      Pack<float, 4> found;
      if (layout == ALONG_K) {
        const int line = first_line + i / 2 % tile, k = first_k + 4 * (i % 2 + i / (2 * tile) * 2);
        found = neighbours<float, 4>(memory + line * line_stride, k, end_k, packs, line < lines);
      } else {
        const int k = first_k + i / (tile / 4), line = first_line + i % (tile / 4) * 4;
        found = neighbours<float, 4>(memory + k * k_stride, line, lines, packs, k < end_k);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) kept[4 * pack + j] = found.of[j];
    }
  }
  __device__ __forceinline__ void leave(float* shared) const {
#pragma unroll
    for (int pack = 0; pack < PACKS; ++pack) {
      const int i = pack * FLOAT_THREADS + threadIdx.x;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (layout == ALONG_K) shared[(4 * (i % 2 + i / (2 * tile) * 2) + j) * PITCH + i / 2 % tile] = kept[4 * pack + j];
        else shared[i / (tile / 4) * PITCH + i % (tile / 4) * 4 + j] = kept[4 * pack + j];
      }
    }
  }
  // Windows: each thread has one column, and every (256 / tile)-th k.
  __device__ __forceinline__ void gather(const ArrayProductArguments& given, const float* images, const Corner& corner,
                                         int first_k) {
#pragma unroll
    for (int i = 0; i < tile / 16; ++i)
      kept[i] = corner.read(given, images, first_k + (i * FLOAT_THREADS + threadIdx.x) / tile);
  }
  __device__ __forceinline__ void leave_windows(float* shared) const {
#pragma unroll
    for (int i = 0; i < tile / 16; ++i)
      shared[(i * FLOAT_THREADS + threadIdx.x) / tile * PITCH + threadIdx.x % tile] = kept[i];
  }
};

// Grid (columns / tile, rows / tile, batches).
template <class F, int tile, int a_layout, int b_layout>
__device__ __forceinline__ void float_product(const ArrayProductArguments& given) {
  using Left = FloatPart<tile, a_layout>;
  using Right = FloatPart<tile, b_layout>;
  constexpr int PARTS = tile / 64, SIZE = FLOAT_K * Left::PITCH;
  SHARED(float, left, 2 * SIZE);
  SHARED(float, right, 2 * SIZE);
  const BatchOffsets at(given);
  const float* a = static_cast<const float*>(given.a) + at.a;
  const float* b = static_cast<const float*>(given.b) + at.b;
  const int first_row = blockIdx.y * tile, first_column = blockIdx.x * tile;
  const int y = threadIdx.x / 16 * 4, x = threadIdx.x % 16 * 4;
  const Corner corner(given, first_column + (int)threadIdx.x % tile);
  Left own_a;
  Right own_b;
  auto fetch = [&](int k) {
    own_a.fetch(a, given.a_row, given.a_k, first_row, given.rows, k, given.k, given.a_packs);
    if (b_layout == WINDOWS) own_b.gather(given, b, corner, k);
    else own_b.fetch(b, given.b_column, given.b_k, first_column, given.columns, k, given.k, given.b_packs);
  };
  float sums[PARTS * 4][PARTS * 4] = {};
  fetch(0);
  int half = 0;
  for (int k = 0; k < given.k; k += FLOAT_K, half ^= 1) {
    own_a.leave(left + half * SIZE);
    if (b_layout == WINDOWS) own_b.leave_windows(right + half * SIZE);
    else own_b.leave(right + half * SIZE);
    __syncthreads();  // this step's tiles are complete, and all threads have read those of the step before last
    if (k + FLOAT_K < given.k) fetch(k + FLOAT_K);
#pragma unroll 2  // a larger factor would hold more tiles in registers, which limit the number of blocks
    for (int step = 0; step < FLOAT_K; ++step) {
      float rows[PARTS * 4], columns[PARTS * 4];
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const auto here = *reinterpret_cast<const Pack<float, 4>*>(left + half * SIZE + step * Left::PITCH + part * 64 + y);
        const auto there = *reinterpret_cast<const Pack<float, 4>*>(right + half * SIZE + step * Left::PITCH + part * 64 + x);
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[4 * part + i] = here.of[i], columns[4 * part + i] = there.of[i];
      }
#pragma unroll
      for (int i = 0; i < PARTS * 4; ++i)
#pragma unroll
        for (int j = 0; j < PARTS * 4; ++j) sums[i][j] = fmaf(rows[i], columns[j], sums[i][j]);
    }
  }
  float* out = static_cast<float*>(given.out);
#pragma unroll
  for (int i = 0; i < PARTS * 4; ++i) {
    const int row = first_row + i / 4 * 64 + y + i % 4;
    if (row >= given.rows) continue;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int column = first_column + part * 64 + x;
      Pack<float, 4> made;
      if (b_layout != WINDOWS && given.out_packs && column + 4 <= given.columns) {
        const long long offset = out_offset<b_layout>(given, at, row, column);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          made.of[j] = finished<F, float>(given, at, row, column + j, offset + j, sums[i][4 * part + j]);
        *reinterpret_cast<Pack<float, 4>*>(out + offset) = made;
        continue;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (column + j >= given.columns) continue;
        const long long offset = out_offset<b_layout>(given, at, row, column + j);
        out[offset] = finished<F, float>(given, at, row, column + j, offset, sums[i][4 * part + j]);
      }
    }
  }
}

// --- halves by tensor cores -----------------------------------------------------------------------------------------

// A block computes `tile` rows by `tile` columns, 32 k at a time: with 4 warps for a tile of 64 and 8 warps for a tile
// of 128. Each warp computes 32 or 64 rows by 32 columns. In shared memory, lines of 32 halves are 80 bytes apart: the
// elements that a warp reads at once for a tensor core tile lie in different banks.
constexpr int HALF_K = 32, HALF_PITCH = 20;

template <int tile, int layout>
struct HalfPart {
  static constexpr int THREADS = 2 * tile;
  unsigned kept[8];

  __device__ __forceinline__ static unsigned pair(half_bits low, half_bits high) {
    return low.bits | (unsigned)high.bits << 16;
  }
  // Along k, a thread has two packs of 8 k. Along lines, it has two k of 8 lines.
  __device__ __forceinline__ void fetch(const half_bits* memory, long long line_stride, long long k_stride,
                                        int first_line, int lines, int first_k, int end_k, bool packs) {
    if (layout == ALONG_K) {
#pragma unroll
      for (int pack = 0; pack < 2; ++pack) {
        const int i = pack * THREADS + threadIdx.x, line = first_line + i / 4, k = first_k + i % 4 * 8;
        const auto found = neighbours<half_bits, 8>(memory + line * line_stride, k, end_k, packs, line < lines);
#pragma unroll
        for (int j = 0; j < 4; ++j) kept[4 * pack + j] = pair(found.of[2 * j], found.of[2 * j + 1]);
      }
    } else {
      const int k = first_k + threadIdx.x % 16 * 2, line = first_line + threadIdx.x / 16 * 8;
      const auto low = neighbours<half_bits, 8>(memory + k * k_stride, line, lines, packs, k < end_k);
      const auto high = neighbours<half_bits, 8>(memory + (k + 1) * k_stride, line, lines, packs, k + 1 < end_k);
#pragma unroll
      for (int j = 0; j < 8; ++j) kept[j] = pair(low.of[j], high.of[j]);
    }
  }
  __device__ __forceinline__ void leave(unsigned* shared) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int i = j / 4 * THREADS + threadIdx.x;
      if (layout == ALONG_K) shared[i / 4 * HALF_PITCH + i % 4 * 4 + j % 4] = kept[j];
      else shared[(threadIdx.x / 16 * 8 + j) * HALF_PITCH + threadIdx.x % 16] = kept[j];
    }
  }
  // Windows: each thread has one column, and every other pair of k.
  __device__ __forceinline__ void gather(const ArrayProductArguments& given, const half_bits* images,
                                         const Corner& corner, int first_k) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int k = first_k + 2 * (2 * i + (int)threadIdx.x / tile);
      kept[i] = pair(corner.read(given, images, k), corner.read(given, images, k + 1));
    }
  }
  __device__ __forceinline__ void leave_windows(unsigned* shared) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) shared[threadIdx.x % tile * HALF_PITCH + 2 * i + threadIdx.x / tile] = kept[i];
  }
};

// Grid (columns / tile, rows / tile, batches).
template <class F, int tile, int a_layout, int b_layout>
__device__ __forceinline__ void half_product(const ArrayProductArguments& given) {
  constexpr int SIZE = tile * HALF_PITCH, ROWS = tile / 32;  // 16-row tiles of a warp
  SHARED(unsigned, left, 2 * SIZE);
  SHARED(unsigned, right, 2 * SIZE);
  const BatchOffsets at(given);
  const half_bits* a = static_cast<const half_bits*>(given.a) + at.a;
  const half_bits* b = static_cast<const half_bits*>(given.b) + at.b;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4, member = lane % 4;
  const int first_row = blockIdx.y * tile, first_column = blockIdx.x * tile;
  const int row_of_warp = warp % 2 * 16 * ROWS, column_of_warp = warp / 2 * 32;
  const Corner corner(given, first_column + (int)threadIdx.x % tile);
  HalfPart<tile, a_layout> own_a;
  HalfPart<tile, b_layout> own_b;
  auto fetch = [&](int k) {
    own_a.fetch(a, given.a_row, given.a_k, first_row, given.rows, k, given.k, given.a_packs);
    if (b_layout == WINDOWS) own_b.gather(given, b, corner, k);
    else own_b.fetch(b, given.b_column, given.b_k, first_column, given.columns, k, given.k, given.b_packs);
  };
  float sums[ROWS][4][4] = {};
  fetch(0);
  int half = 0;
  for (int k = 0; k < given.k; k += HALF_K, half ^= 1) {
    own_a.leave(left + half * SIZE);
    if (b_layout == WINDOWS) own_b.leave_windows(right + half * SIZE);
    else own_b.leave(right + half * SIZE);
    __syncthreads();  // this step's tiles are complete, and all threads have read those of the step before last
    if (k + HALF_K < given.k) fetch(k + HALF_K);
    const unsigned* rows = left + half * SIZE + (row_of_warp + group) * HALF_PITCH + member;
    const unsigned* columns = right + half * SIZE + (column_of_warp + group) * HALF_PITCH + member;
#pragma unroll 1
    for (int step = 0; step < HALF_K / 2; step += 8) {
      unsigned of_a[ROWS][4], of_b[4][2];
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const unsigned* from = rows + i * 16 * HALF_PITCH + step;
        of_a[i][0] = from[0], of_a[i][1] = from[8 * HALF_PITCH];
        of_a[i][2] = from[4], of_a[i][3] = from[8 * HALF_PITCH + 4];
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        of_b[j][0] = columns[j * 8 * HALF_PITCH + step], of_b[j][1] = columns[j * 8 * HALF_PITCH + step + 4];
      }
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply_half_tiles(sums[i][j], of_a[i], of_b[j]);
    }
  }
  half_bits* out = static_cast<half_bits*>(given.out);
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int row = first_row + row_of_warp + i * 16 + group + part / 2 * 8;
        const int column = first_column + column_of_warp + j * 8 + 2 * member + part % 2;
        if (row >= given.rows || column >= given.columns) continue;
        const long long to = out_offset<b_layout>(given, at, row, column);
        store(out + to, finished<F, half_bits>(given, at, row, column, to, sums[i][j][part]));
      }
}
