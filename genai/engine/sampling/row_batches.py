"""Conversion of rows to arrays for a device's sampler, cached because most rows only change their position."""

from __future__ import annotations

from operator import lt
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from genai.kernels.sampling import OWN, ROW, SamplingBatch

from ...errors import LogitsProcessorError
from ..sequence import Logits
from .masks import MaskFiller
from .plan import RowSampler

A = TypeVar("A", bound=NDArray[Any])


def processed(logits: NDArray[np.float32], row: RowSampler) -> NDArray[np.float32]:
    """Return logits [V] after the request's logits processors; see SamplingParams.logits_processors."""
    token_ids, result = tuple(row.tokens), np.array(logits)
    for processor in row.plan.params.logits_processors:
        result = _run(processor, token_ids, result)
    return result


def _run(processor: Any, token_ids: tuple[int, ...], row: NDArray[np.float32]) -> NDArray[np.float32]:
    name, shape = getattr(processor, "__qualname__", type(processor).__qualname__), row.shape
    try:
        result = processor(token_ids, row)
    except Exception as error:
        raise LogitsProcessorError(
            f"the logits processor {name} raised {type(error).__name__}: {error}",
            f"the processor was called with {len(token_ids)} token ids and float32 logits of shape {list(shape)}",
            "correct the processor, or remove it",
        ) from error
    result = row if result is None else result
    if not isinstance(result, np.ndarray) or result.shape != shape or result.dtype != np.float32:
        is_array = isinstance(result, np.ndarray)
        found = f"{result.dtype} {list(result.shape)}" if is_array else type(result).__name__
        raise LogitsProcessorError(
            f"the logits processor {name} returned {found}",
            f"expected: float32 {list(shape)}",
            "return logits.astype(np.float32), or change the array in place and return None",
        )
    if not np.max(result) < np.inf:
        token = int(np.flatnonzero(~(result < np.inf))[0])
        raise LogitsProcessorError(
            f"the logits processor {name} set the logit of token {token} to {result[token]}",
            "logits must be finite, or -inf for tokens that must not be chosen",
            "to force a token, set all other logits to -inf",
        )
    return np.ascontiguousarray(result)


def _joined(parts: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])


def _read_only(array: A) -> A:
    view = array.view()
    view.flags.writeable = False
    return view


class _Known:
    """A batch that changes only in its positions for as long as its rows have fewer tokens than `untils`."""

    def __init__(self, active: dict[int, RowSampler], batch: SamplingBatch, untils: list[int]) -> None:
        self._rows, self._sources = [*active.values()], [*active]
        self._changes, self._untils = [row.changes for row in self._rows], untils
        # The arrays are read-only, so a device that has read them need not read them again.
        self._batch = SamplingBatch(
            batch.rows,
            batch.plain,
            _read_only(batch.replaced),
            _read_only(batch.edit_ids),
            _read_only(batch.edit_values),
            _read_only(batch.tokens),
            _read_only(batch.masks),
        )

    def at_other_positions(self, active: dict[int, RowSampler]) -> SamplingBatch | None:
        """Return the batch for the rows' current lengths; None if anything other than the lengths changed."""
        rows = [*active.values()]
        if rows != self._rows or [*active] != self._sources or [row.changes for row in rows] != self._changes:
            return None
        lengths = [len(row.tokens) for row in rows]
        if not all(map(lt, lengths, self._untils)):
            return None
        batch = self._batch.with_counters(lengths)
        self._batch = batch
        return batch


class RowBatches:
    """Builds batches of rows. Several threads may use a builder at the same time: cached data is only replaced whole.

    Args:
        vocab_size: number of logits per row.
        masks: fills grammar masks.
    """

    def __init__(self, vocab_size: int, masks: MaskFiller) -> None:
        self._vocab_size, self._masks = vocab_size, masks
        self._known: _Known | None = None

    def make(self, logits: Logits, active: dict[int, RowSampler]) -> SamplingBatch:
        """Build the batch of the active rows, keyed by their row in the logits.

        Raises:
            LogitsProcessorError: a logits processor failed.
            GrammarError: a grammar exceeded its limits.
        """
        known = self._known
        if known is not None and (batch := known.at_other_positions(active)) is not None:
            return batch
        batch = self._made(logits, active)
        untils = [row.same_until() for row in active.values()]
        self._known = _Known(active, batch, untils) if untils and min(untils) > 0 else None
        return batch

    def _made(self, logits: Logits, active: dict[int, RowSampler]) -> SamplingBatch:
        rows: list[bytes] = []
        replaced: list[NDArray[np.float32]] = []
        edit_ids: list[NDArray[Any]] = []
        edit_values: list[NDArray[Any]] = []
        windows: list[NDArray[Any]] = []
        matchers = [row.matcher for row in active.values() if row.matcher is not None]
        masks, num_masks = self._masks.filled(matchers), 0
        num_edits = num_tokens = 0
        for source, row in active.items():
            if row.plan.params.logits_processors:
                replaced.append(processed(logits[source], row))
                source = -len(replaced)
            (ids, values), (window, first_output) = row.edits(), row.window()
            edit_ids.append(ids)
            edit_values.append(values)
            windows.append(window)
            edits, tokens = (num_edits, num_edits + len(ids)), (num_tokens, num_tokens + len(window))
            mask = 0
            if row.matcher is not None:
                mask = num_masks = num_masks + 1
            counter, span = (row.seed, row.row, len(row.tokens)), (source, *edits, *tokens, mask, first_output)
            rows += row.asked, OWN.pack(*counter, *span, row.since_breaker)
            num_edits, num_tokens = edits[1], tokens[1]
        return SamplingBatch(
            rows=np.ndarray(len(active), ROW, b"".join(rows)),
            plain=all(row.plan.is_plain for row in active.values()),
            replaced=np.array(replaced, np.float32).reshape(-1, self._vocab_size),
            edit_ids=_joined(edit_ids, np.int32),
            edit_values=_joined(edit_values, np.float32),
            tokens=_joined(windows, np.int32),
            masks=masks,
        )
