"""The file of this folder that contains an operator's rules.

Written by `python -m tools.operator_index`.
"""

from __future__ import annotations

OPERATORS: dict[str, dict[str, str]] = {
    "attention": {
        "": "GroupQueryAttention RotaryEmbedding",
        "com.microsoft": "GroupQueryAttention RotaryEmbedding",
        "genai": "PagedAttention",
    },
    "elementwise": {
        "": (
            "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor "
            "Cast CastLike Ceil Celu Clip Cos Cosh DequantizeLinear Div Elu Equal Erf Exp Floor Gelu Greater "
            "GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean "
            "Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh "
            "Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor"
        ),
        "com.microsoft": "FastGelu Gelu QuickGelu",
        "genai": "SwiGLU",
    },
    "embedding": {
        "": "Gather GatherBlockQuantized",
        "com.microsoft": "GatherBlockQuantized",
    },
    "linear": {
        "": "Gemm MatMul MatMulBnb4 MatMulNBits QuantizedGather QuantizedMatMul",
        "com.microsoft": "MatMulBnb4 MatMulNBits",
        "genai": "Linear QuantizedGather QuantizedMatMul",
    },
    "moe": {
        "": "QMoE",
        "com.microsoft": "MoE QMoE",
    },
    "movement": {
        "": (
            "Concat ConstantOfShape Dropout Expand Flatten GatherElements If Reshape ScatterElements Shape Slice "
            "Split Squeeze TopK Transpose Unsqueeze"
        ),
        "genai": "LogitsRows",
    },
    "normalization": {
        "": (
            "ArgMax ArgMin Hardmax LayerNormalization LogSoftmax LpNormalization RMSNormalization ReduceL1 "
            "ReduceL2 ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare "
            "SimplifiedLayerNormalization Softmax"
        ),
        "com.microsoft": "BiasGelu FastGelu QuickGelu SkipLayerNormalization SkipSimplifiedLayerNormalization",
    },
    "recurrent": {
        "": "LinearAttention",
        "com.microsoft": "GatedAdd GatedRMSNorm LinearAttention LinearAttentionGate",
        "genai": "CausalConv",
    },
}
"""The names of operators by file and domain."""
