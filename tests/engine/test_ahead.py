"""Steps that start before the tokens of the previous step are read change only the timing, not the results."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.errors import SamplingError
from genai.kernels.cpu.executor import CpuExecutor
from genai.kernels.device import DeviceFailed
from genai.models import loading

from .late_executor import LateExecutor, Log

Open = Callable[..., Any]
# What the cache of a context of 160 tokens takes.
CONTEXT_BYTES = 160 * 1536


@pytest.fixture
def open_model(bundled_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """The bundled model on a device that can run steps ahead."""

    @contextmanager
    def opened(log: Log, **options: Any) -> Iterator[genai.Model]:
        monkeypatch.setattr(loading, "open_executor", lambda device, threads: LateExecutor(CpuExecutor(1), log))
        given = {"context_size": 160, "quiet": True, **options}
        with genai.Model(bundled_folder, **given) as model:
            yield model

    return opened


# --- requests that come and go -------------------------------------------------------------------------------------


class Schedule:
    """Requests of many kinds; arrivals and cancellations depend on the number of tokens so far."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.is_tight = seed % 2 == 1
        self.requests = [self._request(rng) for _ in range(rng.randint(1, 5))]

    @staticmethod
    def _request(rng: random.Random) -> dict[str, Any]:
        prompt = rng.choice(["Count to five.", "What is 12 + 7?", "Tell me a story about Luna and Tom.", "Say hello."])
        drawn = {"do_sample": True, "temperature": rng.choice([0.7, 1.5]), "top_k": rng.choice([3, 40])}
        return {
            "prompt": prompt,
            "padding": rng.choice([0, 0, 3, 40]),
            "options": drawn if rng.random() < 0.5 else {},
            "penalty": rng.choice([1.0, 1.0, 1.3]),
            "ngram": rng.choice([0, 0, 2]),
            "seed": rng.randrange(1000),
            "most": rng.choice([1, 7, 20, 40, 40]),
            "least": rng.choice([0, 0, 10, 30]),
            "stops": rng.choice([(), (), (), ("e",), ("Tom", "four")]),
            "regex": rng.choice(["", "", "", "[a-z]{3,9}", "(yes|no), (sir|madam)!"]),
            "comes": rng.choice([0, 0, 3, 10, 17]),
            "goes": rng.choice([None, None, None, 1, 5]),
        }

    def run(self, model: genai.Model) -> tuple[Any, ...]:
        """Return each request's events, the engine's counts, and the cached blocks at the end."""
        engine, tokenizer = genai.Engine(model), genai.Tokenizer(model)
        buffer, told = engine.create_event_buffer(64), {}
        waiting, running = list(enumerate(self.requests)), {}
        while waiting or engine.has_pending_requests():
            total = sum(event[0] is not None for events in told.values() for event in events)
            for number, one in list(waiting):
                if one["comes"] <= total or not engine.has_pending_requests():
                    waiting.remove((number, one))
                    running[number] = self._begin(engine, tokenizer, one)
                    told[number] = []
            for event in engine.run(buffer):
                number = next(number for number, request in running.items() if request is event.request)
                told[number].append((event.token, event.finish_reason, event.usage, str(event.error)))
            for number, request in running.items():
                if self.requests[number]["goes"] == len(told[number]):
                    request.cancel_turn(1)
        for request in running.values():
            request.close()
        counts = engine._core.counts
        pool = model.decoder.pool
        assert pool is not None and pool.num_free == pool.num_blocks
        counted = counts.finished, counts.failed, counts.cancelled, counts.prompt_tokens, counts.generated_tokens
        if self.is_tight:  # who has to wait may find other blocks
            shown = {number: [event[:2] for event in events] for number, events in told.items()}
            return shown, counted
        return told, counted, counts.cached_tokens, counts.preempted, frozenset(pool._block_of_key)

    @staticmethod
    def _begin(engine: Any, tokenizer: Any, one: dict[str, Any]) -> Any:
        request = engine.create_request()
        options = genai.TurnOptions(request)
        for name, value in one["options"].items():
            getattr(options, f"set_{name}")(value)
        options.set_repetition_penalty(one["penalty"])
        options.set_no_repeat_ngram_size(one["ngram"])
        options.set_seed(one["seed"])
        options.set_max_generated_tokens(one["most"])
        options.set_min_generated_tokens(min(one["least"], one["most"]))
        if one["stops"]:
            options.set_stop_strings(one["stops"])
        if one["regex"]:
            options.set_guidance("regex", one["regex"])
        text = f"<|im_start|>user\n{'so ' * one['padding']}{one['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        request.begin_turn(tokenizer.encode(text), options)
        return request


