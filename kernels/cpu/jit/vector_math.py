"""Elementwise functions of float32 vectors, and the names of the functions with up to two parameters.

exp follows Cephes (S. Moshier): x = k ln 2 + r with |r| <= ln 2 / 2, a polynomial in r, then the exponent k in two
steps so that results range from denormals to infinity. exp is accurate to two units in the last place. log follows the
same author: x = 2 ** e * m with m around 1, and a polynomial in m - 1. SiLU, QuickGELU and the tanh form of GELU are
one function, x * sigmoid(linear * x + cubic * x ** 3). All functions propagate NaNs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np

from . import vector
from .dsl import Helper, Intrinsic, inline
from .vector import absolute, bits_as_float32, bits_as_int32, maximum, minimum, multiply_add, reciprocal, to_float32

_SMALLEST, _SMALLEST_NORMAL = 1e-45, 1.17549435e-38
_SQRT_HALF_BITS = 0x3F3504F3
_LOWEST, _HIGHEST = -104.0, 89.5  # outside this range, exp is 0 or infinity in float32
_HIGHEST_INVERTED = 87.0  # above this, 1 / e ** x is not a normal float32
_LOG2_E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_ROUND = vector.ROUND
_BIAS = 127
_MANTISSA_BITS = 23
_ROUND_BIASED = _ROUND + _BIAS  # leaves the biased exponent in the low bits
# 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x ** 3))) = x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x ** 3))
_GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715 * _GELU_LINEAR
_LARGE = 1e30
# erf(x) / x as a polynomial in x ** 2 on [0, 0.85], fitted for the smallest relative error (6e-9), and
# log2(1 - erf(x)) on [0.85, 4], fitted for the smallest error of erf (2e-9), both from the highest coefficient down.
_ERF_NEAR = (
    -6.315153650398804e-04, 5.05109975838852e-03, -2.6802551431625195e-02, 1.1282717520990149e-01,
    -3.7612571852975946e-01, 1.1283791602365283,
)  # fmt: skip
_ERF_FAR = (
    2.921840370447428e-04, -4.482701981809572e-03, 3.243027185923383e-02, -1.5068659815777696e-01,
    -9.18422117961383e-01, -1.6273822608974102, -1.6548717754252153e-04,
)  # fmt: skip
_ERF_IS_NEAR, _ERF_IS_ONE = 0.85, 4.0
_ERFC_IS_ZERO = 15.0  # in float32, erfc is already 0 far below this
# log2(erfc(x / sqrt 2) / 2) on [0, 9], fitted for the smallest error relative to 1 + x ** 2 / 2 (5e-8), from the
# highest coefficient down. Up to 15, the polynomial falls to less than -127.
_GELU_TAIL = (
    -7.312519340052503e-11, 4.1092369507111925e-09, -1.0219243762321639e-07, 1.4773918337596115e-06,
    -1.3631696674565319e-05, 8.128808985929936e-05, -2.7531784144230187e-04, -3.677394852275029e-05,
    7.014687638729811e-03, -5.249738693237305e-02, -4.5920056104660034e-01, -1.1511064767837524, -1.0,
)  # fmt: skip
# tanh(x) / x as a quotient of polynomials in x ** 2 on [0, 9], fitted for the smallest relative error (2e-8), from the
# highest coefficients down. From 9 on, tanh is 1 in float32.
_TANH_TOP = (
    1.335480015287047e-08, 2.0609191693345976e-05, 3.4955951206176753e-03, 1.3381031623493755e-01, 1.0,
)  # fmt: skip
_TANH_BOTTOM = (
    7.77661789410746e-07, 3.285646023392316e-04, 2.5877009112562036e-02, 4.6714347219085495e-01, 1.0,
)  # fmt: skip
# Here the quotient exceeds 1 by several units in the last place, so that it is 1 after it is limited.
_TANH_IS_ONE = 9.4


@inline
def rounded(x: Any) -> Any:
    """Round numbers below 2 ** 22 to the nearest integers, ties to even."""
    return (x + _ROUND) - _ROUND


@inline
def _exp_of_remainder(x: Any, k: Any) -> Any:
    """Return e ** (x - k ln 2) - 1, where k is the integer nearest to x / ln 2."""
    r = multiply_add(k, -_LN2_LOW, multiply_add(k, -_LN2_HIGH, x))
    p = multiply_add(r, 1.9875691500e-4, 1.3981999507e-3)
    p = multiply_add(p, r, 8.3334519073e-3)
    p = multiply_add(p, r, 4.1665795894e-2)
    p = multiply_add(p, r, 1.6666665459e-1)
    p = multiply_add(p, r, 5.0000001201e-1)
    return multiply_add(p, r * r, r)


@inline
def exp(x: Any) -> Any:
    """Return e ** x."""
    x = minimum(maximum(x, _LOWEST), _HIGHEST)
    rounded = multiply_add(x, _LOG2_E, _ROUND)
    p = _exp_of_remainder(x, rounded - _ROUND) + 1.0
    return vector.times_power_of_two(p, rounded)


@inline
def normal_exp(x: Any) -> Any:
    """Return e ** x, limited to e ** -87 and e ** 87. The exponent of a normal number is added in one step."""
    x = minimum(maximum(x, -_HIGHEST_INVERTED), _HIGHEST_INVERTED)
    rounded = multiply_add(x, _LOG2_E, _ROUND_BIASED)
    p = _exp_of_remainder(x, rounded - _ROUND_BIASED) + 1.0
    return p * bits_as_float32(bits_as_int32(rounded) << _MANTISSA_BITS)


@inline
def expm1_of_negative(x: Any) -> Any:
    """Return e ** x - 1 for x <= 0, accurate also for small x."""
    x = maximum(x, -_HIGHEST_INVERTED)
    rounded = multiply_add(x, _LOG2_E, _ROUND_BIASED)
    scale = bits_as_float32(bits_as_int32(rounded) << _MANTISSA_BITS)
    return multiply_add(_exp_of_remainder(x, rounded - _ROUND_BIASED), scale, scale - 1.0)


@inline
def exp_of_negative(x: Any) -> Any:
    """Return e ** x for x <= 0, for softmax: exactly 1 at 0, exactly 0 at -89 and below, NaN for NaN."""
    return exp2_of_negative(x * _LOG2_E)


@inline
def exp2_of_negative(x: Any) -> Any:
    """Return 2 ** x for x <= 0, for softmax: exactly 1 at 0, exactly 0 at -127 and below, NaN for NaN.

    The result is a polynomial in the distance to the next integer (fitted for the smallest relative error, 9e-8), with
    the exponent added afterwards.
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
    """Like `exp2_of_negative` with a shorter polynomial (relative error 1e-4), for weights rounded to bfloat16."""
    x = maximum(x, -127.0)
    rounded = x + _ROUND_BIASED
    f = x - (rounded - _ROUND_BIASED)
    p = multiply_add(f, 5.500882e-2, 2.4221099e-1)
    p = multiply_add(p, f, 6.9328295e-1)
    p = multiply_add(p, f, 1.0)
    return p * bits_as_float32(bits_as_int32(rounded) << _MANTISSA_BITS)


