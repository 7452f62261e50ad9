"""Row and lowering rules of matmuls with constant matrices, dense and quantised."""

from __future__ import annotations

from genai.kernels.ir import BlockWeight, DenseWeight, Embedding, Ids, Linear, Op, Projection, RowsType, Unary

from ..onnx.node import MS, OURS
from ..onnx.own_functions import QUANTIZED_LOOKUP, QUANTIZED_PRODUCT
from ..ops.weights import (
    ADDEND,
    BIAS,
    BLOCK_PRODUCT,
    BNB4_PRODUCT,
    LOOKUP_INPUTS,
    PRODUCT_INPUTS,
    bnb4_weight,
    check_stored,
    own_weight,
    uniform_weight,
)
from .rows import Kind, NotFlattenable, RowDim, State
from .rules import Lowered, LoweringSpec, NodeRows, Packed, States, lowering_rule, row_rule, stored_weights


@row_rule("MatMul")
def matmul_rows(at: NodeRows) -> States:
    x, weight = at.states
    if x is None or weight is None or x.kind is not Kind.ROWS or weight.kind is not Kind.UNIFORM:
        raise NotFlattenable("a matmul whose right side is not constant mixes tokens")
    if weight.rank != 2:
        raise NotFlattenable("a matmul with a stack of constant matrices is not supported")
    at.keep_off(x, -1, "the contraction")
    return [x.resized(x.rank - 1, weight.known_shape[1])]


@row_rule("Gemm")
def gemm_rows(at: NodeRows) -> States:
    state = at.rows
    if at.states[0] is not state or at.node.attribute("transA", 0) or state.axis != 0:
        raise NotFlattenable("the tokens must be the rows of the left matrix")
    weight = at.states[1]
    assert weight is not None
    return [state.resized(1, weight.known_shape[0 if at.node.attribute("transB", 0) else 1])]


@row_rule(BLOCK_PRODUCT, domain=MS)
def matmul_nbits_rows(at: NodeRows) -> States:
    state = at.rows
    at.keep_off(state, -1, "the contraction")
    return [state.resized(state.rank - 1, RowDim(int(at.node.attribute("N", 0))))]


@lowering_rule(BLOCK_PRODUCT, domain=MS)
def lower_matmul_nbits(spec: LoweringSpec) -> Lowered | None:
    """Lower x @ W^T + bias + addend (input 6, an extension for a LoRA adapter's output)."""
    x, attributes = spec.rows(0), spec.attributes
    n, k, bits = int(attributes["N"]), int(attributes["K"]), int(attributes.get("bits", 4))
    if x is None or x.width != k or spec.has(4) or int(attributes.get("weight_prepacked", 0)):
        return None
    if spec.has(6) and spec.rows(6) != x.with_width(n):
        return None
    names = [spec.constant_name(index) for index in (1, 2, 3)]
    weight = uniform_weight(names, n, k, bits, int(attributes["block_size"]))
    check_stored(weight, spec.constant(1), spec.constant(2))
    projection = Projection(weight, spec.constant_name(5), spec.inputs[6] if spec.has(6) else "")
    out = spec.outputs[0]
    return Lowered([Linear(spec.inputs[0], projection, out, spec.exact, op_type=spec.op_type)], {out: x.with_width(n)})


@lowering_rule("MatMul")
def lower_matmul(spec: LoweringSpec) -> Lowered | None:
    """Lower a matmul of rows and a constant matrix [K, N] of float32, float16 or bfloat16."""
    x, weight = spec.rows(0), spec.constants[1]
    if x is None or weight is None or weight.ndim != 2 or weight.shape[0] != x.width or x.last != x.width:
        return None
    if weight.dtype.name not in ("float32", "float16", "bfloat16"):
        return None
    k, n = weight.shape
    projection, out = Projection(DenseWeight(spec.inputs[1], n, k)), spec.outputs[0]
    return Lowered([Linear(spec.inputs[0], projection, out, True, op_type=spec.op_type)], {out: x.with_width(n)})


@lowering_rule("Gemm")
def lower_gemm(spec: LoweringSpec) -> Lowered | None:
    """Lower a matmul of rows [rows, K] and a constant matrix, with a bias [N]."""
    x, weight, attributes = spec.rows(0), spec.constants[1], spec.attributes
    if x is None or weight is None or weight.dtype.name not in ("float32", "float16", "bfloat16"):
        return None
    transposed = bool(attributes.get("transB", 0))
    n, k = weight.shape if transposed else weight.shape[::-1]
    plain = float(attributes.get("alpha", 1.0)) == 1.0 and not int(attributes.get("transA", 0))
    if not plain or x.last != x.width or x.width != k:
        return None
    bias = ""
    if spec.has(2):
        constant = spec.constants[2]
        if constant is None or constant.size != n or float(attributes.get("beta", 1.0)) != 1.0:
            return None
        bias = spec.constant_name(2)
    out, projection = spec.outputs[0], Projection(DenseWeight(spec.inputs[1], n, k, transposed), bias)
    return Lowered([Linear(spec.inputs[0], projection, out, True, op_type=spec.op_type)], {out: x.with_width(n)})


