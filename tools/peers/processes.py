"""Functions that run other programs, and log their output or measure them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_LAST_LINES = 3
_WATCH_SECONDS = 0.05


class PeerError(Exception):
    """A program failed. The message names the program and the failure. The comparison continues with other peers."""


@dataclass(frozen=True)
class Outcome:
    """The result of a process that ended successfully.

    Attributes:
        output: standard output of the process.
        started: time.monotonic() before the start; all processes of a Linux machine share this clock.
        seconds: duration of the process.
        peak_bytes: peak resident memory.
    """

    output: str
    started: float
    seconds: float
    peak_bytes: int


def run_logged(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run a program and append its output to a log.

    Raises:
        PeerError: the program failed or cannot be started.
    """
    with log.open("a", encoding="utf-8") as file:
        print(f"$ {' '.join(command)}", file=file, flush=True)
        try:
            code = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, env=_environment(environment), check=False
            ).returncode
        except OSError as error:
            raise PeerError(f"{command[0]} cannot be started: {error}") from error
    if code:
        raise PeerError(f"{Path(command[0]).name} {_ended(code)}; see {log}")


def run_measured(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> Outcome:
    """Run a program and measure its duration and peak memory.

    Raises:
        PeerError: the program failed, was killed, or took longer than `timeout` seconds.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        started = time.monotonic()
        try:
            process = subprocess.Popen(command, stdout=output, stderr=errors, env=_environment(environment))
        except OSError as error:
            raise PeerError(f"{command[0]} cannot be started: {error}") from error
        late = threading.Timer(timeout, process.kill)
        memory = _MemoryWatch(process.pid)
        try:
            late.start()
            memory.start()
            process.wait()
            seconds = time.monotonic() - started
        finally:
            late.cancel()
            process.kill()
            process.wait()
            memory.stop()
        errors.seek(0)
        output.seek(0)
        if process.returncode:
            why = f"took longer than {timeout:.0f} s" if seconds >= timeout else _ended(process.returncode)
            said = " | ".join(errors.read().strip().splitlines()[-_LAST_LINES:])
            raise PeerError(f"{Path(command[0]).name} {why}: {said}")
        return Outcome(output.read(), started, seconds, memory.peak_bytes)


class _MemoryWatch:
    """A reader of a process's VmHWM until the process ends. Its rusage includes the peak inherited from its parent."""

    def __init__(self, process: int) -> None:
        self.peak_bytes = 0
        self._status = Path(f"/proc/{process}/status")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(_WATCH_SECONDS):
            try:
                lines = self._status.read_text(encoding="ascii", errors="replace").splitlines()
            except OSError:
                return
            kilobytes = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
            self.peak_bytes = max(self.peak_bytes, kilobytes * 1024)


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """Inside the `with` block, run `count` processes that compute endlessly."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def _environment(changes: Mapping[str, str] | None) -> dict[str, str]:
    """Return our environment variables, with telemetry and network access to models disabled."""
    quiet = {"HF_HUB_OFFLINE": "1", "ORT_DISABLE_TELEMETRY": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return dict(os.environ) | quiet | dict(changes or {})


def _ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit status {code}"
