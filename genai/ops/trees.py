"""Tree ensembles of ai.onnx.ml: attributes are flattened and checked once, and compiled code walks the trees.

Invalid trees raise ValueError, not KernelError: KernelError would fall back to code that might loop for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from genai.kernels.cpu.arrays import trees
from genai.kernels.cpu.program.thread_pool import Threads

from ..onnx.node import ML
from ..onnx.types import TensorType, Type
from .ml import TRANSFORMS, labels_of, post_transform, probit, table_of
from .registry import Kernel, KernelError, NodeSpec, register
from .shape_rules import NodeTypes, shape_rule

_MODE_NAMES = "BRANCH_LEQ BRANCH_LT BRANCH_GTE BRANCH_GT BRANCH_EQ BRANCH_NEQ LEAF".split()
_MODES = {name: number for number, name in enumerate(_MODE_NAMES)}
_TESTS: Any = (np.less_equal, np.less, np.greater_equal, np.greater, np.equal, np.not_equal)
MEMBER = 6
_NUMBERED = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
_AGGREGATES = {"SUM": 0, "AVERAGE": 0, "MIN": 1, "MAX": 2}


def _numbers(attributes: Mapping[str, Any], name: str, dtype: Any) -> Any:
    """Return an attribute as an array, from the newer form `name_as_tensor` if it is present."""
    values = attributes.get(f"{name}_as_tensor")
    if values is None or np.size(values) == 0:
        values = attributes.get(name, ())
    if isinstance(values, list) and values:  # in half the time of np.asarray, which finds out the type first
        values = np.fromiter(values, np.float64 if isinstance(values[0], float) else np.int64, len(values))
    return np.asarray(values).reshape(-1).astype(dtype)


def _int32(subject: str, values: Any) -> Any:
    """Convert to int32, the type that the compiled walk uses."""
    array = np.asarray(values)
    if np.any(array != array.astype(np.int32)):
        raise ValueError(f"tree ensemble: the {subject} do not fit in 32 bits")
    return array.astype(np.int32)


def _forest(spec: NodeSpec, prefix: str, num_targets: int) -> trees.Forest:
    """Return the nodes, and the weights from attributes that begin with `prefix` ("class" or "target")."""
    a = spec.attributes
    tree_ids, nodes = (_numbers(a, f"nodes_{name}", np.int64) for name in ("treeids", "nodeids"))
    names = {name: _numbers(a, f"nodes_{name}", np.int64) for name in ("featureids", "truenodeids", "falsenodeids")}
    values = _numbers(a, "nodes_values", np.float64)
    try:
        modes = np.array([*map(_MODES.__getitem__, a.get("nodes_modes") or ())], np.uint8)
    except KeyError as error:
        raise ValueError(f"the tree node mode {error} is unknown") from None
    missing = _numbers(a, "nodes_missing_value_tracks_true", np.uint8)
    weights = _numbers(a, f"{prefix}_weights", np.float64)
    owners = [_numbers(a, f"{prefix}_{name}", np.int64) for name in ("treeids", "nodeids", "ids")]
    missing = missing if len(missing) else np.zeros(len(nodes), np.uint8)
    lengths = {len(array) for array in (tree_ids, nodes, values, modes, missing, *names.values())}
    if len(lengths) != 1 or {len(array) for array in owners} != {len(weights)} or not len(nodes):
        raise ValueError(
            f"{spec.op_type}: the node attributes or the weight attributes are empty, or their lengths differ"
        )
    index = _NodeIndex(tree_ids, nodes)
    if index.has_duplicates:
        raise ValueError(f"{spec.op_type}: two nodes of a tree have the same id")
    inner = modes != trees.LEAF
    true_children, false_children = (
        _children(index, tree_ids, names[f"{side}nodeids"], inner) for side in ("true", "false")
    )
    has_parent = np.zeros(len(nodes), bool)
    for side in (true_children, false_children):
        has_parent[side[inner]] = True
    starts, order = _leaf_starts(spec, index, owners, len(nodes))
    num_trees = len(_distinct(tree_ids))
    if int((~has_parent).sum()) != num_trees:
        raise ValueError(
            f"{spec.op_type}: {num_trees} trees have {int((~has_parent).sum())} roots, but each tree must have one root"
        )
    return _sound(
        spec, np.flatnonzero(~has_parent).astype(np.int32), _int32("feature ids", names["featureids"]), true_children,
        false_children, values, modes, missing, starts, _int32("target or class ids", owners[2][order]),
        weights[order], num_targets,
    )  # fmt: skip


def _sound(spec: NodeSpec, *parts: Any) -> trees.Forest:
    """Return a forest. Raises ValueError unless every child, feature and target exists, and every walk ends."""
    forest = trees.Forest(*parts)
    try:
        forest.check_integrity()
    except ValueError as error:
        raise ValueError(f"{spec.op_type}: {error}") from error
    return forest


def _distinct(numbers: Any) -> Any:
    """Return the sorted distinct numbers, as np.unique, which loads NumPy's masked arrays."""
    ordered = np.sort(numbers)
    return ordered[np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))]


