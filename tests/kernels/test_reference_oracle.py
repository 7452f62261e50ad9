"""The NumPy references against onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from genai.kernels.reference.activations import bias_gelu, fast_gelu, gelu, quick_gelu
from genai.kernels.reference.attention import group_query_attention, multi_head_attention
from genai.kernels.reference.normalization import (
    layer_normalization,
    simplified_layer_normalization,
    skip_layer_normalization,
    skip_simplified_layer_normalization,
)
from genai.kernels.reference.quantized import gather_block_quantized, matmul_nbits
from genai.kernels.reference.rope import rotary_embedding

pytestmark = pytest.mark.oracle

Node = Callable[..., list[np.ndarray]]
Normal = Callable[..., np.ndarray]


def assert_close(ours: np.ndarray, theirs: np.ndarray, tolerance: float = 2e-6) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance * max(1e-3, float(np.abs(theirs).max())))


# onnxruntime has no 8-bit kernel for floating-point zero points.
@pytest.mark.parametrize(
    ("bits", "zero_points"), [(4, "none"), (4, "packed"), (4, "float"), (8, "none"), (8, "packed")]
)
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_matmul_nbits(
    onnxruntime_node: Node, rng: np.random.Generator, normal: Normal, bits: int, block_size: int, zero_points: str
) -> None:
    n, k = 20, 3 * block_size - 7
    b = rng.integers(0, 256, (n, 3, block_size * bits // 8), dtype=np.uint8)
    a, scales, bias = normal(2, 5, k), normal(n, 3) * 0.1, normal(n)
    points: Any = None
    if zero_points == "packed":
        points = rng.integers(0, 256, (n, -(-3 * bits // 8)), dtype=np.uint8)
    elif zero_points == "float":
        points = (7 + normal(n, 3)).astype(np.float32)
    attributes = {"N": n, "K": k, "bits": bits, "block_size": block_size}
    (theirs,) = onnxruntime_node(
        "MatMulNBits", [a, b, scales, points, None, bias], [0], constants=(1, 2, 3, 5), accuracy_level=1, **attributes
    )
    ours = matmul_nbits(a, b, scales, points, bias, n=n, k=k, bits=bits, block_size=block_size)
    assert_close(ours, theirs, 5e-6)


@pytest.mark.parametrize("block_size", [32, 64])
def test_matmul_nbits_with_int8_activations(
    onnxruntime_node: Node, rng: np.random.Generator, normal: Normal, block_size: int
) -> None:
    """Rounding activations to 8 bits costs both of us the same: our difference to them is far below that cost."""
    n, k = 64, 256
    b = rng.integers(0, 256, (n, k // block_size, block_size // 2), dtype=np.uint8)
    a, scales = normal(8, k), np.abs(normal(n, k // block_size))
    sizes = {"n": n, "k": k, "bits": 4, "block_size": block_size}
    (theirs,) = onnxruntime_node(
        "MatMulNBits", [a, b, scales], [0], constants=(1, 2), N=n, K=k, bits=4, block_size=block_size, accuracy_level=4
    )
    exact = matmul_nbits(a, b, scales, **sizes)
    ours = matmul_nbits(a, b, scales, accuracy_level=4, **sizes)
    cost = np.abs(ours - exact).std()
    assert cost > 1e-3
    assert np.abs(ours - theirs).max() < 0.01 * cost


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("with_zero_points", [False, True])
def test_gather_block_quantized_bytes(
    onnxruntime_node: Node, rng: np.random.Generator, normal: Normal, bits: int, with_zero_points: bool
) -> None:
    rows, columns, block_size = 10, 96, 32
    data = rng.integers(0, 256, (rows, columns * bits // 8), dtype=np.uint8)
    scales = normal(rows, columns // block_size)
    points = rng.integers(0, 256, (rows, -(-3 * bits // 8)), dtype=np.uint8) if with_zero_points else None
    indices = np.array([[0, 9, 3], [3, -1, 5]], np.int64)
    inputs = [data, indices, scales, points] if with_zero_points else [data, indices, scales]
    attributes = {"bits": bits, "block_size": block_size, "gather_axis": 0, "quantize_axis": 1}
    (theirs,) = onnxruntime_node("GatherBlockQuantized", inputs, [0], **attributes)
    assert_close(gather_block_quantized(data, indices, scales, points, **attributes), theirs, 1e-6)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4])
@pytest.mark.parametrize(("gather_axis", "quantize_axis"), [(0, 1), (0, 2), (1, 0), (2, 1), (-1, 0)])
def test_gather_block_quantized_nibbles(
    onnxruntime_node: Node, rng: np.random.Generator, normal: Normal, dtype: Any, gather_axis: int, quantize_axis: int
) -> None:
    shape, block_size = (34, 40, 36), 16
    low = -8 if dtype is ml_dtypes.int4 else 0
    data = rng.integers(low, low + 16, shape).astype(dtype)
    blocks = [-(-size // block_size) if axis == quantize_axis else size for axis, size in enumerate(shape)]
    scales, points = normal(*blocks), rng.integers(low, low + 16, blocks).astype(dtype)
    indices = np.array([0, 33, 7], np.int64)
    attributes = {"block_size": block_size, "gather_axis": gather_axis, "quantize_axis": quantize_axis}
    (theirs,) = onnxruntime_node(
        "GatherBlockQuantized", [data, indices, scales, points], [0], constants=(0, 3), **attributes
    )
    assert_close(gather_block_quantized(data, indices, scales, points, **attributes), theirs, 1e-6)


def test_gather_block_quantized_gives_zeros_for_unknown_rows(
    onnxruntime_node: Node, rng: np.random.Generator, normal: Normal
) -> None:
    data, scales = rng.integers(0, 256, (4, 32), dtype=np.uint8), normal(4, 1)
    indices = np.array([1, 4, -5, -4], np.int64)
    attributes = {"bits": 8, "block_size": 32, "gather_axis": 0, "quantize_axis": 1}
    (theirs,) = onnxruntime_node("GatherBlockQuantized", [data, indices, scales], [0], **attributes)
    ours = gather_block_quantized(data, indices, scales, **attributes)
    assert_close(ours, theirs, 1e-6)
    assert not ours[1:3].any()


BATCH, HEADS, KV_HEADS, HEAD_SIZE, POSITIONS = 2, 4, 2, 16, 64

GQA_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "window shorter than the prompt": {"local_window_size": 3},
    "window of one token": {"local_window_size": 1},
    "window as long as the prompt": {"local_window_size": 7},
    "softcap": {"softcap": 1.5},
    "smooth softmax": {"smooth_softmax": 1},
    "rotary": {"do_rotary": 1},
    "rotary interleaved": {"do_rotary": 1, "rotary_interleaved": 1},
    "rotary and window": {"do_rotary": 1, "local_window_size": 4, "softcap": 2.0},
}


class GroupQueryCase:
    """The same GroupQueryAttention inputs, for them and for us."""

    def __init__(self, node: Node, normal: Normal, attributes: dict[str, Any], **extra: Any) -> None:
        self.node = node
        self.attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, **attributes}
        width = 8 if extra.pop("partial", False) else HEAD_SIZE // 2
        rotary = bool(attributes.get("do_rotary"))
        self.caches = [normal(POSITIONS, width) for _ in range(2)] if rotary else [None, None]
        self.extra = extra

    def compare(self, qkv: list[Any], past: list[Any], totals: list[int], longest: int) -> list[np.ndarray]:
        seqlens, total = np.array(totals, np.int32) - 1, np.array(longest, np.int32)
        named = [self.extra.get(name) for name in ("position_ids", "attention_bias", "head_sink")]
        inputs = [*qkv, *past, seqlens, total, *self.caches, *named]
        theirs = self.node("GroupQueryAttention", inputs, [0, 1, 2], **self.attributes)
        ours = group_query_attention(*qkv, *past, seqlens, total, *self.caches, *named, **self.attributes)
        length = qkv[0].shape[1]
        for b, count in enumerate(totals):
            # Rows and cache entries of padding hold nothing of meaning.
            rows = min(length, count) if length == longest else length
            assert_close(ours[0][b, :rows], theirs[0][b, :rows], 5e-6)
            for mine, other in zip(ours[1:], theirs[1:], strict=True):
                assert mine.shape == other.shape
                assert_close(mine[b, :, :count], other[b, :, :count], 5e-6)
        return theirs


def projections(normal: Normal, length: int, packed: bool) -> list[Any]:
    sizes = [HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE]
    return [normal(BATCH, length, sum(sizes)), None, None] if packed else [normal(BATCH, length, n) for n in sizes]


@pytest.mark.parametrize("variant", GQA_VARIANTS)
@pytest.mark.parametrize("packed", [False, True])
def test_group_query_attention_prompt_then_tokens(
    onnxruntime_node: Node, normal: Normal, variant: str, packed: bool
) -> None:
    """A right-padded first prompt, one token more, then a chunk of three (onnxruntime: of one sequence only)."""
    case = GroupQueryCase(onnxruntime_node, normal, GQA_VARIANTS[variant])
    empty = np.zeros((BATCH, KV_HEADS, 0, HEAD_SIZE), np.float32)
    present = case.compare(projections(normal, 7, packed), [empty, empty], [7, 5], 7)[1:]
    present = case.compare(projections(normal, 1, packed), present, [8, 6], 8)[1:]
    chunk = [None if x is None else x[:1] for x in projections(normal, 3, packed)]
    case.compare(chunk, [x[:1] for x in present], [11], 11)


def test_group_query_attention_shared_buffer(onnxruntime_node: Node, normal: Normal) -> None:
    """A cache longer than the sequences, as with past_present_share_buffer."""
    case = GroupQueryCase(onnxruntime_node, normal, {"do_rotary": 1})
    past = [normal(BATCH, KV_HEADS, 20, HEAD_SIZE) for _ in range(2)]
    case.compare(projections(normal, 1, True), past, [8, 13], 13)


def test_group_query_attention_partial_rotary(onnxruntime_node: Node, normal: Normal) -> None:
    """Head size 32, of which 16 elements are rotated."""
    heads, kv_heads, size = 2, 1, 32
    caches = [normal(POSITIONS, 8) for _ in range(2)]
    qkv = [normal(1, 5, heads * size), normal(1, 5, kv_heads * size), normal(1, 5, kv_heads * size)]
    past = [np.zeros((1, kv_heads, 0, size), np.float32)] * 2
    inputs = [*qkv, *past, np.array([4], np.int32), np.array(5, np.int32), *caches]
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads, "do_rotary": 1}
    theirs = onnxruntime_node("GroupQueryAttention", inputs, [0, 1, 2], **attributes)
    for mine, other in zip(group_query_attention(*inputs, **attributes), theirs, strict=True):
        assert_close(mine, other, 5e-6)


@pytest.mark.parametrize("extra", ["position_ids", "attention_bias", "head_sink", "head_sink and window"])
def test_group_query_attention_optional_inputs(onnxruntime_node: Node, normal: Normal, extra: str) -> None:
    values: dict[str, Any] = {
        "position_ids": np.tile(np.arange(3, 9, dtype=np.int64), (BATCH, 1)),
        "attention_bias": normal(1, HEADS, 6, 6),
        "head_sink": normal(HEADS) * 2,
    }
    name = extra.split()[0]
    attributes = {"position_ids": {"do_rotary": 1}, "head_sink and window": {"local_window_size": 2}}.get(extra, {})
    case = GroupQueryCase(onnxruntime_node, normal, attributes, **{name: values[name]})
    empty = np.zeros((BATCH, KV_HEADS, 0, HEAD_SIZE), np.float32)
    case.compare(projections(normal, 6, False), [empty, empty], [6, 6], 6)


def test_group_query_attention_softcap_with_bias(onnxruntime_node: Node, normal: Normal) -> None:
    """The cap comes before the bias."""
    case = GroupQueryCase(onnxruntime_node, normal, {"softcap": 1.0}, attention_bias=normal(1, 1, 6, 6))
    empty = np.zeros((BATCH, KV_HEADS, 0, HEAD_SIZE), np.float32)
    case.compare(projections(normal, 6, False), [empty, empty], [6, 6], 6)


def test_group_query_attention_norms_are_an_rms_norm_per_head(normal: Normal) -> None:
    """onnxruntime's CPU kernel rejects these inputs; the contract says: per head, before the rotation."""
    qkv, weights = projections(normal, 4, False), [normal(HEAD_SIZE), normal(HEAD_SIZE)]
    empty = np.zeros((BATCH, KV_HEADS, 0, HEAD_SIZE), np.float32)
    caches = [normal(POSITIONS, HEAD_SIZE // 2) for _ in range(2)]
    common = (empty, empty, np.array([3, 3], np.int32), 4, *caches)
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "do_rotary": True}
    normed = [
        simplified_layer_normalization(x.reshape(BATCH, 4, -1, HEAD_SIZE), w, epsilon=1e-3).reshape(x.shape)
        for x, w in zip(qkv, weights, strict=False)
    ]
    expected = group_query_attention(*normed, qkv[2], *common, **attributes)
    ours = group_query_attention(
        *qkv, *common, q_norm_weight=weights[0], k_norm_weight=weights[1], qk_norm_epsilon=1e-3, **attributes
    )
    for mine, other in zip(ours, expected, strict=True):
        assert_close(mine, other)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("layout", ["3-D", "4-D", "3-D partial", "first position"])
def test_rotary_embedding(onnxruntime_node: Node, normal: Normal, interleaved: int, layout: str) -> None:
    width = 4 if layout == "3-D partial" else 8
    cos, sin = normal(POSITIONS, width), normal(POSITIONS, width)
    x = normal(2, 3, 5, 16) if layout == "4-D" else normal(2, 5, 48)
    positions = np.array([9], np.int64)
    if layout != "first position":
        positions = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]], np.int64)
    attributes = {"interleaved": interleaved}
    if layout == "3-D partial":
        attributes |= {"num_heads": 3, "rotary_embedding_dim": 8}
    (theirs,) = onnxruntime_node("RotaryEmbedding", [x, positions, cos, sin], [0], **attributes)
    assert_close(rotary_embedding(x, positions, cos, sin, **attributes), theirs)


