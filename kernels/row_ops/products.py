"""MatMulNBits, MatMul with constant weights, and pairs of them behind a gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..block_matrix import BlockMatrix
from ..cpu.products.activations import Quantized, quantize_call, quantized_in, quantized_size, widen_call
from ..cpu.products.calls import Matrix, Second, few_call, has_many, many_call
from ..cpu.products.dense import DenseMatrix, pack_dense
from ..cpu.products.packing import pack_matrix
from ..cpu.products.tile_rows import RowTiles, row_tiles_call, row_tiles_in, row_tiles_size
from ..cpu.tape.context import Word
from ..cpu.tape.program import Rows
from ..registry import NodeSpec
from .base import RowType, ValueType, row_input, rule
from .writer import Writer

# MatMulNBits accuracy levels: 0 unset, 1 fp32, 2 fp16, 3 bf16, 4 int8 activations. Levels 2 and 3 allow less than
# fp32, so fp32 serves them; unset means int8.
_FLOAT_LEVELS = (1, 2, 3)


@dataclass(frozen=True)
class Product:
    """x @ matrix.T + bias + addend; with a second matrix, gate(x @ matrix.T + bias) * (x @ second.T + its bias)."""

    x: str
    out: str
    type: RowType
    matrix: Matrix
    quantized: bool
    bias: NDArray[np.float32] | None = None
    addend: str = ""
    gate: str = ""
    second: Second | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.x, self.addend) if self.addend else (self.x,)

    @property
    def outputs(self) -> Mapping[str, RowType]:
        return {self.out: self.type}

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The weights."""
        return (self.matrix,) if self.second is None else (self.matrix, self.second.matrix)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        return sum(matrix.nbytes for matrix in self.matrices)

    @property
    def num_weights(self) -> int:
        """Numbers in the matrices."""
        return sum(matrix.rows * matrix.columns for matrix in self.matrices)

    @property
    def per_token(self) -> bool:
        """Whether every token goes through it, or only those whose logits are wanted."""
        return self.type.counted == Word.TOKENS

    def write(self, writer: Writer) -> None:
        addend = writer.rows(self.addend) if self.addend else None
        apart = self.quantized and self.type.counted == Word.TOKENS and has_many(self.matrix)
        x, source = self._activations(writer, Word.FEW if apart else self.type.counted)
        sources: list[Any] = [source, *([self.addend] if self.addend else [])]
        options: dict[str, Any] = {"bias": self.bias, "addend": addend, "gate": self.gate, "gated": self.second}
        if apart:
            assert isinstance(self.matrix, BlockMatrix)
            tiles, tiles_source = _row_tiles(writer, self.x, writer.rows(self.x), self.matrix)
            sources.append(tiles_source)
        out = writer.make(self.out, self.type)
        calls = [few_call(x, self.matrix, out, **options)]
        if apart:  # it writes other rows than the first call: threads need not meet between the two
            calls.append(many_call(tiles, self.matrix, out, **options))
        writer.run([calls], sources, [self.out])

    def _activations(self, writer: Writer, counted: Word) -> tuple[Quantized | Rows, Any]:
        """What the product of few rows reads, made from x if it is not there yet, and its name among the values."""
        x = writer.rows(self.x)
        if self.quantized:
            assert isinstance(self.matrix, BlockMatrix)
            return _quantized(writer, self.x, x, self.matrix, counted)
        if x.width == self.matrix.padded_columns:
            return x, self.x
        return _widened(writer, self.x, x, self.matrix.padded_columns)


def _row_tiles(writer: Writer, name: str, x: Rows, matrix: BlockMatrix) -> tuple[RowTiles, Any]:
    columns = matrix.padded_columns
    key = ("row tiles", columns)

    def make() -> RowTiles:
        size = row_tiles_size(columns, writer.capacity[x.counted])
        made = row_tiles_in(writer.memory(key, name, size).memory, columns)
        writer.run([[row_tiles_call(x, made)]], [name], [(name, key)])
        return made

    return writer.derived(name, key, make), (name, key)


