"""What ops mean, one by one: against onnxruntime, or a formula where that has no such operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from genai.kernels.device import StepError
from genai.kernels.ir import (
    Binary,
    BlockWeight,
    DenseWeight,
    Embedding,
    Gate,
    GatedLinear,
    Ids,
    JoinColumns,
    Linear,
    LogitsRows,
    Norm,
    Projection,
    SliceColumns,
    Unary,
)
from genai.kernels.reference import weights as stored
from genai.kernels.reference.functions import BINARY
from genai.kernels.weights import uniform_format

Run, Normal = Callable[..., Any], Callable[..., np.ndarray]


def assert_close(ours: np.ndarray, theirs: np.ndarray, tolerance: float = 2e-6) -> None:
    assert ours.dtype == np.float32
    theirs = theirs.reshape(ours.shape)
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance * max(1e-3, float(np.abs(theirs).max())))


# --- products ------------------------------------------------------------------------------------------------------


# onnxruntime has no 8-bit kernel for floating-point zero points.
@pytest.mark.oracle
@pytest.mark.parametrize(
    ("bits", "zero_points"), [(4, "none"), (4, "packed"), (4, "float"), (8, "none"), (8, "packed")]
)
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_product_with_blocks(
    onnxruntime_node: Run, compute: Run, rng: Any, normal: Normal, bits: int, block_size: int, zero_points: str
) -> None:
    n, k = 20, 3 * block_size - 7
    data = rng.integers(0, 256, (n, 3, block_size * bits // 8), dtype=np.uint8)
    x, scales, bias = normal(5, k), normal(n, 3) * 0.1, normal(n)
    points: Any = None
    if zero_points == "packed":
        points = rng.integers(0, 256, (n, -(-3 * bits // 8)), dtype=np.uint8)
    elif zero_points == "float":
        points = (7 + normal(n, 3)).astype(np.float32)
    sizes = {"N": n, "K": k, "bits": bits, "block_size": block_size}
    inputs = [x, data, scales, points, None, bias]
    (theirs,) = onnxruntime_node("MatMulNBits", inputs, [0], constants=(1, 2, 3, 5), accuracy_level=1, **sizes)
    weight = BlockWeight(
        "data",
        "scales",
        "points" if zero_points != "none" else "",
        n,
        k,
        uniform_format(bits, block_size, zero_points=zero_points != "none"),
    )
    constants = {"data": data, "scales": scales, "points": points, "bias": bias}
    assert_close(compute(Linear("x", Projection(weight, "bias"), "out", False), constants, x=x, out=n), theirs, 5e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_product_with_dense_weights(compute: Run, normal: Normal, dtype: Any, transposed: bool) -> None:
    x, matrix, addend = normal(3, 20), normal(9, 20).astype(dtype), normal(3, 9)
    constants = {"data": matrix if transposed else np.ascontiguousarray(matrix.T)}
    branch = Projection(DenseWeight("data", 9, 20, transposed), addend="y")
    expected = x.astype(np.float64) @ matrix.astype(np.float64).T + addend
    assert_close(compute(Linear("x", branch, "out", True), constants, x=x, y=addend, out=9), expected, 1e-7)


def test_one_scale_per_row(compute: Run, rng: np.random.Generator, normal: Normal) -> None:
    data, scales, x = rng.integers(0, 256, (6, 32), dtype=np.uint8), normal(6), normal(2, 64)
    apart = {"data": data, "scales": np.repeat(scales[:, None], 4, axis=1)}
    op = Linear("x", Projection(BlockWeight("data", "scales", "", 6, 64, uniform_format(4, 16))), "out", False)
    np.testing.assert_array_equal(
        compute(op, {"data": data, "scales": scales}, x=x, out=6), compute(op, apart, x=x, out=6)
    )


def test_large_matrices_are_multiplied_in_slabs(
    compute: Run, rng: Any, normal: Normal, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = {"data": rng.integers(0, 256, (50, 32), dtype=np.uint8), "scales": normal(50, 2)}
    op = Linear("x", Projection(BlockWeight("data", "scales", "", 50, 64, uniform_format(4, 32))), "out", False)
    x = normal(2, 64)
    whole = compute(op, constants, x=x, out=50)
    monkeypatch.setattr(stored, "_SLAB", 7 * 64)
    assert_close(compute(op, constants, x=x, out=50), whole, 2e-7)


def test_no_rows_at_all(compute: Run, normal: Normal) -> None:
    """Steps that finish no prompt ask for no logits."""
    x, constants = normal(0, 12), {"w": normal(4), "m": normal(7, 12)}
    product = Linear("x", Projection(DenseWeight("m", 7, 12, transposed=True)), "out", True)
    assert compute(product, constants, x=x, out=7).shape == (0, 7)
    assert compute(Norm("x", "w", 1e-5, "out"), constants, x=x, out=12).shape == (0, 12)


def test_gated_product_and_gate(compute: Run, normal: Normal) -> None:
    x, constants = normal(4, 12), {"a": normal(7, 12), "b": normal(7, 12), "bias": normal(7)}
    gate = Projection(DenseWeight("a", 7, 12, transposed=True), "bias")
    up = Projection(DenseWeight("b", 7, 12, transposed=True))
    left, right = x.astype(np.float64) @ constants["a"].T + constants["bias"], x.astype(np.float64) @ constants["b"].T
    expected = left / (1 + np.exp(-left)) * right
    assert_close(compute(GatedLinear("x", gate, up, "silu", "out", True), constants, x=x, out=7), expected)
    given = {"a": left.astype(np.float32), "b": right.astype(np.float32)}
    assert_close(compute(Gate("silu", "a", "b", "out"), **given, out=7), expected)


# --- rows of tables and of values ------------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("with_points", [False, True])
def test_lookup_in_blocks(
    onnxruntime_node: Run, compute: Run, a_step: Run, rng: Any, normal: Normal, bits: int, with_points: bool
) -> None:
    data = rng.integers(0, 256, (10, 96 * bits // 8), dtype=np.uint8)
    scales, tokens = normal(10, 3), np.array([0, 9, 3, 3, 5])
    points = rng.integers(0, 256, (10, -(-3 * bits // 8)), dtype=np.uint8)
    inputs = [data, tokens, scales, *([points] if with_points else [])]
    (theirs,) = onnxruntime_node(
        "GatherBlockQuantized", inputs, [0], bits=bits, block_size=32, gather_axis=0, quantize_axis=1
    )
    table = BlockWeight(
        "data", "scales", "points" if with_points else "", 10, 96, uniform_format(bits, 32, zero_points=with_points)
    )
    constants = {"data": data, "scales": scales, "points": points}
    ours = compute(Embedding(table, Ids.TOKENS, "out"), constants, step=a_step(tokens), out=96)
    assert_close(ours, theirs, 1e-6)


def test_lookup_in_floats(compute: Run, a_step: Run, normal: Normal) -> None:
    constants, table = {"data": normal(10, 6).astype(np.float16)}, DenseWeight("data", 10, 6, transposed=True)
    for ids, rows in ((Ids.TOKENS, [7, 0, 9]), (Ids.POSITIONS, [0, 1, 2])):
        found = compute(Embedding(table, ids, "out"), constants, step=a_step([7, 0, 9]), out=6)
        np.testing.assert_array_equal(found, constants["data"][rows].astype(np.float32))


@pytest.mark.parametrize("token", [-1, 10])
def test_tokens_outside_the_table(compute: Run, a_step: Run, normal: Normal, token: int) -> None:
    op = Embedding(DenseWeight("data", 10, 6, transposed=True), Ids.TOKENS, "out")
    with pytest.raises(StepError, match=f"index outside its table: {token} is not in the range 0 to 9"):
        compute(op, {"data": normal(10, 6)}, step=a_step([3, token]), out=6)


def test_columns_and_rows_of_logits(compute: Run, a_step: Run, normal: Normal) -> None:
    x = normal(4, 10)
    np.testing.assert_array_equal(compute(SliceColumns("x", 3, "out"), x=x, out=5), x[:, 3:8])
    y = normal(4, 3)
    joined = compute(JoinColumns(("y", "x", "y"), "out"), x=x, y=y, out=16)
    np.testing.assert_array_equal(joined, np.concatenate([y, x, y], axis=1))
    for wanted in ([3, 1], []):
        found = compute(LogitsRows("x", "out"), step=a_step([0] * 4, wanted), x=x, out=10)
        np.testing.assert_array_equal(found, x[wanted])
    with pytest.raises(StepError, match="row of logits outside the step: 4"):
        compute(LogitsRows("x", "out"), step=a_step([0] * 4, [4]), x=x, out=10)


# --- norms -----------------------------------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("centred", [False, True])
def test_norm_of_groups(onnxruntime_node: Run, compute: Run, normal: Normal, centred: bool) -> None:
    x, constants = normal(3, 100) + 1, {"weight": normal(50), "bias": normal(50)}
    op_type = "LayerNormalization" if centred else "SimplifiedLayerNormalization"
    names = ["weight", "bias"] if centred else ["weight"]
    inputs = [x.reshape(3, 2, 50), *(constants[name] for name in names)]
    (theirs,) = onnxruntime_node(op_type, inputs, [0], domain="", epsilon=1e-3, axis=-1)
    op = Norm("x", "weight", 1e-3, "out", centred=centred, bias="bias" if centred else "")
    assert_close(compute(op, constants, x=x, out=100), theirs, 5e-6)


@pytest.mark.oracle
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("input_bias", ["", "input_bias"])
def test_norm_of_a_sum(onnxruntime_node: Run, compute: Run, normal: Normal, centred: bool, input_bias: str) -> None:
    x, skip = normal(3, 50), normal(3, 50)
    constants = {"weight": normal(50), "bias": normal(50), "input_bias": normal(50)}
    names = ["weight", *(["bias"] if centred else []), *([input_bias] if input_bias else [])]
    op_type = "SkipLayerNormalization" if centred else "SkipSimplifiedLayerNormalization"
    inputs = [x[None], skip[None], *(constants[name] for name in names)]
    theirs = onnxruntime_node(op_type, inputs, [0, 3], epsilon=1e-4)
    bias = "bias" if centred else ""
    op = Norm("x", "weight", 1e-4, "out", centred, bias, "skip", input_bias, total="total")
    ours = compute(op, constants, x=x, skip=skip, out=50, total=50)
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, 5e-6)
    (alone,) = [compute(Norm("x", "weight", 1e-4, "", skip="skip", total="total"), constants, x=x, skip=skip, total=50)]
    np.testing.assert_array_equal(alone, x + skip)


# --- functions of numbers --------------------------------------------------------------------------------------------

# Our name and parameters, onnxruntime's operator, domain and attributes.
UNARIES: list[tuple[str, tuple[float, ...], str, str, dict[str, Any]]] = [
    ("abs", (), "Abs", "", {}),
    ("elu", (1.5,), "Elu", "", {"alpha": 1.5}),
    ("erf", (), "Erf", "", {}),
    ("exp", (), "Exp", "", {}),
    ("gelu", (), "Gelu", "", {}),
    ("gelu_tanh", (), "Gelu", "", {"approximate": "tanh"}),
    ("gelu", (), "Gelu", "com.microsoft", {}),
    ("gelu_tanh", (), "FastGelu", "com.microsoft", {}),
    ("hard_sigmoid", (0.3, 0.4), "HardSigmoid", "", {"alpha": 0.3, "beta": 0.4}),
    ("hard_swish", (), "HardSwish", "", {}),
    ("leaky_relu", (0.1,), "LeakyRelu", "", {"alpha": 0.1}),
    ("neg", (), "Neg", "", {}),
    ("quick_gelu", (1.3,), "QuickGelu", "com.microsoft", {"alpha": 1.3}),
    ("reciprocal", (), "Reciprocal", "", {}),
    ("relu", (), "Relu", "", {}),
    ("sigmoid", (), "Sigmoid", "", {}),
    ("softplus", (), "Softplus", "", {}),
    ("tanh", (), "Tanh", "", {}),
]


@pytest.mark.oracle
@pytest.mark.parametrize("case", UNARIES, ids=lambda case: f"{case[3]} {case[2]} {case[0]}")
def test_unary(onnxruntime_node: Run, compute: Run, normal: Normal, case: Any) -> None:
    name, parameters, op_type, domain, attributes = case
    x = normal(4, 50) * 3
    (theirs,) = onnxruntime_node(op_type, [x], [0], domain=domain, **attributes)
    assert_close(compute(Unary(name, "x", "out", parameters), x=x, out=50), theirs, 5e-6)


def test_unary_by_formula(compute: Run, normal: Normal) -> None:
    x = np.abs(normal(2, 30)) + np.float32(0.1)
    cases: dict[str, tuple[tuple[float, ...], np.ndarray]] = {
        "clip": ((0.3, 1.0), np.clip(x, np.float32(0.3), 1)),
        "copy": ((), x),
        "cube": ((), x.astype(np.float64) ** 3),
        "log": ((), np.log(x.astype(np.float64))),
        "round_to_float16": ((), x.astype(np.float16)),
        "silu": ((), x / (1 + np.exp(-x.astype(np.float64)))),
        "softcap": ((2.0,), 2 * np.tanh(x.astype(np.float64) / 2)),
        "sqrt": ((), np.sqrt(x.astype(np.float64))),
        "square": ((), x.astype(np.float64) ** 2),
    }
    for name, (parameters, expected) in cases.items():
        assert_close(compute(Unary(name, "x", "out", parameters), x=x, out=30), expected, 1e-7)


def test_binary(compute: Run, normal: Normal) -> None:
    """Rows with rows, with one number, and with a vector that a row holds several times."""
    a, b, constants = normal(3, 12), normal(3, 12), {"one": np.array(0.5, np.float32), "vector": normal(4)}
    tiled = np.tile(constants["vector"], 3)
    for name in BINARY:
        function: Any = BINARY[name] if name == "prelu" else getattr(np, name)
        with np.errstate(invalid="ignore"):
            assert_close(compute(Binary(name, "a", "b", "out"), a=np.abs(a), b=b, out=12), function(np.abs(a), b))
    for op, expected in (
        (Binary("subtract", "a", "", "out", b_constant="one"), a - np.float32(0.5)),
        (Binary("subtract", "", "b", "out", a_constant="vector"), tiled - b),
        (Binary("divide", "a", "", "out", b_constant="vector"), a / tiled),
    ):
        assert_close(compute(op, constants, a=a, b=b, out=12), expected, 1e-6)
