"""Conversion of the prompts and options of a call to checked requests for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..common.log import logger
from ..common.warning import warn_caller
from ..engine.adapter_mix import AdapterMix
from ..engine.sampling.breakers import NO_BREAKERS, BreakerFinder
from ..engine.sampling.params import SamplingParams, asks_to_draw, grammar_of, model_defaults, with_defaults
from ..engine.sampling.plan import SamplingPlan, plan_sampling, request_seed
from ..engine.sampling.state import SamplerState
from ..engine.sequence import ContextShift
from ..errors import (
    ConfigError,
    ContextOverflowError,
    GenaiError,
    InputError,
    OptionError,
    StateError,
    kind_of,
    located,
)
from ..lora.store import AdapterChoice, Adapters
from ..models.model import Model
from ..text.chat_template import is_marked
from ..text.files import generation_defaults
from ..text.token_ids import token_row
from ..text.tokenizer import Tokenizer
from ..text.vocabulary import guidance_of
from .beams import OBEYED, check_beam_params
from .generation import Generation
from .reply_shape import ReplyShape
from .request_options import PROMPT_OPTIONS, RequestOptions, split_options

_log = logger(__name__)

Prompt: TypeAlias = str | Sequence[int]
"""A text, or its token ids."""
# Text with more characters per token of context is assumed not to fit, and is not encoded in advance.
_CHARACTERS_PER_TOKEN = 4


CHAT_DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""The sampling options of llama.cpp and Ollama for models whose files name none."""

# Options that choose how tokens are drawn. A model whose files set one of them names its sampling.
_SAMPLING_NAMES = frozenset(
    "do_sample temperature top_k top_p min_p typical_p xtc_probability xtc_threshold mirostat mirostat_tau "
    "mirostat_eta samplers".split()
)


