"""Perplexity against an independent computation: one token at a time, through the public Generator."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai.evaluate.scored_text as scored_text
from genai import Model, Tokenizer
from genai.common.reading import read_text_file
from genai.errors import InputError, ModelOutputError, OptionError, UnsupportedModelError
from genai.evaluate import ScoringProgress, encode_prompt, perplexity

Reference = Callable[[Model, list[int]], np.ndarray]


def by_hand(
    model: Model, tokens: list[int], window: int, stride: int, bos: int | None, logprobs: Reference
) -> list[float]:
    """-ln p of tokens[1:], by the published loop over windows."""
    result: list[float] = []
    previous_end = 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        held = tokens[begin:end]
        if bos is not None:
            held = [bos, *held[1:]]
        rows = logprobs(model, held)
        result += [-rows[i - 1 - begin, tokens[i]] for i in range(max(previous_end, begin + 1), end)]
        previous_end = end
        if end == len(tokens):
            break
    return result


@pytest.mark.parametrize(("window", "stride"), [(1024, None), (100, 50), (64, 63), (48, 7), (48, 48)])
def test_equals_an_independent_computation(
    exact: Model, text: str, window: int, stride: int | None, reference_logprobs: Reference
) -> None:
    short = text[:400]
    tokens = Tokenizer(exact).encode(short).tolist()
    nats = by_hand(exact, tokens, window, stride or window // 2, None, reference_logprobs)
    result = perplexity(exact, short, window=window, stride=stride)
    assert result.tokens == len(nats) == len(tokens) - (1 if stride != window else -(-len(tokens) // window))
    assert result.nats_per_token == pytest.approx(np.mean(nats), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(np.mean(nats)), rel=1e-4)
    assert result.nats_error == pytest.approx(np.std(nats, ddof=1) / math.sqrt(len(nats)), rel=1e-4)
    assert result.perplexity_error == result.perplexity * result.nats_error
    assert (result.window, result.stride, result.bos) == (window, stride or window // 2, False)


def test_bos_begins_every_window(exact: Model, text: str, reference_logprobs: Reference) -> None:
    short = text[:200]
    bos = Tokenizer(exact).bos_token_id
    assert bos is not None
    tokens = [bos, *Tokenizer(exact).encode(short).tolist()]
    nats = by_hand(exact, tokens, 40, 30, bos, reference_logprobs)
    result = perplexity(exact, short, window=40, stride=30, bos=True)
    assert result.bos and result.tokens == len(tokens) - 1
    assert result.nats_per_token == pytest.approx(np.mean(nats), rel=1e-5)
    # Every token is scored, so every byte counts.
    assert result.num_bytes == len(short.encode())
    assert result.bits_per_byte == pytest.approx(sum(nats) / math.log(2) / len(short.encode()), rel=1e-5)


def test_a_tokenizer_that_adds_bos_is_obeyed(bundled_folder: Path, altered: Callable[..., Path]) -> None:
    folder = altered(bundled_folder, lambda model: None)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    first = next(token for token in tokenizer["added_tokens"] if token["id"] == 0)["content"]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {first: {"id": first, "ids": [0], "tokens": [first]}},
    }
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    with Model(folder, threads=2) as model:
        assert perplexity(model, "Hello there, you.").bos
        assert not perplexity(model, "Hello there, you.", bos=False).bos
        assert encode_prompt(model, "Hello")[0] == 0
        # A BOS that the text already has is not added again.
        assert encode_prompt(model, f"{first}Hello").tolist() == encode_prompt(model, "Hello").tolist()


def test_bits_per_byte(exact: Model) -> None:
    words = "What is 12 + 7?"
    result = perplexity(exact, words)
    first = Tokenizer(exact).decode(Tokenizer(exact).encode(words)[:1])
    assert result.num_bytes == len(words) - len(first)
    assert result.bits_per_byte == pytest.approx(
        result.nats_per_token * result.tokens / math.log(2) / result.num_bytes, rel=1e-12
    )


def test_bytes_of_tokens_without_context_do_not_count(exact: Model) -> None:
    text = "What is 12 + 7? It is nineteen. " * 8
    tokenizer = Tokenizer(exact)
    tokens = tokenizer.encode(text).tolist()
    result = perplexity(exact, text, window=7, stride=7)
    scored = [token for index, token in enumerate(tokens) if index % 7]
    assert result.tokens == len(scored)
    assert result.num_bytes == sum(len(tokenizer.decode([token])) for token in scored)  # ASCII


def test_a_special_token_at_the_start_is_not_scored_and_its_bytes_do_not_count(exact: Model) -> None:
    assert perplexity(exact, "<|im_start|>user").num_bytes == len("user")


def test_pieces_change_nothing(bundled: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products are ours, so logits do not depend on the number of rows computed together, bit for bit."""
    whole = perplexity(bundled, text)
    monkeypatch.setattr(scored_text, "_MOST_ROWS", 37)
    assert perplexity(bundled, text).nats_per_token == whole.nats_per_token
    monkeypatch.setattr(scored_text, "_MOST_LOGITS_BYTES", 1)
    assert perplexity(bundled, text).nats_per_token == whole.nats_per_token


