"""The command line as a person or a pipe uses it: real processes and real terminals."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from genai.cli.app import run as run_here
from genai.models.folders import bundled_model

GENAI = [sys.executable, "-m", "genai"]


def run(*arguments: str, text: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*GENAI, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        **options,  # type: ignore[call-overload]
    )


@pytest.mark.smoke
def test_one_question() -> None:
    result = run("chat", "-p", "What is 12 + 7?")
    assert result.returncode == 0, result.stderr
    assert "19" in result.stdout
    assert result.stdout.endswith("\n")


def test_a_pipe_is_answered_once() -> None:
    result = run("chat", text="What is 12 + 7?")
    assert result.returncode == 0
    assert "19" in result.stdout
    assert ">>>" not in result.stdout + result.stderr


def test_stdout_carries_only_model_text() -> None:
    plain = run("chat", "-p", "What is 12 + 7?")
    with_figures = run("chat", "-p", "What is 12 + 7?", "--stats")
    assert with_figures.stdout == plain.stdout
    assert re.search(
        r"\d+ tok · [\d.]+ tok/s · ttft [\d.]+ s · prompt \d+ \(0 cached\) · ctx \d+/\d+ · eos", with_figures.stderr
    )


def test_peak_memory_of_a_chat_is_small() -> None:
    run("chat", "-p", "Hello")  # after this, kernels are compiled
    stderr = run("chat", "-p", "What is 12 + 7?", "--stats").stderr
    peak = float(re.search(r"peak (\d+) MB", stderr)[1])  # type: ignore[index]
    assert peak < 400


def test_generate_continues_a_text_and_reads_stdin() -> None:
    direct = run("generate", "--raw", "-p", "Once", "-n", "8")
    piped = run("generate", "--raw", "-p", "-", "-n", "8", text="Once")
    assert direct.returncode == piped.returncode == 0
    assert direct.stdout == piped.stdout != "\n"


def test_seed_repeats_and_temperature_0_is_greedy() -> None:
    story = ["chat", "-p", "Tell me a story.", "-n", "24"]
    assert (
        run(*story, "--temperature", "1", "--seed", "5").stdout
        == run(*story, "--temperature", "1", "--seed", "5").stdout
    )
    assert run(*story, "--temperature", "0").stdout == run(*story).stdout


def test_info_as_text_and_json() -> None:
    facts = json.loads(run("info", "--json").stdout)
    assert facts["type"] == "llama"
    assert facts["batched"] is True
    assert "bits per weight" in run("info").stdout


@pytest.mark.parametrize("command", [["decode", "-c", "16", "-n", "8"], ["prefill", "-n", "32"]])
def test_bench_measures(command: list[str]) -> None:
    result = json.loads(run("bench", *command, "-r", "2", "--json").stdout)
    assert 0 < result["slowest"] <= result["tokens_per_second"] <= result["fastest"]


def test_eval_tasks_on_a_file(tmp_path: Path) -> None:
    lines = [
        {
            "task": "sum",
            "messages": [{"role": "user", "content": "What is 12 + 7?"}],
            "answer": "19",
            "match": "number",
        },
        {
            "task": "sum",
            "messages": [{"role": "user", "content": "What is 12 + 7?"}],
            "answer": "20",
            "match": "number",
        },
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    result = run("eval", "tasks", "-f", str(path), "--json", "--show-wrong", "1")
    found = json.loads(result.stdout)["sum"]
    assert (found["asked"], found["right"], found["accuracy"]) == (2, 1, 0.5)
    # Wilson's interval for 1 of 2.
    assert (found["low"], found["high"]) == pytest.approx((0.0945, 0.9055), abs=1e-4)
    assert "expected '20'" in result.stderr
    lines[0]["answer"] = "<b>19</b>"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    result = run("eval", "tasks", "-f", str(path), "--html", str(tmp_path / "page.html"))
    assert re.search(r"^sum +0 / 2 +0\.0 % ± 32\.9$", result.stdout, re.M)
    page = (tmp_path / "page.html").read_text()
    assert "&lt;b&gt;19&lt;/b&gt;" in page and "<b>" not in page and "<script" not in page and "http" not in page
    assert page.count("class=wrong") == 2 and "0 of 2" in page and "0.0 % ± 32.9" in page
    for flag, name in (("--html", "no/page.html"), ("--plot", "plot.txt")):
        failed = run("eval", "tasks", "-f", str(path), flag, str(tmp_path / name))
        assert failed.returncode in (1, 2) and re.search(r"error: .+\n  why: .+\n  fix: ", failed.stderr)


@pytest.mark.parametrize(
    "text", ["not json", '{"task": "x"}', '{"task":"x","messages":[],"answer":"1","match":"fuzzy"}', ""]
)
def test_eval_tasks_refuses_bad_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(text)
    assert_three_part_error(run("eval", "tasks", "-f", str(path)), 1)


def assert_three_part_error(result: subprocess.CompletedProcess[str], code: int) -> None:
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert re.search(r"error: .+\n  why: .+\n  fix: .+", result.stderr), result.stderr
    assert result.stdout in ("", "\n")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["chat", "/no/such/folder", "-p", "hi"], 1),
        (["chat", "/etc", "-p", "hi"], 1),
        (["chat", "-p", ""], 1),
        (["chat", "-p", "   "], 1),
        (["chat", "-p", "word " * 3000], 1),
        (["generate", "-p", ""], 1),
        (["chat", "-p", "hi", "--temperature", "-1"], 2),
        (["chat", "-p", "hi", "--temperature", "0", "--top-p", "0.5"], 2),
        (["chat", "-p", "hi", "--top-p", "2"], 2),
        (["chat", "-p", "hi", "--top-k", "99999999"], 2),
        (["chat", "-p", "hi", "-n", "0"], 2),
        (["chat", "-p", "hi", "-t", "0"], 2),
        (["chat", "-p", "hi", "-t", "9999"], 2),
        (["chat", "-p", "hi", "--kv-type", "int1"], 2),
        (["chat", "nobody/has-this", "--yes", "-p", "hi", "--kv-type", "fp8"], 2),
        (["eval", "tasks", "nobody/has-this", "--kv-type", "bf16"], 2),
        (["bench", "decode", "-c", "5000"], 1),
        (["eval", "tasks", "-f", "/no/such/file"], 1),
    ],
)
def test_errors_have_three_parts_and_an_exit_code(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_here(arguments)
    shown = capsys.readouterr()
    assert_three_part_error(subprocess.CompletedProcess(arguments, found, shown.out, shown.err), code)


@pytest.fixture
def base_model(tmp_path: Path, bundled_folder: Path) -> Path:
    """The bundled model without its chat template."""
    folder = tmp_path / "base"
    shutil.copytree(bundled_folder, folder, ignore=shutil.ignore_patterns("chat_template.jinja"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("arguments", [["chat", "{}", "-p", "hi"], ["generate", "{}", "--chat", "-p", "hi"]])
def test_a_model_without_chat_template(
    base_model: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.format(base_model) for argument in arguments]
    found, shown = run_here(given), capsys.readouterr()
    assert_three_part_error(subprocess.CompletedProcess(given, found, shown.out, shown.err), 1)
    assert f"genai generate {base_model} -p TEXT" in shown.err
    assert run_here(["generate", str(base_model), "-p", "Once", "-n", "2"]) == 0, "what the advice says works"


@pytest.mark.parametrize("arguments", [["nonsense"], ["chat", "--nonsense"], ["bench"], ["chat", "--seed", "x"]])
def test_usage_errors_exit_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_stdin_that_is_not_utf8() -> None:
    result = subprocess.run(
        [*GENAI, "chat"], input=b"\xff\xfe\xfa", capture_output=True, timeout=60, env={**os.environ, "PYTHONUTF8": "1"}
    )
    assert result.returncode == 1
    assert b"UTF-8" in result.stderr
    assert b"Traceback" not in result.stderr


def test_a_broken_pipe_ends_cleanly() -> None:
    command = [*GENAI, "chat", "-p", "Tell me a story about Luna and Tom."]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait(60) == 0
        assert stderr == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("chat -p Hello <&-", 0, ""),
        ("chat -p Hello >&-", 1, "stdout is closed"),
        ("chat -p Hello >/dev/full", 1, "No space left"),
        ("chat -p Hello --markdown >/dev/full", 1, "No space left"),
        ("chat -p Hello --stats 2>&-", 0, ""),
        ("chat -p Hello --stats 2>/dev/full", 0, ""),
        ("chat <&-", 1, "question is empty"),
        ("chat <&- >&- 2>&-", 1, ""),
        ("info --json >&-", 1, "stdout is closed"),
        (f"run {bundled_model() / 'model.onnx'} --random >&-", 1, "stdout is closed"),
        ("--help >/dev/full", 1, "No space left"),
        ("nonsense 2>/dev/full", 2, ""),
    ],
)
def test_standard_streams_that_are_closed_or_full(command: str, code: int, said: str) -> None:
    """stdout carries either the whole answer or nothing, whatever happens to the other streams."""
    result = subprocess.run(
        ["sh", "-c", f"{' '.join(GENAI)} {command}"], input="", capture_output=True, text=True, timeout=120
    )
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert said in result.stderr
    if code == 1 and "2>" not in command:
        assert_three_part_error(result, code)
    assert not result.stdout or result.stdout == run("chat", "-p", "Hello").stdout


@pytest.mark.parametrize(("flags", "text"), [(("-p", ""), None), (("-p", " "), "\n"), ((), " \n")])
def test_an_empty_question_is_refused_before_a_model_is_loaded(
    flags: tuple[str, ...], text: str | None, tmp_path: Path
) -> None:
    result = run("chat", str(tmp_path), *flags, text=text)
    assert_three_part_error(result, 1)
    assert "the question is empty" in result.stderr
    assert 'genai chat -p "' in result.stderr
    result = run("chat", "What is this?", *flags, text=text)
    assert_three_part_error(result, 1)
    assert "this looks like a question" in result.stderr


def test_a_text_that_is_piped_beside_a_question_is_part_of_it() -> None:
    result = run("chat", "-p", "What is 12 + 7?", "--dump-prompt", text="My name is Nora.\n")
    assert "user\nMy name is Nora.\n\nWhat is 12 + 7?<|im_end|>" in result.stderr
    assert run("chat", "-p", "Hello", "--dump-prompt", text=" \n").stderr.count("user\nHello<|im_end|>") == 1


def test_a_pipe_that_stays_silent_is_mentioned() -> None:
    command = [*GENAI, "chat", "-p", "What is 12 + 7?"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True) as process:
        assert process.stderr is not None
        while "waiting for text from stdin" not in process.stderr.readline():
            assert process.poll() is None
        stdout, _ = process.communicate(timeout=60)
    assert "19" in stdout


def test_a_reply_that_the_context_cuts_is_said_to_be() -> None:
    result = run("chat", "-p", "Tell me a story about Luna and Tom.", "--ignore-eos", "-c", "64")
    assert "the context of 64 tokens is full, so the reply was cut" in result.stderr
    assert "old text cannot be dropped: blocks of 32 tokens" in result.stderr


def test_ctrl_c_in_a_one_shot_exits_130() -> None:
    command = [*GENAI, "chat", "-p", "Tell me a story about Luna and Tom."]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
        assert process.stderr is not None
        stderr = process.stderr.read()
    assert b"Traceback" not in stderr
    # A fast machine may have finished the reply before the signal arrived.
    assert code in (0, 130)


# `python -m genai` with a message once Python itself has started: before that, Python shows a traceback on interrupts.
SAYS_WHEN_IT_STARTS = """
import os, sys
from genai.__main__ import main
os.write(2, b".")
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=(pytest.mark.slow, pytest.mark.drawn(4))) for seed in (1, 2, 3, 4))]
)
@pytest.mark.parametrize("command", [["chat", "-p"], ["generate", "--chat", "--ignore-eos", "-p"]], ids=str)
def test_ctrl_c_at_any_moment_ends_without_a_traceback(command: list[str], seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        started = [sys.executable, "-c", SAYS_WHEN_IT_STARTS, *command, "Tell me a story."]
        process = subprocess.Popen(started, stdout=-1, stderr=-1, start_new_session=True, bufsize=0)
        assert process.stderr is not None
        assert process.stderr.read(1) == b"."
        time.sleep(0.02 + rng.random() * 1.2)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
        assert b"Traceback" not in stderr, stderr.decode()
        # If no command has started, or the command has ended, the signal itself kills the process.
        assert process.returncode in (0, 130, -signal.SIGINT)


@pytest.mark.parametrize("pause", [0, 0.1])  # on a busy machine, the signal comes again before the hook has ended
def test_an_interrupt_that_falls_into_a_callback_arrives_all_the_same(pause: float) -> None:
    script = """
import signal, sys, threading, time, weakref
import genai.cli.app
from genai.cli.__main__ import main

class Something:
    pass

start = threading.Thread.start

def start_slowly(thread):
    start(thread)
    time.sleep(PAUSE)

threading.Thread.start = start_slowly

def run(arguments):
    one = Something()
    callback = weakref.ref(one, lambda _: signal.raise_signal(signal.SIGINT))
    del one  # the exception cannot leave the callback
    time.sleep(30)
    return 0

genai.cli.app.run = run
main([])
"""
    script = script.replace("PAUSE", str(pause))
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=25)
    assert (process.returncode, process.stderr) == (130, b"")


