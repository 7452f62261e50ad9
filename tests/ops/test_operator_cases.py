"""Rare operators, run by onnx.reference or by our kernels: random nodes have onnxruntime's results."""

from __future__ import annotations

import numpy as np
import pytest

from tools.operator_cases import CASES, NOT_COMPARED, compare
from tools.operator_table import rows

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("name", CASES)
def test_random_nodes(name):
    generator = np.random.default_rng(1)
    answers = []
    for _ in range(12):
        case = CASES[name](generator)
        answers.append(compare(case))
        assert answers[-1] in ("equal", "refused"), case
    assert "equal" in answers


def test_every_borrowed_operator_is_compared_or_says_why_not():
    borrowed = {name for domain in ("", "ai.onnx.ml") for name, source, _ in rows(domain) if source == "onnx.reference"}
    assert borrowed <= CASES.keys() | NOT_COMPARED.keys()
