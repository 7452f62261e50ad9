"""Continuous batching: an engine that runs many requests on one decoder, using only token ids."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import CacheCapacityError, StepInterrupted
from .decoder import Decoder
from .request import EngineRequest
from .sampling.batch import BatchSampler, TokenLogprob, stacked
from .scheduler import CacheDemand, PrefillBudget, Scheduler, plan_step
from .sequence import Logits
from .speculation.speculator import Speculator, StepOutcome

DEFAULT_MAX_SEQUENCES = 32
# Prompt logits are needed only for log-probabilities. This limits their size per step.
_PROMPT_LOGITS_BYTES = 64 * 2**20


@dataclass
class EngineCounts:
    """Counters of an engine since its creation; see `genai.llm.stats.Stats`."""

    steps: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def count(self, request: EngineRequest, error: BaseException | None) -> None:
        """Count a finished request."""
        if error is not None:
            self.failed += 1
        elif request.cancelled:
            self.cancelled += 1
        else:
            self.finished += 1


class Engine:
    """Admits requests in order and computes each step for all requests that fit into the cache.

    When the cache is full, the youngest request returns its blocks and waits; its tokens are recomputed later. The
    results are the same because a token depends only on its own sequence.

    Args:
        decoder: the model.
        sampler: the sampler for the model's vocabulary.
        max_sequences: maximum number of requests that run at a time.
        speculator: proposes draft tokens so that a step can generate several tokens; None = no speculative decoding.
            The output is unchanged: every token is chosen as it would be without the speculator, and a draft token is
            kept only if it equals the chosen token.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampler: BatchSampler,
        max_sequences: int = DEFAULT_MAX_SEQUENCES,
        speculator: Speculator | None = None,
    ) -> None:
        self._decoder = decoder
        self._sampler = sampler
        self._speculator = speculator
        self._scheduler = Scheduler[EngineRequest](decoder.pools, decoder.block_size, max_sequences, _demand)
        self._prefill_budget = PrefillBudget()
        # The number of prompt tokens computed since the engine last waited for results, and the start of the first of
        # these steps. A device computes asynchronously until a caller reads a token.
        self._read_tokens, self._began = 0, 0.0
        # True after a step that was started ahead failed. The next step then runs normally, which attributes the error
        # to a request.
        self._is_careful = False
        self.counts = EngineCounts()

    def submit(self, request: EngineRequest) -> None:
        """Queue a request."""
        self._scheduler.submit(request, priority=request.priority)

    @property
    def num_waiting(self) -> int:
        """The number of queued requests."""
        return len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        """The number of running requests."""
        return len(self._scheduler.running)

    @property
    def has_work(self) -> bool:
        """True if there are queued or running requests."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    def step(self) -> None:
        """Admit requests, compute one step, and choose tokens for the sequences that have no pending tokens.

        A request that fails is finished with its error; the other requests continue. If the device supports it, the
        next step is computed while this step's tokens are read and detokenised (`Decoder.step_ahead`). The next call to
        `step` then uses those results for the sequences that still need them.
        """
        if not self._read_tokens:
            self._began = time.perf_counter()
        self._drop_cancelled()
        self._admit()
        self._shift()
        wants_to_hear = self._speculator is not None and self._speculator.propose(self._scheduler.running)
        self._sampler.prepare(request.row for request in self._scheduler.running)
        ready = self._with_siblings(self._ready())
        waits = bool(ready)
        if not self._choose_ahead(ready):
            outcomes = self._choose_all(ready)
            self._is_careful = False
            if self._speculator is not None and wants_to_hear:
                self._speculator.settle(outcomes)
        if waits:
            self._prefill_budget.note(self._read_tokens, time.perf_counter() - self._began)
            self._read_tokens = 0

    def interrupt(self, *, everything: bool = False) -> None:
        """Cancel the current step if all its requests are cancelled, or in any case if `everything`. Thread-safe."""
        running = list(self._scheduler.running)
        if everything or all(request.cancelled for request in running):
            self._decoder.interrupt([request.sequence for request in running])

    def abandon(self, error: BaseException | None) -> None:
        """Finish all requests, either with an error or as cancelled."""
        for request in [*self._scheduler.running, *self._scheduler.waiting]:
            self._end(request, error)

    # --- which requests run ------------------------------------------------------------------------------------------

    def _drop_cancelled(self) -> None:
        for request in [*self._scheduler.running, *self._scheduler.waiting]:
            if request.cancelled:
                self._end(request, None)
            elif request.deadline is not None and time.monotonic() >= request.deadline:
                self.counts.expired += 1
                self._end(request, request.expire())

    def _admit(self) -> None:
        while (request := self._scheduler.candidate()) is not None:
            try:
                self._start(request)
            except Exception as error:
                self._end(request, error)
                continue
            if not self._scheduler.admit(request):
                request.sequence.truncate()

    def _start(self, request: EngineRequest) -> None:
        """Start a request. A preempted request still has its sequence and resumes where it stopped."""
        if not request.has_sequence:
            sequence = self._decoder.open() if request.origin is None else request.origin.fork()
            sequence.adapt(request.adapters)
            request.start(sequence)
            self.counts.prompt_tokens += request.num_prompt
            self.counts.cached_tokens += sequence.num_computed
        if not request.wants_prompt_logits and not request.sequence.num_computed:
            reused = request.sequence.reuse()
            if not request.row.num_generated:
                self.counts.cached_tokens += reused
                request.note_reused(reused)

    def _shift(self) -> None:
        """Shift the context of each running sequence whose context is full."""
        for request in list(self._scheduler.running):
            try:
                while request.sequence.is_full:
                    request.sequence.forget()
            except Exception as error:
                self._end(request, error)

    def _ready(self) -> list[tuple[EngineRequest, Logits]]:
        """Return the requests that can get a token, with the logits after their last token.

        If a step was started ahead, only requests in that step are returned. New requests, and requests with different
        tokens than expected, wait for the following step.
        """
        ahead = [request for request in self._scheduler.running if request.sequence.ahead is not None]
        computed: list[tuple[EngineRequest, Logits | None]] = [
            (request, request.sequence.take_ahead()) for request in ahead
        ]
        computed = computed or self._compute()
        self.counts.steps += bool(computed)
        return [(request, rows) for request, rows in computed if rows is not None and _is_up_to_date(request)]

    def _compute(self) -> list[tuple[EngineRequest, Logits | None]]:
        """Compute one step of the running requests, or of fewer requests if the cache is full or some of them fail."""
        while self._scheduler.running:
            try:
                return self._compute_step(list(self._scheduler.running))
            except CacheCapacityError as error:
                if not self._take_back_proposals():
                    self._preempt(error)
            except StepInterrupted:
                break  # the cancelled requests are removed at the next step
            except Exception:
                return self._compute_apart()
        return []

    def _compute_apart(self) -> list[tuple[EngineRequest, Logits | None]]:
        """Compute each request in a separate step so that a sequence that fails does not fail the others."""
        computed = []
        for request in list(self._scheduler.running):
            try:
                computed += self._compute_step([request])
            except (CacheCapacityError, StepInterrupted):
                continue  # the next step computes this request with the others
            except Exception as error:
                self._end(request, error)
        return computed

    def _compute_step(self, requests: list[EngineRequest]) -> list[tuple[EngineRequest, Logits | None]]:
        sequences = [request.sequence for request in requests]
        asking = [index for index, request in enumerate(requests) if request.wants_prompt_logits]
        budget = self._decoder.token_budget
        if asking:
            budget = min(budget, max(1, _PROMPT_LOGITS_BYTES // (4 * self._decoder.vocab_size)))
        pending = [sequence.pending() for sequence in sequences]
        watched = sum(
            request.is_watched and run.num_tokens > 0 and not run.prefill
            for request, run in zip(requests, pending, strict=True)
        )
        prompts = [run.num_tokens for run in pending if run.prefill]
        prefill_budget = self._prefill_budget.tokens(prompts=prompts, watched=watched)
        step = plan_step(pending, budget, prefill_budget)
        logits = self._decoder.step(sequences, step, all_rows=asking)
        self._read_tokens += sum(part.num_tokens for part in step if part.prefill)
        computed = list(zip(requests, logits, strict=True))
        if asking:
            computed = [(request, rows) for request, rows in computed if self._hand_prompt_logits(request, rows)]
        return computed

    def _hand_prompt_logits(self, request: EngineRequest, logits: Logits | None) -> bool:
        """Pass prompt logits to the request; return True if the request continues."""
        if not request.wants_prompt_logits or logits is None:
            return True
        try:
            request.take_prompt_logits(logits, request.sequence.num_computed - len(logits))
        except Exception as error:
            self._end(request, error)
            return False
        request.wants_prompt_logits = request.sequence.num_computed < len(request.sequence.tokens)
        return True

    def _take_back_proposals(self) -> bool:
        """Drop all draft tokens to free cache blocks; return True if there were any."""
        found = [request for request in self._scheduler.running if request.sequence.proposed]
        for request in found:
            request.sequence.take_back()
        return bool(found)

    def _preempt(self, error: CacheCapacityError) -> None:
        request = self._scheduler.preempt()
        if request is None:
            self._end(self._scheduler.running[0], error)
        else:
            self.counts.preempted += 1
            request.sequence.truncate()

    # --- choosing tokens -----------------------------------------------------------------------------------------

    def _with_siblings(self, ready: list[tuple[EngineRequest, Logits]]) -> list[tuple[EngineRequest, Logits]]:
        """Add the copies of each request whose prompt has just been processed for the first time."""
        together = []
        for request, row in ready:
            together.append((request, row))
            if not request.row.num_generated:
                request.sequence.publish()
            for sibling in request.take_siblings():
                sibling.adopt(request.sequence.fork())
                if self._scheduler.admit_copy(sibling, request):
                    together.append((sibling, row))
                else:
                    sibling.sequence.truncate()  # it will reuse the prompt from the prefix cache
        return together

    def _choose_ahead(self, ready: list[tuple[EngineRequest, Logits]]) -> bool:
        """Choose each request's next token, and start the following step before the tokens are read.

        Returns:
            False if nothing was done because the device does not support it, or because the next step would not be
            exactly one token for each of these requests.
        """
        requests = [request for request, _ in ready]
        if self._is_careful or not self._decoder.runs_ahead or not self._goes_on_with(requests):
            return False
        # A request that is certain to end with this token needs no further step.
        going = [i for i, request in enumerate(requests) if len(request.sequence.tokens) + 1 < request.max_length]
        if not going:
            return False
        try:
            begun = self._sampler.begin(stacked([rows[-1] for _, rows in ready]), [request.row for request in requests])
        except Exception as error:
            self._choose_apart(ready, error)
            return True
        if begun is None:
            return False
        ready.clear()  # also drops the logits, which the next step overwrites: a reference would force a copy
        self._decoder.step_ahead([requests[i].sequence for i in going], begun.choice, going)
        try:
            outcomes = begun.outcomes()
        except BaseException as error:
            for request in requests:  # their logits were overwritten, so the last token becomes pending again
                request.sequence.truncate(len(request.sequence.tokens) - 1)
            self._is_careful = True
            if not isinstance(error, Exception):
                raise
            return True
        for request, (token, refusal) in zip(requests, outcomes, strict=True):
            if refusal is None:
                self._give(request, token, None)
            else:
                self._end(request, refusal)
        return True

    def _goes_on_with(self, requests: Sequence[EngineRequest]) -> bool:
        """Return True if, as far as can be predicted, the next step is exactly one token for each of these requests."""
        is_whole = (
            self._speculator is None and len(requests) == self.num_running and self._scheduler.candidate() is None
        )
        return is_whole and not any(request.wants_prompt_logits or request.cancelled for request in requests)

    def _choose_all(self, ready: list[tuple[EngineRequest, Logits]]) -> list[StepOutcome]:
        """Choose a token for each request, and further tokens while the chosen token equals the draft token."""
        outcomes = {
            request: StepOutcome(request, request.sequence.num_computed - len(request.sequence.tokens), 1)
            for request, _ in ready
        }
        for request, proposed, _ in outcomes.values():
            if proposed:
                request.note_proposals(proposed, 0)
        going = ready
        while going:
            before = {request: len(request.sequence.tokens) for request, _ in going}
            chosen, going = self._choose(going), []
            for request, rows in chosen:
                # One token, and any tokens that a grammar forces after it. At most the draft tokens are already
                # computed.
                # computed.
                if (kept := min(request.sequence.num_computed, len(request.sequence.tokens)) - before[request]) > 0:
                    outcomes[request] = outcomes[request].with_more(kept)
                    request.note_proposals(0, kept)
                if _is_up_to_date(request):
                    going.append((request, rows))
                else:
                    request.sequence.take_back()  # draft tokens that the step did not compute
        return [*outcomes.values()]

    def _choose(self, ready: list[tuple[EngineRequest, Logits]]) -> list[tuple[EngineRequest, Logits]]:
        """Choose and append each request's next token; return the requests that continue.

        Args:
            ready: the requests, each with logits that start after its last token.
        """
        logits = stacked([rows[_last_row(request)] for request, rows in ready])
        try:
            sampled = self._sampler.sample(logits, [request.row for request, _ in ready])
        except Exception as error:
            return self._choose_apart(ready, error)
        chosen = zip(ready, sampled.tokens.tolist(), sampled.logprobs, strict=True)
        return [one for one, token, logprob in chosen if self._give(one[0], token, logprob)]

    def _choose_apart(
        self, ready: list[tuple[EngineRequest, Logits]], error: Exception
    ) -> list[tuple[EngineRequest, Logits]]:
        """Choose each request's token separately so that a row without a next token does not fail the others."""
        if len(ready) == 1:
            self._end(ready[0][0], error)
            return []
        return [going for one in ready for going in self._choose([one])]

    def _give(self, request: EngineRequest, token: int, logprob: TokenLogprob | None) -> bool:
        """Pass a token to its request. Return True if the request continues."""
        try:
            self.counts.generated_tokens += 1
            goes_on, error = request.take(token, logprob), None
        except Exception as failure:
            goes_on, error = False, failure
        if not goes_on:
            self._end(request, error)
        return goes_on

    def _end(self, request: EngineRequest, error: BaseException | None) -> None:
        self._scheduler.remove(request)
        self.counts.count(request, error)
        if self._speculator is not None:
            self._speculator.forget(request)
        if request.has_sequence:
            request.sequence.take_back()
            if error is None:
                request.sequence.publish()
                if request.keeps_sequence:
                    request.keep(request.sequence.fork())
            request.sequence.close()
        request.finish(error)
        for sibling in request.take_siblings():
            sibling.finish(error)


def _is_up_to_date(request: EngineRequest) -> bool:
    """Return True if the logits after the request's last token are available."""
    return bool(request.sequence.num_computed >= len(request.sequence.tokens))


def _last_row(request: EngineRequest) -> int:
    """Return the row of the logits that belongs to the request's last token; later rows belong to draft tokens."""
    return len(request.sequence.tokens) - int(request.sequence.num_computed) - 1


def _demand(request: EngineRequest) -> CacheDemand:
    sequence, gone = request.sequence, request.sequence.forgotten
    tokens = len(sequence.tokens) - gone
    return CacheDemand(tokens, min(request.num_prompt, tokens), request.max_length - gone, sequence.demand())
