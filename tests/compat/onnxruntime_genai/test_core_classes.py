"""genai.Model, Config and Tokenizer add calls to the core's classes, and genai.LLM makes those."""

from __future__ import annotations

from pathlib import Path

import pytest

import genai
from genai.llm.llm import LLM
from genai.models.config import Config
from genai.models.model import Model
from genai.text.tokenizer import Tokenizer


def test_the_public_classes_derive_from_the_core() -> None:
    for public, core in ((genai.Model, Model), (genai.Config, Config), (genai.Tokenizer, Tokenizer), (genai.LLM, LLM)):
        assert issubclass(public, core)
        assert (public.__name__, public.__doc__) == (core.__name__, core.__doc__)


def test_what_an_llm_loads_serves_scripts(bundled_folder: Path) -> None:
    with genai.LLM(bundled_folder, threads=1) as llm:
        assert (type(llm.model), type(llm.model.config)) == (genai.Model, genai.Config)
        assert type(llm.tokenizer) is genai.Tokenizer
        assert llm.tokenizer.encode_batch(["a", "bc"]).as_numpy().shape[0] == 2
        with pytest.raises(genai.GenaiError):
            _ = llm.tokenizer.bot_token_id
        tokenizer = genai.Tokenizer(llm.model)
        assert isinstance(tokenizer.create_stream(), genai.TokenizerStream)
        generator = genai.Generator(llm.model, genai.GeneratorParams(llm.model))
        generator.append_tokens(tokenizer.encode_batch(["What is 12 + 7?"]))
        generator.generate_next_token()
        assert genai.Engine(llm.model).create_request().engine.model is llm.model
        assert genai.LLM(llm.model).model is llm.model
