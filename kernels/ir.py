"""Ops: what a decoder computes over rows of tokens, one frozen op per meaning, as data.

The graph side makes them (`genai.ops`), a device lowers them (`kernels.cpu`, `kernels.reference`). An op names
values and constants and never holds an address or a function. Values are float32 rows, one per token of the step (or
one per row whose logits are wanted); their types stand in the `OpProgram`. Shapes below write T for a value's rows.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import Annotated, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .weights import QuantizationError, QuantizedWeight, WeightFormat

# Names. A value that an op reads or makes ("" = absent), and a constant that it reads.
In = Annotated[str, "in"]
Out = Annotated[str, "out"]
Constant = Annotated[str, "constant"]


class Per(Enum):
    """What a value has one row for."""

    TOKEN = "token"
    LOGITS = "row of logits that is wanted"


class Ids(Enum):
    """Integers that every step brings, one per token."""

    TOKENS = "token ids"
    POSITIONS = "positions in the sequence"


@dataclass(frozen=True)
class RowsType:
    """A value with one float32 row per token (or per row of logits).

    Attributes:
        shape: as the graph sees it, with -1 where the number of rows goes in, such as (1, -1, 2048).
        width: numbers per row; a multiple of the last axis, if a row holds several of those.
    """

    shape: tuple[int, ...]
    width: int
    per: Per = Per.TOKEN

    @property
    def last(self) -> int:
        """Size of the last axis."""
        return self.shape[-1]

    def with_width(self, width: int) -> RowsType:
        """The same rows with other contents: a last axis of `width` numbers, one per row."""
        return replace(self, shape=(*self.shape[:-1], width), width=width)


# --- weights -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockWeight:
    """A quantised matrix [rows, columns] by the names of its constants; "" = it has none. `load` reads it.

    Equal weights are packed once, so a tied embedding and head share memory.

    Attributes:
        data: codes, uint8, those of `experts` matrices one after the other; 0 = no mixture's, but one.
        scales: floats, one per group or one per row.
        offsets: packed integers. Without `offset_scales` they are zero points, whose scales are `scales`, and may be
            floats too.
        multipliers: packed integers. offset_scales: floats.
        grid: float32 [2 ** bits]. Without it, `values` are the grid; without both it counts by ones.
        high_first: of two numbers in a byte the first one has the high bits.
        interleaved: rows are in turn those of a gate and of what it gates.
    """

    data: Constant
    scales: Constant
    offsets: Constant
    rows: int
    columns: int
    format: WeightFormat
    experts: int = 0
    interleaved: bool = False
    multipliers: Constant = ""
    offset_scales: Constant = ""
    grid: Constant = ""
    values: tuple[float, ...] = ()
    high_first: bool = False

    @property
    def bits(self) -> int:
        """Of a code."""
        return self.format.bits

    @property
    def block_size(self) -> int:
        """Columns of a block."""
        return self.format.block_size

    @property
    def is_uniform(self) -> bool:
        """Whether it has what onnxruntime's blocks have: integers, a scale, and perhaps a zero point."""
        return not (self.grid or self.values or self.multipliers or self.offset_scales)

    def load(self, array: Callable[[str], NDArray[Any]]) -> QuantizedWeight:
        """The matrix itself, where its constants are not onnxruntime's blocks (`is_uniform`).

        Args:
            array: gives a constant by its name.

        Raises:
            QuantizationError: an array has another type or shape.
        """
        names = (self.data, self.scales, self.multipliers, self.offset_scales, self.offsets)
        data, scales, multipliers, offset_scales, offsets = (array(name) if name else None for name in names)
        grid = array(self.grid) if self.grid else np.array(self.values, np.float32)
        assert data is not None and scales is not None
        if self.high_first:
            rows = (self.rows, self.format.padded(self.columns) * self.format.bits // 8)
            wanted = self.rows * self.format.groups(self.columns)
            if data.size != rows[0] * rows[1] or data.dtype != np.uint8 or scales.size != wanted:
                raise QuantizationError(
                    f"codes are {data.dtype} {list(data.shape)}, scales {list(scales.shape)}, expected uint8 of "
                    f"{rows[0] * rows[1]} bytes, and {wanted} scales"
                )
            data, scales = data.reshape(rows), scales.reshape(self.rows, -1)
            data = data >> np.uint8(4) | data << np.uint8(4)
        return QuantizedWeight.from_packed(
            self.format, self.rows, self.columns, data, grid, scales, multipliers, offset_scales, offsets
        )


@dataclass(frozen=True)
class DenseWeight:
    """A matrix of float32, float16 or bfloat16: stored [columns, rows], or [rows, columns] if `transposed`."""

    data: Constant
    rows: int
    columns: int
    transposed: bool = False
    experts: int = 0
    interleaved: bool = False


Weight = BlockWeight | DenseWeight


@dataclass(frozen=True)
class LoraDelta:
    """What low-rank adapters (Hu et al. 2021) add to a product: hidden @ B.T, for every adapter of a row.

    Attributes:
        hidden: what `LoraShrink` made for this target.
        target: number of the product among those of the program that adapters can change.
    """

    hidden: In
    target: int


@dataclass(frozen=True)
class Projection:
    """x @ weight.T + bias + addend + delta.

    Attributes:
        bias: float32 [rows] ([experts, rows] of experts). addend: rows as wide as the result.
        delta: the target of adapters; None = they cannot change this product.
    """

    weight: Weight
    bias: Constant = ""
    addend: In = ""
    delta: LoraDelta | None = None


# --- ops -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Op:
    """Base class of all ops.

    Attributes (of every op, keyword only):
        op_type: what the graph calls it.
    """

    op_type: str = field(default="", kw_only=True, compare=False)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that it reads."""
        return tuple(_names(self, "in"))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values that it makes."""
        return tuple(_names(self, "out"))


@dataclass(frozen=True)
class Embedding(Op):
    """out = table[ids] as float32."""

    table: Weight
    ids: Ids
    out: Out


@dataclass(frozen=True)
class SliceColumns(Op):
    """Columns [first, first + width of out) of every row, or all of them in another shape: nothing is computed."""

    x: In
    first: int
    out: Out


@dataclass(frozen=True)
class SelectColumns(Op):
    """out[:, i] = x[:, order[i]]: columns chosen by a constant `order`, int64 [width of out]."""

    x: In
    order: Constant
    out: Out


@dataclass(frozen=True)
class LogitsRows(Op):
    """out = x[logits_indices]: the rows whose logits are wanted."""

    x: In
    out: Out


@dataclass(frozen=True)
class LoraShrink(Op):
    """out = weight * (x @ A.T) for every adapter of a row that has factors at a target; see `LoraDelta`.

    How wide that is, and whether there is anything, is said by each step: which adapters a row has, their weights, and
    their ranks. So `out` has no type, and a program serves adapters that it has never heard of.
    """

    x: In
    target: int
    out: Out


@dataclass(frozen=True)
class Linear(Op):
    """out = projection(x). `exact`: with float32 activations; otherwise a device may round them to 8 bits per block."""

    x: In
    projection: Projection
    out: Out
    exact: bool


@dataclass(frozen=True)
class GatedLinear(Op):
    """out = activation(gate(x)) * up(x), each with its bias and addend (SwiGLU, GEGLU: Shazeer 2020)."""

    x: In
    gate: Projection
    up: Projection
    activation: str
    out: Out
    exact: bool


@dataclass(frozen=True)
class Norm(Op):
    """The norm of s = x + skip + input_bias over groups of a row, and s itself.

    out = s / sqrt(mean(s ** 2) + epsilon) * weight (Zhang & Sennrich 2019), or, if `centred`,
    (s - mean) / sqrt(variance + epsilon) * weight + bias (Ba et al. 2016). A group is as wide as the weight.
    """

    x: In
    weight: Constant
    epsilon: float
    out: Out
    centred: bool = False
    bias: Constant = ""
    skip: In = ""
    input_bias: Constant = ""
    total: Out = ""


@dataclass(frozen=True)
class Unary(Op):
    """out = function(x, *parameters), element by element; the functions are those of `functions`."""

    function: str
    x: In
    out: Out
    parameters: tuple[float, ...] = ()


@dataclass(frozen=True)
class Binary(Op):
    """out = function(a, b), element by element; either may be a constant instead, one number or as wide as a row."""

    function: str
    a: In
    b: In
    out: Out
    a_constant: Constant = ""
    b_constant: Constant = ""


@dataclass(frozen=True)
class Gate(Op):
    """out = activation(gate) * up."""

    activation: str
    gate: In
    up: In
    out: Out


@dataclass(frozen=True)
class Rope:
    """Rotary tables (Su et al. 2021), [positions, rotary_dim / 2]; the long ones serve sequences that ask for them."""

    cos: Constant
    sin: Constant
    long_cos: Constant = ""
    long_sin: Constant = ""
    interleaved: bool = False


@dataclass(frozen=True)
class Attention(Op):
    """Keys and values into the layer's pages, then softmax(q k * scale) v of every row over its sequence.

    Queries and keys are normed and rotated on the way.

    Attributes:
        query: [T, heads * head_size], and behind it keys and values where `key` is "".
        layer: number of the cache layer. scale: factor on scores; 0 = 1 / sqrt(head_size).
        softcap: scores become softcap * tanh(score / softcap); 0 = off.
        window: a row sees its own token and window - 1 before it; -1 = all before it.
        chunk: a row sees the tokens of its own chunk of so many, up to its own (Llama 4); 0 = there are no chunks.
        sinks: float32 [heads], a score per head that takes part in the softmax with a value of zero.
        smooth_softmax: a sink of 0 for every head.
        q_norm, k_norm: float32 [head_size], weights of an RMS norm per head before the rotation; epsilon: its.
    """

    query: In
    key: In
    value: In
    out: Out
    layer: int
    heads: int
    kv_heads: int
    head_size: int
    v_head_size: int
    scale: float = 0.0
    softcap: float = 0.0
    window: int = -1
    chunk: int = 0
    sinks: Constant = ""
    smooth_softmax: bool = False
    rope: Rope | None = None
    q_norm: Constant = ""
    k_norm: Constant = ""
    epsilon: float = 1e-6


@dataclass(frozen=True)
class LinearRecurrence(Op):
    """A recurrent layer, column by column: out_t = state_t = decay_t * state_(t-1) + x_t over a sequence's rows.

    Before the first token of a sequence its state is zero. With a decay of 1 it is a running sum; gated layers
    (RG-LRU: De et al. 2024) compute the decay of each token.

    Attributes:
        layer: number of the cache layer, which has as many numbers as a row of x.
    """

    x: In
    decay: In
    out: Out
    layer: int


@dataclass(frozen=True)
class MoE(Op):
    """A mixture of experts: out = sum over the chosen of share * second(activation(first(x))).

    The `per_token` best of `scores` [T, experts] are chosen, of equal scores the first. Their shares are the softmax
    over the chosen ones if `normalized`, otherwise over all.

    Attributes:
        activation: "swiglu" (gate and up are alternating rows of `first`), or the name of a unary function.
        parameters: of swiglu alpha, beta, limit: gate * sigmoid(alpha * gate) * (up + beta), both kept within limit.
    """

    x: In
    scores: In
    out: Out
    per_token: int
    normalized: bool
    first: Projection
    second: Projection
    activation: str
    exact: bool
    parameters: tuple[float, ...] = ()


# --- programs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostNode:
    """A node that has no op: a function of arrays that runs on the host, between two parts of a program.

    Attributes:
        function: called with its inputs ("" and constants are filled in); returns its outputs in order.
        inputs: names of values and of `OpProgram.ids`; "" = not computed by the program. outputs: "" = not wanted.
        values: per input its value where `inputs` has "".
    """

    op_type: str
    label: str
    function: Callable[[Sequence[Any]], tuple[Any, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    values: tuple[Any, ...]

    def call(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Its outputs by name, from the values known so far."""
        given = [known[name] if name else value for name, value in zip(self.inputs, self.values, strict=True)]
        results = self.function(given)
        return {name: value for name, value in zip(self.outputs, results, strict=False) if name}


class Constants(Protocol):
    """The constants of a program."""

    def array(self, name: str) -> NDArray[Any]:
        """A constant's value."""

    def packed(self, weight: Weight) -> None:
        """A weight has been brought into a format of the device's: its constants will not be read again."""


@dataclass(frozen=True)
class OpProgram:
    """Ops (and what runs between them) in order.

    Attributes:
        types: of every value that ops read or make.
        ids: names under which host nodes find the step's integers.
        given: values that are not computed here. outputs: those that are wanted at the end.
    """

    parts: tuple[Op | HostNode, ...]
    types: Mapping[str, RowsType]
    constants: Constants
    outputs: tuple[str, ...]
    ids: Mapping[str, tuple[Ids, np.dtype[Any]]] = field(default_factory=dict)
    given: tuple[str, ...] = ()

    @property
    def ops(self) -> list[Op]:
        """The parts that are ops."""
        return [part for part in self.parts if isinstance(part, Op)]

    def apart(self) -> list[OpProgram]:
        """The same work, a program per part, so that every value can be seen."""
        ends = [(tuple(filter(None, part.inputs)), tuple(filter(None, part.outputs))) for part in self.parts]
        return [
            replace(self, parts=(part,), given=given, outputs=outputs)
            for part, (given, outputs) in zip(self.parts, ends, strict=True)
        ]


def projections(op: Op) -> tuple[Projection, ...]:
    """The products with weights in an op."""
    values = (getattr(op, one.name) for one in fields(op))
    return tuple(value for value in values if isinstance(value, Projection))


def weights_of(op: Op) -> tuple[Weight, ...]:
    """The weights that an op names."""
    table = (op.table,) if isinstance(op, Embedding) else ()
    return (*table, *(projection.weight for projection in projections(op)))


def constant_names(part: Op | Weight) -> list[str]:
    """Names of the constants that an op or a weight reads."""
    return _names(part, "constant")


def _names(op: Any, role: str) -> list[str]:
    names: list[str] = []
    type_: Any = type(op)
    for name, kind in _roles(type_):
        value = getattr(op, name)
        if kind == role and value and value not in names:
            names.append(value)
        elif kind == "nested" and value is not None and is_dataclass(value):
            names += [one for one in _names(value, role) if one not in names]
    return names


@cache
def _roles(kind: type) -> tuple[tuple[str, str], ...]:
    """The fields of a class, each "in", "out", "constant", "nested" or "plain"."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found = []
    for one in fields(kind):
        notes = getattr(hints[one.name], "__metadata__", ())
        plain = hints[one.name] in (str, int, float, bool) or one.name in ("parameters", "values")
        found.append((one.name, str(notes[0]) if notes else "plain" if plain else "nested"))
    return tuple(found)
