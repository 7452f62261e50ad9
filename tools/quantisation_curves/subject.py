"""A float model, and the texts for calibrating and measuring its quantised versions."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai import Tokenizer
from genai.quantize.calibration import CalibrationText, read_text
from genai.quantize.options import QuantizeOptions
from genai.quantize.quality import Evaluation, Quality
from genai.quantize.source import FloatModel
from genai.quantize.stage_values import StageValues
from genai.quantize.statistics import gather
from genai.quantize.streaming import StreamedDecoder, batches_of

# Number and length of the calibration sequences, and number of the evaluation sequences.
SAMPLES, LENGTH, EVAL_SAMPLES = 32, 512, 12


@dataclass(frozen=True)
class Subject:
    """A model to quantise.

    Attributes:
        name: name in tables.
        checkpoint: folder of the model's float weights.
        calib: file of the calibration text; None for a text that the model generates.
        evaluation: file of the evaluation text.
    """

    name: str
    checkpoint: Path
    calib: Path | None
    evaluation: Path

    def options(self, **more: Any) -> QuantizeOptions:
        """Return options of `genai quantize` with these texts."""
        common = {"samples": SAMPLES, "length": LENGTH, "eval_file": self.evaluation, "eval_samples": EVAL_SAMPLES}
        return QuantizeOptions(**{**common, "calib": self.calib, **more})


class Measuring(AbstractContextManager["Measuring"]):
    """The float model's results on the evaluation text, for comparison with other quantisers' matrices.

    `quantize_model` measures our own outputs the same way, on the same tokens.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.source = FloatModel(subject.checkpoint)
        self.decoder = StreamedDecoder(self.source)
        self.evaluation = Evaluation(self.decoder, self._text(subject.evaluation, EVAL_SAMPLES))

    def _text(self, path: Path, count: int) -> CalibrationText:
        rng = np.random.Generator(np.random.Philox(key=0))
        tokenizer, vocab_size = Tokenizer(self.source.folder), self.decoder.vocab_size
        return read_text(path, tokenizer, count=count, length=LENGTH, least=64, vocab_size=vocab_size, rng=rng)

    @property
    def elements(self) -> int:
        """The number of weights in all matrices."""
        return sum(site.elements for site in self.source.sites)

    def quality(self, made: FloatModel) -> Quality:
        """Return the quality of the float model with all its matrices replaced by those of `made`."""
        sites = {site.base_name: site for site in made.sites}
        if missing := [site.base_name for site in self.source.sites if site.base_name not in sites]:
            raise SystemExit(f"{made.source} lacks {missing}")
        return self.evaluation.measure(lambda site: made.weight(sites[site.base_name]))

    def importance(self) -> Mapping[str, NDArray[np.float32]]:
        """Return the mean squares of each matrix's inputs in the float model, over the calibration text."""
        if self.subject.calib is None:
            raise SystemExit(f"{self.subject.name} has no calibration text")
        flow = StageValues(batches_of(self._text(self.subject.calib, SAMPLES).tokens))
        found: dict[str, NDArray[np.float32]] = {}
        for stage in self.decoder.stages:
            values = list(dict.fromkeys(use.value for use in stage.uses))
            seen = gather(self.decoder, stage, values, flow, None, gram=False) if values else {}
            for use in stage.uses:
                found[use.site.base_name] = seen[use.value].squares.astype(np.float32)
            if stage is not self.decoder.stages[-1]:
                flow.advance(self.decoder, stage)
        return found

    def __exit__(self, *error: object) -> None:
        self.decoder.close()
        self.source.close()
