"""The options of speculative decoding, and its benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genai.cli.app import run
from genai.models.folders import bundled_model
from tests.mtp_models import write_with_head

Capture = pytest.CaptureFixture[str]
ASK = ["generate", "--chat", "-p", "Count from 3 to 20."]


def test_the_text_is_the_same_whoever_guesses(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "text.txt"
    path.write_text("3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20\n")
    texts = set()
    ways = (
        ["lookup"],
        ["auto"],
        ["off"],
        ["lookup", "--lookup-file", str(path)],
        ["auto", "--draft", str(bundled_model())],
    )
    for way in ways:
        assert run([*ASK, "--json", "--speculate", *way]) == 0
        answer = json.loads(capsys.readouterr().out)
        texts.add(answer["text"])
        assert 0 <= answer["accepted_tokens"] <= answer["proposed_tokens"]
    assert len(texts) == 1 and "4, 5, 6" in texts.pop()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--speculate", "lookups"], "'lookup'"),
        (["--speculate", "off", "--draft", "somewhere"], "--draft cannot be used with --speculate off"),
        (["--speculate", "mtp", "--draft", "somewhere"], "--draft cannot be used with --speculate mtp"),
        (["--speculate", "mtp"], "there is no MTP head"),
        (["--speculate", "off", "--lookup-file", "somewhere"], "--lookup-file cannot be used with --speculate off"),
        (["--lookup-file", "no/such/file"], "the file does not exist"),
        (["--draft", "no/such/folder"], "no/such/folder: not a model folder"),
    ],
    ids=lambda one: one[-1] if isinstance(one, list) else "",
)
def test_wrong_flags(flags: list[str], message: str, capsys: Capture) -> None:
    assert run([*ASK, *flags]) == 2 - flags[-1].startswith(("no/", "mtp"))
    said = capsys.readouterr()
    assert message in said.err and "fix:" in said.err and not said.out


def test_the_footer_says_how_guesses_fared(capsys: Capture) -> None:
    from genai.cli.terminal import footer
    from genai.llm.completion import Completion, Timings

    def made(**counts: int) -> str:
        return footer(Completion("x", (5, 6), "stop", 2, 3, 0, Timings(), 1, **counts), 100)

    assert " · accepted 7/9 · " in made(proposed_tokens=9, accepted_tokens=7)
    assert "accepted" not in made()


def test_an_mtp_head(tmp_path: Path, capsys: Capture) -> None:
    folder = str(write_with_head(tmp_path / "mtp", bundled_model()))
    ask = ["generate", folder, "--raw", "-p", "Once upon a time", "--max-tokens", "30", "--greedy", "--json"]
    texts = set()
    for way in ("off", "mtp", "auto", "lookup"):
        assert run([*ask, "--speculate", way]) == 0
        texts.add(json.loads(capsys.readouterr().out)["text"])
    assert len(texts) == 1
    assert run(["info", folder]) == 0
    assert "mtp.onnx (not described here); --speculate auto uses it" in capsys.readouterr().out
    bench = ["bench", "speculation", folder, "-n", "12", "-r", "1", "--mtp-only"]
    assert run([*bench, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 4
    assert run([*bench, "--draft", folder]) == 2
    assert "--mtp-only cannot be used with --draft" in capsys.readouterr().err


def test_bench(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("one two three " * 9)
    assert run(["bench", "speculation", "-n", "12", "-r", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 60
    names = ["code editing", "summarising", "new prose", "random digits"]
    assert [line for line in lines if line in names] == names
    assert run(["bench", "speculation", "-f", str(path), "-b", "2", "-n", "9", "-r", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["reply"] == "prompt.txt" and row["tokens"] == 9 and row["times"] > 0 and row["kept"] <= row["guesses"]
