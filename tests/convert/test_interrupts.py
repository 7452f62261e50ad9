"""Builds that are stopped, or run beside each other: nothing looks finished that is not."""

from __future__ import annotations

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

from genai.convert import build_model, folder as folder_module
from genai.convert.folder import locked, unfinished_folder
from genai.errors import ModelFolderError

# The command line with a pause after every tensor; and what `genai chat` does first with a checkpoint.
SLOW = """
import sys, time
from genai.convert.graph_writer import DataFile
append = DataFile.append
def slow(self, *arguments):
    time.sleep(0.02)
    return append(self, *arguments)
DataFile.append = slow
"""
BUILD = SLOW + "from genai.cli.__main__ import main; main(sys.argv[1:])"
RESOLVE = """
import sys
from pathlib import Path
from genai.cli.build import model_folder
print(model_folder(Path(sys.argv[1])))
"""


@pytest.fixture
def checkpoint(golden: Any, letter_tokenizer: Path, tmp_path: Path) -> Path:
    return golden("llama_tied").write_checkpoint(tmp_path / "hf", letter_tokenizer)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """start(code, *arguments) -> a process of its own, with a cache of its own."""

    def run(code: str, *arguments: Any) -> subprocess.Popen[str]:
        environment = os.environ | {"GENAI_CACHE_DIR": str(tmp_path / "cache")}
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


def wait_for(folder: Path, pattern: str) -> Path:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := list(folder.glob(pattern)):
            return found[0]
        time.sleep(0.01)
    raise AssertionError(f"no {pattern} in {folder}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_nothing(start: Any, checkpoint: Path, tmp_path: Path, number: int, code: int) -> None:
    build = start(BUILD, "build", checkpoint, "-o", tmp_path / "out")
    wait_for(tmp_path, ".out.*.unfinished/model.onnx.data")
    build.send_signal(number)
    stderr = build.communicate(timeout=60)[1]
    assert build.returncode == code, stderr
    # With an empty cache kernels are compiled first.
    compiling = r"(Compiling \d+ CPU kernels? \(once per kernel\) \.\.\.\n)?"
    assert re.fullmatch(f"{compiling}genai: interrupted, nothing was built\n", stderr), stderr
    assert sorted(tmp_path.iterdir()) == [checkpoint]


def test_what_a_killed_build_left_is_removed_by_the_next(start: Any, checkpoint: Path, tmp_path: Path) -> None:
    build = start(BUILD, "build", checkpoint, "-o", tmp_path / "out")
    left = wait_for(tmp_path, ".out.*.unfinished")
    build.kill()
    build.communicate(timeout=60)
    assert left.is_dir()
    assert not (left / "genai_config.json").exists()
    build_model(checkpoint, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == [checkpoint, tmp_path / "out"]


def test_a_running_build_keeps_its_folder(tmp_path: Path) -> None:
    with unfinished_folder(tmp_path / "out") as one, unfinished_folder(tmp_path / "out") as two:
        assert one.is_dir()
        assert two.is_dir()
        with locked(one, wait=False) as free:
            assert not free
    assert not list(tmp_path.iterdir())


def test_two_builds_of_one_folder(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second to finish finds the first's folder, and leaves it alone."""
    write = folder_module.write_decoder

    def overtaken(*arguments: Any) -> None:
        write(*arguments)
        monkeypatch.setattr(folder_module, "write_decoder", write)
        build_model(checkpoint, tmp_path / "out")

    monkeypatch.setattr(folder_module, "write_decoder", overtaken)
    with pytest.raises(ModelFolderError, match="already exists"):
        build_model(checkpoint, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == [checkpoint, tmp_path / "out"]


def test_two_first_uses_at_once(start: Any, checkpoint: Path, tmp_path: Path) -> None:
    """One builds, the other waits for it and finds the folder; a checkpoint that cannot be written to is enough."""
    models = tmp_path / "cache" / "genai" / "models"
    models.mkdir(parents=True)
    checkpoint.chmod(0o555)
    with locked(models):  # a third, so that both have to wait
        processes = [start(RESOLVE, checkpoint) for _ in range(2)]
        for process in processes:
            assert "Building an INT4 model" in process.stderr.readline()
            assert "waiting for another process" in process.stderr.readline()
    results = [process.communicate(timeout=120) for process in processes]
    checkpoint.chmod(0o755)
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert [str(path) for path in models.iterdir()] == [results[0][0].strip()]
