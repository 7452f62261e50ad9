"""Ensembles of decision trees: every row walks every tree, and the leaves' weights are combined per target."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.common.host_memory import huge_array

from ..jit.arguments import Address, Arguments, Binding
from ..jit.dsl import inline
from ..jit.memory import (
    load,
    read_float32,
    read_float64,
    read_int32,
    read_int64,
    read_uint8,
    store,
    write_float32,
    write_float64,
    write_int64,
)
from ..jit.native import native_op
from ..jit.vector import LANES
from ..jit.vector_math import sigmoid
from ..program.bound_program import BoundPrograms, NodeProgram, addresses_of
from ..program.calls import Call, Items
from ..program.step_table import StepField
from ..program.thread_pool import Threads
from .functions import softmax_of_row

# Tests of nodes, ways to combine weights, and kinds of results; see `Scores`.
LEQ, LT, GTE, GT, EQ, NEQ, LEAF = 0, 1, 2, 3, 4, 5, 6
SUM, MIN, MAX = 0, 1, 2
NEGATED, COMPLEMENT, LOGISTIC, VALUES, CLASSES, SOFTMAX, SIGMOID = range(7)
_NANOSECONDS_PER_NODE = 4.0
# Minimum number of rows per thread.
_GRAIN = 8
_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


@dataclass(frozen=True)
class Forest:
    """Trees in flat arrays with one entry per node. Children and roots are indices into these arrays.

    Attributes:
        roots: int32 [trees].
        features, true_children, false_children: int32 [nodes].
        thresholds: float64 [nodes].
        modes: uint8 [nodes], LEQ ... LEAF.
        missing_tracks_true: uint8 [nodes], 1 if NaN goes to the true child.
        leaf_starts: int32 [nodes + 1]; node i adds the weights leaf_starts[i]:leaf_starts[i + 1].
        targets: int32 [weights], column of each weight.
        weights: float64 [weights].
        num_targets: number of columns of the result.
    """

    roots: NDArray[np.int32]
    features: NDArray[np.int32]
    true_children: NDArray[np.int32]
    false_children: NDArray[np.int32]
    thresholds: NDArray[np.float64]
    modes: NDArray[np.uint8]
    missing_tracks_true: NDArray[np.uint8]
    leaf_starts: NDArray[np.int32]
    targets: NDArray[np.int32]
    weights: NDArray[np.float64]
    num_targets: int

    def check_integrity(self) -> None:
        """Raise an error unless every index is inside its array and the nodes form trees, so that every walk ends.

        Raises:
            ValueError: an index is outside its array, or the nodes do not form trees.
        """
        nodes = len(self.features)
        inner = self.modes != LEAF
        children = np.concatenate([self.true_children[inner], self.false_children[inner]])
        for name, values, limit in (
            ("root", self.roots, nodes),
            ("child", children, nodes),
            ("target", self.targets, self.num_targets),
            ("mode", self.modes, LEAF + 1),
        ):
            if len(values) and (values.min() < 0 or values.max() >= limit):
                raise ValueError(f"a tree's {name} is outside 0 to {limit - 1}")
        if inner.any() and self.features[inner].min() < 0:
            raise ValueError("the feature index of a node is negative")
        if np.bincount(np.concatenate([children, self.roots]), minlength=1).max(initial=0) > 1:
            raise ValueError("a node has two parents, so the nodes are not trees")
        # Each node has at most one parent, so nodes that cannot be reached from a root would form a cycle.
        reached, frontier = 0, self.roots
        while len(frontier):
            reached += len(frontier)
            walking = frontier[inner[frontier]]
            frontier = np.concatenate([self.true_children[walking], self.false_children[walking]])
        if reached != nodes:
            raise ValueError(f"{nodes - reached} nodes of the trees cannot be reached from a root")

    @cached_property
    def num_features(self) -> int:
        """The minimum number of columns of the input."""
        inner = self.modes != LEAF
        return int(self.features[inner].max()) + 1 if inner.any() else 0

    @cached_property
    def row_nanoseconds(self) -> float:
        """The rough cost of a row in nanoseconds."""
        depth = max(len(self.features) // max(len(self.roots), 1), 1).bit_length()
        leaf = max(len(self.weights) // max(len(self.features), 1), 1)
        return len(self.roots) * (depth + leaf) * _NANOSECONDS_PER_NODE

    @cached_property
    def arrays(self) -> dict[str, Any]:
        """The arrays that compiled code reads, by name."""
        kinds = {"roots": np.int32, "targets": np.int32, "weights": np.float64}
        return {name: np.ascontiguousarray(getattr(self, name), kind) for name, kind in kinds.items()} | {
            "nodes": self._nodes
        }

    @cached_property
    def programs(self) -> BoundPrograms[NodeProgram]:
        """The programs, by the arguments of `walking` and `scoring`. They contain the addresses of the arrays."""
        return BoundPrograms()

    def walking(self, columns: int, is_double: bool, aggregate: int) -> NodeProgram:
        """Return a program for rows of `columns` features, with bindings for x and out."""
        arguments = self._arguments(columns, is_double, aggregate)
        return NodeProgram(
            [[Call(walk_trees, arguments, Items(StepField.TOKENS, grain=_GRAIN))]], 0, self.row_nanoseconds
        )

    def scoring(self, columns: int, is_double: bool, scores: Scores) -> NodeProgram:
        """Return a program that computes scores, with bindings for x, out and labels; see `score_forest`."""
        base, count = scores.base, self.num_targets
        if not 0 <= scores.column < count:
            raise ValueError(f"the scores have {count} columns, but not the column {scores.column}")
        if base is not None and (base.shape != (count,) or base.dtype != _FLOAT64):
            raise ValueError(f"base is {base.dtype} {list(base.shape)}, expected float64 [{count}]")
        arguments = ScoredForestArguments(
            forest=self._arguments(columns, is_double, scores.aggregate), base=base, divisor=scores.divisor,
            is_double=int(scores.is_double), labels=Binding("labels"), names=scores.names, kind=scores.kind,
            column=scores.column, threshold=scores.threshold,
        )  # fmt: skip
        call = Call(score_trees, arguments, Items(StepField.TOKENS, grain=_GRAIN), scratch=8 * count)
        return NodeProgram([[call]], 0, self.row_nanoseconds)

    def _arguments(self, columns: int, is_double: bool, aggregate: int) -> ForestArguments:
        return ForestArguments(
            **addresses_of(self.arrays), trees=len(self.roots), x=Binding("x"), row_bytes=columns * (4 << is_double),
            is_double=int(is_double), out=Binding("out"), num_targets=self.num_targets, aggregate=aggregate,
        )  # fmt: skip

    @cached_property
    def _nodes(self) -> NDArray[Any]:
        nodes = huge_array((len(self.features) * _BYTES,), np.uint8).view(_NODE)
        nodes["threshold"], nodes["feature"], nodes["mode"] = self.thresholds, self.features, self.modes
        nodes["missing"] = self.missing_tracks_true
        nodes["true"], nodes["false"] = self.true_children, self.false_children
        nodes["first"], nodes["last"] = self.leaf_starts[:-1], self.leaf_starts[1:]
        single = (self.modes == LEAF) & (nodes["last"] - nodes["first"] == 1)
        firsts = nodes["first"][single]
        nodes["threshold"][single], nodes["feature"][single] = self.weights[firsts], self.targets[firsts]
        return nodes


class ForestArguments(Arguments):
    """Trees for compiled code (`nodes` holds records of _NODE), rows of features, and rows of combined weights.

    `is_double` is 1 if features are float64, and 0 if they are float32. `aggregate` is SUM, MIN or MAX.
    """

    roots: Address
    nodes: Address
    targets: Address
    weights: Address
    trees: int
    x: Address
    row_bytes: int
    is_double: int
    out: Address
    num_targets: int
    aggregate: int


# A node is one record of half a cache line, because trees are rarely in a cache when a single row walks them. A leaf
# with one weight stores the weight as its threshold and the target as its feature.
_NODE = np.dtype(
    [
        ("threshold", np.float64), ("feature", np.int32), ("mode", np.uint8), ("missing", np.uint8), ("_", np.uint16),
        ("true", np.int32), ("false", np.int32), ("first", np.int32), ("last", np.int32),
    ]
)  # fmt: skip
_BYTES, _FEATURE, _MODE, _MISSING, _TRUE, _FALSE, _FIRST, _LAST = 32, 8, 12, 13, 16, 20, 24, 28


@inline
def _combine(address: int, weight: float, aggregate: int) -> None:
    total = read_float64(address)
    if aggregate == SUM:
        write_float64(address, total + weight)
    elif aggregate == MIN:
        write_float64(address, min(total, weight))
    else:
        write_float64(address, max(total, weight))


@inline
def _following(nodes: int, node: int, at: int, is_double: int) -> Any:
    """Return the child that a row goes to. A leaf returns itself."""
    mode = read_uint8(node + _MODE)
    if mode == LEAF:
        return node
    feature, threshold = np.int64(read_int32(node + _FEATURE)), read_float64(node)
    if is_double != 0:
        value = read_float64(at + 8 * feature)
    else:
        value = np.float64(read_float32(at + 4 * feature))
    if value != value:
        goes = read_uint8(node + _MISSING) != 0 or mode == NEQ
    elif mode == LEQ:
        goes = value <= threshold
    elif mode == LT:
        goes = value < threshold
    elif mode == GTE:
        goes = value >= threshold
    elif mode == GT:
        goes = value > threshold
    elif mode == EQ:
        goes = value == threshold
    else:
        goes = value != threshold
    return nodes + _BYTES * np.int64(read_int32(node + (_TRUE if goes else _FALSE)))


@inline
def _add_leaf(arguments: ForestArguments, node: int, results: int) -> None:
    aggregate = arguments.aggregate
    first, last = np.int64(read_int32(node + _FIRST)), np.int64(read_int32(node + _LAST))
    if last - first == 1:
        _combine(results + 8 * np.int64(read_int32(node + _FEATURE)), read_float64(node), aggregate)
    else:
        for i in range(first, last):
            target = np.int64(read_int32(arguments.targets + 4 * i))
            _combine(results + 8 * target, read_float64(arguments.weights + 8 * i), aggregate)


@inline
def _root(arguments: ForestArguments, tree: int) -> Any:
    return arguments.nodes + _BYTES * np.int64(read_int32(arguments.roots + 4 * tree))


@inline
def _walk(arguments: ForestArguments, at: int, results: int) -> None:
    """Walk the row of features at an address down the trees, and combine the leaves' weights with `results`."""
    nodes, trees, is_double = arguments.nodes, arguments.trees, arguments.is_double
    tree = 0
    # Four trees are walked at a time, so that some proceed while others wait for memory. Leaves are added in order.
    while tree + 4 <= trees:
        a, b = _root(arguments, tree), _root(arguments, tree + 1)
        c, d = _root(arguments, tree + 2), _root(arguments, tree + 3)
        moved = True
        while moved:
            e, f, g, h = a, b, c, d
            a, b = _following(nodes, a, at, is_double), _following(nodes, b, at, is_double)
            c, d = _following(nodes, c, at, is_double), _following(nodes, d, at, is_double)
            moved = (a ^ e) | (b ^ f) | (c ^ g) | (d ^ h) != 0
        _add_leaf(arguments, a, results)
        _add_leaf(arguments, b, results)
        _add_leaf(arguments, c, results)
        _add_leaf(arguments, d, results)
        tree += 4
    while tree < trees:
        node, before = _root(arguments, tree), 0
        while node != before:
            before, node = node, _following(nodes, node, at, is_double)
        _add_leaf(arguments, node, results)
        tree += 1


