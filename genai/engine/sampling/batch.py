"""Chooses the next token of many rows at once, each with options of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cpu.sampling import sample_batch
from genai.kernels.cpu.sampling_steps import codes
from genai.kernels.cpu.sampling_steps.batch import SamplingBatch, Workspace
from genai.kernels.cpu.sampling_steps.row import ALL_MASKED, FINE, HAS_INFINITY, HAS_NAN
from genai.kernels.cpu.team import Team

from ...errors import InputError, SamplingError
from ..decoder import Logits
from .logprobs import TokenLogprob, token_logprobs
from .processors import run_processors
from .row import RowSampler

_Item = TypeVar("_Item", bound=np.generic)

# More slots than threads, so that a core that something else slows down gets fewer of them.
_SLOTS_PER_THREAD = 2
_REASONS = {
    HAS_NAN: ("hold NaN", "check the model: its output is damaged, or overflowed inside"),
    HAS_INFINITY: ("hold plus infinity", "check the model and the penalties: the logits overflowed"),
    ALL_MASKED: ("leave no token to choose", "forbid fewer tokens: all of them have the logit -inf"),
}


@dataclass(frozen=True)
class SampledBatch:
    """The tokens of one step.

    Attributes:
        tokens: int64 [B]; -1 where there was no row.
        logprobs: per row, where its request asks for them.
    """

    tokens: NDArray[np.int64]
    logprobs: tuple[TokenLogprob | None, ...]


class BatchSampler:
    """Samples batches of rows. Safe to call from several threads: calls take turns.

    A row's token depends on its own logits, options, tokens and random numbers only: not on the other rows, their
    order, or the number of threads.

    Args:
        vocab_size: logits per row.
        team: threads that share the work; None = the caller's alone.
    """

    def __init__(self, vocab_size: int, team: Team | None = None) -> None:
        self._vocab_size = vocab_size
        self._team = team
        slots = 1 if team is None or team.threads == 1 else _SLOTS_PER_THREAD * team.threads
        self._workspace = Workspace.allocate(slots, vocab_size)
        self._lock = threading.Lock()

    def sample(self, logits: Logits, rows: Sequence[RowSampler | None]) -> SampledBatch:
        """The next token of each row. Nothing is appended; a call that raises changes nothing.

        Args:
            logits: float32 [B, vocab_size]; not modified.
            rows: B rows; None where no token is wanted.

        Raises:
            InputError: logits and rows that do not fit each other.
            SamplingError: logits with NaN or plus infinity, or nothing left to choose; names the row.
            LogitsProcessorError: a logits processor failed.
        """
        active, chosen, probabilities, _ = self._run(logits, rows, want_distributions=False)
        tokens = np.full(len(rows), -1, np.int64)
        tokens[list(active)] = chosen
        logprobs = self._logprobs(logits, active, chosen)
        for row, probability in zip(active.values(), probabilities, strict=True):
            if row.plan.params.mirostat:
                row.steer(probability)
        return SampledBatch(tokens, tuple(logprobs.get(index) for index in range(len(rows))))

    def distributions(self, logits: Logits, rows: Sequence[RowSampler | None]) -> NDArray[np.float64]:
        """The distributions that `sample` would draw from, float64 [B, vocab_size]; zeros where there is no row.

        XTC takes part or not as it would. Arguments and errors as for `sample`.
        """
        active, _, _, found = self._run(logits, rows, want_distributions=True)
        distributions = np.zeros((len(rows), self._vocab_size))
        distributions[list(active)] = found
        return distributions

    def _run(
        self, logits: Logits, rows: Sequence[RowSampler | None], want_distributions: bool
    ) -> tuple[dict[int, RowSampler], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64] | None]:
        """Active rows by index; their tokens, the probabilities of these, and the distributions."""
        self._check(logits, rows)
        active = {index: row for index, row in enumerate(rows) if row is not None}
        batch = self._batch(logits, active)
        distributions = np.empty((len(active), self._vocab_size)) if want_distributions else None
        with self._lock:
            tokens, probabilities, status = sample_batch(
                logits, batch, self._workspace, distributions=distributions, team=self._team
            )
        for index, code in zip(active, status.tolist(), strict=True):
            if code != FINE:
                why, fix = _REASONS[code]
                raise SamplingError(f"row {index} has no next token", f"its logits {why}", fix)
        return active, tokens, probabilities, distributions

    def _check(self, logits: Logits, rows: Sequence[RowSampler | None]) -> None:
        if logits.shape != (len(rows), self._vocab_size) or logits.dtype != np.float32 or not logits.flags.c_contiguous:
            raise InputError(
                f"logits are {logits.dtype} {list(logits.shape)}",
                f"contiguous float32 {[len(rows), self._vocab_size]} is expected: one row of logits per row sampler",
                "pass logits and rows of the same batch",
            )
        for index, row in enumerate(rows):
            if row is not None and row.plan.vocab_size != self._vocab_size:
                raise InputError(
                    f"row {index} was planned for {row.plan.vocab_size} logits",
                    f"this sampler takes {self._vocab_size}",
                    "plan it with the vocab_size of this model",
                )

    def _batch(self, logits: Logits, active: dict[int, RowSampler]) -> SamplingBatch:
        rows = list(active.values())
        spans = np.zeros((len(rows), codes.NUM_SPANS), np.int64)
        settings = np.empty((len(rows), codes.NUM_SETTINGS))
        replaced: list[NDArray[np.float32]] = []
        edits, windows = [], []
        num_edits = num_tokens = 0
        for place, (index, row) in enumerate(active.items()):
            settings[place] = row.plan.settings
            source = index
            if row.plan.params.logits_processors:
                replaced.append(run_processors(row.plan.params.logits_processors, row.tokens, logits[index]))
                source = -len(replaced)
            if row.plan.params.mirostat:
                settings[place, codes.MOST_SURPRISE] = row.surprise_limit
            edit, (window, first_output) = row.edits(), row.window()
            edits.append(edit)
            windows.append(window)
            spans[place] = (
                source, num_edits, num_edits + len(edit[0]), num_tokens, num_tokens + len(window), first_output,
                row.since_breaker,
            )  # fmt: skip
            num_edits += len(edit[0])
            num_tokens += len(window)
        return SamplingBatch(
            steps=np.array([row.plan.steps for row in rows], np.int64).reshape(-1, codes.MAX_STEPS),
            settings=settings,
            counters=np.array([(row.seed, row.row, len(row.tokens)) for row in rows], np.uint64).reshape(-1, 3),
            spans=spans,
            replaced=np.array(replaced, np.float32).reshape(-1, self._vocab_size),
            edit_ids=_joined([ids for ids, _ in edits], np.int32),
            edit_values=_joined([values for _, values in edits], np.float32),
            tokens=_joined(windows, np.int32),
        )

    def _logprobs(
        self, logits: Logits, active: dict[int, RowSampler], chosen: NDArray[np.int64]
    ) -> dict[int, TokenLogprob]:
        wanted = [(place, index, row.plan.params.logprobs) for place, (index, row) in enumerate(active.items())]
        asking = [(place, index, top) for place, index, top in wanted if top is not None]
        if not asking:
            return {}
        indices = [index for _, index, _ in asking]
        tokens = chosen[[place for place, _, _ in asking]]
        most = max(top for _, _, top in asking)
        with self._lock:
            found = token_logprobs(logits, tokens, most, rows=indices, workspace=self._workspace, team=self._team)
        return {
            index: TokenLogprob(one.token, one.logprob, one.top[:top])
            for (_, index, top), one in zip(asking, found, strict=True)
        }


def _joined(parts: Sequence[NDArray[_Item]], dtype: type[_Item]) -> NDArray[_Item]:
    return np.concatenate(parts) if any(len(part) for part in parts) else np.empty(0, dtype)
