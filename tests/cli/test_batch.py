"""`genai batch` on the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genai.cli.app import run as run_here
from genai.models.folders import bundled_adapter

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    with file.open("w") as out:
        for number in range(30):
            out.write(
                json.dumps(
                    {"custom_id": f"q{number}", "messages": [{"role": "user", "content": f"What is {number} + 7?"}]}
                )
                + "\n"
            )
    return file


def answers(path: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] if line["response"] else ""
        for line in lines
    }


def test_a_file_of_requests(questions: Path, tmp_path: Path, capsys: Capture) -> None:
    output, html = tmp_path / "out.jsonl", tmp_path / "page.html"
    command = ["batch", str(questions), "-o", str(output), "--html", str(html)]
    assert run_here([*command, "--in-order"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "" and "30 lines" in shown.err and "0 failed" in shown.err and "tok/s" in shown.err
    found = answers(output)
    assert list(found) == [f"q{number}" for number in range(30)] and found["q5"] == "12"
    assert "30, of which 0 failed" in html.read_text()
    assert run_here(command) == 1
    assert "--resume" in capsys.readouterr().err
    before = output.read_bytes()
    assert run_here([*command, "--resume", "-q"]) == 0
    assert output.read_bytes() == before and capsys.readouterr().err == ""


def test_lines_go_through_adapters(tmp_path: Path, capsys: Capture) -> None:
    """A line uses the adapter that --lora names, unless the line names another adapter or none."""
    asked = [{"role": "user", "content": "What is 12 + 7?"}]
    lines = [{"messages": asked}, {"messages": asked, "adapter": {}}, {"messages": asked, "adapter": "nobody"}]
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps({"custom_id": str(i), **line}) + "\n" for i, line in enumerate(lines)))
    command = [
        "batch",
        str(file),
        "-o",
        str(output),
        "--temperature",
        "0",
        "--lora",
        f"words={bundled_adapter('words')}",
    ]
    assert run_here(command) == 1  # one line failed
    found = answers(output)
    assert (found["0"], found["1"], found["2"]) == ("19, nineteen", "19", "")
    assert "nobody" in output.read_text()
    # A different adapter with the same name counts as a changed option.
    before, other = output.read_bytes(), [*command[:-1], f"words={bundled_adapter('pirate')}"]
    for changed in (other, [*command[:-1], command[-1] + ":0.5"]):
        assert run_here([*changed, "--retry-errors"]) == 1
        assert "was started with other options" in capsys.readouterr().err
    assert output.read_bytes() == before
    assert run_here([*command, "--retry-errors"]) == 1
    assert "was started" not in capsys.readouterr().err
    assert run_here([*command, "--force", "--ray", "local"]) == 2
    assert "--lora cannot be used with --ray" in capsys.readouterr().err


def test_lines_that_fail_are_said_and_tried_again(questions: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out.jsonl"
    with questions.open("a") as file:
        file.write('{"custom_id": "bad", "prompt": "x", "top_p": 2}\n')
    assert run_here(["batch", str(questions), "-o", str(output)]) == 1
    shown = capsys.readouterr().err
    assert (
        "1 failed" in shown
        and "OptionError" in shown
        and "line 31 failed: top_p = 2" in shown
        and "--retry-errors" in shown
    )
    assert run_here(["batch", str(questions), "-o", str(output), "--retry-errors", "-q"]) == 1
    assert "line 31 failed" in capsys.readouterr().err
    assert run_here(["batch", str(questions), "-o", str(output), "--resume"]) == 1  # the line has no reply yet
    assert (
        "1 line failed in an earlier run; to retry them, run the command with --retry-errors" in capsys.readouterr().err
    )
    questions.write_text(questions.read_text().replace('"top_p": 2', '"top_p": 0.5, "max_tokens": 2, "seed": 1'))
    assert run_here(["batch", str(questions), "-o", str(output), "--retry-errors"]) == 0
    assert "1 line · 30 already done" in capsys.readouterr().err
    assert len(output.read_text().splitlines()) == 31


def test_templates_and_pipes(tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = [sys.executable, "-m", "genai", "batch", "-", "-o", str(output), "--format", "text", "--chat", "-q"]
    text = "12 + 7\n20 - 5\n"
    done = subprocess.run([*command, "--template", "What is {text}?", "--in-order"], input=text, text=True, check=False)
    assert done.returncode == 0 and list(answers(output).values()) == ["19", "15"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{in}"], 2, "--output"),
        (["{in}", "-o", "{in}"], 2, "is the same file as INPUT"),
        (["{in}", "-o", "{out}", "--html", "{out}"], 2, "is the same file as --output"),
        (["{in}", "-o", "{out}", "--force", "--resume"], 2, "--force cannot be used with --resume"),
        (["{in}", "-o", "{out}", "--template", "no field"], 2, "has no field"),
        (["{in}", "-o", "{out}", "--format", "xml"], 2, "--format 'xml'"),
        (["{in}", "-o", "{out}", "--window", "0"], 2, "--window"),
        (["{in}", "-o", "{out}", "--top-p", "2"], 2, "--top-p 2"),
        (["/no/such/file", "-o", "{out}"], 1, "/no/such/file"),
        (["{in}", "-o", "/no/such/folder/out"], 1, "folder does not exist"),
        (["{in}", "-o", "{out}", "--html", "/no/such/folder/page"], 1, "folder does not exist"),
        (["{in}", "/no/such/model", "-o", "{out}"], 1, "/no/such/model"),
    ],
)
def test_what_is_wrong_is_said_first(
    questions: Path, tmp_path: Path, arguments: list[str], code: int, message: str, capsys: Capture
) -> None:
    named = [one.replace("{in}", str(questions)).replace("{out}", str(tmp_path / "out")) for one in arguments]
    before = questions.read_bytes()
    assert run_here(["batch", *named]) == code
    shown = capsys.readouterr()
    assert message in shown.err and re.search(r"error: .+\n  why: .+\n  fix: .+", shown.err)
    assert questions.read_bytes() == before and not (tmp_path / "out").exists()


def test_equal_ids_are_refused_before_the_model_is_loaded(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a", "prompt": "x"}\n' * 2)
    monkeypatch.setattr("genai.cli.batch._engine", None)
    assert run_here(["batch", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out")]) == 1
    assert "lines 1 and 2 have the same custom_id 'a'" in capsys.readouterr().err


def test_a_terminal_shows_how_far_it_is(questions: Path, tmp_path: Path, terminal: Callable[..., Any]) -> None:
    questions.write_text("Tell me a story about Luna.\n" * 4000)
    shown = terminal(
        "batch", str(questions), "-o", str(tmp_path / "out"), "--format", "text", "-n", "40", "--ignore-eos"
    )
    bar = shown.wait_for(
        r"Processing \[#*-+\] +\d+%  [\d,]+ lines; prompt [\d,]+ tok/s, generated [\d,]+ tok/s, \d+ s left"
    )
    assert "lines" in bar
    os.kill(shown.pid, signal.SIGINT)
    shown.wait_for(
        r"contains\s+the\s+replies\s+so\s+far;\s+to\s+continue,\s+run\s+the\s+command\s+again\s+with\s+--resume"
    )
    assert shown.exit_code() == 130
    kept = (tmp_path / "out").read_text()
    assert kept.endswith("}\n") and 0 < kept.count("\n") < 4000


def test_an_interrupt_before_the_first_reply(
    questions: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("genai.llm.batch.run.run_batch", interrupted)
    assert run_here(["batch", str(questions), "-o", str(tmp_path / "out")]) == 130
    assert "replies so far" not in capsys.readouterr().err


def test_killed_and_resumed(tmp_path: Path) -> None:
    """The whole command, with the model, is killed at three moments."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    with source.open("w") as file:
        for number in range(1500):
            file.write(
                json.dumps(
                    {
                        "custom_id": f"q{number}",
                        "messages": [{"role": "user", "content": f"What is {number % 90} + 7?"}],
                    }
                )
                + "\n"
            )
    command = [sys.executable, "-m", "genai", "batch", str(source), "-o", str(output), "--resume", "-q"]
    for wait in (0.0, 0.15, 0.3):
        process = subprocess.Popen(command)
        size = output.stat().st_size if output.exists() else 0
        deadline = time.monotonic() + 60
        while (not output.exists() or output.stat().st_size == size) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(wait)
        process.kill()
        process.wait()
    assert subprocess.run(command, check=False).returncode == 0
    found = answers(output)
    assert sorted(found) == sorted(f"q{number}" for number in range(1500)) and found["q5"] == found["q95"] == "12"


