"""Static batching: sequences advance together, one token per step, until every sequence has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from genai.common.memory_limits import available_memory

from ..common.single import Single
from ..errors import CacheCapacityError, StateError, located
from .decoder import Decoder, compute
from .sampling.batch import BatchSampler, stacked
from .sampling.plan import RowSampler, SamplingPlan
from .sampling.state import SamplerState
from .sequence import DecoderSequence, Logits

# The memory that Python uses for a sequence and its options.
_SEQUENCE_BYTES = 4096


class Verified(NamedTuple):
    """The result of `StaticBatch.verify`.

    Attributes:
        tokens: the chosen tokens, and tokens that the grammar determined.
        num_evaluated: number of proposed tokens that were compared with a chosen token.
        num_accepted: number of proposed tokens that were equal to it.
        num_forced: number of tokens that the grammar determined.
        num_steps: number of steps that were computed.
        seconds: duration of these steps.
        logits: float32 [rows, V], the logits after the first `first_length` tokens of the sequence, and after each
            token that follows them.
        first_length: see `logits`.
    """

    tokens: list[int]
    num_evaluated: int
    num_accepted: int
    num_forced: int
    num_steps: int
    seconds: float
    logits: Logits
    first_length: int


class StaticBatch(Single, AbstractContextManager["StaticBatch"]):
    """A fixed set of sequences with a common sampling plan; `Engine` handles requests that arrive and leave.

    Args:
        decoder: the model.
        sampler: the sampler for the model's vocabulary.
        plan: the sampling plan of every sequence.
        count: number of sequences, which start empty.
        seed: seed of the random numbers; each sequence has a separate stream.
        token_budget: maximum number of tokens in a step of a long prompt; None = the decoder's default.
        observe: called with the logits [count, V] whenever they were computed.

    Attributes:
        sequences: the decoder's sequences.
        rows: the samplers of the sequences.
        ended: per sequence, True if a stop token was chosen after the last appended tokens.
        ranges: the token range [start, end) that was computed last, by index of the sequence.
        is_open: False once the batch was closed.

    Raises:
        CacheCapacityError: there is not enough memory for `count` sequences.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampler: BatchSampler,
        plan: SamplingPlan,
        count: int,
        *,
        seed: int = 0,
        token_budget: int | None = None,
        observe: Callable[[Logits], None] = lambda logits: None,
    ) -> None:
        check_batch_size(decoder, count)
        self.decoder, self._sampler, self._plan, self._token_budget = decoder, sampler, plan, token_budget
        self._observe = observe
        self.sequences: list[DecoderSequence] = [decoder.open() for _ in range(count)]
        self.rows = [RowSampler(plan, one.tokens, seed=seed, row=row) for row, one in enumerate(self.sequences)]
        self.ended = [False] * count
        self.ranges: dict[int, tuple[int, int]] = {}
        self.is_open = True
        self._logits: Logits = np.zeros((count, decoder.vocab_size), np.float32)
        self._no_logits = self._logits
        # True if the logits were set by set_logits, so they cannot be computed again.
        self._is_given = False

    # --- tokens --------------------------------------------------------------------------------------------------

    def append_tokens(self, rows: Sequence[Sequence[int]]) -> None:
        """Append tokens to each sequence and compute them; ended sequences resume. If this fails, nothing changes.

        Raises:
            CacheCapacityError: the cache is full.
        """
        ended, ranges, starts = self.ended, self.ranges, [len(one.tokens) for one in self.sequences]
        for row, sequence in zip(rows, self.sequences, strict=True):
            sequence.append(row)
        self.ended = [False] * len(rows)
        try:
            self.logits(range(len(rows)))
        except BaseException:
            self.rewind(starts)
            self.ended, self.ranges = ended, ranges
            raise
        self.ranges = {i: (start, start + len(rows[i])) for i, start in enumerate(starts)}

    def rewind(self, lengths: Sequence[int]) -> None:
        """Cut each sequence to a length. The remaining tokens stay cached, and ended sequences resume."""
        for length, sequence, row in zip(lengths, self.sequences, self.rows, strict=True):
            sequence.rewind(length)
            row.rewind(length)
        self.ended, self.ranges = [False] * len(self.sequences), {}

    def step(self, *, is_last: bool = False) -> dict[int, int]:
        """Choose the next token of every sequence that has not ended, and append it unless it is a stop token.

        Args:
            is_last: True if no further step follows, so that the device does not start the next step.

        Returns:
            The chosen token of each sequence that had not ended, by index.

        Raises:
            StateError: a sequence has no tokens yet.
            CacheCapacityError: the cache is full.
            SamplingError: a sequence has no possible next token.
        """
        active = [i for i, ended in enumerate(self.ended) if not ended]
        picked = self._pick(active, is_last=is_last)
        going_on = {i: token for i, token in picked.items() if token not in self._plan.stop_ids}
        for index in active:
            self.ended[index] = index not in going_on
        for index, token in going_on.items():
            self.sequences[index].append([token])
            self.rows[index].follow(token)
        if len(going_on) == len(self.ended):
            self._logits = self._no_logits  # these logits are not needed again, so the next step may overwrite them
        else:
            self.settle()
        return picked

    def append_forced(self, most: int) -> list[int]:
        """Append up to `most` tokens that the grammar determines after a chosen token; the batch has one sequence."""
        (sequence,), (row,) = self.sequences, self.rows
        has_begun = row.matcher is not None and row.matcher.num_followed
        forced = row.matcher.forced()[:most] if row.matcher is not None and has_begun else []
        for token in forced:
            sequence.append([token])
            row.follow(token)
        return forced

    def verify(self, proposed: Sequence[int], *, appends_forced: bool = False) -> Verified:
        """Choose tokens as `step` would, and go on for as long as each chosen token equals the proposed one.

        The batch has one sequence, which has not ended. All chosen tokens are appended; stop tokens, too, unless there
        is a grammar, so the caller has to cut the sequence before the first of them. Usually, one step computes the
        pending tokens together with the proposed ones.

        Args:
            proposed: tokens that may come next. If they do not fit into the cache, they are ignored.
            appends_forced: True if tokens that the grammar determines are appended without being chosen.

        Raises:
            The same errors as `step`. In that case, the tokens are unchanged.
        """
        start = len(self.sequences[0].tokens)
        try:
            found = self._verified([*proposed], appends_forced)
        except BaseException:
            ranges = self.ranges
            self.rewind([start])
            self.ranges = ranges
            raise
        self._logits = self._no_logits
        self.settle()
        return found

    def _verified(self, proposed: list[int], appends_forced: bool) -> Verified:
        (sequence,), (row,) = self.sequences, self.rows
        chosen: list[int] = []
        num_evaluated = num_accepted = num_forced = num_steps = 0
        logits, first, seconds = self._no_logits[:0], len(sequence.tokens), 0.0
        if sequence.num_computed >= first:
            logits = self.logits([0])
        while True:
            began = 0.0
            if (at := len(sequence.tokens) - first) >= len(logits):
                began = time.perf_counter()
                try:
                    logits, first, at = self._computed_with(proposed), len(sequence.tokens), 0
                except CacheCapacityError:
                    if chosen:
                        break
                    raise
            token = int(self._sampler.sample(logits[at : at + 1], [row]).tokens[0])
            if began:  # asynchronous devices have finished by now
                num_steps, seconds = num_steps + 1, seconds + time.perf_counter() - began
            chosen.append(token)
            was_proposed, is_accepted = bool(proposed), proposed[:1] == [token]
            num_evaluated, num_accepted = num_evaluated + was_proposed, num_accepted + is_accepted
            del proposed[:1]
            if token in self._plan.stop_ids and row.matcher is not None:
                break
            sequence.append([token])
            row.follow(token)
            if not is_accepted:
                break
            if appends_forced and row.matcher is not None and (forced := row.matcher.forced()):
                fitting = forced[: len(proposed)]
                if fitting != proposed[: len(forced)]:
                    break  # they are computed together with the next proposals
                chosen += self.append_forced(len(fitting))
                num_forced += len(fitting)
                del proposed[: len(fitting)]
                if fitting != forced:
                    break
        return Verified(chosen, num_evaluated, num_accepted, num_forced, num_steps, seconds, logits, first)

    def _computed_with(self, proposed: list[int]) -> Logits:
        """Compute the pending tokens, with as many of the proposed tokens as a step takes, if they fit into the cache.

        Returns:
            Logits after the last token and after each computed proposed token.
        """
        (sequence,) = self.sequences
        sequence.propose(proposed)
        try:
            (logits,) = compute(self.decoder, [sequence], token_budget=self._token_budget)
        except CacheCapacityError:
            sequence.take_back()
            if not proposed:
                raise
            proposed.clear()
            (logits,) = compute(self.decoder, [sequence], token_budget=self._token_budget)
        self._is_given = False
        self._observe(logits)
        return logits

    def _pick(self, active: Sequence[int], *, is_last: bool) -> dict[int, int]:
        """Choose the next token of each active sequence.

        If the device supports it, it computes the chosen tokens while the host reads them (`Decoder.step_ahead`). The
        tokens are then already computed when they are appended, and the next call finds their logits. Any other
        operation in between undoes the step. The logits that the tokens were chosen from are overwritten; they are
        computed again if a caller needs them, for example for a sequence that has ended.
        """
        logits, count = self.logits(active), len(self.ended)
        goes_on = len(active) == count and not is_last and not self._is_given
        has_room = count <= (self._token_budget or self.decoder.token_budget)
        can_run = goes_on and has_room and self.decoder.runs_ahead
        begun = self._sampler.begin(logits, self.rows) if can_run else None
        if begun is None:
            rows = [None if ended else row for row, ended in zip(self.rows, self.ended, strict=True)]
            picked = self._sampler.sample(logits, rows).tokens.tolist()
            return {index: picked[index] for index in active}
        try:
            self._logits = logits = self._no_logits
            self.decoder.step_ahead(self.sequences, begun.choice, range(count))
            outcomes = begun.outcomes()
            for index, (_, error) in enumerate(outcomes):
                if error is not None:
                    raise located(error, f"row {index}") if count > 1 else error
        except BaseException:
            for sequence in self.sequences:
                sequence.truncate(len(sequence.tokens) - 1)
            raise
        return {index: token for index, (token, _) in enumerate(outcomes)}

    def settle(self) -> None:
        """Undo steps that were started ahead."""
        for sequence in self.sequences:
            sequence.take_back()
            if self._logits is self._no_logits and 0 < len(sequence.tokens) <= sequence.num_computed:
                sequence.truncate(len(sequence.tokens) - 1)

    # --- logits --------------------------------------------------------------------------------------------------

    def logits(self, indices: Sequence[int]) -> Logits:
        """Return logits [count, V], after computing the pending tokens of the sequences `indices`.

        Raises:
            StateError: at least one of these sequences has no tokens.
            CacheCapacityError: the cache is full.
        """
        if any(not self.sequences[i].tokens for i in indices):
            why = "logits are computed from tokens, and there is no prior state"
            raise StateError("there are no tokens yet", why, "call append_tokens first")
        if any(sequence.ahead is not None for sequence in self.sequences):
            self._take_ahead()
        behind = [i for i in indices if self.sequences[i].num_computed < len(self.sequences[i].tokens)]
        if behind:
            ranges = {i: (self.sequences[i].num_computed, len(self.sequences[i].tokens)) for i in behind}
            computed = compute(self.decoder, [self.sequences[i] for i in behind], token_budget=self._token_budget)
            if len(behind) == len(self.sequences):
                self._logits = stacked([logits[-1] for logits in computed])
            else:
                self._logits = np.array(self._logits)  # a device's logits are read-only
                self._logits[behind] = np.stack([logits[-1] for logits in computed])
            self._is_given = False
            self._observe(self._logits)
            # If a sequence has ended, only its last logits are computed again.
            self.ranges = {i: own for i, own in ranges.items() if not self.ended[i]} or self.ranges
        return self._logits

    def set_logits(self, logits: NDArray[Any]) -> None:
        """Choose the next tokens from other logits, [count, V]."""
        self.logits(range(len(self.sequences)))
        self._logits = np.array(logits, np.float32)
        self._is_given = True

    def _take_ahead(self) -> None:
        """Take the logits of a step that was started ahead, which always covers all sequences."""
        found = [sequence.take_ahead() for sequence in self.sequences]
        rows = [logits[-1] for logits in found if logits is not None]
        if len(rows) < len(found):  # an interrupt occurred in between
            self.settle()
            return
        self._logits = stacked(rows)
        self._observe(self._logits)
        ends = [len(sequence.tokens) for sequence in self.sequences]
        self.ranges = {i: (end - 1, end) for i, end in enumerate(ends)}

    # --- other sequences -----------------------------------------------------------------------------------------

    def fork(self) -> StaticBatch:
        """Return a batch with the same sequences and random numbers that shares the cached blocks."""
        self.settle()
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.sequences = [sequence.fork() for sequence in self.sequences]
        other.ended, other.ranges, other._logits = list(self.ended), dict(self.ranges), self._logits.copy()
        other.rows = [
            RowSampler(row.plan, sequence.tokens, seed=row.seed, row=row.row, prompt_length=row.prompt_length)
            for row, sequence in zip(self.rows, other.sequences, strict=True)
        ]
        for ours, theirs in zip(self.rows, other.rows, strict=True):
            SamplerState.of(ours).put_into(theirs)
        return other

    def replace(self, sequence: DecoderSequence, row: RowSampler) -> None:
        """Replace the only sequence, which is closed, with another sequence."""
        (before,) = self.sequences
        before.close()
        self.sequences, self.rows, self.ranges = [sequence], [row], {}

    def move_to(self, decoder: Decoder) -> None:
        """Continue with another decoder that has the same weights; it recomputes all computed tokens."""
        if decoder is self.decoder:
            return
        fresh = [decoder.open() for _ in self.sequences]
        for own, sequence in zip(fresh, self.sequences, strict=True):
            own.append(sequence.tokens[: sequence.num_computed])
        compute(decoder, [own for own in fresh if own.tokens])
        for own, sequence in zip(fresh, self.sequences, strict=True):
            own.append(sequence.tokens[sequence.num_computed :])
        for row, sequence in zip(self.rows, fresh, strict=True):
            row.tokens = sequence.tokens
        for sequence in self.sequences:
            sequence.close()
        self.sequences, self.decoder = fresh, decoder

    def close(self) -> None:
        """Release the cached state."""
        for sequence in self.sequences:
            sequence.close()
        self.sequences, self.ranges, self.is_open = [], {}, False

    def __exit__(self, *_: object) -> None:
        self.close()


def check_batch_size(decoder: Decoder, count: int) -> None:
    """Check, before any sequence is opened, that `count` sequences fit into memory.

    Raises:
        CacheCapacityError: there is not enough memory.
    """
    bytes_each = _SEQUENCE_BYTES + 4 * decoder.vocab_size
    most = available_memory() // bytes_each
    if decoder.pool is not None:
        most = min(most, decoder.pool.num_blocks // decoder.num_groups)
    if count > most:
        raise CacheCapacityError(
            f"batch_size = {count}",
            f"at most {most} sequences fit, because each needs {bytes_each} bytes for its logits and options, and one "
            "block of the KV cache",
            "use a smaller batch_size, or load the model with a larger cache (cache_bytes=…)",
        )
