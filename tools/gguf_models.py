"""Tiny GGUF models with random weights, one per architecture and weight type, written with llama.cpp's `gguf` package.

The weights come from `numpy.random.RandomState`, whose numbers are the same in every version of NumPy. llama.cpp's
logits for these files are stored in tests/convert/gguf_goldens, and the tests write the same files again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from genai.quant.ggml import GGML_TYPES, GgmlType
from tools.gguf_layouts import LAYOUTS

HIDDEN, VOCAB, CONTEXT, HEADS, HEAD = 256, 288, 1024, 4, 64
TOKENS = tuple(int(token) for token in np.random.RandomState(7).randint(0, VOCAB, 24))
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARIES = Path(__file__).resolve().parent.parent / "tests" / "text" / "goldens" / "vocabularies.json"
Tensors = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Shape:
    """A decoder in llama.cpp's terms.

    Attributes:
        arch: general.architecture.
        keys: other metadata, without the architecture's name as a prefix.
        qk: norms of queries and keys: "", "head", "heads" or "all".
        bias: the projections that have a bias: any of "qkv", "o", "mlp" and "head".
        recurrent: the part in place of the attention of all layers except every third: "", "conv" (LFM2), "mamba"
            (Mamba-2), or Gated DeltaNet with its projections in "apart" (Qwen 3.5) or "joined" (Qwen3-Next) tensors;
            "beside" is Mamba-2 beside the attention of every layer. In "alone", the layers are Mamba-2, a feed-forward
            layer and attention in turns. In "only", all layers are Mamba-2.
        dense: number of layers at the start that have no experts.
        attending: the layers that have attention, if it is not every third.
    """

    arch: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 2
    kv_heads: int = 2
    width: int = 512
    rotated: int = 64
    layer_norm: bool = False
    norm_weights: bool = True
    norm_biases: bool = False
    pre: bool = True
    post: bool = False
    one_norm: bool = False
    second_norm: bool = False
    qk: str = ""
    bias: tuple[str, ...] = ()
    packed: bool = False
    gated: bool = True
    gate_in_up: bool = False
    tied: bool = False
    experts: int = 0
    shared: int = 0
    positions: bool = False
    divisors: tuple[str, ...] = ()
    recurrent: str = ""
    dense: int = 0
    hidden: int = HIDDEN
    heads: int = HEADS
    head: int = HEAD
    vocab: int = VOCAB
    attending: tuple[int, ...] = ()

    def has_attention(self, layer: int) -> bool:
        """Return True if a layer has attention."""
        if self.attending:
            return layer in self.attending
        return self.recurrent in ("", "beside") or (self.recurrent != "only" and layer % 3 == 2)


_LAYER_NORM: dict[str, Any] = {"layer_norm": True, "norm_biases": True, "gated": False}
_ALL_BIASES: dict[str, Any] = {"bias": ("qkv", "o", "mlp"), **_LAYER_NORM}
_GRANITE = {"attention.scale": 0.1, "embedding_scale": 3.0, "residual_scale": 0.3, "logit_scale": 4.0}
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 256}
_LONG = {"rope.scaling.original_context_length": 512, "rope.scaling.attn_factor": 1.19}
_GEMMA2 = {"attention.sliding_window": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}

_GEMMA4: dict[str, Any] = {
    "attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False] * 2, "rope.freq_base_swa": 5000.0,
    "attention.key_length": 128, "attention.value_length": 128, "attention.key_length_swa": 64,
    "attention.value_length_swa": 64, "rope.dimension_count": 128, "rope.dimension_count_swa": 64,
    "final_logit_softcapping": 30.0, "attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "attention.kv_lora_rank": 64, "attention.q_lora_rank": 96, "rope.dimension_count": 16,
    "attention.layer_norm_rms_epsilon": 1e-6, "expert_shared_count": 1,
}  # fmt: skip
_SPLIT = {
    "attention.key_length": 80, "attention.value_length": 64, "attention.key_length_mla": 48,
    "attention.value_length_mla": 40,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "full_attention_interval": 3,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
}
_MAMBA = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 512,
}
_SECTIONS = {"rope.dimension_sections": [3, 3, 2, 0]}
_SIGMOIDS = {"expert_gating_func": 2, "leading_dense_block_count": 1}

SHAPES: dict[str, Shape] = {
    "llama": Shape("llama"),
    "llama_divisors": Shape("llama", tied=True, divisors=("rope_freqs",)),
    "llama_linear": Shape("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "llama_yarn": Shape("llama", _YARN),
    "llama_not_scaled": Shape("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "llama_louder": Shape("llama", {"rope.scaling.attn_factor": 0.7}),
    "llama_divisors_linear": Shape("llama", {"rope.scaling.factor": 4.0}, tied=True, divisors=("rope_freqs",)),
    "llama_divisors_yarn": Shape("llama", {**_YARN, "rope.scaling.attn_factor": 0.7}, divisors=("rope_freqs",)),
    "llama_yarn_shrunk": Shape("llama", {**_YARN, "rope.scaling.factor": 0.5}),
    "llama_experts": Shape("llama", experts=4, width=256),
    "llama4": Shape(
        "llama4", {"interleave_moe_layer_step": 4, "expert_used_count": 1},
        layers=4, divisors=("rope_freqs",), experts=4, shared=256, dense=3,
    ),
    "qwen2": Shape("qwen2", bias=("qkv",)),
    "qwen2moe": Shape("qwen2moe", {"expert_shared_feed_forward_length": 256}, bias=("qkv",), experts=4, shared=256),
    "qwen3": Shape("qwen3", qk="head", tied=True),
    "qwen3moe": Shape("qwen3moe", qk="head", experts=4),
    "gemma": Shape("gemma", tied=True),
    "gemma2": Shape("gemma2", _GEMMA2, tied=True, post=True),
    "gemma3": Shape(
        "gemma3", {"attention.sliding_window": 16, "rope.freq_base_swa": 5000.0},
        layers=7, tied=True, post=True, qk="head",
    ),
    "gemma3n": Shape(
        "gemma3n",
        {
            "attention.sliding_window": 8, "attention.sliding_window_pattern": [True, True, False, True, False],
            "rope.freq_base_swa": 5000.0, "attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 256,
            # llama.cpp's constant, times the ratio of its standard deviation (of n - 1) to that of transformers (of n).
            "activation_sparsity_scale": [1.6448533535003662 * (512 / 511) ** 0.5] * 5,
            "altup.num_inputs": 4, "altup.active_idx": 0,
        },
        layers=5, tied=True,
    ),
    "gemma4": Shape("gemma4", {**_GEMMA4, "attention.head_count_kv": [2, 1] * 2}, layers=4, tied=True),
    "gemma4_inputs": Shape(
        "gemma4",
        {
            **_GEMMA4, "attention.head_count_kv": [1] * 6, "embedding_length_per_layer_input": 32,
            "attention.sliding_window_pattern": [True, False] * 3, "attention.shared_kv_layers": 2,
            "feed_forward_length": [256] * 4 + [512] * 2,
        },
        layers=6, tied=True,
    ),
    "gemma4_experts": Shape(
        "gemma4",
        {**_GEMMA4, "attention.head_count_kv": [2, 1], "attention.sliding_window_pattern": [True, False]},
        tied=True, experts=4,
    ),
    "qwen2vl": Shape(  # llama.cpp ignores the epsilon
        "qwen2vl", {"rope.dimension_sections": [12, 10, 10, 0], "attention.layer_norm_rms_epsilon": 1e-12},
        bias=("qkv",),
    ),
    "qwen3vl": Shape("qwen3vl", {"rope.dimension_sections": [11, 11, 10, 0]}, qk="head", tied=True),
    "qwen3vlmoe": Shape("qwen3vlmoe", {"rope.dimension_sections": [11, 11, 10, 0]}, qk="head", experts=4),
    "mistral3": Shape(
        "mistral3",
        {
            **_YARN, "rope.scaling.original_context_length": 8, "rope.scaling.yarn_log_multiplier": 0.5,
            "attention.temperature_scale": 0.2,
        },
    ),
    "mistral3_not_scaled": Shape("mistral3", tied=True),
    "apertus": Shape(
        "apertus",
        {
            "xielu.alpha_p": [0.8, 0.3], "xielu.alpha_n": [0.2, -0.4], "xielu.beta": [0.5, 0.5],
            "xielu.eps": [-1e-6, -1e-6],
        },
        gated=False, qk="head", divisors=("rope_freqs",),
    ),
    "arcee": Shape("arcee", gated=False),
    "seed_oss": Shape("seed_oss", bias=("qkv",)),
    "hunyuan-dense": Shape("hunyuan-dense", {"rope.scaling.alpha": 50.0}, qk="head", tied=True),
    "glm4moe": Shape(
        "glm4moe", {**_SIGMOIDS, "expert_shared_count": 1, "expert_weights_norm": True, "expert_weights_scale": 2.5},
        rotated=32, bias=("qkv",), qk="head", experts=4, shared=256, dense=1,
    ),
    "dots1": Shape(
        "dots1", {**_SIGMOIDS, "expert_shared_count": 2, "expert_weights_scale": 2.5},
        kv_heads=4, qk="head", experts=4, shared=512, dense=1,
    ),
    "exaone-moe": Shape(
        "exaone-moe",
        {
            **_SIGMOIDS, "expert_shared_count": 1, "expert_shared_feed_forward_length": 256,
            "expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_group_count": 2,
            "expert_group_used_count": 1, "attention.sliding_window": 8, "attention.sliding_window_pattern": 4,
        },
        layers=5, qk="head", experts=4, shared=256, dense=1,
    ),
    "granitemoe_shared": Shape(
        "granitemoe", {**_GRANITE, "expert_shared_feed_forward_length": 512},
        tied=True, experts=4, width=256, shared=512,
    ),
    "phi2": Shape("phi2", kv_heads=4, rotated=32, one_norm=True, bias=("qkv", "o", "mlp", "head"), **_LAYER_NORM),
    "phi3": Shape("phi3", kv_heads=4, packed=True, gate_in_up=True),
    "phi3_long": Shape(
        "phi3", _LONG, kv_heads=4, packed=True, gate_in_up=True, divisors=("rope_factors_short", "rope_factors_long")
    ),
    "olmo": Shape("olmo", kv_heads=4, layer_norm=True, norm_weights=False),
    "olmo2": Shape("olmo2", kv_heads=4, pre=False, post=True, qk="all"),
    "olmo2_windows": Shape(
        "olmo2", {**_YARN, "attention.sliding_window": 8}, layers=5, kv_heads=4, pre=False, post=True, qk="all"
    ),
    "granite_defaults": Shape("granite", {"logit_scale": 4.0, "attention.scale": 0.0}, tied=True),
    "granite_not_rotated": Shape("granite", {**_GRANITE, "rope.scaling.finetuned": False}, tied=True),
    "granite": Shape("granite", _GRANITE, tied=True),
    "granitemoe": Shape("granitemoe", _GRANITE, tied=True, experts=4, width=256),
    "starcoder2": Shape("starcoder2", tied=True, **_ALL_BIASES),
    "gpt2": Shape("gpt2", kv_heads=4, packed=True, positions=True, tied=True, **_ALL_BIASES),
    "gptneox": Shape("gptneox", {"use_parallel_residual": True}, kv_heads=4, rotated=16, packed=True, **_ALL_BIASES),
    "falcon": Shape("falcon", kv_heads=1, packed=True, one_norm=True, tied=True, **_LAYER_NORM),
    "falcon_two_norms": Shape("falcon", packed=True, one_norm=True, second_norm=True, tied=True, **_LAYER_NORM),
    "stablelm": Shape("stablelm", rotated=16, layer_norm=True, norm_biases=True, bias=("qkv",)),
    "command-r": Shape("command-r", {"logit_scale": 0.0625}, layer_norm=True, one_norm=True, tied=True),
    "cohere2": Shape(
        "cohere2", {"logit_scale": 0.0625, "attention.sliding_window": 16},
        layers=4, layer_norm=True, one_norm=True, tied=True,
    ),
    "glm4": Shape("glm4", rotated=32, post=True, gate_in_up=True, bias=("qkv",)),
    "exaone4": Shape("exaone4", layers=4, pre=False, post=True, qk="head"),
    "smollm3": Shape("smollm3", layers=4, tied=True),
    "nemotron": Shape("nemotron", rotated=32, **_LAYER_NORM),
    "ernie4_5": Shape("ernie4_5", tied=True),
    "ernie4_5-moe": Shape(
        "ernie4_5-moe",
        {
            "interleave_moe_layer_step": 1, "leading_dense_block_count": 1, "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 512, "expert_gating_func": 1,
        },
        layers=3, tied=True, experts=4, shared=512, dense=1,
    ),
    "olmoe": Shape("olmoe", kv_heads=4, width=256, qk="all", experts=4),
    "falcon-h1": Shape("falcon-h1", _MAMBA, recurrent="beside"),
    "mamba": Shape(
        "mamba",
        {
            "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.time_step_rank": 32, "ssm.inner_size": 512,
            "attention.head_count": 0, "feed_forward_length": 0,
        },
        tied=True, recurrent="only",
    ),
    "jamba": Shape(
        "jamba",
        {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.time_step_rank": 16, "ssm.inner_size": 512},
        layers=4, recurrent="mamba", experts=4, width=256, dense=1,
    ),
    "jamba_dense": Shape(
        "jamba",
        {"ssm.conv_kernel": 3, "ssm.state_size": 8, "ssm.time_step_rank": 24, "ssm.inner_size": 512},
        layers=3, tied=True, recurrent="mamba",
    ),
    "kimi-linear": Shape(
        "kimi-linear",
        {
            **_LATENT, **_SPLIT, "attention.q_lora_rank": 0, "attention.head_count_kv": [0, 0, 1, 0],
            "kda.head_dim": 32, "ssm.conv_kernel": 4, "expert_gating_func": 2, "leading_dense_block_count": 1,
            "expert_weights_scale": 2.5,
        },
        layers=4, recurrent="mamba", experts=4, dense=1,
    ),
    "mamba2": Shape(
        "mamba2", {**_MAMBA, "attention.head_count": 0, "feed_forward_length": 0}, tied=True, recurrent="only"
    ),
    "nemotron_h": Shape(
        "nemotron_h", {**_MAMBA, "attention.layer_norm_epsilon": 1e-5}, layers=4, recurrent="alone"
    ),
    "nemotron_h_moe": Shape(
        "nemotron_h_moe",
        {
            **_MAMBA, "attention.layer_norm_epsilon": 1e-5, "expert_shared_feed_forward_length": 512,
            "expert_weights_norm": True, "expert_weights_scale": 2.5, "moe_latent_size": 128,
        },
        layers=4, recurrent="alone", experts=4, shared=512,
    ),
    "lfm2": Shape("lfm2", {"shortconv.l_cache": 3}, layers=4, tied=True, qk="head", recurrent="conv"),
    "lfm2moe": Shape(
        "lfm2moe", {"shortconv.l_cache": 3, **_SIGMOIDS},
        layers=4, tied=True, qk="head", recurrent="conv", experts=4, dense=1,
    ),
    "minicpm": Shape("minicpm", {"embedding_scale": 12.0, "residual_scale": 0.5, "logit_scale": 4.0}, tied=True),
    "minicpm3": Shape(
        "minicpm3",
        {
            "attention.kv_lora_rank": 64, "attention.q_lora_rank": 96, "rope.dimension_count": 16,
            "attention.layer_norm_rms_epsilon": 1e-6, "attention.key_length": 48, "attention.value_length": 64,
        },
        kv_heads=4, tied=True, dense=2, divisors=("rope_factors_short", "rope_factors_long"),
    ),
    "deepseek2": Shape(
        "deepseek2",
        {
            **_LATENT, **_SPLIT, **_YARN, "rope.scaling.yarn_log_multiplier": 0.1, "expert_gating_func": 2,
            "leading_dense_block_count": 1, "expert_weights_norm": True, "expert_weights_scale": 2.5,
            "expert_group_count": 4, "expert_group_used_count": 2,
        },
        layers=3, kv_heads=1, experts=8, dense=1,
    ),
    "deepseek2_softmax": Shape(
        "deepseek2",
        {
            **_LATENT, **_YARN, "attention.q_lora_rank": 0, "rope.scaling.yarn_log_multiplier": 0.0707,
            "attention.key_length": 48, "attention.value_length": 32, "expert_gating_func": 1,
            "leading_dense_block_count": 1, "expert_weights_scale": 1.5, "expert_shared_count": 2,
        },
        kv_heads=4, experts=4, dense=1,
    ),
    "deepseek2_dense": Shape(
        "deepseek2",
        {
            **_LATENT, **_SPLIT, **_YARN, "leading_dense_block_count": 2, "expert_shared_count": 0,
            "expert_feed_forward_length": 512,
        },
        kv_heads=1, dense=2,
    ),
    "granitehybrid": Shape("granitehybrid", _GRANITE | _MAMBA, layers=4, tied=True, recurrent="mamba"),
    "granitehybrid_experts": Shape(
        "granitehybrid",
        {**_GRANITE, **_MAMBA, "expert_shared_feed_forward_length": 256, "rope.scaling.finetuned": False},
        layers=3, tied=True, recurrent="mamba", experts=4, shared=256, width=256,
    ),
    "qwen3next": Shape(
        "qwen3next", {**_DELTA, "expert_shared_feed_forward_length": 256},
        layers=3, rotated=16, qk="head", recurrent="joined", experts=4, shared=256,
    ),
    "qwen35": Shape("qwen35", _DELTA | _SECTIONS, layers=4, rotated=16, qk="head", tied=True, recurrent="apart"),
    "qwen35moe": Shape(
        "qwen35moe", {**_DELTA, **_SECTIONS, "expert_shared_feed_forward_length": 256},
        layers=3, rotated=16, qk="head", recurrent="apart", experts=4, shared=256,
    ),
}  # fmt: skip


def write_model(path: Path, shape: Shape, kind: str = "F32", **changes: Any) -> Path:
    """Write a model with matrices of one type; `changes` replace metadata, or remove keys whose value is None."""
    writer = gguf.GGUFWriter(str(path), shape.arch)
    for key, value in (metadata(shape) | changes).items():
        add_value(writer, key, value)
    random = np.random.RandomState(sum(map(ord, shape.arch + kind)))
    for name, values in tensors(shape, normal(random)):
        add_tensor(writer, name, values, kind, random)
    close(writer)
    return path


def close(writer: Any) -> None:
    """Write the collected data to the file and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Parts of the names of matrices that files never quantise.
