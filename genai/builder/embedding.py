"""Token embeddings and the language-model head, which may share one matrix."""

from __future__ import annotations

import numpy as np

from genai.quant.blocks import num_blocks

from .export import Export, hidden_dims
from .graph_writer import CONTRIB, FLOAT, UINT8, Dims
from .linear import Projection, write_blocks, write_linear, write_matrix
from .options import BITS, Precision
from .weights import row_chunks

TABLE = "model.embed_tokens"
_PATH = "/model/embed_tokens"


def head_projection(export: Export) -> Projection:
    """The matrix from hidden vectors to logits."""
    weight = TABLE if export.spec.tie_word_embeddings else "lm_head"
    return Projection("/lm_head", (weight,), (export.spec.vocab_size,), export.spec.hidden_size)


def write_embedding(export: Export) -> str:
    """Look up the vectors of input_ids; a matrix shared with the head is written here and found there."""
    vectors, spec, graph = _write_vectors(export), export.spec, export.graph
    if spec.embedding_scale == 1:
        return vectors
    scale = graph.float32(spec.embedding_scale)
    return graph.node("Mul", [vectors, scale], f"{_PATH}/Mul", hidden_dims(spec.hidden_size))


def write_head(export: Export, root: str) -> None:
    """From normed vectors to the graph's output `logits`."""
    spec, options = export.spec, export.options
    sequence: int | str = "sequence_length"
    if options.prune_lm_head:
        root, sequence = _write_last_position(export, root), 1
    dims = hidden_dims(spec.vocab_size, sequence=sequence)
    export.graph.output("logits", FLOAT, dims)
    output = None if spec.logit_softcap else "logits"
    logits = write_linear(
        export, head_projection(export), root, precision=options.head, output=output, sequence=sequence
    )
    if spec.logit_softcap:
        _write_softcap(export, logits, dims)


def _write_vectors(export: Export) -> str:
    spec, options = export.spec, export.options
    precision = options.embedding(tied=spec.tie_word_embeddings)
    shared = spec.tie_word_embeddings and precision == options.head
    if precision != "fp32":
        head = head_projection(export)
        matrix = write_matrix(export, head, precision) if shared else _write_quantized_table(export, precision)
        return _write_quantized_lookup(export, matrix, BITS[precision])
    table = _write_shared_table(export) if shared else _write_float_table(export)
    return export.graph.node("Gather", [table, "input_ids"], f"{_PATH}/Gather", hidden_dims(spec.hidden_size))


def _write_shared_table(export: Export) -> str:
    matrix = write_matrix(export, head_projection(export), "fp32")
    dims = [export.spec.vocab_size, export.spec.hidden_size]
    return export.graph.node("Transpose", matrix, f"{_PATH}/Transpose", dims, perm=[1, 0])


def _write_last_position(export: Export, root: str) -> str:
    graph, size, path = export.graph, export.spec.hidden_size, "/lm_head/prune"
    last = graph.node("Gather", [root, graph.int64(-1)], f"{path}/Gather", ["batch_size", size], axis=1)
    return graph.node("Unsqueeze", [last, graph.int64([1])], f"{path}/Unsqueeze", hidden_dims(size, sequence=1))


def _write_softcap(export: Export, logits: str, dims: Dims) -> None:
    graph, path = export.graph, "/lm_head/softcap"
    cap = graph.float32(export.spec.logit_softcap)
    scaled = graph.node("Div", [logits, cap], f"{path}/Div", dims)
    bounded = graph.node("Tanh", [scaled], f"{path}/Tanh", dims)
    graph.node("Mul", [bounded, cap], f"{path}/Mul", dims, output="logits")


def _write_quantized_table(export: Export, precision: Precision) -> list[str]:
    table = Projection(_PATH, (TABLE,), (export.spec.vocab_size,), export.spec.hidden_size)
    return write_blocks(export, table, f"{TABLE}.weight", precision)


def _write_float_table(export: Export) -> str:
    dims, name = (export.spec.vocab_size, export.spec.hidden_size), f"{TABLE}.weight"
    table = export.weights.tensor(name, dims)
    return export.graph.initializer(name, dims, np.float32, row_chunks(name, table))


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
