"""Support vector machines of ai.onnx.ml, computed in float64 because their large terms cancel."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from ..onnx.node import ML
from .activations import sigmoid
from .ml import Transform, labels_of, post_transform, table_of
from .registry import Float32s, Kernel, KernelError, NodeSpec, from_function, operator, register
from .support import checked_shape

_KERNELS = ("LINEAR", "POLY", "RBF", "SIGMOID")
_LEAST = 1e-7
_ROUNDS = 100


class _Vectors:
    """The support vectors and their kernel function; a linear model has coefficients instead."""

    def __init__(self, spec: NodeSpec, values: Any, rows: int, kernel: str) -> None:
        if rows < 1 or not values.size or values.size % rows:
            raise KernelError(f"{spec.op_type}: {values.size} values cannot be divided into {rows} vectors")
        parameters = [float(value) for value in spec.attributes.get("kernel_params") or (0, 0, 0)]
        if kernel not in _KERNELS or len(parameters) != 3:
            raise KernelError(f"{spec.op_type}: the kernel {kernel!r} with parameters {parameters} is not supported")
        self._spec, self._kernel, self._vectors = spec, kernel, values.reshape(rows, -1)
        self._gamma, self._shift, self._degree = parameters
        self._squares = np.square(self._vectors).sum(axis=1)

    def __call__(self, x: Any) -> Any:
        """Evaluate the kernel function for x [rows, features] or [features] and all vectors: [rows, vectors]."""
        rows = table_of(np.asarray(x, np.float64))
        if rows.shape[1] != self._vectors.shape[1]:
            raise KernelError(
                f"{self._spec.op_type}: the input has {rows.shape[1]} features, but the model has "
                f"{self._vectors.shape[1]}"
            )
        checked_shape(self._spec, (len(rows), len(self._vectors)), 8)
        products = rows @ self._vectors.T
        if self._kernel == "LINEAR":
            return products
        if self._kernel == "RBF":
            distances = np.square(rows).sum(axis=1)[:, None] + self._squares - 2 * products
            return np.exp(-self._gamma * np.maximum(distances, 0))
        scaled = self._gamma * products + self._shift
        return np.tanh(scaled) if self._kernel == "SIGMOID" else scaled**self._degree


def _floats(spec: NodeSpec, name: str) -> Any:
    return np.asarray(spec.attributes.get(name) or (), np.float64)


def _regression(spec: NodeSpec) -> tuple[_Vectors, Any, Any]:
    """Return the support vectors, their coefficients as a column, and the intercepts."""
    coefficients, rho, support = (_floats(spec, name) for name in ("coefficients", "rho", "support_vectors"))
    count = int(spec.attributes.get("n_supports", 0))
    if count > 0:
        vectors = _Vectors(spec, support, count, str(spec.attributes.get("kernel_type", "LINEAR")))
    else:
        vectors, coefficients = _Vectors(spec, coefficients, 1, "LINEAR"), np.ones(1)
    if len(coefficients) != max(count, 1) or len(rho) < 1:
        raise KernelError(
            f"SVMRegressor: {len(coefficients)} coefficients and {len(rho)} rho values do not match {count} "
            "support vectors"
        )
    return vectors, coefficients[:, None], rho


@operator("SVMRegressor", domain=ML, model=_regression, transform=post_transform)
def svm_regressor(x: Any, *, one_class: bool = False, model: Any, transform: Transform) -> Any:
    """Return weighted sums over the support vectors; with one_class, 1 if x is inside and -1 if it is outside."""
    vectors, coefficients, rho = model
    scores = vectors(x) @ coefficients + rho[0]
    return (np.where(scores > 0, 1.0, -1.0) if one_class else transform(scores)).astype(np.float32)


@register("SVMClassifier", domain=ML)
def svm_classifier(spec: NodeSpec) -> Kernel:
    """The label that wins the most pairwise decisions, and scores per pair or probabilities per class."""
    if spec.attributes.get("vectors_per_class"):
        return from_function(_pairwise, model=_Pairwise, labels=labels_of, transform=post_transform)(spec)
    return from_function(_linear, vectors=_linear_model, labels=labels_of, transform=post_transform)(spec)


def _linear_model(spec: NodeSpec) -> _Vectors:
    if not len(_floats(spec, "rho")):
        raise KernelError("SVMClassifier: the attribute rho is missing")
    return _Vectors(spec, _floats(spec, "coefficients"), len(labels_of(spec)), "LINEAR")


def _linear(
    x: Any, *, coefficients: Float32s = (), rho: Any = (), vectors: _Vectors, labels: Any, transform: Transform
) -> Any:
    """Classify without support vectors; each class has a row of coefficients."""
    scores = vectors(x) + rho[0]
    chosen = scores.argmax(axis=1)
    if len(labels) == 2:
        # As in onnxruntime, the second class wins if at least one score supports it.
        best = scores.max(axis=1)
        chosen = np.where(best >= 0.5 if np.all(coefficients >= 0) else best > 0, 1, chosen)
    return labels[chosen], transform(scores).astype(np.float32)


class _Pairwise:
    """One decision per pair of classes, as in libsvm (Chang & Lin 2011), with slopes and shifts for probabilities."""

    def __init__(self, spec: NodeSpec) -> None:
        counts, labels = [int(count) for count in spec.attributes["vectors_per_class"]], labels_of(spec)
        self.classes, total = len(counts), sum(counts)
        pairs = self.classes * (self.classes - 1) // 2
        if self.classes < 2 or min(counts) < 0 or len(labels) != self.classes:
            raise KernelError(
                f"SVMClassifier: vectors_per_class is {counts}, which is not valid for {len(labels)} labels"
            )
        name = str(spec.attributes.get("kernel_type", "LINEAR"))
        self._vectors = _Vectors(spec, _floats(spec, "support_vectors"), total, name)
        coefficients = _floats(spec, "coefficients")
        self._rho, self.slopes, self.shifts = (_floats(spec, key) for key in ("rho", "prob_a", "prob_b"))
        lengths = (len(self._rho), len(self.slopes) or pairs, len(self.shifts) or pairs)
        if coefficients.size != total * (self.classes - 1) or lengths != (pairs,) * 3:
            counted = f"{coefficients.size} coefficients and {len(self._rho)} rho values"
            raise KernelError(f"SVMClassifier: {counted} do not match vectors_per_class, which is {counts}")
        # [vectors, pairs]: the vectors of a class use the row of coefficients that belongs to the pair's other class.
        starts, rows = np.concatenate([[0], np.cumsum(counts)]), coefficients.reshape(self.classes - 1, total)
        self._decisions = np.zeros((total, pairs))
        for pair, (i, j) in enumerate(combinations(range(self.classes), 2)):
            first, second = slice(starts[i], starts[i + 1]), slice(starts[j], starts[j + 1])
            self._decisions[first, pair], self._decisions[second, pair] = rows[j - 1, first], rows[i, second]

    def __call__(self, x: Any) -> Any:
        return self._vectors(x) @ self._decisions + self._rho


def _pairwise(x: Any, *, post_transform: str = "NONE", model: _Pairwise, labels: Any, transform: Transform) -> Any:
    scores = model(x)
    votes = np.zeros((len(scores), model.classes))
    for pair, (i, j) in enumerate(combinations(range(model.classes), 2)):
        votes[:, i] += scores[:, pair] > 0
        votes[:, j] += scores[:, pair] <= 0
    if len(model.slopes):
        results = transform(_coupled(1 - sigmoid(scores * model.slopes + model.shifts), model.classes))
    elif model.classes > 2:
        results = transform(scores)
    elif post_transform in ("NONE", "LOGISTIC"):  # both classes' scores from one decision, as in onnxruntime
        results = transform(np.concatenate([-scores, scores], axis=1))
    else:
        both = np.concatenate([1 - scores, scores], axis=1)
        results = transform(both) if post_transform == "PROBIT" else both
    return labels[votes.argmax(axis=1)], results.astype(np.float32)


def _coupled(pairs: Any, classes: int) -> Any:
    """Combine pairwise probabilities into class probabilities: Wu, Lin & Weng's (2004) second method, as in libsvm."""
    rows = len(pairs)
    pairs = np.clip(pairs, _LEAST, 1 - _LEAST)
    won = np.zeros((rows, classes, classes))
    for pair, (i, j) in enumerate(combinations(range(classes), 2)):
        won[:, i, j], won[:, j, i] = pairs[:, pair], 1 - pairs[:, pair]
    diagonal = np.eye(classes, dtype=bool)
    matrix = np.where(diagonal, np.square(won.swapaxes(1, 2)).sum(axis=2)[:, :, None], -won.swapaxes(1, 2) * won)
    estimates = np.full((rows, classes), 1 / classes)
    moving = np.arange(rows)
    for _ in range(max(_ROUNDS, classes)):
        products = np.einsum("rij,rj->ri", matrix[moving], estimates[moving])
        total = (estimates[moving] * products).sum(axis=1)
        far = np.abs(products - total[:, None]).max(axis=1) >= 0.005 / classes
        moving, products, total = moving[far], products[far], total[far]
        if not len(moving):
            break
        p, q = estimates[moving], matrix[moving]
        for t in range(classes):
            step = (total - products[:, t]) / q[:, t, t]
            p[:, t] += step
            grown = 1 + step
            total = (total + step * (step * q[:, t, t] + 2 * products[:, t])) / grown / grown
            products = (products + step[:, None] * q[:, t]) / grown[:, None]
            p /= grown[:, None]
        estimates[moving] = p
    return estimates
