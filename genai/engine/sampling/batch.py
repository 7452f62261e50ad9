"""A sampler for many rows in one call, each with separate options and logits processors; and log-probabilities.

Log-probabilities describe the model's own distribution, before temperature, penalties and all other options. They are
exact to float64: logit - log(sum(exp(logits))), computed in float64 from the float32 logits.
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
from ...errors import SamplingError, located
from ..sequence import Logits
from .masks import MaskFiller
from .plan import RowSampler
from .row_batches import RowBatches


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability (natural logarithm), and the most likely alternatives.

    Attributes:
        token: token id.
        logprob: log-probability; -inf if the model excludes the token.
        top: (id, logprob) of each of the most likely tokens, most likely first; may include the token itself.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Normalizer(Protocol):
    """The part of a Sampler that computes log-probabilities from logits."""

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
    """Return the log-probability of one token per row.

    For prompt tokens, the logits of row i apply to token i + 1; otherwise the tokens are those chosen from the rows.

    Args:
        logits: float32 [B, V].
        tokens: A token ids, each from 0 to V - 1.
        top: number of alternatives, 0 to V.
        rows: A rows of `logits`, one per token; None = all rows in order.
        sampler: sampler of the device that holds the logits; None = compute on the host with one thread.

    Raises:
        SamplingError: the logits contain NaN or infinity, or are all -inf.
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
            which = f" of row {row}" if len(logits) > 1 else ""
            raise SamplingError(
                f"the log-probabilities{which} cannot be computed",
                "the logits contain NaN or infinity, or are all -inf",
                "check the model and the adapter for damaged weights or an overflow",
            )
        alternatives = tuple(
            (other, value - normalizer) for other, value in zip(best, values, strict=True) if other >= 0
        )
        results.append(TokenLogprob(token, logit - normalizer, alternatives))
    return results


_REASONS = {
    HAS_NAN: ("contain NaN", "check the model and the adapter for damaged weights or an overflow"),
    HAS_INFINITY: ("contain plus infinity", "check the model and the penalties for an overflow"),
    ALL_MASKED: ("are all -inf", "mask fewer tokens"),
}


@dataclass(frozen=True)
class SampledBatch:
    """The tokens of one step.

    Attributes:
        tokens: int64 [B]; -1 for rows that are None.
        logprobs: log-probabilities per row, if requested.
    """

    tokens: NDArray[np.int64]
    logprobs: tuple[TokenLogprob | None, ...]


class BegunBatch:
    """Tokens that a device is still choosing (see `BatchSampler.begin`).

    Attributes:
        choice: the source from which a step can read the tokens on the device, row by row.
    """

    def __init__(self, choice: TokenChoice, rows: Sequence[RowSampler]) -> None:
        self.choice, self._rows = choice, rows

    def outcomes(self) -> list[tuple[int, SamplingError | None]]:
        """Wait for each row's token, or for the error that explains why there is none. Call once; appends nothing.

        The errors do not name the row, because only the caller knows what a row is.
        """
        tokens, probabilities, status = self.choice.wait()
        found: list[tuple[int, SamplingError | None]] = []
        columns = tokens.tolist(), probabilities.tolist(), status.tolist()
        for row, token, probability, code in zip(self._rows, *columns, strict=True):
            error = None if code == FINE else _refusal(code)
            if error is None and row.plan.params.mirostat:
                row.steer(probability)
            found.append((token, error))
        return found


def _refusal(code: int) -> SamplingError:
    why, fix = _REASONS[code]
    return SamplingError("no next token can be chosen", f"the logits {why}", fix)


def _active(rows: Sequence[RowSampler | None]) -> dict[int, RowSampler]:
    return {index: row for index, row in enumerate(rows) if row is not None}


class BatchSampler:
    """Samples batches of rows. Several threads may call a sampler; the calls are serialised.

    A row's token depends only on the row's own logits, options, tokens and random numbers, and not on other rows, their
    order, or the number of threads.

    Args:
        vocab_size: number of logits per row.
        executor: device that holds the logits; None = the host with one thread.
    """

    def __init__(self, vocab_size: int, executor: Executor | None = None) -> None:
        self._vocab_size = vocab_size
        self._sampler = (executor or open_executor(threads=1)).sampler(vocab_size)
        self._masks = MaskFiller(vocab_size)
        self._batches = RowBatches(vocab_size, self._masks)
        self._lock = threading.Lock()
        renew_locks(self, "_lock")

    def prepare(self, rows: Iterable[RowSampler]) -> None:
        """Start filling, in the background, the masks of the rows to be sampled next."""
        matchers = [row.matcher for row in rows if row.matcher is not None]
        if matchers:
            self._masks.begin(matchers)

    def sample(self, logits: Logits, rows: Sequence[RowSampler | None]) -> SampledBatch:
        """Choose the next token of each row. Nothing is appended; a call that raises an error changes nothing.

        Args:
            logits: float32 [B, vocab_size]; not modified.
            rows: B rows, planned for this vocabulary size; None for rows without a token to choose.

        Raises:
            SamplingError: the logits of a row contain NaN or plus infinity, or no token can be chosen.
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
        """Start choosing the next token of each row; the logits are read before any work that is started later.

        Returns:
            None if the caller must use `sample` instead: the device chooses synchronously, there are too many rows, or
            a request needs log-probabilities, which need the logits after the token is known.

        Raises:
            LogitsProcessorError: a logits processor failed. `outcomes` returns any other error.
        """
        if not 0 < len(rows) <= self._sampler.most_begun or any(row.plan.params.logprobs is not None for row in rows):
            return None
        batch = self._batches.make(logits, dict(enumerate(rows)))
        with self._lock:
            return BegunBatch(self._sampler.begin(logits, batch), rows)

    def distributions(self, logits: Logits, rows: Sequence[RowSampler | None]) -> NDArray[np.float64]:
        """Return the distributions that `sample` would draw from, float64 [B, vocab_size]; zeros where a row is None.

        XTC is applied at random, as in `sample`. The arguments and errors are the same as those of `sample`.
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
        """See genai.kernels.device.Sampler; calls from several threads are serialised."""
        with self._lock:
            return self._sampler.log_normalizers(logits, rows, top)

    def _run(
        self, logits: Logits, active: dict[int, RowSampler], distributions: NDArray[np.float64] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the rows' tokens and their probabilities."""
        batch = self._batches.make(logits, active)
        with self._lock:
            tokens, probabilities, status = self._sampler.sample(logits, batch, distributions)
        for index, code in zip(active, status.tolist(), strict=True):
            if code != FINE:
                raise located(_refusal(code), f"row {index}") if len(logits) > 1 else _refusal(code)
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
    """Stack rows [vocab_size] into float32 [rows, vocab_size], without a copy if they are adjacent in memory."""
    first = rows[0]
    if len(rows) == 1:
        return first[None]
    owner = getattr(first, "base", None)
    if isinstance(owner, np.ndarray) and owner.flags.c_contiguous and all(row.base is owner for row in rows):
        begin, *others = [row.__array_interface__["data"][0] for row in rows]
        if others == [begin + index * first.nbytes for index in range(1, len(rows))]:
            return np.ndarray((len(rows), first.size), first.dtype, owner, begin - owner.ctypes.data)
    return np.stack(rows)
