"""A text cut into tokens and windows, and the logits that score it, in chunks that fit into memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..engine.decoder import compute
from ..engine.sequence import DecoderSequence
from ..errors import InputError, OptionError, TokenizerError
from ..text.tokenizer import Tokenizer
from ..text.vocabulary import token_bytes

if TYPE_CHECKING:
    from ..engine.decoder import Decoder
    from ..engine.sequence import Logits
    from ..models.model import Model


# Maximum size in bytes of the logits in memory: 223 rows with a vocabulary of 150k tokens.
_MOST_LOGITS_BYTES = 1 << 27
_MOST_ROWS = 512


@dataclass(frozen=True)
class ScoringProgress:
    """The progress of an evaluation.

    Attributes:
        scored: tokens scored so far.
        total: tokens to score.
        computed: tokens fed to the model so far, including tokens that only provide context.
        seconds: time since the start.
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
    """The tokens and windows to score.

    Attributes:
        tokens: int64 [n].
        bos: id that replaces the first token of every window; None = no BOS.
        num_bytes: UTF-8 bytes of the scored tokens.
        window: tokens per window.
        stride: tokens from one window to the next.
        windows: see plan_windows.
    """

    tokens: NDArray[np.int64]
    bos: int | None
    num_bytes: int
    window: int
    stride: int
    windows: tuple[Window, ...]

    def computed(self, done: ScoringProgress) -> dict[str, Any]:
        """Return the windows and the timings, under the names of the fields of results."""
        windows = {"windows": len(self.windows), "window": self.window, "stride": self.stride}
        timings = {"seconds": done.seconds, "tokens_per_second": done.tokens_per_second}
        return {**windows, "bos": self.bos is not None, **timings}

    @property
    def num_scored(self) -> int:
        return sum(window.end - window.scored_from for window in self.windows)


@dataclass(frozen=True)
class ScoredRows:
    """Logits float32 [rows, vocab], the token after each row, int64 [rows], and the number of computed tokens."""

    logits: Logits
    targets: NDArray[np.int64]
    computed: int


def encode_prompt(model: Model, text: str, bos: bool | None = None) -> NDArray[np.int64]:
    """Return the token ids of text, with BOS first if `bos` requires it.

    Args:
        bos: True to begin with the model's BOS; None = the default of the model's tokenizer.

    Raises:
        OptionError: bos=True, and the model has no BOS.
        InputError: the text has no tokens, or has a token id that the model lacks.
    """
    return _encode(model, Tokenizer(model), text, bos)[0]


def _encode(model: Model, tokenizer: Tokenizer, text: str, bos: bool | None) -> tuple[NDArray[np.int64], int | None]:
    """Return the tokens, and the id of their BOS or None."""
    beginning = _bos_id(tokenizer, bos)
    tokens = tokenizer.encode(text).astype(np.int64)
    if not len(tokens):
        raise InputError("the text has no tokens", "empty text cannot be scored", "pass text that is not empty")
    vocab_size = model.config.model.vocab_size
    if int(tokens.max()) >= vocab_size:
        raise InputError(
            f"the text has the token id {int(tokens.max())}, but the model's largest token id is {vocab_size - 1}",
            "the tokenizer and the model must have the same vocabulary",
            "use the tokenizer.json that belongs to the model",
        )
    if beginning is not None and tokens[0] != beginning:
        tokens = np.concatenate(([beginning], tokens))
    return tokens, beginning


def _bos_id(tokenizer: Tokenizer, bos: bool | None) -> int | None:
    known = tokenizer.bos_token_id
    if bos is None:
        first = tokenizer.encode("a", add_special_tokens=True)[:1].tolist()
        bos = known is not None and first == [known]
    if bos and known is None:
        raise OptionError("bos = True", "the model has no beginning-of-sequence token", "omit bos")
    return known if bos else None


def prepare_text(model: Model, text: str, window: int | None, stride: int | None, bos: bool | None) -> ScoredText:
    """Return a text's tokens and windows; raises as checked_window and encode_prompt do, and for under 2 tokens."""
    size, step = checked_window(window, stride, model.config.model.context_length)
    tokenizer = Tokenizer(model)
    tokens, beginning = _encode(model, tokenizer, text, bos)
    if len(tokens) < 2:
        raise InputError(
            "the text has 1 token", "only a token that follows another token can be scored", "pass longer text"
        )
    windows = tuple(plan_windows(len(tokens), size, step))
    return ScoredText(tokens, beginning, _scored_bytes(tokenizer, text, tokens, windows), size, step, windows)


