"""What matrices are multiplied with, gathered while texts pass a stage."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.quant.methods import InputStatistics

from .flow import Flow
from .streaming import Override, ProgramStage, StreamedDecoder, nothing_instead


class Gathering:
    """Sums over all tokens of one value.

    Products are summed in float32: their rounding is a millionth of what the methods damp them by, and half of the
    memory matters where a matrix has 8192 columns or more.

    Args:
        gram: whether its products with itself are wanted. cross: also those with the float model's.
    """

    def __init__(self, gram: bool) -> None:
        self._wants_gram, self._count = gram, 0
        self._squares: NDArray[Any] | None = None
        self._gram: NDArray[Any] | None = None
        self._cross: NDArray[Any] | None = None

    def add(self, values: NDArray[np.float32], exact: NDArray[np.float32] | None) -> None:
        """Tokens' values [tokens, width], and what the float model has in their place."""
        self._count += len(values)
        self._squares = _sum(self._squares, np.einsum("ti,ti->i", values, values, dtype=np.float64))
        if self._wants_gram:
            self._gram = _sum(self._gram, values.T @ values)
            if exact is not None:
                self._cross = _sum(self._cross, exact.T @ values)

    def result(self) -> InputStatistics:
        """The means."""
        assert self._squares is not None
        for total in (self._squares, self._gram, self._cross):
            if total is not None:
                total /= self._count
        return InputStatistics(self._count, self._squares, self._gram, self._cross)


def _sum(total: NDArray[Any] | None, part: NDArray[Any]) -> NDArray[Any]:
    if total is None:
        return part
    total += part
    return total


def gather(
    decoder: StreamedDecoder,
    stage: ProgramStage,
    wanted: Collection[str],
    flow: Flow,
    exact: Flow | None,
    *,
    gram: bool,
    instead: Override = nothing_instead,
) -> dict[str, InputStatistics]:
    """Statistics of values that a stage reads or makes.

    Args:
        flow: texts as the quantised model has them. exact: as the float model has them; None = no cross products.
        instead: the stage's matrices in the quantised model.
    """
    found = {name: Gathering(gram) for name in wanted}
    inside = [name for name in wanted if name not in stage.program.given]
    needed = {*wanted, *(stage.program.given if inside else ())}
    passes = [(flow, instead)] + ([] if exact is None else [(exact, nothing_instead)])
    with ExitStack() as stack:
        # Batch by batch through both models, since what is inside a stage may be wide.
        most = max(batch.size for batch in flow.batches)
        running = [
            stack.enter_context(decoder.running(stage, instead=weights, only=inside, tokens=most)) if inside else None
            for _, weights in passes
        ]
        for index, batch in enumerate(flow.batches):
            seen = []
            for (texts, _), one in zip(passes, running, strict=True):
                values = texts.read(index, needed)
                seen.append(values if one is None else values | one.run(batch, values))
            for name, gathering in found.items():
                gathering.add(seen[0][name], seen[1][name] if len(seen) > 1 else None)
    return {name: gathering.result() for name, gathering in found.items()}
