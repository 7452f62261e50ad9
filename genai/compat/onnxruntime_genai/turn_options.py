"""Options of a turn or a request of the Engine, with the names and checks of onnxruntime-genai."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...engine.sampling.grammar import Grammar
from ...engine.sampling.params import SamplingParams
from ...engine.sampling.search_options import SEARCH_OPTIONS, checked
from ...errors import InputError, OptionError
from .guidance import guidance_grammar

if TYPE_CHECKING:  # see TurnOptions
    from .engine import Request

_MOST_STOPS, _MOST_STOP_BYTES = 16, 2**14


class RequestOptions:
    """Options of a request."""

    def __init__(self) -> None:
        self.max_session_tokens = 0

    def set_max_session_tokens(self, count: int) -> None:
        """Set the maximum number of tokens of all turns together, including prompts; 0 = fill the context."""
        self.max_session_tokens = _whole("max_session_tokens", count)


class TurnOptions:
    """Options of one turn. Options that are not set have the defaults of the model's folder.

    Args:
        request: the request of the turn.
    """

    def __init__(self, request: Request) -> None:
        from .engine import Request  # engine imports this module

        if not isinstance(request, Request):
            raise InputError(
                f"TurnOptions needs a Request, not {type(request).__name__}",
                "a turn belongs to a request",
                "pass a Request",
            )
        self.request = request
        self.reset()

    def reset(self) -> None:
        """Unset all options."""
        self._search: dict[str, Any] = {}
        self._max_tokens = self._min_tokens = 0
        self._stops: tuple[str, ...] = ()
        self._seed: int | None = None
        self._grammar: Grammar | None = None

    def set_max_generated_tokens(self, count: int) -> None:
        """Set the maximum number of tokens that the turn generates; 0 = no limit."""
        self._max_tokens = _whole("max_generated_tokens", count)

    def set_min_generated_tokens(self, count: int) -> None:
        """Set the minimum number of tokens before EOS may be generated."""
        self._min_tokens = _whole("min_generated_tokens", count)

    def set_do_sample(self, value: bool) -> None:
        """Sample tokens (True), or choose the most likely token (False)."""
        self._search["do_sample"] = checked("do_sample", value)

    def set_temperature(self, value: float) -> None:
        """Set the divisor of the logits; 0 chooses the most likely token."""
        self._search["temperature"] = checked("temperature", value)

    def set_top_k(self, value: int) -> None:
        """Sample from the k most likely tokens; 0 = all."""
        self._search["top_k"] = checked("top_k", value)

    def set_top_p(self, value: float) -> None:
        """Sample from the most likely tokens up to this total probability."""
        self._search["top_p"] = checked("top_p", value)

    def set_repetition_penalty(self, value: float) -> None:
        """Set the penalty on tokens that already occurred; above 1 makes them less likely."""
        self._search["repetition_penalty"] = checked("repetition_penalty", value)

    def set_no_repeat_ngram_size(self, value: int) -> None:
        """Set the size of n-grams that must not repeat; 0 = off."""
        self._search["no_repeat_ngram_size"] = checked("no_repeat_ngram_size", value)

    def set_seed(self, seed: int) -> None:
        """Set the random seed of the turn."""
        self._seed = _whole("seed", seed, 2**64 - 1)

    def clear_seed(self) -> None:
        """Unset the seed, and continue with the request's random numbers."""
        self._seed = None

    def set_stop_strings(self, texts: Sequence[str]) -> None:
        """Set the strings that end the turn: at most 16, with a total size of at most 16 KiB."""
        if isinstance(texts, str) or not all(isinstance(text, str) and text for text in texts):
            raise OptionError(
                f"the stop strings are {texts!r:.80}",
                "a list of non-empty strings is expected",
                "pass a list of strings",
            )
        if len(texts) > _MOST_STOPS or sum(len(text.encode()) for text in texts) > _MOST_STOP_BYTES:
            raise OptionError(
                f"{len(texts)} stop strings were given",
                f"at most {_MOST_STOPS} stop strings with a total size of 16 KiB are allowed",
                "use fewer or shorter stop strings",
            )
        self._stops = tuple(texts)

    def set_guidance(self, type: str, data: str) -> None:
        """Make the turn's reply match a grammar. Tokens that the grammar determines are still generated one by one.

        Args:
            type: "json_schema", "regex" or "lark_grammar"; "" with data "" = none.
            data: the schema as JSON text, the expression, or the grammar.

        Raises:
            OptionError: the type is unknown, or only one of type and data is given. If the grammar cannot be used,
                Request.begin_turn raises GrammarError.
        """
        self._grammar = guidance_grammar(type, data)

    def clear_guidance(self) -> None:
        """Allow any text as the reply."""
        self._grammar = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return self._stops

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that the reply must match."""
        return self._grammar

    @property
    def seed(self) -> int | None:
        """The seed, if it was set."""
        return self._seed

    def sampling(self) -> SamplingParams:
        """Combine these options with the model's defaults.

        Raises:
            OptionError: options contradict each other.
        """
        config = self.request.engine.model.config
        defaults = {name: value for name, value in config.search.items() if name in SEARCH_OPTIONS}
        asked = {**defaults, **self._search}
        draws = asked.get("do_sample", False) and asked.get("temperature") != 0 and asked.get("top_k") != 1
        if not draws and (given := sorted({"top_p", "temperature"} & set(self._search))):
            for name in given:
                if self._search[name]:
                    raise OptionError(
                        f"{name} = {self._search[name]} cannot be used for a turn that does not sample",
                        "greedy decoding chooses the most likely token",
                        "call set_do_sample(True), or omit the option",
                    )
        if draws and not asked.get("top_k", SEARCH_OPTIONS["top_k"].default) and not asked.get("top_p"):
            raise OptionError(
                "a turn that samples has neither top_k nor top_p",
                "onnxruntime-genai requires one of these two options",
                "set top_k above 0, or set top_p = 1 for the whole vocabulary",
            )
        asked["top_k"] = min(asked.get("top_k", SEARCH_OPTIONS["top_k"].default), config.model.vocab_size)
        asked.pop("min_length", None)
        params = SamplingParams.from_search_options(asked)
        return params.replace(min_tokens=self._min_tokens, max_tokens=self._max_tokens or None)


def _whole(name: str, value: Any, most: int = 2**31 - 1) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= int(value) <= most:
        raise OptionError(f"{name} = {value!r:.40}", f"an integer from 0 to {most} is expected", "pass an int")
    return int(value)
