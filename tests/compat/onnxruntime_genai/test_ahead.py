"""A Generator that starts its next step before it reads its tokens: every call in between finds what it always did."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.errors import SamplingError, StateError
from genai.kernels.cpu.executor import CpuExecutor
from genai.kernels.device import DeviceFailed
from genai.models import loading
from genai.models.folders import bundled_adapter

from ...engine.late_executor import LateExecutor, Log

Open = Callable[..., Any]


@pytest.fixture
def open_model(bundled_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """The bundled model on a device whose steps may run ahead, or may not."""

    @contextmanager
    def opened(log: Log) -> Iterator[genai.Model]:
        monkeypatch.setattr(loading, "open_executor", lambda device, threads: LateExecutor(CpuExecutor(1), log))
        with genai.Model(bundled_folder, context_size=128, cache_bytes=4 << 20, quiet=True) as model:
            yield model

    return opened


def begin(model: genai.Model, batch: int, **options: Any) -> genai.Generator:
    params = genai.GeneratorParams(model)
    params.set_search_options(**{"do_sample": False, "max_length": 100, "batch_size": batch, **options})
    return genai.Generator(model, params)


PROMPTS = [[5, 9, 31, 77, 12, 8], [41, 6, 900], [1000, 3, 3, 17, 50]]


def act(generator: genai.Generator, calls: list[tuple[str, Any]], folder: Path, adapters: genai.Adapters) -> list[Any]:
    """What calls return, or why they refuse, and what the sequences are at the end."""
    found: list[Any] = []
    for call, value in calls:
        try:
            generator = one(generator, call, value, found, folder, adapters)
        except StateError as error:
            found.append(str(error))
        found.append((call, generator.is_done(), generator.token_count()))
    return found + [generator.get_sequence(i).tolist() for i in range(len(generator._sequences))]


def one(
    generator: genai.Generator, call: str, value: Any, found: list[Any], folder: Path, adapters: genai.Adapters
) -> genai.Generator:
    """One call; the generator to go on with."""
    if call == "generate":
        for _ in range(value):
            generator.generate_next_token()
            found.append(generator.get_next_tokens().tolist())
    elif call == "logits":
        found.append(generator.get_logits().tobytes())
    elif call == "output":
        found.append(generator.get_output("logits").tobytes())
        found.append(generator.get_input("input_ids").tolist())
    elif call == "set_logits":
        logits = generator.get_logits()
        logits[..., value] += 100
        generator.set_logits(logits)
    elif call == "rewind":
        generator.rewind_to(max(1, generator.token_count() - value))
    elif call == "append" and generator.token_count() + len(value) < 100:
        generator.append_tokens([value] * len(generator._sequences))
    elif call == "fork":
        other = generator.fork()
        other.generate_next_token()
        found.append(other.get_next_tokens().tolist())
        return other if value else generator
    elif call == "adapter":
        generator.set_active_adapter(adapters, value)
    elif call == "save" and len(generator._sequences) == 1:
        generator.save_state(folder / "state")
        generator.load_state(folder / "state")
    return generator


def drawn_calls(rng: random.Random) -> list[tuple[str, Any]]:
    made: list[tuple[str, Any]] = []
    for _ in range(rng.randint(3, 9)):
        made.append(("generate", rng.randint(1, 12)))
        values = {
            "logits": None, "output": None, "set_logits": rng.randrange(1000), "rewind": rng.randint(1, 9),
            "append": [rng.randrange(1000) for _ in range(rng.choice([1, 3, 35]))], "fork": rng.random() < 0.5,
            "adapter": rng.choice(["words", "pirate"]), "save": None,
        }  # fmt: skip
        call = rng.choice([*values])
        made.append((call, values[call]))
    return made


@pytest.mark.parametrize("seed", range(40))
def test_calls_return_the_same(open_model: Open, tmp_path: Path, seed: int) -> None:
    rng, found = random.Random(seed), []
    batch, calls = rng.randint(1, 3), drawn_calls(rng)
    options: dict[str, Any] = {"min_length": rng.choice([0, 60]), "chunk_size": rng.choice([0, 0, 2])}
    if rng.random() < 0.5:
        options |= {"do_sample": True, "top_k": 5, "temperature": 1.1, "random_seed": seed}
    for runs_ahead in (False, True):
        log = Log([], runs_ahead=runs_ahead)
        with open_model(log) as model, begin(model, batch, **options) as generator:
            adapters = genai.Adapters(model)
            for name in ("words", "pirate"):
                adapters.load(str(bundled_adapter(name)), name)
            generator.append_tokens(PROMPTS[:batch])
            found.append(act(generator, calls, tmp_path, adapters))
            generator.close()
        assert ("ahead" in log.asked) <= runs_ahead
    assert found[0] == found[1]


def test_the_next_step_is_started_before_tokens_are_read(open_model: Open) -> None:
    log = Log([])
    with open_model(log) as model, begin(model, 2, min_length=90) as generator:
        generator.append_tokens(PROMPTS[:2])
        log.asked.clear()
        for _ in range(3):
            generator.generate_next_token()
        assert log.asked == ["begin", "ahead", "wait"] * 3


@pytest.mark.parametrize("what", ["ahead", "wait"])
def test_what_fails_leaves_the_generator_as_it_was(open_model: Open, what: str) -> None:
    found = []
    for fails in (False, True):
        log = Log([])
        with open_model(log) as model, begin(model, 2) as generator:
            generator.append_tokens(PROMPTS[:2])
            generator.generate_next_token()
            if fails:
                log.fails = failing(what)
                try:
                    generator.generate_next_token()
                except DeviceFailed:
                    assert what == "wait"
                    log.fails = str
                    generator.generate_next_token()
                log.fails = str
            else:
                generator.generate_next_token()
            for _ in range(5):
                generator.generate_next_token()
            found.append([generator.get_sequence(row).tolist() for row in range(2)])
    assert found[0] == found[1]


def failing(name: str) -> Callable[[str], object]:
    def fail(what: str) -> None:
        if what == name:
            raise DeviceFailed("the device had enough")

    return fail


def test_logits_without_a_token_can_be_asked_for_again(open_model: Open) -> None:
    log = Log([])
    with open_model(log) as model, begin(model, 1) as generator:
        generator.append_tokens(PROMPTS[:1])
        generator.generate_next_token()
        before = generator.get_sequence(0).tolist()
        generator.set_logits(np.full((1, 1, model.config.model.vocab_size), -np.inf, np.float32))
        for _ in range(2):
            with pytest.raises(SamplingError, match="no next token can be chosen"):
                generator.generate_next_token()
        assert generator.get_sequence(0).tolist() == before
