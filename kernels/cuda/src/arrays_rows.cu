// Functions of whole rows: reductions, softmax and normalisation; and gathers of rows by index.
//
// A row's numbers are added in the same order for any number of rows: each lane adds up every n-th number, where n is
// the number of lanes, and then the lanes' sums are combined.
#include "arrays.cuh"
#include "reduce.cuh"

constexpr int ROW_THREADS = 128;

__device__ __forceinline__ float block_maximum(float x) {
  constexpr int WARPS = ROW_THREADS / WARP;
  SHARED(float, largest, WARPS);
  x = warp_maximum(x);
  __syncthreads();  // all threads have read an earlier result
  if (threadIdx.x % WARP == 0) largest[threadIdx.x / WARP] = x;
  __syncthreads();
  float found = largest[0];
#pragma unroll
  for (int warp = 1; warp < WARPS; ++warp) found = fmaxf(found, largest[warp]);
  return found;
}

// The threads of a row: one warp for a short row, or the whole block.
template <bool block>
struct Lanes {
  static constexpr int SIZE = block ? ROW_THREADS : WARP, ROWS = ROW_THREADS / SIZE;

  __device__ __forceinline__ static int row() { return blockIdx.x * ROWS + threadIdx.x / SIZE; }
  __device__ __forceinline__ static int lane() { return threadIdx.x % SIZE; }
  __device__ __forceinline__ static float sum(float x) { return block ? block_sum<ROW_THREADS / WARP>(x) : warp_sum(x); }
  __device__ __forceinline__ static float maximum(float x) { return block ? block_maximum(x) : warp_maximum(x); }
};

// --- softmax --------------------------------------------------------------------------------------------------------

// out = softmax(scale * x + addend) over `width` numbers that are `step` apart. Row r starts at r / step * width *
// step + r % step. The addend, which may be null, is broadcast: row numbers count through `sizes`, last axis first.
struct SoftmaxArguments {
  const void* x;
  const void* addend;
  void* out;
  int rows;
  int width;
  int step;
  int sizes[8];
  long long addend_strides[8];
  long long addend_step;
  int axes;
  float scale;
  int nan_is_zero;
};

template <class T, bool block, bool logarithm>
__device__ __forceinline__ void softmax(const SoftmaxArguments& given) {
  using Own = Lanes<block>;
  const int row = min(Own::row(), given.rows - 1);  // the rest of a block repeats the last row's work
  const long long first = (long long)(row / given.step) * given.width * given.step + row % given.step;
  const T* x = static_cast<const T*>(given.x) + first;
  T* out = static_cast<T*>(given.out) + first;
  const T* addend = static_cast<const T*>(given.addend);
  if (addend) addend += offset_of(row, given.axes, given.sizes, given.addend_strides);
  auto number = [&](int i) {
    const float scaled = wide(x[(long long)i * given.step]) * given.scale;
    return addend ? scaled + wide(addend[i * given.addend_step]) : scaled;
  };
  float largest = __uint_as_float(0xff800000u);
  for (int i = Own::lane(); i < given.width; i += Own::SIZE) largest = fmaxf(largest, number(i));
  largest = Own::maximum(largest);
  float total = 0.0f;
  for (int i = Own::lane(); i < given.width; i += Own::SIZE) total += expf(number(i) - largest);
  total = Own::sum(total);
  if (Own::row() >= given.rows) return;
  const float shift = logf(total);
  for (int i = Own::lane(); i < given.width; i += Own::SIZE) {
    const float distance = number(i) - largest;
    float y = logarithm ? distance - shift : expf(distance) / total;
    if (given.nan_is_zero && y != y) y = 0.0f;
    put(out[(long long)i * given.step], y);
  }
}

// --- normalisation --------------------------------------------------------------------------------------------------

// out = (s - mean) / sqrt(variance + epsilon) * weight + bias for s = x + skip + input_bias, which is also stored. If
// rows are channels, weight and bias have one number for each of `channels`. Absent arrays are null.
struct RowNormArguments {
  const void* x;
  const void* skip;
  const void* input_bias;
  const void* weight;
  const void* bias;
  void* out;
  void* total;
  int rows;
  int width;
  int channels;
  int skip_rows;
  float epsilon;
};

