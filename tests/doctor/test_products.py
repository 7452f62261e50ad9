"""Multiplication speeds: missing instruction sets are not tried, and existing ones have a rate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from genai.doctor.processor import read_processor
from genai.doctor.speeds import measure_products


def test_a_plain_processor_is_measured_in_float32_alone() -> None:
    found = measure_products(threads=2, repeat=1, processor=replace(read_processor(), features=()))
    assert list(found) == ["fp32"]
    assert 1e8 < found["fp32"] < 1e15


def test_this_processor() -> None:
    found = measure_products(threads=1, repeat=1)
    assert all(1e8 < rate < 1e16 for rate in found.values())
    assert ("vnni int8" in found) == ("AVX512-VNNI" in read_processor().features)
    if "amx int8" in found:
        assert found["amx int8"] > found["fp32"]


@pytest.mark.parametrize("name", ["threads", "repeat"])
def test_numbers_below_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        measure_products(**{name: 0})
