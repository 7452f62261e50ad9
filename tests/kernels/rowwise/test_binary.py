"""Functions of two operands, with every kind of broadcasting, and gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.program.calls import PIECE, Rows
from genai.kernels.cpu.rowwise.elementwise import BINARY, binary, gate
from genai.kernels.reference.functions import BINARY as DEFINITIONS, UNARY

Execute = Callable[..., list[np.ndarray]]
Normal = Callable[..., np.ndarray]


def test_every_function_has_a_definition() -> None:
    assert DEFINITIONS.keys() == BINARY.keys()


@pytest.mark.parametrize("name", DEFINITIONS)
@np.errstate(all="ignore")
def test_function_of_hard_numbers(
    name: str, execute: Execute, hard_numbers: np.ndarray, rng: np.random.Generator
) -> None:
    a, b = hard_numbers.reshape(-1, 63), rng.permutation(hard_numbers).reshape(-1, 63)
    *_, out = execute(lambda a, b, out: binary(name, Rows.of(a), Rows.of(b), Rows.of(out)), a, b, np.full_like(a, 7))
    expected = DEFINITIONS[name](a.astype(np.float64), b.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(out, expected, rtol=2e-7, atol=1e-45)


@pytest.mark.parametrize("width", [1, 15, 17, 31, 896, PIECE + 3])
@pytest.mark.parametrize("kind", ["rows", "columns", "per row", "one"])
@pytest.mark.parametrize("swapped", [False, True])
def test_broadcasting(width: int, kind: str, swapped: bool, execute: Execute, normal: Normal) -> None:
    x = normal(3, width)
    other = {"rows": (3, width), "columns": (width,), "per row": (3, 1), "one": (1,)}[kind]
    y = normal(*other)

    def build(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> Any:
        second = Rows.of(y) if y.ndim == 2 else y
        operands = (second, Rows.of(x)) if swapped else (Rows.of(x), second)
        return binary("subtract", *operands, Rows.of(out))

    *_, out = execute(build, x, y, np.zeros_like(x))
    np.testing.assert_array_equal(out, y - x if swapped else x - y)


@pytest.mark.parametrize("exponent", [-1, 0.5, 1, 2.0, 3, 0, 2.5])
def test_power_of_a_number(exponent: float, execute: Execute, normal: Normal) -> None:
    x, number = np.abs(normal(3, 35)) + np.float32(0.1), np.array([exponent], np.float32)
    _, out = execute(lambda x, out: binary("power", Rows.of(x), number, Rows.of(out)), x, np.zeros_like(x))
    np.testing.assert_allclose(out, x.astype(np.float64) ** exponent, rtol=3e-7)


def test_out_may_be_either_operand(execute: Execute, normal: Normal) -> None:
    a, b = normal(3, 50), normal(3, 50)
    first, second = execute(lambda a, b: binary("subtract", Rows.of(a), Rows.of(b), Rows.of(a)), a, b)
    np.testing.assert_array_equal(first, a - b)
    np.testing.assert_array_equal(second, b)
    first, second = execute(lambda a, b: binary("subtract", Rows.of(a), Rows.of(b), Rows.of(b)), a, b)
    np.testing.assert_array_equal(second, a - b)


@pytest.mark.parametrize("width", [1, 17, 896, PIECE + 3])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gates_of_halves_of_one_projection(activation: str, width: int, execute: Execute, normal: Normal) -> None:
    both = normal(3, 2 * width) * 3

    def build(both: np.ndarray, out: np.ndarray) -> Any:
        rows = Rows.of(both)
        return gate(activation, rows.columns(0, width), rows.columns(width, width), Rows.of(out))

    _, out = execute(build, both, np.zeros((3, width), np.float32))
    wide = both.astype(np.float64)
    np.testing.assert_allclose(out, UNARY[activation](wide[:, :width]) * wide[:, width:], rtol=3e-6, atol=3e-6)


def test_gate_with_a_parameter_in_place(execute: Execute, normal: Normal) -> None:
    a, b = normal(2, 33), normal(2, 33)
    out, _ = execute(lambda a, b: gate("clip", Rows.of(a), Rows.of(b), Rows.of(a), -0.25, 0.5), a, b)
    np.testing.assert_array_equal(out, np.clip(a, -0.25, 0.5) * b)


@np.errstate(all="ignore")
def test_gates_pass_infinities_and_nan_on(execute: Execute, hard_numbers: np.ndarray) -> None:
    a = hard_numbers.reshape(-1, 63)
    b = np.full_like(a, 0.5)
    *_, out = execute(lambda a, b, out: gate("silu", Rows.of(a), Rows.of(b), Rows.of(out)), a, b, np.zeros_like(a))
    wide = a.astype(np.float64)
    np.testing.assert_allclose(out, (0.5 * wide / (1 + np.exp(-wide))).astype(np.float32), rtol=3e-6, atol=1e-36)


def test_bad_arguments() -> None:
    x, narrow = Rows.of(np.zeros((2, 8), np.float32)), Rows.of(np.zeros((2, 7), np.float32))
    with pytest.raises(ValueError, match="'modulo' is not a function of two operands"):
        binary("modulo", x, x, x)
    with pytest.raises(ValueError, match=r"b is \[TOKENS, 7\], expected \[TOKENS, 8\]"):
        binary("add", x, narrow, x)
    with pytest.raises(ValueError, match=r"b is float32 \[7\], expected contiguous float32 \[8\] or \[1\]"):
        binary("add", x, np.zeros(7, np.float32), x)
    with pytest.raises(ValueError, match=r"a is float64 \[8\], expected contiguous float32"):
        binary("add", np.zeros(8), x, x)
    with pytest.raises(ValueError, match=r"up is \[TOKENS, 7\]"):
        gate("silu", x, narrow, x)
    with pytest.raises(ValueError, match="quick_gelu takes 1 parameters"):
        gate("quick_gelu", x, x, x)
