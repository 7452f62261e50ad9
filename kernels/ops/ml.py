"""The other operators of ai.onnx.ml: linear models, scaling, encoders, and maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..registry import Kernel, KernelError, NodeSpec, register
from .activations import sigmoid
from .classes import labels_of, post_transform
from .support import checked_shape, from_function

ML = "ai.onnx.ml"


def _table(values: Any) -> Any:
    """A 2-D view: a vector is one row."""
    return values if values.ndim == 2 else values.reshape(1, -1)


def _as_float(x: Any) -> Any:
    return x if x.dtype == np.float64 else x.astype(np.float32, copy=False)


@register("LinearRegressor", domain=ML)
def linear_regressor(spec: NodeSpec) -> Kernel:
    """x @ coefficients + intercepts."""
    targets = int(spec.attributes.get("targets", 1))
    coefficients = np.asarray(spec.attributes.get("coefficients", ()), np.float32)
    intercepts = np.asarray(spec.attributes.get("intercepts") or [0.0] * targets, np.float32)
    if targets < 1 or coefficients.size % targets:
        raise KernelError(f"LinearRegressor: {coefficients.size} coefficients for {targets} targets")
    matrix, transform = coefficients.reshape(targets, -1).T, post_transform(spec)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = _table(inputs[0]).astype(np.float32, copy=False)
        return (transform(x @ matrix + intercepts).astype(np.float32, copy=False),)

    return kernel


@register("LinearClassifier", domain=ML)
def linear_classifier(spec: NodeSpec) -> Kernel:
    """The label with the highest score, and the scores; one row of coefficients makes a binary classifier."""
    labels = labels_of(spec, "classlabels_ints", "classlabels_strings")
    coefficients = np.asarray(spec.attributes.get("coefficients", ()), np.float32)
    intercepts = np.asarray(spec.attributes.get("intercepts") or [0.0], np.float32)
    rows = max(len(intercepts), 1)
    if coefficients.size % rows or not coefficients.size:
        raise KernelError(f"LinearClassifier: {coefficients.size} coefficients for {rows} intercepts")
    matrix, transform = coefficients.reshape(rows, -1).T, post_transform(spec)
    name = str(spec.attributes.get("post_transform", "NONE"))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        scores = _table(inputs[0]).astype(np.float32, copy=False) @ matrix + intercepts
        if rows == 1 and len(labels) == 2:
            chosen = labels[(scores[:, 0] > 0).astype(np.intp)]
            pair = (sigmoid(-scores), sigmoid(scores)) if name == "LOGISTIC" else (1 - scores, scores)
            return chosen, np.concatenate(pair, axis=1).astype(np.float32)
        return labels[scores.argmax(axis=1) % len(labels)], transform(scores).astype(np.float32, copy=False)

    return kernel


@register("Scaler", domain=ML)
def scaler(spec: NodeSpec) -> Kernel:
    """(x - offset) * scale."""
    offset, scale = (np.asarray(spec.attributes.get(name, d), np.float32) for name, d in (("offset", 0), ("scale", 1)))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (((inputs[0] - offset) * scale).astype(np.float32),)

    return kernel


@register("Normalizer", domain=ML)
def normalizer(spec: NodeSpec) -> Kernel:
    """Rows over their largest element, sum of sizes, or length; rows of zeros stay."""
    name = str(spec.attributes.get("norm", "MAX"))
    norms = {
        "MAX": lambda x: x.max(axis=-1, keepdims=True),
        "L1": lambda x: np.abs(x).sum(axis=-1, keepdims=True),
        "L2": lambda x: np.sqrt(np.square(x).sum(axis=-1, keepdims=True)),
    }
    if name not in norms:
        raise KernelError(f"Normalizer: norm {name!r} is unknown")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0].astype(np.float32, copy=False)
        norm = norms[name](x)
        return (x / np.where(norm == 0, 1, norm),)

    return kernel


@register("Binarizer", domain=ML)
def binarizer(spec: NodeSpec) -> Kernel:
    """1 above the threshold, else 0."""
    threshold = float(spec.attributes.get("threshold", 0.0))
    return from_function(lambda x: (x > x.dtype.type(threshold)).astype(x.dtype))(spec)


@register("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor(spec: NodeSpec) -> Kernel:
    """Columns of the last axis; of a vector, as one row."""

    def extract(x: Any, indices: Any) -> Any:
        found = np.take(x, indices.reshape(-1), axis=-1)
        return found.reshape(1, -1) if x.ndim == 1 else found

    return from_function(extract)(spec)


@register("Imputer", domain=ML)
def imputer(spec: NodeSpec) -> Kernel:
    """Replace NaN, or another given value, column by column."""
    floats, integers = spec.attributes.get("imputed_value_floats"), spec.attributes.get("imputed_value_int64s")
    if not floats and not integers:
        raise KernelError("Imputer: no values to impute")
    name = "replaced_value_float" if floats else "replaced_value_int64"
    replaced = spec.attributes.get(name, 0)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        values = np.asarray(floats or integers).astype(x.dtype)
        missing = np.isnan(x) if x.dtype.kind == "f" and np.isnan(replaced) else x == replaced
        return (np.where(missing, values, x),)

    return kernel


@register("LabelEncoder", domain=ML, since_version=2)
def label_encoder(spec: NodeSpec) -> Kernel:
    """Look each element up; what is not among the keys becomes the default."""
    attributes = spec.attributes
    keys = _first_given(attributes, ("keys_strings", "keys_int64s", "keys_floats", "keys_tensor"))
    values = _first_given(attributes, ("values_strings", "values_int64s", "values_floats", "values_tensor"))
    if keys is None or values is None or len(keys[1]) != len(values[1]):
        raise KernelError("LabelEncoder: keys and values differ in number, or are absent")
    dtypes = {"values_strings": object, "values_int64s": np.int64, "values_floats": np.float32}
    defaults = {
        "values_strings": attributes.get("default_string", "_Unused"),
        "values_int64s": attributes.get("default_int64", -1),
        "values_floats": attributes.get("default_float", -0.0),
    }
    given = attributes.get("default_tensor")
    default = np.asarray(given).reshape(-1)[0] if given is not None else defaults.get(values[0], 0)
    dtype = dtypes.get(values[0]) or values[1].dtype
    nan_keys = [i for i, key in enumerate(keys[1].tolist()) if key != key]
    table = dict(zip(keys[1].tolist(), values[1].tolist(), strict=True))
    for_nan = values[1].tolist()[nan_keys[0]] if nan_keys else default

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        found = [table.get(item, default) if item == item else for_nan for item in x.reshape(-1).tolist()]
        result = np.empty(len(found), dtype)
        result[:] = found
        return (result.reshape(x.shape),)

    return kernel


def _first_given(attributes: Any, names: Sequence[str]) -> tuple[str, Any] | None:
    for name in names:
        if attributes.get(name) is not None and len(attributes[name]):
            values = attributes[name]
            if isinstance(values, np.ndarray):
                return name, values.reshape(-1)
            # Floats are compared as float32, which they are in the model and in the data.
            return name, np.asarray(values, np.float32 if name.endswith("floats") else None)
    return None


@register("OneHotEncoder", domain=ML)
def one_hot_encoder(spec: NodeSpec) -> Kernel:
    """A new last axis with 1 at the category; unknown ones are all zeros, or an error where `zeros` is 0."""
    categories = spec.attributes.get("cats_strings") or spec.attributes.get("cats_int64s") or ()
    zeros = bool(spec.attributes.get("zeros", 1))
    places = {category: index for index, category in enumerate(categories)}

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        found = [places.get(item if isinstance(item, str) else int(item), -1) for item in x.reshape(-1).tolist()]
        if not zeros and -1 in found:
            raise KernelError("OneHotEncoder: unknown category")
        hot = np.asarray(found, np.int64)[:, None] == np.arange(len(places))
        return (hot.astype(np.float32).reshape(*x.shape, len(places)),)

    return kernel


@register("FeatureVectorizer", domain=ML)
def feature_vectorizer(spec: NodeSpec) -> Kernel:
    """Inputs side by side as float32, each of its given width: longer ones are cut, shorter ones filled with 0."""
    widths = [int(width) for width in spec.attributes.get("inputdimensions") or ()]

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        tables = [_table(x).astype(np.float32) for x in inputs]
        fitted = [
            np.pad(table[:, :width], [(0, 0), (0, max(width - table.shape[1], 0))])
            for table, width in zip(tables, widths or [table.shape[1] for table in tables], strict=True)
        ]
        return (np.concatenate(fitted, axis=1),)

    return kernel


@register("ZipMap", domain=ML)
def zip_map(spec: NodeSpec) -> Kernel:
    """Per row a dictionary from label to score."""
    labels = labels_of(spec, "classlabels_int64s", "classlabels_strings").tolist()

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        rows = _table(inputs[0]).tolist()
        if rows and len(rows[0]) != len(labels):
            raise KernelError(f"ZipMap: {len(rows[0])} scores for {len(labels)} labels")
        return ([dict(zip(labels, row, strict=True)) for row in rows],)

    return kernel


@register("DictVectorizer", domain=ML)
def dict_vectorizer(spec: NodeSpec) -> Kernel:
    """A dictionary as one row, in the order of the vocabulary; absent keys give 0."""
    vocabulary = spec.attributes.get("string_vocabulary") or spec.attributes.get("int64_vocabulary")
    if not vocabulary:
        raise KernelError("DictVectorizer: no vocabulary")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        given = inputs[0] if isinstance(inputs[0], list) else [inputs[0]]
        kind = type(next((value for item in given for value in item.values()), 0.0))
        dtype = {str: object, int: np.int64}.get(kind, np.float32)
        empty = "" if dtype is object else 0
        return (np.array([[item.get(key, empty) for key in vocabulary] for item in given], dtype),)

    return kernel


@register("CategoryMapper", domain=ML)
def category_mapper(spec: NodeSpec) -> Kernel:
    """Strings to integers, or back."""
    strings, integers = spec.attributes.get("cats_strings") or (), spec.attributes.get("cats_int64s") or ()
    to_integer, to_string = dict(zip(strings, integers, strict=True)), dict(zip(integers, strings, strict=True))
    no_integer, no_string = spec.attributes.get("default_int64", -1), spec.attributes.get("default_string", "_Unused")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        items = x.reshape(-1).tolist()
        if x.dtype.kind == "O":
            return (np.array([to_integer.get(item, no_integer) for item in items], np.int64).reshape(x.shape),)
        result = np.empty(len(items), object)
        result[:] = [to_string.get(item, no_string) for item in items]
        return (result.reshape(x.shape),)

    return kernel


@register("CastMap", domain=ML)
def cast_map(spec: NodeSpec) -> Kernel:
    """The values of a map in the order of its keys, as one row; sparse ones at the places that the keys say."""
    dtypes = {"TO_FLOAT": np.float32, "TO_STRING": object, "TO_INT64": np.int64}
    to, form = str(spec.attributes.get("cast_to", "TO_FLOAT")), str(spec.attributes.get("map_form", "DENSE"))
    if to not in dtypes or form not in ("DENSE", "SPARSE"):
        raise KernelError(f"CastMap: cast_to {to!r} or map_form {form!r} is unknown")
    converters: dict[str, Callable[[Any], Any]] = {
        "TO_FLOAT": float,
        "TO_STRING": str,
        "TO_INT64": lambda value: int(float(value)),
    }
    convert = converters[to]
    width = int(spec.attributes.get("max_map", 1))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        items = sorted(inputs[0].items())
        if form == "DENSE":
            places = list(range(len(items)))
            row = np.empty((1, len(items)), dtypes[to])
        else:
            places = [int(key) for key, _ in items]
            if places and not 0 <= min(places) <= max(places) < width:
                raise KernelError(f"CastMap: keys {places[0]} to {places[-1]} outside 0 to {width - 1}")
            row = np.full(checked_shape(spec, (1, width), 8), "" if to == "TO_STRING" else 0, dtypes[to])
        for place, (_, value) in zip(places, items, strict=True):
            row[0, place] = convert(value)
        return (row,)

    return kernel
