"""The process that compares one model of a suite: `python -m genai.bench.suite_worker`, with a JSON object on stdin."""

from __future__ import annotations

import json
import math
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import GenaiError, InputError
from ..onnx.ir import OnnxModel
from ..onnx.reader import read_model
from ..onnx.types import DataType, TensorType
from ..session.arrays import load_arrays, random_feed
from ..session.config import SessionConfig
from ..session.session import Session
from .session import bench_session
from .suite import SETTINGS, default_sizes

# Operators of quantised graphs, without those whose names begin with "Q".
_INTEGER = ("MatMulInteger", "ConvInteger", "DynamicQuantize", "Quantize", "Dequantize")


def main() -> None:
    """Measure the model of the task, write its inputs, and print the result, or the error."""
    task = json.loads(sys.stdin.read())
    try:
        print(json.dumps(_measured(task)))
    except GenaiError as error:
        print(json.dumps({"error": f"{error.what}; {error.why}"}))


def _measured(task: Mapping[str, Any]) -> dict[str, Any]:
    path = Path(task["path"])
    session = Session(path, SessionConfig(threads=1))
    inputs = load_arrays(Path(task["inputs"])) if task["inputs"] else None
    sizes: dict[str, int] = {}
    if inputs is None:
        sizes = default_sizes(session.inputs, {**session.head_sizes, **task["dims"], **task["own"]})
        if unknown := [name for name in task["own"] if name not in sizes]:
            raise InputError(
                f"{SETTINGS} gives a size for {unknown[0]!r}",
                f"the dimensions of the inputs are {', '.join(sizes) or 'fixed'}",
                "correct the name, or remove the size",
            )
        inputs = random_feed(session.inputs, sizes, tables=session.table_sizes)
    del session
    with Path(task["feed"]).open("wb") as file:
        pickle.dump(inputs, file)
    options = {"repeat": task["repeat"], "threads": task["threads"], "cpu": task["cpu"]}
    result = bench_session(path, dims={}, inputs=inputs, compare=True, **options)
    if not math.isfinite(result["difference"]):
        result["difference"] = None  # JSON has no infinity
    return {**result, "class": class_of(read_model(path)), "dims": sizes}


def class_of(model: OnnxModel) -> str:
    """Return "int8" for a quantised graph, "fp16" for one with 16-bit floats, and "fp32" otherwise."""
    graph = model.graph
    if any(node.op_type.startswith(("Q", *_INTEGER)) for node in graph.nodes):
        return "int8"
    types = [value.dtype for value in graph.initializers.values()]
    types += [value.type.dtype for value in graph.inputs if isinstance(value.type, TensorType)]
    return "fp16" if any(dtype in (DataType.FLOAT16, DataType.BFLOAT16) for dtype in types) else "fp32"


if __name__ == "__main__":
    main()