class _NodeIndex:
    """The positions of nodes by (tree, id), as sorted arrays: an ensemble can have millions of nodes."""

    def __init__(self, tree_ids: Any, ids: Any) -> None:
        self._trees, self._ids = _distinct(tree_ids), _distinct(ids)
        keys, _ = self._keys(tree_ids, ids)
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]
        self.has_duplicates = bool(np.any(self._sorted[1:] == self._sorted[:-1]))

    def positions(self, tree_ids: Any, ids: Any) -> Any:
        """Return the positions of nodes. Raises KeyError with the first pair that does not exist."""
        keys, known = self._keys(tree_ids, ids)
        found = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
        known &= self._sorted[found] == keys
        if not known.all():
            first = int(np.argmin(known))
            raise KeyError((int(tree_ids[first]), int(ids[first])))
        return self._order[found]

    def _keys(self, tree_ids: Any, ids: Any) -> tuple[Any, Any]:
        """Return one number per pair, and True for each pair with a known tree and a known id."""
        columns, known = [], np.ones(len(ids), bool)
        for values, numbers in ((self._trees, tree_ids), (self._ids, ids)):
            columns.append(_positions(values, numbers))
            known &= values[columns[-1]] == numbers
        return columns[0] * len(self._ids) + columns[1], known


def _positions(values: Any, numbers: Any) -> Any:
    """Return the position of each number in sorted distinct values; any position for numbers that are missing."""
    first, last = values[0], values[-1]
    if int(last) - int(first) == len(values) - 1:  # without gaps, which is usual, positions need no search
        return np.clip(numbers, first, last) - first
    return np.minimum(np.searchsorted(values, numbers), len(values) - 1)


def _children(index: _NodeIndex, tree_ids: Any, ids: Any, inner: Any) -> Any:
    """Return the position of each node's child, or 0 for leaves."""
    children = np.zeros(len(ids), np.int32)
    try:
        children[inner] = index.positions(tree_ids[inner], ids[inner])
    except KeyError as error:
        raise ValueError(f"a node has the child {error} (tree, id), which does not exist") from None
    return children


def _leaf_starts(spec: NodeSpec, index: _NodeIndex, owners: list[Any], num_nodes: int) -> tuple[Any, Any]:
    """Return the start of each node's weights, and the order that sorts weights by node."""
    try:
        positions = index.positions(owners[0], owners[1])
    except KeyError as error:
        raise ValueError(
            f"{spec.op_type}: a weight belongs to the node {error} (tree, id), which does not exist"
        ) from None
    order = np.argsort(positions, kind="stable")
    counts = np.bincount(positions, minlength=num_nodes)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), order


def _rows(x: Any) -> Any:
    """Return rows of features as float32 or float64, the types of the compiled walk; other types become float64."""
    return np.ascontiguousarray(table_of(x), np.float32 if x.dtype == np.float32 else np.float64)


