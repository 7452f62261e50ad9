"""Adapters in GGUF files, as written by llama.cpp's convert_lora_to_gguf.py."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import QuantizationError
from genai.quant.block_types import dequantize, type_of

from ..errors import InputError
from ..weight_files.gguf import GgufModel
from .parameters import AdapterParameters, Pair

# Architectures whose files have the queries and keys of each head in ggml's interleaved rotary order.
PERMUTED = frozenset({"llama", "olmo", "granite", "granitemoe", "smollm3"})
# Architectures in which "up" also contains the gate.
_GATE_IN_UP = frozenset({"phi3", "glm4"})
_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_qkv": "self_attn.qkv_proj", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
_OUTSIDE = {"token_embd": "model.embed_tokens", "output": "lm_head"}
_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d{1,6})\.)?(?P<place>[a-z_]+)\.weight\.lora_(?P<factor>[ab])")
_AGAIN = "convert the adapter again with llama.cpp's convert_lora_to_gguf.py, or use the PEFT folder"


def read_gguf_adapter(path: Path) -> AdapterParameters:
    """Read an adapter file. Rows of queries and keys may be in ggml's order; see `in_our_order`.

    Raises:
        ModelFolderError: the file cannot be read.
        InputError: the file is damaged, is not an adapter, or contains an unsupported kind of adapter.
    """
    model = GgufModel(path, copied=True)
    data, architecture = model.metadata, model.architecture
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (value := model.files[0].single(key)) != expected:
            raise InputError(
                f"{path}: {key} is {value!r:.40}, expected {expected!r}", "this GGUF file contains no LoRA adapter",
                "if the file is a complete model, pass it as MODEL; to create an adapter, use convert_lora_to_gguf.py",
            )  # fmt: skip
    if "adapter.alora.invocation_tokens" in data:
        raise InputError(
            f"{path}: the file has adapter.alora.invocation_tokens", "activated LoRA is not supported",
            "use an adapter without activation tokens",
        )  # fmt: skip
    alpha = data.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise InputError(f"{path}: adapter.lora.alpha is {alpha!r:.40}", "expected: a finite number", _AGAIN)
    factors: dict[str, dict[str, NDArray[Any]]] = {}
    for name in model:
        module, factor = _factor_of(name, architecture, path)
        factors.setdefault(module, {})[factor] = _floats(model, name, path)
    pairs = {module: _pair(module, pair_factors, float(alpha), path) for module, pair_factors in factors.items()}
    if not pairs:
        raise InputError(f"{path}: the file contains no factors", "an adapter has at least one pair of factors", _AGAIN)
    base = data.get("general.base_model.0.name", "")
    return AdapterParameters(
        path, pairs, "gguf", base=base if isinstance(base, str) else "", permuted=architecture in PERMUTED
    )


def _factor_of(name: str, architecture: str, path: Path) -> tuple[str, str]:
    """Return the name of the module in checkpoints, and the factor, "a" or "b"."""
    match = _TENSOR.fullmatch(name)
    if match is None:
        why = (
            "norms were trained in addition to the factors"
            if "norm" in name
            else "names end in .weight.lora_a or .lora_b"
        )
        raise InputError(f"{path}: tensor {name!r:.100} is not a factor of a linear layer", why, _AGAIN)
    name_in_gguf, layer = match["place"], match["layer"]
    if layer is None:
        return _OUTSIDE.get(name_in_gguf, name_in_gguf), match["factor"]
    known: Mapping[str, str] = _NAMES
    if architecture in _GATE_IN_UP:
        known = {**_NAMES, "ffn_up": "mlp.gate_up_proj"}
    return f"model.layers.{int(layer)}.{known.get(name_in_gguf, name_in_gguf)}", match["factor"]


def _floats(model: GgufModel, name: str, path: Path) -> NDArray[Any]:
    tensor = model[name]
    try:
        return dequantize(tensor) if type_of(tensor) is not None else tensor
    except QuantizationError as error:
        raise InputError(f"{path}: tensor {name!r} is damaged", str(error), "download the file again") from error


def _pair(module: str, factors: Mapping[str, NDArray[Any]], alpha: float, path: Path) -> Pair:
    if len(factors) != 2:
        raise InputError(
            f"{path}: {module!r} has no factor {'B' if 'a' in factors else 'A'}", "A and B come in pairs", _AGAIN
        )
    a, b = factors["a"], factors["b"]
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        raise InputError(
            f"{path}: {module!r} has A {list(a.shape)} and B {list(b.shape)}",
            "A must be [rank, inputs] and B [outputs, rank], with the same rank", _AGAIN,
        )  # fmt: skip
    return Pair(a, b, alpha / len(a) if alpha else 1.0)


def in_our_order(adapter: AdapterParameters, heads: int, kv_heads: int) -> AdapterParameters:
    """Return the adapter with the rows of queries and keys in the order of checkpoints. Other rows are unchanged.

    Args:
        adapter: the adapter.
        heads, kv_heads: numbers of heads in the base.

    Raises:
        InputError: the rows of a module cannot be divided among the heads.
    """
    if not adapter.permuted:
        return adapter
    counts = {"q_proj": heads, "k_proj": kv_heads}
    pairs = dict(adapter.pairs)
    for module, pair in adapter.pairs.items():
        count = counts.get(module.rpartition(".")[2])
        if count is None:
            continue
        if len(pair.b) % (2 * count):
            raise InputError(
                f"{adapter.source}: {module!r} has {len(pair.b)} rows", f"the base has {count} heads of an even size",
                "use an adapter that was trained on this base",
            )  # fmt: skip
        halves = pair.b.reshape(count, len(pair.b) // count // 2, 2, -1).swapaxes(1, 2)
        pairs[module] = Pair(pair.a, np.ascontiguousarray(halves).reshape(pair.b.shape), pair.scale)
    return replace(adapter, pairs=pairs, permuted=False)


def require_our_order(adapter: AdapterParameters) -> AdapterParameters:
    """Return the adapter. Raise InputError if its rows are in ggml's order, which only a known base can undo."""
    if adapter.permuted and any(name.endswith((".q_proj", ".k_proj")) for name in adapter.pairs):
        raise InputError(
            f"{adapter.source}: the rows of queries and keys are in ggml's order",
            "reordering them requires the base's number of heads", "pass the base model with --model",
        )  # fmt: skip
    return adapter
