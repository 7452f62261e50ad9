"""What a step must do at least: the bytes it reads and the products it computes."""

from __future__ import annotations

from dataclasses import dataclass

from genai.kernels.cpu.isa import isa

from ..engine.paged import PagedDecoder
from ..model import Model
from ..runtime.segments import TapeStep


@dataclass(frozen=True)
class Traffic:
    """Per step of one model.

    Attributes:
        weight_bytes: packed weights, all of which a step of few tokens reads once.
        products_per_token: multiplications with weights that every token needs; the head's, which only wanted rows
            need, are left out.
        kv_bytes_per_token: keys and values that a decode step reads per token of context.
        arithmetic: the kind of products in which prompts are computed, as `genai.machine.products` names it.
    """

    weight_bytes: int
    products_per_token: int
    kv_bytes_per_token: int
    arithmetic: str

    def decode_bytes(self, context: int, batch: int) -> int:
        """Bytes that a decode step of `batch` sequences with so many tokens of context reads."""
        return self.weight_bytes + batch * context * self.kv_bytes_per_token

    def prefill_operations(self, tokens: int) -> int:
        """Additions and multiplications with weights (attention left out) for a prompt."""
        return 2 * tokens * self.products_per_token


def traffic_of(model: Model) -> Traffic | None:
    """None where it is not known: experts that are read or not, graphs that do not run on tapes alone."""
    decoder = model.decoder
    if not isinstance(decoder, PagedDecoder):
        return None
    tapes = [step.kernel for step in decoder.plan.steps]
    if not all(isinstance(tape, TapeStep) for tape in tapes):
        return None
    products = [product for tape in tapes if isinstance(tape, TapeStep) for product in tape.products]
    quantized = all(product.quantized for product in products)
    return Traffic(
        weight_bytes=sum(product.weight_bytes for product in products),
        products_per_token=sum(product.num_weights for product in products if product.per_token),
        kv_bytes_per_token=model.info.kv_bytes_per_token,
        arithmetic={"amx": "amx bf16", "vnni": "vnni int8"}.get(isa(), "fp32") if quantized else "fp32",
    )
