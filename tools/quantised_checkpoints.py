"""Tiny checkpoints with random weights in the formats of other quantisers, and the same weights as floats.

Each packer follows the published layout, uses plain NumPy and float64, and shares no code with the readers
(genai/convert/prequantized). It quantises a matrix and returns the checkpoint's tensors and their values as floats.

    python -m tools.quantised_checkpoints awq llama FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tools.random_weights import random_tensor

Array = NDArray[Any]
Tensors = dict[str, Array]
# (name without ".weight", matrix [rows, columns]) -> the checkpoint's tensors, and the matrix that they represent.
Packer = Callable[[str, Array], tuple[Tensors, Array]]
GROUP, VOCAB, HIDDEN, WIDE, LAYERS, EXPERTS = 32, 96, 64, 96, 2, 4

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "phi3": {"model_type": "phi3", "pad_token_id": 0, "tie_word_embeddings": False},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": WIDE,
        "norm_topk_prob": True, "tie_word_embeddings": False,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
                "sliding_window": None, "tie_word_embeddings": False},
}  # fmt: skip


# gpt-oss exists in only one format, which stores all experts of a layer in one tensor.
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 8,
    "tie_word_embeddings": False, "rope_theta": 150000.0,
}  # fmt: skip


def write_gpt_oss(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write gpt-oss with MXFP4 experts, and again with their values as floats [experts, inputs, outputs]."""
    found = {name: shape for name, shape in shapes("llama").items() if ".mlp." not in name}
    for layer in range(LAYERS):
        mlp, attention = f"model.layers.{layer}.mlp", f"model.layers.{layer}.self_attn"
        found |= {f"{attention}.{part}_proj.bias": (found[f"{attention}.{part}_proj.weight"][0],) for part in "qkvo"}
        found |= {
            f"{attention}.sinks": (4,),
            f"{mlp}.router.weight": (EXPERTS, HIDDEN),
            f"{mlp}.router.bias": (EXPERTS,),
        }
        found |= {
            f"{mlp}.experts.gate_up_proj_bias": (EXPERTS, 2 * WIDE),
            f"{mlp}.experts.down_proj_bias": (EXPERTS, HIDDEN),
        }
    plain: Tensors = {name: random_tensor(name, shape, seed).astype(np.float32) for name, shape in found.items()}
    quantised = dict(plain)
    for layer in range(LAYERS):
        for name, shape in (("gate_up_proj", (2 * WIDE, HIDDEN)), ("down_proj", (HIDDEN, WIDE))):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            parts, tensors = _mxfp4(random_tensor(key, (EXPERTS, *shape), seed))
            quantised |= {f"{key}_{end}": tensor for end, tensor in tensors.items()}
            plain[key] = parts.swapaxes(1, 2)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config = {**_SIZES, **GPT_OSS}
    return (
        _save(folder / "mxfp4", {**config, "quantization_config": settings}, quantised),
        _save(folder / "mxfp4-floats", config, plain),
    )


def _mxfp4(matrices: Array) -> tuple[Array, Tensors]:
    """Quantise to 4-bit floats in blocks of 32 with a shared exponent; low bits hold the first of two numbers."""
    half = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table, parts = np.concatenate([half, -half]), matrices.astype(np.float64).reshape(*matrices.shape[:2], -1, 32)
    exponents = np.ceil(np.log2(np.abs(parts).max(-1) / 6)).astype(int)
    scaled = parts / 2.0 ** exponents[..., None]
    codes = np.abs(scaled[..., None] - table).argmin(-1).astype(np.uint8)
    values = (table[codes] * 2.0 ** exponents[..., None]).reshape(matrices.shape).astype(np.float32)
    return values, {"blocks": codes[..., 0::2] | codes[..., 1::2] << 4, "scales": (exponents + 127).astype(np.uint8)}


