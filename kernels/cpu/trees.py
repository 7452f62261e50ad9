"""Ensembles of decision trees: every row walks every tree, and the leaves' weights are combined per target."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import check
from .jit import kernel
from .team import Team, run

LEQ, LT, GTE, GT, EQ, NEQ, LEAF = range(7)
SUM, MIN, MAX = range(3)
_NANOSECONDS_PER_NODE = 4.0
_FLOAT64 = np.dtype(np.float64)


@dataclass(frozen=True)
class Forest:
    """Trees in flat arrays, one entry per node; children and roots are positions in them.

    Attributes:
        roots: int32 [trees].
        features, true_children, false_children: int32 [nodes].
        thresholds: float64 [nodes].
        modes: uint8 [nodes], LEQ ... LEAF.
        missing_tracks_true: uint8 [nodes], where NaN goes.
        leaf_starts: int32 [nodes + 1]; node i adds weights leaf_starts[i]:leaf_starts[i + 1].
        targets: int32 [weights]; weights: float64 [weights].
        num_targets: columns of the result.
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
        """Every index is inside its array, and the nodes are trees: the walk ends.

        Raises:
            ValueError: they are not.
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
            raise ValueError("a tree's feature is negative")
        if np.bincount(np.concatenate([children, self.roots]), minlength=1).max(initial=0) > 1:
            raise ValueError("a tree's node has two parents, so it is no tree")
        # With one parent at most, whoever is not reached from a root goes round in a circle.
        reached, frontier = 0, self.roots
        while len(frontier):
            reached += len(frontier)
            walking = frontier[inner[frontier]]
            frontier = np.concatenate([self.true_children[walking], self.false_children[walking]])
        if reached != nodes:
            raise ValueError(f"{nodes - reached} nodes of the trees cannot be reached from a root")

    @cached_property
    def num_features(self) -> int:
        """Columns that the input must have at least."""
        inner = self.modes != LEAF
        return int(self.features[inner].max()) + 1 if inner.any() else 0


@kernel(
    "void(float64[:,::1], int32[::1], int32[::1], int32[::1], int32[::1], float64[::1], uint8[::1], uint8[::1], "
    "int32[::1], int32[::1], float64[::1], int64, float64[:,::1], int64, int64)"
)
def walk_trees(
    x: Any,
    roots: Any,
    features: Any,
    true_children: Any,
    false_children: Any,
    thresholds: Any,
    modes: Any,
    missing: Any,
    leaf_starts: Any,
    targets: Any,
    weights: Any,
    aggregate: int,
    out: Any,
    begin: int,
    end: int,
) -> None:
    """Rows [begin, end): what the leaves give, added to (or compared with) what is in `out`."""
    for row in range(begin, end):
        for tree in range(roots.shape[0]):
            node = roots[tree]
            mode = modes[node]
            while mode != LEAF:
                value, threshold = x[row, features[node]], thresholds[node]
                if value != value:
                    goes = missing[node] != 0 or mode == NEQ
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
                node = true_children[node] if goes else false_children[node]
                mode = modes[node]
            for i in range(leaf_starts[node], leaf_starts[node + 1]):
                target, weight = targets[i], weights[i]
                if aggregate == SUM:
                    out[row, target] += weight
                elif aggregate == MIN:
                    out[row, target] = min(out[row, target], weight)
                else:
                    out[row, target] = max(out[row, target], weight)


def run_forest(
    x: NDArray[np.float64], forest: Forest, aggregate: int = SUM, *, team: Team | None = None
) -> NDArray[np.float64]:
    """Combined weights [rows, targets] of a checked forest.

    Args:
        x: float64 [rows, features].
        aggregate: SUM, MIN or MAX; a target that no leaf names is 0.

    Raises:
        ValueError: x has too few columns.
    """
    check("x", x, (None, None), _FLOAT64)
    if x.shape[1] < forest.num_features:
        raise ValueError(f"the trees look at {forest.num_features} features, the input has {x.shape[1]}")
    start = {SUM: 0.0, MIN: np.inf, MAX: -np.inf}[aggregate]
    out = np.full((len(x), forest.num_targets), start)
    arguments = (
        x,
        forest.roots,
        forest.features,
        forest.true_children,
        forest.false_children,
        forest.thresholds,
        forest.modes,
        forest.missing_tracks_true,
        forest.leaf_starts,
        forest.targets,
        forest.weights,
        aggregate,
        out,
    )
    depth = max(len(forest.features) // max(len(forest.roots), 1), 1).bit_length()
    leaf = max(len(forest.weights) // max(len(forest.features), 1), 1)
    work = len(x) * len(forest.roots) * (depth + leaf) * _NANOSECONDS_PER_NODE
    run(team, walk_trees, arguments, len(x), work=work, grain=8)
    if aggregate != SUM:
        out[np.isinf(out)] = 0.0
    return out
