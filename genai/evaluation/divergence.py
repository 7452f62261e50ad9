"""Kullback-Leibler divergence of one model's next-token distributions from another's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..text.backend import load_tokenizer
from .errors import VocabularyMismatchError
from .logprobs import Float32, Float64, kl_rows, log_softmax, normalizers, row_blocks
from .prediction import exp, mean_and_error
from .scored_text import Meter, ProgressCallback, ScoredText, prepare_text, rope_thresholds, scored_rows
from .windows import checked_window

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from genai.kernels.cpu.team import Team

    from ..model import Model


@dataclass(frozen=True)
class Divergence:
    """How far OTHER's distributions lie from BASE's, over every scored position of a text. In nats.

    Attributes:
        mean, mean_error: mean of KL(base || other), and its standard error.
        median, p90, p99, maximum: of the same, over positions.
        top1_agreement: share of positions at which both find the same token most likely.
        base_perplexity, other_perplexity: on the same positions.
        log_ratio, log_ratio_error: ln(other_perplexity / base_perplexity), and its standard error over the paired
            differences; below 0 means that OTHER predicts the text better.
        rms_probability_difference: root of the mean squared difference of the probabilities that both give to the
            text's own token, 0 to 1.
        tokens: scored positions.
        windows, window, stride, bos: how the text was cut.
        seconds, tokens_per_second: time taken, and tokens computed per second by each model.
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


@dataclass(frozen=True)
class _Positions:
    """Per position: the divergence, whether the likeliest tokens agree, and both log-probabilities of the token."""

    divergence: Float64
    agrees: NDArray[np.bool_]
    base: Float64
    other: Float64


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
    """KL(base || other) at every position of a text that perplexity scores; base's tokenizer reads the text.

    Args:
        base, other: may be one model; both must have the same vocabulary.
        text, window, stride, bos, progress: see perplexity. A window must fit both models' contexts.

    Raises:
        VocabularyMismatchError: the vocabularies differ; the message names the first difference.
        InputError, OptionError, ModelOutputError: see perplexity.
    """
    check_same_vocabulary(base, other)
    context_length = min(model.config.model.context_length for model in (base, other))
    prepared = prepare_text(base, text, *checked_window(window, stride, context_length), bos)
    meter = Meter(prepared.num_scored, progress)
    parts = []
    thresholds = rope_thresholds(base.decoder, other.decoder)
    both = (scored_rows(model.decoder, prepared, thresholds) for model in (base, other))
    for mine, theirs in zip(*both, strict=True):
        parts.append(_compare(mine.logits, theirs.logits, mine.targets, base.decoder.team))
        meter.add(len(mine.targets), mine.computed)
    return _result(parts, prepared, meter)


def _compare(base: Float32, other: Float32, targets: NDArray[np.int64], team: Team) -> _Positions:
    of_base, of_other = normalizers(base, team), normalizers(other, team)
    blocks = []
    for block in row_blocks(*base.shape):
        p, q = log_softmax(base[block], of_base[block]), log_softmax(other[block], of_other[block])
        rows, wanted = np.arange(len(p)), targets[block]
        same_top = base[block].argmax(axis=1) == other[block].argmax(axis=1)
        blocks.append(_Positions(kl_rows(p, q), same_top, p[rows, wanted], q[rows, wanted]))
    return _joined(blocks)


def _joined(parts: list[_Positions]) -> _Positions:
    return _Positions(
        np.concatenate([part.divergence for part in parts]),
        np.concatenate([part.agrees for part in parts]),
        np.concatenate([part.base for part in parts]),
        np.concatenate([part.other for part in parts]),
    )


def _result(parts: list[_Positions], text: ScoredText, meter: Meter) -> Divergence:
    done, all_ = meter.progress(), _joined(parts)
    mean, mean_error = mean_and_error(all_.divergence)
    log_ratio, log_ratio_error = mean_and_error(all_.base - all_.other)
    median, p90, p99, maximum = np.quantile(all_.divergence, (0.5, 0.9, 0.99, 1.0)).tolist()
    return Divergence(
        mean=mean,
        mean_error=mean_error,
        median=median,
        p90=p90,
        p99=p99,
        maximum=maximum,
        top1_agreement=float(all_.agrees.mean()),
        base_perplexity=exp(-float(all_.base.mean())),
        other_perplexity=exp(-float(all_.other.mean())),
        log_ratio=log_ratio,
        log_ratio_error=log_ratio_error,
        rms_probability_difference=float(np.sqrt(np.square(np.exp(all_.other) - np.exp(all_.base)).mean())),
        tokens=len(all_.base),
        windows=len(text.windows),
        window=text.window,
        stride=text.stride,
        bos=text.bos is not None,
        seconds=done.seconds,
        tokens_per_second=done.tokens_per_second,
    )


def check_same_vocabulary(base: Model, other: Model) -> None:
    """Two models whose logits are compared token by token must have the same tokens.

    Raises:
        VocabularyMismatchError: naming the first id with another text, or the sizes.
    """
    sizes = base.config.model.vocab_size, other.config.model.vocab_size
    if sizes[0] != sizes[1]:
        raise _mismatch(f"{base.folder} gives {sizes[0]} logits per token, {other.folder} gives {sizes[1]}")
    if base.folder.resolve() == other.folder.resolve():
        return
    mine, theirs = (_texts_by_id(model) for model in (base, other))
    different = [id_ for id_ in mine.keys() | theirs.keys() if mine.get(id_) != theirs.get(id_)]
    if different:
        first = min(different)
        texts = (f"{words[first]!r}" if first in words else "no token" for words in (mine, theirs))
        raise _mismatch(f"token {first} is {next(texts)} in {base.folder} and {next(texts)} in {other.folder}")


def _texts_by_id(model: Model) -> dict[int, str]:
    vocabulary = load_tokenizer(model.folder).backend.get_vocab(with_added_tokens=True)
    return {id_: text for text, id_ in vocabulary.items()}


def _mismatch(what: str) -> VocabularyMismatchError:
    return VocabularyMismatchError(
        what,
        "probabilities can be compared only token by token, over one vocabulary",
        "compare models with the same tokenizer.json, or compare bits per byte (`genai eval ppl`)",
    )
