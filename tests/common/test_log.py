"""The library's messages go to the logger `genai`, and to stderr if a program requests this."""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from genai.common import progress, shown_tasks
from genai.common.log import logger, to_stderr
from genai.common.progress import Task, quietly, task
from genai.common.progress_line import ProgressLine

ROOM = logging.getLogger("genai")
PROGRAM = """
import genai

with genai.LLM(threads=2, device="auto") as llm:
    assert llm.chat("What is 12 + 7?", temperature=0).text == "19"
"""
COMPILING = re.compile(r"Compiling \d+ CPU kernels? \(once per kernel\) \.\.\.\n")


class Stream(io.StringIO):
    """A stream that can act as a terminal, and can refuse to be written to."""

    def __init__(self, *, is_terminal: bool = False, error: Exception | None = None) -> None:
        super().__init__()
        self._is_terminal, self._error = is_terminal, error

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str, /) -> int:
        if self._error is not None:
            raise self._error
        return super().write(text)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stream]:
    """Return a function shown(is_terminal=...) that replaces stderr and returns the new stream."""

    def replaced(**options: bool) -> Stream:
        stream = Stream(**options)  # type: ignore[arg-type]
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return replaced


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    found = logger("genai.tests.log")
    yield found
    found.setLevel(logging.NOTSET)


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "GENAI_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(params=[0o700, 0o777], ids=["a private cache", "a cache that is refused"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An empty folder for compiled kernels."""
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(request.param)
    return folder


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals on Windows")
def test_the_library_writes_nothing_by_itself(cache: Path) -> None:
    """Compilation and problems with the cache are not shown, neither on a terminal nor elsewhere."""
    terminal, opened = pty.openpty()
    try:
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=opened, env=environment(cache), timeout=600
        )
        os.set_blocking(terminal, False)
        try:
            written = os.read(terminal, 65536)
        except BlockingIOError:
            written = b""
    finally:
        os.close(opened)
        os.close(terminal)
    assert (result.returncode, result.stdout, written) == (0, b"", b"")
    assert bool(list(cache.rglob("*.o"))) == (cache.stat().st_mode & 0o777 == 0o700), "its kernels were compiled"


def test_what_the_command_says(cache: Path) -> None:
    command = [sys.executable, "-m", "genai", "generate", "--raw", "-p", "What", "-n", "1", "--device", "auto"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(cache), timeout=600)
    assert result.returncode == 0
    *first, last = result.stderr.splitlines(keepends=True)
    assert first[0].startswith("genai: computing on the CPU: ") and COMPILING.fullmatch(last)
    if cache.stat().st_mode & 0o777 == 0o700:
        assert len(first) == 1
    else:
        refused = f"genai: compiled CPU kernels are not stored on disk: {cache} is writable by other users, but "
        assert len(first) == 2 and first[1].startswith(refused)


def test_loggers_are_named_by_their_modules() -> None:
    for name in (
        "devices",
        "models.loading",
        "convert.resolve",
        "kernels.cpu.jit.kernel_cache",
        "kernels.cpu.jit.native",
    ):
        found = importlib.import_module(f"genai.{name}")._log
        assert found is logging.getLogger(f"genai.{name}") and found.level == logging.NOTSET and not found.handlers


def test_the_library_sets_nothing_that_is_the_program_s_to_set() -> None:
    code = (
        "import logging, genai; genai.LLM; import genai.models.loading\n"
        "room = logging.getLogger('genai')\n"
        "print(room.level, room.propagate, [type(one).__name__ for one in room.handlers], logging.root.handlers)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "0 True ['NullHandler'] []\n"


def test_levels(caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fallback is logged as information. If every process has to compile again, that is a warning."""
    from genai import devices
    from genai.kernels.cpu.jit import kernel_cache

    monkeypatch.setattr(devices, "_told", set())
    monkeypatch.setattr(kernel_cache, "_told", {})
    caplog.set_level(logging.INFO, "genai")
    devices.tell_of_the_cpu("there is none")
    kernel_cache.CacheFolder(None, "key")
    assert [(record.name, record.levelname) for record in caplog.records] == [
        ("genai.devices", "INFO"),
        ("genai.kernels.cpu.jit.kernel_cache", "WARNING"),
    ]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_lines_on_stderr(
    shown: Callable[..., Stream], log: logging.Logger, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown_tasks, "SHOWN_AFTER", 0.0)
    with to_stderr():
        stderr = shown(is_terminal=is_terminal)  # messages go to the current stderr
        log.debug("nobody wants to know")
        log.info("50 %% of %s", "it")
        log.warning("that is bad")
        with task("Working", 2, log=log) as work:
            work.add(1)
    lines = "genai: 50 % of it\ngenai: that is bad\n"
    if is_terminal:
        assert stderr.getvalue().startswith(f"{lines}\r/ Working [----") and "..." not in stderr.getvalue()
    else:
        assert stderr.getvalue() == f"{lines}Working ...\n"
    log.warning("it is over")
    with task("Working", 2) as work:
        work.add(1)
    assert "over" not in stderr.getvalue() and type(work) is Task


def test_to_stderr_lasts_and_is_there_once(shown: Callable[..., Stream], log: logging.Logger) -> None:
    stderr = shown()
    lasting = to_stderr()
    try:
        with to_stderr():
            log.info("once")
        log.info("twice")
        assert stderr.getvalue() == "genai: once\ngenai: twice\n"
        assert isinstance(task("Working"), ProgressLine)
    finally:
        lasting.close()
    assert ROOM.level == logging.NOTSET and type(task("Working")) is Task
    log.info("thrice")
    assert stderr.getvalue().endswith("twice\n")


def test_a_level_that_the_program_chose_stays(log: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ROOM, "level", logging.DEBUG)
    with to_stderr():
        assert ROOM.level == logging.DEBUG
    assert ROOM.level == logging.DEBUG


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), BrokenPipeError(), UnicodeEncodeError("ascii", "ä", 0, 1, "no")], ids=repr
)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_stderr_that_takes_nothing(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch, error: Exception, is_terminal: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", Stream(is_terminal=is_terminal, error=error))
    say(log)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_stderr_that_is_closed_or_absent(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    closed = Stream(is_terminal=is_terminal)
    closed.close()
    for stream in (closed, io.TextIOWrapper(io.BytesIO()), None):
        if isinstance(stream, io.TextIOWrapper):
            stream.detach()
        monkeypatch.setattr(sys, "stderr", stream)
        say(log)


def say(log: logging.Logger) -> None:
    """Log one message of every kind."""
    with to_stderr():
        log.warning("one")
        with task("Working", 2, log=log) as work:
            work.add(1)
            work.show(2, 2)


def test_quietly(log: logging.Logger, logged: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_renderer", ProgressLine)
    with quietly(), quietly(False):  # the inner context cannot be louder
        log.info("an aside")
        log.warning("a warning")
        assert type(task("Working", log=log)) is Task
    assert logged() == ["a warning"]
    with quietly(False):
        log.info("an aside")
        assert isinstance(task("Working", log=log), ProgressLine)
    assert logged() == ["an aside", "Working ..."]
