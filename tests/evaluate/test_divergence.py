"""KL divergence between models, against a computation by hand in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from genai import Model, Tokenizer
from genai.errors import InputError, OptionError, VocabularyMismatchError
from genai.evaluate import kl_divergence, perplexity

Reference = Callable[[Model, list[int]], np.ndarray]


def test_a_model_and_itself(bundled: Any, bundled_folder: Path, text: str) -> None:
    with Model(bundled_folder, threads=1) as again:
        for other in (bundled, again):
            result = kl_divergence(bundled, other, text, window=128)
            assert result.mean == result.maximum == result.log_ratio == result.rms_probability_difference == 0
            assert result.top1_agreement == 1
            assert result.base_perplexity == result.other_perplexity


@pytest.fixture
def other(bundled_folder: Path, altered: Callable[..., Path]) -> Iterator[Model]:
    """The bundled model with one scale changed, and fp32 activations, so that logits do not depend on the chunks."""
    change = scale("model.layers.3.mlp.up_proj.MatMul.weight_scales", 1.05)
    with Model(altered(bundled_folder, change, embed=True), threads=2, accuracy="fp32") as model:
        yield model


def scale(name: str, factor: float) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        (found,) = [one for one in model.graph.initializer if one.name == name]
        array = onnx.numpy_helper.to_array(found)
        found.CopyFrom(onnx.numpy_helper.from_array((array * factor).astype(array.dtype), name))

    return change


def test_against_a_computation_by_hand(other: Model, exact: Model, text: str, reference_logprobs: Reference) -> None:
    """One window, token by token: sums over the whole vocabulary in float64."""
    short = text[:300]
    tokens = Tokenizer(exact).encode(short).tolist()
    p, q = reference_logprobs(exact, tokens), reference_logprobs(other, tokens)
    divergence = (np.exp(p) * (p - q)).sum(axis=1)
    rows = np.arange(len(tokens) - 1)
    mine, theirs = p[rows, tokens[1:]], q[rows, tokens[1:]]
    result = kl_divergence(exact, other, short)
    close = {"rel": 2e-3, "abs": 1e-7}
    assert result.mean == pytest.approx(divergence.mean(), **close) and result.mean > 1e-5
    assert result.mean_error == pytest.approx(divergence.std(ddof=1) / np.sqrt(len(rows)), **close)
    assert result.median == pytest.approx(np.median(divergence), **close)
    assert result.p90 == pytest.approx(np.quantile(divergence, 0.9), **close)
    assert result.p99 == pytest.approx(np.quantile(divergence, 0.99), **close)
    assert result.maximum == pytest.approx(divergence.max(), **close)
    assert result.top1_agreement == np.mean(p.argmax(axis=1) == q.argmax(axis=1))
    assert result.base_perplexity == pytest.approx(np.exp(-mine.mean()), rel=1e-4)
    assert result.other_perplexity == pytest.approx(np.exp(-theirs.mean()), rel=1e-4)
    assert result.log_ratio == pytest.approx((mine - theirs).mean(), **close)
    assert result.log_ratio_error == pytest.approx((mine - theirs).std(ddof=1) / np.sqrt(len(rows)), **close)
    rms = np.sqrt(np.mean((np.exp(mine) - np.exp(theirs)) ** 2))
    assert result.rms_probability_difference == pytest.approx(rms, **close)
    assert result.tokens == len(rows)


def test_its_perplexities_are_those_of_ppl(bundled: Any, exact: Model, text: str) -> None:
    result = kl_divergence(exact, bundled, text, window=100, stride=30)
    ours = [perplexity(model, text, window=100, stride=30) for model in (exact, bundled)]
    assert [result.base_perplexity, result.other_perplexity] == [one.perplexity for one in ours]
    assert result.log_ratio == pytest.approx(ours[1].nats_per_token - ours[0].nats_per_token, abs=1e-12)
    assert (result.windows, result.tokens) == (ours[0].windows, ours[0].tokens)


def test_direction_matters(form_model: Callable[..., Model], bundled: Any, text: str) -> None:
    other = form_model("fp32")
    there, back = kl_divergence(bundled, other, text[:300]), kl_divergence(other, bundled, text[:300])
    assert there.log_ratio == -back.log_ratio
    assert there.mean > 1 and abs(there.mean - back.mean) > 0.1
    assert there.windows == 1 and there.window == 256


def test_cache_type_alone(bundled_folder: Path, exact: Model, text: str) -> None:
    with Model(bundled_folder, threads=2, accuracy="fp32", kv_dtype="fp16") as half:
        result = kl_divergence(exact, half, text)
    assert 0 < result.mean < 3e-4


def test_a_model_with_two_rope_tables_beside_one_without(form_model: Callable[..., Model], text: str) -> None:
    """Both are cut where one of them recomputes the sequence, so that their rows stay aligned."""
    long, plain = form_model("long-rope"), form_model("fp32")
    result = kl_divergence(long, plain, text, window=200)
    assert result.base_perplexity == perplexity(long, text, window=200).perplexity
    assert result.tokens > 200


def test_other_vocabulary_size(form_model: Callable[..., Model], bundled: Any) -> None:
    with pytest.raises(VocabularyMismatchError, match=r"1536 logits per token.*800"):
        kl_divergence(bundled, form_model("small-vocabulary"), "What is 12 + 7?")


def test_the_first_other_token_is_named(bundled: Any, bundled_folder: Path, altered: Callable[..., Path]) -> None:
    folder = altered(bundled_folder, lambda model: None)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    by_id = {id_: token for token, id_ in vocabulary.items()}
    # Two one-byte tokens that no merge produces swap places.
    first, second = (id_ for id_ in sorted(by_id) if len(by_id[id_]) == 1 and by_id[id_] in "!#")
    vocabulary[by_id[first]], vocabulary[by_id[second]] = second, first
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    with Model(folder, threads=2) as other:
        with pytest.raises(VocabularyMismatchError) as caught:
            kl_divergence(bundled, other, "What is 12 + 7?")
    assert caught.value.what.startswith(f"token {first} is {by_id[first]!r} in ")
    assert f"and {by_id[second]!r} in {folder}" in caught.value.what
    assert "tokenizer.json" in caught.value.fix


def test_bad_text_and_windows(bundled: Any, exact: Model) -> None:
    with pytest.raises(InputError):
        kl_divergence(bundled, exact, "")
    with pytest.raises(OptionError, match="stride = 21"):
        kl_divergence(bundled, exact, "What is 12 + 7?", window=20, stride=21)
