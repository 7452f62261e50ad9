"""The inputs of operators on whose values, and not only on whose shapes, the shapes of results depend."""

from __future__ import annotations

from typing import Any

# The results' shapes depend only on the inputs' shapes.
_BY_SHAPES = """
    Abs Acos Acosh Add And ArgMax ArgMin ArrayFeatureExtractor Asin Asinh Atan Atanh AveragePool BatchNormalization
    BiasAdd BiasGelu BlockedAveragePool BlockedConv BlockedConvTranspose BlockedMaxPool BlockedMean BlockedScale
    ByteTable Cast CastLike Ceil Celu Concat Conv Cos Cosh DenseAttention DequantizeLinear Div DynamicQuantizeLinear
    Elu Equal Erf Exp FastGelu Flatten Floor FromBlocked FusedConv GRU Gather GatherElements GatherND Gelu Gemm
    GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual GroupNormalization HardSigmoid HardSwish Identity
    InstanceNormalization IsInf IsNaN LSTM LayerNormalization LeakyRelu Less LessOrEqual Linear LinearClassifier
    LinearRegressor Log LogSoftmax MatMul Max MaxPool Mean Min Mish Mod Mul Neg Normalizer Not Or PRelu Pow
    QLinearAdd QLinearConv QLinearMul QuantizeLinear QuantizedBinary QuickGelu RMSNormalization RNN Reciprocal Relu
    Round SVMClassifier SVMRegressor Scaler Selu Shape Sigmoid Sign SimplifiedLayerNormalization Sin Sinh Size
    SkipLayerNormalization SkipSimplifiedLayerNormalization Softmax Softplus Softsign Sqrt Sub Sum SwiGLU Swish Tan
    Tanh ToBlocked Transpose TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor Where Xor
""".split()
# The results' shapes also depend on the values of all inputs after the first.
_BY_FIRST_SHAPE = """
    Clip CumSum Expand Pad ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd
    ReduceSum ReduceSumSquare Reshape Resize Slice Split Squeeze Tile TopK Trilu Unsqueeze
""".split()
_BY_VALUES = "ConstantOfShape Range".split()
_MANY = 1 << 30
_SHAPE_INPUTS = {
    **dict.fromkeys(_BY_SHAPES, _MANY),
    **dict.fromkeys(_BY_FIRST_SHAPE, 1),
    **dict.fromkeys(_BY_VALUES, 0),
}
# The kernels of these operators compute values only in compiled programs, or return views. If a kernel uses NumPy for
# an input of some type or layout, its results are in memory that no program has written.
_NATIVE = frozenset(
    """
    Abs Add And ArgMax ArgMin ArrayFeatureExtractor AveragePool BatchNormalization BlockedConv BlockedConvTranspose
    BlockedMaxPool BlockedMean BlockedScale ByteTable Cast Clip Concat Conv CumSum DenseAttention DequantizeLinear Div
    DynamicQuantizeLinear Elu Equal Erf Exp Expand FastGelu Flatten FromBlocked FusedConv GRU Gather GatherND Gelu Gemm
    GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual HardSigmoid HardSwish Identity InstanceNormalization LSTM
    LayerNormalization LeakyRelu Less LessOrEqual Linear LinearClassifier LinearRegressor LogSoftmax MatMul MaxPool Mul
    Neg Normalizer Not Or Pad Pow QLinearAdd QLinearConv QLinearMul QuantizeLinear QuantizedBinary QuickGelu
    RMSNormalization RNN ReduceL2 ReduceMax ReduceMean ReduceMin ReduceSum ReduceSumSquare Relu Reshape Resize Scaler
    Sigmoid SimplifiedLayerNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization Slice Softmax Split
    Sqrt Squeeze Sub Sum SwiGLU Swish Tanh Tile ToBlocked TopK Transpose Unsqueeze Where Xor
    """.split()
)
# Kernels of these operators combine NumPy and compiled programs unless the weights are packed.
_IF_PACKED = frozenset({"Conv", "FusedConv", "Gemm", "Linear", "MatMul"})
# The programs depend on the values of all inputs except these.
_DATA_INPUTS = {
    **dict.fromkeys(("DequantizeLinear", "Gather", "GatherND", "Pow", "QLinearConv", "QuantizeLinear"), (0,)),
    **dict.fromkeys(("QLinearAdd", "QLinearMul", "QuantizedBinary"), (0, 3)),
}
# Single calls of these operators use NumPy, which takes less time than a compiled program of one call.
_FAST_ALONE = frozenset(
    """
    Abs Add And Div Equal Expand Gather GatherND Greater GreaterOrEqual Less LessOrEqual Mul Neg Not Or Pow Slice Split
    Sqrt Sub Sum Transpose Where Xor
    """.split()
)
_BROADCAST = frozenset({"Add", "Div", "Mul", "Sub", "Sum"})
_OF_SHAPES = frozenset({"Shape", "Size"})


def shape_inputs(op_type: str) -> int | None:
    """Return the number of first inputs whose values have no effect on the shapes of the results; None = unknown."""
    return _SHAPE_INPUTS.get(op_type)


def is_native(op_type: str, kernel: Any) -> bool:
    """Return True if the kernel computes values only in compiled programs; see `kernels.cpu.program.recording`."""
    if op_type in _NATIVE and (op_type not in _IF_PACKED or hasattr(kernel, "packed")):
        return True
    return bool(getattr(kernel, "is_native", False))


def is_fast_alone(op_type: str, *, is_broadcast: bool = False) -> bool:
    """Return True if a native kernel that is not recorded takes less time than a compiled program of its call.

    Args:
        is_broadcast: True if one of two large operands is broadcast, for which kernels use compiled programs anyway.
    """
    return op_type in _FAST_ALONE and not (is_broadcast and op_type in _BROADCAST)


def value_inputs(op_type: str, count: int) -> list[int]:
    """Return the numbers of the inputs, of `count` inputs, on whose values the programs of a native kernel depend."""
    data = _DATA_INPUTS.get(op_type)
    return [] if data is None else [index for index in range(count) if index not in data]


def reads_only_shapes(op_type: str) -> bool:
    """Return True if the results do not depend on the values of the inputs."""
    return op_type in _OF_SHAPES
