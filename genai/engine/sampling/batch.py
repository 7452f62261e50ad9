"""Chooses the next token of many rows at once, each with options of its own, Python functions over logits included; and
log-probabilities in the model's own distribution, before temperature, penalties and all else.

Log-probabilities are exact to float64: logit - log(sum(exp(logits))), computed in float64 from the float32 logits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from genai.common.forks import renew_locks
from genai.kernels.device import DeviceArray, Executor, TokenChoice
from genai.kernels.sampling import ALL_MASKED, FINE, HAS_INFINITY, HAS_NAN

from ...devices import open_executor
from ...errors import SamplingError
from ..sequence import Logits
from .masks import MaskFiller
from .plan import RowSampler
from .row_batches import RowBatches


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability (natural logarithm), and the most likely alternatives.

    Attributes:
        token: its id.
        logprob: -inf if the model excludes it.
        top: (id, logprob) of the most likely tokens, the first first; the token itself may be among them.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Normalizer(Protocol):
    """The part of a Sampler that makes log-probabilities of logits."""

    def log_normalizers(
        self, logits: DeviceArray, rows: NDArray[np.int64], top: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """See genai.kernels.device.Sampler."""


def token_logprobs(
    logits: NDArray[np.float32],
    tokens: Sequence[int] | NDArray[np.integer],
    top: int = 0,
    *,
    rows: Sequence[int] | None = None,
    sampler: Normalizer | None = None,
) -> list[TokenLogprob]:
    """Log-probabilities of one token per row: of a prompt (logits of row i, token i + 1) or of chosen tokens.

    Args:
        logits: float32 [B, V].
        tokens: A ids, 0 to V - 1.
        top: how many alternatives, 0 to V.
        rows: A rows of `logits`, one for each token; None = all in order.
        sampler: of the device that holds the logits; None: they are the host's, and one thread is enough.

    Raises:
        SamplingError: logits with NaN or infinity, or without any finite one.
    """
    where = np.arange(len(logits)) if rows is None else np.asarray(rows, np.int64)
    ids = np.asarray(tokens, np.int64)
    if sampler is None or isinstance(logits, np.ndarray):
        logits = np.ascontiguousarray(logits)
    sampler = open_executor(threads=1).sampler(logits.shape[1]) if sampler is None else sampler
    normalizers, likely = sampler.log_normalizers(logits, where, top)
    own, others = logits[where, ids].tolist(), logits[where[:, None], np.maximum(likely, 0)].tolist()
    results = []
    columns = where.tolist(), ids.tolist(), normalizers.tolist(), own, likely.tolist(), others
    for row, token, normalizer, logit, best, values in zip(*columns, strict=True):
        if np.isnan(normalizer):
            raise SamplingError(
                f"the logits of row {row} have no log-probabilities",
                "they hold NaN or infinity, or nothing but -inf",
                "check the model: its output overflowed or is damaged",
            )
        alternatives = tuple(
            (other, value - normalizer) for other, value in zip(best, values, strict=True) if other >= 0
        )
        results.append(TokenLogprob(token, logit - normalizer, alternatives))
    return results


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


class BegunBatch:
    """Tokens that a device is choosing (`BatchSampler.begin`).

    Attributes:
        choice: what a step may take them from, row by row.
    """

    def __init__(self, choice: TokenChoice, rows: Sequence[RowSampler]) -> None:
        self.choice, self._rows = choice, rows

    def outcomes(self) -> list[tuple[int, SamplingError | None]]:
        """Wait: each row's token, or why it has none. Called once; nothing is appended."""
        tokens, probabilities, status = self.choice.wait()
        found: list[tuple[int, SamplingError | None]] = []
        columns = tokens.tolist(), probabilities.tolist(), status.tolist()
        for row, token, probability, code in zip(self._rows, *columns, strict=True):
            error = None if code == FINE else _refusal(0, code)
            if error is None and row.plan.params.mirostat:
                row.steer(probability)
            found.append((token, error))
        return found


def _refusal(row: int, code: int) -> SamplingError:
    why, fix = _REASONS[code]
    return SamplingError(f"row {row} has no next token", f"its logits {why}", fix)


def _active(rows: Sequence[RowSampler | None]) -> dict[int, RowSampler]:
    return {index: row for index, row in enumerate(rows) if row is not None}


