"""One function per model_type, which returns the EncoderSpec of a configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...errors import ConfigError, UnsupportedModelError
from .spec import Disentangled, EncoderSpec, Head, LayerNames, RelativeBias, TokenScore

_FAMILIES: dict[str, Callable[[EncoderConfig], EncoderSpec]] = {}
_ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "relu": "relu", "silu": "silu", "swish": "silu", "tanh": "tanh",
}  # fmt: skip


class EncoderConfig:
    """A config.json, with checked values."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type", ""))

    @property
    def is_classifier(self) -> bool:
        """True if the checkpoint has a classification head."""
        names = self.values.get("architectures") or []
        return any(str(name).endswith("ForSequenceClassification") for name in names)

    def whole(self, *names: str, default: int | None = None) -> int:
        """Return a positive whole number under one of several names."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
                    raise self._wrong(name, value, "a positive whole number")
                return value
        if default is None:
            raise ConfigError(f"config.json: {names[0]} is missing", "the model needs it", "copy the model again")
        return default

    def number(self, *names: str, default: float) -> float:
        """Return a number under one of several names."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise self._wrong(name, value, "a number")
                return float(value)
        return default

    def activation(self, *names: str, default: str = "gelu") -> str:
        """Return the name of an activation function."""
        value = next((self.values[name] for name in names if self.values.get(name) is not None), default)
        if value not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"config.json: {names[0]} is {value!r:.80}",
                f"the activation functions are {', '.join(_ACTIVATIONS)}",
                "use a model with one of these functions",
            )
        return _ACTIVATIONS[value]

    def require(self, name: str, *expected: Any) -> None:
        """Raise UnsupportedModelError unless a value is absent or one of those that are supported."""
        value = self.values.get(name)
        if value is not None and value not in expected:
            raise UnsupportedModelError(
                f"config.json: {name} is {value!r:.80}",
                f"only {', '.join(map(repr, expected))} can be built",
                "use another model of this family, or export this model with Optimum",
            )

    def rotation(self, *names: str, default: float) -> tuple[float, float]:
        """Return the base of the rotary position embedding, and the number that its frequencies are divided by.

        Frequencies are unscaled, divided by a factor ("linear"), or changed as in NTKScalingRotaryEmbedding of the
        models of type "new" ("ntk"): theta * factor is the base, and frequencies are divided by factor ** (2 / size).
        """
        scaling = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(scaling, dict):
            raise self._wrong("rope_scaling", scaling, "a JSON object")
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        own = EncoderConfig(scaling)
        theta = own.number("rope_theta", default=self.number(*names, default=default))
        factor = own.number("factor", default=1.0)
        if factor <= 0 or theta <= 0:
            raise self._wrong("rope_scaling", scaling, "a positive base and a positive factor")
        match kind:
            case "default":
                return theta, 1.0
            case "linear":
                return theta, factor
            case "ntk" if scaling.get("mixed_b") is None:
                size = self.whole("hidden_size") // self.whole("num_attention_heads")
                return theta * factor, factor ** (2 / size)
        raise UnsupportedModelError(
            f"config.json: rope_type is {json.dumps(scaling):.80}",
            "encoders of this family are built with the rotations default, linear and ntk without mixed_b",
            "export this model with Optimum",
        )

    def theta(self, kind: str, *names: str, default: float) -> float:
        """Return the base of the rotary position embedding of a kind of layers."""
        parameters = self.values.get("rope_parameters")
        if isinstance(parameters, dict):
            own = parameters.get(kind, parameters)
            if isinstance(own, dict):
                rope_type = own.get("rope_type", "default")
                if rope_type != "default":
                    raise UnsupportedModelError(
                        f"config.json: rope_type is {rope_type!r:.80}",
                        "encoders are built with the default rotation only",
                        "export this model with Optimum",
                    )
                if isinstance(own.get("rope_theta"), int | float):
                    return float(own["rope_theta"])
        if self.values.get("rope_scaling"):
            self.require("rope_scaling")
        return self.number(*names, default=default)

    @property
    def num_labels(self) -> int:
        """The number of logits of a classification head."""
        labels = self.values.get("id2label")
        return len(labels) if isinstance(labels, dict) and labels else self.whole("num_labels", default=2)

    def _wrong(self, name: str, value: object, expected: str) -> ConfigError:
        return ConfigError(f"config.json: {name} is {value!r:.80}", f"{expected} is expected", "correct the file")


