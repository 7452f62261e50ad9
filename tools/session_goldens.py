"""Write the small exported models that tests use: `python -m tools.session_goldens [PATTERN]`.

The models have random weights. They are stored in tests/session/models, with inputs and onnxruntime's outputs. The tool
needs the extra "export" and onnxruntime.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from tools.session_agreement import MODELS, cases

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "session" / "models"
KEPT = (
    "bert legacy",
    "resnet legacy",
    "vit legacy",
    "convnext dynamo",
    "distilbert dynamo",
    "gpt2 dynamo",
    "mpt dynamo",
    "boosting pipeline",
    "forest pipeline",
    "kmeans pipeline",
    "lightgbm pipeline",
    "logistic pipeline",
    "neighbours pipeline",
    "network pipeline",
    "svm pipeline",
    "xgboost pipeline",
)
# Position tables would be the largest part of these models.
SHORT = {"bert": "max_position_embeddings", "distilbert": "max_position_embeddings", "gpt2": "n_positions"}


def save(name: str, model: bytes, feed: dict[str, Any]) -> None:
    """Write a model, its inputs, and all of onnxruntime's outputs that are arrays."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    outputs = dict(zip((item.name for item in session.get_outputs()), session.run(None, feed), strict=True))
    arrays = {f"output {key}": value for key, value in outputs.items() if isinstance(value, np.ndarray)}
    (FOLDER / f"{name}.onnx").write_bytes(model)
    np.savez_compressed(FOLDER / f"{name}.npz", **{f"input {key}": value for key, value in feed.items()}, **arrays)


def without_stack_traces(model: bytes) -> bytes:
    """Return the model without the exporter's notes on the origin of nodes, which name files on one machine."""
    import onnx

    proto = onnx.load_from_string(model)
    for part in (*proto.graph.node, *proto.graph.value_info, *proto.graph.initializer, *proto.functions, proto.graph):
        del part.metadata_props[:]
    return proto.SerializeToString()


def main() -> None:
    """Write the models whose names match."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    FOLDER.mkdir(exist_ok=True)
    for model_type, extent in SHORT.items():
        kind, sizes = MODELS[model_type]
        MODELS[model_type] = (kind, {**sizes, extent: 16})
    makers = cases()
    for name in KEPT:
        if re.search(sys.argv[1] if len(sys.argv) > 1 else "", name):
            with tempfile.TemporaryDirectory() as folder:
                source, feed = makers[name](Path(folder))
                model = source if isinstance(source, bytes) else source.read_bytes()
            save(name.replace(" ", "_"), without_stack_traces(model), feed)
            print(name, len(model))


if __name__ == "__main__":
    main()
