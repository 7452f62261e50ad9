"""Helpers shared by operators: optional inputs, axes, arrays of objects, and allocation limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from genai.kernels.cpu.arrays.halves import from_halves, to_halves

from ..onnx.node import ML, MS
from ..onnx.types import DataType
from .registry import Kernel, KernelError, NodeSpec

# The maximum size of a single value, unless the caller sets NodeSpec.options["max_value_bytes"].
MAX_VALUE_BYTES = 1 << 34


def optional(inputs: Sequence[Any], index: int) -> Any:
    """Return input `index`, or None if it is absent."""
    return inputs[index] if len(inputs) > index else None


def session_threads(spec: NodeSpec) -> Any:
    """Return a session's threads; None in decoders, which use NumPy and BLAS for their few array operations."""
    return spec.options.get("threads") if "arena" in spec.options else None


def axes_of(axes_input: Any, attribute: Any) -> tuple[int, ...] | None:
    """Return axes from an input (newer versions) or the attribute (older versions); None if both are absent."""
    return attribute if axes_input is None else tuple(int(axis) for axis in np.asarray(axes_input).reshape(-1))


def checked_axis(axis: int, rank: int) -> int:
    """Return an axis counted from the front. Raises KernelError if it is out of range."""
    if not -rank <= axis < max(rank, 1):
        raise KernelError(f"axis {axis} is out of range for a value of rank {rank}")
    return axis % rank if rank else 0


def checked_shape(spec: NodeSpec, sizes: Sequence[Any], itemsize: int) -> tuple[int, ...]:
    """Return sizes as a shape. Raises KernelError if a size is negative or the value exceeds the allocation limit."""
    shape = tuple(int(size) for size in sizes)
    if any(size < 0 for size in shape):
        raise KernelError(f"{spec.op_type}: the shape {list(shape)} contains a negative size")
    allowed = int(spec.options.get("max_value_bytes", MAX_VALUE_BYTES))
    if math.prod(shape) * itemsize > allowed:
        raise KernelError(
            f"{spec.op_type}: a value of shape {list(shape)} takes {math.prod(shape) * itemsize} bytes, but the "
            f"limit is {allowed} bytes"
        )
    return shape


def checked_indices(subject: str, indices: Any, extent: int) -> Any:
    """Return indices, which must not be negative. Raises IndexError if an index is out of range."""
    array = np.asarray(indices)
    if array.size and (array.min() < 0 or array.max() >= extent):
        raise IndexError(
            f"{subject} range from {array.min()} to {array.max()}, but they must be from 0 to {extent - 1}"
        )
    return array


def as_array(value: Any) -> Any:
    """Convert an indexing result to an array; indexing a string array yields a single str, not an array."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, np.generic):
        return np.asarray(value)
    single = np.empty((), object)
    single[()] = value
    return single


def objects(values: Sequence[Any], shape: tuple[int, ...], dtype: Any = object) -> Any:
    """Return values as an array; the values may be strings or other objects."""
    result = np.empty(len(values), dtype)
    result[:] = values
    return result.reshape(shape)


def widened(x: Any) -> Any:
    """Return floats narrower than 32 bits as float32, and other values unchanged."""
    if x.dtype == np.float16:
        return from_halves(x)
    return x.astype(np.float32) if x.dtype.itemsize < 4 and x.dtype.kind not in "biu" else x


def narrowed(x: Any, dtype: Any) -> Any:
    """Return float32 x as another float type, rounded to nearest even."""
    return to_halves(x) if dtype == np.float16 else x.astype(dtype, copy=False)


# Estimates from the inputs how many bytes the result needs; the estimate is an upper bound.
Measure = Callable[[NodeSpec, Sequence[Any]], int]
_POINTER_BYTES = 8
# The memory of an array object without its elements; views need this memory too.
ARRAY_BYTES = 128

_BROADCASTING = """
    Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod
    Mul Or PRelu Pow Sub Sum Where Xor
