"""A coding agent's conversation: each turn computes only what is new, and equals that of a server without a cache."""

from __future__ import annotations

from pathlib import Path

from tools.server_agents import Turn, replay
from tools.server_models import make_model


def test_a_small_conversation(tmp_path: Path) -> None:
    turns = replay(make_model(tmp_path / "agents"), turns=4, tokens=2000)
    assert [turn.kind for turn in turns] == ["call", "call", "call", "text"]
    assert [turn.problems for turn in turns] == [[], [], [], []]
    assert turns[0].prompt > 1900 and not turns[0].cached
    assert all(turn.prompt - turn.cached < 320 for turn in turns[1:])


def test_problems_are_named() -> None:
    turn = Turn(100, 32, 64, 0.0, 0.0, False, "call")
    assert len(turn.problems) == 2 and "32 of at least 64" in turn.problems[1]
