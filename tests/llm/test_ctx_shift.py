"""ctx_shift: a sequence drops the middle of its tokens, its keys are rotated to new positions, and it continues.

With one layer, keys and values depend only on their own token and position: a shifted cache must then equal the cache
that is computed anew from the remaining tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import genai
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.engine.decoder import compute
from genai.engine.sequence import ContextShift
from genai.errors import OptionError, StateError, UnsupportedModelError
from genai.evaluate import perplexity
from genai.kernels.host_memory import HostMemory
from genai.kvcache.pool import BlockPool, CacheFull
from genai.kvcache.rotation import rotate_back
from genai.kvcache.table import BlockTable
from genai.llm.chat import ChatSession
from tools.bundled_model.tasks.stories import story
from tools.random_weights import RandomWeights

from .conftest import SPEC

# kv_dtype -> how far logits may be from those of tokens that are computed anew.
NEAR = {"fp32": 2e-3, "fp16": 2e-2, "int8": 0.3}


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory, bundled_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("shift") / "one-layer"
    spec = DecoderSpec(**{**SPEC, "num_layers": 1})
    weights = RandomWeights(spec, seed=3)
    write_model_folder(folder, spec, ExportOptions(precision="fp32"), weights, tokenizer_dir=bundled_folder)
    return folder


@pytest.fixture(scope="module")
def short(bundled_folder: Path) -> Iterator[genai.LLM]:
    with genai.LLM(bundled_folder, context_size=160, threads=2) as llm:
        yield llm


# --- keys at other places --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", NEAR)
@pytest.mark.parametrize("shared", [False, True], ids=["own blocks", "shared blocks"])
def test_one_layer_shifted_is_one_layer_anew(kv_dtype: str, shared: bool, one_layer: Path) -> None:
    tokens = np.random.default_rng(0).integers(3, 1500, 150).tolist()
    with genai.Model(one_layer, kv_dtype=kv_dtype) as model:
        decoder = model.decoder
        sequence = decoder.open()
        sequence.append(tokens[:100])
        compute(decoder, [sequence])
        sequence.publish()
        other = sequence.fork() if shared else None
        sequence.shift = ContextShift(20, 128)
        for token in tokens[100:129]:
            sequence.append([token])
            compute(decoder, [sequence]) if len(sequence.tokens) <= 128 else None
        assert sequence.is_full
        sequence.forget()
        assert sequence.forgotten == 32 and not sequence.is_full and sequence.num_computed == 128
        (shifted,) = compute(decoder, [sequence])

        fresh = decoder.open()
        fresh.append(tokens[:32], together=100)
        fresh.append(tokens[64:100], together=100)
        for token in tokens[100:129]:
            fresh.append([token])
        (anew,) = compute(decoder, [fresh])
        assert np.abs(shifted[-1] - anew[-1]).max() < NEAR[kv_dtype]

        unturned = decoder.open()  # a test that cannot fail proves nothing: the middle does matter
        unturned.append(tokens[:100])
        for token in tokens[100:129]:
            unturned.append([token])
        (whole,) = compute(decoder, [unturned])
        assert np.abs(whole[-1] - anew[-1]).max() > 2 * NEAR[kv_dtype]
        if other is not None:
            other.append([tokens[100]])
            (untouched,) = compute(decoder, [other])
            unturned.rewind(101)
            (expected,) = compute(decoder, [unturned])
            np.testing.assert_array_equal(untouched[-1], expected[-1])


def test_a_shifted_sequence_rewinds_and_is_computed_again(one_layer: Path) -> None:
    tokens = np.random.default_rng(1).integers(3, 1500, 129).tolist()
    with genai.Model(one_layer, kv_dtype="fp32") as model:
        decoder = model.decoder

        def shifted() -> Any:
            sequence = decoder.open()
            sequence.append(tokens[:128])
            compute(decoder, [sequence])
            sequence.append(tokens[128:])
            sequence.shift = ContextShift(1, 128)
            sequence.forget()
            return sequence

        sequence = shifted()
        forgotten = sequence.forgotten
        assert forgotten == 32
        (before,) = compute(decoder, [sequence])
        sequence.rewind(100)
        sequence.append(tokens[100:])
        assert sequence.num_computed == 99 and sequence.forgotten == forgotten
        (again,) = compute(decoder, [sequence])
        np.testing.assert_allclose(again[-1], before[-1], atol=2e-3)
        sequence.truncate()  # as where it has to give its blocks back
        assert sequence.num_computed == 0 and sequence.pending().num_tokens == 32
        (anew,) = compute(decoder, [sequence])
        np.testing.assert_allclose(anew[-1], before[-1], atol=2e-3)
        sequence.rewind(50)  # into what was forgotten: all of it is remembered again
        assert sequence.forgotten == 0 and sequence.num_computed == 32
        other = decoder.open()
        other.append(tokens[:50], together=128)
        (mine,), (theirs,) = compute(decoder, [sequence]), compute(decoder, [other])
        np.testing.assert_allclose(mine[-1], theirs[-1], atol=2e-3)
        with pytest.raises(StateError, match="cannot drop tokens"):
            other.forget()


def test_tables_forget_blocks() -> None:
    pool = BlockPool(8)
    table = BlockTable(pool, 4)
    table.append(18)
    other = table.fork()
    third = BlockTable(pool, 4)
    third.append(8)
    before = [*table.blocks]
    with pytest.raises(CacheFull):
        table.forget(1, 2)  # two blocks behind them are shared, and there is room for one copy
    assert [*table.blocks] == before and table.length == 18
    third.release()
    copies = table.forget(1, 2)
    assert [source for source, _ in copies] == before[3:] == [*other.blocks][3:]
    assert [*table.blocks] == [before[0], *(copy for _, copy in copies)] and table.length == 10
    pool.release(source for source, _ in copies)
    assert [pool.references(block) for block in before] == [2, 1, 1, 1, 1]
    other.release()
    assert table.forget(1, 1) == [] and table.length == 6 and pool.num_free == 6
    for wrong in ((0, 0), (-1, 1), (1, 1), (0, 9)):
        with pytest.raises(ValueError, match="are not full"):
            table.forget(*wrong)


def test_rotations_that_do_not_add_up_are_refused() -> None:
    angles = np.arange(20)[:, None] * np.array([1.0, 0.1])
    turn = rotate_back(np.cos(angles) * 1.2, np.sin(angles) * 1.2, False, 3)
    np.testing.assert_allclose(turn.cosine, np.cos(angles[3]), atol=1e-6)
    with pytest.raises(ValueError, match="do not add up"):
        rotate_back(np.cos(angles**1.1), np.sin(angles**1.1), False, 3)


# --- requests --------------------------------------------------------------------------------------------------------


def test_a_reply_goes_on_past_the_context(short: genai.LLM) -> None:
    text = "Once upon a time, there was a girl named Luna. "
    (plain,) = short.generate(text, temperature=0, ignore_eos=True)
    assert plain.finish_reason == "length" and plain.forgotten_tokens == 0
    (shifted,) = short.generate(text, temperature=0, ignore_eos=True, ctx_shift=True, max_tokens=500)
    assert shifted.finish_reason == "length" and len(shifted.token_ids) == 500
    assert shifted.token_ids[: len(plain.token_ids)] == plain.token_ids
    assert shifted.forgotten_tokens > 300 and shifted.forgotten_tokens % 32 == 0
    assert not short.model.decoder.pool.num_blocks - short.model.decoder.pool.num_free  # type: ignore[union-attr]


MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 1, "n": 2},
    {"temperature": 0.8, "seed": 2, "repetition_penalty": 1.3, "dry_multiplier": 0.5},
    {"temperature": 1, "seed": 3, "banned_strings": ["the"], "logprobs": 1},
    {"temperature": 1, "seed": 4, "regex": "([a-z]{2,9} ){400}"},
    {"temperature": 0.9, "seed": 5, "mirostat": 2},
]


@pytest.mark.parametrize("speculation", ["off", "lookup"])
def test_in_company_as_alone_and_with_guesses(
    speculation: str, short: genai.LLM, bundled_folder: Path, assert_all_given_back: Callable[[genai.Model], None]
) -> None:
    prompts = [f"Luna and Tom, {index}, Luna and Tom, {index}" for index in range(len(MIXED))]
    params = [genai.SamplingParams(**one, max_tokens=260, ignore_eos="regex" not in one) for one in MIXED]
    alone = [short.generate(prompt, one, ctx_shift=40) for prompt, one in zip(prompts, params, strict=True)]
    with genai.LLM(bundled_folder, context_size=160, threads=2, speculation=speculation) as llm:
        together = llm.generate(prompts, params, ctx_shift=40)
        assert_all_given_back(llm.model)
    expected = [(one.token_ids, one.text) for some in alone for one in some]
    assert [(one.token_ids, one.text) for one in together] == expected
    assert all(one.forgotten_tokens for one in together)


def test_a_small_cache_is_enough(bundled_folder: Path) -> None:
    with genai.LLM(bundled_folder, context_size=160, threads=2, cache_bytes=2**20) as llm:
        found = llm.generate(["Luna", "Tom"] * 6, ctx_shift=True, max_tokens=300, ignore_eos=True, seed=1)
        assert [len(one.token_ids) for one in found] == [300] * 12


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"ctx_shift": -1}, "ctx_shift = -1"),
        ({"ctx_shift": "yes"}, "ctx_shift = 'yes'"),
        ({"ctx_shift": 200}, "ctx_shift keeps 200 tokens of a context of 160"),
        ({"ctx_shift": True, "keep_state": True}, "ctx_shift cannot be used with keep_state"),
        ({"ctx_shift": True, "num_beams": 2}, "ctx_shift cannot be used with num_beams"),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], what: str, short: genai.LLM) -> None:
    with pytest.raises(OptionError, match=what):
        short.generate("Once", **options)


def test_perplexity_is_that_of_windows_read_anew(bundled: genai.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, tokenizer = [story(Random(seed)) for seed in range(8)], genai.Tokenizer(bundled)
    asked = [tokenizer.apply_chat_template([{"role": "user", "content": turn.question}]) for turn in turns]
    text = "".join(f"{question}{turn.reply}<|im_end|>\n" for question, turn in zip(asked, turns, strict=True))
    anew = perplexity(bundled, text, window=128).perplexity
    shifted = perplexity(bundled, text, window=128, ctx_shift=32)
    assert shifted.windows == 1 and shifted.stride == 32 and shifted.tokens > 500
    assert abs(shifted.perplexity / anew - 1) < 0.1
    monkeypatch.setattr(HostMemory, "rotate_keys", lambda *arguments: None)
    assert perplexity(bundled, text, window=128, ctx_shift=32).perplexity > 1.5 * anew, "keys at the wrong places"
    for wrong in ({"ctx_shift": 100}, {"ctx_shift": True}, {"ctx_shift": 0, "stride": 10}):
        with pytest.raises(OptionError):
            perplexity(bundled, text, window=128, **wrong)  # type: ignore[arg-type]


def test_a_conversation_goes_on_within_a_reply(bundled_folder: Path) -> None:
    with genai.LLM(bundled_folder, context_size=160, threads=2) as llm:
        chat = ChatSession(llm, system="You tell stories.", ctx_shift=True, ignore_eos=True, max_tokens=300)
        reply = chat.ask("Tell me a story about Luna and Tom.")
        assert len(reply.completion.token_ids) == 300 and reply.completion.forgotten_tokens
        assert chat.context_used <= llm.context_size and not chat.was_cut
        with pytest.raises(OptionError, match="contradicts on_overflow"):
            ChatSession(llm, ctx_shift=True, on_overflow="shift")


def test_states_of_what_forgot_cannot_be_saved(short: genai.LLM, tmp_path: Path) -> None:
    with short.stream("Once", ctx_shift=True, ignore_eos=True, max_tokens=400, temperature=0) as stream:
        for _ in stream:
            if stream.completion.forgotten_tokens:
                break
        state = stream.fork()
    with pytest.raises(StateError, match="dropped tokens"):
        state.save_state(tmp_path / "state")


@pytest.mark.parametrize(
    ("form", "why"), [("dense", "each sequence has a separate cache"), ("long-rope", "different rotary tables")]
)
def test_models(form: str, why: str, form_folder: Callable[[str], Path]) -> None:
    with genai.LLM(form_folder(form), threads=1) as llm, pytest.raises(UnsupportedModelError, match=why):
        llm.generate("Once", ctx_shift=True)


def test_learned_positions(tmp_path: Path, bundled_folder: Path) -> None:
    spec = DecoderSpec(**{**SPEC, "model_type": "gpt2", "position_embeddings": True})
    weights = RandomWeights(spec, seed=3)
    folder = tmp_path / "learned"
    write_model_folder(folder, spec, ExportOptions(precision="fp32"), weights, tokenizer_dir=bundled_folder)
    with (
        genai.LLM(folder, threads=1) as llm,
        pytest.raises(UnsupportedModelError, match="does not use positions only to rotate"),
    ):
        llm.generate("Once", ctx_shift=True)


def test_a_cache_of_exactly_one_context_shifts_as_a_large_one(bundled_folder: Path) -> None:
    """No block is free for copies of the blocks that the prefix cache also holds."""
    prompt = list(range(5, 150))
    options: dict[str, Any] = {"ctx_shift": True, "max_tokens": 120, "ignore_eos": True, "temperature": 0}
    found = []
    for exact in (False, True):
        with genai.LLM(bundled_folder, threads=2, context_size=160) as llm:
            exact_bytes = 5 * llm.model.decoder.storage.layout.bytes_per_block  # type: ignore[attr-defined]
        with genai.LLM(bundled_folder, threads=2, context_size=160, cache_bytes=exact_bytes if exact else None) as llm:
            reply = llm.generate([prompt], **options)[0]
            found.append(reply.token_ids)
            assert reply.forgotten_tokens and llm.stats().preempted == 0
    assert found[0] == found[1]