@inline
def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + e ** -x), or 0 if the result is less than 2e-38."""
    value = reciprocal(normal_exp(0.0 - x) + 1.0)
    return vector.where_less(x, -_HIGHEST_INVERTED, 0.0, value)


@inline
def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent within six units in the last place; from 9.4 on, exactly 1."""
    x = minimum(maximum(x, -_TANH_IS_ONE), _TANH_IS_ONE)
    square = x * x
    p = multiply_add(square, _TANH_TOP[0], _TANH_TOP[1])
    for coefficient in _TANH_TOP[2:]:
        p = multiply_add(p, square, coefficient)
    q = multiply_add(square, _TANH_BOTTOM[0], _TANH_BOTTOM[1])
    for coefficient in _TANH_BOTTOM[2:]:
        q = multiply_add(q, square, coefficient)
    return minimum(maximum(x * p * reciprocal(q), -1.0), 1.0)


@inline
def log(x: Any) -> Any:
    """Return the natural logarithm within two units in the last place: -infinity for 0, NaN for negative numbers."""
    normal = vector.where_less(x, _SMALLEST_NORMAL, x * 8388608.0, x)
    shift = vector.where_less(x, _SMALLEST_NORMAL, -23.0, 0.0)
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
    finite = vector.where_less(x, np.inf, result, x)
    return vector.where_less(x, _SMALLEST, vector.where_less(x, 0.0, np.nan, -np.inf), finite)


@inline
def error_function(x: Any) -> Any:
    """Return erf(x) within three units in the last place: near 0 by a polynomial, elsewhere as 1 - 2 ** polynomial."""
    size = minimum(absolute(x), _ERF_IS_ONE)
    exponent = multiply_add(size, _ERF_FAR[0], _ERF_FAR[1])
    for coefficient in _ERF_FAR[2:]:
        exponent = multiply_add(exponent, size, coefficient)
    far = 1.0 - exp2_of_negative(exponent)
    square = size * size
    p = multiply_add(square, _ERF_NEAR[0], _ERF_NEAR[1])
    for coefficient in _ERF_NEAR[2:]:
        p = multiply_add(p, square, coefficient)
    return vector.where_less(size, _ERF_IS_NEAR, x * p, vector.where_less(x, 0.0, 0.0 - far, far))


