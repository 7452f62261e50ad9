"""Row analysis: what is row-wise passes and keeps its rows when sequences are flattened; what mixes rows is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from genai.lowering.flatten import analyse_rows
from genai.lowering.rows import BATCH, TOKENS, Kind, NotFlattenable, RowDim, State, rows
from genai.onnx.reader import read_model
from genai.optimize.shapes import infer_shapes

WIDTH = 12


def make(nodes: Sequence[Any], constants: dict[str, Any] | None = None) -> onnx.ModelProto:
    """A model from x [B, S, WIDTH] to y."""
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()]
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "S", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def analyse(proto: onnx.ModelProto) -> State:
    model = read_model(proto)
    infer_shapes(model)
    return analyse_rows(model.graph, {"x": rows((BATCH, TOKENS, RowDim(WIDTH)))}).states["y"]


N = helper.make_node
F = np.float32
I64 = np.int64
RNG = np.random.default_rng(0)
ROW_WISE: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "unary": ([N("Tanh", ["x"], ["y"])], {}),
    "broadcast": ([N("Mul", ["x", "w"], ["y"])], {"w": RNG.normal(size=WIDTH).astype(F)}),
    "matmul": ([N("MatMul", ["x", "w"], ["y"])], {"w": RNG.normal(size=(WIDTH, 5)).astype(F)}),
    "softmax": ([N("Softmax", ["x"], ["y"], axis=-1)], {}),
    "heads": (
        [
            N("Reshape", ["x", "s"], ["a"]),
            N("Transpose", ["a"], ["b"], perm=[0, 2, 1, 3]),
            N("Softmax", ["b"], ["c"], axis=-1),
            N("Transpose", ["c"], ["d"], perm=[0, 2, 1, 3]),
            N("Reshape", ["d", "t"], ["y"]),
        ],
        {"s": np.array([0, 0, 3, -1], I64), "t": np.array([0, 0, WIDTH], I64)},
    ),
    "merge tokens and heads": (
        [N("Reshape", ["x", "s"], ["a"]), N("Softmax", ["a"], ["b"]), N("Reshape", ["b", "t"], ["y"])],
        {"s": np.array([0, -1, 4], I64), "t": np.array([0, -1, WIDTH], I64)},
    ),
    "two dimensions": ([N("Reshape", ["x", "s"], ["a"]), N("Relu", ["a"], ["y"])], {"s": np.array([-1, WIDTH], I64)}),
    "shape chain": (
        [
            N("Shape", ["x"], ["s"]),
            N("Gather", ["s", "zero"], ["b"], axis=0),
            N("Gather", ["s", "one"], ["t"], axis=0),
            N("Unsqueeze", ["b", "axis"], ["b1"]),
            N("Unsqueeze", ["t", "axis"], ["t1"]),
            N("Concat", ["b1", "t1", "rest"], ["new"], axis=0),
            N("Reshape", ["x", "new"], ["y"]),
        ],
        {"zero": I64(0), "one": I64(1), "axis": np.array([0], I64), "rest": np.array([3, 4], I64)},
    ),
    "split, slice and join": (
        [
            N("Split", ["x"], ["a", "b"], axis=2, num_outputs=2),
            N("Slice", ["b", "from", "to", "axes"], ["c"]),
            N("Concat", ["c", "a"], ["y"], axis=-1),
        ],
        {"from": np.array([1], I64), "to": np.array([-1], I64), "axes": np.array([2], I64)},
    ),
    "reduce": (
        [N("ReduceMean", ["x", "axes"], ["m"], keepdims=1), N("Sub", ["x", "m"], ["y"])],
        {"axes": np.array([-1], I64)},
    ),
    "top k": ([N("TopK", ["x", "k"], ["y", "i"], axis=-1)], {"k": np.array([3], I64)}),
    "pick features": ([N("Gather", ["x", "i"], ["y"], axis=2)], {"i": np.array([2, 0], I64)}),
}


@pytest.mark.parametrize("name", ROW_WISE)
def test_row_wise_graphs_give_the_same_rows_when_flattened(name: str) -> None:
    proto = make(*ROW_WISE[name])
    state = analyse(proto)
    assert state.kind is Kind.ROWS
    evaluator = ReferenceEvaluator(proto)
    parts = [RNG.normal(size=(1, length, WIDTH)).astype(F) for length in (3, 1, 4)]
    flat = evaluator.run(None, {"x": np.concatenate(parts, axis=1)})[0]
    alone = [evaluator.run(None, {"x": part})[0] for part in parts]
    # Products not to the bit: what NumPy adds up first depends on the processor and the number of rows.
    error = 1e-6 if any(node.op_type == "MatMul" for node in proto.graph.node) else 0
    np.testing.assert_allclose(flat, np.concatenate(alone, axis=state.axis), rtol=error, atol=error)


CROSS_ROW: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "softmax over tokens": ([N("Softmax", ["x"], ["y"], axis=1)], {}, "token axis"),
    "mean over tokens": ([N("ReduceMean", ["x", "a"], ["y"])], {"a": np.array([1], I64)}, "token axis"),
    "mean over all": ([N("ReduceMean", ["x"], ["y"])], {}, "token axis"),
    "scores": ([N("Transpose", ["x"], ["t"], perm=[0, 2, 1]), N("MatMul", ["x", "t"], ["y"])], {}, "mixes tokens"),
    "contract tokens": (
        [N("Transpose", ["x"], ["t"], perm=[0, 2, 1]), N("MatMul", ["t", "w"], ["y"])],
        {"w": np.ones((7, 2), F)},
        "token axis",
    ),
    "running sum": ([N("CumSum", ["x", "a"], ["y"])], {"a": I64(1)}, "not known to treat tokens independently"),
    "experts": ([N("NonZero", ["x"], ["y"])], {}, "mixtures of experts are only recognised as"),
    "second row": ([N("Gather", ["x", "i"], ["y"], axis=1)], {"i": I64(1)}, "tokens are selected by their position"),
    "slice tokens": (
        [N("Slice", ["x", "f", "t", "a"], ["y"])],
        {"f": np.array([0], I64), "t": np.array([2], I64), "a": np.array([1], I64)},
        "token axis",
    ),
    "constant along tokens": ([N("Mul", ["x", "w"], ["y"])], {"w": np.ones((7, 1), F)}, "extends along the token axis"),
    "cut across tokens": (
        [N("Transpose", ["x"], ["t"], perm=[0, 2, 1]), N("Reshape", ["t", "s"], ["y"])],
        {"s": np.array([0, -1, WIDTH], I64)},
        "splits or merges tokens",
    ),
    "two token axes": (
        [N("Transpose", ["x"], ["t"], perm=[1, 0, 2]), N("Add", ["x", "t"], ["y"])],
        {},
        "the token axes of two values differ",
    ),
    "squeeze by run-time size": ([N("Squeeze", ["x"], ["y"])], {}, "run-time sizes"),
    "convolution": ([N("Conv", ["x", "w"], ["y"])], {"w": np.ones((1, 1, 3), F)}, "not known to treat"),
    "join along tokens": ([N("Concat", ["x", "x"], ["y"], axis=1)], {}, "token axis"),
    "length arithmetic": (
        [
            N("Shape", ["x"], ["s"]),
            N("Cast", ["s"], ["c"], to=1),
            N("ReduceSum", ["c"], ["n"]),
            N("Mul", ["x", "n"], ["y"]),
        ],
        {},
        "not the same for all tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CROSS_ROW)
def test_what_mixes_rows_is_refused_with_the_node_and_the_reason(name: str) -> None:
    nodes, constants, message = CROSS_ROW[name]
    with pytest.raises(NotFlattenable, match=message):
        analyse(make(nodes, constants))


def test_last_row_gather_is_known() -> None:
    proto = make([N("Gather", ["x", "i"], ["y"], axis=1)], {"i": I64(-1)})
    model = read_model(proto)
    analysis = analyse_rows(model.graph, {"x": rows((BATCH, TOKENS, RowDim(WIDTH)))})
    assert [node.op_type for node in analysis.last_row_gathers] == ["Gather"]