def _base_values(spec: NodeSpec, num_targets: int) -> Any:
    """Return a number for each target, which is added to the sums; None = none."""
    base = _numbers(spec.attributes, "base_values", np.float64)
    if len(base) not in (0, 1, num_targets):
        raise ValueError(f"{spec.op_type}: base_values has {len(base)} values, but there are {num_targets} targets")
    return np.resize(base, num_targets) if len(base) else None


# The scores of classes after the transforms that compiled code applies, and of two classes of which one has weights.
_KINDS = {"NONE": trees.CLASSES, "SOFTMAX": trees.SOFTMAX, "LOGISTIC": trees.SIGMOID}


class _ScoredForest:
    """A kernel that runs only a compiled program. The results are the labels, if there are labels, and the scores.

    Args:
        labels: the labels in the order of classes, if they are strings. `scores.names` then contains their indices.
        of_double: the scores for inputs of float64; None = `scores`.
    """

    def __init__(
        self, forest: trees.Forest, scores: trees.Scores, threads: Threads | None, *, labels: Any = None,
        of_double: trees.Scores | None = None,
    ) -> None:  # fmt: skip
        self._forest, self._scores, self._threads = forest, scores, threads
        self._labels, self._of_double = labels, of_double or scores
        self.is_native = labels is None

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        kind = self._of_double if x.dtype == np.float64 else self._scores
        scores, chosen = trees.score_forest(_rows(x), self._forest, kind, threads=self._threads)
        if chosen is None:
            return (scores,)
        return chosen if self._labels is None else self._labels[chosen], scores


@register("TreeEnsembleRegressor", domain=ML)
def tree_ensemble_regressor(spec: NodeSpec) -> Kernel:
    """The sum, mean, min or max of the leaves' weights per target."""
    name = spec.attributes.get("aggregate_function", "SUM")
    if name not in _AGGREGATES:
        raise ValueError(f"TreeEnsembleRegressor: aggregate_function {name!r} is unknown")
    forest = _forest(spec, "target", int(spec.attributes.get("n_targets", 1)))
    base, transform, threads = _base_values(spec, forest.num_targets), post_transform(spec), spec.options.get("threads")
    has_doubles = spec.attributes.get("nodes_values_as_tensor") is not None
    scores = trees.Scores(trees.VALUES, _AGGREGATES[name], len(forest.roots) if name == "AVERAGE" else 1, base)
    doubles = replace(scores, is_double=True)
    if spec.attributes.get("post_transform", "NONE") == "NONE":
        return _ScoredForest(forest, scores, threads, of_double=doubles if has_doubles else None)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        sums, _ = trees.score_forest(_rows(inputs[0]), forest, doubles, threads=threads)
        is_double = has_doubles and inputs[0].dtype == np.float64
        return (transform(sums).astype(np.float64 if is_double else np.float32),)

    return kernel


@register("TreeEnsembleClassifier", domain=ML)
def tree_ensemble_classifier(spec: NodeSpec) -> Kernel:
    """The label with the highest score, and the scores. If only one class has weights, the classifier is binary."""
    labels, threads = labels_of(spec), spec.options.get("threads")
    ids = _numbers(spec.attributes, "class_ids", np.int64)
    forest = _forest(spec, "class", max(len(labels), 2))
    transform, name = post_transform(spec), spec.attributes.get("post_transform", "NONE")
    if len(labels) <= 2 and len(_distinct(ids)) == 1:
        return _binary_classifier(spec, labels, forest, int(ids[0]))
    base = _base_values(spec, forest.num_targets)
    # Sums are compared as float32, their output type, so that equal outputs are ties.
    numbers, texts = _numbered(labels)
    if name in _KINDS:
        return _ScoredForest(forest, trees.Scores(_KINDS[name], base=base, names=numbers), threads, labels=texts)
    sums = trees.Scores(trees.VALUES, base=base, is_double=True)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        scores, _ = trees.score_forest(_rows(inputs[0]), forest, sums, threads=threads)
        return labels[scores.astype(np.float32).argmax(axis=1)], transform(scores).astype(np.float32)

    return kernel


