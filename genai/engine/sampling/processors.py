"""Python functions over logits: calling them, and checking what they give back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import LogitsProcessorError


def run_processors(
    processors: Sequence[Any], tokens: Sequence[int], logits: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Logits after all processors.

    Args:
        processors: called as f(token_ids, logits); see SamplingParams.logits_processors.
        tokens: the sequence so far.
        logits: float32 [V]; not changed.

    Raises:
        LogitsProcessorError: one raised, returned something that is not float32 [V], or gave NaN or plus infinity.
    """
    token_ids = tuple(tokens)
    row = logits.copy()
    for processor in processors:
        row = _run(processor, token_ids, row)
    return row


def _run(processor: Any, token_ids: tuple[int, ...], row: NDArray[np.float32]) -> NDArray[np.float32]:
    name = _name(processor)
    try:
        result = processor(token_ids, row)
    except Exception as error:
        raise LogitsProcessorError(
            f"the logits processor {name} raised {type(error).__name__}: {error}",
            f"it was called with {len(token_ids)} token ids and logits float32 [{len(row)}]",
            "correct the processor, or leave it out",
        ) from error
    result = row if result is None else result
    if not isinstance(result, np.ndarray) or result.shape != row.shape or result.dtype != np.float32:
        is_array = isinstance(result, np.ndarray)
        found = f"{result.dtype} {list(result.shape)}" if is_array else type(result).__name__
        raise LogitsProcessorError(
            f"the logits processor {name} returned {found}",
            f"float32 [{len(row)}] is expected",
            "return logits.astype(np.float32), or change the array given and return None",
        )
    if not np.max(result) < np.inf:
        token = int(np.flatnonzero(~(result < np.inf))[0])
        raise LogitsProcessorError(
            f"the logits processor {name} gave token {token} the logit {result[token]}",
            "logits are finite, or -inf for tokens that may not be chosen",
            "to force a token, set all others to -inf",
        )
    return np.ascontiguousarray(result)


def _name(processor: Any) -> str:
    return str(getattr(processor, "__qualname__", type(processor).__qualname__))
