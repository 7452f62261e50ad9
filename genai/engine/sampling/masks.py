"""Grammar masks of a batch: the tokens that each row may choose. They are computed during a step or on demand."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from genai.kernels.sampling import mask_words

from .guidance import FilledMask, Matcher

if TYPE_CHECKING:
    from llguidance import LLExecutor

# The maximum number of threads that fill masks. They compete with the running step for cores, and a mask takes only
# about 0.05 ms.
_MOST_THREADS = 8


class MaskFiller:
    """Fills masks. Only one thread at a time may use it.

    Args:
        vocab_size: number of logits per row.
    """

    def __init__(self, vocab_size: int) -> None:
        self._words = mask_words(vocab_size)
        self._process = 0
        self._helper: ThreadPoolExecutor | None = None
        self._threads: LLExecutor | None = None
        self._pending: tuple[Future[None], Sequence[Matcher]] | None = None

    def begin(self, matchers: Iterable[Matcher]) -> None:
        """Start filling missing masks on a separate thread; `filled` waits for the thread."""
        self._wait()
        missing = [matcher for matcher in matchers if matcher.mask is None]
        if not missing:
            return
        self._renew()
        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, "genai-masks")
        with suppress(RuntimeError):  # if no thread can be started, `filled` computes the masks
            self._pending = self._helper.submit(self._fill, missing), missing

    def filled(self, matchers: Sequence[Matcher]) -> NDArray[np.uint32]:
        """Return the masks in order, uint32 [M, words].

        Raises:
            GrammarError: a grammar exceeded its limits.
        """
        self._wait()
        if missing := [matcher for matcher in matchers if matcher.mask is None]:
            self._fill(missing)
        found = [matcher.mask for matcher in matchers if matcher.mask is not None]
        for matcher in matchers:
            if matcher.automaton.is_error():
                raise matcher.failure()
        if not found:
            return np.empty((0, self._words), np.uint32)
        masks = found[0].masks
        if len(masks) == len(found) and all(one.masks is masks and one.row == i for i, one in enumerate(found)):
            return masks
        return np.stack([one.masks[one.row] for one in found])

    def _wait(self) -> None:
        if self._pending is not None:
            (future, _), self._pending = self._pending, None
            if self._process == os.getpid():  # after a fork, the thread does not exist in the child process
                future.result()

    def _renew(self) -> None:
        if self._process != os.getpid():
            self._process, self._helper, self._threads = os.getpid(), None, None

    def _fill(self, matchers: Sequence[Matcher]) -> None:
        masks = np.zeros((len(matchers), self._words), np.uint32)
        if len(matchers) == 1:
            automaton = matchers[0].automaton
            with suppress(ValueError, RuntimeError):  # `filled` reports the failure
                automaton.unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        else:
            self._fill_beside(matchers, masks)
        for row, matcher in enumerate(matchers):
            matcher.restrict(masks[row])
            matcher.mask = FilledMask(masks, row)

    def _fill_beside(self, matchers: Sequence[Matcher], masks: NDArray[np.uint32]) -> None:
        self._renew()
        if self._threads is None:
            from llguidance import LLExecutor

            self._threads = LLExecutor(max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2)))
        requests = [(matcher.automaton, row) for row, matcher in enumerate(matchers)]
        self._threads.unsafe_compute_mask_ptr(requests, masks.ctypes.data, 4 * self._words, len(masks))
