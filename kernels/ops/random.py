"""Random numbers: each run draws new ones, unless the node has a seed, which makes every run the same."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..registry import Kernel, NodeSpec, register
from .casting import dtype_of
from .support import checked_shape

Draw = Callable[[np.random.Generator, tuple[int, ...]], Any]


def _generator(spec: NodeSpec) -> Callable[[], np.random.Generator]:
    seed = spec.attributes.get("seed")
    if seed is None:
        return np.random.default_rng
    bits = struct.unpack("<I", struct.pack("<f", float(seed)))[0]
    return lambda: np.random.default_rng(bits)


def _draw(spec: NodeSpec) -> Draw:
    a = spec.attributes
    if "Normal" in spec.op_type:
        mean, scale = float(a.get("mean", 0.0)), float(a.get("scale", 1.0))
        return lambda generator, shape: generator.normal(mean, scale, shape)
    low, high = float(a.get("low", 0.0)), float(a.get("high", 1.0))
    return lambda generator, shape: generator.uniform(low, high, shape)


@register("RandomNormal")
@register("RandomUniform")
def random_of_shape(spec: NodeSpec) -> Kernel:
    """Of the shape in the attributes."""
    draw, generator, dtype = _draw(spec), _generator(spec), dtype_of(int(spec.attributes.get("dtype", 1)))
    shape = checked_shape(spec, spec.attributes.get("shape", ()), 8)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (np.asarray(draw(generator(), shape)).astype(dtype),)

    return kernel


@register("RandomNormalLike")
@register("RandomUniformLike")
def random_like(spec: NodeSpec) -> Kernel:
    """Of the input's shape, and its type unless another is given."""
    draw, generator, wanted = _draw(spec), _generator(spec), spec.attributes.get("dtype")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        dtype = inputs[0].dtype if wanted is None else dtype_of(int(wanted))
        return (np.asarray(draw(generator(), inputs[0].shape)).astype(dtype),)

    return kernel


@register("Bernoulli", since_version=15)
def bernoulli(spec: NodeSpec) -> Kernel:
    """1 with the probability that each element says."""
    generator, wanted = _generator(spec), spec.attributes.get("dtype")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        dtype = inputs[0].dtype if wanted is None else dtype_of(int(wanted))
        return ((generator().random(inputs[0].shape) < inputs[0]).astype(dtype),)

    return kernel


@register("Multinomial", since_version=7)
def multinomial(spec: NodeSpec) -> Kernel:
    """Per row so many samples of classes with the given log-probabilities."""
    generator, count = _generator(spec), int(spec.attributes.get("sample_size", 1))
    dtype = dtype_of(int(spec.attributes.get("dtype", 6)))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        logits = inputs[0].astype(np.float64)
        checked_shape(spec, (len(logits), count), 8)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        steps = np.cumsum(weights, axis=1)
        draws = generator().random((len(logits), count)) * steps[:, -1:]
        picked = [np.searchsorted(row, draw, side="right") for row, draw in zip(steps, draws, strict=True)]
        return (np.minimum(np.array(picked).reshape(draws.shape), logits.shape[1] - 1).astype(dtype),)

    return kernel
