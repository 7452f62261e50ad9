"""Operators of ai.onnx.ml: linear models, scaling, encoders and maps, and functions that classifiers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from genai.kernels.cpu.arrays import linear_models
from genai.kernels.cpu.program.thread_pool import Threads, fixed_address

from ..onnx.node import ML
from ..onnx.tensor import OnnxTensor
from ..onnx.types import DataType, TensorType, Type
from .activations import sigmoid
from .reduction import softmax
from .registry import Float32s, Kernel, KernelError, NodeSpec, Positive, from_function, operator, register
from .shape_rules import NodeTypes, shape_rule
from .support import checked_indices, checked_shape, objects

_SMALL = 1e-7
Transform: TypeAlias = Callable[[Any], Any]


def labels_of(spec: NodeSpec) -> Any:
    """Return the class labels: int64, or objects for strings."""
    kinds = ("classlabels_strings", "classlabels_int64s", "classlabels_ints")
    texts, *numbers = (spec.attributes.get(name) for name in kinds)
    if texts:
        return objects(texts, (len(texts),))
    if not any(numbers):
        raise KernelError(f"{spec.op_type}: the node has no class labels")
    return np.asarray(numbers[0] or numbers[1], np.int64)


def post_transform(spec: NodeSpec) -> Transform:
    """Return the function that the attribute `post_transform` applies to scores [rows, classes]."""
    name = str(spec.attributes.get("post_transform", "NONE"))
    if name not in TRANSFORMS:
        raise KernelError(f"{spec.op_type}: post_transform {name!r} is unknown")
    return TRANSFORMS[name]


def _softmax_zero(scores: Any) -> Any:
    """Softmax that keeps scores of zero at (nearly) zero."""
    largest = scores.max(axis=1, keepdims=True)
    weights = np.where(np.abs(scores) > _SMALL, np.exp(scores - largest), scores * np.exp(-largest))
    total = weights.sum(axis=1, keepdims=True)
    return np.where(total == 0, 0.5, weights / np.where(total == 0, 1, total))


def probit(values: Any) -> Any:
    """sqrt(2) * erfinv(2 p - 1) by Winitzki's approximation, as in onnxruntime."""
    x = 2 * values - 1
    log = np.log((1 - x) * (1 + x))
    first = 2 / (math.pi * 0.147) + 0.5 * log
    return math.sqrt(2) * np.sign(x) * np.sqrt(-first + np.sqrt(first * first - log / 0.147))


TRANSFORMS: dict[str, Transform] = {
    "NONE": lambda scores: scores,
    "LOGISTIC": sigmoid,
    "SOFTMAX": lambda scores: softmax(scores, 1),
    "SOFTMAX_ZERO": _softmax_zero,
    "PROBIT": probit,
}


# The maker of the parameter `transform`, for functions with a parameter named `post_transform`.
transform_of = post_transform


def numbered(spec: NodeSpec) -> Any:
    """Return the labels of a node as int64, or the indices of labels that are strings."""
    labels = labels_of(spec)
    return labels if labels.dtype != object else np.arange(len(labels))


def table_of(values: Any) -> Any:
    """Return a 2-D view; a vector becomes one row."""
    return values if values.ndim == 2 else values.reshape(1, -1)


def _small_weight(spec: NodeSpec) -> Any:
    """Return the coefficients as a matrix [features, scores] for compiled programs, None if it is too large."""
    values = np.asarray(spec.attributes.get("coefficients") or (), np.float32)
    count = spec.attributes.get("targets", 1)
    if spec.op_type == "LinearClassifier":
        count = len(spec.attributes.get("intercepts") or (0,))
    if not 0 < values.size <= linear_models.MOST_WEIGHTS or count < 1 or values.size % count:
        return None
    return np.ascontiguousarray(values.reshape(count, -1).T)


def _fits(rows: Any, weight: Any) -> bool:
    return bool(rows.shape[1] == len(weight) and rows.flags.c_contiguous)


def _scores(rows: Any, coefficients: Any, weight: Any, addend: Any, threads: Threads | None) -> Any:
    """Return rows @ coefficients + addend; BLAS multiplies large matrices. `weight`: see `_small_weight`."""
    if weight is not None and _fits(rows, weight):
        return linear_models.product(rows, weight, addend, threads=threads)
    return rows @ coefficients.reshape(len(addend), -1).T + addend


# The functions of `linear_models.classified` for the attribute `post_transform`.
_KINDS = {"NONE": linear_models.NONE, "SOFTMAX": linear_models.SOFTMAX, "LOGISTIC": linear_models.LOGISTIC}


