"""Values created from a shape, values repeated to fill a shape, and random numbers.

A node with a seed draws the same random numbers in every run; a node without a seed draws new numbers in each run.
After `set_seed`, the numbers of nodes without a seed are derived from that seed: sessions created afterwards repeat the
same sequence of runs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from genai.kernels.cpu.arrays.copying import tiled
from genai.kernels.cpu.program.thread_pool import Threads

from ..onnx.node import MS
from ..onnx.tensor import OnnxTensor
from ..onnx.types import DataType, Dim, ShapeValue, TensorType, Type, broadcast_dims
from .casting import dtype_of
from .registry import KernelError, NodeSpec, operator, scalar
from .reshaping import open_shape
from .shape_rules import NodeTypes, data_type, shape_rule
from .support import checked_shape, session_threads


@operator("Expand", since_version=8)
def expand(x: Any, shape: Any, *, spec: NodeSpec) -> Any:
    """Broadcast in both directions: where the target size is 1, the input keeps its size."""
    target = np.broadcast_shapes(x.shape, tuple(int(size) for size in shape))
    return np.broadcast_to(x, checked_shape(spec, target, x.dtype.itemsize))


@operator("ConstantOfShape", since_version=9)
def constant_of_shape(sizes: Any, *, value: Any = None, spec: NodeSpec) -> Any:
    """Fill a shape with one value (float32 zero by default)."""
    fill = np.zeros(1, np.float32) if value is None else np.asarray(value)
    return np.full(checked_shape(spec, sizes, fill.dtype.itemsize), fill.reshape(-1)[0], dtype=fill.dtype)


@operator("Range", domain=MS)
@operator("Range", since_version=11)
def range_(first: Any, last: Any, step: Any = None, *, spec: NodeSpec) -> Any:
    """Return start, start + delta, ... up to but excluding limit; the delta of com.microsoft is 1 by default."""
    start, limit, delta = scalar(first), scalar(last), 1 if step is None else scalar(step)
    if not delta:
        raise KernelError("Range: delta is 0, so the range has no end")
    dtype, steps = first.dtype, (limit - start) / delta
    if not np.isfinite(steps):
        raise KernelError(f"Range: a range from {start} to {limit} in steps of {delta} has no finite length")
    count = max(int(np.ceil(steps)), 0)
    checked_shape(spec, (count,), 8 if dtype.kind in "iu" else 3 * 8)
    if dtype.kind in "iu":
        return np.arange(start, limit, delta, dtype=dtype)
    return (start + np.arange(count) * delta).astype(dtype)


@operator("Tile", since_version=6, threads=session_threads)
def tile(x: Any, counts: Any, *, threads: Threads | None, spec: NodeSpec) -> Any:
    """Repeat along every axis."""
    repeats = [int(count) for count in counts]
    if len(repeats) != x.ndim:
        raise KernelError(f"Tile: {len(repeats)} repeats are given for {x.ndim} axes; one repeat per axis is needed")
    checked_shape(spec, [size * count for size, count in zip(x.shape, repeats, strict=True)], x.dtype.itemsize)
    return tiled(x, repeats, threads)


@operator("EyeLike", since_version=9)
def eye_like(x: Any, *, k: int = 0, dtype: int | None = None) -> Any:
    """Ones on a diagonal, in the input's shape."""
    return np.eye(x.shape[0], x.shape[1], k=k).astype(x.dtype if dtype is None else dtype_of(dtype))


@shape_rule("Expand", domain="")
def expand_types(types: NodeTypes) -> list[Type | None]:
    """The input, broadcast with a shape in both directions."""
    source, target = types.source, types.value(1)
    if source.shape is None or target is None:
        return [TensorType(source.dtype)]
    return [TensorType(source.dtype, broadcast_dims(source.shape, target.dims))]


@shape_rule("ConstantOfShape", domain="")
def constant_of_shape_types(types: NodeTypes) -> list[Type | None]:
    """A tensor of the shape that the input contains, in the type of `value`."""
    value, target = types.node.attribute("value"), types.value(0)
    dtype = value.dtype if isinstance(value, OnnxTensor) else DataType.FLOAT
    return [TensorType(dtype, open_shape(types.shape(0)) if target is None else target.dims)]


