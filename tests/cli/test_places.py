"""Errors about options name them as the user types them: flags, `/set NAME VALUE`, or arguments in Python."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genai.cli.app import run as run_here
from genai.cli.chat.commands import in_words_of_chat, run_command
from genai.cli.options import FLAGS, Flag, read_lora, read_setting
from genai.cli.terminal import Voice
from genai.errors import GenaiError, InputError, OptionError
from genai.llm.chat import ChatSession
from genai.llm.llm import LLM

# Values that are refused; other numbers are refused if they are negative.
BAD = {
    "presence_penalty": "nan",
    "frequency_penalty": "nan",
    "samplers": "top_k;top_q",
    "stop": "",
    "banned_strings": "",
    "dry_sequence_breakers": "",
    "choice": "",
    "regex": "(",
    "logit_bias": "99999=1",
    "sequence_bias": "1:99999=1",
    "mirostat": "1",
}
NEEDS_FILE, SWITCHES = ("json_schema", "grammar"), ("ignore_eos",)
CHECKED = [flag for flag in FLAGS if flag.option not in (*NEEDS_FILE, *SWITCHES)]
PYTHON_NOTATION = re.compile(r"\bNone\b|\(.*,\)|pydantic")


def bad(flag: Flag) -> str:
    return BAD.get(flag.option, "-7")


@pytest.mark.parametrize("flag", CHECKED, ids=lambda flag: flag.option)
def test_errors_on_the_command_line_name_flags(flag: Flag, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("Hi\n")
    commands = (
        ["chat", "-p", "Hi"],
        ["generate", "-p", "Hi"],
        ["batch", f"{tmp_path}/in.txt", "-o", f"{tmp_path}/out"],
    )
    command = commands[FLAGS.index(flag) % len(commands)]
    assert run_here([*command, f"{flag.names[-1]}={bad(flag)}"]) == 2
    message = capsys.readouterr().err
    assert flag.names[-1] in message and "fix: " in message
    assert not PYTHON_NOTATION.search(message)
    assert "_" not in flag.option or flag.option not in message


@pytest.mark.parametrize("given", ["What is this?", "x" * 300])
def test_only_commands_with_a_prompt_name_its_option(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("chat", "generate"):
        assert run_here([command, given, "-p", "Hi"]) == 1
        assert f"use -p to ask a question: `genai {command} -p" in capsys.readouterr().err
    for command in (["info", given], ["quantize", given, "-o", "nowhere"]):
        assert run_here(command) == 1
        message = capsys.readouterr().err
        assert "not a model folder" in message and "-p" not in message


@pytest.fixture(scope="module")
def session() -> ChatSession:
    return ChatSession(LLM())


@pytest.mark.parametrize("flag", CHECKED, ids=lambda flag: flag.option)
def test_errors_in_a_chat_name_settings(flag: Flag, session: ChatSession) -> None:
    with pytest.raises(GenaiError) as caught:
        option, value = read_setting(flag.setting, bad(flag))
        session.set_options({option: value})
    message = str(in_words_of_chat(caught.value))
    assert message.startswith(f"/set {flag.setting}") and "--" not in message
    assert not PYTHON_NOTATION.search(message)
    assert "_" not in flag.option or flag.option not in message


@pytest.mark.parametrize("flag", CHECKED, ids=lambda flag: flag.option)
def test_errors_in_python_name_arguments(flag: Flag, session: ChatSession) -> None:
    if flag.read is not None and flag.option.endswith("bias"):
        value = flag.value([bad(flag)])
    else:
        value = flag.value([flag.kind(bad(flag))] if flag.repeated else flag.kind(bad(flag)))
    with pytest.raises(GenaiError) as caught:
        session.llm.params(**{flag.option: value})
    message = str(caught.value)
    assert message.startswith(flag.option) and "--" not in message and "/set" not in message


@pytest.mark.parametrize(
    ("settings", "what", "fix"),
    [
        ({"dry_base": 2.0}, "/set dry-base 2.0 contradicts dry-multiplier 0.0",
         "type /set dry-multiplier VALUE, or type /set dry-base default"),
        ({"temperature": 0.0, "top_k": 5}, "/set top-k 5 contradicts temperature 0",
         "raise temperature, or type /set top-k default"),
        ({"min_tokens": 5, "max_tokens": 4}, "/set min-tokens 5 contradicts max-tokens 4",
         "lower min-tokens or raise max-tokens"),
    ],
)  # fmt: skip
def test_contradictions_in_a_chat(settings: dict[str, float], what: str, fix: str, session: ChatSession) -> None:
    with pytest.raises(GenaiError) as caught:
        session.set_options(settings)
    error = in_words_of_chat(caught.value)
    assert (error.what, error.fix) == (what, fix)
    assert caught.value.what != what, "the original is unchanged"


def test_a_long_message_and_adapters_in_a_chat(session: ChatSession) -> None:
    with pytest.raises(GenaiError) as caught:
        session.ask("word " * 5000)
    assert "(/set on-overflow truncate or shift)" in in_words_of_chat(caught.value).fix
    with pytest.raises(GenaiError) as caught:
        read_lora("x")
    error = in_words_of_chat(caught.value)
    assert error.what == "/lora is 'x'" and error.fix == "for example, use /lora pirate=adapters/pirate:0.8"


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        (
            "/show",
            "/set shows the settings, /model the model, and /system the system message; /help lists the commands",
        ),
        ("/regen", "did you mean /retry? /help lists the commands"),
        ("/sett", "did you mean /set? /help lists the commands"),
        ("/xyzzy", "/help lists the commands"),
    ],
)
def test_unknown_commands_in_a_chat(typed: str, fix: str) -> None:
    with pytest.raises(InputError) as caught:
        run_command(SimpleNamespace(), typed)  # type: ignore[arg-type]
    assert caught.value.fix == fix


def test_adapters_beside_the_model_in_a_chat(session: ChatSession, capsys: pytest.CaptureFixture[str]) -> None:
    loop: Any = SimpleNamespace(session=session, voice=Voice())
    with pytest.raises(OptionError, match=r"loaded adapters: none; adapters beside the model: .*pirate"):
        run_command(loop, "/lora wrods")
    run_command(loop, "/lora words")
    assert "(adapter: words; loaded: words)" in capsys.readouterr().err
    run_command(loop, "/lora off")


def test_an_unknown_adapter_and_files_in_a_chat(session: ChatSession, tmp_path: Path) -> None:
    with pytest.raises(GenaiError) as caught:
        session.use_adapter("x")
    assert in_words_of_chat(caught.value).fix == "load the adapter first (/lora NAME=PATH)"
    (tmp_path / "README.md").write_text("# Title\n")
    with pytest.raises(GenaiError, match=r"README\.md: not a saved conversation"):
        session.load(tmp_path / "README.md")
    with pytest.raises(GenaiError, match=r"the folder \S*/none does not exist") as caught:
        session.save(tmp_path / "none/x.json")
    assert "Errno" not in str(caught.value)


def test_missing_inputs_and_empty_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(["batch", str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "out.jsonl")]) == 1
    assert "the file does not exist" in (message := capsys.readouterr().err) and "Errno" not in message
    assert run_here(["generate", "--raw", "-p", ""]) == 1
    assert "the prompt is empty" in (message := capsys.readouterr().err) and "pass text with -p" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ctx-size", "0"], "--ctx-size 0"),
        (["--kv-type", "x"], "leave --kv-type out"),
        (["--device", "x"], "leave --device out"),
        (["--on-overflow", "x"], "--on-overflow 'x'"),
        (["--ctx-shift", "--on-overflow", "shift"], "--ctx-shift contradicts --on-overflow 'shift'"),
        (["--samplers", "x"], "the known samplers are penalties, dry, top_n_sigma"),
    ],
)
def test_other_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(["chat", "-p", "Hi", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("num_predict", "did you mean max-tokens?"),
        ("temp", "did you mean temperature?"),
        ("num_ctx", "start the chat again with --ctx-size"),
        ("ctx-size", "start the chat again with --ctx-size"),
        ("system", "type /system TEXT"),
        ("parameter", "type /set temperature 0.7"),
    ],
)
def test_settings_of_other_programs(name: str, fix: str) -> None:
    with pytest.raises(OptionError, match=f"/set {name}: unknown setting") as caught:
        read_setting(name, "1")
    assert fix in caught.value.fix
