"""Shape rules for operators that ONNX does not define, and the registry that they are in.

A rule sees a node and the types of its inputs, and gives the types of its outputs as far as they follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from numpy.typing import NDArray

from ..errors import GraphError
from .node import Node
from .tensor import Tensor
from .types import DataType, Dim, Shape, TensorType, Type


@dataclass(frozen=True)
class NodeTypes:
    """What a rule may look at.

    Attributes:
        inputs: per input its type, None where it is absent or unknown.
        constants: per input its value where that is constant and small, else None.
    """

    node: Node
    inputs: Sequence[Type | None]
    constants: Sequence[NDArray[Any] | None]

    def tensor(self, index: int) -> TensorType | None:
        """The type of input `index`, if it is a tensor's and known."""
        found = self.inputs[index] if index < len(self.inputs) else None
        return found if isinstance(found, TensorType) else None

    def shape(self, index: int, rank: int | None = None) -> Shape | None:
        """The shape of input `index`, if known and, where `rank` is given, of that rank."""
        found = self.tensor(index)
        shape = None if found is None else found.shape
        return None if shape is None or (rank is not None and len(shape) != rank) else shape

    def attribute(self, name: str, default: int) -> int:
        """An integer attribute of the node.

        Raises:
            GraphError: if it is of another type.
        """
        value = self.node.attribute(name, default)
        if isinstance(value, int):
            return value
        raise GraphError(
            f"attribute {name!r} of {self.node!r:.120} is not an integer",
            f"{self.node.op_type} defines it as one",
            "export the model again",
        )


ShapeRule: TypeAlias = Callable[[NodeTypes], Sequence[Type | None]]
"""Gives one type per output, None where nothing follows; the list may be shorter than the node's outputs."""


class ShapeRules:
    """Shape rules by (domain, operator)."""

    def __init__(self) -> None:
        self._rules: dict[tuple[str, str], ShapeRule] = {}

    def register(self, *op_types: str, domain: str = "com.microsoft") -> Callable[[ShapeRule], ShapeRule]:
        """Decorator: let a rule serve these operators."""

        def add(rule: ShapeRule) -> ShapeRule:
            for op_type in op_types:
                self._rules[domain, op_type] = rule
            return rule

        return add

    def find(self, node: Node) -> ShapeRule | None:
        """The rule for a node, or None."""
        return self._rules.get(node.key)


SHAPE_RULES = ShapeRules()
shape_rule = SHAPE_RULES.register


@shape_rule("RotaryEmbedding", "Gelu", "FastGelu", "QuickGelu", "BiasGelu")
def same_as_input(types: NodeTypes) -> list[Type | None]:
    """One output, of the first input's type."""
    return [types.tensor(0)]


@shape_rule("SimplifiedLayerNormalization", domain="")
@shape_rule("SimplifiedLayerNormalization")
def simplified_layer_normalization(types: NodeTypes) -> list[Type | None]:
    """The normalised input, in the scale's element type, and the inverse deviations."""
    source, scale = types.tensor(0), types.tensor(1)
    if source is None:
        return []
    normalised = replace(source, dtype=scale.dtype if scale else source.dtype)
    return [normalised, _statistics(source, types.attribute("axis", -1))]


@shape_rule("SkipSimplifiedLayerNormalization", "SkipLayerNormalization")
def skip_layer_normalization(types: NodeTypes) -> list[Type | None]:
    """The normalised sum, mean, inverse deviation, and the sum itself."""
    source = types.tensor(0)
    if source is None:
        return []
    statistics = _statistics(source, -1)
    return [source, statistics, statistics, source]


@shape_rule("MatMulNBits")
def matmul_nbits(types: NodeTypes) -> list[Type | None]:
    """[..., K] times packed [N, K]: [..., N]."""
    source = types.tensor(0)
    if source is None:
        return []
    shape = None if not source.shape else (*source.shape[:-1], types.attribute("N", 0))
    return [TensorType(source.dtype, shape)]


