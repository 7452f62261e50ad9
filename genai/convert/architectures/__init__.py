"""One function per model_type, in files of families that are alike; `find` gives what a config.json asks for.

A function says what the decoder is (DecoderSpec), the rules beside it where its weights lie. It writes no graph and
reads no tensor: a new architecture needs code elsewhere only if it has a part that no other has.
"""

from __future__ import annotations

from ...errors import UnsupportedModelError, did_you_mean
from . import gpt, llama  # noqa: F401 (they fill ARCHITECTURES)
from .common import ARCHITECTURES, Architecture

MODEL_TYPES = sorted(ARCHITECTURES)


def find(model_type: str) -> Architecture:
    """The architecture of a model_type; UnsupportedModelError lists those that are known."""
    if model_type not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not known",
            f"known are {', '.join(MODEL_TYPES)}",
            did_you_mean(model_type, MODEL_TYPES, "use one of these; docs/build.md says how to add another"),
        )
    return ARCHITECTURES[model_type]
