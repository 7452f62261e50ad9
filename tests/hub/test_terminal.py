"""On a terminal: the question before a pull, the bar while it comes, and the question before a removal."""

from __future__ import annotations

import os
from pathlib import Path

from genai.hub.store import models
from tests.cli.conftest import Terminal
from tools.local_hub import Fault, LocalHub


def opened(*arguments: str) -> Terminal:
    return Terminal(*arguments, environment={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"})


def test_questions_and_a_bar(hub: LocalHub, chatting: dict[str, bytes], tmp_path: Path) -> None:
    hub.add("org/tiny-llama", chatting)
    build = ("build", "org/tiny-llama", "-o", str(tmp_path / "out"))
    for no in ("n\r", "\x04"):  # Ctrl-D
        terminal = opened(*build)
        shown = terminal.wait_for(r"Download org/tiny-llama \(8.8 MB\)\? \[Y/n\] ")
        assert "safetensors (1 file)" in shown and "licence" in shown
        terminal.type(no)
        terminal.wait_for("was not pulled")
        assert terminal.exit_code() == 1
        terminal.close()
    assert not any("/resolve/" in path for path in hub.paths())

    hub.faults["/cdn/"] = [Fault(), Fault(), Fault(pause=1.0)]  # the tokenizer's files; half of the weights stand still
    terminal = opened(*build)
    terminal.wait_for(r"\[Y/n\] ")
    terminal.type("\r")
    terminal.wait_for(r"Pulling \[#+-*\] +\d+%  \d\.\d\d MB of 8\.75 MB, \d+ s left")
    assert terminal.exit_code(60) == 0
    terminal.close()
    assert (tmp_path / "out" / "genai_config.json").is_file()

    terminal = opened("rm", "tiny-llama")
    terminal.wait_for(r"Remove\s[^?]+\?\s+\[y/N\] ")  # a long path wraps
    terminal.type("\r")
    terminal.wait_for("nothing was removed")
    assert terminal.exit_code() == 1
    terminal.close()
    assert len(models()) == 1
    terminal = opened("rm", "tiny-llama")
    terminal.wait_for(r"\[y/N\] ")
    terminal.type("y\r")
    terminal.wait_for("removed tiny-llama")
    assert terminal.exit_code() == 0
    terminal.close()
    assert models() == []
