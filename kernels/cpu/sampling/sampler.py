"""The CPU's sampler: operators that apply the sampling steps to rows, and the class that runs them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...checks import Float32, check
from ...device import TokenChoice
from ...sampling import FINE, MAX_STEPS, NUM_SETTINGS, NUM_SPANS, ROW, SamplingBatch, Setting, Span, Step, check_rows
from ..jit.arguments import Address, Arguments, Binding
from ..jit.dsl import helper, inline
from ..jit.memory import array_at
from ..jit.native import NativeOp, native_op
from ..program.bound_program import NodeProgram, addresses_of
from ..program.calls import Call, Items
from ..program.thread_pool import Threads
from ..program.waiting import fetch_add
from .constraint import constrain
from .draw import draw, most_likely, uniforms
from .logprobs import normalize_slots
from .passes import close, scan, total_weight
from .repetition import dry, edit, forbid_repeated_ngrams, penalties
from .row import COUNT, MAXIMUM, OPEN, STATUS, TEMPERATURE, TOKENS, WEIGHTS, Row, Workspace, current, reset, row_in_slot
from .selection import weigh
from .truncation import min_p, mirostat, top_k, top_n_sigma, top_p, typical_p, xtc

_integers, _doubles, _floats = array_at("int64", 1), array_at("float64", 1), array_at("float32", 1)
_ids, _counters, _words = array_at("int32", 1), array_at("uint64", 1), array_at("uint32", 1)
# Costs per logit, on one thread.
_NANOSECONDS_TO_SAMPLE, _NANOSECONDS_TO_SUM = 0.5, 2.0
# Rows of up to this number of logits become a list of candidates immediately, which is exact to float64.
_SHORT_ROW = 1024


@helper
def _last(tokens: Any, count: float) -> Any:
    """Return the last `count` tokens; `count` may be infinite."""
    return tokens[int(max(0.0, tokens.shape[0] - count)) :]


@helper
def _apply_rare(row: Row, step: int, settings: Any, tokens: Any, span: Any, coin: float, same: Any) -> None:
    """Apply a step that is rarely used."""
    if step == Step.DRY:
        window = _last(tokens, settings[Setting.DRY_LAST_N])
        allowed = int(settings[Setting.DRY_ALLOWED_LENGTH])
        multiplier, base = settings[Setting.DRY_MULTIPLIER], settings[Setting.DRY_BASE]
        dry(row, window, span[Span.DRY_LIMIT], multiplier, base, allowed, same)
    elif step == Step.TOP_N_SIGMA:
        top_n_sigma(row, settings[Setting.TOP_N_SIGMA])
    elif step == Step.TYPICAL_P:
        typical_p(row, settings[Setting.TYPICAL_P])
    elif step == Step.XTC:
        if coin < settings[Setting.XTC_PROBABILITY]:
            xtc(row, settings[Setting.XTC_THRESHOLD])
    elif step == Step.MIROSTAT:
        mirostat(row, settings[Setting.MIROSTAT_LIMIT])


@helper
def _look(row: Row, settings: Any) -> None:
    """Check whether the row can be sampled."""
    if not row.flags[OPEN]:  # `constrain` has already checked a row with few tokens
        return
    scan(row)
    if row.flags[STATUS] == FINE and row.given.shape[0] <= _SHORT_ROW and settings[Setting.TEMPERATURE] != 0:
        close(row, -math.inf)


@helper
def _write_distribution(row: Row, out: Any, certain: int) -> None:
    """Write the probabilities of all tokens, float64 [V]. `certain` is a token with probability 1, or -1."""
    for token in range(out.shape[0]):
        out[token] = 0.0
    if certain >= 0:
        out[certain] = 1.0
    elif row.flags[OPEN]:
        total = total_weight(row)
        logits = current(row)
        for token in range(out.shape[0]):
            out[token] = math.exp((logits[token] - row.state[MAXIMUM]) / row.state[TEMPERATURE]) / total
    else:
        total = weigh(row)
        for i in range(row.flags[COUNT]):
            out[row.ids[TOKENS, i]] = row.numbers[WEIGHTS, i] / total


class SamplingArguments(Arguments):
    """`count` rows to sample (see `SamplingBatch`), the working memory, and the destination for the results.

    `taken` counts the rows that slots have started. `outcomes` holds each row's token and status, int64, and the
    token's probability, float64. `distributions` is 0, or float64 [count, vocab_size]. `same` is scratch memory for
    DRY: `same_length` int32 values per slot.
    """

    logits: Address
    replaced: Address
    count: int
    taken: Address
    rows: Address
    edit_ids: Address
    edit_values: Address
    num_edits: int
    tokens: Address
    num_tokens: int
    masks: Address
    workspace: Workspace
    outcomes: Address
    distributions: Address
    same: Address
    same_length: int


# Offsets of the parts of a row and of an outcome.
_ROW_BYTES, _OUTCOME_BYTES, _PROBABILITY = ROW.itemsize, 24, 16
_OFFSETS = {name: offset for name, (_, offset, *_) in (ROW.fields or {}).items()}
_STEPS, _SETTINGS, _COUNTER, _SPAN = (_OFFSETS[name] for name in ("steps", "settings", "counter", "span"))


def _sampler(name: str, rare: bool) -> NativeOp:
    """Return an operator that applies the sampling steps to rows. Items are slots.

    Args:
        rare: True to support rarely used features: rare steps, n-grams that must not repeat, distributions.
    """

    @helper
    def apply(row: Row, step: int, settings: Any, tokens: Any, span: Any, coin: float, same: Any) -> None:
        if step == Step.PENALTIES:
            window = _last(tokens, settings[Setting.PENALTY_LAST_N])
            first_output = span[Span.FIRST_OUTPUT] - (tokens.shape[0] - window.shape[0])
            presence, frequency = settings[Setting.PRESENCE_PENALTY], settings[Setting.FREQUENCY_PENALTY]
            penalties(row, window, first_output, settings[Setting.REPETITION_PENALTY], presence, frequency)
        elif step == Step.TOP_K:
            top_k(row, int(settings[Setting.TOP_K]))
        elif step == Step.TOP_P:
            top_p(row, settings[Setting.TOP_P])
        elif step == Step.MIN_P:
            min_p(row, settings[Setting.MIN_P])
        elif step == Step.TEMPERATURE:
            row.state[TEMPERATURE] *= settings[Setting.TEMPERATURE]
        elif rare:
            _apply_rare(row, step, settings, tokens, span, coin, same)

    @inline
    def sample_row(arguments: SamplingArguments, i: int, slot: int) -> None:
        size = arguments.workspace.vocab_size
        begin, outcome = arguments.rows + _ROW_BYTES * i, arguments.outcomes + _OUTCOME_BYTES * i
        steps, setting = _integers(begin + _STEPS, MAX_STEPS), _doubles(begin + _SETTINGS, NUM_SETTINGS)
        counter, span = _counters(begin + _COUNTER, 3), _integers(begin + _SPAN, NUM_SPANS)
        result, probability = _integers(outcome, 2), _doubles(outcome + _PROBABILITY, 1)
        edit_ids = _ids(arguments.edit_ids, arguments.num_edits)
        edit_values = _floats(arguments.edit_values, arguments.num_edits)
        tokens = _ids(arguments.tokens, arguments.num_tokens)
        same = _ids(arguments.same + 4 * arguments.same_length * slot, arguments.same_length)
        source, is_greedy = span[Span.SOURCE], setting[Setting.TEMPERATURE] == 0
        given = arguments.logits + 4 * size * source
        if source < 0:
            given = arguments.replaced + 4 * size * (-1 - source)
        row = row_in_slot(arguments.workspace, slot, given)
        history = tokens[span[Span.FIRST_TOKEN] : span[Span.END_TOKEN]]
        edited = slice(span[Span.FIRST_EDIT], span[Span.END_EDIT])
        uniform, coin = uniforms(counter[0], counter[1], counter[2])
        reset(row)
        edit(row, edit_ids[edited], edit_values[edited])
        if rare:
            forbid_repeated_ngrams(row, history, int(setting[Setting.NO_REPEAT_NGRAM_SIZE]))
        if span[Span.MASK] > 0:
            words = -(-size // 32)
            constrain(row, _words(arguments.masks + 4 * words * (span[Span.MASK] - 1), words))
        _look(row, setting)
        for index in range(MAX_STEPS):
            if steps[index] == Step.END or row.flags[STATUS] != FINE:
                break
            apply(row, steps[index], setting, history, span, coin, same)
        chosen, probability[0] = -1, 1.0
        if row.flags[STATUS] == FINE:
            if is_greedy:
                chosen = most_likely(row)
            else:
                chosen, probability[0] = draw(row, uniform)
        result[0], result[1] = chosen, row.flags[STATUS]
        if rare and arguments.distributions != 0 and result[1] == FINE:
            out = _doubles(arguments.distributions + 8 * size * i, size)
            _write_distribution(row, out, chosen if is_greedy else -1)

    def sample(arguments: SamplingArguments, context: int, begin: int, end: int, scratch: int) -> int:
        # Some rows take twice as long as others, so a slot takes the next row when it has finished a row.
        for slot in range(begin, end):
            i = fetch_add(arguments.taken, 1)
            while i < arguments.count:
                sample_row(arguments, i, slot)
                i = fetch_add(arguments.taken, 1)
        return 0

    return native_op(SamplingArguments, name=name)(sample)


# Most requests use only common steps, for which few kernels must be compiled. The other operator supports all steps.
sample_slots = _sampler("sample_slots", False)
sample_slots_by_any_steps = _sampler("sample_slots_by_any_steps", True)


def _longest(batch: SamplingBatch) -> int:
    """Return the length of the longest history if any row uses DRY, else 0."""
    if not (batch.rows["steps"] == Step.DRY).any():
        return 0
    spans = batch.rows["span"]
    return int((spans[:, Span.END_TOKEN] - spans[:, Span.FIRST_TOKEN]).max())


def _given(array: NDArray[Any]) -> NDArray[Any] | None:
    """Return None for an empty array: getting an array's address takes longer than checking whether it is empty."""
    return array if len(array) else None


