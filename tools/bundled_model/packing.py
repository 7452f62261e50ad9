"""Conversations packed into rows of tokens: several share a row, and each attends only to itself.

A row contains token ids, the conversation of each token, and a loss weight for predicting it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .mixture import Conversation
from .tokenizer import PAD_ID

CONTEXT_WEIGHT = 0.1  # loss weight of the user's messages, relative to the reply


@dataclass(frozen=True)
class Rows:
    """ids, documents: int32 [rows, length] (document 0 is padding); weights: float32 [rows, length]."""

    ids: NDArray[np.int32]
    documents: NDArray[np.int32]
    weights: NDArray[np.float32]


def _pieces(conversation: Conversation) -> list[str]:
    """Return alternating context and reply texts; the reply includes its end marker."""
    pieces = []
    context = "" if conversation.system is None else f"<|im_start|>system\n{conversation.system}<|im_end|>\n"
    for turn in conversation.turns:
        pieces.append(f"{context}<|im_start|>user\n{turn.question}<|im_end|>\n<|im_start|>assistant\n")
        pieces.append(f"{turn.reply}<|im_end|>")
        context = "\n"
    return pieces


def encode(tokenizer: Tokenizer, conversations: list[Conversation], length: int) -> list[tuple[list[int], list[float]]]:
    """Return the ids and loss weights of each conversation, truncated after a whole turn to fit into `length`."""
    pieces = [_pieces(conversation) for conversation in conversations]
    encodings = iter(tokenizer.encode_batch_fast([piece for group in pieces for piece in group]))
    examples = []
    for group in pieces:
        ids: list[int] = []
        weights: list[float] = []
        fits = True
        for _ in range(0, len(group), 2):
            context, reply = next(encodings).ids, next(encodings).ids
            fits = fits and len(ids) + len(context) + len(reply) <= length
            if fits:
                ids += context + reply
                weights += [CONTEXT_WEIGHT] * len(context) + [1.0] * len(reply)
        if ids:
            examples.append((ids, weights))
    return examples


def pack(examples: list[tuple[list[int], list[float]]], length: int) -> Rows:
    """Put each example into the first open row with enough room; pad the rest of each row with weight 0."""
    rows: list[list[tuple[list[int], list[float]]]] = []
    room: list[int] = []
    first_open = 0
    for example in examples:
        size = len(example[0])
        index = next((i for i in range(first_open, len(rows)) if room[i] >= size), None)
        if index is None:
            index = len(rows)
            rows.append([])
            room.append(length)
        rows[index].append(example)
        room[index] -= size
        first_open = max(first_open, len(rows) - 24)
    ids = np.full((len(rows), length), PAD_ID, np.int32)
    documents = np.zeros((len(rows), length), np.int32)
    weights = np.zeros((len(rows), length), np.float32)
    for row, members in enumerate(rows):
        start = 0
        for document, (tokens, token_weights) in enumerate(members, 1):
            end = start + len(tokens)
            ids[row, start:end] = tokens
            documents[row, start:end] = document
            weights[row, start + 1 : end] = token_weights[1:]
            start = end
    return Rows(ids, documents, weights)


class RowStream:
    """Endless batches of rows; batch n depends only on the seed and n, so that training can resume at any batch."""

    def __init__(
        self, tokenizer: Tokenizer, sample: Callable[[Random], Conversation], seed: str, rows: int, length: int
    ) -> None:
        self._tokenizer, self._sample, self._seed = tokenizer, sample, seed
        self._rows, self._length = rows, length
        self._shard_number = -1
        self._shard = pack([], length)
        self._batches_per_shard = 32

    def batch(self, number: int) -> Rows:
        shard_number, place = divmod(number, self._batches_per_shard)
        if shard_number != self._shard_number:
            self._shard, self._shard_number = self._make_shard(shard_number), shard_number
        rows = slice(place * self._rows, (place + 1) * self._rows)
        return Rows(self._shard.ids[rows], self._shard.documents[rows], self._shard.weights[rows])

    def _make_shard(self, shard_number: int) -> Rows:
        rng = Random(f"{self._seed}:{shard_number}")
        wanted = self._rows * self._batches_per_shard
        examples: list[tuple[list[int], list[float]]] = []
        while sum(len(ids) for ids, _ in examples) < 1.02 * wanted * self._length:
            examples += encode(self._tokenizer, [self._sample(rng) for _ in range(256)], self._length)
        packed = pack(examples, self._length)
        return Rows(packed.ids[:wanted], packed.documents[:wanted], packed.weights[:wanted])
