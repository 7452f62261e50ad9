"""What the classifiers of ai.onnx.ml share: labels, the second class of a binary score, and post-transforms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..registry import KernelError, NodeSpec
from .activations import sigmoid

_SMALL = 1e-7


def labels_of(spec: NodeSpec, integers: str, strings: str) -> Any:
    """The class labels: int64, or objects for strings.

    Raises:
        KernelError: the node names no classes.
    """
    numbers, texts = spec.attributes.get(integers), spec.attributes.get(strings)
    if texts:
        result = np.empty(len(texts), object)
        result[:] = texts
        return result
    if not numbers:
        raise KernelError(f"{spec.op_type}: no class labels")
    return np.asarray(numbers, np.int64)


def post_transform(spec: NodeSpec) -> Callable[[Any], Any]:
    """What the attribute `post_transform` does to scores [rows, classes].

    Raises:
        KernelError: it is unknown.
    """
    name = str(spec.attributes.get("post_transform", "NONE"))
    if name not in TRANSFORMS:
        raise KernelError(f"{spec.op_type}: post_transform {name!r} is unknown")
    return TRANSFORMS[name]


def _softmax(scores: Any) -> Any:
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def _softmax_zero(scores: Any) -> Any:
    """Softmax in which scores of zero stay (nearly) zero."""
    largest = scores.max(axis=1, keepdims=True)
    weights = np.where(np.abs(scores) > _SMALL, np.exp(scores - largest), scores * np.exp(-largest))
    total = weights.sum(axis=1, keepdims=True)
    return np.where(total == 0, 0.5, weights / np.where(total == 0, 1, total))


def probit(values: Any) -> Any:
    """sqrt(2) * erfinv(2 p - 1), by Winitzki's approximation, which onnxruntime uses too."""
    x = 2 * values - 1
    log = np.log((1 - x) * (1 + x))
    first = 2 / (math.pi * 0.147) + 0.5 * log
    return math.sqrt(2) * np.sign(x) * np.sqrt(-first + np.sqrt(first * first - log / 0.147))


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "NONE": lambda scores: scores,
    "LOGISTIC": sigmoid,
    "SOFTMAX": _softmax,
    "SOFTMAX_ZERO": _softmax_zero,
    "PROBIT": probit,
}
