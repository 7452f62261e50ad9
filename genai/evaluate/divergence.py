"""Kullback-Leibler divergence between the next-token distributions of two models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..common.html_parts import figures
from ..errors import ModelFolderError, VocabularyMismatchError
from ..models.kv_quality import LEAST_TOKENS, MEASURED, MOST_DIVERGENCE, KvQuality, record
from ..text.backend import first_difference, load_tokenizer
from ..text.files import find_files
from .prediction import Float32, Float64, exp, kl_rows, log_softmax, mean_and_error, normalizers, row_blocks
from .scored_text import (
    Meter,
    ProgressCallback,
    checked_window,
    prepare_text,
    rope_thresholds,
    scored_rows,
    windows_text,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from genai.kernels.device import Executor

    from ..models.model import Model


@dataclass(frozen=True)
class Divergence:
    """The distance of OTHER's distributions from BASE's distributions over all scored positions of a text, in nats.

    Attributes:
        mean: mean of KL(base || other).
        mean_error: standard error of the mean.
        median: median of KL(base || other) over positions.
        p90: 90th percentile of KL(base || other).
        p99: 99th percentile of KL(base || other).
        maximum: maximum of KL(base || other).
        top1_agreement: share of positions at which both models have the same most likely token.
        base_perplexity: BASE's perplexity on these positions.
        other_perplexity: OTHER's perplexity on the same positions.
        log_ratio: ln(other_perplexity / base_perplexity); below 0 if OTHER predicts the text better.
        log_ratio_error: standard error of log_ratio, computed from the paired differences.
        rms_probability_difference: root mean square of the difference between the probabilities that the two models
            assign to the text's own token, 0 to 1.
        tokens: number of scored positions.
        windows: number of windows that the text was cut into.
        window: tokens per window.
        stride: tokens from one window to the next.
        bos: True if every window began with BOS.
        seconds: elapsed time.
        tokens_per_second: tokens computed per second by each model.
    """

    mean: float
    mean_error: float
    median: float
    p90: float
    p99: float
    maximum: float
    top1_agreement: float
    base_perplexity: float
    other_perplexity: float
    log_ratio: float
    log_ratio_error: float
    rms_probability_difference: float
    tokens: int
    windows: int
    window: int
    stride: int
    bos: bool
    seconds: float
    tokens_per_second: float

    def rows(self) -> list[tuple[str, str]]:
        """Return the figures as pairs of name and value."""
        return [
            ("mean KLD", f"{self.mean:.6f} ± {self.mean_error:.6f} nats"),
            ("median", f"{self.median:.6f}"),
            ("90 %", f"{self.p90:.6f}"),
            ("99 %", f"{self.p99:.6f}"),
            ("maximum", f"{self.maximum:.6f}"),
            ("same top token", f"{100 * self.top1_agreement:.3f} %"),
            ("RMS Δp", f"{100 * self.rms_probability_difference:.3f} %"),
            ("perplexity BASE", f"{self.base_perplexity:.4f}"),
            ("perplexity OTHER", f"{self.other_perplexity:.4f}"),
            ("ln(OTHER / BASE)", f"{self.log_ratio:.6f} ± {self.log_ratio_error:.6f}"),
            ("scored", f"{self.tokens} tokens"),
            ("windows", windows_text(self.windows, self.window, self.stride, self.bos)),
        ]

    def _repr_html_(self) -> str:
        """Return the figures for a notebook."""
        return figures(self.rows())


def kl_divergence(
    base: Model,
    other: Model,
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    bos: bool | None = None,
    progress: ProgressCallback | None = None,
) -> Divergence:
    """Compute KL(base || other) at every position that `perplexity` scores, with the tokens of BASE's tokenizer.

    Args:
        base: the reference model, which may be the same object as `other`.
        other: the model to compare, which must have the same vocabulary.
        text, window, stride, bos, progress: as in perplexity. A window must fit into the contexts of both models.

    Raises:
        VocabularyMismatchError: the vocabularies differ; the message names the first difference.
        InputError, OptionError, ModelOutputError: as in perplexity.
    """
    check_same_vocabulary(base, other)
    context_length = min(model.config.model.context_length for model in (base, other))
    prepared = prepare_text(base, text, *checked_window(window, stride, context_length), bos)
    meter = Meter(prepared.num_scored, progress)
    parts = []
    thresholds = rope_thresholds(base.decoder, other.decoder)
    both = (scored_rows(model.decoder, prepared, thresholds) for model in (base, other))
    for mine, theirs in zip(*both, strict=True):
        parts.append(compare_logits(mine.logits, theirs.logits, mine.targets, base.decoder.executor))
        meter.add(len(mine.targets), mine.computed)
    divergence, agrees, of_base, of_other = np.concatenate(parts, axis=1)
    mean, mean_error = mean_and_error(divergence)
    log_ratio, log_ratio_error = mean_and_error(of_base - of_other)
    median, p90, p99, maximum = np.quantile(divergence, (0.5, 0.9, 0.99, 1.0)).tolist()
    return Divergence(
        mean=mean,
        mean_error=mean_error,
        median=median,
        p90=p90,
        p99=p99,
        maximum=maximum,
        top1_agreement=float(agrees.mean()),
        base_perplexity=exp(-float(of_base.mean())),
        other_perplexity=exp(-float(of_other.mean())),
        log_ratio=log_ratio,
        log_ratio_error=log_ratio_error,
        rms_probability_difference=float(np.sqrt(np.square(np.exp(of_other) - np.exp(of_base)).mean())),
        tokens=len(of_base),
        **prepared.computed(meter.progress()),
    )


def keep_kv_quality(base: Model, other: Model, divergence: Divergence) -> str | None:
    """Record the measured cost of OTHER's int4 KV cache if the models differ in nothing else, for later loads of OTHER.

    Returns:
        A sentence about the recorded result, or None if there is nothing to record.
    """
    same = base.folder.resolve() == other.folder.resolve() and base.config.model_data == other.config.model_data
    floats = base.info.kv_dtype in ("fp16", "fp32")
    if not same or not floats or other.info.kv_dtype != MEASURED or base.accuracy != other.accuracy:
        return None
    try:
        other.folder_as_loaded()
    except ModelFolderError as error:
        return f"the measurement was not stored: {error.what}"
    quality = KvQuality(divergence.mean, divergence.mean_error, divergence.tokens)
    if record(other.config, quality) is None:
        return "the measurement was not stored: the cache folder is not writable"
    if divergence.tokens < LEAST_TOKENS:
        return f"still refused: {divergence.tokens} tokens were scored, but at least {LEAST_TOKENS} are needed"
    return (
        f"allowed from now on: the mean divergence is at most {MOST_DIVERGENCE} nats"
        if quality.allows
        else f"refused from now on unless forced: the mean divergence exceeds {MOST_DIVERGENCE} nats"
    )


def compare_logits(base: Float32, other: Float32, targets: NDArray[np.int64], executor: Executor) -> Float64:
    """Return per position the divergence, 1 if the top tokens agree, and the target's log-probability in each model.

    Returns:
        float64 [4, rows].
    """
    of_base, of_other = normalizers(base, executor), normalizers(other, executor)
    base, other = np.asarray(base), np.asarray(other)
    blocks = []
    for block in row_blocks(*base.shape):
        p, q = log_softmax(base[block], of_base[block]), log_softmax(other[block], of_other[block])
        rows, columns = np.arange(len(p)), targets[block]
        same_top = base[block].argmax(axis=1) == other[block].argmax(axis=1)
        blocks.append(np.stack([kl_rows(p, q), same_top, p[rows, columns], q[rows, columns]]))
    return np.concatenate(blocks, axis=1)


def check_same_vocabulary(base: Model, other: Model) -> None:
    """Check that two models have the same tokens, so that their logits can be compared.

    Raises:
        VocabularyMismatchError: the sizes differ, or an id represents different text; the error names the first such
            id.
    """
    sizes = base.config.model.vocab_size, other.config.model.vocab_size
    if sizes[0] != sizes[1]:
        raise _mismatch(f"{base.folder} computes {sizes[0]} logits per token, but {other.folder} computes {sizes[1]}")
    if base.loaded_folder.same_as(other.loaded_folder):
        return
    mine, theirs = (load_tokenizer(find_files(model)[0]).backend for model in (base, other))
    if difference := first_difference(mine, theirs, base.folder, other.folder):
        raise _mismatch(difference)


def _mismatch(difference: str) -> VocabularyMismatchError:
    return VocabularyMismatchError(
        difference,
        "probabilities can be compared only for models with the same vocabulary",
        "compare models with the same tokenizer.json, or compare the models' bits per byte (`genai eval ppl`)",
    )
