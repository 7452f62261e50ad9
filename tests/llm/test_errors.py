"""Invalid input to an LLM: typed errors in three parts, after which the engine continues."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import genai
from genai.engine.sampling.params import SamplingParams
from genai.errors import (
    ChatTemplateError,
    ContextOverflowError,
    ExternalDataError,
    GenaiError,
    InputError,
    ModelFolderError,
    NotSupportedYetError,
    OptionError,
    SamplingError,
    TokenizerError,
    UnsupportedModelError,
)
from genai.llm.completion import Completion
from genai.lowering import program

PROMPTS: list[tuple[Any, type[Exception], str]] = [
    ([], InputError, "the list of prompts is empty"),
    ("", InputError, "no tokens"),
    ([""], InputError, "no tokens"),
    (["A", ""], InputError, "no tokens"),
    ([[]], InputError, "no tokens"),
    (None, InputError, "null"),
    (5, InputError, "a number"),
    (np.int64(5), InputError, "int64"),
    (b"bytes", InputError, "bytes"),
    ([b"bytes"], InputError, "bytes"),
    (["A", 5], InputError, "a number"),
    (["A", None], InputError, "null"),
    ([1, "A"], InputError, "type"),
    ([1.5, 2.5], InputError, "float64"),
    ([True], InputError, "bool"),
    ([1536], InputError, "1536"),
    ([-1], InputError, "-1"),
    ([[1, 2], [1536]], InputError, "1536"),
    ({"role": "user"}, InputError, "an object"),
    ([{"role": "user", "content": "A"}], InputError, "chat"),
    ({"A"}, InputError, "set"),
    (iter(["A"]), InputError, "iterator"),
    ("a\0b", InputError, "NUL"),
    (["fine", "a\0b"], InputError, "NUL"),
    ("half \ud800", InputError, "surrogate"),
    ([5] * 1024, ContextOverflowError, "1024"),
    (["A", "word " * 2000], ContextOverflowError, "context"),
]


@pytest.mark.parametrize(("prompts", "kind", "said"), PROMPTS, ids=lambda value: repr(value).split(" at 0x")[0][:30])
def test_prompts(llm: genai.LLM, prompts: Any, kind: type[genai.GenaiError], said: str) -> None:
    with pytest.raises(kind) as raised:
        llm.generate(prompts, max_tokens=1)
    assert said in str(raised.value)
    assert raised.value.what and raised.value.why and raised.value.fix


@pytest.mark.parametrize("prompt", [None, 5, b"x", {"role": "user"}, [], "", ["A", "B"], [1536], "a\0b", [5] * 1024])
def test_prompts_of_a_stream(llm: genai.LLM, prompt: Any) -> None:
    with pytest.raises(InputError) as raised:
        llm.stream(prompt, max_tokens=1)
    assert raised.value.what and raised.value.why and raised.value.fix


def test_messages(llm: genai.LLM) -> None:
    for messages in (None, 5, [5], [{"content": "A"}], {"role": "user"}):
        with pytest.raises((InputError, ChatTemplateError)):
            llm.chat(messages)  # type: ignore[arg-type]
    with pytest.raises(ContextOverflowError):
        llm.chat("word " * 2000)
    with pytest.raises(InputError):
        llm.chat("A", tools=5)  # type: ignore[arg-type]


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 10**400, "top_p": 2}, "top_k"),
    ({"temperature": 10**400}, "temperature"),
    ({"presence_penalty": -(10**400)}, "presence_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 10_001}, "n = 10001"),
    ({"temperature": 0, "top_p": 0.5}, "contradicts"),
    ({"temperature": 0, "n": 2}, "contradicts"),
    ({"stop": ""}, "stop"),
    ({"stop": "end", "banned_strings": "the end is"}, "contradicts"),
    ({"min_tokens": 5, "max_tokens": 4}, "contradicts"),
    ({"stop_token_ids": [1536]}, "1536"),
    ({"logit_bias": {1536: 1.0}}, "1536"),
    ({"logit_bias": {3: 1e39}}, "logit_bias"),
    ({"logprobs": 1537}, "1537"),
    ({"top_k": 1537}, "1537"),
    ({"prompt_logprobs": 1537}, "1537"),
    ({"seed": -1}, "seed"),
    ({"samplers": "top_q"}, "top_q"),
    ({"max_length": 5}, "max_length"),
    ({"temprature": 1}, "temperature"),
    ({"dry_multiplier": 1, "dry_sequence_breakers": ["\U0001f9ff\U0001f9ff"]}, "breaker"),
    ({"params": {"temperature": 1}}, "SamplingParams is expected"),
    ({"params": 5}, "SamplingParams is expected"),
    ({"params": "top_k"}, "SamplingParams is expected"),
]


@pytest.mark.parametrize(("options", "said"), OPTIONS, ids=str)
def test_options(llm: genai.LLM, options: dict[str, Any], said: str) -> None:
    calls = [lambda: llm.generate("A", **options), lambda: llm.stream("A", **options), lambda: llm.chat("A", **options)]
    for call in calls:
        with pytest.raises(OptionError) as raised:
            call()
        assert said in str(raised.value)
        assert raised.value.what and raised.value.why and raised.value.fix


EXTREMES: list[dict[str, Any]] = [
    {"top_k": 1536},
    {"no_repeat_ngram_size": 10**30},
    {"repetition_penalty": 1.1, "penalty_last_n": 10**400},
    {"dry_multiplier": 1, "dry_allowed_length": 10**30, "dry_last_n": 10**30},
    {"dry_multiplier": 1e308, "dry_base": 1e308},
    {"temperature": 1e-300},
    {"temperature": 5e-324},
    {"temperature": 1.7e308},
    {"top_n_sigma": 1e308},
    {"mirostat": 2, "mirostat_tau": 1e-300},
    {"mirostat": 2, "mirostat_tau": 1e300},
    {"repetition_penalty": 1e308},
    {"max_tokens": 10**400},
    {"logit_bias": {5: 3e38, 6: -3e38}},
    {"xtc_probability": 1, "xtc_threshold": 5e-324},
]


@pytest.mark.parametrize("options", EXTREMES, ids=lambda options: str(options)[:60])
def test_extreme_values_are_obeyed(llm: genai.LLM, options: dict[str, Any]) -> None:
    (completion,) = llm.generate("Luna and Tom and Luna and", **{"max_tokens": 4, "seed": 1, **options})
    assert all(0 <= token < 1536 for token in completion.token_ids)


def test_options_that_overflow_together_are_an_error_of_that_request(llm: genai.LLM) -> None:
    bias = dict.fromkeys(map(int, llm.tokenizer.encode("Luna and")), 3e38)
    with pytest.raises(genai.GenaiError, match="infinity"):
        llm.generate("Luna and", logit_bias=bias, repetition_penalty=1e-28, max_tokens=4)


def test_params_lists(llm: genai.LLM) -> None:
    params = genai.SamplingParams(max_tokens=1)
    for given in ([params], [params] * 3, []):
        with pytest.raises(OptionError, match=f"{len(given)} params for 2 prompts"):
            llm.generate(["A", "B"], given)
    with pytest.raises(OptionError, match="SamplingParams is expected"):
        llm.generate(["A", "B"], [params, 5])  # type: ignore[list-item]
    assert len(llm.generate(["A", "B"], [params] * 2, temperature=0)) == 2


@pytest.mark.parametrize("call", ["stream", "chat"])
def test_one_sample_only(llm: genai.LLM, call: str) -> None:
    with pytest.raises(OptionError, match="n = 2"):
        getattr(llm, call)("A", n=2)


def test_more_than_the_context_can_hold(llm: genai.LLM) -> None:
    for options in ({"min_tokens": 1024}, {"min_length": 1025}):
        with pytest.raises(ContextOverflowError, match="min_tokens"):
            llm.generate("A", **options)
        with pytest.raises(ContextOverflowError, match="min_tokens"):
            llm.stream("A", **options)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", None])
def test_max_sequences(bundled: genai.Model, value: Any) -> None:
    with pytest.raises(OptionError, match="max_sequences"):
        genai.LLM(bundled, max_sequences=value)


def test_what_a_model_is(bundled: genai.Model, tmp_path: Path) -> None:
    for value in (5, b"x", ["x"]):
        with pytest.raises(InputError, match="model is a"):
            genai.LLM(value)  # type: ignore[arg-type]
    with pytest.raises(ModelFolderError):
        genai.LLM(tmp_path / "nowhere")
    with pytest.raises(OptionError, match="already loaded"):
        genai.LLM(bundled, threads=2)
    with pytest.raises(OptionError, match="threads"):
        genai.LLM(threads=0)


def test_folders(bundled_folder: Path, tmp_path: Path) -> None:
    def folder(name: str, **search: Any) -> Path:
        copy = Path(shutil.copytree(bundled_folder, tmp_path / name))
        config = json.loads((copy / "genai_config.json").read_text())
        config["search"] |= search
        (copy / "genai_config.json").write_text(json.dumps(config))
        return copy

    with pytest.raises(NotSupportedYetError, match="num_beams"):
        genai.LLM(folder("beams", num_beams=4))
    with genai.LLM(folder("short", max_length=20)) as llm:
        assert llm.context_size == 20
        (one,) = llm.generate([5] * 15, ignore_eos=True)
        assert len(one.token_ids) == 5
    without = folder("no-tokenizer")
    (without / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError):
        genai.LLM(without)
    (folder("no-template") / "chat_template.jinja").unlink()
    settings = tmp_path / "no-template" / "tokenizer_config.json"
    settings.write_text(json.dumps({k: v for k, v in json.loads(settings.read_text()).items() if k != "chat_template"}))
    with genai.LLM(tmp_path / "no-template") as llm:
        with pytest.raises(ChatTemplateError):
            llm.chat("A")
        assert llm.generate("A", max_tokens=1)


def test_a_step_that_fails_for_one_goes_on_for_the_others(form_folder: Callable[[str], Path]) -> None:
    """This graph computes only the last row of logits and cannot be flattened: it has no prompt log-probabilities."""
    with genai.LLM(form_folder("dense-last-row")) as llm:
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
        (expected,) = llm.generate("Once upon", **options)
        with llm.stream("Once upon", **options) as good:
            next(good)
            with pytest.raises(UnsupportedModelError, match="rows of logits"):
                llm.generate("What is 12 + 7?", prompt_logprobs=1)
            list(good)
        assert good.completion.token_ids == expected.token_ids


def test_the_engine_goes_on(llm: genai.LLM) -> None:
    assert llm.chat("What is 12 + 7?", temperature=0).text == "19"


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"device": "mps"}, ["device = 'mps'", "only NVIDIA GPUs are supported"]),
        ({"device": "cuda:one"}, ["device = 'cuda:one'", "did you mean 'cuda'?"]),
        ({"device": "CPU"}, ["did you mean 'cpu'?"]),
        (
            {"device": "reference", "threads": 2},
            ["device = 'reference' cannot be used with threads = 2", "NumPy chooses the number of threads"],
        ),
        ({"device": "reference", "accuracy": "int8"}, ["with accuracy = 'int8'", "full precision"]),
        ({"kv_dtype": "fp61"}, ["did you mean 'fp16'?"]),
        ({"thread": 2}, ["unknown option 'thread' = 2", "did you mean 'threads'?"]),
        ({"max_sequence": 2}, ["did you mean 'max_sequences'?"]),
        ({"ctx_size": 2}, ["did you mean 'context_size'?"]),
        ({"temperature": 1}, ["pass sampling options to generate"]),
    ],
)
def test_options_of_an_llm(options: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(OptionError) as raised:
        genai.LLM(**options)
    assert raised.value.why and raised.value.fix
    for text in texts:
        assert text in str(raised.value)


@pytest.mark.parametrize("form", ["int4", "fp32", "fp32, large", "dense"])
def test_a_data_file_that_shrinks_while_the_model_is_used(
    form_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Data that was copied or packed is not needed any more; a later read of the file is an error, without a signal."""
    if form == "fp32, large":
        monkeypatch.setattr(program, "_COPIED_BYTES", 0)
    folder = tmp_path / "model"
    shutil.copytree(form_folder(form.partition(",")[0]), folder)
    onnx.save(
        onnx.load(folder / "model.onnx"),
        folder / "model.onnx",
        save_as_external_data=True,
        location="weights.data",
        size_threshold=10,
    )
    with genai.LLM(folder, threads=1, quiet=True) as llm:
        before = llm.generate([5, 6], max_tokens=3)[0].token_ids
        gc.collect()
        os.truncate(folder / "weights.data", 0)
        if form in ("int4", "fp32"):
            assert llm.generate([5, 6], max_tokens=3)[0].token_ids == before
        else:
            with pytest.raises(ExternalDataError, match=r"weights\.data was changed"):
                llm.generate([1500, 6, 900], max_tokens=3)


