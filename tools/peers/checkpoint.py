"""A Hugging Face checkpoint with random bfloat16 weights, from which every engine's model is made."""

from __future__ import annotations

import json
import shutil
import struct
from math import prod
from pathlib import Path

import ml_dtypes

from genai.convert.tensors import tensor_shapes
from tools.random_weights import RandomWeights

from .shapes import Shape
from .tokenizer import write_tokenizer


def make_checkpoint(folder: Path, shape: Shape, seed: int = 0) -> Path:
    """Write the checkpoint unless it exists. It appears only when complete. Memory holds one tensor at a time."""
    if folder.exists():
        return folder
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config = dict(shape.config)
    (partial / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    (partial / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    write_tokenizer(partial, int(config["vocab_size"]))
    _write_weights(partial / "model.safetensors", shape, seed)
    return partial.rename(folder)


def _write_weights(path: Path, shape: Shape, seed: int) -> None:
    spec = shape.spec
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in tensor_shapes(spec).items():
        start, end = end, end + 2 * prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in RandomWeights(spec, seed).values():
            file.write(values.astype(ml_dtypes.bfloat16).tobytes())
