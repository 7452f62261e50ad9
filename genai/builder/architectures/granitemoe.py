"""Granite 3 with experts, all of a layer's in one tensor."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ..architecture import Architecture, Rule
from ..hf_config import HFConfig
from ..spec import DecoderSpec, Experts
from .common import biases, decoder
from .granite import multipliers


def describe(config: HFConfig) -> DecoderSpec:
    experts = Experts(
        count=config.integer("num_local_experts"),
        per_token=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("intermediate_size"),
    )
    return decoder(config, experts=experts, **multipliers(config), **biases(config.flag("attention_bias"), False))


def gate(spec: DecoderSpec, tensor: NDArray[Any], expert: int) -> NDArray[Any]:
    """The gate of one expert out of [experts, 2 * width, inputs]."""
    return tensor[expert, : tensor.shape[1] // 2]


def up(spec: DecoderSpec, tensor: NDArray[Any], expert: int) -> NDArray[Any]:
    return tensor[expert, tensor.shape[1] // 2 :]


def down(spec: DecoderSpec, tensor: NDArray[Any], expert: int) -> NDArray[Any]:
    matrix: NDArray[Any] = tensor[expert]
    return matrix


RULES = (
    Rule(r"mlp\.experts\.(\d+)\.gate_proj", "block_sparse_moe.input_linear", gate),
    Rule(r"mlp\.experts\.(\d+)\.up_proj", "block_sparse_moe.input_linear", up),
    Rule(r"mlp\.experts\.(\d+)\.down_proj", "block_sparse_moe.output_linear", down),
    Rule(r"mlp\.gate\.", "block_sparse_moe.router.layer."),
)

ARCHITECTURE = Architecture("granitemoe", "Granite 3 MoE", describe, RULES)
