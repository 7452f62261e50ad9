"""Model functions that define this toolkit's own operators (domain genai) in terms of standard operators.

A model with such operators contains these functions, so any runtime that expands functions can run it. If a model's
functions are exactly the same as these, our kernels run instead; other functions with the same names are expanded.

The definitions follow `kernels.weights`: codes, multipliers and offsets are rows of bits, each factor applies to an
equal number of columns, and a single number replaces absent factors.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import onnx
from onnx import numpy_helper, parser

from .node import OURS

# x @ W.T and row look-ups, for a quantised W.
QUANTIZED_PRODUCT, QUANTIZED_LOOKUP = "QuantizedMatMul", "QuantizedGather"
# The oldest version of ai.onnx that defines the operators in the bodies as the bodies use them.
OLDEST_OPSET = 18
# The maximum length of a constant in these functions.
_MOST_NUMBERS = 16
_HEADER = f'<domain: "{OURS}", opset_import: ["": {OLDEST_OPSET}, "{OURS}": 1]>'
_FORMAT = "bits, block_size, multiplier_bits, multiplier_zero, offset_bits, N, K"
_FORMAT_GIVEN = ", ".join(f"{name}: int = @{name}" for name in _FORMAT.split(", "))
_ARRAYS = "codes, grid, scales, multipliers, offset_scales, offsets"

_UNPACK = f"""{_HEADER}
UnpackBits <bits> (packed) => (numbers) {{
    width = Shape <start: int = 1> (packed)
    zero = Constant <value_int: int = 0> ()
    one = Constant <value_int: int = 1> ()
    eight = Constant <value_int: int = 8> ()
    size = Constant <value_int: int = @bits> ()
    all_bits = Mul (width, eight)
    counts = Div (all_bits, size)
    count = Squeeze (counts)
    index = Range (zero, count, one)
    begin = Mul (index, size)
    first = Div (begin, eight)
    shift = Mod (begin, eight)
    last = Sub (width, one)
    after = Add (first, one)
    second = Min (after, last)
    wide = Cast <to: int = 6> (packed)
    low = Gather <axis: int = 1> (wide, first)
    high = Gather <axis: int = 1> (wide, second)
    powers = Constant <value = int32[9] {{1, 2, 4, 8, 16, 32, 64, 128, 256}}> ()
    byte = Gather (powers, eight)
    moved = Mul (high, byte)
    word = Add (low, moved)
    divisor = Gather (powers, shift)
    shifted = Div (word, divisor)
    modulus = Gather (powers, size)
    numbers = Mod (shifted, modulus)
}}"""

_SPREAD = f"""{_HEADER}
SpreadFactors (factors, width) => (spread) {{
    zero = Constant <value_int: int = 0> ()
    one = Constant <value_int: int = 1> ()
    count = Shape <start: int = 1> (factors)
    column = Range (zero, width, one)
    times = Mul (column, count)
    place = Div (times, width)
    spread = Gather <axis: int = 1> (factors, place)
}}"""

_DEQUANTIZE = f"""{_HEADER}
DequantizeWeight <{_FORMAT}> ({_ARRAYS}) => (weight) {{
    zero = Constant <value_ints: ints = [0]> ()
    one = Constant <value_ints: ints = [1]> ()
    code = {OURS}.UnpackBits <bits: int = @bits> (codes)
    grid_values = Cast <to: int = 1> (grid)
    value = Gather (grid_values, code)
    widths = Shape <start: int = 1> (code)
    width = Squeeze (widths)
    block = Constant <value_int: int = @block_size> ()
    blocks = Div (widths, block)
    all_multipliers = {OURS}.UnpackBits <bits: int = @multiplier_bits> (multipliers)
    some_multipliers = Slice (all_multipliers, zero, blocks, one)
    multiplier_codes = Cast <to: int = 1> (some_multipliers)
    centre = Constant <value_int: int = @multiplier_zero> ()
    float_centre = Cast <to: int = 1> (centre)
    multiplier = Sub (multiplier_codes, float_centre)
    multiplier_spread = {OURS}.SpreadFactors (multiplier, width)
    scale = Cast <to: int = 1> (scales)
    scale_spread = {OURS}.SpreadFactors (scale, width)
    factor = Mul (scale_spread, multiplier_spread)
    scaled = Mul (factor, value)
    all_offsets = {OURS}.UnpackBits <bits: int = @offset_bits> (offsets)
    some_offsets = Slice (all_offsets, zero, blocks, one)
    offset = Cast <to: int = 1> (some_offsets)
    offset_spread = {OURS}.SpreadFactors (offset, width)
    offset_scale = Cast <to: int = 1> (offset_scales)
    offset_scale_spread = {OURS}.SpreadFactors (offset_scale, width)
    less = Mul (offset_scale_spread, offset_spread)
    padded = Sub (scaled, less)
    columns = Constant <value_int: int = @K> ()
    end = Unsqueeze (columns, zero)
    weight = Slice (padded, zero, end, one)
}}"""

_PRODUCT = f"""{_HEADER}
{QUANTIZED_PRODUCT} <{_FORMAT}, accuracy_level> (x, {_ARRAYS}) => (y) {{
    weight = {OURS}.DequantizeWeight <{_FORMAT_GIVEN}> ({_ARRAYS})
    turned = Transpose <perm: ints = [1, 0]> (weight)
    y = MatMul (x, turned)
}}"""

_LOOKUP = f"""{_HEADER}
{QUANTIZED_LOOKUP} <{_FORMAT}> (codes, ids, grid, scales, multipliers, offset_scales, offsets) => (y) {{
    weight = {OURS}.DequantizeWeight <{_FORMAT_GIVEN}> ({_ARRAYS})
    y = Gather (weight, ids)
}}"""


@cache
def own_functions(opset: int = OLDEST_OPSET) -> tuple[onnx.FunctionProto, ...]:
    """Return all functions for models that import this version of ai.onnx."""
    functions = tuple(parser.parse_function(text) for text in (_UNPACK, _SPREAD, _DEQUANTIZE, _PRODUCT, _LOOKUP))
    for function in functions:
        function.opset_import[0].version = max(opset, OLDEST_OPSET)
    return functions


def are_own(functions: Iterable[onnx.FunctionProto]) -> bool:
    """Return True if each function of the genai domain equals one of `own_functions`, so that kernels can run it."""
    known = {function.name: _meaning(function) for function in own_functions()}
    return all(
        not function.overload and known.get(function.name) == _meaning(function)
        for function in functions
        if function.domain == OURS
    )


def _meaning(function: onnx.FunctionProto) -> tuple[object, ...]:
    """Return everything that determines a function's result, without names that only help human readers."""
    nodes = []
    for node in function.node:
        attributes = sorted(map(_attribute, node.attribute))
        nodes.append((node.domain, node.op_type, node.overload, *node.input, "->", *node.output, *attributes))
    defaults = sorted(map(_attribute, function.attribute_proto))
    opset = next((item.version for item in function.opset_import if item.domain in ("", "ai.onnx")), 0)
    names = (*function.input, "->", *function.output, *sorted(function.attribute))
    return (names, defaults, nodes, opset >= OLDEST_OPSET)


def _attribute(attribute: onnx.AttributeProto) -> str:
    """Return a string that is equal for attributes with equal values, regardless of how the values are stored."""
    if attribute.HasField("t"):
        tensor = attribute.t
        if tensor.external_data or len(tensor.dims) != 1 or tensor.dims[0] > _MOST_NUMBERS:
            return f"{attribute.name} unlike ours"
        array = numpy_helper.to_array(tensor)
        value = (str(array.dtype), array.tolist())
        return f"{attribute.name} {value}"
    plain = onnx.AttributeProto.FromString(attribute.SerializeToString())
    plain.ClearField("doc_string")
    return str(plain)
