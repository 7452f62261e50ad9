"""Other Python threads run while a step computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

import genai as og


def test_another_thread_runs_during_a_long_prefill(form_folder: Callable[..., Path]) -> None:
    with og.Model(form_folder("long-rope"), threads=1) as model:
        # The prompt takes hundreds of milliseconds in kernel calls of many milliseconds each; a thread that had to
        # wait for them all would tick a few times at most. One that the system lets wait does so once or twice.
        assert any(ticks_while_reading(model) > 20 for _ in range(5))


def ticks_while_reading(model: og.Model) -> int:
    """How often another thread gets to run between two looks at a flag while a prompt is computed."""
    generator = og.Generator(model, og.GeneratorParams(model))
    tokens = np.random.default_rng(0).integers(3, 320, 3000)
    stop = threading.Event()
    ticks = [0]

    def count() -> None:
        while not stop.wait(0.001):
            ticks[0] += 1

    watcher = threading.Thread(target=count)
    watcher.start()
    generator.append_tokens(tokens)
    stop.set()
    watcher.join()
    generator.close()
    return ticks[0]
