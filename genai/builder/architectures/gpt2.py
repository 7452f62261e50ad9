"""GPT-2: learned positions, everything biased, matrices stored as [inputs, outputs]."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ...errors import UnsupportedModelError
from ..architecture import Architecture, Rule, View
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import activation, biases, decoder, layer_norms
from .cuts import transposed


def describe(config: HFConfig) -> DecoderSpec:
    if config.flag("scale_attn_by_inverse_layer_idx") or not config.flag("scale_attn_weights", default=True):
        raise UnsupportedModelError(
            "GPT-2 with scores scaled by layer, or not at all",
            "only 1 / sqrt(head size) is known here",
            "use another checkpoint",
        )
    hidden = config.integer("n_embd", "hidden_size")
    return decoder(
        config,
        num_key_value_heads=config.integer("n_head", "num_attention_heads"),
        tied=True,
        epsilon=1e-5,
        intermediate_size=config.integer("n_inner", default=4 * hidden),
        hidden_activation=activation(config.text("activation_function", default="gelu_new")),
        gated_mlp=False,
        position_embeddings=True,
        **biases(True, True),
        **layer_norms(),
    )


def part(index: int) -> View:
    """Queries, keys or values out of a matrix [inputs, 3 * outputs], or a bias."""

    def view(spec: DecoderSpec, tensor: NDArray[Any], *numbers: int) -> NDArray[Any]:
        size = spec.query_size
        return tensor.T[index * size : (index + 1) * size]

    return view


RULES = (
    Rule(r"^model\.embed_tokens", "transformer.wte"),
    Rule(r"^model\.embed_positions", "transformer.wpe"),
    Rule(r"^model\.norm", "transformer.ln_f"),
    Rule(r"^model\.layers", "transformer.h"),
    Rule(r"input_layernorm", "ln_1"),
    Rule(r"post_attention_layernorm", "ln_2"),
    *(Rule(rf"self_attn\.{name}_proj", "attn.c_attn", part(index)) for index, name in enumerate("qkv")),
    Rule(r"self_attn\.o_proj", "attn.c_proj", transposed),
    Rule(r"mlp\.up_proj", "mlp.c_fc", transposed),
    Rule(r"mlp\.down_proj", "mlp.c_proj", transposed),
)

ARCHITECTURE = Architecture("gpt2", "GPT-2", describe, RULES)