template <class T, bool block, bool centred>
__device__ __forceinline__ void row_norm(const RowNormArguments& given) {
  using Own = Lanes<block>;
  const int row = min(Own::row(), given.rows - 1);
  const T* x = static_cast<const T*>(given.x) + (long long)row * given.width;
  const T* skip = given.skip ? static_cast<const T*>(given.skip) + (long long)(row % given.skip_rows) * given.width : nullptr;
  const T* input_bias = static_cast<const T*>(given.input_bias);
  auto number = [&](int i) {
    float sum = wide(x[i]);
    if (skip) sum += wide(skip[i]);
    if (input_bias) sum += wide(input_bias[i]);
    return sum;
  };
  float mean = 0.0f, squares = 0.0f;
  if (centred) {
    for (int i = Own::lane(); i < given.width; i += Own::SIZE) mean += number(i);
    mean = Own::sum(mean) / given.width;
  }
  for (int i = Own::lane(); i < given.width; i += Own::SIZE) {
    const float distance = number(i) - mean;
    squares = fmaf(distance, distance, squares);
  }
  const float factor = 1.0f / sqrtf(Own::sum(squares) / given.width + given.epsilon);
  if (Own::row() >= given.rows) return;
  T* out = static_cast<T*>(given.out) + (long long)row * given.width;
  T* total = given.total ? static_cast<T*>(given.total) + (long long)row * given.width : nullptr;
  const T* weight = static_cast<const T*>(given.weight);
  const T* bias = static_cast<const T*>(given.bias);
  for (int i = Own::lane(); i < given.width; i += Own::SIZE) {
    const float s = number(i);
    const int at = given.channels ? row % given.channels : i;
    float y = (s - mean) * factor;
    if (weight) y *= wide(weight[at]);
    if (bias) y += wide(bias[at]);
    put(out[i], y);
    if (total) put(total[i], s);
  }
}

// --- reductions -----------------------------------------------------------------------------------------------------

// One result for each index of the kept axes, over all reduced axes. Sizes and strides start with the innermost axis.
struct ReduceArguments {
  const void* x;
  void* out;
  int rows;
  int width;
  int kept_axes;
  int axes;
  int kept_sizes[8];
  long long kept_strides[8];
  int sizes[8];
  long long strides[8];
};

struct Sum {
  template <class C>
  __device__ __forceinline__ static C start() { return (C)0; }
  template <class C>
  __device__ __forceinline__ static C join(C a, C b) { return a + b; }
  template <class C>
  __device__ __forceinline__ static C result(C a, int) { return a; }
};
struct Average : Sum {
  template <class C>
  __device__ __forceinline__ static C result(C a, int width) { return a / (C)width; }
};
struct Product {
  template <class C>
  __device__ __forceinline__ static C start() { return (C)1; }
  template <class C>
  __device__ __forceinline__ static C join(C a, C b) { return a * b; }
  template <class C>
  __device__ __forceinline__ static C result(C a, int) { return a; }
};
// Rows are not empty, so the first number serves as the start value.
template <bool greatest>
struct Extreme {
  template <class C>
  __device__ __forceinline__ static C join(C a, C b) {
    return a != a ? a : b != b ? b : (greatest ? a > b : a < b) ? a : b;
  }
  template <class C>
  __device__ __forceinline__ static C result(C a, int) { return a; }
};

template <class T>
struct Wide { using type = T; };
template <>
struct Wide<half_bits> { using type = float; };

// One warp per result, for a reduced axis with adjacent elements.
template <class T, class Kind>
__device__ __forceinline__ void reduce_rows(const ReduceArguments& given) {
  using C = typename Wide<T>::type;
  const int row = min((int)(blockIdx.x * (ROW_THREADS / WARP) + threadIdx.x / WARP), given.rows - 1);
  const T* x = static_cast<const T*>(given.x) + offset_of(row, given.kept_axes, given.kept_sizes, given.kept_strides);
  const int lane = threadIdx.x % WARP;
  C found = (C)wide(x[offset_of(min(lane, given.width - 1), given.axes, given.sizes, given.strides)]);
  for (int i = lane + WARP; i < given.width; i += WARP)
    found = Kind::join(found, (C)wide(x[offset_of(i, given.axes, given.sizes, given.strides)]));
#pragma unroll
  for (int distance = WARP / 2; distance; distance /= 2) {
    const C other = __shfl_xor_sync(ALL_LANES, found, distance);
    // Lanes past the end of the row have no number.
    const bool there = (lane ^ distance) < given.width, own = lane < given.width;
    const bool low = !(lane & distance);
    if (there) found = !own ? other : low ? Kind::join(found, other) : Kind::join(other, found);
  }
  if (lane == 0 && (int)(blockIdx.x * (ROW_THREADS / WARP) + threadIdx.x / WARP) < given.rows)
    put(static_cast<T*>(given.out)[row], Kind::result(found, given.width));
}

