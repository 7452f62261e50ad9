"""Priorities, deadlines, statistics, beams and the prefix cache on disk, through an LLM."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.errors import CacheCapacityError, DeadlineError, OptionError, SamplingError, UnsupportedModelError
from genai.models.folders import bundled_adapter

LONG: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def test_a_deadline_ends_a_request_with_what_there_is(llm: genai.LLM) -> None:
    def slow(ids: tuple[int, ...], logits: Any) -> None:
        time.sleep(0.03)

    cut, whole = llm.generate(
        ["Once upon a time"] * 2,
        [
            genai.SamplingParams(temperature=0, ignore_eos=True, max_tokens=200, logits_processors=[slow]),
            genai.SamplingParams(temperature=0, max_tokens=2),
        ],
        timeout=0.5,
    )
    assert cut.finish_reason == "timeout" and 0 < len(cut.token_ids) < 200
    assert whole.finish_reason in ("length", "stop")
    stream = llm.stream("Once upon a time", timeout=0.3, max_tokens=500, logits_processors=[slow], **LONG)
    assert "".join(stream) == stream.completion.text
    assert stream.completion.finish_reason == "timeout"
    with pytest.raises(DeadlineError) as raised:
        llm.generate("Once upon a time", timeout=1e-9)
    assert isinstance(raised.value, TimeoutError) and raised.value.why and raised.value.fix
    with pytest.raises(DeadlineError):
        list(llm.stream("Once", timeout=1e-9))
    with pytest.raises(DeadlineError):
        llm.generate("Once upon a time", timeout=1e-9, num_beams=2)
    assert llm.generate("Once upon a time", timeout=100, max_tokens=3)[0].token_ids


def test_a_higher_priority_is_started_sooner(bundled: genai.Model) -> None:
    with genai.LLM(bundled, max_sequences=1) as llm:
        ended: list[str] = []

        def slow(ids: tuple[int, ...], logits: Any) -> None:
            time.sleep(0.01)

        async def ask(name: str, priority: int) -> None:
            await llm.agenerate(name, max_tokens=20, priority=priority, logits_processors=[slow], **LONG)
            ended.append(name)

        async def everything() -> None:
            first = asyncio.create_task(ask("first", 0))
            while not llm.stats().running:  # on a busy machine this takes a while
                await asyncio.sleep(0.001)
            later = [asyncio.create_task(ask(name, p)) for name, p in (("low", -1), ("middle", 0), ("high", 5))]
            await asyncio.gather(first, *later)

        asyncio.run(everything())
        assert ended == ["first", "high", "middle", "low"]


def test_figures(bundled_folder: Path) -> None:
    with genai.LLM(bundled_folder, threads=1) as llm:
        assert llm.stats().as_dict()["generated_tokens"] == llm.stats().steps == 0
        for _ in range(2):
            llm.generate("A B C D " * 20, max_tokens=5, **LONG)
        with pytest.raises(DeadlineError):
            llm.generate("A", timeout=1e-9)
        stream = llm.stream("A", max_tokens=400, **LONG)
        next(stream)
        assert llm.stats().running == 1
        stream.close()
        stats = llm.stats()
        assert (stats.finished, stats.failed, stats.cancelled, stats.expired) == (2, 1, 1, 1)
        assert stats.running == stats.waiting == 0
        assert stats.generated_tokens >= 11 and stats.cached_tokens >= 32 and stats.prompt_tokens > 100
        assert stats.cache_blocks is not None and stats.block_tokens == 32
        assert stats.prefix_cache is None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"priority": 1.5}, "priority"),
    ({"priority": True}, "priority"),
    ({"timeout": 0}, "timeout"),
    ({"timeout": -1}, "timeout"),
    ({"timeout": float("nan")}, "timeout"),
    ({"timeout": "1"}, "timeout"),
    ({"keep_state": 1}, "keep_state"),
    ({"num_beams": 0}, "num_beams"),
    ({"num_beams": 257}, "num_beams"),
    ({"num_beams": True}, "num_beams"),
    ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences"),
    ({"num_beams": 2, "length_penalty": float("inf")}, "length_penalty"),
    ({"num_beams": 2, "early_stopping": "always"}, "early_stopping"),
    ({"length_penalty": 2.0}, "without beams"),
    ({"early_stopping": True}, "without beams"),
    ({"num_beams": 2, "keep_state": True}, "keep_state cannot be used with num_beams"),
    ({"num_beams": 2, "temperature": 0.7}, "temperature"),
    ({"num_beams": 2, "top_k": 5}, "top_k"),
    ({"num_beams": 2, "stop": "x"}, "stop"),
    ({"num_beams": 2, "banned_strings": "x"}, "banned_strings"),
    ({"num_beams": 2, "n": 2}, "n = 2"),
    ({"num_beams": 2, "prompt_logprobs": 1}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("options", "said"), BAD, ids=lambda value: str(value)[:40])
def test_bad_terms(llm: genai.LLM, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said) as raised:
        llm.generate("Hi", max_tokens=2, **options)
    assert raised.value.why and raised.value.fix


def test_beams_where_there_is_one_output(llm: genai.LLM) -> None:
    for call in (llm.stream, llm.chat, lambda *given, **options: list(llm.map([*given], **options))):
        with pytest.raises(OptionError, match="num_beams = 2"):
            call("Hi", num_beams=2)
    assert llm.generate("Hi", num_beams=1, num_return_sequences=1, max_tokens=1)


def test_beams_are_found_by_tasks_too_and_beside_other_work(llm: genai.LLM) -> None:
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "max_tokens": 8}
    alone = llm.generate("Once upon a time", **options)

    async def both() -> tuple[list[Any], list[Any]]:
        return await asyncio.gather(
            llm.agenerate("Once upon a time", **options), llm.agenerate("A cat", max_tokens=30, **LONG)
        )

    beams, _ = asyncio.run(both())
    assert [(one.token_ids, one.score) for one in beams] == [(one.token_ids, one.score) for one in alone]
    document = llm.read("Once upon")
    found = document.generate(" a time", **options)
    if document.tokens + tuple(llm.encode(" a time")) == tuple(llm.encode("Once upon a time")):
        assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    assert all(one.cached_tokens for one in found)


def test_beams_of_many_prompts_fit_a_small_cache(bundled: genai.Model, bundled_folder: Path) -> None:
    prompts = [[5 + number] * 100 for number in range(8)]
    options: dict[str, Any] = {"num_beams": 4, "max_tokens": 12}
    with genai.LLM(bundled) as llm:
        expected = [one.token_ids for one in llm.generate(prompts, **options)]
        block = llm.model.info.kv_bytes_per_token * 32
    with genai.LLM(bundled_folder, context_size=128, cache_bytes=11 * block, threads=1) as llm:
        assert [one.token_ids for one in llm.generate(prompts, **options)] == expected
        pool = llm.model.decoder.pool
        assert pool is not None
        held = pool.allocate(pool.num_free - 2)
        with pytest.raises(CacheCapacityError, match=r"too small for \d beams") as caught:
            llm.generate(prompts[0], **options)
        assert (
            f"other sequences of this model use {len(held)}" in caught.value.why
            and "the other sequences" in caught.value.fix
        )
        pool.release(held)


def test_beams_are_refused_only_where_they_need_more_blocks_than_there_are(bundled_folder: Path) -> None:
    """A prompt of 100 tokens has 3 full blocks, which 4 beams share, and each beam has one more block."""
    with genai.LLM(bundled_folder, context_size=128, threads=1) as llm:
        block = llm.model.info.kv_bytes_per_token * 32
    options: dict[str, Any] = {"num_beams": 4, "max_tokens": 20, "ignore_eos": True}
    with genai.LLM(bundled_folder, context_size=128, cache_bytes=7 * block, threads=1) as llm:
        assert llm.generate([7] * 100, **options)
    with genai.LLM(bundled_folder, context_size=128, cache_bytes=6 * block, threads=1) as llm:
        with pytest.raises(CacheCapacityError, match="too small for 4 beams of 101 tokens") as caught:
            llm.generate([7] * 100, **options)
        assert "other sequences of this model use 0" in caught.value.why and "close" not in caught.value.fix
        assert "fewer beams" in caught.value.fix and "max_tokens" in caught.value.fix
        pool = llm.model.decoder.pool
        assert pool is not None and pool.num_free == pool.num_blocks


def test_a_search_that_cannot_begin_leaves_nothing_behind(
    bundled: genai.Model, monkeypatch: pytest.MonkeyPatch, assert_all_given_back: Callable[[genai.Model], None]
) -> None:
    decoder, opened = bundled.decoder, []

    def adapt(sequence: Any, adapters: Any) -> None:
        opened.append(sequence)
        if len(opened) == 2:
            raise OptionError("the second search", "it fails at its beginning", "nothing")

    with genai.LLM(bundled) as llm:
        kind = type(decoder.open())
        close, closed = kind.close, list[Any]()
        monkeypatch.setattr(kind, "adapt", adapt)
        monkeypatch.setattr(kind, "close", lambda self: (closed.append(self), close(self)))
        with pytest.raises(OptionError, match="the second search"):
            llm.generate([[5] * 40, [6] * 40], num_beams=2, max_tokens=4)
        assert all(one in closed for one in opened) and len(opened) == 2
    assert_all_given_back(bundled)


def test_beams_that_may_not_go_on_give_what_is_finished(bundled: genai.Model) -> None:
    def only(*allowed: int) -> Callable[[Any, Any], Any]:
        def process(tokens: Any, logits: Any) -> Any:
            after = len(tokens) - 3
            logits[[token for token in range(len(logits)) if after or token not in allowed]] = -np.inf
            return logits

        return process

    with genai.LLM(bundled) as llm:
        options: dict[str, Any] = {"num_beams": 2, "max_tokens": 6, "stop_token_ids": [9], "num_return_sequences": 2}
        found = llm.generate([7, 8, 10], logits_processors=[only(9, 11)], **options)
        assert [(one.token_ids, one.stopped_by) for one in found] == [((), 9)]
        with pytest.raises(SamplingError, match="no beam has a next token"):
            llm.generate([7, 8, 10], logits_processors=[only(11, 12)], **options)


def test_beams_go_through_adapters(bundled_folder: Path) -> None:
    with genai.LLM(bundled_folder, threads=1) as llm:
        llm.load_adapter(bundled_adapter("words"), "words")
        prompt = llm.render("What is 12 + 7?")
        plain, changed = llm.generate([prompt] * 2, num_beams=3, max_tokens=12, adapter=[None, "words"])
        assert (plain.text, changed.text) == ("19", "19, nineteen")


def test_a_later_process_finds_what_was_read(bundled_folder: Path, tmp_path: Path) -> None:
    prompt, folder = "Luna and Tom went to the park. " * 20, tmp_path / "prefixes"
    for own in ({"kv_dtype": "fp16"}, {"kv_dtype": "int8"}, {"kv_dtype": "fp8", "device": "reference"}):
        options: dict[str, Any] = {**own, "prefix_cache_dir": folder}
        with genai.LLM(bundled_folder, **options) as llm:
            before = llm.generate(prompt, max_tokens=40, **LONG)[0]
            assert before.cached_tokens == 0
        with genai.LLM(bundled_folder, **options) as llm:
            after = llm.generate(prompt, max_tokens=40, **LONG)[0]
            assert after.cached_tokens == (before.prompt_tokens - 1) // 32 * 32
            assert after.token_ids == before.token_ids
            assert llm.stats().prefix_cache["found"] > 0  # type: ignore[index]
    with genai.LLM(bundled_folder, accuracy="fp32", prefix_cache_dir=folder) as llm:
        assert llm.generate(prompt, max_tokens=1)[0].cached_tokens == 0


def test_prefix_folders_that_are_refused(
    bundled_folder: Path, form_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    for options, said in (
        ({"prefix_cache_dir": tmp_path / "file"}, "cannot be used"),
        ({"prefix_cache_dir": tmp_path / "a", "prefix_cache_bytes": 0}, "0 bytes"),
        ({"prefix_cache_bytes": 10}, "without prefix_cache_dir"),
        *(({"prefix_cache_dir": bad}, "path of a folder") for bad in (1, b"q", "", " ", ["a"])),
    ):
        with pytest.raises(OptionError, match=said):
            genai.LLM(bundled_folder, **options)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="no cache blocks"):
        genai.LLM(form_folder("dense"), prefix_cache_dir=tmp_path / "b")
    with genai.Model(bundled_folder) as model:
        model.keep_prefixes_in(tmp_path / "c")
        model.keep_prefixes_in(tmp_path / "c", 10**9)
        with pytest.raises(OptionError, match="another folder"):
            model.keep_prefixes_in(tmp_path / "d")


def test_salts_separate_the_prefix_cache(bundled_folder: Path) -> None:
    prompt = "Luna has a red ball. Tom has a blue kite. " * 8
    with genai.LLM(bundled_folder) as llm:

        def cached(**options: Any) -> int:
            return llm.generate(prompt, max_tokens=1, **options)[0].cached_tokens

        assert cached() == 0 and (most := cached()) > 50
        assert cached(cache_salt="a") == 0 and cached(cache_salt="b") == 0
        assert cached(cache_salt="a") == cached(cache_salt="b") == cached() == cached(cache_salt=None) == most
        first = llm.generate(prompt, n=2, temperature=1, seed=1, max_tokens=5, cache_salt="c")
        assert [one.text for one in first] == [
            one.text for one in llm.generate(prompt, n=2, temperature=1, seed=1, max_tokens=5)
        ]


def test_replies_that_are_not_reused(bundled_folder: Path) -> None:
    prompt = "Luna has a red ball. Tom has a blue kite. " * 8
    with genai.LLM(bundled_folder) as llm:
        tokens = llm.encode(prompt)
        reply = llm.generate(tokens, max_tokens=80, ignore_eos=True)[0]
        longer = [*tokens, *reply.token_ids, *tokens[:10]]
        cold = llm.generate(longer, max_tokens=5, logprobs=1, cache_salt="cold")[0]
        exact = llm.generate(longer, max_tokens=5, logprobs=1, reuse_replies=False)[0]
        assert exact.logprobs == cold.logprobs and 0 < exact.cached_tokens <= len(tokens) and not cold.cached_tokens


def test_requests_that_reuse_replies_beside_requests_that_do_not(bundled_folder: Path) -> None:
    """Blocks after a reused reply depend on the reply's numerics, so only requests that reuse replies find them."""
    prompt = "Luna has a red ball. Tom has a blue kite. " * 6
    with genai.LLM(bundled_folder) as llm:
        tokens = llm.encode(prompt)
        ask: dict[str, Any] = {"max_tokens": 3, "logprobs": 1}
        for turn in range(3):
            reply = llm.generate(tokens, max_tokens=40, ignore_eos=True)[0]
            tokens = [*tokens, *reply.token_ids, *llm.encode("Tom has a kite. " * 8)]
            cold = llm.generate(tokens, cache_salt=f"cold {turn}", **ask)[0]
            for _ in range(2):
                assert llm.generate(tokens, reuse_replies=False, **ask)[0].logprobs == cold.logprobs
                assert llm.generate(tokens, **ask)[0].cached_tokens > len(tokens) // 2