@shape_rule("Range", domain="")
@shape_rule("Range")
def number_range_types(types: NodeTypes) -> list[Type | None]:
    """A vector; its length is known if start, limit and step are known integers, or if start is 0 and step is 1."""
    source = types.tensor(0) or types.tensor(1) or types.tensor(2)
    if source is None:
        return []
    start, limit, step = (_only(types.value(index)) for index in range(3))
    if len(types.inputs) < 3 or not types.node.inputs[2]:
        step = 1
    if start == 0 and step == 1 and isinstance(limit, str):
        return [TensorType(source.dtype, (limit,))]
    # With fractions the length depends on rounding at run time, so lengths are computed only from integers.
    if isinstance(start, int) and isinstance(limit, int) and isinstance(step, int) and step != 0:
        return [TensorType(source.dtype, (max(-((start - limit) // step), 0),))]
    return [TensorType(source.dtype, (None,))]


def _only(value: ShapeValue | None) -> Dim:
    return value.dims[0] if value is not None and len(value.dims) == 1 else None


@shape_rule("EyeLike", domain="")
def eye_like_types(types: NodeTypes) -> list[Type | None]:
    """A matrix of the input's shape, in the type of the attribute or of the input."""
    source, dtype = types.tensor(0), data_type(types.attribute("dtype", 0))
    if dtype is DataType.UNDEFINED and source is None:
        return []
    return [TensorType(dtype or (source.dtype if source else DataType.FLOAT), types.shape(0, rank=2))]


# The alias is a string, because NumPy loads its random numbers at the first access.
MakeGenerator: TypeAlias = "Callable[[], np.random.Generator]"
_process_seed: list[int] = []


def set_seed(seed: int) -> None:
    """Seed the nodes that are created from now on and have no seed attribute."""
    _process_seed[:] = [int(seed)]


def _generator(spec: NodeSpec) -> MakeGenerator:
    seed = spec.attributes.get("seed")
    if seed is None and _process_seed:
        generator = np.random.default_rng(
            [_process_seed[0] % 2**64, *"|".join(spec.outputs).encode("utf-8", "replace")]
        )
        return lambda: generator
    if seed is None:
        return np.random.default_rng
    bits = struct.unpack("<I", struct.pack("<f", float(seed)))[0]
    return lambda: np.random.default_rng(bits)


def _typed(values: Any, like: Any, dtype: int | None) -> Any:
    """Convert values to `dtype`, else to the type of `like`, else to float32."""
    keeps_type = like is not None and dtype is None
    return np.asarray(values).astype(like.dtype if keeps_type else dtype_of(1 if dtype is None else dtype))


@operator("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", generator=_generator)
def random_values(
    like: Any = None, *, mean: float = 0.0, scale: float = 1.0, low: float = 0.0, high: float = 1.0,
    shape: tuple[int, ...] = (), dtype: int | None = None, generator: MakeGenerator, spec: NodeSpec,
) -> Any:  # fmt: skip
    """Random numbers in the shape of the attribute or of the input."""
    sizes = checked_shape(spec, shape, 2 * 8) if like is None else like.shape
    draw = generator()
    is_normal = spec.op_type.startswith("RandomNormal")
    return _typed(draw.normal(mean, scale, sizes) if is_normal else draw.uniform(low, high, sizes), like, dtype)


@operator("Bernoulli", since_version=15, generator=_generator)
def bernoulli(x: Any, *, dtype: int | None = None, generator: MakeGenerator) -> Any:
    """1 with the probability that each element specifies, else 0."""
    return _typed(generator().random(x.shape) < x, x, dtype)


@operator("Multinomial", since_version=7, generator=_generator)
def multinomial(x: Any, *, sample_size: int = 1, dtype: int = 6, generator: MakeGenerator, spec: NodeSpec) -> Any:
    """Draw `sample_size` classes per row from the given log-probabilities."""
    logits = x.astype(np.float64)
    checked_shape(spec, (max(len(logits), 1), sample_size), 4 * 8)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    steps = np.cumsum(weights, axis=1)
    draws = generator().random((len(logits), sample_size)) * steps[:, -1:]
    picked = [np.searchsorted(row, draw, side="right") for row, draw in zip(steps, draws, strict=True)]
    return np.minimum(np.array(picked).reshape(draws.shape), logits.shape[1] - 1).astype(dtype_of(dtype))
