"""Training rows, in an order that depends only on the seed, so that a run can resume from any step."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class TokenStream:
    """An endless stream of token rows: each epoch shuffles the documents, cuts them into rows and shuffles the rows."""

    def __init__(self, folder: Path, seed: int, length: int) -> None:
        self._tokens = np.load(folder / "train.npy", mmap_mode="r")
        starts = np.load(folder / "train_starts.npy")
        self._bounds = list(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
        self._seed, self._length = seed, length
        self.rows_per_epoch = len(self._tokens) // length
        self._epoch = -1
        self._rows = np.zeros((0, length), np.uint16)

    def batch(self, number: int, rows: int) -> Tensor:
        """Return rows [number * rows, (number + 1) * rows) of the endless stream, as int64 ids."""
        return torch.from_numpy(np.stack([self._row(number * rows + place) for place in range(rows)]))

    def _row(self, number: int) -> NDArray[np.int64]:
        epoch, place = divmod(number, self.rows_per_epoch)
        if epoch != self._epoch:
            self._rows, self._epoch = self._make_epoch(epoch), epoch
        row: NDArray[np.int64] = self._rows[place].astype(np.int64)
        return row

    def _make_epoch(self, epoch: int) -> NDArray[np.uint16]:
        rng = np.random.default_rng([self._seed, epoch])
        order = rng.permutation(len(self._bounds))
        tokens = np.concatenate([self._tokens[slice(*self._bounds[document])] for document in order])
        rows = tokens[: self.rows_per_epoch * self._length].reshape(-1, self._length)
        return rows[rng.permutation(len(rows))]
