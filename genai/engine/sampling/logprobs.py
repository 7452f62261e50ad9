"""Log-probabilities of tokens in the model's own distribution: before temperature, penalties and all else.

They are exact to float64: logit - log(sum(exp(logits))), computed in float64 from the float32 logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cpu.logprobs import log_normalizers
from genai.kernels.cpu.sampling_steps.batch import Workspace
from genai.kernels.cpu.team import Team

from ...errors import InputError, SamplingError


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability (natural logarithm), and the most likely alternatives.

    Attributes:
        token: its id.
        logprob: -inf if the model excludes it.
        top: (id, logprob) of the most likely tokens, the first first; the token itself may be among them.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(
    logits: NDArray[np.float32],
    tokens: Sequence[int] | NDArray[np.integer],
    top: int = 0,
    *,
    rows: Sequence[int] | None = None,
    workspace: Workspace | None = None,
    team: Team | None = None,
) -> list[TokenLogprob]:
    """Log-probabilities of one token per row: of a prompt (logits of row i, token i + 1) or of chosen tokens.

    Args:
        logits: float32 [B, V].
        tokens: A ids, 0 to V - 1.
        top: how many alternatives, 0 to V.
        rows: A rows of `logits`, one for each token; None = all in order.
        workspace: memory of `BatchSampler`; None = allocate some.

    Raises:
        InputError: logits, tokens or `top` that do not fit each other.
        SamplingError: logits with NaN or infinity, or without any finite one.
    """
    if logits.ndim != 2 or logits.dtype != np.float32:
        raise InputError(f"logits are {logits.dtype} {list(logits.shape)}", "float32 [rows, V] is expected", "reshape")
    count, size = logits.shape
    where = np.arange(count) if rows is None else np.asarray(rows, np.int64)
    ids = np.asarray(tokens, np.int64)
    if ids.shape != where.shape or (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size):
        raise InputError(
            f"{len(ids)} tokens for {len(where)} rows of {size} logits",
            "each row has one token, with an id below the number of logits",
            "pass the token that follows each row",
        )
    if not 0 <= top <= size:
        raise InputError(f"top = {top} for {size} logits", "there are not as many alternatives", f"use 0 to {size}")
    memory = Workspace.allocate(2 * (team.threads if team else 1), size) if workspace is None else workspace
    normalizers, likely = log_normalizers(np.ascontiguousarray(logits), where, top, memory, team=team)
    results = []
    for row, token, normalizer, best in zip(where.tolist(), ids.tolist(), normalizers.tolist(), likely, strict=True):
        if np.isnan(normalizer):
            raise SamplingError(
                f"the logits of row {row} have no log-probabilities",
                "they hold NaN or infinity, or nothing but -inf",
                "check the model: its output overflowed or is damaged",
            )
        alternatives = tuple((other, float(logits[row, other]) - normalizer) for other in best.tolist() if other >= 0)
        results.append(TokenLogprob(token, float(logits[row, token]) - normalizer, alternatives))
    return results
