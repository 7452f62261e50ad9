"""Other Python threads run while a step computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

import genai as og


def test_another_thread_runs_during_a_long_prefill(form_folder: Callable[..., Path]) -> None:
    with og.Model(form_folder("long-rope"), threads=1) as model:
        generator = og.Generator(model, og.GeneratorParams(model))
        tokens = np.random.default_rng(0).integers(3, 320, 3000)
        stop = threading.Event()
        gaps: list[int] = []

        def count() -> None:
            """How often this thread gets to run between two looks at the flag."""
            ticks = 0
            while not stop.wait(0.001):
                ticks += 1
            gaps.append(ticks)

        watcher = threading.Thread(target=count)
        watcher.start()
        generator.append_tokens(tokens)
        stop.set()
        watcher.join()
        # The prompt takes hundreds of milliseconds in kernel calls of many milliseconds each; a thread that had to
        # wait for them all would tick a few times at most.
        assert gaps[0] > 20
