"""How a decoder is written: precisions, block format and graph variants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from genai.kernels.weights import BLOCKS

from ..errors import OptionError

# "blocks" is what "kept" becomes for matrices that are quantised; nobody asks for it.
Precision = Literal["fp32", "fp16", "int8", "int4", "kept", "blocks"]
PRECISIONS = ("fp32", "fp16", "int8", "int4", "kept")
BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of write_model_folder.

    Attributes:
        precision: of the projections as they are stored. Activations, norms and the KV cache are always float32, and
            products with fp16 weights are computed in float32. "kept" changes nothing: quantised blocks of a GGUF
            file stay these numbers, and floats are stored as float16 where they are that, else as float32.
        block_size: consecutive inputs that share a scale: 16, 32, 64, 128 or 256.
        symmetric: False gives every block a zero point.
        half_scales: scales are numbers of float16 wherever it holds them well, so that products read a ninth less;
            False keeps them as they come, and the folder is that of onnxruntime-genai's builder to the bit.
        accuracy_level: to what products may round activations: 4 int8; 1 float32, as 0 (unset), 2 and 3.
        head_precision: None means as the projections.
        embedding_precision: None means the head's if both are one matrix and the projections are int4, else fp32
            (fp16 if the projections are).
        packed_qkv: one projection for queries, keys and values.
        fused_rope: rotation inside the attention operator. False rotates queries and keys before it, at positions
            that are an input of the graph, and keeps their projections apart; onnxruntime needs it where the rotated
            part of a head is no multiple of 16.
        prune_lm_head: logits of the last position only.
        windowed_kv_cache: layers with a sliding window keep only that many past tokens.

    Raises:
        OptionError: a value that is not offered.
    """

    precision: Precision = "int4"
    block_size: int = 32
    symmetric: bool = True
    half_scales: bool = True
    accuracy_level: int = 4
    head_precision: Precision | None = None
    embedding_precision: Precision | None = None
    packed_qkv: bool = True
    fused_rope: bool = True
    prune_lm_head: bool = False
    windowed_kv_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("precision", "head_precision", "embedding_precision"):
            value = getattr(self, name)
            if value not in PRECISIONS and (value is not None or name == "precision"):
                raise _error(name, value, PRECISIONS)
        if self.block_size not in BLOCKS:
            raise _error("block_size", self.block_size, BLOCKS)
        if self.precision == "kept" and (self.block_size != 32 or not self.symmetric):
            raise OptionError(
                "block_size and zero points were asked for with precision 'kept'",
                "what is kept has the blocks of the file", "leave them out, or choose a precision",
            )  # fmt: skip
        if self.accuracy_level not in range(5):
            raise _error("accuracy_level", self.accuracy_level, range(5))

    @property
    def product_attributes(self) -> dict[str, int]:
        """What operators that multiply with blocks are told; the accuracy level 0 is their default, and left out."""
        level = {"accuracy_level": self.accuracy_level} if self.accuracy_level else {}
        return {"block_size": self.block_size, **level}

    @property
    def head(self) -> Precision:
        return self.head_precision or self.precision

    def embedding(self, *, tied: bool) -> Precision:
        """Precision of the embedding table, given whether the head is the same matrix."""
        if self.embedding_precision is not None:
            return self.embedding_precision
        if self.precision in ("fp16", "kept"):
            return self.precision
        return self.head if tied and self.precision == "int4" else "fp32"


def _error(name: str, value: object, known: tuple[object, ...] | range) -> OptionError:
    return OptionError(
        f"{name} is {value!r}", f"it can be {', '.join(map(repr, known))}", f"choose one of these for {name}"
    )
