"""Random graphs of many operators and operator sets against onnxruntime: a part of what tools.graph_fuzz runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx
import pytest

from tools.graph_fuzz.checking import check_seed
from tools.graph_fuzz.comparing import difference
from tools.graph_fuzz.operators import OPERATORS

pytestmark = pytest.mark.oracle


SEQUENCES = [name for name in OPERATORS if "Sequence" in name]


def unexplained(first: int, count: int, operators: Sequence[str] = tuple(OPERATORS)) -> tuple[list[str], Counter[str]]:
    counts: Counter[str] = Counter()
    found = [
        f"seed {seed}: {finding.what}\n{onnx.printer.to_text(finding.model.graph)[:1000]}"
        for seed in range(first, first + count)
        for finding in check_seed(seed, counts, operators=operators)
        if not finding.reason
    ]
    return found, counts


@pytest.mark.parametrize("first", range(0, 300, 150))
def test_random_graphs(first):
    found, counts = unexplained(first, 150)
    assert not found, "\n".join(found)
    assert counts["graphs compared"] > 120
    assert counts["graphs with only constants"] > 12
    assert counts["nodes compared"] > 400


@pytest.mark.parametrize(
    "operators", [SEQUENCES, ["DynamicQuantizeLinear"], ["Gemm"], ["MaxPool"]], ids=lambda names: names[0]
)
def test_random_graphs_of_few_operators(operators):
    """Faults that occur only with certain inputs, which graphs of all operators seldom draw."""
    found, counts = unexplained(0, 50, operators)
    assert not found, "\n".join(found)
    assert counts["nodes compared"] > 100


@pytest.mark.fuzz
def test_twenty_thousand_random_graphs():
    found, _ = unexplained(10**6, 20_000)
    assert not found, "\n".join(found)


def test_differences_are_seen():
    one, two = np.ones(3, np.float32), np.full(3, 2, np.float32)
    assert not difference([one], [one])
    assert difference([one], [two])
    assert difference([one], [one.astype(np.float64)])
    assert difference([one], [one[:2]])
    assert difference([np.array([np.nan])], [np.array([0.0])])
    assert difference([np.array(["a"], object)], [np.array(["b"], object)])
    assert difference([np.array([1])], [np.array([2])])
    assert not difference([[one, two[:2]]], [[one, two[:2]]])
    assert difference([[one, two]], [[one, one]])
    assert difference([[one]], [[one, one]])
    assert difference([one], [[one]])
