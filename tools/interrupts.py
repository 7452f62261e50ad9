"""Ends processes at random moments by SIGINT, SIGTERM and SIGKILL, and looks at what they leave behind.

A moment is wrong if the process does not end in time, shows a traceback, or leaves a process of its own; or if the next
start does not answer. Moments are drawn from a printed seed, over what a process does one after another: it compiles
kernels, loads a model, reads a prompt, decodes, and closes.

    python -m tools.interrupts --count 300 --seed 1
    python -m tools.interrupts --first 100 --count 50 --seed 1    # these of them
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
# Kernels that are missing from the cache where compiling is to be met, of which every start compiles them anew.
_MISSING = 8
# A process that takes longer than this to end, times `patience`, hangs.
_SECONDS_TO_END = 5.0
_QUESTION, _ANSWER = "What is 12 + 7?", "19"
_STORY = "Tell me a story about Luna and Tom. "
# Python itself shows a traceback while it starts, before any line of ours: a process says when it has come to us.
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
# The first line of ours after that, which says what an interrupt does, is sooner.
_AT_LEAST = 0.01


@dataclass(frozen=True)
class Phase:
    """What a process does, and when to end it.

    Attributes:
        command: its arguments; prompts are filled in.
        compiles: whether kernels are missing.
        after_output: the moment is counted from the first output, not from the start.
        share: of the time that this takes undisturbed, the first and last moment.
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
    """A cache of compiled kernels, and what the phases take on this machine.

    Args:
        root: an empty folder.
        patience: times what a process may take to end, for machines that are busy with other things.
    """

    def __init__(self, root: Path, patience: float = 1.0) -> None:
        self._root, self._patience = root, patience
        self._full = root / "full"
        self._durations: dict[Phase, float] = {}
        answer = self._ask(self._full)
        if _ANSWER not in answer:
            raise RuntimeError(f"an undisturbed start does not answer: {answer}")

    def faults(self, phase: Phase, number: int, rng: random.Random) -> list[str]:
        """End a process in a phase, and say what was wrong."""
        if phase not in self._durations:
            self._durations[phase] = self._duration(phase)
        first, last = phase.share
        delay = self._durations[phase] * rng.uniform(first, last)
        with self._cache(phase, rng.random()) as cache:
            found = self._end(phase, delay, number, cache)
            answer = self._ask(cache)
        if _ANSWER not in answer:
            found.append(f"the next start does not answer: {answer}")
        return [f"{phase.name}, {signal.Signals(number).name} after {delay:.3f} s: {fault}" for fault in found]

    @contextlib.contextmanager
    def _cache(self, phase: Phase, draw: float = 0.5) -> Iterator[Path]:
        """All kernels; or a copy in which some are missing."""
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
        """Seconds from the start, or the first output, to the end."""
        with self._cache(phase) as cache, _started(phase.command, cache, "") as process:
            start = time.monotonic()
            if phase.after_output:
                _wait_for_output(process)
                start = time.monotonic()
            stderr = process.communicate()[1]
            if process.returncode:
                raise RuntimeError(f"{phase.name} fails undisturbed: {stderr.decode()}")
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
                process.send_signal(signal.SIGABRT)  # Python then writes where all threads are
                stderr = process.communicate()[1].decode(errors="replace")
                found.append(f"it does not end:\n{stderr}")
        if any(word in without_pythons_own(stderr) for word in ("Traceback", "Exception ignored")):
            found.append(stderr)
        deadline = time.monotonic() + _SECONDS_TO_END * self._patience
        while (left := _marked(mark)) and time.monotonic() < deadline:
            time.sleep(0.01)
        for orphan in left:
            found.append(f"it leaves {orphan}: {Path(f'/proc/{orphan}/cmdline').read_bytes()[:80]!r}")
            os.kill(orphan, signal.SIGKILL)
        return found

    def _ask(self, cache: Path) -> str:
        with _started((*_COMMAND, "chat", "-p", _QUESTION), cache, "") as process:
            stdout, stderr = process.communicate(timeout=300 * self._patience)
        return (stdout if process.returncode == 0 else stderr).decode(errors="replace")


def without_pythons_own(stderr: str) -> str:
    """What a process says, but for an interrupt that came when Python itself ended: no script can catch that one."""
    return _AT_THE_END.sub("", stderr)


def _started(command: tuple[str, ...], cache: Path, mark: str) -> subprocess.Popen[bytes]:
    """A process at its first line of ours that, with all that it starts, can be known by a mark."""
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
    """Processes that have the mark in their environment, zombies left out."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found


@contextlib.contextmanager
def workshop(*, patience: float = 1.0) -> Iterator[Callable[[Phase, int, random.Random], list[str]]]:
    """Gives Workshop.faults."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background; children would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="genai-interrupts-") as name:
        yield Workshop(Path(name), patience).faults


def main() -> int:
    """The command line."""
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
