"""Random tensors of tiny GGUF models whose layers differ, or that have latent attention: Gemma, DeepSeek, Kimi."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Named = Iterator[tuple[str, NDArray[np.float32]]]
Matrix = Callable[..., NDArray[np.float32]]


def _norms(matrix: Matrix, width: int, *names: str) -> Named:
    for name in names:
        yield f"{name}.weight", 1 + matrix(width, scale=0.2)


def _inputs(shape: Any, matrix: Matrix, hidden: int, vocab: int) -> Named:
    size = shape.keys["embedding_length_per_layer_input"]
    yield "per_layer_token_embd.weight", matrix(vocab, size * shape.layers, scale=0.3)
    yield "per_layer_model_proj.weight", matrix(size * shape.layers, hidden)
    yield from _norms(matrix, size, "per_layer_proj_norm")


def _input(shape: Any, path: str, matrix: Matrix, hidden: int) -> Named:
    size = shape.keys["embedding_length_per_layer_input"]
    yield f"{path}.inp_gate.weight", matrix(size, hidden)
    yield f"{path}.proj.weight", matrix(hidden, size)
    yield from _norms(matrix, hidden, f"{path}.post_norm")


def _mlp(path: str, matrix: Matrix, hidden: int, width: int) -> Named:
    yield f"{path}.ffn_gate.weight", matrix(width, hidden)
    yield f"{path}.ffn_up.weight", matrix(width, hidden)
    yield f"{path}.ffn_down.weight", matrix(hidden, width)


_LAYER_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")


def gemma4(shape: Any, matrix: Matrix, hidden: int, vocab: int) -> Named:
    """Yield the tensors of Gemma 4. In files without inputs per layer, keys are also values in layers of one size."""
    keys, per_layer = shape.keys, shape.keys["embedding_length_per_layer_input"]
    full, size = keys["attention.key_length"], keys["attention.key_length_swa"]
    yield "token_embd.weight", matrix(vocab, hidden, scale=0.5)
    yield from _norms(matrix, hidden, "output_norm")
    yield "rope_freqs.weight", np.where(np.arange(full // 2) < full // 8, 1, 1e30).astype(np.float32)
    if per_layer:
        yield from _inputs(shape, matrix, hidden, vocab)
    for layer, window in enumerate(keys["attention.sliding_window_pattern"]):
        path, head = f"blk.{layer}", size if window else full
        rows = keys["attention.head_count_kv"][layer] * head
        yield from _norms(matrix, hidden, *(f"{path}.{name}" for name in _LAYER_NORMS))
        yield f"{path}.attn_q.weight", matrix(4 * head, hidden)
        yield f"{path}.attn_k.weight", matrix(rows, hidden)
        if window or per_layer:
            yield f"{path}.attn_v.weight", matrix(rows, hidden)
        yield f"{path}.attn_output.weight", matrix(hidden, 4 * head)
        yield from _norms(matrix, head, f"{path}.attn_q_norm", f"{path}.attn_k_norm")
        width = keys["feed_forward_length"][layer] if "feed_forward_length" in keys else shape.width
        yield from _mlp(path, matrix, hidden, width)
        if shape.experts:
            yield f"{path}.ffn_gate_inp.weight", matrix(shape.experts, hidden)
            yield f"{path}.ffn_gate_inp.scale", 1 + matrix(hidden, scale=0.2)
            names = ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
            yield from _norms(matrix, hidden, *(f"{path}.{name}" for name in names))
            yield f"{path}.ffn_gate_up_exps.weight", matrix(shape.experts, 2 * 256, hidden)
            yield f"{path}.ffn_down_exps.weight", matrix(shape.experts, hidden, 256)
            yield f"{path}.ffn_down_exps.scale", 1 + matrix(shape.experts, scale=0.2)
        if per_layer:
            yield from _input(shape, path, matrix, hidden)
        yield f"{path}.layer_output_scale.weight", 1 + matrix(1, scale=0.2)


def gemma3n(shape: Any, matrix: Matrix, hidden: int, vocab: int) -> Named:
    """Yield the tensors of Gemma 3n, with llama.cpp's constants: four streams and augmented residuals of rank 64."""
    yield "token_embd.weight", matrix(vocab, hidden, scale=0.5)
    yield from _norms(matrix, hidden, "output_norm")
    yield "altup_proj.weight", matrix(3, hidden, hidden)
    yield "altup_unembd_proj.weight", matrix(3, hidden, hidden)
    yield from _inputs(shape, matrix, hidden, vocab)
    for layer in range(shape.layers):
        path = f"blk.{layer}"
        names = (*_LAYER_NORMS, "altup_router_norm", "laurel_post_norm")
        yield from _norms(matrix, hidden, *(f"{path}.{name}" for name in names))
        for part, heads in (("q", 4), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            yield f"{path}.attn_{part}.weight", matrix(heads * 64, hidden)
        yield f"{path}.attn_output.weight", matrix(hidden, 4 * 64)
        yield from _norms(matrix, 64, f"{path}.attn_q_norm", f"{path}.attn_k_norm")
        yield from _mlp(path, matrix, hidden, shape.width)
        yield from _input(shape, path, matrix, hidden)
        yield f"{path}.altup_correct_coef.weight", matrix(4, 4)
        yield f"{path}.altup_correct_scale.weight", 1 + matrix(hidden, scale=0.2)
        yield f"{path}.altup_predict_coef.weight", matrix(16, 4)
        yield f"{path}.altup_router.weight", matrix(4, hidden, scale=0.3)
        yield f"{path}.laurel_l.weight", matrix(64, hidden)
        yield f"{path}.laurel_r.weight", matrix(hidden, 64)


def _latent(shape: Any, path: str, matrix: Matrix, hidden: int) -> Named:
    keys, split = shape.keys, "attention.key_length_mla" in shape.keys
    rank, query_rank = keys["attention.kv_lora_rank"], keys["attention.q_lora_rank"]
    key, value = (keys[f"attention.{part}_length{'_mla' if split else ''}"] for part in ("key", "value"))
    rotated = keys["rope.dimension_count"]
    if query_rank:
        yield f"{path}.attn_q_a.weight", matrix(query_rank, hidden)
        yield from _norms(matrix, query_rank, f"{path}.attn_q_a_norm")
    yield f"{path}.attn_q{'_b' if query_rank else ''}.weight", matrix(4 * key, query_rank or hidden)
    yield f"{path}.attn_kv_a_mqa.weight", matrix(rank + rotated, hidden)
    yield from _norms(matrix, rank, f"{path}.attn_kv_a_norm")
    if split:
        yield f"{path}.attn_k_b.weight", matrix(4, rank, key - rotated, scale=rank**-0.5)
        yield f"{path}.attn_v_b.weight", matrix(4, value, rank)
    else:
        yield f"{path}.attn_kv_b.weight", matrix(4 * (key - rotated + value), rank)
    yield f"{path}.attn_output.weight", matrix(hidden, 4 * value)


def _kimi_delta(shape: Any, path: str, matrix: Matrix, hidden: int) -> Named:
    size, kernel = shape.keys["kda.head_dim"], shape.keys["ssm.conv_kernel"]
    for part in "qkv":
        yield f"{path}.attn_{part}.weight", matrix(4 * size, hidden)
        yield f"{path}.ssm_conv1d_{part}.weight", matrix(1, 4 * size, 1, kernel, scale=kernel**-0.5)
    for part in "fg":
        yield f"{path}.ssm_{part}_a.weight", matrix(size, hidden)
        yield f"{path}.ssm_{part}_b.weight", matrix(4 * size, size)
    yield f"{path}.ssm_beta.weight", matrix(4, hidden)
    yield f"{path}.ssm_a", -np.exp(matrix(1, 1, 4, 1, scale=0.5))
    yield f"{path}.ssm_dt.bias", matrix(4 * size, scale=0.5)
    yield from _norms(matrix, size, f"{path}.ssm_norm")
    yield f"{path}.attn_output.weight", matrix(hidden, 4 * size)


def deepseek2(shape: Any, matrix: Matrix, hidden: int, vocab: int) -> Named:
    """Yield the tensors of latent attention. Old files have the matrices of keys and values in one tensor."""
    keys = shape.keys
    rotated, wide = keys["rope.dimension_count"], keys.get("expert_shared_count", 0) * 256
    yield "token_embd.weight", matrix(vocab, hidden, scale=0.5)
    yield from _norms(matrix, hidden, "output_norm")
    if not shape.tied:
        yield "output.weight", matrix(vocab, hidden)
    for name in shape.divisors:
        yield f"{name}.weight", np.linspace(1, 6 if name.endswith("long") else 3, rotated // 2).astype(np.float32)
    for layer in range(shape.layers):
        path = f"blk.{layer}"
        yield from _norms(matrix, hidden, f"{path}.attn_norm", f"{path}.ffn_norm")
        yield from (_latent if shape.has_attention(layer) else _kimi_delta)(shape, path, matrix, hidden)
        if layer < shape.dense:
            yield from _mlp(path, matrix, hidden, shape.width)
            continue
        yield f"{path}.ffn_gate_inp.weight", matrix(shape.experts, hidden, scale=0.3)
        if keys.get("expert_gating_func") == 2:
            yield f"{path}.exp_probs_b.bias", matrix(shape.experts, scale=0.1)
        for part in ("gate", "up", "down"):
            yield f"{path}.ffn_{part}_exps.weight", matrix(shape.experts, 256, hidden)
        for part in ("gate", "up"):
            yield f"{path}.ffn_{part}_shexp.weight", matrix(wide, hidden)
        yield f"{path}.ffn_down_shexp.weight", matrix(hidden, wide)


LAYOUTS: dict[str, Callable[[Any, Matrix, int, int], Named]] = {
    "gemma4": gemma4,
    "gemma3n": gemma3n,
    "deepseek2": deepseek2,
    "kimi-linear": deepseek2,
    "minicpm3": deepseek2,
}