_FLOAT_PARTS = ("norm", "gate_inp", "position", "rope", "conv1d", "shortconv.conv", "altup_router", "_coef")


def add_tensor(writer: Any, name: str, values: NDArray[np.float32], kind: str, random: np.random.RandomState) -> None:
    """Add a tensor; matrices become random blocks with the same RMS; norms, routers and biases stay floats."""
    if kind == "F32" or values.ndim == 1 or values.shape[-1] == 1 or any(part in name for part in _FLOAT_PARTS):
        writer.add_tensor(name, values)
        return
    number = gguf.GGMLQuantizationType[kind]
    if (found := GGML_TYPES.get(number)) is None:
        writer.add_tensor(name, gguf.quantize(values, number), raw_dtype=number)
        return
    if values.shape[-1] % found.columns:
        writer.add_tensor(name, values)
        return
    rms = float(np.sqrt(np.mean(values.astype(np.float64) ** 2)))
    blocks = random_blocks(found, (*values.shape[:-1], values.shape[-1] // found.columns), random, rms)
    writer.add_tensor(name, blocks.reshape(*blocks.shape[:-2], -1), raw_dtype=number)


# Byte offsets of a block's float16 numbers: its scale, and the scale of its minimum.
_FLOATS = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "Q4_1": (0, 2), "Q5_1": (0, 2),
    "Q4_K": (0, 2), "Q5_K": (0, 2),
}  # fmt: skip
# The second number as a multiple of the first, chosen so that values are centred on zero.
_LEAST = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5, "Q2_K": 1.5}