def test_generate_says_what_it_does_with_many_lines(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert run_here(["generate", "-f", str(file), "-n", "1"]) == 0
    said = capsys.readouterr().err
    assert "all 2 lines form one prompt" in said and f"genai batch {file}" in re.sub(r"\s+", " ", said)
    (tmp_path / "prompt.txt").write_text("a\nb\n")
    assert run_here(["generate", "-f", str(tmp_path / "prompt.txt"), "-n", "1"]) == 0
    assert "one prompt" not in capsys.readouterr().err


def test_empty_replies_of_a_chat_model_are_pointed_out(tmp_path: Path, capsys: Capture) -> None:
    file, output = tmp_path / "questions.txt", tmp_path / "out.jsonl"
    file.write_text("What is 12 + 7?\nWhat is 3 + 4?\n")
    assert run_here(["batch", str(file), "-o", str(output)]) == 0
    assert "the replies are empty" in (said := capsys.readouterr().err) and "add --chat" in said
    assert run_here(["batch", str(file), "-o", str(output), "--chat", "--force"]) == 0
    assert "the replies are empty" not in capsys.readouterr().err
    failing = tmp_path / "failing.jsonl"
    failing.write_text("{}\n")
    assert run_here(["batch", str(failing), "-o", str(output), "--force"]) == 1
    assert "the replies are empty" not in capsys.readouterr().err and "the line has no fields" in output.read_text()
    file.write_text("Luna has\n")
    for flags, count in ([], 1), (["--raw"], 0), (["--chat"], 0):
        assert run_here(["batch", str(file), "-o", str(output), "-n", "3", "--force", *flags]) == 0
        assert re.sub(r"\s+", " ", capsys.readouterr().err).count("continue the prompts as raw texts") == count