@pytest.mark.parametrize("seed", range(24))
def test_requests_are_told_the_same(open_model: Open, seed: int) -> None:
    schedule, found = Schedule(seed), []
    for runs_ahead in (False, True):
        log = Log([], runs_ahead=runs_ahead)
        with open_model(log, cache_bytes=(1 if schedule.is_tight else 20) * CONTEXT_BYTES) as model:
            found.append(schedule.run(model))
        assert ("ahead" in log.asked) == runs_ahead
    assert found[0] == found[1]


# --- what requests may ask for ---------------------------------------------------------------------------------------


def doubled(tokens: Any, logits: np.ndarray) -> np.ndarray:
    return logits * 2


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0}, "drawn": {"temperature": 1.2, "top_p": 0.9}, "samples": {"temperature": 1.0, "n": 3},
    "logprobs": {"temperature": 0, "logprobs": 2}, "prompt": {"temperature": 0, "prompt_logprobs": 1},
    "banned": {"temperature": 0, "banned_strings": ["the", "a "]}, "mirostat": {"mirostat": 2, "mirostat_tau": 3.0},
    "stops": {"temperature": 0, "stop": ["ee", "on"]}, "regex": {"temperature": 1.0, "regex": "(yes|no), (sir|madam)!"},
    "history": {"temperature": 0.9, "repetition_penalty": 1.3, "dry_multiplier": 0.8},
    "processors": {"temperature": 0.8, "logits_processors": [doubled]}, "short": {"temperature": 0, "max_tokens": 1},
}  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_completions_are_the_same(open_model: Open, seed: int) -> None:
    """Requests of many kinds in one batch; full contexts shift."""
    rng, found = random.Random(seed), []
    kinds = rng.sample([*KINDS], rng.randint(1, 5))
    texts = [rng.choice(["Count to five.", "Tell me a story about Luna and Tom.", "Say hello."]) for _ in kinds]
    asked = {"max_tokens": 90, "min_tokens": 20, "seed": seed}
    params = [genai.SamplingParams(**{**asked, **KINDS[kind]}) for kind in kinds]
    shift = seed % 3 == 0 and {"logprobs", "prompt", "banned"}.isdisjoint(kinds)
    for runs_ahead in (False, True):
        log = Log([], runs_ahead=runs_ahead)
        with (
            open_model(log, cache_bytes=20 * CONTEXT_BYTES, context_size=96 if shift else 160) as model,
            genai.LLM(model) as llm,
        ):
            prompts = [llm.render(text) for text in texts]
            completions = llm.generate(prompts, params, **({"ctx_shift": 8} if shift else {}))
            found.append([told(completion) for completion in completions])
        asks = {"logprobs", "prompt"} & {*kinds}
        assert ("ahead" in log.asked) == (runs_ahead and (not asks or len(kinds) > 1)) or asks
    assert found[0] == found[1]


def told(completion: Any) -> tuple[Any, ...]:
    """Everything in a completion except times."""
    ends = completion.finish_reason, completion.stopped_by, completion.prompt_tokens, completion.cached_tokens
    return completion.text, completion.token_ids, ends, completion.logprobs, completion.prompt_logprobs


# --- what goes wrong -------------------------------------------------------------------------------------------------


