"""`genai chat --tools`: functions and files that behave unexpectedly."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genai.cli.chat.tools import read_functions
from tests.cli.processes import run
from tests.llm.test_tool_calls import TEMPLATES

BODIES = {
    "exits": ("import sys; sys.exit(3)", "Error: SystemExit: 3"),
    "ends": ("raise GeneratorExit", "Error: GeneratorExit: "),
    "base": ("raise BaseException('b')", "Error: BaseException: b"),
    "mute": ("raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})", "Error: Mute"),
    "endless": ("return endless()", "Error: RecursionError: maximum recursion depth exceeded"),
    "keys": ("return {(1, 2): 3}", "{(1, 2): 3}"),
    "circle": ("a = []; a.append(a); return a", "[[...]]"),
    "nothing": ("return None", "null"),
    "nan": ("return float('nan')", "NaN"),
    "octets": (r"return b'\xff'", r'''"b'\\xff'"'''),
    "half": (r"return 'a\ud800'", r"a\ud800"),
}


@pytest.fixture
def functions(tmp_path: Path) -> Any:
    path = tmp_path / "odd.py"
    lines = [f"def {name}():\n    {body}" for name, (body, _) in BODIES.items()]
    lines += ["def prints():\n    print('said'); return 'done'", "async def later(n: int):\n    return n"]
    lines += ["def stops():\n    raise KeyboardInterrupt"]
    path.write_text("print('read')\n" + "\n".join(lines), encoding="utf-8")
    return read_functions(path)


def test_whatever_a_function_does_the_model_is_told(functions: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for name, (_, expected) in BODIES.items():
        assert functions.call(name, {}).startswith(expected), name
    assert functions.call("later", {"n": 3}) == "3"
    assert functions.call("prints", {}) == "done"
    shown = capsys.readouterr()
    assert "said" in shown.err and shown.out == "", "stdout carries only what the model says"
    with pytest.raises(KeyboardInterrupt):
        functions.call("stops", {})


def test_what_a_dictionary_holds_is_said(tmp_path: Path) -> None:
    path = tmp_path / "right.py"
    path.write_text("def f(a: dict[str, int], b: list, c=None, *, d: bool = True): ...")
    (tool,) = read_functions(path).tools
    assert tool["function"]["parameters"]["properties"] == {
        "a": {"type": "object", "additionalProperties": {"type": "integer"}},
        "b": {"type": "array"},
        "c": {"type": "string"},
        "d": {"type": "boolean"},
    }


@pytest.fixture
def tooled(tmp_path: Path, bundled_folder: Path) -> Path:
    """The bundled model, which was not trained on calls, with a template that supports calls."""
    folder = tmp_path / "tooled"
    shutil.copytree(bundled_folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATES["llama3"], encoding="utf-8")
    return folder


# A bias makes the model begin with a call.
CALLING = ("-t", "1", "--logit-bias", f"{93}=60", "--temperature", "0", "-n", "120")


def test_functions_that_end_or_block_or_steer_leave_the_chat_as_it_was(
    terminal: Callable[..., Any], tooled: Path, tmp_path: Path
) -> None:
    module = tmp_path / "mine.py"
    module.write_text(
        "import sys, time\ncalls = []\ndef go(n: bool) -> str:\n    calls.append(n)\n"
        "    if len(calls) == 1: return '\\x1b]0;mine\\x07\\u202eabc'\n"
        "    if len(calls) == 2: sys.exit(3)\n    print('asleep'); time.sleep(1000)\n",
        encoding="utf-8",
    )
    one = terminal("chat", str(tooled), "--tools", str(module), *CALLING)
    one.wait_for(">>>", seconds=120)
    one.type("Hi\r")
    one.wait_for(r"Run go\(.*\[y/N\]")
    one.type("y\r")
    one.wait_for(r"go → \\x1b\]0;mine\\x07\\u202eabc.*Run go\(.*\[y/N\]")
    one.type("y\r")
    one.wait_for(r"go → Error: SystemExit: 3.*Run go\(.*\[y/N\]")
    one.type("y\r")
    one.wait_for("asleep")
    one.type("\x03")
    one.wait_for(r"\(stopped\)\n.*>>>")
    one.type("/retry\r")
    one.wait_for(r"Run go\(.*\[y/N\]")  # the new reply may also contain a call
    one.enter("n", "")


def test_several_calls_of_which_some_are_refused(
    tmp_path: Path,
) -> None:
    """The model receives the results and the refusals."""
    from genai.cli.chat.loop import Loop
    from genai.text.parsing import ToolCall

    module = tmp_path / "mine.py"
    module.write_text("def go(n: int) -> int:\n    return n\n", encoding="utf-8")
    loop: Any = Loop.__new__(Loop)
    loop.functions, loop.voice = read_functions(module), type("Voice", (), {"say": lambda self, text: None})()
    reply = type("Reply", (), {"tool_calls": [ToolCall("go", {"n": number}, "") for number in (1, 2)]})()
    loop.session = type("Session", (), {"last_reply": reply})()
    for answers, expected in (
        ([True, False], ["1", "Error: the user did not allow this call"]),
        ([False, True], ["Error: the user did not allow this call", "2"]),
        ([False, False], []),
    ):
        left = list(answers)
        loop.confirm = lambda question, left=left: left.pop(0)
        assert [text for _, text in loop._results()] == expected


def test_without_a_terminal_it_is_said_that_nothing_is_called(tooled: Path, tmp_path: Path) -> None:
    module = tmp_path / "mine.py"
    module.write_text("def go(n: bool) -> str: ...\n", encoding="utf-8")
    found = run("chat", str(tooled), "--tools", str(module), *CALLING, "-p", "Hi")
    assert found.returncode == 0 and "[calls go(" in found.stdout and "(no function was called: " in found.stderr


def test_what_steers_a_terminal_is_shown_there_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from genai.cli import wrapping

    text = "a\tb\n\x1b[2J\x07\x9b\u202e é 名"
    assert wrapping.harmless(text, sys.stdout) == text
    monkeypatch.setattr(wrapping, "width_of", lambda stream: 80)
    assert wrapping.harmless(text, sys.stdout) == "a\tb\n\\x1b[2J\\x07\\x9b\\u202e é 名"
