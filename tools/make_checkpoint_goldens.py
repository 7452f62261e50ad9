"""Write tests/convert/checkpoint_goldens.npz: matrices that several libraries quantised, as stored and as floats.

    python3 -m venv oracle
    oracle/bin/pip install torch==2.13.0 transformers bitsandbytes compressed-tensors "mlx[cpu]" termcolor
    oracle/bin/pip install --no-deps hqq autoawq auto-gptq auto-round
    oracle/bin/python tools/make_checkpoint_goldens.py

No GPU is needed. The layers of AutoGPTQ and AutoRound are imported from single files, because importing the whole
packages would need more dependencies. Each case has the tensors under the library's names ("case/stored/..."), the
library's own dequantised matrix ("case/values"), and its quantization_config ("case/settings", JSON as bytes).
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "tests" / "convert" / "checkpoint_goldens.npz"
ROWS, COLUMNS, GROUP = 32, 128, 32
BASE = "model.layers.0.mlp.down_proj"
Case = tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]


def weight(seed: int, rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).standard_normal((rows, columns), np.float32))


def linear(seed: int) -> torch.nn.Linear:
    made = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    made.weight.data = weight(seed)
    return made


def bare(*packages: str) -> None:
    """Make packages importable without running their own `__init__`, which would import all of a package's modules."""
    for name in packages:
        top, *rest = name.split(".")
        found = importlib.machinery.PathFinder.find_spec(top)
        assert found is not None and found.submodule_search_locations
        made = types.ModuleType(name)
        made.__path__ = [str(Path(next(iter(found.submodule_search_locations)), *rest))]
        sys.modules[name] = made


def ranges(values: torch.Tensor, bits: int, group: int, *, least_zero: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and the zero point of each group of a row, each [rows, groups]."""
    parts = values.reshape(len(values), -1, group)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).half().float()
    return scale, (-low / scale).round().clamp(least_zero, 2**bits - 1)


def of_layer(layer: Any, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {f"{BASE}.{name}": getattr(layer, name) for name in names if hasattr(layer, name)}


def by_identity(layer: Any, columns: int = COLUMNS) -> torch.Tensor:
    """Return a layer's matrix, computed by applying the layer to an identity matrix."""
    return layer(torch.eye(columns, dtype=torch.float32)).float().T


def awq() -> Case:
    bare("awq", "awq.modules", "awq.modules.linear", "awq.utils")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    plain = linear(1)
    scale, zero = ranges(plain.weight.data, 4, GROUP)
    layer = WQLinear_GEMM.from_linear(plain, 4, GROUP, scales=scale.T.contiguous(), zeros=zero.T.contiguous())
    values = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, GROUP).T
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    return settings, of_layer(layer, ("qweight", "qzeros", "scales")), values


def gptq(bits: int, *, act_order: bool = False, symmetric: bool = False) -> Case:
    bare("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
    from auto_gptq.nn_modules.qlinear import qlinear_cuda as layers

    plain = linear(10 + bits)
    layer = layers.QuantLinear(bits, GROUP, COLUMNS, ROWS, False, weight_dtype=torch.float32)
    order = (
        torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(bits)) if act_order else torch.arange(COLUMNS)
    )
    scale, zero = ranges(plain.weight.data[:, order], bits, GROUP, least_zero=1)
    if symmetric:
        zero = torch.full_like(zero, 2 ** (bits - 1))
    index = torch.empty(COLUMNS, dtype=torch.int32)
    index[order] = torch.arange(COLUMNS, dtype=torch.int32) // GROUP
    layer.g_idx = index
    # Integers out of range would overflow into their neighbours. If the weights are in range, so are the layer's
    # integers.
    low, high = (-zero * scale)[:, index], ((2**bits - 1 - zero) * scale)[:, index]
    plain.weight.data = torch.minimum(torch.maximum(plain.weight.data, low), high)
    layer.pack(plain, scale, zero, index)
    values = by_identity(layer)
    layer.scales = layer.scales.half()
    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order, "sym": symmetric}
    return settings, of_layer(layer, ("qweight", "qzeros", "scales", "g_idx")), values


