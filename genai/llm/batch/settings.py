"""The settings of a batch that neither its lines nor its options contain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from genai import __version__

from ...models.loading import kernel_sources
from ..llm import LLM


@dataclass(frozen=True)
class ModelSettings:
    """Everything about a loaded model and this toolkit that the tokens of a reply depend on.

    Attributes:
        model: hashes of the model's files, and its options.
        numerics: how the model computes, which can differ between machines.
    """

    model: str
    numerics: str


def settings_of(llm: LLM) -> ModelSettings:
    """Return the settings of a loaded model, as it was loaded."""
    model = llm.model
    identity = model.identity()
    facts: Mapping[str, object] = {
        "files": identity.model,
        "configuration": model.config.raw,
        # The model's defaults, some of which are in other files than genai_config.json.
        "defaults": repr(llm.params()),
        "tokenizer": llm.tokenizer.content_key(),
        "templates": llm.tokenizer.templates_key(),
        # A context size that follows from free memory is left out, because it may differ in every run.
        "context size": model.fixed_context_size,
    }
    numerics = f"{__version__}, {kernel_sources()}, {identity.numerics}"
    return ModelSettings(json.dumps(facts, sort_keys=True), numerics)
