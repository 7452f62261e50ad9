"""Compare single operators with onnxruntime: `python -m tools.operator_speed [PATTERN] [--write]`.

Each case is a model with one operator, or with the few operators that exporters write for one function. Both runtimes
use one thread, take turns, and are charged with the CPU time of the process, so that other programs on the machine
change the figures little. --write updates docs/reference/operator-speed.md.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from genai.session.arrays import Peer
from genai.session.config import SessionConfig
from genai.session.session import Session

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "operator-speed.md"
HEADER = "| operator | inputs | toolkit, µs | onnxruntime, µs | ratio |\n|---|---|---|---|---|"
# CPU seconds of one measurement, and the number of measurements; the minimum counts.
SECONDS, ROUNDS = 0.02, 7
OPSET = 18
PLANES, TOKENS, FEW = (1, 64, 56, 56), (1, 128, 768), (4,)
Nodes = tuple[tuple[str, str, str, Mapping[str, Any]], ...]


@dataclass(frozen=True)
class Case:
    """A model: nodes as (operator, inputs, outputs, attributes), the inputs x, y, ... and the constants."""

    name: str
    nodes: Nodes
    inputs: tuple[Any, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> str:
        """The types and shapes of the inputs."""
        return ", ".join(f"{x.dtype} [{', '.join(map(str, x.shape))}]" for x in self.inputs)

    def model(self) -> bytes:
        """Return the model's file; its outputs are those of the last node."""
        names = "xyzuvw"[: len(self.inputs)]
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for name, x in zip(names, self.inputs, strict=True)
        ]
        nodes = [helper.make_node(op, i.split(), o.split(), **a) for op, i, o, a in self.nodes]
        outputs = [onnx.ValueInfoProto(name=name) for name in nodes[-1].output]
        constants = [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
        graph = helper.make_graph(nodes, "case", inputs, outputs, constants)
        imports = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        return bytes(helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString())

    def feed(self) -> dict[str, Any]:
        """Return the inputs by name."""
        return dict(zip("xyzuvw", self.inputs, strict=False))


def _random(shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def _one(
    op: str, *inputs: Any, constants: Mapping[str, Any] | None = None, outputs: str = "out", **attributes: Any
) -> Case:
    given = [*"xyzuvw"[: len(inputs)], *(constants or {})]
    return Case(op, ((op, " ".join(given), outputs, attributes),), inputs, constants or {})


def _elementwise() -> Iterator[Case]:
    floats = "Relu Sigmoid LeakyRelu Elu HardSigmoid HardSwish Softplus Exp Tanh Erf Log Sqrt Abs Neg".split()
    for op in floats:
        yield _one(op, _random(PLANES))
    limits = {"low": np.float32(0), "high": np.float32(6)}
    yield _one("Clip", _random(PLANES), constants=limits)
    yield _one("PRelu", _random(PLANES), constants={"slope": _random((64, 1, 1))})
    for dtype in (np.float16, np.float64):
        yield from (_one(op, _random(PLANES, dtype)) for op in ("Relu", "Sigmoid", "Exp"))
    for shape in (PLANES, FEW):
        for dtype in (np.float32, np.float16):
            x = _random(shape, dtype)
            yield Case("SiLU (x * Sigmoid)", (("Sigmoid", "x", "s", {}), ("Mul", "x s", "out", {})), (x,))
    alpha = {"alpha": np.float32(1.702)}
    quick = (("Mul", "x alpha", "a", {}), ("Sigmoid", "a", "s", {}), ("Mul", "x s", "out", {}))
    yield Case("QuickGelu (x * Sigmoid(1.702 x))", quick, (_random(TOKENS),), alpha)
    for dtype in (np.float32, np.float16, np.int64):
        x = (_random(PLANES) * 10).astype(dtype)
        yield from (_one(op, x, x) for op in ("Add", "Mul"))
    channel = _random((1, 64, 1, 1))
    yield from (_one(op, _random(PLANES), channel) for op in ("Add", "Mul"))
    yield _one("Add", _random(TOKENS), _random((768,)))
    yield from (_one(op, _random(FEW), _random(FEW)) for op in ("Add", "Div"))
    yield _one("Where", _random(PLANES) > 0, _random(PLANES), _random(PLANES))
    yield _one("Cast", _random(PLANES), to=onnx.TensorProto.FLOAT16)
    yield _one("Cast", _random(PLANES, np.float16), to=onnx.TensorProto.FLOAT)


def _rows() -> Iterator[Case]:
    for op in ("Softmax", "LogSoftmax"):
        yield _one(op, _random((8, 128, 128)), axis=-1)
    yield _one("Softmax", _random((8, 128, 128), np.float16), axis=-1)
    yield replace(_one("Softmax", _random((8, 128, 128)), axis=1), name="Softmax (axis 1)")
    axes = {"axes": np.array([-1])}
    for op in ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceL2"):
        yield _one(op, _random(TOKENS), constants=axes)
    yield replace(_one("ReduceMean", _random(PLANES), constants={"axes": np.array([2, 3])}), name="ReduceMean (2, 3)")
    yield replace(_one("ReduceMean", _random(TOKENS), constants={"axes": np.array([1])}), name="ReduceMean (1)")
    yield _one("GlobalAveragePool", _random(PLANES))
    weights = {"scale": _random((768,)), "bias": _random((768,))}
    yield _one("LayerNormalization", _random(TOKENS), constants=weights)
    per_channel = {"scale": _random((64,)), "bias": _random((64,))}
    yield _one("InstanceNormalization", _random(PLANES), constants=per_channel)
    statistics = {**per_channel, "mean": _random((64,)), "variance": np.abs(_random((64,)))}
    yield _one("BatchNormalization", _random(PLANES), constants=statistics)


def _windows() -> Iterator[Case]:
    for op in ("MaxPool", "AveragePool"):
        yield _one(op, _random((1, 64, 112, 112)), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
        yield _one(op, _random(PLANES), kernel_shape=[2, 2], strides=[2, 2])
    yield _one("MaxPool", _random((1, 128, 20, 20)), kernel_shape=[5, 5], strides=[1, 1], pads=[2, 2, 2, 2])
    scales = {"roi": np.zeros(0, np.float32), "scales": np.array([1, 1, 2, 2], np.float32)}
    nearest = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
    for mode, attributes in (("nearest", nearest), ("linear", {"mode": "linear"})):
        yield replace(_one("Resize", _random((1, 64, 28, 28)), constants=scales, **attributes), name=f"Resize ({mode})")


def _selection() -> Iterator[Case]:
    for shape, k in (((1, 50257), 50), ((16, 32000), 40), ((1, 8400), 300)):
        yield _one("TopK", _random(shape), constants={"k": np.array([k])}, outputs="values indices")
    for count, classes in ((2000, 1), (8732, 21)):
        rng = np.random.default_rng(0)
        centres, sizes = rng.uniform(0, 500, (1, count, 2)), rng.uniform(5, 80, (1, count, 2))
        boxes = np.concatenate([centres, centres + sizes], -1).astype(np.float32)
        scores = rng.uniform(0, 1, (1, classes, count)).astype(np.float32) ** 8
        limits = {"most": np.array([200]), "overlap": np.float32([0.45]), "least": np.float32([0.2])}
        yield _one("NonMaxSuppression", boxes, scores, constants=limits)
    indices = np.random.default_rng(0).integers(0, 128, (8, 128, 128))
    yield _one("GatherElements", _random((8, 128, 128)), indices, axis=2)
    yield _one("Gather", _random((1000, 256)), np.arange(0, 1000, 2))
    yield _one("ArgMax", _random((16, 32000)), axis=-1)
    yield _one("Tile", _random((64, 64, 32)), constants={"repeats": np.array([1, 2, 2])})
    yield _one("Expand", _random((64, 1, 1024)), constants={"shape": np.array([64, 16, 1024])})
    yield _one("Expand", _random((1, 128, 1, 1)), constants={"shape": np.array([1, 128, 28, 28])})
    sides = {"pads": np.array([0, 0, 1, 1, 0, 0, 1, 1])}
    for mode in ("constant", "reflect"):
        yield replace(_one("Pad", _random(PLANES), constants=sides, mode=mode), name=f"Pad ({mode})")
    yield _one("Transpose", _random((1, 128, 12, 64)), perm=[0, 2, 1, 3])
    yield _one("Transpose", _random(PLANES), perm=[0, 2, 3, 1])
    yield _one("CumSum", _random((8, 128, 128)), constants={"axis": np.array(2)})


def _recurrent() -> Iterator[Case]:
    for op, gates in (("LSTM", 4), ("GRU", 3)):
        for steps, batch, width, hidden in ((1, 1, 64, 64), (32, 1, 64, 64), (128, 1, 256, 256), (50, 8, 128, 128)):
            weights = {
                "w": _random((1, gates * hidden, width)) / 8,
                "r": _random((1, gates * hidden, hidden)) / 8,
                "b": _random((1, 2 * gates * hidden)) / 8,
            }
            late = {"linear_before_reset": 1} if op == "GRU" else {}  # as in PyTorch's exports
            yield _one(op, _random((steps, batch, width)), constants=weights, hidden_size=hidden, **late)


def _products() -> Iterator[Case]:
    yield _one("MatMul", _random((8, 128, 64)), _random((8, 64, 128)))
    yield _one("MatMul", _random((1, 768)), constants={"w": _random((768, 768))})
    yield _one("MatMul", _random((128, 768)), constants={"w": _random((768, 768))})
    yield _one("MatMul", _random((128, 768), np.float16), constants={"w": _random((768, 768), np.float16)})
    sizes = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    weight = _random((64, 64, 3, 3)) / 24
    for dtype in (np.float32, np.float16):
        yield _one("Conv", _random((1, 64, 28, 28), dtype), constants={"w": weight.astype(dtype)}, **sizes)
    silu = (("Sigmoid", "a", "s", {}), ("Mul", "a s", "b", {}))
    nodes = (("Conv", "x w", "a", sizes), *silu, ("Conv", "b w", "out", sizes))
    yield Case("Conv, SiLU, Conv", nodes, (_random((1, 64, 28, 28)),), {"w": weight})
    kernels = {
        "wide": _random((192, 32, 1, 1)) / 6,
        "w": _random((192, 1, 3, 3)) / 3,
        "narrow": _random((32, 192, 1, 1)) / 14,
    }
    nodes = (
        ("Conv", "x wide", "a", {}), ("Relu", "a", "b", {}), ("Conv", "b w", "c", {**sizes, "group": 192}),
        ("Relu", "c", "d", {}), ("Conv", "d narrow", "e", {}), ("Add", "e x", "out", {}),
    )  # fmt: skip
    yield Case("Inverted bottleneck (1x1, depthwise, 1x1)", nodes, (_random((1, 32, 28, 28)),), kernels)


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for family in (_elementwise, _rows, _windows, _selection, _recurrent, _products):
        yield from family()


def _cpu_seconds(run: Callable[[], object]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def measured(case: Case) -> tuple[float, float]:
    """Return the microseconds of CPU time per run of the toolkit and of onnxruntime."""
    model, feed = case.model(), case.feed()
    session, peer = Session(model, SessionConfig(threads=1)), Peer(model, 1)
    runs: list[Callable[[], object]] = [lambda: session.run(feed), lambda: peer.run(feed)]
    counts = []
    for run in runs:
        run()
        counts.append(max(1, min(2000, int(SECONDS / max(min(_cpu_seconds(run) for _ in range(3)), 1e-6)))))
    rounds = [[_repeated(run, count) for run, count in zip(runs, counts, strict=True)] for _ in range(ROUNDS)]
    ours, theirs = np.min(rounds, axis=0)
    return float(ours), float(theirs)


def _repeated(run: Callable[[], object], count: int) -> float:
    def several() -> None:
        for _ in range(count):
            run()

    run()
    return 1e6 * _cpu_seconds(several) / count


def row(case: Case) -> str:
    """Return one row of the table."""
    ours, theirs = measured(case)
    return f"| {case.name} | {case.kinds} | {ours:.4g} | {theirs:.4g} | {ours / theirs:.2f} |"


def page(rows: list[str], processor: str) -> str:
    """Return the text of the page with the table."""
    import onnxruntime

    text = (
        "This page is for users who compare sessions with onnxruntime, and for contributors who look for slow "
        "operators. It shows the CPU time of single operators, and is generated by `python -m tools.operator_speed "
        "--write PROCESSOR`.",
        f"Both runtimes use one thread and take turns; onnxruntime is version {onnxruntime.__version__}. Each figure "
        f"is the minimum of {ROUNDS} measurements on {processor}, and includes the call from Python. A ratio below 1 "
        "means that the toolkit is faster. [How sessions run a model](../explanation/sessions.md#speed) compares whole "
        "models.",
    )
    paragraphs = "\n\n".join(textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False) for part in text)
    return "\n".join(["# Speed of operators", "", paragraphs, "", HEADER, *rows, ""])


def main() -> None:
    """Print the table; with --write, also update the page."""
    parser = argparse.ArgumentParser(prog="python -m tools.operator_speed", description=__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="regular expression for the names of operators")
    parser.add_argument("--write", metavar="PROCESSOR", help="update the page; PROCESSOR describes this machine")
    arguments = parser.parse_args()
    if arguments.write and arguments.pattern:
        parser.error("--write needs all operators, so it cannot be combined with a pattern")
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    rows = []
    print(HEADER)
    for case in cases():
        if re.search(arguments.pattern, case.name):
            rows.append(row(case))
            print(rows[-1], flush=True)
    if not rows:
        sys.exit(f"no operator matches {arguments.pattern!r}")
    if arguments.write:
        PAGE.write_text(page(rows, arguments.write), encoding="utf-8")


if __name__ == "__main__":
    main()