def auto_round(file: str, packing: str, bits: int = 4) -> Case:
    bare("auto_round", "auto_round.utils")
    sys.modules["auto_round.utils"].get_packing_device = torch.device  # type: ignore[attr-defined]
    layers = importlib.import_module(f"auto_round_extension.torch.{file}")
    plain = linear(20)
    scale, zero = ranges(plain.weight.data, bits, GROUP, least_zero=1)
    layer = layers.QuantLinear(bits, GROUP, COLUMNS, ROWS, False)
    layer.device = torch.device("cpu")
    layer.pack(plain, scale, zero, device="cpu")
    layer.scales = layer.scales.float()
    values = by_identity(layer)
    layer.scales = layer.scales.half()
    settings = {
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": bits,
        "group_size": GROUP,
        "sym": False,
    }
    return settings, of_layer(layer, ("qweight", "qzeros", "scales", "g_idx")), values


def compressed(form: str, act_order: bool = False, **arguments: Any) -> Case:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    values = weight(30)
    bits, group = args.num_bits, args.group_size or COLUMNS
    parts = values.reshape(ROWS, -1, group)
    largest = 448.0 if args.type == "float" else 2 ** (bits - 1) - 1
    state = {"weight": values}
    if args.symmetric:
        state["weight_scale"] = (parts.abs().amax(-1) / largest).half().float()
        state["weight_zero_point"] = torch.zeros_like(state["weight_scale"], dtype=torch.int8)
    else:
        scale, zero = ranges(values, bits, group)
        state |= {"weight_scale": scale, "weight_zero_point": (zero - 2 ** (bits - 1)).to(torch.int8)}
    if args.strategy == "tensor":
        state["weight_scale"] = state["weight_scale"].amax().reshape(1)
        state["weight_zero_point"] = torch.zeros(1, dtype=torch.int8)
    if args.type == "float":
        state["weight_zero_point"] = torch.zeros_like(state["weight_scale"]).to(torch.float8_e4m3fn)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(dict(state), scheme)
    found = compressor.decompress(dict(stored), scheme)["weight"]
    settings = {
        "quant_method": "compressed-tensors", "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, **arguments}}},
    }  # fmt: skip
    return settings, {f"{BASE}.{name}": tensor for name, tensor in stored.items()}, found