def family(*model_types: str) -> Callable[[Callable[[EncoderConfig], EncoderSpec]], Any]:
    def register(function: Callable[[EncoderConfig], EncoderSpec]) -> Callable[[EncoderConfig], EncoderSpec]:
        _FAMILIES.update(dict.fromkeys(model_types, function))
        return function

    return register


def encoder_types() -> list[str]:
    """Return the model types that can be built as encoders."""
    return sorted(_FAMILIES)


def is_encoder(config: Mapping[str, Any], *, has_modules: bool) -> bool:
    """Return True if a configuration is of an encoder, or of a decoder that is used as one.

    Args:
        has_modules: True if the checkpoint has the modules.json of sentence-transformers.

    Raises:
        ConfigError: model_type is not a text.
    """
    model_type = config.get("model_type", "")
    if not isinstance(model_type, str | None):
        raise ConfigError(f"config.json: model_type is {model_type!r:.80}", "a name is expected", "correct the file")
    if model_type in _DECODERS and not has_modules:
        names = config.get("architectures") or []
        return bool(names) and not any("ForCausalLM" in str(name) for name in names)
    return model_type in _FAMILIES


def adapter_tasks(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tasks that the checkpoint has adapters for (jina-embeddings-v3), in the order of their tensors.

    Raises:
        ConfigError: lora_adaptations is not a list of names.
    """
    tasks = values.get("lora_adaptations") or ()
    if not isinstance(tasks, list | tuple) or not all(isinstance(task, str) for task in tasks):
        raise ConfigError(
            f"config.json: lora_adaptations is {tasks!r:.80}", "a list of names is expected", "correct the file"
        )
    return tuple(tasks)


def describe(values: Mapping[str, Any], score: TokenScore | None = None) -> EncoderSpec:
    """Return the description of an encoder.

    Args:
        values: the content of config.json.
        score: if given, the checkpoint is a decoder, and the graph computes this score instead of the last rows.

    Raises:
        UnsupportedModelError: the model type is unknown, or a score is requested of a model that is no decoder.
        ConfigError: the configuration is malformed.
    """
    config = EncoderConfig(values)
    if config.model_type not in _FAMILIES:
        raise UnsupportedModelError(
            f"model_type {config.model_type!r:.80} is not a known encoder",
            f"the known types are {', '.join(encoder_types())}",
            "export this model with Optimum, which writes onnx/model.onnx",
        )
    spec = _FAMILIES[config.model_type](config)
    if score is None:
        return spec
    if config.model_type not in _DECODERS:
        raise UnsupportedModelError(
            f"model_type {config.model_type!r:.80} has no language model head",
            f"scores of tokens are computed by decoders: {', '.join(_DECODERS)}",
            "use a model with a classification head",
        )
    for token in (score.true_id, score.false_id):
        if token is not None and not 0 <= token < spec.vocab_size:
            raise ConfigError(
                f"the score is computed from the token {token}",
                f"the model's tokens are 0 to {spec.vocab_size - 1}",
                "correct the ids in the settings of LogitScore",
            )
    return replace(spec, head=Head((("lm_head", ""),), pooling="last", score=score), num_labels=1)


def _sizes(config: EncoderConfig, **changes: Any) -> dict[str, Any]:
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    if hidden % heads:
        raise ConfigError(
            f"config.json: hidden_size is {hidden}, num_attention_heads {heads}",
            "the first must be a multiple of the second",
            "correct the file",
        )
    return {
        "model_type": config.model_type, "hidden_size": hidden, "num_layers": config.whole("num_hidden_layers"),
        "heads": heads, "kv_heads": heads, "head_size": hidden // heads,
        "intermediate": config.whole("intermediate_size"), "vocab_size": config.whole("vocab_size"),
        "max_tokens": config.whole("max_position_embeddings"),
        "activation": config.activation("hidden_act", "hidden_activation"),
        "epsilon": config.number("layer_norm_eps", "norm_eps", default=1e-12),
        "num_labels": config.num_labels if config.is_classifier else 0, **changes,
    }  # fmt: skip


def _bert_names(layer: int) -> LayerNames:
    at = f"encoder.layer.{layer}"
    return LayerNames(
        query=f"{at}.attention.self.query", key=f"{at}.attention.self.key", value=f"{at}.attention.self.value",
        output=f"{at}.attention.output.dense", attention_norm=f"{at}.attention.output.LayerNorm",
        up=f"{at}.intermediate.dense", down=f"{at}.output.dense", feed_norm=f"{at}.output.LayerNorm",
    )  # fmt: skip


def _pooler_head(config: EncoderConfig) -> Head | None:
    """Return the head of BERT, which reads the pooler, if the checkpoint has a classification head."""
    return Head((("pooler.dense", "tanh"), ("classifier", ""))) if config.is_classifier else None


def _classifier_head(config: EncoderConfig) -> Head | None:
    """Return the head of RoBERTa, which has a dense layer, if the checkpoint has a classification head."""
    return Head((("classifier.dense", "tanh"), ("classifier.out_proj", ""))) if config.is_classifier else None


def _embeddings(config: EncoderConfig, *, has_types: bool) -> dict[str, Any]:
    config.require("position_embedding_type", "absolute")
    num_types = config.whole("type_vocab_size", default=0) if config.values.get("type_vocab_size") else 0
    return {
        "words": "embeddings.word_embeddings", "positions": "embeddings.position_embeddings",
        "num_positions": config.whole("max_position_embeddings"),
        "types": "embeddings.token_type_embeddings" if num_types else "", "num_types": num_types,
        "has_types": has_types and num_types > 1, "embedding_norm": "embeddings.LayerNorm",
    }  # fmt: skip


def _after_padding(config: EncoderConfig) -> dict[str, Any]:
    """Positions that begin after the padding id, which is not counted."""
    padding = config.values.get("pad_token_id")
    padding = 1 if padding is None else padding
    return {"padding_id": padding, "max_tokens": config.whole("max_position_embeddings") - padding - 1}


@family("bert")
def bert(config: EncoderConfig) -> EncoderSpec:
    config.require("is_decoder", False)
    head = _pooler_head(config)
    return EncoderSpec(
        **_sizes(config), **_embeddings(config, has_types=True), names=_bert_names, prefixes=("bert.",), head=head
    )


@family("roberta", "xlm-roberta", "camembert")
def roberta(config: EncoderConfig) -> EncoderSpec:
    if config.values.get("position_embedding_type") == "rotary":  # the first checkpoints of jina-embeddings-v3
        rotary: EncoderSpec = jina_v3(EncoderConfig({**config.values, "position_embedding_type": "absolute"}))
        return rotary
    head = _classifier_head(config)
    return EncoderSpec(
        **_sizes(config, **_after_padding(config)), **_embeddings(config, has_types=False), names=_bert_names,
        prefixes=("roberta.",), head=head,
    )  # fmt: skip


@family("electra")
def electra(config: EncoderConfig) -> EncoderSpec:
    width = config.whole("embedding_size")
    head = Head((("classifier.dense", "gelu"), ("classifier.out_proj", ""))) if config.is_classifier else None
    return EncoderSpec(
        **_sizes(config), **_embeddings(config, has_types=True), names=_bert_names, prefixes=("electra.",),
        embedding_width=width, head=head,
        embedding_projection="embeddings_project" if width != config.whole("hidden_size") else "",
    )  # fmt: skip


@family("albert")
def albert(config: EncoderConfig) -> EncoderSpec:
    config.require("num_hidden_groups", 1)
    config.require("inner_group_num", 1)

    def names(layer: int) -> LayerNames:
        at = "encoder.albert_layer_groups.0.albert_layers.0"  # all layers share their weights
        return LayerNames(
            query=f"{at}.attention.query", key=f"{at}.attention.key", value=f"{at}.attention.value",
            output=f"{at}.attention.dense", attention_norm=f"{at}.attention.LayerNorm",
            up=f"{at}.ffn", down=f"{at}.ffn_output", feed_norm=f"{at}.full_layer_layer_norm",
        )  # fmt: skip

    head = Head((("pooler", "tanh"), ("classifier", ""))) if config.is_classifier else None
    return EncoderSpec(
        **_sizes(config), **_embeddings(config, has_types=True), names=names, prefixes=("albert.",),
        embedding_width=config.whole("embedding_size"), embedding_projection="encoder.embedding_hidden_mapping_in",
        head=head,
    )  # fmt: skip


@family("distilbert")
def distilbert(config: EncoderConfig) -> EncoderSpec:
    config.require("sinusoidal_pos_embds", False)

    def names(layer: int) -> LayerNames:
        at = f"transformer.layer.{layer}"
        return LayerNames(
            query=f"{at}.attention.q_lin", key=f"{at}.attention.k_lin", value=f"{at}.attention.v_lin",
            output=f"{at}.attention.out_lin", attention_norm=f"{at}.sa_layer_norm", up=f"{at}.ffn.lin1",
            down=f"{at}.ffn.lin2", feed_norm=f"{at}.output_layer_norm",
        )  # fmt: skip

    hidden, heads = config.whole("dim", "hidden_size"), config.whole("n_heads", "num_attention_heads")
    head = Head((("pre_classifier", "relu"), ("classifier", ""))) if config.is_classifier else None
    longest = config.whole("max_position_embeddings")
    return EncoderSpec(
        model_type="distilbert", hidden_size=hidden, num_layers=config.whole("n_layers", "num_hidden_layers"),
        heads=heads, kv_heads=heads, head_size=hidden // heads, intermediate=config.whole("hidden_dim"),
        vocab_size=config.whole("vocab_size"), max_tokens=longest, activation=config.activation("activation"),
        words="embeddings.word_embeddings", positions="embeddings.position_embeddings", num_positions=longest,
        embedding_norm="embeddings.LayerNorm", names=names, prefixes=("distilbert.",), head=head,
        num_labels=config.num_labels if config.is_classifier else 0,
    )  # fmt: skip


@family("mpnet")
def mpnet(config: EncoderConfig) -> EncoderSpec:
    def names(layer: int) -> LayerNames:
        at = f"encoder.layer.{layer}"
        return LayerNames(
            query=f"{at}.attention.attn.q", key=f"{at}.attention.attn.k", value=f"{at}.attention.attn.v",
            output=f"{at}.attention.attn.o", attention_norm=f"{at}.attention.LayerNorm",
            up=f"{at}.intermediate.dense", down=f"{at}.output.dense", feed_norm=f"{at}.output.LayerNorm",
        )  # fmt: skip

    padding = {"padding_id": 1, "max_tokens": config.whole("max_position_embeddings") - 2}
    head = _classifier_head(config)
    buckets = config.whole("relative_attention_num_buckets", default=32)
    return EncoderSpec(
        **_sizes(config, **padding), **{**_embeddings(config, has_types=False), "types": "", "num_types": 0},
        names=names, prefixes=("mpnet.",), head=head,
        relative=RelativeBias("encoder.relative_attention_bias", buckets, 128),
    )  # fmt: skip


@family("deberta-v2")
def deberta_v2(config: EncoderConfig) -> EncoderSpec:
    def names(layer: int) -> LayerNames:
        at = f"encoder.layer.{layer}"
        return LayerNames(
            **{
                **vars(_bert_names(layer)), "query": f"{at}.attention.self.query_proj",
                "key": f"{at}.attention.self.key_proj", "value": f"{at}.attention.self.value_proj",
            }
        )  # fmt: skip

    config.require("conv_kernel_size", 0)
    config.require("relative_attention", True)
    kinds = config.values.get("pos_att_type") or []
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    longest, hidden = config.whole("max_position_embeddings"), config.whole("hidden_size")
    buckets, most = config.values.get("position_buckets", -1), config.values.get("max_relative_positions", -1)
    most = most if isinstance(most, int) and most > 0 else longest
    has_buckets = isinstance(buckets, int) and buckets > 0
    width = config.whole("embedding_size", default=hidden)
    found = {**_embeddings(config, has_types=True), "positions": ""}
    if config.values.get("position_biased_input", True):
        found["positions"] = "embeddings.position_embeddings"
    activation = config.activation("pooler_hidden_act", default="gelu")
    head = Head((("pooler.dense", activation), ("classifier", ""))) if config.is_classifier else None
    norms = str(config.values.get("norm_rel_ebd") or "none").split("|")
    sizes = _sizes(config)
    count = 1 + ("c2p" in kinds) + ("p2c" in kinds)
    return EncoderSpec(
        **{**sizes, "epsilon": config.number("layer_norm_eps", default=1e-7)}, **found, names=names,
        prefixes=("deberta.",), embedding_width=width,
        embedding_projection="embeddings.embed_proj" if width != hidden else "",
        scale=(sizes["head_size"] * count) ** -0.5, head=head,
        disentangled=Disentangled(
            "encoder.rel_embeddings", "encoder.LayerNorm" if "layer_norm" in norms else "",
            buckets if has_buckets else most, most if has_buckets else 0, "c2p" in kinds, "p2c" in kinds,
            not config.values.get("share_att_key", False),
        ),
    )  # fmt: skip


@family("nomic_bert")
def nomic_bert(config: EncoderConfig) -> EncoderSpec:
    def names(layer: int) -> LayerNames:
        at = f"encoder.layers.{layer}"
        return LayerNames(
            joined=f"{at}.attn.Wqkv", output=f"{at}.attn.out_proj", attention_norm=f"{at}.norm1",
            up=f"{at}.mlp.fc11", gate=f"{at}.mlp.fc12", down=f"{at}.mlp.fc2", feed_norm=f"{at}.norm2",
        )  # fmt: skip

    # The configuration of the first published checkpoints has the names of GPT-2.
    old = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
           "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
           "layer_norm_eps": "layer_norm_epsilon"}  # fmt: skip
    values = {**{new: config.values[name] for new, name in old.items() if name in config.values}, **config.values}
    config = EncoderConfig(values)
    for name, expected in (("rotary_emb_fraction", 1.0), ("prenorm", False), ("rotary_emb_interleaved", False)):
        config.require(name, expected)
    config.require("activation_function", "swiglu")
    sizes = _sizes(config, activation="silu")
    theta = config.theta("", "rotary_emb_base", "rope_theta", default=1000.0)
    return EncoderSpec(
        **sizes, **{**_embeddings(config, has_types=True), "positions": "", "embedding_norm": "emb_ln"}, names=names,
        thetas=(theta,) * sizes["num_layers"],
    )  # fmt: skip


@family("gte", "new")
def gte(config: EncoderConfig) -> EncoderSpec:
    """GTE: "new" in the first checkpoints, which have code of their own, and "gte" in transformers."""

    def names(layer: int) -> LayerNames:
        at = f"encoder.layer.{layer}"
        return LayerNames(
            joined=f"{at}.attention.qkv_proj", output=f"{at}.attention.o_proj", attention_norm=f"{at}.attn_ln",
            up_gate=f"{at}.mlp.up_gate_proj", down=f"{at}.mlp.down_proj", feed_norm=f"{at}.mlp_ln",
        )  # fmt: skip

    for name, expected in (
        ("position_embedding_type", "rope"), ("layer_norm_type", "layer_norm"), ("logn_attention_scale", False),
        ("pack_qkv", True),
    ):  # fmt: skip
        config.require(name, expected)
    sizes = _sizes(config)
    theta, factor = config.rotation("rope_theta", default=10000.0 if config.model_type == "new" else 160000.0)
    values = {**config.values, "position_embedding_type": "absolute"}
    embeddings = {**_embeddings(EncoderConfig(values), has_types=True), "positions": ""}
    head = _pooler_head(config)
    return EncoderSpec(
        **sizes, **embeddings, names=names, prefixes=("new.", "gte."), thetas=(theta,) * sizes["num_layers"],
        rotation_factor=factor, head=head,
    )  # fmt: skip


@family("jina_embeddings_v3")
def jina_v3(config: EncoderConfig) -> EncoderSpec:
    def names(layer: int) -> LayerNames:
        at = f"encoder.layers.{layer}"
        return LayerNames(
            joined=f"{at}.mixer.Wqkv", output=f"{at}.mixer.out_proj", attention_norm=f"{at}.norm1",
            up=f"{at}.mlp.fc1", down=f"{at}.mlp.fc2", feed_norm=f"{at}.norm2",
        )  # fmt: skip

    sizes = _sizes(config)
    theta, factor = config.rotation("rotary_emb_base", "rope_theta", default=20000.0)
    head = _classifier_head(config)
    return EncoderSpec(
        **sizes, **{**_embeddings(config, has_types=False), "positions": "", "embedding_norm": "emb_ln"}, names=names,
        prefixes=("roberta.",),
        thetas=(theta,) * sizes["num_layers"], rotation_factor=factor, head=head,
    )  # fmt: skip


@family("modernbert")
def modernbert(config: EncoderConfig) -> EncoderSpec:
    def names(layer: int) -> LayerNames:
        at = f"layers.{layer}"
        return LayerNames(
            joined=f"{at}.attn.Wqkv", output=f"{at}.attn.Wo", attention_norm=f"{at}.attn_norm" if layer else "",
            gate_up=f"{at}.mlp.Wi", down=f"{at}.mlp.Wo", feed_norm=f"{at}.mlp_norm",
        )  # fmt: skip

    sizes, every = _sizes(config), config.whole("global_attn_every_n_layers", default=3)
    window = config.whole("local_attention", default=128) // 2 + 1
    is_global = [layer % every == 0 for layer in range(sizes["num_layers"])]
    whole = config.theta("full_attention", "global_rope_theta", default=160000.0)
    local = config.theta("sliding_attention", "local_rope_theta", default=10000.0)
    head = None
    if config.is_classifier:
        config.require("classifier_activation", "gelu")
        pooling = str(config.values.get("classifier_pooling", "cls"))
        head = Head((("head.dense", "gelu"), ("classifier", "")), norm="head.norm", pooling=pooling)
    return EncoderSpec(
        **{**sizes, "epsilon": config.number("norm_eps", default=1e-5)}, words="embeddings.tok_embeddings",
        embedding_norm="embeddings.norm", names=names, prefixes=("model.",), pre_norm=True, final_norm="final_norm",
        thetas=tuple(whole if is_whole else local for is_whole in is_global),
        windows=tuple(None if is_whole else window for is_whole in is_global), head=head,
    )  # fmt: skip


@family("t5", "mt5")
def t5(config: EncoderConfig) -> EncoderSpec:
    projection = str(config.values.get("feed_forward_proj") or "relu")
    gated, name = projection.startswith("gated-"), projection.removeprefix("gated-")
    activation = "gelu_new" if projection == "gated-gelu" else name

    def names(layer: int) -> LayerNames:
        at, feed = f"encoder.block.{layer}.layer.0", f"encoder.block.{layer}.layer.1"
        dense = f"{feed}.DenseReluDense"
        return LayerNames(
            query=f"{at}.SelfAttention.q", key=f"{at}.SelfAttention.k", value=f"{at}.SelfAttention.v",
            output=f"{at}.SelfAttention.o", attention_norm=f"{at}.layer_norm",
            up=f"{dense}.wi_1" if gated else f"{dense}.wi", gate=f"{dense}.wi_0" if gated else "",
            down=f"{dense}.wo", feed_norm=f"{feed}.layer_norm",
        )  # fmt: skip

    heads = config.whole("num_heads")
    return EncoderSpec(
        model_type=config.model_type, hidden_size=config.whole("d_model"), num_layers=config.whole("num_layers"),
        heads=heads, kv_heads=heads, head_size=config.whole("d_kv"), intermediate=config.whole("d_ff"),
        vocab_size=config.whole("vocab_size"), max_tokens=config.whole("n_positions", default=512),
        activation=EncoderConfig({"act": activation}).activation("act"), words="shared", names=names, norm="rms",
        epsilon=config.number("layer_norm_epsilon", default=1e-6), pre_norm=True,
        final_norm="encoder.final_layer_norm", scale=1.0,
        relative=RelativeBias(
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
            config.whole("relative_attention_num_buckets", default=32),
            config.whole("relative_attention_max_distance", default=128),
        ),
    )  # fmt: skip


def _decoder_names(layer: int) -> LayerNames:
    at = f"layers.{layer}"
    return LayerNames(
        query=f"{at}.self_attn.q_proj", key=f"{at}.self_attn.k_proj", value=f"{at}.self_attn.v_proj",
        output=f"{at}.self_attn.o_proj", attention_norm=f"{at}.input_layernorm", gate=f"{at}.mlp.gate_proj",
        up=f"{at}.mlp.up_proj", down=f"{at}.mlp.down_proj", feed_norm=f"{at}.post_attention_layernorm",
    )  # fmt: skip


def _decoder_sizes(config: EncoderConfig) -> dict[str, Any]:
    heads = config.whole("num_attention_heads")
    return {
        **_sizes(config), "kv_heads": config.whole("num_key_value_heads", default=heads),
        "head_size": config.whole("head_dim", default=config.whole("hidden_size") // heads),
        "epsilon": config.number("rms_norm_eps", default=1e-6), "words": "embed_tokens", "norm": "rms",
        "pre_norm": True, "final_norm": "norm", "prefixes": ("model.",),
        "head": Head((("score", ""),), pooling="last") if config.is_classifier else None,
    }  # fmt: skip


def _windows(config: EncoderConfig) -> tuple[int | None, ...]:
    """Return the window of each layer, as transformers computes it; () if no layer has a window."""
    layers, window = config.whole("num_hidden_layers"), config.values.get("sliding_window")
    kinds = config.values.get("layer_types")
    if window is None or (config.model_type.startswith("qwen") and not config.values.get("use_sliding_window")):
        return ()
    window = config.whole("sliding_window")
    if not isinstance(kinds, list):
        first = config.whole("max_window_layers", default=28) if config.model_type.startswith("qwen") else 0
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    if len(kinds) != layers or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise ConfigError(
            f"config.json: layer_types is {kinds!r:.80}",
            f'a list of {layers} times "full_attention" or "sliding_attention" is expected',
            "correct the file",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@family("eurobert", "llama", "mistral", "qwen2")
def plain_decoder(config: EncoderConfig) -> EncoderSpec:
    sizes = _decoder_sizes(config)
    theta = config.theta("", "rope_theta", default=10000.0)
    windows = _windows(config) if config.model_type in ("mistral", "qwen2") else ()
    if config.model_type == "eurobert" and config.is_classifier:
        raise UnsupportedModelError(
            "config.json: the architecture is EuroBertForSequenceClassification",
            "only EuroBERT without a classification head can be built",
            "export this model with Optimum",
        )
    return EncoderSpec(
        **sizes, names=_decoder_names, thetas=(theta,) * sizes["num_layers"], windows=windows,
        causal=config.model_type != "eurobert",
    )  # fmt: skip


@family("qwen3")
def qwen3(config: EncoderConfig) -> EncoderSpec:
    def names(layer: int) -> LayerNames:
        at = f"layers.{layer}.self_attn"
        return LayerNames(**{**vars(_decoder_names(layer)), "query_norm": f"{at}.q_norm", "key_norm": f"{at}.k_norm"})

    sizes = _decoder_sizes(config)
    theta = config.theta("", "rope_theta", default=1000000.0)
    windows = _windows(config)
    return EncoderSpec(**sizes, names=names, thetas=(theta,) * sizes["num_layers"], windows=windows, causal=True)


@family("gemma3_text")
def gemma3(config: EncoderConfig) -> EncoderSpec:
    def names(layer: int) -> LayerNames:
        at = f"layers.{layer}"
        return LayerNames(
            **{
                **vars(_decoder_names(layer)), "query_norm": f"{at}.self_attn.q_norm",
                "key_norm": f"{at}.self_attn.k_norm", "attention_end": f"{at}.post_attention_layernorm",
                "feed_norm": f"{at}.pre_feedforward_layernorm", "feed_end": f"{at}.post_feedforward_layernorm",
            }
        )  # fmt: skip

    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.require(name)
    sizes = _decoder_sizes(config)
    layers, both = sizes["num_layers"], bool(config.values.get("use_bidirectional_attention"))
    kinds = config.values.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers:
        every = config.whole("sliding_window_pattern", "_sliding_window_pattern", default=6)
        kinds = ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(layers)]
    window = config.whole("sliding_window", default=512)
    # With attention in both directions, the number is of the tokens on both sides.
    visible = window // 2 + 1 if both else window
    whole = config.theta("full_attention", "rope_theta", default=1000000.0)
    local = config.theta("sliding_attention", "rope_local_base_freq", default=10000.0)
    is_whole = [kind == "full_attention" for kind in kinds]
    return EncoderSpec(
        **sizes, names=names, norm_offset=1.0, embedding_scale=sizes["hidden_size"] ** 0.5, causal=not both,
        thetas=tuple(whole if full else local for full in is_whole),
        windows=tuple(None if full else visible for full in is_whole),
        scale=config.number("query_pre_attn_scalar", default=256.0) ** -0.5,
    )  # fmt: skip


_DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
