"""Every tensor that a decoder reads, with its shape, by the names of Llama, Qwen and Gemma 2."""

from __future__ import annotations

from .spec import DecoderSpec, Experts

Shape = tuple[int, ...]


def tensor_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Names and shapes, in the order of the layers."""
    table = (spec.vocab_size, spec.hidden_size)
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": table}
    if spec.position_embeddings:
        shapes["model.embed_positions.weight"] = (spec.context_length, spec.hidden_size)
    for layer in range(spec.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(spec, layer).items()}
    shapes |= _norm(spec, "model.norm")
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = table
    if spec.head_bias:
        shapes["lm_head.bias"] = (spec.vocab_size,)
    return shapes


def _layer(spec: DecoderSpec, layer: int) -> dict[str, Shape]:
    names = []
    if spec.pre_norms:
        names.append("input_layernorm")
    if spec.post_norms or (spec.pre_norms and not spec.shared_norm):
        names.append("post_attention_layernorm")
    if spec.post_norms:
        names += ["pre_feedforward_layernorm"] * spec.pre_norms + ["post_feedforward_layernorm"]
    shapes = {key: shape for name in names for key, shape in _norm(spec, name).items()}
    shapes |= _attention(spec)
    experts = spec.routed(layer)
    return shapes | (_mlp(spec, "mlp", spec.intermediate_size) if experts is None else _experts(spec, experts))


def _norm(spec: DecoderSpec, name: str) -> dict[str, Shape]:
    size = (spec.hidden_size,)
    parts = {"weight": spec.norm_weights, "bias": spec.norm_biases}
    return {f"{name}.{part}": size for part, learned in parts.items() if learned}


def _attention(spec: DecoderSpec) -> dict[str, Shape]:
    hidden, queries, keys = spec.hidden_size, spec.query_size, spec.key_value_size
    shapes: dict[str, Shape] = {}
    for name, rows, columns, biased in (
        ("q_proj", queries, hidden, spec.qkv_bias),
        ("k_proj", keys, hidden, spec.qkv_bias),
        ("v_proj", keys, hidden, spec.qkv_bias),
        ("o_proj", hidden, queries, spec.o_bias),
    ):
        shapes |= _linear(f"self_attn.{name}", rows, columns, biased)
    if spec.qk_norm:
        for name, width in (("q_norm", queries), ("k_norm", keys)):
            size = spec.head_size if spec.qk_norm_scope == "head" else width
            shapes[f"self_attn.{name}.weight"] = (size,)
            if spec.qk_norm_biases:
                shapes[f"self_attn.{name}.bias"] = (size,)
    return shapes


def _mlp(spec: DecoderSpec, path: str, width: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for name in ("gate_proj", "up_proj") if spec.gated_mlp else ("up_proj",):
        shapes |= _linear(f"{path}.{name}", width, spec.hidden_size, spec.mlp_bias)
    return shapes | _linear(f"{path}.down_proj", spec.hidden_size, width, spec.mlp_bias)


def _experts(spec: DecoderSpec, experts: Experts) -> dict[str, Shape]:
    hidden, wide = spec.hidden_size, experts.intermediate_size
    shapes: dict[str, Shape] = {"mlp.gate.weight": (experts.count, hidden)}
    for expert in range(experts.count):
        path = f"mlp.experts.{expert}"
        shapes |= {f"{path}.gate_proj.weight": (wide, hidden), f"{path}.up_proj.weight": (wide, hidden)}
        shapes[f"{path}.down_proj.weight"] = (hidden, wide)
    if experts.shared_intermediate_size:
        shapes |= _mlp(spec, "mlp.shared_expert", experts.shared_intermediate_size)
    if experts.shared_gate:
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _linear(name: str, rows: int, columns: int, biased: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (rows, columns)}
    return shapes | ({f"{name}.bias": (rows,)} if biased else {})