class BatchSampler:
    """Samples batches of rows. Safe to call from several threads: calls take turns.

    A row's token depends on its own logits, options, tokens and random numbers only: not on the other rows, their
    order, or the number of threads.

    Args:
        vocab_size: logits per row.
        executor: the device that holds the logits; None: they are the host's, and one thread is enough.
    """

    def __init__(self, vocab_size: int, executor: Executor | None = None) -> None:
        self._vocab_size = vocab_size
        self._sampler = (executor or open_executor(threads=1)).sampler(vocab_size)
        self._masks = MaskFiller(vocab_size)
        self._batches = RowBatches(vocab_size, self._masks)
        self._lock = threading.Lock()
        renew_locks(self, "_lock")

    def prepare(self, rows: Iterable[RowSampler]) -> None:
        """Fill the masks of rows that will be sampled next, while something else is computed."""
        matchers = [row.matcher for row in rows if row.matcher is not None]
        if matchers:
            self._masks.begin(matchers)

    def sample(self, logits: Logits, rows: Sequence[RowSampler | None]) -> SampledBatch:
        """The next token of each row. Nothing is appended; a call that raises changes nothing.

        Args:
            logits: float32 [B, vocab_size]; not modified.
            rows: B rows, planned for so many logits; None where no token is wanted.

        Raises:
            SamplingError: logits with NaN or plus infinity, or nothing left to choose; names the row.
            LogitsProcessorError: a logits processor failed.
        """
        active = _active(rows)
        chosen, probabilities = self._run(logits, active, None)
        tokens = np.full(len(rows), -1, np.int64)
        tokens[list(active)] = chosen
        logprobs = self._logprobs(logits, active, chosen)
        for row, probability in zip(active.values(), probabilities, strict=True):
            if row.plan.params.mirostat:
                row.steer(probability)
        return SampledBatch(tokens, tuple(logprobs.get(index) for index in range(len(rows))))

    def begin(self, logits: Logits, rows: Sequence[RowSampler]) -> BegunBatch | None:
        """Begin to choose the next token of each row; the logits are read before anything that is started later.

        Returns:
            None where `sample` is to be called: the device chooses while it is asked, there are too many rows, or a
            request asks for log-probabilities, which need the logits once the token is known.

        Raises:
            LogitsProcessorError: a logits processor failed. What waiting raises besides comes from `outcomes`.
        """
        if not 0 < len(rows) <= self._sampler.most_begun or any(row.plan.params.logprobs is not None for row in rows):
            return None
        batch = self._batches.make(logits, dict(enumerate(rows)))
        with self._lock:
            return BegunBatch(self._sampler.begin(logits, batch), rows)

    def distributions(self, logits: Logits, rows: Sequence[RowSampler | None]) -> NDArray[np.float64]:
        """The distributions that `sample` would draw from, float64 [B, vocab_size]; zeros where there is no row.

        XTC takes part or not as it would. Arguments and errors as for `sample`.
        """
        active = _active(rows)
        found = np.empty((len(active), self._vocab_size))
        self._run(logits, active, found)
        distributions = np.zeros((len(rows), self._vocab_size))
        distributions[list(active)] = found
        return distributions

    def log_normalizers(
        self, logits: Logits, rows: NDArray[np.int64], top: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """See genai.kernels.device.Sampler; calls of several threads take turns."""
        with self._lock:
            return self._sampler.log_normalizers(logits, rows, top)

    def _run(
        self, logits: Logits, active: dict[int, RowSampler], distributions: NDArray[np.float64] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The rows' tokens, and the probabilities of these."""
        batch = self._batches.make(logits, active)
        with self._lock:
            tokens, probabilities, status = self._sampler.sample(logits, batch, distributions)
        for index, code in zip(active, status.tolist(), strict=True):
            if code != FINE:
                raise _refusal(index, code)
        return tokens, probabilities

    def _logprobs(
        self, logits: Logits, active: dict[int, RowSampler], chosen: NDArray[np.int64]
    ) -> dict[int, TokenLogprob]:
        wanted = {index: row.plan.params.logprobs for index, row in active.items()}
        tops = {index: top for index, top in wanted.items() if top is not None}
        if not tops:
            return {}
        tokens = [token for index, token in zip(active, chosen.tolist(), strict=True) if index in tops]
        with self._lock:
            found = token_logprobs(logits, tokens, max(tops.values()), rows=list(tops), sampler=self._sampler)
        return {
            index: TokenLogprob(one.token, one.logprob, one.top[:top])
            for (index, top), one in zip(tops.items(), found, strict=True)
        }


def stacked(rows: Sequence[Logits]) -> Logits:
    """Rows [vocab_size] as float32 [rows, vocab_size]: where a step gave them one after the other, its own memory."""
    first = rows[0]
    if len(rows) == 1:
        return first[None]
    owner = getattr(first, "base", None)
    if isinstance(owner, np.ndarray) and owner.flags.c_contiguous and all(row.base is owner for row in rows):
        begin, *others = [row.__array_interface__["data"][0] for row in rows]
        if others == [begin + index * first.nbytes for index in range(1, len(rows))]:
            return np.ndarray((len(rows), first.size), first.dtype, owner, begin - owner.ctypes.data)
    return np.stack(rows)
