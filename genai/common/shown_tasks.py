"""Tasks that are shown to the user, and the rules for when. `progress_line` and `notebook` draw them.

All tasks of a process share one display. It appears when nothing was shown for `SHOWN_AFTER` seconds, so that short
work shows nothing, and it stays until the last task ends.
"""

from __future__ import annotations

import threading
import time
import unicodedata
from collections.abc import Callable

from .forks import STATUS_THREAD, renew_locks
from .progress import Task

SHOWN_AFTER = 0.3
"""Seconds without any output after which the current task appears; 0 = every task appears when it starts."""
SECONDS_BETWEEN = 0.1
"""Seconds between two drawings of the display."""
_BAR, _TIME_WIDTH = 24, len(", 100 s left")
# The share from which the remaining time is estimated, and the seconds from which it is given in minutes.
_KNOWN, _MINUTES = 0.02, 120


class TaskDisplay:
    """The tasks of a process, in the order in which they were started. Subclasses define `draw` and `erase`.

    Args:
        animated: True to redraw the display in a thread while there are tasks.

    Attributes:
        tasks: the tasks that have not ended.
        visible: True if the display is drawn.
    """

    def __init__(self, *, animated: bool = True) -> None:
        self.tasks: list[ShownTask] = []
        self.visible = False
        self.lock = threading.RLock()
        renew_locks(self, "lock")
        self._animated = animated
        self._thread: threading.Thread | None = None
        # The times at which the display was drawn, at which the current silence began, and at which a task ended last.
        self.drawn = self.silent_since = self._ended = float("-inf")

    def draw(self) -> None:
        """Show the current tasks; if there are none, call `erase`. Called with the lock held."""
        raise NotImplementedError

    def erase(self) -> None:
        """Remove the display. Called with the lock held."""
        raise NotImplementedError

    def begin(self, task: ShownTask) -> None:
        """Add a task. It appears at once if the display is visible or was visible just before."""
        with self.lock:
            now = time.monotonic()
            if not self.tasks and now > self._ended + SHOWN_AFTER:
                self.silent_since = now  # until now, the program did something that is no task
            self.tasks = [*(one for one in self.tasks if not one.is_first), task]
            if task.is_first:
                self.draw()
            else:
                self.draw_if_due(now)
            if self._animated and self._thread is None:
                self._thread = threading.Thread(target=self._animate, name=STATUS_THREAD, daemon=True)
                self._thread.start()

    def end(self, task: ShownTask) -> None:
        """Remove a task; the task that was started before it is shown again."""
        with self.lock:
            if task in self.tasks:
                self.tasks.remove(task)
                self._ended = time.monotonic()
                if self.visible:
                    self.draw()

    def update(self, task: ShownTask, *, at_once: bool = False) -> None:
        """Draw again if the task is the current one and, unless `at_once` is set, nothing was drawn recently."""
        with self.lock:
            now = time.monotonic()
            if self.tasks[-1:] == [task] and (at_once or now >= self.drawn + SECONDS_BETWEEN):
                self.draw_if_due(now)

    def draw_if_due(self, now: float) -> None:
        """Draw if the display is visible, or if nothing has been shown for long enough."""
        with self.lock:
            if self.tasks and (self.visible or now >= self.silent_since + SHOWN_AFTER):
                self.draw()

    def forget(self) -> None:
        """Drop the tasks in a forked child: they continue in the parent."""
        self.tasks, self.visible, self._thread = [], False, None

    def _animate(self) -> None:
        while True:
            time.sleep(SECONDS_BETWEEN)
            with self.lock:
                if not self.tasks:
                    self._thread = None
                    return
                now = time.monotonic()
                if now >= self.drawn + SECONDS_BETWEEN:
                    self.draw_if_due(now)


class ShownTask(Task):
    """A task on a display, such as "Packing weights [#####-----]  50%  1.20 of 2.40 GB, 9 s left".

    Args:
        label: description of the work.
        total: the amount that `add` counts towards; 0 = unknown.
        display: the display; None = the task is not shown.
        amount: the function that formats a count; None = counts are shown as numbers.
        until_output: True if the task ends when the program writes anything to stdout or stderr.
        is_first: True if the task is shown at once, and also ends when another task starts.
    """

    def __init__(
        self, label: str, total: float, display: TaskDisplay | None, *, amount: Callable[[float], str] | None = None,
        until_output: bool = False, is_first: bool = False,
    ) -> None:  # fmt: skip
        self.label = "".join(character if character.isprintable() else "?" for character in label)
        self._amount = amount or (lambda count: f"{count:,.0f}")
        self._done, self._total, self._counted = 0.0, total, ""
        self._began = self._counted_since = time.monotonic()
        self.is_first, self.until_output = is_first, until_output or is_first
        self._display = display
        if display is not None:
            display.begin(self)

    @property
    def share(self) -> float | None:
        """The share that is done, 0 to 1; None if the total is unknown."""
        return min(self._done / self._total, 1.0) if self._total > 0 else None

    def add(self, count: float) -> None:
        """Report that `count` more of the total is done; when the total is reached, the task is over."""
        self.show(self._done + count, self._total)
        if self._done >= self._total:
            self.close()

    def show(self, done: float, total: float, counted: str = "") -> None:
        """Report that `done` of `total` is done; `counted` is the amount as text."""
        if not done:
            self._counted_since = time.monotonic()
        at_once = total != self._total or done >= total
        self._done, self._total, self._counted = done, total, counted
        if self._display is not None:
            self._display.update(self, at_once=at_once)

    def count(self, counted: str) -> None:
        """Report an amount of work that has no known total."""
        self._counted = counted
        if self._display is not None:
            self._display.update(self)

    def close(self) -> None:
        """Remove the task from the display."""
        if self._display is not None:
            self._display.end(self)

    def facts(self) -> tuple[str, str]:
        """Return the amount that is done and the time: the time left if the total is known, else the time taken."""
        now, share = time.monotonic(), self.share
        if share is None:
            seconds = now - self._began
            return self._counted, _time(seconds) if seconds >= 1 else ""
        left = (now - self._counted_since) * (1 - share) / share if _KNOWN <= share < 1 else None
        counted = self._counted or f"{self._amount(self._done)} of {self._amount(self._total)}"
        return counted, "" if left is None else f"{_time(left)} left"

    def text(self, columns: int) -> str:
        """Return the task as text of at most `columns` columns, unless the label alone is longer."""
        share, (counted, seconds) = self.share, self.facts()
        if share is None:
            return " ".join(filter(None, (self.label, counted, seconds and f"({seconds})")))
        left = f", {seconds}" if seconds else ""
        text = f"{share:4.0%}  {counted}{left}"
        label = width(self.label)
        if label + 1 + len(text) > columns:
            text = f"{share:4.0%}{left}"  # the remaining time matters most
        # The bar does not become shorter when the time appears.
        bar = min(_BAR, columns - label - max(len(text), len(text) - len(left) + _TIME_WIDTH) - 4)
        filled = round(share * bar)
        shown = f"[{'#' * filled}{'-' * (bar - filled)}] " if bar > 3 else ""
        return f"{self.label} {shown}{text}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < _MINUTES else f"{seconds / 60:.0f} min"


def width(text: str) -> int:
    """Return the number of columns of a text; Chinese and similar characters occupy two."""
    return len(text) + sum(unicodedata.east_asian_width(character) in "WF" for character in text if character > "~")
