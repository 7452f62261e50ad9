"""How rotary embeddings are stretched beyond the length that a model was first trained on, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """Dynamic NTK: beyond `original_max_position_embeddings` the base grows with the length.

    A token at position p is rotated with the base for a sequence of p + 1 tokens, which is what a decoder does that
    appends token after token: what was cached keeps its rotation.
    """

    factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's rotary scaling: long wavelengths are stretched by `factor`, short ones kept, others blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): frequencies that turn often are kept, slow ones stretched, others blended.

    attention_factor multiplies cosines and sines; None means 0.1 * ln(factor) + 1. `truncate` rounds the bounds of the
    blend to whole dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class LongRope:
    """LongRoPE: a divisor per frequency, one list up to `original_max_position_embeddings` tokens and one beyond.

    attention_factor multiplies cosines and sines; None means sqrt(1 + ln(context / original) / ln(original)).
    long_attention_factor is that of the longer tables; None means the same.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float | None = None
    long_attention_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class FrequencyFactors:
    """A divisor per frequency, whatever the length, as GGUF files have them for Llama 3.

    attention_factor multiplies cosines and sines.
    """

    divisors: tuple[float, ...]
    attention_factor: float = 1.0


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRope | FrequencyFactors


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """What the YaRN paper multiplies cosines and sines by."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def long_rope_magnitude(factor: float, original: int) -> float:
    """The same for LongRoPE, to keep attention as sharp over a longer context."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