def test_simplified_layer_normalization(onnxruntime_node: Node, normal: Normal) -> None:
    x, scale = normal(2, 3, 50), normal(50)
    (theirs,) = onnxruntime_node("SimplifiedLayerNormalization", [x, scale], [0], domain="", epsilon=1e-3, axis=-1)
    assert_close(simplified_layer_normalization(x, scale, epsilon=1e-3), theirs)


def test_layer_normalization(onnxruntime_node: Node, normal: Normal) -> None:
    x, scale, bias = normal(2, 3, 50) + 1, normal(50), normal(50)
    (theirs,) = onnxruntime_node("LayerNormalization", [x, scale, bias], [0], domain="", epsilon=1e-3, axis=-1)
    assert_close(layer_normalization(x, scale, bias, epsilon=1e-3), theirs)


@pytest.mark.parametrize("with_bias", [False, True])
def test_skip_simplified_layer_normalization(onnxruntime_node: Node, normal: Normal, with_bias: bool) -> None:
    x, skip, gamma = normal(2, 3, 50), normal(2, 3, 50), normal(50)
    bias = [normal(50)] if with_bias else []
    inputs = [x, skip, gamma, *bias]
    theirs = onnxruntime_node("SkipSimplifiedLayerNormalization", inputs, [0, 3], epsilon=1e-4)
    for mine, other in zip(skip_simplified_layer_normalization(*inputs, epsilon=1e-4), theirs, strict=True):
        assert_close(mine, other)


