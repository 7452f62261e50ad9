"""Divergence of a quantised model's distributions from the float model's. Dequantised weights are float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..evaluate.divergence import compare_logits
from ..evaluate.prediction import exp, mean_and_error
from .calibration import CalibrationText
from .sites import Site
from .stage_values import StageValues
from .streaming import Override, ProgramStage, StreamedDecoder, batches_of

# Memory for the logits of both models; with a vocabulary of 150k tokens, 223 rows fit.
_MOST_LOGITS_BYTES = 1 << 27


@dataclass(frozen=True)
class Quality:
    """The quality of one quantised model over all tokens of a text. Divergences are in nats.

    Attributes:
        kld, kld_error: mean of KL(float || quantised), and the standard error of the mean.
        median, p90, p99, maximum: quantiles of KL(float || quantised).
        top1_agreement: fraction of positions at which both models have the same most likely token.
        base_perplexity, perplexity: perplexities of the float and of the quantised model.
        tokens: number of compared positions.
    """

    kld: float
    kld_error: float
    median: float
    p90: float
    p99: float
    maximum: float
    top1_agreement: float
    base_perplexity: float
    perplexity: float
    tokens: int


class Evaluation:
    """The float model's values for a text, for comparison with other models.

    Args:
        decoder: the float model.
        text: the text to predict.
    """

    def __init__(self, decoder: StreamedDecoder, text: CalibrationText) -> None:
        self._decoder, self._text = decoder, text
        # Only a few sequences at a time, to limit the memory for logits.
        most = max(text.tokens.shape[1], _MOST_LOGITS_BYTES // (8 * decoder.vocab_size))
        self._batches = batches_of(text.tokens, most)
        self._exact = StageValues(self._batches)
        self._logits: list[NDArray[np.float32]] = []  # the float model's logits, cached if they are small
        self._keeps_logits = 4 * text.tokens.size * decoder.vocab_size <= _MOST_LOGITS_BYTES
        for stage in decoder.stages[:-1]:
            self._exact.advance(decoder, stage)

    def measure(self, instead: Override, progress: Callable[[int], None] = lambda stage: None) -> Quality:
        """Measure the model with the matrices of `instead`. `progress` is called with each finished stage."""
        flow = StageValues(self._batches)
        for stage in self._decoder.stages[:-1]:
            flow.advance(self._decoder, stage, instead=instead)
            progress(stage.number)
        return self._compared(flow, instead)

    def sensitivities(
        self, trials: Callable[[Site], Iterator[tuple[str, Override]]]
    ) -> Iterator[tuple[Site, str, float]]:
        """Yield each trial's site and name, and the mean divergence if only that site's matrix is changed.

        Args:
            trials: yields the name and the matrix of each trial for a site.
        """
        flow, seen = StageValues(self._batches), set()
        for stage in self._decoder.stages:
            for site in stage.sites:
                if site.name in seen:
                    continue
                seen.add(site.name)
                for name, instead in trials(site):
                    yield site, name, self._from(stage, flow, instead)
            if stage is not self._decoder.stages[-1]:
                flow.advance(self._decoder, stage)

    def _from(self, first: ProgramStage, before: StageValues, instead: Override) -> float:
        flow = before.copy()
        for stage in self._decoder.stages[first.number : -1]:
            flow.advance(self._decoder, stage, instead=instead)
        return self._compared(flow, instead).kld

    def _compared(self, flow: StageValues, instead: Override) -> Quality:
        last = self._decoder.stages[-1]
        most = max(batch.size for batch in self._batches)
        parts = []
        with ExitStack() as stack:
            running = [stack.enter_context(self._decoder.running(last, instead=instead, tokens=most))]
            if not self._logits:
                running.append(stack.enter_context(self._decoder.running(last, tokens=most)))
            computed = []
            for index, batch in enumerate(self._batches):
                logits_of_changed, *exact = (
                    stage_run.run(batch, texts.read(index))[self._decoder.logits]
                    for stage_run, texts in zip(running, (flow, self._exact), strict=False)
                )
                logits = exact[0] if exact else self._logits[index]
                if exact and self._keeps_logits:
                    computed.append(logits)
                rows, targets = _predicting(batch)
                parts.append(compare_logits(logits[rows], logits_of_changed[rows], targets, self._decoder.executor))
        self._logits = self._logits or computed
        divergence, agrees, of_base, of_other = np.concatenate(parts, axis=1)
        mean, error = mean_and_error(divergence)
        median, p90, p99, maximum = np.quantile(divergence, (0.5, 0.9, 0.99, 1.0)).tolist()
        return Quality(
            mean, error, median, p90, p99, maximum, float(agrees.mean()),
            exp(-float(of_base.mean())), exp(-float(of_other.mean())), len(divergence),
        )  # fmt: skip


def _predicting(batch: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the logits that have a next token in their sequence, and the next tokens."""
    count, length = batch.shape
    rows = np.arange(count * length).reshape(count, length)[:, :-1].reshape(-1)
    return rows, batch[:, 1:].reshape(-1)