def _numbered(labels: Any) -> tuple[Any, Any]:
    """Return the labels as int64, and None; for strings, return their indices and the strings."""
    return (labels, None) if labels.dtype != object else (np.arange(len(labels)), labels)


def _binary_classifier(spec: NodeSpec, labels: Any, forest: trees.Forest, column: int) -> Kernel:
    """Classify into two classes by one score: a probability if all weights are positive, else a margin around 0."""
    all_positive, transform = bool(np.all(forest.weights >= 0)), spec.attributes.get("post_transform", "NONE")
    kind = trees.LOGISTIC if transform == "LOGISTIC" else trees.COMPLEMENT if all_positive else trees.NEGATED
    if len(labels) != 2:
        labels = np.array([0 if labels.dtype != object else "", labels[0]], labels.dtype)
    base = _numbers(spec.attributes, "base_values", np.float64)
    if len(base):
        base = np.full(forest.num_targets, base[min(column, len(base) - 1)])
    numbers, texts = _numbered(labels)
    scores = trees.Scores(
        kind, base=base if len(base) else None, names=numbers, column=column, threshold=0.5 if all_positive else 0.0
    )
    kernel = _ScoredForest(forest, scores, spec.options.get("threads"), labels=texts)
    if transform != "PROBIT":
        return kernel

    def with_probit(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        chosen, pair = kernel(context, inputs)
        return chosen, probit(pair[:, 1:]).astype(np.float32)

    return with_probit


@register("TreeEnsemble", domain=ML, since_version=5)
def tree_ensemble(spec: NodeSpec) -> Kernel:
    """The newer form of tree ensembles, with separate arrays for inner nodes and leaves."""
    a = spec.attributes
    modes = np.asarray(a["nodes_modes"], np.uint8).reshape(-1)
    if np.any(modes > MEMBER):
        raise ValueError(f"TreeEnsemble: nodes_modes contains {modes.max()}, but modes must be from 0 to {MEMBER}")
    sets = _member_sets(a.get("membership_values", ()), modes)
    num_inner, num_targets = len(modes), int(a.get("n_targets", 1))
    weights = np.asarray(a["leaf_weights"]).reshape(-1).astype(np.float64)
    targets = _int32("leaf_targetids", a["leaf_targetids"])
    total = num_inner + len(weights)

    def children(side: str) -> Any:
        ids = np.asarray(a[f"nodes_{side}nodeids"], np.int64)
        leaves = np.asarray(a[f"nodes_{side}leafs"], bool)
        if len(ids) != num_inner or len(leaves) != num_inner or np.any(ids < 0) or np.any(ids >= total):
            raise ValueError(
                "TreeEnsemble: the ids or flags of child nodes do not match the number of nodes and leaves"
            )
        return np.concatenate([np.where(leaves, ids + num_inner, ids), np.zeros(len(weights), np.int64)]).astype(
            np.int32
        )

    def inner(name: str, dtype: Any) -> Any:
        values = np.asarray(a.get(name, np.zeros(num_inner))).reshape(-1).astype(dtype)
        if len(values) != num_inner:
            raise ValueError(f"TreeEnsemble: {name} has {len(values)} values, but there are {num_inner} inner nodes")
        return np.concatenate([values, np.zeros(len(weights), dtype)])

    starts = np.concatenate([np.zeros(num_inner, np.int32), np.arange(len(weights) + 1, dtype=np.int32)])
    forest = _sound(
        spec, _int32("tree_roots", a["tree_roots"]), _int32("nodes_featureids", inner("nodes_featureids", np.int64)),
        children("true"), children("false"), inner("nodes_splits", np.float64),
        np.concatenate([np.where(modes == MEMBER, trees.EQ, modes), np.full(len(weights), trees.LEAF, np.uint8)]),
        inner("nodes_missing_value_tracks_true", np.uint8), starts, targets, weights, num_targets,
    )  # fmt: skip
    aggregate = int(a.get("aggregate_function", 1))
    number, threads = int(a.get("post_transform", 0)), spec.options.get("threads")
    if not 0 <= number < len(_NUMBERED):
        raise ValueError(f"TreeEnsemble: post_transform {number} is unknown")
    transform = TRANSFORMS[_NUMBERED[number]]
    how = {2: trees.MIN, 3: trees.MAX}.get(aggregate, trees.SUM)
    divisor = len(forest.roots) if aggregate == 0 else 1
    scores = trees.Scores(trees.VALUES, how, divisor)
    doubles = replace(scores, is_double=True)
    if not sets and _NUMBERED[number] == "NONE":
        return _ScoredForest(forest, scores, threads, of_double=doubles)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        if sets:
            sums = _run_with_members(_rows(inputs[0]), forest, modes, sets, how) / divisor
        else:
            sums, _ = trees.score_forest(_rows(inputs[0]), forest, doubles, threads=threads)
        return (transform(sums).astype(inputs[0].dtype, copy=False),)

    return kernel


def _member_sets(values: Any, modes: Any) -> dict[int, Any]:
    """Return the member set of each MEMBER node; `values` lists the sets in node order, each terminated by NaN."""
    nodes, numbers = np.flatnonzero(modes == MEMBER), np.asarray(values, np.float64).reshape(-1)
    ends = np.flatnonzero(np.isnan(numbers))
    sets = [part[~np.isnan(part)] for part in np.split(numbers, ends + 1)]
    if len(ends) and ends[-1] == len(numbers) - 1:
        sets = sets[:-1]
    if len(sets) != len(nodes):
        raise KernelError(
            f"TreeEnsemble: membership_values has {len(sets)} sets, but {len(nodes)} nodes test membership"
        )
    return dict(zip(nodes.tolist(), sets, strict=True))


def _run_with_members(x: Any, forest: trees.Forest, inner_modes: Any, sets: dict[int, Any], aggregate: int) -> Any:
    """Return combined weights [rows, targets], as `run_forest` does, for ensembles with membership tests.

    Args:
        forest: the nodes; nodes that test membership have a placeholder mode.
        inner_modes: the actual modes of the inner nodes.
    """
    if x.shape[1] < forest.num_features:
        raise KernelError(f"TreeEnsemble: the trees use {forest.num_features} features, but the input has {x.shape[1]}")
    empty = {trees.MIN: np.inf, trees.MAX: -np.inf}.get(aggregate, 0.0)
    result = np.full((len(x), forest.num_targets), empty)
    combine: Any = {trees.MIN: np.minimum, trees.MAX: np.maximum}.get(aggregate, np.add)
    rows = np.arange(len(x))
    for root in forest.roots.tolist():
        nodes = np.full(len(x), root)
        while np.any(walking := forest.modes[nodes] != trees.LEAF):
            for node in np.unique(nodes[walking]).tolist():
                here = nodes == node
                goes = _passes(x[here, forest.features[node]], node, forest, inner_modes, sets)
                nodes[here] = np.where(goes, forest.true_children[node], forest.false_children[node])
        leaf = forest.leaf_starts[nodes]
        combine.at(result, (rows, forest.targets[leaf]), forest.weights[leaf])
    result[np.isinf(result)] = 0.0
    return result


def _passes(values: Any, node: int, forest: trees.Forest, modes: Sequence[int], sets: dict[int, Any]) -> Any:
    mode = int(modes[node])
    passed = np.isin(values, sets[node]) if mode == MEMBER else _TESTS[mode](values, forest.thresholds[node])
    return np.where(np.isnan(values), bool(forest.missing_tracks_true[node]) or mode == trees.NEQ, passed)


@shape_rule("TreeEnsemble", domain=ML)
def tree_ensemble_types(types: NodeTypes) -> list[Type | None]:
    """[N, features] to [N, targets]."""
    source, shape = types.source, types.shape(0, rank=2)
    return [TensorType(source.dtype, (shape[0] if shape else None, types.attribute("n_targets", 1)))]
