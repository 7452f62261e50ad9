"""`genai chat --tools`: functions from a Python file, which run only after confirmation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genai.cli.chat.tools import read_functions
from genai.errors import InputError
from tests.llm.test_tool_calls import TEMPLATES

MODULE = '''
from typing import Literal

def double(number: int, unit: Literal["m", "km"] = "m") -> str:
    """Twice a number."""
    return f"{2 * number} {unit}"

def fails(names: list[str], limit: float | None = None) -> None:
    raise ValueError("never")

def _hidden() -> None: ...
'''


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MODULE, encoding="utf-8")
    return path


def test_functions_become_tools(module: Path) -> None:
    found = read_functions(module)
    double, fails = (tool["function"] for tool in found.tools)
    assert double["name"] == "double" and double["description"] == "Twice a number."
    assert double["parameters"] == {
        "type": "object",
        "properties": {"number": {"type": "integer"}, "unit": {"enum": ["m", "km"]}},
        "required": ["number"],
        "additionalProperties": False,
    }
    assert fails["parameters"]["properties"] == {
        "names": {"type": "array", "items": {"type": "string"}},
        "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    }
    assert found.call("double", {"number": 4, "unit": "km"}) == "8 km"
    assert found.call("fails", {"names": []}) == "Error: ValueError: never"
    assert found.call("double", {"wrong": 4}).startswith("Error: TypeError")
    assert "the functions are double, fails" in found.call("other", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "defines no public function"),
        ("raise OSError('gone')", "OSError: gone"),
        ("def f(a: set[int]): ...", "set"),
        ("def f(*a): ...", "has \\*a"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("raise BaseException('b')", "BaseException: b"),
        ("def f(: ...", "SyntaxError"),
        ("def f(a: 'Missing'): ...", "annotations cannot be read: NameError"),
        ("def f(a: {}): ...", "has the type {}|annotations cannot be read"),
        ("from typing import Literal\ndef f(a: Literal[b'x']): ...", "has the type"),
        ("def f(a: dict[int, int]): ...", "has the type"),
        ("def f(a: object): ...", "has the type"),
        ("import enum\nclass E(enum.Enum): A = 1\ndef f(a: E): ...", "has the type"),
        ("def f(a, /): ...", "has a"),
        ("def f(**a): ...", r"has \*\*a"),
        ("def f(): yield 1", "function f is a generator"),
        ("async def f(): yield 1", "function f is a generator"),
        ("class A: ...", "defines no public function"),
    ],
)
def test_files_that_cannot_be_used(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_functions(path)
    with pytest.raises(InputError, match="not a Python file"):
        read_functions(tmp_path / "missing.py")


@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_call_is_asked_about(
    answer: str, terminal: Callable[..., Any], module: Path, tmp_path: Path, bundled_folder: Path
) -> None:
    """The bundled model was not trained on calls, so a bias makes it begin with a call."""
    folder = tmp_path / "tooled"
    shutil.copytree(bundled_folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATES["llama3"], encoding="utf-8")
    module.write_text(MODULE.split("def fails")[0], encoding="utf-8")
    one = terminal(
        "chat", str(folder), "-t", "1", "--tools", str(module), "--logit-bias", f"{93}=60", "--temperature", "0",
        "-n", "120",
    )  # fmt: skip
    one.wait_for(">>>", seconds=120)
    one.type("Hi\r")
    one.wait_for(r"\[calls double\(.*Run double\(.*\)\?\s+\[y/N\]")
    one.type(f"{answer}\r")
    if answer == "y":
        one.wait_for(r"double → -?\d+ k?m")
        one.wait_for(r"Run double\(.*\[y/N\]")  # the model calls again
        one.type("n\r")
    one.wait_for(">>>")
    assert answer == "y" or "double →" not in one.seen


def test_a_template_without_tools_is_said_before_the_chat(terminal: Callable[..., Any], module: Path) -> None:
    one = terminal("chat", "-t", "1", "--tools", str(module))
    one.wait_for("omits the tools", seconds=120)
    assert ">>>" not in one.seen
