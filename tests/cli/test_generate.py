"""`genai generate` and the flags that it shares with `genai chat`."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from genai.cli import terminal as terminal_output, wrapping
from genai.cli.app import run as run_here
from genai.llm.llm import LLM
from tests.cli.processes import run

QUESTION = ["-p", "What is 12 + 7?", "--chat"]


def test_prompts_come_from_flags_files_and_stdin(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("What is 2 + 2?")
    result = run("generate", *QUESTION, "-p", "-", "-f", str(file), text="What is 5 + 5?")
    assert result.stdout.splitlines() == ["19", "10", "4"]


def test_json_says_everything() -> None:
    result = run("generate", *QUESTION, "--json", "--logprobs", "2", "--prompt-logprobs", "0", "--samples", "2",
                 "--temperature", "0.1", "--seed", "7")  # fmt: skip
    first, second = map(json.loads, result.stdout.splitlines())
    assert first["text"] == "19"
    assert (first["finish_reason"], first["stopped_by"], first["seed"]) == ("stop", 2, 7)
    assert (first["sample_index"], second["sample_index"]) == (0, 1)
    assert [entry["text"] for entry in first["logprobs"]] == ["1", "9"]
    assert len(first["logprobs"][0]["top"]) == 2
    assert first["prompt_logprobs"][0] is None
    assert len(first["prompt_logprobs"]) == first["prompt_tokens"] == 17
    assert second["prompt_logprobs"] == first["prompt_logprobs"]
    assert first["timings"]["time_to_first_token"] > 0


def test_stop_and_banned_texts() -> None:
    story = ["generate", "--chat", "-p", "Tell me a story about Luna and Tom."]
    plain = run(*story).stdout
    assert "Luna" in plain
    stopped = run(*story, "--stop", "morning,").stdout
    assert stopped.strip() == plain.split("morning,")[0].strip()
    banned = run(*story, "--ban", "morning", "--ban", "Luna").stdout
    assert "morning" not in banned
    assert "Luna" not in banned
    assert len(banned) > 10


def test_logit_bias_and_min_tokens() -> None:
    assert run("generate", *QUESTION, "--logit-bias", "19=-inf").stdout.strip() != "19"
    assert len(run("generate", *QUESTION, "--min-tokens", "12").stdout.strip()) > 4


def test_sequences_and_first_tokens() -> None:
    """The reply 19 has the tokens 19 and 27."""
    assert not run("generate", *QUESTION, "--begin-suppress", "19").stdout.startswith("1")
    held = run("generate", *QUESTION, "--sequence-bias", "19:27=-inf", "--sequence-bias", "3:4=1").stdout
    assert held.startswith("1") and not held.startswith("19")


def test_the_prompt_can_be_seen() -> None:
    result = run("generate", *QUESTION, "--dump-prompt")
    assert result.stdout == "19\n"
    assert "<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n<|im_start|>assistant\n" in result.stderr
    assert re.search(r"\[17 tokens\] 1 \d+", result.stderr)


def test_variables_stand_for_flags() -> None:
    assert run("generate", *QUESTION, GENAI_MAX_TOKENS="1").stdout == "1\n"
    assert run("generate", *QUESTION, "-n", "2", GENAI_MAX_TOKENS="1").stdout == "19\n"
    assert "1\n" in run("chat", "-p", "What is 12 + 7?", GENAI_MAX_TOKENS="1").stdout
    result = run("generate", *QUESTION, GENAI_MODEL="/no/such/folder")
    assert (result.returncode, "/no/such/folder" in result.stderr) == (1, True)
    result = run("generate", *QUESTION, GENAI_TOP_K="many")
    assert (result.returncode, "GENAI_TOP_K" in result.stderr) == (2, True)


@pytest.mark.slow
def test_quiet_also_where_kernels_are_compiled(tmp_path: Path) -> None:
    assert run("generate", *QUESTION, "-q", GENAI_CACHE_DIR=str(tmp_path)).stderr == ""
    assert "Compiling" not in run("generate", *QUESTION, GENAI_CACHE_DIR=str(tmp_path)).stderr


def test_quiet_and_verbose() -> None:
    assert run("generate", *QUESTION, "-q").stderr == ""
    assert "parameters" in run("generate", *QUESTION, "-v").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--logprobs", "1"], "without --json"),
        (["-p", "-", "-p", "-"], "given more than once"),
        (["-f", "/no/such/file"], "/no/such/file"),
        (["--logit-bias", "5"], "ID=NUMBER"),
        (["--logit-bias", "99999=1"], "vocabulary has 1536"),
        (["--sequence-bias", "5:x=1"], "ID:ID=NUMBER"),
        (["--sequence-bias", "5:6"], "ID:ID=NUMBER"),
        (["--sequence-bias", "5:99999=1"], "vocabulary has 1536"),
        (["--sequence-bias", "5:-6=1"], "token ids -> number"),
        (["--begin-suppress", "99999"], "vocabulary has 1536"),
        (["--top-p", "0.5", "--temperature", "0"], "contradicts --temperature 0"),
        (["--min-p", "1.5"], "--min-p 1.5"),
        (["--samplers", "top_k;top_q"], "top_q"),
        (["--xtc-threshold", "0.2"], "--xtc-probability"),
        (["--dry-base", "2"], "--dry-multiplier"),
        (["--mirostat", "1"], "--mirostat 1"),
        (["--mirostat", "2", "--top-k", "5"], "contradicts"),
        (["--min-tokens", "5", "-n", "4"], "contradicts --max-tokens"),
        (["--stop", ""], "stop"),
        (["--seed", "-1"], "--seed -1"),
        (["--samples", "2", "--temperature", "0", "--json"], "contradicts --temperature 0"),
        (["--stop-token", "99999"], "vocabulary has 1536"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = [] if "-p" in arguments or "-f" in arguments else ["-p", "hi"]
    assert run_here(["generate", *prompt, *arguments]) in (1, 2)
    shown = capsys.readouterr()
    assert shown.out in ("", "\n")
    assert message in shown.err
    assert re.search(r"error: .+\n  why: .+\n  fix: .+", shown.err)


def test_the_reference_device_answers_too_and_others_are_refused() -> None:
    assert run("generate", *QUESTION, "--device", "reference", "--temperature", "0").stdout == "19\n"
    refused = run("generate", *QUESTION, "--device", "abacus")
    assert refused.returncode == 2
    assert "--device 'abacus'" in refused.stderr and "cpu, cuda, auto, reference" in refused.stderr


def test_questions_are_about_what_is_piped_beside_them(tmp_path: Path) -> None:
    """As in `genai chat`, a question and piped text are combined; a text to continue is not changed."""
    file = tmp_path / "question.txt"
    file.write_text("What is 2 + 2?")
    result = run("generate", *QUESTION, "-f", str(file), "--dump-prompt", text="My name is Nora.\n")
    assert "user\nMy name is Nora.\n\nWhat is 12 + 7?<|im_end|>" in result.stderr
    assert "user\nMy name is Nora.\n\nWhat is 2 + 2?<|im_end|>" in result.stderr
    assert run("generate", *QUESTION, "--dump-prompt").stderr.count("user\nWhat is 12 + 7?<|im_end|>") == 1
    assert "Nora" not in run("generate", "-p", "Once", "-n", "2", "--dump-prompt", text="Nora").stderr


def test_a_reply_that_the_full_context_ends(capsys: Any) -> None:
    arguments = ["generate", "--raw", "-p", "Once upon a time", "-c", "32", "--ignore-eos", "--temperature", "0"]
    assert run_here(arguments) == 0
    assert "(the context of 32 tokens is full, so the reply was cut off)" in capsys.readouterr().err
    assert run_here([*arguments, "-n", "3"]) == 0
    assert "is full" not in capsys.readouterr().err


def test_ctx_shift_goes_on_where_the_context_is_full() -> None:
    options = [
        "generate",
        "--raw",
        "-p",
        "Once upon a time",
        "-c",
        "160",
        "--ignore-eos",
        "-n",
        "300",
        "--temperature",
        "0",
    ]
    result = run(*options, "--ctx-shift", "--json")
    found = json.loads(result.stdout)
    assert (len(found["token_ids"]), found["finish_reason"]) == (300, "length") and found["forgotten_tokens"] > 100
    assert f"the context was full, so {found['forgotten_tokens']} tokens were dropped" in result.stderr
    assert f"{found['forgotten_tokens']} dropped" in run(*options, "--ctx-shift", "--stats").stderr
    assert "--ctx-keep 9 cannot be used without --ctx-shift" in run(*options, "--ctx-keep", "9").stderr
    assert (
        "--ctx-shift keeps 150 tokens of a context of 160" in run(*options, "--ctx-shift", "--ctx-keep", "150").stderr
    )
    chat = run("chat", "-p", "Tell me a story.", *options[4:], "--ctx-shift")
    assert "tokens were dropped" in chat.stderr and len(chat.stdout) > 500


def test_a_prompt_that_fails_does_not_fail_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    long = "word " * 3000
    options = ["-n", "2", "--temperature", "0"]
    assert run_here(["generate", "--raw", "-p", "Once", "-p", long, "-p", "What", "--json", *options]) == 1
    shown = capsys.readouterr()
    first, failed, last = map(json.loads, shown.out.splitlines())
    assert (first["prompt_index"], failed["prompt_index"], last["prompt_index"]) == (0, 1, 2)
    assert failed["error"]["code"] == "ContextOverflowError" and failed["error"]["why"] and failed["error"]["fix"]
    assert re.search(r"error: prompt 1: the prompt has .+\n  why: .+\n  fix: .+", shown.err)
    assert run_here(["generate", "--raw", "-p", "Once", "-p", long, *options]) == 1
    assert capsys.readouterr().out == first["text"] + "\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_finished_completions_are_printed_after_a_signal(
    number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that wait for the first prompt, which is still running."""
    whole = LLM.map

    def interrupted(self: LLM, prompts: list[str], *, on_answer: Any, **options: Any) -> Iterator[Any]:
        for answer in whole(self, prompts, **options):
            if answer.index in (1, 3):
                on_answer(answer)
        signal.raise_signal(number)
        yield None

    monkeypatch.setattr(LLM, "map", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    assert run_here(["generate", *(["-p", "Once"] * 4), "-n", "2", "--json"]) == code
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt_index"] for line in lines] == [1, 3]
    assert signal.getsignal(signal.SIGTERM) is before


def test_prompts_are_messages_where_there_is_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    question = ["generate", "-p", "What is 12 + 7?"]
    assert run_here([*question, "--dump-prompt"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "19\n" and "<|im_start|>user\nWhat is 12 + 7?<|im_end|>" in shown.err
    assert run_here([*question, "--system", "Be brief.", "--dump-prompt", "-n", "1"]) == 0
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user" in capsys.readouterr().err
    assert run_here([*question, "--raw", "--dump-prompt", "-n", "1"]) == 0
    assert "im_start" not in capsys.readouterr().err
    assert run_here([*question, "--raw", "--system", "Be brief."]) == 2
    assert "--system cannot be used with --raw" in capsys.readouterr().err
    assert run_here([*question, "-p", " "]) == 1
    assert "prompt 1 is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--logit-bias", "2=100"], "(the reply is empty, because the model ended it at once with '<|im_end|>')"),
        (["--stop", "1"], "(the reply is empty, because it begins with the stop text '1')"),
        (
            ["--logit-bias", "1=100", "-n", "3"],
            "(the reply has only special tokens, which are not shown: '<|im_start|>')",
        ),
        (["--choice", "  "], "(the reply has only white space)"),
    ],
)
@pytest.mark.parametrize("command", ["chat", "generate"])
def test_an_empty_reply_says_why(
    command: str, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here([command, "-p", "What is 12 + 7?", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == ""
    assert reason in shown.err
    assert run_here([command, "-p", "What is 12 + 7?"]) == 0
    assert "the reply" not in capsys.readouterr().err


def test_empty_replies_of_a_batch_are_numbered(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(["generate", "-p", "What is 12 + 7?", "-p", "What is 7 + 7?", "--stop", "19"]) == 0
    assert "(prompt 0: the reply is empty, because it begins with the stop text '19')" in capsys.readouterr().err


def test_one_ctrl_d_ends_the_text_of_a_terminal(terminal: Any) -> None:
    one = terminal("generate", "-n", "4")
    one.wait_for("type the text, then press Enter and Ctrl-D")
    one.type("What is 12 + 7?\n\x04")
    one.wait_for("19\n")
    assert one.exit_code() == 0


@pytest.mark.parametrize("options", [["--temperature", "0"], ["--beams", "2"], ["--samples", "2", "--seed", "3"]])
def test_a_terminal_breaks_lines_between_words(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["generate", "-p", "Tell me a story about a fox.", "-n", "60", *options]
    assert run_here(command) == 0
    piped = capsys.readouterr().out
    monkeypatch.setattr(wrapping, "width_of", lambda stream: 30)
    monkeypatch.setattr(terminal_output, "width_of", lambda stream: 30)
    assert run_here(command) == 0
    shown = capsys.readouterr().out
    assert max(map(len, piped.splitlines())) > 60 and max(map(len, shown.splitlines())) <= 30
    assert shown.split() == piped.split()
    assert run_here([*command, "--json"]) == 0
    assert all(json.loads(line)["text"] in piped for line in capsys.readouterr().out.splitlines())


def test_a_time_limit_is_noted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:

    class AfterSomeSteps(float):
        """A deadline that passes after some steps."""

        steps = 0

        def __le__(self, other: float) -> bool:
            self.steps += 1
            return self.steps > 5

    with monkeypatch.context() as patch:
        patch.setattr("genai.llm.request_options.RequestOptions.deadline", AfterSomeSteps())
        assert run_here(["generate", "-p", "Tell me a story", "--ignore-eos", "--timeout", "3600"]) == 0
    assert "(the time limit of 3600 s ended the reply)" in capsys.readouterr().err
    assert run_here(["generate", "-p", "x", "--timeout", "1e-9"]) == 1
    said = capsys.readouterr().err
    assert "fix: raise --timeout, or shorten the prompt" in said


def test_more_samples_than_beams(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(["generate", "-p", "x", "--beams", "2", "--samples", "3"]) == 2
    assert "--samples 3 cannot be used with --beams 2" in capsys.readouterr().err
