"""Statistics of the inputs of matrices, collected while texts pass through a stage."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cpu.linear.sums import SumOfProducts
from genai.kernels.cpu.program.thread_pool import Threads
from genai.quant.methods import InputStatistics

from .stage_values import StageValues
from .streaming import Override, ProgramStage, StreamedDecoder, nothing_instead


class InputStatisticsSum:
    """Sums over all tokens of one value.

    Products are summed in float32. Their inputs are rounded to bfloat16 if the machine multiplies bfloat16 much faster.
    Both rounding errors are far smaller than the methods' damping, and with 8,192 columns the halved memory matters.

    Args:
        gram: True to also sum the products of the value with itself.
        threads: threads for the multiplication.
    """

    def __init__(self, gram: bool, threads: Threads) -> None:
        self._wants_gram, self._threads, self._count = gram, threads, 0
        self._squares: NDArray[Any] | None = None
        self._gram: SumOfProducts | None = None
        self._cross: SumOfProducts | None = None

    def add(self, values: NDArray[np.float32], exact: NDArray[np.float32] | None) -> None:
        """Add values [tokens, width], and the float model's values for cross products."""
        self._count += len(values)
        squares = np.einsum("ti,ti->i", values, values, dtype=np.float64)
        self._squares = squares if self._squares is None else self._squares + squares
        if self._wants_gram:
            self._gram = self._gram or self._products(values.shape[1], same=True)
            self._gram.add(values, values)
            if exact is not None:
                self._cross = self._cross or self._products(values.shape[1], same=False)
                self._cross.add(exact, values)

    def _products(self, width: int, *, same: bool) -> SumOfProducts:
        return SumOfProducts((width, width), self._threads, same=same)

    def result(self) -> InputStatistics:
        """Return the means."""
        assert self._squares is not None
        means = [None if products is None else products.mean(self._count) for products in (self._gram, self._cross)]
        return InputStatistics(self._count, self._squares / self._count, *means)


def gather(
    decoder: StreamedDecoder,
    stage: ProgramStage,
    names: Collection[str],
    flow: StageValues,
    exact: StageValues | None,
    *,
    gram: bool,
    instead: Override = nothing_instead,
) -> dict[str, InputStatistics]:
    """Return the statistics of values that a stage reads or computes.

    Args:
        flow: values of the texts in the quantised model.
        exact: values of the texts in the float model; None for no cross products.
        instead: returns the stage's matrices in the quantised model.
    """
    threads = decoder.executor.host_threads
    assert isinstance(threads, Threads)  # the decoder computes on the host
    gatherings = {name: InputStatisticsSum(gram, threads) for name in names}
    inside = [name for name in names if name not in stage.program.given]
    needed = {*names, *(stage.program.given if inside else ())}
    passes = [(flow, instead)] + ([] if exact is None else [(exact, nothing_instead)])
    with ExitStack() as stack:
        # Run both models batch by batch, because values inside a stage may be wide.
        most = max(batch.size for batch in flow.batches)
        running = [
            stack.enter_context(decoder.running(stage, instead=weights, only=inside, tokens=most, narrow=True))
            if inside
            else None
            for _, weights in passes
        ]
        for index, batch in enumerate(flow.batches):
            seen = []
            for (texts, _), stage_run in zip(passes, running, strict=True):
                values = texts.read(index, needed)
                seen.append(values if stage_run is None else values | stage_run.run(batch, values))
            for name, gathering in gatherings.items():
                gathering.add(seen[0][name], seen[1][name] if len(seen) > 1 else None)
    return {name: gathering.result() for name, gathering in gatherings.items()}
