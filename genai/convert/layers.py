"""Parts of a layer: linear layers (MatMul on floats or on block-quantised weights) and norms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import QuantizationError, num_blocks, pack_bits
from genai.quant.methods.rtn import quantize_blocks

from .graph_writer import CONTRIB, FLOAT, Dims, Export, hidden_dims
from .options import BITS, Precision
from .projection import Projection
from .spec import DecoderSpec
from .weights import Chunks, narrowed, not_finite
from .write_prequantized import as_stored, write_prequantized_linear

Matrices = Iterator[tuple[str, NDArray[Any]]]
Join = Callable[[list[NDArray[Any]]], NDArray[Any]]


def write_linear(
    export: Export,
    projection: Projection,
    root: str,
    *,
    precision: Precision,
    bias: bool = False,
    output: str | None = None,
    sequence: int | str = "sequence_length",
) -> str:
    """Write a projection of `root` and return the name of its result."""
    graph, name = export.graph, f"{projection.path}/MatMul"
    dims = hidden_dims(projection.outputs, sequence=sequence)
    precision = as_stored(export, projection, precision)
    inputs = [root] if precision == "blocks" else [root, *write_matrix(export, projection, precision)]
    if precision == "blocks":
        result = write_prequantized_linear(export, projection, root, dims, None if bias else output)
    elif precision not in BITS:
        result = graph.node("MatMul", inputs, name, dims, output=None if bias else output)
    else:
        result = graph.node(
            "MatMulNBits",
            inputs,
            f"{name}_Q{BITS[precision]}",
            dims,
            output=f"{name}/output_0" if bias or output is None else output,
            domain=CONTRIB,
            K=projection.columns,
            N=projection.outputs,
            bits=BITS[precision],
            **export.options.product_attributes,
        )
    if not bias:
        return result
    parts = zip(projection.biases or projection.weights, projection.rows, strict=True)
    vector = np.concatenate([export.weights.vector(f"{prefix}.bias", rows) for prefix, rows in parts])
    inputs = [result, graph.array(projection.path[1:].replace("/", ".") + ".Add.bias", vector)]
    return graph.node("Add", inputs, f"{projection.path}/Add", dims, output=output)


def write_split(export: Export, name: str, root: str, sizes: tuple[int, ...]) -> tuple[str, ...]:
    """Write a split of the last axis; return the names of the parts."""
    outputs = tuple(f"{name}/output_{index}" for index in range(len(sizes)))
    export.graph.nodes("Split", [root, export.graph.int64(sizes)], outputs, name, axis=-1)
    for output, size in zip(outputs, sizes, strict=True):
        export.graph.value(output, FLOAT, hidden_dims(size))
    return outputs


def write_matrix(export: Export, projection: Projection, precision: Precision, name: str = "") -> list[str]:
    """Write a projection's weights unless they are written; return the names of the matrix, scales and zero points."""
    options, name = export.options, name or projection.weight_name
    if precision not in BITS:
        chunks = Chunks(lambda: named_matrices(export, projection), transposed=True)
        return [write_float_tensor(export, name, (projection.columns, projection.outputs), chunks, precision)]
    bits = BITS[precision]
    names = [name + suffix for suffix in (f"_Q{bits}", "_scales", "_zero_points")]
    dims = (projection.outputs, num_blocks(projection.columns, options.block_size), options.block_size * bits // 8)
    return write_quantized(export, names, dims, named_matrices(export, projection), bits, np.concatenate)


def write_float_tensor(
    export: Export, name: str, dims: tuple[int, ...], chunks: Iterable[NDArray[np.float32]], precision: Precision
) -> str:
    """Write a matrix, unless it is written, as float32, or as float16 with a Cast; return the float32 value's name."""
    graph, wide = export.graph, f"{name}/float32"
    if precision != "fp16":
        return name if graph.has_initializer(name) else graph.initializer(name, dims, np.float32, chunks)
    if not graph.has_initializer(name):
        graph.initializer(name, dims, np.float16, (narrowed(name, chunk) for chunk in chunks))
    if not graph.has_node(f"{name}/Cast"):
        graph.node("Cast", [name], f"{name}/Cast", list(dims), output=wide, to=FLOAT)
    return wide


def write_quantized(
    export: Export, names: list[str], dims: tuple[int, ...], matrices: Matrices, bits: int, join: Join,
    row_bytes: int | None = None,
) -> list[str]:  # fmt: skip
    """Quantise matrices [rows, columns] according to the options, and write them unless they are already written.

    Args:
        names: names of the integers (of shape `dims`), the scales, and the zero points, if any.
        join: combines the arrays of all matrices into one.
        row_bytes: bytes of integers to write per row; None means whole blocks, with the last block padded.

    Returns:
        The names that were written.
    """
    graph, options = export.graph, export.options
    names = names[: 2 if options.symmetric else 3]
    if graph.has_initializer(names[0]):
        return names
    sides: tuple[list[NDArray[Any]], list[NDArray[Any]]] = ([], [])

    def integers() -> Iterator[NDArray[np.uint8]]:
        sizes = {"bits": bits, "block_size": options.block_size}
        for name, matrix in matrices:
            try:
                weight = quantize_blocks(matrix, **sizes, symmetric=options.symmetric, half_scales=options.half_scales)
            except QuantizationError as error:
                raise not_finite(name) from error
            sides[0].append(weight.scales)
            if weight.offsets is not None:
                sides[1].append(pack_bits(weight.offsets, bits))
            yield np.ascontiguousarray(weight.data[:, :row_bytes])

    graph.initializer(names[0], dims, np.uint8, integers())
    for name, arrays in zip(names[1:], sides, strict=False):
        graph.array(name, join(arrays))
    return names


def named_matrices(export: Export, projection: Projection) -> Matrices:
    """Yield the matrices of a projection with their names."""
    for prefix, rows in zip(projection.weights, projection.rows, strict=True):
        name = f"{prefix}.weight"
        yield name, export.weights.tensor(name, (rows, projection.columns))


_OPERATORS = {"rms": "SimplifiedLayerNormalization", "layer": "LayerNormalization"}


@dataclass(frozen=True)
class Residual:
    """The residual stream: the sum of `stream` and `update`. The addition is fused into the next norm."""

    stream: str
    update: str | None = None


def write_norm(export: Export, residual: Residual, path: str, *, last: bool = False) -> tuple[str, Residual]:
    """Add the pending update and normalise the sum; return the normalised vectors and the new stream.

    Args:
        path: path of the norm, such as "/model/layers.0/input_layernorm".
        last: True for the final norm. Every decoder has this norm, and the stream is not read after it.
    """
    graph, dims = export.graph, hidden_dims(export.spec.hidden_size)
    if residual.update is None:
        has_norm = last or export.spec.pre_norms
        return write_plain_norm(export, residual.stream, path, last=last) if has_norm else residual.stream, residual
    if not export.spec.pre_norms and not last:
        stream = graph.node("Add", [residual.stream, residual.update], f"{path}/Add", dims)
        return stream, Residual(stream)
    normed, stream = f"{path}/output_0", f"{path}/output_3"
    outputs = [normed] if last else [normed, "", "", stream]
    graph.nodes(
        f"Skip{_OPERATORS[export.spec.norm]}",
        [residual.stream, residual.update, *_write_parameters(export, path, last=last)],
        outputs,
        f"{path}/SkipLayerNorm",
        domain=CONTRIB,
        epsilon=float(export.spec.rms_norm_eps),
    )
    for output in filter(None, outputs):
        graph.value(output, FLOAT, dims)
    return normed, Residual(stream)


def write_plain_norm(export: Export, root: str, path: str, *, last: bool = False) -> str:
    """Normalise a value, to which nothing is added first."""
    parameters = _write_parameters(export, path, last=last)
    return write_bare_norm(export, [root, *parameters], path, hidden_dims(export.spec.hidden_size))


def write_query_key_norm(export: Export, spec: DecoderSpec, layer: int, root: str, which: str, heads: int) -> str:
    """Normalise queries ("q_norm"), keys ("k_norm") or values ("v_norm"), per head or over all heads together.

    Args:
        spec: the specification with the layer's sizes.
    """
    graph, path = export.graph, f"/model/layers.{layer}/attn/{which}"
    size, wide = spec.head_size, hidden_dims(heads * spec.head_size)

    def learned(width: int) -> list[str]:
        source, name = f"model.layers.{layer}.self_attn.{which}", f"model.layers.{layer}.attn.{which}.layernorm"
        return _write_learned(export, name, source, width, biased=spec.qk_norm_biases)

    if spec.qk_norm_scope == "all":
        return write_bare_norm(export, [root, *learned(heads * size)], path, wide)
    rows = f"sequence_length * num_{'attention' if which == 'q_norm' else 'key_value'}_heads"
    dims: Dims = ["batch_size", rows, size]
    split = graph.node("Reshape", [root, graph.int64([0, -1, size])], f"{path}/Reshape_1", dims)
    apart, plain = spec.qk_norm_scope == "heads", which == "v_norm" or not spec.qk_norm_weights
    parameters = [_write_ones(export, size)] if apart or plain else learned(size)
    operator = f"{path}/{_OPERATORS[spec.norm]}"
    normed = write_bare_norm(export, [split, *parameters], operator, dims, name=operator)
    joined = graph.node("Reshape", [normed, graph.int64([0, -1, heads * size])], f"{path}/Reshape_2", wide)
    if plain or not apart:
        return joined
    return graph.node("Mul", [joined, *learned(heads * size)], f"{path}/Mul", wide)


def write_bare_norm(
    export: Export, inputs: list[str], path: str, dims: Dims, *, name: str = "", epsilon: float | None = None
) -> str:
    """Write a norm of the last axis of the first input, with the other inputs as its parameters."""
    epsilon = export.spec.rms_norm_eps if epsilon is None else epsilon
    attributes: dict[str, Any] = {"epsilon": float(epsilon), "axis": -1, "stash_type": 1}
    operator, output = _OPERATORS[export.spec.norm], f"{path}/output_0"
    return export.graph.node(operator, inputs, name or f"{path}/LayerNorm", dims, output=output, **attributes)


def _write_parameters(export: Export, path: str, *, last: bool = False) -> list[str]:
    """Write a norm's parameters; return the name of its weight and, if the norm has a bias, the name of the bias."""
    size, name = export.spec.hidden_size, path[1:].replace("/", ".")
    if not export.spec.norm_weights:
        return [_write_ones(export, size)]
    return _write_learned(export, name, "model.norm" if last else name, size, biased=export.spec.norm_biases)


def _write_learned(export: Export, name: str, source: str, size: int, *, biased: bool) -> list[str]:
    """Write a norm's weight, including the offset, and its bias; return their names."""
    weight = export.weights.vector(f"{source}.weight", size) + np.float32(export.spec.norm_weight_offset)
    names = [export.graph.array(f"{name}.weight", weight)]
    if biased:
        names.append(export.graph.array(f"{name}.bias", export.weights.vector(f"{source}.bias", size)))
    return names


def _write_ones(export: Export, size: int) -> str:
    """Write a weight of ones for a norm without learned weights, and return its name."""
    name = f"model.constants.ones.{size}"
    return name if export.graph.has_initializer(name) else export.graph.array(name, np.ones(size, np.float32))
