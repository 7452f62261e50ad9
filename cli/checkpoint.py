"""Checkpoints on the command line: the question before a build, and its progress, on stderr."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .terminal import say

if TYPE_CHECKING:
    from genai.builder.build import BuildPlan

_BAR = 24
_SECONDS_BETWEEN = 0.1


def model_folder(path: Path, *, build: bool = True) -> Path:
    """A model folder as it is; a Hugging Face checkpoint built into the cache, asking first on a terminal."""
    from genai.builder.resolve import resolve_model_folder

    with interruptible():
        return resolve_model_folder(path, build=build, ask=ask, watch=watch, waiting=waiting)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM ends the block by an exception, as Ctrl-C does: the unfinished folder is removed, and that is said."""
    on_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number)) if on_main else None
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        # The bar's line has no end yet.
        say(("\n" if sys.stderr.isatty() else "") + "genai: interrupted, nothing was built")
        raise
    finally:
        if on_main:
            signal.signal(signal.SIGTERM, before)


def waiting(folder: Path) -> None:
    """Another process builds into the same cache."""
    say(f"genai: waiting for another build in {folder} (Ctrl-C ends this)")


def ask(question: str) -> bool:
    """Ask where somebody can answer; elsewhere say what happens and go on."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        say(f"genai: {question.replace('Build an', 'Building an').rstrip('?')}")
        return True
    print(f"{question} [Y/n] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("", "y", "yes")


def watch(plan: BuildPlan) -> Callable[[int], None]:
    """Say what is odd about the checkpoint; then a bar for terminals, nothing elsewhere."""
    for remark in plan.remarks:
        say(f"genai: {remark}")
    return ProgressBar(plan.read_bytes) if sys.stderr.isatty() else lambda count: None


class ProgressBar:
    """One line that is written over: share, bytes read, time left."""

    def __init__(self, total: int) -> None:
        self.total, self.done = max(total, 1), 0
        self.start = self.shown = time.monotonic()

    def __call__(self, count: int) -> None:
        self.done += count
        now, finished = time.monotonic(), self.done >= self.total
        if finished or now - self.shown >= _SECONDS_BETWEEN:
            self.shown = now
            print(f"\r{self.line(now)}", end="\n" if finished else "", file=sys.stderr, flush=True)

    def line(self, now: float) -> str:
        """Such as "[#####-----]  50 %  1.20 of 2.40 GB  9 s left"."""
        share = min(self.done / self.total, 1.0)
        filled = round(share * _BAR)
        left = (now - self.start) * (1 - share) / share if share else 0.0
        return (
            f"[{'#' * filled}{'-' * (_BAR - filled)}] {share:4.0%}  "
            f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB  {left:.0f} s left "
        )