@row_rule("Linear", domain=OURS)
def linear_rows(at: NodeRows) -> States:
    """Return the state of function(x @ weight + bias + addend)."""
    x, weight, *others = at.states
    if x is None or x.kind is not Kind.ROWS or weight is None or weight.kind is not Kind.UNIFORM or weight.rank != 2:
        raise NotFlattenable("a matmul whose right side is not a constant matrix mixes tokens")
    at.keep_off(x, -1, "the contraction")
    result = x.resized(x.rank - 1, weight.known_shape[1])
    if len(others) > 1 and others[1] is not None and others[1] != result:
        raise NotFlattenable("the addend does not have the rows of the result")
    return [result]


@lowering_rule("Linear", domain=OURS)
def lower_linear(spec: LoweringSpec) -> Lowered | None:
    """Lower function(x @ weight + bias + addend), where the function is a separate op."""
    x, weight, out = spec.rows(0), spec.constants[1], spec.outputs[0]
    if x is None or weight is None or weight.ndim != 2 or weight.shape[0] != x.width or x.last != x.width:
        return None
    k, n = weight.shape
    if spec.has(3) and spec.rows(3) != x.with_width(n):
        return None
    function = str(spec.attributes.get("function", "copy"))
    parameters = tuple(float(item) for item in spec.attributes.get("parameters", ()))
    projection = Projection(
        DenseWeight(spec.inputs[1], n, k), spec.constant_name(2), spec.inputs[3] if spec.has(3) else ""
    )
    product = out if function == "copy" else f"{out}/product"
    ops: list[Op] = [Linear(spec.inputs[0], projection, product, True, op_type=spec.op_type)]
    if product != out:
        ops.append(Unary(function, product, out, parameters, op_type=spec.op_type))
    return Lowered(ops, {product: x.with_width(n), out: x.with_width(n)})


stored_weights(BLOCK_PRODUCT, {1: Packed("bits", scales=2, points=3, sizes=("N", "K"))})


@row_rule(QUANTIZED_PRODUCT, domain=OURS)
@row_rule(BNB4_PRODUCT, domain=MS)
def product_rows(at: NodeRows) -> States:
    state = at.rows
    at.keep_off(state, -1, "the contraction")
    return [state.resized(state.rank - 1, RowDim(int(at.node.attribute("N", 0))))]


@row_rule(QUANTIZED_LOOKUP, domain=OURS)
def lookup_rows(at: NodeRows) -> States:
    ids = at.states[1]
    others = [state for index, state in enumerate(at.states) if index != 1]
    if ids is None or ids.kind is not Kind.ROWS or any(s is None or s.kind is not Kind.UNIFORM for s in others):
        raise NotFlattenable("the table must be the same for all tokens, and there must be one id per token")
    return [State(Kind.ROWS, (*ids.known_shape, RowDim(int(at.node.attribute("K", 0)))), ids.axis)]


@lowering_rule(QUANTIZED_PRODUCT, domain=OURS)
def lower_quantized_matmul(spec: LoweringSpec) -> Lowered | None:
    """Lower x @ W^T + bias + addend."""
    return _lower_product(spec, own_weight(spec, PRODUCT_INPUTS), BIAS, ADDEND)


@lowering_rule(BNB4_PRODUCT, domain=MS)
def lower_matmul_bnb4(spec: LoweringSpec) -> Lowered | None:
    """Lower x @ W^T. A matrix whose blocks cannot be split at the ends of its rows stays a host node."""
    weight = bnb4_weight(spec)
    return None if weight is None else _lower_product(spec, weight)


def _lower_product(spec: LoweringSpec, weight: BlockWeight, bias: int = -1, addend: int = -1) -> Lowered | None:
    x, out = spec.rows(0), spec.outputs[0]
    if x is None or x.width != weight.columns:
        return None
    has_addend = addend > 0 and spec.has(addend)
    if has_addend and spec.rows(addend) != x.with_width(weight.rows):
        return None
    constant = spec.constant_name(bias) if bias > 0 else ""
    projection = Projection(weight, constant, spec.inputs[addend] if has_addend else "")
    product = Linear(spec.inputs[0], projection, out, spec.exact, op_type=spec.op_type)
    return Lowered([product], {out: x.with_width(weight.rows)})


@lowering_rule(QUANTIZED_LOOKUP, domain=OURS)
def lower_quantized_gather(spec: LoweringSpec) -> Lowered | None:
    """Lower a look-up in a quantised table, in the packed form that it shares with a tied output head."""
    ids, out = spec.types[1], spec.outputs[0]
    if not isinstance(ids, Ids):
        return None
    weight = own_weight(spec, LOOKUP_INPUTS)
    lookup = Embedding(weight, ids, out, op_type=spec.op_type)
    return Lowered([lookup], {out: RowsType((1, -1, weight.columns), weight.columns)})


stored_weights(QUANTIZED_PRODUCT, {1: Packed("bits", scales=3, points=6, sizes=("N", "K"), as_stored=True)}, (2, 4, 5))


stored_weights(QUANTIZED_LOOKUP, {0: Packed("bits", scales=3, points=6, sizes=("N", "K"), as_stored=True)}, (2, 4, 5))


stored_weights(BNB4_PRODUCT, {1: Packed("bits", scales=2, points=3, sizes=("N", "K"), as_stored=True)})
