"""Parts shared by families: the Architecture class, common configuration keys, and slices of packed tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, UnsupportedModelError
from ..hf_config import HFConfig, rope_fields
from ..spec import DecoderSpec, ExpertsSpec

# A function that extracts a weight or bias from the tensor that holds it; the ints are captured by the rule's pattern.
TensorView = Callable[..., NDArray[Any]]
Describe = Callable[[HFConfig], DecoderSpec]


@dataclass(frozen=True)
class Rule:
    """A mapping from our tensor names to a checkpoint's tensor names.

    Attributes:
        pattern: regular expression to search for in our name.
        replacement: its replacement, as in re.sub.
        view: extracts our tensor from the checkpoint's tensor.
        stack: returns the number of tensors to concatenate; the replacement then contains "{}" for the tensor's number,
            which starts at 0.
        when: returns True for the decoders to which the rule applies.
        floats: True if the view reads floats, so that quantised blocks are dequantised first.
        part: start of the names to which the rule applies, such as "mtp."; "" means all names.
    """

    pattern: str
    replacement: str
    view: TensorView | None = None
    stack: Callable[[DecoderSpec], int] | None = None
    when: Callable[[DecoderSpec], bool] = lambda spec: True
    floats: bool = False
    part: str = ""


@dataclass(frozen=True)
class TensorSource:
    """The checkpoint's tensors that make up one of our tensors, and the function that converts them; see Rule."""

    names: tuple[str, ...]
    view: Callable[[NDArray[Any]], NDArray[Any]] | None = None
    floats: bool = False


@dataclass(frozen=True)
class MtpHead:
    """The head of an architecture that predicts further tokens: one layer like those of the decoder.

    Attributes:
        path: returns the start of the names of the tensors of the head's layer with the given index. It is the same for
            all layers if the names of a head's tensors contain the index elsewhere.
        parts: the rest of the stored names of the head's parts, by our names without "mtp."; empty if both are equal.
    """

    path: Callable[[DecoderSpec, int], str] = lambda spec, layer: "mtp."
    parts: Mapping[str, str] = field(default_factory=dict)

    def rules(self, spec: DecoderSpec) -> tuple[Rule, ...]:
        """Return the rules for the names of the head's tensors."""
        path = self.path(spec, 0)
        return tuple(Rule(rf"^mtp\.{re.escape(ours)}\.", path + stored) for ours, stored in self.parts.items())


@dataclass(frozen=True)
class Architecture:
    """One model_type.

    Attributes:
        model_type: the name in config.json.
        title: human-readable name.
        describe: function that reads config.json.
        rules: rules that are applied in order to each of our tensor names (the names in Llama, Qwen and Gemma 2).
        unused: regular expression for the names of tensors that do not affect the logits, such as draft heads.
        mtp: the head that predicts further tokens; None if there is none, or if it is not supported.
        may_join_experts: True if a checkpoint may also store the experts of a layer in one tensor.
        variants: further rules, each with a regular expression. A rule precedes `rules` if the name of a tensor in the
            checkpoint matches the expression.
    """

    model_type: str
    title: str
    describe: Describe
    rules: tuple[Rule, ...] = ()
    unused: str = ""
    may_join_experts: bool = False
    mtp: MtpHead | None = None
    variants: tuple[tuple[str, Rule], ...] = ()

    @property
    def stores_transposed(self) -> bool:
        """True if matrices are stored as [inputs, outputs]."""
        return any(rule.view is transposed for rule in self.rules)

    def stored_in(self, names: Collection[str]) -> Architecture:
        """Return the architecture with the rules for a checkpoint with these tensors."""
        found = {name.partition(".")[0] for name in names if name.endswith(".mlp.experts.gate_up_proj")}
        first = [rule for pattern, rule in self.variants if any(re.search(pattern, name) for name in names)]
        if self.may_join_experts:
            # An MTP head may store its experts in another way than the decoder.
            parts = ["mtp."] * ("mtp" in found) + ["model."] * bool(found - {"mtp"})
            first += [replace(rule, part=part) for part in parts for rule in EXPERTS_TOGETHER]
        return replace(self, rules=(*first, *self.rules)) if first else self

    def source(self, spec: DecoderSpec, name: str) -> TensorSource:
        """Return the source of the tensor with our name `name`."""
        view: Callable[[NDArray[Any]], NDArray[Any]] | None = None
        names: tuple[str, ...] = (name,)
        floats = False
        own = self.mtp.rules(spec) if self.mtp is not None and name.startswith("mtp.") else ()
        for rule in (*self.rules, *own):
            match = re.search(rule.pattern, names[0])
            if match is None or not rule.when(spec) or not name.startswith(rule.part):
                continue
            renamed = re.sub(rule.pattern, rule.replacement, names[0], count=1)
            names = tuple(renamed.format(i) for i in range(rule.stack(spec))) if rule.stack else (renamed,)
            if rule.view is not None:
                view, floats = _bound(rule.view, spec, match), rule.floats
        return TensorSource(names, view, floats)


