"""The file of this folder that contains an operator's kernels and shape rules.

Written by `python -m tools.operator_index`.
"""

from __future__ import annotations

OPERATORS: dict[str, dict[str, str]] = {
    "activations": {
        "": (
            "Celu Clip Elu Gelu HardSigmoid HardSwish LeakyRelu Mish Selu Shrink Sigmoid Softplus Softsign Swish "
            "ThresholdedRelu"
        ),
        "com.microsoft": "BiasGelu BiasSplitGelu FastGelu Gelu QuickGelu",
        "genai": "HardSwish SwiGLU",
    },
    "attention": {
        "": "Attention RotaryEmbedding",
        "genai": "DenseAttention",
    },
    "blocked": {
        "genai": (
            "BlockedAveragePool BlockedConv BlockedConvTranspose BlockedMaxPool BlockedMean BlockedScale "
            "FromBlocked ToBlocked"
        ),
    },
    "casting": {
        "": "BitCast Cast CastLike DequantizeLinear DynamicQuantizeLinear QuantizeLinear",
        "com.microsoft": "DequantizeLinear QuantizeLinear",
    },
    "contrib": {
        "com.microsoft": (
            "Attention BiasAdd EmbedLayerNormalization ExpandDims FusedConv FusedGemm FusedMatMul GatedAdd "
            "Inverse MultiHeadAttention QAttention TransposeMatMul"
        ),
    },
    "contrib_arrays": {
        "com.microsoft": "CDist DynamicTimeWarping MatMulInteger16 MurmurHash3 NGramRepeatBlock UnfoldTensor",
    },
    "contrib_quantized": {
        "com.microsoft": (
            "DynamicQuantizeMatMul MatMulIntegerToFloat QEmbedLayerNormalization QGemm QLinearAdd "
            "QLinearAveragePool QLinearConcat QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearSigmoid "
            "QLinearSoftmax QLinearWhere"
        ),
        "genai": "ByteTable IntegerLinear QuantizedBinary",
    },
    "contrib_recurrent": {
        "com.microsoft": "DynamicQuantizeLSTM",
    },
    "control": {
        "": (
            "ConcatFromSequence If Loop Optional OptionalGetElement OptionalHasElement Scan SequenceAt "
            "SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap "
            "SplitToSequence"
        ),
    },
    "convolution": {
        "": "Conv ConvTranspose DeformConv",
        "com.microsoft": "ConvTransposeWithDynamicPads",
    },
    "detection": {
        "": "NonMaxSuppression RoiAlign",
    },
    "elementwise": {
        "": (
            "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor "
            "Ceil Cos Cosh Div Equal Erf Exp Floor Greater GreaterOrEqual Identity IsInf IsNaN Less LessOrEqual "
            "Log Max Mean Min Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round Sign Sin Sinh Sqrt Sub Sum Tan "
            "Tanh Where Xor"
        ),
    },
    "experts": {
        "com.microsoft": "MoE QMoE",
    },
    "filling": {
        "": (
            "Bernoulli ConstantOfShape Expand EyeLike Multinomial RandomNormal RandomNormalLike RandomUniform "
            "RandomUniformLike Range Tile"
        ),
        "com.microsoft": "Range",
    },
    "group_query_attention": {
        "com.microsoft": "GroupQueryAttention RotaryEmbedding",
    },
    "indexing": {
        "": (
            "Compress Gather GatherElements GatherND NonZero OneHot ReverseSequence Scatter ScatterElements "
            "ScatterND TensorScatter TopK Unique"
        ),
        "com.microsoft": "GatherND Unique",
    },
    "integer_convolution": {
        "": "ConvInteger QLinearConv",
        "com.microsoft": "QLinearConv",
    },
    "integer_products": {
        "": "MatMulInteger QLinearMatMul",
    },
    "lookups": {
        "com.microsoft": "GatherBlockQuantized",
    },
    "matmul": {
        "": "Einsum Gemm MatMul",
        "genai": "DenseAttention Linear",
    },
    "ml": {
        "ai.onnx.ml": (
            "ArrayFeatureExtractor Binarizer CastMap CategoryMapper DictVectorizer FeatureVectorizer Imputer "
            "LabelEncoder LinearClassifier LinearRegressor Normalizer OneHotEncoder Scaler ZipMap"
        ),
    },
    "movement": {
        "": "CenterCropPad Col2Im Concat DepthToSpace Dropout MaxUnpool Pad SpaceToDepth Transpose Trilu",
        "com.microsoft": "Pad Trilu",
    },
    "normalization": {
        "": (
            "BatchNormalization GroupNormalization InstanceNormalization LRN LayerNormalization LpNormalization "
            "MeanVarianceNormalization RMSNormalization SimplifiedLayerNormalization"
        ),
        "com.microsoft": "SimplifiedLayerNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization",
    },
    "pooling": {
        "": "AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool LpPool MaxPool MaxRoiPool",
        "com.microsoft": "MaxpoolWithMask NhwcMaxPool",
    },
    "products": {
        "com.microsoft": "MatMulNBits",
    },
    "quantized_weights": {
        "com.microsoft": "MatMulBnb4",
        "genai": "QuantizedGather QuantizedMatMul",
    },
    "recurrent": {
        "": "GRU LSTM RNN",
    },
    "reduction": {
        "": (
            "ArgMax ArgMin CumProd CumSum Hardmax LogSoftmax NegativeLogLikelihoodLoss ReduceL1 ReduceL2 "
            "ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare "
            "Softmax"
        ),
    },
    "reshaping": {
        "": "Flatten Reshape Shape Size Squeeze Unsqueeze",
    },
    "resize": {
        "": "GridSample Resize Upsample",
        "com.microsoft": "CropAndResize GridSample",
    },
    "signals": {
        "": "BlackmanWindow HammingWindow HannWindow MelWeightMatrix STFT",
    },
    "slicing": {
        "": "Slice Split",
    },
    "svm": {
        "ai.onnx.ml": "SVMClassifier SVMRegressor",
    },
    "text": {
        "": "RegexFullMatch StringConcat StringNormalizer StringSplit TfIdfVectorizer",
        "com.microsoft": "Tokenizer",
    },
    "trees": {
        "ai.onnx.ml": "TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor",
    },
}
"""The names of operators by file and domain."""