@operator("LinearRegressor", domain=ML, transform=transform_of, weight=_small_weight)
def linear_regressor(
    x: Any, *, coefficients: Float32s = (), intercepts: Float32s = (), targets: Positive = 1,
    post_transform: str = "NONE", transform: Transform, weight: Any, threads: Threads | None,
) -> Any:  # fmt: skip
    """x @ coefficients + intercepts."""
    if coefficients.size % targets:
        raise KernelError(
            f"LinearRegressor: {coefficients.size} coefficients cannot be divided equally among {targets} targets"
        )
    addend = intercepts if len(intercepts) else np.zeros(targets, np.float32)
    rows = table_of(x).astype(np.float32, copy=False)
    kind = _KINDS.get(post_transform)
    if kind is not None and weight is not None and _fits(rows, weight) and addend.shape == weight.shape[1:]:
        return linear_models.classified(rows, fixed_address(weight), fixed_address(addend), kind, threads=threads)[0]
    scores = _scores(rows, coefficients, weight, addend, threads)
    return transform(scores).astype(np.float32, copy=False)


@operator(
    "LinearClassifier", domain=ML, labels=labels_of, transform=transform_of, weight=_small_weight, numbers=numbered
)
def linear_classifier(
    x: Any, *, coefficients: Float32s = (), intercepts: Float32s = (), post_transform: str = "NONE", labels: Any,
    transform: Transform, weight: Any, numbers: Any, threads: Threads | None,
) -> Any:  # fmt: skip
    """The label with the highest score, and the scores. A single row of coefficients is a binary classifier."""
    addend = intercepts if len(intercepts) else np.zeros(1, np.float32)
    if coefficients.size % len(addend) or not coefficients.size:
        raise KernelError(
            f"LinearClassifier: the number of coefficients, {coefficients.size}, must be a positive multiple of "
            f"the number of intercepts, {len(addend)}"
        )
    rows, is_pair = table_of(x).astype(np.float32, copy=False), len(addend) == 1 and len(labels) == 2
    kind = _KINDS.get(post_transform)
    if is_pair:
        kind = linear_models.SIGMOIDS if post_transform == "LOGISTIC" else linear_models.PAIR
    if kind is not None and weight is not None and _fits(rows, weight):
        constants = (fixed_address(weight), fixed_address(addend), kind, fixed_address(numbers))
        found, indices = linear_models.classified(rows, *constants, threads=threads)
        return indices if labels.dtype != object else labels[indices], found
    scores = _scores(rows, coefficients, weight, addend, threads)
    if is_pair:
        chosen = labels[(scores[:, 0] > 0).astype(np.intp)]
        pair = (sigmoid(-scores), sigmoid(scores)) if post_transform == "LOGISTIC" else (1 - scores, scores)
        return chosen, np.concatenate(pair, axis=1).astype(np.float32)
    return labels[scores.argmax(axis=1) % len(labels)], transform(scores).astype(np.float32, copy=False)


@operator("Scaler", domain=ML)
def scaler(x: Any, *, offset: Float32s = 0, scale: Float32s = 1, threads: Threads | None) -> Any:
    """(x - offset) * scale."""
    if x.dtype == np.float32 and x.ndim == 2 and x.flags.c_contiguous and offset.shape == scale.shape == x.shape[1:]:
        return linear_models.scaled(x, fixed_address(offset), fixed_address(scale), threads=threads)
    return ((x - offset) * scale).astype(np.float32)


_NORMS = {"MAX": linear_models.MAX, "L1": linear_models.L1, "L2": linear_models.L2}


@operator("Normalizer", domain=ML)
def normalizer(x: Any, *, norm: Literal["MAX", "L1", "L2"] = "MAX", threads: Threads | None) -> Any:
    """Divide rows by their max, L1 norm or L2 norm; rows of zeros are unchanged."""
    x = x.astype(np.float32, copy=False)
    if x.ndim == 2 and x.flags.c_contiguous:
        return linear_models.normalized(x, _NORMS[norm], threads=threads)
    if norm == "MAX":
        size = x.max(axis=-1, keepdims=True)
    else:
        size = (np.abs(x) if norm == "L1" else np.square(x)).sum(axis=-1, keepdims=True)
    size = np.sqrt(size) if norm == "L2" else size
    return x / np.where(size == 0, 1, size)


