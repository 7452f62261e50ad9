"""Interrupt processes at random moments with SIGINT, SIGTERM and SIGKILL, and check how they end.

It is a fault if the process does not end in time, shows a traceback or leaves a child process running, or if the next
start does not work. The moments are drawn from a printed seed. They cover the phases of a process, which compiles
kernels, loads a model, processes a prompt, decodes, and closes.

    python -m tools.interrupts --count 300 --seed 1
    python -m tools.interrupts --first 100 --count 50 --seed 1    # only these moments
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
# The number of kernels deleted from the cache for the phases that compile, so that every start compiles them again.
_MISSING = 8
# A process counts as hanging if it takes longer than this number of seconds, times `patience`, to end.
_SECONDS_TO_END = 5.0
_QUESTION, _ANSWER = "What is 12 + 7?", "19"
_STORY = "Tell me a story about Luna and Tom. "
# An interrupt while Python itself starts always shows a traceback. Therefore the process writes a byte when our code
# starts, and is interrupted only after this byte.
_COMMAND_LINE = """
import os, sys
from genai.__main__ import main
os.write(2, b".")
main(sys.argv[1:])
"""
_LIBRARY = """
import os, sys
import genai
os.write(2, b".")
try:
    with genai.LLM(threads=2, quiet=True) as llm:
        if sys.argv[1] == "stream":
            for piece in llm.stream(sys.argv[2], max_tokens=150, ignore_eos=True):
                print(piece, end="", flush=True)
        elif sys.argv[1] == "generate":
            for one in llm.generate([sys.argv[2]] * 4, max_tokens=60, ignore_eos=True):
                print(one.text, flush=True)
        else:
            params = genai.GeneratorParams(llm.model)
            params.set_search_options(min_length=150, max_length=150)
            generator = genai.Generator(llm.model, params)
            generator.append_tokens(llm.encode(sys.argv[2]))
            while not generator.is_done():
                generator.generate_next_token()
                print(".", end="", flush=True)
        print("\\n", flush=True)
except KeyboardInterrupt:
    sys.exit(130)
