"""A text cut into tokens and windows, and the logits that score it, in pieces that fit into memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..engine.decoder import compute
from ..engine.sequence import DecoderSequence
from ..errors import InputError, OptionError
from ..text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..engine.decoder import Decoder
    from ..engine.sequence import Logits
    from ..models.model import Model


# Logits kept at once: 150k tokens of vocabulary allow 223 rows.
_MOST_LOGITS_BYTES = 1 << 27
_MOST_ROWS = 512


@dataclass(frozen=True)
class ScoringProgress:
    """How far an evaluation is: tokens scored so far and in all, and what it took.

    Attributes:
        computed: tokens fed so far, those that only give context included.
    """

    scored: int
    total: int
    computed: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.computed / self.seconds if self.seconds else 0.0


ProgressCallback = Callable[[ScoringProgress], None]


@dataclass(frozen=True)
class ScoredText:
    """What is scored, and how.

    Attributes:
        tokens: int64 [n]; tokens[1:] are scored.
        bos: the id that every window begins with in place of its first token; None = no BOS.
        num_bytes: UTF-8 bytes of the text that tokens[1:] stand for.
        windows: see plan_windows.
    """

    tokens: NDArray[np.int64]
    bos: int | None
    num_bytes: int
    window: int
    stride: int
    windows: tuple[Window, ...]

    def computed(self, done: ScoringProgress) -> dict[str, Any]:
        """How it was cut and what it took, as results say it."""
        windows = {"windows": len(self.windows), "window": self.window, "stride": self.stride}
        timings = {"seconds": done.seconds, "tokens_per_second": done.tokens_per_second}
        return {**windows, "bos": self.bos is not None, **timings}

    @property
    def num_scored(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class ScoredRows:
    """Logits float32 [rows, vocab], and per row the token that follows in the text, int64 [rows]."""

    logits: Logits
    targets: NDArray[np.int64]
    computed: int


def encode_prompt(model: Model, text: str, bos: bool | None = None) -> NDArray[np.int64]:
    """Token ids of a text, with BOS in front if wanted.

    Args:
        bos: whether the text begins with the model's BOS; None = as its tokenizer does by itself.

    Raises:
        OptionError: bos=True, and the model has none.
        InputError: the text has no tokens, or an id that the model does not have.
    """
    return _encode(model, Tokenizer(model), text, bos)[0]


def _encode(model: Model, tokenizer: Tokenizer, text: str, bos: bool | None) -> tuple[NDArray[np.int64], int | None]:
    """The tokens, and the BOS in front of them if there is to be one."""
    beginning = _bos_id(tokenizer, bos)
    tokens = tokenizer.encode(text).astype(np.int64)
    if not len(tokens):
        raise InputError("the text has no tokens", "there is nothing to compute", "give some text")
    vocab_size = model.config.model.vocab_size
    if int(tokens.max()) >= vocab_size:
        raise InputError(
            f"the text has token {int(tokens.max())}, the model's vocabulary ends at {vocab_size - 1}",
            "the tokenizer knows tokens that the model does not",
            "use the tokenizer.json that belongs to the model",
        )
    if beginning is not None and tokens[0] != beginning:
        tokens = np.concatenate(([beginning], tokens))
    return tokens, beginning


def _bos_id(tokenizer: Tokenizer, bos: bool | None) -> int | None:
    known = tokenizer.bos_token_id
    if bos is None:
        tokenizer.update_options(add_special_tokens=True)
        first = tokenizer.encode("a")[:1].tolist()
        tokenizer.update_options(add_special_tokens=False)
        bos = known is not None and first == [known]
    if bos and known is None:
        raise OptionError("bos = True", "the model has no beginning-of-sequence token", "leave the option out")
    return known if bos else None


def prepare_text(model: Model, text: str, window: int | None, stride: int | None, bos: bool | None) -> ScoredText:
    """Tokens and windows of a text; raises as checked_window and encode_prompt do, and InputError below 2 tokens."""
    size, step = checked_window(window, stride, model.config.model.context_length)
    tokenizer = Tokenizer(model)
    tokens, beginning = _encode(model, tokenizer, text, bos)
    if len(tokens) < 2:
        raise InputError("the text has 1 token", "only a token after another one can be scored", "give a longer text")
    # The first token is not scored, so its bytes do not count; a BOS that was put in front has none.
    tokenizer.update_options(skip_special_tokens=False)
    unscored = tokenizer.decode(tokens[:1])
    num_bytes = len(text.encode("utf-8")) - (len(unscored.encode("utf-8")) if text.startswith(unscored) else 0)
    return ScoredText(tokens, beginning, num_bytes, size, step, tuple(plan_windows(len(tokens), size, step)))


def rope_thresholds(*decoders: Decoder) -> frozenset[int]:
    """Lengths after which these decoders compute a sequence anew with other RoPE tables."""
    thresholds = {getattr(decoder, "rope_threshold", None) for decoder in decoders}
    return frozenset(length for length in thresholds if length is not None)


def scored_rows(decoder: Decoder, text: ScoredText, thresholds: frozenset[int]) -> Iterator[ScoredRows]:
    """The logits that predict tokens[1:], in order and in pieces that fit into memory.

    Args:
        thresholds: rope_thresholds of this decoder and of those that are read side by side with it: the pieces depend
            on them and on the size of the vocabulary only.
    """
    most_rows = max(1, min(_MOST_ROWS, _MOST_LOGITS_BYTES // (4 * decoder.vocab_size)))
    for window in text.windows:
        fed = text.tokens[window.begin : window.end].tolist()
        if text.bos is not None:
            fed[0] = text.bos
        context = window.scored_from - window.begin
        with closing(decoder.open()) as sequence:
            if context:
                sequence.append(fed[:context], together=len(fed))
                pending_logits(decoder, sequence)
            computed = context
            for first, last in chunks(context, len(fed), most_rows, thresholds):
                sequence.append(fed[first:last], together=len(fed))
                logits = pending_logits(decoder, sequence, all_rows=last - first > 1)
                targets = text.tokens[window.begin + first + 1 : window.begin + last + 1]
                yield ScoredRows(logits, targets, computed + last - first)
                computed = 0


def pending_logits(
    decoder: Decoder, sequence: DecoderSequence, *, all_rows: bool = False, token_budget: int | None = None
) -> Logits:
    """Compute one sequence's pending tokens: float32 [rows, vocab], of the last token or of all."""
    return compute(decoder, [sequence], all_rows=all_rows, token_budget=token_budget)[0]


