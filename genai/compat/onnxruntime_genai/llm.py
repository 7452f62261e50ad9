"""LLM: the core class, with the model and tokenizer classes of this package."""

from __future__ import annotations

from ...llm import llm as core
from .model import Model
from .tokenizer import Tokenizer


class LLM(core.LLM):
    __doc__ = core.LLM.__doc__
    model: Model
    tokenizer: Tokenizer
    _model_class, _tokenizer_class = Model, Tokenizer
