"""Token embeddings and the language-model head, which may share one matrix."""

from __future__ import annotations

import numpy as np

from genai.quant.blocks import num_blocks

from .export import Export, hidden_dims
from .graph_writer import CONTRIB, FLOAT, UINT8
from .linear import Projection, write_linear, write_matrix
from .options import BITS
from .weights import row_chunks

TABLE = "model.embed_tokens"
_PATH = "/model/embed_tokens"


def head_projection(export: Export) -> Projection:
    """The matrix from hidden vectors to logits."""
    spec = export.spec
    return Projection("/lm_head", (TABLE if spec.tie_word_embeddings else "lm_head",), (spec.vocab_size,), spec.hidden_size)


def write_embedding(export: Export) -> str:
    """Look up the vectors of input_ids; a matrix shared with the head is written here and found there."""
    spec, options, graph = export.spec, export.options, export.graph
    precision = options.embedding(tied=spec.tie_word_embeddings)
    shared = spec.tie_word_embeddings and precision == options.head
    if precision != "fp32":
        projection = head_projection(export) if shared else _own_table(export)
        vectors = _write_quantized_lookup(export, write_matrix(export, projection, precision), BITS[precision])
    elif shared:
        matrix = write_matrix(export, head_projection(export), "fp32")
        dims = [spec.vocab_size, spec.hidden_size]
        table = graph.node("Transpose", matrix, f"{_PATH}/Transpose", dims, perm=[1, 0])
        vectors = _write_lookup(export, table)
    else:
        vectors = _write_lookup(export, _write_float_table(export))
    if spec.embedding_scale != 1:
        scale = graph.float32(spec.embedding_scale)
        vectors = graph.node("Mul", [vectors, scale], f"{_PATH}/Mul", hidden_dims(spec.hidden_size))
    return vectors


def write_head(export: Export, root: str) -> None:
    """From normed vectors to the graph's output `logits`."""
    graph, spec, options = export.graph, export.spec, export.options
    sequence: int | str = "sequence_length"
    if options.prune_lm_head:
        sequence, path = 1, "/lm_head/prune"
        last = graph.node(
            "Gather", [root, graph.int64(-1)], f"{path}/Gather", ["batch_size", spec.hidden_size], axis=1
        )
        dims = hidden_dims(spec.hidden_size, sequence=1)
        root = graph.node("Unsqueeze", [last, graph.int64([1])], f"{path}/Unsqueeze", dims)
    dims = hidden_dims(spec.vocab_size, sequence=sequence)
    graph.output("logits", FLOAT, dims)
    logits = None if spec.logit_softcap else "logits"
    scores = write_linear(
        export, head_projection(export), root, precision=options.head, output=logits, sequence=sequence
    )
    if spec.logit_softcap:
        cap, path = graph.float32(spec.logit_softcap), "/lm_head/softcap"
        scaled = graph.node("Div", [scores, cap], f"{path}/Div", dims)
        bounded = graph.node("Tanh", [scaled], f"{path}/Tanh", dims)
        graph.node("Mul", [bounded, cap], f"{path}/Mul", dims, output="logits")


def _own_table(export: Export) -> Projection:
    spec = export.spec
    return Projection(_PATH, (TABLE,), (spec.vocab_size,), spec.hidden_size)


def _write_float_table(export: Export) -> str:
    dims, name = (export.spec.vocab_size, export.spec.hidden_size), f"{TABLE}.weight"
    table = export.weights.tensor(name, dims)
    return export.graph.initializer(name, dims, np.float32, row_chunks(name, table))


def _write_lookup(export: Export, table: str) -> str:
    return export.graph.node(
        "Gather", [table, "input_ids"], f"{_PATH}/Gather", hidden_dims(export.spec.hidden_size)
    )


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
