"""`genai embed` and `genai rerank`, run as commands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from genai import Embedder, Reranker
from genai.cli import app
from tests.cli.processes import run
from tests.embed.conftest import MODELS

MODEL, RERANKER = str(MODELS / "bert"), str(MODELS / "bert_reranker")


def test_texts_on_the_command_line() -> None:
    result = run("embed", MODEL, "-p", "the cat", "-p", "a dog", "--dimensions", "5")
    assert result.returncode == 0, result.stderr
    found = np.array([json.loads(line) for line in result.stdout.splitlines()], np.float32)
    with Embedder(MODEL, threads=1) as embedder:
        np.testing.assert_array_equal(found, embedder.embed(["the cat", "a dog"], dimensions=5))
    assert "5 dimensions, mean pooling" in result.stderr
    assert run("embed", MODEL, "-p", "the cat", "--quiet").stderr == ""


def test_a_file(tmp_path: Path) -> None:
    source, output = tmp_path / "in.csv", tmp_path / "out.npy"
    source.write_text("name,body\n1,the cat\n2,a dog\n")
    result = run("embed", MODEL, str(source), "-o", str(output), "--column", "body")
    assert result.returncode == 0, result.stderr
    assert "2 texts" in result.stderr
    with Embedder(MODEL, threads=1) as embedder:
        np.testing.assert_array_equal(np.load(output), embedder.embed(["the cat", "a dog"]))
    assert run("embed", MODEL, "-", "--format", "text", text="the cat\n").stdout.count("[") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([MODEL], "there is no text"),
        ([MODEL, "in.txt", "-p", "x"], "give INPUT or -p, but not both"),
        ([MODEL, "-p", "x", "-o", "x.npy"], "--output cannot be used with -p"),
        ([MODEL, "in.txt", "-o", "x.csv"], "the ending '.csv' is unknown"),
        ([MODEL, "in.txt", "-o", "x.npy", "--resume", "--force"], "--force cannot be used with --resume"),
        ([MODEL, "in.csv", "--resume"], "--resume cannot be used without --output"),
        ([MODEL, "-p", "x", "--force"], "--force cannot be used without --output"),
        ([MODEL, "in.txt", "-o", "x.npy"], "in.txt"),
        ([RERANKER, "-p", "x"], "genai rerank"),
        ([MODEL, "in.csv"], "the texts come from the column 'text' unless --column names another"),
        ([MODEL, "in.csv", "--column", "boy"], "no column 'boy', which --column names"),
        ([MODEL, "in.csv", "--column", "boy"], "did you mean 'body'?"),
        (["nowhere", "-p", "x"], "or the name of an encoder: org/name"),
        ([MODEL, "-p", "cat " * 20, "--no-truncate"], "or let it be truncated (--truncate)"),
        ([MODEL, "in.csv", "--column", "long", "--no-truncate"], "line 1: the text has 22 tokens or more"),
        ([MODEL, "in.csv", "--column", "long", "--no-truncate"], "or let it be truncated (--truncate)"),
        (["in.gguf", "-p", "x"], "GGUF files are not supported for embeddings"),
        ([MODEL, "-p", "x", "--pooling", "average"], "--pooling 'average'"),
        ([MODEL, "-p", "x", "--dimensions", "99"], "--dimensions 99"),
        ([MODEL, "-p", "x", "--prompt-name", "qery"], "--prompt-name 'qery'"),
    ],
)
def test_what_is_refused(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.csv").write_text(f"id,body,long\n1,the cat,{'cat ' * 20}\n")
    Path("in.gguf").write_bytes(b"GGUF")
    result = run("embed", *arguments)
    assert result.returncode in (1, 2) and message in result.stderr and "Traceback" not in result.stderr
    assert "fix:" in result.stderr


def test_the_output_is_checked_before_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "in.txt", tmp_path / "out.npy"
    source.write_text("a cat\n")
    output.touch()
    assert app.run(["embed", "nowhere", str(source), "-o", str(output)]) == 2
    assert "out.npy already exists" in capsys.readouterr().err
    arguments = ["rerank", "nowhere", str(source), "-q", "x", "--instruction", "y", "--prompt-name", "z"]
    assert app.run(arguments) == 2
    assert "--instruction cannot be used with --prompt-name" in capsys.readouterr().err


def test_a_killed_run_continues(tmp_path: Path) -> None:
    source, output, partial = tmp_path / "in.txt", tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial.json"
    source.write_text("".join(f"the cat {index % 50} dog {'blue ' * (index % 12)}\n" for index in range(60_000)))
    command = [sys.executable, "-m", "genai", "embed", MODEL, str(source), "-o", str(output), "-t", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while not partial.exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    if not output.exists():  # a fast machine may have finished
        refused = run("embed", MODEL, str(source), "-o", str(output))
        assert refused.returncode == 2 and "--resume" in refused.stderr
        continued = run("embed", MODEL, str(source), "-o", str(output), "--resume")
        assert continued.returncode == 0 and "already done" in continued.stderr, continued.stderr
    with output.open() as file:
        for index, line in enumerate(file):
            assert json.loads(line)["index"] == index
    assert index == 59_999


def test_rerank(tmp_path: Path) -> None:
    documents = ["a dog", "the cat\non a mat", "red"]
    with Reranker(RERANKER, threads=1) as reranker:
        expected = reranker.rank("the cat", documents)
    flags = [flag for document in documents for flag in ("-p", document)]
    shown = run("rerank", RERANKER, "-q", "the cat", *flags).stdout.splitlines()
    assert shown == [f"{one.score:.4f}\t{one.index}\t{' '.join(one.document.split())}" for one in expected]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    (best,) = run("rerank", RERANKER, str(source), "-q", "the cat", "-n", "1", "--json").stdout.splitlines()
    first = expected[0]
    assert json.loads(best) == {"index": first.index, "score": first.score, "document": first.document}
    refused = run("rerank", MODEL, "-q", "x", "-p", "y")
    assert refused.returncode == 1 and "genai embed" in refused.stderr
    message = run("rerank", RERANKER, "-q", "x").stderr
    assert "there is no text" in message and "is MODEL, the first argument" in message
