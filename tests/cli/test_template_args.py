"""Variables of chat templates in `genai chat`, `generate` and `batch`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genai.cli.app import run as run_here
from genai.cli.template_args import read_template_args, thinking_of
from genai.errors import InputError, OptionError
from genai.llm.chat import ChatSession
from genai.llm.llm import LLM
from genai.text.tokenizer import Tokenizer

THINKS = (
    "{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ 'NO' }}{% endif %}"
    "{%- if date_string %}{{ date_string }}{% endif %}{{ '<|im_start|>assistant\n' }}"
)
QUESTION = ["-p", "What is 12 + 7?"]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory, bundled_folder: Path) -> Path:
    """The bundled model with a template that reads enable_thinking and date_string."""
    folder = tmp_path_factory.mktemp("models") / "thinker"
    shutil.copytree(bundled_folder, folder)
    (folder / "chat_template.jinja").write_text(THINKS)
    return folder


def test_values_are_json_or_text() -> None:
    texts = ["a=false", "b=1.5", "c=[1, 2]", "d=1 May", 'e="x"', "f=", "g=NaN", "h=a=b", "i=null"]
    assert read_template_args(texts) == {
        "a": False, "b": 1.5, "c": [1, 2], "d": "1 May", "e": "x", "f": "", "g": "NaN", "h": "a=b", "i": None,
    }  # fmt: skip
    assert read_template_args(None) == {}


def test_variables_reach_the_template(thinker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(thinker), *QUESTION, "--dump-prompt", "-n", "2"]
    for command in (["generate", "--chat"], ["chat"]):
        assert run_here([*command, *arguments]) == 0
        assert "\nNO" not in capsys.readouterr().err
        assert run_here([*command, *arguments, "--template-arg", "enable_thinking=false"]) == 0
        assert "\nNO<|im_start|>assistant" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--template-arg", "enable_thinkin=false"], "does not read the variable 'enable_thinkin'"),
        (["--template-arg", "enable_thinkin=false"], "it reads date_string, enable_thinking"),
        (["--template-arg", "enable_thinkin=false"], "did you mean 'enable_thinking'?"),
        (["--template-arg", "messages=[]"], "'messages' of chat templates is reserved"),
        (["--template-arg", "x"], "--template-arg is 'x'"),
        (["--template-arg", "x y=1"], "NAME=VALUE is expected"),
        (["--template-arg", "a=1", "--template-arg", "a=2"], "--template-arg a is given more than once"),
    ],
)
@pytest.mark.parametrize("command", ["chat", "generate", "batch"])
def test_bad_variables_are_named(
    command: str, arguments: list[str], message: str, thinker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are errors of the whole run, before the first prompt."""
    (tmp_path / "in.txt").write_text("What is 12 + 7?\n")
    how = {
        "chat": [str(thinker), *QUESTION],
        "generate": [str(thinker), *QUESTION, "--chat"],
        "batch": [str(tmp_path / "in.txt"), str(thinker), "-o", str(tmp_path / "out.jsonl"), "--chat"],
    }
    assert run_here([command, *how[command], *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "--template-arg" in shown.err and message in shown.err
    assert not (tmp_path / "out.jsonl").exists()


def test_raw_prompts_have_no_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(["generate", *QUESTION, "--raw", "--template-arg", "a=1"]) == 2
    assert "--template-arg cannot be used with --raw" in capsys.readouterr().err
    (tmp_path / "in.csv").write_text("q\nHi\n")
    arguments = ["batch", str(tmp_path / "in.csv"), "-o", str(tmp_path / "out.jsonl"), "--template", "{q}"]
    assert run_here([*arguments, "--template-arg", "a=1"]) == 2
    assert "add --chat" in capsys.readouterr().err


def test_lines_of_a_batch_override_the_variables(thinker: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "chat_template_kwargs": {"enable_thinking": True}}
    lines: list[dict[str, Any]] = [
        {"messages": messages},
        {"messages": messages, "chat_template_kwargs": {"enable_thinking": True}},
        {"messages": messages, "template": {"date_string": "1 May"}},
        {"body": body},
        {"body": {**body, "chat_template_kwargs": {"nothing": 1}}},
        {"messages": messages, "chat_template_kwargs": 5},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    arguments = [str(tmp_path / "in.jsonl"), str(thinker), "-o", str(out), "-n", "1", "--in-order", "-q"]
    assert run_here(["batch", *arguments, "--template-arg", "enable_thinking=false"]) == 1
    found = [json.loads(line) for line in out.read_text().splitlines()]
    lengths = [line["response"]["body"]["usage"]["prompt_tokens"] for line in found[:4]]
    assert lengths[1] == lengths[3] < lengths[0] < lengths[2]
    assert "does not read the variable 'nothing'" in found[4]["error"]["message"]
    assert "template = 5" in found[5]["error"]["message"]


def test_switches_of_reasoning() -> None:
    assert thinking_of("off", ["x", "thinking"]) == {"thinking": False}
    assert thinking_of("on", ["thinking", "enable_thinking"]) == {"enable_thinking": True}
    assert thinking_of("default", ["thinking"]) == {"thinking": None}
    assert thinking_of("low", ["reasoning_effort"]) == {"reasoning_effort": "low"}
    assert thinking_of("default", ["reasoning_effort"]) == {"reasoning_effort": None}
    with pytest.raises(OptionError, match="no switch for reasoning") as caught:
        thinking_of("off", ["date_string"])
    assert caught.value.why == "it reads date_string"
    with pytest.raises(OptionError, match="/set think off: invalid value") as caught:
        thinking_of("off", ["reasoning_effort"])
    assert caught.value.why == "allowed: low, medium, high, default"


def test_settings_of_a_chat(terminal: Callable[..., Any], thinker: Path) -> None:
    one = terminal("chat", str(thinker), "-t", "1", "-n", "4")
    one.wait_for("context 1,024 tokens.*>>>")
    one.enter("/set think off", r"\(think is off\)")
    one.enter("/set", r"think +off.*template\.date_string +-.*template\.enable_thinking +false")
    one.enter("Hi", "ttft")
    one.enter("/prompt", "\nNO<.im_start.>assistant")
    one.enter("/set template.date_string 1 May", r"\(template.date_string is 1 May\)")
    one.enter("/set template.date_string", r'template.date_string is "1 May"')
    one.enter("/set template.date_strin x", r"/set template.date_strin: the chat template.*did you mean 'date_string'")
    one.enter("/set think default", r"\(think is default\)")
    one.enter("Hi", "ttft")
    assert "NO<" not in one.enter("/prompt", "1 May<.im_start.>assistant").rpartition("/prompt")[2]
    one.enter("/set think low", "allowed: on, off, default")
    one.type("/bye\r")
    assert one.exit_code() == 0


def test_python(thinker: Path, bundled_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(thinker)
    assert tokenizer.template_variables() == ("date_string", "enable_thinking")
    assert Tokenizer(bundled_folder).template_variables() == ()
    with LLM(thinker) as llm:
        with pytest.raises(OptionError, match="does not read the variable 'nothing'"):
            llm.chat("Hi", template={"nothing": 1})
        with pytest.raises(InputError, match="template sets 'add_generation_prompt'"):
            llm.chat("Hi", template={"add_generation_prompt": False})
        chat = ChatSession(llm, template={"enable_thinking": False})
        with pytest.raises(OptionError, match="'nothing'"):
            chat.set_template({"nothing": 1, "enable_thinking": None})
        assert chat.template == {"enable_thinking": False}
        chat.ask("What is 12 + 7?")
        assert "NO" in chat.prompt()
        chat.save(tmp_path / "chat.json")
        other = ChatSession(llm)
        other.load(tmp_path / "chat.json")
        assert other.template == {"enable_thinking": False}
        with LLM(bundled_folder) as plain:
            with pytest.raises(OptionError, match="'enable_thinking'"):
                chat.switch(plain)
            assert chat.llm is llm
            with pytest.raises(OptionError, match="'enable_thinking'"):
                ChatSession(plain).load(tmp_path / "chat.json")


def test_variables_of_a_template_that_cannot_be_read(thinker: Path, tmp_path: Path) -> None:
    """The error of the template itself is raised."""
    folder = tmp_path / "broken"
    shutil.copytree(thinker, folder)
    (folder / "chat_template.jinja").write_text("{% if %}")
    tokenizer = Tokenizer(folder)
    assert tokenizer.template_variables() == ()
    tokenizer.check_template_variables(["x"])
