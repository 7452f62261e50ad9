"""Trace `LLM.chat` on the caller's thread, and one decode step: `python -m tools.trace_path [--calls]`.

The bundled model first generates a reply to fill the caches of kernels and templates. During a second reply, every call
of our Python functions is recorded: on the caller's thread, and on the engine's thread for one step in the middle.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
QUESTION = [{"role": "user", "content": "Count from 3 to 12."}]
# The traced step of the reply: a step in the middle, which computes one token.
STEP = 6


@dataclass
class CallPath:
    """The calls to our functions, in order.

    Attributes:
        calls: depth, file and function of each call.
    """

    calls: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def functions(self) -> Counter[tuple[str, str]]:
        """The number of calls to each function, by file and name."""
        return Counter((file, name) for _, file, name in self.calls)

    @property
    def files(self) -> Counter[str]:
        """The number of calls to the functions of each file."""
        return Counter(file for _, file, _ in self.calls)

    def summary(self, title: str) -> str:
        """Return a summary line."""
        depth = max((depth for depth, _, _ in self.calls), default=0)
        return (
            f"{title}: {len(self.files)} files, {len(self.functions)} functions, {len(self.calls)} calls, depth {depth}"
        )


class Tracer:
    """A profiler hook that records the calls to functions in the repository's packages."""

    def __init__(self, is_begin: Callable[[str, str], bool] | None = None) -> None:
        self.path = CallPath()
        self._is_begin, self._left = is_begin, 10**9
        self._depth, self._begin_depth = 0, -1

    def begin_after(self, number: int) -> None:
        """Record the calls inside the `number`-th call from now on of the function that `is_begin` accepts."""
        self._left = number

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._depth += 1
            file = _file_of(frame)
            if file is None:
                return
            name = frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name
            if self._is_begin is not None and self._begin_depth < 0 and self._is_begin(file, name):
                self._left -= 1
                if self._left == 0:
                    self._begin_depth = self._depth
            if self._is_begin is None or self._begin_depth >= 0:
                self.path.calls.append((self._depth - max(self._begin_depth, 0), file, name))
        elif event == "return":
            if self._depth == self._begin_depth:
                self._begin_depth = -1
            self._depth -= 1


def _file_of(frame: FrameType) -> str | None:
    """Return a frame's file relative to the repository's root, or None if the file is not ours."""
    name = frame.f_code.co_filename
    if not name.startswith(str(ROOT)) or "/site-packages/" in name or "/tools/" in name:
        return None
    return str(Path(name).resolve().relative_to(ROOT))


def trace() -> tuple[CallPath, CallPath]:
    """Return the call path of `LLM.chat` on the caller's thread, and the call path of one decode step."""
    import genai

    step = Tracer(lambda file, name: file.endswith("engine/engine.py") and name in ("Engine.step", "step"))
    threading.setprofile(step)
    with genai.LLM() as llm:
        llm.chat(QUESTION, max_tokens=24)  # starts the engine's thread
        threading.setprofile(None)  # type: ignore[arg-type]
        step.begin_after(STEP)
        caller = Tracer()
        sys.setprofile(caller)
        llm.chat(QUESTION, max_tokens=24)
        sys.setprofile(None)
    return caller.path, step.path


def main() -> None:
    """Print figures and files of both paths; with --calls, print every call instead."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", action="store_true", help="print every call, indented by its depth")
    shows_calls = parser.parse_args().calls
    for title, path in zip(("LLM.chat, caller's side", "one decode step"), trace(), strict=True):
        print(path.summary(title))
        if shows_calls:
            print(*(f"  {'  ' * depth}{file} {name}" for depth, file, name in path.calls), sep="\n")
        else:
            functions = Counter(file for file, _ in path.functions)
            print(
                *(f"  {file}: {functions[file]} functions, {calls} calls" for file, calls in path.files.most_common()),
                sep="\n",
            )


if __name__ == "__main__":
    main()
