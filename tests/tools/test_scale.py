"""The simulation of several servers: it agrees with arithmetic, repeats itself, and shows the effect of sessions."""

from __future__ import annotations

import sys

import pytest

from tools import scale

SHORT = scale.Traffic(turns=4.0, system=2000, question=100, reply=50, think=5)


def test_sessions_on_one_node_use_its_cache() -> None:
    found = {policy: scale.simulate(8, 0.7, policy, seconds=300, traffic=SHORT) for policy in scale.POLICIES}
    assert found["session"].cached > 0.6 > 0.3 > found["random"].cached
    assert found["session"].busy < found["random"].busy


def test_the_simulation_agrees_with_arithmetic() -> None:
    node, seconds = scale.Node(), 600.0
    found = scale.simulate(8, 0.6, "session", seconds=seconds, traffic=SHORT)
    assert found.requests / (seconds / 2) == pytest.approx(0.6 * 8 * SHORT.capacity(node, cached=True), rel=0.15)
    assert found.busy == pytest.approx(0.6, abs=0.1) and found.wait(0.5) == 0.0


def test_the_same_seed_gives_the_same_result() -> None:
    assert scale.simulate(3, 0.7, "two", seconds=60) == scale.simulate(3, 0.7, "two", seconds=60)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["scale", "--nodes", "2", "--seconds", "60"])
    scale.main()
    assert capsys.readouterr().out.count("\n") == 2 + len(scale.POLICIES)
    monkeypatch.setattr(sys, "argv", ["scale", "--load", "0"])
    with pytest.raises(SystemExit):
        scale.main()
