"""Vectors of numbers inside kernels, their functions, and float16 conversion with and without hardware."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from numba.core import types
from numba.extending import intrinsic

from genai.kernels.cpu.jit import emit, vector
from genai.kernels.cpu.jit.vector_math import exp, sigmoid, tanh


def elementwise(function: Any, x: np.ndarray) -> np.ndarray:
    """function over whole vectors, compiled here and now."""

    @numba.njit
    def run(x: Any, out: Any) -> None:
        for first in range(0, x.shape[0], vector.LANES):
            vector.store(out, first, function(vector.load(x, first)))

    padded = np.concatenate([x, np.zeros(-len(x) % vector.LANES, np.float32)])
    out = np.empty_like(padded)
    run(padded, out)
    return out[: len(x)]


def test_exp_over_its_whole_range() -> None:
    """Within two units in the last place from the smallest denormal to overflow."""
    x = np.linspace(-105, 90, 200_001).astype(np.float32)
    ours = elementwise(exp, x)
    with np.errstate(over="ignore"):
        exact = np.exp(x.astype(np.float64))
        spacing = np.maximum(np.spacing(exact.astype(np.float32)).astype(np.float64), 2.0**-149)
        finite = exact < np.finfo(np.float32).max
    assert (np.abs(ours - exact)[finite] <= 2 * spacing[finite]).all()
    assert np.isinf(ours[~finite]).all()


def test_exp_of_special_numbers() -> None:
    x = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -200, 200], np.float32)
    np.testing.assert_array_equal(elementwise(exp, x), np.array([1, 1, np.inf, 0, np.nan, 1, 0, np.inf], np.float32))


def test_sigmoid_and_tanh() -> None:
    x = np.concatenate([np.linspace(-120, 120, 9001), [np.inf, -np.inf, np.nan]]).astype(np.float32)
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(elementwise(sigmoid, x), 1 / (1 + np.exp(-wide)), rtol=3e-7, atol=1e-37)
    np.testing.assert_allclose(elementwise(tanh, x), np.tanh(wide), rtol=0, atol=3e-7)


def test_operators() -> None:
    @numba.njit
    def run(x: Any, out: Any) -> None:
        a = vector.load(x, 0)
        whole = vector.splat_int32(-7)
        vector.store(out, 0, (a + 2.0) * 3.0 - a / 4.0)
        vector.store(out, 16, vector.to_float32((whole << 2) + (whole >> 1) + (whole & 12)))
        vector.store(out, 32, vector.maximum(a, 0.5) + vector.minimum(a, 0.0))
        vector.store(out, 48, vector.splat_float32(vector.reduce_add(a)))
        vector.store(out, 64, vector.splat_float32(vector.reduce_max(a)))
        vector.store(out, 80, vector.multiply_add(a, 2.0, a))

    x = np.random.default_rng(0).standard_normal(vector.LANES).astype(np.float32)
    out = np.empty((6, vector.LANES), np.float32)
    run(x, out.reshape(-1))
    whole = (-7 << 2) + (-7 >> 1) + (-7 & 12)
    expected = [
        (x + 2) * 3 - x / 4,
        whole + 0 * x,
        np.maximum(x, 0.5) + np.minimum(x, 0),
        x.sum() + 0 * x,
        x.max() + 0 * x,
        3 * x,
    ]
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


def test_operators_between_different_vectors_do_not_compile() -> None:
    @numba.njit
    def run() -> float:
        return vector.reduce_add(vector.splat_float32(1.0) + vector.splat_int32(1))

    with pytest.raises(numba.TypingError):
        run()


def conversions(native: bool) -> tuple[Any, Any]:
    """Scalar float16 conversions: from bits and to bits."""

    def emitter(context: Any, builder: Any) -> emit.Emitter:
        made = emit.Emitter(context, builder)
        made.native_half = native
        return made

    @intrinsic
    def from_half(typing_context: Any, bits: Any) -> Any:
        return types.float32(types.uint16), lambda c, builder, s, args: emitter(c, builder).from_half(args[0])

    @intrinsic
    def to_half(typing_context: Any, value: Any) -> Any:
        return types.uint16(types.float32), lambda c, builder, s, args: emitter(c, builder).to_half(args[0])

    @numba.njit
    def widen(bits: Any, out: Any) -> None:
        for i in range(bits.shape[0]):
            out[i] = from_half(bits[i])

    @numba.njit
    def narrow(values: Any, out: Any) -> None:
        for i in range(values.shape[0]):
            out[i] = to_half(values[i])

    return widen, narrow


def hardware() -> bool:
    from numba.core.registry import cpu_target

    return emit.has_half_instructions(cpu_target.target_context)


@pytest.mark.parametrize("native", [False, True], ids=["integer arithmetic", "hardware"])
def test_every_half_and_its_neighbours(native: bool) -> None:
    """All 65536 halves; then the floats at, between and around all finite ones, to nearest even."""
    if native and not hardware():
        pytest.skip("this processor has no float16 instructions")
    widen, narrow = conversions(native)
    bits = np.arange(65536, dtype=np.uint16)
    floats = np.empty(65536, np.float32)
    widen(bits, floats)
    np.testing.assert_array_equal(floats, bits.view(np.float16).astype(np.float32))
    finite = np.unique(floats[np.isfinite(floats)])
    middles = (finite[1:] + finite[:-1]) / 2
    beyond = np.array([65519.996, 65520, 65536, 1e38, np.inf, np.nan, 1e-45, 2.9e-8, 2.98023224e-8], np.float32)
    values = np.concatenate(
        [finite, middles, np.nextafter(middles, np.inf), np.nextafter(middles, -np.inf), beyond, -beyond]
    )
    values = values.astype(np.float32)
    out = np.empty(len(values), np.uint16)
    narrow(values, out)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    np.testing.assert_array_equal(out.view(np.float16), expected)
    np.testing.assert_array_equal(np.signbit(out.view(np.float16)), np.signbit(expected))
