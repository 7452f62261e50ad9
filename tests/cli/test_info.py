"""`genai info` in a real process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from genai.cli.app import run
from genai.models.folders import bundled_adapter, bundled_model


def info(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "genai", "info", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **changes},
    )


def assert_three_part_error(result: subprocess.CompletedProcess[str], code: int) -> None:
    assert result.returncode == code, result.stderr
    assert re.search(r"error: .+\n  why: .+\n  fix: .+", result.stderr), result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_text_is_aligned() -> None:
    result = info()
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    column = lines[0].index("/")
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines)
    for text in ("bits per weight", "cache per token", "fp16 is used", "fits with the full", "batched over the paged"):
        assert text in result.stdout
    assert result.stderr == ""


def test_json_and_a_context() -> None:
    facts = json.loads(info("--json", "-c", "100").stdout)
    assert facts["memory"]["context_size"] == 100
    assert facts["memory"]["fits"] is True
    assert json.loads(info("--json", "--kv-type", "fp32").stdout)["kv_dtype"] == "fp32"


def test_a_poor_locale(tmp_path: Path) -> None:
    """A name with characters that the terminal cannot show is escaped."""
    folder = tmp_path / "caf\u00e9\x1b[31m"
    folder.symlink_to(bundled_model())
    result = info(str(folder), LANG="C", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["/no/such/folder"], 1),
        (["/etc"], 1),
        (["/etc/passwd"], 1),
        (["-c", "0"], 2),
        (["-c", "-5"], 2),
        (["-c", "100000000"], 2),
        (["--kv-type", "int1"], 2),
        (["--kv-type", "fp8"], 2),
        (["--accuracy", "best"], 2),
        (["--device", "cuda:99"], 1),
        (["--device", "tpu"], 2),
        (["graph.onnx", "--device", "auto"], 2),
        (["graph.onnx", "-c", "5"], 2),
    ],
)
def test_errors(arguments: list[str], code: int) -> None:
    assert_three_part_error(info(*arguments), code)


@pytest.mark.parametrize("arguments", [["-c", "many"], ["-c", "1.5"], ["--nonsense"], ["a", "b"]])
def test_usage(arguments: list[str]) -> None:
    result = info(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_one_number_of_parameters_for_a_checkpoint_and_its_graph(capsys: pytest.CaptureFixture[str]) -> None:
    graph = str(bundled_model() / "model.onnx")
    sources = ("tools/bundled_model/checkpoint", str(bundled_model()), graph)
    found = []
    for source in sources:
        assert run(["info", source, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [facts["parameters"] for facts in found] == [4_328_704] * 3
    assert run(["info", sources[0]]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^memory when built +\d+\.\d MB$", said, re.M) and "fits in the free memory, " in said
    assert "read bytes" not in said and "defaults" not in said
    assert "past_key_values.0.key to past_key_values.5.key (6 values) tensor(float)" in found[2]["inputs"]


def test_facts_of_an_adapter_and_a_reranker(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lora", "info", str(bundled_adapter("pirate"))]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^bytes +208\.9 kB$", said, re.M) and re.search(r"^other inputs +none$", said, re.M)
    assert run(["info", "tests/embed/models/bert_reranker"]) == 0
    assert not re.search("^(pooling|similarity|modules) ", capsys.readouterr().out, re.M)
