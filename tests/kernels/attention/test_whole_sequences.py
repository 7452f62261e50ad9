"""Attention of encoders: every row sees the whole sequence, or the tokens before and after it within a window."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.attention.panels import BLOCK_TOKENS, CHUNK_TOKENS
from genai.kernels.cpu.attention.prefill import uses_tiles
from genai.kernels.cpu.program.step_table import ErrorCode
from genai.kernels.device import StepError
from tests.instructions import other_instructions
from tests.kernels.attention.test_attention import assert_close
from tests.kernels.attention.test_refusals import assert_refused

MakeStep = Callable[..., Any]
LENGTHS = [1, 2, 31, 32, 33, CHUNK_TOKENS, BLOCK_TOKENS + 1, 3 * CHUNK_TOKENS + 5]
LONGEST = max(LENGTHS)


def bias_of(heads: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((heads, 2 * tokens - 1)).astype(np.float32)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 9},
    "window of one": {"window": 1},
    "window across chunks": {"window": CHUNK_TOKENS + 1},
    "window longer than a sequence": {"window": 200},
    "softcap": {"softcap": 1.5, "scale": 0.7},
    "bias": {"bias": bias_of(4, LONGEST)},
    "bias of more tokens": {"bias": bias_of(4, LONGEST + 70)},
    "all": {"scale": 0.3, "window": 50, "softcap": 5.0, "bias": bias_of(4, LONGEST), "smooth_softmax": True},
}
variants = pytest.mark.parametrize("variant", VARIANTS)


def whole(make_step: MakeStep, lengths: list[int], **options: Any) -> Any:
    """A step of whole sequences, all with prefill numerics."""
    return make_step([(length, length) for length in lengths], min_prefill=0, **options)


def attention(step: Any, *, scale: float = 0.0, window: int = -1, softcap: float = 0.0, bias: Any = None,
              smooth_softmax: bool = False) -> np.ndarray:  # fmt: skip
    """The definition in float64, one row of one head at a time."""
    heads, kv_heads = step.query.shape[1], step.key.shape[1]
    out = np.zeros((*step.query.shape[:2], step.value.shape[2]))
    for first, end in zip(step.cu_seqlens_q, step.cu_seqlens_q[1:], strict=False):
        for head in range(heads):
            keys, values = (x[first:end, head * kv_heads // heads].astype(float) for x in (step.key, step.value))
            for i in range(end - first):
                scores = keys @ step.query[first + i, head].astype(float) * (scale or 1 / math.sqrt(keys.shape[1]))
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                if bias is not None:
                    zero = bias.shape[1] // 2
                    scores = scores + bias[head, zero - i : zero - i + len(scores)]
                seen = [j for j in range(end - first) if window < 0 or abs(j - i) < window]
                weights = np.exp(scores[seen])
                out[first + i, head] = weights @ values[seen] / (weights.sum() + smooth_softmax)
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float16, "int8"], ids=["fp32", "fp16", "8"])
@variants
def test_equals_the_reference(make_step: MakeStep, dtype: Any, variant: str) -> None:
    step = whole(make_step, LENGTHS, dtype=dtype)
    out = step.run(causal=False, **VARIANTS[variant])
    assert_close(step, out, step.expected(causal=False, **VARIANTS[variant]))


@variants
def test_the_reference_equals_the_definition(make_step: MakeStep, variant: str) -> None:
    step = whole(make_step, [3, 70, LONGEST], dtype=np.float32)
    step.run(causal=False, **VARIANTS[variant])  # stores the keys
    np.testing.assert_allclose(
        step.expected(causal=False, **VARIANTS[variant]), attention(step, **VARIANTS[variant]), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "v_head_size"), [
    (1, 1, 1, 1), (12, 12, 32, 32), (12, 12, 64, 64), (6, 2, 10, 50), (7, 7, 33, 31), (8, 1, 80, 80), (3, 3, 256, 128),
])  # fmt: skip
def test_any_head_shape(make_step: MakeStep, heads: int, kv_heads: int, head_size: int, v_head_size: int) -> None:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_size": head_size, "v_head_size": v_head_size}
    step, options = whole(make_step, [5, 130, 257], dtype=np.float32, **sizes), {"bias": bias_of(heads, 257)}
    assert_close(step, step.run(causal=False, **options), step.expected(causal=False, **options))


@variants
def test_a_sequence_alone_equals_the_sequence_in_a_step(make_step: MakeStep, variant: str) -> None:
    step = whole(make_step, LENGTHS, dtype=np.float16)
    out = step.run(threads=2, causal=False, **VARIANTS[variant])
    for sequence, first in enumerate(step.cu_seqlens_q[:-1]):
        alone = step.alone(sequence).run(causal=False, **VARIANTS[variant])
        np.testing.assert_array_equal(out[first : first + len(alone)], alone)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_values_reach_only_the_rows_that_see_them(make_step: MakeStep, bad: float) -> None:
    step = whole(make_step, [200, 150], dtype=np.float32)
    clean = step.run(causal=False, window=20)
    step.value[160, :, 3] = bad
    out, sees = step.run(causal=False, window=20), np.zeros(350, bool)
    sees[160 - 19 : 160 + 20] = True
    assert not np.isfinite(out[sees][:, :, 3]).any()
    exact = 0 if not uses_tiles(step.layer.kind) else 1e-3
    np.testing.assert_allclose(out[~sees], clean[~sees], rtol=0, atol=exact)
    np.testing.assert_allclose(np.delete(out, 3, axis=2), np.delete(clean, 3, axis=2), rtol=0, atol=max(exact, 1e-6))


def test_a_sequence_longer_than_the_bias(make_step: MakeStep) -> None:
    step = whole(make_step, [40], dtype=np.float32)
    step.run(causal=False, bias=bias_of(4, 40))
    assert_refused(step, ErrorCode.BIAS_POSITION, causal=False, bias=bias_of(4, 39))
    with pytest.raises(StepError, match="attention bias: 39"):
        step.expected(causal=False, bias=bias_of(4, 39))


@pytest.mark.parametrize("options", [{}, {"causal": True}])
def test_a_bias_needs_an_odd_width_and_attention_to_later_tokens(make_step: MakeStep, options: Any) -> None:
    step = whole(make_step, [3], dtype=np.float32)
    bias = bias_of(4, 40)[:, : 79 if options else 78].copy()
    with pytest.raises(ValueError, match="expected an odd number, and attention to later tokens"):
        step.run(**{"causal": False, **options}, bias=bias)


@pytest.mark.parametrize(("sequences", "min_prefill"), [([(5, 5)], 32), ([(5, 9)], 0)])
def test_steps_without_whole_sequences_are_refused(make_step: MakeStep, sequences: Any, min_prefill: int) -> None:
    step = make_step(sequences, min_prefill=min_prefill)
    with pytest.raises(StepError, match="needs whole sequences with prefill numerics"):
        step.step.check_whole_sequences()
    with pytest.raises(StepError, match="needs whole sequences with prefill numerics"):
        step.expected(causal=False)


@other_instructions
def test_other_instruction_sets(name: str, with_instructions: Callable[..., None]) -> None:
    """Run this file again in a process that uses another instruction set."""
    with_instructions(name, __file__)
