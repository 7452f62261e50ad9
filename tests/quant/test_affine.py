"""Scales, zero points and integers per tensor and per channel, against ONNX's reference and plain float64."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference.ops import op_quantize_linear

from genai.kernels.weights import QuantizationError
from genai.quant.affine import (
    AffineParameters,
    IntegerRange,
    affine_parameters,
    bias_steps,
    channel_ranges,
    dequantize_affine,
    integer_range,
    quantize_affine,
    snapped_parameters,
    widened_for_bias,
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"bits": 8, "signed": True}, (-128, 127)),
        ({"bits": 8, "signed": True, "symmetric": True}, (-127, 127)),
        ({"bits": 8, "signed": True, "reduce_range": True}, (-64, 64)),
        ({"bits": 8, "signed": False}, (0, 255)),
        ({"bits": 8, "signed": False, "reduce_range": True}, (0, 127)),
        ({"bits": 16, "signed": True, "symmetric": True}, (-32767, 32767)),
        ({"bits": 16, "signed": False}, (0, 65535)),
        ({"bits": 4, "signed": True, "symmetric": True}, (-8, 7)),
        ({"bits": 4, "signed": False}, (0, 15)),
    ],
)
def test_integers_of_a_type(options, expected):
    found = integer_range(**options)
    assert (found.low, found.high) == expected


BYTE = IntegerRange(0, 255)


@pytest.mark.parametrize("low, high", [(-1.0, 3.0), (0.5, 2.0), (-5.0, -1.0), (-3e-3, 1e4), (0.0, 1e-20)])
def test_ends_and_zero_are_held(low, high):
    found = affine_parameters(np.float32(low), np.float32(high), BYTE, symmetric=False)
    ends = np.asarray([min(low, 0), 0, max(high, 0)], np.float32)
    back = dequantize_affine(quantize_affine(ends, found, BYTE), found)
    assert back[1] == 0
    assert np.all(np.abs(back - ends) <= 0.5001 * found.scale)
    assert 0 <= found.zero_point <= 255


def test_symmetric_ranges_have_zero_in_the_middle():
    found = affine_parameters(np.float32(-1), np.float32(2), IntegerRange(-127, 127), symmetric=True)
    assert found.zero_point == 0 and found.scale == np.float32(2 / 127)
    assert affine_parameters(np.float32(-1), np.float32(2), BYTE, symmetric=True).zero_point == 128


def test_what_is_all_zero_has_scale_one():
    found = affine_parameters(np.zeros(2), np.asarray([0, 1]), BYTE, symmetric=False)
    assert found.scale.tolist() == [1, np.float32(1 / 255)]
    assert affine_parameters(np.zeros(()), np.zeros(()), IntegerRange(-128, 127), symmetric=False).zero_point == 0


def test_a_least_range():
    assert affine_parameters(np.float32(0), np.float32(0.1), BYTE, symmetric=False, least_range=51).scale == 0.2


def test_snapped_zero_points():
    assert snapped_parameters(0.5, 2, BYTE).zero_point == 0
    found = snapped_parameters(-1, 3, BYTE)
    assert found.zero_point == 128
    assert found.scale == np.float32(3 / 127)
    assert snapped_parameters(-256, 3, BYTE).scale == 2
    assert snapped_parameters(0, 0, BYTE).scale == 1


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_integers_are_those_of_quantize_linear(axis):
    values = np.random.default_rng(0).standard_normal((5, 7, 3), np.float32) * 3
    low, high = channel_ranges(values, axis)
    assert low.shape == (() if axis is None else (values.shape[axis],))
    found = affine_parameters(low * np.float32(0.8), high, BYTE, symmetric=False)  # some saturate
    steps = quantize_affine(values, found, BYTE, axis)
    node = op_quantize_linear.QuantizeLinear_21
    expected = node.eval(values, found.scale, found.zero_point.astype(np.uint8), axis=1 if axis is None else axis)
    assert np.array_equal(steps, expected)
    assert np.abs(dequantize_affine(steps, found, axis) - values).max() < 2


def test_biases():
    bias, scale = np.asarray([1.0, -2.5, 1e30]), np.asarray([0.1, 0.1, 0.1])
    assert bias_steps(bias, scale).tolist() == [10, -25, 2**31 - 1]
    wider = widened_for_bias(np.asarray([1e-6, 1e-6], np.float32), 1e-6, np.asarray([1e-3, 1e9]))
    assert wider[0] == np.float32(1e-6)
    assert abs(1e9 / (wider[1] * 1e-6)) <= 2**31
    assert widened_for_bias(np.asarray(1e-6, np.float32), 1e-6, np.asarray([1e-3, 1e9])) == wider[1]


@pytest.mark.parametrize(
    "call",
    [
        lambda: affine_parameters(np.float32(np.nan), np.float32(1), BYTE, symmetric=False),
        lambda: affine_parameters(np.float32(2), np.float32(1), BYTE, symmetric=False),
        lambda: quantize_affine(np.asarray([1, np.inf]), AffineParameters(np.float32(1), np.int32(0)), BYTE),
        lambda: channel_ranges(np.zeros((0, 3)), None),
        lambda: quantize_affine(np.ones((2, 2)), AffineParameters(np.ones(2, np.float32), np.zeros(2, np.int32)), BYTE),
    ],
)
def test_what_cannot_be_quantised(call):
    with pytest.raises(QuantizationError):
        call()
