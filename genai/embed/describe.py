"""Facts about an encoder's folder, for `genai info`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..convert.encoders.build import builds_of, is_encoder_checkpoint
from ..models.exported_config import is_exported_decoder, variants_in
from .folder import GRAPHS, has_graph, read_encoder_folder


def is_encoder_folder(folder: Path) -> bool:
    """Return True if a folder is an encoder: a checkpoint of an encoder, or config.json and a graph."""
    if not folder.is_dir() or (folder / "genai_config.json").is_file():
        return False
    if is_encoder_checkpoint(folder):
        return True
    return (folder / "config.json").is_file() and has_graph(folder) and not is_exported_decoder(folder)


def describe_encoder(folder: Path) -> dict[str, Any]:
    """Return facts about an encoder's folder.

    Raises:
        GenaiError: see `read_encoder_folder`.
    """
    found = read_encoder_folder(folder)
    graphs = [name for name in GRAPHS if (folder / name).is_file()] or [one.decoder for one in variants_in(folder)]
    built = builds_of(folder) if not graphs and is_encoder_checkpoint(folder) else []
    weights = sum(file.stat().st_size for file in (*folder.glob("*.safetensors"), *folder.glob("**/*.onnx*")))
    modules = [type(module).__name__.removesuffix("Module") for module in found.modules]
    about_vectors = {
        "pooling": "+".join(found.poolings) or "none",
        "modules": ", ".join(modules) or "none",
        "similarity": found.similarity,
    }
    return {
        "kind": "reranker or classifier" if found.is_classifier else "encoder",
        "path": str(folder),
        "architecture": str(found.config.get("model_type", "unknown")),
        "layers": found.config.get("num_hidden_layers"),
        "hidden_size": found.config.get("hidden_size"),
        "graph": ", ".join(graphs or map(str, built)) or "none: built from the checkpoint on first use",
        "weight_bytes": weights,
        "max_length": found.max_length,
        **({} if found.is_classifier else about_vectors),
        "prompts": ", ".join(found.prompts) or "none",
        "command": f"genai {'rerank' if found.is_classifier else 'embed'} {folder}",
    }