""".split()


def mean(x: Any, axis: tuple[int, ...], *, keepdims: bool = True) -> Any:
    """Return the mean along axes. The mean of no elements is NaN, as in NumPy, but NumPy also issues a warning."""
    if all(x.shape[index] for index in axis):
        return np.mean(x, axis=axis, keepdims=keepdims)
    return np.sum(x, axis=axis, keepdims=keepdims) / x.dtype.type(0)


def broadcast(x: Any, shape: tuple[int, ...]) -> Any:
    """Return np.broadcast_to(x, shape), which is slow even if x already has the shape."""
    return x if x.shape == shape else np.broadcast_to(x, shape)


def _arrays(inputs: Sequence[Any]) -> list[Any]:
    return [value for value in inputs if isinstance(value, np.ndarray)]


def _broadcast(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    arrays = _arrays(inputs)
    shapes = {array.shape for array in arrays}
    if len(shapes) < 2:
        return 0
    return _broadcast_size(*shapes) * int(max([array.dtype.itemsize for array in arrays]))


@lru_cache(maxsize=512)
def _broadcast_size(*shapes: tuple[int, ...]) -> int:
    try:
        return math.prod(np.broadcast_shapes(*shapes))
    except ValueError:
        return 0  # the kernel raises a clearer error, or aligns axes by an older rule


def _product(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    a, b = inputs[0], inputs[1]
    if a is None or b is None or a.ndim < 1 or b.ndim < 1:
        return 0
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        return 0
    rows = a.shape[-2] if a.ndim > 1 else 1
    return int(math.prod(batch) * rows * (b.shape[-1] if b.ndim > 1 else 1) * max(a.dtype.itemsize, 4))


def _broadcast_wider(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    """Measure operators that process bytes and compute in float32."""
    return 2 * 4 * _broadcast(spec, inputs)


def _product_as_given(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    """Measure matmuls with transposed operands."""
    a, b = inputs[0], inputs[1]
    sides = (a.swapaxes(-1, -2) if spec.attributes.get("transA") and a.ndim > 1 else a,
             b.swapaxes(-1, -2) if spec.attributes.get("transB") and b.ndim > 1 else b)  # fmt: skip
    return _product(spec, sides)


def _gemm(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    a, b = inputs[0], inputs[1]
    if a is None or b is None or a.ndim != 2 or b.ndim != 2:
        return 0
    rows = a.shape[1 if spec.attributes.get("transA", 0) else 0]
    return int(rows * b.shape[0 if spec.attributes.get("transB", 0) else 1] * max(a.dtype.itemsize, 4))


def _gather(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    x, indices = inputs[:2]
    axis = int(spec.attributes.get("axis", 0))
    if not -x.ndim <= axis < x.ndim:
        return 0
    return int(indices.size * (x.size // max(x.shape[axis], 1)) * x.dtype.itemsize)


def _gather_nd(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    x, indices = inputs[:2]
    batch, depth = int(spec.attributes.get("batch_dims", 0)), indices.shape[-1] if indices.ndim else 0
    return int(math.prod(indices.shape[:-1]) * math.prod(x.shape[batch + depth :]) * x.dtype.itemsize)


def _joined(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    values = inputs[0] if inputs and isinstance(inputs[0], list) else inputs
    return int(sum(value.nbytes for value in _arrays(values)))


def _joined_text(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    """Measure StringConcat: each result is at most as long as the longest strings of both sides together."""
    longest = sum(max((len(text) for text in array.reshape(-1).tolist()), default=0) for array in _arrays(inputs))
    shape = np.broadcast_shapes(*(array.shape for array in _arrays(inputs)))
    return math.prod(shape) * (longest + _POINTER_BYTES)


def _by_numbers(itemsize: int) -> Measure:
    """Measure results, including temporaries, whose shape is given by the last integer input."""

    def measure(spec: NodeSpec, inputs: Sequence[Any]) -> int:
        sizes = [value for value in inputs if value is not None and value.dtype.kind in "iu"][-1]
        return math.prod(max(int(size), 1) for size in sizes.reshape(-1).tolist()) * itemsize

    return measure


def _transformed(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    """Measure DFT, whose temporaries include complex numbers and their real and imaginary parts."""
    x, length, axis = inputs[0], optional(inputs, 1), optional(inputs, 2)
    default = 1 if spec.version < 20 else -2
    along = int(spec.attributes.get("axis", default)) if axis is None else int(np.asarray(axis).reshape(-1)[0])
    if length is None or not -x.ndim <= along < x.ndim:
        return 0
    length_wanted = max(int(np.asarray(length).reshape(-1)[0]), 1)
    return int(x.size // max(x.shape[along], 1)) * length_wanted * 4 * 16


def _selected(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    """Measure NonZero: one 64-bit index per axis and non-zero element, counted twice because of a temporary."""
    return int(np.count_nonzero(inputs[0]) * max(inputs[0].ndim, 1) * 2 * 8)


def _converted(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    """Measure casts, whose results may be wider than the inputs; strings are objects."""
    x = inputs[0]
    if spec.op_type == "CastLike":
        return int(x.size * (_TEXT_BYTES if inputs[1].dtype.kind == "O" else inputs[1].dtype.itemsize))
    to = spec.attributes.get("to", 1)
    return int(x.size * (_TEXT_BYTES if to == DataType.STRING else 4 if x.dtype.itemsize < 4 else 8))


def _embedded(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    """Measure EmbedLayerNormalization and GatherBlockQuantized: one table row per id."""
    ids, table = inputs[0], inputs[2]
    if spec.op_type == "GatherBlockQuantized":
        table, ids = inputs[:2]
        return int(ids.size * (table.size // max(len(table), 1)) * (8 // int(spec.attributes.get("bits", 4))) * 4)
    return int(ids.size * table.shape[-1] * 4 * 2)


def _columns(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    """Measure ArrayFeatureExtractor: one column of the last axis per index."""
    x, indices = inputs[:2]
    return int(x.size // max(x.shape[-1] if x.ndim else 1, 1) * indices.size * x.dtype.itemsize)


def _one_hot(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    categories = spec.attributes.get("cats_strings") or spec.attributes.get("cats_int64s") or ()
    return int(inputs[0].size) * len(categories) * (4 + 1)


def _side_by_side(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    """Measure FeatureVectorizer: each input at its given width."""
    widths = spec.attributes.get("inputdimensions") or ()
    rows = max((len(x) if x.ndim > 1 else 1 for x in _arrays(inputs)), default=1)
    return rows * sum(max(int(width), 0) for width in widths) * 4 * 2


def _targets(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    """Measure scores: the attribute specifies the number per row."""
    x = inputs[0]
    return (
        (len(x) if x.ndim > 1 else 1)
        * max(int(spec.attributes.get("n_targets", spec.attributes.get("targets", 1))), 1)
        * 8
    )


def _sequence(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    """Measure a sequence and an additional value."""
    held = [*inputs[0], inputs[1]] if isinstance(inputs[0], list) else inputs
    return sum(value.nbytes + ARRAY_BYTES for value in _arrays(held))


def _scores(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    """Measure attention: one score per head, query and key."""
    q, k = inputs[0], inputs[1] if len(inputs) > 1 else None
    if k is None or q.ndim not in (3, 4) or k.ndim not in (3, 4):
        return 0
    heads = q.shape[1] if q.ndim == 4 else int(spec.attributes.get("num_heads", spec.attributes.get("q_num_heads", 1)))
    return int(q.shape[0] * heads * q.shape[-2] * k.shape[-2] * 4)


def _caches(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    """Measure GroupQueryAttention: keys and values of all positions, whose number is derived from two inputs."""
    q, k, lengths, total = inputs[0], inputs[1], inputs[5], inputs[6]
    groups, heads = int(spec.attributes["kv_num_heads"]), int(spec.attributes["num_heads"])
    if groups < 1 or heads < 1:
        return 0
    size: int = q.shape[-1] // (heads + 2 * groups) if k is None else k.shape[-1] // groups
    longest = max(int(np.max(total, initial=0)), int(np.max(lengths, initial=0)) + 1)
    return len(q) * groups * longest * size * 4


def _of_shape(itemsize: int) -> Measure:
    """Measure a value of the first input's shape, including its wider temporaries."""
    return lambda spec, inputs: 0 if not _arrays(inputs) else int(_arrays(inputs)[0].size) * itemsize


