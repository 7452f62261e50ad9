"""From a model's name to its first reply on a terminal: every pause says what is being done, and one command is enough.

The tests check that a status is shown before the work begins, not how long the work takes, so that they also pass on a
busy machine. Real work is measured in CPU time for the same reason.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from genai.kernels.cpu.jit.native import LIBRARY
from tools.local_hub import LocalHub

pytestmark = pytest.mark.skipif(os.name != "posix", reason="no pseudo-terminals")

# Runs `genai` with every task drawn when it starts, and notes what the terminal shows when each kind of work begins.
# Kernels are not compiled again, but come from the cache slowly; without a cache, they are compiled.
RUNNER = '''
import json, sys, time
from importlib import import_module

from genai.common import progress_line, shown_tasks

notes, kernels, *arguments = sys.argv[1:]
shown_tasks.SHOWN_AFTER = 0.0
events = []  # [name, the label that is shown, CPU seconds]


def note(name):
    line = progress_line._line
    label = line.tasks[-1].label if line is not None and line.visible else ""
    events.append([name, label, time.process_time()])


def noted(module, name):
    """Note the beginning of a function's first call."""
    owner = import_module(module)
    *path, name = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    function, key = getattr(owner, name), f"{module}.{name}"

    def call(*arguments, **options):
        if not any(event[0] == key for event in events):
            note(key)
        return function(*arguments, **options)

    setattr(owner, name, call)


class Imports:
    """Note when libraries that load slowly are imported, and change our own modules when the command needs them."""

    def find_spec(self, name, path=None, target=None):
        if name in slow:
            slow.discard(name)
            note(f"import {name}")
        elif name == "genai.llm.llm":
            prepare()


slow = {"typer", "numpy", "onnx", "tokenizers", "prompt_toolkit"}
sys.meta_path.insert(0, Imports())


def followed(name):
    """Note what is shown after each change of the tasks."""
    method = getattr(progress_line.StatusLine, name)

    def changed(self, *arguments):
        method(self, *arguments)
        note("tasks" if self.tasks else "no tasks")

    setattr(progress_line.StatusLine, name, changed)


for name in ("begin", "end", "output_elsewhere"):
    followed(name)


def prepare():
    from pathlib import Path

    from genai.kernels.cpu.jit import native, workers

    native.cache_root = lambda environment: Path(kernels)
    workers.can_fork = lambda: False
    load, make, made = native.Compiled.load, native.Compiled.make, set()

    def load_slowly(self):
        return self in made and load(self)

    def make_slowly(self):
        made.add(self)
        time.sleep(0.01)
        return self._library.folder.load(self._file_name) or make(self)

    native.Compiled.load, native.Compiled.make = load_slowly, make_slowly
    noted("genai.hub.pull", "plan_pull")
    noted("genai.hub.pull", "fetch_file")
    noted("genai.convert.build", "open_checkpoint")
    noted("genai.convert.build", "write_model_folder")
    noted("genai.models.loading", "read_decoder")
    noted("genai.kernels.cpu.jit.native", "_each_made")
    noted("genai.text.tokenizer", "load_tokenizer")
    noted("genai.engine.engine", "Engine.step")


from genai.cli.__main__ import main

try:
    main(arguments)
finally:
    note("end")
    with open(notes, "w") as file:
        json.dump(events, file)
'''


class Run:
    """A command on a pseudo-terminal, to its end.

    Attributes:
        screen: everything that the terminal received.
        events: what the runner noted: name, the label shown, CPU seconds.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        notes = folder / "notes.json"
        kernels = LIBRARY.folder.path
        assert kernels is not None
        pid, terminal = pty.fork()
        if pid == 0:
            environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
            command = [sys.executable, "-c", RUNNER, str(notes), str(kernels.parent.parent), *arguments]
            os.execve(sys.executable, command, environment)
        seen, deadline = b"", time.monotonic() + 600
        try:
            while select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
                seen += os.read(terminal, 65536)
        except OSError:  # the command has ended
            pass
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
        self.screen = seen.decode()
        assert os.waitstatus_to_exitcode(status) == 0, self.screen
        self.events: list[tuple[str, str, float]] = [tuple(event) for event in json.loads(notes.read_text())]

    def shown_at(self, name: str) -> str:
        """Return the label that was visible when a kind of work began."""
        return next(label for event, label, _ in self.events if event == name)

    def labels(self) -> list[str]:
        """Return the labels in the order in which the terminal showed them."""
        lines = re.findall(r"\r[|/\\-] ([^\r\n]+)", self.screen)
        found = [re.split(r" \[[#-]+\]|  | \(\d", line)[0].strip() for line in lines]
        return list(dict.fromkeys(found))

    def unnamed(self) -> Iterator[float]:
        """Yield the CPU seconds of each time in which no task was shown."""
        for (name, _, began), (_, _, ended) in zip(self.events, self.events[1:], strict=False):
            if name == "no tasks":
                yield ended - began


def test_every_pause_says_what_is_done(hub: LocalHub, chatting: dict[str, bytes], tmp_path: Path) -> None:
    """Downloads, conversion, kernels and the reply: one command, in which nothing is typed."""
    hub.add("org/tiny-llama", chatting)
    first = Run(tmp_path, "chat", "org/tiny-llama", "--yes", "-p", "What is 12 + 7?", "--temperature", "0")
    expected: dict[str, Any] = {
        "import typer": "Starting genai chat",
        "genai.hub.pull.plan_pull": "Looking up org/tiny-llama",
        "genai.hub.pull.fetch_file": "Pulling",
        "genai.convert.build.open_checkpoint": "Reading tiny-llama",
        "genai.convert.build.write_model_folder": "Building",
        "genai.kernels.cpu.jit.native._each_made": "Compiling CPU kernels (once per kernel)",
        "genai.text.tokenizer.load_tokenizer": "Loading the tokenizer",
        "genai.engine.engine.step": "Processing the prompt",
    }
    assert {name: first.shown_at(name) for name in expected} == expected
    assert first.shown_at("genai.models.loading.read_decoder").startswith("Loading ")
    assert max(first.unnamed()) < 0.5, "no work takes long without a name"
    order = ["Starting", "Looking up", "Pulling", "Reading", "Building", "Loading", "Generating"]
    places = [next(i for i, label in enumerate(first.labels()) if label.startswith(word)) for word in order]
    assert places == sorted(places)
    assert "licence" in first.screen and "stored in" in first.screen and first.screen.endswith("19\r\n")
    for line in first.screen.split("\n"):
        last = line.rstrip("\r").rpartition("\r")[2]
        assert not re.match(r"[|/\\-] ", last), f"a status line remained: {line!r}"
    totals = [int(total) for total in re.findall(r"Compiling CPU kernels [^\r]*? \d+ of (\d+)", first.screen)]
    build, model = (total for total, _ in groupby(totals))
    assert build == 3 and model > 10, "one bar counts all kernels of the build, and one those of the model"
