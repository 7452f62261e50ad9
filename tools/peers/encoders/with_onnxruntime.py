"""onnxruntime: texts sorted by length, in padded batches of 32, with the tokenizers library and pooling in NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from serving import Embed, serve
from tokenizers import Tokenizer

BATCH = 32


def load(path: str, threads: int) -> tuple[Embed, dict[str, str]]:
    """Return the function that embeds texts."""
    folder = Path(path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(
        str(folder / "onnx" / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )
    names = [one.name for one in session.get_inputs()]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text(encoding="utf-8"))["pooling_mode"]

    def embed(texts: list[str], _: list[list[int]]) -> Any:
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors: list[Any] = [None] * len(texts)
        for first in range(0, len(order), BATCH):
            part = order[first : first + BATCH]
            encoded = tokenizer.encode_batch([texts[index] for index in part])
            ids = np.array([one.ids for one in encoded], np.int64)
            mask = np.array([one.attention_mask for one in encoded], np.int64)
            known = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            (rows,) = session.run(None, {name: known[name] for name in names})
            found = _pooled(rows, mask, pooling)
            found /= np.linalg.norm(found, axis=1, keepdims=True)
            for index, vector in zip(part, found, strict=True):
                vectors[index] = vector
        return vectors

    return embed, {"onnxruntime": onnxruntime.__version__}


def _pooled(rows: Any, mask: Any, pooling: str) -> Any:
    if pooling == "cls":
        return rows[:, 0]
    if pooling == "lasttoken":
        return rows[np.arange(len(rows)), mask.sum(axis=1) - 1]
    weights = mask[:, :, None].astype(np.float32)
    return (rows * weights).sum(axis=1) / weights.sum(axis=1)


if __name__ == "__main__":
    serve(load)