ARCHITECTURES: dict[str, Architecture] = {}
"""Architectures by model_type; the modules of this package add the entries."""


def architecture(title: str, *rules: Rule, **options: Any) -> Callable[[Describe], Describe]:
    """Return a decorator that registers a describe function under the model_type of its name; see Architecture."""

    def add(describe: Describe) -> Describe:
        ARCHITECTURES[describe.__name__] = Architecture(describe.__name__, title, describe, rules, **options)
        return describe

    return add


def _bound(view: TensorView, spec: DecoderSpec, match: re.Match[str]) -> Callable[[NDArray[Any]], NDArray[Any]]:
    numbers = tuple(int(group) for group in match.groups())
    return lambda tensor: view(spec, tensor, *numbers)


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


# Keys that change the computation and that no architecture supports.
_REFUSED = {
    "quantization_config": "weights that are already quantised cannot be quantised again",
    "use_bidirectional_attention": "only causal attention is supported",
    "add_cross_attention": "encoders are not supported",
    "is_encoder_decoder": "encoders are not supported",
}


def decoder(
    config: HFConfig,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    epsilon: float = 1e-6,
    tied: bool = False,
    head_size: int | None = None,
    heads: int | None = None,
    rope_kind: str | None = None,
    family: str = "decoder",
    **fields: Any,
) -> DecoderSpec:
    """Return a decoder with the values that nearly every config.json has; `fields` adds values or overrides them.

    Args:
        theta, epsilon, tied, head_size, heads: the architecture's defaults for keys that its config.json may omit.
        partial: default for the fraction of each head to rotate; None if the architecture rotates only whole heads.
        rope_kind: kind of layers to read the rotation for, if the kinds differ.
        family: model type for genai_config.json: a type that onnxruntime-genai supports, or "decoder".
    """
    # "vision": only pictures are attended to in both directions
    wrong = {name: why for name, why in _REFUSED.items() if config.get(name) not in (None, False, "", "vision")}
    if not config.flag("is_causal", default=True):
        wrong["is_causal"] = "only causal attention is supported"
    for name, why in wrong.items():
        raise UnsupportedModelError(
            f"config.json sets {name} to {config.get(name)}", why, "use a float checkpoint of a causal decoder"
        )
    heads = config.integer("num_attention_heads", "n_head", **({} if heads is None else {"default": heads}))
    hidden = config.integer("hidden_size", "n_embd")
    vocab = config.integer("vocab_size")
    stop = config.ends(vocab)
    if not stop and "eos_token_ids" not in fields:
        raise ConfigError(
            "config.json has no eos_token_id, and the tokenizer has no eos_token",
            "the model ends each reply with an end-of-sequence token",
            "add eos_token_id to config.json",
        )
    values: dict[str, Any] = {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_layers": fields.get("num_layers") or config.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": config.integer("num_key_value_heads", default=heads),
        "head_size": config.integer("head_dim", default=head_size or hidden // heads),
        "rms_norm_eps": config.number(
            "rms_norm_eps",
            "layer_norm_eps",
            "layer_norm_epsilon",
            "norm_epsilon",
            "norm_eps",
            default=epsilon,
            positive=True,
        ),
        "tie_word_embeddings": config.flag("tie_word_embeddings", default=tied),
        **rope_fields(config, theta=theta, partial=partial, kind=rope_kind),
        "bos_token_id": _token_within(config, "bos_token_id", vocab),
        "eos_token_ids": stop,
        "pad_token_id": _token_within(config, "pad_token_id", vocab),
    }
    if "intermediate_size" in fields:
        config.get("intermediate_size")
    else:
        values["intermediate_size"] = config.integer("intermediate_size", default=4 * hidden)
    if fields.get("latent") is not None:
        values |= {"head_size": fields["latent"].row_size, "num_key_value_heads": 1}
    if "hidden_activation" not in fields:
        values["hidden_activation"] = activation(config.text("hidden_act", "hidden_activation", default="silu"))
    return DecoderSpec(**(values | fields))


def _token_within(config: HFConfig, name: str, vocab: int) -> int | None:
    """Return a special token, or None if the id is outside the vocabulary, as in some checkpoints."""
    return next((token for token in config.token_ids(name) if token < vocab), None)


def refuse_flags(config: HFConfig, *names: str, why: str, fix: str) -> None:
    """Raise UnsupportedModelError if config.json sets one of these keys to true."""
    if found := [name for name in names if config.flag(name)]:
        raise UnsupportedModelError(f"config.json sets {' and '.join(found)} to true", why, fix)


def activation(name: str) -> str:
    """Return our name of an activation function."""
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"activation {name!r} is not supported",
            f"the supported functions are {', '.join(_ACTIVATIONS)}",
            "use a checkpoint with a supported function",
        )
    return _ACTIVATIONS[name]


