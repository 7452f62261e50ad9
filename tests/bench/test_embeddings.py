"""`genai bench embed`: its cases and figures. Speeds themselves are not judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import genai
from genai.bench.embeddings import bench_embed, cases
from genai.cli.app import run as run_here
from tests.embed.conftest import MODELS


def test_cases_fit_the_model() -> None:
    assert [case.name for case in cases(8192)][-1] == "1 text of 8192"
    names = [case.name for case in cases(512)]
    assert "4 texts of 512" in names and "1 text of 8192" not in names
    assert all(max(case.lengths) <= 60 for case in cases(60))
    (mixed,) = [case for case in cases(512) if len(case.lengths) == 256]
    assert min(mixed.lengths) >= 4 and max(mixed.lengths) <= 400 and len(set(mixed.lengths)) > 50


def test_figures() -> None:
    rows = list(bench_embed(MODELS / "distilbert", repeat=2, threads=1))
    assert [row["case"] for row in rows] == [case.name for case in cases(60)]
    for row, case in zip(rows, cases(60), strict=True):
        assert row["texts/s"] == pytest.approx(len(case.lengths) / row["ms"] * 1e3)
        assert row["tok/s"] == pytest.approx(sum(case.lengths) / row["ms"] * 1e3)


@pytest.mark.oracle
def test_beside_onnxruntime() -> None:
    pytest.importorskip("onnxruntime")
    rows = list(bench_embed(MODELS / "bert", repeat=1, threads=1, compare=True))
    assert rows and all(row["ratio"] == pytest.approx(row["ms"] / row["onnxruntime ms"]) for row in rows)


def test_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_here(["bench", "embed", str(MODELS / "bert"), "-r", "1", "-t", "1", "--json"]) == 0
    assert [row["case"] for row in json.loads(capsys.readouterr().out)] == [case.name for case in cases(60)]
    assert run_here(["bench", "embed", str(MODELS / "bert"), "-r", "1", "-t", "1"]) == 0
    assert "256 texts" not in capsys.readouterr().err
    assert run_here(["bench", "embed", str(tmp_path / "nothing")]) == 1
    assert run_here(["bench", "embed", "pebble"]) == 1
    assert "a model that generates text" in capsys.readouterr().err
    with pytest.raises(genai.ModelFolderError):
        list(bench_embed(tmp_path / "nothing"))