// One thread per result otherwise, so that adjacent threads read adjacent elements.
template <class T, class Kind>
__device__ __forceinline__ void reduce_columns(const ReduceArguments& given) {
  using C = typename Wide<T>::type;
  const int row = blockIdx.x * ROW_THREADS + threadIdx.x;
  if (row >= given.rows) return;
  const T* x = static_cast<const T*>(given.x) + offset_of(row, given.kept_axes, given.kept_sizes, given.kept_strides);
  C found = (C)wide(*x);
  for (int i = 1; i < given.width; ++i)
    found = Kind::join(found, (C)wide(x[offset_of(i, given.axes, given.sizes, given.strides)]));
  put(static_cast<T*>(given.out)[row], Kind::result(found, given.width));
}

// --- rows by index --------------------------------------------------------------------------------------------------

// out[outer][index][inner] = x[outer][indices[index]][inner], with inner counted in packs. Negative indices count from
// the end. An index out of range stores `number` in `status`.
struct GatherArguments {
  const void* x;
  const void* indices;
  void* out;
  void* status;
  int count;
  int indices_count;
  int inner;
  int extent;
  int number;
};

constexpr int GATHER_THREADS = 256;

template <class T, int width, class Index>
__device__ __forceinline__ void gather(const GatherArguments& given) {
  const unsigned i = blockIdx.x * GATHER_THREADS + threadIdx.x;
  if (i >= (unsigned)given.count) return;
  const unsigned inner = i % given.inner, rest = i / given.inner;
  const unsigned index = rest % given.indices_count;
  const long long outer = rest / given.indices_count;
  long long wanted = static_cast<const Index*>(given.indices)[index];
  if (wanted < 0) wanted += given.extent;
  Pack<T, width> found{};
  if (wanted >= 0 && wanted < given.extent) {
    found = static_cast<const Pack<T, width>*>(given.x)[(outer * given.extent + wanted) * given.inner + inner];
  } else {
    *static_cast<int*>(given.status) = given.number;
  }
  static_cast<Pack<T, width>*>(given.out)[i] = found;
}

// out[batch][row][inner] = x[batch][indices[batch][row][0]][indices[batch][row][1]] ... [inner], with inner counted in
// packs.
struct GatherTuplesArguments {
  const void* x;
  const void* indices;
  void* out;
  void* status;
  int count;
  int inner;
  int rows;
  int depth;
  int extents[8];
  long long strides[8];
  long long batch;
  int number;
};

template <class T, int width, class Index>
__device__ __forceinline__ void gather_tuples(const GatherTuplesArguments& given) {
  const unsigned i = blockIdx.x * GATHER_THREADS + threadIdx.x;
  if (i >= (unsigned)given.count) return;
  const unsigned inner = i % given.inner, row = i / given.inner;
  const Index* tuple = static_cast<const Index*>(given.indices) + (long long)row * given.depth;
  long long offset = row / given.rows * given.batch + inner;
  bool inside = true;
  for (int axis = 0; axis < given.depth; ++axis) {
    long long wanted = tuple[axis];
    if (wanted < 0) wanted += given.extents[axis];
    inside = inside && wanted >= 0 && wanted < given.extents[axis];
    offset += wanted * given.strides[axis];
  }
  Pack<T, width> found{};
  if (inside) found = static_cast<const Pack<T, width>*>(given.x)[offset];
  else *static_cast<int*>(given.status) = given.number;
  static_cast<Pack<T, width>*>(given.out)[i] = found;
}

// --- padding --------------------------------------------------------------------------------------------------------

// out [sizes], innermost axis first, is x where an index minus `before` is inside `extents`, and the bits of `filler`
// elsewhere.
struct PadArguments {
  const void* x;
  void* out;
  int count;
  int axes;
  int sizes[8];
  int before[8];
  int extents[8];
  long long strides[8];
  long long filler;
};

template <class T>
__device__ __forceinline__ void pad(const PadArguments& given) {
  const unsigned i = blockIdx.x * GATHER_THREADS + threadIdx.x;
  if (i >= (unsigned)given.count) return;
  unsigned rest = i;
  long long offset = 0;
  bool inside = true;
  for (int axis = 0; axis < given.axes; ++axis) {
    const int index = (int)(rest % (unsigned)given.sizes[axis]) - given.before[axis];
    rest /= (unsigned)given.sizes[axis];
    inside = inside && index >= 0 && index < given.extents[axis];
    offset += index * given.strides[axis];
  }
  static_cast<T*>(given.out)[i] = inside ? static_cast<const T*>(given.x)[offset] : (T)given.filler;
}
