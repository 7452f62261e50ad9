"""SamplingParams: types, ranges, contradictions, and the search options of onnxruntime-genai."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import doctest
import math
import pickle
from typing import Any

import numpy as np
import pytest

import genai.engine.sampling.params
from genai.engine.sampling.option_rules import SAMPLERS
from genai.engine.sampling.params import SamplingParams
from genai.engine.sampling.search_options import SEARCH_OPTIONS
from genai.errors import OptionError

# Per option: values that are refused, and one that is fine (with what else it needs).
CASES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "temperature": ([-0.1, math.nan, math.inf, 10**400, "1", None, True, [1]], {"temperature": 0.5}),
    "top_k": ([-1, 1.5, "5", None, False, 10**20], {"top_k": 5}),
    "top_p": ([0, -0.1, 1.1, math.nan, "0.5", None], {"top_p": 0.5}),
    "min_p": ([-0.1, 1.1, None], {"min_p": 0.1}),
    "typical_p": ([0, 1.5, None], {"typical_p": 0.5}),
    "top_n_sigma": ([-1, math.inf, None], {"top_n_sigma": 1}),
    "xtc_probability": ([-0.1, 1.1], {"xtc_probability": 0.5}),
    "xtc_threshold": ([0, 0.51], {"xtc_threshold": 0.2, "xtc_probability": 0.5}),
    "dry_multiplier": ([-1, math.inf], {"dry_multiplier": 0.8}),
    "dry_base": ([0.9, None], {"dry_base": 2, "dry_multiplier": 0.8}),
    "dry_allowed_length": ([0, 1.5], {"dry_allowed_length": 3, "dry_multiplier": 0.8}),
    "dry_last_n": ([0, -1], {"dry_last_n": 100, "dry_multiplier": 0.8}),
    "dry_sequence_breakers": ([5, [""], [1], None], {"dry_sequence_breakers": ["\n"], "dry_multiplier": 0.8}),
    "mirostat": ([1, 3, -1, True, "2", None, 2.0], {"mirostat": 2}),
    "mirostat_tau": ([0, -1], {"mirostat_tau": 3, "mirostat": 2}),
    "mirostat_eta": ([0, 1.1], {"mirostat_eta": 0.2, "mirostat": 2}),
    "repetition_penalty": ([0, -1, math.nan, 1e-300], {"repetition_penalty": 1.1}),
    "presence_penalty": ([math.nan, "1", -1e300], {"presence_penalty": -0.5}),
    "frequency_penalty": ([math.inf, None, -1e300], {"frequency_penalty": 0.5}),
    "penalty_last_n": ([0, -1, 0.5], {"penalty_last_n": 64, "repetition_penalty": 1.1}),
    "no_repeat_ngram_size": ([-1, 2.5], {"no_repeat_ngram_size": 3}),
    "logit_bias": (
        [
            {-1: 1.0},
            {2**31: 1.0},
            {1: 1e39},
            {1: -(10**400)},
            {1: math.nan},
            {1: math.inf},
            {"1": 1.0},
            {1: "x"},
            5,
            {True: 1.0},
            {1.5: 1.0},
        ],
        {"logit_bias": {7: -math.inf, 3: 2}},
    ),
    "sequence_bias": (
        [{1: 1.0}, {(): 1.0}, {(1, -1): 1.0}, {(1, 2): math.inf}, {(1, 2): "x"}, {"ab": 1.0}, 5, [[1, 2, 3]], None],
        {"sequence_bias": {(7, 8): -math.inf, (3,): 2}},
    ),
    "begin_suppress_tokens": ([5, [2**31], [-1], ["a"], [True], "ab", None], {"begin_suppress_tokens": [2, 5]}),
    "min_tokens": ([-1, None, 2**31], {"min_tokens": 3}),
    "min_length": ([-1, None, 2**31], {"min_length": 3}),
    "max_tokens": ([0, -1, 1.5], {"max_tokens": 3}),
    "stop_token_ids": ([5, [2**31], [-1], ["a"], [True], "ab", None], {"stop_token_ids": [2, 5]}),
    "ignore_eos": ([1, 0, "yes", None], {"ignore_eos": True}),
    "stop": (["", [""], 5, [5], None], {"stop": "END"}),
    "banned_strings": (["", [""], 5, None], {"banned_strings": ["a", "b"]}),
    "seed": ([-1, 2**64, 1.5, "1", True], {"seed": 2**64 - 1}),
    "n": ([0, -1, 10_001, None], {"n": 2}),
    "json_schema": ([5, [], "{", "[1]", {"const": math.nan}, {1: {2}}], {"json_schema": {"type": "object"}}),
    "regex": (["", "  ", 5, ["a"], b"a", "\ud800"], {"regex": "[a-z]+"}),
    "grammar": (["", 5, "x" * (2**20 + 1)], {"grammar": 'start: "a"'}),
    "choice": ([[], "", "yes", [""], [5], 5], {"choice": ["yes", "no"]}),
    "logprobs": ([-1, 0.5, True, 2**31], {"logprobs": 0}),
    "prompt_logprobs": ([-1, 0.5, 2**31], {"prompt_logprobs": 3}),
    "logits_processors": ([5, [5], None], {"logits_processors": [print]}),
    "samplers": ([5, None, "top_k;nonsense", ["top_k", "top_k"], [5]], {"samplers": "top_k;temperature"}),
}


def test_every_option_has_cases_and_a_rule() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_refuses_and_says_what_is_allowed(name: str) -> None:
    refused, fine = CASES[name]
    for value in refused:
        with pytest.raises(OptionError) as raised:
            SamplingParams(**{**fine, name: value})
        assert name in raised.value.what, value
        assert raised.value.why and raised.value.fix
    params = SamplingParams(**fine)
    assert getattr(params, name) != SamplingParams().as_dict()[name]


@pytest.mark.parametrize("name", CASES)
def test_numbers_that_python_does_not_write_are_refused_or_obeyed(name: str) -> None:
    for value in (10**5000, -(10**5000), [10**5000]):
        with contextlib.suppress(OptionError):
            SamplingParams(**{**CASES[name][1], name: value})


CONTRADICTIONS: list[tuple[dict[str, Any], str, str]] = [
    *[
        ({"temperature": 0, **options}, f"{next(iter(options))} = ", "temperature = 0")
        for options in (
            {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.5}, {"top_n_sigma": 1.0},
            {"xtc_probability": 0.5}, {"mirostat": 2}, {"n": 2},
        )
    ],
    *[
        ({"mirostat": 2, **options}, f"{next(iter(options))} = ", "mirostat = 2")
        for options in (
            {"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.5}, {"top_n_sigma": 1.0},
            {"xtc_probability": 0.5},
        )
    ],
    ({"xtc_threshold": 0.2}, "xtc_threshold = 0.2", "xtc_probability = 0.0"),
    ({"dry_base": 2.0}, "dry_base = 2.0", "dry_multiplier = 0.0"),
    ({"dry_allowed_length": 3}, "dry_allowed_length = 3", "dry_multiplier = 0.0"),
    ({"dry_last_n": 30}, "dry_last_n = 30", "dry_multiplier = 0.0"),
    ({"dry_sequence_breakers": ["x"]}, "dry_sequence_breakers = ", "dry_multiplier = 0.0"),
    ({"mirostat_tau": 3.0}, "mirostat_tau = 3.0", "mirostat = 0"),
    ({"mirostat_eta": 0.3}, "mirostat_eta = 0.3", "mirostat = 0"),
    ({"penalty_last_n": 64}, "penalty_last_n = 64", "repetition_penalty = 1.0"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens = 5", "max_tokens = 4"),
    ({"stop": "a badword", "banned_strings": "bad"}, "stop = 'a badword'", "banned_strings = 'bad'"),
    ({"stop": "bad", "banned_strings": "a badword"}, "banned_strings = 'a badword'", "stop = 'bad'"),
    ({"stop_token_ids": [3], "logit_bias": {3: -math.inf}}, "stop_token_ids = 3", "logit_bias"),
    *[
        ({**CASES[name][1], "samplers": ""}, f"{name} = ", "samplers = ''")
        for names in SAMPLERS.values()
        for name in names
    ],
    ({"regex": "a", "choice": ["b"]}, "regex", "choice"),
    ({"json_schema": {}, "ignore_eos": True}, "json_schema", "ignore_eos = True"),
    ({"top_k": 5, "samplers": ["top_p", "temperature"]}, "top_k = 5", "samplers = 'top_p;temperature'"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "first", "second"), CONTRADICTIONS, ids=str)
def test_contradictions_name_both(options: dict[str, Any], first: str, second: str) -> None:
    with pytest.raises(OptionError, match="contradicts") as raised:
        SamplingParams(**options)
    what = raised.value.what
    assert first in what.split(" contradicts ")[0] and second in what.split(" contradicts ")[1]
    assert raised.value.why and raised.value.fix


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0, "top_k": 1},
        {"temperature": 0, "seed": 1},
        {"temperature": 0, "repetition_penalty": 1.2, "samplers": "penalties"},
        {"temperature": 0, "top_p": 1.0, "min_p": 0.0},
        {"stop": "bad", "banned_strings": "a badword", "min_tokens": 1},
        {"mirostat": 2, "temperature": 0.7, "repetition_penalty": 1.2},
        {"samplers": "top_k ; typ_p; temperature", "typical_p": 0.5, "top_k": 3},
    ],
    ids=str,
)
def test_harmless_combinations(options: dict[str, Any]) -> None:
    SamplingParams(**options)


def test_values_take_their_types() -> None:
    params = SamplingParams(
        temperature=1,
        top_k=np.int64(4),
        top_p=np.float32(0.5),
        logit_bias={9: 1, 2: -1},
        stop="x",
        stop_token_ids=list(np.array([2, 5], np.int32)),
        samplers="temperature;typ_p;top_k;top_p",
    )
    assert (type(params.temperature), type(params.top_k), params.top_p) == (float, int, 0.5)
    assert params.logit_bias == ((2, -1.0), (9, 1.0))
    assert (params.stop, params.stop_token_ids) == (("x",), (2, 5))
    assert params.samplers == ("temperature", "typical_p", "top_k", "top_p")


def test_frozen_hashable_copyable() -> None:
    params = SamplingParams(top_k=3, logit_bias={1: 2.0}, stop=["a"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 4  # type: ignore[misc]
    assert params == SamplingParams(**params.as_dict()) == copy.deepcopy(params) == pickle.loads(pickle.dumps(params))
    assert hash(params) == hash(copy.copy(params))
    assert params.replace(top_k=5).top_k == 5
    with pytest.raises(OptionError, match="top_k = 3 contradicts temperature = 0"):
        params.replace(temperature=0)


def test_unknown_names() -> None:
    with pytest.raises(OptionError, match="unknown sampling option 'temprature' = 1") as raised:
        SamplingParams.from_options({"temprature": 1})
    assert "'temperature'" in raised.value.fix
    for name, fix in (
        ("response_format", "json_schema"),
        ("format", "json_schema"),
        ("num_predict", "'max_tokens'"),
        ("stop_words", "'stop'"),
    ):
        with pytest.raises(OptionError, match=f"(?s)unknown sampling option '{name}'.*{fix}"):
            SamplingParams.from_options({name: 1})
    with pytest.raises(OptionError, match="unknown sampling option 'zzz'"):
        SamplingParams().replace(zzz=1)
    with pytest.raises(OptionError, match="samplers contains the unknown name 'topp'") as raised:
        SamplingParams(samplers="topp")
    assert "'top_p'" in raised.value.fix


def test_search_options_of_onnxruntime_genai() -> None:
    defaults = {name: option.default for name, option in SEARCH_OPTIONS.items()}
    assert SamplingParams.from_search_options(defaults).temperature == 0
    assert SamplingParams.from_search_options({**defaults, "do_sample": True, "top_k": 1}).temperature == 0
    assert SamplingParams.from_search_options({**defaults, "do_sample": True, "temperature": 0.0}).temperature == 0
    drawn = SamplingParams.from_search_options(
        {**defaults, "do_sample": True, "top_p": 0.9, "temperature": 0.7, "random_seed": 5, "no_repeat_ngram_size": 2}
    )
    assert drawn == SamplingParams(
        top_k=50,
        top_p=0.9,
        temperature=0.7,
        seed=5,
        no_repeat_ngram_size=2,
        samplers="penalties;top_k;temperature;top_p",
    )
    assert SamplingParams.from_search_options({"do_sample": True, "top_p": 0.0}).top_p == 1.0
    assert SamplingParams.from_search_options({"random_seed": 2**64 + 3}).seed == 3
    assert SamplingParams.from_search_options({"random_seed": -1}).seed is None


def test_examples_in_the_documentation() -> None:
    result = doctest.testmod(genai.engine.sampling.params)
    assert result.attempted > 0 and result.failed == 0
