"""What one sequence remembers from token to token, so that its next one can be chosen."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .history import TokenHistory
from .plan import SamplingPlan

FinishReason = Literal["stop", "length"]
_NO_IDS = np.empty(0, np.int32)
_NOTHING_FORBIDDEN = (-1, _NO_IDS)


class RowSampler:
    """One sequence's side of sampling.

    Args:
        plan: what its request asks for.
        tokens: the sequence's own list, prompt and output, read at every step. Its owner appends to it, and says so
            when it takes tokens back (`rewind`).
        seed: of the request's random numbers, 0 to 2 ** 64 - 1.
        row: the sample's number inside the request.
        prompt_length: how many tokens at the start are the prompt; None = all that are there now.
    """

    __slots__ = ("_forbidden", "_history", "_limits", "plan", "prompt_length", "row", "seed", "tokens")

    def __init__(
        self, plan: SamplingPlan, tokens: Sequence[int], *, seed: int, row: int = 0, prompt_length: int | None = None
    ) -> None:
        self.plan = plan
        self.tokens = tokens
        self.seed = seed
        self.row = row
        self.prompt_length = len(tokens) if prompt_length is None else prompt_length
        self._history: TokenHistory | None = None
        self._forbidden: tuple[int, NDArray[np.int32]] = _NOTHING_FORBIDDEN
        # Mirostat's limit from a position on. It depends on the tokens before, so that later ones are dropped when the
        # sequence is shorter again.
        self._limits: list[tuple[int, float]] = []

    @property
    def num_generated(self) -> int:
        """Output tokens so far; 0 also where the sequence was cut inside the prompt."""
        return max(0, len(self.tokens) - self.prompt_length)

    def rewind(self, length: int, forbidden: Collection[int] = ()) -> None:
        """The sequence was cut to `length` tokens.

        Args:
            forbidden: token ids that may not be chosen at that place (until the next rewind).
        """
        if self._history is not None:
            self._history.rewind(length)
        self._forbidden = (length, np.asarray(sorted(forbidden), np.int32))

    def finish_reason(self, token: int) -> FinishReason | None:
        """Whether the output ends with `token`, just chosen and not appended yet: at a stop token, or being full."""
        if token in self.plan.stop_ids:
            return "stop"
        most = self.plan.params.max_tokens
        return "length" if most is not None and self.num_generated + 1 >= most else None

    # --- for BatchSampler ----------------------------------------------------------------------------------------

    def window(self) -> tuple[NDArray[np.int32], int]:
        """The tokens that the steps look at (int32), and the index of the first generated one among them.

        Raises:
            InputError: a token is outside the vocabulary.
        """
        if self.plan.most_history == 0:
            return _NO_IDS, 0
        if self._history is None:
            self._history = TokenHistory(self.tokens, self.plan.vocab_size, self.plan.breakers)
        self._history.sync()
        window = self._history.last(self.plan.most_history)
        return window, self.prompt_length - (len(self.tokens) - len(window))

    @property
    def since_breaker(self) -> int:
        """How many of the window's last tokens DRY may match."""
        return 0 if self._history is None else self._history.since_breaker

    def edits(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Ids and what is added to their logits: the bias, and -inf for tokens that may not come here."""
        masked = []
        params = self.plan.params
        if self.num_generated < params.min_tokens or len(self.tokens) < params.min_length:
            masked.append(self.plan.held_back)
        if self._forbidden[0] == len(self.tokens):
            masked.append(self._forbidden[1])
        if not masked:
            return self.plan.edit_ids, self.plan.edit_values
        ids = np.concatenate([self.plan.edit_ids, *masked])
        values = np.full(len(ids), -np.inf, np.float32)
        values[: len(self.plan.edit_values)] = self.plan.edit_values
        return ids, values

    @property
    def surprise_limit(self) -> float:
        """Mirostat's limit for the next token, in bits."""
        while self._limits and self._limits[-1][0] > len(self.tokens):
            self._limits.pop()
        return self._limits[-1][1] if self._limits else 2.0 * self.plan.params.mirostat_tau

    def steer(self, probability: float) -> None:
        """Set Mirostat's limit for the token after the next, whose probability among those kept was this."""
        params, limit = self.plan.params, self.surprise_limit
        limit -= params.mirostat_eta * (-float(np.log2(probability)) - params.mirostat_tau)
        self._limits.append((len(self.tokens) + 1, limit))
