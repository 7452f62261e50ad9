"""docs/reference/operators.md and the indexes of files match the registries."""

from __future__ import annotations

import pytest

from genai.onnx.node import OURS
from genai.ops import registry
from tools import operator_index
from tools.operator_table import DOMAINS, PAGE, page, rows


@pytest.mark.parametrize("package", operator_index.PACKAGES)
def test_the_index_is_up_to_date(package: str) -> None:
    path = operator_index.ROOT / "genai" / package / "index.py"
    assert path.read_text(encoding="utf-8") == operator_index.source(package), "run: python -m tools.operator_index"


def test_the_page_is_up_to_date():
    # An operator that a test registered is not of the source "ours", so it does not appear.
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tools.operator_table"


def test_every_domain_is_on_the_page():
    """Except the domain of the operators that only this package writes."""
    found = {entry.domain for entry in registry.entries() if entry.source == "ours"}
    missing = found - {*DOMAINS, OURS}
    assert not missing, f"tools/operator_table.py: DOMAINS has no {sorted(missing)}"


def test_every_standard_operator_can_run():
    missing = [name for domain in ("", "ai.onnx.ml") for name, source, _ in rows(domain) if source == "none"]
    assert not missing
