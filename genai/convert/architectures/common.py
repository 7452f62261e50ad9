"""What families share: the form of an architecture, what most configurations say, and cuts of packed tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ...errors import ConfigError, UnsupportedModelError
from ..hf_config import HFConfig, rope_fields
from ..spec import DecoderSpec, ExpertsSpec

# Cuts one weight or bias out of the tensor that holds it: (spec, tensor, *numbers that the rule's pattern caught).
TensorView = Callable[..., NDArray[Any]]
Describe = Callable[[HFConfig], DecoderSpec]


@dataclass(frozen=True)
class Rule:
    """Where a tensor lies: `pattern`, found in our name, is replaced by `replacement` (as re.sub does).

    A view then cuts it out of the tensor found there. With `stack`, the replacement ends in "{}" before what follows,
    and tensors numbered from 0 are put one after the other. `when` says which decoders it is for.
    """

    pattern: str
    replacement: str
    view: TensorView | None = None
    stack: Callable[[DecoderSpec], int] | None = None
    when: Callable[[DecoderSpec], bool] = lambda spec: True


@dataclass(frozen=True)
class TensorSource:
    """The tensors that one of ours is made of, and how."""

    names: tuple[str, ...]
    view: Callable[[NDArray[Any]], NDArray[Any]] | None = None


@dataclass(frozen=True)
class Architecture:
    """One model_type.

    Attributes:
        model_type: as config.json names it.
        title: for people.
        describe: reads config.json.
        rules: applied in order to each of our tensor names, which are those of Llama, Qwen and Gemma 2.
    """

    model_type: str
    title: str
    describe: Describe
    rules: tuple[Rule, ...] = ()

    @property
    def stores_transposed(self) -> bool:
        """Whether matrices are stored as [inputs, outputs]."""
        return any(rule.view is transposed for rule in self.rules)

    def source(self, spec: DecoderSpec, name: str) -> TensorSource:
        """Where the tensor that we call `name` lies."""
        view: Callable[[NDArray[Any]], NDArray[Any]] | None = None
        names: tuple[str, ...] = (name,)
        for rule in self.rules:
            match = re.search(rule.pattern, names[0])
            if match is None or not rule.when(spec):
                continue
            renamed = re.sub(rule.pattern, rule.replacement, names[0], count=1)
            names = tuple(renamed.format(i) for i in range(rule.stack(spec))) if rule.stack else (renamed,)
            if rule.view is not None:
                view = _bound(rule.view, spec, match)
        return TensorSource(names, view)


ARCHITECTURES: dict[str, Architecture] = {}
"""By model_type; `architectures` fills it."""


def architecture(title: str, *rules: Rule) -> Callable[[Describe], Describe]:
    """Decorator of the function that describes the model_type of its name; see Architecture."""

    def add(describe: Describe) -> Describe:
        ARCHITECTURES[describe.__name__] = Architecture(describe.__name__, title, describe, rules)
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


# What would change the mathematics, and is known to no architecture here.
_REFUSED = {
    "quantization_config": "weights that others have quantised cannot be quantised again; give the float checkpoint",
    "use_bidirectional_attention": "a decoder sees the past only",
    "add_cross_attention": "there is no encoder here",
    "is_encoder_decoder": "there is no encoder here",
}


def decoder(
    config: HFConfig,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    epsilon: float = 1e-6,
    tied: bool = False,
    head_size: int | None = None,
    rope_kind: str | None = None,
    family: str = "decoder",
    **fields: Any,
) -> DecoderSpec:
    """A decoder with the values that nearly every config.json has, and `fields` beside or instead of them.

    Args:
        theta, partial, epsilon, tied, head_size: the architecture's defaults, where its config.json may leave them out.
            No `partial` means that the architecture always rotates whole heads.
        rope_kind: the layers whose rotation is asked for, where they differ.
        family: what genai_config.json calls the model: a type that onnxruntime-genai knows, or "decoder".
    """
    wrong = {name: why for name, why in _REFUSED.items() if config.get(name)}
    if not config.flag("is_causal", default=True):
        wrong["is_causal"] = "a decoder sees the past only"
    for name, why in wrong.items():
        raise UnsupportedModelError(f"config.json has {name}: {config.get(name)}", why, "use another checkpoint")
    heads = config.integer("num_attention_heads", "n_head")
    hidden = config.integer("hidden_size", "n_embd")
    vocab = config.integer("vocab_size")
    stop = config.token_ids("eos_token_id")
    if not stop and "eos_token_ids" not in fields:
        raise ConfigError("config.json has no eos_token_id", "a reply would never end", "name the token in config.json")
    values: dict[str, Any] = {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": config.integer("intermediate_size", default=4 * hidden),
        "num_layers": config.num_layers,
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
    if "hidden_activation" not in fields:
        values["hidden_activation"] = activation(config.text("hidden_act", "hidden_activation", default="silu"))
    return DecoderSpec(**(values | fields))


def _token_within(config: HFConfig, name: str, vocab: int) -> int | None:
    """Some checkpoints name a token for padding or beginnings that they do not have: as good as none."""
    return next((token for token in config.token_ids(name) if token < vocab), None)


def activation(name: str) -> str:
    """Our name of an activation function."""
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"activation {name!r} is not known", f"known are {', '.join(_ACTIVATIONS)}", "use another checkpoint"
        )
    return _ACTIVATIONS[name]


def biases(attention: bool, mlp: bool) -> dict[str, Any]:
    """Biases of all attention projections, and of the feed-forward layer's."""
    return {"qkv_bias": attention, "o_bias": attention, "mlp_bias": mlp}


