"""What is to be done with rows of logits, for every device: declared once."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from .checks import Float32, check

# Steps, named as in `genai.SamplingParams.samplers`; a row ends at the first END.
Step = IntEnum("Step", "END PENALTIES DRY TOP_N_SIGMA TOP_K TYPICAL_P TOP_P MIN_P XTC TEMPERATURE MIROSTAT", start=0)
# Numbers that steer them, named as the options are: a temperature of 0 = the most likely token, an infinite LAST_N =
# the whole history, an NGRAM_SIZE of 0 = any may repeat. MIROSTAT_LIMIT, in bits, is no option: it is steered.
Setting = IntEnum(
    "Setting",
    "TEMPERATURE TOP_K TOP_P MIN_P TYPICAL_P TOP_N_SIGMA XTC_PROBABILITY XTC_THRESHOLD REPETITION_PENALTY "
    "PRESENCE_PENALTY FREQUENCY_PENALTY PENALTY_LAST_N DRY_MULTIPLIER DRY_BASE DRY_ALLOWED_LENGTH DRY_LAST_N "
    "MIROSTAT_LIMIT NO_REPEAT_NGRAM_SIZE",
    start=0,
)
# The row's logits (an index, or -1 - an index into `replaced`); its edits and its tokens, from first to end; the number
# of its mask, 1 for the first, or 0 for none; the index of the first generated token among its tokens (from the first);
# how many tokens at the end DRY may match.
Span = IntEnum("Span", "SOURCE FIRST_EDIT END_EDIT FIRST_TOKEN END_TOKEN MASK FIRST_OUTPUT DRY_LIMIT", start=0)
MAX_STEPS, NUM_SETTINGS, NUM_SPANS = len(Step) - 1, len(Setting), len(Span)
# What came of a row.
FINE, HAS_NAN, HAS_INFINITY, ALL_MASKED = 0, 1, 2, 3


# What is to be done with a row. Random numbers depend on nothing but the counter: seed, row in the request, position.
ROW = np.dtype(
    [
        ("steps", np.int64, MAX_STEPS),
        ("settings", np.float64, NUM_SETTINGS),
        ("counter", np.uint64, 3),
        ("span", np.int64, NUM_SPANS),
    ]
)
# Its two halves as bytes: what a request asks for, and what is the row's own. Where Mirostat's limit lies in the first.
ASKED, OWN = struct.Struct(f"={MAX_STEPS}q{NUM_SETTINGS}d"), struct.Struct(f"=3Q{NUM_SPANS}q")
LIMIT_PLACE = 8 * (MAX_STEPS + Setting.MIROSTAT_LIMIT)
_RARE = {Step.DRY, Step.TOP_N_SIGMA, Step.TYPICAL_P, Step.XTC, Step.MIROSTAT}
_SPANS = "source", "first edit", "end of the edits", "first token", "end of the tokens", "mask"


def is_plain(steps: Iterable[int], settings: NDArray[np.float64]) -> bool:
    """Whether a row takes none of the steps that few ask for."""
    return _RARE.isdisjoint(steps) and not settings[Setting.NO_REPEAT_NGRAM_SIZE]


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits in a mask with a bit per token."""
    return -(-vocab_size // 32)


@dataclass(frozen=True)
class SamplingBatch:
    """What is to be done with A rows.

    Attributes:
        rows: ROW [A].
        plain: whether all are (`is_plain`): a device may have a smaller kernel for them.
        replaced: float32 [R, V], logits that stand in for the given ones.
        edit_ids, edit_values: int32 and float32 [E]: added to the logits before everything else; -inf masks.
        tokens: int32 [L], the histories (or as much of them as counts), end to end.
        masks: uint32 [M, mask_words(V)]: bit token % 32 of word token // 32 says whether a token may be chosen.
        checked: for how many logits of which width `check` has found it right already; None = for none.
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
        """Every index is inside its array: machine code does not look.

        Raises:
            ValueError: one is not, or an array has another type or shape.
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
                raise ValueError(f"{name} reach from {ids.min()} to {ids.max()}, expected 0 to {vocab_size - 1}")
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
        """The same batch for rows that have so many tokens now; what was checked stays so."""
        rows = self.rows.copy()
        rows["counter"][:, 2] = lengths
        return replace(self, rows=rows)


def check_rows(logits: Float32, rows: NDArray[np.int64], top: int, vocab_size: int) -> None:
    """What `Sampler.log_normalizers` is given."""
    check("logits", logits, (None, vocab_size))
    check_row_numbers(rows, len(logits), top, vocab_size)


def check_row_numbers(rows: NDArray[np.int64], count: int, top: int, vocab_size: int) -> None:
    """What `Sampler.log_normalizers` is given besides logits, of which there are `count` rows."""
    check("rows", rows, (None,), np.dtype(np.int64))
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < count:
        raise ValueError(f"rows reach from {rows.min()} to {rows.max()}, expected 0 to {count - 1}")
    if not 0 <= top <= vocab_size:
        raise ValueError(f"top is {top}, expected 0 to {vocab_size}")
