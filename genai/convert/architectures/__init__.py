"""One function per model_type, in one file per group of families; `find` returns the Architecture of a model_type.

Each function returns the decoder's DecoderSpec, and its rules map tensor names. The functions write no graph and read
no tensors, so a new architecture needs code elsewhere only if it has a part that no other architecture has.
"""

from __future__ import annotations

from ...errors import UnsupportedModelError, about
from ..encoders.families import encoder_types
from . import gemma, gpt, hybrid, latent, llama, mamba  # noqa: F401 (imported to fill ARCHITECTURES)
from .common import ARCHITECTURES, Architecture

MODEL_TYPES = sorted(ARCHITECTURES)
_REASONS = {
    **dict.fromkeys("falcon_mamba zamba".split(), "its form of Mamba-1 is not built, only that of Mamba and Jamba"),
    "deepseek_v32": "the indexer that selects tokens for its sparse attention is not built",
    "deepseek_v4": "its hyper-connections and its sparse attention are not built",
    "glm_moe_dsa": "the indexer that selects tokens for its sparse attention is not built",
    **dict.fromkeys(("minimax", "minimax_m1"), "its lightning attention cannot be converted"),
    "recurrent_gemma": "the gates of its recurrent layers (RG-LRU) are not built",
    "rwkv": "its time mixing is not built",
    "zamba2": "several of its layers share one attention layer, each with its own adapters",
    **dict.fromkeys(("mllama", "mllama_text_model"), "some of its layers attend to pictures"),
    **dict.fromkeys(("paligemma",), "its prompts are attended to in both directions"),
}


def find(model_type: str) -> Architecture:
    """Return the architecture of a model_type. Raise UnsupportedModelError if it is not supported."""
    if model_type not in ARCHITECTURES and model_type in encoder_types():
        raise about(
            "encoder",
            UnsupportedModelError(
                f"model_type {model_type!r} is an encoder, which does not generate text",
                "encoders compute embeddings or scores",
                "use `genai embed` or `genai rerank`, or genai.Embedder or genai.Reranker in Python",
            ),
        )
    if model_type in _REASONS:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported",
            _REASONS[model_type],
            "use a checkpoint of a supported type (docs/reference/architectures.md)",
        )
    if model_type not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported",
            f"the supported types are {', '.join(MODEL_TYPES)}",
            "use a checkpoint of a supported type, or add a type (docs/how-to/convert.md)",
        )
    return ARCHITECTURES[model_type]
