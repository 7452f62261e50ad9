"""A step whose requests are all cancelled ends early, and leaves its sequences unchanged."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from genai.engine.decoder import compute
from genai.engine.scheduler import plan_step
from genai.errors import StepInterrupted

PROMPT = np.random.default_rng(0).integers(3, 1500, 900).tolist()


def sequence(decoder: Any) -> Any:
    one = decoder.open()
    one.append(PROMPT)
    return one


def test_it_raises_and_the_sequence_goes_on_as_if_nothing_had_happened(bundled: Any) -> None:
    decoder = bundled.decoder
    fresh, one = sequence(decoder), sequence(decoder)
    (expected,) = compute(decoder, [fresh])
    interrupted = threading.Event()

    def work() -> None:
        while True:
            before = one.num_computed
            try:
                decoder.step([one], plan_step([one.pending()], 1000))
            except StepInterrupted:
                assert one.num_computed == before
                interrupted.set()
                return
            one.truncate()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(work)
        while not interrupted.wait(0.001) and not running.done():
            decoder.interrupt([one])
        running.result(timeout=30)
    (logits,) = compute(decoder, [one])
    np.testing.assert_array_equal(logits, expected)
    fresh.close()
    one.close()


@pytest.mark.parametrize("others", [0, 1])
def test_steps_of_other_sequences_go_on(bundled: Any, others: int) -> None:
    """A step that a cancelled and an active sequence share also continues."""
    decoder = bundled.decoder
    cancelled, kept = sequence(decoder), sequence(decoder)
    stop = threading.Event()

    def interrupt() -> None:
        while not stop.is_set():
            decoder.interrupt([cancelled])

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        for _ in range(5):
            together = [kept, cancelled][: 1 + others]
            (logits, *_) = compute(decoder, together, token_budget=2000)
            assert logits.shape == (1, decoder.vocab_size)
            for one in together:
                one.truncate()
    finally:
        stop.set()
        thread.join()
        cancelled.close()
        kept.close()