@inline
def gelu_tanh(x: Any) -> Any:
    """Return GELU in its tanh form (Hendrycks & Gimpel 2016)."""
    # The square is bounded so that 0 * infinity cannot occur; sigmoid is 0 or 1 long before the bound.
    return x * sigmoid(x * (minimum(x * x, _LARGE) * _GELU_CUBIC + _GELU_LINEAR))


@inline
def gelu(x: Any) -> Any:
    """Return 0.5 x (1 + erf(x / sqrt 2)) = max(x, 0) - |x| / 2 * erfc(|x| / sqrt 2).

    The factor erfc / 2 is a power of 2, whose exponent is a polynomial, so no division is needed. The error is at most
    1.4e-7 |x|. Relative to the result, it is 4e-7 for x > -1 and grows to 4e-6 at x = -6.
    """
    size = minimum(absolute(x), _ERFC_IS_ZERO)
    exponent = size * _GELU_TAIL[0] + _GELU_TAIL[1]
    for coefficient in _GELU_TAIL[2:]:
        exponent = multiply_add(exponent, size, coefficient)
    # The last term is 0, except that it is NaN for -infinity, as in the definition.
    tail = size * exp2_of_negative(exponent) - minimum(x, 0.0) * 0.0
    return maximum(x, 0.0) - tail


@inline
def softplus(x: Any) -> Any:
    """Return log(1 + e ** x) = max(x, 0) + log(1 + e ** -|x|)."""
    small = exp(0.0 - absolute(x))
    total = small + 1.0
    # The quotient restores what the sum lost by rounding (Kahan's log1p).
    lost = small - (total - 1.0)
    return maximum(x, 0.0) + (log(total) + lost / total)


@dataclass(frozen=True)
class UnaryFunction:
    """A function of a vector and two numbers, with the names of the numbers that it uses."""

    function: Callable[..., Any]
    parameters: tuple[str, ...] = ()


def _unary(function: Callable[..., Any]) -> UnaryFunction:
    if isinstance(function, Intrinsic):
        return UnaryFunction(inline(lambda x, p, q: function(x)))
    helper: Any = function if isinstance(function, Helper) else inline(function)
    names = tuple(signature(helper.function).parameters)[1:]
    takes = (lambda x, p, q: helper(x), lambda x, p, q: helper(x, p), lambda x, p, q: helper(x, p, q))
    return UnaryFunction(inline(takes[len(names)]), names)


# Functions of a vector x and of numbers, with the parameter names that error messages use.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": absolute,
    "clip": lambda x, low, high: minimum(maximum(x, low), high),
    "copy": lambda x: x,
    "cube": lambda x: x * x * x,
    "elu": lambda x, alpha: vector.where_less(x, 0.0, expm1_of_negative(minimum(x, 0.0)) * alpha, x),
    "erf": error_function,
    "exp": exp,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "hard_sigmoid": lambda x, alpha, beta: minimum(maximum(x * alpha + beta, 0.0), 1.0),
    "hard_swish": lambda x: x * minimum(maximum(x * (1.0 / 6.0) + 0.5, 0.0), 1.0),
    "leaky_relu": lambda x, alpha: vector.where_less(x, 0.0, x * alpha, x),
    "log": log,
    "neg": lambda x: x * -1.0,
    "quick_gelu": lambda x, alpha: x * sigmoid(x * alpha),
    "reciprocal": lambda x: 1.0 / x,
    "relu": lambda x: maximum(x, 0.0),
    "relu_squared": lambda x: maximum(x, 0.0) * maximum(x, 0.0),
    "round_to_float16": vector.round_to_half,
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "softcap": lambda x, cap: tanh(x / cap) * cap,
    "softplus": softplus,
    "sqrt": vector.square_root,
    "square": lambda x: x * x,
    "tanh": tanh,
}
UNARY = {name: _unary(function) for name, function in _FUNCTIONS.items()}
BINARY: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "divide": operator.truediv,
    "maximum": vector.nan_maximum,
    "minimum": vector.nan_minimum,
    "multiply": operator.mul,
    "power": vector.power,
    "prelu": inline(lambda x, slope: vector.where_less(x, 0.0, x * slope, x)),
    "subtract": operator.sub,
}
