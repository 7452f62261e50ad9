"""genai.Model, Config and Tokenizer add calls to the core's classes; what LLM loads is of these, and serves as well."""

from __future__ import annotations

from pathlib import Path

import genai
from genai.models.config import Config
from genai.models.model import Model
from genai.text.tokenizer import Tokenizer


def test_the_public_classes_are_those_of_the_core() -> None:
    for public, core in ((genai.Model, Model), (genai.Config, Config), (genai.Tokenizer, Tokenizer)):
        assert issubclass(public, core) and issubclass(core, public)
        assert (public.__name__, public.__doc__) == (core.__name__, core.__doc__)
        assert not issubclass(object, public) and not isinstance("x", public)


def test_what_an_llm_loads_serves_scripts(bundled_folder: Path) -> None:
    with genai.LLM(bundled_folder, threads=1) as llm:
        assert isinstance(llm.model, genai.Model) and isinstance(llm.model.config, genai.Config)
        assert isinstance(llm.tokenizer, genai.Tokenizer)
        tokenizer = genai.Tokenizer(llm.model)
        assert isinstance(tokenizer.create_stream(), genai.TokenizerStream)
        generator = genai.Generator(llm.model, genai.GeneratorParams(llm.model))
        generator.append_tokens(tokenizer.encode_batch(["What is 12 + 7?"]))
        generator.generate_next_token()
        assert genai.Engine(llm.model).create_request().engine.model is llm.model
        assert genai.LLM(llm.model).model is llm.model


def test_a_class_of_the_user_is_no_class_of_the_core() -> None:
    class Mine(genai.Model):
        pass

    assert issubclass(Mine, genai.Model) and not issubclass(Model, Mine) and not issubclass(genai.Model, Mine)
