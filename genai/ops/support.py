"""What operators share: optional inputs, axes, arrays of objects, and limits on what they allocate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .registry import Kernel, KernelError, NodeSpec

# A single value may not take more than this unless the caller allows more (NodeSpec.options["max_value_bytes"]).
MAX_VALUE_BYTES = 1 << 34


def optional(inputs: Sequence[Any], index: int) -> Any:
    """Input `index`, or None where it is absent."""
    return inputs[index] if len(inputs) > index else None


def session_threads(spec: NodeSpec) -> Any:
    """The threads of a session; None in decoders, whose rare functions of arrays stay with NumPy and BLAS."""
    return spec.options.get("threads") if "arena" in spec.options else None


def axes_of(given: Any, attribute: Any) -> tuple[int, ...] | None:
    """Axes from an input (newer versions) or the attribute (older ones); None where neither is given."""
    return attribute if given is None else tuple(int(axis) for axis in np.asarray(given).reshape(-1))


def checked_axis(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    if not -rank <= axis < max(rank, 1):
        raise KernelError(f"axis {axis} is outside a value of rank {rank}")
    return axis % rank if rank else 0


def checked_shape(spec: NodeSpec, sizes: Sequence[Any], itemsize: int) -> tuple[int, ...]:
    """Sizes as a shape that may be allocated; KernelError if one is negative, or the value too large."""
    shape = tuple(int(size) for size in sizes)
    if any(size < 0 for size in shape):
        raise KernelError(f"{spec.op_type}: a size is negative in {list(shape)}")
    allowed = int(spec.options.get("max_value_bytes", MAX_VALUE_BYTES))
    if math.prod(shape) * itemsize > allowed:
        raise KernelError(
            f"{spec.op_type}: a value of shape {list(shape)} takes {math.prod(shape) * itemsize} bytes, "
            f"allowed are {allowed}"
        )
    return shape


def checked_indices(what: str, indices: Any, extent: int) -> Any:
    """Indices that count from the front only, where NumPy would count negative ones from the end."""
    found = np.asarray(indices)
    if found.size and (found.min() < 0 or found.max() >= extent):
        raise IndexError(f"{what} from {found.min()} to {found.max()} are outside 0 to {extent - 1}")
    return found


def as_array(value: Any) -> Any:
    """What indexing gives, as an array: of strings, a single element comes as it is."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, np.generic):
        return np.asarray(value)
    single = np.empty((), object)
    single[()] = value
    return single


def objects(values: Sequence[Any], shape: tuple[int, ...], dtype: Any = object) -> Any:
    """Values one by one as an array, also of strings and other objects."""
    result = np.empty(len(values), dtype)
    result[:] = values
    return result.reshape(shape)


def widened(x: Any) -> Any:
    """Floats narrower than 32 bits as float32, others as they are."""
    return x.astype(np.float32) if x.dtype.itemsize < 4 and x.dtype.kind not in "biu" else x


# From the inputs' arrays to the bytes of the result, or more.
Measure = Callable[[NodeSpec, Sequence[Any]], int]
_POINTER_BYTES = 8

_BROADCASTING = """
    Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod
    Mul Or PRelu Pow Sub Sum Where Xor
""".split()


def _arrays(inputs: Sequence[Any]) -> list[Any]:
    return [value for value in inputs if isinstance(value, np.ndarray)]


def _broadcast(spec: NodeSpec, inputs: Sequence[Any]) -> int:
    arrays = _arrays(inputs)
    first = arrays[0].shape if arrays else ()
    if all(array.shape == first for array in arrays):
        return 0
    try:
        shape = np.broadcast_shapes(*(array.shape for array in arrays))
    except ValueError:
        return 0  # the node fails with a message of its own, or aligns axes in an older way
    return int(math.prod(shape) * max(array.dtype.itemsize for array in arrays))


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
    """Each string of one side as often as it is repeated, and the longest at that."""
    longest = sum(max((len(text) for text in array.reshape(-1).tolist()), default=0) for array in _arrays(inputs))
    shape = np.broadcast_shapes(*(array.shape for array in _arrays(inputs)))
    return math.prod(shape) * (longest + _POINTER_BYTES)


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
}


def limited(spec: NodeSpec, kernel: Kernel) -> Kernel:
    """The kernel, or one that first measures its result, where it could be larger than a value may be."""
    measure = _MEASURES.get((spec.domain, spec.op_type))
    # A packed constant is real data, and bounds what comes of it.
    if measure is None or hasattr(kernel, "packed"):
        return kernel
    allowed = int(spec.options.get("max_value_bytes", MAX_VALUE_BYTES))

    def measured(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        wanted = measure(spec, inputs)
        if wanted > allowed:
            raise KernelError(f"{spec.op_type}: the result takes {wanted} bytes, allowed are {allowed}")
        return kernel(context, inputs)

    return measured
