"""The rules for general graphs, in the order that they run."""

from __future__ import annotations

from .attention import FuseAttention
from .base import Rewrite
from .byte_tables import TabulateBytes
from .common_subexpressions import ShareSubexpressions
from .constant_folding import FoldConstants
from .conv_batch_norm import FoldConvBatchNorm
from .conv_neighbours import FoldPadIntoConv, FuseConvActivation, FuseConvAddition
from .dead_code import RemoveDeadCode
from .gelu import FuseGelu
from .identity import RemoveIdentities
from .joined_products import JoinProducts
from .known_reshapes import FoldKnownReshapes
from .known_shapes import FoldKnownShapes
from .layer_norm import FuseLayerNorm
from .linear import FuseLinear
from .linear_tail import FuseLinearActivation, FuseLinearAddition
from .quantized_arithmetic import FuseQuantizedArithmetic
from .quantized_moves import MoveQuantized
from .quantized_nodes import FuseQuantizedNodes
from .quantized_products import FuseIntegerProductBias, FuseMatMulIntegerToFloat
from .transposes import MergeTransposes

SESSION_RULES: tuple[Rewrite, ...] = (
    RemoveIdentities(),
    FoldKnownShapes(),
    FoldConstants(),
    ShareSubexpressions(),
    MergeTransposes(),
    FoldPadIntoConv(),
    FoldConvBatchNorm(),
    FuseConvActivation(),
    FuseConvAddition(),
    FuseLayerNorm(),
    FuseGelu(),
    FuseAttention(),
    FuseMatMulIntegerToFloat(),
    FuseQuantizedNodes(),
    FuseIntegerProductBias(),
    MoveQuantized(),
    FuseQuantizedArithmetic(),
    FuseLinear(),
    FuseLinearActivation(),
    FuseLinearAddition(),
    JoinProducts(),
    FoldKnownReshapes(),
    TabulateBytes(),
    RemoveDeadCode(),
)