def random_blocks(
    kind: GgmlType, shape: tuple[int, ...], random: np.random.RandomState, rms: float
) -> NDArray[np.uint8]:
    """Return random blocks [*shape, bytes] whose values have approximately the given RMS."""
    blocks: NDArray[np.uint8] = random.randint(0, 256, (*shape, kind.nbytes)).astype(np.uint8)
    if kind.name == "MXFP4":
        blocks[..., 0] = 127 + round(np.log2(rms / 3))
    elif kind.name == "NVFP4":
        blocks[..., :4] = max(1, round(8 * (np.log2(rms / 3) + 7)))
    elif kind.name == "IQ1_M":
        _spread(blocks, rms * 0.08)
    else:
        _put(blocks, kind.name, 1.0)
        values = gguf.dequantize(
            blocks.reshape(-1, blocks.shape[-2] * kind.nbytes), gguf.GGMLQuantizationType[kind.name]
        )
        _put(blocks, kind.name, rms / float(np.sqrt(np.mean(values.astype(np.float64) ** 2))))
    return blocks


def _put(blocks: NDArray[np.uint8], name: str, scale: float) -> None:
    for place, factor in zip(_FLOATS.get(name, (0,)), (1.0, _LEAST.get(name, 1.0)), strict=False):
        blocks[..., place : place + 2] = np.array([scale * factor], np.float16).view(np.uint8)


