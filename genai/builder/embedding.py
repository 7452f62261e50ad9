"""Token embeddings and the language-model head, which may share one matrix."""

from __future__ import annotations

import numpy as np

from genai.quant.blocks import num_blocks

from .export import Export, hidden_dims
from .graph_writer import CONTRIB, FLOAT, UINT8
from .linear import Projection, write_blocks, write_float_tensor, write_linear, write_matrix
from .options import BITS, Precision
from .weights import row_chunks

TABLE = "model.embed_tokens"
POSITION_TABLE = "model.embed_positions"
POSITIONS = "position_ids"
_PATH = "/model/embed_tokens"


def head_projection(export: Export) -> Projection:
    """The matrix from hidden vectors to logits."""
    weight = TABLE if export.spec.tie_word_embeddings else "lm_head"
    return Projection("/lm_head", (weight,), (export.spec.vocab_size,), export.spec.hidden_size, ("lm_head",))


def write_embedding(export: Export) -> str:
    """Look up the vectors of input_ids; a matrix shared with the head is written here and found there."""
    vectors, spec, graph, dims = _write_vectors(export), export.spec, export.graph, hidden_dims(export.spec.hidden_size)
    if spec.embedding_scale != 1:
        vectors = graph.node("Mul", [vectors, graph.float32(spec.embedding_scale)], f"{_PATH}/Mul", dims)
    if spec.position_embeddings:
        name, shape = f"{POSITION_TABLE}.weight", (spec.context_length, spec.hidden_size)
        table = graph.initializer(name, shape, np.float32, row_chunks(name, export.weights.tensor(name, shape)))
        positions = graph.node("Gather", [table, POSITIONS], "/model/embed_positions/Gather", dims)
        vectors = graph.node("Add", [vectors, positions], "/model/embed_positions/Add", dims)
    return vectors


def write_head(export: Export, root: str) -> None:
    """From normed vectors to the graph's output `logits`."""
    spec, options = export.spec, export.options
    sequence: int | str = "sequence_length"
    if options.prune_lm_head:
        root, sequence = _write_last_position(export, root), 1
    dims = hidden_dims(spec.vocab_size, sequence=sequence)
    export.graph.output("logits", FLOAT, dims)
    steps = _logit_steps(spec.logit_scale, spec.logit_softcap)
    value = write_linear(
        export,
        head_projection(export),
        root,
        precision=options.head,
        bias=spec.head_bias,
        output=None if steps else "logits",
        sequence=sequence,
    )
    for index, (operator, name, operand) in enumerate(steps):
        inputs = [value] if operand is None else [value, export.graph.float32(operand)]
        output = "logits" if index == len(steps) - 1 else None
        value = export.graph.node(operator, inputs, f"/lm_head/{name}/{operator}", dims, output=output)


def _logit_steps(scale: float, cap: float) -> list[tuple[str, str, float | None]]:
    """Operator, name and second operand of what is done to the logits: scale, then cap * tanh(x / cap)."""
    steps: list[tuple[str, str, float | None]] = [("Mul", "scale", scale)] if scale != 1 else []
    if cap:
        steps += [("Div", "softcap", cap), ("Tanh", "softcap", None), ("Mul", "softcap", cap)]
    return steps


def _write_vectors(export: Export) -> str:
    spec, options = export.spec, export.options
    precision = options.embedding(tied=spec.tie_word_embeddings)
    shared = spec.tie_word_embeddings and precision == options.head
    if precision in BITS:
        head = head_projection(export)
        matrix = write_matrix(export, head, precision) if shared else _write_quantized_table(export, precision)
        return _write_quantized_lookup(export, matrix, BITS[precision])
    table = _write_shared_table(export, precision) if shared else _write_float_table(export, precision)
    return export.graph.node("Gather", [table, "input_ids"], f"{_PATH}/Gather", hidden_dims(spec.hidden_size))


def _write_shared_table(export: Export, precision: Precision) -> str:
    matrix = write_matrix(export, head_projection(export), precision)
    dims = [export.spec.vocab_size, export.spec.hidden_size]
    return export.graph.node("Transpose", matrix, f"{_PATH}/Transpose", dims, perm=[1, 0])


def _write_last_position(export: Export, root: str) -> str:
    graph, size, path = export.graph, export.spec.hidden_size, "/lm_head/prune"
    last = graph.node("Gather", [root, graph.int64(-1)], f"{path}/Gather", ["batch_size", size], axis=1)
    return graph.node("Unsqueeze", [last, graph.int64([1])], f"{path}/Unsqueeze", hidden_dims(size, sequence=1))


def _write_quantized_table(export: Export, precision: Precision) -> list[str]:
    table = Projection(_PATH, (TABLE,), (export.spec.vocab_size,), export.spec.hidden_size)
    return write_blocks(export, table, f"{TABLE}.weight", precision)


def _write_float_table(export: Export, precision: Precision) -> str:
    dims, name = (export.spec.vocab_size, export.spec.hidden_size), f"{TABLE}.weight"
    return write_float_tensor(export, name, dims, row_chunks(name, export.weights.tensor(name, dims)), precision)


def _write_quantized_lookup(export: Export, matrix: list[str], bits: int) -> str:
    graph, spec, block_size = export.graph, export.spec, export.options.block_size
    padded = num_blocks(spec.hidden_size, block_size) * block_size
    row_bytes = padded * bits // 8
    rows = graph.node(
        "Reshape",
        [matrix[0], graph.int64([spec.vocab_size, row_bytes])],
        f"{_PATH}/Reshape",
        [spec.vocab_size, row_bytes],
        element=UINT8,
    )
    vectors = graph.node(
        "GatherBlockQuantized",
        [rows, "input_ids", *matrix[1:]],
        f"{_PATH}/GatherBlockQuantized",
        hidden_dims(padded),
        domain=CONTRIB,
        bits=bits,
        block_size=block_size,
        gather_axis=0,
        quantize_axis=1,
    )
    if padded == spec.hidden_size:
        return vectors
    bounds = [graph.int64([0]), graph.int64([spec.hidden_size]), graph.int64([-1])]
    return graph.node("Slice", [vectors, *bounds], f"{_PATH}/Slice", hidden_dims(spec.hidden_size))
