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
from ..jit.memory import read_float32, read_float64, read_int32, read_uint8, write_float64
from ..jit.native import native_op
from ..program.bound_program import BoundPrograms, NodeProgram, addresses_of
from ..program.calls import Call, Items
from ..program.step_table import StepField
from ..program.thread_pool import Threads
from .functions import activation

# Tests of nodes, ways to combine weights, and ways to derive the scores of two classes from one.
LEQ, LT, GTE, GT, EQ, NEQ, LEAF = 0, 1, 2, 3, 4, 5, 6
SUM, MIN, MAX = 0, 1, 2
NEGATED, COMPLEMENT, LOGISTIC = 0, 1, 2
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
        """The programs that walk the trees, by the arguments of `walking`. They contain the addresses of the arrays."""
        return BoundPrograms()

    def walking(self, columns: int, is_double: bool, aggregate: int) -> NodeProgram:
        """Return a program for rows of `columns` features, with bindings for x and out."""
        arguments = ForestArguments(
            **addresses_of(self.arrays), trees=len(self.roots), x=Binding("x"), row_bytes=columns * (4 << is_double),
            is_double=int(is_double), out=Binding("out"), num_targets=self.num_targets, aggregate=aggregate,
        )  # fmt: skip
        return NodeProgram(
            [[Call(walk_trees, arguments, Items(StepField.TOKENS, grain=_GRAIN))]], 0, self.row_nanoseconds
        )

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


@native_op(ForestArguments)
def walk_trees(arguments: ForestArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Walk rows [begin, end) of x down the trees, and combine the weights of the leaves with the numbers in `out`."""
    nodes, trees, is_double = arguments.nodes, arguments.trees, arguments.is_double
    for row in range(begin, end):
        at, results = arguments.x + row * arguments.row_bytes, arguments.out + 8 * row * arguments.num_targets
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
    return 0


def binary_scores(
    scores: NDArray[np.float64], column: int, base: float, threshold: float, kind: int
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return the class (0 or 1) of each row, and both scores: (-s, s), (1 - s, s), or (sigmoid(-s), sigmoid(s)).

    Args:
        scores: return value of `run_forest`; s is its column `column` plus `base`, as float32.
        kind: NEGATED, COMPLEMENT or LOGISTIC.
    """
    if not 0 <= column < scores.shape[1]:
        raise ValueError(f"scores are {scores.dtype} {list(scores.shape)}, which has no column {column}")
    if len(scores) == 1:  # numbers take less time than arrays, with the same roundings
        value = np.float32(scores.item(0, column) + base)
        score, pairs = np.array([value]), np.array([[1 - value if kind == COMPLEMENT else -value, value]])
    else:
        score = (scores[:, column] + base).astype(np.float32)
        pairs = np.stack([1 - score if kind == COMPLEMENT else -score, score], axis=1)
    if kind == LOGISTIC and pairs.size:
        pairs = activation("sigmoid", pairs)
    return (score > np.float64(threshold)).astype(np.int8), pairs


def run_forest(
    x: NDArray[Any], forest: Forest, aggregate: int = SUM, *, threads: Threads | None = None
) -> NDArray[np.float64]:
    """Return the combined weights [rows, targets] of a checked forest.

    Args:
        x: float64 or float32 [rows, features]. Comparisons of float32 values have the same results as in float64.
        aggregate: SUM, MIN or MAX. A target without leaves is 0.
        threads: None = only the calling thread.
    """
    dtype = x.dtype
    if x.ndim != 2 or (dtype != _FLOAT32 and dtype != _FLOAT64) or not x.flags.c_contiguous:
        raise ValueError(f"x is {dtype} {list(x.shape)}, expected C-contiguous float32 or float64 [rows, features]")
    rows, columns = x.shape
    if columns < forest.num_features:
        raise ValueError(f"the trees use {forest.num_features} features, but the input has {columns}")
    shape = (rows, forest.num_targets)
    out = np.zeros(shape) if aggregate == SUM else np.full(shape, np.inf if aggregate == MIN else -np.inf)
    program = forest.programs.get(forest.walking, columns, dtype == _FLOAT64, aggregate)
    program.run(threads, rows, x=x, out=out)
    if aggregate != SUM:
        out[np.isinf(out)] = 0.0
    return out
