"""Which part of a long text is fed at once, and which of its tokens are scored there: pure policy."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise

from ..errors import OptionError

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