def bnb_4bit(kind: str, *, nested: bool) -> Case:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    values = weight(40, 3 * ROWS, 2 * COLUMNS)  # more blocks than one second-level scale covers
    packed, state = quantize_4bit(values, blocksize=64, compress_statistics=nested, quant_type=kind)
    name = f"{BASE}.weight"
    stored = {name: packed, **{f"{name}.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}}
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return settings, stored, dequantize_4bit(packed, state)


def bnb_int8() -> Case:
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

    integers, scales, _ = int8_vectorwise_quant(weight(41).half())
    stored = {
        f"{BASE}.weight": integers,
        f"{BASE}.SCB": scales,
        f"{BASE}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    values = int8_vectorwise_dequant(integers, scales).float()
    return {"quant_method": "bitsandbytes", "load_in_8bit": True}, stored, values


def hqq(bits: int, axis: int) -> Case:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

    config = BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis)
    layer = HQQLinear(linear(50 + bits), config, compute_dtype=torch.float32, device="cpu", del_orig=False)
    stored = {name: value for name, value in layer.state_dict().items() if isinstance(value, torch.Tensor)}
    values = Quantizer.dequantize(layer.W_q, {**layer.meta, "compute_dtype": torch.float32})
    return {"quant_method": "hqq"}, {f"{BASE}.{name}": tensor for name, tensor in stored.items()}, values


def mxfp4() -> Case:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = np.random.Generator(np.random.PCG64(60))
    blocks = torch.from_numpy(random.integers(0, 256, (2, ROWS, COLUMNS // 32, 16), np.uint8))
    scales = torch.from_numpy(random.integers(118, 130, (2, ROWS, COLUMNS // 32), np.uint8))
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, columns, rows]
    stored = {
        "model.layers.0.mlp.experts.down_proj_blocks": blocks,
        "model.layers.0.mlp.experts.down_proj_scales": scales,
    }
    return {"quant_method": "mxfp4"}, stored, values.swapaxes(1, 2)


def fp8(*, by_block: bool) -> Case:
    values = weight(70, 160, 192)
    size = 128 if by_block else None
    stored: dict[str, torch.Tensor] = {}
    if by_block:
        padded = torch.zeros(256, 256)
        padded[:160, :192] = values
        scale = padded.reshape(2, 128, 2, 128).abs().amax((1, 3)) / 448
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:160, :192]
        stored[f"{BASE}.weight_scale_inv"] = scale
    else:
        wide = scale = values.abs().max() / 448
        stored[f"{BASE}.weight_scale"] = scale
        stored[f"{BASE}.input_scale"] = torch.tensor(0.1)
    packed = (values / wide).to(torch.float8_e4m3fn)
    stored[f"{BASE}.weight"] = packed
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic" if by_block else "static"}
    return {**settings, **({"weight_block_size": [size, size]} if by_block else {})}, stored, packed.float() * wide


def mlx(bits: int, group: int = 64, mode: str = "affine") -> Case:
    import mlx.core as mx

    values = mx.array(weight(80 + bits).numpy())
    made = mx.quantize(values, group_size=group, bits=bits, mode=mode)
    found = mx.dequantize(*made, group_size=group, bits=bits, mode=mode)
    names = ("weight", "scales", "biases")
    stored = {f"{BASE}.{name}": torch.from_numpy(np.array(one)) for name, one in zip(names, made, strict=False)}
    settings = {"group_size": group, "bits": bits, **({} if mode == "affine" else {"mode": mode})}
    return settings, stored, torch.from_numpy(np.array(found.astype(mx.float32)))


_W4: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
_FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
CASES: dict[str, Callable[[], Case]] = {
    "awq": awq,
    "gptq_2": lambda: gptq(2),
    "gptq_3": lambda: gptq(3),
    "gptq_4": lambda: gptq(4),
    "gptq_4_symmetric": lambda: gptq(4, symmetric=True),
    "gptq_4_act_order": lambda: gptq(4, act_order=True),
    "gptq_8": lambda: gptq(8),
    "auto_round_auto_gptq": lambda: auto_round("qlinear_torch_zp", "auto_round:auto_gptq"),
    "auto_round_gptqmodel": lambda: auto_round("qlinear_torch", "auto_round:gptqmodel"),
    "compressed_w4a16": lambda: compressed("pack-quantized", **_W4, symmetric=True),
    "compressed_w4a16_zero_points": lambda: compressed("pack-quantized", **_W4, symmetric=False),
    "compressed_w8a16": lambda: compressed("pack-quantized", num_bits=8, strategy="channel", symmetric=True),
    "compressed_w8a8": lambda: compressed("int-quantized", num_bits=8, strategy="channel", symmetric=True),
    "compressed_fp8": lambda: compressed("float-quantized", **_FP8, strategy="channel"),
    "compressed_fp8_tensor": lambda: compressed("float-quantized", **_FP8, strategy="tensor"),
    "bitsandbytes_nf4": lambda: bnb_4bit("nf4", nested=False),
    "bitsandbytes_nf4_nested": lambda: bnb_4bit("nf4", nested=True),
    "bitsandbytes_fp4": lambda: bnb_4bit("fp4", nested=False),
    "bitsandbytes_int8": bnb_int8,
    **{f"hqq_{bits}": lambda bits=bits: hqq(bits, 1) for bits in (2, 3, 4, 8)},  # type: ignore[misc]
    "hqq_4_axis_0": lambda: hqq(4, 0),
    "hqq_1": lambda: hqq(1, 1),
    "mxfp4": mxfp4,
    "fp8_blocks": lambda: fp8(by_block=True),
    "fp8_tensor": lambda: fp8(by_block=False),
    **{f"mlx_{bits}": lambda bits=bits: mlx(bits) for bits in (2, 3, 4, 6, 8)},  # type: ignore[misc]
    "mlx_mxfp4": lambda: mlx(4, 32, "mxfp4"),
}  # fmt: skip
# NumPy lacks these types, so tensors with these types are stored as bytes, with the type in the name.
_AS_BYTES = {torch.float8_e4m3fn: "float8_e4m3fn", torch.bfloat16: "bfloat16"}


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    for name, make in CASES.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        settings, stored, values = make()
        arrays[f"{name}/values"] = values.detach().float().numpy()
        arrays[f"{name}/settings"] = np.frombuffer(json.dumps(settings).encode(), np.uint8)
        for key, tensor in stored.items():
            kind = _AS_BYTES.get(tensor.dtype)
            array = tensor.detach().contiguous()
            if kind is not None:
                arrays[f"{name}/stored/{key}:{kind}"] = array.view(torch.uint8 if "8" in kind else torch.int16).numpy()
            else:
                arrays[f"{name}/stored/{key}"] = array.numpy()
        print(name, {key: tuple(tensor.shape) for key, tensor in stored.items()})
    if not sys.argv[1:]:
        np.savez_compressed(TARGET, **arrays)


if __name__ == "__main__":
    main()