@shape_rule("GatherBlockQuantized")
def gather_block_quantized(types: NodeTypes) -> list[Type | None]:
    """Gather along `gather_axis`, dequantised to the scales' type; uint8 data hold 8 / bits elements per byte."""
    data, indices, scales = types.tensor(0), types.tensor(1), types.tensor(2)
    if scales is None:
        return []
    if data is None or indices is None or not data.shape or indices.shape is None:
        return [TensorType(scales.dtype)]
    shape = list(data.shape)
    if data.dtype is DataType.UINT8:
        shape[-1] = _times(shape[-1], 8 // max(types.attribute("bits", 4), 1))
    axis = types.attribute("gather_axis", 0) % len(shape)
    return [TensorType(scales.dtype, (*shape[:axis], *indices.shape, *shape[axis + 1 :]))]


@shape_rule("GroupQueryAttention")
def group_query_attention(types: NodeTypes) -> list[Type | None]:
    """Y [batch, sequence, heads * head size]; present keys and values; optionally the scores.

    The cached length is left open: it is the past's own with a shared buffer, and longer than the past without.
    """
    query, packed = types.tensor(0), not types.node.input(1)
    if query is None:
        return []
    heads, kv_heads = types.attribute("num_heads", 0), types.attribute("kv_num_heads", 0)
    shape = types.shape(0, rank=3)
    if shape is None:
        return [TensorType(query.dtype), *_present(types, 3, query, None, kv_heads, None)]
    batch, sequence, width = shape
    head_size = _divided(width, heads + 2 * kv_heads if packed else heads)
    output = TensorType(query.dtype, (batch, sequence, _times(head_size, heads) if packed else width))
    scores = TensorType(query.dtype, (batch, heads, sequence, None))
    return [output, *_present(types, 3, query, batch, kv_heads, head_size), scores]


@shape_rule("MultiHeadAttention")
def multi_head_attention(types: NodeTypes) -> list[Type | None]:
    """Y [batch, sequence, value width], for separate, packed QKV [B, S, N, 3, H] and packed KV [B, L, N, 2, H] inputs."""
    query, heads = types.tensor(0), types.attribute("num_heads", 0)
    if query is None or not query.shape or len(query.shape) not in (3, 5):
        return [] if query is None else [TensorType(query.dtype)]
    batch, sequence = query.shape[:2]
    width: Dim = None
    if len(query.shape) == 5:
        width = _times(query.shape[4], heads)
    elif (value := types.shape(2)) is not None:
        width = value[2] if len(value) == 3 else _times(value[-1], heads)
    elif (packed := types.shape(1, rank=5)) is not None:
        width = _times(packed[4], heads)
    present = _present(types, 6, query, batch, heads, _divided(width, heads))
    return [TensorType(query.dtype, (batch, sequence, width)), *present]


def _present(
    types: NodeTypes, past: int, query: TensorType, batch: Dim, kv_heads: int, head_size: Dim
) -> list[Type | None]:
    """Present keys and values [batch, kv heads, length, head size], of the past's type where there is a past."""
    result: list[Type | None] = []
    for index in (past, past + 1):
        known, shape = types.tensor(index), types.shape(index, rank=4)
        dtype = query.dtype if known is None else known.dtype
        if shape is not None:
            result.append(TensorType(dtype, (shape[0], shape[1], None, shape[3])))
        else:
            result.append(TensorType(dtype, (batch, kv_heads or None, None, head_size)))
    return result


def _statistics(source: TensorType, axis: int) -> TensorType:
    shape = source.shape
    if not shape or not -len(shape) <= axis < len(shape):
        return TensorType(DataType.FLOAT)
    start = axis % len(shape)
    return TensorType(DataType.FLOAT, (*shape[:start], *(1 for _ in shape[start:])))


def _times(dim: Dim, factor: int) -> Dim:
    return dim * factor if isinstance(dim, int) else None


def _divided(dim: Dim, divisor: int) -> Dim:
    return dim // divisor if isinstance(dim, int) and divisor > 0 else None


# Standard operators on which ONNX's own inference crashes the process when a type or attribute is not as expected.


@shape_rule("LayerNormalization", domain="")
def layer_normalization(types: NodeTypes) -> list[Type | None]:
    """The normalised input, mean and inverse deviation."""
    source = types.tensor(0)
    if source is None:
        return []
    statistics = replace(
        _statistics(source, types.attribute("axis", -1)), dtype=_data_type(types.attribute("stash_type", 1))
    )
    return [source, statistics, statistics]


@shape_rule("RegexFullMatch", domain="")
def regex_full_match(types: NodeTypes) -> list[Type | None]:
    """One truth value per string."""
    return [TensorType(DataType.BOOL, types.shape(0))]


@shape_rule("Split", domain="")
def split(types: NodeTypes) -> list[Type | None]:
    """Parts of given sizes along an axis, or of equal size with a smaller last one."""
    source, count = types.tensor(0), len(types.node.outputs)
    if source is None:
        return []
    axis = types.attribute("axis", 0)
    if source.shape is None or not -len(source.shape) <= axis < len(source.shape):
        return [TensorType(source.dtype)] * count
    axis %= len(source.shape)
    sizes = _split_sizes(types, source.shape[axis], count)
    return [replace(source, shape=(*source.shape[:axis], size, *source.shape[axis + 1 :])) for size in sizes]


@shape_rule("LabelEncoder", domain="ai.onnx.ml")
def label_encoder(types: NodeTypes) -> list[Type | None]:
    """One label per element, of the type of the attribute that lists the labels."""
    for name, dtype in (
        ("values_strings", DataType.STRING),
        ("values_int64s", DataType.INT64),
        ("values_floats", DataType.FLOAT),
    ):
        if name in types.node.attributes:
            return [TensorType(dtype, types.shape(0))]
    labels = types.node.attribute("values_tensor")
    return [TensorType(labels.dtype, types.shape(0))] if isinstance(labels, Tensor) else []


@shape_rule("TreeEnsemble", domain="ai.onnx.ml")
def tree_ensemble(types: NodeTypes) -> list[Type | None]:
    """[N, features] to [N, targets]."""
    source, shape = types.tensor(0), types.shape(0, rank=2)
    if source is None:
        return []
    return [TensorType(source.dtype, (shape[0] if shape else None, types.attribute("n_targets", 1)))]


@shape_rule("EyeLike", domain="")
def eye_like(types: NodeTypes) -> list[Type | None]:
    """A matrix of the input's shape, in the type of the attribute or of the input."""
    source, dtype = types.tensor(0), _data_type(types.attribute("dtype", 0))
    if dtype is DataType.UNDEFINED and source is None:
        return []
    return [TensorType(dtype or (source.dtype if source else DataType.FLOAT), types.shape(0, rank=2))]


@shape_rule("GatherND", domain="")
def gather_nd(types: NodeTypes) -> list[Type | None]:
    """data [batch..., data...] at indices [batch..., more..., k]: [batch..., more..., data[k:]...]."""
    source, data, indices = types.tensor(0), types.shape(0), types.shape(1)
    if source is None:
        return []
    start = types.attribute("batch_dims", 0)
    count = indices[-1] if indices else None
    if data is None or not indices or not isinstance(count, int) or not 0 <= start + count <= len(data):
        return [TensorType(source.dtype)]
    return [TensorType(source.dtype, (*indices[:-1], *data[start + count :]))]


def _split_sizes(types: NodeTypes, extent: Dim, count: int) -> list[Dim]:
    listed = types.node.attribute("split")
    given = types.constants[1] if len(types.constants) > 1 else None
    sizes = listed if listed is not None else None if given is None else given.reshape(-1).tolist()
    if sizes is not None:
        return list(sizes) if len(sizes) == count else [None] * count
    if not isinstance(extent, int) or types.node.input(1):
        return [None] * count
    size = -(-extent // count)
    return [*[size] * (count - 1), max(extent - size * (count - 1), 0)]


def _data_type(number: int) -> DataType:
    return DataType(number) if number in set(DataType) else DataType.UNDEFINED
