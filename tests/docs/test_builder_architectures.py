"""The page about onnxruntime-genai's builder: its architectures, results and reasons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.builder_architectures import CODE, PAGE, REASONS, WITH_CODE, architectures

ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
]


def test_each_refusal_has_a_reason() -> None:
    for _, *results, reason in (row for row in ROWS if len(row) == 4):
        if results == ["not tried"] * 2:
            assert reason == CODE
        elif all(result.startswith("batched") for result in results):
            assert reason == ""
        else:
            assert reason in REASONS.values()


def test_what_runs_agrees() -> None:
    errors = [float(found) for row in ROWS for found in re.findall(r"batched, (\S+e-\d+)", " | ".join(row[1:3]))]
    assert len(errors) > 40
    assert max(errors) < 5e-3  # fp16


def test_the_installed_builder_has_no_other_architectures() -> None:
    package = pytest.importorskip("importlib.util").find_spec("onnxruntime_genai")
    if package is None:
        pytest.skip("onnxruntime-genai is not installed")
    source = Path(next(iter(package.submodule_search_locations))) / "models" / "builder.py"
    listed = {re.findall(r"`(.+?)`", row[0])[0] for row in ROWS if len(row) == 4}
    assert listed == set(architectures(source.read_text(encoding="utf-8")))
    assert set(WITH_CODE) <= listed
