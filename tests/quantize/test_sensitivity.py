"""What candidates cost: which of them are measured, and what is read off."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from genai.quantize import sensitivity
from genai.quantize.calibration import CalibrationText
from genai.quantize.options import QuantizeOptions
from genai.quantize.quality import Evaluation
from genai.quantize.source import FloatModel
from genai.quantize.streaming import StreamedDecoder
from genai.quantize.targets import candidate_choices
from genai.quantize.workspace import FinishedMatrices

from .conftest import small_folder


def test_the_coarsest_is_measured_and_then_each_third() -> None:
    errors = {"a": 0.1, "b": 0.09, "c": 0.03, "d": 0.02, "e": 0.009, "f": 0.002, "g": 1e-5}
    assert sensitivity.anchors(errors) == ["a", "c", "e"]
    assert sensitivity.anchors({"a": 0.001, "b": 0.0001}) == ["a"]
    assert sensitivity.anchors({"a": 0.0, "b": 0.0}) == ["a"]


def test_what_is_read_off() -> None:
    """Between two measured ones by the power law through both, below all in proportion to the error."""
    errors = {"a": 0.16, "b": 0.04, "c": 0.01, "d": 0.001, "e": 0.0}
    found = sensitivity.interpolated_losses(errors, {"a": 3.2, "c": 0.05})
    assert found["a"] == 3.2 and found["c"] == 0.05
    assert found["b"] == pytest.approx(0.4)  # errors 4 apart, divergences 8 apart
    assert found["d"] == pytest.approx(0.005)
    assert 0 <= found["e"] < 1e-9


def test_read_off_is_near_to_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate of every matrix, measured after all, within a factor of two; and remembered."""
    choices = partial(candidate_choices, QuantizeOptions(target_bits=5.0))
    with FloatModel(small_folder(tmp_path / "float", hidden_size=128, intermediate_size=256)) as source:
        decoder = StreamedDecoder(source)
        tokens = np.random.default_rng(0).integers(0, decoder.vocab_size, (4, 64))
        evaluation = Evaluation(decoder, CalibrationText(tokens, "drawn"))
        with FinishedMatrices(tmp_path / "some", {}) as workspace:
            found = sensitivity.measure_candidates(source, choices, evaluation, workspace)
            calls: list[str] = []
            monkeypatch.setattr(sensitivity, "_rounded", lambda *_: calls.append("again"))
            assert sensitivity.measure_candidates(source, choices, evaluation, workspace) == found and not calls
            monkeypatch.undo()
        with FinishedMatrices(tmp_path / "all", {}) as workspace:
            monkeypatch.setattr(sensitivity, "anchors", list)
            whole = sensitivity.measure_candidates(source, choices, evaluation, workspace)
        decoder.close()
    for name, candidates in whole.items():
        for one, other in zip(candidates, found[name], strict=True):
            assert (one.label, one.nbytes) == (other.label, other.nbytes)
            assert 0.5 < (other.loss + 1e-6) / (one.loss + 1e-6) < 2, (name, one, other)