_WIDER = 4 * 8  # bytes per element of several float64 temporaries
_TEXT_BYTES = 64

_MEASURES: dict[tuple[str, str], Measure] = {
    **{("", name): _broadcast for name in _BROADCASTING},
    ("", "Concat"): _joined,
    ("", "ConcatFromSequence"): _joined,
    ("", "Gather"): _gather,
    ("", "GatherND"): _gather_nd,
    ("", "Gemm"): _gemm,
    ("", "MatMul"): _product,
    ("", "MatMulInteger"): _product,
    ("", "QLinearMatMul"): lambda spec, inputs: _product(spec, inputs[::3]),
    ("", "StringConcat"): _joined_text,
    ("", "AffineGrid"): _by_numbers(4 * _WIDER),
    **{("", f"{name}Window"): _by_numbers(_WIDER) for name in ("Blackman", "Hamming", "Hann")},
    **{("", name): _of_shape(16) for name in ("Bernoulli", "EyeLike", "RandomNormalLike", "RandomUniformLike")},
    **{("", name): _converted for name in ("Cast", "CastLike", "DequantizeLinear")},
    ("", "Attention"): _scores,
    ("", "DFT"): _transformed,
    ("", "NonZero"): _selected,
    ("", "SequenceInsert"): _sequence,
    **{(MS, name): _broadcast for name in ("BiasAdd", "BiasGelu", "GatedAdd")},
    **{(MS, name): _broadcast_wider for name in ("QLinearAdd", "QLinearMul", "QLinearWhere")},
    **{(MS, name): _gemm for name in ("FusedGemm",)},
    (MS, "GatherND"): _gather_nd,
    (MS, "GroupQueryAttention"): _caches,
    (MS, "MultiHeadAttention"): _scores,
    (MS, "QGemm"): lambda spec, inputs: _gemm(spec, inputs[::3]),
    **{(MS, name): _product for name in ("DynamicQuantizeMatMul", "MatMulIntegerToFloat")},
    **{(MS, name): _product_as_given for name in ("FusedMatMul", "TransposeMatMul")},
    **{(MS, name): _embedded for name in ("EmbedLayerNormalization", "GatherBlockQuantized")},
    (ML, "ArrayFeatureExtractor"): _columns,
    (ML, "FeatureVectorizer"): _side_by_side,
    (ML, "OneHotEncoder"): _one_hot,
    **{(ML, name): _targets for name in ("LinearRegressor", "TreeEnsemble", "TreeEnsembleRegressor")},
}


