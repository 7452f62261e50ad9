"""Tree ensembles of ai.onnx.ml: attributes are flattened and checked once, rows walk in compiled code.

Trees that are none raise ValueError and not KernelError, which would hand them on to code that might walk for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..registry import Kernel, KernelError, NodeSpec, register
from .classes import TRANSFORMS, labels_of, post_transform, probit

ML = "ai.onnx.ml"
_MODES = {
    "BRANCH_LEQ": 0,
    "BRANCH_LT": 1,
    "BRANCH_GTE": 2,
    "BRANCH_GT": 3,
    "BRANCH_EQ": 4,
    "BRANCH_NEQ": 5,
    "LEAF": 6,
}
_AGGREGATES = {"SUM": 0, "AVERAGE": 0, "MIN": 1, "MAX": 2}


def _numbers(attributes: Mapping[str, Any], name: str, dtype: Any) -> Any:
    """An attribute as an array; the form `name_as_tensor` is the newer one."""
    values = attributes.get(f"{name}_as_tensor")
    if values is None or np.size(values) == 0:
        values = attributes.get(name, ())
    return np.asarray(values).reshape(-1).astype(dtype)


def _forest(spec: NodeSpec, prefix: str, num_targets: int) -> Any:
    """The nodes, and the weights whose attributes begin with `prefix` ("class" or "target")."""
    from ..cpu.trees import LEAF, Forest

    a = spec.attributes
    trees, nodes = (_numbers(a, f"nodes_{name}", np.int64) for name in ("treeids", "nodeids"))
    names = {name: _numbers(a, f"nodes_{name}", np.int64) for name in ("featureids", "truenodeids", "falsenodeids")}
    values = _numbers(a, "nodes_values", np.float64)
    modes = _modes(a.get("nodes_modes") or ())
    missing = _numbers(a, "nodes_missing_value_tracks_true", np.uint8)
    weights = _numbers(a, f"{prefix}_weights", np.float64)
    owners = [_numbers(a, f"{prefix}_{name}", np.int64) for name in ("treeids", "nodeids", "ids")]
    missing = missing if len(missing) else np.zeros(len(nodes), np.uint8)
    lengths = {len(array) for array in (trees, nodes, values, modes, missing, *names.values())}
    if len(lengths) != 1 or {len(array) for array in owners} != {len(weights)} or not len(nodes):
        raise ValueError(f"{spec.op_type}: the attributes of nodes, or of weights, differ in length or are empty")
    place = {key: index for index, key in enumerate(zip(trees.tolist(), nodes.tolist(), strict=True))}
    if len(place) != len(nodes):
        raise ValueError(f"{spec.op_type}: two nodes of a tree have the same id")
    inner = modes != LEAF
    true_children, false_children = (
        _children(place, trees, names[f"{side}nodeids"], inner) for side in ("true", "false")
    )
    has_parent = np.zeros(len(nodes), bool)
    for side in (true_children, false_children):
        has_parent[side[inner]] = True
    starts, order = _leaf_starts(spec, place, owners, len(nodes))
    if int((~has_parent).sum()) != len(np.unique(trees)):
        raise ValueError(f"{spec.op_type}: {int((~has_parent).sum())} roots for {len(np.unique(trees))} trees")
    forest = Forest(
        np.flatnonzero(~has_parent).astype(np.int32),
        names["featureids"].astype(np.int32),
        true_children,
        false_children,
        values,
        modes,
        missing,
        starts,
        owners[2][order].astype(np.int32),
        weights[order],
        num_targets,
    )
    try:
        forest.check_integrity()
    except ValueError as error:
        raise ValueError(f"{spec.op_type}: {error}") from error
    return forest


def _modes(names: Sequence[str]) -> Any:
    try:
        return np.array([_MODES[name] for name in names], np.uint8)
    except KeyError as error:
        raise ValueError(f"tree node mode {error} is unknown") from None


def _children(place: Mapping[tuple[int, int], int], trees: Any, ids: Any, inner: Any) -> Any:
    """Positions of the children; leaves, which have none, get 0."""
    try:
        found = [
            place[tree, child] if has else 0
            for tree, child, has in zip(trees.tolist(), ids.tolist(), inner.tolist(), strict=True)
        ]
    except KeyError as error:
        raise ValueError(f"a tree has no node {error}") from None
    return np.array(found, np.int32)


def _leaf_starts(
    spec: NodeSpec, place: Mapping[tuple[int, int], int], owners: list[Any], num_nodes: int
) -> tuple[Any, Any]:
    """Where each node's weights begin, and the order that puts weights beside their nodes."""
    try:
        nodes = [place[key] for key in zip(owners[0].tolist(), owners[1].tolist(), strict=True)]
    except KeyError as error:
        raise ValueError(f"{spec.op_type}: a weight belongs to the node {error}, which does not exist") from None
    positions = np.array(nodes, np.int64)
    order = np.argsort(positions, kind="stable")
    counts = np.bincount(positions, minlength=num_nodes)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), order


