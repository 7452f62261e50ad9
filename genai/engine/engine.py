"""Runs many requests over one decoder: continuous batching. It knows token ids only; jobs know what they mean."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import CacheCapacityError, StepInterrupted
from .decoder import Decoder, Logits, stacked
from .mix import AdapterMix
from .pace import Pace
from .sampling.batch import BatchSampler, TokenLogprob
from .sampling.plan import RowSampler
from .scheduler import Demand, Scheduler, plan_step

DEFAULT_MAX_SEQUENCES = 32
# Logits of every prompt token are wanted only for log-probabilities; a step holds at most this much of them.
_PROMPT_LOGITS_BYTES = 64 * 2**20


class Job(Protocol):
    """One sequence to generate. The engine opens `sequence` with the job's tokens and drives it; all calls come from
    the thread that calls Engine.step.

    Attributes:
        sequence: the decoder's state; None until the engine starts the job.
        row: chooses its tokens; reads `sequence.tokens`.
        num_prompt: tokens that the sequence starts with. max_length: most tokens that it may have.
        cancelled: set from any thread; the engine then drops the job at the next step.
        wants_prompt_logits: whether take_prompt_logits is called.
        is_watched: somebody reads its tokens as they come.
        adapters: what its tokens go through; None = none.
    """

    sequence: Any
    row: RowSampler
    num_prompt: int
    max_length: int
    wants_prompt_logits: bool
    adapters: AdapterMix | None

    @property
    def is_watched(self) -> bool:
        """See above."""

    @property
    def cancelled(self) -> bool:
        """See above."""

    def take_siblings(self) -> Sequence[Job]:
        """Jobs with the same prompt, to be started as copies of this one; given once."""

    def start(self, sequence: Any) -> None:
        """Take an empty sequence, put the prompt in and make `row`."""

    def adopt(self, sequence: Any) -> None:
        """Take a sequence that holds the computed prompt, and make `row`."""

    def note_reused(self, num_tokens: int) -> None:
        """This many prompt tokens need not be computed."""

    def take_prompt_logits(self, logits: Logits, start: int) -> None:
        """The logits [rows, V] after the prompt tokens from `start` on; a job that had to wait gets them again."""

    def take(self, token: int, logprob: TokenLogprob | None) -> bool:
        """A token was chosen: append it, or take tokens back. False = the job is done."""

    def finish(self, error: BaseException | None) -> None:
        """Called once, when the job is over; its sequence is closed already."""


class Engine:
    """Takes jobs in order and gives each step to all that fit.

    When the cache is full, the youngest job gives its part back and waits; its tokens are computed again later. That
    changes no result: a token depends on its own sequence only.

    Args:
        decoder: the model.
        sampler: for its vocabulary.
        max_sequences: jobs that run side by side.
    """

    def __init__(self, decoder: Decoder, sampler: BatchSampler, max_sequences: int = DEFAULT_MAX_SEQUENCES) -> None:
        self._decoder = decoder
        self._sampler = sampler
        self._scheduler = Scheduler[Job](decoder.pool, decoder.block_size, max_sequences, _demand)
        self._pace = Pace()

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._scheduler.submit(job)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    def step(self) -> None:
        """Start what fits, compute one step, and choose the tokens of the sequences that are up to date.

        What fails for a job is given to its `finish`; the others go on.
        """
        self._drop_cancelled()
        self._admit()
        computed = self._compute()
        ready = [
            (job, rows[-1])
            for job, rows in computed
            if rows is not None and job.sequence.num_computed == len(job.sequence.tokens)
        ]
        if ready:
            self._choose(self._with_siblings(ready))

    def interrupt(self, *, everything: bool = False) -> None:
        """Give up the step in progress if all its jobs are cancelled, or in any case; called from other threads."""
        running = list(self._scheduler.running)
        if everything or all(job.cancelled for job in running):
            self._decoder.interrupt([job.sequence for job in running])

    def abandon(self, error: BaseException | None) -> None:
        """End all jobs, with an error or as cancelled."""
        for job in [*self._scheduler.running, *self._scheduler.waiting]:
            self._end(job, error)

    # --- which jobs run ------------------------------------------------------------------------------------------

    def _drop_cancelled(self) -> None:
        for job in [*self._scheduler.running, *self._scheduler.waiting]:
            if job.cancelled:
                self._end(job, None)

    def _admit(self) -> None:
        while (job := self._scheduler.candidate()) is not None:
            try:
                self._start(job)
            except Exception as error:
                self._end(job, error)
                continue
            if not self._scheduler.admit(job):
                job.sequence.drop_cache()

    def _start(self, job: Job) -> None:
        """Begin a job; one that gave its cache back has a sequence and goes on where it was."""
        if job.sequence is None:
            sequence = self._decoder.open()
            self._decoder.adapt(sequence, job.adapters)
            job.start(sequence)
        if not job.wants_prompt_logits:
            reused = self._decoder.reuse(job.sequence)
            if not job.row.num_generated:
                job.note_reused(reused)

    def _compute(self) -> list[tuple[Job, Logits | None]]:
        """One step of the running jobs; fewer of them if the cache has no room, or if some fail."""
        while self._scheduler.running:
            try:
                return self._compute_step(list(self._scheduler.running))
            except CacheCapacityError as error:
                self._preempt(error)
            except StepInterrupted:
                break  # the cancelled jobs leave at the next step
            except Exception:
                return self._compute_apart()
        return []

    def _compute_apart(self) -> list[tuple[Job, Logits | None]]:
        """A sequence that cannot be computed must not end the others."""
        computed = []
        for job in list(self._scheduler.running):
            try:
                computed += self._compute_step([job])
            except (CacheCapacityError, StepInterrupted):
                continue  # its turn comes with the others, in the next step
            except Exception as error:
                self._end(job, error)
        return computed

    def _compute_step(self, jobs: list[Job]) -> list[tuple[Job, Logits | None]]:
        sequences = [job.sequence for job in jobs]
        asking = [index for index, job in enumerate(jobs) if job.wants_prompt_logits]
        budget = self._decoder.token_budget
        if asking:
            budget = min(budget, max(1, _PROMPT_LOGITS_BYTES // (4 * self._decoder.vocab_size)))
        pending = [sequence.pending() for sequence in sequences]
        watched = sum(
            job.is_watched and run.num_tokens == 1 and not run.prefill for job, run in zip(jobs, pending, strict=True)
        )
        prefill_budget = self._pace.prefill_budget(reading=sum(run.prefill for run in pending), watched=watched)
        step = plan_step(pending, budget, prefill_budget)
        begin = time.perf_counter()
        logits = self._decoder.step(sequences, step, all_rows=asking)
        self._pace.note(sum(part.num_tokens for part in step if part.prefill), time.perf_counter() - begin)
        return [(job, rows) for job, rows in zip(jobs, logits, strict=True) if self._hand_prompt_logits(job, rows)]

    def _hand_prompt_logits(self, job: Job, logits: Logits | None) -> bool:
        """Whether the job goes on."""
        if not job.wants_prompt_logits or logits is None:
            return True
        try:
            job.take_prompt_logits(logits, job.sequence.num_computed - len(logits))
        except Exception as error:
            self._end(job, error)
            return False
        job.wants_prompt_logits = job.sequence.num_computed < len(job.sequence.tokens)
        return True

    def _preempt(self, error: CacheCapacityError) -> None:
        job = self._scheduler.preempt()
        if job is None:
            self._end(self._scheduler.running[0], error)
        else:
            job.sequence.drop_cache()

    # --- choosing tokens -----------------------------------------------------------------------------------------

    def _with_siblings(self, ready: list[tuple[Job, Logits]]) -> list[tuple[Job, Logits]]:
        """Also the copies of those whose prompt is computed for the first time."""
        together = []
        for job, row in ready:
            together.append((job, row))
            if not job.row.num_generated:
                self._decoder.publish(job.sequence)
            for sibling in job.take_siblings():
                sibling.adopt(self._decoder.fork(job.sequence))
                if self._scheduler.admit_copy(sibling, job):
                    together.append((sibling, row))
                else:
                    sibling.sequence.drop_cache()  # it finds the prompt in the prefix cache later
        return together

    def _choose(self, ready: list[tuple[Job, Logits]]) -> None:
        logits = stacked([row for _, row in ready])
        try:
            sampled = self._sampler.sample(logits, [job.row for job, _ in ready])
        except Exception as error:
            self._choose_apart(ready, error)
            return
        for (job, _), token, logprob in zip(ready, sampled.tokens.tolist(), sampled.logprobs, strict=True):
            self._give(job, token, logprob)

    def _choose_apart(self, ready: list[tuple[Job, Logits]], error: Exception) -> None:
        """A row without a next token must not end the others."""
        if len(ready) == 1:
            self._end(ready[0][0], error)
            return
        for one in ready:
            self._choose([one])

    def _give(self, job: Job, token: int, logprob: TokenLogprob | None) -> None:
        try:
            goes_on, error = job.take(token, logprob), None
        except Exception as failure:
            goes_on, error = False, failure
        if not goes_on:
            self._end(job, error)

    def _end(self, job: Job, error: BaseException | None) -> None:
        self._scheduler.remove(job)
        if job.sequence is not None:
            if error is None:
                self._decoder.publish(job.sequence)
            job.sequence.close()
        job.finish(error)
        for sibling in job.take_siblings():
            sibling.finish(error)


def _demand(job: Job) -> Demand:
    sequence = job.sequence
    return Demand(len(sequence.tokens), job.num_prompt, job.max_length, *sequence.blocks())