"""
_COMMAND = [sys.executable, "-c", _COMMAND_LINE]
_SCRIPT = [sys.executable, "-c", _LIBRARY]
_AT_THE_END = re.compile(
    r"Exception ignored in: <module 'threading' from '[^']*'>\nTraceback \(most recent call last\):\n"
    r"(?:  File \"[^\"]*/threading\.py\", line \d+, in \w+\n(?:    [^\n]*\n)*)+KeyboardInterrupt: ?\n?"
)
# Our first statements, which install the interrupt handling, take less than this number of seconds.
_AT_LEAST = 0.01


@dataclass(frozen=True)
class Phase:
    """An activity of a process, and the range of moments at which it is interrupted.

    Attributes:
        name: name of the phase.
        command: arguments of the process, including prompts.
        compiles: True to delete kernels from the cache, so that the process compiles them.
        after_output: True if the moment is counted from the first output, False if from the start.
        share: earliest and latest moment, as shares of the undisturbed duration.
    """

    name: str
    command: tuple[str, ...]
    compiles: bool = False
    after_output: bool = False
    share: tuple[float, float] = (0.0, 1.0)


PHASES = (
    Phase("compile", (*_COMMAND, "chat", "-t", "2", "-p", _QUESTION), compiles=True),
    Phase("compile in a script", (*_SCRIPT, "generate", "Once"), compiles=True),
    Phase("load", (*_COMMAND, "chat", "-t", "2", "-p", _QUESTION)),
    Phase("load in a script", (*_SCRIPT, "tokens", "Once")),
    Phase("prompt", (*_COMMAND, "generate", "-n", "2", "--ignore-eos", "-p", _STORY * 80), share=(0.5, 1.0)),
    Phase("decode", (*_COMMAND, "chat", "-n", "200", "--ignore-eos", "-p", _STORY), after_output=True),
    Phase("decode a stream", (*_SCRIPT, "stream", "Once"), after_output=True),
    Phase("decode a batch", (*_SCRIPT, "generate", "Once"), share=(0.5, 1.0)),
    Phase("decode by tokens", (*_SCRIPT, "tokens", "Once"), after_output=True),
    Phase("close", (*_COMMAND, "generate", "-n", "2", "--ignore-eos", "-p", "Once"), after_output=True),
)


class Workshop:
    """A cache of compiled kernels, and the durations of the phases on this machine.

    Args:
        root: an empty folder.
        patience: factor for the time limit on ending a process; use a larger one on a busy machine.
    """

    def __init__(self, root: Path, patience: float = 1.0) -> None:
        self._root, self._patience = root, patience
        self._full = root / "full"
        self._durations: dict[Phase, float] = {}
        answer = self._ask(self._full)
        if _ANSWER not in answer:
            raise RuntimeError(f"a start without an interrupt gives no correct answer: {answer}")

    def faults(self, phase: Phase, number: int, rng: random.Random) -> list[str]:
        """Interrupt a process in a phase; return the faults found."""
        if phase not in self._durations:
            self._durations[phase] = self._duration(phase)
        first, last = phase.share
        delay = self._durations[phase] * rng.uniform(first, last)
        with self._cache(phase, rng.random()) as cache:
            found = self._end(phase, delay, number, cache)
            answer = self._ask(cache)
        if _ANSWER not in answer:
            found.append(f"the next start gives no correct answer: {answer}")
        return [f"{phase.name}, {signal.Signals(number).name} after {delay:.3f} s: {fault}" for fault in found]

    @contextlib.contextmanager
    def _cache(self, phase: Phase, draw: float = 0.5) -> Iterator[Path]:
        """Yield the cache with all kernels, or a copy of it that lacks some kernels."""
        if not phase.compiles:
            yield self._full
            return
        cache = self._root / "part"
        shutil.copytree(self._full, cache)
        for kernel in random.Random(draw).sample(sorted(cache.rglob("*.o")), _MISSING):
            kernel.unlink()
        try:
            yield cache
        finally:
            shutil.rmtree(cache)

    def _duration(self, phase: Phase) -> float:
        """Return the seconds from the start of a process, or from its first output, to its end."""
        with self._cache(phase) as cache, _started(phase.command, cache, "") as process:
            start = time.monotonic()
            if phase.after_output:
                _wait_for_output(process)
                start = time.monotonic()
            stderr = process.communicate()[1]
            if process.returncode:
                raise RuntimeError(f"{phase.name} fails without an interrupt: {stderr.decode()}")
            return time.monotonic() - start

    def _end(self, phase: Phase, delay: float, number: int, cache: Path) -> list[str]:
        mark = f"genai-interrupts-{uuid.uuid4().hex}"
        with _started(phase.command, cache, mark) as process:
            if phase.after_output:
                _wait_for_output(process)
            time.sleep(max(delay, _AT_LEAST))
            process.send_signal(number)
            found = []
            try:
                stderr = process.communicate(timeout=_SECONDS_TO_END * self._patience)[1].decode(errors="replace")
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # makes Python print the stacks of all threads
                stderr = process.communicate()[1].decode(errors="replace")
                found.append(f"it does not end:\n{stderr}")
        if any(word in without_pythons_own(stderr) for word in ("Traceback", "Exception ignored")):
            found.append(stderr)
        deadline = time.monotonic() + _SECONDS_TO_END * self._patience
        while (left := _marked(mark)) and time.monotonic() < deadline:
            time.sleep(0.01)
        for orphan in left:
            found.append(f"it leaves process {orphan} running: {Path(f'/proc/{orphan}/cmdline').read_bytes()[:80]!r}")
            os.kill(orphan, signal.SIGKILL)
        return found

    def _ask(self, cache: Path) -> str:
        with _started((*_COMMAND, "chat", "-p", _QUESTION), cache, "") as process:
            stdout, stderr = process.communicate(timeout=300 * self._patience)
        return (stdout if process.returncode == 0 else stderr).decode(errors="replace")


def without_pythons_own(stderr: str) -> str:
    """Return the output without the traceback that Python shows if interrupted during exit; no script can catch it."""
    return _AT_THE_END.sub("", stderr)


def _started(command: tuple[str, ...], cache: Path, mark: str) -> subprocess.Popen[bytes]:
    """Start a process and wait until our code runs in it; `mark` identifies the process and its children."""
    process = subprocess.Popen(
        command,
        env={
            **os.environ,
            "GENAI_CACHE_DIR": str(cache),
            "GENAI_INTERRUPTS_MARK": mark,
            "PYTHONFAULTHANDLER": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stderr is not None
    process.stderr.read(1)
    return process


def _wait_for_output(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    select.select([process.stdout], [], [])


def _marked(mark: str) -> list[int]:
    """Return the ids of processes with the mark in their environment, except zombies."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found


@contextlib.contextmanager
def workshop(*, patience: float = 1.0) -> Iterator[Callable[[Phase, int, random.Random], list[str]]]:
    """Yield Workshop.faults."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background jobs; children inherit this
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="genai-interrupts-") as name:
        yield Workshop(Path(name), patience).faults


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--patience", type=float, default=1.0)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    faults: list[str] = []
    with workshop(patience=options.patience) as run:
        for index in range(options.first, options.first + options.count):
            rng = random.Random(f"{options.seed} {index}")
            found = run(PHASES[index % len(PHASES)], SIGNALS[index // len(PHASES) % len(SIGNALS)], rng)
            faults += found
            for fault in found:
                print(f"moment {index}: {fault}", flush=True)
    print(f"{options.count} moments, {len(faults)} faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
