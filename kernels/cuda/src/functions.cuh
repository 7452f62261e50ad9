// The functions of numbers that ops name. p: their parameters.
#pragma once
#include "portable.cuh"

#define FUNCTION(name, expression)                                              \
  struct name {                                                                 \
    __device__ __forceinline__ static float of(float x, const float (&p)[3]) { \
      (void)p;                                                                  \
      return expression;                                                        \
    }                                                                           \
  }
#define PAIR_FUNCTION(name, expression) \
  struct name {                         \
    __device__ __forceinline__ static float of(float a, float b) { return expression; } \
  }

// As in NumPy, NaN is propagated if either number is NaN.
__device__ __forceinline__ float smaller(float a, float b) { return a != a || a < b ? a : b; }
__device__ __forceinline__ float larger(float a, float b) { return a != a || a > b ? a : b; }
__device__ __forceinline__ float rounded_to_half(float x) {
  half_bits half;
  store(&half, x);
  return to_float(half);
}

namespace unary {
FUNCTION(abs, fabsf(x));
FUNCTION(clip, smaller(larger(x, p[0]), p[1]));
FUNCTION(copy, x);
FUNCTION(cube, x* x* x);
FUNCTION(elu, x < 0.0f ? p[0] * expm1f(x) : x);
FUNCTION(erf, erff(x));
FUNCTION(exp, expf(x));
FUNCTION(gelu, 0.5f * x * erfcf(-x * 0.70710678118654752f));
FUNCTION(gelu_tanh, 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x))));
FUNCTION(hard_sigmoid, smaller(larger(p[0] * x + p[1], 0.0f), 1.0f));
FUNCTION(hard_swish, x* smaller(larger(x / 6.0f + 0.5f, 0.0f), 1.0f));
FUNCTION(leaky_relu, x < 0.0f ? p[0] * x : x);
FUNCTION(log, logf(x));
FUNCTION(neg, -x);
FUNCTION(quick_gelu, x / (1.0f + expf(-p[0] * x)));
FUNCTION(reciprocal, 1.0f / x);
FUNCTION(relu, larger(x, 0.0f));
FUNCTION(relu_squared, larger(x, 0.0f) * larger(x, 0.0f));
FUNCTION(round_to_float16, rounded_to_half(x));
FUNCTION(sigmoid, 1.0f / (1.0f + expf(-x)));
FUNCTION(silu, x / (1.0f + expf(-x)));
FUNCTION(softcap, p[0] * tanhf(x / p[0]));
FUNCTION(softplus, larger(x, 0.0f) + log1pf(expf(-fabsf(x))));
FUNCTION(sqrt, sqrtf(x));
FUNCTION(square, x* x);
FUNCTION(tanh, tanhf(x));
}  // namespace unary

namespace binary {
PAIR_FUNCTION(add, a + b);
PAIR_FUNCTION(divide, a / b);
PAIR_FUNCTION(maximum, larger(a, b));
PAIR_FUNCTION(minimum, smaller(a, b));
PAIR_FUNCTION(multiply, a* b);
PAIR_FUNCTION(power, powf(a, b));
PAIR_FUNCTION(prelu, a < 0.0f ? a * b : a);
PAIR_FUNCTION(subtract, a - b);
}  // namespace binary