@pytest.mark.parametrize("template", [5, "ab", [1], {5: 1}, {"messages": []}, {"self": 1}, {"tools": []}])
def test_variables_of_a_template(llm: genai.LLM, template: Any) -> None:
    for call in (llm.render, llm.chat):
        with pytest.raises(InputError, match="template") as caught:
            call("Hi", template=template)
        assert caught.value.why and caught.value.fix


def test_errors_can_be_returned_in_place_of_completions(llm: genai.LLM) -> None:
    """The other prompts get the same tokens as in a call without the bad prompts."""
    prompts: list[Any] = ["Once", "", "word " * 3000, 5, [3, 4], [10**9]]
    found = llm.generate(prompts, max_tokens=3, temperature=0, on_error="return")
    kinds = [type(one).__name__ for one in found]
    assert kinds == ["Completion", "InputError", "ContextOverflowError", "InputError", "Completion", "InputError"]
    expected = llm.generate(["Once", [3, 4]], max_tokens=3, temperature=0)
    good = [one for one in found if isinstance(one, Completion)]
    assert [one.token_ids for one in good] == [one.token_ids for one in expected]
    assert [one.prompt_index for one in good] == [0, 4]
    assert all(one.why and one.fix for one in found if isinstance(one, GenaiError))
    again = asyncio.run(llm.agenerate(prompts, max_tokens=3, temperature=0, on_error="return"))
    assert [type(one).__name__ for one in again] == kinds
    assert len(llm.generate(["Once", ""], n=2, temperature=1, max_tokens=1, on_error="return")) == 3
    assert len(asyncio.run(llm.agenerate(["", ""], on_error="return"))) == 2