def shapes(family: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a float checkpoint's tensors."""
    queries, keys = 64, 32
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not FAMILIES[family]["tie_word_embeddings"]:
        found["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        own: dict[str, tuple[int, ...]] = {f"{norm}_layernorm": (HIDDEN,) for norm in ("input", "post_attention")}
        own["self_attn.o_proj"] = (HIDDEN, queries)
        if family == "phi3":
            own |= {"self_attn.qkv_proj": (queries + 2 * keys, HIDDEN), "mlp.gate_up_proj": (2 * WIDE, HIDDEN)}
        else:
            own |= {
                f"self_attn.{part}_proj": (rows, HIDDEN)
                for part, rows in zip("qkv", (queries, keys, keys), strict=True)
            }
        experts = [f"mlp.experts.{expert}." for expert in range(EXPERTS)] if family == "qwen3_moe" else ["mlp."]
        names = {"gate_proj": (WIDE, HIDDEN), "up_proj": (WIDE, HIDDEN), "down_proj": (HIDDEN, WIDE)}
        if family == "mixtral":
            experts = [f"block_sparse_moe.experts.{expert}." for expert in range(EXPERTS)]
            names = {"w1": (WIDE, HIDDEN), "w3": (WIDE, HIDDEN), "w2": (HIDDEN, WIDE)}
            own["block_sparse_moe.gate"] = (EXPERTS, HIDDEN)
        if family == "qwen3_moe":
            own |= {"mlp.gate": (EXPERTS, HIDDEN), "self_attn.q_norm": (16,), "self_attn.k_norm": (16,)}
        if family == "phi3":
            names = {"down_proj": (HIDDEN, WIDE)}
        own |= {f"{expert}{name}": shape for expert in experts for name, shape in names.items()}
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
        if family == "qwen2":
            found |= {f"model.layers.{layer}.self_attn.{part}_proj.bias": (own[f"self_attn.{part}_proj"][0],)
                      for part in "qkv"}  # fmt: skip
    return found


def is_packed(name: str, shape: tuple[int, ...]) -> bool:
    """Return True if quantisers convert the tensor: they convert all linear layers except routers."""
    return len(shape) == 2 and name.startswith("model.layers.") and not name.endswith(".gate.weight")


# --- rounding -------------------------------------------------------------------------------------------------------


def _groups(matrix: Array, group: int) -> Array:
    return matrix.astype(np.float64).reshape(len(matrix), -1, group)


def _rounded(matrix: Array, bits: int, group: int, *, symmetric: bool = False) -> tuple[Array, Array, Array, Array]:
    """Return integers [rows, columns], float16 scales and zero points [rows, groups], and the dequantised values."""
    parts, largest = _groups(matrix, group), 2**bits - 1
    if symmetric:
        zeros = np.full(parts.shape[:2], 2 ** (bits - 1))
        scales = np.abs(parts).max(-1) / (2 ** (bits - 1) - 1)
    else:
        low, high = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
        scales = (high - low) / largest
        zeros = np.clip(np.round(-low / scales), 1, largest).astype(int)
    scales = scales.astype(np.float16)
    wide = scales.astype(np.float64)[..., None]
    codes = np.clip(np.round(parts / wide) + zeros[..., None], 0, largest).astype(int)
    values = (codes - zeros[..., None]) * wide
    return codes.reshape(matrix.shape), scales, zeros, values.reshape(matrix.shape).astype(np.float32)


def _words(codes: Array, bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.int32]:
    """Pack integers [rows, columns] into 32-bit words. By default, a word's lowest bits hold its first integer."""
    count = 32 // bits
    apart = codes.reshape(len(codes), -1, count).astype(np.uint64)
    apart = apart[..., list(order)] if order else apart
    packed = sum(apart[..., place] << np.uint64(bits * place) for place in range(count))
    return np.asarray(packed).astype(np.uint32).view(np.int32)


# --- formats --------------------------------------------------------------------------------------------------------


def awq(name: str, matrix: Array) -> tuple[Tensors, Array]:
    codes, scales, zeros, values = _rounded(matrix, 4, GROUP)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": _words(codes.T, 4, order), "qzeros": _words(zeros.T, 4, order), "scales": scales.T.copy()}
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, values


def gptq(bits: int, less: int, *, act_order: bool = False, symmetric: bool = False) -> Packer:
    def pack(name: str, matrix: Array) -> tuple[Tensors, Array]:
        columns = matrix.shape[1]
        order = np.arange(columns)
        if act_order:  # projections with the same input share an order
            order = np.random.Generator(np.random.PCG64(len(name.rpartition(".")[0]))).permutation(columns)
        codes, scales, zeros, ordered = _rounded(matrix[:, order], bits, GROUP, symmetric=symmetric)
        index, whole, values = np.empty(columns, np.int32), np.empty_like(codes), np.empty_like(ordered)
        index[order] = np.arange(columns) // GROUP
        whole[:, order], values[:, order] = codes, ordered
        tensors = {
            "qweight": _words(whole, bits).T.copy(), "qzeros": _words(zeros.T - less, bits),
            "scales": scales.T.copy(), "g_idx": index,
        }  # fmt: skip
        # AutoGPTQ adds a bias of zeros to a layer that has no bias.
        zeros_bias = {f"{name}.bias": np.zeros(len(matrix), np.float16)} if name.endswith("o_proj") else {}
        return {**{f"{name}.{key}": tensor for key, tensor in tensors.items()}, **zeros_bias}, values

    return pack


def w4a16(name: str, matrix: Array) -> tuple[Tensors, Array]:
    codes, scales, zeros, _ = _rounded(matrix, 4, GROUP)
    tensors = {
        "weight_packed": _words(codes, 4), "weight_scale": scales.astype(ml_dtypes.bfloat16),
        "weight_zero_point": _words(zeros.T, 4).T.copy(), "weight_shape": np.array(matrix.shape, np.int64),
    }  # fmt: skip
    exact = tensors["weight_scale"].astype(np.float64)[..., None] * (_groups(codes, GROUP) - zeros[..., None])
    found = exact.reshape(matrix.shape).astype(np.float32)
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, found


def w8a8(name: str, matrix: Array) -> tuple[Tensors, Array]:
    codes, scales, _, values = _rounded(matrix, 8, matrix.shape[1], symmetric=True)
    return {f"{name}.weight": (codes - 128).astype(np.int8), f"{name}.weight_scale": scales}, values


def fp8_blocks(name: str, matrix: Array) -> tuple[Tensors, Array]:
    size = 32
    rows, columns = (-(-n // size) for n in matrix.shape)
    scales = np.empty((rows, columns), np.float32)
    stored, values = np.empty(matrix.shape, ml_dtypes.float8_e4m3fn), np.empty(matrix.shape, np.float32)
    for i in range(rows):
        for j in range(columns):
            block = np.s_[size * i : size * (i + 1), size * j : size * (j + 1)]
            scales[i, j] = np.abs(matrix[block]).max() / 448
            stored[block] = (matrix[block] / scales[i, j]).astype(ml_dtypes.float8_e4m3fn)
            values[block] = stored[block].astype(np.float64) * scales[i, j]
    return {f"{name}.weight": stored, f"{name}.weight_scale_inv": scales}, values


def llm_int8(name: str, matrix: Array) -> tuple[Tensors, Array]:
    largest = np.abs(matrix).max(1).astype(np.float32)
    codes = np.round(matrix / largest[:, None].astype(np.float64) * 127)
    values = (codes * largest[:, None].astype(np.float64) / 127).astype(np.float32)
    extra = {f"{name}.SCB": largest, f"{name}.weight_format": np.array(0, np.uint8)}
    return {f"{name}.weight": codes.astype(np.int8), **extra}, values


# Dettmers et al. 2023, appendix E.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def nf4(name: str, matrix: Array) -> tuple[Tensors, Array]:
    block, table = 32, np.array(NF4)
    parts = matrix.astype(np.float64).reshape(-1, block)
    scales = np.abs(parts).max(1).astype(np.float32)
    codes = np.abs(parts[..., None] / scales[:, None, None] - table).argmin(-1)
    flat = codes.reshape(-1).astype(np.uint8)
    state = json.dumps({"quant_type": "nf4", "blocksize": block, "dtype": "float16", "shape": list(matrix.shape)})
    key = f"{name}.weight"
    tensors = {
        key: (flat[0::2] << 4 | flat[1::2])[:, None], f"{key}.absmax": scales,
        f"{key}.quant_map": table.astype(np.float32),
        f"{key}.quant_state.bitsandbytes__nf4": np.frombuffer(state.encode(), np.uint8).copy(),
    }  # fmt: skip
    return tensors, (table[codes] * scales[:, None].astype(np.float64)).reshape(matrix.shape).astype(np.float32)


def hqq(name: str, matrix: Array) -> tuple[Tensors, Array]:
    """Quantise to 4 bits in groups along rows, with float zero points; high bits hold the first half of the groups."""
    parts = matrix.astype(np.float64).reshape(-1, GROUP)
    low = parts.min(1, keepdims=True)
    scale = ((parts.max(1, keepdims=True) - low) / 15).astype(np.float16)
    zero = (-low / scale.astype(np.float64)).astype(np.float16)
    codes = np.clip(np.round(parts / scale.astype(np.float64) + zero), 0, 15).astype(np.uint8)
    half = len(codes) // 2
    values = (codes - zero.astype(np.float64)) * scale.astype(np.float64)
    numbers = {"nbits": 4, "group_size": GROUP, "axis": 1, "view_as_float": 0, "quant_scale": 0, "quant_zero": 0}
    tensors: Tensors = {key: np.array(number, np.int32) for key, number in numbers.items()}
    tensors |= {
        "W_q": codes[:half] << 4 | codes[half:], "scale": scale, "zero": zero,
        "shape": np.array(matrix.shape, np.int64), "packing": np.frombuffer(b"4bit_u8", np.uint8).copy(),
    }  # fmt: skip
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, values.reshape(matrix.shape).astype(np.float32)


def mlx(bits: int) -> Packer:
    def pack(name: str, matrix: Array) -> tuple[Tensors, Array]:
        parts = _groups(matrix, GROUP)
        biases = parts.min(-1).astype(np.float16)
        scales = ((parts.max(-1) - parts.min(-1)) / (2**bits - 1)).astype(np.float16)
        wide, least = scales.astype(np.float64)[..., None], biases.astype(np.float64)[..., None]
        codes = np.clip(np.round((parts - least) / wide), 0, 2**bits - 1).astype(int)
        values = (codes * wide + least).reshape(matrix.shape).astype(np.float32)
        packed = _words(codes.reshape(matrix.shape), bits).view(np.uint32)
        return {f"{name}.weight": packed, f"{name}.scales": scales, f"{name}.biases": biases}, values

    return pack


def nvfp4(name: str, matrix: Array) -> tuple[Tensors, Array]:
    """Quantise to 4-bit floats in blocks of 16 with 8-bit scales, which a single float divides."""
    half = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table, parts = np.concatenate([half, -half]), _groups(matrix, 16)
    whole = np.float32(448 * 6 / np.abs(matrix).max())
    scales = (np.abs(parts).max(-1) / 6 * whole).astype(ml_dtypes.float8_e4m3fn)
    real = scales.astype(np.float64)[..., None] / np.float64(whole)
    codes = np.abs(parts[..., None] / real[..., None] - table).argmin(-1).reshape(matrix.shape).astype(np.uint8)
    tensors = {
        "weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": scales,
        "weight_global_scale": np.array([whole]),
    }  # fmt: skip
    values = (table[codes].reshape(parts.shape) * real).reshape(matrix.shape).astype(np.float32)
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, values


def _compressed(form: str, bits: int, kind: str = "int") -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "damp_percent": 0.01}
_BNB = {"quant_method": "bitsandbytes", "bnb_4bit_compute_dtype": "float16"}
# By name: the packer, and the settings in config.json.
FORMATS: Mapping[str, tuple[Packer, dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "gptq": (gptq(4, 1), {**_GPTQ, "bits": 4, "desc_act": False}),
    "gptq_sym": (gptq(4, 1, symmetric=True), {**_GPTQ, "bits": 4, "desc_act": False, "sym": True}),
    "gptq_v2": (gptq(4, 0), {**_GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}),
    "gptq_8": (gptq(8, 1), {**_GPTQ, "bits": 8}),
    "gptq_2": (gptq(2, 1), {**_GPTQ, "bits": 2}),
    "gptq_act_order": (gptq(4, 1, act_order=True), {**_GPTQ, "bits": 4, "desc_act": True}),
    "auto_round": (
        gptq(4, 1), {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq", "sym": False},
    ),
    "auto_round_awq": (awq, {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"}),
    "w4a16": (w4a16, _compressed("pack-quantized", 4)),
    "w8a8": (w8a8, _compressed("int-quantized", 8)),
    "nvfp4": (nvfp4, _compressed("nvfp4-pack-quantized", 4, "float")),
    "fp8": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}),
    "nf4": (nf4, {**_BNB, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "int8": (llm_int8, {**_BNB, "load_in_8bit": True}),
    "hqq": (hqq, {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "axis": 1}}}),
    "mlx": (mlx(4), {"group_size": GROUP, "bits": 4}),
    "mlx_8": (mlx(8), {"group_size": GROUP, "bits": 8}),
}  # fmt: skip


def write(folder: Path, form: str, family: str = "llama", seed: int = 0) -> tuple[Path, Path]:
    """Write a checkpoint in the format `form`, and a checkpoint with the same values as floats; return both folders."""
    pack, settings = FORMATS[form]
    quantised: Tensors = {}
    plain: Tensors = {}
    for name, shape in shapes(family).items():
        tensor = random_tensor(name, shape, seed)
        # MLX also quantises the embeddings and the head.
        if is_packed(name, shape) or (form.startswith("mlx") and len(shape) == 2 and not name.endswith("gate.weight")):
            packed, plain[name] = pack(name.removesuffix(".weight"), tensor)
            quantised |= packed
        else:
            plain[name] = quantised[name] = tensor.astype(np.float16)
    if form.startswith("mlx"):
        quantised = _together(quantised)
    key = "quantization" if form.startswith("mlx") else "quantization_config"
    config = {**_SIZES, **FAMILIES[family]}
    return (
        _save(folder / form, {**config, key: settings}, quantised),
        _save(folder / f"{form}-floats", config, plain),
    )


def convert(source: Path, folder: Path, form: str) -> Path:
    """Convert a float checkpoint to a format. The projections' columns must be multiples of the group size."""
    from safetensors import safe_open

    pack, settings = FORMATS[form]
    tensors: Tensors = {}
    with safe_open(source / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            if is_packed(name, tensor.shape):
                tensors |= pack(name.removesuffix(".weight"), tensor.astype(np.float32))[0]
            else:
                tensors[name] = tensor
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            (folder / path.name).write_bytes(path.read_bytes())
    key = "quantization" if form.startswith("mlx") else "quantization_config"
    config = {**json.loads((source / "config.json").read_text(encoding="utf-8")), key: settings}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _together(tensors: Tensors) -> Tensors:
    """Stack the experts of a layer into one tensor, as mlx-lm does."""
    import re

    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    stacks: dict[str, list[Array]] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.*)\.experts\.\d+\.(\w+)\.(\w+)", name)
        key = f"{found[1]}.switch_mlp.{names.get(found[2], found[2])}.{found[3]}" if found else name
        stacks.setdefault(key, []).append(tensor)
    return {key: np.stack(parts) if "switch_mlp" in key else parts[0] for key, parts in stacks.items()}


def _save(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    from tokenizers import Tokenizer, models

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    letters = ["<pad>", "<s>", "</s>", *(chr(code) for code in range(33, 126))]
    Tokenizer(models.BPE({token: i for i, token in enumerate(letters)}, [])).save(str(folder / "tokenizer.json"))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


if __name__ == "__main__":
    for made in write(Path(sys.argv[3]), sys.argv[1], sys.argv[2]):
        print(made)
