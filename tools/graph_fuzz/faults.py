"""Known differences: either ONNX leaves a case open, or onnxruntime deviates from the definition, which is quoted."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from .graphs import outcome, single

if TYPE_CHECKING:
    from .graphs import Graph

_NAN = "open: ONNX does not define the maximum, minimum or order of NaN and numbers, and onnxruntime's results vary"
_OVERFLOW = "open: ONNX does not define integer overflow"
_INFINITE = "open: infinities meet, and the order of operations decides between infinity and NaN"
_CHOOSING = frozenset(
    "ArgMax ArgMin Clip GlobalMaxPool Hardmax LogSoftmax Max Min ReduceLogSumExp ReduceMax ReduceMin Relu "
    "ScatterElements Softmax TopK Unique".split()
)
_SUMMING = frozenset(
    "Add CumSum Mul Neg Abs Sub Div Pow ReduceProd ReduceSum ReduceSumSquare MatMul Range Sum Mod ReduceL1".split()
)


def fault_of_node(node: onnx.NodeProto, graph: Graph, ours: Any, theirs: list[Any]) -> str:
    """Return the reason why a difference is not our fault, or "" if no reason is known."""
    if _operator(node) == "MaxPool" and (reason := _nan_is_largest(node, graph, ours)):
        return reason
    for child in (child for item in node.attribute for child in item.g.node if child.op_type != "Identity"):
        plain = onnx.NodeProto()
        plain.CopyFrom(child)
        # The value that a loop carries is initially the loop's input.
        plain.input[:] = [node.input[2] if name == "carried" else name for name in child.input]
        return fault_of_node(plain, graph, ours, theirs)
    given = [graph.values.get(name) for name in node.input]
    arrays = [value for value in given if isinstance(value, np.ndarray)]
    attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
    if node.op_type == "Gemm" and not attributes["beta"]:
        arrays = arrays[:2]  # C has no effect, whatever it contains
    floats = [value.astype(np.float64) for value in arrays if value.dtype.kind == "f"]
    if node.op_type in _CHOOSING and any(np.isnan(value).any() for value in floats):
        return _NAN
    if node.op_type == "ReduceLogSum" and any(_cancels(value) for value in floats):
        return "open: the logarithm of the rounding error of a sum that cancels"
    if node.op_type == "Sign" and any(np.isnan(value).any() for value in floats):
        return "open: the sign of NaN; onnxruntime returns NaN for float32 and 0 for float16"
    if node.op_type in _SUMMING and any(value.dtype.kind in "iu" for value in arrays):
        return _OVERFLOW if any(np.abs(value.astype(float)).max(initial=0) > 100 for value in arrays) else ""
    if node.op_type == "ConcatFromSequence" and isinstance(ours, str):
        return "ConcatFromSequence: 'all input tensors must have the same shape', also if some of them are empty"
    reason = _fault(node, graph, arrays, attributes, theirs) or _as_defined(node.op_type, arrays, attributes, ours)
    if not reason and any((np.abs(value) > 1e20).any() for value in floats):
        return _INFINITE
    return reason


def _operator(node: onnx.NodeProto) -> str:
    """Return the operator of the node, or of the node that it wraps."""
    inner = [child for item in node.attribute for child in item.g.node if child.op_type != "Identity"]
    return inner[0].op_type if inner else node.op_type


def _nan_is_largest(node: onnx.NodeProto, graph: Graph, ours: Any) -> str:
    """Return a reason if our pools treat NaN as larger than every number.

    onnxruntime pools the ranks of the elements, among which NaN has the highest rank.
    """
    inner = [name for item in node.attribute for child in item.g.node for name in child.input]
    name = next((name for name in (*node.input, *inner) if _has_nan(graph.values.get(name))), "")
    if not name:
        return ""
    x = graph.values[name]
    values, ranks = np.unique(x, return_inverse=True)
    model = single(graph, node)
    theirs = outcome("onnxruntime", model, graph.values | {name: ranks.reshape(x.shape).astype(x.dtype)})
    if isinstance(theirs, str) or isinstance(ours, str) or np.min(theirs[0], initial=0) < 0:
        return ""
    expected = [values[theirs[0].astype(int)], *theirs[1:]]
    equal = all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(ours, expected, strict=True))
    return _NAN if equal else ""


def _has_nan(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f" and bool(np.isnan(value).any())


def _fault(node: onnx.NodeProto, graph: Graph, arrays: list[Any], attributes: dict[str, Any], theirs: list[Any]) -> str:
    if node.op_type == "MeanVarianceNormalization" and np.isnan(theirs[0]).any():
        return "MeanVarianceNormalization: its body divides by the deviation + 1e-9, so equal numbers give 0, not NaN"
    if node.op_type == "Slice" and _ends_at_the_largest(arrays):
        return "Slice: 'for negative stepping it is clamped to [-1, dims[axes[i]]-1]', which includes an end of INT_MAX"
    if node.op_type == "AveragePool" and attributes.get("count_include_pad") and graph.version < 19:
        return "AveragePool: positions beyond the padding are not padding, so count_include_pad does not count them"
    if node.op_type == "MaxPool" and any(np.any(np.asarray(value) == np.finfo(np.float32).min) for value in theirs):
        return "MaxPool: 'the maximum of all values', and the maximum of -inf is -inf, not the lowest float"
    if node.op_type == "Reshape" and attributes.get("allowzero") and {0, -1} <= set(arrays[-1].tolist()):
        return "Reshape: with allowzero 'it is invalid for the specified shape to contain both a zero value and -1'"
    if node.op_type == "Resize":
        return _fault_of_resize(arrays, attributes, theirs[0])
    if node.op_type == "Gather" and theirs[0].dtype.kind == "O":
        return "Gather: onnxruntime copies the first string of a slice only; 'gather entries of the axis dimension'"
    return ""


def _fault_of_resize(arrays: list[Any], attributes: dict[str, Any], theirs: Any) -> str:
    x, where = arrays[0], attributes.get("coordinate_transformation_mode", b"").decode()
    if where == "tf_crop_and_resize" and any(a == b for a, b in zip(x.shape, theirs.shape, strict=True)):
        return "Resize: 'x_original = start_x * (length_original - 1) + ...' also along axes that keep their length"
    policy = attributes.get("keep_aspect_ratio_policy", b"stretch")
    if where == "align_corners" and (arrays[-1].dtype.kind == "f" or policy != b"stretch"):
        return "Resize: align_corners divides by 'output_width', which 'can be a fractional number' (ONNX's own tests)"
    if attributes.get("antialias") and x.dtype == np.int8:
        return "Resize: weighted averages of int8 may be negative; onnxruntime looks them up in a table from 0 to 255"
    if x.dtype.kind in "iu" and attributes["mode"] != b"nearest":
        return "open: ONNX does not define how weighted averages are converted to integers"
    return ""


def _as_defined(operator: str, arrays: list[Any], attributes: dict[str, Any], ours: list[Any]) -> str:
    """Return a reason if our result equals the definition, computed in float64 or fractions, else ""."""
    if operator == "InstanceNormalization":
        x, scale, bias = (array.astype(np.float64) for array in arrays)
        axes, sizes = tuple(range(2, x.ndim)), (-1, *[1] * (x.ndim - 2))
        deviation = np.sqrt(x.var(axis=axes, keepdims=True) + attributes.get("epsilon", 1e-5))
        exact = (x - x.mean(axis=axes, keepdims=True)) / deviation * scale.reshape(sizes) + bias.reshape(sizes)
        if np.allclose(ours[0], exact, 1e-4, 1e-6):
            return "InstanceNormalization: 'scale * (x - mean) / sqrt(variance + epsilon) + B', where x - mean is 0"
    if (
        operator == "Resize"
        and attributes["mode"] == b"nearest"
        and np.array_equal(ours[0], _nearest(arrays, attributes))
    ):
        return "Resize: nearest at 'x_original', which is an integer or a half before it is rounded"
    return ""


def _nearest(arrays: list[Any], attributes: dict[str, Any]) -> Any:
    """Resize to `sizes` in exact arithmetic; return None for unsupported options."""
    found, sizes = arrays[0], arrays[-1]
    where = attributes.get("coordinate_transformation_mode", b"half_pixel")
    plain = where in (b"half_pixel", b"half_pixel_symmetric", b"asymmetric") and "axes" not in attributes
    if not plain or sizes.dtype.kind != "i" or attributes.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
        return None
    half = Fraction(0) if where == b"asymmetric" else Fraction(1, 2)
    whole: dict[bytes, Callable[[Fraction], int]] = {
        b"round_prefer_floor": lambda at: math.ceil(at - Fraction(1, 2)),
        b"round_prefer_ceil": lambda at: math.floor(at + Fraction(1, 2)),
        b"floor": math.floor,
        b"ceil": math.ceil,
    }
    chosen = whole[attributes.get("nearest_mode", b"round_prefer_floor")]
    for axis, (size, new) in enumerate(zip(arrays[0].shape, sizes.tolist(), strict=True)):
        if size != new:
            places = [chosen((index + half) * size / new - half) for index in range(new)]
            found = found.take(np.clip(places, 0, size - 1), axis)
    return found


def _cancels(values: Any) -> bool:
    return bool(abs(values.sum()) < 1e-4 * np.abs(values).sum())


def _ends_at_the_largest(arrays: list[Any]) -> bool:
    return len(arrays) == 5 and bool(np.any((arrays[2] >= 2**31 - 1) & (arrays[4] < 0)))
