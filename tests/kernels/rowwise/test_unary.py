"""Functions of every number: against the reference, on odd widths, in place, in parts of wider rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from genai.kernels.cpu.program.calls import PIECE, Rows
from genai.kernels.cpu.program.step_table import StepField
from genai.kernels.cpu.rowwise.elementwise import UNARY, unary
from genai.kernels.reference.functions import UNARY as DEFINITIONS

# name -> (parameters, relative and absolute tolerance)
CASES: dict[str, tuple[tuple[float, ...], float, float]] = {
    "abs": ((), 0, 0),
    "clip": ((-0.5, 7.0), 0, 0),
    "copy": ((), 0, 0),
    "cube": ((), 3e-7, 1e-44),
    "elu": ((1.5,), 1e-6, 3e-7),
    "erf": ((), 1e-6, 3e-7),
    "exp": ((), 1e-6, 2e-45),
    "gelu": ((), 3e-6, 3e-7),
    "gelu_tanh": ((), 3e-6, 3e-7),
    "hard_sigmoid": ((0.2, 0.5), 1e-6, 1e-7),
    "hard_swish": ((), 1e-6, 5e-7),
    "leaky_relu": ((0.01,), 1e-6, 1e-45),
    "log": ((), 5e-7, 1e-7),
    "neg": ((), 0, 0),
    "quick_gelu": ((1.702,), 3e-6, 1e-6),
    "reciprocal": ((), 1e-7, 1e-45),
    "relu": ((), 0, 0),
    "relu_squared": ((), 1e-7, 1e-45),
    "round_to_float16": ((), 0, 0),
    "sigmoid": ((), 1e-6, 2e-38),
    "silu": ((), 3e-6, 2e-36),
    "softcap": ((30.0,), 1e-6, 1e-5),
    "softplus": ((), 1e-6, 2e-45),
    "sqrt": ((), 1e-7, 1e-45),
    "square": ((), 1e-7, 1e-45),
    "tanh": ((), 1e-6, 1e-44),
}


def test_every_function_has_a_definition() -> None:
    assert CASES.keys() == UNARY.keys() == DEFINITIONS.keys()


@pytest.mark.parametrize("name", CASES)
@np.errstate(all="ignore")
def test_function(name: str, execute: Callable[..., list[np.ndarray]], hard_numbers: np.ndarray) -> None:
    parameters, rtol, atol = CASES[name]
    x = hard_numbers.reshape(-1, 63)
    expected = DEFINITIONS[name](x.astype(np.float64), *parameters).astype(np.float32)
    _, out = execute(lambda x, out: unary(name, Rows.of(x), Rows.of(out), *parameters), x, np.full_like(x, 7))
    np.testing.assert_allclose(out, expected, rtol=rtol, atol=atol)


def test_tanh_is_odd_and_at_most_one(execute: Callable[..., list[np.ndarray]]) -> None:
    x = np.concatenate([np.linspace(0, 12, 40_000), [1e-45, 1e-30, 1e38, np.inf]]).astype(np.float32)
    pair = np.stack([x, -x])
    _, out = execute(lambda x, out: unary("tanh", Rows.of(x), Rows.of(out)), pair, np.full_like(pair, 7))
    assert out[1].tobytes() == (-out[0]).tobytes()
    assert out.max() == 1 and np.all(out[0, x >= np.float32(9.4)] == 1)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 31, 896, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_parts_of_wider_rows_in_place(
    width: int, tokens: int, execute: Callable[..., list[np.ndarray]], normal: Callable[..., np.ndarray]
) -> None:
    x = normal(tokens + 2, width + 9)
    expected = x.copy()
    expected[:tokens, 4 : 4 + width] *= -1

    def build(x: np.ndarray) -> object:
        part = Rows.of(x).columns(4, width)
        return unary("neg", part, part)

    (out,) = execute(build, x, tokens=tokens)
    np.testing.assert_array_equal(out, expected)


def test_copies_columns_between_buffers(
    execute: Callable[..., list[np.ndarray]], normal: Callable[..., np.ndarray]
) -> None:
    x, out = normal(3, 40), normal(3, 25)
    expected = out.copy()
    expected[:, 2:21] = x[:, 7:26]
    _, copied = execute(lambda x, out: unary("copy", Rows.of(x).columns(7, 19), Rows.of(out).columns(2, 19)), x, out)
    np.testing.assert_array_equal(copied, expected)


def test_bad_arguments() -> None:
    x, narrow = Rows.of(np.zeros((2, 8), np.float32)), Rows.of(np.zeros((2, 7), np.float32))
    wanted = Rows.of(np.zeros((2, 8), np.float32), StepField.LOGITS_ROWS)
    with pytest.raises(ValueError, match="'cosh' is not a function of rows"):
        unary("cosh", x, x)
    with pytest.raises(ValueError, match=r"clip takes 2 parameters \['low', 'high'\], got \[1.0\]"):
        unary("clip", x, x, 1.0)
    with pytest.raises(ValueError, match=r"x is \[TOKENS, 8\], expected \[TOKENS, 7\]"):
        unary("exp", x, narrow)
    with pytest.raises(ValueError, match=r"x is \[TOKENS, 8\], expected \[LOGITS_ROWS, 8\]"):
        unary("exp", x, wanted)
