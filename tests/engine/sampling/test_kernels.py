"""The kernels' typed functions refuse what machine code would not notice."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.logprobs import log_normalizers
from genai.kernels.cpu.sampling import sample_batch
from genai.kernels.cpu.sampling_steps import codes
from genai.kernels.cpu.sampling_steps.batch import SamplingBatch, Workspace

LOGITS = np.zeros((2, 100), np.float32)


def batch(**changes: Any) -> SamplingBatch:
    """Two rows that draw from all tokens."""
    spans = np.zeros((2, codes.NUM_SPANS), np.int64)
    spans[1, codes.SOURCE] = 1
    settings = np.zeros((2, codes.NUM_SETTINGS))
    settings[:, codes.DIVISOR] = 1
    plain = SamplingBatch(
        steps=np.zeros((2, codes.MAX_STEPS), np.int64),
        settings=settings,
        counters=np.ones((2, 3), np.uint64),
        spans=spans,
        replaced=np.empty((0, 100), np.float32),
        edit_ids=np.array([0, 99], np.int32),
        edit_values=np.zeros(2, np.float32),
        tokens=np.array([0, 99], np.int32),
    )
    return dataclasses.replace(plain, **changes)


def spans(column: int, value: int) -> np.ndarray:
    changed = batch().spans.copy()
    changed[1, column] = value
    return changed


def test_a_valid_batch() -> None:
    tokens, probabilities, status = sample_batch(LOGITS, batch(), Workspace.allocate(3, 100))
    assert (tokens >= 0).all() and status.tolist() == [0, 0]
    np.testing.assert_allclose(probabilities, 0.01)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"steps": np.zeros((2, 3), np.int64)}, "steps"),
        ({"settings": np.zeros((2, codes.NUM_SETTINGS), np.float32)}, "settings"),
        ({"counters": np.zeros((2, 3), np.int64)}, "counters"),
        ({"spans": np.zeros((1, codes.NUM_SPANS), np.int64)}, "spans"),
        ({"replaced": np.zeros((1, 99), np.float32)}, "replaced"),
        ({"edit_ids": np.zeros(2, np.int64)}, "edit_ids"),
        ({"edit_values": np.zeros(3, np.float32)}, "edit_values"),
        ({"edit_ids": np.array([0, 100], np.int32)}, "edit_ids reach from 0 to 100"),
        ({"tokens": np.array([-1, 5], np.int32)}, "tokens reach from -1 to 5"),
        ({"spans": spans(codes.SOURCE, 2)}, "source of a row is 0 to 2, expected 0 to 1"),
        ({"spans": spans(codes.SOURCE, -1)}, "source of a row is -1 to 0"),
        ({"spans": spans(codes.FIRST_EDIT, 3)}, "first edit"),
        ({"spans": spans(codes.END_EDIT, -1)}, "end of the edits"),
        ({"spans": spans(codes.FIRST_TOKEN, -1)}, "first token"),
        ({"spans": spans(codes.END_TOKEN, 3)}, "end of the tokens"),
    ],
)
def test_invalid_batches(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        sample_batch(LOGITS, batch(**changes), Workspace.allocate(1, 100))


def test_arrays_of_other_shapes() -> None:
    workspace = Workspace.allocate(1, 100)
    with pytest.raises(ValueError, match="logits is float32"):
        sample_batch(LOGITS[:, :50], batch(), workspace)
    with pytest.raises(ValueError, match="distributions is float32"):
        sample_batch(LOGITS, batch(), workspace, distributions=LOGITS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows reach from 0 to 2"):
        log_normalizers(LOGITS, np.array([0, 2]), 0, workspace)
    with pytest.raises(ValueError, match="top is 101"):
        log_normalizers(LOGITS, np.array([0]), 101, workspace)