def _quantized(writer: Writer, name: str, x: Rows, matrix: BlockMatrix, counted: Word) -> tuple[Quantized, Any]:
    key = ("quantized", counted, matrix.blocks, matrix.layout.block_size, matrix.layout.zero_points, matrix.layout.bits)

    def make() -> Quantized:
        size = quantized_size(matrix, writer.capacity[x.counted])
        made = quantized_in(writer.memory(key, name, size).memory, matrix, counted)
        writer.run([[quantize_call(x, made)]], [name], [(name, key)])
        return made

    return writer.derived(name, key, make), (name, key)


def _widened(writer: Writer, name: str, x: Rows, columns: int) -> tuple[Rows, Any]:
    """x with zeros up to at least `columns`, as a value that says it is as wide as wanted."""
    stride = -(-4 * columns // 64) * 64
    key = ("widened", stride)

    def make() -> Rows:
        memory = writer.memory(key, name, stride * writer.capacity[x.counted])
        wide = Rows(memory.address, stride, stride // 4, x.counted, memory)
        writer.run([[widen_call(x, wide)]], [name], [(name, key)])
        return wide

    return writer.derived(name, key, make).columns(0, columns), (name, key)


@rule("MatMulNBits", domain="com.microsoft")
def matmul_nbits(spec: NodeSpec, types: Sequence[ValueType]) -> Product | None:
    """x @ W^T + bias + addend (input 6, ours: the place of a low-rank adapter's output)."""
    x, attributes = row_input(types, 0), spec.attributes
    n, k, bits = int(attributes["N"]), int(attributes["K"]), int(attributes.get("bits", 4))
    if x is None or x.width != k or spec.has(4) or int(attributes.get("weight_prepacked", 0)):
        return None
    if spec.has(6) and row_input(types, 6) != x.with_width(n):
        return None
    block = int(attributes["block_size"])
    points = spec.constant(3) if spec.has(3) else None
    matrix: BlockMatrix = spec.pack(
        (1, 2, 3),
        f"block_matrix[{n},{k}]:{bits}:{block}",
        lambda: pack_matrix(
            spec.constant(1), spec.constant(2), points, n=n, k=k, bits=bits, block_size=block,
            walkers=spec.options.get("walkers"),
            arena=spec.options.get("arena"),
        ),
    )  # fmt: skip
    exact = spec.options.get("accuracy") == "fp32" or int(attributes.get("accuracy_level", 0)) in _FLOAT_LEVELS
    bias = np.ascontiguousarray(spec.constant(5), np.float32) if spec.has(5) else None
    addend = spec.inputs[6] if spec.has(6) else ""
    return Product(spec.inputs[0], spec.outputs[0], x.with_width(n), matrix, not exact, bias, addend)


@rule("MatMul")
def matmul(spec: NodeSpec, types: Sequence[ValueType]) -> Product | None:
    """Rows times a constant matrix [K, N] of float32, float16 or bfloat16."""
    x, weight = row_input(types, 0), spec.constants[1]
    if x is None or weight is None or weight.ndim != 2 or weight.shape[0] != x.width or x.last != x.width:
        return None
    if weight.dtype.name not in ("float32", "float16", "bfloat16"):
        return None
    matrix: DenseMatrix = spec.pack((1,), f"dense{list(weight.shape)}", lambda: pack_dense(weight))
    return Product(spec.inputs[0], spec.outputs[0], x.with_width(matrix.rows), matrix, quantized=False)


def fuse_gate(gate: Product, gated: Product, out: str, activation: str) -> Product | None:
    """activation(gate) * gated as one product, where the two multiply the same rows by like matrices."""
    alike = type(gate.matrix) is type(gated.matrix) and (gate.matrix.rows, gate.matrix.columns) == (
        gated.matrix.rows,
        gated.matrix.columns,
    )
    same_layout = getattr(gate.matrix, "layout", None) == getattr(gated.matrix, "layout", None)
    plain = not (gate.addend or gated.addend or gate.gate or gated.gate)
    if not (alike and same_layout and plain and gate.x == gated.x and gate.quantized == gated.quantized):
        return None
    second = Second(gated.matrix, gated.bias)
    return Product(gate.x, out, gate.type, gate.matrix, gate.quantized, gate.bias, "", activation, second)