def limited(spec: NodeSpec, kernel: Kernel) -> Kernel:
    """Return the kernel; if its result could exceed the allocation limit, it is wrapped to measure the result first."""
    measure = _MEASURES.get((spec.domain, spec.op_type))
    # A packed constant is stored data, so its size bounds the size of the kernel's results.
    if measure is None or hasattr(kernel, "packed"):
        return kernel
    return _Limited(spec, kernel, measure)


class _Limited:
    """A kernel whose result is measured first.

    Attributes:
        is_native: see `dependence.is_native`.
    """

    def __init__(self, spec: NodeSpec, kernel: Kernel, measure: Measure) -> None:
        self._spec, self._kernel, self._measure = spec, kernel, measure
        self._allowed = int(spec.options.get("max_value_bytes", MAX_VALUE_BYTES))
        self.is_native = bool(getattr(kernel, "is_native", False))

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        needed = self._measure(self._spec, inputs)
        if needed > self._allowed:
            raise KernelError(
                f"{self._spec.op_type}: the result takes {needed} bytes, but the limit is {self._allowed} bytes"
            )
        return self._kernel(context, inputs)


def per_channel(values: Any, rank: int) -> Any:
    """Reshape [C] to broadcast along axis 1 of a value of this rank."""
    return np.asarray(values).reshape(-1, *[1] * (rank - 2))