def _spread(blocks: NDArray[np.uint8], scale: float) -> None:
    """Write the float of an IQ1_M block, which is split over the highest nibbles of four words."""
    bits = int(np.array([scale], np.float16).view(np.uint16)[0])
    for word in range(4):
        high = blocks[..., 49 + 2 * word]
        high[...] = high & 15 | (bits >> 4 * word & 15) << 4


def metadata(shape: Shape) -> dict[str, Any]:
    """Return all keys except general.architecture, with a byte-level vocabulary."""
    norm = "attention.layer_norm_epsilon" if shape.layer_norm else "attention.layer_norm_rms_epsilon"
    heads = [shape.kv_heads * shape.has_attention(layer) for layer in range(shape.layers)]
    widths = [shape.width * (layer % 3 == 1) for layer in range(shape.layers)]
    own = {
        "context_length": CONTEXT, "embedding_length": shape.hidden, "block_count": shape.layers,
        "feed_forward_length": widths if shape.recurrent == "alone" else shape.width,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": heads if shape.recurrent in ("conv", "mamba", "alone") else shape.kv_heads,
        "attention.key_length": shape.head, "attention.value_length": shape.head,
        norm: 1e-5, "vocab_size": shape.vocab,
    }  # fmt: skip
    if not shape.positions:
        own |= {"rope.dimension_count": shape.rotated, "rope.freq_base": 10000.0}
    if shape.experts:
        own |= {"expert_count": shape.experts, "expert_used_count": 2, "expert_feed_forward_length": 256}
    named = {key if "xielu" in key else f"{shape.arch}.{key}": value for key, value in (own | dict(shape.keys)).items()}
    return named | vocabulary()


