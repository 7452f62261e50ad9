"""The kernels' typed functions refuse arguments that machine code would not check."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.cpu.sampling.sampler import CpuSampler
from genai.kernels.sampling import (
    ASKED,
    LIMIT_PLACE,
    MAX_STEPS,
    NUM_SETTINGS,
    NUM_SPANS,
    OWN,
    ROW,
    SamplingBatch,
    Setting,
    Span,
)

LOGITS = np.zeros((2, 100), np.float32)
SAMPLER = CpuSampler(Threads(1), 100)


def batch(**changes: Any) -> SamplingBatch:
    """Two rows that draw from all tokens."""
    rows = np.zeros(2, ROW)
    rows["span"][1, Span.SOURCE] = 1
    rows["settings"][:, Setting.TEMPERATURE] = rows["counter"] = 1
    plain = SamplingBatch(
        rows=rows,
        plain=True,
        replaced=np.empty((0, 100), np.float32),
        edit_ids=np.array([0, 99], np.int32),
        edit_values=np.zeros(2, np.float32),
        tokens=np.array([0, 99], np.int32),
        masks=np.zeros((1, 4), np.uint32),
    )
    return dataclasses.replace(plain, **changes)


def spans(column: int, value: int) -> np.ndarray:
    changed = batch().rows.copy()
    changed["span"][1, column] = value
    return changed


def test_a_row_is_packed_as_it_is_read() -> None:
    """The bytes that `struct` packs match the record's layout, without gaps."""
    steps, settings = range(1, MAX_STEPS + 1), [0.5 + place for place in range(NUM_SETTINGS)]
    counter, span = [2**64 - 1, 2, 3], [-1, *range(1, NUM_SPANS)]
    (row,) = np.ndarray(1, ROW, ASKED.pack(*steps, *settings) + OWN.pack(*counter, *span))
    assert [list(row[name]) for name in ("steps", "settings", "counter", "span")] == [[*steps], settings, counter, span]
    assert ASKED.size + OWN.size == ROW.itemsize
    (limit,) = np.frombuffer(ASKED.pack(*steps, *settings), np.float64, 1, LIMIT_PLACE)
    assert limit == settings[Setting.MIROSTAT_LIMIT]


def test_a_valid_batch() -> None:
    tokens, probabilities, status = CpuSampler(Threads(2), 100).sample(LOGITS, batch())
    assert (tokens >= 0).all() and status.tolist() == [0, 0]
    np.testing.assert_allclose(probabilities, 0.01)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"rows": np.zeros((2, 3), ROW)}, "rows"),
        ({"rows": np.zeros(4, ROW)[::2]}, "rows"),
        ({"rows": np.zeros(2, np.int64)}, "rows"),
        ({"replaced": np.zeros((1, 99), np.float32)}, "replaced"),
        ({"edit_ids": np.zeros(2, np.int64)}, "edit_ids"),
        ({"edit_values": np.zeros(3, np.float32)}, "edit_values"),
        ({"edit_ids": np.array([0, 100], np.int32)}, "edit_ids range from 0 to 100"),
        ({"tokens": np.array([-1, 5], np.int32)}, "tokens range from -1 to 5"),
        ({"rows": spans(Span.SOURCE, 2)}, "source of a row is 0 to 2, expected 0 to 1"),
        ({"rows": spans(Span.SOURCE, -1)}, "source of a row is -1 to 0"),
        ({"rows": spans(Span.FIRST_EDIT, 3)}, "first edit"),
        ({"rows": spans(Span.END_EDIT, -1)}, "end of the edits"),
        ({"rows": spans(Span.FIRST_TOKEN, -1)}, "first token"),
        ({"rows": spans(Span.END_TOKEN, 3)}, "end of the tokens"),
        ({"rows": spans(Span.MASK, 2)}, "mask of a row is 0 to 2, expected 0 to 1"),
        ({"masks": np.zeros((1, 3), np.uint32)}, "masks"),
        ({"masks": np.zeros((1, 4), np.int32)}, "masks"),
    ],
)
def test_invalid_batches(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SAMPLER.sample(LOGITS, batch(**changes))


def test_arrays_of_other_shapes() -> None:
    with pytest.raises(ValueError, match="logits is float32"):
        SAMPLER.sample(LOGITS[:, :50], batch())
    with pytest.raises(ValueError, match="distributions is float32"):
        SAMPLER.sample(LOGITS, batch(), distributions=LOGITS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows range from 0 to 2"):
        SAMPLER.log_normalizers(LOGITS, np.array([0, 2]), 0)
    with pytest.raises(ValueError, match="top is 101"):
        SAMPLER.log_normalizers(LOGITS, np.array([0]), 101)