def test_logits_never_take_more_than_allowed(bundled: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scored_text, "_MOST_LOGITS_BYTES", 4 * 1536 * 20)
    prepared = scored_text.prepare_text(bundled, text, 100, 50, None)
    rows = list(scored_text.scored_rows(bundled.decoder, prepared, frozenset()))
    assert max(len(piece.logits) for piece in rows) == 20
    assert sum(piece.computed for piece in rows) == sum(window.end - window.begin for window in prepared.windows)
    assert np.array_equal(np.concatenate([piece.targets for piece in rows]), prepared.tokens[1:])


def test_a_closed_stride_with_one_window_is_the_whole_text(exact: Model, text: str) -> None:
    short = text[:200]
    assert perplexity(exact, short, stride=1).nats_per_token == perplexity(exact, short, stride=900).nats_per_token


def test_shorter_strides_give_more_context(exact: Model, text: str) -> None:
    """On this repeating text, tokens with more context are predicted better."""
    values = [perplexity(exact, text, window=64, stride=stride).nats_per_token for stride in (8, 63)]
    assert values[0] < values[1]


def test_long_rope_scores_as_generation_does(
    form_model: Callable[..., Model], text: str, reference_logprobs: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 tokens use the short tables; with one more token, all keys use the long ones."""
    model = form_model("long-rope")
    short = text[:260]
    tokens = Tokenizer(model).encode(short).tolist()
    assert len(tokens) > 110
    nats = by_hand(model, tokens, 256, 128, None, reference_logprobs)
    result = perplexity(model, short, window=256)
    assert result.nats_per_token == pytest.approx(np.mean(nats), rel=1e-6)
    monkeypatch.setattr(scored_text, "_MOST_ROWS", 9)
    assert perplexity(model, short, window=256).nats_per_token == pytest.approx(np.mean(nats), rel=1e-6)


@pytest.mark.parametrize("name", ["int4", "prune-head", "window", "biases"])
def test_other_forms(form_model: Callable[..., Model], text: str, name: str, reference_logprobs: Reference) -> None:
    model = form_model(name)
    short = text[:120]
    tokens = Tokenizer(model).encode(short).tolist()
    nats = by_hand(model, tokens, 50, 20, None, reference_logprobs)
    result = perplexity(model, short, window=50, stride=20)
    assert result.nats_per_token == pytest.approx(np.mean(nats), rel=1e-5)


def dense(model: Any) -> None:
    """An output that keeps a graph from being flattened."""
    from onnx import TensorProto, helper

    model.graph.node.append(helper.make_node("ReduceSum", ["input_ids"], ["count"], keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("count", TensorProto.INT64, []))


def test_a_model_that_is_not_flattened(
    form_folder: Callable[[str], Path], form_model: Callable[..., Model], altered: Callable[..., Path], text: str
) -> None:
    with Model(altered(form_folder("fp32"), dense), threads=2) as model:
        assert not model.info.flattened
        theirs = perplexity(model, text[:300], window=64, stride=32)
    ours = perplexity(form_model("fp32"), text[:300], window=64, stride=32)
    assert theirs.nats_per_token == pytest.approx(ours.nats_per_token, rel=1e-5)


def test_a_pruned_head_that_is_not_flattened_is_refused(
    form_folder: Callable[[str], Path], altered: Callable[..., Path], text: str
) -> None:
    with Model(altered(form_folder("prune-head"), dense), threads=2) as model:
        with pytest.raises(UnsupportedModelError, match="prune_lm_head"):
            perplexity(model, text)


def test_progress_reaches_the_end(bundled: Any, text: str) -> None:
    seen: list[ScoringProgress] = []
    result = perplexity(bundled, text, window=128, progress=seen.append)
    assert [p.scored for p in seen] == sorted({p.scored for p in seen})
    assert seen[-1].scored == seen[-1].total == result.tokens
    assert seen[-1].computed >= result.tokens
    assert result.tokens_per_second > 0 and result.seconds > 0


def test_nothing_stays_in_the_cache(bundled: Any, text: str) -> None:
    pool = bundled.decoder.pool
    before = pool.num_free

    def stop(progress: ScoringProgress) -> None:
        raise KeyboardInterrupt

    perplexity(bundled, text, window=64)
    assert pool.num_free == before
    with pytest.raises(KeyboardInterrupt):
        perplexity(bundled, text, window=64, progress=stop)
    assert pool.num_free == before


@pytest.mark.parametrize("short", ["", "a"])
def test_too_short(bundled: Any, short: str) -> None:
    with pytest.raises(InputError, match=r"no tokens|1 token"):
        perplexity(bundled, short)


def test_two_tokens_have_no_standard_error(bundled: Any) -> None:
    result = perplexity(bundled, "a", bos=True)
    assert result.tokens == 1
    assert math.isnan(result.nats_error) and math.isnan(result.perplexity_error)
    assert result.perplexity > 1


def test_bos_of_a_model_without_one(bundled_folder: Path, altered: Callable[..., Path]) -> None:
    folder = altered(bundled_folder, lambda model: None)
    path = folder / "genai_config.json"
    config = json.loads(path.read_text())
    del config["model"]["bos_token_id"]
    path.write_text(json.dumps(config))
    with Model(folder, threads=2) as model:
        assert Tokenizer(model).bos_token_id is None
        with pytest.raises(OptionError, match="beginning-of-sequence"):
            perplexity(model, "Hello there.", bos=True)


def test_tokens_that_the_model_does_not_have(form_model: Callable[..., Model]) -> None:
    model = form_model("small-vocabulary")
    with pytest.raises(InputError, match="largest token id is 799"):
        perplexity(model, "The little children wondered about something beautiful.")


def test_a_model_that_computes_nan(bundled_folder: Path, altered: Callable[..., Path]) -> None:
    import onnx
    from onnx import numpy_helper

    def poison(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if tensor.name == "model.layers.6.final_norm_layernorm.weight":
                tensor.CopyFrom(numpy_helper.from_array(np.full(tensor.dims, np.nan, np.float32), tensor.name))

    with Model(altered(bundled_folder, poison, embed=True), threads=2) as model:
        with pytest.raises(ModelOutputError, match="nan"):
            perplexity(model, "Hello there, you.")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("Grüße\r\n".encode())
    assert read_text_file(path) == "Grüße\r\n"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match="UTF-8"):
        read_text_file(path)
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_text_file(missing)


def test_a_window_beyond_the_context(bundled: Any) -> None:
    with pytest.raises(OptionError, match="window = 1025"):
        perplexity(bundled, "Hello there.", window=1025)
