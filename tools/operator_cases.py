"""Random nodes of rare operators, for comparison with onnxruntime; kernels of ours or of `onnx.reference` run them.

`python -m tools.operator_cases [COUNT] [OPERATOR ...]` prints for each operator how many of COUNT nodes agree. The test
`tests/ops/test_operator_cases.py` compares a few nodes of each; docs/reference/operators.md lists the operators.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Generator = np.random.Generator


@dataclass(frozen=True)
class Case:
    """One node and its inputs; None stands for an omitted input."""

    op_type: str
    version: int
    inputs: list[Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    domain: str = ""

    def model(self) -> onnx.ModelProto:
        """Return a model with only this node. Its inputs are the graph's; the operator determines the output types."""
        names = ["" if value is None else f"x{index}" for index, value in enumerate(self.inputs)]
        results = [f"y{index}" for index in range(self.outputs)]
        node = helper.make_node(self.op_type, names, results, domain=self.domain, **self.attributes)
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in zip(names, self.inputs, strict=True)
            if name
        ]
        graph = helper.make_graph([node], "case", inputs, [onnx.ValueInfoProto(name=name) for name in results])
        imports = [helper.make_opsetid(self.domain, self.version)]
        if self.domain:
            imports.append(helper.make_opsetid("", 21))
        return helper.make_model(graph, opset_imports=imports, ir_version=10)

    def feed(self) -> dict[str, Any]:
        """Return the inputs by name."""
        return {f"x{index}": value for index, value in enumerate(self.inputs) if value is not None}


def _floats(rng: Generator, *shape: int, kinds: str = "fd") -> Any:
    return rng.standard_normal(shape).astype(rng.choice([np.dtype(kind) for kind in kinds]))


