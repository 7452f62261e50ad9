"""The combination of a caller's options with a model's own defaults."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.engine.sampling.params import model_defaults, with_defaults
from genai.errors import ConfigError, NotSupportedYetError, OptionError

GREEDY = {"do_sample": False, "temperature": 0.7, "top_k": 50, "top_p": 0.9}
DRAWS = {"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.9}

MODEL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"temperature": 0.0}),
    (GREEDY, {"temperature": 0.0}),
    (DRAWS, {"temperature": 0.7, "top_k": 50, "top_p": 0.9}),
    ({"do_sample": True, "temperature": 0}, {"temperature": 0.0}),
    ({"do_sample": True, "top_k": 1, "top_p": 0.5}, {"temperature": 0.0}),
    ({"do_sample": True, "top_k": 0, "top_p": 0.0}, {}),
    ({"do_sample": True, "top_k": 500}, {"top_k": 100}),
    ({"repetition_penalty": 1.1, "min_length": 5}, {"temperature": 0.0, "repetition_penalty": 1.1, "min_length": 5}),
    ({"no_repeat_ngram_size": 3}, {"temperature": 0.0, "no_repeat_ngram_size": 3}),
    ({"random_seed": 7}, {"temperature": 0.0, "seed": 7}),
    ({"random_seed": -1}, {"temperature": 0.0}),
    ({"max_length": 100, "batch_size": 4, "early_stopping": True}, {"temperature": 0.0}),
]


@pytest.mark.parametrize(("search", "expected"), MODEL, ids=str)
def test_defaults_of_a_model(search: dict[str, Any], expected: dict[str, Any]) -> None:
    assert model_defaults(search, 100) == expected


def test_defaults_that_cannot_be_obeyed() -> None:
    with pytest.raises(NotSupportedYetError, match="num_beams = 4"):
        model_defaults({"num_beams": 4}, 100)
    with pytest.raises(OptionError, match="top_p"):
        model_defaults({"top_p": 3}, 100)


# (search block, options asked for, what differs from SamplingParams())
MERGED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (GREEDY, {}, {"temperature": 0.0}),
    (GREEDY, {"max_tokens": 5, "stop": "x", "seed": 3}, {"temperature": 0.0, "max_tokens": 5, "stop": "x", "seed": 3}),
    (GREEDY, {"temperature": 0}, {"temperature": 0.0}),
    (GREEDY, {"temperature": 0.5}, {"temperature": 0.5}),
    (GREEDY, {"top_p": 0.5}, {"top_p": 0.5}),
    (GREEDY, {"top_p": 1.0}, {"temperature": 0.0}),
    (GREEDY, {"top_k": 0, "min_p": 0, "mirostat": 0, "n": 1}, {"temperature": 0.0}),
    (GREEDY, {"n": 3}, {"n": 3}),
    (GREEDY, {"mirostat": 2}, {"mirostat": 2}),
    (GREEDY, {"repetition_penalty": 1.2}, {"temperature": 0.0, "repetition_penalty": 1.2}),
    (GREEDY, {"samplers": "penalties"}, {"temperature": 0.0, "samplers": "penalties"}),
    (DRAWS, {}, {"temperature": 0.7, "top_k": 50, "top_p": 0.9}),
    (DRAWS, {"temperature": 0}, {"temperature": 0.0}),
    (DRAWS, {"temperature": 1.5}, {"temperature": 1.5, "top_k": 50, "top_p": 0.9}),
    (DRAWS, {"top_k": 0}, {"temperature": 0.7, "top_p": 0.9}),
    (DRAWS, {"mirostat": 2}, {"temperature": 0.7, "mirostat": 2}),
    (DRAWS, {"samplers": "temperature"}, {"temperature": 0.7, "samplers": "temperature"}),
    (DRAWS, {"samplers": ""}, {"samplers": ""}),
    (DRAWS, {"samplers": "typ_p;top_k", "typical_p": 0.5}, {"typical_p": 0.5, "top_k": 50, "samplers": "typ_p;top_k"}),
    ({**GREEDY, "repetition_penalty": 1.1}, {"penalty_last_n": 9}, {
        "temperature": 0.0, "repetition_penalty": 1.1, "penalty_last_n": 9,
    }),
    ({**DRAWS, "repetition_penalty": 1.1}, {"temperature": 0}, {"temperature": 0.0, "repetition_penalty": 1.1}),
]  # fmt: skip


@pytest.mark.parametrize(("search", "asked", "expected"), MERGED, ids=str)
def test_merging(search: dict[str, Any], asked: dict[str, Any], expected: dict[str, Any]) -> None:
    assert with_defaults(model_defaults(search, 1000), asked) == genai.SamplingParams(**expected)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"temperature": 0, "top_p": 0.5}, "contradicts"),
        ({"mirostat": 2, "top_k": 5}, "contradicts"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": "two"}, "n = 'two'"),
        ({"samplers": "nonsense"}, "nonsense"),
        ({"samplers": "temperature", "top_k": 4}, "contradicts"),
        ({"tempreature": 1}, "did you mean 'temperature'"),
        ({"top_p": [1, 2]}, "top_p"),
    ],
    ids=str,
)
@pytest.mark.parametrize("search", [GREEDY, DRAWS])
def test_what_was_asked_for_must_go_together(search: dict[str, Any], asked: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        with_defaults(model_defaults(search, 1000), asked)


def test_llm_params_says_what_a_request_would_have(llm: genai.LLM) -> None:
    assert llm.params() == genai.SamplingParams(temperature=0)
    assert llm.params(top_p=0.5, max_tokens=3) == genai.SamplingParams(top_p=0.5, max_tokens=3)
    own = genai.SamplingParams(temperature=0.3)
    assert llm.params(own) is own
    assert llm.params(own, top_k=4) == genai.SamplingParams(temperature=0.3, top_k=4)
    with pytest.raises(OptionError):
        llm.params(own, temprature=1)


def test_defaults_out_of_range_are_the_model_s_fault(bundled_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bundled_folder, tmp_path / "model")
    config = json.loads((folder / "genai_config.json").read_text())
    (folder / "genai_config.json").write_text(json.dumps({**config, "search": {}}))
    for text, named in (('{"do_sample": true, "top_p": 7}', "top_p = 7"), ('{"do_sample": true, "min_p": 3}', "min_p")):
        (folder / "generation_config.json").write_text(text)
        with pytest.raises(ConfigError, match=f"^{named}.* in the model's files") as caught:
            genai.LLM(folder)
        assert "generation_config.json" in caught.value.fix


def test_generation_config_speaks_where_the_search_block_is_silent(bundled_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bundled_folder, folder)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "min_p": 0.05, "top_k": 9}')
    config = json.loads((folder / "genai_config.json").read_text())
    config["search"] = {"max_length": 1024, "top_k": 20}
    (folder / "genai_config.json").write_text(json.dumps(config))
    with genai.LLM(folder) as llm:
        assert llm.params() == genai.SamplingParams(temperature=0.6, min_p=0.05, top_k=20)
        assert llm.params(temperature=0) == genai.SamplingParams(temperature=0)


@pytest.fixture
def greedy(bundled: genai.Model) -> Iterator[genai.LLM]:
    with genai.LLM(bundled) as llm:
        yield llm


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm, **options: llm.chat("Hi", max_tokens=1, **options),
        lambda llm, **options: list(llm.stream_chat("Hi", max_tokens=1, **options)),
        lambda llm, **options: llm.generate("Hi", max_tokens=1, **options),
        lambda llm, **options: list(llm.stream("Hi", max_tokens=1, **options)),
        lambda llm, **options: list(llm.map(["Hi"], max_tokens=1, **options)),
        lambda llm, **options: llm.params(**options),
        lambda llm, **options: llm.chat_params(**options),
    ],
)
def test_a_seed_without_effect_is_pointed_out_once(ask: Callable[..., object], greedy: genai.LLM) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({}, {"seed": 1, "temperature": 0}, {"seed": 1, "top_k": 2}, {"seed": None}):
            ask(greedy, **options)
    with pytest.warns(UserWarning, match="the seed has no effect.*set a temperature") as caught:
        ask(greedy, seed=1)
        ask(greedy, seed=2)
    assert len(caught) == 1 and caught[0].filename == __file__