def vocabulary() -> dict[str, Any]:
    """Return a vocabulary of bytes, some merges, and chat markers."""
    known = json.loads(VOCABULARIES.read_text(encoding="utf-8"))["byte_level"]
    tokens = sorted(known["vocab"], key=known["vocab"].get)
    bytes_ = [token for token in tokens if len(token) == 1]
    marks = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<defined>"]
    merges = [merge for merge in known["merges"] if all(len(part) == 1 for part in merge)]
    merges = merges[: VOCAB - len(bytes_) - len(marks)]
    listed = [*bytes_, *("".join(merge) for merge in merges), *marks]
    assert len(listed) == VOCAB
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": listed,
        "tokenizer.ggml.token_type": [1] * (VOCAB - 4) + [3, 3, 3, 4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges], "tokenizer.ggml.bos_token_id": VOCAB - 2,
        "tokenizer.ggml.eos_token_id": VOCAB - 3, "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip


def add_value(writer: Any, key: str, value: Any) -> None:
    """Add a metadata value unless it is None."""
    kinds: list[tuple[type, Callable[..., None]]] = [
        (bool, writer.add_bool), (int, writer.add_uint32), (float, writer.add_float32), (str, writer.add_string),
        (list, writer.add_array),
    ]  # fmt: skip
    for kind, add in kinds:
        if isinstance(value, kind):
            add(key, value)
            return


