"""Every example runs unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
CHAT = "My name is Nora.\n\nWhat is my name?\n"
BATCH = [
    {"messages": [{"role": "user", "content": "What is 12 + 7?"}]},
    {"prompt": "Once", "max_tokens": 4, "n": 2, "temperature": 1, "ignore_eos": True},
]
# Separate tests below run these examples.
OWN_TESTS = ("chat_loop.py", "batch_generation.py", "async_server.py")


def run(name: str, folder: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / name), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(FOLDER.parent)},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("name", sorted({path.name for path in EXAMPLES} - set(OWN_TESTS)))
def test_example(name: str, tmp_path: Path) -> None:
    result = run(name, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_the_chat_loop_remembers_and_ends(tmp_path: Path) -> None:
    result = run("chat_loop.py", tmp_path, stdin=CHAT)
    assert result.stdout.splitlines()[1:] == ["Nice to meet you, Nora!", "Your name is Nora."]
    too_long = run("chat_loop.py", tmp_path, stdin="word " * 2000 + "\nWhat is 12 + 7?\n")
    assert "context" in too_long.stdout and too_long.stdout.endswith("19\n")
    assert result.returncode == too_long.returncode == 0


def test_the_batch_script_reads_and_writes_files(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, BATCH)))
    result = run("batch_generation.py", tmp_path, "in.jsonl", "out.jsonl")
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(one["index"], one["sample"]) for one in found] == [(0, 0), (1, 0), (1, 1)]
    assert found[0]["text"] == "19" and found[0]["finish_reason"] == "stop"
    assert [one["tokens"] for one in found[1:]] == [4, 4]
    again = run("batch_generation.py", tmp_path, stdin=(tmp_path / "in.jsonl").read_text())
    assert len(again.stdout.splitlines()) == 3


@pytest.mark.parametrize("line", ["no json", '{"prompt": "A", "temprature": 1}'])
def test_the_batch_script_names_the_line_it_cannot_use(tmp_path: Path, line: str) -> None:
    result = run("batch_generation.py", tmp_path, stdin=f'{{"prompt": "A"}}\n{line}\n')
    assert result.returncode == 1 and result.stderr.startswith("line 2: ") and not result.stdout


def test_the_server_tests_itself(tmp_path: Path) -> None:
    result = run("async_server.py", tmp_path, "--self-test")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "What is 5 + 7? 12" in result.stdout


def test_the_readme_lists_every_example() -> None:
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"`{path.name}`" in listed for path in EXAMPLES)
