"""The process that renders chat templates. It is started once, reused, and replaced if a template ends it."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from genai.common.interrupts import InterruptsDeferred, Task, uninterrupted

from ..errors import ChatTemplateError, InputError

T = TypeVar("T")
# Maximum length of a prompt.
_MOST_CHARACTERS = 4 * 2**20
# Room for several prompts of 4 Mi characters; a character occupies at most 12 bytes when JSON escapes it.
_MOST_ANSWER_BYTES = 2**28
_PROGRAM = (
    "import sys; sys.path[:0] = sys.argv[3:]; from genai.text.template_server import serve;"
    "serve(float(sys.argv[1]), int(sys.argv[2]))"
)


def _characters(value: Any) -> int:
    """Return the total length of all strings in nested lists and objects."""
    count, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            count += len(item)
        elif isinstance(item, Mapping):
            waiting += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            waiting += item
    return count


@dataclass(frozen=True)
class RenderLimits:
    """Limits of one request.

    Attributes:
        cpu_seconds: processor time.
        memory_bytes: memory of the process.
        seconds: wall-clock time, longer than cpu_seconds to allow for busy machines.
        seconds_to_start: wall-clock time until the process is ready.
    """

    cpu_seconds: float = 1.0
    memory_bytes: int = 512 * 2**20
    seconds: float = 3.0
    seconds_to_start: float = 60.0


class TemplateStopped(Exception):
    """A template exceeded a limit, or ended its process."""


class TemplateWorker:
    """Renders templates in a separate process. Several threads can use it safely; requests run one at a time.

    The process ends when this process ends for any reason, because its input is then closed, and its processor time is
    limited while it renders. After a fork, the child starts a new process.
    """

    def __init__(self, limits: RenderLimits | None = None) -> None:
        self.limits = limits or RenderLimits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False

    def start(self) -> None:
        """Start the process if it is not running, without waiting for it. Raise ChatTemplateError if that fails."""
        with self._lock:
            self._running()

    def render(
        self, source: str, values: Mapping[str, Any], changes: Sequence[Mapping[str, Any]] = ({},)
    ) -> list[dict[str, Any]]:
        """Return a template's results for `values`, with each of `changes` overriding some of them.

        Returns:
            For each change, {"text": …} or {"kind", "message", "line"}; if the first change failed, only its result.

        Raises:
            InputError: the values cannot be passed to the process.
            TemplateStopped: the template was stopped.
            ChatTemplateError: the process cannot be started.
        """
        if (count := max(map(_characters, [values, *changes]))) > _MOST_CHARACTERS:
            raise InputError(
                f"the conversation has {count:,} characters",
                f"a prompt can have at most {_MOST_CHARACTERS:,} characters",
                "shorten the messages",
            )
        return self._results(
            {"source": source, "values": values, "changes": changes, "most_characters": _MOST_CHARACTERS}
        )

    def names(self, source: str) -> list[str] | None:
        """Return the names of the variables that a template reads; None if the template is invalid.

        Raises:
            TemplateStopped, ChatTemplateError: as for `render`.
        """
        names: list[str] | None = self._results({"source": source})[0].get("names")
        return names

    def _results(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send a request and return the results in its answer."""
        try:
            line = json.dumps(request).encode() + b"\n"
        except (ValueError, RecursionError) as error:
            raise InputError(
                "messages, tools or variables cannot be passed to a template",
                str(error),
                "use plain JSON values with less nesting",
            ) from error
        with self._lock:
            process = self._running()
            try:
                answer = self._exchange(process, line)
                results: list[dict[str, Any]] = json.loads(answer)
                if any(result.get("kind") == "memory" for result in results):
                    raise TemplateStopped(f"it needed more than {self.limits.memory_bytes >> 20} MiB of memory")
            except BaseException:  # also after an interrupt: the next request would read a late answer as its own
                self._stop()
                raise
        return results

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def forget(self) -> None:
        """Drop the process in a forked child: the parent owns it, and the lock's owner may not exist in the child."""
        self._lock = threading.Lock()
        process, self._process = self._process, None
        if process is not None:
            _close_pipes(process)
            process.returncode = 0  # prevents Popen from waiting for it, and from warning that it still runs

    @property
    def pid(self) -> int | None:
        """The id of the process; None if it is not running."""
        return None if self._process is None else self._process.pid

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._stop()
        if self._process is None:
            with InterruptsDeferred():  # an interrupt before the assignment would leak the process
                self._process, self._is_ready = _started(self.limits), False
        return self._process

    @uninterrupted
    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            _close_pipes(process)
            process.wait()

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes) -> bytes:
        """Return the answer to a request. Request and answer are one line each."""
        stdin = process.stdin
        assert stdin is not None
        if not self._is_ready:
            self._line(process, self.limits.seconds_to_start)
            self._is_ready = True
        deadline = time.monotonic() + self.limits.seconds
        try:
            # poll guarantees that PIPE_BUF bytes do not block. Without poll, a thread writes the whole request.
            size = select.PIPE_BUF if hasattr(select, "poll") else len(request)
            rest = memoryview(request)
            while rest:
                write = partial(stdin.write, rest[:size])
                rest = rest[_in_time(write, stdin, "POLLOUT", deadline, self.limits.seconds) :]
        except BrokenPipeError:
            raise TemplateStopped(self._reason(process)) from None
        return self._line(process, self.limits.seconds)

    def _line(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        """Return the next line that the process writes."""
        stdout = process.stdout
        assert stdout is not None
        line = bytearray()
        deadline = time.monotonic() + seconds
        while not line.endswith(b"\n"):
            part = _in_time(lambda: stdout.read(2**20), stdout, "POLLIN", deadline, seconds)
            if not part:
                raise TemplateStopped(self._reason(process))
            line += part
            if len(line) > _MOST_ANSWER_BYTES:
                raise TemplateStopped(f"it wrote more than {_MOST_ANSWER_BYTES >> 20} MiB")
        return bytes(line)

    def _reason(self, process: subprocess.Popen[bytes]) -> str:
        """Return the reason why the process ended during a request."""
        status = process.wait()
        if hasattr(signal, "SIGPROF") and status == -signal.SIGPROF:
            return f"it took longer than {self.limits.cpu_seconds:g} seconds of processor time"
        ended = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"the process that renders it ended {ended}"


def _started(limits: RenderLimits) -> subprocess.Popen[bytes]:
    """Start a serving process without the user's site packages, environment or files, and shielded from Ctrl-C."""
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(limits.cpu_seconds), str(limits.memory_bytes)]
    try:
        return subprocess.Popen(
            [*command, *_import_paths()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            process_group=0,
        )
    except (OSError, ValueError) as error:
        raise ChatTemplateError(
            "the process that renders chat templates cannot be started",
            f"{sys.executable or 'sys.executable is empty'}: {error}",
            "allow this process to start Python, or format the prompt yourself and pass it as text",
        ) from error


def _import_paths() -> list[str]:
    """Return the folders that contain this package, jinja2 and its dependencies."""
    origins = [spec.origin for name in ("jinja2", "markupsafe") if (spec := importlib.util.find_spec(name)) is not None]
    files = [Path(__file__).parent.parent / "__init__.py", *(Path(origin) for origin in origins if origin)]
    return list(dict.fromkeys(str(file.resolve().parent.parent) for file in files))


def _in_time(work: Callable[[], T], pipe: IO[bytes], event: str, deadline: float, seconds: float) -> T:
    """Return the result of `work`, which does not block after the pipe has reported the event."""
    left = max(0.0, deadline - time.monotonic())
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(pipe, getattr(select, event))
        if poll.poll(left * 1000):
            return work()
    else:  # on Windows, select supports only sockets
        task = Task(work, "genai-template")
        if task.wait(left):
            return task.result()
    raise TemplateStopped(f"it took longer than {seconds:g} seconds")


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


SHARED = TemplateWorker()
"""The worker that renders all templates of this process."""


def _close_at_exit() -> None:
    with contextlib.suppress(KeyboardInterrupt):  # at exit, no caller could handle it
        SHARED.close()


atexit.register(_close_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SHARED.forget)
