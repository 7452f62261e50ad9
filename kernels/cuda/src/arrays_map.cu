// Elementwise functions of up to three arrays that are broadcast against each other, and copies between strides.
#include "arrays.cuh"

// Sizes and strides start with the innermost axis. An array that is broadcast along an axis has stride 0. An element
// here is a pack of `width` adjacent elements: along axis 0, strides are `width`, or 0 if one element serves the whole
// pack.
struct MapArguments {
  const void* a;
  const void* b;
  const void* c;
  void* out;
  int count;
  int axes;
  int sizes[8];
  long long a_strides[8];
  long long b_strides[8];
  long long c_strides[8];
  long long out_strides[8];
  float p[3];
};

// Each thread processes this many packs, a block's width apart. All loads are issued before the result of the first
// load is used.
constexpr int MAP_THREADS = 256, MAP_PACKS = 4;

namespace whole {
#define WHOLE(name, expression)                                          \
  struct name {                                                          \
    template <class T>                                                   \
    __device__ __forceinline__ static T of(T x, const float (&p)[3]) {  \
      (void)p;                                                           \
      return expression;                                                 \
    }                                                                    \
  }
#define WHOLE_PAIR(name, type, expression)                     \
  struct name {                                                \
    template <class T>                                         \
    __device__ __forceinline__ static type of(T a, T b) {     \
      return expression;                                       \
    }                                                          \
  }
WHOLE(copy, x);
WHOLE(abs, x < 0 ? -x : x);
WHOLE(neg, -x);
WHOLE(sign, x > 0 ? (T)1 : x < 0 ? (T)-1 : x);
WHOLE(relu, x < 0 ? (T)0 : x);
WHOLE(invert, x ? (T)0 : (T)1);
WHOLE(square, x* x);
WHOLE(truth, x != 0 ? 1 : 0);  // also true for NaN
WHOLE_PAIR(add, T, a + b);
WHOLE_PAIR(subtract, T, a - b);
WHOLE_PAIR(multiply, T, a* b);
WHOLE_PAIR(divide, T, b == 0 ? (T)0 : b == -1 ? -a : a / b);  // avoids divisions at which a CPU would trap
WHOLE_PAIR(maximum, T, a > b ? a : b);
WHOLE_PAIR(minimum, T, a < b ? a : b);
WHOLE_PAIR(equal, int, a == b);
WHOLE_PAIR(less, int, a < b);
WHOLE_PAIR(less_equal, int, a <= b);
WHOLE_PAIR(greater, int, a > b);
WHOLE_PAIR(greater_equal, int, a >= b);
WHOLE_PAIR(both, int, a && b);
WHOLE_PAIR(either, int, a || b);
WHOLE_PAIR(one, int, !a != !b);
}  // namespace whole

namespace more {
FUNCTION(ceil, ceilf(x));
FUNCTION(cos, cosf(x));
FUNCTION(floor, floorf(x));
FUNCTION(is_nan, x != x ? 1.0f : 0.0f);
FUNCTION(mish, x* tanhf(larger(x, 0.0f) + log1pf(expf(-fabsf(x)))));
FUNCTION(round, rintf(x));
FUNCTION(selu, p[1] * (x > 0.0f ? x : p[0] * expm1f(x)));
FUNCTION(sin, sinf(x));
FUNCTION(softsign, x / (1.0f + fabsf(x)));
PAIR_FUNCTION(gelu_of_sum, 0.5f * (a + b) * erfcf(-(a + b) * 0.70710678118654752f));
PAIR_FUNCTION(gelu_tanh_of_sum,
              0.5f * (a + b) * (1.0f + tanhf(0.79788456080286536f * ((a + b) + 0.044715f * (a + b) * (a + b) * (a + b)))));
}  // namespace more

struct choose {
  template <class T>
  __device__ __forceinline__ static T of(int condition, T b, T c) { return condition ? b : c; }
};
// Normalisation by given numbers: x * factor + shift.
struct scale_shift {
  __device__ __forceinline__ static float of(float x, float factor, float shift) { return fmaf(x, factor, shift); }
};

template <class T, int width>
__device__ __forceinline__ Pack<T, width> pack_of(const void* memory, long long offset, long long inner) {
  const T* from = static_cast<const T*>(memory) + offset;
  if (width == 1 || inner) return *reinterpret_cast<const Pack<T, width>*>(from);
  Pack<T, width> all;
#pragma unroll
  for (int i = 0; i < width; ++i) all.of[i] = *from;
  return all;
}

// Call each(pack) for the packs of this thread.
template <class Each>
__device__ __forceinline__ void for_packs(const MapArguments& given, const Each& each) {
#pragma unroll
  for (int i = 0; i < MAP_PACKS; ++i) {
    const unsigned pack = (blockIdx.x * MAP_PACKS + i) * MAP_THREADS + threadIdx.x;
    if (pack < (unsigned)given.count) each(pack);
  }
}

template <class F, class A, class R, int width>
__device__ __forceinline__ void map1(const MapArguments& given) {
  for_packs(given, [&](unsigned i) {
    const auto a = pack_of<A, width>(given.a, offset_of(i, given.axes, given.sizes, given.a_strides), given.a_strides[0]);
    Pack<R, width> out;
#pragma unroll
    for (int k = 0; k < width; ++k) put(out.of[k], F::of(wide(a.of[k]), given.p));
    const long long offset = offset_of(i, given.axes, given.sizes, given.out_strides);
    *reinterpret_cast<Pack<R, width>*>(static_cast<R*>(given.out) + offset) = out;
  });
}

template <class F, class A, class R, int width>
__device__ __forceinline__ void map2(const MapArguments& given) {
  for_packs(given, [&](unsigned i) {
    const auto a = pack_of<A, width>(given.a, offset_of(i, given.axes, given.sizes, given.a_strides), given.a_strides[0]);
    const auto b = pack_of<A, width>(given.b, offset_of(i, given.axes, given.sizes, given.b_strides), given.b_strides[0]);
    Pack<R, width> out;
#pragma unroll
    for (int k = 0; k < width; ++k) put(out.of[k], F::of(wide(a.of[k]), wide(b.of[k])));
    const long long offset = offset_of(i, given.axes, given.sizes, given.out_strides);
    *reinterpret_cast<Pack<R, width>*>(static_cast<R*>(given.out) + offset) = out;
  });
}

template <class F, class A, class R, int width>
__device__ __forceinline__ void map3(const MapArguments& given) {
  for_packs(given, [&](unsigned i) {
    const auto a = pack_of<A, width>(given.a, offset_of(i, given.axes, given.sizes, given.a_strides), given.a_strides[0]);
    const auto b = pack_of<R, width>(given.b, offset_of(i, given.axes, given.sizes, given.b_strides), given.b_strides[0]);
    const auto c = pack_of<R, width>(given.c, offset_of(i, given.axes, given.sizes, given.c_strides), given.c_strides[0]);
    Pack<R, width> out;
#pragma unroll
    for (int k = 0; k < width; ++k) put(out.of[k], F::of(wide(a.of[k]), wide(b.of[k]), wide(c.of[k])));
    const long long offset = offset_of(i, given.axes, given.sizes, given.out_strides);
    *reinterpret_cast<Pack<R, width>*>(static_cast<R*>(given.out) + offset) = out;
  });
}
