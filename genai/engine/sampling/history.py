"""A sequence's tokens as an array that follows the sequence's own list."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError


class TokenHistory:
    """An int32 copy of a growing list of tokens, and the places where sequence breakers end.

    Args:
        tokens: the list itself; what is appended to it is noticed by `sync`, what is taken back must be said by
            `rewind`.
        vocab_size: tokens are 0 to vocab_size - 1.
        breakers: sequences of tokens.
    """

    def __init__(self, tokens: Sequence[int], vocab_size: int, breakers: Sequence[Sequence[int]] = ()) -> None:
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._copy = np.empty(max(64, len(tokens)), np.int32)
        self._length = 0
        self._breakers: dict[int, list[tuple[int, ...]]] = {}
        for breaker in breakers:
            self._breakers.setdefault(breaker[-1], []).append(tuple(breaker))
        self._breaker_ends: list[int] = []

    def sync(self) -> None:
        """Copy what is new.

        Raises:
            InputError: a token is outside the vocabulary.
        """
        self.rewind(len(self._tokens))
        new = np.asarray(self._tokens[self._length :], np.int64)
        if len(new) and not 0 <= int(new.min()) <= int(new.max()) < self._vocab_size:
            raise InputError(
                f"token ids reach from {new.min()} to {new.max()}",
                f"there are logits for {self._vocab_size} tokens",
                "feed ids of this model's vocabulary",
            )
        length = self._length + len(new)
        if length > len(self._copy):
            self._copy = np.concatenate([self._copy, np.empty(length, np.int32)])
        self._copy[self._length : length] = new
        if self._breakers:
            for end, token in enumerate(new.tolist(), self._length + 1):
                if self._ends_breaker(token, end):
                    self._breaker_ends.append(end)
        self._length = length

    def _ends_breaker(self, token: int, end: int) -> bool:
        return any(
            end >= len(breaker) and tuple(self._copy[end - len(breaker) : end].tolist()) == breaker
            for breaker in self._breakers.get(token, ())
        )

    def rewind(self, length: int) -> None:
        """Forget the copies of all tokens from `length` on."""
        if length < self._length:
            self._length = length
            while self._breaker_ends and self._breaker_ends[-1] > length:
                self._breaker_ends.pop()

    def last(self, count: float) -> NDArray[np.int32]:
        """The last `count` tokens (which may be infinite), int32; a view that the next `sync` may change."""
        return self._copy[int(max(0, self._length - count)) : self._length]

    @property
    def since_breaker(self) -> int:
        """How many tokens follow the last sequence breaker."""
        return self._length - (self._breaker_ends[-1] if self._breaker_ends else 0)
