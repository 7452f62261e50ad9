"""Options are typed keywords: type checkers and editors know exactly the options that the calls accept."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from numpy.typing import NDArray

import genai
from genai.compat.onnxruntime_genai.generator import GeneratorParams
from genai.engine.sampling.params import SamplingOptions, SamplingParams
from genai.engine.sampling.search_options import SEARCH_OPTIONS, SearchOptions
from genai.errors import OptionError
from genai.llm.chat import ChatSession
from genai.llm.llm import LLM, ChatOptions
from genai.llm.request_options import BeamCallOptions, CallOptions
from genai.llm.states import TextState
from genai.models.model import Model
from genai.models.model_options import ModelOptions

ROOT = Path(__file__).resolve().parents[2]
CALLS = {
    LLM.__init__: ModelOptions,
    **dict.fromkeys((LLM.generate, LLM.agenerate, TextState.generate), BeamCallOptions),
    **dict.fromkeys((LLM.stream, LLM.astream, LLM.stream_tokens, TextState.stream, TextState.resume), CallOptions),
    **dict.fromkeys(
        (LLM.params, SamplingParams.replace, ChatSession.__init__, ChatSession.set_options), SamplingOptions
    ),
    **dict.fromkeys((LLM.chat, LLM.achat, LLM.stream_chat, LLM.astream_chat), ChatOptions),
    GeneratorParams.set_search_options: SearchOptions,
}
TERMS = (
    "priority",
    "timeout",
    "keep_state",
    "ctx_shift",
    "add_special_tokens",
    "literal",
    "cache_salt",
    "reuse_replies",
)
# Each line is wrong as its comment says, but for those without one.
SNIPPET = """
import genai

llm = genai.LLM(threads=2, max_sequences=4)
genai.LLM(thread=2)  # call-arg
genai.LLM(threads="2")  # arg-type
llm.generate("Hi", max_tokens=3, stop=["."], logit_bias={5: -1.0})
llm.generate("Hi", max_token=3)  # call-overload
llm.generate("Hi", temperature="hot")  # call-overload
llm.chat("Hi", tools=[{"type": "function"}], temperature=0.5)
llm.chat("Hi", tool=[])  # call-overload
llm.stream("Hi", seed=0.5)  # arg-type
params = genai.GeneratorParams(llm.model)
params.set_search_options(do_sample=True, top_k=5, temperature=1)
params.set_search_options(topk=5)  # call-arg
params.set_search_options(max_length="9")  # arg-type
"""


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_calls_name_their_options(call: Any) -> None:
    """The parameter that takes the options takes nothing else."""
    (options,) = [one for one in inspect.signature(call).parameters.values() if one.kind is one.VAR_KEYWORD]
    assert get_args(get_type_hints(call)[options.name]) == (CALLS[call],)


def test_sampling_options_are_the_fields_of_sampling_params() -> None:
    names = {"np": np, "NDArray": NDArray}  # which the module imports for type checkers only
    fields = get_type_hints(SamplingParams, localns=names)
    assert get_type_hints(SamplingOptions, localns=names) == fields and len(fields) > 30
    assert set(ChatOptions.__annotations__) == {
        *fields,
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "template",
        "params",
        "adapter",
        *TERMS,
    }
    assert set(CallOptions.__annotations__) == {*fields, *TERMS}


def test_search_options_are_those_that_are_checked() -> None:
    kinds = {name: type(option.default) for name, option in SEARCH_OPTIONS.items()}
    assert get_type_hints(SearchOptions) == kinds


def test_model_options_are_those_of_model() -> None:
    """Except `draft` and `mtp`: an LLM has the option `speculation` in their place."""
    hints = get_type_hints(Model.__init__)
    names = [name for name in list(inspect.signature(Model).parameters)[1:] if name not in ("draft", "mtp")]
    assert get_type_hints(ModelOptions) == {name: hints[name] for name in names}


def test_an_unknown_option_names_the_nearest(llm: genai.LLM) -> None:
    calls: list[Any] = [llm.generate, llm.stream, llm.chat, llm.achat, llm.agenerate, llm.params]
    for call in calls:
        with pytest.raises(OptionError, match="did you mean 'max_tokens'") as caught:
            result = call(*([] if call == llm.params else ["Hi"]), max_token=3)
            result.send(None)
        assert "max_token" in caught.value.what and caught.value.why
    with pytest.raises(OptionError, match="did you mean 'top_k'"):
        genai.GeneratorParams(llm.model).set_search_options(topk=3)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="did you mean 'threads'"):
        genai.LLM(thread=2)  # type: ignore[call-arg]


def test_a_conversation_takes_options_by_name_and_as_a_mapping(llm: genai.LLM) -> None:
    chat = ChatSession(llm, max_tokens=5, top_k=3)
    chat.set_options({"top_k": None, "temperature": 0.5}, seed=1)
    assert chat.options == {"max_tokens": 5, "temperature": 0.5, "seed": 1}
    with pytest.raises(OptionError, match="did you mean 'top_k'"):
        chat.set_options({"topk": 3})
    assert chat.options == {"max_tokens": 5, "temperature": 0.5, "seed": 1}


@pytest.mark.slow
def test_mypy_finds_a_wrong_name_and_a_wrong_type(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--follow-imports=silent"]
    done = subprocess.run(
        [*command, "--cache-dir", str(tmp_path / "cache"), str(snippet)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(ROOT)},
    )
    found = {int(line): kind for line, kind in re.findall(r"snippet\.py:(\d+): error: .*\[([\w-]+)\]", done.stdout)}
    lines = enumerate(SNIPPET.split("\n"), 1)
    assert found == {number: line.split("  # ")[1] for number, line in lines if "  # " in line}, done.stdout