@native_op(ForestArguments)
def walk_trees(arguments: ForestArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Walk rows [begin, end) of x down the trees, and combine the weights of the leaves with the numbers in `out`."""
    for row in range(begin, end):
        at, results = arguments.x + row * arguments.row_bytes, arguments.out + 8 * row * arguments.num_targets
        _walk(arguments, at, results)
    return 0


class ScoredForestArguments(Arguments):
    """Trees, and the results of a node; see `Scores`. `forest.out` is the address of the scores.

    `base` is the address of float64 [targets], or 0. `divisor` is the number that sums are divided by. `labels` is the
    address of int64 [rows] for the labels of classes, or 0, and `names` is the address of the labels, int64 [classes].
    """

    forest: ForestArguments
    base: Address
    divisor: int
    is_double: int
    labels: Address
    names: Address
    kind: int
    column: int
    threshold: float


@inline
def _is_infinite(value: float) -> bool:
    return value - value != 0.0 and value == value


@inline
def _score(arguments: ScoredForestArguments, sums: int, target: int) -> Any:
    """Return the final sum of a target."""
    value = read_float64(sums + 8 * target)
    if arguments.forest.aggregate != SUM and _is_infinite(value):
        value = 0.0
    if arguments.divisor != 1:
        value = value / np.float64(arguments.divisor)
    if arguments.base != 0:
        value = value + read_float64(arguments.base + 8 * target)
    return value


@inline
def _write_label(arguments: ScoredForestArguments, row: int, index: int) -> None:
    write_int64(arguments.labels + 8 * row, read_int64(arguments.names + 8 * index))


@inline
def _write_pair(arguments: ScoredForestArguments, row: int, sums: int, out: int) -> None:
    """Write the scores and the label of a row of two classes, of which one has a sum."""
    value = np.float32(_score(arguments, sums, arguments.column))
    other = np.float32(1.0) - value if arguments.kind == COMPLEMENT else -value
    write_float32(out, other)
    write_float32(out + 4, value)
    if arguments.kind == LOGISTIC:
        store(out, sigmoid(load(out, 2)), 2)
    _write_label(arguments, row, 1 if value > np.float32(arguments.threshold) else 0)


@inline
def _write_classes(arguments: ScoredForestArguments, row: int, sums: int, out: int) -> None:
    """Write the scores of a row's classes, and the label of the first largest, or of the first NaN, as float32."""
    best, chosen = np.float32(-np.inf), np.int64(0)
    width = arguments.forest.num_targets
    for target in range(width):
        value = np.float32(_score(arguments, sums, target))
        write_float32(out + 4 * target, value)
        if best == best and (value > best or value != value):
            best, chosen = value, np.int64(target)
    _write_label(arguments, row, chosen)
    if arguments.kind == SOFTMAX:
        softmax_of_row(out, out, width)
    elif arguments.kind == SIGMOID:
        for first in range(0, width, LANES):
            store(out + 4 * first, sigmoid(load(out + 4 * first, width - first)), width - first)


@native_op(ScoredForestArguments)
def score_trees(arguments: ScoredForestArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Compute rows [begin, end) of the results. `scratch` has a float64 for each target."""
    forest, kind = arguments.forest, arguments.kind
    targets = forest.num_targets
    start = 0.0 if forest.aggregate == SUM else np.inf if forest.aggregate == MIN else -np.inf
    columns = 2 if kind <= LOGISTIC else targets
    for row in range(begin, end):
        for target in range(targets):
            write_float64(scratch + 8 * target, start)
        _walk(forest, forest.x + row * forest.row_bytes, scratch)
        out = forest.out + row * columns * (8 if arguments.is_double != 0 else 4)
        if kind <= LOGISTIC:
            _write_pair(arguments, row, scratch, out)
        elif kind != VALUES:
            _write_classes(arguments, row, scratch, out)
        else:
            for target in range(targets):
                value = _score(arguments, scratch, target)
                if arguments.is_double != 0:
                    write_float64(out + 8 * target, value)
                else:
                    write_float32(out + 4 * target, np.float32(value))
    return 0


@dataclass(frozen=True, eq=False)
class Scores:
    """The results of a node that are computed from the sums of a forest.

    Attributes:
        kind: VALUES: the sums. CLASSES: the sums as float32, and the label of the largest; SOFTMAX and SIGMOID apply
            the function to these scores. The remaining kinds are for two classes of which only one has a sum s: the
            scores are (-s, s) for NEGATED, (1 - s, s) for COMPLEMENT, and (sigmoid(-s), sigmoid(s)) for LOGISTIC.
        aggregate: SUM, MIN or MAX. A target without leaves is 0.
        divisor: number that the sums are divided by.
        base: float64 [targets], which are added; None = nothing is added.
        names: int64 labels of the classes; None = VALUES.
        column: for two classes, the target of the sum.
        threshold: for two classes, the limit that s of the second class exceeds.
        is_double: True if the results of VALUES are float64 instead of float32.
    """

    kind: int
    aggregate: int = SUM
    divisor: int = 1
    base: NDArray[np.float64] | None = None
    names: NDArray[np.int64] | None = None
    column: int = 0
    threshold: float = 0.0
    is_double: bool = False


def score_forest(
    x: NDArray[Any], forest: Forest, scores: Scores, *, threads: Threads | None = None
) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
    """Return the scores [rows, targets or 2 classes], and the labels [rows], None for VALUES.

    Args:
        x, threads: see `run_forest`.
    """
    rows, columns = _checked_rows(x, forest)
    pair = scores.kind <= LOGISTIC
    out = np.empty((rows, 2 if pair else forest.num_targets), np.float64 if scores.is_double else np.float32)
    labels = None if scores.names is None else np.empty(rows, np.int64)
    program = forest.programs.get(forest.scoring, columns, x.dtype == _FLOAT64, scores)
    program.run(threads, rows, x=x, out=out, labels=labels)
    return out, labels


def _checked_rows(x: NDArray[Any], forest: Forest) -> tuple[int, int]:
    """Return the shape of rows of features, which must fit a forest."""
    dtype = x.dtype
    if x.ndim != 2 or (dtype != _FLOAT32 and dtype != _FLOAT64) or not x.flags.c_contiguous:
        raise ValueError(f"x is {dtype} {list(x.shape)}, expected C-contiguous float32 or float64 [rows, features]")
    rows, columns = x.shape
    if columns < forest.num_features:
        raise ValueError(f"the trees use {forest.num_features} features, but the input has {columns}")
    return rows, columns


def run_forest(
    x: NDArray[Any], forest: Forest, aggregate: int = SUM, *, threads: Threads | None = None
) -> NDArray[np.float64]:
    """Return the combined weights [rows, targets] of a checked forest.

    Args:
        x: float64 or float32 [rows, features]. Comparisons of float32 values have the same results as in float64.
        aggregate: SUM, MIN or MAX. A target without leaves is 0.
        threads: None = only the calling thread.
    """
    rows, columns = _checked_rows(x, forest)
    shape = (rows, forest.num_targets)
    out = np.zeros(shape) if aggregate == SUM else np.full(shape, np.inf if aggregate == MIN else -np.inf)
    program = forest.programs.get(forest.walking, columns, x.dtype == _FLOAT64, aggregate)
    program.run(threads, rows, x=x, out=out)
    if aggregate != SUM:
        out[np.isinf(out)] = 0.0
    return out
