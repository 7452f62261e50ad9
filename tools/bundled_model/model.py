"""Pebble as a plain PyTorch Llama with Hugging Face's parameter names, so that the export only has to rename.

Llama 2 (arXiv:2307.09288): RMSNorm before each block, rotary positions with split halves, grouped-query attention,
SwiGLU, optionally tied embeddings. Linear weights can be quantised on the fly (`fake_quant.py`).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fake_quant import fake_quantise, quantise_blocks

SHORT_ROW = 128


@dataclass(frozen=True)
class PebbleConfig:
    vocab_size: int = 1536
    hidden_size: int = 256
    intermediate_size: int = 640
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 32
    context_length: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = True


class Projection(nn.Linear):
    """A linear layer without bias; while `bits` is 4, its weight is quantised to INT4 blocks."""

    bits: int | None = None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight if self.bits is None else fake_quantise(self.weight, self.bits))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x [batch, heads, tokens, size]; a pair is split over a head's halves (RoFormer)."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Past:
    """The keys and values of one layer for all tokens so far; used for replies, not for training."""

    def __init__(self) -> None:
        self._keys_values: tuple[Tensor, Tensor] | None = None

    def extended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens [batch, heads, tokens, size]; return all tokens."""
        if self._keys_values is not None:
            key = torch.cat((self._keys_values[0], key), 2)
            value = torch.cat((self._keys_values[1], value), 2)
        self._keys_values = key, value
        return key, value


class Attention(nn.Module):
    def __init__(self, config: PebbleConfig) -> None:
        super().__init__()
        self.config = config
        self.q_proj = Projection(config.hidden_size, config.num_heads * config.head_size)
        self.k_proj = Projection(config.hidden_size, config.num_kv_heads * config.head_size)
        self.v_proj = Projection(config.hidden_size, config.num_kv_heads * config.head_size)
        self.o_proj = Projection(config.num_heads * config.head_size, config.hidden_size)

    def _heads(self, x: Tensor, num_heads: int) -> Tensor:
        return x.view(*x.shape[:2], num_heads, self.config.head_size).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: Past | None) -> Tensor:
        query = rotate(self._heads(self.q_proj(x), self.config.num_heads), cos, sin)
        key = rotate(self._heads(self.k_proj(x), self.config.num_kv_heads), cos, sin)
        value = self._heads(self.v_proj(x), self.config.num_kv_heads)
        if past is not None:
            key, value = past.extended(key, value)
        if mask is not None and past is None and x.shape[1] <= SHORT_ROW:
            mixed = short_attention(query, key, value, mask)
        else:
            mixed = long_attention(query, key, value, mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def short_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Compute grouped-query attention explicitly, on a CPU three times as fast as PyTorch's kernel for short rows.

    query [batch, heads, tokens, size]; key and value have fewer heads; mask [batch, 1, tokens, tokens] is added.
    """
    batch, heads, tokens, size = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch * kv_heads, -1, size)
    scores = grouped @ key.reshape(batch * kv_heads, tokens, size).transpose(1, 2)
    scores = scores.view(batch, kv_heads, -1, tokens, tokens).float() * size**-0.5 + mask[:, None]
    weights = torch.softmax(scores, -1).to(value.dtype).view(batch * kv_heads, -1, tokens)
    return (weights @ value.reshape(batch * kv_heads, tokens, size)).view(batch, heads, tokens, size)


def long_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Compute grouped-query attention with PyTorch's kernel, causal if there is no mask.

    The kernel runs in float32, because its backward pass in bfloat16 is slow on CPUs.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1).float(), value.repeat_interleave(groups, 1).float()
    mixed = F.scaled_dot_product_attention(query.float(), key, value, attn_mask=mask, is_causal=mask is None)
    return mixed.to(query.dtype)


class FeedForward(nn.Module):
    def __init__(self, config: PebbleConfig) -> None:
        super().__init__()
        self.gate_proj = Projection(config.hidden_size, config.intermediate_size)
        self.up_proj = Projection(config.hidden_size, config.intermediate_size)
        self.down_proj = Projection(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: PebbleConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: Past | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: PebbleConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Pebble(nn.Module):
    """A decoder. forward(ids, documents) returns the final hidden states; `logits` converts some of them to logits."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: PebbleConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = None if config.tie_embeddings else Projection(config.hidden_size, config.vocab_size)
        self.embedding_bits: int | None = None
        exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
        angles = torch.outer(torch.arange(config.context_length, dtype=torch.float32), config.rope_theta**-exponents)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Use normal weights of variance 1/inputs; smaller for projections whose results are added to the residual."""
        nn.init.normal_(self.model.embed_tokens.weight, std=0.04)
        for name, module in self.named_modules():
            if isinstance(module, Projection):
                scale = (2 * self.config.num_layers) ** -0.5 if name.endswith(("o_proj", "down_proj")) else 1.0
                nn.init.normal_(module.weight, std=scale * module.in_features**-0.5)

    def set_fake_quantisation(self, enabled: bool) -> None:
        """Enable or disable INT4 blocks for all projections and INT8 blocks for the tied embedding and head."""
        self.embedding_bits = 8 if enabled else None
        for module in self.modules():
            if isinstance(module, Projection):
                module.bits = 4 if enabled else None

    @torch.no_grad()
    def round_weights(self) -> None:
        """Quantise every weight permanently, as `set_fake_quantisation` does at each use."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.weight.copy_(quantise_blocks(module.weight, 4))
        self.model.embed_tokens.weight.copy_(quantise_blocks(self.model.embed_tokens.weight, 8))

    def embedding(self) -> Tensor:
        weight = self.model.embed_tokens.weight
        return weight if self.embedding_bits is None else fake_quantise(weight, self.embedding_bits)

    def forward(self, ids: Tensor, documents: Tensor | None, past: list[Past] | None = None) -> Tensor:
        """Return the final hidden states of ids int64 [batch, new tokens]; documents: int64 [batch, past + new tokens].

        A token attends only to earlier tokens of its own document. If `documents` is None, which is possible only
        without `past`, it attends to all earlier tokens of its row.
        """
        if documents is None and past is not None:
            raise ValueError("`past` needs `documents`, which contain the number of past tokens")
        total = ids.shape[1] if documents is None else documents.shape[1]
        start = total - ids.shape[1]
        mask = None
        if documents is not None:
            same = documents[:, start:, None] == documents[:, None, :]
            mask = torch.where(same.tril(start), 0.0, float("-inf"))[:, None]
        x = F.embedding(ids, self.embedding())
        for number, layer in enumerate(self.model.layers):
            layer_past = None if past is None else past[number]
            x = layer(x, self.cos[start:total], self.sin[start:total], mask, layer_past)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding()) if self.lm_head is None else self.lm_head(hidden)