def test_errors_that_concern_every_prompt_are_raised(llm: genai.LLM) -> None:
    for message, options in (
        ("top_p = 2", {"top_p": 2}),
        ("num_beams with on_error", {"num_beams": 2}),
        ("schema with on_error", {"schema": int}),
        ("2 params for 1 prompts", {"params": [None, None]}),
        ("2 adapters for 1 prompts", {"adapter": [None, None]}),
    ):
        with pytest.raises(OptionError, match=message) as caught:
            llm.generate(["Once"], on_error="return", **options)  # type: ignore[call-overload]
        assert caught.value.why and caught.value.fix
    with pytest.raises(OptionError, match="on_error = 'ignore'"):
        llm.generate(["Once"], on_error="ignore")  # type: ignore[call-overload]


def test_a_prompt_without_a_next_token_is_named(llm: genai.LLM) -> None:
    """The number is the prompt's index in the call, and not the row in the engine's batch."""

    def forbid(tokens: Any, logits: Any) -> Any:
        return np.full_like(logits, -np.inf)

    plain, broken = SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, logits_processors=[forbid])
    params = [plain, plain, broken, plain]
    with pytest.raises(SamplingError, match=r"^prompt 2: no next token can be chosen") as caught:
        llm.generate(["Once"] * 4, params)
    assert "are all -inf" in caught.value.why
    found = llm.generate(["Once"] * 4, params, on_error="return")
    assert [type(one).__name__ for one in found] == ["Completion", "Completion", "SamplingError", "Completion"]
    assert str(found[2]).startswith("no next token can be chosen")
    with pytest.raises(SamplingError, match=r"^no next token can be chosen"):
        llm.generate("Once", broken)
    with pytest.raises(ContextOverflowError, match=r"^prompt 1: the prompt has"):
        llm.generate(["Once", "word " * 3000])
