"""Runs many requests over one decoder: continuous batching. It knows token ids only; requests know what they mean."""

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
# Logits of every prompt token are wanted only for log-probabilities; a step holds at most this much of them.
_PROMPT_LOGITS_BYTES = 64 * 2**20


@dataclass
class EngineCounts:
    """What an engine has done since it began; see `genai.llm.stats.Stats`."""

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
        """Note a request at its end."""
        if error is not None:
            self.failed += 1
        elif request.cancelled:
            self.cancelled += 1
        else:
            self.finished += 1


class Engine:
    """Takes requests in order and gives each step to all that fit.

    When the cache is full, the youngest request gives its part back and waits; its tokens are computed again later.
    That changes no result: a token depends on its own sequence only.

    Args:
        decoder: the model.
        sampler: for its vocabulary.
        max_sequences: requests that run side by side.
        speculator: proposes tokens, so that a step may give more than one; None = nobody does. It changes no result:
            each token is chosen as ever, and a proposal only kept where it is that token.
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
        # Tokens of prompts in steps since one was waited for, and when the first of these began: a device goes on by
        # itself until somebody asks for a token.
        self._read_tokens, self._began = 0, 0.0
        # What was started ahead has failed: a step is made as usual, which tells whom it is about.
        self._is_careful = False
        self.counts = EngineCounts()

    def submit(self, request: EngineRequest) -> None:
        """Queue a request."""
        self._scheduler.submit(request, priority=request.priority)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Requests that share the steps."""
        return len(self._scheduler.running)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    def step(self) -> None:
        """Start what fits, compute one step, and choose the tokens of the sequences that are up to date.

        What fails for a request is given to its `finish`; the others go on. Where the device can, it computes the next
        step while this one's tokens are read and made text of (`Decoder.step_ahead`): that step is then the next one's,
        for the sequences that still want it.
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
        """Give up the step in progress if all its requests are cancelled, or in any case; called from other threads."""
        running = list(self._scheduler.running)
        if everything or all(request.cancelled for request in running):
            self._decoder.interrupt([request.sequence for request in running])

    def abandon(self, error: BaseException | None) -> None:
        """End all requests, with an error or as cancelled."""
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
        """Begin a request; one that gave its cache back has a sequence and goes on where it was."""
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
        """Make room in sequences whose context is full, and which go on."""
        for request in list(self._scheduler.running):
            try:
                while request.sequence.is_full:
                    request.sequence.forget()
            except Exception as error:
                self._end(request, error)

    def _ready(self) -> list[tuple[EngineRequest, Logits]]:
        """The requests that can be given a token, with the logits behind their last one: of what was started ahead,
        where something was; requests that came meanwhile, or whose tokens were others, wait for the step behind it.
        """
        ahead = [request for request in self._scheduler.running if request.sequence.ahead is not None]
        computed: list[tuple[EngineRequest, Logits | None]] = [
            (request, request.sequence.take_ahead()) for request in ahead
        ]
        computed = computed or self._compute()
        self.counts.steps += bool(computed)
        return [(request, rows) for request, rows in computed if rows is not None and _is_up_to_date(request)]

    def _compute(self) -> list[tuple[EngineRequest, Logits | None]]:
        """One step of the running requests; fewer of them if the cache has no room, or if some fail."""
        while self._scheduler.running:
            try:
                return self._compute_step(list(self._scheduler.running))
            except CacheCapacityError as error:
                if not self._take_back_proposals():
                    self._preempt(error)
            except StepInterrupted:
                break  # the cancelled requests leave at the next step
            except Exception:
                return self._compute_apart()
        return []

    def _compute_apart(self) -> list[tuple[EngineRequest, Logits | None]]:
        """A sequence that cannot be computed must not end the others."""
        computed = []
        for request in list(self._scheduler.running):
            try:
                computed += self._compute_step([request])
            except (CacheCapacityError, StepInterrupted):
                continue  # its turn comes with the others, in the next step
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
        prefill_budget = self._prefill_budget.tokens(reading=sum(run.prefill for run in pending), watched=watched)
        step = plan_step(pending, budget, prefill_budget)
        logits = self._decoder.step(sequences, step, all_rows=asking)
        self._read_tokens += sum(part.num_tokens for part in step if part.prefill)
        computed = list(zip(requests, logits, strict=True))
        if asking:
            computed = [(request, rows) for request, rows in computed if self._hand_prompt_logits(request, rows)]
        return computed

    def _hand_prompt_logits(self, request: EngineRequest, logits: Logits | None) -> bool:
        """Whether the request goes on."""
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
        """Whether there were any: they are the first to go where room is scarce."""
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
        """Also the copies of those whose prompt is computed for the first time."""
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
                    sibling.sequence.truncate()  # it finds the prompt in the prefix cache later
        return together

    def _choose_ahead(self, ready: list[tuple[EngineRequest, Logits]]) -> bool:
        """Give each request its next token, and start the step behind it before that is read.

        Returns:
            False where nothing was done, because there is nothing to start: the device cannot, or the next step has
            more to do than a token for each of these requests.
        """
        requests = [request for request, _ in ready]
        if self._is_careful or not self._decoder.runs_ahead or not self._goes_on_with(requests):
            return False
        # A request that is sure to end with this token wants no step behind it.
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
        ready.clear()  # with the logits, which the next step writes over: who held them would have them copied
        self._decoder.step_ahead([requests[i].sequence for i in going], begun.choice, going)
        try:
            outcomes = begun.outcomes()
        except BaseException as error:
            for request in requests:  # their logits are gone: the last token is pending again
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
        """Whether the next step is one token for each of these requests, as far as is known, and nothing else."""
        is_whole = (
            self._speculator is None and len(requests) == self.num_running and self._scheduler.candidate() is None
        )
        return is_whole and not any(request.wants_prompt_logits or request.cancelled for request in requests)

    def _choose_all(self, ready: list[tuple[EngineRequest, Logits]]) -> list[StepOutcome]:
        """A token for each request, and the next one for those whose token was proposed: its logits are there, too."""
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
                # A token, and with it those that a grammar forces: as many as were proposed are computed.
                if (kept := min(request.sequence.num_computed, len(request.sequence.tokens)) - before[request]) > 0:
                    outcomes[request] = outcomes[request].with_more(kept)
                    request.note_proposals(0, kept)
                if _is_up_to_date(request):
                    going.append((request, rows))
                else:
                    request.sequence.take_back()  # what the step had no room for
        return [*outcomes.values()]

    def _choose(self, ready: list[tuple[EngineRequest, Logits]]) -> list[tuple[EngineRequest, Logits]]:
        """Give each request its next token; those that go on. `ready` has the logits from each request's last token
        on.
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
        """A row without a next token must not end the others."""
        if len(ready) == 1:
            self._end(ready[0][0], error)
            return []
        return [going for one in ready for going in self._choose([one])]

    def _give(self, request: EngineRequest, token: int, logprob: TokenLogprob | None) -> bool:
        """Whether the request goes on."""
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
    """Whether the logits after its last token are known."""
    return bool(request.sequence.num_computed >= len(request.sequence.tokens))


def _last_row(request: EngineRequest) -> int:
    """Which row of its logits is that of its last token: proposals stand behind it."""
    return len(request.sequence.tokens) - int(request.sequence.num_computed) - 1


def _demand(request: EngineRequest) -> CacheDemand:
    sequence, gone = request.sequence, request.sequence.forgotten
    tokens = len(sequence.tokens) - gone
    return CacheDemand(tokens, min(request.num_prompt, tokens), request.max_length - gone, sequence.demand())
