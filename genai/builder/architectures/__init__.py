"""One file per model_type, each with an ARCHITECTURE; `find` gives the one that a config.json asks for.

A file says what the decoder is (DecoderSpec) and where its weights lie. It writes no graph and reads no tensor: a new
architecture needs code elsewhere only if it has a part that no other has.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

from ...errors import UnsupportedModelError
from ..architecture import Architecture

MODEL_TYPES = (
    "cohere cohere2 ernie4_5 exaone4 falcon gemma gemma2 gemma3_text glm4 gpt2 gpt_neox granite granitemoe llama "
    "mistral mixtral nemotron olmo olmo2 phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe smollm3 stablelm starcoder2"
).split()


def find(model_type: str) -> Architecture:
    """The architecture of a model_type.

    Raises:
        UnsupportedModelError: it is not known; the message lists those that are.
    """
    if model_type not in MODEL_TYPES:
        close = get_close_matches(model_type, MODEL_TYPES, 1)
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not known" + (f"; did you mean {close[0]!r}?" if close else ""),
            f"known are {', '.join(MODEL_TYPES)}",
            "use a checkpoint of one of these, or an ONNX export of yours; docs/build.md says how to add one",
        )
    architecture: Architecture = import_module(f".{model_type}", __name__).ARCHITECTURE
    return architecture
