"""Steps that several threads share: texts of all callers are computed side by side.

There is no thread of its own. Of the callers that wait, one computes the next step for all of them, so that a single
caller has no hand-over between threads. Calls take turns, so that a call with one text does not wait for a call with
thousands.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from genai.common.forks import renew_locks

from ..models.encoder import STEP_SEQUENCES, STEP_TOKENS, Encoder, Floats, TokenSequence

Finish = Callable[[Floats, int], Floats]
"""Function of the rows of a text [rows, width] and the text's index in its call, which returns the text's result."""


@dataclass(eq=False)
class _Call:
    sequences: Sequence[TokenSequence]
    finish: Finish
    results: list[Floats | None]
    next: int = 0  # first sequence that no step has taken yet
    left: int = 0  # sequences without a result
    error: Exception | None = None
    returned: deque[int] = field(default_factory=deque)  # sequences of a step that was interrupted

    def take(self) -> int | None:
        """Return the index of a sequence to compute, or None if all are taken."""
        if self.error is not None:
            return None
        if self.returned:
            return self.returned.popleft()
        if self.next < len(self.sequences):
            self.next += 1
            return self.next - 1
        return None

    @property
    def is_done(self) -> bool:
        return self.error is not None or self.left == 0


class SharedSteps:
    """The steps of an encoder, shared by the threads that call `run`."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._condition = threading.Condition()
        renew_locks(self, "_condition")
        self._calls: deque[_Call] = deque()
        self._is_busy = False

    def run(self, sequences: Sequence[TokenSequence], finish: Finish) -> list[Floats]:
        """Compute sequences, and return the result of `finish` for each.

        Raises:
            Exception: an error of the encoder or of `finish` for one of these sequences.
        """
        call = _Call(sequences, finish, [None] * len(sequences), left=len(sequences))
        with self._condition:
            self._calls.append(call)
        try:
            while self._wait_or_lead(call):
                self._lead()
        except BaseException:
            with self._condition:
                if call in self._calls:
                    self._calls.remove(call)
            raise
        if call.error is not None:
            raise call.error
        return [result for result in call.results if result is not None]

    def _wait_or_lead(self, call: _Call) -> bool:
        """Wait until a call is done (False) or its thread must compute the next step (True)."""
        with self._condition:
            while self._is_busy and not call.is_done:
                self._condition.wait()
            if call.is_done:
                if call in self._calls:
                    self._calls.remove(call)
                return False
            self._is_busy = True
            return True

    def _lead(self) -> None:
        step: list[tuple[_Call, int]] = []
        try:
            with self._condition:
                step = self._take()
            self._compute(step)
        finally:
            with self._condition:
                self._is_busy = False
                for call, index in step:
                    if call.results[index] is None and call.error is None:  # the step was interrupted
                        call.returned.append(index)
                self._condition.notify_all()

    def _take(self) -> list[tuple[_Call, int]]:
        """Take the sequences of the next step, one from each call in turn."""
        step: list[tuple[_Call, int]] = []
        tokens, waiting = 0, deque(self._calls)
        while waiting and len(step) < STEP_SEQUENCES:
            call = waiting.popleft()
            index = call.take()
            if index is None:
                continue
            size = len(call.sequences[index])
            if step and tokens + size > STEP_TOKENS:
                call.returned.appendleft(index)
                break
            step.append((call, index))
            tokens += size
            waiting.append(call)
        self._calls.rotate(-1)  # another call is first in the next step
        return step

    def _compute(self, step: list[tuple[_Call, int]]) -> None:
        if not step:
            return
        try:
            found = self._encoder.run([call.sequences[index] for call, index in step])
        except Exception as error:
            if len(step) == 1:
                self._fail(step[0][0], error)
                return
            for one in step:  # find the sequence that caused the error
                self._compute([one])
            return
        for (call, index), rows in zip(step, found, strict=True):
            try:
                result = call.finish(rows, index)
            except Exception as error:
                self._fail(call, error)
                continue
            with self._condition:
                if call.results[index] is None:
                    call.results[index] = result
                    call.left -= 1

    def _fail(self, call: _Call, error: Exception) -> None:
        with self._condition:
            call.error = call.error or error