@pytest.mark.parametrize("with_bias", [False, True])
def test_skip_layer_normalization(onnxruntime_node: Node, normal: Normal, with_bias: bool) -> None:
    x, skip, gamma, beta = normal(2, 3, 50), normal(2, 3, 50), normal(50), normal(50)
    inputs = [x, skip, gamma, beta, *([normal(50)] if with_bias else [])]
    theirs = onnxruntime_node("SkipLayerNormalization", inputs, [0, 3], epsilon=1e-4)
    for mine, other in zip(skip_layer_normalization(*inputs, epsilon=1e-4), theirs, strict=True):
        assert_close(mine, other, 5e-6)


@pytest.mark.parametrize("extra", ["plain", "bias", "padding", "causal", "attention bias", "past"])
def test_multi_head_attention(onnxruntime_node: Node, normal: Normal, extra: str) -> None:
    heads, size, keys = 3, 16, 6
    length = keys if extra == "causal" else 4
    qkv = [normal(2, length, heads * size), normal(2, keys, heads * size), normal(2, keys, heads * size)]
    bias = normal(3 * heads * size) if extra == "bias" else None
    mask = np.array([[1] * 6, [1, 1, 1, 1, 0, 0]], np.int32) if extra == "padding" else None
    attention_bias = normal(1, heads, length, keys) if extra == "attention bias" else None
    past = [normal(2, heads, 5, size) for _ in range(2)] if extra == "past" else [None, None]
    if extra == "past":
        qkv = [x[:, :length] for x in qkv]
    attributes = {"num_heads": heads, "scale": 0.2, "unidirectional": int(extra == "causal")}
    inputs = [*qkv, bias, mask, attention_bias, *past]
    # onnxruntime hides padding with a finite number; far below any score it is as good as minus infinity.
    theirs = onnxruntime_node("MultiHeadAttention", inputs, [0, 1, 2], **attributes, mask_filter_value=-1e6)
    for mine, other in zip(multi_head_attention(*inputs, **attributes), theirs, strict=True):
        assert_close(mine, other, 5e-6)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(onnxruntime_node: Node, normal: Normal, approximate: str) -> None:
    x = normal(4, 50) * 3
    (theirs,) = onnxruntime_node("Gelu", [x], [0], domain="", approximate=approximate)
    assert_close(gelu(x, approximate=approximate), theirs, 1e-6)


def test_gelus_of_com_microsoft(onnxruntime_node: Node, normal: Normal) -> None:
    x, bias = normal(4, 50) * 3, normal(50)
    assert_close(gelu(x), onnxruntime_node("Gelu", [x], [0])[0], 1e-6)
    assert_close(bias_gelu(x, bias), onnxruntime_node("BiasGelu", [x, bias], [0])[0], 1e-6)
    assert_close(fast_gelu(x), onnxruntime_node("FastGelu", [x], [0])[0], 5e-6)
    assert_close(fast_gelu(x, bias), onnxruntime_node("FastGelu", [x, bias], [0])[0], 5e-6)
    assert_close(quick_gelu(x, alpha=1.3), onnxruntime_node("QuickGelu", [x], [0], alpha=1.3)[0], 1e-6)
