"""Random nodes: one function per operator draws attributes, and inputs from existing or new values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import helper

from .values import Generator, array, extents, floats, integers, pick, words


@dataclass
class Draw:
    """The source of a random node.

    Attributes:
        rng: random generator.
        version: version of ONNX's operator set.
        take: function (kind, allowed ranks) -> array; it returns an existing value or, at random, a new one.
    """

    rng: Generator
    version: int
    take: Callable[..., Any]


@dataclass
class Drawn:
    """A random node. Its inputs are arrays, or None for an omitted input."""

    op_type: str
    inputs: list[Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1


OPERATORS: dict[str, tuple[int, Callable[[Draw], Drawn]]] = {}


def operator(*names: str, since: int = 7) -> Callable[[Callable[[Draw, str], Drawn]], Callable[[Draw, str], Drawn]]:
    """Return a decorator that registers a function for the named operators; `since` is an operator set version."""

    def add(function: Callable[[Draw, str], Drawn]) -> Callable[[Draw, str], Drawn]:
        for name in names:
            OPERATORS[name] = (since, lambda draw, name=name: function(draw, name))
        return function

    return add


def _axis(draw: Draw, x: Any) -> int:
    return int(draw.rng.integers(-x.ndim, x.ndim)) if x.ndim else 0


def _axes(draw: Draw, x: Any) -> list[int]:
    count = int(draw.rng.integers(0, x.ndim + 1))
    return [int(axis) for axis in draw.rng.permutation(x.ndim)[:count]]


def _like(draw: Draw, x: Any, *, broadcast: bool = True) -> Any:
    """Return another value of x's type whose shape broadcasts with x's shape."""
    shape = list(x.shape)
    if broadcast:
        for axis in range(len(shape)):
            if draw.rng.random() < 0.25:
                shape[axis] = 1
        if draw.rng.random() < 0.4:
            shape = shape[int(draw.rng.integers(0, len(shape) + 1)) :]
    sizes = tuple(shape)
    if x.dtype.kind == "f":
        return floats(draw.rng, sizes, x.dtype)
    if x.dtype.kind in "iu":
        return integers(draw.rng, sizes, x.dtype)
    return draw.rng.random(sizes) < 0.5 if x.dtype.kind == "b" else words(draw.rng, sizes)


def _vector(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


@operator(
    "Acos", "Asin", "Atan", "Ceil", "Cos", "Elu", "Exp", "Floor", "HardSigmoid", "LeakyRelu", "Log", "Reciprocal",
    "Selu", "Sigmoid", "Sin", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh", "Identity",
)  # fmt: skip
def unary(draw: Draw, name: str) -> Drawn:
    return Drawn(name, [draw.take("f")])


@operator("Acosh", "Asinh", "Atanh", "Cosh", "Sinh", "Sign", "Erf", since=9)
def unary_since_9(draw: Draw, name: str) -> Drawn:
    return Drawn(name, [draw.take("f")])


@operator("Abs", "Neg", "Relu")
def unary_of_numbers(draw: Draw, name: str) -> Drawn:
    return Drawn(name, [draw.take(pick(draw.rng, "f", "i"))])


@operator("Round", "HardSwish", "Mish", "Gelu", "Celu", "ThresholdedRelu", "Shrink", "IsInf", "IsNaN", since=11)
def newer_unary(draw: Draw, name: str) -> Drawn:
    attributes: dict[str, Any] = {}
    if name == "Gelu":
        attributes["approximate"] = pick(draw.rng, "none", "tanh")
    elif name == "IsInf":
        attributes = {"detect_negative": int(draw.rng.integers(2)), "detect_positive": int(draw.rng.integers(2))}
    elif name in ("Celu", "ThresholdedRelu"):
        attributes["alpha"] = float(pick(draw.rng, 0.5, 1.0, 2.0))
    elif name == "Shrink":
        attributes = {"lambd": float(pick(draw.rng, 0.5, 1.0)), "bias": float(pick(draw.rng, 0.0, 0.5))}
    return Drawn(name, [draw.take("f")], attributes)


for _name, _since in (("HardSwish", 14), ("Mish", 18), ("Gelu", 20), ("Celu", 12)):
    OPERATORS[_name] = (_since, OPERATORS[_name][1])


@operator("Add", "Sub", "Mul", "Div")
def arithmetic(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "f", "i"))
    return Drawn(name, [x, _like(draw, x)] if draw.rng.random() < 0.5 else [_like(draw, x), x])


@operator("Max", "Min", "Sum", "Mean", since=8)
def variadic(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "f", "i") if name in ("Max", "Min") else "f")
    return Drawn(name, [x, *(_like(draw, x) for _ in range(int(draw.rng.integers(0, 3))))])


@operator("Pow")
def power(draw: Draw, name: str) -> Drawn:
    x = draw.take("f")
    return Drawn(name, [x, pick(draw.rng, np.array(2, x.dtype), np.array(0.5, x.dtype), _like(draw, x))])


@operator("Mod", since=10)
def modulo(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i"))
    return Drawn(name, [x, _like(draw, x)], {"fmod": 1 if x.dtype.kind == "f" else int(draw.rng.integers(2))})


@operator("Less", "Greater", "LessOrEqual", "GreaterOrEqual", since=9)
def comparison(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i"))
    return Drawn(name, [x, _like(draw, x)])


for _name in ("LessOrEqual", "GreaterOrEqual"):
    OPERATORS[_name] = (12, OPERATORS[_name][1])


@operator("Equal", since=11)
def equality(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i", "b", *("s" for _ in range(draw.version >= 19))))
    return Drawn(name, [x, _like(draw, x)])


@operator("And", "Or", "Xor")
def logic(draw: Draw, name: str) -> Drawn:
    x = draw.take("b")
    return Drawn(name, [x, _like(draw, x)])


@operator("Not")
def negation(draw: Draw, name: str) -> Drawn:
    return Drawn(name, [draw.take("b")])


@operator("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", since=18)
def bitwise(draw: Draw, name: str) -> Drawn:
    x = draw.take("i")
    return Drawn(name, [x] if name == "BitwiseNot" else [x, _like(draw, x)])


@operator("Where", since=9)
def where(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i", "s"))
    condition = draw.rng.random(_like(draw, x).shape) < 0.5
    return Drawn(name, [np.asarray(condition), x, _like(draw, x)])


@operator(
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare",
)  # fmt: skip
def reduction(draw: Draw, name: str) -> Drawn:
    of_integers = name in ("ReduceMax", "ReduceMin", "ReduceSum", "ReduceProd")
    x = draw.take(pick(draw.rng, "f", "f", "i") if of_integers else "f")
    attributes: dict[str, Any] = {"keepdims": int(draw.rng.integers(2))}
    axes = _axes(draw, x)
    if draw.version < (13 if name == "ReduceSum" else 18):
        return Drawn(name, [x], attributes | ({"axes": axes} if axes else {}))
    attributes["noop_with_empty_axes"] = int(draw.rng.integers(2))
    return Drawn(name, [x, _vector(*axes) if axes or draw.rng.random() < 0.5 else None], attributes)


@operator("ArgMax", "ArgMin")
def arg_extreme(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i"), (1, 2, 3, 4))
    attributes = {"axis": _axis(draw, x), "keepdims": int(draw.rng.integers(2))}
    if draw.version >= 12:
        attributes["select_last_index"] = int(draw.rng.integers(2))
    return Drawn(name, [x], attributes)


@operator("Softmax", "LogSoftmax", "Hardmax")
def softmax(draw: Draw, name: str) -> Drawn:
    x = draw.take("f", (1, 2, 3, 4))
    return Drawn(name, [x], {"axis": _axis(draw, x)} if draw.version >= 11 else {"axis": abs(_axis(draw, x)) % x.ndim})


@operator("CumSum", since=11)
def cumulative(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i"), (1, 2, 3, 4))
    flags = {"exclusive": int(draw.rng.integers(2)), "reverse": int(draw.rng.integers(2))}
    return Drawn(name, [x, np.array(_axis(draw, x))], flags)


@operator("Transpose")
def transpose(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i", "s", "b"))
    order = [int(axis) for axis in draw.rng.permutation(x.ndim)]
    return Drawn(name, [x], {"perm": order} if draw.rng.random() < 0.7 and order else {})


@operator("Reshape")
def reshape(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i", "s"))
    sizes = [int(size) for size in draw.rng.permutation(x.shape)]
    if sizes and draw.rng.random() < 0.5:
        sizes[int(draw.rng.integers(len(sizes)))] = -1
    if draw.rng.random() < 0.4:
        sizes = pick(draw.rng, [-1], [1, -1], [*x.shape[:1], -1], [0] * min(x.ndim, 1) + [-1])
    attributes = {"allowzero": int(draw.rng.integers(2))} if draw.version >= 14 else {}
    return Drawn(name, [x, np.array(sizes, np.int64)], attributes)


@operator("Flatten")
def flatten(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i") if draw.version >= 9 else "f")
    low = -x.ndim if draw.version >= 11 else 0
    return Drawn(name, [x], {"axis": int(draw.rng.integers(low, x.ndim + 1))})


@operator("Squeeze")
def squeeze(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i"))
    ones = [axis for axis, extent in enumerate(x.shape) if extent == 1]
    axes = ones[: int(draw.rng.integers(0, len(ones) + 1))]
    if draw.version < 13:
        return Drawn(name, [x], {"axes": axes} if axes else {})
    return Drawn(name, [x, _vector(*axes)] if axes else [x])


@operator("Unsqueeze")
def unsqueeze(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i"), (0, 1, 2, 3))
    count = int(draw.rng.integers(1, 3))
    axes = [int(axis) for axis in draw.rng.permutation(x.ndim + count)[:count]]
    return Drawn(name, [x], {"axes": sorted(axes)}) if draw.version < 13 else Drawn(name, [x, _vector(*axes)])


@operator("Concat")
def concat(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i", "s"), (1, 2, 3, 4))
    axis = _axis(draw, x) if draw.version >= 11 else abs(_axis(draw, x)) % x.ndim
    parts = [x]
    for _ in range(int(draw.rng.integers(0, 3))):
        other = _like(draw, x, broadcast=False)
        parts.append(np.take(other, range(int(draw.rng.integers(0, other.shape[axis] + 1))), axis))
    return Drawn(name, parts, {"axis": axis})


@operator("Split")
def split(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i", "s") if draw.version >= 13 else "f", (1, 2, 3, 4))
    axis = _axis(draw, x) if draw.version >= 11 else abs(_axis(draw, x)) % x.ndim
    extent, count = x.shape[axis], int(draw.rng.integers(1, 4))
    if draw.rng.random() < 0.5:
        cuts = sorted(int(cut) for cut in draw.rng.integers(0, extent + 1, count - 1))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, extent], strict=True)]
        if draw.version < 13:
            return Drawn(name, [x], {"axis": axis, "split": sizes}, len(sizes))
        return Drawn(name, [x, _vector(*sizes)], {"axis": axis}, len(sizes))
    attributes = {"axis": axis} | ({"num_outputs": count} if draw.version >= 18 else {})
    return Drawn(name, [x], attributes, count)


@operator("Slice")
def slice_(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i", "s") if draw.version >= 10 else "f", (1, 2, 3, 4))
    axes = _axes(draw, x) or [0]
    bounds = draw.rng.integers(-7, 8, (2, len(axes)))
    bounds = np.where(draw.rng.random(bounds.shape) < 0.1, pick(draw.rng, 2**31 - 1, -(2**31), 2**62), bounds)
    if draw.version < 10:
        return Drawn(name, [x], {"starts": bounds[0].tolist(), "ends": bounds[1].tolist(), "axes": axes})
    steps = draw.rng.choice([-3, -2, -1, 1, 2], len(axes))
    return Drawn(name, [x, bounds[0], bounds[1], _vector(*axes), steps.astype(np.int64)])


@operator("Gather")
def gather(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i", "s"), (1, 2, 3))
    axis = _axis(draw, x)
    extent = max(x.shape[axis], 1)
    low = -extent if draw.version >= 11 else 0
    index = draw.rng.integers(low, extent, extents(draw.rng, int(draw.rng.integers(0, 3))))
    return Drawn(name, [x, np.asarray(index, np.int64)], {"axis": axis})


@operator("GatherElements", since=11)
def gather_elements(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i", "s"), (1, 2, 3))
    axis = _axis(draw, x)
    extent = max(x.shape[axis], 1)
    return Drawn(name, [x, draw.rng.integers(-extent, extent, x.shape)], {"axis": axis})


@operator("GatherND", since=11)
def gather_nd(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i", "s"), (1, 2, 3))
    depth = int(draw.rng.integers(1, x.ndim + 1))
    limits = [max(extent, 1) for extent in x.shape[:depth]]
    count = extents(draw.rng, int(draw.rng.integers(0, 3)))
    index = np.stack([draw.rng.integers(-limit, limit, count) for limit in limits], axis=-1)
    return Drawn(name, [x, index.astype(np.int64)])


@operator("ScatterElements", since=11)
def scatter_elements(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i"), (1, 2, 3))
    axis = _axis(draw, x)
    extent = max(x.shape[axis], 1)
    index = draw.rng.permuted(
        np.broadcast_to(
            np.arange(extent).reshape([-1 if a == axis % x.ndim else 1 for a in range(x.ndim)]),
            [max(e, 1) if a == axis % x.ndim else e for a, e in enumerate(x.shape)],
        ),
        axis=axis,
    )
    kinds = ["none"] + ["add", "mul"] * (draw.version >= 16) + ["min", "max"] * (draw.version >= 18)
    attributes = {"axis": axis} | ({"reduction": pick(draw.rng, *kinds)} if draw.version >= 16 else {})
    return Drawn(
        name, [x, index.astype(np.int64), _like(draw, np.empty(index.shape, x.dtype), broadcast=False)], attributes
    )


@operator("ScatterND", since=11)
def scatter_nd(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i"), (1, 2, 3))
    rows = int(draw.rng.integers(0, x.shape[0] + 1))
    index = draw.rng.permutation(x.shape[0])[:rows].reshape(-1, 1).astype(np.int64)
    return Drawn(name, [x, index, _like(draw, np.empty((rows, *x.shape[1:]), x.dtype), broadcast=False)])


@operator("Expand", since=8)
def expand(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i", "s"), (0, 1, 2, 3))
    sizes = [extent if extent != 1 else int(draw.rng.integers(0, 4)) for extent in x.shape]
    return Drawn(name, [x, _vector(*pick(draw.rng, [], [2]), *sizes)])


@operator("Tile")
def tile(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i"), (1, 2, 3))
    return Drawn(name, [x, draw.rng.integers(0, 4, x.ndim).astype(np.int64)])


@operator("Pad")
def pad(draw: Draw, name: str) -> Drawn:
    x = draw.take("f" if draw.version < 13 else pick(draw.rng, "f", "i"), (1, 2, 3, 4))
    mode = pick(draw.rng, "constant", "constant", "reflect", "edge", *("wrap" for _ in range(draw.version >= 19)))
    low = -1 if mode == "constant" else 0
    pads = draw.rng.integers(low, 3, 2 * x.ndim).astype(np.int64)
    if mode == "reflect":
        pads = np.minimum(pads, [max(extent - 1, 0) for extent in (*x.shape, *x.shape)])
    if draw.version < 11:
        return Drawn(name, [x], {"mode": mode, "pads": pads.tolist(), "value": 1.5})
    value = pick(draw.rng, None, np.array(2, x.dtype)) if mode == "constant" else None
    return Drawn(name, [x, pads] if value is None else [x, pads, value], {"mode": mode})


@operator("Shape", "Size")
def shape(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i", "s", "b"))
    bounds = {"start": int(draw.rng.integers(-3, 3)), "end": int(draw.rng.integers(-3, 6))}
    return Drawn(name, [x], bounds if name == "Shape" and draw.version >= 15 and draw.rng.random() < 0.5 else {})


@operator("NonZero", since=9)
def non_zero(draw: Draw, name: str) -> Drawn:
    return Drawn(name, [draw.take(pick(draw.rng, "f", "i", "b"))])


@operator("Compress", since=9)
def compress(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i", "s"), (1, 2, 3))
    axis = None if draw.rng.random() < 0.4 else _axis(draw, x)
    extent = x.size if axis is None else x.shape[axis]
    condition = draw.rng.random(int(draw.rng.integers(0, extent + 1))) < 0.5
    return Drawn(name, [x, condition], {} if axis is None else {"axis": axis})


@operator("OneHot", since=9)
def one_hot(draw: Draw, name: str) -> Drawn:
    indices = integers(draw.rng, extents(draw.rng, int(draw.rng.integers(0, 3))), np.int64)
    values = pick(draw.rng, np.array([0, 1], np.float32), np.array([2, 5], np.int64))
    axis = int(draw.rng.integers(-indices.ndim - 1, indices.ndim + 1))
    return Drawn(name, [indices, np.array(int(draw.rng.integers(1, 5)), np.int64), values], {"axis": axis})


@operator("TopK")
def top_k(draw: Draw, name: str) -> Drawn:
    x = draw.take("f", (1, 2, 3))
    axis = _axis(draw, x) if draw.version >= 11 else x.ndim - 1
    count = int(draw.rng.integers(0, x.shape[axis] + 1))
    if draw.version < 10:
        return Drawn(name, [x], {"axis": axis, "k": count}, 2)
    attributes = {"axis": axis} | ({"largest": int(draw.rng.integers(2)), "sorted": 1} if draw.version >= 11 else {})
    return Drawn(name, [x, _vector(count)], attributes, 2)


@operator("Trilu", since=14)
def trilu(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i"), (2, 3, 4))
    given = [x, np.array(int(draw.rng.integers(-4, 5)))] if draw.rng.random() < 0.6 else [x]
    return Drawn(name, given, {"upper": int(draw.rng.integers(2))})


@operator("EyeLike", since=9)
def eye_like(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i"), (2,))
    return Drawn(name, [x], {"k": int(draw.rng.integers(-3, 4)), "dtype": pick(draw.rng, 1, 7)})


@operator("Unique", since=11)
def unique(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "i", "s"), (1, 2, 3))
    attributes = {"sorted": int(draw.rng.integers(2))}
    # onnxruntime 1.32 aborts the process on empty slices.
    by_slices = x.size > 0 and draw.rng.random() < 0.5
    return Drawn(name, [x], attributes | ({"axis": _axis(draw, x)} if by_slices else {}), 4)


@operator("ReverseSequence", since=10)
def reverse_sequence(draw: Draw, name: str) -> Drawn:
    x = draw.take("f", (2, 3))
    batch = int(draw.rng.integers(2))
    lengths = draw.rng.integers(0, x.shape[1 - batch] + 1, x.shape[batch])
    return Drawn(name, [x, lengths.astype(np.int64)], {"batch_axis": batch, "time_axis": 1 - batch})


@operator("DepthToSpace", "SpaceToDepth")
def blocks(draw: Draw, name: str) -> Drawn:
    size = int(draw.rng.integers(1, 3))
    n, c, h, w = extents(draw.rng, 4, may_be_empty=False)
    shape_ = (n, c * size**2, h, w) if name == "DepthToSpace" else (n, c, h * size, w * size)
    mode = {"mode": pick(draw.rng, "DCR", "CRD")} if name == "DepthToSpace" and draw.version >= 11 else {}
    return Drawn(name, [floats(draw.rng, shape_)], {"blocksize": size, **mode})


@operator("Cast", since=9)
def cast(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i", "b"))
    targets = [1, 7, 6, 9, 10, 11, 2, 3, 8]
    if x.dtype.kind == "f":
        # The conversion of a float outside the integer type's range is undefined.
        x = np.clip(np.nan_to_num(x, posinf=3, neginf=-3), 0, 100).astype(x.dtype)
    return Drawn(name, [x], {"to": pick(draw.rng, *targets)})


@operator("Clip")
def clip(draw: Draw, name: str) -> Drawn:
    x = draw.take("f" if draw.version < 12 else pick(draw.rng, "f", "i"))
    if draw.version < 11:
        return Drawn(name, [x], {"min": -1.0, "max": 1.5})
    low, high = pick(draw.rng, None, np.array(0, x.dtype)), pick(draw.rng, None, np.array(2, x.dtype))
    return Drawn(name, [x, low, high])


@operator("MatMul")
def matmul(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "f", "i") if draw.version >= 9 else "f", (1, 2, 3))
    columns = pick(draw.rng, (), (int(draw.rng.integers(0, 5)),))
    batch = x.shape[:-2] if columns and draw.rng.random() < 0.5 else ()
    return Drawn(name, [x, _like(draw, np.empty((*batch, x.shape[-1], *columns), x.dtype), broadcast=False)])


@operator("Gemm")
def gemm(draw: Draw, name: str) -> Drawn:
    rows, inner, columns = extents(draw.rng, 3)
    flip_a, flip_b = int(draw.rng.integers(2)), int(draw.rng.integers(2))
    kind = pick(draw.rng, np.float32, np.float64)
    a = floats(draw.rng, (inner, rows) if flip_a else (rows, inner), kind)
    b = floats(draw.rng, (columns, inner) if flip_b else (inner, columns), kind)
    c = floats(draw.rng, pick(draw.rng, (rows, columns), (columns,), (1, columns), (rows, 1), ()), kind)
    attributes = {
        "transA": flip_a,
        "transB": flip_b,
        "alpha": pick(draw.rng, 1.0, 0.5),
        "beta": pick(draw.rng, 1.0, 2.0, 0.0),
    }
    return Drawn(name, [a, b, c] if draw.version < 11 or draw.rng.random() < 0.8 else [a, b], attributes)


@operator("Einsum", since=12)
def einsum(draw: Draw, name: str) -> Drawn:
    equation, *shapes = pick(
        draw.rng, ("ij,jk->ik", (2, 3), (3, 4)), ("bij,bjk", (2, 2, 3), (2, 3, 2)), ("ii->i", (3, 3)), ("ij->", (2, 3)),
        ("...j,j->...", (2, 2, 3), (3,)), ("i,j->ji", (2,), (3,)),
    )  # fmt: skip
    return Drawn(name, [floats(draw.rng, shape_) for shape_ in shapes], {"equation": equation})


def _spatial(draw: Draw, axes: int) -> dict[str, Any]:
    kernel = draw.rng.integers(1, 4, axes).tolist()
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": draw.rng.integers(1, 3, axes).tolist()}
    padding = pick(draw.rng, "none", "pads", "SAME_UPPER", "VALID")
    if padding == "pads":
        attributes["pads"] = [int(draw.rng.integers(0, kernel[axis % axes])) for axis in range(2 * axes)]
    elif padding != "none":
        attributes["auto_pad"] = padding
    return attributes


@operator("Conv")
def conv(draw: Draw, name: str) -> Drawn:
    axes, groups = int(draw.rng.integers(1, 3)), pick(draw.rng, 1, 1, 2)
    attributes = _spatial(draw, axes) | {"group": groups}
    if "auto_pad" not in attributes:
        attributes["dilations"] = draw.rng.integers(1, 3, axes).tolist()
    x = floats(draw.rng, (int(draw.rng.integers(1, 3)), 2 * groups, *draw.rng.integers(4, 8, axes)))
    weight = floats(draw.rng, (2 * groups, 2, *attributes["kernel_shape"]))
    return Drawn(
        name, [x, weight, floats(draw.rng, (2 * groups,))] if draw.rng.random() < 0.5 else [x, weight], attributes
    )


@operator("MaxPool", "AveragePool", "LpPool")
def pool(draw: Draw, name: str) -> Drawn:
    axes = int(draw.rng.integers(1, 3))
    attributes = _spatial(draw, axes)
    if draw.version >= (18 if name == "LpPool" else 10):
        attributes["ceil_mode"] = int(draw.rng.integers(2)) if "auto_pad" not in attributes else 0
    if name == "AveragePool":
        attributes["count_include_pad"] = int(draw.rng.integers(2))
    x = floats(draw.rng, (1, 2, *draw.rng.integers(1, 7, axes)))
    outputs = 2 if name == "MaxPool" and draw.version >= 8 and draw.rng.random() < 0.4 else 1
    return Drawn(name, [x], attributes, outputs)


@operator("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(draw: Draw, name: str) -> Drawn:
    return Drawn(name, [floats(draw.rng, extents(draw.rng, int(draw.rng.integers(3, 5)), may_be_empty=False))])


@operator("BatchNormalization", since=9)
def batch_normalization(draw: Draw, name: str) -> Drawn:
    x = draw.take("f", (2, 3, 4))
    channels = x.shape[1]
    vectors = [floats(draw.rng, (channels,), x.dtype) for _ in range(3)]
    return Drawn(name, [x, *vectors, np.abs(floats(draw.rng, (channels,), x.dtype))], {"epsilon": 1e-3})


@operator("InstanceNormalization")
def instance_normalization(draw: Draw, name: str) -> Drawn:
    x = floats(draw.rng, extents(draw.rng, int(draw.rng.integers(3, 5)), may_be_empty=False))
    return Drawn(name, [x, floats(draw.rng, (x.shape[1],)), floats(draw.rng, (x.shape[1],))])


@operator("LayerNormalization", since=17)
def layer_normalization(draw: Draw, name: str) -> Drawn:
    x = draw.take("f", (1, 2, 3))
    axis = _axis(draw, x)
    scale, bias = (floats(draw.rng, x.shape[axis:], x.dtype) for _ in range(2))
    return Drawn(
        name, [x, scale, bias] if draw.rng.random() < 0.6 else [x, scale], {"axis": axis}, int(draw.rng.integers(1, 4))
    )


@operator("LRN")
def local_response(draw: Draw, name: str) -> Drawn:
    x = floats(draw.rng, extents(draw.rng, 4, may_be_empty=False))
    return Drawn(name, [x], {"size": pick(draw.rng, 1, 3, 5), "alpha": 0.01})


@operator("LpNormalization", "MeanVarianceNormalization", since=9)
def normalization(draw: Draw, name: str) -> Drawn:
    x = draw.take("f", (2, 3, 4) if name == "LpNormalization" else (4,))
    if name == "LpNormalization":
        return Drawn(name, [x], {"axis": _axis(draw, x), "p": pick(draw.rng, 1, 2)})
    return Drawn(name, [x.astype(np.float32)])


@operator("PRelu", since=9)
def prelu(draw: Draw, name: str) -> Drawn:
    x = draw.take("f")
    slope = _like(draw, x)
    return Drawn(name, [x, slope if np.broadcast_shapes(slope.shape, x.shape) == x.shape else np.array(0.5, x.dtype)])


@operator("Dropout")
def dropout(draw: Draw, name: str) -> Drawn:
    return Drawn(name, [draw.take("f")], {}, int(draw.rng.integers(1, 3)))


@operator("QuantizeLinear", since=10)
def quantize(draw: Draw, name: str) -> Drawn:
    x = np.nan_to_num(draw.take("f", (1, 2, 3)).astype(np.float32), posinf=9, neginf=-9)
    return Drawn(name, [x, np.float32(0.1), pick(draw.rng, np.array(100, np.uint8), np.array(3, np.int8))])


@operator("DequantizeLinear", since=10)
def dequantize(draw: Draw, name: str) -> Drawn:
    x = draw.take("q")
    return Drawn(name, [x, np.float32(0.1), np.array(3, x.dtype)])


@operator("DynamicQuantizeLinear", since=11)
def dynamic_quantize(draw: Draw, name: str) -> Drawn:
    x = draw.take("f").astype(np.float32)
    return Drawn(name, [np.nan_to_num(x, posinf=9, neginf=-9).clip(-100, 100)], {}, 3)


@operator("MatMulInteger", since=10)
def matmul_integer(draw: Draw, name: str) -> Drawn:
    rows, inner, columns = extents(draw.rng, 3, may_be_empty=False)
    a, b = array(draw.rng, "q", (rows, inner)), array(draw.rng, "q", (inner, columns))
    points = [np.array(5, a.dtype), np.array(3, b.dtype)] if draw.rng.random() < 0.6 else []
    return Drawn(name, [a, b, *points])


@operator("LSTM", "GRU", "RNN")
def recurrent(draw: Draw, name: str) -> Drawn:
    steps, batch, width, hidden = extents(draw.rng, 4, may_be_empty=False)
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[name]
    direction = pick(draw.rng, "forward", "reverse", "bidirectional")
    ways = 2 if direction == "bidirectional" else 1
    inputs: list[Any] = [
        draw.rng.standard_normal(shape_).astype(np.float32)
        for shape_ in ((steps, batch, width), (ways, gates * hidden, width), (ways, gates * hidden, hidden))
    ]
    inputs.append(
        draw.rng.standard_normal((ways, 2 * gates * hidden)).astype(np.float32) if draw.rng.random() < 0.6 else None
    )
    inputs.append(draw.rng.integers(1, steps + 1, batch).astype(np.int32) if draw.rng.random() < 0.3 else None)
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    if draw.rng.random() < 0.3:
        attributes["clip"] = 0.7
    if name == "GRU":
        attributes["linear_before_reset"] = int(draw.rng.integers(2))
    return Drawn(name, inputs, attributes, 3 if name == "LSTM" else 2)


@operator("ConstantOfShape", since=9)
def constant_of_shape(draw: Draw, name: str) -> Drawn:
    value = helper.make_tensor("value", pick(draw.rng, 1, 7), [1], [3])
    return Drawn(name, [_vector(*extents(draw.rng, int(draw.rng.integers(0, 3))))], {"value": value})


@operator("Range", since=11)
def range_(draw: Draw, name: str) -> Drawn:
    kind = pick(draw.rng, np.int64, np.float32, np.int32)
    start, limit, delta = (
        np.array(value, kind)
        for value in (int(draw.rng.integers(-3, 3)), int(draw.rng.integers(-3, 6)), pick(draw.rng, 1, 2, -1))
    )
    return Drawn(name, [start, limit, delta])


@operator("StringConcat", "StringSplit", "RegexFullMatch", since=20)
def text(draw: Draw, name: str) -> Drawn:
    x = draw.take("s")
    if name == "StringConcat":
        return Drawn(name, [x, _like(draw, x)])
    if name == "RegexFullMatch":
        return Drawn(name, [x], {"pattern": pick(draw.rng, "a.*", "[a-z]+", "(a|b)?", r"-?\d+(\.\d+)?")})
    limit = {"maxsplit": int(draw.rng.integers(1, 3))} if draw.rng.random() < 0.4 else {}
    return Drawn(name, [x], {"delimiter": pick(draw.rng, ",", " ", "b")} | limit, 2)


@operator("StringNormalizer", since=10)
def normalize_text(draw: Draw, name: str) -> Drawn:
    action = pick(draw.rng, "NONE", "LOWER", "UPPER")
    attributes = {"case_change_action": action, "is_case_sensitive": int(draw.rng.integers(2)), "stopwords": ["a", "B"]}
    return Drawn(name, [words(draw.rng, (int(draw.rng.integers(1, 5)),))], attributes)


@operator("Resize", since=10)
def resize(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "q"), (1, 2, 3, 4))
    version, axes = draw.version, range(x.ndim)
    mode = pick(draw.rng, "nearest", "nearest", "linear", *("cubic" for _ in range(version >= 11)))
    scales = np.ones(x.ndim, np.float32)
    for axis in axes[-2:]:
        parts = max(x.shape[axis], 1)
        scales[axis] = pick(draw.rng, 0.5, 1, 1.2, 2, 2.5, int(draw.rng.integers(1, 3 * parts)) / parts)
    if version < 11:
        return Drawn(name, [x, scales], {"mode": mode})
    where = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "tf_crop_and_resize"]
    where += ["half_pixel_symmetric"] * (version >= 19)
    attributes: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": pick(draw.rng, *where)}
    if mode == "nearest":
        attributes["nearest_mode"] = pick(draw.rng, "round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    elif version >= 18:
        attributes["antialias"] = int(draw.rng.integers(2))
    if version >= 18 and x.ndim > 2 and draw.rng.random() < 0.3:
        axes = axes[-2:]
        attributes["axes"] = [*axes]
    roi = np.concatenate([draw.rng.uniform(-0.2, 0.4, len(axes)), draw.rng.uniform(0.6, 1.2, len(axes))])
    given = [x, roi.astype(np.float32) if attributes["coordinate_transformation_mode"].startswith("tf") else None]
    if draw.rng.random() < 0.5:
        return Drawn(name, [*given, scales[axes]], attributes)
    if version >= 18:
        attributes["keep_aspect_ratio_policy"] = pick(draw.rng, "stretch", "stretch", "not_larger", "not_smaller")
    return Drawn(name, [*given, None, _vector(*(max(int(x.shape[a] * scales[a]), 1) for a in axes))], attributes)


def _unlike(draw: Draw, dtype: Any) -> Any:
    """Return an array of this type and of any shape."""
    shape = extents(draw.rng, int(draw.rng.integers(0, 4)))
    return _like(draw, np.empty(shape, dtype), broadcast=False)


@operator("SequenceConstruct", "SequenceInsert", "SequenceErase", "SequenceAt", "SequenceLength", since=11)
def sequence(draw: Draw, name: str) -> Drawn:
    """Arrays of one type and of unlike shapes."""
    x = draw.take(pick(draw.rng, "f", "i", "s", "b"))
    values = draw.take("sequence")
    if name == "SequenceConstruct" or values is None:
        others = [_unlike(draw, x.dtype) for _ in range(2)]
        return Drawn("SequenceConstruct", [x, *others[: int(draw.rng.integers(0, 3))]])
    if name == "SequenceLength":
        return Drawn(name, [values])
    added = [_unlike(draw, values[0].dtype) if values else x] if name == "SequenceInsert" else []
    end = len(values) + len(added)
    place = np.array(int(draw.rng.integers(-len(values), max(end, 1))), pick(draw.rng, np.int32, np.int64))
    needs_place = name == "SequenceAt" or draw.rng.random() < 0.7
    return Drawn(name, [values, *added, *([place] if needs_place else [])])


@operator("SplitToSequence", since=11)
def split_to_sequence(draw: Draw, name: str) -> Drawn:
    x = draw.take(pick(draw.rng, "f", "i", "s"), (1, 2, 3))
    axis = _axis(draw, x)
    extent = x.shape[axis]
    way = pick(draw.rng, "slices", "pieces", "sizes")
    if way == "slices":
        return Drawn(name, [x], {"axis": axis, "keepdims": int(draw.rng.integers(2))})
    if way == "pieces":
        return Drawn(name, [x, np.array(int(draw.rng.integers(1, 4)), np.int64)], {"axis": axis})
    cut = int(draw.rng.integers(0, extent + 1))
    return Drawn(name, [x, _vector(cut, extent - cut)], {"axis": axis})


@operator("ConcatFromSequence", since=11)
def concat_from_sequence(draw: Draw, name: str) -> Drawn:
    values = draw.take("sequence")
    if not values:
        return split_to_sequence(draw, "SplitToSequence")
    return Drawn(name, [values], {"axis": _axis(draw, values[0]), "new_axis": int(draw.rng.integers(2))})
