"""From prompts and options, as callers give them, to checked jobs for the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from .engine.sampling.breakers import breaker_tokens
from .engine.sampling.plan import SamplingPlan, plan_sampling, request_seed
from .errors import ContextOverflowError, InputError, OptionError
from .generation import Generation
from .sampling_defaults import model_defaults, with_defaults
from .sampling_params import SamplingParams
from .text.special_ids import generation_defaults
from .token_input import token_row

if TYPE_CHECKING:
    from .model import Model
    from .tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int]
"""A text, or its token ids."""


class Sink(Protocol):
    """Where generations deliver; called on the engine's thread."""

    def text(self, generation: Generation, piece: str) -> None:
        """A piece of text is certain."""

    def finished(self, generation: Generation, error: BaseException | None) -> None:
        """It is over."""


MakeGenerations: TypeAlias = Callable[[Sink], list[Generation]]
"""Makes the jobs of a checked request: the first sample of each prompt, which leads the others."""


class RequestBuilder:
    """Makes requests for one model.

    Args:
        model, tokenizer: of the same folder.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._config = model.config.model
        limit = model.config.search.get("max_length") or model.context_size
        self.context_size = min(model.context_size, limit)
        search = {**generation_defaults(model.folder).sampling, **model.config.search}
        self.defaults = model_defaults(search, self._config.vocab_size)
        self._breakers: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}

    def params(self, params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
        """The options of a request: those named replace `params`, or the model's defaults.

        Raises:
            OptionError: out of range, contradictory or unknown.
        """
        if params is None:
            return with_defaults(self.defaults, options)
        if not isinstance(params, SamplingParams):
            raise OptionError(
                f"params is a {type(params).__name__}", "a SamplingParams is expected", "pass single options by name"
            )
        return params.replace(**options) if options else params

    def batch(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: Mapping[str, Any],
    ) -> MakeGenerations:
        """A request of one prompt or many; see LLM.generate."""
        rows = [self._prompt(prompt) for prompt in _as_list(prompts)]
        given: Sequence[Any] = params if isinstance(params, (list, tuple)) else [params] * len(rows)
        if len(given) != len(rows):
            raise OptionError(
                f"{len(given)} params for {len(rows)} prompts", "there is one for all or one each", "match them"
            )
        plans = [self._plan(self.params(one, options)) for one in given]
        for row, plan in zip(rows, plans, strict=True):
            self._check_room(row, plan)
        return lambda sink: [
            self._generation(row, plan, sink, index, ())
            for index, (row, plan) in enumerate(zip(rows, plans, strict=True))
        ]

    def single(
        self, prompt: Prompt, params: SamplingParams | None, options: Mapping[str, Any], keep: Sequence[str] = ()
    ) -> MakeGenerations:
        """A request of one prompt and one sample.

        Args:
            keep: special tokens that the text shows.
        """
        chosen = self.params(params, options)
        if chosen.n != 1:
            raise OptionError(f"n = {chosen.n}", "this call gives one sample", "use generate for several")
        row, plan = self._prompt(prompt), self._plan(chosen)
        self._check_room(row, plan)
        return lambda sink: [self._generation(row, plan, sink, 0, keep)]

    def _prompt(self, prompt: Prompt) -> list[int]:
        """Token ids that leave room for an answer."""
        if isinstance(prompt, (bytes, Mapping)) or not _is_row(prompt):
            raise InputError(
                f"a prompt is a {type(prompt).__name__}",
                "a text or a list of token ids is expected",
                "pass a str; messages go to chat",
            )
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        row = token_row(ids, self._config.vocab_size)
        if len(row) >= self.context_size:
            raise ContextOverflowError(
                f"the prompt has {len(row)} tokens",
                f"the context holds {self.context_size}, the answer included",
                "shorten it, or load the model with a larger context",
            )
        return row

    def _check_room(self, prompt: Sequence[int], plan: SamplingPlan) -> None:
        least = max(len(prompt) + plan.params.min_tokens, plan.params.min_length)
        if least > self.context_size:
            raise ContextOverflowError(
                f"min_tokens = {plan.params.min_tokens}, min_length = {plan.params.min_length} ask for {least} tokens",
                f"the prompt has {len(prompt)}, and the context holds {self.context_size} together with the answer",
                "lower them, or load the model with a larger context",
            )

    def _plan(self, params: SamplingParams) -> SamplingPlan:
        vocab_size = self._model.decoder.vocab_size  # raises if the model was closed
        if params.top_k > vocab_size:
            raise OptionError(
                f"top_k = {params.top_k}", f"the vocabulary has {vocab_size} tokens", f"use 0 (all) to {vocab_size}"
            )
        breakers = self._breaker_tokens(tuple(params.dry_sequence_breakers)) if params.dry_multiplier > 0 else ()
        return plan_sampling(params, vocab_size=vocab_size, eos_token_ids=self._config.eos_token_ids, breakers=breakers)

    def _breaker_tokens(self, breakers: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        if breakers not in self._breakers:
            vocabulary = [self._tokenizer.decode([token]) for token in range(self._tokenizer.vocab_size)]
            self._breakers[breakers] = breaker_tokens(
                breakers, vocabulary, lambda text: self._tokenizer.encode(text).tolist()
            )
        return self._breakers[breakers]

    def _generation(
        self, prompt: Sequence[int], plan: SamplingPlan, sink: Sink, index: int, keep: Sequence[str]
    ) -> Generation:
        seed = request_seed(plan.params)

        def make(sample: int, siblings: Sequence[Generation] = ()) -> Generation:
            return Generation(
                prompt,
                plan,
                seed=seed,
                sample=sample,
                stream=self._tokenizer.create_stream(keep=keep),
                context_size=self.context_size,
                on_text=sink.text,
                on_finish=sink.finished,
                prompt_index=index,
                siblings=siblings,
            )

        return make(0, [make(sample) for sample in range(1, plan.params.n)])


def _as_list(prompts: Any) -> Sequence[Prompt]:
    """One prompt as a list of one. A row of ids is one prompt; a list of rows or texts is many."""
    if isinstance(prompts, (str, bytes)) or not _is_row(prompts):
        return [prompts]
    rows = prompts.as_numpy() if hasattr(prompts, "as_numpy") else prompts
    if not len(rows):
        raise InputError("there are no prompts", "there is nothing to complete", "pass at least one")
    return [prompts] if _is_number(rows[0]) else rows


def _is_row(value: Any) -> bool:
    """Whether it is text, or things in a row."""
    return isinstance(value, Sequence) or hasattr(value, "as_numpy") or getattr(value, "ndim", 0) > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or getattr(value, "ndim", 1) == 0