def _rows(x: Any) -> Any:
    """Rows of features as the walk takes them; other types become float64."""
    rows = x if x.ndim == 2 else x.reshape(1, -1)
    return np.ascontiguousarray(rows, np.float32 if x.dtype == np.float32 else np.float64)


@register("TreeEnsembleRegressor", domain=ML)
def tree_ensemble_regressor(spec: NodeSpec) -> Kernel:
    """Sum, mean, least or largest of the leaves' weights per target."""
    from ..cpu.trees import run_forest

    name = str(spec.attributes.get("aggregate_function", "SUM"))
    if name not in _AGGREGATES:
        raise ValueError(f"TreeEnsembleRegressor: aggregate_function {name!r} is unknown")
    forest = _forest(spec, "target", int(spec.attributes.get("n_targets", 1)))
    base = _numbers(spec.attributes, "base_values", np.float64)
    transform, team = post_transform(spec), spec.options.get("team")
    divisor = len(forest.roots) if name == "AVERAGE" else 1
    is_double = spec.attributes.get("nodes_values_as_tensor") is not None

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        scores = run_forest(_rows(inputs[0]), forest, _AGGREGATES[name], team=team)
        if divisor != 1:
            scores /= divisor
        if len(base):
            scores += base
        dtype = np.float64 if is_double and inputs[0].dtype == np.float64 else np.float32
        return (transform(scores).astype(dtype),)

    return kernel


@register("TreeEnsembleClassifier", domain=ML)
def tree_ensemble_classifier(spec: NodeSpec) -> Kernel:
    """The label with the highest score, and the scores. Weights for one class only make a binary classifier."""
    from ..cpu.trees import run_forest

    attributes = spec.attributes
    labels = labels_of(spec, "classlabels_int64s", "classlabels_strings")
    ids = _numbers(attributes, "class_ids", np.int64)
    is_binary = len(labels) <= 2 and len(np.unique(ids)) == 1
    forest = _forest(spec, "class", max(len(labels), int(ids.max(initial=0)) + 1))
    base = _numbers(attributes, "base_values", np.float64)
    all_positive = bool(np.all(forest.weights >= 0))
    transform, team = post_transform(spec), spec.options.get("team")
    column = int(ids[0]) if len(ids) else 0
    column_base = float(base[min(column, len(base) - 1)]) if len(base) else 0.0
    binary = _BinaryScores(labels, all_positive, str(attributes.get("post_transform", "NONE")))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        scores = run_forest(_rows(inputs[0]), forest, team=team)
        if is_binary:
            return binary(scores, column, column_base)
        if len(base):
            scores += base
        # Sums are compared as the float32 that they are given out as, so that ties are ties.
        return labels[scores.astype(np.float32).argmax(axis=1)], transform(scores).astype(np.float32)

    return kernel


