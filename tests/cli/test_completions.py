"""Completion of values in the shell, and the names of values in help pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from genai.cli import completions
from genai.cli.app import command, run
from genai.cli.completions import models_like, paths_like, values_of
from genai.hub.built import models_folder
from genai.kernels.cpu.jit.native import LIBRARY

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and an empty cache."""
    assert LIBRARY.folder  # chosen now: compiled kernels stay where they are
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def completed(*words: str) -> list[str]:
    """Return what bash would offer for the last word."""
    changes = {"_GENAI_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    environment = {**os.environ, **changes}
    shown = subprocess.run([sys.executable, "-m", "genai"], env=environment, capture_output=True, text=True, check=True)
    assert shown.stderr == ""
    return shown.stdout.split()


def test_the_shell_completes_values() -> None:
    assert completed("genai", "quantize", "x", "--method", "g") == ["gptq"]
    assert completed("genai", "chat", "qwen3-0") == ["qwen3-0.6b"]


def test_models(here: Path) -> None:
    assert models_like("QWEN3-1") == ["qwen3-1.7b"]
    assert models_like("pebble+p") == ["pebble+pirate"]
    (models_folder() / "mine-123").mkdir(parents=True)
    (here / "mist").mkdir()
    for name in ("mi.gguf", "mi.txt"):
        (here / name).touch()
    assert models_like("mi") == ["mine-123", "mi.gguf", "mist/"]
    assert paths_like("") == ["mi.gguf", "mi.txt", "mist/"]
    assert paths_like("mist/") == [] and paths_like("/no/such/") == [] and paths_like("\0") == []
    (here / "mist" / "a").touch()
    assert paths_like("mist/") == ["mist/a"]


def test_the_values_are_those_of_the_options() -> None:
    """Every entry belongs to an option, has values, and agrees with the option's help."""
    commands = command("").commands
    for key, values in completions._VALUES.items():
        name, _, parameter = key.rpartition(":")
        named = [name] if name else list(commands)
        owners = [one for one in named for option in getattr(commands[one], "params", []) if option.name == parameter]
        groups = [group for group in commands.values() for one in getattr(group, "commands", {}).values()
                  for option in one.params if option.name == parameter]  # fmt: skip
        assert owners or groups, key
        assert values_of(name, parameter)
        if isinstance(values, tuple) and name:
            (option,) = [option for option in commands[name].params if option.name == parameter]
            assert all(value in option.help for value in values), key
    assert values_of("chat", "no-such-option") == []


def test_help_pages_name_models_and_files(capsys: Capture) -> None:
    assert run(["eval", "kld", "--help-all"]) == 0
    shown = capsys.readouterr().out
    assert "  BASE   Short name, org/name" in shown and "--file FILE" in shown
    assert run(["chat", "--help-all"]) == 0
    shown = capsys.readouterr().out
    assert "  MODEL  Short name" in shown and "--draft MODEL" in shown and "--json-schema FILE" in shown
    assert "MODEL PATH" not in shown and "--tools PATH" in shown
