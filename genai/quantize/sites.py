"""Sites: the matrices of a decoder's graph that can be quantised, the nodes that read them, and their storage order."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..evaluate.model_diff import layer_of
from ..onnx.decoder_names import GraphNames
from ..onnx.ir import DataType, Graph, Node, OnnxTensor
from ..onnx.node import MS
from ..onnx.types import TensorType

FLOATS = (DataType.FLOAT, DataType.FLOAT16, DataType.BFLOAT16)
# Operators that move or cast the elements of a constant without changing their values.
_PASSED = ("Cast", "Transpose", "Identity", "Reshape")
# The operator for a mixture of experts, and the indices of its matrix inputs.
MIXTURE, MIXTURE_MATRICES = (MS, "MoE"), (2, 4)
# Smaller matrices are not quantised, because their scales would need as much memory as quantisation saves.
LEAST_ELEMENTS = 4096
# Start of the names of the matrices that only an MTP head has.
MTP_PREFIX = "mtp."


@dataclass(frozen=True)
class Site:
    """A matrix that can be quantised.

    Attributes:
        name: name of the matrix's initializer.
        rows, columns: number of outputs and inputs.
        inputs_first: True if the matrix is stored as [columns, rows], as MatMul expects; False for [rows, columns].
        products: nodes that multiply by the matrix.
        lookups: nodes that read rows of the matrix by token ids.
        half: True if activations are float16. The scales must then also be float16.
        experts: number of matrices, concatenated along the rows, in a mixture of experts; 0 for a single matrix.
        mixture: the node that multiplies by the experts.
    """

    name: str
    rows: int
    columns: int
    inputs_first: bool
    products: list[Node] = field(default_factory=list, compare=False, repr=False)
    lookups: list[Node] = field(default_factory=list, compare=False, repr=False)
    half: bool = False
    experts: int = 0
    mixture: Node | None = field(default=None, compare=False, repr=False)

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def layer(self) -> int | None:
        """The layer number in the matrix's name; None for the embedding, the head, and the MTP head."""
        return None if self.in_mtp_head else layer_of(self.name)

    @property
    def in_mtp_head(self) -> bool:
        """True if only the MTP head has the matrix."""
        return self.name.startswith(MTP_PREFIX)

    @property
    def is_table(self) -> bool:
        """True if the matrix is used only for look-ups."""
        return bool(self.lookups) and not self.products

    @property
    def part(self) -> str:
        """The part of the model, as tables show it: a kind of layer, embedding, head, or MTP head."""
        if self.in_mtp_head:
            return "MTP head"
        if self.layer is None:
            return ("embedding and head" if self.products else "embedding") if self.lookups else "head"
        if self.experts:
            return "experts"
        if any(word in self.name for word in ("attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj")):
            return "attention"
        return "feed-forward" if any(word in self.name for word in ("mlp", "ffn", "feed_forward")) else "other"

    @property
    def base_name(self) -> str:
        """The name without the suffix that states the type."""
        return self.name.removesuffix("/float32")


def find_sites(graph: Graph, names: GraphNames) -> tuple[Site, ...]:
    """Return all float matrices of matmuls, token look-ups and mixtures, in the order in which the graph reads them.

    Routers of mixtures, tables of positions and small matrices are not included.
    """
    sites: dict[str, Site] = {}
    ids = _copies_of(graph, names.input_ids)
    for node in graph.nodes:
        if node.key == MIXTURE:
            for index in MIXTURE_MATRICES:
                if (experts := _experts(graph, node, index)) is not None:
                    sites.setdefault(experts.name, experts)
            continue
        kind, index = _role(node, ids)
        if kind == "":
            continue
        tensor, turned = source_of(graph, node.input(index))
        if tensor is None or not _is_matrix(tensor) or "router" in node.name:
            continue
        # A matmul reads [columns, rows]; a look-up and a Gemm with transB read [rows, columns].
        as_products = (kind == "product" and not node.attribute("transB", 0)) != turned
        rows, columns = tensor.shape[::-1] if as_products else tensor.shape
        half = getattr(graph.type_of(node.output(0)), "dtype", None) is DataType.FLOAT16
        site = sites.setdefault(tensor.name, Site(tensor.name, rows, columns, as_products, half=half))
        if (site.rows, site.columns) == (rows, columns):
            (site.products if kind == "product" else site.lookups).append(node)
    return tuple(site for site in sites.values() if site.products or site.lookups or site.experts)


def _experts(graph: Graph, node: Node, index: int) -> Site | None:
    """Return the matrices [experts, rows, columns] of a mixture as one site, or None."""
    tensor = graph.initializers.get(node.input(index))
    if tensor is None or len(tensor.shape) != 3 or tensor.dtype not in FLOATS or tensor.num_elements < LEAST_ELEMENTS:
        return None
    count, rows, columns = tensor.shape
    return Site(tensor.name, count * rows, columns, False, mixture=node, experts=count)


def _role(node: Node, ids: set[str]) -> tuple[str, int]:
    """Return the way a node uses a matrix ("" if it does not use it), and the index of that input."""
    if node.key == ("", "MatMul"):
        return "product", 1
    if node.key == ("", "Gemm"):
        plain = not node.attribute("transA", 0) and node.attribute("alpha", 1.0) == node.attribute("beta", 1.0) == 1.0
        return ("product", 1) if plain else ("", 0)
    if node.key == ("", "Gather") and not node.attribute("axis", 0) and node.input(1) in ids:
        return "lookup", 0
    return "", 0


def _copies_of(graph: Graph, name: str) -> set[str]:
    """Return a value's name and the names of the value's casts and copies."""
    known = {name}
    for node in graph.nodes:
        if node.op_type in ("Cast", "Identity") and node.input(0) in known:
            known.update(node.outputs)
    return known


def _is_matrix(tensor: OnnxTensor) -> bool:
    return len(tensor.shape) == 2 and tensor.dtype in FLOATS and tensor.num_elements >= LEAST_ELEMENTS


def source_of(graph: Graph, name: str) -> tuple[OnnxTensor | None, bool]:
    """Return a constant's initializer, and True if it is transposed; (None, False) if it is computed or reshaped."""
    turned = False
    while (tensor := graph.initializers.get(name)) is None:
        node = graph.producer(name)
        if node is None or node.op_type not in _PASSED:
            return None, False
        if node.op_type == "Reshape":
            before, after = (graph.type_of(value) for value in (node.input(0), name))
            if not isinstance(before, TensorType) or not isinstance(after, TensorType) or before.shape != after.shape:
                return None, False
        turned ^= node.op_type == "Transpose"
        name = node.input(0)
    return tensor, turned
