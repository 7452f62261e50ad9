"""Functions of every number: against float64 NumPy, on odd widths, in place, in parts of wider rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from genai.kernels.cpu.rowwise.layout import PIECE
from genai.kernels.cpu.rowwise.unary import UNARY, unary
from genai.kernels.cpu.tape.context import Word
from genai.kernels.cpu.tape.program import Rows

Wide = np.ndarray
_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Wide) -> Wide:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def _gelu_tanh(x: Wide) -> Wide:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# name -> (parameters, definition in float64, relative and absolute tolerance)
CASES: dict[str, tuple[tuple[float, ...], Callable[[Wide], Wide], float, float]] = {
    "abs": ((), np.abs, 0, 0),
    "clip": ((-0.5, 7.0), lambda x: np.clip(x, -0.5, 7.0), 0, 0),
    "copy": ((), lambda x: x, 0, 0),
    "cube": ((), lambda x: x**3, 3e-7, 1e-44),
    "elu": ((1.5,), lambda x: np.where(x < 0, 1.5 * np.expm1(x), x), 1e-6, 3e-7),
    "erf": ((), _erf, 1e-6, 3e-7),
    "exp": ((), np.exp, 1e-6, 2e-45),
    "gelu": ((), lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))), 3e-6, 3e-7),
    "gelu_tanh": ((), _gelu_tanh, 3e-6, 3e-7),
    "hard_sigmoid": ((0.2, 0.5), lambda x: np.clip(0.2 * x + 0.5, 0, 1), 1e-6, 1e-7),
    "hard_swish": ((), lambda x: x * np.clip(x / 6 + 0.5, 0, 1), 1e-6, 5e-7),
    "leaky_relu": ((0.01,), lambda x: np.where(x < 0, np.float32(0.01) * x, x), 1e-6, 1e-45),
    "log": ((), np.log, 5e-7, 1e-7),
    "neg": ((), np.negative, 0, 0),
    "quick_gelu": ((1.702,), lambda x: x * _sigmoid(1.702 * x), 3e-6, 1e-6),
    "reciprocal": ((), lambda x: 1 / x, 1e-7, 1e-45),
    "relu": ((), lambda x: np.maximum(x, 0), 0, 0),
    "round_to_float16": ((), lambda x: x.astype(np.float32).astype(np.float16).astype(np.float64), 0, 0),
    "sigmoid": ((), _sigmoid, 1e-6, 2e-38),
    "silu": ((), lambda x: x * _sigmoid(x), 3e-6, 2e-36),
    "softcap": ((30.0,), lambda x: 30 * np.tanh(x / 30), 1e-6, 1e-5),
    "softplus": ((), lambda x: np.logaddexp(0, x), 1e-6, 2e-45),
    "sqrt": ((), np.sqrt, 1e-7, 1e-45),
    "square": ((), np.square, 1e-7, 1e-45),
    "tanh": ((), np.tanh, 1e-6, 3e-7),
}


def test_every_function_has_a_definition() -> None:
    assert CASES.keys() == UNARY.keys()


@pytest.mark.parametrize("name", CASES)
@np.errstate(all="ignore")
def test_function(name: str, walk: Callable[..., list[np.ndarray]], hard_numbers: np.ndarray) -> None:
    parameters, definition, rtol, atol = CASES[name]
    x = hard_numbers.reshape(-1, 63)
    expected = definition(x.astype(np.float64)).astype(np.float32)
    _, out = walk(lambda x, out: unary(name, Rows.of(x), Rows.of(out), *parameters), x, np.full_like(x, 7))
    np.testing.assert_allclose(out, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 31, 896, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_parts_of_wider_rows_in_place(
    width: int, tokens: int, walk: Callable[..., list[np.ndarray]], normal: Callable[..., np.ndarray]
) -> None:
    x = normal(tokens + 2, width + 9)
    expected = x.copy()
    expected[:tokens, 4 : 4 + width] *= -1

    def build(x: np.ndarray) -> object:
        part = Rows.of(x).columns(4, width)
        return unary("neg", part, part)

    (out,) = walk(build, x, tokens=tokens)
    np.testing.assert_array_equal(out, expected)


def test_copies_columns_between_buffers(
    walk: Callable[..., list[np.ndarray]], normal: Callable[..., np.ndarray]
) -> None:
    x, out = normal(3, 40), normal(3, 25)
    expected = out.copy()
    expected[:, 2:21] = x[:, 7:26]
    _, copied = walk(lambda x, out: unary("copy", Rows.of(x).columns(7, 19), Rows.of(out).columns(2, 19)), x, out)
    np.testing.assert_array_equal(copied, expected)


def test_bad_arguments() -> None:
    x, narrow = Rows.of(np.zeros((2, 8), np.float32)), Rows.of(np.zeros((2, 7), np.float32))
    wanted = Rows.of(np.zeros((2, 8), np.float32), Word.WANTED)
    with pytest.raises(ValueError, match="no function of rows is named 'cosh'"):
        unary("cosh", x, x)
    with pytest.raises(ValueError, match=r"clip takes 2 parameters \['low', 'high'\], got \[1.0\]"):
        unary("clip", x, x, 1.0)
    with pytest.raises(ValueError, match=r"x is \[TOKENS, 8\], expected \[TOKENS, 7\]"):
        unary("exp", x, narrow)
    with pytest.raises(ValueError, match=r"x is \[TOKENS, 8\], expected \[WANTED, 8\]"):
        unary("exp", x, wanted)