class CpuSampler:
    """See `genai.kernels.device.Sampler`."""

    most_begun = 0

    def __init__(self, threads: Threads, vocab_size: int) -> None:
        self._threads = threads
        # More slots than threads, so that a core that is slowed down by other work gets fewer slots.
        self._workspace = Workspace.allocate(2 * threads.count, vocab_size)
        self._programs: dict[NativeOp, NodeProgram] = {}

    def sample(
        self, logits: Float32, batch: SamplingBatch, distributions: NDArray[np.float64] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        size, count = self._workspace.vocab_size, len(batch.rows)
        check("logits", logits, (None, size))
        batch.check(len(logits), size)
        if distributions is not None:
            check("distributions", distributions, (count, size), np.dtype(np.float64))
        outcomes = np.empty((count, 3), np.int64)
        longest = 0 if batch.plain else _longest(batch)
        self._run(
            sample_slots if batch.plain and distributions is None else sample_slots_by_any_steps,
            _NANOSECONDS_TO_SAMPLE * count * size,
            rows=batch.rows.ctypes.data,  # the usual way to get an address is slow for an array of records
            logits=logits,
            count=count,
            taken=np.zeros(1, np.int64),
            replaced=_given(batch.replaced),
            edit_ids=_given(batch.edit_ids),
            edit_values=_given(batch.edit_values),
            num_edits=len(batch.edit_ids),
            tokens=_given(batch.tokens),
            num_tokens=len(batch.tokens),
            masks=_given(batch.masks),
            outcomes=outcomes,
            distributions=distributions,
            same=np.empty((self._workspace.slots, longest), np.int32) if longest else None,
            same_length=longest,
        )
        return outcomes[:, 0], outcomes.view(np.float64)[:, 2], outcomes[:, 1]

    def begin(self, logits: Float32, batch: SamplingBatch) -> TokenChoice:
        raise NotImplementedError("most_begun is 0, expected at least 1")

    def log_normalizers(
        self, logits: Float32, rows: NDArray[np.int64], top: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        size, count = self._workspace.vocab_size, len(rows)
        check_rows(logits, rows, top, size)
        normalizers, tokens = np.empty(count, np.float64), np.empty((count, top), np.int64)
        self._run(
            normalize_slots,
            _NANOSECONDS_TO_SUM * count * size,
            logits=logits,
            rows=rows,
            count=count,
            normalizers=normalizers,
            tokens=tokens,
            top=top,
        )
        return normalizers, tokens

    def _run(self, op: NativeOp, nanoseconds: float, **given: Any) -> None:
        """Run an operator over all slots. All arguments except the workspace are bound."""
        program = self._programs.get(op)
        if program is None:
            assert op.arguments is not None
            told: dict[str, Any] = {"workspace": self._workspace} | {name: Binding(name) for name in given}
            call = Call(op, op.arguments(**told), Items(factor=self._workspace.slots))
            program = self._programs[op] = NodeProgram([[call]])
        program.run_bound(addresses_of(given), self._threads, 0, nanoseconds)
