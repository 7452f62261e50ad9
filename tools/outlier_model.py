"""Copy a model folder and give the copy's activations outlier channels, as large models have.

    python -m tools.outlier_model SOURCE TARGET [--every 64] [--factor 30]

The gains of all norms are multiplied in every N-th channel. The copy's predictions are meaningless. The copy shows the
cost of quantised activations (`genai eval kld`) when a few numbers per block are much larger than the rest.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import onnx
from onnx import external_data_helper, numpy_helper

from .arguments import positive

_GAIN_INPUT = {"SimplifiedLayerNormalization": 1, "SkipSimplifiedLayerNormalization": 2, "RMSNormalization": 1}


def make(source: Path, target: Path, every: int, factor: float) -> int:
    """Copy the folder and multiply the gains; return the number of changed norms."""
    shutil.copytree(source, target)
    model = onnx.load(target / "model.onnx", load_external_data=False)
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    names = {node.input[_GAIN_INPUT[node.op_type]] for node in model.graph.node if node.op_type in _GAIN_INPUT}
    for name in names:
        tensor = initializers[name]
        if external_data_helper.uses_external_data(tensor):
            external_data_helper.load_external_data_for_tensor(tensor, str(target))
        gains = numpy_helper.to_array(tensor).copy()
        gains[::every] = (gains[::every].astype(np.float32) * factor).astype(gains.dtype)
        tensor.CopyFrom(numpy_helper.from_array(gains, name))
    onnx.save(model, target / "model.onnx")
    return len(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--every", type=positive, default=64, help="interval between the changed channels")
    parser.add_argument("--factor", type=float, default=30.0)
    arguments = parser.parse_args()
    count = make(arguments.source, arguments.target, arguments.every, arguments.factor)
    print(f"{arguments.target}: gains of {count} norms changed")


if __name__ == "__main__":
    main()