def _scored_bytes(tokenizer: Tokenizer, text: str, tokens: NDArray[np.int64], windows: Sequence[Window]) -> int:
    """Return the UTF-8 bytes of the scored tokens. An added BOS has no bytes."""
    tokenizer.update_options(skip_special_tokens=False)
    first = tokenizer.decode(tokens[:1])
    num_bytes = len(text.encode("utf-8")) - (len(first.encode("utf-8")) if text.startswith(first) else 0)
    unscored = [int(tokens[after.scored_from]) for before, after in pairwise(windows) if after.scored_from > before.end]
    return num_bytes - (_bytes_of(tokenizer, unscored) if unscored else 0)


def _bytes_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> int:
    """Return the UTF-8 bytes of separate tokens in the middle of a text."""
    try:
        vocabulary = token_bytes(tokenizer).tokens
    except TokenizerError:  # the bytes depend on the adjacent tokens
        return sum(len(tokenizer.decode([token]).encode("utf-8")) for token in tokens)
    return sum(len(vocabulary[token]) for token in tokens if token < len(vocabulary))


def rope_thresholds(*decoders: Decoder) -> frozenset[int]:
    """Return the sequence lengths after which these decoders recompute a sequence with other RoPE tables."""
    thresholds = {getattr(decoder, "rope_threshold", None) for decoder in decoders}
    return frozenset(length for length in thresholds if length is not None)


def scored_rows(decoder: Decoder, text: ScoredText, thresholds: frozenset[int]) -> Iterator[ScoredRows]:
    """Yield the logits that predict the tokens to score, in order and in chunks that fit into memory.

    Args:
        thresholds: rope_thresholds of this decoder and of all decoders that are scored alongside it. The chunks depend
            only on the thresholds and on the vocabulary size, so that the decoders' chunks match.
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
    """Compute one sequence's pending tokens; return float32 [rows, vocab] for the last token or for all tokens."""
    return compute(decoder, [sequence], all_rows=all_rows, token_budget=token_budget)[0]


class Meter:
    """A counter of scored and computed tokens that reports the progress."""

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


# A longer context hardly changes the perplexity but is expensive to compute; --window overrides this length.
DEFAULT_WINDOW = 2048


@dataclass(frozen=True)
class Window:
    """A window: tokens [begin, end) are fed. Input i predicts token i + 1, which is scored if i >= `scored_from`."""

    begin: int
    end: int
    scored_from: int


def windows_text(windows: int, window: int, stride: int, bos: bool) -> str:
    """Describe how a text was cut into windows."""
    return f"{windows} of up to {window} tokens, stride {stride}, {'with BOS' if bos else 'no BOS'}"


def plan_windows(num_tokens: int, window: int, stride: int) -> list[Window]:
    """Cover a text with windows so that every token with context is scored exactly once.

    A window spans `window` tokens. The last token is only predicted, so window - 1 tokens are fed. Each window begins
    `stride` tokens after the previous window and scores the tokens that no earlier window scored. At least window -
    stride tokens of context precede each token that is scored. If stride equals window, the windows do not overlap, and
    the first token of a window has no context and is not scored. This is the sliding window of
    https://huggingface.co/docs/transformers/perplexity (max_length and stride on that page).

    Args:
        num_tokens: tokens of the text, at least 2.
        window: tokens per window.
        stride: 1 <= stride <= window.
    """
    inputs = num_tokens - 1
    windows = [Window(0, min(window - 1, inputs), 0)]
    while windows[-1].end < inputs and (begin := windows[-1].begin + stride) < inputs:
        windows.append(Window(begin, min(begin + window - 1, inputs), max(begin, windows[-1].end)))
    return windows


def chunks(begin: int, end: int, most_rows: int, thresholds: Collection[int] = ()) -> Iterator[tuple[int, int]]:
    """Cut [begin, end) into chunks of at most `most_rows`.

    An input that follows exactly a threshold's number of tokens has a separate chunk. At that input, a model with long
    RoPE recomputes the whole sequence, but only the logits of this last input are needed.
    """
    edges = sorted({edge for length in thresholds for edge in (length, length + 1) if begin < edge < end})
    for first, last in pairwise((begin, *edges, end)):
        for start in range(first, last, most_rows):
            yield start, min(start + most_rows, last)


def checked_window(window: int | None, stride: int | None, context_length: int) -> tuple[int, int]:
    """Return window and stride; the defaults are the context, but at most DEFAULT_WINDOW, and half a window.

    Raises:
        OptionError: a value is out of range, or the stride would leave out tokens between windows.
    """
    size = min(context_length, DEFAULT_WINDOW) if window is None else window
    _check_integer("window", size, 2, context_length, f"the model's context_length is {context_length}")
    step = max(1, size // 2) if stride is None else stride
    _check_integer("stride", step, 1, size, f"between windows of {size} tokens, tokens would be left out")
    return size, step


def _check_integer(name: str, value: int, lowest: int, highest: int, why: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise OptionError(f"{name} = {value!r}", why, f"use a value from {lowest} to {highest}")