def biases(attention: bool, mlp: bool) -> dict[str, Any]:
    """Return the flags for the biases of all attention projections and of the feed-forward layer."""
    return {"qkv_bias": attention, "o_bias": attention, "mlp_bias": mlp}


def attention_biases(config: HFConfig) -> dict[str, Any]:
    """Return the flags for biases, according to attention_bias; only attention projections have biases."""
    return biases(config.flag("attention_bias"), False)


def given_biases(config: HFConfig) -> dict[str, Any]:
    """Return the flags for biases according to attention_bias and mlp_bias."""
    return biases(config.flag("attention_bias"), config.flag("mlp_bias"))


def mixtral_experts(config: HFConfig, **fields: Any) -> ExpertsSpec:
    """Return the experts from Mixtral's configuration keys."""
    return ExpertsSpec(
        count=config.integer("num_local_experts"),
        per_token=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("intermediate_size"),
        **fields,
    )


def expert_fields(config: HFConfig, **fields: Any) -> dict[str, Any]:
    """Return the fields for experts and for the layers that have a dense feed-forward layer instead."""
    experts = ExpertsSpec(
        count=config.integer("num_experts", "num_local_experts"),
        per_token=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("moe_intermediate_size"),
        **{"normalized": config.flag("norm_topk_prob"), **fields},
    )
    step, dense_layers = config.integer("decoder_sparse_step", default=1), config.numbers("mlp_only_layers")
    dense = tuple(layer for layer in range(config.num_layers) if layer in dense_layers or (layer + 1) % step)
    return {"experts": experts, "dense_layers": dense}


def sigmoid_experts(config: HFConfig, *, dense: int, **fields: Any) -> dict[str, Any]:
    """Return the fields for experts that are weighted by sigmoids; `dense` is the number of dense layers at the start.

    Groups of experts are compared by the sums of their two highest scores (DeepSeek-V3).
    """
    experts = ExpertsSpec(
        count=config.integer("n_routed_experts", "num_experts", "num_local_experts"),
        per_token=config.integer("num_experts_per_tok", "num_experts_per_token"),
        intermediate_size=config.integer("moe_intermediate_size"),
        routing="sigmoid", routed_scale=config.number("routed_scaling_factor", default=1.0),
        **{**expert_groups(config, scores=2), **fields},
    )  # fmt: skip
    return {"experts": experts, "dense_layers": tuple(range(min(dense, config.num_layers)))}


