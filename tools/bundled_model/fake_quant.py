"""Block quantisation that matches the exporter exactly, with a straight-through gradient for training.

Blocks of 32 along the input axis are quantised symmetrically, as in onnxruntime's default MatMulNBits quantiser. The
value with the largest magnitude gets the lowest integer, scale = value / -2^(bits-1), zero point 2^(bits-1).
"""

import torch
from torch import Tensor

BLOCK_SIZE = 32


def quantise_blocks(weight: Tensor, bits: int) -> Tensor:
    """Return the dequantised values of `weight` [outputs, inputs]; inputs is a multiple of 32."""
    half = 2 ** (bits - 1)
    blocks = weight.float().reshape(weight.shape[0], -1, BLOCK_SIZE)
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = largest / -half
    rounded = scale.half().float()  # as in `genai.quant`: float16, unless it cannot hold 11 bits of the scale
    scale = torch.where((rounded - scale).abs() <= scale.abs() * 2.0**-11, rounded, scale)
    reciprocal = torch.where(scale == 0, 0.0, 1.0 / scale)
    integers = torch.floor(blocks * reciprocal + (half + 0.5)).clamp(0, 2 * half - 1) - half
    return (integers * scale).reshape(weight.shape).to(weight.dtype)


def fake_quantise(weight: Tensor, bits: int) -> Tensor:
    """Apply `quantise_blocks` in the forward pass, identity in the backward pass (Bengio et al., arXiv:1308.3432)."""
    return weight + (quantise_blocks(weight.detach(), bits) - weight.detach())