class Failing:
    """Raises DeviceFailed at the calls of one kind with the given numbers."""

    def __init__(self, what: str, numbers: range) -> None:
        self.what, self.numbers, self.seen = what, numbers, 0

    def __call__(self, what: str) -> None:
        if what == self.what:
            self.seen += 1
            if self.seen in self.numbers:
                raise DeviceFailed("the device had enough")


TEXTS = ["Count to five.", "Tell me a story about Luna and Tom."]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def answers(model: genai.Model) -> list[Any]:
    with genai.LLM(model) as llm:
        return [told(one) for one in llm.generate([llm.render(text) for text in TEXTS], **GREEDY)]


@pytest.mark.parametrize("what", ["ahead", "wait"])
@pytest.mark.parametrize("numbers", [range(1, 2), range(3, 5), range(1, 100)])
def test_what_fails_ahead_is_made_as_usual(open_model: Open, what: str, numbers: range) -> None:
    with open_model(Log([], runs_ahead=False)) as model:
        expected = answers(model)
    log = Log([], Failing(what, numbers))
    with open_model(log) as model:
        assert answers(model) == expected
        assert model.decoder.pool is not None and model.decoder.pool.num_free == model.decoder.pool.num_blocks
    assert log.asked.count("ahead") > 1


def test_an_interrupt_loses_nothing(open_model: Open) -> None:
    """Ctrl-C while an engine, run by its caller, waits for tokens."""
    found = []
    for interrupts in (0, 3):
        log = Log([])
        with open_model(log) as model:
            engine, tokenizer = genai.Engine(model), genai.Tokenizer(model)
            buffer, tokens = engine.create_event_buffer(8), [list[Any](), list[Any]()]
            requests = [engine.create_request() for _ in TEXTS]
            for request, text in zip(requests, TEXTS, strict=True):
                options = genai.TurnOptions(request)
                options.set_max_generated_tokens(12)
                request.begin_turn(tokenizer.encode(text), options)
            while engine.has_pending_requests():
                log.fails = Interrupting(interrupts)
                try:
                    for event in engine.run(buffer):
                        tokens[requests.index(event.request)].append(event.token)
                except KeyboardInterrupt:
                    interrupts -= 1
            found.append(tokens)
    assert found[0] == found[1]


class Interrupting:
    """Raises KeyboardInterrupt in a wait, if any interrupts are left."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, what: str) -> None:
        if what == "wait" and self.left:
            raise KeyboardInterrupt


def test_a_device_that_is_lost_ends_requests(open_model: Open) -> None:
    def lost(what: str) -> None:
        if len(log.asked) > 9:
            raise DeviceFailed("the device is gone")

    log = Log([], lost)
    with open_model(log) as model, genai.LLM(model) as llm:
        with pytest.raises(genai.errors.DeviceError, match="the device is gone"):
            llm.generate(TEXTS, **GREEDY)
        log.fails = str
        assert len(llm.generate(TEXTS, **GREEDY)) == 2


def test_a_row_without_a_token_ends_its_request_alone(open_model: Open) -> None:
    def forbidding(tokens: Any, logits: np.ndarray) -> np.ndarray:
        return np.full_like(logits, -np.inf) if len(tokens) > 12 else logits

    async def both(llm: genai.LLM) -> list[Any]:
        bad = llm.agenerate(TEXTS[1], **GREEDY, logits_processors=[forbidding])
        return await asyncio.gather(llm.agenerate(TEXTS[0], **GREEDY), bad, return_exceptions=True)

    log = Log([])
    with open_model(log) as model, genai.LLM(model) as llm:
        good, bad = asyncio.run(both(llm))
    assert len(good[0].token_ids) == 12
    assert isinstance(bad, SamplingError) and str(bad).startswith("no next token can be chosen")
    assert "ahead" in log.asked


def test_a_model_that_is_closed_meanwhile(open_model: Open) -> None:
    log = Log([])
    with open_model(log) as model:
        llm = genai.LLM(model)
        stream = llm.stream(TEXTS[0], **{**GREEDY, "max_tokens": 100})
        next(iter(stream))
        model.close()
        with pytest.raises(genai.errors.GenaiError):
            for _ in stream:
                pass
        llm.close()
