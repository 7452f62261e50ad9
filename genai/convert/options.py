"""Options for writing a decoder: precisions, block format and graph variants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from genai.kernels.weights import BLOCKS

from ..errors import OptionError

# "blocks" is internal: the precision of matrices that are already quantised when the option is "kept".
Precision = Literal["fp32", "fp16", "int8", "int4", "kept", "blocks"]
PRECISIONS = ("fp32", "fp16", "int8", "int4", "kept")
BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of write_model_folder.

    Attributes:
        precision: storage format of the projections. Activations, norms and the KV cache are always float32, and
            matmuls with fp16 weights are computed in float32. "kept" changes nothing: quantised blocks of a GGUF file
            keep their exact values, float16 weights stay float16, and other floats are stored as float32.
        block_size: number of consecutive inputs that share a scale: 16, 32, 64, 128 or 256.
        symmetric: True for blocks without zero points, False for a zero point in every block.
        half_scales: True to store scales as float16 wherever it represents them well, so that matmuls read a ninth
            less data. False stores them unchanged; the folder is then bit-identical to the one that onnxruntime-genai's
            builder writes.
        accuracy_level: precision to which matmuls may round activations: 4 means int8; 1 means float32, and so do
            0 (unset), 2 and 3.
        head_precision: precision of the head; None means the precision of the projections.
        embedding_precision: precision of the embedding table. None means the head's precision if both share one matrix
            and the projections are int4, fp16 if the projections are fp16, "kept" if they are "kept", and fp32
            otherwise.
        packed_qkv: True for one combined projection for queries, keys and values.
        fused_rope: True for rotation inside the attention operator. If False, queries and keys are rotated before the
            operator, their positions are an input of the graph, and their projections stay separate; onnxruntime
            requires False if the size of the rotated part of a head is not a multiple of 16.
        prune_lm_head: True to compute only the logits of the last position.
        mtp: True to require the checkpoint's MTP head, a layer that proposes tokens for speculative decoding. False to
            leave it out. None to write the head if the checkpoint has one that the toolkit supports.
        windowed_kv_cache: True if layers with a sliding window cache only the tokens within it.

    Raises:
        OptionError: a value is not supported.
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
    mtp: bool | None = None

    def __post_init__(self) -> None:
        for name in ("precision", "head_precision", "embedding_precision"):
            value = getattr(self, name)
            if value not in PRECISIONS and (value is not None or name == "precision"):
                raise _error(name, value, PRECISIONS)
        if self.block_size not in BLOCKS:
            raise _error("block_size", self.block_size, BLOCKS)
        if self.precision == "kept" and (self.block_size != 32 or not self.symmetric):
            raise OptionError(
                "block_size and zero points cannot be combined with precision 'kept'",
                "weights with this precision keep the blocks of the source file",
                "omit both options, or choose another precision",
            )  # fmt: skip
        if self.accuracy_level not in range(5):
            raise _error("accuracy_level", self.accuracy_level, range(5))
        if self.prune_lm_head and self.mtp:
            raise OptionError(
                "prune_lm_head cannot be combined with mtp",
                "the tokens that an MTP head proposes are verified with the logits of several positions",
                "omit one of the two options",
            )

    @property
    def product_attributes(self) -> dict[str, int]:
        """The attributes of operators that multiply by blocks, without accuracy_level if it is 0 (the default)."""
        level = {"accuracy_level": self.accuracy_level} if self.accuracy_level else {}
        return {"block_size": self.block_size, **level}

    @property
    def head(self) -> Precision:
        return self.head_precision or self.precision

    def embedding(self, *, tied: bool) -> Precision:
        """Return the precision of the embedding table; `tied` is True if the head uses the same matrix."""
        if self.embedding_precision is not None:
            return self.embedding_precision
        if self.precision in ("fp16", "kept"):
            return self.precision
        return self.head if tied and self.precision == "int4" else "fp32"


def _error(name: str, value: object, known: tuple[object, ...] | range) -> OptionError:
    return OptionError(
        f"{name} is {value!r}",
        f"the supported values are {', '.join(map(repr, known))}",
        f"use a supported value for {name}",
    )
