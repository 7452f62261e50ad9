"""Ops: the operations of a decoder over rows of tokens, as plain data (one frozen dataclass per operation).

The graph side creates ops (`genai.ops`) and a device lowers them (`kernels.cpu`, `kernels.reference`). An op refers to
values and constants by name and never holds an address or a function. Values consist of float32 rows, one per token of
the step (or one per row of requested logits); `OpProgram.types` holds the types of values. In the shapes below, T is
the number of rows of a value.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from .weights import QuantizationError, QuantizedWeight, WeightFormat

# Names of a value that an op reads or writes ("" = absent), and of a constant that an op reads.
In = Annotated[str, "in"]
Out = Annotated[str, "out"]
Constant = Annotated[str, "constant"]
# Names of any number of values that an op reads.
Ins = Annotated[tuple[str, ...], "ins"]


class Per(Enum):
    """The unit for which a value has one row."""

    TOKEN = "token"
    LOGITS = "row of logits that is wanted"


class Ids(Enum):
    """Integers that every step supplies, one per token."""

    TOKENS = "token ids"
    POSITIONS = "positions in the sequence"
    TYPES = "token types"


@dataclass(frozen=True)
class RowsType:
    """The type of a value with one float32 row per token (or per row of logits).

    Attributes:
        shape: shape in the graph, with -1 for the number of rows, such as (1, -1, 2048).
        width: numbers per row: the size of the last axis, or a multiple of it if a row holds several vectors.
        per: unit for which the value has one row.
    """

    shape: tuple[int, ...]
    width: int
    per: Per = Per.TOKEN

    @property
    def last(self) -> int:
        """The size of the last axis."""
        return self.shape[-1]

    def with_width(self, width: int) -> RowsType:
        """Return the type of the same rows with `width` numbers each, all in the last axis."""
        return replace(self, shape=(*self.shape[:-1], width), width=width)


# --- weights -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockWeight:
    """A quantised matrix [rows, columns], described by the names of its constants ("" = absent).

    Equal weights are packed once, so a tied embedding and head share memory.

    Attributes:
        data: codes, uint8; in a mixture, the codes of the `experts` matrices follow one another.
        scales: floats, one per group or one per row.
        offsets: packed integers. Without `offset_scales`, they are zero points, which are scaled by `scales` and may
            also be floats.
        format: number of bits of each part, and the number of columns that share it.
        experts: number of matrices in a mixture of experts; 0 = a single matrix outside a mixture.
        interleaved: True if the rows of a gate alternate with the rows that it gates.
        multipliers: packed integers.
        offset_scales: floats.
        grid: float32 [2 ** bits], the value of each code. If `grid` is absent, `values` is the grid; if both are
            absent, the grid has steps of one.
        values: grid as numbers instead of a constant.
        flat_block: block size of bitsandbytes, or 0: all rows form one sequence of codes, in which blocks can extend
            over the end of a row, and the first of two codes in a byte is in the high bits. The format's block size
            divides `flat_block` and the number of columns.
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
    flat_block: int = 0

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        return self.format.bits

    @property
    def block_size(self) -> int:
        """The number of columns of a block."""
        return self.format.block_size

    @property
    def is_uniform(self) -> bool:
        """True if the format is that of onnxruntime: integers, a scale, and optionally a zero point."""
        return not (self.grid or self.values or self.multipliers or self.offset_scales)

    def load(self, array: Callable[[str], NDArray[Any]]) -> QuantizedWeight:
        """Return the matrix. Its constants must not be in onnxruntime's block format (see `is_uniform`).

        Args:
            array: function that returns a constant by name.

        Raises:
            QuantizationError: an array has the wrong type or shape.
        """
        names = (self.data, self.scales, self.multipliers, self.offset_scales, self.offsets)
        data, scales, multipliers, offset_scales, offsets = (array(name) if name else None for name in names)
        grid = array(self.grid) if self.grid else np.array(self.values, np.float32)
        assert data is not None and scales is not None
        if self.flat_block:
            data, scales = self._by_rows(data, scales)
        return QuantizedWeight.from_packed(
            self.format, self.rows, self.columns, data, grid, scales, multipliers, offset_scales, offsets
        )

    def _by_rows(self, data: NDArray[Any], scales: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the codes and the scales of bitsandbytes as rows, with one scale per block of the format."""
        count, size = self.rows * self.columns, self.block_size
        num_scales = -(-count // self.flat_block)
        if data.size != count // 2 or data.dtype != np.uint8 or scales.size != num_scales:
            raise QuantizationError(
                f"codes are {data.dtype} {list(data.shape)}, scales {list(scales.shape)}, expected uint8 of "
                f"{count // 2} bytes, and {num_scales} scales"
            )
        data = data.reshape(self.rows, -1)
        if self.flat_block != size:
            scales = scales.reshape(-1)[np.arange(0, count, size) // self.flat_block]
        return data >> np.uint8(4) | data << np.uint8(4), scales.reshape(self.rows, -1)


@dataclass(frozen=True)
class DenseWeight:
    """A matrix of float32, float16 or bfloat16, stored as [columns, rows], or as [rows, columns] if `transposed`."""

    data: Constant
    rows: int
    columns: int
    transposed: bool = False
    experts: int = 0
    interleaved: bool = False


Weight = BlockWeight | DenseWeight


@dataclass(frozen=True)
class LoraDelta:
    """The term hidden @ B.T that each low-rank adapter of a row (Hu et al. 2021) adds to a linear layer.

    Attributes:
        hidden: output of `LoraShrink` for this target.
        target: index of the linear layer among the linear layers of the program that adapters can change.
    """

    hidden: In
    target: int


@dataclass(frozen=True)
class Projection:
    """The linear layer x @ weight.T + bias + addend + delta.

    Attributes:
        bias: float32 [rows], or [experts, rows] for experts.
        addend: rows as wide as the result.
        delta: term of the adapters; None = adapters cannot change this layer.
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
        op_type: operator type in the graph.
    """

    op_type: str = field(default="", kw_only=True, compare=False)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that the op reads."""
        return tuple(_names(self, "in"))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values that the op writes."""
        return tuple(_names(self, "out"))


@dataclass(frozen=True)
class Embedding(Op):
    """out = table[ids] as float32."""

    table: Weight
    ids: Ids
    out: Out


@dataclass(frozen=True)
class SliceColumns(Op):
    """Columns [first, first + width of out) of every row, or all columns in another shape. No arithmetic is needed."""

    x: In
    first: int
    out: Out


@dataclass(frozen=True)
class SelectColumns(Op):
    """out[:, i] = x[:, order[i]], where `order` is a constant, int64 [width of out]."""

    x: In
    order: Constant
    out: Out


@dataclass(frozen=True)
class JoinColumns(Op):
    """out = the columns of several values, next to each other."""

    parts: Ins
    out: Out


@dataclass(frozen=True)
class LogitsRows(Op):
    """out = x[logits_indices]: the rows whose logits are requested."""

    x: In
    out: Out


@dataclass(frozen=True)
class LoraShrink(Op):
    """out = weight * (x @ A.T) for each of a row's adapters that changes the linear layer `target` (see `LoraDelta`).

    Each step supplies the adapters of every row with their weights and ranks, and so determines the width of `out`,
    which may be 0. Therefore `out` has no type, and a program works with any adapter that is loaded after the program
    was compiled.
    """

    x: In
    target: int
    out: Out


@dataclass(frozen=True)
class Linear(Op):
    """out = projection(x). Unless `exact`, a device may quantise the float32 activations to 8 bits per block.

    Attributes:
        activation: function of a `Unary` op without parameters that a device has fused; "" = none.
        gate: half of the projection's columns that is the gate if a device has fused a gate, "first" or "second": out =
            activation(gate) * the other half. "" = no gate.
    """

    x: In
    projection: Projection
    out: Out
    exact: bool
    activation: str = ""
    gate: str = ""


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
    """The norm of s = x + skip + input_bias over groups of a row (`out`), and s itself (`total`).

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
    """out = function(x, *parameters), elementwise. `kernels.reference.functions` defines the functions."""

    function: str
    x: In
    out: Out
    parameters: tuple[float, ...] = ()


@dataclass(frozen=True)
class Binary(Op):
    """out = function(a, b), elementwise. Either operand may be a constant: one number, or one number per column."""

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
    """Rotary tables (Su et al. 2021), [positions, rotary_dim / 2]. `StepContext.rope_table` selects the long ones."""

    cos: Constant
    sin: Constant
    long_cos: Constant = ""
    long_sin: Constant = ""
    interleaved: bool = False


@dataclass(frozen=True)
class Attention(Op):
    """Write keys and values to the layer's pages, then compute softmax(q k * scale) v for every row over its sequence.

    Queries and keys are normalised and rotated first.

    Attributes:
        query: [T, heads * head_size], followed in each row by the keys and values if `key` and `stored` are "".
        layer: index of the cache layer.
        scale: factor on scores; 0 = 1 / sqrt(head_size).
        softcap: limit of scores, which become softcap * tanh(score / softcap); 0 = off.
        causal: True if a row sees only tokens up to its own token. False (encoders): a row also sees later tokens of
            its sequence, so a step must contain whole sequences, and all rows have prefill numerics.
        window: number of tokens that a row sees: its own token and the window - 1 tokens before it; if not `causal`,
            also the window - 1 tokens after it; -1 = no limit.
        chunk: number of tokens in a chunk (Llama 4). A row sees the tokens of its chunk up to its own token; 0 = off.
        sinks: float32 [heads], an additional score per head in the softmax, with a value of zero.
        smooth_softmax: True if every head has a sink of 0.
        bias: float32 [heads, 2 * n - 1], a number per head and distance that is added to the scaled score of key j for
            the row at position i: bias[head, j - i + n - 1] (T5, MPNet, ALiBi). Sequences have at most n tokens.
            Only if not `causal`.
        q_norm, k_norm: float32 [head_size], weights of an RMS norm per head before the rotation.
        epsilon: epsilon of that norm.
        stored: result of the op that has already written the keys and values of these rows to the pages of `layer`;
            this op then only reads them, and `key` and `value` are "" (Gemma 3n).
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
    causal: bool = True
    window: int = -1
    chunk: int = 0
    sinks: Constant = ""
    smooth_softmax: bool = False
    bias: Constant = ""
    rope: Rope | None = None
    q_norm: Constant = ""
    k_norm: Constant = ""
    epsilon: float = 1e-6
    stored: In = ""

    @property
    def is_packed(self) -> bool:
        """True if each row of `query` also holds the keys and values."""
        return not self.key and not self.stored


@dataclass(frozen=True)
class LinearRecurrence(Op):
    """A recurrent layer, elementwise: out_t = state_t = decay_t * state_(t-1) + x_t over the rows of a sequence.

    The state before the first token of a sequence is zero. With a decay of 1 the layer is a running sum; gated layers
    (RG-LRU: De et al. 2024) compute the decay of each token.

    Attributes:
        layer: index of the cache layer. Its states have as many numbers as a row of x.
    """

    x: In
    decay: In
    out: Out
    layer: int


@dataclass(frozen=True)
class CausalConv(Op):
    """A depthwise convolution over the tokens of a sequence, as in Mamba (Gu & Dao 2023) and LFM2.

    out[t] = bias + sum over j of weight[:, 0, j] * x[t - (kernel - 1 - j) * dilation], where the rows before the first
    token of the sequence are zero. The state is the last (kernel - 1) * dilation rows of x, in order.

    Attributes:
        weight: float32 [channels, 1, kernel], one kernel per channel.
        bias: float32 [channels].
        layer: index of the cache layer.
        dilation: distance between the rows that a result reads.
    """

    x: In
    weight: Constant
    out: Out
    layer: int
    bias: Constant = ""
    dilation: int = 1


@dataclass(frozen=True)
class LinearAttention(Op):
    """Linear attention with a matrix as its state, per value head: S [head_size, v_head_size].

    S = exp(decay) * S (no decay: S is unchanged), then S += outer(key, beta * (value - key @ S)) with the delta rule
    (Gated DeltaNet: Yang et al. 2024), or S += outer(key, value) without it; out = scale * (query @ S). Each row
    updates the state of its sequence, which is zero before the first token.

    If there are more value heads than key heads or query heads, consecutive value heads share one of these. If there
    are more query heads than value heads, consecutive query heads read the state of one value head.

    Attributes:
        query: [T, heads * head_size].
        key: [T, key_heads * head_size].
        value: [T, value_heads * v_head_size].
        decay: logarithm of the decay, [T, value_heads], or [T, value_heads * head_size] for one decay per row of S;
            "" = no decay.
        beta: step of the delta rule, [T, value_heads] or [T, 1]; "" = no delta rule.
        out: [T, max(heads, value_heads) * v_head_size].
        layer: index of the cache layer.
        scale: factor on the result.
    """

    query: In
    key: In
    value: In
    out: Out
    layer: int
    heads: int
    key_heads: int
    value_heads: int
    head_size: int
    v_head_size: int
    scale: float
    decay: In = ""
    beta: In = ""

    @property
    def out_heads(self) -> int:
        """The number of heads of the result."""
        return max(self.heads, self.value_heads)


GATES = {"swiglu": "quick_gelu", "geglu": "gelu_tanh"}
"""The unary function of each gate of experts. The rows of gate and up alternate in the first layer."""


@dataclass(frozen=True)
class MoE(Op):
    """A mixture of experts: out = sum over the selected experts of share * second(activation(first(x))).

    The `per_token` experts with the highest `scores` [T, experts] are selected; among equal scores, the first wins.
    Their shares are a softmax over the selected experts if `normalized`, otherwise over all experts.

    Attributes:
        activation: a key of GATES (the rows of gate and up alternate in `first`), or the name of a unary function.
        parameters: parameters of swiglu: alpha, beta and limit in gate * sigmoid(alpha * gate) * (up + beta). `gate` is
            clipped to at most limit, and `up` is clipped to [-limit, limit].
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
        label: name of the node in messages.
        function: called with the list of all inputs, constants included; returns the outputs in order.
        inputs: names of values and of `OpProgram.ids`; "" = the value of the input is in `values`.
        outputs: names of values; "" = unused.
        values: values of the inputs whose names in `inputs` are "".
    """

    op_type: str
    label: str
    function: Callable[[Sequence[Any]], tuple[Any, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    values: tuple[Any, ...]

    def call(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the node from the values known so far and return its outputs by name."""
        given = [known[name] if name else value for name, value in zip(self.inputs, self.values, strict=True)]
        results = self.function(given)
        return {name: value for name, value in zip(self.outputs, results, strict=False) if name}


class Constants(Protocol):
    """The constants of a program."""

    def array(self, name: str) -> NDArray[Any]:
        """Return the value of a constant."""

    def packed(self, weight: Weight) -> None:
        """Record that the device has packed a weight into its own format and will not read its constants again."""


@runtime_checkable
class StoredConstants(Constants, Protocol):
    """Constants that are stored in files. Programs with the same constants can share the packed weights."""

    def origin(self, name: str) -> Hashable:
        """Return a value that identifies the bytes of a constant, or None if the constant is not stored in a file."""


def origin_of(weight: Weight, constants: Constants) -> Hashable:
    """Return a value that is equal for weights with the same format and bytes; None if the bytes are in no file."""
    if not isinstance(constants, StoredConstants):
        return None
    origins = {name: constants.origin(name) for name in constant_names(weight)}
    if not origins or None in origins.values():
        return None
    values = (getattr(weight, one.name) for one in fields(weight))
    return type(weight).__name__, *(origins.get(value, value) for value in values)


@dataclass(frozen=True)
class OpProgram:
    """Ops, and the host nodes between them, in order of execution.

    Attributes:
        types: type of every value that an op reads or writes.
        outputs: names of the values to return.
        ids: names by which host nodes refer to the step's integers.
        given: names of the values that the caller supplies.
        whole_sequences: True if every step contains only whole sequences with prefill numerics (encoders). A device may
            then round all rows as it prefers for many rows.
    """

    parts: tuple[Op | HostNode, ...]
    types: Mapping[str, RowsType]
    constants: Constants
    outputs: tuple[str, ...]
    ids: Mapping[str, tuple[Ids, np.dtype[Any]]] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    whole_sequences: bool = False

    @property
    def ops(self) -> list[Op]:
        """The parts of the program that are ops."""
        return [part for part in self.parts if isinstance(part, Op)]

    def apart(self) -> list[OpProgram]:
        """Return one program per part, so that every intermediate value can be inspected."""
        ends = [(tuple(filter(None, part.inputs)), tuple(filter(None, part.outputs))) for part in self.parts]
        return [
            replace(self, parts=(part,), given=given, outputs=outputs)
            for part, (given, outputs) in zip(self.parts, ends, strict=True)
        ]


def projections(op: Op) -> tuple[Projection, ...]:
    """Return the linear layers of an op."""
    values = (getattr(op, one.name) for one in fields(op))
    return tuple(value for value in values if isinstance(value, Projection))


def weights_of(op: Op) -> tuple[Weight, ...]:
    """Return the weights of an op."""
    table = (op.table,) if isinstance(op, Embedding) else ()
    return (*table, *(projection.weight for projection in projections(op)))


def constant_names(part: Op | Weight) -> list[str]:
    """Return the names of the constants that an op or a weight reads."""
    return _names(part, "constant")


def _names(op: Any, role: str) -> list[str]:
    names: list[str] = []
    type_: Any = type(op)
    for name, kind in _roles(type_):
        value = getattr(op, name)
        if kind == role and value and value not in names:
            names.append(value)
        elif kind == "ins" and role == "in":
            names += [one for one in dict.fromkeys(value) if one not in names]
        elif kind == "nested" and value is not None and is_dataclass(value):
            names += [one for one in _names(value, role) if one not in names]
    return names


@cache
def _roles(kind: type) -> tuple[tuple[str, str], ...]:
    """Return the name of each field of a class, with its role: "in", "ins", "out", "constant", "nested" or
    "plain"."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found = []
    for one in fields(kind):
        notes = getattr(hints[one.name], "__metadata__", ())
        plain = hints[one.name] in (str, int, float, bool) or one.name in ("parameters", "values")
        found.append((one.name, str(notes[0]) if notes else "plain" if plain else "nested"))
    return tuple(found)
