"""One function per model_type, in files of families that are alike; `find` gives what a config.json asks for.

A function says what the decoder is (DecoderSpec), the rules beside it where its weights lie. It writes no graph and
reads no tensor: a new architecture needs code elsewhere only if it has a part that no other has.
"""

from __future__ import annotations

from difflib import get_close_matches

from ...errors import UnsupportedModelError
from . import gpt, llama  # noqa: F401 (they fill ARCHITECTURES)
from .common import ARCHITECTURES, Architecture

MODEL_TYPES = sorted(ARCHITECTURES)


def find(model_type: str) -> Architecture:
    """The architecture of a model_type; UnsupportedModelError lists those that are known."""
    if model_type not in ARCHITECTURES:
        close = get_close_matches(model_type, MODEL_TYPES, 1)
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not known" + (f"; did you mean {close[0]!r}?" if close else ""),
            f"known are {', '.join(MODEL_TYPES)}",
            "use a checkpoint of one of these, or an ONNX export of yours; docs/build.md says how to add one",
        )
    return ARCHITECTURES[model_type]