class RequestBuilder:
    """Builds requests for one model and the tokenizer in its folder."""

    def __init__(self, model: Model, tokenizer: Tokenizer, adapters: Adapters) -> None:
        self._model, self._adapters = model, adapters
        self._tokenizer = tokenizer
        self._config = model.config.model
        own = generation_defaults(model.loaded_folder.side_files)
        search = {**own.sampling, **model.config.search}
        self.context_size = min(model.context_size, search.get("max_length") or model.context_size)
        if own.unsupported:
            _log.warning("the model's defaults contain options that have no effect: %s", ", ".join(own.unsupported))
        try:
            self.defaults = model_defaults(search, self._config.vocab_size, self._config.eos_token_ids)
            with_defaults(self.defaults, {})
        except OptionError as error:
            raise ConfigError(
                f"{error.what} in the model's files",
                error.why,
                "correct generation_config.json, or the search section of genai_config.json",
            ) from error
        # Exports always write the search section, so only its `do_sample` shows that the model is meant to sample.
        self.names_sampling = bool(_SAMPLING_NAMES & own.sampling.keys()) or bool(model.config.search.get("do_sample"))
        self._is_seed_noted = False
        self._guidance = guidance_of(model, tokenizer)
        self._breakers = BreakerFinder(self._token_texts, partial(tokenizer.encode_all, add_special_tokens=False))

    def params(
        self, params: SamplingParams | None, options: Mapping[str, Any], request_options: RequestOptions | None = None
    ) -> SamplingParams:
        """Return the options of a request: single options override `params` or, without it, the model's defaults.

        With beams, those of the model's defaults that beams cannot obey are ignored.
        """
        if request_options is not None and request_options.beams is not None:
            greedy = {"temperature": 0, **options}
            known = {name: value for name, value in self.defaults.items() if name in OBEYED}
            chosen = with_defaults(known, greedy) if params is None else params.replace(**options)
            check_beam_params(chosen)
            return chosen
        if params is None:
            return with_defaults(self.defaults, options)
        if not isinstance(params, SamplingParams):
            raise OptionError(
                f"params is {kind_of(params)}", "a SamplingParams is expected", "pass single options by keyword"
            )
        return params.replace(**options) if options else params

    def chat_params(self, options: Mapping[str, Any]) -> SamplingParams:
        """Return the options of a reply in `genai chat`; see LLM.chat_params."""
        return with_defaults({**self.defaults, **self.chat_defaults}, options)

    @property
    def chat_defaults(self) -> dict[str, Any]:
        """The sampling options of `genai chat` for a model whose files name no sampling; empty for other models."""
        if self.names_sampling:
            return {}
        return {**CHAT_DEFAULTS, "top_k": min(CHAT_DEFAULTS["top_k"], self._config.vocab_size)}

    def note_seed(self, params: object, options: Mapping[str, Any], *, in_chat: bool = False) -> None:
        """Warn, once per model, about a seed without effect: the model is greedy by default, and no option changes it.

        Args:
            params: the SamplingParams of a request, which replace the model's defaults; None = none.
            options: the options by name.
            in_chat: True if the defaults are those of `chat_params`.
        """
        defaults = {**self.defaults, **(self.chat_defaults if in_chat else {})}
        is_drawn = "temperature" in options or "num_beams" in options or asks_to_draw(options)
        if self._is_seed_noted or params is not None or options.get("seed") is None:
            return
        if defaults.get("temperature") == 0 and not is_drawn:
            self._is_seed_noted = True
            warn_caller(
                "the seed has no effect, because this model selects the most likely tokens by default; "
                "to draw tokens, set a temperature, such as 0.8"
            )

    def check(self, params: SamplingParams) -> SamplingParams:
        """Return the options unchanged, or raise the error that every request with them would raise."""
        self._plan(params)
        self._check_least(0, params)
        return params

    def check_all(self, params: SamplingParams | None, options: Mapping[str, Any]) -> None:
        """Raise the error that every request with these options would raise, whatever its prompt."""
        _, sampling = _request_options_of(options)
        self.check(self.params(params, sampling))

    def batch(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: Mapping[str, Any],
        keep: Sequence[str] = (),
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
        shape: ReplyShape | None = None,
        *,
        with_beams: bool = False,
        known: Mapping[str, NDArray[np.int32]] | None = None,
    ) -> list[Generation]:
        """Build the requests for one or more prompts (see LLM.generate).

        Of `options`, the fields of SamplingParams and the request options are used.

        Args:
            keep: special tokens that stay visible in the text.
            shape: the allowed shape of chat replies.
            known: the result of `encoded`, for texts that are already encoded.

        Returns:
            The first sample for each prompt. It leads the other samples for the prompt.
        """
        request_options, options = _request_options_of(options, with_beams=with_beams)
        given = _as_list(prompts)
        rows = [
            self._numbered_prompt(prompt, index, len(given), request_options, known)
            for index, prompt in enumerate(given)
        ]
        choices, params_of_rows = _per_prompt("adapter", adapter, len(rows)), _per_prompt("params", params, len(rows))
        plans = [self._plan(self.params(row_params, options, request_options), shape) for row_params in params_of_rows]
        return self._generations(rows, plans, keep, choices, request_options)

    def each(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: Mapping[str, Any],
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
    ) -> list[list[Generation] | GenaiError]:
        """Return the requests of each prompt (see `batch`), or the error of a prompt that is invalid.

        Raises:
            GenaiError: the error would be raised for every prompt.
        """
        given = _as_list(prompts)
        choices, params_of_rows = _per_prompt("adapter", adapter, len(given)), _per_prompt("params", params, len(given))
        shared: Any = params
        if not isinstance(params, (list, tuple)):
            self.check_all(shared, options)
        request_options, options = _request_options_of(options)
        found: list[list[Generation] | GenaiError] = []
        for index, (prompt, row_params, choice) in enumerate(zip(given, params_of_rows, choices, strict=True)):
            try:
                plan = self._plan(self.params(row_params, options, request_options))
                leaders = self._generations(
                    [self._prompt(prompt, request_options)], [plan], (), [choice], request_options
                )
            except StateError:
                raise
            except GenaiError as error:
                found.append(error)
            else:
                for sample in leaders[0].samples:
                    sample.prompt_index = index
                found.append(leaders)
        return found

    def encoded(self, texts: Sequence[str]) -> dict[str, NDArray[np.int32]]:
        """Return the token ids, without added special tokens, of the texts that probably fit the context.

        If a text cannot be encoded, the result is empty. `batch` encodes the other texts and raises their errors. The
        result has no prompts with literal text, because their ids depend on more than the text.
        """
        if self._tokenizer.is_literal:  # the ids also depend on where a text comes from
            return {}
        most = _CHARACTERS_PER_TOKEN * self.context_size
        short = [text for text in dict.fromkeys(texts) if 0 < len(text) <= most and not is_marked(text)]
        try:
            return dict(zip(short, self._tokenizer.encode_all(short, add_special_tokens=False), strict=True))
        except GenaiError:
            return {}

    def single(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        options: Mapping[str, Any],
        keep: Sequence[str] = (),
        adapter: AdapterChoice = None,
        shape: ReplyShape | None = None,
        num_reply: int = 0,
    ) -> list[Generation]:
        """Build the request for a single prompt and sample; return it in a list. See batch.

        Args:
            num_reply: number of tokens at the end of the prompt that form the beginning of the reply.
        """
        request_options, options = _request_options_of(options)
        chosen = self.params(params, options)
        if chosen.n != 1:
            raise OptionError(f"n = {chosen.n}", "this call returns one sample", "use generate for several samples")
        row = self._prompt(prompt, request_options)
        (generation,) = self._generations([row], [self._plan(chosen, shape)], keep, [adapter], request_options)
        generation.num_reply = num_reply
        return [generation]

    def _generations(
        self,
        rows: Sequence[Sequence[int]],
        plans: Sequence[SamplingPlan],
        keep: Sequence[str],
        choices: Sequence[AdapterChoice],
        request_options: RequestOptions,
    ) -> list[Generation]:
        for row, plan in zip(rows, plans, strict=True):
            self._check_least(len(row), plan.params)
        pinned = [self._adapters.pin(choice) for choice in choices]
        mixes = [self._adapters.mix(one) for one in pinned]
        leaders = [
            self._generation(*arguments, keep) for arguments in zip(rows, plans, range(len(rows)), mixes, strict=True)
        ]
        shift = self._shift(request_options)
        for leader, adapters in zip(leaders, pinned, strict=True):
            for sample in leader.samples:
                sample.adapter, sample.priority = adapters.choice, request_options.priority
                sample.deadline, sample.keeps_sequence = request_options.deadline, request_options.keep_state
                sample.shift, sample.reuses_replies = shift, request_options.reuse_replies
                sample.cache_salt = (request_options.cache_salt or "").encode("utf-8", "surrogatepass")
        return leaders

    def _shift(self, request_options: RequestOptions) -> ContextShift | None:
        shift = request_options.shift(self.context_size)
        if shift is not None:
            self._model.decoder.check_shift(shift)
        return shift

    def prompt_list(self, prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        """Return one or more prompts as a list."""
        return list(_as_list(prompts))

    def continuation(self, prompt: Prompt, literal: bool | None = None) -> list[int]:
        """Return the checked token ids of a prompt that continues a text, without added special tokens."""
        adds = False if isinstance(prompt, str) else None
        return self._prompt(prompt, RequestOptions(add_special_tokens=adds, literal=literal))

    def resumed(self, state: SamplerState, tokens: Sequence[int], options: Mapping[str, Any]) -> list[Generation]:
        """Build the request that continues an earlier request with these tokens; return it in a list.

        max_tokens counts only new tokens. Other options may also be replaced.
        """
        request_options, options = split_options(options)
        _check_no_prompt_options(request_options)
        if request_options.cache_salt is not None or not request_options.reuse_replies:
            name = "reuse_replies = False" if request_options.cache_salt is None else "cache_salt"
            raise OptionError(
                f"{name} with a saved state",
                "the option selects blocks of the prefix cache for a prompt, and a state already holds its blocks",
                "leave it out",
            )
        done = len(tokens) - state.prompt_length
        most = options.get("max_tokens")
        chosen = state.params.replace(**{**options, "n": 1, "max_tokens": None})
        if most is not None:
            checked = SamplingParams(max_tokens=most).max_tokens
            chosen = chosen.replace(max_tokens=done + (checked or 0))
        if len(tokens) >= self.context_size:
            raise self._overflow(f"{len(tokens)} tokens, including generated tokens,")
        generation = Generation(
            tokens[: state.prompt_length],
            self._plan(chosen),
            seed=state.seed if chosen.seed is None or "seed" not in options else chosen.seed,
            sample=state.row,
            stream=self._tokenizer.create_stream(after=tokens[: state.prompt_length]),
            context_size=self.context_size,
            output=tokens[state.prompt_length :],
        )
        generation.sampler = state
        generation.priority, generation.deadline, generation.keeps_sequence = (
            request_options.priority,
            request_options.deadline,
            request_options.keep_state,
        )
        generation.shift = self._shift(request_options)
        return [generation]

    def _check_least(self, length: int, params: SamplingParams) -> None:
        least = max(length + params.min_tokens, params.min_length)
        if least > self.context_size:
            raise ContextOverflowError(
                f"min_tokens = {params.min_tokens}, min_length = {params.min_length} require {least} tokens",
                f"the prompt has {length}, and prompt and reply together are limited to {self.context_size}",
                "lower these options, or load the model with a larger context",
            )

    def _numbered_prompt(
        self,
        prompt: Prompt,
        index: int,
        count: int,
        how: RequestOptions,
        known: Mapping[str, NDArray[np.int32]] | None,
    ) -> list[int]:
        """See _prompt. If there are several prompts, an error contains the index of the prompt."""
        try:
            return self._prompt(prompt, how, known)
        except StateError:
            raise
        except GenaiError as error:
            raise (located(error, f"prompt {index}") if count > 1 else error) from None

    def _prompt(
        self, prompt: Prompt, how: RequestOptions, known: Mapping[str, NDArray[np.int32]] | None = None
    ) -> list[int]:
        """Return a prompt's token ids. Raise ContextOverflowError if they leave no space for a reply.

        Args:
            how: the options of the prompt's text.
            known: see `batch`.
        """
        adds, literal = how.add_special_tokens, how.literal
        if isinstance(prompt, (bytes, Mapping)) or not _is_row(prompt):
            raise InputError(
                f"the prompt is {kind_of(prompt)}",
                "text or a list of token ids is expected",
                "pass a str; for messages, use chat",
            )
        if not isinstance(prompt, str):
            _check_no_prompt_options(how)
            row = token_row(prompt, self._config.vocab_size)
        elif known is not None and prompt in known and literal is None and not is_marked(prompt):
            row = token_row(self._tokenizer.as_prompt(prompt, known[prompt], adds), self._config.vocab_size)
        elif count := self._tokenizer.too_many_tokens(prompt, self.context_size):
            raise self._overflow(f"more than {count} tokens")
        else:
            ids = self._tokenizer.encode_prompt(prompt, add_special_tokens=adds, literal=literal)
            row = token_row(ids, self._config.vocab_size)
        if len(row) >= self.context_size:
            raise self._overflow(f"{len(row)} tokens")
        return row

    def _overflow(self, length: str) -> ContextOverflowError:
        return ContextOverflowError(
            f"the prompt has {length}",
            f"prompt and reply together are limited to {self.context_size} tokens",
            "shorten the prompt, or load the model with a larger context"
            if self.context_size < self._config.context_length
            else "shorten the prompt; the model supports no larger context",
        )

    def _plan(self, params: SamplingParams, shape: ReplyShape | None = None) -> SamplingPlan:
        vocab_size = self._model.decoder.vocab_size  # raises if the model was closed
        if params.top_k > vocab_size:
            raise OptionError(
                f"top_k = {params.top_k}",
                f"the vocabulary has {vocab_size} tokens",
                f"use 0 (all tokens) to {vocab_size}",
            )
        breakers = self._breakers.find(params.dry_sequence_breakers) if params.dry_multiplier > 0 else NO_BREAKERS
        grammar = grammar_of(params)
        if shape is not None:
            grammar = shape.around(grammar)
        return plan_sampling(
            params,
            vocab_size=vocab_size,
            eos_token_ids=self._config.eos_token_ids,
            breakers=breakers,
            matcher=None if grammar is None else self._guidance.matcher(grammar),
        )

    def _token_texts(self) -> list[str]:
        return self._tokenizer.decode_each(range(self._tokenizer.vocab_size))

    def _generation(
        self, prompt: Sequence[int], plan: SamplingPlan, index: int, adapters: AdapterMix | None, keep: Sequence[str]
    ) -> Generation:
        seed = request_seed(plan.params)
        stream = self._tokenizer.create_stream(keep=keep, cleans_up=plan.matcher is None, after=prompt)
        if plan.matcher is not None:
            stream.proceed()  # the text matches the grammar, even after a prompt without a text

        def make(sample: int, siblings: Sequence[Generation] = ()) -> Generation:
            return Generation(
                prompt,
                plan,
                seed=seed,
                sample=sample,
                stream=stream.copy(),
                context_size=self.context_size,
                prompt_index=index,
                siblings=siblings,
                adapters=adapters,
            )

        return make(0, [make(sample) for sample in range(1, plan.params.n)])


def _request_options_of(
    options: Mapping[str, Any], *, with_beams: bool = False
) -> tuple[RequestOptions, dict[str, Any]]:
    """Return split_options(options). Raise OptionError for beams if the call does not support them."""
    request_options, sampling = split_options(options)
    if request_options.beams is not None and not with_beams:
        raise OptionError(
            f"num_beams = {request_options.beams.num_beams}",
            "this call delivers tokens as they are generated, but the outputs of a beam search are known only at its "
            "end",
            "use LLM.generate",
        )
    if request_options.beams is not None and request_options.keep_state:
        raise OptionError(
            "keep_state cannot be used with num_beams",
            "a beam search keeps no sequence after its end",
            "leave one of the two out",
        )
    return request_options, sampling


def _check_no_prompt_options(options: RequestOptions) -> None:
    """Raise OptionError if options apply to a text, which the request does not have."""
    for name in PROMPT_OPTIONS:
        value = getattr(options, name)
        if value is not None:
            raise OptionError(
                f"{name} = {value} without a text",
                "the option applies to the text of a prompt, not to token ids or to a saved state",
                "leave it out, or pass the prompt as a text",
            )


def _as_list(prompts: Any) -> Sequence[Prompt]:
    """Return prompts as a list. A row of ids is a single prompt; a list of rows or texts is several prompts."""
    if isinstance(prompts, (str, bytes)) or not _is_row(prompts):
        return [prompts]
    rows: Any = prompts if isinstance(prompts, Sequence) else np.asarray(prompts)
    if not len(rows):
        raise InputError("the list of prompts is empty", "there is nothing to complete", "pass at least one prompt")
    return [prompts] if isinstance(rows[0], (int, float)) or getattr(rows[0], "ndim", 1) == 0 else rows


def _per_prompt(name: str, value: Any, count: int) -> Sequence[Any]:
    """Return one value per prompt, from one value for all prompts or one per prompt."""
    values: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        names = "adapters" if name == "adapter" else name
        raise OptionError(
            f"there are {len(values)} {names} for {count} prompts",
            f"one {name} for all prompts, or one per prompt, is expected",
            f"pass as many {names} as prompts",
        )
    return values


def _is_row(value: Any) -> bool:
    """Return True if the value is a string or a sequence of any kind."""
    return isinstance(value, Sequence) or (hasattr(value, "__array__") and np.ndim(value) > 0)