def _pick(rng: Generator, *values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _extents(rng: Generator, count: int, low: int = 1, high: int = 6) -> list[int]:
    return [int(extent) for extent in rng.integers(low, high, count)]


def affine_grid(rng: Generator) -> Case:
    axes = int(rng.integers(2, 4))
    theta = _floats(rng, 2, axes, axes + 1, kinds="f")
    align = int(rng.integers(2))
    # If an axis has only one element, the element's position between the two corners is undefined.
    size = np.array([2, 3, *_extents(rng, axes, 1 + align)], np.int64)
    return Case("AffineGrid", 20, [theta, size], {"align_corners": align})


def center_crop_pad(rng: Generator) -> Case:
    x = rng.integers(0, 100, _extents(rng, 3)).astype(_pick(rng, np.float32, np.int64, np.uint8, np.float64))
    count = int(rng.integers(1, 4))
    axes = [int(axis) for axis in rng.permutation(3)[:count]]
    attributes = {"axes": axes} if count < 3 or rng.random() < 0.5 else {}
    return Case("CenterCropPad", 18, [x, np.array(_extents(rng, count, 1, 8), np.int64)], attributes)


def col2im(rng: Generator) -> Case:
    axes = int(rng.integers(1, 3))
    block, strides, dilations = (_extents(rng, axes, 1, 3) for _ in range(3))
    # onnxruntime ignores the dilation of a single axis; ONNX's definition gives every axis a dilation.
    dilations = dilations if axes > 1 else [1]
    pads = [int(pad) for pad in rng.integers(0, 2, 2 * axes)]
    image = _extents(rng, axes, 3, 6)
    counts = [
        (image[i] + pads[i] + pads[i + axes] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1 for i in range(axes)
    ]
    x = _floats(rng, 2, 3 * int(np.prod(block)), int(np.prod(counts)), kinds="f")
    given = [x, np.array(image, np.int64), np.array(block, np.int64)]
    return Case("Col2Im", 18, given, {"pads": pads, "strides": strides, "dilations": dilations})


def dft(rng: Generator) -> Case:
    version = _pick(rng, 17, 20)
    rank = int(rng.integers(1, 4))
    axis = int(rng.integers(0, rank)) + (1 if rank > 1 else 0)
    axis = min(axis, rank - 1) if rank > 1 else 0
    inverse = int(rng.integers(2))
    onesided = int(rng.integers(2)) if not inverse else 0
    parts = 1 if onesided else _pick(rng, 1, 2)
    x = _floats(rng, 2, *_extents(rng, rank, 1, 9), parts)
    axis = int(rng.integers(1, x.ndim - 1))
    length = np.array(int(rng.integers(1, 10)), np.int64) if rng.random() < 0.5 else None
    attributes = {"inverse": inverse, "onesided": onesided}
    if version == 17:
        return Case("DFT", 17, [x, length], {**attributes, "axis": axis})
    return Case("DFT", 20, [x, length, np.array(axis, np.int64)], attributes)


def deform_conv(rng: Generator) -> Case:
    groups, offset_groups = _pick(rng, 1, 2), _pick(rng, 1, 2)
    kernel, strides, dilations = (_extents(rng, 2, 1, 4), _extents(rng, 2, 1, 3), _extents(rng, 2, 1, 3))
    pads = [int(pad) for pad in rng.integers(0, 2, 4)]
    extents = [d * (k - 1) + 1 + int(rng.integers(0, 4)) for k, d in zip(kernel, dilations, strict=True)]
    counts = [
        (extents[i] + pads[i] + pads[i + 2] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1 for i in range(2)
    ]
    taps = kernel[0] * kernel[1]
    kind = _pick(rng, np.float32, np.float64)
    shapes = [(2, 4, *extents), (2, 4 // groups, *kernel), (2, 2 * offset_groups * taps, *counts)]
    x, weight, offset = (rng.standard_normal(shape).astype(kind) for shape in shapes)
    bias = rng.standard_normal(2).astype(kind) if rng.random() < 0.5 else None
    mask = rng.random((2, offset_groups * taps, *counts)).astype(kind) if rng.random() < 0.5 else None
    attributes = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": pads}
    attributes |= {"group": groups, "offset_group": offset_groups}
    return Case("DeformConv", _pick(rng, 19, 22), [x, weight, offset, bias, mask], attributes)


def det(rng: Generator) -> Case:
    size = int(rng.integers(1, 5))
    return Case("Det", _pick(rng, 11, 22), [_floats(rng, *_extents(rng, int(rng.integers(0, 3))), size, size)])


def grid_sample(rng: Generator) -> Case:
    version = _pick(rng, 16, 20, 22)
    axes = 2 if version == 16 else _pick(rng, 2, 3)
    names = ("bilinear", "nearest", "bicubic") if version == 16 else ("linear", "nearest", "cubic")
    mode = _pick(rng, *(names if axes == 2 else names[:2]))
    kind = _pick(rng, np.float32, np.float64)
    x = rng.standard_normal((2, 2, *_extents(rng, axes))).astype(kind)
    grid = rng.uniform(-1.4, 1.4, (2, *_extents(rng, axes), axes)).astype(kind)
    padding = _pick(rng, "zeros", "border", "reflection")
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": int(rng.integers(2))}
    return Case("GridSample", version, [x, grid], attributes)


def max_unpool(rng: Generator) -> Case:
    axes = int(rng.integers(1, 4))
    kernel, strides = _extents(rng, axes, 1, 4), _extents(rng, axes, 1, 4)
    counts = _extents(rng, axes, 1, 4)
    pads = [int(rng.integers(0, 2)) for _ in range(2 * axes)]
    extents = [(counts[i] - 1) * strides[i] - pads[i] - pads[i + axes] + kernel[i] for i in range(axes)]
    if min(extents) < 1:
        pads, extents = [0] * 2 * axes, [(counts[i] - 1) * strides[i] + kernel[i] for i in range(axes)]
    shape = (1, 2, *counts)
    x = _floats(rng, *shape, kinds="f")
    indices = rng.permutation(2 * int(np.prod(extents)))[: x.size] if 2 * np.prod(extents) >= x.size else None
    if indices is None:
        return max_unpool(rng)
    # If output_shape is given, onnxruntime interprets the indices within that shape. In ONNX's own test case, indices
    # refer to the inferred shape (test_maxunpool_export_with_output_shape).
    given = [x, indices.reshape(shape).astype(np.int64)]
    attributes = {"kernel_shape": kernel, "strides": strides, "pads": pads}
    return Case("MaxUnpool", _pick(rng, 9, 11, 22), given, attributes)


def mel_weight_matrix(rng: Generator) -> Case:
    rate = int(_pick(rng, 8000, 16000, 44100))
    length = int(_pick(rng, 16, 64, 255))
    low = np.float32(_pick(rng, 0.0, 50.0))
    high = np.float32(_pick(rng, rate / 2, rate / 3))
    kind = _pick(rng, np.int32, np.int64)
    numbers = [np.array(value, kind) for value in (int(rng.integers(1, 12)), length, rate)]
    output = _pick(rng, 1, 11)
    return Case("MelWeightMatrix", 17, [*numbers, np.array(low), np.array(high)], {"output_datatype": output})


def _loss(rng: Generator) -> tuple[list[Any], dict[str, Any]]:
    classes, extents = int(rng.integers(2, 6)), _extents(rng, int(rng.integers(0, 3)))
    kind, index = _pick(rng, np.float32, np.float64), _pick(rng, np.int32, np.int64)
    x = rng.standard_normal((3, classes, *extents)).astype(kind)
    target = rng.integers(0, classes, (3, *extents)).astype(index)
    attributes: dict[str, Any] = {"reduction": _pick(rng, "none", "sum", "mean")}
    if rng.random() < 0.5:
        attributes["ignore_index"] = _pick(rng, 0, -1, -100)
        target = np.where(rng.random(target.shape) < 0.3, attributes["ignore_index"], target).astype(index)
    weight = rng.random(classes).astype(kind) if rng.random() < 0.5 else None
    return [x, target, weight], attributes


def negative_log_likelihood(rng: Generator) -> Case:
    inputs, attributes = _loss(rng)
    return Case("NegativeLogLikelihoodLoss", _pick(rng, 12, 13, 22), inputs, attributes)


def softmax_cross_entropy(rng: Generator) -> Case:
    inputs, attributes = _loss(rng)
    return Case("SoftmaxCrossEntropyLoss", _pick(rng, 12, 13), inputs, attributes, outputs=_pick(rng, 1, 2))


def non_max_suppression(rng: Generator) -> Case:
    batch, classes, boxes = _pick(rng, 1, 2), _pick(rng, 1, 3), int(rng.integers(0, 8))
    places = rng.random((batch, boxes, 4)).astype(np.float32)
    scores = rng.integers(0, 8, (batch, classes, boxes)).astype(np.float32) / 8
    most = np.array([int(rng.integers(0, 5))], np.int64)
    limits = [np.array([value], np.float32) for value in (_pick(rng, 0.0, 0.2, 0.5), _pick(rng, 0.0, 0.3))]
    inputs = [places, scores, most, *limits][: int(rng.integers(2, 6))]
    return Case("NonMaxSuppression", _pick(rng, 10, 11), inputs, {"center_point_box": int(rng.integers(2))})


def roi_align(rng: Generator) -> Case:
    version = _pick(rng, 10, 16, 22)
    x = _floats(rng, 2, 3, *_extents(rng, 2, 2, 8), kinds="f")
    corners = rng.uniform(-1, 8, (4, 4)).astype(np.float32)
    corners[:, 2:] = corners[:, :2] + rng.uniform(0, 5, (4, 2))
    attributes = {
        "mode": _pick(rng, "avg", "max"),
        "output_height": int(rng.integers(1, 4)),
        "output_width": int(rng.integers(1, 4)),
        "sampling_ratio": int(rng.integers(0, 3)),
        "spatial_scale": float(_pick(rng, 1.0, 0.5)),
    }
    if version >= 16:
        attributes["coordinate_transformation_mode"] = _pick(rng, "half_pixel", "output_half_pixel")
    return Case("RoiAlign", version, [x, corners, rng.integers(0, 2, 4)], attributes)


def stft(rng: Generator) -> Case:
    kind = _pick(rng, np.float32, np.float64)
    length, step = int(rng.integers(2, 9)), int(rng.integers(1, 5))
    signal = rng.standard_normal((2, int(rng.integers(10, 30)), 1)).astype(kind)
    window = rng.random(length).astype(kind) if rng.random() < 0.6 else None
    frame = np.array(length, np.int64) if window is None or rng.random() < 0.5 else None
    return Case("STFT", 17, [signal, np.array(step, np.int64), window, frame], {"onesided": int(rng.integers(2))})


def _window(op_type: str) -> Callable[[Generator], Case]:
    def make(rng: Generator) -> Case:
        size = np.array(int(rng.integers(1, 20)), _pick(rng, np.int32, np.int64))
        attributes = {"periodic": int(rng.integers(2)), "output_datatype": _pick(rng, 1, 11, 7)}
        return Case(op_type, 17, [size], attributes)

    return make


def causal_conv(rng: Generator) -> Case:
    batch, channels, length, taps = 2, 3, int(rng.integers(1, 6)), int(rng.integers(1, 5))
    kind = np.float32
    x = rng.standard_normal((batch, channels, length)).astype(kind)
    weight = rng.standard_normal((channels, 1, taps)).astype(kind)
    bias = rng.standard_normal(channels).astype(kind) if rng.random() < 0.5 else None
    past = rng.standard_normal((batch, channels, taps - 1)).astype(kind) if rng.random() < 0.5 else None
    attributes = {"activation": _pick(rng, "none", "silu", "swish")}
    return Case("CausalConvWithState", 27, [x, weight, bias, past], attributes, outputs=2)


def linear_attention(rng: Generator) -> Case:
    kv_heads = _pick(rng, 1, 2)
    heads = kv_heads * _pick(rng, 1, 2)
    batch, length, size, width = 2, int(rng.integers(1, 5)), 4, _pick(rng, 4, 6)
    rule = _pick(rng, "linear", "gated", "delta", "gated_delta")
    kind = np.float32

    def rows(features: int) -> Any:
        return (rng.standard_normal((batch, length, features)) * 0.5).astype(kind)

    state = rng.standard_normal((batch, kv_heads, size, width)).astype(kind) if rng.random() < 0.5 else None
    decay = -np.abs(rows(kv_heads)) if "gated" in rule else None
    beta = (np.abs(rows(kv_heads)) % 1).astype(kind) if "delta" in rule else None
    inputs = [rows(heads * size), rows(kv_heads * size), rows(kv_heads * width), state, decay, beta]
    attributes = {"q_num_heads": heads, "kv_num_heads": kv_heads, "update_rule": rule}
    return Case("LinearAttention", 27, inputs, attributes, outputs=2)


def _numbers(rng: Generator, count: int) -> list[float]:
    values: list[float] = rng.standard_normal(count).astype(np.float32).tolist()
    return values


def _svm_kernel(rng: Generator) -> dict[str, Any]:
    return {"kernel_type": _pick(rng, "LINEAR", "POLY", "RBF", "SIGMOID"), "kernel_params": [0.3, 0.2, 2.0]}


def svm_classifier(rng: Generator) -> Case:
    classes, features = int(rng.integers(2, 5)), int(rng.integers(1, 5))
    pairs = classes * (classes - 1) // 2
    # onnxruntime leaves the second of two scores undefined after PROBIT.
    attributes = _svm_kernel(rng) | {"post_transform": _pick(rng, "NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")}
    if rng.random() < 0.5:
        attributes["classlabels_ints"] = [10 * label for label in range(classes)]
    else:
        attributes["classlabels_strings"] = [f"class {label}" for label in range(classes)]
    if rng.random() < 0.75:
        counts = _extents(rng, classes, 1, 4)
        attributes |= {"vectors_per_class": counts, "support_vectors": _numbers(rng, sum(counts) * features)}
        attributes |= {"coefficients": _numbers(rng, sum(counts) * (classes - 1)), "rho": _numbers(rng, pairs)}
        if rng.random() < 0.5:
            attributes["prob_a"] = [-abs(number) for number in _numbers(rng, pairs)]
            attributes["prob_b"] = _numbers(rng, pairs)
    else:
        attributes |= {"coefficients": _numbers(rng, classes * features), "rho": _numbers(rng, 1)}
    kind = _pick(rng, np.float32, np.float64, np.int64, np.int32)
    return Case(
        "SVMClassifier", 1, [(2 * rng.standard_normal((6, features))).astype(kind)], attributes, 2, "ai.onnx.ml"
    )


def svm_regressor(rng: Generator) -> Case:
    count, features = int(rng.integers(0, 5)), int(rng.integers(1, 5))
    # onnxruntime ignores post_transform here, although ONNX's definition applies it.
    attributes = _svm_kernel(rng) | {"rho": _numbers(rng, 1), "one_class": int(rng.integers(2))}
    if count:
        attributes |= {"n_supports": count, "support_vectors": _numbers(rng, count * features)}
    attributes["coefficients"] = _numbers(rng, count or features)
    return Case("SVMRegressor", 1, [_floats(rng, 6, features, kinds="f")], attributes, 1, "ai.onnx.ml")


def label_encoder(rng: Generator) -> Case:
    words = [f"w{number}" for number in range(5)]
    attributes = {"classes_strings": words, "default_int64": 7, "default_string": "none"}
    if rng.random() < 0.5:
        x = np.array([_pick(rng, *words, "other") for _ in range(6)], object)
    else:
        x = rng.integers(0, 7, 6)
    return Case("LabelEncoder", 1, [x], attributes, 1, "ai.onnx.ml")


def tree_ensemble(rng: Generator) -> Case:
    """Test set membership; each test has several members and a terminating NaN."""
    kind = _pick(rng, np.float32, np.float64)
    sets = [sorted({float(number) for number in rng.integers(0, 6, 3)}) for _ in range(3)]
    members = [number for numbers in sets for number in (*numbers, np.nan)]
    attributes = {
        "n_targets": 2,
        "aggregate_function": int(rng.integers(1, 4)),
        "membership_values": numpy_helper.from_array(np.array(members, kind)),
        "nodes_modes": numpy_helper.from_array(np.array([6, 6, 6], np.uint8)),
        "nodes_splits": numpy_helper.from_array(np.zeros(3, kind)),
        "nodes_featureids": [int(number) for number in rng.integers(0, 2, 3)],
        "nodes_truenodeids": [1, 0, 2],
        "nodes_trueleafs": [0, 1, 1],
        "nodes_falsenodeids": [2, 1, 3],
        "nodes_falseleafs": [0, 1, 1],
        "leaf_targetids": [0, 1, 0, 1],
        "leaf_weights": numpy_helper.from_array(rng.standard_normal(4).astype(kind)),
        "tree_roots": [0],
    }
    return Case("TreeEnsemble", 5, [rng.integers(0, 6, (8, 2)).astype(kind)], attributes, 1, "ai.onnx.ml")


CASES: dict[str, Callable[[Generator], Case]] = {
    "AffineGrid": affine_grid,
    "BlackmanWindow": _window("BlackmanWindow"),
    "CausalConvWithState": causal_conv,
    "CenterCropPad": center_crop_pad,
    "Col2Im": col2im,
    "DFT": dft,
    "DeformConv": deform_conv,
    "Det": det,
    "GridSample": grid_sample,
    "HammingWindow": _window("HammingWindow"),
    "HannWindow": _window("HannWindow"),
    "LabelEncoder": label_encoder,
    "LinearAttention": linear_attention,
    "MaxUnpool": max_unpool,
    "MelWeightMatrix": mel_weight_matrix,
    "NegativeLogLikelihoodLoss": negative_log_likelihood,
    "NonMaxSuppression": non_max_suppression,
    "RoiAlign": roi_align,
    "STFT": stft,
    "SVMClassifier": svm_classifier,
    "SVMRegressor": svm_regressor,
    "SoftmaxCrossEntropyLoss": softmax_cross_entropy,
    "TreeEnsemble": tree_ensemble,
}


NOT_COMPARED = {
    "ImageDecoder": "onnxruntime has no kernel",
    "SwiGLU": "onnxruntime does not support it",
}
"""Borrowed operators that have no cases, with the reasons."""


def compare(case: Case) -> str:
    """Return "equal", "refused" if onnxruntime fails, or a description of the difference."""
    theirs = outcome("onnxruntime", case)
    if isinstance(theirs, str):
        return "refused"
    ours = outcome("genai", case)
    if isinstance(ours, str):
        return f"ours fails: {ours}"
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"output {number}: {a.dtype}{list(a.shape)} against {b.dtype}{list(b.shape)}"
        if a.dtype.kind == "f":
            scale = float(np.abs(b[np.isfinite(b)]).max(initial=1))
            if not np.allclose(a, b, rtol=1e-3, atol=1e-4 * scale, equal_nan=True):
                return f"output {number}: up to {np.abs(a - b).max():.3g} off"
        elif a.tolist() != b.tolist():
            return f"output {number}: {a.reshape(-1)[:8].tolist()} against {b.reshape(-1)[:8].tolist()}"
    return "equal"


def outcome(module: str, case: Case) -> list[Any] | str:
    """Return the outputs of a case, or its error."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    from importlib import import_module

    runtime = import_module(module)
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            session = runtime.InferenceSession(
                case.model().SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            found: list[Any] = session.run(None, case.feed())
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.200}"
    return found


def main() -> None:
    """Compare COUNT random nodes of each operator."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    for name in sys.argv[2:] or CASES:
        rng = np.random.default_rng(0)
        found: Counter[str] = Counter()
        example: dict[str, Case] = {}
        for _ in range(count):
            case = CASES[name](rng)
            answer = compare(case)
            found[answer if answer in ("equal", "refused") else "differs"] += 1
            example.setdefault(answer, case)
        print(f"{name:28s} {dict(found)}")
        for answer, case in example.items():
            if answer not in ("equal", "refused"):
                print(
                    "   ",
                    answer,
                    case.version,
                    case.attributes,
                    [v if v is None or v.size < 6 else v.shape for v in case.inputs],
                )


if __name__ == "__main__":
    main()
