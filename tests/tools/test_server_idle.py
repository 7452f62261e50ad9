"""Streams that wait cost memory, which the tool measures; the figures themselves are not judged."""

from __future__ import annotations

import sys

import pytest

from tools import server_idle


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system's own account of memory")
def test_a_few_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genai.server.sse.PING_SECONDS", 0.05)
    before, after = server_idle.measure(5)
    assert before > 0 and after > 0
