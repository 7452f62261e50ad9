"""Scalings of the rotary embedding, as data: methods that extend the context beyond the original training length."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """Dynamic NTK: beyond `original_max_position_embeddings` tokens the base grows with the length.

    A token at position p is rotated with the base for a sequence of p + 1 tokens. Decoding token by token has the same
    result, because cached keys keep their rotation.
    """

    factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling: stretches long wavelengths by `factor`, keeps short ones, and blends the two in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): keeps high frequencies, divides low ones by `factor`, and blends the two in between.

    Attributes:
        attention_factor: factor for cosines and sines; None means 0.1 * ln(factor) + 1.
        truncate: True to round the bounds of the blend to whole dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class LongRope:
    """LongRoPE: one divisor per frequency, with separate lists for short and long sequences.

    Attributes:
        short_factor: divisors for sequences of up to `original_max_position_embeddings` tokens.
        long_factor: divisors for longer sequences.
        attention_factor: factor for cosines and sines; None means sqrt(1 + ln(context / original) / ln(original)).
        long_attention_factor: attention_factor for longer sequences; None means the same value.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float | None = None
    long_attention_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class FrequencyFactors:
    """One divisor per frequency, independent of the length, as GGUF files store them for Llama 3.

    Attributes:
        divisors: one divisor per frequency.
        attention_factor: factor for cosines and sines.
    """

    divisors: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ProportionalRope:
    """Rotation of only a part of each head, with the frequencies of a rotation of the whole head (Gemma 4).

    Attributes:
        share: fraction of the frequencies that rotate; the others are 0.
        factor: divisor of all frequencies.
    """

    share: float
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """Queries multiplied by 1 + beta * ln(1 + floor((position + first) / length)).

    The scaling keeps attention sharp at far positions.

    Attributes:
        beta: strength of the scaling.
        length: number of positions in one step; queries in the first step do not change.
        first: number of the first position.
        rotated: True if the rotated queries of all layers are scaled (Ministral 3); False if the queries of the layers
            without rotation are scaled (Llama 4).
    """

    beta: float
    length: int
    first: int = 0
    rotated: bool = True

    def factors(self, at: range) -> NDArray[np.float32]:
        """Return the factor at each position."""
        steps = np.floor((np.array(at, np.float32) + np.float32(self.first)) / np.float32(self.length))
        found: NDArray[np.float32] = np.float32(1) + np.float32(self.beta) * np.log(np.float32(1) + steps)
        return found


RopeScaling = (
    LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRope | FrequencyFactors | ProportionalRope
)


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """Return the YaRN paper's factor for cosines and sines."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def long_rope_magnitude(factor: float, original: int) -> float:
    """Return LongRoPE's factor for cosines and sines, which keeps attention as sharp over a longer context."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