operator("Binarizer", domain=ML)(lambda x, *, threshold=0.0: (x > x.dtype.type(threshold)).astype(x.dtype))


@operator("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor(x: Any, indices: Any) -> Any:
    """Select columns of the last axis; for a vector, the result is one row."""
    found = linear_models.columns_of(table_of(x), indices.reshape(-1)) if x.ndim in (1, 2) else None
    if found is not None:
        return found
    columns = checked_indices("ArrayFeatureExtractor: indices", indices, x.shape[-1]).reshape(-1)
    features = np.take(x, columns, axis=-1)
    return features.reshape(1, -1) if x.ndim == 1 else features


@operator("Imputer", domain=ML)
def imputer(
    x: Any, *, imputed_value_floats: Any = None, imputed_value_int64s: Any = None, replaced_value_float: float = 0,
    replaced_value_int64: int = 0,
) -> Any:  # fmt: skip
    """Replace NaN, or another given value, column by column."""
    if not imputed_value_floats and not imputed_value_int64s:
        raise KernelError("Imputer: the node has neither imputed_value_floats nor imputed_value_int64s")
    replaced = replaced_value_float if imputed_value_floats else replaced_value_int64
    values = np.asarray(imputed_value_floats or imputed_value_int64s).astype(x.dtype)
    missing = np.isnan(x) if x.dtype.kind == "f" and np.isnan(replaced) else x == replaced
    return np.where(missing, values, x)


def _both_ways(spec: NodeSpec) -> Any:
    """Return the table, its default and its type for each direction (True = from strings)."""
    a = spec.attributes
    strings = a.get("classes_strings") or a.get("cats_strings") or ()
    integers = range(len(strings)) if spec.op_type == "LabelEncoder" else a.get("cats_int64s") or ()
    return {
        True: (dict(zip(strings, integers, strict=True)), a.get("default_int64", -1), np.int64),
        False: (dict(zip(integers, strings, strict=True)), a.get("default_string", "_Unused"), object),
    }


@operator("CategoryMapper", "LabelEncoder", domain=ML, tables=_both_ways)
def category_mapper(x: Any, *, tables: Any) -> Any:
    """Map strings to integers or integers to strings; LabelEncoder version 1 maps strings to indices of its classes."""
    table, default, dtype = tables[x.dtype.kind == "O"]
    return objects([table.get(item, default) for item in x.reshape(-1).tolist()], x.shape, dtype)


@register("LabelEncoder", domain=ML, since_version=2)
def label_encoder(spec: NodeSpec) -> Kernel:
    """Look up each element; elements that are not keys become the default."""
    attributes = spec.attributes
    keys, values = _attribute_of_any_type(attributes, "keys"), _attribute_of_any_type(attributes, "values")
    if keys is None or values is None or len(keys[1]) != len(values[1]):
        raise KernelError("LabelEncoder: the keys or the values are missing, or their numbers differ")
    defaults = {
        "strings": (object, attributes.get("default_string", "_Unused")),
        "int64s": (np.int64, attributes.get("default_int64", -1)),
        "floats": (np.float32, attributes.get("default_float", -0.0)),
    }
    dtype, default = defaults.get(values[0], (values[1].dtype, 0))
    if (default_tensor := attributes.get("default_tensor")) is not None:
        default = np.asarray(default_tensor).reshape(-1)[0]
    nan_keys = [i for i, key in enumerate(keys[1].tolist()) if key != key]
    table = dict(zip(keys[1].tolist(), values[1].tolist(), strict=True))
    for_nan = values[1].tolist()[nan_keys[0]] if nan_keys else default

    def encoded(x: Any) -> Any:
        values_of_items = [table.get(item, default) if item == item else for_nan for item in x.reshape(-1).tolist()]
        return objects(values_of_items, x.shape, dtype)

    return from_function(encoded)(spec)


def _attribute_of_any_type(attributes: Mapping[str, Any], name: str) -> tuple[str, Any] | None:
    """Return the name's suffix and the values of the attribute that lists keys or values."""
    for suffix in ("strings", "int64s", "floats", "tensor"):
        values = attributes.get(f"{name}_{suffix}")
        if values is not None and len(values):
            # Floats are compared as float32, their type in the model and in the data.
            return suffix, np.asarray(values, np.float32 if suffix == "floats" else None).reshape(-1)
    return None


def _categories(spec: NodeSpec) -> dict[Any, int]:
    names = spec.attributes.get("cats_strings") or spec.attributes.get("cats_int64s") or ()
    return {name: index for index, name in enumerate(names)}


@operator("OneHotEncoder", domain=ML, category_index=_categories)
def one_hot_encoder(x: Any, *, zeros: bool = True, category_index: Mapping[Any, int]) -> Any:
    """Add a last axis with 1 at the category; an unknown category results in zeros, or in an error if `zeros` is 0."""
    indices = [category_index.get(item if isinstance(item, str) else int(item), -1) for item in x.reshape(-1).tolist()]
    if not zeros and -1 in indices:
        raise KernelError("OneHotEncoder: the input contains an unknown category, and the attribute zeros is 0")
    hot = np.asarray(indices, np.int64)[:, None] == np.arange(len(category_index))
    return hot.astype(np.float32).reshape(*x.shape, len(category_index))


@operator("FeatureVectorizer", domain=ML)
def feature_vectorizer(*values: Any, inputdimensions: tuple[int, ...] = ()) -> Any:
    """Concatenate inputs as float32 columns, each cropped or zero-padded to its given width."""
    tables = [table_of(x).astype(np.float32) for x in values]
    fitted = [
        np.pad(table[:, :width], [(0, 0), (0, max(width - table.shape[1], 0))])
        for table, width in zip(tables, inputdimensions or [table.shape[1] for table in tables], strict=True)
    ]
    return np.concatenate(fitted, axis=1)


@operator("ZipMap", domain=ML, names=lambda spec: labels_of(spec).tolist())
def zip_map(x: Any, *, names: list[Any]) -> Any:
    """Return one dictionary per row, from label to score."""
    rows = table_of(x).tolist()
    if rows and len(rows[0]) != len(names):
        raise KernelError(f"ZipMap: each row has {len(rows[0])} scores, but the node has {len(names)} labels")
    return [dict(zip(names, row, strict=True)) for row in rows]


@operator("DictVectorizer", domain=ML)
def dict_vectorizer(x: Any, *, string_vocabulary: Any = None, int64_vocabulary: Any = None) -> Any:
    """Convert a dictionary to one row, in the vocabulary's order; the value of an absent key is 0."""
    vocabulary = string_vocabulary or int64_vocabulary
    if not vocabulary:
        raise KernelError("DictVectorizer: the node has no vocabulary")
    items = x if isinstance(x, list) else [x]
    kind = type(next((value for item in items for value in item.values()), 0.0))
    dtype = {str: object, int: np.int64}.get(kind, np.float32)
    empty = "" if dtype is object else 0
    return np.array([[item.get(key, empty) for key in vocabulary] for item in items], dtype)


_CASTS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "TO_FLOAT": (np.float32, float),
    "TO_STRING": (object, str),
    "TO_INT64": (np.int64, lambda value: int(float(value))),
}


