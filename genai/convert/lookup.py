"""Look-ups of rows in a table of embeddings: of floats, or of block-quantised weights."""

from __future__ import annotations

from genai.kernels.weights import num_blocks

from .graph_writer import CONTRIB, UINT8, Export, hidden_dims
from .layers import named_matrices, write_float_tensor, write_matrix
from .options import BITS, Precision
from .projection import Projection
from .weights import Chunks
from .write_prequantized import as_stored, write_prequantized_embedding

IDS = "input_ids"


def write_lookup(export: Export, table: Projection, precision: Precision, shared: Projection | None = None) -> str:
    """Write the rows of a table for the tokens of a step, and return the name of the result.

    Args:
        table: the matrix; its path is the path of the nodes.
        shared: the projection that multiplies by the same matrix with the same precision, if any. The look-up then
            reads the projection's arrays.
    """
    graph, path, name = export.graph, table.path, f"{table.weights[0]}.weight"
    precision = as_stored(export, table, precision)
    if precision == "blocks":
        return write_prequantized_embedding(export, shared or table, IDS, path)
    matrix = write_matrix(export, shared, precision) if shared else []
    if precision in BITS:
        matrix = matrix or write_matrix(export, table, precision, name)
        return _write_quantized_lookup(export, table, matrix, BITS[precision])
    dims = (table.outputs, table.columns)
    if shared:
        rows = graph.node("Transpose", matrix, f"{path}/Transpose", dims, perm=[1, 0])
    else:
        rows = write_float_tensor(export, name, dims, Chunks(lambda: named_matrices(export, table)), precision)
    return graph.node("Gather", [rows, IDS], f"{path}/Gather", hidden_dims(table.columns))


def _write_quantized_lookup(export: Export, table: Projection, matrix: list[str], bits: int) -> str:
    graph, path, block_size = export.graph, table.path, export.options.block_size
    padded = num_blocks(table.columns, block_size) * block_size
    shape = [table.outputs, padded * bits // 8]
    rows = graph.node("Reshape", [matrix[0], graph.int64(shape)], f"{path}/Reshape", shape, element=UINT8)
    vectors = graph.node(
        "GatherBlockQuantized",
        [rows, IDS, *matrix[1:]],
        f"{path}/GatherBlockQuantized",
        hidden_dims(padded),
        domain=CONTRIB,
        bits=bits,
        block_size=block_size,
        gather_axis=0,
        quantize_axis=1,
    )
    if padded == table.columns:
        return vectors
    bounds = [graph.int64([0]), graph.int64([table.columns]), graph.int64([-1])]
    return graph.node("Slice", [vectors, *bounds], f"{path}/Slice", hidden_dims(table.columns))
