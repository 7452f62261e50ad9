"""Beam search for an LLM: returns the best outputs for each prompt as completions, on the caller's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields

from ..engine.beam_batch import BeamOutput, BeamSearch, advance_all
from ..engine.beams import BeamOptions, TransformersBeams
from ..engine.sampling.params import SamplingParams
from ..errors import CacheCapacityError, DeadlineError, OptionError
from ..models.model import Model
from .completion import Completion, FinishReason, Timings
from .generation import Generation
from .request_options import RequestOptions

# Fields of SamplingParams that a beam search applies. Other fields control random sampling, or take back tokens.
OBEYED = frozenset(
    "repetition_penalty no_repeat_ngram_size logit_bias sequence_bias begin_suppress_tokens min_tokens min_length "
    "max_tokens stop_token_ids ignore_eos logprobs logits_processors samplers temperature seed".split()
)


def check_beam_params(params: SamplingParams) -> None:
    """Raise OptionError if an option is incompatible with beam search."""
    neutral = {one.name: one.default for one in fields(params)}
    for name, value in params.as_dict().items():
        draws = value not in (0, 1) if name == "temperature" else name not in OBEYED and value != neutral[name]
        if draws:
            raise OptionError(
                f"{name} = {value!r:.80} cannot be used with beams",
                "a beam search keeps the most likely outputs: it neither samples tokens nor backtracks",
                f"leave out {name} or num_beams",
            )


def run_beams(
    model: Model,
    leaders: Sequence[Generation],
    request_options: RequestOptions,
    max_sequences: int,
    progress: Callable[[int, int], None] | None = None,
    is_unwanted: Callable[[], bool] = lambda: False,
) -> list[Completion]:
    """Return the num_return_sequences best outputs for each prompt, in order of prompts, the best output first.

    Args:
        model: the model.
        leaders: one request per prompt, not submitted to the engine.
        request_options: the options of the search.
        max_sequences: maximum number of concurrent beams.
        progress: called after each step with the number of finished prompts and the total number of prompts.
        is_unwanted: called before each step; if it returns True, the search ends with the outputs so far.

    Raises:
        CacheCapacityError: the beams of a single prompt do not fit into the cache.
        DeadlineError: the timeout expired before the first output was finished.
        SamplingError, LogitsProcessorError: no next token could be chosen.
    """
    assert request_options.beams is not None
    results: dict[int, list[Completion]] = {}
    window, deadline = max(1, max_sequences // request_options.beams.num_beams), request_options.deadline
    waiting = list(range(len(leaders)))

    def note(done: int) -> None:
        if progress is not None:
            progress(len(results) + done, len(leaders))

    while waiting:
        group, waiting = waiting[:window], waiting[window:]
        runs: list[_BeamRun] = []
        try:
            for index in group:
                runs.append(_BeamRun(model, leaders[index], request_options.beams))  # noqa: PERF401 - if one fails, close the rest
            _run(runs, deadline, note, is_unwanted)
        except CacheCapacityError:
            if window == 1:
                raise
            window, waiting = max(1, window // 2), [*group, *waiting]
            continue
        finally:
            for run in runs:
                run.search.close()
        results |= {index: run.completions() for index, run in zip(group, runs, strict=True)}
    return [one for index in range(len(leaders)) for one in results[index]]


async def await_beams(
    model: Model, leaders: Sequence[Generation], request_options: RequestOptions, max_sequences: int
) -> list[Completion]:
    """Call `run_beams` on a thread without blocking other tasks. Cancelling the task ends the search."""
    import asyncio

    loop = asyncio.get_running_loop()
    unwanted: list[bool] = []
    try:
        return await asyncio.to_thread(
            run_beams,
            model,
            leaders,
            request_options,
            max_sequences,
            is_unwanted=lambda: bool(unwanted) or loop.is_closed(),
        )
    except BaseException:
        unwanted.append(True)
        raise


class _BeamRun:
    """The beam search for one prompt."""

    def __init__(self, model: Model, generation: Generation, options: BeamOptions) -> None:
        decoder = model.decoder
        self.generation, self.options, self.decoder = generation, options, decoder
        sequence = decoder.open() if generation.origin is None else generation.origin.fork()
        try:
            sequence.adapt(generation.adapters)
            generation.start(sequence)
            self.cached = sequence.num_computed or sequence.reuse()
            stop_ids = generation.plan.stop_ids
            policy = TransformersBeams[BeamOutput](options, len(generation.prompt), generation.max_length, stop_ids)
            self.search = BeamSearch(decoder, model.sampler, sequence, generation.plan, policy)
        except BaseException:
            sequence.close()
            raise
        self.sequence = sequence
        self._began, self._first = time.perf_counter(), 0.0
        self._ended = self._began

    def note_step(self) -> None:
        """Record that a step was performed."""
        self._ended = time.perf_counter()
        if not self._first:
            self._first = self._ended
            self.sequence.publish()

    def completions(self) -> list[Completion]:
        """Return the best finished outputs."""
        outputs = self.search.policy.finished[: self.options.num_return_sequences]
        first = self._first or self._ended
        timings = Timings(first - self._began, self._ended - first)
        return [self._completion(rank, score, output, timings) for rank, (score, output) in enumerate(outputs)]

    def _completion(self, rank: int, score: float, output: BeamOutput, timings: Timings) -> Completion:
        stream = self.generation.new_stream()
        text = "".join(stream.decode(token) for token in output.tokens) + stream.flush()
        reason: FinishReason = "stop" if output.stopped_by is not None else "length"
        return Completion(
            text=text,
            token_ids=output.tokens,
            finish_reason=reason,
            stopped_by=output.stopped_by,
            prompt_tokens=len(self.generation.prompt),
            cached_tokens=self.cached,
            timings=timings,
            seed=0,
            logprobs=output.logprobs if self.generation.plan.params.logprobs is not None else None,
            prompt_index=self.generation.prompt_index,
            sample_index=rank,
            score=score,
        )


def _run(
    runs: Sequence[_BeamRun], deadline: float | None, note: Callable[[int], None], is_unwanted: Callable[[], bool]
) -> None:
    """Perform steps until all searches are done, the caller cancels, or the deadline passes."""
    searches = [run.search for run in runs]
    while not all(search.policy.is_done for search in searches):
        if is_unwanted():
            return
        if deadline is not None and time.monotonic() >= deadline:
            if any(not search.policy.finished for search in searches):
                raise DeadlineError(
                    "the beam search's timeout expired before an output was finished",
                    "the outputs of a beam search are known only at its end",
                    "raise timeout, or lower num_beams or max_tokens",
                )
            return
        before = [search.policy.is_done for search in searches]
        advance_all(runs[0].decoder, searches)
        for run, was_done in zip(runs, before, strict=True):
            if not was_done:
                run.note_step()
        note(sum(search.policy.is_done for search in searches))
