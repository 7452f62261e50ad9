"""Rows of token ids: reading a batch from the caller, padding it for display, and recomputing the last run.

onnxruntime-genai computes rows of equal width, padded with pad_token_id. Here each sequence computes and caches only
its own tokens, so that its result does not depend on the other sequences. Padding, and the EOS of a row that ended
before the others, exist only in `PaddedRows`. Normally, the engine returns only the logits of the last token of each
sequence. `LastRun` recomputes other values on request, bit-identically, so that they cost nothing in normal runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.decoder import compute
from ...engine.sequence import DecoderSequence
from ...engine.static_batch import StaticBatch
from ...errors import InputError, StateError
from ...onnx.decoder_names import GraphNames
from ...text.token_ids import checked_rows, holds_rows, split_rows


def token_rows(tokens: Any, batch_size: int, vocab_size: int, pad_token_id: int | None) -> list[list[int]]:
    """Return one list of ids per sequence.

    Args:
        tokens: [L], [batch_size, L], flat [batch_size * L], a list of lists, or a Tensor with one of these shapes. The
            row lengths of lists, and of the result of Tokenizer.encode_batch, are known. In an array of several rows,
            trailing ids equal to pad_token_id are dropped, except for the number of them that all rows share, because
            the longest row has no padding.
        batch_size: expected number of rows.
        vocab_size: exclusive upper limit of ids.
        pad_token_id: the id that pads short rows; None = drop nothing.

    Raises:
        InputError: values are not whole numbers, ids are outside the vocabulary, the number of rows is not
            batch_size, or a row is empty.
    """
    lengths = getattr(tokens, "row_lengths", None)
    if lengths is not None and len(lengths) == batch_size:
        rows = split_rows([row[:length] for row, length in zip(np.asarray(tokens), lengths, strict=True)], batch_size)
    else:
        rows = split_rows(tokens, batch_size)
        if batch_size > 1 and pad_token_id is not None and not holds_rows(tokens):
            rows = _without_fill(rows, pad_token_id)
    return checked_rows(rows, batch_size, vocab_size)


def _without_fill(rows: Sequence[NDArray[np.int64]], pad_token_id: int) -> list[NDArray[np.int64]]:
    lengths = [int(np.flatnonzero(row != pad_token_id).max(initial=-1)) + 1 for row in rows]
    shared = len(rows[0]) - max(lengths)
    return [row[: length + shared] if length else row for row, length in zip(rows, lengths, strict=True)]


class PaddedRows:
    """The rows of a batch, padded to the same width with the id `pad`."""

    def __init__(self, count: int, pad: int) -> None:
        self._pad = pad
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        # For each position, 1 if the token belongs to the sequence, 0 for padding.
        self._own = [bytearray() for _ in range(count)]

    @property
    def width(self) -> int:
        """The number of tokens in each row, including padding."""
        return len(self._tokens[0])

    def append(self, rows: Sequence[Sequence[int]]) -> None:
        """Append the tokens of each sequence to its row, and pad shorter rows on the right."""
        width = max(map(len, rows))
        for tokens, own, row in zip(self._tokens, self._own, rows, strict=True):
            tokens.extend([*row, *[self._pad] * (width - len(row))])
            own.extend(b"\1" * len(row) + b"\0" * (width - len(row)))

    def copy(self) -> PaddedRows:
        """Return an independent copy."""
        other = PaddedRows(len(self._tokens), self._pad)
        other._tokens, other._own = [list(row) for row in self._tokens], [own[:] for own in self._own]
        return other

    def append_column(self, column: Sequence[int], own: Collection[int]) -> None:
        """Append one token to each row; `own` contains the rows whose sequences include the token."""
        for index, token in enumerate(column):
            self._tokens[index].append(int(token))
            self._own[index].append(index in own)

    def rewind(self, width: int) -> list[int]:
        """Truncate all rows, and return the number of tokens that each sequence keeps."""
        for row in (*self._tokens, *self._own):
            del row[width:]
        return [sum(own) for own in self._own]

    def padding(self, index: int) -> int:
        """Return the number of padding positions in a row."""
        return self.width - sum(self._own[index])

    def row(self, index: int) -> NDArray[np.int32]:
        """Return one row, int32 [width]."""
        return np.asarray(self._tokens[index], np.int32)

    def last(self) -> NDArray[np.int32]:
        """Return the last token of each row, int32 [count]."""
        return np.asarray([tokens[-1] for tokens in self._tokens], np.int32)


class LastRun:
    """The last tokens that were computed for each sequence of a batch; `pad` pads shorter rows."""

    def __init__(self, batch: StaticBatch, names: GraphNames, types: Mapping[str, np.dtype[Any]], pad: int) -> None:
        self._batch, self._pad = batch, pad
        self._names, self._types = names, types

    def output(self, name: str) -> NDArray[np.float32]:
        """Return an output of the graph, [B, T, width]; zeros at positions without a token."""
        names = self._batch.decoder.output_names
        if name not in names:
            raise InputError(
                f"Generator output {name!r} was not found",
                f"the outputs are {', '.join(names)} (keys and values are in the KV cache)",
                "use one of these names",
            )
        self._check()
        rows = {index: self._rows(index, name) for index in self._ranges}
        shown = np.zeros((len(self._sequences), self._length, next(iter(rows.values())).shape[1]), np.float32)
        for index, row in rows.items():
            shown[index, : len(row)] = row
        return shown

    def _rows(self, index: int, name: str) -> NDArray[np.float32]:
        (start, end), sequence = self._ranges[index], self._sequences[index]
        later = sequence.tokens[end:]
        try:
            sequence.rewind(end)
            sequence.truncate(start)
            (rows,) = compute(self._batch.decoder, [sequence], all_rows=True, output=name)
            sequence.append(later)
        except BaseException:
            sequence.rewind(end)
            sequence.append(later)
            raise
        return rows[len(rows) - (end - start) :]

    def input(self, name: str) -> NDArray[Any]:
        """Return token ids, mask or positions: [B, T], or [B, all tokens so far] for the mask."""
        names = self._names
        makers = {names.input_ids: self._ids, names.attention_mask: self._mask, names.position_ids: self._positions}
        known = [known for known in makers if known in self._types]
        if name not in known:
            raise InputError(
                f"Generator input {name!r} was not found",
                f"the inputs are {', '.join(known)} (keys and values are in the KV cache)",
                "use one of these names",
            )
        self._check()
        return makers[name]().astype(self._types[name])

    def _ids(self) -> NDArray[np.int64]:
        ids = np.full((len(self._sequences), self._length), self._pad, np.int64)
        for index, (start, end) in self._ranges.items():
            ids[index, : end - start] = self._sequences[index].tokens[start:end]
        return ids

    def _mask(self) -> NDArray[np.int64]:
        ends = [self._ranges.get(index, (0, len(row.tokens)))[1] for index, row in enumerate(self._sequences)]
        return (np.arange(max(ends)) < np.asarray(ends)[:, None]).astype(np.int64)

    def _positions(self) -> NDArray[np.int64]:
        positions = np.zeros((len(self._sequences), self._length), np.int64)
        for index, (start, end) in self._ranges.items():
            positions[index, : end - start] = np.arange(start, end)
        return positions

    @property
    def _sequences(self) -> list[DecoderSequence]:
        return self._batch.sequences

    @property
    def _ranges(self) -> Mapping[int, tuple[int, int]]:
        """The range of tokens [start, end) of each sequence."""
        return self._batch.ranges

    @property
    def _length(self) -> int:
        return max(end - start for start, end in self._ranges.values())

    def _check(self) -> None:
        if not self._ranges:
            raise StateError(
                "no token has been computed yet", "there is no result to return", "call append_tokens first"
            )
