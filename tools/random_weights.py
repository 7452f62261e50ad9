"""Random weights of a decoder. Each depends only on the seed and its name, and is identical on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from genai.convert import DecoderSpec
from genai.convert.tensors import Shape, tensor_shapes


def random_tensor(name: str, shape: Shape, seed: int, *, norm_mean: float = 1.0) -> NDArray[np.float32]:
    """Return one tensor: matrices keep the magnitude of inputs; bias elements are near 0, others near norm_mean."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    values = np.random.Generator(np.random.PCG64(int.from_bytes(digest))).standard_normal(shape, np.float32)
    if len(shape) >= 2:
        return values * np.float32(shape[-1] ** -0.5)
    values *= np.float32(0.2)
    if name.endswith("A_log"):  # slow decays, so that states depend on many tokens
        return values - np.float32(2)
    return values if name.endswith("bias") else values + np.float32(norm_mean)


class RandomWeights(Mapping[str, NDArray[np.float32]]):
    """Weights by Hugging Face name, drawn at every look-up, so that a large model takes no memory.

    Matrices keep the magnitude of their inputs, so logits have a standard deviation of about 1. Norm weights are close
    to 1 (minus the architecture's offset), and biases are close to 0.
    """

    def __init__(self, spec: DecoderSpec, seed: int = 0) -> None:
        self._shapes = tensor_shapes(spec)
        self._norm_mean = 1 - spec.norm_weight_offset
        self._seed = seed

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        return random_tensor(name, self._shapes[name], self._seed, norm_mean=self._norm_mean)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
