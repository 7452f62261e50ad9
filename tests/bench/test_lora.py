"""The cost of adapters is computed from the right runs."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

import genai
from genai import ContextOverflowError, Model, OptionError
from genai.bench import lora
from genai.cli.app import run


def test_made_up_adapters_are_like_trained_ones(bundled: Model) -> None:
    """The factors for q, k and v are separate, although the graph fuses these projections into one."""
    made = lora.random_adapter(bundled, 8, 0)
    adapters = genai.Adapters(bundled)
    adapters.load(genai.models.folders.bundled_adapter("words"), "rank 4")
    numbers = adapters.info("rank 4")["bytes"] / 4
    assert 0.95 * 8 * numbers < made.nbytes < 8 * numbers


def test_shares_are_of_the_time_without_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the speed means 100 % more time."""

    def seconds(model: Any, adapted: Any, *_: int) -> float:
        with_adapter = adapted is not None and adapted != [None] * len(adapted or [])
        return 2.0 if with_adapter else 1.25 if model == "placed" else 1.0

    class Loaded:
        def __init__(self, lora: bool) -> None:
            self.name, self.context_size = "placed" if lora else "plain", 1024

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(lora, "random_adapter", lambda *_: SimpleNamespace(nbytes=1 << 20))
    monkeypatch.setattr(lora, "_decode", lambda model, mixes, *_: seconds(model.name, mixes))
    monkeypatch.setattr(lora, "_prefill", lambda model, mix, *_: seconds(model.name, mix and [mix]))
    rows = list(lora.bench_lora(Loaded, ranks=[4], batches=[3], context=8, tokens=6, prompt=40, repeat=2))  # type: ignore[arg-type]
    assert [(row["run"], row["tok/s"]) for row in rows] == [("decode, batch 3", 18.0), ("prefill, 40 tokens", 40.0)]
    for row in rows:
        assert (row["places share"], row["adapters share"]) == pytest.approx((0.25, 1.0))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "lora", "-r", "4", "-b", "2", "-c", "8", "-n", "2", "-p", "40", "--repeat", "1"]
    assert run([*command, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.strip()]
    rows = lines[0] if isinstance(lines[0], list) else lines
    assert [row["run"] for row in rows] == ["decode, batch 2", "prefill, 40 tokens"]


def test_runs_that_cannot_be(bundled: Model) -> None:
    def load(_: bool) -> Model:
        return Model(bundled.folder)

    options = {"batches": [1], "tokens": 1, "prompt": 1}
    with pytest.raises(OptionError, match="rank 1025"):
        next(lora.bench_lora(load, ranks=[4, 1025], context=1, **options))  # type: ignore[arg-type]
    with pytest.raises(ContextOverflowError, match="a run needs"):
        next(lora.bench_lora(load, ranks=[4], context=2000, **options))  # type: ignore[arg-type]