@operator("CastMap", domain=ML)
def cast_map(
    x: Any, *, cast_to: Literal["TO_FLOAT", "TO_STRING", "TO_INT64"] = "TO_FLOAT",
    map_form: Literal["DENSE", "SPARSE"] = "DENSE", max_map: int = 1, spec: NodeSpec,
) -> Any:  # fmt: skip
    """Convert a map's values to one row, in the order of the keys; sparse maps use the keys as columns."""
    items, (dtype, convert) = sorted(x.items()), _CASTS[cast_to]
    if map_form == "DENSE":
        columns, row = list(range(len(items))), np.empty((1, len(items)), dtype)
    else:
        columns = [int(key) for key, _ in items]
        if columns and not 0 <= min(columns) <= max(columns) < max_map:
            raise KernelError(
                f"CastMap: the keys range from {columns[0]} to {columns[-1]}, but they must be from 0 to {max_map - 1}"
            )
        row = np.full(checked_shape(spec, (1, max_map), 8), "" if cast_to == "TO_STRING" else 0, dtype)
    for column, (_, value) in zip(columns, items, strict=True):
        row[0, column] = convert(value)
    return row


@shape_rule("LabelEncoder", domain=ML)
def label_encoder_types(types: NodeTypes) -> list[Type | None]:
    """One label per element, in the type of the attribute that lists the labels."""
    for name, dtype in (
        ("values_strings", DataType.STRING),
        ("values_int64s", DataType.INT64),
        ("values_floats", DataType.FLOAT),
    ):
        if name in types.node.attributes:
            return [TensorType(dtype, types.shape(0))]
    labels = types.node.attribute("values_tensor")
    return [TensorType(labels.dtype, types.shape(0))] if isinstance(labels, OnnxTensor) else []
