"""docs/operators.md says what the registry holds."""

from __future__ import annotations

from tools.operator_table import PAGE, page, rows


def test_the_page_is_up_to_date():
    # An operator that a test registered is not of the source "ours", so it does not appear.
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_standard_operator_can_run():
    missing = [name for domain in ("", "ai.onnx.ml") for name, source, _ in rows(domain) if source == "none"]
    assert not missing
