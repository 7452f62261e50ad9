"""The operators of com.microsoft that onnxruntime registers and this toolkit does not support, with the reasons.

`tools.operator_table` writes them into docs/reference/operators.md; `tests/ops/test_operator_table.py` compares the
names with the schemas and the CPU kernels of the installed onnxruntime.
"""

from __future__ import annotations

VERSION = "1.32"
"""The version of onnxruntime that the lists describe."""

NO_CPU_KERNEL = "onnxruntime has no CPU kernel"
NO_WRITER = f"no converter or quantiser of onnxruntime {VERSION} writes it"
_LINEAR_ATTENTION = "linear attention in decoders, which is not supported yet"

_NAMES = {
    NO_CPU_KERNEL: """
        BiasDropout BiasSoftmax BitmaskBiasDropout BitmaskDropout ComplexMul ComplexMulConj ConvStateReplay
        DecoderAttention DecoderMaskedSelfAttention DequantizeBFP DequantizeWithOrder DynamicSparseAttention EPContext
        FusedMatMulActivation GatedDeltaNetStateReplay GatedRelativePositionBias GemmFastGelu GemmFloat8
        GemmaRotaryEmbedding GroupNorm HyperConnectionLowRankMix Irfft IsAllFinite LongformerAttention Mamba2Verify
        MatMulBlockQuantizedFp4Weight MatMulBlockQuantizedFp8Weight MatMulNBitsMlp MatMulNBitsQLoRA MatMulNBitsQkv
        MatMulPacked MoEPacked MulInteger NhwcConv NhwcFusedConv PackedAttention PackedMultiHeadAttention
        PackedSparseAttentionIndexer PackedSparseAttentionIndexerMerge PagedAttention QLinearReduceMean
        QOrderedAttention QOrderedGelu QOrderedLayerNormalization QOrderedLongformerAttention QOrderedMatMul
        QuantizeBFP QuantizeWithOrder RMSNormRotary ReduceSumInteger RelativePositionBias RemovePadding RestorePadding
        Rfft RouterGateUpProj SkipGroupNorm Snpe SparseAttentionIndexer SparsePagedAttention SpeculativePrefixCommit
        SwiGLU TorchEmbedding
    """,
    NO_WRITER: """
        AttnLSTM BifurcationDetector BranchwiseRMSNorm EngramGate GatherPacked HyperConnectionPostMix
        HyperConnectionPreMix MatMulFpQ4 MoEGroupRouter NGramHashMapping ScaledSiLU VarlenNGramHashMapping
        WordConvEmbedding
    """,
    _LINEAR_ATTENTION: """
        CausalConvWithState GatedDeltaNet GatedRMSNorm LinearAttention LinearAttentionGate VarlenCausalConvWithState
    """,
    "generation inside a graph; the toolkit generates outside the graph": """
        BeamSearch GreedySearch Sampling WhisperBeamSearch
    """,
    "written only for graphs of BeamSearch and GreedySearch": "DecoderMaskedMultiHeadAttention",
    "positions of images in decoders, which are not supported yet": "MRotaryEmbedding",
    "block-sparse attention in decoders, which is not supported yet": "SparseAttention",
    "an example for developers of operators": "SampleOp",
    "its input is a sparse tensor, and the values of sessions are dense": "SparseToDenseMatMul",
}

UNSUPPORTED = {name: reason for reason, names in _NAMES.items() for name in names.split()}
"""The reason for each operator that is not supported."""

NOT_REGISTERED = frozenset({"SimplifiedLayerNormalization"})
"""Supported operators that onnxruntime registers only in the domain ai.onnx."""
