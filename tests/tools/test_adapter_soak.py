"""One round of the soak in every run, half a minute of it in the long tests; developers run it for minutes."""

from __future__ import annotations

import sys

import pytest

from tools.adapter_soak import soak

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system's own account of memory")


def test_a_round() -> None:
    found, problems, sizes = soak(0.0, 1, rounds=1)
    assert problems == []
    assert len(sizes) == 1
    assert found["equal"] > 40 and found["cancelled"] > 0 and found["different"] == 0


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize("kv_type", ["int8", "int4"])
def test_half_a_minute(kv_type: str) -> None:
    found, problems, _ = soak(0.5, 2, kv_dtype=kv_type, kv_dtype_force=kv_type == "int4")
    assert problems == []
    assert found["loaded"] > 0 and found["overflowed"] > 0
