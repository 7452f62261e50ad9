"""Element by element functions of float32 vectors, with up to two parameters. NaNs stay NaNs.

SiLU, QuickGELU and the tanh form of GELU are one function, x * sigmoid(linear * x + cubic * x ** 3).
"""

from __future__ import annotations

import math
from typing import Any

from .. import functions
from ..functions import erfc, exp, sigmoid
from ..lazy import inline
from ..vector import absolute, maximum, minimum, nan_maximum, nan_minimum, power, round_to_half, square_root, where_less

# 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x ** 3))) = x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x ** 3))
_GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715 * _GELU_LINEAR
_LARGE = 1e30
_SQRT_HALF = math.sqrt(0.5)
# erf(x) = 2 / sqrt(pi) * (x - x ** 3 / 3 + x ** 5 / 10 - x ** 7 / 42 + ...), from the fifth coefficient down.
_ERF_SERIES = (-1.0 / 42.0, 1.0 / 10.0, -1.0 / 3.0, 1.0)
_TWO_OVER_ROOT_PI = 2.0 / math.sqrt(math.pi)
_ERFC_IS_ZERO = 15.0  # in float32, long before


@inline
def copied(x: Any, p: float, q: float) -> Any:
    """x."""
    return x


@inline
def negative(x: Any, p: float, q: float) -> Any:
    """-x."""
    return x * -1.0


@inline
def square(x: Any, p: float, q: float) -> Any:
    """x ** 2."""
    return x * x


@inline
def cube(x: Any, p: float, q: float) -> Any:
    """x ** 3."""
    return x * x * x


@inline
def magnitude(x: Any, p: float, q: float) -> Any:
    """|x|."""
    return absolute(x)


@inline
def exponential(x: Any, p: float, q: float) -> Any:
    """e ** x."""
    return exp(x)


@inline
def logarithm(x: Any, p: float, q: float) -> Any:
    """The natural logarithm."""
    return functions.log(x)


@inline
def root(x: Any, p: float, q: float) -> Any:
    """The square root."""
    return square_root(x)


@inline
def reciprocal(x: Any, p: float, q: float) -> Any:
    """1 / x."""
    return 1.0 / x


@inline
def hyperbolic_tangent(x: Any, p: float, q: float) -> Any:
    """tanh(x)."""
    return functions.tanh(x)


@inline
def error_function(x: Any, p: float, q: float) -> Any:
    """erf(x): near 0 by its Taylor series, elsewhere by 1 - erfc(|x|)."""
    size = minimum(absolute(x), _ERFC_IS_ZERO)
    far = 1.0 - erfc(size)
    square = minimum(x * x, 1.0)
    p = square * (-1.0 / 1320.0) + 1.0 / 216.0
    for coefficient in _ERF_SERIES:
        p = p * square + coefficient
    return where_less(size, 0.5, x * p * _TWO_OVER_ROOT_PI, where_less(x, 0.0, 0.0 - far, far))


@inline
def logistic(x: Any, p: float, q: float) -> Any:
    """1 / (1 + e ** -x)."""
    return sigmoid(x)


@inline
def relu(x: Any, p: float, q: float) -> Any:
    """max(x, 0)."""
    return maximum(x, 0.0)


@inline
def silu(x: Any, p: float, q: float) -> Any:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


@inline
def quick_gelu(x: Any, alpha: float, q: float) -> Any:
    """x * sigmoid(alpha * x)."""
    return x * sigmoid(x * alpha)


@inline
def gelu_tanh(x: Any, p: float, q: float) -> Any:
    """GELU by tanh (Hendrycks & Gimpel 2016)."""
    # The square is bounded, so that no 0 * infinity arises; sigmoid is 0 or 1 long before.
    return x * sigmoid(x * (minimum(x * x, _LARGE) * _GELU_CUBIC + _GELU_LINEAR))


@inline
def gelu(x: Any, p: float, q: float) -> Any:
    """0.5 x (1 + erf(x / sqrt 2)) = max(x, 0) - |x| / 2 * erfc(|x| / sqrt 2)."""
    size = minimum(absolute(x), _ERFC_IS_ZERO)
    # The last term is 0, but NaN for -infinity, as the definition has it.
    tail = size * 0.5 * erfc(size * _SQRT_HALF) - minimum(x, 0.0) * 0.0
    return maximum(x, 0.0) - tail


@inline
def softplus(x: Any, p: float, q: float) -> Any:
    """log(1 + e ** x) = max(x, 0) + log(1 + e ** -|x|)."""
    small = exp(0.0 - absolute(x))
    total = small + 1.0
    # What the sum lost by rounding comes back in the quotient (Kahan's log1p).
    lost = small - (total - 1.0)
    return maximum(x, 0.0) + (functions.log(total) + lost / total)


@inline
def clip(x: Any, low: float, high: float) -> Any:
    """min(max(x, low), high)."""
    return minimum(maximum(x, low), high)


@inline
def leaky_relu(x: Any, alpha: float, q: float) -> Any:
    """x, or alpha * x where it is negative."""
    return where_less(x, 0.0, x * alpha, x)


@inline
def elu(x: Any, alpha: float, q: float) -> Any:
    """x, or alpha * (e ** x - 1) where it is negative."""
    return where_less(x, 0.0, (exp(x) - 1.0) * alpha, x)


@inline
def hard_sigmoid(x: Any, alpha: float, beta: float) -> Any:
    """alpha * x + beta, limited to [0, 1]."""
    return minimum(maximum(x * alpha + beta, 0.0), 1.0)


@inline
def hard_swish(x: Any, p: float, q: float) -> Any:
    """x * hard_sigmoid(x) with 1 / 6 and 1 / 2."""
    return x * minimum(maximum(x * (1.0 / 6.0) + 0.5, 0.0), 1.0)


@inline
def softcap(x: Any, cap: float, q: float) -> Any:
    """cap * tanh(x / cap)."""
    return functions.tanh(x / cap) * cap


@inline
def as_float16(x: Any, p: float, q: float) -> Any:
    """The nearest float16 number."""
    return round_to_half(x)


@inline
def add(a: Any, b: Any) -> Any:
    """a + b."""
    return a + b


@inline
def subtract(a: Any, b: Any) -> Any:
    """a - b."""
    return a - b


@inline
def multiply(a: Any, b: Any) -> Any:
    """a * b."""
    return a * b


@inline
def divide(a: Any, b: Any) -> Any:
    """a / b."""
    return a / b


@inline
def smaller(a: Any, b: Any) -> Any:
    """The minimum."""
    return nan_minimum(a, b)


@inline
def larger(a: Any, b: Any) -> Any:
    """The maximum."""
    return nan_maximum(a, b)


@inline
def raised(a: Any, b: Any) -> Any:
    """a ** b."""
    return power(a, b)
