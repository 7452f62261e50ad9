"""RMS norm and layer norm of rows and of groups, with and without a sum, against the float64 references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.program.calls import Rows
from genai.kernels.cpu.program.step_table import StepField
from genai.kernels.cpu.rowwise.norm import norm as norm_call
from genai.kernels.reference.functions import norm

Execute = Callable[..., list[np.ndarray]]
Normal = Callable[..., np.ndarray]

any_width = pytest.mark.parametrize("width", [1, 15, 16, 17, 31, 64, 896, 2048])


def assert_close(ours: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(ours, expected, rtol=3e-6, atol=3e-6)


@any_width
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_rms_norm(width: int, tokens: int, execute: Execute, normal: Normal) -> None:
    x, weight = normal(tokens + 1, width) * 3, normal(width)

    def build(x: np.ndarray, out: np.ndarray) -> Any:
        return norm_call(Rows.of(x), weight, 1e-5, Rows.of(out))

    _, out = execute(build, x, np.zeros_like(x), tokens=tokens)
    assert_close(out[:tokens], norm(x[:tokens], weight, 1e-5))
    assert not out[tokens:].any()


@any_width
@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm(width: int, with_bias: bool, execute: Execute, normal: Normal) -> None:
    x, weight, bias = normal(3, width) + 2, normal(width), normal(width) if with_bias else None
    _, out = execute(
        lambda x, out: norm_call(Rows.of(x), weight, 1e-5, Rows.of(out), centred=True, bias=bias), x, np.zeros_like(x)
    )
    assert_close(out, norm(x, weight, 1e-5, 0 if bias is None else bias, centred=True))


@any_width
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_norm_of_a_sum(width: int, centred: bool, with_bias: bool, execute: Execute, normal: Normal) -> None:
    x, skip, weight = normal(3, width), normal(3, width), normal(width)
    bias, input_bias = (normal(width), normal(width)) if with_bias else (None, None)

    def build(x: np.ndarray, skip: np.ndarray, out: np.ndarray, total: np.ndarray) -> Any:
        options = {"skip": Rows.of(skip), "input_bias": input_bias, "total": Rows.of(total)}
        if centred:
            return norm_call(Rows.of(x), weight, 1e-5, Rows.of(out), centred=True, bias=bias, **options)
        return norm_call(Rows.of(x), weight, 1e-5, Rows.of(out), **options)

    *_, out, total = execute(build, x, skip, np.zeros_like(x), np.zeros_like(x))
    expected = x.astype(np.float64) + skip + (0 if input_bias is None else input_bias)
    shift = bias if centred and bias is not None else 0.0
    assert_close(out, norm(expected, weight, 1e-5, shift, centred))
    assert_close(total, expected)


@pytest.mark.parametrize(("out_in", "total_in"), [(0, 1), (1, 0), (2, 0), (2, 1), (0, None), (1, None), (None, 0)])
def test_results_may_overwrite_operands(
    out_in: int | None, total_in: int | None, execute: Execute, normal: Normal
) -> None:
    weight = normal(50)
    arrays = [normal(3, 50), normal(3, 50), np.zeros((3, 50), np.float32)]
    total = arrays[0] + arrays[1]
    normed = norm(total, weight, 1e-5)

    def build(*given: np.ndarray) -> Any:
        out, total = (None if place is None else Rows.of(given[place]) for place in (out_in, total_in))
        return norm_call(Rows.of(given[0]), weight, 1e-5, out, skip=Rows.of(given[1]), total=total)

    results = execute(build, *arrays)
    for place, (result, before) in enumerate(zip(results, arrays, strict=True)):
        if place == out_in:
            assert_close(result, normed)
        else:
            np.testing.assert_array_equal(result, total if place == total_in else before)


@pytest.mark.parametrize("size", [1, 24, 64, 100])
@pytest.mark.parametrize("own_weights", [False, True])
def test_heads_in_place_in_packed_qkv(size: int, own_weights: bool, execute: Execute, normal: Normal) -> None:
    groups = 3
    packed = normal(4, 8 * size)
    weight, bias = (normal(groups * size if own_weights else size) for _ in range(2))
    heads = packed[:, 2 * size : 5 * size].reshape(4, groups, size)
    scales, shifts = weight.reshape(-1, size), bias.reshape(-1, size)

    def build(normalize: Callable[..., Any]) -> Callable[[np.ndarray], Any]:
        def call(packed: np.ndarray) -> Any:
            part = Rows.of(packed).columns(2 * size, groups * size)
            return normalize(part)

        return call

    (out,) = execute(build(lambda part: norm_call(part, weight, 1e-6, part, groups=groups)), packed)
    expected = packed.copy()
    expected[:, 2 * size : 5 * size] = norm(heads, scales, 1e-6).reshape(4, -1)
    assert_close(out, expected)
    options: dict[str, Any] = {"centred": True, "bias": bias, "groups": groups}
    (out,) = execute(build(lambda part: norm_call(part, weight, 1e-6, part, **options)), packed)
    expected[:, 2 * size : 5 * size] = norm(heads, scales, 1e-6, shifts, centred=True).reshape(4, -1)
    assert_close(out, expected)


def test_logits_rows_only(execute: Execute, normal: Normal) -> None:
    x, weight = normal(5, 40), normal(40)

    def build(x: np.ndarray, out: np.ndarray) -> Any:
        return norm_call(Rows.of(x, StepField.LOGITS_ROWS), weight, 1e-5, Rows.of(out, StepField.LOGITS_ROWS))

    _, out = execute(build, x, np.zeros_like(x), LOGITS_ROWS=2)
    assert_close(out[:2], norm(x[:2], weight, 1e-5))
    assert not out[2:].any()


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-18, 1e15, 1e18])
@pytest.mark.parametrize("centred", [False, True])
def test_all_magnitudes(scale: float, centred: bool, execute: Execute, normal: Normal) -> None:
    x, weight = (normal(2, 100) * scale).astype(np.float32), normal(100)

    def build(x: np.ndarray, out: np.ndarray) -> Any:
        return norm_call(Rows.of(x), weight, 1e-6, Rows.of(out), centred=centred)

    _, out = execute(build, x, np.zeros_like(x))
    assert_close(out, norm(x, weight, 1e-6, centred=centred))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("centred", [False, True])
@np.errstate(invalid="ignore")
def test_infinities_and_nan_reach_the_output(value: float, centred: bool, execute: Execute, normal: Normal) -> None:
    x, weight = normal(3, 35), np.ones(35, np.float32)
    x[1, 33] = value

    def build(x: np.ndarray, out: np.ndarray) -> Any:
        return norm_call(Rows.of(x), weight, 1e-6, Rows.of(out), centred=centred)

    _, out = execute(build, x, np.zeros_like(x))
    assert np.isnan(out[1, 33])
    assert_close(out, norm(x, weight, 1e-6, centred=centred))


def test_bad_arguments() -> None:
    x, weight = Rows.of(np.zeros((2, 8), np.float32)), np.ones(8, np.float32)
    narrow = Rows.of(np.zeros((2, 7), np.float32))
    with pytest.raises(ValueError, match=r"weight is float32 \[8\], expected contiguous float32 \[7\]"):
        norm_call(narrow, weight, 1e-5, narrow)
    with pytest.raises(ValueError, match=r"x is \[TOKENS, 8\], which cannot be divided into 3 equal groups"):
        norm_call(x, weight, 1e-5, x, groups=3)
    with pytest.raises(ValueError, match=r"bias is float32 \[4\], expected contiguous float32 \[8\]"):
        norm_call(x, weight, 1e-5, x, bias=weight[:4])
    with pytest.raises(ValueError, match=r"skip is \[TOKENS, 7\], expected \[TOKENS, 8\]"):
        norm_call(x, weight, 1e-5, x, skip=narrow)
    with pytest.raises(ValueError, match=r"input_bias is float32 \[4\]"):
        norm_call(x, weight, 1e-5, x, input_bias=weight[:4])
    with pytest.raises(ValueError, match="out and total are both None"):
        norm_call(x, weight, 1e-5, None)
    with pytest.raises(ValueError, match="out and total are the same rows"):
        norm_call(x, weight, 1e-5, x, total=x)