def expert_groups(config: HFConfig, *, scores: int) -> dict[str, Any]:
    """Return the fields for groups of experts; `scores` is the number of scores of a group that are added."""
    groups = config.integer("n_group", "num_expert_group", default=1)
    best = config.integer("topk_group", default=1)
    return {"groups": groups, "best_groups": best, "group_scores": scores} if groups > 1 else {}


# The head of DeepSeek-V3 and its descendants is stored as a further layer.
LAST_LAYER = MtpHead(
    lambda spec, layer: f"model.layers.{spec.num_layers + layer}.",
    {"fc": "eh_proj.", "pre_fc_norm_embedding": "enorm.", "pre_fc_norm_hidden": "hnorm.", "norm": "shared_head.norm.",
     "layers.0": ""},
)  # fmt: skip
# Names of the router and of the shared experts in DeepSeek-V3 and its descendants.
SIGMOID_ROUTER = (
    Rule(r"mlp\.gate\.selection_bias", "mlp.gate.e_score_correction_bias"),
    Rule(r"mlp\.shared_expert\.", "mlp.shared_experts."),
)


def sigmoid_fields(config: HFConfig, *, dense: int, normalized: bool) -> dict[str, Any]:
    """Return the fields for experts of DeepSeek-V3, GLM 4 MoE and dots.llm1; the arguments are defaults."""
    width = config.integer("moe_intermediate_size") * config.integer(
        "n_shared_experts", "num_shared_experts", default=1, least=0
    )
    return sigmoid_experts(
        config, dense=config.integer("first_k_dense_replace", default=dense, least=0), selection_bias=True,
        normalized=config.flag("norm_topk_prob", "moe_renormalize", default=normalized), shared_intermediate_size=width,
    )  # fmt: skip