class Meter:
    """Counts what was done and tells whoever wants to know."""

    def __init__(self, total: int, report: ProgressCallback | None) -> None:
        self._total, self._report = total, report
        self._scored = self._computed = 0
        self._begin = time.perf_counter()

    def add(self, scored: int, computed: int) -> None:
        self._scored += scored
        self._computed += computed
        if self._report is not None:
            self._report(self.progress())

    def progress(self) -> ScoringProgress:
        return ScoringProgress(self._scored, self._total, self._computed, time.perf_counter() - self._begin)


# Beyond this, a longer context changes perplexity little and costs much; --window says otherwise.
DEFAULT_WINDOW = 2048


@dataclass(frozen=True)
class Window:
    """Tokens [begin, end) are fed; the input at i predicts token i + 1, which is scored from `scored_from` on."""

    begin: int
    end: int
    scored_from: int


def plan_windows(num_tokens: int, window: int, stride: int) -> list[Window]:
    """Cover a text so that every token but the first is scored exactly once.

    A window spans `window` tokens, of which the last is only predicted, so window - 1 are fed. Each window begins
    `stride` tokens after the one before, and scores the tokens that no earlier window did; each of these has at least
    window - stride tokens before it. That is the definition of the sliding window in
    https://huggingface.co/docs/transformers/perplexity (its max_length and stride).

    Args:
        num_tokens: tokens of the text, at least 2.
        window, stride: 1 <= stride < window.
    """
    inputs = num_tokens - 1
    windows = [Window(0, min(window - 1, inputs), 0)]
    while windows[-1].end < inputs:
        begin = windows[-1].begin + stride
        windows.append(Window(begin, min(begin + window - 1, inputs), windows[-1].end))
    return windows


def chunks(begin: int, end: int, most_rows: int, thresholds: Collection[int] = ()) -> Iterator[tuple[int, int]]:
    """Cut [begin, end) into pieces of at most `most_rows`.

    The input that follows a threshold's number of others stands alone: there a model with long RoPE computes all of
    them anew, and its logits are wanted for that last one only.
    """
    edges = sorted({edge for length in thresholds for edge in (length, length + 1) if begin < edge < end})
    for first, last in pairwise((begin, *edges, end)):
        for start in range(first, last, most_rows):
            yield start, min(start + most_rows, last)


def checked_window(window: int | None, stride: int | None, context_length: int) -> tuple[int, int]:
    """Window and stride with their defaults: the context, at most DEFAULT_WINDOW, and half a window.

    Raises:
        OptionError: out of range, or a stride that would leave tokens without a prediction.
    """
    size = min(context_length, DEFAULT_WINDOW) if window is None else window
    _check_integer("window", size, 2, context_length, f"the model's context_length is {context_length}")
    step = max(1, size // 2) if stride is None else stride
    _check_integer("stride", step, 1, size - 1, f"windows of {size} tokens must overlap, or tokens are skipped")
    return size, step


def _check_integer(name: str, value: int, lowest: int, highest: int, why: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise OptionError(f"{name} = {value!r}", why, f"use {lowest} to {highest}")
