"""Beam searches over several prompts in one batch: copy-on-write forks of sequences, and candidates from logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import CacheCapacityError, SamplingError
from .beams import BeamPolicy, Continuation
from .decoder import Decoder, compute
from .paged_sequence import PagedSequence
from .sampling.batch import Normalizer, TokenLogprob, token_logprobs
from .sampling.plan import RowSampler, SamplingPlan
from .sampling.row_batches import processed
from .sequence import DecoderSequence, Logits


@dataclass
class Beam:
    """A running beam: its sequence, sampler (with masks and penalties), score and log-probabilities."""

    sequence: DecoderSequence
    row: RowSampler
    score: float
    logprobs: list[TokenLogprob]


@dataclass(frozen=True)
class BeamOutput:
    """A finished output.

    Attributes:
        tokens: the generated tokens, without a stop token.
        logprobs: log-probabilities of the tokens, if requested.
        stopped_by: the stop token that ended the output; None = the length limit ended it.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    stopped_by: int | None


class BeamSearch:
    """The beam search for one prompt.

    Args:
        decoder: the decoder of the beams' sequences.
        sampler: computes log-probabilities on the decoder's device.
        sequence: the sequence that holds the prompt; the search closes it.
        plan: the request's sampling plan.
        policy: the search policy for this prompt.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampler: Normalizer,
        sequence: DecoderSequence,
        plan: SamplingPlan,
        policy: BeamPolicy[BeamOutput],
    ) -> None:
        self.decoder, self._sampler, self.plan, self.policy = decoder, sampler, plan, policy
        self.beams = [self._beam(sequence, 0.0, [])]

    def _beam(self, sequence: DecoderSequence, score: float, logprobs: list[TokenLogprob]) -> Beam:
        row = RowSampler(self.plan, sequence.tokens, seed=0, prompt_length=self.policy.prompt_length)
        return Beam(sequence, row, score, logprobs)

    def advance(self, logits: Logits) -> list[Continuation]:
        """Perform one step with the logits that follow each running beam, [beams, V].

        Returns:
            The beams to run next; empty when the search has ended.

        Raises:
            SamplingError: no token can be chosen.
            LogitsProcessorError: a logits processor of the request failed.
        """
        scores, best = self._scores(logits)
        candidates = self._candidates(scores, best)
        if not candidates and self.policy.finished:
            return self._over()
        if not candidates:
            raise SamplingError("no beam has a next token", "all logits are -inf", "mask fewer tokens")
        chosen = list(self.policy.advance(candidates, lambda one: self._output(one, logits)))
        if self.policy.is_done or not chosen:
            return self._over()
        self._fork(chosen, logits)
        return chosen

    def _over(self) -> list[Continuation]:
        """End the search; the finished outputs are its result."""
        self.policy.is_done = True
        self.close()
        return []

    def _scores(self, logits: Logits) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return log-probabilities and ids of each beam's best next tokens, [beams, K], after masks and penalties."""
        every, top = np.arange(len(logits)), min(self.policy.num_candidates, logits.shape[1])
        scores = logits = np.asarray(logits) if self._changes_scores else logits
        if not self._changes_scores:
            normalizers, best = self._sampler.log_normalizers(scores, every, top)
        elif self.policy.processes_logits:
            scores = self._processed(logits)
            normalizers, best = self._sampler.log_normalizers(scores, every, top)
            is_closed = np.isneginf(scores).all(1) & ~np.isneginf(logits).all(1)  # beams in which every token is masked
            normalizers = np.where(is_closed, 0.0, normalizers)
        else:
            normalizers, _ = self._sampler.log_normalizers(logits, every, 0)
            scores = self._processed((logits - normalizers[:, None]).astype(np.float32))
            _, best = self._sampler.log_normalizers(scores, every, top)
            normalizers = np.where(np.isnan(normalizers), normalizers, 0.0)
        if np.isnan(normalizers).any():
            raise SamplingError(
                "the log-probabilities of a beam cannot be computed",
                "the logits of the beam contain NaN or infinity, or are all -inf",
                "check the model, and mask fewer tokens",
            )
        kept = scores[every[:, None], np.maximum(best, 0)].astype(np.float64) - normalizers[:, None]
        return np.where(best < 0, -np.inf, kept), best

    @property
    def _changes_scores(self) -> bool:
        params = self.plan.params
        return bool(
            params.logits_processors
            or params.repetition_penalty != 1
            or params.no_repeat_ngram_size
            or any(len(beam.row.edits()[0]) for beam in self.beams)
        )

    def _processed(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        params, result = self.plan.params, scores.copy()
        for index, beam in enumerate(self.beams):
            row, tokens = result[index], beam.row.tokens
            if params.logits_processors:
                row[:] = processed(row, beam.row)
            ids, values = beam.row.edits()
            np.add.at(row, ids, values)
            if params.repetition_penalty != 1:
                seen = np.unique(np.asarray(tokens, np.int64))
                row[seen] *= np.where(row[seen] < 0, params.repetition_penalty, 1 / params.repetition_penalty)
            if params.no_repeat_ngram_size:
                row[_repeating(tokens, params.no_repeat_ngram_size)] = -np.inf
        return result

    def _candidates(self, scores: NDArray[np.float64], best: NDArray[np.int64]) -> list[Continuation]:
        """Return the best continuations of all beams. Ties are broken by beam, then by token id."""
        total = scores + np.array([beam.score for beam in self.beams])[:, None]
        beams = np.broadcast_to(np.arange(len(total))[:, None], total.shape)
        order = np.lexsort((best.ravel(), beams.ravel(), -total.ravel()))[: self.policy.num_candidates]
        found = [Continuation(float(total.flat[i]), int(beams.flat[i]), int(best.flat[i])) for i in order.tolist()]
        return [one for one in found if one.score > -np.inf]

    def _output(self, one: Continuation, logits: Logits) -> BeamOutput:
        beam, stops = self.beams[one.beam], one.token in self.policy.stop_ids
        tokens = tuple(beam.row.tokens[self.policy.prompt_length :])
        if stops:
            return BeamOutput(tokens, tuple(beam.logprobs), one.token)
        return BeamOutput((*tokens, one.token), (*beam.logprobs, *self._logprobs([one], logits)), None)

    def _logprobs(self, chosen: Sequence[Continuation], logits: Logits) -> list[TokenLogprob]:
        """Return the tokens' log-probabilities under the unmodified model; an empty list if they were not requested."""
        top = self.plan.params.logprobs
        if top is None:
            return []
        tokens, rows = [one.token for one in chosen], [one.beam for one in chosen]
        return token_logprobs(logits, tokens, top, rows=rows, sampler=self._sampler)

    def _fork(self, chosen: Sequence[Continuation], logits: Logits) -> None:
        """Continue with the chosen beams. The first continuation of a beam reuses its sequence; the others fork it."""
        before, sequences, used = self.beams, [], set()
        forks: list[DecoderSequence] = []
        try:
            for one in chosen:
                parent = before[one.beam].sequence
                if one.beam in used:
                    parent = parent.fork()
                    forks.append(parent)
                sequences.append(parent)
                used.add(one.beam)
            logprobs: Sequence[Sequence[TokenLogprob]] = [[one] for one in self._logprobs(chosen, logits)]
        except BaseException:
            for fork in forks:
                fork.close()
            raise
        for index in set(range(len(before))) - used:
            before[index].sequence.close()
        self.beams = []
        for one, sequence, added in zip(chosen, sequences, logprobs or [()] * len(chosen), strict=True):
            sequence.append([one.token])
            self.beams.append(self._beam(sequence, one.score, [*before[one.beam].logprobs, *added]))

    def conclude(self) -> None:
        """End the search, and consider the running beams as outputs."""
        length = self.policy.prompt_length
        self.policy.conclude(
            [
                (beam.score, BeamOutput(tuple(beam.row.tokens[length:]), tuple(beam.logprobs), None))
                for beam in self.beams
            ]
        )
        self.policy.is_done = True
        self.close()

    def close(self) -> None:
        """Release the cached state."""
        for beam in self.beams:
            beam.sequence.close()
        self.beams = []


def advance_all(
    decoder: Decoder, searches: Sequence[BeamSearch], token_budget: int | None = None,
    observe: Callable[[list[Logits]], None] = lambda rows: None,
) -> list[list[Continuation]]:  # fmt: skip
    """Compute one step of all unfinished searches together. Return, for each search, the beams to run next.

    Args:
        observe: called with the logits [V] of each beam.
    """
    live = [search for search in searches if not search.policy.is_done]
    sequences = [beam.sequence for search in live for beam in search.beams]
    try:
        rows: list[Logits] = compute(decoder, sequences, token_budget=token_budget)
    except CacheCapacityError as error:
        raise _no_room(decoder, sequences, error) from error
    last: list[Logits] = [row[-1] for row in rows]
    observe(last)
    logits = iter(last)
    chosen = {id(search): search.advance(np.stack([next(logits) for _ in search.beams])) for search in live}
    return [chosen.get(id(search), []) for search in searches]


def _no_room(decoder: Decoder, sequences: Sequence[DecoderSequence], error: CacheCapacityError) -> CacheCapacityError:
    """Return the error for beams that do not fit into the cache; it reports how the cache is used."""
    pool = getattr(decoder, "pool", None)
    if pool is None:
        return error
    paged = [sequence for sequence in sequences if isinstance(sequence, PagedSequence)]
    own = len({block for sequence in paged for block in sequence.cache.held_blocks})
    others = pool.num_blocks - pool.num_free - own
    longest = max(len(sequence.tokens) for sequence in sequences)
    fix = "use fewer beams or a smaller max_tokens, or load the model with a larger cache (cache_bytes=…)"
    return CacheCapacityError(
        f"the KV cache is too small for {len(sequences)} beams of {longest} tokens",
        f"of {pool.num_blocks} blocks with {decoder.block_size} tokens each, these beams use {own}, "
        f"other sequences of this model use {others}, and {pool.num_free} are free",
        f"{fix}, or close the other sequences" if others else fix,
    )


def _repeating(tokens: Sequence[int], size: int) -> list[int]:
    """Return the tokens that would complete a repeated n-gram."""
    end = len(tokens) - size + 1
    last = list(tokens[end:])
    return [tokens[i + size - 1] for i in range(max(end, 0)) if list(tokens[i : i + size - 1]) == last]