def listed_dense_layers(config: HFConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields for experts, with the dense layers of mlp_layer_types if config.json lists them."""
    kinds = config.layers("mlp_layer_types", config.num_layers)
    if kinds is None:
        return fields
    if wrong := [kind for kind in kinds if kind not in ("dense", "sparse")]:
        raise config.wrong("mlp_layer_types", wrong[0], "dense or sparse")
    return {**fields, "dense_layers": tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")}


def layer_norms(*, biased: bool = True, **fields: Any) -> dict[str, Any]:
    """Return the fields for layer norms in place of RMS norms."""
    return {"norm": "layer", "norm_biases": biased, **fields}


def gpt_fields(config: HFConfig, *names: str, default: str, **fields: Any) -> dict[str, Any]:
    """Return the fields for layer norms and an ungated activation; `names` are the activation's possible keys."""
    hidden_activation = activation(config.text(*names, default=default))
    return {"epsilon": 1e-5, "hidden_activation": hidden_activation, "gated_mlp": False, **layer_norms(**fields)}


def sliding_layers(config: HFConfig, pattern: int | None = None) -> tuple[int, ...]:
    """Return the layers with a window, according to layer_types, or else all layers except every pattern-th layer."""
    count = config.num_layers
    kinds = config.layers("layer_types", count)
    if kinds is None:
        every = config.integer("sliding_window_pattern", default=pattern or 1)
        return tuple(layer for layer in range(count) if every < 2 or (layer + 1) % every)
    return layers_of("sliding_attention", kinds=kinds)


def layers_of(*names: str, kinds: list[Any], others: Sequence[str] = ("full_attention",)) -> tuple[int, ...]:
    """Return the layers whose kind has one of the names, given the kind of each layer.

    Args:
        others: the names for the kind of all other layers.
    """
    known = (*names, *others)
    if unknown := [one for one in kinds if one not in known]:
        raise UnsupportedModelError(
            f"layer_types in config.json contains {unknown[0]!r:.100}",
            f"the supported types are {', '.join(sorted(known))}",
            "use a checkpoint with these types only",
        )
    return tuple(layer for layer, one in enumerate(kinds) if one in names)


def window_fields(config: HFConfig, pattern: int | None = None, *, window: int | None = None) -> dict[str, Any]:
    """Return sliding_window (default: `window`) and sliding_layers, or no fields if no layer has a window."""
    window, layers = config.optional_integer("sliding_window", window), sliding_layers(config, pattern)
    if window is None or not layers:
        return {}
    every = len(layers) == config.num_layers
    return {"sliding_window": window, "sliding_layers": None if every else layers}


def transposed(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    """Transpose a matrix stored as [inputs, outputs]. Leave biases, and blocks along the inputs, unchanged."""
    return tensor if tensor.dtype.names else tensor.T


def of_group(part: slice | int) -> TensorView:
    """Return a view of a tensor that holds, for each key/value head, its query heads, its key and its value."""

    def view(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
        share = spec.num_attention_heads // spec.num_key_value_heads + 2
        groups = tensor.reshape(spec.num_key_value_heads, share, spec.head_size, *tensor.shape[1:])
        return groups[:, part].reshape(-1, *tensor.shape[1:])

    return view


def flat(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    """Return the weights of several heads as one vector."""
    return tensor.reshape(-1)


# Queries, keys and values are concatenated along the rows, as in Phi-3.
PACKED_QKV = (
    Rule(r"self_attn\.q_proj", "self_attn.qkv_proj", lambda spec, x: x[: spec.query_size]),
    Rule(r"self_attn\.k_proj", "self_attn.qkv_proj", lambda spec, x: x[spec.query_size :][: spec.key_value_size]),
    Rule(r"self_attn\.v_proj", "self_attn.qkv_proj", lambda spec, x: x[spec.query_size + spec.key_value_size :]),
)
PACKED_GATE_UP = (
    Rule(r"mlp\.gate_proj", "mlp.gate_up_proj", lambda spec, x: x[: len(x) // 2]),
    Rule(r"mlp\.up_proj", "mlp.gate_up_proj", lambda spec, x: x[len(x) // 2 :]),
)


def _part_of_expert(part: int | None) -> TensorView:
    """Return a view of one expert's gate (0), up (1) or down (None) matrix, stored as it is or transposed."""

    def view(spec: DecoderSpec, tensor: NDArray[Any], expert: int) -> NDArray[Any]:
        matrix: NDArray[Any] = tensor[expert]
        columns = spec.hidden_size if part is not None else spec.experts.intermediate_size if spec.experts else 0
        if not tensor.dtype.names and matrix.shape[1] != columns:
            matrix = matrix.T
        return matrix if part is None else np.split(matrix, 2)[part]

    return view


# All experts of a layer in one tensor.
EXPERTS_TOGETHER = (
    Rule(r"mlp\.experts\.(\d+)\.gate_proj\.weight", "mlp.experts.gate_up_proj", _part_of_expert(0)),
    Rule(r"mlp\.experts\.(\d+)\.up_proj\.weight", "mlp.experts.gate_up_proj", _part_of_expert(1)),
    Rule(r"mlp\.experts\.(\d+)\.down_proj\.weight", "mlp.experts.down_proj", _part_of_expert(None)),
)
# Mixtral's names for a mixture of experts.
MIXTRAL_EXPERTS = (
    Rule(r"mlp\.experts\.(\d+)\.gate_proj", r"block_sparse_moe.experts.\1.w1"),
    Rule(r"mlp\.experts\.(\d+)\.up_proj", r"block_sparse_moe.experts.\1.w3"),
    Rule(r"mlp\.experts\.(\d+)\.down_proj", r"block_sparse_moe.experts.\1.w2"),
    Rule(r"mlp\.gate\.", "block_sparse_moe.gate."),
)
