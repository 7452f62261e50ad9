"""Products with packed weights against the NumPy reference, alone, in batches and on any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest

from genai.kernels.cpu.arrays.block_weights import BlockLinear
from genai.kernels.cpu.linear.packing import pack_matrix
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.reference.weights import dequantize_weight
from genai.kernels.weight_layout import BlockMatrix

Normal = Callable[..., np.ndarray]
Activations = Literal["int8", "fp32"]


def multiply(
    matrix: BlockMatrix,
    x: np.ndarray,
    *,
    activations: Activations = "int8",
    bias: np.ndarray | None = None,
    addend: np.ndarray | None = None,
    threads: Threads | None = None,
) -> np.ndarray:
    return BlockLinear(matrix, bias, exact=activations == "fp32", threads=threads)(x, addend)


def rounded(x: np.ndarray, block_size: int) -> np.ndarray:
    """Activations rounded to 8 bits per block, as values: max |x| / 127 per step, ties to even.

    A block with an infinity or a NaN is NaN throughout.
    """
    k = x.shape[-1]
    blocks = np.pad(x.astype(np.float64), [(0, 0), (0, -k % block_size)]).reshape(len(x), -1, block_size)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        step = np.where(np.isfinite(largest), largest / 127, np.nan)
        values = np.where(largest == 0, 0.0, np.rint(blocks * (127 / largest)) * step)
    return values.reshape(len(x), -1)[:, :k]


both_activations = pytest.mark.parametrize("activations", ["int8", "fp32"])
both_widths = pytest.mark.parametrize("bits", [4, 8])


@dataclass(frozen=True)
class Weight:
    """A random weight, raw and packed."""

    raw: tuple[np.ndarray, np.ndarray, np.ndarray | None]
    sizes: dict[str, int]
    matrix: BlockMatrix

    def expected(self, x: np.ndarray, activations: Activations) -> np.ndarray:
        seen = rounded(x, self.sizes["block_size"]) if activations == "int8" else x.astype(np.float64)
        return seen @ dequantize_weight(*self.raw, **self.sizes).T

    def assert_close(self, out: np.ndarray, x: np.ndarray, activations: Activations) -> None:
        """Within a few roundings of the sum of absolute products."""
        magnitude = np.abs(x).astype(np.float64) @ np.abs(dequantize_weight(*self.raw, **self.sizes)).T
        error = np.abs(out - self.expected(x, activations))
        assert (error <= 1e-6 * magnitude + 1e-40).all(), f"worst {np.max(error / (magnitude + 1e-40)):.2e}"


def random_weight(
    rng: np.random.Generator, n: int, k: int, bits: int, block_size: int, zero_points: str = "none"
) -> Weight:
    blocks = -(-k // block_size)
    b = rng.integers(0, 256, (n, blocks, block_size * bits // 8), dtype=np.uint8)
    scales = (rng.standard_normal((n, blocks)) * 0.05).astype(np.float32)
    points: Any = None
    if zero_points == "packed":
        points = rng.integers(0, 256, (n, -(-blocks * bits // 8)), dtype=np.uint8)
    elif zero_points == "fractions":
        points = (rng.random((n, blocks)) * 15).astype(np.float32)
    sizes = {"n": n, "k": k, "bits": bits, "block_size": block_size}
    return Weight((b, scales, points), sizes, pack_matrix(b, scales, points, **sizes))


BLOCK_SIZES = (16, 32, 48, 64, 128, 240, 256)
ZERO_POINTS = ("none", "packed", "fractions")
# Compiling is what takes time. Half of these always: of each size every width and every kind of activations, with zero
# points that change from one to the next; few of the others.
FORMS = [
    pytest.param(
        block_size,
        zero_points,
        bits,
        activations,
        marks=pytest.mark.drawn(2 if (i + j + k) % 3 == ZERO_POINTS.index(zero_points) else 16),
    )
    for i, block_size in enumerate(BLOCK_SIZES)
    for zero_points in ZERO_POINTS
    for j, bits in enumerate((4, 8))
    for k, activations in enumerate(("int8", "fp32"))
]


@pytest.mark.parametrize(("block_size", "zero_points", "bits", "activations"), FORMS)
def test_equals_reference(
    rng: np.random.Generator, normal: Normal, activations: Activations, bits: int, block_size: int, zero_points: str
) -> None:
    """Five rows: a group of four and one alone. Odd N; K that does not fill its last block."""
    weight = random_weight(rng, 45, 3 * block_size - 9, bits, block_size, zero_points)
    x = normal(5, weight.matrix.columns)
    weight.assert_close(multiply(weight.matrix, x, activations=activations), x, activations)


@pytest.mark.oracle
@pytest.mark.parametrize("block_size", [32, 64])
def test_rounding_is_that_of_onnxruntime(
    onnxruntime_node: Callable[..., Any], rng: np.random.Generator, normal: Normal, block_size: int
) -> None:
    """Rounding activations to 8 bits costs both of us the same: our difference to them is far below that cost."""
    n, k = 64, 256
    b = rng.integers(0, 256, (n, k // block_size, block_size // 2), dtype=np.uint8)
    x, scales = normal(8, k), np.abs(normal(n, k // block_size))
    sizes = {"n": n, "k": k, "bits": 4, "block_size": block_size}
    (theirs,) = onnxruntime_node(
        "MatMulNBits", [x, b, scales], [0], constants=(1, 2), N=n, K=k, bits=4, block_size=block_size, accuracy_level=4
    )
    weight = Weight((b, scales, None), sizes, pack_matrix(b, scales, None, **sizes))
    ours = multiply(weight.matrix, x)
    cost = np.abs(ours - weight.expected(x, "fp32")).std()
    assert cost > 1e-3
    assert np.abs(ours - theirs).max() < 0.01 * cost


@both_activations
@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 33), (32, 32), (33, 31), (64, 257), (95, 512)])
def test_any_shape(rng: np.random.Generator, normal: Normal, activations: Activations, n: int, k: int) -> None:
    weight = random_weight(rng, n, k, 4, 32)
    x = normal(3, k)
    weight.assert_close(multiply(weight.matrix, x, activations=activations), x, activations)


def test_no_rows(rng: np.random.Generator) -> None:
    weight = random_weight(rng, 8, 32, 4, 32)
    assert multiply(weight.matrix, np.empty((0, 32), np.float32)).shape == (0, 8)


ADVERSARIAL: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "outlier channels": lambda x: x * np.where(np.arange(x.shape[1]) % 17 == 0, 3000, 1),
    "zeros": lambda x: x * 0,
    "negative zeros": lambda x: x * -0.0,
    "one nonzero": lambda x: x * (np.arange(x.shape[1]) == 5),
    "denormals": lambda x: x * 1e-40,
    "smallest denormal": lambda x: np.sign(x) * np.finfo(np.float32).smallest_subnormal,
    "tiny": lambda x: x * 1e-30,
    "huge": lambda x: x * 1e34,
    "ties": lambda x: np.rint(x * 4) + np.where(np.arange(x.shape[1]) % 32 == 0, 127.0, 0.5),
    "all equal": lambda x: x * 0 + 3,
    "largest against one": lambda x: np.where(np.arange(x.shape[1]) % 32 == 0, 1e30, x),
}


@both_activations
@both_widths
@pytest.mark.parametrize("inputs", ADVERSARIAL)
def test_adversarial_activations(
    rng: np.random.Generator, normal: Normal, activations: Activations, bits: int, inputs: str
) -> None:
    weight = random_weight(rng, 33, 100, bits, 32)
    x = ADVERSARIAL[inputs](normal(6, 100)).astype(np.float32)
    weight.assert_close(multiply(weight.matrix, x, activations=activations), x, activations)


@both_activations
@both_widths
@pytest.mark.parametrize("fill", [0x00, 0xFF])
@pytest.mark.parametrize("block_size", [32, 256])
def test_extreme_weights_do_not_overflow(
    normal: Normal, activations: Activations, bits: int, fill: int, block_size: int
) -> None:
    """Largest integers against activations that all round to +-127."""
    b = np.full((40, 2, block_size * bits // 8), fill, np.uint8)
    scales, points = np.ones((40, 2), np.float32), np.zeros((40, -(-2 * bits // 8)), np.uint8)
    sizes = {"n": 40, "k": 2 * block_size, "bits": bits, "block_size": block_size}
    weight = Weight((b, scales, points), sizes, pack_matrix(b, scales, points, **sizes))
    for x in (np.ones((5, 2 * block_size), np.float32), -np.ones((5, 2 * block_size), np.float32)):
        weight.assert_close(multiply(weight.matrix, x, activations=activations), x, activations)


@both_activations
@both_widths
@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-42, 1e30])
def test_extreme_scales(
    rng: np.random.Generator, normal: Normal, activations: Activations, bits: int, scale: float
) -> None:
    b = rng.integers(0, 256, (33, 2, 4 * bits), dtype=np.uint8)
    scales = np.full((33, 2), scale, np.float32)
    sizes = {"n": 33, "k": 64, "bits": bits, "block_size": 32}
    weight = Weight((b, scales, None), sizes, pack_matrix(b, scales, **sizes))
    x = normal(5, 64)
    weight.assert_close(multiply(weight.matrix, x, activations=activations), x, activations)


@both_activations
@both_widths
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_infinities_and_nans_reach_their_row_and_no_other(
    rng: np.random.Generator, normal: Normal, activations: Activations, bits: int, bad: float
) -> None:
    weight = random_weight(rng, 33, 96, bits, 32)
    x = normal(6, 96)
    clean = multiply(weight.matrix, x, activations=activations)
    x[2, 40] = x[5, 95] = bad
    out = multiply(weight.matrix, x, activations=activations)
    assert not np.isfinite(out[[2, 5]]).any()
    np.testing.assert_array_equal(out[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@both_activations
@both_widths
def test_a_row_alone_equals_the_row_in_a_batch(
    rng: np.random.Generator, normal: Normal, activations: Activations, bits: int
) -> None:
    weight = random_weight(rng, 70, 160, bits, 32, "packed")
    x = normal(11, 160)
    together = multiply(weight.matrix, x, activations=activations)
    alone = np.concatenate([multiply(weight.matrix, row[None], activations=activations) for row in x])
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(multiply(weight.matrix, x[3:8], activations=activations), together[3:8])


@both_activations
@both_widths
def test_threads_do_not_change_a_bit(
    rng: np.random.Generator, normal: Normal, activations: Activations, bits: int, threads: Threads
) -> None:
    weight = random_weight(rng, 300, 200, bits, 32)
    x = normal(7, 200)
    np.testing.assert_array_equal(
        multiply(weight.matrix, x, activations=activations, threads=threads),
        multiply(weight.matrix, x, activations=activations),
    )


@both_activations
@both_widths
def test_bias_and_addend(rng: np.random.Generator, normal: Normal, activations: Activations, bits: int) -> None:
    weight = random_weight(rng, 45, 64, bits, 32)
    x, bias, addend = normal(5, 64), normal(45), normal(5, 45)
    plain = multiply(weight.matrix, x, activations=activations)
    linear = BlockLinear(weight.matrix, bias, exact=activations == "fp32")
    np.testing.assert_array_equal(linear(x, addend), plain + bias + addend)
    np.testing.assert_array_equal(linear(x), plain + bias)
    np.testing.assert_array_equal(linear(x, addend=np.zeros((5, 45), np.float32)), plain + bias)


@both_activations
def test_several_callers_at_once(
    rng: np.random.Generator, normal: Normal, activations: Activations, threads: Threads
) -> None:
    """Rows of any number, by one and the same object."""
    weight = random_weight(rng, 90, 70, 4, 32)
    linear = BlockLinear(weight.matrix, exact=activations == "fp32", threads=threads)
    given = [normal(1 + rows, 70) for rows in range(8)]
    expected = [multiply(weight.matrix, x, activations=activations) for x in given]
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(linear, given * 20))
    for mine, other in zip(found, expected * 20, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_read_only_inputs(rng: np.random.Generator, normal: Normal) -> None:
    """Weights and biases are often views of a memory-mapped file."""
    weight = random_weight(rng, 8, 32, 4, 32)
    x, bias = normal(2, 32), normal(8)
    expected = multiply(weight.matrix, x, bias=bias)
    for array in (x, bias, weight.matrix.data):
        array.flags.writeable = False
    np.testing.assert_array_equal(multiply(weight.matrix, x, bias=bias), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((2, 31), np.float32)}, r"x is float32 \[2, 31\], expected C-contiguous float32 \[any, 32\]"),
        ({"x": np.zeros((2, 32))}, "x is float64"),
        ({"x": np.zeros((2, 2, 32), np.float32)}, r"x is float32 \[2, 2, 32\]"),
        ({"x": np.zeros((2, 64), np.float32)[:, ::2]}, "with strides"),
        ({"bias": np.zeros(9, np.float32)}, r"bias is float32 \[9\]"),
        ({"bias": np.zeros(8, np.float16)}, "bias is float16"),
        ({"addend": np.zeros((1, 8), np.float32)}, r"addend is float32 \[1, 8\]"),
    ],
)
def test_refuses(rng: np.random.Generator, change: dict[str, Any], message: str) -> None:
    weight = random_weight(rng, 8, 32, 4, 32)
    arguments: dict[str, Any] = {"x": np.zeros((2, 32), np.float32), "matrix": weight.matrix, **change}
    with pytest.raises(ValueError, match=message):
        multiply(**arguments)
