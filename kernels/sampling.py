"""The description of a sampling step for rows of logits, shared by all devices."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from .checks import Float32, check

# Steps, named as in `genai.SamplingParams.samplers`. The first END ends the list of a row's steps.
Step = IntEnum("Step", "END PENALTIES DRY TOP_N_SIGMA TOP_K TYPICAL_P TOP_P MIN_P XTC TEMPERATURE MIROSTAT", start=0)
# Parameters of the steps, named after the options. A TEMPERATURE of 0 selects the likeliest token, an infinite LAST_N
# covers the whole history, and an NGRAM_SIZE of 0 allows every repetition. MIROSTAT_LIMIT, in bits, is not an option,
# because Mirostat adjusts the limit.
Setting = IntEnum(
    "Setting",
    "TEMPERATURE TOP_K TOP_P MIN_P TYPICAL_P TOP_N_SIGMA XTC_PROBABILITY XTC_THRESHOLD REPETITION_PENALTY "
    "PRESENCE_PENALTY FREQUENCY_PENALTY PENALTY_LAST_N DRY_MULTIPLIER DRY_BASE DRY_ALLOWED_LENGTH DRY_LAST_N "
    "MIROSTAT_LIMIT NO_REPEAT_NGRAM_SIZE",
    start=0,
)
# SOURCE is the row's logits: an index, or -1 minus an index into `replaced`. The next four fields delimit its edits and
# its tokens. MASK is the number of its mask, starting at 1, or 0 for no mask. FIRST_OUTPUT is the index of the first
# generated token, counted from FIRST_TOKEN. DRY_LIMIT is the number of tokens at the end that DRY may match.
Span = IntEnum("Span", "SOURCE FIRST_EDIT END_EDIT FIRST_TOKEN END_TOKEN MASK FIRST_OUTPUT DRY_LIMIT", start=0)
MAX_STEPS, NUM_SETTINGS, NUM_SPANS = len(Step) - 1, len(Setting), len(Span)
# The status of a row.
FINE, HAS_NAN, HAS_INFINITY, ALL_MASKED = 0, 1, 2, 3


# The description of a row. Its random numbers depend only on the counter, which holds the seed, the row in the request,
# and the position.
ROW = np.dtype(
    [
        ("steps", np.int64, MAX_STEPS),
        ("settings", np.float64, NUM_SETTINGS),
        ("counter", np.uint64, 3),
        ("span", np.int64, NUM_SPANS),
    ]
)
# The two halves of ROW as bytes: the half that all rows of a request share, and the half that is specific to the row.
# LIMIT_PLACE is the offset of Mirostat's limit in the first half.
ASKED, OWN = struct.Struct(f"={MAX_STEPS}q{NUM_SETTINGS}d"), struct.Struct(f"=3Q{NUM_SPANS}q")
LIMIT_PLACE = 8 * (MAX_STEPS + Setting.MIROSTAT_LIMIT)
_RARE = {Step.DRY, Step.TOP_N_SIGMA, Step.TYPICAL_P, Step.XTC, Step.MIROSTAT}
_SPANS = "source", "first edit", "end of the edits", "first token", "end of the tokens", "mask"


def is_plain(steps: Iterable[int], settings: NDArray[np.float64]) -> bool:
    """Return True if a row uses none of the rarely used steps."""
    return _RARE.isdisjoint(steps) and not settings[Setting.NO_REPEAT_NGRAM_SIZE]


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words in a mask with one bit per token."""
    return -(-vocab_size // 32)


@dataclass(frozen=True)
class SamplingBatch:
    """The description of A rows to sample.

    Attributes:
        rows: ROW [A].
        plain: True if all rows are plain (see `is_plain`), for which a device may use a smaller kernel.
        replaced: float32 [R, V], logits that replace the given ones.
        edit_ids, edit_values: int32 and float32 [E], numbers to add to the logits before all steps; -inf masks a token.
        tokens: int32 [L], the relevant parts of the histories, end to end.
        masks: uint32 [M, mask_words(V)]; bit token % 32 of word token // 32 is 1 if the token is allowed.
        checked: number and width of the logits that `check` has already accepted; None = not checked.
    """

    rows: NDArray[np.void]
    plain: bool
    replaced: NDArray[np.float32]
    edit_ids: NDArray[np.int32]
    edit_values: NDArray[np.float32]
    tokens: NDArray[np.int32]
    masks: NDArray[np.uint32]
    checked: tuple[int, int] | None = None

    def check(self, num_logits: int, vocab_size: int) -> None:
        """Raise an error unless every index is inside its array, because compiled kernels do not check indices.

        Raises:
            ValueError: an index is outside its array, or an array has the wrong type or shape.
        """
        if self.checked == (num_logits, vocab_size):
            return
        edits, tokens, masks = len(self.edit_ids), len(self.tokens), len(self.masks)
        check("rows", self.rows, (None,), ROW)
        check("replaced", self.replaced, (None, vocab_size))
        check("edit_ids", self.edit_ids, (edits,), np.dtype(np.int32))
        check("edit_values", self.edit_values, (edits,))
        check("tokens", self.tokens, (tokens,), np.dtype(np.int32))
        check("masks", self.masks, (None, mask_words(vocab_size)), np.dtype(np.uint32))
        for name, ids in (("edit_ids", self.edit_ids), ("tokens", self.tokens)):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                raise ValueError(f"{name} range from {ids.min()} to {ids.max()}, expected 0 to {vocab_size - 1}")
        lowest, highest = -len(self.replaced), num_logits - 1
        limits = (lowest, highest), (0, edits), (0, edits), (0, tokens), (0, tokens), (0, masks)
        if not len(self.rows):
            return
        spans = self.rows["span"]
        least = most = spans[0].tolist()
        if len(spans) > 1:
            least, most = spans.min(axis=0).tolist(), spans.max(axis=0).tolist()
        for name, (low, high), smallest, largest in zip(_SPANS, limits, least, most, strict=False):
            if not low <= smallest <= largest <= high:
                raise ValueError(f"{name} of a row is {smallest} to {largest}, expected {low} to {high}")
        object.__setattr__(self, "checked", (num_logits, vocab_size))

    def with_counters(self, lengths: Sequence[int]) -> SamplingBatch:
        """Return the same batch for rows that now have `lengths` tokens. The new batch does not need another check."""
        rows = self.rows.copy()
        rows["counter"][:, 2] = lengths
        return replace(self, rows=rows)


def check_rows(logits: Float32, rows: NDArray[np.int64], top: int, vocab_size: int) -> None:
    """Check the arguments of `Sampler.log_normalizers`."""
    check("logits", logits, (None, vocab_size))
    check_row_numbers(rows, len(logits), top, vocab_size)


def check_row_numbers(rows: NDArray[np.int64], count: int, top: int, vocab_size: int) -> None:
    """Check the arguments of `Sampler.log_normalizers` except the logits, which have `count` rows."""
    check("rows", rows, (None,), np.dtype(np.int64))
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < count:
        raise ValueError(f"rows range from {rows.min()} to {rows.max()}, expected 0 to {count - 1}")
    if not 0 <= top <= vocab_size:
        raise ValueError(f"top is {top}, expected 0 to {vocab_size}")
