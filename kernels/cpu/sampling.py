"""The kernel that takes rows through their steps, and the typed function that calls it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import Float32, check
from .jit import Kernel, kernel
from .lazy import helper
from .sampling_steps import codes
from .sampling_steps.batch import SLOT_ARRAYS, SamplingBatch, Workspace
from .sampling_steps.draw import draw, most_likely
from .sampling_steps.exclusion import xtc
from .sampling_steps.passes import close, scan, total_weight
from .sampling_steps.philox import uniforms
from .sampling_steps.repetition import dry, edit, forbid_repeated_ngrams, penalties
from .sampling_steps.row import COUNT, FINE, MAXIMUM, OPEN, STATUS, TEMPERATURE, TOKENS, WEIGHTS, Row, current, reset
from .sampling_steps.selection import weigh
from .sampling_steps.truncation import min_p, mirostat, top_k, top_n_sigma, top_p, typical_p
from .team import Team, run

_NANOSECONDS_PER_LOGIT = 0.5
_NO_DISTRIBUTIONS = np.empty((0, 0), np.float64)
_NO_DISTRIBUTIONS.flags.writeable = False
# Rows of so few logits become a list of candidates at once, exact to float64.
_SHORT_ROW = 1024


@helper
def _last(tokens: Any, count: float) -> Any:
    """The last `count` tokens, which may be infinite."""
    return tokens[int(max(0.0, tokens.shape[0] - count)) :]


@helper
def _apply(row: Row, step: int, settings: Any, tokens: Any, span: Any, coin: float, same: Any) -> None:
    """One step of a row."""
    if step == codes.PENALTIES:
        window = _last(tokens, settings[codes.PENALTY_LAST])
        first_output = span[codes.FIRST_OUTPUT] - (tokens.shape[0] - window.shape[0])
        presence, frequency = settings[codes.PRESENCE], settings[codes.FREQUENCY]
        penalties(row, window, first_output, settings[codes.REPETITION], presence, frequency)
    elif step == codes.TOP_K:
        top_k(row, int(settings[codes.KEPT_TOKENS]))
    elif step == codes.TOP_P:
        top_p(row, settings[codes.NUCLEUS])
    elif step == codes.MIN_P:
        min_p(row, settings[codes.RELATIVE_PROBABILITY])
    elif step == codes.TEMPERATURE:
        row.state[TEMPERATURE] *= settings[codes.DIVISOR]


@helper
def _apply_any(row: Row, step: int, settings: Any, tokens: Any, span: Any, coin: float, same: Any) -> None:
    """One step of a row, one that few ask for included."""
    if step == codes.DRY:
        window = _last(tokens, settings[codes.DRY_LAST])
        allowed = int(settings[codes.DRY_ALLOWED_LENGTH])
        multiplier, base = settings[codes.DRY_MULTIPLIER], settings[codes.DRY_BASE]
        dry(row, window, span[codes.DRY_LIMIT], multiplier, base, allowed, same)
    elif step == codes.TOP_N_SIGMA:
        top_n_sigma(row, settings[codes.NUM_SIGMAS])
    elif step == codes.TYPICAL_P:
        typical_p(row, settings[codes.TYPICAL_MASS])
    elif step == codes.XTC:
        if coin < settings[codes.EXCLUSION_PROBABILITY]:
            xtc(row, settings[codes.EXCLUSION_THRESHOLD])
    elif step == codes.MIROSTAT:
        mirostat(row, settings[codes.MOST_SURPRISE])
    else:
        _apply(row, step, settings, tokens, span, coin, same)


@helper
def _forbid(row: Row, settings: Any, tokens: Any) -> None:
    """Mask what would repeat an n-gram, where that is wanted."""
    if settings[codes.NGRAM_SIZE] > 0:
        forbid_repeated_ngrams(row, tokens, int(settings[codes.NGRAM_SIZE]))


@helper
def _forbid_nothing(row: Row, settings: Any, tokens: Any) -> None:
    """No n-gram is forbidden."""


@helper
def _look(row: Row, settings: Any) -> None:
    """See whether the row can be sampled."""
    scan(row)
    if row.flags[STATUS] == FINE and row.given.shape[0] <= _SHORT_ROW and settings[codes.GREEDY] == 0:
        close(row, -math.inf)


@helper
def _write_distribution(row: Row, out: Any, certain: int) -> None:
    """Probabilities of all tokens, float64 [V]; `certain` is a token that has them all, or -1."""
    for token in range(out.shape[0]):
        out[token] = 0.0
    if certain >= 0:
        out[certain] = 1.0
    elif row.flags[OPEN]:
        total, _ = total_weight(row)
        logits = current(row)
        for token in range(out.shape[0]):
            out[token] = math.exp((logits[token] - row.state[MAXIMUM]) / row.state[TEMPERATURE]) / total
    else:
        total = weigh(row)
        for i in range(row.flags[COUNT]):
            out[row.ids[TOKENS, i]] = row.numbers[WEIGHTS, i] / total


@helper
def _write_nothing(row: Row, out: Any, certain: int) -> None:
    """Nobody wants the probabilities."""


_SIGNATURE = (
    "void(float32[:,::1], float32[:,::1], int64[:,::1], float64[:,::1], uint64[:,::1], int64[:,::1], int32[::1], "
    f"float32[::1], int32[::1], {SLOT_ARRAYS}, int64[::1], float64[::1], int64[::1], float64[:,::1], int32[:,::1], "
    "int64, int64)"
)
# Steps, by their codes, that `sample_slots` does not know.
_IS_RARE = np.zeros(codes.MIROSTAT + 1, bool)
_IS_RARE[[codes.DRY, codes.TOP_N_SIGMA, codes.TYPICAL_P, codes.XTC, codes.MIROSTAT]] = True
_IS_RARE.flags.writeable = False


def _sampler(name: str, apply: Any, forbid: Any, write: Any) -> Kernel:
    """A kernel that takes rows through those steps that `apply` knows."""

    def sample(
        logits: Any, replaced: Any, steps: Any, settings: Any, counters: Any, spans: Any, edit_ids: Any,
        edit_values: Any, tokens: Any, own: Any, blocks: Any, numbers: Any, ids: Any, state: Any, flags: Any,
        chosen: Any, probabilities: Any, status: Any, distributions: Any, same: Any, begin: int, end: int,
    ) -> None:  # fmt: skip
        """Slots [begin, end): each samples its share of the rows, one after another."""
        count, slots = steps.shape[0], own.shape[0]
        for slot in range(begin, end):
            for i in range(slot * count // slots, (slot + 1) * count // slots):
                span, setting = spans[i], settings[i]
                source = span[codes.SOURCE]
                row = Row(
                    logits[source] if source >= 0 else replaced[-1 - source], own[slot], blocks[slot], numbers[slot],
                    ids[slot], state[slot], flags[slot],
                )  # fmt: skip
                history = tokens[span[codes.FIRST_TOKEN] : span[codes.END_TOKEN]]
                edited = slice(span[codes.FIRST_EDIT], span[codes.END_EDIT])
                uniform, coin = uniforms(counters[i, 0], counters[i, 1], counters[i, 2])
                reset(row)
                edit(row, edit_ids[edited], edit_values[edited])
                forbid(row, setting, history)
                _look(row, setting)
                for place in range(codes.MAX_STEPS):
                    if steps[i, place] == codes.END or row.flags[STATUS] != FINE:
                        break
                    apply(row, steps[i, place], setting, history, span, coin, same[slot])
                chosen[i], probabilities[i] = -1, 1.0
                if row.flags[STATUS] == FINE:
                    if setting[codes.GREEDY]:
                        chosen[i] = most_likely(row)
                    else:
                        chosen[i], probabilities[i] = draw(row, uniform)
                status[i] = row.flags[STATUS]
                if distributions.shape[0] > 0 and status[i] == FINE:
                    write(row, distributions[i], chosen[i] if setting[codes.GREEDY] else -1)

    sample.__name__ = name
    return kernel(_SIGNATURE)(sample)


# Most requests ask for common steps only: few kernels to compile. The other kernel knows all.
sample_slots = _sampler("sample_slots", _apply, _forbid_nothing, _write_nothing)
sample_slots_by_any_steps = _sampler("sample_slots_by_any_steps", _apply_any, _forbid, _write_distribution)


def _room_for_dry(batch: SamplingBatch, slots: int) -> NDArray[np.int32]:
    """int32 [slots, L], for histories of up to L tokens; L is 0 where DRY is not among the steps."""
    if not (batch.steps == codes.DRY).any():
        return np.empty((slots, 0), np.int32)
    longest = (batch.spans[:, codes.END_TOKEN] - batch.spans[:, codes.FIRST_TOKEN]).max(initial=0)
    return np.empty((slots, int(longest)), np.int32)


def sample_batch(
    logits: Float32,
    batch: SamplingBatch,
    workspace: Workspace,
    *,
    distributions: NDArray[np.float64] | None = None,
    team: Team | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """Take each row through its steps to a token.

    Args:
        logits: float32 [B, V], not changed.
        batch: which rows of logits, and what to do with each of the A rows; checked.
        workspace: memory for rows of V logits; only one call at a time may use it.
        distributions: float64 [A, V] or None: receives the distributions from which the tokens were drawn.

    Returns:
        tokens int64 [A]; float64 [A], the probability of each in the distribution it was drawn from (1 if greedy);
        status int64 [A] (FINE, or why there is no token: HAS_NAN, HAS_INFINITY, ALL_MASKED; then the token is -1).

    Raises:
        ValueError: a shape or type does not fit, or an index points outside.
    """
    size = workspace.vocab_size
    check("logits", logits, (None, size))
    batch.check(len(logits), size)
    count = batch.num_rows
    if distributions is not None:
        check("distributions", distributions, (count, size), np.dtype(np.float64))
    tokens, probabilities = np.empty(count, np.int64), np.empty(count, np.float64)
    status = np.empty(count, np.int64)
    arguments = (
        logits, batch.replaced, batch.steps, batch.settings, batch.counters, batch.spans, batch.edit_ids,
        batch.edit_values, batch.tokens, *workspace.arrays, tokens, probabilities, status,
        _NO_DISTRIBUTIONS if distributions is None else distributions, _room_for_dry(batch, workspace.slots),
    )  # fmt: skip
    rare = distributions is not None or _IS_RARE[batch.steps].any() or batch.settings[:, codes.NGRAM_SIZE].any()
    run(
        team,
        sample_slots_by_any_steps if rare else sample_slots,
        arguments,
        workspace.slots,
        work=count * size * _NANOSECONDS_PER_LOGIT,
    )
    return tokens, probabilities, status