def normal(random: np.random.RandomState) -> Callable[..., NDArray[np.float32]]:
    """Return a function that makes arrays of normal numbers, by default with the variance 1 / columns."""

    def matrix(*dims: int, scale: float | None = None) -> NDArray[np.float32]:
        return (random.standard_normal(dims) * (scale or dims[-1] ** -0.5)).astype(np.float32)

    return matrix


def tensors(shape: Shape, matrix: Callable[..., NDArray[np.float32]]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield the names and values of all tensors; `matrix(*dims, scale)` makes random values."""

    def linear(name: str, rows: int, columns: int, biased: str = "-") -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield f"{name}.weight", matrix(rows, columns)
        if biased in shape.bias:
            yield f"{name}.bias", matrix(rows, scale=0.1)

    def norm(name: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
        if shape.norm_weights:
            yield f"{name}.weight", 1 + matrix(shape.hidden, scale=0.2)
        if shape.norm_biases:
            yield f"{name}.bias", matrix(shape.hidden, scale=0.1)

    if shape.arch in LAYOUTS:
        yield from LAYOUTS[shape.arch](shape, matrix, shape.hidden, shape.vocab)
        return
    yield "token_embd.weight", matrix(shape.vocab, shape.hidden, scale=0.5)
    if shape.positions:
        yield "position_embd.weight", matrix(CONTEXT, shape.hidden, scale=0.3)
    yield from norm("token_embd_norm" if shape.recurrent == "conv" else "output_norm")
    if not shape.tied:
        yield from linear("output", shape.vocab, shape.hidden, "head")
    for name in shape.divisors:
        yield f"{name}.weight", np.linspace(1, 6 if name.endswith("long") else 3, shape.head // 2).astype(np.float32)
    for layer in range(shape.layers):
        path = f"blk.{layer}"
        if shape.has_attention(layer):
            yield from _attention(shape, path, linear, norm, matrix)
        else:
            yield from norm(f"{path}.attn_norm")
        if shape.recurrent in ("alone", "only"):
            yield from _alone(shape, path, layer % 3 if shape.recurrent == "alone" else 0, matrix)
            continue
        if not shape.has_attention(layer) or shape.recurrent == "beside":
            yield from _recurrent(shape, path, matrix)
        if shape.pre and not shape.one_norm:
            has_other = shape.recurrent in ("apart", "joined") or shape.arch in ("seed_oss", "glm4moe")
            for name, values in norm(f"{path}.{'post_attention_norm' if has_other else 'ffn_norm'}"):
                yield name.removesuffix(".weight") if shape.recurrent == "beside" else name, values
        if shape.post:
            yield from norm(f"{path}.post_ffw_norm")
        if not shape.experts or layer < shape.dense:
            if shape.gated and not shape.gate_in_up:
                yield from linear(f"{path}.ffn_gate", shape.width, shape.hidden, "mlp")
            yield from linear(f"{path}.ffn_up", shape.width * (2 if shape.gate_in_up else 1), shape.hidden, "mlp")
            yield from linear(f"{path}.ffn_down", shape.hidden, shape.width, "mlp")
            continue
        yield from _experts(shape, path, matrix)


def _experts(shape: Shape, path: str, matrix: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    yield f"{path}.ffn_gate_inp.weight", matrix(shape.experts, shape.hidden, scale=0.3)
    if "expert_gating_func" in shape.keys:
        yield f"{path}.exp_probs_b.bias", matrix(shape.experts, scale=0.1)
    for part in ("gate", "up", "down"):
        yield f"{path}.ffn_{part}_exps.weight", matrix(shape.experts, 256, shape.hidden)
    if shape.shared:
        if shape.arch.startswith("qwen"):
            yield f"{path}.ffn_gate_inp_shexp.weight", matrix(shape.hidden, scale=0.3)
        for part in ("gate", "up"):
            yield f"{path}.ffn_{part}_shexp.weight", matrix(shape.shared, shape.hidden)
        yield f"{path}.ffn_down_shexp.weight", matrix(shape.hidden, shape.shared)


def _alone(shape: Shape, path: str, kind: int, matrix: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    if kind == 0:
        yield from _recurrent(shape, path, matrix)
    elif kind == 1 and shape.experts:
        latent = shape.keys["moe_latent_size"]
        yield f"{path}.ffn_gate_inp.weight", matrix(shape.experts, shape.hidden, scale=0.3)
        yield f"{path}.exp_probs_b.bias", matrix(shape.experts, scale=0.1)
        yield f"{path}.ffn_latent_down.weight", matrix(latent, shape.hidden)
        yield f"{path}.ffn_latent_up.weight", matrix(shape.hidden, latent)
        yield f"{path}.ffn_up_exps.weight", matrix(shape.experts, 256, latent)
        yield f"{path}.ffn_down_exps.weight", matrix(shape.experts, latent, 256)
        yield f"{path}.ffn_up_shexp.weight", matrix(shape.shared, shape.hidden)
        yield f"{path}.ffn_down_shexp.weight", matrix(shape.hidden, shape.shared)
    elif kind == 1:
        yield f"{path}.ffn_up.weight", matrix(shape.width, shape.hidden)
        yield f"{path}.ffn_down.weight", matrix(shape.hidden, shape.width)


def _recurrent(shape: Shape, path: str, matrix: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    if shape.recurrent == "conv":
        yield f"{path}.shortconv.in_proj.weight", matrix(3 * shape.hidden, shape.hidden)
        yield f"{path}.shortconv.conv.weight", matrix(shape.hidden, shape.keys["shortconv.l_cache"])
        yield f"{path}.shortconv.out_proj.weight", matrix(shape.hidden, shape.hidden)
        return
    if shape.arch in ("mamba", "jamba"):
        width, rank, size = (shape.keys[f"ssm.{key}"] for key in ("inner_size", "time_step_rank", "state_size"))
        yield f"{path}.ssm_in.weight", matrix(2 * width, shape.hidden)
        yield f"{path}.ssm_conv1d.weight", matrix(width, shape.keys["ssm.conv_kernel"])
        yield f"{path}.ssm_conv1d.bias", matrix(width, scale=0.1)
        yield f"{path}.ssm_x.weight", matrix(rank + 2 * size, width)
        yield f"{path}.ssm_dt.weight", matrix(width, rank)
        yield f"{path}.ssm_dt.bias", matrix(width, scale=0.5)
        yield f"{path}.ssm_a", -np.exp(matrix(width, size, scale=0.5))
        yield f"{path}.ssm_d", matrix(width, scale=0.5)
        yield f"{path}.ssm_out.weight", matrix(shape.hidden, width)
        for part, count in (("dt", rank), ("b", size), ("c", size)) if shape.arch == "jamba" else ():
            yield f"{path}.ssm_{part}_norm.weight", 1 + matrix(count, scale=0.2)
        return
    if shape.recurrent in ("mamba", "beside", "alone", "only"):
        width, heads, groups = (shape.keys[f"ssm.{key}"] for key in ("inner_size", "time_step_rank", "group_count"))
        channels = width + 2 * groups * shape.keys["ssm.state_size"]
        yield f"{path}.ssm_in.weight", matrix(width + channels + heads, shape.hidden)
        yield f"{path}.ssm_conv1d.weight", matrix(channels, shape.keys["ssm.conv_kernel"])
        yield f"{path}.ssm_conv1d.bias", matrix(channels, scale=0.1)
        yield f"{path}.ssm_dt.bias", matrix(heads, scale=0.5)
        yield f"{path}.ssm_a", -np.exp(matrix(heads, 1, scale=0.5))
        yield f"{path}.ssm_d", matrix(heads, 1, scale=0.5)
        yield f"{path}.ssm_norm.weight", 1 + matrix(groups, width // groups, scale=0.2)
        yield f"{path}.ssm_out.weight", matrix(shape.hidden, width)
        return
    keys, heads = shape.keys["ssm.group_count"] * shape.keys["ssm.state_size"], shape.keys["ssm.time_step_rank"]
    values = shape.keys["ssm.inner_size"]
    yield f"{path}.attn_qkv.weight", matrix(2 * keys + values, shape.hidden)
    yield f"{path}.attn_gate.weight", matrix(values, shape.hidden)
    if shape.recurrent == "joined":
        yield f"{path}.ssm_ba.weight", matrix(2 * heads, shape.hidden)
    else:
        yield f"{path}.ssm_beta.weight", matrix(heads, shape.hidden)
        yield f"{path}.ssm_alpha.weight", matrix(heads, shape.hidden)
    yield f"{path}.ssm_conv1d.weight", matrix(2 * keys + values, shape.keys["ssm.conv_kernel"])
    yield f"{path}.ssm_dt.bias", matrix(heads, scale=0.5)
    yield f"{path}.ssm_a", -np.exp(matrix(heads, scale=0.5))
    yield f"{path}.ssm_norm.weight", 1 + matrix(values // heads, scale=0.2)
    yield f"{path}.ssm_out.weight", matrix(shape.hidden, values)


def _attention(
    shape: Shape, path: str, linear: Any, norm: Any, matrix: Any
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    if shape.pre:
        yield from norm(f"{path}.attn_norm")
    if shape.second_norm:
        yield from norm(f"{path}.attn_norm_2")
    if shape.post:
        yield from norm(f"{path}.post_attention_norm")
    sizes = {"q": shape.heads * shape.head, "k": shape.kv_heads * shape.head, "v": shape.kv_heads * shape.head}
    if shape.packed:
        yield from linear(f"{path}.attn_qkv", sum(sizes.values()), shape.hidden, "qkv")
    else:
        for part, rows in sizes.items():
            gated = part == "q" and shape.recurrent in ("apart", "joined")  # queries and gates
            yield from linear(f"{path}.attn_{part}", rows * 2 if gated else rows, shape.hidden, "qkv")
    yield from linear(f"{path}.attn_output", shape.hidden, shape.heads * shape.head, "o")
    for part in "qk" if shape.qk else "":
        dims = {"head": (shape.head,), "all": (sizes[part],), "heads": (sizes[part] // shape.head, shape.head)}[
            shape.qk
        ]
        yield f"{path}.attn_{part}_norm.weight", 1 + matrix(*dims, scale=0.2)


def write_adapter(path: Path, shape: Shape, rank: int = 4, **changes: Any) -> Path:
    """Write an adapter for a model's attention, as convert_lora_to_gguf.py does."""
    writer = gguf.GGUFWriter(str(path), shape.arch)
    values = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
    for key, value in (values | changes).items():
        add_value(writer, key, value)
    random = np.random.RandomState(3)
    rows = {
        "q": shape.heads * shape.head,
        "k": shape.kv_heads * shape.head,
        "v": shape.kv_heads * shape.head,
        "output": shape.hidden,
    }
    for layer in range(shape.layers):
        for part, count in rows.items():
            name = f"blk.{layer}.attn_{part}.weight"
            writer.add_tensor(f"{name}.lora_a", (random.standard_normal((rank, shape.hidden)) / 16).astype(np.float32))
            writer.add_tensor(f"{name}.lora_b", (random.standard_normal((count, rank)) / 8).astype(np.float32))
    close(writer)
    return path