def attention_biases(config: HFConfig) -> dict[str, Any]:
    """Biases of the attention projections alone, if attention_bias says so."""
    return biases(config.flag("attention_bias"), False)


def given_biases(config: HFConfig) -> dict[str, Any]:
    """Biases as attention_bias and mlp_bias say."""
    return biases(config.flag("attention_bias"), config.flag("mlp_bias"))


def mixtral_experts(config: HFConfig, **fields: Any) -> ExpertsSpec:
    """Experts by the keys that Mixtral has for them."""
    return ExpertsSpec(
        count=config.integer("num_local_experts"),
        per_token=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("intermediate_size"),
        **fields,
    )


def layer_norms(*, biased: bool = True, **fields: Any) -> dict[str, Any]:
    """Layer norms in the place of RMS norms."""
    return {"norm": "layer", "norm_biases": biased, **fields}


def gpt_fields(config: HFConfig, *names: str, default: str, **fields: Any) -> dict[str, Any]:
    """Layer norms, and no gate behind the activation, which has one of these names or else is the default."""
    hidden_activation = activation(config.text(*names, default=default))
    return {"epsilon": 1e-5, "hidden_activation": hidden_activation, "gated_mlp": False, **layer_norms(**fields)}


def sliding_layers(config: HFConfig, pattern: int | None = None) -> tuple[int, ...]:
    """Layers with a window: by layer_types, or all but every pattern-th."""
    count = config.num_layers
    kinds = config.layers("layer_types", count)
    if kinds is None:
        every = config.integer("sliding_window_pattern", default=pattern or 1)
        return tuple(layer for layer in range(count) if every < 2 or (layer + 1) % every)
    known = {"sliding_attention", "full_attention"}
    if other := sorted({str(kind) for kind in kinds} - known):
        raise UnsupportedModelError(
            f"layer_types has {other[0]!r}", f"known are {', '.join(sorted(known))}", "use another checkpoint"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def window_fields(config: HFConfig, pattern: int | None = None, *, window: int | None = None) -> dict[str, Any]:
    """sliding_window and sliding_layers; nothing where no layer has a window. `window` is the default."""
    window, layers = config.optional_integer("sliding_window", window), sliding_layers(config, pattern)
    if window is None or not layers:
        return {}
    every = len(layers) == config.num_layers
    return {"sliding_window": window, "sliding_layers": None if every else layers}


def transposed(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    """A matrix stored as [inputs, outputs]; a bias stays as it is, and blocks lie along the inputs always."""
    return tensor if tensor.dtype.names else tensor.T


def of_group(part: slice | int) -> TensorView:
    """Of a tensor with, per key/value head, its query heads, then its key, then its value."""

    def view(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
        share = spec.num_attention_heads // spec.num_key_value_heads + 2
        groups = tensor.reshape(spec.num_key_value_heads, share, spec.head_size, *tensor.shape[1:])
        return groups[:, part].reshape(-1, *tensor.shape[1:])

    return view


def flat(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    """Weights of several heads as one vector."""
    return tensor.reshape(-1)


# Queries, keys and values below each other, as Phi-3 stores them.
PACKED_QKV = (
    Rule(r"self_attn\.q_proj", "self_attn.qkv_proj", lambda spec, x: x[: spec.query_size]),
    Rule(r"self_attn\.k_proj", "self_attn.qkv_proj", lambda spec, x: x[spec.query_size :][: spec.key_value_size]),
    Rule(r"self_attn\.v_proj", "self_attn.qkv_proj", lambda spec, x: x[spec.query_size + spec.key_value_size :]),
)
PACKED_GATE_UP = (
    Rule(r"mlp\.gate_proj", "mlp.gate_up_proj", lambda spec, x: x[: len(x) // 2]),
    Rule(r"mlp\.up_proj", "mlp.gate_up_proj", lambda spec, x: x[len(x) // 2 :]),
)
# Mixtral's names of a mixture of experts.
MIXTRAL_EXPERTS = (
    Rule(r"mlp\.experts\.(\d+)\.gate_proj", r"block_sparse_moe.experts.\1.w1"),
    Rule(r"mlp\.experts\.(\d+)\.up_proj", r"block_sparse_moe.experts.\1.w3"),
    Rule(r"mlp\.experts\.(\d+)\.down_proj", r"block_sparse_moe.experts.\1.w2"),
    Rule(r"mlp\.gate\.", "block_sparse_moe.gate."),
)