@pytest.mark.parametrize(
    "topic", [[], ["chat"], ["generate"], ["info"], ["bench"], ["bench", "decode"], ["eval"], ["eval", "tasks"]]
)
def test_help_everywhere(topic: list[str]) -> None:
    result = run(*topic, "--help")
    assert result.returncode == 0
    assert "Usage" in result.stdout


@pytest.mark.slow  # compiles all kernels
def test_read_only_home_and_unwritable_cache_do_not_matter(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    environment = {**os.environ, "HOME": str(blocked), "XDG_CACHE_HOME": str(blocked / "cache")}
    environment.pop("GENAI_CACHE_DIR", None)
    result = run("chat", "-p", "What is 12 + 7?", env=environment)
    assert result.returncode == 0, result.stderr
    assert "19" in result.stdout
    assert "cache" in result.stderr


def test_an_interrupt_while_a_class_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python before 3.12 converts it to a RuntimeError; other such errors are not hidden."""
    from cli import __main__ as entry, app

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for cause, expected in ((KeyboardInterrupt(), SystemExit), (ValueError(), RuntimeError)):

        def run(arguments: object, cause: BaseException = cause) -> int:
            raise RuntimeError("Error calling __set_name__") from cause

        monkeypatch.setattr(app, "run", run)
        with pytest.raises(expected) as caught:
            entry.main([])
        if expected is SystemExit:
            assert caught.value.args == (130,)
