// Windows over the last two axes of images [n, channels, height, width]: pooling, and depthwise convolutions. Each
// thread computes one result. Adjacent threads read adjacent columns, and overlapping windows are read from the L1
// cache.
#include "arrays.cuh"

// `end_y`, `end_x`: rows and columns up to which a mean counts padding, if it does. bias and addend may be null.
struct WindowArguments {
  const void* x;
  const void* weight;
  const void* bias;
  const void* addend;
  void* out;
  int count;
  int channels;
  int height;
  int width;
  int size_y;
  int size_x;
  int step_y;
  int step_x;
  int distance_y;
  int distance_x;
  int pad_y;
  int pad_x;
  int out_y;
  int out_x;
  int counts_padding;
  int end_y;
  int end_x;
  float p[3];
};

constexpr int WINDOW_THREADS = 256;

struct Largest {
  float found = __uint_as_float(0xff800000u);

  __device__ __forceinline__ void take(float x) { found = larger(found, x); }
  __device__ __forceinline__ float result(int) const { return found; }
};

struct Mean {
  float found = 0.0f;

  __device__ __forceinline__ void take(float x) { found += x; }
  __device__ __forceinline__ float result(int count) const { return found / (float)count; }
};

// The window and the channel of result `i`.
struct Position {
  int plane, channel, y, x;

  __device__ __forceinline__ Position(const WindowArguments& given, unsigned i) {
    const unsigned area = (unsigned)given.out_y * given.out_x, position = i % area;
    plane = i / area, channel = plane % given.channels;
    y = (int)(position / given.out_x) * given.step_y - given.pad_y;
    x = (int)(position % given.out_x) * given.step_x - given.pad_x;
  }
};

template <class T, class Kind>
__device__ __forceinline__ void pool(const WindowArguments& given) {
  const unsigned i = blockIdx.x * WINDOW_THREADS + threadIdx.x;
  if (i >= (unsigned)given.count) return;
  const Position at(given, i);
  const T* image = static_cast<const T*>(given.x) + (long long)at.plane * given.height * given.width;
  Kind kind;
  int count = 0;
  for (int r = 0, y = at.y; r < given.size_y; ++r, y += given.distance_y)
    for (int c = 0, x = at.x; c < given.size_x; ++c, x += given.distance_x) {
      const bool inside = (unsigned)y < (unsigned)given.height && (unsigned)x < (unsigned)given.width;
      if (inside) kind.take(wide(image[(long long)y * given.width + x]));
      count += given.counts_padding ? y < given.end_y && x < given.end_x : inside;
    }
  put(static_cast<T*>(given.out)[i], kind.result(count));
}

template <class T, class F>
__device__ __forceinline__ void convolve_channels(const WindowArguments& given) {
  const unsigned i = blockIdx.x * WINDOW_THREADS + threadIdx.x;
  if (i >= (unsigned)given.count) return;
  const Position at(given, i);
  const T* image = static_cast<const T*>(given.x) + (long long)at.plane * given.height * given.width;
  const T* weight = static_cast<const T*>(given.weight) + (long long)at.channel * given.size_y * given.size_x;
  float sum = 0.0f;
  for (int r = 0, y = at.y; r < given.size_y; ++r, y += given.distance_y)
    for (int c = 0, x = at.x; c < given.size_x; ++c, x += given.distance_x)
      if ((unsigned)y < (unsigned)given.height && (unsigned)x < (unsigned)given.width)
        sum = fmaf(wide(image[(long long)y * given.width + x]), wide(weight[r * given.size_x + c]), sum);
  if (given.bias) sum += wide(static_cast<const T*>(given.bias)[at.channel]);
  if (given.addend) sum += wide(static_cast<const T*>(given.addend)[i]);
  put(static_cast<T*>(given.out)[i], F::of(sum, given.p));
}
