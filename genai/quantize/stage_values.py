"""Values between the stages of a decoder for all texts, in memory or on disk."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .streaming import Override, ProgramStage, StreamedDecoder, Tokens, Values, nothing_instead
from .workspace import save_array


class StageValues:
    """The values that later stages read, per batch.

    Args:
        batches: tokens [count, length] of each batch.
        files: path prefix of files for the values, because the values of a long text need more memory than a layer.
            None means that the values stay in memory.
    """

    def __init__(self, batches: Sequence[Tokens], files: Path | None = None) -> None:
        self.batches, self._files = batches, files
        self._values: list[dict[str, NDArray[np.float32] | Path]] = [{} for _ in batches]
        self._written = 0
        if files is not None:
            for path in files.parent.glob(f"{files.name}.*"):  # left over from an interrupted run
                path.unlink()

    def read(self, index: int, names: Collection[str] | None = None) -> Values:
        """Return the values of a batch, one row per token; if `names` is not None, only the named values."""
        values = self._values[index]
        return {
            name: np.load(value, allow_pickle=False) if isinstance(value, Path) else value
            for name, value in values.items()
            if names is None or name in names
        }

    def copy(self) -> StageValues:
        """Return a copy in memory."""
        other = StageValues(self.batches)
        for index in range(len(self.batches)):
            other._values[index].update(self.read(index))
        return other

    def advance(
        self,
        decoder: StreamedDecoder,
        stage: ProgramStage,
        *,
        instead: Override = nothing_instead,
        narrow: bool = False,
    ) -> None:
        """Run a stage, and drop values that no later stage reads; see `StreamedDecoder.running` for `narrow`."""
        later = {name for other in decoder.stages[stage.number + 1 :] for name in other.program.given}
        most = max(batch.size for batch in self.batches)
        with decoder.running(stage, instead=instead, tokens=most, narrow=narrow) as running:
            for index, batch in enumerate(self.batches):
                results = running.run(batch, self.read(index, stage.program.given))
                self._replace(index, {name: value for name, value in results.items() if name in later}, later)

    def _replace(self, index: int, results: Values, later: Collection[str]) -> None:
        values = self._values[index]
        for name in [name for name in values if name not in later]:
            if isinstance(value := values.pop(name), Path):
                value.unlink()
        for name, array in results.items():
            if self._files is None:
                values[name] = array
                continue
            self._written += 1
            path = self._files.with_name(f"{self._files.name}.{self._written}.npy")
            with path.open("wb") as file:
                save_array(file, array)
            values[name] = path

    def close(self) -> None:
        """Delete the remaining files."""
        for index in range(len(self.batches)):
            self._replace(index, {}, ())