def test_a_reply_that_is_reused(bundled_folder: Path) -> None:
    prompt = "Luna has a red ball. Tom has a blue kite. " * 8
    with genai.LLM(bundled_folder) as llm:
        tokens = llm.encode(prompt)
        reply = llm.generate(tokens, max_tokens=80, ignore_eos=True)[0]
        longer = [*tokens, *reply.token_ids, *tokens[:10]]
        assert llm.generate(longer, max_tokens=5)[0].cached_tokens > len(tokens)


def test_options_of_the_prefix_cache_that_are_refused(bundled_folder: Path) -> None:
    with genai.LLM(bundled_folder) as llm:
        for wrong in ({"cache_salt": 1}, {"cache_salt": b"x"}, {"reuse_replies": "no"}, {"reuse_replies": None}):
            with pytest.raises(OptionError, match=next(iter(wrong))):
                llm.generate("Hi", max_tokens=1, **wrong)  # type: ignore[arg-type]
        for wrong in ({"cache_salt": "x"}, {"reuse_replies": False}):
            with pytest.raises(OptionError, match="num_beams"):
                llm.generate("Hi", max_tokens=1, num_beams=2, **wrong)  # type: ignore[arg-type]
            state = llm.generate("Hi", max_tokens=1, keep_state=True)[0].state
            assert state is not None
            with state, pytest.raises(OptionError, match="saved state"):
                state.resume(max_tokens=1, **wrong)  # type: ignore[arg-type]