class _BinaryScores:
    """Two classes from one score: a probability where all weights are positive, else a margin around 0."""

    def __init__(self, labels: Any, all_positive: bool, transform: str) -> None:
        from ..cpu.trees import COMPLEMENT, LOGISTIC, NEGATED, binary_scores

        self._binary_scores = binary_scores
        self._labels = (
            labels if len(labels) == 2 else np.array([0 if labels.dtype != object else "", labels[0]], labels.dtype)
        )
        self._threshold = 0.5 if all_positive else 0.0
        self._is_probit = transform == "PROBIT"
        self._form = LOGISTIC if transform == "LOGISTIC" else COMPLEMENT if all_positive else NEGATED

    def __call__(self, scores: Any, column: int, base: float) -> tuple[Any, Any]:
        chosen, pair = self._binary_scores(scores, column, base, self._threshold, self._form)
        labels = self._labels[chosen]
        return labels, probit(pair[:, 1:]).astype(np.float32) if self._is_probit else pair


@register("TreeEnsemble", domain=ML, since_version=5)
def tree_ensemble(spec: NodeSpec) -> Kernel:
    """The newer form, in which inner nodes and leaves have arrays of their own."""
    from ..cpu.trees import LEAF, Forest, run_forest

    a = spec.attributes
    modes = np.asarray(a["nodes_modes"], np.uint8).reshape(-1)
    if np.any(modes >= LEAF):
        raise KernelError("TreeEnsemble: tests of set membership are borrowed")
    num_inner, num_targets = len(modes), int(a.get("n_targets", 1))
    weights = np.asarray(a["leaf_weights"]).reshape(-1).astype(np.float64)
    targets = np.asarray(a["leaf_targetids"], np.int32)
    total = num_inner + len(weights)

    def children(side: str) -> Any:
        ids = np.asarray(a[f"nodes_{side}nodeids"], np.int64)
        leaves = np.asarray(a[f"nodes_{side}leafs"], bool)
        if len(ids) != num_inner or len(leaves) != num_inner or np.any(ids < 0) or np.any(ids >= total):
            raise ValueError("TreeEnsemble: children do not fit the nodes")
        return np.concatenate([np.where(leaves, ids + num_inner, ids), np.zeros(len(weights), np.int64)]).astype(
            np.int32
        )

    def inner(name: str, dtype: Any) -> Any:
        values = np.asarray(a.get(name, np.zeros(num_inner))).reshape(-1).astype(dtype)
        if len(values) != num_inner:
            raise ValueError(f"TreeEnsemble: {name} has {len(values)} entries for {num_inner} nodes")
        return np.concatenate([values, np.zeros(len(weights), dtype)])

    starts = np.concatenate([np.zeros(num_inner, np.int32), np.arange(len(weights) + 1, dtype=np.int32)])
    forest = Forest(
        np.asarray(a["tree_roots"], np.int32),
        inner("nodes_featureids", np.int32),
        children("true"),
        children("false"),
        inner("nodes_splits", np.float64),
        np.concatenate([modes, np.full(len(weights), LEAF, np.uint8)]),
        inner("nodes_missing_value_tracks_true", np.uint8),
        starts,
        targets,
        weights,
        num_targets,
    )
    try:
        forest.check_integrity()
    except ValueError as error:
        raise ValueError(f"TreeEnsemble: {error}") from error
    aggregate = int(a.get("aggregate_function", 1))
    transform, team = _numbered_transform(spec), spec.options.get("team")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        scores = run_forest(_rows(inputs[0]), forest, {2: 1, 3: 2}.get(aggregate, 0), team=team)
        if aggregate == 0:
            scores /= len(forest.roots)
        return (transform(scores).astype(inputs[0].dtype, copy=False),)

    return kernel


def _numbered_transform(spec: NodeSpec) -> Any:
    number = int(spec.attributes.get("post_transform", 0))
    names = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
    if not 0 <= number < len(names):
        raise ValueError(f"TreeEnsemble: post_transform {number} is unknown")
    return TRANSFORMS[names[number]]
