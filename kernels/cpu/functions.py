"""exp, 2 ** x, log, sigmoid, tanh and erfc of float32 vectors.

exp follows Cephes (S. Moshier): x = k ln 2 + r with |r| <= ln 2 / 2, a polynomial in r, then the exponent k in two
steps so that results reach from denormals to infinity. It is within two units in the last place; NaNs stay NaNs.
log is by the same author: x = 2 ** e * m with m around 1, and a polynomial in m - 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .lazy import inline
from .vector import bits_as_float32, bits_as_int32, maximum, minimum, multiply_add, reciprocal, to_float32, where_less

_LOWEST, _HIGHEST = -104.0, 89.5  # beyond these exp is 0 and infinity in float32
_HIGHEST_INVERTED = 87.0  # beyond it 1 / e ** x is no normal float32
_LOG2_E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Adding 1.5 * 2**23 rounds a float32 to an integer and leaves that integer in the low bits.
_ROUND = 12582912.0
_ROUND_BITS = 0x4B400000
_BIAS = 127
_MANTISSA_BITS = 23
_ROUND_BIASED = _ROUND + _BIAS  # leaves the biased exponent in the low bits


@inline
def exp(x: Any) -> Any:
    """e ** x."""
    x = minimum(maximum(x, _LOWEST), _HIGHEST)
    rounded = multiply_add(x, _LOG2_E, _ROUND)
    k = rounded - _ROUND
    r = multiply_add(k, -_LN2_LOW, multiply_add(k, -_LN2_HIGH, x))
    p = multiply_add(r, 1.9875691500e-4, 1.3981999507e-3)
    p = multiply_add(p, r, 8.3334519073e-3)
    p = multiply_add(p, r, 4.1665795894e-2)
    p = multiply_add(p, r, 1.6666665459e-1)
    p = multiply_add(p, r, 5.0000001201e-1)
    p = multiply_add(p, r * r, r) + 1.0
    exponent = bits_as_int32(rounded) - _ROUND_BITS
    half = exponent >> 1
    return p * _power_of_two(half) * _power_of_two(exponent - half)


@inline
def exp2_of_negative(x: Any) -> Any:
    """2 ** x of x <= 0, for softmax: exactly 1 at 0, exactly 0 from -127 on, NaN of NaN.

    A polynomial in the distance to the next integer (fitted for the least relative error, 9e-8), then the exponent.
    """
    x = maximum(x, -127.0)
    rounded = x + _ROUND_BIASED
    f = x - (rounded - _ROUND_BIASED)
    p = multiply_add(f, 1.326472753260052e-3, 9.671512709485418e-3)
    p = multiply_add(p, f, 5.550733742003888e-2)
    p = multiply_add(p, f, 2.4022242083854556e-1)
    p = multiply_add(p, f, 6.931469776002868e-1)
    p = multiply_add(p, f, 1.0)
    return p * bits_as_float32(bits_as_int32(rounded) << _MANTISSA_BITS)


@inline
def rough_exp2_of_negative(x: Any) -> Any:
    """As `exp2_of_negative`, with a shorter polynomial (relative error 1e-4): for weights rounded to bfloat16."""
    x = maximum(x, -127.0)
    rounded = x + _ROUND_BIASED
    f = x - (rounded - _ROUND_BIASED)
    p = multiply_add(f, 5.500882e-2, 2.4221099e-1)
    p = multiply_add(p, f, 6.9328295e-1)
    p = multiply_add(p, f, 1.0)
    return p * bits_as_float32(bits_as_int32(rounded) << _MANTISSA_BITS)


@inline
def _power_of_two(exponent: Any) -> Any:
    return bits_as_float32((exponent + _BIAS) << _MANTISSA_BITS)


@inline
def sigmoid(x: Any) -> Any:
    """1 / (1 + e ** -x); 0 where that is less than 2e-38."""
    value = reciprocal(exp(minimum(0.0 - x, _HIGHEST_INVERTED)) + 1.0)
    return where_less(x, -_HIGHEST_INVERTED, 0.0, value)


@inline
def tanh(x: Any) -> Any:
    """Hyperbolic tangent; as exact as float32 in absolute terms."""
    return 1.0 - reciprocal(exp(minimum(x + x, _HIGHEST_INVERTED)) + 1.0) * 2.0


_SMALLEST, _SMALLEST_NORMAL = 1e-45, 1.17549435e-38
_SQRT_HALF_BITS = 0x3F3504F3


@inline
def log(x: Any) -> Any:
    """The natural logarithm: -infinity of 0, NaN of negative numbers; within two units in the last place."""
    normal = where_less(x, _SMALLEST_NORMAL, x * 8388608.0, x)
    shift = where_less(x, _SMALLEST_NORMAL, -23.0, 0.0)
    bits = bits_as_int32(normal)
    exponent = (bits - _SQRT_HALF_BITS) >> _MANTISSA_BITS
    r = bits_as_float32(bits - (exponent << _MANTISSA_BITS)) - 1.0
    k = to_float32(exponent) + shift
    p = multiply_add(r, 7.0376836292e-2, -1.1514610310e-1)
    p = multiply_add(p, r, 1.1676998740e-1)
    p = multiply_add(p, r, -1.2420140846e-1)
    p = multiply_add(p, r, 1.4249322787e-1)
    p = multiply_add(p, r, -1.6668057665e-1)
    p = multiply_add(p, r, 2.0000714765e-1)
    p = multiply_add(p, r, -2.4999993993e-1)
    p = multiply_add(p, r, 3.3333331174e-1)
    square = r * r
    tail = multiply_add(k, _LN2_LOW, p * r * square) - square * 0.5
    result = multiply_add(k, _LN2_HIGH, r + tail)
    finite = where_less(x, np.inf, result, x)
    return where_less(x, _SMALLEST, where_less(x, 0.0, np.nan, -np.inf), finite)


@inline
def erfc(x: Any) -> Any:
    """1 - erf(x) for x >= 0, by the Chebyshev fit of Numerical Recipes (Press et al., 6.2); relative error 1.2e-7."""
    t = 1.0 / (x * 0.5 + 1.0)
    p = multiply_add(t, 0.17087277, -0.82215223)
    p = multiply_add(p, t, 1.48851587)
    p = multiply_add(p, t, -1.13520398)
    p = multiply_add(p, t, 0.27886807)
    p = multiply_add(p, t, -0.18628806)
    p = multiply_add(p, t, 0.09678418)
    p = multiply_add(p, t, 0.37409196)
    p = multiply_add(p, t, 1.00002368)
    p = multiply_add(p, t, -1.26551223)
    return t * exp(p - x * x)
