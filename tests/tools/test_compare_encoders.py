"""The comparison of encoders names missing peers, measures the others, and takes only what it can measure."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.embed.conftest import MODELS
from tools import compare_encoders
from tools.compare_encoders import Engine, lengths_of, measure, table, texts_of


def test_the_lengths_of_texts() -> None:
    assert lengths_of("32x128", 5) == [128] * 32
    mixed = lengths_of("mixed", 300)
    assert len(mixed) == 300 and min(mixed) >= 4 and max(mixed) == 400 and len(set(mixed)) > 50
    made = texts_of(MODELS / "bert", [5, 9, 16], seed=0)
    assert [len(ids) for ids in made["ids"]] == [5, 9, 16] and len(set(made["texts"])) == 3


def test_engines_that_are_missing_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    peers = tmp_path / "no-python"
    compare_encoders.main(
        ["--model", str(MODELS / "bert"), "--work", str(tmp_path), "--peers", str(peers), "--cases", "1x16",
         "--rounds", "2", "--threads", "1", "--json", str(figures)]
    )  # fmt: skip
    shown = capsys.readouterr().out
    (row,) = (line for line in shown.splitlines() if line.startswith("| 1x16"))
    assert row.split("|")[2].strip().replace(".", "").isdigit() and row.count("| -") == 5
    assert "onnxruntime: " in shown and "cannot be started: No such file" in shown
    assert "llama.cpp-f32: not installed: --llama-cpp is not given" in shown
    (found,) = json.loads(figures.read_text())
    assert list(found["seconds"]["1x16"]) == ["genai"] and len(found["seconds"]["1x16"]["genai"]) == 2
    assert found["tokens"] == {"1x16": 16} and found["engines"]["genai"]["genai"]


WORKER = """
import json, sys
print(json.dumps({"versions": {}}), flush=True)
for line in sys.stdin:
    if END: sys.exit("the weights are gone")
    print(json.dumps({"seconds": SECONDS, "runs": 1, "vectors": VECTORS}), flush=True)
"""


def engine(name: str, seconds: float, vectors: Sequence[Sequence[float]], *, ends: bool = False) -> Engine:
    values = f"SECONDS, VECTORS, END = {seconds}, {vectors}, {ends}"
    return Engine(name, [sys.executable, "-c", values + WORKER], {})


def test_engines_are_measured_and_compared_in_turns(tmp_path: Path) -> None:
    engines = [
        engine("genai", 0.01, [[1, 0]]), engine("slow", 0.03, [[2, 0]]), engine("wrong", 0.02, [[1, 1]]),
        engine("broken", 0.01, [[1, 0]], ends=True),
    ]  # fmt: skip
    try:
        for one in engines:
            one.start(tmp_path / "log")
        times, cosines = measure(engines, {"1x16": "{}"}, 3)
    finally:
        for one in engines:
            one.stop()
    assert times == {"1x16": {"genai": [0.01] * 3, "slow": [0.03] * 3, "wrong": [0.02] * 3}}
    assert cosines["1x16"]["slow"] == pytest.approx(1) and cosines["1x16"]["wrong"] == pytest.approx(0.7071, abs=1e-4)
    assert "ended during 1x16" in engines[3].missing
    assert table(times, engines)[-1] == "| 1x16 | 10.0 | 30.0 | 20.0 | - | 2.00 |"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cases", "1x16,2x2"], "'2x2' is not one of 1x16"),
        (["--engines", "vllm"], "'vllm' is not one of genai"),
        (["--rounds", "0"], "0 is below 1"),
        (["--peers", "/nonexistent", "--shape", "minilm-l6"], "the models cannot be written: /nonexistent"),
    ],
)
def test_what_cannot_be_measured(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare_encoders.main(["--work", str(tmp_path), *arguments])
    assert said in capsys.readouterr().err
